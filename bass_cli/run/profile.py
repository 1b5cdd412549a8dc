"""Time the rounds of a pair on this device, so that --draft-length auto and table choose well.

lengths/surface.py uses the figures; cli/profile.py is the command.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy

from bass_cli.drafts.factory import NoDrafter
from bass_cli.engine.batch import Batch, Row
from bass_cli.engine.clock import Clock
from bass_cli.engine.contracts import Proposal, RoundResult
from bass_cli.engine.loop import Loop
from bass_cli.engine.sampling import RowSampling
from bass_cli.formats.tokenizer import Tokenizer
from bass_cli.lengths.controllers import Fixed
from bass_cli.lengths.surface import Surface, make_surface
from bass_cli.models.capture import Graphs

_SAMPLING = RowSampling(temperature=0.8, top_p=0.95)  # of the rows that are timed
PASSAGES = (
    "The committee met on Tuesday to discuss the new budget for the library. Three members were "
    "absent, and the chair opened the meeting at nine o'clock. After a short report on last year's "
    "costs, the members turned to the question of whether the reading room should stay open on "
    "Sundays.\n\n",
    'def merge(left, right):\n    """Merge two sorted lists into one sorted list."""\n'
    "    out, i, j = [], 0, 0\n    while i < len(left) and j < len(right):\n"
    "        if left[i] <= right[j]:\n            out.append(left[i])\n            i += 1\n"
    "        else:\n            out.append(right[j])\n            j += 1\n"
    "    return out + left[i:] + right[j:]\n\n",
    "A bicycle stays upright for several reasons at once. When it begins to lean, the front wheel "
    "turns a little towards the lean, and the wheels come back under the rider. The rider helps "
    "with small movements of the handlebar, mostly without noticing them, and the faster the "
    "bicycle goes the smaller they need to be.\n\n",
    "name,age,city,joined\nAlice,31,Paris,2019-04-02\nBob,27,London,2021-11-15\n"
    "Carol,45,Madrid,2015-07-30\n"
    "Daniel,38,Vienna,2018-01-09\nEva,29,Prague,2022-05-21\nFrank,52,Oslo,2011-09-17\n\n",
    "The old lighthouse stood at the end of a narrow path, and nobody had climbed its stairs for "
    "years. On the first evening of autumn a light appeared in the highest window. The fishermen "
    "saw it from their boats and said nothing; the children of the village talked of nothing "
    "else.\n\n",
    "To make the soup, chop two onions and fry them slowly in butter until they are soft. Add four "
    "carrots, two potatoes and a litre of water, and let it simmer for half an hour. Season with "
    "salt, pepper and a little nutmeg, then serve it with fresh bread and grated cheese.\n\n",
    "class Account:\n    def __init__(self, owner, balance=0):\n        self.owner = owner\n"
    "        self.balance = balance\n\n    def withdraw(self, amount):\n"
    "        if amount > self.balance:\n"
    '            raise ValueError("not enough money")\n        self.balance -= amount\n'
    "        return self.balance\n\n",
    "Water rises from the seas and lakes as vapour when the sun warms them. High in the cold air "
    "it turns into the small drops that clouds are made of. When the drops grow too heavy they "
    "fall as rain or snow, and the rivers carry the water back to where it came from.\n\n",
)


def joined(tokenizer: Tokenizer, prompt: int, length: int) -> list[int]:
    """Join passages in rotation to a prompt of `length` tokens; each prompt begins elsewhere."""
    tokens: list[int] = []
    count = 0
    while len(tokens) < length:
        count += max(count, len(PASSAGES))
        text = "".join(PASSAGES[(prompt + i) % len(PASSAGES)] for i in range(count))
        tokens = tokenizer.encode(text)
    return tokens[:length]


Point = tuple[int, int]  # rows, width
_LEAST = 1e-7  # the least seconds of a round, for a clock that did not advance


def filled(
    points: dict[Point, float], rows: Sequence[int], widths: Sequence[int]
) -> list[list[float]]:
    """Fill in the points that were not measured.

    They come from a fit with non-negative weights: seconds of a pass, of a row and of a token. The
    fit's residuals are interpolated along the widths and then along the rows. No point is below a
    measured one with fewer rows and drafts.
    """
    points = {at: max(value, _LEAST) for at, value in points.items() if math.isfinite(value)}
    assert points, "not even one round was measured"
    places = numpy.array(list(points))
    seconds = numpy.array(list(points.values()))

    def features(count: numpy.ndarray, width: numpy.ndarray) -> numpy.ndarray:
        return numpy.stack((numpy.ones(len(count)), count, count * width), 1)

    weights = _positive_fit(features(*places.T) / seconds[:, None], numpy.ones(len(seconds)))
    grid = numpy.array(list(itertools.product(rows, widths)))
    fitted = (features(*grid.T) @ weights).reshape(len(rows), len(widths))
    off = {
        (count, width): points[count, width] - float(fitted[i, j])
        for i, count in enumerate(rows)
        for j, width in enumerate(widths)
        if (count, width) in points
    }
    seen = sorted({count for count, _ in off})
    lines = [
        _between(widths, {width: value for (c, width), value in off.items() if c == count})
        for count in seen
    ]
    columns = [
        _between(rows, dict(zip(seen, column, strict=True))) for column in zip(*lines, strict=True)
    ]
    whole = fitted + numpy.array(columns).T
    floor = [
        [
            max((points[at] for at in points if at[0] <= count and at[1] <= width), default=0.0)
            for width in widths
        ]
        for count in rows
    ]
    found: list[list[float]] = [
        [
            points.get((count, width), max(value, least, float(seconds.min())))
            for width, value, least in zip(widths, values, leasts, strict=True)
        ]
        for count, values, leasts in zip(rows, whole.tolist(), floor, strict=True)
    ]
    return found


def _positive_fit(features: numpy.ndarray, values: numpy.ndarray) -> numpy.ndarray:
    """Solve least squares with weights of at least 0, by trying every set of features that are
    used; features [points, few], values [points]."""
    count = features.shape[1]
    best, least = numpy.zeros(count), float(values @ values)
    for used in itertools.product((False, True), repeat=count):
        columns = numpy.flatnonzero(used)
        weights, *_ = numpy.linalg.lstsq(features[:, columns], values, rcond=None)
        off = features[:, columns] @ weights - values
        if (weights >= 0).all() and off @ off < least:
            best, least = numpy.zeros(count), float(off @ off)
            best[columns] = weights
    return best


def _between(axis: Sequence[int], known: dict[int, float]) -> list[float]:
    """Interpolate linearly along an axis; beyond the known points the nearest value holds."""
    places = sorted(known)
    found: list[float] = numpy.interp(axis, places, [known[place] for place in places]).tolist()
    return found


def drafting(
    whole: dict[Point, float],
    verify: dict[Point, float],
    rows: Sequence[int],
    widths: Sequence[int],
    *,
    at_once: bool = False,
) -> list[list[float]]:
    """Compute the seconds of drafting: a whole round without the target's part.

    They are interpolated between the measured lengths, then between the measured rows. `at_once`:
    one pass drafts all tokens, so if one length was measured, all lengths take as long.
    """
    known: dict[int, dict[int, float]] = {}
    for (count, width), seconds in whole.items():
        if (count, width) in verify:
            known.setdefault(count, {})[width] = max(seconds - verify[count, width], 0.0)
    if not known:
        return [[0.0] * len(widths) for _ in rows]
    lines = {count: _steps(line, widths, at_once) for count, line in known.items()}
    columns = [
        _between(rows, {count: line[place] for count, line in lines.items()})
        for place in range(len(widths))
    ]
    return [list(line) for line in zip(*columns, strict=True)]


def _steps(known: dict[int, float], widths: Sequence[int], at_once: bool) -> list[float]:
    """Compute the seconds of drafting for each width, on the line through the two nearest measured
    lengths."""
    measured = sorted(known)
    if len(measured) == 1:
        (only,) = measured
        steps = {width: known[only] * (1.0 if at_once else width / only) for width in widths}
        return [steps[width] if width else 0.0 for width in widths]
    found = []
    for width in widths:
        after = min(max(bisect.bisect_left(measured, width), 1), len(measured) - 1)
        low, high = measured[after - 1], measured[after]
        step = max((known[high] - known[low]) / (high - low), 0.0)
        found.append(max(known[high] + (width - high) * step, 0.0) if width else 0.0)
    return found


LIMITS = {
    "cuda": 25.0,
    "cpu": 50.0,
}  # seconds of measuring, without loading weights and reading prompts
WIDTHS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16)
TOKENS = 200  # new tokens that every row has room for
_SAMPLES = 8  # rows that share a prompt
_SLOW = 0.5  # seconds; a slower round is measured once
_TELLING = 50  # the least trials for an acceptance rate
_LONGER = 4  # the factor of the context in the second measurement


class MadeUp(NoDrafter):
    """Propose the same token everywhere at no cost, to time the target's part of a round."""

    on_device, longest = False, WIDTHS[-1]

    def propose(self, batch: Batch, length: int) -> Proposal:
        return Proposal(batch.tokens.new_ones(len(batch), length), None, (length,) * len(batch))


@dataclass(slots=True, eq=False)
class _Bench:
    """The loops to measure, and the counts of accepted drafts.

    `real` has the pair's drafter, `made_up` a drafter without cost. `kept` of `trials` drafts of
    the real drafter were accepted.
    """

    real: Loop
    made_up: Loop
    prompts: Sequence[Sequence[int]]
    now: Callable[[], float]
    deadline: float
    kept: int = 0
    trials: int = 0
    tokens: int = TOKENS
    samples: int = _SAMPLES
    opened: set[str] = field(default_factory=set)

    def seconds(self, loop: Loop, rows: int, width: int) -> float | None:
        """Measure the seconds of a round, as the minimum of several rounds.

        None if the drafter proposed fewer tokens, or if the time is up.
        """
        if self.now() > self.deadline:
            return None
        self._fill(loop, rows)
        was = loop.controller
        loop.use(Fixed(width))
        try:
            loop.prepare([rows], [width], catching_up=False)
            found = self._rounds(loop, width)
        finally:
            loop.use(was)
            for index in reversed(range(len(loop.batch))):
                loop.retire(index)
        return min(found, default=None)

    def _rounds(self, loop: Loop, width: int) -> list[float]:
        found: list[float] = []
        for number in range(6 if loop.batch.device.type == "cuda" else 4):
            done = loop.round()
            if loop is self.real and width:
                self._count(done)
            if done.width != width or not done.steady:
                continue
            last = min(loop.batch.rooms()) <= width + 1
            # the first round warms up, unless rounds are slow
            if number or done.seconds > _SLOW or last:
                found.append(done.seconds)
            if last or (found and (done.seconds > _SLOW or self.now() > self.deadline)):
                break
        return found

    def _count(self, done: RoundResult) -> None:
        self.kept += sum(done.accepted)
        self.trials += sum(map(min, (kept + 1 for kept in done.accepted), done.num_drafts))

    @property
    def acceptance(self) -> float | None:
        """The share of accepted drafts among those that verification reached; None if unknown."""
        if self.trials < _TELLING or not self.real.drafter.on_device:
            return None
        return self.kept / self.trials

    def _fill(self, loop: Loop, rows: int) -> None:
        for index in range(rows):
            number = index // self.samples % len(self.prompts)
            tokens = self.prompts[number]
            key = f"profile {len(tokens)} {number}"
            if key not in self.opened:
                self.real.open(key, tokens)  # both loops share the target's prompt cache
                self.opened.add(key)
            loop.admit(Row(key, index, 0, list(tokens), self.tokens, sampling=_SAMPLING))

    @property
    def compiles(self) -> bool:
        """Whether kernels are compiled before they run."""
        return self.real.graphs is not None and self.real.graphs.enabled

    def compile(
        self,
        rows: Sequence[int],
        widths: Sequence[int],
        steps: Sequence[int],
        note: Callable[[str], None],
    ) -> None:
        """Compile all kernels that will be measured, with one row that is retired afterwards.

        If that fails, kernels are compiled when they first run.
        """
        real, key, tokens = self.real, "profile", self.prompts[0]

        def work() -> None:
            real.open(key, tokens)
            real.admit(Row(key, 0, 0, list(tokens), self.tokens, sampling=_SAMPLING))
            try:
                self.made_up.prepare(rows, widths, catching_up=False, only_compile=True)
                real.prepare(rows, steps, catching_up=False, only_compile=True)
            finally:
                real.retire(0)
                real.close(key)

        if real.graphs is not None and self.compiles:
            began = self.now()
            real.graphs.compile([work], note)
            # at least half of the time is for measuring
            self.deadline += max(self.now() - began - (self.deadline - began) / 2, 0.0)

    def close(self) -> None:
        for key in self.opened:
            self.real.close(key)
        self.opened.clear()


def measure(
    loop: Loop,
    prompts: Sequence[Sequence[int]],
    *,
    rows: Sequence[int],
    limit: float,
    longest: int = WIDTHS[-1],
    context: int | None = None,
    tokens: int = TOKENS,
    samples: int = _SAMPLES,
    now: Callable[[], float] = time.perf_counter,
    note: Callable[[str], None] = lambda text: None,
) -> Surface:
    """Measure the round costs of a loop, which must be empty and is left empty.

    Args:
        prompts: Token ids of prompts of about the same length.
        rows: The numbers of rows to measure, at most the batch's capacity.
        limit: Seconds for measuring; the most informative points come first.
        context: The model's context, to measure longer prompts too; None not to.
        tokens, samples: New tokens that rows have room for, and rows of a prompt.
        now, note: The clock, in seconds; called with a line if points were left out.
    """
    made_up = _with_made_up_drafts(loop, now)
    bench = _Bench(loop, made_up, prompts, now, now() + limit, tokens=tokens, samples=samples)
    rows, longest = sorted(set(rows)), min(longest, loop.drafter.longest)
    widths = [width for width in WIDTHS if width <= longest]
    at_once = loop.drafter.at_once  # its cost grows with its tokens only if they are many
    steps = [width for width in (4, 1, *((widths[-1],) if at_once else ())) if width <= longest]
    steps = list(dict.fromkeys(steps))
    verify: dict[Point, float] = {}
    whole: dict[Point, float] = {}
    order = _order(rows, widths, steps)
    bench.compile(rows, widths, steps, note)
    for part, count, width in order:
        found = bench.seconds(loop if part == "draft" else made_up, count, width)
        if found is not None:
            (whole if part == "draft" else verify)[count, width] = found
    base = statistics.fmean(map(len, prompts))
    growth = 0.0, 0.0
    if context is not None:
        growth = _growth(bench, rows, verify, whole, context=context, base=base)
    bench.close()
    done = len(verify) + len(whole)
    if done < len(order) and loop.drafter.on_device:
        again = "; run the same command again to measure more, now that kernels are compiled"
        note(
            f"{done} of {len(order)} points were measured in time; the others are estimated"
            + again * bench.compiles
        )
    return make_surface(
        rows,
        widths,
        verify=filled(verify, rows, widths),
        draft=drafting(whole, verify, rows, widths, at_once=at_once),
        context=base + tokens / 10,
        growth=growth,
        acceptance=bench.acceptance,
    )


def _with_made_up_drafts(loop: Loop, now: Callable[[], float]) -> Loop:
    """Make a loop over the same batch and target whose rounds take the target's time only."""
    graphs = Graphs(loop.batch.device)
    return loop.with_drafter(MadeUp(), target=loop.target, clock=Clock(now), graphs=graphs)


def _order(
    rows: Sequence[int], widths: Sequence[int], steps: Sequence[int]
) -> list[tuple[str, int, int]]:
    """Order the measurements, the most informative first.

    For the largest number of rows, the smallest, then the others: a plain round, a round with
    drafts, and the same round without drafting. All other points follow.
    """
    counts = _coarse_first(rows)
    first = [
        ("verify", 0),
        *(("draft", step) for step in steps[:1]),
        *(("verify", step) for step in steps[:1]),
    ]
    ends = [
        ("verify", widths[-1]),
        *((part, step) for step in steps[1:] for part in ("draft", "verify")),
    ]
    near = [
        (part, count, width) for phase in (first, ends) for count in counts for part, width in phase
    ]
    # Other widths matter most for many rows, where the time of a pass grows in steps.
    return list(
        dict.fromkeys(
            near + [("verify", count, width) for count in reversed(rows) for width in widths]
        )
    )


def _coarse_first(values: Sequence[int]) -> list[int]:
    """Order values: the last, the first, then the middles of the gaps."""
    found, gaps = [values[-1], values[0]], [(0, len(values) - 1)]
    for low, high in gaps:
        middle = (low + high) // 2
        if low < middle < high:
            found.append(values[middle])
            gaps += [(low, middle), (middle, high)]
    return list(dict.fromkeys(found))


def _growth(
    bench: _Bench,
    rows: Sequence[int],
    verify: dict[Point, float],
    whole: dict[Point, float],
    *,
    context: int,
    base: float,
) -> tuple[float, float]:
    """Measure the seconds that a token of context adds for a row: to the target's pass and to a
    draft step."""
    short, longer = bench.prompts, min(_LONGER * int(base), context - TOKENS - WIDTHS[-1] - 1)
    count = min(rows[-1], _SAMPLES)
    if longer < 2 * base or (count, 0) not in verify:
        return 0.0, 0.0
    bench.prompts = [list(itertools.islice(itertools.cycle(short[0]), longer))]
    added = [0.0, 0.0]
    plain, drafted = bench.seconds(bench.made_up, count, 0), bench.seconds(bench.real, count, 4)
    if plain is not None:
        added[0] = max(plain - verify[count, 0], 0.0) / (count * (longer - base))
        if drafted is not None and (count, 4) in whole:
            added[1] = max(drafted - whole[count, 4] - (plain - verify[count, 0]), 0.0) / (
                4 * count * (longer - base)
            )
    bench.prompts = short
    return added[0], added[1]
