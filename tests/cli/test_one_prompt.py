"""A prompt that cannot be run gives one error line; the job and its resume go on."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import cli, rows_in
from safetensors.torch import load_file, save_file

from bass_cli.engine.loop import Loop
from bass_cli.io.prompts import read_prompts

FLAGS = (
    *shlex.split(
        "--pair pair.yaml --device cpu --n 3 --max-new-tokens 8 --token-ids --out o.jsonl"
    ),
)
SPOILT = "Z"  # a letter that no prompt has, but those that are to fail


@pytest.fixture
def place(pair_folder: Any) -> Path:
    """Return the working directory of the test."""
    return pair_folder(prompts=1)


def bass(*arguments: str, **settings: Any) -> Any:
    return cli("generate", *arguments, **settings)


def rows() -> list[dict[str, Any]]:
    return rows_in("o.jsonl")


def nested(depth: int, *, opening: str, closing: str) -> str:
    return opening * depth + "1" + closing * depth


def test_invalid_text_and_too_deep_fields_fail_only_their_prompt(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists, objects = (nested(500, opening=o, closing=c) for o, c in ("[]", ('{"a": ', "}")))
    bad = {
        "half": (
            '"prompt": "the cat \\ud800 sat and this is the longest of all prompts"',
            "character 9",
        ),
        "chat": (
            '"messages": [{"role": "user", "content": "\\udc00"}]',
            "half of a surrogate pair",
        ),
        "copied": ('"prompt": "the cat", "reference": "\\ud800"', "half of a surrogate pair"),
        "lists": (
            f'"prompt": "the mat", "k": 1, "far": {lists}',
            'p.jsonl:6: field "far": it is nested more than 100',
        ),
        "objects": (f'"prompt": "the mat", "far": {objects}', "nested more than 100 levels deep"),
        "\\ud800": ('"prompt": "the cat"', 'p.jsonl:8: field "id"'),
    }
    good = {
        "first": '"prompt": "the cat"',
        "kept": f'"prompt": "on", "deep": {nested(100, opening="[", closing="]")}',
        "last": '"messages": [{"role": "user", "content": "sat"}], "half": "\\ud800"',
    }
    texts = (
        {"first": good["first"], "0": '"prompt": "a"'}
        | {key: text for key, (text, _) in bad.items()}
        | good
    )
    Path("p.jsonl").write_text(
        "".join(f'{{"id": "{key}", {text}}}\n' for key, text in texts.items())
    )
    assert "6 prompts could not be run" in bass("p.jsonl", *FLAGS, code=1).stderr
    failed = {row["id"]: row for row in rows() if row["finish_reason"] == "error"}
    assert {
        key: reason in failed[json.loads(f'"{key}"')]["error"] for key, (_, reason) in bad.items()
    } == dict.fromkeys(bad, True)
    assert failed["lists"]["meta"] == {"k": 1}
    drawn = [row for row in rows() if row["finish_reason"] != "error"]
    due = [(key, sample) for key in ("0", *sorted(good)) for sample in range(3)]
    assert sorted((row["id"], row["sample"]) for row in drawn) == due
    assert {row["meta"].get("half") for row in drawn if row["id"] == "last"} == {"\ud800"}

    kept = [
        line
        for line in Path("o.jsonl").read_bytes().splitlines(keepends=True)
        if b'"error"' not in line
    ]
    kept.pop(next(i for i, line in enumerate(kept) if b'"id": "kept"' in line))
    Path("o.jsonl").write_bytes(b"".join(kept))
    opened, open_ = [], Loop.open
    monkeypatch.setattr(
        Loop, "open", lambda self, key, *a, **k: opened.append(key) or open_(self, key, *a, **k)
    )
    again = bass("p.jsonl", *FLAGS)
    assert (again.exit_code, opened) == (1, ["kept"])
    assert Path("o.jsonl").read_bytes().startswith(b"".join(kept))
    assert sorted(map(str, untimed(rows()))) == sorted(
        map(str, untimed([*drawn, *failed.values()]))
    )


def untimed(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines without what the clock, or how many rows there were beside it, has a say in."""
    return [
        {
            key: value
            for key, value in row.items()
            if key not in ("seconds", "rounds", "drafted", "accepted")
            and not key.endswith("logprob")
        }
        for row in found
    ]


def test_the_depth_limit_of_fields_does_not_depend_on_the_stack(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    deep = [
        nested(depth, opening=o, closing=c)
        for depth in (100, 101)
        for o, c in ("[]", ('{"a": ', "}"))
    ]
    deep += ["[" * depth + "]" * depth for depth in (100, 101)]
    path.write_text("".join(f'{{"prompt": "a", "x": {text}}}\n' for text in deep))
    assert [prompt.fault is None for prompt in read_prompts(str(path))] == [
        True,
        True,
        False,
        False,
        True,
        False,
    ]


def spoil(model: str, token: int | None) -> None:
    """Write NaN over the embedding of a token, or of all."""
    file = next(Path(model).glob("*.safetensors"))
    weights = {name: tensor.clone() for name, tensor in load_file(file).items()}
    weights["model.embed_tokens.weight"][slice(None) if token is None else token] = torch.nan
    save_file(weights, file, metadata={"format": "pt"})


def test_non_finite_target_logits_fail_only_their_prompt(place: Path) -> None:
    from bass_cli.formats.tokenizer import Tokenizer

    texts = ["the cat", f"a {SPOILT} mat", "on the mat", f"{SPOILT}", "sat"]
    Path("p.txt").write_text("".join(f"{text}\n" for text in texts))
    bass("p.txt", *FLAGS, code=0)
    due = {(row["id"], row["sample"]): row["token_ids"] for row in rows()}
    (token,) = Tokenizer.load(place / "target").encode(SPOILT)
    spoil("target", token)
    for coupling in ("shared", "maximal"):
        bass("p.txt", *FLAGS, "--coupling", coupling, "--overwrite", code=1)
        found = {(row["id"], row["sample"]): row for row in rows()}
        assert set(found) == set(due)
        for (id_, sample), row in found.items():
            hopeless = id_ in ("1", "3")
            assert (row["tokens"] == 0) == hopeless
            assert (row["finish_reason"] == "error") == (
                hopeless
                or token in row["token_ids"][:-1]
                or (row["tokens"] < 8 and row["token_ids"][-1] == token)
            )
            if coupling == "shared":
                assert row["token_ids"] == due[id_, sample][: row["tokens"]]
    kept = [row for row in rows() if row["finish_reason"] != "error"]
    assert len(kept) >= 6
    again = bass("p.txt", *FLAGS, "--coupling", "maximal")
    assert (again.exit_code, len(rows())) == (1, 15)
    assert rows()[: len(kept)] == kept, "what was finished is not drawn again"


@pytest.mark.parametrize("length", ["auto", "bass", "3"])
def test_non_finite_draft_logits_give_no_draft(place: Path, length: str) -> None:
    Path("p.txt").write_text("the cat\non the mat\nsat\n")
    flags = (*FLAGS, "--n", "1")  # with few rows `auto` tries drafts on a CPU
    bass("p.txt", *flags, "--draft", "none", "--draft-length", "auto", code=0)
    due = {(row["id"], row["sample"]): row["token_ids"] for row in rows()}
    shutil.copytree("draft", "broken")
    spoil("broken", None)
    for coupling in ("shared", "maximal"):
        bass(
            "p.txt",
            *flags,
            "--draft",
            str(place / "broken"),
            "--draft-length",
            length,
            "--coupling",
            coupling,
            "--overwrite",
            code=0,
        )
        found = {(row["id"], row["sample"]): row for row in rows()}
        assert {row["finish_reason"] for row in found.values()} <= {"length", "eos"}
        assert sum(row["drafted"] for row in found.values()) > 0
        if coupling == "shared":
            assert {key: row["token_ids"] for key, row in found.items()} == due
        else:
            assert set(found) == set(due)
            assert sum(row["accepted"] for row in found.values()) == 0
