"""Compile the expressions of `bass filter --where` to functions of a line's object.

An expression has the syntax of Python. Only the kinds of nodes that `_Compiler` has a method for
are allowed, so an expression cannot call, import or change anything. Python's eval is not used.
Types are strict: a text is never compared with a number, and only true and false are conditions.
"""

from __future__ import annotations

import ast
import functools
import io
import math
import operator
import re
import tokenize
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import regex

from bass_cli.errors import UserError, near_word, nearest
from bass_cli.reading import shown, unquoted

Row = Mapping[str, Any]
Value = Callable[[Row], Any]
_CHARACTERS = 10_000  # of an expression; parsing takes 0.1 s then
_NODES = 1_000  # of an expression
_BITS = 1_024  # of a whole number that arithmetic gives; the largest float has as many
_PATTERN = 1_000  # characters of a regex; compiling one takes 20 ms then
_COPIES = 100_000  # copies of a part, as counts like {9} make them; they take 30 MB then
_COUNT = re.compile(r"\{\s*(\d+)")
_RECURSION = re.compile(r"\(\?(?:R\)|\d+\)|&|P>)")
PATIENCE = 1.0  # seconds of one regex search, which takes microseconds unless it backtracks
_WORDS = {"true": True, "false": False, "null": None}  # JSON's own words, besides Python's
_ARITHMETIC: dict[type[ast.operator], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.FloorDiv: ("//", operator.floordiv),
    ast.Mod: ("%", operator.mod),
}
_ORDER: dict[type[ast.cmpop], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
}


class NoValueError(Exception):
    """Why an expression has no value for a line. `column`: from 1, of the part that failed.

    `missing`: whether the line lacks a key, or has null where a value is needed.
    """

    def __init__(self, column: int, reason: str, *, missing: bool = False):
        super().__init__(f"`where` column {column}: {reason}")
        self.reason, self.missing = reason, missing


def compile_expression(text: str) -> Callable[[Row], bool]:
    """Return the function of an expression: a line's object gives true, false or a NoValueError.

    UserError with the column if the expression is not valid.
    """
    if len(text) > _CHARACTERS:
        raise UserError(f"`where`: it has more than {_CHARACTERS} characters")
    # Without leading blanks, which Python takes for an indentation; line ends mean nothing.
    source = text.replace("\r", " ").replace("\n", " ").lstrip()
    skipped = len(text) - len(source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in texts; see `_Compiler.pattern`
            tree = ast.parse(source, mode="eval")
        if sum(1 for _ in ast.walk(tree)) > _NODES:
            raise UserError(f"`where`: it has more than {_NODES} parts")
        _refuse_comment(source, skipped)
        compiler = _Compiler(source, skipped)
        value = compiler.value(tree.body)
    except SyntaxError as error:
        column = max((error.offset or 1) + skipped, 1)
        raise UserError(f"`where` column {column}: {_syntax(error, source)}") from None
    except (RecursionError, MemoryError, ValueError):
        raise UserError(
            "`where`: it is nested too deep, or has a number that is too long"
        ) from None
    column = compiler.column(tree.body)

    def holds(row: Row) -> bool:
        return _truth(value(row), column, "the expression")

    return holds


def read_key(text: str, option: str) -> Value:
    """Return the function of a key such as text or meta.answer. It raises NoValueErrors too."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        path = _path(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        path = None
    if path is None:
        raise UserError(f'`{option}` "{unquoted(text)}": write a key, like text or meta.answer')
    return functools.partial(_look_up, path=path, column=1)


def _refuse_comment(source: str, skipped: int) -> None:
    """Raise UserError at a #, after which Python would ignore the rest of the expression."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            column = token.start[1] + skipped + 1
            raise UserError(f"`where` column {column}: # begins a comment; leave it out")


def compile_regex(pattern: str) -> Any:
    """Compile a regex whose searches have a limit of time. ValueError if it is not valid.

    Recursive patterns and large products of counts are refused, because they fill the memory.
    """
    if _RECURSION.search(pattern):
        raise ValueError("a pattern that contains itself is not allowed")
    if math.prod(max(int(count[:9]), 1) for count in _COUNT.findall(pattern)) > _COPIES:
        raise ValueError(f"its counts make more than {_COPIES} copies; write * or + instead")
    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError, ValueError) as error:
        raise ValueError(str(error) or "nested too deep") from None


def _syntax(error: SyntaxError, source: str) -> str:
    if not source.strip():
        return "it is empty; write a condition, like tokens > 10"
    if re.search(r"(?<![=<>!])=(?!=)", source[(error.offset or 1) - 1 :][:2]):
        return "= sets nothing here; compare with =="
    return f"it is no valid expression: {error.msg}"


class _Compiler:
    """Turns nodes into functions. A kind of node without a method is refused."""

    def __init__(self, source: str, skipped: int):
        self._source, self._skipped = source, skipped
        self._functions: dict[str, Callable[[ast.Call], Value]] = {
            "len": self._of_one(_length),
            "lower": self._of_one(_lower),
            "matches": self._matches,
            "has": self._has,
            "key": self._key,
        }

    def column(self, node: ast.expr) -> int:
        """Return the column of a node in characters from 1; Python's count bytes."""
        before = self._source.encode()[: node.col_offset].decode(errors="ignore")
        return len(before) + self._skipped + 1

    def refuse(self, node: ast.expr, reason: str) -> UserError:
        return UserError(f"`where` column {self.column(node)}: {reason}")

    def value(self, node: ast.expr) -> Value:
        """Return the function of any node."""
        make = getattr(self, f"_{type(node).__name__.lower()}", None)
        if make is None:
            part = ast.get_source_segment(self._source, node) or type(node).__name__
            raise self.refuse(
                node,
                f"{unquoted(part)} is not allowed; use keys, numbers, texts, == != < <= > >= "
                f"in, and or not, + - * / // %, {'(), '.join(self._functions)}()",
            )
        found: Value = make(node)
        return found

    def _constant(self, node: ast.Constant) -> Value:
        value = node.value
        if value is not None and type(value) not in (str, int, float, bool):
            raise self.refuse(node, f"{shown(value)} is no number and no text")
        return lambda row: value

    def _name(self, node: ast.Name) -> Value:
        if node.id in _WORDS:
            word = _WORDS[node.id]
            return lambda row: word
        return self._at(node)

    def _attribute(self, node: ast.Attribute) -> Value:
        return self._at(node)

    _subscript = _attribute

    def _at(self, node: ast.expr) -> Value:
        path, column = _path(node), self.column(node)
        if path is None:
            raise self.refuse(node, 'write a key as meta.level or meta["the level"]')
        return functools.partial(_look_up, path=path, column=column)

    def _boolop(self, node: ast.BoolOp) -> Value:
        word, stop = ("and", False) if isinstance(node.op, ast.And) else ("or", True)
        parts = [(self.value(one), self.column(one)) for one in node.values]

        def value(row: Row) -> bool:
            for part, column in parts:
                if _truth(part(row), column, f"a side of {word}") is stop:
                    return stop
            return not stop

        return value

    def _unaryop(self, node: ast.UnaryOp) -> Value:
        inner, column = self.value(node.operand), self.column(node.operand)
        if isinstance(node.op, ast.Not):
            return lambda row: not _truth(inner(row), column, "what follows not")
        if isinstance(node.op, ast.Invert):
            raise self.refuse(node, "~ is not allowed; use not")
        sign = -1 if isinstance(node.op, ast.USub) else 1
        return lambda row: sign * _number(inner(row), column, "a number is needed after a sign")

    def _binop(self, node: ast.BinOp) -> Value:
        if type(node.op) not in _ARITHMETIC:
            raise self.refuse(node, f"only {' '.join(sign for sign, _ in _ARITHMETIC.values())}")
        sign, compute = _ARITHMETIC[type(node.op)]
        left, right = self.value(node.left), self.value(node.right)
        at, other = self.column(node.left), self.column(node.right)

        def value(row: Row) -> Any:
            need = f"a number is needed beside {sign}"
            one, two = _number(left(row), at, need), _number(right(row), other, need)
            try:
                found = compute(one, two)
            except ZeroDivisionError:
                raise NoValueError(other, "division by 0") from None
            except OverflowError:
                raise NoValueError(at, "the number is too large") from None
            if isinstance(found, int) and found.bit_length() > _BITS:
                raise NoValueError(at, "the number is too large")
            return found

        return value

    def _compare(self, node: ast.Compare) -> Value:
        sides = [node.left, *node.comparators]
        values = [(self.value(one), self.column(one)) for one in sides]
        tests = [self._test(op, node) for op in node.ops]

        def value(row: Row) -> bool:
            left, at = values[0][0](row), values[0][1]
            for test, (right_of, column) in zip(tests, values[1:], strict=True):
                right = right_of(row)
                if not test(left, right, at, column):
                    return False
                left, at = right, column
            return True

        return value

    def _test(self, op: ast.cmpop, node: ast.expr) -> Callable[[Any, Any, int, int], bool]:
        if isinstance(op, (ast.Is, ast.IsNot)):
            raise self.refuse(node, "is compares nothing here; use == or !=")
        if isinstance(op, (ast.Eq, ast.NotEq)):
            same = isinstance(op, ast.Eq)
            return lambda left, right, at, column: _equal(left, right) is same
        if isinstance(op, (ast.In, ast.NotIn)):
            inside = isinstance(op, ast.In)
            return lambda left, right, at, column: _within(left, right, at, column) is inside
        sign, compare = _ORDER[type(op)]

        def test(left: Any, right: Any, at: int, column: int) -> bool:
            _needed(left, at, True, "")
            _needed(right, column, True, "")
            numbers = _is_number(left) and _is_number(right)
            if not numbers and not (isinstance(left, str) and isinstance(right, str)):
                both = f"{shown(left)} and {shown(right)}"
                raise NoValueError(at, f"{sign} compares two numbers or two texts, not {both}")
            return bool(compare(left, right))

        return test

    def _list(self, node: ast.List | ast.Tuple | ast.Set) -> Value:
        parts = [self.value(one) for one in node.elts]
        return lambda row: [part(row) for part in parts]

    _tuple = _set = _list

    def _call(self, node: ast.Call) -> Value:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in self._functions:
            called = ast.get_source_segment(self._source, node.func) or name
            hint = nearest(called, self._functions)
            raise self.refuse(node, f"there is no function {unquoted(called)}; {hint}")
        if node.keywords or any(isinstance(one, ast.Starred) for one in node.args):
            raise self.refuse(node, f"{name}() takes values only")
        return self._functions[name](node)

    def _arguments(self, node: ast.Call, count: int) -> list[ast.expr]:
        if len(node.args) != count:
            name = ast.get_source_segment(self._source, node.func)
            many = "1 value" if count == 1 else f"{count} values"
            raise self.refuse(node, f"{name}() takes {many}, not {len(node.args)}")
        return node.args

    def _of_one(self, function: Callable[[Any, int], Any]) -> Callable[[ast.Call], Value]:
        def make(node: ast.Call) -> Value:
            (argument,) = self._arguments(node, 1)
            inner, column = self.value(argument), self.column(argument)
            return lambda row: function(inner(row), column)

        return make

    def _matches(self, node: ast.Call) -> Value:
        subject, pattern = self._arguments(node, 2)
        inner, column, compiled = self.value(subject), self.column(subject), self.pattern(pattern)

        def value(row: Row) -> bool:
            text = _text(inner(row), column, "matches() needs a text")
            try:
                return compiled.search(text, timeout=PATIENCE) is not None
            except TimeoutError:
                raise NoValueError(
                    self.column(pattern),
                    f"the regex takes more than {PATIENCE:g} s on this text; write it without "
                    "repetitions inside repetitions",
                ) from None

        return value

    def pattern(self, node: ast.expr) -> Any:
        """Compile the constant regex of matches()."""
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            raise self.refuse(node, "the regex of matches() must be a text in quotes")
        written = ast.get_source_segment(self._source, node) or ""
        if "\\" in written and "r" not in written[:2].lower():  # "\b" would be a backspace
            raise self.refuse(node, f"write a regex with a backslash as r{written}")
        if len(node.value) > _PATTERN:
            raise self.refuse(node, f"the regex has more than {_PATTERN} characters")
        try:
            return compile_regex(node.value)
        except ValueError as error:
            raise self.refuse(node, f"the regex is not valid: {error}") from None

    def _has(self, node: ast.Call) -> Value:
        (argument,) = self._arguments(node, 1)
        path = _path(argument)
        if path is None:
            raise self.refuse(argument, "has() takes a key, like has(meta.level)")

        def value(row: Row) -> bool:
            try:
                return _look_up(row, path=path, column=1) is not None
            except NoValueError:
                return False

        return value

    def _key(self, node: ast.Call) -> Value:
        (argument,) = self._arguments(node, 1)
        if not isinstance(argument, ast.Constant) or not isinstance(argument.value, str):
            raise self.refuse(argument, 'key() takes a name in quotes, like key("my key")')
        return self._at(node)


def _path(node: ast.expr) -> tuple[str | int, ...] | None:
    """Return the keys and places that lead to a value, from the line's object; None for another
    node."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        inner, step = _path(node.value), node.attr
        return None if inner is None else (*inner, step)
    if isinstance(node, ast.Subscript):
        inner, place = _path(node.value), node.slice
        sign = 1
        if isinstance(place, ast.UnaryOp) and isinstance(place.op, ast.USub):
            sign, place = -1, place.operand
        if inner is None or not isinstance(place, ast.Constant):
            return None
        if isinstance(place.value, str) and sign > 0:
            return (*inner, place.value)
        return (*inner, sign * place.value) if type(place.value) is int else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "key":
        named = node.args[0] if len(node.args) == 1 else None
        if isinstance(named, ast.Constant) and isinstance(named.value, str):
            return (named.value,)
    return None


def _look_up(row: Row, *, path: tuple[str | int, ...], column: int) -> Any:
    """Return the value at a path of a line's object; a NoValueError if it has none."""
    value: Any = row
    for depth, step in enumerate(path):
        where = "the line" if depth == 0 else _spelled(path[:depth])
        if isinstance(step, int):
            if not isinstance(value, list):
                raise NoValueError(column, f"{where} is no list", missing=value is None)
            if not -len(value) <= step < len(value):
                raise NoValueError(column, f"{where} has no place {step}", missing=True)
            value = value[step]
            continue
        if not isinstance(value, Mapping):
            raise NoValueError(column, f"{where} is no object", missing=value is None)
        if step not in value:
            near = near_word(step, map(str, value))
            hint = f'; did you mean "{near}"?' if near else f"; it has {_some(value)}"
            raise NoValueError(column, f'{where} has no key "{unquoted(step)}"{hint}', missing=True)
        value = value[step]
    return value


def _spelled(path: tuple[str | int, ...]) -> str:
    first, *more = path
    return str(first) + "".join(f".{one}" if isinstance(one, str) else f"[{one}]" for one in more)


def _some(found: Mapping[str, Any]) -> str:
    """List the first keys of an object."""
    named = ", ".join(unquoted(key) for key in list(found)[:8]) or "no keys"
    return named + (" and others" if len(found) > 8 else "")


def _needed(value: Any, column: int, fits: bool, need: str) -> Any:
    """Return the value; a NoValueError if it is null or does not fit."""
    if value is None:
        raise NoValueError(column, "the value is null", missing=True)
    if not fits:
        raise NoValueError(column, f"{need}, not {shown(value)}")
    return value


def _truth(value: Any, column: int, what: str) -> Any:
    return _needed(value, column, isinstance(value, bool), f"{what} must be true or false")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: Any, column: int, need: str) -> Any:
    return _needed(value, column, _is_number(value), need)


def _text(value: Any, column: int, need: str) -> Any:
    return _needed(value, column, isinstance(value, str), need)


def _length(value: Any, column: int) -> int:
    fits = isinstance(value, (str, list, Mapping))
    return len(_needed(value, column, fits, "len() needs a text, a list or an object"))


def _lower(value: Any, column: int) -> Any:
    return _text(value, column, "lower() needs a text").lower()


def _equal(left: Any, right: Any) -> bool:
    """Compare two JSON values; true is not 1, as in JSON. Values of any depth are compared."""
    pairs = [(left, right)]
    while pairs:
        one, two = pairs.pop()
        if isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
            pairs += zip(one, two, strict=True)
        elif isinstance(one, Mapping) and isinstance(two, Mapping) and one.keys() == two.keys():
            pairs += ((one[key], two[key]) for key in one)
        elif (
            isinstance(one, (list, Mapping))
            or isinstance(one, bool) is not isinstance(two, bool)
            or one != two
        ):
            return False
    return True


def _within(left: Any, right: Any, at: int, column: int) -> bool:
    fits = isinstance(right, (str, list, Mapping))
    _needed(right, column, fits, "in needs a list, a text or an object")
    if isinstance(right, list):
        return any(_equal(left, one) for one in right)
    kind = "in a text" if isinstance(right, str) else "a key"
    return _text(left, at, f"only a text is {kind}") in right
