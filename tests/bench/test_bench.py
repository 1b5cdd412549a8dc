"""`bass bench` with tiny models on a CPU: figures, document, tables and refusals."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint, write_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

import bass_kernels as ops
from bass_cli.bench import document as documents
from bass_cli.bench import grid, preparation, report, runs, texts
from bass_cli.bench.figures import (
    Latency,
    Run,
    Step,
    counts,
    finish_times,
    interval,
    latency,
    round_seconds,
    spread,
    tokens_per_second,
)
from bass_cli.bench.floor import Ceilings, FloorInputs, Sizes, Work, floor_of, pass_work, sizes_of
from bass_cli.bench.preparation import build_loops, build_models
from bass_cli.bench.runs import Key, Parts, _for_all_rows, decode, fill, measure_parts
from bass_cli.bench.settings import ATTENTION, make_settings
from bass_cli.bench.shapes import (
    LOGIT_SPREAD,
    SHAPES,
    count_parameters,
    random_part,
    random_weights,
    scale_layers,
    spec_of,
)
from bass_cli.bench.texts import lengths_of, prompts_for, rows_for
from bass_cli.cli.commands import app
from bass_cli.config.speed_commands import BenchArgs
from bass_cli.engine.contracts import Proposal
from bass_cli.errors import UserError
from bass_cli.formats.tokenizer import Tokenizer
from bass_cli.io import saving
from bass_cli.io.console import Screen
from bass_cli.lengths.controllers import Fixed
from bass_cli.models.decoder import Decoder
from bass_cli.models.families import FAMILIES
from bass_cli.models.ranks import Share
from bass_cli.models.recurrent import RecurrentStates
from bass_cli.run.build import Models
from bass_cli.run.profile import PASSAGES
from bass_cli.run.tasks import RequestReader
from bass_kernels.dispatch import SCHEDULES, schedule

SET = {"shape": "tiny", "draft_shape": "tiny", "acceptance": ["0.7"]}
SCALED = {"shape": "tiny", "depth": 2, "scale": 0.2}
SMALL = ("--prompt-tokens", "12", "--new-tokens", "12", "--repeats", "2", "--json")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("BASS_")]:
        monkeypatch.delenv(name)


def settings(**given: Any) -> Any:
    small = {
        "prompt_tokens": 12,
        "new_tokens": 12,
        "repeats": 1,
        "device": "cpu",
        "batch_sizes": "3",
        "methods": "3",
    }
    return make_settings(BenchArgs(**small | given))


def measured(**given: Any) -> dict[str, dict[str, Any]]:
    """Return the cells of a bench with one batch size, by method."""
    [document] = grid.measure(settings(**given), Screen(quiet=True))
    assert document["failures"] == []
    return {cell["method"]: cell for cell in document["cells"]}


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments], catch_exceptions=False)


# Figures


def run_of(*steps: tuple[float, int, dict[int, int]], tokens: int = 4, rows: int = 2) -> Run:
    return Run(
        tuple(Step(e, w, tuple(kept), tuple(kept.values())) for e, w, kept in steps),
        (10, 20)[:rows],
        tokens,
    )


RAGGED = run_of((1.0, 2, {0: 2, 1: 0}), (3.0, 2, {0: 1, 1: 1}), (4.5, 1, {1: 1}))


def test_first_last_and_mean_row() -> None:
    assert finish_times(RAGGED) == [3.0, 4.5]  # row 0: 3 + 2 of 4 tokens; row 1: 1 + 2 + 2
    assert latency(RAGGED) == pytest.approx((750.0, 1125.0, 937.5))
    assert tokens_per_second(RAGGED) == pytest.approx(8 / 4.5)
    assert latency(RAGGED, [1.0, 1.0, 2.0]) == pytest.approx((250.0, 500.0, 375.0))
    with pytest.raises(AssertionError, match="never ended"):
        finish_times(run_of((1.0, 2, {0: 2, 1: 0})))


def test_acceptance_is_counted_over_rows_and_rounds() -> None:
    found = counts(RAGGED)
    assert found.rounds == 3
    assert found.rate == pytest.approx(5 / 9)  # 2 + 0 + 1 + 1 + 1 of 2 rows x 2, twice, and 1
    assert found.trials == pytest.approx(
        5 / 8
    )  # three rejections: row 1 at once, and both rows after one
    assert found.mean == pytest.approx(1.0)
    plain = counts(run_of(*((float(i + 1), 0, {0: 0}) for i in range(4)), rows=1))
    assert (plain.rounds, plain.rate, plain.trials, plain.mean) == (4, None, None, 0.0)


def test_rounds_of_a_length_count_only_while_all_rows_are_live() -> None:
    assert round_seconds(RAGGED, 2) == [1.0, 2.0]
    assert round_seconds(RAGGED, 1) == []
    assert spread([3.0, 1.0, 8.0]) == (3.0, 1.0, 8.0)


def test_the_work_of_a_pass() -> None:
    cost = Sizes(body=10, head=5, item=2, keys=4, attention=8, windows=(0, 3))
    found = pass_work(cost, contexts=[7, 2], shared=1, fed=2, logits=1)
    # Weights once; layer 0 reads 7 + 2 - 1 positions, layer 1 3 + 2. Products: 2 rows x (2 x 10
    # + 5) x 2.
    assert found == Work(15 * 2 + (8 + 5) * 4 * 2, 100 + 8 * 2 * (9 + 5))


def test_the_floor_follows_the_rounds() -> None:
    target, ceilings = Sizes(100, 10, 1, 0, 0, (0,)), Ceilings(10.0, 1e9, "known")
    found = floor_of(RAGGED, FloorInputs(target, None, 1, ceilings))
    assert found.ends == pytest.approx((11.0, 22.0, 33.0))  # 110 bytes a round at 10 a second
    assert found.work.bytes == 330
    with_draft = floor_of(RAGGED, FloorInputs(target, Sizes(40, 0, 1, 0, 0, (0,)), 1, ceilings))
    assert with_draft.ends == pytest.approx((19.0, 38.0, 53.0))  # and 2, 2 and 1 steps of 40 bytes
    # bound by arithmetic: 2 rows x 3 tokens x 110 x 2 operations at 10 a second
    slow = Ceilings(1e9, 10.0, "known")
    assert floor_of(RAGGED, FloorInputs(target, None, 1, slow)).ends[0] == pytest.approx(132.0)
    keys = Sizes(0, 0, 1, 1, 0, (0,))
    apart = floor_of(RAGGED, FloorInputs(keys, None, 1, ceilings)).work.bytes
    together = floor_of(
        RAGGED._replace(contexts=(10, 10)), FloorInputs(keys, None, 2, ceilings)
    ).work.bytes
    assert apart == (10 + 20) + (13 + 21) + 23
    assert together == 10 + 0 + (13 + 11 - 10) + 13


# Shapes and weights

PUBLISHED = {
    "qwen2.5-7b": 7.616e9, "qwen2.5-1.5b": 1.544e9, "qwen2.5-0.5b": 0.494e9, "llama-3.1-8b": 8.030e9,
    "llama-3.2-1b": 1.236e9, "opt-13b": 12.85e9, "opt-125m": 125.2e6, "codegen-16b": 16.03e9, "wide-310m": 0.5546e9,
    "pard-0.5b": 0.494e9, "qwen3-8b": 8.19e9, "llama-3.1-70b": 70.55e9, "qwen3-30b-a3b": 30.53e9,
    "gpt-oss-20b": 20.91e9,
}  # fmt: skip


HYBRID = ("qwen3.5-27b", "qwen3.5-35b-a3b")


@pytest.mark.parametrize("name", HYBRID)
def test_shapes_of_hybrids_have_the_parameters_of_transformers(name: str) -> None:
    """Of a model without memory (the meta device), made of the same sizes."""
    shape = SHAPES[name]
    keys = FAMILIES[shape.family].keys
    sizes = {keys[word]: size for word, size in shape._asdict().items() if keys.get(word)}
    with torch.device("meta"):
        config = AutoConfig.for_model(shape.family, **sizes, **shape.more)
        model = AutoModelForCausalLM.from_config(config)
    assert count_parameters(spec_of(name, option="--shape")) == model.num_parameters()


def test_floor_of_a_hybrid_counts_its_states_and_the_keys_of_attention_only() -> None:
    spec = spec_of("tiny-hybrid", option="--shape")
    weights = random_weights(spec, dtype=torch.float32, device=torch.device("cpu"), seed=0)
    others = sum(
        one.numel()
        for name, one in weights.items()
        if name.split(".")[-2] in ("conv", "decay", "step_bias") or "norm" in name
    )
    cost = sizes_of(Decoder(spec, weights))
    assert cost.body + 2 * cost.head + others == count_parameters(spec)
    assert (len(cost.windows), cost.state) == (1, 3 * 6 * 8 * 8)
    found = pass_work(cost, contexts=(5, 7), shared=0, fed=2, logits=2)
    weights_read = 4 * (cost.body + cost.head)
    assert found.bytes == weights_read + 4 * 12 * cost.keys + 2 * 2 * 4 * cost.state


def test_timed_passes_of_a_hybrid_roll_its_states_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a round. Without that a pass would not write its states."""
    given = settings(shape="tiny-hybrid", methods="plain")
    spec = spec_of("tiny-hybrid", option="--shape")
    words = {"dtype": torch.float32, "device": torch.device("cpu"), "seed": 0}
    loop = build_loops(
        Models(Decoder(spec, random_weights(spec, **words))), given, context=40
    ).plain
    fill(loop, rows_for([[1, 2, 3], [9, 8, 7, 6]], 2, given))
    loop.round()
    advanced, decode = list[list[int]](), RecurrentStates.decode

    def noted(self: RecurrentStates, *given: Any) -> Any:
        found = decode(self, *given)
        advanced.append(found.advance.tolist())
        return found

    monkeypatch.setattr(RecurrentStates, "decode", noted)
    measure_parts(loop, 0)
    assert len(advanced) > 3
    assert all(one == [1, 1] for one in advanced)


@pytest.mark.parametrize(("name", "expected"), PUBLISHED.items())
def test_shapes_have_their_models_parameters(name: str, expected: float) -> None:
    assert count_parameters(spec_of(name, option="--shape")) == pytest.approx(expected, rel=0.005)


def test_every_shape_is_checked_and_takes_another_vocabulary() -> None:
    assert set(SHAPES) == {*PUBLISHED, *HYBRID, "tiny", "tiny-moe", "tiny-hybrid"}
    for name in SHAPES:
        assert spec_of(name, option="--shape", vocab=77).vocab == 77
    with pytest.raises(UserError, match=r'--draft-shape: .*"opt-12b"; did you mean "opt-1'):
        spec_of("opt-12b", option="--draft-shape")
    with pytest.raises(UserError, match=r'`draft_shape`: .*"dspark-7b"; did you mean "dspark-8b"'):
        settings(shape="qwen3-8b", draft_shape="dspark-7b", acceptance=["0.5"])


def test_random_logits_have_the_documented_standard_deviation() -> None:
    spec = spec_of("tiny", option="--shape", vocab=3000)
    first, second = (
        random_weights(spec, dtype=torch.float32, device=torch.device("cpu"), seed=seed)
        for seed in (3, 3)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(first["layers.0.norm1.weight"], torch.ones(spec.width))
    assert first["layers.3.down.weight"].std().item() == pytest.approx(80**-0.5, rel=0.1)
    target = Decoder(spec, first)
    models = Models(target)
    loop = build_loops(models, settings(shape="tiny", methods="plain"), context=40).plain
    fill(loop, rows_for([[1, 2, 3], [9, 8, 7, 6], [5]], 3, settings(shape="tiny", methods="plain")))
    tokens, positions = loop.batch.last(1)
    with torch.inference_mode():
        logits = loop.target.forward(tokens, positions, loop.batch.ends(0))
    assert logits.std().item() == pytest.approx(LOGIT_SPREAD, rel=0.15)


def test_tied_heads_and_scaled_layers() -> None:
    spec = spec_of("qwen2.5-0.5b", option="--shape", vocab=50)
    assert spec.tied
    opt = SHAPES["opt-125m"].spec(60)
    weights = random_weights(opt, dtype=torch.bfloat16, device=torch.device("cpu"), seed=0)
    assert weights["head.weight"] is weights["embed.weight"]
    weights["layers.9.down.bias"].fill_(2.0)
    before = {name: weight.clone() for name, weight in weights.items()}
    scale_layers(weights, opt, first=9, scale=0.5)
    changed = {name for name in weights if not torch.equal(weights[name], before[name])}
    assert changed == {
        f"layers.{i}.{name}.weight" for i in (9, 10, 11) for name in ("o", "down")
    } | {"layers.9.down.bias"}
    assert torch.equal(weights["layers.10.o.weight"], before["layers.10.o.weight"] * 0.5)


def test_the_cost_of_a_decoder_counts_the_layers_it_runs() -> None:
    spec = spec_of("tiny", option="--shape")
    whole = Decoder(
        spec, random_weights(spec, dtype=torch.float32, device=torch.device("cpu"), seed=0)
    )
    cost, half = sizes_of(whole), sizes_of(whole.keep_layers([0, 1]))
    norms = (2 * spec.layers + 1) * spec.width
    assert cost.body + 2 * cost.head + norms == count_parameters(spec)
    assert (half.body, half.head, len(half.windows)) == (cost.body / 2, cost.head, 2)
    assert (cost.item, cost.keys, cost.attention) == (4, 2 * 2 * 8, 4 * 6 * 8)


def test_the_cost_of_a_mixture_grows_with_the_experts_that_are_read() -> None:
    spec = spec_of("tiny-moe", option="--shape")  # 2 of 6 experts
    cost = sizes_of(
        Decoder(spec, random_weights(spec, dtype=torch.float32, device=torch.device("cpu"), seed=0))
    )
    norms = (2 * spec.layers + 1) * spec.width + 2 * spec.layers * spec.head_size
    assert cost.body + cost.experts + 2 * cost.head + norms == count_parameters(spec)
    assert cost.experts == 4 * 6 * 3 * 48 * 40
    one, two = cost.read(1), cost.read(2)
    assert one == pytest.approx(cost.experts / 3)
    assert two == pytest.approx(cost.experts * (1 - 4 / 9))
    found = pass_work(cost, contexts=(5,), shared=0, fed=1, logits=1)
    assert found.bytes == pytest.approx((cost.body + one + cost.head + 5 * cost.keys * 4) * 4)
    products = 2 * (cost.body + cost.experts / 3 + cost.head)
    assert found.operations == pytest.approx(products + cost.attention * 5 * 4)


# Prompts


def test_prompts_are_unequal_and_always_the_same() -> None:
    lengths = lengths_of(16, 300)
    assert lengths == lengths_of(64, 300)[:16]
    assert min(lengths) >= 300
    assert max(lengths) <= 600
    assert len(set(lengths)) == 16
    assert 420 < sum(lengths) / 16 < 480
    wanted = settings(**SET, samples_per_prompt=2)
    prompts = prompts_for(wanted, None)
    assert [len(prompt) for prompt in prompts] == lengths_of(2, 12)
    rows = rows_for(prompts, 3, wanted)
    assert [(row.key, row.sample) for row in rows] == [("0", 0), ("0", 1), ("1", 0)]
    assert rows[0].tokens == rows[1].tokens == prompts[0]
    assert (rows[2].limit, rows[2].sampling.temperature, rows[2].sampling.top_p) == (12, 0.8, 0.95)
    assert [rows_for(prompts, 1, wanted, repeat=repeat)[0].seed for repeat in (0, 2)] == [0, 2]


def test_prompts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match=r"need \d+ positions, but the model's context has 512"):
        prompts_for(settings(**SET, prompt_tokens=300), None)


# Acceptance


@pytest.mark.parametrize(("chance", "mean", "rounds"), [(0.0, 0.0, 12), (1.0, 3.0, 3)])
def test_acceptance_set_to_none_and_all(chance: float, mean: float, rounds: int) -> None:
    cells = measured(**SET | {"acceptance": [str(chance)]})
    assert cells["3"]["mean_accepted"] == mean
    assert cells["3"]["acceptance_per_trial"] == chance
    assert (cells["3"]["rounds"], cells["plain"]["rounds"]) == (rounds, 12)
    assert cells["plain"]["acceptance_rate"] is None


def test_acceptance_set_to_a_chance() -> None:
    cell = measured(**SET, batch_sizes="4", methods="4", new_tokens=160)["4"]
    assert cell["acceptance_per_trial"] == pytest.approx(
        0.7, abs=0.06
    )  # about 800 trials: four standard deviations
    assert cell["mean_accepted"] == pytest.approx(0.7 + 0.7**2 + 0.7**3 + 0.7**4, abs=0.25)


def test_scaled_layers_make_acceptance_real_and_adjustable() -> None:
    rates = [
        measured(**SCALED | {"scale": scale})["3"]["acceptance_rate"] for scale in (0.0, 0.2, 1.0)
    ]
    assert rates[0] == 1.0
    assert 0.2 < rates[1] < 1.0
    assert rates[2] < rates[1]


def test_greedy_speculation_on_scaled_layers_is_plain_decoding() -> None:
    wanted = settings(**SCALED)
    models = build_models(wanted, None)
    prompts = prompts_for(wanted, None)
    loops = build_loops(models, wanted, context=60)
    assert loops.speculative is not None
    rows, again = (rows_for(prompts, 3, wanted, temperature=0.0) for _ in range(2))
    found = preparation.gate(loops, models.target, rows, again)
    assert (found.passed, found.strict, found.rows_equal, found.tokens_equal) == (True, True, 3, 36)
    assert sum(row.accepted for row in again) not in (
        0,
        sum(row.drafted for row in again),
    )  # drafts were wrong at times
    other = rows_for(prompts[::-1], 3, wanted, temperature=0.0)
    failed = preparation.gate(
        loops, models.target, rows_for(prompts, 3, wanted, temperature=0.0), other
    )
    assert (failed.passed, failed.rows, failed.rows_equal) == (
        False,
        3,
        1,
    )  # the middle prompt is the same


def test_logits_that_are_not_finite_fail_the_gate() -> None:
    wanted = settings(shape="tiny", methods="plain")
    prompts = prompts_for(wanted, None)
    for broken, expected in ((1.0, True), (float("nan"), False)):
        weights = random_weights(
            SHAPES["tiny"].spec(), dtype=torch.float32, device=torch.device("cpu"), seed=0
        )
        weights["layers.2.norm1.weight"][5] *= broken
        models = Models(Decoder(SHAPES["tiny"].spec(), weights))
        found = preparation.gate(
            build_loops(models, wanted, context=60), models.target, rows_for(prompts, 3, wanted), []
        )
        assert (found.finite, found.passed) == (expected, expected)


def test_parts_leave_the_rows_as_they_are() -> None:
    wanted = settings(**SCALED)
    loop = build_loops(build_models(wanted, None), wanted, context=60).of("3")
    prompts = prompts_for(wanted, None)

    def tokens(interrupt: bool) -> list[list[int]]:
        rows = rows_for(prompts, 3, wanted)
        fill(loop, rows)
        loop.use(Fixed(3))
        loop.round()
        before, lengths = [list(row.tokens) for row in rows], loop.batch.lengths.clone()
        if interrupt:
            parts = measure_parts(loop, 3)
            assert parts.width == 3
            assert min(parts.draft, parts.verify, parts.accept) > 0
            assert [row.tokens for row in rows] == before
            assert torch.equal(loop.batch.lengths, lengths)
        decode(loop, rows)
        return [row.tokens for row in rows]

    assert tokens(True) == tokens(False)


def test_host_drafts_are_padded_to_the_rows_of_the_batch() -> None:
    loop = build_loops(build_models(settings(**SCALED), None), settings(**SCALED), context=60).plain
    drafts = torch.tensor([[5, 6], [7, 8]])
    loop.batch.pad(3)
    assert _for_all_rows(Proposal(drafts, None), loop.batch).tokens.tolist() == [
        [5, 6],
        [7, 8],
        [0, 0],
    ]
    loop.batch.pad(2)
    assert _for_all_rows(Proposal(drafts, None), loop.batch).tokens is drafts


# The document

CELL: dict[str, Any] = {
    "batch": int, "method": str, "draft_length": int, "ms_per_token": dict, "ms_per_token_spread": dict,
    "tokens_per_second": float, "speedup": float, "speedup_spread": list, "rounds": (int, float),
    "speedup_interval": (list, type(None)), "verdict": (str, type(None)), "text": (str, type(None)),
    "acceptance_rate": (float, type(None)), "acceptance_per_trial": (float, type(None)), "mean_accepted": float,
    "parts_ms": dict, "shares": (dict, type(None)), "flop_utilisation": float, "bandwidth_utilisation": float,
    "floor_ms_per_token": dict, "prefill_seconds": float, "captures_while_measured": int,
}  # fmt: skip


def test_the_document() -> None:
    result = bench(
        "--shape",
        "tiny",
        "--draft-shape",
        "tiny",
        "--acceptance",
        "0.6",
        "--batch-sizes",
        "3,1",
        "--methods",
        "2,bass,auto",
        *SMALL,
    )
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert list(document) == [
        "machine",
        "pair",
        "settings",
        "gate",
        "captures",
        "cells",
        "controllers",
        "repeats",
        "failures",
    ]
    assert [document["repeats"][key] for key in ("done", "missing", "missing_seconds")] == [
        2,
        [],
        0,
    ]
    assert document["pair"]["kind"] == "acceptance set"
    assert "acceptance set to 0.6" in document["pair"]["label"]
    assert document["gate"] == {
        "finite": True,
        "strict": True,
        "rows": None,
        "rows_equal": None,
        "tokens": None,
        "tokens_equal": None,
        "passed": True,
    }
    assert [(c["batch"], c["method"]) for c in document["cells"]] == [
        *itertools.product((1, 3), ("plain", "2", "bass", "auto"))
    ]
    for cell in document["cells"]:
        assert {key: isinstance(cell[key], kind) for key, kind in CELL.items()} == dict.fromkeys(
            CELL, True
        )
        assert set(cell) == set(CELL)
        ms = cell["ms_per_token"]
        assert 0 < ms["first"] <= ms["mean"] <= ms["last"] < 1e4
        for key, (least, most) in cell["ms_per_token_spread"].items():
            assert least <= ms[key] <= most
        assert set(cell["parts_ms"]) == {
            "draft",
            "draft_step",
            "verify",
            "accept",
            "verify_and_accept",
            "device",
            "host",
            "round",
        }
        shares = cell["shares"] or {"": 1.0}
        assert (min(shares.values()) >= 0, sum(shares.values())) == (True, pytest.approx(1.0))
        assert cell["method"] != "plain" or cell["speedup"] == 1.0
        assert cell["captures_while_measured"] == 0
    assert "repeat 2 of 2" in result.stderr


def test_the_seed_fixes_everything_but_the_times() -> None:
    def found(seed: int) -> list[tuple[Any, ...]]:
        cells = measured(
            **SET, batch_sizes="3", methods="2,bass", new_tokens=10, repeats=1, seed=seed
        )
        keys = ("rounds", "acceptance_rate", "mean_accepted", "draft_length")
        return [tuple(cell[key] for key in keys) for cell in cells.values()]

    assert found(0) == found(0)
    assert found(0) != found(1)


def test_table_and_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "SHAPE": "tiny",
        "BATCH_SIZES": "2",
        "PROMPT_TOKENS": "9",
        "NEW_TOKENS": "4",
        "REPEATS": "1",
    }
    for name, value in given.items():
        monkeypatch.setenv(f"BASS_{name}", value)
    result = bench("--quiet")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert "random weights, no draft" in lines[0]
    assert [line.split()[:2] for line in lines if "method" in line] == [["rows", "method"]] * 2
    assert [line.split()[:2] for line in lines if line.strip().startswith("2 ")] == [
        ["2", "plain"]
    ] * 2
    assert lines[-1].startswith("plain ")
    assert lines[-1].endswith(" ms a token at 2 rows")


def test_tables_fit_80_columns_and_end_in_one_sentence() -> None:
    result = bench(
        "--shape",
        "tiny",
        "--draft-shape",
        "tiny",
        "--acceptance",
        "0.9",
        "--batch-sizes",
        "1,16",
        "--methods",
        "4,bass+table,auto",
        *SMALL[:2],
        "--new-tokens",
        "5",
        *SMALL[4:6],
    )
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.split()[1:2] == ["bass+table"] for line in lines) == 4
    few = r"no verdict at (1 row|16 rows) \(fewer than 3 repeats\)"
    assert re.fullmatch(
        f"auto: {few}, {few}; fastest fixed length: 4, {few}, 4, {few}",
        " ".join(lines[-3:]).split("be chance ")[-1],
    ), lines[-3:]


def test_summary_claims_only_what_the_repeats_show() -> None:
    def cell(batch: int, method: str, *ms: float, text: str | None = None) -> dict[str, Any]:
        made = [Latency(one, one, one) for one in ms]
        plain = [8.0 + 0.1 * repeat for repeat in range(len(ms))]
        return documents.timing(Key(batch, method), made, [1.0], plain) | {"text": text}

    found = [
        cell(8, "plain", 8.0, 8.1, 8.2),
        cell(8, "2", 6.0, 6.1, 6.2),
        cell(8, "5", 5.0, 5.1, 5.0),
        cell(8, "auto", 4.9, 5.0, 4.9),
        cell(8, "vllm", 1.0, 1.0, 1.0),
    ]
    assert (
        report.verdict(found)
        == "auto: 1.63x plain at 8 rows; fastest fixed length: 5, 1.60x plain at 8 rows"
    )
    noisy = [
        cell(4, "plain", 8.0, 8.0, 8.0, text="chat"),
        cell(4, "auto", 6.0, 9.0, 8.2, text="chat"),
    ]
    assert re.fullmatch(
        r"auto: within noise of plain for chat at 4 rows \(0\.\d\d-1\.\d\dx\)",
        report.verdict(noisy),
    )
    one = [cell(8, "plain", 8.0), cell(8, "auto", 10.0)]
    assert report.verdict(one) == "auto: no verdict at 8 rows (fewer than 3 repeats)"
    assert report.speed_line(one[1] | {"draft_length": 4, "mean_accepted": 1.0})[4:6] == ["-", "-"]
    assert [one["verdict"] for one in found] == [None, *["faster"] * 4]


@pytest.mark.parametrize(("tokens", "expected"), [(31, "no verdict"), (64, "slower")])
def test_short_runs_of_a_controller_give_no_verdict(tokens: int, expected: str) -> None:
    """A controller starts without measurements, so a run of 31 tokens shows mostly learning."""

    def runs(second: float) -> list[Run]:
        steps = [Step((i + 1) * second, 0, (0,), (0,)) for i in range(tokens)]
        return [Run(tuple(steps), (10,), tokens, 1.0)] * 3

    inputs = FloorInputs(Sizes(10, 10, 4, 8, 8, (0,)), None, 1, Ceilings(1e9, 1e9, "known"))
    auto, fixed = (
        documents.cell(Key(4, method), runs(0.02), runs(0.01), parts=None, inputs=inputs)
        | {"text": None}
        for method in ("auto", "2")
    )
    assert (auto["verdict"], fixed["verdict"]) == (expected, "slower")
    few = "no verdict at 4 rows (fewer than 64 tokens a row)"
    said = {"no verdict": few, "slower": "0.50x plain at 4 rows"}[expected]
    assert report.verdict([auto]) == f"auto: {said}"


def test_an_interval_covers_the_truth_in_95_of_100_benches() -> None:
    """A known ratio, with normal noise in its logarithm."""
    chance, truth = random.Random(0), 1.04
    for repeats in (3, 5, 12):
        covered = 0
        for _ in range(2000):
            low, high = interval([truth * math.exp(chance.gauss(0, 0.1)) for _ in range(repeats)])
            covered += low <= truth <= high
        assert covered / 2000 == pytest.approx(0.95, abs=0.015)
    assert interval([1.5, 1.6]) is None


def test_shares_are_of_the_sum_of_the_parts() -> None:
    parts = Parts(4, draft=0.2, verify=0.5, accept=0.1, device=0.8)
    expected = {"draft": 0.25, "verify": 0.625, "accept": 0.125, "other": 0, "host": 0}
    assert documents._shares(parts, 400.0) == pytest.approx(expected)
    assert documents._shares(parts, 1000.0)["host"] == pytest.approx(0.2)
    assert documents._parts_ms(parts, 400.0)["host"] == 0.0
    assert documents._shares(parts, None) is None


def test_format_of_numbers_and_lines() -> None:
    assert [report.number(value) for value in (None, 0.01234, 3.0, 1234.5, 12.34)] == [
        "-",
        "0.0123",
        "3",
        "1234",
        "12.3",
    ]


# What goes wrong


def test_a_capture_inside_a_measured_run_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = itertools.count()
    monkeypatch.setattr(runs, "captured", lambda loop: next(counter))
    result = bench("--shape", "tiny", "--batch-sizes", "1", *SMALL)
    assert result.exit_code == 1
    assert "batch 1, plain: 2 graphs were captured during the measured runs" in result.stderr
    assert json.loads(result.stdout)["cells"][0]["captures_while_measured"] == 2


def test_a_gate_that_fails_stops_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "gate", lambda *_: preparation.Gate(True, True, 3, 2, 48, 40))
    result = bench("--shape", "tiny", "--depth", "1", "--scale", "0", "--batch-sizes", "1", *SMALL)
    assert result.exit_code == 1
    assert "the gate failed, so nothing was timed: tokens differ" in result.stderr
    assert json.loads(result.stdout)["cells"] == []


BAD: list[tuple[list[str], str]] = [
    (["--shape", "qwen2.5-7"], '--shape (or BASS_SHAPE): there is no shape "qwen2.5-7"; did you '
                               'mean "qwen2.5-7b"?'),
    (["--shape", "tiny", "--draft-shape", "tny", "--acceptance", "1"], 'there is no shape "tny"; '
                                                                       'did you mean "tiny"?'),
    (["--shape", "tiny", "--draft-shape", "tiny"], "--draft-shape and --acceptance must be "
                                                   "given together"),
    (["--shape", "tiny", "--depth", "2"], "--depth and --scale must be given together"),
    (["--shape", "tiny", "--depth", "4", "--scale", "1"], "from 1 to 3, because tiny has 4 layers "
                                                          "(got 4)"),
    (["--shape", "qwen3.5-27b", "--depth", "3", "--scale", "0"], "give a number from 4 to 63, because qwen3.5-27b has 64"),
    (["--shape", "tiny", "--depth", "2", "--scale", "-1"], "--scale (or BASS_SCALE): give a number of at least 0"),
    (["--shape", "tiny", "--draft-shape", "tiny", "--acceptance", "1.5"], "0.93/0.9/0.87 by position in a draft (got 1.5)"),
    (["--acceptance", "0.5"], "--acceptance (or BASS_ACCEPTANCE): this option needs --shape NAME"),
    (["--shape", "tiny", "--pair", "smollm2"], "--pair (or BASS_PAIR): a --shape has random weights"),
    (["--shape", "tiny", "--methods", "bas"], 'there is no method "bas"; '),
    (["--shape", "tiny", "--methods", "plain,4"], '"4" needs a draft, but this pair has none'),
    (["--pair", "smollm2", "--methods", "plan"], 'there is no method "plan"; did you mean '
                                                 '"plain"?'),
    (["--pair", "smollm2", "--methods", "0"], "a draft length is from 1 to 64 (got 0); for 0 "
                                              "write plain"),
    (["--shape", "tiny", "--model", "m.gguf"], "--model (or BASS_MODEL): a --shape has random weights"),
    (["--shape", "tiny", "--draft", "lookup"], "choose the draft of a --shape with "
                                               "--draft-shape or --depth"),
    (["--pair", "smollm2", "--draft", "none", "--methods", "4"], '"4" needs a draft, but this '
                                                                 'pair has none'),
    (["--pair", "Qwen/Qwen2.5-0.5B"], "give it with --model Qwen/Qwen2.5-0.5B"),
    (["--pair", "smolm"], 'there is no pair "smolm"; did you mean "smollm2"?'),
    (["--shape", "tiny", "--batch-sizes", "1,x"], "--batch-sizes (or BASS_BATCH_SIZES): give a "
                                                  "whole number"),
    (["--shape", "tiny", "--batch-sizes", ","], "--batch-sizes (or BASS_BATCH_SIZES): give at "
                                                "least one"),
    (["--shape", "tiny", "--repeats", "0"], "--repeats (or BASS_REPEATS): give a whole "
                                            "number from 1"),
    (["--shape", "tiny", "--top-p", "2"], "--top-p (or BASS_TOP_P)"),
    (["--shape", "tiny", "--tensor-parallel", "2", "--depth", "1", "--scale", "0", "--methods", "table"],
     "--methods (or BASS_METHODS): rivals, and round costs for table, are measured on one device"),
    (["--shape", "tiny", "--rivals", "transformers"], "rivals load files; give a pair"),
    (["--pair", "smollm2", "--rivals", "vlm"], 'there is no "vlm"; did you mean "vllm"?'),
    (["--shape", "tiny", "--attention", "padd"], '(or BASS_ATTENTION): there is no "padd"; did '
                                                 'you mean "pad"?'),
    (["--shape", "tiny", "--attention", "pad,split"], "name one of ragged, pad, split"),
    (["--pair", "smollm2", "--prompts", "none.jsonl"], "none.jsonl: there is no such prompt file"),
    (["--shape", "tiny", "--plot", "chart.pdf"], "the file must end in .png"),
    (["--shape", "tiny", "--draft-shape", "tiny", "--acceptance", "1", "--coupling", "maximal"],
     "--acceptance needs --coupling shared"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "expected"), BAD)
def test_bad_input_is_found_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: str
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(grid, "measure", lambda *given: made.append(given))
    result = bench(*arguments)
    assert expected in result.stderr
    assert (result.exit_code, result.stdout, made) == (2, "", [])
    assert "Traceback" not in result.stderr


def test_missing_hardware_ends_with_exit_code_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bass_cli.run.memory.free_memory", lambda device: 10_000)
    result = bench("--shape", "tiny", "--device", "cpu", *SMALL)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "0.0 GB are free; the weights take 0.0 GB; use a smaller model" in result.stderr


def test_a_target_that_cannot_be_split_is_found_before_anything_is_made() -> None:
    result = bench("--shape", "tiny", "--device", "cpu", "--tensor-parallel", "4", *SMALL)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "tiny has attention heads 6, which 4 does not divide" in result.stderr


@pytest.mark.slow
def test_two_processes_are_measured_with_half_of_the_target_each() -> None:
    """With a split target, greedy drafts of its first layers give plain decoding's tokens."""
    words = (
        "--shape",
        "tiny",
        "--depth",
        "1",
        "--scale",
        "0",
        "--device",
        "cpu",
        "--methods",
        "plain,3",
    )
    one, two = (
        json.loads(bench(*words, "--batch-sizes", "2", "--tensor-parallel", ranks, *SMALL).stdout)
        for ranks in ("1", "2")
    )
    assert two["settings"]["tensor_parallel"] == 2
    assert two["gate"]["rows_equal"] == two["gate"]["rows"] == 2
    assert all(cell["acceptance_rate"] == 1 for cell in two["cells"] if cell["method"] == "3")
    floors = [
        [cell["floor_ms_per_token"]["mean"] for cell in found["cells"]] for found in (one, two)
    ]
    bandwidths = [found["machine"]["bandwidth_bytes_per_second"] for found in (one, two)]
    for whole, half in zip(*floors, strict=True):
        assert 0.4 < half * bandwidths[1] / (whole * bandwidths[0]) < 0.6


def test_parts_of_random_weights_have_the_sum_of_a_whole_model() -> None:
    spec, device = spec_of("wide-310m", option="--shape", vocab=64), torch.device("cpu")
    for ranks in (1, 4):
        part, weights = random_part(
            spec, 0, None, Share(1 % ranks, ranks), dtype=torch.bfloat16, device=device
        )
        down = weights["layers.0.down.weight"]
        assert down.shape == (spec.width, spec.inner // ranks)
        assert part.inner * ranks == spec.inner
        assert down.float().std().item() == pytest.approx(spec.inner**-0.5, rel=0.01)


def test_schedules_of_attention_are_the_triton_kernels() -> None:
    assert ATTENTION == SCHEDULES
    result = bench("--shape", "tiny", "--device", "cpu", "--attention", "split", *SMALL)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "--attention split: only the Triton kernels" in result.stderr


def test_the_schedule_holds_for_the_bench_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr(ops, "kind_for", lambda tensor: "triton")
    monkeypatch.setattr(
        grid, "_measure", lambda wanted, plan, screen: [(wanted.attention, schedule())]
    )
    for name in SCHEDULES:
        wanted = settings(shape="tiny", methods="plain", attention=name)
        found += grid.measure(wanted, Screen(quiet=True))
    assert found == [(name, name) for name in SCHEDULES]
    assert schedule() == "ragged"


def test_charts_need_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(saving.importlib.util, "find_spec", lambda name: None)
    result = bench("--shape", "tiny", "--plot", str(tmp_path / "a.png"), *SMALL)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "pip install 'bass-cli[plot]'" in result.stderr


def test_charts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = bench(
        "--shape", "tiny", "--batch-sizes", "1,2", "--plot", str(tmp_path / "a.png"), *SMALL
    )
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [cell["batch"] for cell in report.by_method(json.loads(result.stdout))["plain"]] == [
        1,
        2,
    ]


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom bass_cli.cli.commands import app\ntry:\n    app(['bench', '--help'])\n"
        "except SystemExit as end:\n"
        "    print(end.code, sorted({'torch', 'rich', 'yaml', 'matplotlib', 'transformers'} & "
        "set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert "--acceptance" in found
    assert found.splitlines()[-1] == "0 []"


# A real pair


def test_a_real_pair_with_rivals(tmp_path: Path) -> None:
    for name, seed in (("target", 0), ("draft", 1)):
        write_checkpoint("llama", tmp_path / name, seed=seed)
        write_tokenizer(tmp_path / name)
    (tmp_path / "pair.yaml").write_text(
        f"target: {tmp_path}/target\ndraft: {tmp_path}/draft\nspeculation: {{max: 8}}\n"
    )
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": "the cat sat on"}\n{"prompt": "all of this was"}\n'
    )
    common = (
        "--pair",
        str(tmp_path / "pair.yaml"),
        "--device",
        "cpu",
        "--methods",
        "3",
        *SMALL[2:],
    )
    result = bench(
        *common,
        "--batch-sizes",
        "3",
        "--prompts",
        str(tmp_path / "p.jsonl"),
        "--rivals",
        "transformers,vllm",
    )
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["pair"]["kind"], document["pair"]["draft"]["layers"]) == ("a real pair", 3)
    assert (document["gate"]["rows"], document["gate"]["rows_equal"]) == (3, 3)
    assert [cell["method"] for cell in document["cells"]] == ["plain", "3", "transformers"]
    assert set(document["cells"][2]) == set(CELL)
    assert document["cells"][2]["ms_per_token"]["mean"] > 0
    assert "vllm is" in result.stderr
    built_in = json.loads(
        bench(*common, *SMALL[:2], "--batch-sizes", "2", "--coupling", "maximal").stdout
    )
    assert built_in["pair"]["coupling"] == "maximal"
    assert built_in["cells"][1]["mean_accepted"] > 0


def test_chat_and_editing_are_measured_apart_by_default(tmp_path: Path) -> None:
    write_checkpoint("qwen2", tmp_path / "model", shards=False, max_position_embeddings=2048)
    write_tokenizer(tmp_path / "model")
    given: dict[str, Any] = dict.fromkeys(("methods", "batch_sizes", "prompt_tokens", "repeats"))
    wanted = settings(
        model=str(tmp_path / "model"), draft="lookup", new_tokens=4, **given | {"repeats": "3"}
    )
    assert (wanted.texts, wanted.methods, wanted.batch_sizes) == (
        ("chat", "editing"),
        ("plain", "auto"),
        (4,),
    )
    [document] = grid.measure(wanted, Screen(quiet=True))
    found = {(cell["text"], cell["method"]): cell for cell in document["cells"]}
    assert set(found) == set(itertools.product(("chat", "editing"), ("plain", "auto")))
    for (_, method), cell in found.items():
        few = method == "plain" or document["repeats"]["done"] < 3
        assert (cell["speedup_interval"] is None) == few
    assert document["settings"]["texts"] == ["chat", "editing"]
    write_checkpoint("qwen2", tmp_path / "model", shards=False, max_position_embeddings=128)
    [short] = grid.measure(replace(wanted, new_tokens=4, prompt_tokens=20), Screen(quiet=True))
    assert {cell["text"] for cell in short["cells"]} == {None}, "too short for those texts"
    for other in ({"methods": "2"}, {"prompt_tokens": 20}, {"controllers": True}):
        assert settings(model="any", draft="lookup", **given | other).texts == ()
    assert settings(model="any", draft="none", **given).texts == ()


def test_editing_prompts_have_their_text_as_a_reference(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    reader = RequestReader(settings(shape="tiny", methods="plain").job, tokenizer, context=10_000)
    for number in range(8):
        text = texts._text(reader, "editing", number, chat=True)
        passage = tokenizer.decode(text.reference)
        assert passage.strip() == PASSAGES[number].strip()
        assert passage.strip() in tokenizer.decode(text.tokens)
        assert texts._text(reader, "chat", number, chat=True).reference == []
