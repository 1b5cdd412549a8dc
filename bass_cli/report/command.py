"""Run `bass report`: check the options, read the files, and write the page or serve it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from bass_cli.config.evaluation_commands import ReportArgs
from bass_cli.errors import MachineError, UserError
from bass_cli.eval.scoring import read_timeout
from bass_cli.io.console import Screen
from bass_cli.io.linefile import name_beside
from bass_cli.io.resume import manifest_path
from bass_cli.io.saving import (
    check_place,
    is_stream,
    refuse_foreign,
    refuse_shared_files,
    write_file,
)
from bass_cli.reading import os_errors_as, shown
from bass_cli.report.runs import Reader
from bass_cli.report.sources import find_sources

_PORTS = 65535
_MOST_RUNS = 50  # files of a page; charts and tables with more could not be read
_MARK = b'<meta name="generator" content="bass report">'  # within the first bytes of a page
_MARK_BYTES = 2048


def run(args: ReportArgs, screen: Screen) -> None:
    """Write the page, or serve it until the command is interrupted.

    Raises:
        UserError: an option or a line is invalid.
        MachineError: jinja2 is missing, or the page cannot be written or served.
    """
    if args.port is not None and not args.serve:
        raise UserError("`port`: it is the port of `serve`; add that or leave `port` out")
    if args.port is not None and not 0 < args.port <= _PORTS:
        raise UserError(f"`port`: a number from 1 to {_PORTS} is needed (got {shown(args.port)})")
    if args.serve and args.out is not None:
        raise UserError("`serve` and `out` cannot be used together; leave one of the two out")
    if args.serve and args.overwrite:
        raise UserError("`overwrite`: `serve` writes no file; leave one of the two out")
    if importlib.util.find_spec("jinja2") is None:
        raise MachineError(
            "bass report needs jinja2, which is not installed: pip install 'bass-cli[report]'"
        )
    timeout = read_timeout(args.timeout)
    sources = find_sources(args.runs)
    if len(sources) > _MOST_RUNS:
        raise UserError(f"a page shows at most {_MOST_RUNS} files (got {len(sources)})")
    how = {"task": args.task, "data": args.data, "model": args.model}
    readers = [Reader(one, timeout=timeout, **how) for one in sources]
    if args.serve:
        from bass_cli.report.server import serve

        serve(readers, args.port, screen)
        return
    paths = [one.path for one in sources]
    out = args.out or name_beside(paths[0], ".html")
    _check_out(out, [*args.runs, *paths, args.data], overwrite=args.overwrite)
    runs = []
    with screen.counting("files read", len(readers)) as progress:
        for number, reader in enumerate(readers, 1):
            found = reader.read()
            if not found.file.rows:
                raise UserError(f"{found.source.path}: the file has no samples")
            runs.append(found)
            progress(number, len(readers))
    from bass_cli.report.page import render

    screen.phase("writing the page", live=False)
    content = render(runs)
    with os_errors_as(MachineError, f"`out` {out}: cannot write the page"):
        write_file(out, content)
    samples = sum(len(one.file.rows) for one in runs)
    screen.note(f"{out}: {samples:,} samples, {len(content) / 1e6:.1f} MB")


def _check_out(out: str, inputs: list[str | None], *, overwrite: bool) -> None:
    """Raise UserError if the page cannot be written, or would replace another kind of file."""
    if is_stream(out):
        raise UserError(f"`out` {out}: give a file name, such as page.html")
    if not out.lower().endswith((".html", ".htm")):
        raise UserError(f"`out` {out}: a page is an HTML file; use a name that ends in .html")
    check_place(f"`out` {out}", out)
    read = [("the file", path) for path in inputs if path is not None]
    read += [("the manifest", str(manifest_path(path))) for _, path in read]
    refuse_shared_files([("`out`", out)], read)
    if not overwrite and Path(out).exists():
        _refuse_other(out)


def _refuse_other(out: str) -> None:
    """Raise UserError if the file is not an earlier page. Pages may be larger than other files."""
    with os_errors_as(UserError, f"`out` {out}: it cannot be read"), open(out, "rb") as stream:
        if _MARK in stream.read(_MARK_BYTES):
            return
    refuse_foreign(f"`out` {out}", out, lambda content: False, kind="a page of bass report")
