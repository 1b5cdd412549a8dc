"""EvalPlus's check of a function, as text that runs in the tests' process of the sandbox.

programming.py sends the text of this file as the set-up of the tests. So it imports little, and
nothing of bass. The program never runs here, and it never sees this process's values. The semantics
are those of evalplus 0.3.1 (arXiv 2305.01210): its time limits, its tolerance for floats, and its
rules for single problems.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` would build enumerations
import marshal
import math
import time
from collections import namedtuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

# EvalPlus's limits. A call may take FACTOR times as long as the canonical solution, but at least
# LEAST seconds. All calls together may take the sum of their limits, but at most MOST seconds.
# EvalPlus adds SPARE for starting the program.
FACTOR, LEAST, MOST, SPARE = 4.0, 1.0, 60.0, 2.0
REFERENCE_SECONDS = 60.0  # for the canonical solution's calls, which EvalPlus does not limit
TOLERANCE, RELATIVE = 1e-6, 1e-7  # for floats, where the problem has no tolerance; numpy's default
SHOWN = 80  # characters of a value in a message
# Values in a result, such as texts in a list. Sending a million takes 1 to 3 seconds. Inputs with a
# larger expected result are left out.
MOST_VALUES = 1_000_000

# MBPP problems whose results are compared as sets, and those with only "is it None?" compared
AS_SETS = {
    "similar_elements", "find_char_long", "common_in_nested_lists", "extract_singly",
    "larg_nnum", "intersection_array", "find_dissimilar", "Diff",
}  # fmt: skip
NOT_NONE = {"check_str", "text_match_three", "text_starta_endb"}


# An input: its number, its arguments as `marshal` bytes, the expected result, the limit in seconds.
# `typing` would cost milliseconds.
Case = namedtuple("Case", ("number", "call", "result", "limit"))


class WrongError(Exception):
    """A wrong result, or an exception of the program. `about` describes it."""

    def __init__(self, about: str) -> None:
        super().__init__(about)
        self.about = about


class OverTimeError(WrongError):
    """A time limit is exceeded. The sandbox reads `limit`, in seconds."""

    def __init__(self, about: str, limit: float) -> None:
        super().__init__(about)
        self.limit = limit


def _tuples(values: Any) -> list[Any]:
    return [tuple(one) for one in values]


def _deep_tuples(value: Any) -> Any:
    return tuple(map(_deep_tuples, value)) if isinstance(value, list) else value


# JSON has no tuples, sets and complex numbers. Each pair has a function that rebuilds the arguments
# of a call, and the numbers of the MBPP problems that need it.
SHAPES: tuple[tuple[Callable[[Any], Any], set[int]], ...] = (
    (
        _tuples,
        {2, 116, 132, 143, 222, 261, 273, 394, 399, 421, 424, 429, 470, 560, 579, 596, 616, 630}
        | {726, 740, 744, 809},
    ),
    (
        lambda call: list(map(_tuples, call)),
        {63, 64, 70, 94, 120, 237, 272, 299, 400, 409, 417, 438, 473, 614, 780},
    ),
    (lambda call: [_tuples(call[0]), call[1]], {75, 413, 444, 753}),
    (lambda call: [call[0], tuple(call[1])], {106, 750}),
    (lambda call: [[set(one) if isinstance(one, list) and one else {} for one in call[0]]], {115}),
    (lambda call: [float(call[0]), complex(call[1])], {124}),
    (lambda call: [tuple(call[0]), call[1]], {250, 405, 446, 617, 720, 763, 808}),
    (lambda call: [complex(call[0])], {252}),
    (lambda call: [tuple(_tuples(one)) for one in call], {259, 401, 445}),
    (lambda call: [tuple(tuple(one) if isinstance(one, list) else one for one in call[0])], {278}),
    (lambda call: [tuple(call[0]), call[1], call[2]], {307}),
    (lambda call: [{key: tuple(one) for key, one in call[0].items()}, *call[1:]], {722}),
    (_deep_tuples, {580, 615, 791}),
)


def rebuild(number: int, call: Any) -> Any:
    """Return the arguments of a call of MBPP problem `number`, with its tuples, sets and so on."""
    return next((shape(call) for shape, numbers in SHAPES if number in numbers), call)


class Check:
    """The check of one problem's function on one set of inputs.

    Making it runs the canonical solution, which gives the expected results and the time limits.

    Args:
        mbpp: number of the MBPP problem. 0: it is a problem of HumanEval.
        entry_point: name of the function.
        solution: the canonical solution, a whole program.
        atol: the problem's absolute tolerance.
        calls: `marshal` bytes of the list of argument lists, as they are in the data.
        transfer_seconds: returns how long it takes to send a value to or from the program.

    Raises:
        WrongError: the canonical solution fails or takes too long.
    """

    def __init__(
        self,
        mbpp: int,
        entry_point: str,
        solution: str,
        atol: float,
        calls: bytes,
        transfer_seconds: Callable[[Any], float],
    ) -> None:
        self._mbpp, self._entry_point, self._atol = mbpp, entry_point, atol
        self._total = self._deadline = math.inf
        _signal.signal(_signal.SIGALRM, self._stop)
        # Packed, so that each run gets arguments of its own: programs change them in place.
        packed = [marshal.dumps(rebuild(mbpp, one)) for one in marshal.loads(calls)]
        cases = self._run_reference(solution, packed)
        self._within(REFERENCE_SECONDS, "sending the results")
        total = min(MOST, sum(case.limit for case in cases)) + SPARE
        # EvalPlus's programs share their memory with the check. These do not, and sending a large
        # value can take longer than the call.
        sending = [
            2 * (transfer_seconds(marshal.loads(case.call)) + transfer_seconds(case.result))
            for case in cases
        ]
        self._cases = [
            case._replace(limit=case.limit + seconds)
            for case, seconds in zip(cases, sending, strict=True)
        ]
        # The program starts now.
        self._total = total + sum(sending)
        self._deadline = time.perf_counter() + self._total
        self._within(math.inf, "")

    def _run_reference(self, solution: str, packed: list[bytes]) -> list[Case]:
        """Run the canonical solution on all inputs. Returns the cases."""
        self._within(REFERENCE_SECONDS, "the canonical solution")
        scope: dict[str, Any] = {"__name__": "reference"}
        exec(compile(solution, "<reference>", "exec", dont_inherit=True), scope)
        cases = []
        for number, call in enumerate(packed):
            arguments, start = marshal.loads(call), time.perf_counter()
            try:
                result = scope[self._entry_point](*arguments)
            except OverTimeError:
                raise
            except BaseException as error:
                raise WrongError(
                    f"the canonical solution, input {number}: {_text(error)}"
                ) from None
            limit = max(LEAST, FACTOR * (time.perf_counter() - start))
            if self._mbpp and self._entry_point in NOT_NONE:
                result = result is not None
            if _count(result) <= MOST_VALUES:
                cases.append(Case(number, call, result, limit))
        return cases

    def _within(self, seconds: float, what: str) -> None:
        """Raise OverTimeError in `seconds` from now, or earlier at the deadline of all calls."""
        left = max(self._deadline - time.perf_counter(), 1e-3)  # 0 would set no alarm
        self._limit, self._what = seconds, what
        if left < seconds:
            self._limit, self._what = self._total, "all inputs together"
        _signal.setitimer(_signal.ITIMER_REAL, min(left, seconds))

    def _stop(self, *_: object) -> NoReturn:
        raise OverTimeError(f"{self._what} took more than {self._limit:.3g} s", self._limit)

    def __call__(self, function: Any) -> None:
        """Compare a function with the canonical solution. WrongError at the first difference."""
        atol = self._atol
        for number, call, expected, limit in self._cases:
            try:
                self._within(limit, f"input {number}")
                result = function(*marshal.loads(call))
                self._within(math.inf, "")
                before = atol
                if atol == 0 and _is_floats(expected):
                    atol = TOLERANCE  # for the inputs that follow too, as in EvalPlus
                if not self._mbpp and self._entry_point == "find_zero":  # any root counts
                    right = abs(_polynomial(marshal.loads(call)[0], result)) <= before
                else:
                    right = self._is_right(marshal.loads(call), result, expected, before)
                    right = right or (atol != 0 and _is_close(result, expected, atol))
            except (MemoryError, OverTimeError):
                raise
            except BaseException as error:
                raise WrongError(f"{_text(error)} (input {number})") from None
            if not right:
                text = f"returned {_shown(result)}, not {_shown(expected)}"
                raise WrongError(f"input {number}: {text}")
        _signal.setitimer(_signal.ITIMER_REAL, 0)

    def _is_right(self, arguments: Any, result: Any, expected: Any, atol: float) -> bool:
        """Return whether a result is right by the problem's rule, without tolerance for floats."""
        name = self._entry_point
        equal = bool(result == expected)
        if self._mbpp and name in AS_SETS:
            equal = set(result) == set(expected)
        elif self._mbpp and name in NOT_NONE:
            equal = expected == (result if isinstance(result, bool) else result is not None)
        elif self._mbpp and not equal:
            equal = _also_counts(name, arguments, result, atol)
        return equal


def _count(value: Any) -> int:
    """Return the number of values in a value. Stops counting above MOST_VALUES."""
    waiting, found = [value], 0
    while waiting and found <= MOST_VALUES:
        found += 1
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += [*one, *one.values()]
        elif isinstance(one, (list, tuple, set, frozenset)):
            found += len(one)
            if found <= MOST_VALUES:
                waiting += [part for part in one if isinstance(part, (list, tuple, set, dict))]
    return found


def _also_counts(name: str, arguments: Any, result: Any, atol: float) -> bool:
    """Return whether an unequal result is right, for MBPP problems with several right results."""
    if name == "are_equivalent":  # Mbpp/164
        return True
    if name == "sum_div":  # Mbpp/295: whether a number divides itself
        return bool(result == 0)
    if name == "surface_Area":  # Mbpp/581: the height may be the pyramid's, not its side's
        return bool(abs(result - _pyramid(*arguments)) <= atol)
    if name == "digit_distance_nums":  # Mbpp/558: the shorter number may get zeros in front
        return bool(result == _digit_distance(*arguments))
    return False


def _is_floats(value: Any) -> bool:
    """Return whether a value is a float, or a list or tuple of floats that is not empty."""
    if isinstance(value, (list, tuple)) and value:
        return all(isinstance(one, float) for one in value)
    return isinstance(value, float)


def _is_close(result: Any, expected: Any, atol: float) -> bool:
    if type(result) is not type(expected):
        return False
    if isinstance(expected, (list, tuple)) and len(result) != len(expected):
        return False
    import numpy  # which takes longer to import than most checks take

    try:
        found = numpy.asarray(result)  # once: an object of the program could change its length
        # Unlike EvalPlus, where [[]] is close to [0.5], because no numbers are compared.
        if not found.size and numpy.size(expected):
            return False
        return bool(numpy.allclose(found, expected, rtol=RELATIVE, atol=atol))
    except (TypeError, ValueError):  # texts, for example
        return False


def _polynomial(coefficients: Any, x: Any) -> float:
    return sum(one * math.pow(x, power) for power, one in enumerate(coefficients))


def _pyramid(side: float, height: float) -> int:
    """Return the surface of a square pyramid with this height, rounded."""
    return round(side * side + 2 * side * math.sqrt((side / 2) ** 2 + height**2))


def _digit_distance(one: int, other: int) -> int:
    """Return the sum of the differences of digits, from the last digit on."""
    width = max(len(str(one)), len(str(other)))
    pairs = zip(str(one).zfill(width), str(other).zfill(width), strict=True)
    return sum(abs(int(left) - int(right)) for left, right in pairs)


def _text(error: BaseException) -> str:
    """Return one line about an exception, by the program's process if that raised it."""
    about = getattr(error, "described", None)
    return str(about) if about else f"{type(error).__name__}: {error}"


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except (MemoryError, OverTimeError):
        raise
    except BaseException:
        return "a value that cannot be shown"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
