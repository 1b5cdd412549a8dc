"""What must hold before anything is timed: logits are finite, and a pair that can agree gives plain
decoding's tokens.

In half precision, and on a GPU, the shape of a batch changes rounding, so there the matches are
only counted.
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
    """`finite`: the target's logits. `rows_equal` of `rows`: greedy speculation against plain
    decoding, token for token; `tokens_equal` of `tokens`: those before the first difference.
    None where drafts cannot agree. `strict`: equality is due, which it is on a CPU in float32."""

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
    """Both lists hold the same greedy rows, new ones. Leaves the loops empty."""
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
    """Whether the target's logits of the live rows' pending tokens are numbers, and not all the
    same."""
    tokens, positions = loop.batch.last(1)
    logits = loop.target.forward(tokens, positions, loop.batch.ends(0)).float()
    return bool(logits.isfinite().all() and (logits.std(-1) > 0).all())


def _same(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
