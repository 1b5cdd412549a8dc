"""Define the exceptions for mistakes of the user and limits of the machine, and message helpers.

The helpers escape quoted text and suggest the nearest valid word. This module imports the standard
library only. Errors are printed in io/terminal.py; cli/exit_codes.py has their exit codes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_LEAST = 3  # characters of a word that may be a part of another
_LONGEST = 64  # characters of a word whose distance is computed


class UserError(Exception):
    """A mistake of the user, in a sentence that names file, line, key and the nearest valid value.

    Each further argument is a line of its own, such as a remedy or one of several differences.
    """

    @property
    def lines(self) -> list[str]:
        """The message, one line for each argument; control characters are escaped."""
        return [spelled(str(line)) for line in self.args]

    def __str__(self) -> str:
        """The message in one line."""
        return "; ".join(self.lines)


class MachineError(UserError):
    """The machine lacks memory, a device or a package that the job needs (exit code 3)."""


def spelled(text: str) -> str:
    """Return the text in one line, without characters that act on a terminal.

    Control and format characters, line separators and lone surrogates become escapes such as
    \\x1b, \\n and \\u202e. All other characters stay.
    """
    if text.isprintable():
        return text
    import unicodedata

    return "".join(
        one if one.isprintable() or unicodedata.category(one) == "Zs" else repr(one)[1:-1]
        for one in text
    )


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a clause for an error message: the nearest known word, or all known words."""
    choices = list(known)
    near = near_word(word, choices)
    return f"known: {', '.join(choices)}" if near is None else f'did you mean "{near}"?'


def near_word(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is near to `word`, or None.

    A word is near if at most a third of its characters differ. Else it is near if each part of the
    shorter word begins a part of the longer one, where hyphens and the like separate parts.
    """
    given = _bare(word)
    found: list[tuple[int, int, str]] = []  # distance, number, word
    for number, one in enumerate(known):
        wanted = _bare(one)
        longest = max(len(given), len(wanted))
        distance = _distance(given, wanted) if len(given) <= _LONGEST else longest
        if distance <= longest // 3:
            found.append((distance, number, one))
        elif _is_part(given, wanted) or _is_part(wanted, given):
            found.append((longest, number, one))
    return min(found)[2] if found else None


def _bare(word: str) -> str:
    return word.strip("-").lower()


def _is_part(short: str, long: str) -> bool:
    """Whether each part of `short` begins another part of `long`."""
    left = re.split(r"[^a-z0-9]+", long)
    for part in re.split(r"[^a-z0-9]+", short):
        begun = next((one for one in left if one.startswith(part)), None)
        if begun is None:
            return False
        left.remove(begun)
    return len(short) >= _LEAST


def _distance(one: str, other: str) -> int:
    """Count the insertions, deletions, substitutions and swaps of neighbours between two words."""
    before: list[int] = []
    last = list(range(len(other) + 1))
    for i, left in enumerate(one, 1):
        row = [i]
        for j, right in enumerate(other, 1):
            row.append(min(last[j] + 1, row[-1] + 1, last[j - 1] + (left != right)))
            if i > 1 and j > 1 and left == other[j - 2] and right == one[i - 2]:
                row[j] = min(row[j], before[j - 2] + 1)
        before, last = last, row
    return last[-1]
