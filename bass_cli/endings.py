"""What ends a sample, and the Completion that it becomes.

Not here: stop strings (model/continuation.py), who looks when (scheduler.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from bass_cli.engine.batch import Row
from bass_cli.intake import Task
from bass_cli.io.completion import Completion
from bass_cli.model.continuation import StopDetector

_UNSOUND = (
    "the target's logits for token {} are not finite: its weights are broken, or its values too "
    "large for the dtype (bf16 and fp32 hold more than fp16)"
)


class Ending(NamedTuple):
    """Why a sample is over, and its text."""

    reason: str
    text: str


@dataclass(slots=True, eq=False)
class Sample:
    """A live row's sample. `stops`: looks for stop strings, if there are any; `seen`: generated
    tokens already looked at."""

    task: Task
    row: Row
    stops: StopDetector | None
    seen: int = 0

    def look(self, eos: Collection[int]) -> Ending | None:
        """The end of a row that is done, which is cut to what counts; None while it goes on.
        `eos`: ids of which each ends a sample."""
        row = self.row
        new = row.tokens[row.prompt_length + self.seen :]
        sound = len(new) if row.broken is None else row.broken - self.seen
        keep, reason = min(sound, row.limit - self.seen), None if row.broken is None else "error"
        if self.seen + keep == row.limit:
            reason = "length"
        end = next((i for i, token in enumerate(new[:keep]) if token in eos), None)
        if end is not None:
            keep, reason = end + 1, "eos"
        if self.stops is not None:
            found = self.stops.feed(new[:keep])
            if found is not None:
                _cut(row, found.tokens)
                return Ending("stop", found.text)
        _cut(row, self.seen + keep)
        self.seen += keep
        return None if reason is None else self.end(reason)

    def end(self, reason: str) -> Ending:
        """It ends as it is."""
        return Ending(reason, self.task.text.decode(self.row.tokens[self.row.prompt_length :]))


def completed(
    task: Task, sample: int, row: Row | None, ending: Ending, *, now: float, seed: int, ids: bool
) -> Completion:
    """The line of a sample that is over; one without a `row` has no tokens. `ids`: with token
    ids."""
    scores = [] if row is None else row.log_probabilities
    total = math.fsum(scores)
    return Completion(
        id=task.prompt.id,
        sample=sample,
        text=ending.text,
        finish_reason=ending.reason,
        tokens=len(scores),
        mean_logprob=total / len(scores) if scores else None,
        sum_logprob=total if scores else None,
        seconds=now - task.began,
        rounds=row.rounds if row else 0,
        drafted=row.drafted if row else 0,
        accepted=row.accepted if row else 0,
        seed=seed,
        prompt_tokens=len(task.tokens),
        meta=task.prompt.meta,
        token_ids=(row.tokens[row.prompt_length :] if row else []) if ids else None,
        error=_UNSOUND.format(len(scores) + 1) if ending.reason == "error" else None,
    )


def _cut(row: Row, generated: int) -> None:
    """Drop a row's tokens beyond the first `generated` that it generated, all from its last
    round: the last one was the target's own, the others accepted drafts."""
    surplus = row.generated - generated
    if surplus > 0:
        del row.tokens[-surplus:]
        del row.log_probabilities[-surplus:]
        row.accepted -= surplus - 1
