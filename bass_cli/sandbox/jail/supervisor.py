"""The supervisor of one program: a small, fresh interpreter that isolates, watches and reports.

It has two processes. The outer one makes the namespaces and waits. The inner one is the first
process of the new process namespace, so that all other processes end with it. It is the parent of
the program's process and the tests' process. Neither supervisor process runs program code.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` would build enumerations
import marshal
import os
import resource
import select
import time

from . import program
from .descendants import kill_descendants, processor_seconds, waited_seconds
from .layers import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    SetupError,
    build_root,
    enter_namespaces,
    prctl,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from . import Checks, JobSpec

# bass closes standard input to cancel the program.
INLET, OUTLET = (0, 1)
CHUNK, TICK = 65536, 0.05
# A program that waited for a processor for more than this share of its time limit is "starved":
# it may have timed out because of other programs.
STARVED = 0.05
KILL, XCPU = 9, 24
LOST = "the process that watches the program has failed"
ENDED = "the process ended before the program did: "


class Watch:
    """State of a running program.

    Attributes:
        tests: the tests' process. None if there are no tests.
        ready: the program's process has reported READY.
        end: (status, detail) if a process has ended without a report.
        verdict: (status, detail). None until it is known.
    """

    def __init__(
        self, spec: JobSpec, process: int, key: bytes, answer: int, tests: int | None
    ) -> None:
        self.spec, self.process, self.key, self.answer = spec, process, key, answer
        self.tests = tests
        self.nonce = self.output = b""
        self.ready = False
        self.end: tuple[str, str] | None = None
        self.verdict: tuple[str, str] | None = None


def main() -> NoReturn:
    """Read one spec from standard input, run it, write a report to standard output and exit."""
    # A shell starts background jobs with SIGINT ignored, and children inherit that. Verdicts must
    # not depend on it.
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    try:
        _serve()
    except SetupError as error:
        _report("refused", f"{error.layer}: {error.reason}", 0.0, b"")
    # A fault of bass or of the system, in either process. It must not count against the program.
    except BaseException as error:
        _report("refused", f"supervisor: {type(error).__name__}: {error}", 0.0, b"")
    os._exit(1)


def _serve() -> NoReturn:
    spec: JobSpec = marshal.loads(_read_part())
    _prefer_oom_kill()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    enter_namespaces(spec["layers"])
    # Processes of the same user cannot read this one's memory, descriptors and environment.
    prctl(PR_SET_DUMPABLE, 0)
    inner = os.fork()
    if not inner:
        _guard(spec)
    os.close(OUTLET)
    os.waitpid(inner, 0)
    kill_descendants()
    os._exit(0)


def _prefer_oom_kill() -> None:
    """Have the kernel kill the program, not the process that holds a model, if memory runs out."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        return


def _read_part() -> bytes:
    """Read one part of the spec, which follows its length as 8 bytes."""
    return _read_exactly(int.from_bytes(_read_exactly(8), "little"))


def _read_exactly(count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = os.read(INLET, min(count - len(data), 1 << 20))
        if not piece:
            os._exit(1)
        data += piece
    return bytes(data)


def _report(status: str, detail: str, seconds: float, output: bytes) -> None:
    text = detail.encode("utf-8", "replace")
    data = f"{status}\n{seconds:.6f}\n{len(text)}\n".encode() + text + output
    while data:
        data = data[os.write(OUTLET, data) :]


def _guard(spec: JobSpec) -> NoReturn:
    """Run the inner process: isolate and start the program, watch it, kill it and report."""
    prctl(PR_SET_PDEATHSIG, KILL)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    if "mount" in spec["layers"]:
        build_root(spec["places"], spec["owner"], spec["folder_bytes"])
    start = time.monotonic()
    watch, heard, output = _start(spec)
    try:
        _watch(watch, heard, output, start + spec["seconds"])
        seconds = time.monotonic() - start
        kill_descendants(watch.process)
        _report(*(watch.verdict or ("failed", "")), seconds, watch.output)
    except BaseException as error:
        if not watch.ready:
            raise
        # The program may have caused this. The outer process kills what is left, because this one
        # may be unable to.
        _report("lost", f"{LOST}: {type(error).__name__}: {error}", 0.0, b"")
    os._exit(0)


def _start(spec: JobSpec) -> tuple[Watch, tuple[int, ...], int]:
    """Start the program's process and, if there are tests, the tests' process.

    The tests are read only after the program's process exists, so that it has no copy of them.

    Returns:
        The state, the descriptors of the pipes on which the processes report, and the descriptor
        of the pipe with the program's output.
    """
    keys = [os.urandom(program.WORD)]
    key = keys[0]
    (said, say), (hear, answer), (printed, output) = os.pipe(), os.pipe(), os.pipe()
    calls: tuple[int, ...] = (*os.pipe(), *os.pipe()) if spec["checked"] else ()
    process = os.fork()
    if not process:
        del key
        for unused in (said, answer, printed, *calls[1:3]):
            os.close(unused)
        _become_child(output)
        try:
            program.enter_program(spec, say, hear, keys, (calls[0], calls[3]) if calls else None)
        finally:  # reached only by a fault of bass; the child must not continue as a supervisor
            os._exit(1)
    tests: int | None = None
    heard: tuple[int, ...] = (said,)
    checks: Checks | None = marshal.loads(_read_part())
    if checks is not None:
        tests, ruling = _start_tests(spec, checks, (calls[2], calls[1]))
        heard += (ruling,)
    for unused in (say, hear, output, *calls):
        os.close(unused)
    for own in (*heard, answer, printed):
        # The program may fill its pipes or read from them, so no access may block.
        os.set_blocking(own, False)
    return Watch(spec, process, key, answer, tests), heard, printed


def _start_tests(spec: JobSpec, checks: Checks, calls: tuple[int, int]) -> tuple[int, int]:
    """Start the tests' process. Returns it and the pipe on which it sends the verdict.

    The program's process never has that pipe, because it was forked before.
    """
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
        program.enter_tests(spec, checks, rule, calls)
    finally:
        os._exit(1)


def _close(descriptor: int) -> None:
    try:
        os.close(descriptor)
    except OSError:
        return


def _become_child(output: int) -> None:
    """Replace the supervisor's descriptors in a child: empty input, output to that pipe."""
    null = os.open("/dev/null", os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(output)


def _watch(watch: Watch, heard: tuple[int, ...], output: int, deadline: float) -> None:
    """Wait until there is a verdict.

    That is at the first report, at the end of a process, when a limit is reached, or when bass
    closes the inlet.

    Args:
        watch: the state; its verdict is set here.
        heard: pipes on which the program's process and the tests' process report.
        output: pipe with the program's output.
        deadline: time of `time.monotonic()` at which the program times out.
    """
    poll = select.poll()
    ends = [end for one in (watch.process, watch.tests) if one for end in _end_descriptors(one)]
    for descriptor in (*heard, output, *ends):
        poll.register(descriptor, select.POLLIN)
    poll.register(INLET, 0)
    cores = os.cpu_count() or 1
    # The processor time cannot be used up earlier.
    count_at = deadline - watch.spec["seconds"] + watch.spec["cpu_seconds"] / cores
    while watch.verdict is None:
        now = time.monotonic()
        left = deadline - now
        if left <= 0:
            starved = waited_seconds() > STARVED * watch.spec["seconds"]
            watch.verdict = (
                "starved" if starved else "timed out",
                f"more than {watch.spec['seconds']:g} s",
            )
            return
        if now >= count_at:
            unused = watch.spec["cpu_seconds"] - processor_seconds()
            if unused < 0:
                watch.verdict = _used_up(watch.spec)
                return
            count_at = now + max(TICK, unused / cores)
        ended = watch.end
        ready = dict(poll.poll(0 if ended else 1000 * min(left, TICK)))
        if INLET in ready:
            kill_descendants(watch.process)
            os._exit(0)
        if output in ready:
            watch.output += _take(poll, output)[: watch.spec["output_bytes"] - len(watch.output)]
        if spoken := [one for one in reversed(heard) if one in ready]:
            for one in spoken:
                if watch.verdict is None:
                    (_handle_message if one == heard[0] else _handle_verdict)(
                        watch, _take(poll, one)
                    )
        elif ended:  # and everything that it has written has been read
            watch.verdict = ended if watch.ready else ("refused", f"start: {ended[1]}")
        _reap(watch)


def _take(poll: select.poll, descriptor: int) -> bytes:
    try:
        data = os.read(descriptor, CHUNK)
    except BlockingIOError:  # the program has read it
        return b""
    if not data:
        poll.unregister(descriptor)
    return data


def _send(watch: Watch, message: bytes) -> None:
    try:
        os.write(watch.answer, message)
    except OSError:  # the program has closed or filled the pipe
        return


def _end_descriptors(process: int) -> list[int]:
    """Return a descriptor that becomes readable when the process ends.

    Empty if the system has none; then the process is polled every TICK seconds.
    """
    try:
        return [os.pidfd_open(process)]
    except (AttributeError, OSError):
        return []


def _handle_message(watch: Watch, data: bytes) -> None:
    """Handle a message of the program's process.

    Without tests, the key is answered with a nonce, and only the nonce is a pass.
    """
    if not watch.ready:
        if data[:1] == program.REFUSED:
            watch.verdict = "refused", data[1:].decode()
        elif data:
            watch.ready = True
            _send(watch, program.READY)
    elif not data:
        return
    elif watch.tests is not None:
        watch.verdict = "failed", "an invalid message"
    elif watch.nonce:
        good = data == watch.nonce
        watch.verdict = ("passed", "") if good else ("failed", "an invalid message")
    elif data == watch.key:
        watch.nonce = os.urandom(program.WORD)
        _send(watch, watch.nonce)
    elif data[:1] == program.RAISED:
        watch.verdict = _raised(data)
    else:
        watch.verdict = "failed", "an invalid message"


def _handle_verdict(watch: Watch, data: bytes) -> None:
    """Handle the message of the tests' process, which is the verdict."""
    if data[:1] == program.REFUSED:
        watch.verdict = "refused", data[1:].decode()
    elif data:
        watch.verdict = ("passed", "") if data == program.PASSED else _raised(data)


def _raised(data: bytes) -> tuple[str, str]:
    text = data[1:].decode("utf-8", "replace")
    return ("out of memory" if text == "MemoryError" else "failed"), text


def _reap(watch: Watch) -> None:
    """Reap processes that have ended, orphans too.

    The program fails if its process or the tests' process ends without a report.
    """
    while True:
        try:
            process, status, used = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not process:
            return
        if process in (watch.process, watch.tests) and not watch.end:
            watch.end = _judge_end(status, used, watch.spec)


def _judge_end(status: int, used: resource.struct_rusage, spec: JobSpec) -> tuple[str, str]:
    code = os.waitstatus_to_exitcode(status)
    cpu = used.ru_utime + used.ru_stime
    if -code == XCPU or (code == -KILL and cpu >= spec["cpu_seconds"]):
        return _used_up(spec)
    return "failed", ENDED + (f"exit code {code}" if code >= 0 else f"signal {-code}")


def _used_up(spec: JobSpec) -> tuple[str, str]:
    return "timed out", f"more than {spec['cpu_seconds']} s of processor time"
