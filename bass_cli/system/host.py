"""What the operating system gives a process: whether it is one that bass runs on, memory, a place
for caches.

Nothing heavy is imported before a function needs it. Not here: what a job takes (memory.py),
what `bass doctor` shows (cli/doctor.py).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bass_cli.system.private import make_private, own_or_fresh

if TYPE_CHECKING:
    import torch

SUPPORTED = ("linux", "darwin")
_NEEDED = ("fcntl", "pwd", "resource")  # locks on output files, users and limits of the sandbox
# What torch, CUDA's libraries, Python and the C library say when memory is refused. Not all of
# them have a type for it.
_REFUSALS = (
    "out of memory",
    "out_of_memory",
    "can't allocate memory",
    "cannot allocate memory",
    "alloc_failed",
    "allocation_failed",
    "bad_alloc",
    "not enough memory",
    # of the loader, and of threads, whose stacks are memory
    "failed to map segment",
    "cannot create shared object descriptor",
    "can't start new thread",
    "thread creation failed",
    "resource temporarily unavailable",
)
_NVIDIA = ("nvidiactl", "dxg")  # of Linux, and of Linux on Windows
# bytes from which on a limit is none: version 1 of control groups writes 2^63 less a page
_UNLIMITED = 1 << 60
_LEAST_ADDRESS_SPACE = 900_000_000  # bytes; 960 MB is the least with which a tiny job runs


class HostMemory(NamedTuple):
    """Bytes of the machine, or less where a control group allows less: in all, and that can
    still be taken."""

    total: int
    free: int


def unsupported() -> str | None:
    """Why bass cannot run on this system, in one sentence; None where it can."""
    missing = [name for name in _NEEDED if not _is_there(name)]
    if sys.platform in SUPPORTED and not missing:
        return None
    lacks = f"; {', '.join(missing)} of Python's library cannot be imported" if missing else ""
    return (
        f"bass runs on Linux and macOS, and this system is {sys.platform}{lacks} (on Windows, "
        "use WSL)"
    )


def _is_there(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def cache_folder() -> Path:
    """Return the folder for what bass can make again: $XDG_CACHE_HOME/bass or ~/.cache/bass; for
    a user without a home, one among the temporary files. It need not exist or be writable.

    If other users may write there, it is a fresh folder, after a line on standard error.
    """
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(given or Path.home() / ".cache") / "bass"
    except RuntimeError:  # no HOME, and a user that the system does not list, as in many containers
        folder = temporary_folder() / f"bass-{os.getuid()}"
    return own_or_fresh(folder, "cache folder")


def temporary_folder() -> Path:
    """The folder for temporary files: TMPDIR or the system's; a path that is not there if none
    of them can be written."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return Path(os.environ.get("TMPDIR") or "/tmp")


def give_kernels_a_cache() -> Path:
    """Return the folder for Triton's compiled kernels.

    Triton loads libraries from it. So if its own folder is not writable, or other users can write
    there, set TRITON_CACHE_DIR to another one.
    """
    given = os.environ.get("TRITON_CACHE_DIR")
    home = Path(os.environ.get("TRITON_HOME") or os.path.expanduser("~"))
    folder = Path(given) if given else home / ".triton" / "cache"
    if not given and not (folder.is_absolute() and is_writable(folder)):
        folder = temporary_folder() / f"bass-{os.getuid()}" / "triton"
        os.environ["TRITON_CACHE_DIR"] = str(folder)
    found = own_or_fresh(folder, "Triton's cache folder")
    if found != folder:
        found = found / "triton"
        os.environ["TRITON_CACHE_DIR"] = str(found)
    with contextlib.suppress(OSError):  # Triton itself would make it with the umask's permissions
        make_private(found)
    return found


def is_writable(folder: Path) -> bool:
    """Whether files can be put there, or the folder can be made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def host_memory(root: Path = Path("/")) -> HostMemory:
    """The memory of this machine. What files were read into counts as free. `root`: where /proc
    and /sys lie, for tests."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    figures = _figures(root / "proc/meminfo")
    total = figures.get("MemTotal", total >> 10) << 10
    free = figures.get("MemAvailable", total >> 10) << 10
    for limit, left in _groups(root):
        total, free = min(total, limit), min(free, left)
    return HostMemory(total, max(min(free, _address_space(root)), 0))


def wake(device: torch.device) -> None:
    """Begin to make a CUDA device's context, and Triton's digest of itself, without which it loads
    no kernel: some tenths of a second each, in which Python is free for other work. What goes
    wrong does so again, and is said, where the device is needed. The first is no daemon: one
    that a process's end meets in CUDA's libraries would abort it."""
    if device.type == "cuda":
        threading.Thread(target=_make_context, args=(device,), name="waking").start()
        threading.Thread(target=_digest_triton, name="digesting", daemon=True).start()


def expect(device: str | None, root: Path = Path("/")) -> None:
    """For a command that has only begun, and a device as it was named to it (None: not at all):
    where there may be one of NVIDIA's, import Triton beside all that comes before the weights, and
    make its digest; while these are read both would be waited for."""
    if device != "cpu" and any((root / "dev" / name).exists() for name in _NVIDIA):
        threading.Thread(target=_digest_triton, name="digesting", daemon=True).start()


def _make_context(device: torch.device) -> None:
    import torch

    with contextlib.suppress(Exception):
        torch.cuda.mem_get_info(device)


def _digest_triton() -> None:
    """It reads some hundred megabytes of its own library once a process, and keeps the digest."""
    with contextlib.suppress(Exception):
        importlib.import_module("triton.runtime.cache").triton_key()


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken on a device."""
    if device.type != "cuda":
        return host_memory().free
    import torch

    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def held_memory(device: torch.device) -> int:
    """Bytes that this process holds on a device."""
    if device.type == "cuda":
        import torch

        return torch.cuda.memory_allocated(device)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def give_back_memory(device: torch.device) -> None:
    """Let go of what nobody needs any more on a device: what points at itself in a circle, and
    what torch keeps for later."""
    gc.collect()
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def is_refused_memory(error: BaseException) -> bool:
    """Whether an exception says that memory was asked for and not given, on whatever device, or
    is what became of that: the capture of a graph that it broke off fails in its own words."""
    if isinstance(error, MemoryError):
        return True
    before = None if error.__suppress_context__ else error.__context__
    if isinstance(error, RuntimeError) and before is not None and is_refused_memory(before):
        return True
    return isinstance(error, (RuntimeError, OSError, ImportError)) and any(
        words in str(error).lower() for words in _REFUSALS
    )


def _figures(path: Path) -> dict[str, int]:
    """The numbers in lines like "MemTotal:  123 kB" or "inactive_file 123"; none if the file
    cannot be read."""
    try:
        lines = [line.replace(":", " ").split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and what is left of it, for each control group of this process that limits memory
    (both versions). What files were read into and not touched lately is given back when memory
    is short, so it is left."""
    for folder, version in control_groups(root, "memory"):
        names = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes")
            if version == 1
            else ("memory.max", "memory.current")
        )
        limit, used = (_number(folder / file) for file in names)
        if limit is not None and used is not None and limit < _UNLIMITED:
            stat = _figures(folder / "memory.stat")
            yield (
                limit,
                limit - used + stat.get("total_inactive_file", stat.get("inactive_file", 0)),
            )


def control_groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """The folders of this process's control groups that may limit "cpu" or "memory", with the
    version (1 or 2). A group's limit holds for those within it, so those around it come too; in
    a container its own folder may be out of sight."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for _, controllers, name in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        place = base / name.lstrip("/")
        yield from (
            (folder, 1 if controllers else 2)
            for folder in (place, *place.parents)
            if folder.is_relative_to(base)
        )


def _number(path: Path) -> int | None:
    """The number in a file; None if there is none ("max") or it cannot be read."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def lacking_address_space() -> str | None:
    """Why torch cannot be loaded here, in one sentence; None if `ulimit -v` allows enough. Some
    of the libraries end the process where they get no memory."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY or limit >= _LEAST_ADDRESS_SPACE:
        return None
    return (
        f"ulimit -v allows this process {limit / 1e6:.0f} MB of address space, and loading torch "
        f"takes {_LEAST_ADDRESS_SPACE / 1e6:.0f} MB: raise the limit (ulimit -v unlimited)"
    )


def _address_space(root: Path) -> int:
    """What `ulimit -v` leaves this process."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return _UNLIMITED
    try:
        used = int((root / "proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        used = 0
    return limit - used


def gigabytes(count: int) -> str:
    """Bytes for a person."""
    return f"{count / 1e9:.1f} GB"
