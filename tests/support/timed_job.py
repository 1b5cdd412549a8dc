"""A job of prompts with a wall-clock budget on a device of the 1.5B's costs: the real conductor,
loop, ladder, warm-up and controllers on a fake clock, chance in place of tensors. No tests."""

import random
from types import SimpleNamespace

import torch
from fakes import FakeGraphs, Ticks
from simulated import Simulated
from test_scheduler import Letters, job, prompts

from bass_cli.build import warm_up
from bass_cli.conductor import Conductor
from bass_cli.config.job import Job, Pair, Speculation
from bass_cli.drafting.factory import NoDrafter
from bass_cli.lengths.controllers import Fixed
from bass_cli.lengths.goodput import Goodput

BLOCK = (0.85, 0.79, 0.81, 0.815, 0.83, 0.82, 0.85, 0.80)  # by place: drafts of one pass on code
CHAIN = (0.93,) * 64  # token by token
END = 9  # the token that ends a sample


class Drafter(NoDrafter):
    """Knows each row's tokens up to where it has drafted, as drafting/parallel.py does, or with
    `at_once` False drafting/model_drafter.py."""

    def __init__(self, ticks, longest):
        self._ticks, self.longest, self._missed = ticks, longest, 0

    def open(self, key, tokens, reference=(), in_time=None):
        self._missed = 0
        return _read(self._ticks, 0.0015, tokens, in_time)

    def expect(self, batch, length):
        missed, self._missed = self._missed, 0 if length else self._missed + 1
        return missed if missed > self._spared(length) and length else 0

    def catch_up(self, batch, behind, count):
        pass

    def prepare_prompts(self):
        pass

    def _spared(self, length):
        return 0

    def reaches(self, before, length):
        return not length or before > 0


class AtOnce(Drafter):
    at_once = True

    def _spared(self, length):
        return length

    def reaches(self, before, length):
        return not length or 0 < before <= length


class Reader(NoDrafter):
    """The target, which takes 3 ms for a prompt."""

    def __init__(self, ticks):
        self._ticks = ticks

    def open(self, key, tokens, in_time=None):
        return _read(self._ticks, 0.003, tokens, in_time)


def _read(ticks, seconds, tokens, in_time):
    if in_time is not None and not in_time(len(tokens)):
        return False
    ticks.seconds += seconds
    return True


class Costs(FakeGraphs):
    """An H200's: 1.8 ms a plain round, the draft's pass 1.5 ms or 0.96 token by token."""

    def __init__(self, ticks, seed):
        super().__init__(ticks)
        self._noise = random.Random(seed)

    def pass_seconds(self, key):
        draft = {
            "round": 0.96 * key.width,
            "block": 1.5 + 0.015 * key.width,
            "catch up": 1.0,
        }[key.kind]
        target = 0.0 if key.kind == "catch up" else 1.77 + 0.0083 * key.rows * (key.width + 1)
        if key.kind != "catch up":
            target += 0.0012 * key.rows * 0
        return (draft + target) / 1e3 * self._noise.uniform(0.99, 1.02)


class Hosted:
    """A host that takes `host` seconds for each round that it has looked at."""

    def observe(self, done):
        self.ticks.seconds += self.host
        self.rounds.append(done)
        super().observe(done)


class HostedFixed(Hosted, Fixed):
    pass


class HostedGoodput(Hosted, Goodput):
    pass


class Timed(Simulated):
    """Drafts stand by their place with `chances`, a bit more or less in each prompt; samples end
    after so many tokens as their number says, whatever the round."""

    def __init__(self, lengths, chances, *, rows, drafter, graphs, spread, seed):
        super().__init__(lengths, 0.0, rows=rows, drafter=drafter, graphs=graphs)
        self.target.__class__ = Reader
        self.target._ticks = graphs.ticks
        self._chances, self._spread, self._seed, self._true = chances, spread, seed, {}

    def _result(self, width):
        table = torch.zeros((self.batch.rows, 2 * width + 3), dtype=torch.int64)
        for place, row in enumerate(self.batch.hosts):
            if row not in self._true:
                law = random.Random(f"{row.key} {self._seed}").gauss(0, self._spread)
                own = random.Random(f"{row.key} {row.sample} {self._seed}")
                self._true[row] = [law, own, int(own.lognormvariate(3.85, 0.9)) + 1, 0]
            one = self._true[row]
            kept = 0
            while kept < width and one[1].random() < self._chance_at(kept, one[0]):
                kept += 1
            table[place, 0] = kept
            ends = one[2] - one[3] - 1
            if 0 <= ends <= kept:
                table[place, 1 + ends] = END
            one[3] += kept + 1
        return table

    def _chance_at(self, place, law):
        return self._chances[place] + law if place < len(self._chances) else 0.02


class Result:
    def __init__(self, found, rounds, graphs, budget, n):
        self.tokens = sum(one.tokens for one in found)
        self.finished = sum(one.finish_reason != "budget" for one in found)
        late = sorted(one.seconds - budget for one in found)
        self.p90, self.p99, self.late = late[int(0.9 * len(late))], late[int(0.99 * len(late))], late[-1]
        self.rounds, self.graphs, self.found = rounds, graphs, found


def timed_job(
    length, *, chances=BLOCK, at_once=True, limit=8, count=40, n=16, budget=0.1, host=0.001,
    seed=0, spread=0.05, surface=None, hook=None, capacity=16, most=256
):
    ticks = Ticks()
    graphs = Costs(ticks, seed)
    drafter = (AtOnce if at_once else Drafter)(ticks, 32)
    auto = length == "auto"
    lengths = (
        HostedGoodput(limit=limit, at_once=at_once, surface=surface) if auto else HostedFixed(length)
    )
    lengths.ticks, lengths.host, lengths.rounds = ticks, host, []
    loop = Timed(
        lengths, chances, rows=capacity, drafter=drafter, graphs=graphs, spread=spread, seed=seed
    )
    pair = Pair(name="toy", target="toy", draft="toy")
    spec = Speculation(length=length, max=limit)
    plan = SimpleNamespace(
        job=Job(pair=pair, n=n, speculation=spec),
        device=torch.device("cpu"),
        files=SimpleNamespace(target=SimpleNamespace(spec=SimpleNamespace(context=999))),
    )
    warm_up(loop, plan)
    graphs.done.clear()
    loop._true.clear()
    if hook:
        hook(loop)
    settings = job(n=n, max_new_tokens=most, budget=budget)
    conductor = Conductor(settings, Letters(), loop, context=1000, eos_ids=(END,), count=count)
    found = list(conductor.run(iter(prompts(*["a" * 20] * count)), ()))
    return Result(found, lengths.rounds, graphs, budget, n)
