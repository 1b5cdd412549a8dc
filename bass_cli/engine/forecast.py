"""How much of a job is still to come, as far as one can tell: what a captured graph may yet pay
for.

A limit on new tokens says little where samples end by themselves, so samples are taken to become
as long as those before.
"""

from __future__ import annotations

# Before a sample has ended it is taken to have this part of the tokens that it may: limits are set
# so that few samples meet them.
_PART = 1 / 4


def expected(limit: float) -> float:
    """Tokens that a sample is taken to have while nothing is known but how many it may."""
    return limit * _PART


class Forecast:
    """`samples`: how many the job has; None if nobody knows, then as many again as have begun
    are taken to follow."""

    def __init__(self, samples: int | None):
        self._samples = samples
        self._begun = self._ended = self._tokens = 0

    def begin(self, samples: int) -> None:
        """So many more samples were taken up, waiting ones included."""
        self._begun += samples

    def end(self, tokens: int) -> None:
        """A sample has ended with so many tokens."""
        self._ended += 1
        self._tokens += tokens

    def length(self, generated: float) -> float:
        """Tokens that a sample is likely to have, 1 at least. While none has ended: twice what the
        live rows have on average (`generated`), for all that lasts is likely to last as long
        again."""
        return max(self._tokens / self._ended, 1.0) if self._ended else 2 * generated + 1

    def becomes(self, limit: int, generated: int) -> float:
        """The same, to admit rows by, of which too many are worse than too few: what all samples
        have generated (the live ones: `generated`) over how many have ended, since those that
        end first are short; what is `expected` of the limit counts as one that has."""
        tokens = expected(limit) + self._tokens + generated
        return min(tokens / (1 + self._ended), float(limit))

    def waiting(self, waiting: int, *, ended: bool) -> int:
        """Samples that have no row yet: `waiting` ones, and those of prompts that were not taken
        up (none if `ended`)."""
        if ended:
            return waiting
        return waiting + (
            self._begun if self._samples is None else max(0, self._samples - self._begun)
        )
