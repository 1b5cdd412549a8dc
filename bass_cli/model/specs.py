"""config.json to Spec: checked access to a config's values, and the few rules that make sizes, windows, rotary of them.

What differs between families is data in families.py; GGUF metadata is read by gguf_families.py with what is here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bass_cli.job import UserError, nearest

from .decoder import Norm, Rope, Spec
from .families import CODEGEN_BLOCKS, FAMILIES, Family

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
}
ROPE_TYPES = ("default", "linear", "llama3")


class Values:
    """Checked access to a config (or metadata) by our words; UserError names the file and its own key."""

    def __init__(self, values: Mapping[str, Any], keys: Mapping[str, str], place: str):
        self.values, self._keys, self.place = values, keys, place

    def key(self, word: str) -> str:
        return self._keys.get(word, word)

    def number(self, word: str, default: float | None = None) -> float:
        """A finite number above 0; None in the config means the default."""
        value = self.values.get(self.key(word))
        value = default if value is None else value
        if value is None:
            raise UserError(f'{self.place}: the key "{self.key(word)}" is missing')
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise UserError(f'{self.place}: key "{self.key(word)}": a number above 0 is needed, not {value!r}')
        return float(value)

    def count(self, word: str, default: int | None = None) -> int:
        """A whole number above 0."""
        value = self.number(word, default)
        if value != int(value):
            raise UserError(f'{self.place}: key "{self.key(word)}": a whole number is needed, not {value!r}')
        return int(value)

    def mapping(self, word: str) -> dict[str, Any]:
        value = self.values.get(word) or {}
        if not isinstance(value, Mapping):
            raise UserError(f'{self.place}: key "{word}": a mapping is needed, not {value!r}')
        return dict(value)


def known(word: Any, choices: Mapping[str, Any] | tuple[str, ...], place: str, what: str) -> None:
    """UserError unless the word is one of the choices; it lists them all."""
    if word not in choices:
        close = nearest(str(word), choices)
        listed = "" if close.startswith("known") else f"; known: {', '.join(choices)}"
        raise UserError(f'{place}: {what} "{word}" is not supported; {close}{listed}')


def spec_of_config(config: Mapping[str, Any], *, place: str) -> Spec:
    """The Spec of a parsed config.json, as hubs have it or as transformers 5 writes it. `place` is for messages."""
    known(config.get("model_type"), FAMILIES, place, 'key "model_type": the family')
    name = config["model_type"]
    family = FAMILIES[name]
    values = Values({**family.defaults, **config}, family.keys, place)
    _refuse(values, family)
    shape = shape_of(values, context=values.count("context"), vocab=values.count("vocab"))
    activation = values.values.get(values.key("activation"))
    known(activation, ACTIVATIONS, place, f'key "{values.key("activation")}": the activation')
    biases = family.biases.union(*(names for flag, names in family.flags.items() if values.values.get(flag)))
    rope, local = _ropes(values, family, shape["head_size"])
    scalar = values.number("query_pre_attn_scalar") if name == "gemma3_text" else shape["head_size"]
    return Spec(
        family=name, **shape, norm=Norm(family.norm, values.number("eps"), **family.norm_extras), rope=rope,
        local_rope=local, activation=ACTIVATIONS[str(activation)], gated=family.gated, parallel=family.parallel,
        windows=_windows(values, shape["layers"], family.windows), biases=biases,
        query_scale=scalar**-0.5, embed_scale=shape["width"] ** 0.5 if name == "gemma3_text" else 1.0,
        tied=bool(values.values.get("tie_word_embeddings")))


def shape_of(values: Values, *, context: int, vocab: int) -> dict[str, Any]:
    """The sizes of a Spec, checked against each other."""
    width, heads = values.count("width"), values.count("heads")
    kv_heads = values.count("kv_heads", heads)
    if heads % kv_heads:
        raise UserError(f'{values.place}: key "{values.key("kv_heads")}": {heads} heads cannot share {kv_heads}')
    if not values.values.get(values.key("head_size")) and width % heads:
        raise UserError(f'{values.place}: key "{values.key("heads")}": a width of {width} has no {heads} equal heads')
    return {"layers": values.count("layers"), "width": width, "heads": heads, "kv_heads": kv_heads, "context": context,
            "head_size": values.count("head_size", width // heads), "inner": values.count("inner", 4 * width),
            "vocab": vocab}


def _refuse(values: Values, family: Family) -> None:
    """UserError for what the decoder cannot do."""
    for key, wanted in family.required.items():
        got = values.values.get(key, wanted)
        if (got or None) != (wanted or None):
            raise UserError(f'{values.place}: key "{key}": {got!r} is not supported, only {wanted!r} is')
    projected = values.values.get("word_embed_proj_dim")
    if projected not in (None, values.values.get(values.key("width"))):
        raise UserError(f'{values.place}: key "word_embed_proj_dim": {projected} is not supported, only hidden_size')
    if family.tensors is FAMILIES["codegen"].tensors and values.count("heads") % CODEGEN_BLOCKS:
        raise UserError(f'{values.place}: key "{values.key("heads")}": it must be a multiple of {CODEGEN_BLOCKS}')
    if values.values.get("quantization_config"):
        raise UserError(f'{values.place}: key "quantization_config": quantised safetensors are not supported; '
                        "use the original checkpoint or a GGUF file")


def _windows(values: Values, layers: int, style: str) -> tuple[int, ...]:
    """The window of each layer, 0 for none, from the layer types or the older keys that stood for them."""
    if not style or not values.values.get("sliding_window") or not values.values.get("use_sliding_window"):
        return (0,) * layers
    window, types = values.count("sliding_window"), values.values.get("layer_types")
    if style == "all":
        return (window,) * layers
    if types is None:
        return tuple(window if local else 0 for local in _locals(values, layers))
    for kind in types:
        known(kind, ("full_attention", "sliding_attention"), values.place, 'key "layer_types": the type')
    if len(types) != layers:
        raise UserError(f'{values.place}: key "layer_types": {len(types)} types for {layers} layers')
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _locals(values: Values, layers: int) -> tuple[bool, ...]:
    if "sliding_window_pattern" in values.values:
        pattern = values.count("sliding_window_pattern")
        return tuple(bool((i + 1) % pattern) for i in range(layers))
    first = values.values.get("max_window_layers") or 0
    return tuple(i >= first for i in range(layers))


def _ropes(values: Values, family: Family, head_size: int) -> tuple[Rope | None, Rope | None]:
    """The rotary embedding of full layers, and of windowed ones where it is another."""
    if family.rotary != "config":
        return (Rope(10000.0, values.count("rotary_dim")) if family.rotary == "partial" else None), None
    scaling = values.mapping("rope_scaling") or values.mapping("rope_parameters")
    nested = any(key in scaling for key in ("full_attention", "sliding_attention"))
    if nested:
        local = scaling.get("sliding_attention") or {}
        scaling = scaling.get("full_attention") or {}
    rope = _rope(scaling, values, values.number("rope_theta"), head_size)
    if "rope_local_base_freq" in family.defaults:
        return rope, _rope(local if nested else {}, values, values.number("rope_local_base_freq"), head_size)
    if nested and local:
        other = _rope(local, values, values.number("rope_theta"), head_size)
        return (rope, other) if scaling else (other, None)
    return rope, None


def _rope(scaling: Mapping[str, Any], values: Values, theta: float, head_size: int) -> Rope:
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    known(kind, ROPE_TYPES, values.place, "the rope type")
    own = Values({**scaling, "original_max_position_embeddings":
                  values.values.get("original_max_position_embeddings")
                  or scaling.get("original_max_position_embeddings")
                  or values.values.get("max_position_embeddings")}, {}, f"{values.place}: rope_parameters")
    partial = own.number("partial_rotary_factor", values.values.get("partial_rotary_factor") or 1.0)
    theta, size = own.number("rope_theta", theta), int(head_size * partial)
    if kind == "default":
        return Rope(theta, size)
    if kind == "linear":
        return Rope(theta, size, (own.number("factor"),) * (size // 2))
    return Rope(theta, size, llama3_factors(theta, size, factor=own.number("factor"), low=own.number("low_freq_factor"),
                                            high=own.number("high_freq_factor"),
                                            original=own.number("original_max_position_embeddings")))


def llama3_factors(theta: float, size: int, *, factor: float, low: float, high: float,
                   original: float) -> tuple[float, ...]:
    """Llama 3's scaling: wavelengths above original / low are divided by `factor`, those below original / high are
    kept, and between the two the frequency is interpolated by turns within the original context."""
    divisors = []
    for j in range(0, size, 2):
        turns = original / (2 * math.pi * theta ** (j / size))
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1.0 / ((1.0 - share) / factor + share))
    return tuple(divisors)
