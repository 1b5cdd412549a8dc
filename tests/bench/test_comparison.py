"""`bass bench --controllers`: controllers against fixed lengths, and acceptance by row."""

import json
import shlex
from typing import Any

import pytest
import torch
from benches import SET, bench, measured, settings

from bass_cli.bench import grid
from bass_cli.bench.document import compare
from bass_cli.bench.preparation import build_loops, build_models
from bass_cli.bench.runs import empty, fill
from bass_cli.bench.texts import prompts_for, rows_for
from bass_cli.errors import UserError
from bass_cli.io.console import Screen
from bass_cli.lengths.controllers import Fixed


def cell(batch: int, method: str, mean: float) -> dict[str, Any]:
    return {
        "batch": batch,
        "method": method,
        "ms_per_token": {"first": 0.0, "mean": mean, "last": 9.0},
    }


def test_controllers_are_compared_with_the_best_fixed_length_of_their_batch() -> None:
    cells = [
        cell(4, "plain", 4.0),
        cell(4, "2", 2.0),
        cell(4, "12", 3.0),
        cell(4, "auto", 2.1),
        cell(4, "bass+table", 1.9),
        cell(4, "vllm", 1.0),
        cell(1, "plain", 1.0),
        cell(1, "3", 1.5),
        cell(1, "table", 1.25),
    ]
    first, second = compare(cells)
    assert (first["batch"], first["best"], first["ms_per_token"]) == (1, 0, 1.0)
    assert first["loss"] == {"table": pytest.approx(0.25)}
    assert (second["best"], second["ms_per_token"]) == (2, 2.0)
    assert second["loss"] == {"auto": pytest.approx(0.05), "bass+table": pytest.approx(-0.05)}
    assert second["slower"]["auto"] == pytest.approx(2.1 / 4 - 1)


def test_all_are_measured_in_one_run_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    phases: list[str] = []
    monkeypatch.setattr(Screen, "phase", lambda screen, name, *, live=True: phases.append(name))
    arguments = (
        *shlex.split(
            "--shape tiny --draft-shape tiny --acceptance 0.9,0.2 --batch-sizes 2 "
            "--controllers --prompt-tokens 12 --new-tokens 4 --repeats 1 --device cpu"
        ),
    )
    result = bench(*arguments)
    assert result.exit_code == 0, result.stderr
    line = " ".join(result.stdout.split()).partition("batch 2: best fixed length")[2]
    for method in ("bass", "table", "bass+table", "auto"):
        assert f" {method} " in line
    assert "acceptance set to 0.9, 0.2, by row in turn" in result.stdout
    assert phases[:4] == [
        "making random weights",
        "checking that speculation equals plain decoding",
        "measuring what rounds cost",
        "batch 2: warming up",
    ]
    assert phases[4].startswith("batch 2, repeat 1 of 1: plain, about 0:")


def test_each_acceptance_gives_a_document_of_its_own() -> None:
    """The second document equals that of a bench with its acceptance alone."""
    small = (
        *shlex.split(
            "--shape tiny --draft-shape tiny --batch-sizes 4 --methods 3 --prompt-tokens 12 "
            "--new-tokens 12 --repeats 2 --device cpu --json"
        ),
    )
    both = bench(*small, "--acceptance", "1", "--acceptance", "0.6,0.2")
    assert both.exit_code == 0, both.stderr
    first, second = map(json.loads, both.stdout.splitlines())
    assert (first["pair"]["acceptance"], second["pair"]["acceptance"]) == (1.0, [0.6, 0.2])
    assert "acceptance set to 0.6, 0.2, by row in turn" in second["pair"]["label"]
    assert "acceptance set to 0.6, 0.2" in both.stderr
    alone = json.loads(bench(*small, "--acceptance", "0.6,0.2").stdout)
    keys = ("method", "rounds", "acceptance_rate", "acceptance_per_trial", "mean_accepted")
    found, expected = (
        [[cell[key] for key in keys] for cell in document["cells"]] for document in (second, alone)
    )
    assert found == expected
    assert (
        first["cells"][1]["acceptance_per_trial"]
        == 1.0
        > second["cells"][1]["acceptance_per_trial"]
    )
    refused = bench(*small, "--acceptance", "1", "--acceptance", "0", "--plot", "x.png")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "--plot FILE draws one bench" in refused.stderr


def test_the_lengths_of_all_controllers_have_their_cells() -> None:
    chosen = settings(**SET | {"acceptance": ["0.5"]}, controllers=True, methods="2,table,auto")
    [document] = grid.measure(chosen, Screen(quiet=True))
    assert [c["method"] for c in document["cells"]] == ["plain", "2", "table", "auto"]
    assert set(document["controllers"][0]["loss"]) == {"table", "auto"}
    [without] = grid.measure(settings(**SET, methods="2"), Screen(quiet=True))
    assert without["controllers"] == []


def test_the_methods_of_a_comparison() -> None:
    assert settings(**SET, controllers=True, methods=None).methods == (
        "plain",
        "1",
        "2",
        "3",
        "4",
        "5",
        "6",
        "8",
        "12",
        "bass",
        "table",
        "bass+table",
        "auto",
    )
    with pytest.raises(UserError, match="nothing to control"):
        settings(shape="tiny", controllers=True)
    for wrong in ("0.5,2", "x", ",", "-1"):
        with pytest.raises(UserError, match="from 0 to 1"):
            settings(**SET | {"acceptance": [wrong]})


def test_rows_take_rates_in_turn_and_keep_them_when_they_move() -> None:
    chosen = settings(**SET | {"acceptance": ["1,0"]}, batch_sizes="5")
    models = build_models(chosen, None)
    loop = build_loops(models, chosen, context=60).speculative
    assert loop is not None
    loop.use(Fixed(3))
    for _ in range(2):  # an empty batch begins anew
        rows = rows_for(prompts_for(chosen, None), 5, chosen)
        fill(loop, rows)
        assert loop.round().accepted == (3, 0, 3, 0, 3)
        loop.retire(1)
        assert loop.batch.live_rows[1] is rows[4]
        assert loop.round().accepted == (3, 3, 3, 0)
        empty(loop)


def test_a_mixture_of_rates_gives_fast_and_slow_rows() -> None:
    torch.manual_seed(0)
    found = measured(**SET | {"acceptance": ["1,0"]}, batch_sizes="4", methods="3", new_tokens=12)[
        "3"
    ]
    assert found["ms_per_token"]["first"] < 0.6 * found["ms_per_token"]["last"], (
        "half the rows end early"
    )
    assert found["rounds"] == 12


def test_simulated_acceptance_does_not_depend_on_the_draft_length() -> None:
    """All methods are compared on the same easy and hard tokens. Another seed changes them."""

    def fates(length: str, repeat: int) -> list[dict[int, bool]]:
        """Return by row, for each drafted position whose predecessors were accepted, whether it
        was."""
        chosen = settings(
            **SET | {"acceptance": ["0.7,0.5"]}, batch_sizes="3", new_tokens=40, methods=length
        )
        models = build_models(chosen, None)
        loop = build_loops(models, chosen, context=120).speculative
        assert loop is not None
        loop.use(Fixed(int(length)))
        rows = rows_for(prompts_for(chosen, None), 3, chosen, repeat=repeat)
        found: list[dict[int, bool]] = [{} for _ in rows]
        fill(loop, rows)
        while min(row.room for row in rows) > 5:
            begins = [len(row.tokens) for row in rows]
            for fate, begin, kept in zip(found, begins, loop.round().accepted, strict=True):
                fate.update({begin + i: i < kept for i in range(min(kept + 1, int(length)))})
        return found

    one, four, other = fates("1", 0), fates("4", 0), fates("4", 1)
    both = [
        (mine[place], theirs[place])
        for mine, theirs in zip(one, four, strict=True)
        for place in mine.keys() & theirs
    ]
    assert len(both) > 20
    assert all(a == b for a, b in both)
    assert any(
        a[place] != b[place] for a, b in zip(four, other, strict=True) for place in a.keys() & b
    )
    stood = [sum(fate.values()) / len(fate) for fate in four]
    assert 0.5 < stood[0] < 0.9
