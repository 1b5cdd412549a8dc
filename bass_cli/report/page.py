"""Make the page: one HTML file with its styles, scripts and data, which needs no network.

The data of a run is in chunks: JSON, compressed and in base64, which the page expands when it needs
them. All of it is data to the page, which sets text and never markup. A content security policy
allows only the page's own script and style, and no request.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from importlib import resources
from typing import Any, NamedTuple

from bass_cli import __version__
from bass_cli.eval import report
from bass_cli.eval.setting import OF_A_RUN, flat, setting_of
from bass_cli.io.resume import part_of
from bass_cli.report.charts import charts_of
from bass_cli.report.runs import Run, packed

# JSON bytes of a chunk: small enough to expand at once when a sample is opened, large enough to
# compress well
CHUNK = 1 << 20
_LEVEL = 6  # of zlib: level 9 takes twice the time for 1 % less
_SCRIPTS = ("text.js", "data.js", "charts.js", "table.js", "sample.js", "main.js")
_COLUMNS = ("sample", "tokens", "seconds", "mean_logprob", "rounds", "drafted", "accepted")
_DIGITS = 5  # decimals of numbers in columns
_ENCODED = {"errors": "backslashreplace"}  # a lone surrogate becomes its escape in JSON


class Chunk(NamedTuple):
    """A part of a run's data.

    Attributes:
        run: the run's number.
        kind: columns, texts, extras, prompts or verdicts.
        start: the number of the first sample, or of the first prompt.
        size: how many.
        data: a JSON list or object, compressed with zlib, in base64.
    """

    run: int
    kind: str
    start: int
    size: int
    data: str


def chunks_of(run: Run, number: int, start: int = 0) -> Iterator[Chunk]:
    """Yield the chunks of a run's samples from `start` on, and of their prompts."""
    rows = run.file.rows[start:]
    places = {name: place for place, name in enumerate(run.prompts)}
    before = {row.task_id for row in run.file.rows[:start]}
    names = [name for name in places if name not in before]
    reasons = list(dict.fromkeys(row.finish_reason or "" for row in rows))
    columns: dict[str, Any] = {
        "prompts": names,
        "prompt": [places[row.task_id] for row in rows],
        "reasons": reasons,
        "reason": [reasons.index(row.finish_reason or "") for row in rows],
        "finished": [int(row.finished) for row in rows],
        "digest": [zlib.crc32(row.text.encode("utf-8", "surrogatepass")) for row in rows],
    }
    columns |= {key: [_short(getattr(row, key)) for row in rows] for key in _COLUMNS}
    yield _chunk(number, "columns", start, len(rows), packed(columns))
    yield from _listed(
        number, "prompts", len(before), [packed(run.prompts[name]) for name in names]
    )
    yield from _listed(number, "texts", start, (packed(row.text) for row in rows))
    yield from _listed(number, "extras", start, run.extras[start:])


def verdicts_of(run: Run, number: int) -> Chunk:
    """Return the chunk of the verdicts on all samples. Equal words are listed once."""
    columns: dict[str, Any] = {}
    for name, words in run.outlines._asdict().items():
        known = {word: place for place, word in enumerate(dict.fromkeys(words))}
        columns[name] = {"words": list(known), "at": [known[word] for word in words]}
    return _chunk(number, "verdicts", 0, len(run.file.rows), packed(columns))


def _short(value: float | None) -> float | None:
    return round(value, _DIGITS) if isinstance(value, float) else value


def _listed(run: int, kind: str, start: int, items: Iterable[str]) -> Iterator[Chunk]:
    """Yield chunks of JSON lists with about CHUNK characters each."""
    waiting: list[str] = []
    size = 0
    for item in items:
        waiting.append(item)
        size += len(item)
        if size >= CHUNK:
            yield _chunk(run, kind, start, len(waiting), f"[{','.join(waiting)}]")
            start, waiting, size = start + len(waiting), [], 0
    if waiting:
        yield _chunk(run, kind, start, len(waiting), f"[{','.join(waiting)}]")


def _chunk(run: int, kind: str, start: int, count: int, content: str) -> Chunk:
    data = zlib.compress(content.encode("utf-8", **_ENCODED), _LEVEL)
    return Chunk(run, kind, start, count, base64.b64encode(data).decode("ascii"))


def head_of(runs: Sequence[Run]) -> dict[str, Any]:
    """Return what the page shows before any sample is opened: settings, figures and charts."""
    return {
        "runs": [
            {
                "name": run.source.name,
                "task": run.figures["task"],
                "samples": len(run.file.rows),
                "prompts": len(run.prompts),
                "judged": bool(run.judged),
                "headline": _headline(run),
                "figures": report.lines(run.figures),
                "settings": settings,
                "run": of_run,
                "notes": run.notes,
            }
            for run, (settings, of_run) in ((run, settings_of(run)) for run in runs)
        ],
        "charts": charts_of(runs),
        "version": __version__,
        "made": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _headline(run: Run) -> list[list[str]]:
    """Return the few figures that are shown large, as [name, value]."""
    figures = run.figures
    shown: list[list[str]] = []
    names = {"Pass@First": "pass_first", "pass@1": "pass@1", "Pass@All": "pass_all"}
    names |= {"ROUGE-L of the first": "first.rougeL"}
    for name, key in names.items():
        if key in figures["estimates"]:
            shown.append([name, report.with_error(figures, key)])
    shown.append(["samples", f"{figures['samples']:,}"])
    if figures["tokens_per_second"] is not None:
        shown.append(["tokens a second", f"{figures['tokens_per_second']:,.0f}"])
    if figures["acceptance_rate"] is not None:
        shown.append(["accepted drafts", report.percent(figures["acceptance_rate"])])
    return shown


def settings_of(run: Run) -> tuple[dict[str, str], dict[str, str]]:
    """Return the settings of a run, and what belongs to the run alone, by name, as text.

    What is not recorded is left out.
    """
    found = flat(setting_of(run.file))
    of_run = {key: found.pop(key, None) for key in OF_A_RUN}
    of_run["seconds"] = part_of(run.file.manifest, "totals").get("seconds")
    return _texts(found), _texts(of_run)


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {
        key.replace("_", " ").replace(".", ": "): value if isinstance(value, str) else packed(value)
        for key, value in values.items()
        if value is not None and value != []
    }


def render(runs: Sequence[Run]) -> bytes:
    """Return the page of these runs."""
    chunks = [
        chunk
        for number, run in enumerate(runs)
        for chunk in (*chunks_of(run, number), verdicts_of(run, number))
    ]
    return _page(head_of(runs), chunks)


def render_live(interval: float) -> bytes:
    """Return a page without data, which fetches it from its server every `interval` seconds."""
    return _page({"runs": [], "charts": [], "live": interval, "version": __version__}, [])


def _page(head: dict[str, Any], chunks: Sequence[Chunk]) -> bytes:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    folder = resources.files("bass_cli.report")
    style = (folder / "page.css").read_text(encoding="utf-8")
    parts = [(folder / name).read_text(encoding="utf-8") for name in _SCRIPTS]
    script = '"use strict";\n' + "\n".join(parts)
    live = "live" in head
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        f"connect-src {_SELF if live else _NONE}; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    directory = [[*chunk[:4]] for chunk in chunks]
    environment = Environment(
        loader=PackageLoader("bass_cli.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html").render(
        title=_title([run["name"] for run in head["runs"]]),
        policy=policy,
        style=Markup(style),
        script=Markup(script),
        head=Markup(_in_script({**head, "chunks": directory})),
        chunks=[chunk.data for chunk in chunks],
    )
    return page.encode("utf-8", "replace")


def _title(names: Sequence[str]) -> str:
    return f"{len(names)} runs" if len(names) > _NAMED else ", ".join(names) or "live"


_NAMED = 3  # most runs that the title names
_SELF, _NONE = "'self'", "'none'"


def _hash(content: str) -> str:
    """Return the source expression of a script or a style in a content security policy."""
    digest = hashlib.sha256(content.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


def _in_script(value: Any) -> str:
    """Return JSON that cannot end the script element that it is in; it is ASCII."""
    text = json.dumps(value, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
