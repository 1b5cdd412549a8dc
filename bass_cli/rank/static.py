"""Check a program without running it: does it end, parse, define its names and its function?

Python's own compiler says what parses, and `symtable`, its scope analysis, where a name is looked
up. The tests of a task play no part.
"""

from __future__ import annotations

import ast
import builtins
import symtable
import warnings
from collections.abc import Iterator

from bass_cli.rank.code import DEFINITIONS, has_effect

_CUT = ("length", "budget", "error")  # finish reasons of samples that did not end by themselves
# Names that every module or class body has without binding them
_IMPLICIT = {
    *("__name__", "__file__", "__doc__", "__package__", "__spec__", "__loader__"),
    *("__builtins__", "__annotations__", "__module__", "__qualname__", "__class__"),
}
_KNOWN = frozenset(dir(builtins)) | _IMPLICIT
_FAULTS = (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError)


def checks_passed(program: str | None, finish_reason: str | None, entry_point: str | None) -> float:
    """Return how many of four checks a sample passes.

    The checks: it ended by itself; it compiles; it uses no undefined name; it defines the entry
    point with a body. What is unknown (no finish reason, no entry point) counts as passed. A
    sample that does not compile fails the last two as well.

    Args:
        program: The source with the prompt's part; None if the sample has no code.
    """
    ended = finish_reason not in _CUT
    tree = None if program is None else compiled(program)
    if tree is None:
        return float(ended)
    defines = entry_point is None or _defines(tree, entry_point)
    return float(ended + 1 + (not undefined_names(tree)) + defines)


def is_whole(program: str, entry_point: str | None) -> bool:
    """Return whether a program compiles and defines the entry point with a body."""
    tree = compiled(program)
    return tree is not None and (entry_point is None or _defines(tree, entry_point))


def compiled(program: str) -> ast.Module | None:
    """Return the syntax tree of a program; None if this interpreter would refuse it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in strings, for example
            tree = ast.parse(program)
            compile(program, "<program>", "exec", dont_inherit=True)
            return tree
    except _FAULTS:
        return None


def undefined_names(tree: ast.Module) -> set[str]:
    """Return the names that are looked up in a module or the builtins, and that neither binds.

    A name counts as bound if any statement binds it, because functions run later than the
    module's text. Nothing is undefined after `from module import *`, which may bind any name.
    """
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    if any(node.names[0].name == "*" for node in imports):
        return set()
    try:
        evaluated = _EvaluatedOnly(tree).visit(ast.parse(ast.unparse(tree)))
        tables = list(_tables(symtable.symtable(ast.unparse(evaluated), "<program>", "exec")))
    except _FAULTS:
        return set()
    used, bound = set[str](), set[str]()
    for symbol in (symbol for table in tables for symbol in table.get_symbols()):
        if symbol.is_global() and symbol.is_referenced():
            used.add(symbol.get_name())
        if symbol.is_global() and (symbol.is_assigned() or symbol.is_imported()):
            bound.add(symbol.get_name())
    return used - bound - _KNOWN


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    """Yield the symbol tables of all scopes."""
    waiting = [table]
    while waiting:
        yield (one := waiting.pop())
        waiting += one.get_children()


class _EvaluatedOnly(ast.NodeTransformer):
    """Removes annotations that are never evaluated, whose names need not exist.

    These are annotations of a function's local variables, and all annotations if the module imports
    `annotations` from `__future__`.
    """

    def __init__(self, tree: ast.Module):
        self._none = any(
            isinstance(node, ast.ImportFrom)
            and node.module == "__future__"
            and any(name.name == "annotations" for name in node.names)
            for node in tree.body
        )
        self._in_function = False

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        """Visit a function's parts, its body as local."""
        if self._none:
            node.returns = None
        before, self._in_function = self._in_function, True
        self.generic_visit(node)
        self._in_function = before
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - the name that ast calls

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """Visit a class, whose body evaluates its annotations."""
        before, self._in_function = self._in_function, False
        self.generic_visit(node)
        self._in_function = before
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        """Remove an argument's annotation if none is evaluated."""
        if self._none:
            node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Replace an annotation that is not evaluated."""
        self.generic_visit(node)
        if self._none or (self._in_function and isinstance(node.target, ast.Name)):
            node.annotation = ast.Constant(None)
        return node


def _defines(tree: ast.Module, name: str) -> bool:
    """Return whether the module's last definition of a function has a body, beside a docstring."""
    defined = [node for node in tree.body if isinstance(node, DEFINITIONS) and node.name == name]
    if defined:
        return any(map(has_effect, defined[-1].body))
    assigned = [node.targets for node in tree.body if isinstance(node, ast.Assign)]
    targets = (target for targets in assigned for target in targets)
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def bare_program(program: str) -> str | None:
    """Return a program without comments, docstrings and its own layout; None if it is invalid."""
    tree = compiled(program)
    if tree is None:
        return None
    for node in ast.walk(tree):
        if isinstance(node, (*DEFINITIONS, ast.Module)) and ast.get_docstring(node, clean=False):
            node.body = node.body[1:] or [ast.Pass()]
    try:
        return ast.unparse(tree)
    except _FAULTS:
        return None
