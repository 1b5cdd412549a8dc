"""Show progress, notes and errors of a command on standard error, and its results on stdout.

io/progress.py shows the line that changes; io/terminal.py writes all text.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from bass_cli.errors import UserError, spelled
from bass_cli.io import terminal
from bass_cli.io.progress import INTERVAL, Display, Estimate, Lines, clock
from bass_cli.io.usage import Usage, describe
from bass_cli.system.host import gigabytes

_LEAST_SECONDS = 0.5  # of decoding, before a speed is shown


class Sample(Protocol):
    """The fields of a completion that are shown."""

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
    @property
    def copy_of(self) -> int | None: ...


class Screen:
    """Progress, messages and results of one command. It counts the samples of this run.

    Args:
        quiet: Show errors and results only.
        document: Standard output gets a JSON document, so text for people goes to stderr.
        now: The clock, in seconds.
    """

    def __init__(
        self,
        quiet: bool = False,
        *,
        document: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._quiet, self._document, self._now = quiet, document, now
        self._display = None if quiet else Display(now=now)
        self._bytes = (0, 0)  # read so far and in all, in this phase
        self._counting = False  # whether the progress is of something other than samples
        self._reset(None, 1)

    def _reset(self, total: int | None, rows: int) -> None:
        self._total = total
        self._began = self._now()
        self._decoding: float | None = None  # when the first round began
        self._samples = self._tokens = self._rounds = self._drafted = self._accepted = 0
        self._live_tokens = self._live_rows = self._live_accepted = 0
        self._reasons: dict[str, int] = {}
        self._estimate, self._live = Estimate(total), True
        self._beside: Callable[[], str] | None = None
        self._usage = Usage(rows, total, now=self._now)

    def phase(self, name: str, *, live: bool = True) -> None:
        """Show the name of a phase, until something else is shown.

        `live`: False if libraries may write to the terminal meanwhile.
        """
        began, self._bytes = self._now(), (0, 0)
        self._usage.phase(name)

        def line() -> str:
            spent, (done, whole) = self._now() - began, self._bytes
            rate = f", {gigabytes(round(done / spent))}/s" if spent > 0 else ""
            read = f": {gigabytes(done)} of {gigabytes(whole)}{rate}" if whole else ""
            return f"{name}{read}, {clock(spent)} elapsed"

        def share() -> float | None:
            done, whole = self._bytes
            return done / whole if whole else None

        if self._display is not None:
            self._display.show(line, share=share, live=live, first=INTERVAL)

    def bytes_read(self, done: int, whole: int) -> None:
        """Report that `done` of `whole` bytes of this phase are read."""
        self._bytes = (done, whole)
        self._tick()

    def start(
        self,
        total: int | None,
        *,
        rows: int = 1,
        live: bool = True,
        beside: Callable[[], str] | None = None,
    ) -> None:
        """Reset the counts and show progress towards `total` samples (None if unknown).

        Args:
            rows: The rows of a full batch.
            live: False if the results go to the terminal, too.
            beside: Returns a second line to show.
        """
        self._reset(total, rows)
        self._live, self._beside = live, beside
        self._show_samples()

    def round(
        self,
        width: int,
        accepted: int,
        rows: int,
        seconds: float,
        capturing: float = 0.0,
        capacity: int | None = None,
    ) -> None:
        """Count a finished round.

        Args:
            width: Its draft length.
            accepted: The accepted drafts of all rows; each row also got one token of the target.
            rows: Its live rows.
            seconds: Its time, without `capturing`.
            capturing: Seconds of capturing graphs.
            capacity: The rows of the batch, if they have changed.
        """
        self._usage.round(rows, seconds, capturing, capacity)
        if self._decoding is None:
            self._begin_decoding(self._now() - seconds)
        self.rounds(accepted + rows, rows, accepted)

    def rounds(self, tokens: int, rows: int, accepted: int) -> None:
        """Count rounds by their tokens, live rows and accepted drafts, each summed."""
        if self._decoding is None:
            self._begin_decoding(self._now())
        self._live_tokens += tokens
        self._live_rows += rows
        self._live_accepted += accepted
        self._tick()

    def advance(self, completion: Sample) -> None:
        """Count a finished sample; the tokens of a copy do not count."""
        self._usage.sample()
        self._samples += 1
        self._tokens += completion.tokens if completion.copy_of is None else 0
        self._rounds += completion.rounds
        self._drafted += completion.drafted
        self._accepted += completion.accepted
        self._reasons[completion.finish_reason] = self._reasons.get(completion.finish_reason, 0) + 1
        self._estimate.update(self._samples, self._now())
        self._tick()

    @contextlib.contextmanager
    def counting(
        self, what: str, total: int, *, beside: Callable[[], str] | None = None
    ) -> Iterator[Callable[[int, int], None]]:
        """Show progress of something other than samples.

        The context is a function that takes the number done and the number in all. `beside`
        returns a second line to show.
        """
        self._counting = True
        began, counted, estimate = self._now(), (0, total), Estimate(total)

        def line() -> Lines:
            known = f"{counted[0]}/{counted[1]} {what}, {self._times(began, estimate)}"
            return known if beside is None else (known, beside())

        def step(done: int, whole: int) -> None:
            nonlocal counted
            counted = (done, whole)
            estimate.update(done, self._now(), whole)
            self._tick()

        if self._display is not None:
            self._display.show(line, share=lambda: counted[0] / max(counted[1], 1))
        try:
            yield step
        finally:
            self._counting = False
            self._stop()

    @contextlib.contextmanager
    def watching(
        self, line: Callable[[], Lines], share: Callable[[], float | None]
    ) -> Iterator[Callable[[], None]]:
        """Show a line and a bar that the caller computes; the context is a function that updates
        them."""
        if self._display is not None:
            self._display.show(line, share=share)
        try:
            yield self._tick
        finally:
            self._stop()

    def note(self, message: str) -> None:
        """Show a note above the progress display, unless quiet."""
        if self._display is not None:
            self._display.message(message)

    def error(self, message: str | UserError) -> None:
        """Show an error, even if quiet."""
        self._stop()
        terminal.error(message)

    def summary(self, output: str) -> dict[str, Any]:
        """Return the figures of this run; acceptance is None if nothing was drafted."""
        seconds = self._now() - self._began
        decoding = 0.0 if self._decoding is None else self._now() - self._decoding
        return {
            "output": output,
            "samples": self._samples,
            "tokens": self._tokens,
            "seconds": round(seconds, 3),
            "decoding_seconds": round(decoding, 3),
            "tokens_per_second": round(self._tokens / decoding, 2)
            if self._tokens and decoding > 0
            else None,
            "accepted_per_round": round(self._accepted / self._rounds, 3) if self._rounds else None,
            "acceptance_rate": round(self._accepted / self._drafted, 4) if self._drafted else None,
            "finish_reasons": dict(sorted(self._reasons.items())),
            "usage": self._usage.summary(),
        }

    def close(self, summary: dict[str, Any] | None = None) -> None:
        """End the progress display and show the summary in two or three lines."""
        self._stop()
        if summary is None or self._quiet:
            return
        reasons = ", ".join(
            f"{count} {reason}" for reason, count in summary["finish_reasons"].items()
        )
        terminal.line(
            f"{summary['samples']} samples ({reasons or 'nothing to do'}) in {summary['output']}"
        )
        speed = f"{summary['tokens']} tokens in {summary['seconds']:.1f} s"
        if (
            summary["tokens_per_second"] is not None
            and summary["decoding_seconds"] >= _LEAST_SECONDS
        ):
            speed += f", {summary['tokens_per_second']:.1f} a second once the models were loaded"
        if summary["acceptance_rate"] is not None:
            speed += (
                f"; drafts accepted: {summary['accepted_per_round']:.2f} a round, "
                f"{summary['acceptance_rate']:.0%}"
            )
        terminal.line(speed)
        if summary["usage"]["rounds"]:
            terminal.line(describe(summary["usage"]))

    def say(self, line: str) -> None:
        """Write a line of results to stdout."""
        self._stop()
        if not (self._document and self._quiet):
            terminal.line(line, stdout=not self._document)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Write a table of results to stdout. On a terminal long cells are folded, else every row
        is one line."""
        rows = [[spelled(cell) for cell in row] for row in rows]
        reader = sys.stderr if self._document else sys.stdout
        if not reader.isatty():
            lines = [columns, *rows]
            widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
            for line in lines:
                self.say("  ".join(map(str.ljust, line, widths)).rstrip())
            return
        self._stop()
        if self._document and self._quiet:
            return
        terminal.table(columns, rows, to=reader)

    def _figures(self) -> str:
        """Format the speed and the acceptance, each followed by a comma, if known."""
        seconds = self._now() - (self._began if self._decoding is None else self._decoding)
        tokens, figures = max(self._live_tokens, self._tokens), ""
        if seconds >= _LEAST_SECONDS:
            figures += f"{tokens / seconds:.0f} tokens/s, "
        if self._live_rows:
            figures += f"{self._live_accepted / self._live_rows:.2f} accepted a round, "
        return figures

    def _sample_line(self) -> Lines:
        known = f"/{self._total}" if self._total is not None else ""
        times = self._times(self._began, self._estimate)
        line = f"{self._samples}{known} samples, {self._figures()}{times}"
        return line if self._beside is None else (line, self._beside())

    def _times(self, began: float, estimate: Estimate) -> str:
        left = estimate.left(self._now())
        rest = "" if left is None else f", about {clock(max(left, 1.0))} left"
        return f"{clock(self._now() - began)} elapsed{rest}"

    def _begin_decoding(self, when: float) -> None:
        self._decoding = when
        self._estimate.update(0, when)
        if not self._counting:
            self._show_samples()

    def _show_samples(self) -> None:
        if self._display is not None:
            share = (
                (lambda: None) if not self._total else (lambda: self._samples / (self._total or 1))
            )
            self._display.show(self._sample_line, share=share, live=self._live)

    def _tick(self) -> None:
        if self._display is not None:
            self._display.tick()

    def _stop(self) -> None:
        if self._display is not None:
            self._display.hide()
