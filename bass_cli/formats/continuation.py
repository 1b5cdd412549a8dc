"""What follows a prompt: its text, the stop texts in it, and the special tokens that stand for
some of them. Not here: tokenizers, and what ends a row (scheduler.py)."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from bass_cli.errors import UserError
from bass_cli.formats.tokenizer import Tokenizer
from bass_cli.io.reading import shown

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # how SentencePiece vocabularies spell a byte
_CUT = "\ufffd"  # what stands in a text for bytes that are no character
# characters of left context, where a piece of text decodes otherwise than in the middle of a text
_MARGIN = 16


class Continuation:
    """Decodes what follows a prompt as it reads there. A SentencePiece decoder drops the space at
    the beginning of a text, where its encoder has put one; a completion begins in the middle of a
    text, and its first space is its own.

    One id of the prompt stands for all of it, since to the left a decoder only looks at whether
    anything is there, and at the bytes of the same run. It is the last one that has a text to
    itself: no special token (those are left out before decoding) and no byte (half a character
    after it would spoil the run, the prompt's part of it too). Where a prompt has none, the
    completion is where the text begins.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        last = next((id_ for id_ in reversed(prompt) if self._has_text(id_)), None)
        self._before = [] if last is None else [last]
        self._width = len(tokenizer.decode(self._before))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids after the prompt, special tokens left out, spaces as they are. Half a
        character of single bytes at its end is U+FFFD, and what stands before it in the same run
        is readable all the same."""
        text = self._after(ids)
        if text.endswith(_CUT):
            for end in range(len(ids) - 1, max(len(ids) - 4, -1), -1):
                if not self._is_byte(ids[end]):
                    break
                if not (shorter := self._after(ids[:end])).endswith(_CUT):
                    return shorter + _CUT
        return text

    def alone(self, id_: int) -> str | None:
        """What this id adds to any text; None if that depends on the ids around it."""
        text = self._after([id_])
        return None if not self._before or _CUT in text or self._is_byte(id_) else text

    def _after(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([*self._before, *ids])[self._width :]

    def _is_byte(self, id_: int) -> bool:
        return bool(_BYTE.fullmatch(self._tokenizer.spelled(id_)))

    def _has_text(self, id_: int) -> bool:
        if self._is_byte(id_):
            return False
        # a lone space is dropped, the second of two is not
        twice = self._tokenizer.decode([id_, id_])
        return bool(twice) and _CUT not in twice


def special_stops(
    tokenizer: Tokenizer, stops: Iterable[str], *, vocab: int = sys.maxsize
) -> frozenset[int]:
    """The ids of the stop texts that are one special token each. `vocab`: of the model.

    Decoding leaves special tokens out, so these ids end a sample where a search of its text
    cannot. The search goes on for the same stop, because ordinary tokens may spell it.

    Raises:
        UserError: A stop text that cannot occur: it holds a special token and other text, or a
            character that no token of the vocabulary has, or is a token that the model lacks.
    """
    stops, special = tuple(stops), tokenizer.special_tokens if stops else {}
    for stop in stops:
        if stop in special and special[stop] >= vocab:
            raise UserError(
                f"stop text {shown(stop)}: it is token {special[stop]} of the tokenizer, and the "
                f"model has tokens 0 to {vocab - 1}, so it could never be drawn"
            )
        if stop in special:
            continue
        held = max((text for text in special if text and text in stop), key=len, default=None)
        if held is not None:
            raise UserError(
                f"stop text {shown(stop)}: it holds the special token {shown(held)} and other "
                "text; special tokens are left out of a sample's text, so it could never be "
                f"found; give {shown(held)} alone"
            )
        if (character := _unknown_character(tokenizer, stop)) is not None:
            raise UserError(
                f"stop text {shown(stop)}: no token of this model has the character "
                f"{shown(character)}, so it could never be found"
            )
    return frozenset(special[stop] for stop in stops if stop in special)


def _unknown_character(tokenizer: Tokenizer, stop: str) -> str | None:
    """The first character of the stop text that no token decodes to; None where bytes can spell
    any character."""
    if stop in tokenizer.decode(tokenizer.encode_part(stop, embedded=False)):
        return None
    known = set[str]()
    for id_, spelled in tokenizer.texts.items():
        text = tokenizer.decode([id_, id_])  # the first one's leading space may be dropped
        if _BYTE.fullmatch(spelled) or (_CUT in text and _CUT not in spelled):
            return None
        known.update(text)
    return next((character for character in stop if character not in known), None)


class Stop(NamedTuple):
    """Where a stop string ended a row: the text before it, and how many generated tokens are
    kept, the one that completes it included."""

    text: str
    tokens: int


class StopTokens:
    """What ids say of stop strings, as far as nobody has to decode anything. Learnt as ids are
    met; `text`: of any prompt."""

    def __init__(self, text: Continuation, stops: Sequence[str]):
        self._text, self._stops = text, tuple(stops)
        self._every = _looks_always(stops)
        self._ends = tuple({stop[at:] for stop in stops for at in range(1, len(stop))})
        self._longest = max(map(len, stops))
        self._known = numpy.zeros(0, dtype=numpy.int8)  # by id: 0 nobody knows, 1 no, 2 yes
        self._innocent: set[int] = set()  # the ids that do not
        self._texts: dict[int, str | None] = {}  # by id: see Continuation.alone

    def among(self, ids: NDArray[numpy.int64]) -> NDArray[numpy.bool_]:
        """Whether these may complete a stop string, whatever stands before them: their own text has
        one in it, or begins with the end of one. A row needs to be looked at only when it got such
        an id."""
        missing = int(ids.max(initial=0)) + 1 - len(self._known)
        if missing > 0:
            self._known = numpy.pad(self._known, (0, missing + len(self._known)))
        if (new := ids[self._known[ids] == 0]).size:
            for id_ in numpy.unique(new).tolist():
                self._known[id_] = 1 + self._may(id_)
                if self._known[id_] == 1:
                    self._innocent.add(id_)
        found: NDArray[numpy.bool_] = self._known[ids] == 2
        return found

    def ends(self, ids: Sequence[int], new: int) -> list[int]:
        """After how many of a row's ids, of which the last `new` are new, a stop string may be
        complete: not where their own texts, one after the other, show none."""
        begin, innocent = len(ids) - new, self._innocent
        return [
            at + 1
            for at, id_ in enumerate(ids[begin:], begin)
            if self._every or (id_ not in innocent and self._shows(ids, at))
        ]

    def _shows(self, ids: Sequence[int], at: int) -> bool:
        """Whether a stop string may end in the id at this place."""
        text = self._alone(ids[at])
        needed = self._longest - 1 + len(text or "")
        while text is not None and at and len(text) < needed:
            at -= 1
            before = self._alone(ids[at])
            text = None if before is None else before + text
        return text is None or _has_any(text, self._stops)

    def _alone(self, id_: int) -> str | None:
        if id_ not in self._texts:
            self._texts[id_] = self._text.alone(id_)
        return self._texts[id_]

    def _may(self, id_: int) -> bool:
        text = None if self._every else self._alone(id_)
        return text is None or text.startswith(self._ends) or _has_any(text, self._stops)


def _looks_always(stops: Iterable[str]) -> bool:
    """Whether any id may complete a stop string: U+FFFD, which stands for half a character, and for
    a run of bytes as soon as something else ends it."""
    return any(_CUT in stop for stop in stops)


def _has_any(text: str, stops: Iterable[str]) -> bool:
    return any(stop in text for stop in stops)


class StopDetector:
    """Watches one row's generated ids for stop strings, whatever the blocks in which they come.
    `text`: what decodes them; `tokens`: see there.

    The first token whose arrival makes a stop string appear in the decoded text ends the row.
    Nothing is decoded where the ids' own texts show that there is none; else a tail of the ids is,
    and when it shows a stop string, the whole to be sure and to cut.
    """

    def __init__(
        self, text: Continuation | Tokenizer, stops: Sequence[str], tokens: StopTokens | None = None
    ):
        assert stops
        assert all(stops)
        self._text, self._stops, self._tokens = text, tuple(stops), tokens
        self._every = _looks_always(stops)
        # characters that the tail must show of what came before
        self._needed = max(map(len, stops)) + _MARGIN
        self._ids: list[int] = []
        self._tail = 0  # where the tail begins

    def feed(self, ids: Sequence[int]) -> Stop | None:
        """Take the next ids; the Stop if one of them completes a stop string."""
        self._ids += ids
        ends: Sequence[int] = range(len(self._ids) - len(ids) + 1, len(self._ids) + 1)
        if self._tokens is not None:
            ends = self._tokens.ends(self._ids, len(ids))
            if not ends:
                return None
        text = self._text.decode(self._ids[self._tail :])
        # A cut character shows as U+FFFD and may hide what stood there a token ago: then every
        # id is looked at alone.
        if self._every or _CUT in text or _has_any(text, self._stops):
            for end in ends:
                found = self._look(end, text if end == len(self._ids) else None)
                if found is not None:
                    return found
        self._shorten(text)
        return None

    def _look(self, end: int, tail: str | None) -> Stop | None:
        """At the first `end` ids; `tail`: their text from where it begins, if it is there."""
        if tail is None:
            tail = self._text.decode(self._ids[self._tail : end])
        if not _has_any(tail, self._stops):
            return None
        whole = tail if self._tail == 0 else self._text.decode(self._ids[:end])
        places = [place for stop in self._stops if (place := whole.find(stop)) >= 0]
        return Stop(whole[: min(places)], end) if places else None

    def _shorten(self, text: str) -> None:
        """Move the tail's beginning on once half of it would do, but not into a character: half
        of one at its beginning would hide a whole run of bytes. A character has four bytes at
        most."""
        if len(text) > 4 * self._needed:
            middle = (self._tail + len(self._ids)) // 2
            for start in range(middle, middle + 4):
                rest = self._text.decode(self._ids[start:])
                if len(rest) >= self._needed and not rest.startswith(_CUT):
                    self._tail = start
                    return
