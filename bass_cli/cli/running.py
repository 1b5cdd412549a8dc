"""Run the body of a command with a screen, signals and a log, and end it with an exit code."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import sys
from collections.abc import Iterator
from typing import Any

import typer

from bass_cli.cli.options import in_flags, unknown_variables
from bass_cli.config.commands import COMMANDS
from bass_cli.errors import MachineError, UserError, failed_import
from bass_cli.io.console import Screen
from bass_cli.system import signals
from bass_cli.system.host import is_refused_memory, unsupported

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def running(args: Any, interrupted: str) -> Iterator[Screen]:
    """Run a command's block with a screen; show its error and raise typer.Exit with the exit code.

    SIGTERM ends the command like Ctrl-C. If the reader of the output has gone (`| head -1`), the
    command ends without a message. On an unsupported system the block does not run.

    Args:
        args: The options of the command.
        interrupted: The message after SIGINT or SIGTERM.
    """
    document = getattr(args, "json_document", False) or (
        getattr(args, "format", None) not in (None, "table")
    )
    quiet, verbose = getattr(args, "quiet", False), getattr(args, "verbose", False)
    render = functools.partial(in_flags, kind=type(args))
    screen = Screen(quiet, document=document, render=render, verbose=verbose)
    if (reason := unsupported()) is not None:
        screen.error(reason)
        raise typer.Exit(3)
    with signals.in_command(lambda: screen.error(interrupted)):
        try:
            with _explained(screen, interrupted), _logged(args, screen):
                for note in unknown_variables(os.environ):
                    screen.note(note)
                yield screen
        except BrokenPipeError:  # the reader of the output has gone
            raise typer.Exit(signals.READER_GONE) from None


@contextlib.contextmanager
def _logged(args: Any, screen: Screen) -> Iterator[None]:
    """Write the events of the block to the file of --log, if there is one."""
    if getattr(args, "verbose", False) and args.quiet:
        raise UserError("`quiet` and `verbose` contradict each other; give one of them")
    if getattr(args, "log", None) is None:
        yield
        return
    from bass_cli.io.runlog import RunLog
    from bass_cli.io.saving import refuse_shared_files

    others = [(f"`{name}`", getattr(args, name, None)) for name in ("prompts", "out", "report")]
    refuse_shared_files([("`log`", args.log)], others)
    command = next(name for name, kind in COMMANDS.items() if kind is type(args))
    with RunLog(args.log, command, render=screen.render) as screen.log:
        yield


@contextlib.contextmanager
def _explained(screen: Screen, interrupted: str) -> Iterator[None]:
    """Show the error that ends the block, and raise its exit code."""
    try:
        yield
        if sys.stdout is not None:  # buffered output may not fit on the disk
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
    """Discard buffered output if it cannot be written.

    Otherwise Python tries again when it exits, and changes the exit code to 120.
    """
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end_of(error: Exception) -> tuple[int | None, str | UserError]:
    """Return the exit code and the message of an error.

    The code is 2 for a UserError, 3 if the machine lacks something, None for a fault of bass.
    """
    if isinstance(error, UserError):
        return 3 if isinstance(error, MachineError) else 2, error
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return 3, f"{error.filename or 'standard output'}: cannot write: {error.strerror}"
    if is_refused_memory(error):
        first = (str(error).splitlines() or [""])[0]
        return (
            3,
            "not enough memory: use a smaller --batch-size, fewer --max-new-tokens or a smaller "
            f"model ({first})",
        )
    if (reason := failed_import(error)) is not None:
        return 3, reason
    return None, ""
