"""How a command ends: exceptions to messages and exit codes. Nothing heavy is imported unless something went wrong."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

import typer

from bass_cli.screen import Screen


@contextlib.contextmanager
def exit_codes(screen: Screen, interrupted: str) -> Iterator[None]:
    """Turn the ways a command can end into messages and exit codes; SIGTERM ends it like Ctrl-C."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if in_main_thread else None
    try:
        yield
    except KeyboardInterrupt:
        screen.error(interrupted)
        raise typer.Exit(130) from None
    except Exception as error:
        code = _code_of(error)
        if code is None:
            screen.close()
            raise
        screen.error(str(error))
        raise typer.Exit(code) from None
    finally:
        screen.close()
        if in_main_thread:
            signal.signal(signal.SIGTERM, before)


def _code_of(error: Exception) -> int | None:
    """2 or 3 for the user's mistakes and the machine's lacks, None for everything else."""
    from bass_cli.job import MachineError, UserError

    if isinstance(error, MachineError):
        return 3
    return 2 if isinstance(error, UserError) else None
