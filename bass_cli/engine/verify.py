"""The work of a round on the device: drafting, the target's pass, and a Verdict by one function for
each coupling.

`RoundExecutor` does that work, captured or not. `EarlyStopping` ends drafting early, and `Cut` says
when only the likeliest drafts of a batch are verified. `SimulatedAcceptance` replaces the verdict
in benchmarks with random weights. Not here: what the next round is (round.py), the arithmetic
(kernels).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import bass_kernels as ops
from bass_cli.engine.batch import Batch, Change
from bass_cli.engine.contracts import Drafter, DraftLength, Proposal, Target, Verdict
from bass_cli.engine.graphs import Shape, Stages
from bass_cli.engine.host_state import Report
from bass_cli.engine.round import HostDrafts, TokenMasks
from bass_cli.engine.sampling import SamplingParams, noise_key
from bass_cli.engine.sizes import LONGEST
from bass_cli.models.capture import Running

ALL = 2**31 - 1  # no bound: more drafts than any round has


class RoundExecutor:
    """The work of one loop's rounds on the device: drafting, the target's pass over the pending
    tokens and the drafts, the verdict, and its commit.

    The result of a round is a table for the host, [B, 2k + 3] int64: the number of accepted drafts;
    the block of k + 1 tokens, valid up to and including that index; the bits of their
    log-probabilities. More columns are the entries of the round's report, if it has any, and if the
    round was cut, last, the number of verified drafts.

    most: the most drafts of a row that a captured round verifies.

    Args:
        coupling: "shared" or "maximal".
        simulated: replaces the verdict. None: the coupling decides.
        cut: when to cut rows' drafts, if drafter and target support it. None: never.
        may_stop: allow drafting to end early inside a round, if the drafter supports it.
    """

    def __init__(
        self,
        batch: Batch,
        target: Target,
        drafter: Drafter,
        *,
        coupling: str,
        simulated: SimulatedAcceptance | None,
        cut: Cut | None,
        may_stop: bool,
    ):
        self._batch, self._target, self._drafter = batch, target, drafter
        self._coupling, self._simulated = coupling, simulated
        self._masks = TokenMasks(batch, defined=coupling == "maximal")
        self.most = ALL
        self._bound = batch.tokens.new_full((), ALL)  # the same, where graphs read it
        self.stops = may_stop and drafter.stops_short
        self._stopping = EarlyStopping() if self.stops else None
        self._cut = cut if cut is not None and drafter.at_once and target.packs else None
        self._confidence = prior_confidence(batch.device)

    def limit_drafts(self, most: int) -> None:
        """Verify at most `most` drafts of each row in captured rounds from now on."""
        if most != self.most:
            self.most = most
            self._bound.fill_(most)

    def cuts(self, rows: int, width: int) -> bool:
        """Return whether rounds of `rows` rows (padding included) draft more and verify only the
        likeliest, `width` of each row on average. Grammars need the masks of all drafts."""
        return not self._batch.masked and self._cut is not None and self._cut.pays(rows, width)

    def drafted(self, shape: Shape) -> int:
        """Return how many tokens a round of this shape drafts for each row."""
        if shape.kind != "cut":
            return shape.width
        assert self._cut is not None
        return self._cut.drafted(shape.width)

    def function(self, shape: Shape, host_drafts: HostDrafts) -> Callable[[], Tensor]:
        """Return what a graph of this shape does, or the Stages of several graphs.

        Args:
            host_drafts: where it reads drafts from the host.
        """
        drafter, batch = self._drafter, self._batch
        if shape.kind == "cut":
            return lambda: self._cut_round(shape)

        def propose() -> Proposal:
            if drafter.on_device:
                return drafter.propose(batch, shape.width)
            return host_drafts.placed(shape.rows, shape.width)

        bounded = not drafter.on_device or shape.width > 0
        if shape.masked:
            return self._stages(propose, shape, bounded=bounded)
        return lambda: self._check(propose(), shape, bounded=bounded)

    def _stages(self, propose: Callable[[], Proposal], shape: Shape, *, bounded: bool) -> Stages:
        """Return a round in which the host makes masks while the device runs the target."""
        proposal, logits = Proposal.empty(self._batch), self._bound

        def draft() -> Tensor:
            nonlocal proposal
            proposal = propose()
            return proposal.tokens.clone()  # host drafts lie at an address of their own

        def target() -> None:
            nonlocal logits
            logits = self._logits(proposal.tokens)

        def host(coming: Running) -> None:
            if shape.kind == "round":
                self._masks.follow(shape.width, coming.over)
            drafts = coming.wait()
            assert drafts is not None
            self._masks.fill(drafts[: len(self._batch)].tolist())

        def verdict() -> Tensor:
            return self._commit(proposal, logits, shape, bounded=bounded)

        return Stages(draft, target, host, verdict)

    def run(
        self, shape: Shape, drafts: Proposal | None, controller: DraftLength
    ) -> tuple[Tensor, Shape]:
        """Run a round without graphs.

        Args:
            drafts: drafts from the host; None if the device drafts.

        Returns: the result on the host, and the shape with the final draft length.
        """
        if shape.kind == "cut":
            return self._cut_round(shape).cpu(), shape
        if drafts is None:
            drafts = (
                self._drafter.propose(self._batch, shape.width)
                if self._stopping is None
                else self._stopping.propose(self._drafter, self._batch, shape.width, controller)
            )
        width = drafts.tokens.shape[1]
        return self._check(drafts, shape, bounded=False).cpu(), shape._replace(width=width)

    def observe(self, accepted: Sequence[int]) -> None:
        """Learn from the accepted drafts of each row in the last round."""
        if self._stopping is not None:
            self._stopping.observe(accepted)

    def _check(self, proposal: Proposal, shape: Shape, *, bounded: bool) -> Tensor:
        """Verify a proposal and commit what is accepted: of each row at most `most` drafts if
        `bounded`. Of the shape only the report is used."""
        logits = self._logits(proposal.tokens)
        if self._batch.masked:
            self._masks.fill(proposal.tokens.tolist())
        return self._commit(proposal, logits, shape, bounded=bounded)

    def _logits(self, drafts: Tensor) -> Tensor:
        """Run the target over the rows' pending tokens and drafts [B, k]; return [B, k + 1, V]."""
        tokens, positions = self._batch.pending(drafts)
        return self._target.forward(tokens, positions, self._batch.ends(drafts.shape[1]))

    def _commit(self, proposal: Proposal, logits: Tensor, shape: Shape, *, bounded: bool) -> Tensor:
        """Judge a proposal, commit what is accepted, and return the result for the host."""
        batch, width = self._batch, proposal.tokens.shape[1]
        verdict = judge(
            proposal,
            logits,
            batch,
            coupling=self._coupling,
            simulated=self._simulated,
            most=self._bound if bounded else None,
        )
        table = batch.report(verdict.block, verdict.accepted, verdict.scores)
        if not shape.report.columns:
            return table
        wanted = batch.steps(0, width + 1) <= verdict.accepted[:, None]
        entries = entries_of(
            shape.report,
            batch.params,
            logits.flatten(0, 1),
            verdict.processed.flatten(0, 1),
            verdict.block.flatten(),
            verdict.scores.flatten(),
            wanted.flatten(),
        )
        return torch.cat((table, *(part.view(len(table), -1) for part in entries)), 1)

    def _cut_round(self, shape: Shape) -> Tensor:
        """Draft, and verify only the likeliest drafts, `shape.width` of each row on average. It
        needs shared coupling and a proposal with scores."""
        batch = self._batch
        proposal = self._drafter.propose(batch, self.drafted(shape))
        drafts, scores = proposal.tokens, proposal.scores
        assert scores is not None
        (rows, width), alive = drafts.shape, batch.alive
        chances = ops.prefix_chances(scores, self._confidence, alive)
        tokens = torch.cat((batch.last(1)[0], drafts), 1)
        chosen = ops.choose_drafts(chances, rows * shape.width, tokens, batch.lengths[:rows])
        logits = self._target.forward_packed(
            chosen.tokens, chosen.places - 1, chosen.packed, batch.ends(width)
        )
        row, step = chosen.packed.row, chosen.packed.place
        processed = batch.process_packed(logits, row, step, drafts)
        params = batch.params.of(row)
        found = params.sample(processed, chosen.places)
        found = found[0], own_scores(logits, processed, *found)
        accepted, table = ops.accept_chosen(drafts, scores, chosen, *found, self._confidence, alive)
        batch.commit(table[:, 1 : width + 2], accepted)
        if not shape.report.columns:
            return table
        wanted = step <= accepted[row]
        entries = entries_of(shape.report, params, logits, processed, *found, wanted)
        by_row = (part[chosen.packed.by_row].flatten(1) for part in entries)
        return torch.cat((table[:, :-1], *by_row, table[:, -1:]), 1)


def entries_of(
    report: Report,
    params: SamplingParams,
    logits: Tensor,
    processed: Tensor,
    tokens: Tensor,
    scores: Tensor,
    wanted: Tensor,
) -> list[Tensor]:
    """Return the entries of a report's parts, [N, columns] int64 each.

    Args:
        logits, processed: [N, V], before and after the rows' processors.
        tokens, scores: [N], the token at each line's position, and its log-probability by `logits`.
        wanted: [N] bool. The result of other lines is arbitrary.
    """
    found = list[Tensor]()
    if report.top:
        found.append(ops.report_entries(logits, tokens, scores, report.top, wanted))
    if report.processed is not None:
        found.append(params.entries(processed, tokens, report.processed, wanted))
    return found


_BINS = 12  # confidence bins of equal width
_STRENGTH = 6.0  # prior: a confidence bin counts as this many observed drafts
_MEMORY = 0.995  # factor by which the weight of a round decays in each later round


class EarlyStopping:
    """Decide inside a round whether one more draft pays.

    Estimate the probability that each row accepts all of its drafts so far. It is the product of
    the acceptance rates of drafts of the same confidence, learnt in earlier rounds.
    """

    def __init__(self) -> None:
        middles = (torch.arange(_BINS) + 0.5) / _BINS
        self._accepted, self._trials = _STRENGTH * middles, torch.full((_BINS,), _STRENGTH)
        self._bins: list[Tensor] = []  # for each draft step, the bin of each row

    def propose(
        self, drafter: Drafter, batch: Batch, length: int, controller: DraftLength
    ) -> Proposal:
        """Return up to `length` drafts; fewer if drafter and controller can end drafting early and
        one more does not pay."""
        if not (length and drafter.stops_short and controller.stops):
            return drafter.propose(batch, length)
        least = controller.least
        self._bins, chance = [], torch.ones(len(batch))

        def goes_on(confidence: Tensor) -> bool:
            nonlocal chance
            self._bins.append((confidence.cpu() * _BINS).long().clamp(0, _BINS - 1))
            chance = chance * (self._accepted / self._trials)[self._bins[-1]]
            return float(chance.mean()) >= least(len(self._bins))

        return drafter.propose_while(batch, length, goes_on)

    def observe(self, accepted: Sequence[int]) -> None:
        """Learn from the accepted drafts of each row in the last proposal."""
        if not self._bins:
            return
        counts, bins = torch.tensor(accepted)[:, None], torch.stack(self._bins, 1)
        steps = torch.arange(bins.shape[1])
        self._accepted *= _MEMORY
        self._trials *= _MEMORY
        self._accepted += torch.bincount(bins[steps < counts], minlength=_BINS)
        self._trials += torch.bincount(bins[steps <= counts], minlength=_BINS)
        self._bins = []


def judge(
    proposal: Proposal,
    logits: Tensor,
    batch: Batch,
    *,
    coupling: str,
    simulated: SimulatedAcceptance | None,
    most: Tensor | None = None,
) -> Verdict:
    """Return the verdict by "shared" or "maximal" coupling, or by simulated acceptance if it is
    set. The rows' logits processors apply first; scores are of the logits before them.

    Args:
        most: [] int64, the number of drafts of each row that count, as if the others had not been
            proposed. None: all.
    """
    drafts, params, width = proposal.tokens, batch.params, logits.shape[1]
    processed = batch.process(logits, drafts)
    if coupling == "maximal":
        lengths = batch.lengths[: batch.rows]
        accepted, block, scores = params.verify(drafts, proposal.probs, processed, lengths, most)
        scores = own_scores(logits, processed, block, scores)
        return Verdict(accepted, block, scores, processed)
    positions = batch.positions(0, width)
    tokens, scores = params.sample(processed.flatten(0, 1), positions.flatten())
    targets, scores = tokens.view(positions.shape), scores.view(positions.shape)
    scores = own_scores(logits, processed, targets, scores)
    accepted = ops.accept_shared(drafts, targets, most)
    if simulated is None:
        return Verdict(accepted, targets, scores, processed)
    # The work of shared coupling, but accept what `simulated` says, whatever the logits are.
    accepted = simulated.accepted(positions[:, :-1])
    accepted = accepted if most is None else torch.minimum(accepted, most)
    is_draft = batch.steps(0, width) < accepted[:, None]
    block = torch.where(is_draft, torch.nn.functional.pad(drafts, (0, 1)), targets)
    return Verdict(accepted, block, scores, processed)


def own_scores(logits: Tensor, processed: Tensor, tokens: Tensor, scores: Tensor) -> Tensor:
    """Return the target's own log-probabilities of tokens [...]: those by its logits [..., V], at
    temperature 1. -inf where the processed logits have no distribution, because every token is
    forbidden.

    Args:
        processed: the logits that were sampled; the same tensor if nothing changed them.
        scores: the log-probabilities by them.
    """
    if processed is logits:
        return scores
    return ops.log_probability(logits, tokens) + torch.where(scores.isfinite(), 0.0, -torch.inf)


# Up to this many tokens in a pass one more costs almost nothing, so all drafts are verified. On an
# H200 a pass of a 7B over 8 / 64 / 128 / 256 tokens takes 4.2 / 5.0 / 6.0 / 8.9 ms. On a CPU every
# token costs time after the first few.
CHEAP = {"cpu": 16, "cuda": 64}


class Cut(NamedTuple):
    """When and how much to cut each row's drafts where the draft's own confidence is low: of all
    tokens that one pass drafts for the batch, the likeliest are verified, as many as a captured
    pass has room for.

    It needs shared coupling, where nothing that it uses affects the output, and a drafter that
    makes all drafts in one pass: drafts made one after the other have cost their time already.

    most: the largest number of tokens drafted for a row.
    above: a pass is cut only if verifying all drafts would take more tokens than this.
    more: how many more tokens are drafted for each row than are verified on average.
    """

    most: int
    above: int
    more: int

    def pays(self, rows: int, width: int) -> bool:
        """Return whether rounds of `rows` rows that verify `width` drafts of each on average are
        cut."""
        tokens = rows * (width + 1)
        return width > 0 and tokens > self.above and self.drafted(width) > width

    def drafted(self, width: int) -> int:
        """Return how many tokens are drafted for each row if `width` of each are verified on
        average; at least `width`."""
        return max(min(width + self.more, self.most), width)


def prior_confidence(device: torch.device) -> ops.ConfidenceStats:
    """Return what is known at first of how often drafts of each confidence are accepted. Cut rounds
    learn, captured ones too, so it stays at fixed addresses."""
    # P(reject) = (1 - confidence) / 2, because draft and target share their noise.
    middles = (torch.arange(ops.BINS, device=device) + 0.5) / ops.BINS
    accepted = _STRENGTH * (1 - middles * middles / 2)
    prior = torch.stack((accepted, torch.full_like(accepted, _STRENGTH)))
    accepted, trials = prior.clone()
    return ops.ConfidenceStats(accepted, trials, prior)


# The probability that a draft of a row is accepted: one number, or one for each position in the
# draft, of which the last applies to all positions after it.
Rate = float | tuple[float, ...]


class SimulatedAcceptance:
    """Accept each draft with its row's probability if all drafts before it were accepted: for
    benchmarks with random weights, whose output is meaningless.

    Whether the draft at a position is accepted is drawn once for a row's life. All draft lengths
    then have the same luck, and runs with one seed can be compared row by row. Rows take the
    `rates` in turn, beginning with the first row of an empty batch. If `rates` is replaced, the
    new values apply to rows that begin later. `version` changes when the table moves to another
    address.
    """

    def __init__(self, rates: Sequence[Rate], batch: Batch):
        self.rates, self._batch, self._begun = tuple(rates), batch, 0
        # By row and position: a draft there is accepted if this is below its probability.
        self._luck = torch.ones(batch.capacity, 0, device=batch.device)
        # By row and position in the draft: the probability.
        self._chances = torch.zeros(batch.capacity, LONGEST, device=batch.device)
        self.version = 0
        self._widen()

    def follow(self, change: Change) -> None:
        """Draw the luck of rows that begin, from their noise keys."""
        self._widen()
        for source, target in change.moved:
            self._luck[target] = self._luck[source]
            self._chances[target] = self._chances[source]
        begun = [(index, key) for indices, key in change.begun for index in indices]
        if len(begun) == len(self._batch):
            self._begun = 0
        for index, key in begun:
            row = self._batch.live_rows[index]
            first, second = noise_key(row.seed, key, row.sample)
            self._luck[index] = torch.rand(
                self._luck.shape[1],
                generator=torch.Generator().manual_seed(first << 31 | second >> 1),
            )
            self._chances[index] = _chances(self.rates[self._begun % len(self.rates)])
            self._begun += 1

    def accepted(self, positions: Tensor) -> Tensor:
        """Return the number of accepted drafts, [B] int64. positions: [B, k], of the drafts."""
        rows, width = positions.shape
        # Clamps only positions beyond a row's end.
        positions = positions.clamp(max=self._luck.shape[1] - 1)
        accepted = self._luck[:rows].gather(1, positions) < self._chances[:rows, :width]
        return accepted.long().cumprod(-1).sum(-1)

    def _widen(self) -> None:
        more = self._batch.tokens.shape[1] - self._luck.shape[1]
        if more > 0:
            self._luck = torch.nn.functional.pad(self._luck, (0, more), value=1.0)
            self.version += 1


def _chances(rate: Rate) -> Tensor:
    """Return the probability by position in the draft, [LONGEST] float32."""
    by_place = rate if isinstance(rate, tuple) else (rate,)
    return torch.tensor([*by_place, *by_place[-1:] * (LONGEST - len(by_place))][:LONGEST])
