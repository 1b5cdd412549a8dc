"""The format of prompts: chosen by task and model, and kept by files of earlier runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoint, write_tokenizer
from command_line import cli
from templates import CHATML, LLAMA3, MISTRAL, OPENED, THINKING

from bass_cli.config.job import Job, pair_of_model
from bass_cli.errors import UserError
from bass_cli.eval import evaluation
from bass_cli.eval.tasks import load_task
from bass_cli.formats.tokenizer import Tokenizer

NAME = "tiny-{}-t0.2-n1-s0-max2.jsonl"
TASK = """name: tiny
data: d.jsonl
prompt: "{{ q }}"
question: "{{ q }}?"
answer: "{{ q }}"
check: exact
"""


@pytest.fixture(autouse=True)
def place(here: Path) -> Path:
    Path("t.yaml").write_text(TASK)
    Path("d.jsonl").write_text('{"q": "one"}\n')
    return here


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an instruct model, a base model with its template, and a model without a template.

    The template ends an answer with </s>, which is token 2.
    """
    folder = tmp_path_factory.mktemp("models")
    for name, template, eos in (("instruct", True, 2), ("base", True, 0), ("plain", False, 2)):
        write_checkpoint("llama", folder / name, shards=False)
        write_tokenizer(folder / name, template=template)
        config = json.dumps({"eos_token_id": eos})
        (folder / name / "generation_config.json").write_text(config)
    return folder


def choice(folder: Path, task: str = "t.yaml") -> evaluation.FormatChoice:
    return evaluation.choose_by_model(load_task(task), Job(pair=pair_of_model(str(folder))))


def bass(model: Path, *arguments: str, **settings: Any) -> Any:
    sizes = ("--n", "1", "--max-new-tokens", "2", "--device", "cpu")
    return cli("eval", "t.yaml", "--model", model, *sizes, *arguments, **settings)


def test_instruct_models_get_chats_and_base_models_raw_text(models: Path) -> None:
    assert choice(models / "instruct").prompt_format == "chat"
    assert "is an instruct model: its chat template ends answers by </s>" in str(
        choice(models / "instruct").reason
    )
    assert choice(models / "base").prompt_format == "raw"
    assert "is no instruct model: its chat template ends answers with a token that" in str(
        choice(models / "base").reason
    )
    assert choice(models / "plain").prompt_format == "raw"
    assert str(choice(models / "plain").reason).endswith("/plain has no chat template")


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "<|im_end|>"),
        (THINKING, "<|im_end|>"),
        (OPENED, "<|im_end|>"),
        (LLAMA3, "<|eot_id|>"),
        (MISTRAL, "</s>"),
    ],
    ids=["chatml", "thinking", "opened", "llama3", "mistral"],
)
def test_templates_in_the_style_of_published_ones_end_answers_by_their_token(
    tmp_path: Path, template: str, end: str
) -> None:
    tokens = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>")
    write_checkpoint("llama", tmp_path / "model", shards=False)
    write_tokenizer(tmp_path / "model", extra=tokens)
    job = Job(pair=pair_of_model(str(tmp_path / "model")), template=template)
    ids = Tokenizer.load(tmp_path / "model")
    for token in (*tokens, "</s>"):
        config = json.dumps({"eos_token_id": ids.id_of(token)})
        (tmp_path / "model" / "generation_config.json").write_text(config)
        found = evaluation.choose_by_model(load_task("t.yaml"), job)
        assert found.prompt_format == ("chat" if token == end else "raw"), found.reason


def test_tasks_with_one_text_do_not_depend_on_the_model(models: Path) -> None:
    Path("chat.yaml").write_text(TASK.replace('prompt: "{{ q }}"\n', ""))
    Path("raw.yaml").write_text(TASK.replace('question: "{{ q }}?"\n', ""))
    assert choice(models / "instruct", "raw.yaml")[:2] == ("raw", "tiny has no question for chats")
    assert choice(models / "base", "chat.yaml")[:2] == (
        "chat",
        "tiny has a question for chats only",
    )
    with pytest.raises(UserError, match="`prompt_format` chat: tiny has no question for chats"):
        evaluation.read_format("chat", load_task("raw.yaml"))
    with pytest.raises(UserError, match="`prompt_format` strip: tiny has no raw prompt; use chat"):
        evaluation.read_format("strip", load_task("chat.yaml"))


def test_option_comes_before_the_task_file_and_that_before_the_model() -> None:
    Path("t.yaml").write_text(f"{TASK}prompt_format: strip\n")
    task = load_task("t.yaml")
    assert evaluation.read_format(None, task) == "strip"
    assert evaluation.read_format("raw", task) == "raw"
    assert evaluation.read_format("auto", task) == "auto"
    assert evaluation.read_format(None, load_task("humaneval")) == "auto"


def test_choice_and_reason_are_shown_and_written_to_the_manifest(models: Path) -> None:
    for model, form in (("instruct", "chat"), ("base", "raw")):
        result = bass(models / model, code=0)
        name = f"tiny-{model}-{form}-t0.2-n1-s0-max2.jsonl"
        manifest = json.loads(Path(f"{name}.manifest.json").read_text())
        reason = choice(models / model).reason
        assert result.stderr.count(f"prompt format {form}: {reason}\n") == 1
        assert manifest["results"]["prompt_format"] == form
        assert manifest["prompt_format_reason"] == reason
    given = bass(models / "base", "--prompt-format", "raw", "--out", "o.jsonl")
    assert "prompt format" not in given.stderr
    assert json.loads(Path("o.jsonl.manifest.json").read_text())["prompt_format_reason"] is None


@pytest.mark.parametrize("out", [(), ("--out", "o.jsonl")], ids=["default name", "own name"])
def test_file_of_an_earlier_run_is_continued_in_its_format(
    models: Path, out: tuple[str, ...]
) -> None:
    """Earlier versions had the default raw."""
    bass(models / "instruct", "--prompt-format", "raw", *out, code=0)
    name = out[-1] if out else "tiny-instruct-raw-t0.2-n1-s0-max2.jsonl"
    again = bass(models / "instruct", *out, code=0)
    assert f"prompt format raw: {name} was begun in it" in again.stderr
    assert f"{name}: complete, 1 samples are there already" in again.stderr
    assert [path.name for path in Path().glob("*.jsonl") if path.name != "d.jsonl"].count(name) == 1
    bass(models / "instruct", "--prompt-format", "chat", *out, code=2 if out else 0)
    anew = bass(models / "instruct", "--overwrite", *out)
    assert "prompt format chat: " in anew.stderr


def test_sweep_of_an_earlier_run_is_continued_in_its_format(models: Path) -> None:
    options = ("--budgets", "20s", "--draft", "none", "--out", "o.jsonl")
    bass(models / "instruct", "--prompt-format", "raw", *options, code=0)
    again = bass(models / "instruct", *options, code=0)
    assert "prompt format raw: o.plain-20s.jsonl was begun in it" in again.stderr
