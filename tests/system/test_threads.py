"""The number of CPU threads of a job, and how threads wait."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import cli
from thinned import thinned

from bass_cli.system import host, threads
from bass_cli.system.threads import CoreMonitor, choose, fitting, most_threads, usable_cores

WAITING = {"OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "BASS_THREADS"}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of four CPUs, two on each physical core, none of them busy, without control
    groups."""
    monkeypatch.setattr(host, "ROOT", tmp_path)
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(threads.os, "cpu_count", lambda: 4)
    for cpu in range(4):
        write(
            tmp_path,
            f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list",
            f"{cpu % 2},{cpu % 2 + 2}\n",
        )
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def busy(root: Path, *shares: float, at: int = 0) -> None:
    """The system's counters after `at` hundredths of a second in which each CPU was busy for
    this share."""
    lines = [
        f"cpu{i} {round(at * share)} 0 0 {at - round(at * share)} 0 0 0 0 0 0"
        for i, share in enumerate(shares)
    ]
    write(root, "proc/stat", "\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *lines, "intr 1"]) + "\n")


def chosen(
    root: Path, *shares: float, wanted: int | None = None, **environment: str
) -> tuple[Any, dict[str, str]]:
    busy(root, *shares, at=0)
    with pytest.MonkeyPatch.context() as patched:
        for name, value in environment.items():
            patched.setenv(name, value)
        patched.setattr(threads.time, "sleep", lambda _: busy(root, *shares, at=1000))
        return choose(wanted)


# What may be used


def test_physical_cores_within_the_affinity(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cores() == (((0, 2), (1, 3)), 2, "")
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: {0, 2}, raising=False)
    assert usable_cores() == (((0, 2),), 1, "affinity allows 2 of 4 CPUs")


GROUPS = [
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
    ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "50000 100000\n",
      "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 0.5),
    ({"proc/self/cgroup": "4:memory:/m\n"
                          "3:cpu,cpuacct:/docker/x\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000\n",
      "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 1.0),
    ({"proc/self/cgroup": "1:cpu:/\n0::/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
      "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, None),
    ({"proc/self/cgroup": "0::/gone\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
    ({}, None),
]  # fmt: skip


@pytest.mark.parametrize(("files", "expected"), GROUPS)
def test_control_groups_limit_the_threads(
    root: Path, files: dict[str, str], expected: float | None
) -> None:
    for name, text in files.items():
        write(root, name, text)
    found = usable_cores()
    assert (found.most, bool(found.limits)) == (2 if expected is None else 1, expected is not None)
    assert expected is None or f"allows {expected:g} CPUs" in found.limits


# What others leave


def test_an_idle_machine_uses_all_cores(root: Path) -> None:
    found, waiting = chosen(root, 0.0, 0.0, 0.1, 0.0)
    assert (found.number, found.fixed, found.shared) == (2, False, False)
    assert "1.9 of 2 physical cores are free" in found.why
    assert "spin briefly" in found.why
    assert 0 < int(waiting["GOMP_SPINCOUNT"]) < 300_000


def test_a_shared_machine_uses_fewer_threads_that_sleep_while_they_wait(root: Path) -> None:
    found, waiting = chosen(root, 0.0, 0.0, 0.0, 1.0)  # one busy CPU takes a physical core
    assert (found.number, found.shared) == (1, True)
    assert "1.0 of 2 physical cores are free" in found.why
    assert waiting == {"OMP_WAIT_POLICY": "PASSIVE"}
    found, waiting = chosen(root, 1.0, 1.0, 1.0, 1.0)  # nothing is free: every thread has its share
    assert (found.number, found.shared, waiting) == (2, True, {"OMP_WAIT_POLICY": "PASSIVE"})


FREE = [
    (7.6, 8, 8),
    (5.4, 8, 5),
    (4.0, 8, 4),
    (3.9, 8, 8),
    (0.0, 8, 8),
    (1.0, 2, 1),
    (0.0, 2, 2),
    (0.0, 1, 1),
    (9.0, 4, 4),
]


@pytest.mark.parametrize(("free", "most", "expected"), FREE)
def test_number_of_threads_for_free_cores(free: float, most: int, expected: int) -> None:
    assert fitting(free, most) == expected


def test_unchanged_cpu_counters_give_no_measurement(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for load, expected in ((0.2, 2), (0.9, 1)):
        monkeypatch.setattr(
            threads.os, "getloadavg", lambda load=load: (load, 0.0, 0.0), raising=False
        )
        monkeypatch.setattr(threads.time, "sleep", lambda _: None)
        found, _ = choose(None)
        assert found.number == expected


def looked_at(root: Path, monkeypatch: pytest.MonkeyPatch, *, ago: float, used: float) -> None:
    """Set a first CPU sample taken `ago` seconds ago; the process has used `used` seconds since."""
    first = threads.CpuSample.take()._replace(now=time.monotonic() - ago, used=-used)
    monkeypatch.setattr(threads, "_first", [first])
    monkeypatch.setattr(threads.time, "process_time", lambda: 0.0)


def test_a_first_sample_avoids_waiting(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU time of this process does not count as use by others."""
    for used, expected in ((1.0, 2), (0.0, 1)):
        busy(root, 0.0, 0.0, 0.0, 0.0, at=0)
        looked_at(root, monkeypatch, ago=1.0, used=used)
        busy(root, 1.0, 0.0, 0.0, 0.0, at=100)
        slept = list[float]()
        monkeypatch.setattr(threads.time, "sleep", slept.append)
        found, _ = choose(None)
        assert (found.number, found.shared, sum(slept)) == (expected, expected == 1, 0.0)


def test_a_first_sample_that_is_too_new_or_too_old(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads.time, "monotonic", lambda: 1000.0)
    for ago, expected in ((0.05, 0.15), (0.2, 0.0), (5.0, 0.0), (5.1, 0.2), (60.0, 0.2)):
        busy(root, 0.0, 0.0, 0.0, 0.0, at=0)
        looked_at(root, monkeypatch, ago=ago, used=0.0)
        slept = list[float]()
        monkeypatch.setattr(threads.time, "sleep", slept.append)
        choose(None)
        assert sum(slept) == pytest.approx(expected)


# What was asked for


def test_a_requested_number_of_threads_is_used(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, waiting = chosen(root, 1.0, 1.0, 1.0, 1.0, wanted=2, OMP_NUM_THREADS="3")
    assert (found.number, found.fixed, found.shared) == (2, True, True)
    assert found.why.startswith("`threads`; 0.0 of 2 physical cores are free")
    assert waiting == {"OMP_WAIT_POLICY": "PASSIVE"}
    assert chosen(root, 0.0, 0.0, 0.0, 0.0, OMP_NUM_THREADS="3,2")[0].number == 3
    assert chosen(root, 0.0, 0.0, 0.0, 0.0, OMP_NUM_THREADS="many")[0].fixed is False
    monkeypatch.setattr(threads.time, "sleep", pytest.fail)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert choose(None)[0].why == "OMP_NUM_THREADS"
    assert most_threads(7) == 7
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert most_threads() == 5
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert most_threads() == usable_cores().most


def test_wait_settings_of_the_environment_are_kept(root: Path) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        assert chosen(root, 0.0, 0.0, 0.0, 0.0, **{name: "1"})[1] == {}


# While a job runs


@pytest.mark.parametrize("asleep", [False, True])
def test_threads_follow_other_processes(
    root: Path, monkeypatch: pytest.MonkeyPatch, asleep: bool
) -> None:
    if asleep:
        monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    clock, found = {"now": 0.0, "used": 0.0}, [2]
    monkeypatch.setattr(torch, "get_num_threads", lambda: found[-1])
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    busy(root, 0, 0, 0, 0, at=0)
    monkeypatch.setattr(threads.time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(threads.time, "process_time", lambda: clock["used"])
    monitor = CoreMonitor(None)

    def after(now: float, used: float, idle: tuple[int, int]) -> list[int]:
        clock.update(now=now, used=used)
        lines = [
            f"cpu{i} {round(now * 100) - idle[i % 2]} 0 0 {idle[i % 2]} 0 0 0 0 0 0"
            for i in range(4)
        ]
        write(root, "proc/stat", "\n".join(lines))
        monitor.update()
        return found

    assert after(1.0, 2.0, (0, 0)) == [2], "too early to say"
    assert after(2.5, 5.0, (0, 0)) == [2], "both cores are ours"
    assert after(5.0, 7.4, (0, 0)) == ([2] if asleep else [2, 1]), "we had one of them only"
    found.extend([1] * asleep)
    assert after(7.5, 9.9, (0, 0)) == [2, 1], "others still have the second"
    assert after(10.0, 12.4, (0, 240)) == [2, 1, 2], "one is ours, the other one idle"


def test_a_requested_number_of_threads_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", pytest.fail)
    now = iter(range(0, 100, 10))
    monkeypatch.setattr(threads.time, "monotonic", lambda: float(next(now)))
    monitor = CoreMonitor(2)
    monitor.update()


# Where it counts


COMMANDS = [
    "generate p.txt",
    "eval mbpp --data mbpp.jsonl",
    "logprobs t.jsonl",
    "bench",
    "profile",
    "doctor",
]


@pytest.mark.parametrize("command", thinned(COMMANDS, COMMANDS[::2]))
def test_threads_are_configured_before_torch_is_loaded(command: str, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a\n")
    (tmp_path / "t.jsonl").write_text('{"id": "a", "prompt": "x", "completion": "y"}\n')
    (tmp_path / "mbpp.jsonl").write_text(
        '{"task_id": 11, "text": "t", "code": "f = 1", "test_list": ["assert 1"]}\n'
    )
    code = (
        "import sys\nfrom bass_cli.system import threads\nfrom bass_cli.config.job import UserError\ndef "
        "choose(wanted):\n"
        "    raise UserError(f'{wanted} {\"torch\" in sys.modules}')\nthreads.choose = choose\n"
        f"from bass_cli.cli.commands import app\napp({[*command.split(), '--threads', '3']!r})"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert (found.stderr.splitlines()[-1], found.returncode) == ("bass: error: 3 False", 2)


def printed(code: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the lines of a process without variables about waiting threads."""
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_torch_uses_the_chosen_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import os\nfrom bass_cli.system import threads\nthreads.choose = lambda wanted: ("
        "threads.Threads(3, 'why', False, True), {'GOMP_SPINCOUNT': '7'})\nthreads.configure_threads(None, "
        "print)\nimport torch\n"
        "print(torch.get_num_threads(), os.environ['GOMP_SPINCOUNT'])"
    )
    found = printed(code, monkeypatch)
    assert found[0].startswith("using 3 of ")
    assert found[1] == "3 7"


def test_torch_libraries_are_loaded_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chosen variables are set before, because OpenMP reads them then."""
    code = (
        "import os, sys, threading\nfrom bass_cli.system import threads\n"
        "threads.choose = lambda wanted: (threads.Threads(wanted, 'why', True, False), "
        "{'GOMP_SPINCOUNT': '7'})\n"
        "def there(): return 'libtorch_cpu' in open('/proc/self/maps').read()\n"
        "load = threads._load_libraries\n"
        "def loading(): print(os.environ['GOMP_SPINCOUNT'], there()); load()\n"
        "threads._load_libraries = loading\n"
        "threads.begin(3)\n"
        "[one.join() for one in threading.enumerate() if one.name == 'loading torch']\n"
        "print(there(), 'torch' in sys.modules)\n"
        "threads.choose = None\n"
        "threads.configure_threads(3, print)\nprint(sys.modules['torch'].get_num_threads())"
    )
    found = printed(code, monkeypatch)
    assert found == ["7 False", "True False", "3"]


@pytest.mark.parametrize("command", COMMANDS[:2])
def test_a_command_starts_loading_torch_before_it_reads_files(
    command: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --ray the actors load torch, so the driver does not."""
    begun: list[Any] = []
    monkeypatch.setattr("bass_cli.cli.commands.begin", begun.append)
    monkeypatch.setattr("bass_cli.cli.commands.expect", begun.append)
    for more in (["--threads", "3", "--device", "cpu"], ["--ray", "local", "--out", "o.jsonl"]):
        cli(*command.split(), *more, code=2)
    assert begun == [3, "cpu"]


def test_an_invalid_number_of_threads_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a\n")
    for command in (["generate", str(tmp_path / "p.txt")], ["bench"]):
        found = cli(*command, "--threads", "0")
        assert (found.exit_code, "--threads (or BASS_THREADS): it should be" in found.stderr) == (
            2,
            True,
        )
