"""Show progress, notes and errors of a command on standard error, and its results on stdout.

A Screen chooses the lines and estimates the time left; io/usage.py counts where the seconds go.
io/terminal.py writes all text. With a RunLog (io/runlog.py) all events go to a file too.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bass_cli.errors import UserError, spelled
from bass_cli.io import terminal
from bass_cli.io.terminal import INTERVAL, Display
from bass_cli.io.usage import Gain, Usage, describe
from bass_cli.system.host import gigabytes

if TYPE_CHECKING:
    from bass_cli.io.results import Completion
    from bass_cli.io.runlog import RunLog

_LEAST_SECONDS = 0.5  # of decoding, before a speed is shown
_LEAST, _SHARE = 3, 0.02  # items, and share of all items, that are done before an estimate


class Screen:
    """Progress, messages and results of one command. It counts the samples of this run.

    Args:
        quiet: Show errors and results only.
        document: Standard output gets a JSON document, so text for people goes to stderr.
        render: Changes a message before it is shown. Messages name options by their fields, and
            the command line shows flags.
        verbose: The summary has the acceptance rate, busy rows and where the seconds went.

    Attributes:
        log: Gets all events, if it is set.
    """

    def __init__(
        self,
        quiet: bool = False,
        *,
        document: bool = False,
        render: Callable[[str], str] = str,
        verbose: bool = False,
    ) -> None:
        self._quiet, self._document, self._verbose = quiet, document, verbose
        self.render = render
        self.log: RunLog | None = None
        self._display = Display(quiet=quiet)
        self._bytes = (0, 0)  # read so far and in all, in this phase
        self._counting = False  # whether the progress is of something other than samples
        self._reset(None, 1)

    def _reset(self, total: int | None, rows: int) -> None:
        self._total = total
        self._began = time.monotonic()
        self._decoding: float | None = None  # when the first round began
        self._samples = self._tokens = self._rounds = self._drafted = self._accepted = 0
        self._live_tokens = self._live_rows = self._live_accepted = 0
        self._reasons: dict[str, int] = {}
        self._estimate, self._live = Estimate(total), True
        self._beside: Callable[[], str] | None = None
        self._usage, self._gain = Usage(rows, total), Gain()

    def phase(self, name: str, *, live: bool = True) -> None:
        """Show the name of a phase, until something else is shown.

        `live`: False if libraries may write to the terminal meanwhile.
        """
        began, self._bytes = time.monotonic(), (0, 0)
        self._usage.phase(name)
        if self.log is not None:
            self.log.phase(name)

        def lines() -> list[str]:
            spent, (done, whole) = time.monotonic() - began, self._bytes
            rate = f", {gigabytes(round(done / spent))}/s" if spent > 0 else ""
            read = f": {gigabytes(done)} of {gigabytes(whole)}{rate}" if whole else ""
            return [f"{name}{read}, {clock(spent)} elapsed"]

        def share() -> float | None:
            done, whole = self._bytes
            return done / whole if whole else None

        self._display.show(lines, share=share, live=live, first=INTERVAL)

    def bytes_read(self, done: int, whole: int) -> None:
        """Report that `done` of `whole` bytes of this phase are read."""
        self._bytes = (done, whole)
        self._display.tick()

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
        if self.log is not None:
            self.log.event("sampling", samples=total, rows=rows)
        self._show_samples()

    def round(
        self,
        accepted: int,
        rows: int,
        seconds: float,
        capturing: float = 0.0,
        capacity: int | None = None,
        *,
        drafted: int = 0,
        waiting: float = 0.0,
        plain: float = 0.0,
        refills: bool = False,
    ) -> None:
        """Count a finished round.

        Args:
            accepted: The accepted drafts of all rows; each row also got one token of the target.
            rows: Its live rows.
            seconds: Its time, without `capturing`.
            capturing: Seconds of capturing graphs.
            capacity: The rows of the batch, if they have changed.
            drafted: The drafts of all rows.
            waiting: Seconds in which the device waited for the host, not part of `seconds`.
            plain: Seconds of a plain round of these rows; 0 if unknown.
            refills: Whether samples wait for a row.
        """
        self._usage.round(rows, seconds, capturing, capacity, refills=refills)
        self._gain.round(drafted, rows, accepted, seconds + waiting, plain)
        if self.log is not None:
            self.log.round(
                self._samples,
                rounds=1,
                rows=rows,
                tokens=accepted + rows,
                accepted=accepted,
                drafted=drafted,
                seconds=seconds,
                capturing=capturing,
                waiting=waiting,
            )
        if self._decoding is None:
            self._begin_decoding(time.monotonic() - seconds)
        self._count_rounds(accepted + rows, rows, accepted)

    def drafts(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Count the drafts of a round by their place: how many each row had, and kept."""
        self._usage.drafts(drafted, accepted)

    def rounds(self, tokens: int, rows: int, accepted: int) -> None:
        """Count rounds of other processes by their tokens, live rows and accepted drafts, each
        summed."""
        if self.log is not None:
            self.log.round(self._samples, tokens=tokens, accepted=accepted, row_rounds=rows)
        self._count_rounds(tokens, rows, accepted)

    def _count_rounds(self, tokens: int, rows: int, accepted: int) -> None:
        if self._decoding is None:
            self._begin_decoding(time.monotonic())
        self._live_tokens += tokens
        self._live_rows += rows
        self._live_accepted += accepted
        self._display.tick()

    def advance(self, completion: Completion) -> None:
        """Count a finished sample; the tokens of a copy do not count."""
        self._usage.sample()
        self._samples += 1
        self._tokens += completion.tokens if completion.copy_of is None else 0
        self._rounds += completion.rounds
        self._drafted += completion.drafted
        self._accepted += completion.accepted
        self._reasons[completion.finish_reason] = self._reasons.get(completion.finish_reason, 0) + 1
        self._estimate.update(self._samples, time.monotonic())
        self._display.tick()

    @contextlib.contextmanager
    def counting(
        self, what: str, total: int, *, beside: Callable[[], str] | None = None
    ) -> Iterator[Callable[[int, int], None]]:
        """Show progress of something other than samples.

        The context is a function that takes the number done and the number in all. `beside`
        returns a second line to show.
        """
        self._counting = True
        if self.log is not None:
            self.log.phase(what)
        began, counted, estimate = time.monotonic(), (0, total), Estimate(total)

        def lines() -> list[str]:
            known = f"{counted[0]}/{counted[1]} {what}, {self._times(began, estimate)}"
            return [known] if beside is None else [known, beside()]

        def step(done: int, whole: int) -> None:
            nonlocal counted
            counted = (done, whole)
            estimate.update(done, time.monotonic(), whole)
            self._display.tick()

        self._display.show(lines, share=lambda: counted[0] / max(counted[1], 1))
        try:
            yield step
        finally:
            self._counting = False
            self._display.hide()

    @contextlib.contextmanager
    def watching(
        self, line: Callable[[], str], share: Callable[[], float | None]
    ) -> Iterator[Callable[[], None]]:
        """Show a line and a bar that the caller computes; the context is a function that updates
        them."""
        self._display.show(lambda: [line()], share=share)
        try:
            yield self._display.tick
        finally:
            self._display.hide()

    def note(self, message: str) -> None:
        """Show a note above the progress display, unless quiet."""
        message = self.render(message)
        if self.log is not None:
            self.log.event("note", text=message)
        self._display.message(message)

    def detail(self, message: str) -> None:
        """Log a note; show it only if verbose."""
        if self._verbose:
            self.note(message)
        elif self.log is not None:
            self.log.event("note", text=self.render(message))

    def error(self, message: str | UserError) -> None:
        """Show an error, even if quiet."""
        self._display.hide()
        lines = message.lines if isinstance(message, UserError) else [message]
        lines = [self.render(line) for line in lines]
        if self.log is not None:
            self.log.event("error", text="; ".join(lines))
        terminal.error(*lines)

    def summary(self, output: str) -> dict[str, Any]:
        """Return the figures of this run.

        Acceptance is None if nothing was drafted, `without_drafts_seconds` also if the cost of
        plain rounds is not known.
        """
        seconds, gain = time.monotonic() - self._began, self._gain.seconds
        decoding = 0.0 if self._decoding is None else time.monotonic() - self._decoding
        return {
            "output": output,
            "samples": self._samples,
            "tokens": self._tokens,
            "seconds": round(seconds, 3),
            "decoding_seconds": round(decoding, 3),
            "without_drafts_seconds": None if gain is None else round(seconds + gain, 1),
            "tokens_per_second": round(self._tokens / decoding, 2)
            if self._tokens and decoding > 0
            else None,
            "accepted_per_round": round(self._accepted / self._rounds, 3) if self._rounds else None,
            "acceptance_rate": round(self._accepted / self._drafted, 4) if self._drafted else None,
            "finish_reasons": dict(sorted(self._reasons.items())),
            "usage": self._usage.summary(),
        }

    def close(self, summary: dict[str, Any] | None = None) -> None:
        """End the progress display and show the summary, in two lines unless verbose."""
        self._display.hide()
        if summary is None:
            return
        if self.log is not None:
            self.log.summary(summary)
        if self._quiet:
            return
        reasons = ", ".join(
            f"{count} {reason}" for reason, count in summary["finish_reasons"].items()
        )
        kept = f", {summary['kept']} of them kept" if "kept" in summary else ""
        terminal.line(
            f"{summary['samples']} samples ({reasons or 'nothing to do'}){kept} in "
            f"{summary['output']}"
        )
        known = summary["decoding_seconds"] >= _LEAST_SECONDS
        if self._verbose:
            self._show_details(summary, known=known)
        took = f"{summary['tokens']} tokens in {summary['seconds']:.1f} s"
        if (plain := summary["without_drafts_seconds"]) is not None and known:
            took += f"; without drafts about {plain:.{1 if plain < 100 else 0}f} s (an estimate)"
        terminal.line(took)

    @staticmethod
    def _show_details(summary: dict[str, Any], *, known: bool) -> None:
        """Show speed, acceptance, busy rows and phases. `known`: whether the speed is known."""
        if summary["tokens_per_second"] is not None and known:
            terminal.line(
                f"{summary['tokens_per_second']:.1f} tokens a second once the models were loaded"
            )
        if summary["acceptance_rate"] is not None:
            terminal.line(
                f"drafts accepted: {summary['accepted_per_round']:.2f} a round, "
                f"{summary['acceptance_rate']:.0%}"
            )
        if summary["usage"]["rounds"]:
            for line in describe(summary["usage"]):
                terminal.line(line)

    def say(self, line: str) -> None:
        """Write a line of results to stdout."""
        self._display.hide()
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
        self._display.hide()
        if self._document and self._quiet:
            return
        terminal.table(columns, rows, to=reader)

    def _figures(self) -> str:
        """Format the speed and the acceptance, each followed by a comma, if known."""
        seconds = time.monotonic() - (self._began if self._decoding is None else self._decoding)
        tokens, figures = max(self._live_tokens, self._tokens), ""
        if seconds >= _LEAST_SECONDS:
            figures += f"{tokens / seconds:.0f} tokens/s, "
        if self._live_rows:
            figures += f"{self._live_accepted / self._live_rows:.2f} accepted a round, "
        return figures

    def _sample_lines(self) -> list[str]:
        known = f"/{self._total}" if self._total is not None else ""
        times = self._times(self._began, self._estimate)
        line = f"{self._samples}{known} samples, {self._figures()}{times}"
        return [line] if self._beside is None else [line, self._beside()]

    def _times(self, began: float, estimate: Estimate) -> str:
        left = estimate.left(time.monotonic())
        rest = "" if left is None else f", about {clock(max(left, 1.0))} left"
        return f"{clock(time.monotonic() - began)} elapsed{rest}"

    def _begin_decoding(self, when: float) -> None:
        self._decoding = when
        self._estimate.update(0, when)
        if not self._counting:
            self._show_samples()

    def _show_samples(self) -> None:
        def share() -> float | None:
            return self._samples / self._total if self._total else None

        self._display.show(self._sample_lines, share=share, live=self._live)


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


def clock(seconds: float) -> str:
    """Format seconds as 1:05 or 2:00:00."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
