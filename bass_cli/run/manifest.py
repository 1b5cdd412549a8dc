"""What a plan says of the file that its samples go to, and what a person should know before they
are drawn.

It knows no weights; so a process that draws elsewhere can be told it. Not here: the plan (plan.py),
how a manifest is written and compared (io/resume.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bass_cli import __version__
from bass_cli.io.shards import Shard

if TYPE_CHECKING:
    from bass_cli.run.plan import Plan

_PROFILED = ("auto", "table", "bass+table")  # draft lengths that a profile decides


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known once the models were looked at: the manifest, how many rows are drawn at once,
    what the user should know, and whether the target has a chat template."""

    manifest: dict[str, Any]
    rows: int
    notes: tuple[str, ...]
    chats: bool


def facts_of(plan: Plan, source: Mapping[str, Any], *, shard: Shard | None = None) -> Facts:
    """What there is to know of a plan; see `describe`."""
    manifest = describe(plan, source, shard=shard)
    return Facts(manifest, plan.rows, plan.notes, plan.files.tokenizer.has_chat_template)


def describe(
    plan: Plan, source: Mapping[str, Any], *, shard: Shard | None = None
) -> dict[str, Any]:
    """The manifest: what the run is; "results" holds all that changes its lines, which a resumed
    run is held against. `source`: what identifies the prompts, `shard`: which of them are drawn."""
    job, identity = plan.job, plan.identity()
    versions = identity.pop("versions")
    results: dict[str, Any] = {
        **identity,
        **source,
        "n": job.n,
        "limit": job.limit,
        "chat": job.chat,
    }
    results |= {
        **job.sampling.model_dump(mode="json"),
        "coupling": job.speculation.coupling,
        "budget": job.budget,
    }
    results |= {"token_ids": job.token_ids, "bass": __version__.split(".")[0]}
    if shard is not None:
        results |= {"shard": str(shard)}
    if job.speculation.coupling == "maximal":
        speculation = job.speculation.model_dump(mode="json")
        draft_files = plan.files.draft and plan.files.draft.fingerprint(plan.files.mask)
        results |= {"draft": job.pair.draft, "draft_files": draft_files}
        results |= {"batch_size": plan.rows, "draft_length": speculation["length"]}
        results |= {
            "max": speculation["max"],
            "draft_temperature": speculation["draft_temperature"],
        }
        if (
            plan.surface is not None
            and plan.surface.measured
            and speculation["length"] in _PROFILED
        ):
            # the draft lengths come from it, and reach the samples
            results |= {"profile": plan.surface.digest()}
    return {"results": results, "job": job.model_dump(mode="json"), "versions": versions}
