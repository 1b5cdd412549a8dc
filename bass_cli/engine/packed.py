"""What the host needs to know of a round, as one table that is copied at once: packed on the
device, taken in by the Rows.

Not here: the round itself (step.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from bass_cli.engine.batch import Row
from bass_cli.engine.contracts import Verdict


def pack(verdict: Verdict) -> Tensor:
    """[B, 2k + 3] int64: how many drafts were accepted; the block of k + 1 tokens, valid up to
    and including that place; and the bits of their log-probabilities."""
    return torch.cat(
        (verdict.accepted[:, None], verdict.block, verdict.scores.view(torch.int32).long()), dim=1
    )


def unpack(
    packed: Tensor, hosts: Sequence[Row], *, width: int, meant: Sequence[int]
) -> tuple[int, ...]:
    """Extends the Rows by what a round with places for `width` drafts gave; returns accepted by
    row. packed: on the host, one line for each of them, and maybe more for dummies. meant: how
    many drafts each row had; what only filled its place up counts as drafted if it stood."""
    table = packed[: len(hosts)].numpy()
    scores = table[:, width + 2 :].astype(numpy.int32).view(numpy.float32)
    _note_broken(hosts, scores, table[:, :1])
    values = scores.tolist()
    lines = table[:, : width + 2].tolist()
    for index, (row, line, score) in enumerate(zip(hosts, lines, values, strict=True)):
        count = line[0] + 1
        row.tokens += line[1 : 1 + count]
        row.log_probabilities += score[:count]
        row.rounds += 1
        row.drafted += max(meant[index], line[0])
        row.accepted += line[0]
    return tuple(line[0] for line in lines)


def _note_broken(hosts: Sequence[Row], scores: numpy.ndarray, accepted: numpy.ndarray) -> None:
    """A committed token's log-probability is finite exactly where its logits were sound; scores
    [B, k + 1], accepted [B, 1]."""
    broken = ~numpy.isfinite(scores) & (numpy.arange(scores.shape[1]) <= accepted)
    for index in broken.any(1).nonzero()[0]:
        row = hosts[index]
        row.broken = (
            row.generated + int(broken[index].argmax()) if row.broken is None else row.broken
        )
