"""Prepare a bench before its measured runs.

This grows the caches to their final size, runs the correctness gate, captures graphs, measures the
cost of rounds if a method needs it, and makes a short run of every cell.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from bass_cli.bench import gate, pairs
from bass_cli.bench.ceilings import Ceilings
from bass_cli.bench.drive import decode, empty, fill
from bass_cli.bench.figures import Run
from bass_cli.bench.parts import Parts
from bass_cli.bench.settings import PLAIN, Settings
from bass_cli.bench.texts import Text, rows_for
from bass_cli.bench.turns import Key, Turns
from bass_cli.config.job import CONTROLLERS
from bass_cli.engine.batch import Row
from bass_cli.engine.contracts import DraftLength
from bass_cli.lengths.controllers import Fixed, make_lengths
from bass_cli.lengths.costs import Surface
from bass_cli.run.plan import Plan
from bass_cli.run.profile import LIMITS
from bass_cli.run.profile import measure as profile

_WARM_TOKENS, _GATE_TOKENS, _GATE_ROWS = 8, 16, 4
Note = Callable[[str], None]


class Phase(Protocol):
    """Receives the name of a phase as it begins.

    live: whether a thread may refresh the display, which takes a little time of its own.
    """

    def __call__(self, name: str, *, live: bool = True) -> None: ...


def silent(name: str, *, live: bool = True) -> None:
    """Show no phase."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything that is the same for all cells.

    failures: reasons why the figures are wrong, collected during the bench. surface: cost of
    rounds for controllers; None if it was not measured. parts: times of the parts of a round, by
    (batch size, whether decoding is plain, draft length). kinds: texts by kind if several kinds
    are measured.
    """

    settings: Settings
    models: pairs.Models
    loops: pairs.Loops
    prompts: list[list[int]]
    ceilings: Ceilings
    note: Note
    failures: list[str] = field(default_factory=list)
    surface: Surface | None = None
    parts: dict[tuple[int, bool, int], Parts] = field(default_factory=dict)
    phase: Phase = silent
    kinds: Mapping[str, list[Text]] = field(default_factory=dict)

    def rows(
        self,
        count: int,
        *,
        limit: int | None = None,
        temperature: float | None = None,
        repeat: int = 0,
        kind: str = "",
    ) -> list[Row]:
        prompts = [text.tokens for text in self.kinds[kind]] if kind else self.prompts
        return rows_for(
            prompts, count, self.settings,
            limit=limit, temperature=temperature, repeat=repeat, kind=kind,
        )  # fmt: skip

    def run(self, method: str, rows: list[Row], kind: str = "") -> Run:
        """Run these new rows with a new draft-length controller."""
        loop = self.loops.of(method)
        loop.use(self.lengths(method))
        texts = self.kinds[kind] if kind else []
        references = {f"{kind}{number}": text.reference for number, text in enumerate(texts)}
        prefill = fill(loop, rows, references)
        return decode(loop, rows, prefill=prefill)

    def lengths(self, method: str) -> DraftLength:
        speculation = self.settings.job.speculation
        if method in CONTROLLERS:
            return make_lengths(
                method,
                limit=min(speculation.max, self.loops.of(method).drafter.longest),
                coupling=speculation.coupling,
                surface=self.surface,
                at_once=self.models.mask is not None,
            )
        return Fixed(0 if method == PLAIN else int(method))


def grow(bench: Bench) -> None:
    """Grow the caches to the size of the largest batch.

    Growing later would move them, and graphs would have to be captured again.
    """
    for loop in (bench.loops.plain, bench.loops.speculative):
        if loop is not None:
            fill(loop, bench.rows(max(bench.settings.batch_sizes)))
            empty(loop)


def check(bench: Bench) -> gate.Gate:
    bench.phase("checking that speculation equals plain decoding")
    count = min(_GATE_ROWS, max(bench.settings.batch_sizes))
    limit = min(_GATE_TOKENS, bench.settings.new_tokens)
    rows, again = (bench.rows(count, limit=limit, temperature=0.0) for _ in range(2))
    passed = gate.check(bench.loops, bench.models, rows, again)
    if passed.rows is not None:
        bench.note(
            f"gate: greedy speculation equals plain decoding in {passed.rows_equal} of "
            f"{passed.rows} rows, {passed.tokens_equal} of {passed.tokens} tokens"
        )
    if not passed.passed:
        differ, broken = "tokens differ from plain decoding", "logits are not finite"
        reason = differ if passed.finite else broken
        bench.failures.append(f"the gate failed, so nothing was timed: {reason}")
    return passed


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
        bench.phase(f"batch {batch}: compiling kernels, capturing graphs")
        before, began = loop.graphs.captures, time.perf_counter()
        loop.prepare([batch], range(longest + 1), each=each)
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


def surface(bench: Bench, plan: Plan | None) -> Surface | None:
    """Return the cost of rounds: the pair's profile, or a new measurement if a method needs one.

    Otherwise None: `bass` and `auto` then start without a profile, as in a pair's first job.
    """
    settings, loop = bench.settings, bench.loops.speculative
    if plan is not None and plan.surface is not None and plan.surface.measured:
        return plan.surface
    if loop is None or not (
        settings.controllers or any("table" in method for method in settings.methods)
    ):
        return None
    bench.phase("measuring what rounds cost")
    most = max(settings.batch_sizes)
    rows = {count for count in (1, 2, 4, 8, 16, 32, 64, *settings.batch_sizes) if count <= most}
    return profile(
        loop,
        bench.prompts,
        rows=sorted(rows),
        coupling=settings.job.speculation.coupling,
        limit=LIMITS[loop.batch.device.type],
        longest=settings.longest,
        tokens=settings.new_tokens,
        samples=settings.samples_per_prompt,
    )


def warm_up(bench: Bench, turns: Turns) -> Bench:
    """Run every cell once for a few tokens; return a bench whose new tokens fit the time limit."""
    settings, warm, batches = bench.settings, dict[Key, Run](), set[int]()
    for key in turns.runs:
        batch, method, *kind = key
        if batch not in batches:
            bench.phase(f"batch {batch}: warming up")
        batches.add(batch)
        limit = min(_WARM_TOKENS, settings.new_tokens)
        warm[key] = bench.run(method, bench.rows(batch, limit=limit, kind="".join(kind)), *kind)
    tokens = turns.tokens(
        warm, settings.new_tokens, least=settings.new_tokens if settings.tokens_given else 0
    )
    return replace(bench, settings=replace(settings, new_tokens=tokens))
