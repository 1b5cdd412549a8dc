"""Compare rendered chats with transformers' own templating, for templates in published styles, and
test what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from checkpoints import edit_json, tokenizer_metadata, write_checkpoint, write_gguf, write_tokenizer
from templates import CHATML, LLAMA3, MISTRAL, OPENED, THINKING

from bass_cli.config.job import Job, load_pair, make_job
from bass_cli.errors import UserError
from bass_cli.formats.tokenizer import Tokenizer
from bass_cli.io.prompts import prompts_of
from bass_cli.run.pair import open_files
from bass_cli.run.tasks import TaskBuilder

TAGS = ("<think>", "</think>")
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SYSTEM, USER = {"role": "system", "content": " Be brief. "}, {"role": "user", "content": "2 + 2?"}
BEGUN = {"role": "assistant", "content": "It is"}
CALLED = [
    USER,
    {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]},
    {"role": "tool", "content": "4"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(place, extra=("<|im_start|>", "<|im_end|>", *TAGS))
    return place


def theirs(folder: Path, template: str, messages: Any, **how: Any) -> str:
    other = transformers.AutoTokenizer.from_pretrained(folder)
    text = other.apply_chat_template(messages, chat_template=template, tokenize=False, **how)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize(
    ("template", "messages", "how"),
    [
        (CHATML, [USER], {}),
        (CHATML, [SYSTEM, USER], {"tools": [TOOL]}),
        (CHATML, CALLED, {"tools": [TOOL]}),
        (CHATML, [SYSTEM, USER, BEGUN], {}),
        (LLAMA3, [SYSTEM, USER, BEGUN, USER], {}),
        (LLAMA3, [USER, {**BEGUN, "content": "It is "}], {"date_string": "1 May 2025"}),
        (MISTRAL, [SYSTEM, USER], {}),
        (MISTRAL, [USER, BEGUN], {}),
        (THINKING, [USER], {"enable_thinking": False}),
        (THINKING, [USER, {**BEGUN, "content": "<think>\nLet me"}], {}),
        (OPENED, [USER], {}),
    ],
)
def test_a_rendered_chat_is_that_of_transformers(
    folder: Path, template: str, messages: Any, how: dict[str, Any]
) -> None:
    ours = Tokenizer.load(folder).with_template(template)
    continued = messages[-1]["role"] == "assistant"
    expected = theirs(folder, template, messages, add_generation_prompt=not continued,
                      continue_final_message=continued, **how)  # fmt: skip
    tools = how.pop("tools", None)
    assert ours.render(messages, tools=tools, args=how) == expected
    other = transformers.AutoTokenizer.from_pretrained(folder)
    ids = other(expected, add_special_tokens=False)["input_ids"]
    assert ours.encode_chat(messages, tools=tools, args=how) == ids


# In the styles of LLaVA and SmolVLM: of a text they render nothing.
PARTS = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}",
    "{% for message in messages %}{{ message.role | capitalize }}:"
    "{% for line in message.content %}{% if line.type == 'text' %}{{ line.text }}{% endif %}"
    "{% endfor %}<end>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}",
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}parts{% endif %}"
    "{% endfor %}",
)


@pytest.mark.parametrize(
    ("template", "takes_parts"), list(zip(PARTS, (True, True, False), strict=True))
)
def test_a_template_that_takes_parts_only_gets_them(
    folder: Path, template: str, takes_parts: bool
) -> None:
    messages = [SYSTEM, USER, {"role": "assistant", "content": "Yes."}, USER]
    parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]
    ours = Tokenizer.load(folder).with_template(template)
    expected = theirs(folder, template, parts if takes_parts else messages,
                      add_generation_prompt=True)  # fmt: skip
    assert USER["content"] in expected
    assert ours.render(messages) == expected
    begun = [USER, BEGUN]
    assert ours.render(begun).rstrip().endswith(BEGUN["content"])


def test_only_roles_whose_text_is_dropped_get_parts(folder: Path) -> None:
    """The system message is a text here, and must come first."""
    template = (
        "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{% if part.type == 'text' %}|{{ part.text }}{% endif %}"
        "{% endfor %}{% endif %}{% endfor %}"
    )
    ours = Tokenizer.load(folder).with_template(template)
    expected = f"{SYSTEM['content']}|{USER['content']}"
    assert ours.render([SYSTEM, USER]) == expected


@pytest.mark.parametrize(
    ("template", "messages", "args", "reason"),
    [
        (MISTRAL, [USER, USER], {}, "roles must alternate user and assistant"),
        (LLAMA3, [USER], {"enable_thinkin": 1}, "it has no variable enable_thinkin; known"),
        (LLAMA3, [USER], {"date_strin": 1}, 'no variable date_strin; did you mean "date_string"'),
        (MISTRAL, [USER], {"messages": []}, "messages is set by bass"),
        (LLAMA3, CALLED, {}, r"messages\[1\].tool_calls: it does not use this key"),
        (LLAMA3, [{**USER, "name": "Ann"}], {}, r"messages\[0\].name: it does not use this key"),
    ],
)
def test_what_a_template_refuses_or_drops_is_an_error(
    folder: Path, template: str, messages: Any, args: dict[str, Any], reason: str
) -> None:
    ours = Tokenizer.load(folder).with_template(template)
    with pytest.raises(UserError, match=f"the chat template refuses the messages: .*{reason}"):
        ours.render(messages, args=args)
    with pytest.raises(UserError, match="it has no variable tools"):
        Tokenizer.load(folder).with_template(LLAMA3).render([USER], tools=[TOOL])


@pytest.mark.parametrize(
    ("template", "fields", "reason"),
    [
        (
            LLAMA3,
            {"template_args": {"date_strin": 1}},
            'no variable date_strin; did you mean "date',
        ),
        (LLAMA3, {"tools": [TOOL]}, "it has no variable tools"),
        ("{% if x %}{{ y }}", {}, "unexpected|Unexpected|expected"),
    ],
)
def test_faults_of_a_whole_job_are_found_before_weights_are_loaded(
    tmp_path: Path, template: str, fields: dict[str, Any], reason: str
) -> None:
    write_checkpoint("llama", tmp_path, shards=False, num_hidden_layers=2)
    write_tokenizer(tmp_path)
    job = Job(pair={"name": "x", "target": str(tmp_path)}, template=template, **fields)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"the chat template: .*({reason})"):
        open_files(job)


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (THINKING, "assistant\n<think>\n\n</think>\n\n"),
        (OPENED, "assistant\n<think>\n\n</think>\n\n"),
        (CHATML, "assistant\n<think>\n\n</think>\n\n"),
        (CHATML + "{%- if thinking %}{{- 'x' }}{%- endif %}", "assistant\n<think>\n\n</think>\n\n"),
    ],
)
def test_thinking_is_turned_off_by_the_template_or_a_closed_part(
    folder: Path, template: str, end: str
) -> None:
    ours = Tokenizer.load(folder).with_template(template)
    assert ours.render([USER], without_thinking=TAGS).endswith(end)
    known = {THINKING: "enable_thinking", OPENED: None, CHATML: None}
    assert ours.check_chats() == known.get(template, "thinking")
    begun = ours.render([USER, BEGUN], without_thinking=TAGS)  # a begun answer stays as it is
    assert begun.endswith("assistant\nIt is")


def test_the_template_in_a_gguf_file_takes_tools_and_continues(
    folder: Path, tmp_path: Path
) -> None:
    told = tokenizer_metadata(folder) | {"tokenizer.chat_template": CHATML}
    size = len(told["tokenizer.ggml.tokens"])
    write_gguf("llama", tmp_path / "m.gguf", vocab_size=size, metadata=told)
    ours = Tokenizer.load(tmp_path / "m.gguf")
    expected = theirs(folder, CHATML, [SYSTEM, USER], tools=[TOOL], add_generation_prompt=True)
    assert ours.render([SYSTEM, USER], tools=[TOOL]) == expected
    assert ours.render([USER, BEGUN]).endswith("assistant\nIt is")
    assert ours.encode_chat([USER]) == Tokenizer.load(folder).with_template(CHATML).encode_chat(
        [USER]
    )


def reader(folder: Path, template: str, **job: Any) -> TaskBuilder:
    pair = {"name": "x", "target": str(folder), "draft": "none"}
    made = Job(pair=pair, template=template, **job)  # type: ignore[arg-type]
    assert made.template is not None
    return TaskBuilder(made, Tokenizer.load(folder).with_template(made.template), context=2000)


def test_the_jobs_system_tools_and_arguments_hold_where_a_prompt_has_none(folder: Path) -> None:
    read = reader(folder, CHATML, system="Job's.", tools=[TOOL])
    own = {"type": "function", "function": {"name": "own"}}
    lines: list[Any] = ["2 + 2?", {"prompt": "2 + 2?", "system": "Own."},
                        {"messages": [SYSTEM, USER]}, {"messages": [USER], "tools": [own]}]  # fmt: skip
    job = {"role": "system", "content": "Job's."}
    expected = [
        ([job, USER], TOOL),
        ([{"role": "system", "content": "Own."}, USER], TOOL),
        ([SYSTEM, USER], TOOL),
        ([job, USER], own),
    ]
    for prompt, (messages, tool) in zip(prompts_of(lines), expected, strict=True):
        text = theirs(folder, CHATML, messages, tools=[tool], add_generation_prompt=True)
        ids = Tokenizer.load(folder).encode_part(text)
        assert read.build(prompt, [0], now=0.0).tokens == ids


def test_a_lines_arguments_come_before_the_jobs(folder: Path) -> None:
    read = reader(folder, LLAMA3, template_args='{"date_string": "1 May"}', chat=True)
    lines = ["a", {"prompt": "a", "template_args": {"date_string": "2 May"}}]
    texts = [
        Tokenizer.load(folder).decode(read.build(prompt, [0], now=0.0).tokens)
        for prompt in prompts_of(lines)
    ]
    assert ["1 May" in texts[0], "2 May" in texts[1]] == [True, True]


def test_a_refused_prompt_is_named_by_its_place(folder: Path) -> None:
    (prompt,) = prompts_of([{"messages": [USER, USER]}])
    with pytest.raises(UserError, match=r"prompts\[0\]: the chat template refuses .*alternate"):
        reader(folder, MISTRAL).build(prompt, [0], now=0.0)


def test_a_pair_file_names_templates_and_tools_beside_it(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(CHATML)
    (tmp_path / "tools.json").write_text(json.dumps([TOOL]))
    (tmp_path / "p.yaml").write_text(
        "target: x/y\ntemplate: t.jinja\ntools: tools.json\nsystem: Be brief.\n"
        "template_args: {enable_thinking: false}\nthinking: off\n"
    )
    pair = load_pair(tmp_path / "p.yaml")
    job = Job(pair=pair, system="Mine.")  # type: ignore[arg-type]
    assert (job.template, job.tools, job.system) == (CHATML, [TOOL], "Mine.")
    assert (job.template_args, job.thinking) == ({"enable_thinking": False}, "off")
    assert Job.model_validate(job.model_dump()) == job  # the same after a second validation


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"template": "none.jinja"}, "`template`: cannot read none.jinja: No such file"),
        ({"template_args": "[1]"}, "an object such as"),
        ({"template_args": "{"}, "broken JSON"),
        ({"tools": "none.json"}, "`tools`: cannot read none.json"),
        ({"tools": [{}]}, "tool 0 is not an object like"),
        ({"system": ""}, "at least 1 character"),
        ({"system": "x", "chat": False}, "`system` and `chat=False` exclude each other"),
    ],
)
def test_wrong_options_of_chats_are_named(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises((UserError, ValueError), match=reason):
        Job(pair={"name": "x", "target": "x/y"}, **fields)  # type: ignore[arg-type]


def test_a_file_that_is_no_template_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("hello")
    with pytest.raises(UserError, match=r"t\.jinja: it is not a chat template"):
        Job(pair={"name": "x", "target": "x/y"}, template=str(tmp_path / "t.jinja"))  # type: ignore[arg-type]


def test_a_template_for_tools_is_used_with_tools(folder: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template=False)
    named = [{"name": "default", "template": LLAMA3}, {"name": "tool_use", "template": CHATML}]
    edit_json(tmp_path / "tokenizer_config.json", chat_template=named)
    other = transformers.AutoTokenizer.from_pretrained(tmp_path)
    metadata = tokenizer_metadata(folder) | {"tokenizer.chat_template": LLAMA3}
    metadata |= {"tokenizer.chat_template.tool_use": CHATML}
    size = len(metadata["tokenizer.ggml.tokens"])
    write_gguf("llama", tmp_path / "m.gguf", vocab_size=size, metadata=metadata)
    for ours in (Tokenizer.load(tmp_path), Tokenizer.load(tmp_path / "m.gguf")):
        for tools in (None, [TOOL]):
            text = other.apply_chat_template(
                [SYSTEM, USER], tools=tools, tokenize=False, add_generation_prompt=True
            )
            assert ours.render([SYSTEM, USER], tools=tools) == text


def test_a_fault_of_two_options_names_both() -> None:
    with pytest.raises(UserError, match=r"^`system` and `chat=False` exclude each other"):
        make_job(load_pair("smollm2"), system="x", chat=False)
