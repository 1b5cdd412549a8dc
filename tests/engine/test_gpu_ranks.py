"""A target split over two GPUs, captured and uncaptured: the tokens of one GPU, and a clean end
when a process dies. Float32."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_mask, write_pair
from killed import kill_in_two_parts, stop_in_two_parts

from bass_cli.config.job import Job, Speculation, load_pair
from bass_cli.config.sampling import Sampling
from bass_cli.run.build import Models, build, load_draft, load_models
from bass_cli.run.generate import generate
from bass_cli.run.plan import Plan, make_plan

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs")
PROMPTS = [f"the cat number {i} sat" for i in range(3)]


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("pair")
    write_pair(folder, prompts=3, num_hidden_layers=3)
    write_mask(folder / "draft", 300)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def plan_of(draft: str, length: Any, ranks: int) -> Plan:
    pair = load_pair("pair.yaml").model_copy(update={"draft": draft, "dtype": "fp32"})
    job = Job(
        pair=pair,
        sampling=Sampling(max_new_tokens=100, temperature=1.5, top_p=0.9, seed=5),
        speculation=Speculation(length=length),
        n=4,
        batch_size=4,
        device="cuda",
        dtype="fp32",
        token_ids=True,
        tensor_parallel=ranks,
    )
    return make_plan(job, prompts=len(PROMPTS))


@pytest.fixture(scope="module")
def halves() -> Iterator[Models]:
    models = load_models(plan_of("draft", 4, 2))
    yield models
    models.close()


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize(
    ("draft", "length"),
    [
        ("none", "auto"),
        ("draft", 4),
        ("draft", "auto"),
        ("parallel:draft", 3),
        ("skip:1", 3),
        ("lookup", 4),
    ],
)
def test_two_gpus_give_the_tokens_of_one(
    draft: str, length: Any, captured: bool, halves: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, followers = plan_of(draft, length, 2), halves.followers
    assert followers is not None
    assert followers.graphs.wanted, "exchanges cannot be captured on this machine"
    monkeypatch.setattr(followers.graphs, "wanted", captured)
    models, told, tell = halves, list[str](), followers.tell
    if draft != "draft":
        models = load_draft(plan, halves)

    def heard(*message: Any) -> None:
        told.append(message[1])
        tell(*message)

    monkeypatch.setattr(followers, "tell", heard)
    loop = build(plan, models)
    found = {(one.id, one.sample): one.token_ids for one in generate(PROMPTS, plan, loop=loop)}
    alone = plan_of(draft, length, 1)
    assert found == {(one.id, one.sample): one.token_ids for one in generate(PROMPTS, alone)}
    assert loop.graphs is not None
    if captured:
        assert loop.graphs.captures > 0
        assert told.count("replay") > 20  # of some 250 rounds, or fewer with drafts
    else:
        assert "replay" not in told


@pytest.mark.parametrize("length", [2, 12])
def test_sums_of_a_few_tokens_go_through_peers_memory(
    length: int, halves: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside the products with up to 16 tokens, after them with more. NCCL sums nothing."""
    plan, followers, calls = plan_of("draft", length, 2), halves.followers, list[object]()
    assert followers is not None
    if followers.ranks.peers is None:
        pytest.skip("these GPUs cannot reach each other's memory")
    monkeypatch.setattr(followers.graphs, "wanted", False)
    monkeypatch.setattr("bass_cli.models.ranks.distributed.all_reduce", calls.append)
    before = followers.ranks.peers.state[0].item()
    found = {
        (one.id, one.sample): one.token_ids
        for one in generate(PROMPTS, plan, loop=build(plan, halves))
    }
    alone = plan_of("draft", length, 1)
    assert found == {(one.id, one.sample): one.token_ids for one in generate(PROMPTS, alone)}
    assert not calls
    assert followers.ranks.peers.state[0].item() > before + 100


def test_killed_process_ends_the_command(tmp_path: Path) -> None:
    out, began = tmp_path / "o.jsonl", time.monotonic()
    ended = kill_in_two_parts(
        "follower",
        *("--pair", "pair.yaml", "--draft", "none", "--n", "16", "--max-new-tokens", "100"),
        *("--dtype", "fp32", "--batch-size", "4", "--device", "cuda"),
        call="replay",
        out=out,
        timeout=180,
    )
    assert ended.returncode == 3, ended.stderr
    assert "process 1 of 0 to 1: it was killed by SIGKILL" in ended.stderr
    assert time.monotonic() - began < 120  # with all that comes before


def test_ctrl_c_ends_the_command_while_kernels_wait_for_a_stopped_process(tmp_path: Path) -> None:
    ended, seconds = stop_in_two_parts(
        *("--pair", "pair.yaml", "--draft", "none", "--n", "16", "--max-new-tokens", "100"),
        *("--dtype", "fp32", "--batch-size", "4", "--device", "cuda"),
        numbers=[signal.SIGINT],
        call="replay",
        out=tmp_path / "o.jsonl",
        timeout=120.0,
    )
    assert ended.returncode == 130, ended.stderr
    assert "Traceback" not in ended.stderr
    assert seconds < 15
