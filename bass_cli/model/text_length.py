"""How few tokens a text may have, told without making tokens of it.

To tokenise 50 MB takes minutes and gigabytes, only to say that the text is too long. That can be
said at once where no token stands for more of the text than its own spelling: in byte-pair
encodings in which each byte has a token. Not here: the tokenizer itself (tokenizer.py).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

# How many characters a normaliser may turn into one. NFC: what comes out of it has the same full
# canonical decomposition as what went in, one of its characters at most 4 of that, a character
# that went in at least 1. The others never shorten.
_SHRINKS = {"NFC": 4, "Prepend": 1}
# What only cuts a text, puts something before it, or another character in the place of each.
_CUTS = ("ByteLevel", "Metaspace", "Digits", "Split")
# The bytes that need a token: each character of UTF-8 is one of the first or has one of the
# second, but for control characters, which NFC makes of no other character.
_NEEDED = {*range(0x20, 0x7F), *range(0x80, 0xC0)}
_ASCII = range(0x80)


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
    if backend is None or type(backend.model).__name__ != "BPE":
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
    waiting = [] if part is None else [json.loads(part.__getstate__())]
    while waiting:
        step = waiting.pop(0)
        inner = step.get("normalizers", step.get("pretokenizers"))
        if inner is None:
            yield step
        else:
            waiting = [*inner, *waiting]


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
        spelled = _byte_level()
    return {byte for byte in range(256) if spelled.get(byte) not in vocabulary}


def _byte_level() -> dict[int, str]:
    """How a byte-level vocabulary spells each byte: by its character if that is visible, else by
    those from 256 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {
        byte: chr(256 + place) for place, byte in enumerate(others)
    }
