"""Test damaged and random files: each is read, or refused with an error that names it."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint, write_gguf, write_tokenizer
from command_line import cli
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scored import line
from test_families import EMBEDDING, GGUF, OLD
from test_results import MANIFEST, sample
from test_round_cost import surface
from test_tasks import MBPP

from bass_cli.cli.doctor import place_of
from bass_cli.config.job import load_pair
from bass_cli.errors import UserError
from bass_cli.eval import report
from bass_cli.eval.judging import isolation_of
from bass_cli.eval.report import Outcome
from bass_cli.eval.samples import by_problem, guess_task, read_generations
from bass_cli.eval.stores import Verdict, VerdictStore
from bass_cli.eval.tasks import load_task
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.gguf_config import spec_of_gguf
from bass_cli.formats.hf_config import spec_of_config
from bass_cli.formats.tensor_files import read_torch
from bass_cli.formats.tokenizer import Tokenizer
from bass_cli.io.results import open_output
from bass_cli.io.resume import manifest_path
from bass_cli.lengths.surface import load_surface
from bass_cli.models.spec import parameters

# The same examples on every machine and in every run; a test's own folder is used again by all
# of them.
FUZZ = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

PAIR = b"""name: &n mine
target: ./model  # a folder
draft: skip:4-9,12
dtype: bf16
tokenizer: "\\u00e4"
speculation: {length: 4, max: 32, coupling: shared, draft_temperature: 0.5}
sampling:
  temperature: 1e-1
  stop: ['a', "\\n", *n]
  seed: 0x1F
"""
BITS = [b"&a", b"*n", b"<<: ", b"? ", b"- ", b"[", b"{", b"!!int ", b"!!binary ", b"!!set ", b"2001-99-99", b"1:1:1", b"\t",
        b"\0", b"\xff", b"|", b">", b"'", b'"', b"%YAML 1.2\n", b"---\n", b"9" * 5000, b"0x" + b"f" * 5000, b"\n", b"null",
        b"1e999", b".inf", b"\\ud800", b"skip:\xc2\xb2", b"#", b": ", b",", b"}", b"]", b"true"]  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, whole: bytes, bits: list[bytes]) -> bytes:
    """Damage the bytes in up to six places: overwrite, remove or insert; perhaps truncate."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(content)))
        length = draw(st.integers(0, 8))
        content[at : at + length] = draw(st.one_of(st.sampled_from(bits), st.binary(max_size=8)))
    return bytes(
        content[: draw(st.integers(0, len(content)))] if draw(st.integers(0, 4)) == 0 else content
    )


ODD = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        -1,
        1,
        2**31,
        2**63,
        -(2**70),
        10**400,
        0.0,
        0.5,
        -1.5,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "0",
        "a",
        "\ud800",
        "x" * 10**4,
        [],
        {},
        [[]],
        [None],
        [0] * 99,
        [1.5, "a"],
        {"a": 1},
    ]
)
JSON = st.recursive(
    ODD,
    lambda part: (
        st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=3), part, max_size=3)
    ),
    max_leaves=4,
)


@st.composite
def replaced(draw: st.DrawFn, whole: Any) -> Any:
    """Replace, remove or swap one to three parts of a JSON value, at any depth."""
    value = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, 3))):
        part = value
        while True:
            keys = sorted(part, key=str) if isinstance(part, dict) else range(len(part))
            key = draw(st.sampled_from(keys)) if keys else None
            inner = part[key] if keys else None
            if not (isinstance(inner, (dict, list)) and inner and draw(st.booleans())):
                break
            part = inner
        if key is None:
            break
        if draw(st.integers(0, 5)) == 0:
            del part[key]
        else:
            part[key] = copy.deepcopy(draw(ODD if draw(st.booleans()) else JSON))
    return value


def assert_read_or_named(read: Callable[[], object], file: Path) -> None:
    """Fail at any exception that is not a UserError which names the file."""
    try:
        read()
    except UserError as error:
        found = str(error)
        assert str(file) in found, found
        assert "\n" not in found.replace("\n  ", ""), found


@FUZZ
@given(content=damaged(PAIR, BITS))
def test_pair_files(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "pair.yaml"
    file.write_bytes(content)
    assert_read_or_named(lambda: load_pair(str(file)), file)


@FUZZ
@given(config=st.sampled_from(sorted(OLD)).flatmap(lambda name: replaced(OLD[name])))
def test_configs_of_every_family(config: dict[str, Any]) -> None:
    place = Path("folder/config.json")
    assert_read_or_named(lambda: parameters(spec_of_config(config, place=str(place))), place)


@FUZZ
@given(
    metadata=replaced(
        {
            **GGUF,
            "general.architecture": "gemma3",
            "split.count": 1,
            "llama.rope.scaling.type": "linear",
        }
        | {key.replace("llama", "gemma3"): value for key, value in GGUF.items() if "." in key}
        | {
            "gemma3.attention.sliding_window": 4,
            "gemma3.attention.sliding_window_pattern": [True, False],
            "gemma3.rope.scaling.type": "linear",
            "gemma3.rope.scaling.factor": 2.0,
        }
    )
)
def test_metadata_of_gguf_files(metadata: dict[str, Any]) -> None:
    place = Path("model.gguf")
    assert_read_or_named(
        lambda: parameters(spec_of_gguf(metadata, EMBEDDING, place=str(place))), place
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as safetensors, as GGUF and as a torch file."""
    folder = tmp_path_factory.mktemp("models")
    sizes = {"num_hidden_layers": 1, "vocab_size": 40, "max_position_embeddings": 32}
    model = write_checkpoint("llama", folder / "folder", shards=False, **sizes)
    write_gguf("llama", folder / "model.gguf", **sizes)
    torch.save(
        {name: value for name, value in model.state_dict().items() if "layers" not in name},
        folder / "model.bin",
    )
    return folder


NUMBERS = [
    struct.pack("<Q", number)
    for number in (0, 1, 2**16, 2**31, 2**32, 2**40, 2**62, 2**63, 2**64 - 1)
] + [struct.pack("<I", number) for number in (0, 1, 4, 5, 6, 7, 8, 9, 10, 12, 99, 2**31, 2**32 - 1)]


@FUZZ
@given(data=st.data())
def test_gguf_files(models: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Damage headers and a little of what follows."""
    whole, path = (models / "model.gguf").read_bytes(), tmp_path / "model.gguf"
    path.write_bytes(data.draw(damaged(whole[:4000], NUMBERS)) + whole[4000:])
    assert_read_or_named(lambda: open_checkpoint(path), path)


@FUZZ
@given(data=st.data())
def test_safetensors_files(models: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Damage bytes, or write a valid header with impossible values."""
    whole, folder = (models / "folder" / "model.safetensors").read_bytes(), tmp_path / "folder"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes((models / "folder" / "config.json").read_bytes())
    end = 8 + int.from_bytes(whole[:8], "little")
    if data.draw(st.booleans()):
        head = data.draw(damaged(whole[:end], NUMBERS))
    else:
        header = json.dumps(data.draw(replaced(json.loads(whole[8:end])))).encode()
        head = struct.pack("<Q", len(header)) + header
    (folder / "model.safetensors").write_bytes(head + whole[end:])
    assert_read_or_named(lambda: open_checkpoint(folder), folder)


@FUZZ
@given(data=st.data())
def test_torch_files(models: Path, tmp_path: Path, data: st.DataObject) -> None:
    whole, path = (models / "model.bin").read_bytes(), tmp_path / "model.bin"
    pickled = whole.index(b"data.pkl")  # and what follows it: the rest is mostly weights
    bits = [b"c", b".", b"}", b"(", b"t", b"R", b"K\xff", b"\x8a\x08", *NUMBERS]
    path.write_bytes(data.draw(damaged(whole[: pickled + 1200], bits)) + whole[pickled + 1200 :])
    assert_read_or_named(lambda: read_torch(path), path)


def as_line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


@st.composite
def lines(draw: st.DrawFn, rows: list[Any]) -> bytes:
    """Write the values as JSON lines: one with replaced parts, or all damaged."""
    if draw(st.booleans()):
        number = draw(st.integers(0, len(rows) - 1))
        rows = [draw(replaced(row)) if at == number else row for at, row in enumerate(rows)]
        return b"".join(map(as_line, rows))
    return draw(damaged(b"".join(map(as_line, rows)), BITS))


HUMANEVAL = load_task("humaneval")
RESULTS = [json.loads(sample(prompt, number).to_line()) for prompt in "ab" for number in range(2)]


@FUZZ
@given(
    content=lines(RESULTS),
    manifest=st.one_of(st.just(MANIFEST), replaced({**MANIFEST, "totals": {"samples": 4}})),
)
def test_results_that_a_run_goes_on_from(tmp_path: Path, content: bytes, manifest: Any) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    manifest_path(str(path)).write_text(json.dumps(manifest))

    def go_on() -> None:
        with open_output(str(path), MANIFEST) as writer:
            pass
        with open_output(str(path), MANIFEST) as again:
            assert again.done == writer.done

    assert_read_or_named(go_on, path)


@FUZZ
@given(
    content=lines([line(number, 0, "+ 1", token_ids=[1], meta={"a": 1}) for number in range(3)]),
    manifest=replaced(
        {"results": {"task": "humaneval", "budget": 2.0, "n": 2}, "totals": {"seconds": 4.0}}
    ),
)
def test_generation_files_and_their_reports(tmp_path: Path, content: bytes, manifest: Any) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(content)
    manifest_path(str(path)).write_text(json.dumps(manifest))

    def build() -> None:
        file = read_generations(str(path))
        guess_task(file)
        problems = by_problem(file, [f"HumanEval/{number}" for number in range(12)])
        outcomes = {
            name: [Outcome(row, "passed") for row in rows] for name, rows in problems.items()
        }
        found = report.build(file, outcomes, HUMANEVAL, ks=[1, 2], isolation=None)
        json.dumps(found, allow_nan=False)

    assert_read_or_named(build, path)


@FUZZ
@given(
    content=lines(
        [
            Verdict("HumanEval/0", number, "0" * 64, "passed", "", 0.5, {"files": "none"})._asdict()
            for number in range(3)
        ]
    )
)
def test_verdicts(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "f.jsonl.verdicts.jsonl"
    path.write_bytes(content)

    def read() -> None:
        with VerdictStore(str(path)) as store:
            json.dumps(isolation_of(store.verdicts.values()))

    assert_read_or_named(read, path)


@FUZZ
@given(content=lines([json.loads(surface().to_json())]))
def test_profiles(tmp_path: Path, content: bytes) -> None:
    """An invalid profile is ignored with a note."""
    path, notes = tmp_path / "profile.json", list[str]()
    path.write_bytes(content)
    found = load_surface(path, notes.append)
    assert (found is None) == (len(notes) == 1)
    assert all(note.startswith(f"{path}: this profile is ignored: ") for note in notes)
    if found is not None:
        assert found.seconds(9, 3, 500.0) >= 0


@FUZZ
@given(
    content=lines(
        [MBPP, {**MBPP, "task_id": 12, "test_imports": ["import re"], "prompt": "Do it."}]
    )
)
def test_data_of_tasks(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(content)

    def read() -> None:
        task = load_task("mbpp", str(path))
        for problem in task.problems.values():
            task.question(problem)
            task.program(problem, "", whole=True)

    assert_read_or_named(read, path)


@settings(FUZZ, max_examples=40)
@given(data=st.data())
@pytest.mark.usefixtures("children")  # as libraries may end the process
def test_tokenizers(tokenizer: Path, tmp_path: Path, data: st.DataObject) -> None:
    for file in tokenizer.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    name = data.draw(st.sampled_from(["tokenizer.json", "tokenizer_config.json"]))
    content = data.draw(lines([json.loads((tokenizer / name).read_text())]))
    (tmp_path / name).write_bytes(content)
    assert_read_or_named(lambda: Tokenizer.load(tmp_path).fingerprint(), tmp_path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


BAD_COMMANDS = {
    "a pair": (["pairs", "x.yaml"], {"x.yaml": "target: 2001-99-99"}, "x.yaml:1: broken YAML"),
    "a long name": (["generate", "p.txt", "--pair", "x.yaml"], {"p.txt": "a", "x.yaml": f"target: {'x' * 5000}.gguf"},
                    "there is no such file or folder"),
    "a longer name": (["generate", "p.txt", "--pair", "x" * 5000], {"p.txt": "a"}, "there is no pair"),
    "layers": (["generate", "p.txt", "--draft", "skip:²"], {"p.txt": "a"}, '--draft (or BASS_DRAFT): "skip:²": write the'),
    "a config": (["generate", "p.txt", "--model", "m"], {"p.txt": "a", "m/config.json": '{"model_type": ["llama"]}'},
                 'm/config.json: key "model_type"'),
    "weights": (["generate", "p.txt", "--model", "m.gguf"], {"p.txt": "a", "m.gguf": "GGUF" + "\0" * 40},
                "m.gguf: not a GGUF file"),
    "samples": (["score", "f.jsonl"], {"f.jsonl": '{"task_id": "HumanEval/0", "completion": "", '
                                                  '"sample": "1"}'},
                'f.jsonl:1: field "sample"'),
    "data": (["eval", "mbpp", "--data", "m.jsonl"], {"m.jsonl": '{"task_id": 1, "text": "a", '
                                                                '"test_list": [1]}'},
             'm.jsonl:1: field "test_list"'),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_COMMANDS)
def test_a_command_ends_with_a_sentence(kind: str, here: Path) -> None:
    arguments, contents, expected = BAD_COMMANDS[kind]
    for name, content in contents.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(content)
    result = cli(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert expected in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "name",
    [
        "x" * 5000,
        "./" + "x" * 5000,
        "package:a..b/c",
        "package:" + "x" * 5000,
        "a\0b",
        "~nobody-here/x",
        "a/b c",
    ],
)
def test_any_name_of_a_model_may_be_asked_about(name: str) -> None:
    assert place_of(name) != "here"
