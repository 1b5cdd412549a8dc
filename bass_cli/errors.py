"""Define the exceptions for mistakes of the user and limits of the machine, and message helpers.

The helpers escape quoted text and suggest the nearest valid word. This module imports the standard
library only. Errors are printed in io/terminal.py; cli/running.py has their exit codes.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable
from types import FrameType

_OWN = ("bass_cli", "bass_kernels", "__main__")  # packages whose faults are ours
_LEAST = 3  # characters of a word that may be a part of another


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


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def failed_import(error: BaseException) -> str | None:
    """Return which other package cannot be imported, with the reason and a remedy.

    None for any other error. A package that is there but broken raises any type of error: torch
    without one of its libraries an OSError, numpy an ImportError whose cause says more.
    """
    foreign: FrameType | None = None  # the first one below this package's frames
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = _package_of(frame)
        if package in _OWN:
            foreign = None
        elif foreign is None and "importlib" not in package:
            foreign = frame
    if foreign is None:
        name = getattr(error, "name", None) if isinstance(error, ImportError) else None
    else:  # the code of a module runs when it is imported
        name = _package_of(foreign) if foreign.f_code.co_name == "<module>" else None
    name = (name or "").partition(".")[0]
    if not name or name in _OWN:
        return None
    while error.__cause__ is not None:
        error = error.__cause__
    return (
        f"the package {name} cannot be imported: {first_line(error)}; install bass-cli again in a "
        f'new environment, or look for the cause with python -c "import {name}"'
    )


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__") or "").partition(".")[0]


def first_of(names: Iterable[str], most: int = 5) -> str:
    """List the first names, and the number of the others."""
    every = list(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a clause for an error message: the nearest known word, or all known words."""
    choices = list(known)
    near = near_word(word, choices)
    return f"known: {', '.join(choices)}" if near is None else f'did you mean "{near}"?'


def near_word(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is near to `word`, or None.

    A word is near if most of its characters match. Else it is near if each part of the shorter word
    begins a part of the longer one, where hyphens and the like separate parts.
    """
    import difflib

    given, names = _bare(word), dict[str, str]()
    for one in known:
        names.setdefault(_bare(one), one)
    near = difflib.get_close_matches(given, names, n=1) or [
        one for one in names if _is_part(given, one) or _is_part(one, given)
    ]
    return names[near[0]] if near else None


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
