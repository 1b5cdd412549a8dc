"""`bass eval` and `bass score` with task files: the examples of examples/tasks, and resuming."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoint, write_tokenizer
from command_line import cli

from bass_cli.eval.tasks import packaged_tasks, task_names
from bass_cli.eval.tasks.task_file import read_packaged

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "tasks"
LONGEST = "    return max(words, key=len, default=None)\n"
# for each example: a problem, texts of a model, and their verdicts
ANSWERS: dict[str, tuple[str, dict[str, str]]] = {
    "capitals": (
        "the United States",
        {
            " Washington.\n": "passed",
            "washington d.c., of course": "passed",
            " New York City": "failed",
            "\n": "no answer",
        },
    ),
    "functions": (
        "longest",
        {
            LONGEST: "passed",
            f"Here:\n```python\ndef longest(words):\n{LONGEST}```\nDone.": "passed",
            "    return max(words, key=len)\n": "failed",
            "    return words[0\n": "failed",
            "    while True: pass\n": "timed out",
        },
    ),
    "packing": (
        "packing/2",
        {
            'Sure: {"packed": ["map", "kettle"]}': "passed",
            '{"packed": ["map", "kettle", "lamp"]}': "failed",  # 2.1 kg
            '{"packed": ["map", "map"]}': "failed",
            '{"packed": ["map", "piano"]}': "failed",
            "a map and a lamp": "failed",
        },
    ),
}


@pytest.fixture(autouse=True)
def place(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BASS_ALLOW_WEAK_SANDBOX", "1")  # these programs are the tests' own
    return here


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Write a tiny model. Returns the options that draw few samples with it."""
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint("llama", folder, shards=False, max_position_embeddings=1024)
    write_tokenizer(folder)
    sizes = ("--n", "2", "--max-new-tokens", "4", "--device", "cpu", "--prompt-format", "chat")
    return ["--model", str(folder), *sizes, "--limit", "2"]


def report_of(result: Any) -> dict[str, Any]:
    assert result.exit_code == 0, result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def verdicts(path: str) -> dict[int, str]:
    lines = Path(f"{path}.verdicts.jsonl").read_bytes().splitlines()
    return {row["sample"]: row["status"] for row in map(json.loads, lines)}


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_answers_to_the_examples_get_the_expected_verdicts(name: str) -> None:
    task_id, texts = ANSWERS[name]
    rows = [{"task_id": task_id, "completion": text, "sample": i} for i, text in enumerate(texts)]
    Path("f.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [] if name == "capitals" else ["--timeout", "1s"]
    result = cli("score", "f.jsonl", "--task", str(EXAMPLES / f"{name}.yaml"), "--json", *options)
    report = report_of(result)
    assert verdicts("f.jsonl") == dict(enumerate(texts.values()))
    passed = sum(status == "passed" for status in texts.values())
    assert report["task"] == name
    assert report["by_problem"][0]["passed"] == passed
    assert report["pass_at_k"]["1"] == pytest.approx(passed / len(texts))
    assert report["notes"][0].startswith("the file has 1 of the ")


def test_every_example_has_a_test() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} == set(ANSWERS)
    assert {"humaneval", "mbpp", "xsum", "gsm8k"} <= set(task_names())


def test_packaged_tasks_are_read_and_have_their_data_beside_them() -> None:
    assert "gsm8k" in packaged_tasks()
    for name in packaged_tasks():
        options = read_packaged(name).options
        assert options.name == name
        assert options.folder is not None
        assert (options.folder / f"{name}.yaml").is_file()


def test_examples_are_drawn_scored_resumed_and_scored_again(model: list[str]) -> None:
    for name in ANSWERS:
        file = str(EXAMPLES / f"{name}.yaml")
        first = cli("eval", file, *model, "--json", "--out", f"{name}.jsonl")
        report = report_of(first)
        assert (report["task"], report["problems"], report["samples"]) == (name, 2, 4)
        assert len(verdicts(f"{name}.jsonl")) == 2
        content = Path(f"{name}.jsonl").read_bytes()
        scored = report_of(cli("score", f"{name}.jsonl", "--task", file, "--json"))
        assert scored["statuses"] == report["statuses"]
        page = cli("report", f"{name}.jsonl", "--task", file, "--out", f"{name}.html", code=0)
        assert "have no verdict" not in page.stderr
    again = cli("eval", file, *model, "--json", "--out", f"{name}.jsonl")
    assert json.loads(again.stdout) == report
    assert Path(f"{name}.jsonl").read_bytes() == content
    for command in (("score", "capitals.jsonl"), ("rank", "capitals.jsonl", "--by", "majority")):
        refused = cli(*command, code=2)
        assert (
            'capitals.jsonl: its samples are of the task "capitals", which is a task file; name it '
            "with --task FILE.yaml" in refused.stderr
        )


def test_changed_check_keeps_samples_and_changed_prompt_refuses_them(model: list[str]) -> None:
    for name in ("capitals.yaml", "capitals.jsonl"):
        shutil.copy(EXAMPLES / name, name)
    text = Path("capitals.yaml").read_text()
    before = report_of(cli("eval", "capitals.yaml", *model, "--json", "--out", "o.jsonl"))
    content = Path("o.jsonl").read_bytes()
    Path("capitals.yaml").write_text(text.replace("'^[^,\\n]+'", "'^.*'"))
    after = report_of(cli("eval", "capitals.yaml", *model, "--json", "--out", "o.jsonl"))
    assert Path("o.jsonl").read_bytes() == content
    assert after["samples"] == before["samples"] == 4
    Path("capitals.yaml").write_text(text.replace("with its name only", "in one word"))
    refused = cli("eval", "capitals.yaml", *model, "--out", "o.jsonl", code=2)
    assert "o.jsonl: it was begun with other settings" in refused.stderr
    assert "prompts: " in refused.stderr


def test_budgets_compare_methods_on_a_task_file(model: list[str]) -> None:
    file = str(EXAMPLES / "capitals.yaml")
    result = cli("eval", file, *model, "--budgets", "20s", "--json")
    document = report_of(result)
    assert document["task"] == "capitals"
    assert [one["method"] for one in document["reports"]] == ["plain", "single", "batched"]
    assert len({json.dumps(one["statuses"]) for one in document["reports"]}) == 1
    assert all(one["finished"] == 4 for one in document["reports"])


def test_output_is_never_the_task_file_or_its_data(model: list[str]) -> None:
    for name in ("capitals.yaml", "capitals.jsonl"):
        shutil.copy(EXAMPLES / name, name)
    before = Path("capitals.jsonl").read_bytes()
    refused = cli("eval", "capitals.yaml", *model, "--out", "capitals.jsonl", "--overwrite", code=2)
    assert "capitals.jsonl: this is a file of the task, which would be lost" in refused.stderr
    assert Path("capitals.jsonl").read_bytes() == before


def test_check_function_that_cannot_be_loaded_is_refused_before_drawing(model: list[str]) -> None:
    for name in ("packing.yaml", "packing.jsonl"):
        shutil.copy(EXAMPLES / name, name)
    Path("packing.py").write_text("import nothing_of_this_name\ndef fits(a, b): return True\n")
    refused = cli("eval", "packing.yaml", *model, "--out", "o.jsonl", code=2)
    key = 'packing.yaml:12: key "check.function.file": packing.py: it cannot be loaded in the'
    assert key in refused.stderr
    assert "No module named 'nothing_of_this_name'" in refused.stderr
    assert not Path("o.jsonl").exists()


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("return record['no such field']", "raised KeyError: 'no such field'"),
        ("return len(answer)", "returned 1, not True or False"),
    ],
)
def test_faults_of_a_check_function_are_reported(body: str, fault: str) -> None:
    for name in ("packing.yaml", "packing.jsonl"):
        shutil.copy(EXAMPLES / name, name)
    Path("packing.py").write_text(f"def fits(answer, record):\n    {body}\n")
    Path("f.jsonl").write_text('{"task_id": "packing/1", "completion": "x"}\n')
    result = cli("score", "f.jsonl", "--task", "packing.yaml", "--json")
    assert report_of(result)["statuses"] == {"failed": 1}
    note = "1 samples failed by a fault of the check, such as: "
    assert note in result.stderr
    assert f"the check function {fault}" in result.stderr
