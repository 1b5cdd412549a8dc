"""Check the order of layers and the absence of cycles over every import, also inside functions
and for types only."""

import ast
import functools
import graphlib
import importlib
import pkgutil
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Lowest first. A module imports from its own group and from lower layers. Groups of one layer,
# separated by |, do not import each other. A module belongs to the longest name that is a prefix
# of its own.
LAYERS = """
errors | sandbox.jail | bass_kernels
sandbox | system | reading
config
io
models
formats
tensor_parallel
engine
drafts
lengths
run
cluster
rank
generation ray
batch | bench | data | eval | distill | logprobs
report
cli __main__
"""
PLACES = {name: (number, group) for number, line in enumerate(LAYERS.strip().splitlines())
          for group in line.split("|") for name in group.split()}  # fmt: skip
SOURCES = [(base, path) for base, package in ((ROOT, "bass_cli"), (ROOT / "kernels", "bass_kernels"))
           for path in (base / package).rglob("*.py")]  # fmt: skip
FILES = {".".join(path.relative_to(base).with_suffix("").parts).removeprefix("bass_cli.").removesuffix(".__init__"): path
         for base, path in SOURCES}  # fmt: skip


def imported(module, path):
    """Yield what a module imports; modules of this project by their names in FILES."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = (
            [alias.name for alias in node.names]
            if isinstance(node, (ast.Import, ast.ImportFrom))
            else []
        )
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            names = [".".join(filter(None, [*base, node.module, name])) for name in names]
        for name in names:
            ours = name.removeprefix("bass_cli.")
            if ours == name and "." not in package and name.split(".")[0] == "ray":
                continue  # the package `ray`, not our module
            yield ours if ours in FILES else ours.rpartition(".")[0] or ours


@functools.cache
def edges():
    return sorted(
        {
            (one, other)
            for one, path in FILES.items()
            for other in imported(one, path)
            if one != "__init__"
        }
    )


def inner_edges():
    return [(one, other) for one, other in edges() if other in FILES and other != "bass_cli"]


def place(module):
    return PLACES[
        max(
            (name for name in PLACES if f"{module}.".startswith(f"{name}.")),
            key=len,
            default=module,
        )
    ]


def test_imports_go_down():
    """A new module needs an entry in LAYERS, or a package that has one."""
    assert [
        edge
        for edge in inner_edges()
        if place(edge[1]) >= place(edge[0]) and place(edge[1]) != place(edge[0])
    ] == []


def test_packages_have_no_import_cycle():
    def package(module):
        return (
            module if FILES[module].name == "__init__.py" else module.rpartition(".")[0] or module
        )

    graph = graphlib.TopologicalSorter()
    for one, other in inner_edges():
        graph.add(package(one), *{package(other)} - {package(one)})
    assert len(list(graph.static_order())) > 20  # otherwise CycleError names the cycle


def exists(name):
    """Whether a dotted name is a module or something in one."""
    path, _, last = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return bool(path) and exists(path) and hasattr(pkgutil.resolve_name(path), last)
    return True


def test_what_tests_name_as_text_exists():
    """Tests replace functions by these names: after a move they would fail, or replace nothing."""
    named = {
        (path.name, name)
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(
            r"""["'](bass_(?:cli|kernels)(?:\.\w+)+)["']""", path.read_text(encoding="utf-8")
        )
    }
    assert len(named) > 50
    assert [one for one in sorted(named) if not exists(one[1])] == []


def test_jail_modules_need_only_the_standard_library():
    others = {other.split(".")[0] for one, other in edges() if one.startswith("sandbox.jail.")} - {
        "sandbox"
    }
    assert others <= sys.stdlib_module_names
