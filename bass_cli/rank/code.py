"""Read Python code: find it in an answer, check it without running it, and find names of tests.

Code blocks follow the rules of CommonMark. Of several blocks the one that defines the wanted
function is chosen. The names that tests take from a program are determined from the data set alone,
so a program cannot change them. Python's own compiler says what parses, and `symtable`, its scope
analysis, where a name is looked up.
"""

from __future__ import annotations

import ast
import builtins
import functools
import html
import itertools
import re
import symtable
import sys
import textwrap
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from markdown_it.token import Token

MOST = 200_000  # characters of an answer that are read
ENDS = 8  # closing fences that are tried if a block ends within a string
CUTS = 8  # lines of prose that are tried as the end of code without a fence
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*$")
_CODE = re.compile(r"(?:async\s+def|def|class|import|from|@)\s*\w", re.ASCII)
_UNSEEN = re.compile(r"^[ \t\u00a0\u200b\ufeff]+", re.MULTILINE)
_SPACES = str.maketrans({"\u00a0": " ", "\u200b": None, "\ufeff": None})
_THOUGHTS = re.compile(r"\A(?:\s*<think>.*?|.*?\n[ \t]*)</think>", re.DOTALL)
_PRE = re.compile(r"<pre\b[^>]{0,200}>(.*?)(?:</pre>|\Z)", re.DOTALL | re.IGNORECASE)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_CUT = ("length", "budget", "error")  # finish reasons of samples that did not end by themselves
# Names that every module or class body has without binding them
_IMPLICIT = {
    *("__name__", "__file__", "__doc__", "__package__", "__spec__", "__loader__"),
    *("__builtins__", "__annotations__", "__module__", "__qualname__", "__class__"),
}
_KNOWN = frozenset(dir(builtins)) | _IMPLICIT
_FAULTS = (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError)


class Block(NamedTuple):
    """A code block: its text, the word after its fence, and its syntax tree (None: not Python)."""

    text: str
    language: str
    tree: ast.Module | None


def code_in(text: str, name: str | None = None) -> str:
    """Return the code of a chat answer.

    Of several blocks it is the first that defines `name` with a body at the top level, else the
    first that defines `name` without a body, else the first that defines it anywhere. If no block
    does, or `name` is None, it is the first block with definitions, else the first in Python, else
    the first. Without a block it is the text from its first line of code on. Takes linear time.
    Only the first MOST characters are read.
    """
    text = text[:MOST].replace("\r\n", "\n").replace("\r", "\n")
    text = _UNSEEN.sub(lambda found: found[0].translate(_SPACES), text)
    text = without_thoughts(text)  # a reasoning model drafts code before it answers
    if _rank(Block(text, "", parse(text)), name) < 2:
        return text
    blocks = list(blocks_in(text))
    if not blocks:
        return _unfenced(text)
    return min(blocks, key=lambda block: _rank(block, name)).text.removesuffix("\n")


def without_thoughts(text: str) -> str:
    """Return the text after `</think>`. Unchanged if nothing follows it."""
    answer = _THOUGHTS.sub("", text, count=1)
    return answer if answer.strip() else text


def parse(text: str, *, compiles: bool = False) -> ast.Module | None:
    """Return the syntax tree. None if the text is not valid Python for this interpreter.

    `compiles`: Whether the text must compile too, which finds more faults.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in strings, for example
            tree = ast.parse(text)
            if compiles:
                compile(text, "<program>", "exec", dont_inherit=True)
            return tree
    except _FAULTS:
        return None


def source_in(prompt: str | None, text: str) -> str | None:
    """Return the program of a sample, for prompts of no known task. None if it has no code.

    An answer with a fenced block is a chat answer, whose code is `code_in`. Otherwise the text
    continues the prompt if both together are Python with a definition.
    """
    if "```" in text or "~~~" in text:
        return code_in(text)
    whole = (prompt or "") + text
    for source in (whole, text):
        if (tree := parse(source)) is not None and _definitions(tree):
            return source
    return whole if _mentions_any(prompt or "") else None


def as_body(code: str) -> str:
    """Return code that continues a function's head.

    It is indented if it has a `return` outside of any function.
    """
    tree = parse(code)
    outside = tree is not None and any(
        isinstance(node, ast.Return) for node in _statements_outside(tree)
    )
    return textwrap.indent(code, "    ") if outside else code


def _statements_outside(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the statements that are in no function and no class."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.stmt):
            yield node
        if not isinstance(node, (*DEFINITIONS, ast.expr)):
            waiting += ast.iter_child_nodes(node)


def _rank(block: Block, name: str | None) -> int:
    """Return the rank of a block. Smaller is better."""
    made = _definitions(block.tree) if block.tree else {}
    if name is not None and name in made:
        return 0 if made[name] else 1
    if name is not None and _mentions(block.text, name):
        return 2
    if made:
        return 3 if name is None or any(made.values()) else 4
    return 5 if block.language.lower().startswith("py") else 6


def _mentions(text: str, name: str) -> bool:
    head = rf"^[ \t]*(?:async\s+)?(?:def|class)\s+{re.escape(name)}\s*[\[(:]"
    return re.search(head, text, re.MULTILINE) is not None


def _mentions_any(text: str) -> bool:
    """Return whether a text begins a function or a class, as prompts of code do."""
    return re.search(r"^(?:async\s+)?(?:def|class)\s+\w+\s*[\[(:]", text, re.MULTILINE) is not None


def _definitions(tree: ast.Module) -> dict[str, bool]:
    """Return by name whether a module's functions, classes and lambdas have a body.

    A docstring is not a body.
    """
    found: dict[str, bool] = {}
    for node in tree.body:
        if isinstance(node, DEFINITIONS):
            found[node.name] = found.get(node.name, False) or any(map(has_effect, node.body))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            found |= {one.id: True for one in node.targets if isinstance(one, ast.Name)}
    return found


def has_effect(statement: ast.stmt) -> bool:
    """Return whether a statement is more than `pass`, `...` or a docstring."""
    return not isinstance(statement, ast.Pass) and not (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def blocks_in(text: str) -> Iterator[Block]:
    """Yield the fenced, indented and HTML code blocks.

    HTML tags count as text, because models write them right before a fence.
    """
    from markdown_it import MarkdownIt

    reader = MarkdownIt("commonmark").disable(["html_block", "reference"])
    tokens: list[Token] = []
    reader.block.parse(text, reader, {}, tokens)
    lines = text.split("\n")
    for token in tokens:
        if token.type == "fence":
            yield _fenced(token.content, token.info.strip("{. \t"), token, lines)
        elif token.type == "code_block" and token.content.startswith(("```", "~~~")):
            yield from blocks_in(token.content)  # the whole answer is indented
        elif token.type == "code_block" and (tree := parse(token.content)) and _definitions(tree):
            yield Block(token.content, "", tree)
    for found in _PRE.finditer(text):
        code = html.unescape(re.sub(r"</?\w[^<>]*>", "", found[1]))
        yield Block(code, "", parse(code))


def _fenced(content: str, language: str, token: Token, lines: list[str]) -> Block:
    """Make a fenced block, corrected where models deviate from CommonMark.

    A second opening fence, or a first line with only the language, is left out. The block ends
    before a fence that is followed by text on its line. If it ends within a string, such as a
    docstring with a fence, it is extended up to a later fence.
    """
    first, _, rest = content.partition("\n")
    if first.strip().lower() in ("python", "py", "python3") or first.startswith(token.markup):
        content = rest
    tree = parse(content)
    if tree is None and (cut := content.find("\n" + token.markup)) >= 0:
        shorter = content[: cut + 1]
        if (tree := parse(shorter)) is not None:
            return Block(shorter, language, tree)
    if tree is not None or token.level or token.map is None:
        return Block(content, language, tree)
    start, end = token.map
    ends = (at for at in range(end, len(lines)) if _closes(lines[at], token.markup))
    for at in itertools.islice(ends, ENDS):
        wider = "\n".join(lines[start + 1 : at]) + "\n"
        if (tree := parse(wider)) is not None:
            return Block(wider, language, tree)
    return Block(content, language, None)


def _closes(line: str, mark: str) -> bool:
    found = _FENCE.match(line)
    return found is not None and found[1].startswith(mark)


def _unfenced(text: str) -> str:
    """Return the text without the prose around its code. Unchanged if it has no code."""
    if parse(text) is not None:
        return text
    lines = text.split("\n")
    start = next((at for at, line in enumerate(lines) if _CODE.match(line)), None)
    if start is None:
        return text
    lines = lines[start:]
    ends = [at for at, line in enumerate(lines) if line[:1].strip() and not _CODE.match(line)]
    for end in [len(lines), *reversed(ends[-CUTS:]), *ends[:CUTS]]:
        if parse("\n".join(lines[:end])) is not None:
            return "\n".join(lines[:end])
    return "\n".join(lines)


def runnable(head: str) -> str:
    """Return a prompt as text that runs by itself, with an empty body if it needs one.

    Empty if the prompt is not Python.
    """
    return next((text for text in (head, f"{head}\n    pass\n") if parse(text) is not None), "")


@functools.lru_cache(maxsize=4096)
def names_of(tests: str, setup: str = "", solution: str = "") -> tuple[str, ...]:
    """Return the global names that the tests use and that neither tests nor setup bind.

    A builtin's name is included if the reference `solution` defines it. If no name is left, the
    builtins that the tests call are included, because the function may be called `sum`.
    """
    tree = parse(tests)
    if tree is None:
        return ()
    called = _called(tree)
    free = _free_names(tree, _names(parse(setup) or ast.Module([], []))[1])
    solved = _globals(parse(solution) or ast.Module([], []))
    found = [
        name
        for name in free
        if name in solved or not (hasattr(builtins, name) or _is_module(name, called))
    ]
    return tuple(found or [one for one in free if one in called and hasattr(builtins, one)])


def modules_of(tests: str, names: tuple[str, ...]) -> str:
    """Return imports of the standard library's modules that the tests use but do not import."""
    tree = parse(tests)
    if tree is None:
        return ""
    called = _called(tree)
    return "".join(
        f"import {one}\n" for one in _free_names(tree, set(names)) if _is_module(one, called)
    )


def with_imports(program: str, tests: str) -> str:
    """Append the imports of the tests to a program, because solutions may rely on them."""
    tree = parse(tests) or ast.Module([], [])
    found = [one for one in tree.body if isinstance(one, (ast.Import, ast.ImportFrom))]
    return "\n\n".join([program, *map(ast.unparse, found)])


def _free_names(tree: ast.AST, known: set[str]) -> list[str]:
    """Return the names that are read, in order, but neither bound nor known."""
    used, bound = _names(tree)
    return [name for name in used if name not in bound | known]


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
        elif isinstance(node, DEFINITIONS):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name.split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return list(used), bound


def _globals(tree: ast.Module) -> set[str]:
    """Return the functions, classes and variables of a module, without its imports."""
    found = set()
    for node in tree.body:
        if isinstance(node, DEFINITIONS):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            found |= _names(node)[1]
    return found


def _called(tree: ast.AST) -> set[str]:
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {function.id for function in calls if isinstance(function, ast.Name)}


def _is_module(name: str, called: set[str]) -> bool:
    """Return whether a name is used as a standard library module: it is one and never called."""
    return name in sys.stdlib_module_names and name not in called


def checks_passed(program: str | None, finish_reason: str | None, entry_point: str | None) -> float:
    """Return how many of four checks a sample passes.

    The checks: it ended by itself; it compiles; it uses no undefined name; it defines the entry
    point with a body. What is unknown (no finish reason, no entry point) counts as passed. A
    sample that does not compile fails the last two as well.

    Args:
        program: The source with the prompt's part; None if the sample has no code.
    """
    ended = finish_reason not in _CUT
    tree = None if program is None else parse(program, compiles=True)
    if tree is None:
        return float(ended)
    defines = entry_point is None or _defines(tree, entry_point)
    return float(ended + 1 + (not undefined_names(tree)) + defines)


def is_whole(program: str, entry_point: str | None) -> bool:
    """Return whether a program compiles and defines the entry point with a body."""
    tree = parse(program, compiles=True)
    return tree is not None and (entry_point is None or _defines(tree, entry_point))


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
    tree = parse(program, compiles=True)
    if tree is None:
        return None
    for node in ast.walk(tree):
        if isinstance(node, (*DEFINITIONS, ast.Module)) and ast.get_docstring(node, clean=False):
            node.body = node.body[1:] or [ast.Pass()]
    try:
        return ast.unparse(tree)
    except _FAULTS:
        return None
