"""Benches of tiny models on a CPU, for the tests of `bass bench`."""

from __future__ import annotations

from typing import Any

from command_line import cli

from bass_cli.bench import grid
from bass_cli.bench.settings import make_settings
from bass_cli.config.machine_commands import BenchArgs
from bass_cli.io.console import Screen

SET = {"shape": "tiny", "draft_shape": "tiny", "acceptance": ["0.7"]}
SCALED = {"shape": "tiny", "depth": 2, "scale": 0.2}
SMALL = ("--prompt-tokens", "12", "--new-tokens", "12", "--repeats", "2", "--json")


def settings(**given: Any) -> Any:
    small = {
        "prompt_tokens": 12,
        "new_tokens": 12,
        "repeats": 1,
        "device": "cpu",
        "batch_sizes": "3",
        "methods": "3",
    }
    return make_settings(BenchArgs(**small | given))


def measured(**given: Any) -> dict[str, dict[str, Any]]:
    """Return the cells of a bench with one batch size, by method."""
    [document] = grid.measure(settings(**given), Screen(quiet=True))
    assert document["failures"] == []
    return {cell["method"]: cell for cell in document["cells"]}


def bench(*arguments: str) -> Any:
    return cli("bench", *arguments, catch_exceptions=False)
