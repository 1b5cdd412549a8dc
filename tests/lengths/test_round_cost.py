"""The cost surface: its values between and beyond its points, what it refuses to read, and how
it follows a device."""

import json
import math

import pytest
from devices import device, surface_of

from bass_cli.lengths.costs import RoundCost
from bass_cli.lengths.surface import Surface, make_surface, read_surface


def surface(**changes):
    options = {
        "verify": [[4.0, 4.2, 4.6], [5.0, 7.0, 15.0]],
        "draft": [[0.0, 0.8, 3.2], [0.0, 1.0, 4.0]],
        "context": 400.0,
        "growth": (0.001, 0.0005),
        "acceptance": 0.8,
    }
    return make_surface((8, 64), (0, 1, 4), **(options | changes))


def test_values_between_points_are_linear():
    found = surface()
    assert found.seconds(8, 4) == pytest.approx(4.6 + 3.2)
    assert found.seconds(64, 0) == 5.0
    assert found.verify_seconds(36, 1) == pytest.approx((4.2 + 7.0) / 2)
    assert found.draft_seconds(8, 2) == pytest.approx(0.8 + 2.4 / 3)
    assert found.seconds(36, 2) == pytest.approx((4.2 + 0.4 / 3 + 1.6 + 7.0 + 8 / 3 + 2.0) / 2)


def test_values_beyond_the_points_are_extrapolated_and_before_them_constant():
    found = surface()
    assert found.verify_seconds(64, 7) == pytest.approx(15.0 + 8.0)
    assert found.verify_seconds(120, 0) == pytest.approx(6.0)
    assert found.verify_seconds(1, 0) == 4.0


def test_longer_contexts_cost_by_row_and_draft_step():
    found = surface()
    assert found.seconds(8, 4, 1400.0) == pytest.approx(7.8 + 8 * 1000 * (0.001 + 4 * 0.0005))
    assert found.seconds(8, 0, 400.0) == 4.0
    assert found.seconds(8, 0, 0.0) == pytest.approx(4.0 - 8 * 200 * 0.001)


def test_noise_cannot_make_more_work_take_less_time():
    found = surface(verify=[[4.0, 3.9, 4.5], [3.0, 5.0, 4.4]])
    assert found.verify[0] == pytest.approx((3.475, 3.95, 4.5))
    assert found.verify[1] == pytest.approx((3.475, 4.7, 4.7))


def test_surface_survives_a_round_trip():
    found = surface()
    assert read_surface(found.to_json()) == found
    assert (
        read_surface(found.to_json()).digest()
        == found.digest()
        != surface(acceptance=None).digest()
    )
    learnt = surface(acceptance=None, measured=False, tried=((1, 4), ()))
    assert read_surface(learnt.to_json()) == learnt
    assert "tried" not in json.loads(found.to_json()), "older files keep their digest"


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"rows": [64, 8]},
        {"rows": [8]},
        {"widths": [0, 1]},
        {"verify": [[4.0, 4.2, -1.0], [5.0, 7.0, 15.0]]},
        {"verify": [[0.0, 4.2, 5.0], [5.0, 7.0, 15.0]]},
        {"growth": [0.1]},
        {"growth": [-0.1, 0.0]},
        {"context": None},
        {"draft": "none"},
        {"verify": [[4.0, 4.2, float("nan")], [5.0, 7.0, 15.0]]},
        {"rows": "89"},
        {"rows": [8.0, 64]},
        {"rows": [8, float("inf")]},
        {"rows": {"8": 1}},
        {"widths": [0, True, 4]},
        {"verify": [["4", 4.2, 4.6], [5.0, 7.0, 15.0]]},
        {"verify": [[4.0, 4.2, 10**400], [5.0, 7.0, 15.0]]},
        {"context": 10**400},
        {"context": "400"},
        {"measured": "false"},
        {"acceptance": 1.5},
        {"acceptance": float("nan")},
    ],
)
def test_invalid_surfaces_are_refused(changes):
    with pytest.raises(ValueError):  # noqa: PT011 - the reasons are json's too
        read_surface(json.dumps(json.loads(surface().to_json()) | changes))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 1}', "[" * 10**5, "9" * 6000, surface().to_json()[:-5]]
)
def test_broken_files_are_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011
        read_surface(text)


def test_grid_with_one_row_count_serves_all_row_counts():
    found = make_surface((8,), (0,), verify=[[2.0]], draft=[[0.0]])
    assert isinstance(found, Surface)
    assert found.seconds(1, 5) == found.seconds(64, 0) == 2.0


HALF = "qwen2.5-0.5b"


def test_slower_device_than_its_profile_is_followed():
    surface = surface_of(device(HALF))
    costs = RoundCost((0, 2, 4), surface)
    before = costs.round_seconds(8)
    for _ in range(100):
        costs.learn(8, 4, 2 * surface.seconds(8, 4), None)
    after = costs.round_seconds(8)
    assert after[2] == pytest.approx(2 * before[2], rel=0.02)
    assert 1.4 * before[0] < after[0] <= 2 * before[0]
    frozen = RoundCost((0, 2, 4), surface, frozen=True)
    frozen.learn(8, 4, 2 * surface.seconds(8, 4), None)
    assert frozen.round_seconds(8).tolist() == before.tolist()


def test_longer_contexts_raise_the_costs():
    surface = surface_of(device(HALF))
    surface = type(surface)(
        surface.rows, surface.widths, surface.verify, surface.draft, 100.0, (1e-6, 5e-7)
    )
    line = RoundCost((0, 4), surface).round_seconds(8, 1100.0)
    assert line.tolist() == pytest.approx(
        [surface.seconds(8, 0, 1100.0), surface.seconds(8, 4, 1100.0)]
    )


def test_earlier_estimates_are_corrected_by_measurements():
    cost = device(HALF)
    costs = RoundCost((0, 2, 4), surface_of(lambda rows, width: 3 * cost(rows, width)))
    for _ in range(60):
        for width in (0, 4):
            costs.learn(8, width, cost(8, width), None)
    assert costs.round_seconds(8)[0] == pytest.approx(cost(8, 0), rel=0.1)


def test_plain_rounds_of_half_the_time_are_accepted_eventually():
    surface = surface_of(device(HALF))
    costs = RoundCost((0, 2, 4), surface)
    for _ in range(20):
        costs.learn(8, 4, surface.seconds(8, 4), None)
        costs.learn(8, 0, surface.seconds(8, 0), None)
    assert costs.uncertainty(8, 2) < 0.05
    for _ in range(30):
        costs.learn(8, 0, surface.seconds(8, 0) / 2, None)
    assert costs.round_seconds(8)[0] == pytest.approx(surface.seconds(8, 0) / 2, rel=0.05)


@pytest.mark.parametrize("width", [2, 4, 12])
def test_expensive_draft_does_not_count_as_a_slow_device(width):
    """Nothing was measured, and plain rounds were seen before. A round with drafts that takes
    twice as long is due to the draft at once: the cost of plain rounds stays."""
    costs = RoundCost((0, 2, 4, 12), None, at_once=True)
    for _ in range(2):
        costs.learn(8, 0, 1.0, None)
    costs.learn(8, width, 2.0, None)
    line = costs.round_seconds(8)
    assert line[0] == pytest.approx(1.0, abs=0.02)
    assert line[(0, 2, 4, 12).index(width)] == pytest.approx(2.0, abs=0.05)


def test_plain_estimate_that_only_slow_rounds_with_drafts_raise_is_not_certain():
    """An earlier job's costs of drafts are far too low. A slow round with drafts may mean a slow
    device, so it raises the estimate of plain rounds, which were measured and did not change."""
    costs = RoundCost((0, 2, 4), surface_of(lambda rows, width: 1.0 + 0.01 * width))
    for _ in range(20):
        costs.learn(8, 0, 1.0, None)
    assert costs.uncertainty(8, 2) < 0.05
    for _ in range(3):
        costs.learn(8, 4, 3.0, None)
    raised = costs.round_seconds(8)[0]
    assert raised > 1.2, "else this test shows nothing"
    assert costs.unchecked == pytest.approx(math.log(raised), abs=0.02)
    assert costs.uncertainty(8, 2) >= costs.unchecked
