"""Test that only near words are suggested, by an edit distance that is computed here in another way."""

from __future__ import annotations

import functools

from hypothesis import given, settings
from hypothesis import strategies as st

from bass_cli.errors import near_word, nearest

OPTIONS = (
    "--n",
    "--max-new-tokens",
    "--temperature",
    "--top-p",
    "--top-k",
    "--stop",
    "--pair",
    "--prompt-column",
)


def distance(one: str, other: str) -> int:
    """Compute it by the recursive definition, with swaps of neighbours."""

    @functools.cache
    def of(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        least = min(
            of(i - 1, j) + 1, of(i, j - 1) + 1, of(i - 1, j - 1) + (one[i - 1] != other[j - 1])
        )
        if i > 1 and j > 1 and one[i - 1] == other[j - 2] and one[i - 2] == other[j - 1]:
            least = min(least, of(i - 2, j - 2) + 1)
        return least

    return of(len(one), len(other))


def test_near_options_are_suggested_and_far_ones_are_not() -> None:
    near = {
        "--temp": "--temperature",
        "--top_p": "--top-p",
        "--max-tokens": "--max-new-tokens",
        "--Top-P": "--top-p",
        "--prompt": "--prompt-column",
        "--pairs": "--pair",
    }
    assert {word: near_word(word, OPTIONS) for word in near} == near
    for word in (
        "--min-p",
        "--p",
        "-m",
        "--seeds",
        "--device",
        "--samples",
        "--logprobs",
        "--nn",
        "x",
    ):
        assert near_word(word, OPTIONS) is None, word
    assert nearest("gsm8k", ("humaneval", "mbpp")) == "known: humaneval, mbpp"
    assert nearest("", ("train", "test")) == "known: train, test"
    assert nearest("smolm2", ("qwen3-8b", "smollm2")) == 'did you mean "smollm2"?'
    assert near_word("a" * 100_000, OPTIONS) is None


@settings(max_examples=200, deadline=None)
@given(st.text("abc", max_size=8), st.lists(st.text("abc", max_size=8), max_size=3, unique=True))
def test_the_nearest_by_edits_is_suggested_where_a_third_differs(
    word: str, known: list[str]
) -> None:
    near = {one: distance(word, one) for one in known
            if distance(word, one) <= max(len(word), len(one)) // 3}  # fmt: skip
    found = near_word(word, known)
    if near:
        assert found in near
        assert near[found] == min(near.values())
    elif found is not None:  # one begins with the other
        assert found.startswith(word) or word.startswith(found)
