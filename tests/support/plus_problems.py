"""Problems in EvalPlus's layout with right and wrong solutions, and the verdicts on them.

Each solution has the verdicts of the base tests and of the plus tests, as evalplus 0.3.1 gives them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple


class Solution(NamedTuple):
    """A program (without the prompt), and whether it passes the base tests and the plus tests."""

    text: str
    base: bool
    plus: bool


class Case(NamedTuple):
    """A problem's record and its solutions by name."""

    record: dict[str, Any]
    solutions: dict[str, Solution]


def _case(
    task_id: str,
    name: str,
    code: str,
    base: list[Any],
    plus: list[Any],
    solutions: dict[str, tuple[str, bool, bool]],
    atol: float = 0,
) -> Case:
    record = {
        "task_id": task_id, "prompt": f'"""Write {name}."""\n', "entry_point": name, "canonical_solution": code,
        "contract": "", "base_input": base, "plus_input": plus, "atol": atol,
    }  # fmt: skip
    return Case(
        record,
        {key: Solution(*one) for key, one in solutions.items()}
        | {"canonical": Solution(code, True, True)},
    )


def _f(name: str, body: str, arguments: str = "x") -> str:
    return f"def {name}({arguments}):\n    {body}\n"


HUMANEVAL = [
    _case(
        "HumanEval/1000",
        "double",
        _f("double", "return 2 * x"),
        [[1], [2]],
        [[0], [-3], [10**20]],
        {
            "right by another way": (_f("double", "return x + x"), True, True),
            "wrong": (_f("double", "return x"), False, False),
            "wrong only on plus inputs": (_f("double", "return 2 * abs(x)"), True, False),
            "a text": (_f("double", "return str(2 * x)"), False, False),
            "a float that is equal": (_f("double", "return 2.0 * x"), True, True),
            "raises": (_f("double", "raise ValueError(x)"), False, False),
            "raises on plus inputs": (
                _f("double", "return 2 * x if x > 0 else 1 // 0"),
                True,
                False,
            ),
            "exits": (_f("double", "raise SystemExit(0)"), False, False),
            "ends the process": ("import os\n" + _f("double", "os._exit(0)"), False, False),
            "sleeps": ("import time\n" + _f("double", "time.sleep(30)"), False, False),
            "sleeps on a plus input": (
                "import time\n" + _f("double", "time.sleep(30 if x == -3 else 0); return 2 * x"),
                True,
                False,
            ),
            "never starts": ("import time\ntime.sleep(60)\n", False, False),
            "no function": ("twice = 2\n", False, False),
            "another name": (_f("twice", "return 2 * x"), False, False),
            "broken syntax": ("def double(x:\n    return 2 * x\n", False, False),
            "an exception at the end": (_f("double", "return 2 * x") + "1 / 0\n", False, False),
            "prints": (_f("double", "print(x); return 2 * x"), True, True),
            "reads": (_f("double", "input(); return 2 * x"), False, False),
            "equal to everything": (
                "class A(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
                + _f("double", "return A(2 * x)"),
                True,
                True,
            ),
        },
    ),
    _case(
        "HumanEval/1001",
        "mean",
        _f("mean", "return sum(x) / len(x)"),
        [[[1.0, 2.0]]],
        [[[0.1, 0.2, 0.3]], [[0.125, 0.256]], [[2, 2]]],
        {
            "rounded to 7 digits": (_f("mean", "return round(sum(x) / len(x), 7)"), True, True),
            "rounded to 2 digits": (_f("mean", "return round(sum(x) / len(x), 2)"), True, False),
            "whole": (_f("mean", "return sum(x) // len(x)"), False, False),
            "a list": (_f("mean", "return [sum(x) / len(x)]"), False, False),
            "an int where it is equal": (
                _f("mean", "y = sum(x) / len(x); return int(y) if y == int(y) else y"),
                True,
                True,
            ),
        },
    ),
    _case(
        "HumanEval/1002",
        "halves",
        _f("halves", "return [y / 2 for y in x]"),
        [[[1.0, 3.0]], [[]]],
        [[[0.1]], [[0.3, 0.7]]],
        {
            "near": (_f("halves", "return [y / 2 + 1e-7 for y in x]"), True, True),
            "a tuple": (_f("halves", "return tuple(y / 2 for y in x)"), False, False),
            "too short": (_f("halves", "return [y / 2 for y in x][:1]"), False, False),
        },
    ),
    # The first result makes the tolerance 1e-6 for all that follow, also for whole numbers.
    _case(
        "HumanEval/1003",
        "scaled",
        _f("scaled", "return x * 3 if x > 9 else x / 2"),
        [[1], [10**9]],
        [[10**9], [1]],
        {
            "near, after a float": (
                _f("scaled", "return x * 3 + 1 if x > 9 else x / 2"),
                True,
                False,
            )
        },
    ),
    _case(
        "HumanEval/1004",
        "root",
        _f("root", "return x ** 0.5"),
        [[2.0], [9.0]],
        [[0.0], [1e4]],
        {
            "within the problem's tolerance": (_f("root", "return x ** 0.5 + 5e-3"), True, True),
            "beyond it": (_f("root", "return x ** 0.5 + 5e-2"), False, False),
        },
        atol=1e-2,
    ),
    _case(
        "HumanEval/1005",
        "ordered",
        _f("ordered", "return sorted(x)"),
        [[[3, 1, 2]], [[]]],
        [[[1, 1]], [[2, 1]]],
        {
            "changes its argument": (_f("ordered", "x.sort(); return x"), True, True),
            "empties its argument": (
                _f("ordered", "y = sorted(x); x.clear(); return y"),
                True,
                True,
            ),
            "returns its argument": (_f("ordered", "return x"), False, False),
            "remembers results": (
                "seen = []\n"
                + _f("ordered", "seen.append(1); return sorted(x) if len(seen) < 3 else []"),
                True,
                True,
            ),
            "counts calls": (
                "seen = []\n"
                + _f("ordered", "seen.append(1); return sorted(x) if len(seen) < 2 else None"),
                False,
                False,
            ),
        },
    ),
    _case(
        "HumanEval/1006",
        "letters",
        _f("letters", "return list(dict.fromkeys(x))"),
        [["aba"], [""]],
        [["hello world"]],
        {
            "in an order that is not fixed": (
                _f("letters", "return sorted(set(x), key=lambda one: (len(one), -ord(one)))"),
                False,
                False,
            ),
            "an iterator": (_f("letters", "return iter(dict.fromkeys(x))"), False, False),
            "keys": (_f("letters", "return dict.fromkeys(x).keys()"), False, False),
        },
    ),
    _case(
        "HumanEval/32",
        "find_zero",
        "import math\n" + _f("find_zero", "return -x[0] / x[1]"),
        [[[1, 2]]],
        [[[-6, 1]], [[300, -700]]],
        {
            "another root": (_f("find_zero", "return -x[0] / x[1] + 1e-8"), True, True),
            "near the root of a steep line": (
                _f("find_zero", "return -x[0] / x[1] + 4e-5"),
                True,
                False,
            ),
            "no root": (_f("find_zero", "return 0.0"), False, False),
        },
        atol=1e-4,
    ),
    _case(
        "HumanEval/1007",
        "largest",
        _f("largest", "return max(x)"),
        [[[1, 2]]],
        [[[1.5, float("inf")]], [[float("-inf"), -1.0]]],
        {
            "without infinity": (
                _f("largest", "return max(y for y in x if abs(y) < 1e300)"),
                True,
                False,
            )
        },
    ),
]
MBPP = [
    _case(
        "Mbpp/2",
        "similar_elements",
        _f("similar_elements", "return tuple(set(x) & set(y))", "x, y"),
        [[[3, 4, 5], [5, 4, 10]]],
        [[[], []], [[1, 2, 2], [2, 1]]],
        {
            "a list, reversed": (
                _f("similar_elements", "return sorted(set(x) & set(y), reverse=True)", "x, y"),
                True,
                True,
            ),
            "twice": (
                _f("similar_elements", "return [z for z in x + x if z in y]", "x, y"),
                True,
                True,
            ),
            "needs tuples": (
                _f("similar_elements", "return [z for z in x + (1,) if z in y]", "x, y"),
                True,
                True,
            ),
            "None if there are none": (
                _f("similar_elements", "return set(x) & set(y) or None", "x, y"),
                True,
                False,
            ),
        },
    ),
    _case(
        "Mbpp/115",
        "empty_dit",
        _f("empty_dit", "return all(not y for y in x)"),
        [[[[], [], []]], [[[1, 2], []]]],
        [[[]], [[["a"]]]],
        {
            "by class": (_f("empty_dit", "return all(isinstance(y, dict) for y in x)"), True, True),
            "by list": (_f("empty_dit", "return all(y == [] for y in x)"), False, True),
        },
    ),
    _case(
        "Mbpp/124",
        "angle_complex",
        "import cmath\n" + _f("angle_complex", "return cmath.phase(x + y)", "x, y"),
        [[0, "1j"], [2, "1j"]],
        [[0, "0j"], [-1, "2+1j"]],
        {
            "the real part": (_f("angle_complex", "return x", "x, y"), False, False),
            "near": (
                "import cmath\n"
                + _f("angle_complex", "return cmath.phase(x + y) * (1 + 1e-8)", "x, y"),
                True,
                True,
            ),
        },
    ),
    _case(
        "Mbpp/252",
        "convert",
        "import cmath\n" + _f("convert", "return cmath.polar(x)"),
        [["1"]],
        [["3+4j"]],
        {
            "a list": (
                "import cmath\n" + _f("convert", "return list(cmath.polar(x))"),
                False,
                False,
            ),
            "by hand": (
                "import cmath\n" + _f("convert", "return abs(x), cmath.phase(x)"),
                True,
                True,
            ),
        },
    ),
    _case(
        "Mbpp/164",
        "are_equivalent",
        _f("are_equivalent", "return x == y", "x, y"),
        [[36, 57]],
        [[1, 1]],
        {
            "anything": (_f("are_equivalent", "return 'anything'", "x, y"), True, True),
            "an exception": (_f("are_equivalent", "return 1 // (x - y)", "x, y"), True, False),
        },
    ),
    _case(
        "Mbpp/295",
        "sum_div",
        _f("sum_div", "return sum(y for y in range(1, x) if x % y == 0)"),
        [[8]],
        [[12], [1]],
        {
            "zero": (_f("sum_div", "return 0"), True, True),
            "with itself": (
                _f("sum_div", "return sum(y for y in range(1, x + 1) if x % y == 0)"),
                False,
                False,
            ),
        },
    ),
    _case(
        "Mbpp/581",
        "surface_Area",
        _f("surface_Area", "return 2 * x * y + x ** 2", "x, y"),
        [[3, 4]],
        [[1, 2], [6, 5]],
        {
            "by the height": (
                _f(
                    "surface_Area",
                    "return round(x * x + 2 * x * (x * x / 4 + y * y) ** 0.5)",
                    "x, y",
                ),
                True,
                True,
            ),
            "by neither": (_f("surface_Area", "return x * x + 1", "x, y"), False, False),
        },
    ),
    _case(
        "Mbpp/558",
        "digit_distance_nums",
        _f(
            "digit_distance_nums",
            "return sum(abs(int(a) - int(b)) for a, b in zip(str(x), str(y)))",
            "x, y",
        ),
        [[23, 56]],
        [[1, 256]],
        {
            "with zeros in front": (
                _f(
                    "digit_distance_nums",
                    "pairs = zip(str(x).zfill(9), str(y).zfill(9))\n    return sum(abs(int(a) - int(b)) for a, b in pairs)",
                    "x, y",
                ),
                True,
                True,
            ),
            "of the sums": (_f("digit_distance_nums", "return abs(x - y)", "x, y"), False, False),
        },
    ),
    _case(
        "Mbpp/737",
        "check_str",
        "import re\n" + _f("check_str", "return re.match('[aeiou]', x)"),
        [["annie"], ["dawood"]],
        [["Else"], [""]],
        {
            "true or false": (_f("check_str", "return x[:1] in tuple('aeiou')"), True, True),
            "a text or None": (
                _f("check_str", "return x if x[:1] in tuple('aeiou') else None"),
                True,
                True,
            ),
            "capitals too": (
                _f("check_str", "return x[:1].lower() in tuple('aeiou')"),
                True,
                False,
            ),
            "a text or an empty one": (
                _f("check_str", "return x if x[:1] in tuple('aeiou') else ''"),
                False,
                False,
            ),
        },
    ),
    _case(
        "Mbpp/580",
        "extract_even",
        _f(
            "extract_even",
            "even = (y for y in x if isinstance(y, tuple) or y % 2 == 0)\n"
            "    return tuple(extract_even(y) if isinstance(y, tuple) else y for y in even)",
        ),
        [[[4, 5, [7, 6, [2, 4]], 6]]],
        [[[]], [[[], [1]]]],
        {
            "for lists": (
                _f("extract_even", "return tuple(y for y in x if isinstance(y, list))"),
                False,
                False,
            )
        },
    ),
]


def write_plus(folder: Path) -> tuple[str, str]:
    """Write the problems as EvalPlus's files. Returns the paths of HumanEval+ and MBPP+."""
    paths = []
    for name, cases in (("HumanEvalPlus-v0.1.0.jsonl", HUMANEVAL), ("MbppPlus-v0.1.0.jsonl", MBPP)):
        paths.append(str(folder / name))
        lines = (json.dumps(case.record) + "\n" for case in cases)
        Path(paths[-1]).write_text("".join(lines))
    return paths[0], paths[1]
