"""A target with recurrent layers, split over two processes, draws the tokens of one process, exactly:
plain and with lookup, a draft model, and the multi-token-prediction layer. Its plan counts a part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import shallow, write_checkpoint, write_tokenizer
from command_line import cli
from test_mtp import write
from thinned import thinned

from bass_cli.config.job import Job, Pair, Speculation
from bass_cli.config.sampling import Sampling
from bass_cli.run.build import Models, build, load_draft, load_models
from bass_cli.run.generate import generate
from bass_cli.run.memory import state_bytes
from bass_cli.run.plan import Plan, make_plan

PROMPTS = ["the cat sat", "a", "the cat number 2 sat on the mat, then the other cat sat there"]
# With experts and a shared one, an output gate, and rows of the projections sorted by key head
FAMILY = "qwen3_next"


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("hybrid")
    write(folder / "target", FAMILY, near=0.5, tokenizer=True)
    write_checkpoint("llama", folder / "draft", **shallow("llama"))
    write_tokenizer(folder / "draft")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def plan_of(draft: str, length: Any, ranks: int, **changes: Any) -> Plan:
    job = Job(
        pair=Pair(name="x", target="target", draft=draft),
        sampling=Sampling(max_new_tokens=16, temperature=1.2, top_p=0.95, seed=5),
        speculation=Speculation(length=length),
        n=2,
        batch_size=4,
        device="cpu",
        token_ids=True,
        tensor_parallel=ranks,
        **changes,
    )
    return make_plan(job, prompts=len(PROMPTS))


@pytest.fixture(scope="module")
def halves() -> Iterator[Models]:
    models = load_models(plan_of("mtp", 3, 2))
    yield models
    models.close()


@pytest.mark.parametrize(
    ("draft", "length"),
    thinned([("mtp", 3), ("none", "auto"), ("lookup", 4), ("draft", 2)], [("mtp", 3)]),
)
def test_split_hybrid_draws_the_tokens_of_the_whole(
    draft: str, length: Any, halves: Models
) -> None:
    plan, alone = plan_of(draft, length, 2), plan_of(draft, length, 1)
    loop = build(plan, load_draft(plan, halves))
    found = {(one.id, one.sample): one for one in generate(PROMPTS, plan, loop=loop)}
    expected = {(one.id, one.sample): one for one in generate(PROMPTS, alone)}
    assert {key: one.token_ids for key, one in found.items()} == {
        key: one.token_ids for key, one in expected.items()
    }
    if draft == "mtp":
        assert sum(one.accepted for one in found.values()) > 0
    if length != "auto":  # which goes by the clock
        counts = {key: (one.rounds, one.drafted, one.accepted) for key, one in found.items()}
        assert counts == {
            key: (one.rounds, one.drafted, one.accepted) for key, one in expected.items()
        }


def test_plan_counts_half_of_the_states(place: Path) -> None:
    whole, half = (plan_of("none", "auto", ranks) for ranks in (1, 2))
    states = [plan.footprint.row.cache for plan in (whole, half)]
    assert states[0] > state_bytes(whole.files.target.spec, 1, whole.dtype) > states[0] / 3
    assert 0.5 <= states[1] / states[0] < 0.51
    assert 0.5 < half.footprint.weights / whole.footprint.weights < 0.6
    shown = cli("doctor", "--model", str(place / "target"), "--tensor-parallel", "2")
    assert "on each of 2 devices" in shown.stdout


def test_key_heads_that_cannot_be_split_are_refused_before_loading(tmp_path: Path) -> None:
    out, prompts = tmp_path / "o.jsonl", tmp_path / "p.txt"
    prompts.write_text("the cat\n")
    write_checkpoint(
        FAMILY,
        tmp_path / "odd",
        **shallow(FAMILY),
        linear_num_key_heads=3,
        linear_num_value_heads=3,
    )
    write_tokenizer(tmp_path / "odd")
    given = ["--model", str(tmp_path / "odd"), "--draft", "none", "--tensor-parallel", "2"]
    ended = cli("generate", str(prompts), *given, "--device", "cpu", "--out", str(out), code=2)
    assert "has key heads of recurrent layers 3, which 2 does not divide" in ended.stderr
    assert not out.exists()
