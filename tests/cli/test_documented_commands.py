"""The commands of README.md and docs/ have options that exist, with values that these take."""

from __future__ import annotations

import collections
import itertools
import re
import shlex
import string
from pathlib import Path
from typing import Any

import pytest
import typer.main

from bass_cli.cli.commands import app

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PROGRAM: Any = typer.main.get_command(app)
BASS = re.compile(r"(?:^|[|&'] )\s*bass ([a-z]+ .*)", re.MULTILINE)
SHELL = {"|", ">", "&", "&&", ">>"}
ASSIGNED = re.compile(r'\b([A-Z]+)=("[^"]*"|\S+)')


def blocks(text: str) -> list[str]:
    """Return the fenced and the indented blocks of a page, continued lines joined."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"(?:^(?: {4,}|\t)\S.*\n)+", text, re.MULTILINE)
    return [re.sub(r"\\\n\s*", "", block) for block in (*fenced, *indented)]


def commands(text: str) -> list[list[str]]:
    """Return the arguments of each bass command, variables of the block replaced."""
    found = []
    for block in blocks(text):
        values = collections.defaultdict(lambda: "1")
        values.update((name, value.strip('"')) for name, value in ASSIGNED.findall(block))
        for line in BASS.findall(block):
            line = string.Template(line).safe_substitute(values)
            line = re.sub(r"(--(?:temperature|seed)) [A-Z]\b", r"\1 1", line)  # placeholders
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words = list(itertools.takewhile(lambda word: word not in SHELL, lexer))
            if "..." not in words:
                found.append(words)
    return found


@pytest.mark.parametrize("page", [str(path.relative_to(ROOT)) for path in PAGES])
def test_commands_of_a_page_parse(page: str) -> None:
    for name, *arguments in commands((ROOT / page).read_text(encoding="utf-8")):
        parent = PROGRAM.make_context("bass", [name])
        PROGRAM.commands[name].make_context(name, arguments, parent=parent)
        if name in ("generate", "filter") and "--json" in arguments:
            assert "--out" in arguments, "--json needs --out"


def test_commands_are_found() -> None:
    texts = [path.read_text(encoding="utf-8") for path in PAGES]
    assert sum(len(commands(text)) for text in texts) > 100
    assert commands('A="--n 2"\nbass eval x\n') == []
    block = '```\nA="--n 2" B=3\nbass eval x $A --k $B | head   # all\n```\n'
    assert commands(block) == [["eval", "x", "--n", "2", "--k", "3"]]
