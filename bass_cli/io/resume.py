"""Read an existing output file and its manifest, and decide whether a run may continue it.

Torn last lines are found and repaired here. Results are written in io/results.py; io/saving.py
replaces a file in one step.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from bass_cli.errors import UserError
from bass_cli.io.linefile import live_path
from bass_cli.io.prompts import Prompt, read_prompts
from bass_cli.io.readers import Source
from bass_cli.io.saving import check_place, refuse_foreign, write_json
from bass_cli.reading import finite, parse_object, read_bytes, shown, text, unquoted, whole

GROWING = ("n", "limit")
# An extended attribute of the output file: a digest of the settings its results depend on
ATTRIBUTE = "user.bass.results"
COUNTED = ("tokens", "rounds", "drafted", "accepted")
# Fields that a result line must have, and fields that may be missing or null
_FIELDS: dict[str, Callable[[Any], Any]] = {"id": text, "sample": whole, "finish_reason": text}
_OPTIONAL = dict.fromkeys((*COUNTED, "copy_of"), whole)
_MANIFEST_BYTES = 1 << 24  # a manifest has a few thousand bytes
# PromptDigest: the most marks, hexadecimal digits of a mark, and of the last digest
_MARKS, _MARK, _WHOLE = 512, 8, 32
_encode = json.JSONEncoder(default=str).encode
_REMEDY = "start again with `overwrite`, or give another `out`"
Key = tuple[str, int]  # prompt id, sample
Check = Callable[[dict[str, Any]], str | None]  # why a result line is not this run's, or None


@dataclass(slots=True)
class OutputState:
    """The content of an output file when it was opened.

    Args:
        done: The finished samples.
        totals: Totals over the file's lines; later lines are added to them.
        end: The offset after the last whole line.
        failed: The number of lines of failed prompts.
        torn: Bytes of a last line that is not complete.
        holes: Bytes of lines with NUL bytes, which a power cut leaves in a block that was never
            written.
    """

    done: set[Key] = field(default_factory=set)
    totals: dict[str, Any] = field(
        default_factory=lambda: (
            dict.fromkeys(("samples", *COUNTED), 0) | {"finish_reasons": {}, "seconds": 0.0}
        )
    )
    end: int = 0
    failed: int = 0
    torn: int = 0
    holes: int = 0

    def count(self, row: dict[str, Any]) -> None:
        """Add one result line to the totals. A copy adds a sample, but no tokens.

        A total is None if a line has no such field, because `columns` left it out.
        """
        reasons = self.totals["finish_reasons"]
        for one in samples_of(row):
            reason = one["finish_reason"]
            self.totals["samples"] += 1
            reasons[reason] = reasons.get(reason, 0) + 1
            for key in COUNTED if one.get("copy_of") is None else ():
                known = self.totals[key] is not None and key in one
                self.totals[key] = self.totals[key] + (one[key] or 0) if known else None

    def describe(self, name: str) -> list[str]:
        """Return the notes for the user before the run continues."""
        notes = []
        if self.torn:
            notes.append(f"{name}: dropping a torn last line of {self.torn} bytes")
        if self.holes:
            notes.append(
                f"{name}: dropping {self.holes} bytes of lines that a power cut damaged; their "
                "samples are drawn again"
            )
        if self.failed:
            notes.append(f"{name}: trying {self.failed} failed prompts again")
        return notes


def manifest_path(output: str) -> Path:
    """Return the path of an output file's manifest."""
    return Path(f"{output}.manifest.json")


def read_manifest(output: str) -> dict[str, Any]:
    """Read the manifest of an output file. OSError if it cannot be read, ValueError if broken."""
    return parse_object(read_bytes(manifest_path(output), _MANIFEST_BYTES))


def part_of(manifest: Any, *keys: str) -> dict[str, Any]:
    """Return a part of a manifest. Empty if it is missing or, in a damaged file, no object."""
    for key in keys:
        manifest = manifest.get(key) if isinstance(manifest, dict) else None
    return manifest if isinstance(manifest, dict) else {}


def write_manifest(output: str, manifest: dict[str, Any]) -> None:
    """Replace the manifest in one step, so that a reader never sees a part of it."""
    path = manifest_path(output)
    write_json(path, manifest, f"{path}: cannot write the manifest")


def check_output_place(output: str, *, overwrite: bool) -> None:
    """Raise UserError if the output or its manifest cannot be written, or is another file."""
    path, live = manifest_path(output), live_path(output)
    for place in dict.fromkeys((output, live)):
        check_place(place, place)
    check_place(str(path), path)
    if overwrite:
        return
    if not os.path.exists(live) or os.path.getsize(live) == 0:
        refuse_foreign(str(path), path, _is_manifest, kind=f"the manifest of {output}")
    elif not path.exists():
        reason = "it exists and has no manifest, so it cannot be continued"
        raise UserError(f"{live}: {reason}; {_REMEDY}")


def _is_manifest(content: bytes) -> bool:
    """Whether the content is a manifest or the beginning of one."""
    try:
        return isinstance(json.loads(content)["results"], dict)
    except (ValueError, KeyError, TypeError, RecursionError):
        begins = json.dumps({"results": {}}, indent=2).encode()[:-3]
        return content.startswith(begins) or begins.startswith(content)


class DamagedManifestError(UserError):
    """The manifest exists and cannot be read."""


def check_manifest(
    output: str, results: dict[str, Any], prompts: PromptDigest | None = None
) -> list[str]:
    """Compare the settings of this run with the manifest; return notes on values that grew.

    Args:
        results: This run's settings, as in the manifest's "results".
        prompts: The digest of this run's prompts, which may have grown at their end. If None, the
            manifest's "prompts" must be equal.

    Raises:
        UserError: A setting that changes results differs. Each difference is a line.
    """
    path = manifest_path(output)
    try:
        manifest = read_manifest(output)
        before = manifest.get("results")
        if not isinstance(before, dict):
            raise ValueError
    except (OSError, ValueError):
        raise DamagedManifestError(
            f"{path}: the manifest cannot be read; start again with `overwrite`"
        ) from None
    now = json.loads(json.dumps(results, default=str))
    bad, grown = [], dict[str, tuple[str, str]]()
    for key, old, new in differences(before, now):
        if key == "prompts" and prompts is not None:
            try:
                count = prompts.growth(before.get(key))
            except ValueError as error:
                bad.append(f"{key}: {error}")
                continue
            if count is not None:
                grown[key] = count, str(prompts.count)
        elif key == "n" and now.get("group"):
            bad.append(f"n: {old} before, {new} now; with `group` a line has all its samples")
        elif key == "n" and now.get("best_of"):
            bad.append(f"n: {old} before, {new} now; with `best_of` other samples may be the best")
        elif key in GROWING and _grows(before.get(key), now.get(key)):
            grown[key] = old, new
        else:
            bad.append(f"{key}: {old} before, {new} now")
    if bad:
        raise UserError(f"{output}: it was begun with other settings; {_REMEDY}", *bad)
    if "limit" in grown:
        grown.pop("prompts", None)  # a note on the limit is enough
    random = now.get("temperature") or (prompts is not None and prompts.random)
    together = now.get("coupling") == "maximal" and random  # see Plan.draws_together
    if grown and together and manifest.get("finished") is not True:
        key, (old, _) = next(iter(grown.items()))
        first = "the prompts that it was begun with" if key == "prompts" else f"{key} {old}"
        raise UserError(
            f"{output}: it is not complete; with maximal coupling samples depend on each other, "
            f"so complete it with {first} first"
        )
    return [
        f"{output}: {key} {'grow' if key == 'prompts' else 'grows'} from {old} to {new}"
        for key, (old, new) in grown.items()
    ]


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the keys in which two "results" differ, with both values as text."""
    return [
        (key, _show(before, key), _show(now, key))
        for key in {**before, **now}
        if before.get(key) != now.get(key)
    ]


class PromptDigest:
    """A running digest of a job's prompts, which tells added prompts from changed ones.

    It covers everything in a prompt that reaches the lines of its samples. The digest after each
    prompt is held in memory. A manifest holds the last digest and up to 512 marks.
    """

    def __init__(self, source: Source, column: str = "prompt"):
        self._source, self._column = source, column
        self._running, self._after = hashlib.sha256(), bytearray()
        self._size = _WHOLE // 2  # bytes of one digest
        self.random = False  # whether a prompt has a temperature above 0 of its own

    def add(self, prompt: Prompt) -> None:
        """Add the next prompt."""
        known: list[Any] = [prompt.id, prompt.text, prompt.messages, prompt.reference, prompt.meta]
        known += [one for one in (prompt.tools, prompt.template_args) if one is not None]
        own = [one for one in (prompt.token_ids, prompt.settings) if one]
        self.random |= prompt.settings.get("temperature", 0) > 0
        content = _encode([*known, prompt.fault is None, *own])
        self._running.update(content.encode() + b"\n")
        self._after += self._running.digest()[: self._size]

    @property
    def count(self) -> int:
        """The number of prompts added so far."""
        return len(self._after) // self._size

    def record(self) -> dict[str, Any]:
        """Return the manifest's value.

        `digest` is the digest after all `count` prompts. `marks` joins the first 8 digits of the
        digests after every `stride` prompts.
        """
        stride = 1
        while self.count // stride > _MARKS:
            stride *= 2
        marks = (self.at(end)[:_MARK] for end in range(stride, self.count + 1, stride))
        last = self.at(self.count)
        return {"count": self.count, "digest": last, "stride": stride, "marks": "".join(marks)}

    def growth(self, before: Any) -> str | None:
        """Return how many prompts a manifest has if this run has more, None if it has the same.

        Args:
            before: The manifest's value, a `record`.

        Raises:
            ValueError: The manifest's prompts are not the first prompts of this run; the text says
                what differs.
        """
        try:
            count, last = whole(before["count"], least=1), text(before["digest"])
            stride, marks = whole(before["stride"], least=1), text(before["marks"])
        except (ValueError, KeyError, TypeError):
            raise ValueError("the manifest's entry cannot be read") from None
        if count > self.count or self.at(count) != last:
            raise ValueError(self._first_change(count, stride, marks))
        return None if count == self.count else str(count)

    def _first_change(self, count: int, stride: int, marks: str) -> str:
        """Describe the first difference, as exactly as the marks allow."""
        same, ends = 0, range(stride, min(count, self.count) + 1, stride)
        while same < len(ends) and marks.startswith(self.at(ends[same])[:_MARK], same * _MARK):
            same += 1
        first, last = same * stride + 1, min((same + 1) * stride, count)
        if first > self.count:
            return f"{count} before, {self.count} now; those after number {self.count} are missing"
        what = self._named(first) if first == last else f"one of numbers {first} to {last}"
        sizes = "" if count == self.count else f"{count} before, {self.count} now; "
        return f"{sizes}{what} has changed"

    def _named(self, number: int) -> str:
        """Name a prompt by its number from 1, its id and its place."""
        prompts = read_prompts(self._source, column=self._column)
        prompt = next(itertools.islice(prompts, number - 1, None))
        return f'number {number} (id "{unquoted(prompt.id)}", {prompt.place})'

    def at(self, count: int) -> str:
        """Return the digest after `count` prompts (at least 1), in hexadecimal."""
        return self._after[(count - 1) * self._size : count * self._size].hex()


def fault_of_line(
    row: dict[str, Any], results: dict[str, Any], known: Mapping[str, Mapping[str, Any]]
) -> str | None:
    """Return why a run with these settings could not have written a result line, or None.

    For a file without a manifest. The target and the sampling settings cannot be checked.

    Args:
        known: The prompts' own settings, by the ids of the run's prompts.
    """
    results = {**results, **known.get(row["id"], {})}
    n, most, seed = results.get("n"), results.get("max_new_tokens"), results.get("seed")
    tokens = row.get("tokens")
    if row["id"] not in known:
        return f'there is no prompt "{row["id"]}"'
    if row.get("seed") != seed and not results.get("columns"):
        return f"seed: {_show(row, 'seed')} before, {seed} now"
    if n is not None and not 0 <= row["sample"] < n:
        return f"sample {row['sample']} before, `n` {n} now"
    if is_of_prompt(row) or results.get("columns"):
        return None
    if most is not None and not (isinstance(tokens, int) and 0 <= tokens <= most):
        return f"{_show(row, 'tokens')} tokens before, `sampling.max_new_tokens` {most} now"
    scored = results.get("logprobs") is not None
    for option, key, wanted in (
        ("token_ids", "token_ids", scored or bool(results.get("token_ids"))),
        ("logprobs", "token_logprobs", scored),
        ("token_drafted", "token_drafted", bool(results.get("token_drafted"))),
    ):
        if (row.get(key) is not None) != wanted:
            change = "without before, with" if wanted else "with before, without"
            return f"{option}: {change} now"
    if row["finish_reason"] == "budget" and results.get("budget") is None:
        return "budget: with one before, without one now"
    return None


def is_of_prompt(row: dict[str, Any]) -> bool:
    """Whether this is the single line of a prompt that could not be run, not a sample."""
    return row["finish_reason"] == "error" and not row.get("prompt_tokens")


def mark(stream: IO[bytes], results: dict[str, Any]) -> None:
    """Store a digest of the settings in an attribute of the file, if its file system has them."""
    prompts, value = results.get("prompts"), _digest(results)
    if isinstance(prompts, dict):  # a PromptDigest's record
        value += f" {prompts.get('count')} {prompts.get('digest')}"
    with contextlib.suppress(OSError, AttributeError):  # file system or system without attributes
        os.setxattr(stream.fileno(), ATTRIBUTE, value.encode())


def is_marked(
    stream: IO[bytes], results: dict[str, Any], prompts: PromptDigest | None = None
) -> bool | None:
    """Whether the file's attribute fits these settings (without n and limit) and these prompts.

    The prompts may have grown. None if there is no attribute, or if it is of more prompts.
    """
    try:
        value, *noted = os.getxattr(stream.fileno(), ATTRIBUTE).decode().split()
    except (OSError, AttributeError, ValueError):
        return None
    if prompts is None or value != _digest(results):
        return value == _digest(results)
    count = int(noted[0]) if noted and noted[0].isdecimal() else 0
    return prompts.at(count) == noted[-1] if 0 < count <= prompts.count else None


def _digest(results: dict[str, Any]) -> str:
    """Return a digest of the settings that cannot grow."""
    growing = {*GROWING, *(["prompts"] if isinstance(results.get("prompts"), dict) else [])}
    fixed = {key: value for key, value in results.items() if key not in growing}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True, default=str).encode()).hexdigest()


def known_seconds(output: str, samples: int) -> float | None:
    """Return the seconds that the file's `samples` took, by its manifest; None if it has others."""
    try:
        totals = read_manifest(output)["totals"]
        return finite(totals["seconds"], least=0) if totals["samples"] == samples else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def origin_of(output: str) -> dict[str, Any]:
    """Return when and by what the file's lines were written, as its manifest says.

    A run that adds no line keeps these keys. The dates are None if unknown.
    """
    manifest: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        manifest = read_manifest(output)
    kept = {key: manifest[key] for key in ("versions", "origin") if key in manifest}
    return kept | {key: manifest.get(key) for key in ("begun", "written")}


def now() -> str:
    """Return the time as text: UTC, in seconds, like 2026-11-26T00:10:00+00:00."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _grows(before: Any, now: int | None) -> bool:
    return now is None or (type(before) is int and now > before)


def _show(results: dict[str, Any], key: str) -> str:
    if key not in results:
        return "not given"
    value = results[key]
    if key == "prompts" and isinstance(value, dict):  # a PromptDigest's record
        return f"{value.get('count')} with the digest {str(value.get('digest'))[:8]}"
    return (
        shown(value) if isinstance(value, (dict, float)) else json.dumps(value, ensure_ascii=False)
    )


def result_rows(
    lines: Iterable[bytes],
    name: str,
    past: OutputState,
    check_row: Callable[[dict[str, Any], str], None] | None = None,
) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """Yield the whole lines as (number, bytes, row).

    `past.end` is set to the end of each line; torn lines and holes are counted in `past`.
    `check_row` raises UserError at a row of another kind; its second argument is the row's place.
    Default: for result lines.
    """
    broken = 0
    for number, line in enumerate(lines, 1):
        row = None
        with contextlib.suppress(ValueError):
            row = parse_object(line) if line.endswith(b"\n") else None
        if b"\0" in line:  # JSON has none
            past.holes += len(line)
            continue
        if broken:
            raise UserError(
                f"{name}:{broken}: the line is broken, and it is not the last one; repair or "
                "remove it"
            )
        if row is None:
            broken, past.torn = number, len(line)
            continue
        (check_row or _check_row)(row, f"{name}:{number}")
        past.end += len(line)
        yield number, line, row


def _check_row(row: dict[str, Any], place: str) -> None:
    """Raise UserError if a required field is missing or has another type."""
    listed = row.get("samples", [])
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise UserError(f'{place}: this is not a result line: field "samples": a list is needed')
    for one in samples_of(row):
        present = {key: kind for key, kind in _OPTIONAL.items() if one.get(key) is not None}
        for key, kind in (_FIELDS | present).items():
            try:
                kind(one.get(key))
            except ValueError as error:
                raise UserError(
                    f'{place}: this is not a result line: field "{key}": {error}'
                ) from None


def samples_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the samples of a result line as lines of their own.

    A line of a prompt with `group` has a list of samples, which is empty if the prompt failed.
    Without the field "finish_reason", a sample failed if it has an error.
    """
    found = [dict(row)]
    if isinstance(row.get("samples"), list):
        shared = {key: value for key, value in row.items() if key != "samples"}
        samples = row["samples"] or [{"error": row.get("error"), "finish_reason": "error"}]
        found = [{"sample": at, **shared, **one} for at, one in enumerate(samples)]
    for one in found:
        one.setdefault("finish_reason", "unknown" if one.get("error") is None else "error")
    return found


def read_output(lines: Iterable[bytes], name: str, check: Check | None = None) -> OutputState:
    """Read the result lines of a file.

    UserError at a broken line other than the last, at a sample that occurs twice, and at a line
    that `check` refuses.
    """
    past = OutputState()
    for number, _, row in result_rows(lines, name, past):
        samples = samples_of(row)
        faults = () if check is None else filter(None, map(check, samples))
        if (fault := next(iter(faults), None)) is not None:
            reason = "the manifest is damaged, and this line was written with other settings"
            raise UserError(f"{name}:{number}: {reason} ({fault}); {_REMEDY}")
        if is_failed(row):
            past.failed += 1
            continue
        for one in samples:
            key = (one["id"], one["sample"])
            if key in past.done:
                raise UserError(f'{name}:{number}: sample {key[1]} of "{key[0]}" occurs twice')
            past.done.add(key)
        past.count(row)
    return past


def is_failed(row: Mapping[str, Any]) -> bool:
    """Whether a result line is of a prompt or a sample that failed, which is tried again."""
    return any(one["finish_reason"] == "error" for one in samples_of(row))
