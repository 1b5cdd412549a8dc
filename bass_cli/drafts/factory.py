"""Who proposes tokens: the drafter for a pair's `draft` setting, and none. What a drafter is:
engine/contracts.py."""

from __future__ import annotations

from bass_cli.config.draft_spec import parse_draft
from bass_cli.drafts.heads import ChainDrafter, HeadDrafter
from bass_cli.drafts.model import ModelDrafter
from bass_cli.drafts.ngram import LookupDrafter
from bass_cli.drafts.parallel import ParallelDrafter
from bass_cli.engine.batch import Batch
from bass_cli.engine.contracts import Drafter, Proposal
from bass_cli.models.chain_head import ChainHead, Head
from bass_cli.tensor_parallel.leader import AnyRunner

# Of the rows' temperatures, for a draft model. Its law is at best the mean of what the target's
# may be, given what it knows; the median, which agrees most often, is sharper. Measured:
# docs/decisions/09-draft-temperature.md.
SHARPER = 0.9


class NoDrafter(Drafter):
    """Propose nothing: plain decoding."""

    def propose(self, batch: Batch, length: int) -> Proposal:
        return Proposal(batch.tokens.new_zeros(batch.rows, 0), None)


def make_drafter(
    draft: str,
    *,
    runner: AnyRunner | None,
    coupling: str,
    temperature: float | None,
    factor: float = 1.0,
    mask: int | None = None,
    head: Head | None = None,
) -> Drafter:
    """The drafter for a pair's `draft` (bass_cli/config/draft_spec.py). `runner` (lag 2) holds
    its model, if it has one: a draft model, or the target with layers skipped; with `mask`, the
    id of its mask token, it drafts in one pass. With `head` it is the target's own (lag 1).
    `factor`: of the rows' temperatures, for a model of its own that drafts token by token: some
    were trained to draft, and the target's layers may say what it says."""
    words = parse_draft(draft)
    if words.model is None:
        return LookupDrafter(words.sources) if words.sources else NoDrafter()
    assert runner is not None
    assert words.reads == (head is not None)
    if isinstance(head, ChainHead):
        return ChainDrafter(runner, head, coupling=coupling, temperature=temperature)
    if head is not None:
        return HeadDrafter(runner, head, coupling=coupling, temperature=temperature)
    assert words.parallel == (mask is not None)
    if mask is not None:
        return ParallelDrafter(runner, mask=mask, coupling=coupling, temperature=temperature)
    factor = 1.0 if words.files is None else factor
    return ModelDrafter(runner, coupling=coupling, temperature=temperature, factor=factor)
