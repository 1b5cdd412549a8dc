"""Load a plan's models, build its loop (batch, drafter, controller), and warm it up.

plan.py checks the job before weights are loaded; scheduler.py runs prompts on the loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from bass_cli.drafts.factory import SHARPER, make_drafter
from bass_cli.engine.batch import Batch, Row
from bass_cli.engine.clock import Clock
from bass_cli.engine.contracts import DraftLength
from bass_cli.engine.graphs import Graphs
from bass_cli.engine.loop import Loop
from bass_cli.engine.verify import Cut
from bass_cli.formats.weights import load, size_of
from bass_cli.lengths.controllers import Fixed, make_lengths
from bass_cli.models.block_allocator import Pieces
from bass_cli.models.decoder import Decoder
from bass_cli.models.heads import Head, make_head
from bass_cli.models.kv_cache import ARENA
from bass_cli.models.ranks import part_of
from bass_cli.models.runner import Runner
from bass_cli.run.pair import longest_draft
from bass_cli.run.plan import Plan
from bass_cli.system.host import give_back_memory
from bass_cli.tensor_parallel.follower import read_part
from bass_cli.tensor_parallel.leader import AnyRunner, Followers, LedRunner, Part

WARMING = {"cpu": "warming up", "cuda": "warming up: compiling kernels, capturing graphs"}
READING = {
    "cpu": "reading the first prompts",
    "cuda": "compiling kernels, reading the first prompts",
}
_WARM_KEY = "\0"  # the key of the warm-up prompt
# tokens of warm-up prompts, for the kernels of short and long prompts
_WARM_PROMPTS = {"cpu": (33,), "cuda": (33, 128, 500)}
_WARM_ROUNDS = 3
_CAPTURED = 16  # the longest draft length captured beforehand if the controller may choose


class Models(NamedTuple):
    """The loaded models of a plan.

    Args:
        target: The target model.
        drafting: The draft model; None if there is none.
        head: The draft head that reads the target's hidden states; None if there is none.
        followers: The processes with the other parts of a split target; None if it is not split.
    """

    target: Decoder
    drafting: Decoder | None
    head: Head | None = None
    followers: Followers | None = None

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
    files, followers = plan.files, _followers(plan)
    share = None if followers is None else followers.ranks.share
    whole = size_of(files.target, share) + (0 if files.draft is None else files.draft.size)
    done = 0

    def on_read(size: int) -> None:
        nonlocal done
        done += size
        on_bytes(done, whole)

    with contextlib.nullcontext() if followers is None else followers.loading():
        spec, ranks = files.target.spec, None
        if followers is not None and share is not None:
            spec, ranks = part_of(spec, share.ranks), followers.ranks
        vocab = min(files.tokenizer.size, files.target.spec.vocab)
        weights = load(
            files.target, dtype=plan.dtype, device=plan.device, share=share, on_read=on_read
        )
        target = Decoder(spec, weights, vocab=vocab, ranks=ranks)
        drafting, head = load_draft(plan, target, on_read)
    return Models(target, drafting, head, followers)


def load_draft(
    plan: Plan, target: Decoder, on_read: Callable[[int], None] = lambda size: None
) -> tuple[Decoder | None, Head | None]:
    """Load the draft model or draft head for a loaded target. Of a split target, the first process
    has all of it."""
    files, draft = plan.files, plan.files.draft
    how = functools.partial(load, dtype=plan.dtype, device=plan.device)
    if draft is None:
        kept = [i for i in range(files.target.spec.layers) if i not in files.skipped]
        return (target.keep_layers(kept) if files.skipped else None), None
    weights = how(draft, on_read=on_read)
    if draft.head is None:
        return Decoder(draft.spec, weights, vocab=files.draft_vocab), None
    if target.ranks is not None:  # a split target has no whole embedding to share
        whole = how(files.target, names=("embed.weight", "head.weight", "head.bias"))
        lent = whole if not draft.head.heads else {"embed.weight": whole["embed.weight"]}
        weights = lent | weights
    return None, make_head(draft.head, weights, target)


def _followers(plan: Plan) -> Followers | None:
    """Start the processes with the other parts of the target; they begin to load them."""
    files, ranks = plan.files, plan.job.tensor_parallel
    if ranks == 1:
        return None
    vocab = min(files.tokenizer.size, files.target.spec.vocab)
    needed = sum(plan.parts.values())
    source = functools.partial(read_part, files.target.path)
    return Followers(Part(source, ranks, plan.dtype, plan.device, vocab, needed))


def build(plan: Plan, models: Models | None = None, *, cut: Cut | bool = True) -> Loop:
    """Build a loop with an empty batch.

    Args:
        models: The models; None to load the plan's.
        cut: True to truncate drafts by confidence as the plan says, False for no truncation, or
            another rule, for benchmarks.
    """
    job, speculation = plan.job, plan.job.speculation
    models = models or load_models(plan)
    followers = models.followers
    if job.pair.draft == "none":
        models = Models(models.target, None)
    decoder, drafting, head, _ = models
    if head is not None:
        decoder = decoder.read_by(head)
    size = functools.partial(runner_for, rows=plan.rows, span=plan.span, pieces=plan.pieces)
    target = size(decoder, followers, lag=1)
    runner = None if head is None else target
    if drafting is not None:
        runner = size(drafting, followers, lag=2)
    drafter = make_drafter(
        job.pair.draft,
        runner=runner,
        mask=plan.files.mask,
        head=head,
        coupling=speculation.coupling,
        temperature=speculation.draft_temperature,
        factor=SHARPER,
    )
    return Loop(
        batch=Batch(
            rows=plan.rows, context=ARENA[plan.device.type], device=plan.device, pieces=plan.pieces
        ),
        target=target,
        drafter=drafter,
        lengths=lengths_for(plan),
        coupling=speculation.coupling,
        clock=Clock(),
        graphs=graphs_for(plan.device, followers),
        cut=plan.cut if cut is True else (cut or None),
    )


def graphs_for(device: torch.device, followers: Followers | None) -> Graphs:
    """Make the graphs of a loop's rounds; followers take part in them."""
    if followers is None:
        return Graphs(device)
    return Graphs(device, wanted=followers.graphs.wanted, record=followers.graphs.capture)


def runner_for(
    decoder: Decoder,
    followers: Followers | None,
    *,
    rows: int,
    span: int,
    lag: int,
    pieces: Pieces | None = None,
) -> AnyRunner:
    """Make a runner of a model; followers run the other parts of a split model."""
    if followers is None or decoder.ranks is None:
        return Runner(decoder, rows=rows, span=span, lag=lag, pieces=pieces)
    return LedRunner(decoder, followers, lag, rows=rows, span=span, lag=lag, pieces=pieces)


def ready_loop(plan: Plan, models: Models, on_phase: Callable[[str], None]) -> Loop:
    """Build a loop, and warm it up if there is a budget."""
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
        limit=plan.longest or speculation.max,
        coupling=speculation.coupling,
        surface=plan.surface,
        at_once=plan.files.mask is not None,
    )


def warm_up(loop: Loop, plan: Plan) -> None:
    """Compile, capture and time everything that rounds with a deadline need.

    So the first prompts are as fast as later ones. The loop is empty afterwards, and its controller
    has learnt nothing.
    """
    job, controller, rows = plan.job, loop.lengths, loop.batch.capacity
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
        {rows, min(job.n, rows)},
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
    limit = min(plan.job.sampling.max_new_tokens, plan.files.target.spec.context - 1)
    prompt, far = (
        [0] * max(1, min(tokens, plan.files.target.spec.context - limit)),
        loop.clock.now() + 1e6,
    )
    loop.open(_WARM_KEY, prompt, deadline=far)
    samples = range(min(plan.job.n, loop.batch.capacity))
    loop.admit(*(Row(_WARM_KEY, sample, 0, list(prompt), limit) for sample in samples))
    loop.close(_WARM_KEY)
    for width in widths:
        loop.use(Fixed(width))
        for _ in range(_WARM_ROUNDS):
            if min(loop.batch.rooms()) > 0:
                loop.round(far)
    while len(loop.batch):
        loop.retire(0)
