"""Tiny random models of many families of transformers, for tests of models that run through its
layers; no tests here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

transformers.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()

VOCAB = 97
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_WINDOW = {"sliding_window": 5}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
_SHARED_EXPERTS = {
    **_EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
_GEMMA4 = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "global_head_dim": 16,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}
# Families that run through transformers, with what their configurations need besides _SIZES
FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "cohere": {},
    "cohere2": _WINDOW,
    "deepseek_v3": _SHARED_EXPERTS | _LATENT,
    "diffllama": {},
    "ernie4_5": {},
    "ernie4_5_moe": _EXPERTS | {"moe_num_experts": 4, "moe_k": 2},
    "exaone4": _WINDOW,
    "flex_olmo": _EXPERTS,
    "gemma": {},
    "gemma2": _WINDOW,
    "gemma4_text": _WINDOW | _GEMMA4,
    "glm": {},
    "glm4": {},
    "glm4_moe": _SHARED_EXPERTS,
    "gpt_neox": {},
    "gpt_oss": _EXPERTS | _WINDOW,
    "granite": {},
    "granite_swa": _WINDOW | {"layer_types": ["full_attention", "sliding_attention"] * 2,
                              "num_hidden_layers": 4},
    "granitemoe": _EXPERTS,
    "helium": {},
    "hunyuan_v1_dense": {},
    "llama": {},
    "mimo_v2_flash": _SHARED_EXPERTS | _WINDOW | {"v_head_dim": 12},
    "minicpm3": _LATENT,
    "minimax_m2": _EXPERTS,
    "ministral3": {},
    "mixtral": _EXPERTS,
    "olmo": {},
    "olmo2": {},
    "olmo3": _WINDOW,
    "olmoe": _EXPERTS,
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phimoe": _EXPERTS,
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3_moe": _EXPERTS,
    "seed_oss": {},
    "smollm3": {},
    "starcoder2": {},
    "vaultgemma": _WINDOW,
}  # fmt: skip
# Families that are refused from their configuration alone: its values, and layers that are named
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bart": ({}, ""),
    "bloom": ({}, "layers 0, 1, 2 "),
    "deepseek_v32": (_SHARED_EXPERTS, "layers 0, 1, 2 "),
    "falcon": ({}, ""),
    "falcon_h1": ({}, "layers 0, 1, 2 "),
    "granitemoehybrid": ({"mamba_n_heads": 8, "mamba_d_head": 8}, "layers 0, 1, 2 "),
    "jamba": ({}, "layers 0, 1, 2 "),
    "kimi_linear": ({}, "layers 0, 1, 2 "),
    "lfm2": ({"layer_types": ["conv", "full_attention", "conv"]}, "layers 0, 2 "),
    "llama4_text": (_EXPERTS, "layers 0, 1, 2 "),
    "mamba": ({}, "layers 0, 1, 2 "),
    "mpt": ({}, "layers 0, 1, 2 "),
    "nemotron": ({}, ""),
    "olmo_hybrid": ({}, "layers 0, 1 "),
    "qwen3_5_text": ({}, "layers 0, 1, 2 "),
    "qwen3_next": (_EXPERTS, "layers 0, 1, 2 "),
    "recurrent_gemma": ({}, "layers 0, 1 "),
    "rwkv": ({}, "layers 0, 1, 2 "),
    "stablelm": ({}, ""),
}


def is_installed(family: str) -> bool:
    """Return whether the installed transformers has the family."""
    return family in CONFIG_MAPPING_NAMES


def config_of(family: str, **overrides: Any) -> Any:
    """Return the tiny configuration of a family. Sizes that its class lacks are left out."""
    own = FAMILIES[family] if family in FAMILIES else REFUSED[family][0]
    sizes = {**_SIZES, **own, **overrides}
    if family in ("falcon", "bart"):
        del sizes["head_dim"]
    return AutoConfig.for_model(family, **sizes)


def build_any(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """Return a model with random weights, also of norms and biases, in float32."""
    torch.manual_seed(seed)
    config = config_of(family, **overrides)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.25)
            else:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    return model.eval()


def write_any(family: str, folder: Path, *, seed: int = 0, **overrides: Any) -> Any:
    """Save such a model in shards, and return it."""
    model = build_any(family, seed=seed, **overrides)
    model.save_pretrained(folder, max_shard_size="40KB")
    return model
