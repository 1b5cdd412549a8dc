"""`bass generate` from the command line to the file, with tiny checkpoints in the real formats."""

from __future__ import annotations

import json
import shlex
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoints import edit_json, tokenizer_metadata, write_checkpoint, write_gguf
from command_line import cli, rows_in
from forked import BASS, Forked
from test_tokenizer import edited

FLAGS = shlex.split("--pair pair.yaml --n 3 --max-new-tokens 40 --token-ids --device cpu")


@pytest.fixture
def place(pair_folder: Any) -> Path:
    """Return the working directory of the test."""
    return pair_folder(prompts=14)


def bass(*arguments: str, **settings: Any) -> Any:
    return cli("generate", *arguments, **settings)


def samples(path: Path) -> dict[tuple[str, int], tuple[Any, ...]]:
    """Return the reproducible fields of samples, by (id, sample)."""
    rows = rows_in(path)
    found = {
        (row["id"], row["sample"]): (
            row["text"],
            row["finish_reason"],
            row["token_ids"],
            row["seed"],
        )
        for row in rows
    }
    assert len(found) == len(rows)
    return found


def test_output_does_not_depend_on_draft_batch_or_order(place: Path) -> None:
    runs = {
        "model": (),
        "plain": ("--draft", "none", "--draft-length", "auto"),
        "lookup": ("--draft", "lookup"),
        "own": ("--draft", "lookup:own,prompt"),
        "skip": ("--draft", "skip:1", "--batch-size", "2"),
        "bass": ("--draft-length", "bass", "--batch-size", "5"),
    }
    few = ("--limit", "6", "--max-new-tokens", "24")
    for name, flags in runs.items():
        bass("p.txt", *FLAGS, *few, *flags, "--out", f"{name}.jsonl", code=0)
    due = samples(place / "plain.jsonl")
    assert len(due) == 18
    assert len({tuple(ids) for _, _, ids, _ in due.values()}) > 12
    for name in runs:
        assert samples(place / f"{name}.jsonl") == due, name
    rows = rows_in(place / "model.jsonl")
    assert sum(row["drafted"] for row in rows) > 0
    by_place = json.loads((place / "model.jsonl.manifest.json").read_text())["last_run"]["by_place"]
    assert sum(by_place["drafted"]) == sum(row["drafted"] for row in rows)
    # lines leave out accepted tokens after a sample's end
    assert (
        sum(row["accepted"] for row in rows)
        <= sum(by_place["accepted"])
        <= sum(by_place["drafted"])
    )


def test_maximal_coupling_refuses_to_resume_with_a_changed_draft(place: Path) -> None:
    """There the samples depend on its drafts; under shared coupling they do not, and the run
    goes on."""
    flags = (*FLAGS, "--limit", "2", "--coupling")
    for coupling in ("shared", "maximal"):
        bass("p.txt", *flags, coupling, "--n", "1", "--out", f"{coupling}.jsonl", code=0)
    write_checkpoint("llama", place / "draft", seed=2, shards=False)
    refused = bass("p.txt", *flags, "maximal", "--out", "maximal.jsonl", code=2)
    assert "\n  draft_files: " in refused.stderr
    bass("p.txt", *flags, "shared", "--out", "shared.jsonl", code=0)


def test_at_temperature_0_one_sample_is_drawn_and_copied(place: Path) -> None:
    flags = (*FLAGS, "--temperature", "0", "--limit", "3")
    whole = bass("p.txt", *flags, "--out", "whole.jsonl", code=0)
    assert (
        "temperature 0: the 3 samples of a prompt are equal, so one is drawn and copied"
        in whole.stderr
    )
    rows = rows_in(place / "whole.jsonl")
    assert sorted((int(row["id"]), row["sample"]) for row in rows) == [
        (i, s) for i in range(3) for s in range(3)
    ]
    drawn = {row["id"]: row for row in rows if row["sample"] == 0}
    for row in rows:
        if row["sample"]:
            work = {"sample": row["sample"], "rounds": 0, "drafted": 0, "accepted": 0, "copy_of": 0}
            assert row == {**drawn[row["id"]], **work}
    assert all("copy_of" not in row and row["rounds"] > 0 for row in drawn.values())
    alone = bass("p.txt", *flags, "--n", "1", "--out", "alone.jsonl")
    assert "drawn and copied" not in alone.stderr
    firsts = {key: value for key, value in samples(place / "whole.jsonl").items() if key[1] == 0}
    assert samples(place / "alone.jsonl") == firsts
    totals = json.loads((place / "whole.jsonl.manifest.json").read_text())["totals"]
    assert (totals["samples"], totals["tokens"]) == (
        9,
        sum(row["tokens"] for row in drawn.values()),
    )
    for kept in (4, 8):  # cut anywhere, also between a sample and its copies
        (place / "cut.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:kept]))
        (place / "cut.jsonl.manifest.json").write_text(
            (place / "whole.jsonl.manifest.json").read_text()
        )
        bass("p.txt", *flags, "--out", "cut.jsonl", code=0)
        assert work_of(place / "cut.jsonl") == work_of(place / "whole.jsonl")
        again = json.loads((place / "cut.jsonl.manifest.json").read_text())["totals"]
        assert again | {"seconds": 0} == totals | {"seconds": 0}
    bass("p.txt", *flags, "--n", "3", "--out", "alone.jsonl", code=0)  # n grows
    assert work_of(place / "alone.jsonl") == work_of(place / "whole.jsonl")


def work_of(path: Path) -> list[dict[str, Any]]:
    """All that a file says but times and what depends on which rows share a batch: figures of
    drafts, last digits."""
    left_out = ("seconds", "rounds", "drafted", "accepted", "mean_logprob", "sum_logprob")
    rows = rows_in(path)
    return sorted(
        ({key: value for key, value in row.items() if key not in left_out} for row in rows),
        key=lambda row: (row["id"], row["sample"]),
    )


def test_resume_after_kill_equals_undisturbed_run(place: Path) -> None:
    few = (*FLAGS, "--limit", "8")
    bass("p.txt", *few, "--out", "whole.jsonl", code=0)
    flags = (*few, "--batch-size", "4", "--out", "o.jsonl")
    process = Forked(BASS, "generate", "p.txt", *flags, cwd=place)
    output, deadline = place / "o.jsonl", time.monotonic() + 120
    while not (output.exists() and output.read_bytes().count(b"\n") >= 3):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    kept = output.read_bytes()
    assert 3 <= kept.count(b"\n") < 24
    bass("p.txt", *few, "--out", "o.jsonl", code=0)
    assert output.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    assert samples(output) == samples(place / "whole.jsonl")


def test_a_prompt_longer_than_the_context_fails_alone(place: Path) -> None:
    (place / "p.txt").write_text("the cat\na dog\n" + "the cat " * 400 + "\n")
    bass("p.txt", *FLAGS, "--out", "o.jsonl", code=1)
    rows = rows_in(place / "o.jsonl")
    failed = [row for row in rows if row["finish_reason"] == "error"]
    assert [row["id"] for row in failed] == ["2"]
    assert "tokens, and the model's context is 256" in failed[0]["error"]
    assert len(rows) == 7


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def _other_vocabulary(place: Path) -> None:
    edited(place / "draft", rename={"Ġcat": "Ġdog"})


def _cut_target(place: Path) -> None:
    _cut(next((place / "target").glob("*.safetensors")))


def _cut_gguf(place: Path) -> None:
    metadata = tokenizer_metadata(place / "target")
    write_gguf("llama", place / "target.gguf", metadata=metadata)
    _cut(place / "target.gguf")
    (place / "pair.yaml").write_text("target: target.gguf\ndraft: lookup\n")


def _no_draft(place: Path) -> None:
    (place / "pair.yaml").write_text("target: target\ndraft: nowhere.gguf\n")


def _refused_family(place: Path, name: str = "bloom") -> None:
    edit_json(place / "target" / "config.json", model_type=name)


def _unknown_family(place: Path) -> None:
    _refused_family(place, "lama")


@pytest.mark.parametrize(("spoil", "says"), [
    (_other_vocabulary, "is 'Ġcat' in"), (_cut_target, "safetensors"), (_cut_gguf, "target.gguf"),
    (_no_draft, "nowhere.gguf"), (_refused_family, "models.md lists the architectures that run"),
    (_unknown_family, "llama"),
])  # fmt: skip
def test_wrong_models_are_refused_before_any_weights_are_read(
    place: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any, says: str
) -> None:
    spoil(place)
    import bass_cli.run.build

    monkeypatch.setattr(
        bass_cli.run.build, "load", lambda *a, **k: pytest.fail("weights were read")
    )
    assert says in " ".join(bass("p.txt", *FLAGS, "--out", "o.jsonl", code=2).stderr.split())
    assert not (place / "o.jsonl").exists()
