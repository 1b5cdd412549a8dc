"""Tokenizers of GGUF files: metadata to a tokenizer of the `tokenizers` library.

Keys mean the same as in llama.cpp (src/llama-vocab.cpp at commit 0c1e570). docs/FORMATS.md lists
them, and the cases where the model's own tokenizer is followed instead. Not here: the file format
(tensor_files.py), pre-tokenizers (gguf_pretokenizers.py), which tokens end a sample (backends.py).
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from bass_cli.errors import UserError, nearest
from bass_cli.formats.backends import (
    END_ROLES,
    END_TEXTS,
    ROLE_TEXTS,
    TokenizerParts,
    end_ids,
    post_processor,
)
from bass_cli.formats.config_keys import Values, without_prefix
from bass_cli.formats.gguf_pretokenizers import PRE_TOKENIZERS, PreTokenizer
from bass_cli.formats.tensor_files import Texts, read_gguf, read_texts
from bass_cli.reading import shown

_KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_MOST_TOKENS = 1 << 21  # the largest known vocabulary has 262,144
_LONGEST = 1000  # most characters of a SentencePiece token; every place to split it is tried
_SPACE = "\u2581"  # SentencePiece's spelling of a space
_MARK = "\ufdd0"  # a code point that Unicode reserves for use inside programs
# GGUF's key for each role of a special token. Chat templates call the token ROLE_token.
_ROLES = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
    "sep": "seperator_token_id",
    "mask": "mask_token_id",
}
# Texts of tokens that llama.cpp treats as special, whatever kind the file says they are.
_CONTROL_TEXTS = {
    *END_TEXTS,
    *(text for texts in ROLE_TEXTS.values() for text in texts),
    *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
    *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
    *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
    *("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    *("<|prefix|>", "<|suffix|>", "<|middle|>"),
}
_REMEDY = 'name a folder that has the model\'s tokenizer, as "tokenizer: FOLDER" in a pair file'


def read_gguf_tokenizer(path: Path) -> TokenizerParts:
    """Read the tokenizer of a GGUF file.

    Raises:
        UserError: the file has no tokenizer, or its tokenizer is damaged or of an unknown kind.
    """
    source = _Source(path, read_gguf(path).metadata)
    model = source.text("model", "")
    if not model:
        raise UserError(
            f'{path}: key "{_KEY}model" is missing: the file has no tokenizer; {_REMEDY}'
        )
    if model not in _KINDS:
        raise source.error(
            "model",
            f"the tokenizer {shown(model)} is not supported; known: {', '.join(_KINDS)}; {_REMEDY}",
        )
    if source.numbers("suppress_tokens"):
        raise source.error("suppress_tokens", "tokens that must not be generated are not supported")
    vocabulary, kind = _vocabulary(source), _KINDS[model]
    tokenizer, add_bos = kind.build(source, vocabulary)
    roles = _roles(source, vocabulary, model)
    _add_special_tokens(tokenizer, source, vocabulary)
    _surround(tokenizer, source, vocabulary, roles, add_bos, kind.add_eos)
    named = {
        role: id_
        for role in END_ROLES
        if (id_ := roles.get(role, source.id(f"{role}_token_id", vocabulary))) is not None
    }
    special = {vocabulary.texts[id_] for id_ in vocabulary.of(_CONTROL)}
    template, for_tools = (
        text if isinstance(text := source.metadata.get(f"tokenizer.{key}"), str) and text else None
        for key in ("chat_template", "chat_template.tool_use")
    )
    return TokenizerParts(
        content=tokenizer.to_str().encode(),
        template=template,
        special={f"{role}_token": vocabulary.texts[id_] for role, id_ in roles.items()},
        eos_ids=end_ids(vocabulary.ids, special=special, named=named),
        literal=False,
        tool_template=for_tools,
    )


def notes_of_tokenizer(metadata: Mapping[str, Any]) -> list[str]:
    """Return notes for the user about uncertainties in a GGUF file's tokenizer."""
    if metadata.get(f"{_KEY}model") != "gpt2" or metadata.get(f"{_KEY}pre"):
        return []
    return [
        f'the GGUF file has no "{_KEY}pre", like files from before May 2024. The default '
        "pre-tokenizer of llama.cpp is used; it may differ from the model's own. To be sure, "
        f"{_REMEDY}"
    ]


class _Source(Values):
    """Checked access to the tokenizer's keys in a file's metadata."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]):
        super().__init__(without_prefix(metadata, _KEY), str(path), within=_KEY)
        self.path, self.metadata = path, metadata

    def numbers(self, key: str) -> list[Any]:
        return self.checked(key, [], functools.partial(_typed, list, "a list of numbers"))

    def texts(self, key: str) -> list[bytes]:
        """Return the strings of an array; UserError if it is missing."""
        if self.get(key) is None:
            raise UserError(f'{self.path}: key "{_KEY}{key}" is missing; {_REMEDY}')
        value = self.checked(key, None, functools.partial(_typed, Texts, "a list of texts"))
        if value.length > _MOST_TOKENS:
            raise self.error(key, f"it has {value.length} entries; the limit is {_MOST_TOKENS}")
        return read_texts(self.path, value)

    def id(self, key: str, vocabulary: _Vocabulary) -> int | None:
        """Return a token id; None if the key is missing or its id is not a token, as llama.cpp."""
        check = functools.partial(_typed, int, "a token id or a list of them")
        value: int = self.checked(key, -1, check)
        return value if 0 <= value < len(vocabulary.texts) else None


def _typed(kind: type, what: str, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{what} is needed, not {shown(value)}")
    return value


class _Vocabulary(NamedTuple):
    """The tokens by id.

    texts: all different.
    kinds: numbers of GGUF's `token_type`.
    """

    texts: list[str]
    kinds: list[int]

    @property
    def ids(self) -> dict[str, int]:
        """The ids by text."""
        return {text: id_ for id_, text in enumerate(self.texts)}

    def of(self, *kinds: int) -> list[int]:
        """Return the ids of these kinds, in ascending order."""
        return [id_ for id_, kind in enumerate(self.kinds) if kind in kinds]


def _vocabulary(source: _Source) -> _Vocabulary:
    raws = source.texts("tokens")
    if not raws:
        raise source.error("tokens", "there are no tokens")
    texts = [
        raw.decode("utf-8", "replace") if raw else f"[EMPTY_{id_}]" for id_, raw in enumerate(raws)
    ]
    if len(set(texts)) < len(texts):
        texts = _unique(source, raws, texts)
    kinds = source.numbers("token_type") or [_NORMAL] * len(texts)
    if len(kinds) < len(texts):
        raise source.error("token_type", f"it has {len(kinds)} entries for {len(texts)} tokens")
    kinds = [
        _CONTROL if text in _CONTROL_TEXTS and kind != _UNUSED else kind
        for text, kind in zip(texts, kinds, strict=False)
    ]
    return _Vocabulary(texts, kinds)


def _unique(source: _Source, raws: list[bytes], texts: list[str]) -> list[str]:
    """Return the texts, with a name like [INVALID_7] for each one that is not valid UTF-8.

    Raises:
        UserError: two tokens have the same text.
    """
    first = dict[bytes, int]()
    for id_, raw in enumerate(raws):
        if first.setdefault(raw, id_) != id_ and raw:
            raise source.error(
                "tokens", f"ids {first[raw]} and {id_} have the same text {shown(texts[id_])}"
            )
    return [
        text if "\ufffd" not in text or text.encode() == raw else f"[INVALID_{id_}]"
        for id_, (text, raw) in enumerate(zip(texts, raws, strict=True))
    ]


def _unknown(source: _Source, vocabulary: _Vocabulary) -> int:
    """Return the id of the unknown token; UserError if there is none."""
    id_ = source.id(_ROLES["unk"], vocabulary)
    id_ = _KINDS[str(source.text("model"))].roles["unk"] if id_ is None else id_
    if id_ >= len(vocabulary.texts):
        raise UserError(f'{source.path}: key "{_KEY}{_ROLES["unk"]}" is missing or not a token')
    return id_


def _roles(source: _Source, vocabulary: _Vocabulary, model: str) -> dict[str, int]:
    """Return the special tokens by role: the file's, else llama.cpp's defaults.

    The default of "gpt2", 11, was made for Falcon. It is used only if that token is special.
    """
    found = dict[str, int]()
    for role, key in _ROLES.items():
        id_ = source.id(key, vocabulary)
        if id_ is None:
            id_ = _KINDS[model].roles.get(role, -1)
            fits = 0 <= id_ < len(vocabulary.texts)
            if not fits or (model == "gpt2" and vocabulary.kinds[id_] != _CONTROL):
                continue
        found[role] = id_
    return found


def _add_special_tokens(tokenizer: Tokenizer, source: _Source, vocabulary: _Vocabulary) -> None:
    """Add the tokens that are matched whole in a text.

    They are control and unknown tokens, which decoding leaves out, and user-defined tokens, which
    it does not.
    """
    name = str(source.metadata.get("general.name") or "").lower()
    strips = "phi-3" in name or "phi3" in name  # as llama.cpp; there is no key for it
    tokenizer.add_tokens(
        [
            AddedToken(
                text := vocabulary.texts[id_],
                rstrip=strips and text not in ("<unk>", "<s>", "<|endoftext|>"),
                normalized=False,
                special=vocabulary.kinds[id_] != _USER_DEFINED,
            )
            for id_ in vocabulary.of(_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )


def _surround(
    tokenizer: Tokenizer,
    source: _Source,
    vocabulary: _Vocabulary,
    roles: Mapping[str, int],
    add_bos: bool,
    add_eos: bool,
) -> None:
    """Make the tokenizer put BOS and EOS around a prompt, as the file says or by these defaults."""
    around = list[list[tuple[int, str]]]()
    for role, default in (("bos", add_bos), ("eos", add_eos)):
        key = f"add_{role}_token"
        wanted = source.flag(key, default)
        used = "sep" if role == "eos" and isinstance(tokenizer.model, models.WordPiece) else role
        if wanted and used not in roles and source.metadata.get(_KEY + key):
            raise UserError(
                f'{source.path}: key "{_KEY}{key}" is true, but "{_KEY}{_ROLES[used]}" is missing '
                "or not a token"
            )
        id_ = roles.get(used) if wanted else None
        around.append([] if id_ is None else [(id_, vocabulary.texts[id_])])
    if any(around):
        template = processors.TemplateProcessing()
        # the constructor would parse "$" and ":" in a token's text
        template.__setstate__(json.dumps(post_processor(*around)).encode())
        tokenizer.post_processor = template


def _plain_decoder(*, strip: bool, fallback: bool = True) -> decoders.Decoder:
    """Return the decoder for tokens with "▁" for spaces and <0x0A> for bytes.

    Args:
        strip: whether the first space is dropped, because the encoder adds one.
        fallback: whether there are byte tokens.
    """
    parts = [decoders.Replace(_SPACE, " "), decoders.Fuse()]
    if fallback:
        parts.insert(1, decoders.ByteFallback())
    if strip:
        parts.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(parts)


def _byte_pairs(source: _Source, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Return a BPE tokenizer, and whether a prompt begins with BOS by default."""
    kind = _pre_tokenizer(source)
    unknown = source.id(_ROLES["unk"], vocabulary) if kind.plain else None
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary.ids,
            _merges(source, vocabulary),
            unk_token=None if unknown is None else vocabulary.texts[unknown],
            fuse_unk=kind.plain,
            byte_fallback=kind.plain,
            ignore_merges=kind.ignore_merges and not kind.plain,
        )
    )
    steps = [
        pre_tokenizers.Split(Regex(step), "isolated")
        if isinstance(step, str)
        else getattr(pre_tokenizers, step[0])(**step[1])
        for step in kind.steps
    ]
    if kind.plain:
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
        tokenizer.decoder = _plain_decoder(strip=False)
    else:
        if not any(step[0] == "ByteLevel" for step in kind.steps):
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        tokenizer.normalizer = normalizers.NFC() if kind.nfc else None
        tokenizer.decoder = _byte_decoder(vocabulary)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer, kind.add_bos


def _byte_decoder(vocabulary: _Vocabulary) -> decoders.Decoder:
    """Return the decoder of GPT-2's byte alphabet.

    It leaves a token with a character outside the alphabet as it is. User-defined tokens are plain
    text too, but the characters of some, such as DeepSeek's "ö", are all in the alphabet. A mark
    outside the alphabet is put before these and removed again.
    """
    letters = set(pre_tokenizers.ByteLevel.alphabet())
    texts = [vocabulary.texts[id_] for id_ in vocabulary.of(_USER_DEFINED)]
    alike = [re.escape(one) for one in texts if not one.isascii() and letters.issuperset(one)]
    if not alike:
        return decoders.ByteLevel()
    marked = decoders.Replace(Regex(rf"\A(?=(?:{'|'.join(alike)})\z)"), _MARK)
    return decoders.Sequence([marked, decoders.ByteLevel(), decoders.Replace(_MARK, "")])


def _pre_tokenizer(source: _Source) -> PreTokenizer:
    name = "gemma4" if source.text("model") == "gemma4" else source.text("pre", "") or "default"
    if name not in PRE_TOKENIZERS:
        raise source.error(
            "pre",
            f"the pre-tokenizer {shown(name)} is unknown; "
            f"{nearest(name, PRE_TOKENIZERS)}; {_REMEDY}",
        )
    return PRE_TOKENIZERS[name]


def _merges(source: _Source, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return the pairs of tokens to merge, in the order of their ranks."""
    known, found = set(vocabulary.texts), dict[tuple[str, str], None]()
    for rank, raw in enumerate(source.texts("merges")):
        text = raw.decode("utf-8", "replace")
        cut = text.find(" ", 1)
        left, right = text[:cut], text[cut + 1 :]
        if cut < 0 or left not in known or right not in known or left + right not in known:
            raise source.error(
                "merges", f"entry {rank}, {shown(text)}, is not two tokens that make a third"
            )
        found.setdefault((left, right))
    return list(found)


def _scores(source: _Source, vocabulary: _Vocabulary) -> list[float]:
    scores = source.numbers("scores")
    if len(scores) < len(vocabulary.texts):
        raise source.error(
            "scores", f"it has {len(scores)} entries for {len(vocabulary.texts)} tokens"
        )
    if wrong := [score for score in scores if not math.isfinite(score)]:
        raise source.error("scores", f"{wrong[0]} is not a finite number")
    return [float(score) for score in scores]


def _sentencepiece(source: _Source, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Return SentencePiece's BPE: the pair whose result has the highest score is merged first."""
    scores = _scores(source, vocabulary)
    pieces = {vocabulary.texts[id_]: id_ for id_ in vocabulary.of(0, _NORMAL, _USER_DEFINED)}
    if (longest := max(map(len, pieces), default=0)) > _LONGEST:
        raise source.error("tokens", f"a token has {longest} characters; the limit is {_LONGEST}")
    ranked = [
        (-scores[id_], pieces[text[:cut]], pieces[text[cut:]], text[:cut], text[cut:])
        for text, id_ in pieces.items()
        for cut in range(1, len(text))
        if text[:cut] in pieces and text[cut:] in pieces
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary.ids,
            [pair[3:] for pair in sorted(ranked)],
            unk_token=vocabulary.texts[_unknown(source, vocabulary)],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = source.flag("add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence(_spaces(prefix))
    tokenizer.decoder = _plain_decoder(strip=prefix)
    return tokenizer, True


def _spaces(prefix: bool) -> list[normalizers.Normalizer]:
    before = [normalizers.Prepend(_SPACE)] if prefix else []
    return [*before, normalizers.Replace(" ", _SPACE)]


def _unigram(source: _Source, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Return SentencePiece's unigram model: the split of a text with the largest sum of scores."""
    scores = _scores(source, vocabulary)
    least = min((scores[id_] for id_ in vocabulary.of(_NORMAL)), default=0.0)
    pieces = [
        (text, score if kind == _NORMAL else 0.0 if kind == _USER_DEFINED else least)
        for text, score, kind in zip(vocabulary.texts, scores, vocabulary.kinds, strict=False)
    ]
    fallback = bool(vocabulary.of(_BYTE))
    tokenizer = Tokenizer(models.Unigram(pieces, _unknown(source, vocabulary), fallback))
    steps = list[normalizers.Normalizer]()
    if charsmap := source.numbers("precompiled_charsmap"):
        steps.append(normalizers.Precompiled(bytes(one & 0xFF for one in charsmap)))
    if source.flag("remove_extra_whitespaces", False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    prefix = source.flag("add_space_prefix", False)
    tokenizer.normalizer = normalizers.Sequence([*steps, *_spaces(prefix)])
    tokenizer.decoder = _plain_decoder(strip=prefix, fallback=fallback)
    return tokenizer, False


def _word_piece(source: _Source, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Return BERT's WordPiece, and change the texts of the tokens to BERT's.

    GGUF puts "▁" before pieces that begin a word; BERT puts "##" before the others.
    """
    for id_ in vocabulary.of(_NORMAL):
        text = vocabulary.texts[id_]
        whole = text.startswith(_SPACE) and text != _SPACE
        vocabulary.texts[id_] = text.removeprefix(_SPACE) if whole else f"##{text}"
    unknown = vocabulary.texts[_unknown(source, vocabulary)]
    tokenizer = Tokenizer(models.WordPiece(vocabulary.ids, unk_token=unknown))
    lower = source.flag("normalizer.lowercase", True)
    tokenizer.normalizer = normalizers.BertNormalizer(
        strip_accents=source.flag("normalizer.strip_accents", lower), lowercase=lower
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer, True


class _Kind(NamedTuple):
    """A value of `tokenizer.ggml.model`.

    build: returns the tokenizer, and whether a prompt begins with BOS if the file does not say.
    roles: ids of special tokens that the file does not name.
    add_eos: whether a prompt ends with EOS if the file does not say.
    """

    build: Callable[[_Source, _Vocabulary], tuple[Tokenizer, bool]]
    roles: Mapping[str, int]
    add_eos: bool = False


_KINDS = {
    "gpt2": _Kind(_byte_pairs, {"bos": 11, "eos": 11}),
    "gemma4": _Kind(_byte_pairs, {}),
    "llama": _Kind(_sentencepiece, {"bos": 1, "eos": 2, "unk": 0}),
    "t5": _Kind(_unigram, {"eos": 1, "unk": 2, "pad": 0}, add_eos=True),
    "bert": _Kind(
        _word_piece, {"bos": 101, "unk": 100, "sep": 102, "pad": 0, "mask": 103}, add_eos=True
    ),
}
