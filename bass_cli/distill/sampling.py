"""The target's own samples, drawn by the same engine as everybody's into a file that a killed run
goes on with, and read from there.

Not here: prompts (prompts.py), what training makes of texts (corpus.py).
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
from bass_cli.io.completion import Completion
from bass_cli.io.console import Screen
from bass_cli.io.prompts import Prompt
from bass_cli.io.reading import parse_object
from bass_cli.io.results import open_output
from bass_cli.io.resume import read_manifest
from bass_cli.run.generate import generate
from bass_cli.run.plan import Plan
from bass_cli.run.scheduler import RequestReader

ENOUGH = 0.98  # of the tokens that were asked for: how long samples get is only expected
_TRIES = 4  # passes over the prompts until there are enough, where samples got shorter on the way
# Samples one after the other that met logits which are not finite: a target may do so now and then.
_BROKEN = 64


def is_complete(path: Path, results: dict[str, Any]) -> bool:
    """Whether a run with these settings has drawn all that it was to."""
    try:
        manifest = read_manifest(str(path))
    except (OSError, ValueError):
        return False
    return manifest.get("finished") is True and manifest.get("results") == results


class Hand(Protocol):
    """Who draws: this process, or a crew of others."""

    @property
    def line(self) -> Callable[[], str] | None:
        """A line of progress of its own."""

    def samples(self, supply: Supply, on_tokens: Callable[[int], None]) -> Iterator[Completion]:
        """Yield the samples that are missing, as they end; `on_tokens` gets the number of tokens
        of each round of this process."""


class OwnHand:
    """This process."""

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
    hand: Hand, supply: Supply, *, wanted: int, path: Path, results: dict[str, Any], screen: Screen
) -> None:
    """Samples of about `wanted` tokens in the file, which goes on where it was; `results` is what
    they depend on (io/results.py)."""
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
                    f"{path}: {supply.tokens} tokens were drawn, not {wanted}: the target's "
                    "samples are too short; give other --prompts, or fewer --tokens"
                )
            tries += 1
            try:
                _draw(hand, supply, wanted, writer.write, screen)
            finally:
                writer.add_run(time.monotonic() - began, {})
                began = time.monotonic()


def _draw(
    hand: Hand, supply: Supply, wanted: int, write: Callable[[Completion], None], screen: Screen
) -> None:
    broken, before, drawn = 0, supply.tokens, 0
    with contextlib.ExitStack() as shown:
        step: Callable[[int, int], None] | None = None

        def show(tokens: int = 0) -> None:
            """Count tokens of live rows too: a sample may take minutes to end."""
            nonlocal step, drawn
            drawn += tokens
            if step is None:
                counting = screen.counting("tokens", wanted, beside=hand.line)
                step = shown.enter_context(counting)
            done = min(max(supply.tokens, before + drawn), wanted)
            step(done, max(supply.total, done))

        # This process shows loading as a phase, until the first round; others have a line.
        if hand.line is not None:
            show()
        for one in hand.samples(supply, show):
            write(one)
            broken = broken + 1 if one.finish_reason == "error" and not one.is_of_prompt else 0
            if broken == _BROKEN:
                raise MachineError(
                    f"none of the target's last {_BROKEN} samples is sound: {one.error}"
                )
            supply.take(one)
            show()


def seconds_of(path: Path) -> float | None:
    """How long a finished file's samples took, loading included; None where nobody knows."""
    found = read_manifest(str(path))["totals"]["seconds"]
    return None if found is None else float(found)


def lines_of(path: Path) -> Iterator[Completion]:
    """The whole lines of a file of samples; what a kill tore is left out."""
    with path.open("rb") as stream:
        for line in stream:
            try:
                yield Completion(**parse_object(line))
            except (ValueError, TypeError):
                continue


def usable(prompts: Iterator[Prompt], plan: Plan, screen: Screen) -> list[Prompt]:
    """Those of a file that the target can run; UserError if it can run none."""
    intake = RequestReader(plan.job, plan.files.tokenizer, context=plan.files.target.spec.context)
    found, faults = list[Prompt](), list[str]()
    for prompt in prompts:
        try:
            intake.take(prompt, (), now=0.0)
            found.append(prompt)
        except UserError as error:
            faults.append(f"{prompt.place}: {error}")
    if not found:
        raise UserError(faults[0])
    if faults:
        screen.note(f"{len(faults)} prompts cannot be run and are left out; first {faults[0]}")
    return found


def texts_of(path: Path, plan: Plan) -> list[Text]:
    """Every sample with its prompt before it, as the target saw them."""
    intake = RequestReader(plan.job, plan.files.tokenizer, context=plan.files.target.spec.context)
    prompts: dict[str, list[int]] = {}
    found = []
    for one in lines_of(path):
        if not one.token_ids:
            continue
        if one.id not in prompts:
            text, messages = one.meta.get("text"), one.meta.get("messages")
            prompt = Prompt(one.id, text, messages, {}, None, f"{path}: {json.dumps(one.id)}")
            prompts[one.id] = intake.take(prompt, (), now=0.0).tokens
        begin = prompts[one.id]
        found.append(Text(_origin(one.id), [*begin, *one.token_ids], len(begin)))
    return found


def _origin(id_: str) -> str:
    """What samples that tell of each other have in common: an answer its turn, those of a file's
    prompt all."""
    kind, _, rest = id_.partition("/")
    if kind == ANSWER:
        return f"{TURN}/{rest.partition('.')[0]}"
    return rest.partition("/")[2] if kind == FILE else id_
