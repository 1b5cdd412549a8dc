"""A target split over two processes draws the tokens of one process, exactly. If one process dies, the
command ends; if the command dies, they end."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import write_chain
from checkpoints import write_checkpoint, write_mask, write_pair
from command_line import cli, rows_in
from fakes import FakeGraphs
from heads import write_head
from killed import follower_of, is_alive, kill_in_two_parts, stop_in_two_parts
from torch import Tensor

from bass_cli.config.job import Job, Speculation, load_pair
from bass_cli.config.sampling import Sampling
from bass_cli.engine.batch import Change, Row
from bass_cli.engine.loop import Loop
from bass_cli.errors import MachineError, UserError
from bass_cli.formats.weights import size_of
from bass_cli.models.partition import Share
from bass_cli.models.ranks import _store
from bass_cli.run.build import Models, build, load_draft, load_models
from bass_cli.run.generate import generate
from bass_cli.run.plan import Plan, make_plan
from bass_cli.run.updates import Updates
from bass_cli.tensor_parallel import leader
from bass_cli.tensor_parallel.leader import Followers

PROMPTS = [f"the cat number {i} sat" for i in range(3)]
OPTIONS = ["--pair", "pair.yaml", "--n", "2", "--max-new-tokens", "20", "--temperature", "1.5",
           "--token-ids", "--batch-size", "2", "--device", "cpu"]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("pair")
    write_pair(folder, prompts=3, num_hidden_layers=3)
    write_mask(folder / "draft", 300)
    write_head(folder / "head", "dspark")
    write_head(folder / "lent", "dflash")
    write_chain(folder / "chain", "authors")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def plan_of(
    draft: str = "draft",
    coupling: str = "shared",
    length: Any = 4,
    ranks: int = 1,
    *,
    tokens: int = 20,
    **changes: Any,
) -> Plan:
    pair = load_pair("pair.yaml").model_copy(update={"draft": draft})
    job = Job(
        pair=pair,
        sampling=Sampling(max_new_tokens=tokens, temperature=1.5, top_p=0.9, seed=5),
        speculation=Speculation(length=length, coupling=coupling),
        n=2,
        batch_size=4,
        device="cpu",
        token_ids=True,
        tensor_parallel=ranks,
        **changes,
    )
    return make_plan(job, prompts=len(PROMPTS))


def drawn(
    plan: Plan, models: Models | None = None, prompts: Sequence[str] = PROMPTS
) -> dict[tuple[str, int], Any]:
    loop = None if models is None else build(plan, models)
    return {(one.id, one.sample): one for one in generate(prompts, plan, loop=loop)}


@pytest.fixture(scope="module")
def halves() -> Iterator[tuple[Models, int]]:
    """The models, with half of the target in another process, and the bytes that this process read."""
    read = [0]
    models = load_models(plan_of(ranks=2), lambda done, whole: read.append(done))
    yield models, read[-1]
    models.close()


def test_split_target_scores_texts_as_the_whole(halves: tuple[Models, int]) -> None:
    """Texts that share a pass, and one that is read at once."""
    found = []
    for plan, models in ((plan_of(), None), (plan_of(ranks=2), halves[0])):
        target = build(plan, models).target
        for key, tokens in (("a", [5, 6, 7, 8]), ("b", [9] * 90), ("c", [3, 4])):
            in_time = (lambda count: True) if key == "c" else None
            target.open(key, tokens, in_time, logprobs=3)
        target.prefill_all()
        found.append([target.prompt_logprobs(key) for key in "abc"])
        for key in "abc":
            target.close(key)
    for whole, split in zip(*found, strict=True):
        assert split[0] == pytest.approx(whole[0], abs=1e-5)
        assert (split[1] >> 32 == whole[1] >> 32).all()


@pytest.mark.parametrize(
    ("draft", "coupling", "length", "changes"),
    [
        ("none", "shared", "auto", {}),
        pytest.param("draft", "shared", 4, {}, marks=pytest.mark.slow),
        ("draft", "maximal", "auto", {}),
        ("draft", "shared", "auto", {"budget": 600.0}),
        pytest.param("lookup", "shared", "auto", {}, marks=pytest.mark.slow),
        ("lookup", "maximal", 4, {}),
        pytest.param("skip:1", "shared", 3, {}, marks=pytest.mark.slow),
        ("parallel:draft", "shared", 3, {}),
        ("heads:head", "shared", 3, {}),
        pytest.param("heads:chain", "maximal", 3, {}, marks=pytest.mark.slow),
        pytest.param("draft", "shared", 4, {"kv_dtype": "fp8"}, marks=pytest.mark.slow),
        ("heads:chain", "shared", 3, {"kv_dtype": "fp8"}),
    ],
)
def test_split_target_draws_the_tokens_of_the_whole(
    draft: str, coupling: str, length: Any, changes: Any, halves: tuple[Models, int]
) -> None:
    models, plan = halves[0], plan_of(draft, coupling, length, 2, **changes)
    if draft != "draft":
        models = load_draft(plan, models)
    expected = drawn(plan_of(draft, coupling, length, **changes))
    found = drawn(plan, models)
    assert {key: one.token_ids for key, one in found.items()} == {
        key: one.token_ids for key, one in expected.items()
    }
    assert [found[key].mean_logprob for key in expected] == pytest.approx(
        [one.mean_logprob for one in expected.values()], rel=1e-5
    )
    if length != "auto":  # which goes by the clock
        counts = {key: (one.rounds, one.drafted, one.accepted) for key, one in found.items()}
        assert counts == {
            key: (one.rounds, one.drafted, one.accepted) for key, one in expected.items()
        }
        assert draft == "lookup" or sum(one.accepted for one in found.values()) > 0


def test_split_target_takes_new_weights(halves: tuple[Models, int]) -> None:
    """By tensors and by files, in both processes, and in the head's copies of embedding and head.
    Equal counts of accepted drafts show the latter."""
    plan, other = plan_of("heads:lent", length=3, ranks=2), plan_of("heads:lent", length=3)
    models = load_draft(plan, halves[0])
    loop, updates = build(plan, models), Updates(models, plan.files)
    new = write_checkpoint("llama", Path("new"), seed=9, num_hidden_layers=3)
    for file in Path("target").glob("tokenizer*"):
        (Path("new") / file.name).write_bytes(file.read_bytes())
    pair = other.job.pair.model_copy(update={"target": "new"})
    fresh = make_plan(other.job.model_copy(update={"pair": pair}), prompts=len(PROMPTS))
    for weights, expected in ((new.state_dict(), drawn(fresh)), ("target", drawn(other))):
        updates.update(weights)
        found = {(one.id, one.sample): one for one in generate(PROMPTS, plan, loop=loop)}
        assert {key: (one.token_ids, one.accepted) for key, one in found.items()} == {
            key: (one.token_ids, one.accepted) for key, one in expected.items()
        }


class LedFakes(FakeGraphs):
    """Graphs of a split target's rounds on a CPU. A capture sends the calls that the function sent when
    it ran, and runs nothing. A replay runs the function without sending."""

    def __init__(self, followers: Followers, patch: pytest.MonkeyPatch):
        super().__init__()
        self._followers, self._tell, self._calls = followers, followers.tell, dict[Hashable, Any]()
        self.told: list[tuple[Any, ...]] = []
        self._silent, self._key = False, None
        patch.setattr(followers, "tell", self._heard)
        patch.setattr(leader, "capture", self._capture)

    def _heard(self, *message: Any) -> None:
        if not self._silent:
            self.told.append(message)
            self._tell(*message)

    def run(self, key: Hashable, function: Callable[[], Tensor | None]) -> Tensor | None:
        before = len(self.told)
        found = super().run(key, function)
        self._calls[key] = self.told[before:]
        return found

    def capture(self, key: Hashable, function: Callable[[], Tensor | None]) -> None:
        self._key, found = key, list[Tensor | None]()
        graph = self._followers.graphs.capture(lambda: found.append(function()), None)

        def replayed() -> Tensor | None:
            graph.replay()
            return found.pop()

        super().capture(key, replayed)

    def _capture(self, function: Callable[[], None], pool: object) -> LedFakes.Replays:
        for call in self._calls[self._key]:
            self._heard(*call)
        return LedFakes.Replays(self, function)

    class Replays:
        """One graph."""

        def __init__(self, graphs: LedFakes, function: Callable[[], None]):
            self._graphs, self._function = graphs, function

        def replay(self) -> None:
            self._graphs._silent = True
            self._function()
            self._graphs._silent = False

        def reset(self) -> None:
            pass


@pytest.mark.parametrize(
    ("draft", "coupling", "length"),
    [
        pytest.param("none", "shared", "auto", marks=pytest.mark.slow),
        ("draft", "maximal", "auto"),
        pytest.param("skip:1", "shared", 3, marks=pytest.mark.slow),
        pytest.param("heads:chain", "shared", 3, marks=pytest.mark.slow),
    ],
)
def test_split_target_with_graphs_draws_the_tokens_of_the_whole(
    draft: str,
    coupling: str,
    length: Any,
    halves: tuple[Models, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models, plan = halves[0], plan_of(draft, coupling, length, 2, tokens=40)
    if draft != "draft":
        models = load_draft(plan, models)
    expected = drawn(plan_of(draft, coupling, length, tokens=40))
    assert models.followers is not None
    graphs = LedFakes(models.followers, monkeypatch)
    monkeypatch.setattr("bass_cli.run.build.Graphs", lambda device, **given: graphs)
    found = drawn(plan, models)
    assert {key: one.token_ids for key, one in found.items()} == {
        key: one.token_ids for key, one in expected.items()
    }
    replayed = sum(message[1] == "replay" for message in graphs.told)
    assert replayed == graphs.count("replay") > 10
    assert graphs.count("capture") == sum(message[1] == "capture" for message in graphs.told) > 0


@pytest.mark.parametrize("checks", [0, 25])
def test_results_are_not_used_once_sums_may_lack_a_part(
    checks: int, halves: tuple[Models, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a wait of kernels that has ended at its limit."""
    plan, followers = plan_of("none", length="auto", ranks=2), halves[0].followers
    assert followers is not None
    answers = chain(repeat(None, checks), repeat(1))
    monkeypatch.setattr(followers, "_broken", False)  # restored afterwards, for other tests
    monkeypatch.setattr(followers.ranks, "missed", lambda: next(answers))
    with pytest.raises(MachineError, match="process 1 of 0 to 1: it has not answered"):
        drawn(plan, load_draft(plan, halves[0]))


def test_rows_grow_and_are_put_back_equally_in_all_processes(
    halves: tuple[Models, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process copies its part of the keys, for the same rows at the same time."""
    monkeypatch.setattr("bass_cli.run.plan._PIECE", 14)
    copied, put_back, grow, follow = [0], [0], Loop.grow, Loop._follow

    def watched_grow(loop: Loop) -> list[Row]:
        back = grow(loop)
        put_back[0] += len(back)
        return back

    def watched_follow(loop: Loop, change: Change) -> None:
        copied[0] += len(change.copied)
        follow(loop, change)

    expected = drawn(plan_of("skip:1", length=3, tokens=40))
    monkeypatch.setattr(Loop, "grow", watched_grow)
    monkeypatch.setattr(Loop, "_follow", watched_follow)
    plan = dataclasses.replace(plan_of("skip:1", length=3, tokens=40, ranks=2), cached_tokens=20)
    models = load_draft(plan, halves[0])
    found = drawn(plan, models)
    assert {key: one.token_ids for key, one in found.items()} == {
        key: one.token_ids for key, one in expected.items()
    }
    assert plan.blocks.most > 1
    assert min(copied[0], put_back[0]) > 0


def test_common_prefix_is_copied_equally_in_all_processes(halves: tuple[Models, int]) -> None:
    """A drafter that reads one token ahead copies one less. It is in the first process only."""
    plan = plan_of("heads:chain", ranks=2)
    models = load_draft(plan, halves[0])
    common = "the cat sat " * 50
    prompts = [common + end for end in ("on", "there", "there. 12")]
    tokens = {key: one.token_ids for key, one in drawn(plan, models, prompts).items()}
    expected = drawn(plan_of("heads:chain"), None, prompts)
    assert tokens == {key: one.token_ids for key, one in expected.items()}
    assert min(one.prompt_tokens for one in expected.values()) > 128


def test_each_process_reads_only_its_half(halves: tuple[Models, int]) -> None:
    (models, read), files = halves, plan_of().files
    assert models.followers is not None
    assert files.draft is not None
    assert models.followers.read == {1: size_of(files.target, Share(1, 2))}
    assert read == size_of(files.target, Share(0, 2)) + files.draft.size
    assert models.followers.read[1] < 0.52 * files.target.size


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux shows who listens where")
def test_processes_listen_on_the_loopback_interface_only() -> None:
    store = _store(0, first=True)
    files = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    rows = [row.split() for file in files if file.exists() for row in file.read_text().splitlines()]
    listening = [
        row[1].split(":")[0]
        for row in rows
        if row[3] == "0A" and row[1].endswith(f":{store.port:04X}")
    ]
    assert listening == ["0100007F"]


def test_second_group_in_a_process_is_refused(halves: tuple[Models, int]) -> None:
    with pytest.raises(UserError, match=r"in a group of torch\.distributed already"):
        next(generate(PROMPTS, plan_of(ranks=2)))


def bass(whom: str, out: Path) -> subprocess.CompletedProcess[str]:
    return kill_in_two_parts(whom, *OPTIONS, call="forward", out=out, timeout=120)


def tokens_in(out: Path) -> dict[tuple[str, int], list[int]]:
    lines = rows_in(out)
    return {(line["id"], line["sample"]): line["token_ids"] for line in lines}


@pytest.mark.slow
def test_killed_follower_is_named_and_the_command_resumes(tmp_path: Path) -> None:
    out, whole = tmp_path / "o.jsonl", tmp_path / "whole.jsonl"
    ended = bass("follower", out)
    assert ended.returncode == 3, ended.stderr
    named = (
        "bass: error: tensor parallel over 2 devices: process 1 of 0 to 1: it was killed by SIGKILL"
    )
    assert named in ended.stderr
    assert "Traceback" not in ended.stderr
    before = tokens_in(out)
    assert 0 < len(before) < 6
    for path in (out, whole):
        cli("generate", "p.txt", *OPTIONS, "--out", str(path), code=0)
    assert tokens_in(out) == tokens_in(whole)
    assert before.items() <= tokens_in(whole).items()


def wait_for_end(process: int) -> None:
    until = time.monotonic() + 20
    while is_alive(process) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_alive(process)


@pytest.mark.slow
def test_followers_end_when_the_leader_is_killed(tmp_path: Path) -> None:
    ended = bass("os.getpid()", tmp_path / "o.jsonl")
    assert ended.returncode == -9
    wait_for_end(follower_of(ended))


@pytest.mark.slow
def test_ctrl_c_ends_the_command_within_5_s_while_a_follower_is_stopped(tmp_path: Path) -> None:
    out, whole = tmp_path / "o.jsonl", tmp_path / "whole.jsonl"
    ended, seconds = stop_in_two_parts(*OPTIONS, numbers=[signal.SIGINT], out=out)
    assert seconds < 5
    assert ended.returncode == 130, ended.stderr
    assert "bass: error: interrupted; run the same command again to continue" in ended.stderr
    assert "Traceback" not in ended.stderr
    wait_for_end(follower_of(ended))
    before = tokens_in(out)
    assert 0 < len(before) < 6
    for path in (out, whole):
        command = ["generate", "p.txt", *OPTIONS, "--out", str(path)]
        cli(*command, code=0)
    assert tokens_in(out) == tokens_in(whole)
    assert before.items() <= tokens_in(whole).items()


@pytest.mark.slow
def test_sigterm_ends_the_command_within_5_s_while_a_follower_is_stopped_as_it_joins(
    tmp_path: Path,
) -> None:
    """The leader waits in a call of torch that Python's signal handlers do not interrupt."""
    out = tmp_path / "o.jsonl"
    ended, seconds = stop_in_two_parts(
        *OPTIONS, numbers=[signal.SIGTERM], call="join", count=1, out=out
    )
    assert seconds < 5
    assert ended.returncode == 130, ended.stderr
    assert "Traceback" not in ended.stderr
    wait_for_end(follower_of(ended))


@pytest.mark.slow
def test_stopped_follower_ends_when_the_leader_is_killed(tmp_path: Path) -> None:
    ended, _ = stop_in_two_parts(*OPTIONS, numbers=[signal.SIGKILL], out=tmp_path / "o.jsonl")
    assert ended.returncode == -9
    wait_for_end(follower_of(ended))


@pytest.mark.slow
def test_follower_stopped_for_a_while_gives_the_same_tokens(tmp_path: Path) -> None:
    out, whole = tmp_path / "o.jsonl", tmp_path / "whole.jsonl"
    ended, _ = stop_in_two_parts(*OPTIONS, numbers=[signal.SIGCONT], whom="follower", out=out)
    assert ended.returncode == 0, ended.stderr
    command = ["generate", "p.txt", *OPTIONS, "--out", str(whole)]
    cli(*command, code=0)
    assert tokens_in(out) == tokens_in(whole)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--tensor-parallel", "4"], "target has attention heads 6, which 4 does not divide"),
        (["--tensor-parallel", "0"], "greater than or equal to 1"),
        (["--tensor-parallel", "2", "--draft-length", "table"], "bass profile measures one device"),
        (
            ["--tensor-parallel", "2", "--ray", "local"],
            "--ray and --tensor-parallel exclude each other",
        ),
    ],
)
def test_jobs_that_cannot_be_split_are_refused_before_loading(
    flags: list[str], reason: str, tmp_path: Path
) -> None:
    out = tmp_path / "o.jsonl"
    assert reason in cli("generate", "p.txt", *OPTIONS, *flags, "--out", str(out), code=2).stderr
    assert not out.exists()


def test_too_few_devices_are_an_error_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("bass_cli.run.plan.device_of", lambda wanted: torch.device("cuda"))
    monkeypatch.setattr("bass_cli.run.plan.wake", lambda device: None)
    with pytest.raises(MachineError, match="`tensor_parallel` 2: this process sees 1 GPUs"):
        plan_of(ranks=2)


def test_plan_counts_half_of_the_target(place: Path) -> None:
    whole, half = (plan_of("none", length="auto", ranks=ranks).footprint for ranks in (1, 2))
    assert 0.49 < half.weights / whole.weights < 0.53
    assert half.token.cache == whole.token.cache / 2
    shown = cli("doctor", "--pair", str(place / "pair.yaml"), "--tensor-parallel", "2")
    assert "on each of 2 devices" in shown.stdout
