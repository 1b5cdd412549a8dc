"""Test prompts as token ids, text parts, ShareGPT conversations, nested parquet, and named ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest
from checkpoints import write_checkpoint, write_tokenizer

from bass_cli import Job, Pair, Sampling, generate
from bass_cli.errors import UserError
from bass_cli.io.prompts import open_prompts, prompts_of, read_prompts

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
SHARE = [
    {"from": "system", "value": "be brief"},
    {"from": "human", "value": "hi", "weight": 0},
    {"from": "gpt", "value": "hello"},
]


def one(record: dict[str, Any], **more: Any) -> Any:
    (prompt,) = prompts_of([record], **more)
    return prompt


def fault(record: dict[str, Any], **more: Any) -> str:
    with pytest.raises(UserError) as caught:
        one(record, **more)
    return str(caught.value).removeprefix("prompts[0]: ")


def test_text_parts_become_one_content() -> None:
    parts = [{"type": "text", "text": "one", "image_url": None}, {"type": "text", "text": "two"}]
    prompt = one({"messages": [{"role": "user", "content": parts}]})
    assert prompt.messages == [{"role": "user", "content": "one\ntwo"}]
    for part, reason in (
        ({"type": "image_url", "image_url": {"url": "x"}}, "[0]\": bass reads parts of the type text, not 'image_url'"),
        ({"type": "text"}, '[0].text": it must be a string, not null'),
        ({"type": "text", "text": "a", "cache": 1}, '[0].cache": a part has a type and a text'),
        ("a", '[0]": it must be {"type": "text", "text": "..."}, not a string'),
    ):  # fmt: skip
        said = fault({"messages": [{"role": "user", "content": [part]}]})
        assert said == f'field "messages[0].content{reason}'


def test_sharegpt_conversations_are_messages_and_their_last_answer_is_carried() -> None:
    prompt = one({"id": "x", "conversations": SHARE, "source": "s"})
    assert (prompt.messages, prompt.meta) == (CHAT, {"source": "s", "answer": "hello"})
    assert one({"conversations": SHARE[:2]}).meta == {}
    assert one({"conversations": CHAT}).messages == CHAT
    asked = [*SHARE, {"from": "human", "value": "more"}]
    assert [message["role"] for message in one({"conversations": asked}).messages][2:] == [
        "assistant",
        "user",
    ]
    assert one({"prompt": "a", "conversations": "a text"}).meta == {"conversations": "a text"}


@pytest.mark.parametrize(
    ("conversations", "reason"),
    [
        ([], 'conversations": it must be a list of {"from", "value"}'),
        ([{"from": "gpt", "value": "x"}], 'conversations": it has an answer only'),
        ([{"from": "alien", "value": "x"}], "conversations[0].from\": 'alien' is no speaker; known: human, "),
        ([{"from": "human"}], 'conversations[0].value": it must be a string, not null'),
        ([{"from": "human", "value": "x", "more": 1}], 'conversations[0].more": a turn has from and value'),
        (["x"], 'conversations[0]": it must be {"from", "value"}, not a string'),
    ],
)  # fmt: skip
def test_faults_of_conversations_name_the_field(conversations: Any, reason: str) -> None:
    assert fault({"conversations": conversations}).startswith(f'field "{reason}')


def test_a_prompt_has_one_kind_of_content() -> None:
    contents = {"prompt": "a", "messages": CHAT, "conversations": SHARE, "token_ids": [1]}
    for first in contents:
        for second in contents:
            if first != second:
                said = fault({first: contents[first], second: contents[second]})
                assert "too; give one of the two" in said
    assert fault({"token_ids": [1], "tools": [{"name": "f"}]}).startswith('field "tools": ')
    assert fault({"token_ids": [1], "system": "x"}).startswith('field "system": ')


@pytest.mark.parametrize("ids", [[], [1.0], [True], [-1], "1", True, {"a": 1}])
def test_token_ids_are_whole_numbers(ids: Any) -> None:
    assert "it must be a list of token ids" in fault({"token_ids": ids})


def test_parquet_holds_nested_messages_conversations_and_ids(tmp_path: Path) -> None:
    """Structs have all keys in every row; those that are null are missing."""
    parts = [{"type": "text", "text": "a"}]
    for name, records in (
        ("m", [{"messages": CHAT}, {"messages": [{"role": "user", "content": "x", "name": "n"}]}]),
        ("p", [{"messages": [{"role": "user", "content": parts}]}]),
        ("c", [{"conversations": SHARE}, {"conversations": SHARE[:2]}]),
        ("i", [{"token_ids": [3, 4]}]),
    ):
        path = tmp_path / f"{name}.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
        due = [one(record) for record in records]
        found = list(read_prompts(str(path)))
        assert [(p.messages, p.meta, p.token_ids) for p in found] == [
            (p.messages, p.meta, p.token_ids) for p in due
        ]


def test_columns_of_a_data_set_beside_its_prompts_are_carried(tmp_path: Path) -> None:
    record = {"prompt": "a", "conversations": SHARE[:1], "token_ids": [1]}
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "train.jsonl").write_text(json.dumps(record) + "\n")
    (prompt,) = read_prompts(f"hf:{tmp_path / 'd'}:train")
    assert (prompt.text, prompt.meta) == ("a", {key: record[key] for key in list(record)[1:]})


def test_id_column_names_the_field_with_ids(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"task": 7, "prompt": "a", "id": "x"}\n{"prompt": "b"}\n')
    prompts = read_prompts(open_prompts(str(path), None, None, "task"))
    first = next(prompts)
    assert (first.id, first.meta) == ("7", {"id": "x"})
    with pytest.raises(UserError, match=r'p\.jsonl:2: field "task": it is missing'):
        next(prompts)
    assert one({"task": "t", "prompt": "a"}, id_column="task").id == "t"
    (tmp_path / "p.txt").write_text("a\n")
    with pytest.raises(UserError, match=r"`id_column`: a text file has no fields"):
        open_prompts(str(tmp_path / "p.txt"), None, None, "task")


def test_samples_of_token_ids_equal_those_of_their_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    write_checkpoint("llama", tmp_path, shards=False)
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("the cat sat").ids
    job = Job(
        pair=Pair(name="tiny", target=str(tmp_path), draft="none"),
        n=2,
        device="cpu",
        sampling=Sampling(max_new_tokens=12),
        token_ids=True,
    )
    beyond = [10**6]
    prompts = [
        {"id": "t", "prompt": "the cat sat"},
        {"id": "i", "token_ids": ids},
        {"id": "t2", "token_ids": numpy.array(ids)},
        {"id": "bad", "token_ids": beyond},
    ]
    found: dict[tuple[str, int], Any] = {}
    for record in prompts:
        named = {**record, "id": "same"} if record["id"] != "bad" else record
        for sample in generate([named], job):
            found[record["id"], sample.sample] = sample
    for sample in range(2):
        text = found["t", sample]
        assert text.prompt_tokens == len(ids)
        for other in ("i", "t2"):
            assert found[other, sample].token_ids == text.token_ids
            assert found[other, sample].text == text.text
    assert found["bad", 0].finish_reason == "error"
    assert "there is no token 1000000" in str(found["bad", 0].error)
    assert json.loads(found["bad", 0].to_line())["id"] == "bad"
