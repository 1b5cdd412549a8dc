"""One line that says what is going on: live on a terminal, elsewhere printed now and then; and how
much time is left.

Where stderr is no terminal a line comes at least every 30 seconds, also while nothing reports
anything (a thread sees to that), so that a log tells slow work from a process that hangs. Not
here: what the line says (io/console.py).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence

from bass_cli.io import terminal

# seconds between plain lines while something is reported; how long a phase may last before it is
# named
INTERVAL = 5.0
SILENCE = 30.0  # seconds without a plain line at most
_BAR = 24  # columns of a terminal; a line that leaves less than a quarter of it has no bar
_LEAST, _SHARE = 3, 0.02  # what must be done, and of all there is, before the rest is estimated

Clock = Callable[[], float]
Lines = str | Sequence[str]  # one line, or several


class Estimate:
    """Seconds that the rest takes, if it goes on as before. It never promises that the end is
    near for long: when nothing has been finished for some time, as much time again is expected,
    for all that lasts is likely to last."""

    def __init__(self, total: int | None):
        self._total = total
        self._first: tuple[int, float] | None = None
        self._last = (0, 0.0)

    def update(self, done: int, now: float, total: int | None = None) -> None:
        """So many are done; the first call says how many were done before, and when the work
        began. `total`: replaces the one before."""
        self._total = self._total if total is None else total
        if self._first is None or done > self._last[0]:
            self._last = (done, now)
        self._first = self._first or self._last

    def left(self, now: float) -> float | None:
        """Seconds; None while there is too little to go by, or if nobody knows how much there is
        to do."""
        if self._first is None or self._total is None:
            return None
        done, spent = self._last[0] - self._first[0], self._last[1] - self._first[1]
        rest = self._total - self._last[0]
        if done < _LEAST or done < _SHARE * self._total or rest <= 0:
            return None
        waited = now - self._last[1]
        return max(rest * spent / done - waited, waited)


class Display:
    """Shows a line that changes. `now`: seconds."""

    def __init__(self, *, now: Clock = time.monotonic):
        self._now = now
        self._line: Callable[[], Lines] | None = None
        self._share: Callable[[], float | None] = lambda: None
        self._live: terminal.LiveLines | None = None
        self._lock = threading.Lock()
        self._printed = self._due = 0.0
        self._over: threading.Event | None = None

    def show(
        self,
        line: Callable[[], Lines],
        *,
        share: Callable[[], float | None] = lambda: None,
        live: bool = True,
        first: float = SILENCE,
    ) -> None:
        """Show `line()` from now on instead of what was shown, with a bar of `share()` (0 to 1)
        if it is known. `live`: false where others write to the terminal meanwhile; `first`:
        seconds until a plain line comes by itself."""
        with self._lock:
            self._line, self._share = line, share
            self._printed, self._due = self._now(), self._now() + first
        if not sys.stderr.isatty():
            self._watch()
        elif live and self._live is None:
            self._live = terminal.LiveLines(self._content, bar=_BAR)
            self._live.start()
        elif not live:
            self._stop_live()

    def tick(self) -> None:
        """What the line says has changed."""
        if self._now() - self._printed >= INTERVAL:
            self._print()

    def beat(self) -> None:
        """Time has passed: what the thread calls, again and again."""
        if self._now() >= self._due:
            self._print()

    def message(self, text: str) -> None:
        """A line that stays, above the one that changes."""
        if self._live is not None:
            self._live.message(text)
        else:
            terminal.line(text)

    def hide(self) -> None:
        """Show nothing any more."""
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
            self._printed, self._due = self._now(), self._now() + SILENCE
            for line in _listed(self._line()):
                terminal.line(line)

    def _watch(self) -> None:
        if self._over is not None:
            return
        self._over = over = threading.Event()

        def watch() -> None:
            while not over.wait(max(min(self._due - self._now(), INTERVAL), 0.01)):
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
    """1:05, or 2:00:00."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
