"""Serve the page of running jobs on 127.0.0.1, with updates as their files grow.

The server answers two addresses, the page and its data, below a random word that other users of the
machine cannot guess. A request for another host is refused, so no web site can read the samples by
a name that it resolves to this machine. Nothing is written.
"""

from __future__ import annotations

import json
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from bass_cli.errors import MachineError, UserError
from bass_cli.io.console import Screen
from bass_cli.reading import os_errors_as
from bass_cli.report.page import Chunk, chunks_of, head_of, render_live, verdicts_of
from bass_cli.report.runs import Reader, Run

HOST = "127.0.0.1"
INTERVAL = 2.0  # seconds between two requests of a page
# Reading the files takes at most this share of the time, so that it does not slow the job down
_BUSY = 0.1


class Follower:
    """The newest state of the files, and what a page that has seen an earlier one lacks.

    Args:
        readers: one for each file.
    """

    def __init__(self, readers: Sequence[Reader]) -> None:
        self._readers = readers
        self._lock = threading.Lock()  # requests come in threads
        self._states: list[Any] = [None] * len(readers)
        self._runs: list[Run | None] = [None] * len(readers)
        self._problem = ""
        self._version = 0
        self._epoch = 0  # the number of times that a file came or was replaced
        self._rest = 0.0  # when files may be read again
        self._head: dict[str, Any] = {}

    def update(self, seen: str) -> dict[str, Any] | None:
        """Return what a page lacks. None if it has everything.

        Args:
            seen: `seen` of the page's last update. Empty for a page without data.

        Returns:
            {"seen", "reset": the page must drop what it has, "problem": why a file cannot be read,
            "head": see page.py, "chunks"}.
        """
        with self._lock:
            self._refresh()
            now = json.dumps([self._epoch, self._version, self._counts()])
            if seen == now:
                return None
            counts, reset = self._seen(seen)
            chunks = [list(chunk) for chunk in self._chunks(counts)]
            return {
                "seen": now,
                "reset": reset,
                "problem": self._problem,
                "head": self._head,
                "chunks": chunks,
            }

    @property
    def _present(self) -> list[Run]:
        """The files that could be read; chunks number these."""
        return [run for run in self._runs if run is not None]

    def _counts(self) -> list[int]:
        return [len(run.file.rows) for run in self._present]

    def _seen(self, seen: str) -> tuple[list[int], bool]:
        """Return how many samples of each file a page has, and whether it must drop them."""
        nothing = [0] * len(self._present)
        try:
            epoch, _, counts = json.loads(seen)
            pairs = zip(counts, self._counts(), strict=True)
            known = [max(0, min(int(a), b)) for a, b in pairs]
        except (ValueError, TypeError, OverflowError, RecursionError):
            return nothing, True
        return (known, False) if epoch == self._epoch else (nothing, True)

    def _chunks(self, counts: Sequence[int]) -> Iterator[Chunk]:
        for number, (run, start) in enumerate(zip(self._present, counts, strict=True)):
            if start < len(run.file.rows):
                yield from chunks_of(run, number, start)
            yield verdicts_of(run, number)

    def _refresh(self) -> None:
        """Read the files that have changed."""
        began = time.monotonic()
        if began < self._rest:
            return
        changed = False
        problems = []
        for number, reader in enumerate(self._readers):
            state = reader.source.state()
            if state == self._states[number]:
                continue
            changed, self._states[number] = True, state
            try:
                found = reader.read()
            except UserError as error:  # a line may be broken, or the file not there yet
                problems.append(str(error))
                self._states[number] = None
                continue
            before = self._runs[number]
            if before is None or not _continues(before, found):
                self._epoch += 1
            self._runs[number] = found
        if changed:
            self._problem = "; ".join(problems)
            self._head = head_of(self._present)
            self._version += 1
        spent = time.monotonic() - began
        self._rest = began + spent / _BUSY


def _continues(before: Run, now: Run) -> bool:
    """Whether the lines of a file begin with those that it had before."""
    rows = before.file.rows
    later = now.file.rows[: len(rows)]
    return [(row.task_id, row.sample, row.text) for row in rows] == [
        (row.task_id, row.sample, row.text) for row in later
    ]


class Server(ThreadingHTTPServer):
    """Answers the page and its data.

    Args:
        follower: the data.
        port: 0 for a free one.

    Attributes:
        address: the page's address.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, follower: Follower, port: int) -> None:
        super().__init__((HOST, port), _Handler)
        self.follower = follower
        self.word = secrets.token_urlsafe(16)
        self.page = render_live(INTERVAL)
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}
        self.address = f"http://{HOST}:{self.server_port}/{self.word}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a page that was closed before it had its answer; show other errors."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "bass", ""
    timeout = 30  # seconds that a connection may take to send a request

    def do_GET(self) -> None:
        """Answer the page or its data; refuse another host and another path."""
        if self.headers.get("Host") not in self.server.hosts:
            self._send(HTTPStatus.FORBIDDEN, b"this server answers 127.0.0.1 only", "text/plain")
            return
        try:
            parts = urlsplit(self.path)
        except ValueError:
            parts = urlsplit("")
        if parts.path == f"/{self.server.word}/":
            self._send(HTTPStatus.OK, self.server.page, "text/html; charset=utf-8")
        elif parts.path == f"/{self.server.word}/data":
            seen = parse_qs(parts.query).get("seen", [""])[0]
            self._send_data(self.server.follower.update(seen))
        else:
            self._send(HTTPStatus.NOT_FOUND, b"not found", "text/plain")

    def _send_data(self, update: dict[str, Any] | None) -> None:
        if update is None:
            self._send(HTTPStatus.NO_CONTENT, b"", "application/json")
        else:
            self._send(HTTPStatus.OK, json.dumps(update).encode("ascii"), "application/json")

    def _send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("X-Frame-Options", "DENY")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing: a page sends a request every two seconds."""


def serve(readers: Sequence[Reader], port: int | None, screen: Screen) -> None:
    """Serve the page until the command is interrupted. MachineError if the port is taken."""
    with os_errors_as(MachineError, f"`port` {port}: cannot listen there"):
        server = Server(Follower(readers), port or 0)
    with server:
        screen.note(f"serving {server.address} (Ctrl-C ends it)")
        server.serve_forever(poll_interval=0.2)
