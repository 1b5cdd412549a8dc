"""Supply the prompts for the target's samples: those of a file, or ones that the model writes.

Without a file, a chat model continues an empty user turn and then answers what it wrote; every
model also continues an empty text. sampling.py draws the samples.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from bass_cli.errors import UserError
from bass_cli.formats.tokenizer import Tokenizer
from bass_cli.io.prompts import Prompt
from bass_cli.io.results import Completion

_MARK = "THE USER SAYS THIS"  # marks the user's words in a rendered template
TURN, ANSWER, TEXT, FILE = (
    "turn",
    "answer",
    "text",
    "file",
)  # kinds of prompts; the first part of their ids


class Own(NamedTuple):
    """The prompts from which a model writes user turns and texts; None if it writes none."""

    turn: str | None
    text: str | None


def own_beginnings(tokenizer: Tokenizer, chat: bool | None) -> Own:
    """Make the prompts for a model with this tokenizer.

    chat: True for turns and answers only, False for texts only; None for both, if there is a chat
    template. UserError if the tokenizer has no beginning for a turn or text.
    """
    turn = None
    if chat and not tokenizer.has_chat_template:
        raise UserError(f"--chat: {tokenizer.path}: the tokenizer has no chat template")
    if chat is not False and tokenizer.has_chat_template:
        begin, found, _ = tokenizer.render([{"role": "user", "content": _MARK}]).partition(_MARK)
        turn = _as_prompt(tokenizer, begin) if found else None
        if chat and not turn:
            raise UserError(
                "--chat: the chat template has no text before a user's words, so the model cannot "
                "write user turns; give --prompts FILE"
            )
    text = None if chat else _first_text(tokenizer)
    if not turn and text is None:
        raise UserError(
            "the tokenizer has no token that begins or ends a text, so the model cannot write its "
            "own prompts; give --prompts FILE"
        )
    return Own(turn or None, text)


def _as_prompt(tokenizer: Tokenizer, text: str) -> str:
    """Return the text without the BOS token, if the tokenizer adds it."""
    ids, begin = tokenizer.encode_part(text), tokenizer.settled.special.get("bos_token", "")
    shorter = text.removeprefix(begin)
    return shorter if tokenizer.encode(text) != ids == tokenizer.encode(shorter) else text


def _first_text(tokenizer: Tokenizer) -> str | None:
    """Return the beginning of a text: empty if the tokenizer adds a token itself."""
    if tokenizer.encode(""):
        return ""
    special = tokenizer.settled.special
    named = (special.get(f"{name}_token") for name in ("bos", "pad", "eos"))
    return next((text for text in named if text and len(tokenizer.encode(text)) == 1), None)


class Supply(Iterator[Prompt]):
    """Iterates over prompts of n samples each, until about `wanted` tokens will come of them.

    Every sample must be passed to `take`, also those of an earlier run.

    Args:
        own: the model's own prompts, or a function that returns the prompts of a file.
        wanted: tokens of samples to draw.
        likely: expected tokens of a sample before the first one has ended.
        passes: how often the prompts of a file are used; None: until there are enough tokens.
    """

    def __init__(
        self,
        own: Own | Callable[[], Iterator[Prompt]],
        *,
        n: int,
        wanted: int,
        likely: float = 1.0,
        passes: int | None = None,
    ):
        self._n, self._wanted, self._likely = n, wanted, max(likely, 1.0)
        self.exhausted = False  # whether all passes over the file are over
        self._file: Iterator[Prompt] | None = None
        kinds: dict[str, Iterator[Prompt]] = {}
        if isinstance(own, Own):
            kinds = {kind: _numbered(kind, text) for kind, text in
                     ((TURN, own.turn), (TEXT, own.text)) if text is not None}  # fmt: skip
        else:
            self._file = _again(own, passes)
        self._kinds = kinds
        self._unanswered: list[Prompt] = []  # user turns without an answer yet
        self._known: set[str] = set()
        self._done: set[tuple[str, int]] = set()
        self._given: dict[str, int] = {}  # by prompt: samples that have not ended
        self._counts = {kind: _Count() for kind in (TURN, ANSWER, TEXT, FILE)}

    def __next__(self) -> Prompt:
        while sum(map(self._expected, self._counts)) < self._wanted:
            prompt = self._next()
            if prompt is None:
                self.exhausted = True
                break
            missing = sum((prompt.id, sample) not in self._done for sample in range(self._n))
            if missing:
                self._given[prompt.id] = missing
                self._counts[kind_of(prompt.id)].coming += missing
                return prompt
        raise StopIteration

    def take(self, done: Completion) -> None:
        """Record a finished sample, or a prompt that cannot be run."""
        kind, missing = kind_of(done.id), self._given.pop(done.id, 0)
        count, ended = self._counts[kind], min(missing, self._n if done.is_of_prompt else 1)
        count.coming -= ended
        if missing > ended:
            self._given[done.id] = missing - ended
        if done.is_of_prompt:
            return
        self._done.add((done.id, done.sample))
        count.samples += 1
        count.tokens += done.tokens
        words = done.text.strip()
        if kind == TURN and done.finish_reason == "eos" and words and words not in self._known:
            self._known.add(words)
            id_ = f"{ANSWER}/{done.id.partition('/')[2]}.{done.sample}"
            self._unanswered.append(_prompt(id_, None, [{"role": "user", "content": done.text}]))

    @property
    def done(self) -> set[tuple[str, int]]:
        """The samples that have ended, as (prompt id, number)."""
        return set(self._done)

    @property
    def tokens(self) -> int:
        """Tokens of the samples that have ended."""
        return sum(count.tokens for count in self._counts.values())

    @property
    def total(self) -> int:
        """Estimated tokens at the end: as many as wanted, or fewer if the prompts have run out."""
        if not self.exhausted or not any(count.samples for count in self._counts.values()):
            return self._wanted
        return min(self._wanted, round(sum(map(self._expected, self._counts))))

    def _expected(self, kind: str) -> float:
        """Estimate the tokens of a kind, with samples that have not ended.

        A sample counts as at least one token, so that drawing ends even if all samples are empty.
        """
        count = self._counts[kind]
        known = max(count.tokens, count.samples)
        return known + count.coming * (known / count.samples if count.samples else self._likely)

    def _next(self) -> Prompt | None:
        if self._file is not None:
            return next(self._file, None)
        spent = {TEXT: self._expected(TEXT), TURN: self._expected(TURN) + self._expected(ANSWER)}
        behind = min(self._kinds, key=lambda kind: spent[kind])
        answer = behind == TURN and self._unanswered
        return self._unanswered.pop() if answer else next(self._kinds[behind])


@dataclasses.dataclass(slots=True)
class _Count:
    """Counts of a kind: samples and tokens that have ended, and samples to come."""

    samples: int = 0
    tokens: int = 0
    coming: int = 0


def kind_of(id_: str) -> str:
    """Return the kind of the prompt with this id."""
    return id_.partition("/")[0]


def _prompt(id_: str, text: str | None, messages: list[dict[str, Any]] | None) -> Prompt:
    """Make a prompt whose text is stored in its samples' lines, for training."""
    meta = {"text": text} if messages is None else {"messages": messages}
    return Prompt(id_, text, messages, meta, None, id_)


def _numbered(kind: str, text: str) -> Iterator[Prompt]:
    return (_prompt(f"{kind}/{number}", text, None) for number in itertools.count())


def _again(prompts: Callable[[], Iterator[Prompt]], passes: int | None) -> Iterator[Prompt]:
    return (
        _prompt(f"{FILE}/{number}/{prompt.id}", prompt.text, prompt.messages)
        for number in (itertools.count() if passes is None else range(passes))
        for prompt in prompts()
    )
