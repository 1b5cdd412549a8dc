"""Write all text for people to standard output and standard error, with escapes.

Messages quote ids, file names, model names and other untrusted text, so control and format
characters are escaped. One call writes one line; a Display has lines that change. io/console.py
chooses the lines, and io/results.py writes samples as bytes.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from bass_cli.errors import spelled

if TYPE_CHECKING:
    from rich.live import Live

# seconds between plain lines while progress is reported, and before a phase is named
INTERVAL = 5.0
SILENCE = 30.0  # the most seconds without a plain line
_BAR = 24  # columns of the bar; it is left out if fewer than a quarter of them are free
# Control characters of libraries' progress bars that pass to a terminal: a carriage return, and
# cursor movements over whole lines
_BAR_TEXT = re.compile(r"\r(?=[^\r])")
_BAR_MOVE = re.compile(r"\n*(?:\x1b\[A)+|\r")
_KEPT = re.compile(r"([\n\t])")


def line(text: str, *, stdout: bool = False) -> None:
    """Write one line, to standard error unless `stdout`. A newline in the text is escaped."""
    print(spelled(text), file=sys.stdout if stdout else sys.stderr, flush=True)


def error(first: str, *more: str) -> None:
    """Write an error; further lines are indented."""
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


class Display:
    """Lines that change, such as the progress of a command, with a bar. Other output stays above.

    On a terminal the lines change in place. Elsewhere they are printed at least every 30 seconds,
    by a thread if nothing is reported, so that a log tells slow work from a process that hangs.

    Args:
        quiet: Show nothing.
    """

    def __init__(self, *, quiet: bool = False):
        self._quiet = quiet
        self._lines: Callable[[], Sequence[str]] | None = None
        self._share: Callable[[], float | None] = lambda: None
        self._live: Live | None = None
        self._lock = threading.Lock()
        self._printed = self._next = 0.0
        self._over: threading.Event | None = None

    def show(
        self,
        lines: Callable[[], Sequence[str]],
        *,
        share: Callable[[], float | None] = lambda: None,
        live: bool = True,
        first: float = SILENCE,
    ) -> None:
        """Show lines from now on.

        Args:
            lines: Returns the text.
            share: Returns the length of the bar, from 0 to 1; None for no bar.
            live: False if libraries write to the terminal meanwhile.
            first: Seconds until the lines are printed without a report.
        """
        if self._quiet:
            return
        with self._lock:
            self._lines, self._share = lines, share
            self._printed, self._next = time.monotonic(), time.monotonic() + first
        if not sys.stderr.isatty():
            self._watch()
        elif live and self._live is None:
            self._start_live()
        elif not live:
            self._stop_live()

    def tick(self) -> None:
        """Report that the lines have changed."""
        if time.monotonic() - self._printed >= INTERVAL:
            self._print()

    def beat(self) -> None:
        """Print the lines if none were printed for too long; the thread calls this."""
        if time.monotonic() >= self._next:
            self._print()

    def message(self, text: str) -> None:
        """Write a line that stays, above the lines that change."""
        if (live := self._live) is not None:  # another thread may stop it
            from rich.text import Text

            live.console.print(Text(spelled(text)), soft_wrap=True)
        elif not self._quiet:
            line(text)

    def hide(self) -> None:
        """Stop the display."""
        with self._lock:
            self._lines = None
        self._stop_live()
        if self._over is not None:
            self._over.set()
            self._over = None

    def _print(self) -> None:
        with self._lock:
            if self._lines is None or self._live is not None or sys.stderr.isatty():
                return
            self._printed, self._next = time.monotonic(), time.monotonic() + SILENCE
            for one in self._lines():
                line(one)

    def _watch(self) -> None:
        """Start the thread that calls `beat`, unless it runs."""
        if self._over is not None:
            return
        self._over = over = threading.Event()

        def watch() -> None:
            while not over.wait(max(min(self._next - time.monotonic(), INTERVAL), 0.01)):
                self.beat()

        threading.Thread(target=watch, daemon=True, name="progress").start()

    def _start_live(self) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=_plain(sys.stderr))
        self._live = Live(
            get_renderable=lambda: self._renderable(console.width),
            console=console,
            transient=True,
            refresh_per_second=4,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        _Spelling.above = self.message
        self._live.start(refresh=True)

    def _stop_live(self) -> None:
        if self._live is not None:
            _Spelling.above = None
            with contextlib.suppress(OSError):  # the terminal may be gone
                self._live.stop()
            self._live = None

    def _renderable(self, columns: int) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        with self._lock:
            share, lines = self._share(), [] if self._lines is None else self._lines()
        text = Text("\n".join(map(spelled, lines)))
        width = min(columns - 2 - (len(lines[0]) if lines else 0), _BAR)
        if share is None or width < _BAR // 4:
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
