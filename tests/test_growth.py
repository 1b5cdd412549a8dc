"""Rows whose cache grows with them: jobs on stores far too small for all of them, whose samples are
those of a store that is large enough."""

import dataclasses
import functools

import pytest
from chains import write_chain
from checkpoints import write_mask
from fakes import FakeGraphs
from heads import write_head
from test_parallel import bass, lines

from bass_cli.config.job import Job, Speculation, load_pair
from bass_cli.config.sampling import Sampling
from bass_cli.engine.loop import AheadPolicy, Loop
from bass_cli.errors import MachineError
from bass_cli.run.build import build
from bass_cli.run.generate import generate
from bass_cli.run.plan import make_plan
from bass_kernels import SPARE_KEYS

TOKENS, MASK = 64, 300
PROMPTS = [f"the cat number {i} sat" for i in range(3)]


@pytest.fixture(autouse=True)
def place(pair_folder, monkeypatch):
    monkeypatch.setattr("bass_cli.run.plan._PIECE", 14)
    folder = pair_folder(prompts=3, max_position_embeddings=256, num_hidden_layers=3)
    write_mask(folder / "draft", MASK)
    write_head(folder / "head", "dspark")
    write_chain(folder / "chain", "authors")
    return folder


def plan_of(
    *,
    draft="draft",
    rows=6,
    cached_tokens=None,
    length=4,
    n=4,
    prompts=PROMPTS,
    coupling="shared",
    **sampling,
):
    """A plan with place for so many tokens of a row; None: for all."""
    job = Job(
        pair=load_pair("pair.yaml").model_copy(update={"draft": draft}),
        sampling=Sampling(max_new_tokens=TOKENS, temperature=3.0, seed=30, **sampling),
        device="cpu",
        speculation=Speculation(length=length, coupling=coupling),
        n=n,
        batch_size=rows,
        token_ids=True,
    )
    plan = make_plan(job, prompts=len(prompts))
    return plan if cached_tokens is None else dataclasses.replace(plan, cached_tokens=cached_tokens)


class Seen:
    """What became of the rows: how many grew and were put back, how many of these while a round
    was under way that had them (`flown`), and how many there were in every round."""

    def __init__(self, monkeypatch):
        self.back, self.grown, self.flown = 0, 0, 0
        self.rows = []
        grow, follow = Loop.grow, Loop._follow

        def watched_grow(loop):
            flight = loop._in_flight
            back = grow(loop)
            self.back += len(back)
            self.flown += sum(row in flight.rows for row in back) if flight else 0
            self.rows.append(len(loop.batch))
            return back

        def watched_follow(loop, change):
            self.grown += len(change.copied)
            follow(loop, change)
            allocator = loop.batch.allocator
            if allocator.blocks.most > 1:
                live = len(loop.batch)
                taken = [set(range(at, at + size)) for at, size in allocator.runs.T.tolist()]
                assert sum(map(len, taken)) == len(set().union(*taken))
                assert (allocator.runs[1, :live] > 0).all()
                assert (allocator.runs[1, live:] == 0).all()

        monkeypatch.setattr(Loop, "grow", watched_grow)
        monkeypatch.setattr(Loop, "_follow", watched_follow)


@pytest.fixture(scope="module")
def due():
    """A function that gives what plain decoding with place for all draws, whose samples are those
    of every draft: drawn once."""
    return functools.cache(lambda: drawn(plan_of(draft="none", length=0)))


def drawn(plan, prompts=PROMPTS, **given):
    found = list(generate(prompts, plan, **given))
    assert len({(one.id, one.sample) for one in found}) == len(found)
    return {(one.id, one.sample): (one.token_ids, one.finish_reason) for one in found}


@pytest.mark.parametrize(
    ("draft", "length", "cached_tokens"),
    [
        ("none", "auto", 20),
        pytest.param("draft", 4, 24, marks=pytest.mark.slow),
        ("draft", 2, 1),
        ("parallel:draft", 4, 20),
        ("lookup", 4, 24),
        ("skip:1", 3, 20),
        ("heads:head", 4, 20),
        pytest.param("heads:chain", 4, 20, marks=pytest.mark.slow),
    ],
)
def test_samples_do_not_depend_on_what_their_rows_have_of_the_cache(
    draft, length, cached_tokens, due, monkeypatch
):
    """Rows grow, are put back, come and go, by every kind of draft. With place for one token each
    there is a single row in the end, which always reaches its limit."""
    assert len({len(ids) for ids, _ in due().values()}) > 4, "samples of many lengths"
    seen, plan = Seen(monkeypatch), plan_of(draft=draft, length=length, cached_tokens=cached_tokens)
    assert plan.blocks.most >= 4
    assert drawn(plan) == due()
    assert seen.grown > 10
    assert seen.back > 0
    assert min(seen.rows) < 6


@pytest.fixture
def ahead(monkeypatch):
    """Every round that may is launched before the last one is over."""
    monkeypatch.setattr("bass_cli.run.build.Graphs", lambda device, **given: FakeGraphs())
    monkeypatch.setattr(AheadPolicy, "pays", lambda worth, waiting: True)


@pytest.mark.parametrize(("draft", "length"), [("none", 0), ("heads:head", 4)])
def test_rows_are_put_back_that_a_round_under_way_has(draft, length, ahead, due, monkeypatch):
    """What it brings is not the new row's, which may be at the same place."""
    whole, seen = due(), Seen(monkeypatch)
    assert drawn(plan_of(draft=draft, length=length, cached_tokens=20)) == whole
    assert seen.grown > 10
    assert seen.flown > 0


@pytest.mark.parametrize(
    ("draft", "length"), [pytest.param("none", 0, marks=pytest.mark.slow), ("draft", 2)]
)
def test_rows_that_are_put_back_follow_their_grammar_from_the_start(
    draft, length, ahead, monkeypatch
):
    """Whole jobs with captured rounds that are launched ahead; ended rows leave meanwhile."""
    regex = r"[a-z ,]{20,60}\.?"
    whole = drawn(plan_of(draft="none", length=0, regex=regex, top_p=1.0))
    assert len({len(ids) for ids, _ in whole.values()}) > 4
    seen = Seen(monkeypatch)
    assert (
        drawn(plan_of(draft=draft, length=length, cached_tokens=20, regex=regex, top_p=1.0))
        == whole
    )
    assert seen.back > 0
    assert seen.flown > 0


class Killed(BaseException):
    """The process is no more."""


def test_a_killed_job_goes_on_with_rows_that_grow(place, ahead, monkeypatch):
    """It left what lay in its files at that moment, the last line torn, and some of its rows had
    grown and been put back, as happens again when it goes on."""
    flags = ("--pair", "pair.yaml", "--n", "6", "--max-new-tokens", str(TOKENS),
             "--temperature", "3", "--draft-length", "4", "--batch-size", "auto")  # fmt: skip
    bass(*flags, "--out", "whole.jsonl", code=0)
    found = plan_of(n=6).footprint
    free = int(found.bytes(5, TOKENS, prompts=1) / 0.95) + 1000
    for module in ("plan", "memory"):
        monkeypatch.setattr(f"bass_cli.run.{module}.free_memory", lambda device: free)
    seen, left, run, files = Seen(monkeypatch), 40, Loop.round, {}

    def killed(loop, *given, **words):
        nonlocal left
        left -= 1
        if not left:
            files.update({one: one.read_bytes() for one in place.glob("parts.jsonl*")})
            raise Killed
        return run(loop, *given, **words)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "round", killed)
        with pytest.raises(Killed):
            bass(*flags, "--out", "parts.jsonl")
    before = seen.grown, seen.back
    for one, content in files.items():
        one.write_bytes(content[:-20] if one.suffix == ".jsonl" else content)
    assert files[place / "parts.jsonl"].count(b"\n") > 1
    assert "torn" in bass(*flags, "--out", "parts.jsonl", code=0).stderr
    assert lines(place / "parts.jsonl") == lines(place / "whole.jsonl")
    assert all(before)
    assert all((seen.grown > before[0], seen.back > before[1]))


def test_a_plan_counts_rows_by_what_they_are_expected_to_take(monkeypatch):
    """More than fit at their longest, within the memory that there is, which is what is built; not
    where samples depend on the rows, nor where all fit."""
    whole = plan_of(rows=40, n=20)
    assert (whole.cached_tokens, whole.cache_note, whole.blocks.most) == (TOKENS, "", 1)
    found = whole.footprint
    free = int(found.bytes(6, TOKENS, prompts=6 / 20) / 0.95) + 1000
    for module in ("plan", "memory"):
        monkeypatch.setattr(f"bass_cli.run.{module}.free_memory", lambda device: free)
    plan = plan_of(rows="auto", n=20)
    assert 6 < plan.rows < 40
    assert TOKENS / 4 <= plan.cached_tokens < TOKENS
    assert sum(plan.memory_parts.values()) <= plan.free
    assert plan.cache_note in plan.notes
    loop = build(plan)
    caches = [loop.target.cache, loop.drafter.runner.cache]
    own = sum(  # the slots behind all rows are planned with the prompts
        layer[:, :-SPARE_KEYS].numel() * layer.element_size()
        for cache in caches
        for layer in (*cache.own_keys, *cache.own_values)
    )
    assert 0.8 * plan.memory_parts["cache"] < own <= plan.memory_parts["cache"]
    assert plan_of(rows=6, n=20).cached_tokens == TOKENS
    assert plan_of(rows=plan.rows, n=20).blocks == plan.blocks
    with pytest.raises(MachineError, match=r"`batch_size` \d+"):
        plan_of(rows=1000, n=20)
    with pytest.raises(MachineError):
        plan_of(rows=plan.rows, n=20, coupling="maximal")
