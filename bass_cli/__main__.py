"""The console script, and `python -m bass_cli`.

Signal handlers and closed streams are set up before the slow imports.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn

from bass_cli.errors import failed_import, spelled
from bass_cli.system import signals, threads
from bass_cli.system.host import is_refused_memory

# A standard stream that was closed (`>&-`) is opened in the wrong direction. So no other file gets
# its number, and reading or writing fails.
_CLOSED = (("stdin", "r", os.O_WRONLY), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_WRONLY))


def main() -> None:
    """Run the command line and end the process."""
    signals.at_start()
    threads.collect_seldom()
    threads.sample_cpus()
    _open_closed_streams()
    try:
        from bass_cli.cli import commands

        commands.main()
    except SystemExit as end:
        _leave(end.code if isinstance(end.code, int) else 0 if end.code is None else 1)
    except Exception as error:
        reason = failed_import(error)
        if is_refused_memory(error):
            reason = f"there is not enough memory to start ({error})"
        if reason is None:
            raise
        print(f"bass: error: {spelled(reason)}", file=sys.stderr)
        _leave(3)


def _leave(code: int) -> NoReturn:
    """End the process as Python does, but without unloading modules.

    Unloading torch's modules and libraries takes 0.6 to 0.9 s. The system frees the memory anyway.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # ends pools, then joins other threads
    for thread in threading.enumerate():  # of start_awaited in system/host.py
        atexit.unregister(thread.join)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, full, or its reader has gone
            stream.flush()
    os._exit(code)


def _open_closed_streams() -> None:
    for number, (name, mode, flags) in enumerate(_CLOSED):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, flags)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - stays open


if __name__ == "__main__":
    main()
