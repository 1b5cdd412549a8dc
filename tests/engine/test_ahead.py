"""Rounds launched before the last result is known: the tokens equal those of plain decoding,
rows may come and go meanwhile, and the device does not wait for the host."""

import pytest
import torch
from fakes import FakeGraphs, Ticks
from simulated import Finder, Simulated
from test_captured import Tour, captured, pair, plainly, rows  # noqa: F401 (a fixture)
from thinned import thinned
from toys import Guess, begin, drive, plain

from bass_cli.drafts.factory import NoDrafter
from bass_cli.engine.batch import Row
from bass_cli.engine.contracts import PendingWork, RoundResult
from bass_cli.engine.loop import AheadPolicy
from bass_cli.engine.sampling import RowSampling
from bass_cli.lengths.controllers import Bass, Fixed
from bass_cli.lengths.goodput import Goodput
from bass_cli.lengths.surface import make_surface


class Settled(Tour):
    """Lengths that depend on nothing, so they can be chosen at any time."""

    def needs_result(self, width):
        return False


class Flights:
    """Count a loop's launches, and those made while another round is in flight."""

    def __init__(self, loop):
        self.all = self.behind = 0
        self._launch, loop._launch = loop._launch, self._counted

    def _counted(self, asked, deadline, *, behind=False):
        self.all, self.behind = self.all + 1, self.behind + behind
        return self._launch(asked, deadline, behind=behind)


def ready(loop):
    """Allow no further capture, and let launching ahead always pay."""
    loop.prepare(range(1, loop.batch.capacity + 1), range(8))
    loop._ahead_policy.pays = lambda waiting: True
    return Flights(loop)


@pytest.mark.parametrize(
    ("turn", "lengths"),
    [(0, lambda: Fixed(0)), (1, lambda: Fixed(3)), (2, Settled), (3, lambda: Goodput(limit=6))],
)
def test_rounds_launched_ahead_give_the_tokens_of_plain_decoding(pair, plainly, turn, lengths):
    """Rows end one by one and others take their places while a round is in flight. Every two of
    lengths, drafters and batches meet once."""
    (target, draft), behind = pair, 0
    for at, drafter in enumerate((draft, "none", Guess(target.vocab))):
        loop = captured(target, drafter, batch=(2, 5)[(turn + at) % 2], lengths=lengths())
        flights = ready(loop)
        assert drive(loop, rows(), ahead=True) == plainly
        behind += flights.behind
    assert behind > 20


def test_draft_model_stays_in_step_when_rounds_are_launched_ahead(pair):
    """The target drafts for itself, so every draft must be accepted, also in rows that moved."""
    target, _ = pair
    loop = captured(target, target, batch=4, lengths=Settled())
    flights, done = ready(loop), []
    drive(loop, rows(), ahead=True, on_round=lambda one, live_rows: done.append(one))
    assert flights.behind > 5
    assert {one.width - kept for one in done for kept in one.accepted} == {0}


def test_result_names_the_rows_of_its_own_round(pair):
    """Rows that came after the launch are not among them, nor those that have ended."""
    target, _ = pair
    loop = captured(target, "none", batch=3, lengths=Fixed(0))
    ready(loop)
    live = rows()[:4]
    begin(loop, *live[:3])
    assert loop.round(ahead=True).rows == tuple(live[:3])
    loop.swap_rows([0], [live[3]])  # takes a place where the round in flight still has the old row
    assert loop.batch.live_rows == [live[3], live[1], live[2]]
    counts = [row.generated for row in live]
    done = loop.round(ahead=True)
    assert done.rows == (live[1], live[2])
    assert [row.generated for row in live] == [counts[0], counts[1] + 1, counts[2] + 1, 0]
    assert set(loop.round(ahead=True).rows) == set(live[1:])


@pytest.mark.parametrize(
    ("coupling", "lengths", "drafter", "given"),
    [
        ("maximal", lambda: Fixed(2), None, {}),
        ("shared", Bass, None, {}),
        ("shared", lambda: Fixed(2), "lookup", {}),
        ("shared", lambda: Fixed(2), None, {"deadline": 0.002}),
        ("shared", lambda: Fixed(2), None, {"ahead": False}),
    ],
)
def test_no_launch_ahead_if_the_next_length_depends_on_the_result(
    pair, coupling, lengths, drafter, given
):
    """Nor if a length chosen earlier would give another sample, or the next round would end
    after the deadline."""
    target, draft = pair
    loop = captured(target, drafter or draft, batch=6, lengths=lengths(), coupling=coupling)
    flights = ready(loop)
    begin(loop, Row("0", 0, 1, [7], 30))
    for _ in range(5):
        loop.round(**{"ahead": True, **given})
    assert flights.all == 5
    assert flights.behind == 0


class Host(Fixed):
    """A host that works 1 ms for every round that it has received."""

    def __init__(self, ticks):
        super().__init__(0)
        self._ticks = ticks

    def observe(self, done):
        self._ticks.seconds += 0.001


@pytest.mark.parametrize("ahead", [False, True])
def test_device_does_not_wait_for_the_host(ahead):
    ticks = Ticks()
    loop = Simulated(Host(ticks), 0.0, rows=4, drafter=NoDrafter(), graphs=FakeGraphs(ticks))
    loop.admit(*(Row("0", s, 0, [1], 400) for s in range(4)))
    for _ in range(5):
        loop.round(ahead=ahead)
    began = ticks.seconds
    for _ in range(200):
        done = loop.round(ahead=ahead)
    assert (ticks.seconds - began) / 200 == pytest.approx(0.0021 if ahead else 0.0031)
    assert done.seconds == pytest.approx(0.0021), (
        "the host's work between rounds is not part of a round's time"
    )


def test_launching_ahead_pays_unless_rows_end_often():
    policy = AheadPolicy()
    assert not policy.pays(waiting=False), "the host's time is not known yet"
    policy.begins(3.0)
    for seconds in (0.0005, 0.03, 0.0005):  # an admission between two rounds is no usual gap
        policy.completed(5.0, 0.005, rows=8)
        policy.begins(5.0 + seconds)
    for _ in range(200):
        policy.completed(6.0, 0.005, rows=8)
    assert policy.pays(waiting=True)
    for _ in range(200):
        policy.rows_ended(1)
        policy.completed(7.0, 0.005, rows=4)
    assert not policy.pays(waiting=True), (
        "a quarter of the rows run a round of 5 ms for nothing, to win half a millisecond"
    )
    assert policy.pays(waiting=False)


def test_controllers_need_every_result_by_default():
    assert Bass().needs_result(3)
    assert Goodput(limit=4).needs_result(0), "the first rounds show what rounds cost"
    assert not Fixed(3).needs_result(3)


def test_goodput_waits_for_a_result_that_carries_information():
    """With few trials, or after a probe, the next length is chosen only after the round."""
    cheap = make_surface((4,), (0, 4), verify=[[1.0, 1.1]], draft=[[0.0, 0.1]])
    controller = Goodput(limit=4, surface=cheap)
    width = controller.next(4)
    assert width > 0
    assert controller.needs_result(width)
    assert not controller.needs_result(0), "nothing is drafted, so nothing is learnt of drafts"
    for _ in range(20):
        controller.observe(RoundResult(width, (width,) * 4, cheap.seconds(4, width)))
        width = controller.next(4)
    assert not controller.needs_result(width)
    for _ in range(20):
        controller.observe(RoundResult(width, (0,) * 4, cheap.seconds(4, width)))
        width = controller.next(4)
    assert width == 0
    while width == 0:
        controller.observe(RoundResult(0, (0,) * 4, cheap.seconds(4, 0)))
        width = controller.next(4)
    assert controller.needs_result(width), "a probe"


@pytest.mark.parametrize("host", thinned([0.0, 0.0001, 0.0005], [0.0]))
def test_launching_ahead_does_not_slow_a_job_down(host):
    """Eight rows, 128 samples of 128 tokens, four times: which drafts are accepted by chance differs
    between the two. The host takes almost no time, and rows that end cost nothing."""

    def seconds(ahead, seed):
        loop = Simulated(Goodput(limit=8), 0.8, rows=8, seed=seed)
        waiting = [Row(str(n), 0, 0, [1] * 20, 128) for n in range(128)]
        while waiting or len(loop.batch):
            while waiting and len(loop.batch) < 8:
                loop.admit(waiting.pop(0))
            loop.round(pending_work=PendingWork(len(waiting) * 128), ahead=ahead)
            loop.clock.now.seconds += host
            for index in reversed(range(len(loop.batch))):
                if loop.batch.live_rows[index].room <= 0:
                    loop.retire(index)
        return loop.clock.now()

    ahead, alone = (sum(seconds(way, seed) for seed in range(4)) for way in (True, False))
    assert ahead <= (1.005 if host < 0.0005 else 0.97) * alone


def test_result_names_the_rows_and_the_length_its_own_round_was_chosen_for():
    """Rows end while a round is in flight: the next one is chosen for fewer rows before it ends."""
    chosen, served = [], []

    class Noted(Fixed):
        def next(self, rows, inputs):
            chosen.append((inputs.padded, super().next(rows, inputs)))
            return chosen[-1][1]

        def observe(self, done):
            served.append((done.padded, done.wanted))

    loop = Simulated(Noted(3), 0.5, rows=8)
    flights = ready(loop)
    loop.admit(*(Row("0", s, 0, [1], 20 + 8 * s) for s in range(8)))
    while len(loop.batch):
        loop.round(ahead=True)
        ended = [i for i, row in enumerate(loop.batch.live_rows) if row.room <= 0]
        if ended:
            loop.retire(*ended)
    assert flights.behind > 10
    assert served == chosen[: len(served)]
    assert len({padded for padded, _ in served}) > 2


def test_auto_without_a_drafter_always_launches_ahead():
    """Without a drafter there is nothing to learn: after its first rounds `auto` never waits for
    a result."""
    loop = Simulated(Goodput(limit=8), 0.0, rows=4, drafter=NoDrafter())
    flights = ready(loop)
    loop.admit(*(Row("0", s, 0, [1], 200) for s in range(4)))
    for _ in range(100):
        loop.round(ahead=True)
    assert flights.behind > 90


@pytest.mark.parametrize("found", [0.0, 0.3])
def test_lookups_without_result_cost_almost_nothing(found):
    """Lookups find nothing, or nothing that is accepted. Between two of them rounds are launched
    ahead, as in plain decoding. The host takes 0.5 ms a round, and 0.5 ms for a lookup. Drafts
    may lose 1.2 % and three of these 490 rounds; the rest is waiting for the host."""

    def seconds(lengths, ticks, drafter):
        loop = Simulated(lengths, 0.0, rows=8, drafter=drafter, graphs=FakeGraphs(ticks))
        ready(loop)
        began = ticks.seconds
        loop.admit(*(Row("0", s, 0, [1], 500) for s in range(8)))
        for _ in range(490):
            loop.round(ahead=True)
            ticks.seconds += 0.0005
        return ticks.seconds - began

    ticks = Ticks()
    finder = Finder(found, lookup_seconds=0.0005, ticks=ticks)
    looking = seconds(Goodput(limit=8), ticks, finder)
    assert finder.looks > 5
    assert looking <= 1.03 * seconds(Fixed(0), Ticks(), NoDrafter())


def test_only_the_round_of_a_lookup_waits_for_it():
    """The host takes 0.5 ms between two rounds, which launching ahead hides, and 0.1 ms for a
    lookup. The round after it is launched ahead."""
    ticks, told = Ticks(), []
    finder = Finder(0.0, lookup_seconds=0.0001, ticks=ticks)
    loop = Simulated(Goodput(limit=8), 0.0, rows=8, drafter=finder, graphs=FakeGraphs(ticks))
    flights = Flights(loop)
    loop.admit(*(Row("0", s, 0, [1], 500) for s in range(8)))
    for number in range(490):
        if number == 50:  # the gain of lookups is known by then
            looks, began, flown = finder.looks, ticks.seconds, flights.behind
        told.append(loop.round(ahead=True))
        ticks.seconds += 0.0005
    looks = finder.looks - looks
    assert looks > 3
    assert {round(done.lookup_seconds, 9) for done in told[50:]} == {0.0, 0.0006}
    assert flights.behind - flown == pytest.approx(440 - looks, abs=1)
    plain = 440 * 0.0021
    assert ticks.seconds - began == pytest.approx(plain + looks * 0.0006, rel=0.002)


@pytest.mark.parametrize("lengths", [lambda: Fixed(0), lambda: Fixed(3), lambda: Goodput(limit=6)])
def test_host_drafts_only_from_known_tokens(pair, plainly, lengths):
    loop = captured(pair[0], "lookup", batch=5, lengths=lengths())
    flights, looked = ready(loop), []
    propose = loop.drafter.propose

    def counted(batch, length):
        looked.append(loop._in_flight)
        return propose(batch, length)

    loop.drafter.propose = counted
    assert drive(loop, rows(), ahead=True) == plainly
    assert not any(looked), "no round is in flight during a lookup"
    if isinstance(loop.controller, Fixed):
        assert (flights.behind > 5) == (not loop.controller.drafts)


def test_no_launch_ahead_on_a_cpu(pair, plainly):
    from toys import loop_for

    target, draft = pair
    loop = loop_for(target, draft, rows=3, lengths=Fixed(2))
    loop._ahead_policy.pays = lambda waiting: True
    assert drive(loop, rows(), ahead=True) == plainly
    assert loop._in_flight is None
    assert torch.equal(loop.batch.lengths, torch.ones_like(loop.batch.lengths))


@pytest.mark.parametrize("ahead", [False, True])
def test_rows_end_move_and_begin_while_a_round_is_in_flight(pair, ahead):
    """All rows but the last ones end in one round, some are replaced, and a row that has just
    moved ends in the next. All tokens equal those of plain decoding."""
    target, draft = pair
    limits = (3, 9, 3, 4, 30, 12, 5, 5, 14, 6, 20, 4)

    def fresh():
        return [
            Row(
                str(i % 3),
                i,
                2,
                [5, 6 + i % 3, 7][: 1 + i % 3],
                limit,
                sampling=RowSampling(temperature=0.7),
            )
            for i, limit in enumerate(limits)
        ]

    due = plain(target, fresh())
    for drafter in (draft, "none"):
        loop = captured(target, drafter, batch=6, lengths=Settled())
        flights = ready(loop)
        assert drive(loop, fresh(), ahead=ahead) == due
        assert not ahead or flights.behind > 3


def test_waiting_for_a_result_is_reported_to_the_controller():
    """The host takes 0.5 ms between two rounds. If the controller needs the last result, the
    device waits for it. That time is reported beside the round's own seconds. A round launched
    behind another waits for nothing."""

    class Curious(Settled):
        def needs_result(self, width):
            return width > 0

    ticks = Ticks()
    loop = Simulated(Curious(), 0.5, rows=4, graphs=FakeGraphs(ticks))
    flights = ready(loop)
    loop._ahead_policy.saves = lambda waiting: 0.0005
    loop.admit(*(Row("0", s, 0, [1], 900) for s in range(4)))
    told = []
    for _ in range(60):
        told.append(loop.round(ahead=True))
        ticks.seconds += 0.0005
    held = [before.width > 0 for before in told]
    assert [done.waiting for done in told[1:]] == [0.0005 * after for after in held[:-1]]
    assert sum(held) > 10
    assert flights.behind > 10
    assert told[1].seconds == pytest.approx(0.0021)


def test_waiting_counts_in_the_budget_of_drafting():
    """Few drafts are accepted, and the host takes 1 ms between two rounds, half of a round. Each
    probe causes waiting. When that was not counted, such jobs lost 3.4 %."""

    def seconds(lengths, drafter=None, seed=0):
        ticks = Ticks()
        loop = Simulated(lengths, 0.15, rows=8, drafter=drafter, graphs=FakeGraphs(ticks))
        loop._chance.seed(seed)
        loop.prepare([8], range(9))
        loop.admit(*(Row("0", s, 0, [1], 256) for s in range(8)))
        began, tokens = ticks.seconds, 0
        while tokens < 8 * 240:
            tokens += sum(loop.round(ahead=True).accepted) + 8
            ticks.seconds += 0.001
        return ticks.seconds - began

    plainly = seconds(Fixed(0), NoDrafter())
    found = [seconds(Goodput(limit=8), seed=seed) / plainly for seed in range(8)]
    assert sum(found) / len(found) <= 1.026
