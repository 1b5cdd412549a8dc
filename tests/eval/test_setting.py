"""The setting of a report, from the manifest; and what the manifest names of model and machine."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bass_cli.eval.samples import GenerationFile
from bass_cli.eval.setting import differing, setting_of
from bass_cli.run import manifest
from bass_cli.run.plan import _revision
from bass_cli.system import host

MANIFEST: dict[str, Any] = {
    "results": {
        "target": "a/model", "target_files": "abc", "device": "cuda", "dtype": "bf16", "task": "humaneval",
        "prompt_format": "raw", "prompts": "f00", "n": 8, "limit": None, "chat": None, "temperature": 0.2, "top_p": 0.95,
        "min_p": 0.1, "seed": 3, "stop": ["\n#"], "max_new_tokens": 64, "coupling": "shared", "budget": None,
        "token_ids": False, "logprobs": 2, "bass": "0",
    },
    "job": {"kv_dtype": "auto", "batch_size": "auto", "pair": {"draft": "b/draft"}, "speculation": {"length": "auto"}},
    "versions": {"bass": "0.1", "torch": "2.9", "transformers": "5.1", "python": "3.12", "device": "NVIDIA H100"},
    "origin": {"commit": "c0ffee", "revision": "1" * 40, "draft_revision": "2" * 40, "processor": "Xeon",
               "driver": "570.1"},
    "begun": "2026-11-26T00:00:00+00:00",
    "written": "2026-11-26T01:00:00+00:00",
}  # fmt: skip


def file(manifest: dict[str, Any], budget: float | None = None) -> GenerationFile:
    return GenerationFile("f.jsonl", (), manifest, budget, ())


def without(*path: str) -> dict[str, Any]:
    """The manifest without one entry."""
    first, *rest = path
    if not rest:
        return {key: value for key, value in MANIFEST.items() if key != first}
    part = {key: value for key, value in MANIFEST[first].items() if key != rest[0]}
    return MANIFEST | {first: part}


def test_setting_names_what_a_paper_names() -> None:
    assert setting_of(file(MANIFEST, budget=2.0)) == {
        "model": "a/model", "revision": "1" * 40, "lora": None, "dtype": "bf16", "kv_dtype": "auto", "n": 8,
        "limit": None, "seed": 3, "coupling": "shared", "budget": 2.0,
        "sampling": {"temperature": 0.2, "top_p": 0.95, "min_p": 0.1, "stop": ["\n#"], "max_new_tokens": 64},
        "prompt_format": "raw", "prompts": "f00", "chat": {"chat": None},
        "draft": "b/draft", "draft_revision": "2" * 40, "draft_length": "auto", "batch_size": "auto",
        "versions": {"bass": "0.1", "torch": "2.9", "transformers": "5.1", "python": "3.12"}, "commit": "c0ffee",
        "machine": {"device": "NVIDIA H100", "driver": "570.1", "processor": "Xeon"},
        "begun": "2026-11-26T00:00:00+00:00", "written": "2026-11-26T01:00:00+00:00", "note": None,
    }  # fmt: skip


def test_missing_entries_are_null_and_named_in_a_note() -> None:
    old = setting_of(file(without("origin")))
    assert (old["revision"], old["commit"], old["machine"]["driver"]) == ("files:abc", None, None)
    assert old["note"] == "not recorded: commit, machine.driver, machine.processor"
    assert setting_of(file(without("versions", "torch")))["note"] == "not recorded: versions.torch"
    cpu = MANIFEST | {"results": MANIFEST["results"] | {"device": "cpu"}}
    cpu |= {"origin": MANIFEST["origin"] | {"driver": None}}
    assert setting_of(file(cpu))["note"] is None, "a CPU has no driver"
    foreign = setting_of(file({}))
    assert (foreign["model"], foreign["note"]) == (None, "the file has no manifest")
    odd = MANIFEST | {"results": MANIFEST["results"] | {"temperature": float("nan")}, "job": "x"}
    assert setting_of(file(odd))["sampling"]["temperature"] is None


def test_differing_settings_are_named_by_key() -> None:
    other = MANIFEST | {
        "results": MANIFEST["results"] | {"temperature": 0.8, "seed": 4},
        "begun": "2026-11-27T00:00:00+00:00",
    }
    a, b = setting_of(file(MANIFEST)), setting_of(file(other))
    assert differing(a, b) == {"seed": (3, 4), "sampling.temperature": (0.2, 0.8)}
    assert differing(a, a) == {}
    assert differing(a, setting_of(file({})))["sampling.top_p"] == (0.95, None)


def test_revision_is_the_commit_of_a_hub_cache_or_a_digest() -> None:
    cache = Path("/hub/models--a--b/snapshots") / ("a1" * 20)
    for path in (cache, cache / "model.gguf"):
        model: Any = SimpleNamespace(path=path, fingerprint=lambda: "d1")
        assert _revision(model) == "a1" * 20
    model = SimpleNamespace(path=Path("/models/b/model.gguf"), fingerprint=lambda: "d1")
    assert _revision(model) == "files:d1"


def test_commit_is_that_of_the_clone_or_of_the_installed_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        known = ("-c", "user.name=a", "-c", "user.email=a@b")
        found = subprocess.run(
            ("git", "-C", str(tmp_path), *known, *words), capture_output=True, check=True
        )
        return found.stdout.decode().strip()

    code = tmp_path / "bass_cli" / "run" / "manifest.py"
    code.parent.mkdir(parents=True)
    code.write_text("1")

    def found() -> str | None:
        manifest._commit.cache_clear()
        return manifest._commit(str(code))

    address = SimpleNamespace(
        read_text=lambda name: '{"url": "x", "vcs_info": {"commit_id": "c1"}}'
    )
    monkeypatch.setattr(manifest.importlib.metadata, "distribution", lambda name: address)
    assert found() == "c1"
    monkeypatch.setattr(address, "read_text", lambda name: None)  # installed from an index
    assert found() is None
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    git("tag", "v1", "-m", "a tag must not replace the commit")
    assert found() == git("rev-parse", "HEAD")
    code.write_text("2")
    assert found() == git("rev-parse", "HEAD") + "-dirty"


def test_driver_and_processor_are_read_from_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "ROOT", tmp_path)
    assert host.driver_version() is None
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    version = tmp_path / "proc/driver/nvidia/version"
    version.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version: 12\n"
    )
    assert host.driver_version() == "550.54.15"
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (root@a)\n"
    )
    assert host.driver_version() == "570.124.06"
    (tmp_path / "proc/cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) Platinum 8481C\n"
    )
    assert host.processor_name() == "Intel(R) Xeon(R) Platinum 8481C"
