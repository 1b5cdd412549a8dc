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
from bass_cli.formats.config_keys import ROPE_TYPES, read_keys, unread
from bass_cli.io.reading import finite, shown, truth, whole
from bass_cli.models.families import CODEGEN_BLOCKS, FAMILIES, Family
from bass_cli.models.spec import Norm, Rope, Spec

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
# what published parallel drafts call the id of their mask token, in the order of preference
MASKS = ("pard_token", "ptd_token_id", "mask_token_id")


# More than any model has, and not too many to make room for before its tensors, which have to
# fit, have been looked at.
_MOST = {"layers": 1 << 12, "head_size": 1 << 16}
_LARGEST = 2**31 - 1  # of all other sizes
_KINDS = ("full_attention", "sliding_attention")  # of layers
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
    name, family = _family(config, place)
    values = Values(
        {**family.defaults, **read_keys(config, family, place=place)}, family.keys, place
    )
    _refuse(values, family)
    shape = shape_of(values, context=values.count("context"), vocab=values.count("vocab"))
    activation = values.values.get(values.key("activation"))
    known(activation, ACTIVATIONS, place, f'key "{values.key("activation")}": the activation')
    biases = family.biases.union(
        *(names for flag, names in family.flags.items() if values.flag(flag))
    )
    rope, local, attention = _ropes(values, family, shape["head_size"])
    scalar = values.number("query_pre_attn_scalar") if name == "gemma3_text" else shape["head_size"]
    return Spec(
        family=name,
        **shape,
        norm=Norm(family.norm, family.eps or values.number("eps"), **family.norm_extras),
        rope=rope,
        local_rope=local,
        activation=ACTIVATIONS[str(activation)],
        gated=family.gated,
        parallel=family.parallel,
        windows=_windows(values, shape["layers"], family),
        biases=biases,
        query_scale=scalar**-0.5
        * attention
        * attention,  # of the cosines and sines of queries and keys
        embed_scale=shape["width"] ** 0.5 if name == "gemma3_text" else 1.0,
        tied=values.flag("tie_word_embeddings"),
    )


def notes_of_config(config: Mapping[str, Any], *, place: str) -> tuple[str, ...]:
    """What the user should know of keys that `spec_of_config` did not use."""
    return unread(config, _family(config, place)[1], place=place)


def _family(config: Mapping[str, Any], place: str) -> tuple[str, Family]:
    """A config's family and its name. Ministral is Mistral with layer types."""
    name = config.get("model_type")
    if name == "ministral":
        name = "mistral"
    known(name, FAMILIES, place, 'key "model_type": the family')
    return str(name), FAMILIES[str(name)]


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


def _windows(values: Values, layers: int, family: Family) -> tuple[int, ...]:
    """The window of each layer, 0 for none, from the layer types or the older keys that stood
    for them."""
    types, key = values.values.get("layer_types"), "sliding_window"
    there = values.values.get(key) is not None
    if "use_sliding_window" in family.defaults and not values.flag("use_sliding_window"):
        there = False
    if not family.windows:
        if there and values.count(key) < values.count("context"):
            raise UserError(
                f'{values.place}: key "{key}": windows are not supported for this family'
            )
        there = False
    window = values.count(key) if there else 0
    if types is None and "sliding_window_pattern" not in values.values:
        return tuple(window if local else 0 for local in _locals(values, layers))
    if types is None:
        types = [_KINDS[local] for local in _locals(values, layers)]
    _check_types(types, layers, values.place)
    if "sliding_attention" in types and not there:
        raise UserError(
            f'{values.place}: key "layer_types": there are layers of sliding_attention, but no '
            "window (sliding_window)"
        )
    if family.windows != "types" and window and "full_attention" in types:
        raise UserError(
            f'{values.place}: key "layer_types": all layers of this family have the same window'
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _check_types(types: Any, layers: int, place: str) -> None:
    """UserError unless this is a list of layer types, one a layer."""
    if not isinstance(types, list):
        raise UserError(f'{place}: key "layer_types": a list is needed, not {shown(types)}')
    for kind in types:
        known(kind, ("full_attention", "sliding_attention"), place, 'key "layer_types": the type')
    if len(types) != layers:
        raise UserError(f'{place}: key "layer_types": {len(types)} types for {layers} layers')


def _locals(values: Values, layers: int) -> tuple[bool, ...]:
    if "sliding_window_pattern" in values.values:
        pattern = values.count("sliding_window_pattern")
        return tuple(bool((i + 1) % pattern) for i in range(layers))
    first = values.count("max_window_layers") if values.values.get("max_window_layers") else 0
    return tuple(i >= first for i in range(layers))


def _ropes(
    values: Values, family: Family, head_size: int
) -> tuple[Rope | None, Rope | None, float]:
    """The rotary embedding of full layers, that of windowed ones where it is another, and the
    factor of cosines and sines."""
    if family.rotary != "config":
        size = values.count("rotary_dim") if family.rotary == "partial" else 0
        rope = Rope(10000.0, rotary_size(size, head_size, values.place)) if size else None
        return rope, None, 1.0
    older, given = values.mapping("rope_scaling"), values.mapping("rope_parameters")
    theta = values.number("rope_theta")
    if "rope_local_base_freq" in family.defaults:  # Gemma: one for each layer type
        if older.keys() & set(_KINDS) or (given and not given.keys() & set(_KINDS)):
            raise UserError(
                f'{values.place}: key "rope_parameters": an object with full_attention and '
                "sliding_attention is needed, and rope_scaling has neither"
            )
        kinds = Values(given, {}, f"{values.place}: rope_parameters")
        full = kinds.mapping("full_attention") | older
        rope, attention = _rope(full, values, theta, head_size)
        local, other = _rope(
            kinds.mapping("sliding_attention"),
            values,
            values.number("rope_local_base_freq"),
            head_size,
        )
        return rope, local, _same_factor(attention, other, values.place)
    scaling = older or given
    if scaling.keys() & set(_KINDS):  # transformers ignores them for these families, or fails
        raise UserError(
            f"{values.place}: rope parameters by layer type are not supported for this family"
        )
    rope, attention = _rope(scaling, values, theta, head_size)
    return rope, None, attention


def _same_factor(full: float, local: float, place: str) -> float:
    if full != local:
        raise UserError(
            f"{place}: rope_parameters: an attention_factor that differs by layer type is not "
            f"supported ({full:g} and {local:g})"
        )
    return full


def _rope(
    scaling: Mapping[str, Any], values: Values, theta: float, head_size: int
) -> tuple[Rope, float]:
    """A rotary embedding, and the factor of its cosines and sines."""
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    known(kind, tuple(ROPE_TYPES), values.place, "the rope type")
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
    if partial != 1.0:  # transformers ignores it for these families, or cannot run the model
        raise UserError(
            f'{values.place}: key "partial_rotary_factor": {partial:g} is not supported for this '
            "family, only 1 is"
        )
    theta, size = own.number("rope_theta", theta), rotary_size(head_size, head_size, own.place)
    if kind == "linear":
        return Rope(theta, size, (own.number("factor"),) * (size // 2)), 1.0
    if kind == "llama3":
        return Rope(theta, size, _llama3(own, theta, size)), 1.0
    if kind == "yarn":
        return _yarn(own, theta, size)
    if kind == "dynamic":  # scales only beyond max_position_embeddings, the most that is run here
        own.number("factor")
    return Rope(theta, size), 1.0


def _llama3(own: Values, theta: float, size: int) -> tuple[float, ...]:
    low, high = own.number("low_freq_factor"), own.number("high_freq_factor")
    if high <= low:
        raise UserError(
            f'{own.place}: key "high_freq_factor": {high:g} is not above low_freq_factor, {low:g}'
        )
    return llama3_factors(
        theta,
        size,
        factor=own.number("factor"),
        low=low,
        high=high,
        original=own.number("original_max_position_embeddings"),
    )


def _yarn(own: Values, theta: float, size: int) -> tuple[Rope, float]:
    factor, attention = own.number("factor"), own.values.get("attention_factor")
    factors = yarn_factors(
        theta,
        size,
        factor=factor,
        original=own.number("original_max_position_embeddings"),
        fast=own.number("beta_fast", 32.0),
        slow=own.number("beta_slow", 1.0),
        truncate=own.values.get("truncate") is None or own.flag("truncate"),
        place=own.place,
    )
    if attention is not None:
        return Rope(theta, size, factors), own.number("attention_factor")
    if own.values.get("mscale") and own.values.get("mscale_all_dim"):
        scales = [yarn_scale(factor, own.number(key)) for key in ("mscale", "mscale_all_dim")]
        return Rope(theta, size, factors), scales[0] / scales[1]
    return Rope(theta, size, factors), yarn_scale(factor)


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


def yarn_factors(
    theta: float,
    size: int,
    *,
    factor: float,
    original: float,
    fast: float,
    slow: float,
    truncate: bool = True,
    place: str,
) -> tuple[float, ...]:
    """YaRN (arXiv 2309.00071, section 3.2): dimensions that turn more than `fast` times within
    the original context keep their frequency, those that turn less than `slow` times are divided
    by `factor`, with a linear ramp over the dimensions between the two.

    Raises:
        UserError: there are no such dimensions, since a value is out of all proportion.
    """
    try:
        first, last = (
            size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (fast, slow)
        )
        if truncate:
            first, last = math.floor(first), math.ceil(last)
    except (ValueError, ArithmeticError):
        raise UserError(
            f"{place}: yarn is not defined for a rope base of {theta:g}, an original context of "
            f"{original:g} and {slow:g} to {fast:g} turns"
        ) from None
    first, last = max(first, 0), min(last, size - 1)
    if first == last:
        last += 0.001
    shares = (min(max((j - first) / (last - first), 0.0), 1.0) for j in range(size // 2))
    return tuple(1.0 / (share / factor + 1.0 - share) for share in shares)


def yarn_scale(factor: float, scale: float = 1.0) -> float:
    """YaRN's factor of cosines and sines (equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
