"""Write a decoder as a Hugging Face folder: config.json, model.safetensors and tokenizer files.

This is the inverse of formats/hf_config.py and formats/weights.py, and uses the same tables.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bass_cli.errors import UserError
from bass_cli.formats.backends import saved
from bass_cli.formats.hf_config import ACTIVATIONS, spec_of_config
from bass_cli.formats.tokenizer import CachedTokenizer
from bass_cli.formats.weights import order_of
from bass_cli.io.saving import write_file
from bass_cli.models.families import FAMILIES, Slot, slots
from bass_cli.models.spec import Rope, Spec, parameters

WEIGHTS = "model.safetensors"
_EXACT = ("A_log", "dt_bias")  # an error of A_log changes the logarithm of each decay
_RECURRENT = ("key_heads", "value_heads", "key_size", "value_size", "kernel")
_SIZES = ("layers", "width", "heads", "kv_heads", "head_size", "inner", "vocab", "context", "eps",
          "activation")  # fmt: skip
_LLAMA3 = (8192, 1.0, 4.0)  # original context, low and high factor of all published Llama 3.x
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "opt": "OPTForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gptj": "GPTJForCausalLM",
    "codegen": "CodeGenForCausalLM",
}


def config_of(spec: Spec, *, eos_ids: Collection[int], place: str) -> dict[str, Any]:
    """Make the config.json of a Spec.

    UserError, beginning with `place`, if the family's configuration cannot express the Spec, which
    may come from another format.
    """
    if spec.family not in _CLASSES:
        raise UserError(
            f"{place}: bass cannot train models of the family {spec.family}; known: "
            f"{', '.join(_CLASSES)}; give a model of one of them as `source`"
        )
    family, words = FAMILIES[spec.family], dict[str, Any]()
    activation = {"gelu_tanh": "gelu_pytorch_tanh"}.get(spec.activation, spec.activation)
    assert ACTIVATIONS[activation] == spec.activation
    values = {one.name: getattr(spec, one.name) for one in fields(spec)}
    values |= {"eps": spec.norm.eps, "activation": activation}
    words |= {family.keys[name]: values[name] for name in _SIZES if family.keys[name]}
    words |= {flag: bool(names & spec.biases) for flag, names in family.flags.items()}
    words |= _windows(spec) | _ropes(spec)
    words |= {
        "model_type": spec.family,
        "architectures": [_CLASSES[spec.family]],
        "tie_word_embeddings": spec.tied,
        "eos_token_id": list(eos_ids) or None,
    }
    if spec.recurrent is not None:
        words |= {family.keys[name]: getattr(spec.recurrent, name) for name in _RECURRENT}
        words["layer_types"] = [
            "full_attention" if layer in spec.attention_layers else "linear_attention"
            for layer in range(spec.layers)
        ]
    if spec.family == "gemma3_text":
        # a whole number in all published sizes
        words["query_pre_attn_scalar"] = round(spec.query_scale**-2)
    if spec.family == "opt":
        words |= {"word_embed_proj_dim": spec.width, "do_layer_norm_before": True}
    if not _near(astuple(spec_of_config(words, place=place)), astuple(spec)):
        raise UserError(
            f"{place}: this {spec.family} model cannot be described by a config.json, so no draft "
            "can be written from it; give a folder with safetensors"
        )
    return words


def _windows(spec: Spec) -> dict[str, Any]:
    style, widest = FAMILIES[spec.family].windows, max(spec.windows)
    if not style:
        return {}
    found: dict[str, Any] = {"sliding_window": widest or None, "use_sliding_window": widest > 0}
    if style == "types":
        found["layer_types"] = [
            "sliding_attention" if window else "full_attention" for window in spec.windows
        ]
    if spec.family in ("gemma3_text", "mistral", "starcoder2"):
        del found["use_sliding_window"]
    return found


def _ropes(spec: Spec) -> dict[str, Any]:
    kind = FAMILIES[spec.family].rotary
    if kind == "partial":
        return {"rotary_dim": 0 if spec.rope is None else spec.rope.size}
    if spec.rope is None:
        return {}
    full = _rope(spec, spec.rope)
    if spec.local_rope is None:
        # the older keys too, for readers that do not know the newer ones
        older = {} if full["rope_type"] == "default" else {"rope_scaling": full}
        return {"rope_parameters": full, "rope_theta": spec.rope.theta} | older
    local = _rope(spec, spec.local_rope)
    return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


def _rope(spec: Spec, rope: Rope) -> dict[str, Any]:
    words: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.size != spec.head_size:
        words["partial_rotary_factor"] = rope.size / spec.head_size
    if rope.factors is None:
        return words
    factor = rope.factors[-1]
    if len(set(rope.factors)) == 1:
        return words | {"rope_type": "linear", "factor": factor}
    original, low, high = _LLAMA3
    return words | {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _near(one: Any, other: Any) -> bool:
    """Return whether two values are equal up to the rounding of numbers in a GGUF file."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_near, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-4)
    return bool(one == other)


def stored(
    spec: Spec, weights: Mapping[str, Tensor], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with the name and the layout of the family's safetensors, in `dtype`;
    decays of recurrent layers in float32."""
    family = FAMILIES[spec.family]
    shapes = parameters(spec)
    for name, slot in slots(spec, family.tensors).items():
        assert slot.name in shapes
        if spec.tied and slot.name == "head.weight":
            continue
        part = weights[slot.name][slot.first : slot.first + slot.rows]
        exact = spec.recurrent is not None and name.endswith(_EXACT)
        named = family.prefix * (not name.startswith("lm_head")) + name
        yield named, _back(spec, slot, part).to(torch.float32 if exact else dtype)


def _back(spec: Spec, slot: Slot, part: Tensor) -> Tensor:
    """Undo the transform of formats/weights.py."""
    if (order := order_of(spec, slot)) is not None:
        return part[order.to(part.device)].contiguous()
    if slot.how == "transpose" and part.dim() == 2:
        return part.T.contiguous()
    if slot.how == "skip_two":
        return torch.cat((part.new_zeros(2, *part.shape[1:]), part))
    return (part - 1 if slot.how == "plus_one" else part).contiguous()


def write_folder(
    folder: Path,
    spec: Spec,
    weights: Mapping[str, Tensor],
    *,
    config: Mapping[str, Any],
    tokenizer: CachedTokenizer,
    dtype: torch.dtype,
) -> None:
    """Write each file atomically, config.json last; a folder without one is not a model."""
    from safetensors.torch import save

    folder.mkdir(exist_ok=True)
    tensors = {name: part.to("cpu").clone() for name, part in stored(spec, weights, dtype)}
    write_file(folder / WEIGHTS, save(tensors, {"format": "pt"}))
    file = saved(tokenizer.content)
    write_file(folder / file.name, file.content)
    named = {
        **file.settings,
        **tokenizer.special,
        "split_special_tokens": tokenizer.literal,
        "chat_template": tokenizer.template,
    }
    _write_json(folder / "tokenizer_config.json", named)
    kind = str(dtype).removeprefix("torch.")
    _write_json(folder / "config.json", {**config, "dtype": kind, "torch_dtype": kind})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    held = {key: value for key, value in content.items() if value is not None}
    write_file(path, f"{json.dumps(held, indent=2, ensure_ascii=False)}\n".encode())
