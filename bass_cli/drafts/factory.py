"""Make the drafter for a pair's `draft` setting. What a drafter is: engine/contracts.py."""

from __future__ import annotations

from bass_cli.config.draft_spec import parse_draft
from bass_cli.drafts.heads import ChainDrafter, HeadDrafter
from bass_cli.drafts.model import ModelDrafter, ParallelDrafter
from bass_cli.drafts.ngram import LookupDrafter
from bass_cli.engine.batch import Batch
from bass_cli.engine.contracts import Drafter, Proposal
from bass_cli.models.heads import ChainHead, Head
from bass_cli.models.runner import Runner

# Factor on the rows' temperatures for a draft model. The draft's distribution is at best the mean
# of the target's possible ones; their median, which agrees most often, is sharper. Measured in
# docs/decisions/09-draft-temperature.md.
SHARPER = 0.9


class NoDrafter(Drafter):
    """Propose nothing: plain decoding."""

    longest = 0

    def propose(self, batch: Batch, length: int) -> Proposal:
        return Proposal.empty(batch)


def make_drafter(
    draft: str,
    *,
    runner: Runner | None,
    coupling: str,
    temperature: float | None,
    factor: float = 1.0,
    mask: int | None = None,
    head: Head | None = None,
) -> Drafter:
    """Make the drafter for a pair's `draft` (config/draft_spec.py).

    Args:
        runner: holds the drafter's model, if it has one: a draft model or the target with layers
            skipped, with 2 pending tokens; or with `head` the target itself, with 1.
        temperature: replaces the rows' own temperatures, unless theirs is 0.
        factor: of the rows' temperatures, for a separate model that drafts token by token. Other
            models were trained to draft, or are parts of the target.
        mask: id of the model's mask token, for a model that drafts in one pass.
        head: layers that read the target's hidden states.
    """
    words = parse_draft(draft)
    assert words.otherwise is None  # it was chosen with the files
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
