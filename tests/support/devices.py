"""Devices as cost functions, and a batch on one with random acceptance: no models, no tensors.
No tests."""

import math
import random
import statistics

import numpy

from bass_cli.engine.clock import Forecast
from bass_cli.engine.contracts import ControllerInput, RoundResult
from bass_cli.engine.graphs import GraphPolicy
from bass_cli.engine.sizes import bucket, step_down
from bass_cli.lengths.surface import make_surface

STEPS = {"qwen2.5-0.5b": 0.77e-3, "wide-310m": 0.40e-3}  # seconds of a draft step
ROWS, WIDTHS = (1, 2, 4, 8, 16, 32, 64), (0, 1, 2, 4, 8, 16, 32)


def verify(rows, width):
    """Return the seconds of a 7B model's pass on an H200, as measured: 4.1 ms for 8 rows, 4.5
    with 6 tokens each, 5.1 for 64 rows, and bound by arithmetic above about 200 tokens."""
    tokens = rows * (width + 1)
    return (4.02 + 0.0065 * rows + 0.0085 * tokens + 0.013 * max(0, tokens - 200)) / 1e3


def device(draft):
    """Return the seconds of a round by (rows, width)."""
    return lambda rows, width: verify(rows, width) + width * (STEPS[draft] + 2e-6 * rows)


def at_once(rows, width):
    """Return the same if a 0.5B model drafts all in one pass: about 1 ms, and a little for its 2
    k tokens a row."""
    return verify(rows, width) + (1e-3 + 1.2e-6 * rows * 2 * width if width else 0.0)


def surface_of(cost, *, rows=ROWS, acceptance=None):
    """Return a profile of this device."""
    plain = [[cost(r, 0) for _ in WIDTHS] for r in rows]
    draft = [[cost(r, w) - line[0] for w in WIDTHS] for r, line in zip(rows, plain, strict=True)]
    return make_surface(rows, WIDTHS, verify=plain, draft=draft, acceptance=acceptance)


class Outcome:
    """`mean`: mean seconds until a row had its tokens. `last`: seconds until all had. `widths`:
    of the rounds."""

    def __init__(self, ends, widths, seconds):
        self.mean, self.last, self.widths, self.seconds = (
            statistics.fmean(ends),
            max(ends),
            widths,
            seconds,
        )


def run_batch(
    controller,
    cost,
    rates,
    *,
    tokens=128,
    seed=0,
    waiting=0,
    noise=0.01,
    one_time_cost=0.0,
    feeding=0.0,
):
    """Run rows whose drafts are accepted at their own rate (a number, or a function of the row's
    tokens so far) until each has `tokens` tokens. `waiting` samples follow when others end.
    `one_time_cost`: seconds that the second round of a length takes in addition, and a sixth of
    it the first one, unless a near length has a graph. `feeding`: seconds of each pass in which
    the draft model reads up to 128 tokens that it lacks."""
    chance, now, ends, widths = random.Random(seed), 0.0, [], []
    live = [[i, tokens, rate] for i, rate in enumerate(rates)]
    following = [[len(rates) + i, tokens, rates[i % len(rates)]] for i in range(waiting)]
    graphs, idle = _Graphs(one_time_cost), 0
    while live:
        pending_work = sum(row[1] for row in following)
        catch_up = feeding * -(-idle // 128)
        inputs = ControllerInput(
            (sum(row[1] for row in live) + pending_work) / len(live),
            graphs.costs(),
            catch_up,
            warmup_costs=graphs.warmup_costs(),
            samples=tuple(row[0] for row in live),
            rooms=tuple(row[1] for row in live),
        )
        width = max(0, min(controller.next(len(live), inputs), max(row[1] for row in live) - 1))
        controller.reflect()
        took = cost(len(live), width) * chance.uniform(1 - noise, 1 + noise)
        now += took + graphs.use(width)
        now += catch_up if width else 0.0
        idle = 0 if width else idle + 1
        kept = (
            [_kept(width, rate_of(row, tokens), chance) for row in live]
            if width
            else [0] * len(live)
        )
        widths.append(width)
        for row, count in zip(live, kept, strict=True):
            row[1] -= count + 1
        controller.observe(RoundResult(width, tuple(kept), took))
        ends += [now for row in live if row[1] <= 0]
        live = [row for row in live if row[1] > 0]
        while following and len(live) < len(rates):
            live.append(following.pop(0))
    return Outcome(ends, widths, now)


def _kept(width, rate, chance):
    """Return how many of `width` drafts are accepted before the first rejection."""
    if not 0 < rate < 1:
        return width if rate >= 1 else 0
    # sample a geometric distribution by its inverse: 1 - random() is above 0
    return min(width, int(math.log(1 - chance.random()) / math.log(rate)))


class _Graphs:
    """The cost of captures: the first use of a length runs uncaptured, the second one captures."""

    def __init__(self, one_time_cost):
        self._entry, self._uses = one_time_cost, {}
        self._said = None  # one-time and warm-up costs, until a length without a graph is used

    def _left(self, width):
        """Return (seconds of the next use, seconds until it is captured)."""
        uses = self._uses.get(width, 0)
        if (
            not self._entry
            or uses > 1
            or (width and any(k and n > 1 for k, n in self._uses.items()))
        ):
            return 0.0, 0.0
        return (self._entry, self._entry) if uses else (self._entry / 6, self._entry * 7 / 6)

    def costs(self):
        """Return the one-time costs of a ControllerInput."""
        return self._both()[0]

    def warmup_costs(self):
        return self._both()[1]

    def _both(self):
        if self._said is None:
            left = [self._left(k) for k in range(33)] if self._entry else []
            warmup_costs = (0.0 if self._uses.get(k) else one for k, (one, _) in enumerate(left))
            self._said = tuple(whole for _, whole in left), tuple(warmup_costs)
        return self._said

    def use(self, width):
        seconds = self._left(width)[0]
        uses = self._uses[width] = self._uses.get(width, 0) + 1
        if uses <= 2:
            self._said = None
        return seconds


def rate_of(row, tokens):
    return row[2](tokens - row[1]) if callable(row[2]) else row[2]


def tiled(tokens, *, tile):
    """Return the tokens of a pass after rounding up to whole tiles of a product."""
    return -(-tokens // tile) * tile


def accelerator(*, plain, token, knee=0, beyond=0.0, tile=1, block, row=0.0, capacity=64):
    """Return a GPU's seconds of a round by (rows, width), with graphs for buckets of rows and a
    draft of one block: its cost is the same for any length.

    plain: milliseconds of a pass. token, beyond: of each of its tokens, and of those above `knee`.
    tile: tokens that a pass is rounded up to. block, row: milliseconds of a block, and of a row in it.
    """

    def cost(rows, width):
        padded = bucket(rows, capacity)
        tokens = tiled(padded * (width + 1), tile=tile)
        drafting = block + row * padded if width else 0.0
        return (plain + token * tokens + beyond * max(tokens - knee, 0) + drafting) / 1e3

    return cost


def run_captured(controller, cost, by_place, *, limits, capacity, seed=0, gap=0.0, feeding=0.0):
    """Run samples of these `limits` of tokens through `capacity` rows of a loop with graphs.

    A round is launched before the last one ends, with the rows that are live then, unless the
    controller needs that one's result.

    Args:
        by_place: the probability by position in the draft that it is accepted. Whether it is
            depends on the sample's position and `seed` only, so all lengths have the same luck.
        gap: seconds in which the device waits for the host if a round is not launched ahead.
        feeding: seconds in which the draft model reads a token that it lacks, after plain rounds.

    Returns: mean seconds until a sample had its tokens, and the rounds: (rows, width, seconds).
    """
    chance = numpy.random.default_rng(seed)
    luck = chance.random((len(limits), max(limits) + len(by_place) + 1))
    place, room = numpy.zeros(len(limits), dtype=int), numpy.array(limits)
    live, waiting = list(range(len(limits)))[:capacity], list(range(len(limits)))[capacity:]
    now, ends, rounds, missed, flying = 0.0, [], [], 0, None

    def launch():
        nonlocal missed
        rows, left = len(live), room[live]
        padded = bucket(rows, capacity)
        inputs = ControllerInput(
            float(left.sum() + room[waiting].sum()) / rows,
            catch_up=feeding * rows * min(missed, int(place[live].max())),
            samples=tuple(live),
            rooms=tuple(left.tolist()),
            padded=padded,
        )
        width = max(0, min(controller.next(rows, inputs), int(left.max()) - 1))
        missed = 0 if width else missed + 1
        took = cost(rows, width) * chance.uniform(0.99, 1.01)
        return tuple(live), width, took, padded, inputs.catch_up if width else 0.0

    while live:
        if flying is None:
            flying, now = launch(), now + gap
            controller.reflect()
        rows, width, took, padded, fed = flying
        ahead = not controller.needs_result(width)
        flying, now = launch() if ahead else None, now + took + fed
        rows = [row for row in rows if room[row] > 0]
        at = place[rows][:, None] + numpy.arange(width)
        hit = luck[numpy.array(rows)[:, None], at] < numpy.array(by_place[:width])
        kept = hit.cumprod(1).sum(1)
        place[rows] += kept + 1
        room[rows] -= kept + 1
        waits = 0.0 if ahead else gap
        done = RoundResult(width, tuple(kept.tolist()), took, waiting=waits, padded=padded)
        controller.observe(done._replace(rows=tuple(rows)))
        if ahead:
            controller.reflect()
        rounds.append((len(rows), width, took))
        ends += [now for row in rows if room[row] <= 0]
        live = [row for row in live if room[row] > 0]
        while waiting and len(live) < capacity:
            live.append(waiting.pop(0))
    return statistics.fmean(ends), rounds


class HeldGraphs:
    """The graphs of a GraphPolicy: nothing is launched."""

    def __init__(self):
        self.captured, self.warm = set(), set()

    def holds(self, shape):
        return shape in self.captured

    def held(self):
        return self.captured

    def is_warm(self, shape):
        return shape in self.warm


def run_draining(
    controller, cost, rate, *, lengths, limit, longest=16, seed=0, capture=0.027, launches=0.006
):
    """Run one sample a row until each has its own length, which the controller does not know, with
    graphs that the engine's policy captures when it wants them.

    Args:
        rate: of acceptance, of each draft if those before are accepted.
        limit: tokens that a sample may have.
        capture, launches: seconds to capture a plain pass, and to launch it uncaptured.

    Returns: the rounds, (live rows, seconds).
    """
    chance, graphs, forecast = numpy.random.default_rng(seed), HeldGraphs(), Forecast(len(lengths))
    luck = chance.random((len(lengths), limit + longest))
    policy = GraphPolicy(graphs, longest=longest, drafts="block")
    due, place = numpy.array(lengths), numpy.zeros(len(lengths), dtype=int)
    live, rounds, missed = numpy.arange(len(lengths)), [], 0
    forecast.begin(len(lengths))
    while len(live):
        padded, left = bucket(len(live), len(lengths)), limit - place[live]
        typical = numpy.maximum(forecast.length(float(place[live].mean())), place[live])
        most, once = float(left.max()), policy.one_time_costs(padded)
        inputs = ControllerInput(
            float(numpy.minimum(left, typical).sum()) / len(live),
            once,
            catch_up=1e-6 * len(live) * missed,
            warmup_costs=policy.warmup_costs(padded) if any(once) else (),
            samples=tuple(live.tolist()),
            rooms=tuple(left.tolist()),
            padded=policy.choose(policy.shape(padded, 0), left=most).shape.rows,
        )
        wanted = controller.next(len(live), inputs)
        shape = policy.shape(padded, step_down(max(0, min(wanted, int(most) - 1))))
        step = policy.choose(shape, left=most)
        policy.served(shape, step)
        rows, width = step.shape.rows, step.shape.width
        took, once_more = cost(rows, width), 0.0
        passes = 1.6 if width else 1.0
        if step.how == "run":
            took += launches * passes
            graphs.warm.add(step.shape)
        elif step.how == "capture":
            once_more = capture * passes
            graphs.captured.add(step.shape)
        if step.how != "replay":
            policy.took(step, took if step.how == "run" else once_more)
        once_more += inputs.catch_up if width else 0.0
        missed = 0 if width else missed + 1
        at = place[live][:, None] + numpy.arange(width)
        accepted = (luck[live[:, None], at] < rate).cumprod(1).sum(1)
        place[live] += accepted + 1
        steady, kept = step.how != "run", tuple(accepted.tolist())
        done = RoundResult(width, kept, took, steady, rows=inputs.samples, padded=rows)
        controller.observe(done._replace(wanted=wanted))
        rounds.append((len(live), took + once_more))
        over = place[live] >= due[live]
        for tokens in due[live[over]]:
            forecast.end(int(tokens))
        live = live[~over]
    return rounds
