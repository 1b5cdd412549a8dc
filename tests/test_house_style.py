"""Checks of the source's house style: module docstrings, function length, columns, words, lazy
imports, and names of files. The order of layers and import cycles: test_imports.py."""

import ast
import functools
import re
from pathlib import Path

from conftest import LONGEST

ROOT = Path(__file__).parent.parent
FILES = sorted(
    path
    for folder in ("bass_cli", "kernels")
    for path in (ROOT / folder).rglob("*.py")
    if path.stat().st_size
)
# Packages that take long to import.
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
# Words of this project's former private vocabulary, which the field does not use. They match as
# whole words or parts of snake_case names, in singular and plural.
BANNED = (
    "asked", "asks", "backlog", "colds", "crew", "dummies", "foregone", "forgone", "imposed",
    "ladder", "lag", "landed", "lawful", "ledger", "makers", "meant", "outlook", "seat", "settle", "warden",
    "wherever", "whoever",
)  # fmt: skip
BANNED_IN_KERNELS = (
    "cold", "dummy", "flight", "intake", "law", "nobody", "offer", "tap", "turn", "unsound",
)  # fmt: skip


@functools.cache
def text_of(path):
    return path.read_text(encoding="utf-8")


@functools.cache
def syntax_of(path):
    return ast.parse(text_of(path))


def faults(check):
    """What `check` finds in each file, without files in which it finds nothing."""
    found = ((str(path.relative_to(ROOT)), check(path)) for path in FILES)
    return {name: fault for name, fault in found if fault}


def test_module_docstring_has_1_to_8_lines():
    def check(path):
        lines = (ast.get_docstring(syntax_of(path)) or "").splitlines()
        return None if 1 <= len(lines) <= 8 else lines or "there is none"

    assert faults(check) == {}


def test_functions_have_at_most_60_lines():
    """Triton kernels (jit functions) excepted."""

    def check(path):
        lengths = {
            node.name: (node.end_lineno or 0) - node.lineno + 1
            for node in ast.walk(syntax_of(path))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and not any("jit" in ast.dump(one) for one in node.decorator_list)
        }
        return {name: length for name, length in lengths.items() if length > 60}

    assert faults(check) == {}


def test_private_vocabulary_is_not_used():
    def check(path):
        words = BANNED + BANNED_IN_KERNELS * ("bass_kernels" in path.parts)
        return found_words(text_of(path), words)

    assert faults(check) == {}


def found_words(text, words):
    """The (line number, word) pairs of `text` that contain one of `words`."""
    pattern = re.compile(rf"(?<![a-z])(?:{'|'.join(words)})s?(?![a-z])", re.IGNORECASE)
    return [
        (number, match)
        for number, line in enumerate(text.splitlines(), 1)
        for match in pattern.findall(line)
    ]


def test_slow_packages_are_imported_where_they_are_used():
    assert faults(lambda path: {*at_import(syntax_of(path))} & SLOW) == {}


def test_lines_have_at_most_100_columns_and_124_in_tests():
    """Tests may be wider because they contain tables of data. Pragmas do not count."""
    limits = {**dict.fromkeys(FILES, 100), **dict.fromkeys((ROOT / "tests").rglob("*.py"), 124)}
    lines = [
        (path.name, number)
        for path, limit in limits.items()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(re.sub(r"  # (noqa|type: ignore).*", "", line)) > limit
    ]
    assert lines == []


def test_named_python_files_exist():
    """In code, README.md and docs/."""
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").glob("*.py"),
    ]
    existing = [f"/{path.relative_to(ROOT)}" for path in ROOT.glob("[!.]*/**/*.py")]
    named = {
        (path.name, name)
        for path in (*FILES, *pages)
        for name in re.findall(r"\w[\w/]*\.py\b", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 100
    missing = {one for one in named if not any(path.endswith(f"/{one[1]}") for path in existing)}
    assert missing == set()


def test_links_of_documents_lead_to_files_and_headings():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    links = {
        (page, target)
        for page in pages
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
        if not target.startswith("http")
    }
    assert len(links) > 100
    assert (
        sorted(f"{page.name}: {target}" for page, target in links if not leads(page, target)) == []
    )


def test_messages_that_the_guide_explains_occur_in_the_code():
    """Each message in docs/guide/errors.md is a part of one text in bass_cli."""
    page = (ROOT / "docs" / "guide" / "errors.md").read_text(encoding="utf-8")
    messages = set(re.findall(r"^\| `(.+?)` \|", page, re.MULTILINE))
    assert len(messages) > 15
    texts = {
        node.value
        for path in FILES
        for node in ast.walk(syntax_of(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert {one for one in messages if not any(one in text for text in texts)} == set()


def leads(page, target):
    """Return whether the file of a link exists, and has the heading that the link names."""
    name, _, heading = target.partition("#")
    path = page.parent / name if name else page
    if not heading:
        return path.exists()
    titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return heading in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def at_import(tree):
    """Yield the packages that importing a file imports: not in functions, nor for types only."""
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


def test_each_file_of_longest_exists_once():
    """A renamed file would silently be started last."""
    files = [path.stem for path in (ROOT / "tests").rglob("test_*.py")]
    assert [files.count(name) for name in LONGEST] == [1] * len(LONGEST)


def test_the_checks_find_violations():
    code = (
        "import torch.nn\nif TYPE_CHECKING:\n    import rich\ntry:\n    from gguf import a\n"
        "finally:\n    pass\n"
    )
    assert set(at_import(ast.parse(code + "def f():\n    import vllm\n"))) == {"torch", "gguf"}
    text = "rows: Outlook\nspend = some_offers\nbegin_turn(x)\nreturn saturn"
    assert found_words(text, ("outlook", "offer", "turn")) == [
        (1, "Outlook"),
        (2, "offers"),
        (3, "turn"),
    ]
