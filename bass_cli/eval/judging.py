"""Get verdicts on programs, and keep them in a file so that scoring can be continued.

Each distinct program runs once, in the sandbox. report.py computes figures from the verdicts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Generator, Iterable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

from bass_cli.errors import MachineError, UserError
from bass_cli.eval.tasks.task import Check
from bass_cli.io.saving import check_place, open_locked, refuse_foreign
from bass_cli.reading import (
    finite,
    is_unicode,
    open_regular,
    os_errors_as,
    parse_object,
    text,
    whole,
)
from bass_cli.sandbox.programs import Ending, Program, Sandbox

_BEGINNING = b'{"task_id": '  # every verdict starts like this
DETAIL = 300  # characters of a detail that are kept: enough for the last line of a traceback

Key = tuple[str, int]


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


def digest(program: Program, limits: Mapping[str, Any]) -> str:
    """Return the SHA-256 of everything that a verdict depends on: program and limits."""
    text = json.dumps(dict(limits), sort_keys=True, default=str) + "\n" + "\0".join(_texts(program))
    return content_digest(text)


def content_digest(content: str) -> str:
    """Return the SHA-256 of everything that a verdict depends on, as one text."""
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()


def _texts(program: Program) -> tuple[str, ...]:
    return (program.text, program.tests, program.setup, *program.names)


def check_verdicts(path: str) -> None:
    """Raise UserError if the verdict file cannot be written or is another kind of file."""
    check_place(path, path)
    refuse_foreign(path, path, _is_ours, kind="a file of verdicts", remedy="move it away")


def _is_ours(content: bytes) -> bool:
    """Return whether a file begins with a verdict.

    A torn verdict, or one with a hole of zero bytes, counts too: a power cut leaves such lines.
    """
    first = content.splitlines(keepends=True)[0]
    return (
        _parse(first) is not None
        or b"\0" in first
        or first.startswith(_BEGINNING)
        or _BEGINNING.startswith(first)
    )


class VerdictStore:
    """The verdict file, open and locked.

    `verdicts` has its lines by digest. `add` appends a line and flushes it. A torn last line is
    removed.

    Args:
        path: the file.
        anew: ignore the verdicts that the file has.

    Raises:
        UserError: the file cannot be opened, another line is broken, or another process uses it.
    """

    def __init__(self, path: str, *, anew: bool = False) -> None:
        self.path = path
        self.verdicts: dict[str, Verdict] = {}
        self._written: set[tuple[str, int, str]] = set()
        check_verdicts(path)
        taken = "another process is scoring this file"
        self._stream = open_locked(path, "the verdicts", taken)
        try:
            self._read(anew)
        except BaseException:
            self._stream.close()
            raise

    def __enter__(self) -> VerdictStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        """Sync the file to the disk. Verdicts lost in a power cut before are made again."""
        try:
            if kind is None:
                with self._as_machine_error():
                    os.fsync(self._stream.fileno())
        finally:
            with contextlib.suppress(OSError):  # closing tries again to write the buffer
                self._stream.close()

    def _as_machine_error(self) -> contextlib.AbstractContextManager[None]:
        """Turn an OSError into a MachineError."""
        remedy = "the earlier ones are kept; run the same command again to continue"
        return os_errors_as(MachineError, f"{self.path}: cannot write the verdicts", remedy)

    def add(self, verdict: Verdict) -> None:
        """Append a verdict and flush it, unless the file has it. MachineError if that fails."""
        place = (verdict.task_id, verdict.sample, verdict.sha256)
        if place in self._written:
            return
        with self._as_machine_error():
            row = verdict._asdict()
            if not verdict.tests:
                del row["tests"]
            self._stream.write(json.dumps(row).encode("ascii") + b"\n")
            self._stream.flush()
        self._written.add(place)
        self.verdicts[verdict.sha256] = verdict

    def _read(self, anew: bool) -> None:
        end, broken = 0, 0
        self._stream.seek(0)
        for number, line in enumerate([] if anew else self._stream, 1):
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
        self._stream.truncate(end)


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
    found: dict[str, Verdict] = {}
    with os_errors_as(UserError, f"{path}: cannot read the verdicts"):
        try:
            stream = open_regular(path)
        except FileNotFoundError:
            return found
        with stream:
            for line in stream:
                if (verdict := _parse(line)) is not None:
                    found[verdict.sha256] = verdict
    return found


def judge(
    programs: Iterable[tuple[Key, Program]],
    store: VerdictStore,
    limits: Mapping[str, Any],
    *,
    tests: str = "",
    open_sandbox: Callable[[], Sandbox],
    progress: Callable[[int, int], None],
) -> dict[Key, Verdict]:
    """Return a verdict for each key.

    Args:
        programs: (key, program) pairs.
        store: verdicts that are known. Their programs are not run; new verdicts are added.
        limits: limits of each program.
        tests: see Verdict.
        open_sandbox: called only if programs are left to run.
        progress: called with the number of keys that have a verdict and the number of keys.

    Raises:
        UserError: the tests of a problem cannot be used.
    """
    waiting: dict[str, list[Key]] = {}
    texts: dict[str, Program] = {}
    digests: dict[Key, str] = {}
    for key, program in programs:
        name = digests[key] = digest(program, limits)
        if name in store.verdicts:
            store.add(store.verdicts[name]._replace(task_id=key[0], sample=key[1], tests=tests))
            continue
        waiting.setdefault(name, []).append(key)
        texts.setdefault(name, program)
    done, total = len(digests) - sum(map(len, waiting.values())), len(digests)
    progress(done, total)
    with contextlib.closing(_run(texts, open_sandbox)) as endings:
        for name, ending, isolation in endings:
            detail, seconds = ending.detail[-DETAIL:], round(ending.seconds, 3)
            if ending.status == "unusable":
                raise UserError(
                    f'problem "{waiting[name][0][0]}" of the task\'s data: the set-up of its tests '
                    f"failed: {detail}; correct that problem, or leave it out"
                )
            verdict = Verdict("", 0, name, ending.status, detail, seconds, isolation, tests)
            for task_id, sample in waiting[name]:
                store.add(verdict._replace(task_id=task_id, sample=sample))
            done += len(waiting[name])
            progress(done, total)
    return {key: store.verdicts[name] for key, name in digests.items()}


def check_answers(
    cases: Iterable[tuple[Key, str, Callable[[], Check]]],
    store: VerdictStore,
    *,
    progress: Callable[[int, int], None],
    total: int,
) -> dict[Key, Verdict]:
    """Return a verdict for each key, of answers that are compared without a program.

    Args:
        cases: for each key, everything that the check depends on, and the check.
        store: verdicts that are known. Their checks are not run; new verdicts are added.
        progress: called with the number of cases that have a verdict and the number of cases.
        total: the number of cases.
    """
    found: dict[Key, Verdict] = {}
    for (task_id, sample), content, check in cases:
        name = content_digest(content)
        verdict = store.verdicts.get(name)
        if verdict is None:
            status, detail = check()
            verdict = Verdict(task_id, sample, name, status, detail[-DETAIL:], 0.0, {})
        found[task_id, sample] = verdict._replace(task_id=task_id, sample=sample)
        store.add(found[task_id, sample])
        progress(len(found), total)
    return found


def _run(
    texts: Mapping[str, Program], open_sandbox: Callable[[], Sandbox]
) -> Generator[tuple[str, Ending, dict[str, str]], None, None]:
    """Yield endings as programs finish. Closing this iterator kills the running programs.

    A text with a lone surrogate cannot be written to a file, so it fails without being run.
    """
    runnable = {name: text for name, text in texts.items() if all(map(is_unicode, _texts(text)))}
    for name in (one for one in texts if one not in runnable):
        yield name, Ending("failed", "the program is not valid Unicode", 0.0), {}
    if runnable:
        with (
            open_sandbox() as sandbox,
            contextlib.closing(sandbox.run(runnable.items())) as endings,
        ):
            for name, ending in endings:
                yield name, ending, sandbox.isolation._asdict()


def isolation_of(verdicts: Iterable[Verdict]) -> dict[str, str] | None:
    """Return how the programs were isolated. Differing verdicts are joined by "or"."""
    words: dict[str, set[str]] = {}
    for verdict in verdicts:
        for key, word in verdict.isolation.items():
            words.setdefault(key, set()).add(word)
    return {key: " or ".join(sorted(found)) for key, found in words.items()} or None
