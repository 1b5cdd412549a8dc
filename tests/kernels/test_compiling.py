"""Rounds compile all of their kernels ahead, without a GPU."""

import ast
import itertools
import os
import pathlib
import subprocess
import sys

import pytest
from chains import write_chain
from checkpoints import HYBRID, write_checkpoint, write_tokenizer
from decoders import load_decoder
from heads import write_head
from test_mtp import write

from bass_cli.config.job import Job
from bass_cli.models.any_model import AnyModel
from bass_cli.models.prefill import PrefillPasses
from bass_cli.run import build
from bass_cli.run.build import Models, graphs_for
from bass_cli.run.plan import make_plan

pytest.importorskip("triton")


def run_compiling(script, *arguments, cache):
    """Return the output lines of a script that compiles for a GPU, without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [
        sys.executable,
        str(pathlib.Path(__file__).parents[1] / "support" / script),
        *arguments,
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("how", "kinds"),
    [
        pytest.param("whole", [("heads:head", "maximal")], marks=pytest.mark.slow),
        pytest.param("quick", [("parallel:model", "shared")], marks=pytest.mark.slow),
        pytest.param("whole", [("heads:chain", "shared")], marks=pytest.mark.slow),
        pytest.param("whole", [("model", "shared"), ("lookup", "maximal")], marks=pytest.mark.slow),
    ],
)
def test_rounds_compile_ahead_without_running(tmp_path, how, kinds):
    """Each drafter's rounds compile the kernels that they need; generated code is shared."""
    write_checkpoint("qwen2", tmp_path / "target")
    write_head(tmp_path / "target" / "head", "dspark-speculators", draft_vocab_size=150)
    write_chain(tmp_path / "target" / "chain", "authors")
    given = (how, str(tmp_path / "target"), *itertools.chain(*kinds))
    lines = run_compiling("compile_ahead.py", *given, cache=tmp_path / "cache")
    assert len(lines) == len(kinds)
    assert all(int(line.split()[0]) > 15 for line in lines)


@pytest.mark.slow
def test_rounds_with_the_layer_of_a_hybrid_compile_ahead_without_running(tmp_path):
    """No table is read at positions that no kernel has written."""
    write(tmp_path, HYBRID[0])
    given = ("quick", str(tmp_path), "mtp", "shared")
    (line,) = run_compiling("compile_ahead.py", *given, cache=tmp_path / "cache")
    assert {"'_read_hidden'", "'_write_hidden'"} <= {one.strip("[],") for one in line.split()}


def test_a_job_compiles_its_kernels_together_before_its_first_round(tmp_path):
    """Once for each machine. If it fails, the kernels are compiled when they first run."""
    write_checkpoint("qwen2", tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    lines = run_compiling("compile_job.py", str(tmp_path / "model"), cache=tmp_path / "cache")
    first, fewer, later, empty, second, refused = map(ast.literal_eval, lines)
    assert first["kernels"] > 20
    assert first["rows"] == 0
    assert first["phases"] == ["compiling kernels"]
    assert not first["notes"]
    assert first["launchers"] == first["submitted"] > 20
    assert not fewer["kernels"], "68 rows instead of 72 need no other kernels"
    assert not later["kernels"], (
        "rounds of the job, also of its last 20 rows, need no other kernels"
    )
    compiled, missing = empty["empty"]
    assert compiled > 20
    assert not missing, "the bench compiles rounds of a batch without rows"
    assert first["alone"]
    assert second.pop("rows") == 0
    assert second.pop("alone")
    assert not any(second.values()), "nothing is compiled again"
    assert refused["rows"] == 0, "the loop is empty"
    assert len(refused["phases"]) == 2, "what failed is tried again"
    assert all("one by one" in note for note in refused["notes"])
    assert len(refused["notes"]) == 2


def test_a_loop_whose_compiling_failed_is_replaced(tmp_path, monkeypatch):
    """An error in a prompt's pass leaves a row that only some parts of the loop have."""
    write_checkpoint("qwen2", tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    pair = {"name": "pair", "target": str(tmp_path / "model"), "draft": "lookup"}
    job = Job(pair=pair, batch_size=2, device="cpu", sampling={"max_new_tokens": 16})
    plan = make_plan(job)
    models = build.load_models(plan)
    real, notes, failed = PrefillPasses.run, [], []

    def run(passes, *given, **named):
        if not failed:
            failed.append(passes)
            raise ZeroDivisionError("no pass")
        real(passes, *given, **named)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "compiles", lambda loop: True)
    monkeypatch.setattr(PrefillPasses, "run", run)
    loop = build.ready_loop(plan, models, notes.append, notes.append)
    assert "failed: ZeroDivisionError: no pass" in notes[-1]
    assert loop.target._passes is not failed[0]
    build.warm_up(loop, plan)
    assert len(loop.batch) == 0
    assert not list((tmp_path / "cache").glob("bass-*")), "it is tried again"


def test_models_whose_embedding_is_torchs_are_not_compiled_ahead(tmp_path):
    """Only kernels may read tables by tokens that no kernel has written."""
    write_checkpoint("qwen2", tmp_path)
    decoder, other = load_decoder(tmp_path), load_decoder(tmp_path)
    other.compiles_ahead = AnyModel.compiles_ahead
    assert graphs_for(Models(decoder, decoder)).compiles
    ran = []
    for models in (Models(other), Models(decoder, other)):
        graphs = graphs_for(models)
        assert not graphs.compile([lambda: ran.append(1)])
    assert not ran
