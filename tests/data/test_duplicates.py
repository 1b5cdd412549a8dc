"""Duplicates: similarity against sets of Python's own, and the share of near texts that is found."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys

import numpy
import pytest

from bass_cli.data.duplicates import (
    PERMUTATIONS,
    ExactDuplicates,
    NearDuplicates,
    band_rows,
    shingles,
    signature,
)

WORDS = ["".join(letters) for letters in itertools.permutations("abcdef", 4)]


def similarity(one: str, other: str) -> float:
    """Return the exact Jaccard similarity of two texts' shingles."""
    a, b = set(shingles(one).tolist()), set(shingles(other).tolist())
    return len(a & b) / len(a | b) if a or b else math.nan


def pairs(count: int, most: float) -> list[tuple[str, str]]:
    """Return texts and changed copies; up to this share of the words is changed."""
    rng, found = random.Random(3), []
    for _ in range(count):
        words = rng.choices(WORDS, k=rng.randint(12, 120))
        share = rng.uniform(0, most)
        changed = [rng.choice(WORDS) if rng.random() < share else word for word in words]
        found.append((" ".join(words), " ".join(changed)))
    return found


def jaccard(one: str, other: str, width: int = 8) -> float:
    """The definition, without hashes."""

    def shingles(text: str) -> set[str]:
        text = " ".join(text.split())
        return {text[at : at + width] for at in range(max(len(text) - width + 1, 1))}

    a, b = shingles(one), shingles(other)
    return len(a & b) / len(a | b)


def test_similarity_equals_the_definition_on_sets_of_texts() -> None:
    odd = [
        ("", ""),
        ("a", "b"),
        ("a  b", "a b"),
        ("x" * 50, "x" * 9),
        ("日本語" * 9, "日本語" * 8),
        ("\ud800a", "a"),
    ]
    for one, other in [*pairs(40, 0.3), *odd]:
        assert similarity(one, other) == pytest.approx(jaccard(one, other), abs=1e-12)


def test_estimates_have_the_error_of_the_binomial_distribution() -> None:
    errors = []
    for one, other in pairs(400, 0.25):
        exact = jaccard(one, other)
        estimate = float((signature(one) == signature(other)).mean())
        errors.append((estimate - exact) / max((exact * (1 - exact) / PERMUTATIONS) ** 0.5, 1e-3))
    assert abs(numpy.mean(errors)) < 0.25  # 5 standard errors of the mean of 400
    assert 0.8 < numpy.std(errors) < 1.25


@pytest.mark.parametrize("threshold", [0.5, 0.8])
def test_near_texts_are_found_and_distant_ones_are_kept(threshold: float) -> None:
    """Beyond 0.1 from the threshold, which is 2.3 to 2.8 standard errors of an estimate."""
    near, missed, far, wrong = 0, 0, 0, 0
    for one, other in pairs(500, 0.25 if threshold == 0.8 else 0.5):
        texts, exact = NearDuplicates(threshold), jaccard(one, other)
        assert texts.add(one) is False
        found = texts.add(other)
        near, missed = (
            near + (exact >= threshold + 0.1),
            missed + (exact >= threshold + 0.1 and not found),
        )
        far, wrong = far + (exact <= threshold - 0.1), wrong + (exact <= threshold - 0.1 and found)
    assert near > 50
    assert far > 50
    assert missed <= 0.02 * near
    assert wrong <= 0.02 * far


def test_bands_find_99_percent_of_the_pairs_at_the_threshold() -> None:
    for threshold in (0.2, 0.5, 0.8, 0.95, 1.0):
        rows = band_rows(threshold)
        assert 1 - (1 - threshold**rows) ** (PERMUTATIONS // rows) >= 0.99
        more = rows + 1
        assert more > PERMUTATIONS or 1 - (1 - threshold**more) ** (PERMUTATIONS // more) < 0.99


def test_many_texts_are_compared_with_all_kept_ones() -> None:
    texts = NearDuplicates()
    originals = [one for one, _ in pairs(1_100, 0.0)]  # more than there is room for at first
    assert not any(map(texts.add, originals))
    assert all(texts.add(one + "!") for one in originals if len(one) > 100)


@pytest.mark.parametrize("kind", [ExactDuplicates, NearDuplicates])
def test_texts_of_another_prompt_are_no_duplicates(kind: type) -> None:
    seen = kind()
    found = [seen.add("a text of some length", within) for within in ("a", "b", "a", "b", "")]
    assert found == [False, False, True, True, False]


def test_exact_duplicates_are_equal_character_by_character() -> None:
    seen = ExactDuplicates()
    assert [seen.add(text) for text in ("a", "A", "a ", "a", "", "\ud800", "", "\ud800")] == [
        *(False, False, False, True),
        *(False, False, True, True),
    ]


def test_signatures_are_the_same_in_another_process() -> None:
    code = "from bass_cli.data.duplicates import signature; print(signature('a small text')[:3].tolist())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(signature("a small text")[:3].tolist())
