"""Build the models of a bench, and a plain and a speculative loop over them.

The models are a real pair from files, or random weights of real shapes; the acceptance of a random
draft is simulated, or follows from scaled layers. Both loops share the target's KV cache.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bass_cli.bench.settings import Settings
from bass_cli.bench.shapes import AT_ONCE, HEADS, count_parameters, head_of, spec_of
from bass_cli.bench.weights import random_part, random_weights
from bass_cli.drafts.factory import SHARPER, NoDrafter, make_drafter
from bass_cli.engine.batch import Batch, beyond
from bass_cli.engine.clock import Clock
from bass_cli.engine.contracts import Drafter
from bass_cli.engine.loop import Loop
from bass_cli.engine.verify import Rate
from bass_cli.lengths.controllers import Fixed
from bass_cli.models.decoder import Decoder
from bass_cli.models.heads import Head, make_head
from bass_cli.models.ranks import Share
from bass_cli.models.spec import HeadSpec, Spec, head_parameters
from bass_cli.run.build import graphs_for, load_models, runner_for
from bass_cli.run.memory import Need, footprint
from bass_cli.run.pair import check_split
from bass_cli.run.plan import DTYPES, Plan, device_of, make_plan
from bass_cli.tensor_parallel.follower import Source
from bass_cli.tensor_parallel.leader import Followers, Part

_OPTIONS = ("--batch-sizes", "--new-tokens")  # the options for rows and new tokens
KINDS = {
    "real": "a real pair",
    "set": "acceptance set",
    "scaled": "scaled layers",
    "plain": "random weights, no draft",
}


@dataclass(frozen=True, slots=True)
class Models:
    """Loaded models.

    kind: a key of KINDS. drafting: decoder of the draft, None for lookup or no draft. plan: of a
    real pair. mask: mask token of a parallel draft. head: a draft that reads the target's hidden
    states; then `drafting` has its layers. followers: processes with the target's other parts.
    """

    kind: str
    label: str
    target: Decoder
    drafting: Decoder | None
    plan: Plan | None
    mask: int | None = None
    head: Head | None = None
    followers: Followers | None = None

    def close(self) -> None:
        """End the processes that hold parts of the target."""
        if self.followers is not None:
            self.followers.close()


@dataclass(frozen=True, slots=True)
class Loops:
    """Loops for plain decoding and for speculation (None without a draft), over one batch.

    Only one runs at a time; each starts and ends with an empty batch.
    """

    plain: Loop
    speculative: Loop | None

    def of(self, method: str) -> Loop:
        """Return the loop that runs a method."""
        loop = self.plain if method == "plain" else self.speculative
        assert loop is not None
        return loop


def plan_for(settings: Settings) -> Plan | None:
    """Check a real pair without reading weights and return its plan; None for random weights."""
    if settings.shape is not None:
        return None
    return make_plan(settings.job, options=_OPTIONS, grows=False)


def need_of(settings: Settings, plan: Plan | None, device: torch.device) -> Need:
    """Return the memory of the largest batch; MachineError if too little is free."""
    if plan is not None:
        return plan.need  # `make_plan` has checked it
    assert settings.shape is not None
    target, draft = _specs(settings)
    ranks = settings.job.tensor_parallel
    if ranks > 1:
        check_split(target, ranks, device, model=settings.shape)
    head = draft if isinstance(draft, HeadSpec) else None
    found = footprint(
        target,
        draft.body if isinstance(draft, HeadSpec) else draft,
        dtype=dtype_of(settings.job.dtype, device),
        device=device,
        longest=settings.longest if head is None else max(settings.longest, head.block),
        at_once=settings.draft_shape in AT_ONCE,
        head=head,
        kept_layers=settings.depth or 0,
        prompt_tokens=settings.prompt_tokens,
        ranks=ranks,
    )
    need = Need(found, max(settings.batch_sizes), settings.new_tokens, device, _OPTIONS)
    need.check()
    return need


def build_models(settings: Settings, plan: Plan | None) -> Models:
    """Load the weights, or make random ones."""
    if plan is not None:
        return _real_models(plan)
    followers = _followers(settings)
    with contextlib.nullcontext() if followers is None else followers.loading():
        return _random_models(settings, followers)


def build_loops(models: Models, settings: Settings, *, context: int) -> Loops:
    """Build the loops for the largest batch size; a row holds up to `context` tokens."""
    rows, longest, coupling = (
        max(settings.batch_sizes),
        settings.longest,
        settings.job.speculation.coupling,
    )
    head, decoder = models.head, models.target
    cut = models.plan.cut if models.plan is not None else None
    reach = longest if cut is None else cut.drafted(longest)
    reach = reach if head is None else max(reach, head.spec.block)
    span = settings.new_tokens + beyond(reach)
    device = models.target.device
    batch = Batch(rows=rows, context=context + beyond(reach), device=device)
    if head is not None:
        decoder = decoder.read_by(head)
    followers = models.followers
    target = runner_for(decoder, followers, rows=rows, span=span, lag=1)

    def loop(drafter: Drafter, acceptance: tuple[Rate, ...] | None) -> Loop:
        return Loop(
            batch=batch,
            target=target if drafter.longest else target.without_reader(),
            drafter=drafter,
            lengths=Fixed(0),
            coupling=coupling,
            clock=Clock(),
            acceptance=acceptance,
            graphs=graphs_for(device, followers),
            cut=cut,
        )

    draft = settings.job.pair.draft
    if draft == "none" or longest == 0:
        return Loops(loop(NoDrafter(), None), None)
    runner = None if head is None else target
    if models.drafting is not None and head is None:
        runner = runner_for(models.drafting, followers, rows=rows, span=span, lag=2)
    drafter = make_drafter(
        draft,
        runner=runner,
        mask=models.mask,
        head=head,
        coupling=coupling,
        temperature=settings.job.speculation.draft_temperature,
        factor=1.0 if models.kind == "scaled" else SHARPER,
    )
    return Loops(loop(NoDrafter(), None), loop(drafter, next(iter(settings.acceptances), None)))


def _real_models(plan: Plan) -> Models:
    target, drafting, head, followers = load_models(plan)
    label = f"{plan.job.pair.name}, a real pair"
    drafting = drafting if head is None else head.body
    return Models("real", label, target, drafting, plan, plan.files.mask, head, followers)


def _part_source(settings: Settings) -> Source:
    """Return the function that makes a part of a random target."""
    spec, seed = _specs(settings)[0], settings.job.sampling.seed
    depth, scale = settings.depth, settings.scale
    scaled = None if depth is None or scale is None else (depth, scale)
    return functools.partial(random_part, spec, seed, scaled)


def _followers(settings: Settings) -> Followers | None:
    """Start the processes for the other parts of a random target; None on one device."""
    ranks, device = settings.job.tensor_parallel, device_of(settings.job.device)
    if ranks == 1:
        return None
    need, dtype = need_of(settings, None, device), dtype_of(settings.job.dtype, device)
    vocab = _specs(settings)[0].vocab
    needed = need.footprint.bytes(need.rows, need.new_tokens)
    return Followers(Part(_part_source(settings), ranks, dtype, need.device, vocab, needed))


def _random_target(settings: Settings, followers: Followers | None) -> Decoder:
    """Make the random target, or its first part with tensor parallelism."""
    device = device_of(settings.job.device)
    dtype = dtype_of(settings.job.dtype, device)
    share = Share(0, 1) if followers is None else followers.ranks.share
    spec, weights = _part_source(settings)(
        share, dtype=dtype, device=device, on_read=lambda size: None
    )
    ranks = None if followers is None else followers.ranks
    return Decoder(spec, weights, vocab=_specs(settings)[0].vocab, ranks=ranks)


def _random_models(settings: Settings, followers: Followers | None) -> Models:
    assert settings.shape is not None
    device = device_of(settings.job.device)
    dtype = dtype_of(settings.job.dtype, device)
    seed, name = settings.job.sampling.seed, settings.job.pair.name
    _, draft = _specs(settings)
    target = _random_target(settings, followers)
    if isinstance(draft, HeadSpec):
        weights = random_weights(
            draft.body, dtype=dtype, device=device, seed=seed + 1, shapes=head_parameters(draft)
        )
        head = make_head(draft, weights, target)
        label = f"{name}, acceptance set"
        return Models("set", label, target, head.body, None, draft.mask, head, followers)
    if draft is not None:
        drafting = Decoder(draft, random_weights(draft, dtype=dtype, device=device, seed=seed + 1))
        mask = drafting.spec.vocab - 1 if settings.draft_shape in AT_ONCE else None
        label = f"{name}, acceptance set"
        return Models("set", label, target, drafting, None, mask, None, followers)
    if settings.depth is not None:
        label = f"{name}, the other layers' output scaled by {settings.scale}"
        kept = target.keep_layers(range(settings.depth))
        return Models("scaled", label, target, kept, None, followers=followers)
    label = f"{name}, random weights, no draft"
    return Models("plain", label, target, None, None, followers=followers)


def _specs(settings: Settings) -> tuple[Spec, Spec | HeadSpec | None]:
    """Return the shapes of target and draft. The draft gets the target's vocabulary."""
    assert settings.shape is not None
    spec = spec_of(settings.shape, option="--shape")
    if settings.draft_shape is None:
        return spec, None
    if settings.draft_shape in HEADS:
        return spec, head_of(settings.draft_shape, spec, option="--draft-shape")
    return spec, spec_of(settings.draft_shape, option="--draft-shape", vocab=spec.vocab)


def words_of(rates: Sequence[Rate]) -> str:
    """Format rates as --acceptance takes them."""
    words = (rate if isinstance(rate, tuple) else (rate,) for rate in rates)
    return ", ".join("/".join(map(str, chances)) for chances in words)


def _rates(rates: Sequence[Rate]) -> str:
    text = words_of(rates)
    return f" to {text}, by row in turn" if len(rates) > 1 else f" to {text}" if rates else ""


def _number_or_all(rates: Sequence[Rate]) -> float | list[float | list[float]] | None:
    """Return one number, or a list by row in turn whose items are numbers or lists by position."""
    if len(rates) == 1 and not isinstance(rates[0], tuple):
        return rates[0]
    return [list(rate) if isinstance(rate, tuple) else rate for rate in rates] or None


def dtype_of(wanted: str, device: torch.device) -> torch.dtype:
    """Return the torch dtype of a --dtype on this device."""
    if wanted == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[wanted]


def describe(models: Models, settings: Settings, acceptance: Sequence[Rate]) -> dict[str, Any]:
    """Make the "pair" of the document. `acceptance` is empty if it was not set."""
    draft: dict[str, Any] = {"name": settings.job.pair.draft}
    if models.drafting is not None:
        draft = _describe_decoder(settings.job.pair.draft, models.drafting)
    if models.head is not None:  # embedding and head are the target's
        numbers = map(math.prod, head_parameters(models.head.spec).values())
        draft |= {"parameters": sum(numbers)}
    return {
        "name": settings.job.pair.name,
        "kind": KINDS[models.kind],
        "label": models.label + _rates(acceptance),
        "target": _describe_decoder(settings.job.pair.target, models.target),
        "draft": draft,
        "acceptance": _number_or_all(acceptance),
        "depth": settings.depth,
        "scale": settings.scale,
        "coupling": settings.job.speculation.coupling,
    }


def _describe_decoder(name: str, decoder: Decoder) -> dict[str, Any]:
    spec = decoder.spec
    return {
        "name": name,
        "layers": len(decoder.layers),
        "width": spec.width,
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "inner": spec.inner,
        "vocab": decoder.vocab,
        "parameters": count_parameters(spec),
        "dtype": str(decoder.dtype).removeprefix("torch."),
    }
