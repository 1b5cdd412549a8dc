"""The form of a command-line option, and the headings of a help page.

Which options there are: options.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import typer

MODELS, SAMPLING, DRAFTING = (
    "Models",
    "Sampling",
    "Drafting (changes the speed, not the distribution)",
)
SHORT = {"n": "-n", "out": "-o"}  # by field
# Fields with file names, in which ~ is expanded: shells do not expand it after "=".
_PATHS = {"prompts", "file", "names", "pair", "job", "data", "out", "report", "parts", "plot"}
MACHINE, PROMPTS, OUTPUT = "Time and machine", "Prompts and data", "Output"
JOB, MEASURED, RANDOM, SCORING = (
    "A whole job",
    "What is measured",
    "Random weights, without any download",
    "Scoring",
)


class Flag(NamedTuple):
    """An option, or an argument, and the words of its help.

    Attributes:
        text: The sentence on the help page.
        group: The heading above the option; "" for an argument.
        takes: The name of its value (a metavar); None for a switch.
        default: Shown on the help page. It sets nothing.
        choices: Words for shell completion, beside those in `takes`.
        flag: The option's name, if it differs from the field's.
        variable: Whether an environment variable BASS_NAME sets the option too.
    """

    text: str
    group: str
    takes: str | None = None
    default: str | None = None
    choices: tuple[str, ...] | Callable[[str], list[str]] = ()
    flag: str | None = None
    variable: bool = True

    def info(self, field: str) -> Any:
        """Return typer's declaration of the option for a field."""
        callback = _check_path if field in _PATHS else None
        if not self.group:
            return typer.Argument(
                callback=callback,
                metavar=self.takes,
                show_default=False,
                help=self.text,
                autocompletion=self._completion(),
            )
        flag = self.flag or f"--{field.replace('_', '-')}"
        variable = f"BASS_{flag.split('/')[0].removeprefix('--').replace('-', '_').upper()}"
        return typer.Option(
            *([SHORT[field]] if field in SHORT else []),
            flag,
            callback=callback,
            help=self.text if self.default is None else f"{self.text} [default: {self.default}]",
            metavar=self.takes,
            rich_help_panel=self.group,
            envvar=variable if self.variable else None,
            autocompletion=self._completion(),
        )

    def _completion(self) -> Callable[[str], list[str]] | None:
        if callable(self.choices):
            return self.choices
        offered = [
            *self.choices,
            *(word for word in (self.takes or "").split("|") if word.islower()),
        ]
        return (
            (lambda incomplete: [one for one in offered if one.startswith(incomplete)])
            if offered
            else None
        )


def _check_path(value: Any) -> Any:
    """Replace ~ in a path or a list of paths; refuse an empty one."""
    if isinstance(value, list):
        return [_check_path(one) for one in value]
    if value == "":
        raise typer.BadParameter("it is empty")
    return os.path.expanduser(value) if isinstance(value, str) else value
