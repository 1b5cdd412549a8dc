"""A job of prompts with a wall-clock budget on a device with the costs of a 1.5B model: the real
scheduler, loop, graph policy, warm-up and controllers on a fake clock, random acceptance in
place of tensors. No tests."""

import random
from types import SimpleNamespace
from typing import NamedTuple

import torch
from drawing import Scheduler
from fakes import FakeGraphs, Ticks
from simulated import Simulated
from test_scheduler import Letters, job, prompts

from bass_cli.config.job import Job, Pair, Speculation
from bass_cli.drafts.factory import NoDrafter
from bass_cli.lengths.controllers import Fixed
from bass_cli.lengths.goodput import Goodput
from bass_cli.run.build import warm_up

BLOCK = (0.85, 0.79, 0.81, 0.815, 0.83, 0.82, 0.85, 0.80)  # by position: drafts of one pass on code
CHAIN = (0.93,) * 64  # token by token
END = 9  # the token that ends a sample


class Drafter(NoDrafter):
    """Takes 4.5 ms for a prompt, the target's pass included. It has read each row's tokens up to
    where it has drafted, like drafts/model.py."""

    catches_up = True

    def __init__(self, ticks, longest):
        self._ticks, self.longest, self._missed = ticks, longest, 0

    def open(self, key, tokens, reference=(), in_time=None):
        self._missed = 0
        return _read(self._ticks, 0.0045, tokens, in_time)

    def expect(self, batch, length):
        missed, self._missed = self._missed, 0 if length else self._missed + 1
        return missed if missed > self._spared(length) and length else 0

    def catch_up(self, batch, behind, count):
        pass

    def _spared(self, length):
        return 0

    def reaches(self, before, length):
        return not length or before > 0


class AtOnce(Drafter):
    """The same in one pass, like drafts/model.py."""

    at_once = True

    def _spared(self, length):
        return length

    def reaches(self, before, length):
        return not length or 0 < before <= length


def _read(ticks, seconds, tokens, in_time):
    if in_time is not None and not in_time(len(tokens)):
        return False
    ticks.seconds += seconds
    return True


class Costs(FakeGraphs):
    """A 1.5B on an H200: 1.9 ms for a plain round of 16 rows, 0.13 for each draft of theirs; the
    draft's pass takes 1.5 ms, or 0.96 token by token. All with some noise."""

    def __init__(self, ticks, seed):
        super().__init__(ticks)
        self._noise = random.Random(seed)

    def pass_seconds(self, key):
        seconds = 0.001
        if key.kind != "catch up":
            draft = 0.96e-3 * key.width
            if key.kind == "block":
                draft = 1.5e-3 + 0.015e-3 * key.width
            seconds = 1.77e-3 + 0.0083e-3 * key.rows * (key.width + 1) + draft
        return seconds * self._noise.uniform(0.95, 1.05)


class Hosted:
    """A controller whose host takes a millisecond for each round that it has received."""

    ticks = Ticks()

    def observe(self, done):
        self.ticks.seconds += 0.001
        super().observe(done)


class HostedFixed(Hosted, Fixed):
    pass


class HostedGoodput(Hosted, Goodput):
    pass


class Timed(Simulated):
    """Drafts are accepted with `chances` by position, which vary by about `spread` between
    prompts. Samples end after a number of tokens that depends only on their index."""

    def __init__(self, lengths, chances, *, rows, drafter, graphs, spread, seed):
        super().__init__(lengths, 0.0, rows=rows, drafter=drafter, graphs=graphs)
        self._chances, self._spread, self._seed, self.texts = chances, spread, seed, {}

    def _result(self, width):
        table = torch.zeros((self.batch.rows, 2 * width + 3), dtype=torch.int64)
        for place, row in enumerate(self.batch.live_rows):
            if row not in self.texts:
                self.texts[row] = self._text(row)
            text = self.texts[row]
            kept = text.keeps(width)
            table[place, 0] = kept
            if 0 <= text.left <= kept:
                table[place, 1 + text.left] = END
            text.left -= kept + 1
        return table

    def _text(self, row):
        kind = random.Random(f"{row.key} {self._seed}").gauss(0, self._spread)
        own = random.Random(f"{row.key} {row.sample} {self._seed}")
        return Text(own, [chance + kind for chance in self._chances])


class Text:
    """What one sample becomes: `left` tokens before the one that ends it."""

    def __init__(self, own, chances):
        self.left, self._own, self._chances = int(own.lognormvariate(3.85, 0.9)), own, chances

    def keeps(self, width):
        """Return how many of these drafts are accepted; almost none beyond the positions in
        `chances`."""
        for place in range(width):
            known = place < len(self._chances)
            if self._own.random() >= (self._chances[place] if known else 0.02):
                return place
        return width


class Result(NamedTuple):
    """`tokens`: of all samples. `finished`: how many of them ended in time. `late`: seconds of
    each after its deadline."""

    tokens: int
    finished: int
    late: list[float]
    graphs: Costs


def timed_job(length, *, chances=BLOCK, at_once=True, limit=8, seed=0, spread=0.05):
    """Run 40 prompts of 16 samples one after the other, 0.1 s each."""
    graphs = Costs(Ticks(), seed)
    auto = length == "auto"
    lengths = HostedGoodput(limit=limit, at_once=at_once) if auto else HostedFixed(length)
    lengths.ticks = graphs.ticks
    drafter = (AtOnce if at_once else Drafter)(graphs.ticks, 32)
    loop = Timed(
        lengths, chances, rows=16, drafter=drafter, graphs=graphs, spread=spread, seed=seed
    )
    settings = job(n=16, max_new_tokens=256, budget=0.1)
    pair = Pair(name="toy", target="toy", draft="toy")
    spec = SimpleNamespace(context=999)
    plan = SimpleNamespace(
        job=Job(pair=pair, n=16, speculation=Speculation(length=length, max=limit)),
        device=torch.device("cpu"),
        files=SimpleNamespace(target=SimpleNamespace(spec=spec), tokenizer=None),
        new_tokens=256,
        samples_per_prompt=16,
    )
    warm_up(loop, plan)
    graphs.done.clear()
    loop.texts.clear()
    scheduler = Scheduler(settings, Letters(), loop, context=1000, eos_ids=(END,), count=40)
    found = list(scheduler.run(iter(prompts(*["a" * 20] * 40)), ()))
    return Result(
        sum(one.tokens for one in found),
        sum(one.finish_reason != "budget" for one in found),
        [one.seconds - 0.1 for one in found],
        graphs,
    )
