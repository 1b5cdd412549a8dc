"""Tiny random checkpoints in the real formats, and a tiny tokenizer, for the tests to write; no
tests here.

Sizes are unequal, heads grouped, vocabularies odd; norms and biases are random too, so that a
weight in the wrong place shows in the logits.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import gguf_layouts
import numpy as np
import pytest
import torch
import transformers
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

transformers.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()

_SIZES = {
    "vocab_size": 301,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "intermediate_size": 80,
    "max_position_embeddings": 256,
}
_GPT_SIZES = {"vocab_size": 301, "n_embd": 48, "n_head": 4, "n_layer": 3, "n_positions": 128}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_HYBRID = _SIZES | {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,  # Triton's products take at least as many
    "linear_value_head_dim": 8,
}
_HYBRID_EXPERTS = {key: value for key, value in _HYBRID.items() if key != "intermediate_size"} | {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
}
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _SIZES | {"head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    "llama3": ("Llama", _SIZES | {"head_dim": 16, "rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("Mistral", _SIZES | {"sliding_window": 5}),
    "qwen2": ("Qwen2", _SIZES | {"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", _SIZES | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "gemma3_text": ("Gemma3", _SIZES | {
        "num_hidden_layers": 4, "query_pre_attn_scalar": 24, "sliding_window": 4, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}},
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}),
    "opt": ("OPT", {"vocab_size": 301, "hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 3,
                    "ffn_dim": 80, "max_position_embeddings": 128, "word_embed_proj_dim": 48}),
    "starcoder2": ("Starcoder2", _SIZES | {"head_dim": 8, "sliding_window": 5}),
    "olmo2": ("Olmo2", _SIZES | {"head_dim": 8, "attention_bias": True}),
    "olmo3": ("Olmo3", _SIZES | {"head_dim": 8, "num_hidden_layers": 4, "sliding_window": 5, "rope_parameters": {
        "full_attention": {"rope_type": "yarn", "factor": 8.0, "rope_theta": 500.0, "attention_factor": 1.2,
                           "original_max_position_embeddings": 64},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}}),
    "exaone4": ("Exaone4", _SIZES | {"head_dim": 8, "num_hidden_layers": 4, "sliding_window": 5}),
    "smollm3": ("SmolLM3", _SIZES | {"head_dim": 8, "no_rope_layers": [1, 0, 1]}),
    "phi3": ("Phi3", _SIZES | {"head_dim": 8, "sliding_window": 7}),
    "glm": ("Glm", _SIZES),
    "glm4": ("Glm4", _SIZES),
    "granite": ("Granite", _SIZES | {"head_dim": 8, "attention_multiplier": 0.3, "embedding_multiplier": 3.0,
                                     "residual_multiplier": 0.6, "logits_scaling": 2.0, "attention_bias": True}),
    "seed_oss": ("SeedOss", _SIZES | {"attention_out_bias": True}),
    "ernie4_5": ("Ernie4_5", _SIZES),
    "qwen3_moe": ("Qwen3Moe", _SIZES | {"moe_intermediate_size": 40, "num_experts": 7, "num_experts_per_tok": 3,
                                        "norm_topk_prob": True}),
    "mixtral": ("Mixtral", _SIZES | {"num_local_experts": 5, "head_dim": 8, "sliding_window": 7}),
    "olmoe": ("Olmoe", _SIZES | {"num_experts": 6, "num_experts_per_tok": 2, "head_dim": 8}),
    "gpt_oss": ("GptOss", _SIZES | {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 6,
                                    "swiglu_alpha": 1.3, "swiglu_limit": 0.7, "rope_parameters": {
                                        "rope_type": "yarn", "factor": 8.0, "rope_theta": 500.0, "truncate": False,
                                        "original_max_position_embeddings": 64}}),
    "qwen3_5_text": ("Qwen3_5", _HYBRID),
    "qwen3_5_moe_text": ("Qwen3_5Moe", _HYBRID_EXPERTS | {"linear_num_value_heads": 2}),
    "qwen3_next": ("Qwen3Next", _HYBRID_EXPERTS | {"linear_value_head_dim": 12, "norm_topk_prob": True,
                                                  "attention_bias": True}),
    "arcee": ("Arcee", _SIZES | {"head_dim": 8}),
    "gpt2": ("GPT2", _GPT_SIZES | {"n_inner": 80}),
    "gptj": ("GPTJ", _GPT_SIZES | {"rotary_dim": 8}),
    "codegen": ("CodeGen", _GPT_SIZES | {"n_head": 8, "n_embd": 64, "rotary_dim": 4, "n_ctx": 128}),
}  # fmt: skip
FAMILIES: tuple[str, ...] = tuple(_KINDS)
# Families with recurrent layers
HYBRID = tuple(name for name in FAMILIES if "linear_num_key_heads" in _KINDS[name][1])
# Families that tensor parallelism supports: the others norm all heads as one vector, or have sinks.
SPLIT = tuple(name for name in FAMILIES if name not in ("olmo2", "olmo3", "olmoe", "gpt_oss"))
_CONFIGS = {
    "Gemma3": "Gemma3TextConfig",
    "Qwen3_5": "Qwen3_5TextConfig",
    "Qwen3_5Moe": "Qwen3_5MoeTextConfig",
}
# Families whose norms store their weight minus one
_ZERO_CENTRED = ("gemma3_text", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
# Families that `bass distill` trains
TRAINED = ("llama", "llama3", "mistral", "qwen2", "qwen3", "gemma3_text", "opt", "starcoder2", "gpt2", "gptj",
           "codegen", "qwen3_5_text")  # fmt: skip


def _class(name: str) -> Any:
    """A class of this file, for families that transformers does not have, or of transformers."""
    return globals().get(name) or getattr(transformers, name)


def build_model(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A transformers model of the family (or of "llama3": Llama with that scaling), eval, fp32,
    all weights random."""
    kind, sizes = _KINDS[family]
    config = _class(_CONFIGS.get(kind, f"{kind}Config"))(
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **sizes, **overrides}
    )
    model = _class("GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(
                    0.3 * noise + (name.endswith("weight") and family not in _ZERO_CENTRED)
                )
            else:
                parameter.copy_(
                    noise * (0.5 if "emb" in name or "wte" in name else parameter.shape[-1] ** -0.5)
                )
    return model.eval()


def write_checkpoint(
    family: str, folder: Path, *, seed: int = 0, shards: bool = True, **overrides: Any
) -> PreTrainedModel:
    """Save such a model as safetensors, by default in several shards with an index; returns it.
    `overrides`: of its configuration."""
    model = build_model(family, seed=seed, **overrides)
    model.save_pretrained(folder, max_shard_size="60KB" if shards else "1GB")
    return model


def shallow(family: str) -> dict[str, Any]:
    """Overrides that leave two layers, of either kind where a family has two: what one adds, the
    next reads. Without its last layer, a hybrid model still has attention."""
    kinds = ["sliding_attention", "full_attention"]
    if family in HYBRID:
        kinds = ["linear_attention", "full_attention", "linear_attention"]
    both = ("layer_types" in _KINDS[family][1]) or family in ("olmo3", "exaone4")
    named = "n_layer" if "n_layer" in _KINDS[family][1] else "num_hidden_layers"
    return {named: len(kinds) if both else 2} | ({"layer_types": kinds} if both else {})


def write_tokenizer(folder: Path, *, extra: tuple[str, ...] = (), template: bool = True) -> None:
    """Save a byte-level BPE tokenizer of about 300 ids: <pad>, <s>, </s>, bytes, merges,
    `extra`; eos is id 2."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=299,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    text = (
        "the cat sat on the mat, then the other cat sat there and all of this was written "
        "down. 123 "
    )
    inner.train_from_iterator([text * 4], trainer)
    inner.add_tokens([AddedToken(text, normalized=False) for text in extra])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    if template:
        fast.chat_template = (
            "{{ bos_token }}{% for message in messages %}{% if message.role == 'bad' %}{{ "
            "raise_exception('no') }}"
            "{% endif %}[{{ message.role }}] {{ message.content }}</s>{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}"
        )
    fast.save_pretrained(folder)


def write_pair(
    folder: Path,
    *,
    prompts: int,
    family: str = "llama",
    pair: str = "draft: draft\nspeculation: {length: 4}\n",
    draft: dict[str, Any] | None = None,
    **overrides: Any,
) -> None:
    """A target, a draft, pair.yaml and p.txt with so many prompts. `overrides`: of both models'
    configuration, of two layers otherwise; `draft`: further ones of the draft's."""
    overrides = shallow(family) | overrides
    for seed, (name, own) in enumerate({"target": {}, "draft": draft or {}}.items()):
        write_checkpoint(family, folder / name, seed=seed, shards=False, **overrides | own)
        write_tokenizer(folder / name)
    (folder / "pair.yaml").write_text("target: target\n" + pair)
    (folder / "p.txt").write_text("".join(f"the cat number {n} sat\n" for n in range(prompts)))


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_mask(folder: Path, token: int) -> None:
    """Let a checkpoint's configuration say that it drafts in one pass, with this id as mask."""
    edit_json(folder / "config.json", pard_token=token)


def write_sentencepiece(folder: Path) -> None:
    """Save a tokenizer in the form of Llama 2's tokenizer.json: "▁" for spaces and one before
    the text, bytes for what has no piece (a newline too), <s> before a prompt, and a decoder
    that drops the space at the beginning; eos is id 2."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    text = (
        "def f(x): return x if x else y; the cat sat on the mat, then the other cat sat "
        "there. for i in range(12): f(i) "
    )
    learner.train_from_iterator(
        [text * 4], trainers.BpeTrainer(vocab_size=140, show_progress=False)
    )
    learnt = json.loads(learner.to_str())["model"]
    pieces = [*sorted(learnt["vocab"], key=learnt["vocab"].get), "▁▁", "▁▁▁▁"]
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [("▁", "▁"), ("▁▁", "▁▁"), *map(tuple, learnt["merges"])]
    inner = Tokenizer(
        models.BPE(
            {text: id_ for id_, text in enumerate(texts)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def sentencepiece_metadata(folder: Path) -> dict[str, Any]:
    """Such a tokenizer as GGUF metadata: pieces with scores, from which the merges follow, in
    place of merges."""
    content = json.loads((folder / "tokenizer.json").read_text())["model"]
    texts = sorted(content["vocab"], key=content["vocab"].get)
    ranks = {"".join(merge): -float(rank) for rank, merge in enumerate(content["merges"])}
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": [ranks.get(text, -1e6) for text in texts],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(texts) - 259)],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip


def tokenizer_metadata(folder: Path, *, pad_to: int = 0, pre: str = "gpt-2") -> dict[str, Any]:
    """The tokenizer of a folder as GGUF metadata; ids up to `pad_to` that are no tokens are
    called [PAD7] and so on."""
    content = json.loads((folder / "tokenizer.json").read_text())
    texts = {id_: text for text, id_ in content["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in content["added_tokens"]}
    texts |= special
    size = max(pad_to, len(texts))
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [texts.get(id_, f"[PAD{id_}]") for id_ in range(size)],
        "tokenizer.ggml.token_type": [3 if id_ in special else 1 if id_ in texts else 5 for id_ in range(size)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in content["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
    }  # fmt: skip


_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
_GEMMA_NAMES = _NAMES | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
_GPT2_NAMES = {
    "transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip
GGUF_FAMILIES = {"llama": "llama", "llama3": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3",
                 "starcoder2": "starcoder2", "gpt2": "gpt2"}  # fmt: skip


def write_gguf(
    family: str,
    path: Path,
    *,
    kind: str = "F16",
    seed: int = 0,
    metadata: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> PreTrainedModel:
    """Write a model as llama.cpp's converter would, its matrices as `kind` ("F32", "F16",
    "Q8_0", ...); returns the model with the values that the file holds, so that only arithmetic
    is left to differ."""
    # Rows in whole blocks of 32, as the quantised kinds need; and no windows but Gemma's, which
    # GGUF does not know.
    wide = {} if family == "gpt2" else {"hidden_size": 96, "intermediate_size": 160}
    plain = {
        "gpt2": {"n_embd": 64, "n_inner": 96},
        "gemma3_text": {
            "num_hidden_layers": 7,
            "layer_types": None,
            "query_pre_attn_scalar": 16,
            "rope_parameters": _GEMMA_ROPES,
        },
        "qwen3": {"use_sliding_window": False},
        "starcoder2": {"sliding_window": None},
    }
    mixed, own = gguf_layouts.LAYOUTS.get(family, (None, plain.get(family, {})))
    model = build_model(family, seed=seed, **{**wide, **own, **overrides})
    arch = mixed or GGUF_FAMILIES[family]
    writer = gguf.GGUFWriter(path, arch)
    described = _metadata(arch, model.config) if mixed is None else _mixed(arch, model.config)
    for key, value in {**described, **(metadata or {})}.items():
        of = gguf.GGUFValueType.get_type(value)
        whole = of == gguf.GGUFValueType.INT32 and value >= 0  # as the converter writes them
        writer.add_key_value(key, value, gguf.GGUFValueType.UINT32 if whole else of)
    if family == "llama3":
        inverse = model.model.rotary_emb.inv_freq
        plain_inverse = 500.0 ** (-torch.arange(0, 16, 2).float() / 16)
        writer.add_tensor("rope_freqs.weight", (plain_inverse / inverse).numpy())
    tied = model.config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        if tied and name.startswith("lm_head"):
            continue
        write = _write_tensor if mixed is None else _write_parts
        write(writer, arch, name, parameter, kind, model.config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


_GEMMA_ROPES = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}  # fmt: skip


def _metadata(arch: str, config: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes of a configuration."""
    heads = config.num_attention_heads
    values: dict[str, Any] = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "attention.head_count": heads,
        "feed_forward_length": config.n_inner if arch == "gpt2" else config.intermediate_size,
    }  # fmt: skip
    if arch == "gpt2":
        values["attention.layer_norm_epsilon"] = config.layer_norm_epsilon
    else:
        ropes = config.rope_parameters
        values |= {"attention.head_count_kv": config.num_key_value_heads, "attention.key_length": config.head_dim,
                   "attention.value_length": config.head_dim, "rope.dimension_count": config.head_dim,
                   **({"attention.layer_norm_epsilon": config.norm_epsilon} if arch == "starcoder2" else
                      {"attention.layer_norm_rms_epsilon": config.rms_norm_eps}),
                   "rope.freq_base": float(ropes.get("full_attention", ropes)["rope_theta"])}  # fmt: skip
    if arch == "gemma3":
        values |= {"attention.sliding_window": config.sliding_window, "rope.scaling.type": "linear",
                   "rope.scaling.factor": 8.0}  # fmt: skip
    return {f"{arch}.{key}": value for key, value in values.items()} | _IDS


_IDS = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 7}


def _mixed(arch: str, config: Any) -> dict[str, Any]:
    own = gguf_layouts.metadata(arch, config).items()
    return {f"{arch}.{key}": value for key, value in own} | _IDS


def _write_parts(
    writer: Any, arch: str, name: str, parameter: torch.Tensor, kind: str, config: Any
) -> None:
    """Write the tensors that hold a parameter, which takes on the rounded values."""
    places = torch.arange(parameter.numel()).view(parameter.shape)
    parts = gguf_layouts.stored_as(arch, name, parameter.detach(), config)
    at = gguf_layouts.stored_as(arch, name, places, config)
    for stored_name, part in parts.items():
        values = gguf_layouts.changed(arch, stored_name, part).contiguous()
        plain = values.dim() == 1 or any(one in stored_name for one in (".bias", "conv1d", "_inp"))
        stored, rounded = _quantised(values.numpy(), "F32" if plain else kind)
        writer.add_tensor(stored_name, stored[0], raw_dtype=stored[1])
        if not plain:
            with torch.no_grad():
                parameter.view(-1)[at[stored_name].reshape(-1)] = rounded.reshape(-1)


def _write_tensor(
    writer: Any, arch: str, name: str, parameter: torch.Tensor, kind: str, config: Any
) -> None:
    """Write one tensor, transformed and named as GGUF has it; the parameter takes on the rounded
    values."""
    short, _, suffix = name.rpartition(".")
    names = {"gemma3": _GEMMA_NAMES, "gpt2": _GPT2_NAMES}.get(arch, _NAMES)
    block = ""
    if ".layers." in name or ".h." in name:
        _, _, rest = short.partition(".layers." if ".layers." in name else ".h.")
        number, _, short = rest.partition(".")
        block = f"blk.{number}."
    transposed = arch == "gpt2" and parameter.dim() == 2 and block != ""
    heads = {"self_attn.q_proj": config.num_attention_heads}.get(
        short, getattr(config, "num_key_value_heads", 0)
    )
    turned = arch == "llama" and short in ("self_attn.q_proj", "self_attn.k_proj")
    values = parameter.detach().T.contiguous() if transposed else parameter.detach().clone()
    if turned:  # halves to pairs, per head
        values = (
            values.reshape(heads, 2, -1, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
        )
    if arch == "gemma3" and short.endswith("norm"):
        values = values + 1
    stored, rounded = _quantised(values.numpy(), kind if values.dim() == 2 else "F32")
    writer.add_tensor(block + names[short] + "." + suffix, stored[0], raw_dtype=stored[1])
    if turned:
        rounded = (
            rounded.reshape(heads, -1, 2, *rounded.shape[1:]).transpose(1, 2).reshape(rounded.shape)
        )
    with torch.no_grad():
        if not (arch == "gemma3" and short.endswith("norm")):
            parameter.copy_(rounded.T if transposed else rounded)


def _quantised(values: np.ndarray, kind: str) -> tuple[tuple[np.ndarray, Any], torch.Tensor]:
    """Stored bytes with their type, and the values that they stand for. `kind` falls back to F16
    for short rows."""
    number = gguf.GGMLQuantizationType[kind]
    if values.shape[-1] % gguf.GGML_QUANT_SIZES[number][0]:
        number = gguf.GGMLQuantizationType.F16
    stored = gguf.quants.quantize(values, number)
    return (stored, number), torch.from_numpy(gguf.quants.dequantize(stored, number).copy())


def read_with_transformers(path: Path) -> PreTrainedModel:
    """The model that transformers makes of a GGUF file, fp32, eval. Its from_pretrained does the
    same but insists on the package accelerate. The header is parsed and its names are looked up
    once: transformers does so for each use, and for each layer twice. Nor are a header's hundred
    thousand texts views of the map of a file, each of which takes three times a view's time."""
    reader, mapped = functools.cache(gguf.GGUFReader), np.memmap
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            np, "memmap", lambda *given, **words: mapped(*given, **words).view(np.ndarray)
        )
        patch.setattr(gguf, "GGUFReader", lambda file: reader(str(file)))
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        return _read_with_transformers(path)


def _read_with_transformers(path: Path) -> PreTrainedModel:
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing = model.load_state_dict(tensors, strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()
