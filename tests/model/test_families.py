"""Configurations to Specs, as hubs have them and as transformers 5 writes them; tensor names; refusals
and their messages."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES as WRITTEN
from checkpoints import build_model
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from bass_cli.errors import UserError
from bass_cli.formats.arrangement import unstack
from bass_cli.formats.gguf_config import reads, spec_of_gguf
from bass_cli.formats.gguf_tensors import ARCHITECTURES
from bass_cli.formats.hf_config import notes_of_config, spec_of_config
from bass_cli.formats.tensor_files import read_safetensors
from bass_cli.models.families import FAMILIES, slots
from bass_cli.models.spec import Experts, Norm, Recurrent, Rope, parameters

# As on the hub, from the days of transformers 4: flat rope keys, many values left to defaults.
OLD: dict[str, dict[str, Any]] = {
    "llama-3.1": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, "hidden_act": "silu",
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
                         "original_max_position_embeddings": 8192}},
    "llama-linear": {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 99,
        "num_attention_heads": 4, "rope_scaling": {"type": "linear", "factor": 2.5}, "max_position_embeddings": 64},
    "mistral-v0.1": {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False},
    "mistral-v0.3": {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "vocab_size": 32768, "sliding_window": None, "rope_theta": 1000000.0,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-5},
    "qwen2.5": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768,
        "max_window_layers": 21, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "sliding_window": 32768,
        "tie_word_embeddings": True, "use_sliding_window": False},
    "qwen2-windows": {
        "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 99,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "max_window_layers": 3,
        "use_sliding_window": True, "sliding_window": 16},
    "qwen3": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rope_scaling": None, "rope_theta": 1000000, "tie_word_embeddings": True,
        "use_sliding_window": False, "sliding_window": None},
    "gemma-3-1b": {
        "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144,
        "max_position_embeddings": 32768, "rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None,
        "sliding_window": 512, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
        "final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh"},
    "gemma-3-scaled": {
        "model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 99,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 3},
    "smollm3": {
        "model_type": "smollm3", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 128256, "max_position_embeddings": 65536,
        "rope_theta": 5000000.0, "rope_scaling": None, "sliding_window": None, "use_sliding_window": False,
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "layer_types": ["full_attention"] * 36,
        "attention_bias": False, "mlp_bias": False, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "max_window_layers": 28},
    "olmo-3-7b": {
        "model_type": "olmo3", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 100278, "max_position_embeddings": 65536,
        "rope_theta": 500000, "sliding_window": 4096, "rms_norm_eps": 1e-6, "attention_bias": False,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8, "tie_word_embeddings": False,
        "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
                         "original_max_position_embeddings": 8192, "rope_type": "yarn"}},
    "phi-4-mini": {
        "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 200064, "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "sliding_window": 262144,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.5] * 48}},
    "glm-4-9b-0414": {
        "model_type": "glm4", "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151552,
        "max_position_embeddings": 32768, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "attention_bias": True, "tie_word_embeddings": False, "hidden_act": "silu"},
    "granite-3.3-8b": {
        "model_type": "granite", "hidden_size": 4096, "intermediate_size": 12800, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 49159, "max_position_embeddings": 131072,
        "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
        "logits_scaling": 16.0, "rms_norm_eps": 1e-5, "rope_theta": 10000000.0, "rope_scaling": None,
        "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False},
    "exaone-4.0-32b": {
        "model_type": "exaone4", "hidden_size": 5120, "intermediate_size": 27392, "num_hidden_layers": 64,
        "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 102400,
        "max_position_embeddings": 131072, "sliding_window": 4096, "sliding_window_pattern": "LLLG",
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16, "rms_norm_eps": 1e-5, "rope_theta": 1000000,
        "rope_scaling": {"rope_type": "llama3", "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192}, "tie_word_embeddings": False},
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936,
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "rope_theta": 10000000, "rope_scaling": None,
        "partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_value_head_dim": 128, "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 512,
        "norm_topk_prob": True, "num_experts": 512, "num_experts_per_tok": 10, "attention_bias": False,
        "shared_expert_intermediate_size": 512, "hidden_act": "silu", "tie_word_embeddings": False},
    "qwen3.5-27b": {
        "model_type": "qwen3_5_text", "attention_bias": False, "attn_output_gate": True, "eos_token_id": 248044,
        "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 5120,
        "intermediate_size": 17408, "layer_types": ([*["linear_attention"] * 3, "full_attention"]) * 16,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
        "mamba_ssm_dtype": "float32", "mlp_only_layers": [], "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False, "num_attention_heads": 24, "num_hidden_layers": 64,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "vocab_size": 248320, "rope_parameters": {
            "rope_theta": 10000000, "rope_type": "default", "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10], "mrope_interleaved": True}},
    "opt-125m": {
        "model_type": "opt", "hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": 768, "activation_function": "relu",
        "do_layer_norm_before": True, "_remove_final_layer_norm": False},
    "starcoder2-3b": {
        "model_type": "starcoder2", "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30,
        "num_attention_heads": 24, "num_key_value_heads": 2, "vocab_size": 49152, "max_position_embeddings": 16384,
        "norm_epsilon": 1e-5, "rope_theta": 999999.4420358813, "sliding_window": 4096, "use_bias": True,
        "hidden_act": "gelu_pytorch_tanh", "mlp_type": "default", "norm_type": "layer_norm"},
    "gpt2": {
        "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "n_ctx": 1024,
        "vocab_size": 50257, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5},
    "gptj": {
        "model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16, "n_positions": 2048, "rotary_dim": 64,
        "n_inner": None, "vocab_size": 50400, "tie_word_embeddings": False},
    "codegen": {
        "model_type": "codegen", "n_embd": 1024, "n_layer": 20, "n_head": 16, "n_positions": 2048, "n_ctx": 2048,
        "rotary_dim": 32, "n_inner": None, "vocab_size": 51200, "tie_word_embeddings": False},
}  # fmt: skip
GGUF = {
    "general.architecture": "llama", "llama.block_count": 2, "llama.context_length": 64, "llama.embedding_length": 32,
    "llama.feed_forward_length": 48, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
GGUF_MORE = {
    "expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 8, "expert_shared_feed_forward_length": 8,
    "attention.sliding_window": 5, "ssm.conv_kernel": 4, "ssm.group_count": 2, "ssm.time_step_rank": 4,
    "ssm.state_size": 8, "ssm.inner_size": 16, "full_attention_interval": 2,
}  # fmt: skip
EMBEDDING = {"token_embd.weight": (77, 32)}


def changed(name: str, **changes: Any) -> dict[str, Any]:
    return {**OLD[name], **changes}


@pytest.mark.parametrize("name", OLD)
def test_old_and_new_style_give_the_same_spec(name: str) -> None:
    old = OLD[name]
    config = AutoConfig.for_model(
        **{key: value for key, value in old.items() if key != "rope_type"}
    )
    new = json.loads(config.to_json_string(use_diff=False))
    assert ("rope_parameters" in new) == ("n_embd" not in old and "ffn_dim" not in old)
    assert spec_of_config(old, place="old") == spec_of_config(new, place="new")


@pytest.mark.parametrize("name", [name for name in OLD if name != "phi-4-mini"])
def test_hub_configs_need_no_note(name: str) -> None:
    assert notes_of_config(OLD[name], place="") == ()


def test_note_says_where_longrope_ends() -> None:
    (note,) = notes_of_config(OLD["phi-4-mini"], place="config.json")
    assert note.startswith("config.json: texts may have 4096 tokens: beyond that, LongRoPE")


def test_values_that_matter() -> None:
    gemma = spec_of_config(OLD["gemma-3-1b"], place="")
    assert gemma.windows[:7] == (512,) * 5 + (0, 512)
    assert gemma.rope == Rope(1e6, 256)
    assert gemma.local_rope == Rope(1e4, 256)
    assert gemma.norm == Norm("rms", 1e-6, qk=True, sandwich=True)
    assert (gemma.embed_scale, gemma.query_scale, gemma.tied) == (1152**0.5, 1 / 16, True)
    scaled = spec_of_config(OLD["gemma-3-scaled"], place="")
    assert scaled.rope == Rope(1e6, 16, (8.0,) * 8)
    assert scaled.local_rope == Rope(1e4, 16)
    assert scaled.windows == (4096, 4096, 0, 4096, 4096, 0, 4096)
    assert spec_of_config(OLD["mistral-v0.1"], place="").windows == (4096,) * 32
    assert spec_of_config(OLD["mistral-v0.3"], place="").windows == (0,) * 32
    assert spec_of_config(OLD["qwen2-windows"], place="").windows == (0, 0, 0, 16)
    assert spec_of_config(OLD["qwen2.5"], place="").biases == {"qkv"}
    starcoder = spec_of_config(OLD["starcoder2-3b"], place="")
    assert (starcoder.norm, starcoder.activation) == (Norm("layer", 1e-5), "gelu_tanh")
    assert (starcoder.windows, starcoder.gated, starcoder.tied) == ((4096,) * 30, False, True)
    assert starcoder.biases == {"qkv", "o", "up", "down"}
    smol = spec_of_config(OLD["smollm3"], place="")
    assert smol.unrotated == tuple(range(3, 36, 4))
    olmo = spec_of_config(OLD["olmo-3-7b"], place="")
    assert (olmo.windows[:4], olmo.local_rope) == ((4096, 4096, 4096, 0), Rope(5e5, 128))
    assert olmo.rope is not None
    assert olmo.rope.scale == 1.2079441541679836
    assert olmo.norm == Norm("rms", 1e-6, qk=True, sandwich=True, before=False, qk_wide=True)
    phi = spec_of_config(OLD["phi-4-mini"], place="")
    assert (phi.context, phi.windows[0]) == (4096, 262144)
    assert phi.rope == Rope(1e4, 96, (1.0,) * 48, scale=(1 + math.log(32) / math.log(4096)) ** 0.5)
    glm = spec_of_config(OLD["glm-4-9b-0414"], place="")
    assert (glm.rope, glm.biases) == (Rope(1e4, 64), {"qkv"})
    granite = spec_of_config(OLD["granite-3.3-8b"], place="")
    assert (granite.query_scale, granite.embed_scale) == (1 / 128, 12.0)
    assert (granite.residual_scale, granite.logit_scale) == (0.22, 16.0)
    exaone = spec_of_config(OLD["exaone-4.0-32b"], place="")
    assert exaone.unrotated == tuple(range(3, 64, 4))
    following = spec_of_config(OLD["qwen3-next-80b-a3b"], place="")
    assert following.recurrent is not None
    assert following.recurrent.layers[:4] == (0, 1, 2, 4)
    assert following.attention_layers == tuple(range(3, 48, 4))
    assert (following.inner, following.experts) == (512, Experts(512, 10, True, shared=512))
    hybrid = spec_of_config(OLD["qwen3.5-27b"], place="")
    layers = tuple(i for i in range(64) if i % 4 != 3)
    assert hybrid.recurrent == Recurrent(layers, 16, 48, 128, 128, 4)
    assert (hybrid.rope, hybrid.output_gate) == (Rope(1e7, 64), True)
    codegen = spec_of_config(OLD["codegen"], place="")
    assert (codegen.inner, codegen.rope, codegen.parallel, codegen.biases) == (
        4096, Rope(10000.0, 32), True, {"up", "down", "head"})  # fmt: skip


def test_llama3_frequencies_equal_those_of_transformers() -> None:
    spec = spec_of_config(OLD["llama-3.1"], place="")
    assert spec.rope is not None
    assert spec.rope.factors is not None
    plain = 500000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    wanted = LlamaRotaryEmbedding(AutoConfig.for_model(**OLD["llama-3.1"])).inv_freq.double()
    torch.testing.assert_close(
        plain / torch.tensor(spec.rope.factors, dtype=torch.float64), wanted, rtol=1e-6, atol=0
    )
    assert min(spec.rope.factors) == 1.0
    assert max(spec.rope.factors) == pytest.approx(8.0)


@pytest.mark.parametrize("name", ["llama-3.1", "mistral-v0.1", "qwen2-windows", "starcoder2-3b"])
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_rope_by_layer_type_is_refused_outside_gemma(name: str, key: str) -> None:
    """transformers ignores it and uses plain rotary embedding, or fails."""
    nested = {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0},
              "sliding_attention": {"rope_type": "default", "rope_theta": 7.0}}  # fmt: skip
    with pytest.raises(UserError, match="by layer type are not supported"):
        spec_of_config({**changed(name, rope_scaling=None), key: nested}, place="")


@pytest.mark.parametrize("family", WRITTEN)
def test_slots_cover_every_row_of_the_decoder_once(family: str, tmp_path: Path) -> None:
    model = build_model(family)
    config = model.config.to_dict()
    spec = spec_of_config(config, place="")
    named = slots(spec, FAMILIES[spec.family].tensors)
    rows: dict[str, list[tuple[int, int]]] = {}
    for slot in named.values():
        rows.setdefault(slot.name, []).append((slot.first, slot.first + slot.rows))
    assert rows.keys() == parameters(spec).keys()
    for name, spans in rows.items():
        edges = sorted(spans)
        assert [0, *(last for _, last in edges)] == [
            *(first for first, _ in edges),
            parameters(spec)[name][0],
        ]
    state = set(model.state_dict())
    if spec.experts is not None:  # transformers saves each expert's tensors
        model.save_pretrained(tmp_path)
        state = set(load_file(tmp_path / "model.safetensors"))
    if spec.sinks:
        entries = read_safetensors(tmp_path / "model.safetensors")
        state = set(unstack(entries, spec.experts.total))
    assert named.keys() == {name.removeprefix(FAMILIES[spec.family].prefix) for name in state}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gguf_slots_cover_the_decoder(name: str) -> None:
    kind = ARCHITECTURES[name]
    eps = "layer_norm_rms_epsilon" if FAMILIES[kind.family].norm == "rms" else "layer_norm_epsilon"
    metadata = {key.replace("llama.", f"{name}."): value for key, value in GGUF.items()}
    metadata |= {"general.architecture": name, f"{name}.attention.{eps}": 1e-5}
    more = {} if name == "llama" else GGUF_MORE
    metadata |= {f"{name}.{key}": value for key, value in more.items() if key in reads(name)}
    if name == "gpt2":
        del metadata["gpt2.attention.head_count_kv"]
    shapes = {**EMBEDDING, "blk.0.attn_q.bias": (32,)}
    spec = spec_of_gguf(metadata, shapes, place="x.gguf")
    named = {f"{name}.{word}": False for word in kind.constants}  # no keys of such files
    assert spec_of_gguf(metadata | named, shapes, place="x.gguf") == spec
    assert {slot.name for slot in slots(spec, kind.tensors).values()} == parameters(spec).keys()
    assert (spec.vocab, spec.context, spec.tied, spec.family) == (77, 64, True, kind.family)


def test_gguf_specs_have_the_published_values() -> None:
    one_a_layer = {**GGUF, "llama.attention.head_count_kv": [2, 2], "llama.attention.key_length": 16,
                   "llama.attention.value_length": 16, "llama.rope.freq_base": 5e5}  # fmt: skip
    spec = spec_of_gguf(
        one_a_layer, {**EMBEDDING, "output.weight": (77, 32)}, place="", rope_factors=(1.0,) * 8
    )
    assert (spec.kv_heads, spec.head_size, spec.tied) == (2, 16, False)
    assert spec.rope == Rope(5e5, 16, (1.0,) * 8)
    gemma = {key.replace("llama", "gemma3"): value for key, value in GGUF.items()}
    gemma |= {"general.architecture": "gemma3", "gemma3.block_count": 62, "gemma3.attention.sliding_window": 9,
              "gemma3.attention.key_length": 4, "gemma3.attention.value_length": 4}  # fmt: skip
    spec = spec_of_gguf(gemma, EMBEDDING, place="")
    assert spec.windows[:6] == (9, 9, 9, 9, 9, 0)
    assert spec.query_scale == (32 / 4) ** -0.5  # the one size that goes by width / heads
    assert spec_of_gguf({**gemma, "gemma3.block_count": 2}, EMBEDDING, place="").query_scale == 0.5
    listed = {
        **gemma,
        "gemma3.block_count": 3,
        "gemma3.attention.sliding_window_pattern": [True, False, True],
    }
    assert spec_of_gguf(listed, EMBEDDING, place="").windows == (9, 0, 9)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (changed("gpt2", model_type="mistrel"), r'"model_type": the family "mistrel" .*mean "mistral"\?; known: llama,'),
    ({}, r'"model_type": the family "None" is not supported; known: llama, '),
    (changed("llama-3.1", rope_scaling={"type": "longrope", "factor": 2.0}),
     'key "short_factor": a list of 64 numbers is needed, not None'),
    (changed("llama-3.1", rope_scaling={"type": "longrope", "short_factor": [1.0] * 63 + [0]}),
     r'key "short_factor.63.": a number above 0 is needed, not 0'),
    (changed("qwen3-next-80b-a3b", layer_types=["mamba"] * 48),
     'key "layer_types": the type "mamba" is not supported; .*known: full_attention, linear_attention'),
    (changed("qwen3-next-80b-a3b", layer_types=["linear_attention"] * 48), "needs layers of both kinds"),
    (changed("qwen3-next-80b-a3b", attn_output_gate=False), '"attn_output_gate": False is not supported'),
    (changed("qwen3-next-80b-a3b", sliding_window=64), '"sliding_window": windows are not supported'),
    (changed("qwen3-next-80b-a3b", hidden_act="gelu"), "\"hidden_act\": 'gelu' is not supported .*, only silu"),
    (changed("qwen3-next-80b-a3b", linear_conv_kernel_dim=1), '"linear_conv_kernel_dim": a number of at least 2'),
    (changed("qwen3-next-80b-a3b", linear_num_key_heads=7), '7 does not divide the number of value heads, 32'),
    (changed("qwen3-next-80b-a3b", mlp_only_layers=[3]), '"mlp_only_layers": .* is not supported, only'),
    (changed("smollm3", no_rope_layers=[1, 2]), '"no_rope_layers": a list of 0 and 1 for 36 layers is needed'),
    (changed("llama-3.1", rope_scaling={"type": "su", "factor": 2.0}), 'rope type "su" is not supported'),
    (changed("llama-3.1", rope_scaling={"type": "dynamic"}), 'rope_parameters: the key "factor" is missing'),
    (changed("llama-3.1", rope_theta=1.0, rope_scaling={"type": "yarn", "factor": 2.0}), 'undefined for .* rope_theta 1,'),
    (changed("llama-3.1", rope_scaling={"type": "yarn", "factor": 2.0, "beta_fast": 1e308}),
     "beta_slow 1 and beta_fast 1e.308"),
    (changed("llama-3.1", rope_scaling={"type": "yarn", "factor": 2.0, "attention_factor": -1}), '"attention_factor": a'),

    (changed("llama-3.1", rope_scaling={"type": "linear"}), 'rope_parameters: the key "factor" is '
                                                            'missing'),
    (changed("llama-3.1", hidden_act="silo"), r'"hidden_act": the activation "silo" .*did you mean "silu"'),
    (changed("llama-3.1", hidden_size="big"), "\"hidden_size\": a number above 0 is needed, not "
                                              "'big'"),
    (changed("llama-3.1", num_hidden_layers=2.5), '"num_hidden_layers": a whole number from 1 to '
                                                  '4096 is needed, not 2.5'),
    (changed("llama-3.1", num_key_value_heads=5),
     '"num_key_value_heads": 5 does not divide the number of attention heads, 32'),
    (changed("llama-3.1", num_attention_heads=24), '"num_attention_heads": 24 does not divide the hidden size'),
    ({k: v for k, v in OLD["llama-3.1"].items() if k != "vocab_size"}, 'the key "vocab_size" is '
                                                                       'missing'),
    (changed("qwen2-windows", layer_types=["full_attention"]), '"layer_types": 1 types for 4 '
                                                               'layers'),
    (changed("qwen2-windows", layer_types=["linear_attention"] * 4), '"layer_types": the type '
                                                                     '"linear_attention"'),
    (changed("gemma-3-1b", final_logit_softcapping=30.0), '"final_logit_softcapping": 30.0 is not '
                                                          'supported'),
    (changed("gemma-3-1b", use_bidirectional_attention=True), '"use_bidirectional_attention": '
                                                              'True is not supported'),
    (changed("opt-125m", do_layer_norm_before=False), '"do_layer_norm_before": False is not '
                                                      'supported, only True is'),
    *((changed("opt-125m", **{key: None}), f'"{key}": None is not supported, only True is')
      for key in ("do_layer_norm_before", "layer_norm_elementwise_affine")),
    (changed("gpt2", scale_attn_weights=None), '"scale_attn_weights": None is not supported, only True is'),
    (changed("opt-125m", word_embed_proj_dim=512), '"word_embed_proj_dim": 512 is not supported'),
    (changed("gpt2", scale_attn_by_inverse_layer_idx=True), '"scale_attn_by_inverse_layer_idx": '
                                                            'True is not supp'),
    (changed("codegen", n_head=2), '"n_head": the number of heads must be a multiple of 4'),
    (changed("gptj", rotary_dim=0), '"rotary_dim": a number above 0 is needed, not 0'),
    (changed("gptj", rotary_dim=258), "from 2 to 256 .the size of a head., not 258"),
    (changed("gpt2", model_type=["gpt2"]), r'"model_type": the family "\[\'gpt2\'\]" is not supported'),
    (changed("gpt2", model_type={}), '"model_type": the family "{}" is not supported'),
    (changed("gpt2", activation_function=["gelu"]), '"activation_function": the activation .* is '
                                                    'not supported'),
    (changed("llama-3.1", num_attention_heads=0), '"num_attention_heads": a number above 0 is '
                                                  'needed, not 0'),
    (changed("llama-3.1", num_attention_heads=-4), '"num_attention_heads": a number above 0 is '
                                                   'needed, not -4'),
    (changed("llama-3.1", num_attention_heads=[32]), '"num_attention_heads": a number above 0 is '
                                                     'needed, not .32'),
    (changed("llama-3.1", num_attention_heads="32"), "\"num_attention_heads\": a number above 0 "
                                                     "is needed, not '32'"),
    (changed("llama-3.1", num_hidden_layers=10**9), '"num_hidden_layers": a whole number from 1 '
                                                    'to 4096 is needed'),
    (changed("llama-3.1", head_dim=1e9), '"head_dim": a whole number from 1 to 65536 is needed, '
                                         'not 1000000000'),
    (changed("llama-3.1", head_dim=10**400), '"head_dim": a finite number is needed, not '
                                             '1000.*000'),
    (changed("llama-3.1", vocab_size=float("nan")), '"vocab_size": a number above 0 is needed, '
                                                    'not nan'),
    (changed("llama-3.1", hidden_size=float("inf")), '"hidden_size": a finite number is needed, '
                                                     'not inf'),
    (changed("llama-3.1", rms_norm_eps=None, hidden_size=True), '"hidden_size": a finite number '
                                                                'is needed, not True'),
    (changed("llama-3.1", tie_word_embeddings="false"), "\"tie_word_embeddings\": true or false "
                                                        "is needed, not 'false'"),
    (changed("llama-3.1", attention_bias=[]), r'"attention_bias": true or false is needed, not \[\]'),
    (changed("llama-3.1", rope_scaling="llama3"), "\"rope_scaling\": a mapping is needed, not "
                                                  "'llama3'"),
    (changed("llama-3.1", rope_scaling={"type": ["linear"]}), "the rope type .* is not supported"),
    (changed("llama-3.1", rope_scaling={"type": "linear", "factor": "2"}), "rope_parameters: key \"factor\": .* not '2'"),
    (changed("llama-3.1", partial_rotary_factor=1e300), r'"partial_rotary_factor": 1e\+300 is not supported'),
    (changed("llama-3.1", partial_rotary_factor=0.001), '"partial_rotary_factor": 0.001 is not supported'),
    (changed("llama-3.1", rope_scaling={**OLD["llama-3.1"]["rope_scaling"], "high_freq_factor": 1.0}),
     'key "high_freq_factor": 1 is not above low_freq_factor, 1'),
    (changed("gemma-3-1b", rope_parameters={"full_attention": [1]}), r'"full_attention": a mapping is needed, not \[1\]'),
    (changed("gemma-3-1b", rope_scaling={"full_attention": {}}), 'no such keys in rope_scaling'),
    (changed("gemma-3-1b", rope_parameters={"rope_type": "default"}), 'an object with full_attention and sliding'),
    (changed("gemma-3-1b", sliding_window=None), "some layers have sliding_attention, but there is no window"),
    (changed("qwen2-windows", layer_types=4), '"layer_types": a list is needed, not 4'),
    (changed("qwen2-windows", layer_types=[[], {}, 1, None]), '"layer_types": the type .* is not '
                                                              'supported'),
    (changed("qwen2-windows", max_window_layers="3"), "\"max_window_layers\": a number above 0 is "
                                                      "needed, not '3'"),
    (changed("qwen2-windows", use_sliding_window="no"), '"use_sliding_window": true or false is '
                                                        'needed'),
    (changed("gemma-3-1b", sliding_window_pattern=0), '"sliding_window_pattern": a number above 0 '
                                                      'is needed, not 0'),
]  # fmt: skip


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_refusals_name_file_key_and_choices(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        spec_of_config(config, place="folder/config.json")
    assert str(error.value).startswith("folder/config.json")
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(("change", "message"), [
    ({"general.architecture": "mamba"}, 'the family "mamba" is not supported.*known: llama, qwen2'),
    ({"llama.expert_count": 8}, 'the key "llama.expert_used_count" is missing'),
    ({"llama.expert_count": 2, "llama.expert_used_count": 3}, '"llama.expert_used_count": 3 is more than the number of'),
    ({"llama.expert_count": 8, "llama.expert_used_count": 2, "llama.expert_weights_norm": False},
     '"llama.expert_weights_norm": False is not supported'),
    ({"llama.expert_count": 8, "llama.expert_used_count": 2, "llama.expert_weights_scale": 2.5},
     '"llama.expert_weights_scale": 2.5 is not supported'),
    ({"llama.rope.scaling.type": "longrope"}, 'the rope type "longrope"'),
    ({"llama.rope.scaling.type": ""}, 'the rope type "" is not supported'),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.freq_base": 1.0}, 'YaRN is undefined for factor .*, rope_theta 1,'),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 1e30}, 'YaRN is undefined for factor 1e.30,'),
    ({"llama.rope.scaling.factor": -2.0}, '"llama.rope.scaling.factor": a number above 0'),
    ({"llama.attention.value_length": 9}, '"llama.attention.value_length": 9 differs'),
    ({"llama.context_length": None}, 'the key "llama.context_length" is missing'),
    ({"llama.attention.head_count_kv": [2, 1]}, r'"llama.attention.head_count_kv": a number above 0 is needed'),
    ({"general.architecture": [1.0]}, 'the family .* is not supported'),
    ({"llama.block_count": 2**31}, '"llama.block_count": a whole number from 1 to 4096 is needed'),
    ({"llama.block_count": 2.5}, '"llama.block_count": a whole number from 1 to 4096 is needed, '
                                 'not 2.5'),
    ({"llama.attention.key_length": 2**40, "llama.attention.value_length": 2**40}, '"llama.attention.key_length": a whole'),
    ({"llama.rope.scaling.type": 2.0}, 'the rope type "2.0"'),
    ({"llama.rope.dimension_count": 7}, "from 2 to 8 .the size of a head., not 7"),
    ({"llama.rope.dimension_count": 2**31}, '"llama.rope.dimension_count": a whole number'),
])  # fmt: skip
def test_gguf_that_cannot_run_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        spec_of_gguf({**GGUF, **change}, EMBEDDING, place="x.gguf")
    assert str(error.value).startswith("x.gguf")


def test_gguf_of_other_recurrent_layers_is_refused_by_its_layers() -> None:
    names = (
        "blk.0.ssm_in.weight",
        "blk.1.attn_q.weight",
        "blk.10.ssm_a",
        "blk.2.shortconv.conv.weight",
    )
    shapes = {**EMBEDDING, **dict.fromkeys(names, (1, 1))}
    message = 'the family "granitehybrid" is not supported: it keeps state outside of attention in layers 0, 2, 10; '
    with pytest.raises(
        UserError, match=f"{message}known: llama, .*a folder with config.json"
    ) as error:
        spec_of_gguf({**GGUF, "general.architecture": "granitehybrid"}, shapes, place="x.gguf")
    assert str(error.value).startswith('x.gguf: key "general.architecture"')
    with pytest.raises(UserError, match='the family "gemma4" is not supported; known: llama, '):
        spec_of_gguf({**GGUF, "general.architecture": "gemma4"}, EMBEDDING, place="x.gguf")


@pytest.mark.parametrize(("change", "message"), [
    ({"ssm.group_count": 3}, '"qwen35.ssm.group_count": 3 does not divide the number of value heads, 4'),
    ({"ssm.inner_size": 18}, '"qwen35.ssm.inner_size": 18 is not a multiple of the number of value heads, 4'),
    ({"ssm.conv_kernel": 1}, '"qwen35.ssm.conv_kernel": a number of at least 2'),
    ({"ssm.state_size": None}, 'the key "qwen35.ssm.state_size" is missing'),
    ({"attention.recurrent_layers": [True]}, r'"qwen35.attention.recurrent_layers": true or false for each of 2 layers'),
    ({"attention.recurrent_layers": [True, True]}, '"qwen35.attention.recurrent_layers": layers of both kinds'),
    ({"nextn_predict_layers": 2}, '"qwen35.nextn_predict_layers": 2 is not below the number of layers, 2'),
    ({"expert_count": 2}, '"qwen35.expert_count": 2 is not supported'),
])  # fmt: skip
def test_gguf_refusals_of_hybrids(change: dict[str, Any], message: str) -> None:
    metadata = {key.replace("llama.", "qwen35."): value for key, value in GGUF.items()}
    more = {key: value for key, value in GGUF_MORE.items() if not key.startswith("expert")}
    more |= {"attention.sliding_window": 0, **change}
    metadata |= {f"qwen35.{key}": value for key, value in more.items()}
    with pytest.raises(UserError, match=message) as error:
        spec_of_gguf({**metadata, "general.architecture": "qwen35"}, EMBEDDING, place="x.gguf")
    assert str(error.value).startswith("x.gguf")


def test_gguf_needs_an_embedding_and_fitting_factors() -> None:
    with pytest.raises(
        UserError, match=re.escape('x.gguf: the tensor "token_embd.weight" is missing')
    ):
        spec_of_gguf(GGUF, {}, place="x.gguf")
    other = {key.replace("llama", "qwen2"): value for key, value in GGUF.items()}
    with pytest.raises(UserError, match=r'the tensor "rope_freqs\.weight" is not supported'):
        spec_of_gguf(
            {**other, "general.architecture": "qwen2"}, EMBEDDING, place="", rope_factors=(1.0,) * 4
        )
    with pytest.raises(UserError, match="has 3 factors, and 4 are needed"):
        spec_of_gguf(GGUF, EMBEDDING, place="x.gguf", rope_factors=(1.0,) * 3)


def test_specs_compare_and_hash() -> None:
    one, other = (spec_of_config(OLD["qwen3"], place=place) for place in ("here", "there"))
    assert (one, hash(one)) == (other, hash(other))
    assert one != spec_of_config(changed("qwen3", rope_theta=3.0), place="here")
