"""The target's samples: their prompts, drawing them into a file, and reading them back.

Prompts are those of a file, or ones that the model writes: a chat model continues an empty user
turn and then answers what it wrote; every model also continues an empty text. The samples are
drawn by the engine of `bass generate`, and an interrupted run resumes. windows.py makes training
windows of them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bass_cli.distill.windows import Text
from bass_cli.errors import MachineError, UserError
from bass_cli.formats.tokenizer import Tokenizer
from bass_cli.io.console import Screen
from bass_cli.io.prompts import Prompt
from bass_cli.io.results import Completion, open_output
from bass_cli.io.resume import read_manifest
from bass_cli.reading import parse_object
from bass_cli.run.plan import Plan
from bass_cli.run.tasks import TaskBuilder

TURN, ANSWER, TEXT, FILE = "turn", "answer", "text", "file"  # kinds of prompts; begin their ids
ENOUGH = 0.98  # share of the wanted tokens; the lengths of samples are only estimated
_MARK = "THE USER SAYS THIS"  # marks the user's words in a rendered template
_TRIES = 4  # attempts to draw enough tokens, if samples turn out shorter than expected
# consecutive failed samples that end the run; single ones may fail on logits that are not finite
_BROKEN = 64

# Yields the missing samples of a supply as they end. The function that it gets is called with the
# tokens of each round.
Draw = Callable[["Supply", Callable[[int], None]], Iterator[Completion]]


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
        raise UserError(f"`chat=True`: {tokenizer.path}: the tokenizer has no chat template")
    if chat is not False and tokenizer.has_chat_template:
        begin, found, _ = tokenizer.render([{"role": "user", "content": _MARK}]).partition(_MARK)
        turn = _as_prompt(tokenizer, begin) if found else None
        if chat and not turn:
            raise UserError(
                "`chat=True`: the chat template has no text before a user's words, so the model "
                "cannot write user turns; give `prompts` FILE"
            )
    text = None if chat else _first_text(tokenizer)
    if not turn and text is None:
        raise UserError(
            "the tokenizer has no token that begins or ends a text, so the model cannot write its "
            "own prompts; give `prompts` FILE"
        )
    return Own(turn or None, text)


def _as_prompt(tokenizer: Tokenizer, text: str) -> str:
    """Return the text without the BOS token, if the tokenizer adds it."""
    ids, begin = tokenizer.encode_part(text), tokenizer.cached.special.get("bos_token", "")
    shorter = text.removeprefix(begin)
    return shorter if tokenizer.encode(text) != ids == tokenizer.encode(shorter) else text


def _first_text(tokenizer: Tokenizer) -> str | None:
    """Return the beginning of a text: empty if the tokenizer adds a token itself."""
    if tokenizer.encode(""):
        return ""
    special = tokenizer.cached.special
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
        self._n, self.wanted, self._likely = n, wanted, max(likely, 1.0)
        self.exhausted = False  # whether all passes over the file are over
        self._prompts: dict[str, Iterator[Prompt]] = {}  # by kind
        if not isinstance(own, Own):
            self._prompts[FILE] = _again(own, passes)
        elif own.turn is not None:
            self._prompts[TURN] = _numbered(TURN, own.turn)
        if isinstance(own, Own) and own.text is not None:
            self._prompts[TEXT] = _numbered(TEXT, own.text)
        self._unanswered: list[Prompt] = []  # user turns without an answer yet
        self._known: set[str] = set()
        self._done: set[tuple[str, int]] = set()
        self._given: dict[str, int] = {}  # by prompt: samples that have not ended
        self._counts = {kind: _Count() for kind in (TURN, ANSWER, TEXT, FILE)}

    def __next__(self) -> Prompt:
        while self._expected(*self._counts) < self.wanted:
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
            self._unanswered.append(_prompt(id_, messages=[{"role": "user", "content": done.text}]))

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
            return self.wanted
        return min(self.wanted, round(self._expected(*self._counts)))

    def _expected(self, *kinds: str) -> float:
        """Estimate the tokens of these kinds, with samples that have not ended.

        A sample counts as at least one token, so that drawing ends even if all samples are empty.
        """
        total = 0.0
        for count in map(self._counts.__getitem__, kinds):
            known = max(count.tokens, count.samples)
            mean = known / count.samples if count.samples else self._likely
            total += known + count.coming * mean
        return total

    def _next(self) -> Prompt | None:
        """Return a prompt of the kind that has the fewest tokens, or an answer to a turn."""
        kinds = {TURN: (TURN, ANSWER)}
        fewest = min(self._prompts, key=lambda kind: self._expected(*kinds.get(kind, (kind,))))
        if fewest == TURN and self._unanswered:
            return self._unanswered.pop()
        return next(self._prompts[fewest], None)


@dataclass(slots=True)
class _Count:
    """Counts of a kind: samples and tokens that have ended, and samples to come."""

    samples: int = 0
    tokens: int = 0
    coming: int = 0


def kind_of(id_: str) -> str:
    """Return the kind of the prompt with this id."""
    return id_.partition("/")[0]


# The parts of a prompt from which its tokens are made
_PARTS = ("text", "messages", "token_ids", "tools", "template_args")


def _prompt(id_: str, place: str = "", **parts: Any) -> Prompt:
    """Make a prompt whose parts are stored in its samples' lines, for training."""
    meta = {name: value for name, value in parts.items() if value is not None}
    parts = {"text": None, "messages": None} | parts
    return Prompt(id=id_, meta=meta, reference=None, place=place or id_, **parts)


def _numbered(kind: str, text: str) -> Iterator[Prompt]:
    return (_prompt(f"{kind}/{number}", text=text) for number in itertools.count())


def _again(prompts: Callable[[], Iterator[Prompt]], passes: int | None) -> Iterator[Prompt]:
    return (
        _prompt(f"{FILE}/{number}/{prompt.id}", **{name: getattr(prompt, name) for name in _PARTS})
        for number in (itertools.count() if passes is None else range(passes))
        for prompt in prompts()
    )


def is_complete(path: Path, results: dict[str, Any]) -> bool:
    """Return whether the file holds all samples of a run with these settings."""
    try:
        manifest = read_manifest(str(path))
    except (OSError, ValueError):
        return False
    return manifest.get("finished") is True and manifest.get("results") == results


def draw(
    drawing: Draw,
    supply: Supply,
    *,
    path: Path,
    results: dict[str, Any],
    screen: Screen,
    line: Callable[[], str] | None = None,
) -> None:
    """Draw the samples of the supply into the file, or what is missing of them.

    Args:
        results: the settings that the samples depend on (io/results.py).
        line: returns a further line of progress. Without it, progress is shown from the first
            round on, and phases before.
    """
    with open_output(str(path), {"results": results}) as writer:
        for note in writer.notes:
            screen.note(note)
        for one in lines_of(path):
            if (one.id, one.sample) in writer.done:
                supply.take(one)
        tries, began = 0, time.monotonic()
        while supply.tokens < ENOUGH * supply.wanted and not supply.exhausted:
            if tries == _TRIES:
                raise MachineError(
                    f"{path}: only {supply.tokens} of {supply.wanted} tokens could be drawn, "
                    "because the target's samples are short; give other `prompts`, or fewer "
                    "`tokens`"
                )
            tries += 1
            try:
                _draw(drawing, supply, writer.write, screen, line)
            finally:
                writer.add_run(time.monotonic() - began, {})
                began = time.monotonic()


def _draw(
    drawing: Draw,
    supply: Supply,
    write: Callable[[Completion], None],
    screen: Screen,
    line: Callable[[], str] | None,
) -> None:
    broken, before, drawn, wanted = 0, supply.tokens, 0, supply.wanted
    with contextlib.ExitStack() as shown:
        step: Callable[[int, int], None] | None = None

        def show(tokens: int = 0) -> None:
            """Show progress, with the tokens of samples that have not ended."""
            nonlocal step, drawn
            drawn += tokens
            if step is None:
                step = shown.enter_context(screen.counting("tokens", wanted, beside=line))
            done = min(max(supply.tokens, before + drawn), wanted)
            step(done, max(supply.total, done))

        if line is not None:
            show()
        for one in drawing(supply, show):
            write(one)
            broken = broken + 1 if one.finish_reason == "error" and not one.is_of_prompt else 0
            if broken == _BROKEN:
                raise MachineError(f"the target's last {_BROKEN} samples all failed: {one.error}")
            supply.take(one)
            show()


def seconds_of(path: Path) -> float | None:
    """Return the seconds that a finished file took, with loading; None if unknown."""
    found = read_manifest(str(path))["totals"]["seconds"]
    return None if found is None else float(found)


def lines_of(path: Path) -> Iterator[Completion]:
    """Yield the complete lines of a sample file. A line cut by a kill is skipped."""
    with path.open("rb") as stream:
        for line in stream:
            try:
                yield Completion(**parse_object(line))
            except (ValueError, TypeError):
                continue


def usable(prompts: Iterator[Prompt], plan: Plan, screen: Screen) -> list[Prompt]:
    """Return the prompts that the target can run; UserError if there are none."""
    builder, found, faults = TaskBuilder.of(plan), list[Prompt](), list[str]()
    for prompt in prompts:
        for name in prompt.settings:
            raise UserError(
                f'{prompt.place}: field "{name}": here all prompts have the same settings; leave '
                "it out"
            )
        try:
            builder.build(prompt, (), now=0.0)
            found.append(prompt)
        except UserError as error:
            faults.append(f"{prompt.place}: {error}")
    if not found:
        raise UserError(faults[0])
    if faults:
        screen.note(f"{len(faults)} prompts cannot be run and are skipped; the first: {faults[0]}")
    return found


def texts_of(path: Path, plan: Plan) -> list[Text]:
    """Return the token ids of every sample behind those of its prompt."""
    builder = TaskBuilder.of(plan)
    prompts: dict[str, list[int]] = {}
    found = []
    for one in lines_of(path):
        if not one.token_ids:
            continue
        if one.id not in prompts:
            parts = {name: one.meta.get(name) for name in _PARTS}
            prompt = _prompt(one.id, f"{path}: {json.dumps(one.id)}", **parts)
            prompts[one.id] = builder.build(prompt, (), now=0.0).tokens
        begin = prompts[one.id]
        found.append(Text(_origin(one.id), [*begin, *one.token_ids], len(begin)))
    return found


def _origin(id_: str) -> str:
    """Return a key shared by a turn and its answers, or by all samples of a file's prompt."""
    kind, _, rest = id_.partition("/")
    if kind == ANSWER:
        return f"{TURN}/{rest.partition('.')[0]}"
    return rest.partition("/")[2] if kind == FILE else id_
