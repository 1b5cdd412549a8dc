"""One file of the parts that `--shard` made of a job: what a single run would have written.

Lines are taken over as they are, in the order of the prompt file where that is still what the
manifests say, else by the numbers of prompts that have any, else part after part; of a prompt, by
sample number. Not here: which prompts a part
has (io/shards.py), writing lines (io/results.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

from bass_cli.errors import UserError
from bass_cli.io.places import check_format, is_stream, refuse_shared_files
from bass_cli.io.prompts import PromptDigest, open_source, read_prompts
from bass_cli.io.reading import open_regular, parse_object
from bass_cli.io.results import open_output
from bass_cli.io.resume import (
    Past,
    check_output_place,
    differences,
    known_seconds,
    manifest_path,
    read_manifest,
    result_rows,
)
from bass_cli.io.shards import Shard, parse_shard, shard_of

_NAMED = 5  # prompts that a message names; the others are counted
_NUMBERED = re.compile(r"(.*?)([0-9]{1,18})", re.DOTALL)  # a prompt's id
_OF_A_RUN = ("finished", "totals", "last_run")  # keys of a manifest
# by finish_reason, why a file is not finished though no line is missing
_UNFINISHED = {"error": "with an error", "budget": "that ran out of time"}


class _Line(NamedTuple):
    """A result line of a part, by its bytes; `of_prompt`: it says that its prompt could not be
    run."""

    sample: int
    start: int
    size: int
    of_prompt: bool


@dataclass(slots=True)
class _Part:
    """A file that one shard wrote. `lines`: by prompt id."""

    path: str
    stream: IO[bytes]
    manifest: dict[str, Any]
    shard: Shard
    lines: dict[str, list[_Line]] = field(default_factory=dict)
    seconds: float | None = None

    def read(self, note: Callable[[str], None]) -> None:
        """Find its lines; UserError at what is no result line, is there twice or belongs to
        another shard."""
        past, seen, start, count = Past(), set(), 0, 0
        for number, line, row in result_rows(self.stream, self.path, past):
            id_, sample, place = row["id"], row["sample"], f"{self.path}:{number}"
            if (id_, sample) in seen:
                raise UserError(f'{place}: sample {sample} of "{id_}" is in the file twice')
            if not self.shard.holds(id_):
                due = shard_of(id_, self.shard.of)
                raise UserError(f'{place}: "{id_}" belongs to shard {due}, not to {self.shard}')
            seen.add((id_, sample))
            start, count = self.stream.tell() - len(line), count + 1
            of_prompt = row["finish_reason"] == "error" and not row.get("prompt_tokens")
            self.lines.setdefault(id_, []).append(_Line(sample, start, len(line), of_prompt))
        self.seconds = known_seconds(self.path, count)
        if left := past.torn + past.holes:
            note(f"{self.path}: {left} bytes of torn lines are left out")

    def line(self, one: _Line) -> bytes:
        self.stream.seek(one.start)
        return self.stream.read(one.size)


def merge(out: str, paths: Sequence[str], *, overwrite: bool, note: Callable[[str], None]) -> bool:
    """Write to `out` what the parts hold, with the manifest of a single run, which may go on with
    it. What is missing is said through `note`; returns whether nothing is, and no sample failed.
    UserError, before anything is written, where the parts are not of one job."""
    _check_out(out, paths, overwrite=overwrite)
    with contextlib.ExitStack() as files:
        parts = sorted((_open(path, files) for path in paths), key=lambda part: part.shard)
        _check_one_job(parts)
        for part in parts:
            part.read(note)
        results = {key: value for key, value in _results(parts[0]).items() if key != "shard"}
        ids = _prompt_ids(parts[0].manifest, results)
        order = _numbers(parts) if ids is None else ids
        if ids is None:
            why = (
                "prompts of a data set are not read here"
                if parts[0].manifest.get("source") is None
                else "the prompts of these parts are not here as they were"
            )
            note(f"{why}: {'the parts in order' if order is None else 'by their numbers'}")
        _refuse_unknown(parts, ids)
        missing = [*_missing_shards(parts, ids), *_missing_samples(parts, ids, results.get("n"))]
        if ids is None:  # a prompt without any line is not known to be one
            missing += [
                f"{part.path}: the run that wrote it did not come to its end"
                for part in parts
                if part.manifest.get("finished") is not True
            ]
        for one in missing:
            note(one)
        if results.get("coupling") == "maximal":
            note(
                "maximal coupling: samples depend on what shared their batch; these have the law "
                "of a single run's, and are not the same"
            )
        manifest = {key: value for key, value in parts[0].manifest.items() if key not in _OF_A_RUN}
        with open_output(out, manifest | {"results": results}, overwrite=overwrite) as writer:
            writer.complete = not missing
            for part, line in _in_order(parts, order):
                content = part.line(line)
                writer.append(content, parse_object(content))
            known = [part.seconds for part in parts if part.seconds is not None]
            whole = len(known) == len(parts)
            writer.totals["seconds"] = round(sum(known), 3) if whole else None  # one after another
        counts = f"{writer.totals['samples']} samples of {sum(len(p.lines) for p in parts)} prompts"
        note(f"{out}: {counts}, from {len(parts)} parts")
        for reason, words in _UNFINISHED.items():
            if count := writer.totals["finish_reasons"].get(reason):
                note(f"lines {words}: {count}")
    return not missing and writer.finished


def _check_out(out: str, paths: Sequence[str], *, overwrite: bool) -> None:
    """UserError where it cannot be written, or a part or another file would be lost."""
    if is_stream(out):
        raise UserError(f"OUT {out}: a file is needed, with a manifest beside it")
    check_format("OUT", out, suffix=".jsonl", written="a merged file is JSON lines, as its parts")
    refuse_shared_files(
        [("OUT", out), ("the manifest of OUT", manifest_path(out))],
        [
            *(("a part", path) for path in paths),
            *(("the manifest of a part", manifest_path(path)) for path in paths),
        ],
    )
    if not overwrite and os.path.isfile(out) and os.path.getsize(out):
        raise UserError(f"{out}: it exists; use --overwrite to replace it, or give another name")
    check_output_place(out, overwrite=overwrite)


def _open(path: str, files: contextlib.ExitStack) -> _Part:
    """The part under this name, kept from whoever would write to it meanwhile."""
    try:
        stream = files.enter_context(open_regular(path))
        fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
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
            f"{manifest_path(path)}: this manifest is missing; it lies beside {path} where that "
            "was written"
        ) from None
    except (OSError, ValueError, KeyError, AttributeError):
        raise UserError(f"{manifest_path(path)}: the manifest cannot be read") from None
    if not isinstance(shard, str):
        raise UserError(f"{path}: it is no part of a job: it was written without --shard")
    return _Part(path, stream, manifest, parse_shard(shard, f"{manifest_path(path)}: shard"))


def _results(part: _Part) -> dict[str, Any]:
    found: dict[str, Any] = part.manifest["results"]
    return found


def _check_one_job(parts: Sequence[_Part]) -> None:
    """UserError unless all are parts of one job, each another one."""
    first, taken = parts[0], dict[Shard, str]()
    for part in parts:
        mine = _results(part) | {"shard": f"one of {part.shard.of}"}
        bad = differences(_results(first) | {"shard": f"one of {first.shard.of}"}, mine)
        if bad:
            raise UserError(
                f"{part.path}: it is of another job than {first.path}",
                *(f"{key}: {there} there, {here} here" for key, there, here in bad),
            )
        if part.shard in taken:
            raise UserError(f"{part.path}: it is shard {part.shard}, as {taken[part.shard]} is")
        taken[part.shard] = part.path


def _prompt_ids(manifest: dict[str, Any], results: dict[str, Any]) -> dict[str, int] | None:
    """The job's prompts with their places, where their file still begins with those that the
    manifest says; else None."""
    name, column = manifest.get("source"), results.get("prompt_column")
    if not (isinstance(name, str) and isinstance(column, str)) or name.startswith(("-", "hf:")):
        return None
    try:
        source = open_source(name)
        digest, before = PromptDigest(source, column), results.get("prompts")
        prompts = digest.over(read_prompts(source, column=column, limit=results.get("limit")))
        ids = {prompt.id: place for place, prompt in enumerate(prompts)}
        change = digest.compare(before)
        if change.fault is not None or (change.before is not None and isinstance(before, str)):
            return None
        count = len(ids) if change.before is None else int(change.before)
        return {id_: place for id_, place in ids.items() if place < count}
    except (UserError, OSError):
        return None


def _numbers(parts: Sequence[_Part]) -> dict[str, int] | None:
    """The prompts with their numbers, if they are told apart by these alone: 7, or HumanEval/7."""
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
    """Which shards nobody gave; where the prompts are known, only such as have any."""
    given, of = {part.shard for part in parts}, parts[0].shard.of
    every = (Shard(number, of) for number in range(1, of + 1))
    held = set(every) if ids is None else {shard_of(id_, of) for id_ in ids}
    if lost := sorted(held - given):
        yield f"missing: {'shard' if len(lost) == 1 else 'shards'} {_some(map(str, lost))}"


def _missing_samples(
    parts: Sequence[_Part], ids: Collection[str] | None, n: object
) -> Iterator[str]:
    """Which samples of the shards that were given have no line."""
    given = {part.shard: part for part in parts}
    known = [id_ for part in parts for id_ in part.lines] if ids is None else ids
    lost: dict[str, list[int]] = {}
    for id_ in known:
        part = given.get(shard_of(id_, parts[0].shard.of))
        lines = [] if part is None else part.lines.get(id_, [])
        if part is None or any(line.of_prompt for line in lines):
            continue
        there = {line.sample for line in lines}
        if gone := [one for one in range(n if isinstance(n, int) else 0) if one not in there]:
            lost[id_] = gone
    if lost:
        count = sum(map(len, lost.values()))
        named = _some(f'"{id_}" ({_some(map(str, gone))})' for id_, gone in lost.items())
        yield f"missing: {count} samples of {len(lost)} prompts: {named}"


def _some(names: Iterator[str]) -> str:
    """The first of them, and how many more there are."""
    every = list(names)
    more = f" and {len(every) - _NAMED} more" if len(every) > _NAMED else ""
    return ", ".join(every[:_NAMED]) + more


def _in_order(
    parts: Sequence[_Part], order: dict[str, int] | None
) -> Iterator[tuple[_Part, _Line]]:
    """All lines: in this order of their prompts, or else as the parts have them."""
    prompts = [(part, id_) for part in parts for id_ in part.lines]
    if order is not None:
        prompts.sort(key=lambda one: order[one[1]])
    for part, id_ in prompts:
        for line in sorted(part.lines[id_]):
            yield part, line
