"""Test that all formats give the same prompts, that nothing is read ahead, and that faults name
file, line and field."""

from __future__ import annotations

import datetime
import io
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from bass_cli.errors import UserError
from bass_cli.io.prompts import Prompt, check_prompts, read_prompts
from bass_cli.io.readers import open_source

CHAT = [{"role": "user", "content": "hi"}]
RECORDS: list[dict[str, Any]] = [
    {"id": "a", "prompt": "one", "level": 3},
    {"prompt": "two", "reference": "2"},
    {"id": 7, "messages": CHAT},
]
EXPECTED = [
    ("a", "one", None, {"level": 3}, None),
    ("1", "two", None, {}, "2"),
    ("7", None, CHAT, {}, None),
]


def seen(prompts: list[Prompt]) -> list[tuple[Any, ...]]:
    return [
        (prompt.id, prompt.text, prompt.messages, prompt.meta, prompt.reference)
        for prompt in prompts
    ]


def lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def feed(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(content)))


def fault(path: Path, content: str | bytes, column: str = "prompt") -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        check_prompts(open_source(str(path)), column=column, limit=None)
    return str(caught.value).removeprefix(f"{path.parent}/")


def test_jsonl_and_json_and_parquet_give_the_same_prompts(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("\ufeff" + lines(RECORDS).replace("\n", "\r\n\n"))
    (tmp_path / "p.json").write_text(json.dumps(RECORDS, indent=1))
    columns = ("id", "prompt", "messages", "level", "reference")
    rows = [{column: record.get(column) for column in columns} for record in RECORDS]
    rows[2]["id"] = "7"  # a column has one type
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    for name in ("p.jsonl", "p.json", "p.parquet"):
        assert seen(list(read_prompts(str(tmp_path / name)))) == EXPECTED, name


def test_places_are_lines(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('\n{"prompt": "a"}\n\n{"prompt": "b"}\n')
    (tmp_path / "p.json").write_text(
        '[\n {"prompt":\n "a"}, {"prompt": "b"},\n\n {"prompt": "c"}]\n'
    )
    places = [prompt.place.rpartition("/")[2] for prompt in read_prompts(str(tmp_path / "p.jsonl"))]
    assert places == ["p.jsonl:2", "p.jsonl:4"]
    places = [prompt.place.rpartition("/")[2] for prompt in read_prompts(str(tmp_path / "p.json"))]
    assert places == ["p.json:2", "p.json:3", "p.json:5"]


def test_text_lines_have_their_line_index_as_id(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbffirst \r\n\n  \n  second\n")
    prompts = list(read_prompts(str(tmp_path / "p.txt")))
    assert [(prompt.id, prompt.text) for prompt in prompts] == [("0", "first "), ("3", "  second")]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xef\xbb\xbf\n" + lines(RECORDS).encode(), EXPECTED),
        (b"one\ntwo\n", [("0", "one", None, {}, None), ("1", "two", None, {}, None)]),
        (b'[{"prompt": "a"}]', [("0", "a", None, {}, None)]),
        (b'[\n  {"prompt": "a"}\n]\n', [("0", "a", None, {}, None)]),
        (b"[INST] one\n", [("0", "[INST] one", None, {}, None)]),
        (b"[]int{1}\n", [("0", "[]int{1}", None, {}, None)]),
    ],
)
def test_stdin_can_be_read_twice(
    monkeypatch: pytest.MonkeyPatch, content: bytes, expected: Any
) -> None:
    feed(monkeypatch, content)
    source = open_source("-")
    assert check_prompts(source, column="prompt", limit=None).count == len(expected)
    assert seen(list(read_prompts(source))) == expected
    assert next(iter(read_prompts(source))).place.startswith("stdin:")


def test_the_column_and_the_limit(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"q": "a", "prompt": 3}\n{"q": "b"}\n{"q": broken\n')
    prompts = list(read_prompts(str(tmp_path / "p.jsonl"), column="q", limit=2))
    assert [(prompt.text, prompt.meta) for prompt in prompts] == [("a", {"prompt": 3}), ("b", {})]
    assert check_prompts(open_source(str(tmp_path / "p.jsonl")), column="q", limit=1).count == 1


def test_prompts_stream(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{broken\n')
    stream = read_prompts(str(tmp_path / "p.jsonl"))
    assert next(stream).text == "a"
    with pytest.raises(UserError, match=r"p\.jsonl:2: broken JSON"):
        next(stream)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "p.jsonl:2: broken JSON: Expecting value"),
        ('{"prompt": "a", "x": NaN}\n', "p.jsonl:1: broken JSON: NaN"),
        ('{"prompt": "a"}\n\n["b"]\n', "p.jsonl:3: a prompt is an object"),
        (
            '{"promt": "a"}\n',
            'p.jsonl:1: field "prompt": it is missing, and there is no "messages"; did you mean '
            '"promt"?',
        ),
        ('{"prompt": null, "text": "a"}\n', 'p.jsonl:1: field "prompt": it is empty'),
        (
            '{"text": "a"}\n',
            'p.jsonl:1: field "prompt": it is missing, and there is no "messages"; known: text; '
            "`prompt_column` names the field",
        ),
        ('{"prompt_token_ids": [1]}\n', 'p.jsonl:1: field "prompt_token_ids": use "token_ids"'),
        ('{"Messages": []}\n', 'p.jsonl:1: field "Messages": did you mean "messages"?'),
        (
            '{"prompt": [1, 2]}\n',
            'p.jsonl:1: field "prompt": it must be a string, not a list; token ids are "token_ids"',
        ),
        ('{"prompt": ["a"]}\n', 'p.jsonl:1: field "prompt": it must be a string, not a list'),
        (
            '{"prompt": [{"role": "user"}]}\n',
            'p.jsonl:1: field "messages[0].content": it must be a string, not null',
        ),
        (
            '[{"prompt": "a"}]\n',
            'p.jsonl:1: a prompt is an object like {"prompt": "..."}, not a list; rename a file '
            "that is one list to .json",
        ),
        ('{"prompt": ""}\n', 'p.jsonl:1: field "prompt": it is empty'),
        ('{"prompt": 3}\n', 'p.jsonl:1: field "prompt": it must be a string, not a number'),
        ('{"prompt": "a", "messages": []}\n', 'p.jsonl:1: field "prompt": there is "messages" too'),
        ('{"messages": "hi"}\n', 'p.jsonl:1: field "messages": it must be a list'),
        ('{"messages": []}\n', 'p.jsonl:1: field "messages": it must be a list'),
        ('{"messages": ["hi"]}\n', 'p.jsonl:1: field "messages[0]": it must be'),
        (
            '{"messages": [{"role": "user"}]}\n',
            'p.jsonl:1: field "messages[0].content": it must be a string, not null',
        ),
        (
            '{"messages": [{"role": 1, "content": "x"}]}\n',
            'p.jsonl:1: field "messages[0].role": it must be a string',
        ),
        ('{"prompt": "a", "id": 1.5}\n', 'p.jsonl:1: field "id": it must be a string'),
        ('{"prompt": "a", "id": true}\n', 'p.jsonl:1: field "id": it must be a string'),
        ('{"prompt": "a", "id": ""}\n', 'p.jsonl:1: field "id": it is empty'),
        ('{"prompt": "a", "reference": 1}\n', 'p.jsonl:1: field "reference": it must be a string'),
        (
            '{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}\n',
            'p.jsonl:2: field "id": "x" is also the id of',
        ),
        (
            '{"prompt": "a", "id": 1}\n{"prompt": "b"}\n',
            'p.jsonl:2: field "id": "1" is also the id of',
        ),
        (
            b'{"prompt": "a"}\n{"prompt": "\xff"}\n',
            "p.jsonl:2: the text is not valid UTF-8: byte 0xff at byte 13",
        ),
        ("\n \n", "p.jsonl: it contains no prompts"),
        ("", "p.jsonl: it contains no prompts"),
        ("[" * 100_000 + "\n", "p.jsonl:1: broken JSON"),
    ],
)
def test_a_fault_is_named(tmp_path: Path, content: str | bytes, expected: str) -> None:
    assert fault(tmp_path / "p.jsonl", content).startswith(expected)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            '{"prompt": "a"}\n{"prompt": "b"}\n',
            "p.json:1: a .json file of prompts is one list: [{...}, ...]; rename a file of JSON "
            "lines to .jsonl",
        ),
        ('[{"prompt": "a"},\n {"prompt" "b"}]', "p.json:2: broken JSON"),
        ('[{"prompt": "a"}\n {"prompt": "b"}]', 'p.json:2: broken JSON: a ","'),
        ('[{"prompt": "a"}', 'p.json:1: broken JSON: a ","'),
        ('[{"prompt": "a"},', "p.json:1: broken JSON"),
        ('[{"prompt": "a"},\n]', 'p.json:2: broken JSON: "," before the closing "]"'),
        ('[{"prompt": "a"}]\n\n[]', "p.json:3: broken JSON: something follows"),
        ('[{"prompt": "a"},\n"b"]', "p.json:2: a prompt is an object"),
        (
            "[[5, 6]]",
            'p.json:1: a prompt is an object like {"prompt": "..."}, not a list; write messages as '
            '{"messages": [...]} and token ids as {"token_ids": [...]}',
        ),
        ("[]", "p.json: it contains no prompts"),
    ],
)
def test_a_fault_in_a_json_list_is_named(tmp_path: Path, content: str, expected: str) -> None:
    assert fault(tmp_path / "p.json", content).startswith(expected)


def test_parquet_faults_and_values_without_json(tmp_path: Path) -> None:
    assert fault(tmp_path / "p.parquet", b"PAR1 nothing").startswith("p.parquet:1: broken parquet")
    when = datetime.datetime(2020, 1, 2)
    rows = [{"prompt": "a", "when": when}, {"prompt": None, "when": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "q.parquet")
    stream = read_prompts(str(tmp_path / "q.parquet"))
    assert next(stream).meta == {"when": "2020-01-02 00:00:00"}
    with pytest.raises(UserError, match=r'q\.parquet:2: field "prompt": it is empty'):
        next(stream)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ([("prompt", pyarrow.array([b"ok", b"\xff"]).view("string"))], "broken parquet: "),
        ([("prompt", ["a", "b"]), ("prompt", ["c", "d"])], '2 columns are called "prompt"'),
        ([("prompt", ["a", "b"]), ("day", pyarrow.array([0, 2**30]).cast("int32").view("date32"))],
         "broken parquet: "),
    ],
)  # fmt: skip
def test_parquet_values_that_python_cannot_hold(
    tmp_path: Path, columns: list[Any], expected: str
) -> None:
    table = pyarrow.table([values for _, values in columns], [name for name, _ in columns])
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet")
    with pytest.raises(UserError) as caught:
        list(read_prompts(str(tmp_path / "p.parquet")))
    assert "p.parquet:1: " in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none.jsonl", "there is no such prompt file"),
        (".", "this is a folder"),
        ("p.jsnl", 'a prompt file cannot end in ".jsnl"; did you mean ".jsonl"?'),
    ],
)
def test_a_source_that_cannot_be_read(tmp_path: Path, name: str, expected: str) -> None:
    (tmp_path / "p.jsnl").write_text("{}")
    with pytest.raises(UserError) as caught:
        open_source(str(tmp_path / name))
    assert expected in str(caught.value)


def test_saved_datasets_are_read_as_their_library_reads_them(tmp_path: Path) -> None:
    import datasets

    rows = {"prompt": [f"p{number}" for number in range(9)], "day": list("abcdefghi")}
    one = datasets.Dataset.from_dict(rows).shuffle(seed=3).filter(lambda row: row["day"] != "b")
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"mine": one, "test": one.select([2])}).save_to_disk(tmp_path / "two")
    expected = [tuple(row.values()) for row in datasets.load_from_disk(str(tmp_path / "one"))]
    assert len(expected) == 8

    def read(name: str) -> list[Any]:
        prompts = read_prompts(f"hf:{tmp_path / name}")
        return [(prompt.text, prompt.meta["day"]) for prompt in prompts]

    assert read("one") == read("two:mine") == read("two::mine") == expected
    assert read("two:test") == expected[2:3]
    split = datasets.Dataset.from_dict(rows, split="train")
    split.save_to_disk(tmp_path / "train")
    split.save_to_disk(tmp_path / "train[1]")
    assert (
        read("train[1]")
        == read("train")
        == read("train:train")
        == list(zip(*rows.values(), strict=True))
    )
    (tmp_path / "p.jsonl").write_text("{}")
    datasets.DatasetDict().save_to_disk(tmp_path / "none")
    for name, reason in {
        "none": "the data set has no splits; save it again",
        "two": "choose a split, as in ",
        "train[1]:train[:5]": "train[1]:train, and `limit` N for its first N rows",
        "two:nine": 'there is no split "nine"; did you mean "mine"?',
        "two:a:test": 'a saved data set has no configurations; leave "a" out',
        "one:test": 'the data set was saved without splits; leave "test" out',
        "one:None": 'the data set was saved without splits; leave "None" out',
        "train:test": 'the data set was saved as the split "train"; leave "test" out',
        "p.jsonl": f"{tmp_path}/p.jsonl is a file; name it without hf:",
    }.items():
        with pytest.raises(UserError, match=re.escape(reason)):
            read(name)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_prompt_may_be_a_conversation_as_in_data_of_trl(tmp_path: Path, kind: str) -> None:
    chat = [{"role": "user", "content": "hi", "name": None}, {"role": "user", "content": "you"}]
    rows = [{"prompt": chat, "completion": [{"role": "assistant", "content": "ho"}]}]
    path = tmp_path / f"p.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows[0]))
    (prompt,) = read_prompts(str(path))
    assert prompt.messages == [{"role": "user", "content": text} for text in ("hi", "you")]
    assert prompt.text is None
    assert list(prompt.meta) == ["completion"]


def hub(monkeypatch: pytest.MonkeyPatch, calls: list[Any], found: Any) -> None:
    import datasets
    import huggingface_hub

    def load(
        name: str,
        config: str | None,
        *,
        split: str | None,
        streaming: bool,
        trust_remote_code: bool,
    ) -> Any:
        calls.append((name, config, split, streaming))
        assert not trust_remote_code
        if isinstance(found, Exception):
            raise found
        return found if split else {"train": found, "test": []}

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(huggingface_hub, "dataset_info", lambda name, timeout: None)


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("hf:o/n:c:s", ("o/n", "c", "s", True)),
        ("hf:o/n:test", ("o/n", None, "test", True)),
        ("hf:o/n::s", ("o/n", None, "s", True)),
    ],
)
def test_a_hub_dataset_is_named_and_streamed(
    monkeypatch: pytest.MonkeyPatch, source: str, call: Any
) -> None:
    calls: list[Any] = []
    hub(monkeypatch, calls, ({"prompt": f"p{i}"} for i in range(10**9)))
    prompts = read_prompts(source, limit=3)
    assert [prompt.text for prompt in prompts] == ["p0", "p1", "p2"]
    assert calls == [call]


def test_faults_of_a_hub_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, [], [{"question": "a"}])
    with pytest.raises(UserError, match=r'hf:o/n::s:1: field "prompt": it is missing'):
        check_prompts(open_source("hf:o/n::s"), column="prompt", limit=None)
    with pytest.raises(UserError, match="choose a split, as in hf:o/n:train"):
        check_prompts(open_source("hf:o/n"), column="prompt", limit=None)
    with pytest.raises(UserError, match=r"hf:NAME\[:CONFIG\]\[:SPLIT\]"):
        check_prompts(open_source("hf:a:b:c:d"), column="prompt", limit=None)
    hub(monkeypatch, [], ValueError("no such\nconfig"))
    for source, remedy in (
        ("hf:o/n:zz", '; if "zz" is a split, write hf:o/n::zz'),
        ("hf:o/n:zz:train", ""),
        ("hf:o/n::zz", ""),
    ):
        fault = f"{source}: cannot open the dataset: no such{remedy}"
        with pytest.raises(UserError, match=f"^{re.escape(fault)}$"):
            check_prompts(open_source(source), column="prompt", limit=None)


@pytest.mark.parametrize("part", ["[:1]", "[2:5]", "[:10%]"])
@pytest.mark.parametrize("source", ["hf:o/n:test", "hf:o/n::mine", "hf:o/n:c:test"])
def test_a_part_of_a_split_is_refused_with_the_option_to_use(source: str, part: str) -> None:
    message = f"{source}{part}: a part of a split cannot be named; write {source}, and `limit` N"
    with pytest.raises(UserError, match=re.escape(message)):
        check_prompts(open_source(source + part), column="prompt", limit=None)


def test_the_named_split_of_an_error_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        "  - {split: mine, path: a.jsonl}\n  - {split: other, path: b.jsonl}\n---\n"
    )
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(UserError, match="choose a split, as in ") as refused:
        check_prompts(open_source(f"hf:{tmp_path}"), column="prompt", limit=None)
    source = str(refused.value).partition(" as in ")[2].partition(";")[0]
    assert check_prompts(open_source(source), column="prompt", limit=None).count == 1


def test_a_script_of_a_dataset_is_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, answers = tmp_path / "data", io.StringIO("y\n" * 10)
    folder.mkdir()
    (folder / "data.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    (folder / "data.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.setattr(sys, "stdin", answers)
    with pytest.raises(UserError, match=r"cannot open the dataset: .*script.*data\.py"):
        check_prompts(open_source(f"hf:{folder}"), column="prompt", limit=None)
    assert not (tmp_path / "ran").exists()
    assert answers.tell() == 0


def test_the_digest_follows_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.jsonl").write_text(lines(RECORDS))
    digest = open_source(str(tmp_path / "p.jsonl")).digest()
    feed(monkeypatch, lines(RECORDS).encode())
    assert open_source("-").digest() == digest
    (tmp_path / "p.jsonl").write_text(lines(RECORDS[:2]))
    assert open_source(str(tmp_path / "p.jsonl")).digest() != digest
