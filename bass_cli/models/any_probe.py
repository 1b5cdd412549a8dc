"""The shape of a model whose layers transformers runs, found without weights: a pass over tensors
that have shapes only (the meta device).

The pass records each call of attention: its heads, its window, and whether it reads the keys of an
earlier layer. What our attention cannot reproduce is refused here, with the reason. Not here: the
decoder itself, and the check of its logits after loading (any_model.py).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bass_cli.errors import UserError, first_of
from bass_cli.models.spec import AnySpec, AttentionCall, Norm
from bass_cli.reading import shown

ATTENTION = "bass"  # the name of our attention in transformers' AttentionInterface
_PROBE = "bass_probe"  # the same attention with masks that describe themselves
_KINDS = ("full_attention", "sliding_attention")  # of layers that only attend
# The key with the length beyond which LongRoPE depends on the longest sequence of a batch.
_ORIGINAL = "original_max_position_embeddings"
# Arguments of attention besides queries, keys, values and mask that change nothing or are used.
_USED = {"scaling", "sliding_window", "softcap", "s_aux", "bass"}
_HARMLESS = {
    "dropout",
    "position_ids",
    "cache_position",
    "position_embeddings",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "logits_to_keep",
    "is_causal",
    "shared_kv_states",
}
# The text part of a multimodal checkpoint: its names of tensors, and those of a language model.
_TEXT_NAMES = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
_REMEDY = "docs/reference/models.md lists the architectures that run"
_OTHER = "attend without transformers' AttentionInterface"
_ROWS, _TOKENS = 1, 2  # of the pass over shapes


class RefusedError(Exception):
    """A reason why our attention cannot run a model."""


class Opened(NamedTuple):
    """A configuration of transformers, and the renaming of tensors if it is a text part."""

    config: Any
    names: dict[str, str] | None


def is_known(model_type: Any) -> bool:
    """Return whether this version of transformers has a language model of this type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return isinstance(model_type, str) and model_type in CONFIG_MAPPING_NAMES


def open_config(path: Path, config: Mapping[str, Any]) -> Opened:
    """Return transformers' configuration of a folder, whose config.json is `config`.

    Raises:
        UserError: transformers has no such language model, or its values are wrong.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    place, name = path / "config.json", config.get("model_type")
    if not is_known(name):
        raise UserError(f"{place}: {_unknown(config)}")
    with quiet():
        try:
            found = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # each configuration checks its values in its own way
            raise UserError(f"{place}: transformers refuses it: {_line(error)}") from None
    text = found.get_text_config(decoder=True)
    if hasattr(text, "quantization_config"):
        del text.quantization_config  # the weights are dequantised before transformers has them
    names = None
    if text is not found:  # either part of config.json may say that the head is the embedding
        names, text.tie_word_embeddings = _TEXT_NAMES, _is_tied(found) or _is_tied(text)
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f'{place}: key "model_type": transformers has no language model for {shown(name)}'
        )
    return Opened(text, names)


def _is_tied(config: Any) -> bool:
    return bool(getattr(config, "tie_word_embeddings", False))


def _unknown(config: Mapping[str, Any]) -> str:
    """Return why there is no code for a configuration."""
    import transformers

    name = f'key "model_type": {shown(config.get("model_type"))}'
    if config.get("auto_map"):
        return f"{name}: its code is a part of the checkpoint (auto_map), which bass never runs"
    return f"{name} is unknown to bass and to transformers {transformers.__version__}; {_REMEDY}"


def spec_of_model(path: Path, config: Mapping[str, Any]) -> AnySpec:
    """Return the shape of the model in a folder, from its config.json alone.

    Raises:
        UserError: bass cannot run it through transformers; it says why.
    """
    opened = open_config(path, config)
    try:
        return probe(opened.config)
    except RefusedError as error:
        raise UserError(f"{path / 'config.json'}: {error}; {_REMEDY}") from None


def probe(config: Any) -> AnySpec:
    """Return the shape of the model that transformers makes of a configuration.

    Raises:
        RefusedError: our attention cannot run it.
    """
    _check_config(config)
    with quiet():
        model = _hollow(config)
        base = base_of(model)
        layers = layers_of(base, config)
        _check_modules(base, layers)
        kept = _record(model, layers)
    rows = model.get_output_embeddings()
    if rows is None:
        raise RefusedError(_cannot(config, "it has no output embedding"))
    calls, tuples = kept
    heads = int(config.num_attention_heads)
    windows = {call.layer: call.window for call in calls}
    return AnySpec(
        family=str(config.model_type),
        layers=len(layers),
        width=int(config.hidden_size),
        heads=heads,
        kv_heads=max(call.kv_heads for call in calls),
        head_size=max(call.size for call in calls),
        inner=_inner(config),
        vocab=len(rows.weight),
        context=_context(config),
        norm=Norm("rms", 1e-6),
        activation="silu",
        gated=True,
        rope=None,
        windows=tuple(windows.get(layer, 0) for layer in range(len(layers))),
        query_scale=1.0,
        tied=rows.weight is model.get_input_embeddings().weight,
        weights=tuple((name, tuple(one.shape)) for name, one in model.named_parameters()),
        calls=calls,
        tuples=tuples,
    )


def _cannot(config: Any, why: str) -> str:
    return f'key "model_type": "{config.model_type}" cannot run through transformers: {why}'


def _context(config: Any) -> int:
    """Return the maximum number of positions at which results do not depend on the batch."""
    context = int(config.max_position_embeddings)
    for rope in _ropes(config):
        if rope.get("rope_type") == "longrope":
            limit = rope.get(_ORIGINAL) or getattr(config, _ORIGINAL, None)
            context = min(context, int(limit or context))
    return context


def context_note(spec: AnySpec, config: Mapping[str, Any]) -> str | None:
    """Return a note if the context is shorter than config.json says."""
    stated = (config.get("text_config") or config).get("max_position_embeddings")
    if stated is None or spec.context >= int(stated):
        return None
    return (
        f"the context is {spec.context} tokens, not {stated}: beyond that, the rotary embedding "
        "depends on the longest sequence of a batch"
    )


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    """Return the rotary embeddings of a configuration, one or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [one for one in rope.values() if isinstance(one, Mapping)]
    return parts or [rope]


def _inner(config: Any) -> int:
    """Return the inner size of a token's feed-forward; of a mixture, that of its experts."""
    dense = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    dense = max(dense) if isinstance(dense, (list, tuple)) else dense
    each = getattr(config, "moe_intermediate_size", None) or dense
    experts = getattr(config, "num_experts_per_tok", None) or 1
    return max(int(dense), int(each) * int(experts) if isinstance(each, int) else 0)


def _check_config(config: Any) -> None:
    """Raise RefusedError for what config.json tells."""
    if getattr(config, "is_encoder_decoder", False):
        raise RefusedError(_cannot(config, "it has an encoder"))
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise RefusedError(_cannot(config, "tokens of a prompt attend to later ones"))
    kinds = getattr(config, "layer_types", None) or []
    others: dict[str, list[int]] = {}
    for layer, kind in enumerate(kinds):
        if kind not in _KINDS:
            others.setdefault(str(kind), []).append(layer)
    if others:
        kind, found = next(iter(others.items()))
        raise RefusedError(_cannot(config, f"{_has_state(found)} ({kind})"))
    if getattr(config, "max_position_embeddings", None) is None:
        raise RefusedError(_cannot(config, "it has no limit of positions"))
    if any(rope.get("rope_type") == "dynamic" for rope in _ropes(config)):
        why = 'its rotary embedding ("dynamic") depends on the longest sequence of a batch'
        raise RefusedError(_cannot(config, why))


def _of_layers(found: list[int]) -> str:
    """Return a text such as "layers 0, 1, 2 and 9 more"."""
    return f"layer{'s' * (len(found) > 1)} {first_of(map(str, found), 3)}"


def _hollow(config: Any) -> Any:
    """Return the model of a configuration without weights, with the recording attention."""
    from transformers import AutoModelForCausalLM
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(_PROBE, attend)
    AttentionMaskInterface.register(_PROBE, _described_mask)
    experts = getattr(config, "_experts_implementation", None)
    try:
        config._experts_implementation = "batched_mm"  # has no operation that waits for values
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(
                config, attn_implementation=_PROBE, dtype=torch.float32
            )
    except Exception as error:
        known = isinstance(error, KeyError) and error.args == (_PROBE,)
        raise RefusedError(
            _cannot(config, f"its layers {_OTHER}" if known else _line(error))
        ) from None
    finally:
        config._experts_implementation = experts
    made.config._experts_implementation = "batched_mm"
    return made.eval()


def base_of(model: Any) -> Any:
    """Return the model without its output embedding."""
    base = getattr(model, model.base_model_prefix, None)
    if base is None or base is model:
        raise RefusedError(_cannot(model.config, "its layers and its head are one module"))
    return base


def layers_of(base: Any, config: Any) -> nn.ModuleList:
    """Return the decoder layers of a model."""
    for found in base.children():
        if isinstance(found, nn.ModuleList) and len(found) == config.num_hidden_layers:
            return found
    raise RefusedError(_cannot(config, "its layers are not one list"))


def _check_modules(base: Any, layers: nn.ModuleList) -> None:
    """Raise RefusedError if a layer mixes positions by a convolution, as recurrent layers do."""
    found = [
        i
        for i, layer in enumerate(layers)
        if any(isinstance(module, nn.Conv1d) for module in layer.modules())
    ]
    if found:
        raise RefusedError(_cannot(base.config, _has_state(found)))


def _has_state(found: list[int]) -> str:
    return f"this model keeps state outside of attention: {_of_layers(found)}"


class _Recorded(NamedTuple):
    layer: int
    key: Tensor
    value: Tensor
    window: int


class _Recorder:
    """Records the calls of attention in a pass over shapes. See `attend`."""

    def __init__(self, config: Any, layers: nn.ModuleList):
        self.config, self.found = config, list[_Recorded]()
        self._layer = {id(part): i for i, one in enumerate(layers) for part in one.modules()}
        self._windows: dict[Any, int] = {}  # by the window that a layer's code passes on

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: Any
    ) -> Tensor:
        layer = self._layer.get(id(module))
        if layer is None or query.shape[2] != key.shape[2]:
            raise RefusedError(_cannot(self.config, "a layer attends to another sequence"))
        strange = [
            name
            for name, given in options.items()
            if name not in _USED | _HARMLESS and given is not None and given is not False
        ]
        if strange:
            why = f"attention of layer {layer} depends on {strange[0]}"
            raise RefusedError(_cannot(self.config, why))
        window = self._window(layer, mask, options.get("sliding_window"))
        self.found.append(_Recorded(layer, key, value, window))
        shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        return query.new_empty(shape)

    def _window(self, layer: int, mask: Any, stated: Any) -> int:
        """Return the window that a mask describes, 0 for none. Of a part of a mask it is that of
        an earlier layer with the same `stated` window."""
        function = getattr(mask, "bass_function", None)
        if function is None and stated in self._windows:
            return self._windows[stated]
        if function is None:
            raise RefusedError(_cannot(self.config, f"layer {layer} has a mask of its own"))
        last = int(self.config.max_position_embeddings) - 1
        found = {at: _seen(function, at) for at in {0, 1, last // 2, last}}
        width = found[last]
        if width is None or any(seen != min(at + 1, width) for at, seen in found.items()):
            why = f"layer {layer} attends neither to all tokens before nor to a window of them"
            raise RefusedError(_cannot(self.config, why))
        window = self._windows[stated] = 0 if width > last else width
        return window


def _seen(function: Any, at: int) -> int | None:
    """Return how many keys the query at a position sees; None if they are not the last ones."""
    keys, zero = torch.arange(at + 2), torch.tensor(0)
    try:
        seen = torch.as_tensor(function(zero, zero, torch.tensor(at), keys)).expand(len(keys))
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    count = int(seen.sum())
    return count if count and bool(seen[at + 1 - count : at + 1].all()) else None


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers' AttentionInterface.

    The argument `bass` of the model's forward has the state of the pass: a _Recorder, or what
    any_model.py makes of a Pass.

    Args:
        query: [B, H, W, D].
        key, value: [B, K, W, D].

    Returns: [B, W, H, D], and no weights.
    """
    state = options.get("bass")
    if state is None:
        raise RefusedError(
            _cannot(module.config, "its layers do not pass arguments on to attention")
        )
    return state.attend(module, query, key, value, attention_mask, options), None


def _described_mask(*, q_length: int, kv_length: int, mask_function: Any, **_: Any) -> Tensor:
    """Return an empty mask [1, 1, W, W] that holds the function of transformers that defines it."""
    mask = torch.empty(1, 1, q_length, kv_length, device="meta")
    mask.bass_function = mask_function  # type: ignore[attr-defined]
    return mask


def _record(model: Any, layers: nn.ModuleList) -> tuple[tuple[AttentionCall, ...], bool]:
    """Run a model over shapes. Return its calls of attention, and whether its layers return
    tuples."""
    recorder = _Recorder(model.config, layers)
    tuples: list[bool] = []
    hook = layers[0].register_forward_hook(
        lambda module, given, result: tuples.append(isinstance(result, tuple))
    )
    places = torch.arange(_TOKENS, device="meta")[None]
    try:
        model(
            input_ids=torch.zeros(_ROWS, _TOKENS, dtype=torch.int64, device="meta"),
            attention_mask=torch.ones(_ROWS, _TOKENS, dtype=torch.int64, device="meta"),
            position_ids=places,
            use_cache=False,
            bass=recorder,
        )
    except RefusedError:
        raise
    except Exception as error:
        why = f"a pass over shapes alone fails ({_line(error)})"
        raise RefusedError(_cannot(model.config, why)) from None
    finally:
        hook.remove()
    silent = sorted(set(range(len(layers))) - {one.layer for one in recorder.found})
    if silent:
        raise RefusedError(_cannot(model.config, f"{_of_layers(silent)} {_OTHER}"))
    return _calls(recorder.found), bool(tuples and tuples[0])


def _calls(found: list[_Recorded]) -> tuple[AttentionCall, ...]:
    """Return the calls, and the layer of the store that each reads. Equal keys and values are the
    same tensors."""
    calls, stored = list[AttentionCall](), list[_Recorded]()
    for one in found:
        same = (i for i, old in enumerate(stored) if old.key is one.key and old.value is one.value)
        store = next(same, len(stored))
        writes = store == len(stored)
        if writes:
            stored.append(one)
        (_, kv_heads, _, size), value_size = one.key.shape, one.value.shape[3]
        calls.append(
            AttentionCall(one.layer, store, writes, kv_heads, size, value_size, one.window)
        )
    return tuple(calls)


def _line(error: Exception) -> str:
    """Return the first line of an error."""
    text = re.sub(r"\s+", " ", str(error)).strip()
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars and warnings off the terminal."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
