"""The process of an untrusted program, and the process of its tests.

Both give up their privileges first. Nothing in the program's process can be trusted once its text
runs, so it has no pipe to the supervisor then. The program never runs in the tests' process, which
alone sends the verdict: there the names that the tests take from the program are proxies
(calls.py).
"""

from __future__ import annotations

import _sitebuiltins
import builtins
import os
import resource
import sys
import time
import types

from .calls import START, Peer
from .layers import (
    DEVICES,
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    WORK,
    SetupError,
    drop_capabilities,
    prctl,
    restrict_files,
)
from .seccomp import restrict_calls
from .values import OBJECT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from . import Checks, JobSpec

READY, REFUSED, RAISED, PASSED, OVERDUE, UNUSABLE = b"+", b"#", b"!", b"=", b">", b"?"
STACK_BYTES = 64 << 20
SPARE_TASKS = 64  # processes and threads that the same user may start elsewhere meanwhile
# Seconds before the tests' process reports that the program's pipe was closed. Meanwhile the
# supervisor sees how the program ended, which says more.
PATIENCE = 0.1
SILENT = b"the program does not answer"


def enter_program(spec: JobSpec, outlet: int, tests: tuple[int, int]) -> NoReturn:
    """Run the program in this process, a fresh child of the supervisor. Never returns.

    Args:
        spec: the program and its limits.
        outlet: descriptor of the pipe to the supervisor. It is closed before the text runs.
        tests: descriptors of the pipes from and to the tests' process.
    """
    _prepare(spec, outlet, name="program")
    os.write(outlet, READY)
    os.close(outlet)
    peer = Peer(*tests, describe=describe, leave=_leave, restricted=False)
    scope, own, identity = sys.modules["program"].__dict__, os.getpid(), os.getpid

    def start(names: tuple[str, ...]) -> dict[str, Any]:
        """Run the text. Returns its objects of these names."""
        exec(compile_text(spec["text"] + "\n\n"), scope)
        if identity() != own:  # a child process that the text has forked
            _leave()
        return {name: scope[name] for name in names if name in scope}

    peer.keep(start)  # the first object, so its number is START
    while True:
        peer.answer(*peer.receive())


def _leave() -> NoReturn:
    os._exit(0)


def enter_tests(spec: JobSpec, checks: Checks, outlet: int, program: tuple[int, int]) -> NoReturn:
    """Run the tests in this process, a fresh child of the supervisor. Never returns.

    Args:
        spec: the program and its limits.
        checks: tests, setup and names of the Program.
        outlet: descriptor of the pipe to the supervisor.
        program: descriptors of the pipes from and to the program's process.
    """

    def leave() -> NoReturn:
        time.sleep(PATIENCE)
        os.write(outlet, RAISED + SILENT)
        os._exit(1)

    _prepare(spec, outlet, name="tests", hidden=True)
    peer = Peer(*program, describe=describe, leave=leave, restricted=True)
    scope = {
        "__name__": "tests",
        "__builtins__": __builtins__,
        "transfer_seconds": peer.transfer_seconds,
    }
    try:
        exec(compile_text(checks[1], "<setup>"), scope)
    except BaseException as error:
        message = UNUSABLE + describe(error).encode("utf-8", "replace")
    else:
        message = _run_tests(spec["text"].count("\n") + 1, checks, scope, peer)
    os.write(outlet, message)
    os._exit(0)


def _run_tests(lines: int, checks: Checks, scope: dict[str, Any], peer: Peer) -> bytes:
    """Run the program's text in its process, then the tests here. Returns the verdict's message.

    Args:
        lines: added to the tests' line numbers, so that program and tests count as one text.
        checks: tests, setup and names of the Program.
        scope: the global names of the tests.
        peer: the connection to the program's process.
    """
    try:
        _call_tests(lines, checks, scope, peer)
        return PASSED
    except MemoryError:
        return RAISED + b"MemoryError"
    except BaseException as error:  # SystemExit too: then the tests did not run to their end
        text = describe(error).encode("utf-8", "replace")
        limit = getattr(error, "limit", None)
        return RAISED + text if limit is None else OVERDUE + b"%a\n" % float(limit) + text


def _call_tests(lines: int, checks: Checks, scope: dict[str, Any], peer: Peer) -> None:
    tests, _, names = checks
    code = compile_text("\n" * lines + tests, "<tests>")
    found = peer.find(OBJECT, START)(names)
    scope.update((name, found[name]) for name in names if name in found)
    exec(code, scope)


def _prepare(spec: JobSpec, outlet: int, *, name: str, hidden: bool = False) -> None:
    """Give up this process's privileges and make it look like a fresh interpreter.

    If the system refuses a layer, this reports it to `outlet` and ends the process.

    Args:
        spec: the layers and limits.
        outlet: descriptor of the pipe to the supervisor.
        name: name of the module that the text will run in.
        hidden: processes of the same user can neither read nor trace this process.
    """
    try:
        _restrict(spec, hidden)
        _refresh(spec, name)
    except SetupError as error:
        os.write(outlet, b"%s%s: %s" % (REFUSED, error.layer.encode(), error.reason.encode()))
        os._exit(1)


def _restrict(spec: JobSpec, hidden: bool) -> None:
    layers = spec["layers"]
    os.setsid()
    _limit(spec)
    if "uid" in layers:
        _become(*spec["owner"])
    if sys.platform != "linux":
        return
    # There are capabilities only in a new user namespace, and for root.
    drop_capabilities()
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_PDEATHSIG, 9)
    # /proc/self needs a dumpable process. The supervisor itself stays undumpable.
    prctl(PR_SET_DUMPABLE, 1 if "pid" in layers and not hidden else 0)
    work = spec["folder"] or WORK
    os.chdir(work)
    if "landlock" in layers:
        readable = [real for _, real in spec["places"]] + list(DEVICES)
        shared = ["/tmp", "/dev/shm"] if "mount" in layers else []
        # /proc only if it shows nothing but this sandbox
        own = ["/proc"] if {"mount", "pid"} <= set(layers) else []
        restrict_files(readable + own, [work, "/dev/null", *shared])
    if "seccomp" in layers:
        alone = None if "pid" in layers else os.getpid()
        # As root no limit counts processes, so the program may not fork.
        restrict_calls(alone, attributes="mount" in layers, forks=os.getuid() != 0)


def _become(user: int, group: int) -> None:
    """Switch to a user who owns nothing and for whom limits hold.

    SetupError if that user could not read the interpreter's files.
    """
    try:
        os.setgroups([])
        os.setresgid(group, group, group)
        os.setresuid(user, user, user)
        with open(os.__file__, "rb"):
            return
    except OSError as error:
        raise SetupError("uid", error) from None


def _limit(spec: JobSpec) -> None:
    cpu = spec["cpu_seconds"]
    limits = {
        # The hard limit ends a program that catches the soft limit's signal.
        resource.RLIMIT_CPU: (cpu, cpu + 1),
        resource.RLIMIT_AS: (spec["memory_bytes"],) * 2,
        resource.RLIMIT_STACK: (STACK_BYTES,) * 2,
        resource.RLIMIT_NOFILE: (spec["open_files"],) * 2,
        resource.RLIMIT_NPROC: (spec["processes"] + _tasks_besides(spec),) * 2,
        resource.RLIMIT_FSIZE: (spec["file_bytes"],) * 2,
        resource.RLIMIT_CORE: (0, 0),
    }
    for limit, (soft, hard) in limits.items():
        most = resource.getrlimit(limit)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        try:
            resource.setrlimit(limit, (soft, hard))
        except (OSError, ValueError) as error:
            if sys.platform == "linux":  # macOS, for example, has no memory limit
                raise SetupError("limits", error) from None


def _tasks_besides(spec: JobSpec) -> int:
    """Count the processes and threads that use up the limit beside the program's own.

    The system counts them by user. A user of its own has the tests' process. In a user namespace
    there are the two supervisor processes too (since Linux 5.14).
    """
    if "uid" in spec["layers"] or sys.platform != "linux":
        return 1
    release = tuple(int(part) for part in os.uname().release.replace("-", ".").split(".")[:2])
    if "user" in spec["layers"] and release >= (5, 14):
        return 3
    names = os.listdir("/proc") if os.path.isdir("/proc") else []
    return SPARE_TASKS + sum(_tasks(name, os.getuid()) for name in names if name.isdigit())


def _tasks(process: str, user: int) -> int:
    try:
        return (
            len(os.listdir(f"/proc/{process}/task"))
            if os.stat(f"/proc/{process}").st_uid == user
            else 0
        )
    except OSError:  # the process has ended
        return 0


def _refresh(spec: JobSpec, name: str) -> None:
    """Set up what a fresh interpreter has: its own module, installed packages, `exit` and `help`.

    The module is not called __main__, because the public scorers do not run an
    `if __name__ == "__main__"` block either.
    """
    os.chdir(spec["folder"] or (WORK if "mount" in spec["layers"] else "."))
    module = types.ModuleType(name)
    for one in [one for one in sys.modules if one.split(".")[0] == "jail"]:
        del sys.modules[one]
    sys.modules[name] = sys.modules["__main__"] = module
    sys.argv, sys.path[:] = [name], spec["path"]
    builtins.exit = builtins.quit = _sitebuiltins.Quitter("exit", "Ctrl-D (i.e. EOF)")
    builtins.help = _sitebuiltins._Helper()


def compile_text(text: str, name: str = "<program>") -> types.CodeType:
    """Compile a text without the `__future__` features of this file."""
    return compile(text, name, "exec", dont_inherit=True)


def describe(error: BaseException) -> str:
    """Return one line about an exception: line number, class and text, or its `about`.

    The program may have defined the exception's class, so this may run code of the program. In
    the tests' process, a description from the program's process (calls.py) is returned as it is.
    """
    place, line = error.__traceback__, 0
    while place is not None:
        ours = place.tb_frame.f_code.co_filename in ("<program>", "<tests>")
        line = place.tb_lineno if ours else line
        place = place.tb_next
    try:
        sys.stdout.flush()
    except BaseException:
        line = line or 0
    try:
        if about := getattr(error, "about", None):
            return str(about)[:2000]
        text = getattr(error, "described", None) or f"{type(error).__name__}: {error}".rstrip(
            ": \n"
        )
        text = str(text)[:2000]
    except BaseException:
        text = "an exception that cannot be shown"
    return text if text.startswith("line ") or not line else f"line {line}: {text}"
