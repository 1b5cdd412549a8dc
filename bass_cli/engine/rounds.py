"""What rounds do on the device: draft, verify, accept, commit; as a function that can be captured,
or at once.

Not here: what the next round is to be (next_round.py), when one is launched and what becomes of
what it brought (step.py), the arithmetic (verify.py, cutting.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from bass_cli.engine.batch import Batch
from bass_cli.engine.contracts import (
    Drafter,
    DraftsAtOnce,
    Lengths,
    Proposal,
    StopsShort,
    TakesPacked,
    Target,
)
from bass_cli.engine.cutting import Cut, Cutting
from bass_cli.engine.graph_policy import Shape, kind_of
from bass_cli.engine.offers import Offers
from bass_cli.engine.stopping import Stopping
from bass_cli.engine.verify import Verifier


class Rounds:
    """Those of one loop. `cut`: where rows' drafts may be cut (None: nowhere), if drafter and
    target can do that; `may_stop`: a draft may be ended inside a round where it is no longer worth
    it, if the drafter can do that (`stops`)."""

    def __init__(
        self,
        batch: Batch,
        target: Target,
        drafter: Drafter,
        verifier: Verifier,
        *,
        cut: Cut | None,
        may_stop: bool,
    ):
        self._batch, self._drafter, self._verifier = batch, drafter, verifier
        self.stops = may_stop and isinstance(drafter, StopsShort)
        self._stopping = Stopping() if self.stops else None
        self._cutting: Cutting | None = None
        able = isinstance(drafter, DraftsAtOnce) and isinstance(target, TakesPacked)
        if cut is not None and able:
            self._cutting = Cutting(cut, batch.device)

    def cuts(self, rows: int, width: int) -> bool:
        """Whether rounds of so many rows, dummies included, that verify `width` drafts of each on
        average choose these from more."""
        return self._cutting is not None and self._cutting.pays(rows, width)

    def drafted(self, shape: Shape) -> int:
        """How many tokens a round of this shape drafts for each row."""
        if shape.kind != "cut":
            return shape.width
        assert self._cutting is not None
        return self._cutting.drafted(shape.width)

    def function(self, shape: Shape, offers: Offers) -> Callable[[], Tensor]:
        """What a graph of this shape does; `offers`: what there is from the host."""
        check, drafter, batch = self._verifier.check, self._drafter, self._batch
        if shape.kind == "cut":
            return lambda: self._part(shape)
        if not drafter.on_device:
            return lambda: check(offers.placed(shape.rows, shape.width), bounded=True)
        return lambda: check(drafter.propose(batch, shape.width), bounded=shape.width > 0)

    def planned(self, width: int, *, cut: bool) -> Shape:
        """The shape of a round of the live rows that is not captured."""
        return Shape("cut" if cut else kind_of(self._drafter), len(self._batch), width)

    def run(self, shape: Shape, offered: Proposal | None, lengths: Lengths) -> tuple[Tensor, Shape]:
        """A round that is not captured, with these drafts of the host's (None: the device's own):
        what it brought, on the host; and the shape with the draft length that it came to."""
        if shape.kind == "cut":
            return self._part(shape).cpu(), shape
        if offered is None:
            offered = (
                self._drafter.propose(self._batch, shape.width)
                if self._stopping is None
                else self._stopping.propose(self._drafter, self._batch, shape.width, lengths)
            )
        width = offered.tokens.shape[1]
        return self._verifier.check(offered).cpu(), shape._replace(width=width)

    def observe(self, accepted: Sequence[int]) -> None:
        """What the rows kept of the last round's drafts."""
        if self._stopping is not None:
            self._stopping.observe(accepted)

    def _part(self, shape: Shape) -> Tensor:
        assert self._cutting is not None
        proposal = self._drafter.propose(self._batch, self._cutting.drafted(shape.width))
        return self._verifier.check_part(proposal, shape.width, self._cutting)
