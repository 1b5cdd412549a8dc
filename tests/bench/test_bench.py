"""`bass bench` with tiny models on a CPU: prompts, acceptance, refusals, charts and real pairs."""

from __future__ import annotations

import itertools
import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benches import SCALED, SET, SMALL, bench, measured, settings
from checkpoints import write_checkpoint, write_tokenizer
from test_document import CELL

import bass_kernels as ops
from bass_cli.bench import grid, preparation, report, runs, texts
from bass_cli.bench.preparation import build_loops, build_models
from bass_cli.bench.runs import _for_all_rows, decode, fill, measure_parts
from bass_cli.bench.settings import ATTENTION
from bass_cli.bench.shapes import SHAPES, random_part, random_weights, spec_of
from bass_cli.bench.texts import lengths_of, prompts_for, rows_for
from bass_cli.engine.contracts import Proposal
from bass_cli.errors import UserError
from bass_cli.formats.tokenizer import Tokenizer
from bass_cli.io import saving
from bass_cli.io.console import Screen
from bass_cli.lengths.controllers import Fixed
from bass_cli.models.decoder import Decoder
from bass_cli.models.partition import Share
from bass_cli.run.build import Models
from bass_cli.run.profile import PASSAGES
from bass_cli.run.tasks import TaskBuilder
from bass_kernels.dispatch import SCHEDULES, schedule

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
    words = shlex.split("--shape tiny --depth 1 --scale 0 --device cpu --methods plain,3")
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
        *shlex.split("--device cpu --methods 3"),
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
    assert "Loading weights" not in result.stderr  # a progress bar of transformers
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
    reader = TaskBuilder(settings(shape="tiny", methods="plain").job, tokenizer, context=10_000)
    for number in range(8):
        text = texts._text(reader, "editing", number, chat=True)
        passage = tokenizer.decode(text.reference)
        assert passage.strip() == PASSAGES[number].strip()
        assert passage.strip() in tokenizer.decode(text.tokens)
        assert texts._text(reader, "chat", number, chat=True).reference == []
