"""Tokenizers of hub folders. The reference is the `tokenizers` library on the same tokenizer.json,
with its own post-processor; what the other files add is defined by hand."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from checkpoints import write_sentencepiece, write_tokenizer
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from bass_cli.errors import UserError
from bass_cli.formats.completion_text import Continuation
from bass_cli.formats.tokenizer import Tokenizer

PIECES = ["the", " cat", "  ", "\n", "\t", " 12345", "é", "e\u0301", "🙂", "▁", "don't", "I'LL", "中文", "\u3000", "ﬁ", "X",
          "<s>", "</s>", "<pad>", " == ", "\u200b", "", "x" * 9, "\r\n", "१२"]  # fmt: skip
SPLIT = Regex(r"\p{N}{1,3}|[^\s\p{N}]+|\s+(?!\S)|\s+")


def texts(count: int = 60) -> list[str]:
    rng = random.Random(7)
    return ["".join(rng.choices(PIECES, k=rng.randint(0, 9))) for _ in range(count)]


def byte_level(*before: Any, normalizer: Any = None, ignore_merges: bool = False) -> Any:
    """A byte-level BPE with 299 ids of which some words are only reached by `ignore_merges`."""
    inner = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not before)
    inner.pre_tokenizer = pre_tokenizers.Sequence([*before, level])
    inner.decoder = decoders.ByteLevel()
    if normalizer is not None:
        inner.normalizer = normalizer
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=299,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["the cat sat 12345 on the mat, don't the cat"] * 4, trainer)
    content = json.loads(inner.to_str())
    content["model"]["vocab"]["Ġ12345"] = 300
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def word_pieces() -> Any:
    vocabulary = ["[UNK]", "<s>", "</s>", "the", "cat", "##t", "x", "##x", "1", "##2", "don", "'"]
    inner = tokenizers.Tokenizer(
        models.WordPiece({text: id_ for id_, text in enumerate(vocabulary)}, unk_token="[UNK]")
    )
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return inner


def unigram() -> Any:
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁the", -1.0), ("▁", -2.0), ("cat", -2.5), ("▁c", -3.0),
              *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]  # fmt: skip
    inner = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    inner.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    inner.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Metaspace(prepend_scheme="first")]
    )
    return inner


def pieces() -> Any:
    """As CodeQwen: "▁", bytes, a prefix and <s>."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        write_sentencepiece(Path(folder))
        return tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")


def with_limits() -> Any:
    """A truncation and a padding that would cut and fill prompts."""
    inner = byte_level()
    inner.enable_truncation(3)
    inner.enable_padding(pad_token="<pad>", pad_id=0, length=40)
    return inner


KINDS: dict[str, Any] = {
    "digits apart": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True)),
    "own pattern": lambda: byte_level(pre_tokenizers.Split(SPLIT, "isolated")),
    "nfc": lambda: byte_level(normalizer=normalizers.NFC()),
    "lower": lambda: byte_level(normalizer=normalizers.Lowercase()),
    "ignore merges": lambda: byte_level(ignore_merges=True),
    "pieces": pieces,
    "unigram": unigram,
    "word pieces": word_pieces,
    "limits": with_limits,
}
# model_type and tokenizer_class, of published models and others
CLASSES = [("qwen2", "PreTrainedTokenizerFast"), ("llama", "LlamaTokenizerFast"), ("llama", "LlamaTokenizer"),
           ("qwen2", "Qwen2Tokenizer"), ("starcoder2", "GPT2Tokenizer"), ("gemma3_text", "GemmaTokenizer"),
           ("llama", "TokenizersBackend"), ("gpt2", None), ("llama", "NoSuchTokenizer"), ("qwen3", 3)]  # fmt: skip


def write(folder: Path, inner: Any, config: dict[str, Any], model: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps(model))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_are_those_of_tokenizer_json(kind: str, tmp_path: Path) -> None:
    """Whatever class the other files name."""
    classes = CLASSES if kind in ("pieces", "ignore merges") else CLASSES[:1]
    for number, (family, name) in enumerate(classes):
        folder = tmp_path / str(number)
        config = {"tokenizer_class": name} if name is not None else {}
        write(folder, KINDS[kind](), {**config, "eos_token": "</s>"}, {"model_type": family})
        own = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        own.no_truncation()
        own.no_padding()
        if kind in ("unigram", "word pieces", "pieces"):  # </s> is not special there
            own.add_special_tokens(["</s>"])
        ours = Tokenizer.load(folder)
        for text in texts(60 if number == 0 else 8):
            ids = own.encode(text).ids
            assert ours.encode(text) == ids, text
            assert ours.encode_part(text) == own.encode(text, add_special_tokens=False).ids
            assert ours.decode(ids) == own.decode(ids)
        assert (ours.eos_ids, ours.size) == ((2,), 1 + max(own.get_vocab().values()))


@pytest.mark.parametrize("kind", ["digits apart", "pieces", "unigram", "word pieces"])
def test_a_continuation_is_the_rest_of_the_whole_text(kind: str, tmp_path: Path) -> None:
    """Token by token, with every decoder: the text after a prompt is what the whole has after the
    prompt's own."""
    write(tmp_path, KINDS[kind](), {"eos_token": "</s>"}, {})
    own = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ours, compared = Tokenizer.load(tmp_path), 0
    for text in ("the cat the", "the cat  the cat x", "the é🙂 cat"):
        ids = own.encode(text, add_special_tokens=False).ids
        for at in range(1, len(ids)):
            prompt, rest = own.decode(ids[:at]), own.decode(ids)
            if "\ufffd" not in prompt and rest.startswith(prompt):
                assert Continuation(ours, ids[:at]).decode(ids[at:]) == rest[len(prompt) :]
                compared += 1
    assert compared >= 8


def test_importing_transformers_is_not_needed(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    import subprocess
    import sys

    code = (
        "import sys; from pathlib import Path; from bass_cli.formats.tokenizer import Tokenizer\n"
        "Tokenizer.load(Path(sys.argv[1])).encode('a')\n"
        "print({'transformers', 'torch', 'sentencepiece'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    assert subprocess.check_output(command, text=True).strip() == "set()"


# BOS and EOS

TEMPLATE = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}}  # fmt: skip
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
# class, post-processor, flags, ids before and after
RULES: list[tuple[str, str | None, Any, dict[str, Any], list[int], list[int]]] = [
    ("DeepSeek", "LlamaTokenizerFast", BYTES, {"add_bos_token": True, "add_eos_token": False}, [1], []),
    ("Llama 2", "LlamaTokenizer", TEMPLATE, {"add_bos_token": True, "add_eos_token": False}, [1], []),
    ("Llama 3", "PreTrainedTokenizerFast", {"type": "Sequence", "processors": [BYTES, TEMPLATE]}, {}, [1], []),
    ("Phi-3", "LlamaTokenizer", TEMPLATE, {"add_bos_token": False}, [], []),
    ("Qwen2", "Qwen2Tokenizer", BYTES, {"add_bos_token": False}, [], []),
    ("with an end", "LlamaTokenizerFast", TEMPLATE, {"add_eos_token": True}, [1], [2]),
    ("an older class that has no flags", "PreTrainedTokenizerFast", TEMPLATE, {"add_eos_token": True}, [1], []),
    ("no flags", "LlamaTokenizer", BYTES, {}, [], []),
    ("null", "LlamaTokenizer", TEMPLATE, {"add_bos_token": None}, [1], []),
    ("no class", None, None, {"add_bos_token": True}, [1], []),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "processor", "flags", "before", "after"),
    [row[1:] for row in RULES],
    ids=[row[0] for row in RULES],
)
def test_bos_and_eos_are_added_as_configured(
    tmp_path: Path,
    kind: str | None,
    processor: Any,
    flags: dict[str, Any],
    before: list[int],
    after: list[int],
) -> None:
    """As transformers 4 reads these classes, with which the models were published."""
    inner = byte_level()
    content = json.loads(inner.to_str()) | {"post_processor": processor}
    named = {"tokenizer_class": kind} if kind else {}
    config = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}}
    write(tmp_path, tokenizers.Tokenizer.from_str(json.dumps(content)), config | named | flags, {})
    ours = Tokenizer.load(tmp_path)
    for text in ("the cat", "", "a"):
        part = inner.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == [*before, *part, *after]
        assert ours.encode_part(text) == part


def test_a_flag_that_is_not_a_boolean_is_refused(tmp_path: Path) -> None:
    write(tmp_path, byte_level(), {"add_bos_token": "yes", "bos_token": "<s>"}, {})
    with pytest.raises(UserError, match=r'tokenizer_config.json: key "add_bos_token": .*\'yes\''):
        Tokenizer.load(tmp_path)


def test_the_models_end_ids_are_used_if_the_tokenizer_names_none(tmp_path: Path) -> None:
    write(tmp_path, byte_level(), {}, {"bos_token_id": 1, "eos_token_id": [2, 0]})
    ours = Tokenizer.load(tmp_path)
    assert ours.cached.special == {"bos_token": "<s>", "eos_token": "</s>"}
    assert ours.eos_ids == (2,)
    write(
        tmp_path,
        byte_level(),
        {"bos_token": None, "eos_token": "<pad>"},
        {"bos_token_id": 1, "eos_token_id": 2},
    )
    assert Tokenizer.load(tmp_path).cached.special == {"eos_token": "<pad>"}


# Tokens


@pytest.mark.parametrize("inner", [byte_level, unigram])
def test_tokens_of_the_configuration_get_their_ids(tmp_path: Path, inner: Any) -> None:
    size = 301 if inner is byte_level else 263
    last = size + (4 if inner is byte_level else 2)  # a list of pieces has no gaps
    added = {
        str(size): {"content": "<|im_start|>", "special": True, "lstrip": False, "rstrip": False},
        str(size + 1): {"content": "<tool>", "special": False},
        str(last): {"content": "<|im_end|>", "special": True, "rstrip": True},
    }
    write(tmp_path, inner(), {"added_tokens_decoder": added, "eos_token": "<|im_end|>"}, {})
    ours = Tokenizer.load(tmp_path)
    own = inner()

    def part(text: str) -> list[int]:
        ids: list[int] = own.encode(text, add_special_tokens=False).ids
        return ids

    got = ours.encode_part("<|im_start|>the<tool>the<|im_end|>  ")
    if inner is byte_level:
        assert got == [size, *part("the"), size + 1, *part("the"), last]
    else:
        assert [id_ for id_ in got if id_ >= size] == [size, size + 1, last]
    tag = (2,) if inner is byte_level else ()  # "</s>" ends a sample too if it is special
    assert (ours.eos_ids, ours.size) == ((*tag, last), last + 1)
    assert ours.decode([size, size + 1, last]) == "<tool>"


def test_added_tokens_json_and_the_map_of_older_folders(tmp_path: Path) -> None:
    write(tmp_path, byte_level(), {}, {})
    (tmp_path / "added_tokens.json").write_text('{"<new>": 301, "<|end|>": 302}')
    special = {"eos_token": {"content": "<|end|>"}, "additional_special_tokens": ["<pad>"]}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    ours = Tokenizer.load(tmp_path)
    assert ours.encode("<new><|end|>") == [301, 302]
    assert ours.eos_ids == (2, 302)  # "</s>" too: it is special in tokenizer.json
    assert ours.decode([301, 302, 0]) == "<new>"


def test_tokenizer_json_wins_where_the_files_differ(tmp_path: Path) -> None:
    added = {
        "5": {"content": "<wrong>", "special": True},
        "77": {"content": "<s>", "special": True},
    }
    write(tmp_path, byte_level(), {"added_tokens_decoder": added, "pad_token": "[NONE]"}, {})
    own = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.load(tmp_path)
    for text in ("<wrong>", "<s>the", "[NONE]"):
        assert ours.encode(text) == own.encode(text).ids
    assert ours.size == 301


def test_a_word_that_the_configuration_names_becomes_special(tmp_path: Path) -> None:
    """A chat template writes its text, and the token itself has none."""
    inner = byte_level()
    the = inner.token_to_id("the")
    write(tmp_path, inner, {"eos_token": "the"}, {})
    ours = Tokenizer.load(tmp_path)
    assert (ours.encode("xthex").count(the), ours.decode([the])) == (1, "")
    write(tmp_path, inner, {"eos_token": "</s>", "split_special_tokens": True}, {})
    assert 2 not in Tokenizer.load(tmp_path).encode("</s>")


# Chat templates


@pytest.mark.parametrize(("config", "files", "wanted"), [
    ({"chat_template": "config"}, {}, "config"),
    ({"chat_template": [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "list"}]}, {}, "list"),
    ({"chat_template": {"default": "named", "rag": "x"}}, {}, "named"),
    ({"chat_template": "config"}, {"chat_template.jinja": "file"}, "file"),
    ({}, {"chat_template.json": '{"chat_template": "json"}'}, "json"),
    ({"chat_template": "config"}, {"additional_chat_templates/rag.jinja": "x"}, "config"),
    ({}, {"chat_template.jinja": "file", "additional_chat_templates/rag.jinja": "x"}, "file"),
    ({"chat_template": [{"name": "tool_use", "template": "tools"}]}, {}, None),
    ({}, {}, None), ({"chat_template": ""}, {}, None),
])  # fmt: skip
def test_the_default_chat_template(
    tmp_path: Path, config: dict[str, Any], files: dict[str, str], wanted: str | None
) -> None:
    write(tmp_path, byte_level(), config, {})
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert Tokenizer.load(tmp_path).cached.template == wanted


@pytest.mark.parametrize(("name", "content", "said"), [
    ("tokenizer_config.json", '{"chat_template": 3}', 'key "chat_template": a text is needed'),
    ("tokenizer_config.json", "[]", "a JSON object is needed"),
    ("special_tokens_map.json", "{", "broken JSON"),
    ("added_tokens.json", '{"<x>": "1"}', "token '<x>': '1' is not an id"),
    ("tokenizer_config.json", '{"added_tokens_decoder": {"x": "y"}}', "key \"added_tokens_decoder\": 'x' is not"),
])  # fmt: skip
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: str, said: str) -> None:
    write(tmp_path, byte_level(), {}, {})
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=rf"{name}: {said}"):
        Tokenizer.load(tmp_path)


def test_a_chat_template_with_half_of_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    write(tmp_path, byte_level(), {"chat_template": "a \ud800"}, {})
    with pytest.raises(UserError, match="the chat template holds half of a surrogate pair"):
        Tokenizer.load(tmp_path)


# Other formats


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_vocabulary_and_merges_are_read_by_their_class(tmp_path: Path, kind: str) -> None:
    """Reference: the library's own byte-level BPE, and with it the NFC and pattern of Qwen2."""
    content = json.loads(byte_level().to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(content["vocab"]))
    merges = [" ".join(merge) for merge in content["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    config = {"tokenizer_class": kind, "eos_token": "</s>", "unk_token": None, "pad_token": "<pad>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer.load(tmp_path)
    own = tokenizers.Tokenizer(models.BPE(content["vocab"], [*map(tuple, content["merges"])]))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "GPT2Tokenizer")
    own.pre_tokenizer = level
    if kind == "Qwen2Tokenizer":
        pattern = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        own.pre_tokenizer = pre_tokenizers.Sequence([split, level])
        own.normalizer = normalizers.NFC()
    own.add_special_tokens(["</s>", "<pad>"])
    for text in texts():
        if "<s>" not in text:
            assert ours.encode(text) == own.encode(text).ids, text


@pytest.mark.parametrize("name", ["tekken.json", "qwen.tiktoken", "tokenizer.model", None])
def test_unsupported_formats_are_refused_with_the_remedy(tmp_path: Path, name: str | None) -> None:
    """Llama 3's tokenizer.model is a vocabulary of tiktoken."""
    if name is not None:
        (tmp_path / name).write_text("IQ== 0\nIg== 1\n")
    with pytest.raises(UserError, match=r'"tokenizer" in a pair file') as error:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert name is None or name in str(error.value)


def test_a_tokenizer_saved_by_transformers_is_the_same(tmp_path: Path) -> None:
    """Saved by transformers, with names of its own for special tokens."""
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        additional_special_tokens=["the"], extra_special_tokens={"image_token": "<img>"},
    )  # fmt: skip
    fast.save_pretrained(tmp_path)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(tmp_path)
    assert ours.cached.special == theirs.special_tokens_map
    for text in texts(20):
        assert ours.encode(text) == theirs(text)["input_ids"]
