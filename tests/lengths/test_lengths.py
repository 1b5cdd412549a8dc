"""Draft-length controllers and the clock: golden traces, and how far one row may affect the
others."""

import random

import pytest
import torch
from devices import device, surface_of

from bass_cli.config.speculation import CONTROLLERS
from bass_cli.drafts.factory import NoDrafter
from bass_cli.engine.batch import Batch
from bass_cli.engine.clock import Clock
from bass_cli.engine.contracts import ControllerInput, Proposal, RoundResult
from bass_cli.engine.round import HostDrafts
from bass_cli.io.usage import Gain
from bass_cli.lengths.controllers import Bass, Fixed, LengthParts, make_lengths
from bass_cli.lengths.goodput import Budget, Goodput
from bass_cli.lengths.surface import make_surface


def trace(controller, rounds, accept):
    out = []
    for _ in range(rounds):
        out.append(controller.next(4))
        controller.observe(RoundResult(out[-1], tuple(accept(out[-1])), 0.1))
    return out


def test_algorithm_1_when_nothing_is_accepted():
    assert trace(Bass(), 7, lambda k: [0, 0, 0]) == [7, 6, 4, 2, 1, 1, 1]
    assert trace(Bass(start=32), 12, lambda k: [0]) == [32, 28, 24, 20, 17, 14, 11, 8, 6, 4, 2, 1]


def test_algorithm_1_grows_by_two_while_one_row_accepts_everything():
    assert trace(Bass(), 15, lambda k: [0, k, 1]) == [
        7,
        9,
        11,
        13,
        15,
        17,
        19,
        21,
        23,
        25,
        27,
        29,
        31,
        32,
        32,
    ]


def test_algorithm_1_stays_above_accepted_drafts_and_resets_after_success():
    controller = Bass(start=10)
    kept = iter([[9, 2], [9], [3], [6], [0], [0]])
    assert trace(controller, 6, lambda k: next(kept)) == [10, 9, 11, 9, 7, 5]


def test_shortened_draft_that_is_fully_accepted_does_not_count_as_full():
    controller = Bass()
    assert controller.next(1) == 7
    controller.observe(RoundResult(3, (3,), 0.1))
    assert controller.next(1) == 6


def test_round_without_drafts_teaches_nothing():
    controller = Bass()
    controller.observe(RoundResult(0, (0, 0), 0.1))
    assert controller.next(2) == 7


@pytest.mark.parametrize(("length", "due"), [(0, 0), (5, 5), (64, 12)])
def test_fixed_lengths_respect_the_limit(length, due):
    controller = make_lengths(length, LengthParts(limit=12, coupling="shared"))
    assert isinstance(controller, Fixed)
    assert controller.next(3) == due


def test_every_name_has_its_own_controller():
    kinds = {
        type(make_lengths(word, LengthParts(limit=8, coupling="shared", surface=TABLES)))
        for word in CONTROLLERS
    }
    assert len(kinds) == len(CONTROLLERS)


def test_clock_shortens_a_round_that_would_end_late():
    now = [100.0]
    clock = Clock(lambda: now[0])
    assert clock.longest_in_time(8, 100.5) == 8  # nothing is known yet
    clock.observe(0, 0.1)
    clock.observe(4, 0.3)
    clock.observe(8, 0.9)
    assert clock.longest_in_time(8, None) == 8
    assert clock.longest_in_time(8, 101.0) == 8
    assert clock.longest_in_time(8, 100.5) == 5
    assert clock.longest_in_time(8, 100.12) == 0
    assert clock.predict(2) == pytest.approx(0.2)
    assert clock.predict(20) == 0.9
    assert clock.predict(0) == 0.1


def test_clock_follows_measured_times():
    clock = Clock(lambda: 0.0)
    clock.observe(2, 1.0)
    for _ in range(30):
        clock.observe(2, 0.2)
    assert abs(clock.predict(2) - 0.2) < 0.01


def simulate(controller, rounds, *, rows, rate, cost):
    """Simulate rows whose drafts are accepted with probability `rate` on a machine whose rounds
    take `cost(rows, width)`. Return tokens a second and the draft lengths used."""
    chance, tokens, seconds, widths = random.Random(0), 0, 0.0, []
    for number in range(rounds):
        width = controller.next(rows)
        now = rate(number) if callable(rate) else rate
        kept = tuple(
            next((i for i in range(width) if chance.random() > now), width) for _ in range(rows)
        )
        took = cost(rows, width) * chance.uniform(0.95, 1.05)
        controller.observe(RoundResult(width, kept, took))
        tokens, seconds, widths = tokens + sum(kept) + rows, seconds + took, [*widths, width]
    return tokens / seconds, widths


def machine(rows, width):
    """A round costs 50 ms and 2 ms for each of the rows' tokens."""
    return 0.05 + 0.002 * rows * (width + 1)


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("rate", [0.05, 0.5, 0.8, 0.95])
def test_goodput_comes_within_eight_percent_of_the_best_fixed_length(rows, rate):
    best = max(simulate(Fixed(k), 400, rows=rows, rate=rate, cost=machine)[0] for k in range(17))
    found, widths = simulate(Goodput(limit=16), 400, rows=rows, rate=rate, cost=machine)
    assert found > 0.92 * best, widths[-20:]


def test_goodput_goes_plain_when_drafts_fail_and_returns_when_they_are_accepted():
    _, widths = simulate(
        Goodput(limit=16), 900, rows=16, rate=lambda n: 0.02 if n < 300 else 0.9, cost=machine
    )
    assert sum(widths[100:300]) < 60
    assert sum(widths[800:]) > 200


def test_auto_under_maximal_coupling_does_not_depend_on_time():
    assert isinstance(make_lengths("auto", LengthParts(limit=8, coupling="maximal")), Bass)
    assert isinstance(make_lengths("auto", LengthParts(limit=8, coupling="shared")), Goodput)


def learnt(rows, rate, *, rounds=60):
    """Return a Goodput that has drafted 4 in every row with acceptance `rate`, on the machine
    above. The loss from that does not count."""
    controller, chance = Goodput(limit=8), random.Random(0)
    for number in range(rounds):
        width = controller.next(rows) if number < 4 else 4
        kept = tuple(
            next((i for i in range(width) if chance.random() > rate), width) for _ in range(rows)
        )
        controller.observe(RoundResult(width, kept, machine(rows, width)))
    controller._budget = Budget()
    return controller


def test_goodput_trims_drafts_that_few_rows_have():
    controller = learnt(8, 0.8)
    assert controller.trim([4] * 8) >= 3
    assert controller.trim([4] + [0] * 7) == 0, "eight rows would pay for the drafts of one"
    assert controller.trim([8] + [2] * 7) == 2
    assert learnt(1, 0.8).trim([8]) > 4


def test_goodput_requests_all_drafts_if_lookups_are_free_and_probes_after_plain_rounds():
    controller = learnt(32, 0.05)
    assert controller.next(32, ControllerInput(free=True)) == 8
    assert [controller.trim([6] * 32), controller.next(32)] == [0, 0]
    for _ in range(17):
        controller.observe(RoundResult(0, (0,) * 32, machine(32, 0)))
    assert controller.trim([6] * 32) == 2
    assert controller.trim([1] * 32) == 1


def test_goodput_learns_only_from_rows_with_drafts():
    """Two of 32 rows draft, and accept everything; the places of the others hold filler, and
    what is accepted there is luck."""
    controller = learnt(32, 0.3)
    for _ in range(200):
        controller.observe(
            RoundResult(4, (4, 4) + (1,) * 30, machine(32, 4), drafted=(4, 4) + (0,) * 30)
        )
    assert controller.trim([4] * 32) == 0, "drafting so has lost too much"
    controller._budget = Budget()
    assert controller.trim([4] * 32) == 4


def test_uncaptured_rounds_count_with_their_usual_time():
    surface = make_surface((2,), (0, 4), verify=[[1.0, 1.2]], draft=[[0.0, 0.2]])
    controller = Goodput(limit=4, surface=surface)
    for _ in range(50):
        width = controller.next(2, ControllerInput(1e6))
        assert width > 0, "the time of an uncaptured round does not count against drafting"
        controller.observe(RoundResult(width, (width, width - 1), 50.0, steady=False))


TABLES = make_surface((4,), (0, 8), verify=[[1.0, 1.1]], draft=[[0.0, 0.1]])


@pytest.mark.parametrize(
    "controller",
    [
        Fixed(7),
        Bass(),
        *(
            make_lengths(name, LengthParts(limit=8, coupling="shared", surface=TABLES))
            for name in ("table", "bass+table")
        ),
    ],
)
def test_longest_draft_is_used_if_the_controller_does_not_trim(controller):
    class Found(NoDrafter):
        on_device = False

        def propose(self, batch, length):
            return Proposal(torch.zeros(4, length, dtype=torch.int64), None, (0, 3, 5, 1))

    batch = Batch(rows=4, context=64, device=torch.device("cpu"))
    found = HostDrafts(batch, Found(), learns_before=True).propose(7, controller)
    assert (found.tokens.shape, found.num_drafts) == ((4, 5), (0, 3, 5, 1))


@pytest.mark.parametrize("profile", [False, True])
def test_the_gain_of_drafts_is_estimated_from_measured_plain_rounds(profile):
    """400 rounds of 8 rows on a device with known costs, which vary by 5 %: what plain decoding of
    the same tokens takes is known exactly."""
    rng, cost = random.Random(4), device("wide-310m")
    surface = surface_of(cost) if profile else None
    lengths, gain, saved = Goodput(limit=32, surface=surface), Gain(), 0.0
    for _ in range(400):
        width = lengths.next(8)
        accepted = tuple(min(int(rng.expovariate(0.3)), width) for _ in range(8))
        seconds = cost(8, width) * rng.uniform(0.95, 1.05)
        done = RoundResult(width, accepted, seconds, plain=lengths.plain)
        gain.round(8 * width, 8, sum(accepted), seconds, done.plain)
        lengths.observe(done)
        saved += cost(8, 0) * (1 + sum(accepted) / 8) - seconds if width else 0.0
    assert saved > 0.3
    assert gain.seconds == pytest.approx(saved, rel=0.1)
    assert Fixed(4).plain == 0.0
    assert Bass().plain == 0.0
