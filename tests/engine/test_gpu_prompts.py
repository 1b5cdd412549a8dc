"""Prompts on a CUDA device: passes captured by size give the tokens of uncaptured ones. Float32."""

import functools

import pytest
import torch
from test_gpu import decoders, loop_for  # noqa: F401
from toys import drive

from bass_cli.engine.batch import Row
from bass_cli.engine.sampling import RowSampling
from bass_cli.lengths.controllers import Fixed
from bass_cli.models import prefill as prompts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def text(length, seed=0):
    return torch.randint(
        3, 300, (length,), generator=torch.Generator().manual_seed(1000 * seed + length)
    ).tolist()


def job_of(lengths, seed):
    return [
        Row(f"{seed}-{n}", s, 5, text(n, seed), 9 + s, sampling=RowSampling(temperature=0.7 * s))
        for n in lengths
        for s in range(2)
    ]


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "mistral", "gptj"])
def test_prompts_read_by_graphs_give_the_same_tokens(decoders, family, monkeypatch):
    """Each size is captured once, then replayed with other tokens at other places, and once more
    after the memory has moved."""
    target, draft = decoders(family)
    jobs = [functools.partial(job_of, (1, 2, 15, 16, 17, 18, 33, 60), seed) for seed in range(3)]
    monkeypatch.setattr(prompts, "PATIENCE", 10**9)
    due = [
        drive(loop_for(target, "none", batch=1, lengths=Fixed(0), graphs=False), job())
        for job in jobs
    ]
    monkeypatch.setattr(prompts, "PATIENCE", 0)
    loop = loop_for(target, draft, batch=5, lengths=Fixed(3), graphs=True)
    runners = loop.target, loop.drafter.runner
    before = [0, 0]  # captures for the store that moved
    for number, job in enumerate(jobs):
        if number == 2:
            before = [runner._passes.graphs.captures for runner in runners]
            for runner in runners:
                runner.cache._grow(20_000)
        assert drive(loop, job()) == due[number], f"job {number}"
        for runner, moved in zip(runners, before, strict=True):
            graphs = runner._passes.graphs
            assert graphs.captures - moved == len(graphs._held) > 0


def test_prepared_prompts_are_not_captured_again(decoders):
    target, draft = decoders("llama")
    loop = loop_for(target, draft, batch=3, lengths=Fixed(3), graphs=True)
    loop.target.prepare_prompts()
    loop.drafter.prepare_prompts()
    due = drive(
        loop_for(target, "none", batch=1, lengths=Fixed(0), graphs=False), job_of((9, 40, 90), 0)
    )
    assert drive(loop, job_of((9, 40, 90), 0)) == due
    assert loop.target._passes.graphs.captures == len(prompts.SIZES)


def test_admitting_rows_does_not_block_the_host(decoders):
    loop = loop_for(decoders("llama")[0], "none", batch=4, lengths=Fixed(0), graphs=False)
    loop.open("p", [1, 2, 3])
    torch.cuda.set_sync_debug_mode("error")
    try:
        loop.admit(*(Row("p", s, 0, [1, 2, 3], 5) for s in range(4)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loop.batch.lengths.tolist() == [3, 3, 3, 3]
    assert loop.batch.tokens[3, :3].tolist() == [1, 2, 3]
