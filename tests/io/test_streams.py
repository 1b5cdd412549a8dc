"""Test prompts from pipes, devices and endless lines, and random lines."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bass_cli.errors import UserError
from bass_cli.io import readers
from bass_cli.io.prompts import Prompt, check_prompts, read_prompts
from bass_cli.io.readers import open_source

MEGABYTE = 2**20


@pytest.fixture
def short_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit lines to 1 MB, so that tests need not read 64 MB."""
    monkeypatch.setattr(readers, "LONGEST_LINE", MEGABYTE)
    monkeypatch.setattr(readers._text_lines, "__kwdefaults__", {"longest": MEGABYTE})


def refusal(source: str) -> str:
    with pytest.raises(UserError) as caught:
        check_prompts(open_source(source), column="prompt", limit=None)
    return str(caught.value)


def test_pipes_devices_and_folders_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.jsonl")  # nothing writes to it
    for name in (str(tmp_path / "p.jsonl"), "/dev/zero", "/dev/urandom", "/dev/null"):
        assert refusal(name) == (
            f"{name}: this is a pipe or a device, not a file; read it from standard input "
            f"instead: - < {name}"
        )
    assert refusal(str(tmp_path)) == (
        f"{tmp_path}: this is a folder; name a prompt file, or write hf:{tmp_path} for a data set of "
        "Hugging Face"
    )
    assert refusal(str(tmp_path / "p.jsonl" / "q.jsonl")).endswith("there is no such prompt file")
    assert refusal(f"{'n' * 3000}.jsonl").endswith(
        "cannot read the prompt file: File name too long"
    )


@pytest.mark.parametrize(("device", "expected"), [
    ("/dev/zero", "stdin:1: the line has more than 1 "
                  "MB"), ("/dev/urandom", "the text is not valid UTF-8"),
    ("/dev/null", "stdin: it contains no prompts"), (".", "stdin: cannot read it: Is a "
                                                            "directory"),
])  # fmt: skip
def test_devices_and_folders_as_standard_input(
    monkeypatch: pytest.MonkeyPatch, short_lines: None, device: str, expected: str
) -> None:
    descriptor = os.open(device, os.O_RDONLY)
    with io.BufferedReader(Unchecked(descriptor)) as stream:
        monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=stream))
        message = refusal("-")
        assert message.startswith("stdin:")
        assert expected in message


class Unchecked(io.RawIOBase):
    """Open a descriptor as the interpreter opens standard input."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = os.read(self._descriptor, len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()


def test_closed_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert refusal("-").startswith("stdin: it is closed")


@pytest.mark.parametrize("name", ["p.jsonl", "p.txt"])
def test_endless_line_is_refused(tmp_path: Path, short_lines: None, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "')
    os.truncate(path, 1 << 40)  # a hole, which takes no room on the disk
    assert (
        refusal(str(path))
        == f"{path}:2: the line has more than 1 MB, the most that a prompt may have"
    )
    assert next(read_prompts(str(path))).place == f"{path}:1"


def test_too_long_list_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_LONGEST_LIST", MEGABYTE)
    path = tmp_path / "p.json"
    path.write_text(json.dumps([{"prompt": "a" * (MEGABYTE - 99)}]))
    assert check_prompts(open_source(str(path)), column="prompt", limit=None).count == 1
    os.truncate(path, 1 << 40)
    assert (
        refusal(str(path))
        == f"{path}:1: a .json file may have at most 1 MB, because it is read as a whole; convert it to .jsonl"
    )


# Lines made up at random

TEXTS = st.text(st.characters(exclude_categories=()), max_size=8) | st.sampled_from(
    ["\ud800", "\x00", "\ufeff", "\u2028"]
)
NUMBERS = st.integers() | st.floats() | st.sampled_from([10**400, 1e308, True, False, None])
VALUES = st.recursive(
    TEXTS | NUMBERS,
    max_leaves=6,
    extend=lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
)
MESSAGES = st.lists(
    st.fixed_dictionaries({}, optional={"role": VALUES, "content": VALUES, "name": VALUES}),
    max_size=3,
)
KEYS = TEXTS | st.sampled_from(
    ["id", "prompt", "messages", "reference", "meta", "prompt ", "token_ids", "conversations"]
)
TURNS = st.lists(
    st.fixed_dictionaries({}, optional={"from": st.just("human") | VALUES, "value": VALUES}),
    max_size=3,
)
OBJECTS = st.lists(st.tuples(KEYS, VALUES | MESSAGES | TURNS), max_size=4)  # a key may come twice
RAW = [
    b"1" * 5000,
    b'{"prompt": 1' + b"0" * 5000 + b"}",
    b'{"prompt": "a", "x": 1e999}',
    b'{"prompt": "a", "prompt": "b"}',
    b'{"id": "a", "prompt": "\\ud800"}',
    b"[" * 3000,
    b'{"prompt":' * 3000,
    b'{"prompt": "a", "m": ' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"prompt": "a\\u0000b"}',
    b'"\xed\xa0\x80"',
    b"\xff\xfe{\x00",
    b"\xef\xbb\xbf",
    b"\x00",
    b"",
    b"NaN",
]


def spelled(pairs: list[tuple[str, Any]]) -> bytes:
    inside = ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in pairs)
    return f"{{{inside}}}".encode()


ALONE = VALUES.map(lambda value: json.dumps(value).encode())
LINES = OBJECTS.map(spelled) | ALONE | st.binary(max_size=20) | st.sampled_from(RAW)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r", b"\n\n", b""])
CONTENTS = st.lists(st.tuples(LINES, ENDS).map(b"".join), max_size=4).map(b"".join)


@example(b"\n".join(RAW), "jsonl")
@example(b'{"\\n": ""}', "jsonl")
@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(CONTENTS, st.sampled_from(["jsonl", "json", "txt", "csv", "tsv", "csv.gz", "parquet", "-"]))
def test_any_bytes_are_prompts_or_an_error_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, kind: str
) -> None:
    """No other exception is raised, and the message has at most four terminal lines."""
    path = tmp_path / f"p.{kind}"
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(content)))
    path.write_bytes(gzip.compress(content) if kind == "csv.gz" else content)
    name = "stdin" if kind == "-" else str(path)
    found, said = parsed("-" if kind == "-" else str(path))
    if said is not None:
        assert said.startswith(f"{name}:")
        reason = said.removeprefix(f"{name}:")
        assert reason.split(":")[0].isdigit() or reason == " it contains no prompts"
        assert len(reason) < 400
        assert "\n" not in reason
    for prompt in found:
        contents = (prompt.text, prompt.messages, prompt.token_ids)
        assert sum(one is not None for one in contents) == 1
        assert prompt.place.startswith(f"{name}:")
        assert isinstance(prompt.whole(), list if prompt.token_ids else str)


def parsed(source: str) -> tuple[list[Prompt], str | None]:
    """Return the prompts before the first fault, and its message."""
    found: list[Prompt] = []
    try:
        found.extend(read_prompts(source))
    except UserError as error:
        return found, str(error)
    assert found
    return found, None


@pytest.mark.parametrize("raw", RAW)
def test_each_odd_line_alone(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "first"}\n' + raw + b"\n")
    found, said = parsed(str(path))
    assert found[0].text == "first"
    assert said is None or said.startswith(f"{path}:2: ")
