"""A tokenizer of a few words, and which of them may come next in a text that matches a regex, by
trying all texts. No tests."""

import functools
import itertools
import re
from pathlib import Path
from typing import Any, ClassVar

from bass_cli.config.file_options import Structure
from bass_cli.formats.grammars import Grammars, Matcher

# "é" is two bytes, which are tokens too; "ab" and "é" can be tokenised in several ways.
WORDS = [b"a", b"b", b"ab", b"ba", b"c", "é".encode(), b"\xc3", b"\xa9", b"a", None, None]
EOS, SPECIAL = 9, 10


class Words:
    """A tokenizer with the byte alphabet of GPT-2."""

    path, eos_ids, size = Path("words"), (EOS,), len(WORDS)
    texts: ClassVar = dict(
        enumerate(("a", "b", "ab", "ba", "c", "Ã©", "Ã", "©", "a", "<e>", "<s>"))
    )

    def spelled(self, id_: int) -> str:
        return str(self.texts.get(id_, ""))

    def decode(self, ids: list[int]) -> str:
        return b"".join(WORDS[id_] or b"" for id_ in ids).decode(errors="replace")


@functools.cache
def grammars() -> Grammars:
    words: Any = Words()
    return Grammars(words, vocab=len(WORDS), eos_ids=[EOS])


def matcher(pattern: str) -> Matcher:
    """Return the state of a new sample that matches a regex."""
    return grammars().matcher(Structure("regex", pattern))


@functools.cache
def _texts(pattern: str, longest: int = 5) -> list[bytes]:
    """Return the texts of the alphabet, of up to `longest` characters, that match."""
    every = itertools.chain.from_iterable(
        itertools.product("abcé", repeat=size) for size in range(longest + 1)
    )
    return ["".join(text).encode() for text in every if re.fullmatch(pattern, "".join(text))]


@functools.cache
def allowed(pattern: str, tokens: tuple[int, ...]) -> frozenset[int]:
    """Return the ids that may follow these ids: those with which a matching text begins, and EOS
    after a matching text. Nothing but EOS follows EOS."""
    if EOS in tokens:
        return frozenset({EOS})
    before, texts = b"".join(WORDS[id_] or b"" for id_ in tokens), _texts(pattern)
    found = {
        id_
        for id_, word in enumerate(WORDS)
        if word is not None and any(text.startswith(before + word) for text in texts)
    }
    return frozenset(found | ({EOS} if before in texts else set()))
