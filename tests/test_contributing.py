"""CONTRIBUTING.md held against the code: what it names is there, and what it shows works as it
stands."""

import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from toys import Markov, drive, loop_for, plain, rows_for

from bass_cli.drafts.factory import DraftParts
from bass_cli.engine.contracts import Drafter, DraftLength, RoundResult
from bass_cli.lengths.controllers import LengthParts
from bass_cli.models import families, tensor_names

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
NEW = {"bass_cli/drafts/repeat.py", "bass_cli/lengths/alternate.py"}


def made_by(name, parts, folder):
    """Return what the function `make` beside a class in one of the code blocks makes of parts."""
    return sys.modules[shown(name, folder).__module__].make(parts)


def shown(name, folder):
    """What is called so in one of the code blocks, from a file, as Triton needs it."""
    (code,) = (
        block for block in SHOWN if re.search(rf"^(class|def) {name}\b", block, re.MULTILINE)
    )
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    (folder / f"{name}.py").write_text("from __future__ import annotations\n" + code)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def test_every_file_and_test_that_it_names_is_there():
    named = set(re.findall(r"[\w./]+/[\w.]+\.(?:py|md)", TEXT)) - NEW
    assert len(named) > 25
    assert {name for name in named if not (ROOT / name).is_file()} == set()
    tests = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/*.py"))
    assert [name for name in re.findall(r"`(test_\w+)`", TEXT) if f"def {name}(" not in tests] == []
    assert len(TEXT.splitlines()) <= 150


@pytest.mark.parametrize("coupling", ["shared", "maximal"])
def test_the_drafter_and_the_controller_work(coupling, tmp_path):
    # that repeats itself
    table = 3 * torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(0)) + 3 * torch.eye(6)
    drafter: Drafter = made_by("RepeatDrafter", DraftParts(coupling, None), tmp_path)
    lengths: DraftLength = made_by("Alternate", LengthParts(3, coupling), tmp_path)
    greedy = {"temperature": 0.0} if coupling == "maximal" else {}

    def rows():
        return rows_for([[1], [2, 3, 4]], 3, **greedy)

    seen: list[RoundResult] = []
    loop = loop_for(Markov(table, 1), drafter, rows=2, lengths=lengths, coupling=coupling)
    assert drive(loop, rows(), on_round=lambda done, _: seen.append(done)) == plain(
        Markov(table, 1), rows()
    )
    assert {2, 3} <= {done.width for done in seen}
    assert any(any(done.accepted) for done in seen)


def test_the_family_is_one():
    names = {**vars(tensor_names)}
    exec(re.search(r"( *PHI = .*?\n) *\"phi3\"", TEXT, re.DOTALL)[1].strip(), names)
    assert names["PHI"] == tensor_names.PHI
    names = {**vars(families), "tensor_names": SimpleNamespace(PHI=names["PHI"])}
    family = eval(re.search(r'"phi3": (Family\(.*\)),$', TEXT, re.MULTILINE)[1], names)
    assert {ours for _, ours, _ in family.tensors} == {
        ours.partition(":")[0] for _, ours, _ in families.FAMILIES["llama"].tensors
    }


def test_the_kernel_gives_its_definition(tmp_path):
    pytest.importorskip("triton")
    x = 5 * torch.randn(3, 700, device="cuda" if torch.cuda.is_available() else "cpu")
    torch.testing.assert_close(
        shown("softcap", tmp_path)(x, 3.0), 3.0 * torch.tanh(x / 3.0), atol=1e-5, rtol=1e-5
    )
