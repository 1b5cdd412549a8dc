"""A small Hugging Face hub on localhost: users, data sets, commits, and failures on demand."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeHub:
    """The state of the hub. `failures`: statuses of the next answers, by a part of the path."""

    def __init__(self) -> None:
        self.users: dict[str, dict[str, Any]] = {
            "good": user("me", "write"),
            "weak": user("me", "read"),
        }
        self.private: dict[str, bool] = {}  # by data set
        self.files: dict[str, dict[str, bytes]] = {}
        self.commits: list[str] = []
        self.licences: dict[str, str] = {}  # by model
        self.failures: dict[str, list[int]] = {}
        self.requests: list[str] = []
        self.address = ""

    def answer(
        self, method: str, path: str, token: str | None, body: bytes
    ) -> tuple[int, dict[str, str], Any]:
        """Return status, headers and JSON (or bytes)."""
        self.requests.append(f"{method} {path}")
        for part, statuses in self.failures.items():
            if part in path and statuses:
                return statuses.pop(0), {}, {"error": "try again"}
        if path == "/api/whoami-v2":
            known = self.users.get(token or "")
            return (200, {}, known) if known else (401, {}, {"error": "Invalid user token."})
        if path == "/api/validate-yaml":
            return 200, {}, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if found := re.fullmatch(r"/api/models/(\S+/\S+)", path):
            licence = self.licences.get(found[1])
            card = {"id": found[1], "cardData": {"license": licence}, "tags": [], "siblings": []}
            return (200, {}, card) if licence else (404, {"X-Error-Code": "RepoNotFound"}, {})
        if found := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(?:/(preupload|commit)/main)?", path):
            return self._dataset(found[1], found[2], body)
        if found := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/main/(.+)", path):
            content = self.files.get(found[1], {}).get(found[2])
            if content is None:
                return 404, {"X-Error-Code": "EntryNotFound"}, {}
            digest = hashlib.sha1(content).hexdigest()
            return 200, {"ETag": f'"{digest}"', "X-Repo-Commit": digest}, content
        return 404, {}, {"error": f"the fake hub has no {path}"}

    def _create(self, wanted: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
        name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        url = {"url": f"{self.address}/datasets/{name}"}
        if name in self.private:
            return 409, {}, url | {"error": "You already created this dataset repo"}
        self.private[name] = bool(wanted.get("private")) or wanted.get("visibility") == "private"
        self.files[name] = {}
        return 200, {}, url

    def _dataset(self, name: str, what: str | None, body: bytes) -> tuple[int, dict[str, str], Any]:
        if name not in self.private:
            return 404, {"X-Error-Code": "RepoNotFound"}, {"error": "Repository not found"}
        if what == "preupload":
            files = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                     for one in json.loads(body)["files"]]  # fmt: skip
            return 200, {}, {"files": files}
        if what == "commit":
            lines = [json.loads(line) for line in body.splitlines()]
            for line in lines[1:]:
                assert line["key"] == "file"
                self.files[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.commits.append(lines[0]["value"]["summary"])
            return (
                200,
                {},
                {
                    "success": True,
                    "commitUrl": f"{self.address}/datasets/{name}/commit/{1:040}",
                    "commitOid": "1" * 40,
                },
            )
        info = {"id": name, "private": self.private[name], "tags": [], "siblings": [], "sha": "1" * 40,
                "downloads": 0, "likes": 0}  # fmt: skip
        return 200, {}, info


def user(name: str, role: str, *orgs: str) -> dict[str, Any]:
    """The hub's description of a user and of its token."""
    return {
        "type": "user",
        "name": name,
        "orgs": [{"name": one} for one in orgs],
        "auth": {"type": "access_token", "accessToken": {"displayName": "t", "role": role}},
    }


@contextlib.contextmanager
def serve(hub: FakeHub) -> Iterator[str]:
    """Serve the hub; the context is its address."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def _do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            path = self.path.split("?")[0]
            status, headers, found = hub.answer(self.command, path, token, body)
            content = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(status)
            for key, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_POST = do_HEAD = _do  # noqa: N815 - names of the base class

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01), daemon=True)
    thread.start()
    try:
        hub.address = f"http://127.0.0.1:{server.server_port}"
        yield hub.address
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
