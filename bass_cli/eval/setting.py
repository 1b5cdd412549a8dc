"""Collect the setting of a generation file from its manifest: what a paper names beside figures.

run/manifest.py writes the manifest. Files of other tools have none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bass_cli.config.sampling import Sampling
from bass_cli.eval.samples import GenerationFile

# How prompts become a chat: keys of the manifest's "results", left out there at their defaults
_CHAT = ("chat", "system", "template_args", "tools", "thinking")
# Sampling settings that change what is written, not what is drawn
_OUTPUT = {"seed", "logprobs", "logprobs_of", "prompt_logprobs", "include_stop"}
# Keys of a setting that are not settings: two runs with equal settings may differ in them.
OF_A_RUN = ("begun", "written", "note")
# Keys that are null if they do not apply, not because they are unknown
_OPTIONAL = {"lora", "limit", "chat.chat", "budget", "draft_revision", "machine.driver"}


def setting_of(file: GenerationFile) -> dict[str, Any]:
    """Return the setting of a file's samples. What the manifest does not have is None.

    Returns:
        The keys that docs/EVAL.md lists. "note" names what is not recorded, None if nothing.
    """
    manifest = file.manifest
    results, job = _part(manifest, "results"), _part(manifest, "job")
    versions, origin = _part(manifest, "versions"), _part(manifest, "origin")
    pair, speculation = _part(job, "pair"), _part(job, "speculation")
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
    return _finite(setting | {"note": note if manifest else "the file has no manifest"})


def _finite(setting: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinity, which a damaged manifest may hold and a report may not, by None."""
    cleaned: dict[str, Any] = json.loads(json.dumps(setting), parse_constant=lambda name: None)
    return cleaned


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


def _part(manifest: Mapping[str, Any], key: str) -> dict[str, Any]:
    part = manifest.get(key)
    return part if isinstance(part, dict) else {}
