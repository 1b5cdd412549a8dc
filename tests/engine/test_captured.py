"""The captured path of the loop without a GPU: whatever is captured, reused or run uncaptured,
the tokens equal those of plain decoding."""

import itertools

import pytest
from checkpoints import FAMILIES, write_checkpoint
from decoders import load_noisy_pair
from fakes import FakeGraphs, Ticks
from simulated import Simulated
from toys import AtOnce, Guess, begin, drive, loop_for, plain, rows_for

from bass_cli.engine import round as round_module
from bass_cli.engine.batch import Row
from bass_cli.engine.contracts import DraftLength
from bass_cli.engine.sampling import RowSampling
from bass_cli.lengths.controllers import Bass, Fixed
from bass_cli.lengths.goodput import Goodput

PROMPTS = ([7], [3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0, 4, 5, 2])


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Return (target, draft) of one family; the draft is the target with noise on its weights."""
    folder = tmp_path_factory.mktemp(FAMILIES[0])
    write_checkpoint(FAMILIES[0], folder)
    return load_noisy_pair(folder)


def rows(limit=30):
    """Return two samples of each prompt, greedy and sampled, with very unequal limits, so that
    they end at different times."""
    return rows_for(
        PROMPTS,
        seed=11,
        limit=lambda p, s: limit - 7 * s - 4 * p,
        temperature=lambda p, s: 0.8 * s,
        top_p=lambda p, s: 1 - 0.05 * s,
    )


@pytest.fixture(scope="module")
def plainly(pair):
    """The tokens of plain decoding for rows()."""
    return plain(pair[0], rows())


def captured(target, draft, *, batch, **words):
    """Return a loop with fake graphs, with their ticks as clock."""
    return loop_for(target, draft, rows=batch, graphs=FakeGraphs(), **words)


class Tour(DraftLength):
    """Many different lengths, with plain rounds between."""

    def __init__(self):
        self._lengths = itertools.cycle([0, 0, 0, 4, 4, 0, 0, 5, 3, 2, 0, 7, 7, 1, 0, 0, 0])

    def next(self, rows, inputs=None):
        return next(self._lengths)

    def observe(self, done):
        pass


def test_captures_do_not_change_tokens(pair, plainly):
    target, draft = pair
    counts = {"run": 0, "capture": 0, "replay": 0, "catch up": 0, "other": 0}
    for drafter in (draft, AtOnce(draft, 300), "lookup", "none"):
        for batch, lengths in ((5, Tour()), (2, Bass()), (6, Goodput(limit=6))):
            loop = captured(target, drafter, batch=batch, lengths=lengths)
            assert drive(loop, rows()) == plainly, f"{drafter}, batch {batch}"
            for how in ("run", "capture", "replay"):
                counts[how] += loop.graphs.count(how)
            counts["catch up"] += loop.graphs.count("replay", "catch up")
    assert counts["replay"] > 3 * counts["capture"] > 0
    assert counts["run"] > 0
    assert counts["catch up"] > 0


def test_a_seed_gives_the_same_run_twice(pair):
    """What is captured, and when, does not depend on measured times either."""
    done = []
    for slow in (1, 1000):
        loop = captured(*pair, batch=5, lengths=Tour())
        loop.graphs.ticks.__class__ = type(
            "Slow", (Ticks,), {"__call__": lambda self, slow=slow: self.seconds * slow}
        )
        drive(loop, rows())
        done.append(loop.graphs.done)
    assert done[0] == done[1]


@pytest.mark.parametrize(
    ("missing", "flat", "due"),
    [
        (1, 1024, [2]),
        (2, 1024, [2]),
        (5, 1024, [8]),
        (33, 1024, [128]),
        (70, 1024, [128]),
        (33, 0, [32, 2]),
        (70, 0, [32, 32]),
    ],
)
def test_catching_up_by_graphs_fills_the_draft_cache(pair, monkeypatch, missing, flat, due):
    """In passes of a few sizes, with one row that lacks nothing: the target then accepts all of
    its own drafts."""
    monkeypatch.setattr(round_module, "_FLAT", flat)
    target, _ = pair
    plan = iter([3] + [0] * missing + [3] + [0] * missing + [3, 3])
    lengths = Fixed(0)
    lengths.next = lambda *_: next(plan)
    loop = captured(target, target, batch=3, lengths=lengths, span=250)
    live = [
        Row("0", s, 1, [5, 6, 7, 8], 200, sampling=RowSampling(temperature=1.0)) for s in range(3)
    ]
    begin(loop, *live[:2])
    for number in range(2 * missing + 4):
        if number == missing + 1:
            loop.admit(live[2])
        done = loop.round()
        assert all(kept == done.width for kept in done.accepted)
    fed = [key.width for how, key in loop.graphs.done if key.kind == "catch up"]
    assert fed[: len(due)] == due
    assert loop.graphs.captures <= 5


def test_only_small_batches_catch_up_many_tokens_at_once():
    assert [round_module.catch_up_sizes(rows)[-1] for rows in (1, 8, 16, 256)] == [128, 128, 32, 32]


@pytest.mark.parametrize("missing", [5, 40, 140])
def test_time_of_catching_up_is_predicted(pair, missing):
    """From the last pass that was replayed. Before that a pass counts as a draft step, a fifth of a
    plain pass."""
    target, _ = pair
    plan = iter([3] + ([0] * 20 + [3]) * 3 + [0] * missing + [3])
    lengths, seen, plains = Fixed(0), [], []
    lengths.next = lambda rows, inputs: (
        seen.append(inputs.catch_up),
        plains.append(loop.clock.predict(0)),
        next(plan),
    )[2]
    loop = captured(target, target, batch=2, lengths=lengths, span=300)
    row = Row("0", 0, 1, [5, 6, 7, 8], 250, sampling=RowSampling(temperature=1.0))
    begin(loop, row)
    for _ in range(1 + 3 * 21 + missing + 1):
        loop.round()
    unknown = [index for index in range(43) if not seen[index]]
    assert unknown == [0, 1, 2, 22], "nothing is missing, or no plain round was timed"
    for index in (21, 42):  # the first pass ran uncaptured; it is for one row, and for 128 tokens
        guess = 0.2 * plains[index] * (1 + 128 / 300) / (1 + 1 / 300)
        assert seen[index] == pytest.approx(guess), index
    assert seen[44] > 0, "the second one was captured, and replayed"
    assert seen[65] == pytest.approx(seen[44], rel=0.01), "nothing is counted of the capturing"
    assert seen[-1] == pytest.approx(seen[65] * -(-missing // 128))


def test_new_row_lacks_nothing(pair):
    """However many plain rounds ran before it came."""
    target, _ = pair
    plan = iter([3] + ([0] * 20 + [3]) * 2 + [0] * 200)
    lengths, seen = Fixed(0), []
    lengths.next = lambda rows, inputs: (seen.append(inputs.catch_up), next(plan))[1]
    loop = captured(target, target, batch=2, lengths=lengths, span=300)
    for sample in range(2):
        row = Row("0", sample, 1, [5, 6, 7, 8], 250, sampling=RowSampling(temperature=1.0))
        if not sample:
            loop.open("0", row.tokens)
        loop.admit(row)
        for _ in range(1 + 2 * 21 + 140 if not sample else 10):
            loop.round()
        loop.retire(0)
    one = seen[44]
    assert one > 0
    assert seen[182] == pytest.approx(2 * one), "the first row has missed 140 tokens"
    assert max(seen[184:]) <= one * 1.01, "the second one only has a few of its own"


def test_uncaptured_catching_up_is_predicted_by_tokens(pair):
    target, draft = pair
    loop = loop_for(target, draft, rows=2, lengths=Fixed(0))
    seen = loop._drafter_catch_up
    begin(loop, *rows()[:2])
    for _ in range(12):
        loop.round()
    guess = 0.2 * loop.clock.predict(0) / (1 + 2 / 300)
    assert seen.seconds() == pytest.approx(guess * 12 * 2 / 16), "no pass was seen yet"
    seen._unit = 1.0
    assert seen.seconds() == pytest.approx(12 * 2 / 16)
    seen.run(1, left=9.0)
    assert seen.seconds() == 0.0
    loop.round()
    assert 0 < seen.seconds() == seen._unit


def test_padding_rows_and_capturing_do_not_change_live_rows(pair):
    loop = captured(*pair, batch=6, lengths=Fixed(3))
    live = [*rows()[:2], Row("long", 0, 1, [1, 2] * 25, 13)]  # almost as long as the context
    begin(loop, *live)
    loop.prepare([4, 6], [0, 3])
    before = [list(row.tokens) for row in live], loop.batch.lengths.tolist(), loop.graphs.captures
    assert before[1] == [len(row.tokens) for row in live] + [1, 1, 1]
    loop.prepare([3, 5], [0, 3])
    assert before[2] == 2 * (2 + 4), (
        "two rounds and four sizes to catch up with, for each number of rows"
    )
    assert loop.graphs.captures == before[2]
    loop.round()
    assert loop.batch.lengths.tolist()[:3] == [len(row.tokens) for row in live]
    assert loop.batch.lengths.tolist()[3:] == [1, 1, 1]


def test_run_needs_only_the_prepared_graphs(pair):
    loop = captured(*pair, batch=5, lengths=Tour())
    loop.prepare(range(1, 6), range(8))
    before = loop.graphs.captures
    drive(loop, rows())
    assert loop.graphs.captures == before > 0
    assert loop.graphs.count("run") == before


def test_clock_and_controller_learn_from_steady_rounds_only(pair):
    seen = []
    loop = captured(*pair, batch=5, lengths=Tour())
    drive(loop, rows(), on_round=lambda done, live_rows: seen.append(done))
    assert {done.steady for done in seen} == {True, False}
    for done in seen:
        assert done.seconds == pytest.approx(0.0021 + 0.00045 * done.width if done.steady else 0.05)
    for width in {done.width for done in seen if done.steady}:
        assert loop.clock.predict(width) == pytest.approx(0.0021 + 0.00045 * width)


def test_no_capture_before_a_deadline():
    """Plain rounds were wanted and rounds of 4 drafts served them for so long that a capture
    would pay, but only later."""
    loop = Simulated(Fixed(4), 0.0)
    loop.admit(Row("0", 0, 0, [1], 900))
    for _ in range(3):
        loop.round()
    loop.use(Fixed(0))
    for _ in range(150):
        assert loop.round(deadline=loop.clock.now() + 0.5).steady
    assert loop.graphs.captures == 1
    assert not loop.round().steady
    loop.round()
    assert loop.graphs.captures == 2


def test_moved_memory_is_captured_again(pair, plainly):
    target, draft = pair
    loop = captured(target, draft, batch=3, lengths=Fixed(3))
    drive(loop, rows())
    before = loop.graphs.captures
    loop.target.cache._grow(10_000)
    loop.drafter.runner.cache._grow(10_000)
    assert drive(loop, rows()) == plainly
    assert loop.graphs.captures > before


def test_uncaptured_loop_catches_up_in_one_pass(pair, plainly):
    target, draft = pair
    fed = []
    loop = loop_for(target, draft, rows=3, lengths=Tour())
    feed = loop.drafter.runner.feed
    loop.drafter.runner.feed = lambda tokens, *more: (
        fed.append(tokens.shape[1]),
        feed(tokens, *more),
    )
    assert drive(loop, rows()) == plainly
    assert 3 in fed or 4 in fed


def test_point_mass_drafter_needs_no_catching_up(pair, plainly):
    target, _ = pair
    loop = captured(target, Guess(target.vocab), batch=4, lengths=Tour())
    assert drive(loop, rows()) == plainly
    assert loop.graphs.count("replay", "catch up") == 0


class Always(DraftLength):
    """A controller with the two required methods only."""

    def next(self, rows, inputs=None):
        return 3

    def observe(self, done):
        assert len(done.accepted) == len(done.rows)


@pytest.mark.parametrize("coupling", ["shared", "maximal"])
def test_drafter_and_controller_need_only_their_abstract_methods(pair, coupling):
    """Every other method of Drafter and DraftLength has a default: captured and uncaptured rounds
    give the tokens of plain decoding (under maximal coupling if greedy), and drafts are made."""
    own = {name for name in vars(Guess) if not name.startswith("_")}
    assert own == {"propose"}

    def some():
        return [row for row in rows() if coupling == "shared" or row.sampling.temperature == 0]

    target, due = pair[0], plain(pair[0], some())
    for loop in (
        captured(target, Guess(target.vocab), batch=4, lengths=Always(), coupling=coupling),
        loop_for(target, Guess(target.vocab), rows=4, lengths=Always(), coupling=coupling),
    ):
        live = some()
        assert drive(loop, live) == due
        assert sum(row.drafted for row in live) > 0
