"""Calls between the program's process and the tests', over two pipes, and the stand-ins for what
stays on the other side.

The tests' side believes no message: its values are plain data (values.py), and it allows the
program only to call, or to iterate over, what the tests have handed to it.
"""

from __future__ import annotations

import _operator as operator  # a third of the time that operator takes
import builtins
import os

from . import values

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

MOST_BYTES = 64 << 20  # of one message
# raised by a call, these would end a loop of the tests before all of it has run
ENDS_LOOPS = ("StopIteration", "StopAsyncIteration", "GeneratorExit")
OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, arguments, named: function(*arguments, **named),
    "getattr": getattr, "setattr": setattr, "delattr": delattr,
    "iter": iter, "next": next, "len": len, "bool": bool, "str": str, "repr": repr,
    "int": int, "float": float, "index": operator.index, "eq": operator.eq,
    "isinstance": lambda kind, one: isinstance(one, kind),
    "getitem": operator.getitem, "setitem": operator.setitem, "delitem": operator.delitem,
}  # fmt: skip
START = 0  # the number of the function that runs the program's text
HANDED_OVER = ("call", "iter", "next")  # what the program may do with objects of the tests


class Peer:
    """One end: `ask` has the other side do something, `answer` does what it asks.

    Args:
        hear, say: the pipes.
        describe: one line about an exception.
        leave: ends this process. It is called when the other side closes its pipe or sends what
            is no message; an exception could be caught by the tests.
        wary: allow only HANDED_OVER, and only of objects that this side has sent.
    """

    def __init__(
        self,
        hear: int,
        say: int,
        *,
        describe: Callable[[BaseException], str],
        leave: Callable[[], NoReturn],
        wary: bool,
    ) -> None:
        self._hear, self._say, self._wary = hear, say, wary
        self._describe, self._leave = describe, leave
        self._read, self._write = os.read, os.write
        self._kept: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._remotes: dict[int, Remote] = {}
        self._converted: dict[tuple[str, int], Any] = {}

    def ask(self, operation: str, *operands: Any) -> Any:
        """The result of an operation on the other side; raises what it raises."""
        self._send([operation.encode(), *(values.dump(one, self.keep) for one in operands)])
        while True:
            kind, parts = self.receive()
            if kind == "=":
                result, changed = (values.load(one, self.find) for one in parts)
                if changed is not None:
                    _refill(*operands[1:], *changed)
                return result
            if kind == "!":
                raise _exception(operation, *(values.load(one, self.find) for one in parts))
            self.answer(kind, parts)

    def convert(self, operation: str, remote: Remote) -> Any:
        """The number that an object of the other side stands for. It never changes: a formula of
        the tests may convert the object more than once."""
        key = operation, _number(remote)
        if key not in self._converted:
            self._converted[key] = self.ask(operation, remote)
        return self._converted[key]

    def answer(self, operation: str, parts: list[bytes]) -> None:
        """Do what the other side asks and send the result, or the exception."""
        if operation not in OPERATIONS:
            self._leave()
        try:
            if self._wary and not _is_handed_over(operation, parts):
                raise TypeError("programs can only call, or iterate over, objects of the tests")
            operands = [values.load(one, self.find) for one in parts]
            answers = [OPERATIONS[operation](*operands), None]
            if operation == "call":
                after = [values.dump(one, self.keep) for one in operands[1:]]
                answers[1] = None if after == parts[1:] else tuple(operands[1:])
            message = [b"=", *(values.dump(one, self.keep) for one in answers)]
            if sum(map(len, message)) > MOST_BYTES:
                raise ValueError("the result is too large for the tests")
        except BaseException as error:
            names = [one.__name__ for one in type(error).__mro__ if one.__module__ == "builtins"]
            about = (names, _text(error), _plain_arguments(error), self._describe(error))
            error.__traceback__ = None  # it may hold what has filled the memory
            message = [b"!", *(values.dump(one, self.keep) for one in about)]
        self._send(message)

    def receive(self) -> tuple[str, list[bytes]]:
        """The next message: what it is, and its parts."""
        length = int.from_bytes(self._exactly(8), "little")
        if length > 2 * MOST_BYTES:
            self._leave()
        data = self._exactly(length)
        try:
            kind, *parts = values.unpack(data)
            return kind.decode(), parts
        except ValueError:
            self._leave()

    def _send(self, parts: list[bytes]) -> None:
        left = memoryview(values.pack(parts))
        try:
            while left:
                left = left[self._write(self._say, left) :]
        except OSError:
            self._leave()

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = self._read(self._hear, min(count - len(data), 1 << 20))
            if not piece:
                self._leave()
            data += piece
        return bytes(data)

    def keep(self, value: Any) -> tuple[bytes, int]:
        """How the other side can refer to an object of this side, or to one of its own."""
        if type(value) is Remote and _peer(value) is self:
            return values.YOURS, _number(value)
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._kept)
            self._kept.append(value)
        return values.OBJECT, self._numbers[id(value)]

    def find(self, tag: bytes, number: int) -> Any:
        """The object that `keep` of the other side has named."""
        if tag == values.YOURS:
            return self._kept[number]
        if number not in self._remotes:
            self._remotes[number] = Remote(self, number)
        return self._remotes[number]


def _refill(given: Any, named: Any, left: Any, named_left: Any) -> None:
    """Give the mutable arguments of a call the content that it has left in them."""
    values.refill(given, left)
    values.refill(tuple(named.values()), tuple(named_left.values()))


def _is_handed_over(operation: str, parts: list[bytes]) -> bool:
    return operation in HANDED_OVER and bool(parts) and parts[0][:1] == values.YOURS


def _text(error: BaseException) -> str:
    try:
        return str(str(error)[:2000])
    except BaseException:
        return "an exception that cannot be shown"


def _plain_arguments(error: BaseException) -> tuple[Any, ...]:
    try:
        return tuple(one for one in error.args if type(one) in (str, int, float, bytes, tuple))
    except BaseException:
        return ()


def _exception(operation: str, names: Any, text: Any, arguments: Any, told: Any) -> BaseException:
    """The exception of this side that is nearest to one of the other side."""
    error: BaseException | None = None
    for name in names:
        kind = vars(builtins).get(name)
        if not isinstance(kind, type) or not issubclass(kind, BaseException):
            continue
        if name in ENDS_LOOPS and not (operation == "next" and name == "StopIteration"):
            kind = RuntimeError
        try:
            error = kind(str(text))
            if name == "KeyError" and arguments:  # its text is the key's representation
                error = kind(*arguments)
            break
        except TypeError:  # it takes other arguments
            continue
    error = error or Exception(str(text))
    error.told = str(told)  # type: ignore[attr-defined]
    return error


class Remote:
    """Stands for an object of the other side. What it is compared with, or added to, never goes
    there: objects of the other side are equal if that side says so, anything else is unequal."""

    __slots__ = ("__number", "__peer")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_Remote__peer", peer)
        object.__setattr__(self, "_Remote__number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return _peer(self).ask("call", self, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__"):
            raise AttributeError(name)
        return _peer(self).ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _peer(self).ask("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        _peer(self).ask("delattr", self, name)

    def __getitem__(self, key: Any) -> Any:
        return _peer(self).ask("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _peer(self).ask("setitem", self, key, value)

    def __delitem__(self, key: Any) -> None:
        _peer(self).ask("delitem", self, key)

    def __iter__(self) -> Any:
        return _peer(self).ask("iter", self)

    def __next__(self) -> Any:
        return _peer(self).ask("next", self)

    def __len__(self) -> int:
        return int(_peer(self).ask("len", self))

    def __bool__(self) -> bool:
        return _peer(self).ask("bool", self) is True

    def __str__(self) -> str:
        return str(_peer(self).ask("str", self))

    def __repr__(self) -> str:
        return str(_peer(self).ask("repr", self))

    def __int__(self) -> int:
        return int(_peer(self).convert("int", self))

    def __float__(self) -> float:
        return float(_peer(self).convert("float", self))

    def __index__(self) -> int:
        return int(_peer(self).convert("index", self))

    def __eq__(self, other: object) -> bool:
        if type(other) is not Remote:
            return False
        return self is other or _peer(self).ask("eq", self, other) is True

    def __instancecheck__(self, one: object) -> bool:
        return type(one) is Remote and _peer(self).ask("isinstance", self, one) is True

    def __hash__(self) -> int:
        return hash(_number(self))


# the slots themselves: an attribute of the same name may be the other side's
_peer: Callable[[Remote], Peer] = vars(Remote)["_Remote__peer"].__get__
_number: Callable[[Remote], int] = vars(Remote)["_Remote__number"].__get__
