"""Programs in processes of their own that find torch imported: forks of one process that has
imported it, which costs two seconds of a processor, and nothing of bass.

For tests of what a command does, says and leaves behind, however it is ended. Not for those of how
a process starts or what it imports; those start one.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
BASS = "from bass_cli.__main__ import main; main()"
STAND_IN = f"import stand_in; stand_in.install(); {BASS}"
_STREAMS: dict[str, dict[str, Any]] = {  # as Python opens them where they are no terminal
    "stdin": {"mode": "r"},
    "stdout": {"mode": "w"},
    "stderr": {"mode": "w", "buffering": 1, "errors": "backslashreplace"},
}
_LARGEST = 2**18  # bytes of a request: a code, arguments and an environment


@functools.cache
def _server() -> socket.socket:
    """The end at which forks are asked for, once in a process of tests, with which they end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    paths = [str(ROOT / "tests" / "support"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            pass_fds=[theirs.fileno()],
        )
    atexit.register(process.wait)
    atexit.register(process.terminate)
    return ours


class Forked:
    """A process that runs `code` with sys.argv[1:] = `arguments`, as subprocess.Popen has it, text
    streams included. A stream is a file, subprocess.PIPE, or None: closed."""

    def __init__(
        self,
        code: str,
        *arguments: str,
        cwd: Path,
        env: dict[str, str] | None = None,
        stdin: IO[str] | int | None = subprocess.DEVNULL,
        stdout: IO[str] | int | None = subprocess.DEVNULL,
        stderr: IO[str] | int | None = subprocess.DEVNULL,
    ):
        self.returncode: int | None = None
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        given, closed = [], []
        for name, stream in zip(_STREAMS, (stdin, stdout, stderr), strict=True):
            if stream is None:
                closed.append(name)
            elif stream == subprocess.PIPE:
                read, write = os.pipe()
                setattr(self, name, open(read))  # noqa: SIM115 - the test's
                given.append(write)
            elif stream == subprocess.DEVNULL:
                given.append(os.open(os.devnull, os.O_RDWR))
            else:
                given.append(os.dup(stream if isinstance(stream, int) else stream.fileno()))
        self._ending, theirs = socket.socketpair()
        request = {
            "code": code,
            "argv": ["-c", *arguments],
            "cwd": str(cwd),
            "env": dict(os.environ if env is None else env),
            "closed": closed,
        }
        with theirs:
            socket.send_fds(_server(), [json.dumps(request).encode()], [theirs.fileno(), *given])
        for number in given:
            os.close(number)
        self.pid = int(self._ending.recv(32))

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, negative for a signal; subprocess.TimeoutExpired if it goes on."""
        if self.returncode is None:
            self._ending.settimeout(timeout)
            try:
                self.returncode = int(self._ending.recv(32))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0) from None
            self._ending.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str | None, str | None]:
        """All that it writes to its pipes until it ends."""
        found: dict[str, str] = {}

        def read(name: str, stream: IO[str]) -> None:
            with stream:
                found[name] = stream.read()

        pipes = {"stdout": self.stdout, "stderr": self.stderr}
        readers = [
            threading.Thread(target=read, args=(name, stream), daemon=True)
            for name, stream in pipes.items()
            if stream is not None
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return found.get("stdout"), found.get("stderr")


def run_forked(
    code: str,
    *arguments: str,
    cwd: Path,
    env: dict[str, str] | None = None,
    stdin: IO[str] | int | None = subprocess.DEVNULL,
    stdout: IO[str] | int | None = subprocess.PIPE,
    stderr: IO[str] | int | None = subprocess.PIPE,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """subprocess.run of a Forked."""
    process = Forked(code, *arguments, cwd=cwd, env=env, stdin=stdin, stdout=stdout, stderr=stderr)
    try:
        output, messages = process.communicate(timeout)
    finally:
        process.send_signal(signal.SIGKILL)
    code_ = process.wait(timeout)
    return subprocess.CompletedProcess(arguments, code_, output or "", messages or "")


def _serve(requests: socket.socket) -> str:
    """Fork for one request after the other; returns in the processes that were asked for, what
    they are to run, and ends this one when no more requests can come."""
    while True:
        text, passed, _, _ = socket.recv_fds(requests, _LARGEST, 4)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not text:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            return _keep(json.loads(text), *passed)
        for number in passed:
            os.close(number)


def _keep(request: dict, ending: int, *streams: int) -> str:
    """Fork once more, say the process's number and, when it ends, how."""
    if child := os.fork():
        for number in streams:
            os.close(number)
        os.write(ending, str(child).encode())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(BrokenPipeError):
            os.write(ending, str(status).encode())
        os._exit(0)
    os.close(ending)
    return _become(request, list(streams))


def _become(request: dict, streams: list[int]) -> str:
    """Be as a process that has just started and is given this."""
    for number, (name, words) in enumerate(_STREAMS.items()):
        if name in request["closed"]:
            setattr(sys, name, None)
            os.close(number)
        else:
            os.dup2(streams[0], number)
            os.close(streams.pop(0))
            setattr(sys, name, open(number, **words, closefd=False))  # noqa: SIM115 - for good
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = request["argv"]
    sys.path[0] = ""
    code: str = request["code"]
    return code


if __name__ == "__main__":
    for name in ("pydantic", "torch", "typer", "yaml"):  # for those that are forked
        importlib.import_module(name)
    gc.freeze()
    # at the top, so that it ends as Python ends
    exec(_serve(socket.socket(fileno=int(sys.argv[1]))), {"__name__": "__main__"})
