"""Show progress, notes and errors of a command on standard error, and its results on stdout.

A Screen chooses the lines, estimates the time left, and counts where the seconds of a run go and
how busy its rows are. io/terminal.py writes all text.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bass_cli.errors import UserError, spelled
from bass_cli.io import terminal
from bass_cli.io.terminal import INTERVAL, Display
from bass_cli.system.host import gigabytes

if TYPE_CHECKING:
    from bass_cli.io.results import Completion

_LEAST_SECONDS = 0.5  # of decoding, before a speed is shown
_LEAST, _SHARE = 3, 0.02  # items, and share of all items, that are done before an estimate
_LAST = 0.05  # the share of samples in which rows empty at the end of any job


class Screen:
    """Progress, messages and results of one command. It counts the samples of this run.

    Args:
        quiet: Show errors and results only.
        document: Standard output gets a JSON document, so text for people goes to stderr.
        render: Changes a message before it is shown. Messages name options by their fields, and
            the command line shows flags.
    """

    def __init__(
        self, quiet: bool = False, *, document: bool = False, render: Callable[[str], str] = str
    ) -> None:
        self._quiet, self._document = quiet, document
        self.render = render
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
        self._usage = Usage(rows, total)

    def phase(self, name: str, *, live: bool = True) -> None:
        """Show the name of a phase, until something else is shown.

        `live`: False if libraries may write to the terminal meanwhile.
        """
        began, self._bytes = time.monotonic(), (0, 0)
        self._usage.phase(name)

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
        self._show_samples()

    def round(
        self,
        accepted: int,
        rows: int,
        seconds: float,
        capturing: float = 0.0,
        capacity: int | None = None,
    ) -> None:
        """Count a finished round.

        Args:
            accepted: The accepted drafts of all rows; each row also got one token of the target.
            rows: Its live rows.
            seconds: Its time, without `capturing`.
            capturing: Seconds of capturing graphs.
            capacity: The rows of the batch, if they have changed.
        """
        self._usage.round(rows, seconds, capturing, capacity)
        if self._decoding is None:
            self._begin_decoding(time.monotonic() - seconds)
        self.rounds(accepted + rows, rows, accepted)

    def rounds(self, tokens: int, rows: int, accepted: int) -> None:
        """Count rounds by their tokens, live rows and accepted drafts, each summed."""
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
        self._display.message(self.render(message))

    def error(self, message: str | UserError) -> None:
        """Show an error, even if quiet."""
        self._display.hide()
        lines = message.lines if isinstance(message, UserError) else [message]
        terminal.error(*map(self.render, lines))

    def summary(self, output: str) -> dict[str, Any]:
        """Return the figures of this run; acceptance is None if nothing was drafted."""
        seconds = time.monotonic() - self._began
        decoding = 0.0 if self._decoding is None else time.monotonic() - self._decoding
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
        self._display.hide()
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


class Usage:
    """Counts of one run, from now on.

    Args:
        capacity: The rows of the batch.
        total: The number of samples to come; None if unknown.
    """

    def __init__(self, capacity: int, total: int | None):
        self._capacity = capacity
        self._early = None if total is None else total * (1 - _LAST)
        self._phases: dict[str, float] = defaultdict(float)
        self._phase, self._since = "starting", time.monotonic()
        self._begun = False  # whether there was a round
        self._rounds = self._live = self._most = 0  # live rows: of all rounds, of the fullest
        self._places = 0  # the sum of capacities over all rounds
        self._full = self._draining = self._capturing = 0.0
        self._samples, self._busy_early = 0, (0, 0)

    def phase(self, name: str) -> None:
        """Begin a phase; it ends with the next phase or the first round."""
        self._end_phase(time.monotonic())
        self._phase = name

    def round(
        self, rows: int, seconds: float, capturing: float = 0.0, capacity: int | None = None
    ) -> None:
        """Count a finished round.

        Args:
            rows: Its live rows.
            seconds: Its time, without `capturing`.
            capturing: Seconds of capturing graphs for it.
            capacity: The rows of the batch from now on; fewer after memory ran out.
        """
        if capacity is not None and capacity != self._capacity:
            self._capacity, self._most = capacity, 0
        if not self._begun:
            self._end_phase(time.monotonic() - seconds - capturing)
            self._begun, self._phase = True, "between rounds"
        self._rounds += 1
        self._live += rows
        self._places += self._capacity
        self._capturing += capturing
        self._draining += seconds
        if rows >= self._most:  # the batch was not draining until now
            self._most = rows
            self._full, self._draining = self._full + self._draining, 0.0

    def sample(self) -> None:
        """Count a finished sample."""
        self._samples += 1
        if self._early is not None and self._samples <= self._early:
            self._busy_early = (self._live, self._places)

    def summary(self) -> dict[str, Any]:
        """Return the counts.

        `rows`: the rows of the batch at the end. `rows_busy`: the mean share of live rows over all
        rounds. `rows_busy_early`: the same before the last 5 % of samples; None if there were no
        such rounds. `phases`: seconds by phase.
        """
        phases = dict(self._phases)
        phases[self._phase] = self._phases[self._phase] + time.monotonic() - self._since
        if self._begun:
            rounds = {
                "decoding": self._full,
                "draining": self._draining,
                "capturing graphs": self._capturing,
            }
            rest = phases.pop("between rounds") - sum(rounds.values())
            phases |= {**rounds, "between rounds": max(rest, 0.0)}
        return {
            "rows": self._capacity,
            "rounds": self._rounds,
            "rows_busy": self._share(self._live, self._places),
            "rows_busy_early": self._share(*self._busy_early),
            "phases": {name: round(seconds, 3) for name, seconds in phases.items()},
        }

    @staticmethod
    def _share(live: int, places: int) -> float | None:
        return round(live / places, 4) if places else None

    def _end_phase(self, when: float) -> None:
        spent = max(when - self._since, 0.0)
        self._phases[self._phase] += spent
        self._since += spent


def together(usages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the summaries of several processes; rows and seconds are summed."""
    phases: dict[str, float] = {}
    for usage in usages:
        for name, seconds in usage["phases"].items():
            phases[name] = round(phases.get(name, 0.0) + seconds, 3)
    places = sum(one["rounds"] * one["rows"] for one in usages)
    live = sum(one["rounds"] * one["rows"] * (one["rows_busy"] or 0.0) for one in usages)
    return {
        "rows": sum(one["rows"] for one in usages),
        "rounds": sum(one["rounds"] for one in usages),
        "rows_busy": round(live / places, 4) if places else None,
        "rows_busy_early": None,
        "phases": phases,
        "actors": len(usages),
    }


def describe(usage: dict[str, Any]) -> str:
    """Return a summary with rounds as a line of text. It has no seconds if every phase is shorter
    than 0.05 s."""
    early = usage["rows_busy_early"]
    until = "" if early is None else f" ({early:.0%} until the last 5% of samples)"
    phases = ", ".join(
        f"{name} {seconds:.1f}" for name, seconds in usage["phases"].items() if seconds >= 0.05
    )
    whose = f" of {usage['actors']} actors together" if "actors" in usage else ""
    spent = f"; seconds{whose}: {phases}" if phases else ""
    return f"rows busy: {usage['rows_busy']:.0%} of {usage['rows']}{until}{spent}"
