"""`bass generate` with a stand-in for the engine: output streams, exit codes, precedence of
settings."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import cli
from stand_in import loaded

import bass_cli.run

pytestmark = pytest.mark.usefixtures("stand_in")


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def result_keys(text: str) -> list[tuple[str, int, str]]:
    return sorted((row["id"], row["sample"], row["text"]) for row in rows(text))


def test_only_results_on_stdout() -> None:
    result = cli("generate", "p.jsonl", "--n", "2", code=0)
    assert result_keys(result.stdout) == [
        ("0", 0, "a/0/0"),
        ("0", 1, "a/1/0"),
        ("b", 0, "B/0/0"),
        ("b", 1, "B/1/0"),
    ]
    assert "4 samples (4 eos)" in result.stderr
    assert "accepted" not in result.stderr
    verbose = cli("generate", "p.jsonl", "--n", "2", "--verbose")
    assert "drafts accepted: 2.00 a round, 50%" in verbose.stderr
    assert "rows busy: 100% of 2" in verbose.stderr
    assert verbose.stdout == result.stdout
    both = cli("generate", "p.jsonl", "--quiet", "--verbose")
    assert (both.exit_code, "--quiet and --verbose contradict" in both.stderr) == (2, True)
    quiet = cli("generate", "p.jsonl", "--n", "2", "--quiet")
    assert (quiet.stdout, quiet.stderr) == (result.stdout, "")


def test_stdin_and_text_lines() -> None:
    assert result_keys(cli("generate", "-", "--n", "1", input="x\n\ny\n").stdout) == [
        ("0", 0, "x/0/0"),
        ("2", 0, "y/0/0"),
    ]


def test_the_summary_as_json() -> None:
    result = cli("generate", "p.jsonl", "--n", "2", "--out", "o.jsonl", "--json")
    summary = json.loads(result.stdout)
    assert (summary["samples"], summary["tokens"], summary["output"]) == (4, 12, "o.jsonl")
    assert (summary["accepted_per_round"], summary["acceptance_rate"]) == (2.0, 0.5)
    assert summary["finish_reasons"] == {"eos": 4}
    again = json.loads(cli("generate", "p.jsonl", "--n", "2", "--out", "o.jsonl", "--json").stdout)
    assert (again["samples"], again["file"]["samples"]) == (0, 4)


def test_precedence_is_pair_then_variable_then_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(*flags: str) -> tuple[float, float, int]:
        cli("generate", "p.jsonl", "--pair", "pair.yaml", "--n", "1", *flags, code=0)
        sampling = loaded[-1].sampling
        return sampling.temperature, sampling.top_p, sampling.seed

    assert chosen() == (0.3, 0.5, 9)
    monkeypatch.setenv("BASS_TEMPERATURE", "0.6")
    monkeypatch.setenv("BASS_SEED", "4")
    assert chosen() == (0.6, 0.5, 4)
    assert chosen("--temperature", "0", "--top-p", "1") == (0.0, 1.0, 4)


def test_a_model_needs_no_pair_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("models", "folder", "a_package"):
        (tmp_path / name).mkdir()
    for name in ("models/t.gguf", "models/u.gguf", "a_package/__init__.py", "a_package/m.gguf"):
        (tmp_path / name).touch()
    cli("generate", "p.jsonl", "--model", "models/t.gguf", "--out", "o.jsonl", code=0)
    pair = loaded[-1].pair
    assert (pair.name, pair.target, pair.draft, pair.folder) == (
        "t",
        "models/t.gguf",
        "mtp-or-lookup",
        None,
    )
    manifest = json.loads((tmp_path / "o.jsonl.manifest.json").read_text())
    assert (manifest["results"]["target"], manifest["job"]["pair"]["target"]) == (
        "models/t.gguf",
        "models/t.gguf",
    )
    other = cli("generate", "p.jsonl", "--model", "models/u.gguf", "--out", "o.jsonl", code=2)
    assert '\n  target: "models/t.gguf" before, "models/u.gguf" now' in other.stderr
    (tmp_path / "same.yaml").write_text(
        "target: models/t.gguf\n"
    )  # the same target by another road goes on
    cli("generate", "p.jsonl", "--pair", "same.yaml", "--out", "o.jsonl", code=0)
    names = {
        "Qwen/Qwen2.5-0.5B": "Qwen2.5-0.5B",
        "folder/": "folder",
        ".": tmp_path.name,
        "package:a_package/m.gguf": "m",
    }
    for model, name in names.items():
        cli("generate", "p.jsonl", "--model", model, "--draft", "none", code=0)
        assert (loaded[-1].pair.name, loaded[-1].pair.target, loaded[-1].pair.draft) == (
            name,
            model,
            "none",
        )


def test_one_note_tells_how_plain_prompts_are_formatted(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    (tmp_path / "both.jsonl").write_text(
        (tmp_path / "chats.jsonl").read_text() + (tmp_path / "p.jsonl").read_text()
    )
    for model in ("t.gguf", "chatty.gguf"):
        (tmp_path / model).touch()
    raw = "plain prompts are continued as raw text; with --chat they use the model's chat template"
    chat = (
        "plain prompts use the model's chat template; with --no-chat they are continued as raw text"
    )
    for flags, said in (((), raw), (("--no-chat",), raw), (("--chat",), chat)):
        for prompts, plain in (("p.jsonl", True), ("both.jsonl", True), ("chats.jsonl", False)):
            if flags == ("--no-chat",) and prompts != "p.jsonl":  # messages are refused
                continue
            stderr = cli("generate", prompts, "--model", "chatty.gguf", *flags).stderr
            assert [line for line in stderr.splitlines() if "plain prompts" in line] == [
                said
            ] * plain
    assert "plain prompts" not in cli("generate", "p.jsonl", "--model", "t.gguf").stderr
    assert cli("generate", "p.jsonl", "--model", "chatty.gguf", "--quiet").stderr == ""


def test_every_option_has_a_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = {
        "PAIR": "pair.yaml", "N": "3", "OUT": "o.jsonl", "MAX_NEW_TOKENS": "7", "TOP_K": "5", "STOP": '["a b", "c"]',
        "CHAT": "0", "DRAFT": "lookup", "DRAFT_LENGTH": "6", "COUPLING": "maximal", "BUDGET": "500ms",
        "BATCH_SIZE": "2", "DEVICE": "cpu", "DTYPE": "fp32", "LIMIT": "1", "TOKEN_IDS": "1", "PROMPT_COLUMN": "prompt",
        "QUIET": "1", "OVERWRITE": "1", "JSON": "1",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(f"BASS_{name}", value)
    result = cli("generate", "p.jsonl")
    assert (result.exit_code, result.stderr, json.loads(result.stdout)["samples"]) == (0, "", 3)
    job = loaded[-1]
    assert (job.n, job.limit, job.chat, job.budget, job.batch_size, job.token_ids) == (
        3,
        1,
        False,
        0.5,
        2,
        True,
    )
    assert (job.sampling.max_new_tokens, job.sampling.top_k, job.sampling.stop) == (
        7,
        5,
        ("a b", "c"),
    )
    assert (job.speculation.length, job.speculation.coupling, job.pair.draft) == (
        6,
        "maximal",
        "lookup",
    )
    assert (job.device, job.dtype, len(rows((tmp_path / "o.jsonl").read_text()))) == (
        "cpu",
        "fp32",
        3,
    )
    monkeypatch.setenv("BASS_STOP", "one text")
    cli("generate", "p.jsonl", code=0)
    assert loaded[-1].sampling.stop == ("one text",)


BAD: list[tuple[dict[str, str], list[str], str]] = [
    ({"x.jsonl": '{"prompt": "a"}\n{"prompt": "b"\n'}, ["x.jsonl"], "x.jsonl:2: broken JSON"),
    ({"x.jsonl": '{"prompt": "a"}\n{"id": "q"}\n'}, ["x.jsonl"], 'x.jsonl:2: field "prompt": it '
                                                                 'is missing'),
    ({"x.jsonl": '{"prompt": "a", "id": 1}\n{"prompt": "b", "id": '
                 '1}\n'}, ["x.jsonl"], 'x.jsonl:2: field "id": "1" is'),
    ({}, ["none.jsonl"], "none.jsonl: there is no such prompt file"),
    ({"y.yaml": "target: t\nsampling: {top_q: 1}\n"}, ["p.jsonl", "--pair", "y.yaml"],
     'y.yaml:2: unknown key "sampling.top_q"; did you mean "top_p"?'),
    ({"y.yaml": "target: t\n  x: [\n"}, ["p.jsonl", "--pair", "y.yaml"], "y.yaml:2: broken YAML"),
    ({"y.yaml": "target: missing.gguf\n"}, ["p.jsonl", "--pair", "y.yaml"],
     '"missing.gguf": there is no such file or folder'),
    ({}, ["p.jsonl", "--pair", "smolm"], 'there is no pair "smolm"; did you mean "smollm2"?'),
    ({}, ["p.jsonl", "--pair", "Qwen/Qwen2.5-0.5B"], "is a model, not a pair; give it with "
                                                     "--model Qwen/Qwen2.5-0.5B"),
    ({"m.gguf": "GGUF"}, ["p.jsonl", "--pair", "m.gguf"], "give it with --model m.gguf"),
    ({}, ["p.jsonl", "--pair", "."], "give it with --model ."),
    ({}, ["p.jsonl", "--model", "smollm2"], '--model (or BASS_MODEL): "smollm2" is a pair; give it with --pair '
                                            'smollm2'),
    ({}, ["p.jsonl", "--model", "pair.yaml"], "give it with --pair pair.yaml"),
    ({}, ["p.jsonl", "--model", "m.gguf", "--pair", "smollm2"], "--model (or BASS_MODEL) exclude "
                                                                "each other"),
    ({}, ["p.jsonl", "--model", ""], "--model (or BASS_MODEL): it is empty"),
    ({}, ["p.jsonl", "--model", "parallel:m/p"], "--model (or BASS_MODEL): a target is a model by itself"),
    ({}, ["p.jsonl", "--n", "0"], "--n (or BASS_N): it should be greater than or equal to 1 (got "
                                  "0)"),
    ({}, ["p.jsonl", "--n", "many"], "--n"),
    ({}, ["p.jsonl", "--budget", "-1s"], '--budget (or BASS_BUDGET): "-1s" is not a time above 0'),
    *(({}, ["p.jsonl", "--budget", time], "--budget (or BASS_BUDGET): ")
      for time in ("1e400", "1" + "0" * 400, "9" * 6000, "nan", "inf", "1000001", "20000m")),
    *(({}, ["p.jsonl", option, "9" * digits], option) for digits in (19, 400, 6000)
      for option in ("--n", "--seed", "--max-new-tokens", "--threads", "--limit", "--batch-size", "--top-k")),
    ({}, ["p.jsonl", "--n", "1000001"], "--n (or BASS_N): it should be less than or equal to "
                                        "1000000"),
    ({}, ["p.jsonl", "--batch-size", "1000001"], "--batch-size (or BASS_BATCH_SIZE): 1000001 is "
                                                 "not valid"),
    ({}, ["p.jsonl", "--temprature", "1"], "--temperature"),
    ({}, ["p.jsonl", "--draft-length", "tables"], "--draft-length (or BASS_DRAFT_LENGTH): "
                                                  "'tables'"),
    ({}, ["p.jsonl", "--out", "nowhere/o.jsonl"], "nowhere/o.jsonl: the folder nowhere is not "
                                                  "there"),
    ({}, ["p.jsonl", "--out", "/proc/o.jsonl"], "/proc/o.jsonl: "),
    ({}, ["p.jsonl", "--out", "."], ".: this is a folder"),
    ({"o.jsonl": "mine\n"}, ["p.jsonl", "--out", "o.jsonl"], "o.jsonl: it exists and has no "
                                                             "manifest"),
    ({}, ["p.jsonl", "--out", "o.jsonl", "--resume"], "o.jsonl: there is nothing to resume"),
    ({}, ["p.jsonl", "--out", "o.jsonl", "--resume", "--overwrite"], "--resume and --overwrite "
                                                                     "contradict"),
    ({}, ["p.jsonl", "--json"], "--json needs --out FILE"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "arguments", "expected"), BAD)
def test_bad_input_is_found_before_a_model_is_loaded(
    tmp_path: Path, files: dict[str, str], arguments: list[str], expected: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    before = sorted(tmp_path.iterdir())
    result = cli("generate", *arguments)
    assert expected in result.stderr
    assert (result.exit_code, result.stdout, loaded) == (2, "", [])
    assert sorted(tmp_path.iterdir()) == before
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("words", [
    ["bench"], ["distill", "--out", "draft"], ["eval", "humaneval", "--budgets", "1s"],
])  # fmt: skip
def test_commands_refuse_a_missing_model_before_torch_is_imported(
    tmp_path: Path, words: list[str]
) -> None:
    start = "import sys; sys.modules['torch'] = None; from bass_cli.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", start, *words, "--model", "./no"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert '"./no": there is no such file or folder' in done.stderr
    assert done.returncode == 2


def test_missing_resources_exit_with_code_3(tmp_path: Path) -> None:
    (tmp_path / "pair.yaml").write_text("target: huge\n")
    result = cli("generate", "p.jsonl", "--pair", "pair.yaml")
    assert (result.exit_code, loaded) == (3, [])
    assert "does not fit" in result.stderr


@pytest.mark.parametrize(("word", "code"), [("FAIL", 1), ("SLOW", 0)])
def test_failed_prompts_exit_with_code_1_but_budget_truncation_with_0(
    tmp_path: Path, word: str, code: int
) -> None:
    (tmp_path / "p.txt").write_text(f"a\n{word}\nc\n")
    cli("generate", "p.txt", "--n", "2", "--out", "o.jsonl", code=code)
    written = rows((tmp_path / "o.jsonl").read_text())
    assert [row["id"] for row in written if row["finish_reason"] == "eos"] == ["0", "0", "2", "2"]
    assert len(written) == (5 if word == "FAIL" else 6)
    cli("generate", "p.txt", "--n", "2", "--out", "o.jsonl", code=code)
    again = rows((tmp_path / "o.jsonl").read_text())
    assert sorted(row["id"] for row in again) == sorted(row["id"] for row in written)


def test_rerun_on_a_complete_file_says_so_and_loads_no_model(tmp_path: Path) -> None:
    base = ["generate", "p.jsonl", "--out", "o.jsonl"]
    cli(*base, "--n", "2", code=0)
    before = (tmp_path / "o.jsonl").read_bytes()
    loaded.clear()
    again = cli(*base, "--n", "2", "--json")
    assert (again.exit_code, loaded, json.loads(again.stdout)["samples"]) == (0, [], 0)
    assert again.stderr == "o.jsonl: complete, 4 samples are there already\n"
    assert (tmp_path / "o.jsonl").read_bytes() == before
    (tmp_path / "o.jsonl").write_bytes(before[:-9])  # as a crash leaves it
    torn = cli(*base, "--n", "2")
    assert (torn.exit_code, len(loaded)) == (0, 1)
    assert "o.jsonl: continuing, 3 samples are there already" in torn.stderr
    assert result_keys((tmp_path / "o.jsonl").read_text()) == result_keys(before.decode())


def test_prompts_that_cannot_be_run_are_explained_on_stderr_too(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a\nFAIL\nFAIL\n")
    for quiet in ([], ["--quiet"]):
        result = cli("generate", "p.txt", "--out", "o.jsonl", *quiet, code=1)
        assert (
            'bass: error: 2 prompts could not be run; the first, "1": too long\n' in result.stderr
        )
    (tmp_path / "p.txt").write_text("FAIL\n")
    assert (
        'bass: error: 1 prompt could not be run; the first, "0": too long\n'
        in cli("generate", "p.txt").stderr
    )


def test_which_options_a_resumed_run_may_change(tmp_path: Path) -> None:
    base = ["generate", "p.jsonl", "--pair", "pair.yaml", "--out", "o.jsonl"]
    cli(*base, "--n", "1", code=0)
    for flags in (
        ["--draft", "none"],
        ["--draft-length", "3"],
        ["--batch-size", "2"],
        ["--resume"],
        ["--n", "2"],
    ):
        cli(*base, *(flags if "--n" in flags else ["--n", "1", *flags]), code=0)
    before = (tmp_path / "o.jsonl").read_bytes()
    assert len(rows(before.decode())) == 4
    (tmp_path / "other.jsonl").write_text('{"prompt": "a"}\n')
    refused = {
        "seed": ["--seed", "1"], "temperature": ["--temperature", "1"], "n": ["--n", "1"], "chat": ["--chat"],
        "coupling": ["--coupling", "maximal"], "max_new_tokens": ["--max-new-tokens", "5"], "stop": ["--stop", "x"],
        "budget": ["--budget", "1s"], "token_ids": ["--token-ids"],
    }  # fmt: skip
    for key, flags in refused.items():
        result = cli(*base, *(flags if key == "n" else ["--n", "2", *flags]), code=2)
        assert f"\n  {key}: " in result.stderr
    base[1] = "other.jsonl"
    assert "\n  prompts: " in cli(*base, "--n", "2").stderr
    assert (tmp_path / "o.jsonl").read_bytes() == before
    cli(*base, "--n", "2", "--overwrite", code=0)
    assert len(rows((tmp_path / "o.jsonl").read_text())) == 2


MAXIMAL = shlex.split("generate p.jsonl --pair pair.yaml --out o.jsonl --coupling maximal")


def test_under_maximal_coupling_the_draft_is_part_of_the_result() -> None:
    cli(*MAXIMAL, code=0)
    for key, flags in {"draft": ["--draft", "none"], "draft_length": ["--draft-length", "3"],
                       "batch_size": ["--batch-size", "3"]}.items():  # fmt: skip
        assert f"\n  {key}: " in cli(*MAXIMAL, *flags, code=2).stderr


def test_maximal_coupling_resumes_with_the_same_batch_size(tmp_path: Path) -> None:
    """Even if `--batch-size auto` would give another size now."""
    warm = [*MAXIMAL, "--temperature", "1"]
    cli(*warm, "--n", "2", code=0)
    manifest = tmp_path / "o.jsonl.manifest.json"
    begun = json.loads(manifest.read_text())
    assert begun["results"]["batch_size"] > 1
    begun["results"]["batch_size"] = 1  # as where little memory was free
    manifest.write_text(json.dumps(begun | {"finished": False}))
    assert "so complete it with n 2 first" in cli(*warm, "--n", "3", code=2).stderr
    manifest.write_text(json.dumps(begun))
    grown = cli(*warm, "--n", "3", code=0)
    assert json.loads(manifest.read_text())["results"]["batch_size"] == 1
    assert "so all are drawn again" in grown.stderr


def test_variables_of_no_option_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    known = ("BASS_TOP_P", "BASS_JSON", "BASS_STOP", "BASSOON")
    for name in (*known, "BASS_DTYP", "BASS_XYLOPHONE", "BASS_FILES"):
        monkeypatch.setenv(name, "1")
    notes = cli("pairs").stderr
    assert "BASS_DTYP sets nothing: no option has this variable; did you mean BASS_DTYPE?" in notes
    assert "BASS_XYLOPHONE sets nothing: no option has this variable\n" in notes
    assert "BASS_FILES sets nothing" in notes  # an argument
    assert notes.count("sets nothing") == 3


def test_errors_name_variables_that_hold_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASS_STOP", '["a", 3]')
    refused = cli("generate", "p.jsonl", "--pair", "pair.yaml", code=2)
    assert "--stop (or BASS_STOP): a text is needed (got 3)" in refused.stderr


def test_version_and_wrong_commands() -> None:
    assert cli("--version").stdout == f"bass {bass_cli.__version__}\n"
    cli("generat", "p.jsonl", code=2)
    cli("generate", code=2)


@pytest.mark.parametrize("after", [1, 4])
def test_summary_does_not_name_an_output_file_that_was_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, after: int
) -> None:
    drawn = sys.modules["bass_cli.run.engine"].Engine.draw

    def generate(*arguments: Any, **named: Any) -> Any:
        for number, completion in enumerate(drawn(*arguments, **named)):
            if number == after:
                (tmp_path / "o.jsonl").unlink()
            yield completion
        if after == 4:
            (tmp_path / "o.jsonl").unlink()

    monkeypatch.setattr(sys.modules["bass_cli.run.engine"].Engine, "draw", generate)
    result = cli("generate", "p.jsonl", "--n", "2", "--out", "o.jsonl", code=3)
    assert "samples (" not in result.stderr
    assert f"the same command with --out {tmp_path / 'o.saved.jsonl'} goes on" in result.stderr
    assert len(rows((tmp_path / "o.saved.jsonl").read_text())) == min(after + 1, 4)


def test_tilde_is_expanded_in_options_variables_and_pair_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    (home / "models").mkdir(parents=True)
    for name in ("t.gguf", "d.gguf"):
        (home / "models" / name).touch()
    (home / "p.jsonl").write_text('{"prompt": "a"}\n')
    (home / "pair.yaml").write_text("target: ~/models/t.gguf\ndraft: parallel:~/models/d.gguf\n")
    monkeypatch.setenv("HOME", str(home))
    cli("generate", "~/p.jsonl", "-n", "1", "--pair=~/pair.yaml", "-o", "~/o.jsonl", code=0)
    monkeypatch.setenv("BASS_OUT", "~/b.jsonl")
    monkeypatch.setenv("BASS_PAIR", "~/pair.yaml")
    cli("generate", "~/p.jsonl", code=0)
    assert sorted(path.name for path in home.glob("*.jsonl")) == ["b.jsonl", "o.jsonl", "p.jsonl"]
    from bass_cli.formats.sources import files_of

    assert [str(path) for path in files_of(loaded[-1].pair)] == [
        str(home / "models" / name) for name in ("t.gguf", "d.gguf")
    ]


def test_messages_with_no_chat_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    lines = ['{"prompt": "a"}', '{"messages": [{"role": "user", "content": "b"}]}']
    (tmp_path / "both.jsonl").write_text("\n".join(lines))
    result = cli("generate", "both.jsonl", "--no-chat", "--model", "missing", "--out", "o.jsonl")
    assert (result.exit_code, loaded) == (2, [])
    assert (
        result.stderr
        == "bass: error: both.jsonl:2: the prompt has messages, but --no-chat was given\n"
    )
    assert not (tmp_path / "o.jsonl").exists()
