"""Time limits of programs in the sandbox: of all their processes, beside others, and alone."""

from __future__ import annotations

import time
from typing import Any

import pytest
from test_sandbox_parts import need_namespaces, run, sandbox  # noqa: F401

from bass_cli.sandbox import process as launcher
from bass_cli.sandbox.process import Ending
from bass_cli.sandbox.programs import Limits, Sandbox

SPIN = """
import os, time
def spin(seconds):
    while time.process_time() < seconds: pass
"""
TREES = {  # processes that use more or less than a second together, but none alone
    "more at once": SPIN + "for _ in range(4):\n    if not os.fork(): spin(0.5), os._exit(0)\nfor "
                           "_ in range(4): os.wait()",
    "more in turn": SPIN + "for _ in range(4):\n    if not os.fork(): spin(0.5), os._exit(0)\n    "
                           "os.wait()",
    "more of orphans": SPIN + "for _ in range(4):\n    if not os.fork(): os.fork() or spin(0.5), "
                              "os._exit(0)\n"
                              "    os.wait()\ntime.sleep(50)",
    "less": SPIN + "for _ in range(4):\n    if not os.fork(): spin(0.1), os._exit(0)\n    "
                   "os.wait()",
}  # fmt: skip


@pytest.mark.parametrize("layers", [None, pytest.param("pid", marks=pytest.mark.slow)])
def test_processor_time_of_all_processes_counts(sandbox: Sandbox, layers: str | None) -> None:
    need_namespaces(sandbox)
    limits = Limits(seconds=60, cpu_seconds=1)
    with Sandbox(workers=4, limits=limits, layers=layers and layers.split(",")) as made:
        verdicts = dict(run(made, TREES.items()))
    late = {
        name: verdict.detail for name, verdict in verdicts.items() if verdict.status == "timed out"
    }
    assert late == {
        name: "more than 1 s of processor time" for name in TREES if name.startswith("more")
    }
    assert verdicts["less"].passed


@pytest.mark.slow
def test_many_spinning_processes_do_not_time_out_a_neighbour() -> None:
    spinners = SPIN + "for _ in range(30):\n    if not os.fork(): break\nspin(99)"
    with Sandbox(workers=2, limits=Limits(seconds=10, cpu_seconds=2)) as made:
        need_namespaces(made)
        verdicts = dict(run(made, [("spinners", spinners), ("neighbour", SPIN + "spin(0.8)")]))
    assert verdicts["spinners"].status == "timed out"
    assert verdicts["neighbour"].passed


def test_program_that_timed_out_beside_others_runs_again_alone(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[str] = []
    company: list[tuple[str, int]] = []

    def report(_: launcher.WorkerPool, order: Any, checks: Any) -> Ending:
        name = order["text"]
        again = name in dict(company)
        running.append(name)
        time.sleep(0.05)
        company.append((name, len(running)))
        running.remove(name)
        status = {
            "right": "passed",
            "asleep": "timed out",
            "slow": "starved",
            "late": "passed" if again else "starved",
        }
        return Ending(status[name], "", 8.0)

    monkeypatch.setattr(launcher.WorkerPool, "run", report)
    names = ["late", "slow", "right", "asleep"]
    verdicts = {
        name: verdict.status for name, verdict in run(sandbox, [(name, name) for name in names])
    }
    assert verdicts == {
        "late": "passed",
        "slow": "timed out",
        "right": "passed",
        "asleep": "timed out",
    }
    assert {name: [beside for other, beside in company if other == name][1:] for name in names} == {
        "late": [1], "slow": [1], "right": [], "asleep": []}  # fmt: skip


# Two threads that share one processor without the interpreter's lock, and a child that has ended.
WAITS = {
    "for a processor": "import hashlib, os, threading\nos.sched_setaffinity(0, "
                       "{min(os.sched_getaffinity(0))})\n"
                       "def work():\n    while 1: hashlib.sha256(bytes(1 << 20))\n"
                       "threading.Thread(target=work).start()\nwork()",
    "for a child": "import os, time\nos.fork() or os._exit(0)\nos.wait()\ntime.sleep(99)",
}  # fmt: skip


@pytest.mark.parametrize("layers", [None, pytest.param("pid", marks=pytest.mark.slow)])
def test_program_that_waited_for_a_processor_is_starved(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, layers: str | None
) -> None:
    need_namespaces(sandbox)
    reports: list[str] = []
    real = launcher.WorkerPool.run

    def report(pool: launcher.WorkerPool, order: Any, checks: Any) -> Ending:
        report = real(pool, order, checks)
        reports.append(report.status)
        return report

    monkeypatch.setattr(launcher.WorkerPool, "run", report)
    with Sandbox(
        workers=1, limits=Limits(seconds=0.7, cpu_seconds=9), layers=layers and layers.split(",")
    ) as made:
        reports.clear()
        verdicts = dict(run(made, WAITS.items()))
        assert {verdict.status for verdict in verdicts.values()} == {"timed out"}
        assert reports == ["starved"] * len(WAITS)
        for _ in range(9):  # on a busy machine a sleeping process may have waited first
            list(run(made, [(0, "import time\ntime.sleep(99)")]))
            if reports[-1] == "timed out":
                return
    pytest.fail("who sleeps does not wait for a processor")
