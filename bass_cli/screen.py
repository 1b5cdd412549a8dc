"""Everything a person sees while bass runs, all of it on stderr: progress, notes, errors, tables, the summary.

Standard output belongs to results. Without a terminal progress is a plain line every few seconds, without rich.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

PLAIN_INTERVAL = 5.0


class Sample(Protocol):
    """What the screen looks at in a completion."""

    @property
    def tokens(self) -> int: ...
    @property
    def rounds(self) -> int: ...
    @property
    def drafted(self) -> int: ...
    @property
    def accepted(self) -> int: ...
    @property
    def finish_reason(self) -> str: ...


class Screen:
    """Progress and messages of one command; `quiet` keeps the errors only. Counts the samples of this run."""

    def __init__(self, quiet: bool = False, *, now: Callable[[], float] = time.monotonic) -> None:
        self._quiet, self._now = quiet, now
        self._progress: Any = None
        self._task: Any = None
        self._reset(None)

    def _reset(self, total: int | None) -> None:
        self._total = total
        self._began = self._printed = self._now()
        self._decoding: float | None = None  # when the first round began: speed leaves the loading out
        self._samples = self._tokens = self._rounds = self._drafted = self._accepted = 0
        self._live_tokens = self._live_rows = self._live_accepted = 0
        self._reasons: dict[str, int] = {}

    def start(self, total: int | None) -> None:
        """Count anew, and show progress towards `total` samples (None: nobody knows how many) from now on."""
        self._reset(total)
        if not self._quiet and sys.stderr.isatty():
            self._progress = _progress_bar("samples, ")
            self._task = self._progress.add_task("", total=total, figures="")
            self._progress.start()

    def round(self, width: int, accepted: int, rows: int, seconds: float) -> None:
        """One round is over: `accepted` drafts kept over `rows` rows; each row also got one token of the target's."""
        self._decoding = self._now() - seconds if self._decoding is None else self._decoding
        self._live_tokens += accepted + rows
        self._live_rows += rows
        self._live_accepted += accepted
        self._show()

    def advance(self, completion: Sample) -> None:
        """One sample is done."""
        self._samples += 1
        self._tokens += completion.tokens
        self._rounds += completion.rounds
        self._drafted += completion.drafted
        self._accepted += completion.accepted
        self._reasons[completion.finish_reason] = self._reasons.get(completion.finish_reason, 0) + 1
        self._show()

    @contextlib.contextmanager
    def counting(self, what: str, total: int) -> Iterator[Callable[[int, int], None]]:
        """Show progress of something other than samples; the function given takes what is done and what there is to do."""
        began = self._printed = self._now()
        if not self._quiet and sys.stderr.isatty():
            self._progress = _progress_bar(what)
            self._task = self._progress.add_task("", total=total, figures="")
            self._progress.start()

        def step(done: int, whole: int) -> None:
            if self._progress is not None:
                self._progress.update(self._task, completed=done, total=whole)
            elif not self._quiet and self._now() - self._printed >= PLAIN_INTERVAL:
                self._printed = self._now()
                print(f"{done}/{whole} {what}, {_clock(self._now() - began)} elapsed", file=sys.stderr, flush=True)

        try:
            yield step
        finally:
            self._stop()

    def note(self, message: str) -> None:
        """One line for the person, not in the way of the progress display."""
        if self._quiet:
            return
        if self._progress is not None:
            self._progress.console.print(message, markup=False, highlight=False)
        else:
            print(message, file=sys.stderr, flush=True)

    def error(self, message: str) -> None:
        """What went wrong; shown even when quiet."""
        self._stop()
        print(f"bass: error: {message}", file=sys.stderr, flush=True)

    def summary(self, output: str) -> dict[str, Any]:
        """The figures of this run; rates are None where nothing was drafted."""
        seconds = self._now() - self._began
        decoding = 0.0 if self._decoding is None else self._now() - self._decoding  # loading alone is no decoding
        return {
            "output": output,
            "samples": self._samples,
            "tokens": self._tokens,
            "seconds": round(seconds, 3),
            "decoding_seconds": round(decoding, 3),
            "tokens_per_second": round(self._tokens / decoding, 2) if self._tokens and decoding > 0 else None,
            "accepted_per_round": round(self._accepted / self._rounds, 3) if self._rounds else None,
            "acceptance_rate": round(self._accepted / self._drafted, 4) if self._drafted else None,
            "finish_reasons": dict(sorted(self._reasons.items())),
        }

    def close(self, summary: dict[str, Any] | None = None) -> None:
        """End the progress display; then the summary in two lines."""
        self._stop()
        if summary is None or self._quiet:
            return
        reasons = ", ".join(f"{count} {reason}" for reason, count in summary["finish_reasons"].items())
        print(f"{summary['samples']} samples ({reasons or 'nothing to do'}) in {summary['output']}", file=sys.stderr)
        speed = f"{summary['tokens']} tokens in {summary['seconds']:.1f} s"
        if summary["tokens_per_second"] is not None:
            speed += f", {summary['tokens_per_second']:.1f} a second once the models were loaded"
        if summary["acceptance_rate"] is not None:
            speed += f"; drafts accepted: {summary['accepted_per_round']:.2f} a round, {summary['acceptance_rate']:.0%}"
        print(speed, file=sys.stderr, flush=True)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table for a person; cells that are too long for the terminal are folded."""
        if self._quiet:
            return
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(*columns, box=None, pad_edge=False, header_style="bold")
        for row in rows:
            table.add_row(*(Text(cell, overflow="fold") for cell in row))
        width = None if sys.stderr.isatty() else 160
        Console(file=sys.stderr, width=width).print(table)

    def _figures(self) -> str:
        seconds = max(self._now() - (self._began if self._decoding is None else self._decoding), 1e-9)
        figures = f"{max(self._live_tokens, self._tokens) / seconds:.0f} tokens/s"
        return figures + (f", {self._live_accepted / self._live_rows:.2f} accepted a round" if self._live_rows else "")

    def _show(self) -> None:
        if self._quiet:
            return
        if self._progress is not None:
            self._progress.update(self._task, completed=self._samples, figures=self._figures())
        elif self._now() - self._printed >= PLAIN_INTERVAL:
            self._printed = self._now()
            print(self._plain_line(), file=sys.stderr, flush=True)

    def _plain_line(self) -> str:
        elapsed = self._now() - self._began
        known = f"/{self._total}" if self._total is not None else ""
        line = f"{self._samples}{known} samples, {self._figures()}, {_clock(elapsed)} elapsed"
        if self._total and self._samples:
            line += f", about {_clock(elapsed * (self._total - self._samples) / self._samples)} left"
        return line

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _progress_bar(what: str) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn(what + "{task.fields[figures]}"))
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True)
