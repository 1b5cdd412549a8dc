"""How many threads a CPU computes with, and how they wait for each other, so that a job shares a
machine with others.

A thread that waits by spinning keeps its core from the one it waits for as soon as cores are
shared: a job then takes ten times its time, not twice. OpenMP reads how to wait when torch is
loaded, so torch is not imported here before that is set.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from bass_cli.system.host import control_groups

Note = Callable[[str], None]
_ROOT = Path("/")
_MOST = 1024
_SAMPLE = (
    0.2  # seconds of looking at idle cores before a job; they are counted in hundredths of a second
)
_INTERVAL = 2.0  # seconds between two looks while a job runs
# On free cores a short spin saves waking a thread hundreds of times a round (on 2 virtual cores
# rounds take 1.6 times as long without any); at the usual 300,000 turns, some milliseconds,
# company costs a factor of ten.
_FREE = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}
_SHARED = {"OMP_WAIT_POLICY": "PASSIVE"}


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


class Idle:
    """How many of these cores are free, from one look at the system's counters to the next; None
    where it has none."""

    def __init__(self, cores: Cores, root: Path = _ROOT):
        self._cores, self._file = cores.cores, root / "proc/stat"
        self._before = self._counters()

    def free(self) -> float | None:
        """Cores without work since the look before this; a core is as free as the busier of the
        CPUs that share it."""
        before, self._before = self._before, self._counters()
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

    def _counters(self) -> dict[int, tuple[int, int]]:
        """By CPU: time without work, and all time."""
        found = {}
        for match in re.finditer(r"^cpu(\d+) (.*)$", _read(self._file), re.MULTILINE):
            times = [int(word) for word in match[2].split()[:8]]
            found[int(match[1])] = (sum(times[3:5]), sum(times))
        return found


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
    idle = Idle(cores, root)
    sleep(_SAMPLE)
    free = idle.free()
    if free is None and hasattr(os, "getloadavg"):
        free = max(0.0, len(cores.cores) - os.getloadavg()[0])
    free = float(len(cores.cores)) if free is None else free
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


def settle(wanted: int | None, note: Note) -> Threads:
    """Choose, before torch is loaded, and load it so. UserError for a bad number; a line to
    `note` if others leave fewer cores than there are."""
    if wanted is not None and not 1 <= wanted <= _MOST:
        from bass_cli.errors import UserError

        raise UserError(
            f"--threads (or BASS_THREADS): it should be a whole number from 1 to {_MOST} (got "
            f"{wanted})"
        )
    chosen, waiting = choose(wanted)
    os.environ.update(waiting)

    import torch

    torch.set_num_threads(chosen.number)
    if chosen.shared:
        note(f"computing with {chosen.number} of {most_threads(wanted)} threads: {chosen.why}")
    return chosen


class Company:
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
