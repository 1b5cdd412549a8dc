"""Simulate a job on many GPUs with the driver's own code (cluster/worker_pool.py), a fake clock
and actors that only take time.

    python benchmarks/scale.py [--gpus 1,8,100,1000] [--turns 8] [--measure] [--json]

An actor holds --rows samples of lognormal lengths, and each token of a row takes --token seconds.
The driver's operations take their measured times (--measure repeats this: writing a line, an
exchange with an actor of a real local Ray, processing a sample). Cases: all actors alike; one GPU
in ten at half speed; each actor killed every --lifetime seconds on average, and back after
--loading; few prompts of many samples. Prints, for each: the time over that of GPUs that never
wait, the load of the driver, and the share of work that was lost.
"""

import argparse
import heapq
import json
import math
import os
import random
import tempfile
import time
import zlib
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from bass_cli.cluster.fleet import Lost, Place
from bass_cli.cluster.worker import Ready, Report
from bass_cli.cluster.worker_pool import WorkerPool
from bass_cli.io.console import Screen
from bass_cli.io.prompts import Prompt
from bass_cli.io.results import Completion, open_output
from bass_cli.run.manifest import Facts

# seconds of a core, by --measure on two cores of a server of 2026: a line that is written; an
# exchange, its messages of some samples both ways; a sample's way through messages and pool
COSTS = {"line": 62e-6, "exchange": 1.0e-3, "sample": 36e-6}
MEAN, SPREAD = 300, 0.6  # mean tokens of a sample, and the standard deviation of their logarithm
TEXT = "    return sum(value for value in values)\n" * 30  # as long as 300 tokens of code
CHANCE = random.Random(0)
LENGTHS = [
    min(CHANCE.lognormvariate(math.log(MEAN) - SPREAD**2 / 2, SPREAD), 1024) for _ in range(1 << 16)
]
USAGE = {"phases": {}, "rounds": 0, "rows": 0, "rows_busy": None}


@dataclass
class Actor:
    """When its rows finish, which samples wait for a row, and since when it exists."""

    ready: float
    speed: float
    dies: float
    announced: bool = False  # whether its ready message was sent
    running: list = field(default_factory=list)
    waiting: deque = field(default_factory=deque)


class Fleet:
    """Actors on a fake clock, as a WorkerPool sees them."""

    def __init__(self, options, gpus, *, slow=0.0, lifetime=math.inf, costs=COSTS):
        self.now, self.driver, self.vain, self.work, self.last = 0.0, 0.0, 0.0, 0.0, 0.0
        self._options, self._lifetime, self._costs = options, lifetime, costs
        self._chance, self._actors, self._events = random.Random(0), {}, []
        self._places = {Place(None, number) for number in range(gpus)}
        self.speeds = {p: 0.5 if p.number < slow * gpus else 1.0 for p in self._places}
        self._facts = Facts({"results": {}}, options.rows, (), False)
        self._number = 0

    def places(self):
        return self._places

    def start(self, place):
        """Start an actor. The first loading does not count; a restart takes time."""
        ready = self.now + (self._options.loading if self.now > 1.0 else 0.0)
        dies = ready - math.log(self._chance.uniform(1e-9, 1.0)) * self._lifetime
        self._actors[place] = Actor(ready, self.speeds[place], dies)
        self._push(ready, place)

    def ask(self, place, parts, beat):
        actor = self._actors[place]
        actor.waiting += [(part.prompt.id, sample) for part in parts for sample in part.samples]
        self._fill(actor, self.now)
        self._charge(self._costs["exchange"])
        self._push(min(self.now + beat, actor.dies), place)

    def stop(self, place):
        self._actors.pop(place, None)

    def wait(self, timeout):
        if not self._events or self._events[0][0] > self.now + timeout:
            self.now += timeout
            return []
        self.now, found = max(self.now, self._events[0][0]), []
        while self._events and self._events[0][0] <= self.now:
            _, _, place, actor = heapq.heappop(self._events)
            if self._actors.get(place) is actor:
                found.append((place, self._answer(place, actor)))
        return found

    def _answer(self, place, actor):
        if self.now >= actor.dies:
            self.vain += sum(self.now - began for _, _, began, _ in actor.running) * actor.speed
            return Lost("killed")
        if not actor.announced:
            actor.announced = True
            return Ready(f"node{place.number // 8}", 1, self._facts)
        done = []
        while actor.running and actor.running[0][0] <= self.now:
            end, _, _, (id_, sample) = heapq.heappop(actor.running)
            done.append(completion(id_, sample))
            self._fill(actor, end)
            self.last = max(self.last, end)
        self._charge(len(done) * (self._costs["line"] + self._costs["sample"]))
        return Report(tuple(done), (), None, self._options.rows, len(actor.running), 0, 0, 0, USAGE)

    def _fill(self, actor, when):
        while actor.waiting and len(actor.running) < self._options.rows:
            key = actor.waiting.popleft()
            took = self._options.token * length(key) / actor.speed
            self._number += 1
            heapq.heappush(actor.running, (when + took, self._number, when, key))

    def _charge(self, seconds):
        self.now += seconds
        self.driver += seconds

    def _push(self, when, place):
        self._number += 1
        heapq.heappush(self._events, (when, self._number, place, self._actors[place]))


def completion(id_, sample=0):
    return Completion(id_, sample, TEXT, "eos", MEAN, -0.2, -60.0, 1.0, 90, 400, 210, 0, 140)


def length(key):
    """Return the tokens of a sample; they depend on its seed."""
    return LENGTHS[zlib.crc32(repr(key).encode()) % len(LENGTHS)]


def simulate(options, gpus, n, **given):
    """Simulate one job; return its figures."""
    fleet = Fleet(options, gpus, **given)
    count = max(round(gpus * options.rows * options.turns / n), 1)
    keys = ((f"{i}", s) for i in range(count) for s in range(n))
    work = sum(map(length, keys)) * options.token  # seconds of a row at full speed
    prompts = (Prompt(f"{i}", "x", None, {}, None, "x:1") for i in range(count))
    workers = WorkerPool(fleet, Screen(quiet=True), n=n, alike=False, now=lambda: fleet.now)
    workers.gather()
    began, found = fleet.now, sum(1 for _ in workers.draw(prompts, (), count))
    assert found == count * n
    seconds, best = fleet.now - began, work / options.rows / sum(fleet.speeds.values())
    return {
        "gpus": gpus,
        "samples": found,
        "seconds": round(seconds, 1),
        "of the best": round(best / seconds, 3),
        "driver busy": round(fleet.driver / seconds, 3),
        "lines/s": round(found / seconds),
        "in vain": round(fleet.vain / work, 4),
    }


def measure():
    """Measure COSTS on this machine, in seconds of a core, and the bytes of a line."""
    import ray

    some = [completion(f"p{i}") for i in range(5000)]
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "lines.jsonl"
        with open_output(str(path), {"results": {}}) as writer:
            began = time.process_time()
            for one in some:
                writer.write(one)
            line = (time.process_time() - began) / len(some)
        size = path.stat().st_size / len(some)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    echo = ray.remote(Echo).remote()
    seconds = {}
    for number in (1, 21):
        ray.get(echo.exchange.remote(some[:number]))
        began, wall = time.process_time(), time.perf_counter()
        for _ in range(300):
            (ready,), _ = ray.wait([echo.exchange.remote(some[:number])])
            ray.get(ready)
        seconds[number] = (time.process_time() - began) / 300
        if number == 1:
            trip = (time.perf_counter() - wall) / 300
    ray.shutdown()
    each = (seconds[21] - seconds[1]) / 20
    return {
        "line": line,
        "exchange": seconds[1] - each,
        "sample": each,
        "round trip": trip,
        "bytes a line": size,
    }


class Echo:
    """An actor that returns its argument."""

    def exchange(self, completions):
        return completions


def main():
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--gpus", default="1,8,100,1000")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--turns", type=float, default=8.0)
    parser.add_argument("--token", type=float, default=0.0065)
    parser.add_argument("--lifetime", type=float, default=600.0)
    parser.add_argument("--loading", type=float, default=40.0)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps({name: float(f"{value:.3g}") for name, value in measure().items()}))
        return
    cases = {
        "alike": (8, {}),
        "one in ten at half speed": (8, {"slow": 0.1}),
        "killed": (8, {"lifetime": options.lifetime}),
        "200 samples a prompt": (200, {}),
    }
    for name, (n, given) in cases.items():
        for gpus in map(int, options.gpus.split(",")):
            figures = simulate(options, gpus, n, **given)
            shown = ", ".join(f"{key} {value}" for key, value in figures.items())
            line = json.dumps({"case": name} | figures) if options.json else f"{name}: {shown}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
