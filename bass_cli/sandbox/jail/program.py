"""The process of the untrusted program: it gives up its rights, runs the text, and says so if the
text came to its end.

Once the text runs, nothing in this process can be trusted. What it says is believed only if it
starts with a key that lies in no module, no variable of a frame, no file and no pipe; see
`finish`.
"""

from __future__ import annotations

import _sitebuiltins
import builtins
import os
import resource
import sys
import types

from . import landlock, seccomp
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

    from .order import Order

READY, REFUSED, RAISED = b"+", b"#", b"!"
STACK_BYTES = 64 << 20
SPARE_TASKS = 64  # what the same user may start elsewhere while a program runs
WORD = 16  # bytes of key and nonce


def enter(order: Order, say: int, hear: int, keys: list[bytes]) -> NoReturn:
    """Run an order's program in this process, which is a fresh child of the warden's; never
    returns.

    `say` and `hear` are pipes to and from the warden; `keys` holds the key, which is taken out.
    """
    try:
        _restrict(order)
        _prepare(order)
    except SetupError as error:
        os.write(say, b"%s%s: %s" % (REFUSED, error.layer.encode(), error.reason.encode()))
        os._exit(1)
    os.write(say, READY)
    os.read(
        hear, len(READY)
    )  # until the warden has heard it: what comes after the text has begun is the program's
    _run(order["texts"], [keys.pop(), _ender(say, hear)], say)


def _restrict(order: Order) -> None:
    layers = order["layers"]
    os.setsid()
    _limit(order)
    if "uid" in layers:
        _become(*order["owner"])
    if sys.platform == "linux":
        _confine(order, layers)


def _confine(order: Order, layers: tuple[str, ...]) -> None:
    # In a new user namespace, and as root, there are capabilities to lose; elsewhere this
    # changes nothing.
    drop_capabilities()
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_PDEATHSIG, 9)
    # Readable by others of the same user again, which this user's own tools (/proc/self) need;
    # the warden stays hidden.
    prctl(PR_SET_DUMPABLE, 1 if "pid" in layers else 0)
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


def _limit(order: Order) -> None:
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


def _tasks_besides(order: Order) -> int:
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


def _prepare(order: Order) -> None:
    """What a fresh interpreter would offer: a module of its own, the installed packages, `exit` and
    `help`.

    The module is not called __main__: the public scorers run no `if __name__ == "__main__"`
    either.
    """
    os.chdir(order["folder"] or (WORK if "mount" in order["layers"] else "."))
    module = types.ModuleType("program")
    for name in [name for name in sys.modules if name.split(".")[0] == "jail"]:
        del sys.modules[name]
    sys.modules["program"] = sys.modules["__main__"] = module
    sys.argv, sys.path[:] = ["program"], order["path"]
    builtins.exit = builtins.quit = _sitebuiltins.Quitter("exit", "Ctrl-D (i.e. EOF)")
    builtins.help = _sitebuiltins._Helper()


def _run(texts: tuple[str, str], parts: list[Any], say: int) -> NoReturn:
    """Run both texts in one module, then call the last of `parts` with the one before.

    Whatever comes after the first text is looked up before it, and is on this frame's stack only
    meanwhile, where neither frames nor the garbage collector lead. The texts are compiled apart:
    neither can end within the other.
    """
    leave, write, tell, scope = os._exit, os.write, _tell, sys.modules["program"].__dict__
    try:
        first, second = (
            _compile(texts[0] + "\n\n"),
            _compile("\n" * (texts[0].count("\n") + 1) + texts[1]),
        )
        parts.pop()(parts.pop(), exec(second, scope, exec(first, scope)))  # type: ignore[func-returns-value]
    except MemoryError:
        write(say, RAISED + b"MemoryError")
    except (
        BaseException
    ) as error:  # SystemExit and KeyboardInterrupt too: the text did not come to its end
        write(say, RAISED + tell(error))
    finally:
        leave(1)


def _compile(text: str) -> types.CodeType:
    return compile(text, "<program>", "exec", dont_inherit=True)


def _tell(error: BaseException) -> bytes:
    """One line about an exception. The program may have made its class: whatever is called here
    is the program's."""
    place, line = error.__traceback__, 0
    while place is not None:
        line = place.tb_lineno if place.tb_frame.f_code.co_filename == "<program>" else line
        place = place.tb_next
    try:
        sys.stdout.flush()
    except BaseException:
        line = line or 0
    try:
        text = f"{type(error).__name__}: {error}".rstrip(": \n").encode("utf-8", "replace")
    except BaseException:
        text = b"an exception that cannot be shown"
    return (b"line %d: " % line if line else b"") + text[:2000]


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
