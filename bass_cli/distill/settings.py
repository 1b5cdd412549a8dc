"""Check the options of `bass distill` before any weights are read.

From the options follow the job that draws samples, the source of the draft, and the training. This
module also checks that disk and memory are large enough.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bass_cli.config.command_options import job_options
from bass_cli.config.job import Job, Pair, chosen_pair, make_job
from bass_cli.config.machine_commands import DistillArgs
from bass_cli.config.speculation import parse_draft
from bass_cli.distill.agreement import ELEMENTS
from bass_cli.distill.network import Source, first_whole, source_of
from bass_cli.distill.windows import FEWEST, Layout, thinned
from bass_cli.errors import MachineError, UserError
from bass_cli.formats.tokenizer import Tokenizer
from bass_cli.models.spec import AnySpec, Spec, count_parameters
from bass_cli.run.pair import open_files
from bass_cli.run.plan import Plan, device_of
from bass_cli.system.host import free_memory, gigabytes

_TOKENS = {"cpu": 50_000, "cuda": 10_000_000}
_N, _NEW_TOKENS, _TEMPERATURE = 4, 384, 0.9
_FEWEST_NEW_TOKENS = 16  # least default --max-new-tokens, for few --tokens
PASSES = 2  # default passes of training over the samples
_QUARTER = 4  # default: the draft gets one layer in four of the target
_LINE = 16  # bytes of a token in the sample file: its id and its text
# Bytes of memory for a weight: value, gradient and AdamW's two means. Bytes of disk: weight and
# means in a checkpoint, twice while one replaces another, and the draft.
_TRAINED, _KEPT = 16, 2 * 12 + 2
_MARGIN = 0.9  # of the free memory
# Differences that a target may have (Spec.unusual). A draft may not have experts.
_TARGETS = ("experts", "recurrent layers", "gated attention")
# Matrices of the size of an attention mask, in float32, that one recurrent layer has at once in the
# backward pass: decays, products of keys and queries, the system, and their gradients.
_MATRICES = 16


@dataclass(frozen=True, slots=True)
class Training:
    """The settings of a training. A resumed run must have the same ones."""

    draft_length: int
    window_tokens: int
    windows: int
    learning_rate: float
    steps: int | None
    minutes: float | None
    seed: int

    @property
    def layout(self) -> Layout:
        return thinned(self.window_tokens, self.draft_length)


def training_of(args: DistillArgs) -> Training:
    """Check the training options; UserError for a value out of range."""

    def checked(name: str, value: Any, least: float, most: float, default: Any) -> Any:
        if value is None or (least <= value <= most and math.isfinite(value)):
            return default if value is None else value
        raise UserError(f"`{name}`: give a number from {least:g} to {most:g} (got {value})")

    window = checked("window_tokens", args.window_tokens, 16, 1 << 15, 512)
    if window % 8:
        raise UserError(f"`window_tokens` {window}: give a multiple of 8")
    return Training(
        checked("draft_length", args.draft_length, 2, 32, 8),
        window,
        checked("windows", args.windows, 1, 1 << 12, 16),
        checked("learning_rate", args.learning_rate, 1e-8, 1.0, 1e-4),
        checked("steps", args.steps, 1, 1 << 30, None),
        checked("minutes", args.minutes, 0.001, 1e6, None),
        args.seed or 0,
    )


def requested_tokens(args: DistillArgs, training: Training) -> int | None:
    """Return the tokens to draw according to --tokens or --steps; None if neither is given.

    For --steps they are the tokens of all steps divided by PASSES.
    """
    if args.tokens is not None:
        if args.tokens < 1:
            raise UserError(f"`tokens`: give a number above 0 (got {args.tokens})")
        return args.tokens
    if training.steps is None:
        return None
    return -(-training.steps * training.windows * training.window_tokens // PASSES)


def sampling_job(args: DistillArgs, requested: int | None = None) -> tuple[Pair, Job]:
    """Return the pair, and the job that draws its target's samples.

    The job decodes without drafts, because its many rows keep a device busy, and samples without
    top-p or top-k. If few tokens are `requested`, the default samples are fewer and shorter, so
    that several prompts get some.
    """
    new_tokens, n = _NEW_TOKENS, _N
    if requested is not None:
        new_tokens = min(new_tokens, max(requested // _N, _FEWEST_NEW_TOKENS))
    new_tokens = args.max_new_tokens or new_tokens
    if requested is not None:
        n = min(n, max(requested // (FEWEST * new_tokens), 1))
    pair = chosen_pair(args)
    chosen = make_job(pair, **job_options(args)).pair
    given = job_options(
        args,
        draft="none",
        draft_length=None,
        temperature=_TEMPERATURE if args.temperature is None else args.temperature,
        n=args.n or n,
        max_new_tokens=new_tokens,
        top_p=1.0,
        top_k=0,
        coupling="shared",
        token_ids=True,
        chat=args.chat if args.prompts else None,
    )
    job = make_job(chosen, **given)
    if not job.sampling.temperature:
        raise UserError("`temperature` 0: all samples of a prompt would be equal; give one above 0")
    if job.dtype == "fp16":
        raise UserError("`dtype` fp16: its range is too small for training; use bf16 or fp32")
    if job.dtype in ("fp8", "int8", "file"):
        raise UserError(f"`dtype` {job.dtype}: training needs 16 bits or more; use bf16 or fp32")
    return chosen, job


def with_floats(job: Job) -> Job:
    """Return the job with a target of floats: not of a GGUF file's numbers, as "auto" is on a
    CPU."""
    if job.dtype == "auto" and device_of(job.device).type == "cpu":
        return job.model_copy(update={"dtype": "fp32"})
    return job


def once(args: DistillArgs) -> bool:
    """Return whether each prompt of the file is used only once, for n samples.

    True if --n is given and --tokens is not. Otherwise prompts are repeated until there are enough
    tokens.
    """
    return args.prompts is not None and args.n is not None and args.tokens is None


def wanted_tokens(args: DistillArgs, plan: Plan, requested: int | None, prompts: int) -> int:
    """Return how many tokens to draw. `prompts`: number of usable prompts of the file."""
    if args.tokens is not None:
        return args.tokens
    default, job = _TOKENS[plan.device.type], plan.job
    wanted = default if requested is None else min(requested, default)
    return min(wanted, prompts * job.n * job.sampling.max_new_tokens) if once(args) else wanted


def find_source(args: DistillArgs, pair: Pair, plan: Plan) -> Source:
    """Return what the draft starts from; UserError if it does not fit the target."""
    if isinstance(plan.files.target.spec, AnySpec):
        raise UserError(
            f"`model`: {pair.target} runs through transformers' own layers, and bass distill "
            "trains native decoders only"
        )
    if (unusual := plan.files.target.spec.unusual_besides(*_TARGETS)) is not None:
        raise UserError(
            f"`model`: {pair.target} has {unusual}, and bass distill does not run such targets; "
            "its draft can be a published one (docs/DRAFTS.md)"
        )
    if args.source is not None and args.layers is not None:
        raise UserError(
            "`source` and `layers` exclude each other: `layers` always takes layers of the target"
        )
    try:
        words = parse_draft(args.source or pair.draft)
    except ValueError as error:
        raise UserError(f"`source`: {error}") from None
    model = None if words.kind.reads else words.files  # heads cannot run by themselves
    if args.source is not None and model is None:
        raise UserError(
            f'`source`: "{args.source}" is not a model; give a folder, a .gguf file or a hub id'
        )
    if model is None or args.layers is not None:
        spec, tokenizer = plan.files.target.spec, plan.files.tokenizer
        default = max(-(-spec.layers // _QUARTER), first_whole(spec))
        layers = default if args.layers is None else args.layers
        vocab, size = min(tokenizer.size, spec.vocab), tokenizer.size
        return source_of(plan.files.target, layers=layers, mask=None, vocab=vocab, size=size)
    drafting = pair.model_copy(update={"draft": model})
    both = open_files(plan.job.model_copy(update={"pair": drafting}))
    assert both.draft is not None
    tokenizer = Tokenizer.load(both.draft.path, vocabulary=both.draft.vocabulary)
    mask = None
    with contextlib.suppress(UserError):
        mask = both.draft.mask()
    return source_of(
        both.draft, layers=None, mask=mask, vocab=both.draft_vocab, size=tokenizer.size
    )


def check_disk(source: Source, out: Path, tokens: int) -> None:
    """Raise MachineError if the disk has too little room for samples, checkpoint and draft."""
    place = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    need, free = (
        _KEPT * count_parameters(source.spec) + _LINE * tokens,
        shutil.disk_usage(place).free,
    )
    if need > free:
        raise MachineError(
            f"{out}: samples, checkpoints and draft take up to {gigabytes(need)}, but only "
            f"{gigabytes(free)} are free there; give another `out`, or fewer `tokens`"
        )


def check_memory(plan: Plan, source: Source, training: Training) -> None:
    """Raise MachineError if the device has too little memory for the training."""
    if windows_at_once(plan, source, training, free_memory(plan.device), loaded=False) < 1:
        raise MachineError(
            f"training a draft of {count_parameters(source.spec) / 1e6:.0f} million weights takes "
            f"more than the {gigabytes(free_memory(plan.device))} of free memory; start from a "
            "smaller model (`source`), or give fewer `layers` or `window_tokens`"
        )


def windows_at_once(
    plan: Plan, source: Source, training: Training, free: int, *, loaded: bool
) -> int:
    """Return how many windows of a step fit into `free` bytes at once.

    Gradients of several such parts are added up. `loaded`: whether the weights of both models are
    already in memory.
    """
    spec, item = source.spec, plan.dtype.itemsize
    free -= (_TRAINED - 4 * loaded) * count_parameters(spec)
    free -= 0 if loaded else item * count_parameters(plan.files.target.spec)
    guesses = 5 * 4 * min(ELEMENTS, training.layout.tokens * training.windows * source.vocab)
    heads = 4 * spec.vocab * spec.width + item * source.vocab * plan.files.target.spec.width
    free = int(_MARGIN * free) - item * count_parameters(spec) - guesses - heads
    masks = _attention_masks(plan, source, training, item)
    each = training.layout.tokens * _activations(spec, item) + masks
    return max(min(free // each, training.windows), 0)


def _activations(spec: Spec, item: int) -> int:
    """Return the bytes that a token keeps for the backward pass.

    Each layer keeps the inputs of its norms, products, attention and activation. The keys of a text
    are copied for each group of masks.
    """
    heads, keys = spec.heads * spec.head_size, 2 * spec.kv_heads * spec.head_size
    layer = 6 * spec.width + 5 * heads + 8 * keys + 5 * spec.inner
    recurrent = spec.recurrent
    if recurrent is None:
        return spec.layers * layer * item
    # Projections of all recurrent layers, and the float32 values of one.
    kept = len(recurrent.layers) * (recurrent.channels + 3 * recurrent.values) * item
    return spec.layers * layer * item + kept + 4 * 6 * (recurrent.channels + recurrent.values)


def _attention_masks(plan: Plan, source: Source, training: Training, item: int) -> int:
    """Return the bytes of a window's attention masks, for student and target together, and of the
    matrices of the same size in a recurrent layer."""
    layout, spec = training.layout, plan.files.target.spec
    pairs = layout.groups * layout.masks * (layout.window + layout.masks) + layout.window**2
    found = 3 * spec.heads * pairs * item
    every = (spec.recurrent, source.spec.recurrent)
    heads = max(0 if one is None else one.value_heads for one in every)
    return found + _MATRICES * 4 * heads * pairs
