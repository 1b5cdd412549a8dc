"""Configurations as authors publish them, at small sizes: no note, no refusal, and the logits of
transformers on the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_parity import assert_same, decoder_of

from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.hf_config import notes_of_config

_SAVED = {
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2, "use_cache": True,
    "torch_dtype": "float32", "transformers_version": "4.42.3",
}  # fmt: skip
_LLAMA = {
    **_SAVED, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 3,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "pretraining_tp": 1, "rope_scaling": None, "tie_word_embeddings": False, "vocab_size": 99,
}  # fmt: skip
_LLAMA3 = {
    **_LLAMA, "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False,
    "eos_token_id": [2, 3, 4], "rope_theta": 500000.0,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 32, "rope_type": "llama3"},
}  # fmt: skip
_MISTRAL = {
    **{key: value for key, value in _LLAMA.items() if key not in ("pretraining_tp", "rope_scaling")},
    "model_type": "mistral", "architectures": ["MistralForCausalLM"], "rope_theta": 10000.0,
    "sliding_window": 7,
}  # fmt: skip
_NEMO = {
    **_MISTRAL, "attention_dropout": 0.0, "head_dim": 8, "rope_theta": 1000000.0, "sliding_window": None,
}  # fmt: skip
_QWEN2 = {
    **_SAVED, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0,
    "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 128,
    "max_window_layers": 2, "num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "sliding_window": 9, "tie_word_embeddings": False,
    "use_mrope": False, "use_sliding_window": False, "vocab_size": 99,
}  # fmt: skip
_QWEN3 = {
    **{key: value for key, value in _QWEN2.items() if key != "use_mrope"},
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 32,
    "max_window_layers": 3, "rope_scaling": None, "sliding_window": None,
}  # fmt: skip
_YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
_GEMMA3 = {
    **_SAVED, "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "attention_bias": False,
    "attention_dropout": 0.0, "attn_logit_softcapping": None, "cache_implementation": "hybrid",
    "final_logit_softcapping": None, "head_dim": 24, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 64,
    "intermediate_size": 96, "max_position_embeddings": 128, "num_attention_heads": 4, "num_hidden_layers": 7,
    "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 24, "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 5,
    "sliding_window_pattern": 6, "vocab_size": 99,
}  # fmt: skip
_GPT2 = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 9,
    "embd_pdrop": 0.1, "eos_token_id": 9, "initializer_range": 0.2, "layer_norm_epsilon": 1e-5,
    "model_type": "gpt2", "n_ctx": 64, "n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 64,
    "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 99,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}  # fmt: skip
_CODEGEN = {
    **_GPT2, "model_type": "codegen", "architectures": ["CodeGenForCausalLM"], "gradient_checkpointing": False,
    "n_inner": None, "rotary_dim": 8, "scale_attn_weights": True, "tie_word_embeddings": False,
    "tokenizer_class": "GPT2Tokenizer", "use_cache": True,
}  # fmt: skip
_OPT = {
    **_SAVED, "_name_or_path": "opt-125m", "activation_dropout": 0.0, "activation_function": "relu",
    "architectures": ["OPTForCausalLM"], "attention_dropout": 0.0, "do_layer_norm_before": True, "dropout": 0.1,
    "ffn_dim": 96, "hidden_size": 64, "init_std": 0.2, "layerdrop": 0.0, "max_position_embeddings": 64,
    "model_type": "opt", "num_attention_heads": 4, "num_hidden_layers": 3, "pad_token_id": 1, "prefix": "</s>",
    "vocab_size": 99, "word_embed_proj_dim": 64,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 2": _LLAMA,
    "CodeLlama": {**_LLAMA, "rope_theta": 1000000},
    "Vicuna 16k": {**_LLAMA, "max_sequence_length": 128, "rope_scaling": {"factor": 4.0, "type": "linear"}},
    "DeepSeek-Coder": {**_LLAMA, "rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000},
    "Yi": {**_LLAMA, "num_key_value_heads": 1, "pad_token_id": 0, "rope_theta": 5000000.0,
           "auto_map": {"AutoTokenizer": ["tokenization_yi.YiTokenizer", None]}},
    "YaRN-Llama 2": {**_LLAMA, "rope_scaling": {**_YARN, "type": "yarn", "finetuned": True}},
    "InternLM, as Llama": {**_LLAMA, "rope_scaling": {"factor": 2.0, "type": "dynamic"}},
    "Qwen, as Llama": {**_LLAMA, "max_window_layers": 28, "use_sliding_window": False, "sliding_window": None},
    "Granite-Code": {**_LLAMA3, "attention_bias": True, "mlp_bias": True, "rope_scaling": None,
                     "tie_word_embeddings": True},
    "Llama 3.1": _LLAMA3,
    "Llama 3.2": {**_LLAMA3, "head_dim": 16, "tie_word_embeddings": True, "pad_token_id": 5,
                  "unsloth_fixed": True, "unsloth_version": "2024.9"},
    "SmolLM2": {**_LLAMA3, "is_llama_config": True, "rope_interleaved": False, "rope_scaling": None,
                "tie_word_embeddings": True, "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}},
    "Mistral v0.1": _MISTRAL,
    "Mistral v0.3": {**_MISTRAL, "attention_dropout": 0.0, "rope_theta": 1000000.0, "sliding_window": None},
    "Mistral-Nemo": _NEMO,
    "Mixtral's keys in Mistral": {**_MISTRAL, "attention_bias": False, "output_router_logits": False},
    "YaRN-Mistral": {**_MISTRAL, "max_sequence_length": 128,
                     "rope_scaling": {**_YARN, "type": "yarn", "finetuned": True}},
    "Ministral 8B": {**_NEMO, "sliding_window": 7},
    "Ministral, with layer types": {**_NEMO, "model_type": "ministral", "sliding_window": 7, "num_hidden_layers": 4,
                                    "architectures": ["MinistralForCausalLM"],
                                    "layer_types": ["full_attention", *["sliding_attention"] * 3]},
    "Qwen2.5": _QWEN2,
    "Qwen2.5 with YaRN": {**_QWEN2, "rope_scaling": {**_YARN, "type": "yarn"}},
    "CodeQwen 1.5": {**_QWEN2, "rotary_emb_base": 1000000, "seq_length": 128},
    "Qwen3 8B": _QWEN3,
    "Qwen3 0.6B": {**_QWEN3, "tie_word_embeddings": True, "_attn_implementation_autoset": True},
    "Qwen3 with YaRN": {**_QWEN3, "rope_scaling": {**_YARN, "rope_type": "yarn"}},
    "Gemma 3 1B": _GEMMA3,
    "Gemma 3 270M": {**{key: value for key, value in _GEMMA3.items() if key != "sliding_window_pattern"},
                     "_sliding_window_pattern": 6, "use_bidirectional_attention": False,
                     "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]},
    "StarCoder2": {**_SAVED, "architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.1,
                   "embedding_dropout": 0.1, "residual_dropout": 0.1, "hidden_act": "gelu_pytorch_tanh",
                   "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 128, "mlp_type": "default",
                   "model_type": "starcoder2", "norm_epsilon": 1e-5, "norm_type": "layer_norm",
                   "num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 2,
                   "rope_theta": 999999.4420358813, "sliding_window": 7, "use_bias": True, "vocab_size": 99},
    "GPT-2 medium": {**_GPT2, "n_special": 0, "predict_special_tokens": True},
    "GPT-2 XL": {**_GPT2, "output_past": True},
    "DistilGPT2": {**_GPT2, "_num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}},
    "GPT-J": {**_CODEGEN, "model_type": "gptj", "architectures": ["GPTJForCausalLM"], "rotary": True},
    "CodeGen": _CODEGEN,
    "OPT 125M": _OPT,
    "OPT 1.3B": {**_OPT, "_remove_final_layer_norm": False, "enable_bias": True,
                 "layer_norm_elementwise_affine": True},
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_needs_no_note_and_gives_the_logits_of_transformers(
    name: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(PUBLISHED[name]))
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(tmp_path)
    )
    made.save_pretrained(tmp_path)
    file.write_text(json.dumps(PUBLISHED[name]))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert open_checkpoint(tmp_path).notes == ()
    assert_same(decoder_of(tmp_path), model.eval())


@pytest.mark.parametrize(("name", "changes"), [
    ("CodeQwen 1.5", {"rotary_emb_base": 500.0}),
    ("Llama 2", {"use_sliding_window": True}),
    ("Mistral v0.1", {"attention_bias": True}),
    ("Llama 2", {"auto_map": {"AutoTokenizer": "x.Y", "AutoModelForCausalLM": "x.Z"}}),
    # of DeepSeek-R1-0528-Qwen3-8B: vLLM multiplies by it, transformers does not
    ("Qwen3 8B", {"rope_scaling": {**_YARN, "rope_type": "yarn", "attn_factor": 0.878}}),
])  # fmt: skip
def test_other_values_of_these_keys_are_named(name: str, changes: dict[str, Any]) -> None:
    (note,) = notes_of_config({**PUBLISHED[name], **changes}, place="")
    assert "attn_factor" in note if "rope_scaling" in changes else next(iter(changes)) in note
