"""The sandbox against hostile programs, as root and as another user, with all or some layers."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile import (
    LASTING,
    LIMITS,
    MARK,
    MARK_VARIABLE,
    PROGRAMS,
    REACHES_PROCESSES,
    SECRET,
    WORKERS,
    at_once,
    attacks,
)

from bass_cli.sandbox.isolation import LAYERS, choose_users
from bass_cli.sandbox.programs import Ending, Program, Sandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there are limits only")
TESTS = Path(__file__).parents[1]
OUTSIDE = ("writes outside", "deletes outside", "empties outside")
NETWORK = ("connects", "sends a datagram", "local socket")
EVERYTHING, NAMESPACES = ",".join(LAYERS), "user,pid,mount,network,ipc"


class Target:
    """The targets: a world-writable folder, and a port and a socket that count connections."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.chmod(0o777)
        (folder / "private").touch(0o600)
        self.stream, self.datagram, self.local = (
            socket.socket(),
            socket.socket(type=socket.SOCK_DGRAM),
            socket.socket(1),
        )
        self.stream.bind(("127.0.0.1", 0))
        self.port = self.stream.getsockname()[1]
        self.datagram.bind(("127.0.0.1", self.port))
        self.local.bind(str(folder / "socket"))
        (folder / "socket").chmod(0o777)
        for listening in (self.stream, self.local):
            listening.listen()
        self.restore()

    def restore(self) -> None:
        self.visits()
        for name in ("precious", "new"):
            (self.folder / name).unlink(missing_ok=True)
        (self.folder / "precious").write_text("precious")
        (self.folder / "precious").chmod(0o666)

    def harm(self) -> list[str]:
        """Return what has happened to the targets."""
        found = [
            f"a new file {path.name}" for path in self.folder.iterdir() if path.name not in OURS
        ]
        precious = self.folder / "precious"
        if (
            not precious.exists()
            or precious.read_text() != "precious"
            or precious.stat().st_mode & 0o777 != 0o666
        ):
            found.append("the file has changed")
        return found + self.visits()

    def visits(self) -> list[str]:
        """Return the connections since the last call."""
        found = []
        for name in ("stream", "datagram", "local"):
            listening = getattr(self, name)
            listening.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    _ = listening.recv(1) if name == "datagram" else listening.accept()[0].close()
                    found.append(f"a visitor at {name}")
        return found

    def close(self) -> None:
        for one in (self.stream, self.datagram, self.local):
            one.close()


OURS = {"precious", "private", "socket"}


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        (inner := Path(folder) / "outside").mkdir()
        made = Target(inner)
        yield made
        made.close()


def survivors() -> list[str]:
    """Return processes that this test has left behind: supervisors, programs and sleepers."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (
                (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
            if f"# {MARK}" in command or f"sleep {MARK}" in command:
                found.append(f"{process.name}: {command}")
    return found


def leftovers(folders: Path) -> list[Path]:
    return list(folders.glob("bass-*"))


@pytest.fixture(scope="module")
def verdicts(target: Target, sandbox_folders: Path) -> dict[str, Ending]:
    """Verdicts on all attacks, as this user with all layers."""
    os.environ[SECRET] = "x"
    with Sandbox(workers=WORKERS, limits=LIMITS) as sandbox:
        if sandbox.isolation.warnings():
            pytest.skip(" ".join(sandbox.isolation.warnings()))
        return dict(sandbox.run(attacks(target.folder, target.port, os.getpid())))


@pytest.mark.parametrize("name", PROGRAMS)
def test_attacks_fail(verdicts: dict[str, Ending], name: str) -> None:
    assert verdicts[name].status in PROGRAMS[name][1], verdicts[name]
    assert not verdicts[name].passed
    assert verdicts[name].detail


def test_attacks_leave_nothing_behind(
    verdicts: dict[str, Ending], target: Target, sandbox_folders: Path
) -> None:
    assert len(verdicts) == len(PROGRAMS)
    assert target.harm() == []
    assert survivors() == []
    assert leftovers(sandbox_folders) == []


def test_output_is_kept_up_to_its_limit(verdicts: dict[str, Ending]) -> None:
    assert verdicts["1 GB of output"].output == "x" * LIMITS.output_bytes
    text = "import sys\nprint('out')\nprint('err', file=sys.stderr, flush=True)\n1 / 0"
    with Sandbox(workers=1) as sandbox:
        ((_, verdict),) = sandbox.run([("", Program(text))])
    assert sorted(verdict.output.split()) == ["err", "out"]
    assert verdict.detail == "line 4: ZeroDivisionError: division by zero"


def as_user(user: int) -> dict[str, Any]:
    environment = {
        SECRET: "x",
        "PYTHONDONTWRITEBYTECODE": "1",
        MARK_VARIABLE: MARK,
        "TMPDIR": tempfile.gettempdir(),
    }
    return {"user": user, "group": user, "extra_groups": [], "cwd": "/", "env": environment}


def other_interpreter(user: int) -> list[str]:
    """Return a command that starts Python as another user with this one's packages, or skip."""
    if os.geteuid():
        pytest.skip("only root can try other users")
    packages = [path for path in sys.path if path.endswith("site-packages")]
    ours = [str(TESTS / "support"), str(TESTS.parent)]
    start = f"import sys; sys.path[:1] = {ours}; sys.path += {packages}; import hostile"
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info[1]}"):
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            subprocess.run([python, "-c", start], check=True, capture_output=True, **as_user(user))
            return [python, "-c", f"{start}; hostile.main()"]
    pytest.skip("no Python that another user may run")


def attack_as(user: int, layers: str, target: Target, extent: str) -> dict[str, tuple[str, str]]:
    """Return statuses and details of attacks when bass runs as another user."""
    command = [*other_interpreter(user), layers, str(target.folder), str(target.port), extent]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, **as_user(user))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert set(answer["layers"]) <= set(layers.split(","))
    if missing := set(layers.split(",")) - {*answer["layers"], "uid", ""}:
        pytest.skip(f"this system refuses another user {', '.join(sorted(missing))}")
    return answer["verdicts"]


OWN_WARDEN = {name for name in PROGRAMS if name.startswith(("limits", "owns", "slows", "moves"))}
# Attacks that each set of layers may let through. All others must fail.
WEAK = {
    EVERYTHING: set(),
    "landlock,seccomp": set(),
    # These two reach nothing. The others reach only this program's own supervisor.
    NAMESPACES: {"kills its parent", "new user namespace", *OWN_WARDEN},
    # Another attack may have created the file, and programs may change their own files.
    "": {*OUTSIDE, "changes outside", *NETWORK, "reads the supervisor's", "new user namespace"},
}


@pytest.mark.parametrize(
    ("layers", "extent"),
    [
        ("landlock,seccomp", "quick"),
        *(pytest.param(one, "all", marks=pytest.mark.slow) for one in WEAK),
    ],
)
def test_attacks_fail_for_another_user_with_the_available_layers(
    target: Target, sandbox_folders: Path, layers: str, extent: str
) -> None:
    target.restore()
    verdicts = attack_as(choose_users(1)[0], layers, target, extent)
    breaches = {name for name, (status, _) in verdicts.items() if status not in PROGRAMS[name][1]}
    assert breaches <= WEAK[layers]
    assert set(verdicts) == {
        name
        for name in PROGRAMS
        if (layers or not name.startswith(REACHES_PROCESSES)) and (extent == "all" or at_once(name))
    }
    assert survivors() == []
    assert leftovers(sandbox_folders) == []
    if not WEAK[layers] & set(OUTSIDE):
        assert target.harm() == []
    target.restore()


@pytest.mark.parametrize("layers", ["pid,mount,ipc", "landlock,seccomp", EVERYTHING])
def test_shared_memory_and_queues_end_with_the_program(layers: str) -> None:
    key = secrets.randbelow(1 << 31)
    with Sandbox(workers=1, layers=layers.split(",")) as sandbox:
        if missing := set(layers.split(",")) - {*sandbox.layers, "user"}:
            pytest.skip(f"this system refuses {', '.join(sorted(missing))}")
        ((_, verdict),) = sandbox.run([("", Program(LASTING.format(key=key)))])
    tables = {kind: Path(f"/proc/sysvipc/{kind}").read_text() for kind in ("shm", "sem", "msg")}
    left = {
        kind
        for kind, table in tables.items()
        for line in table.splitlines()
        if line.split()[0] == str(key)
    }
    if ctypes.CDLL(None).mq_unlink(b"/bass-%d" % key) == 0:
        left.add("mqueue")
    assert left == set()
    assert verdict.passed != ("seccomp" in layers), (
        verdict
    )  # allowed only in a namespace of its own


@pytest.mark.parametrize("given", [signal.SIG_IGN, signal.default_int_handler])
def test_verdicts_are_the_same_in_a_background_job(given: Any) -> None:
    """A shell starts background jobs with Ctrl-C ignored."""
    programs = [
        ("own", "import signal\nassert signal.getsignal(2) is signal.default_int_handler"),
        ("parent's", PROGRAMS["kills its parent by descriptor"][0]),
    ]
    before = signal.signal(signal.SIGINT, given)
    try:
        with Sandbox(workers=1, layers=NAMESPACES.split(",")) as sandbox:
            if "pid" not in sandbox.layers:
                pytest.skip("this system refuses pid")
            statuses = {
                key: verdict.status
                for key, verdict in sandbox.run((key, Program(text)) for key, text in programs)
            }
    finally:
        signal.signal(signal.SIGINT, before)
    assert statuses == {"own": "passed", "parent's": "failed"}
