"""The layout of help pages, and the error line for a mistake on the command line.

A page lists options under headings and explains the terms that it uses. It is plain text, which
is fast and can be searched. A page of more than two screens leaves out rare options, which
`--help-all` shows. The options themselves: cli/options.py.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from bass_cli.config.commands import COMMANDS, GROUPS
from bass_cli.config.options import declared
from bass_cli.config.other_names import option_called
from bass_cli.errors import near_word
from bass_cli.io import terminal

EPILOG = (
    "Each option can also be set by an environment variable: BASS_N=4 is --n 4, BASS_TOP_P=0.9 is "
    "--top-p 0.9. A flag overrides the variable."
)

TWO_SCREENS = 100  # lines
ALL = (
    "bass.help_all"  # in a context's meta: True if a page shows all options, False if no rare ones
)

WORDS = {
    "pair": "a target and a draft with their settings, in a YAML file; bass pairs lists the "
            "packaged ones",
    "target": "the model that samples are drawn from",
    "draft": "tokens proposed for the target to verify, or what proposes them: a small model, some "
             "layers of the target, or a lookup in earlier text. Drafts change the speed, never "
             "the distribution of the samples",
    "sequence": "one sample of a batch; all sequences of a batch are decoded together",
    "round": "one step of a batch: draft tokens, verify them in one pass of the target, keep the "
             "accepted ones",
    "coupling": "how the target verifies drafts. Both kinds sample from the target's exact "
                "distribution: shared gives the same tokens as plain decoding with that seed, "
                "maximal accepts slightly more drafts",
    "plain decoding": "decoding without drafts, one token per round",
    "acceptance rate": "the share of drafted tokens that the target accepts",
    "controller": "the rule that chooses the draft length before each round",
    "Pass@First": "the share of problems whose most likely sample, of those finished in time, "
                  "passes",
    "Pass@All": "the share of problems for which at least one sample passes",
    "pass@k": "the probability that at least one of k samples passes",
}  # fmt: skip


class Command(TyperCommand):
    """A command whose help page explains its terms and lists its options under headings."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the page; without rare options if it would fill more than two screens."""
        super().format_help(ctx, formatter)
        if not ctx.meta.get(ALL) and formatter.getvalue().count("\n") > TWO_SCREENS:
            formatter.buffer.clear()
            ctx.meta[ALL] = False
            super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments, after flags that stand alone were given their values."""
        options = declared(COMMANDS[str(self.name)])
        bare = {
            form: option.bare
            for param in self.params
            for form in param.opts
            if (option := options.get(str(param.name))) is not None and option.bare is not None
        }
        return super().parse_args(ctx, with_bare_values(args, bare))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        options, is_short = declared(COMMANDS[str(self.name)]), ctx.meta.get(ALL) is False
        hidden = {name for name, option in options.items() if is_short and option.rare}
        if not is_short:
            hidden.add("help_all")
        params = [param for param in self.get_params(ctx) if param.name not in hidden]
        _write(params, formatter, _paragraph(self))


def with_bare_values(args: Sequence[str], bare: Mapping[str, str]) -> list[str]:
    """Add the values of flags without one, such as --logprobs. `bare`: these values by flag."""
    filled = list[str]()
    for place, arg in enumerate(args):
        if arg == "--":
            return [*filled, *args[place:]]
        alone = arg in bare and not "".join(args[place + 1 : place + 2]).isdigit()
        filled.append(f"{arg}={bare[arg]}" if alone else arg)
    return filled


def show_all(ctx: typer.Context, wanted: bool) -> None:
    """Show the page with all options if it is wanted, and end the command."""
    if wanted:
        ctx.meta[ALL] = True
        for one in ctx.get_help().split("\n"):
            terminal.line(one, stdout=True)
        raise typer.Exit


class Group(TyperGroup):
    """The program, whose help page also lists the commands, each with a full sentence."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command. A mistake on the command line ends with one error line and exit code 2."""
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
            if not standalone_mode:
                return code
        except Exception as error:
            if not standalone_mode or not hasattr(error, "format_message"):
                raise  # not an error of the parser
            _report(error)
            sys.exit(error.exit_code)  # type: ignore[attr-defined]
        sys.exit(code if isinstance(code, int) else 0)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        texts = {name: _paragraph(command) for name, command in self.commands.items()}
        for heading, group in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, texts[name]) for name in group])
        text = " ".join([_paragraph(self), *texts.values()])
        _write(self.get_params(ctx), formatter, text)


def words_in(text: str) -> list[str]:
    """Return the terms of WORDS that a text uses, and the terms that their explanations use."""
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


def _write(params: list[Any], formatter: Any, text: str) -> None:
    groups: dict[str, list[tuple[str, str]]] = {}
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
    """Return the forms of an option with its metavar: "-h, --help" or "--n N"."""
    names = ", ".join(sorted(param.opts, key=len)) + "".join(
        f" / {name}" for name in param.secondary_opts
    )
    return names if param.is_flag else f"{names} {param.metavar or param.name.upper()}"


def _paragraph(command: Any) -> str:
    """Return the first paragraph of a command's docstring in one line."""
    return " ".join(inspect.cleandoc(command.help or "").split("\n\n")[0].split())


def _report(error: Any) -> None:
    """Write a parser error like all other errors. `bass` alone shows the help page instead."""
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
        path = option_called(name) or ""
        near: str | None = f"--{path.rpartition('.')[2].replace('_', '-')}"
        if near not in known:
            near = near_word(name, [form for form in known if form.startswith("--")])
        key = name.strip("-").replace("-", "_")
        if "--pair" in known and key in ("tokenizer", "lora"):
            return f"there is no option {name}; write {key} into the file for --pair"
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
    if hasattr(error.__cause__, "errors"):  # newer versions of typer check values with pydantic
        from bass_cli.config.validation import reason_of

        return f"{name}{variable}: {reason_of(error.__cause__.errors(include_url=False)[0])}"
    return f"{name}{variable}: {_lowered(error.message)}"


def _lowered(sentence: str) -> str:
    """Return a sentence of the parser without capital and full stop, for use after a colon."""
    return (sentence[:1].lower() + sentence[1:]).removesuffix(".")
