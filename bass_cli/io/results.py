"""Completions, the finished samples, and files of them: result lines with a manifest beside them.

A file can be continued: the manifest's "results" are compared, key by key, before a run does so. A
file is not changed before the first new line, or the end of the run, so a run that fails early
leaves it as it was. A killed process loses no line that `write` returned for; a power cut loses at
most SYNC_SECONDS. io/linefile.py has the formats; io/saving.py says which files may be written.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import IO, Any

import numpy
from numpy.typing import NDArray

from bass_cli.errors import MachineError, UserError
from bass_cli.io.linefile import LineFile, journal_of, live_path, result_lines
from bass_cli.io.parquet import write_parquet
from bass_cli.io.resume import (
    COUNTED,
    DamagedManifestError,
    OutputState,
    PromptDigest,
    check_manifest,
    check_output_place,
    fault_of_line,
    is_failed,
    is_marked,
    known_seconds,
    manifest_path,
    mark,
    now,
    origin_of,
    read_output,
    result_rows,
    write_manifest,
)
from bass_cli.io.saving import (
    copy_aside,
    descriptor_of,
    is_at,
    is_stream,
    open_locked,
    present_name,
    remove_drafts,
    replace_file,
    sync_folder,
)
from bass_cli.io.terminal import json_on_a_terminal
from bass_cli.reading import os_errors_as, without_nan

# seconds between syncs to disk; a sync takes about 10 ms, too long for every line
SYNC_SECONDS = 5.0
LOGPROB_DIGITS = 7  # decimals of a token's log-probability; float32 has no more
STANDARD_OUTPUT = "standard output"  # the name of its writer
_COUNTED = ("finish_reason", "copy_of", *COUNTED)


Pairs = list[list[int | float]]  # token ids and log-probabilities


@dataclass(frozen=True, slots=True)
class Completion:
    """One sample of one prompt. The fields are those of a result line, in order.

    Logarithms are natural; times are in seconds.

    `token_ids` are all tokens that were drawn, in order. The token that ended the sample is among
    them: the end-of-sequence token, a special token that is a stop, or the last token of a stop
    text. `tokens` is their number; `sum_logprob` and `mean_logprob` cover all of them. `text` is
    their text before that end, without special tokens. It has neither a stop text nor what follows
    the stop text in its last token. A stop text may begin inside a token, so in general no list of
    ids decodes to `text`.

    `token_logprobs` has a number for each of `token_ids`, and `top_logprobs` pairs of token id and
    number for the likeliest tokens in the place of each, likeliest first. They are rounded to
    LOGPROB_DIGITS decimals. A token of probability 0 is not listed.

    `token_drafted` has 1 for each of `token_ids` that was an accepted draft, and 0 for each token
    of the target. Its sum is `accepted`, so a copy has zeros.

    `prompt_token_ids`, `prompt_logprobs` and `prompt_top_logprobs` are the same for the tokens of
    the prompt. Only sample 0 has them. The first token has no number, but None.

    `perplexity` is exp(-mean_logprob); `bass logprobs` sets it.

    `reasoning` is the thinking part, and `reasoning_tokens` the number of its tokens with the tags.
    Then `text`, `sum_logprob` and `mean_logprob` are those of the answer after it; without an
    answer the two numbers are None. `tokens` and the ids are those of both parts.

    With `echo` there are `prompt`, if it was a text, `messages`, if the chat template was used, or
    `prompt_token_ids`.

    `rank` is the place among the samples of the prompt, from 1, and `scores` has the scores by
    ranker. `bass generate` sets them with `best_of`.

    `copy_of` is the number of the sample that this one is a copy of. `task_id` and `completion` are
    set by evaluations, for public scorers.
    """

    id: str
    sample: int
    text: str
    finish_reason: str
    tokens: int
    mean_logprob: float | None
    sum_logprob: float | None
    seconds: float
    rounds: int
    drafted: int
    accepted: int
    seed: int
    prompt_tokens: int
    meta: dict[str, Any] = field(default_factory=dict)
    token_ids: list[int] | None = None
    token_logprobs: list[float] | None = None
    top_logprobs: list[Pairs] | None = None
    token_drafted: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[Pairs | None] | None = None
    perplexity: float | None = None
    reasoning: str | None = None
    reasoning_tokens: int | None = None
    error: str | None = None
    copy_of: int | None = None
    task_id: str | None = None
    completion: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    rank: int | None = None
    scores: dict[str, float | None] | None = None

    @classmethod
    def failed(cls, prompt_id: str, error: str, *, seed: int, meta: dict[str, Any]) -> Completion:
        """Make the single line of a prompt that could not be run."""
        return cls(
            prompt_id, 0, "", "error", 0, None, None, 0.0, 0, 0, 0, seed, 0, meta, error=error
        )

    @property
    def is_of_prompt(self) -> bool:
        """Whether this is the single line of a prompt that could not be run, not a sample."""
        return self.finish_reason == "error" and not self.prompt_tokens

    def copied(self, sample: int) -> Completion:
        """Copy it to another sample number; the copy has no rounds and no drafts."""
        return replace(
            self,
            sample=sample,
            rounds=0,
            drafted=0,
            accepted=0,
            copy_of=self.sample,
            token_drafted=self.token_drafted and [0] * len(self.token_drafted),
            prompt_token_ids=None,
            prompt_logprobs=None,
            prompt_top_logprobs=None,
        )

    def row(self) -> dict[str, Any]:
        """Return the fields of its line, without those of _OPTIONAL that are None."""
        row = {name: getattr(self, name) for name in NAMES}
        for name in _OPTIONAL:
            if row[name] is None:
                del row[name]
        return row

    def to_line(self) -> str:
        """Return `line_of` its row."""
        return line_of(self.row())


def line_of(row: dict[str, Any]) -> str:
    """Format one line of strict JSON, without a line end.

    NaN and infinity become null, and lone surrogates are escaped.
    """
    try:
        line = _encode(row)
    except ValueError:
        row = without_nan(row)
        line = _encode(row)
    try:
        line.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(row, allow_nan=False, default=str)
    return line


def rounded(logprobs: Any) -> Any:
    """Return log-probabilities, a sequence or an array, as lists of rounded numbers."""
    found = numpy.round(numpy.asarray(logprobs, dtype=numpy.float64), LOGPROB_DIGITS)
    return (found + 0.0).tolist()  # -0.0 becomes 0.0


def numbers_in(entries: NDArray[numpy.int64]) -> NDArray[numpy.float32]:
    """Return the log-probabilities in entries (bass_kernels.report_entries)."""
    return numpy.ascontiguousarray(entries.astype(numpy.int32)).view(numpy.float32)


def paired(entries: NDArray[numpy.int64]) -> list[Pairs]:
    """Return pairs of token id and rounded log-probability by place, without those of probability
    0, from entries [places, K]."""
    return [
        [[id_, number] for id_, number in zip(*lines, strict=True) if number > -math.inf]
        for lines in zip((entries >> 32).tolist(), rounded(numbers_in(entries)), strict=True)
    ]


def reported(
    top: int | None, scores: Sequence[float], entries: NDArray[numpy.int64], *, processed: bool
) -> dict[str, Any]:
    """Return the fields `token_logprobs` and `top_logprobs` of a sample.

    Args:
        top: How many likeliest tokens are listed; None if neither field is wanted.
        scores: The tokens' log-probabilities by the model's own distribution.
        entries: Of the likeliest tokens; with `processed` of the token itself before them.
        processed: Whether the numbers are of the processed distribution.
    """
    if top is None:
        return {}
    numbers: Any = scores
    if processed:
        numbers, entries = numbers_in(entries[:, :1]).ravel(), entries[:, 1:]
    return {"token_logprobs": rounded(numbers), "top_logprobs": paired(entries) if top else None}


NAMES = tuple(entry.name for entry in fields(Completion))
_OPTIONAL = tuple(entry.name for entry in fields(Completion) if entry.default is None)
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=str).encode


class Writer:
    """Append completions to an output, one system call a line.

    `done` has the samples that the file held before; `notes` are for the user.
    """

    def __init__(
        self,
        name: str,
        file: LineFile,
        *,
        manifest: dict[str, Any] | None,
        past: OutputState,
        created: bool,
        moves: bool = False,
    ) -> None:
        self.name = name
        self.done = frozenset(past.done)
        self.totals = past.totals
        self.notes: list[str] = []
        self.complete = True  # whether nothing is left to draw after an end without an error
        self._file = file  # of another name than the output if it is a journal
        self._moves = moves  # whether the lines before are in the output, not in its journal
        self._manifest = manifest
        self._past = past
        self._created = created  # by this run
        self._begun = False  # whether this run has changed the file
        self._idle = False  # whether the lines of a parquet file stay as they are
        self._gone = False  # whether the file lost its name
        self._origin: dict[str, Any] = {"begun": now(), "written": None}  # see origin_of
        self._added = False  # whether this run has added a line
        self._synced = time.monotonic()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close(finished=kind is None)

    def write(self, completion: Completion) -> None:
        """Append one completion; MachineError if it cannot be written."""
        row = {name: getattr(completion, name) for name in _COUNTED}
        self.append_row(completion.row(), row)

    def append_row(self, row: dict[str, Any], counts: dict[str, Any]) -> None:
        """Append the line of a row. `counts`: as `row` of `append`."""
        line = line_of(row)
        if self._manifest is None and self._file.stream.isatty():
            line = json_on_a_terminal(line)
        self.append(line.encode("utf-8") + b"\n", counts)

    def append(self, line: bytes, row: dict[str, Any]) -> None:
        """Append a finished line. `row` has at least the fields that totals are made of."""
        if not self._begun:
            self._begin(appending=True)
        with self._refusals():
            self._file.add(line)
        self._added = True
        self._past.count(row)
        if self._manifest is not None and time.monotonic() - self._synced >= SYNC_SECONDS:
            with self._refusals():
                self._sync()
        self.confirm()

    def confirm(self) -> None:
        """Raise MachineError if the output was renamed, replaced or truncated by another program.

        The samples are saved first, and the message says where.
        """
        if self._manifest is None or self._gone:
            return
        stream, path = self._file.stream, self._file.name
        size = os.fstat(stream.fileno()).st_size
        if is_at(stream, path):
            if size < self._file.end:
                self._gone = True
                raise MachineError(
                    f"{path}: another program cut it short while samples were written to it; "
                    "run the same command again to draw the missing samples"
                )
            return
        self._gone = True  # the name, and its manifest, now belong to another file
        fault = f"{path}: it was deleted, renamed or replaced while samples were written to it"
        try:
            where = present_name(stream) or (str(copy_aside(stream, path)) if size else None)
            if where is not None and not manifest_path(where).exists():
                self._write_manifest(where, finished=False)
        except (OSError, MachineError) as error:
            raise MachineError(
                f"{fault}; they could not be saved: {getattr(error, 'strerror', error)}"
            ) from None
        if where is not None:
            fault += f"; they are in {where}, and the same command with `out` {where} goes on"
        raise MachineError(fault)

    @property
    def finished(self) -> bool:
        """Whether no sample in the file failed. A sample that a budget truncated did not fail."""
        return "error" not in self.totals["finish_reasons"]

    def add_run(self, seconds: float, usage: dict[str, Any]) -> None:
        """Add this run's seconds to the totals, unless earlier seconds are unknown.

        `usage` (io/console.py) describes this run alone.
        """
        if self._manifest is not None:
            self._manifest = self._manifest | {"last_run": usage}
        if self.totals["seconds"] is not None:
            self.totals["seconds"] = round(self.totals["seconds"] + seconds, 3)

    def close(self, *, finished: bool) -> None:
        """Write the manifest with the totals and close the file.

        An output that this run did not change is left as it was; a new empty one is removed.
        """
        try:
            if finished and not self._begun:
                self._begin(appending=False)
            if self._begun:
                self.confirm()
            if self._begun and self._manifest is not None and not self._gone:
                with contextlib.suppress(*([] if finished else [MachineError])):
                    with self._refusals():
                        self._file.finish()
                        self._sync()
                        if finished and self._file.name != self.name and not self._idle:
                            self._convert()
                    self._write_manifest(self.name, finished=finished and self.complete)
                    if finished and self._file.name != self.name:
                        os.unlink(self._file.name)  # a reader finds the lines in the output now
        finally:
            with contextlib.suppress(OSError):
                file = self._file
                if self._created and not self._begun and is_at(file.stream, file.name):
                    os.unlink(file.name)
            if self._file.stream is not sys.stdout.buffer:
                with contextlib.suppress(OSError):
                    self._file.stream.close()

    def _begin(self, *, appending: bool) -> None:
        """Remove torn and failed lines, then write the manifest.

        Each step is on the disk before the next one begins, so that old lines never have a new
        manifest, and new lines always have one.
        """
        self._begun = True
        if self._manifest is None:
            return
        self.confirm()
        if self._past.end or self._past.done:
            self._origin = origin_of(self.name)
        with self._refusals():
            remove_drafts(self.name)
            past = self._past
            self._idle = self._moves and not appending and not past.failed
            if not self._idle:
                changed = bool(past.failed or past.holes or self._moves)
                self._file.begin(self._kept(), past.end, changed=changed, appending=appending)
                if self._file.name != self.name and not past.end:  # an overwritten parquet file
                    Path(self.name).unlink(missing_ok=True)
            mark(self._file.stream, self._manifest["results"])
            self._sync()
            sync_folder(Path(os.path.realpath(self.name)).parent)
        self._write_manifest(self.name, finished=False)

    def _convert(self) -> None:
        """Make the parquet file of its journal."""

        def write(out: IO[bytes]) -> None:
            write_parquet(self._file.lines(), self._file.lines(), out)

        with replace_file(self.name, write) as stream:
            mark(stream, (self._manifest or {})["results"])

    def _kept(self) -> Iterator[bytes]:
        """Yield the lines that stay: whole lines of samples that did not fail."""
        with contextlib.ExitStack() as files:
            lines: Iterable[bytes] = self._file.lines()
            if self._moves:
                lines = result_lines(files.enter_context(open(self.name, "rb")), self.name)
            for _, line, row in result_rows(
                lines, self.name, OutputState(), lambda row, place: None
            ):
                if not is_failed(row):
                    yield line

    def _write_manifest(self, name: str, *, finished: bool) -> None:
        rest = {"finished": finished, "totals": self.totals}
        manifest = {"begun": self._origin["begun"], "written": now()} | (self._manifest or {})
        if not self._added:
            manifest |= self._origin
        write_manifest(name, manifest | rest)

    def _sync(self) -> None:
        self._file.sync()
        self._synced = time.monotonic()

    def _refusals(self) -> contextlib.AbstractContextManager[None]:
        """Turn an OSError into a MachineError."""
        remedy = "earlier lines are kept; run the same command again to continue"
        if self._manifest is None:
            remedy = ""
        return os_errors_as(MachineError, f"{self.name}: cannot write the results", remedy)


def open_output(
    path: str,
    manifest: dict[str, Any],
    *,
    resume: bool | None = None,
    overwrite: bool = False,
    prompt_ids: Callable[[], Mapping[str, Mapping[str, Any]]] | None = None,
    prompts: PromptDigest | None = None,
    read: Callable[[Iterable[bytes], str], OutputState] = read_output,
) -> Writer:
    """Open, check and lock an output; a UserError leaves the file as it was.

    An existing file is continued if its manifest has the same "results"; n, limit and the prompts
    may have grown. "-" and names like /dev/stdout are streams, without manifest and resuming.

    Args:
        path: The file, or "-".
        manifest: The manifest to write; "results" has the settings that change result lines.
        resume: True if the file must exist.
        overwrite: Start again, whatever the file holds.
        prompt_ids: Returns the prompts' own settings by id. If given, a file with a damaged
            manifest is continued if its lines fit.
        prompts: The digest of the prompts.
        read: Reads the lines of an existing file.
    """
    if overwrite and resume:
        raise UserError("`resume` and `overwrite` contradict each other; give one of them")
    if is_stream(path):
        option = "`resume`" if resume else "`overwrite`" if overwrite else None
        return _open_stream(path, option)
    place = journal_of(path) or path
    check_output_place(path, overwrite=overwrite)
    if resume and not (os.path.exists(path) or os.path.exists(place)):
        raise UserError(f"{path}: there is nothing to resume, because the file does not exist")
    created = not os.path.exists(place)
    stream = open_locked(place, "the output file", "another process is writing to this file")
    file, before = LineFile(stream, place), live_path(path)
    past, notes = OutputState(), list[str]()
    try:
        if not overwrite and os.path.exists(before) and os.path.getsize(before):
            with contextlib.nullcontext(stream) if before == place else open(before, "rb") as old:
                lines = file.lines() if before == place else result_lines(old, path)
                past, notes = _read_before(
                    old, lines, path, manifest["results"], prompt_ids, prompts, read
                )
        if past.done:
            past.totals["seconds"] = known_seconds(path, past.totals["samples"])
    except BaseException:
        stream.close()
        if created:
            os.unlink(place)
        raise
    moves = past.end > 0 and before != place
    writer = Writer(path, file, manifest=manifest, past=past, created=created, moves=moves)
    writer.notes = notes
    return writer


def _read_before(
    stream: IO[bytes],
    lines: Iterable[bytes],
    path: str,
    results: dict[str, Any],
    prompt_ids: Callable[[], Mapping[str, Mapping[str, Any]]] | None,
    prompts: PromptDigest | None,
    read: Callable[[Iterable[bytes], str], OutputState],
) -> tuple[OutputState, list[str]]:
    """Read the file, with notes for the user; UserError if this run may not continue it."""
    try:
        growth = check_manifest(path, results, prompts)
        past = read(lines, path)
    except DamagedManifestError as damaged:
        marked = is_marked(stream, results, prompts)
        if marked is False:
            raise UserError(
                f"{damaged}, or another `out`: it was begun with other settings"
            ) from None
        if prompt_ids is None:
            raise
        ids = prompt_ids()
        past = read_output(lines, path, lambda row: fault_of_line(row, results, ids))
        if not (marked or past.done or past.failed):  # perhaps another program's file
            raise damaged from None
        checked = (
            "its attributes and lines fit"
            if marked
            else "the prompts, seed, sample numbers and lengths of its lines fit; target and "
            "sampling could not be checked"
        )
        growth = [
            f"{manifest_path(path)}: it is damaged and is written again; {path} is continued, "
            f"because {checked}"
        ]
    return past, growth + past.describe(path)


def _open_stream(path: str, option: str | None) -> Writer:
    """Open a stream. `option`: An option that needs a file, for an error; None if there is none."""
    name, number = STANDARD_OUTPUT if path == "-" else path, descriptor_of(path)
    if option is not None:
        raise UserError(f"{option}: samples go to {name}, where no file is kept; add `out` FILE")
    if number in (None, 1):
        stream: IO[bytes] = sys.stdout.buffer
    else:
        with os_errors_as(UserError, f"{path}: cannot write there"):
            stream = open(os.dup(number), "wb")  # noqa: SIM115 - the writer closes it
    file = LineFile(stream, name)
    return Writer(name, file, manifest=None, past=OutputState(), created=False)
