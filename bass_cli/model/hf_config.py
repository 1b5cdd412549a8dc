"""config.json to Spec: checked access to a config's values, and the few rules that make sizes,
windows, rotary of them.

What differs between families is data in families.py; GGUF metadata is read by gguf_config.py
with what is here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from bass_cli.errors import UserError, nearest
from bass_cli.io.reading import finite, shown, truth, whole
from bass_cli.model.families import CODEGEN_BLOCKS, FAMILIES, Family
from bass_cli.model.spec import Norm, Rope, Spec

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
ROPE_TYPES = ("default", "linear", "llama3")
# what published parallel drafts call the id of their mask token, in the order of preference
MASKS = ("pard_token", "ptd_token_id", "mask_token_id")


# More than any model has, and not too many to make room for before its tensors, which have to
# fit, have been looked at.
_MOST = {"layers": 1 << 12, "head_size": 1 << 16}
_LARGEST = 2**31 - 1  # of all other sizes
_Value = TypeVar("_Value")


class Values:
    """Checked access to a config (or metadata) by our words; UserError names the file and its
    own key."""

    def __init__(self, values: Mapping[str, Any], keys: Mapping[str, str], place: str):
        self.values, self._keys, self.place = values, keys, place

    def key(self, word: str) -> str:
        return self._keys.get(word, word)

    def number(self, word: str, default: float | None = None) -> float:
        """A finite number above 0; None in the config means the default."""
        return self._checked(word, default, _above_0)

    def count(self, word: str, default: int | None = None) -> int:
        """A whole number above 0, and no larger than it may be of any model."""
        return self._checked(
            word, default, lambda value: _whole(_above_0(value), _MOST.get(word, _LARGEST))
        )

    def flag(self, word: str) -> bool:
        """True or false; what is not there is false."""
        return self._checked(word, False, truth)

    def mapping(self, word: str) -> dict[str, Any]:
        """An object; nothing is an empty one."""
        value = self.values.get(word) or {}
        if not isinstance(value, Mapping):
            raise UserError(f'{self.place}: key "{word}": a mapping is needed, not {shown(value)}')
        return dict(value)

    def _checked(self, word: str, default: Any, check: Callable[[Any], _Value]) -> _Value:
        value = self.values.get(self.key(word))
        value = default if value is None else value
        if value is None:
            raise UserError(f'{self.place}: the key "{self.key(word)}" is missing')
        try:
            return check(value)
        except ValueError as error:
            raise UserError(f'{self.place}: key "{self.key(word)}": {error}') from None


def _above_0(value: Any) -> float:
    if isinstance(value, (int, float)) and value > 0:
        return finite(value)
    raise ValueError(f"a number above 0 is needed, not {shown(value)}")


def _whole(value: float, most: int) -> int:
    """As a config may have it, 8.0 for 8 too."""
    return whole(int(value) if value.is_integer() else value, least=1, most=most)


def known(word: Any, choices: Mapping[str, Any] | tuple[str, ...], place: str, what: str) -> None:
    """UserError unless the word is one of the choices; it lists them all."""
    if not isinstance(word, str) or word not in choices:
        given = word if isinstance(word, str) else shown(word)
        close = nearest(given, choices)
        listed = "" if close.startswith("known") else f"; known: {', '.join(choices)}"
        raise UserError(f'{place}: {what} "{given[:80]}" is not supported; {close}{listed}')


def spec_of_config(config: Mapping[str, Any], *, place: str) -> Spec:
    """The Spec of a parsed config.json, as hubs have it or as transformers 5 writes it. `place`
    is for messages."""
    known(config.get("model_type"), FAMILIES, place, 'key "model_type": the family')
    name = config["model_type"]
    family = FAMILIES[name]
    values = Values({**family.defaults, **config}, family.keys, place)
    _refuse(values, family)
    shape = shape_of(values, context=values.count("context"), vocab=values.count("vocab"))
    activation = values.values.get(values.key("activation"))
    known(activation, ACTIVATIONS, place, f'key "{values.key("activation")}": the activation')
    biases = family.biases.union(
        *(names for flag, names in family.flags.items() if values.flag(flag))
    )
    rope, local = _ropes(values, family, shape["head_size"])
    scalar = values.number("query_pre_attn_scalar") if name == "gemma3_text" else shape["head_size"]
    return Spec(
        family=name,
        **shape,
        norm=Norm(family.norm, values.number("eps"), **family.norm_extras),
        rope=rope,
        local_rope=local,
        activation=ACTIVATIONS[str(activation)],
        gated=family.gated,
        parallel=family.parallel,
        windows=_windows(values, shape["layers"], family.windows),
        biases=biases,
        query_scale=scalar**-0.5,
        embed_scale=shape["width"] ** 0.5 if name == "gemma3_text" else 1.0,
        tied=values.flag("tie_word_embeddings"),
    )


def mask_of(
    values: Mapping[str, Any], *, vocab: int, place: str, keys: tuple[str, ...] = MASKS
) -> int:
    """The id that stands for a token to be drafted, in a config (or metadata) of a model that
    drafts in one pass: of the first key that is there. `vocab`: how many ids it embeds."""
    for key in keys:
        if (value := values.get(key)) is None:
            continue
        if type(value) is not int or not 0 <= value < vocab:
            raise UserError(
                f'{place}: key "{key}": the id of a mask token, from 0 to {vocab - 1}, is needed, '
                f"not {shown(value)}"
            )
        return value
    others = f" (or {', '.join(keys[1:])})" if keys[1:] else ""
    raise UserError(
        f'{place}: the key "{keys[0]}"{others} is missing: only a model that was trained with a '
        "mask token can draft in one pass; write this one without parallel:"
    )


def shape_of(values: Values, *, context: int, vocab: int) -> dict[str, Any]:
    """The sizes of a Spec, checked against each other."""
    width, heads = values.count("width"), values.count("heads")
    kv_heads = values.count("kv_heads", heads)
    if heads % kv_heads:
        raise UserError(
            f'{values.place}: key "{values.key("kv_heads")}": {heads} heads cannot share {kv_heads}'
        )
    if not values.values.get(values.key("head_size")) and width % heads:
        raise UserError(
            f'{values.place}: key "{values.key("heads")}": a width of {width} has no {heads} '
            "equal heads"
        )
    return {
        "layers": values.count("layers"),
        "width": width,
        "heads": heads,
        "kv_heads": kv_heads,
        "context": context,
        "head_size": values.count("head_size", width // heads),
        "inner": values.count("inner", 4 * width),
        "vocab": vocab,
    }


def _refuse(values: Values, family: Family) -> None:
    """UserError for what the decoder cannot do."""
    for key, wanted in family.required.items():
        got = values.values.get(key, wanted)
        if (got or None) != (wanted or None):
            raise UserError(
                f'{values.place}: key "{key}": {shown(got)} is not supported, only {wanted!r} is'
            )
    projected = values.values.get("word_embed_proj_dim")
    if projected not in (None, values.values.get(values.key("width"))):
        raise UserError(
            f'{values.place}: key "word_embed_proj_dim": {shown(projected)} is not supported, '
            "only hidden_size"
        )
    if family.tensors is FAMILIES["codegen"].tensors and values.count("heads") % CODEGEN_BLOCKS:
        raise UserError(
            f'{values.place}: key "{values.key("heads")}": it must be a multiple of '
            f"{CODEGEN_BLOCKS}"
        )
    if values.values.get("quantization_config"):
        raise UserError(
            f'{values.place}: key "quantization_config": quantised safetensors are not supported; '
            "use the original checkpoint or a GGUF file"
        )


def _windows(values: Values, layers: int, style: str) -> tuple[int, ...]:
    """The window of each layer, 0 for none, from the layer types or the older keys that stood
    for them."""
    if (
        not style
        or not values.values.get("sliding_window")
        or not values.flag("use_sliding_window")
    ):
        return (0,) * layers
    window, types = values.count("sliding_window"), values.values.get("layer_types")
    if style == "all":
        return (window,) * layers
    if types is None:
        return tuple(window if local else 0 for local in _locals(values, layers))
    if not isinstance(types, list):
        raise UserError(f'{values.place}: key "layer_types": a list is needed, not {shown(types)}')
    for kind in types:
        known(
            kind,
            ("full_attention", "sliding_attention"),
            values.place,
            'key "layer_types": the type',
        )
    if len(types) != layers:
        raise UserError(
            f'{values.place}: key "layer_types": {len(types)} types for {layers} layers'
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _locals(values: Values, layers: int) -> tuple[bool, ...]:
    if "sliding_window_pattern" in values.values:
        pattern = values.count("sliding_window_pattern")
        return tuple(bool((i + 1) % pattern) for i in range(layers))
    first = values.count("max_window_layers") if values.values.get("max_window_layers") else 0
    return tuple(i >= first for i in range(layers))


def _ropes(values: Values, family: Family, head_size: int) -> tuple[Rope | None, Rope | None]:
    """The rotary embedding of full layers, and of windowed ones where it is another."""
    if family.rotary != "config":
        size = values.count("rotary_dim") if family.rotary == "partial" else 0
        return (Rope(10000.0, rotary_size(size, head_size, values.place)) if size else None), None
    scaling = values.mapping("rope_scaling") or values.mapping("rope_parameters")
    nested = any(key in scaling for key in ("full_attention", "sliding_attention"))
    if nested:
        layers = Values(scaling, {}, f"{values.place}: rope_parameters")
        scaling, local = layers.mapping("full_attention"), layers.mapping("sliding_attention")
    rope = _rope(scaling, values, values.number("rope_theta"), head_size)
    if "rope_local_base_freq" in family.defaults:
        return rope, _rope(
            local if nested else {}, values, values.number("rope_local_base_freq"), head_size
        )
    if nested and local:
        other = _rope(local, values, values.number("rope_theta"), head_size)
        return (rope, other) if scaling else (other, None)
    return rope, None


def _rope(scaling: Mapping[str, Any], values: Values, theta: float, head_size: int) -> Rope:
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    known(kind, ROPE_TYPES, values.place, "the rope type")
    own = Values(
        {
            **scaling,
            "original_max_position_embeddings": values.values.get(
                "original_max_position_embeddings"
            )
            or scaling.get("original_max_position_embeddings")
            or values.values.get("max_position_embeddings"),
        },
        {},
        f"{values.place}: rope_parameters",
    )
    partial = own.number("partial_rotary_factor", values.values.get("partial_rotary_factor") or 1.0)
    theta, size = (
        own.number("rope_theta", theta),
        rotary_size(head_size * min(partial, 2.0), head_size, own.place),
    )
    if kind == "default":
        return Rope(theta, size)
    if kind == "linear":
        return Rope(theta, size, (own.number("factor"),) * (size // 2))
    low, high = own.number("low_freq_factor"), own.number("high_freq_factor")
    if high <= low:
        raise UserError(
            f'{own.place}: key "high_freq_factor": {high:g} is not above low_freq_factor, {low:g}'
        )
    return Rope(
        theta,
        size,
        llama3_factors(
            theta,
            size,
            factor=own.number("factor"),
            low=low,
            high=high,
            original=own.number("original_max_position_embeddings"),
        ),
    )


def rotary_size(size: float, head_size: int, place: str) -> int:
    """The dimensions of a head that are turned, in pairs: an even number, above 0 and no more
    than there are."""
    if not 2 <= int(size) <= head_size or int(size) % 2:
        raise UserError(
            f"{place}: {int(size)} rotary dimensions of a head of {head_size} are not an even "
            "number of them"
        )
    return int(size)


def llama3_factors(
    theta: float, size: int, *, factor: float, low: float, high: float, original: float
) -> tuple[float, ...]:
    """Llama 3's scaling: wavelengths above original / low are divided by `factor`, those below
    original / high are kept, and between the two the frequency is interpolated by turns within
    the original context."""
    divisors = []
    for j in range(0, size, 2):
        turns = original / (2 * math.pi * theta ** (j / size))
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1.0 / ((1.0 - share) / factor + share))
    return tuple(divisors)
