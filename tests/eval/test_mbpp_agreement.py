"""Compare MBPP's verdicts with the published semantics: one process runs program, set-up, tests.

The reference (Austin et al., arXiv 2108.07732) is written here: each program runs in a fork of a
plain interpreter, and passes if no statement raises.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mutants import mutants

from bass_cli.eval.tasks import load_task
from bass_cli.sandbox.programs import Limits, Sandbox

REFERENCE = """
import json, os, signal, sys
passed = []
for text in json.load(sys.stdin):
    child = os.fork()
    if not child:
        signal.setitimer(signal.ITIMER_PROF, 0.5)  # seconds of processor time
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        try:
            exec(text, {"__name__": "program"})
        except BaseException:
            os._exit(1)
        os._exit(0)
    passed.append(os.waitpid(child, 0)[1] == 0)
json.dump(passed, sys.stdout)
"""
# function, program, tests, and fields of the "full" or of the "sanitized" layout
PROBLEMS: list[tuple[str, str, list[str], dict[str, Any]]] = [
    (
        "similar_elements",
        "def similar_elements(a, b):\n    return tuple(set(a) & set(b))",
        ["assert set(similar_elements((3, 4, 5), (5, 4, 10))) == set((4, 5))"],
        {"prompt": "Share.", "test_imports": []},
    ),
    (
        "is_not_prime",
        "import math\ndef is_not_prime(n):\n    result = False\n    for i in range(2, int(math.sqrt(n)) + 1):\n"
        "        if n % i == 0:\n            result = True\n    return result",
        ["assert is_not_prime(2) == False", "assert is_not_prime(10) == True"],
        {"text": "Prime?", "test_setup_code": ""},
    ),
    (
        "circle",
        "def circle(r):\n    return 3.1415 * (2 * r)",
        ["assert math.isclose(circle(10), 62.83, rel_tol=0.001)"],
        {"prompt": "Circle.", "test_imports": ["import math"]},
    ),
    (
        "largest",
        "def largest(nums, n):\n    return heapq.nlargest(n, nums)",
        ["assert largest([25, 35, 22], 2) == [35, 25]", "assert largest([], 1) == []"],
        {"prompt": "Largest.", "test_imports": ["import heapq"]},
    ),
    (
        "height",
        "class Node:\n    def __init__(self, data):\n        self.data = data\n"
        "        self.left = None\n        self.right = None\n"
        "def height(node):\n    if node is None:\n        return 0\n"
        "    return max(height(node.left), height(node.right)) + 1",
        ["assert height(root) == 2"],
        {"text": "Height.", "test_setup_code": "root = Node(1)\nroot.left = Node(2)"},
    ),
    (
        "sum",
        "def sum(a, b):\n    return a + b",
        ["assert sum(10, 15) == 25"],
        {"text": "Add.", "code": "def sum(a, b): ..."},
    ),
    (
        "counted",
        "from collections import Counter\ndef counted(words):\n    return Counter(words).most_common(2)",
        ["assert counted(['a', 'b', 'a']) == [('a', 2), ('b', 1)]"],
        {"text": "Count."},
    ),
    (
        "remove",
        "def remove(items, gone):\n    items.remove(gone)\n    return items",
        ["data = [1, 2, 3]", "assert remove(data, 2) == [1, 3]", "assert data == [1, 3]"],
        {"text": "Remove."},
    ),
    (
        "first_of",
        "def first_of(rows):\n    if not rows:\n        raise ValueError('none')\n    return rows[0]",
        [
            "assert first_of([1]) == 1",
            "try:\n    first_of([])\n    assert False\nexcept ValueError:\n    pass",
        ],
        {"text": "First."},
    ),
    (
        "squares",
        "def squares(n):\n    return {k: k * k for k in range(n)}",
        ["assert squares(3) == {0: 0, 1: 1, 2: 4}", "assert list(squares(2)) == [0, 1]"],
        {"text": "Squares."},
    ),
]
MORE = ["", "raise SystemExit(0)", "import os\nos._exit(1)", "def broken(:", "while True: pass"]


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_verdicts_are_those_of_one_process(
    count: int, tmp_path: Path, sandbox_folders: Path
) -> None:
    rows = [
        {"task_id": number, "test_list": tests, **fields}
        for number, (_, _, tests, fields) in enumerate(PROBLEMS)
    ]
    data = tmp_path / "mbpp.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = load_task("mbpp", str(data))
    programs, whole = {}, {}
    for row, (name, right, tests, fields) in zip(rows, PROBLEMS, strict=True):
        texts = [
            right,
            *mutants(right, name, count, row["task_id"]),
            *(MORE if row["task_id"] == 0 else ()),
        ]
        before = [*fields.get("test_imports", ()), fields.get("test_setup_code", "")]
        for place, text in enumerate(texts):
            key = (row["task_id"], place)
            programs[key] = task.program(task.problems[f"Mbpp/{row['task_id']}"], text, whole=False)
            # A function may use a module that only the tests import.
            whole[key] = "\n".join([text, *before, *tests])
    with Sandbox(workers=2, limits=Limits(seconds=5.0, cpu_seconds=1)) as sandbox:
        endings = dict(sandbox.run(programs.items()))
    ours = {key: endings[key].passed for key in whole}
    command = [sys.executable, "-c", REFERENCE]
    done = subprocess.run(
        command, input=json.dumps(list(whole.values())), capture_output=True, text=True, check=True
    )
    theirs = dict(zip(whole, json.loads(done.stdout), strict=True))
    assert ours == theirs, {key: whole[key] for key in whole if ours[key] != theirs[key]}
    assert all(theirs[number, 0] for number in range(len(PROBLEMS)))
    assert 3 <= sum(theirs.values()) - len(PROBLEMS) < len(theirs) - len(PROBLEMS) - 10
