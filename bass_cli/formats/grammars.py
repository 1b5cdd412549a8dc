"""Follow a grammar token by token: which tokens of a vocabulary may come next in a sample's text.

llguidance does the work, for JSON schemas, regexes and grammars alike (config/file_options.py). It
needs the bytes of every token, which are derived here from the tokenizer. Not here: the masks of
a batch's rows (engine/round.py).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Any, cast

import numpy
from numpy.typing import NDArray

from bass_cli.config.file_options import Structure, brief_fault
from bass_cli.config.line import SettingError
from bass_cli.errors import UserError
from bass_cli.formats.completion_text import NEWLINES, Thinking
from bass_cli.formats.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_EVERY = -1  # a word of a mask that allows 32 tokens
_MOST_COMPILED = 256  # grammars that are kept; each takes about 0.1 MB and some milliseconds


# What may come at a place before the answer: any token but the end; the opening tag or the answer;
# newlines or the answer; the answer. Other numbers are the only token that may come.
_FREE, _START, _GAP, _ANSWER = -1, -2, -3, -4


class Matcher:
    """The state of one sample in its grammar, after `seen` generated tokens.

    The grammar begins where the answer does, after the sample's thinking part. The tokens that
    close that part at its limit are needed here too, also without a grammar.

    fault: why the sample cannot go on: no token continues it, or the grammar is too complex for
        the library. None if it can. Else every token is allowed, and the sample must end.

    Args:
        inner: the library's state before the answer; None without a grammar.
        vocabulary: of the model.
        thinking: the thinking part before the first token; None if there is none.
    """

    __slots__ = ("_vocabulary", "fault", "inner", "seen", "thinking")

    def __init__(self, inner: Any, vocabulary: Vocabulary, thinking: Thinking | None = None):
        self.inner, self._vocabulary, self.thinking = inner, vocabulary, thinking
        self.seen, self.fault = 0, cast("str | None", None)

    def advance(self, tokens: Sequence[int]) -> None:
        """Go on by generated tokens, all of which are allowed."""
        new, thinking = tokens, self.thinking
        if thinking is not None:
            thinking.feed(tokens)
            new = tokens[max(thinking.answer - self.seen, 0) :] if thinking.answers else ()
        if new and self.inner is not None and self.fault is None:
            self.inner.consume_tokens(list(new))
            self.check()
        self.seen += len(tokens)

    def allowed(self, drafts: Sequence[int]) -> int:
        """Return how many of the next tokens are allowed, one after the other."""
        known, places = self.known(drafts), self.places(drafts)
        for at, id_ in enumerate(known):
            place = places[at]
            if place == _ANSWER or (place in (_START, _GAP) and places[at + 1] == _ANSWER):
                return at + self._continues(known[at:])
            if (place >= 0 and id_ != place) or (place == _FREE and self._ends(id_)):
                return at
        return len(known)

    def _continues(self, tokens: list[int]) -> int:
        if self.inner is None or self.fault is not None:
            return len(tokens)
        found: int = self.inner.validate_tokens(tokens)
        self.check()
        return found

    def _ends(self, id_: int) -> bool:
        return self.inner is not None and id_ in self._vocabulary.eos_ids

    def known(self, drafts: Sequence[int]) -> list[int]:
        """Return the drafts before the first id that the vocabulary lacks."""
        vocab = self._vocabulary.size
        end = next((i for i, id_ in enumerate(drafts) if not 0 <= id_ < vocab), len(drafts))
        return list(drafts[:end])

    def places(self, drafts: Sequence[int]) -> list[int]:
        """Return what may come at each place: before the first draft, after it, and so on."""
        known, thinking = self.known(drafts), self.thinking
        if thinking is None or thinking.answers:
            return [_ANSWER] * (len(known) + 1)
        state, found = thinking.copy(), list[int]()
        for id_ in (*known, None):
            if state.answers:
                found.append(_ANSWER)
            elif state.is_open:
                found.append(_FREE if state.forced is None else state.forced)
            else:
                found.append(_GAP if state.is_over else _START)
            if id_ is not None:
                state.feed([id_])
        return found

    def mask(self, place: int, answer: NDArray[numpy.int32]) -> NDArray[numpy.int32]:
        """Return the mask of a place, [2 ceil(V / 64)] int32. answer: that of an answer's first
        token."""
        if place >= 0:
            return self._vocabulary.mask((place,))
        if self.inner is None:
            return self._vocabulary.every
        if place == _FREE:
            return ~self._vocabulary.mask(self._vocabulary.eos_ids)
        if place == _GAP:
            return answer | self._vocabulary.newlines
        assert place == _START
        assert self.thinking is not None
        begin = self.thinking.begin_id
        return answer if begin is None else answer | self._vocabulary.mask((begin,))

    @property
    def is_in_answer(self) -> bool:
        """Whether the next token must follow the grammar."""
        open_ = self.thinking is None or self.thinking.answers
        return open_ and self.inner is not None and self.fault is None

    def check(self) -> str | None:
        """Set and return `fault` if the library gave up."""
        if self.inner is not None and self.inner.is_error():
            reason = brief_fault(self.inner.get_error())
            self.fault = f"the grammar could not be followed: {reason}"
            if reason.startswith("NoExtension"):
                self.fault = "no token of the model continues the text in its grammar"
        return self.fault


def fill(
    rows: Sequence[tuple[Matcher, Sequence[int]] | None],
    masks: NDArray[numpy.int32],
    made: Container[int] = (),
) -> None:
    """Write the allowed tokens of each row's places, on several threads.

    A place's mask is that after the drafts before it. After a draft that is forbidden, or that
    ends the sample, a mask stays as it was: no token there is ever used.

    Args:
        rows: the matcher and the drafts of each row; None for a row of free text.
        masks: [B, W, 2 ceil(V / 64)] int32; bit i % 32 of word i // 32 is token i. Each place
            must allow some token already.
        made: lines whose masks DraftMasks has made.
    """
    width, wanted = masks.shape[1], list[tuple[Any, int, list[int]]]()
    before = list[tuple[Matcher, int, list[int], int]]()  # rows with places before their answer
    for line, one in enumerate(rows):
        if line in made:
            continue
        if one is None or one[0].fault is not None:
            masks[line] = _EVERY
            continue
        matcher, drafts = one[0], one[0].known(one[1][: width - 1])
        places = matcher.places(drafts)
        if _ANSWER in places:  # the draft before such a place is the answer's first token
            first = max(places.index(_ANSWER) - 1, 0)
        else:
            first = max(
                (at for at, place in enumerate(places) if place in (_START, _GAP)), default=-1
            )
            drafts = []
        if places[0] != _ANSWER or matcher.inner is None:
            before.append((matcher, line, places, first))
        if matcher.inner is not None and first >= 0:
            wanted.append((matcher.inner, line * width + first, drafts[first:]))
    _compute(wanted, masks)
    for matcher, line, places, first in before:
        answer = masks[line, first].copy()
        for at, place in enumerate(places):
            if place != _ANSWER or matcher.inner is None:
                masks[line, at] = matcher.mask(place, answer)
    for line, one in enumerate(rows):
        if one is not None and one[0].check() is not None:
            masks[line] = _EVERY


class DraftMasks:
    """The masks of a round's places, made one after the other while its drafts are still coming.
    They are those of `fill`.

    Args:
        rows: the matchers of the rows that are in their answer, by line.
        masks: as in `fill`.
    """

    def __init__(self, rows: Mapping[int, Matcher], masks: NDArray[numpy.int32]):
        self._rows, self._masks = rows, masks
        self._alive, self._taken = dict(rows), dict.fromkeys(rows, 0)
        self._place = 0
        self._write()

    def take(self, drafts: Sequence[int]) -> None:
        """Go on to the next place, after the next draft of each line."""
        self._place += 1
        for line, matcher in list(self._alive.items()):
            known = matcher.known([drafts[line]])
            if known and matcher.inner.try_consume_tokens(known) == 1:
                self._taken[line] += 1
            else:
                del self._alive[line]
        self._write()

    def close(self) -> None:
        """Take the drafts back from the matchers."""
        for line, count in self._taken.items():
            if count:
                self._rows[line].inner.rollback(count)
            if self._rows[line].check() is not None:
                self._masks[line] = _EVERY

    def _write(self) -> None:
        width = self._masks.shape[1]
        _compute(
            [(one.inner, line * width + self._place, []) for line, one in self._alive.items()],
            self._masks,
        )


def _compute(wanted: list[tuple[Any, int, list[int]]], masks: NDArray[numpy.int32]) -> None:
    """Let the library write masks: for each of its states, the first place, counted over all rows,
    and the drafts that come there."""
    into = masks.ctypes.data, masks.shape[2] * 4, masks.shape[0] * masks.shape[1]
    drafted = [one for one in wanted if one[2]]
    if drafted:
        _executor().unsafe_compute_mask_ptr_with_draft_token(drafted, *into)
    plain = [(state, place) for state, place, drafts in wanted if not drafts]
    if plain:
        _executor().unsafe_compute_mask_ptr(plain, *into)


class Vocabulary:
    """The tokens that a model can sample, the first `size` ones of its tokenizer."""

    def __init__(self, tokenizer: Tokenizer, size: int, eos_ids: Collection[int]):
        self.tokenizer, self.size = tokenizer, size
        self.eos_ids = tuple(sorted(id_ for id_ in eos_ids if id_ < size))
        self._words = 2 * -(-size // 64)
        self.every = numpy.full(self._words, _EVERY, dtype=numpy.int32)
        self._masks: dict[tuple[int, ...], NDArray[numpy.int32]] = {}

    @functools.cached_property
    def bytes(self) -> list[bytes | None]:
        """See token_bytes."""
        return token_bytes(self.tokenizer, self.size)

    @functools.cached_property
    def newlines(self) -> NDArray[numpy.int32]:
        """The mask of the tokens of newlines alone."""
        line = NEWLINES.encode()
        of = ((id_, word) for id_, word in enumerate(self.bytes) if word)
        return self.mask(tuple(id_ for id_, word in of if not word.strip(line)))

    def mask(self, ids: tuple[int, ...]) -> NDArray[numpy.int32]:
        """Return the mask of these ids, [2 ceil(V / 64)] int32."""
        if ids not in self._masks:
            bits = numpy.zeros(self._words * 32, dtype=numpy.uint8)
            bits[list(ids)] = 1
            packed = numpy.packbits(bits, bitorder="little")
            self._masks[ids] = packed.view("<i4").astype(numpy.int32)
        return self._masks[ids]


class Grammars:
    """The grammars of a model's samples.

    Args:
        vocab: tokens that the model can sample, the first ones.
        eos_ids: the ids that end a sample. Only they are allowed after a complete text.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab: int, eos_ids: Collection[int]):
        self._vocabulary = Vocabulary(tokenizer, vocab, eos_ids)
        self._compiled: dict[Structure, Any] = {}

    @functools.cached_property
    def _library(self) -> Any:
        import llguidance

        if not self._vocabulary.eos_ids:
            raise UserError(
                f"{self._vocabulary.tokenizer.path}: the model has no end-of-sequence token, so a "
                "sample with a grammar could never end"
            )
        words = llguidance.TokenizerWrapper(_Words(self._vocabulary))
        return llguidance.LLTokenizer(words, eos_token=list(self._vocabulary.eos_ids))

    def matcher(self, structure: Structure | None, thinking: Thinking | None = None) -> Matcher:
        """Return the state of a new sample.

        Args:
            structure: what the answer must match; None if it is free.
            thinking: the thinking part before the first token.

        Raises:
            SettingError: the grammar does not fit this vocabulary.
            UserError: the model has no end-of-sequence token.
        """
        if structure is None:
            return Matcher(None, self._vocabulary, thinking)
        if structure not in self._compiled:
            import llguidance

            made = llguidance.LLMatcher(self._library, structure.lark())
            if made.is_error():
                raise SettingError(structure.kind, brief_fault(made.get_error(), structure.kind))
            while len(self._compiled) >= _MOST_COMPILED:  # prompts may have grammars of their own
                del self._compiled[next(iter(self._compiled))]
            self._compiled[structure] = made
        return Matcher(self._compiled[structure].deep_copy(), self._vocabulary, thinking)


@functools.lru_cache(maxsize=2)
def grammars_of(tokenizer: Tokenizer, vocab: int, eos_ids: frozenset[int]) -> Grammars:
    """Return the grammars of a model; the same ones for the same arguments, because preparing a
    vocabulary takes about a second."""
    return Grammars(tokenizer, vocab=vocab, eos_ids=eos_ids)


class _Words:
    """The vocabulary in the form that llguidance takes it from other tokenizers."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary):
        # filled up so that masks have whole words of 64 bits
        words = [*vocabulary.bytes, *[None] * (-vocabulary.size % 64)]
        self.eos_token_id = vocabulary.eos_ids[0]
        self.special_token_ids = [id_ for id_, word in enumerate(words) if word is None]
        # A special token is no text. Its name is for grammars that mention it.
        self.tokens = [
            (vocabulary.tokenizer.spelled(id_) or f"[{id_}]").encode() if word is None else word
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
