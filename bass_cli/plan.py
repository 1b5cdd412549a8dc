"""What a job will run with, settled before any weights are loaded: files, device, dtype,
vocabularies.

Not here: building and running it (scheduler.py). Every mistake that can be found without weights
is found here.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bass_cli import __version__
from bass_cli.config.draft_spec import parse_draft, parse_layers
from bass_cli.config.job import Job
from bass_cli.engine.batch import beyond
from bass_cli.errors import MachineError, UserError
from bass_cli.footprint import Footprint, Need, footprint, usable
from bass_cli.lengths import store
from bass_cli.lengths.round_cost import Surface
from bass_cli.model.tokenizer import Tokenizer, check_same_vocabulary
from bass_cli.model.weights import Checkpoint, locate, open_checkpoint
from bass_cli.system.host import free_memory, gigabytes, give_kernels_a_cache

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_SMALL, _LARGE = 8, 32  # rows that --batch-size auto keeps busy at least, on a CPU and on a GPU


@dataclass(frozen=True, slots=True)
class Plan:
    """A job with its opened checkpoints and tokenizer. `draft_vocab`: the ids that a draft model
    may propose. `skipped`: the target's layers that a draft of the kind skip:LAYERS leaves out.
    `profile`: the file for what rounds cost (None without a draft), `surface`: what it holds, if
    it is there. `notes`: what the user should know. `footprint`: what it takes of memory;
    `most_rows`: as many as fit into what is free; `options`: those that set rows and new tokens."""

    job: Job
    target: Checkpoint
    tokenizer: Tokenizer
    draft: Checkpoint | None
    draft_vocab: int
    skipped: frozenset[int]
    device: torch.device
    dtype: torch.dtype
    profile: Path | None = None
    surface: Surface | None = None
    notes: tuple[str, ...] = ()
    footprint: Footprint | None = None
    most_rows: int = sys.maxsize
    options: tuple[str, str | None] = ("--batch-size", "--max-new-tokens")

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ids that end a sample: what the checkpoint says, or else the tokenizer."""
        return frozenset(self.target.eos_ids or self.tokenizer.eos_ids)

    @property
    def rows(self) -> int:
        """How many rows the batch keeps busy. With a budget it is one prompt's samples: latency
        is what counts then."""
        if isinstance(self.job.batch_size, int):
            return self.job.batch_size
        return min(self._wished, self.most_rows)

    @property
    def batch_size(self) -> int | str:
        """What decides the rows: the job's --batch-size, or, where that is auto and memory
        allows fewer, their number."""
        return self.job.batch_size if self.rows >= self._wished else self.rows

    @property
    def _wished(self) -> int:
        least = _LARGE if self.device.type == "cuda" else _SMALL
        return self.job.n if self.job.budget else max(self.job.n, least)

    @property
    def span(self) -> int:
        """How many positions of its own a row needs: no sample is longer than the target's
        context leaves room for."""
        return min(self.job.sampling.max_new_tokens, self.target.spec.context - 1) + beyond(
            longest_draft(self.job)
        )

    @property
    def need(self) -> Need:
        """The memory that its rows and new tokens ask for."""
        assert self.footprint is not None
        return Need(
            self.footprint, self.rows, self.job.sampling.max_new_tokens, self.device, self.options
        )

    def identity(self) -> dict[str, Any]:
        """What the results depend on beside the job, and the versions they came from: for the
        manifest."""
        name = {dtype: name for name, dtype in DTYPES.items()}[self.dtype]
        path = self.target.path
        device = (
            torch.cuda.get_device_name(self.device)
            if self.device.type == "cuda"
            else platform.machine()
        )
        return {
            "target": self.job.pair.target,
            "target_files": self.target.fingerprint(),
            "vocabulary": self.tokenizer.fingerprint(),
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
    options: tuple[str, str | None] = ("--batch-size", "--max-new-tokens"),
) -> Plan:
    """Check all that can be checked without weights. UserError for a mistake, MachineError for
    what is missing here. `longest_prompt`: its text, if it is known; `options`: see Plan."""
    device = device_of(job.device)
    pair, folder = job.pair, job.pair.folder
    target_path = locate(pair.target, folder=folder)
    target = open_checkpoint(target_path)
    draft, draft_path = None, None
    model = parse_draft(pair.draft).model
    if model and not model.startswith("skip:"):
        draft_path = locate(model, folder=folder)
        draft = open_checkpoint(draft_path)
    skipped = _skipped(model or "", target.spec.layers)
    if pair.draft == "none" and job.speculation.length not in ("auto", 0):
        raise UserError(
            f'pair "{pair.name}": there is no draft, so draft length {job.speculation.length} has '
            "no meaning"
        )
    tokenizer = Tokenizer.load(
        locate(pair.tokenizer, folder=folder) if pair.tokenizer else target_path
    )
    vocab = min(tokenizer.size, target.spec.vocab)
    draft_vocab = vocab
    if draft is not None and draft_path is not None:
        other = Tokenizer.load(draft_path)
        check_same_vocabulary(tokenizer, other)
        draft_vocab = min(vocab, other.size, draft.spec.vocab)
    if job.chat and not tokenizer.has_chat_template:
        raise UserError(f"--chat: {pair.target} has no chat template")
    dtype, notes = _dtype(job.dtype, device), list[str]()
    if (
        job.budget
        and job.speculation.coupling == "maximal"
        and isinstance(job.batch_size, int)
        and job.batch_size > job.n
    ):
        notes.append(
            f"--batch-size {job.batch_size}: with a budget and maximal coupling prompts run one "
            "at a time, in "
            f"{job.n} rows"
        )
    profile, surface = None, None
    if pair.draft != "none":
        drafting = pair.draft if draft is None else draft.fingerprint()
        profile = store.path_of(
            target=target.fingerprint(),
            draft=drafting,
            device=device,
            dtype=dtype,
            threads=job.threads,
        )
        surface = store.load_surface(profile, notes.append)
    if "table" in str(job.speculation.length) and not (surface and surface.measured):
        raise UserError(
            f'--draft-length {job.speculation.length}: pair "{pair.name}" has no profile on this '
            "device yet; "
            "make one with bass profile and the same --pair (or --model) and --draft, or use auto "
            "or bass"
        )
    plan = Plan(
        job,
        target,
        tokenizer,
        draft,
        draft_vocab,
        skipped,
        device,
        dtype,
        profile,
        surface,
        tuple(notes),
        options=options,
    )
    return _fitted(plan, _tokens_of(longest_prompt, tokenizer, target.spec.context))


def _tokens_of(prompt: str, tokenizer: Tokenizer, context: int) -> int:
    """How many tokens a prompt needs room for: none beyond the context, for it is not run then."""
    text = prompt.encode(
        errors="replace"
    ).decode()  # only its length counts; what cannot be read fails later
    try:
        return min(len(tokenizer.encode(text, context)), context) if text else 0
    except UserError:  # too long to be tokenised
        return context


def longest_draft(job: Job) -> int:
    """The most tokens that are drafted at once."""
    if job.pair.draft == "none":
        return 0
    length = job.speculation.length
    return length if isinstance(length, int) else job.speculation.max


def _fitted(plan: Plan, prompt_tokens: int) -> Plan:
    """The plan with as many rows as there is memory for; MachineError if those that were asked
    for, or a single one, are too many."""
    job, spec = plan.job, plan.target.spec
    found = footprint(
        spec,
        None if plan.draft is None else plan.draft.spec,
        dtype=plan.dtype,
        device=plan.device,
        longest=longest_draft(job),
        kept_layers=spec.layers - len(plan.skipped) if plan.skipped else 0,
        prompt_tokens=prompt_tokens,
    )
    free = usable(free_memory(plan.device))
    most = found.most_rows(job.sampling.max_new_tokens, free, samples=job.n)
    fitted = replace(plan, footprint=found, most_rows=max(most, 1))
    fitted.need.check()
    if job.batch_size == "auto" and fitted.rows < fitted._wished:
        note = (
            f"{fitted.rows} rows at a time, not {fitted._wished}: more might not fit into the "
            f"{gigabytes(free)} of "
            "memory that can be had here"
        )
        fitted = replace(fitted, notes=(*plan.notes, note))
    return fitted


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


def _skipped(draft: str, layers: int) -> frozenset[int]:
    """The layers in skip:LAYERS, like skip:4-9,12; UserError unless they are some but not all of
    the target's."""
    runs = parse_layers(draft)
    inside = all(last < layers for _, last in runs)
    found = (
        {layer for first, last in runs for layer in range(first, last + 1)}
        if inside
        else set[int]()
    )
    if not inside or len(found) == layers:
        raise UserError(
            f'draft "{draft}": the target has layers 0 to {layers - 1}; skip at least one and not '
            "all"
        )
    return frozenset(found)
