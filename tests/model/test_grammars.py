"""Which tokens a grammar allows next, against brute force: a token is allowed if and only if some
complete text begins with the text so far and the token. Also the bytes of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
from checkpoints import tokenizer_metadata, write_gguf, write_sentencepiece, write_tokenizer
from words import EOS, WORDS, Words, allowed, grammars

from bass_cli.config.file_options import Structure
from bass_cli.errors import UserError
from bass_cli.formats.completion_text import Tags, Thinking
from bass_cli.formats.grammars import Grammars, Matcher, fill, token_bytes
from bass_cli.formats.tokenizer import Tokenizer

pytest.importorskip("llguidance")


def bits(mask: Any) -> set[int]:
    line = numpy.unpackbits(mask.view(numpy.uint8), bitorder="little")
    return set(numpy.flatnonzero(line).tolist())


def masks_of(rows: list[Any], places: int) -> list[list[set[int]]]:
    masks = numpy.full((len(rows), places, 2), -1, dtype=numpy.int32)
    fill(rows, masks)
    return [[bits(place) for place in row] for row in masks]


PATTERNS = ["(ab|é)c?", "a{1,3}", "[^a]b(a|é){0,2}", "(a|b|c){2}é?"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_allowed_tokens_are_those_of_brute_force(pattern: str) -> None:
    """In every state that tokens can reach, from masks of drafts too."""
    made, states = grammars(), [()]
    for _ in range(40):
        if not states:
            break
        tokens = states.pop(0)
        matcher = made.matcher(Structure("regex", pattern))
        matcher.advance(tokens)
        ((found,),) = masks_of([(matcher, [])], 1)
        assert found == allowed(pattern, tokens), (pattern, tokens)
        ((*_, last),) = masks_of([(made.matcher(Structure("regex", pattern)), tokens)], len(tokens) + 1)  # fmt: skip
        assert last == found
        states += [(*tokens, id_) for id_ in sorted(found - {EOS})]


def test_rows_are_independent_and_masks_after_forbidden_drafts_stay() -> None:
    made, everything = grammars(), set(range(64))
    one, other, third = (made.matcher(Structure("regex", "(ab|é)c?")) for _ in range(3))
    other.advance([2])
    rows = [(one, [0, 4, 1]), None, (other, [4, EOS, 0]), (third, [0, 99, 1])]
    found = masks_of(rows, 4)
    assert found[0] == [allowed("(ab|é)c?", ()), {1}, everything, everything]
    assert found[1] == [everything] * 4
    assert found[2] == [{4, EOS}, {EOS}, everything, everything]
    assert masks_of([(other, [])], 1) == [[{4, EOS}]]
    assert found[3] == [allowed("(ab|é)c?", ()), {1}, everything, everything]
    assert masks_of([(one, [])], 1)[0][0] == allowed("(ab|é)c?", ())  # the state is unchanged


def test_allowed_drafts_are_counted_up_to_the_first_forbidden_one() -> None:
    matcher = grammars().matcher(Structure("regex", "(ab|é)c?"))
    for drafts, count in (([2, 4, EOS], 3), ([0, 1, 0], 2), ([4], 0), ([6, 99], 1), ([], 0)):
        assert matcher.allowed(drafts) == count
    matcher.advance([0, 1])
    assert matcher.allowed([EOS]) == 1


def test_special_tokens_are_no_text() -> None:
    found = masks_of([(grammars().matcher(Structure("regex", ".{1,9}")), [])], 1)[0][0]
    assert found == {0, 1, 2, 3, 4, 5, 6, 8}


def test_a_text_may_be_tokenised_in_any_way() -> None:
    """No token is forced where the grammar fixes the text."""
    assert masks_of([(grammars().matcher(Structure("grammar", 'start: "aba"')), [])], 1)[0][0] == {0, 2, 8}  # fmt: skip


def test_a_grammar_too_complex_for_the_library_is_a_fault_of_its_row() -> None:
    matcher = grammars().matcher(Structure("regex", "a+"))
    matcher.advance([1])  # as if the grammar had allowed it
    assert matcher.fault
    assert masks_of([(matcher, [0])], 2) == [[set(range(64))] * 2]


def test_a_text_that_the_vocabulary_cannot_spell_is_a_fault_of_its_row() -> None:
    matcher = grammars().matcher(Structure("json_schema", '{"const": 1}'))
    assert masks_of([(matcher, [])], 1) == [[set(range(64))]]
    assert matcher.fault == "no token of the model continues the text in its grammar"


def test_model_without_end_token_is_refused() -> None:
    with pytest.raises(UserError, match="no end-of-sequence token"):
        Grammars(Words(), vocab=11, eos_ids=[]).matcher(Structure("regex", "a"))  # type: ignore[arg-type]


TEXTS = ('hello {"a": [1, 2.5e-3]}\n\t x', "naïve 🙂 – 你好 é ¤ ö", "   two  spaces ")


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "gguf"])
def test_bytes_of_tokens_make_up_the_text(kind: str, tmp_path: Path) -> None:
    path = tmp_path
    (write_sentencepiece if kind == "sentencepiece" else write_tokenizer)(tmp_path)
    if kind == "gguf":
        path = tmp_path / "m.gguf"
        write_gguf("llama", path, metadata=tokenizer_metadata(tmp_path))
    tokenizer = Tokenizer.load(path)
    words = token_bytes(tokenizer, tokenizer.size)
    assert all(
        words[id_] is None for id_ in (*tokenizer.special_tokens.values(), *tokenizer.eos_ids)
    )
    for text in TEXTS:
        ids = tokenizer.encode_part(text, embedded=False)
        found = b"".join(words[id_] or b"" for id_ in ids).decode()
        assert found.removeprefix(" " if kind == "sentencepiece" else "") == text


class Thinker(Words):
    """The same words, a newline, and the tags of a thinking part."""

    texts: ClassVar = Words.texts | {11: "Ċ", 12: "<t>", 13: "</t>"}
    size = 14

    def decode(self, ids: list[int]) -> str:
        words = [*WORDS, b"\n", None, None]
        return b"".join(words[id_] or b"" for id_ in ids).decode(errors="replace")


NEWLINE, BEGIN, END = 11, 12, 13
EVERYTHING = set(range(64))


def thinker(pattern: str | None, *, opened: bool, limit: int | None = None) -> Matcher:
    words: Any = Thinker()
    thinking = Thinking(Tags("<t>", "</t>", BEGIN, END, (END,)), words, opened=opened, limit=limit)
    structure = None if pattern is None else Structure("regex", pattern)
    return Grammars(words, vocab=14, eos_ids=[EOS]).matcher(structure, thinking)


THOUGHTS: list[tuple[str | None, bool, int | None, list[int], list[set[int]]]] = [
    ("ab", True, None, [3, END, NEWLINE, 0, 1],
     [EVERYTHING - {EOS}, EVERYTHING - {EOS}, {0, 2, 8, NEWLINE}, {0, 2, 8, NEWLINE}, {1}, {EOS}]),
    ("ab", False, None, [BEGIN, 3, END, 2],
     [{0, 2, 8, BEGIN}, EVERYTHING - {EOS}, EVERYTHING - {EOS}, {0, 2, 8, NEWLINE}, {EOS}]),
    ("ab", False, None, [0, 1], [{0, 2, 8, BEGIN}, {1}, {EOS}]),
    ("ab", True, 2, [3, 3, END, 0], [EVERYTHING - {EOS}, EVERYTHING - {EOS}, {END}, {0, 2, 8, NEWLINE}, {1}]),
    ("ab", False, 2, [BEGIN, 3, END], [{0, 2, 8, BEGIN}, EVERYTHING - {EOS}, {END}, {0, 2, 8, NEWLINE}]),
    ("ab", True, 0, [END, 2], [{END}, {0, 2, 8, NEWLINE}, {EOS}]),
    (None, True, 1, [3, END, 4], [EVERYTHING, {END}, EVERYTHING, EVERYTHING]),
    (None, False, 1, [BEGIN, END], [EVERYTHING, {END}, EVERYTHING]),
    (None, False, 1, [3, 4, 4], [EVERYTHING] * 4),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "opened", "limit", "tokens", "due"), THOUGHTS)
def test_grammar_begins_after_the_thinking_part_which_is_closed_at_its_limit(
    pattern: str | None, opened: bool, limit: int | None, tokens: list[int], due: list[set[int]]
) -> None:
    """After any number of generated tokens and with any number of drafts."""
    for seen in range(len(tokens) + 1):
        matcher = thinker(pattern, opened=opened, limit=limit)
        matcher.advance(tokens[:seen])
        for end in range(seen, len(tokens) + 1):
            found = masks_of([(matcher, tokens[seen:end])], end - seen + 1)[0]
            assert found == due[seen : end + 1], (seen, end)
        assert matcher.allowed(tokens[seen:]) == len(tokens) - seen


def test_drafts_are_counted_up_to_the_end_of_the_thinking_part_and_the_grammar() -> None:
    for drafts, count in (
        ([3, EOS, 0], 1),  # no end inside of the part
        ([3, END, 0, 0], 3),
        ([3, END, NEWLINE, 1], 3),
    ):
        assert thinker("ab", opened=True).allowed(drafts) == count
    assert thinker("ab", opened=True, limit=1).allowed([3, 3]) == 1
    assert thinker(None, opened=True, limit=1).allowed([EOS, END, 3]) == 3


def test_few_compiled_grammars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million prompts may have as many grammars."""
    monkeypatch.setattr("bass_cli.formats.grammars._MOST_COMPILED", 2)
    words: Any = Words()
    made = Grammars(words, vocab=len(WORDS), eos_ids=[EOS])
    kept = [made.matcher(Structure("regex", pattern)) for pattern in ("a", "b", "c", "ab", "a")]
    assert len(made._compiled) == 2
    found = masks_of([(one, []) for one in kept], 1)
    assert found == [[{0, 8}], [{1}], [{4}], [{0, 2, 8}], [{0, 8}]]
