"""Test which sampling settings are taken from a model's own files, and that the others come first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoint, write_tokenizer
from command_line import cli

from bass_cli import generate
from bass_cli.config.evaluation_commands import EvaluateArgs
from bass_cli.config.job import Job, load_pair
from bass_cli.config.machine_commands import ProfileArgs
from bass_cli.config.sample_commands import GenerateArgs
from bass_cli.config.sampling import Sampling
from bass_cli.errors import UserError
from bass_cli.formats.checkpoint import Checkpoint, open_checkpoint
from bass_cli.generation import read_job
from bass_cli.run.plan import make_plan
from bass_cli.run.sampling import with_model_defaults

OWN = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_id": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint("llama", folder, shards=False, num_hidden_layers=2)
    write_tokenizer(folder)
    return folder


def settings(model: Path, **values: Any) -> None:
    (model / "generation_config.json").write_text(json.dumps(values))


def job_of(model: Path, **fields: Any) -> Job:
    pair = {"name": "m", "target": str(model), "sampling": fields.pop("pair", {})}
    return Job(pair=pair, **fields)  # type: ignore[arg-type]


def test_fields_that_are_not_set_are_the_models(model: Path) -> None:
    settings(model, **OWN)
    target = open_checkpoint(model)
    job = job_of(model, pair={"top_p": 0.5}, sampling={"temperature": 0.8})
    changed, notes = with_model_defaults(job, target)
    sampling = changed.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.8, 0.5, 20)
    assert len(notes) == 1
    note = "the model's own top_k 20 (`generation_config` none: bass's own)"
    assert notes[0] == f"{model}/generation_config.json: {note}"
    assert with_model_defaults(changed, target) == (changed, [])  # once is enough
    assert with_model_defaults(job_of(model, generation_config="none"), target)[1] == []


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"temperature": -1}, 'key "temperature": it should be greater than or equal to 0'),
        ({"temperature": "0.6"}, 'key "temperature": .*number'),
        ({"top_p": 0}, 'key "top_p": it should be greater than 0'),
        ({"top_k": True}, 'key "top_k": a number is needed, not true or false'),
        ({"top_k": 2.5}, 'key "top_k": a whole number is needed'),
    ],
)
def test_an_invalid_value_names_file_and_key(
    model: Path, values: dict[str, Any], reason: str
) -> None:
    settings(model, **values)
    with pytest.raises(
        UserError, match=rf"generation_config\.json: {reason}.*`generation_config` none"
    ):
        make_plan(job_of(model))
    assert make_plan(job_of(model, generation_config="none")).job.sampling == Sampling()


def test_a_greedy_default_and_other_settings_are_only_noted(model: Path) -> None:
    others = {"num_beams": 1, "no_repeat_ngram_size": 3, "typical_p": 1.0, "stop_strings": ["x"]}
    settings(model, do_sample=False, top_k=None, **others)
    job, notes = with_model_defaults(job_of(model), open_checkpoint(model))
    assert job.sampling == Sampling()
    assert notes == [
        f"{model}/generation_config.json: do_sample false is not followed: the temperature is 0.8 "
        "(`sampling.temperature` 0: greedy decoding); bass does not use "
        "no_repeat_ngram_size, stop_strings"
    ]


def test_a_gguf_file_has_its_own_keys(model: Path) -> None:
    found = {"general.sampling.temp": 0.3, "general.sampling.penalty_repeat": 1.1}
    target = open_checkpoint(model)
    gguf = Checkpoint(Path("m.gguf"), target.spec, (), metadata=found)
    job, notes = with_model_defaults(job_of(model), gguf)
    assert job.sampling.temperature == 0.3
    assert notes[0].startswith("m.gguf: the model's own temperature 0.3 (")
    assert notes[0].endswith("bass does not use penalty_repeat")


def test_samples_are_those_of_the_same_settings_given(model: Path) -> None:
    settings(model, **OWN)
    lines = [generate(["the cat"], job) for job in (
        job_of(model, n=2, device="cpu"),
        job_of(model, n=2, device="cpu", generation_config="none",
               sampling={name: OWN[name] for name in ("temperature", "top_p", "top_k")}),
    )]  # fmt: skip
    texts = [sorted((one.sample, one.text) for one in found) for found in lines]
    assert texts[0] == texts[1]


def test_flag_environment_and_pair_come_before_the_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings(model, **OWN, min_length=0)
    (tmp_path / "pair.yaml").write_text(f"target: {model}\nsampling: {{top_p: 0.7}}\n")
    (tmp_path / "p.txt").write_text("the cat\n")
    monkeypatch.setenv("BASS_TOP_K", "7")
    out = tmp_path / "o.jsonl"
    given = ["generate", str(tmp_path / "p.txt"), "--pair", str(tmp_path / "pair.yaml")]
    given += ["--device", "cpu", "-n", "1", "--max-new-tokens", "4", "--out", str(out)]
    assert "the model's own temperature 0.6 (--generation-config none" in cli(*given, code=0).stderr
    results = json.loads(Path(f"{out}.manifest.json").read_text())["results"]
    assert [results[name] for name in ("temperature", "top_p", "top_k")] == [0.6, 0.7, 7]
    again = cli(*given, "--generation-config", "none", code=2)
    assert "temperature: 0.6 before, 0.8 now" in again.stderr


def test_commands_without_the_option_use_their_own_settings() -> None:
    assert read_job(GenerateArgs(prompts="p")).generation_config == "auto"
    assert read_job(EvaluateArgs(task="xsum")).generation_config == "none"
    assert read_job(ProfileArgs()).generation_config == "none"
    assert load_pair("smollm2").generation_config == "auto"


def test_min_p_and_penalties_are_taken_too(model: Path) -> None:
    settings(model, min_p=0.05, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.0)
    job, notes = with_model_defaults(job_of(model), open_checkpoint(model))
    assert (job.sampling.min_p, job.sampling.repetition_penalty) == (0.05, 1.1)
    assert (job.sampling.presence_penalty, job.sampling.frequency_penalty) == (0.5, 0.0)
    assert "does not use" not in notes[0]
    settings(model, repetition_penalty=0)
    with pytest.raises(UserError, match=r'generation_config\.json: key "repetition_penalty"'):
        with_model_defaults(job_of(model), open_checkpoint(model))
