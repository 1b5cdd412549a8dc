"""Limits on texts that are too long, and on tokenizers that are not trusted."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from checkpoints import write_sentencepiece, write_tokenizer
from test_sentencepiece import train

import bass_cli.formats.tokenizer as tokenizer_module
from bass_cli.errors import UserError
from bass_cli.formats.limits import Limited
from bass_cli.formats.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("children")


def edited(
    folder: Path,
    change: Callable[[dict[str, Any]], None],
    write: Callable[[Path], None] = write_tokenizer,
) -> Tokenizer:
    """Return the tiny tokenizer with a changed tokenizer.json."""
    write(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return Tokenizer.load(folder)


@pytest.mark.parametrize("write", [write_tokenizer, write_sentencepiece])
def test_fifty_megabytes_are_not_tokenised(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("the cat", most=len(tokenizer.encode("the cat"))) == tokenizer.encode(
        "the cat"
    )
    text = "the cat sat.\n" * 4_000_000
    tokenizer.__dict__["_encoded"] = None  # nothing can be tokenised
    said = f"the text has {len(text)} characters; the limit for the model's context of 8192 tokens"
    for ask in (tokenizer.encode, tokenizer.encode_part):
        with pytest.raises(UserError, match=said):
            ask(text, 8192)
    if tokenizer.has_chat_template:
        with pytest.raises(UserError, match="the model's context of 8192"):
            tokenizer.encode_chat([{"role": "user", "content": text}], 8192)


# Tokenizers that are not trusted

REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
DOUBLE = {"type": "Replace", "pattern": {"Regex": "."}, "content": "aa"}
INSERT = {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "a" * 1000}
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False, "trim_offsets": True}
SAME = {"Sequence": {"id": "A", "type_id": 0}}
HOSTILE: dict[str, dict[str, Any]] = {
    "chain": {"normalizer": {"type": "Sequence", "normalizers": [REPLACE] * 5}},
    "nested": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [REPLACE] * 3}]}},
    "doubling": {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 40}},
    "insertions": {"normalizer": {"type": "Sequence", "normalizers": [INSERT] * 3}},
    "bytes of bytes": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [LEVEL] * 40}},
    "decoder": {"decoder": {"type": "Sequence", "decoders": [REPLACE] * 5}},
    "template": {"post_processor": {"type": "TemplateProcessing", "single": [SAME] * 5000, "pair": [],
                                    "special_tokens": {}}},
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_tokenizer_that_multiplies_a_text_is_refused_when_it_is_loaded(
    tmp_path: Path, kind: str
) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    with pytest.raises(
        UserError, match=rf"{tmp_path}: .* can turn one character into .*; the limit is 1000"
    ):
        edited(tmp_path, lambda content: content.update(HOSTILE[kind]))
    after = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert max(before, 2**20) >= after or after - before < 2**19  # in KB: at most 512 MB more


def test_the_growth_of_published_tokenizers_is_small(tmp_path: Path) -> None:
    """Steps of Llama 2 and Gemma (a prefix, "▁" for spaces) and of T5 (runs of spaces)."""
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    runs = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
    steps = [{"type": "NFKC"}, {"type": "Prepend", "prepend": "▁"}, space, *[runs] * 40]
    edited(
        tmp_path,
        lambda content: content.update(normalizer={"type": "Sequence", "normalizers": steps}),
    )


def slow(content: dict[str, Any]) -> None:
    """The time is cubic in the length of a word."""
    content["model"] = {
        "type": "WordPiece", "vocab": {"<unk>": 0, "a": 1, "##a": 2}, "unk_token": "<unk>",
        "continuing_subword_prefix": "##", "max_input_chars_per_word": 10**9,
    }  # fmt: skip
    content["pre_tokenizer"] = {"type": "Whitespace"}
    content["added_tokens"] = []


def test_a_text_that_takes_too_much_time_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_module, "SECONDS", 0.3)
    tokenizer = edited(tmp_path, slow)
    for _ in range(2):
        with pytest.raises(UserError, match=rf"{tmp_path}: .*cannot read the text: it takes more"):
            tokenizer.encode("a" * 400_000)
        assert tokenizer.encode("aa a") == [1, 2, 1]


@pytest.mark.parametrize("freed", [0, 2**30])
def test_a_text_that_takes_too_much_memory_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, freed: int
) -> None:
    """Also if this process has freed memory before, which stays in its heap."""
    monkeypatch.setattr(tokenizer_module, "_MEMORY", 2**26)
    tokenizer = edited(tmp_path, lambda content: None)
    held = [numpy.empty(100_000, dtype=numpy.uint8) for _ in range(freed // 100_000)]
    held = held[len(held) // 2 :: 100]  # the system gets nothing back while the last one is held
    with pytest.raises(UserError, match="cannot read the text: it takes more than 64 MB of memory"):
        tokenizer.encode("the cat " * 200_000)
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"


def test_small_pieces_of_free_memory_are_not_copied(tmp_path: Path) -> None:
    """Using up the free memory of a heap in many pieces would take seconds and a copy of the heap:
    each allocation writes to one or two pages, which the two processes then do not share."""
    held = [numpy.empty(20_000, dtype=numpy.uint8) for _ in range(20_000)][::2]
    limited = Limited(
        lambda _: str(resource.getrusage(resource.RUSAGE_SELF).ru_minflt).encode(),
        seconds=10,
        memory=1 << 30,
    )
    assert int(limited(None)) < 2 * len(held)


def test_a_regular_expression_that_takes_too_long_is_an_error(tmp_path: Path) -> None:
    pattern = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    tokenizer = edited(tmp_path, lambda content: content.update(pre_tokenizer=pattern))
    with pytest.raises(UserError, match="cannot read the text"):
        tokenizer.encode("a" * 40 + "b")


MODELS: dict[str, dict[str, Any]] = {
    "WordLevel": {"type": "WordLevel", "vocab": {"<unk>": 0, "a": 1}, "unk_token": "<unk>"},
    "WordPiece": {"type": "WordPiece", "vocab": {"<unk>": 0, "a": 1}, "unk_token": "<unk>",
                  "continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
    "Unigram": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["a", -1.0]], "unk_id": 0},
    "BPE": {"type": "BPE", "vocab": {"<unk>": 0, "a": 1}, "merges": [], "unk_token": "<unk>"},
}  # fmt: skip


@pytest.mark.parametrize("kind", [*MODELS, "SentencePiece"])
def test_twenty_megabytes_are_refused_early_by_every_kind_of_tokenizer(
    tmp_path: Path, kind: str
) -> None:
    """Also if one token may stand for all characters. 1 MB is refused after tokenising a part of
    it, and a text that fits is encoded."""

    def change(content: dict[str, Any]) -> None:
        content.update(model=MODELS[kind], pre_tokenizer={"type": "Whitespace"}, added_tokens=[])

    if kind == "SentencePiece":
        (tmp_path / "tokenizer.model").write_bytes(train())
        tokenizer = Tokenizer.load(tmp_path)
    else:
        tokenizer = edited(tmp_path, change)
    assert len(tokenizer.encode("a " * 50, 128)) >= 50
    begin = time.process_time()
    for text in ("the cat sat " * 1_700_000, "a" * 20_000_000, " " * 20_000_000):
        with pytest.raises(UserError, match=f"the text has {len(text)} characters"):
            tokenizer.encode(text, 8192)
    with pytest.raises(UserError, match="the text has 900000 characters; the first 114688 are "):
        tokenizer.encode(
            "the cat a" * 100_000 if kind != "WordLevel" else "a the cat" * 100_000, 8192
        )
    assert time.process_time() - begin < 2
