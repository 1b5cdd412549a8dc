"""Prepare a bench: build its models and loops, check them, and warm everything up.

The models are a real pair from files, or random weights of real shapes; the acceptance of a random
draft is simulated, or follows from scaled layers. Before anything is timed, the caches grow to
their final size, the logits must be finite, greedy speculation must give the tokens of plain
decoding, graphs are captured, and every cell runs once.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from bass_cli.bench.figures import Run
from bass_cli.bench.floor import Ceilings
from bass_cli.bench.runs import Key, Parts, Schedule, decode, empty, fill
from bass_cli.bench.settings import PLAIN, Settings
from bass_cli.bench.shapes import random_part, random_weights
from bass_cli.bench.texts import Text, rows_for
from bass_cli.config.speculation import CONTROLLERS, needs_profile, parse_draft
from bass_cli.drafts.factory import SHARPER, NoDrafter
from bass_cli.engine.batch import Row, beyond
from bass_cli.engine.clock import Clock
from bass_cli.engine.contracts import DraftLength
from bass_cli.engine.loop import Loop
from bass_cli.engine.verify import Rate
from bass_cli.formats.weights import layouts_of
from bass_cli.io.console import Screen
from bass_cli.lengths.controllers import Fixed, LengthParts, make_lengths
from bass_cli.lengths.costs import arithmetic_of
from bass_cli.lengths.surface import Surface
from bass_cli.models.decoder import Decoder
from bass_cli.models.heads import make_head
from bass_cli.models.runner import Runner
from bass_cli.models.spec import HeadSpec, head_parameters
from bass_cli.run.build import Models, graphs_for, load_models, make_loop, make_models
from bass_cli.run.memory import Extras, MemoryNeed, footprint, widest
from bass_cli.run.pair import check_split
from bass_cli.run.plan import Plan, device_of, draft_format_of, dtype_of, make_plan
from bass_cli.run.profile import LIMITS
from bass_cli.run.profile import measure as profile
from bass_cli.tensor_parallel.follower import Part

_OPTIONS = ("`batch_sizes`", "`new_tokens`")  # the options for rows and new tokens
_WARM_TOKENS = 8
_GATE_TOKENS, _GATE_ROWS, _GATE_LENGTH = 16, 4, 4


@dataclass(frozen=True, slots=True)
class Loops:
    """Loops for plain decoding and for speculation (None without a draft), over one batch.

    Only one runs at a time; each starts and ends with an empty batch.
    """

    plain: Loop
    speculative: Loop | None

    def of(self, method: str) -> Loop:
        """Return the loop that runs a method."""
        loop = self.plain if method == PLAIN else self.speculative
        assert loop is not None
        return loop


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything that is the same for all cells.

    plan: of a real pair, None for random weights. acceptance: empty if it was not set.
    failures: reasons why the figures are wrong, collected during the bench. surface: cost of
    rounds for controllers; None if it was not measured. parts: times of the parts of a round, by
    (batch size, whether decoding is plain, draft length). texts: by kind; one kind "" without a
    name, unless several kinds are measured. learnt: by cell, what controllers have learnt of costs
    in its last run; its next run begins from it, as later jobs of a pair do.
    """

    settings: Settings
    plan: Plan | None
    models: Models
    loops: Loops
    texts: Mapping[str, Sequence[Text]]
    ceilings: Ceilings
    screen: Screen
    failures: list[str] = field(default_factory=list)
    gate: Gate | None = None
    acceptance: Sequence[Rate] = ()
    surface: Surface | None = None
    parts: dict[tuple[int, bool, int], Parts] = field(default_factory=dict)
    learnt: dict[Key, Surface] = field(default_factory=dict)

    @property
    def prompts(self) -> list[list[int]]:
        """The prompts of the first kind."""
        return [text.tokens for text in next(iter(self.texts.values()))]

    def rows(self, key: Key, repeat: int = 0, limit: int | None = None) -> list[Row]:
        """Return new rows for a run of a cell. Default limit: the new tokens of the settings."""
        prompts = [text.tokens for text in self.texts[key.text]]
        return rows_for(
            prompts, key.batch, self.settings, limit=limit, repeat=repeat, kind=key.text
        )

    def run(self, key: Key, rows: list[Row]) -> Run:
        """Run these new rows of a cell with a new draft-length controller."""
        loop = self.loops.of(key.method)
        lengths = self.lengths(key)
        loop.use(lengths)
        texts = enumerate(self.texts[key.text])
        prefill = fill(loop, rows, {f"{key.text}{i}": text.reference for i, text in texts})
        done = decode(loop, rows, prefill=prefill)
        if isinstance(learnt := lengths.learned(), Surface):
            self.learnt[key] = learnt
        return done

    def lengths(self, key: Key) -> DraftLength:
        speculation, method = self.settings.job.speculation, key.method
        if method in CONTROLLERS:
            drafter = self.loops.of(method).drafter
            return make_lengths(
                method,
                LengthParts(
                    limit=min(speculation.max, drafter.longest),
                    coupling=speculation.coupling,
                    surface=self.learnt.get(key, self.surface),
                    at_once=drafter.at_once,
                    arithmetic=arithmetic_of(self.loops.of(method).batch.device),
                ),
            )
        return Fixed(0 if method == PLAIN else int(method))


def plan_for(settings: Settings) -> Plan | None:
    """Check a real pair without reading weights and return its plan; None for random weights."""
    if settings.specs is not None:
        return None
    return make_plan(settings.job, options=_OPTIONS, grows=False)


def need_of(settings: Settings, plan: Plan | None, device: torch.device) -> MemoryNeed:
    """Return the memory of the largest batch; MachineError if too little is free."""
    if plan is not None:
        return plan.memory_need  # `make_plan` has checked it
    assert settings.specs is not None
    (target, draft), ranks = settings.specs, settings.job.tensor_parallel
    if ranks > 1:
        check_split(target, ranks, device, model=settings.job.pair.target)
    head = draft if isinstance(draft, HeadSpec) else None
    dtype = dtype_of(settings.job.dtype, device)
    found = footprint(
        target,
        draft.body if isinstance(draft, HeadSpec) else draft,
        dtype=dtype,
        device=device,
        longest=settings.longest if head is None else max(settings.longest, head.block),
        eight_bits=settings.job.kv_dtype == "fp8",
        at_once=parse_draft(settings.job.pair.draft).kind.parallel,
        head=head,
        kept_layers=settings.depth or 0,
        prompt_tokens=settings.prompt_tokens,
        ranks=ranks,
        extras=Extras(settings.job.sampling.changes_logits),
        layouts=layouts_of(settings.job.dtype, None),
        draft_format=draft_format_of(settings.job, dtype, None),
    )
    need = MemoryNeed(found, max(settings.batch_sizes), settings.new_tokens, device, _OPTIONS)
    need.check()
    return need


def build_models(settings: Settings, plan: Plan | None) -> Models:
    """Load the weights of a plan, or make random ones."""
    if plan is not None:
        return load_models(plan)
    assert settings.specs is not None
    job, scaled = settings.job, None
    if settings.depth is not None and settings.scale is not None:
        scaled = (settings.depth, settings.scale)
    spec, device = settings.specs[0], device_of(job.device)
    source = functools.partial(random_part, spec, job.sampling.seed, scaled)
    need = need_of(settings, None, device)
    needed = need.footprint.bytes(need.rows, need.new_tokens)
    part = Part(
        source,
        job.tensor_parallel,
        dtype_of(job.dtype, device),
        device,
        spec.vocab,
        needed,
        layouts_of(job.dtype, None),
    )
    return make_models(part, functools.partial(_add_random_draft, settings))


def _add_random_draft(settings: Settings, models: Models) -> Models:
    assert settings.specs is not None
    target, draft = models.target, settings.specs[1]
    if settings.depth is not None:
        return models._replace(drafting=target.keep_layers(range(settings.depth)))
    if draft is None:
        return models
    numbers = draft_format_of(settings.job, target.dtype, None)
    weights = functools.partial(
        random_weights,
        dtype=numbers.dtype,
        layouts=numbers.layouts,
        device=target.device,
        seed=settings.job.sampling.seed + 1,
    )
    if isinstance(draft, HeadSpec):
        head = make_head(
            draft, weights(draft.body, shapes=head_parameters(draft)), target, numbers.layouts
        )
        return models._replace(head=head, mask=draft.mask)
    mask = draft.vocab - 1 if parse_draft(settings.job.pair.draft).kind.parallel else None
    return models._replace(drafting=Decoder(draft, weights(draft)), mask=mask)


def build_loops(
    models: Models, settings: Settings, *, context: int, plan: Plan | None = None
) -> Loops:
    """Build the loops for the largest batch size; a row holds up to `context` tokens."""
    longest, cut, job = settings.longest, None if plan is None else plan.cut, settings.job
    reach = longest if cut is None else cut.drafted(longest)
    reach = reach if models.head is None else max(reach, models.head.spec.block)
    if longest == 0:
        job = job.model_copy(update={"pair": job.pair.model_copy(update={"draft": "none"})})
    drafts = job.pair.draft != "none"
    loop = make_loop(
        models,
        job,
        rows=max(settings.batch_sizes),
        span=settings.new_tokens + beyond(reach),
        context=context + beyond(reach),
        width=widest(reach),
        lengths=Fixed(0),
        cut=cut,
        sharper=SHARPER if settings.depth is None else 1.0,
        acceptance=next(iter(settings.acceptances), None) if drafts else None,
    )
    if not drafts:
        return Loops(loop, None)
    assert isinstance(loop.target, Runner)
    graphs = graphs_for(models)
    target = loop.target.without_reader()
    return Loops(loop.with_drafter(NoDrafter(), target=target, clock=Clock(), graphs=graphs), loop)


def grow(bench: Bench) -> None:
    """Grow the caches to the size of the largest batch.

    Growing later would move them, and graphs would have to be captured again.
    """
    most = max(bench.settings.batch_sizes)
    for loop in (bench.loops.plain, bench.loops.speculative):
        if loop is not None:
            fill(loop, rows_for(bench.prompts, most, bench.settings))
            empty(loop)


def check(bench: Bench) -> Bench:
    """Run the gate and return the bench with its result; a failure is added to its failures."""
    bench.screen.phase("checking that speculation equals plain decoding")
    settings = bench.settings
    count = min(_GATE_ROWS, max(settings.batch_sizes))
    limit = min(_GATE_TOKENS, settings.new_tokens)
    rows, again = (
        rows_for(bench.prompts, count, settings, limit=limit, temperature=0.0) for _ in range(2)
    )
    passed = gate(bench.loops, bench.models.target, rows, again)
    if passed.rows is not None:
        bench.screen.note(
            f"gate: greedy speculation equals plain decoding in {passed.rows_equal} of "
            f"{passed.rows} rows, {passed.tokens_equal} of {passed.tokens} tokens"
        )
    if not passed.passed:
        differ, broken = "tokens differ from plain decoding", "logits are not finite"
        reason = differ if passed.finite else broken
        bench.failures.append(f"the gate failed, so nothing was timed: {reason}")
    return replace(bench, gate=passed)


@dataclass(frozen=True, slots=True)
class Gate:
    """Result of the gate.

    finite: whether the target's logits are finite. strict: whether all tokens must be equal, which
    holds on a CPU in float32. rows_equal of `rows`: rows with the tokens of plain decoding.
    tokens_equal of `tokens`: tokens before the first difference. The counts are None if acceptance
    is simulated.
    """

    finite: bool
    strict: bool
    rows: int | None = None
    rows_equal: int | None = None
    tokens: int | None = None
    tokens_equal: int | None = None

    @property
    def passed(self) -> bool:
        return self.finite and not (self.strict and self.rows_equal != self.rows)

    def report(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed}


def gate(loops: Loops, target: Decoder, rows: list[Row], again: list[Row]) -> Gate:
    """Check that logits are finite and that greedy speculation equals plain decoding.

    In half precision and on a GPU the shape of a batch changes rounding, so equal tokens are only
    counted there. `rows` and `again` are two new copies of the same greedy rows. The loops are
    empty afterwards.
    """
    strict = target.device.type == "cpu" and target.dtype == torch.float32
    fill(loops.plain, rows)
    finite = _finite(loops.plain)
    if not finite or loops.speculative is None or loops.speculative.simulated is not None:
        empty(loops.plain)
        return Gate(finite, strict)
    loops.plain.use(Fixed(0))
    decode(loops.plain, rows)
    fill(loops.speculative, again)
    loops.speculative.use(Fixed(_GATE_LENGTH))
    decode(loops.speculative, again)
    pairs = [
        (a.tokens[: a.prompt_length + a.limit], b.tokens[: b.prompt_length + b.limit])
        for a, b in zip(rows, again, strict=True)
    ]
    return Gate(
        finite,
        strict,
        len(rows),
        sum(a == b for a, b in pairs),
        sum(row.limit for row in rows),
        sum(_same(a, b) - row.prompt_length for row, (a, b) in zip(rows, pairs, strict=True)),
    )


@torch.inference_mode()
def _finite(loop: Loop) -> bool:
    """Return whether the target's logits for the pending tokens are finite and not all equal."""
    tokens, positions = loop.batch.last(1)
    logits = loop.target.forward(tokens, positions, loop.batch.ends(0)).float()
    logits = logits[..., : loop.batch.processors.vocab]
    return bool(logits.isfinite().all() and (logits.std(-1) > 0).all())


def _same(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def capture(bench: Bench, batch: int) -> list[dict[str, Any]]:
    """Capture all graphs that runs of this batch size can need.

    Draft lengths share graphs, except where a method needs exact lengths. The reported seconds are
    for the full batch; graphs for fewer rows, used when some have ended, are captured after it.

    Returns: one entry of the document's "captures" for each loop.
    """
    found = []
    exact = [method for method in bench.settings.methods if method.startswith("bass")]
    each = bool(exact) or bench.settings.job.speculation.coupling == "maximal"
    for name, loop, longest in (
        (PLAIN, bench.loops.plain, 0),
        ("speculative", bench.loops.speculative, bench.settings.longest),
    ):
        if loop is None or loop.graphs is None or not loop.graphs.enabled:
            continue
        bench.screen.phase(f"batch {batch}: compiling kernels, capturing graphs")
        before, began = loop.graphs.captures, time.perf_counter()
        prepare = functools.partial(loop.prepare, [batch], range(longest + 1), each=each)
        loop.graphs.compile([functools.partial(prepare, only_compile=True)], bench.screen.note)
        prepare()
        found.append(
            {
                "batch": batch,
                "loop": name,
                "graphs": loop.graphs.captures - before,
                "seconds": time.perf_counter() - began,
            }
        )
        loop.prepare(range(1, batch), range(longest + 1), each=each)
    return found


def surface(bench: Bench) -> Surface | None:
    """Return the cost of rounds: the pair's profile, or a new measurement if a method needs one.

    Otherwise None: the first run of `auto` then starts without costs, as in a pair's first job.
    """
    settings, plan, loop = bench.settings, bench.plan, bench.loops.speculative
    if plan is not None and plan.surface is not None and plan.surface.measured:
        return plan.surface
    if loop is None or not (settings.controllers or needs_profile(settings.methods)):
        return None
    bench.screen.phase("measuring what rounds cost")
    most = max(settings.batch_sizes)
    rows = {count for count in (1, 2, 4, 8, 16, 32, 64, *settings.batch_sizes) if count <= most}
    return profile(
        loop,
        bench.prompts,
        rows=sorted(rows),
        limit=LIMITS[loop.batch.device.type],
        longest=settings.longest,
        tokens=settings.new_tokens,
        samples=settings.samples_per_prompt,
    )


def warm_up(bench: Bench, schedule: Schedule) -> Bench:
    """Run every cell once for a few tokens; return a bench whose new tokens fit the time limit."""
    settings, warm = bench.settings, dict[Key, Run]()
    limit = min(_WARM_TOKENS, settings.new_tokens)
    for key in schedule.runs:
        if key.batch not in {other.batch for other in warm}:
            bench.screen.phase(f"batch {key.batch}: warming up")
        warm[key] = bench.run(key, bench.rows(key, limit=limit))
    tokens = schedule.tokens(
        warm, settings.new_tokens, least=settings.new_tokens if settings.tokens_given else 0
    )
    return replace(bench, settings=replace(settings, new_tokens=tokens))
