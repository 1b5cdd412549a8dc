"""A command whose target is split, and in the middle of which somebody is killed. No tests."""

import subprocess
import sys
from pathlib import Path

# Ends somebody when the leader has told the others of so many calls of a kind.
_CODE = """
import os, sys
from bass_cli.__main__ import main
from bass_cli.model.leader import Followers
tell, calls = Followers.tell, 0
def counted(self, *message):
    global calls
    tell(self, *message)
    calls += message[1:2] == ({call!r},)
    if calls == 30:
        calls += 1
        follower = self._processes[1].pid
        print("follower", follower, file=sys.stderr, flush=True)
        os.kill({whom}, 9)
Followers.tell = counted
main()
"""


def kill_in_two_parts(
    whom: str, *options: str, call: str, out: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """`bass generate p.txt` over two processes; `whom`, an expression for a process id
    ("follower", "os.getpid()"), is killed at the thirtieth `call` that the follower is told."""
    code = _CODE.format(call=call, whom=whom)
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
