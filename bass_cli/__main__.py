"""The console script, and `python -m bass_cli`: settles what signals and closed streams mean
before all that is slow."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import threading
from typing import NoReturn

from bass_cli.system import signals, threads
from bass_cli.system.host import is_refused_memory

# What a standard stream that was closed (`>&-`) is opened as: one that refuses to be read or
# written when that is tried, so that no other file takes its number; messages have nowhere to
# go.
_CLOSED = (("stdin", "r", os.O_WRONLY), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_WRONLY))


# What a command imports stays, and the collector would look through it again and again: 0.1 s of
# importing torch, and 0.1 s each time later on. So it begins when so many more objects are there.
_COLLECTED = (100_000, 50, 100)


def main() -> None:
    """Run the command line; never returns."""
    signals.at_start()
    gc.set_threshold(*_COLLECTED)
    threads.look_first()
    _open_closed_streams()
    try:
        from bass_cli.cli import commands

        commands.main()
    except SystemExit as end:
        _leave(end.code if isinstance(end.code, int) else 0 if end.code is None else 1)
    except (MemoryError, ImportError, OSError, RuntimeError) as error:
        if not is_refused_memory(error):
            raise
        print(f"bass: error: there is not enough memory to start ({error})", file=sys.stderr)
        _leave(3)


def _leave(code: int) -> NoReturn:
    """End the process as Python does, but leave its memory and the device's to the system: to take
    apart every module and library of torch takes 0.6 to 0.9 s, which whoever called waits for."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or its reader has gone
            stream.flush()
    os._exit(code)


def _open_closed_streams() -> None:
    for number, (name, mode, flags) in enumerate(_CLOSED):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, flags)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - for good


if __name__ == "__main__":
    main()
