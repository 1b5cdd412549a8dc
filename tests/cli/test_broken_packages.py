"""What a user sees if a package that bass needs is missing or broken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bass_cli.errors import failed_import

ROOT = Path(__file__).parents[2]
NUMPY = """
try:
    raise ImportError("libgfortran.so.5: cannot open shared object file")
except ImportError as error:
    raise ImportError("IMPORTANT: PLEASE READ THIS") from error
"""
BROKEN = [
    ("numpy", NUMPY, ["generate", "p.txt"], "libgfortran.so.5: cannot open shared object file"),
    ("torch", "raise OSError('libcudart.so.13: no such file')", ["doctor"],
     "libcudart.so.13: no such file"),
    ("typer", "raise ModuleNotFoundError('No module named typer', name='typer')", ["--help"],
     "No module named typer"),
]  # fmt: skip


@pytest.mark.parametrize(("package", "code", "arguments", "reason"), BROKEN)
def test_a_broken_package_is_named_with_the_reason_and_a_remedy(
    tmp_path: Path, package: str, code: str, arguments: list[str], reason: str
) -> None:
    (tmp_path / "p.txt").write_text("a\n")
    (tmp_path / f"{package}.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "bass_cli", *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        f"bass: error: the package {package} cannot be imported: {reason}; install bass-cli again "
        f'in a new environment, or look for the cause with python -c "import {package}"\n'
    )


@pytest.mark.parametrize("code", [
    "import bass_cli; from bass_cli import none",
    "import importlib; importlib.import_module('.none', 'bass_cli')",
    "import json; json.loads('{')",
    "open('/missing/file')",
])  # fmt: skip
def test_other_errors_are_not_blamed_on_a_package(code: str) -> None:
    with pytest.raises((ImportError, ValueError, OSError)) as caught:
        exec(code, {"__name__": "bass_cli"})
    assert failed_import(caught.value) is None
