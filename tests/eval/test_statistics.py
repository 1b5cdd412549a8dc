"""Standard errors and intervals against formulas of papers and against exact enumeration."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from bass_cli.eval.statistics import FEW, bootstrap, over_problems, pass_at_k, share_of


def binomial(n: int, p: float) -> list[float]:
    """The probability of 0, 1, ... n successes."""
    return [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]


def quantile_of(weights: list[float], share: float) -> int:
    """The least number whose cumulative probability reaches the share."""
    return next(c for c, total in enumerate(itertools.accumulate(weights)) if total >= share)


def coverage(problems: int, p: float) -> float:
    """The chance that the interval holds p, if each problem passes with probability p."""
    held = 0.0
    for c, weight in enumerate(binomial(problems, p)):
        found = share_of([1.0] * c + [0.0] * (problems - c))
        held += weight * (found.low <= p <= found.high)
    return held


def test_standard_error_equals_the_clustered_formula_on_samples() -> None:
    """Miller 2024: residuals of the samples, multiplied within each problem."""
    generator = random.Random(1)
    samples = [
        [float(generator.random() < share) for _ in range(5)] for share in (0.1, 0.5, 0.9, 1.0, 0.3)
    ]
    every = [one for problem in samples for one in problem]
    middle = sum(every) / len(every)
    products = sum(
        (a - middle) * (b - middle) for problem in samples for a in problem for b in problem
    )
    clustered = math.sqrt(products) / len(every)
    found = share_of([sum(problem) / 5 for problem in samples])
    assert found.value == pytest.approx(middle, abs=1e-12)
    assert found.standard_error == pytest.approx(clustered * math.sqrt(5 / 4), abs=1e-12)
    # independent samples are a wrong assumption here: their error is less
    assert found.standard_error > statistics.stdev(every) / math.sqrt(len(every))
    assert (found.problems, found.method) == (5, "normal")


def test_squared_standard_error_is_unbiased_for_pass_at_k() -> None:
    """All draws of 3 problems, of 2 kinds, with 3 samples each: exact enumeration."""
    kinds = {0.2: 0.7, 0.9: 0.3}  # chance of a pass, and share of such problems
    chances = [sum(share * binomial(3, p)[c] for p, share in kinds.items()) for c in range(4)]
    figures = [pass_at_k(3, c, 2) for c in range(4)]
    means, squares, weights = [], [], []
    for counts in itertools.product(range(4), repeat=3):
        found = share_of([figures[c] for c in counts])
        weights.append(math.prod(chances[c] for c in counts))
        means.append(found.value)
        squares.append(found.standard_error**2)
    expected = sum(w * one for w, one in zip(weights, means, strict=True))
    variance = sum(w * (one - expected) ** 2 for w, one in zip(weights, means, strict=True))
    assert sum(w * one for w, one in zip(weights, squares, strict=True)) == pytest.approx(
        variance, abs=1e-12
    )
    truth = sum(share * (1 - (1 - p) ** 2) for p, share in kinds.items())
    assert expected == pytest.approx(truth, abs=1e-12)


def test_interval_holds_the_truth_as_often_as_it_says() -> None:
    """HumanEval has 164 problems. With few problems the interval is too narrow: FEW has a note."""
    assert coverage(164, 0.6) == pytest.approx(0.95, abs=0.01)
    assert coverage(1000, 0.9) == pytest.approx(0.95, abs=0.01)
    assert coverage(FEW, 0.9) > 0.93
    assert coverage(30, 0.9) < 0.85


def test_bootstrap_of_shares_equals_the_binomial_distribution() -> None:
    """Resamples of c ones and P - c zeros have a mean that is binomial with p = c / P, over P."""
    for passed, problems in ((70, 164), (3, 20), (150, 164)):
        found = bootstrap([1.0] * passed + [0.0] * (problems - passed))
        share, weights = passed / problems, binomial(problems, passed / problems)
        assert found.value == pytest.approx(share, abs=1e-12)
        exact = math.sqrt(share * (1 - share) / problems)
        # the standard deviation of 10,000 means has a relative error of 1 / sqrt(20,000)
        assert found.standard_error == pytest.approx(exact, rel=4 / math.sqrt(20_000))
        assert found.low * problems == pytest.approx(quantile_of(weights, 0.025), abs=1)
        assert found.high * problems == pytest.approx(quantile_of(weights, 0.975), abs=1)
        assert found.method == "bootstrap"


def test_bootstrap_equals_the_enumeration_of_all_resamples() -> None:
    values = [0.0, 0.25, 0.25, 1.0]
    means = sorted(sum(one) / 4 for one in itertools.product(values, repeat=4))
    found = bootstrap(values)
    assert found.standard_error == pytest.approx(
        statistics.pstdev(means), rel=4 / math.sqrt(20_000)
    )
    assert found.low == pytest.approx(means[int(0.025 * len(means))], abs=0.0626)
    assert found.high == pytest.approx(means[int(0.975 * len(means))], abs=0.0626)


def test_bootstrap_is_reproducible_and_ignores_the_order_of_problems() -> None:
    values = [float(one % 3 == 0) for one in range(50)]
    assert bootstrap(values) == bootstrap(values) == bootstrap(sorted(values))
    assert bootstrap(values, seed=1) != bootstrap(values, seed=2)
    # numpy never changes these numbers
    assert bootstrap([0.0, 1.0, 1.0, 0.0, 1.0]).standard_error == pytest.approx(
        0.21999110711281233, abs=1e-12
    )


def test_paired_error_is_of_the_differences() -> None:
    a, b = [1.0, 0.5, 0.0, 0.75, 1.0], [0.75, 0.5, 0.0, 0.25, 1.0]
    differences = [x - y for x, y in zip(a, b, strict=True)]
    found = over_problems(differences, least=-1.0, most=1.0)
    assert found.value == pytest.approx(0.15)
    assert found.standard_error == pytest.approx(
        statistics.stdev(differences) / math.sqrt(5), abs=1e-12
    )
    apart = math.hypot(share_of(a).standard_error, share_of(b).standard_error)
    assert found.standard_error < apart  # both find the same problems hard
    assert found.low < 0 < found.high
    assert over_problems([0.0] * 5, least=-1.0, most=1.0)[:4] == (0.0, 0.0, 0.0, 0.0)
    assert over_problems([1.0] * 9 + [0.5], least=-1.0, most=1.0).low > 0
    assert over_problems([2.0, 0.0, 1.0], least=-1.0, most=1.0).high == 1.0


def test_few_problems_have_no_error_and_bounds_are_kept() -> None:
    assert (share_of([]), bootstrap([])) == (None, None)
    for found in (share_of([0.5]), bootstrap([0.5])):
        assert found[:5] == (0.5, None, None, None, 1)
        assert found.document()["interval"] is None
    assert share_of([1.0, 1.0, 0.9]).high == 1.0
    assert share_of([0.0, 0.0, 0.1]).low == 0.0
    assert over_problems([0.0, 4.0], least=-math.inf, most=math.inf).low < 0.0
    assert share_of([0.0, 1.0]).document() == {
        "value": 0.5,
        "standard_error": 0.5,
        "interval": [0.0, 1.0],
        "problems": 2,
        "method": "normal",
    }
