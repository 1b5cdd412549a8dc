"""`bass watch`: the progress of running or ended jobs, from their files of samples and manifests.

Nothing is written or locked, so a job never notices. Files are read line by line as they grow, in
all formats; of a parquet output that is its journal until the job ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import IO, Any

from bass_cli.errors import UserError, spelled
from bass_cli.io.compressed import BrokenDataError
from bass_cli.io.console import Screen, clock
from bass_cli.io.linefile import live_path, result_lines
from bass_cli.io.resume import manifest_path, part_of, read_manifest, samples_of
from bass_cli.io.terminal import Display
from bass_cli.reading import open_regular, parse_object

_PERIOD = 0.5  # seconds between two reads of the files, on a terminal
_LINES_PERIOD = 30.0  # seconds between two reports elsewhere, as for the progress of a job
_WINDOW = 60.0  # seconds that the speed is a mean of
_LEAST_WINDOW = 2.0  # seconds of it before there is a speed
_COLUMNS = 78  # of the last text
_LOCKS = "/proc/locks"


class WatchedFile:
    """What is known of the samples of one file.

    Attributes:
        samples, tokens, rounds, drafted, accepted: Sums over the lines read so far.
        reasons: Samples by finish reason.
        last: The id, the number and the text of the last sample.
        state: "not begun", "running", "finished", "stopped" (its process has ended too early), or
            "unknown" (no process of this machine writes to it).
    """

    def __init__(self, path: str):
        self.path, self.state = path, "not begun"
        self._stream: IO[bytes] | None = None
        self._file: IO[bytes] | None = None
        self._was_locked, self._unlocked = False, 0  # the number of reads since the lock is gone
        self._manifest: dict[str, Any] = {}
        self._marks: deque[tuple[float, int, int]] = deque()  # time, tokens, samples
        self._reset()

    def _reset(self) -> None:
        self.samples = self.tokens = self.rounds = 0
        self.drafted = self.accepted = 0
        self.reasons = Counter[str]()
        self.last: tuple[str, int, str] | None = None
        self._by_prompt = Counter[str]()
        self._torn = b""
        self._marks.clear()

    def read(self, now: float) -> None:
        """Read what is new. `now`: seconds of a clock that never goes back."""
        with contextlib.suppress(OSError, ValueError):
            self._manifest = read_manifest(self.path)
        live = live_path(self.path)
        try:
            self._open(live)
            self._read(live)
        except FileNotFoundError:
            return
        except OSError as error:
            raise UserError(f"{self.path}: cannot read it: {error.strerror or error}") from None
        self._marks.append((now, self.tokens, self.samples))
        while len(self._marks) > 2 and now - self._marks[1][0] >= _WINDOW:
            self._marks.popleft()
        self.state = self._state(live)

    def _open(self, live: str) -> None:
        """Open the file, again if another one has its name or if it was cut short."""
        status = os.stat(live)
        if self._file is not None:
            here = os.fstat(self._file.fileno())
            if os.path.samestat(status, here) and here.st_size >= self._file.tell():
                return
            self._file.close()
            self._reset()
        self._file, self._stream = open_regular(live), None

    def _read(self, live: str) -> None:
        """Count the whole lines that follow; a part of a line waits for the next read."""
        assert self._file is not None
        if self._stream is None:
            if not os.fstat(self._file.fileno()).st_size:
                return
            self._stream = result_lines(self._file, live)
        with contextlib.suppress(BrokenDataError):  # a block that is not yet written as a whole
            while line := self._stream.readline():
                line = self._torn + line
                if not line.endswith(b"\n"):
                    self._torn = line
                    return
                self._torn = b""
                with contextlib.suppress(ValueError):
                    self._count(parse_object(line))

    def _count(self, row: dict[str, Any]) -> None:
        is_ours = "sample" in row or isinstance(row.get("samples"), list)
        for one in samples_of(row) if is_ours else [row]:
            self.samples += 1
            if one.get("copy_of") is None:
                self.tokens += _number(one, "tokens")
                self.rounds += _number(one, "rounds")
                self.drafted += _number(one, "drafted")
                self.accepted += _number(one, "accepted")
            if is_ours:
                self.reasons[str(one.get("finish_reason"))] += 1
                self._by_prompt[str(one.get("id"))] += 1
            if isinstance(one.get("text"), str):
                self.last = str(one.get("id")), _number(one, "sample"), one["text"]

    def _state(self, live: str) -> str:
        if self._manifest.get("finished") is True:
            return "finished"
        locked = _is_locked(live)
        if locked:
            self._was_locked, self._unlocked = True, 0
            return "running"
        self._unlocked += 1
        # A job writes its manifest before it unlocks the file, so the next read decides.
        if self._was_locked and locked is False:
            return "stopped" if self._unlocked > 1 else "running"
        return "unknown"

    @property
    def expected(self) -> int | None:
        """Samples of the whole job; None if unknown."""
        value = self._manifest.get("expected")
        return value if type(value) is int and value >= self.samples else None

    @property
    def prompts(self) -> tuple[int, int | None]:
        """The prompts that have all their samples, and the prompts of the job, None if unknown."""
        results = part_of(self._manifest, "results")
        n, prompts = results.get("n"), results.get("prompts")
        n, best = n if type(n) is int else 1, results.get("best_of")
        n = min(n, best) if type(best) is int else n
        complete = sum(count >= n for count in self._by_prompt.values())
        known = prompts.get("count") if isinstance(prompts, dict) else None
        limit = results.get("limit")
        if type(known) is int and type(limit) is int:
            known = min(known, limit)
        is_whole = type(known) is int and results.get("shard") is None
        return complete, known if is_whole else None

    @property
    def _is_filtered(self) -> bool:
        """Whether `bass filter` wrote the file, which lacks samples of its prompts."""
        return bool(part_of(self._manifest, "results").get("filter"))

    def rate(self) -> tuple[float, float] | None:
        """Return tokens and samples a second over the last minute; None if not watched for long.

        Before that it is the mean of a run that is running: the manifest is written when a run
        begins, with the totals before it.
        """
        if self.state == "finished":
            seconds = part_of(self._manifest, "totals").get("seconds")
            if not isinstance(seconds, (int, float)) or seconds <= 0:
                return None
            return self.tokens / seconds, self.samples / seconds
        if self._marks and self._marks[-1][0] - self._marks[0][0] >= _LEAST_WINDOW:
            (began, tokens, samples), (now, more, further) = self._marks[0], self._marks[-1]
            return (more - tokens) / (now - began), (further - samples) / (now - began)
        if self.state != "running":  # the time since the manifest was written may be years
            return None
        try:
            before = self._manifest["totals"]
            spent = time.time() - manifest_path(self.path).stat().st_mtime
            tokens, samples = self.tokens - before["tokens"], self.samples - before["samples"]
        except (OSError, KeyError, TypeError):
            return None
        return (tokens / spent, samples / spent) if spent >= _LEAST_WINDOW else None

    @property
    def left(self) -> float | None:
        """Seconds left at the present speed; None if unknown."""
        rate, expected = self.rate(), self.expected
        if rate is None or expected is None or rate[1] <= 0 or self.state != "running":
            return None
        return (expected - self.samples) / rate[1]

    def document(self) -> dict[str, Any]:
        """Return all figures, for --json."""
        complete, prompts = self.prompts
        rate = self.rate()
        return {
            "file": self.path,
            "state": self.state,
            "samples": self.samples,
            "expected": self.expected,
            "prompts_complete": None if self._is_filtered else complete,
            "prompts": prompts,
            "tokens": self.tokens,
            "finish_reasons": dict(sorted(self.reasons.items())),
            "tokens_per_second": None if rate is None else round(rate[0], 2),
            "seconds_left": None if self.left is None else round(self.left, 1),
            "accepted_per_round": round(self.accepted / self.rounds, 3)
            if self.rounds and self.drafted
            else None,
            "last": None if self.last is None else dict(zip(_LAST, self.last, strict=True)),
        }

    def line(self) -> str:
        """Return the most important figures in one line."""
        return f"{self.path}: {', '.join([_STATES[self.state], *self._progress()])}"

    def lines(self) -> list[str]:
        """Return all figures as lines."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.reasons.items()))
        complete, prompts = self.prompts
        of = "" if prompts is None else f" of {prompts}"
        found = [f"{self.path}: {_STATES[self.state]}", f"  {', '.join(self._progress())}"]
        if self.reasons:
            whole = "" if self._is_filtered else f"{complete}{of} prompts complete; "
            found.append(f"  {whole}ended by: {reasons}")
        if self.rounds and self.drafted:
            found.append(f"  drafts accepted: {self.accepted / self.rounds:.2f} a round")
        if self.last is not None:
            id_, sample, text = self.last
            found.append(_cut(f'  the last sample, {sample} of "{id_}": {text}'))
        return found

    def _progress(self) -> Iterable[str]:
        of = "" if self.expected is None else f" of {self.expected}"
        yield f"{self.samples}{of} samples"
        rate, left = self.rate(), self.left
        if self.tokens:
            yield f"{self.tokens} tokens"
        if rate is not None and rate[0] > 0:
            yield f"{rate[0]:.0f} a second"
        if left is not None:
            yield f"about {clock(max(left, 1.0))} left"


_LAST = ("id", "sample", "text")
_STATES = {
    "not begun": "no sample yet",
    "running": "running",
    "finished": "finished",
    "stopped": "stopped before its end",
    "unknown": "not finished; no process of this machine writes to it",
}


def watch(paths: Sequence[str], screen: Screen, *, once: bool, document: bool) -> tuple[Any, bool]:
    """Show the progress of the files until their runs have ended.

    Args:
        once: Show it once.
        document: Show nothing; for a caller that prints the figures.

    Returns:
        The figures of all files, and whether no run has stopped before its end.

    Raises:
        UserError: None of the files exists, or one cannot be read.
    """
    files = [WatchedFile(path) for path in dict.fromkeys(paths)]
    if not any(os.path.exists(live_path(one.path)) for one in files):
        raise UserError(
            f"{files[0].path}: there is no such file; name the --out of a job that has begun"
        )
    on_terminal = sys.stderr.isatty() and not once and not document
    display, printed = Display(quiet=not on_terminal), -_LINES_PERIOD
    display.show(lambda: lines_of(files), share=lambda: share_of(files))
    try:
        while True:
            now = time.monotonic()
            for one in files:
                one.read(now)
            ended = once or all(one.state in ("finished", "stopped") for one in files)
            if not (on_terminal or ended or document) and now - printed >= _LINES_PERIOD:
                printed = now
                for line in lines_of(files):
                    screen.say(line)
            if ended:
                break
            time.sleep(_PERIOD if on_terminal else 2 * _PERIOD)
    finally:
        display.hide()
    for line in [] if document else lines_of(files):
        screen.say(line)
    return [one.document() for one in files], all(one.state != "stopped" for one in files)


def lines_of(files: Sequence[WatchedFile]) -> list[str]:
    """Return the lines of one file, or a line for each of several and one for all."""
    if len(files) == 1:
        return files[0].lines()
    samples, tokens = (sum(getattr(one, key) for one in files) for key in ("samples", "tokens"))
    wholes = [one.expected for one in files]
    known = [whole for whole in wholes if whole is not None]
    of = f" of {sum(known)}" if len(known) == len(wholes) else ""
    rates = [rate for one in files if one.state == "running" and (rate := one.rate())]
    speed = f", {sum(rate[0] for rate in rates):.0f} a second" if rates else ""
    lefts = [one.left for one in files if one.state == "running"]
    times = [left for left in lefts if left is not None]
    left = f", about {clock(max(*times, 1.0))} left" if times and len(times) == len(lefts) else ""
    every = f"all {len(files)}: {samples}{of} samples, {tokens} tokens{speed}{left}"
    return [*(one.line() for one in files), every]


def share_of(files: Sequence[WatchedFile]) -> float | None:
    """Return the share of the samples that are done; None if unknown."""
    wholes = [one.expected for one in files]
    known = [whole for whole in wholes if whole is not None]
    if len(known) < len(wholes) or not sum(known):
        return None
    return sum(one.samples for one in files) / sum(known)


def _is_locked(path: str) -> bool | None:
    """Whether a process of this machine has locked the file, as a job does; None if unknown.

    The system's list of locks is read, because testing a lock could disturb a job that begins.
    """
    try:
        inode = str(os.stat(path).st_ino)
        with open(_LOCKS, encoding="ascii", errors="replace") as listed:
            locks = [line.split() for line in listed]
    except OSError:
        return None
    # 1: FLOCK ADVISORY WRITE <process> <device>:<inode> 0 EOF
    return any(
        lock[1] == "FLOCK" and lock[5].rpartition(":")[2] == inode for lock in locks if lock[6:]
    )


def _number(row: dict[str, Any], key: str) -> int:
    value = row.get(key)
    return value if type(value) is int else 0


def _cut(text: str) -> str:
    """Return a text in one line that fits on a terminal."""
    shown = spelled(text)
    return shown if len(shown) <= _COLUMNS else f"{shown[: _COLUMNS - 3]}..."
