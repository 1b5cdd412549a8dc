"""`bass distill --ray` with a real Ray on this machine and actors on CPUs. Two actors train what
one process trains. Actors and the command are killed, and the folder is the same in the end."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal

import pytest
import torch
from command_line import cli
from forked import BASS, Forked
from safetensors.torch import load_file
from test_command import FLAGS, here, improved, killed  # noqa: F401 (a fixture)
from test_processes import local_workers
from test_rays import actors, cluster, until  # noqa: F401 (a fixture)
from test_worker_pool import Fleet

from bass_cli.cluster.worker_pool import WorkerPool
from bass_cli.config.machine_commands import DistillArgs
from bass_cli.distill import command
from bass_cli.distill.group import Rank
from bass_cli.distill.sampling import Supply, draw, lines_of
from bass_cli.distill.settings import sampling_job
from bass_cli.io.console import Screen
from bass_cli.io.prompts import Prompt
from bass_cli.run.plan import make_plan, plan_of_others

TRAINED = (*FLAGS, "--steps", "16")
WEIGHTS = "draft/model.safetensors"


def dying(rank, step, flag):
    """Make a Rank that dies in a step, as by kill -9, the first time. Ray sends its code by value."""

    class Dying(Rank):
        def exchange(self, info, beat):
            import os
            import signal

            from bass_cli.distill.training import Trainer

            if info is not None and info.rank == rank and not os.path.exists(flag):
                learn = Trainer._learn

                def learnt(trainer, part, guesses):
                    if trainer.progress.step == step:
                        open(flag, "w").close()
                        os.kill(os.getpid(), signal.SIGKILL)
                    return learn(trainer, part, guesses)

                Trainer._learn = learnt
            return Rank.exchange(self, info, beat)

    return Dying


def weights(folder):
    return load_file(folder / WEIGHTS)


def close(one, other):
    assert one.keys() == other.keys()
    for name, weight in one.items():
        torch.testing.assert_close(weight, other[name], atol=2e-3, rtol=2e-3)


def samples_from(folder, to):
    to.mkdir()
    for path in folder.glob("samples.jsonl*"):
        shutil.copy(path, to)


@pytest.mark.slow  # Ray under kills
def test_two_actors_of_which_one_is_killed_train_what_one_process_does(here, cluster, monkeypatch):
    """One actor dies in a step, and a new group repeats the step."""
    one = cli("distill", *TRAINED, "--out", "one", "--json", code=0)
    samples_from(here / "one", here / "two")
    monkeypatch.setattr(command, "Rank", dying(1, 7, str(here / "flag")))
    monkeypatch.setattr(command, "SECONDS", 0.0)
    given = ("--ray", cluster.address, "--actors", "2")
    two = cli("distill", *TRAINED, "--out", "two", *given, "--json", code=0)
    output = " ".join(two.stderr.split())
    assert re.search(r"2 actors train together .* an actor on \S+ died; .* 2 actors train", output)
    assert "resuming from step 7" in output
    expected, found = (json.loads(done.stdout.splitlines()[-1]) for done in (one, two))
    assert found == json.loads((here / "two/report.json").read_text())
    improved(found, output)
    for part in ("steps", "tokens", "guesses"):
        assert found["training"][part] == expected["training"][part]
    assert found["training"]["loss"] == pytest.approx(expected["training"]["loss"], rel=1e-3)
    close(weights(here / "two"), weights(here / "one"))
    names = sorted(str(path.relative_to(here / "one")) for path in (here / "one").rglob("*"))
    assert names == sorted(
        str(path.relative_to(here / "two")) for path in (here / "two").rglob("*")
    )
    assert (here / "two/samples.jsonl").read_bytes() == (here / "one/samples.jsonl").read_bytes()


def test_a_worker_pool_draws_until_there_are_enough_tokens(tmp_path):
    """Also if workers die, and into a file that has samples already."""
    prompts = [Prompt(str(number), "a", None, {}, None, "") for number in range(4)]
    path = tmp_path / "samples.jsonl"
    for wanted, seed in ((90, 0), (90, 1), (400, 2)):
        fleet = Fleet(deaths=0.03, seed=seed)
        workers = WorkerPool(
            fleet, Screen(True), n=3, alike=False, now=lambda fleet=fleet: fleet.now
        )
        workers.gather()
        supply = Supply(lambda: iter(prompts), n=3, wanted=wanted)
        kept = path.read_bytes() if path.exists() else b""
        draw(lambda supply, _, workers=workers: workers.draw(supply, supply.done, None), supply,
             path=path, results={}, screen=Screen(True), line=workers.line)  # fmt: skip
        found = list(lines_of(path))
        assert path.read_bytes().startswith(kept)
        assert len({(one.id, one.sample) for one in found}) == len(found)
        assert 0.98 * wanted <= sum(one.tokens for one in found) < wanted + 60


@pytest.mark.slow  # a minute and a half
def test_a_killed_command_resumes_with_any_number_of_actors(here, cluster, monkeypatch):
    """Kills happen during sampling and during training. The samples are those of one process. The
    same number of actors gives the same bits, whatever was killed."""
    given = ("--ray", cluster.address)
    flags = (*TRAINED, "--out", "out")
    samples, checkpoint = here / "out/samples.jsonl", here / "out/checkpoint.pt"
    killed(here, lambda: samples.exists() and samples.read_bytes().count(b"\n") > 10, *flags,
           *given, "--actors", "2")  # fmt: skip
    kept = samples.read_bytes()
    killed(here, checkpoint.exists, *flags, *given, "--actors", "3")
    assert samples.read_bytes().startswith(kept[: kept.rindex(b"\n") + 1])
    until(lambda: not actors(os.getpid(), "Rank"))  # Ray ends what has no driver any more
    assert "resuming from step" in cli("distill", *flags, *given, "--actors", "1", code=0).stderr
    one_by_one(here)
    found = {}
    for name, kill in (("undisturbed", False), ("killed", True)):
        samples_from(here / "out", here / name)
        with monkeypatch.context() as patch:
            if kill:
                patch.setattr(command, "Rank", dying(0, 9, str(here / "flag")))
                patch.setattr(command, "SECONDS", 0.2)
            whole = cli("distill", *TRAINED, "--out", name, *given, "--actors", "2")
        assert whole.exit_code == 0, whole.stderr
        assert kill == ("died; the others resume" in whole.stderr)
        found[name] = weights(here / name)
    for name, weight in found["undisturbed"].items():
        assert torch.equal(weight, found["killed"][name]), name
    close(weights(here / "out"), found["killed"])


def one_by_one(here):
    """Check every sample against one that a single process draws for the same prompt id. Later
    prompts depend on the order in which samples end, so neither run has all prompts of the
    other."""
    cli("distill", *TRAINED, "--out", "alone", code=0)
    here_, there = ({(one.id, one.sample): (one.text, one.token_ids) for one in lines_of(path)}
                    for path in (here / "out/samples.jsonl", here / "alone/samples.jsonl"))  # fmt: skip
    both = here_.keys() & there.keys()
    assert len(both) > 20
    assert {id_.partition("/")[0] for id_, _ in both} >= {"turn", "text"}
    assert {key: here_[key] for key in both} == {key: there[key] for key in both}


@pytest.mark.slow
def test_processes_of_this_machine_train_and_end_with_ctrl_c(here):
    flags = (*FLAGS, "--minutes", "5", "--out", "out", "--ray", "local", "--actors", "2")
    with (here / "log").open("w") as log:
        child = Forked(f"import bass_cli.distill.command as m; m.SECONDS = 0.0; {BASS}", "distill",
                       *flags, cwd=here, stderr=log)  # fmt: skip
        until((here / "out/checkpoint.pt").exists, child)
        assert len(local_workers(child.pid)) == 2
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 130, (here / "log").read_text()
    output = (here / "log").read_text()
    assert "interrupted; the same command resumes from here" in output
    assert "Traceback" not in output
    until(lambda: not local_workers(child.pid))


@pytest.mark.parametrize(("flags", "fault"), [
    (("--actors", "2"), "needs --ray"),
    (("--ray", "local", "--actors", "0"), '"0" is neither all nor a whole number above 0'),
    (("--ray", "somewhere"), '"somewhere" is neither local, auto nor an address'),
    (("--ray", "127.0.0.1:1"), "--ray 127.0.0.1:1: no cluster answers there"),
])  # fmt: skip
def test_wrong_options_are_refused_before_models_are_read(here, monkeypatch, flags, fault):
    for place in ("make_plan", "plan_of_others"):
        monkeypatch.setattr(command, place, lambda *_, **__: pytest.fail("models were read"))
    refused = cli("distill", *TRAINED, "--out", "out", *flags)
    assert (refused.exit_code, fault in " ".join(refused.stderr.split())) == (2, True)
    assert not (here / "out").exists()


def test_a_driver_without_gpus_plans_for_those_of_the_actors(here):
    """Device and dtype are those of the actors, and all else is the same."""
    _, job = sampling_job(DistillArgs(pair="pair.yaml", out="out"))
    assert job.dtype == "auto"  # until the device is known
    on_cpu, on_gpu = (plan_of_others(job.model_copy(update={"device": kind})).identity()
                      for kind in ("cpu", "cuda"))  # fmt: skip
    assert on_cpu == make_plan(job.model_copy(update={"device": "cpu"})).identity()
    assert (on_gpu["device"], on_gpu["dtype"]) == ("cuda", "bf16")
    same = on_gpu.keys() - {"device", "dtype", "versions"}
    assert {name: on_gpu[name] for name in same} == {name: on_cpu[name] for name in same}


def test_without_ray_the_error_names_the_install_command(here, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused = cli("distill", *TRAINED, "--out", "out", "--ray", "auto", code=2)
    assert "pip install 'bass-cli[ray]'" in " ".join(refused.stderr.split())
