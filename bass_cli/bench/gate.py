"""Check correctness before anything is timed.

Logits must be finite, and greedy speculation must give the tokens of plain decoding. In half
precision and on a GPU the shape of a batch changes rounding, so equal tokens are only counted
there.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from bass_cli.bench.drive import decode, empty, fill
from bass_cli.bench.pairs import Loops, Models
from bass_cli.engine.batch import Row
from bass_cli.engine.loop import Loop
from bass_cli.lengths.controllers import Fixed

DRAFT_LENGTH = 4


@dataclass(frozen=True, slots=True)
class Gate:
    """Result of the check.

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


def check(loops: Loops, models: Models, rows: list[Row], again: list[Row]) -> Gate:
    """Run the check. `rows` and `again` are two new copies of the same greedy rows.

    The loops are empty afterwards.
    """
    strict = models.target.device.type == "cpu" and models.target.dtype == torch.float32
    fill(loops.plain, rows)
    finite = _finite(loops.plain)
    if not finite or loops.speculative is None or models.kind == "set":
        empty(loops.plain)
        return Gate(finite, strict)
    loops.plain.use(Fixed(0))
    decode(loops.plain, rows)
    fill(loops.speculative, again)
    loops.speculative.use(Fixed(DRAFT_LENGTH))
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
    return bool(logits.isfinite().all() and (logits.std(-1) > 0).all())


def _same(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
