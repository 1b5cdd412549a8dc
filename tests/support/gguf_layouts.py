"""How GGUF files store mixtures, hybrids and some other families: names, orders of rows, and
metadata, for tests to write.

Written from llama.cpp's converter and checked against llama.cpp (llama_cpp_logits.py). No tests here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# By family: its architecture in GGUF files, and what such files need of a tiny configuration
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3", {"sliding_window": None, "head_dim": 16}),
    "smollm3": (
        "smollm3",
        {"head_dim": 16, "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    ),
    "seed_oss": ("seed_oss", {"attention_out_bias": False}),
    "granite": ("granite", {"head_dim": 16}),
    "ernie4_5": ("ernie4_5", {}),
    "glm4": ("glm4", {}),
    "qwen3_moe": ("qwen3moe", {"moe_intermediate_size": 64}),
    "olmoe": ("olmoe", {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 12}),
    "mixtral": ("llama", {"sliding_window": None, "head_dim": 16}),
    # the scale of its gated unit has no key, and llama.cpp rounds YaRN's dimensions
    "gpt_oss": ("gpt-oss", {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "intermediate_size": 96}),
    "qwen3_5_text": ("qwen35", {"linear_value_head_dim": 16}),
    "qwen3_5_moe_text": (
        "qwen35moe",
        {"linear_value_head_dim": 16, "linear_num_value_heads": 6, "moe_intermediate_size": 64},
    ),
    "qwen3_next": (
        "qwen3next",
        {"linear_value_head_dim": 16, "attention_bias": False, "moe_intermediate_size": 64},
    ),
}
HYBRID = ("qwen35", "qwen35moe", "qwen3next")
_NAMES = {
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up",
    "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "input_layernorm": "attn_norm", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}  # fmt: skip


def stored_as(arch: str, name: str, tensor: Tensor, config: Any) -> dict[str, Tensor]:
    """The tensors of a file, by name, that hold a parameter: parts of it, perhaps reordered."""
    own = name.removeprefix("model.")
    block = ""
    if own.startswith("layers."):
        _, number, own = own.split(".", 2)
        block = f"blk.{number}."
    if ".experts." in own:
        return {block + key: part for key, part in _of_experts(arch, own, tensor).items()}
    if own == "linear_attn.in_proj_qkvz.weight":
        heads = tensor.unflatten(0, (config.linear_num_key_heads, -1))
        key, values = config.linear_key_head_dim, heads.shape[1] // 2 - config.linear_key_head_dim
        q, k, v, z = heads.split([key, key, values, values], 1)
        mixed = torch.cat([part.flatten(0, 1) for part in (q, k, v)])
        return {f"{block}attn_qkv.weight": mixed, f"{block}attn_gate.weight": z.flatten(0, 1)}
    bare, _, suffix = own.rpartition(".")
    if suffix not in ("weight", "bias"):
        bare, suffix = own, ""
    if arch in ("qwen35", "qwen35moe") and "linear_attn." in own:
        tensor = _tiled(bare, tensor, config)
    if arch in ("llama", "smollm3", "granite") and bare in (
        "self_attn.q_proj",
        "self_attn.k_proj",
    ):  # halves to pairs
        heads = config.num_attention_heads if "q_" in bare else config.num_key_value_heads
        halves = tensor.unflatten(0, (heads, 2, -1))
        tensor = halves.transpose(1, 2).reshape(tensor.shape)
    if bare == "linear_attn.conv1d":
        tensor = tensor.flatten(1)
    after = "post_attention_norm" if arch in ("gpt-oss", "seed_oss", *HYBRID) else "ffn_norm"
    theirs = after if bare == "post_attention_layernorm" else _NAMES[bare]
    return {block + theirs + (f".{suffix}" if suffix else ""): tensor}


def _of_experts(arch: str, own: str, tensor: Tensor) -> dict[str, Tensor]:
    kind = "bias" if own.endswith("_bias") else "weight"
    turned = arch == "gpt-oss" and kind == "weight"
    tensor = tensor.transpose(1, 2) if turned else tensor
    if "down_proj" in own:
        return {f"ffn_down_exps.{kind}": tensor}
    if arch == "gpt-oss":
        gate, up = tensor[:, 0::2], tensor[:, 1::2]
    else:
        gate, up = tensor.chunk(2, dim=1)
    return {f"ffn_gate_exps.{kind}": gate, f"ffn_up_exps.{kind}": up}


def _tiled(bare: str, tensor: Tensor, config: Any) -> Tensor:
    """The value heads of a tensor in the order of the files: the first of every key head, then the
    second ones."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    if bare.endswith(("norm", "out_proj")):
        columns = tensor.unflatten(-1, (keys, heads // keys, -1)) if "out" in bare else None
        return tensor if columns is None else columns.transpose(1, 2).reshape(tensor.shape)
    before = 0
    if bare.endswith(("in_proj_qkv", "conv1d")):
        before = 2 * keys * config.linear_key_head_dim
    values = tensor[before:].unflatten(0, (keys, heads // keys, -1)).transpose(0, 1)
    return torch.cat([tensor[:before], values.reshape(tensor[before:].shape)])


def changed(arch: str, stored: str, values: Tensor) -> Tensor:
    """The values that a file has in place of a parameter's."""
    if stored.endswith("ssm_a"):
        return -values.exp()
    centred = arch in HYBRID and stored.endswith("norm.weight") and "ssm_norm" not in stored
    return values + 1 if centred else values


def metadata(arch: str, config: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes of a configuration, without the architecture's name."""
    rope = config.rope_parameters
    values: dict[str, Any] = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads, "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim, "rope.freq_base": float(rope["rope_theta"]),
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }  # fmt: skip
    if "intermediate_size" in config.to_dict():
        values["feed_forward_length"] = config.intermediate_size
    if hasattr(config, "num_experts_per_tok"):
        count = getattr(config, "num_local_experts", None) or config.num_experts
        values |= {"expert_count": count, "expert_used_count": config.num_experts_per_tok}
    if arch == "gpt-oss":
        values |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"],
                   "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
                   "attention.sliding_window": config.sliding_window}  # fmt: skip
    if arch == "granite":
        values |= {"attention.scale": config.attention_multiplier, "embedding_scale": config.embedding_multiplier,
                   "residual_scale": config.residual_multiplier, "logit_scale": config.logits_scaling}  # fmt: skip
    if arch == "glm4":
        values["rope.dimension_count"] = int(config.head_dim * rope["partial_rotary_factor"])
    inner = getattr(
        config, "moe_intermediate_size", config.intermediate_size if arch == "gpt-oss" else 0
    )
    if inner:
        values["expert_feed_forward_length"] = inner
    if arch in ("qwen35moe", "qwen3next"):
        values["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if arch in HYBRID:
        size = int(config.head_dim * rope["partial_rotary_factor"])
        values |= {
            "ssm.conv_kernel": config.linear_conv_kernel_dim, "ssm.state_size": config.linear_key_head_dim,
            "ssm.group_count": config.linear_num_key_heads, "ssm.time_step_rank": config.linear_num_value_heads,
            "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
            "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
            "full_attention_interval": 4, "rope.dimension_count": size,
        }  # fmt: skip
        if arch != "qwen3next":
            values["rope.dimension_sections"] = [size // 2, 0, 0, 0]
    return values
