"""What a target is asked for its own samples: a file's prompts again and again, or nothing that
anybody has to write. A chat model writes the users' turns itself, from the beginning of one that
is empty, and answers them; and every model goes on from the beginning of a text.

Not here: drawing (sampling.py).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from bass_cli.errors import UserError
from bass_cli.formats.tokenizer import Tokenizer
from bass_cli.io.completion import Completion
from bass_cli.io.prompts import Prompt

_MARK = "THE USER SAYS THIS"  # where a template puts what a user says
TURN, ANSWER, TEXT, FILE = "turn", "answer", "text", "file"  # kinds of prompts; ids begin so


class Own(NamedTuple):
    """The beginnings of what a model writes itself: a user's `turn`, and a `text`; None: it is
    not asked for those."""

    turn: str | None
    text: str | None


def own_beginnings(tokenizer: Tokenizer, chat: bool | None) -> Own:
    """For a model with this tokenizer. `chat`: only turns and their answers, or none of them; None:
    both, where there is a template. UserError where there is nothing to begin with."""
    turn = None
    if chat and not tokenizer.has_chat_template:
        raise UserError(f"--chat: {tokenizer.path}: the tokenizer has no chat template")
    if chat is not False and tokenizer.has_chat_template:
        begin, found, _ = tokenizer.render([{"role": "user", "content": _MARK}]).partition(_MARK)
        turn = _as_prompt(tokenizer, begin) if found else None
        if chat and not turn:
            raise UserError(
                "--chat: the template says nothing before what a user says, so no such turn can be "
                "begun; give --prompts FILE"
            )
    text = None if chat else _first_text(tokenizer)
    if not turn and text is None:
        raise UserError(
            "the tokenizer has no token that begins or ends a text, so none can be begun; give "
            "--prompts FILE"
        )
    return Own(turn or None, text)


def _as_prompt(tokenizer: Tokenizer, text: str) -> str:
    """The text without the token that the tokenizer will put before it once more."""
    due, begin = tokenizer.encode_part(text), tokenizer.settled.special.get("bos_token", "")
    shorter = text.removeprefix(begin)
    return shorter if tokenizer.encode(text) != due == tokenizer.encode(shorter) else text


def _first_text(tokenizer: Tokenizer) -> str | None:
    """What stands before every text: nothing, if the tokenizer puts a token there itself."""
    if tokenizer.encode(""):
        return ""
    special = tokenizer.settled.special
    named = (special.get(f"{name}_token") for name in ("bos", "pad", "eos"))
    return next((text for text in named if text and len(tokenizer.encode(text)) == 1), None)


class Supply(Iterator[Prompt]):
    """Prompts of n samples each, until about `wanted` tokens come of them.

    `own`: a call gives the prompts of a file anew; they are given `passes` times (None: until
    there are enough tokens). `likely`: tokens that a sample is expected to have before one has
    ended. Each sample has to be passed to `take`, those of an earlier run too.
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
        self.exhausted = False  # whether all passes over the file were given
        self._file: Iterator[Prompt] | None = None
        kinds: dict[str, Iterator[Prompt]] = {}
        if isinstance(own, Own):
            kinds = {kind: _numbered(kind, text) for kind, text in
                     ((TURN, own.turn), (TEXT, own.text)) if text is not None}  # fmt: skip
        else:
            self._file = _again(own, passes)
        self._kinds = kinds
        self._asked: list[Prompt] = []  # turns that wait for answers
        self._known: set[str] = set()
        self._done: set[tuple[str, int]] = set()
        self._given: dict[str, int] = {}  # by prompt: samples that are to come
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
        """A sample is there, or a prompt cannot be run."""
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
        says = done.text.strip()
        if kind == TURN and done.finish_reason == "eos" and says and says not in self._known:
            self._known.add(says)
            id_ = f"{ANSWER}/{done.id.partition('/')[2]}.{done.sample}"
            self._asked.append(_prompt(id_, None, [{"role": "user", "content": done.text}]))

    @property
    def done(self) -> set[tuple[str, int]]:
        """The samples that are there."""
        return set(self._done)

    @property
    def tokens(self) -> int:
        """Tokens that there are."""
        return sum(count.tokens for count in self._counts.values())

    @property
    def total(self) -> int:
        """Tokens that there will be: as many as wanted, or fewer once all prompts were given and
        samples have ended."""
        if not self.exhausted or not any(count.samples for count in self._counts.values()):
            return self._wanted
        return min(self._wanted, round(sum(map(self._expected, self._counts))))

    def _expected(self, kind: str) -> float:
        """Tokens of a kind that there are, and that samples on their way are expected to have. A
        sample counts as one at least: drawing ends also where samples are empty."""
        count = self._counts[kind]
        there = max(count.tokens, count.samples)
        return there + count.coming * (there / count.samples if count.samples else self._likely)

    def _next(self) -> Prompt | None:
        if self._file is not None:
            return next(self._file, None)
        spent = {TEXT: self._expected(TEXT), TURN: self._expected(TURN) + self._expected(ANSWER)}
        behind = min(self._kinds, key=lambda kind: spent[kind])
        return self._asked.pop() if behind == TURN and self._asked else next(self._kinds[behind])


@dataclasses.dataclass(slots=True)
class _Count:
    """Of a kind: samples and tokens that are there, samples that are to come."""

    samples: int = 0
    tokens: int = 0
    coming: int = 0


def kind_of(id_: str) -> str:
    """Of the prompt with this id."""
    return id_.partition("/")[0]


def _prompt(id_: str, text: str | None, messages: list[dict[str, Any]] | None) -> Prompt:
    """What it says goes to its samples' lines, which are read for training."""
    meta = {"text": text} if messages is None else {"messages": messages}
    return Prompt(id_, text, messages, meta, None, id_)


def _numbered(kind: str, text: str) -> Iterator[Prompt]:
    return (_prompt(f"{kind}/{number}", text, None) for number in itertools.count())


def _again(prompts: Callable[[], Iterator[Prompt]], passes: int | None) -> Iterator[Prompt]:
    return (
        _prompt(f"{FILE}/{turn}/{prompt.id}", prompt.text, prompt.messages)
        for turn in (itertools.count() if passes is None else range(passes))
        for prompt in prompts()
    )
