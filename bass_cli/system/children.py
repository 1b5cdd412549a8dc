"""Child processes that run a function of this package, and that the system kills when the thread
that started them ends.

Not here: what they are for (cluster/fleet.py, tensor_parallel/leader.py).
"""

from __future__ import annotations

import platform
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import NamedTuple

from bass_cli.errors import MachineError, UserError, failed_import

Child = subprocess.Popen[bytes]
_CODE = (
    "import sys; module, given, *sys.path[:] = sys.argv[1:]; "
    # before heavy modules, whose import takes seconds
    "from bass_cli.system.signals import end_with_parent; end_with_parent(); "
    "from bass_cli.system.threads import collect_seldom; collect_seldom(); "
    "import importlib; importlib.import_module(module).main(int(given))"
)


class Fault(NamedTuple):
    """The error that ends a process.

    Attributes:
        kind: "user" for a UserError, "machine" for a MachineError or a package that cannot be
            imported, "bug" for anything else.
        text: The message, or the traceback of a bug.
        node: The name of the node.
    """

    kind: str
    text: str
    node: str = "a node"

    @classmethod
    def of(cls, error: Exception) -> Fault:
        """Return an error of this process as a Fault."""
        if isinstance(error, UserError):
            kind = "machine" if isinstance(error, MachineError) else "user"
            return cls(kind, str(error), platform.node())
        if (reason := failed_import(error)) is not None:
            return cls("machine", reason, platform.node())
        return cls("bug", "".join(traceback.format_exception(error)), platform.node())

    def error(self) -> Exception:
        """Return the error for the driver to raise, with the name of the node."""
        kinds = {"user": UserError, "machine": MachineError}
        return kinds.get(self.kind, RuntimeError)(f"on {self.node}: {self.text}")


def start_child(
    module: str,
    descriptor: int,
    listen: Callable[[Child], None],
    *,
    environment: Mapping[str, str],
    merged: bool = False,
) -> Child:
    """Start a child that calls `main(descriptor)` of a module, in a thread that then calls
    `listen`.

    The same thread must do both, because the child ends with the thread (signals.end_with_parent).
    Standard input and output of the child are pipes. Ctrl-C does not reach it.

    Args:
        descriptor: A file descriptor that the child inherits, if it is above 2.
        merged: Whether the child's standard error goes to its standard output.
    """
    started: Future[Child] = Future()

    def run() -> None:
        try:
            child = subprocess.Popen(
                [sys.executable, "-c", _CODE, module, str(descriptor), *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if merged else None,
                pass_fds=(descriptor,) if descriptor > 2 else (),
                env=environment,
                start_new_session=True,
            )
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(child)
        listen(child)

    threading.Thread(target=run, daemon=True, name="listening").start()
    return started.result()


def end_of(code: int) -> str:
    """Describe how a process ended."""
    if code >= 0:
        return f"it ended with exit code {code}"
    names = {int(one): one.name for one in signal.Signals}
    return f"it was killed by {names.get(-code, f'signal {-code}')}"
