"""Test tables, compressed prompt files and text with a separator of one's own.

Files are written by pandas, gzip and zstandard, and faults name file, line and column.
"""

from __future__ import annotations

import gzip
import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import pandas
import pytest
import zstandard

from bass_cli.errors import UserError
from bass_cli.io.prompts import check_prompts, open_prompts, read_prompts
from bass_cli.io.readers import open_source

ROWS: list[dict[str, Any]] = [
    {"id": "a", "prompt": 'one, "quoted"\nin two lines', "level": "3"},
    {"id": "b", "prompt": "tab\there\r\nand ümlaut", "level": None},
    {"id": "c", "prompt": " spaces ", "level": "x" * 200_000},  # beyond the csv module's limit
]
SEEN = [(row["id"], row["prompt"], {"level": row["level"]} if row["level"] else {}) for row in ROWS]


def seen(path: Path, separator: str | None = None) -> list[tuple[str, str | None, dict[str, Any]]]:
    source = open_prompts(str(path), None, separator)
    return [(prompt.id, prompt.text, prompt.meta) for prompt in read_prompts(source)]


def fault(path: Path, content: str | bytes, separator: str | None = None) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        check_prompts(open_source(str(path), separator), column="prompt", limit=None)
    return str(caught.value).removeprefix(f"{path.parent}/")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_tables_of_pandas_give_their_rows(tmp_path: Path, encoding: str) -> None:
    frame = pandas.DataFrame(ROWS)
    for name in ("p.csv", "p.tsv", "p.csv.gz", "q.tsv.zst"):
        more: dict[str, Any] = {"sep": "\t"} if ".tsv" in name else {}
        frame.to_csv(tmp_path / name, index=False, encoding=encoding, **more)
        assert seen(tmp_path / name) == SEEN
    frame.to_csv(tmp_path / "w.csv", index=False, lineterminator="\r\n")
    assert seen(tmp_path / "w.csv") == SEEN


def test_unnamed_column_of_pandas_index_is_carried_as_meta(tmp_path: Path) -> None:
    pandas.DataFrame({"prompt": ["x"]}).to_csv(tmp_path / "p.csv")
    assert seen(tmp_path / "p.csv") == [("0", "x", {"column 1": "0"})]


def test_cells_of_messages_hold_json(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi, you"}]
    pandas.DataFrame({"messages": [json.dumps(chat)]}).to_csv(tmp_path / "p.csv", index=False)
    (prompt,) = read_prompts(str(tmp_path / "p.csv"))
    assert prompt.messages == chat
    assert fault(tmp_path / "p.csv", "messages\n[1\n") == (
        "p.csv:2: field \"messages\": it must hold JSON: broken JSON: Expecting ',' delimiter at column 3"
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "p.csv: it contains no prompts"),
        ("prompt\n", "p.csv: it contains no prompts"),
        ("id,prompt,id\n1,x,2\n", 'p.csv:1: two columns are called "id"'),
        ("id,prompt\n1,x\n2,y,z\n", "p.csv:3: the row has 3 cells, and the header has 2"),
        ('id,prompt\n1,"a\nb"\n2\n', "p.csv:4: the row has 1 cells, and the header has 2"),
        ('prompt\nx\n"open\nand so on\n', "p.csv:3: broken table: the end of a quoted cell is missing"),
        ('prompt\n"a"b\n', "p.csv:2: broken table: ',' expected after '\"'"),
        ("text\nx\n", 'p.csv:2: field "prompt": it is missing, and there is no "messages"; known: text; '
         "`prompt_column` names the field"),
        ("prompt;id\nx;1\n",
         'p.csv:2: field "prompt": it is missing, and there is no "messages"; a table with the one column '
         '"prompt;id" needs commas between its cells'),
        ("id,prompt\na,\n", 'p.csv:2: field "prompt": it is empty'),
        (b"prompt\n\xe9\n", "p.csv:2: the text is not valid UTF-8: byte 0xe9 at byte 1 of the line; save the "
         "file as UTF-8"),
        ("prompt\nx\n".encode("utf-16"),
         "p.csv:1: the text is not valid UTF-8: it begins like UTF-16; save the file as UTF-8"),
    ],
)  # fmt: skip
def test_faults_of_a_table_name_file_line_and_column(
    tmp_path: Path, content: str | bytes, reason: str
) -> None:
    assert fault(tmp_path / "p.csv", content).split("; known: id, ")[0] == reason


@pytest.mark.parametrize(
    ("name", "content", "hint"),
    [
        ("p.csv", "id\tprompt\na\tx\n",
         r'a table with the one column "id\tprompt" needs commas between its cells'),
        ("p.tsv", "id;prompt\na;x\n",
         'a table with the one column "id;prompt" needs tabs between its cells'),
        ("p.tsv", "id,prompt\na,x\n",
         'a table with the one column "id,prompt" needs tabs between its cells'),
        ("p.jsonl", '{"id|prompt": "x"}\n', 'did you mean "id|prompt"?; `prompt_column` names the field'),
    ],
)  # fmt: skip
def test_the_separator_that_a_file_needs_is_named(
    tmp_path: Path, name: str, content: str, hint: str
) -> None:
    assert fault(tmp_path / name, content).partition("; ")[2] == hint


def test_compressed_files_are_read_through_all_members(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": str(number)}) + "\n" for number in range(3)]
    zipped = b"".join(gzip.compress(line.encode()) for line in lines)
    frames = b"".join(zstandard.compress(line.encode()) for line in lines)
    for name, content in (("p.jsonl.gz", zipped), ("p.jsonl.zst", frames)):
        (tmp_path / name).write_bytes(content)
        assert [text for _, text, _ in seen(tmp_path / name)] == ["0", "1", "2"]
    (tmp_path / "p.txt.gz").write_bytes(gzip.compress(b"one\r\ntwo\r\n"))
    (tmp_path / "p.json.zst").write_bytes(zstandard.compress(b'[{"prompt": "one"}, {"prompt": "two"}]'))  # fmt: skip
    for name in ("p.txt.gz", "p.json.zst"):
        assert [text for _, text, _ in seen(tmp_path / name)] == ["one", "two"]


def test_truncated_and_broken_compressed_files_are_refused(tmp_path: Path) -> None:
    """A reader that stopped quietly would lose prompts."""
    content = b"".join(b'{"prompt": "%d"}\n' % number for number in range(2_000))
    for kind, data in (("gz", gzip.compress(content)), ("zst", zstandard.compress(content))):
        path, word = tmp_path / f"p.jsonl.{kind}", {"gz": "gzip", "zst": "zstd"}[kind]
        for cut in (1, 3, len(data) // 2, len(data) - 1):
            assert fault(path, data[:cut]) == f"p.jsonl.{kind}: the {word} data is cut short"
        assert f"the {word} data is broken" in fault(path, data + b"more")
        assert f"the {word} data is broken" in fault(path, content)
    assert fault(tmp_path / "p.jsonl.gz", b"") == "p.jsonl.gz: it contains no prompts"


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_standard_input_may_be_compressed(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    content = b'{"prompt": "one"}\n{"prompt": "two"}\n'
    packed = gzip.compress(content) if kind == "gz" else zstandard.compress(content)
    for data, texts in ((packed, ["one", "two"]), (packed[:-5], None)):
        stream = io.BufferedReader(io.BytesIO(data))  # type: ignore[arg-type]
        monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=stream))
        if texts is None:
            with pytest.raises(UserError, match=r"stdin: the (gzip|zstd) data is cut short"):
                open_source("-")
        else:
            assert [prompt.text for prompt in read_prompts("-")] == texts


def test_compressed_parquet_and_other_suffixes_are_refused(tmp_path: Path) -> None:
    for name, last in (
        ("p.parquet.gz", ".parquet.gz"),
        ("p.docx.zst", ".docx.zst"),
        ("p.gz", ".gz"),
    ):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(UserError, match=f'a prompt file cannot end in "{last}"'):
            open_source(str(tmp_path / name))


def test_text_is_split_at_a_separator_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes(
        b"\xef\xbb\xbfone\r\ntwo\r\n---\r\n\r\n---\r\nthree\r\n---\r\nfour --- five\r\n"
    )
    pieces = [("0", "one\ntwo", {}), ("1", "three", {}), ("2", "four --- five", {})]
    assert seen(path, "\n---\n") == pieces
    places = [prompt.place for prompt in read_prompts(open_source(str(path), "\n---\n"))]
    assert places == [f"{path}:{line}" for line in (1, 6, 8)]
    assert [text for _, text, _ in seen(path, "e")][:2] == ["on", "\ntwo\n---\n\n---\nthr"]
    assert [text for _, text, _ in seen(path, "never")] == [
        path.read_text(encoding="utf-8-sig").removesuffix("\n")
    ]
    assert fault(path, " \n--\n \n", "--") == "p.txt: it contains no prompts"
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(UserError, match=r"`separator`: .* is not a text file"):
        open_prompts(str(tmp_path / "p.jsonl"), None, "--")


def test_separated_text_equals_python_split(tmp_path: Path) -> None:
    text = "".join(f"{'ab'[i % 2]}{'-' * (i % 5)}\n" * (i % 3) for i in range(300))
    (tmp_path / "p.txt").write_text(text)
    for separator in ("--", "-\n", "b", "a---\n", "\n\n"):
        due = [one for one in text.split(separator) if one.strip()]
        due[-1] = due[-1].removesuffix("\n") if text.split(separator)[-1].strip() else due[-1]
        assert [one for _, one, _ in seen(tmp_path / "p.txt", separator)] == due
