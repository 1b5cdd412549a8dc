"""Programs that attack the sandbox. Each raises an exception unless its attack works.

So "passed" means a breach. `main` runs them in its own sandbox, for tests as another user.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from pathlib import Path

from bass_cli.sandbox import process as launcher
from bass_cli.sandbox.programs import Limits, Program, Sandbox

# The seconds for which a process sleeps that must not outlive its program. The same text is in the
# command lines of supervisors, so that a test finds only processes that it has started. `main`
# receives it in an environment variable.
MARK_VARIABLE = "BASS_TEST_MARK"
MARK = os.environ.get(MARK_VARIABLE) or f"31337.{secrets.randbelow(10**9):09}"
launcher.START = (*launcher.START[:-1], f"{launcher.START[-1]}  # {MARK}")
SECRET = "TEST_SECRET"
REACHES_PROCESSES = ("kills", "traces", "limits", "owns", "slows", "moves")
LIMITS = Limits(seconds=2.5, cpu_seconds=1, memory_bytes=256 << 20)
WORKERS = 6  # most attacks that take long sleep
ANY = {"failed", "timed out", "out of memory"}

SLEEPER = f"""
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv("/bin/sleep", ["sleep", "{MARK}"])
    os._exit(0)
"""
EVERY_SIGNAL = """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, lambda *_: None)
    except (OSError, ValueError):
        pass
"""
FORGERY = """
import os
for fd in range(3, 64):
    for word in (b"+", b"=", b"passed"):
        try:
            os.write(fd, word)
        except OSError:
            pass
os._exit(0)
"""
PATCHES = """
import builtins, os, sys
for name in ("exec", "compile", "print", "isinstance", "type", "AssertionError", "BaseException", "len"):
    setattr(builtins, name, lambda *_, **__: True)
os.write = os.read = os._exit = os.getpid = sys.exit = lambda *_: b""
assert 1 == 2
"""
LOCKED = """
import os
os.mkdir("a", 0o300)
os.makedirs("a/b/c")
os.chmod("a/b", 0)
os.chmod(".", 0)
assert 0
"""
EVERYBODY = """
import os, resource
hit = 0
for pid in [*range(1, os.getpid() + 100), {supervisor}]:
    try:
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
        hit += pid != os.getpid()
    except OSError:
        pass
assert hit
"""
OWNER = """
import fcntl, os, struct
ends = os.pipe()
fcntl.fcntl(ends[0], {0})
"""
# Takes from the pipes on which it speaks itself, so that who looks into them finds nothing or
# waits; fills the other.
THEFT = """
import os
for fd in range(3, 20):
    for way in (os.O_RDONLY, os.O_WRONLY):
        try:
            twin = os.open(f"/proc/self/fd/{fd}", way | os.O_NONBLOCK)
            while way == os.O_WRONLY and os.write(twin, bytes(4096)):
                pass
            os.read(twin, 4096)
        except OSError:
            pass
"""
FLOOD = """
import os
taken = os.open("/proc/self/fd/1", os.O_RDONLY)
for number in range(15):
    if os.fork() == 0:
        while True:
            os.write(1, b"x" * 65536) if number % 4 else os.read(taken, 1)
"""
CALL = "import ctypes\nlibc = ctypes.CDLL(None)\n"
# Every kind of shared memory, queue and semaphore that outlives the process that made it; passes
# if one could be made.
LASTING = (
    CALL
    + """
made = {{
    "shm": libc.shmget({key}, 4096, 0o1666), "sem": libc.semget({key}, 1, 0o1666), "msg": libc.msgget({key}, 0o1666),
    "mqueue": libc.mq_open(b"/bass-{key}", 0o102, 0o666, None),
}}
assert max(made.values()) >= 0, made
"""
)

PROGRAMS: dict[str, tuple[str, set[str]]] = {
    "endless loop": ("while True: pass", {"timed out"}),
    "endless sleep": ("import time\ntime.sleep(1000)", {"timed out"}),
    "stops itself": ("import os\nos.kill(os.getpid(), 19)", {"timed out", "failed"}),
    "fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", ANY),
    "thread bomb": ("import threading, time\nwhile True: threading.Thread(target=time.sleep, "
                    "args=(99,)).start()", ANY),
    "memory bomb": ("x = []\nwhile True: x.append(bytearray(1 << "
                    "24))", {"out of memory", "timed out"}),
    "one large block": ("x = bytearray(1 << 40)", {"out of memory"}),
    "many small objects": ("x = []\nwhile True: x.append([x])", {"out of memory", "timed out"}),
    "1 GB of output": ("for _ in range(1024): print('x' * (1 << 20))\nassert "
                       "0", {"failed", "timed out"}),
    "large file": ("with open('x', 'wb') as f:\n    while True: f.write(bytes(1 << "
                   "20))", {"failed"}),
    "writes outside": ("open('{outside}/new', 'w').write('x')", {"failed"}),
    "deletes outside": ("import os\nos.remove('{outside}/precious')", {"failed"}),
    "changes outside": ("import os\nos.chmod('{outside}/precious', 0o777)", {"failed"}),
    "empties outside": ("open('{outside}/precious', 'w').write('')", {"failed"}),
    "kills its parent": ("import os\nos.kill(os.getppid(), 9)", {"failed"}),
    "kills the supervisor": ("import os\nos.kill({supervisor}, 9)", {"failed"}),
    "kills by descriptor": ("import os, signal\n"
                            "signal.pidfd_send_signal(os.pidfd_open({supervisor}), 9)", {"failed"}),
    "kills its parent by descriptor": ("import os, signal, time\n"
                                       "signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 2)\n"
                                       "time.sleep(0.3)", {"failed"}),
    "limits its parent": ("import os, resource, time\nresource.prlimit(os.getppid(), "
                          "resource.RLIMIT_NOFILE, (0, 0))\n"
                          "time.sleep(0.3)", {"failed"}),
    "limits everybody": (EVERYBODY, {"failed"}),
    "owns a pipe for its parent": (OWNER.replace("{0}", "fcntl.F_SETOWN, "
                                                        "os.getppid()"), {"failed"}),
    "owns it in the new way": (OWNER.replace("{0}", "15, struct.pack('ii', 1, "
                                                    "os.getppid())"), {"failed"}),
    "owns a socket for its parent": ("import fcntl, os, socket, struct\nends = "
                                     "socket.socketpair()\n"
                                     "fcntl.ioctl(ends[0], 0x8902, struct.pack('i', "
                                     "os.getppid()))", {"failed"}),
    "slows its parent": ("import os\nos.setpriority(os.PRIO_PROCESS, os.getppid(), "
                         "19)", {"failed"}),
    "slows its user": ("import os\nos.setpriority(os.PRIO_USER, 0, 19)", {"failed"}),
    "slows its parent by a policy": ("import os\nos.sched_setscheduler(os.getppid(), "
                                     "os.SCHED_IDLE, os.sched_param(0))",
                                     {"failed"}),
    "moves its parent": ("import os\nos.sched_setaffinity(os.getppid(), "
                         "os.sched_getaffinity(0))", {"failed"}),
    "kills everybody": ("import os\nos.kill(-1, 9)", {"failed"}),
    "kills its group": ("import os\nos.kill(0, 9)", {"failed"}),
    "connects": ("import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)", {"failed"}),
    "sends a datagram": ("import socket\ns = socket.socket(2, 2)\ns.sendto(b'x', ('127.0.0.1', "
                         "{port}))", {"failed"}),
    "local socket": ("import socket\ns = socket.socket(1)\n"
                     "s.connect('{outside}/socket')", {"failed"}),
    "reads variables": (f"import os\nassert '{SECRET}' in os.environ", {"failed"}),
    "reads the supervisor's": (f"assert '{SECRET}' in "
                               f"open('/proc/{{supervisor}}/environ').read()", {"failed"}),
    "reads its parent's": (f"import os\nassert '{SECRET}' in open('/proc/%d/environ' % "
                           "os.getppid()).read()", {"failed"}),
    "opens its parent's memory": ("import os\nopen('/proc/%d/mem' % os.getppid(), "
                                  "'rb')", {"failed"}),
    "reads a private file": ("open('{outside}/private').read()", {"failed"}),
    "traces its parent": (CALL + "import os\nassert libc.ptrace(16, os.getppid(), None, None) == "
                                 "0", {"failed"}),
    "new user namespace": (CALL + "assert libc.unshare(0x10000000) == 0", {"failed"}),
    "mounts": (CALL + "assert libc.mount(b'none', b'/', None, 32, None) == 0", {"failed"}),
    "becomes root": ("import os\nos.setuid(0)\nassert os.getuid() == 0 and "
                     "open('/etc/shadow').read()", {"failed"}),
    "deep recursion": ("def f(): f()\nf()", {"failed"}),
    "deeper recursion": ("import sys\nsys.setrecursionlimit(10**9)\ndef f(): [f() for _ in '.']\n"
                         "f()", ANY),
    "leaves early": ("import os\nos._exit(0)", {"failed"}),
    "exits": ("import sys\nsys.exit(0)", {"failed"}),
    "exits at the end": ("import atexit, os\natexit.register(os._exit, 0)\nassert 0", {"failed"}),
    "catches everything": ("while 1:\n    try:\n        while 1: pass\n    except BaseException: "
                           "pass", {"timed out"}),
    "swallows signals": (EVERY_SIGNAL + "while True: pass", {"timed out"}),
    "patches builtins": (PATCHES, {"failed"}),
    "an exception that cannot be shown": ("class E(Exception):\n    def __str__(self): raise "
                                          "self\nraise E()", {"failed"}),
    "an exception that ends": ("import os\nclass E(Exception):\n    def __str__(self): "
                               "os._exit(0)\nraise E()", {"failed"}),
    "floods and ends": (FLOOD + "assert 0", {"failed"}),
    "floods and takes it back": (FLOOD + "os.wait()", {"timed out", "failed"}),
    "floods an error": ("raise Exception('x' * (1 << 25))", {"failed"}),
    "takes from its pipes": (THEFT + "os._exit(0)", {"failed"}),
    "takes from its pipes and says "
    "refused": (THEFT + FORGERY.replace('b"+"', 'b"#pid: no"'), {"failed"}),
    "writes to every pipe": (FORGERY, {"failed"}),
    "ends in a fork": ("import os\nif os.fork():\n    os.wait()\n    assert 0", {"failed"}),
    "closes everything": ("import os\nos.closerange(0, 1024)", {"failed"}),
    "a null byte": ("x = 1\0", {"failed"}),
    "half a character": ("x = '\udcff'", {"failed"}),
    "parentheses": ("(" * 100_000, ANY),
    "background child": (SLEEPER + "assert 0", {"failed"}),
    "becomes another": (f"import os\nos.execv('/bin/sleep', ['sleep', '{MARK}'])", {"failed"}),
    "locked folders": (LOCKED, {"failed"}),
}  # fmt: skip


def attacks(outside: Path, port: int, supervisor: int) -> list[tuple[str, Program]]:
    """The programs, aimed at a folder, a port of this machine and a process."""
    aims = {"{outside}": str(outside), "{port}": str(port), "{supervisor}": str(supervisor)}
    found = []
    for name, (text, _) in PROGRAMS.items():
        aimed = text
        for mark, aim in aims.items():
            aimed = aimed.replace(mark, aim)
        found.append((name, Program(aimed)))
    return found


def at_once(name: str) -> bool:
    """Return whether this attack must fail at once. The others run into limits of time or memory,
    which are the same for all users and layers."""
    return PROGRAMS[name][1] == {"failed"}


def supervise(layers: list[str], outside: Path, port: int, extent: str) -> dict[str, object]:
    """Run attacks as this user, with these layers, and say how it went. extent: "all", or
    "quick" for those that must fail at once."""
    with Sandbox(workers=WORKERS, limits=LIMITS, layers=layers) as sandbox:
        aimed = attacks(outside, port, os.getpid())
        aimed = [one for one in aimed if extent == "all" or at_once(one[0])]
        if (
            sandbox.isolation.processes == "none"
        ):  # these would hit: the processes of this user are not kept out
            aimed = [
                (name, program) for name, program in aimed if not name.startswith(REACHES_PROCESSES)
            ]
        verdicts = dict(sandbox.run(aimed))
        named = {name: (verdict.status, verdict.detail) for name, verdict in verdicts.items()}
        return {
            "verdicts": named,
            "layers": sandbox.layers,
            "isolation": sandbox.isolation,
            "user": os.getuid(),
        }


def main() -> None:
    """`supervise` with the command line's layers (with commas between), folder, port and extent;
    prints JSON."""
    layers, outside, port, extent = sys.argv[1:]
    print(json.dumps(supervise(layers.split(","), Path(outside), int(port), extent)))
