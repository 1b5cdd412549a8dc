"""`bass generate --best-of K`: which samples are kept, resuming after a kill, layouts and shards.

The reference is the file of the same command without `--best-of`, of which the test chooses the
best samples itself.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from command_line import cli, rows_in


@pytest.fixture
def place(model: Path, here: Path) -> Path:
    rows: list[dict[str, Any]] = [
        {"id": "a", "prompt": "the cat"},
        {"id": "b", "prompt": "a dog", "n": 2},
        {"id": "c", "token_ids": [5, 6, 7], "n": 6},
        {"id": "d", "token_ids": [10**6]},
    ]
    Path("p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return model


def bass(model: Path, out: str, *more: str, code: int = 1) -> str:
    """Run the command; exit code 1, because prompt d cannot be run. Returns its messages."""
    words = ["generate", "p.jsonl", "--model", str(model), "--draft", "none", "--device", "cpu"]
    words += ["--n", "4", "--max-new-tokens", "5", "--out", out, *more]
    done = cli(*words, code=code)
    return " ".join(done.stderr.split())


def kept(rows: list[Any]) -> dict[tuple[str, int], tuple[str, int | None]]:
    return {(row["id"], row["sample"]): (row["text"], row.get("rank")) for row in rows}


def expected(model: Path, best: int, key: Any) -> dict[tuple[str, int], tuple[str, int | None]]:
    """Choose the best samples of a file with all samples."""
    bass(model, "all.jsonl", "--overwrite")
    found: dict[tuple[str, int], tuple[str, int | None]] = {("d", 0): ("", None)}
    rows = [row for row in rows_in("all.jsonl") if row["id"] != "d"]
    for id_ in "abc":
        of_prompt = [row for row in rows if row["id"] == id_]
        ordered = sorted(of_prompt, key=lambda row: (*key(row, of_prompt), row["sample"]))
        for rank, row in enumerate(ordered[:best], 1):
            found[id_, row["sample"]] = row["text"], rank
    return found


def by_logprob(row: Any, others: list[Any]) -> tuple[float]:
    return (-row["mean_logprob"],)


def by_votes(row: Any, others: list[Any]) -> tuple[float, float]:
    """The tiny model's texts are words, so equal texts are equal answers."""
    texts = Counter(" ".join(other["text"].casefold().split()) for other in others)
    return -texts[" ".join(row["text"].casefold().split())], -row["mean_logprob"]


@pytest.mark.parametrize(("ranker", "key"), [("logprob", by_logprob), ("majority", by_votes)])
def test_the_best_samples_are_kept_with_their_ranks(place: Path, ranker: str, key: Any) -> None:
    said = bass(place, "o.jsonl", "--best-of", "2", "--rank-by", ranker)
    assert kept(rows_in("o.jsonl")) == expected(place, 2, key)
    totals = json.loads(Path("o.jsonl.manifest.json").read_text())["totals"]
    assert (totals["samples"], totals["dropped"]) == (7, 2 + 0 + 4)
    assert f"6 samples were dropped; the 2 best samples of each prompt by {ranker} are kept" in said
    assert "13 samples (1 error, 12 length), 7 of them kept in o.jsonl" in said
    scores = {row["sample"]: row["scores"] for row in rows_in("o.jsonl") if row["id"] == "a"}
    assert all(set(one) == {ranker} for one in scores.values())


@pytest.mark.parametrize("options", [(), ("--group",)])
def test_a_killed_run_goes_on_to_the_same_samples(place: Path, options: tuple[str, ...]) -> None:
    bass(place, "whole.jsonl", "--best-of", "2", *options)
    lines = Path("whole.jsonl").read_bytes().splitlines(keepends=True)
    manifest = Path("whole.jsonl.manifest.json").read_bytes()
    for content in (lines[0] + lines[1][:40], b"".join(lines[:3])):
        Path("cut.jsonl").write_bytes(content)
        Path("cut.jsonl.manifest.json").write_bytes(manifest)
        bass(place, "cut.jsonl", "--best-of", "2", "--batch-size", "3", *options)
        ids = [row["id"] for row in rows_in("cut.jsonl")]
        assert sorted(ids) == sorted(row["id"] for row in rows_in("whole.jsonl"))
        if not options:
            assert kept(rows_in("cut.jsonl")) == kept(rows_in("whole.jsonl"))
        totals = json.loads(Path("cut.jsonl.manifest.json").read_text())["totals"]
        assert totals["dropped"] == 6
    before = Path("cut.jsonl").read_bytes()
    assert "continuing, 12 samples are done already" in bass(
        place, "cut.jsonl", "--best-of", "2", *options
    )  # prompt d is tried again
    assert sorted(Path("cut.jsonl").read_bytes().splitlines()) == sorted(before.splitlines())


def test_a_run_whose_samples_differ_a_little_keeps_no_more_than_the_best(place: Path) -> None:
    """On a GPU, a sample that is drawn again in another batch may differ and get another rank."""
    bass(place, "all.jsonl")
    bass(place, "o.jsonl", "--best-of", "2")
    best = {row["sample"] for row in rows_in("o.jsonl") if row["id"] == "a"}
    other = next(
        row for row in rows_in("all.jsonl") if row["id"] == "a" and row["sample"] not in best
    )
    Path("o.jsonl").write_text(json.dumps(other) + "\n")  # as if it had been among the best
    bass(place, "o.jsonl", "--best-of", "2")
    found = {row["sample"]: row.get("rank") for row in rows_in("o.jsonl") if row["id"] == "a"}
    assert len(found) == 2
    assert other["sample"] in found
    assert 1 in found.values()


def test_ranked_file_equals_a_drawn_one(place: Path) -> None:
    """`bass rank --best` makes the file that `bass generate --best-of` continues."""
    bass(place, "all.jsonl")
    cli("rank", "all.jsonl", "--best", "2", code=0)
    bass(place, "o.jsonl", "--best-of", "2")
    assert kept(rows_in("all.jsonl")) == kept(rows_in("o.jsonl"))
    assert "12 samples are done already" in bass(place, "all.jsonl", "--best-of", "2")


def test_groups_and_columns_hold_the_best(place: Path) -> None:
    bass(place, "g.parquet", "--group", "--best-of", "1", "--columns", "id,text,rank")
    rows = {row["id"]: row["samples"] for row in rows_in("g.parquet")}
    best = expected(place, 1, by_logprob)
    assert {id_: [one["text"] for one in rows[id_]] for id_ in "abc"} == {
        id_: [text] for (id_, _), (text, rank) in best.items() if rank == 1
    }
    assert [list(one) for one in rows["a"]] == [["text", "rank"]]


def test_shards_of_the_best_are_merged(place: Path) -> None:
    for number in (1, 2):
        words = ["--best-of", "2", "--shard", f"{number}/2"]
        cli("generate", "p.jsonl", "--model", str(place), "--draft", "none", "--device", "cpu",
            "--n", "4", "--max-new-tokens", "5", "--out", f"{number}.jsonl", *words)  # fmt: skip
    assert "missing" not in cli("merge", "m.jsonl", "1.jsonl", "2.jsonl", code=1).stderr
    bass(place, "o.jsonl", "--best-of", "2")
    assert kept(rows_in("m.jsonl")) == kept(rows_in("o.jsonl"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--best-of", "5"], "--best-of 5: a number from 1 to --n 4 is needed"),
        (["--best-of", "0"], "a number from 1 to --n 4"),
        (["--rank-by", "static"], "--rank-by needs --best-of K"),
        (["--best-of", "1", "--rank-by", "reverse"], "bass rank FILE --by reverse --best 1"),
        (["--best-of", "1", "--rank-by", "statik"], 'did you mean "static"'),
        (["--best-of", "1", "--rank-by", "static,logprob"], "name one ranker"),
        (["--columns", "id,rank"], 'no line has "rank" without --best-of'),
    ],
)
def test_wrong_options_are_refused(place: Path, options: list[str], said: str) -> None:
    assert said in bass(place, "o.jsonl", *options, code=2)
    assert not Path("o.jsonl").exists()


def test_n_and_k_cannot_change(place: Path) -> None:
    bass(place, "o.jsonl", "--best-of", "2")
    assert "best_of: 2 before, 1 now" in bass(place, "o.jsonl", "--best-of", "1", code=2)
    assert "best_of: 2 before, not given now" in bass(place, "o.jsonl", code=2)
    said = bass(place, "o.jsonl", "--best-of", "2", "--n", "6", code=2)
    assert "n: 4 before, 6 now; with --best-of other samples may be the best" in said
