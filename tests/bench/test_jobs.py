"""`bass bench --job`: whole jobs in new processes, beside another engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import (
    tokenizer_metadata,
    write_checkpoint,
    write_gguf,
    write_pair,
    write_tokenizer,
)
from command_line import cli
from transformers import StopStringCriteria

from bass_cli.bench import jobs
from bass_cli.bench.rivals import _to_end, stop_tokenizer
from bass_cli.errors import UserError
from bass_cli.formats.tokenizer import Tokenizer


@pytest.fixture
def place(here: Path) -> Path:
    """Make a folder with prompts and a pair of tiny models."""
    write_pair(here, prompts=1)
    (here / "p.jsonl").write_text('{"prompt": "the cat sat on"}\n{"prompt": "all"}\n')
    (here / "long.txt").write_text("the cat\n" + "the cat " * 999)
    chat = {"messages": [{"role": "user", "content": "a"}]}
    (here / "chat.jsonl").write_text(json.dumps(chat))
    return here


RIVALS = ("--rivals", "transformers")


def bench(*arguments: str, **settings):
    options = ("--pair", "pair.yaml", "--device", "cpu", "--threads", "1")
    return cli("bench", *options, *arguments, **settings)


@pytest.mark.slow
def test_a_job_runs_beside_a_rival(place: Path) -> None:
    law = ("--n", "3", "--max-new-tokens", "6", "--draft-length", "2", "--no-chat", "--stop", "zz")
    result = bench(
        "--job",
        "p.jsonl",
        *law,
        "--rivals",
        "transformers,vllm",
        "--repeats",
        "1",
        "--json",
        code=0,
    )
    assert "vllm is" in result.stderr
    document = json.loads(result.stdout)
    assert set(document["engines"]) == {"bass", "transformers"}
    for one in document["engines"].values():
        assert one["samples"] == 6
        assert 6 <= one["tokens"] <= 36
        assert 0 < one["generating_seconds"] < one["seconds"]["median"]
        assert 0 < one["starting_seconds"] < one["seconds"]["median"]
        assert one["tokens_per_second"] == pytest.approx(one["tokens"] / one["runs"][0])
        assert one["host_bytes"] > 1e8
        assert one["gpu_bytes"] is None
    assert document["job"]["prompts"] == 2
    assert document["job"]["command"][2:] == [
        "--pair=pair.yaml", "--device=cpu", "--threads=1", "--n=3", "--max-new-tokens=6",
        "--stop=zz", "--no-chat", "--draft-length=2",
    ]  # fmt: skip
    columns, rows = jobs.table(document)
    assert {len(row) for row in rows} == {len(columns)}
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    assert sum(widths) + 2 * (len(widths) - 1) <= 80


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--n", "4"), "--n: this option needs --job FILE"),
        (("--ray", "local"), "--ray: this option needs --job FILE"),
        (("--job", "p.jsonl", "--actors", "2"), "--actors needs --ray"),
        (("--job", "p.jsonl", "--ray", "local", "--coupling", "maximal"), "--coupling shared"),
        (("--job", "p.jsonl", "--methods", "4"), "--methods: a --job runs as bass generate"),
        (("--job", "p.txt", "--prompt-column", "x"), "--prompt-column: a text file has no"),
        (("--job", "none.jsonl"), "none.jsonl: there is no such prompt file"),
        (("--job", "-"), "--job (or BASS_JOB): standard input can be read only once"),
        (("--job", "p.jsonl", "--rivals", "vlm"), 'did you mean "vllm"'),
        (("--job", "p.jsonl", "--repeats", "0"), "--repeats (or BASS_REPEATS)"),
        (("--job", "p.jsonl", "--draft-length", "x"), "x"),
        (("--job", "p.jsonl", "--max-new-tokens", "999", *RIVALS), "p.jsonl:1: 2 prompts"),
        (("--job", "chat.jsonl", "--no-chat"), "chat.jsonl:1: the prompt has messages"),
        (("--job", "long.txt"), "--job: long.txt:2: the prompt has 1999 tokens"),
    ],
)
def test_mistakes_are_found_before_a_process_is_started(
    place: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], says: str
) -> None:
    monkeypatch.setattr(jobs, "_run", lambda *_: pytest.fail("a process was started"))
    assert says in bench(*arguments, code=2).stderr


def test_stop_texts_of_the_environment_become_options_of_the_job(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    def run(engine: str, command: list[str], cuda: bool) -> object:
        commands.append(command)
        raise UserError("enough")

    monkeypatch.setattr(jobs, "_run", run)
    monkeypatch.setenv("BASS_STOP", json.dumps(["\n", "a\\nb"]))
    bench("--job", "p.jsonl", code=2)
    assert [word for word in commands[0] if word.startswith("--stop")] == [
        "--stop=\n",
        "--stop=a\\\\nb",
    ]


def test_padding_is_not_counted_as_tokens() -> None:
    assert _to_end([5, 6, 2, 2, 2], {2}, 2) == [5, 6, 2]
    assert _to_end([5, 6, 0, 0], {2}, 0) == [5, 6]
    assert _to_end([5, 6, 7], {2}, 0) == [5, 6, 7]


@pytest.mark.parametrize("stored", ["folder", "file"])
def test_stop_strings_of_transformers_need_no_more_than_the_targets_tokenizer(
    tmp_path: Path, stored: str
) -> None:
    """A .gguf file has no tokenizer.json. The ids are those of bass."""
    path = tmp_path / "model"
    if stored == "folder":
        write_checkpoint("llama", path)
        write_tokenizer(path)
    else:
        write_tokenizer(tmp_path)
        path = tmp_path / "model.gguf"
        write_gguf("llama", path, metadata=tokenizer_metadata(tmp_path))
    found, ours = stop_tokenizer(path), Tokenizer.load(path)
    assert found.get_vocab() == {text: id_ for id_, text in ours.texts.items()}
    stops = StopStringCriteria(found, [" sat"])
    tokens = ours.encode_part("the cat sat")
    assert [bool(stops(torch.tensor([ids]), None)) for ids in (tokens[:-1], tokens)] == [
        False,
        True,
    ]
