"""`--help` of every command: grouped, whole at 80 columns, its own words explained, examples
that parse; completion."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from bass_cli.cli.commands import app
from bass_cli.cli.help import WORDS

PROGRAM: Any = typer.main.get_command(app)
PAGES = ["", *PROGRAM.commands]


def page(command: str, flag: str = "--help", *, columns: int = 80) -> str:
    environment = {"COLUMNS": str(columns), "TERMINAL_WIDTH": str(columns)}
    result = CliRunner().invoke(app, [*command.split(), flag], prog_name="bass", env=environment)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def params_of(command: str) -> list[Any]:
    return [
        param
        for param in (PROGRAM.commands[command] if command else PROGRAM).params
        if not param.hidden
    ]


def squeezed(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("command", PAGES)
def test_nothing_is_cut_and_no_type_is_python_s(command: str) -> None:
    text = page(command)
    assert max(map(len, text.splitlines())) <= 80
    assert not any(
        line.endswith("-") for line in text.splitlines()
    )  # an option's name in two parts
    for param in params_of(command):
        assert squeezed(param.help) in squeezed(text), param.name
        assert (
            param.param_type_name == "argument" or getattr(param, "is_flag", False) or param.metavar
        ), param.name
    assert re.findall(r"<\w+>|\b(?:str|int|float|bool|INTEGER|BOOLEAN)\b", text) == []
    assert page(command, "-h") == text


@pytest.mark.parametrize("command", PAGES[1:])
def test_options_stand_in_groups(command: str) -> None:
    headings = re.findall(r"^(\w.*):$", page(command), re.MULTILINE)
    assert len(headings) == len(set(headings))
    ours = [param for param in params_of(command) if param.param_type_name == "option"]
    arguments = len(ours) < len(params_of(command))  # which share one heading
    assert len(headings) >= min(len(ours) + arguments, 4)
    assert [param.name for param in ours if not param.rich_help_panel] == []


@pytest.mark.parametrize("command", PAGES)
def test_words_of_our_own_are_explained_where_they_are_used(command: str) -> None:
    text = page(command)
    explained = re.findall(
        r"^  (\w[\w@ ]*?)  +\S", text.partition("\nWords:\n")[2].partition("\n\n")[0], re.MULTILINE
    )
    used = {word for word in ("pair", "target", "draft", "row", "round", "coupling", "acceptance", "controller")
            if re.search(rf"(?<!-){word}(s|ed)?\b", text)}  # fmt: skip
    assert used <= set(explained) <= set(WORDS)


@pytest.mark.parametrize("command", PAGES)
def test_examples_parse(command: str) -> None:
    lines = re.findall(r"^ +bass (.*)", page(command).partition("\nWords:\n")[0], re.MULTILINE)
    assert lines
    for line in lines:
        name, *arguments = shlex.split(re.split(r" [|>] ", line)[0])
        assert command in ("", name)
        parent = PROGRAM.make_context("bass", [name])
        if arguments != ["--help"]:
            PROGRAM.commands[name].make_context(name, arguments, parent=parent)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("generate --pair smo", "smollm2"),
        ("bench --device cu", "cuda"),
        ("gen", "generate"),
        ("eval --allow-c", "--allow-code-execution"),
    ],
)
def test_the_shell_completes(words: str, expected: str) -> None:
    environment = {
        "_BASS_COMPLETE": "complete_bash",
        "COMP_WORDS": f"bass {words}",
        "COMP_CWORD": str(len(words.split())),
    }
    assert CliRunner().invoke(app, [], prog_name="bass", env=environment).stdout.split() == [
        expected
    ]
