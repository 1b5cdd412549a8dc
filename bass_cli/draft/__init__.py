"""Who proposes tokens: the Drafter protocol, and the drafter for a pair's `draft` setting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

import bass_kernels as ops
from bass_cli.drafts import parse_draft
from bass_cli.engine.batch import Batch
from bass_cli.model.runner import Runner

InTime = Callable[[int], bool]


class Proposal(NamedTuple):
    """tokens [B, k] int64: k may be smaller than asked for, 0 too. law [B, k, V]: what they were drawn from,
    under maximal coupling with a draft model; None means point masses, or shared coupling, which needs no laws. counts
    (point masses only, by live row): how many of a row's tokens are drafts; those after them only fill its place up. None:
    all are."""

    tokens: Tensor
    law: ops.Law | None
    counts: tuple[int, ...] | None = None


class Drafter(Protocol):
    """Proposes tokens for the rows of a batch, and keeps its own state of them in step with the batch.

    `on_device`: `propose` and `catch_up` read and write nothing but device tensors at addresses that only change with
    `version`, so that they can be captured; what the host must do before is in `prepare`. Otherwise drafts come from the
    host, by `offer`. `longest`: the most tokens it ever proposes.
    """

    on_device: bool
    longest: int

    @property
    def version(self) -> int: ...

    def open(self, key: str, tokens: Sequence[int], reference: Sequence[int] = (), in_time: InTime | None = None) -> bool:
        """A prompt begins: rows will attach to it. `reference`: the tokens of a text that its samples may resemble.
        `in_time` is asked before each pass of a model whether so many tokens can still be taken in; if not, nothing is
        kept, and this is False."""

    def close(self, key: str) -> None:
        """No further row will attach to this prompt."""

    def attach(self, row: int, key: str, count: int = 1) -> None:
        """Rows `row` to `row` + `count` - 1 of the batch begin with this prompt."""

    def detach(self, row: int) -> None:
        """Row `row` ends."""

    def move(self, source: int, target: int, length: int) -> None:
        """Row `source`, `length` tokens long, becomes row `target`."""

    def offer(self, batch: Batch, length: int) -> Proposal:
        """If not `on_device`: drafts for every live row, with counts, before anything of the round runs. Called before each
        round that may draft; past tokens decide."""

    def forget(self) -> None:
        """Nothing is known any more of how well drafts stand."""

    def learn(self, batch: Batch) -> None:
        """If not `on_device`: take in what the live rows have become. Called once a round: before `offer`, or, where a
        device would wait for it, while the round runs; then what is offered next does not know of that round's tokens."""

    def prepare(self, batch: Batch, length: int) -> int:
        """What the host has to do before every `propose(batch, length)`, and with length 0 before every round without.
        Returns how many tokens, right before each row's last two, `catch_up` has to take in first."""

    def catch_up(self, batch: Batch, behind: Tensor, count: int) -> None:
        """Take in the `count` tokens of every row that begin `behind` ([] int64) tokens before its end; any that are
        known already do no harm, if those before them are known."""

    def propose(self, batch: Batch, length: int) -> Proposal:
        """Up to `length` tokens for every row of the batch."""


class NoDrafter:
    """Proposes nothing: plain decoding."""

    on_device, longest, version = True, 0, 0

    def open(self, key: str, tokens: Sequence[int], reference: Sequence[int] = (), in_time: InTime | None = None) -> bool:
        return True

    def close(self, key: str) -> None:
        pass

    def attach(self, row: int, key: str, count: int = 1) -> None:
        pass

    def detach(self, row: int) -> None:
        pass

    def move(self, source: int, target: int, length: int) -> None:
        pass

    def offer(self, batch: Batch, length: int) -> Proposal:
        return Proposal(batch.tokens.new_zeros(len(batch), 0), None, (0,) * len(batch))

    def forget(self) -> None:
        pass

    def learn(self, batch: Batch) -> None:
        pass

    def prepare(self, batch: Batch, length: int) -> int:
        return 0

    def catch_up(self, batch: Batch, behind: Tensor, count: int) -> None:
        pass

    def propose(self, batch: Batch, length: int) -> Proposal:
        return Proposal(batch.tokens.new_zeros(batch.rows, 0), None)


def make_drafter(draft: str, *, runner: Runner | None, coupling: str, temperature: float | None) -> Drafter:
    """The drafter for a pair's `draft` (bass_cli/drafts.py). `runner` (lag 2) holds its model, if it has one: a draft
    model, or the target with layers skipped."""
    from .lookup import LookupDrafter
    from .model import ModelDrafter

    sources, model = parse_draft(draft)
    if model is None:
        return LookupDrafter(sources) if sources else NoDrafter()
    assert runner is not None
    return ModelDrafter(runner, coupling=coupling, temperature=temperature)
