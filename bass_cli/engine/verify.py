"""Verification: the target's pass over the drafts, and a Verdict by one function for each
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

ALL = 2**31 - 1  # no bound: more drafts than any round has


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
        # The most drafts of a row that a bounded pass verifies: on the host, and on the device
        # where graphs read it.
        self.most, self._bound = ALL, batch.tokens.new_full((), ALL)

    def look_at(self, most: int) -> None:
        """Verify at most `most` drafts of each row in bounded passes from now on."""
        if most != self.most:
            self.most = most
            self._bound.fill_(most)

    def check(self, proposal: Proposal, *, bounded: bool = False) -> Tensor:
        """Run the target over the pending tokens and the drafts, choose what is accepted, and
        commit it.

        Args:
            bounded: verify at most as many drafts as `look_at` has set.

        Returns: the table for the host, [B, 2k + 3] int64: the number of accepted drafts; the block
            of k + 1 tokens, valid up to and including that index; the bits of their
            log-probabilities.
        """
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
        """As `check`, but verify only the likeliest drafts, `each` of a row on average.

        It needs shared coupling, a target that takes packed rows and a proposal with scores. The
        table has one more column at the end: the number of drafts of each row that were verified.
        """
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
    """Return the verdict by "shared" or "maximal" coupling, or by simulated acceptance if it is
    set.

    Args:
        most: [] int64, the number of drafts of each row that count, as if the others had not been
            proposed. None: all.
    """
    drafts, probs = proposal.tokens, proposal.probs
    if simulated_acceptance is not None:
        return simulated(drafts, logits, batch, simulated_acceptance, most)
    if coupling == "shared":
        return shared(drafts, logits, batch.params, batch.places(0, logits.shape[1]), most)
    return maximal(drafts, probs, logits, batch.params, batch.lengths[: batch.rows], most)


def shared(
    drafts: Tensor, logits: Tensor, params: SamplingParams, places: Tensor, most: Tensor | None
) -> Verdict:
    """Shared coupling: accept drafts [B, k] while they equal the target's own samples.

    Args:
        logits: [B, k + 1, V] of the target.
        places: [B, k + 1], positions, which select the noise.
    """
    targets, scores = _choices(logits, params, places)
    return Verdict(ops.accept_shared(drafts, targets, most), targets, scores)


def maximal(
    drafts: Tensor,
    probs: ops.Distribution | None,
    logits: Tensor,
    params: SamplingParams,
    lengths: Tensor,
    most: Tensor | None,
) -> Verdict:
    """Maximal coupling (rejection sampling).

    Args:
        drafts: [B, k], sampled from `probs`.
        probs: [B, k, U] with U at most V; None for point masses.
        logits: [B, k + 1, V] of the target; `params` turns them into its distributions.
        lengths: [B], the position of the first draft.
        most: see `judge`.
    """
    accepted, _following, block, scores = ops.rejection_sample(
        drafts,
        probs,
        logits,
        params.temperature,
        params.top_k,
        params.top_p,
        params.keys,
        lengths,
        most,
    )
    return Verdict(accepted, block, scores)


def simulated(
    drafts: Tensor,
    logits: Tensor,
    batch: Batch,
    simulated_acceptance: SimulatedAcceptance,
    most: Tensor | None,
) -> Verdict:
    """For benchmarks with random weights: do the work of shared coupling, then accept what
    `simulated_acceptance` says, whatever the target's logits are."""
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
    """Return the target's tokens at places [B, W] under shared coupling, and their
    log-probabilities, [B, W] each."""
    tokens, scores = _chosen(logits.flatten(0, 1), params, places.flatten())
    return tokens.view(places.shape), scores.view(places.shape)


def _chosen(logits: Tensor, params: SamplingParams, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same for logits [N, V] at places [N], where each row of `params` serves N / B
    of them: [N] each."""
    tokens, scores = ops.sample_scored(
        logits, params.temperature, params.top_k, params.top_p, params.keys, places
    )
    return tokens, scores
