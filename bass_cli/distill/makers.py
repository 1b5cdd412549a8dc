"""Who draws the samples and trains: this process, or actors on Ray. Files, and what they depend on,
are the same.

Not here: what comes before and after (command.py).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

from bass_cli.cluster.rays import Cluster, Request, address_here, cluster_of, crew_on_ray
from bass_cli.cluster.worker_pool import WorkerPool
from bass_cli.config.args import DistillArgs
from bass_cli.config.job import Job, Pair
from bass_cli.distill.group import Group
from bass_cli.distill.prompts import Supply
from bass_cli.distill.rank import JobSpec, Rank
from bass_cli.distill.sampling import OwnHand, draw
from bass_cli.distill.settings import Training, check_memory
from bass_cli.distill.student import Source
from bass_cli.distill.trainer import SECONDS
from bass_cli.distill.work import Places, Work
from bass_cli.errors import UserError
from bass_cli.io.completion import Completion
from bass_cli.io.console import Screen
from bass_cli.run.plan import Plan, make_plan, plan_of_others
from bass_cli.system.host import give_back_memory
from bass_cli.system.threads import configure_threads


class SampleBackend(Protocol):
    """Whoever makes a draft. `plan`: of the job that draws the samples."""

    plan: Plan

    def check(self, source: Source, training: Training) -> None:
        """MachineError where there is too little memory."""

    def draw(self, supply: Supply, results: dict[str, Any], places: Places) -> None:
        """What is missing of the samples, which depend on `results`."""

    def train(self, source: Source, training: Training, places: Places) -> dict[str, Any]:
        """What is left to do from samples to the draft's folder; returns the report."""


class LocalBackend:
    """This process."""

    def __init__(self, job: Job, screen: Screen):
        self._screen = screen
        configure_threads(job.threads, screen.note)
        screen.phase("checking the models", live=False)  # the hub's client shows what it fetches
        self.plan = make_plan(job)

    def check(self, source: Source, training: Training) -> None:
        check_memory(self.plan, source, training)

    def draw(self, supply: Supply, results: dict[str, Any], places: Places) -> None:
        hand, screen = OwnHand(self.plan, self._screen), self._screen
        draw(hand, supply, wanted=results["tokens"], path=places.samples, results=results,
             screen=screen)  # fmt: skip
        give_back_memory(self.plan.device)

    def train(self, source: Source, training: Training, places: Places) -> dict[str, Any]:
        work = Work(self.plan, source, training, places, self._screen, every=SECONDS)
        document = work.run()
        work.write()
        return document


class RemoteBackend:
    """Actors; this process looks at files alone."""

    def __init__(self, args: DistillArgs, pair: Pair, cluster: Cluster, screen: Screen):
        self._args, self._pair, self._cluster, self._screen = args, pair, cluster, screen
        screen.phase("checking the models", live=False)
        self.plan = plan_of_others(cluster.rooms.job)

    def check(self, source: Source, training: Training) -> None:
        pass  # each of them does, where it is

    def draw(self, supply: Supply, results: dict[str, Any], places: Places) -> None:
        screen = self._screen
        names = [name for name in ("prompts", "prompt_column") if name in results]
        source: dict[str, Any] = {name: results[name] for name in names}
        with crew_on_ray(self._cluster, screen, source=source) as crew:
            facts = crew.gather()
            for note in facts.notes:
                screen.note(note)
            found = json.loads(json.dumps(facts.manifest["results"], default=str))
            bad = [key for key, value in found.items() if results.get(key) != value]
            if bad:
                raise UserError(
                    f"actors would draw other samples ({bad[0]}: {found[bad[0]]!r} there, "
                    f"{results.get(bad[0])!r} here); models and versions have to be the same"
                )
            draw(_CrewsHand(crew), supply, wanted=results["tokens"], path=places.samples,
                 results=results, screen=screen)  # fmt: skip

    def train(self, source: Source, training: Training, places: Places) -> dict[str, Any]:
        order = JobSpec(
            replace(self._args, out=os.path.abspath(places.folder)),
            self._pair,
            self._cluster.rooms.job,
            os.getcwd(),
            places.samples.stat().st_size,
            SECONDS,
            address_here,
        )
        with self._cluster.fleet(Rank, order) as fleet:
            return Group(fleet, self._screen, places.checkpoint).run()


class _CrewsHand:
    def __init__(self, crew: WorkerPool):
        self._crew, self.line = crew, crew.line

    def samples(self, supply: Supply, on_tokens: Callable[[int], None]) -> Iterator[Completion]:
        return self._crew.draw(supply, supply.done, None)


@contextlib.contextmanager
def makers_of(
    args: DistillArgs, pair: Pair, job: Job, request: Request | None, screen: Screen
) -> Iterator[SampleBackend]:
    """Whoever the request asks; this process where there is none."""
    if request is None:
        yield LocalBackend(job, screen)
        return
    with cluster_of(request, job, screen) as cluster:
        yield RemoteBackend(args, pair, cluster, screen)
