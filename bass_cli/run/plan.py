"""Plan a job before any weights are loaded: files, device, dtype, vocabulary, memory and rows.

Every mistake that can be found without weights is found here. build.py loads the models;
scheduler.py runs the job.
"""

from __future__ import annotations

import math
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bass_cli import __version__
from bass_cli.config.job import Job
from bass_cli.engine.batch import beyond
from bass_cli.engine.clock import expected
from bass_cli.engine.verify import Cut
from bass_cli.errors import MachineError, UserError
from bass_cli.formats.checkpoint import Checkpoint
from bass_cli.formats.completion_text import Tags, ending_ids, tags_of
from bass_cli.formats.gguf_tokenizer import notes_of_tokenizer
from bass_cli.formats.grouped_weights import file_layouts
from bass_cli.formats.tokenizer import Tokenizer
from bass_cli.formats.weights import layouts_of
from bass_cli.io.cache import prepare_kernel_cache
from bass_cli.io.prompts import Wanted
from bass_cli.lengths.surface import Surface
from bass_cli.models.block_allocator import BlockLayout
from bass_cli.models.spec import FILE, PLAIN, Format, Layouts
from bass_cli.run.memory import SLACK, Extras, Footprint, MemoryNeed, footprint, usable
from bass_cli.run.pair import (
    Files,
    check_draft_dtype,
    check_ranks,
    costs_of,
    cut_of,
    longest_draft,
    open_files,
    reach,
    tokens_of,
    with_draft,
    with_draft_format,
    with_stored_dtype,
)
from bass_cli.run.sampling import with_model_defaults
from bass_cli.system.host import (
    driver_version,
    free_memory,
    gigabytes,
    gpu_fault,
    processor_name,
    wake,
)
from bass_kernels import LAYOUTS, grouped_works

# The formats of all numbers. The others (LAYOUTS of bass_kernels) are of matrices only.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# The least positions of a row's first block. Larger blocks waste memory on short samples; smaller
# ones are copied more often.
_PIECE = 256
# Maximum rows that --batch-size auto takes (docs/decisions/07-batches.md). On one CPU thread
# SmolLM2 decodes 135 tokens a second with 64 rows and 138 with 128.
_MOST = {"cpu": 64, "cuda": 1024}


@dataclass(frozen=True, slots=True)
class Plan:
    """A job with the opened files of its pair, and what it will run with.

    Args:
        footprint: The memory of the job by its rows and new tokens.
        free: Usable bytes of the device.
        most_rows: The rows that fit, if every prompt is as long as the longest.
        cached_tokens: The new tokens of a row that the cache holds on average.
        profile: The file of round costs; None without a draft.
        surface: The content of that file; None if there is none.
        notes: Notes to the user.
        prompts: The number of prompts; None if unknown.
        wanted: What the prompts ask for, if some have settings of their own.
        options: The flags that set rows and new tokens, for error messages.
    """

    job: Job
    files: Files
    device: torch.device
    dtype: torch.dtype
    footprint: Footprint
    free: int
    most_rows: int
    cached_tokens: int
    profile: Path | None = None
    surface: Surface | None = None
    notes: tuple[str, ...] = ()
    prompts: int | None = None
    wanted: Wanted | None = None
    options: tuple[str, str | None] = ("`batch_size`", "`sampling.max_new_tokens`")

    @property
    def eos_ids(self) -> frozenset[int]:
        """The end-of-sequence ids of the checkpoint and of the tokenizer."""
        return frozenset(self.files.target.eos_ids).union(self.files.tokenizer.eos_ids)

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end a sample: `stop_token_ids`, and stop texts that are special tokens."""
        sampling = self.job.sampling
        return ending_ids(self.files.tokenizer, sampling.stop, sampling.stop_token_ids)

    @property
    def layouts(self) -> Layouts:
        """The layouts of the target's weights."""
        return layouts_of(self.job.dtype, self.files.target)

    @property
    def draft_format(self) -> Format:
        """The number formats of the draft."""
        return draft_format_of(self.job, self.dtype, self.files.draft)

    @property
    def tags(self) -> Tags | None:
        """The tags of the model's thinking parts; None if it has none."""
        return tags_of(self.files.tokenizer)

    @property
    def samples(self) -> int | None:
        """The number of samples to draw; None if unknown."""
        if self.wanted is not None:
            return self.wanted.drawn
        prompts = self.job.limit if self.prompts is None else self.prompts
        return None if prompts is None else prompts * self.samples_per_prompt

    @property
    def samples_per_prompt(self) -> int:
        """The most samples of a prompt that are drawn."""
        return _samples_per_prompt(self.job, self.wanted)

    @property
    def draws_together(self) -> bool:
        """See Job.draws_together; prompts may have temperatures of their own."""
        random = self.job.draws_together if self.wanted is None else self.wanted.random
        return self.job.speculation.coupling == "maximal" and random

    @property
    def rows(self) -> int:
        """The rows of the batch."""
        return self._rows(self.most_rows)

    @property
    def unlimited_rows(self) -> int:
        """The rows of the batch if memory were unlimited."""
        return self._rows(sys.maxsize)

    def _rows(self, most: int) -> int:
        """Choose the rows, up to `most`.

        A given batch size is taken as it is. With a budget it is one prompt's samples, because
        latency counts. Otherwise the job runs in as few waves as possible, because a round of all
        rows takes less time than two rounds of half of them, with drafts too. All waves have the
        same size, so that the last one has no empty rows.
        """
        if isinstance(self.job.batch_size, int):
            return min(self.job.batch_size, most)
        if self.job.budget is not None:
            return min(self.samples_per_prompt, most)
        most = min(most, _MOST[self.device.type])
        samples = self.samples or most
        return math.ceil(samples / math.ceil(samples / most))

    @property
    def span(self) -> int:
        """The positions of a row's private KV: its new tokens and the drafts beyond them."""
        return self.new_tokens + beyond(reach(self.job, self.files, self.device))

    @property
    def blocks(self) -> BlockLayout:
        """The blocks of the rows' private KV.

        A row has one block if the cache holds all new tokens of every row. Otherwise blocks are
        smaller, and rows get more of them as they grow.
        """
        extra, most = self.span - self.new_tokens + SLACK, 1
        whole = self.new_tokens + extra
        if self.cached_tokens >= self.new_tokens:
            return BlockLayout(self.rows, 1, whole, extra)
        while whole // (2 * most) >= max(_PIECE, extra):
            most *= 2
        size = math.ceil(whole / most)
        return BlockLayout(
            max(self.rows * (self.cached_tokens + extra) // size, most), most, size, extra
        )

    @property
    def max_new_tokens(self) -> int:
        """The most new tokens that the prompts' settings allow."""
        return _max_new_tokens(self.job, self.wanted)

    @property
    def new_tokens(self) -> int:
        """The most new tokens of a sample."""
        return min(self.max_new_tokens, self.files.target.spec.context - 1)

    @property
    def longest(self) -> int:
        """The longest draft, in tokens."""
        most, draft = longest_draft(self.job), self.files.draft
        return most if draft is None or draft.head is None else min(most, draft.head.drafts)

    @property
    def cut(self) -> Cut | None:
        """The rule by which the draft's confidence truncates drafts; None if they are not."""
        return cut_of(self.job, self.files, self.device)

    @property
    def memory_need(self) -> MemoryNeed:
        """The memory that its rows and new tokens need."""
        return MemoryNeed(
            self.footprint,
            self.rows,
            self.max_new_tokens,
            self.device,
            self.options,
            self.cached_tokens,
        )

    @property
    def memory_parts(self) -> dict[str, int]:
        """The bytes of memory that it takes, by purpose."""
        prompts = max(self.rows / self.samples_per_prompt, 1)
        return self.footprint.parts(
            self.rows, self.max_new_tokens, prompts=prompts, cached_tokens=self.cached_tokens
        )

    @property
    def rows_reason(self) -> str:
        """The reason for the number of rows."""
        if isinstance(self.job.batch_size, int):
            return "set by `batch_size`"
        if self.rows < self.unlimited_rows:
            return f"more might not fit into the {gigabytes(self.free)} of free memory"
        if self.job.budget is not None:
            return "the samples of one prompt, because there is a budget"
        if self.samples is None:
            return "the most on this kind of device; a job of fewer samples draws all at once"
        waves = math.ceil(self.samples / self.rows)
        return "all samples at once" if waves == 1 else f"{self.samples} samples in {waves} waves"

    @property
    def cache_note(self) -> str:
        """A note if the cache cannot hold all rows at their longest; else an empty text."""
        if self.cached_tokens >= self.new_tokens:
            return ""
        return (
            f"the cache holds {self.cached_tokens} of up to {self.new_tokens} new tokens of a row "
            "on average; a row that does not fit is preempted and drawn again"
        )

    def identity(self) -> dict[str, Any]:
        """Return what the results depend on besides the job, and versions, for the manifest."""
        path, head = self.files.target.path, self.layouts.head
        return {
            "target": self.job.pair.target,
            "target_files": self.files.target.fingerprint(),
            "vocabulary": self.files.tokenizer.fingerprint(),
            "device": self.device.type,
            "dtype": name_of_dtype(self.dtype, self.layouts),
            # of heads in 8 bits only: older files with that dtype have samples of another head
            **({"head_dtype": head} if head in LAYOUTS else {}),
            "format": "gguf" if path.suffix == ".gguf" else "safetensors",
            "versions": self.versions,
        }

    @property
    def versions(self) -> dict[str, str]:
        """The versions of bass, torch and Python, and the name of the device."""
        device = platform.machine()
        if self.device.type == "cuda":  # a plan of remote work needs no GPU here
            there = torch.cuda.is_available()
            device = torch.cuda.get_device_name(self.device) if there else "cuda"
        return {
            "bass": __version__,
            "torch": str(torch.__version__),  # whose type is torch's: to unpickle it imports torch
            "python": platform.python_version(),
            "device": device,
        }

    @property
    def origin(self) -> dict[str, str | None]:
        """Where the models come from and where they run, for readers of the manifest.

        A revision is the commit of a hub repository, or "files:" and a digest of the weights.
        """
        draft = self.files.draft
        on_gpu = self.device.type == "cuda"
        return {
            "revision": _revision(self.files.target),
            "draft_revision": None if draft is None else _revision(draft),
            "processor": processor_name(),
            "driver": driver_version() if on_gpu else None,
        }


def _revision(model: Checkpoint) -> str:
    """Return the commit of a model from the hub, else "files:" and a digest of its weights."""
    for folder in (model.path, *model.path.absolute().parents):
        if folder.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", folder.name):
            return folder.name
    return f"files:{model.fingerprint()}"


def make_plan(
    job: Job,
    *,
    longest_prompt: str | list[int] = "",
    prompts: int | None = None,
    wanted: Wanted | None = None,
    options: tuple[str, str | None] = ("`batch_size`", "`sampling.max_new_tokens`"),
    grows: bool = True,
    tokenizer: Callable[[], Tokenizer | None] = lambda: None,
) -> Plan:
    """Check all that can be checked without weights, and plan the job.

    Args:
        longest_prompt: The text or token ids of the longest prompt, if known.
        prompts: The number of prompts; None if unknown.
        wanted, options: See Plan.
        grows: Whether the rows' cache may grow (Loop.grow is called), for more rows.
        tokenizer: Returns a tokenizer that was begun early (tokenizer.begin).
    """
    device = device_of(job.device)
    wake(device)  # while files are read
    files = open_files(job, tokenizer)
    check_ranks(job, files, device)
    job, own = _with_defaults_of_files(job, files, device)
    dtype = dtype_of(job.dtype, device)
    notes = [*_notes(job, files, dtype), *own]
    profile, surface = costs_of(job, files, device, _formats_of(job, dtype, files), notes.append)
    tokens = tokens_of(longest_prompt, files.tokenizer, files.target.spec.context)
    found = _footprint(job, files, tokens, device=device, dtype=dtype, wanted=wanted)
    free = usable(free_memory(device))
    if device.type == "cpu":
        free //= job.tensor_parallel  # all processes share it
    limit = _max_new_tokens(job, wanted)
    fitting = found.most_rows(limit, free, samples=_samples_per_prompt(job, wanted))
    plan = Plan(
        job,
        files,
        device=device,
        dtype=dtype,
        footprint=found,
        free=free,
        most_rows=fitting,
        cached_tokens=limit,
        profile=profile,
        surface=surface,
        prompts=prompts,
        wanted=wanted,
        options=options,
    )
    if grows:
        plan = _with_growing_cache(plan)
    least = job.batch_size if isinstance(job.batch_size, int) else 1  # checked below
    plan = replace(plan, most_rows=max(plan.most_rows, least))
    plan.memory_need.check()
    if plan.rows < plan.unlimited_rows:
        notes.append(f"{plan.rows} rows at a time, not {plan.unlimited_rows}: {plan.rows_reason}")
    if plan.cache_note:
        notes.append(plan.cache_note)
    return replace(plan, notes=tuple(notes))


def _with_defaults_of_files(job: Job, files: Files, device: torch.device) -> tuple[Job, list[str]]:
    """Return the job with the draft, the number format and the sampling settings of the models'
    files where it has none of its own, and notes."""
    job = with_draft(job, files.chosen_draft)
    check_draft_dtype(job, files.draft)
    if files.draft is not None:
        job = with_draft_format(job, files.draft.head, device)
    job, on_format = _with_format(with_stored_dtype(job, files.target, device), files, device)
    job, on_sampling = with_model_defaults(job, files.target)
    return job, [*on_sampling, *on_format]


def _max_new_tokens(job: Job, wanted: Wanted | None) -> int:
    """Return the most new tokens of a sample."""
    return job.sampling.max_new_tokens if wanted is None else wanted.new_tokens


def _samples_per_prompt(job: Job, wanted: Wanted | None) -> int:
    """Return the most samples of a prompt that are drawn."""
    if wanted is not None:
        return wanted.most
    return 1 if job.draws_one else job.n


def plan_of_others(job: Job) -> Plan:
    """Plan a job that other processes run, from its files alone: no device, memory or rows.

    `job.device` must be "cuda" or "cpu".
    """
    device, files = torch.device(job.device), open_files(job)
    job, _ = _with_defaults_of_files(job, files, device)
    dtype, tokens = dtype_of(job.dtype, device), job.sampling.max_new_tokens
    found = _footprint(job, files, 0, device=device, dtype=dtype)
    return Plan(job, files, device, dtype, found, free=0, most_rows=1, cached_tokens=tokens)


def _with_growing_cache(plan: Plan) -> Plan:
    """Plan more rows than fit at their longest, with a cache that grows with them.

    The batch has as many rows as fit at the expected length. There is no such plan with a budget,
    because a preempted row is late, nor under maximal coupling, because its sample would change.
    """
    job, found = plan.job, plan.footprint
    if (
        not 0 < plan.most_rows < plan.unlimited_rows
        or job.budget is not None
        or job.speculation.coupling == "maximal"
    ):
        return plan
    tokens, samples = plan.new_tokens, plan.samples_per_prompt
    least = replace(plan, cached_tokens=0).blocks
    cached_tokens = max(math.ceil(expected(tokens)), least.size - least.extra)
    most = found.most_rows(tokens, plan.free, samples=samples, cached_tokens=cached_tokens)
    if least.most == 1 or most <= plan.most_rows:
        return plan
    fewer = replace(plan, most_rows=most, cached_tokens=cached_tokens)
    room = found.most_cached_tokens(fewer.rows, tokens, plan.free, samples=samples)
    return replace(fewer, cached_tokens=max(cached_tokens, room))


def _notes(job: Job, files: Files, dtype: torch.dtype) -> Iterator[str]:
    """Yield notes on settings that take no effect, and on the models' files."""
    yield from files.notes
    if job.device == "auto" and torch.cuda.is_available() and (fault := gpu_fault()):
        yield f"{fault}: the CPU is used"
    yield from _notes_on_weights(job, files, dtype)
    spec = files.target.spec
    if job.kv_dtype == "fp8" and "qkv" in spec.biases and spec.rope is not None:
        yield (
            "`kv_dtype` fp8: the keys of this model have biases, so 8 bits change its distribution "
            "more than that of other models (docs/guide/budgets-and-memory.md)"
        )
    if files.tokenizer.path == files.target.path:
        yield from notes_of_tokenizer(files.target.metadata)
    if job.thinking == "off" and (switch := files.tokenizer.check_chats()) is not None:
        yield f"`thinking` off: {switch} is false in the chat template"
    elif job.thinking == "off" and tags_of(files.tokenizer) is None:
        yield "`thinking` off: the model has no thinking part that bass knows"
    elif job.thinking == "off":
        yield "`thinking` off: an empty thinking part is put before the answers of chats"
    if job.pair.target == job.pair.fallback:
        yield (
            f'pair "{job.pair.name}": the package of its target is not installed; the target is '
            f"{job.pair.fallback} from the Hugging Face hub"
        )
    if job.sampling.logprobs_of == "processed" and job.sampling.logprobs is None:
        yield (
            "`sampling.logprobs_of` processed: only prompts with `logprobs` of their own have "
            "log-probabilities; set `sampling.logprobs` for all"
        )
    if (
        job.budget
        and job.speculation.coupling == "maximal"
        and isinstance(job.batch_size, int)
        and job.batch_size > job.n
    ):
        yield (
            f"`batch_size` {job.batch_size}: only {job.n} rows are used; with a budget and maximal "
            "coupling prompts run one at a time"
        )


def _notes_on_weights(job: Job, files: Files, dtype: torch.dtype) -> Iterator[str]:
    """Yield a note on each model whose files have quantised weights: what they take when loaded."""
    formats = (
        Format(dtype, layouts_of(job.dtype, files.target)),
        draft_format_of(job, dtype, files.draft),
    )
    for one, own in zip((files.target, files.draft), formats, strict=True):
        if one is None or not one.quantised_as:
            continue
        shapes = dict(one.shapes)
        if one.spec.tied and own.layouts.head is None:
            del shapes["head.weight"]
        layout = own.layouts.layers
        if layout is None:
            how = f"dequantises them to {name_of_dtype(*own)}"
        else:
            how = f"keeps them in {layout}" if layout == one.by_row else f"rounds them to {layout}"
        yield (
            f"{one.path}: weights are stored in {' and '.join(one.quantised_as)}; bass {how}: "
            f"{gigabytes(own.bytes_of(shapes))} instead of {gigabytes(one.size)}"
        )


def _footprint(
    job: Job,
    files: Files,
    prompt_tokens: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    wanted: Wanted | None = None,
) -> Footprint:
    spec, own = files.target.spec, (wanted or Wanted()).with_prompt(job)
    return footprint(
        spec,
        None if files.draft is None else files.draft.spec,
        dtype=dtype,
        device=device,
        longest=reach(job, files, device),
        eight_bits=job.kv_dtype == "fp8",
        at_once=files.mask is not None,
        head=None if files.draft is None else files.draft.head,
        kept_layers=spec.layers - len(files.skipped) if files.skipped else 0,
        prompt_tokens=prompt_tokens,
        ranks=job.tensor_parallel,
        extras=Extras(own.changes_logits, own.top, own.scores),
        layouts=layouts_of(job.dtype, files.target),
        draft_format=draft_format_of(job, dtype, files.draft),
    )


def device_of(wanted: str) -> torch.device:
    """Return the device for a setting: "auto", "cuda" or "cpu". "auto" is the CPU if the GPU
    is too old."""
    fault = None if wanted == "cpu" else gpu_fault()
    if wanted == "cuda" and fault is not None:
        raise MachineError(f"`device` cuda: {fault}")
    if wanted == "cpu" or fault is not None:
        return torch.device("cpu")
    prepare_kernel_cache()
    # As until Triton 3.8. 3.9 warns without it, and 3.10 is to round products before sums.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    return torch.device("cuda")


def dtype_of(wanted: str, device: torch.device) -> torch.dtype:
    """Return the dtype of activations, caches and all weights that are not quantised."""
    if wanted in DTYPES:
        return DTYPES[wanted]
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def draft_format_of(job: Job, dtype: torch.dtype, draft: Checkpoint | None) -> Format:
    """Return the number formats of a job's draft, whose target computes in `dtype`. draft: see
    `layouts_of`."""
    wanted = job.draft_dtype
    if job.dtype == FILE and wanted in ("target", "auto") and draft is not None and draft.head:
        return Format(dtype)  # parts of its matrices are multiplied, which groups do not have
    if wanted == "target" or (wanted == "auto" and job.dtype == FILE):
        return Format(dtype, layouts_of(job.dtype, draft))
    if wanted in LAYOUTS:  # the head too: it is most of a small draft, and no distribution changes
        return Format(dtype, Layouts(wanted, wanted))
    return Format(DTYPES.get(wanted, dtype))


def _formats_of(job: Job, dtype: torch.dtype, files: Files) -> str:
    """Return what the time of a round depends on: the formats of target and draft."""
    name = name_of_dtype(dtype, layouts_of(job.dtype, files.target))
    return name if job.draft_dtype == "auto" else f"{name}, draft {job.draft_dtype}"


def _with_format(job: Job, files: Files, device: torch.device) -> tuple[Job, list[str]]:
    """Check `dtype` file; return the job with the format that can be used, and notes.

    Raises:
        UserError: the target is not stored so, or the device has no such products.
    """
    if job.dtype != FILE:
        return job, []
    if device.type != "cpu":
        raise UserError(
            "`dtype` file: a file's own numbers are used on a CPU only; on a GPU use fp8, int8 or "
            "bf16, or `device` cpu"
        )
    path = files.target.path
    if job.tensor_parallel > 1:
        raise UserError("`dtype` file: the matrices cannot be split; use `tensor_parallel` 1")
    if file_layouts(files.target) == PLAIN:
        raise UserError(
            f"`dtype` file: {path} has no quantised GGUF matrices; use fp32, bf16 or int8"
        )
    if not grouped_works():
        note = f"`dtype` file: torch has no fast product for it on this processor; {path} is fp32"
        return job.model_copy(update={"dtype": "fp32"}), [note]
    return job, []


def name_of_dtype(dtype: torch.dtype, layouts: Layouts) -> str:
    """Return the word of `dtype` for what a model is stored in."""
    return layouts.layers or {known: name for name, known in DTYPES.items()}[dtype]
