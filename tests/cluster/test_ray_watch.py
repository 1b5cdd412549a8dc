"""A job ends with one sentence soon after a Ray process that it needs has died."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest

from bass_cli.cluster.rays import RayWatch
from bass_cli.errors import MachineError


def listening() -> tuple[socket.socket, str]:
    server = socket.create_server(("127.0.0.1", 0))
    return server, f"127.0.0.1:{server.getsockname()[1]}"


def test_a_dead_process_is_named_within_5_s() -> None:
    (one, first), (two, second) = listening(), listening()
    errors: list[str] = []
    with RayWatch("local", errors.append) as watch:
        watch.begin({"control store": first, "node": second})
        time.sleep(1.2)
        watch.check()
        two.close()
        since = time.monotonic()
        while not watch.fault:
            assert time.monotonic() - since < 5
            time.sleep(0.05)
        with pytest.raises(MachineError, match=f"`ray` local: Ray's node at {second} has died"):
            watch.check()
    time.sleep(0.1)
    assert errors == []
    one.close()


@pytest.mark.slow
def test_a_blocked_command_is_ended_with_exit_code_3() -> None:
    code = """
import sys, time
from bass_cli.cluster.rays import RayWatch
with RayWatch("auto", lambda error: print(error, file=sys.stderr, flush=True)) as watch:
    watch.begin({"control store": sys.argv[1]})
    time.sleep(60)
"""
    server, address = listening()
    server.close()
    since = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, address], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert f"control store at {address} has died" in done.stderr
    assert time.monotonic() - since < 30
