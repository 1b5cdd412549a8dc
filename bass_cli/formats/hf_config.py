"""Read config.json as a Spec: the rules for sizes, windows, layer types and rotary embedding.

The differences between families are data in families.py. gguf_config.py reads GGUF metadata with
the same functions. Rotary factors are computed here, because importing transformers' functions for
them takes half a second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bass_cli.errors import UserError
from bass_cli.formats.config_keys import ROPE_TYPES, Values, read_keys, unread
from bass_cli.formats.text_part import notes_of_text, text_config
from bass_cli.models.families import CODEGEN_BLOCKS, FAMILIES, Family
from bass_cli.models.spec import Experts, Norm, Recurrent, Rope, Spec
from bass_cli.reading import shown

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# keys of the mask token's id in published parallel drafts, in order of preference
MASKS = ("pard_token", "ptd_token_id", "mask_token_id")


_ORIGINAL = "original_max_position_embeddings"
_KINDS = ("full_attention", "sliding_attention")  # of layers
_HYBRID_KINDS = ("full_attention", "linear_attention")


def spec_of_config(config: Mapping[str, Any], *, place: str) -> Spec:
    """Return the Spec of a parsed config.json, in the layout of transformers 4 or 5. `place` is the
    file's name, for errors. Of a multimodal model it is the text part's."""
    config, place = text_config(config, place=place)
    name, family = _family(config, place)
    read = read_keys(config, family, place=place)
    values = Values({**family.defaults, **read}, place, keys=family.keys)
    _refuse(values, family)
    shape = shape_of(values, context=_context(values), vocab=values.count("vocab"))
    activation = values.known("activation", ACTIVATIONS, "the activation")
    biases = family.biases.union(
        *(names for flag, names in family.flags.items() if values.flag(flag))
    )
    recurrent = _recurrent(values, shape["layers"], family)
    windows = (0,) * shape["layers"] if recurrent else _windows(values, shape["layers"], family)
    unrotated = _unrotated(values, family, windows)
    rope, local, attention = _ropes(values, family, shape["head_size"])
    if attention != 1.0 and rope and (unrotated or rope.size < shape["head_size"]):
        rope, attention = rope._replace(scale=attention), 1.0  # not for all of queries and keys
    scales = _scales(values, family, shape)
    # queries and keys each have the factor of their cosines and sines
    scales["query_scale"] *= attention * attention
    return Spec(
        family=name,
        **shape,
        norm=Norm(family.norm, family.eps or values.number("eps"), **family.norm_extras),
        rope=rope,
        local_rope=local,
        activation=ACTIVATIONS[activation],
        gated=family.gated,
        parallel=family.parallel,
        windows=windows,
        biases=biases,
        tied=values.flag("tie_word_embeddings"),
        unrotated=unrotated,
        experts=experts_of(values, family),
        sinks=family.mixture == "clamped",
        output_gate=family.recurrent,
        recurrent=recurrent,
        **scales,
    )


def _recurrent(values: Values, layers: int, family: Family) -> Recurrent | None:
    """Return the layers with the gated delta rule; None for a family without such layers."""
    if not family.recurrent:
        return None
    types = values.get("layer_types")
    if types is None:
        interval = values.count("full_attention_interval")
        types = [_HYBRID_KINDS[(i + 1) % interval != 0] for i in range(layers)]
    _check_types(types, layers, values, _HYBRID_KINDS)
    if len(set(types)) == 1:
        raise values.error(
            "layer_types",
            f"all layers are {types[0]}, but this family needs layers of both kinds, "
            f"{' and '.join(_HYBRID_KINDS)}",
        )
    if not values.flag("attn_output_gate"):
        raise values.error(
            "attn_output_gate", "False is not supported for this family, only True is"
        )
    if values.get("sliding_window") is not None:
        raise values.error("sliding_window", "windows are not supported for this family")
    activation = values.get("hidden_act")
    if ACTIVATIONS.get(str(activation)) != "silu":
        raise values.error(
            "hidden_act",
            f"{shown(activation)} is not supported for this family, only silu is, which its "
            "convolution applies too",
        )
    named = tuple(i for i, kind in enumerate(types) if kind == "linear_attention")
    return recurrent_of(values, named, value_size=values.count("value_size"))


def recurrent_of(values: Values, layers: tuple[int, ...], *, value_size: int) -> Recurrent:
    """Return these recurrent layers with the sizes of the configuration.

    Args:
        value_size: of a value head.
    """
    key_heads, value_heads = values.count("key_heads"), values.count("value_heads")
    if value_heads % key_heads:
        raise values.error(
            "key_heads", f"{key_heads} does not divide the number of value heads, {value_heads}"
        )
    if (kernel := values.count("kernel")) < 2:
        raise values.error("kernel", "a number of at least 2 is needed, not 1")
    key_size = values.count("key_size")
    return Recurrent(layers, key_heads, value_heads, key_size, value_size, kernel)


def experts_of(values: Values, family: Family) -> Experts | None:
    """Return the mixture of experts; None for one feed-forward."""
    if not family.mixture:
        return None
    count, chosen = values.count("experts"), values.count("chosen")
    if chosen > count:
        raise values.error("chosen", f"{chosen} is more than the number of experts, {count}")
    normalised = family.mixture != "config" or values.flag("norm_topk_prob")
    shared = values.count("shared") if "shared" in family.keys else 0
    clamp = None
    if family.mixture == "clamped":
        clamp = values.number("swiglu_alpha"), values.number("swiglu_limit")
    return Experts(count, chosen, normalised, clamp, shared)


def _scales(values: Values, family: Family, shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scaling factors of a Spec, by its fields."""
    if "attention_multiplier" in family.defaults:  # Granite
        return {
            "query_scale": values.number("attention_multiplier"),
            "embed_scale": values.number("embedding_multiplier"),
            "residual_scale": values.number("residual_multiplier"),
            "logit_scale": values.number("logits_scaling"),
        }
    if "query_pre_attn_scalar" in family.defaults:  # Gemma
        scalar = values.number("query_pre_attn_scalar")
        return {"query_scale": scalar**-0.5, "embed_scale": shape["width"] ** 0.5}
    return {"query_scale": shape["head_size"] ** -0.5}


def _unrotated(values: Values, family: Family, windows: tuple[int, ...]) -> tuple[int, ...]:
    """Return the layers without rotary embedding."""
    if family.unrotated == "full":
        hybrid = values.get("sliding_window") is not None
        return tuple(i for i, window in enumerate(windows) if hybrid and not window)
    if family.unrotated == "listed":
        return tuple(i for i, rotated in enumerate(_rotated(values, len(windows))) if not rotated)
    return ()


def _rotated(values: Values, layers: int) -> list[bool]:
    """Return for each layer whether it has rotary embedding, as `no_rope_layers` lists it."""
    listed = values.get("no_rope_layers")
    if listed is None:
        interval = values.count("no_rope_layer_interval")
        return [(i + 1) % interval != 0 for i in range(layers)]
    if (
        not isinstance(listed, list)
        or len(listed) < layers
        or any(type(one) not in (int, bool) or one not in (0, 1) for one in listed)
    ):
        raise values.error(
            "no_rope_layers",
            f"a list of 0 and 1 for {layers} layers is needed, not {shown(listed)}",
        )
    return [bool(one) for one in listed[:layers]]


def notes_of_config(config: Mapping[str, Any], *, place: str) -> tuple[str, ...]:
    """Return notes about keys that `spec_of_config` did not use."""
    notes = notes_of_text(config, place=place)
    config, place = text_config(config, place=place)
    family, spec = _family(config, place)[1], spec_of_config(config, place=place)
    if spec.context < config.get(family.keys["context"], spec.context):
        notes += (
            f"{place}: texts may have {spec.context} tokens: beyond that, LongRoPE changes the "
            "rotary embedding of all tokens, which bass does not support",
        )
    return notes + unread(config, family, place=place)


def is_native(config: Mapping[str, Any], *, place: str) -> bool:
    """Return whether the architecture of a parsed config.json has a native decoder."""
    text, _ = text_config(config, place=place)
    return text.get("model_type") in (*FAMILIES, "ministral")


def _family(config: Mapping[str, Any], place: str) -> tuple[str, Family]:
    """Return a config's family and its name. Ministral is Mistral with layer types."""
    if config.get("model_type") == "ministral":
        config = {"model_type": "mistral"}
    name = Values(config, place).known("model_type", FAMILIES, "the family")
    return name, FAMILIES[name]


def mask_of(
    values: Mapping[str, Any], *, vocab: int, place: str, keys: tuple[str, ...] = MASKS
) -> int:
    """Return the mask token's id of a model that drafts in one pass.

    Args:
        values: its config or metadata.
        vocab: rows of its embedding.
        keys: names of the key, in order of preference.
    """
    for key in keys:
        if (value := values.get(key)) is None:
            continue
        if type(value) is not int or not 0 <= value < vocab:
            needed = f"the id of a mask token, from 0 to {vocab - 1}, is needed"
            raise Values(values, place).error(key, f"{needed}, not {shown(value)}")
        return value
    others = f" (or {', '.join(keys[1:])})" if keys[1:] else ""
    raise UserError(
        f'{place}: the key "{keys[0]}"{others} is missing; only a model that was trained with a '
        "mask token can draft in one pass; to use this one as an ordinary draft, leave out "
        '"parallel:"'
    )


def shape_of(values: Values, *, context: int, vocab: int) -> dict[str, Any]:
    """Return the sizes of a Spec, checked against each other."""
    width, heads = values.count("width"), values.count("heads")
    kv_heads = values.count("kv_heads", heads)
    if heads % kv_heads:
        raise values.error(
            "kv_heads", f"{kv_heads} does not divide the number of attention heads, {heads}"
        )
    if not values.get("head_size") and width % heads:
        raise values.error("heads", f"{heads} does not divide the hidden size, {width}")
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


def _context(values: Values) -> int:
    """Return the maximum number of positions. Beyond the original context LongRoPE would change
    the rotary embedding of all positions, also of stored keys, so that is the limit."""
    context = values.count("context")
    scaling = values.mapping("rope_scaling") or values.mapping("rope_parameters")
    if _rope_kind(scaling, values) != "longrope":
        return context
    return min(context, int(_with_original(scaling, values).number(_ORIGINAL)))


def _refuse(values: Values, family: Family) -> None:
    """Raise a UserError for values that the decoder does not support."""
    projected = values.get("word_embed_proj_dim")
    if projected not in (None, values.get("width")):
        raise values.error(
            "word_embed_proj_dim", f"{shown(projected)} is not supported, only hidden_size"
        )
    if family.tensors is FAMILIES["codegen"].tensors and values.count("heads") % CODEGEN_BLOCKS:
        raise values.error("heads", f"the number of heads must be a multiple of {CODEGEN_BLOCKS}")


def _windows(values: Values, layers: int, family: Family) -> tuple[int, ...]:
    """Return the window of each layer, 0 for none, from `layer_types` or the older keys."""
    types, key = values.get("layer_types"), "sliding_window"
    there = values.get(key) is not None
    if "use_sliding_window" in family.defaults and not values.flag("use_sliding_window"):
        there = False
    if not family.windows:
        if there and values.count(key) < values.count("context"):
            raise values.error(key, "windows are not supported for this family")
        there = False
    window = values.count(key) if there else 0
    if types is None and "sliding_window_pattern" not in values.values:
        return tuple(window if local else 0 for local in _have_window(values, layers, family))
    if types is None:
        types = [_KINDS[local] for local in _have_window(values, layers, family)]
    _check_types(types, layers, values, _KINDS)
    if "sliding_attention" in types and not there:
        raise values.error(
            "layer_types",
            "some layers have sliding_attention, but there is no window (sliding_window)",
        )
    if family.windows != "types" and window and "full_attention" in types:
        raise values.error("layer_types", "all layers of this family need the same window")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _check_types(types: Any, layers: int, values: Values, kinds: tuple[str, ...]) -> None:
    """Raise a UserError unless this is a list with the type of each layer, one of `kinds`."""
    if not isinstance(types, list):
        raise values.error("layer_types", f"a list is needed, not {shown(types)}")
    for kind in types:
        Values({"layer_types": kind}, values.place).known("layer_types", kinds, "the type")
    if len(types) != layers:
        raise values.error("layer_types", f"{len(types)} types for {layers} layers")


def _have_window(values: Values, layers: int, family: Family) -> tuple[bool, ...]:
    """Return for each layer whether it has a window, by the older keys."""
    if "sliding_window_pattern" in values.values:
        pattern = values.count("sliding_window_pattern")
        return tuple(bool((i + 1) % pattern) for i in range(layers))
    if "no_rope_layers" in values.values:
        return tuple(not rotated for rotated in _rotated(values, layers))
    # a family with the same window in all layers ignores the key
    counted = family.windows == "types" and values.get("max_window_layers")
    first = values.count("max_window_layers") if counted else 0
    return tuple(i >= first for i in range(layers))


def _ropes(
    values: Values, family: Family, head_size: int
) -> tuple[Rope | None, Rope | None, float]:
    """Return the rotary embedding, that of layers with a window if it differs, and the factor of
    cosines and sines."""
    if family.rotary not in ("config", "fraction"):
        size = values.count("rotary_dim") if family.rotary == "partial" else 0
        rope = Rope(10000.0, rotary_size(size, head_size, values.place)) if size else None
        return rope, None, 1.0
    older, given = values.mapping("rope_scaling"), values.mapping("rope_parameters")
    theta = values.number("rope_theta")
    if family.by_type:
        if older.keys() & set(_KINDS) or (given and not given.keys() & set(_KINDS)):
            raise values.error(
                "rope_parameters",
                "an object with full_attention and "
                "sliding_attention is needed (and no such keys in rope_scaling)",
            )
        kinds = Values(given, f"{values.place}: rope_parameters")
        full = kinds.mapping("full_attention") | older
        rope, attention = _rope(full, values, theta, head_size)
        local_theta = values.number("rope_local_base_freq", family.defaults["rope_theta"])
        local, other = _rope(kinds.mapping("sliding_attention"), values, local_theta, head_size)
        if attention == other:
            return rope, local, attention
        return rope._replace(scale=attention), local._replace(scale=other), 1.0
    scaling = older or given or family.rope
    if scaling.keys() & set(_KINDS):  # transformers ignores them for these families, or fails
        raise UserError(
            f"{values.place}: rope parameters by layer type are not supported for this family"
        )
    rope, attention = _rope(scaling, values, theta, head_size, family.rotary == "fraction")
    return rope, None, attention


def _rope_kind(scaling: Mapping[str, Any], values: Values) -> str:
    """Return the rope type. Phi-3's older names of longrope are "su" and "yarn"."""
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if values.get("model_type") == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"
    return Values({"rope_type": kind}, values.place).known("rope_type", ROPE_TYPES, "the rope type")


def _with_original(scaling: Mapping[str, Any], values: Values) -> Values:
    """Return access to rotary parameters, with the original context, which either may have."""
    original = (
        values.get(_ORIGINAL) or scaling.get(_ORIGINAL) or values.get("max_position_embeddings")
    )
    return Values({**scaling, _ORIGINAL: original}, f"{values.place}: rope_parameters")


def _rope(
    scaling: Mapping[str, Any],
    values: Values,
    theta: float,
    head_size: int,
    may_be_partial: bool = False,
) -> tuple[Rope, float]:
    """Return a rotary embedding and the factor of its cosines and sines."""
    kind, own = _rope_kind(scaling, values), _with_original(scaling, values)
    partial = own.number("partial_rotary_factor", values.get("partial_rotary_factor") or 1.0)
    if partial != 1.0 and not may_be_partial:
        # transformers ignores it for these families, or cannot run the model
        raise values.error(
            "partial_rotary_factor", f"{partial:g} is not supported for this family, only 1 is"
        )
    theta, size = (
        own.number("rope_theta", theta),
        rotary_size(head_size * partial, head_size, own.place),
    )
    if kind == "linear":
        return Rope(theta, size, (own.number("factor"),) * (size // 2)), 1.0
    if kind == "llama3":
        return Rope(theta, size, _llama3(own, theta, size)), 1.0
    if kind == "yarn":
        return _yarn(own, theta, size)
    if kind == "longrope":
        return _longrope(own, theta, size, values)
    if kind == "dynamic":  # scales only beyond max_position_embeddings, bass's limit
        own.number("factor")
    return Rope(theta, size), 1.0


def _llama3(own: Values, theta: float, size: int) -> tuple[float, ...]:
    """Return Llama 3's divisors of the inverse frequencies, [size / 2].

    Frequencies with wavelengths above original / low are divided by `factor`; those with
    wavelengths below original / high are unchanged. Between the two the frequency is interpolated
    by the number of turns within the original context.
    """
    low, high = own.number("low_freq_factor"), own.number("high_freq_factor")
    if high <= low:
        raise own.error("high_freq_factor", f"{high:g} is not above low_freq_factor, {low:g}")
    factor, original = own.number("factor"), own.number("original_max_position_embeddings")
    divisors = []
    for j in range(0, size, 2):
        turns = original / (2 * math.pi * theta ** (j / size))
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1.0 / ((1.0 - share) / factor + share))
    return tuple(divisors)


def _yarn(own: Values, theta: float, size: int) -> tuple[Rope, float]:
    factor, attention = own.number("factor"), own.get("attention_factor")
    factors = yarn_factors(
        theta,
        size,
        factor=factor,
        original=own.number("original_max_position_embeddings"),
        fast=own.number("beta_fast", 32.0),
        slow=own.number("beta_slow", 1.0),
        truncate=own.get("truncate") is None or own.flag("truncate"),
        place=own.place,
    )
    if attention is not None:
        return Rope(theta, size, factors), own.number("attention_factor")
    if own.get("mscale") and own.get("mscale_all_dim"):
        scales = [yarn_scale(factor, own.number(key)) for key in ("mscale", "mscale_all_dim")]
        return Rope(theta, size, factors), scales[0] / scales[1]
    return Rope(theta, size, factors), yarn_scale(factor)


def _longrope(own: Values, theta: float, size: int, values: Values) -> tuple[Rope, float]:
    """Return LongRoPE's short factors (arXiv 2402.13753), for texts up to the original context."""
    factors = own.get("short_factor")
    if not isinstance(factors, list) or len(factors) != size // 2:
        raise own.error(
            "short_factor", f"a list of {size // 2} numbers is needed, not {shown(factors)}"
        )
    listed = Values({f"short_factor[{i}]": one for i, one in enumerate(factors)}, own.place)
    rope = Rope(theta, size, tuple(listed.number(key) for key in listed.values))
    original = own.number(_ORIGINAL)
    factor = own.number("factor", values.count("context") / original)
    usual = 1.0 if factor <= 1 else math.sqrt(1.0 + math.log(factor) / math.log(original))
    return rope, own.number("attention_factor", usual)


def rotary_size(size: float, head_size: int, place: str) -> int:
    """Check the number of rotary dimensions of a head: even, above 0, at most `head_size`."""
    if not 2 <= int(size) <= head_size or int(size) % 2:
        raise UserError(
            f"{place}: the number of rotary dimensions must be even and from 2 to {head_size} (the "
            f"size of a head), not {int(size)}"
        )
    return int(size)


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
    """Return YaRN's divisors of the inverse frequencies, [size / 2] (arXiv 2309.00071, 3.2).

    Dimensions with more than `fast` turns within the original context keep their frequency. Those
    with less than `slow` turns are divided by `factor`. Between the two is a linear ramp.

    Raises:
        UserError: the values do not define such dimensions.
    """
    try:
        first, last = (
            size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (fast, slow)
        )
        if truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, size - 1)
        if first == last:
            last += 0.001
        shares = (min(max((j - first) / (last - first), 0.0), 1.0) for j in range(size // 2))
        return tuple(1.0 / (share / factor + 1.0 - share) for share in shares)
    except (ValueError, ArithmeticError):
        raise UserError(
            f"{place}: YaRN is undefined for factor {factor:g}, rope_theta {theta:g}, an original "
            f"context of {original:g}, beta_slow {slow:g} and beta_fast {fast:g}"
        ) from None


def yarn_scale(factor: float, scale: float = 1.0) -> float:
    """Return YaRN's factor of cosines and sines (equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
