"""No profile, no measured time and no change of the system clock ends a job: predicted costs
stay positive and rising, and an invalid profile is ignored with a note."""

import itertools
import json
import math
from pathlib import Path

import numpy
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bass_cli.engine.clock import Clock
from bass_cli.engine.contracts import ControllerInput, RoundResult
from bass_cli.lengths import surface as store
from bass_cli.lengths.controllers import best_length
from bass_cli.lengths.costs import RoundCost
from bass_cli.lengths.goodput import Goodput
from bass_cli.lengths.surface import make_surface, read_surface
from bass_cli.run.profile import drafting, filled

# What `bass profile` wrote on a busy machine, shortened: flat in places, with growth by context.
BUSY = {
    "format": 1,
    "rows": [4, 8],
    "widths": [0, 1, 2, 16],
    "verify": [[0.0779, 0.0786, 0.0838, 0.2999], [0.0779, 0.1319, 0.1319, 0.7453]],
    "draft": [[0.0, 0.0104, 0.0207, 0.1659], [0.0, 0.0104, 0.0207, 0.1659]],
    "context": 148.0,
    "growth": [1.1398501627531607e-05, 0.0],
    "acceptance": None,
    "measured": True,
}
CHOICES = (0, 1, 2, 4, 8, 16, 64)
SECONDS = st.one_of(
    st.floats(1e-4, 10.0),
    st.sampled_from((0.0, -1.0, 1e-300, 1e300, math.inf, -math.inf, math.nan, 3600.0)),
)
ROWS = st.integers(1, 4096)


@st.composite
def surfaces(draw):
    """Surfaces of any measured values on any grid, as `make_surface` makes them."""
    axis = st.lists(st.integers(1, 64), min_size=1, max_size=4, unique=True).map(sorted)
    rows, widths = draw(axis), [0, *draw(axis)][: draw(st.integers(1, 5))]
    line = st.lists(SECONDS, min_size=len(widths), max_size=len(widths))
    grid = st.lists(line, min_size=len(rows), max_size=len(rows))
    return make_surface(
        rows,
        widths,
        verify=draw(grid),
        draft=[[0.0, *values[1:]] for values in draw(grid)],
        context=draw(st.floats(0.0, 1e5)),
        growth=(draw(st.floats(-1.0, 1e-2)), draw(st.floats(-1.0, 1e-2))),
        acceptance=draw(st.one_of(st.none(), st.floats(0.0, 1.0))),
        measured=draw(st.booleans()),
    )


def rises(values):
    """Return whether numbers never fall, except for rounding."""
    return all(after >= before * (1 - 1e-9) for before, after in itertools.pairwise(values))


@given(surfaces(), st.lists(ROWS, min_size=2, max_size=4), st.floats(0.0, 1e6))
@settings(max_examples=150, deadline=None)
def test_more_work_never_costs_less_and_costs_stay_above_the_floor(surface, counts, context):
    assert read_surface(surface.to_json()) == surface
    floor = surface.verify[0][0]
    assert floor > 0
    for rows in counts:
        line = [surface.seconds(rows, k) for k in range(70)]
        assert line[0] >= floor
        assert rises(line)
        assert all(surface.seconds(rows, k, context) >= line[k] / 2 > 0 for k in (0, 4, 64))
        assert rises([surface.seconds(rows, k, context) for k in range(70)])
        assert rises([surface.seconds(rows, 4, at) for at in (0.0, context, 2 * context, 1e7)])
    for width in (0, 3, 64):
        assert rises([surface.seconds(rows, width) for rows in sorted(counts)])
    assert best_length(surface, counts[0], 0.8, range(65)) in range(65)


@given(
    st.one_of(st.none(), surfaces()),
    st.lists(
        st.tuples(ROWS, st.sampled_from(CHOICES), SECONDS, st.none() | st.floats(0.0, 1e5)),
        max_size=40,
    ),
)
@settings(max_examples=150, deadline=None)
@example(read_surface(json.dumps(BUSY)), [(256, 0, 0.1, 30.0)])
def test_costs_stay_positive_and_finite_and_rise_unless_measured(surface, rounds):
    costs = RoundCost(CHOICES, surface)
    for rows, width, seconds, context in rounds:
        costs.learn(rows, width, seconds, context)
        for free in (False, True):
            line = costs.round_seconds(rows, context, free=free)
            assert numpy.isfinite(line).all()
            assert (line > 0).all()
            assert rises(line[~costs.measured(rows)].tolist())
        assert math.isfinite(costs.uncertainty(rows, 2, context))
    learnt = costs.surface(acceptance=0.5)
    assert learnt is None or read_surface(learnt.to_json()) == learnt


@given(
    st.one_of(st.none(), surfaces()),
    st.lists(st.tuples(st.integers(1, 300), SECONDS, st.floats(0.0, 1.0)), max_size=30),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_auto_chooses_a_valid_length_for_any_profile_and_clock(surface, rounds, frozen):
    limit = 32
    auto = Goodput(limit=limit, surface=surface, frozen=frozen and surface is not None)
    for rows, seconds, kept in rounds:
        width = auto.next(rows, ControllerInput(100.0, context=30.0, rooms=(50,) * rows))
        assert 0 <= width <= limit
        auto.observe(RoundResult(width, (round(kept * width),) * rows, seconds))
        assert auto.least(2) >= 0
    learnt = auto.learned()
    assert learnt is None or read_surface(learnt.to_json()) == learnt


def test_a_longer_draft_never_costs_less_at_a_shorter_context():
    """At a shorter context a draft of 16 tokens saves more than one of 1: it must not become
    cheaper than that."""
    flat = [[0.0, 0.1, 0.1]] * 2
    surface = make_surface(
        (1, 8), (0, 1, 16), verify=[[1.0] * 3] * 2, draft=flat, context=1000.0, growth=(0.0, 1e-5)
    )
    assert rises([surface.seconds(8, k, 0.0) for k in range(70)])
    assert rises(RoundCost(CHOICES, surface).round_seconds(8, 0.0).tolist())


def test_changed_system_clock_does_not_change_the_costs():
    costs = RoundCost(CHOICES, read_surface(json.dumps(BUSY)))
    before = costs.round_seconds(8).tolist()
    for seconds in (0.0, -5.0, math.inf, math.nan):
        costs.learn(8, 0, seconds, None)
    assert costs.round_seconds(8).tolist() == before


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**25), 10**25) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=6,
)


@st.composite
def damaged(draw):
    """Return the profile with values replaced, dropped or moved at any depth."""
    found = json.loads(json.dumps(BUSY))
    for _ in range(draw(st.integers(1, 3))):
        key = draw(st.sampled_from(sorted(found)))
        inner = found[key]
        while isinstance(inner, list) and inner and draw(st.booleans()):
            at = draw(st.integers(0, len(inner) - 1))
            if not isinstance(inner[at], list):
                inner[at] = draw(VALUES)
                break
            inner = inner[at]
        else:
            kind = draw(st.sampled_from(("value", "shuffle", "empty")))
            if isinstance(inner, list) and kind == "shuffle":
                inner[:] = draw(st.permutations(inner))
            elif isinstance(inner, list) and kind == "empty":
                inner.clear()
            else:
                found[key] = draw(VALUES)
    return json.dumps(found)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("profiles") / "p.json"


@given(text=st.one_of(damaged(), VALUES.map(json.dumps), st.text(max_size=20)))
@settings(max_examples=300, deadline=None)
def test_invalid_profile_is_ignored_with_a_note_and_a_valid_one_is_usable(file, text):
    file.write_text(text)
    notes: list[str] = []
    surface = store.load_surface(file, notes.append)
    assert (surface is None) == (len(notes) == 1)
    if surface is None:
        assert "\n" not in notes[0]
        assert notes[0].startswith(f"{file}: this profile is ignored: ")
        return
    auto = Goodput(limit=16, surface=surface)
    for rows in (1, 300):
        width = auto.next(rows, ControllerInput(100.0, context=1.0))
        auto.observe(RoundResult(width, (0,) * rows, 0.1))
    line = RoundCost(CHOICES, surface).round_seconds(300, 1.0)
    assert numpy.isfinite(line).all()
    assert line[0] > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"verify": [[0.0779, 0.01, 0.0838, 0.2999], [0.0779, 0.1319, 0.1319, 0.7453]]},
        {"verify": [[0.0779, 0.0786, 0.0838, 0.2999], [0.01, 0.1319, 0.1319, 0.7453]]},
        {"verify": [[1e9] * 4] * 2},
        {"verify": [[0.1] * 4]},
        {"growth": [1e6, 0.0]},
        {"growth": [0.0]},
        {"growth": {"0": 0.0, "1": 0.0}},
        {"context": -1.0},
        {"context": "148"},
        {"rows": [4, 2**40]},
        {"rows": [0, 8]},
        {"rows": [8, 4]},
        {"rows": []},
        {"rows": 4},
        {"widths": [1, 2, 3, 16]},
        {"widths": []},
        {"draft": [[0.01, 0.0104, 0.0207, 0.1659], [0.01, 0.0104, 0.0207, 0.1659]]},
        {"draft": [[0.0, 0.1, 0.2], [0.0, 0.1, 0.2]]},
        {"draft": [0.0, 0.1]},
        {"acceptance": 1.5},
        {"acceptance": -0.5},
        {"measured": 1},
        {"tried": [[0, 4]]},
        {"tried": [[0, -4], []]},
        {"tried": 4},
    ],
)
def test_implausible_surfaces_are_refused_with_the_key(changes):
    (key,) = changes
    with pytest.raises(ValueError, match=f"^{key}: "):
        read_surface(json.dumps(BUSY | changes))


@pytest.mark.parametrize("key", sorted(BUSY.keys() - {"format"}))
def test_surface_without_a_key_is_refused(key):
    found = {name: value for name, value in BUSY.items() if name != key}
    with pytest.raises(ValueError, match=f"^{key} is missing$"):
        read_surface(json.dumps(found))


def points(*widths):
    return st.dictionaries(
        st.tuples(st.sampled_from((1, 2, 4, 8)), st.sampled_from(widths)),
        st.floats(0.0, 10.0) | st.just(1e5),
        min_size=1,
    )


@given(points(0, 1, 4, 16), points(1, 4, 16))
@settings(max_examples=150, deadline=None)
def test_fit_to_any_points_is_positive_and_above_the_cost_of_less_work(points, whole):
    rows, widths = (1, 2, 4, 8), (0, 1, 4, 16)
    found = filled(points, rows, widths)
    for (i, count), (j, width) in itertools.product(enumerate(rows), enumerate(widths)):
        assert found[i][j] > 0
        if (count, width) not in points:
            less = [s for (r, w), s in points.items() if r <= count and w <= width]
            assert found[i][j] >= max(less, default=0.0)
    made = make_surface(rows, widths, verify=found, draft=drafting(whole, points, rows, widths))
    assert read_surface(made.to_json()) == made


@given(st.lists(st.tuples(st.integers(0, 8), SECONDS), max_size=12), st.integers(0, 16))
def test_clock_predicts_finite_nonnegative_times(rounds, width):
    clock = Clock(lambda: 0.0)
    for drafted, seconds in rounds:
        clock.observe(drafted, seconds)
        clock.passes["target"].observe(drafted, seconds)
    assert 0 <= clock.predict(width) < math.inf
    assert 0 <= clock.passes["target"].predict(width) < math.inf
    assert 0 <= clock.longest_in_time(width, 1.0) <= width
