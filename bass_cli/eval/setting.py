"""Collect the setting of a generation file from its manifest; refuse a file that mixes settings.

A paper names the setting beside figures. run/manifest.py writes the manifest; files of other tools
have none. A file with its own manifest is one setting, and so is a merge of shards. A mix comes
from files that were joined by hand, or from a manifest of another file, and its figures would
describe no setting.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from bass_cli.config.sampling import Sampling
from bass_cli.errors import UserError
from bass_cli.eval.samples import Generation, GenerationFile, bare_id
from bass_cli.io.prompts import parse_shard
from bass_cli.io.resume import manifest_path, part_of
from bass_cli.reading import read_bytes, shown, unquoted, without_nan

# How prompts become a chat: keys of the manifest's "results", left out there at their defaults
_CHAT = ("chat", "system", "template_args", "tools", "thinking")
# Sampling settings that change what is written, not what is drawn
_OUTPUT = {"seed", "logprobs", "logprobs_of", "prompt_logprobs", "include_stop"}
# Keys of a setting that are not settings: two runs with equal settings may differ in them.
OF_A_RUN = ("begun", "written", "note")
# Keys that are null if they do not apply, not because they are unknown
_OPTIONAL = {"lora", "limit", "chat.chat", "budget", "draft_revision", "machine.driver"}
# Fields by which tools write a setting into every line
_NAMED = (
    *("model", "model_name", "model_id", "revision", "temperature", "top_p", "top_k", "dtype"),
    *("prompt_format", "prompt_template"),
)
_REMEDY = "score the files that were joined one by one"
_MANIFEST_BYTES = 1 << 24  # a manifest has a few thousand bytes


def setting_of(file: GenerationFile) -> dict[str, Any]:
    """Return the setting of a file's samples. What the manifest does not have is None.

    Returns:
        The keys that docs/EVAL.md lists. "note" names what is not recorded, None if nothing.
    """
    manifest = file.manifest
    results, job = part_of(manifest, "results"), part_of(manifest, "job")
    versions, origin = part_of(manifest, "versions"), part_of(manifest, "origin")
    pair, speculation = part_of(job, "pair"), part_of(job, "speculation")
    files = results.get("target_files")
    sampled = (key for key in Sampling.model_fields if key not in _OUTPUT)
    setting = {
        "model": results.get("target"),
        "revision": origin.get("revision") or (f"files:{files}" if files else None),
        "lora": results.get("lora"),
        "dtype": results.get("dtype"),
        "kv_dtype": results.get("kv_dtype", job.get("kv_dtype")),
        "n": results.get("n"),
        "limit": results.get("limit"),
        "seed": results.get("seed"),
        "sampling": {key: results[key] for key in sampled if key in results} or None,
        "coupling": results.get("coupling"),
        "budget": file.budget,
        "prompt_format": results.get("prompt_format"),
        "prompts": results.get("prompts"),
        "chat": {key: results[key] for key in _CHAT if key in results} or None,
        "draft": pair.get("draft"),
        "draft_revision": origin.get("draft_revision"),
        "draft_length": speculation.get("length"),
        "batch_size": job.get("batch_size"),
        "versions": {
            name: versions.get(name) for name in ("bass", "torch", "transformers", "python")
        },
        "commit": origin.get("commit"),
        "machine": {
            "device": versions.get("device"),
            "driver": origin.get("driver"),
            "processor": origin.get("processor"),
        },
        "begun": manifest.get("begun"),
        "written": manifest.get("written"),
    }
    optional = _OPTIONAL - ({"machine.driver"} if results.get("device") == "cuda" else set())
    missing = [key for key, value in flat(setting).items() if value is None]
    missing = [key for key in missing if key not in optional]
    note = f"not recorded: {', '.join(missing)}" if missing else None
    found: dict[str, Any] = without_nan(setting)  # a damaged manifest may hold NaN
    return found | {"note": note if manifest else "the file has no manifest"}


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which two runs differ, with both values, by dotted key."""
    one, other = flat(a), flat(b)
    return {
        key: (one.get(key), other.get(key))
        for key in {**one, **other}
        if key not in OF_A_RUN and one.get(key) != other.get(key)
    }


def flat(setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return a setting with the keys of its parts, like "sampling.temperature"."""
    flat: dict[str, Any] = {}
    for key, value in setting.items():
        inner = value if isinstance(value, dict) and key != "prompts" else None
        flat |= {key: value} if inner is None else {f"{key}.{k}": v for k, v in inner.items()}
    return flat


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
                f'{place}: "{unquoted(str(line.id))}" is not in shard {shard}, which '
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
