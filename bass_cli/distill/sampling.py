"""Draw the target's samples into a file, and read them back.

The samples are drawn by the engine of `bass generate`; an interrupted run resumes. prompts.py
supplies the prompts; corpus.py makes training windows of the texts.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from bass_cli.distill.corpus import Text
from bass_cli.distill.prompts import ANSWER, FILE, TURN, Supply
from bass_cli.errors import MachineError, UserError
from bass_cli.io.console import Screen
from bass_cli.io.prompts import Prompt
from bass_cli.io.reading import parse_object
from bass_cli.io.results import Completion, open_output
from bass_cli.io.resume import read_manifest
from bass_cli.run.generate import generate
from bass_cli.run.plan import Plan
from bass_cli.run.scheduler import RequestReader

ENOUGH = 0.98  # share of the wanted tokens; the lengths of samples are only estimated
_TRIES = 4  # attempts to draw enough tokens, if samples turn out shorter than expected
# consecutive failed samples that end the run; single ones may fail on logits that are not finite
_BROKEN = 64


def is_complete(path: Path, results: dict[str, Any]) -> bool:
    """Return whether the file holds all samples of a run with these settings."""
    try:
        manifest = read_manifest(str(path))
    except (OSError, ValueError):
        return False
    return manifest.get("finished") is True and manifest.get("results") == results


class Sampler(Protocol):
    """Draws samples: this process, or a pool of workers."""

    @property
    def line(self) -> Callable[[], str] | None:
        """A further line of progress, or None."""

    def samples(self, supply: Supply, on_tokens: Callable[[int], None]) -> Iterator[Completion]:
        """Yield missing samples as they end. `on_tokens` gets the tokens of each local round."""


class LocalSampler:
    """Draws in this process."""

    line = None

    def __init__(self, plan: Plan, screen: Screen):
        self._plan, self._screen = plan, screen

    def samples(self, supply: Supply, on_tokens: Callable[[int], None]) -> Iterator[Completion]:
        return generate(
            supply,
            self._plan,
            done=supply.done,
            on_round=lambda done: on_tokens(len(done.accepted) + sum(done.accepted)),
            on_phase=self._screen.phase,
            on_bytes=self._screen.bytes_read,
            on_note=self._screen.note,
        )


def draw(
    sampler: Sampler,
    supply: Supply,
    *,
    wanted: int,
    path: Path,
    results: dict[str, Any],
    screen: Screen,
) -> None:
    """Draw samples of about `wanted` tokens into the file, or what is missing of them.

    results: the settings that the samples depend on (io/results.py).
    """
    with open_output(str(path), {"results": results}) as writer:
        for note in writer.notes:
            screen.note(note)
        for one in lines_of(path):
            if (one.id, one.sample) in writer.done:
                supply.take(one)
        tries, began = 0, time.monotonic()
        while supply.tokens < ENOUGH * wanted and not supply.exhausted:
            if tries == _TRIES:
                raise MachineError(
                    f"{path}: only {supply.tokens} of {wanted} tokens could be drawn, because the "
                    "target's samples are short; give other --prompts, or fewer --tokens"
                )
            tries += 1
            try:
                _draw(sampler, supply, wanted, writer.write, screen)
            finally:
                writer.add_run(time.monotonic() - began, {})
                began = time.monotonic()


def _draw(
    sampler: Sampler,
    supply: Supply,
    wanted: int,
    write: Callable[[Completion], None],
    screen: Screen,
) -> None:
    broken, before, drawn = 0, supply.tokens, 0
    with contextlib.ExitStack() as shown:
        step: Callable[[int, int], None] | None = None

        def show(tokens: int = 0) -> None:
            """Show progress, with the tokens of samples that have not ended."""
            nonlocal step, drawn
            drawn += tokens
            if step is None:
                counting = screen.counting("tokens", wanted, beside=sampler.line)
                step = shown.enter_context(counting)
            done = min(max(supply.tokens, before + drawn), wanted)
            step(done, max(supply.total, done))

        # A local sampler shows loading as a phase until its first round; workers have a line.
        if sampler.line is not None:
            show()
        for one in sampler.samples(supply, show):
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
    reader = RequestReader(plan.job, plan.files.tokenizer, context=plan.files.target.spec.context)
    found, faults = list[Prompt](), list[str]()
    for prompt in prompts:
        try:
            reader.take(prompt, (), now=0.0)
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
    reader = RequestReader(plan.job, plan.files.tokenizer, context=plan.files.target.spec.context)
    prompts: dict[str, list[int]] = {}
    found = []
    for one in lines_of(path):
        if not one.token_ids:
            continue
        if one.id not in prompts:
            text, messages = one.meta.get("text"), one.meta.get("messages")
            prompt = Prompt(one.id, text, messages, {}, None, f"{path}: {json.dumps(one.id)}")
            prompts[one.id] = reader.take(prompt, (), now=0.0).tokens
        begin = prompts[one.id]
        found.append(Text(_origin(one.id), [*begin, *one.token_ids], len(begin)))
    return found


def _origin(id_: str) -> str:
    """Return a key shared by a turn and its answers, or by all samples of a file's prompt."""
    kind, _, rest = id_.partition("/")
    if kind == ANSWER:
        return f"{TURN}/{rest.partition('.')[0]}"
    return rest.partition("/")[2] if kind == FILE else id_
