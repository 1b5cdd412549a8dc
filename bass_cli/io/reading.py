"""Read untrusted input safely: regular files of bounded size, JSON, and values of known types.

A fault is an OSError or a ValueError whose text says what would be right. The caller adds file,
line and key, and raises a UserError or prints a note. No function waits for a pipe, or takes more
memory than the file's size justifies.
"""

from __future__ import annotations

import errno
import json
import math
import os
import reprlib
import stat
from pathlib import Path
from typing import Any, BinaryIO

# the largest whole number: tensors and most other readers of such files hold 64 bits
LARGEST = 2**63 - 1
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 80


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading. OSError for a folder, a pipe or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "a file is needed, not a folder, a pipe or a device")


def read_bytes(path: str | Path, most: int) -> bytes:
    """Read all of a regular file; OSError if it has more than `most` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size} bytes; such a file may have at most {most}")
        return file.read(size)


def parse_json(raw: str | bytes) -> Any:
    """Parse JSON. ValueError with a text of one line if it is broken or cannot be held."""
    try:
        return json.loads(raw)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"broken JSON: {error.msg} at {line}column {error.colno}") from None
    except UnicodeDecodeError:
        raise ValueError("broken JSON: the text is not valid UTF-8") from None
    except RecursionError:
        raise ValueError("broken JSON: it is nested too deep") from None
    except ValueError:  # Python limits the digits of an integer
        raise ValueError("broken JSON: a number has too many digits") from None


def parse_object(raw: str | bytes) -> dict[str, Any]:
    """Parse a JSON object; ValueError as in `parse_json`, or if the value is not an object."""
    value = parse_json(raw)
    if not isinstance(value, dict):
        raise ValueError("a JSON object is needed")
    return value


def whole(value: Any, *, least: int = 0, most: int = LARGEST) -> int:
    """Return the value if it is a whole number within the bounds, and not true or false."""
    if type(value) is not int or not least <= value <= most:
        bounds = f"from {least} on" if most == LARGEST else f"from {least} to {most}"
        raise ValueError(f"a whole number {bounds} is needed, not {shown(value)}")
    return value


def finite(value: Any, *, least: float = -math.inf) -> float:
    """Return the value if it is a finite number, at least `least`, and not true or false."""
    bounds = "" if least == -math.inf else f" from {least:g} on"
    known = type(value) is float or (type(value) is int and abs(value) <= LARGEST)
    if not known or not math.isfinite(value) or value < least:
        raise ValueError(f"a finite number{bounds} is needed, not {shown(value)}")
    return float(value)


def is_unicode(text: str) -> bool:
    """Whether the text has no lone surrogates, which UTF-8 cannot encode.

    They come from escapes in JSON and from file names that are not UTF-8.
    """
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def text(value: Any) -> str:
    """Return the value if it is a string."""
    if not isinstance(value, str):
        raise ValueError(f"a text is needed, not {shown(value)}")
    return value


def texts(value: Any) -> list[str]:
    """Return the value if it is a list of strings."""
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"a list of texts is needed, not {shown(value)}")
    return value


def truth(value: Any) -> bool:
    """Return the value if it is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"true or false is needed, not {shown(value)}")
    return value


def shown(value: Any) -> str:
    """Format a value for a message, shortened in the middle."""
    try:
        return _BRIEF.repr(value)
    except ValueError:  # Python limits the digits of an integer here too
        return "a number of thousands of digits"
