"""How far a looked-up draft is worth going: the chance that a token stands, by how many tokens
before it were matched.

Learnt while running, from committed tokens only, so it depends on nothing that is measured.
"""

from __future__ import annotations

from collections.abc import Sequence

# Chances by matched tokens, from 1, measured on samples of HumanEval at temperature 0.8: where
# learning begins.
_BEFORE = (0.25, 0.35, 0.6, 0.6, 0.62, 0.72, 0.75, 0.82)
_WEIGHT = 8.0  # tokens that this counts as
_MEMORY = 512.0  # beyond so many tokens the old ones count half
_FLOOR = 0.1  # a token counts as a draft while the chance that all stand up to it is no less


class Trust:
    """The chance that a token stands if all before it in its draft do; matches of len(_BEFORE)
    tokens and more are one class."""

    __slots__ = ("_chances", "_stood", "_tried")

    def __init__(self) -> None:
        self._tried = [_WEIGHT] * len(_BEFORE)
        self._stood = [_WEIGHT * chance for chance in _BEFORE]
        self._chances = list(_BEFORE)

    def chance(self, matched: int) -> float:
        """Of one token after so many matched ones (1 or more)."""
        return self._chances[min(matched, len(_BEFORE)) - 1]

    def worth(self, matched: Sequence[int]) -> int:
        """How many tokens of a draft count, given how many tokens were matched before each."""
        chances, most, left = self._chances, len(_BEFORE), 1.0
        for count, size in enumerate(matched):
            left *= chances[size - 1 if size < most else -1]
            if left < _FLOOR:
                return count
        return len(matched)

    def learn(self, matched: Sequence[int], stood: int) -> None:
        """The first `stood` of these tokens were right, and the one after them, if it is there,
        was wrong."""
        for count, size in enumerate(matched[: stood + 1]):
            at = min(size, len(_BEFORE)) - 1
            self._tried[at] += 1
            self._stood[at] += count < stood
            self._chances[at] = self._stood[at] / self._tried[at]
            if self._tried[at] > _MEMORY:
                self._tried[at] /= 2
                self._stood[at] /= 2
