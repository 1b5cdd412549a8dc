"""Follow a grammar token by token: which tokens of a vocabulary may come next in a sample's text.

llguidance does the work, for JSON schemas, regexes and grammars alike (config/structure.py). It
needs the bytes of every token, which are derived here from the tokenizer. Not here: the masks of
a batch's rows (engine/masks.py).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from bass_cli.config.structure import Structure
from bass_cli.errors import UserError
from bass_cli.formats.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_EVERY = -1  # a word of a mask that allows 32 tokens


class Matcher:
    """The state of one sample in its grammar, after `seen` generated tokens.

    fault: why the library gave up, because the grammar is too complex for its limits; None if it
        did not. Every token is allowed then, and the sample must end.
    """

    __slots__ = ("_inner", "_vocab", "fault", "seen")

    def __init__(self, inner: Any, vocab: int):
        self._inner, self._vocab, self.seen = inner, vocab, 0
        self.fault: str | None = None

    def advance(self, tokens: Sequence[int]) -> None:
        """Go on by generated tokens, all of which the grammar allows."""
        if tokens and self.fault is None:
            self._inner.consume_tokens(tokens)
            self.check()
        self.seen += len(tokens)

    def allowed(self, drafts: Sequence[int]) -> int:
        """Return how many of the next tokens the grammar allows, one after the other."""
        if self.fault is not None:
            return len(drafts)
        known = self.known(drafts)
        found: int = self._inner.validate_tokens(known) if known else 0
        self.check()
        return found

    def known(self, drafts: Sequence[int]) -> list[int]:
        """Return the drafts before the first id that the library's vocabulary lacks."""
        end = next((i for i, id_ in enumerate(drafts) if not 0 <= id_ < self._vocab), len(drafts))
        return list(drafts[:end])

    def check(self) -> None:
        """Set `fault` if the library gave up."""
        if self._inner.is_error():
            reason = _brief(self._inner.get_error())
            self.fault = f"the grammar could not be followed: {reason}"
            if reason.startswith("NoExtension"):
                self.fault = "no token of the model continues the text in its grammar"

    @property
    def inner(self) -> Any:
        """The library's state."""
        return self._inner


def fill(rows: Sequence[tuple[Matcher, Sequence[int]] | None], masks: NDArray[numpy.int32]) -> None:
    """Write the allowed tokens of each row's places, on several threads.

    A place's mask is that after the drafts before it. After a draft that the grammar forbids, or
    that ends the sample, a mask stays as it was: no token there is ever used.

    Args:
        rows: the matcher and the drafts of each row; None for a row of free text.
        masks: [B, W, 2 ceil(V / 64)] int32; bit i % 32 of word i // 32 is token i. Each place
            must allow some token already.
    """
    width, words = masks.shape[1:]
    for line, one in enumerate(rows):
        if one is None or one[0].fault is not None:
            masks[line] = _EVERY
    wanted = [
        (matcher, line, matcher.known(drafts[: width - 1]))
        for line, (matcher, drafts) in ((i, one) for i, one in enumerate(rows) if one is not None)
        if matcher.fault is None
    ]
    into = masks.ctypes.data, words * 4, masks.shape[0] * width
    drafted = [(one.inner, line * width, drafts) for one, line, drafts in wanted if drafts]
    if drafted:
        _executor().unsafe_compute_mask_ptr_with_draft_token(drafted, *into)
    plain = [(one.inner, line * width) for one, line, drafts in wanted if not drafts]
    if plain:
        _executor().unsafe_compute_mask_ptr(plain, *into)
    for matcher, line, _ in wanted:
        matcher.check()
        if matcher.fault is not None:
            masks[line] = _EVERY


class Grammars:
    """The grammars of a model's samples.

    Args:
        vocab: tokens that the model can sample, the first ones.
        eos_ids: the ids that end a sample. Only they are allowed after a complete text.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab: int, eos_ids: Collection[int]):
        self._tokenizer, self._vocab = tokenizer, vocab
        self._eos_ids = sorted(id_ for id_ in eos_ids if id_ < vocab)
        self._compiled: dict[Structure, Any] = {}

    @functools.cached_property
    def _library(self) -> Any:
        import llguidance

        if not self._eos_ids:
            raise UserError(
                f"{self._tokenizer.path}: the model has no end-of-sequence token, so a sample "
                "with a grammar could never end"
            )
        words = _Words(self._tokenizer, self._vocab, self._eos_ids)
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(words), eos_token=self._eos_ids)

    def matcher(self, structure: Structure) -> Matcher:
        """Return the state of a new sample.

        Raises:
            UserError: the grammar does not fit this vocabulary, or the model has no
                end-of-sequence token.
        """
        if structure not in self._compiled:
            import llguidance

            made = llguidance.LLMatcher(self._library, structure.lark())
            if made.is_error():
                raise UserError(f"`{structure.kind}`: {_brief(made.get_error())}")
            self._compiled[structure] = made
        return Matcher(self._compiled[structure].deep_copy(), self._vocab)


@functools.lru_cache(maxsize=2)
def grammars_of(tokenizer: Tokenizer, vocab: int, eos_ids: frozenset[int]) -> Grammars:
    """Return the grammars of a model; the same ones for the same arguments, because preparing a
    vocabulary takes about a second."""
    return Grammars(tokenizer, vocab=vocab, eos_ids=eos_ids)


class _Words:
    """The vocabulary in the form that llguidance takes it from other tokenizers."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos_ids: Sequence[int]):
        words = token_bytes(tokenizer, vocab)
        words += [None] * (-vocab % 64)  # so that masks have whole words of 64 bits
        self.eos_token_id = eos_ids[0]
        self.special_token_ids = [id_ for id_, word in enumerate(words) if word is None]
        # A special token is no text. Its name is for grammars that mention it.
        self.tokens = [
            (tokenizer.spelled(id_) or f"[{id_}]").encode() if word is None else word
            for id_, word in enumerate(words)
        ]

    def __call__(self, text: bytes) -> list[int]:
        """Tokenise a text: only needed to force tokens, which is switched off."""
        return []


def token_bytes(tokenizer: Tokenizer, vocab: int) -> list[bytes | None]:
    """Return the bytes that each of the first `vocab` ids adds to a text; None if it adds none.

    Special tokens add none, nor do ids without a token.
    """
    of = bytes_of(tokenizer)
    return [of(id_) for id_ in range(vocab)]


def bytes_of(tokenizer: Tokenizer) -> Callable[[int], bytes | None]:
    """Return a function of the bytes that one id adds to a text; see `token_bytes`."""
    texts, ends = tokenizer.texts, set(tokenizer.eos_ids)
    anchor = _anchor(tokenizer)
    before = len(tokenizer.decode(anchor))

    def of(id_: int) -> bytes | None:
        if id_ not in texts or id_ in ends:
            return None
        text = tokenizer.decode([*anchor, id_])[before:]
        if "\N{REPLACEMENT CHARACTER}" in text:  # a part of a character
            spelled, letters = texts[id_], _byte_letters()
            if byte := _BYTE.fullmatch(spelled):
                return bytes.fromhex(byte[1])
            if all(letter in letters for letter in spelled):
                return bytes(letters[letter] for letter in spelled)
        return text.encode() or None

    return of


def _anchor(tokenizer: Tokenizer) -> list[int]:
    """Return a token that others are decoded behind: at the beginning of a text a decoder may drop
    a space."""
    for id_, spelled in tokenizer.texts.items():
        if spelled.isalnum() and spelled.isascii() and tokenizer.decode([id_]) == spelled:
            return [id_]
    return []


@functools.cache
def _byte_letters() -> dict[str, int]:
    """Return the byte of each letter in a byte-level vocabulary (GPT-2): printable bytes are
    themselves, the others are letters from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    return letters | {chr(256 + number): byte for number, byte in enumerate(others)}


@functools.cache
def _executor() -> Any:
    import llguidance

    return llguidance.LLExecutor()


def _brief(message: str) -> str:
    return json.dumps(message.partition("\n")[0], ensure_ascii=False)[1:-1]
