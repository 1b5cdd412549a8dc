"""Make the manifest of a plan, and the facts that the user should know before samples are drawn.

No weights are needed, so a process that runs elsewhere can send them. io/resume.py writes and
compares manifests.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bass_cli import __version__
from bass_cli.config.job import Job
from bass_cli.config.speculation import CONTROLLERS
from bass_cli.io.prompts import Shard

if TYPE_CHECKING:
    from bass_cli.run.plan import Plan

# The sampling settings of every manifest. Later ones are left out at their defaults, so that files
# of older versions can be continued.
_ALWAYS = ("temperature", "top_p", "top_k", "seed", "stop", "max_new_tokens")


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a plan: the manifest, the rows of the batch, notes to the user, whether the
    target has a chat template, and the job with the model's own defaults."""

    manifest: dict[str, Any]
    rows: int
    notes: tuple[str, ...]
    chats: bool
    job: Job


def facts_of(plan: Plan, source: Mapping[str, Any], *, shard: Shard | None = None) -> Facts:
    """Return the facts about a plan; for the arguments see `describe`."""
    manifest = describe(plan, source, shard=shard)
    chats = plan.files.tokenizer.has_chat_template
    return Facts(manifest, plan.rows, plan.notes, chats, plan.job)


def describe(
    plan: Plan, source: Mapping[str, Any], *, shard: Shard | None = None
) -> dict[str, Any]:
    """Make the manifest of a plan.

    "results" has every setting that changes result lines; a resumed run must have the same.
    "origin" has what a paper names besides: revisions, commit, processor, driver.

    Args:
        source: Identifies the prompts.
        shard: The part of the prompts that is drawn; None for all.
    """
    job, identity = plan.job, plan.identity()
    versions = identity.pop("versions")
    sampling = job.sampling.model_dump(mode="json")
    changed = job.sampling.model_dump(exclude_defaults=True)
    results: dict[str, Any] = {
        **identity,
        **source,
        "n": job.n,
        "limit": job.limit,
        "chat": job.chat,
    }
    chats = {"system": job.system, "template_args": job.template_args, "tools": job.tools}
    results |= {name: value for name, value in chats.items() if value is not None}
    if job.lora:
        results |= {"lora": list(job.lora)}
    if job.thinking == "off" or (job.thinking == "auto" and plan.tags):
        results |= {"thinking": job.thinking}
    results |= {
        **{key: value for key, value in sampling.items() if key in _ALWAYS or key in changed},
        "coupling": job.speculation.coupling,
        "budget": job.budget,
    }
    if job.kv_dtype != "auto":
        results |= {"kv_dtype": job.kv_dtype}
    results |= {"token_ids": job.token_ids, "bass": __version__.split(".")[0]}
    results |= {name: True for name in ("echo", "token_drafted") if getattr(job, name)}
    if shard is not None:
        results |= {"shard": str(shard)}
    if job.speculation.coupling == "maximal":
        results |= _of_maximal(plan)
    return {
        "results": results,
        "job": job.model_dump(mode="json"),
        "versions": versions | {"transformers": importlib.metadata.version("transformers")},
        "origin": {"commit": _commit(__file__), **plan.origin},
    }


def _of_maximal(plan: Plan) -> dict[str, Any]:
    """Return the settings that change samples under maximal coupling alone."""
    job = plan.job
    speculation = job.speculation.model_dump(mode="json")
    draft_files = plan.files.draft and plan.files.draft.fingerprint(plan.files.mask)
    found: dict[str, Any] = {
        "draft": job.pair.draft,
        "draft_files": draft_files,
        "batch_size": plan.rows,
        "draft_length": speculation["length"],
        "max": speculation["max"],
        "draft_temperature": speculation["draft_temperature"],
    }
    if job.draft_dtype != "auto":
        found |= {"draft_dtype": job.draft_dtype}
    kind = CONTROLLERS.get(speculation["length"])
    if plan.surface is not None and plan.surface.measured and kind is not None and kind.profile:
        # it decides the draft lengths, which change the samples
        found |= {"profile": plan.surface.digest()}
    return found


@functools.cache
def _commit(code: str) -> str | None:
    """Return the commit of the installation with this file, with "-dirty" if its clone has changes.

    None if it is not a clone and was not installed from one by its address. It is found once in a
    process: the code that runs is loaded.
    """
    folder = Path(code).resolve().parents[2]
    command = ("git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40")
    try:
        if (folder / ".git").exists():
            # without tags, describe gives the commit
            found = subprocess.run((*command, "--exclude=*"), capture_output=True, timeout=5)
            return found.stdout.decode().strip() or None
        address = importlib.metadata.distribution("bass-cli").read_text("direct_url.json")
        return str(json.loads(address or "{}")["vcs_info"]["commit_id"])
    except (ImportError, OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return None
