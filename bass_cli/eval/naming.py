"""Find the names that tests take from the program that they test.

Only the data set is read for this, so a program cannot change it.
"""

from __future__ import annotations

import ast
import builtins
import functools
import sys

from bass_cli.eval.answers import parse


def whole(head: str) -> str:
    """Return a prompt as text that runs by itself, with an empty body if it needs one.

    Empty if the prompt is not Python.
    """
    for text in (head, f"{head}\n    pass\n"):
        if parse(text) is not None:
            return text
    return ""


@functools.lru_cache(maxsize=4096)
def names_of(tests: str, setup: str = "", solution: str = "") -> tuple[str, ...]:
    """Return the global names that the tests use and that neither tests nor setup bind.

    A builtin's name is included if the reference `solution` defines it. If no name is left, the
    builtins that the tests call are included, because the function may be called `sum`.
    """
    tree = parse(tests)
    if tree is None:
        return ()
    used, bound = _names(tree)
    bound |= _names(parse(setup) or ast.Module([], []))[1]
    solved = _defined(parse(solution) or ast.Module([], []))
    free = [name for name in used if name not in bound]
    found = [name for name in free if name in solved or not hasattr(builtins, name)]
    found = [name for name in found if name in solved or not _is_module(tree, name)]
    return tuple(found or _called_builtins(tree, free))


def modules_of(tests: str, names: tuple[str, ...]) -> str:
    """Return imports of the standard library's modules that the tests use but do not import."""
    tree = parse(tests)
    if tree is None:
        return ""
    used, bound = _names(tree)
    missing = [one for one in used if one not in bound and one not in names]
    return "".join(f"import {one}\n" for one in missing if _is_module(tree, one))


def with_imports(program: str, tests: str) -> str:
    """Append the imports of the tests to a program, because solutions may rely on them."""
    tree = parse(tests) or ast.Module([], [])
    found = [one for one in tree.body if isinstance(one, (ast.Import, ast.ImportFrom))]
    return "\n\n".join([program, *map(ast.unparse, found)])


def _names(tree: ast.AST) -> tuple[list[str], set[str]]:
    """Return the names that are read, in order, and those that are bound anywhere."""
    used: dict[str, None] = {}
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                used[node.id] = None
            else:
                bound.add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name.split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return list(used), bound


def _defined(tree: ast.Module) -> set[str]:
    """Return the functions, classes and variables of a module, without its imports."""
    found = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            found |= _names(node)[1]
    return found


def _is_module(tree: ast.AST, name: str) -> bool:
    """Return whether a name is used as a standard library module: it is one and never called."""
    called = {node.func.id for node in ast.walk(tree)
              if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}  # fmt: skip
    return name in sys.stdlib_module_names and name not in called


def _called_builtins(tree: ast.AST, free: list[str]) -> list[str]:
    called = {node.func.id for node in ast.walk(tree)
              if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}  # fmt: skip
    return [name for name in free if name in called and hasattr(builtins, name)]
