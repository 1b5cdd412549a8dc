"""Rounds that are launched before the last one's tokens are known: the tokens stay plain
decoding's, rows may come and go meanwhile, and a device does not wait for its host."""

import pytest
import torch
from fakes import FakeGraphs, Ticks
from simulated import Finder, Simulated
from test_captured import Tour, captured, pair, plainly, rows  # noqa: F401 (a fixture)
from toys import Guess, drive, plain

from bass_cli.drafts.factory import NoDrafter
from bass_cli.engine.batch import Row
from bass_cli.engine.contracts import PendingWork, RoundResult
from bass_cli.engine.loop import AheadPolicy
from bass_cli.lengths.controllers import Bass, Fixed
from bass_cli.lengths.costs import make_surface
from bass_cli.lengths.goodput import Goodput


class Settled(Tour):
    """Its lengths depend on nothing, so they may be asked for at any time."""

    foresees = True

    def needs_result(self, width):
        return False


class Flights:
    """Counts a loop's launches, and those behind a round that is not over."""

    def __init__(self, loop):
        self.all = self.behind = 0
        self._launch, loop._launch = loop._launch, self._counted

    def _counted(self, asked, deadline, *, behind=False):
        self.all, self.behind = self.all + 1, self.behind + behind
        return self._launch(asked, deadline, behind=behind)


def ready(loop):
    """Nothing is captured any more, and launching ahead is taken to pay."""
    loop.prepare(range(1, loop.batch.capacity + 1), range(8))
    loop._ahead_policy.pays = lambda waiting: True
    return Flights(loop)


@pytest.mark.parametrize(
    ("turn", "lengths"),
    [(0, lambda: Fixed(0)), (1, lambda: Fixed(3)), (2, Settled), (3, lambda: Goodput(limit=6))],
)
def test_tokens_are_plain_decodings(pair, plainly, turn, lengths):
    """Rows end one by one, and others take their places, while a round that knows nothing of it
    is under way. Of lengths, drafters and batches each two meet."""
    (target, draft), behind = pair, 0
    for at, drafter in enumerate((draft, "none", Guess(target.vocab))):
        loop = captured(target, drafter, batch=(2, 5)[(turn + at) % 2], lengths=lengths())
        flights = ready(loop)
        assert drive(loop, rows(), ahead=True) == plainly
        behind += flights.behind
    assert behind > 20


def test_a_draft_model_is_in_step(pair):
    """The target drafting for itself must have every draft accepted, also in rows that took
    another's place."""
    target, _ = pair
    loop = captured(target, target, batch=4, lengths=Settled())
    flights, done = ready(loop), []
    drive(loop, rows(), ahead=True, on_round=lambda one, hosts: done.append(one))
    assert flights.behind > 5
    assert {one.width - kept for one in done for kept in one.accepted} == {0}


def test_a_round_says_which_rows_it_was_of(pair):
    """Rows that came after it was launched are not among them, nor those that have ended."""
    target, _ = pair
    loop = captured(target, "none", batch=3, lengths=Fixed(0))
    ready(loop)
    live = rows()[:4]
    for row in live[:3]:
        if row.sample == 0:
            loop.open(row.key, row.tokens)
        loop.admit(row)
    assert loop.round(ahead=True).rows == tuple(live[:3])
    loop.swap_rows([0], [live[3]])  # takes the place of the one that the flight still has there
    assert loop.batch.hosts == [live[3], live[1], live[2]]
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
def test_only_where_nothing_is_waited_for(pair, coupling, lengths, drafter, given):
    """Not where a length decided earlier would be another sample, or a worse one; nor where the
    next round would not be over before a deadline."""
    target, draft = pair
    loop = captured(target, drafter or draft, batch=6, lengths=lengths(), coupling=coupling)
    flights = ready(loop)
    loop.open("0", [7])
    loop.admit(Row("0", 0, 1, [7], 30))
    for _ in range(5):
        loop.round(**{"ahead": True, **given})
    assert flights.all == 5
    assert flights.behind == 0


class Host(Fixed):
    """A host that takes 1 ms for every round that it has looked at."""

    def __init__(self, ticks):
        super().__init__(0)
        self._ticks = ticks

    def observe(self, done):
        self._ticks.seconds += 0.001


@pytest.mark.parametrize("ahead", [False, True])
def test_the_device_does_not_wait_for_the_host(ahead):
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
        "what the host does between rounds is not a round's time"
    )


def test_it_pays_unless_rows_end_all_the_time():
    worth = AheadPolicy()
    assert not worth.pays(waiting=False), "nobody knows what the host takes"
    worth.begins(3.0)
    for seconds in (0.0005, 0.03, 0.0005):  # an admission between two rounds is no usual gap
        worth.completed(5.0, 0.005, rows=8)
        worth.begins(5.0 + seconds)
    for _ in range(200):
        worth.completed(6.0, 0.005, rows=8)
    assert worth.pays(waiting=True)
    for _ in range(200):
        worth.rows_ended(1)
        worth.completed(7.0, 0.005, rows=4)
    assert not worth.pays(waiting=True), (
        "a quarter of the rows run a round of 5 ms for nothing, to win half a millisecond"
    )
    assert worth.pays(waiting=False)


def test_controllers_need_every_round_unless_they_say_so():
    assert not Bass().foresees
    assert Goodput(limit=4).needs_result(0), "the opening rounds tell what rounds cost"
    assert not Fixed(3).needs_result(3)


def test_goodput_waits_for_what_tells_much():
    """Few trials, or a probe: until the round is over the next length is not asked for."""
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


@pytest.mark.parametrize("host", [0.0, 0.0001, 0.0005])
def test_a_job_is_no_slower_for_it(host):
    """Eight rows, 128 samples of 128 tokens: where the host takes next to nothing, nothing is
    lost by rows that end."""

    def seconds(ahead):
        loop = Simulated(Goodput(limit=8), 0.8, rows=8)
        waiting = [Row(str(n), 0, 0, [1] * 20, 128) for n in range(128)]
        while waiting or len(loop.batch):
            while waiting and len(loop.batch) < 8:
                loop.admit(waiting.pop(0))
            loop.round(pending_work=PendingWork(len(waiting) * 128), ahead=ahead)
            loop.clock.now.seconds += host
            for index in reversed(range(len(loop.batch))):
                if loop.batch.hosts[index].room <= 0:
                    loop.retire(index)
        return loop.clock.now()

    assert seconds(True) <= (1.005 if host < 0.0005 else 0.97) * seconds(False)


def test_plain_decoding_by_auto_waits_for_nothing():
    """With no drafter there is nothing to learn: after its opening `auto` is asked ahead,
    whatever it would draft."""
    loop = Simulated(Goodput(limit=8), 0.0, rows=4, drafter=NoDrafter())
    flights = ready(loop)
    loop.admit(*(Row("0", s, 0, [1], 200) for s in range(4)))
    for _ in range(100):
        loop.round(ahead=True)
    assert flights.behind > 90


@pytest.mark.parametrize("found", [0.0, 0.3])
def test_looking_for_drafts_in_vain_costs_next_to_nothing(found):
    """A host that finds none, or none that stand: between two looks rounds are launched ahead, as
    plain decoding's are. The host takes half a millisecond a round, and as much for a look. Drafts
    may lose 1.2 % and three rounds of these 490; the rest is what waits for the host around them."""

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


def test_a_look_takes_what_the_device_waits_for_it():
    """The host takes half a millisecond between two rounds, which launching ahead hides, and a
    look 0.1 ms. Only the round that is looked for waits; the one after it is launched ahead."""
    ticks, told = Ticks(), []
    finder = Finder(0.0, lookup_seconds=0.0001, ticks=ticks)
    loop = Simulated(Goodput(limit=8), 0.0, rows=8, drafter=finder, graphs=FakeGraphs(ticks))
    flights = Flights(loop)
    loop.admit(*(Row("0", s, 0, [1], 500) for s in range(8)))
    for number in range(490):
        if number == 50:  # by then it is known what looks bring
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
def test_a_host_drafts_only_from_what_is_known(pair, plainly, lengths):
    loop = captured(pair[0], "lookup", batch=5, lengths=lengths())
    flights, looked = ready(loop), []
    propose = loop.drafter.propose

    def counted(batch, length):
        looked.append(loop._in_flight)
        return propose(batch, length)

    loop.drafter.propose = counted
    assert drive(loop, rows(), ahead=True) == plainly
    assert not any(looked), "no round is under way when drafts are looked for"
    if isinstance(loop.lengths, Fixed):
        assert (flights.behind > 5) == (not loop.lengths.drafts)


def test_a_cpu_launches_nothing_ahead(pair, plainly):
    from toys import loop_for

    target, draft = pair
    loop = loop_for(target, draft, rows=3, lengths=Fixed(2))
    loop._ahead_policy.pays = lambda waiting: True
    assert drive(loop, rows(), ahead=True) == plainly
    assert loop._in_flight is None
    assert torch.equal(loop.batch.lengths, torch.ones_like(loop.batch.lengths))


@pytest.mark.parametrize("ahead", [False, True])
def test_rows_that_end_move_and_begin_at_once_under_a_round(pair, ahead):
    """All of a batch's rows but the last ones end in one round, some are refilled, and a row that
    has just moved ends in the next: the tokens of all stay plain decoding's."""
    target, draft = pair
    limits = (3, 9, 3, 4, 30, 12, 5, 5, 14, 6, 20, 4)

    def fresh():
        return [
            Row(str(i % 3), i, 2, [5, 6 + i % 3, 7][: 1 + i % 3], limit, temperature=0.7)
            for i, limit in enumerate(limits)
        ]

    due = plain(target, fresh())
    for drafter in (draft, "none"):
        loop = captured(target, drafter, batch=6, lengths=Settled())
        flights = ready(loop)
        assert drive(loop, fresh(), ahead=ahead) == due
        assert not ahead or flights.behind > 3


def test_what_a_controller_waits_for_is_told():
    """The host takes half a millisecond between two rounds. Where the controller must know the
    last round's tokens the device waits for it, which is told beside the round's own seconds; a
    round behind another one waited for nothing."""

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


def test_what_is_waited_for_is_part_of_what_may_be_lost():
    """Drafts hardly stand, and the host takes a millisecond between two rounds, half of one. Each
    probe is waited for: with that left out of the account such jobs lost 3.4 %."""

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
