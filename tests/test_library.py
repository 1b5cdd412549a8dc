"""Test the library: samples equal to the command's, and errors before models are loaded."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import shlex
import subprocess
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoint, write_tokenizer
from command_line import cli

import bass_cli
from bass_cli import Completion, Job, Pair, Sampling, Speculation, UserError, generate, load_pair
from bass_cli.run import requests

EXAMPLE = Path(__file__).parent.parent / "examples" / "library.py"


def job(model: Path, **changes: Any) -> Job:
    sampling = Sampling(seed=3, max_new_tokens=8, temperature=1.0)
    given = {
        "pair": Pair(name="tiny", target=str(model), draft="lookup"),
        "n": 2,
        "device": "cpu",
        "sampling": sampling,
        "token_ids": True,
    }
    return Job(**given | changes)


def test_samples_are_those_of_the_command(model: Path, tmp_path: Path) -> None:
    lines = [{"id": "a", "prompt": "the cat"}, {"id": "b", "prompt": "a dog sat", "kind": "animal"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = shlex.split(
        "--n 2 --max-new-tokens 8 --temperature 1 --top-p 0.95 --seed 3 --token-ids"
    )
    given = ("--model", model, "--device", "cpu", *flags)
    done = cli("generate", tmp_path / "p.jsonl", *given, code=0)
    written = {
        (line["id"], line["sample"]): line for line in map(json.loads, done.stdout.splitlines())
    }
    drawn = list(generate(lines, job(model)))
    assert (
        {(one.id, one.sample) for one in drawn}
        == set(written)
        == set(itertools.product("ab", (0, 1)))
    )
    for one in drawn:
        line = written[one.id, one.sample]
        assert (one.text, one.token_ids, one.meta) == (
            line["text"],
            line["token_ids"],
            line["meta"],
        )


def test_prompts_may_be_endless(model: Path) -> None:
    taken: list[int] = []

    def endless() -> Iterator[str]:
        for number in itertools.count():
            taken.append(number)
            yield f"the cat {number}"

    drawn = list(itertools.islice(generate(endless(), job(model, batch_size=2)), 6))
    assert {one.id for one in drawn} <= {str(number) for number in taken}
    assert len(taken) < 8
    assert all(isinstance(one, Completion) for one in drawn)


@pytest.mark.parametrize(("prompts", "fault"), [
    ([], "it contains no "
         "prompts"), (["a", ""], r'prompts\[1\]: field "prompt": it is empty'), ([{"id": "a"}], "it is missing"),
    ([{"id": "1", "prompt": "x"}, "y"], r'"1" is also the id of prompts\[0\]'),
])  # fmt: skip
def test_wrong_prompts_are_refused_when_it_is_called(
    model: Path, prompts: list[Any], fault: str
) -> None:
    with pytest.raises(UserError, match=fault):
        generate(prompts, job(model))


@pytest.mark.parametrize("prompts", ["the cat", b"the cat", {"id": "a", "prompt": "b"}, None, 3])
def test_single_prompt_in_place_of_a_list_is_refused(model: Path, prompts: Any) -> None:
    with pytest.raises(UserError, match=r"^prompts: a list of texts or mappings is needed"):
        generate(prompts, job(model))


def test_job_of_another_type_is_refused() -> None:
    with pytest.raises(UserError, match=r"^job: a Job or its plan is needed"):
        generate(["x"], {"n": 1})  # type: ignore[arg-type]


def test_unset_sampling_fields_come_from_the_pair() -> None:
    own = Sampling(temperature=0.6, top_k=20)
    pair = Pair(name="tiny", target="x", sampling=own, speculation=Speculation(length=3, max=9))
    made = Job(pair=pair, sampling=Sampling(seed=7), speculation=Speculation(coupling="maximal"))
    assert (made.sampling.temperature, made.sampling.top_k, made.sampling.seed) == (0.6, 20, 7)
    assert (made.speculation.length, made.speculation.coupling) == (3, "maximal")
    with pytest.raises(ValueError, match=r"above speculation\.max"):
        Job(pair=pair, speculation=Speculation(length=12))
    written: Any = {"seed": 7}, {"coupling": "maximal"}, pair.model_dump()
    assert Job(pair=pair, sampling=written[0], speculation=written[1]) == made
    assert Job(pair=written[2], sampling=written[0], speculation=written[1]) == made
    with pytest.raises(ValueError, match=r'sampling\s.*"sed"; did you mean "seed"'):
        Job(pair=pair, sampling={"sed": 7})  # type: ignore[arg-type]


def test_a_pair_file_may_be_a_path(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("target: x\n")
    assert load_pair(tmp_path / "mine.yaml") == load_pair(str(tmp_path / "mine.yaml"))
    with pytest.raises(UserError, match=r"^a pair's name or file is needed, not None"):
        load_pair(None)  # type: ignore[arg-type]


def test_ray_data_checks_its_arguments(model: Path) -> None:
    """Without a cluster: errors before the map, and errors of an actor."""
    pyarrow = pytest.importorskip("pyarrow")
    import bass_cli.ray

    given: Any = None
    for bad, message in (
        ((given, "x"), "a Job is needed"),
        ((given, job(model, tensor_parallel=2)), "leave tensor_parallel out"),
    ):
        with pytest.raises(UserError, match=message):
            bass_cli.ray.generate(*bad)
    with pytest.raises(UserError, match="actors must be at least 1, not 0"):
        bass_cli.ray.generate(given, job(model), actors=0)
    drawer = bass_cli.ray.Drawer(job(model, n=1))
    with pytest.raises(
        UserError, match='a row has no "id"'
    ):  # each batch would number its rows from 0
        drawer(pyarrow.Table.from_pylist([{"id": "a", "prompt": "x"}, {"prompt": "y"}]))
    found = drawer(pyarrow.Table.from_pylist([{"id": "a", "prompt": "x"}]))
    assert found.column("id").to_pylist() == ["a"]


@pytest.mark.parametrize("kind", [list, iter])
def test_limit_applies_to_every_kind_of_prompts(model: Path, kind: Any) -> None:
    given = kind([types.MappingProxyType({"prompt": "the cat"}), "a dog"])
    assert [one.id for one in generate(given, job(model, limit=1, n=1))] == ["0"]


@pytest.mark.parametrize(("length", "budget"), [
    (4, None), *(pytest.param("bass", budget, marks=pytest.mark.slow) for budget in (60.0, None))])  # fmt: skip
def test_resume_under_maximal_coupling_equals_undisturbed_run(
    model: Path, tmp_path: Path, length: Any, budget: float | None
) -> None:
    """The run is interrupted every few samples. Drawing only the unfinished samples again would
    favour short samples."""
    write_checkpoint("llama", tmp_path, seed=1)
    write_tokenizer(tmp_path)
    given = job(
        model,
        pair=Pair(name="tiny", target=str(model), draft=str(tmp_path)),
        n=8,
        batch_size=4,
        budget=budget,
        sampling=Sampling(seed=3, max_new_tokens=40, temperature=1.0, stop=["a", "e", "z"]),
        speculation=Speculation(length=length, coupling="maximal"),
    )
    prompts, found = ["the cat", "a dog sat"], dict[tuple[str, int], Any]()
    whole = {(one.id, one.sample): one.token_ids for one in generate(prompts, given)}
    assert len({len(ids or ()) for ids in whole.values()}) > 4
    while len(found) < len(whole):
        for one in itertools.islice(generate(prompts, given, done=set(found)), 3):
            assert (one.id, one.sample) not in found
            found[one.id, one.sample] = one.token_ids
    assert found == whole


def test_every_public_name_exists() -> None:
    for name in bass_cli.__all__:
        assert getattr(bass_cli, name).__name__ == name


def test_missing_model_is_reported_at_the_call(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        generate(["a"], job(tmp_path / "nowhere"))


def test_unset_job_fields_come_from_the_pair() -> None:
    pair = Pair(
        name="p",
        target="t",
        dtype="bf16",
        sampling=Sampling(temperature=0.1),
        speculation=Speculation(length=3),
    )
    assert Job(pair=pair) == Job(
        pair=pair, dtype="bf16", sampling=pair.sampling, speculation=pair.speculation
    )
    found = Job(pair=pair, sampling=Sampling(top_k=5)).sampling
    assert found == Sampling(top_k=5, temperature=0.1)


def test_import_loads_nothing_heavy() -> None:
    code = (
        "import sys, bass_cli; bass_cli.generate; print({'torch', 'transformers'} & "
        "set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    assert (Path(bass_cli.__file__).parent / "py.typed").exists()
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = bass_cli.nothing_of_the_kind


def test_a_run_imports_no_compiler_and_no_transformers() -> None:
    """Each takes seconds, for which every command would wait."""
    code = (
        "import sys, pathlib, importlib, bass_kernels, bass_cli.run.engine\n"
        "for file in pathlib.Path(bass_kernels.__file__).parent.glob('*.py'):\n"
        "    importlib.import_module(f'bass_kernels.{file.stem}')\n"
        "print({'torch._dynamo', 'sympy', 'transformers', 'triton'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'triton'}"


def test_the_example_runs(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pair.yaml").write_text(f"target: {model}\ndraft: lookup\n")
    spec = importlib.util.spec_from_file_location("library_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(str(tmp_path / "pair.yaml"))
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split(":")[0] for line in lines) == ["0 0", "0 1", "code 0", "code 1"]


def test_a_pair_may_be_named_in_the_job(here: Path) -> None:
    own = Sampling(temperature=0.1)
    assert Job(pair="smollm2", n=2) == Job(pair=load_pair("smollm2"), n=2)
    (here / "mine.yaml").write_text("target: x\nsampling: {temperature: 0.1}\n")
    for place in ("mine.yaml", here / "mine.yaml"):
        job = Job(pair=place, sampling=Sampling(seed=3))
        assert (job.pair, job.sampling) == (load_pair(place), own.model_copy(update={"seed": 3}))


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("smolm2", 'there is no pair "smolm2"; did you mean "smollm2"?'),
        ("nowhere.yaml", "nowhere.yaml: cannot read the pair file"),
        (
            "Qwen/Qwen2.5-0.5B",
            '"Qwen/Qwen2.5-0.5B" is a model, not a pair; give it with `pair.target`',
        ),
    ],
)
def test_missing_pair_is_reported_without_flags(pair: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        Job(pair=pair)
    assert message in str(caught.value)
    assert "--" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel": 7}, r"^`tensor_parallel` 7: "),
        ({"threads": 99999}, r"^`threads`: "),
        ({"chat": True}, r"^`chat=True`: "),
        ({"speculation": Speculation(length="table")}, r"^`speculation\.length` table: "),
        ({"batch_size": 4000, "memory": 3 * 2**26}, r"expected to fit: `batch_size` \d+"),
        ({"device": "cuda"}, r"^`device` cuda: "),
        ({"prompts": [{"prompt": "a", "max_tokens": 3}]}, r"bass calls it .max_new_tokens.;"),
        ({"sampling": Sampling(stop=["a</s>"])}, r"^stop text 'a</s>': "),
    ],
)
def test_errors_name_fields(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Any, message: str
) -> None:
    """Messages name fields where the command line names flags."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plain = tmp_path / "plain"
    write_checkpoint("llama", plain)
    write_tokenizer(plain, template=False)
    changes = dict(changes)
    prompts, memory = changes.pop("prompts", ["a"]), changes.pop("memory", None)
    if memory is not None:
        for place in ("plan", "memory"):
            monkeypatch.setattr(f"bass_cli.run.{place}.free_memory", lambda device: memory)
    with pytest.raises(UserError, match=message) as caught:
        list(generate(prompts, job(plain, **changes)))
    assert not re.search(r"(?<!\w)--?[a-z]|BASS_", str(caught.value))


def test_errors_of_prompts_name_fields(model: Path) -> None:
    chat = [{"messages": [{"role": "user", "content": "a"}]}]
    with pytest.raises(UserError, match=r"messages, but `chat=False` was given"):
        generate(chat, job(model, chat=False))
    (found,) = generate(iter(chat), job(model, chat=False))  # which is not checked beforehand
    assert found.finish_reason == "error"
    assert found.error is not None
    assert "--" not in found.error
    assert "chat=False" in found.error


def test_calls_with_one_seed_give_the_same_samples_and_number_from_0(model: Path) -> None:
    """The docstring of generate says so. Another id gives another sample."""

    def texts(*prompts: Any) -> dict[tuple[str, int], Any]:
        return {(one.id, one.sample): one.token_ids for one in generate(prompts, job(model))}

    assert texts("the cat") == texts("the cat")
    both = texts("a dog", "the cat")
    assert both["0", 0] != both["1", 0]
    assert texts("a dog") == {key: ids for key, ids in both.items() if key[0] == "0"}
    assert texts({"id": "1", "prompt": "the cat"})["1", 0] == both["1", 0]
    assert texts("the cat")["0", 0] != both["1", 0]


@pytest.mark.parametrize("stop", [["e"], ["at", "the"], [" ", "t c"]])
def test_text_is_decoded_ids_before_the_stop(model: Path, stop: list[str]) -> None:
    """The reference is tokenizers' decoder. The ids are the shortest prefix of those without stops
    that contains a stop text."""
    from tokenizers import Tokenizer

    inner = Tokenizer.from_file(str(model / "tokenizer.json"))
    sampling = Sampling(seed=3, max_new_tokens=30, temperature=1.0)
    whole = {
        (one.id, one.sample): one.token_ids or []
        for one in generate(["the cat", "a dog"], job(model, n=4, sampling=sampling))
    }
    stopped = 0
    for one in generate(
        ["the cat", "a dog"],
        job(model, n=4, sampling=sampling.model_copy(update={"stop": tuple(stop)})),
    ):
        ids = whole[one.id, one.sample]
        ends = [
            end
            for end in range(1, len(ids) + 1)
            if any(text in inner.decode(ids[:end]) for text in stop)
        ]
        if not ends:
            continue
        stopped += 1
        read = inner.decode(ids[: ends[0]])
        assert (one.token_ids, one.tokens) == (ids[: ends[0]], ends[0])
        assert one.finish_reason == "stop"
        assert one.text == read[: min(read.find(text) for text in stop if text in read)]
    assert stopped >= 3


def test_types_accept_lists_and_paths() -> None:
    """Check annotations of stops; the slow test runs mypy, and `make lint` checks examples/."""
    hint = typing.get_type_hints(Sampling)["stop"]
    assert hint == Sequence[str]
    assert Sampling(stop=["x", "y"]).stop == ("x", "y")
    assert hash(Sampling(stop=["x"])) == hash(Sampling(stop=("x",)))


@pytest.mark.slow
def test_mypy_accepts_valid_programs_only(tmp_path: Path) -> None:
    api = pytest.importorskip("mypy.api")
    good = """
from pathlib import Path
from bass_cli.config.job import Job, Pair
from bass_cli.config.sampling import Sampling
job = Job(pair="smollm2", n=2, sampling=Sampling(stop=["x"]))
Job(pair=Path("x.yaml"), sampling=Sampling(stop=("x",)))
pair: Pair = job.pair
"""
    bad = 'Job(pair=3)\nSampling(stop=3)\nJob(pair="smollm2", m=2)\n'
    (tmp_path / "program.py").write_text(good + bad)
    flags = ["--strict", "--config-file=", "--follow-imports=silent", "--cache-dir"]
    message, errors, _ = api.run([*flags, str(tmp_path / "cache"), str(tmp_path / "program.py")])
    assert not errors
    lines = [int(line.split(":")[1]) for line in message.splitlines() if ": error:" in line]
    assert lines == [8, 9, 10], message


def test_model_is_the_short_form_of_a_pair(tmp_path: Path) -> None:
    long = Pair(name="small", target=str(tmp_path / "small"), draft="mtp-or-lookup")
    assert Job(model=tmp_path / "small", n=2, dtype="bf16") == Job(pair=long, n=2, dtype="bf16")
    long = Pair(name="m.x", target="o/m.x", draft="o/d", tokenizer="o/t")
    assert Job(model="o/m.x", draft="o/d", tokenizer="o/t", device="cpu") == Job(
        pair=long, device="cpu"
    )
    assert "model" not in Job(model="o/m").model_dump()
    given: Any
    for given, error, message in (
        ({"pair": "smollm2", "model": "o/m"}, ValueError, "exclude each other"),
        ({"draft": "none"}, ValueError, "`draft` belongs to `model`"),
        ({"pair": "smollm2", "tokenizer": "o/t"}, ValueError, "`tokenizer` belongs to `model`"),
        ({"model": 3}, ValueError, "a model's name or path is needed, not 3"),
        ({"model": ""}, UserError, r"`pair\.target`: it is empty"),
        ({"model": "o/m", "draft": ""}, UserError, r"`pair\.draft`: it is empty"),
        ({"model": "smollm2"}, UserError, "is a pair; give it with `pair`"),
    ):
        with pytest.raises(error, match=message):
            Job(**given)


@pytest.mark.parametrize("missing", ["target", "draft", "tokenizer"])
def test_a_missing_model_is_refused_before_torch_is_imported(
    model: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """The import takes seconds."""
    there, imports = Pair(name="tiny", target=str(model), draft="lookup"), list[Any]()
    monkeypatch.setattr(requests, "configure_threads", lambda *given: imports.append(given))
    with pytest.raises(UserError, match=re.escape('"./no": there is no such file or folder')):
        requests.import_for(Job(pair=there.model_copy(update={missing: "./no"})), print)
    assert not imports
    requests.import_for(Job(pair=there), print)
    assert imports
