"""Folders with tokenizer.model and no tokenizer.json. The reference is the `sentencepiece` package
itself, which also trains the models."""

from __future__ import annotations

import functools
import io
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from sentencepiece import SentencePieceProcessor
from thinned import thinned

from bass_cli.errors import UserError
from bass_cli.formats.backends import saved
from bass_cli.formats.completion_text import Continuation, StopDetector
from bass_cli.formats.tokenizer import Tokenizer

CORPUS = ["the cat sat on the mat, then the other cat sat there.", "def f(x): return x if x else y",
          "  a   b c naïve Ａｂｃ ㍿ ﬁ", "  \t tabs \t\t and    spaces"] * 20  # fmt: skip
PIECES = ["the", " ", "  ", "    ", "\n", "\t", "cat", "é", "e\u0301", "🙂", "▁", "<u>", "中文", "\u3000", "ﬁ", "㍿",
          "\x00", "\u200b", "<ctl>", "123", "def f(x)", "\u0344", "<0x41>", "'", "a"]  # fmt: skip


@functools.cache
def train(kind: str = "bpe", *, fallback: bool = True, **options: Any) -> bytes:
    """A model's content, with a user-defined symbol, a control symbol and pieces of spaces."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, model_type=kind, byte_fallback=fallback,
        vocab_size=330 if fallback else 70, hard_vocab_limit=False, minloglevel=2,
        user_defined_symbols=["<u>", "  "], control_symbols=["<ctl>"],
        allow_whitespace_only_pieces=True, **options)  # fmt: skip
    return model.getvalue()


def write(folder: Path, model: bytes, **config: Any) -> Tokenizer:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(model)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder)


def texts(count: int) -> list[str]:
    rng = random.Random(4)
    return ["", " ", "  ", *("".join(rng.choices(PIECES, k=rng.randint(0, 10))) for _ in range(count))]  # fmt: skip


BOTH = (True, False)
OPTIONS = list(itertools.product(("bpe", "unigram"), BOTH, BOTH, BOTH))
# In `make test` each two values meet.
PAIRS = (
    ("bpe", True, True, True),
    ("bpe", False, False, False),
    ("unigram", True, False, False),
    ("unigram", False, True, False),
    ("unigram", False, False, True),
)


def test_each_two_options_meet() -> None:
    for one, other in itertools.combinations(range(4), 2):
        assert len({(case[one], case[other]) for case in PAIRS}) == 4


@pytest.mark.parametrize(("kind", "fallback", "prefix", "trim"), thinned(OPTIONS, PAIRS))
def test_ids_and_texts_are_those_of_sentencepiece(
    tmp_path: Path, kind: str, fallback: bool, prefix: bool, trim: bool
) -> None:
    for name in ("nmt_nfkc", "identity"):
        model = train(kind, fallback=fallback, add_dummy_prefix=prefix, remove_extra_whitespaces=trim,
                      normalization_rule_name=name)  # fmt: skip
        own, ours = SentencePieceProcessor(model_proto=model), write(tmp_path / name, model)
        for text in texts(40):
            ids = own.encode(text)
            assert ours.encode_part(text) == ids, text
            assert ours.encode(text) == [own.bos_id(), *ids]
            assert ours.decode(ids) == own.decode([id_ for id_ in ids if id_ != own.unk_id()])
        assert (ours.eos_ids, ours.size) == ((own.eos_id(),), own.get_piece_size())
        assert ours.texts == {i: own.id_to_piece(i) for i in range(own.get_piece_size())}


@pytest.mark.parametrize(("config", "before", "after"), [
    ({}, [1], []), ({"add_bos_token": False}, [], []), ({"add_eos_token": True}, [1], [2]),
    ({"bos_token": None}, [], []), ({"eos_token": "<u>", "add_eos_token": True}, [1], [4]),
    ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": None}, [1], []),
])  # fmt: skip
def test_bos_and_eos_are_added_as_configured(
    tmp_path: Path, config: dict[str, Any], before: list[int], after: list[int]
) -> None:
    own = SentencePieceProcessor(model_proto=train())
    assert [own.piece_to_id(text) for text in ("<s>", "</s>", "<u>")] == [1, 2, 4]
    ours = write(tmp_path, train(), **config)
    assert ours.encode("the cat") == [*before, *own.encode("the cat"), *after]
    assert ours.encode("") == [*before, *after]


@pytest.mark.parametrize("legacy", [True, False, None])
@pytest.mark.parametrize("older", [True, False])
def test_added_tokens_split_a_text(tmp_path: Path, legacy: bool | None, older: bool) -> None:
    """Each part is read by sentencepiece; with `legacy` false only the first gets a prefix."""
    model = train(normalization_rule_name="identity", remove_extra_whitespaces=False)
    own, size = (
        SentencePieceProcessor(model_proto=model),
        len(SentencePieceProcessor(model_proto=model)),
    )
    bare = (
        SentencePieceProcessor(model_proto=model + b"\x1a\x02\x18\x00") if legacy is False else own
    )
    if older:
        (tmp_path / "added_tokens.json").write_text(
            json.dumps({"<|im|>": size, "<tool>": size + 2})
        )
        (tmp_path / "special_tokens_map.json").write_text(
            '{"additional_special_tokens": ["<|im|>"]}'
        )
        config = {}
    else:
        config = {"added_tokens_decoder": {
            "1": {"content": "<s>", "special": True}, str(size): {"content": "<|im|>", "special": True},
            str(size + 2): {"content": "<tool>", "special": False}}}  # fmt: skip
    ours = write(tmp_path, model, **config, legacy=legacy)
    ids = ours.encode("the<|im|>cat <tool> a<s>the")
    first, *rest = "the", "cat ", " a", "the"
    parts = [own.encode(first), *map(bare.encode, rest)]
    marks = [[size], [size + 2], [1], []]
    assert ids == [
        1,
        *(id_ for part, mark in zip(parts, marks, strict=True) for id_ in part + mark),
    ]
    prefix = "" if legacy is False else " "  # that of a part after a special token, left out
    assert ours.decode(ids) == f"the{prefix}cat <tool> a{prefix}the"
    assert ours.decode([*own.encode("the cat"), size, size + 2, 10**6]) == "the cat<tool>"
    assert (ours.size, ours.spelled(size + 2), ours.spelled(size + 1)) == (size + 3, "<tool>", "")


def test_the_configuration_may_rename_a_placeholder(tmp_path: Path) -> None:
    ours = write(
        tmp_path, train(), added_tokens_decoder={"3": {"content": "<new>", "special": False}}
    )
    assert ours.encode("<new>") == [1, 3]
    assert (ours.decode([3]), ours.texts[3]) == ("<new>", "<new>")


def test_special_tokens_are_matched_unless_split_special_tokens(tmp_path: Path) -> None:
    own = SentencePieceProcessor(model_proto=train())
    ours = write(tmp_path, train(), split_special_tokens=True)
    assert ours.encode("</s>") == [1, *own.encode("</s>")]
    assert write(tmp_path, train()).encode("</s>") == [1, 2]


def test_a_continuation_and_its_stops(tmp_path: Path) -> None:
    """The space at its beginning stays, and a stop is found token by token."""
    model = train(normalization_rule_name="identity", remove_extra_whitespaces=False)
    own, ours = SentencePieceProcessor(model_proto=model), write(tmp_path, model)
    text = "the cat é🙂  sat there. the"
    ids = own.encode(text)
    for at in range(1, len(ids)):
        before = own.decode(ids[:at])
        if "\ufffd" not in before:
            assert Continuation(ours, ids[:at]).decode(ids[at:]) == text[len(before) :]
    continuation = Continuation(ours, ids[:1])
    detector = StopDetector(continuation, ["🙂  s"])
    stop = next(found for id_ in ids[1:] if (found := detector.feed([id_])) is not None)
    assert stop.text == " cat é"


@pytest.mark.parametrize(
    "config", [{}, {"legacy": False, "add_eos_token": True, "split_special_tokens": True}]
)
def test_a_saved_tokenizer_is_the_same(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "added_tokens.json").write_text('{"<tool>": 400}')
    ours = write(tmp_path / "one", train(), **config)
    file = saved(ours.cached.content)
    named = {**file.settings, **ours.cached.special, "split_special_tokens": ours.cached.literal}
    assert file.name == "tokenizer.model"
    assert write(tmp_path / "two", file.content, **named).cached == ours.cached


@pytest.mark.parametrize(("config", "said"), [
    ({"tokenizer_class": "XLMRobertaTokenizer"}, "may number the pieces"),
    ({"auto_map": {"AutoTokenizer": ["own.Own", None]}}, "code of the model's own .*own.Own"),
    ({"legacy": "no"}, 'key "legacy": true or false'),
])  # fmt: skip
def test_other_classes_are_refused(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        write(tmp_path, train(), **config)


@pytest.mark.parametrize("model", [b"", b"no model", b"\x0a" * 100, train()[:-7]])
def test_a_damaged_model_is_a_one_line_error(tmp_path: Path, model: bytes) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.model: not a SentencePiece model"):
        write(tmp_path, model)
