"""The resident engine on a GPU: its thread captures and replays rounds that several calls share,
also of models that run through transformers' own layers. Float32."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from any_families import write_any
from checkpoints import write_pair, write_tokenizer

from bass_cli import Engine, Job, Pair, Sampling, Speculation, generate, load_pair

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
PROMPTS = [f"the cat number {i} sat" for i in range(3)]


def by_key(found: Any) -> dict[Any, Any]:
    return {(one.id, one.sample): one.token_ids for one in found}


def test_calls_share_captured_rounds(here: Path) -> None:
    write_pair(here, prompts=3)
    job = Job(
        pair=load_pair("pair.yaml"),
        n=4,
        batch_size=8,
        device="cuda",
        dtype="fp32",
        sampling=Sampling(max_new_tokens=60, temperature=1.5, seed=5),
        token_ids=True,
    )
    wanted = by_key(generate(PROMPTS, job))
    with Engine(job) as engine:
        assert by_key(engine.generate(PROMPTS)) == wanted
        others = by_key(engine.generate(PROMPTS, sampling=Sampling(seed=6)))
        calls = [engine.generate(PROMPTS, sampling=Sampling(seed=seed)) for seed in (5, 6)]
        assert [by_key(call) for call in calls] == [wanted, others]
        endless = engine.generate(iter(PROMPTS * 100), n=8)
        del endless
        seconds = []
        for _ in range(5):
            began = time.perf_counter()
            next(engine.stream(PROMPTS[:1], n=1))
            seconds.append(time.perf_counter() - began)
        assert min(seconds) < 0.1
        assert engine.run_alone(lambda models, loop: len(loop.batch)) == 0


# windows and soft caps; windows and sinks; keys and values of different sizes
@pytest.mark.parametrize("family", ["gemma2", "granite_swa", "minicpm3"])
def test_captured_rounds_with_drafts_equal_plain_decoding(family: str, tmp_path: Path) -> None:
    for name, seed in (("target", 0), ("draft", 1)):
        write_any(family, tmp_path / name, seed=seed, vocab_size=301)
        write_tokenizer(tmp_path / name)

    def job(draft: str, length: int) -> Job:
        return Job(
            pair=Pair(
                name="tiny", target=str(tmp_path / "target"), draft=draft, decoder="transformers"
            ),
            n=4,
            batch_size=8,
            device="cuda",
            dtype="fp32",
            sampling=Sampling(max_new_tokens=40, temperature=1.0, seed=5),
            speculation=Speculation(length=length),
            token_ids=True,
        )

    wanted = by_key(generate(PROMPTS, job("none", 0)))
    assert len(wanted) == 12
    for draft in (str(tmp_path / "draft"), "lookup"):
        with Engine(job(draft, 3)) as engine:
            assert by_key(engine.generate(PROMPTS)) == wanted
            assert by_key(engine.generate(PROMPTS)) == wanted  # rounds that are captured by now
