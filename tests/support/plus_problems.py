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


Texts = dict[str, str]


def _case(
    task_id: str,
    signature: str,
    canonical: str,
    base: list[Any],
    plus: list[Any],
    *,
    passes: Texts | None = None,
    fails_plus: Texts | None = None,
    fails_base: Texts | None = None,
    fails: Texts | None = None,
    atol: float = 0,
) -> Case:
    """Make a problem. A solution is the function's body in one line, or a program of several lines.

    Args:
        passes, fails: Solutions that pass, or fail, both kinds of tests.
        fails_plus, fails_base: Solutions that fail one kind only.
    """

    def program(text: str) -> str:
        return text if "\n" in text else f"def {signature}:\n    {text}\n"

    name, code = signature.partition("(")[0], program(canonical)
    record = {
        "task_id": task_id, "prompt": f'"""Write {name}."""\n', "entry_point": name, "canonical_solution": code,
        "contract": "", "base_input": base, "plus_input": plus, "atol": atol,
    }  # fmt: skip
    verdicts = (passes, True, True), (fails_plus, True, False), (fails_base, False, True)
    solutions = {
        key: Solution(program(text), *passed)
        for texts, *passed in (*verdicts, (fails, False, False))
        for key, text in (texts or {}).items()
    }
    return Case(record, solutions | {"canonical": Solution(code, True, True)})


HUMANEVAL = [
    _case(
        "HumanEval/1000",
        "double(x)",
        "return 2 * x",
        [[1], [2]],
        [[0], [-3], [10**20]],
        passes={
            "right by another way": "return x + x",
            "a float that is equal": "return 2.0 * x",
            "prints": "print(x); return 2 * x",
            "equal to everything": "class A(int):\n"
            "    def __eq__(self, other): return True\n"
            "    __hash__ = int.__hash__\n"
            "def double(x): return A(2 * x)\n",
        },
        fails_plus={
            "wrong only on plus inputs": "return 2 * abs(x)",
            "raises on plus inputs": "return 2 * x if x > 0 else 1 // 0",
            "sleeps on a plus input": "import time; time.sleep(30 if x == -3 else 0); return 2 * x",
        },
        fails={
            "wrong": "return x",
            "a text": "return str(2 * x)",
            "raises": "raise ValueError(x)",
            "exits": "raise SystemExit(0)",
            "ends the process": "import os; os._exit(0)",
            "sleeps": "import time; time.sleep(30)",
            "never starts": "import time\ntime.sleep(60)\n",
            "no function": "twice = 2\n",
            "another name": "def twice(x):\n    return 2 * x\n",
            "broken syntax": "def double(x:\n    return 2 * x\n",
            "an exception at the end": "def double(x):\n    return 2 * x\n1 / 0\n",
            "reads": "input(); return 2 * x",
        },
    ),
    _case(
        "HumanEval/1001",
        "mean(x)",
        "return sum(x) / len(x)",
        [[[1.0, 2.0]]],
        [[[0.1, 0.2, 0.3]], [[0.125, 0.256]], [[2, 2]]],
        passes={
            "rounded to 7 digits": "return round(sum(x) / len(x), 7)",
            "an int where it is equal": "y = sum(x) / len(x); return int(y) if y == int(y) else y",
        },
        fails_plus={"rounded to 2 digits": "return round(sum(x) / len(x), 2)"},
        fails={"whole": "return sum(x) // len(x)", "a list": "return [sum(x) / len(x)]"},
    ),
    _case(
        "HumanEval/1002",
        "halves(x)",
        "return [y / 2 for y in x]",
        [[[1.0, 3.0]], [[]]],
        [[[0.1]], [[0.3, 0.7]]],
        passes={"near": "return [y / 2 + 1e-7 for y in x]"},
        fails={
            "a tuple": "return tuple(y / 2 for y in x)",
            "too short": "return [y / 2 for y in x][:1]",
        },
    ),
    # The first result makes the tolerance 1e-6 for all that follow, also for whole numbers.
    _case(
        "HumanEval/1003",
        "scaled(x)",
        "return x * 3 if x > 9 else x / 2",
        [[1], [10**9]],
        [[10**9], [1]],
        fails_plus={"near, after a float": "return x * 3 + 1 if x > 9 else x / 2"},
    ),
    _case(
        "HumanEval/1004",
        "root(x)",
        "return x ** 0.5",
        [[2.0], [9.0]],
        [[0.0], [1e4]],
        atol=0.01,
        passes={"within the problem's tolerance": "return x ** 0.5 + 5e-3"},
        fails={"beyond it": "return x ** 0.5 + 5e-2"},
    ),
    _case(
        "HumanEval/1005",
        "ordered(x)",
        "return sorted(x)",
        [[[3, 1, 2]], [[]]],
        [[[1, 1]], [[2, 1]]],
        passes={
            "changes its argument": "x.sort(); return x",
            "empties its argument": "y = sorted(x); x.clear(); return y",
            "remembers results": "seen = []\ndef ordered(x):\n    seen.append(1)\n"
            "    return sorted(x) if len(seen) < 3 else []\n",
        },
        fails={
            "returns its argument": "return x",
            "counts calls": "seen = []\ndef ordered(x):\n    seen.append(1)\n"
            "    return sorted(x) if len(seen) < 2 else None\n",
        },
    ),
    _case(
        "HumanEval/1006",
        "letters(x)",
        "return list(dict.fromkeys(x))",
        [["aba"], [""]],
        [["hello world"]],
        fails={
            "in an order that is not fixed": "return sorted(set(x), key=lambda y: -ord(y))",
            "an iterator": "return iter(dict.fromkeys(x))",
            "keys": "return dict.fromkeys(x).keys()",
        },
    ),
    _case(
        "HumanEval/32",
        "find_zero(x)",
        "import math; return -x[0] / x[1]",
        [[[1, 2]]],
        [[[-6, 1]], [[300, -700]]],
        atol=1e-4,
        passes={"another root": "return -x[0] / x[1] + 1e-8"},
        fails_plus={"near the root of a steep line": "return -x[0] / x[1] + 4e-5"},
        fails={"no root": "return 0.0"},
    ),
    _case(
        "HumanEval/1007",
        "largest(x)",
        "return max(x)",
        [[[1, 2]]],
        [[[1.5, float("inf")]], [[float("-inf"), -1.0]]],
        fails_plus={"without infinity": "return max(y for y in x if abs(y) < 1e300)"},
    ),
]
MBPP = [
    _case(
        "Mbpp/2",
        "similar_elements(x, y)",
        "return tuple(set(x) & set(y))",
        [[[3, 4, 5], [5, 4, 10]]],
        [[[], []], [[1, 2, 2], [2, 1]]],
        passes={
            "a list, reversed": "return sorted(set(x) & set(y), reverse=True)",
            "twice": "return [z for z in x + x if z in y]",
            "needs tuples": "return [z for z in x + (1,) if z in y]",
        },
        fails_plus={"None if there are none": "return set(x) & set(y) or None"},
    ),
    _case(
        "Mbpp/115",
        "empty_dit(x)",
        "return all(not y for y in x)",
        [[[[], [], []]], [[[1, 2], []]]],
        [[[]], [[["a"]]]],
        passes={"by class": "return all(isinstance(y, dict) for y in x)"},
        fails_base={"by list": "return all(y == [] for y in x)"},
    ),
    _case(
        "Mbpp/124",
        "angle_complex(x, y)",
        "import cmath; return cmath.phase(x + y)",
        [[0, "1j"], [2, "1j"]],
        [[0, "0j"], [-1, "2+1j"]],
        passes={"near": "import cmath; return cmath.phase(x + y) * (1 + 1e-8)"},
        fails={"the real part": "return x"},
    ),
    _case(
        "Mbpp/252",
        "convert(x)",
        "import cmath; return cmath.polar(x)",
        [["1"]],
        [["3+4j"]],
        passes={"by hand": "import cmath; return abs(x), cmath.phase(x)"},
        fails={"a list": "import cmath; return list(cmath.polar(x))"},
    ),
    _case(
        "Mbpp/164",
        "are_equivalent(x, y)",
        "return x == y",
        [[36, 57]],
        [[1, 1]],
        passes={"anything": "return 'anything'"},
        fails_plus={"an exception": "return 1 // (x - y)"},
    ),
    _case(
        "Mbpp/295",
        "sum_div(x)",
        "return sum(y for y in range(1, x) if x % y == 0)",
        [[8]],
        [[12], [1]],
        passes={"zero": "return 0"},
        fails={"with itself": "return sum(y for y in range(1, x + 1) if x % y == 0)"},
    ),
    _case(
        "Mbpp/581",
        "surface_Area(x, y)",
        "return 2 * x * y + x ** 2",
        [[3, 4]],
        [[1, 2], [6, 5]],
        passes={"by the height": "return round(x * x + 2 * x * (x * x / 4 + y * y) ** 0.5)"},
        fails={"by neither": "return x * x + 1"},
    ),
    _case(
        "Mbpp/558",
        "digit_distance_nums(x, y)",
        "return sum(abs(int(a) - int(b)) for a, b in zip(str(x), str(y)))",
        [[23, 56]],
        [[1, 256]],
        passes={
            "with zeros in front": "a, b = str(x).zfill(9), str(y).zfill(9); "
            "return sum(abs(int(a) - int(b)) for a, b in zip(a, b))"
        },
        fails={"of the sums": "return abs(x - y)"},
    ),
    _case(
        "Mbpp/737",
        "check_str(x)",
        "import re; return re.match('[aeiou]', x)",
        [["annie"], ["dawood"]],
        [["Else"], [""]],
        passes={
            "true or false": "return x[:1] in tuple('aeiou')",
            "a text or None": "return x if x[:1] in tuple('aeiou') else None",
        },
        fails_plus={"capitals too": "return x[:1].lower() in tuple('aeiou')"},
        fails={"a text or an empty one": "return x if x[:1] in tuple('aeiou') else ''"},
    ),
    _case(
        "Mbpp/580",
        "extract_even(x)",
        "even = (y for y in x if isinstance(y, tuple) or y % 2 == 0); "
        "return tuple(extract_even(y) if isinstance(y, tuple) else y for y in even)",
        [[[4, 5, [7, 6, [2, 4]], 6]]],
        [[[]], [[[], [1]]]],
        fails={"for lists": "return tuple(y for y in x if isinstance(y, list))"},
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
