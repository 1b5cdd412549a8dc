"""The warden: a fresh, small interpreter that builds the isolation for one program, watches it, and
reports.

Two processes: the outer one makes the namespaces and waits; the inner one is the first process
of the new process namespace, so that nothing survives it, and the parent of the program's.
Neither runs a line of the program.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal costs each warden enumerations
import marshal
import os
import resource
import select
import time

from . import namespaces, program
from .descendants import kill_descendants, processor_seconds, waited_seconds
from .libc import PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE, PR_SET_PDEATHSIG, SetupError, prctl

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from .order import Order

# standard input stays open as long as the supervisor wants the program to run
ORDERS, REPORTS = (0, 1)
CHUNK, TICK = 65536, 0.05
STARVED = (
    0.05  # of its time: who waited longer for a processor may have been late because of others
)
KILL, XCPU = 9, 24
LOST = "the process that watches the program has failed"
ENDED = "the process ended before the program did: "


class Watch:
    """What is known about a running program; `verdict` is (status, detail) once there is one."""

    def __init__(self, order: Order, process: int, key: bytes, answer: int) -> None:
        self.order, self.process, self.key, self.answer = order, process, key, answer
        self.nonce = self.output = b""
        self.ready = False
        self.end: tuple[str, str] | None = (
            None  # what its end means, unless it has said a word before
        )
        self.verdict: tuple[str, str] | None = None


def main() -> NoReturn:
    """Take one order from standard input, run it, write a report to standard output, and end."""
    # A command in a shell's background has it ignored, and so would a warden and its program: a
    # verdict must not depend on that.
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    try:
        _serve()
    except SetupError as error:
        _report("refused", f"{error.layer}: {error.reason}", 0.0, b"")
    # a fault of ours or the system's, in either process; not to be held against a program
    except BaseException as error:
        _report("refused", f"warden: {type(error).__name__}: {error}", 0.0, b"")
    os._exit(1)


def _serve() -> NoReturn:
    order: Order = marshal.loads(_read_order())
    _volunteer()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    namespaces.leave(order["layers"])
    prctl(
        PR_SET_DUMPABLE, 0
    )  # memory, descriptors and environment are closed to processes of the same user
    inner = os.fork()
    if not inner:
        _guard(order)
    os.close(REPORTS)
    os.waitpid(inner, 0)
    kill_descendants()
    os._exit(0)


def _volunteer() -> None:
    """If memory runs out, the kernel shall end the program and not the process that holds a
    model."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        return


def _read_order() -> bytes:
    """The order, after its length as 8 bytes."""
    data = bytearray()
    while len(data) < 8 or len(data) < 8 + int.from_bytes(data[:8], "little"):
        piece = os.read(ORDERS, 1 << 20)
        if not piece:
            os._exit(1)
        data += piece
    return bytes(memoryview(data)[8:])


def _report(status: str, detail: str, seconds: float, output: bytes) -> None:
    text = detail.encode("utf-8", "replace")
    data = f"{status}\n{seconds:.6f}\n{len(text)}\n".encode() + text + output
    while data:
        data = data[os.write(REPORTS, data) :]


def _guard(order: Order) -> NoReturn:
    """The inner process: isolate, start the program, watch it, kill what is left, report."""
    prctl(PR_SET_PDEATHSIG, KILL)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    if "mount" in order["layers"]:
        namespaces.build_root(order["places"], order["owner"], order["folder_bytes"])
    start = time.monotonic()
    watch, say, output = _start(order)
    try:
        _watch(watch, say, output, start + order["seconds"])
        seconds = time.monotonic() - start
        kill_descendants(watch.process)
        _report(*(watch.verdict or ("failed", "")), seconds, watch.output)
    except BaseException as error:
        if not watch.ready:
            raise
        # The program may have brought it about. The outer process kills what is left: this one
        # may not be able to.
        _report("lost", f"{LOST}: {type(error).__name__}: {error}", 0.0, b"")
    os._exit(0)


def _start(order: Order) -> tuple[Watch, int, int]:
    """Fork the program's process; also the pipes on which it speaks and prints. The answering
    pipe becomes ORDERS' twin."""
    keys = [os.urandom(program.WORD)]
    key = keys[0]
    (say_out, say_in), (hear_out, hear_in), (output_out, output_in) = (
        os.pipe(),
        os.pipe(),
        os.pipe(),
    )
    process = os.fork()
    if not process:
        del key
        null = os.open("/dev/null", os.O_RDONLY)
        for source, target in ((null, 0), (output_in, 1), (output_in, 2)):
            os.dup2(source, target)
        for unused in (null, say_out, hear_in, output_out, output_in):
            os.close(unused)
        try:
            program.enter(order, say_in, hear_out, keys)
        finally:  # only a fault of ours comes here, and it must not run on as a second warden
            os._exit(1)
    for unused in (say_in, hear_out, output_in):
        os.close(unused)
    for own in (
        say_out,
        hear_in,
        output_out,
    ):  # a program may take from its pipes, or fill them: nothing waits for them
        os.set_blocking(own, False)
    return Watch(order, process, key, hear_in), say_out, output_out


def _watch(watch: Watch, say: int, output: int, deadline: float) -> None:
    """Wait for the first of: the right word, a wrong word, the end of the process, the deadline,
    the supervisor's end."""
    poll = select.poll()
    for descriptor in (say, output, *_sign_of_end(watch.process)):
        poll.register(descriptor, select.POLLIN)
    poll.register(ORDERS, 0)
    cores = os.cpu_count() or 1
    # not before can all of it be used
    count_at = deadline - watch.order["seconds"] + watch.order["cpu_seconds"] / cores
    while watch.verdict is None:
        now = time.monotonic()
        left = deadline - now
        if left <= 0:
            starved = waited_seconds() > STARVED * watch.order["seconds"]
            watch.verdict = (
                "starved" if starved else "timed out",
                f"more than {watch.order['seconds']:g} s",
            )
            return
        if now >= count_at:
            unused = watch.order["cpu_seconds"] - processor_seconds()
            if unused < 0:
                watch.verdict = _used_up(watch.order)
                return
            count_at = now + max(TICK, unused / cores)
        ended = watch.end
        ready = dict(poll.poll(0 if ended else 1000 * min(left, TICK)))
        if ORDERS in ready:
            kill_descendants(watch.process)
            os._exit(0)
        if output in ready:
            watch.output += _take(poll, output)[: watch.order["output_bytes"] - len(watch.output)]
        if say in ready:
            _listen(watch, _take(poll, say))
        elif ended:  # its last word, if there was one, has been heard
            watch.verdict = ended if watch.ready else ("refused", f"start: {ended[1]}")
        _reap(watch)


def _take(poll: select.poll, descriptor: int) -> bytes:
    try:
        data = os.read(descriptor, CHUNK)
    except BlockingIOError:  # the program was faster
        return b""
    if not data:
        poll.unregister(descriptor)
    return data


def _say(watch: Watch, word: bytes) -> None:
    try:
        os.write(watch.answer, word)
    except OSError:  # the program has closed or filled the pipe: so it does not hear
        return


def _sign_of_end(process: int) -> list[int]:
    """A descriptor that becomes readable when the process ends, where there is such a thing;
    elsewhere ticks must do."""
    try:
        return [os.pidfd_open(process)]
    except (AttributeError, OSError):
        return []


def _listen(watch: Watch, data: bytes) -> None:
    """One message of the program's process. Only the key brings the nonce, and only the nonce is
    a pass."""
    if not watch.ready:
        if data[:1] == program.REFUSED:
            watch.verdict = "refused", data[1:].decode()
        elif data:
            watch.ready = True
            _say(watch, program.READY)
    elif not data:
        return
    elif watch.nonce:
        good = data == watch.nonce
        watch.verdict = ("passed", "") if good else ("failed", "a false answer")
    elif data == watch.key:
        watch.nonce = os.urandom(program.WORD)
        _say(watch, watch.nonce)
    elif data[:1] == program.RAISED:
        text = data[1:].decode("utf-8", "replace")
        watch.verdict = ("out of memory" if text == "MemoryError" else "failed"), text
    else:
        watch.verdict = "failed", "a false word"


def _reap(watch: Watch) -> None:
    """Collect processes that have ended, orphans too; the program's own end without a word is a
    failure."""
    while True:
        try:
            process, status, used = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not process:
            return
        if process == watch.process:
            watch.end = _judge_end(status, used, watch.order)


def _judge_end(status: int, used: resource.struct_rusage, order: Order) -> tuple[str, str]:
    code = os.waitstatus_to_exitcode(status)
    cpu = used.ru_utime + used.ru_stime
    if -code == XCPU or (code == -KILL and cpu >= order["cpu_seconds"]):
        return _used_up(order)
    return "failed", ENDED + (f"exit code {code}" if code >= 0 else f"signal {-code}")


def _used_up(order: Order) -> tuple[str, str]:
    return "timed out", f"more than {order['cpu_seconds']} s of processor time"
