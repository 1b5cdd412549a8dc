"""Test `echo`, `columns` and `group`: lines, other formats, resuming, shards and scores.

The reference is the file of the same command without these options.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas
import pyarrow.parquet
import pytest
from checkpoints import edit_json, write_checkpoint, write_tokenizer
from command_line import cli, rows_in

from bass_cli import Job, Pair, Sampling, generate

TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint("llama", folder, shards=False)
    write_tokenizer(folder)
    edit_json(folder / "tokenizer_config.json", chat_template=TEMPLATE)
    return folder


@pytest.fixture
def place(model: Path, here: Path) -> Path:
    rows: list[dict[str, Any]] = [
        {"id": "a", "prompt": "the cat", "level": 1},
        {"id": "b", "messages": [{"role": "user", "content": "a dog"}], "n": 2},
        {"id": "c", "token_ids": [5, 6, 7]},
        {"id": "d", "token_ids": [10**6]},
    ]
    Path("p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return model


def run(model: Path, out: str, *more: str, code: int = 1) -> list[Any]:
    """Run the command; exit code 1, because one prompt cannot be run."""
    words = ["generate", "p.jsonl", "--model", str(model), "--draft", "none", "--device", "cpu"]
    words += ["--n", "3", "--max-new-tokens", "6", "--out", out, *more]
    cli(*words, code=code)
    return rows_in(out)


def untimed(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ("seconds", "rounds")}


def by_key(rows: list[Any]) -> dict[tuple[str, int], Any]:
    return {(row["id"], row["sample"]): untimed(row) for row in rows}


def texts(rows: list[Any]) -> list[Any]:
    """What does not depend on the rounding of other batch sizes."""
    return sorted((row["id"], row["sample"], row["text"], row["tokens"]) for row in rows)


def flat(rows: list[Any]) -> list[Any]:
    """Undo `group`."""
    found = []
    for row in rows:
        shared = {key: value for key, value in row.items() if key != "samples"}
        found += [{**shared, **sample} for sample in row["samples"]]
    return found


def test_echo_adds_the_prompt_and_the_rendered_messages(place: Path) -> None:
    plain, echoed = by_key(run(place, "o.jsonl")), by_key(run(place, "e.jsonl", "--echo"))
    added = {
        "a": {"prompt": "the cat"},
        "b": {"messages": [{"role": "user", "content": "a dog"}]},
        "c": {"prompt_token_ids": [5, 6, 7]},
        "d": {"prompt_token_ids": [10**6]},
    }
    assert len(plain) == 3 + 2 + 3 + 1
    assert {key: row | added[key[0]] for key, row in plain.items()} == echoed
    system = by_key(run(place, "s.jsonl", "--echo", "--chat", "--system", "be brief"))
    roles = [message["role"] for message in system["a", 0]["messages"]]
    assert (system["a", 0]["prompt"], roles) == ("the cat", ["system", "user"])
    job = Job(
        pair=Pair(name="t", target=str(place), draft="none"),
        n=1,
        device="cpu",
        echo=True,
        sampling=Sampling(max_new_tokens=2),
    )
    (sample,) = generate(["the cat"], job)
    assert (sample.prompt, sample.messages) == ("the cat", None)


def test_columns_choose_the_keys_and_their_order(place: Path) -> None:
    plain = by_key(run(place, "o.jsonl", "--token-ids", "--echo"))
    columns = ("text", "token_ids", "prompt", "id")
    rows = run(place, "c.jsonl", "--token-ids", "--echo", "--columns", ", ".join(columns))
    assert len(rows) == len(plain)
    for row in rows:
        whole = plain[row["id"], row["sample"]]
        due = [key for key in (*columns, "sample", "error") if key in whole]
        assert list(row) == due
        assert row == {key: whole[key] for key in due}
    before = Path("c.jsonl").read_bytes()
    run(place, "c.jsonl", "--token-ids", "--echo", "--columns", ",".join(columns))  # tries d again
    assert sorted(Path("c.jsonl").read_bytes().splitlines()) == sorted(before.splitlines())
    frame = pandas.DataFrame(run(place, "c.parquet", "--columns", "id,text"))
    assert pyarrow.parquet.read_table("c.parquet").column_names == ["id", "text", "sample", "error"]
    found = zip(frame["id"], frame["sample"], frame["text"], strict=True)
    assert all(plain[id_, sample]["text"] == text for id_, sample, text in found)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--columns", "id,txt"], '"txt" is not a key of a line; did you mean "text"?'),
        (["--columns", "id,"], '"" is not a key of a line'),
        (["--columns", "id,id"], '"id" is given twice'),
        (["--columns", "token_ids"], 'no line has "token_ids" without --token-ids'),
        (["--columns", "messages"], 'no line has "messages" without --echo'),
        (["--columns", "top_logprobs", "--logprobs", "0"], 'no line has "top_logprobs" without --logprobs'),
        (["--columns", "task_id"], '"task_id" is not a key of a line'),
    ],
)  # fmt: skip
def test_invalid_columns_are_refused_before_a_model_is_read(
    place: Path, flags: list[str], reason: str
) -> None:
    done = cli("generate", "p.jsonl", "--model", "none/such", *flags)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"--columns (or BASS_COLUMNS): {reason}" in done.stderr


@pytest.mark.parametrize("name", ["g.jsonl.zst", "g.parquet"])
def test_group_writes_one_line_a_prompt_with_all_its_samples(place: Path, name: str) -> None:
    options = ("--token-ids", "--echo", "--logprobs", "2")
    plain, rows = by_key(run(place, "o.jsonl", *options)), run(place, name, "--group", *options)
    assert [row["id"] for row in rows if row["samples"]] != []
    assert {row["id"]: len(row["samples"]) for row in rows} == {"a": 3, "b": 2, "c": 3, "d": 0}
    assert all(next(iter(row)) == "id" for row in rows)
    failed = next(row for row in rows if row["id"] == "d")
    assert failed["error"] == plain["d", 0]["error"]
    del plain["d", 0]
    assert by_key(flat(rows)) == plain
    totals = json.loads(Path(f"{name}.manifest.json").read_text())["totals"]
    assert (totals["samples"], totals["finish_reasons"]["error"]) == (9, 1)
    tokens = sum(row["tokens"] for row in plain.values())
    assert totals["tokens"] == tokens


def test_a_killed_group_goes_on_and_n_cannot_grow(place: Path) -> None:
    whole = run(place, "whole.jsonl", "--group", "--batch-size", "2")
    lines = Path("whole.jsonl").read_bytes().splitlines(keepends=True)
    manifest = Path("whole.jsonl.manifest.json").read_bytes()
    for content in (lines[0] + lines[1][:50], lines[0], b""):
        Path("cut.jsonl").write_bytes(content)
        Path("cut.jsonl.manifest.json").write_bytes(manifest)
        found = run(place, "cut.jsonl", "--group", "--batch-size", "4")
        assert {row["id"] for row in found} == set("abcd")
        assert texts(flat(found)) == texts(flat(whole))
    words = ["generate", "p.jsonl", "--model", str(place), "--draft", "none", "--device", "cpu"]
    words += ["--n", "4", "--max-new-tokens", "6", "--out", "cut.jsonl", "--group"]
    done = cli(*words, code=2)
    assert "n: 3 before, 4 now; with --group a line has all its samples" in done.stderr


def test_columns_of_a_group_are_chosen_on_both_levels(place: Path) -> None:
    rows = run(place, "g.jsonl", "--group", "--columns", "id,text,meta,finish_reason")
    first = next(row for row in rows if row["samples"])
    assert list(first) == ["id", "samples", "meta"]
    assert list(first["samples"][0]) == ["text", "finish_reason"]
    before = Path("g.jsonl").read_bytes()
    run(place, "g.jsonl", "--group", "--columns", "id,text,meta,finish_reason")
    assert sorted(before.splitlines()) == sorted(Path("g.jsonl").read_bytes().splitlines())


def test_shards_of_groups_and_columns_are_merged(place: Path) -> None:
    for options in (("--group",), ("--columns", "text")):
        whole = run(place, "whole.jsonl", *options, "--overwrite")
        parts = [f"{number}.jsonl.gz" for number in (1, 2)]
        for number, part in enumerate(parts, 1):
            words = ["generate", "p.jsonl", "--model", str(place), "--draft", "none", "--n", "3"]
            words += ["--max-new-tokens", "6", "--device", "cpu", "--shard", f"{number}/2"]
            cli(*words, "--out", part, *options, "--overwrite")
        done = cli("merge", "m.parquet", *parts, "--overwrite", code=1)
        assert not re.search("missing|Traceback", done.stderr), done.stderr
        merged = rows_in("m.parquet")
        if options == ("--group",):
            whole, merged = flat(whole), flat(merged)
        assert by_key(merged) == by_key(whole)
