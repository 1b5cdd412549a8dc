"""What the target says of the drafts: its pass over them, and a Verdict by one function for each
coupling. The arithmetic is in the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

import bass_kernels as ops
from bass_cli.engine.batch import Batch
from bass_cli.engine.contracts import Proposal, TakesPacked, Target, Verdict
from bass_cli.engine.cutting import Cutting
from bass_cli.engine.sampling_params import SamplingParams
from bass_cli.engine.simulated_acceptance import SimulatedAcceptance

ALL = 2**31 - 1  # more drafts than any round has


class Verifier:
    """Verify the drafts of one loop: its target, the coupling, and simulated acceptance if set."""

    def __init__(
        self,
        batch: Batch,
        target: Target,
        *,
        coupling: str,
        simulated_acceptance: SimulatedAcceptance | None,
    ):
        self._batch, self._target = batch, target
        self._coupling, self._simulated_acceptance = coupling, simulated_acceptance
        # How many of a row's drafts a captured round looks at: on the host, and where graphs
        # read it.
        self.most, self._bound = ALL, batch.tokens.new_full((), ALL)

    def look_at(self, most: int) -> None:
        """From now on bounded passes take so many drafts of a row for all there are."""
        if most != self.most:
            self.most = most
            self._bound.fill_(most)

    def check(self, proposal: Proposal, *, bounded: bool = False) -> Tensor:
        """The target's pass over the rows' pending tokens and the drafts, judged and committed;
        what the host needs to know of it, as one table that is copied at once: [B, 2k + 3]
        int64, how many drafts were accepted; the block of k + 1 tokens, valid up to and
        including that place; and the bits of their log-probabilities."""
        batch, width = self._batch, proposal.tokens.shape[1]
        tokens, positions = batch.pending(proposal.tokens)
        verdict = judge(
            proposal,
            self._target.forward(tokens, positions, batch.ends(width)),
            batch,
            coupling=self._coupling,
            simulated_acceptance=self._simulated_acceptance,
            most=self._bound if bounded else None,
        )
        return batch.report(verdict.block, verdict.accepted, verdict.scores)

    def check_part(self, proposal: Proposal, each: int, cutting: Cutting) -> Tensor:
        """The same of only the likeliest drafts, `each` of a row on average: shared coupling, a
        target that takes them packed, a proposal with scores. The table has one more column at
        its end, how many drafts of a row were verified."""
        batch, (rows, width) = self._batch, proposal.tokens.shape
        assert isinstance(self._target, TakesPacked)
        lengths, alive = batch.lengths[:rows], batch.alive
        chosen = cutting.choose(proposal, rows * each, batch.last(1)[0], lengths, alive)
        packed = chosen.packed
        logits = self._target.forward_packed(
            chosen.tokens, chosen.places - 1, packed, batch.ends(width)
        )
        found = _chosen(logits, batch.params.of(packed.row), chosen.places)
        accepted, table = cutting.settle(proposal, chosen, found, alive)
        batch.commit(table[:, 1 : width + 2], accepted)
        return table


def judge(
    proposal: Proposal,
    logits: Tensor,
    batch: Batch,
    *,
    coupling: str,
    simulated_acceptance: SimulatedAcceptance | None,
    most: Tensor | None = None,
) -> Verdict:
    """By "shared" or "maximal" coupling, or as an acceptance that is set has it (see `imposed`).
    `most` ([] int64): the drafts of a row that are there for the round, as if the others had not
    been proposed; None: all."""
    drafts, law = proposal.tokens, proposal.probs
    if simulated_acceptance is not None:
        return simulated(drafts, logits, batch, simulated_acceptance, most)
    if coupling == "shared":
        return shared(drafts, logits, batch.params, batch.places(0, logits.shape[1]), most)
    return maximal(drafts, law, logits, batch.params, batch.lengths[: batch.rows], most)


def shared(
    drafts: Tensor, logits: Tensor, params: SamplingParams, places: Tensor, most: Tensor | None
) -> Verdict:
    """Shared coupling: drafts [B, k] against the target's own choices from logits [B, k + 1, V]
    with the noise of their positions, places [B, k + 1]."""
    targets, scores = _choices(logits, params, places)
    return Verdict(ops.accept_shared(drafts, targets, most), targets, scores)


def simulated(
    drafts: Tensor,
    logits: Tensor,
    batch: Batch,
    simulated_acceptance: SimulatedAcceptance,
    most: Tensor | None,
) -> Verdict:
    """For benchmarks of random weights only: does shared coupling's work, then accepts what
    `imposing` says, whatever the target says."""
    width = logits.shape[1]
    places = batch.places(0, width)
    targets, scores = _choices(logits, batch.params, places)
    ops.accept_shared(drafts, targets)
    accepted = simulated_acceptance.accepted(places[:, :-1])
    accepted = accepted if most is None else torch.minimum(accepted, most)
    kept = batch.steps(0, width) < accepted[:, None]
    block = torch.where(kept, torch.nn.functional.pad(drafts, (0, 1)), targets)
    return Verdict(accepted, block, scores)


def _choices(logits: Tensor, params: SamplingParams, places: Tensor) -> tuple[Tensor, Tensor]:
    """The target's tokens at places [B, W] under shared coupling, and their log-probabilities,
    [B, W] each."""
    tokens, scores = _chosen(logits.flatten(0, 1), params, places.flatten())
    return tokens.view(places.shape), scores.view(places.shape)


def _chosen(logits: Tensor, params: SamplingParams, places: Tensor) -> tuple[Tensor, Tensor]:
    """The same of logits [N, V] by laws of N / B places each, at places [N]: [N] each."""
    tokens, scores = ops.sample_scored(
        logits, params.temperature, params.top_k, params.top_p, params.keys, places
    )
    return tokens, scores


def maximal(
    drafts: Tensor,
    law: ops.Distribution | None,
    logits: Tensor,
    params: SamplingParams,
    lengths: Tensor,
    most: Tensor | None,
) -> Verdict:
    """Maximal coupling: drafts [B, k] drawn from law [B, k, U] (None: point masses), U at most
    V, against the processed laws of logits [B, k + 1, V]; lengths [B] is the position of the
    first draft."""
    accepted, _following, block, scores = ops.rejection_sample(
        drafts,
        law,
        logits,
        params.temperature,
        params.top_k,
        params.top_p,
        params.keys,
        lengths,
        most,
    )
    return Verdict(accepted, block, scores)
