"""What crosses between the engine and those that it works with: a target, a drafter, a controller
of draft lengths.

Protocols and data only. Nouns are what a loop must have; verbs (CatchesUp, Trims) are what a
drafter or a controller may be able to do besides: the loop asks once whether it can. Nobody
inherits from any of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

import bass_kernels as ops
from bass_cli.engine.batch import Batch, Change

InTime = Callable[[int], bool]


class Proposal(NamedTuple):
    """tokens [B, k] int64: k may be smaller than asked for, 0 too. law [B, k, V]: what they were
    drawn from, under maximal coupling with a draft model; None means point masses, or shared
    coupling, which needs no laws. counts (point masses only, by live row): how many of a row's
    tokens are drafts; those after them only fill its place up. None: all are. scores [B, k]
    float32: the log-probability, at temperature 1, that the draft gives each token; None: nobody
    knows."""

    tokens: Tensor
    law: ops.Distribution | None
    counts: tuple[int, ...] | None = None
    scores: Tensor | None = None


class Verdict(NamedTuple):
    """What the target says of the drafts. accepted [B] int64: how many each row keeps. block [B,
    k + 1] int64: the tokens to append, valid up to and including place `accepted`, where the
    target's own stands; scores [B, k + 1]: their log-probabilities, float32."""

    accepted: Tensor
    block: Tensor
    scores: Tensor


class RoundResult(NamedTuple):
    """What a round did: `width` drafts in each row, `accepted` of them by live row, in `seconds`
    of wall clock, without what capturing took. `steady`: the time is what later rounds of that
    width will take too. `drafted`: how many of a row's drafts were meant, where they came from
    the host, the others only filled its place up; or verified, of more, where rows were cut
    (cutting.py), `width` of a row on average. None: all. `asking`: the part of the seconds
    in which the host looked for drafts, whether it found any or not, and the device waited for it,
    though it would not have waited for a round without a look. `rows`: those that
    `accepted` is of; none if they are the last outlook's samples. `capturing`: what capturing
    took, beside the seconds. `capacity`: rows that the batch has (0: whoever asks knows).
    `waiting`: how long the device waited before it, beside the seconds too, since the controller
    had to know the last round's tokens first."""

    width: int
    accepted: tuple[int, ...]
    seconds: float
    steady: bool = True
    drafted: tuple[int, ...] | None = None
    lookup_seconds: float = 0.0
    rows: tuple[Hashable, ...] = ()
    capturing: float = 0.0
    capacity: int = 0
    waiting: float = 0.0

    @property
    def num_drafts(self) -> tuple[int, ...]:
        """Of each row, how many of its drafts were meant."""
        return (self.width,) * len(self.accepted) if self.drafted is None else self.drafted

    @property
    def went_well(self) -> bool:
        """Whether most of those that were meant were kept."""
        return sum(map(min, self.accepted, self.num_drafts)) > sum(self.num_drafts) / 2


class SkippedDrafts(NamedTuple):
    """What has become of drafts of the host's that nobody verified: by draft, how many of its
    tokens the row went on to have (`accepted`) before the first that it did not, of how many
    (`meant`)."""

    accepted: tuple[int, ...]
    num_drafts: tuple[int, ...]


class PendingWork(NamedTuple):
    """What a scheduler knows of the rest of its job: `tokens` of samples that wait for a row;
    how many a sample is likely to have (`typical`)."""

    tokens: float = 0.0
    typical: float = math.inf


NO_PENDING_WORK = PendingWork()


class ControllerInput(NamedTuple):
    """What lies before a controller. `left`: tokens that each row of the batch may still generate,
    its share of those of waiting samples included; `entries`: seconds that a draft length costs
    once, on top of its rounds (beyond the end as there: longer drafts are made by the longest
    graph; none: nothing); `catch_up`: seconds that drafting costs once after plain rounds;
    `context`: tokens of the mean row, None if nobody knows; `samples`: which ones the rows are;
    `rooms`: tokens that each of them may still get; `colds`: the part of the entries that comes
    before anything is learnt of a length; `stops`: the drafting will be ended where it is no longer
    worth it, so a length is only the most there can be; `free`: no draft is made in the round, the
    host only looks for some, and `trim` has the last word on the length; `foregone`: what is known
    since the last outlook of drafts that were not verified; `padded`: rows of the graph that serves
    a round, dummies included, 0 if none does."""

    left: float = math.inf
    one_time_costs: tuple[float, ...] = ()
    catch_up: float = 0.0
    context: float | None = None
    samples: tuple[Hashable, ...] = ()
    rooms: tuple[int, ...] = ()
    warmup_costs: tuple[float, ...] = ()
    stops: bool = False
    free: bool = False
    skipped: SkippedDrafts | None = None
    padded: int = 0

    def one_time_cost(self, length: int) -> float:
        """Seconds that a draft length costs once."""
        once = (
            self.one_time_costs[min(length, len(self.one_time_costs) - 1)]
            if self.one_time_costs
            else 0.0
        )
        return once + (self.catch_up if length else 0.0)

    def warmup_cost(self, length: int) -> float:
        """The part of a draft length's entry before anything is learnt of it; 0 for plain decoding,
        of which nothing has to be learnt."""
        return (
            self.warmup_costs[min(length, len(self.warmup_costs) - 1)]
            if length and self.warmup_costs
            else 0.0
        )


DEFAULT_INPUT = ControllerInput()


class FollowsRows(Protocol):
    """Keeps its state of rows in step with the batch. `version` changes whenever something that
    a captured graph reads has moved to another address."""

    @property
    def version(self) -> int: ...

    def follow(self, change: Change) -> None:
        """Rows of the batch have ended, moved and begun."""


class Target(FollowsRows, Protocol):
    """The model that is sampled: model/runner.py, or a toy law in a test. It keeps what it was
    fed, by row."""

    def open(self, key: str, tokens: Sequence[int], in_time: InTime | None = None) -> bool:
        """As Drafter.open."""

    def close(self, key: str) -> None:
        """No further row will attach to this prompt."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        ends: Sequence[int] | None,
        *,
        last: int | None = None,
    ) -> Tensor:
        """Logits [B, W, V] after tokens [B, W] at their positions [B, W]; of the `last` places
        only, if that is given. `ends`: each live row's length after them, where the host knows
        it."""


@runtime_checkable
class TakesPacked(Protocol):
    """A target that takes as many tokens of each row as that has."""

    def forward_packed(
        self, tokens: Tensor, positions: Tensor, packed: ops.Packed, ends: Sequence[int] | None
    ) -> Tensor:
        """Logits [M, V] after tokens [M] at their positions [M], rows one after the other.
        `ends`: of each live row, as Target.forward's, or more."""


class Drafter(FollowsRows, Protocol):
    """Proposes tokens for the rows of a batch. `longest`: the most that it ever proposes.

    `on_device`: `propose` reads and writes nothing but device tensors at addresses that only
    change with `version`, so that it can be captured. Otherwise it works on the host, before
    anything of the round runs.
    """

    @property
    def on_device(self) -> bool: ...

    @property
    def longest(self) -> int: ...

    def open(
        self,
        key: str,
        tokens: Sequence[int],
        reference: Sequence[int] = (),
        in_time: InTime | None = None,
    ) -> bool:
        """A prompt begins: rows will attach to it. `reference`: the tokens of a text that its
        samples may resemble. `in_time` is asked before each pass of a model whether so many
        tokens can still be taken in; if not, nothing is kept, and this is False."""

    def close(self, key: str) -> None:
        """No further row will attach to this prompt."""

    def propose(self, batch: Batch, length: int) -> Proposal:
        """Up to `length` tokens for every row of the batch; from the host for every live row,
        with counts, in its memory or the device's, called before each round that may draft, and
        past tokens decide."""


@runtime_checkable
class CatchesUp(Protocol):
    """A drafter that has to take in what it missed in rounds without its drafts."""

    def expect(self, batch: Batch, length: int) -> int:
        """What the host has to do before every `propose(batch, length)`, and with length 0
        before every round without. Returns how many tokens, right before each row's last two,
        `catch_up` has to take in first."""

    def catch_up(self, batch: Batch, behind: Tensor, count: int) -> None:
        """Take in the `count` tokens of every row that begin `behind` ([] int64) tokens before
        its end; any that are known already do no harm, if those before them are known. It can be
        captured, as `propose` on the device."""

    def reaches(self, before: int, length: int) -> bool:
        """Whether `length` tokens can be proposed, with nothing taken in meanwhile, behind a round
        of `before` drafts whose tokens nobody knows yet."""


@runtime_checkable
class DraftsAtOnce(Protocol):
    """A drafter on the device that proposes all tokens of a round in one pass of its model, so
    that a longer draft takes no more passes. Under shared coupling its proposals have scores."""

    @property
    def at_once(self) -> bool: ...


@runtime_checkable
class Learns(Protocol):
    """A drafter that learns from what rows become."""

    def learn(self, batch: Batch) -> None:
        """Take in what the live rows have become. Called once a round: before `propose`, or,
        where a device would wait for it, while the round runs; then what is proposed next does
        not know of that round's tokens."""

    def forget(self) -> None:
        """Nothing is known any more of how well drafts stand."""


@runtime_checkable
class Recalls(Protocol):
    """A drafter on the host that finds out what drafts would have been worth that nobody
    verified."""

    def skip_last(self) -> None:
        """What was proposed last is not verified."""

    def recall(self) -> SkippedDrafts | None:
        """What has become of it, once that is known; each draft is told of once."""


@runtime_checkable
class StopsShort(Protocol):
    """A drafter that can be stopped inside a round."""

    def propose_while(
        self, batch: Batch, length: int, goes_on: Callable[[Tensor], bool]
    ) -> Proposal:
        """Up to `length` tokens for every row. After each step `goes_on` is told with what
        probability (at temperature 1) the draft has chosen the rows' tokens, [B] float32, and
        says whether there is to be another one."""


@runtime_checkable
class CapturesPrompts(Protocol):
    """A target or drafter whose passes over prompts can be captured."""

    def prepare_prompts(self) -> None:
        """Capture them now, rather than when they are first met."""


class DraftLength(Protocol):
    """A draft-length controller. It sees past rounds only, never a token, so it may gate either
    coupling. `exact`: a round has the very length that was given, not a near one that happens to
    be captured; else the controller would see another algorithm's rounds."""

    @property
    def exact(self) -> bool: ...

    def next(self, rows: int, inputs: ControllerInput = DEFAULT_INPUT) -> int:
        """Draft length for the next round of `rows` live rows; 0 means plain decoding. The
        outlook's seconds depend on timings: a controller that is used under maximal coupling
        must not look at them."""

    def observe(self, done: RoundResult) -> None:
        """A round has ended."""


@runtime_checkable
class Trims(Protocol):
    """A controller that has a say once it is known what the host found; without it all that
    there is is drafted."""

    def trim(self, counts: Sequence[int]) -> int:
        """Draft length for the round that `next` was asked about, now that it is known how many
        drafts (not all 0) the host has for each live row."""


@runtime_checkable
class Foresees(Protocol):
    """A controller that need not always wait for the last round before it says the next length;
    any other one does."""

    @property
    def drafts(self) -> bool:
        """Whether the next length may be above 0: a host that drafts must have the last round's
        tokens then."""

    def needs(self, width: int) -> bool:
        """Whether the next length depends on what the round of `width` drafts brings that is
        under way."""

    def reflect(self) -> None:
        """Work that can be done while the device runs the round that was decided last."""


@runtime_checkable
class StopsDrafts(Protocol):
    """A controller that can also say inside a round, under shared coupling, when to stop
    drafting."""

    def least(self, drafted: int) -> float:
        """The share of the live rows that must be expected to keep all of so many drafts for one
        more to be worth it."""
