"""Read the metadata of a GGUF file as a Spec.

GGUF differs from safetensors: Llama's q and k rows are interleaved, Gemma's norms have 1 added,
GPT-2's weights are transposed already, Llama 3's rotary scaling is a tensor. No tensor is read
here. Not here: the names of tensors (gguf_tensors.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from bass_cli.errors import UserError
from bass_cli.formats.config_keys import (
    Values,
    is_neutral,
    name_keys,
    refuse_others,
    without_prefix,
)
from bass_cli.formats.gguf_tensors import (
    ARCHITECTURES,
    MIXTRAL,
    Architecture,
    Rows,
    fitted,
    is_mixture,
    name_in_file,
)
from bass_cli.formats.hf_config import (
    ACTIVATIONS,
    experts_of,
    recurrent_of,
    rotary_size,
    shape_of,
    yarn_factors,
    yarn_scale,
)
from bass_cli.models.families import FAMILIES
from bass_cli.models.spec import Norm, Recurrent, Rope, Spec
from bass_cli.reading import shown

ROPE_FACTORS = "rope_freqs.weight"
_IGNORED = (r"^rope_freqs\.weight$",)

# Keys, after the architecture's name, that llama.cpp does not read for these architectures or that
# do not change the computation (src/llama-arch.cpp and src/models of llama.cpp).
_HARMLESS = (
    "vocab_size "  # the embedding's size is used
    "tensor_data_layout pooling_type decoder_start_token_id classifier.output_labels "
    "classifier.pooling_type rope.scaling.finetuned attention.layer_norm_epsilon "
    "attention.layer_norm_rms_epsilon"
)
HARMLESS = frozenset(_HARMLESS.split())
_OTHERS = (
    "embedding_length_out embedding_length_per_layer_input features_length "
    "leading_dense_block_count use_parallel_residual expert_count expert_used_count "
    "expert_feed_forward_length expert_shared_feed_forward_length expert_chunk_feed_forward_length "
    "expert_shared_count expert_group_count expert_group_used_count expert_weights_norm "
    "expert_group_scale expert_latent_length experts_per_group moe_every_n_layers moe_latent_size "
    "interleave_moe_layer_step nextn_predict_layers n_deepstack_layers deepstack_mapping "
    "hidden_activation activation_sparsity_scale altup.active_idx altup.num_inputs "
    "decoder_block_count attn_logit_softcapping router_logit_softcapping final_logit_softcapping "
    "swin_norm rescale_every_n_layers time_mix_extra_dim time_decay_extra_dim token_shift_count "
    "full_attention_interval swiglu_clamp_exp swiglu_clamp_shexp num_loops hash_layer_count "
    "attn_res.block_size attention.max_alibi_bias attention.clamp_kqv attention.group_norm_epsilon "
    "attention.group_norm_groups attention.q_lora_rank attention.kv_lora_rank "
    "attention.decay_lora_rank attention.iclr_lora_rank attention.value_residual_mix_lora_rank "
    "attention.gate_lora_rank attention.relative_buckets_count attention.scale "
    "attention.temperature_length attention.temperature_scale attention.key_length_mla "
    "attention.value_length_mla attention.key_length_swa attention.value_length_swa "
    "attention.shared_kv_layers attention.recurrent_layers attention.rope_pattern "
    "attention.compress_ratios attention.indexer.top_k rope.dimension_sections "
    "rope.dimension_count_swa rope.scaling.alpha rope.scaling.yarn_log_multiplier ssm.conv_kernel "
    "ssm.inner_size ssm.state_size ssm.time_step_rank ssm.group_count ssm.dt_b_c_rms kda.head_dim "
    "wkv.head_size posnet.embedding_length posnet.block_count convnext.embedding_length "
    "convnext.block_count shortconv.l_cache dense_2_feat_in dense_2_feat_out dense_3_feat_in "
    "dense_3_feat_out"
)
# Keys that change the computation of these or of other architectures in llama.cpp, with the values
# that do not, besides 0 and false.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "logit_scale": (1,),
    "residual_scale": (1,),
    "embedding_scale": (1,),
    "attention.output_scale": (1,),
    "attention.value_scale": (1,),
    "expert_weights_scale": (1,),
    "expert_gating_func": (1,),  # softmax
    "rope.scaling.yarn_ext_factor": (1, -1),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_beta_fast": (32,),
    "rope.scaling.yarn_beta_slow": (1,),
    **dict.fromkeys(_OTHERS.split(), ()),
}
# Keys that may repeat the value of another key.
_SAME = {
    "embedding_length_out": "embedding_length",
    "rope.dimension_count_swa": "rope.dimension_count",
    "attention.key_length_swa": "attention.key_length",
    "attention.value_length_swa": "attention.value_length",
}
_TRUE_IF_MISSING = ("attention.causal",)
_SCALING = (
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scale_linear",  # the older name of the factor
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
)

_WORDS = {
    "layers": "block_count",
    "width": "embedding_length",
    "heads": "attention.head_count",
    "context": "context_length",
    "kv_heads": "attention.head_count_kv",
    "head_size": "attention.key_length",
    "window": "attention.sliding_window",
    "rotary": "rope.dimension_count",
    "theta": "rope.freq_base",
    "local_theta": "rope.freq_base_swa",
}
_MIXTURE_WORDS = {"experts": "expert_count", "chosen": "expert_used_count"}
_SHARED = "expert_shared_feed_forward_length"
_NORMALISED = "expert_weights_norm"
_RECURRENT_WORDS = {
    "kernel": "ssm.conv_kernel",
    "key_heads": "ssm.group_count",
    "value_heads": "ssm.time_step_rank",
    "key_size": "ssm.state_size",
    "values": "ssm.inner_size",  # of all value heads
    "interval": "full_attention_interval",
    "further": "nextn_predict_layers",
}
# Read for Granite. Other architectures may have neutral values only.
_SCALES = {
    "attention": "attention.scale",
    "embedding": "embedding_scale",
    "residual": "residual_scale",
    "logit": "logit_scale",
}
_RECURRENT_LAYERS = "attention.recurrent_layers"
# Tensors of layers that keep a state, which other architectures have
_STATE = re.compile(r"blk\.(\d+)\.(ssm|shortconv|time_mix)_?")
# Sections of the rotary embedding have positions of their own in images only.
_SECTIONS = "rope.dimension_sections"
# Gemma 3 27B, by its layers: the one size that scales queries by width / heads. The metadata has no
# key for it.
_GEMMA_27B_LAYERS = 62
_GEMMA_LOCAL_THETA = 10000.0


def spec_of_gguf(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    place: str,
    rope_factors: tuple[float, ...] | None = None,
) -> Spec:
    """Return the Spec of GGUF metadata.

    Args:
        shapes: of the file's tensors, rows first.
        place: the file's name, for errors.
        rope_factors: the content of the tensor `rope_freqs.weight`, if there is one.
    """
    kind = architecture_of(metadata, shapes, place=place)
    name, family = str(metadata["general.architecture"]), FAMILIES[kind.family]
    # Constants come last: a file has no keys for them.
    own = {**_flatten(without_prefix(metadata, f"{name}.")), **kind.constants}
    values = Values(own, place, keys=_words(kind), within=f"{name}.")
    _refuse(values, kind)
    if "token_embd.weight" not in shapes:
        raise UserError(f'{place}: the tensor "token_embd.weight" is missing')
    shape = shape_of(values, context=values.count("context"), vocab=shapes["token_embd.weight"][0])
    shape["layers"] -= _further_layers(values, shape["layers"], kind)
    rope, local, attention = None, None, 1.0
    if family.rotary:
        rope, attention = _rope(values, kind, shape, rope_factors)
    interval = kind.constants.get("no_rope_layer_interval")
    gemma = kind.family == "gemma3_text"
    if gemma and rope:
        local = Rope(values.number("local_theta", _GEMMA_LOCAL_THETA), rope.size)
    wide_scale = gemma and shape["layers"] == _GEMMA_27B_LAYERS
    scalar = shape["width"] / shape["heads"] if wide_scale else shape["head_size"]
    return Spec(
        family=kind.family,
        **shape,
        norm=Norm(family.norm, values.number("eps"), **family.norm_extras),
        rope=rope,
        local_rope=local,
        activation=ACTIVATIONS[family.defaults[family.keys["activation"]]],
        gated=family.gated,
        windows=_windows(values, shape["layers"], kind),
        query_scale=_number_or(values, _SCALES["attention"], scalar**-0.5) * attention * attention,
        embed_scale=shape["width"] ** 0.5 if gemma else _number_or(values, _SCALES["embedding"]),
        residual_scale=_number_or(values, _SCALES["residual"]),
        logit_scale=_number_or(values, _SCALES["logit"]),
        biases=_biases(fitted(kind, shapes).tensors, shapes, shape["layers"]),
        tied="output.weight" not in shapes,
        unrotated=tuple(i for i in range(shape["layers"]) if interval and not (i + 1) % interval),
        experts=experts_of(values, family),
        sinks=family.mixture == "clamped",
        output_gate=family.recurrent,
        recurrent=_recurrent(values, shape["layers"]) if family.recurrent else None,
    )


def architecture_of(
    metadata: Mapping[str, Any], names: Collection[str], *, place: str
) -> Architecture:
    """Return the architecture of a file's metadata. Mixtral is "llama" with experts.

    Args:
        names: of the file's tensors.

    Raises:
        UserError: bass does not read it; names its recurrent layers.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        found = {int(one[1]) for tensor in names if (one := _STATE.match(tensor))}
        layers = ", ".join(str(i) for i in sorted(found))
        given = name if isinstance(name, str) else shown(name)
        why = f": it keeps state outside of attention in layers {layers}" if found else ""
        raise UserError(
            f'{place}: key "general.architecture": the family "{given[:80]}" is not supported'
            f"{why}; known: {', '.join(ARCHITECTURES)}; a folder with config.json and safetensors "
            "may run (docs/reference/models.md)"
        )
    mixtral = name == "llama" and metadata.get("llama.expert_count")
    return MIXTRAL if mixtral else ARCHITECTURES[str(name)]


def ignored_in(metadata: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Return patterns of the names of tensors that are not loaded.

    Args:
        layers: of the Spec. Further layers predict further tokens.
    """
    name = metadata["general.architecture"]
    count = metadata.get(f"{name}.block_count")
    count = count if isinstance(count, int) else layers
    return (*_IGNORED, *(rf"^blk\.{i}\." for i in range(layers, count)))


def _words(kind: Architecture) -> dict[str, str]:
    """Return the keys that the reader uses, after the architecture's name, by its words."""
    family = FAMILIES[kind.family]
    rms = "rms_" if family.norm == "rms" else ""
    words = {**_WORDS, "inner": kind.inner, "eps": f"attention.layer_norm_{rms}epsilon"}
    if is_mixture(kind):
        words |= _MIXTURE_WORDS
    if "shared" in family.keys:
        words["shared"] = _SHARED
    return words | _RECURRENT_WORDS if family.recurrent else words


def _further_layers(values: Values, layers: int, kind: Architecture) -> int:
    """Return how many of the file's last layers predict further tokens."""
    if not FAMILIES[kind.family].recurrent or not values.get("further"):
        return 0
    if (found := values.count("further")) < layers:
        return found
    raise values.error("further", f"{found} is not below the number of layers, {layers}")


def _recurrent(values: Values, layers: int) -> Recurrent:
    """Return the layers with the gated delta rule."""
    flags = values.get(_RECURRENT_LAYERS)
    if flags is None:
        interval = values.count("interval", 4)  # llama.cpp's default
        flags = [(i + 1) % interval != 0 for i in range(layers)]
    if (
        not isinstance(flags, list)
        or len(flags) < layers
        or any(not isinstance(flag, bool) for flag in flags)
    ):
        needed = f"true or false for each of {layers} layers is needed, not {shown(flags)}"
        raise values.error(_RECURRENT_LAYERS, needed)
    if len(set(flags[:layers])) == 1:
        needed = "layers of both kinds are needed, with attention and recurrent ones"
        raise values.error(_RECURRENT_LAYERS, needed)
    heads, size = values.count("value_heads"), values.count("values")
    if size % heads:
        raise values.error(
            "values", f"{size} is not a multiple of the number of value heads, {heads}"
        )
    named = tuple(i for i in range(layers) if flags[i])
    return recurrent_of(values, named, value_size=size // heads)


def _flatten(own: Mapping[str, Any]) -> dict[str, Any]:
    """Replace lists of equal integers, one for each layer, by that integer."""

    def same(value: Any) -> bool:
        return isinstance(value, list) and {*map(type, value)} == {int} and len(set(value)) == 1

    return {key: value[0] if same(value) else value for key, value in own.items()}


def notes_of_gguf(metadata: Mapping[str, Any], *, place: str) -> tuple[str, ...]:
    """Return notes about keys of the architecture that `spec_of_gguf` did not use."""
    name = str(metadata.get("general.architecture"))
    own = without_prefix(metadata, f"{name}.")
    known = HARMLESS | NEUTRAL.keys() | reads(name)
    found = {key: value for key, value in own.items() if key not in known}
    window = found.pop(_WORDS["window"], None)
    notes = name_keys({f"{name}.{key}": value for key, value in found.items()}, place)
    if window:
        notes += (
            f'{place}: key "{name}.{_WORDS["window"]}": {shown(window)} is not used, as in '
            "llama.cpp: all layers of this architecture attend to the whole context",
        )
    return notes


def reads(name: str) -> frozenset[str]:
    """Return the keys, after the architecture's name, that `spec_of_gguf` uses."""
    kind = ARCHITECTURES[name]
    family, words = FAMILIES[kind.family], _words(kind)
    if kind.family != "gemma3_text":
        del words["local_theta"]
    if not kind.pattern:
        del words["window"]
    # files of mixtures may have the size of other layers too, of which they have none
    keys = {*words.values(), "feed_forward_length", "attention.value_length"}
    keys |= {*(_SCALING if family.rotary else ())}
    if name == "llama" or is_mixture(kind):
        keys |= {*_MIXTURE_WORDS.values(), _NORMALISED}
    if "attention_multiplier" in family.defaults:
        keys |= {*_SCALES.values()}
    if kind.pattern:
        keys.add(_WORDS["window"] + "_pattern")
    if family.recurrent:
        keys |= {_RECURRENT_LAYERS, _SECTIONS}
    return frozenset(keys)


def _refuse(values: Values, kind: Architecture) -> None:
    """Raise a UserError for values that the decoder does not support."""
    used = reads(values.within.removesuffix("."))
    set_here = {
        key: value
        for key, value in values.values.items()
        if key not in used
        and not (key in _SAME and value == values.get(_SAME[key]))
        and (key in _TRUE_IF_MISSING or not _is_zero(value))
    }
    refuse_others(set_here, NEUTRAL, place=values.place, prefix=values.within)
    normalised = values.get(_NORMALISED)
    # whether llama.cpp divides the weights of chosen experts by their sum
    divides = FAMILIES[kind.family].mixture != "config" or bool(kind.constants["norm_topk_prob"])
    if is_mixture(kind) and normalised is not None and normalised is not divides:
        raise values.error(
            _NORMALISED,
            f"{shown(normalised)} is not supported for this architecture, and llama.cpp does not "
            "read it",
        )
    size, other = values.get("attention.key_length"), values.get("attention.value_length")
    if size != other:
        raise values.error(
            "attention.value_length",
            f"{shown(other)} differs from key_length, {shown(size)}, which is not supported",
        )


def _is_zero(value: Any) -> bool:
    return not any(value) if isinstance(value, list) else is_neutral(value, (0, False, ""))


def _rope(
    values: Values, kind: Architecture, shape: Mapping[str, int], factors: tuple[float, ...] | None
) -> tuple[Rope, float]:
    """Return the rotary embedding and the factor of the scale of queries and keys, by llama.cpp's
    rules: a missing type means linear, an old key may hold the factor, and a factor of 0 means 1.

    One rule is that of the published model: gpt-oss does not round YaRN's first and last dimension,
    which metadata does not say and llama.cpp ignores.
    """
    size = rotary_size(values.count("rotary", shape["head_size"]), shape["head_size"], values.place)
    key = "rope.scaling.type"
    scaled = values.known(key, ("none", "linear", "yarn"), "the rope type", "linear")
    if factors is not None and values.within != "llama.":
        raise UserError(
            f'{values.place}: the tensor "{ROPE_FACTORS}" is not supported for this architecture'
        )
    if factors is not None and len(factors) != size // 2:
        raise UserError(
            f'{values.place}: the tensor "{ROPE_FACTORS}" has {len(factors)} factors, and '
            f"{size // 2} are needed"
        )
    theta, attention = (
        values.number("theta", 10000.0),
        _number_or(values, "rope.scaling.attn_factor"),
    )
    names = ("rope.scaling.factor", "rope.scale_linear")
    stored = next((name for name in names if values.get(name) is not None), None)
    factor = 1.0 if stored is None or scaled == "none" else _number_or(values, stored)
    scaling: tuple[float, ...] | None = None
    if scaled == "yarn":
        scaling = yarn_factors(
            theta,
            size,
            factor=factor,
            original=_number_or(values, "rope.scaling.original_context_length", shape["context"]),
            fast=32.0,
            slow=1.0,
            truncate=FAMILIES[kind.family].rope.get("truncate", True),
            place=values.place,
        )
        attention *= yarn_scale(factor)
    elif factor != 1.0:
        scaling = (factor,) * (size // 2)
    if attention != 1.0 and kind.family == "gemma3_text":
        fault = f"an attention factor ({attention:g}) is not supported for this architecture"
        raise values.error(key, fault)
    if factors is not None and scaling is not None:
        scaling = tuple(one * other for one, other in zip(factors, scaling, strict=True))
    rope = Rope(theta, size, scaling or factors)
    # for some dimensions of a head it multiplies cosines and sines
    return (
        (rope, attention) if size == shape["head_size"] else (rope._replace(scale=attention), 1.0)
    )


def _number_or(values: Values, word: str, default: float = 1.0) -> float:
    """Return a number; 0 means the default."""
    return default if values.get(word, 0) == 0 else values.number(word)


def _windows(values: Values, layers: int, kind: Architecture) -> tuple[int, ...]:
    """Return the window of each layer, 0 for none. llama.cpp ignores windows of most
    architectures, so bass does too."""
    optional = kind.family == "gemma3_text" and not values.get("window")
    if not kind.pattern or optional:
        return (0,) * layers
    window, key = values.count("window"), values.key("window") + "_pattern"
    stored = values.get(key)
    if isinstance(stored, list):
        if len(stored) != layers:
            raise UserError(
                f"{values.place}: the pattern of windows has {len(stored)} layers, and the model "
                f"{layers}"
            )
        return tuple(window if local else 0 for local in stored)
    pattern = values.count(key) if stored else kind.pattern
    return tuple(window if (i + 1) % pattern else 0 for i in range(layers))


def _biases(rows: Rows, shapes: Collection[str], layers: int) -> frozenset[str]:
    """Return the linear maps with a bias in the file."""
    targets = (
        ours.split(":")[0].rpartition(".")[2]
        for theirs, ours, _ in rows
        if any(name_in_file(theirs, i) + ".bias" in shapes for i in range(layers))
    )
    experts = {"router", "experts_up", "experts_down"}
    return frozenset(targets) & {"qkv", "o", "up", "down", "head", *experts}
