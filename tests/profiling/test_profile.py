"""Test profiles: their files, the measurement of a pair, the command, and jobs that use them."""

import itertools
import json
import math
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import write_checkpoint, write_tokenizer
from command_line import cli, rows_in
from devices import device, surface_of
from fakes import Ticks
from toys import AtOnce, Markov, loop_for

from bass_cli.engine.contracts import RoundResult
from bass_cli.lengths import surface as store
from bass_cli.lengths.controllers import Fixed
from bass_cli.lengths.goodput import Goodput
from bass_cli.models.capture import Graphs
from bass_cli.run.profile import WIDTHS, drafting, filled, measure
from bass_kernels import launch


class Timed(Markov):
    """A toy model with passes of `cost(rows, width)` seconds."""

    def __init__(self, table, pending, ticks, cost):
        super().__init__(table, pending)
        self._ticks, self._cost = ticks, cost

    def forward(self, tokens, positions, ends, *, last=None):
        self._ticks.seconds += self._cost(*tokens.shape)
        return super().forward(tokens, positions, ends, last=last)


def timed_loop(
    rows=8, target=lambda rows, width: 0.01 + 0.001 * rows * width, draft=lambda rows, width: 0.002
):
    ticks, table = Ticks(), torch.randn(3, 7, 7, generator=torch.Generator().manual_seed(0))
    loop = loop_for(
        Timed(table, 1, ticks, target), Timed(table, 2, ticks, draft), rows=rows, lengths=Fixed(3)
    )
    loop.clock.now = ticks
    return loop, ticks


PROMPTS = [[1, 2, 3, 4], [3, 1, 2, 5]]


def test_parallel_draft_is_measured_as_one_pass():
    """Its time is a pass and a little for each token, not k times one draft."""
    ticks, table = Ticks(), torch.randn(3, 7, 7, generator=torch.Generator().manual_seed(0))
    loop = loop_for(
        Timed(table, 1, ticks, lambda rows, width: 0.01 + 0.001 * rows * width),
        AtOnce(Timed(table, 2, ticks, lambda rows, width: 0.002 + 0.0001 * rows * width), 5),
        rows=8,
        lengths=Fixed(3),
    )
    loop.clock.now = ticks
    surface = measure(loop, PROMPTS, rows=(8, 1, 4), limit=100.0, now=ticks)
    for rows in (1, 4, 8):
        assert surface.draft_seconds(rows, 0) == 0
        for width in (1, 2, 4, 8, 16):
            expected = 0.002 + 0.0001 * rows * 2 * width
            assert surface.draft_seconds(rows, width) == pytest.approx(expected)


def test_unmeasured_draft_times_follow_the_kind_of_draft():
    whole, verify = {(8, 4): 0.018}, {(8, 4): 0.010}
    assert drafting(whole, verify, [8], [0, 1, 4, 8]) == [pytest.approx([0, 0.002, 0.008, 0.016])]
    at_once = drafting(whole, verify, [8], [0, 1, 4, 8], at_once=True)
    assert at_once == [pytest.approx([0, 0.008, 0.008, 0.008])]


def test_target_and_draft_are_measured_apart():
    loop, ticks = timed_loop()
    surface = measure(loop, PROMPTS, rows=(8, 1, 4), limit=100.0, now=ticks)
    assert (surface.rows, surface.measured) == ((1, 4, 8), True)
    for rows in (1, 4, 8):
        for width in (0, 1, 2, 4, 8, 16):
            assert surface.verify_seconds(rows, width) == pytest.approx(
                0.01 + 0.001 * rows * (width + 1)
            )
            assert surface.draft_seconds(rows, width) == pytest.approx(0.002 * width)
    assert surface.acceptance == 1.0, "the toy drafts for itself"
    assert len(loop.batch) == 0
    assert loop.controller.next(1) == 3, "the controller is back"
    assert measure(loop, PROMPTS, rows=(2,), limit=1.0, now=ticks).rows == (2,), "again"


def test_growth_with_the_context_is_measured():
    loop, ticks = timed_loop()
    target = loop.target
    forward = target.forward

    def slow(tokens, positions, ends, *, last=None):
        ticks.seconds += 1e-5 * len(tokens) * float(positions[0, 0])
        return forward(tokens, positions, ends, last=last)

    target.forward = slow
    surface = measure(loop, [[1, 2] * 20], rows=(1, 4), limit=100.0, context=600, now=ticks)
    assert surface.growth[0] == pytest.approx(1e-5, rel=0.2)
    assert surface.growth[1] == pytest.approx(0.0, abs=1e-6)


def test_unmeasured_points_are_filled_in():
    loop, ticks = timed_loop()
    notes = []
    surface = measure(loop, PROMPTS, rows=(1, 2, 4, 8), limit=1.2, now=ticks, note=notes.append)
    assert ticks.seconds < 1.7
    assert notes[0].endswith(" of 48 points were measured in time; the others are estimated"), (
        "nothing was compiled"
    )
    assert surface.verify_seconds(8, 16) == pytest.approx(0.01 + 0.001 * 8 * 17, rel=0.1)
    assert surface.draft_seconds(8, 16) == pytest.approx(0.002 * 16, rel=0.1)
    one = measure(loop, PROMPTS, rows=(4,), limit=0.0, now=ticks)
    assert one.seconds(4, 0) == pytest.approx(0.014), "a single point is better than none"


def slow_compiler(monkeypatch, ticks, *, fails=False):
    """Return Graphs whose kernels take 40 seconds to compile, or do not compile."""

    def compile_ahead(functions):
        for function in functions:
            function()
        ticks.seconds += 40.0
        if fails:
            raise RuntimeError("no such register")

    monkeypatch.setattr(launch, "compile_ahead", compile_ahead)
    graphs = Graphs(torch.device("cpu"))
    graphs.enabled = True
    return graphs


def test_compiling_leaves_half_of_the_time_for_measuring(monkeypatch):
    loop, ticks = timed_loop()
    loop.graphs = slow_compiler(monkeypatch, ticks)
    notes = []
    surface = measure(loop, PROMPTS, rows=(1, 8), limit=1.6, now=ticks, note=notes.append)
    assert 40.8 < ticks.seconds < 41.3
    assert "now that kernels are compiled" in notes[0]
    assert surface.verify_seconds(8, 16) == pytest.approx(0.01 + 0.001 * 8 * 17)
    assert len(loop.batch) == 0
    whole = ticks.seconds
    measure(loop, PROMPTS, rows=(1, 8), limit=200.0, now=ticks)
    assert ticks.seconds - whole < 45.0, "no more than it takes"


def test_profile_works_if_compiling_ahead_fails(monkeypatch):
    loop, ticks = timed_loop()
    loop.graphs, notes = slow_compiler(monkeypatch, ticks, fails=True), []
    surface = measure(loop, PROMPTS, rows=(1, 8), limit=20.0, now=ticks, note=notes.append)
    assert "no such register" in notes[0]
    assert surface.verify_seconds(8, 16) == pytest.approx(0.01 + 0.001 * 8 * 17)


def test_measured_points_keep_steps_of_pass_times():
    """As on a GPU, where passes grow by tiles of tokens."""

    def target(rows, width):
        return 0.01 + 0.006 * math.ceil(rows * width / 16)

    loop, ticks = timed_loop(target=target)
    surface = measure(loop, PROMPTS, rows=(1, 2, 4, 8), limit=100.0, now=ticks)
    for rows, width in itertools.product((1, 2, 4, 8), WIDTHS):
        assert surface.verify_seconds(rows, width) == pytest.approx(target(rows, width + 1))
        assert surface.draft_seconds(rows, width) == pytest.approx(0.002 * width, abs=1e-9)


def test_missing_points_lie_between_their_neighbours():
    """This holds for costs that are not linear: here compute dominates from some tokens on."""

    def seconds(rows, width):
        return 0.004 + 0.0001 * max(0, rows * (width + 1) - 60)

    rows, widths = (1, 4, 8, 12, 16), (0, 2, 4, 6, 8)
    found = filled({(r, w): seconds(r, w) for r in (1, 4, 8, 16) for w in (0, 4, 8)}, rows, widths)
    for i, r in enumerate(rows):
        line = [
            seconds(r, w) if r != 12 else (seconds(8, w) + seconds(16, w)) / 2 for w in (0, 4, 8)
        ]
        assert found[i] == pytest.approx(
            [line[0], (line[0] + line[1]) / 2, line[1], (line[1] + line[2]) / 2, line[2]]
        )
    grown = filled({(1, 0): 1.0, (1, 1): 1.5, (1, 2): 2.0, (4, 0): 4.0}, (1, 4), (0, 1, 2))
    assert grown[1][0] == pytest.approx(4.0)
    assert grown[1][2] > grown[1][1] > grown[1][0], "beyond the last one as the fit has it"


def test_draft_without_proposals_costs_nothing():
    ticks, table = Ticks(), torch.randn(1, 50, 50, generator=torch.Generator().manual_seed(0))
    loop = loop_for(Timed(table, 1, ticks, lambda rows, width: 0.01), "lookup", rows=2)
    loop.clock.now = ticks
    surface = measure(loop, [[1, 2, 3]], rows=(2,), limit=9.0, now=ticks)
    assert surface.draft_seconds(2, 8) == pytest.approx(0.0, abs=1e-9)
    assert surface.acceptance is None


@pytest.fixture
def file(tmp_path):
    return tmp_path / "deep" / "down" / "profile.json"


def test_profiles_are_stored_and_loaded(file):
    notes, surface = [], surface_of(device("wide-310m"), acceptance=0.7)
    assert store.load_surface(file, notes.append) is None
    assert store.save_surface(file, surface, notes.append)
    assert store.load_surface(file, notes.append) == surface
    assert [path.name for path in file.parent.iterdir()] == ["profile.json"]
    assert notes == []


def test_profile_that_was_measured_during_a_job_is_kept(file):
    controller = Goodput(limit=4)
    for _ in range(20):
        width = controller.next(2) and 4
        controller.observe(RoundResult(width, (width, width), 0.01 * (1 + width), steady=True))
    store.keep_learnt(file, controller)
    assert not store.load_surface(file, print).measured
    measured = surface_of(device("wide-310m"), acceptance=0.7)
    store.save_surface(file, measured, print)
    store.keep_learnt(file, controller)
    assert store.load_surface(file, print) == measured


@pytest.mark.parametrize(("seconds", "used"), [(0.06, True), (2.9, False)])
def test_profile_that_was_learnt_beside_much_other_work_is_not_used(file, seconds, used):
    """With it drafts would never be tried again: a round with one takes 120 plain rounds."""
    grid = {"verify": [[0.024, seconds]], "draft": [[0.0, 0.0]]}
    learnt = store.make_surface((1,), (0, 1), **grid, measured=False)
    store.save_surface(file, learnt, pytest.fail)
    assert store.load_surface(file, pytest.fail) == (learnt if used else None)
    file.unlink()
    store.keep_learnt(file, SimpleNamespace(learned=lambda: learnt))
    assert file.exists() == used
    measured = replace(learnt, measured=True)
    store.save_surface(file, measured, pytest.fail)
    assert store.load_surface(file, pytest.fail) == measured


@pytest.mark.parametrize("text", ['{"format": 7}', "\x00\x01", "{}", ""])
def test_a_broken_profile_is_ignored_with_a_note(file, text):
    notes = []
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert store.load_surface(file, notes.append) is None
    assert str(file) in notes[0]


def test_unwritable_profile_folder_is_no_error(tmp_path):
    notes = []
    (tmp_path / "file").write_text("")
    assert not store.save_surface(
        tmp_path / "file" / "profile.json", surface_of(device("wide-310m")), notes.append
    )
    assert "could not be saved" in notes[0]


def test_every_device_pair_and_dtype_has_a_file_of_its_own():
    base = {"target": "a", "draft": "b", "device": torch.device("cpu"), "dtype": "fp32"}
    others = [
        {"target": "b", "draft": "a"},
        {"draft": "lookup"},
        {"dtype": "fp8"},
        {"kv_dtype": "fp8"},
    ]
    paths = {store.profile_path(**(base | change)) for change in [{}, *others]}
    assert len(paths) == 5
    assert store.profile_path(**base) in paths


@pytest.fixture
def place(here: Path, monkeypatch) -> Path:
    """A folder with a pair of tiny models; `measure` sees few rows."""
    for name, seed in (("target", 0), ("draft", 1)):
        write_checkpoint("llama", here / name, seed=seed, shards=False)
        write_tokenizer(here / name)
    (here / "pair.yaml").write_text("target: target\ndraft: draft\n")
    (here / "p.txt").write_text("the cat sat\na dog\n")
    monkeypatch.delenv("BASS_DRAFT_LENGTH", raising=False)
    return here


def bass(*arguments, **settings):
    return cli(*arguments, "--pair", "pair.yaml", "--device", "cpu", **settings)


def test_the_command_measures_and_table_then_works(place: Path):
    flags = shlex.split("generate p.txt --n 2 --max-new-tokens 20 --overwrite --token-ids")
    refused = bass(*flags, "--out", "a.jsonl", "--draft-length", "table", code=2)
    assert "bass profile and the same --pair (or --model) and --draft" in " ".join(
        refused.stderr.split()
    )
    assert not (place / "a.jsonl").exists()
    made = bass("profile", "--batch-sizes", "1,2", "--json", code=0)
    document = json.loads(made.stdout)
    assert document["surface"]["rows"] == [1, 2]
    assert Path(document["file"]).is_file()
    assert document["file"] in made.stderr
    found = []
    for length in ("table", "bass+table", "auto", "0"):
        bass(*flags, "--out", "a.jsonl", "--draft-length", length, code=0)
        lines = rows_in(place / "a.jsonl")
        found.append(sorted((line["id"], line["sample"], line["token_ids"]) for line in lines))
    by_model = shlex.split("--model target --draft draft --draft-length table --device cpu")
    cli(*flags, "--out", "a.jsonl", *by_model, code=0)
    assert found[0] == found[1] == found[2] == found[3], (
        "under shared coupling no controller reaches the output"
    )
    assert json.loads(Path(document["file"]).read_text())["measured"], (
        "a job leaves a measured profile as it is"
    )
    Path(document["file"]).write_text("{}")
    damaged = bass(*flags, "--draft-length", "table", code=2)
    assert "this profile is ignored: " in " ".join(damaged.stderr.split("error:")[1].split())


def test_lookup_has_a_profile_of_its_own(place: Path):
    """Lookup has other round costs than a model."""
    drafts = ("--draft", "lookup")
    made = bass("profile", "--batch-sizes", "1,2", *drafts, code=0)
    assert [line.split()[0] for line in made.stdout.splitlines()[-3:]] == ["rows", "1", "2"]
    *legend, header, _, _ = made.stdout.splitlines()
    assert header.split("  ")[0] == "rows"
    assert max(map(len, (*legend, header))) <= 80
    for word in ("rows", "plain", "4 drafts", "drafting", "kept"):
        assert word in header, header
        assert word in " ".join(legend), f"the legend says what {word} means"
    flags = (
        *shlex.split(
            "generate p.txt --n 2 --max-new-tokens 20 --overwrite --token-ids --out a.jsonl"
        ),
    )
    found = []
    for length in ("table", "auto", "0"):
        bass(*flags, *drafts, "--draft-length", length, code=0)
        lines = rows_in(place / "a.jsonl")
        found.append(sorted((line["id"], line["sample"], line["token_ids"]) for line in lines))
    assert found[0] == found[1] == found[2]
    assert "has no profile" in bass(*flags, "--draft-length", "table", code=2).stderr


def test_under_maximal_coupling_the_manifest_names_the_profile(place: Path):
    flags = (
        *shlex.split("generate p.txt --n 1 --max-new-tokens 8 --coupling maximal --out a.jsonl"),
    )
    bass(*flags, code=0)
    assert "profile" not in json.loads((place / "a.jsonl.manifest.json").read_text())["results"]
    document = json.loads(bass("profile", "--batch-sizes", "1", "--json").stdout)
    assert "profile" in bass(*flags, code=2).stderr
    bass(*flags, "--overwrite", code=0)
    assert (
        json.loads((place / "a.jsonl.manifest.json").read_text())["results"]["profile"]
        == document["digest"]
    )


def test_job_without_a_profile_stores_learnt_costs(place: Path):
    bass("generate", "p.txt", "--n", "4", "--max-new-tokens", "60", "--out", "a.jsonl", code=0)
    kept = list(store.profile_folder().iterdir())
    assert len(kept) == 1
    surface = store.load_surface(kept[0], pytest.fail)
    assert surface is not None
    assert not surface.measured
    assert Goodput(limit=8).needs_result(0), "costs are learnt from every round at first"
    assert not Goodput(limit=8, surface=surface).needs_result(0), "no opening: costs are known"
    assert "bass profile" in bass("generate", "p.txt", "--draft-length", "table", code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--batch-sizes", "1,x"), "--batch-sizes"),
        (("--draft", "none"), "has no draft"),
        (("--pair", "nowhere"), "there is no pair"),
    ],
)
def test_mistakes_are_found_before_anything_is_loaded(place: Path, arguments, reason):
    found = cli("profile", "--pair", "pair.yaml", "--device", "cpu", *arguments, code=2)
    assert reason in found.stderr
    assert "loading" not in found.stderr


def test_a_missing_model_is_refused_before_torch_is_imported(
    place: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("bass_cli.cli.profile.configure_threads", pytest.fail)
    found = bass("profile", "--draft", "./nowhere", code=2)
    assert '"./nowhere": there is no such file or folder' in found.stderr


def test_a_folder_that_is_not_writable_is_found_before_anything_is_loaded(
    place: Path, monkeypatch: pytest.MonkeyPatch
):
    (place / "file").write_text("")
    monkeypatch.setattr(store, "profile_folder", lambda: place / "file" / "profiles")
    found = bass("profile", "--batch-sizes", "1", code=3)
    assert "set XDG_CACHE_HOME to a writable folder" in " ".join(found.stderr.split())
    assert "loading" not in found.stderr
