"""Write all text for people to standard output and standard error, with escapes.

Messages quote ids, file names, model names and other untrusted text, so control and format
characters are escaped. One call writes one line. io/console.py chooses the lines, io/progress.py
has lines that change, and io/results.py writes samples as bytes.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from bass_cli.errors import UserError, spelled

# Control characters of libraries' progress bars that pass to a terminal: a carriage return, and
# cursor movements over whole lines
_BAR_TEXT = re.compile(r"\r(?=[^\r])")
_BAR_MOVE = re.compile(r"\n*(?:\x1b\[A)+|\r")
_KEPT = re.compile(r"([\n\t])")


def line(text: str, *, stdout: bool = False) -> None:
    """Write one line, to standard error unless `stdout`. A newline in the text is escaped."""
    print(spelled(text), file=sys.stdout if stdout else sys.stderr, flush=True)


def error(message: str | UserError) -> None:
    """Write an error; further lines of a UserError are indented."""
    first, *more = message.lines if isinstance(message, UserError) else [message]
    line(f"bass: error: {first}")
    for one in more:
        line(f"  {one}")


def crash(error: BaseException) -> None:
    """Write the traceback of an unexpected exception, indented, and a line with its message."""
    for one in "".join(traceback.format_exception(error)).rstrip("\n").split("\n"):
        line(f"  {one}")
    line(f"bass: error: unexpected {type(error).__name__}: {error}")


def document(value: Any, *, indent: int | None = None, allow_nan: bool = True) -> None:
    """Write a JSON document to standard output. Its ASCII form has no control characters."""
    print(json.dumps(value, allow_nan=allow_nan, indent=indent), flush=True)


def json_on_a_terminal(text: str) -> str:
    """Escape the control and format characters that JSON allows in strings."""
    if text.isprintable():
        return text
    return "".join(one if spelled(one) == one else json.dumps(one)[1:-1] for one in text)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, to: TextIO) -> None:
    """Write a table to a terminal; cells that are too long are folded."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        shown.add_column(Text(spelled(column)))
    for row in rows:
        shown.add_row(*(Text(spelled(cell), overflow="fold") for cell in row))
    Console(file=_plain(to)).print(shown)


class LiveLines:
    """Lines at the bottom of the terminal that change; other output appears above them.

    Args:
        content: Returns the lines and the progress (0 to 1, None if unknown).
        bar: The columns of the progress bar.
    """

    def __init__(self, content: Callable[[], tuple[Sequence[str], float | None]], *, bar: int):
        from rich.console import Console
        from rich.live import Live

        self._content, self._bar = content, bar
        self._console = Console(file=_plain(sys.stderr))
        self._live = Live(
            get_renderable=self._renderable,
            console=self._console,
            transient=True,
            refresh_per_second=4,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def start(self) -> None:
        _Spelling.above = self.message
        self._live.start(refresh=True)

    def stop(self) -> None:
        _Spelling.above = None
        with contextlib.suppress(OSError):  # the terminal may be gone
            self._live.stop()

    def message(self, text: str) -> None:
        """Write one line above."""
        from rich.text import Text

        self._console.print(Text(spelled(text)), soft_wrap=True)

    def _renderable(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        lines, share = self._content()
        text = Text("\n".join(map(spelled, lines)))
        first = len(lines[0]) if lines else 0
        width = min(self._console.width - 2 - first, self._bar)
        if share is None or width < self._bar // 4:
            return text
        grid = Table.grid(padding=(0, 1))
        grid.add_row(ProgressBar(total=1.0, completed=share, width=width), text)
        return grid


def guard() -> None:
    """Escape the text that libraries, warnings, logs and the interpreter write to both streams.

    Bytes that are written to the streams' buffers are not changed.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not isinstance(stream, _Spelling):
            stream.flush()
            setattr(sys, name, _Spelling(stream))
    warnings.showwarning = _warn
    threading.excepthook = _thread_fault
    make = logging.getLogRecordFactory()
    logging.setLogRecordFactory(lambda *args, **kwargs: _one_line(make(*args, **kwargs)))


def _thread_fault(fault: threading.ExceptHookArgs) -> None:
    if not issubclass(fault.exc_type, SystemExit):
        crash(fault.exc_value or fault.exc_type())


def spell_record(record: logging.LogRecord) -> bool:
    """Filter a logger's records: escape control characters, and write each as one line."""
    _one_line(record)
    return True


def _one_line(record: logging.LogRecord) -> logging.LogRecord:
    with contextlib.suppress(Exception):  # the handler reports arguments that do not fit
        record.msg, record.args = spelled(record.getMessage()), None
    return record


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Replace warnings.showwarning: write a library's warning as one line."""
    text = spelled(f"{category.__name__}: {message}")
    print(f"bass: warning: {text}", file=file or sys.stderr, flush=True)


def _plain(stream: TextIO) -> TextIO:
    """Return the underlying stream, which passes cursor movements."""
    return stream.plain if isinstance(stream, _Spelling) else stream


class _Spelling(io.TextIOWrapper):
    """A standard stream that escapes all control and format characters but newline and tab.

    On a terminal the control characters of progress bars pass. While a display is live, whole lines
    go to `above`. Messages on standard error that cannot be written, as on a full disk, are
    dropped: they must not end a job.
    """

    above: Callable[[str], None] | None = None

    def __init__(self, plain: io.TextIOWrapper):
        super().__init__(
            plain.buffer,
            encoding=plain.encoding,
            errors="backslashreplace",
            line_buffering=plain.isatty() or plain is sys.stderr,
        )
        self.plain, self._may_drop = plain, plain is sys.stderr
        self._begun = ""  # an incomplete line, while a display is live

    def write(self, text: str) -> int:
        terminal = self.isatty()
        if terminal and _BAR_MOVE.fullmatch(text):
            self._put(text)
            return len(text)
        start = _BAR_TEXT.match(text) if terminal else None
        rest = text[1:] if start else text
        safe = "".join(
            part if _KEPT.fullmatch(part) else spelled(part) for part in _KEPT.split(rest)
        )
        above = type(self).above
        if terminal and above is not None and not start:
            *lines, self._begun = (self._begun + safe).split("\n")
            for one in lines:
                above(one)
        else:
            self._put(f"\r{safe}" if start else safe)
        return len(text)

    def flush(self) -> None:
        with self._dropping():
            super().flush()

    def _put(self, text: str) -> None:
        with self._dropping():
            super().write(text)

    @contextlib.contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:  # the reader has gone: the command ends
            raise
        except OSError:
            if not self._may_drop:
                raise
