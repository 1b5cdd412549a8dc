"""Choose the number of CPU threads, and how threads wait, for a machine that others use too.

If cores are shared, a thread that spins while it waits blocks the thread that it waits for: a job
then takes ten times as long, not twice. OpenMP reads its wait policy when torch is loaded, so torch
is imported only after that is set. A command that will compute calls `begin` first: a thread then
measures the cores and loads torch's libraries while other modules are imported.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bass_cli.system import host
from bass_cli.system.host import control_groups, lacking_address_space, system_text
from bass_cli.system.postponed import import_torch

if TYPE_CHECKING:
    from concurrent.futures import Future

Note = Callable[[str], None]
_MOST = 1024
_SAMPLE = 0.2  # seconds to measure idle cores before a job; the system counts in 0.01 s
_STALE = 5.0  # seconds after which the first sample is too old to use
_INTERVAL = 2.0  # seconds between two measurements while a job runs
# On free cores a short spin saves waking a thread hundreds of times a round: without it, rounds
# take 1.6 times as long on 2 virtual cores. OpenMP's default of 300,000 spins, some milliseconds,
# makes a job ten times slower if others use the cores.
_FREE = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}
_SHARED = {"OMP_WAIT_POLICY": "PASSIVE"}
# Thresholds of the garbage collector. With Python's own, collections take 0.1 s while torch is
# imported, and 0.1 s each later on, for objects that stay.
_COLLECTED = (100_000, 50, 100)
_BLAS = "OPENBLAS_NUM_THREADS"
# torch searches all packages for other kinds of devices, which takes 30 ms. bass uses none of them.
_NO_OTHER_DEVICES = ("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

# Modules with machine code that a job imports before torch. The system loads one library at a time,
# so their import would wait until torch's are loaded.
_COMPILED = (
    *(
        "array",
        "csv",
        "ctypes",
        "decimal",
        "hashlib",
        "mmap",
        "multiprocessing.connection",
        "numpy",
    ),
    *("pickle", "pydantic_core", "queue", "resource", "tokenizers", "yaml", "zoneinfo"),
)


class Cores(NamedTuple):
    """The physical cores that this process may use.

    Attributes:
        cores: The logical CPUs of each core.
        most: The largest useful number of threads.
        limits: What reduces the number, in words; "" if nothing does.
    """

    cores: tuple[tuple[int, ...], ...]
    most: int
    limits: str


class Threads(NamedTuple):
    """The chosen number of threads.

    Attributes:
        number: The number of threads.
        why: The reason, in words.
        fixed: Whether the user set the number.
        shared: Whether other processes use the cores too, so that waiting threads should sleep.
    """

    number: int
    why: str
    fixed: bool
    shared: bool


def usable_cores() -> Cores:
    """Return the usable cores: by CPU affinity, shared physical cores and control group limits."""
    there = os.cpu_count() or 1
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(there))
    groups: dict[str, list[int]] = {}
    for cpu in sorted(allowed):
        siblings = host.ROOT / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        groups.setdefault(system_text(siblings).strip() or f"cpu{cpu}", []).append(cpu)
    quota = _quota()
    most = len(groups) if quota is None else max(1, min(len(groups), int(quota)))
    limits = [f"affinity allows {len(allowed)} of {there} CPUs"] if len(allowed) < there else []
    limits += (
        [f"the control group allows {quota:g} CPUs"]
        if quota is not None and quota < len(groups)
        else []
    )
    return Cores(tuple(map(tuple, groups.values())), most, "; ".join(limits))


def _quota() -> float | None:
    """Return the CPUs that the control groups (version 1 or 2) allow, None without a limit."""
    found = []
    for folder, version in control_groups("cpu"):
        if version == 2:
            texts = system_text(folder / "cpu.max").split()
        else:
            files = (folder / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
            texts = [system_text(file).strip() for file in files]
        if len(texts) == 2 and all(text.isdigit() for text in texts):  # no limit is "max", or -1
            found.append(int(texts[0]) / int(texts[1]))
    return min(found, default=None)


class CpuSample(NamedTuple):
    """CPU counters at one time.

    Attributes:
        counters: Idle and total time by CPU, in ticks; empty if the system has none.
        now: The time, in seconds of the monotonic clock.
        used: CPU seconds of this process.
    """

    counters: dict[int, tuple[int, int]]
    now: float
    used: float

    @classmethod
    def take(cls) -> CpuSample:
        """Take a sample now."""
        counters, text = {}, system_text(host.ROOT / "proc/stat")
        for match in re.finditer(r"^cpu(\d+) (.*)$", text, re.MULTILINE):
            times = [int(word) for word in match[2].split()[:8]]
            counters[int(match[1])] = (sum(times[3:5]), sum(times))
        return cls(counters, time.monotonic(), time.process_time())

    def left_by_others(self, cores: Cores, last: CpuSample) -> float | None:
        """Return how many cores were idle or used by this process until the `last` sample.

        None if the counters have not changed. A core is as idle as the busiest of its logical CPUs.
        """
        found, longest = 0.0, 0
        for core in cores.cores:
            shares = []
            for cpu in core:
                idle, whole = self.counters.get(cpu, (0, 0))
                idle_then, whole_then = last.counters.get(cpu, (0, 0))
                if whole_then <= whole:
                    return None
                shares.append((idle_then - idle) / (whole_then - whole))
                longest = max(longest, whole_then - whole)
            found += min(shares)
        return found + (last.used - self.used) * os.sysconf("SC_CLK_TCK") / longest


def collect_seldom() -> None:
    """Let Python's garbage collector run less often in this process."""
    gc.set_threshold(*_COLLECTED)


_first: list[CpuSample] = []  # taken when the process began, until it is used


def sample_cpus() -> None:
    """Take the first CPU sample when the process begins, so that `choose` need not wait for one."""
    _first.append(CpuSample.take())


def _free_cores(cores: Cores) -> float:
    """Return how many cores other processes leave free."""
    first = _first.pop() if _first else None
    if first is None or time.monotonic() - first.now > _STALE:
        first = CpuSample.take()
    time.sleep(max(first.now + _SAMPLE - time.monotonic(), 0.0))
    free = first.left_by_others(cores, CpuSample.take())
    most = float(len(cores.cores))
    if free is None:
        free = most - os.getloadavg()[0] if hasattr(os, "getloadavg") else most
    return min(max(free, 0.0), most)


def fitting(free: float, most: int) -> int:
    """Return the number of threads for so many free cores.

    If fewer than half of the cores are free, use all threads: on a busy machine the system gives
    every thread its share.
    """
    return most if free < most / 2 else max(1, min(most, int(free + 0.5)))


def requested(wanted: int | None) -> tuple[int, str] | None:
    """Return the number that --threads or OMP_NUM_THREADS sets, and which of them, or None."""
    if wanted is not None:
        return wanted, "`threads`"
    given = re.match(r"\s*(\d{1,5})", os.environ.get("OMP_NUM_THREADS", ""))
    return (int(given[1]), "OMP_NUM_THREADS") if given and int(given[1]) else None


def most_threads(wanted: int | None = None) -> int:
    """Return the number of threads on an idle machine."""
    given = requested(wanted)
    return usable_cores().most if given is None else given[0]


def choose(wanted: int | None) -> tuple[Threads, dict[str, str]]:
    """Return the threads for a job that begins now, and environment variables for OpenMP.

    The variables set how threads wait. There are none if the environment sets that already.
    """
    cores, given = usable_cores(), requested(wanted)
    if given is not None and given[0] == 1:
        return Threads(1, given[1], True, False), {}
    free = _free_cores(cores)
    count = fitting(free, cores.most) if given is None else given[0]
    shared = (cores.most if given is None else count) > int(free + 0.5)
    reasons = [f"{free:.1f} of {len(cores.cores)} physical cores are free"]
    reasons += [cores.limits] if cores.limits else []
    reasons += [
        "threads sleep while they wait" if shared else "threads spin briefly while they wait"
    ]
    why = "; ".join(reasons if given is None else [given[1], *reasons])
    is_set = any(name in os.environ for name in (*_FREE, *_SHARED))
    waiting = {} if is_set else _SHARED if shared else _FREE
    return Threads(count, why, given is not None, shared), waiting


_Choice = tuple[Threads, dict[str, str]]  # see choose
_begun: list[tuple[int | None, Future[_Choice]]] = []  # choices that a thread makes


def begin(wanted: int | None) -> bool:
    """Start `configure_threads` early, in a thread; return whether it was not started before.

    The thread chooses the number of threads, and loads torch's libraries while the main thread
    imports other modules. Those with machine code are imported here, before that.
    """
    if _begun or "torch" in sys.modules:
        return False
    if (host.unsupported() or lacking_address_space()) is not None:
        return False  # the command ends with the reason
    from concurrent.futures import Future

    choice: Future[_Choice] = Future()
    imported = threading.Event()

    def run() -> None:
        try:
            found = choose(wanted)
        except BaseException as error:  # raised by configure_threads
            choice.set_exception(error)
            return
        os.environ.update(found[1])
        choice.set_result(found)
        imported.wait()
        _load_libraries()

    host.start_awaited(run, "loading torch")
    _begun.append((wanted, choice))
    # numpy's BLAS would start a thread for each core, which takes 2 s of processor time on 16
    own = _BLAS not in os.environ
    if own:
        os.environ[_BLAS] = "1"
    try:
        for name in _COMPILED:
            importlib.import_module(name)
    finally:
        if own:  # no setting for programs that this process starts
            del os.environ[_BLAS]
        imported.set()
    return True


def _load_libraries() -> None:
    """Load torch's libraries in the order in which `import torch` loads them.

    If that fails, `import torch` does it. Other threads run meanwhile: they would wait for
    `ctypes.CDLL(file)`, but not for the system's `dlopen` called as a foreign function.
    """
    import ctypes
    import importlib.util

    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parent / "lib"
        with contextlib.suppress(OSError, AttributeError):  # a system without `dlopen`
            load = ctypes.CDLL(None).dlopen
            load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
            load(os.fsencode(folder / "libtorch_global_deps.so"), os.RTLD_NOW | os.RTLD_GLOBAL)
            load(os.fsencode(folder / "libtorch.so"), os.RTLD_NOW)


def configure_threads(wanted: int | None, note: Note) -> Threads:
    """Choose the number of CPU threads, then import torch with it.

    Args:
        wanted: The value of --threads, None if not given.
        note: Called with one line if other processes use the cores too.

    Raises:
        UserError: `wanted` is out of range.
        MachineError: `ulimit -v` is too small for torch.
    """
    if wanted is not None and not 1 <= wanted <= _MOST:
        from bass_cli.errors import UserError

        raise UserError(f"`threads`: it should be a whole number from 1 to {_MOST} (got {wanted})")
    if "torch" not in sys.modules and (reason := lacking_address_space()) is not None:
        from bass_cli.errors import MachineError

        raise MachineError(reason)
    begun = _begun.pop() if _begun else None
    is_command = begun is not None and "torch" not in sys.modules
    if begun is not None and begun[0] == wanted:
        chosen, waiting = begun[1].result()
    else:
        chosen, waiting = choose(wanted)
    os.environ.update(waiting)
    os.environ.setdefault(*_NO_OTHER_DEVICES)
    if is_command:
        import_torch()

    import torch

    torch.set_num_threads(chosen.number)
    if chosen.shared:
        note(f"using {chosen.number} of {most_threads(wanted)} CPU threads: {chosen.why}")
    return chosen


class CoreMonitor:
    """Adapt the number of threads while a job runs, unless the user set it.

    The number grows when other processes end. It shrinks when others start, if waiting threads
    spin.
    """

    def __init__(self, wanted: int | None):
        self._fixed = requested(wanted) is not None
        self._asleep = os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
        self._cores, self._before = usable_cores(), CpuSample.take()

    def update(self) -> None:
        """Call this after each round: every 2 s, set as many threads as cores were idle or ours."""
        if self._fixed or time.monotonic() - self._before.now < _INTERVAL:
            return
        before, self._before = self._before, CpuSample.take()
        free = before.left_by_others(self._cores, self._before)
        if free is not None:
            import torch

            most, now = self._cores.most, torch.get_num_threads()
            count = max(now if self._asleep else -(-most // 2), min(most, int(free + 0.5)))
            if count != now:
                torch.set_num_threads(count)
