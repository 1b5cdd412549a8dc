"""Test that near words are suggested, and only those."""

from __future__ import annotations

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
    for word in ("--min-p", "--p", "-m", "--seeds", "--device", "--samples", "--logprobs", "x"):
        assert near_word(word, OPTIONS) is None, word
    assert nearest("gsm8k", ("humaneval", "mbpp")) == "known: humaneval, mbpp"
    assert nearest("", ("train", "test")) == "known: train, test"
    assert nearest("smolm2", ("qwen3-8b", "smollm2")) == 'did you mean "smollm2"?'
    assert near_word("a" * 100_000, OPTIONS) is None
