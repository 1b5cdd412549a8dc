"""Refuse a file of samples that mixes settings, because its figures would describe no setting.

A file with its own manifest is one setting, and so is a merge of shards. A mix comes from files
that were joined by hand, or from a manifest of another file. samples.py reads the lines; here they
are compared with each other and with the manifest.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from bass_cli.errors import UserError
from bass_cli.eval.samples import Generation, GenerationFile, bare_id
from bass_cli.io.prompts import parse_shard
from bass_cli.io.resume import manifest_path
from bass_cli.reading import read_bytes, shown

# Fields by which tools write a setting into every line
_NAMED = (
    *("model", "model_name", "model_id", "revision", "temperature", "top_p", "top_k", "dtype"),
    *("prompt_format", "prompt_template"),
)
_REMEDY = "score the files that were joined one by one"
_MANIFEST_BYTES = 1 << 24  # a manifest has a few thousand bytes


class _Line(NamedTuple):
    """What a line says of its setting.

    `ours`: it is a line of bass. `named`: values of the fields in _NAMED, as JSON texts.
    """

    ours: bool
    id: Any
    seed: Any
    prompt_tokens: Any
    named: dict[str, str]


class SettingCheck:
    """Collect what lines say of their settings (call it with each sample), then compare it."""

    def __init__(self) -> None:
        self._lines: list[_Line] = []

    def __call__(self, row: dict[str, Any]) -> None:
        named = {
            key: json.dumps(row[key])
            for key in _NAMED
            if isinstance(row.get(key), (str, int, float))
        }
        ours = {"id", "sample"} <= row.keys()
        facts = (row.get("id"), row.get("seed"), row.get("prompt_tokens"))
        self._lines.append(_Line(ours, *facts, named))

    def refuse_mix(self, file: GenerationFile) -> list[str]:
        """Raise UserError if the lines, or lines and manifest, are of several settings.

        Args:
            file: the file, whose rows are in the order of the calls.

        Returns:
            Notes about differences that have a reason.
        """
        _refuse_two_manifests(file.path)
        first: dict[str, tuple[str, int]] = {}
        of_seed: dict[str, tuple[Any, int]] = {}
        of_prompt: dict[str, tuple[Any, int]] = {}
        by_seed: dict[str, int] = {}
        for line, row in zip(self._lines, file.rows, strict=True):
            place = f"{file.path}:{row.line}"
            for key, value in [*line.named.items(), ("bass", str(line.ours))]:
                known, number = first.setdefault(key, (value, row.line))
                if known != value and key == "bass":
                    whose = "bass" if line.ours else "another tool"
                    raise _mix(place, f"the line is of {whose}, and line {number} is not")
                if known != value:
                    raise _mix(place, f'field "{key}" is {value}, and {known} in line {number}')
            if line.ours:
                self._refuse_other_run(file, line, row, place)
                by_seed.setdefault(_key(line.seed), row.line)
                name = bare_id(row.task_id)
                for what, found, seen in (
                    ("seed", line.seed, of_seed),
                    ("prompt_tokens", line.prompt_tokens, of_prompt),
                ):
                    # a sample whose prompt was not read has 0 tokens of it
                    if found is None or (what == "prompt_tokens" and not found):
                        continue
                    before, number = seen.setdefault(name, (found, row.line))
                    if before != found:
                        reason = f'field "{what}" is {shown(found)}, and {shown(before)} in line'
                        raise _mix(place, f'{reason} {number}, for the same problem "{name}"')
        return self._seeds(file, {seed: line for seed, line in by_seed.items() if seed != "null"})

    def _refuse_other_run(
        self, file: GenerationFile, line: _Line, row: Generation, place: str
    ) -> None:
        """Refuse a line that the run of the manifest cannot have written."""
        shard, n, seed = file.setting("shard"), file.setting("n"), file.setting("seed")
        manifest = manifest_path(file.path)
        if isinstance(shard, str) and not parse_shard(shard, str(manifest)).holds(str(line.id)):
            raise UserError(
                f'{place}: "{shown(str(line.id))[1:-1]}" is not in shard {shard}, which '
                f"{manifest} describes; join the parts of a job with bass merge"
            )
        if not isinstance(file.setting("task"), str):  # prompts may have settings of their own
            return
        if isinstance(n, int) and row.sample >= n:
            raise _mix(place, f"sample {row.sample} exists, and n is {n} in {manifest}")
        if None not in (seed, line.seed) and line.seed != seed:
            raise _mix(place, f"seed {shown(line.seed)}, and {shown(seed)} in {manifest}")

    def _seeds(self, file: GenerationFile, lines: dict[str, int]) -> list[str]:
        """Return a note on seeds that differ by problem. UserError if no manifest explains them."""
        if len(lines) < 2:
            return []
        if file.manifest:
            return [f"the prompts have {len(lines)} seeds; bass generate takes one for each prompt"]
        (one, first), (other, second), *_ = lines.items()
        reason = f"the seed is {other}, and {one} in line {first}, and the file has no manifest"
        raise _mix(f"{file.path}:{second}", reason)


def _key(seed: Any) -> str:
    return json.dumps(seed, default=str)


def _mix(place: str, reason: str) -> UserError:
    return UserError(f"{place}: {reason}; the file mixes settings; {_REMEDY}")


def _refuse_two_manifests(path: str) -> None:
    """Raise UserError if the manifest holds several, because files and manifests were joined."""
    manifest = manifest_path(path)
    try:
        text = read_bytes(manifest, _MANIFEST_BYTES).decode()
        _, end = json.JSONDecoder().raw_decode(text.lstrip())
        rest = text.lstrip()[end:].lstrip()
        if rest:
            json.JSONDecoder().raw_decode(rest)
    except (OSError, ValueError, RecursionError):
        return  # without a manifest, or with a damaged one, scoring goes on without it
    if rest:
        raise UserError(f"{manifest}: it holds several manifests, one after the other; {_REMEDY}")
