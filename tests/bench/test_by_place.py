"""Simulated acceptance by position in the draft, and shapes that draft in one pass."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from benches import SET, bench, measured, settings

from bass_cli.bench import grid
from bass_cli.bench.figures import Run, Step
from bass_cli.bench.floor import Ceilings, FloorInputs, Sizes, floor_of, sizes_of
from bass_cli.bench.preparation import build_loops, build_models, need_of
from bass_cli.bench.shapes import head_of, spec_of
from bass_cli.drafts.heads import HeadDrafter
from bass_cli.drafts.model import ParallelDrafter
from bass_cli.engine.batch import Batch, Row
from bass_cli.engine.verify import SimulatedAcceptance
from bass_cli.errors import UserError
from bass_cli.io.console import Screen
from bass_cli.models.spec import count_parameters, head_parameters


def test_profile_gives_a_rate_for_each_position() -> None:
    found = measured(**SET | {"acceptance": ["1/1/0"]}, methods="2,3,6")
    assert [found[length]["mean_accepted"] for length in ("2", "3", "6")] == [2.0, 2.0, 2.0]
    found = measured(**SET | {"acceptance": ["0.4/1"]}, methods="5", new_tokens=100)["5"]
    assert 0 < found["mean_accepted"] < 5
    whole = settings(**SET | {"acceptance": ["0.93/0.9,0.5", "1"]}).acceptances
    assert whole == (((0.93, 0.9), 0.5), (1.0,))


@torch.inference_mode()
def test_measured_acceptance_by_position_equals_the_given_rates() -> None:
    """Over all rows and positions: accepted drafts among those whose predecessors were all
    accepted. The last rate holds for all later positions."""
    profile, rows, context = (0.9, 0.6, 0.3), 400, 80
    batch = Batch(rows=rows, context=context, device=torch.device("cpu"))
    simulated = SimulatedAcceptance([profile, 0.5], batch)
    simulated.follow(batch.swap_rows((), [Row("0", s, 5, [1], 10) for s in range(rows)]))
    accepted = torch.cat(
        [simulated.accepted(first + torch.arange(5).expand(rows, 5)) for first in range(0, 80, 5)]
    ).view(-1, rows)
    for kept, expected in (
        (accepted[:, 0::2].flatten(), (0.9, 0.6, 0.3, 0.3, 0.3)),
        (accepted[:, 1::2].flatten(), (0.5,) * 5),
    ):
        for place, chance in enumerate(expected):
            turns = kept[kept >= place]
            share = (turns > place).double().mean().item()
            assert abs(share - chance) < 4 * (chance * (1 - chance) / len(turns)) ** 0.5


def test_rows_that_move_keep_their_profile() -> None:
    chosen = settings(**SET | {"acceptance": ["1/1/0,0"]}, batch_sizes="5")
    loop = build_loops(build_models(chosen, None), chosen, context=60).speculative
    assert loop is not None
    simulated = loop.simulated
    rows = [Row("0", s, 0, [1, 2], 9) for s in range(5)]
    loop.open("0", [1, 2])
    loop.admit(*rows)
    places = torch.full((5, 1), 3) + torch.arange(4)
    assert simulated.accepted(places).tolist() == [2, 0, 2, 0, 2]
    loop.retire(1)
    assert simulated.accepted(places[:4]).tolist() == [2, 2, 2, 0]


def test_a_profile_is_reported_as_it_was_given() -> None:
    words = (
        "--shape", "tiny", "--draft-shape", "tiny", "--device", "cpu", "--batch-sizes", "2", "--methods", "3",
        "--prompt-tokens", "12", "--new-tokens", "8", "--repeats", "1", "--json",
    )  # fmt: skip
    result = bench(*words, "--acceptance", "0.9/0.8", "--acceptance", "0.9/0.8,0.3")
    assert result.exit_code == 0, result.stderr
    one, both = map(json.loads, result.stdout.splitlines())
    assert one["pair"]["acceptance"] == [[0.9, 0.8]]
    assert both["pair"]["acceptance"] == [[0.9, 0.8], 0.3]
    assert "acceptance set to 0.9/0.8" in one["pair"]["label"]
    assert "acceptance set to 0.9/0.8, 0.3" in result.stderr
    for wrong in ("0.9/", "0.9/1.1", "/", "0.9//0.8", "0.9/x"):
        with pytest.raises(UserError, match=r"0.93/0.9/0.87 by position in a draft \(got "):
            settings(**SET | {"acceptance": [wrong]})


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `tiny` draft in one pass, as pard-0.5b does."""
    monkeypatch.setattr("bass_cli.bench.settings.AT_ONCE", frozenset({"tiny"}))


def test_a_shape_that_drafts_in_one_pass(at_once: None) -> None:
    chosen = settings(**SET | {"acceptance": ["1/1/0"]}, methods="2,4,auto")
    assert chosen.job.pair.draft == "parallel:tiny"
    fed: list[int] = []
    models = build_models(chosen, None)
    loop = build_loops(models, chosen, context=60).speculative
    assert loop is not None
    assert isinstance(loop.drafter, ParallelDrafter)
    forward = loop.drafter.runner.forward

    def counted(tokens: torch.Tensor, *more: Any, **words: Any) -> torch.Tensor:
        fed.append(tokens.shape[1])
        assert (tokens[:, 5:] == 300).all(), "the last id stands for what is to be drafted"
        return forward(tokens, *more, **words)

    loop.drafter.runner.forward = counted  # type: ignore[method-assign]
    loop.open("0", [1, 2, 3])
    loop.admit(Row("0", 0, 0, [1, 2, 3], 30))
    loop.drafter.propose(loop.batch, 4)
    assert fed == [8]
    [document] = grid.measure(chosen, Screen(quiet=True))
    cells = {cell["method"]: cell for cell in document["cells"]}
    assert cells["4"]["mean_accepted"] == 2.0
    parts = cells["4"]["parts_ms"]
    assert parts["draft_step"] == parts["draft"] > 0
    assert document["pair"]["draft"]["name"] == "parallel:tiny"


def test_the_floor_of_one_pass_is_one_reading_of_the_draft() -> None:
    ceilings = Ceilings(bandwidth=1.0, operations=1e9, source="made up")
    run = Run((Step(1.0, 4, (0,), (3,)), Step(2.0, 0, (0,), (0,))), (10,), 5, 0.0, 0)
    draft = Sizes(40, 2, 1, 0, 0, (0,))
    chain, once = (
        floor_of(run, FloorInputs(Sizes(100, 0, 1, 0, 0, (0,)), draft, 1, ceilings, way))
        for way in (False, True)
    )
    assert chain.work.bytes == 200 + 4 * 42
    assert once.work.bytes == 200 + 42
    assert once.work.operations == 2 * 100 * (5 + 1) + 2 * (40 * 8 + 2 * 4)


def test_a_shape_that_reads_the_targets_states() -> None:
    """The plain loop computes no features for the drafter."""
    given = SET | {"shape": "tiny", "draft_shape": "dspark-tiny", "acceptance": ["1/1/0"]}
    chosen = settings(**given, methods="2,4,auto")
    assert chosen.job.pair.draft == "heads:dspark-tiny"
    models = build_models(chosen, None)
    loops = build_loops(models, chosen, context=60)
    assert loops.speculative is not None
    assert isinstance(loops.speculative.drafter, HeadDrafter)
    assert loops.speculative.target.decoder.reader is models.head  # type: ignore[attr-defined]
    assert loops.plain.target.decoder.reader is None  # type: ignore[attr-defined]
    [document] = grid.measure(chosen, Screen(quiet=True))
    cells = {cell["method"]: cell for cell in document["cells"]}
    assert cells["4"]["mean_accepted"] == 2.0
    parts = cells["4"]["parts_ms"]
    assert parts["draft_step"] == parts["draft"] > 0
    assert models.head is not None
    shapes = head_parameters(models.head.spec)
    assert document["pair"]["draft"]["parameters"] == sum(map(math.prod, shapes.values()))
    assert (
        sizes_of(models.head.body, models.head.spec).body - sizes_of(models.head.body).body
        == 2 * 48**2
    )
    with pytest.raises(UserError, match="dspark-8b works with qwen3-8b only"):
        settings(**given | {"draft_shape": "dspark-8b"})
    need = need_of(chosen, None, torch.device("cpu"))
    without = need_of(settings(shape="tiny", methods="plain"), None, torch.device("cpu"))
    assert need.footprint.weights > without.footprint.weights


def test_a_shape_that_reads_the_targets_states_token_by_token() -> None:
    """Each draft token costs a pass of a layer with two inputs and a head with fewer tokens."""
    given = SET | {"shape": "tiny", "draft_shape": "eagle3-tiny", "acceptance": ["1/1/0"]}
    chosen = settings(**given, methods="2,4,auto")
    models = build_models(chosen, None)
    assert (models.mask, models.head is not None) == (None, True)
    [document] = grid.measure(chosen, Screen(quiet=True))
    cells = {cell["method"]: cell for cell in document["cells"]}
    assert cells["4"]["mean_accepted"] == 2.0
    parts = cells["4"]["parts_ms"]
    assert parts["draft_step"] == pytest.approx(parts["draft"] / 4)
    assert models.head is not None
    cost, layer = sizes_of(models.head.body, models.head.spec), sizes_of(models.head.body)
    assert cost.head == 150 * 48
    assert cost.body - layer.body == 3 * 48**2 + 48 * (48 + 2 * 16)


def test_shapes_for_qwen3_have_the_published_sizes() -> None:
    spec = spec_of("qwen3-8b", option="--shape")
    assert round(count_parameters(spec) / 1e9, 1) == 8.2
    for name, drafts, numbers in (("dspark-8b", 7, 1.1), ("dflash-8b", 15, 1.0)):
        head = head_of(name, spec, option="--draft-shape")
        assert (head.drafts, head.aux_layers) == (drafts, (1, 9, 17, 25, 33))
        assert round(sum(map(math.prod, head_parameters(head).values())) / 1e9, 1) == numbers
    chain = head_of("eagle3-8b", spec, option="--draft-shape")
    assert (chain.aux_layers, chain.mask, len(chain.ids or ())) == ((1, 17, 32), None, 32000)
    assert round(sum(map(math.prod, head_parameters(chain).values())) / 1e6) == 400
