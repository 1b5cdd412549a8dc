"""Show a line of progress, and estimate the time left.

On a terminal the line changes in place. Elsewhere a line is printed at least every 30 seconds, by
a thread if nothing is reported, so that a log tells slow work from a process that hangs.
io/console.py makes the line.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence

from bass_cli.io import terminal

# seconds between plain lines while progress is reported, and before a phase is named
INTERVAL = 5.0
SILENCE = 30.0  # the most seconds without a plain line
_BAR = 24  # columns of the bar; it is left out if fewer than a quarter of them are free
_LEAST, _SHARE = 3, 0.02  # items, and share of all items, that are done before an estimate

Clock = Callable[[], float]
Lines = str | Sequence[str]  # one line, or several


class Estimate:
    """Estimate the seconds left from the mean time of an item.

    If no item has finished for some time, at least that much time again is expected (Lindy's law).
    """

    def __init__(self, total: int | None):
        self._total = total
        self._first: tuple[int, float] | None = None
        self._last = (0, 0.0)

    def update(self, done: int, now: float, total: int | None = None) -> None:
        """Report the number of items done. The first call sets the start of the work. `total`
        replaces the former total."""
        self._total = self._total if total is None else total
        if self._first is None or done > self._last[0]:
            self._last = (done, now)
        self._first = self._first or self._last

    def left(self, now: float) -> float | None:
        """Return the seconds left; None if too few items are done or their number is unknown."""
        if self._first is None or self._total is None:
            return None
        done, spent = self._last[0] - self._first[0], self._last[1] - self._first[1]
        rest = self._total - self._last[0]
        if done < _LEAST or done < _SHARE * self._total or rest <= 0:
            return None
        waited = now - self._last[1]
        return max(rest * spent / done - waited, waited)


class Display:
    """A display of a line that changes. `now`: the clock, in seconds."""

    def __init__(self, *, now: Clock = time.monotonic):
        self._now = now
        self._line: Callable[[], Lines] | None = None
        self._share: Callable[[], float | None] = lambda: None
        self._live: terminal.LiveLines | None = None
        self._lock = threading.Lock()
        self._printed = self._next = 0.0
        self._over: threading.Event | None = None

    def show(
        self,
        line: Callable[[], Lines],
        *,
        share: Callable[[], float | None] = lambda: None,
        live: bool = True,
        first: float = SILENCE,
    ) -> None:
        """Show a line from now on.

        Args:
            line: Returns the text.
            share: Returns the length of the bar, from 0 to 1; None for no bar.
            live: False if libraries write to the terminal meanwhile.
            first: Seconds until the first plain line is printed without a report.
        """
        with self._lock:
            self._line, self._share = line, share
            self._printed, self._next = self._now(), self._now() + first
        if not sys.stderr.isatty():
            self._watch()
        elif live and self._live is None:
            self._live = terminal.LiveLines(self._content, bar=_BAR)
            self._live.start()
        elif not live:
            self._stop_live()

    def tick(self) -> None:
        """Report that the line has changed."""
        if self._now() - self._printed >= INTERVAL:
            self._print()

    def beat(self) -> None:
        """Print a line if none was printed for too long; the thread calls this."""
        if self._now() >= self._next:
            self._print()

    def message(self, text: str) -> None:
        """Print a line that stays, above the line that changes."""
        if self._live is not None:
            self._live.message(text)
        else:
            terminal.line(text)

    def hide(self) -> None:
        """Stop the display."""
        with self._lock:
            self._line = None
        self._stop_live()
        if self._over is not None:
            self._over.set()
            self._over = None

    def _print(self) -> None:
        with self._lock:
            if self._line is None or self._live is not None or sys.stderr.isatty():
                return
            self._printed, self._next = self._now(), self._now() + SILENCE
            for line in _listed(self._line()):
                terminal.line(line)

    def _watch(self) -> None:
        if self._over is not None:
            return
        self._over = over = threading.Event()

        def watch() -> None:
            while not over.wait(max(min(self._next - self._now(), INTERVAL), 0.01)):
                self.beat()

        threading.Thread(target=watch, daemon=True, name="progress").start()

    def _content(self) -> tuple[Sequence[str], float | None]:
        with self._lock:
            line, share = self._line, self._share()
            return [] if line is None else _listed(line()), share

    def _stop_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _listed(lines: Lines) -> Sequence[str]:
    return [lines] if isinstance(lines, str) else lines


def clock(seconds: float) -> str:
    """Format seconds as 1:05 or 2:00:00."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
