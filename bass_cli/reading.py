"""Read untrusted input safely: regular files of bounded size, JSON, YAML, values of known types.

A fault is an OSError or a ValueError whose text says what would be right. The caller adds file,
line and key, and raises a UserError or prints a note. No function waits for a pipe, or takes more
memory than the file's size justifies. In YAML, aliases of lists and mappings, which a few lines can
expand to billions of values, and deep nesting are refused.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import reprlib
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import yaml

from bass_cli.errors import UserError

# the largest whole number: tensors and most other readers of such files hold 64 bits
LARGEST = 2**63 - 1
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 80
# bytes; a pair file has a few hundred, and PyYAML parses this size in a second
MOST_YAML = 1 << 16
_LONGEST = 1_000_000  # seconds of a time
_POINTER = b"version https://git-lfs.github.com/spec/"
_DEEPEST = 20  # levels of nesting in YAML; a pair file has two or three


@contextlib.contextmanager
def os_errors_as(kind: type[UserError], fault: str, remedy: str = "") -> Iterator[None]:
    """Turn an OSError into an error of this kind: fault, reason, remedy. A broken pipe stays."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        after = f"; {remedy}" if remedy else ""
        raise kind(f"{fault}: {error.strerror or error}{after}") from None


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading. OSError for a folder, a pipe or a device."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except ValueError as error:  # no file can have this name
        raise OSError(errno.EINVAL, str(error)) from None
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


def refuse_pointer(path: Path, begin: bytes) -> None:
    """Raise a UserError if a file that begins so is a pointer of Git LFS, not the file itself."""
    if begin.startswith(_POINTER):
        raise UserError(
            f"{path}: this is a pointer of Git LFS in place of the file; run git lfs pull in its "
            "folder, or download the model again"
        )


class RefusedJsonError(ValueError):
    """JSON that Python's decoder accepts and a hook of the caller refuses."""


def no_constant(word: str) -> NoReturn:
    """Refuse NaN and Infinity, which Python's JSON decoder reads and JSON does not have."""
    raise RefusedJsonError(f"{word} is not JSON; write null")


def broken_json(error: ValueError | RecursionError, *, with_line: bool = True) -> str:
    """Describe an error of Python's JSON decoder in one line, with the line if it is not 1."""
    if isinstance(error, json.JSONDecodeError):
        line = f"line {error.lineno}, " if with_line and error.lineno > 1 else ""
        return f"broken JSON: {error.msg} at {line}column {error.colno}"
    if isinstance(error, RefusedJsonError):
        return f"broken JSON: {error}"
    if isinstance(error, UnicodeDecodeError):
        return "broken JSON: the text is not valid UTF-8"
    if isinstance(error, RecursionError):
        return "broken JSON: it is nested too deep"
    return "broken JSON: a number has too many digits"  # Python limits those of an integer


def parse_json(raw: str | bytes) -> Any:
    """Parse JSON. ValueError with a text of one line if it is broken or cannot be held."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(broken_json(error)) from None


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


def without_nan(value: Any) -> Any:
    """Replace every NaN and infinity in a value, which JSON cannot hold, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    return [without_nan(inner) for inner in value] if isinstance(value, (list, tuple)) else value


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


def unquoted(value: Any) -> str:
    """Format a text for a message that has quotation marks of its own."""
    return shown(value)[1:-1]


class BrokenYamlError(ValueError):
    """A fault of a YAML file, with its line number."""

    def __init__(self, line: int, reason: str):
        super().__init__(reason)
        self.line = line


def parse_yaml(content: bytes) -> tuple[yaml.Node | None, Any]:
    """Parse one document; return its nodes, which have line numbers, and its value.

    BrokenYamlError if it is not valid.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BrokenYamlError(
            content.count(b"\n", 0, error.start) + 1, "the file is not valid UTF-8"
        ) from None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return node, None if node is None else loader.construct_document(node)
    except yaml.reader.ReaderError as error:
        line, code = text.count("\n", 0, error.position) + 1, ord(text[error.position])
        raise BrokenYamlError(
            line, f"broken YAML: the character U+{code:04X} is not allowed"
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise BrokenYamlError(
            mark.line + 1 if mark else 1, f"broken YAML: {error.problem or error.context}"
        ) from None


class _Loader(yaml.SafeLoader):
    """A SafeLoader that raises only YAMLError, with the place of the fault."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        mark: Any = event.start_mark
        self.depth += 1
        if self.depth > _DEEPEST:
            raise yaml.composer.ComposerError(None, None, f"more than {_DEEPEST} levels", mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(event, yaml.AliasEvent) and not isinstance(node, yaml.ScalarNode):
            raise yaml.composer.ComposerError(
                None, None, "an alias may only stand for a single value", mark
            )
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError, TypeError, KeyError, IndexError, AttributeError):
            # errors of int, float and datetime ("!!int abc", 2001-99-99, 6,000 digits), and of
            # PyYAML at odd tags
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"this is not a value of the type {kind}", node.start_mark
            ) from None


def parse_duration(text: str, key: str = "duration") -> float:
    """Parse "2s", "500ms", "1.5m" or "2" to seconds; UserError unless above 0, up to _LONGEST."""
    match = re.fullmatch(
        r"\s*([+-]?(?:\d{1,9}\.?\d{0,99}|\.\d{1,99}))\s*(ms|s|m|)\s*", text, re.ASCII
    )
    seconds = (
        float(match[1]) * {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0}[match[2]] if match else 0.0
    )
    if not 0 < seconds <= _LONGEST:
        raise UserError(
            f'{key}: "{unquoted(text)}" is not a time above 0 and up to {_LONGEST} s; write it '
            "like 2s, 500ms or 1.5m"
        )
    return seconds
