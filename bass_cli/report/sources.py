"""Find the files of samples that the arguments of `bass report` name.

An argument is a file of samples, a report of `bass score` or `bass eval` on one, or the report of a
sweep on several. runs.py reads the samples.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bass_cli.errors import UserError
from bass_cli.eval.stores import verdicts_path
from bass_cli.io.linefile import journal_of, name_beside, stem_of
from bass_cli.io.resume import manifest_path
from bass_cli.reading import finite, parse_object, read_bytes

_REPORT_BYTES = 1 << 28  # most bytes of a report; a problem takes some 300
_BY_METHOD = re.compile(r"\.(plain|single|batched)-([0-9.e+-]+)s$")  # see eval/sweep.py


class Source(NamedTuple):
    """A file of samples, and the report that named it or that is beside it.

    Attributes:
        path: the file of samples.
        report: the report's document. Empty if there is none.
        name: a short name, which differs between the sources of a page.
    """

    path: str
    report: dict[str, Any]
    name: str = ""

    @property
    def method(self) -> str | None:
        """The method of a sweep's file: plain, single or batched."""
        found = _BY_METHOD.search(stem_of(self.path))
        return found[1] if found else None

    def verdict_paths(self) -> list[str]:
        """Return the files that may have verdicts on the samples."""
        stem = stem_of(self.path)
        shared = _BY_METHOD.sub("", stem)  # the files of a sweep share their verdicts
        suffix = self.path[len(stem) :]
        paths = [self.path, *([f"{shared}{suffix}"] if shared != stem else [])]
        return [verdicts_path(path) for path in paths]

    def state(self) -> tuple[Any, ...]:
        """Return what changes when one of the files that the samples are read from changes."""
        journal = journal_of(self.path)
        names = [self.path, str(manifest_path(self.path)), _report_path(self.path)]
        names += [*self.verdict_paths(), *([journal] if journal else [])]
        return tuple(map(_state_of, names))


def _state_of(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def find_sources(paths: Sequence[str]) -> list[Source]:
    """Return the files of samples that the arguments name, each once.

    UserError if a report cannot be read or names a file that is missing.
    """
    found: dict[str, Source] = {}
    for path in paths:
        for source in _sources(path):
            found.setdefault(os.path.realpath(source.path), source)
    names = _short_names([source.path for source in found.values()])
    return [one._replace(name=name) for one, name in zip(found.values(), names, strict=True)]


def _sources(path: str) -> Iterator[Source]:
    document = _document(path) if path.lower().endswith(".json") else {}
    if isinstance(document.get("reports"), list):
        for one in document["reports"]:
            if not isinstance(one, dict) or not isinstance(one.get("file"), str):
                raise UserError(f'{path}: field "reports": each entry must name a file')
            yield _with_report(_file_of(path, one["file"]))
    elif "by_problem" in document:
        if not isinstance(document.get("file"), str):
            raise UserError(f'{path}: field "file": it must be a text')
        yield Source(_file_of(path, document["file"]), document)
    elif document:
        raise UserError(
            f"{path}: this is not a report of bass; give a file of samples, or a report of "
            "bass score or bass eval"
        )
    else:
        yield _with_report(path)


def _document(path: str) -> dict[str, Any]:
    """Return the JSON document of a file. Empty if it has lines of samples."""
    try:
        content = read_bytes(path, _REPORT_BYTES)
        return parse_object(content)
    except OSError as error:
        raise UserError(f"{path}: cannot read it: {error.strerror or error}") from None
    except ValueError:
        return {}


def _file_of(report: str, named: str) -> str:
    """Return the file of samples that a report names: from here, or beside the report."""
    beside = str(Path(report).parent / Path(named).name)
    for path in (named, beside):
        if os.path.exists(path):
            return path
    raise UserError(f"{report}: its file of samples {named} is missing (looked for {beside} too)")


def _with_report(path: str) -> Source:
    beside = _report_path(path)
    document = _document(beside) if os.path.exists(beside) else {}
    return Source(path, document if "by_problem" in document else {})


def _report_path(path: str) -> str:
    return name_beside(path, ".report.json")


def quality_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of quality in a report's document: estimates, and the values by name.

    Empty if the document has none, or if one of them has the wrong type.
    """

    def share(value: Any) -> float | None:
        return None if value is None else finite(value)

    try:
        found: dict[str, Any] = {
            "estimates": {
                str(name): {
                    "value": finite(one["value"]),
                    "standard_error": share(one["standard_error"]),
                    "interval": one["interval"] and [finite(bound) for bound in one["interval"]],
                }
                for name, one in document["estimates"].items()
            }
        }
        for key in ("pass_first", "pass_first_of_finished", "pass_all"):
            found |= {key: share(document[key])} if "pass_first" in document else {}
        at_k = document.get("pass_at_k", {})
        found |= {"pass_at_k": {k: share(at_k[k]) for k in sorted(at_k, key=int)}}
        if by := document.get("pass_first_by"):
            found |= {"pass_first_by": {name: share(value) for name, value in by.items()}}
    except (AttributeError, LookupError, TypeError, ValueError):
        return {}
    return found | ({"rouge": document["rouge"]} if "rouge" in document else {})


def _short_names(paths: list[str]) -> list[str]:
    """Return the shortest ends of the paths that differ."""
    parts = [Path(path).parts for path in paths]
    for length in range(1, max(map(len, parts), default=0)):
        names = ["/".join(one[-length:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return paths
