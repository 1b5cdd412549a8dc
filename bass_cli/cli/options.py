"""Make the flags, environment variables and completions of commands from their declared options.

The declarations are in config/options.py and in the classes that config/commands.py lists. Below
the command line, messages name an option by its field; `in_flags` shows the flag.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields
from typing import Annotated, Any, TypeVar

import typer

from bass_cli.cli.help import show_all
from bass_cli.config.commands import COMMANDS
from bass_cli.config.options import HEADINGS, JOB, ModelOptions, Option, declared
from bass_cli.errors import near_word

# Fields that come first under their heading, before the other options of a Job
_FIRST = ("pair", "job", "task", "prompts", "out")
_SHORT = {"n": "-n", "out": "-o"}  # by field
# Fields with file names, in which ~ is expanded: shells do not expand it after "=".
_PATHS = {
    "template",
    "tools",
    "prompts",
    "file",
    "files",
    "a",
    "b",
    "names",
    "pair",
    "job",
    "data",
    "out",
    "report",
    "parts",
    "plot",
    "errors",
    "schema",
    "log",
}
# A field in a message; not in quoted text of a user or in a file's name
_NAMED = re.compile(r"(?<![^ (])`([a-z_.]+(?:=True|=False)?)`(?![\"\w./])")

Args = TypeVar("Args")


def takes(kind: type[Args]) -> Callable[[Callable[[Args], None]], Callable[..., None]]:
    """Return a decorator that turns a function of one `kind` object into a command.

    typer reads the options from the signature that is made here.

    Args:
        kind: A dataclass of COMMANDS; each field is an option or an argument.
    """

    def command_of(body: Callable[[Args], None]) -> Callable[..., None]:
        @functools.wraps(body)
        def command(*, help_all: bool, **values: Any) -> None:
            body(kind(**values))

        defaults = {one.name: one.default for one in fields(kind)}  # type: ignore[arg-type]
        params = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=Annotated[
                    option.kind if option.kind is bool and defaults[name] is False
                    else option.kind | None,
                    _typer(name, option),
                ],
                default=inspect.Parameter.empty if defaults[name] is MISSING else defaults[name],
            )
            for name, option in in_order(kind)
        ]  # fmt: skip
        params.append(_HELP_ALL)
        command.__signature__ = inspect.Signature(params)  # type: ignore[attr-defined]
        command.__annotations__ = {param.name: param.annotation for param in params}
        return command

    return command_of


_HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    annotation=Annotated[
        bool,
        typer.Option(
            "--help-all",
            is_eager=True,
            callback=show_all,
            help="Show all options, the rare ones too, and exit.",
        ),
    ],
    default=False,
)


def in_order(kind: type) -> Iterator[tuple[str, Option]]:
    """Yield the options of a command by field, in the order of its help page."""
    found, known = declared(kind), [*_FIRST, *JOB]
    places = {name: place for place, name in enumerate([*known, *found])}
    order = {name: places[name] if name not in known else known.index(name) for name in found}
    yield from sorted(
        found.items(), key=lambda one: (("", *HEADINGS).index(one[1].group), order[one[0]])
    )


def flag_of(field: str, option: Option) -> str:
    """Return the flag of a field, such as --top-p or --chat/--no-chat."""
    return option.flag or f"--{field.replace('_', '-')}"


def variable_of(flag: str) -> str:
    """Return the environment variable of a flag."""
    name = flag.split("/")[0].removeprefix("--").removeprefix("no-")
    return f"BASS_{name.replace('-', '_').upper()}"


def in_flags(message: str, kind: type | None = None) -> str:
    """Replace the fields that a message names by flags: `n` by --n.

    A message that begins with a field and a colon is about the value, which may come from the
    environment, so it names the variable too.

    `kind`: The options of the command. Without it, every option has a variable.
    """
    options = {} if kind is None else declared(kind)
    unset = {flag_of(field, option) for field, option in options.items() if not option.variable}

    def shown(found: re.Match[str]) -> str:
        flag = _flags().get(found[1])
        if flag is None:
            return found[0]
        is_subject = found.start() == 0 and found.string.startswith(":", found.end())
        is_subject = is_subject and flag not in unset
        return f"{flag} (or {variable_of(flag)})" if is_subject else flag

    return _NAMED.sub(shown, message)


def unknown_variables(names: Iterable[str]) -> Iterator[str]:
    """Yield a note on each variable that begins like those of options but is of none."""
    known = {
        variable_of(flag_of(field, option)).removeprefix("BASS_")
        for kind in COMMANDS.values()
        for field, option in declared(kind).items()
        if option.group and option.variable  # arguments have no variables
    }
    for name in sorted(names):
        bare = name.removeprefix("BASS_")
        if bare not in (name, *known):
            from bass_cli.reading import unquoted  # imports yaml, which --help does not need

            near = near_word(bare, sorted(known))
            hint = f"; did you mean BASS_{near}?" if near else ""
            yield f"{unquoted(name)} sets nothing: no option has this variable{hint}"


@functools.cache
def _flags() -> dict[str, str]:
    """The flags by the names of options in messages."""
    named = {
        field: flag_of(field, option)
        for kind in COMMANDS.values()
        for field, option in declared(kind).items()
    }
    named |= {option.path: flag_of(field, option) for field, option in JOB.items()}
    return named | {"chat=True": "--chat", "chat=False": "--no-chat"}


def _typer(field: str, option: Option) -> Any:
    """Return typer's declaration of an option."""
    callback = _check_path if field in _PATHS else None
    if not option.group:
        return typer.Argument(
            callback=callback,
            metavar=option.takes,
            show_default=False,
            help=option.text,
            autocompletion=_completion(option),
        )
    flag = flag_of(field, option)
    default = "" if option.shown is None else f" [default: {option.shown}]"
    return typer.Option(
        *([_SHORT[field]] if field in _SHORT else []),
        flag,
        callback=callback,
        help=option.text + default,
        metavar=option.takes,
        rich_help_panel=option.group,
        envvar=variable_of(flag) if option.variable is True else None,
        autocompletion=_completion(option),
    )


def _completion(option: Option) -> Callable[[str], list[str]] | None:
    """Return a function of the words for shell completion; None if there are none."""
    words = [word for word in (option.takes or "").split("|") if word.islower()]
    if not option.choices and not words:
        return None

    def complete(incomplete: str) -> list[str]:
        offered = option.choices() if callable(option.choices) else option.choices
        return [word for word in (*offered, *words) if word.startswith(incomplete)]

    return complete


def _check_path(value: Any) -> Any:
    """Replace ~ in a path or a list of paths; refuse an empty one."""
    if isinstance(value, list):
        return [_check_path(one) for one in value]
    if value == "":
        raise typer.BadParameter("it is empty")
    return os.path.expanduser(value) if isinstance(value, str) else value


def reference() -> str:
    """Return the page docs/reference/options.md. It describes a shared option once, with the first
    command that has it."""
    lines = [
        "# Options",
        "",
        "`bass COMMAND --help-all` shows the same. "
        "This page is made from the declarations in `bass_cli/config`: "
        '`python -c "from bass_cli.cli.options import reference; print(reference(), end=str())"`.',
        "",
        "Precedence: default, the model's generation_config.json, pair file, environment variable, "
        "flag. The variable of `--top-p` is "
        "`BASS_TOP_P`. An option of a job that a pair file can set has its key in the second "
        "column.",
    ]
    first: dict[str, str] = {}  # the command that describes an option, by its row
    for command, kind in COMMANDS.items():
        table, shared = list[str](), dict[str, list[str]]()
        heading = None
        for field, option in in_order(kind):
            row = _row(field, option)
            if first.setdefault(row, command) != command:
                shared.setdefault(first[row], []).append(f"`{flag_of(field, option)}`")
                continue
            if option.group and option.group != heading:
                heading = option.group
                table.append(f"| **{heading}** | | | |")
            table.append(row)
        lines += ["", f"## bass {command}"]
        if table:
            lines += ["", "| option | key | default | meaning |", "|---|---|---|---|", *table]
        for other, names in shared.items():
            lines += ["", f"As for `bass {other}`: {', '.join(names)}"]
    return "\n".join(lines) + "\n"


def _row(field: str, option: Option) -> str:
    """Return an option's line of the table: form, key in a pair file, default, meaning."""
    of_pair = {one.name for one in fields(ModelOptions)}
    name = option.takes if not option.group else flag_of(field, option)
    in_pair = option.path.startswith(("sampling.", "speculation.")) or field in of_pair
    key = option.path if in_pair else ""
    value = "" if option.takes is None or not option.group else f" {option.takes}"
    cells = (f"`{name}{value}`", key and f"`{key}`", option.shown or "", option.text)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
