"""Values that are sent between the program's process and the tests' process: plain data, as bytes.

Containers, numbers and texts arrive as exact builtin types, so they have no methods of the
program. Any other object stays in its process, and the other side gets a proxy (calls.py).
`marshal` and `pickle` are unsafe to read, and `json` is slow to import.
"""

from __future__ import annotations

import builtins
from _operator import attrgetter  # a third of the time that operator takes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn

    Keep = Callable[[Any], "tuple[bytes, int]"]
    Find = Callable[[bytes, int], Any]

CONSTANTS = {b"N": None, b"T": True, b"F": False, b"E": Ellipsis, b"I": NotImplemented}
NAMES = {id(value): tag for tag, value in CONSTANTS.items()}
CLASSES = {name.encode(): one for name, one in vars(builtins).items() if isinstance(one, type)}
CLASS_NAMES = {one: name for name, one in CLASSES.items()}
MANY: dict[type, bytes] = {
    list: b"l", tuple: b"t", set: b"s", frozenset: b"z", dict: b"d", type({}.keys()): b"k",
    type({}.values()): b"v", type({}.items()): b"m",
}  # fmt: skip
BUILD: dict[bytes, Callable[[list[Any]], Any]] = {
    b"l": list, b"t": tuple, b"s": set, b"z": frozenset, b"c": lambda parts: complex(*parts),
    b"r": lambda parts: range(*parts), b"S": lambda parts: slice(*parts),
    b"d": lambda parts: _pairs(parts),
    b"k": lambda parts: dict.fromkeys(parts).keys(),
    b"v": lambda parts: dict(enumerate(parts)).values(), b"m": lambda parts: dict(parts).items(),
    b"L": lambda parts: _library(*parts), b"n": lambda parts: _named_tuple(*parts),
}  # fmt: skip
READ: dict[bytes, Callable[[bytes], Any]] = {
    b"u": lambda data: data.decode("utf-8", "surrogatepass"), b"b": bytes, b"a": bytearray,
    b"f": float, b"i": lambda data: int(data, 16),
    b"C": lambda data: CLASSES[data],
}  # fmt: skip
DATE, TIME = ("year", "month", "day"), ("hour", "minute", "second", "microsecond", "tzinfo")
# Classes of the standard library whose instances are plain data, with the arguments that make an
# equal instance.
LIBRARY: dict[tuple[str, str], Callable[[Any], tuple[Any, ...]]] = {
    ("fractions", "Fraction"): attrgetter("numerator", "denominator"),
    ("decimal", "Decimal"): lambda one: (str(one),),
    ("collections", "deque"): lambda one: (list(one), one.maxlen),
    ("collections", "Counter"): lambda one: (dict(dict.items(one)),),
    ("collections", "OrderedDict"): lambda one: (list(one.items()),),
    ("collections", "defaultdict"): lambda one: (one.default_factory, dict(dict.items(one))),
    ("datetime", "date"): attrgetter(*DATE),
    ("datetime", "time"): attrgetter(*TIME),
    ("datetime", "datetime"): attrgetter(*DATE, *TIME),
    ("datetime", "timedelta"): attrgetter("days", "seconds", "microseconds"),
    ("datetime", "timezone"): lambda one: (one.utcoffset(None),),
}
OBJECT, YOURS = b"o", b"y"  # an object in the sender's process, or in the reader's
EXACT = (int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset)


def dump(value: Any, keep: Keep) -> bytes:
    """Return a value as bytes. Instances of subclasses become instances of the builtin type.

    Args:
        value: the value.
        keep: returns tag and number of an object that is not plain data.

    Raises:
        RecursionError: the value is nested too deeply.
    """
    parts: list[bytes] = []
    _dump(value, parts.append, keep)
    return b"".join(parts)


def _dump(value: Any, add: Callable[[bytes], None], keep: Keep) -> None:
    kind = type(value)
    if id(value) in NAMES:
        add(NAMES[id(value)])
    elif kind is int:
        _add(b"i", b"%x" % value, add)
    elif kind is str:
        _add(b"u", value.encode("utf-8", "surrogatepass"), add)
    elif kind is float:
        _add(b"f", repr(value).encode(), add)
    elif kind in MANY:
        parts = [one for pair in value.items() for one in pair] if kind is dict else value
        _dump_many(MANY[kind], parts, len(parts), add, keep)
    elif kind is bytes or kind is bytearray:
        _add(b"b" if kind is bytes else b"a", bytes(value), add)
    elif kind is complex:
        _dump_many(b"c", (value.real, value.imag), 2, add, keep)
    elif kind is range or kind is slice:
        tag = b"r" if kind is range else b"S"
        _dump_many(tag, (value.start, value.stop, value.step), 3, add, keep)
    else:
        _dump_other(value, kind, add, keep)


def _add(tag: bytes, data: bytes, add: Callable[[bytes], None]) -> None:
    add(b"%c%x;" % (tag, len(data)))
    add(data)


def _dump_many(
    tag: bytes, parts: Any, count: int, add: Callable[[bytes], None], keep: Keep
) -> None:
    add(b"%c%x;" % (tag, count))
    for part in parts:
        _dump(part, add, keep)


def _dump_other(value: Any, kind: type, add: Callable[[bytes], None], keep: Keep) -> None:
    """Write an instance of a subclass or of a class in LIBRARY, a builtin class, or a proxy."""
    named = kind.__module__, kind.__name__
    if kind is type and value in CLASS_NAMES:
        _add(b"C", CLASS_NAMES[value], add)
    elif named in LIBRARY and _is_whole(value, kind):
        parts = (*named, *LIBRARY[named](value))
        _dump_many(b"L", parts, len(parts), add, keep)
    elif issubclass(kind, tuple) and _has_plain_names(fields := getattr(kind, "_fields", None)):
        _dump_many(b"n", (kind.__name__, fields, tuple(tuple.__iter__(value))), 3, add, keep)
    elif bases := [one for one in EXACT if issubclass(kind, one)]:
        _dump(_exact(value, bases[0]), add, keep)
    elif _is_number_of_numpy(value, kind):
        _dump(value.item(), add, keep)
    else:
        tag, number = keep(value)
        add(b"%c%x;" % (tag, number))


def _is_whole(value: Any, kind: type) -> bool:
    """Return whether LIBRARY's arguments describe a value. A `zoneinfo` time zone is not sent."""
    return kind.__module__ != "datetime" or type(getattr(value, "tzinfo", None)).__name__ in (
        "NoneType",
        "timezone",
    )


def _has_plain_names(fields: Any) -> bool:
    return type(fields) is tuple and not any(one.startswith("_") for one in fields)


def _is_number_of_numpy(value: Any, kind: type) -> bool:
    scalar = any(one.__module__ == "numpy" and one.__name__ == "generic" for one in kind.__mro__)
    return scalar and type(value.item()) is not kind


def _exact(value: Any, base: Any) -> Any:
    """Convert an instance of a subclass of `base` to `base`."""
    if base in (int, float, str):
        return getattr(base, f"__{base.__name__}__")(value)
    if base is dict:
        return dict(dict.items(value))
    return base.__add__(value, 0j) if base is complex else base(base.__iter__(value))


def load(data: bytes, find: Find) -> Any:
    """Return the value of bytes that `dump` returned.

    Args:
        data: the bytes, which may come from a hostile program.
        find: returns the object with that tag and number.

    Raises:
        ValueError, TypeError, KeyError, IndexError, ArithmeticError, RecursionError: the bytes are
            not a value.
    """
    value, end = _load(data, 0, find)
    if end != len(data):
        raise ValueError("there are bytes after the value")
    return value


def _load(data: bytes, at: int, find: Find) -> tuple[Any, int]:
    tag = data[at : at + 1]
    if tag in CONSTANTS:
        return CONSTANTS[tag], at + 1
    end = data.index(b";", at)
    count, at = int(data[at + 1 : end], 16), end + 1
    if count < 0:
        raise ValueError("a count below zero")
    if tag in READ:
        if at + count > len(data):
            raise ValueError("the value is cut off")
        return READ[tag](data[at : at + count]), at + count
    if tag in (OBJECT, YOURS):
        return find(tag, count), at
    build, parts = BUILD[tag], []
    for _ in range(count):
        part, at = _load(data, at, find)
        parts.append(part)
    return build(parts), at


def _pairs(parts: list[Any]) -> dict[Any, Any]:
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _library(module: str, name: str, *parts: Any) -> Any:
    """Make an instance of a class in LIBRARY. KeyError for any other class."""
    LIBRARY[module, name]
    return getattr(__import__(module), name)(*parts)


def _named_tuple(name: str, fields: tuple[str, ...], parts: tuple[Any, ...]) -> Any:
    """Make a named tuple. `namedtuple` refuses names that are not identifiers."""
    from collections import namedtuple

    make: Any = namedtuple
    return make(name, fields)(*parts)


def refill(old: Any, new: Any) -> None:
    """Copy the content of `new` into a mutable argument. Tuples are searched for such arguments."""
    if isinstance(old, tuple) and isinstance(new, tuple):
        for one, other in zip(old, new, strict=False):
            refill(one, other)
    elif type(old) is not type(new) or old is new:
        return
    elif isinstance(old, (list, bytearray)):
        old[:] = new
    elif isinstance(old, (dict, set)):
        old.clear()
        old.update(new)
    elif type(old).__name__ == "deque":
        old.clear()
        old.extend(new)


def pack(parts: list[bytes]) -> bytes:
    """Join parts to a message that starts with its length."""
    body = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return len(body).to_bytes(8, "little") + body


def unpack(body: bytes) -> Iterator[bytes]:
    """Split a message into its parts. ValueError if it is empty or cut off."""
    at = 0
    while at < len(body) or not at:
        end = at + 8 + int.from_bytes(body[at : at + 8], "little")
        if not at < end - 7 <= len(body) - 7:
            raise ValueError("the message is cut off")
        yield body[at + 8 : end]
        at = end


def receive(
    read: Callable[[int, int], bytes],
    descriptor: int,
    leave: Callable[[], NoReturn],
    *,
    most: int | None = None,
) -> bytes:
    """Read a message that follows its length of 8 bytes.

    Calls `leave` if the pipe ends, or if the message has more than `most` bytes.
    """

    def exactly(count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = read(descriptor, min(count - len(data), 1 << 20))
            if not piece:
                leave()
            data += piece
        return bytes(data)

    length = int.from_bytes(exactly(8), "little")
    if most is not None and length > most:
        leave()
    return exactly(length)
