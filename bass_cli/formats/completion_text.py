"""The text of a completion: its decoding, stop texts in it, and its thinking part.

A completion is decoded as the continuation of its prompt. A stop text that is one special token
becomes an id that ends a sample. A sample has a thinking part if its prompt ends with the opening
tag, or if the sample begins with it. Not here: tokenizers (tokenizer.py), turning thinking off
(chat_template.py), the other reasons why a sample ends (run/tasks.py).
"""

from __future__ import annotations

import copy
import enum
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from bass_cli.errors import UserError
from bass_cli.formats.tokenizer import Tokenizer
from bass_cli.reading import shown

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # how SentencePiece vocabularies spell a byte
_CUT = "\ufffd"  # the decoder's replacement for bytes that are not a whole character
# Extra characters at the beginning of a decoded tail. There a text may decode in another way than
# in the middle of a longer text.
_MARGIN = 16


class Continuation:
    """Decode ids as the continuation of a prompt.

    A SentencePiece decoder drops the space at the beginning of a text, because its encoder adds
    one there. A completion begins in the middle of a text, so its first space must stay.

    One id of the prompt is decoded before the completion, in place of the whole prompt. This is
    enough, because a decoder depends only on whether text precedes, and on the bytes of the same
    run. The id is the last one that has a text of its own. Special tokens have none: they are
    left out. Byte tokens have none: half a character after them would spoil the whole run of
    bytes. If a prompt has no such id, the completion is decoded as the beginning of a text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        """Prepare to decode what follows the ids of `prompt`."""
        self._tokenizer = tokenizer
        last = next((id_ for id_ in reversed(prompt) if self._has_text(id_)), None)
        self._before = [] if last is None else [last]
        self._width = len(tokenizer.decode(self._before))

    def after(self, ids: Sequence[int]) -> Continuation:
        """Return the continuation of the prompt and these ids."""
        return Continuation(self._tokenizer, [*self._before, *ids])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids after the prompt, without special tokens.

        Spaces stay as they are. Bytes of an incomplete character at the end become one U+FFFD; the
        complete characters before them in the same run are decoded.
        """
        text = self._after(ids)
        if text.endswith(_CUT):
            for end in range(len(ids) - 1, max(len(ids) - 4, -1), -1):
                if not self._is_byte(ids[end]):
                    break
                if not (shorter := self._after(ids[:end])).endswith(_CUT):
                    return shorter + _CUT
        return text

    def before_last(self, ids: Sequence[int], *, include: bool) -> str:
        """Return the text of the ids before the last one, which is a stop.

        `include`: add the text of the last one; a special token has its spelling as text.
        """
        if not include:
            return self.decode(ids[:-1])
        text, last = self.decode(ids), self._tokenizer.spelled(ids[-1])
        return text + last if last in self._tokenizer.special_tokens else text

    def alone(self, id_: int) -> str | None:
        """Return the text that this id adds anywhere; None if it depends on the ids around it."""
        text = self._after([id_])
        return None if not self._before or _CUT in text or self._is_byte(id_) else text

    def _after(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([*self._before, *ids])[self._width :]

    def _is_byte(self, id_: int) -> bool:
        return bool(_BYTE.fullmatch(self._tokenizer.spelled(id_)))

    def _has_text(self, id_: int) -> bool:
        if self._is_byte(id_):
            return False
        # Decoded twice, because a decoder may drop the first space of a text.
        twice = self._tokenizer.decode([id_, id_])
        return bool(twice) and _CUT not in twice


def special_stops(
    tokenizer: Tokenizer, stops: Iterable[str], *, vocab: int = sys.maxsize
) -> frozenset[int]:
    """Return the ids of those stop texts that are one special token each.

    Decoding leaves special tokens out, so a search in the text cannot find them. The caller ends
    a sample at these ids. It also searches the text for the same stops, because several ordinary
    tokens may spell them.

    Args:
        vocab: number of logits of the model.

    Raises:
        UserError: a stop text cannot occur. It contains a special token and other text, or a
            character that no token has, or it is a token that the model lacks.
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
                f"stop text {shown(stop)}: it contains the special token {shown(held)} and other "
                "text; special tokens are left out of a sample's text, so it could never be "
                f"found; use {shown(held)} alone"
            )
        if (character := _unknown_character(tokenizer, stop)) is not None:
            raise UserError(
                f"stop text {shown(stop)}: no token of this model has the character "
                f"{shown(character)}, so it could never be found"
            )
    return frozenset(special[stop] for stop in stops if stop in special)


def ending_ids(
    tokenizer: Tokenizer, stops: Iterable[str], ids: Iterable[int], *, vocab: int = sys.maxsize
) -> frozenset[int]:
    """Return the ids that end a sample: `ids`, and stop texts that are special tokens.

    UserError as in `special_stops`, or if the model has no logit for one of `ids`.
    """
    ids = tuple(ids)
    for id_ in ids:
        if id_ >= vocab:
            raise UserError(
                f"`sampling.stop_token_ids`: {id_} could never be drawn, because the model has "
                f"tokens 0 to {vocab - 1}"
            )
    return special_stops(tokenizer, stops, vocab=vocab).union(ids)


def _unknown_character(tokenizer: Tokenizer, stop: str) -> str | None:
    """Return the first character of the stop text that no token decodes to; None if all occur.

    With byte tokens every character can occur.
    """
    if stop in tokenizer.decode(tokenizer.encode_part(stop, embedded=False)):
        return None
    known = set[str]()
    for id_, spelled in tokenizer.texts.items():
        text = tokenizer.decode([id_, id_])  # twice: the first space may be dropped
        if _BYTE.fullmatch(spelled) or (_CUT in text and _CUT not in spelled):
            return None
        known.update(text)
    return next((character for character in stop if character not in known), None)


class Stop(NamedTuple):
    """Where a stop text ended a sample.

    text: the text before the stop text.
    tokens: number of generated tokens that count, including the one that completes the stop text.
    stop: the stop text; of several that begin at one place the shortest.
    """

    text: str
    tokens: int
    stop: str


class StopTokens:
    """A filter by id: whether a token can complete a stop text.

    It saves decoding. Results are computed when an id first occurs and kept for the whole job.
    """

    def __init__(self, text: Continuation, stops: Sequence[str]):
        """Prepare the filter.

        Args:
            text: the continuation of any prompt of this tokenizer.
            stops: the stop texts, at least one.
        """
        self._text, self._stops = text, tuple(stops)
        # U+FFFD also replaces a run of bytes that is invalid because of what follows it
        self._always = any(_CUT in stop for stop in stops)
        self._ends = tuple({stop[at:] for stop in stops for at in range(1, len(stop))})
        self._longest = max(map(len, stops))
        # By id: 0 if not computed yet, 1 if it cannot complete a stop text, 2 if it may.
        self._known = numpy.zeros(0, dtype=numpy.int8)
        self._excluded: set[int] = set()  # the ids with a 1
        self._texts: dict[int, str | None] = {}  # Continuation.alone by id

    def among(self, ids: NDArray[numpy.int64]) -> NDArray[numpy.bool_]:
        """Return for each id whether it may complete a stop text, after any ids.

        It may if its own text contains a stop text or begins with the end of one. Only sequences
        that received such an id have to be searched.
        """
        missing = int(ids.max(initial=0)) + 1 - len(self._known)
        if missing > 0:
            self._known = numpy.pad(self._known, (0, missing + len(self._known)))
        if (new := ids[self._known[ids] == 0]).size:
            for id_ in numpy.unique(new).tolist():
                self._known[id_] = 1 + self._may_complete(id_)
                if self._known[id_] == 1:
                    self._excluded.add(id_)
        found: NDArray[numpy.bool_] = self._known[ids] == 2
        return found

    def ends(self, ids: Sequence[int], new: int) -> list[int]:
        """Return the lengths of prefixes of `ids` at which a stop text may be complete.

        Only prefixes that end in one of the last `new` ids are returned. A prefix is left out if
        the texts of its single ids, joined, contain no stop text at its end.
        """
        begin, excluded = len(ids) - new, self._excluded
        return [
            at + 1
            for at, id_ in enumerate(ids[begin:], begin)
            if self._always or (id_ not in excluded and self._may_end_at(ids, at))
        ]

    def _may_end_at(self, ids: Sequence[int], at: int) -> bool:
        """Return whether a stop text may end in the id at this place."""
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

    def _may_complete(self, id_: int) -> bool:
        text = None if self._always else self._alone(id_)
        return text is None or text.startswith(self._ends) or _has_any(text, self._stops)


def _has_any(text: str, stops: Iterable[str]) -> bool:
    return any(stop in text for stop in stops)


class StopDetector:
    """Search the generated ids of one sample for stop texts.

    The first token after which the decoded text contains a stop text ends the sample; the result
    does not depend on the blocks in which ids arrive. Nothing is decoded if the filter excludes
    all new ids. Else the last ids are decoded; if their text contains a stop text, all ids are
    decoded, to confirm it and to cut the text.
    """

    def __init__(
        self,
        text: Continuation | Tokenizer,
        stops: Sequence[str],
        tokens: StopTokens | None = None,
        *,
        skipped: str = "",
    ):
        """Prepare the search.

        Args:
            text: decodes the ids.
            stops: the stop texts, at least one, none empty.
            tokens: the filter; None to decode after every block.
            skipped: characters in which no stop text begins at the beginning of the text.
        """
        assert stops
        assert all(stops)
        self._text, self._stops, self._tokens = text, tuple(stops), tokens
        self._skipped = skipped
        self._always = any(_CUT in stop for stop in stops)  # see StopTokens
        self._needed = max(map(len, stops)) + _MARGIN  # characters that the tail must have
        self._ids: list[int] = []
        self._tail = 0  # index of the tail's first id

    def feed(self, ids: Sequence[int]) -> Stop | None:
        """Add the next ids; return the Stop if one of them completes a stop text, else None."""
        self._ids += ids
        ends: Sequence[int] = range(len(self._ids) - len(ids) + 1, len(self._ids) + 1)
        if self._tokens is not None:
            ends = self._tokens.ends(self._ids, len(ids))
            if not ends:
                return None
        text = self._text.decode(self._ids[self._tail :])
        # U+FFFD for an incomplete character may hide a stop text that was complete one token
        # earlier. Then each new id is checked by itself.
        if self._always or _CUT in text or _has_any(text, self._stops):
            for end in ends:
                found = self._stop_at(end, text if end == len(self._ids) else None)
                if found is not None:
                    return found
        self._shorten(text)
        return None

    def _stop_at(self, end: int, tail: str | None) -> Stop | None:
        """Return the Stop in the first `end` ids; `tail`: text from the tail on, if decoded."""
        if tail is None:
            tail = self._text.decode(self._ids[self._tail : end])
        if not _has_any(tail, self._stops):
            return None
        whole = tail if self._tail == 0 else self._text.decode(self._ids[:end])
        start = len(whole) - len(whole.lstrip(self._skipped)) if self._skipped else 0
        places = [(whole.find(stop, start), len(stop), stop) for stop in self._stops]
        found = [place for place in places if place[0] >= 0]
        if not found:
            return None
        place, _, stop = min(found)
        return Stop(whole[:place], end, stop)

    def _shorten(self, text: str) -> None:
        """Drop the first half of the tail if the rest is long enough.

        The tail must not begin inside a character, which would turn a whole run of bytes into
        U+FFFD. A character has at most four bytes, so one of four places is not inside one.
        """
        if len(text) > 4 * self._needed:
            middle = (self._tail + len(self._ids)) // 2
            for start in range(middle, middle + 4):
                rest = self._text.decode(self._ids[start:])
                if len(rest) >= self._needed and not rest.startswith(_CUT):
                    self._tail = start
                    return


# The thinking part

# The tags of published models
_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<thought>", "</thought>"),
)
NEWLINES = "\r\n"  # between the tags and the texts
_TAIL = 64  # tokens of a prompt in which its last tag is looked for


class Tags(NamedTuple):
    """The tags around a thinking part.

    begin_id, end_id: their tokens, if each is one token of the vocabulary; then the text is not
        searched. Else both are None.
    closing: the tokens that close the part.
    """

    begin: str
    end: str
    begin_id: int | None
    end_id: int | None
    closing: tuple[int, ...]

    def opened_in(self, text: str) -> bool:
        """Whether a text has an opening tag after its last closing tag."""
        return text.rfind(self.begin) > text.rfind(self.end)


def tags_of(tokenizer: Tokenizer) -> Tags | None:
    """Return the tags of a model, or None: they are tokens, or its chat template has them."""
    template = tokenizer.cached.template or ""
    for begin, end in _TAGS:
        begin_id, end_id = tokenizer.id_of(begin), tokenizer.id_of(end)
        if begin_id is not None and end_id is not None:
            return Tags(begin, end, begin_id, end_id, (end_id,))
        if end in template:
            try:
                closing = tokenizer.encode_part(end, embedded=False)
            except UserError:  # of a tokenizer that cannot read it
                continue
            return Tags(begin, end, None, None, tuple(closing))
    return None


def is_opened(
    tags: Tags, tokenizer: Tokenizer, tokens: Sequence[int], messages: Sequence[Mapping[str, Any]]
) -> bool:
    """Whether a prompt ends inside of a thinking part.

    It ends with the opening tag, or its last message is the assistant's and has an open part.
    """
    if messages and messages[-1].get("role") == "assistant":
        return tags.opened_in(str(messages[-1].get("content")))
    tail = list(tokens[-_TAIL:])
    if tags.begin_id is None:
        return tokenizer.decode(tail).rstrip().endswith(tags.begin)
    if tags.begin_id not in tail:
        return False
    last = len(tail) - 1 - tail[::-1].index(tags.begin_id)
    return not tokenizer.decode(tail[last + 1 :]).strip() and tags.end_id not in tail[last:]


class _Phase(enum.Enum):
    UNSURE, OPEN, GAP, ANSWER = range(4)  # GAP: newlines after the closing tag


class Thinking:
    """The thinking part of one sample, token by token.

    Attributes:
        count: generated tokens so far.
        end: the tokens of the thinking part, with its tags: 0 if there is none, None if it is open
            or not known yet.
        answer: the number of generated tokens before the answer; newlines after the closing tag
            are among them. 0 if there is no thinking part.
    """

    def __init__(self, tags: Tags, tokenizer: Tokenizer, *, opened: bool, limit: int | None = None):
        """Begin before the first generated token.

        Args:
            opened: whether the prompt ends inside of the part.
            limit: generated tokens after which it is closed; None for no limit.
        """
        self._tags, self._tokenizer, self._limit = tags, tokenizer, limit
        self._phase = _Phase.OPEN if opened else _Phase.UNSURE
        self._held: list[int] = []  # unsure: all tokens; open: the last ones
        self._forced = 0  # tokens of `closing` that were generated
        self._split: tuple[str, str] | None = None  # of a closed part
        self.count, self.answer = 0, 0
        self.end: int | None = None

    def copy(self) -> Thinking:
        """Return a copy that can be fed with drafts."""
        other = copy.copy(self)
        other._held = list(self._held)
        return other

    @property
    def begin_id(self) -> int | None:
        """The token that opens a part; None if it is not one token."""
        return self._tags.begin_id

    @property
    def is_open(self) -> bool:
        """Whether the last token is inside of the part."""
        return self._phase is _Phase.OPEN

    @property
    def is_over(self) -> bool:
        """Whether the next token belongs to the answer, or to newlines before it."""
        return self._phase in (_Phase.GAP, _Phase.ANSWER)

    @property
    def answers(self) -> bool:
        """Whether the answer has begun."""
        return self._phase is _Phase.ANSWER

    @property
    def forced(self) -> int | None:
        """The only token that may come next, because the limit is reached; None if any may."""
        if self._phase is not _Phase.OPEN or self._limit is None or self.count < self._limit:
            return None
        return self._tags.closing[self._forced]

    def feed(self, ids: Sequence[int]) -> None:
        """Go on by generated tokens."""
        push = {
            _Phase.UNSURE: self._push_unsure,
            _Phase.OPEN: self._push_open,
            _Phase.GAP: self._push_gap,
        }
        for at, id_ in enumerate(ids):
            if self._phase is _Phase.ANSWER:
                self.count += len(ids) - at
                return
            push[self._phase](id_)

    def _push_unsure(self, id_: int) -> None:
        self.count += 1
        begun = id_ == self._tags.begin_id
        if self._tags.begin_id is None:
            self._held.append(id_)
            text = self._tokenizer.decode(self._held)
            begun = text.startswith(self._tags.begin)
            if not begun and self._tags.begin.startswith(text):
                return
        self._held = []
        self._phase = _Phase.OPEN if begun else _Phase.ANSWER
        self.end = None if begun else 0

    def _push_gap(self, id_: int) -> None:
        text = self._tokenizer.decode([id_])
        if not text or text.strip(NEWLINES):
            self._phase, self.answer = _Phase.ANSWER, self.count
        self.count += 1

    def _push_open(self, id_: int) -> None:
        self._forced += self.forced is not None
        self.count += 1
        closes = id_ == self._tags.end_id or self._forced == len(self._tags.closing)
        if self._tags.end_id is None and not closes:
            self._held = [*self._held[-len(self._tags.end) - 3 :], id_]
            closes = self._tags.end in self._tokenizer.decode(self._held)
        if closes:
            self._phase, self.end = _Phase.GAP, self.count
            self.answer = self.count

    def split(self, ids: Sequence[int], text: Continuation) -> tuple[str, str]:
        """Return the thinking part's text without its tags, and what its last token adds to the
        answer.

        Args:
            ids: the generated tokens, all of which were fed.
            text: decodes them.
        """
        if self._split is not None:
            return self._split
        whole = text.decode(ids[: self.end])
        before, found, after = whole.rpartition(self._tags.end)
        if not (found and self.end):
            before, after = whole, ""
        bare = before.lstrip() if before.lstrip().startswith(self._tags.begin) else before
        parts = bare.removeprefix(self._tags.begin).strip(NEWLINES), after
        self._split = parts if self.end else None
        return parts
