"""The names of the families' tensors in checkpoints, as data.

Each row is the checkpoint's name, the decoder's name with ":" and a part if it is fused, and a
transform. families.py explains the transforms and says which family has which rows. The names in
GGUF files are in formats/gguf_tensors.py.
"""

LLAMA = (
    ("embed_tokens", "embed", ""),
    ("norm", "norm", ""),
    ("lm_head", "head", ""),
    ("layers.{}.self_attn.q_proj", "layers.{}.qkv:q", ""),
    ("layers.{}.self_attn.k_proj", "layers.{}.qkv:k", ""),
    ("layers.{}.self_attn.v_proj", "layers.{}.qkv:v", ""),
    ("layers.{}.self_attn.o_proj", "layers.{}.o", ""),
    ("layers.{}.mlp.gate_proj", "layers.{}.up:gate", ""),
    ("layers.{}.mlp.up_proj", "layers.{}.up:up", ""),
    ("layers.{}.mlp.down_proj", "layers.{}.down", ""),
    ("layers.{}.input_layernorm", "layers.{}.norm1", ""),
    ("layers.{}.post_attention_layernorm", "layers.{}.norm2", ""),
)
QWEN3 = (
    *LLAMA,
    ("layers.{}.self_attn.q_norm", "layers.{}.q_norm", ""),
    ("layers.{}.self_attn.k_norm", "layers.{}.k_norm", ""),
)
STARCODER = (
    *(row for row in LLAMA if ".mlp." not in row[0]),
    ("layers.{}.mlp.c_fc", "layers.{}.up", ""),
    ("layers.{}.mlp.c_proj", "layers.{}.down", ""),
)
_GEMMA_NORMS = {
    "norm": "norm",
    "layers.{}.self_attn.q_norm": "layers.{}.q_norm",
    "layers.{}.self_attn.k_norm": "layers.{}.k_norm",
    "layers.{}.input_layernorm": "layers.{}.norm1",
    "layers.{}.post_attention_layernorm": "layers.{}.post1",
    "layers.{}.pre_feedforward_layernorm": "layers.{}.norm2",
    "layers.{}.post_feedforward_layernorm": "layers.{}.post2",
}
GEMMA = (
    *(row for row in LLAMA if row[0] not in _GEMMA_NORMS),
    *((theirs, ours, "plus_one") for theirs, ours in _GEMMA_NORMS.items()),
)
OLMO = (
    *(row for row in QWEN3 if not row[0].endswith("_layernorm")),
    ("layers.{}.post_attention_layernorm", "layers.{}.post1", ""),
    ("layers.{}.post_feedforward_layernorm", "layers.{}.post2", ""),
)
# q and k with interleaved rotary dimensions
ERNIE = tuple(
    (theirs, ours, "deinterleave" if ours.endswith((":q", ":k")) else how)
    for theirs, ours, how in LLAMA
)
PHI = (
    *(row for row in LLAMA if ":" not in row[1]),
    ("layers.{}.self_attn.qkv_proj", "layers.{}.qkv", ""),
    ("layers.{}.mlp.gate_up_proj", "layers.{}.up", ""),
)
GLM = (
    *(row for row in ERNIE if ".up:" not in row[1]),
    ("layers.{}.mlp.gate_up_proj", "layers.{}.up", ""),
)
GLM4 = (
    *GLM,
    ("layers.{}.post_self_attn_layernorm", "layers.{}.post1", ""),
    ("layers.{}.post_mlp_layernorm", "layers.{}.post2", ""),
)
QWEN3_MOE = (
    *(row for row in QWEN3 if ".mlp." not in row[0]),
    ("layers.{}.mlp.gate", "layers.{}.router", ""),
    ("layers.{}.mlp.experts.{}.gate_proj", "layers.{}.experts_up:gate", ""),
    ("layers.{}.mlp.experts.{}.up_proj", "layers.{}.experts_up:up", ""),
    ("layers.{}.mlp.experts.{}.down_proj", "layers.{}.experts_down", ""),
)
# Qwen3-VL's mixtures, of which transformers stores the experts as [inputs, outputs]
QWEN3_VL_MOE = (
    *(row for row in QWEN3_MOE if ".experts." not in row[0]),
    ("layers.{}.mlp.experts.{}.gate_up_proj", "layers.{}.experts_up", "transpose"),
    ("layers.{}.mlp.experts.{}.down_proj", "layers.{}.experts_down", "transpose"),
)
MIXTRAL = (
    *(row for row in LLAMA if ".mlp." not in row[0]),
    ("layers.{}.block_sparse_moe.gate", "layers.{}.router", ""),
    ("layers.{}.block_sparse_moe.experts.{}.w1", "layers.{}.experts_up:gate", ""),
    ("layers.{}.block_sparse_moe.experts.{}.w3", "layers.{}.experts_up:up", ""),
    ("layers.{}.block_sparse_moe.experts.{}.w2", "layers.{}.experts_down", ""),
)
GPT_OSS = (
    *(row for row in LLAMA if ".mlp." not in row[0]),
    ("layers.{}.self_attn.sinks", "layers.{}.sinks", ""),
    ("layers.{}.mlp.router", "layers.{}.router", ""),
    ("layers.{}.mlp.experts.{}.gate_up_proj", "layers.{}.experts_up", "pairs"),
    ("layers.{}.mlp.experts.{}.down_proj", "layers.{}.experts_down", "transpose"),
)
_HYBRID_NORMS = (
    "norm",
    *(f"layers.{{}}.{name}" for name in ("input_layernorm", "post_attention_layernorm")),
    *(f"layers.{{}}.self_attn.{name}_norm" for name in "qk"),
)
# Qwen3.5: attention with an output gate, norms that store their weight minus one, and the gated
# delta rule
QWEN3_5 = (
    *((theirs, ours, "plus_one" if theirs in _HYBRID_NORMS else
       "gated" if ours.endswith(":q") else how)
      for theirs, ours, how in QWEN3),
    ("layers.{}.linear_attn.in_proj_qkv", "layers.{}.delta_in:mixed", ""),
    ("layers.{}.linear_attn.in_proj_z", "layers.{}.delta_in:z", ""),
    ("layers.{}.linear_attn.in_proj_b", "layers.{}.delta_gates:beta", ""),
    ("layers.{}.linear_attn.in_proj_a", "layers.{}.delta_gates:decay", ""),
    ("layers.{}.linear_attn.conv1d", "layers.{}.conv", ""),
    ("layers.{}.linear_attn.A_log", "layers.{}.decay", ""),
    ("layers.{}.linear_attn.dt_bias", "layers.{}.step_bias", ""),
    ("layers.{}.linear_attn.norm", "layers.{}.delta_norm", ""),
    ("layers.{}.linear_attn.out_proj", "layers.{}.delta_out", ""),
)  # fmt: skip
SHARED_EXPERT = (
    *(row for row in QWEN3_MOE if ".mlp." in row[0]),
    ("layers.{}.mlp.shared_expert_gate", "layers.{}.shared_gate", ""),
    ("layers.{}.mlp.shared_expert.gate_proj", "layers.{}.shared_up:shared_gate", ""),
    ("layers.{}.mlp.shared_expert.up_proj", "layers.{}.shared_up:shared_up", ""),
    ("layers.{}.mlp.shared_expert.down_proj", "layers.{}.shared_down", ""),
)
QWEN3_5_MOE = (*(row for row in QWEN3_5 if ".mlp." not in row[0]), *SHARED_EXPERT)
QWEN3_NEXT = (
    *(row for row in QWEN3_5_MOE if ".in_proj_" not in row[0]),
    ("layers.{}.linear_attn.in_proj_qkvz", "layers.{}.delta_in", "delta"),
    ("layers.{}.linear_attn.in_proj_ba", "layers.{}.delta_gates", "delta_gates"),
)
ARCEE = tuple(
    (theirs, ours.replace(":up", ""), how)
    for theirs, ours, how in LLAMA
    if ours != "layers.{}.up:gate"
)
OPT = (
    ("decoder.embed_tokens", "embed", ""),
    ("decoder.embed_positions", "positions", "skip_two"),
    ("lm_head", "head", ""),
    ("decoder.final_layer_norm", "norm", ""),
    ("decoder.layers.{}.self_attn.q_proj", "layers.{}.qkv:q", ""),
    ("decoder.layers.{}.self_attn.k_proj", "layers.{}.qkv:k", ""),
    ("decoder.layers.{}.self_attn.v_proj", "layers.{}.qkv:v", ""),
    ("decoder.layers.{}.self_attn.out_proj", "layers.{}.o", ""),
    ("decoder.layers.{}.fc1", "layers.{}.up", ""),
    ("decoder.layers.{}.fc2", "layers.{}.down", ""),
    ("decoder.layers.{}.self_attn_layer_norm", "layers.{}.norm1", ""),
    ("decoder.layers.{}.final_layer_norm", "layers.{}.norm2", ""),
)
GPT = (
    ("wte", "embed", ""),
    ("lm_head", "head", ""),
    ("ln_f", "norm", ""),
    ("h.{}.ln_1", "layers.{}.norm1", ""),
)
GPT2 = (
    *GPT,
    ("wpe", "positions", ""),
    ("h.{}.ln_2", "layers.{}.norm2", ""),
    ("h.{}.attn.c_attn", "layers.{}.qkv", "transpose"),
    ("h.{}.attn.c_proj", "layers.{}.o", "transpose"),
    ("h.{}.mlp.c_fc", "layers.{}.up", "transpose"),
    ("h.{}.mlp.c_proj", "layers.{}.down", "transpose"),
)
GPTJ = (
    *GPT,
    ("h.{}.attn.q_proj", "layers.{}.qkv:q", "deinterleave"),
    ("h.{}.attn.v_proj", "layers.{}.qkv:v", ""),
    ("h.{}.attn.k_proj", "layers.{}.qkv:k", "deinterleave"),
    ("h.{}.attn.out_proj", "layers.{}.o", ""),
    ("h.{}.mlp.fc_in", "layers.{}.up", ""),
    ("h.{}.mlp.fc_out", "layers.{}.down", ""),
)
CODEGEN = (
    *(row for row in GPTJ if ":" not in row[1]),
    ("h.{}.attn.qkv_proj", "layers.{}.qkv", "codegen"),
)
