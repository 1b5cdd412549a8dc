"""The exceptions for what a user or the machine has to change, and the nearest valid word for their
messages.

Standard library only: everything may raise them. Not here: what becomes of them
(cli/exit_codes.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake of the user's, in one sentence that names the file, the line, the key and the
    nearest valid value."""


class MachineError(UserError):
    """The machine lacks what the job needs: memory, a device, a package (exit code 3)."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A clause for an error message: the closest of the known words, or all of them when none is
    close."""
    choices = list(known)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f'did you mean "{close[0]}"?' if close else f"known: {', '.join(choices)}"
