"""What ends a sample, and the Completion that it becomes.

Not here: stop strings (model/continuation.py), who looks when (conductor.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy

from bass_cli.engine.host_state import BROKEN, LENGTH, LIMIT, PROMPT, HostState, Row
from bass_cli.intake import Task
from bass_cli.io.completion import Completion
from bass_cli.model.continuation import Continuation, StopDetector, StopTokens

_UNSOUND = (
    "the target's logits for token {} are not finite: its weights are broken, or its values too "
    "large for the dtype (bf16 and fp32 hold more than fp16)"
)


class Watch:
    """Finds the rows that a round may have ended, with a few operations on the round's tokens.

    eos: ids that end a sample because the model ends there.
    stop_ids: ids that end it because a stop text is that token (`special_stops`).
    """

    def __init__(self, eos: Collection[int], stops: Sequence[str], stop_ids: Collection[int] = ()):
        self.eos, self._stops = frozenset(eos), stops
        self.stop_ids = frozenset(stop_ids) - self.eos
        self._tokens: StopTokens | None = None  # from the first prompt on

    def detector(self, text: Continuation) -> StopDetector | None:
        """For one sample of a prompt."""
        if not self._stops:
            return None
        if self._tokens is None:
            self._tokens = StopTokens(text, self._stops)
        return StopDetector(text, self._stops, self._tokens)

    def suspects(self, host_state: HostState) -> list[int]:
        """The places of live rows that may be over, after a round."""
        places, block, counts = host_state.news
        ends = numpy.zeros(block.shape, dtype=bool)
        for id_ in self.eos | self.stop_ids:
            ends |= block == id_
        if self._tokens is not None:
            ends |= self._tokens.among(block)
        ends &= numpy.arange(block.shape[1]) < counts[:, None]
        of_row = host_state.numbers[places]
        full = of_row[:, LENGTH] - of_row[:, PROMPT] >= of_row[:, LIMIT]
        found: list[int] = places[ends.any(1) | full | (of_row[:, BROKEN] >= 0)].tolist()
        return found


class Ending(NamedTuple):
    """Why a sample is over, and its text where that is known: a stop string's, which is cut."""

    reason: str
    text: str | None = None


@dataclass(slots=True, eq=False)
class Sample:
    """A live row's sample. `stops`: looks for stop strings, if there are any; `seen`: generated
    tokens already looked at."""

    task: Task
    row: Row
    stops: StopDetector | None
    seen: int = 0

    def look(self, eos: Collection[int], stop_ids: Collection[int] = ()) -> Ending | None:
        """Cut a finished row to the tokens that count and return its end; None while it goes on.

        The token that ends a row counts: the end-of-sequence token, a special token that is a
        stop text, the token that completes a stop text. `eos`, `stop_ids`: see Watch.
        """
        row = self.row
        numbers, new = row.numbers(), row.since(self.seen)
        limit, broken = numbers[LIMIT], numbers[BROKEN]
        sound = len(new) if broken < 0 else broken - self.seen
        keep, reason = min(sound, limit - self.seen), None if broken < 0 else "error"
        if self.seen + keep == limit:
            reason = "length"
        ends = (i for i, token in enumerate(new[:keep]) if token in eos or token in stop_ids)
        end = next(ends, None)
        if end is not None:
            keep, reason = end + 1, "eos" if new[end] in eos else "stop"
        if self.stops is not None:
            found = self.stops.feed(new[:keep])
            if found is not None:
                row.cut(found.tokens)
                return Ending("stop", found.text)
        if keep < len(new):
            row.cut(self.seen + keep)
        self.seen += keep
        return None if reason is None else Ending(reason)


class Due(NamedTuple):
    """A sample that is over and whose line is due: of which prompt, the row it had (None: it has
    no tokens), why it ended and when, in the clock's seconds."""

    task: Task
    sample: int
    row: Row | None
    ending: Ending
    now: float

    def completion(self, *, seed: int, ids: bool) -> Completion:
        """Its line; `ids`: with token ids."""
        task, row, ending = self.task, self.row, self.ending
        tokens, scores = ([], []) if row is None else (row.generated_tokens, row.log_probabilities)
        total = math.fsum(scores)
        return Completion(
            id=task.prompt.id,
            sample=self.sample,
            text=task.text.decode(tokens) if ending.text is None else ending.text,
            finish_reason=ending.reason,
            tokens=len(scores),
            mean_logprob=total / len(scores) if scores else None,
            sum_logprob=total if scores else None,
            seconds=self.now - task.began,
            rounds=row.rounds if row else 0,
            drafted=row.drafted if row else 0,
            accepted=row.accepted if row else 0,
            seed=seed,
            prompt_tokens=len(task.tokens),
            meta=task.prompt.meta,
            token_ids=list(tokens) if ids else None,
            error=_UNSOUND.format(len(scores) + 1) if ending.reason == "error" else None,
        )


class WholePrompts:
    """What is done where one sample stands for all n of a prompt: sample 0 if all of them are in
    `done`."""

    def __init__(self, done: Container[tuple[str, int]], n: int):
        self._done, self._n = done, n

    def __contains__(self, key: Any) -> bool:
        return all((key[0], sample) in self._done for sample in range(self._n))


def with_copies(
    drawn: Iterator[Completion], n: int, done: Container[tuple[str, int]]
) -> Iterator[Completion]:
    """Samples 0 to n - 1 of every prompt, but those in `done`, where sample 0 was drawn. A
    failure stays one line."""
    for completion in drawn:
        if completion.is_of_prompt:
            yield completion
            continue
        for sample in range(n):
            if (completion.id, sample) not in done:
                yield completion if sample == 0 else completion.copied(sample)
