"""Test errors of the Hugging Face hub: one line has the cause, another the remedy."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from forked import BASS, run_forked
from huggingface_hub import constants, errors

from bass_cli.errors import MachineError, UserError
from bass_cli.formats.sources import locate
from bass_cli.io.hub import refusal
from bass_cli.io.prompts import check_prompts
from bass_cli.io.readers import open_source

UNREACHABLE = {
    "HF_ENDPOINT": "http://127.0.0.1:9",
    "HF_HUB_OFFLINE": "0",
    "http_proxy": "",
    "HTTP_PROXY": "",
}


@pytest.mark.parametrize(("arguments", "setting", "expected"), [
    (["eval", "xsum"], UNREACHABLE, ["the hub cannot be reached", "--repo-type dataset "
                                                                  "EdinburghNLP/xsum"]),
    (["generate", "p.txt", "--pair", "qwen3-8b"], UNREACHABLE, ["the hub cannot be "
                                                                "reached", "HF_HOME"]),
    (["generate", "p.txt", "--pair", "qwen3-8b"], {"HF_HUB_OFFLINE": "1"}, ["HF_HUB_OFFLINE is set", "unset HF_HUB"]),
])  # fmt: skip
def test_without_the_hub_two_lines_name_cause_and_remedy(
    tmp_path: Path, arguments: list[str], setting: dict[str, str], expected: list[str]
) -> None:
    (tmp_path / "p.txt").write_text("a\n")
    environment = os.environ | {"HF_HOME": str(tmp_path / "hub"), "no_proxy": "*"} | setting
    done = run_forked(BASS, *arguments, "--quiet", cwd=tmp_path, env=environment)
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 2, done.stderr
    assert lines[0].startswith("bass: error: ")
    assert [part for part, line in zip(expected, lines, strict=True) if part not in line] == []


@pytest.mark.parametrize(("kind", "expected"), [
    (errors.GatedRepoError, "accept its terms and log in there (hf auth login, or HF_TOKEN); or "
                            "do without"),
    (errors.RepositoryNotFoundError, "check the name, or log in there (hf auth login, or "
                                     "HF_TOKEN) if it is private; or"),
    (OSError, "nor to be had from the Hugging Face hub: no space left; do without"),
])  # fmt: skip
def test_hub_refusal_is_a_user_error(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception], expected: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    error = kind.__new__(kind)
    error.args = ("no space left\nand more",)
    found = refusal("org/model", error, remedy="do without")
    assert not isinstance(found, MachineError)
    assert isinstance(found, UserError)
    assert str(found).startswith('"org/model": ')
    assert expected in str(found)


def test_hub_errors_are_left_to_the_dataset_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def refuse(name: str, timeout: float) -> Any:
        raise errors.HfHubHTTPError.__new__(errors.HfHubHTTPError)

    monkeypatch.setattr(huggingface_hub, "dataset_info", refuse)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: iter([{"prompt": "a"}]))
    assert check_prompts(open_source("hf:o/n:test"), column="prompt", limit=None).count is None


def test_hub_files_are_listed_without_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[SimpleNamespace] = []

    def download(repo: str, **settings: Any) -> str:
        calls.append(SimpleNamespace(**settings))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    locate("org/model", folder=None, fetch=False)
    assert {call.local_files_only for call in calls} == {True}
