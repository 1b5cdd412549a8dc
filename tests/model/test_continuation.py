"""The text of a completion: its first space and bytes at its border with the prompt stay as they
are in the whole text, in results and for stop texts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from checkpoints import sentencepiece_metadata, write_gguf, write_sentencepiece, write_tokenizer
from drawing import Scheduler
from test_scheduler import job, prompts
from test_stop_texts import by_definition, in_blocks
from toys import Guess, Markov, loop_for

from bass_cli.config.job import load_pair
from bass_cli.formats.completion_text import Continuation, Stop, StopDetector, StopTokens
from bass_cli.formats.sources import locate
from bass_cli.formats.tokenizer import Tokenizer
from bass_cli.io.results import Completion
from bass_cli.lengths.controllers import Fixed
from bass_cli.run.tasks import EndRule

CODE = "def f(x):\n    return x\n"
TEXTS = [CODE, "the cat  sat", "the\n\n\n  안녕 🙂é\n if", "é\né 안", "if    x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sentencepiece")
    write_sentencepiece(place)
    return place


@pytest.fixture(scope="module", params=["tokenizer.json", "gguf"])
def tokenizer(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tokenizer]:
    if request.param != "gguf":
        yield Tokenizer.load(folder)
        return
    metadata = sentencepiece_metadata(folder)
    place = tmp_path_factory.mktemp("gguf")
    write_gguf(
        "llama",
        place / "model.gguf",
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        metadata=metadata,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place))
        yield Tokenizer.load(place / "model.gguf")


def test_the_tokenizer_drops_a_first_space(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.encode(CODE)
    assert tokenizer.texts[ids[4]] == "▁▁▁▁"
    assert tokenizer.decode(ids[4:]) == "   return x\n"


@pytest.mark.parametrize("text", TEXTS)
def test_a_completion_is_the_rest_of_the_whole_text_wherever_it_begins(
    tokenizer: Tokenizer, text: str
) -> None:
    ids = tokenizer.encode(text)
    for at in range(1, len(ids)):
        before = tokenizer.decode(ids[:at])
        if "\ufffd" not in before:  # a prompt does not end in half a character
            assert Continuation(tokenizer, ids[:at]).decode(ids[at:]) == text[len(before) :]


def test_half_a_character_after_a_prompt_that_ends_in_bytes(tokenizer: Tokenizer) -> None:
    """Decoded in one run with the prompt's bytes, it would make these unreadable and move the
    boundary."""
    for ending in ("\n", "é", "안🙂"):
        after = Continuation(tokenizer, tokenizer.encode("the" + ending))
        accent = [3 + byte for byte in "é".encode()]
        assert after.decode(accent[:1]) == "\ufffd"
        assert after.decode(accent) == "é"
        assert after.decode([]) == ""


def test_after_a_prompt_without_text_the_completion_begins_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the cat")
    for prompt in ([], [1], [1, 1]):
        assert Continuation(tokenizer, prompt).decode(ids[1:]) == "the cat"
    assert Continuation(tokenizer, [*ids[:2], 1, 1]).decode(ids[1:]) == " the cat", (
        "special tokens are not text"
    )


STOPS = [
    [" return"],
    ["    return"],
    ["x\n"],
    ["é"],
    ["\n\n", " the"],
    ["안"],
    ["\ufffd"],
    ["\ufffd\ufffd"],
]


@pytest.mark.parametrize("stops", STOPS)
def test_stop_texts_are_searched_after_the_prompt_only(
    tokenizer: Tokenizer, stops: list[str]
) -> None:
    rng, prompt, found = random.Random(5), tokenizer.encode("def f(x):\n"), 0
    runs = (
        [tokenizer.encode(text)[1:] for text in TEXTS]
        + [[3 + byte] for byte in "é안\n".encode()]
        + [[2], [1]]
    )
    after = Continuation(tokenizer, prompt)
    for _ in range(60):
        ids = [id_ for run in rng.choices(runs, k=rng.randint(1, 12)) for id_ in run]
        wanted = by_definition(after, ids, stops)
        assert in_blocks(after, ids, stops, rng) == wanted
        assert fed_through_the_filter(after, ids, stops, rng) == wanted
        found += wanted is not None
    assert found > 10


@pytest.mark.parametrize("stops", [[" sat"], ["\n\n", "cat sat"], ["🙂"], ["é\n"], ["at", "cat"]])
def test_the_filter_changes_no_result_for_byte_level_tokenizers(
    stops: list[str], tmp_path: Path
) -> None:
    """With lone bytes, characters of several ids, and special tokens between them."""
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    rng, found = random.Random(6), 0
    texts = (*TEXTS, "the cat sat", "🙂", "é\n", "\n\n", " sat on") * 30
    runs = [tokenizer.encode(text) for text in texts]
    runs += [[id_] for id_ in range(tokenizer.size)]
    after = Continuation(tokenizer, tokenizer.encode("def f(x):\n"))
    for _ in range(150):
        ids = [id_ for run in rng.choices(runs, k=rng.randint(1, 12)) for id_ in run]
        wanted = by_definition(after, ids, stops)
        assert fed_through_the_filter(after, ids, stops, rng) == wanted
        found += wanted is not None
    assert found > 10


def test_a_sample_without_a_stop_text_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if an id may complete a stop text after other ids. Each id is decoded once in a job, and
    a text with a stop text once."""
    tokenizer = Tokenizer.load(locate(load_pair("smollm2").target, folder=None))
    decoded = list[int]()
    decode = tokenizer.decode

    def counted(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return decode(ids)

    monkeypatch.setattr(tokenizer, "decode", counted)
    after = Continuation(tokenizer, tokenizer.encode("def f(x):"))
    watch = EndRule({0}, ["\ndef", "\nclass"])
    ids = tokenizer.encode("\n    self = first(ff, ss)\n    return self\n") * 3
    for row in range(4):
        detector = watch.detector(after)
        assert detector is not None
        assert watch.stop_tokens is not None
        watch.stop_tokens.among(numpy.array(ids))
        decoded.clear()
        assert all(detector.feed([id_]) is None for id_ in ids)
        assert row == 0 or decoded == []
    (newline, name) = tokenizer.encode("\ndef")
    assert detector.feed([newline]) is None
    decoded.clear()
    assert detector.feed([name]) == Stop(decode(ids), len(ids) + 2, "\ndef")
    assert sum(length > 3 for length in decoded) == 1


def fed_through_the_filter(
    after: Continuation, ids: list[int], stops: list[str], rng: random.Random
) -> Stop | None:
    """Feed the detector, which decodes only blocks with an id that passes the filter."""
    tokens, seen, at = StopTokens(after, stops), 0, 0
    detector = StopDetector(after, stops, tokens if rng.random() < 0.8 else None)
    while at < len(ids):
        at, first = min(at + rng.randint(1, 6), len(ids)), at
        if tokens.among(numpy.array(ids[first:at])).any():
            found = detector.feed(ids[seen:at])
            seen = at
            if found is not None:
                return found
    return None


def test_few_ids_pass_the_filter(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the cat sat there\n    if x return\n")[1:]
    after = Continuation(tokenizer, tokenizer.encode("def f(x):\n"))
    marked = StopTokens(after, [" sat"]).among(numpy.array(ids))
    assert any(marked)
    assert marked.mean() < 0.5


def test_a_stop_text_in_a_long_run_of_bytes(tokenizer: Tokenizer) -> None:
    """The decoded tail must not begin inside a character, which would hide the whole run with its
    stop text."""
    for lead in range(24):
        text = "é" * lead + "안" * 60
        ids = [3 + byte for byte in f"{text}\n안".encode()]
        detector = StopDetector(Continuation(tokenizer, tokenizer.encode("the")), ["\n"])
        found = next(found for id_ in ids if (found := detector.feed([id_])) is not None)
        assert found == Stop(text, len(text.encode()) + 1, "\n")


def generated(tokenizer: Tokenizer, prompt: str, text: str, **settings: Any) -> list[Completion]:
    """Return the samples of a model that generates `text` after the prompt and then ends."""
    whole = [*tokenizer.encode(prompt + text), 2]
    assert whole[: len(tokenizer.encode(prompt))] == tokenizer.encode(prompt)
    table = torch.zeros(len(whole), 1, tokenizer.size)
    for at, following in enumerate(whole[1:]):
        table[at, 0, following] = 50.0
    loop = loop_for(
        Markov(table.expand(-1, tokenizer.size, -1), 1),
        Guess(tokenizer.size),
        rows=2,
        lengths=Fixed(2),
    )
    scheduler = Scheduler(
        job(n=2, temperature=0.0, **settings), tokenizer, loop, context=1000, eos_ids={2}
    )
    return list(scheduler.run(iter(prompts(prompt)), ()))


@pytest.mark.parametrize(("stop", "text", "reason"), [
    ((), "    return x\n  "
         "é안\n", "eos"), (("\n  é",), "    return x", "stop"), (("  return",), "  ", "stop"),
    (("안",), "    return x\n  é", "stop"), ((" return", "    r"), "", "stop"),
])  # fmt: skip
def test_samples_keep_their_first_spaces(
    tokenizer: Tokenizer, stop: Sequence[str], text: str, reason: str
) -> None:
    found = generated(
        tokenizer, "def f(x):\n", "    return x\n  é안\n", stop=tuple(stop), max_new_tokens=60
    )
    assert [(one.text, one.finish_reason) for one in found] == [(text, reason)] * 2


def test_truncated_samples_keep_their_first_spaces(tokenizer: Tokenizer) -> None:
    cut = generated(tokenizer, "def f(x):\n", "    return x\n", max_new_tokens=2)
    assert {(one.text, one.finish_reason) for one in cut} == {("    re", "length")}


@pytest.mark.parametrize("character", ["é", "안", "🙂"])
def test_half_a_character_at_the_end_hides_no_others(tokenizer: Tokenizer, character: str) -> None:
    """A limit or a deadline may end a sample there. Plain decoding would make the whole run of
    bytes unreadable."""
    last, shown = character.encode(), "안녕\n"
    for count in range(1, len(last)):
        limit = len(shown.encode()) + count
        cut = generated(tokenizer, "the", f"{shown}{character}", max_new_tokens=limit)
        assert {(one.text, one.finish_reason) for one in cut} == {(f"{shown}\ufffd", "length")}
    stopped = generated(tokenizer, "the", f"{shown}{character}", max_new_tokens=limit, stop=("\n",))
    assert {(one.text, one.finish_reason) for one in stopped} == {("안녕", "stop")}


def test_only_one_token_of_the_prompt_is_decoded(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tokenizer.encode("the cat sat there\n" * 300)
    decoded: list[int] = []
    original = tokenizer.decode
    monkeypatch.setattr(
        tokenizer, "decode", lambda some: decoded.append(len(some)) or original(some)
    )
    detector = StopDetector(Continuation(tokenizer, ids), ["never"])
    assert max(decoded) <= 2
    decoded.clear()
    assert all(detector.feed([id_]) is None for id_ in ids[1:200])
    assert max(decoded) < 150
