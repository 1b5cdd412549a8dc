"""Limits on a text that are checked before it is tokenised.

They are the fewest tokens that a text can have, the most characters that are read, and the growth
of a text by replacements. Tokenising 50 MB takes minutes and gigabytes, only to find that the text
is too long. Not here: the tokenizer (tokenizer.py), limits of time and memory (limited.py).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from bass_cli.io.reading import parse_object

# How many characters a normalizer may turn into one. NFC keeps the full canonical decomposition.
# A character of the output decomposes into at most 4, a character of the input into at least 1.
_SHRINKS = {"NFC": 4, "Prepend": 1}
_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")
# Pre-tokenizers that never shorten a text: they split it, prepend to it, or replace characters one
# by one.
_CUTS = ("ByteLevel", "Metaspace", "Digits", "Split")
# The bytes that need a token. In UTF-8 every character except control characters is one of the
# first range or contains a byte of the second. NFC makes no control character of other characters.
_NEEDED = {*range(0x20, 0x7F), *range(0x80, 0xC0)}
_ASCII = range(0x80)
_ALWAYS = 1 << 20  # characters that a text may have for any context
_FOR_EACH_TOKEN = 128  # characters per token of the context; the longest known token is 128 spaces
_MOST_GROWTH = 1000  # characters out of one; published tokenizers reach 3


def most_characters(context: int) -> int:
    """Return the most characters that a text may have for a context of so many tokens."""
    return max(_ALWAYS, _FOR_EACH_TOKEN * context)


def check_growth(content: bytes) -> None:
    """Refuse a tokenizer whose replacements can turn one character into too many.

    Only steps count that can be chained without a bound: replacements, the byte alphabet (two
    characters for one), and the template of a post-processor. Unicode normal forms are bounded.

    Args:
        content: the tokenizer in the format of tokenizer.json, or of a SentencePiece model.

    Raises:
        ValueError: one character can become more than _MOST_GROWTH.
    """
    found = parse_object(content)
    parts = ("normalizer", "pre_tokenizer", "post_processor")
    into = _product(step for part in parts for step in _inner(found.get(part)))
    growth = max(into, _product(_inner(found.get("decoder"))))
    if growth > _MOST_GROWTH:
        raise ValueError(
            f"its replacements can turn one character into {growth:.2g}; the limit is "
            f"{_MOST_GROWTH}"
        )


def _product(steps: Iterable[Mapping[str, Any]]) -> float:
    return math.prod(map(_growth, steps), start=1.0)


def _growth(step: Mapping[str, Any]) -> float:
    if step.get("type") == "ByteLevel":
        return 2.0
    if step.get("type") == "TemplateProcessing":  # it may repeat the text
        return float(max(1, sum("Sequence" in one for one in step["single"])))
    if step.get("type") != "Replace":
        return 1.0
    old, new = step["pattern"].get("String"), len(step["content"])
    if old is not None:
        return max(1.0, new / len(old)) if old else 1.0 + new
    try:
        empty = re.match(step["pattern"].get("Regex", ""), "") is not None
    except (re.error, RecursionError, OverflowError):  # another dialect of regular expressions
        empty = True
    return 1.0 + new if empty else max(1.0, new)


class Spelling(NamedTuple):
    """How many characters of a text one token can stand for.

    longest: the most characters.
    lost: characters that may have no token; they are not counted.
    without_blanks: whether an added token may remove blanks beside it; then blanks are not counted.
    """

    longest: int
    lost: str
    without_blanks: bool

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of the text."""
        characters = sum(map(len, text.split())) if self.without_blanks else len(text)
        return -(-max(characters - sum(map(text.count, self.lost)), 0) // self.longest)


def spelling_of(backend: Any, vocabulary: Collection[str]) -> Spelling | None:
    """Return the bounds for a backend, or None if there are none.

    A bound needs a BPE model, steps that shorten a text by known factors only, and a token for
    every needed byte. Then each such byte of a text is spelled by exactly one token, and none
    becomes an unknown token. Every character has at least one such byte. A character of a token's
    spelling stands for one byte, or for one character if the alphabet is not byte-level.

    Args:
        backend: a tokenizers.Tokenizer, or backends.Pieces, for which there is no bound.
        vocabulary: the texts of its tokens, including added ones.
    """
    if type(getattr(backend, "model", None)).__name__ != "BPE":
        return None
    shrinks = [_shrink(step) for step in _steps(backend.normalizer)]
    cuts = list(_steps(backend.pre_tokenizer))
    if None in shrinks or any(
        step["type"] not in _CUTS or step.get("behavior") == "Removed" for step in cuts
    ):
        return None
    missing = _missing(
        backend.model, vocabulary, byte_level=any(step["type"] == "ByteLevel" for step in cuts)
    )
    if missing & _NEEDED:
        return None
    longest = max(map(len, vocabulary))
    for factor in shrinks:
        longest *= factor or 1
    swallow = any(
        token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()
    )
    return Spelling(longest, "".join(map(chr, missing.intersection(_ASCII))), swallow)


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the single steps of a normalizer or pre-tokenizer, as objects of tokenizer.json."""
    return _inner(None if part is None else json.loads(part.__getstate__()))


def _inner(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the single steps of a part of tokenizer.json, with nested sequences flattened."""
    waiting = [part] if isinstance(part, dict) else []
    while waiting:
        step = waiting.pop()
        lists = [step[name] for name in _LISTS if isinstance(step.get(name), list)]
        if lists:
            waiting += [one for one in reversed(lists[0]) if isinstance(one, dict)]
        else:
            yield step


def _shrink(step: Mapping[str, Any]) -> int | None:
    if step["type"] == "Replace":
        old = step["pattern"].get("String")
        return 1 if old is not None and len(step["content"]) >= len(old) else None
    return _SHRINKS.get(step["type"])


def _missing(model: Any, vocabulary: Collection[str], *, byte_level: bool) -> set[int]:
    """Return the bytes that have no token of their own."""
    if not byte_level:
        spelled = {byte: f"<0x{byte:02X}>" for byte in range(256)} if model.byte_fallback else {}
    else:
        spelled = byte_alphabet()
    return {byte for byte in range(256) if spelled.get(byte) not in vocabulary}


def byte_alphabet() -> dict[int, str]:
    """Return GPT-2's byte alphabet: the character that spells each byte.

    A byte whose character is visible is spelled by that; the others by characters from 256 on.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {
        byte: chr(256 + place) for place, byte in enumerate(others)
    }
