"""Bounds on the work of a tokenizer, known before a text is tokenised: the fewest tokens that a
text can have, the most characters that are read, the growth of a text by replacements.

To tokenise 50 MB takes minutes and gigabytes, only to say that the text is too long. Not here:
the tokenizer itself (tokenizer.py), limits of time and memory (limited.py).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from bass_cli.io.reading import parse_object

# How many characters a normaliser may turn into one. NFC: what comes out of it has the same full
# canonical decomposition as what went in, one of its characters at most 4 of that, a character
# that went in at least 1. The others never shorten.
_SHRINKS = {"NFC": 4, "Prepend": 1}
# What only cuts a text, puts something before it, or another character in the place of each.
_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")
_CUTS = ("ByteLevel", "Metaspace", "Digits", "Split")
# The bytes that need a token: each character of UTF-8 is one of the first or has one of the
# second, but for control characters, which NFC makes of no other character.
_NEEDED = {*range(0x20, 0x7F), *range(0x80, 0xC0)}
_ASCII = range(0x80)
# A text may always have so many characters, and so many for each token of the model's context.
# The longest tokens known are runs of 128 spaces.
_ALWAYS = 1 << 20
_FOR_EACH_TOKEN = 128
_MOST_GROWTH = 1000  # characters of one; published tokenizers reach 3


def most_characters(context: int) -> int:
    """Return how many characters of a text are read for a context of so many tokens."""
    return max(_ALWAYS, _FOR_EACH_TOKEN * context)


def check_growth(content: bytes) -> None:
    """Refuse a tokenizer whose replacements can make too many characters of one.

    Only steps that can be chained or repeated without a bound count: replacements, the byte
    alphabet (one character becomes two, these four), and templates of a post-processor. Unicode's
    own forms are bounded.

    Args:
        content: the tokenizer in the format of tokenizer.json, or of a SentencePiece model.

    Raises:
        ValueError: it is more than _MOST_GROWTH.
    """
    found = parse_object(content)
    parts = ("normalizer", "pre_tokenizer", "post_processor")
    into = _product(step for part in parts for step in _inner(found.get(part)))
    growth = max(into, _product(_inner(found.get("decoder"))))
    if growth > _MOST_GROWTH:
        raise ValueError(
            f"its replacements can make {growth:.2g} characters of one, and {_MOST_GROWTH} are "
            "the most"
        )


def _product(steps: Iterable[Mapping[str, Any]]) -> float:
    return math.prod(map(_grows, steps), start=1.0)


def _grows(step: Mapping[str, Any]) -> float:
    if step.get("type") == "ByteLevel":
        return 2.0
    if step.get("type") == "TemplateProcessing":  # the text may be there more than once
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
    """What holds of a tokenizer: no token stands for more than `longest` characters, those in
    `lost` left out, for which there may be none, and blanks too where an added token may swallow
    those beside it."""

    longest: int
    lost: str
    without_blanks: bool

    def fewest_tokens(self, text: str) -> int:
        """A number that the text's tokens are certainly not below."""
        characters = sum(map(len, text.split())) if self.without_blanks else len(text)
        return -(-max(characters - sum(map(text.count, self.lost)), 0) // self.longest)


def spelling_of(backend: Any, vocabulary: Collection[str]) -> Spelling | None:
    """What can be said of a tokenizers.Tokenizer with these tokens, the added ones included; None
    for nothing.

    Every byte of a text that has a token of its own belongs to one token, which spells it, if
    nothing on the way shortens the text; no token is for whatever is unknown. A character has at
    least one such byte. A character of a token's spelling stands for one byte, or, without a
    byte-level alphabet, for one character.
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
    """The single steps of a normaliser or pre-tokenizer, each as tokenizer.json has it."""
    return _inner(None if part is None else json.loads(part.__getstate__()))


def _inner(part: Any) -> Iterator[dict[str, Any]]:
    """The same of a part of tokenizer.json."""
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
    """The bytes without a token of their own."""
    if not byte_level:
        spelled = {byte: f"<0x{byte:02X}>" for byte in range(256)} if model.byte_fallback else {}
    else:
        spelled = byte_alphabet()
    return {byte for byte in range(256) if spelled.get(byte) not in vocabulary}


def byte_alphabet() -> dict[int, str]:
    """How a byte-level vocabulary spells each byte: by its character if that is visible, else by
    those from 256 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {
        byte: chr(256 + place) for place, byte in enumerate(others)
    }
