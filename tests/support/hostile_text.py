"""A text that acts on a terminal in every known way, and a check that output does not hold any of
it. Not here: hostile programs (hostile.py)."""

from __future__ import annotations

import os
import pty
import re
import unicodedata
from pathlib import Path

from forked import Forked, run_forked

# title, clipboard, colour, lines that look like others, eight-bit codes, directions, separators,
# rich's markup and emoji, a tag, a zero-width character
TEXT = (
    "x\x1b]0;title\x07\x1b]52;c;Zm9v\x07\x1b[31m\nforged: a line\r\x9b2J\x85\x7f\u202egnp"
    "\u2066\u200f\u2028forged: another\u2029[red]y[/red]:warning:\U000e0041\u200b"
)
FILE = TEXT.replace("/", "|")  # as the name of a file
# what a terminal display of rich and a terminal's own line ends consist of
_DISPLAY = re.compile(r"\x1b\[(?:\?25[lh]|2K|1?A|[01]m|9[01]m)|\r")


def check_harmless(output: str, *, terminal: bool = False) -> None:
    """AssertionError if a character acts on a terminal, or a line was forged."""
    if terminal:
        output = _DISPLAY.sub("", output)
    assert not any(line.startswith("forged") for line in output.splitlines()), output
    bad = [
        one
        for one in output
        if unicodedata.category(one) in ("Cc", "Cf", "Cs", "Zl", "Zp") and one not in "\n\t"
    ]
    assert bad == [], (bad, output)


def both_outputs(
    code: str, *arguments: str, cwd: Path, env: dict[str, str] | None = None
) -> tuple[int, str, str]:
    """The exit code of a program, and its two streams together: in pipes, and on a terminal."""
    piped = run_forked(code, *arguments, cwd=cwd, env=env)
    first, second = pty.openpty()
    process = Forked(code, *arguments, cwd=cwd, env=env, stdout=second, stderr=second)
    os.close(second)
    read = b""
    while True:
        try:
            part = os.read(first, 65536)
        except OSError:  # Linux says so when the last writer has closed it
            break
        if not part:
            break
        read += part
    os.close(first)
    assert process.wait(60) == piped.returncode
    return piped.returncode, piped.stdout + piped.stderr, read.decode("utf-8", "surrogateescape")
