"""Forecast how much of a job is still to come, which decides whether a graph capture can still pay.

The limit on new tokens says little if samples end by themselves, so samples are expected to become
as long as those that have ended.
"""

from __future__ import annotations

# Before any sample has ended, a sample is expected to use this part of its limit: limits are set so
# that few samples reach them.
_PART = 1 / 4


def expected(limit: float) -> float:
    """Return the expected tokens of a sample if only its limit is known."""
    return limit * _PART


class Forecast:
    """The forecast for one job.

    Args:
        samples: how many the job has. None if unknown: then as many as have begun are expected to
            follow.
    """

    def __init__(self, samples: int | None):
        self._samples = samples
        self._begun = self._ended = self._tokens = 0

    def begin(self, samples: int) -> None:
        """Note that `samples` more samples were taken up, waiting ones included."""
        self._begun += samples

    def end(self, tokens: int) -> None:
        """Note that a sample has ended with `tokens` tokens."""
        self._ended += 1
        self._tokens += tokens

    def length(self, generated: float) -> float:
        """Return the expected tokens of a sample, at least 1.

        Args:
            generated: mean tokens of the live rows. Before any sample has ended, twice that is
                expected.
        """
        return max(self._tokens / self._ended, 1.0) if self._ended else 2 * generated + 1

    def becomes(self, limit: int, generated: int) -> float:
        """Return the expected tokens of a sample, for deciding how many rows to admit.

        It errs on the long side, because too many rows are worse than too few: all tokens generated
        so far over the samples that have ended. Those that end first are short. `expected(limit)`
        counts as one ended sample.

        Args:
            generated: tokens of all live rows together.
        """
        tokens = expected(limit) + self._tokens + generated
        return min(tokens / (1 + self._ended), float(limit))

    def waiting(self, waiting: int, *, ended: bool) -> int:
        """Return the number of samples without a row: the `waiting` ones, and unless `ended`
        those of prompts that were not taken up yet."""
        if ended:
            return waiting
        return waiting + (
            self._begun if self._samples is None else max(0, self._samples - self._begun)
        )
