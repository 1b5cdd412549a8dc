"""Read a page of `bass report` as an HTML parser sees it, with the data in it."""

from __future__ import annotations

import base64
import json
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


class Page(HTMLParser):
    """The elements of a page.

    Attributes:
        scripts: (attributes, content) of every script element; `styles`: contents of style elements.
        metas: attributes of every meta element; `tags`: names of all elements, in order.
    """

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.styles: list[str] = []
        self.metas: list[dict[str, str | None]] = []
        self.tags: list[str] = []
        self._inside = ""
        self.feed(content.decode("utf-8"))
        self.close()

    @classmethod
    def read(cls, path: str | Path) -> Page:
        return cls(Path(path).read_bytes())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._inside = tag
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        elif tag == "style":
            self.styles.append("")
        elif tag == "meta":
            self.metas.append(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            attributes, content = self.scripts[-1]
            self.scripts[-1] = attributes, content + data
        elif self._inside == "style":
            self.styles[-1] += data

    @property
    def policy(self) -> str:
        """The content security policy."""
        (found,) = [
            one["content"] or ""
            for one in self.metas
            if one.get("http-equiv") == "Content-Security-Policy"
        ]
        return found

    @property
    def code(self) -> list[str]:
        """The scripts that a browser would run."""
        data = ("text/plain", "application/json")
        return [text for attributes, text in self.scripts if attributes.get("type") not in data]

    @property
    def head(self) -> dict[str, Any]:
        (found,) = [text for attributes, text in self.scripts if attributes.get("id") == "head"]
        return json.loads(found)

    def runs(self) -> list[dict[str, Any]]:
        """Return the data of each run: columns, texts, extras, prompts, verdicts."""
        contents = {attributes.get("id"): text for attributes, text in self.scripts}
        chunks = [
            [*chunk, contents[f"c{number}"]] for number, chunk in enumerate(self.head["chunks"])
        ]
        return runs_of(chunks)


def runs_of(chunks: list[list[Any]]) -> list[dict[str, Any]]:
    """Return the data of each run in chunks (run, kind, start, size, data)."""
    runs: dict[int, dict[str, Any]] = {}
    for run, kind, start, size, data in chunks:
        value = json.loads(zlib.decompress(base64.b64decode(data)))
        into = runs.setdefault(run, {"texts": [], "extras": [], "prompts": []})
        if isinstance(value, dict):
            into[kind] = value
        else:
            assert len(value) == size
            assert len(into[kind]) == start or not into[kind]
            into[kind] += value
    return [runs[run] for run in sorted(runs)]
