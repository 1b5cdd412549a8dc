"""Read config.json of a drafter that reads a target's hidden states as a HeadSpec: DFlash (arXiv
2602.06036), DSpark and EAGLE-3 (arXiv 2503.01840), in their authors' layout and in that of the
speculators library.

Not here: the sizes of the layers (hf_config.py), tensors (checkpoint.py), the computation
(models/heads.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from bass_cli.errors import UserError
from bass_cli.formats.config_keys import HARMLESS, name_keys, refuse_others
from bass_cli.formats.config_values import Values, known
from bass_cli.formats.hf_config import mask_of, notes_of_config, spec_of_config
from bass_cli.models.spec import HeadSpec, Spec
from bass_cli.reading import shown

# the kind of each class that a config may name; speculators configs name the kind itself
_CLASSES = {
    "DFlashDraftModel": "dflash",
    "Qwen3DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "Qwen3Eagle3Model": "eagle3",
}
_KINDS = ("dflash", "dspark", "eagle3")
# Other keys that change the computation, with the only value that is supported.
_ONLY: dict[str, tuple[Any, ...]] = {
    "use_swa": (False,),
    "attention_sink_bias": (False,),
    "attn_output_gate": (False,),
    "logit_scale": (1.0,),
    "final_logit_softcapping": (),
    "embedding_scale": (1.0,),
}
_ONLY_OF_BLOCKS: dict[str, tuple[Any, ...]] = _ONLY | {
    "markov_head_type": ("vanilla",),
    "causal": (False,),
    "is_causal": (False,),
    "hybrid_context_fusion": (False,),
    "selector_top_k": (0,),
    "selector_rank": (0,),
    "conv_kernel_size": (0,),
}
_ONLY_OF_CHAINS: dict[str, tuple[Any, ...]] = _ONLY | {
    "num_hidden_layers": (1,),  # keys of a second layer would need the attention of the first
    "norm_before_fc": (False,),
    "fc_norm": (False,),
    "norm_output": (False,),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_mtp_layernorm": (False,),
    "parallel_drafting": (False,),
}
# Keys that are used, or that do not change the computation.
_KEYS = (
    "aux_hidden_state_layer_ids block_size confidence_head_with_markov dflash_config "
    "draft_vocab_size dspark_bonus_anchor dspark_config eagle_aux_hidden_state_layer_ids "
    "eagle_config enable_confidence_head has_no_defaults_at_init markov_rank mask_token_id "
    "norm_before_residual num_target_layers sample_from_anchor speculators_config "
    "speculators_model_type speculators_version target_hidden_size target_layer_ids "
    "transformer_layer_config"
)
_OWN = frozenset(_KEYS.split()) | _ONLY_OF_BLOCKS.keys() | _ONLY_OF_CHAINS.keys()
_NESTED = ("dflash_config", "dspark_config", "eagle_config")
# A key of layer numbers, the mapping that may have it, and its number of the first layer's output
_Candidate = tuple[str, Mapping[str, Any], int]
_LONGEST = 64  # maximum places of a block, more than bass drafts in a round


def head_of_config(config: Mapping[str, Any], target: Spec, *, place: str) -> HeadSpec:
    """Return the HeadSpec of a parsed config.json. The tensors decide whether the drafter has its
    own embedding and head.

    Meanings and defaults:

    - `target_layer_ids` count the target's layers from 0 and mean their outputs.
      `aux_hidden_state_layer_ids` (speculators) number hidden states: 2 is the output of layer 1.
    - A block is the row's last token (the anchor), then masks. A DFlash drafts at each mask the
      token of that place, `block_size` - 1 in all. A DSpark drafts at each place the token after
      it, `block_size` in all. `sample_from_anchor` switches either to the second rule, and
      `dspark_bonus_anchor` to the first. A DSpark with `markov_rank` 0 is DeepSpec's DFlash.
    - The layers' own inputs are normed. The context feature has only its norm after `fc`.
    - An EAGLE-3 reads the outputs of layers 1, n/2 - 1 and n - 4 of n. Inside `eagle_config` the
      `eagle_aux_hidden_state_layer_ids` count like `target_layer_ids`, outside like speculators'.

    Raises:
        UserError: a value is unknown or does not fit the target.
    """
    kind = _kind(config, place)
    values = Values(config, {}, place)
    if kind == "eagle3":
        return _chain(values, target)
    nested = values.mapping("dspark_config") | values.mapping("dflash_config")
    own = Values({**nested, **config}, {}, place)
    refuse_others(own.values, _ONLY_OF_BLOCKS, place=place)
    body = _body(config, target, place)
    block, first = own.count("block_size"), 0 if _from_anchor(own, kind) else 1
    if not first < block <= _LONGEST:
        raise UserError(
            f'{place}: key "block_size": from {first + 1} to {_LONGEST} places are supported, not '
            f"{block}"
        )
    key = "target_layer_ids"
    candidates: list[_Candidate] = [(key, nested, 0), (key, config, 0)]
    if "speculators_model_type" in config:
        key = "aux_hidden_state_layer_ids"
        candidates.append((key, config, 1))
    aux_layers = _aux_layers(candidates, target.layers, place)
    if aux_layers is None:
        raise UserError(f'{place}: the key "{key}" is missing')
    return HeadSpec(
        kind=kind,
        body=body,
        aux_layers=aux_layers,
        block=block,
        first=first,
        mask=mask_of(own.values, vocab=body.vocab, place=place, keys=("mask_token_id",)),
        rank=_rank(own, kind),
    )


def _chain(values: Values, target: Spec) -> HeadSpec:
    """Return the HeadSpec of an EAGLE-3."""
    config, place, nested = values.values, values.place, values.mapping("eagle_config")
    layers = {**config, **values.mapping("transformer_layer_config"), **nested}
    refuse_others(layers, _ONLY_OF_CHAINS, place=place)
    body = _body(config, target, place)
    _check_target("target_hidden_size", config.get("target_hidden_size"), target.width, place)
    key = "eagle_aux_hidden_state_layer_ids"
    aux_layers = _aux_layers(
        [("target_layer_ids", config, 0), (key, nested, 0), (key, config, 1)], target.layers, place
    )
    if aux_layers is None:  # those of the paper's code
        aux_layers = (1, target.layers // 2 - 1, target.layers - 4)
        if not aux_layers[0] < aux_layers[1] < aux_layers[2]:
            raise UserError(
                f'{place}: the key "{key}" is missing, and a target of {target.layers} layers has '
                "too few for the default"
            )
    return HeadSpec("eagle3", body, aux_layers, norms_residual=values.flag("norm_before_residual"))


def _kind(config: Mapping[str, Any], place: str) -> str:
    key = "speculators_model_type"
    word = config.get(key)
    if word is None:
        key = "architectures"
        classes = config.get(key)
        if not isinstance(classes, list) or not classes:
            raise UserError(
                f'{place}: the key "{key}" (or speculators_model_type) is missing; it names the '
                "kind of a drafter that reads hidden states; to use an ordinary draft model, leave "
                'out "heads:"'
            )
        known(classes[0], tuple(_CLASSES), place, f'key "{key}": the drafter')
        return _CLASSES[classes[0]]
    known(word, _KINDS, place, f'key "{key}": the drafter')
    return str(word)


def _body(config: Mapping[str, Any], target: Spec, place: str) -> Spec:
    """Return the Spec of its layers. Check that they can run as a block on the target's
    embedding."""
    layers, place = _layers(config, place)
    body = replace(spec_of_config(layers, place=place), tied=False)
    _check_target("hidden_size", body.width, target.width, place)
    _check_target("vocab_size", body.vocab, target.vocab, place)
    plain = body.norm.kind == "rms" and not body.norm.sandwich and not body.parallel
    plain = plain and body.unusual is None
    if not plain or body.rope is None or body.local_rope is not None or body.embed_scale != 1.0:
        raise UserError(
            f'{place}: key "model_type": layers like those of "{body.family}" are not supported in '
            "such a drafter; known: llama, qwen2, qwen3"
        )
    if any(body.windows):
        raise UserError(f'{place}: key "sliding_window": layers with a window are not supported')
    if target.embed_scale != 1.0:
        raise UserError(
            f'{place}: the target\'s family "{target.family}" scales its embedding; drafters that '
            "read hidden states are not supported for it"
        )
    return body


def _check_target(key: str, ours: Any, theirs: int, place: str) -> None:
    if ours not in (None, theirs):
        raise UserError(
            f'{place}: key "{key}": the drafter was trained for a target of {shown(ours)}, and '
            f"this one has {theirs}"
        )


def _layers(config: Mapping[str, Any], place: str) -> tuple[dict[str, Any], str]:
    """Return the configuration of its layers, without the drafter's keys, and its place for
    errors."""
    if "transformer_layer_config" not in config:
        own = _OWN - {"num_hidden_layers"}
        return {key: value for key, value in config.items() if key not in own}, place
    layers = Values(config, {}, place).mapping("transformer_layer_config")
    return layers, f"{place}: transformer_layer_config"


def notes_of_head(config: Mapping[str, Any], *, place: str) -> tuple[str, ...]:
    """Return notes about keys that `head_of_config` did not use. The folder's own code (auto_map)
    needs none: bass implements it."""
    layers, inner = _layers(config, place)
    layers.pop("auto_map", None)
    found = {
        f"{name}.{key}": value
        for name in _NESTED
        for key, value in Values(config, {}, place).mapping(name).items()
        if key not in _OWN
    }
    if inner != place:
        known_keys = _OWN | HARMLESS | {"auto_map"}
        found |= {key: value for key, value in config.items() if key not in known_keys}
    return notes_of_config(layers, place=inner) + name_keys(found, place)


def tokens_of(config: Mapping[str, Any], vocab: int, *, place: str) -> int | None:
    """Return how many of the target's `vocab` tokens its head has; None for all."""
    key = "draft_vocab_size"
    if config.get(key) is None:
        return None
    count = Values(config, {}, place).count(key)
    if count > vocab:
        raise UserError(f'{place}: key "{key}": the target has {vocab} tokens, not {count}')
    return count if count < vocab else None


def _from_anchor(values: Values, kind: str) -> bool:
    """Return whether the anchor's place gives a draft."""
    found = {
        key: values.flag(key) == meaning
        for key, meaning in (("sample_from_anchor", True), ("dspark_bonus_anchor", False))
        if values.values.get(key) is not None
    }
    if len(set(found.values())) > 1:
        raise UserError(f'{values.place}: keys "{", ".join(found)}" contradict each other')
    return next(iter(found.values()), kind == "dspark")


def _aux_layers(
    candidates: Iterable[_Candidate], layers: int, place: str
) -> tuple[int, ...] | None:
    """Return the layers whose outputs it reads, from 0, by the first key that is set."""
    for key, source, shift in candidates:
        if (found := source.get(key)) is None:
            continue
        if (
            not isinstance(found, list)
            or not found
            or not all(type(one) is int and shift <= one < layers + shift for one in found)
            or sorted(set(found)) != found
        ):
            raise UserError(
                f'{place}: key "{key}": rising numbers of the target\'s layers, from {shift} to '
                f"{layers - 1 + shift}, are needed, not {shown(found)}"
            )
        return tuple(one - shift for one in found)
    return None


def _rank(values: Values, kind: str) -> int:
    rank = values.values.get("markov_rank", 0 if kind == "dflash" else None)
    if rank == 0 and type(rank) is int:
        return 0
    rank = values.count("markov_rank")
    if kind == "dflash":
        raise UserError(f'{values.place}: key "markov_rank": {rank} is not supported in a DFlash')
    return rank
