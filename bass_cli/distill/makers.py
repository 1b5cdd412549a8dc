"""Draw samples and train, in this process or with actors on Ray.

The files and the settings that they depend on are the same for both. command.py is the caller.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

from bass_cli.cluster.rays import Cluster, Request, cluster_of, workers_on_ray
from bass_cli.cluster.worker_pool import WorkerPool
from bass_cli.config.args import DistillArgs
from bass_cli.config.job import Job, Pair
from bass_cli.distill.group import Group, Rank, TrainingSpec
from bass_cli.distill.prompts import Supply
from bass_cli.distill.sampling import LocalSampler, draw
from bass_cli.distill.settings import Training, check_memory
from bass_cli.distill.student import Source
from bass_cli.distill.trainer import SECONDS
from bass_cli.distill.work import Places, Work
from bass_cli.errors import UserError
from bass_cli.io.console import Screen
from bass_cli.io.results import Completion
from bass_cli.run.plan import Plan, make_plan, plan_of_others
from bass_cli.system.host import give_back_memory
from bass_cli.system.threads import configure_threads


class SampleBackend(Protocol):
    """Draws the samples and trains the draft. `plan`: of the job that draws the samples."""

    plan: Plan

    def check(self, source: Source, training: Training) -> None:
        """Raise MachineError if there is too little memory for the training."""

    def draw(self, supply: Supply, results: dict[str, Any], places: Places) -> None:
        """Draw the samples that are missing. `results`: the settings that they depend on."""

    def train(self, source: Source, training: Training, places: Places) -> dict[str, Any]:
        """Train on the samples and write the draft's folder; return the report."""


class LocalBackend:
    """Draws and trains in this process."""

    def __init__(self, job: Job, screen: Screen):
        self._screen = screen
        configure_threads(job.threads, screen.note)
        screen.phase("checking the models", live=False)  # the hub's client shows what it fetches
        self.plan = make_plan(job)

    def check(self, source: Source, training: Training) -> None:
        check_memory(self.plan, source, training)

    def draw(self, supply: Supply, results: dict[str, Any], places: Places) -> None:
        sampler, screen = LocalSampler(self.plan, self._screen), self._screen
        draw(sampler, supply, wanted=results["tokens"], path=places.samples, results=results,
             screen=screen)  # fmt: skip
        give_back_memory(self.plan.device)

    def train(self, source: Source, training: Training, places: Places) -> dict[str, Any]:
        work = Work(self.plan, source, training, places, self._screen, every=SECONDS)
        document = work.run()
        work.write()
        return document


class RemoteBackend:
    """Draws and trains with actors; this process loads no weights."""

    def __init__(self, args: DistillArgs, pair: Pair, cluster: Cluster, screen: Screen):
        self._args, self._pair, self._cluster, self._screen = args, pair, cluster, screen
        screen.phase("checking the models", live=False)
        self.plan = plan_of_others(cluster.rooms.job)

    def check(self, source: Source, training: Training) -> None:
        pass  # each actor checks its own device

    def draw(self, supply: Supply, results: dict[str, Any], places: Places) -> None:
        screen = self._screen
        names = [name for name in ("prompts", "prompt_column") if name in results]
        source: dict[str, Any] = {name: results[name] for name in names}
        with workers_on_ray(self._cluster, screen, source=source) as workers:
            facts = workers.gather()
            for note in facts.notes:
                screen.note(note)
            found = json.loads(json.dumps(facts.manifest["results"], default=str))
            differing = [key for key, value in found.items() if results.get(key) != value]
            if differing:
                key = differing[0]
                raise UserError(
                    f"the actors would draw other samples ({key}: {found[key]!r} there, "
                    f"{results.get(key)!r} here); install the same models and versions on all nodes"
                )
            draw(PoolSampler(workers), supply, wanted=results["tokens"], path=places.samples,
                 results=results, screen=screen)  # fmt: skip

    def train(self, source: Source, training: Training, places: Places) -> dict[str, Any]:
        spec = TrainingSpec(
            replace(self._args, out=os.path.abspath(places.folder)),
            self._pair,
            self._cluster.rooms.job,
            os.getcwd(),
            places.samples.stat().st_size,
            SECONDS,
        )
        with self._cluster.fleet(Rank, spec) as fleet:
            return Group(fleet, self._screen, places.checkpoint).run()


class PoolSampler:
    """Draws with a pool of workers."""

    def __init__(self, workers: WorkerPool):
        self._workers, self.line = workers, workers.line

    def samples(self, supply: Supply, on_tokens: Callable[[int], None]) -> Iterator[Completion]:
        return self._workers.draw(supply, supply.done, None)


@contextlib.contextmanager
def makers_of(
    args: DistillArgs, pair: Pair, job: Job, request: Request | None, screen: Screen
) -> Iterator[SampleBackend]:
    """Yield the backend for the request; None means this process."""
    if request is None:
        yield LocalBackend(job, screen)
        return
    with cluster_of(request, job, screen) as cluster:
        yield RemoteBackend(args, pair, cluster, screen)
