"""Make the drafter for a pair's `draft` by its declaration in config/speculation.py. What a drafter
is: engine/contracts.py."""

from __future__ import annotations

import pkgutil
from typing import Any, NamedTuple

from bass_cli.config.speculation import parse_draft
from bass_cli.engine.batch import Batch
from bass_cli.engine.contracts import Drafter, Proposal
from bass_cli.models.heads import Head
from bass_cli.models.runner import Runner

# Factor on the rows' temperatures for a draft model. The draft's distribution is at best the mean
# of the target's possible ones; their median, which agrees most often, is sharper. Measured in
# docs/decisions/05-proposals.md.
SHARPER = 0.9


class DraftParts(NamedTuple):
    """What a drafter may be made of.

    Args:
        coupling: "shared" or "maximal".
        temperature: Replaces the rows' own temperatures, unless theirs is 0.
        factor: Of the rows' temperatures, for a separate model that drafts token by token. Other
            models were trained to draft, or are parts of the target.
        runner: Runs the drafter's model: a draft model or the target with layers skipped, with 2
            pending tokens; or with `head` the target itself, with 1. None if no model drafts.
        mask: The id of the model's mask token, for a model that drafts in one pass.
        head: Layers that read the target's hidden states.
        argument: What follows the word of `draft`; set by make_drafter.
    """

    coupling: str
    temperature: float | None
    factor: float = 1.0
    runner: Runner | None = None
    mask: int | None = None
    head: Head | None = None
    argument: str = ""

    @property
    def how(self) -> dict[str, Any]:
        """The arguments that all drafters with a model have."""
        return {"coupling": self.coupling, "temperature": self.temperature}


class NoDrafter(Drafter):
    """Propose nothing: plain decoding."""

    longest = 0

    def propose(self, batch: Batch, length: int) -> Proposal:
        return Proposal.empty(batch)


def make_none(parts: DraftParts) -> Drafter:
    """Make the drafter of "none"."""
    return NoDrafter()


def make_drafter(draft: str, parts: DraftParts) -> Drafter:
    """Make the drafter for a pair's `draft`."""
    kind, argument, otherwise = parse_draft(draft)
    assert otherwise is None  # it was chosen with the files
    assert kind.weights is None or parts.runner is not None
    assert kind.reads == (parts.head is not None)
    assert parts.head is not None or kind.parallel == (parts.mask is not None)
    factor = parts.factor if kind.weights == "model" else 1.0
    parts = parts._replace(argument=argument, factor=factor)
    drafter = pkgutil.resolve_name(kind.make)(parts)
    assert isinstance(drafter, Drafter)
    return drafter
