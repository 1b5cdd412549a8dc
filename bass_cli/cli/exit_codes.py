"""How a command ends: exceptions to messages and exit codes. Nothing heavy is imported unless
something went wrong."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator

import typer

from bass_cli.errors import MachineError, UserError
from bass_cli.io.console import Screen
from bass_cli.system import signals
from bass_cli.system.host import is_refused_memory, unsupported

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def exit_codes(screen: Screen, interrupted: str) -> Iterator[None]:
    """Turn the ways a command can end into messages and exit codes; SIGTERM ends it like Ctrl-C,
    and a reader of its output that has gone (`| head -1`) without a word. On a system that bass
    does not run on, it ends at once."""
    if (reason := unsupported()) is not None:
        screen.error(reason)
        raise typer.Exit(3)
    with signals.in_command(lambda: screen.error(interrupted)):
        try:
            with _explained(screen, interrupted):
                yield
        except BrokenPipeError:  # nobody reads what would be said
            raise typer.Exit(signals.READER_GONE) from None


@contextlib.contextmanager
def _explained(screen: Screen, interrupted: str) -> Iterator[None]:
    """Say what an end is due to, and raise its exit code."""
    try:
        yield
        if sys.stdout is not None:  # what is only buffered may not fit
            sys.stdout.flush()
    except KeyboardInterrupt:
        screen.error(interrupted)
        raise typer.Exit(signals.INTERRUPTED) from None
    except BrokenPipeError:
        raise
    except Exception as error:
        code, message = _end_of(error)
        if code is None:
            screen.close()
            raise
        screen.error(message)
        _drop_what_cannot_be_written()
        raise typer.Exit(code) from None
    finally:
        screen.close()


def _drop_what_cannot_be_written() -> None:
    """Python would try once more at its end, and turn the exit code into 120."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end_of(error: Exception) -> tuple[int | None, str | UserError]:
    """2 or 3 for the user's mistakes and the machine's lacks, None for everything else; and the
    message."""
    if isinstance(error, UserError):
        return 3 if isinstance(error, MachineError) else 2, error
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return 3, f"{error.filename or 'standard output'}: cannot write: {error.strerror}"
    if is_refused_memory(error):
        first = (str(error).splitlines() or [""])[0]
        return (
            3,
            "there was not enough memory: use smaller batches, fewer new tokens or a smaller "
            f"model ({first})",
        )
    return None, ""
