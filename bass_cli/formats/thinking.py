"""The thinking part of a sample: where it ends, how it is split from the answer, when it is closed.

A sample has one if its prompt ends with the opening tag, as some chat templates write it, or if the
sample itself begins with that tag. Everything up to the closing tag belongs to it. With a limit,
the tokens of the closing tag are the only ones allowed once so many tokens were generated; the
engine reads them token by token (`forced`). Not here: turning thinking off (chat_template.py).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bass_cli.errors import UserError
from bass_cli.formats.continuation import Continuation
from bass_cli.formats.tokenizer import Tokenizer

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

    __slots__ = (
        "_forced",
        "_held",
        "_limit",
        "_phase",
        "_split",
        "_tags",
        "_tokenizer",
        "answer",
        "count",
        "end",
    )

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
        other = Thinking(self._tags, self._tokenizer, opened=False, limit=self._limit)
        other._phase, other._held, other._forced = self._phase, list(self._held), self._forced
        other.count, other.answer, other.end = self.count, self.answer, self.end
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
