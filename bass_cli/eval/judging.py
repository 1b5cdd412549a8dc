"""Programs to verdicts, each different program once, kept in a file so that an interrupted scoring
goes on.

How a program is run is the sandbox's matter; which verdicts make which figure is report.py's.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from types import TracebackType
from typing import IO, Any, NamedTuple, Protocol, cast

from bass_cli.errors import MachineError, UserError
from bass_cli.io.places import check_place, refuse_foreign
from bass_cli.io.reading import finite, parse_object, text, whole
from bass_cli.sandbox.jail.job_spec import Program

_BEGINNING = b'{"task_id": '  # of every verdict
DETAIL = 300  # characters kept of what a program said: enough for the last line of a traceback

Key = tuple[str, int]


class Judged(Protocol):
    """What the sandbox says of a program; only the status "passed" is a pass."""

    @property
    def status(self) -> str: ...
    @property
    def detail(self) -> str: ...
    @property
    def seconds(self) -> float: ...


class Ruling(NamedTuple):
    """A line of the verdict file. `sha256` is that of the limits and the program, `isolation`
    says how the sandbox kept the program in, `seconds` how long it ran."""

    task_id: str
    sample: int
    sha256: str
    status: str
    detail: str
    seconds: float
    isolation: dict[str, str]


def verdicts_path(path: str) -> str:
    """Where the verdicts on a generation file lie."""
    return f"{path}.verdicts.jsonl"


def digest(program: Program, limits: Mapping[str, Any]) -> str:
    """What a verdict depends on, as 64 hex digits: another program or other limits have to be
    judged again."""
    text = json.dumps(dict(limits), sort_keys=True, default=str) + "\n" + "\0".join(_texts(program))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _texts(program: Program) -> tuple[str, ...]:
    if isinstance(program, str):
        return (program,)
    return (program.text, program.tests, program.setup, *program.names)


def check_verdicts(path: str) -> None:
    """UserError where verdicts cannot be kept, or would be added to something else."""
    check_place(path, path)
    refuse_foreign(path, path, _is_ours, kind="a file of verdicts", remedy="move it away")


def _is_ours(content: bytes) -> bool:
    """Whether it begins with a verdict, whole, torn or with a hole, as a power cut leaves them."""
    first = content.splitlines(keepends=True)[0]
    return (
        _parse(first) is not None
        or b"\0" in first
        or first.startswith(_BEGINNING)
        or _BEGINNING.startswith(first)
    )


class VerdictStore:
    """The verdict file, open and locked: `rulings` by digest is what it holds; `add` appends one
    line and flushes it.

    A torn last line is cut off. UserError if the file cannot be opened, is broken elsewhere or
    in use by another process.
    """

    def __init__(self, path: str, *, anew: bool = False) -> None:
        self.path = path
        self.rulings: dict[str, Ruling] = {}
        self._written: set[tuple[str, int, str]] = set()
        check_verdicts(path)
        self._stream = _open_locked(path)
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
        """Put the lines on the disk; a power cut before costs verdicts, which are judged again."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            if kind is None:
                with self._refusals():
                    os.fsync(self._stream.fileno())

    def _close(self) -> None:
        with contextlib.suppress(OSError):  # it tries once more to write what it could not
            self._stream.close()

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """MachineError where the disk refuses what is done here."""
        try:
            yield
        except OSError as error:
            raise MachineError(
                f"{self.path}: cannot write the verdicts: {error.strerror}; those before are kept, "
                "and the same command goes on from there"
            ) from None

    def add(self, ruling: Ruling) -> None:
        """Append the line unless it is there; it is in the file when this returns. MachineError
        if the disk refuses it."""
        place = (ruling.task_id, ruling.sample, ruling.sha256)
        if place in self._written:
            return
        with self._refusals():
            self._stream.write(json.dumps(ruling._asdict()).encode("ascii") + b"\n")
            self._stream.flush()
        self._written.add(place)
        self.rulings[ruling.sha256] = ruling

    def _read(self, anew: bool) -> None:
        end, broken = 0, 0
        self._stream.seek(0)
        for number, line in enumerate([] if anew else self._stream, 1):
            if b"\0" in line:  # a power cut left a hole here
                end += len(line) if line.endswith(b"\n") else 0
                continue
            if broken:
                raise UserError(
                    f"{self.path}:{broken}: this is not a verdict; --rejudge runs all programs "
                    "again"
                )
            ruling = _parse(line)
            if ruling is None:
                broken = number
                continue
            end += len(line)
            self.rulings[ruling.sha256] = ruling
            self._written.add((ruling.task_id, ruling.sample, ruling.sha256))
        self._stream.truncate(end)


def _open_locked(path: str) -> IO[bytes]:
    try:
        stream = open(path, "a+b")  # noqa: SIM115 - the VerdictStore closes it
    except OSError as error:
        raise UserError(f"{path}: cannot write the verdicts: {error.strerror}") from None
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        stream.close()
        raise UserError(f"{path}: another process is scoring this file") from None
    return stream


def _parse(line: bytes) -> Ruling | None:
    """The verdict on a whole line, None if it is torn or something else."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = parse_object(line)
        isolation = row["isolation"]
        if not isinstance(isolation, dict):
            return None
        return Ruling(
            text(row["task_id"]),
            whole(row["sample"]),
            text(row["sha256"]),
            text(row["status"]),
            text(row["detail"]),
            finite(row["seconds"]),
            {key: text(word) for key, word in isolation.items()},
        )
    except (ValueError, KeyError):
        return None


class Executor(NamedTuple):
    """What runs programs: `run` gives verdicts as they come, by the key each program was given;
    see sandbox.Sandbox."""

    run: Callable[[Iterable[tuple[str, Program]]], Iterator[tuple[str, Judged]]]
    isolation: dict[str, str]


def judge(
    programs: Iterable[tuple[Key, Program]],
    ledger: VerdictStore,
    limits: Mapping[str, Any],
    *,
    open_executor: Callable[[], Executor],
    progress: Callable[[int, int], None],
) -> dict[Key, Ruling]:
    """A verdict for each key. What the ledger knows is not run; `open_executor` is called only if
    something is left to run.

    `progress` is told how many keys have their verdict, and how many keys there are.
    """
    waiting: dict[str, list[Key]] = {}
    texts: dict[str, Program] = {}
    digests: dict[Key, str] = {}
    for key, program in programs:
        name = digests[key] = digest(program, limits)
        if name in ledger.rulings:
            ledger.add(ledger.rulings[name]._replace(task_id=key[0], sample=key[1]))
            continue
        waiting.setdefault(name, []).append(key)
        texts.setdefault(name, program)
    done, total = len(digests) - sum(map(len, waiting.values())), len(digests)
    progress(done, total)
    with contextlib.closing(_run(texts, open_executor)) as verdicts:
        for name, verdict, isolation in verdicts:
            detail, seconds = verdict.detail[-DETAIL:], round(verdict.seconds, 3)
            for task_id, sample in waiting[name]:
                ledger.add(
                    Ruling(task_id, sample, name, verdict.status, detail, seconds, isolation)
                )
            done += len(waiting[name])
            progress(done, total)
    return {key: ledger.rulings[name] for key, name in digests.items()}


class Unreadable(NamedTuple):
    """The verdict on a text that Python cannot even read: a lone surrogate cannot be written to
    a file."""

    status: str = "failed"
    detail: str = "the program is not valid Unicode"
    seconds: float = 0.0


def _run(
    texts: Mapping[str, Program], open_executor: Callable[[], Executor]
) -> Generator[tuple[str, Judged, dict[str, str]], None, None]:
    """Verdicts as they come. Closed at once when anything goes wrong: that is what ends the
    programs that still run."""
    runnable = {name: text for name, text in texts.items() if all(map(_is_text, _texts(text)))}
    yield from ((name, Unreadable(), {}) for name in texts if name not in runnable)
    if runnable:
        executor = open_executor()
        running = cast(Generator[tuple[str, Judged], None, None], executor.run(runnable.items()))
        with contextlib.closing(running):
            for name, verdict in running:
                yield name, verdict, executor.isolation


def _is_text(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def isolation_of(rulings: Iterable[Ruling]) -> dict[str, str] | None:
    """How the programs were kept in; where verdicts of several machines or settings differ, all
    their words."""
    words: dict[str, set[str]] = {}
    for ruling in rulings:
        for key, word in ruling.isolation.items():
            words.setdefault(key, set()).add(word)
    return {key: " or ".join(sorted(found)) for key, found in words.items()} or None
