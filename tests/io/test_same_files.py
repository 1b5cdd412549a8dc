"""Test that no command overwrites its inputs: an output that is also an input, under any name, is
refused."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import cli

ROOT = Path(__file__).parents[2]
LINK, HARD, BY_ANOTHER_WAY = "link", "hard", "other/../"
GENERATE = ["generate", "p.jsonl", "--pair", "pair.yaml"]
EVAL = shlex.split("eval humaneval --pair pair.yaml --data tiny.jsonl --allow-code-execution")
SWEEP = [*EVAL, "--out", "o.jsonl", "--budgets", "0.5s"]
SCORE = shlex.split("score f.jsonl --data tiny.jsonl --task humaneval --allow-code-execution")
BENCH = ["bench", "--pair", "pair.yaml", "--prompts", "p.jsonl"]


@pytest.fixture(autouse=True)
def place(here: Path) -> Path:
    """A folder with prompts, fake model files, problems and samples."""
    for folder in ("target", "draft", "other"):
        (here / folder).mkdir()
    (here / "target" / "config.json").write_text("{}")
    (here / "target" / "model.safetensors").write_bytes(b"weights")
    (here / "draft" / "model.png").write_bytes(b"no part of a model")
    (here / "draft.gguf").write_bytes(b"weights")
    (here / "p.jsonl").write_text('{"prompt": "a"}\n')
    (here / "pair.yaml").write_text("target: ./target\ndraft: ./draft.gguf\n")
    problem = {
        "task_id": "Tiny/0",
        "prompt": "def f(x):\n",
        "entry_point": "f",
        "test": "def check(f):\n    pass\n",
    }
    (here / "tiny.jsonl").write_text(json.dumps(problem) + "\n")
    (here / "f.jsonl").write_text(
        json.dumps({"task_id": "Tiny/0", "completion": "    return x\n"}) + "\n"
    )
    (here / "f.jsonl.manifest.json").write_text("{}")
    return here


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(("command", "option", "read", "what"), [
    ([*GENERATE, "--overwrite"], "--out", "p.jsonl", "the prompt file"),
    ([*GENERATE, "--overwrite"], "--out", "pair.yaml", "the pair file"),
    ([*GENERATE, "--overwrite"], "--out", "target/model.safetensors", "a file of the models"),
    ([*GENERATE, "--overwrite"], "--out", "draft.gguf", "a file of the models"),
    (GENERATE, "--out", "p.jsonl", "the prompt file"),
    ([*EVAL, "--overwrite"], "--out", "tiny.jsonl", "the data"),
    (EVAL, "--report", "tiny.jsonl", "the data"),
    (EVAL, "--report", "target/config.json", "a file of the models"),
    (SWEEP, "--report", "tiny.jsonl", "the data"),
    (SCORE, "--report", "tiny.jsonl", "the data"),
    (SCORE, "--report", "f.jsonl", "the generation file"),
    (SCORE, "--report", "f.jsonl.manifest.json", "its manifest"),
])  # fmt: skip
@pytest.mark.parametrize("way", ["", BY_ANOTHER_WAY, LINK, HARD])
def test_an_output_that_is_an_input_is_refused(
    place: Path, command: list[str], option: str, read: str, what: str, way: str
) -> None:
    name = f"{way}{read}" if way in ("", BY_ANOTHER_WAY) else f"{way}.jsonl"
    if way == LINK:
        Path(name).symlink_to(read)
    elif way == HARD:
        os.link(read, name)
    before = contents(place)
    result = cli(*command, option, name, code=2)
    assert f"{option} {name}: this is {what}, which would be lost" in result.stderr
    assert contents(place) == before


def test_report_cannot_take_the_place_of_a_manifest(place: Path) -> None:
    Path("f.jsonl.manifest.json").unlink()
    before = contents(place)
    result = cli(*SCORE, "--report", "other/../f.jsonl.manifest.json", code=2)
    assert "this is its manifest, which would be lost" in result.stderr
    assert contents(place) == before


def test_chart_never_replaces_an_input(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name
    )  # as if matplotlib were installed
    for number, (command, read) in enumerate(
        [(BENCH, "p.jsonl"), (BENCH, "pair.yaml"), (SWEEP, "tiny.jsonl")]
    ):
        os.link(read, f"{number}.png")
        before = contents(place)
        result = cli(*command, "--plot", f"{number}.png", code=2)
        assert f"--plot {number}.png: this is the " in result.stderr
        assert contents(place) == before


@pytest.mark.parametrize(("command", "fault"), [
    (["generate", "o.jsonl.manifest.json", "--out", "o.jsonl"], "the manifest of --out "
                                                                "o.jsonl.manifest.json: this is "
                                                                "the"),
    ([*EVAL, "--out", "o.jsonl", "--report", "other/../o.jsonl"], "../o.jsonl: this is the file "
                                                                  "of --out too"),
    ([*SWEEP, "--report", "o.plain-0.5s.jsonl"], "--out o.plain-0.5s.jsonl: this is the file of "
                                                 "--report too"),
    ([*EVAL, "--out", "o.jsonl", "--report", "o.jsonl.verdicts.jsonl"], "this is the file of "
                                                                        "the verdicts too"),
    ([*SCORE, "--report", "f.jsonl.verdicts.jsonl"], "this is the file of the verdicts too"),
])  # fmt: skip
def test_manifests_and_verdicts_count_as_outputs(
    place: Path, command: list[str], fault: str
) -> None:
    Path("o.jsonl.manifest.json").write_text('[{"prompt": "a"}]')
    before = contents(place)
    assert fault in cli(*command, code=2).stderr
    assert contents(place) == before


@pytest.mark.parametrize(
    "redirection", [">> p.jsonl", "1<> other/../p.jsonl", "--out p.jsonl --overwrite"]
)
def test_redirected_streams_are_recognised_as_files(place: Path, redirection: str) -> None:
    before = contents(place)
    prompts = "- < p.jsonl" if "--out" in redirection else "p.jsonl"
    command = f"{sys.executable} -m bass_cli generate --pair pair.yaml {prompts} {redirection}"
    done = subprocess.run(
        command,
        shell=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 2, done.stderr
    assert "this is the prompt file, which would be lost" in done.stderr
    assert contents(place) == before


def test_streams_and_devices_may_be_shared(place: Path) -> None:
    """The command fails later, because the model files are fake."""
    for out in ("/dev/stderr", "draft/model.png", "target/o.jsonl", "smollm2"):
        assert "which would be lost" not in cli(*GENERATE, "--out", out, code=2).stderr


def test_a_report_goes_through_links_and_into_streams(place: Path) -> None:
    from bass_cli.io.saving import write_json

    Path("r.json").write_text("old")
    Path("to.json").symlink_to("r.json")
    write_json(Path("to.json"), {"a": 1}, "fault")
    assert Path("to.json").is_symlink()
    assert json.loads(Path("r.json").read_text()) == {"a": 1}
    read, write = os.pipe()
    write_json(Path(f"/dev/fd/{write}"), {"a": 2}, "fault")
    os.close(write)
    with open(read, "rb") as stream:
        assert json.loads(stream.read()) == {"a": 2}
