"""Test that reserved fields of a prompt are errors in every format, that all other fields become
`meta`, and that messages with keys that templates drop are refused."""

from __future__ import annotations

import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from bass_cli.config.options import JOB, LINE
from bass_cli.errors import UserError
from bass_cli.io.fields import HONOURED, RESERVED
from bass_cli.io.prompts import check_prompts, prompts_of, read_prompts
from bass_cli.io.readers import open_source

# The request bodies of POST /v1/chat/completions and /v1/completions, as OpenAI documents them,
# without what a prompt line has itself and what only tells the server how to keep or send things.
OPENAI = (
    *("model", "frequency_penalty", "function_call", "functions", "logit_bias", "logprobs", "n"),
    *("max_completion_tokens", "max_tokens", "modalities", "parallel_tool_calls", "prediction"),
    *("presence_penalty", "reasoning_effort", "response_format", "seed", "stop", "temperature"),
    *("tool_choice", "tools", "top_logprobs", "top_p", "verbosity", "web_search_options"),
    *("audio", "best_of", "echo", "suffix"),
)
KEPT = ("user", "metadata", "store", "stream", "stream_options", "service_tier", "level", "text")


def user(text: str = "hi") -> dict[str, Any]:
    return {"role": "user", "content": text}


def fault(path: Path, record: dict[str, Any]) -> str:
    path.write_text('{"prompt": "first"}\n' + json.dumps(record) + "\n")
    with pytest.raises(UserError) as caught:
        check_prompts(open_source(str(path)), column="prompt", limit=None)
    return str(caught.value).removeprefix(f"{path.parent}/")


def test_reserved_names_cover_the_api_and_all_job_options() -> None:
    assert RESERVED.keys() >= set(OPENAI) - {*HONOURED}
    objects = {"generation_config"}  # also the name of an object of settings
    assert RESERVED.keys() >= JOB.keys() - {*HONOURED, "token_ids"} - objects | {"pair"}
    assert not RESERVED.keys() & {*KEPT, "id", "prompt", "messages", "reference", "meta", "task_id"}


@pytest.mark.parametrize(
    "name", sorted({*OPENAI, "enable_thinking", "device"} - LINE.keys() - {*HONOURED})
)
def test_a_reserved_field_is_named_with_what_to_do(tmp_path: Path, name: str) -> None:
    said = fault(tmp_path / "p.jsonl", {"prompt": "a", name: 1})
    assert said.startswith(f'p.jsonl:2: field "{name}": ')
    assert name in HONOURED or 'put it into "meta"' in said


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("max_tokens", 'bass calls it "max_new_tokens"'),
        ("num_return_sequences", 'bass calls it "n"'),
        ("draft_length", "`speculation.length`"),
        ("typical_p", "no such setting"),
        ("system_prompt", 'use "system"'),
        ("functions", 'use "tools"'),
        ("enable_thinking", '"template_args"'),
    ],
)
def test_the_remedy_is_the_option_or_the_place(tmp_path: Path, name: str, remedy: str) -> None:
    assert remedy in fault(tmp_path / "p.jsonl", {"prompt": "a", name: "x"})


@pytest.mark.parametrize("format", ["jsonl", "json", "parquet", "stdin", "library"])
def test_all_formats_have_one_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    rows, source = [{"prompt": "a", "model": None}, {"prompt": "b", "model": "m"}], "-"
    lines = [json.dumps(row) for row in rows]
    if format == "stdin":
        stream = types.SimpleNamespace(buffer=io.BytesIO("\n".join(lines).encode()))
        monkeypatch.setattr(sys, "stdin", stream)
    else:
        source = str(tmp_path / f"p.{format}")
    if format == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    elif format == "json":
        Path(source).write_text(f"[{lines[0]},\n{lines[1]}]")
    elif format == "jsonl":
        Path(source).write_text("\n".join(lines))
    prompts = prompts_of(rows) if format == "library" else read_prompts(source)
    with pytest.raises(UserError, match=r'2: field "model"|prompts\[1\]: field "model"'):
        list(prompts)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("Temperature", 'bass calls it "temperature"'),
        ("maxTokens", 'bass calls it "max_new_tokens"'),
        ("max-tokens", 'bass calls it "max_new_tokens"'),
        ("SYSTEM", 'did you mean "system"?'),
        ("systemPrompt", 'use "system"'),
        ("Tools", 'did you mean "tools"?'),
        ("images", "cannot pass it to the model"),
        ("ID", 'did you mean "id"?'),
        ("Messages", 'did you mean "messages"?'),
    ],
)
def test_another_spelling_of_a_reserved_field_is_refused(
    tmp_path: Path, name: str, remedy: str
) -> None:
    said = fault(tmp_path / "p.jsonl", {"prompt": "a", name: "x"})
    assert said.startswith(f'p.jsonl:2: field "{name}": ')
    assert remedy in said


@pytest.mark.parametrize(
    ("field", "inside"),
    [
        ("sampling_params", "temperature"),
        ("parameters", "maxNewTokens"),
        ("options", "num_predict"),
        ("generationConfig", "stopSequences"),
        ("body", "functions"),
    ],
)
def test_a_setting_inside_an_object_of_settings_is_refused(
    tmp_path: Path, field: str, inside: str
) -> None:
    said = fault(tmp_path / "p.jsonl", {"prompt": "a", field: {"x": 1, inside: 1}})
    assert said.startswith(f'p.jsonl:2: field "{field}.{inside}": ')


def test_data_in_fields_named_like_settings_becomes_meta() -> None:
    line = {"options": ["A", "B"], "config": {"level": 1}, "reasoning": "because", 5: 6}
    (found,) = prompts_of([{"prompt": "a", **line}])  # type: ignore[dict-item]
    assert found.meta == line
    with pytest.raises(UserError, match='"reasoning": bass has no such setting'):
        list(prompts_of([{"prompt": "a", "reasoning": {"effort": "high"}}]))


@pytest.mark.parametrize("name", ["p.jsonl", "p.json"])
@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "a", "prompt": "b"}',
        '{"prompt": "a", "meta": {"x": 1, "x": 1}}',
        '{"messages": [{"role": "user", "content": "a", "content": "b"}]}',
    ],
)
def test_a_key_that_is_given_twice_is_refused(tmp_path: Path, name: str, line: str) -> None:
    path = tmp_path / name
    path.write_text(f"[\n{line}]" if path.suffix == ".json" else f'{{"prompt": "c"}}\n{line}\n')
    with pytest.raises(UserError, match=r'2: broken JSON: the key "\w+" is given twice in one obj'):
        list(read_prompts(str(path)))


def test_prompt_column_and_null_fields_are_not_reserved(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"system": "a", "tools": null}\n')
    (found,) = read_prompts(str(tmp_path / "p.jsonl"), column="system")
    assert (found.text, found.meta) == ("a", {})


def test_meta_may_hold_reserved_names(tmp_path: Path) -> None:
    line = {"prompt": "a", "level": 3, "meta": {"temperature": 0.2, "system": "x"}, **{"user": 1}}
    (tmp_path / "p.jsonl").write_text(json.dumps(line) + "\n")
    (found,) = read_prompts(str(tmp_path / "p.jsonl"))
    assert found.meta == {"level": 3, "user": 1, "temperature": 0.2, "system": "x"}
    said = fault(tmp_path / "p.jsonl", {"prompt": "a", "level": 3, "meta": {"level": 4}})
    assert said == 'p.jsonl:2: field "meta": "level" is also a field of the prompt'
    (found,) = prompts_of([{"prompt": "a", "meta": "a text"}])
    assert found.meta == {"meta": "a text"}


def test_a_datasets_columns_are_its_own_but_not_parts_of_the_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row: dict[str, Any] = {"prompt": "a", "n": 3, "model": "m", "level": 1}
    monkeypatch.setattr(
        "bass_cli.io.hub._stream_dataset", lambda *given: iter([row, {**row, "id": "b"}])
    )
    checked = check_prompts(open_source("hf:o/n:test"), column="prompt", limit=None)
    assert [note.partition('column "')[2].partition('"')[0] for note in checked.notes] == [
        "n",
        "model",
    ]
    assert [one.meta for one in read_prompts("hf:o/n:test")] == [
        {"n": 3, "model": "m", "level": 1}
    ] * 2
    row["functions"] = [{"name": "f"}]
    with pytest.raises(UserError, match=r'hf:o/n:test:1: field "functions"'):
        check_prompts(open_source("hf:o/n:test"), column="prompt", limit=None)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"role": "User", "content": "x"}], 'did you mean "user"?'),
        ([{**user(), "nmae": "Ann"}], 'messages[0].nmae": it is not a key of a message; did you'),
        (
            [user(), {"role": "assistant", "content": None, "tool_calls": [{}]}, user()],
            'messages[1].tool_calls[0]"',
        ),
        (
            [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}, user()],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([{"role": "user", "content": [{"type": "image", "text": "x"}]}], "parts of the type text"),
        ([{"role": "assistant", "content": ""}], "there is no text to continue"),
        ([user(), {"role": "user"}], 'messages[1].content": it must be a string, not null'),
    ],
)
def test_messages_with_what_a_template_would_drop_are_refused(
    tmp_path: Path, messages: Any, said: str
) -> None:
    found = fault(tmp_path / "p.jsonl", {"messages": messages})
    assert found.startswith('p.jsonl:2: field "messages')
    assert said in found


FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {}}}


def test_fields_of_chats_are_taken_from_a_line_in_every_form() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}
    lines: list[dict[str, Any]] = [
        {"prompt": "a", "system": "s", "level": 1},
        {"messages": [user()], "tools": [FUNCTION], "template_args": {"x": 1}},
        {"prompt": "a", "tools": json.dumps([FUNCTION]), "template_args": '{"x": 1}'},
        {"messages": [user(), {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "4"}]},
    ]  # fmt: skip
    found = list(prompts_of(lines))
    assert found[0].messages == [{"role": "system", "content": "s"}, user("a")]
    assert (found[0].text, found[0].meta) == (None, {"level": 1})
    assert [(one.tools, one.template_args) for one in found[1:3]] == [([FUNCTION], {"x": 1})] * 2
    assert found[2].messages == [user("a")]
    assert found[3].messages is not None
    assert found[3].messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"system": ""}, 'field "system": it is empty'),
        ({"system": 3}, 'field "system": it must be a string, not a number'),
        ({"tools": []}, 'field "tools": a list with at least one schema'),
        ({"tools": "{"}, 'field "tools": broken JSON'),
        ({"tools": [{"function": {}}]}, 'field "tools": tool 0 is not an object like'),
        ({"template_args": [1]}, 'field "template_args": an object such as'),
    ],
)
def test_faults_in_fields_of_chats_are_named(tmp_path: Path, line: Any, said: str) -> None:
    assert said in fault(tmp_path / "p.jsonl", {"prompt": "a", **line})


def test_a_second_system_message_is_refused(tmp_path: Path) -> None:
    line = {"messages": [{"role": "system", "content": "a"}, user()], "system": "b"}
    assert 'there is a system message in "messages" too' in fault(tmp_path / "p.jsonl", line)


def test_null_keys_of_messages_are_dropped() -> None:
    """Tables have such keys if another row's message has the key."""
    turns = [user(), {"role": "assistant", "content": "a"}, user("b")]
    (found,) = prompts_of([{"messages": [{**one, "tool_calls": None} for one in turns]}])
    assert found.messages == turns
