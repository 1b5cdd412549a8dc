"""`bass publish` and `--publish` against a hub on localhost: what is uploaded, and what is refused
before a model is loaded."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import cli
from fake_hub import FakeHub, serve, user
from huggingface_hub import constants
from stand_in import loaded

from bass_cli.data import publishing
from bass_cli.data.publishing import MARK

RUN = shlex.split("generate p.jsonl --model org/model --n 2 --temperature 0.5 --out s.jsonl")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Return a hub that huggingface_hub uses, with the token of the user `me`."""
    found = FakeHub()
    with serve(found) as address:
        for key, value in {"ENDPOINT": address, "HF_HUB_OFFLINE": False, "HF_HUB_CACHE": str(tmp_path / "hub"),
                           "HF_HUB_DISABLE_XET": True,
                           "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
                           }.items():  # fmt: skip
            monkeypatch.setattr(constants, key, value)
        monkeypatch.setenv("HF_TOKEN", "good")
        monkeypatch.setattr(publishing.time, "sleep", lambda seconds: None)
        yield found


@pytest.fixture
def bass(hub: FakeHub, stand_in: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that runs `bass` with a stand-in for the engine."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    Path("p.jsonl").write_text(
        '{"prompt": "a", "level": 1}\n{"id": "b", "prompt": "B", "level": 2}\n'
    )

    def run(*words: str, code: int = 0) -> str:
        found = cli(*words, code=code)
        return " ".join(found.stderr.split())

    return run


def head_of(card: bytes) -> Any:
    return yaml.safe_load(card.decode().split("---\n")[1])


def test_a_run_publishes_samples_manifest_and_card_in_one_private_commit(
    bass: Any, hub: FakeHub
) -> None:
    hub.licences["org/model"] = "apache-2.0"
    said = bass(*RUN, "--publish", "hf://me/mine")
    assert "published: http://127.0.0.1:" in said
    assert "/datasets/me/mine" in said
    assert hub.private == {"me/mine": True}
    assert hub.commits == ["Publish s.jsonl with bass"]
    files = hub.files["me/mine"]
    assert sorted(files) == ["README.md", "s.jsonl", "s.jsonl.manifest.json"]
    assert files["s.jsonl"] == Path("s.jsonl").read_bytes()
    assert json.loads(files["s.jsonl.manifest.json"]) == json.loads(
        Path("s.jsonl.manifest.json").read_text()
    )
    head, card = head_of(files["README.md"]), files["README.md"].decode()
    assert head == {
        "pretty_name": "mine",
        "license": "apache-2.0",
        "task_categories": ["text-generation"],
        "tags": ["synthetic", "bass"],
        "size_categories": ["n<1K"],
        "configs": [
            {"config_name": "default", "data_files": [{"split": "train", "path": "s.jsonl"}]}
        ],
    }
    assert "**A model generated these texts.**" in card
    rows = dict(
        line.strip("| ").split(" | ")
        for line in card.splitlines()
        if line.startswith("| ") and "`" in line
    )
    assert {key: rows[key] for key in ("target", "n", "seed", "temperature", "prompts", "samples", "tokens")} == {
        "target": "`org/model`", "n": "`2`", "seed": "`0`", "temperature": "`0.5`", "prompts": "`2`",
        "samples": "`4`", "tokens": "`12`",
    }  # fmt: skip
    assert rows["finish reasons"] == '`{"eos": 4}`'


def test_datasets_loads_what_was_published(bass: Any, hub: FakeHub, tmp_path: Path) -> None:
    """The library reads the head of the card, so the manifest is not taken for data."""
    import datasets

    for out in ("s.jsonl", "t.jsonl.zst", "u.parquet"):
        bass(*RUN[:-1], out, "--publish", "hf://me/mine")
        folder = tmp_path / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, content in hub.files["me/mine"].items():
            (folder / name).write_bytes(content)
        found = datasets.load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache"))
        assert sorted(zip(found["id"], found["sample"], strict=True)) == [
            ("0", 0),
            ("0", 1),
            ("b", 0),
            ("b", 1),
        ]
        assert set(found["text"]) == {"a/0/0", "a/1/0", "B/0/0", "B/1/0"}


@pytest.mark.parametrize(
    ("token", "words", "code", "message"),
    [
        (
            None,
            (),
            2,
            "hf://me/mine: there is no token of the hub; log in with hf auth login, or set HF_TOKEN",
        ),
        ("bad", (), 2, "the hub refuses it: "),
        ("weak", (), 2, "the token may only read"),
        (
            "good",
            ("--publish", "hf://you/mine"),
            2,
            'the token is of me, who cannot write to "you"; known: me',
        ),
        ("good", ("--publish", "me/mine"), 2, "write a data set as hf://USER/NAME"),
        ("good", ("--publish", "hf://mine"), 2, "write a data set as hf://USER/NAME"),
        ("good", ("--publish", "hf://me/a b"), 2, "write a data set as hf://USER/NAME; "),
        (
            "good",
            ("--publish", "hf://me/open"),
            2,
            "this data set exists and is public; add --public",
        ),
        ("good", ("--shard", "1/2"), 2, "a shard is a part of a job"),
        ("good", ("--out", "-"), 2, "--publish needs --out FILE"),
        ("good", ("--out", "/dev/stdout"), 2, "--publish needs --out FILE"),
    ],
)
def test_a_wrong_target_is_refused_before_a_model_is_loaded(
    bass: Any, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    token: str | None, words: tuple[str, ...], code: int, message: str,
) -> None:  # fmt: skip
    hub.private["me/open"] = False
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN") if token is None else monkeypatch.setenv("HF_TOKEN", token)
    assert message in bass(*RUN, "--publish", "hf://me/mine", *words, code=code)
    assert loaded == []
    assert not Path("s.jsonl").exists()
    assert hub.commits == []
    assert "me/mine" not in hub.private


def test_a_run_that_failed_publishes_nothing(bass: Any, hub: FakeHub) -> None:
    Path("p.jsonl").write_text('{"prompt": "a"}\n{"prompt": "FAIL"}\n')
    bass(*RUN, "--publish", "hf://me/mine", code=1)
    assert (hub.private, hub.commits) == ({}, [])
    assert (
        "s.jsonl: 1 prompts or samples failed; run its command again, or leave them out with bass filter"
        in bass("publish", "s.jsonl", "hf://me/mine", code=2)
    )
    bass("filter", "s.jsonl", "--where", 'finish_reason != "error"', "--out", "f.jsonl")
    bass("publish", "f.jsonl", "hf://me/mine")
    assert hub.files["me/mine"]["f.jsonl"].count(b"\n") == 2
    assert b"| filter | " in hub.files["me/mine"]["README.md"]


def test_an_evaluation_publishes_its_report_too(bass: Any, hub: FakeHub) -> None:
    words = (
        *shlex.split("eval humaneval --model org/model --limit 1 --n 1 --allow-code-execution"),
        *("--prompt-format", "raw"),
    )
    bass(*words, "--out", "e.jsonl", "--publish", "hf://me/mine")
    names = ["README.md", "e.jsonl", "e.jsonl.manifest.json", "e.report.json"]
    assert sorted(hub.files["me/mine"]) == names
    assert b"| task | `humaneval` |" in hub.files["me/mine"]["README.md"]
    assert "a sweep has several files" in bass(
        *words, "--budgets", "1s", "--publish", "hf://me/mine", code=2
    )
    assert "--public needs --publish" in bass(*words, "--public", code=2)


def test_files_that_are_not_complete_are_refused(bass: Any, hub: FakeHub) -> None:
    bass(*RUN)
    manifest = Path("s.jsonl.manifest.json")
    whole = json.loads(manifest.read_text())
    shard = whole | {"results": whole["results"] | {"shard": "1/2"}}
    for changed, message in (
        (whole | {"finished": False}, "s.jsonl: the run has not finished"),
        (shard, "s.jsonl: it is a part of a job; join the parts with bass merge first"),
        ([], "s.jsonl.manifest.json: the manifest cannot be read"),
        (None, "s.jsonl.manifest.json: this manifest is missing; only files that bass wrote"),
    ):
        manifest.unlink() if changed is None else manifest.write_text(json.dumps(changed))
        assert message in bass("publish", "s.jsonl", "hf://me/mine", code=2)
    assert "none.jsonl: cannot read it: No such file" in bass(
        "publish", "none.jsonl", "hf://me/mine", code=2
    )
    assert hub.requests == []


def test_failures_of_a_moment_are_tried_again(bass: Any, hub: FakeHub) -> None:
    hub.failures = {"whoami": [503], "/commit/": [500, 429, 502], "/repos/create": [503]}
    bass(*RUN, "--publish", "hf://me/mine")
    assert hub.commits == ["Publish s.jsonl with bass"]
    hub.failures = {"/commit/": [500] * 9}
    said = bass("publish", "s.jsonl", "hf://me/other", code=3)
    assert "hf://me/other: the hub cannot be reached (" in said
    assert "s.jsonl is complete; publish it with bass publish" in said
    assert len(hub.failures["/commit/"]) == 4  # five attempts
    hub.failures = {"/commit/": [403]}
    assert "hf://me/other: the hub refuses it: " in bass(
        "publish", "s.jsonl", "hf://me/other", code=2
    )


def test_publishing_again_replaces_files_but_no_card_of_a_person(bass: Any, hub: FakeHub) -> None:
    hub.users["good"] = user("me", "fineGrained", "lab")
    bass(*RUN, "--publish", "hf://lab/mine", "--public")
    assert hub.private == {"lab/mine": False}
    hub.files["lab/mine"]["README.md"] = b"---\n---\n# By hand\n"
    said = bass(*RUN, "--seed", "1", "--overwrite", "--publish", "hf://lab/mine", "--public")
    assert "hf://lab/mine: its README.md was not made by bass, so it is not replaced" in said
    assert hub.files["lab/mine"]["README.md"] == b"---\n---\n# By hand\n"
    assert b"a/0/1" in hub.files["lab/mine"]["s.jsonl"]
    hub.files["lab/mine"]["README.md"] = f"{MARK} old".encode()
    bass("publish", "s.jsonl", "hf://lab/mine", "--public")
    assert b"A model generated these texts" in hub.files["lab/mine"]["README.md"]


def test_paths_of_the_machine_are_not_published(bass: Any, hub: FakeHub, tmp_path: Path) -> None:
    model = tmp_path / "secret" / "model"
    model.mkdir(parents=True)
    (model / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    bass("generate", str(Path("p.jsonl").absolute()), "--model", str(model), "--n", "1", "--out", "s.jsonl",
         "--stop", "/tmp")  # fmt: skip
    bass("publish", "s.jsonl", "hf://me/mine")
    files = hub.files["me/mine"]
    manifest = json.loads(files["s.jsonl.manifest.json"])
    assert (manifest["results"]["target"], manifest["source"]) == ("model", "p.jsonl")
    assert manifest["results"]["stop"] == ["/tmp"]  # a setting, not a path
    assert str(tmp_path).encode() not in files["README.md"] + files["s.jsonl.manifest.json"]
    assert head_of(files["README.md"])["license"] == "mit"


def test_paths_in_reports_and_relative_paths_are_not_published(
    bass: Any, hub: FakeHub, tmp_path: Path
) -> None:
    model = tmp_path / "secret" / "model"
    model.mkdir(parents=True)
    Path("private").mkdir()
    words = ("--model", str(model), "--limit", "1", "--n", "1", "--allow-code-execution")
    out = ("--out", str(Path("private/e.jsonl").absolute()), "--prompt-format", "raw")
    bass("eval", "humaneval", *words, *out, "--publish", "hf://me/mine")
    files = hub.files["me/mine"]
    report = json.loads(files["e.report.json"])
    assert (report["file"], report["setting"]["model"]) == ("e.jsonl", "model")
    assert str(tmp_path).encode() not in files["e.report.json"]
    assert json.loads(Path("private/e.report.json").read_text())["pass_at_k"] == report["pass_at_k"]
    Path("p.jsonl").rename("private/p.jsonl")
    words = ("--model", "org/model", "--n", "1", "--out", "private/s.jsonl")
    bass("generate", "private/p.jsonl", *words, "--publish", "hf://me/other")
    found = json.loads(hub.files["me/other"]["s.jsonl.manifest.json"])
    assert (found["source"], found["results"]["target"]) == ("p.jsonl", "org/model")
