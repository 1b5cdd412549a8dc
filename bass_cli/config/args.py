"""Define the options of each command as a typed object. None (or False) means not given.

Options that several commands share are declared once, in a common base class. cli/options.py has
their names and help texts; config/job.py and the commands check their values.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PairArgs:
    """The models and the machine."""

    pair: str | None = None
    model: str | None = None
    draft: str | None = None
    device: str | None = None
    dtype: str | None = None
    threads: int | None = None


@dataclass(frozen=True, kw_only=True)
class LawArgs(PairArgs):
    """The options above, and how a token is sampled."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    coupling: str | None = None


@dataclass(frozen=True, kw_only=True)
class SampleArgs(LawArgs):
    """The options above, and how samples are drawn: shared by `generate` and `eval`."""

    n: int | None = None
    max_new_tokens: int | None = None
    stop: list[str] | None = None
    draft_length: str | None = None
    budget: str | None = None
    batch_size: str | None = None
    limit: int | None = None
    shard: str | None = None
    ray: str | None = None
    actors: str | None = None
    tensor_parallel: int | None = None
    token_ids: bool | None = None
    resume: bool = False
    overwrite: bool = False
    quiet: bool = False


@dataclass(frozen=True, kw_only=True)
class JobArgs(SampleArgs):
    """All options of a Job."""

    chat: bool | None = None
    prompt_column: str | None = None


@dataclass(frozen=True, kw_only=True)
class GenerateArgs(JobArgs):
    prompts: str
    out: str | None = None
    json_summary: bool = False


@dataclass(frozen=True, kw_only=True)
class MergeArgs:
    out: str
    parts: list[str]
    overwrite: bool = False
    quiet: bool = False


@dataclass(frozen=True, kw_only=True)
class EvaluateArgs(SampleArgs):
    task: str
    max_new_tokens: int | None = None
    temperature: float | None = None
    budgets: str | None = None
    k: str | None = None
    prompt_format: str | None = None
    data: str | None = None
    allow_code_execution: bool = False
    allow_weak_sandbox: bool = False
    out: str | None = None
    report: str | None = None
    workers: int | None = None
    timeout: str | None = None
    rejudge: bool = False
    plot: str | None = None
    json_document: bool = False


@dataclass(frozen=True, kw_only=True)
class ScoreArgs:
    file: str
    task: str | None = None
    data: str | None = None
    k: str | None = None
    allow_code_execution: bool = False
    allow_weak_sandbox: bool = False
    workers: int | None = None
    timeout: str | None = None
    report: str | None = None
    overwrite: bool = False
    rejudge: bool = False
    json_document: bool = False
    quiet: bool = False


@dataclass(frozen=True, kw_only=True)
class ProfileArgs(PairArgs):
    batch_sizes: str | None = None
    json_document: bool = False
    quiet: bool = False


@dataclass(frozen=True, kw_only=True)
class BenchArgs(LawArgs):
    job: str | None = None
    n: int | None = None
    max_new_tokens: int | None = None
    stop: list[str] | None = None
    chat: bool | None = None
    draft_length: str | None = None
    batch_size: str | None = None
    limit: int | None = None
    prompt_column: str | None = None
    ray: str | None = None
    actors: str | None = None
    shape: str | None = None
    draft_shape: str | None = None
    acceptance: list[str] | None = None
    depth: int | None = None
    scale: float | None = None
    batch_sizes: str | None = None
    methods: str | None = None
    controllers: bool = False
    prompts: str | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    samples_per_prompt: int | None = None
    repeats: int | None = None
    time_limit: str | None = None
    rivals: str | None = None
    attention: str | None = None
    tensor_parallel: int | None = None
    json_document: bool = False
    plot: str | None = None
    overwrite: bool = False
    quiet: bool = False


@dataclass(frozen=True, kw_only=True)
class DistillArgs(PairArgs):
    source: str | None = None
    layers: int | None = None
    prompts: str | None = None
    chat: bool | None = None
    prompt_column: str | None = None
    limit: int | None = None
    tokens: int | None = None
    n: int | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    batch_size: str | None = None
    draft_length: int | None = None
    minutes: float | None = None
    steps: int | None = None
    learning_rate: float | None = None
    windows: int | None = None
    window_tokens: int | None = None
    ray: str | None = None
    actors: str | None = None
    out: str | None = None
    overwrite: bool = False
    json_document: bool = False
    quiet: bool = False


@dataclass(frozen=True, kw_only=True)
class PairsArgs:
    names: list[str] | None = None
    json_table: bool = False


@dataclass(frozen=True, kw_only=True)
class DoctorArgs:
    pair: str | None = None
    model: str | None = None
    draft: str | None = None
    tensor_parallel: int | None = None
    threads: int | None = None
    json_table: bool = False


def job_args(args: PairArgs, **changes: Any) -> JobArgs:
    """Return the options of a command that belong to its Job, with changes."""
    known = {one.name for one in fields(JobArgs)}
    return JobArgs(
        **{one.name: getattr(args, one.name) for one in fields(args) if one.name in known} | changes
    )
