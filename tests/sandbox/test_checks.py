"""Tests in a separate process: no cheat passes, and honest programs get the verdict of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cheats import CHEATS, RIGHT, TESTS

from bass_cli.sandbox.jail import values
from bass_cli.sandbox.programs import Ending, Limits, Program, Sandbox

LIMITS = Limits(seconds=5.0, cpu_seconds=2, memory_bytes=512 << 20)


@pytest.fixture(scope="module")
def sandbox(sandbox_folders: Path) -> Iterator[Sandbox]:
    with Sandbox(workers=3, limits=LIMITS) as made:
        yield made


@pytest.fixture(scope="module")
def verdicts(sandbox: Sandbox) -> dict[str, Ending]:
    programs = {"right": RIGHT, **CHEATS}
    return dict(
        sandbox.run((name, Program(text, TESTS, ("f",))) for name, text in programs.items())
    )


def test_right_answer_passes_the_tests_of_the_cheats(verdicts: dict[str, Ending]) -> None:
    assert verdicts["right"].passed, verdicts["right"]


@pytest.mark.parametrize("name", CHEATS)
def test_no_program_passes_without_the_right_answer(verdicts: dict[str, Ending], name: str) -> None:
    assert verdicts[name].status in ("failed", "timed out", "out of memory")
    assert verdicts[name].detail


# cheats that reach into the tests' process
REACHES = ("the pipes of other processes", "reads the tests", "traces the tests' process")


def test_tests_process_is_hidden_without_landlock_seccomp_and_another_user() -> None:
    with Sandbox(workers=2, limits=LIMITS, layers=["user", "pid", "mount"]) as made:
        if not {"mount", "pid"} <= set(made.layers):
            pytest.skip("this system refuses namespaces")
        found = dict(made.run((name, Program(CHEATS[name], TESTS, ("f",))) for name in REACHES))
    assert {verdict.status for verdict in found.values()} == {"failed"}, found


@pytest.mark.slow
def test_cheats_fail_without_namespaces() -> None:
    with Sandbox(workers=3, limits=LIMITS, layers=["landlock", "seccomp"]) as made:
        if "seccomp" not in made.layers:
            pytest.skip("this system refuses seccomp")
        found = dict(
            made.run((name, Program(text, TESTS, ("f",))) for name, text in CHEATS.items())
        )
    assert {name for name, verdict in found.items() if verdict.passed} == set()


# programs and tests that pass in one process and must pass in two
TOGETHER: dict[str, tuple[str, str]] = {
    "plain values": ("def f(x): return x",
                     "for x in (1, -1.5, float('inf'), 'ä\\ud800', b'a', [1, (2, {3: {4}})], None, 2j, 10**400,\n"
                     "          frozenset({1}), range(3), bytearray(b'x'), {1: 2}.keys(), True, ..., int, ValueError):\n"
                     "    assert f(x) == x and type(f(x)) is type(x)\nassert f(float('nan')) != f(1)"),
    "changed arguments": ("def f(a, b, c=None):\n    a.sort(); b[0].append(1); c['x'] = 2; return a",
                          "a, b, c = [3, 1], ([],), {}\nassert f(a, b, c=c) == [1, 3]\n"
                          "assert (a, b, c) == ([1, 3], ([1],), {'x': 2})"),
    "exceptions": ("class E(ValueError): pass\ndef f(x):\n    if x: raise E('no')\n    return [][1]",
                   "try: f(1)\nexcept ValueError as e: assert str(e) == 'no'\nelse: assert 0\n"
                   "try: f(0)\nexcept IndexError: pass\nelse: assert 0"),
    "generators": ("def f(n):\n    for x in range(n): yield x", "assert list(f(3)) == [0, 1, 2] and sum(f(4)) == 6\n"
                   "assert 2 in f(3) and [*map(str, f(1))] == ['0']\ng = f(1)\nassert next(g) == 0 and next(g, 7) == 7"),
    "functions as arguments": ("def f(g, xs): return [g(x) for x in xs]",
                               "assert f(lambda x: x + 1, iter([1, 2])) == [2, 3] and f(len, ['ab']) == [2]\n"
                               "assert f(int, ['7']) == [7]"),
    "functions as results": ("def f(n): return lambda x: x + n", "assert f(2)(3) == 5"),
    "classes": ("class Node:\n    def __init__(self, v): self.v, self.left = v, None\n"
                "    def sum(self): return self.v + (self.left.sum() if self.left else 0)\n"
                "    def __getitem__(self, k): return self.v * k\ndef f(node): return node.left.v",
                "root = Node(1)\nroot.left = Node(2)\nroot.left.left = Node(4)\nassert f(root) == 2 and root.sum() == 7\n"
                "assert root.left is root.left and root != Node(1) and root[3] == 3 and root.left.v == 2"),
    "equal objects of the program": ("class P:\n    def __init__(self, x): self.x = x\n"
                                     "    def __eq__(self, other): return type(other) is P and self.x == other.x\n"
                                     "def f(x): return P(x)",
                                     "assert f(1) == P(1) and f(1) != P(2) and f(1) != 1"),
    "subclasses of plain types": ("import collections, enum\nC = collections.namedtuple('C', 'a b')\n"
                                  "class N(enum.IntEnum): A = 3\ndef f(k): return [C(1, 2), N.A, "
                                  "collections.Counter('aab'), collections.OrderedDict(x=1), "
                                  "collections.defaultdict(int)][k]",
                                  "assert f(0) == (1, 2) and f(1) == 3 and f(2) == {'a': 2, 'b': 1}\n"
                                  "assert f(3) == {'x': 1} and f(4) == {}"),
    "exact numbers": ("from fractions import Fraction as F\nfrom decimal import Decimal as D\n"
                      "from collections import deque\n"
                      "def f(k): return [F(1, 3), D('1.10'), deque([1])][k]",
                      "from fractions import Fraction\nfrom decimal import Decimal\n"
                      "assert f(0) * 3 == 1 and f(1) == Decimal('1.1') and list(f(2)) == [1]"),
    "dates": ("import datetime as d\nutc = d.timezone.utc\ndef f(k): return [d.date(2020, 2, 29), d.timedelta(-1, 3), "
              "d.time(1, 2), d.datetime(2020, 1, 2, 3, 4, 5, 6, utc), utc][k]\ndef g(a, b): return (b - a).days",
              "import datetime as d\nutc = d.timezone.utc\nassert [f(k) for k in range(5)] == [d.date(2020, 2, 29), "
              "d.timedelta(-1, 3), d.time(1, 2), d.datetime(2020, 1, 2, 3, 4, 5, 6, utc), utc]\n"
              "assert g(d.date(2020, 1, 1), d.date(2020, 1, 9)) == 8 and f(0) < d.date.max and f(0).day == 29"),
    "counts": ("from collections import *\ndef f(s): return Counter(s)\ndef g(s):\n    d = defaultdict(list)\n"
               "    for c in s: d[c].append(1)\n    return d\ndef h(s): return OrderedDict((c, 1) for c in s)\n"
               "def change(c, o, q): c.update('z'); o['n'] = 1; q.rotate(1)",
               "from collections import *\nassert f('aab')['z'] == 0 and f('aab') + f('b') == Counter('aabb')\n"
               "assert g('ab')['q'] == [] and h('ab') != h('ba') and h('ab') == {'b': 1, 'a': 1}\n"
               "c, o, q = Counter('a'), OrderedDict(), deque([1, 2], 5)\nchange(c, o, q)\n"
               "assert c == Counter('az') and [*o] == ['n'] and q == deque([2, 1]) and q.maxlen == 5"),
    "named tuples": ("from collections import namedtuple\nP = namedtuple('P', 'x y')\n"
                     "R = namedtuple('R', 'def x', rename=True)\ndef f(): return [P(1, 2)]\ndef g(): return R(1, 2)\n"
                     "def h(p): return p.x + p[1]",
                     "assert f() == [(1, 2)] and f()[0].y == 2 and h(f()[0]._replace(x=5)) == 7 and g() == (1, 2)"),
    "slices": ("class f:\n    def __getitem__(self, k): return [1, 2, 3][k]", "assert f()[:2] == [1, 2] and f()[-1] == 3"),
    "classes of the program": ("class f: pass\nclass P(f): pass", "assert isinstance(P(), f) and not isinstance(f(), P)\n"
                               "assert not isinstance(3, f)"),
    "the key of an error": ("def f(d): return d['k']", "try: f({})\nexcept KeyError as e: assert e.args == ('k',)\n"
                            "else: assert 0"),
    "an error with a large key": ("def f(): raise KeyError('x' * (1 << 20))\ndef g():\n    key = ()\n"
                                  "    for _ in range(9999): key = (key,)\n    raise KeyError(key)",
                                  "for one in (f, g):\n    try: one()\n    except KeyError: pass\n    else: assert 0"),
    "numbers": ("def f(k): return [float('nan'), -0.0, complex(-0.0, 1), True, 7**9999][k]",
                "import math\nassert math.isnan(f(0)) and f(3) is True and f(4) == 7**9999\n"
                "assert math.copysign(1, f(1)) == math.copysign(1, f(2).real) == -1"),
    "state": ("n = 0\ndef f():\n    global n\n    n += 1\n    return n", "assert [f(), f(), f()] == [1, 2, 3]"),
    "constants": ("f = {'a': [1, 2]}", "assert f == {'a': [1, 2]} and f['a'][1] == 2"),
    "a name of Python's": ("def sum(a, b): return a * b", "assert sum(3, 5) == 15"),
    "a file in common": ("def f(): return open('x').read()", "open('x', 'w').write('y')\nassert f() == 'y'"),
    "many calls": ("def f(x): return x", "for x in range(3000): assert f(x) == x"),
    "large values": ("def f(n): return list(range(n))", "assert f(200000) == list(range(200000))"),
    "deep values": ("def f(n): return [f(n - 1)] if n else []", "x = f(150)\n"
                    "for _ in range(150): (x,) = x\nassert x == []"),
}  # fmt: skip


@pytest.mark.parametrize("name", TOGETHER)
def test_programs_pass_as_in_one_process(
    sandbox: Sandbox, name: str, here: Path, monkeypatch: Any
) -> None:
    text, tests = TOGETHER[name]
    names = ("f", "g", "h", "change", "Node", "P", "sum")
    exec(f"{text}\n{tests}", {"__name__": "tested"})  # reference: one process
    ((_, verdict),) = sandbox.run([(0, Program(text, tests, names))])
    assert verdict.passed, verdict


def test_object_of_the_program_always_converts_to_the_same_number(sandbox: Sandbox) -> None:
    """Otherwise a cheat passes HumanEval/32, whose tests convert the zero once for each power."""
    text = (
        "class N:\n    def __float__(self, n=[0]):\n        n[0] += 1\n        return n[0] / 2\n"
        "    __int__ = __index__ = lambda self: int(100 * float(self))\ndef f(): return N()"
    )
    tests = "x = f()\nassert [float(x), int(x), [*range(200)][x]] == [float(x), int(x), [*range(200)][x]]"
    ((_, verdict),) = sandbox.run([(0, Program(text, tests, ("f",)))])
    assert verdict.passed, verdict


def test_program_cannot_read_objects_of_the_tests(sandbox: Sandbox) -> None:
    text, tests = "def f(x): return x.secret", "class C: secret = 4\nassert f(C()) == 4"
    ((_, verdict),) = sandbox.run([(0, Program(text, tests, ("f",)))])
    assert verdict.status == "failed"
    assert "objects of the tests" in verdict.detail


def test_detail_of_a_failure_names_line_and_exception(sandbox: Sandbox) -> None:
    programs = {
        "line 2: ZeroDivisionError: division by zero": "def f():\n    return 1 / 0",
        "line 2: Own: why": "class Own(Exception): pass\ndef f(): raise Own('why')",
        "line 4: AssertionError": "def f():\n    return 1",
        "line 1: ModuleNotFoundError: No module named 'nothing'": "import nothing",
        "line 3: NameError: name 'f' is not defined": "g = 1",
    }
    details = {name: one.detail for name, one in sandbox.run(
        (name, Program(text, "\nassert f() == 2", ("f",))) for name, text in programs.items())}  # fmt: skip
    assert details == {name: name for name in programs}


def test_limits_hold_for_program_and_tests_together(sandbox: Sandbox) -> None:
    spin = "def f():\n    while True: pass"
    sleep = "import time\ndef f(): time.sleep(99)"
    heap = "def f(): return bytearray(1 << 40)"
    with Sandbox(workers=3, limits=Limits(seconds=2, cpu_seconds=1)) as made:
        programs = {"spin": spin, "sleep": sleep, "heap": heap}
        found = dict(
            made.run((name, Program(text, "f()", ("f",))) for name, text in programs.items())
        )
    statuses = {name: verdict.status for name, verdict in found.items()}
    assert statuses == {"spin": "timed out", "sleep": "timed out", "heap": "out of memory"}


@pytest.mark.parametrize("place", ["", "def f():\n    found = []\n    "])
def test_memory_full_of_small_objects_is_out_of_memory(place: str) -> None:
    text = f"found = []\n{place}while True: found.append([found])"
    with Sandbox(workers=1, limits=Limits(memory_bytes=128 << 20)) as made:
        ((_, verdict),) = made.run([(0, Program(text, "f()", ("f",)))])
    assert verdict.status == "out of memory"


def test_program_has_pipes_for_its_output_and_its_calls_only(sandbox: Sandbox) -> None:
    """Most of all it has no pipe to the supervisor, on which the verdict is sent."""
    if not {"mount", "pid"} <= set(sandbox.layers):
        pytest.skip("this system refuses namespaces, without which programs have no /proc")
    text = (
        "import os\ndef f():\n    links = [f'/proc/self/fd/{one}' for one in range(64)]\n"
        "    return [os.readlink(one) for one in links if os.path.islink(one)]"
    )
    tests = (
        "null, output, errors, *calls = f()\nassert null == '/dev/null' and output == errors\n"
        "assert len(calls) == 2 and len({output, *calls}) == 3"
    )
    ((_, verdict),) = sandbox.run([(0, Program(text, tests, ("f",)))])
    assert verdict.passed, verdict


def test_memfds_are_forbidden(sandbox: Sandbox) -> None:
    if "seccomp" not in sandbox.layers:
        pytest.skip("this system refuses seccomp")
    ((_, verdict),) = sandbox.run([(0, Program("import os\nos.memfd_create('x')"))])
    assert verdict.detail == "line 2: PermissionError: [Errno 1] Operation not permitted"


@pytest.mark.parametrize("data", [b"", b"l", b"l1;", b"lffffffffffffff;", b"u5;ab", b"x1;", b"i3;zzz", b"i-1;", b"NN",
                                  b"l-1;", b"s1;l0;", b"d1;N", b"C4;eval", b"C2;no", b"c1;N",
                                  b"L1;u1;a", b"L2;u2;osu6;getcwd", b"L3;u7;decimalu7;Decimalu1;x", b"n3;u1;at1;u2;_xt1;N",
                                  b"n3;u1;at1;u4;a, bt1;N"])  # fmt: skip
def test_invalid_value_bytes_are_refused(data: bytes) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, IndexError, ArithmeticError)):
        values.load(data, lambda tag, number: pytest.fail("there is no object"))
