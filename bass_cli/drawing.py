"""Who draws the samples of a command: this process, or a crew of others on Ray. Both know the
models' facts first and give Completions then.

Not here: what is written (generation.py), the library's way in (library.py), the crew (cluster/).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from bass_cli.cluster.rays import Request, cluster_of, crew_on_ray
from bass_cli.config.job import Job
from bass_cli.io.completion import Completion
from bass_cli.io.console import Screen
from bass_cli.io.prompts import Prompt
from bass_cli.io.shards import Shard
from bass_cli.library import generate
from bass_cli.manifest import Facts, facts_of
from bass_cli.model.tokenizer import begin
from bass_cli.system.threads import Company, settle

if TYPE_CHECKING:
    from bass_cli.cluster.crew import Crew
    from bass_cli.engine.contracts import RoundResult
    from bass_cli.engine.loop import Loop
    from bass_cli.plan import Plan


class Drawing(Protocol):
    """Models that were checked, and samples when they are wanted."""

    @property
    def facts(self) -> Facts: ...

    @property
    def line(self) -> Callable[[], str] | None:
        """A line of progress of its own."""

    def draw(
        self, prompts: Iterator[Prompt], done: Collection[tuple[str, int]], count: int | None
    ) -> Iterator[Completion]:
        """Samples 0 to n - 1 of every prompt (`count` of them, if that is known), but those in
        `done`, as they end; the screen is told what is going on."""

    def usage(self) -> dict[str, Any] | None:
        """Where seconds went, if that is not what the screen was told."""


class Here:
    """This process draws. `loop`: what to draw with instead of a new one, made when it is
    needed."""

    line = None

    def __init__(
        self, plan: Plan, facts: Facts, screen: Screen, loop: Callable[[], Loop] | None = None
    ):
        self.facts, self._plan, self._screen, self._loop = facts, plan, screen, loop

    def draw(
        self, prompts: Iterator[Prompt], done: Collection[tuple[str, int]], count: int | None
    ) -> Iterator[Completion]:
        company, screen = Company(self._plan.job.threads), self._screen

        def on_round(done: RoundResult) -> None:
            company.look()
            kept, rows = sum(done.accepted), len(done.accepted)
            capacity = done.capacity or self.facts.rows
            screen.round(done.width, kept, rows, done.seconds, done.capturing, capacity)

        return generate(
            prompts,
            self._plan,
            done=set(done),
            count=count,
            on_round=on_round,
            on_phase=screen.phase,
            on_bytes=screen.bytes_read,
            on_note=screen.note,
            loop=None if self._loop is None else self._loop(),
        )

    def usage(self) -> None:
        return None


class Elsewhere:
    """A crew draws."""

    def __init__(self, crew: Crew):
        self._crew, self.facts = crew, crew.gather()
        self.line, self.usage = crew.line, crew.usage

    def draw(
        self, prompts: Iterator[Prompt], done: Collection[tuple[str, int]], count: int | None
    ) -> Iterator[Completion]:
        return self._crew.draw(prompts, done, count)


@contextlib.contextmanager
def drawing_of(
    job: Job,
    screen: Screen,
    request: Request | None,
    *,
    source: Mapping[str, Any],
    longest: str,
    prompts: int | None,
    shard: Shard | None = None,
) -> Iterator[Drawing]:
    """Whoever the request asks to draw, this process where there is none, with the job's models
    checked. `source`: what identifies the prompts; `longest`: the text of the longest;
    `prompts`: how many there are, None where nobody knows."""
    if request is not None:
        with (
            cluster_of(request, job, screen) as cluster,
            crew_on_ray(
                cluster, screen, source=source, prompts=prompts, longest=longest, shard=shard
            ) as crew,
        ):
            yield Elsewhere(crew)
        return
    tokenizer = begin(job.pair)  # while torch is loaded
    settle(job.threads, screen.note)
    from bass_cli.plan import make_plan

    screen.phase("checking the models", live=False)  # the hub's client shows what it fetches
    plan = make_plan(job, longest_prompt=longest, prompts=prompts, tokenizer=tokenizer)
    yield Here(plan, facts_of(plan, source, shard=shard), screen)
