"""The families that GGUF files hold: their tensor names as data, and their metadata to Spec.

GGUF stores some things otherwise than safetensors: Llama's q and k rows interleaved, Gemma's
norms with 1 added, GPT-2's weights transposed already, Llama 3's rotary scaling as a tensor. No
tensor is touched here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from bass_cli.errors import UserError
from bass_cli.io.reading import shown
from bass_cli.model.hf_config import Values, known, rotary_size, shape_of
from bass_cli.model.spec import Norm, Rope, Spec

ROPE_FACTORS = "rope_freqs.weight"
IGNORED = (r"^rope_freqs\.weight$",)

_WORDS = {
    "layers": "block_count",
    "width": "embedding_length",
    "heads": "attention.head_count",
    "context": "context_length",
    "kv_heads": "attention.head_count_kv",
    "head_size": "attention.key_length",
    "inner": "feed_forward_length",
    "window": "attention.sliding_window",
    "rotary": "rope.dimension_count",
    "theta": "rope.freq_base",
    "local_theta": "rope.freq_base_swa",
}
_BLOCK = "blk.{}."
_LAYER = "layers.{}."
_TENSORS = (
    ("token_embd", "embed", ""),
    ("output_norm", "norm", ""),
    ("output", "head", ""),
    *(
        (_BLOCK + theirs, _LAYER + ours, "")
        for theirs, ours in (
            ("attn_q", "qkv:q"),
            ("attn_k", "qkv:k"),
            ("attn_v", "qkv:v"),
            ("attn_output", "o"),
            ("ffn_gate", "up:gate"),
            ("ffn_up", "up:up"),
            ("ffn_down", "down"),
            ("attn_norm", "norm1"),
            ("ffn_norm", "norm2"),
        )
    ),
)
_LLAMA_TENSORS = tuple(
    (theirs, ours, "deinterleave" if theirs.endswith(("attn_q", "attn_k")) else how)
    for theirs, ours, how in _TENSORS
)
_QK_TENSORS = (
    (_BLOCK + "attn_q_norm", _LAYER + "q_norm", ""),
    (_BLOCK + "attn_k_norm", _LAYER + "k_norm", ""),
)
_GEMMA_TENSORS = (
    *_TENSORS,
    *_QK_TENSORS,
    (_BLOCK + "post_attention_norm", _LAYER + "post1", ""),
    (_BLOCK + "post_ffw_norm", _LAYER + "post2", ""),
)
_STARCODER_TENSORS = tuple(row for row in _TENSORS if row[1] != _LAYER + "up:gate")
_GPT2_TENSORS = (
    *(row for row in _TENSORS if ":" not in row[1]),
    ("position_embd", "positions", ""),
    (_BLOCK + "attn_qkv", _LAYER + "qkv", ""),
    (_BLOCK + "ffn_up", _LAYER + "up", ""),
)


class Architecture(NamedTuple):
    """One value of general.architecture: the family it is, and what its metadata does not say."""

    family: str
    tensors: tuple[tuple[str, str, str], ...]
    norm: str = "rms"
    norm_extras: Mapping[str, bool] = {}
    activation: str = "silu"
    gated: bool = True
    rotary: bool = True


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", _LLAMA_TENSORS),
    "qwen2": Architecture("qwen2", _TENSORS),
    "qwen3": Architecture("qwen3", (*_TENSORS, *_QK_TENSORS), norm_extras={"qk": True}),
    "gemma3": Architecture(
        "gemma3_text",
        _GEMMA_TENSORS,
        norm_extras={"qk": True, "sandwich": True},
        activation="gelu_tanh",
    ),
    "starcoder2": Architecture(
        "starcoder2", _STARCODER_TENSORS, norm="layer", activation="gelu_tanh", gated=False
    ),
    "gpt2": Architecture(
        "gpt2", _GPT2_TENSORS, norm="layer", activation="gelu_tanh", gated=False, rotary=False
    ),
}
_GEMMA_27B_LAYERS = (
    62  # the one size whose queries are scaled by width / heads; the metadata does not say it
)
_GEMMA_PATTERN = 6  # every sixth layer sees everything
_GEMMA_LOCAL_THETA = 10000.0


def spec_of_gguf(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    place: str,
    rope_factors: tuple[float, ...] | None = None,
) -> Spec:
    """The Spec of GGUF metadata; `shapes`: of the file's tensors, rows first. `place` is for
    messages."""
    name = metadata.get("general.architecture")
    known(name, ARCHITECTURES, place, 'key "general.architecture": the family')
    kind = ARCHITECTURES[str(name)]
    eps = (
        "attention.layer_norm_rms_epsilon" if kind.norm == "rms" else "attention.layer_norm_epsilon"
    )
    keys = {word: f"{name}.{key}" for word, key in {**_WORDS, "eps": eps}.items()}
    values = Values(_flatten(metadata), keys, place)
    _refuse(values, str(name))
    if "token_embd.weight" not in shapes:
        raise UserError(f'{place}: the tensor "token_embd.weight" is missing')
    shape = shape_of(values, context=values.count("context"), vocab=shapes["token_embd.weight"][0])
    rope = _rope(values, str(name), shape["head_size"], rope_factors) if kind.rotary else None
    gemma = kind.family == "gemma3_text"
    wide_scale = gemma and shape["layers"] == _GEMMA_27B_LAYERS
    local = (
        Rope(values.number("local_theta", _GEMMA_LOCAL_THETA), rope.size)
        if gemma and rope
        else None
    )
    return Spec(
        family=kind.family,
        **shape,
        norm=Norm(kind.norm, values.number("eps"), **kind.norm_extras),
        rope=rope,
        local_rope=local,
        activation=kind.activation,
        gated=kind.gated,
        windows=_windows(values, shape["layers"]) if gemma else (0,) * shape["layers"],
        query_scale=(shape["width"] / shape["heads"] if wide_scale else shape["head_size"]) ** -0.5,
        embed_scale=shape["width"] ** 0.5 if gemma else 1.0,
        biases=_biases(kind.tensors, shapes),
        tied="output.weight" not in shapes,
    )


def _flatten(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A list of counts, one a layer, that are all equal stands for that count."""

    def same(value: Any) -> bool:
        return (
            isinstance(value, list)
            and value != []
            and type(value[0]) is int
            and value.count(value[0]) == len(value)
        )

    return {key: value[0] if same(value) else value for key, value in metadata.items()}


def _refuse(values: Values, name: str) -> None:
    """UserError for what the decoder cannot do."""
    for key in (
        f"{name}.expert_count",
        f"{name}.attn_logit_softcapping",
        f"{name}.final_logit_softcapping",
    ):
        if values.values.get(key):
            raise UserError(
                f'{values.place}: key "{key}": {shown(values.values[key])} is not supported'
            )
    if values.values.get("split.count") and values.count("split.count") > 1:
        raise UserError(
            f'{values.place}: key "split.count": a GGUF file in several pieces is not supported; '
            "merge them"
        )
    sizes = [values.values.get(f"{name}.attention.{part}_length") for part in ("key", "value")]
    if sizes[0] != sizes[1]:
        raise UserError(
            f'{values.place}: key "{name}.attention.value_length": {shown(sizes[1])} differs from '
            f"key_length, {shown(sizes[0])}, which is not supported"
        )


def _rope(values: Values, name: str, head_size: int, factors: tuple[float, ...] | None) -> Rope:
    size = rotary_size(values.count("rotary", head_size), head_size, values.place)
    kind = values.values.get(f"{name}.rope.scaling.type") or "none"
    known(kind, ("none", "linear"), values.place, f'key "{name}.rope.scaling.type": the rope type')
    if factors is not None and len(factors) != size // 2:
        raise UserError(
            f'{values.place}: the tensor "{ROPE_FACTORS}" has {len(factors)} factors, not '
            f"{size // 2}"
        )
    if kind == "linear":
        factors = (values.number(f"{name}.rope.scaling.factor"),) * (size // 2)
    return Rope(values.number("theta", 10000.0), size, factors)


def _windows(values: Values, layers: int) -> tuple[int, ...]:
    """Gemma's windows; for the other families llama.cpp, and so every GGUF file's author, heeds
    none."""
    if not values.values.get(values.key("window")):
        return (0,) * layers
    window, stored = values.count("window"), values.values.get(values.key("window") + "_pattern")
    if isinstance(stored, list):
        if len(stored) != layers:
            raise UserError(
                f"{values.place}: the pattern of windows is one of {len(stored)} layers, not "
                f"{layers}"
            )
        return tuple(window if local else 0 for local in stored)
    pattern = values.count(values.key("window") + "_pattern") if stored else _GEMMA_PATTERN
    return tuple(window if (i + 1) % pattern else 0 for i in range(layers))


def _biases(tensors: tuple[tuple[str, str, str], ...], shapes: Collection[str]) -> frozenset[str]:
    """The linear maps that have a bias in the file."""
    targets = (
        ours.split(":")[0].rpartition(".")[2]
        for theirs, ours, _ in tensors
        if theirs.format(0) + ".bias" in shapes
    )
    return frozenset(targets) & {"qkv", "o", "up", "down", "head"}
