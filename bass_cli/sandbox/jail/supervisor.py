"""The warden: a fresh, small interpreter that builds the isolation for one program, watches it, and
reports.

Two processes: the outer one makes the namespaces and waits; the inner one is the first process
of the new process namespace, so that nothing survives it, and the parent of the program's and of
the tests' process. Neither runs a line of the program.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal costs each warden enumerations
import marshal
import os
import resource
import select
import time

from . import checks, namespaces, program
from .descendants import kill_descendants, processor_seconds, waited_seconds
from .libc import PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE, PR_SET_PDEATHSIG, SetupError, prctl

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from .job_spec import JobSpec

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

    def __init__(
        self, order: JobSpec, process: int, key: bytes, answer: int, tests: int | None
    ) -> None:
        self.order, self.process, self.key, self.answer = order, process, key, answer
        self.tests = tests  # the process of the tests, if there are any
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
    order: JobSpec = marshal.loads(_read_part())
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


def _read_part() -> bytes:
    """One part of the order, after its length as 8 bytes."""
    return _read_exactly(int.from_bytes(_read_exactly(8), "little"))


def _read_exactly(count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = os.read(ORDERS, min(count - len(data), 1 << 20))
        if not piece:
            os._exit(1)
        data += piece
    return bytes(data)


def _report(status: str, detail: str, seconds: float, output: bytes) -> None:
    text = detail.encode("utf-8", "replace")
    data = f"{status}\n{seconds:.6f}\n{len(text)}\n".encode() + text + output
    while data:
        data = data[os.write(REPORTS, data) :]


def _guard(order: JobSpec) -> NoReturn:
    """The inner process: isolate, start the program, watch it, kill what is left, report."""
    prctl(PR_SET_PDEATHSIG, KILL)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    if "mount" in order["layers"]:
        namespaces.build_root(order["places"], order["owner"], order["folder_bytes"])
    start = time.monotonic()
    watch, heard, output = _start(order)
    try:
        _watch(watch, heard, output, start + order["seconds"])
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


def _start(order: JobSpec) -> tuple[Watch, tuple[int, ...], int]:
    """Start the program's process and, if there are tests, theirs; also the pipes on which they
    speak to this one, and the one for output.

    The tests are read only when the program's process exists: it must not have them in memory.
    """
    keys = [os.urandom(program.WORD)]
    key = keys[0]
    (said, say), (hear, answer), (printed, output) = os.pipe(), os.pipe(), os.pipe()
    calls: tuple[int, ...] = (*os.pipe(), *os.pipe()) if order["checks"] else ()
    process = os.fork()
    if not process:
        del key
        for unused in (said, answer, printed, *calls[1:3]):
            os.close(unused)
        _become_child(output)
        try:
            program.enter(order, say, hear, keys, (calls[0], calls[3]) if calls else None)
        finally:  # only a fault of ours comes here, and it must not run on as a second warden
            os._exit(1)
    tests: int | None = None
    heard: tuple[int, ...] = (said,)
    found = marshal.loads(_read_part())
    if found is not None:
        tests, ruling = _start_tests(order, found, (calls[2], calls[1]))
        heard += (ruling,)
    for unused in (say, hear, output, *calls):
        os.close(unused)
    for own in (*heard, answer, printed):
        # a program may take from its pipes, or fill them: nothing waits for them
        os.set_blocking(own, False)
    return Watch(order, process, key, answer, tests), heard, printed


def _start_tests(
    order: JobSpec, found: tuple[str, str, tuple[str, ...]], calls: tuple[int, int]
) -> tuple[int, int]:
    """The process of the tests, and the pipe on which it gives the verdict, which the program's
    process has never had."""
    ruling, rule = os.pipe()
    process = os.fork()
    if process:
        os.close(rule)
        return process, ruling
    null = os.open("/dev/null", os.O_WRONLY)
    for unused in range(3, 64):
        if unused not in (null, rule, *calls):
            _close(unused)
    _become_child(null)
    try:
        checks.enter(order, found, rule, calls)
    finally:
        os._exit(1)


def _close(descriptor: int) -> None:
    try:
        os.close(descriptor)
    except OSError:
        return


def _become_child(output: int) -> None:
    """Take the warden's own descriptors from a child: no input, that pipe for output."""
    null = os.open("/dev/null", os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(output)


def _watch(watch: Watch, heard: tuple[int, ...], output: int, deadline: float) -> None:
    """Wait for the first of: the right word, a wrong word, the end of a process, the deadline,
    the supervisor's end. `heard`: the pipes of the program's process and of the tests'."""
    poll = select.poll()
    ends = [end for one in (watch.process, watch.tests) if one for end in _sign_of_end(one)]
    for descriptor in (*heard, output, *ends):
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
        if spoken := [one for one in reversed(heard) if one in ready]:
            for one in spoken:
                if watch.verdict is None:
                    (_listen if one == heard[0] else _rule)(watch, _take(poll, one))
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
    elif watch.tests is not None:
        watch.verdict = "failed", "a false word"
    elif watch.nonce:
        good = data == watch.nonce
        watch.verdict = ("passed", "") if good else ("failed", "a false answer")
    elif data == watch.key:
        watch.nonce = os.urandom(program.WORD)
        _say(watch, watch.nonce)
    elif data[:1] == program.RAISED:
        watch.verdict = _raised(data)
    else:
        watch.verdict = "failed", "a false word"


def _rule(watch: Watch, data: bytes) -> None:
    """The word of the tests' process, which is the verdict."""
    if data[:1] == program.REFUSED:
        watch.verdict = "refused", data[1:].decode()
    elif data:
        watch.verdict = ("passed", "") if data == program.PASSED else _raised(data)


def _raised(data: bytes) -> tuple[str, str]:
    text = data[1:].decode("utf-8", "replace")
    return ("out of memory" if text == "MemoryError" else "failed"), text


def _reap(watch: Watch) -> None:
    """Collect processes that have ended, orphans too; the end of the program's process, or of the
    tests', without a word is a failure."""
    while True:
        try:
            process, status, used = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not process:
            return
        if process in (watch.process, watch.tests) and not watch.end:
            watch.end = _judge_end(status, used, watch.order)


def _judge_end(status: int, used: resource.struct_rusage, order: JobSpec) -> tuple[str, str]:
    code = os.waitstatus_to_exitcode(status)
    cpu = used.ru_utime + used.ru_stime
    if -code == XCPU or (code == -KILL and cpu >= order["cpu_seconds"]):
        return _used_up(order)
    return "failed", ENDED + (f"exit code {code}" if code >= 0 else f"signal {-code}")


def _used_up(order: JobSpec) -> tuple[str, str]:
    return "timed out", f"more than {order['cpu_seconds']} s of processor time"
