"""Text from files, models, arguments and libraries is escaped, in a pipe and on a terminal.

That includes control characters, text direction, line breaks and markup.
"""

from __future__ import annotations

import ast
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_pair
from command_line import cli
from forked import BASS, STAND_IN
from hostile_text import FILE, TEXT, both_outputs, check_harmless

from bass_cli.errors import MachineError, UserError
from bass_cli.io import terminal

ROOT = Path(__file__).parents[2]
# places of TEXT in a command: its arguments, with the files that it needs
PLACES: dict[str, list[str]] = {
    "an id of a prompt that fails": ["generate", "fail.jsonl"],
    "the name of a prompt file": ["generate", f"{FILE}.jsonl"],
    "the name of an output": ["generate", "p.jsonl", "--out", f"no/{FILE}.jsonl"],
    "an output that is complete": ["generate", "p.jsonl", "--n=1", "--out", f"{FILE}.jsonl"],
    "the name of a model": ["generate", "p.jsonl", "--model", f"missing{FILE}"],
    "the name of a pair": ["generate", "p.jsonl", "--pair", TEXT],
    "a pair file that is not there": ["generate", "p.jsonl", "--pair", f"{FILE}.yaml"],
    "a key of a pair file": ["generate", "p.jsonl", "--pair", "key.yaml"],
    "a value of a pair file": ["generate", "p.jsonl", "--pair", "value.yaml"],
    "an option": ["generate", "p.jsonl", f"--{TEXT}"],
    "a command": [TEXT, "x"],
    "an extra argument": ["generate", "p.jsonl", TEXT],
    "a number": ["generate", "p.jsonl", "--n", TEXT],
    "a duration": ["generate", "p.jsonl", "--budget", TEXT],
    "a word": ["generate", "p.jsonl", "--device", TEXT],
    "a column": ["generate", "p.jsonl", "--prompt-column", TEXT],
    "fields of a prompt": ["generate", "fields.jsonl"],
    "an id that is there twice": ["generate", "twice.jsonl"],
    "a manifest": ["generate", "p.jsonl", "--out", "old.jsonl"],
    "parts to merge": ["merge", "all.jsonl", f"{FILE}.jsonl", FILE],
    "a generation file": ["score", "twice.jsonl", "--task", TEXT],
    "a task": ["eval", TEXT],
    "a pair that is looked at": ["pairs", "looked.yaml"],
    "a pair that doctor looks at": ["doctor", "--pair", "looked.yaml"],
    "samples on standard output": ["generate", "meta.jsonl", "--n", "1"],
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    quoted = json.dumps(TEXT)
    prompts: dict[str, list[dict[str, Any]]] = {
        "p": [{"prompt": "a"}],
        "fail": [{"id": TEXT, "prompt": "FAIL"}],
        "fields": [{TEXT: "a"}],
        "twice": [{"id": TEXT, "task_id": TEXT, "prompt": "a", "completion": "b"}] * 2,
        "meta": [{"id": TEXT, "prompt": TEXT, "more": TEXT}],
        "old": [],
    }
    for name, rows in prompts.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "old.jsonl").write_text("{}\n")
    manifest = {"results": {"target": TEXT, "seed": TEXT, "n": 8}}
    (tmp_path / "old.jsonl.manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "key.yaml").write_text(f"target: t\n{quoted}: 1\n")
    (tmp_path / "value.yaml").write_text(f"target: t\ndtype: {quoted}\n")
    (tmp_path / "looked.yaml").write_text(f"name: {quoted}\ntarget: {quoted}\ndraft: {quoted}\n")
    return tmp_path


@pytest.mark.parametrize("command", PLACES.values(), ids=PLACES.keys())
def test_hostile_text_in_a_command_is_escaped(place: Path, command: list[str]) -> None:
    (place / f"{FILE}.jsonl").unlink(missing_ok=True)
    code = BASS if command[0] in ("pairs", "doctor") else STAND_IN
    environment = {"PATH": "/bin", "HOME": str(place), "HF_HUB_OFFLINE": "1", "COLUMNS": "400"}
    piped_code, piped, shown = both_outputs(code, *command, cwd=place, env=environment)
    assert "Traceback" not in piped + shown
    check_harmless(shown, terminal=True)
    if command[1] in ("meta.jsonl", "fail.jsonl"):  # a pipe gets samples as they are
        line, _, piped = piped.partition("\n")
        assert json.loads(line)["id"] == TEXT
        (line,) = [line for line in shown.splitlines() if '"finish_reason"' in line]
        assert json.loads(line[line.index('{"id"') :])["id"] == TEXT
    check_harmless(piped)
    if command[0] not in ("pairs", "doctor"):
        assert "title" in piped or piped_code == 0  # the text is there, spelled out


def test_hostile_environment_variables_are_escaped(place: Path) -> None:
    for name in ("BASS_N", "BASS_CHAT", "BASS_DTYPE"):
        code, piped, shown = both_outputs(
            STAND_IN, "generate", "p.jsonl", cwd=place, env={"PATH": "/bin", name: TEXT}
        )
        assert code == 2
        assert "\\x1b]0;title" in piped
        check_harmless(piped)
        check_harmless(shown, terminal=True)


def test_output_of_libraries_is_escaped(tmp_path: Path) -> None:
    program = f"""
import logging, sys, warnings
from bass_cli.io import terminal
text = {TEXT!r}
logging.basicConfig()
terminal.guard()
warnings.warn(text)
logging.getLogger("other").warning(text)
logging.getLogger("other").warning("%s", text)
print(text.replace("\\n", " "), file=sys.stderr)
sys.stderr.write(text.replace("\\n", " ") + "\\n")
print("\\ttabs and\\nline ends stay")
"""
    _, piped, shown = both_outputs(program, cwd=tmp_path)
    check_harmless(piped)
    check_harmless(shown, terminal=True)
    assert "\ttabs and\nline ends stay" in piped
    assert piped.count("\\x1b]0;title") == 5


def test_a_traceback_cannot_forge_lines(place: Path) -> None:
    program = f"""
import stand_in; stand_in.install()
import bass_cli.run.plan
def fail(*_, **__): raise KeyError({TEXT!r}) from ValueError({TEXT!r})
bass_cli.run.plan.make_plan = fail
from bass_cli.__main__ import main; main()
"""
    code, piped, shown = both_outputs(program, "generate", "p.jsonl", cwd=place)
    assert code == 1
    check_harmless(piped)
    check_harmless(shown, terminal=True)
    assert "  Traceback" in piped
    assert "bass: error: unexpected KeyError: " in piped


def test_progress_of_libraries_and_live_lines_share_a_terminal(tmp_path: Path) -> None:
    program = f"""
import sys, time
from bass_cli.io import terminal
from bass_cli.io.console import Screen
terminal.guard()
screen = Screen()
screen.phase({TEXT!r})
screen.note({TEXT!r})
print({TEXT.replace(chr(10), " ")!r}, file=sys.stderr)
time.sleep(0.3)
screen.close()
sys.stderr.write("\\r 50%|###  |")
sys.stderr.write("\\n\\x1b[A")
with screen.counting({TEXT!r}, 9, beside=lambda: {TEXT!r}) as step:
    step(3, 9)
    time.sleep(0.3)
screen.error({TEXT!r})
"""
    _, piped, shown = both_outputs(program, cwd=tmp_path, env={"PATH": "/bin", "COLUMNS": "400"})
    assert "\r 50%|###  |" in shown
    assert "\x1b[A" in shown
    check_harmless(shown, terminal=True)
    check_harmless(piped)
    assert "[red]y[/red]:warning:" in shown  # markup of rich is no markup here


def test_an_error_of_a_chat_template_is_escaped(here: Path) -> None:
    write_pair(here, prompts=1)
    template = "{{ raise_exception(" + json.dumps(TEXT) + ") }}"
    (here / "target" / "chat_template.jinja").write_text(template)
    (here / "c.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    result = cli(
        "generate", "c.jsonl", "--pair", "pair.yaml", "--device=cpu", "--n=1", "--out=o.jsonl"
    )
    assert "the chat template refuses the messages: x\\x1b]0;title" in result.stderr
    check_harmless(result.stderr)


def test_exception_texts_contain_no_control_characters() -> None:
    error = UserError(f"a {TEXT}", TEXT)
    check_harmless(str(error))
    assert "\n" not in str(error)
    assert len(error.lines) == 2
    assert str(MachineError("a", "b")) == "a; b"


def test_log_messages_of_the_library_are_escaped(caplog: pytest.LogCaptureFixture) -> None:
    import bass_cli.run.generate  # noqa: F401 - sets its logger up

    with caplog.at_level(logging.WARNING, logger="bass"):
        logging.getLogger("bass").warning(TEXT)
    check_harmless(caplog.messages[-1])


def test_printable_unicode_text_is_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    text = "wörld 你好 שלום مرحبا 🙂 a\u3000b\xa0c e\u0301"
    terminal.line(text)
    assert capsys.readouterr().err == f"{text}\n"


def test_escaped_json_on_a_terminal_is_equivalent() -> None:
    line = json.dumps({TEXT: [TEXT, "é🙂"]}, ensure_ascii=False)
    shown = terminal.json_on_a_terminal(line)
    check_harmless(shown)
    assert json.loads(shown) == json.loads(line)
    assert "é🙂" in shown


WRITERS = {"bass_cli/io/terminal.py"}
_STREAMS = {"stdout", "stderr", "__stdout__", "__stderr__"}
# of a standard stream, what may be used elsewhere: the bytes of samples, and questions
_ALLOWED = {"buffer", "flush", "fileno", "isatty"}


def writes(tree: ast.AST) -> list[int]:
    """Return the lines of a module that write to the terminal directly."""
    found, allowed = [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _ALLOWED:
            allowed.add(node.value)
        if isinstance(node, ast.Compare):  # `sys.stdout is not None`
            allowed |= {node.left, *node.comparators}
    for node in ast.walk(tree):
        is_call = isinstance(node, ast.Call)
        name = ast.unparse(node.func) if is_call else ""
        if name in {"print", "typer.echo", "typer.secho", "click.echo", "Console", "Live"}:
            found.append(node.lineno)
        if name.endswith(("print_exc", "print_exception", "rich.print", "console.print")):
            found.append(node.lineno)
        if name == "os.write" and isinstance(node.args[0], ast.Constant):
            found.append(node.lineno)
        if (
            isinstance(node, ast.Attribute)
            and node.attr in _STREAMS
            and ast.unparse(node.value) == "sys"
            and node not in allowed
        ):
            found.append(node.lineno)
    return found


def test_only_one_module_writes_to_the_terminal() -> None:
    # These name the streams to flush, open or compare them.
    besides = {*WRITERS, "bass_cli/__main__.py", "bass_cli/io/console.py", "bass_cli/io/saving.py"}
    found = {
        f"{name}:{line}"
        for path in sorted((ROOT / "bass_cli").rglob("*.py"))
        if (name := str(path.relative_to(ROOT))) not in besides and "/jail/" not in name
        for line in writes(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == set()
    assert (
        len(writes(ast.parse("import sys\nprint('a')\nsys.stderr.write('b')\nx = sys.stdout"))) == 3
    )
