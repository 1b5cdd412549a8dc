"""Run the command `bass` in this process and read what it wrote. No tests."""

from __future__ import annotations

import json
from os import PathLike
from typing import Any

from typer.testing import CliRunner, Result

from bass_cli.cli.commands import app
from bass_cli.io.linefile import result_lines


def cli(*words: object, code: int | None = None, **settings: Any) -> Result:
    """Run `bass` with these words; `code` is its exit code, if it is known."""
    result = CliRunner().invoke(app, [str(word) for word in words], **settings)
    assert code in (None, result.exit_code), result.output
    return result


def rows_in(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines."""
    with open(path, "rb") as stream:
        return [json.loads(line) for line in result_lines(stream, str(path))]
