"""The examples of docs/guide run as they are shown, on a tiny random chat model.

A block of `sh` or `python` right after a line `<!-- tested -->` is run. The blocks of a page run in
order, in one scratch folder that has `prompts.jsonl`; further files are written by the blocks.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from checkpoints import write_checkpoint, write_tokenizer

GUIDES = Path(__file__).parent.parent / "docs" / "guide"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the model of all examples
SECONDS = 120  # of one block
_BLOCK = re.compile(r"^<!-- tested -->\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SERVER = "GUIDES_FORK_SERVER"  # a variable: the descriptor at which processes are forked
# `bass` without the seconds that importing torch takes: see tests/support/forked.py
_BASS = f"""#!{sys.executable}
import os, pathlib, socket, sys
sys.path.insert(0, {str(Path(forked.__file__).parent)!r})
import forked
server = socket.socket(fileno=int(os.environ.pop({_SERVER!r})))
forked._server = lambda: server
process = forked.Forked(
    forked.BASS, *sys.argv[1:], cwd=pathlib.Path.cwd(), stdin=0, stdout=1, stderr=2
)
sys.exit(process.wait())
"""


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return the tested blocks of a page as (language, code)."""
    return _BLOCK.findall(page.read_text(encoding="utf-8"))


PAGES = [page for page in sorted(GUIDES.glob("*.md")) if blocks(page)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny random chat model."""
    folder = tmp_path_factory.mktemp("guides") / "model"
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 2048}
    write_checkpoint("llama", folder, shards=False, **sizes)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def scratch(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with `prompts.jsonl`, and put a `bass` on the PATH."""
    folder, tools = tmp_path / "scratch", tmp_path / "tools"
    folder.mkdir()
    tools.mkdir()
    prompts = [
        {"id": "rain", "prompt": "Write one line about rain."},
        {"id": "capital", "prompt": "The capital of France is"},
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prompts))
    (tools / "bass").write_text(_BASS)
    (tools / "bass").chmod(0o755)
    path = [str(tools), str(Path(sys.executable).parent), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(path))
    monkeypatch.setenv("BASS_DEVICE", "cpu")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return folder


def run(language: str, code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a block in the folder."""
    if language == "python":
        return forked.run_forked(code, cwd=folder, timeout=SECONDS)
    server: socket.socket = forked._server()
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=folder,
        env=os.environ | {_SERVER: str(server.fileno())},
        pass_fds=[server.fileno()],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_of_the_guide_run(page: Path, scratch: Path, model: Path) -> None:
    for number, (language, code) in enumerate(blocks(page), 1):
        assert language in ("sh", "python"), f"{page.name}: block {number} is {language}"
        done = run(language, code.replace(MODEL, str(model)), scratch)
        assert done.returncode == 0, (
            f"{page.name}: block {number} ended with {done.returncode}\n{code}\n"
            f"--- standard output\n{done.stdout}\n--- standard error\n{done.stderr}"
        )


def test_every_mark_is_followed_by_a_block() -> None:
    for page in GUIDES.glob("*.md"):
        marks = page.read_text(encoding="utf-8").count("<!-- tested -->")
        assert marks == len(blocks(page)), page.name


@pytest.mark.parametrize("language", ["sh", "python"])
def test_a_failing_block_ends_with_its_exit_code(language: str, scratch: Path) -> None:
    code = {"sh": "bass generate missing.jsonl | cat", "python": "import sys; sys.exit(2)"}
    assert run(language, code[language], scratch).returncode == 2
