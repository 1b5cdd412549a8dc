"""The house style held against the source: what a file says of itself, how long things are, what
is imported lazily."""

import ast
import re
from pathlib import Path

import pytest
from conftest import DEAR

ROOT = Path(__file__).parent.parent
FILES = sorted(
    path
    for room in ("bass_cli", "kernels")
    for path in (ROOT / room).rglob("*.py")
    if path.stat().st_size
)
SLOW = {
    "datasets",
    "gguf",
    "matplotlib",
    "pyarrow",
    "rich",
    "transformers",
    "huggingface_hub",
    "vllm",
    "ray",
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short_and_say_what_they_are(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 600
    tree = ast.parse(text)
    docstring = ast.get_docstring(tree)
    assert docstring, "a file opens with two to six lines: what it is, what it is not"
    assert len(docstring.splitlines()) <= 8
    functions = [
        node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions
               if not any("jit" in ast.dump(one) for one in node.decorator_list)}  # fmt: skip
    assert {name: length for name, length in lengths.items() if length > 60} == {}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_slow_packages_are_imported_where_they_are_used(path):
    assert {
        name for name in at_import(ast.parse(path.read_text(encoding="utf-8"))) if name in SLOW
    } == set()


def test_lines_of_tests_end_at_124_columns():
    """Where data stands in tables; everything else ends at 100 (ruff)."""
    lines = [
        (path.name, number)
        for path in (ROOT / "tests").rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 124
    ]
    assert lines == []


def test_every_file_that_is_named_is_there():
    """In code, README.md and docs/; docs/LOG.md tells of files that were, and a pattern has no name."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.py")]
    here = [f"/{path.relative_to(ROOT)}" for path in ROOT.glob("[!.]*/**/*.py")]
    named = {
        (path.name, name)
        for path in (*FILES, *pages)
        if path.name != "LOG.md"
        for name in re.findall(r"[\w/]*\w\.py\b", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 100
    assert {one for one in named if not any(path.endswith(f"/{one[1]}") for path in here)} == set()


def at_import(tree):
    """The packages that are imported with a file: not in functions, nor for types only."""
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]
        waiting.extend(ast.iter_child_nodes(node))


def test_files_that_begin_first_are_there():
    """One that got another name would begin last, and nobody would notice."""
    files = [path.stem for path in (ROOT / "tests").rglob("test_*.py")]
    assert [files.count(name) for name in DEAR] == [1] * len(DEAR)


def test_the_checks_see_what_they_should():
    code = (
        "import torch.nn\nif TYPE_CHECKING:\n    import rich\ntry:\n    from gguf import a\n"
        "finally:\n    pass\n"
    )
    assert set(at_import(ast.parse(code + "def f():\n    import vllm\n"))) == {"torch", "gguf"}
