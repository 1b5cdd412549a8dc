"""Open drafters that read a target's hidden states: DFlash (arXiv 2602.06036), DSpark and EAGLE-3
(arXiv 2503.01840) in folders of their own, and the multi-token-prediction layer of a target's own
checkpoint, the tensors `mtp.*`.

config.json is read in the authors' layout and in that of the speculators library. Not here: the
sizes of the layers (hf_config.py), the computation (models/heads.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bass_cli.errors import UserError
from bass_cli.formats.arrangement import is_stacked, unstack
from bass_cli.formats.checkpoint import Checkpoint, Piece, assign, without_prefix
from bass_cli.formats.compound import Stored, content
from bass_cli.formats.config_keys import HARMLESS, Values, name_keys, refuse_others
from bass_cli.formats.gguf_config import architecture_of
from bass_cli.formats.gguf_tensors import fitted, prediction_slots, split_entries
from bass_cli.formats.hf_config import mask_of, notes_of_config, spec_of_config
from bass_cli.formats.quantised_config import read_joined
from bass_cli.formats.sources import read_json
from bass_cli.formats.tensor_files import Entry, read_gguf
from bass_cli.formats.text_part import bare_name, text_config
from bass_cli.models import families
from bass_cli.models.families import FAMILIES, Slot
from bass_cli.models.spec import AnySpec, HeadSpec, Spec, head_parameters, prediction_layer
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
    **dict.fromkeys(("use_swa", "attention_sink_bias", "attn_output_gate"), (False,)),
    **dict.fromkeys(("logit_scale", "embedding_scale"), (1.0,)),
    "final_logit_softcapping": (),
}
_ONLY_OF_BLOCKS: dict[str, tuple[Any, ...]] = _ONLY | {
    **dict.fromkeys(("causal", "is_causal", "hybrid_context_fusion"), (False,)),
    **dict.fromkeys(("selector_top_k", "selector_rank", "conv_kernel_size"), (0,)),
    "markov_head_type": ("vanilla",),
}
_ONLY_OF_CHAINS: dict[str, tuple[Any, ...]] = _ONLY | {
    "num_hidden_layers": (1,),  # keys of a second layer would need the attention of the first
    **dict.fromkeys(("norm_before_fc", "fc_norm", "norm_output"), (False,)),
    **dict.fromkeys(("use_mtp_layernorm", "parallel_drafting"), (False,)),
    **dict.fromkeys(("use_aux_hidden_state", "use_input_layernorm_in_first_layer"), (True,)),
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
# A drafter's tensors besides those of its layers, and its tensors that bass does not use: the
# confidence head, copies for training, maps between vocabularies.
_HEAD_TENSORS = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "context_norm.weight",
    "markov_head.markov_w1.weight": "markov.before.weight",
    "markov_head.markov_w2.weight": "markov.after.weight",
}
_CHAIN_TENSORS = {"fc.weight": "fc.weight", "layers.0.hidden_norm.weight": "context_norm.weight"}
_HEAD_IGNORED = (r"^confidence_head\.", r"^verifier_(norm|lm_head)\.", r"^(d2t|t2d)$")
_INT64 = ("I64", "torch.int64")  # torch's type by its names in the two formats

# The multi-token-prediction layer of a target's own checkpoint
_MTP = "mtp."
_MTP_IGNORED = (r"^(?!mtp\.)",)  # the target's own tensors
# Its tensors besides those of its layer. Norms store their weight minus one, as the target's.
_MTP_TENSORS = {
    "mtp.fc.weight": ("fc.weight", ""),
    "mtp.pre_fc_norm_embedding.weight": ("token_norm.weight", "plus_one"),
    "mtp.pre_fc_norm_hidden.weight": ("context_norm.weight", "plus_one"),
}
_INSTEAD = "use another draft, such as lookup"
_FIELD = "`pair.draft` mtp"


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
    values = Values(config, place)
    kind = _kind(values)
    if kind == "eagle3":
        return _chain(values, target)
    nested = values.mapping("dspark_config") | values.mapping("dflash_config")
    own = Values({**nested, **config}, place)
    refuse_others(own.values, _ONLY_OF_BLOCKS, place=place)
    body = _body(values, target)
    block, first = own.count("block_size"), 0 if _from_anchor(own, kind) else 1
    if not first < block <= _LONGEST:
        places = f"from {first + 1} to {_LONGEST} places are supported, not {block}"
        raise own.error("block_size", places)
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
    body = _body(values, target)
    _check_target(values, "target_hidden_size", values.get("target_hidden_size"), target.width)
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


def _kind(values: Values) -> str:
    if values.get("speculators_model_type") is not None:
        return values.known("speculators_model_type", _KINDS, "the drafter")
    classes = values.get("architectures")
    if not isinstance(classes, list) or not classes:
        raise UserError(
            f'{values.place}: the key "architectures" (or speculators_model_type) is missing; it '
            "names the kind of a drafter that reads hidden states; to use an ordinary draft model, "
            'leave out "heads:"'
        )
    first = Values({"architectures": classes[0]}, values.place)
    return _CLASSES[first.known("architectures", _CLASSES, "the drafter")]


def _body(values: Values, target: Spec) -> Spec:
    """Return the Spec of its layers. Check that they can run as a block on the target's
    embedding."""
    layers = _layers(values)
    body = replace(spec_of_config(layers.values, place=layers.place), tied=False)
    _check_target(layers, "hidden_size", body.width, target.width)
    _check_target(layers, "vocab_size", body.vocab, target.vocab)
    plain = body.norm.kind == "rms" and not body.norm.sandwich and not body.parallel
    plain = plain and body.unusual is None
    if not plain or body.rope is None or body.local_rope is not None or body.embed_scale != 1.0:
        raise layers.error(
            "model_type",
            f'layers like those of "{body.family}" are not supported in such a drafter; known: '
            "llama, qwen2, qwen3",
        )
    if any(body.windows):
        raise layers.error("sliding_window", "layers with a window are not supported")
    if target.embed_scale != 1.0:
        raise UserError(
            f'{layers.place}: the target\'s family "{target.family}" scales its embedding; '
            "drafters that read hidden states are not supported for it"
        )
    return body


def _check_target(values: Values, key: str, ours: Any, theirs: int) -> None:
    if ours not in (None, theirs):
        trained = f"the drafter was trained for a target of {shown(ours)}"
        raise values.error(key, f"{trained}, and this one has {theirs}")


def _layers(values: Values) -> Values:
    """Return the configuration of its layers, without the drafter's keys."""
    if "transformer_layer_config" not in values.values:
        own = _OWN - {"num_hidden_layers"}
        found = {key: value for key, value in values.values.items() if key not in own}
        return Values(found, values.place)
    layers = values.mapping("transformer_layer_config")
    return Values(layers, f"{values.place}: transformer_layer_config")


def notes_of_head(config: Mapping[str, Any], *, place: str) -> tuple[str, ...]:
    """Return notes about keys that `head_of_config` did not use. The folder's own code (auto_map)
    needs none: bass implements it."""
    values = Values(config, place)
    layers = _layers(values)
    found = {
        f"{name}.{key}": value
        for name in _NESTED
        for key, value in values.mapping(name).items()
        if key not in _OWN
    }
    if layers.place != place:
        known = _OWN | HARMLESS | {"auto_map"}
        found |= {key: value for key, value in config.items() if key not in known}
    inner = {key: value for key, value in layers.values.items() if key != "auto_map"}
    return notes_of_config(inner, place=layers.place) + name_keys(found, place)


def _tokens_of(config: Mapping[str, Any], vocab: int, *, place: str) -> int | None:
    """Return how many of the target's `vocab` tokens its head has; None for all."""
    values = Values(config, place)
    count = values.count("draft_vocab_size", vocab)
    if count > vocab:
        raise values.error("draft_vocab_size", f"the target has {vocab} tokens, not {count}")
    return count if count < vocab else None


def _from_anchor(values: Values, kind: str) -> bool:
    """Return whether the anchor's place gives a draft."""
    found = {
        key: values.flag(key) == meaning
        for key, meaning in (("sample_from_anchor", True), ("dspark_bonus_anchor", False))
        if values.get(key) is not None
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
            numbers = f"from {shift} to {layers - 1 + shift}"
            needed = f"rising numbers of the target's layers, {numbers}, are needed"
            raise Values(source, place).error(key, f"{needed}, not {shown(found)}")
        return tuple(one - shift for one in found)
    return None


def _rank(values: Values, kind: str) -> int:
    rank = values.values.get("markov_rank", 0 if kind == "dflash" else None)
    if rank == 0 and type(rank) is int:
        return 0
    rank = values.count("markov_rank")
    if kind == "dflash":
        raise values.error("markov_rank", f"{rank} is not supported in a DFlash")
    return rank


# Drafters in folders of their own


def open_head(path: Path, target: Spec) -> Checkpoint:
    """Read and check the headers of a folder with a drafter that reads this target's hidden states.

    Raises:
        UserError: names the fault.
    """
    if not path.is_dir():
        raise UserError(f"{path}: a drafter that reads hidden states is a folder with config.json")
    place = path / "config.json"
    config = read_json(place)
    head = head_of_config(config, target, place=str(place))
    count = _tokens_of(config, target.vocab, place=str(place))
    family = FAMILIES[head.body.family]
    joined = read_joined(path, config)
    entries = {name.removeprefix(family.prefix): one for name, one in joined.entries.items()}
    slots = families.slots(head.body, family.tensors)
    own = {slots[name].name for name in entries if name in slots}
    # with a smaller vocabulary it cannot use the target's head
    head = replace(
        head,
        embeds="embed.weight" in own,
        heads="head.weight" in own or count is not None,
        ids=None if count is None else _draft_ids(entries, count, target.vocab, path),
    )
    shapes = head_parameters(head)
    slots = {
        name: slot._replace(rows=shapes[slot.name][0]) if slot.name == "head.weight" else slot
        for name, slot in slots.items()
        if slot.name in shapes
    }
    slots |= {
        theirs: Slot(ours, 0, shapes[ours][0])
        for theirs, ours in (_HEAD_TENSORS if head.block else _CHAIN_TENSORS).items()
        if ours in shapes
    }
    if not head.block and any(name.startswith("midlayer.") for name in entries):
        slots = {name.replace("layers.0.", "midlayer."): slot for name, slot in slots.items()}
    ignored = families.IGNORED + _HEAD_IGNORED
    return Checkpoint(
        path,
        head.body,
        assign(head.body, slots, entries, path, ignored, shapes),
        head=head,
        notes=(*notes_of_head(config, place=str(place)), *joined.notes),
        names=slots,
        prefixes=(family.prefix,),
        ignored=ignored,
    )


def _draft_ids(
    entries: Mapping[str, Stored], count: int, vocab: int, path: Path
) -> tuple[int, ...]:
    """Return the target's ids of a drafter's tokens. The tensor `d2t` holds target id minus drafter
    id."""
    entry = entries.get("d2t")
    if not isinstance(entry, Entry):
        raise UserError(
            f'{path}: tensor "d2t" is missing; it maps the {count} tokens of the drafter to the '
            "target's ids"
        )
    if entry.dtype not in _INT64 or entry.shape != (count,):
        raise UserError(
            f'{entry.file}: tensor "d2t": [{count}] of type I64 is needed, not '
            f"{list(entry.shape)} of type {entry.dtype}"
        )
    ids = content(entry) + torch.arange(count)
    if ids.min() < 0 or ids.max() >= vocab or len(ids.unique()) < count:
        raise UserError(
            f'{entry.file}: tensor "d2t" does not give {count} different ids below {vocab}'
        )
    return tuple(ids.tolist())


# The multi-token-prediction layer of a target


class NoLayerError(UserError):
    """The target's checkpoint has no multi-token-prediction layer that could be read."""


def open_mtp(target: Checkpoint) -> Checkpoint:
    """Read and check the headers of the multi-token-prediction layer of an opened target.

    It has one layer like the target's layers with attention, and uses the target's embedding and
    head. Its input is the output of the target's final norm.

    Raises:
        NoLayerError: the checkpoint has no such layer, or files or a family for which it is not
            read.
        UserError: the layer is damaged or not supported.
    """
    path, spec = target.path, target.spec
    known = tuple(name for name, family in FAMILIES.items() if family.recurrent)
    if isinstance(spec, AnySpec) or spec.family not in known:
        raise NoLayerError(
            f"{path}: {_FIELD}: the layer is read for native models of the families "
            f"{', '.join(known)}, not for {spec.family}; {_INSTEAD}"
        )
    if not path.is_dir():
        return _open_in_file(target)
    place = path / "config.json"
    text, inner = text_config(read_json(place), place=str(place))
    head = prediction_layer(spec)
    shapes, slots = head_parameters(head), _mtp_slots(head)
    joined = read_joined(
        path,
        text,
        has_slot=lambda name: bare_name(name, target.prefixes) in slots or is_stacked(name),
    )
    entries = {
        name: entry
        for name, entry in without_prefix(joined.entries, target.prefixes, path).items()
        if name.startswith(_MTP)
    }
    if not entries:
        raise NoLayerError(
            f"{path}: {_FIELD}: the checkpoint has no multi-token-prediction layer (tensors "
            f'"{_MTP}*"); {_INSTEAD}'
        )
    _check_keys(Values(text, inner))
    if spec.experts is not None:
        entries = unstack(entries, spec.experts.total, halves=True)
    return _opened(target, head, assign(head.body, slots, entries, path, (), shapes), joined.notes)


def _opened(
    target: Checkpoint, head: HeadSpec, pieces: tuple[Piece, ...], notes: tuple[str, ...] = ()
) -> Checkpoint:
    return Checkpoint(
        target.path,
        head.body,
        pieces,
        head=head,
        notes=notes,
        names=_mtp_slots(head),
        prefixes=target.prefixes,
        ignored=_MTP_IGNORED,
    )


def _open_in_file(target: Checkpoint) -> Checkpoint:
    """Open the layer in a GGUF file, which is its last one."""
    path, head, layer = target.path, prediction_layer(target.spec), target.spec.layers
    metadata, entries, _ = read_gguf(path)
    key = f"{metadata['general.architecture']}.nextn_predict_layers"
    if not metadata.get(key):
        raise NoLayerError(
            f'{path}: {_FIELD}: the file has no multi-token-prediction layer (key "{key}"); '
            f"{_INSTEAD}"
        )
    if metadata[key] != 1:
        raise UserError(
            f'{path}: key "{key}": {_FIELD} supports 1 only, not {shown(metadata[key])}; {_INSTEAD}'
        )
    kind = fitted(architecture_of(metadata, entries, place=str(path)), entries)
    experts = 0 if target.spec.experts is None else target.spec.experts.total
    own = {
        name: entry
        for name, entry in split_entries(entries, experts).items()
        if name.startswith(f"blk.{layer}.")
    }
    slots = prediction_slots(kind, head, layer)
    return _opened(target, head, assign(head.body, slots, own, path, (), head_parameters(head)))


def _check_keys(values: Values) -> None:
    """Check the keys of config.json that describe the layer."""
    for key, supported in (
        ("mtp_num_hidden_layers", (None, 0, 1)),
        ("mtp_use_dedicated_embeddings", (None, False)),
    ):
        if (found := values.get(key)) not in supported:
            only = f"{_FIELD} supports {supported[-1]} only, not {shown(found)}"
            raise values.error(key, f"{only}; {_INSTEAD}")


def _mtp_slots(head: HeadSpec) -> dict[str, Slot]:
    """Return the published names of its tensors, without the checkpoint's prefix."""
    shapes = head_parameters(head)
    layers = families.slots(head.body, FAMILIES[head.body.family].tensors)
    found = {f"{_MTP}{name}": slot for name, slot in layers.items() if slot.name in shapes}
    return found | {
        theirs: Slot(ours, 0, shapes[ours][0], how) for theirs, (ours, how) in _MTP_TENSORS.items()
    }
