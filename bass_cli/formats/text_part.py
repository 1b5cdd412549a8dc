"""The text part of multimodal checkpoints: its configuration, and the names of its tensors.

Vision and audio tensors are recognised by name and never read. Prompts are text only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bass_cli.errors import UserError
from bass_cli.formats.config_keys import QUANTISED
from bass_cli.reading import shown

# The text model's type of each multimodal `model_type`, if its text_config names none.
WRAPPERS = {
    "gemma3": "gemma3_text",
    "idefics3": "llama",
    "internvl": "qwen2",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "smolvlm": "llama",
}
# Text models that are a known family by another name. With text only, the three positions of
# multimodal rotary embedding are equal, so it is the plain one.
RENAMED = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
# Sizes that a text_config may leave out: the defaults of its class in transformers. A plain
# config.json always has them.
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
          "num_attention_heads", "max_position_embeddings")  # fmt: skip
_SIZES_OF = {
    "gemma3_text": (262208, 2304, 9216, 26, 8, None),
    "llama": (32000, 4096, 11008, 32, 32, 2048),
    "mistral": (32000, 4096, 14336, 32, 32, 4096 * 32),
    "qwen2": (151936, 4096, 22016, 32, 32, 32768),
    "qwen2_vl_text": (152064, 8192, 29568, 80, 64, 32768),
    "qwen2_5_vl_text": (152064, 8192, 29568, 80, 64, 32768),
    "qwen3_5_text": (248320, 4096, 12288, 32, 16, 32768),
    "qwen3_5_moe_text": (248320, 2048, None, 40, 16, 32768),
    "qwen3_vl_text": (151936, 4096, 22016, 32, 32, 128000),
    "qwen3_vl_moe_text": (151936, 2048, 5632, 24, 16, 128000),
}
_QWEN2_VL = {
    "num_key_value_heads": 8,
    "max_window_layers": 80,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
}
# The same for other keys
_OTHERS_OF: dict[str, dict[str, Any]] = {
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3_vl_text": {"rope_theta": 5e5},
    "qwen3_vl_moe_text": {
        "num_key_value_heads": 16,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
        "num_local_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
    },
}
DEFAULTS: dict[str, dict[str, Any]] = {
    kind: {key: size for key, size in zip(_SIZES, sizes, strict=True) if size is not None}
    | _OTHERS_OF.get(kind, {})
    for kind, sizes in _SIZES_OF.items()
}
# Wrappers whose text_config may have the model_type of the wrapper
_WITHOUT_SUFFIX = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
# Text models whose own files may have rotary parameters and names of the multimodal model
_MULTIMODAL_ROPE = ("qwen3_5_text", "qwen3_5_moe_text")
# Prefixes of text tensors in the order in which they are tried: old and new spellings.
PREFIXES: tuple[str, ...] = (
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.text_model.",
    "model.",
)
# Tensors of other parts, by their names without a prefix.
IGNORED: tuple[str, ...] = (
    r"^(vision_tower|vision_model|visual|multi_modal_projector|connector|embed_vision"
    r"|audio_tower|embed_audio)\.",
    r"^image_newline$",
)


def has_text_part(config: Mapping[str, Any]) -> bool:
    """Return whether a parsed config.json describes a multimodal model that bass supports."""
    kind = config.get("model_type")
    return isinstance(kind, str) and kind in WRAPPERS


def has_names_of_text_part(config: Mapping[str, Any]) -> bool:
    """Return whether the tensors of a parsed config.json's model may have the names of a text part,
    beside tensors of other parts."""
    return has_text_part(config) or config.get("model_type") in _MULTIMODAL_ROPE


def notes_of_text(config: Mapping[str, Any], *, place: str) -> tuple[str, ...]:
    """Return a note if a parsed config.json describes a multimodal model."""
    if not has_text_part(config) and not config.get("text_config"):
        return ()
    return (
        f"{place}: only the text part of this {config.get('model_type')} model is loaded; prompts "
        "cannot have images",
    )


def text_config(config: Mapping[str, Any], *, place: str) -> tuple[Mapping[str, Any], str]:
    """Return the configuration of the text model and its place in messages. A config.json of a
    text model is returned as it is.

    Qwen2-VL's older files have the text model's keys at the top, beside `vision_config`.
    """
    if not has_text_part(config):
        if config.get("model_type") in _MULTIMODAL_ROPE:
            config = dict(config) | _plain_ropes(config)
        return config, place
    wrapper, inner = config["model_type"], config.get("text_config")
    if inner is None and wrapper in ("qwen2_vl", "qwen2_5_vl"):
        others = ("vision_", "image_", "video_", "model_type")
        inner = {key: value for key, value in config.items() if not key.startswith(others)}
    if not isinstance(inner, Mapping):
        raise UserError(f'{place}: key "text_config": a mapping is needed, not {shown(inner)}')
    kind = inner.get("model_type") or WRAPPERS[wrapper]
    kind = f"{kind}_text" if kind in _WITHOUT_SUFFIX else kind
    found = {**DEFAULTS.get(kind, {}), **inner, "model_type": RENAMED.get(kind, kind)}
    found |= _plain_ropes(found)
    tied = [one["tie_word_embeddings"] for one in (config, inner) if "tie_word_embeddings" in one]
    # Without the key the tensors decide: a head that is there and differs is not tied.
    found["tie_word_embeddings"] = not tied or True in tied
    found |= {key: config[key] for key in QUANTISED if config.get(key)}
    return found, f"{place}: text_config"


def _plain_ropes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys with rotary parameters, without those of multimodal positions."""
    keys = ("rope_scaling", "rope_parameters")
    return {key: _plain_rope(config[key]) for key in keys if isinstance(config.get(key), Mapping)}


def _plain_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary parameters without those of multimodal positions."""
    found = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    for key in ("type", "rope_type"):
        if found.get(key) == "mrope":
            found[key] = "default"
    return found


def bare_name(name: str, prefixes: tuple[str, ...]) -> str:
    """Return a tensor's name without the first of these prefixes that it has."""
    return next((name.removeprefix(one) for one in prefixes if name.startswith(one)), name)
