"""`bass report --serve`: who is answered, and what a page gets as the files grow."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import Page, runs_of
from scored import line, write

from bass_cli.report import server
from bass_cli.report.runs import Reader
from bass_cli.report.server import Follower, Server
from bass_cli.report.sources import find_sources


@pytest.fixture(autouse=True)
def _place(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_BUSY", float("inf"))  # read at every request


def follower(*paths: str) -> Follower:
    return Follower([Reader(one) for one in find_sources(paths)])


@pytest.fixture
def running() -> Iterator[Server]:
    write("f.jsonl", [line(0, 0, "first")])
    with Server(follower("f.jsonl"), 0) as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.01,))
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def get(running: Server, path: str, *, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", running.server_port, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


def add(path: str, *rows: dict[str, Any]) -> None:
    with open(path, "a") as stream:
        stream.write("".join(json.dumps(row) + "\n" for row in rows))


def test_the_server_listens_on_this_machine_only(running: Server) -> None:
    assert running.server_address[0] == "127.0.0.1"
    assert running.address.startswith(f"http://127.0.0.1:{running.server_port}/")


def test_the_page_and_its_data_are_answered_below_a_secret_word(running: Server) -> None:
    status, content = get(running, f"/{running.word}/")
    assert status == 200
    page = Page(content)
    assert "connect-src 'self'" in page.policy
    assert page.head["live"] == server.INTERVAL
    status, content = get(running, f"/{running.word}/data")
    assert status == 200
    assert runs_of(json.loads(content)["chunks"])[0]["texts"] == ["first"]
    for path in (
        "/",
        "/data",
        "/wrong/",
        f"/{running.word}/../f.jsonl",
        f"/{running.word}/f.jsonl",
        "//x[",
    ):
        assert get(running, path)[0] == 404, path


@pytest.mark.parametrize("host", ["example.org", "127.0.0.1", "127.0.0.1:1", "[::1]:80", ""])
def test_a_request_for_another_host_is_refused(running: Server, host: str) -> None:
    """A web site may resolve its own name to this machine (DNS rebinding)."""
    assert get(running, f"/{running.word}/data", Host=host)[0] == 403
    known = f"localhost:{running.server_port}"
    assert get(running, f"/{running.word}/data", Host=known)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_but_reading_is_possible(running: Server, method: str) -> None:
    assert get(running, f"/{running.word}/data", method=method)[0] == 501


def test_a_page_gets_only_what_was_added_since() -> None:
    write("f.jsonl", [line(0, 0, "a"), line(0, 1, "b")])
    following = follower("f.jsonl")
    first = following.update("")
    assert first is not None
    assert first["reset"]
    assert following.update(first["seen"]) is None
    add("f.jsonl", line(1, 0, "c"), line(0, 2, "d"))
    second = following.update(first["seen"])
    assert second is not None
    assert not second["reset"]
    (added,) = runs_of(second["chunks"])
    assert added["texts"] == ["c", "d"]
    assert added["columns"]["prompts"] == ["HumanEval/1"]
    assert added["columns"]["prompt"] == [1, 0]
    assert len(added["verdicts"]["statuses"]["at"]) == 4
    assert second["head"]["runs"][0]["samples"] == 4
    (whole,) = runs_of(following.update("")["chunks"])  # type: ignore[index]
    assert whole["texts"] == ["a", "b", "c", "d"]


def test_a_line_that_is_being_written_comes_with_the_next_update() -> None:
    write("f.jsonl", [line(0, 0, "a")])
    row = json.dumps(line(0, 1, "b"))
    with open("f.jsonl", "a") as stream:
        stream.write(row[:30])
    following = follower("f.jsonl")
    first = following.update("")
    assert first is not None
    assert first["head"]["runs"][0]["samples"] == 1
    with open("f.jsonl", "a") as stream:
        stream.write(row[30:] + "\n")
    second = following.update(first["seen"])
    assert second is not None
    assert runs_of(second["chunks"])[0]["texts"] == ["b"]


def test_a_file_that_was_replaced_resets_the_page() -> None:
    write("f.jsonl", [line(0, 0, "a"), line(0, 1, "b")])
    following = follower("f.jsonl")
    first = following.update("")
    assert first is not None
    write("f.jsonl", [line(0, 0, "new")])
    second = following.update(first["seen"])
    assert second is not None
    assert second["reset"]
    assert runs_of(second["chunks"])[0]["texts"] == ["new"]


def test_a_file_that_is_missing_or_broken_is_a_problem_until_it_is_there() -> None:
    write("f.jsonl", [line(0, 0, "a")])
    following = follower("f.jsonl", "later.jsonl")
    first = following.update("")
    assert first is not None
    assert "later.jsonl: cannot read" in first["problem"]
    assert [run["name"] for run in first["head"]["runs"]] == ["f.jsonl"]
    write("later.jsonl", [line(0, 0, "b")])
    second = following.update(first["seen"])
    assert second is not None
    assert second["problem"] == ""
    assert [run["texts"] for run in runs_of(second["chunks"])][-1] == ["b"]


@pytest.mark.parametrize(
    "seen",
    [
        *("x", "[]", "[0,1]", "[0,1,[1,2,3]]", '[0,1,["a"]]', "{}", "[0,1,[99]]"),
        *("[1,1,[1e999]]", "[1,1,[99]]", "[" * 50_000),
    ],
)
def test_a_strange_request_gets_the_whole_or_nothing_wrong(seen: str) -> None:
    write("f.jsonl", [line(0, 0, "a")])
    following = follower("f.jsonl")
    following.update("")
    update = following.update(seen)
    assert update is not None
    texts = [run["texts"] for run in runs_of(update["chunks"])]
    assert texts == [["a"]] if update["reset"] else texts == [[]]


def test_a_page_that_claims_less_than_nothing_gets_all_samples() -> None:
    write("f.jsonl", [line(0, 0, "a"), line(0, 1, "b")])
    following = follower("f.jsonl")
    first = following.update("")
    assert first is not None
    epoch = json.loads(first["seen"])[0]
    update = following.update(json.dumps([epoch, 0, [-1]]))
    assert update is not None
    assert [run["texts"] for run in runs_of(update["chunks"])] == [["a", "b"]]


def test_a_page_that_is_closed_before_its_answer_prints_nothing(
    running: Server, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, closed = threading.Event(), threading.Event()

    def slow(seen: str) -> dict[str, Any]:
        gone.wait(10)
        return {"text": "x" * 10_000_000}

    whole = running.shutdown_request

    def noted(request: Any) -> None:
        whole(request)
        closed.set()

    monkeypatch.setattr(running.follower, "update", slow)
    monkeypatch.setattr(running, "shutdown_request", noted)
    with socket.create_connection(("127.0.0.1", running.server_port)) as connection:
        host = f"127.0.0.1:{running.server_port}"
        connection.sendall(f"GET /{running.word}/data HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    gone.set()
    assert closed.wait(10)
    assert capfd.readouterr().err == ""
