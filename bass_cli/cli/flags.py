"""What an option of the command line is, and the headings of a help page. Not here: which options
there are (options.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import typer

MODELS, SAMPLING, DRAFTING = (
    "Models",
    "Sampling",
    "Drafting (changes the speed, not what samples are worth)",
)
SHORT = {"n": "-n", "out": "-o"}  # by field
MACHINE, PROMPTS, OUTPUT = "Time and machine", "Prompts and data", "Output"
JOB, MEASURED, RANDOM, SCORING = (
    "A whole job",
    "What is measured",
    "Random weights, without any download",
    "Scoring",
)


class Flag(NamedTuple):
    """An option, by the words of its help. `group`: its heading there; "" for an argument.
    `takes`: what its value is called, None for a switch. `default`: shown, not set. `choices`:
    what shell completion offers beside the words in `takes`. `flag`: if it is not the field's
    name. `variable`: whether BASS_ and the flag may say it too."""

    text: str
    group: str
    takes: str | None = None
    default: str | None = None
    choices: tuple[str, ...] | Callable[[str], list[str]] = ()
    flag: str | None = None
    variable: bool = True

    def info(self, field: str) -> Any:
        """As typer has it."""
        if not self.group:
            return typer.Argument(
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
