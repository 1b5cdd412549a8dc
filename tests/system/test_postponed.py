"""Commands import torch without the modules that a job does not use, which can still be used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_STEPS = {
    "postponed": """
print([n for n in ('torch.export', 'torch.distributions', 'torch._refs', 'torch.masked')
       if n in sys.modules])
""",
    "generators": """
print(torch.equal(*(torch.rand(3, generator=torch.Generator().manual_seed(3)) for _ in range(2))))
""",
    # each first of all, in a process of its own; modules that run twice refuse to
    "cycles": """
import os
from importlib import import_module
for name in ('torch._refs', 'torch.distributed.pipelining'):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            found = import_module(name)
            print(name, found is sys.modules[name], found.__spec__.has_location, flush=True)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
""",
    # a module within a postponed one is imported first
    "used": """
from torch.distributions.kl import kl_divergence
normal = torch.distributions.Normal
print(float(kl_divergence(normal(0.0, 1.0), normal(1.0, 1.0))))
print(torch.export.Dim('n').__name__, sys.modules['torch.export'] is torch.export)
""",
    "missing": """
for place in (torch, torch.nn):
    try:
        place.missing
    except AttributeError as error:
        print(error)
""",
    # torch has no such form of `dot` in C++
    "without memory": """
x = torch.empty(4, device='meta')
try:
    torch.dot(x, x)
except NotImplementedError:
    print('not registered')
import transformers
print(torch.dot(x, x).shape)
""",
}


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The lines that each step prints in a process that has imported torch as a command does.

    The module transformers is an empty one.
    """
    folder = tmp_path_factory.mktemp("modules")
    Path(folder, "transformers.py").touch()
    code = (
        f"import sys\nsys.path.insert(0, {str(folder)!r})\n"
        "from bass_cli.system.postponed import import_torch\nimport_torch()\nimport torch\n"
        + "".join(f"print('#', {name!r}){step}" for name, step in _STEPS.items())
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    parts = [part.splitlines() for part in done.stdout.split("# ")[1:]]
    return {name: lines for name, *lines in parts}


def test_modules_that_a_job_does_not_use_are_not_imported(printed: dict[str, list[str]]) -> None:
    assert printed["postponed"] == ["[]"]


def test_generators_of_random_numbers_need_no_postponed_module(
    printed: dict[str, list[str]],
) -> None:
    assert printed["generators"] == ["True"]


def test_postponed_modules_are_imported_when_they_are_used(printed: dict[str, list[str]]) -> None:
    assert printed["used"] == ["0.5", "n True"]


def test_modules_that_need_a_postponed_one_can_be_imported_first(
    printed: dict[str, list[str]],
) -> None:
    names = ("torch._refs", "torch.distributed.pipelining")
    assert printed["cycles"] == [f"{name} True True" for name in names]


def test_names_that_torch_does_not_have_are_errors(printed: dict[str, list[str]]) -> None:
    assert printed["missing"] == [
        "module 'torch' has no attribute 'missing'",
        "module 'torch.nn' has no attribute 'missing'",
    ]


def test_an_import_of_transformers_registers_operations_without_memory(
    printed: dict[str, list[str]],
) -> None:
    assert printed["without memory"] == ["not registered", "torch.Size([])"]
