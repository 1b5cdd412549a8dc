"""`bass distill` with a tiny pair, from samples to a draft in use: kills, resumption, refusals."""

import json
import re
import shlex
import shutil
import signal
import time
from types import SimpleNamespace

import pytest
import yaml
from checkpoints import write_checkpoint, write_pair, write_tokenizer
from command_line import cli, rows_in
from forked import BASS, Forked

from bass_cli.config.job import load_pair
from bass_cli.config.machine_commands import DistillArgs
from bass_cli.distill.command import _write_pair
from bass_cli.distill.sampling import lines_of
from bass_cli.distill.settings import requested_tokens, sampling_job, training_of
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.run import generate as library

FLAGS = ("--pair", "pair.yaml", "--device", "cpu", "--threads", "1", "--tokens", "700", "--max-new-tokens", "20",
         "--window-tokens", "48", "--train-batch", "6", "--draft-length", "4", "--learning-rate", "0.02")  # fmt: skip
TRAINED = (*FLAGS, "--steps", "16")


@pytest.fixture
def here(here):
    words = "draft: draft\nsampling: {temperature: 0.7}\n"
    sizes = {"num_hidden_layers": 3, "use_sliding_window": False}
    small = {"num_hidden_layers": 1}
    write_pair(here, prompts=4, family="qwen3", pair=words, draft=small, **sizes)
    return here


def ids_of(path):
    return {(row["id"], row["sample"]): row["token_ids"]
            for row in rows_in(path)}  # fmt: skip


# a checkpoint after every step, not every five minutes
OFTEN = "import bass_cli.distill.command; bass_cli.distill.command.SECONDS = 0.0;"


def killed(folder, until, *flags):
    """Run the command in a new process and kill it when `until` returns true."""
    program = f"{OFTEN} {BASS}"
    process = Forked(program, "distill", *flags, cwd=folder)
    end = time.monotonic() + 120
    while not until() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it was over before"


def test_from_a_pair_to_a_draft(here, monkeypatch):
    """After kills during sampling and training, the draft equals that of an undisturbed run. It is
    better than the model it started from, changes no sample, and never proposes the mask."""
    samples, checkpoint = here / "out/samples.jsonl", here / "out/checkpoint.pt"
    flags = (*TRAINED, "--out", "out")
    (here / "out").mkdir()  # as a kill leaves it while the settings are written
    (here / f"out/.distill.json.{'0' * 16}.new").touch()

    def interrupted(*given, **words):
        for count, one in enumerate(library.generate(*given, **words)):
            if count == 15:
                raise KeyboardInterrupt
            yield one

    with monkeypatch.context() as patch:
        patch.setattr("bass_cli.distill.command.generate", interrupted)
        cli("distill", *flags, code=130)
    kept = samples.read_bytes()
    assert kept.count(b"\n") == 15
    samples.write_bytes(kept + kept[:40])  # killed within a line
    killed(here, checkpoint.exists, *flags)
    assert samples.read_bytes().startswith(kept)
    lines = list(lines_of(samples))
    assert len({(one.id, one.sample) for one in lines}) == len(lines)
    assert {one.id.partition("/")[0] for one in lines} >= {"turn", "text"}
    done = cli("distill", *flags, "--json", code=0)
    assert "resuming from step" in done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads((here / "out/report.json").read_text())
    assert not checkpoint.exists()
    (here / "undisturbed").mkdir()
    for path in (here / "out").glob("samples.jsonl*"):
        shutil.copy(path, here / "undisturbed")
    whole = cli("distill", *TRAINED, "--out", "undisturbed", "--json", code=0)
    other = json.loads(whole.stdout.splitlines()[-1])
    assert (other["training"], other["after"]) == (report["training"], report["after"])
    weights = "draft/model.safetensors"
    assert (here / "undisturbed" / weights).read_bytes() == (here / "out" / weights).read_bytes()
    assert report["seconds"]["sampling"] > 0
    assert report["made_with"]["device"] == "cpu"
    improved(report, done.stderr)
    used(here)
    checkpoint.write_bytes(b"left by a kill after the report")
    again = cli("distill", *flags, code=0)
    assert "this distillation is complete" in again.stderr
    assert not checkpoint.exists()
    assert "after parallel T=1" in again.stdout


def improved(report, output):
    before, after = (report[when]["parallel T=1"] for when in ("before", "after"))
    assert after["kept"] > 1.2 * before["kept"]
    pairs = zip(before["shared"], after["shared"], strict=True)
    assert all(late > early + 0.03 for early, late in pairs)
    assert len(report["before"]["chain T=1"]["shared"]) == 4
    assert report["training"]["steps"] == 16
    assert "accepted drafts in all 1 2 3 4" in re.sub(r" +", " ", output)


def used(here):
    """Check that the folder's pair gives plain decoding's samples, and never the mask."""
    mask = open_checkpoint(here / "out/draft").mask()
    assert mask == 299  # the tokenizer's ids end there
    pair = yaml.safe_load((here / "out/pair.yaml").read_text())
    assert pair["draft"] == "parallel:./draft"
    assert pair["sampling"] == {"temperature": 0.7}
    assert pair["speculation"] == {"max": 4}, "drafts beyond those of the training hardly stand"
    flags = shlex.split("--n 3 --max-new-tokens 30 --device cpu --threads 1 --token-ids")
    for length in ("4", "0"):
        cli("generate", "p.txt", "--pair", "out/pair.yaml", *flags, "--draft-length", length,
            "--out", f"{length}.jsonl", code=0)  # fmt: skip
    drafted = ids_of(here / "4.jsonl")
    assert drafted == ids_of(here / "0.jsonl")
    assert max(token for ids in drafted.values() for token in ids) < mask


def test_a_file_of_prompts_and_the_first_layers(here):
    """With --minutes the training takes the given time."""
    flags = (*FLAGS, "--layers", "1", "--prompts", "p.txt", "--minutes", "0.01", "--out", "out")
    cli("distill", *flags, code=0)
    report = json.loads((here / "out/report.json").read_text())
    assert report["after"]["parallel T=1"]["kept"] > report["before"]["parallel T=1"]["kept"]
    assert 0.6 <= report["seconds"]["training"] < 15
    assert 0 < report["seconds"]["sampling"] < 60
    assert open_checkpoint(here / "out/draft").spec.layers == 1
    assert {one.id.rpartition("/")[2] for one in lines_of(here / "out/samples.jsonl")} == {
        "0",
        "1",
        "2",
        "3",
    }
    other = cli("distill", *flags[:-2], "--out", "out", "--draft-length", "5", code=2)
    assert "begun with other settings (draft_length)" in re.sub(r"\s+", " ", other.stderr)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--out", ""), "--out (or BASS_OUT): it is empty"),
        (
            ("--draft-length", "1"),
            "--draft-length (or BASS_DRAFT_LENGTH): give a number from 2 to 32 (got 1)",
        ),
        (("--window-tokens", "50"), "--window-tokens 50: give a multiple of 8"),
        (("--learning-rate", "nan"), "--learning-rate (or BASS_LEARNING_RATE)"),
        (("--tokens", "0"), "--tokens (or BASS_TOKENS): give a number above 0 (got 0)"),
        (("--temperature", "0"), "--temperature 0: all samples"),
        (("--dtype", "fp16"), "--dtype fp16"),
        (("--dtype", "int8"), "--dtype int8"),
        (("--layers", "9"), "--layers (or BASS_LAYERS): give a number from 1 to 3"),
        (("--layers", "0"), "--layers (or BASS_LAYERS): give a number from 1 to 3"),
        (("--layers", "1", "--from", "draft"), "--from and --layers exclude each other"),
        (("--from", "lookup"), '--from (or BASS_FROM): "lookup" is not a model'),
        (("--from", "heads:x"), '--from (or BASS_FROM): "heads:x" is not a model'),
        (("--from", "nowhere/at/all"), "nowhere/at/all"),
        (("--from", "other"), "the vocabularies of target and draft differ: id 9 is"),
        (("--out", "full"), "--out full: the folder holds other files (mine.txt)"),
        (("--out", "full", "--overwrite"), "--out full: the folder holds other files (mine.txt)"),
        (("--out", "p.txt"), "--out p.txt: this is a file"),
        (
            ("--out", ".", "--overwrite"),
            "--out pair.yaml: this is the pair file, which would be lost",
        ),
        (
            ("--pair", "p2.yaml", "--out", ".", "--overwrite"),
            "is a file of the models and would be lost",
        ),
        (
            ("--prompt-column", "x"),
            "--prompt-column (or BASS_PROMPT_COLUMN): this option needs --prompts",
        ),
    ],
)
def test_mistakes_are_refused_before_weights_are_read(here, monkeypatch, flags, reason):
    for place in (
        "bass_cli.run.build.load",
        "bass_cli.distill.training.load_plain",
        "bass_cli.distill.network.load_plain",
    ):
        monkeypatch.setattr(place, lambda *a, **k: pytest.fail("weights were read"))
    write_checkpoint("qwen3", here / "other", seed=1, shards=False, use_sliding_window=False)
    write_tokenizer(here / "other")
    path = here / "other/tokenizer.json"
    content = json.loads(path.read_text())
    names = {id_: text for text, id_ in content["model"]["vocab"].items()}
    content["model"]["vocab"] |= {names[9]: 10, names[10]: 9}
    path.write_text(json.dumps(content))
    (here / "full").mkdir()
    (here / "full/mine.txt").write_text("mine")
    shutil.copy(here / "pair.yaml", here / "p2.yaml")
    before = set(here.rglob("*"))
    refused = cli("distill", *TRAINED, "--out", "out", *flags, code=2)
    assert reason in re.sub(r"\s+", " ", refused.stderr)
    assert not (here / "out").exists()
    assert set(here.rglob("*")) == before


def test_a_draft_of_the_targets_layers_has_the_pairs_tokenizer(here):
    """Also if the target's folder has no tokenizer."""
    for path in (here / "target").glob("*token*"):
        path.rename(here / "draft" / path.name)
    (here / "pair.yaml").write_text("target: target\ndraft: none\ntokenizer: draft\n")
    cli("distill", *FLAGS, "--steps", "1", "--out", "out", code=0)
    assert (here / "out/draft/tokenizer.json").exists()
    cli("generate", "p.txt", "--pair", "out/pair.yaml", "--n", "1", "--device", "cpu",
        "--max-new-tokens", "4", "--out", "o.jsonl", code=0)  # fmt: skip


@pytest.mark.parametrize(("name", "reason"), [
    ("shutil.disk_usage", "samples, checkpoints and draft take up to"),
    ("bass_cli.distill.settings.free_memory", "training a draft of 0 million weights takes more"),
])  # fmt: skip
def test_too_little_space_is_refused_before_weights_are_read(here, monkeypatch, name, reason):
    monkeypatch.setattr("bass_cli.run.build.load", lambda *a, **k: pytest.fail("weights were read"))
    room = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr(name, lambda _: room if name.startswith("shutil") else 1000)
    assert reason in re.sub(r"\s+", " ", cli("distill", *TRAINED, "--out", "out", code=3).stderr)


def test_steps_and_n_bound_the_work_without_tokens(here):
    """One pass of n samples over the file; two steps that use each window once."""
    flags = ("--pair", "pair.yaml", "--device", "cpu", "--threads", "1", "--max-new-tokens", "20",
             "--window-tokens", "48", "--draft-length", "4")  # fmt: skip
    done = cli(
        "distill", *flags, *shlex.split("--prompts p.txt --n 2 --steps 2 --out few --json"), code=0
    )
    found = ids_of(here / "few/samples.jsonl")
    assert sorted({number for _, number in found}) == [0, 1]
    assert len(found) == 4 * 2
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["training"]["steps"] == 2
    settings = json.loads((here / "few/distill.json").read_text())
    assert settings["samples"]["tokens"] == 4 * 2 * 20
    again = cli("distill", *flags, "--prompts", "p.txt", "--n", "2", "--steps", "2", "--out", "few")
    assert "this distillation is complete" in again.stderr


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"tokens": 700}, 700),
        ({"steps": 2}, 2 * 16 * 512 // 2),
        ({"steps": 2, "windows": 1, "window_tokens": 64}, 64),
        ({"steps": 2, "tokens": 90}, 90),
        ({}, None),
        ({"minutes": 1.0}, None),
    ],
)
def test_default_tokens_follow_from_steps(given, expected):
    args = DistillArgs(pair="pair.yaml", out="out", **given)
    assert requested_tokens(args, training_of(args)) == expected


@pytest.mark.parametrize(("asked", "n", "longest"), [(None, 4, 384), (300, 2, 75), (8, 1, 16)])
def test_few_tokens_are_shared_by_several_prompts(here, asked, n, longest):
    _, job = sampling_job(DistillArgs(pair="pair.yaml", out="out"), asked)
    assert (job.n, job.sampling.max_new_tokens) == (n, longest)


def test_one_prompt_is_refused_before_weights_are_read(here):
    (here / "one.txt").write_text("the cat sat\n")
    done = cli("distill", *FLAGS, "--prompts", "one.txt", "--out", "one", code=2)
    assert "at least 2 usable prompts are needed" in done.stderr
    assert "loading" not in done.stderr


def test_pair_file_of_a_draft_keeps_the_settings_of_its_target(here):
    """Without the adapters its target would be another model."""
    (here / "sub" / "lora").mkdir(parents=True)
    (here / "sub" / "chat.jinja").write_text(
        "{% for one in messages %}{{ one.content }}{% endfor %}"
    )
    settings = {
        "lora": ["lora", "lora:0.5", "someone/adapter"],
        "template": "chat.jinja",
        "template_args": {"short": True},
        "system": "be brief",
        "thinking": "off",
        "kv_dtype": "fp8",
        "generation_config": "none",
    }
    words = {"target": "../target", "draft": "../draft", **settings}
    (here / "sub" / "pair.yaml").write_text(yaml.safe_dump(words))
    before = load_pair(str(here / "sub" / "pair.yaml"))
    (here / "out").mkdir()
    places = SimpleNamespace(pair=here / "out" / "pair.yaml")
    _write_pair(places, before, 4)
    after = load_pair(str(places.pair))
    lora = str(here / "sub" / "lora")
    assert after.lora == (lora, f"{lora}:0.5", "someone/adapter")
    assert all(getattr(after, name) == getattr(before, name) for name in {*settings} - {"lora"})
