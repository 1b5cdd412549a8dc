"""Make models from a source of weights, build their loop (batch, drafter, controller), and warm it
up.

The source is the files of a plan, or random weights of a shape (bench/preparation.py). plan.py
checks the job before weights are loaded; scheduler.py runs prompts on the loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from bass_cli.config.file_options import Structure
from bass_cli.config.job import Job
from bass_cli.drafts.factory import SHARPER, DraftParts, make_drafter
from bass_cli.engine.batch import Batch, Row
from bass_cli.engine.clock import Clock
from bass_cli.engine.contracts import DraftLength
from bass_cli.engine.loop import Loop
from bass_cli.engine.sampling import RowSampling
from bass_cli.engine.verify import Cut, Rate
from bass_cli.formats.grammars import grammars_of
from bass_cli.formats.sources import read_json
from bass_cli.formats.weights import Checkpoint, load, size_of, state_of
from bass_cli.io.cache import prepare_kernel_cache
from bass_cli.lengths.controllers import Fixed, LengthParts, make_lengths
from bass_cli.lengths.costs import arithmetic_of
from bass_cli.models.any_model import load_any
from bass_cli.models.block_allocator import BlockLayout
from bass_cli.models.capture import Graphs
from bass_cli.models.decoder import Decoder
from bass_cli.models.heads import Head, make_head
from bass_cli.models.kv_cache import ARENA
from bass_cli.models.partition import Share
from bass_cli.models.runner import Runner, RunnerSizes
from bass_cli.models.spec import AnySpec, Layouts, Spec
from bass_cli.models.weights import Named
from bass_cli.run.memory import widest
from bass_cli.run.pair import longest_draft, reach
from bass_cli.run.plan import Plan
from bass_cli.run.sampling import row_sampling
from bass_cli.system.host import give_back_memory
from bass_cli.tensor_parallel.follower import Part, Source, read_part
from bass_cli.tensor_parallel.leader import Followers, LedRunner

COMPILING = "compiling kernels"
WARMING = {"cpu": "warming up", "cuda": "warming up: compiling kernels, capturing graphs"}
READING = {
    "cpu": "reading the first prompts",
    "cuda": "compiling kernels, reading the first prompts",
}
_WARM_KEY = "\0"  # the key of the warm-up prompt
# tokens of warm-up prompts, for the kernels of short and long prompts
_WARM_PROMPTS = {"cpu": (33,), "cuda": (33, 128, 500)}
_WARM_ROUNDS = 3
# Numbers of rows besides the batch's, and draft lengths if a controller chooses, whose kernels are
# compiled together. Without the 32 they covered 38 of the 44 forms of rounds of up to 64 or 256
# rows and 16 drafts (a 7B shape, compute capability 9.0). Passes of 17 to 64 tokens have forms of
# their own, which took 1.4 s one by one when the last rows of a job of 875 were left (a 1.5B on an
# H100). The others are compiled when they first run.
_COMPILED_ROWS, _COMPILED_WIDTHS = (1, 8, 32), (0, 2, 8)
_CAPTURED = 16  # the longest draft length captured beforehand if the controller may choose


class Models(NamedTuple):
    """Loaded models.

    Args:
        target: The target model.
        drafting: The draft model; None if there is none.
        head: The draft head that reads the target's hidden states; None if there is none.
        mask: The mask token of a drafter that drafts all tokens in one pass; None for others.
        followers: The processes with the other parts of a split target; None if it is not split.
    """

    target: Decoder
    drafting: Decoder | None = None
    head: Head | None = None
    mask: int | None = None
    followers: Followers | None = None

    @property
    def drafter(self) -> Decoder | None:
        """The draft model or the layers of the draft head; None if there is neither."""
        return self.drafting if self.head is None else self.head.body

    @property
    def compiles_ahead(self) -> bool:
        """Whether all models have `compiles_ahead`, in this process alone: others would run what
        this one only compiles."""
        every = (self.target, self.drafting)
        return self.followers is None and all(one is None or one.compiles_ahead for one in every)

    def close(self) -> None:
        """End the processes with parts of the target; the models cannot be used afterwards."""
        if self.followers is not None:
            self.followers.close()


def load_models(
    plan: Plan, on_bytes: Callable[[int, int], None] = lambda done, whole: None
) -> Models:
    """Load the weights of target and draft.

    `on_bytes` is called with the bytes that are read, and the bytes in all.
    """
    files, ranks = plan.files, plan.job.tensor_parallel
    whole = size_of(files.target, None if ranks == 1 else Share(0, ranks), plan.layouts)
    whole += 0 if files.draft is None else files.draft.size
    done = 0

    def on_read(size: int) -> None:
        nonlocal done
        done += size
        on_bytes(done, whole)

    source: Source = functools.partial(_read_whole, files.target)
    if ranks > 1:
        source = functools.partial(read_part, files.target.path, files.target.adapters)
    vocab = min(files.tokenizer.size, files.target.spec.vocab)
    add_draft = functools.partial(load_draft, plan, on_read=on_read)
    if isinstance(files.target.spec, AnySpec):
        return add_draft(Models(_load_any(files.target, plan.dtype, plan.device, vocab, on_read)))
    needed = sum(plan.memory_parts.values())
    part = Part(source, ranks, plan.dtype, plan.device, vocab, needed, plan.layouts)
    return make_models(part, add_draft, on_read)


def _load_any(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    vocab: int,
    on_read: Callable[[int], None],
) -> Decoder:
    """Load a model whose layers transformers runs."""
    spec = checkpoint.spec
    assert isinstance(spec, AnySpec)
    path, state = checkpoint.path, None
    if checkpoint.is_changed:
        state = state_of(checkpoint, dtype=dtype, device=device)
    found = load_any(
        path,
        read_json(path / "config.json"),
        spec,
        dtype=dtype,
        device=device,
        vocab=vocab,
        state=state,
    )
    on_read(checkpoint.size)
    return found


def make_models(
    part: Part,
    add_draft: Callable[[Models], Models] = lambda models: models,
    on_read: Callable[[int], None] = lambda size: None,
) -> Models:
    """Make the target from any source of weights, here and in the processes of a split target.

    Args:
        part: The source of the target's weights, and how the target is split.
        add_draft: Adds the draft to the models.
        on_read: Called with the bytes after each tensor of the target.
    """
    followers = Followers(part) if part.ranks > 1 else None
    with contextlib.nullcontext() if followers is None else followers.loading():
        spec, weights = part.source(
            Share(0, part.ranks),
            dtype=part.dtype,
            layouts=part.layouts,
            device=part.device,
            on_read=on_read,
        )
        ranks = None if followers is None else followers.ranks
        target = Decoder(spec, weights, vocab=part.vocab, ranks=ranks)
        return add_draft(Models(target, followers=followers))


def _read_whole(
    checkpoint: Checkpoint,
    share: Share,
    *,
    dtype: torch.dtype,
    layouts: Layouts,
    device: torch.device,
    on_read: Callable[[int], None],
) -> tuple[Spec, Named]:
    """Load all of an opened checkpoint. See `Source`."""
    found = load(checkpoint, dtype=dtype, layouts=layouts, device=device, on_read=on_read)
    return checkpoint.spec, found


def load_draft(
    plan: Plan, models: Models, on_read: Callable[[int], None] = lambda size: None
) -> Models:
    """Return the target's models with the plan's draft model or draft head. Of a split target, the
    first process has all of it."""
    files, draft, target = plan.files, plan.files.draft, models.target
    models = models._replace(drafting=None, head=None, mask=files.mask)
    dtype, layouts = plan.draft_format
    read = functools.partial(load, dtype=dtype, device=plan.device)
    if draft is None:
        kept = [i for i in range(files.target.spec.layers) if i not in files.skipped]
        return models._replace(drafting=target.keep_layers(kept)) if files.skipped else models
    if isinstance(draft.spec, AnySpec):
        drafting = _load_any(draft, dtype, plan.device, files.draft_vocab, on_read)
        return models._replace(drafting=drafting)
    weights = read(draft, layouts=layouts, on_read=on_read)
    if draft.head is None:
        return models._replace(drafting=Decoder(draft.spec, weights, vocab=files.draft_vocab))
    if target.ranks is not None:  # a split target has no whole embedding to share
        names, own = ("embed.weight", "head.weight", "head.bias"), Layouts(head=layouts.head)
        whole = read(files.target, names=names, layouts=own)
        lent = whole if not draft.head.heads else {"embed.weight": whole["embed.weight"]}
        weights = lent | weights
    return models._replace(head=make_head(draft.head, weights, target, layouts))


def build(plan: Plan, models: Models | None = None) -> Loop:
    """Build a loop with an empty batch for a plan; `models` default to the plan's."""
    return make_loop(
        models or load_models(plan),
        plan.job,
        rows=plan.rows,
        span=plan.span,
        context=ARENA[plan.device.type],
        blocks=plan.blocks,
        width=widest(reach(plan.job, plan.files, plan.device)),
        lengths=lengths_for(plan),
        cut=plan.cut,
    )


def make_loop(
    models: Models,
    job: Job,
    *,
    rows: int,
    span: int,
    context: int,
    width: int,
    lengths: DraftLength,
    blocks: BlockLayout | None = None,
    cut: Cut | None = None,
    sharper: float = SHARPER,
    acceptance: Sequence[Rate] | None = None,
) -> Loop:
    """Build a loop with an empty batch for a job's draft, coupling and draft temperature.

    Args:
        rows, span: The rows of the batch, and the positions of a row's private KV.
        context: The positions that the batch has at first.
        width: The most tokens of a row in a pass of the target.
        blocks: The blocks of the rows' private KV. Default: one a row.
        sharper: See `factor` of DraftParts.
        cut, acceptance: See Loop.
    """
    target, drafting, head, mask, followers = models
    if job.pair.draft == "none":
        drafting = head = None
    sizes = RunnerSizes(rows, span, 1, blocks, job.kv_dtype == "fp8", width)
    runner = _runner(target if head is None else target.read_by(head), sizes, followers)
    wide = width if mask is None else 2 * width  # missed tokens, and as many masks
    sizes = sizes._replace(pending=2, width=wide)
    drafts = _runner(drafting, sizes, followers) if drafting else None
    parts = DraftParts(
        job.speculation.coupling,
        job.speculation.draft_temperature,
        sharper,
        runner=drafts if head is None else runner,
        mask=mask,
        head=head,
    )
    return Loop(
        batch=Batch(
            rows=rows,
            context=context,
            device=target.device,
            blocks=blocks,
            vocab=target.vocab,
            columns=target.columns,
        ),
        target=runner,
        drafter=make_drafter(job.pair.draft, parts),
        controller=lengths,
        coupling=job.speculation.coupling,
        clock=Clock(),
        acceptance=acceptance,
        graphs=graphs_for(models),
        cut=cut,
    )


def graphs_for(models: Models) -> Graphs:
    """Make the graphs of a loop's rounds; followers take part in them."""
    device, followers, compiles = models.target.device, models.followers, models.compiles_ahead
    if followers is None:
        return Graphs(device, compiles=compiles)
    return Graphs(
        device,
        wanted=followers.graphs.wanted,
        record=followers.graphs.capture,
        check=followers.check,
        compiles=compiles,
    )


def _runner(decoder: Decoder, sizes: RunnerSizes, followers: Followers | None) -> Runner:
    """Make a runner of a model; followers run the other parts of a split model."""
    if followers is not None and decoder.ranks is not None:
        return LedRunner(decoder, sizes, followers)
    return Runner(decoder, **sizes._asdict())


def ready_loop(
    plan: Plan, models: Models, on_phase: Callable[[str], None], on_note: Callable[[str], None]
) -> Loop:
    """Build a loop, compile its kernels, and warm it up if there is a budget."""
    loop = build(plan, models)
    if compiles(loop) and not compile_kernels(loop, plan, on_phase, on_note):
        del loop  # an error may have left it with half of a row
        give_back_memory(plan.device)
        loop = build(plan, models)
    if plan.job.budget is not None:
        on_phase(WARMING[plan.device.type])
        warm_up(loop, plan)
    return loop


def halved(plan: Plan, on_note: Callable[[str], None]) -> Plan:
    """Free the memory of the last attempt and return the plan with half the rows."""
    give_back_memory(plan.device)
    fewer = dataclasses.replace(plan, most_rows=plan.rows // 2)
    on_note(
        f"memory ran out with {plan.rows} rows; going on with {fewer.rows}; samples in progress "
        "are drawn again"
    )
    return fewer


def lengths_for(plan: Plan) -> DraftLength:
    """Make the draft length controller of the plan's job, from the pair's round costs if known."""
    speculation = plan.job.speculation
    return make_lengths(
        speculation.length,
        LengthParts(
            limit=plan.longest or speculation.max,
            coupling=speculation.coupling,
            surface=plan.surface,
            at_once=plan.files.mask is not None,
            arithmetic=arithmetic_of(plan.device),
        ),
    )


def compiles(loop: Loop) -> bool:
    """Whether the loop's rounds are captured, so that their kernels can be compiled before."""
    return loop.graphs is not None and loop.graphs.enabled and loop.graphs.compiles


def compile_kernels(
    loop: Loop, plan: Plan, on_phase: Callable[[str], None], on_note: Callable[[str], None]
) -> bool:
    """Compile most kernels of prompts and rounds, many at a time, if the job is new here.

    One after the other, the 40 to 80 kernels of a job take 10 to 20 s. The loop must be empty and
    is left empty. An empty file in Triton's cache, with a digest of the job's shapes in its name,
    says that they were compiled before.

    Returns:
        False if it failed. Then the loop cannot be used, and kernels are compiled when they first
        run.
    """
    stamp = prepare_kernel_cache() / f"bass-{_digest_of_shapes(plan)}"
    if os.path.exists(stamp):  # False if the folder cannot be searched
        return True
    longest = min(longest_draft(plan.job), loop.drafter.longest)
    fixed = isinstance(plan.job.speculation.length, int)
    widths = {0, longest} if fixed else {min(width, longest) for width in _COMPILED_WIDTHS}
    rows = {min(count, loop.batch.capacity) for count in (*_COMPILED_ROWS, plan.rows)}

    # Without penalties and the like: they index tables by tokens that no kernel has written.
    job = plan.job.sampling
    sampling = RowSampling(temperature=job.temperature, top_k=job.top_k, top_p=job.top_p)

    def work() -> None:
        first, *others = _WARM_PROMPTS[plan.device.type]
        with _rows_on(loop, plan, first, range(1), sampling):
            loop.prepare(rows, widths, catching_up=False, only_compile=True)
        for tokens in others:
            with _rows_on(loop, plan, tokens, range(1), sampling):
                pass

    on_phase(COMPILING)
    assert loop.graphs is not None
    if not loop.graphs.compile([work], on_note):
        return False
    with contextlib.suppress(OSError):
        stamp.touch()
    return True


def _digest_of_shapes(plan: Plan) -> str:
    """Return a digest of all that the forms of a job's kernels depend on."""
    draft, job = plan.files.draft, plan.job
    parts = (
        *(plan.versions, plan.dtype, job.dtype, job.draft_dtype, job.kv_dtype, plan.rows),
        *(job.speculation, job.sampling.temperature, job.sampling.top_k, job.sampling.top_p),
        *(plan.files.target.spec, None if draft is None else (draft.spec, draft.head)),
        *(plan.files.mask, plan.files.skipped, job.pair.draft),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def warm_up(loop: Loop, plan: Plan) -> None:
    """Compile, capture and time everything that rounds with a deadline need.

    So the first prompts are as fast as later ones. The loop is empty afterwards, and its controller
    has learnt nothing.
    """
    job, controller, rows = plan.job, loop.controller, loop.batch.capacity
    fixed = isinstance(job.speculation.length, int)
    longest = min(longest_draft(job), loop.drafter.longest)
    # a controller that may choose needs fewer lengths
    longer = longest if loop.exact else min(longest, _CAPTURED)
    decoded = (0, min(longest, _CAPTURED))
    for tokens in _WARM_PROMPTS[plan.device.type]:
        _decode(loop, plan, tokens, widths=decoded)
    for model in (loop.target, loop.drafter):
        model.prepare_prompts()
    loop.use(controller)
    loop.prepare(
        {rows, min(plan.samples_per_prompt, rows)},
        (0, longer) if fixed else range(longer + 1),
        each=fixed and loop.exact,
    )
    loop.clock.forget()  # its times include compilation
    # The time is linear in the draft length from the first draft on, so two lengths are enough.
    timed = decoded if fixed else sorted({0, min(longer, 1), *decoded})
    _decode(loop, plan, _WARM_PROMPTS[plan.device.type][0], widths=timed)
    loop.use(controller)


def _decode(loop: Loop, plan: Plan, tokens: int, *, widths: Iterable[int]) -> None:
    """Run a few rounds on a dummy prompt, then retire its rows."""
    far = loop.clock.now() + 1e6
    samples = range(min(plan.samples_per_prompt, loop.batch.capacity))
    sampling = row_sampling(plan.job.sampling, plan.files.tokenizer)  # its graphs are captured
    structure = plan.job.sampling.structure
    with _rows_on(loop, plan, tokens, samples, sampling, structure=structure, deadline=far):
        for width in widths:
            loop.use(Fixed(width))
            for _ in range(_WARM_ROUNDS):
                if min(loop.batch.rooms()) > 0:
                    loop.round(far)


@contextlib.contextmanager
def _rows_on(
    loop: Loop,
    plan: Plan,
    tokens: int,
    samples: Iterable[int],
    sampling: RowSampling,
    *,
    structure: Structure | None = None,
    deadline: float | None = None,
) -> Iterator[None]:
    """Make these samples of a dummy prompt live rows; on exit, retire them.

    After an error the loop cannot be used.
    """
    limit = plan.new_tokens
    prompt = [0] * max(1, min(tokens, plan.files.target.spec.context - limit))
    loop.open(_WARM_KEY, prompt, deadline=deadline)
    rows = [Row(_WARM_KEY, sample, 0, list(prompt), limit, sampling) for sample in samples]
    if structure is not None:
        vocab, tokenizer = loop.batch.processors.vocab, plan.files.tokenizer
        for row in rows:
            row.matcher = grammars_of(tokenizer, vocab, plan.eos_ids).matcher(structure)
    loop.admit(*rows)
    yield
    loop.close(_WARM_KEY)
    loop.retire(*range(len(loop.batch)))
