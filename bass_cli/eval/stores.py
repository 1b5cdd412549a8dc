"""Verdicts and scores in files that grow by a line each, so that a command can be continued.

Such a file is locked while it is open. judging.py gets the verdicts, and rank_command.py the scores
of rankers that run a model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from bass_cli.errors import MachineError, UserError
from bass_cli.io.saving import check_place, open_locked, refuse_foreign
from bass_cli.rank.ranking import Group, Ranker, Scores
from bass_cli.reading import finite, open_regular, os_errors_as, parse_object, text, whole

# The first keys of a line, by which a file is known to be one of these
_VERDICT, _SCORES = b'{"task_id": ', b'{"ranker": '
S = TypeVar("S", bound="_LineStore")


class _LineStore:
    """A file of JSON lines, open and locked.

    Raises:
        UserError: the file cannot be opened, is another one, or another process uses it.
    """

    def __init__(self, path: str, *, what: str, taken: str) -> None:
        self.path, self._what = path, what
        self._stream = open_locked(path, what, taken)
        try:
            self._stream.seek(0)
            self._stream.truncate(self._read())
        except BaseException:
            self._stream.close()
            raise

    def _read(self) -> int:
        """Read the lines. Returns the length of the file without a torn last line, in bytes."""
        raise NotImplementedError

    def _append(self, row: Mapping[str, Any]) -> None:
        """Append a line and flush it. MachineError if that fails."""
        with self._as_machine_error():
            self._stream.write(json.dumps(row).encode("ascii") + b"\n")
            self._stream.flush()

    def _as_machine_error(self) -> contextlib.AbstractContextManager[None]:
        remedy = "the earlier ones are kept; run the same command again to continue"
        return os_errors_as(MachineError, f"{self.path}: cannot write {self._what}", remedy)

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            with contextlib.suppress(OSError):  # closing tries again to write the buffer
                self._stream.close()

    def _finish(self) -> None:
        """Called when the block that uses the file has ended without an error."""


class Verdict(NamedTuple):
    """A line of the verdict file.

    Attributes:
        sha256: of the limits and the program.
        seconds: how long the program ran.
        isolation: what kept the program from the network, files and processes.
        tests: "base" or "plus" if the task has two sets of tests, else empty.
    """

    task_id: str
    sample: int
    sha256: str
    status: str
    detail: str
    seconds: float
    isolation: dict[str, str]
    tests: str = ""


def verdicts_path(path: str) -> str:
    """Return the path of the verdicts on a generation file."""
    return f"{path}.verdicts.jsonl"


def check_verdicts(path: str) -> None:
    """Raise UserError if the verdict file cannot be written or is another kind of file."""
    check_place(path, path)
    refuse_foreign(path, path, _has_verdicts, kind="a file of verdicts", remedy="move it away")


def _has_verdicts(content: bytes) -> bool:
    """Return whether a file begins with a verdict.

    A torn verdict, or one with a hole of zero bytes, counts too: a power cut leaves such lines.
    """
    first = content.splitlines(keepends=True)[0]
    return _parse(first) is not None or b"\0" in first or _begins(first, _VERDICT)


def _begins(content: bytes, beginning: bytes) -> bool:
    """Return whether content, which may be cut, begins like this."""
    return content.startswith(beginning) or beginning.startswith(content)


class VerdictStore(_LineStore):
    """The verdict file. `verdicts` has its lines by digest.

    Args:
        path: the file.
        ignore_existing: ignore the verdicts that the file has.

    Raises:
        UserError: as of any such file, or a line before the last one is broken.
    """

    def __init__(self, path: str, *, ignore_existing: bool = False) -> None:
        self.verdicts: dict[str, Verdict] = {}
        self._written: set[tuple[str, int, str]] = set()
        self._ignore_existing = ignore_existing
        check_verdicts(path)
        super().__init__(path, what="the verdicts", taken="another process is scoring this file")

    def _finish(self) -> None:
        """Sync the file to the disk. Verdicts lost in a power cut before are made again."""
        with self._as_machine_error():
            os.fsync(self._stream.fileno())

    def add(self, verdict: Verdict) -> None:
        """Append a verdict and flush it, unless the file has it. MachineError if that fails."""
        place = (verdict.task_id, verdict.sample, verdict.sha256)
        if place in self._written:
            return
        row = verdict._asdict()
        if not verdict.tests:
            del row["tests"]
        self._append(row)
        self._written.add(place)
        self.verdicts[verdict.sha256] = verdict

    def _read(self) -> int:
        end, broken = 0, 0
        for number, line in enumerate([] if self._ignore_existing else self._stream, 1):
            if b"\0" in line:  # a hole that a power cut left
                end += len(line) if line.endswith(b"\n") else 0
                continue
            if broken:
                raise UserError(
                    f"{self.path}:{broken}: this line is not a verdict; add `rejudge` to run all "
                    "programs again"
                )
            verdict = _parse(line)
            if verdict is None:
                broken = number
                continue
            end += len(line)
            self.verdicts[verdict.sha256] = verdict
            self._written.add((verdict.task_id, verdict.sample, verdict.sha256))
        return end


def _parse(line: bytes) -> Verdict | None:
    """Return the verdict of a line. None if the line is torn or something else."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = parse_object(line)
        isolation = row["isolation"]
        if not isinstance(isolation, dict):
            return None
        return Verdict(
            text(row["task_id"]),
            whole(row["sample"]),
            text(row["sha256"]),
            text(row["status"]),
            text(row["detail"]),
            finite(row["seconds"]),
            {key: text(word) for key, word in isolation.items()},
            text(row.get("tests", "")),
        )
    except (ValueError, KeyError):
        return None


def read_verdicts(path: str) -> dict[str, Verdict]:
    """Return the verdicts of a file by their digest. Empty if the file is missing.

    The file may be growing: it is not locked, and what is no verdict is passed over. UserError if
    the file cannot be read.
    """
    with os_errors_as(UserError, f"{path}: cannot read the verdicts"):
        try:
            stream = open_regular(path)
        except FileNotFoundError:
            return {}
        with stream:
            return {one.sha256: one for line in stream if (one := _parse(line)) is not None}


class ScoreStore(_LineStore):
    """The file of scores. It is removed when the scores are in the lines of the samples.

    Lines that cannot be read are scored again.
    """

    def __init__(self, path: str) -> None:
        self._known: dict[str, Scores] = {}
        check_place(path, path)
        refuse_foreign(
            path,
            path,
            lambda content: _begins(content, _SCORES),
            kind="a file of scores",
            remedy="move it away",
        )
        super().__init__(path, what="the scores", taken="another process is ranking this file")

    def _read(self) -> int:
        end = 0
        for line in self._stream:
            if not line.endswith(b"\n"):
                break
            end += len(line)
            with contextlib.suppress(ValueError, KeyError, TypeError):
                row = parse_object(line)
                found = [None if one is None else finite(one) for one in row["scores"]]
                self._known[text(row["sha256"])] = found
        return end

    def _finish(self) -> None:
        os.unlink(self.path)

    def __len__(self) -> int:
        return len(self._known)

    def get(self, digest: str) -> Scores | None:
        """Return known scores."""
        return self._known.get(digest)

    def add(self, name: str, digest: str, scores: Scores) -> None:
        """Append the scores of a group. MachineError if they cannot be written."""
        self._append({"ranker": name, "sha256": digest, "scores": list(scores)})
        self._known[digest] = scores


def digest_of(ranker: Ranker, group: Group) -> str:
    """Return the SHA-256 of everything that a ranker's scores of a group depend on."""
    samples = [[one.text, one.program] for one in group.candidates]
    parts = [ranker.name, ranker.identity, group.id, group.prompt, group.entry_point, samples]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
