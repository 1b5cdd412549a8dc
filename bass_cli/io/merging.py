"""Merge the parts that `--shard` made of a job into the file that a single run would have written.

Lines are copied unchanged. Prompts are in the order of the prompt file if it still fits the
manifests, else in the order of the numbers in their ids, else part by part; the lines of a prompt
are in the order of their samples. io/prompts.py assigns prompts to parts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

from bass_cli.errors import UserError, first_of
from bass_cli.io.linefile import OUTPUTS, live_path, seekable_lines
from bass_cli.io.prompts import Shard, open_prompts, parse_shard, read_prompts, shard_of
from bass_cli.io.readers import Source
from bass_cli.io.results import open_output
from bass_cli.io.resume import (
    OutputState,
    PromptDigest,
    check_output_place,
    differences,
    is_of_prompt,
    known_seconds,
    manifest_path,
    read_manifest,
    result_rows,
    samples_of,
)
from bass_cli.io.saving import check_format, is_stream, refuse_shared_files
from bass_cli.reading import open_regular, parse_object

_NUMBERED = re.compile(r"(.*?)([0-9]{1,18})", re.DOTALL)  # a prompt's id
_GREW = "if prompts were added to the file, run the command of each part again"
# Keys of a manifest that describe one run
_OF_A_RUN = ("finished", "totals", "last_run", "expected", "begun", "written")
# Words for the final note, by finish_reason
_UNFINISHED = {"error": "with an error", "budget": "that the budget truncated"}


class _Line(NamedTuple):
    """The place of a result line in a part; `of_prompt`: it is the error of a whole prompt."""

    sample: int
    start: int
    size: int
    of_prompt: bool


@dataclass(slots=True)
class _Part:
    """A file that one shard wrote. `lines` has its lines by prompt id."""

    path: str
    stream: IO[bytes]
    manifest: dict[str, Any]
    results: dict[str, Any]
    shard: Shard
    lines: dict[str, list[_Line]] = field(default_factory=dict)
    seconds: float | None = None

    def read(self, note: Callable[[str], None]) -> None:
        """Find its lines; UserError at a broken line, a duplicate or a line of another shard."""
        past, seen, start, count = OutputState(), set(), 0, 0
        self.stream.seek(0)
        for number, line, row in result_rows(self.stream, self.path, past):
            id_, place = row["id"], f"{self.path}:{number}"
            if not self.shard.holds(id_):
                right = shard_of(id_, self.shard.of)
                raise UserError(f'{place}: "{id_}" belongs to shard {right}, not to {self.shard}')
            start = self.stream.tell() - len(line)
            for one in samples_of(row):
                sample = one["sample"]
                if (id_, sample) in seen:
                    raise UserError(f'{place}: sample {sample} of "{id_}" occurs twice')
                seen.add((id_, sample))
                count += 1
                place_of_line = _Line(sample, start, len(line), is_of_prompt(one))
                self.lines.setdefault(id_, []).append(place_of_line)
        self.seconds = known_seconds(self.path, count)
        if left := past.torn + past.holes:
            note(f"{self.path}: leaving out {left} bytes of torn lines")

    def line(self, one: _Line) -> bytes:
        self.stream.seek(one.start)
        return self.stream.read(one.size)


def merge(out: str, paths: Sequence[str], *, overwrite: bool, note: Callable[[str], None]) -> bool:
    """Write the lines of all parts to `out`, with the manifest of a single run.

    Returns:
        Whether no line is missing and no sample failed. Missing lines are described with `note`.

    Raises:
        UserError: The parts are not of one job; nothing has been written.
    """
    _check_out(out, paths, overwrite=overwrite)
    with contextlib.ExitStack() as files:
        parts = sorted((_open(path, files) for path in paths), key=lambda part: part.shard)
        _check_one_job(parts)
        for part in parts:
            part.read(note)
        results = {key: value for key, value in parts[0].results.items() if key != "shard"}
        ids, own = _prompts_of(parts[0].manifest, results) or (None, {})
        order = _numbers(parts) if ids is None else ids
        if ids is None:
            why = (
                "the prompts of a dataset are not read"
                if _is_remote(parts[0].manifest.get("source"))
                else "the prompt file is not here or has changed"
            )
            how = "part by part" if order is None else "by the numbers in their ids"
            note(f"{why}; prompts are ordered {how}")
        _refuse_unknown(parts, ids)
        missing = [*_missing_shards(parts, ids), *_missing_samples(parts, ids, results, own)]
        if ids is None:  # prompts without any line are unknown
            missing += [
                f"{part.path}: the run that wrote it did not finish"
                for part in parts
                if part.manifest.get("finished") is not True
            ]
        for one in missing:
            note(one)
        if results.get("coupling") == "maximal":
            note(
                "maximal coupling: samples depend on the samples in the same batch; these have the "
                "distribution of a single run, but are not equal to it"
            )
        manifest = {key: value for key, value in parts[0].manifest.items() if key not in _OF_A_RUN}
        manifest |= {"results": results, **_dates(parts)}
        with open_output(out, manifest, overwrite=overwrite) as writer:
            writer.complete = not missing
            for part, line in _in_order(parts, order):
                content = part.line(line)
                writer.append(content, parse_object(content))
            known = [part.seconds for part in parts if part.seconds is not None]
            whole = len(known) == len(parts)
            writer.totals["seconds"] = round(sum(known), 3) if whole else None
        counts = f"{writer.totals['samples']} samples of {sum(len(p.lines) for p in parts)} prompts"
        note(f"{out}: {counts}, from {len(parts)} parts")
        for reason, words in _UNFINISHED.items():
            if count := writer.totals["finish_reasons"].get(reason):
                note(f"lines {words}: {count}")
    return not missing and writer.finished


def _check_out(out: str, paths: Sequence[str], *, overwrite: bool) -> None:
    """Raise UserError if `out` cannot be written, or would replace a part or another file."""
    if is_stream(out):
        raise UserError(f"OUT {out}: name a file; a stream has no manifest")
    check_format("OUT", out, suffixes=OUTPUTS, written="a merged file has the lines of its parts")
    refuse_shared_files(
        [("OUT", out), ("the manifest of OUT", manifest_path(out))],
        [("a part", path) for path in paths]
        + [("the manifest of a part", manifest_path(path)) for path in paths],
    )
    if not overwrite and os.path.isfile(out) and os.path.getsize(out):
        raise UserError(f"{out}: it exists; use `overwrite` to replace it, or give another name")
    check_output_place(out, overwrite=overwrite)


def _open(path: str, files: contextlib.ExitStack) -> _Part:
    """Open a part, locked against writers."""
    try:
        live = live_path(path)
        stream = files.enter_context(open_regular(live))
        fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        lines = files.enter_context(seekable_lines(stream, live))
    except BlockingIOError:
        raise UserError(f"{path}: another process is writing to this file") from None
    except FileNotFoundError:
        raise UserError(f"{path}: this part is missing") from None
    except OSError as error:
        raise UserError(f"{path}: cannot read this part: {error.strerror}") from None
    try:
        manifest = read_manifest(path)
        results = manifest["results"]
        shard = results.get("shard")
    except FileNotFoundError:
        raise UserError(
            f"{manifest_path(path)}: this manifest is missing; copy it from the folder where "
            f"{path} was written"
        ) from None
    except (OSError, ValueError, KeyError, AttributeError):
        raise UserError(f"{manifest_path(path)}: the manifest cannot be read") from None
    if not isinstance(shard, str):
        raise UserError(f"{path}: it is not a part of a job; it was written without `shard`")
    shard = parse_shard(shard, f"{manifest_path(path)}: shard")
    return _Part(path, lines, manifest, results, shard)


def _check_one_job(parts: Sequence[_Part]) -> None:
    """Raise UserError unless the parts are different parts of one job."""
    first, taken = parts[0], dict[Shard, str]()
    for part in parts:
        expected = first.results | {"shard": f"one of {first.shard.of}"}
        bad = differences(expected, part.results | {"shard": f"one of {part.shard.of}"})
        if bad:
            lines = [f"{key}: {other} in {first.path}, {own} here" for key, other, own in bad]
            if [key for key, *_ in bad] == ["prompts"]:
                lines.append(_GREW)
            raise UserError(f"{part.path}: it is part of another job than {first.path}", *lines)
        if part.shard in taken:
            raise UserError(f"{part.path}: {taken[part.shard]} is also shard {part.shard}")
        taken[part.shard] = part.path


def _dates(parts: Sequence[_Part]) -> dict[str, str | None]:
    """Return when the first part was begun and when the last one was written, None if unknown."""
    found: dict[str, str | None] = {}
    for key, choose in (("begun", min), ("written", max)):
        values = [part.manifest.get(key) for part in parts]
        known = [value for value in values if isinstance(value, str)]
        found[key] = choose(known) if len(known) == len(parts) else None
    return found


def _is_remote(name: Any) -> bool:
    """Whether the source of a manifest is a dataset of the hub. Older manifests have none then."""
    is_dataset = isinstance(name, str) and name.startswith("hf:")
    return name is None or (is_dataset and Source(name, "hf").is_remote)


def _prompts_of(
    manifest: dict[str, Any], results: dict[str, Any]
) -> tuple[dict[str, int], dict[str, int]] | None:
    """Return the positions of the job's prompts, and their own numbers of samples, by id.

    None if the prompt file no longer begins with the manifest's prompts.
    """
    name, column = manifest.get("source"), results.get("prompt_column")
    if not (isinstance(name, str) and isinstance(column, str)) or name.startswith("-"):
        return None
    if _is_remote(name):
        return None
    try:
        source = open_prompts(name, None, results.get("separator"), results.get("id_column"))
        digest = PromptDigest(source, column)
        ids, own = dict[str, int](), dict[str, int]()
        for prompt in read_prompts(source, column=column, limit=results.get("limit")):
            digest.add(prompt)
            ids[prompt.id] = len(ids)
            if "n" in prompt.settings:
                own[prompt.id] = prompt.samples(1)
        count = digest.growth(results.get("prompts"))
    except (UserError, OSError, ValueError):
        return None
    most = len(ids) if count is None else int(count)
    return {id_: place for id_, place in ids.items() if place < most}, own


def _numbers(parts: Sequence[_Part]) -> dict[str, int] | None:
    """Return the prompt ids with their numbers if all are like 7 or HumanEval/7, else None."""
    found = {id_: _NUMBERED.fullmatch(id_) for part in parts for id_ in part.lines}
    if len({one and one[1] for one in found.values()}) != 1 or None in found.values():
        return None
    return {id_: int(one[2]) for id_, one in found.items() if one is not None}


def _refuse_unknown(parts: Sequence[_Part], ids: Collection[str] | None) -> None:
    if ids is None:
        return
    for part in parts:
        if other := [id_ for id_ in part.lines if id_ not in ids]:
            raise UserError(f'{part.path}: there is no prompt "{other[0]}" in this job')


def _missing_shards(parts: Sequence[_Part], ids: Collection[str] | None) -> Iterator[str]:
    """Describe the shards that are missing. If the prompts are known, empty shards do not count."""
    given, of = {part.shard for part in parts}, parts[0].shard.of
    every = (Shard(number, of) for number in range(1, of + 1))
    held = set(every) if ids is None else {shard_of(id_, of) for id_ in ids}
    if lost := sorted(held - given):
        yield f"missing: {'shard' if len(lost) == 1 else 'shards'} {first_of(map(str, lost))}"


def _missing_samples(
    parts: Sequence[_Part],
    ids: Collection[str] | None,
    results: Mapping[str, Any],
    own: Mapping[str, int],
) -> Iterator[str]:
    """Describe the samples without a line in the given shards.

    Args:
        results: The settings of the job. With `best_of` a prompt has that many samples.
        own: Samples of a prompt by id, for prompts with a number of their own.
    """
    given = {part.shard: part for part in parts}
    n, best = results.get("n"), results.get("best_of")
    known = [id_ for part in parts for id_ in part.lines] if ids is None else ids
    lost: dict[str, list[int]] = {}
    for id_ in known:
        part = given.get(shard_of(id_, parts[0].shard.of))
        lines = [] if part is None else part.lines.get(id_, [])
        if part is None or any(line.of_prompt for line in lines):
            continue
        there = {line.sample for line in lines}
        wanted = range(own.get(id_, n if isinstance(n, int) else 0))
        if isinstance(best, int) and len(there) >= min(best, len(wanted)):
            continue
        if gone := [one for one in wanted if one not in there]:
            lost[id_] = gone
    if lost:
        count = sum(map(len, lost.values()))
        named = first_of(f'"{id_}" ({first_of(map(str, gone))})' for id_, gone in lost.items())
        yield f"missing: {count} samples of {len(lost)} prompts: {named}"


def _in_order(
    parts: Sequence[_Part], order: dict[str, int] | None
) -> Iterator[tuple[_Part, _Line]]:
    """Yield all lines, by this order of the prompt ids, or part by part."""
    prompts = [(part, id_) for part in parts for id_ in part.lines]
    if order is not None:
        prompts.sort(key=lambda one: order[one[1]])
    for part, id_ in prompts:
        lines = {line.start: line for line in sorted(part.lines[id_])}
        for line in lines.values():  # a line of a prompt has several samples
            yield part, line
