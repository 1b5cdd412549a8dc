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


def test_a_word_with_one_edit_finds_its_option() -> None:
    for option in ("--max-new-tokens", "--temperature", "--prompt-column", "--stop", "--pair"):
        for at in range(2, len(option)):
            before, after = option[:at], option[at:]
            swapped = after[1:2] + after[:1] + after[2:]
            for word in (after[1:], "x" + after[1:], "x" + after, swapped):
                assert near_word(before + word, OPTIONS) == option, before + word


def test_the_nearest_of_several_is_suggested() -> None:
    assert near_word("--drafts", ("--draft-length", "--draft", "--device")) == "--draft"
    assert near_word("xsun", ("humaneval", "mbpp", "xsum")) == "xsum"
    assert near_word("tempratur", ("temp", "temperature", "top_p")) == "temperature"
