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
from .values import receive

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from . import Checks, JobSpec

# bass closes standard input to cancel the program.
INLET, OUTLET = (0, 1)
CHUNK, TICK = 65536, 0.05
DESCRIPTORS = 64  # more than a supervisor ever has
# A program that waited for a processor for more than this share of its time limit is "starved":
# it may have timed out because of other programs.
STARVED = 0.05
KILL, XCPU = 9, 24
LOST = "the process that watches the program has failed"
ENDED = "the process ended before the program did: "


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
    spec: JobSpec = marshal.loads(_receive())
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


def _receive() -> bytes:
    """Read one part of what bass sends. Ends this process if bass closes the pipe."""
    return receive(os.read, INLET, lambda: os._exit(1))


def _prefer_oom_kill() -> None:
    """Have the kernel kill the program, not the process that holds a model, if memory runs out."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        return


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
    started = _start(spec)
    try:
        watch = Watch(spec, *started)
        watch.run(start + spec["seconds"])
        seconds = time.monotonic() - start
        kill_descendants(watch.program)
        _report(*(watch.verdict or ("failed", "")), seconds, watch.output)
    except BaseException as error:
        # The program may have caused this. The outer process kills what is left, because this one
        # may be unable to.
        _report("lost", f"{LOST}: {type(error).__name__}: {error}", 0.0, b"")
    os._exit(0)


def _start(spec: JobSpec) -> tuple[int, int, int, int]:
    """Start the program's process and the tests' process, which get ready side by side.

    The tests are read only after the program's process exists, so that it has no copy of them.

    Returns:
        The two processes, and the pipes with the verdict and with the program's output.

    Raises:
        SetupError: The program's process could not get ready, so its text has not run.
    """
    (ready_in, ready_out), (output_in, output_out) = os.pipe(), os.pipe()
    to_tests, to_program = os.pipe(), os.pipe()
    ends = to_program[0], to_tests[1]
    own = _fork(
        output_out, (ready_out, *ends), lambda: program.enter_program(spec, ready_out, ends)
    )
    os.close(ready_out)
    checks: Checks = marshal.loads(_receive())
    verdict_in, verdict_out = os.pipe()
    null = os.open("/dev/null", os.O_WRONLY)
    ends = to_tests[0], to_program[1]
    tests = _fork(
        null, (verdict_out, *ends), lambda: program.enter_tests(spec, checks, verdict_out, ends)
    )
    for unused in (output_out, verdict_out, null, *to_tests, *to_program):
        os.close(unused)
    answer = os.read(ready_in, CHUNK)
    if answer != program.READY:
        layer, _, reason = answer[1:].decode().partition(": ")
        raise SetupError(layer or "start", reason or "the program's process has ended")
    os.close(ready_in)
    return own, tests, verdict_in, output_in


def _fork(output: int, own: tuple[int, ...], run: Callable[[], NoReturn]) -> int:
    """Run a function in a child, which has these descriptors only, and empty input.

    `output` becomes the child's standard output and error.
    """
    process = os.fork()
    if process:
        return process
    try:
        null = os.open("/dev/null", os.O_RDONLY)
        for source, target in ((null, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        first = 3
        for descriptor in (*sorted(own), DESCRIPTORS):
            os.closerange(first, descriptor)
            first = descriptor + 1
        run()
    finally:  # reached only by a fault of bass; the child must not continue as a supervisor
        os._exit(1)


class Watch:
    """Waits for the verdict on a running program.

    Attributes:
        verdict: (status, detail). None until it is known.
        output: the start of what the program printed.

    Args:
        spec: the limits.
        own, tests: the program's process and the tests' process.
        verdict_in: pipe on which the tests' process sends the verdict.
        output_in: pipe with the program's output.
    """

    def __init__(
        self, spec: JobSpec, own: int, tests: int, verdict_in: int, output_in: int
    ) -> None:
        self._spec, self._verdict_in, self._output_in = spec, verdict_in, output_in
        self.program, self._tests = own, tests
        self.output = b""
        self.verdict: tuple[str, str] | None = None
        self._end: tuple[str, str] | None = None  # of a process that ended without a report
        self._poll = select.poll()
        for descriptor in (verdict_in, output_in, *_end_descriptors(own), *_end_descriptors(tests)):
            self._poll.register(descriptor, select.POLLIN)
        self._poll.register(INLET, 0)
        for descriptor in (verdict_in, output_in):
            # The program may fill its pipe or read from it, so no access may block.
            os.set_blocking(descriptor, False)

    def run(self, deadline: float) -> None:
        """Wait until there is a verdict.

        That is at the first report, at the end of a process, when a limit is reached, or when bass
        closes the inlet.

        Args:
            deadline: time of `time.monotonic()` at which the program times out.
        """
        spec, cores = self._spec, os.cpu_count() or 1
        # The processor time cannot be used up earlier.
        count_at = deadline - spec["seconds"] + spec["cpu_seconds"] / cores
        while self.verdict is None:
            now = time.monotonic()
            left = deadline - now
            if left <= 0:
                starved = waited_seconds() > STARVED * spec["seconds"]
                status = "starved" if starved else "timed out"
                self.verdict = status, f"more than {spec['seconds']:g} s"
                return
            if now >= count_at:
                unused = spec["cpu_seconds"] - processor_seconds()
                if unused < 0:
                    self.verdict = _used_up(spec)
                    return
                count_at = now + max(TICK, unused / cores)
            self._listen(min(left, TICK))
            self._reap()

    def _listen(self, seconds: float) -> None:
        """Wait for a report, output or an end, and handle it."""
        ended = self._end
        ready = dict(self._poll.poll(0 if ended else 1000 * seconds))
        if INLET in ready:
            kill_descendants(self.program)
            os._exit(0)
        if self._output_in in ready:
            room = self._spec["output_bytes"] - len(self.output)
            self.output += self._take(self._output_in)[:room]
        if self._verdict_in in ready:
            data = self._take(self._verdict_in)
            text = data[1:].decode("utf-8", "replace")
            if data[:1] == program.REFUSED:
                self.verdict = "refused", text
            elif data[:1] == program.UNUSABLE:
                self.verdict = "unusable", text
            elif data[:1] == program.OVERDUE:
                limit, _, text = text.partition("\n")
                starved = waited_seconds() > STARVED * float(limit)
                self.verdict = "starved" if starved else "timed out", text
            elif data == program.PASSED:
                self.verdict = "passed", ""
            elif data:
                self.verdict = "out of memory" if text == "MemoryError" else "failed", text
        elif ended:  # and everything that it has written has been read
            self.verdict = ended

    def _take(self, descriptor: int) -> bytes:
        try:
            data = os.read(descriptor, CHUNK)
        except BlockingIOError:  # the program has read it
            return b""
        if not data:
            self._poll.unregister(descriptor)
        return data

    def _reap(self) -> None:
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
            if process in (self.program, self._tests) and not self._end:
                self._end = _judge_end(status, used, self._spec)


def _end_descriptors(process: int) -> list[int]:
    """Return a descriptor that becomes readable when the process ends.

    Empty if the system has none; then the process is polled every TICK seconds.
    """
    try:
        return [os.pidfd_open(process)]
    except (AttributeError, OSError):
        return []


def _judge_end(status: int, used: resource.struct_rusage, spec: JobSpec) -> tuple[str, str]:
    code = os.waitstatus_to_exitcode(status)
    cpu = used.ru_utime + used.ru_stime
    if -code == XCPU or (code == -KILL and cpu >= spec["cpu_seconds"]):
        return _used_up(spec)
    return "failed", ENDED + (f"exit code {code}" if code >= 0 else f"signal {-code}")


def _used_up(spec: JobSpec) -> tuple[str, str]:
    return "timed out", f"more than {spec['cpu_seconds']} s of processor time"
