"""A real Ray on this machine, with two cores and tiny models.

Actors and driver are killed and a node joins; the file equals that of one undisturbed process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import cli
from test_end_to_end import samples

from bass_cli import Job, Pair
from bass_cli.cluster.fleet import Place
from bass_cli.cluster.rays import Placement, Request

FLAGS = ("p.txt", "--pair", "pair.yaml", "--n", "3", "--token-ids", "--device", "cpu")
STORE = 80 * 2**20  # bytes, about the least that Ray takes
_PATIENCE = 240.0  # seconds for what takes a few on an idle machine


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head node with room for four actors of one thread each."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        head = {"num_cpus": 4, "object_store_memory": STORE, "include_dashboard": False}
        found = Cluster(initialize_head=True, head_node_args=head)
        yield found
        found.shutdown()


def bass(*arguments: str) -> tuple[int, str]:
    found = cli(*arguments)
    return found.exit_code, " ".join(found.stderr.split())


def driver(place: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "bass_cli", "generate", *FLAGS, *arguments]
    with (place / "log").open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=place,
            stderr=log,
            stdout=log,
            # a shell starts background jobs with SIGINT ignored
            preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )


def parent_of(process: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def actors(of: int, kind: str = "Worker") -> set[int]:
    """Return descendants of a process that are Ray actors of this kind, without the children that
    tokenise for them."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if file.read_bytes().startswith(f"ray::{kind}".encode()):
                above = number = int(file.parent.name)
                while above not in (0, of):
                    above = parent_of(above)
                found |= {number} if above == of else set()
    return {number for number in found if parent_of(number) not in found}


def until(what: Callable[[], Any], child: subprocess.Popen[bytes] | None = None) -> Any:
    """Call `what` until its result is true, and return it; fail if the child ends."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        if found := what():
            return found
        assert child is None or child.poll() is None, "the driver has ended"
        time.sleep(0.05)
    raise AssertionError("it takes too long")


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow  # Ray under kills: half a minute
def test_the_file_is_the_same_after_kills_and_a_new_node(cluster: Any, pair_folder: Any) -> None:
    place = pair_folder(prompts=60)
    flags = ("--max-new-tokens", "48", "--draft", "none", "--draft-length", "auto")
    assert bass("generate", *FLAGS, *flags, "--out", "expected.jsonl")[0] == 0
    out = place / "o.jsonl"
    flags += ("--ray", cluster.address, "--threads", "1", "--batch-size", "4", "--out", out.name)
    child = driver(place, *flags)
    killed: set[int] = set()
    for number in range(3):
        until(lambda number=number: lines(out) > 8 * (number + 1), child)
        victim = until(lambda: sorted(actors(os.getpid()) - killed), child)[-1]
        os.kill(victim, signal.SIGKILL)
        killed.add(victim)
    until(lambda: (place / "log").read_text().count("are drawn again") == 3, child)
    child.kill()
    child.wait()
    before = out.read_bytes()
    until(lambda: not actors(os.getpid()))  # Ray ends what has no driver any more
    child = driver(place, *flags)
    until(lambda: lines(out) > before.count(b"\n") + 8, child)
    late = cluster.add_node(num_cpus=1, object_store_memory=STORE)
    until(lambda: len(actors(os.getpid())) == 5, child)
    assert child.wait(_PATIENCE) == 0, (place / "log").read_text()
    assert samples(out) == samples(place / "expected.jsonl")
    assert len(samples(out)) == 180
    assert out.read_bytes().startswith(before[: before.rindex(b"\n") + 1])  # kept, not drawn anew
    manifest = json.loads((place / "o.jsonl.manifest.json").read_text())
    assert manifest["finished"]
    assert manifest["last_run"]["actors"] >= 4
    cluster.remove_node(late)


@pytest.mark.slow
def test_shards_work_on_ray_and_errors_name_the_node(cluster: Any, pair_folder: Any) -> None:
    place = pair_folder(prompts=4)
    flags = ("--ray", cluster.address, "--actors", "1", "--out", "o.jsonl", "--shard", "1/2")
    flags += ("--max-new-tokens", "4")
    assert bass("generate", *FLAGS, *flags)[0] == 0
    results = json.loads((place / "o.jsonl.manifest.json").read_text())["results"]
    assert results["shard"] == "1/2"  # so that bass merge knows it as a part
    (place / "o.jsonl").unlink()
    (place / "pair.yaml").write_text("target: ./gone\ndraft: none\n")
    code, output = bass("generate", *FLAGS, *flags)
    assert code == 2, output
    assert f"on {os.uname().nodename}: " in output
    assert "gone" in output
    assert not (place / "o.jsonl").exists()


@pytest.mark.slow
def test_bench_measures_a_job_by_one_process_and_by_actors(cluster: Any, pair_folder: Any) -> None:
    pair_folder(prompts=2)
    flags = ("--n", "2", "--max-new-tokens", "4", "--pair", "pair.yaml", "--device", "cpu")
    given = ("--threads", "1", "--ray", cluster.address, "--actors", "1", "--repeats", "1")
    found = cli("bench", "--job", "p.txt", *flags, *given, "--json", code=0)
    document = json.loads(found.stdout)
    assert document["job"]["on_ray"] == [f"--ray={cluster.address}", "--actors=1"]
    one, ours = (document["engines"][name] for name in ("bass", "bass --ray"))
    assert (one["samples"], one["tokens"]) == (ours["samples"], ours["tokens"]) == (4, 16)
    assert one["host_bytes"] > 1e8
    assert ours["host_bytes"] is None  # the driver's says nothing
    for engine in (one, ours):
        assert 0 < engine["rows_busy"] <= 1
        # Ray's start, and what is in the actors a second time
        assert 0 < engine["starting_seconds"] < engine["seconds"]["median"]


@pytest.mark.slow  # a third of a minute; one more way to the same actors
def test_an_evaluation_and_a_dataset(cluster: Any, pair_folder: Any) -> None:
    """`eval --ray` and a map over Ray Data give the same samples as one process."""
    import ray

    import bass_cli.ray
    from bass_cli import Sampling, generate, load_pair

    place = pair_folder(prompts=2, max_position_embeddings=1024)
    task = ("eval", "humaneval", "--pair", "pair.yaml", "--limit", "3", "--n", "2", "--token-ids")
    task += ("--device", "cpu", "--max-new-tokens", "6", "--allow-code-execution")
    given = ("--ray", cluster.address, "--actors", "1", "--out", "ray.jsonl")
    for flags in (given, ("--out", "one.jsonl")):
        code, output = bass(*task, *flags)
        assert code == 0, output
    assert samples(place / "ray.jsonl") == samples(place / "one.jsonl")

    sampling = Sampling(seed=3, max_new_tokens=6)
    job = Job(pair=load_pair("pair.yaml"), n=2, device="cpu", sampling=sampling, token_ids=True)
    rows = [{"id": f"p{i}", "prompt": f"the cat {i}", "kind": i} for i in range(5)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            data = ray.data.from_items(rows)
            drawn = bass_cli.ray.generate(data, job, batch_size=2).take_all()
            fewer = job.model_copy(update={"limit": 3, "device": "auto"})  # no GPU here
            some = bass_cli.ray.generate(data, fewer, batch_size=2).take_all()
        finally:
            ray.shutdown()
    assert {(row["id"], row["sample"]): (row["text"], row["token_ids"], json.loads(row["meta"]))
            for row in drawn} == {(one.id, one.sample): (one.text, one.token_ids, one.meta)
                                  for one in generate(rows, job)}  # fmt: skip
    assert len(drawn) == 10
    assert len(some) == 6


@pytest.mark.parametrize(("flags", "fault"), [
    (("--ray", "local", "--actors", "0"), '"0" is neither all nor a whole number above 0'),
    (("--ray", "local", "--actors", "many"), '"many" is neither all'),
    (("--actors", "2"), "needs --ray"),
    (("--ray", "local", "--budget", "2s"), "--ray and --budget exclude each other"),
    (("--ray", "local", "--coupling", "maximal"), "--ray needs --coupling shared"),
    (("--ray", "local", "--out", "-"), "--ray needs --out FILE"),
    (("--ray", "127.0.0.1:1"), "--ray 127.0.0.1:1: no cluster answers there"),
    (("--ray", "somewhere"), '"somewhere" is neither local, auto nor an address'),
    (("--ray", "ray://host:10001"), "run the command on a node of the cluster"),
    (("--ray", "local", "--device", "cuda"), "this machine has 0 GPUs"),
])  # fmt: skip
def test_contradicting_options_are_refused_before_models_are_read(
    pair_folder: Any, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], fault: str
) -> None:
    pair_folder(prompts=2)
    monkeypatch.setattr(
        "bass_cli.run.plan.make_plan", lambda *_, **__: pytest.fail("models were read")
    )
    code, output = bass("generate", *FLAGS, "--out", "o.jsonl", *flags)
    assert (code, fault in output) == (3 if "cuda" in flags else 2, True), output


def test_without_ray_the_error_shows_how_to_install_it(
    pair_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair_folder(prompts=2)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, output = bass("generate", *FLAGS, "--ray", "auto", "--out", "o.jsonl")
    assert (code, "pip install 'bass-cli[ray]'" in output) == (2, True)


def test_ray_is_imported_only_on_request() -> None:
    code = "import sys, bass_cli.generation, bass_cli.ray; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_an_actor_takes_a_gpu_if_the_cluster_has_one_else_cores() -> None:
    """`resources` returns what Ray reserves; the job has the device that an actor uses."""
    head, gpus, gone = ("a" * 56, "b" * 56, "c" * 56)
    nodes = [
        {"NodeID": head, "Alive": True, "Resources": {"CPU": 8.0}},
        {"NodeID": gpus, "Alive": True, "Resources": {"CPU": 32.0, "GPU": 2.0}},
        {"NodeID": gone, "Alive": False, "Resources": {"CPU": 32.0, "GPU": 8.0}},
    ]

    def placement(device: str, actors: int | None, threads: int | None = None) -> Placement:
        job = Job(pair=Pair(name="p", target="t"), device=device, threads=threads)
        return Placement(lambda: nodes, Request("auto", actors), job)

    found = placement("auto", None)
    assert found.job.device == "cuda"
    assert found.places() == {Place(gpus, 0), Place(gpus, 1)}
    taken = found.resources(Place(gpus, 1))
    assert (taken["num_gpus"], taken["scheduling_strategy"].node_id) == (1, gpus)
    nodes[0]["Resources"] = {"CPU": 8.0, "GPU": 1.0}  # it has joined
    assert found.places() == {Place(gpus, 0), Place(gpus, 1), Place(head, 0)}
    assert placement("auto", 5).resources(Place(None, 4)) == {"num_cpus": 1, "num_gpus": 1}
    on_cpus = placement("cpu", None)
    assert on_cpus.job.device == "cpu"
    assert on_cpus.places() == {Place(head, 0), Place(gpus, 0)}
    assert (
        on_cpus.resources(Place(gpus, 0))["num_cpus"],
        on_cpus.resources(Place(gpus, 0))["num_gpus"],
    ) == (32, 0)
    assert len(placement("cpu", None, threads=8).places()) == 5
    for node in nodes:
        node["Resources"].pop("GPU", None)
    assert placement("auto", None).job.device == "cpu"
    assert placement("cuda", None).places() == set()  # they may join
    assert (
        placement("cuda", 3).resources(Place(None, 0))["num_gpus"] == 1
    )  # an autoscaler brings them
