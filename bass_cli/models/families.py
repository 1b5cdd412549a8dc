"""The known families as data: their keys of config.json, and their tensors by name.

`slots` maps each checkpoint tensor to a decoder tensor and names a transform (weights.py performs
it). Not here: reading a config (hf_config.py), the names in GGUF files (gguf_tensors.py). No tensor
is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from bass_cli.models import tensor_names
from bass_cli.models.spec import Spec, parameters

# Buffers in some checkpoints that are no weights.
IGNORED = (
    r"rotary_emb\.inv_freq$",
    r"attn\.(masked_)?bias$",
    r"attn\.(causal_mask|embed_positions)$",
    r"^mtp\.",  # layers that predict further tokens
)


class Slot(NamedTuple):
    """The target of a checkpoint tensor: rows [first, first + rows) of decoder tensor `name`, after
    the transform `how`.

    how: "" for none; "transpose"; "plus_one" adds 1; "skip_two" drops the first two rows;
        "deinterleave" reorders the rotary dimensions of each head, even ones first; "codegen"
        sorts fused blocks of q, v, k into q, k, v and deinterleaves q and k; "alternate" sorts
        rows that alternate between gate and up; "pairs" does so after "transpose"; "gated" sorts
        heads of query and output gate; "delta" and "delta_gates" sort Qwen3-Next's rows by key
        head; "tiled" and "tiled_columns" sort value heads, of which files have the first ones of
        all key heads first; "decay" is log(-x), and "tiled_decay" is both.
    turned: whether the tensor is stored as [inputs, outputs], besides `how`.
    """

    name: str
    first: int
    rows: int
    how: str = ""
    turned: bool = False


class Family(NamedTuple):
    """The properties of a family.

    prefix: optional prefix of a checkpoint's tensor names.
    tensors: (checkpoint name, decoder name with ":" and a part if it is fused, transform).
    keys: the config's key for each word that the reader uses; "" if the config has none.
    defaults: values of keys that a config leaves out.
    rotary: "config"; "fraction" if the config may name a share of a head; "partial" for the first
        `rotary_dim` dimensions; "" for learned positions.
    by_type: layers with a window have their own rotary parameters in the config.
    rope: rotary parameters if the config has none.
    mixture: "" for one feed-forward; "config" if the config says whether weights of experts are
        normalised; "normalised"; "clamped" for gpt-oss's gated unit.
    unrotated: layers without rotary embedding: "" for none; "listed" for those that the config
        lists; "full" for those without a window, if there are windows.
    windows: "" for none; "all" for the same in every layer; "types" for the layers that the
        config names.
    recurrent: the config names layers with the gated delta rule, and attention has an output gate.
    biases: the linear maps that always have a bias.
    flags: config keys that switch biases on, with their linear maps.
    aliases: other names of keys.
    eps: epsilon of the norms, if the config has no key for it.
    """

    prefix: str
    tensors: tuple[tuple[str, str, str], ...]
    keys: Mapping[str, str]
    defaults: Mapping[str, Any]
    norm: str = "rms"
    norm_extras: Mapping[str, bool] = {}
    rotary: str = "config"
    gated: bool = True
    parallel: bool = False
    windows: str = ""
    biases: frozenset[str] = frozenset()
    flags: Mapping[str, frozenset[str]] = {}
    aliases: Mapping[str, str] = {}
    eps: float | None = None
    by_type: bool = False
    unrotated: str = ""
    rope: Mapping[str, Any] = {}
    mixture: str = ""
    recurrent: bool = False

    @property
    def reads(self) -> frozenset[str]:
        """The keys of config.json that the reader uses."""
        keys = {"model_type", *self.keys.values(), *self.defaults, *self.flags}
        return frozenset(keys - {""})


# Names of tensors that are not followed by .weight
_WITHOUT_SUFFIX = (
    *("self_attn.sinks", "linear_attn.A_log", "linear_attn.dt_bias"),
    *("attn_sinks.weight", "ssm_a", "ssm_dt.bias"),
)
CODEGEN_BLOCKS = 4  # CodeGen's fused qkv rows are this many blocks of q, v, k

_EVERY_MAP = frozenset({"qkv", "o", "up", "down"})
_LLAMA_KEYS = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "vocab": "vocab_size",
    "kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "inner": "intermediate_size",
    "eps": "rms_norm_eps",
    "context": "max_position_embeddings",
    "activation": "hidden_act",
}
_OPT_KEYS = _LLAMA_KEYS | {
    "inner": "ffn_dim",
    "activation": "activation_function",
    "kv_heads": "",
    "head_size": "",
    "eps": "",
}
_GPT_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_GPT_KEYS = {
    "layers": "n_layer",
    "width": "n_embd",
    "heads": "n_head",
    "kv_heads": "",
    "head_size": "",
    "inner": "n_inner",
    "eps": "layer_norm_epsilon",
    "context": "n_positions",
    "activation": "activation_function",
    "vocab": "vocab_size",
}
_MIXTURE_KEYS = {"experts": "num_local_experts", "chosen": "num_experts_per_tok"}
_MIXTURE_ALIASES = {"num_experts": "num_local_experts"}
_HYBRID_KEYS = _LLAMA_KEYS | {
    "kernel": "linear_conv_kernel_dim",
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_size": "linear_key_head_dim",
    "value_size": "linear_value_head_dim",
}

_ROPE_DEFAULTS: dict[str, Any] = {
    "rope_theta": 10000.0,
    "rope_parameters": None,
    "rope_scaling": None,
    "partial_rotary_factor": None,
    "original_max_position_embeddings": None,
    "tie_word_embeddings": False,
    "head_dim": None,
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
_WINDOW_DEFAULTS = {
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "layer_types": None,
    "num_key_value_heads": 32,
}
_STARCODER_DEFAULTS = {
    "norm_epsilon": 1e-5,
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "use_bias": True,
    "sliding_window": None,
    "layer_types": None,
}
_GPT_DEFAULTS = {
    "tie_word_embeddings": False,
    "n_inner": None,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "sliding_window": None,
    "layer_types": None,
}
_GEMMA_DEFAULTS = _ROPE_DEFAULTS | {
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
    "tie_word_embeddings": True,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "max_position_embeddings": 131072,
    "sliding_window_pattern": 6,
}
_HYBRID_DEFAULTS = _ROPE_DEFAULTS | {
    "partial_rotary_factor": 0.25,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": None,
    "full_attention_interval": 4,
    "attn_output_gate": True,
    "sliding_window": None,
}
_QWEN3_5 = Family(
    "model.",
    tensor_names.QWEN3_5,
    _HYBRID_KEYS,
    _HYBRID_DEFAULTS | {"num_key_value_heads": 4},
    norm_extras={"qk": True},
    rotary="fraction",
    flags={"attention_bias": frozenset({"qkv", "o"})},
    recurrent=True,
)
_QWEN3_5_MOE = _QWEN3_5._replace(
    tensors=tensor_names.QWEN3_5_MOE,
    keys=_HYBRID_KEYS
    | {"inner": "moe_intermediate_size", "shared": "shared_expert_intermediate_size"}
    | {"experts": "num_experts", "chosen": "num_experts_per_tok"},
    defaults=_HYBRID_DEFAULTS
    | {"num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8}
    | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    mixture="normalised",
)
_LLAMA = Family(
    "model.",
    tensor_names.LLAMA,
    _LLAMA_KEYS,
    _ROPE_DEFAULTS | {"sliding_window": None, "layer_types": None},
    flags={"attention_bias": frozenset({"qkv", "o"}), "mlp_bias": frozenset({"up", "down"})},
)
_GLM = Family(
    "model.",
    tensor_names.GLM,
    _LLAMA_KEYS,
    _ROPE_DEFAULTS
    | {"num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5}
    | {"rms_norm_eps": 1.5625e-7, "attention_bias": True}
    | {"sliding_window": None, "layer_types": None},
    rotary="fraction",
    flags={"attention_bias": frozenset({"qkv"})},
)
_OLMO2 = Family(
    "model.",
    tensor_names.OLMO,
    _LLAMA_KEYS,
    _ROPE_DEFAULTS | {"rms_norm_eps": 1e-5, "sliding_window": None, "layer_types": None},
    norm_extras={"qk": True, "sandwich": True, "before": False, "qk_wide": True},
    flags={"attention_bias": frozenset({"qkv", "o"})},
)
_PARTIAL = Family(
    "transformer.",
    tensor_names.GPTJ,
    _GPT_KEYS,
    _GPT_DEFAULTS | {"rotary_dim": 64},
    norm="layer",
    rotary="partial",
    gated=False,
    parallel=True,
    biases=frozenset({"up", "down", "head"}),
    aliases=_GPT_ALIASES,
)

_QWEN3_MOE = Family(
    "model.",
    tensor_names.QWEN3_MOE,
    _LLAMA_KEYS | _MIXTURE_KEYS | {"inner": "moe_intermediate_size"},
    _ROPE_DEFAULTS
    | {"num_key_value_heads": 4, "use_sliding_window": False, "sliding_window": 4096}
    | {"layer_types": None, "max_window_layers": None, "intermediate_size": 6144}
    | {"num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    | {"norm_topk_prob": False},
    norm_extras={"qk": True},
    windows="all",
    flags={"attention_bias": frozenset({"qkv", "o"})},
    aliases=_MIXTURE_ALIASES,
    mixture="config",
)

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": Family(
        "model.",
        tensor_names.LLAMA,
        _LLAMA_KEYS,
        _ROPE_DEFAULTS | {"num_key_value_heads": 8, "sliding_window": 4096, "layer_types": None},
        windows="types",
    ),
    "qwen2": Family(
        "model.",
        tensor_names.LLAMA,
        _LLAMA_KEYS,
        _ROPE_DEFAULTS | _WINDOW_DEFAULTS,
        windows="types",
        biases=frozenset({"qkv"}),
    ),
    "qwen3": Family(
        "model.",
        tensor_names.QWEN3,
        _LLAMA_KEYS,
        _ROPE_DEFAULTS | _WINDOW_DEFAULTS | {"head_dim": 128},
        norm_extras={"qk": True},
        windows="types",
        flags={"attention_bias": frozenset({"qkv", "o"})},
    ),
    "gemma3_text": Family(
        "model.",
        tensor_names.GEMMA,
        _LLAMA_KEYS | {"activation": "hidden_activation"},
        _GEMMA_DEFAULTS,
        norm_extras={"qk": True, "sandwich": True},
        windows="types",
        by_type=True,
        flags={"attention_bias": frozenset({"qkv", "o"})},
    ),
    "opt": Family(
        "model.",
        tensor_names.OPT,
        _OPT_KEYS,
        {
            "tie_word_embeddings": True,
            "activation_function": "relu",
            "enable_bias": True,
            "word_embed_proj_dim": None,
            "sliding_window": None,
            "layer_types": None,
        },
        eps=1e-5,
        norm="layer",
        rotary="",
        gated=False,
        flags={"enable_bias": _EVERY_MAP},
    ),
    "starcoder2": Family(
        "model.",
        tensor_names.STARCODER,
        _LLAMA_KEYS | {"eps": "norm_epsilon"},
        _ROPE_DEFAULTS | _STARCODER_DEFAULTS,
        norm="layer",
        gated=False,
        windows="all",
        flags={"use_bias": _EVERY_MAP},
    ),
    "gpt2": Family(
        "transformer.",
        tensor_names.GPT2,
        _GPT_KEYS,
        _GPT_DEFAULTS | {"tie_word_embeddings": True},
        norm="layer",
        rotary="",
        gated=False,
        biases=_EVERY_MAP,
        aliases=_GPT_ALIASES,
    ),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2._replace(
        defaults={**_OLMO2.defaults}
        | {"rope_theta": 5e5, "sliding_window": 4096, "sliding_window_pattern": 4},
        windows="types",
        by_type=True,
    ),
    "exaone4": _OLMO2._replace(
        defaults={**_OLMO2.defaults}
        | {"num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4},
        norm_extras={"qk": True, "sandwich": True, "before": False},
        windows="types",
        unrotated="full",
        flags={},
    ),
    "smollm3": _LLAMA._replace(
        defaults=_ROPE_DEFAULTS
        | {"rope_theta": 2e6, "num_key_value_heads": 4, "tie_word_embeddings": True}
        | {"sliding_window": None, "use_sliding_window": False, "layer_types": None}
        | {"no_rope_layers": None, "no_rope_layer_interval": 4},
        windows="types",
        unrotated="listed",
    ),
    "phi3": Family(
        "model.",
        tensor_names.PHI,
        _LLAMA_KEYS,
        _ROPE_DEFAULTS
        | {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}
        | {"sliding_window": None, "layer_types": None},
        rotary="fraction",
        windows="all",
    ),
    "glm": _GLM,
    "glm4": _GLM._replace(tensors=tensor_names.GLM4, norm_extras={"sandwich": True}),
    "granite": _LLAMA._replace(
        defaults={**_LLAMA.defaults}
        | {"embedding_multiplier": 1.0, "attention_multiplier": 1.0}
        | {"residual_multiplier": 1.0, "logits_scaling": 1.0}
    ),
    "seed_oss": _LLAMA._replace(
        defaults={**_LLAMA.defaults}
        | {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        flags={
            "attention_bias": frozenset({"qkv"}),
            "attention_out_bias": frozenset({"o"}),
            "mlp_bias": frozenset({"up", "down"}),
        },
    ),
    "ernie4_5": Family(
        "model.",
        tensor_names.ERNIE,
        _LLAMA_KEYS,
        _ROPE_DEFAULTS
        | {"rope_theta": 5e5, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5}
        | {"tie_word_embeddings": True, "sliding_window": None, "layer_types": None},
        flags={"use_bias": _EVERY_MAP},
    ),
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_vl_moe_text": _QWEN3_MOE._replace(
        tensors=tensor_names.QWEN3_VL_MOE, mixture="normalised"
    ),
    "olmoe": Family(
        "model.",
        tensor_names.QWEN3_MOE,
        _LLAMA_KEYS | _MIXTURE_KEYS | {"experts": "num_experts"},
        _ROPE_DEFAULTS
        | {"rms_norm_eps": 1e-5, "sliding_window": None, "layer_types": None}
        | {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
        norm_extras={"qk": True, "qk_wide": True},
        flags={"attention_bias": frozenset({"qkv", "o"})},
        aliases={"num_local_experts": "num_experts"},
        mixture="config",
    ),
    "mixtral": Family(
        "model.",
        tensor_names.MIXTRAL,
        _LLAMA_KEYS | _MIXTURE_KEYS,
        _ROPE_DEFAULTS
        | {"rope_theta": 1e6, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
        | {"sliding_window": None, "layer_types": None}
        | {"num_local_experts": 8, "num_experts_per_tok": 2},
        windows="all",
        aliases=_MIXTURE_ALIASES,
        mixture="normalised",
    ),
    "gpt_oss": Family(
        "model.",
        tensor_names.GPT_OSS,
        _LLAMA_KEYS | _MIXTURE_KEYS,
        _ROPE_DEFAULTS
        | {"rope_theta": 150000.0, "num_key_value_heads": 8, "head_dim": 64}
        | {"rms_norm_eps": 1e-5, "attention_bias": True, "layer_types": None}
        | {"sliding_window": 128, "sliding_window_pattern": 2}
        | {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "num_experts_per_tok": 4},
        windows="types",
        biases=frozenset({"router", "experts_up", "experts_down"}),
        flags={"attention_bias": frozenset({"qkv", "o"})},
        aliases=_MIXTURE_ALIASES,
        rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        mixture="clamped",
    ),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "qwen3_next": _QWEN3_5_MOE._replace(
        tensors=tensor_names.QWEN3_NEXT,
        defaults={**_QWEN3_5_MOE.defaults}
        | {"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True}
        | {"intermediate_size": 5632},
        mixture="config",
    ),
    "arcee": _LLAMA._replace(
        tensors=tensor_names.ARCEE,
        defaults={**_LLAMA.defaults} | {"rms_norm_eps": 1e-5, "hidden_act": "relu2"},
        gated=False,
    ),
    "gptj": _PARTIAL,
    "codegen": _PARTIAL._replace(tensors=tensor_names.CODEGEN),
}


def slots(spec: Spec, tensors: tuple[tuple[str, str, str], ...]) -> dict[str, Slot]:
    """Map checkpoint names, without the family's prefix, to Slots, for all tensors of
    `parameters(spec)`."""
    shapes, parts = parameters(spec), _parts(spec)
    found = {}
    for theirs, ours, how in tensors:
        target, _, part = ours.partition(":")
        experts = spec.experts.total if spec.experts and theirs.count("{}") == 2 else 1
        for i in range(spec.layers if "{}" in ours else 1):
            for kind in (".weight", ".bias"):
                name = target.format(i) + kind
                if name not in shapes:
                    continue
                every = shapes[name][0] // experts  # rows of one expert
                first, rows = parts[part] if part else (0, every)
                for expert in range(experts):
                    # a bias is not transposed
                    own = "alternate" if how == "pairs" and kind == ".bias" else how
                    suffix = "" if theirs.endswith(_WITHOUT_SUFFIX) else kind
                    found[theirs.format(i, expert) + suffix] = Slot(
                        name, expert * every + first, rows, own
                    )
    return found


def _parts(spec: Spec) -> dict[str, tuple[int, int]]:
    """Return the first row and the number of rows of each part of a fused tensor."""
    query, key = spec.heads * spec.head_size, spec.kv_heads * spec.head_size
    query *= 2 if spec.output_gate else 1
    shared = 0 if spec.experts is None else spec.experts.shared
    found = {
        "q": (0, query),
        "k": (query, key),
        "v": (query + key, key),
        "gate": (0, spec.inner),
        "up": (spec.inner if spec.gated else 0, spec.inner),
        "shared_gate": (0, shared),
        "shared_up": (shared, shared),
    }
    if (recurrent := spec.recurrent) is not None:
        heads = recurrent.value_heads
        found |= {
            "mixed": (0, recurrent.channels),
            "z": (recurrent.channels, recurrent.values),
            "beta": (0, heads),
            "decay": (heads, heads),
        }
    return found
