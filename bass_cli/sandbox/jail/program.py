"""The process of the untrusted program: it gives up its rights and runs the text.

Once the text runs, nothing in this process can be trusted. Where the program has tests, their
process (checks.py) gives the verdict, and this one only answers its calls. A text without tests
has passed if it came to its end: that word needs a key that lies in no module, no variable of a
frame, no file and no pipe; see `finish`.
"""

from __future__ import annotations

import _sitebuiltins
import builtins
import os
import resource
import sys
import types

from . import landlock, seccomp
from .calls import Peer
from .libc import (
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    SetupError,
    drop_capabilities,
    prctl,
)
from .namespaces import DEVICES, WORK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from .job_spec import JobSpec

READY, REFUSED, RAISED, PASSED = b"+", b"#", b"!", b"="
STACK_BYTES = 64 << 20
SPARE_TASKS = 64  # what the same user may start elsewhere while a program runs
WORD = 16  # bytes of key and nonce


def enter(
    order: JobSpec, say: int, hear: int, keys: list[bytes], tests: tuple[int, int] | None
) -> NoReturn:
    """Run an order's program in this process, which is a fresh child of the warden's; never
    returns.

    `say` and `hear` are pipes to and from the warden; `keys` holds the key, which is taken out.
    `tests`: pipes from and to the process of the tests, if there are any.
    """
    prepare(order, say, name="program")
    os.write(say, READY)
    os.read(
        hear, len(READY)
    )  # until the warden has heard it: what comes after the text has begun is the program's
    if tests is None:
        _run(order["text"], [keys.pop(), _ender(say, hear)], say)
    os.close(say)
    os.close(hear)
    _serve(order["text"], Peer(*tests, describe=tell, leave=_leave, wary=False))


def _leave() -> NoReturn:
    os._exit(0)


def prepare(order: JobSpec, say: int, *, name: str, hidden: bool = False) -> None:
    """Give up this process's rights and make it a fresh interpreter, whose module has that name.
    A layer that cannot be had is reported to `say` and ends the process. `hidden`: processes of
    the same user can neither read nor trace it."""
    try:
        _restrict(order, hidden)
        _refresh(order, name)
    except SetupError as error:
        os.write(say, b"%s%s: %s" % (REFUSED, error.layer.encode(), error.reason.encode()))
        os._exit(1)


def _restrict(order: JobSpec, hidden: bool) -> None:
    layers = order["layers"]
    os.setsid()
    _limit(order)
    if "uid" in layers:
        _become(*order["owner"])
    if sys.platform == "linux":
        _confine(order, layers, hidden)


def _confine(order: JobSpec, layers: tuple[str, ...], hidden: bool) -> None:
    # In a new user namespace, and as root, there are capabilities to lose; elsewhere this
    # changes nothing.
    drop_capabilities()
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_PDEATHSIG, 9)
    # Readable by others of the same user again, which this user's own tools (/proc/self) need;
    # the warden stays hidden.
    prctl(PR_SET_DUMPABLE, 1 if "pid" in layers and not hidden else 0)
    work = order["folder"] or WORK
    os.chdir(work)
    if "landlock" in layers:
        readable = [real for _, real in order["places"]] + list(DEVICES)
        shared = ["/tmp", "/dev/shm"] if "mount" in layers else []
        # only a /proc that shows the program alone
        own = ["/proc"] if {"mount", "pid"} <= set(layers) else []
        landlock.restrict(readable + own, [work, "/dev/null", *shared])
    if "seccomp" in layers:
        alone = None if "pid" in layers else os.getpid()
        seccomp.restrict(
            alone, attributes="mount" in layers, forks=os.getuid() != 0
        )  # no limit counts root's processes


def _become(user: int, group: int) -> None:
    """Another user, for whom limits hold and who owns nothing; refused if it could not read the
    interpreter's files."""
    try:
        os.setgroups([])
        os.setresgid(group, group, group)
        os.setresuid(user, user, user)
        with open(os.__file__, "rb"):
            return
    except OSError as error:
        raise SetupError("uid", error) from None


def _limit(order: JobSpec) -> None:
    cpu = order["cpu_seconds"]
    limits = {
        resource.RLIMIT_CPU: (
            cpu,
            cpu + 1,
        ),  # the second is for a program that catches the first one's signal
        resource.RLIMIT_AS: (order["memory_bytes"],) * 2,
        resource.RLIMIT_STACK: (STACK_BYTES,) * 2,
        resource.RLIMIT_NOFILE: (order["open_files"],) * 2,
        resource.RLIMIT_NPROC: (order["processes"] + _tasks_besides(order),) * 2,
        resource.RLIMIT_FSIZE: (order["file_bytes"],) * 2,
        resource.RLIMIT_CORE: (0, 0),
    }
    for limit, (soft, hard) in limits.items():
        most = resource.getrlimit(limit)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        try:
            resource.setrlimit(limit, (soft, hard))
        except (OSError, ValueError) as error:
            if sys.platform == "linux":  # macOS has no limit on memory, for example
                raise SetupError("limits", error) from None


def _tasks_besides(order: JobSpec) -> int:
    """How many processes and threads count against the limit beside the program's own: the system
    counts by user.

    A user of its own has none, and in a user namespace of its own there are the wardens only
    (since Linux 5.14).
    """
    if "uid" in order["layers"] or sys.platform != "linux":
        return 0
    release = tuple(int(part) for part in os.uname().release.replace("-", ".").split(".")[:2])
    if "user" in order["layers"] and release >= (5, 14):
        return 2
    names = os.listdir("/proc") if os.path.isdir("/proc") else []
    return SPARE_TASKS + sum(_tasks(name, os.getuid()) for name in names if name.isdigit())


def _tasks(process: str, user: int) -> int:
    try:
        return (
            len(os.listdir(f"/proc/{process}/task"))
            if os.stat(f"/proc/{process}").st_uid == user
            else 0
        )
    except OSError:  # it has ended meanwhile
        return 0


def _refresh(order: JobSpec, name: str) -> None:
    """What a fresh interpreter would offer: a module of its own, the installed packages, `exit` and
    `help`.

    The module is not called __main__: the public scorers run no `if __name__ == "__main__"`
    either.
    """
    os.chdir(order["folder"] or (WORK if "mount" in order["layers"] else "."))
    module = types.ModuleType(name)
    for one in [one for one in sys.modules if one.split(".")[0] == "jail"]:
        del sys.modules[one]
    sys.modules[name] = sys.modules["__main__"] = module
    sys.argv, sys.path[:] = [name], order["path"]
    builtins.exit = builtins.quit = _sitebuiltins.Quitter("exit", "Ctrl-D (i.e. EOF)")
    builtins.help = _sitebuiltins._Helper()


def _run(text: str, parts: list[Any], say: int) -> NoReturn:
    """Run a text without tests, then call the last of `parts` with the one before.

    Whatever comes after the text is looked up before it, and is on this frame's stack only
    meanwhile, where neither frames nor the garbage collector lead.
    """
    leave, write, told, scope = os._exit, os.write, raised, sys.modules["program"].__dict__
    try:
        code = compile_text(text + "\n\n")
        parts.pop()(parts.pop(), exec(code, scope))  # type: ignore[func-returns-value]
    except (
        BaseException
    ) as error:  # SystemExit and KeyboardInterrupt too: the text did not come to its end
        write(say, told(error))
    finally:
        leave(1)


def _serve(text: str, tests: Peer) -> NoReturn:
    """Run a text that has tests, then answer what their process asks until it has ended."""
    scope = sys.modules["program"].__dict__

    def start(names: tuple[str, ...]) -> dict[str, Any]:
        """Run the text; its objects of these names."""
        exec(compile_text(text + "\n\n"), scope)
        return {name: scope[name] for name in names if name in scope}

    tests.keep(start)  # number START, which is where the tests' process begins
    while True:
        tests.answer(*tests.receive())


def compile_text(text: str, name: str = "<program>") -> types.CodeType:
    """Compiled without the features that this file asks of `__future__`."""
    return compile(text, name, "exec", dont_inherit=True)


def raised(error: BaseException) -> bytes:
    """The word to the warden about an exception that ended a text."""
    if isinstance(error, MemoryError):
        return RAISED + b"MemoryError"
    return RAISED + tell(error).encode("utf-8", "replace")


def tell(error: BaseException) -> str:
    """One line about an exception. The program may have made its class: whatever is called here
    is the program's. What the program's process has said about it (calls.py) counts in the
    tests'."""
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
        text = getattr(error, "told", None) or f"{type(error).__name__}: {error}".rstrip(": \n")
        text = str(text)[:2000]
    except BaseException:
        text = "an exception that cannot be shown"
    return text if text.startswith("line ") or not line else f"line {line}: {text}"


def _ender(say: int, hear: int) -> Callable[[bytes, object], None]:
    """The function that asks for the nonce with the key and sends it back, bound to what this
    process is and trusts now."""
    read, write, leave, identity, own = os.read, os.write, os._exit, os.getpid, os.getpid()

    def finish(key: bytes, _: object) -> None:
        if identity() == own:  # not in a fork of the program that came to the end before it
            write(say, key)
            write(say, read(hear, WORD))
        leave(0)

    return finish
