"""A stand-in for the engine: deterministic samples at once, so that tests of the command line
take seconds."""

from __future__ import annotations

import os
import sys
import time
import types
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import bass_cli.run
from bass_cli.errors import MachineError, UserError
from bass_cli.io.results import Completion

RoundResult = namedtuple(
    "Round", "num_drafts accepted seconds capturing capacity waiting plain refills"
)
loaded: list[Any] = []


def make_plan(job: Any, **_: Any) -> Any:
    """A plan as the real one gives it; some targets are wrong in ways that it would find."""
    if "missing" in job.pair.target:
        raise UserError(f"{job.pair.target}: there is no such model file")
    if "huge" in job.pair.target:
        raise MachineError("the model does not fit into memory")
    identity = {
        "target": job.pair.target,
        "device": "cpu",
        "dtype": "fp32",
        "versions": {"bass": "0"},
    }
    return types.SimpleNamespace(
        job=job,
        identity=lambda: dict(identity),
        origin={"revision": "files:1"},
        notes=(),
        surface=None,
        tags=None,
        files=types.SimpleNamespace(
            draft=None,
            tokenizer=types.SimpleNamespace(has_chat_template="chatty" in job.pair.target),
        ),
        rows=2 if job.batch_size == "auto" else job.batch_size,
    )


def run_stand_in(
    plan: Any,
    prompts: Iterator[Any],
    *,
    done: Any = (),
    count: int | None = None,
    on_round: Any = None,
    on_phase: Any = None,
    on_bytes: Any = None,
    on_note: Any = None,
    loop: Any = None,
) -> Iterator[Completion]:
    """One sample after the other, its text fixed by the seed; FAIL and SLOW in a prompt do as
    they say."""
    loaded.append(plan.job)
    seed = plan.job.sampling.seed
    for prompt in prompts:
        if prompt.text == "FAIL":
            yield Completion.failed(prompt.id, "too long", seed=seed, meta=prompt.meta)
            continue
        for number in (number for number in range(plan.job.n) if (prompt.id, number) not in done):
            time.sleep(float(os.environ.get("STAND_IN_DELAY", "0")))
            on_round(RoundResult((4, 4), (2, 1), 0.01, 0.0, 2, 0.0, 0.0, False))
            reason = "budget" if prompt.text == "SLOW" else "eos"
            text = f"{prompt.text}/{number}/{seed}"
            yield Completion(
                prompt.id, number, text, reason, 3, -0.5, -1.5, 0.0, 1, 4, 2, seed, 5, prompt.meta
            )


class Engine:
    """Draws with the stand-in."""

    def __init__(self, plan: Any, **named: Any):
        named.pop("lazy")
        self._plan, self._named = plan, named

    def draw(self, prompts: Iterator[Any], done: Any, count: Any) -> Iterator[Completion]:
        return run_stand_in(self._plan, prompts, done=done, count=count, **self._named)


def install() -> None:
    """Put the stand-in where cli/commands.py looks for plan and run."""
    plan, run = types.ModuleType("bass_cli.run.plan"), types.ModuleType("bass_cli.run.engine")
    plan.make_plan, run.Engine = make_plan, Engine  # type: ignore[attr-defined]
    sys.modules |= {"bass_cli.run.plan": plan, "bass_cli.run.engine": run}
    bass_cli.run.plan, bass_cli.run.engine = plan, run  # type: ignore[attr-defined]
