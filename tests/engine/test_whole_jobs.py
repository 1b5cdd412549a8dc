"""The time of whole jobs, captures included, on a simulated device: `auto` must not be slower
than plain decoding."""

import functools

import pytest
from fakes import FakeGraphs, Ticks
from simulated import Finder, Simulated, plain_seconds, seconds_of
from thinned import thinned

from bass_cli.drafts.factory import NoDrafter
from bass_cli.engine.clock import Forecast
from bass_cli.engine.contracts import ControllerInput, RoundResult
from bass_cli.lengths.controllers import Bass, Fixed
from bass_cli.lengths.goodput import Goodput, Lookups


def auto_seconds(rate, **job):
    return seconds_of(Simulated(Goodput(limit=32), rate), **job)


@pytest.mark.parametrize("rate", thinned([0.1, 0.3], 2))
def test_auto_costs_at_most_a_tenth_if_drafts_fail(rate):
    assert auto_seconds(rate) <= 1.1 * plain_seconds()


def test_auto_wins_in_a_long_job_with_accepted_drafts():
    plain = plain_seconds()
    assert auto_seconds(0.8) < 0.75 * plain
    assert seconds_of(Simulated(Fixed(4), 0.8)) < 0.65 * plain, "auto could win no more than this"


@pytest.mark.parametrize("rate", [0.3, 0.8])
def test_auto_decodes_plainly_in_a_job_too_short_to_win(rate):
    loop = Simulated(Goodput(limit=32), rate)
    assert seconds_of(loop, prompts=1, limit=64) <= 1.02 * plain_seconds(prompts=1, limit=64)
    assert loop.graphs.captures == 1


def speed_of_looking(found, rate, *, lookup_seconds):
    """Return the speed of a second job of 512 samples in 16 rows relative to plain decoding, and
    its rounds with a lookup."""
    job = {"prompts": 32, "n": 16, "limit": 46}
    graphs = FakeGraphs(Ticks())
    drafter = Finder(found, lookup_seconds=lookup_seconds, ticks=graphs.ticks)
    loop = Simulated(Goodput(limit=16), rate, rows=16, drafter=drafter, graphs=graphs)
    (first, looks), (second, more) = ((seconds_of(loop, **job), drafter.looks) for _ in range(2))
    return plain_seconds_of_the_second(**job) / (second - first), more - looks


@functools.cache
def plain_seconds_of_the_second(**job):
    plain = Simulated(Fixed(0), 0.0, rows=16, drafter=NoDrafter())
    first, second = (seconds_of(plain, **job) for _ in range(2))
    return second - first


@pytest.mark.parametrize(
    ("found", "rate"), thinned([(0.0, 0.0), (0.15, 0.5), (0.3, 0.5)], [(0.15, 0.5)])
)
def test_lookups_that_do_not_pay_become_rare(found, rate):
    """A lookup takes a ninth of a plain round: more than may be lost in every round."""
    speed, looks = speed_of_looking(found, rate, lookup_seconds=0.00024)
    assert speed > 0.98
    assert 0 < looks < 300


@pytest.mark.parametrize(
    ("found", "rate", "due"), [(0.6, 0.6, 1.1), pytest.param(0.8, 0.8, 1.5, marks=pytest.mark.slow)]
)
def test_lookups_that_pay_continue(found, rate, due):
    """What lookups lose before the first draft leaves enough of the budget to try drafts."""
    speed, looks = speed_of_looking(found, rate, lookup_seconds=0.00024)
    assert speed > due
    assert looks > 500


def test_cheap_lookup_is_never_given_up():
    """After a long stretch without anything to copy, the beginning of a copy is not missed."""
    _, looks = speed_of_looking(0.0, 0.0, lookup_seconds=0.000015)
    assert looks > 1000


def test_lookups_that_never_find_anything_keep_estimates_finite():
    """The expected gain of a lookup falls to its cost, and rises again with what it finds."""
    looks = Lookups()
    for _ in range(50_000):
        looks.observe(cost=0.005, gain=-0.005)
    assert looks.due
    assert looks.find(1.0) < 0.1
    for _ in range(100):
        looks.find(1.0)
        looks.observe(cost=0.005, gain=1.0)
    assert looks.find(1.0) > 0.9


def test_shrinking_batch_captures_nothing():
    """Rows end one by one: existing graphs serve fewer rows and shorter last drafts."""
    loop = Simulated(Fixed(5), 0.7)
    seconds_of(loop, prompts=3)
    assert loop.graphs.captures == 1
    loop = Simulated(Bass(limit=32), 0.7)
    seconds_of(loop, prompts=3)
    assert loop.graphs.captures <= 4


def taught(controller, *, rate, plain=0.002, step=0.0005, rows=8, most=4, rounds=1):
    """A controller after rounds of 0 and `most` drafts with this mean number accepted."""
    for width in (0, 0, most, 0, most, most) * rounds:
        kept = tuple(round(rate * width) for _ in range(rows))
        controller.observe(RoundResult(width, kept, plain + step * width))
    return controller


def test_length_must_save_more_than_its_one_time_cost():
    controller = taught(Goodput(limit=8), rate=1.0)
    assert controller.next(8, ControllerInput(left=1e6, one_time_costs=(0.0,) + (0.3,) * 8)) >= 4
    assert controller.next(8, ControllerInput(left=50, one_time_costs=(0.0,) + (0.3,) * 8)) == 0
    assert controller.next(8, ControllerInput(left=50, one_time_costs=(0.0,) * 9)) >= 4
    held = (0.0, 0.3, 0.3, 0.0, 0.3, 0.3, 0.3, 0.3, 0.3)
    assert controller.next(8, ControllerInput(left=200, one_time_costs=held)) == 3, (
        "a captured length is better than plain decoding"
    )
    assert controller.next(8, ControllerInput(left=50, catch_up=0.3)) == 0


def test_probes_wait_until_they_cost_little_relative_to_plain_rounds():
    def rounds_before_a_probe(inputs):
        controller = taught(Goodput(limit=8), rate=0.0)
        for number in range(3000):
            if controller.next(8, inputs):
                return number
            controller.observe(RoundResult(0, (0,) * 8, 0.002))
        return 3000

    assert rounds_before_a_probe(ControllerInput()) < 40
    assert 400 < rounds_before_a_probe(ControllerInput(1e6, (0.0,) + (0.02,) * 8)) < 600
    assert rounds_before_a_probe(ControllerInput(100, (0.0,) + (0.02,) * 8)) == 3000, (
        "it could not pay"
    )
    assert rounds_before_a_probe(ControllerInput(1e6, (0.0, 0.02, 0.02, 0.0, 0.02, 0.02))) < 80, (
        "one that is captured can"
    )


def test_uncaptured_rounds_teach_acceptance_but_no_cost():
    one, other = (taught(Goodput(limit=8), rate=1.0, rounds=2) for _ in range(2))
    one.observe(RoundResult(4, (0,) * 8, 0.9, steady=False))
    here, there = one.learned(), other.learned()
    assert here is not None
    assert there is not None
    assert here.acceptance < there.acceptance
    assert (here.verify, here.draft) == (there.verify, there.draft)


def test_forecast_learns_the_length_of_samples():
    forecast = Forecast(20)
    forecast.begin(8)
    assert forecast.length(10) == 21
    forecast.end(40)
    forecast.end(60)
    assert forecast.length(10) == 50
    assert forecast.waiting(3, ended=False) == 3 + 12
    assert forecast.waiting(3, ended=True) == 3
    empty = Forecast(4)
    empty.end(0)
    assert empty.length(0) == 1  # a row has a token at least before it ends
    unknown = Forecast(None)
    unknown.begin(8)
    unknown.begin(8)
    assert unknown.waiting(0, ended=False) == 16
