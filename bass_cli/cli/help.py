"""How `--help` looks, and how a mistake in the command line is reported: options in named groups,
nothing cut, the words that a page uses explained on that page.

Plain text, so that it is there at once and can be searched. Not here: what the options are
(cli/options.py).
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

from bass_cli.errors import near_word
from bass_cli.io import terminal

EPILOG = (
    "Every option has a variable too: BASS_N=4 stands for --n 4, BASS_TOP_P=0.9 for --top-p "
    "0.9. A flag overrides it."
)

WORDS = {
    "pair": "a target and its draft, with settings, in a YAML file; those that come with bass "
            "have names (bass pairs)",
    "target": "the model whose samples are wanted",
    "draft": "what guesses tokens ahead of the target, and the guesses: a small model, some of the "
             "target's own layers, or a look-up in text that is there already. A draft changes the "
             "speed, never what the samples are worth",
    "row": "a sample while it is being drawn; the rows of a batch are decoded at once",
    "round": "one step of all rows: tokens are drafted, the target checks them in one pass, rows "
             "keep those that stand",
    "coupling": "how the target checks drafts. With both kinds samples follow the target's own "
                "distribution, exactly: shared gives the very tokens of plain decoding with that "
                "seed, maximal keeps a few more drafts",
    "plain decoding": "without drafts, one token a round",
    "acceptance": "the share of the drafted tokens that the target keeps",
    "controller": "what chooses the draft length before every round",
    "Pass@First": "the share of problems whose likeliest sample that was finished in time passes",
    "Pass@All": "the share of problems that any sample passes",
    "pass@k": "the chance that one of k samples passes",
}  # fmt: skip


class Command(TyperCommand):
    """A command whose help has the words it uses and its options by group."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write(self, ctx, formatter, _paragraph(self))


class Group(TyperGroup):
    """The program itself: the same, and what each command is for in whole sentences."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command. A mistake in the command line gets one error line and exit code 2."""
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
            if not standalone_mode:
                return code
        except Exception as error:
            if not standalone_mode or not hasattr(error, "format_message"):
                raise  # it is not one of the parser's
            _report(error)
            sys.exit(error.exit_code)  # type: ignore[attr-defined]
        sys.exit(code if isinstance(code, int) else 0)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, _paragraph(self.commands[name])) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(commands)
        _write(self, ctx, formatter, " ".join([_paragraph(self), *(text for _, text in commands)]))


def words_in(text: str) -> list[str]:
    """The words of WORDS in a text, and those that explaining them needs."""
    found: list[str] = []
    waiting = [text]
    while waiting:
        text = waiting.pop()
        used = [
            word for word in WORDS if re.search(rf"\b{word}(s|ed|ing)?(?!\w)", text, re.IGNORECASE)
        ]
        new = [word for word in used if word not in found]
        found += new
        waiting += [WORDS[word] for word in new]
    return [word for word in WORDS if word in found]


def _write(command: TyperCommand | TyperGroup, ctx: Any, formatter: Any, text: str) -> None:
    groups: dict[str, list[tuple[str, str]]] = {}
    params: list[Any] = command.get_params(ctx)
    for param in params:
        if not getattr(param, "hidden", False):
            is_argument = param.param_type_name == "argument"
            group = getattr(param, "rich_help_panel", None) or (
                "Arguments" if is_argument else "Other"
            )
            groups.setdefault(group, []).append(
                (param.metavar if is_argument else _names(param), param.help or "")
            )
    words = words_in(
        " ".join([text, *(part for rows in groups.values() for row in rows for part in row)])
    )
    if words:
        with formatter.section("Words"):
            formatter.write_dl([(word, WORDS[word]) for word in words])
    for group, rows in groups.items():
        with formatter.section(group):
            formatter.write_dl(rows)


def _names(param: Any) -> str:
    """The option's forms and what it takes: -h, --help or --n N."""
    names = ", ".join(sorted(param.opts, key=len)) + "".join(
        f" / {name}" for name in param.secondary_opts
    )
    return names if param.is_flag else f"{names} {param.metavar or param.name.upper()}"


def _paragraph(command: Any) -> str:
    """What a command is for: its help up to the first blank line."""
    return " ".join(inspect.cleandoc(command.help or "").split("\n\n")[0].split())


def _report(error: Any) -> None:
    """Write the parser's error in the form of all others; the help page where nothing was given."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return
    context = getattr(error, "ctx", None)
    sentence = _sentence(error, context)
    if context is not None and not sentence.endswith("?"):  # that is a suggestion
        sentence += f"; see {context.command_path} --help"
    terminal.error(sentence)


def _sentence(error: Any, context: Any) -> str:
    kind, param = type(error).__name__, getattr(error, "param", None)
    if kind == "NoSuchOption":
        name = error.option_name
        options = [] if context is None else context.command.get_params(context)
        known = [form for one in options for form in (*one.opts, *one.secondary_opts)]
        near = near_word(name, [form for form in known if form.startswith("--")])
        return f"there is no option {name}" + (f'; did you mean "{near}"?' if near else "")
    if kind == "BadOptionUsage":
        reason = re.sub(r"^Option '.*?' (?=requires|does)", "it ", error.message, flags=re.DOTALL)
        return f"{error.option_name}: {_lowered(reason)}"
    if param is None:
        unknown = re.fullmatch(r"No such command (?s:(.*?))\.(?: Did you mean.*)?", error.message)
        if unknown is None:
            return _lowered(error.message)
        name = unknown[1].strip("'\"")
        near = near_word(name, context.command.list_commands(context))
        return f'there is no command "{name}"' + (f'; did you mean "{near}"?' if near else "")
    is_argument = param.param_type_name == "argument"
    name = (param.metavar or param.name.upper()) if is_argument else max(param.opts, key=len)
    variable = f" (or {param.envvar})" if param.envvar else ""
    if kind == "MissingParameter":
        return f"{name}{variable}: it is missing"
    if hasattr(error.__cause__, "errors"):  # newer versions of typer check values by pydantic
        from bass_cli.config.fields import reason_of

        return f"{name}{variable}: {reason_of(error.__cause__.errors(include_url=False)[0])}"
    return f"{name}{variable}: {_lowered(error.message)}"


def _lowered(sentence: str) -> str:
    """A sentence of the parser's, to go on after a colon."""
    return (sentence[:1].lower() + sentence[1:]).removesuffix(".")
