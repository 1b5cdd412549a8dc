"""`bass generate --shard` and `bass merge` with models: the merged file equals an undisturbed run,
even if one part was killed and continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import cli
from test_end_to_end import samples, work_of

FLAGS = ("p.txt", "--pair", "pair.yaml", "--n", "2", "--max-new-tokens", "12", "--token-ids")


@pytest.fixture
def place(pair_folder: Any) -> Path:
    """Return the working directory of the test."""
    return pair_folder(prompts=9)


def bass(*arguments: str, code: int = 0) -> str:
    found = cli(*arguments, code=code)
    return " ".join(found.stderr.split())


def test_merged_shards_equal_an_undisturbed_run(place: Path) -> None:
    bass("generate", *FLAGS, "--out", "whole.jsonl")
    parts = [f"{number}.jsonl" for number in (1, 2, 3)]
    for number, batch in ((1, "1"), (2, "3"), (3, "auto")):
        shard = ("--shard", f"{number}/3", "--batch-size", batch)
        bass("generate", *FLAGS, *shard, "--out", parts[number - 1])
    killed = max((place / part for part in parts), key=lambda path: path.stat().st_size)
    content = killed.read_bytes()
    killed.write_bytes(content[: content.index(b"\n") + 30])  # a kill within the second line
    assert f"{killed.name}: leaving out 29 bytes of torn lines missing: " in bass(
        "merge", "all.jsonl", *parts, code=1
    )
    bass("generate", *FLAGS, "--shard", f"{killed.stem}/3", "--out", killed.name)
    bass("merge", "all.jsonl", *parts, "--overwrite")
    assert samples(place / "all.jsonl") == samples(place / "whole.jsonl")
    assert work_of(place / "all.jsonl") == work_of(place / "whole.jsonl")
    ids = [json.loads(line)["id"] for line in (place / "all.jsonl").read_text().splitlines()]
    assert ids == [str(number) for number in range(9) for _ in range(2)]
    # it goes on as what a single run wrote, complete or not
    assert "complete, 18 samples" in bass("generate", *FLAGS, "--out", "all.jsonl")
    bass("merge", "all.jsonl", killed.name, "--overwrite", code=1)
    assert "continuing" in bass("generate", *FLAGS, "--out", "all.jsonl")
    assert work_of(place / "all.jsonl") == work_of(place / "whole.jsonl")


def test_a_file_can_be_continued_with_its_own_shard_only(place: Path) -> None:
    bass("generate", *FLAGS, "--shard", "2/3", "--limit", "1", "--out", "o.jsonl")
    said = bass("generate", *FLAGS, "--shard", "1/3", "--limit", "1", "--out", "o.jsonl", code=2)
    assert 'shard: "2/3" before, "1/3" now' in said
    said = bass("generate", *FLAGS, "--limit", "1", "--out", "o.jsonl", code=2)
    assert 'shard: "2/3" before, not given now' in said


def test_bad_shards_are_refused_before_models_are_read(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "bass_cli.run.plan.make_plan", lambda *_, **__: pytest.fail("models were read")
    )
    for command in (("generate", *FLAGS), ("eval", "humaneval", "--pair", "pair.yaml")):
        for shard in ("9/8", "0/8", "some"):
            said = bass(*command, "--shard", shard, code=2)
            assert f'--shard (or BASS_SHARD): "{shard}" is not a part of a job' in said
    said = bass("generate", *FLAGS, "--shard", "1/2", "--coupling", "maximal", code=2)
    assert "give all shards the same --batch-size" in said


def test_merge_notes_that_maximal_coupling_samples_differ(place: Path) -> None:
    rows = ("--coupling", "maximal", "--batch-size", "2", "--max-new-tokens", "4")
    for number in (1, 2):
        shard = ("--shard", f"{number}/2", "--out", f"{number}.jsonl")
        bass("generate", *FLAGS[:3], *rows, *shard)
    said = bass("merge", "all.jsonl", "1.jsonl", "2.jsonl")
    assert "these have the distribution of a single run, but are not equal to it" in said


def test_an_evaluation_in_shards(pair_folder: Any) -> None:
    place = pair_folder(prompts=1, max_position_embeddings=1024)
    flags = ("--pair", "pair.yaml", "--limit", "6", "--n", "1", "--max-new-tokens", "4")
    for number in (1, 2):
        bass("eval", "humaneval", *flags, "--shard", f"{number}/2")
    names = [f"humaneval-pair-chat-t0.2-n1-s0-max4-first6-{number}of2.jsonl" for number in (1, 2)]
    bass("merge", "all.jsonl", *names)
    bass("eval", "humaneval", *flags, "--out", "whole.jsonl")
    assert work_of(place / "all.jsonl") == work_of(place / "whole.jsonl")
    assert len(work_of(place / "all.jsonl")) == 6
    said = bass("eval", "humaneval", *flags, "--out", "all.jsonl")
    assert "complete, 6 samples" in said
