"""The machine: supported systems, and the memory that is free on it.

Heavy modules are imported inside the functions that need them. The memory that a job takes:
run/memory.py. What `bass doctor` shows: cli/doctor.py.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

ROOT = Path("/")  # the folder with proc, sys and dev
SUPPORTED = ("linux", "darwin")
_NEEDED = ("fcntl", "pwd", "resource")  # locks on output files, users and limits of the sandbox
# Texts of errors of torch, CUDA's libraries, Python and the C library when they get no memory. Not
# all of them have an exception type for it.
_REFUSALS = (
    "out of memory",
    "out_of_memory",
    "can't allocate memory",
    "cannot allocate memory",
    "alloc_failed",
    "allocation_failed",
    "bad_alloc",
    "not enough memory",
    # from the library loader, and from threads, which get no memory for their stacks
    "failed to map segment",
    "cannot create shared object descriptor",
    "can't start new thread",
    "thread creation failed",
    "resource temporarily unavailable",
)
_NVIDIA = ("nvidiactl", "dxg")  # in /dev of Linux, and of Linux on Windows
# Bytes from which on a limit means no limit: version 1 of control groups writes 2^63 minus a page.
_UNLIMITED = 1 << 60
# The compute capability that Triton (README, compatibility) and products in bfloat16 need
_LEAST_CAPABILITY = (8, 0)
_LEAST_ADDRESS_SPACE = 900_000_000  # bytes; a tiny job needs 960 MB


class HostMemory(NamedTuple):
    """Total and free memory in bytes, of the machine or of a control group that allows less."""

    total: int
    free: int


def gpu_fault() -> str | None:
    """Return why bass cannot run on a CUDA device; None if it can."""
    import torch

    if not torch.cuda.is_available():
        return "this machine has no CUDA device that torch can use"
    found = torch.cuda.get_device_capability()
    if found >= _LEAST_CAPABILITY:
        return None
    return (
        f"{torch.cuda.get_device_name()} has compute capability {'.'.join(map(str, found))}, and "
        f"bass needs {'.'.join(map(str, _LEAST_CAPABILITY))} or later"
    )


def unsupported() -> str | None:
    """Return why bass cannot run on this system, in one sentence; None if it can."""
    missing = [name for name in _NEEDED if not _is_there(name)]
    if sys.platform in SUPPORTED and not missing:
        return None
    lacks = f"; Python has no module {', '.join(missing)}" if missing else ""
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


def host_memory() -> HostMemory:
    """Return the memory of this machine. The page cache counts as free."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    figures = _figures(ROOT / "proc/meminfo")
    total = figures.get("MemTotal", total >> 10) << 10
    free = figures.get("MemAvailable", total >> 10) << 10
    for limit, left in _memory_limits():
        total, free = min(total, limit), min(free, left)
    if (most := _address_space_limit()) is not None:
        free = min(free, most - _own_memory(0))
    return HostMemory(total, max(free, 0))


def free_memory(device: torch.device) -> int:
    """Return the free memory of a device in bytes."""
    if device.type != "cuda":
        return host_memory().free
    import torch

    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def held_memory(device: torch.device) -> int:
    """Return the bytes that this process has allocated on a device."""
    if device.type == "cuda":
        import torch

        return torch.cuda.memory_allocated(device)
    return _own_memory(1)


def give_back_memory(device: torch.device) -> None:
    """Free memory of a device: objects in reference cycles, and torch's cache."""
    gc.collect()
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def is_refused_memory(error: BaseException) -> bool:
    """Return whether an exception means that memory ran out, on any device.

    A RuntimeError raised while such an exception is handled counts too: the capture of a graph
    fails with another message.
    """
    if isinstance(error, MemoryError):
        return True
    before = None if error.__suppress_context__ else error.__context__
    if isinstance(error, RuntimeError) and before is not None and is_refused_memory(before):
        return True
    return isinstance(error, (RuntimeError, OSError, ImportError)) and any(
        words in str(error).lower() for words in _REFUSALS
    )


def _figures(path: Path) -> dict[str, int]:
    """Return the numbers in lines like "MemTotal:  123 kB" or "inactive_file 123", by name."""
    lines = [line.replace(":", " ").split() for line in system_text(path).splitlines()]
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Yield limit and free bytes of each control group (version 1 or 2) that limits memory.

    Inactive file pages count as free, because the system reclaims them when memory is short.
    """
    for folder, version in control_groups("memory"):
        names = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
        limit, used = (system_text(folder / f"memory.{name}").strip() for name in names)
        if limit.isdigit() and used.isdigit() and int(limit) < _UNLIMITED:  # without one: "max"
            stat = _figures(folder / "memory.stat")
            inactive = stat.get("total_inactive_file", stat.get("inactive_file", 0))
            yield int(limit), int(limit) - int(used) + inactive


def control_groups(controller: str) -> Iterator[tuple[Path, int]]:
    """Yield the folders of this process's control groups, with their version (1 or 2).

    The limits of parent groups apply too, so their folders are included. In a container the
    group's own folder may be invisible.

    Args:
        controller: "cpu" or "memory".
    """
    lines = system_text(ROOT / "proc/self/cgroup").splitlines()
    for _, controllers, name in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers and controller not in controllers.split(","):
            continue
        base = ROOT / "sys/fs/cgroup" / (controller if controllers else "")
        place = base / name.lstrip("/")
        for folder in (place, *place.parents):
            if folder.is_relative_to(base):
                yield folder, 1 if controllers else 2


def system_text(path: Path) -> str:
    """Return the text of one of the system's files; "" if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _own_memory(field: int) -> int:
    """Return the bytes of this process's address space (field 0) or resident memory (field 1)."""
    words = system_text(ROOT / "proc/self/statm").split()
    return int(words[field]) * os.sysconf("SC_PAGE_SIZE") if len(words) > field else 0


def _address_space_limit() -> int | None:
    """Return the bytes of address space that `ulimit -v` allows; None without a limit."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def lacking_address_space() -> str | None:
    """Return why torch cannot be loaded, in one sentence; None if `ulimit -v` allows enough.

    This is checked first because some libraries end the process if they get no memory.
    """
    limit = _address_space_limit()
    if limit is None or limit >= _LEAST_ADDRESS_SPACE:
        return None
    return (
        f"ulimit -v allows {limit / 1e6:.0f} MB of address space, but loading torch takes "
        f"{_LEAST_ADDRESS_SPACE / 1e6:.0f} MB; raise the limit (ulimit -v unlimited)"
    )


def processor_name() -> str | None:
    """Return the name of the processor, as Linux or macOS gives it. None if unknown."""
    for text in system_text(ROOT / "proc/cpuinfo").splitlines():
        if text.startswith("model name"):
            return text.partition(":")[2].strip() or None
    return platform.processor() or None


def driver_version() -> str | None:
    """Return the version of NVIDIA's kernel driver, such as "570.124.06". None if unknown."""
    text = system_text(ROOT / "proc/driver/nvidia/version")
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return found and found[1]


def visible_gpus() -> list[str]:
    """For each GPU that this process sees, return the value of CUDA_VISIBLE_DEVICES under which a
    child sees that GPU alone. The driver's library is used, because importing torch takes seconds.
    """
    import ctypes

    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
            return []
    except (OSError, AttributeError):
        return []
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(count.value)) if given is None else given.split(",")
    return [name.strip() for name in names][: count.value]


def gigabytes(count: int) -> str:
    """Format bytes as gigabytes."""
    return f"{count / 1e9:.1f} GB"


def wake(device: torch.device) -> None:
    """Start to create the CUDA context in a thread.

    It takes some tenths of a second, during which Python can do other work. Errors are ignored
    here, because they occur again when the device is used. The thread is not a daemon: if the
    process ended inside CUDA's libraries, they would abort it.
    """
    if device.type == "cuda":
        threading.Thread(target=_make_context, args=(device,), name="waking").start()


def digest_triton(device: torch.device) -> None:
    """Start to import Triton and to make its digest of itself, in a thread.

    Triton loads no kernel without it. Call this when the threads that read weights have begun: it
    is 0.7 s of Python, which the modules before the weights would have to share.
    """
    if device.type == "cuda":
        start_awaited(_digest_triton, "digesting")


def start_awaited(load: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread that loads libraries or runs one. An ordinary end of Python waits for it.

    At that end the system runs the libraries' destructors, and Python ends its threads inside the
    libraries: both can abort the process. The thread is a daemon, because `_leave` in __main__.py
    does neither and need not wait.
    """
    thread = threading.Thread(target=load, name=name, daemon=True)
    atexit.register(thread.join)
    thread.start()
    return thread


def expect(device: str | None) -> None:
    """At the start of a command, create the CUDA context in a thread.

    Does so only if there may be an NVIDIA GPU and `device` is not "cpu". Later the job would have
    to wait for it. For the thread see `wake`.

    Args:
        device: The value of --device, None if not given.
    """
    if device != "cpu" and any((ROOT / "dev" / name).exists() for name in _NVIDIA):
        # Before 12.2, CUDA loads all of torch's kernels at once by default. torch sets this too.
        os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
        threading.Thread(target=_retain_context, name="waking").start()


def expect_gpus(device: str | None) -> None:
    """At the start of a command whose processes use the GPUs, start CUDA's driver in a thread, so
    that `visible_gpus` need not wait for it. For the thread see `wake`.

    Args:
        device: The value of --device, None if not given.
    """
    if device != "cpu" and any((ROOT / "dev" / name).exists() for name in _NVIDIA):
        threading.Thread(target=visible_gpus, name="waking").start()


def read_ahead(files: Callable[[], Iterable[Path]]) -> None:
    """Have the system read files into the page cache, in a thread, while torch is imported.

    Nothing is read if they take more than half of the free memory, or if the system has no such
    call. Files that cannot be opened are left out.

    Args:
        files: Returns the files. It is called in the thread.
    """
    if hasattr(os, "posix_fadvise"):
        threading.Thread(target=_read_ahead, args=(files,), name="reading", daemon=True).start()


def _read_ahead(files: Callable[[], Iterable[Path]]) -> None:
    with contextlib.suppress(OSError):
        found = [(file, file.stat().st_size) for file in files() if file.is_file()]
        if sum(size for _, size in found) <= host_memory().free / 2:
            for file, size in found:
                with file.open("rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, size, os.POSIX_FADV_WILLNEED)


def _retain_context() -> None:
    """Create the first device's primary context, which torch then uses, without torch."""
    import ctypes

    device, context = ctypes.c_int(0), ctypes.c_void_p()
    with contextlib.suppress(OSError, AttributeError):  # no driver; torch reports it if needed
        driver = ctypes.CDLL("libcuda.so.1")
        if not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(device), 0):
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _make_context(device: torch.device) -> None:
    import torch

    with contextlib.suppress(Exception):
        torch.cuda.mem_get_info(device)


def _digest_triton() -> None:
    """Have Triton read its library, some hundred megabytes, and keep the digest."""
    with contextlib.suppress(Exception):
        importlib.import_module("triton.runtime.cache").triton_key()
