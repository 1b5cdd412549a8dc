"""What a job will run with, settled before any weights are loaded: files, device, dtype,
vocabularies.

Not here: building and running it (scheduler.py). Every mistake that can be found without weights
is found here.
"""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bass_cli import __version__
from bass_cli.config.job import Job
from bass_cli.engine.batch import beyond
from bass_cli.engine.cutting import Cut
from bass_cli.engine.forecast import expected
from bass_cli.errors import MachineError
from bass_cli.formats.continuation import special_stops
from bass_cli.formats.gguf_tokenizer import doubts_of
from bass_cli.formats.tokenizer import Tokenizer
from bass_cli.lengths.costs import Surface
from bass_cli.models.block_allocator import Pieces
from bass_cli.run.memory import SLACK, Footprint, Need, footprint, usable
from bass_cli.run.pair import (
    Files,
    check_ranks,
    costs_of,
    cut_of,
    longest_draft,
    open_files,
    reach,
    tokens_of,
)
from bass_cli.system.host import free_memory, gigabytes, give_kernels_a_cache, wake

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Slots of a row's first piece, at least: with more, most of a short sample's would be empty; with
# fewer, rows would be copied more often.
_PIECE = 256
# Maximum rows that --batch-size auto takes (docs/decisions/13-batch-size.md). On one CPU thread
# SmolLM2 decodes 135 tokens a second with 64 rows and 138 with 128.
_MOST = {"cpu": 64, "cuda": 1024}


@dataclass(frozen=True, slots=True)
class Plan:
    """A job with the opened files of its pair.
    `profile`: the file for what rounds cost (None without a draft), `surface`: what it holds, if
    it is there. `notes`: what the user should know. `footprint`: what it takes of memory, of
    which `free` bytes are there; `most_rows`: as many as fit into that, with every prompt as long
    as the longest and place in the cache for `kept` new tokens of a row on average; `prompts`:
    how many there are (None: nobody knows); `options`: those that set rows and new tokens."""

    job: Job
    files: Files
    device: torch.device
    dtype: torch.dtype
    footprint: Footprint
    free: int
    most_rows: int
    kept: int
    profile: Path | None = None
    surface: Surface | None = None
    notes: tuple[str, ...] = ()
    prompts: int | None = None
    options: tuple[str, str | None] = ("--batch-size", "--max-new-tokens")

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ids that end a sample: the checkpoint's, and the tokenizer's (ends.py)."""
        return frozenset(self.files.target.eos_ids).union(self.files.tokenizer.eos_ids)

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end a sample because a stop text is that token."""
        return special_stops(self.files.tokenizer, self.job.sampling.stop)

    @property
    def samples(self) -> int | None:
        """How many are drawn in all, if that is known."""
        prompts = self.job.limit if self.prompts is None else self.prompts
        return None if prompts is None else prompts * (1 if self.job.draws_one else self.job.n)

    @property
    def rows(self) -> int:
        """How many rows the batch keeps busy."""
        return self._rows(self.most_rows)

    @property
    def wished(self) -> int:
        """How many it would, if there were memory for all that it likes."""
        return self._rows(sys.maxsize)

    def _rows(self, most: int) -> int:
        """Up to `most`: what was asked for; with a budget one prompt's samples, since latency is
        what counts then. Otherwise the job is done soonest in as few turns of its rows as there
        can be, for a round of all of them takes less than two of half of them, with drafts too;
        and in turns of one size, so that the last one has no empty rows."""
        if isinstance(self.job.batch_size, int):
            return min(self.job.batch_size, most)
        if self.job.budget is not None:
            return min(self.job.n, most)
        most = min(most, _MOST[self.device.type])
        samples = self.samples or most
        return math.ceil(samples / math.ceil(samples / most))

    @property
    def span(self) -> int:
        """How many positions of its own a row needs: no sample is longer than the target's
        context leaves room for."""
        return self.new_tokens + beyond(reach(self.job, self.files, self.device))

    @property
    def pieces(self) -> Pieces:
        """How the rows' own keys are cut: a piece a row where there is place for all that every
        row may generate, else smaller ones, of which rows get more as they grow."""
        beside, most = self.span - self.new_tokens + SLACK, 1
        whole = self.new_tokens + beside
        if self.kept >= self.new_tokens:
            return Pieces(self.rows, 1, whole, beside)
        while whole // (2 * most) >= max(_PIECE, beside):
            most *= 2
        size = math.ceil(whole / most)
        return Pieces(max(self.rows * (self.kept + beside) // size, most), most, size, beside)

    @property
    def new_tokens(self) -> int:
        """The most that a sample may generate."""
        return min(self.job.sampling.max_new_tokens, self.files.target.spec.context - 1)

    @property
    def longest(self) -> int:
        """The most tokens that are drafted at once."""
        most, draft = longest_draft(self.job), self.files.draft
        return most if draft is None or draft.head is None else min(most, draft.head.drafts)

    @property
    def cut(self) -> Cut | None:
        """Where rows' drafts may be cut by the draft's confidence; None: nowhere."""
        return cut_of(self.job, self.files, self.device)

    @property
    def need(self) -> Need:
        """The memory that its rows and new tokens ask for."""
        return Need(
            self.footprint,
            self.rows,
            self.job.sampling.max_new_tokens,
            self.device,
            self.options,
            self.kept,
        )

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of the memory that it takes, by what for, with as many prompts at once as its
        rows have."""
        prompts = max(self.rows / (1 if self.job.draws_one else self.job.n), 1)
        return self.footprint.parts(
            self.rows, self.job.sampling.max_new_tokens, prompts=prompts, kept=self.kept
        )

    @property
    def why(self) -> str:
        """What decides the rows."""
        if isinstance(self.job.batch_size, int):
            return "as --batch-size says"
        if self.rows < self.wished:
            return f"more might not fit into the {gigabytes(self.free)} that can be had here"
        if self.job.budget is not None:
            return "the samples of one prompt, since there is a budget"
        if self.samples is None:
            return "the most on this kind of device; a job of fewer samples draws all at once"
        turns = math.ceil(self.samples / self.rows)
        return "all samples at once" if turns == 1 else f"{self.samples} samples in {turns} turns"

    @property
    def share(self) -> str:
        """What is to be known where rows share a cache that is too small for all at their
        longest; else nothing."""
        if self.kept >= self.new_tokens:
            return ""
        return (
            f"the cache holds {self.kept} of the up to {self.new_tokens} new tokens of a row on "
            "average; a row that cannot grow waits, and is drawn again"
        )

    def identity(self) -> dict[str, Any]:
        """What the results depend on beside the job, and the versions they came from: for the
        manifest."""
        name = {dtype: name for name, dtype in DTYPES.items()}[self.dtype]
        path = self.files.target.path
        device = platform.machine()
        if self.device.type == "cuda":  # for a plan of others' work there may be none here
            there = torch.cuda.is_available()
            device = torch.cuda.get_device_name(self.device) if there else "cuda"
        return {
            "target": self.job.pair.target,
            "target_files": self.files.target.fingerprint(),
            "vocabulary": self.files.tokenizer.fingerprint(),
            "device": self.device.type,
            "dtype": name,
            "format": "gguf" if path.suffix == ".gguf" else "safetensors",
            "versions": {
                "bass": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "device": device,
            },
        }


def make_plan(
    job: Job,
    *,
    longest_prompt: str = "",
    prompts: int | None = None,
    options: tuple[str, str | None] = ("--batch-size", "--max-new-tokens"),
    grows: bool = True,
    tokenizer: Callable[[], Tokenizer | None] = lambda: None,
) -> Plan:
    """Check all that can be checked without weights. UserError for a mistake, MachineError for
    what is missing here. `longest_prompt`: its text, if it is known; `prompts`, `options`: see
    Plan. `grows`: the rows' cache may grow with them (Loop.grow is called), so that there can be
    more of them than fit at their longest. `tokenizer`: what was begun (tokenizer.begin)."""
    device = device_of(job.device)
    wake(device)  # while files are read
    files = open_files(job, tokenizer)
    check_ranks(job, files, device)
    dtype, notes = _dtype(job.dtype, device), [*_contradictions(job), *files.notes]
    if files.tokenizer.path == files.target.path:
        notes += doubts_of(files.target.metadata)
    profile, surface = costs_of(job, files, device, dtype, notes.append)
    tokens = tokens_of(longest_prompt, files.tokenizer, files.target.spec.context)
    found = _footprint(job, files, tokens, device=device, dtype=dtype)
    free = usable(free_memory(device))
    if device.type == "cpu":
        free //= job.tensor_parallel  # which all processes share
    fitting = found.most_rows(
        job.sampling.max_new_tokens, free, samples=1 if job.draws_one else job.n
    )
    plan = Plan(
        job,
        files,
        device=device,
        dtype=dtype,
        footprint=found,
        free=free,
        most_rows=fitting,
        kept=job.sampling.max_new_tokens,
        profile=profile,
        surface=surface,
        prompts=prompts,
        options=options,
    )
    if grows:
        plan = _growing(plan)
    if isinstance(job.batch_size, int):  # these are held against the memory next
        plan = replace(plan, most_rows=max(plan.most_rows, job.batch_size))
    plan = replace(plan, most_rows=max(plan.most_rows, 1))
    plan.need.check()
    if plan.rows < plan.wished:
        notes.append(f"{plan.rows} rows at a time, not {plan.wished}: {plan.why}")
    if plan.share:
        notes.append(plan.share)
    return replace(plan, notes=tuple(notes))


def plan_of_others(job: Job) -> Plan:
    """What is known without their device of a job that others run on it: files, vocabularies,
    number format. Nothing of memory or rows, and nothing is looked at but files. `job`: on "cuda"
    or "cpu"."""
    device, files = torch.device(job.device), open_files(job)
    dtype, tokens = _dtype(job.dtype, device), job.sampling.max_new_tokens
    found = _footprint(job, files, 0, device=device, dtype=dtype)
    return Plan(job, files, device, dtype, found, free=0, most_rows=1, kept=tokens)


def _growing(plan: Plan) -> Plan:
    """The plan with rows whose cache grows with them, where more are wished than fit at their
    longest: as many as fit at the length that is expected, with all the memory that they leave.
    Not with a budget, nor under maximal coupling: a row that has to be put back is late, and its
    sample would be another one."""
    job, found = plan.job, plan.footprint
    if (
        not 0 < plan.most_rows < plan.wished
        or job.budget is not None
        or job.speculation.coupling == "maximal"
    ):
        return plan
    tokens, samples = plan.new_tokens, 1 if job.draws_one else job.n
    least = replace(plan, kept=0).pieces
    kept = max(math.ceil(expected(tokens)), least.size - least.beside)
    most = found.most_rows(tokens, plan.free, samples=samples, kept=kept)
    if least.most == 1 or most <= plan.most_rows:
        return plan
    fewer = replace(plan, most_rows=most, kept=kept)
    room = found.most_kept(fewer.rows, tokens, plan.free, samples=samples)
    return replace(fewer, kept=max(kept, room))


def _contradictions(job: Job) -> Iterator[str]:
    """What of a job is not done as it was asked."""
    if job.pair.target == job.pair.fallback:
        yield (
            f'pair "{job.pair.name}": the package of its target is not installed; the target is '
            f"{job.pair.fallback} from the Hugging Face hub"
        )
    if (
        job.budget
        and job.speculation.coupling == "maximal"
        and isinstance(job.batch_size, int)
        and job.batch_size > job.n
    ):
        yield (
            f"--batch-size {job.batch_size}: with a budget and maximal coupling prompts run one "
            f"at a time, in {job.n} rows"
        )


def _footprint(
    job: Job, files: Files, prompt_tokens: int, *, device: torch.device, dtype: torch.dtype
) -> Footprint:
    spec = files.target.spec
    return footprint(
        spec,
        None if files.draft is None else files.draft.spec,
        dtype=dtype,
        device=device,
        longest=reach(job, files, device),
        at_once=files.mask is not None,
        head=None if files.draft is None else files.draft.head,
        kept_layers=spec.layers - len(files.skipped) if files.skipped else 0,
        prompt_tokens=prompt_tokens,
        ranks=job.tensor_parallel,
    )


def device_of(wanted: str) -> torch.device:
    """The device that --device means here."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise MachineError("--device cuda: this machine has no CUDA device that torch can use")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    give_kernels_a_cache()
    return torch.device("cuda")


def _dtype(wanted: str, device: torch.device) -> torch.dtype:
    if wanted == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[wanted]
