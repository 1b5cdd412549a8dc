"""Make prompts of code for `bass distill`: functions of installed Python packages, up to their
bodies.

    python benchmarks/python_prompts.py > prompts.jsonl              # the standard library
    python benchmarks/python_prompts.py torch numpy > prompts.jsonl  # and these
    python benchmarks/python_prompts.py --exercises > prompts.jsonl  # and beginnings of exercises
    bass distill --pair qwen-coder.yaml --prompts prompts.jsonl --out drafts

Every second prompt asks a chat model for the function instead. An exercise is a function's name up
to its bracket: the model invents its purpose and examples, and solves it. The order depends on the
texts only.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.util
import itertools
import json
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

_DOCSTRING = range(
    60, 1500
)  # characters of a function: long enough to mean something, short enough for an answer
_LONGEST = 2000  # characters of a prompt
_VERBS = """
all any apply balance check clean compare compress count decode encode evaluate filter find first
flatten generate group is_valid join largest last longest match merge minimum move next pairs parse
partition product rank remove replace reverse rotate round select shortest smallest sort split sum
swap total unique validate
"""
_NOUNS = """
anagrams areas binary brackets characters common_elements consonants cubes dates dictionary digits
distances divisors duplicates even_numbers factors fractions grades graph grid hours indices
integers intervals letters lines list matrix median numbers odd_numbers palindromes path points
polynomial powers prefixes primes queue range records rows scores sentence sequence squares stack
string strings sublists substring suffixes temperatures tree triangle tuples vowels words
"""
_BEGINNINGS = ("def {}(", "from typing import List\n\n\ndef {}(", "\n\ndef {}(")
_SKIPPED = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}


def functions_of(text: str) -> Iterator[tuple[str, str]]:
    """Yield, for every function with a docstring, the text up to the docstring's end, and the
    docstring."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef) or (docstring := ast.get_docstring(node)) is None:
            continue
        begin = min((one.lineno for one in node.decorator_list), default=node.lineno) - 1
        end = node.body[0].end_lineno
        head = textwrap.dedent("\n".join(lines[begin:end])) + "\n"
        if len(docstring) in _DOCSTRING and len(head) <= _LONGEST and head.isascii():
            yield head, docstring


def files_of(packages: list[str]) -> Iterator[Path]:
    folders = [Path(sysconfig.get_paths()["stdlib"])]
    for name in packages:
        found = importlib.util.find_spec(name)
        if found is None or not found.submodule_search_locations:
            raise SystemExit(f"{name}: no such package is installed")
        folders.append(Path(found.submodule_search_locations[0]))
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            if not _SKIPPED & set(path.relative_to(folder).parts):
                yield path


def exercises() -> Iterator[str]:
    for number, words in enumerate(itertools.product(_VERBS.split(), _NOUNS.split())):
        yield _BEGINNINGS[number % len(_BEGINNINGS)].format("_".join(words))


def named(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="*")
    parser.add_argument("--exercises", action="store_true")
    args = parser.parse_args()
    found: dict[str, tuple[str, str]] = {}
    warnings.simplefilter("ignore")  # old escapes in strings
    for path in files_of(args.packages):
        try:
            text = path.read_text(encoding="utf-8")
            for head, docstring in functions_of(text):
                found.setdefault(named(head), (head, docstring))
        except (OSError, SyntaxError, ValueError):
            continue  # broken on purpose, or for another version of Python
    lines: dict[str, dict[str, object]] = {}
    for number, (id_, (head, docstring)) in enumerate(sorted(found.items())):
        if number % 2:
            task = f"Write a Python function that does this:\n\n{docstring}"
            lines[id_] = {"messages": [{"role": "user", "content": task}]}
        else:
            lines[id_] = {"prompt": head}
    if args.exercises:
        lines |= {named(text): {"prompt": text} for text in exercises()}
    for id_, line in sorted(lines.items()):
        print(json.dumps({"id": id_[:16], **line}))
    print(f"{len(lines)} prompts", file=sys.stderr)


if __name__ == "__main__":
    main()
