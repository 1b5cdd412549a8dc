"""Drafters with a model of their own, or the target with layers skipped: token by token, or all
drafts of a round in one pass; and how drafts are sampled under each coupling.

The first step of a round feeds each row's last tokens again: after full acceptance the cache lacks
the last draft, and otherwise feeding it only writes the same key. `catch_up` feeds the tokens of
rounds without drafts. A recurrent state cannot go back: there, each step of a round feeds the
tokens of all its steps again. Not here: drafters that read hidden states (heads.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy
import torch
from torch import Tensor

import bass_kernels as ops
from bass_cli.drafts.factory import DraftParts
from bass_cli.engine.batch import Batch, Change
from bass_cli.engine.contracts import Drafter, InTime, Proposal
from bass_cli.engine.sampling import SamplingParams
from bass_cli.models.recurrent import RecurrentStates
from bass_cli.models.runner import Runner


class ModelRows(Drafter):
    """The prompts and rows of a drafter with a model, and how far its cache reaches.

    Args:
        runner: the model, with 2 pending tokens.
        coupling: "shared" or "maximal".
        temperature: replaces the rows' own temperatures, unless theirs is 0.
    """

    catches_up = True

    def __init__(self, runner: Runner, *, coupling: str, temperature: float | None = None):
        assert runner.pending == 2
        self.runner, self._coupling, self._temperature = runner, coupling, temperature
        # By row: positions in the cache, those of rejected drafts included.
        self._fed = numpy.zeros(runner.rows, dtype=numpy.int64)

    def prepare_prompts(self) -> None:
        self.runner.prepare_prompts()

    def capture_early(self) -> None:
        self.runner.capture_early()

    @property
    def version(self) -> int:
        return self.runner.version

    def open(
        self,
        key: str,
        tokens: Sequence[int],
        reference: Sequence[int] = (),
        in_time: InTime | None = None,
    ) -> bool:
        return self.runner.open(key, tokens, in_time)

    def close(self, key: str) -> None:
        self.runner.close(key)

    def follow(self, change: Change) -> None:
        self.runner.follow(change)
        for source, target in change.moved:
            self._fed[target] = self._fed[source]
        for indices, _ in change.begun:
            self._fed[list(indices)] = self.runner.cache.base(indices[0])

    def catch_up(self, batch: Batch, behind: Tensor, count: int) -> None:
        if (states := self._states) is not None:
            for first in range(0, count, states.width):
                width = min(states.width, count - first)
                starts = self._starts(batch, 2)
                self.runner.feed(*batch.following(starts, width), batch.ends(width))
                states.note_read(torch.minimum(starts + width, batch.lengths[: batch.rows]))
            return
        tokens, positions = batch.last(count, self.runner.cache.bases(batch.rows), behind=behind)
        self.runner.feed(tokens, positions, batch.ends(-2))

    @property
    def _states(self) -> RecurrentStates | None:
        """The model's recurrent states; None if it has none."""
        return self.runner.cache.states

    def _starts(self, batch: Batch, least: int) -> Tensor:
        """Return where the next pass begins if the model has recurrent layers, [B] int64: at the
        first token that was not read, and at least `least` tokens before the row's end."""
        assert self._states is not None
        latest = (batch.lengths[: batch.rows] - least).clamp(min=0)
        return torch.minimum(self._states.read(batch.rows), latest)


class ModelDrafter(ModelRows):
    """Draft token by token: k drafts take k passes. The first one feeds each row's last two tokens.

    Args:
        factor: of the rows' temperatures, unless `temperature` replaces them.
    """

    stops_short = True

    def __init__(
        self,
        runner: Runner,
        *,
        coupling: str,
        temperature: float | None = None,
        factor: float = 1.0,
    ):
        super().__init__(runner, coupling=coupling, temperature=temperature)
        self._factor = factor

    def expect(self, batch: Batch, length: int) -> int:
        ends = batch.known()
        fed = self._fed[: len(ends)]
        # Positions beyond a row's end held rejected drafts. From now on they hold tokens that the
        # cache lacks, whether this round drafts or not.
        fed[:] = numpy.minimum(fed, ends - 1)
        if length == 0:
            return 0
        missing = int((ends - fed).max()) - 2
        if missing > 0 and self._states is not None:
            self._states.send_read(fed)
        fed[:] = ends + length - 1
        return max(missing, 0)

    def reaches(self, before: int, length: int) -> bool:
        return not length or before > 0

    def propose(self, batch: Batch, length: int) -> Proposal:
        return self.propose_while(batch, length, None)

    def propose_while(
        self, batch: Batch, length: int, goes_on: Callable[[Tensor], bool] | None
    ) -> Proposal:
        """See Drafter.propose_while. None: draft all."""
        if length == 0:
            return Proposal.empty(batch)
        params = batch.params.at(self._temperature, self._factor)
        lengths = batch.lengths[: batch.rows]
        # Step by step, so that each line is contiguous.
        positions = lengths + batch.steps(0, length)[:, None]
        first = batch.last(2, self.runner.cache.bases(batch.rows))
        starts = None if self._states is None else self._starts(batch, 2)
        drafts = list[Tensor]()

        def logits_of(step: int, last: Tensor | None) -> Tensor:
            if starts is not None:
                drafts.extend(() if last is None else (last,))
                return self._from_start(batch, starts, drafts)
            fed = first if last is None else (last[:, None], positions[step - 1][:, None])
            return self.runner.forward(*fed, batch.ends(step), last=1)[:, 0]

        found = propose_chain(
            logits_of, positions, params, batch, coupling=self._coupling, goes_on=goes_on
        )
        self._fed -= length - found.tokens.shape[1]  # `expect` has counted all of them
        return found

    def _from_start(self, batch: Batch, starts: Tensor, drafts: Sequence[Tensor]) -> Tensor:
        """Return logits [B, V] after these drafts [B] each, of a model with recurrent layers: from
        a pass over each row's text from `starts` [B] on, and the drafts."""
        assert self._states is not None
        width = 2 + len(drafts)
        after = torch.stack([*drafts], 1) if drafts else None
        tokens, positions = batch.following(starts, width, after)
        last = batch.lengths[: batch.rows] - 1 + len(drafts) - starts
        logits = self.runner.forward_at(tokens, positions, batch.ends(width - 1), last[:, None])
        self._states.note_read(starts + width)
        return logits[:, 0]


class ParallelDrafter(ModelRows):
    """Make all drafts of a round in one pass (PARD, arXiv 2504.18583): the model reads the tokens
    that it lacks, then a mask token for every further draft.

    A round of k drafts may add k + 1 tokens, so a pass feeds each row's last k + 1 tokens and
    k - 1 masks after them: 2k tokens, a constant shape. Known tokens only write the same keys
    again. Keys of masks lie beyond the row's end, where the next pass overwrites them, so the
    cache holds tokens only.

    Args:
        mask: the id that stands for a token to be drafted. The model has an embedding for it,
            whether or not it is in the vocabulary.
    """

    at_once = True

    def __init__(
        self, runner: Runner, *, mask: int, coupling: str, temperature: float | None = None
    ):
        super().__init__(runner, coupling=coupling, temperature=temperature)
        self._mask = mask

    def expect(self, batch: Batch, length: int) -> int:
        if length == 0:
            return 0
        ends = batch.known()
        fed = self._fed[: len(ends)]
        behind = int((ends - fed).max())
        fed[:] = ends
        return behind - 2 if behind > length + 1 else 0

    def reaches(self, before: int, length: int) -> bool:
        return not length or 0 < before <= length

    def propose(self, batch: Batch, length: int) -> Proposal:
        if length == 0:
            return Proposal.empty(batch)
        if self._states is not None:
            logits = self._from_start(self._states, batch, length)
        else:
            logits = self.runner.forward(*self._input(batch, length), last=length)
        params = batch.params.at(self._temperature)
        return propose_at_once(logits, params, batch, coupling=self._coupling)

    def _from_start(self, states: RecurrentStates, batch: Batch, length: int) -> Tensor:
        """Return the logits [B, length, V] of a model with recurrent layers. A row that accepted
        few drafts has more masks than it needs."""
        starts, width = self._starts(batch, 1), 2 * length
        masks = batch.tokens.new_full((batch.rows, width), self._mask)
        tokens, positions = batch.following(starts, width, masks)
        lengths = batch.lengths[: batch.rows]
        places = (lengths - 1 - starts)[:, None] + batch.steps(0, length)
        logits = self.runner.forward_at(tokens, positions, batch.ends(width), places)
        states.note_read(lengths)
        return logits

    def _input(self, batch: Batch, length: int) -> tuple[Tensor, Tensor, list[int] | None]:
        """Return the tokens of a pass and their positions, [B, 2 length] each, and the rows'
        ends after them."""
        known, positions = batch.last(length + 1, self.runner.cache.bases(batch.rows))
        masks = known.new_full((batch.rows, length - 1), self._mask)
        return (
            torch.cat((known, masks), 1),
            torch.cat((positions, batch.positions(0, length - 1)), 1),
            batch.ends(length - 1),
        )


def make(parts: DraftParts) -> Drafter:
    """Make the drafter of a model, or of the target with layers skipped."""
    assert parts.runner is not None
    return ModelDrafter(parts.runner, factor=parts.factor, **parts.how)


def make_parallel(parts: DraftParts) -> Drafter:
    """Make the drafter of a model that drafts in one pass."""
    assert parts.runner is not None
    assert parts.mask is not None
    return ParallelDrafter(parts.runner, mask=parts.mask, **parts.how)


def propose_chain(
    logits_of: Callable[[int, Tensor | None], Tensor],
    positions: Tensor,
    params: SamplingParams,
    batch: Batch,
    *,
    coupling: str,
    scored: bool = False,
    goes_on: Callable[[Tensor], bool] | None = None,
) -> Proposal:
    """Draft one token after the other at `positions` [k, B]. The rows' logits processors apply, so
    that more drafts are accepted.

    Args:
        logits_of: logits_of(step, tokens) returns logits [B, V] after the tokens [B] of the step
            before; None in the first step.
        scored: whether the proposal has scores, under shared coupling.
        goes_on: ends drafting when it returns False (see Drafter.propose_while). Shared coupling
            only.
    """
    assert goes_on is None or coupling == "shared"
    tokens: list[Tensor] = []
    scores: list[Tensor] = []
    distributions: list[ops.Distribution] = []
    for step, at in enumerate(positions):
        logits = logits_of(step, tokens[-1] if tokens else None)
        logits = _processed(logits, batch, tokens)
        if coupling == "maximal":
            token, probs = params.draft(logits, at, batch.lengths[: batch.rows])
            distributions.append(probs)
        elif scored or goes_on is not None:
            token, score = params.sample(logits, at)
            scores.append(score)
        else:
            token = params.sample_tokens(logits, at)
        tokens.append(token)
        batch.announce(step, token)
        if goes_on is not None and not goes_on(scores[-1].exp()):
            break
    return Proposal(
        torch.stack(tokens, 1),
        _stacked(distributions) if distributions else None,
        scores=torch.stack(scores, 1) if scored and scores else None,
    )


def _processed(logits: Tensor, batch: Batch, drafts: Sequence[Tensor]) -> Tensor:
    """Return a draft's logits [N, U] as the rows' processors change them after the drafts [B] each.
    N is a multiple of B, row after row."""
    if not batch.processors.active(masked=False):
        return logits
    rows = torch.arange(batch.rows, device=logits.device)
    rows = rows.repeat_interleave(len(logits) // batch.rows)
    before = torch.stack([*drafts], 1) if drafts else batch.tokens.new_zeros(batch.rows, 0)
    steps = torch.full_like(rows, len(drafts))
    return batch.process_packed(logits, rows, steps, before, masked=False)


def _stacked(distributions: list[ops.Distribution]) -> ops.Distribution:
    """Stack the distributions [B, V] of consecutive positions to one, [B, k, V]."""
    values, edges = zip(*distributions, strict=True)
    return ops.Distribution(
        torch.stack(values, 1), None if edges[0] is None else torch.stack(edges, 1)
    )


def propose_at_once(
    logits: Tensor, params: SamplingParams, batch: Batch, *, coupling: str
) -> Proposal:
    """Draft from logits [B, k, V] of the positions after the rows' ends, each by itself. Under
    shared coupling the proposal has scores."""
    rows, length = logits.shape[:2]
    positions = batch.positions(0, length).flatten()
    flat = _processed(logits.flatten(0, 1), batch, ())
    if coupling == "shared":
        found, scores = params.sample(flat, positions)
        return Proposal(found.view(rows, length), None, scores=scores.view(rows, length))
    starts, params = batch.lengths[:rows].repeat_interleave(length), params.repeat(length)
    tokens, probs = params.draft(flat, positions, starts)
    values, edges = (None if part is None else part.unflatten(0, (-1, length)) for part in probs)
    assert values is not None
    return Proposal(tokens.view(rows, length), ops.Distribution(values, edges))
