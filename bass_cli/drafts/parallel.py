"""A small model that makes all drafts of a round in one pass (PARD, arXiv 2504.18583): it reads the
tokens that it lacks, then a mask token for every further draft.

A round of k drafts may add k + 1 tokens, so a pass feeds each row's last k + 1 tokens and k - 1
masks after them: 2k tokens, a constant shape. Known tokens only write the same keys again. Keys of
masks lie beyond the row's end, where the next pass overwrites them, so the cache holds tokens only.
Not here: drafting token by token, and following rows (model.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from bass_cli.drafts.model import ModelRows
from bass_cli.drafts.sampling import propose_at_once
from bass_cli.engine.batch import Batch
from bass_cli.engine.contracts import Proposal
from bass_cli.tensor_parallel.leader import AnyRunner


class ParallelDrafter(ModelRows):
    """Draft with `runner` in one pass.

    Args:
        mask: the id that stands for a token to be drafted. The model has an embedding for it,
            whether or not it is in the vocabulary.
    """

    at_once = True

    def __init__(
        self, runner: AnyRunner, *, mask: int, coupling: str, temperature: float | None = None
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
            return Proposal(batch.tokens.new_zeros(batch.rows, 0), None)
        logits = self._runner.forward(*self._input(batch, length), last=length)
        params = batch.params.at(self._temperature)
        return propose_at_once(logits, params, batch, coupling=self._coupling)

    def _input(self, batch: Batch, length: int) -> tuple[Tensor, Tensor, list[int] | None]:
        """Return the tokens of a pass and their positions, [B, 2 length] each, and the rows'
        ends after them."""
        known, positions = batch.last(length + 1, self._runner.cache.bases(batch.rows))
        masks = known.new_full((batch.rows, length - 1), self._mask)
        return (
            torch.cat((known, masks), 1),
            torch.cat((positions, batch.places(0, length - 1)), 1),
            batch.ends(length - 1),
        )
