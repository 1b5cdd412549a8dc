"""What crosses between the engine and the parts it works with: a target, a drafter, a draft-length
controller.

Data records, and the base classes `Drafter` and `DraftLength`. A subclass overrides what it can
do; every other method has a default that does nothing. Not here: a round (round.py).
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol

import numpy
from numpy.typing import NDArray
from torch import Tensor

import bass_kernels as ops
from bass_cli.engine.batch import Batch, Change

InTime = Callable[[int], bool]
# Of all tokens but the first [T - 1], and entries of the likeliest tokens [T - 1, K]
PromptLogprobs = tuple[NDArray[numpy.float32], NDArray[numpy.int64]]


class Proposal(NamedTuple):
    """The draft tokens of one round.

    tokens: [B, k] int64. k may be smaller than the requested draft length, also 0.
    probs: the distributions [B, k, V] that the tokens were sampled from, for maximal coupling with
        a draft model. None for point masses and for shared coupling.
    num_drafts: drafts of each live row, for point masses of unequal number; the tokens after them
        are padding. None if every row has k drafts.
    scores: [B, k] float32, the draft's log-probability of each token at temperature 1. None if
        unknown.
    """

    tokens: Tensor
    probs: ops.Distribution | None
    num_drafts: tuple[int, ...] | None = None
    scores: Tensor | None = None

    def by_row(self) -> list[list[int]]:
        """Return the drafts of each row of a proposal with `num_drafts`."""
        assert self.num_drafts is not None
        lines = zip(self.tokens.tolist(), self.num_drafts, strict=True)
        return [tokens[:count] for tokens, count in lines]

    @classmethod
    def empty(cls, batch: Batch) -> Proposal:
        """Return a proposal without drafts."""
        return cls(batch.tokens.new_zeros(batch.rows, 0), None)


class Verdict(NamedTuple):
    """The result of verification.

    accepted: [B] int64, accepted drafts of each row.
    block: [B, k + 1] int64, the tokens to append, valid up to and including index `accepted`,
        which holds the recovered or bonus token.
    scores: [B, k + 1] float32, the target's log-probabilities of the block.
    processed: [B, k + 1, V], the logits after the rows' processors.
    """

    accepted: Tensor
    block: Tensor
    scores: Tensor
    processed: Tensor


class RoundResult(NamedTuple):
    """What one round did, as controllers see it.

    width: draft length of the round.
    accepted: accepted drafts of each live row.
    seconds: wall-clock time, without graph capture.
    steady: whether later rounds of this width will take as long.
    drafted: drafts of each row if they differ: those that the host found, or those that were
        verified after cutting (verify.py). None if every row had `width`.
    lookup_seconds: the part of `seconds` in which the device waited for the host to look up drafts.
    rows: the samples that `accepted` belongs to; empty if they are those of the last
        ControllerInput.
    capturing: seconds of graph capture, not included in `seconds`.
    capacity: rows of the batch; 0 if not filled in.
    waiting: seconds, not included in `seconds`, in which the device waited because the controller
        needed the tokens of the round before.
    plain: seconds of a plain round of the same rows by the controller's measured costs; 0 if
        unknown.
    padded: rows of the graph that ran, padding included; 0 if not filled in, or without a graph.
    wanted: the draft length that the controller returned for this round; -1 if not filled in. A
        round has another one if a row has too little room, or if a near graph serves it.
    refills: whether samples waited for a row when the round began, or more prompts might be there;
        False if not filled in.
    """

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
    plain: float = 0.0
    padded: int = 0
    wanted: int = -1
    refills: bool = False

    @property
    def num_drafts(self) -> tuple[int, ...]:
        """Drafts of each row."""
        return (self.width,) * len(self.accepted) if self.drafted is None else self.drafted

    @property
    def mostly_accepted(self) -> bool:
        """Whether more than half of the drafts were accepted."""
        return sum(map(min, self.accepted, self.num_drafts)) > sum(self.num_drafts) / 2


class SkippedDrafts(NamedTuple):
    """What became of host drafts that verification skipped, one entry per draft sequence.

    accepted: leading tokens that the row went on to generate itself.
    num_drafts: tokens of the draft of which that is known.
    """

    accepted: tuple[int, ...]
    num_drafts: tuple[int, ...]


class PendingWork(NamedTuple):
    """The rest of the job. `tokens`: expected tokens of samples that wait for a row. `typical`:
    expected length of a sample, in tokens."""

    tokens: float = 0.0
    typical: float = math.inf


NO_PENDING_WORK = PendingWork()


class ControllerInput(NamedTuple):
    """What a controller may use to choose the next draft length.

    left: tokens that each row of the batch may still generate, with its share of waiting samples.
    one_time_costs: seconds that a draft length costs once, on top of its rounds. A length beyond
        the end costs as much as the last one. Empty: nothing.
    catch_up: seconds that drafting costs once after plain rounds.
    context: mean number of tokens of the rows; None if unknown.
    samples: the samples that the rows hold.
    rooms: tokens that each row may still generate.
    warmup_costs: the part of the one-time costs before the first measurement of a length.
    stops: whether drafting may end early inside the round, so that a length is only an upper bound.
    free: whether the round drafts nothing itself because the host looks drafts up. Then `trim`
        makes the final choice of the length.
    skipped: what became of drafts that verification skipped, since the last ControllerInput.
    padded: rows of the graph that serves the round, padding included; 0 without a graph.
    """

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
        costs = self.one_time_costs
        once = costs[min(length, len(costs) - 1)] if costs else 0.0
        return once + (self.catch_up if length else 0.0)

    def warmup_cost(self, length: int) -> float:
        """Seconds before the first measurement of a draft length; 0 for plain decoding."""
        costs = self.warmup_costs
        return costs[min(length, len(costs) - 1)] if length and costs else 0.0


DEFAULT_INPUT = ControllerInput()


class FollowsRows(Protocol):
    """Keeps per-row state in step with the batch. `version` changes when memory that a captured
    graph reads moves to another address."""

    @property
    def version(self) -> int: ...

    def follow(self, change: Change) -> None:
        """Apply a change of the batch's rows: some ended, moved or began."""


class Target(FollowsRows, Protocol):
    """The model that is sampled (models/runner.py), or a known distribution in a test. It keeps a
    cache per row. `packs`: whether it has `forward_packed`."""

    @property
    def packs(self) -> bool: ...

    def open(
        self,
        key: str,
        tokens: Sequence[int],
        in_time: InTime | None = None,
        *,
        logprobs: int | None = None,
    ) -> bool:
        """Read a prompt, as Drafter.open. `logprobs`: see Runner.open."""

    def prefill_all(self) -> None:
        """Read all open prompts now, not when a row of theirs begins."""

    def prompt_logprobs(self, key: str) -> PromptLogprobs | None:
        """Return the log-probabilities of an open prompt's tokens: see Runner.prompt_logprobs."""

    def close(self, key: str) -> None:
        """Forget a prompt; no further row will use it."""

    def prepare_prompts(self) -> None:
        """Capture the passes over prompts now rather than when they are first needed."""

    def capture_early(self) -> None:
        """Capture each pass over prompts when its size first comes: more requests follow."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        ends: Sequence[int] | None,
        *,
        last: int | None = None,
    ) -> Tensor:
        """Run tokens [B, W] at positions [B, W].

        Args:
            ends: each live row's length afterwards; None if the host does not know it.
            last: return logits of the last `last` places only.

        Returns: logits [B, W, V], or [B, last, V].
        """

    def forward_packed(
        self, tokens: Tensor, positions: Tensor, packed: ops.Packed, ends: Sequence[int] | None
    ) -> Tensor:
        """Run tokens [M] at positions [M], row after row: a different number for each row.

        Args:
            ends: as in Target.forward, or an upper bound.

        Returns: logits [M, V].
        """


class Drafter(ABC):
    """Proposes tokens for the rows of a batch. Only `propose` must be overridden.

    on_device: whether `propose` works on device tensors only, at addresses that change only with
        `version`, so that it can be captured. Otherwise it runs on the host before the round.
    longest: the largest number of tokens that it proposes. Default: no limit.
    version: changes when memory that a captured graph reads moves.
    at_once: whether one pass of its model proposes all tokens of a round, so that a longer draft
        takes no more passes. Under shared coupling such proposals have scores.
    catches_up: whether it must read tokens of rounds that ran without its drafts.
    stops_short: whether drafting can be ended inside a round, by `propose_while`.
    """

    on_device: bool = True
    longest: int = sys.maxsize
    at_once: bool = False
    catches_up: bool = False
    stops_short: bool = False

    @property
    def version(self) -> int:
        return 0

    @abstractmethod
    def propose(self, batch: Batch, length: int) -> Proposal:
        """Return up to `length` tokens for every row of the batch. On the host: for every live row,
        with `num_drafts`; it is called before each round that may draft."""

    def open(
        self,
        key: str,
        tokens: Sequence[int],
        reference: Sequence[int] = (),
        in_time: InTime | None = None,
    ) -> bool:
        """Read a prompt that rows will attach to.

        Args:
            reference: tokens of a text that samples may resemble.
            in_time: called before each pass with its number of tokens. If it returns False, the
                prompt is given up.

        Returns: False if the prompt was given up; nothing is kept then.
        """
        return True

    def close(self, key: str) -> None:
        """Forget a prompt; no further row will use it."""

    def follow(self, change: Change) -> None:
        """Apply a change of the batch's rows."""

    def prepare_prompts(self) -> None:
        """Capture the passes over prompts now rather than when they are first needed."""

    def capture_early(self) -> None:
        """Capture each pass over prompts when its size first comes: more requests follow."""

    def expect(self, batch: Batch, length: int) -> int:
        """Prepare for `propose(batch, length)`; with length 0 for a round without drafts.

        Returns: tokens, right before each row's last two, that `catch_up` must read first.
        """
        return 0

    def catch_up(self, batch: Batch, behind: Tensor, count: int) -> None:
        """Read `count` tokens of every row that begin `behind` ([] int64) tokens before its end.
        Reading known tokens again is harmless. It can be captured, like `propose`."""
        raise NotImplementedError

    def reaches(self, before: int, length: int) -> bool:
        """Return whether `length` tokens can be proposed right after a round of `before` drafts
        whose result the host has not seen yet."""
        return True

    def learn(self, batch: Batch) -> None:
        """Learn from the live rows' new tokens. It is called once a round: before `propose`, or
        while the device is busy, so that the next proposal does not know that round's tokens."""

    def forget(self) -> None:
        """Forget how often drafts were accepted."""

    def skip_last(self) -> None:
        """Note that the last proposal will not be verified."""

    def recall(self) -> SkippedDrafts | None:
        """Return what became of skipped proposals, each one once; None if nothing new is known."""
        return None

    def propose_while(
        self, batch: Batch, length: int, goes_on: Callable[[Tensor], bool]
    ) -> Proposal:
        """Return up to `length` tokens for every row. After each step `goes_on` receives the
        draft's probability [B] float32 of the tokens it chose, at temperature 1, and returns
        whether to draft another one."""
        raise NotImplementedError


class DraftLength(ABC):
    """A draft-length controller. It sees past rounds, never a token, so it may be used under both
    couplings. `next` and `observe` must be overridden.

    exact: whether a round must have exactly the length that was returned, not a near one that is
        captured already.
    stops: whether `least` says when drafting ends inside a round.
    """

    exact: bool = False
    stops: bool = False

    @property
    def plain(self) -> float:
        """Seconds of a plain round of the last rows, by measured costs; 0 if unknown."""
        return 0.0

    @abstractmethod
    def next(self, rows: int, inputs: ControllerInput = DEFAULT_INPUT) -> int:
        """Return the draft length for the next round of `rows` live rows; 0 is plain decoding.
        Under maximal coupling a controller must not use the seconds in `inputs`."""

    @abstractmethod
    def observe(self, done: RoundResult) -> None:
        """Take in the result of a round."""

    @property
    def drafts(self) -> bool:
        """Whether the next length may be above 0."""
        return True

    def needs_result(self, width: int) -> bool:
        """Return whether the next length depends on the result of the round of `width` drafts that
        is in flight. If not, it may be chosen before that round has ended."""
        return True

    def learned(self) -> object | None:
        """Return the cost surface (lengths/surface.py) that later jobs may begin from; None if
        nothing was learnt that is worth storing."""
        return None

    def reflect(self) -> None:
        """Do work that can be done while the device is busy."""

    def trim(self, num_drafts: Sequence[int]) -> int:
        """Return the draft length for this round, given the drafts that the host found for each
        live row (not all 0)."""
        return max(num_drafts)

    def least(self, drafted: int) -> float:
        """Return the share of live rows that must be expected to accept all of `drafted` drafts for
        one more to pay. Shared coupling only."""
        return 0.0
