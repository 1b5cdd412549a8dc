"""Stop texts: where a sample ends, by definition, whatever the sizes of its blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import transformers
from test_tokenizer import tokenizer  # noqa: F401
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from bass_cli.formats.completion_text import Stop, StopDetector
from bass_cli.formats.tokenizer import Tokenizer


def by_definition(tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str]) -> Stop | None:
    """Return the shortest prefix whose text has a stop text, cut at the first one."""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end])
        places = [(place, len(stop), stop) for stop in stops if (place := text.find(stop)) >= 0]
        if places:
            place, _, stop = min(places)
            return Stop(text[:place], end, stop)
    return None


def in_blocks(
    tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str], sizes: random.Random
) -> Stop | None:
    detector, at = StopDetector(tokenizer, stops), 0
    while at < len(ids):
        block = ids[at : at + sizes.randint(1, 9)]
        found = detector.feed(block)
        if found is not None:
            return found
        at += len(block)
    return None


@pytest.mark.parametrize(
    "stops", [["sat"], ["\n\n", "cat sat on the mat"], ["🙂"], ["é–"], ["at", "cat"], ["zz"]]
)
def test_stops_by_definition_in_any_blocks(tokenizer: Tokenizer, stops: list[str]) -> None:
    """With random texts of words, split characters, lone bytes and special tokens, in blocks of any
    size."""
    rng = random.Random(7)
    pieces = [
        "the cat",
        " sat",
        " on the mat",
        "\n",
        "🙂",
        "é–",
        " zebra",
        "c",
        "a",
        "t",
        "z",
        ", ",
    ]
    found = 0
    for _ in range(120):
        ids = tokenizer.encode("".join(rng.choices(pieces, k=rng.randint(1, 60))))
        for _ in range(rng.randint(0, 4)):
            ids.insert(rng.randint(0, len(ids)), rng.choice([0, 2, *range(3, 259)]))
        wanted = by_definition(tokenizer, ids, stops)
        assert in_blocks(tokenizer, ids, stops, rng) == wanted
        found += wanted is not None
    assert found > 10


def test_a_stop_across_blocks_and_within_a_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a cat sat there")
    texts = [tokenizer.decode([id_]) for id_ in ids]
    end = next(n for n in range(1, len(ids) + 1) if "t s" in "".join(texts[:n]))
    detector = StopDetector(tokenizer, ["t s"])
    assert detector.feed(ids[: end - 1]) is None
    assert detector.feed(ids[end - 1 :]) == Stop("a ca", end, "t s")
    assert tokenizer.decode(ids[:end])[: len("a ca")] == "a ca"


def test_a_long_stop_late_in_a_long_text(tokenizer: Tokenizer) -> None:
    """Its tokens come one by one, when the tail that is decoded no longer begins with the text."""
    stop = "cat sat on the mat, then the other cat"
    before = "sat on the mat, then the other " * 40
    ids = tokenizer.encode(before + stop + " sat there")
    detector = StopDetector(tokenizer, [stop])
    found = next(found for id_ in ids if (found := detector.feed([id_])) is not None)
    assert found == by_definition(tokenizer, ids, [stop])
    assert found.text == before


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer like Llama 2's: the first space is dropped, and unknown characters are runs of
    byte tokens that decode only if the whole run is valid. So a decoded text can shrink as ids
    come."""
    vocab = {"<unk>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4, "</s>": 5}
    vocab |= {f"<0x{byte:02X}>": 6 + byte for byte in range(256)}
    inner = Backend(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    folder = tmp_path_factory.mktemp("fallback")
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>").save_pretrained(
        folder
    )
    return Tokenizer.load(folder)


@pytest.mark.parametrize("stops", [["\n"], [" a", "ab a"], ["é"], ["b\n"], ["a b"]])
def test_stops_where_decoding_is_not_concatenation(fallback: Tokenizer, stops: list[str]) -> None:
    rng = random.Random(3)
    newline, accent = [6 + 0x0A], [6 + 0xC3, 6 + 0xA9]
    assert fallback.decode([2, *newline]) == "a\n"
    assert "\n" not in fallback.decode([2, *newline, accent[0]])  # hidden until the run is complete
    found = 0
    for _ in range(150):
        runs = rng.choices(
            [[1], [2], [3], [4], newline, accent, accent[:1], [6 + 0xFF], [5]], k=rng.randint(1, 50)
        )
        ids = [id_ for run in runs for id_ in run]
        wanted = by_definition(fallback, ids, stops)
        assert in_blocks(fallback, ids, stops, rng) == wanted
        found += wanted is not None
    assert found > 10


def test_only_a_tail_is_decoded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work for a token does not grow with the length of the sample."""
    ids = tokenizer.encode("the cat sat on the mat, " * 300)
    decoded: list[int] = []
    original = tokenizer.decode

    def counted(some: Sequence[int]) -> str:
        decoded.append(len(some))
        return original(some)

    monkeypatch.setattr(tokenizer, "decode", counted)
    detector = StopDetector(tokenizer, ["never", "nor this"])
    assert all(detector.feed([id_]) is None for id_ in ids)
    assert max(decoded) < 150
    assert sum(decoded) < 100 * len(ids)
