"""Remote calls between the program's process and the tests' process, over two pipes.

An object that stays in the other process is represented by a `Remote`. The tests' process does
not trust any message: it rebuilds values from plain data (values.py), and it lets the program
only call, or iterate over, objects that the tests have passed to it.
"""

from __future__ import annotations

import _operator as operator  # a third of the time that operator takes
import builtins
import os
import time

from . import values

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

MOST_BYTES = 64 << 20  # of one message
MOST_TEXT = 2000  # characters of an exception
# If a call raised one of these, a loop in the tests could end early without a failure.
ENDS_LOOPS = ("StopIteration", "StopAsyncIteration", "GeneratorExit")
OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, arguments, named: function(*arguments, **named),
    "getattr": getattr, "setattr": setattr, "delattr": delattr,
    "iter": iter, "next": next, "len": len, "bool": bool, "str": str, "repr": repr,
    "int": int, "float": float, "index": operator.index, "eq": operator.eq,
    "isinstance": lambda kind, one: isinstance(one, kind),
    "getitem": operator.getitem, "setitem": operator.setitem, "delitem": operator.delitem,
}  # fmt: skip
START = 0  # number of the program's first object: the function that runs its text
HANDED_OVER = ("call", "iter", "next")  # operations that the program may do on objects of the tests


class Peer:
    """One end of the connection.

    `request` sends an operation to the other side; `answer` handles one request.

    Args:
        inlet: descriptor to read messages from.
        outlet: descriptor to write messages to.
        describe: returns one line about an exception.
        leave: ends this process. It is called if the other side closes its pipe or sends an
            invalid message. An exception would not do, because the tests could catch it.
        restricted: allow only the operations in HANDED_OVER, and only on objects that this side
            has sent.
    """

    def __init__(
        self,
        inlet: int,
        outlet: int,
        *,
        describe: Callable[[BaseException], str],
        leave: Callable[[], NoReturn],
        restricted: bool,
    ) -> None:
        self._inlet, self._outlet, self._restricted = inlet, outlet, restricted
        self._describe, self._leave = describe, leave
        self._read, self._write = os.read, os.write
        self._kept: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._remotes: dict[int, Remote] = {}
        self._converted: dict[tuple[str, int], Any] = {}
        # Prepared, because without memory it could not be made.
        self._out_of_memory = self._pack("!", ["MemoryError"], "", (), "MemoryError")

    def request(self, operation: str, *operands: Any) -> Any:
        """Run an operation on the other side and return its result, or raise its exception."""
        self._send(self._pack(operation, *operands))
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
        """Convert an object of the other side to a number.

        The result is cached, so that an object cannot convert to another number each time:
        HumanEval/32 converts the zero that the program found once for each power.
        """
        key = operation, _number(remote)
        if key not in self._converted:
            self._converted[key] = self.request(operation, remote)
        return self._converted[key]

    def answer(self, operation: str, parts: list[bytes]) -> None:
        """Handle one request of the other side: send the result, or the exception."""
        if operation not in OPERATIONS:
            self._leave()
        try:
            if self._restricted and not _is_handed_over(operation, parts):
                raise TypeError("programs can only call, or iterate over, objects of the tests")
            operands = [values.load(one, self.find) for one in parts]
            answers = [OPERATIONS[operation](*operands), None]
            if operation == "call":
                after = [values.dump(one, self.keep) for one in operands[1:]]
                answers[1] = None if after == parts[1:] else tuple(operands[1:])
            message = self._pack("=", *answers)
            if len(message) > MOST_BYTES:
                raise ValueError("the result is too large for the tests")
        except MemoryError:
            message = self._out_of_memory
        except BaseException as error:
            names = [one.__name__ for one in type(error).__mro__ if one.__module__ == "builtins"]
            about = (names, _text(error), _plain_arguments(error), self._describe(error))
            error.__traceback__ = None  # its frames may hold the objects that filled the memory
            message = self._pack("!", *about)
        self._send(message)

    def transfer_seconds(self, value: Any) -> float:
        """Return how long it takes to turn a value into bytes, and those into a value.

        Objects in it are not kept, because the other side could then call or iterate over them.
        """
        start = time.perf_counter()
        values.load(values.dump(value, lambda _: (values.OBJECT, 0)), lambda *_: None)
        return time.perf_counter() - start

    def receive(self) -> tuple[str, list[bytes]]:
        """Read the next message. Returns its kind and its parts."""
        data = values.receive(self._read, self._inlet, self._leave, most=2 * MOST_BYTES)
        try:
            kind, *parts = values.unpack(data)
            return kind.decode(), parts
        except ValueError:
            self._leave()

    def _pack(self, kind: str, *parts: Any) -> bytes:
        return values.pack([kind.encode(), *(values.dump(one, self.keep) for one in parts)])

    def _send(self, message: bytes) -> None:
        left = memoryview(message)
        try:
            while left:
                left = left[self._write(self._outlet, left) :]
        except OSError:
            self._leave()

    def keep(self, value: Any) -> tuple[bytes, int]:
        """Return the tag and number by which the other side can refer to an object.

        The object is kept alive until this process ends.
        """
        if type(value) is Remote and _peer(value) is self:
            return values.YOURS, _number(value)
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._kept)
            self._kept.append(value)
        return values.OBJECT, self._numbers[id(value)]

    def find(self, tag: bytes, number: int) -> Any:
        """Return the object with a tag and number from the other side's `keep`."""
        if tag == values.YOURS:
            return self._kept[number]
        if number not in self._remotes:
            self._remotes[number] = Remote(self, number)
        return self._remotes[number]


def _refill(arguments: Any, named: Any, changed: Any, named_changed: Any) -> None:
    """Copy the changes that a call made to its mutable arguments back into the originals."""
    values.refill(arguments, changed)
    values.refill(tuple(named.values()), tuple(named_changed.values()))


def _is_handed_over(operation: str, parts: list[bytes]) -> bool:
    return operation in HANDED_OVER and bool(parts) and parts[0][:1] == values.YOURS


def _text(error: BaseException) -> str:
    try:
        return str(str(error)[:MOST_TEXT])
    except BaseException:
        return "an exception that cannot be shown"


def _plain_arguments(error: BaseException) -> tuple[Any, ...]:
    """Return an exception's plain arguments. Empty if they are large or too deep to be shown."""
    try:
        found = tuple(one for one in error.args if type(one) in (str, int, float, bytes, tuple))
        return found if len(repr(found)) <= MOST_TEXT else ()
    except BaseException:
        return ()


def _exception(
    operation: str, names: Any, text: Any, arguments: Any, description: Any
) -> BaseException:
    """Make the builtin exception that is nearest to an exception of the other side.

    Args:
        operation: the operation that failed.
        names: the builtin classes among the exception's bases, nearest first.
        text, arguments: its str() and its plain arguments.
        description: one line about it, for the verdict.
    """
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
        except TypeError:  # this class needs other arguments
            continue
    error = error or Exception(str(text))
    error.described = str(description)  # type: ignore[attr-defined]
    return error


def _forward(operation: str) -> Callable[..., Any]:
    """Return a method of Remote that requests the operation from the other side."""
    return lambda self, *operands: _peer(self).request(operation, self, *operands)


class Remote:
    """Proxy for an object in the other process.

    Two proxies are equal if the other side says that their objects are equal. A proxy is unequal
    to everything else, and the other side does not see what it was compared with.
    """

    __slots__ = ("__number", "__peer")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_Remote__peer", peer)
        object.__setattr__(self, "_Remote__number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return _peer(self).request("call", self, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__"):
            raise AttributeError(name)
        return _peer(self).request("getattr", self, name)

    __setattr__, __delattr__ = _forward("setattr"), _forward("delattr")
    __getitem__, __setitem__ = _forward("getitem"), _forward("setitem")
    __delitem__ = _forward("delitem")
    __iter__, __next__ = _forward("iter"), _forward("next")
    __len__ = _forward("len")  # Python checks that the results of these three are of their type
    __str__, __repr__ = _forward("str"), _forward("repr")

    def __bool__(self) -> bool:
        return _peer(self).request("bool", self) is True

    def __int__(self) -> int:
        return int(_peer(self).convert("int", self))

    def __float__(self) -> float:
        return float(_peer(self).convert("float", self))

    def __index__(self) -> int:
        return int(_peer(self).convert("index", self))

    def __eq__(self, other: object) -> bool:
        if type(other) is not Remote:
            return False
        return self is other or _peer(self).request("eq", self, other) is True

    def __instancecheck__(self, one: object) -> bool:
        return type(one) is Remote and _peer(self).request("isinstance", self, one) is True

    def __hash__(self) -> int:
        return hash(_number(self))


# The slots' own getters, because `remote.name` would read an attribute of the other side.
_peer: Callable[[Remote], Peer] = vars(Remote)["_Remote__peer"].__get__
_number: Callable[[Remote], int] = vars(Remote)["_Remote__number"].__get__
