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
from typing import Any, NamedTuple

import torch

from bass_cli import __version__
from bass_cli.config.draft_spec import parse_draft, skipped_layers
from bass_cli.config.job import Job
from bass_cli.engine.batch import beyond
from bass_cli.errors import MachineError, UserError
from bass_cli.footprint import Footprint, Need, footprint, usable
from bass_cli.lengths import store
from bass_cli.lengths.round_cost import Surface
from bass_cli.model.tokenizer import Tokenizer, check_same_vocabulary
from bass_cli.model.weights import Checkpoint, locate, open_checkpoint, open_head
from bass_cli.system.host import free_memory, gigabytes, give_kernels_a_cache, wake

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# The most rows that --batch-size auto takes: docs/LOG.md has what more of them gain, and cost.
_MOST = {"cpu": 64, "cuda": 1024}


@dataclass(frozen=True, slots=True)
class Plan:
    """A job with its opened checkpoints and tokenizer. `draft_vocab`: the ids that a draft model
    may propose. `mask`: the token by which it drafts in one pass, None if it does not. `skipped`:
    the target's layers that a draft of the kind skip:LAYERS leaves out.
    `profile`: the file for what rounds cost (None without a draft), `surface`: what it holds, if
    it is there. `notes`: what the user should know. `footprint`: what it takes of memory, of
    which `free` bytes are there; `most_rows`: as many as fit into that, with every prompt as long
    as the longest; `prompts`: how many there are (None: nobody knows); `options`: those that set
    rows and new tokens."""

    job: Job
    target: Checkpoint
    tokenizer: Tokenizer
    draft: Checkpoint | None
    draft_vocab: int
    mask: int | None
    skipped: frozenset[int]
    device: torch.device
    dtype: torch.dtype
    footprint: Footprint
    free: int
    most_rows: int
    profile: Path | None = None
    surface: Surface | None = None
    notes: tuple[str, ...] = ()
    prompts: int | None = None
    options: tuple[str, str | None] = ("--batch-size", "--max-new-tokens")

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ids that end a sample: what the checkpoint says, or else the tokenizer."""
        return frozenset(self.target.eos_ids or self.tokenizer.eos_ids)

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
        return min(self.job.sampling.max_new_tokens, self.target.spec.context - 1) + beyond(
            _reach(self.job, self.draft)
        )

    @property
    def longest(self) -> int:
        """The most tokens that are drafted at once."""
        most, head = longest_draft(self.job), None if self.draft is None else self.draft.head
        return most if head is None else min(most, head.drafts)

    @property
    def need(self) -> Need:
        """The memory that its rows and new tokens ask for."""
        return Need(
            self.footprint, self.rows, self.job.sampling.max_new_tokens, self.device, self.options
        )

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of the memory that it takes, by what for, with as many prompts at once as its
        rows have."""
        prompts = max(self.rows / (1 if self.job.draws_one else self.job.n), 1)
        return self.footprint.parts(self.rows, self.job.sampling.max_new_tokens, prompts=prompts)

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
    prompts: int | None = None,
    options: tuple[str, str | None] = ("--batch-size", "--max-new-tokens"),
) -> Plan:
    """Check all that can be checked without weights. UserError for a mistake, MachineError for
    what is missing here. `longest_prompt`: its text, if it is known; `prompts`, `options`: see
    Plan."""
    device = device_of(job.device)
    wake(device)  # while files are read
    files = _open(job)
    dtype, notes = _dtype(job.dtype, device), list(_contradictions(job))
    profile, surface = _costs(job, files, device, dtype, notes.append)
    tokens = _tokens_of(longest_prompt, files.tokenizer, files.target.spec.context)
    found = _footprint(job, files, tokens, device=device, dtype=dtype)
    free = usable(free_memory(device))
    asked = job.batch_size if isinstance(job.batch_size, int) else 1
    fitting = found.most_rows(
        job.sampling.max_new_tokens, free, samples=1 if job.draws_one else job.n
    )
    plan = Plan(
        job,
        **files._asdict(),
        device=device,
        dtype=dtype,
        footprint=found,
        free=free,
        most_rows=max(fitting, asked),  # these are held against the memory next
        profile=profile,
        surface=surface,
        prompts=prompts,
        options=options,
    )
    plan.need.check()
    if plan.rows < plan.wished:
        notes.append(f"{plan.rows} rows at a time, not {plan.wished}: {plan.why}")
    return replace(plan, notes=tuple(notes))


class _Files(NamedTuple):
    """What of a Plan comes from the files of its models."""

    target: Checkpoint
    tokenizer: Tokenizer
    draft: Checkpoint | None
    draft_vocab: int
    mask: int | None
    skipped: frozenset[int]


def _open(job: Job) -> _Files:
    """The checkpoints and the tokenizer of a job's pair; UserError where they do not fit each
    other, or the job."""
    pair = job.pair
    target_path = locate(pair.target, folder=pair.folder)
    target = open_checkpoint(target_path)
    words = parse_draft(pair.draft)
    draft_path = None if words.files is None else locate(words.files, folder=pair.folder)
    draft, mask = None, None
    if draft_path is not None and words.reads:
        draft = open_head(draft_path, target.spec)
    elif draft_path is not None:
        draft = open_checkpoint(draft_path)
    if draft is not None and (words.parallel or words.reads):
        mask = draft.mask()
    skipped = skipped_layers(words.model or "", target.spec.layers)
    if pair.draft == "none" and job.speculation.length not in ("auto", 0):
        raise UserError(
            f'pair "{pair.name}": there is no draft, so draft length {job.speculation.length} has '
            "no meaning"
        )
    if pair.tokenizer:
        tokenizer = Tokenizer.load(locate(pair.tokenizer, folder=pair.folder))
    else:
        tokenizer = Tokenizer.load(target_path, vocabulary=target.vocabulary)
    draft_vocab = min(tokenizer.size, target.spec.vocab)
    if draft is not None and draft_path is not None and not words.reads:
        other = Tokenizer.load(draft_path, vocabulary=draft.vocabulary)
        check_same_vocabulary(tokenizer, other)
        draft_vocab = min(draft_vocab, other.size, draft.spec.vocab)
    if job.chat and not tokenizer.has_chat_template:
        raise UserError(f"--chat: {pair.target} has no chat template")
    return _Files(target, tokenizer, draft, draft_vocab, mask, skipped)


def _contradictions(job: Job) -> Iterator[str]:
    """What of a job is not done as it was asked."""
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


def _costs(
    job: Job, files: _Files, device: torch.device, dtype: torch.dtype, note: Callable[[str], None]
) -> tuple[Path | None, Surface | None]:
    """The file for what rounds cost, and what it holds; UserError where that is needed and not
    there."""
    pair, profile, surface = job.pair, None, None
    if pair.draft != "none":
        profile = store.path_of(
            target=files.target.fingerprint(),
            draft=pair.draft if files.draft is None else files.draft.fingerprint(files.mask),
            device=device,
            dtype=dtype,
            threads=job.threads,
        )
        surface = store.load_surface(profile, note)
    if "table" in str(job.speculation.length) and not (surface and surface.measured):
        raise UserError(
            f'--draft-length {job.speculation.length}: pair "{pair.name}" has no profile on this '
            "device yet; make one with bass profile and the same --pair (or --model) and --draft, "
            "or use auto or bass"
        )
    return profile, surface


def _footprint(
    job: Job, files: _Files, prompt_tokens: int, *, device: torch.device, dtype: torch.dtype
) -> Footprint:
    spec = files.target.spec
    return footprint(
        spec,
        None if files.draft is None else files.draft.spec,
        dtype=dtype,
        device=device,
        longest=_reach(job, files.draft),
        at_once=files.mask is not None,
        head=None if files.draft is None else files.draft.head,
        kept_layers=spec.layers - len(files.skipped) if files.skipped else 0,
        prompt_tokens=prompt_tokens,
    )


def _tokens_of(prompt: str, tokenizer: Tokenizer, context: int) -> int:
    """How many tokens a prompt needs room for: none beyond the context, for it is not run then."""
    # only its length counts; what cannot be read fails later
    text = prompt.encode(errors="replace").decode()
    try:
        return min(len(tokenizer.encode(text, context)), context) if text else 0
    except UserError:  # too long to be tokenised
        return context


def _reach(job: Job, draft: Checkpoint | None) -> int:
    """The most places of a row that a round writes to behind its last token: a block is never
    cut to the drafts that are wanted."""
    block = 0 if draft is None or draft.head is None else draft.head.block
    return max(longest_draft(job), block)


def longest_draft(job: Job) -> int:
    """The most tokens that a job may ask for at once."""
    if job.pair.draft == "none":
        return 0
    length = job.speculation.length
    return length if isinstance(length, int) else job.speculation.max


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
