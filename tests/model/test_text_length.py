"""Texts that are too long are refused by their length alone; a text that might fit never is."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_sentencepiece, write_tokenizer

from bass_cli.errors import UserError
from bass_cli.model.text_length import spelling_of
from bass_cli.model.tokenizer import Tokenizer

PIECES = [
    "the cat sat",
    " ",
    "  \n\t",
    "\x04\x1d",
    "é",
    "e\u0301",
    "\u1f82",
    "α\u0313\u0300\u0345",
    "🙂",
    "▁",
    "<mask>",
    "中文",
    "\u3000",
    "\u0344\u0344",
    "x" * 40,
    "\u212b",
    "\u1100\u1161\u11a8",
    "12345",
]


def edited(
    folder: Path,
    change: Callable[[dict[str, Any]], None],
    write: Callable[[Path], None] = write_tokenizer,
) -> Tokenizer:
    """A tiny tokenizer whose tokenizer.json was changed."""
    write(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return Tokenizer.load(folder)


def with_mask(content: dict[str, Any]) -> None:
    content["added_tokens"].append(
        {
            "id": 299,
            "content": "<mask>",
            "single_word": False,
            "lstrip": True,
            "rstrip": True,
            "normalized": False,
            "special": True,
        }
    )


def without_control_characters(content: dict[str, Any]) -> None:
    for character in "ĄĝĆ":  # how the bytes 4, 29 and 6 are spelled
        del content["model"]["vocab"][character]


def composed(content: dict[str, Any]) -> None:
    content["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}]}


KINDS: dict[str, tuple[Callable[[dict[str, Any]], None], Callable[[Path], None]]] = {
    "bytes": (lambda content: None, write_tokenizer), "pieces": (lambda content: None, write_sentencepiece),
    "blanks": (with_mask, write_tokenizer), "lost": (without_control_characters, write_tokenizer),
    "composed": (composed, write_tokenizer),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_has_fewer_tokens_than_are_certain(tmp_path: Path, kind: str) -> None:
    tokenizer = edited(tmp_path, *KINDS[kind])
    spelling = tokenizer._spelling
    assert spelling is not None
    rng, told = random.Random(5), 0
    for _ in range(400):
        text = "".join(rng.choices(PIECES, k=rng.randint(0, 12))) * rng.choice([1, 1, 30])
        fewest = spelling.fewest_tokens(text)
        assert fewest <= len(tokenizer.encode_part(text)), text
        told += fewest > 1
    assert told > 100
    for piece in PIECES:  # the worst that a text of one kind can be
        assert spelling.fewest_tokens(piece * 50) <= len(tokenizer.encode_part(piece * 50)), piece


def drop(content: dict[str, Any]) -> None:
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False},
            content["pre_tokenizer"],
        ],
    }


def shorten(content: dict[str, Any]) -> None:
    content["normalizer"] = {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}


def forget(content: dict[str, Any]) -> None:
    del content["model"]["vocab"]["a"]
    content["model"]["merges"] = []


@pytest.mark.parametrize("change", [drop, shorten, forget])
def test_where_nothing_is_certain_every_text_is_tokenised(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    tokenizer = edited(tmp_path, change)
    assert tokenizer._spelling is None
    assert len(tokenizer.encode("a   a   " * 99, most=1)) >= 0
    assert spelling_of(None, []) is None


def test_fifty_megabytes_are_not_tokenised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("the cat", most=len(tokenizer.encode("the cat"))) == tokenizer.encode(
        "the cat"
    )
    text = "the cat sat.\n" * 4_000_000
    spelled = tokenizer._spelling
    assert spelled is not None
    tokenizer.__dict__["_backend"] = None  # what would tokenise
    fewest = spelled.fewest_tokens(text)
    said = (
        f"the text has {len(text)} characters, so at least {fewest} tokens, and the model's "
        "context 8192"
    )
    for ask in (tokenizer.encode, tokenizer.encode_part):
        with pytest.raises(UserError, match=said):
            ask(text, 8192)
    with pytest.raises(UserError, match="the model's context 8192"):
        tokenizer.encode_chat([{"role": "user", "content": text}], 8192)
