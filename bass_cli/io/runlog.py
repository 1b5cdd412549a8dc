"""Append what happens in a run to a file, one JSON object a line (`--log`).

Each line has `time` (UTC), `at` (seconds since the command started) and `event`. Rounds are summed
over about a second. Warnings of libraries are events too. Samples are in the output file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any, TextIO

from bass_cli import __version__
from bass_cli.errors import UserError
from bass_cli.io.saving import check_place, is_stream
from bass_cli.reading import os_errors_as

EVERY = 1.0  # seconds of rounds in a line; a day of decoding gives about 15 MB


class RunLog:
    """A log of one command. Lines are appended; each command begins with the event "start".

    Lines that cannot be written, as on a full disk, are dropped: they must not end a job.

    Args:
        path: The file.
        command: The name of the command.
        render: Changes the message of an error before it is written, as in Screen.
    """

    def __init__(self, path: str, command: str, *, render: Callable[[str], str] = str):
        _check(path)
        self._render = render
        with os_errors_as(UserError, f"`log` {path}: cannot write there"):
            self._file = open(path, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        self._began = self._since = time.monotonic()
        self._phase: tuple[str, float] | None = None
        self._sums: dict[str, float] = {}
        self._samples = 0
        self._show_warning, self._handler = warnings.showwarning, _Records(self)
        self.event("start", command=command, arguments=sys.argv[1:], version=__version__)

    def __enter__(self) -> RunLog:
        warnings.showwarning = self._warn
        logging.getLogger().addHandler(self._handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *rest: object
    ) -> None:
        logging.getLogger().removeHandler(self._handler)
        warnings.showwarning = self._show_warning
        self._end_rounds()
        self._end_phase()
        if error is not None:
            text = self._render(str(error)) or type(error).__name__
            self.event("error", kind=type(error).__name__, text=text)
        self.event("end", failed=error is not None)
        with contextlib.suppress(OSError):
            self._file.close()

    def event(self, event: str, **fields: Any) -> None:
        """Write a line."""
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        at = round(time.monotonic() - self._began, 3)
        line = {"time": now.replace("+00:00", "Z"), "at": at, "event": event, **fields}
        with contextlib.suppress(OSError, ValueError):  # ValueError: a thread after the end
            self._file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
            self._file.flush()

    def phase(self, name: str) -> None:
        """Begin a phase, such as loading the weights; it ends with the next one or a round."""
        self._end_rounds()
        self._end_phase()
        self._phase = name, time.monotonic()
        self.event("phase", name=name)

    def round(self, samples: int, **sums: float) -> None:
        """Count a finished round, or several of other processes.

        Args:
            samples: Samples that have finished so far.
            sums: Numbers that are summed over the rounds of a line: see `Screen.round`.
        """
        now = time.monotonic()
        if self._phase is not None:
            self._end_phase()
            self._since = now - sums.get("seconds", 0.0) - sums.get("capturing", 0.0)
        self._samples = samples
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0) + value
        if now - self._since >= EVERY:
            self._end_rounds()

    def summary(self, figures: Mapping[str, Any]) -> None:
        """Write the figures of the run, after its last rounds."""
        self._end_rounds()
        self.event("summary", **figures)

    def _end_rounds(self) -> None:
        """Write the sums of the rounds since the last such line."""
        now, sums = time.monotonic(), self._sums
        if sums:
            numbers = {name: round(value, 4) for name, value in sums.items()}
            if "seconds" in sums:
                spent = sums["seconds"] + sums["capturing"] + sums["waiting"]
                numbers["rows"] = round(sums["rows"] / sums["rounds"], 2)  # a mean
                numbers["between"] = round(max(now - self._since - spent, 0.0), 4)
            self.event("rounds", **numbers, samples=self._samples)
        self._since, self._sums = now, {}

    def _end_phase(self) -> None:
        if self._phase is not None:
            (name, began), self._phase = self._phase, None
            self.event("phase ended", name=name, seconds=round(time.monotonic() - began, 3))

    def _warn(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """Log a warning, then show it as before."""
        self.event("warning", source=category.__name__, text=str(message))
        self._show_warning(message, category, filename, lineno, file, line)


class _Records(logging.Handler):
    """Writes records of Python's logging from warnings on to the log."""

    def __init__(self, log: RunLog):
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.event("warning", source=record.name, text=record.getMessage())
        if logging.getLogger().handlers == [self] and logging.lastResort is not None:
            logging.lastResort.handle(record)  # as without this handler


def _check(path: str) -> None:
    """Raise UserError unless lines can be appended to the file: a new one, or a log."""
    if not path or is_stream(path):
        raise UserError("`log`: name a file; a stream is not a log")
    check_place(f"`log` {path}", path)
    if not os.path.exists(path):
        return
    with os_errors_as(UserError, f"`log` {path}: cannot read it"), open(path, "rb") as file:
        first = file.readline(1 << 16)
    try:
        is_log = not first.strip() or json.loads(first)["event"] == "start"
    except (ValueError, KeyError, TypeError):
        is_log = False
    if not is_log:
        raise UserError(f"`log` {path}: it exists and is not a log of bass; give another name")
