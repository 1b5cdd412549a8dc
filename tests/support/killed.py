"""A command whose target is split, and in the middle of which one of its processes is killed or
stopped. No tests."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# Acts when the leader has told the others of so many calls of a kind.
_CODE = """
import os, signal, sys, threading, time
from bass_cli.__main__ import main
from bass_cli.tensor_parallel.leader import Followers
tell, calls = Followers.tell, 0
def counted(self, *message):
    global calls
    tell(self, *message)
    calls += (message[1:2] or message)[0] == {call!r}
    if calls == {count}:
        calls += 1
        follower = self._processes[1].pid
        print("follower", follower, file=sys.stderr, flush=True)
        {action}
Followers.tell = counted
main()
"""


# Stops the follower; then sends the leader signals, and shows when.
_STOP = """os.kill(follower, signal.SIGSTOP)
        def send():
            time.sleep({pause})
            print("signalled", time.monotonic(), file=sys.stderr, flush=True)
            for number in {numbers}:
                os.kill({whom}, number)
                time.sleep(0.2)
        threading.Thread(target=send, daemon=True).start()"""


def kill_in_two_parts(
    whom: str, *options: str, call: str, out: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """`bass generate p.txt` over two processes; `whom`, an expression for a process id
    ("follower", "os.getpid()"), is killed at the thirtieth `call` that the follower is told."""
    code = _CODE.format(call=call, count=30, action=f"os.kill({whom}, 9)")
    return _run(code, *options, out=out, timeout=timeout)


def stop_in_two_parts(
    *options: str,
    numbers: Sequence[int],
    whom: str = "os.getpid()",
    call: str = "forward",
    count: int = 30,
    out: Path,
    timeout: float = 60.0,
) -> tuple[subprocess.CompletedProcess[str], float]:
    """The same, but the follower is stopped at a `call`, and `whom` is then sent signals. Also
    returns the seconds from the first signal to the end of the command."""
    action = _STOP.format(pause=0.7, numbers=list(map(int, numbers)), whom=whom)
    ended = _run(
        _CODE.format(call=call, count=count, action=action), *options, out=out, timeout=timeout
    )
    (since,) = (line for line in ended.stderr.splitlines() if line.startswith("signalled"))
    return ended, time.monotonic() - float(since.split()[1])


def follower_of(ended: subprocess.CompletedProcess[str]) -> int:
    """The process id of its follower."""
    (line,) = (line for line in ended.stderr.splitlines() if line.startswith("follower"))
    return int(line.split()[1])


def is_alive(process: int) -> bool:
    """Whether it has not ended. A zombie has: its parent has not read its exit code."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def _run(code: str, *options: str, out: Path, timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-c", code, "generate", "p.txt", *options),
            *("--tensor-parallel", "2", "--out", str(out)),
        ],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
