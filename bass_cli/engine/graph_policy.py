"""Which captured graph serves a round, and when a new one is worth its capture.

A capture takes as long as some fifteen plain rounds, and longer with drafts. So a shape is served
by the nearest one that is captured, until what this lost comes to a capture (the ski-rental rule);
one that nothing serves runs uncaptured once, which compiles what the capture needs. All this counts
passes, not seconds: two runs of a job choose the same shapes. Seconds only say what a new shape
would cost (`entry`).
Where the very draft length counts, a longer one may serve, and looks at no more drafts (step.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from bass_cli.engine.contracts import Drafter, DraftsAtOnce
from bass_cli.engine.graphs import WIDTHS, Graphs, cover, step_down

# Plain passes on the device that running and capturing one takes, by the launches in it: 27 ms on
# an H200, 18 of the 1.5B and 7 of the 7B.
_CAPTURE = 15.0
_FEW = 3  # rounds left for which it is not worth capturing anything
# What a round costs where nobody measured, in plain passes on the device; lengths/round_cost.py too
# begins from this.
STEP = 0.2  # of a draft step
ARITHMETIC = 300.0  # tokens of a pass whose arithmetic takes as long as reading the weights
_STEP_LAUNCHES = (
    0.6  # what a draft step costs of a pass on the host, where launches count and not sizes
)
_SECONDS = 0.1  # for a pass on the host, at most: what takes longer is compiling, which comes once
Kind = Literal["round", "block", "cut", "given", "catch up"]
Cuts = Callable[[int, int], bool]  # whether rounds of so many rows and drafts are cut
# which draft lengths may serve another: any, longer ones, or none
Fit = Literal["near", "wider", "same"]


class Shape(NamedTuple):
    """What a graph is made for: `rows`, dummies included, and in a round `width` drafts a row
    ("block": one pass makes all of them; "cut": it makes more, and so many on average are verified
    (cutting.py); "given": they come from the host); in catching up, of a drafter after plain
    rounds, `width` tokens."""

    kind: Kind
    rows: int
    width: int


class Step(NamedTuple):
    """A shape, and how to run it: by replaying its graph, uncaptured ("run"), or capturing and
    then replaying it."""

    shape: Shape
    how: Literal["replay", "run", "capture"]


def kind_of(drafter: Drafter) -> Kind:
    """The kind of its rounds with drafts."""
    if not drafter.on_device:
        return "given"
    return "block" if isinstance(drafter, DraftsAtOnce) else "round"


class Ladder:
    """The policy for one loop's graphs. `longest`: the most that the drafter proposes. `drafts`:
    the kind of its rounds with drafts, if `cuts` does not say that those of so many rows and
    drafts are cut."""

    def __init__(
        self,
        graphs: Graphs,
        *,
        longest: int,
        drafts: Kind = "round",
        cuts: Cuts = lambda rows, width: False,
    ):
        self._graphs, self._drafts, self._longest, self._cuts = graphs, drafts, longest, cuts
        self._widths = [step_down(min(width, longest)) for width in range(WIDTHS[-1] + 1)]
        self._lost: dict[
            Shape, tuple[int, float]
        ] = {}  # by wish: times another shape served, and passes lost by that
        self._unit: dict[
            tuple[str, str], float
        ] = {}  # by kind and how: seconds on the host for a pass
        self._entries: dict[int, tuple[float, ...]] = {}

    def choose(self, wish: Shape, *, left: float, fit: Fit = "near") -> Step:
        """What to run for `wish`, of which at most `left` more may come. With the fit "wider",
        what nothing serves begins in one of the usual widths, which serves others too."""
        if self._graphs.holds(wish):
            return Step(wish, "replay")
        near = self._near(wish, fit)
        if near is not None:
            times, lost = self._lost.get(wish, (0, 0.0))
            price = _CAPTURE * _launches(wish)
            if lost < price or left * lost < price * times:
                return Step(near, "replay")
        elif fit == "wider":
            usual = min(cover(wish.width), self._longest)  # more is never drafted
            wish = wish._replace(width=max(usual, wish.width))
        if left < _FEW or not self._graphs.is_warm(wish):
            return Step(wish, "run")
        return Step(wish, "capture")

    def served(self, wish: Shape, step: Step) -> None:
        """`step` was run for `wish`."""
        if step.shape != wish:
            times, lost = self._lost.get(wish, (0, 0.0))
            self._lost[wish] = times + 1, lost + _loss(step.shape, wish)

    def took(self, step: Step, seconds: float) -> None:
        """Running or capturing a shape kept the host for `seconds`."""
        key = (step.shape.kind, step.how)
        self._unit[key] = min(self._unit.get(key, _SECONDS), seconds / _launches(step.shape))
        self._entries.clear()

    def delay(self, step: Step) -> float:
        """Seconds that `step` is likely to take beyond those of a replay."""
        if step.how == "replay":
            return 0.0
        # a plain pass tells of the former
        kind = step.shape.kind
        kinds = (kind,) if kind == "catch up" else (kind, "round")
        known = [self._unit[kind, step.how] for kind in kinds if (kind, step.how) in self._unit]
        return (known[0] if known else _SECONDS) * _launches(step.shape)

    def entries(self, rows: int) -> tuple[float, ...]:
        """For each draft length from 0 the seconds that it takes, once, until rounds of so many
        rows (dummies included) run at their usual speed: 0 if a graph is there, or one near."""
        if rows not in self._entries:
            self._entries[rows] = tuple(
                self._entry(self.shape(rows, width)) for width in self._widths
            )
        return self._entries[rows]

    def shape(self, rows: int, width: int) -> Shape:
        """A round of so many drafts."""
        kind: Kind = "cut" if self._cuts(rows, width) else self._drafts
        return Shape(kind if width else "round", rows, width)

    def colds(self, rows: int) -> tuple[float, ...]:
        """Of the entries, what the very first round takes: it runs uncaptured, and tells already
        what rows keep."""
        return tuple(
            self._cold(self.shape(rows, width)) if entry else 0.0
            for width, entry in zip(self._widths, self.entries(rows), strict=True)
        )

    def forget(self) -> None:
        """The graphs have been dropped."""
        self._entries.clear()

    def _entry(self, wish: Shape) -> float:
        if self._graphs.holds(wish) or self._near(wish) is not None:
            return 0.0
        return self._cold(wish) + self.delay(Step(wish, "capture"))

    def _cold(self, wish: Shape) -> float:
        return 0.0 if self._graphs.is_warm(wish) else self.delay(Step(wish, "run"))

    def _near(self, wish: Shape, fit: Fit = "near") -> Shape | None:
        """The captured shape that serves instead at the least loss."""
        fitting = [
            shape
            for shape in self._graphs.held()
            if isinstance(shape, Shape)
            and _alike(shape.kind, wish.kind, fit)
            and shape.rows >= wish.rows
            and _serves(shape, wish, fit)
        ]
        return min(fitting, key=lambda shape: _loss(shape, wish), default=None)


def _alike(kind: Kind, wish: Kind, fit: Fit) -> bool:
    """Whether rounds cut and not cut may stand for each other: where any length will do."""
    return kind == wish or (fit == "near" and {kind, wish} == {"cut", "block"})


def _serves(shape: Shape, wish: Shape, fit: Fit) -> bool:
    """Whether the width will do. Tokens that are known already may be taken in again. If any
    length will do, drafts may be more or fewer than asked for, but not none: then nothing would
    be learnt of them."""
    if wish.kind == "catch up" or fit == "wider":
        return shape.width >= wish.width
    return shape.width == wish.width or (fit == "near" and bool(shape.width or not wish.width))


def _loss(shape: Shape, wish: Shape) -> float:
    """What is lost if this shape serves, in plain passes: places in it that are not filled, or
    drafts that have none, where these cost next to nothing."""
    cheap = wish.kind in ("given", "block", "cut")
    dropped = STEP * max(wish.width - shape.width, 0) if cheap else 0.0
    return dropped + abs(_price(shape) - _price(wish))


def _price(shape: Shape) -> float:
    """What it costs on the device, in plain passes."""
    if shape.kind == "catch up":
        return 1 + shape.rows * shape.width / ARITHMETIC
    return 1 + STEP * _steps(shape) + shape.rows * (shape.width + 1) / ARITHMETIC


def _launches(shape: Shape) -> float:
    """What it costs on the host, in passes."""
    return 1 + _STEP_LAUNCHES * _steps(shape)


def _steps(shape: Shape) -> int:
    """Passes of a draft in a round."""
    once = min(shape.width, 1)
    return {"round": shape.width, "block": once, "cut": once}.get(shape.kind, 0)
