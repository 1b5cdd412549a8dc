"""Processes of this machine (`--ray local`): they draw, die, are replaced and end with their driver.
Tiny models, two processes."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from echo import Echo
from test_end_to_end import samples
from test_rays import FLAGS, bass, driver, lines, parent_of, until

from bass_cli import Job, MachineError, Pair
from bass_cli.cluster import fleet as fleets
from bass_cli.cluster.fleet import Lost, Place, Request, ThisMachine
from bass_cli.system.children import Fault
from bass_cli.system.host import visible_gpus


def job(**fields: Any) -> Job:
    return Job(pair=Pair(name="p", target="t"), **fields)


def machine(monkeypatch: pytest.MonkeyPatch, gpus: list[str]) -> None:
    """Pretend that this machine has 8 cores and these GPUs."""
    cores = fleets.usable_cores()._replace(most=8)
    monkeypatch.setattr(fleets, "usable_cores", lambda: cores)
    monkeypatch.setattr(fleets, "visible_gpus", lambda: gpus)


def local_workers(of: int) -> set[int]:
    """Return the worker processes that a driver has started."""
    return {
        int(file.parent.name)
        for file in Path("/proc").glob("[0-9]*/cmdline")
        if b"bass_cli.cluster.fleet" in file.read_bytes() and parent_of(int(file.parent.name)) == of
    }


def events_of(fleet: Any, count: int) -> dict[Place, Any]:
    """Wait for an event of so many places."""
    found: dict[Place, Any] = {}
    end = time.monotonic() + 60
    while len(found) < count and time.monotonic() < end:
        found |= dict(fleet.wait(0.1))
    return found


def test_processes_answer_fail_die_and_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, ["4", "7"])
    first, second = Place(None, 0), Place(None, 1)
    with ThisMachine(Request("local", None), job()).fleet(Echo, "spec") as fleet:
        assert fleet.places() == {first, second}
        for place in (first, second):
            fleet.start(place)
        ready = events_of(fleet, 2)
        assert ready == {first: ("spec", "4", "4"), second: ("spec", "4", "7")}
        fleet.ask(first, {"a": 1}, 0.1)
        assert events_of(fleet, 1) == {first: {"a": 1}}
        fleet.ask(first, "fail", 0.1)
        fleet.ask(second, "die", 0.1)
        found = events_of(fleet, 2)
        assert isinstance(found[first], Fault)
        assert "no such sample" in found[first].text
        assert found[second] == Lost("it was killed by SIGKILL; it printed last: 'a stray line'")
        fleet.stop(second)
        fleet.start(second)
        assert events_of(fleet, 1)[second] == ("spec", "4", "7")
        fleet.ask(second, 1, 0.1)
        fleet.stop(second)
        assert not [at for at, _ in fleet.wait(0.5) if at == second], "stopped: no further events"
    assert not local_workers(os.getpid())


def test_why_a_process_cannot_start_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(monkeypatch, [])
    module = tmp_path / "broken_here.py"
    module.write_text("class Broken: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    kind = importlib.import_module("broken_here").Broken
    module.write_text("print('starting')\nraise ImportError('libcudart.so.99: cannot open')\n")
    place = Place(None, 0)
    with ThisMachine(Request("local", None), job()).fleet(kind, "long " * 100_000) as fleet:
        fleet.start(place)
        why = events_of(fleet, 1)[place].why
    assert "exit code 1; it printed last: 'ImportError: libcudart.so.99: cannot open'" in why


def test_what_python_prints_as_it_starts_is_no_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(monkeypatch, [])
    # more than a pipe holds
    (tmp_path / "sitecustomize.py").write_text("print('starting\\n' * 20_000)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    place = Place(None, 0)
    with ThisMachine(Request("local", None), job()).fleet(Echo, "spec") as fleet:
        fleet.start(place)
        assert events_of(fleet, 1) == {place: ("spec", "8", None)}


def test_a_process_takes_a_gpu_if_there_is_one_else_its_share_of_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch, ["GPU-5e", "2"])
    found = ThisMachine(Request("local", None), job())
    assert (found.job.device, len(found.places())) == ("cuda", 2)
    assert found.environment(Place(None, 1))["CUDA_VISIBLE_DEVICES"] == "2"
    with pytest.raises(MachineError, match="`actors` 3: this machine has 2 GPUs"):
        ThisMachine(Request("local", 3), job())
    on_cpu = ThisMachine(Request("local", 3), job(device="cpu"))
    assert (on_cpu.job.device, len(on_cpu.places())) == ("cpu", 3)
    assert on_cpu.environment(Place(None, 2))["OMP_NUM_THREADS"] == "2"
    monkeypatch.setattr(fleets, "visible_gpus", list)
    assert len(ThisMachine(Request("local", None), job()).places()) == 1
    three_threads = ThisMachine(Request("local", None), job(threads=3))
    assert len(three_threads.places()) == 2
    assert three_threads.environment(Place(None, 0))["OMP_NUM_THREADS"] == "3"
    with pytest.raises(MachineError, match="`actors` 1: this machine has 0 GPUs"):
        ThisMachine(Request("local", None), job(device="cuda"))


def test_visible_gpus_have_the_names_that_a_child_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        """libcuda with two GPUs, or one that finds none."""

        def __init__(self, code: int = 0):
            self._code = code

        def cuInit(self, flags: int) -> int:  # noqa: N802
            return self._code

        def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
            count._obj.value = 2
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-1a,-1,3")
    assert visible_gpus() == ["5", "GPU-1a"]
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(100))
    assert visible_gpus() == []


@pytest.mark.slow
def test_the_file_is_the_same_after_a_killed_process_and_ctrl_c(pair_folder: Any) -> None:
    place = pair_folder(prompts=28)
    out, log = place / "o.jsonl", place / "log"
    flags = ("--out", out.name, "--max-new-tokens", "40")
    child = driver(place, *flags, "--ray", "local", "--actors", "2", "--batch-size", "2")
    until(lambda: lines(out) > 4, child)
    os.kill(min(local_workers(child.pid)), signal.SIGKILL)
    until(lambda: "its samples are drawn again" in plain(log), child)
    until(lambda: lines(out) > 12, child)
    child.send_signal(signal.SIGINT)
    assert child.wait(60) == 130, log.read_text()
    assert "interrupted; run the same command again to continue" in log.read_text()
    assert "Traceback" not in log.read_text()
    until(lambda: not local_workers(child.pid))
    kept = lines(out)
    assert bass("generate", *FLAGS, *flags)[0] == 0
    assert bass("generate", *FLAGS, *flags[2:], "--out", "expected.jsonl")[0] == 0
    assert 12 < kept < 84
    assert samples(out) == samples(place / "expected.jsonl")


def plain(log: Path) -> str:
    """Return a log without the numbers of its samples."""
    return " ".join(word for word in log.read_text().split() if not word.isdigit())


@pytest.mark.slow
def test_processes_end_with_a_driver_that_is_killed(pair_folder: Any) -> None:
    place = pair_folder(prompts=14)
    flags = ("--out", "o.jsonl", "--max-new-tokens", "40", "--ray", "local", "--actors", "2")
    child = driver(place, *flags)
    workers = until(lambda: len(found := local_workers(child.pid)) == 2 and found, child)
    child.kill()
    child.wait()
    until(lambda: not any(Path(f"/proc/{one}").exists() for one in workers))


def test_a_fault_of_a_process_ends_the_command_with_its_reason(pair_folder: Any) -> None:
    place = pair_folder(prompts=2)
    (place / "target" / "config.json").write_text("{}")
    code, output = bass("generate", *FLAGS, "--out", "o.jsonl", "--ray", "local")
    assert code == 2, output
    assert "config.json" in output
