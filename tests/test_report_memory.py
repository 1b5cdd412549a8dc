"""The memory that finding the likeliest tokens takes, as planned and as torch's profiler sees it."""

from __future__ import annotations

import pytest
import torch

import bass_kernels as ops
from bass_cli.models.spec import Norm, Rope, Spec
from bass_cli.run.memory import Extras, footprint

VOCAB, PLACES = 151_936, 5


def planned(top: int) -> int:
    """Return the bytes of a row's work with reports of this size."""
    spec = Spec(
        family="llama",
        layers=1,
        width=64,
        heads=1,
        kv_heads=1,
        head_size=64,
        inner=64,
        vocab=VOCAB,
        context=1024,
        norm=Norm("rms", 1e-5),
        activation="silu",
        gated=True,
        rope=Rope(1e4, 64),
        windows=(0,),
        query_scale=0.125,
    )
    device = torch.device("cpu")
    extras = Extras(top=top)
    found = footprint(
        spec, None, dtype=torch.float32, device=device, longest=PLACES - 1, extras=extras
    )
    return found.row.buffers


@pytest.mark.slow  # starting the profiler takes two seconds
def test_planned_memory_covers_what_reports_allocate() -> None:
    logits = torch.randn(PLACES, VOCAB, generator=torch.Generator().manual_seed(1))
    tokens, scores = torch.zeros(PLACES, dtype=torch.int64), torch.zeros(PLACES)
    for top in (5, 64):
        with torch.profiler.profile(profile_memory=True) as profiler:
            ops.report_entries(logits, tokens, scores, top)
        live = peak = 0
        for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
            if event.name() == "[memory]":
                live += event.nbytes()
                peak = max(peak, live)
        assert peak <= 1.1 * (planned(top) - planned(0))
    assert planned(64) < 1.6 * planned(0)
