"""How many threads a CPU computes with, and how they wait for each other, so that a job shares a
machine with others.

A thread that waits by spinning keeps its core from the one it waits for as soon as cores are
shared: a job then takes ten times its time, not twice. OpenMP reads how to wait when torch is
loaded, so torch is not imported here before that is set. A command that will compute says so as
soon as it is named (`begin`): looking at the cores and loading torch's libraries then take no time
of their own.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bass_cli.system.host import control_groups, lacking_address_space

if TYPE_CHECKING:
    from concurrent.futures import Future

Note = Callable[[str], None]
_ROOT = Path("/")
_MOST = 1024
_SAMPLE = (
    0.2  # seconds of looking at idle cores before a job; they are counted in hundredths of a second
)
_STALE = 5.0  # seconds after which a first look says too little of now
_INTERVAL = 2.0  # seconds between two looks while a job runs
# On free cores a short spin saves waking a thread hundreds of times a round (on 2 virtual cores
# rounds take 1.6 times as long without any); at the usual 300,000 turns, some milliseconds,
# company costs a factor of ten.
_FREE = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}
_SHARED = {"OMP_WAIT_POLICY": "PASSIVE"}
# torch looks through all packages for other kinds of devices, 30 ms, and bass computes on none.
_NO_OTHERS = ("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


class Cores(NamedTuple):
    """Physical cores that this process may use, each as its CPUs; `most` threads of them at
    once; `limits`: what holds them down, in words."""

    cores: tuple[tuple[int, ...], ...]
    most: int
    limits: str


class Threads(NamedTuple):
    """How many threads, `why` in words, whether they were asked for (`fixed`), and whether
    others use the cores too (`shared`), so that threads should wait asleep."""

    number: int
    why: str
    fixed: bool
    shared: bool


def usable_cores(root: Path = _ROOT) -> Cores:
    """By affinity, by what shares a physical core, and by the control groups' limit of CPU time."""
    there = os.cpu_count() or 1
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(there))
    groups: dict[str, list[int]] = {}
    for cpu in sorted(allowed):
        siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        groups.setdefault(_read(siblings).strip() or f"cpu{cpu}", []).append(cpu)
    quota = _quota(root)
    most = len(groups) if quota is None else max(1, min(len(groups), int(quota)))
    limits = [f"affinity allows {len(allowed)} of {there} CPUs"] if len(allowed) < there else []
    limits += (
        [f"the control group allows {quota:g} CPUs"]
        if quota is not None and quota < len(groups)
        else []
    )
    return Cores(tuple(map(tuple, groups.values())), most, "; ".join(limits))


def _quota(root: Path) -> float | None:
    """CPUs' worth of time that the control group and those around it allow, None for no limit.
    Versions 1 and 2."""
    found = []
    for folder, version in control_groups(root, "cpu"):
        texts = (
            _read(folder / "cpu.max").split()
            if version == 2
            else [_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        )
        if len(texts) == 2 and all(text.isdigit() for text in texts):  # no limit is "max", or -1
            found.append(int(texts[0]) / int(texts[1]))
    return min(found, default=None)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


class Look(NamedTuple):
    """What the system had counted of its CPUs at a time, and what this process had used of them;
    in seconds."""

    counters: str
    now: float
    used: float


_looks: list[Look] = []  # the first of this process, until it is used


def look_first() -> None:
    """Look at the cores when the process begins, so that nobody has to wait for a second look."""
    _looks.append(Look(_read(_ROOT / "proc/stat"), time.monotonic(), time.process_time()))


class Idle:
    """How many of these cores are free, from one look at the system's counters to the next; None
    where it has none."""

    def __init__(self, cores: Cores, root: Path = _ROOT, first: str | None = None):
        self._cores, self._file = cores.cores, root / "proc/stat"
        self._before = self._counters(_read(self._file) if first is None else first)

    def free(self) -> float | None:
        """Cores without work since the look before this; a core is as free as the busier of the
        CPUs that share it."""
        before, self._before = self._before, self._counters(_read(self._file))
        found = 0.0
        for core in self._cores:
            shares = []
            for cpu in core:
                (idle, whole), (idle_then, whole_then) = (
                    self._before.get(cpu, (0, 0)),
                    before.get(cpu, (0, 0)),
                )
                if whole <= whole_then:
                    return None
                shares.append((idle - idle_then) / (whole - whole_then))
            found += min(shares)
        return found

    @staticmethod
    def _counters(text: str) -> dict[int, tuple[int, int]]:
        """By CPU: time without work, and all time."""
        found = {}
        for match in re.finditer(r"^cpu(\d+) (.*)$", text, re.MULTILINE):
            times = [int(word) for word in match[2].split()[:8]]
            found[int(match[1])] = (sum(times[3:5]), sum(times))
        return found


def _idle_cores(cores: Cores, root: Path, sleep: Callable[[float], None]) -> float:
    """How many of them others leave free. What the process itself has computed since it began is
    no company."""
    first = _looks.pop() if _looks else None
    if first is None or time.monotonic() - first.now > _STALE:
        idle = Idle(cores, root)
        sleep(_SAMPLE)
        free = idle.free()
    else:
        sleep(max(first.now + _SAMPLE - time.monotonic(), 0.0))
        free = Idle(cores, root, first.counters).free()
        if free is not None:
            free += (time.process_time() - first.used) / (time.monotonic() - first.now)
    if free is None and hasattr(os, "getloadavg"):
        free = len(cores.cores) - os.getloadavg()[0]
    most = float(len(cores.cores))
    return most if free is None else min(max(free, 0.0), most)


def fitting(free: float, most: int) -> int:
    """As many threads as cores are free, or all there could be where that is less than half of
    them: on a machine that is busy all over every thread has its share."""
    return most if free < most / 2 else max(1, min(most, int(free + 0.5)))


def asked_for(
    wanted: int | None, environment: Mapping[str, str] = os.environ
) -> tuple[int, str] | None:
    """The number that was asked for, by --threads or else by OMP_NUM_THREADS, and by which of
    them; None if by none."""
    if wanted is not None:
        return wanted, "--threads (or BASS_THREADS)"
    given = re.match(r"\s*(\d{1,5})", environment.get("OMP_NUM_THREADS", ""))
    return (int(given[1]), "OMP_NUM_THREADS") if given and int(given[1]) else None


def most_threads(wanted: int | None = None) -> int:
    """What a job would use on a machine of its own: it does not depend on who else computes."""
    asked = asked_for(wanted)
    return usable_cores().most if asked is None else asked[0]


def choose(
    wanted: int | None,
    *,
    environment: Mapping[str, str] = os.environ,
    root: Path = _ROOT,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[Threads, dict[str, str]]:
    """The threads for a job that begins now, and the variables that say how they wait; none if
    some are set already."""
    cores, asked = usable_cores(root), asked_for(wanted, environment)
    if asked is not None and asked[0] == 1:
        return Threads(1, asked[1], True, False), {}
    free = _idle_cores(cores, root, sleep)
    count = fitting(free, cores.most) if asked is None else asked[0]
    shared = (cores.most if asked is None else count) > int(free + 0.5)
    reasons = [f"{free:.1f} of {len(cores.cores)} physical cores are free"]
    reasons += [cores.limits] if cores.limits else []
    reasons += [
        "waiting threads sleep at once" if shared else "waiting threads spin briefly, then sleep"
    ]
    why = "; ".join(reasons if asked is None else [asked[1], *reasons])
    kept = any(name in environment for name in (*_FREE, *_SHARED))
    return Threads(
        count, why, asked is not None, shared
    ), {} if kept else _SHARED if shared else _FREE


_Choice = tuple[Threads, dict[str, str]]  # see choose
_begun: list[tuple[int | None, Future[_Choice]]] = []  # what a thread is choosing


def begin(wanted: int | None) -> None:
    """Begin what `settle` will do, as soon as it is known that it will be asked to: a thread
    chooses, and loads torch's libraries, in which Python is free to import what a command needs
    besides."""
    if "torch" in sys.modules or lacking_address_space() is not None:
        return
    from concurrent.futures import Future

    choice: Future[_Choice] = Future()

    def run() -> None:
        try:
            found = choose(wanted)
        except BaseException as error:  # for whoever waits for the choice
            choice.set_exception(error)
            return
        os.environ.update(found[1])
        choice.set_result(found)
        _load_libraries()

    threading.Thread(target=run, name="loading torch", daemon=True).start()
    _begun.append((wanted, choice))


def _load_libraries() -> None:
    """As importing torch begins, in the same order. Where that does more to find them it goes
    wrong, and is left to torch."""
    import ctypes
    import importlib.util

    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parent / "lib"
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(folder / "libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
            ctypes.CDLL(str(folder / "libtorch.so"))


def configure_threads(wanted: int | None, note: Note) -> Threads:
    """Choose, before torch is loaded, and load it so. UserError for a bad number; a line to
    `note` if others leave fewer cores than there are."""
    if wanted is not None and not 1 <= wanted <= _MOST:
        from bass_cli.errors import UserError

        raise UserError(
            f"--threads (or BASS_THREADS): it should be a whole number from 1 to {_MOST} (got "
            f"{wanted})"
        )
    if "torch" not in sys.modules and (reason := lacking_address_space()) is not None:
        from bass_cli.errors import MachineError

        raise MachineError(reason)
    begun = _begun.pop() if _begun else None
    if begun is not None and begun[0] == wanted:
        chosen, waiting = begun[1].result()
    else:
        chosen, waiting = choose(wanted)
    os.environ.update(waiting)
    os.environ.setdefault(*_NO_OTHERS)

    import torch

    torch.set_num_threads(chosen.number)
    if chosen.shared:
        note(f"computing with {chosen.number} of {most_threads(wanted)} threads: {chosen.why}")
    return chosen


class CoreMonitor:
    """Follows, while a job runs, how many cores others leave to it, unless the number of threads
    was asked for: more of them when others go, and fewer when they come to threads that wait
    awake."""

    def __init__(
        self,
        wanted: int | None,
        *,
        now: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.process_time,
        root: Path = _ROOT,
    ):
        self._fixed, self._now, self._used = asked_for(wanted) is not None, now, used
        self._asleep = os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
        self._cores = usable_cores(root)
        self._idle, self._then, self._used_then = Idle(self._cores, root), now(), used()

    def look(self) -> None:
        """After a round: every other second, as many threads as cores were idle or ours since
        the last look."""
        elapsed = self._now() - self._then
        if self._fixed or elapsed < _INTERVAL:
            return
        free, ours = self._idle.free(), (self._used() - self._used_then) / elapsed
        self._then, self._used_then = self._now(), self._used()
        if free is not None:
            import torch

            most, before = self._cores.most, torch.get_num_threads()
            count = max(
                before if self._asleep else -(-most // 2), min(most, int(free + ours + 0.5))
            )
            if count != before:
                torch.set_num_threads(count)
