"""`--help` of every command: headings, 80 columns, explained terms, valid examples; completion."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import typer.main
from command_line import cli

from bass_cli.cli.commands import app
from bass_cli.cli.help import TWO_SCREENS, WORDS
from bass_cli.config.commands import COMMANDS
from bass_cli.config.options import declared
from bass_cli.eval.tasks import task_names

PROGRAM: Any = typer.main.get_command(app)
PAGES = ["", *PROGRAM.commands]


def page(command: str, flag: str = "--help", *, columns: int = 80) -> str:
    result = cli(*command.split(), flag, prog_name="bass", terminal_width=columns - 2)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def params_of(command: str) -> list[Any]:
    return [
        param
        for param in (PROGRAM.commands[command] if command else PROGRAM).params
        if not param.hidden and param.name != "help_all"
    ]


def whole_page(command: str) -> str:
    """Return the page with all options; that of the program has no flag for it."""
    return page(command, "--help-all" if command else "--help")


def squeezed(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("command", PAGES)
def test_help_fits_80_columns_and_shows_no_python_types(command: str) -> None:
    text = whole_page(command)
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
    assert page(command, "-h") == page(command)


@pytest.mark.parametrize("command", PAGES[1:])
def test_options_are_grouped_under_headings(command: str) -> None:
    headings = re.findall(r"^(\w.*):$", whole_page(command), re.MULTILINE)
    assert len(headings) == len(set(headings))
    ours = [param for param in params_of(command) if param.param_type_name == "option"]
    arguments = len(ours) < len(params_of(command))  # which share one heading
    assert len(headings) >= min(len(ours) + arguments, 4)
    assert [param.name for param in ours if not param.rich_help_panel] == []


@pytest.mark.parametrize("command", PAGES)
def test_help_fits_two_screens(command: str) -> None:
    assert page(command, columns=100).count("\n") <= TWO_SCREENS


@pytest.mark.parametrize("command", PAGES[1:])
@pytest.mark.parametrize("columns", [60, 100])
def test_help_hides_rare_options_only_where_all_do_not_fit(command: str, columns: int) -> None:
    short, whole = page(command, columns=columns), page(command, "--help-all", columns=columns)
    assert "--help-all" not in whole
    if whole.count("\n") <= TWO_SCREENS:
        assert short == whole
        return
    options = declared(COMMANDS[command])
    rare = {param.name for param in params_of(command) if options[param.name].rare}
    for param in params_of(command):
        shown = [param.metavar] if param.param_type_name == "argument" else param.opts
        listed = re.search(rf"^  (-\w, )?{re.escape(shown[-1])}(?![\w-])", short, re.MULTILINE)
        assert (param.name in rare) == (listed is None), param.name
    assert rare
    assert "--help-all" in short


@pytest.mark.parametrize("flag", ["--help", "--help-all"])
@pytest.mark.parametrize("command", PAGES)
def test_help_explains_the_terms_that_it_uses(command: str, flag: str) -> None:
    text = page(command, flag if command else "--help")
    explained = re.findall(
        r"^  (\w[\w@ ]*?)  +\S", text.partition("\nWords:\n")[2].partition("\n\n")[0], re.MULTILINE
    )
    used = {word for word in ("pair", "target", "draft", "sequence", "round", "coupling", "acceptance rate",
                              "controller")
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
    assert cli(prog_name="bass", env=environment).stdout.split() == [expected]


def test_n_and_out_have_short_options() -> None:
    for command, names in (
        ("generate", ("n", "out")),
        ("eval", ("n", "out")),
        ("distill", ("out",)),
    ):
        found = {param.name: param.opts for param in params_of(command)}
        for name in names:
            assert found[name] == [f"-{name[0]}", f"--{name}"]
            assert f"-{name[0]}, --{name} " in page(command)


def test_the_shell_completes_names_of_tasks() -> None:
    environment = {"_BASS_COMPLETE": "complete_bash", "COMP_WORDS": "bass eval ", "COMP_CWORD": "2"}
    result = cli(prog_name="bass", env=environment)
    assert sorted(result.stdout.split()) == sorted(task_names())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("generate p.txt --zigzag 4", "there is no option --zigzag; see bass generate --help"),
        ("generate p.txt --temprature 1", 'no option --temprature; did you mean "--temperature"?'),
        (
            "generate p.txt --max-tokens 9",
            'no option --max-tokens; did you mean "--max-new-tokens"?',
        ),
        ("generate p.txt --samples 9", 'no option --samples; did you mean "--n"?'),
        ("generate p.txt --temp 1", 'no option --temp; did you mean "--temperature"?'),
        ("generate p.txt --tokenizer x", "write tokenizer into the file for --pair"),
        ("bench --lora x", "there is no option --lora; write lora into the file for --pair"),
        ("merge a b --temp 1", "there is no option --temp; see bass merge --help"),
        ("genrate p.txt", 'there is no command "genrate"; did you mean "generate"?'),
        ("draw p.txt", 'there is no command "draw"; see bass --help'),
        ("generate", "PROMPTS: it is missing; see bass generate --help"),
        ("generate p.txt --n five", "--n (or BASS_N): a whole number is needed (got 'five')"),
        ("generate p.txt --n 1.5", "--n (or BASS_N): a whole number is needed (got '1.5')"),
        ("generate p.txt --top-p x", "--top-p (or BASS_TOP_P): a number is needed (got 'x')"),
        ("generate p.txt --n", "--n: it requires an argument"),
        ("generate p.txt q.txt", "got unexpected extra argument"),
        ("generate p.txt --pair=", "--pair (or BASS_PAIR): it is empty"),
        ("merge a.jsonl ''", "PART...: it is empty; see bass merge --help"),
        ("score ''", "FILE...: it is empty; see bass score --help"),
        ("merge a.jsonl", "PART...: it is missing; see bass merge --help"),
    ],
)
def test_a_command_line_mistake_is_one_error_line(arguments: str, expected: str) -> None:
    result = cli(*shlex.split(arguments), prog_name="bass")
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("bass: error: ")
    assert expected in line
