"""Tokenizers of GGUF files against independent readers: llama.cpp's ids (stored), the pipelines of
published tokenizer.json files in the `tokenizers` library, and sentencepiece."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
from checkpoints import write_checkpoint, write_gguf
from llama_cpp_ids import TEXTS, byte_level, with_ends, write
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from bass_cli.errors import UserError
from bass_cli.formats.gguf_pretokenizers import PRE_TOKENIZERS
from bass_cli.formats.gguf_tokenizer import notes_of_tokenizer, read_gguf_tokenizer
from bass_cli.formats.tensor_files import Texts, read_gguf, read_texts
from bass_cli.formats.tokenizer import Tokenizer

STORED = json.loads((Path(__file__).parent / "data" / "llama_cpp.json").read_text())
# The published tokenizer.json splits digits in another way than llama.cpp; see PUBLISHED.
OTHERWISE = {"falcon", "deepseek-llm"}
# llama.cpp's matchers differ from the published patterns in texts with combining marks (they are
# letters to the patterns), with capitals within words, and with U+3000 (a space to llama.cpp).
MARKS, CASES, IDEO = "\u0301", "fooBar", "\u3000"
UNLIKE = {
    "tekken": (MARKS,), "gpt-4o": (MARKS,), "llama4": (MARKS,), "kanana2": (MARKS,), "talkie": (MARKS,),
    "minimax-m2": (MARKS,), "youtu": (CASES,), "tiny_aya": (CASES,), "cohere2moe": (CASES,),
    "kimi-k2": (MARKS, CASES), "deepseek-coder": (IDEO,),
}  # fmt: skip
LLAMA_CPP = [
    pytest.param(name, group["found"], id=name)
    for group in STORED["groups"]
    for name in group["names"]
    if name not in OTHERWISE
]


def backend_of(path: Path) -> Backend:
    return Backend.from_buffer(read_gguf_tokenizer(path).content)


@pytest.mark.parametrize(("pre", "found"), LLAMA_CPP)
def test_byte_level_ids_are_those_of_llama_cpp(
    pre: str, found: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path / "m.gguf", byte_level(STORED, pre))
    backend = backend_of(tmp_path / "m.gguf")
    for text, ids in zip(STORED["texts"], found["ids"], strict=True):
        if not any(part in text for part in UNLIKE.get(pre, ())):
            assert backend.encode(text, add_special_tokens=False).ids == ids, text
        assert backend.decode(backend.encode(text, add_special_tokens=False).ids) == text
    assert backend.encode("x").ids[0] == 0 if found["add_bos"] else backend.encode("").ids == []


def test_stored_ids_cover_every_byte_level_pre_tokenizer() -> None:
    assert STORED["texts"] == list(TEXTS)
    stored = {name for group in STORED["groups"] for name in group["names"]}
    assert stored == {name for name, kind in PRE_TOKENIZERS.items() if not kind.plain}


def split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def byte_step(*, cut: bool) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut)


DIGITS = pre_tokenizers.Digits(individual_digits=True)
HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# From tokenizer.json of falcon-7b, command-r-v01, Qwen2, deepseek-coder-6.7b and Mistral-Nemo.
PUBLISHED: dict[str, tuple[Any, list[Any]]] = {
    "falcon": (
        None,
        [
            pre_tokenizers.Punctuation("contiguous"),
            byte_step(cut=True),
            pre_tokenizers.Digits(individual_digits=False),
            split("[0-9][0-9][0-9]"),
        ],
    ),
    "command-r": (normalizers.NFC(), [DIGITS, byte_step(cut=True)]),
    "qwen2": (
        normalizers.NFC(),
        [
            split(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+"
                r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            byte_step(cut=False),
        ],
    ),
    "deepseek-coder": (
        None,
        [
            split("[\r\n]"),
            split(r"\s?\p{L}+"),
            split(r"\s?\p{P}+"),
            split(HAN),
            DIGITS,
            byte_step(cut=False),
        ],
    ),
    "gpt-4o": (
        None,
        [
            split(
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
                r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|"
                r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            byte_step(cut=False),
        ],
    ),
    "tekken": (
        None,
        [
            split(
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
                r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            byte_step(cut=False),
        ],
    ),
}


@pytest.mark.parametrize("pre", PUBLISHED)
def test_byte_level_ids_are_those_of_the_published_pipeline(pre: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", byte_level(STORED, pre))
    normalizer, steps = PUBLISHED[pre]
    merges = [tuple(merge.split(" ")) for merge in STORED["merges"]]
    vocab = {text: id_ for id_, text in enumerate(STORED["tokens"])}
    own = Backend(models.BPE(vocab, merges, ignore_merges=pre == "tekken"))
    own.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if normalizer is not None:
        own.normalizer = normalizer
    backend = backend_of(tmp_path / "m.gguf")
    for text in (*TEXTS, "e\u0301 cafe\u0301", "it'\u017f 12ab", " 12 123 ²³ x² 한"):
        ids = own.encode(text, add_special_tokens=False).ids
        assert backend.encode(text, add_special_tokens=False).ids == ids, text


def test_a_token_that_no_merges_make_is_found_only_with_ignore_merges(tmp_path: Path) -> None:
    """Llama 3 and Tekken have such tokens."""
    whole = STORED["tokens"].index("Ġwhole")
    for pre, found in (("llama-bpe", True), ("tekken", True), ("gpt-2", False), ("qwen2", False)):
        write(tmp_path / "m.gguf", byte_level(STORED, pre))
        assert (whole in backend_of(tmp_path / "m.gguf").encode("a whole").ids) is found


@pytest.mark.parametrize("flag", [None, True, False])
@pytest.mark.parametrize(
    ("pre", "usual"), [("llama-bpe", True), ("tekken", True), ("gpt-2", False)]
)
def test_bos_follows_the_flag_or_else_the_pre_tokenizer(
    pre: str, usual: bool, flag: bool | None, tmp_path: Path
) -> None:
    fields = byte_level(STORED, pre)
    if flag is not None:
        fields |= {"add_bos_token": flag, "add_eos_token": flag}
    write(tmp_path / "m.gguf", fields)
    ids = backend_of(tmp_path / "m.gguf").encode("print(1)").ids
    assert (ids[0] == 0) is (usual if flag is None else flag)
    assert (ids[-1] == 1) is bool(flag)


def test_add_bos_token_without_a_bos_token_is_refused(tmp_path: Path) -> None:
    fields = byte_level(STORED, "gpt-2") | {"add_bos_token": True}
    del fields["bos_token_id"]
    write(tmp_path / "m.gguf", fields)
    with pytest.raises(UserError, match=r'"tokenizer.ggml.bos_token_id" is missing'):
        read_gguf_tokenizer(tmp_path / "m.gguf")


@pytest.mark.parametrize("kind", [1, 3, 4])
def test_tokens_outside_the_byte_alphabet_are_found_whole(kind: int, tmp_path: Path) -> None:
    """`kind`: normal, control, user-defined. llama.cpp takes the second for a control token by its
    text, whatever its kind."""
    texts = ["<｜User｜>", "<｜end▁of▁sentence｜>", "<think>", "  \t", "naïve™"]
    fields = with_ends(STORED, texts, kind)
    first = len(STORED["tokens"])
    write(tmp_path / "m.gguf", fields)
    backend = backend_of(tmp_path / "m.gguf")
    found = range(first, first + 5) if kind != 1 else [first + 1]
    for id_ in found:
        text = texts[id_ - first]
        assert backend.encode(f"a{text}b{text}").ids.count(id_) == 2
    hidden = set(found) if kind == 3 else {first + 1}
    for at, text in enumerate(texts):
        assert backend.id_to_token(first + at) == text
        expected = "" if first + at in hidden else text
        if text != "naïve™" or kind != 1:  # a normal token is spelled in bytes
            assert backend.decode([first + at]) == expected


def test_user_defined_tokens_of_byte_letters_decode_to_their_text(tmp_path: Path) -> None:
    """DeepSeek's files have "ö" and others as user-defined tokens. llama.cpp decodes them as they
    are; a byte-level decoder would take "ö" for the byte 0xF6."""
    fields = with_ends(STORED, ["÷Á", "Ġé", "(é)"], 4)
    letter, first = fields["tokens"].index("ö"), len(STORED["tokens"])
    fields["token_type"][letter] = 4
    write(tmp_path / "m.gguf", fields)
    tokenizer = Tokenizer.load(tmp_path / "m.gguf")
    for text in ("wörld ÷Á", "aĠéb(é)", "é Ġ (é", "Ã¶ öö"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    for id_, text in zip(
        (letter, first, first + 1, first + 2), ("ö", "÷Á", "Ġé", "(é)"), strict=True
    ):
        assert tokenizer.decode([id_]) == text


def test_special_tokens_of_a_template_are_the_texts_in_the_file(tmp_path: Path) -> None:
    fields = with_ends(STORED, ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"], 3)
    size = len(fields["tokens"])
    fields |= {"bos_token_id": size - 2, "eos_token_id": size - 1, "padding_token_id": size + 5}
    write(tmp_path / "m.gguf", fields)
    parts = read_gguf_tokenizer(tmp_path / "m.gguf")
    assert parts.special == {
        "bos_token": "<｜begin▁of▁sentence｜>",
        "eos_token": "<｜end▁of▁sentence｜>",
    }
    assert parts.eos_ids == (size - 1,)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown pre": ({"pre": "qwen3"}, r'\'qwen3\' is unknown; did you mean "qwen35"\?.*tokenizer: FOLDER'),
    "strange pre": ({"pre": "zzzz"}, r"'zzzz' is unknown; known: default, .*tokenizer: FOLDER"),
    "model": ({"model": "plamo2"}, r"the tokenizer 'plamo2' is not supported; known: gpt2, .*FOLDER"),
    "no model": ({"model": None}, r'"tokenizer.ggml.model" is missing'),
    "no tokens": ({"tokens": None}, r'"tokenizer.ggml.tokens" is missing'),
    "no merges": ({"merges": None}, r'"tokenizer.ggml.merges" is missing'),
    "one word": ({"merges": ["a b", "ab"]}, r"entry 0, 'a b', is not two tokens"),
    "twice": ({"tokens": ["a"] * 3}, r"ids 0 and 1 have the same text"),
    "kinds": ({"token_type": [1]}, r'"tokenizer.ggml.token_type": it has 1 entries for'),
    "flag": ({"add_bos_token": 1}, r"true or false is needed, not 1"),
    "suppressed": ({"suppress_tokens": [1, 2]}, r"tokens that must not be generated"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_values_are_refused_by_name(name: str, tmp_path: Path) -> None:
    changes, message = REFUSED[name]
    fields = {**byte_level(STORED, "gpt-2"), **changes}
    write_raw(tmp_path / "m.gguf", {key: one for key, one in fields.items() if one is not None})
    with pytest.raises(UserError, match=message) as refused:
        read_gguf_tokenizer(tmp_path / "m.gguf")
    assert str(refused.value).startswith(f"{tmp_path / 'm.gguf'}: ")


def write_raw(path: Path, fields: dict[str, Any]) -> None:
    """Like `write`, for files without tokens too."""
    write(path, {"tokens": ["a"], **fields}) if "tokens" in fields else _without_tokens(
        path, fields
    )


def _without_tokens(path: Path, fields: dict[str, Any]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in fields.items():
        writer.add_key_value(f"tokenizer.ggml.{key}", value, gguf.GGUFValueType.get_type(value))
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_missing_pre_tokenizer_is_llama_cpps_default(tmp_path: Path) -> None:
    fields = byte_level(STORED, "default")
    write(tmp_path / "named.gguf", fields)
    del fields["pre"]
    write(tmp_path / "m.gguf", fields)
    one, other = (read_gguf_tokenizer(tmp_path / f"{name}.gguf") for name in ("m", "named"))
    assert one.content == other.content
    notes = [
        notes_of_tokenizer(read_gguf(tmp_path / f"{name}.gguf").metadata) for name in ("m", "named")
    ]
    assert [len(listed) for listed in notes] == [1, 0]
    assert "tokenizer.ggml.pre" in notes[0][0]


def test_tokens_with_empty_or_invalid_text_keep_their_ids(tmp_path: Path) -> None:
    fields = with_ends(STORED, ["AAAAAAA1", "AAAAAAA2", "", "AAAAAAA3"], 1)
    size = len(fields["tokens"])
    write(tmp_path / "m.gguf", fields)
    raw = (tmp_path / "m.gguf").read_bytes()
    for name in (b"AAAAAAA1", b"AAAAAAA2"):
        raw = raw.replace(name, b"A\xff\xfeAAAA" + (b"\xff" if name[-1:] == b"1" else b"\xfe"))
    (tmp_path / "m.gguf").write_bytes(raw)
    where = read_gguf(tmp_path / "m.gguf").metadata["tokenizer.ggml.tokens"]
    assert isinstance(where, Texts)
    assert read_texts(tmp_path / "m.gguf", where)[size - 4 : size - 2] == [
        b"A\xff\xfeAAAA\xff",
        b"A\xff\xfeAAAA\xfe",
    ]
    backend = backend_of(tmp_path / "m.gguf")
    assert backend.get_vocab_size() == size
    assert backend.id_to_token(size - 2) == f"[EMPTY_{size - 2}]"
    assert backend.id_to_token(size - 1) == "AAAAAAA3"


@pytest.mark.parametrize(("texts", "kind", "ends"), STORED["ends"])
def test_a_file_ends_where_llama_cpp_ends(
    texts: list[str], kind: int, ends: list[int], tmp_path: Path
) -> None:
    write(tmp_path / "m.gguf", with_ends(STORED, texts, kind))
    assert list(read_gguf_tokenizer(tmp_path / "m.gguf").eos_ids) == ends


def test_an_html_tag_that_is_ordinary_text_ends_no_sample(tmp_path: Path) -> None:
    """Qwen's and Gemma's vocabularies have </s> as text; llama.cpp ends there."""
    write(tmp_path / "m.gguf", with_ends(STORED, ["</s>"], 1))
    assert read_gguf_tokenizer(tmp_path / "m.gguf").eos_ids == (1,)
    write(tmp_path / "m.gguf", with_ends(STORED, ["</s>"], 3))
    assert read_gguf_tokenizer(tmp_path / "m.gguf").eos_ids == (1, len(STORED["tokens"]))


def test_tokens_that_a_file_names_as_ends_end_a_sample(tmp_path: Path) -> None:
    fields = with_ends(STORED, ["<one>", "<two>", "<three>", "<|fim_pad|>", "<|repo_name|>"], 3)
    size = len(STORED["tokens"])
    fields |= {"eot_token_id": size, "eom_token_id": size + 1, "fim_pad_token_id": size + 2}
    write(tmp_path / "m.gguf", fields)
    # "<|fim_pad|>" is no end, because the file names another token for that role
    assert read_gguf_tokenizer(tmp_path / "m.gguf").eos_ids == (
        1,
        size,
        size + 1,
        size + 2,
        size + 4,
    )


def test_a_folder_and_a_gguf_file_of_one_model_end_alike(tmp_path: Path) -> None:
    texts = ["<|im_end|>", "<|endoftext|>", "<|fim_pad|>", "</s>"]
    merges = [tuple(merge.split(" ")) for merge in STORED["merges"]]
    vocab = {text: id_ for id_, text in enumerate(STORED["tokens"])}
    own = Backend(models.BPE(vocab, merges))
    own.pre_tokenizer, own.decoder = byte_step(cut=True), decoders.ByteLevel()
    own.add_special_tokens([AddedToken(text, normalized=False) for text in texts[:2]])
    own.add_tokens([AddedToken(text, normalized=False) for text in texts[2:]])
    folder = tmp_path / "folder"
    write_checkpoint("llama", folder)
    PreTrainedTokenizerFast(
        tokenizer_object=own, bos_token="<s>", eos_token="<end>"
    ).save_pretrained(folder)
    fields = with_ends(STORED, texts, 3)
    fields["token_type"][-2:] = [4, 4]
    write(tmp_path / "m.gguf", fields)
    ends = Tokenizer.load(tmp_path / "m.gguf").eos_ids
    size = len(STORED["tokens"])
    assert ends == (1, size, size + 1, size + 2)
    assert Tokenizer.load(folder).eos_ids == ends


SPM_TEXTS = (
    *TEXTS, " def f(x):", "  two", "a  b   c    d", "\tx\n\n\n  y ", "▁▁x", "e\u0301", "<u> <u>x <u>", "ﬁ ① Ａ",
)  # fmt: skip
CORPUS = [
    "the cat sat on the mat, then the other cat sat there", "def f(x):\n    return x if x else y",
    "for i in range(12):        f(i)  # 12345", "a  b   c    d", "Hello world, it's 2024!", "naïve café",
]  # fmt: skip


def trained(**options: Any) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 8),
        model_writer=model,
        vocab_size=options.pop("vocab_size", 400),
        hard_vocab_limit=False,
        minloglevel=2,
        user_defined_symbols=["<u>"],
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_fields(model: sentencepiece.SentencePieceProcessor, kind: str) -> dict[str, Any]:
    """As llama.cpp's converter writes them."""
    kinds: list[tuple[Callable[[int], bool], int]] = [
        (model.IsUnknown, 2),
        (model.IsControl, 3),
        (model.IsByte, 6),
    ]
    ids = range(model.vocab_size())
    texts = [model.IdToPiece(id_) for id_ in ids]
    types = [next((number for test, number in kinds if test(id_)), 1) for id_ in ids]
    types[texts.index("<u>")] = 4
    return {
        "model": kind, "tokens": texts, "scores": [float(model.GetScore(id_)) for id_ in ids],
        "token_type": types, "unknown_token_id": model.unk_id(), "bos_token_id": model.bos_id(),
        "eos_token_id": model.eos_id(),
    }  # fmt: skip


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_bpe_ids_and_spaces_are_sentencepieces_own(
    prefix: bool, tmp_path: Path
) -> None:
    model = trained(
        model_type="bpe", byte_fallback=True, add_dummy_prefix=prefix,
        remove_extra_whitespaces=False, normalization_rule_name="identity",
        allow_whitespace_only_pieces=True,
    )  # fmt: skip
    fields = sentencepiece_fields(model, "llama")
    write(tmp_path / "m.gguf", fields | ({} if prefix else {"add_space_prefix": False}))
    backend = backend_of(tmp_path / "m.gguf")
    for text in SPM_TEXTS:
        if "<u>" in text and prefix:
            continue  # llama.cpp adds a space after a user-defined token too, like transformers once
        ids = model.EncodeAsIds(text)
        assert backend.encode(text, add_special_tokens=False).ids == ids, text
        assert backend.encode(text).ids == [model.bos_id(), *ids]
        assert backend.decode(ids) == text.replace("▁", " ")


@pytest.mark.parametrize("squeeze", [True, False])
@pytest.mark.parametrize("fallback", [True, False])
def test_unigram_ids_are_sentencepieces_own(squeeze: bool, fallback: bool, tmp_path: Path) -> None:
    model = trained(
        model_type="unigram", vocab_size=330 if fallback else 90, byte_fallback=fallback,
        remove_extra_whitespaces=squeeze,
        normalization_rule_name="nmt_nfkc",
    )  # fmt: skip
    fields = sentencepiece_fields(model, "t5") | {
        "add_space_prefix": True,
        "remove_extra_whitespaces": squeeze,
        "precompiled_charsmap": list(charsmap_of(model)),
    }
    write(tmp_path / "m.gguf", fields)
    backend = backend_of(tmp_path / "m.gguf")
    for text in SPM_TEXTS:
        if "<u>" in text or not text.strip():
            continue  # see above; an empty text has no prefix
        if "\r" in text and not squeeze:
            continue  # `tokenizers` normalises \r\n as one character; see docs/FORMATS.md
        ids = model.EncodeAsIds(text)
        assert backend.encode(text).ids == [*ids, model.eos_id()], text


def charsmap_of(model: sentencepiece.SentencePieceProcessor) -> bytes:
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model.serialized_model_proto())
    return bytes(proto.normalizer_spec.precompiled_charsmap)


def test_gemma4_is_bpe_on_plain_text(tmp_path: Path) -> None:
    """The pipeline of Gemma's tokenizer.json."""
    tokens = ["<unk>", "<bos>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = ["▁", "a", "b", "\n", "▁a", "▁▁", "\n\n", "ab", "▁ab"]
    merges = ["▁ a", "▁ ▁", "\n \n", "a b", "▁ ab"]
    tokens += letters
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(letters)]
    write(
        tmp_path / "m.gguf",
        {"model": "gemma4", "tokens": tokens, "token_type": kinds, "merges": merges,
         "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0},
    )  # fmt: skip
    own = Backend(
        models.BPE(
            {text: id_ for id_, text in enumerate(tokens)},
            [("▁", "a"), ("▁", "▁"), ("\n", "\n"), ("a", "b"), ("▁", "ab")],
            unk_token="<unk>", fuse_unk=True, byte_fallback=True,
        )
    )  # fmt: skip
    own.normalizer = normalizers.Replace(" ", "▁")
    backend = backend_of(tmp_path / "m.gguf")
    for text in ("ab a  ab", " \n\n\nab", "é\t🙂 b", ""):
        ids = own.encode(text).ids
        assert backend.encode(text).ids == [1, *ids]
        assert backend.decode(ids) == text


def test_word_pieces_are_berts(tmp_path: Path) -> None:
    pieces = ["▁the", "▁cat", "s", "▁s", "at", ",", "▁,"]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *pieces]
    write(
        tmp_path / "m.gguf",
        {"model": "bert", "tokens": tokens, "token_type": [3, 2, 3, 3, *[1] * len(pieces)],
         "unknown_token_id": 1, "bos_token_id": 2, "seperator_token_id": 3, "padding_token_id": 0},
    )  # fmt: skip
    backend = backend_of(tmp_path / "m.gguf")
    # [CLS] the cat ##s , s ##at [UNK] [SEP]
    assert backend.encode("The cats, sat dog").ids == [2, 4, 5, 6, 10, 7, 8, 1, 3]


def test_reading_a_gguf_tokenizer_needs_no_transformers(tmp_path: Path) -> None:
    import subprocess
    import sys

    write_gguf("llama", tmp_path / "m.gguf", vocab_size=len(STORED["tokens"]), metadata={
        f"tokenizer.ggml.{key}": value for key, value in byte_level(STORED, "qwen2").items()
    })  # fmt: skip
    code = (
        "import sys, pathlib; from bass_cli.formats.tokenizer import Tokenizer; "
        f"Tokenizer.load(pathlib.Path({str(tmp_path / 'm.gguf')!r})).encode('x'); "
        "print('transformers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"XDG_CACHE_HOME": str(tmp_path), "PATH": ""},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "False\n"
