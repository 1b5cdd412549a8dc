"""`bass batch` from the command line to its files, which the openai package parses."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoint, write_tokenizer
from command_line import cli, rows_in
from forked import Forked
from openai.types import Completion as TextCompletion
from openai.types.chat import ChatCompletion

from bass_cli import Completion, Engine, Job, Pair, Sampling
from bass_cli.batch.requests import Request
from bass_cli.batch.responses import answered
from bass_cli.formats.tokenizer import Tokenizer
from bass_cli.io.prompts import Prompt

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
FLAGS = ("--model", "model", "--device", "cpu", "--dtype", "fp32", "--draft-length", "3")
HELLO = [{"role": "user", "content": "the cat sat"}]
# Ends the process when it has appended so many lines
KILLED = """
import os, signal
from bass_cli.io.results import Writer
append, left = Writer.append, {count}
def counted(self, line, row):
    global left
    append(self, line, row)
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
Writer.append = counted
from bass_cli.__main__ import main
main()
"""


@pytest.fixture
def place(here: Path, model: Path) -> Path:
    """Return the working directory of the test, with the model."""
    (here / "model").symlink_to(model)
    return here


def request(name: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    given = {"messages": HELLO} if url == CHAT else {"prompt": "the cat sat"}
    body = {"model": "m", "max_tokens": 8, **given, **body}
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def write_requests(*requests: Any) -> None:
    Path("in.jsonl").write_text("".join(json.dumps(one) + "\n" for one in requests))


def batch(*arguments: str, **settings: Any) -> Any:
    return cli("batch", "in.jsonl", "out.jsonl", *FLAGS, *arguments, **settings)


def lines(name: str = "out.jsonl") -> dict[str, dict[str, Any]]:
    rows = rows_in(name)
    found = {row["custom_id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def fixed(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return what is the same in each run: all but ids and times."""
    return {
        name: (
            row["error"],
            row["response"]["status_code"],
            {k: v for k, v in row["response"]["body"].items() if k not in ("id", "created")},
        )
        for name, row in rows.items()
    }


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    """Return an engine that decodes plainly, as the reference."""
    pair = Pair(name="plain", target=str(model), draft="none")
    with Engine(Job(pair=pair, device="cpu", dtype="fp32", threads=1)) as engine:
        yield engine


def samples(
    engine: Engine, *prompts: dict[str, Any], n: int = 1, **sampling: Any
) -> list[list[Completion]]:
    """Return the samples of each prompt with these settings of the whole job."""
    given = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 8} | sampling
    drawn = list(engine.generate(prompts, n=n, sampling=Sampling(**given)))
    drawn.sort(key=lambda one: one.sample)
    return [[one for one in drawn if one.id == prompt["id"]] for prompt in prompts]


# Fields of a body, and the same in a job
FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {}),
    "n": ({"n": 3}, {"n": 3}),
    "temperature": ({"temperature": 0.3}, {"temperature": 0.3}),
    "greedy": ({"temperature": 0, "n": 2}, {"temperature": 0, "n": 2}),
    "top_p": ({"top_p": 0.4}, {"top_p": 0.4}),
    "top_k": ({"top_k": 3}, {"top_k": 3}),
    "every k": ({"top_k": -1}, {}),
    "seed": ({"seed": 11}, {"seed": 11}),
    "max_tokens": ({"max_tokens": 20}, {"max_new_tokens": 20}),
    "max_completion_tokens": ({"max_tokens": None, "max_completion_tokens": 3}, {"max_new_tokens": 3}),
    "stop": ({"stop": "e"}, {"stop": "e"}),
    "stops": ({"stop": ["e", "a"]}, {"stop": ["e", "a"]}),
    "min_p": ({"min_p": 0.2}, {"min_p": 0.2}),
    "presence": ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
    "frequency": ({"frequency_penalty": 0.8}, {"frequency_penalty": 0.8}),
    "repetition": ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    "logit_bias": ({"logit_bias": {"40": 5, "41": -100}}, {"logit_bias": {40: 5, 41: -100}}),
    "bad_words": ({"bad_words": ["a", "e"]}, {"bad_words": ["a", "e"]}),
    "allowed": ({"allowed_token_ids": [40, 41, 50]}, {"allowed_token_ids": [40, 41, 50]}),
    "stop_token_ids": ({"stop_token_ids": [40, 41]}, {"stop_token_ids": [40, 41]}),
    "include_stop": (
        {"stop": ["e"], "include_stop_str_in_output": True},
        {"stop": ["e"], "include_stop": True},
    ),
}  # fmt: skip


def test_each_field_has_the_effect_of_a_job_setting(place: Path, engine: Engine) -> None:
    write_requests(
        *(request(f"chat {name}", **body) for name, (body, _) in FIELDS.items()),
        *(request(f"text {name}", COMPLETION, **body) for name, (body, _) in FIELDS.items()),
    )
    batch(code=0)
    assert not Path("out.jsonl.errors").exists()
    rows = lines()
    assert len(rows) == 2 * len(FIELDS)
    texts = set()
    for name, (_, setting) in FIELDS.items():
        chat = {"id": f"chat {name}", "messages": HELLO}
        text = {"id": f"text {name}", "prompt": "the cat sat"}
        for kind, due in zip(("chat", "text"), samples(engine, chat, text, **setting), strict=True):
            body = rows[f"{kind} {name}"]["response"]["body"]
            found = [
                (one["message"]["content"] if kind == "chat" else one["text"], one["finish_reason"])
                for one in body["choices"]
            ]
            reasons = {"eos": "stop"}
            assert found == [
                (one.text, reasons.get(one.finish_reason, one.finish_reason)) for one in due
            ], (kind, name)
            assert body["usage"] == {
                "prompt_tokens": due[0].prompt_tokens,
                "completion_tokens": sum(one.tokens for one in due),
                "total_tokens": due[0].prompt_tokens + sum(one.tokens for one in due),
            }
            texts.add(due[0].text)
    assert len(texts) > len(FIELDS)


def test_the_openai_package_parses_every_body(place: Path, model: Path, engine: Engine) -> None:
    write_requests(
        request("chat", n=2, logprobs=True, top_logprobs=2),
        request("alone", logprobs=True),
        request("text", COMPLETION, prompt=["the cat", "a dog"], n=2, logprobs=3, max_tokens=None),
        request("plain", COMPLETION, user="me", metadata={"a": "b"}, stream=False, best_of=1),
    )
    assert "requests name the model 'm'; all are answered by model" in batch(code=0).stderr
    rows = lines()
    tokenizer = Tokenizer.load(model)
    chat = ChatCompletion.model_validate(rows["chat"]["response"]["body"])
    (due,) = samples(engine, {"id": "chat", "messages": HELLO}, n=2, logprobs=2)
    for choice, sample in zip(chat.choices, due, strict=True):
        assert choice.logprobs is not None
        content = choice.logprobs.content
        assert content is not None
        assert [one.logprob for one in content] == pytest.approx(sample.token_logprobs, abs=1e-5)
        joined = b"".join(bytes(one.bytes or ()) for one in content)
        assert joined.decode("utf-8", "replace") == choice.message.content
        for one, likeliest in zip(content, sample.top_logprobs, strict=True):
            assert [top.logprob for top in one.top_logprobs] == pytest.approx(
                [number for _, number in likeliest], abs=1e-5
            )
            assert one.top_logprobs[0].token == tokenizer.decode([likeliest[0][0]])
    alone = ChatCompletion.model_validate(rows["alone"]["response"]["body"])
    assert alone.choices[0].logprobs is not None
    assert all(not one.top_logprobs for one in alone.choices[0].logprobs.content or ())
    text = TextCompletion.model_validate(rows["text"]["response"]["body"])
    assert [choice.index for choice in text.choices] == [0, 1, 2, 3]
    assert text.usage is not None
    assert text.usage.completion_tokens <= 4 * 16  # OpenAI's limit where none is given
    for choice in text.choices:
        logprobs = choice.logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert logprobs.top_logprobs is not None
        assert (
            all(
                3 <= len(top) <= 4 and token in top
                for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True)
            )
            or len(set(tokenizer.texts)) > 0
        )
        assert logprobs.text_offset is not None
        assert len(logprobs.text_offset) == len(logprobs.token_logprobs or ())
    (own,) = samples(engine, {"id": "text[1]", "prompt": "a dog"}, n=2, max_new_tokens=16)
    assert [choice.text for choice in text.choices[2:]] == [one.text for one in own]
    TextCompletion.model_validate(rows["plain"]["response"]["body"])


REFUSED = {
    "stream": ({"stream": True}, ["stream"]),
    "several": ({"echo": True, "foo": 1, "best_of": 4}, ["echo", "foo", "best_of"]),
    "values": ({"temperature": -1, "top_p": 2}, ["temperature", "top_p"]),
    "limit": ({"max_tokens": 0}, ["max_tokens"]),
    "limits": ({"max_tokens": 4, "max_completion_tokens": 5}, ["max_completion_tokens"]),
    "messages": ({"messages": [{"role": 5, "content": "a"}]}, ["messages[0].role"]),
    "missing": ({"messages": None}, ["messages"]),
    "alone": ({"top_logprobs": 3}, ["top_logprobs"]),
    "many": ({"logprobs": True, "top_logprobs": 30}, ["top_logprobs"]),
    "format": ({"response_format": {"type": "xml"}}, ["response_format"]),
    "choice": ({"guided_choice": []}, ["guided_choice"]),
    "regex": ({"guided_regex": "(("}, ["guided_regex"]),
    "schema": ({"guided_json": {"type": "nope"}}, ["guided_json"]),
    "half \ud800": ({}, ["custom_id"]),
    "token": ({"logit_bias": {"9999": 1}}, ["logit_bias"]),
    "kinds": ({"structured_outputs": {"json": {}, "regex": "a"}}, ["structured_outputs"]),
}


def test_refused_fields_are_named_in_the_error_file(place: Path) -> None:
    write_requests(
        *(request(name, **body) for name, (body, _) in REFUSED.items()),
        request("fine"),
        request("url") | {"url": "/v1/embeddings"},
        request("method") | {"method": "GET"},
        request("more") | {"extra": 1},
        request("long", COMPLETION, prompt="the cat " * 300),
    )
    result = batch("--errors", "failed.jsonl", code=1)
    assert "20 requests could not be answered; the reasons are in failed.jsonl" in result.stderr
    assert set(lines()) == {"fine"}
    rows = lines("failed.jsonl")
    assert set(rows) == {*REFUSED, "url", "method", "more", "long"}
    named = {name: fields for name, (_, fields) in REFUSED.items()}
    for name, fields in (named | {"url": ["url"], "method": ["method"], "more": ["extra"]}).items():
        error = rows[name]["response"]["body"]["error"]
        assert error["param"] == fields[0]
        assert all(f'"{field}": ' in error["message"] for field in fields)
        assert rows[name]["response"]["status_code"] == 400
        assert rows[name]["error"] == {"code": error["code"], "message": error["message"]}
    assert "the model's context is 256" in rows["long"]["error"]["message"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"custom_id": "a"', "in.jsonl:1: broken JSON"),
        ("[1]\n", "in.jsonl:1: a request is an object with custom_id, method, url, body"),
        ('{"id": "a", "body": {}}\n', 'in.jsonl:1: field "custom_id": it is missing'),
        ('{"custom_id": 7}\n', 'in.jsonl:1: field "custom_id": a text is needed, not 7'),
        (
            '{"custom_id": "a"}\n\n{"custom_id": "a"}\n',
            "in.jsonl:3: field \"custom_id\": 'a' is also that of line 1",
        ),
        ("\n", "in.jsonl: it contains no"),
    ],
)
def test_a_file_that_is_no_batch_is_refused_before_a_model_is_loaded(
    place: Path, content: str, reason: str
) -> None:
    Path("in.jsonl").write_text(content)
    assert reason in batch("--model", "missing", code=2).stderr
    assert {path.name for path in place.iterdir()} == {"in.jsonl", "model"}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["in.jsonl", "in.jsonl"], "this is the file of requests, which would be lost"),
        (["in.jsonl", "-"], "the responses: a file is needed"),
        (["in.jsonl", "out.jsonl", "--errors", "out.jsonl"], "give another name"),
        (["in.jsonl", "out.jsonl", "--resume"], "there is nothing to resume"),
        (["in.jsonl", "out.csv"], "nothing is written as .csv"),
    ],
)
def test_files_that_cannot_be_used_are_refused(
    place: Path, arguments: list[str], reason: str
) -> None:
    write_requests(request("a"))
    assert reason in cli("batch", *arguments, *FLAGS, code=2).stderr


def many() -> list[dict[str, Any]]:
    return [
        request(str(number), (CHAT, COMPLETION)[number % 2], n=number % 3, max_tokens=4 + number)
        for number in range(8)
    ]


def test_a_killed_run_continues_to_the_same_lines(place: Path) -> None:
    count = 4
    write_requests(*many())
    batch("--batch-size", "3", code=1)
    due = fixed(lines()), fixed(lines("out.jsonl.errors"))
    assert len(due[0]) == 5
    for path in place.glob("out.*"):
        path.unlink()
    arguments = ("batch", "in.jsonl", "out.jsonl", *FLAGS, "--batch-size", "3")
    killed = Forked(KILLED.format(count=count), *arguments, cwd=place)
    assert killed.wait(60) == -signal.SIGKILL
    names = ("out.jsonl", "out.jsonl.errors")
    kept = [Path(name).read_bytes() for name in names]
    assert sum(one.count(b"\n") for one in kept) == count
    batch("--batch-size", "2", "--draft-length", "0", "--resume", code=1)
    for name, before in zip(names, kept, strict=True):
        assert Path(name).read_bytes().startswith(before)
    assert (fixed(lines()), fixed(lines("out.jsonl.errors"))) == due


def test_torn_lines_are_dropped_and_drawn_again(place: Path) -> None:
    write_requests(*many())
    batch(code=1)
    due = fixed(lines()), fixed(lines("out.jsonl.errors"))
    for name in ("out.jsonl", "out.jsonl.errors"):
        path = Path(name)
        path.write_bytes(path.read_bytes()[:-40])
    result = batch()
    assert "dropping a torn last line" in result.stderr
    assert (fixed(lines()), fixed(lines("out.jsonl.errors"))) == due
    complete = Path("out.jsonl").read_bytes()
    assert "complete" in batch().stderr
    assert Path("out.jsonl").read_bytes() == complete


def test_other_settings_and_changed_requests_are_refused(place: Path) -> None:
    write_requests(*many())
    batch(code=1)
    result = batch("--seed", "5")
    assert (result.exit_code, "seed: 0 before, 5 now" in result.stderr) == (2, True)
    write_requests(*many()[:3], request("x"), *many()[4:])
    assert "prompt number 4 has changed" in batch(code=2).stderr
    write_requests(*many(), request("added"))
    batch(code=1)
    assert "added" in lines()
    write_requests(request("x"))
    batch("--overwrite", code=0)
    assert (set(lines()), lines("out.jsonl.errors")) == ({"x"}, {})


SCHEMA = {
    "type": "object",
    "properties": {"age": {"enum": [17, 36]}},
    "required": ["age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
STRUCTURED: dict[str, tuple[dict[str, Any], str]] = {
    "schema": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA},
            }
        },
        r'\{"age":(17|36)\}',
    ),
    "json": ({"guided_json": json.dumps(SCHEMA)}, r'\{"age":(17|36)\}'),
    "regex": ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
    "choice": ({"guided_choice": ["yes (1)", "no"]}, r"yes \(1\)|no"),
    "outputs": ({"structured_outputs": {"choice": ["up", "down"]}}, "up|down"),
    "text": ({"response_format": {"type": "text"}}, "(?s:.*)"),
}


def test_prompts_may_be_token_ids_and_messages_may_have_parts(
    place: Path, model: Path, engine: Engine
) -> None:
    ids = Tokenizer.load(model).encode("the cat sat")
    parts = [{"role": "user", "content": [{"type": "text", "text": "the cat sat"}]}]
    write_requests(
        request("a", COMPLETION, prompt=ids),
        request("b", COMPLETION, prompt=[ids, ids[:2]]),
        request("c", messages=parts),
        request("d", COMPLETION, prompt=[ids, "text"]),
        request("e", COMPLETION, prompt=[301]),
    )
    batch(code=1)
    assert set(lines("out.jsonl.errors")) == {"e"}
    found = {name: row["response"]["body"]["choices"] for name, row in lines().items()}
    ((text,), (of_ids,), (chat,)) = samples(
        engine,
        {"id": "a", "prompt": "the cat sat"},
        {"id": "b[1]", "token_ids": ids[:2]},
        {"id": "c", "messages": HELLO},
    )
    assert found["a"][0]["text"] == text.text
    assert found["b"][1]["text"] == of_ids.text
    assert found["c"][0]["message"]["content"] == chat.text


def test_echo_puts_the_prompt_before_the_text(place: Path, model: Path, engine: Engine) -> None:
    tokenizer = Tokenizer.load(model)
    ids = tokenizer.encode("the cat sat")
    write_requests(
        request("a", COMPLETION, echo=True, n=2, logprobs=2, max_tokens=3),
        request("b", COMPLETION, echo=True, prompt=ids),
    )
    batch(code=0)
    found = {name: row["response"]["body"]["choices"] for name, row in lines().items()}
    (due,) = samples(
        engine,
        {"id": "a", "prompt": "the cat sat"},
        n=2,
        max_new_tokens=3,
        logprobs=2,
        prompt_logprobs=2,
    )
    for choice, sample in zip(found["a"], due, strict=True):
        assert choice["text"] == f"the cat sat{sample.text}"
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        scores = logprobs["token_logprobs"]
        assert scores[1:] == pytest.approx(
            [*due[0].prompt_logprobs[1:], *sample.token_logprobs], abs=1e-5
        )
        assert "".join(logprobs["tokens"][: len(ids)]) == "the cat sat"
        assert len(logprobs["tokens"]) == len(ids) + 3 == len(logprobs["text_offset"])
        assert logprobs["text_offset"][len(ids)] == len("the cat sat")
    assert found["b"][0]["text"].startswith("the cat sat")


def test_structured_requests_are_honoured(place: Path) -> None:
    write_requests(
        *(request(name, max_tokens=40, n=2, **body) for name, (body, _) in STRUCTURED.items())
    )
    batch(code=0)
    for name, (_, regex) in STRUCTURED.items():
        body = ChatCompletion.model_validate(lines()[name]["response"]["body"])
        for choice in body.choices:
            assert choice.finish_reason == "stop" or name == "text"
            assert re.fullmatch(regex, choice.message.content or ""), name


def test_defaults_of_the_model_come_before_those_of_the_format(place: Path, engine: Engine) -> None:
    own = place / "own"
    shutil.copytree("model", own)
    (own / "generation_config.json").write_text(json.dumps({"temperature": 0.3, "eos_token_id": 2}))
    write_requests(
        request("a"), request("b", temperature=1), request("c", max_tokens=None, stop="e")
    )
    arguments = ("batch", "in.jsonl", "out.jsonl", *FLAGS, "--model", "own")
    assert "chats without max_tokens: 1" in cli(*arguments, code=0).stderr
    for name, temperature in (("a", 0.3), ("b", 1.0)):
        ((due,),) = samples(engine, {"id": name, "messages": HELLO}, temperature=temperature)
        (choice,) = lines()[name]["response"]["body"]["choices"]
        assert choice["message"]["content"] == due.text


def test_a_file_for_vllm_run_batch_is_answered(place: Path) -> None:
    """The fields of the examples in vLLM's documentation."""
    messages = [
        {"role": "system", "content": "You are helpful."},
        {"role": "user", "content": "Hi"},
    ]
    write_requests(
        *(
            {
                "custom_id": f"request-{number}",
                "method": "POST",
                "url": CHAT,
                "body": {
                    "model": "meta-llama/Meta-Llama-3-8B-Instruct",
                    "messages": messages,
                    "max_completion_tokens": 12,
                },
            }
            for number in (1, 2)
        )
    )
    batch("--json", code=0)
    for row in lines().values():
        body = ChatCompletion.model_validate(row["response"]["body"])
        assert body.choices[0].message.role == "assistant"
        assert body.model == "model"


def test_a_thinking_part_is_closed_at_its_budget(place: Path) -> None:
    write_tokenizer(place / "thinker", extra=("<think>", "</think>"))
    write_checkpoint("llama", place / "thinker", num_hidden_layers=1, vocab_size=330)
    template = "{% for m in messages %}{{ m.content }}{% endfor %} <think>"
    (place / "thinker" / "chat_template.jinja").write_text(template)
    given = {"thinking_token_budget": 3, "guided_regex": "[ab]{2}", "logprobs": True}
    write_requests(request("a", max_tokens=30, n=3, **given))
    arguments = ("batch", "in.jsonl", "out.jsonl", *FLAGS, "--model", "thinker")
    cli(*arguments, code=0)
    body = ChatCompletion.model_validate(lines()["a"]["response"]["body"])
    for choice in body.choices:
        assert re.fullmatch("[ab]{2}", choice.message.content or "")
        assert choice.message.model_extra is not None
        assert "reasoning_content" in choice.message.model_extra
        assert choice.logprobs is not None
        content = choice.logprobs.content or []
        # the content is without line ends beside the tag
        assert "".join(one.token for one in content).lstrip() == choice.message.content
    assert body.usage is not None
    assert body.usage.completion_tokens_details is not None
    assert 0 < (body.usage.completion_tokens_details.reasoning_tokens or 0) <= 3 * 4


def test_a_thinking_part_is_beside_the_content() -> None:
    sample = Completion(
        *("a", 0, "4", "eos", 4, -0.5, -1.0, 0.1, 1, 0, 0, 0, 7),
        token_ids=[5, 6, 52, 2],
        token_logprobs=[-0.25, -0.75, -0.5, -0.5],
        reasoning="2 and 2",
        reasoning_tokens=2,
    )
    prompt = Prompt("r", "2 + 2?", None, {}, None, "in.jsonl:1")
    request = Request("r", CHAT, prompts=(prompt,), logprobs=0)
    line = answered(request, [[sample]], "m", lambda id_: bytes([id_]))
    body = ChatCompletion.model_validate(line["response"]["body"])
    message = body.choices[0].message
    assert (message.content, message.model_extra) == ("4", {"reasoning_content": "2 and 2"})
    assert body.choices[0].logprobs is not None
    assert [one.token for one in body.choices[0].logprobs.content or ()] == ["4"]
    assert body.usage is not None
    assert body.usage.completion_tokens_details is not None
    assert body.usage.completion_tokens_details.reasoning_tokens == 2
