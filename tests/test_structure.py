"""Whole jobs with structure: texts that other libraries accept, the settings of a Job, a line and
a pair file, errors before a model is loaded, resume and grown caches."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from checkpoints import write_checkpoint, write_tokenizer
from command_line import cli

from bass_cli import Completion, Job, Pair, Sampling, Speculation, UserError, generate, load_pair
from bass_cli.config.file_options import Structure

pytest.importorskip("llguidance")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "yy", None]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
REGEX = r"(yes|no), [a-zé]{1,6}\d?"
GRAMMAR = 'root ::= item ("," item)? ("," item)?\nitem ::= [a-c] | "<" [0-9] ">"\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint("llama", folder, seed=0, num_hidden_layers=1, max_position_embeddings=512)
    write_tokenizer(folder)
    return folder


def job(model: Path, sampling: dict[str, Any], *, draft: str = "lookup", **more: Any) -> Job:
    given = {"seed": 5, "max_new_tokens": 70, "temperature": 1.0, "top_p": 1.0} | sampling
    return Job(
        pair=Pair(name="tiny", target=str(model), draft=draft),
        **{"n": 2, "device": "cpu", "token_ids": True, "sampling": Sampling(**given)} | more,
    )


PROMPTS: list[Any] = [
    "the cat sat",
    {"id": "r", "prompt": "an answer", "regex": REGEX},
    {"id": "g", "prompt": "a list", "grammar": GRAMMAR},
    {"id": "o", "prompt": "json", "json_object": True, "max_new_tokens": 40},
    {"id": "free", "prompt": "the dog", "json_schema": None, "max_new_tokens": 10},
]


def by_key(done: list[Completion]) -> dict[tuple[str, int], tuple[str, str, list[int] | None]]:
    return {(one.id, one.sample): (one.text, one.finish_reason, one.token_ids) for one in done}


@pytest.fixture(scope="module")
def plainly(model: Path) -> dict[tuple[str, int], tuple[str, str, list[int] | None]]:
    """The samples of plain decoding, one row at a time."""
    given = {"json_schema": SCHEMA}
    return by_key(list(generate(PROMPTS, job(model, given, draft="none", batch_size=1))))


def test_complete_texts_are_valid(plainly: dict[Any, Any]) -> None:
    ends = set()
    for (id_, _), (text, reason, _) in plainly.items():
        ends.add((id_, reason))
        if reason != "eos":
            continue
        if id_ == "0":
            jsonschema.validate(json.loads(text), SCHEMA)
        elif id_ == "r":
            assert re.fullmatch(REGEX, text)
        elif id_ == "g":
            assert re.fullmatch(r"([a-c]|<\d>)(,([a-c]|<\d>)){0,2}", text)
        elif id_ == "o":
            assert isinstance(json.loads(text), dict)
    assert {("0", "eos"), ("r", "eos"), ("g", "eos")} <= ends


@pytest.mark.parametrize("length", [3, "auto"])
def test_drafts_and_batches_change_no_sample(
    length: Any, model: Path, plainly: dict[Any, Any]
) -> None:
    drawn = job(model, {"json_schema": SCHEMA}, speculation=Speculation(length=length))
    assert by_key(list(generate(PROMPTS, drawn))) == plainly


def test_skipped_layers_as_draft_change_no_sample(tmp_path: Path) -> None:
    """A draft on the device, whose forbidden drafts are rejected."""
    write_checkpoint("llama", tmp_path, seed=0, num_hidden_layers=2)
    write_tokenizer(tmp_path)
    found = [
        by_key(list(generate(PROMPTS[:3], job(tmp_path, {"json_schema": SCHEMA}, draft=draft))))
        for draft in ("none", "skip:1")
    ]
    assert found[0] == found[1]


def test_maximal_coupling_gives_valid_texts(model: Path) -> None:
    drawn = job(model, {"regex": REGEX}, n=8, speculation=Speculation(length=3, coupling="maximal"))
    texts = [one.text for one in generate(["the cat", "a dog"], drawn)]
    assert len(texts) == 16
    assert all(re.fullmatch(REGEX, text) for text in texts)


def test_temperature_zero_is_the_likeliest_valid_text(model: Path) -> None:
    drawn = list(generate(["the cat"], job(model, {"regex": REGEX, "temperature": 0})))
    assert len({one.text for one in drawn}) == 1
    assert re.fullmatch(REGEX, drawn[0].text)


def test_resumed_file_equals_an_undisturbed_one(model: Path, tmp_path: Path) -> None:
    lines = [{"id": str(i), "prompt": f"the cat {i}"} for i in range(3)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "s.json").write_text(json.dumps(SCHEMA))
    command = ["generate", str(tmp_path / "p.jsonl"), "--model", str(model), "--device", "cpu"]
    flags = ["--n", "2", "--json-schema", str(tmp_path / "s.json"), "--token-ids", "--seed", "1"]
    out = tmp_path / "o.jsonl"
    cli(*command, *flags, "--out", str(out), code=0)
    written = out.read_text().splitlines(keepends=True)
    out.write_text("".join(written[:2]) + written[2][:20])
    cli(*command, *flags, "--out", str(out), code=0)

    def samples(raw: list[str]) -> list[Any]:
        return sorted((one["id"], one["sample"], one["token_ids"]) for one in map(json.loads, raw))

    assert samples(out.read_text().splitlines()) == samples(written)
    (tmp_path / "s.json").write_text(json.dumps(SCHEMA | {"type": "object", "title": "other"}))
    assert "json_schema" in cli(*command, *flags, "--out", str(out), "--resume", code=2).output


def test_a_text_that_the_model_cannot_write_is_an_error_of_its_samples(tmp_path: Path) -> None:
    """A vocabulary without digits. The other prompt goes on."""
    write_checkpoint("llama", tmp_path, seed=0, num_hidden_layers=1)
    write_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    for text in [text for text in vocabulary if re.search("[0-9]", text)]:
        vocabulary["\u4e00" + text.replace("7", "\u4e8c")] = vocabulary.pop(text)
    content["model"]["merges"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    prompts = [{"id": "a", "prompt": "cat", "regex": "a7"}, {"id": "b", "prompt": "cat", "regex": "a|b"}]  # fmt: skip
    found = {one.id: one for one in generate(prompts, job(tmp_path, {}, n=1))}
    assert found["a"].finish_reason == "error"
    assert found["a"].error == "no token of the model continues the text in its grammar"
    assert found["b"].text in ("a", "b")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": {"type": "nope"}}, "Invalid type: nope"),
    ({"json_schema": {"type": "array", "uniqueItems": True}}, 'Unimplemented keys: \\["uniqueItems"\\]'),
    ({"json_schema": '{"type": '}, "broken JSON"),
    ({"json_schema": "none.json"}, "cannot read none.json"),
    ({"json_schema": "caf\udce9.json"}, r"cannot read caf\\udce9.json: No such file"),
    ({"grammar": "\ud800"}, r"cannot read \\ud800: "),
    ({"json_schema": 3}, "mapping"),
    ({"regex": "a("}, "unclosed group"),
    ({"regex": ""}, "empty"),
    ({"grammar": 'start: "a" b'}, 'line 1, column 8: unknown name: "b"'),
    ({"grammar": 'root ::= "a" | ('}, "Expected"),
    ({"regex": "a", "json_object": True}, "exclude each other"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), BAD)
def test_mistakes_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**given)


def test_a_file_whose_name_is_not_utf8_is_named_in_messages(tmp_path: Path) -> None:
    path = tmp_path / "caf\udce9.lark"
    for content, message in ((b"start: b", r"caf\\udce9.lark: .*unknown name"), (b"\xff", "UTF-8")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            Sampling(grammar=path)  # type: ignore[arg-type]


def test_mistakes_of_a_line_name_file_line_and_field(tmp_path: Path) -> None:
    """A line cannot name a file either."""
    for field, value, message in (
        ("json_schema", {"type": "nope"}, "invalid type: nope"),
        ("regex", "(a", "unclosed group"),
        ("grammar", "g.lark", ""),
        ("json_schema", "s.json", "broken json"),
    ):
        path = tmp_path / "p.jsonl"
        path.write_text('{"prompt": "a"}\n' + json.dumps({"prompt": "b", field: value}) + "\n")
        done = cli("generate", str(path), "--model", str(tmp_path / "none"), code=2)
        assert f'p.jsonl:2: field "{field}": ' in done.output
        assert message in done.output.lower()


def test_two_structures_of_a_command_are_named_as_its_flags(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a\n")
    flags = ["--json-object", "--regex", "a", "--model", str(tmp_path)]
    done = cli("generate", str(tmp_path / "p.txt"), *flags, code=2)
    assert done.stderr == "bass: error: --json-object and --regex exclude each other\n"


def test_two_structures_of_a_line_are_named_as_its_fields(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": "b", "regex": "a", "json_object": True}) + "\n")
    done = cli("generate", str(path), "--model", str(tmp_path / "none"), code=2)
    assert '"json_object" and "regex" exclude each other' in " ".join(done.output.split())
    assert "--" not in done.output


def test_pair_file_names_a_schema_beside_it_and_a_flag_replaces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s.json").write_text('{"type": "object"}')
    pair = tmp_path / "p.yaml"
    pair.write_text("target: x/y\nsampling:\n  json_schema: s.json\n")
    monkeypatch.chdir("/")
    found = Job(pair=pair)
    assert found.sampling.json_schema == '{"type": "object"}'
    other = Job(pair=pair, sampling=Sampling(regex="a+"))
    assert (other.sampling.json_schema, other.sampling.regex) == (None, "a+")
    pair.write_text("target: x/y\nsampling:\n  top_k: 3\n  regex: (a\n")
    with pytest.raises(UserError, match=r'p.yaml:4: key "sampling.regex": unclosed group'):
        load_pair(pair)


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    for given in ({"json_object": True}, {"regex": "never seen before"}):
        with pytest.raises(UserError, match=r"pip install 'bass-cli\[structure\]'"):
            Sampling(**given)


def test_budget_warms_up_with_the_grammar(model: Path) -> None:
    """Its dummy rows follow the grammar too, so that no graph is captured on a prompt's time."""
    drawn = job(model, {"regex": REGEX}, budget=20.0)
    texts = [one.text for one in generate(["the cat"], drawn)]
    assert all(re.fullmatch(REGEX, text) for text in texts)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with tokens for a thinking part, whose template opens it."""
    folder = tmp_path_factory.mktemp("thinker")
    write_tokenizer(folder, extra=("<think>", "</think>"))
    write_checkpoint("llama", folder, seed=1, num_hidden_layers=1, vocab_size=330)
    template = "{% for m in messages %}{{ m.content }}{% endfor %} <think>"
    (folder / "chat_template.jinja").write_text(template)
    return folder


def test_thinking_part_is_closed_at_its_limit_and_the_grammar_begins_after_it(
    thinker: Path,
) -> None:
    prompts = [
        {"id": "both", "messages": [{"role": "user", "content": "hello"}]},
        {"id": "free", "messages": [{"role": "user", "content": "hello"}], "regex": None},
    ]
    found = []
    for draft, batch in (("none", 1), ("lookup", 4)):
        given = {"regex": REGEX, "max_thinking_tokens": 5, "max_new_tokens": 40}
        drawn = job(thinker, given, draft=draft, batch_size=batch, n=3, thinking="auto")
        found.append(list(generate(prompts, drawn)))
    assert by_key(found[0]) == by_key(found[1])
    for one in found[0]:
        assert one.reasoning is not None
        assert one.reasoning_tokens is not None
        assert one.reasoning_tokens <= 6
        if one.id == "both":
            assert re.fullmatch(REGEX, one.text)
    assert 6 in {one.reasoning_tokens for one in found[0]}


def test_grammar_that_the_vocabulary_does_not_fit_is_named(model: Path, tmp_path: Path) -> None:
    """For a job before its weights are loaded, for a line in its place of the output."""
    bad = 'start: "a" b\nb: <nope>'
    with pytest.raises(UserError, match=r"sampling.grammar`: line 2, column \d+: unknown special"):
        list(generate(["a"], job(model, {"grammar": bad})))
    prompts = [{"id": "x", "prompt": "a", "grammar": bad}, {"id": "y", "prompt": "a", "regex": "b"}]
    found = {one.id: one for one in generate(prompts, job(model, {}, n=1))}
    assert (found["x"].error or "").startswith('prompts[0]: field "grammar": line 2, column')
    assert found["y"].text == "b"


def test_digits_of_a_regex_are_ascii() -> None:
    """Python and llguidance know the digits of different versions of Unicode."""
    assert "[0-9]" in Structure("regex", r"\d+").lark()
