"""What every reader of a tokenizer returns, and the two libraries that encode and decode with it.

The libraries are `tokenizers` for the format of tokenizer.json and `sentencepiece` for
tokenizer.model. Both backends have the methods of tokenizers.Tokenizer that tokenizer.py calls.
SentencePiece models are not converted, so ids are those of the `sentencepiece` package. Also the
ids that end a sample, by one rule for all formats. Not here: which files are read
(hub_tokenizer.py, gguf_tokenizer.py), limits of time and memory (limits.py).
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

_MARK = b'{"sentencepiece": '
_TEXT = 2**32 - 1  # the splitter's id for everything that is not an added token
# A second normalizer_spec (field 3) with add_dummy_prefix (field 3) false. Parsers of protocol
# buffers merge repeated messages, so this changes that one field.
_WITHOUT_PREFIX = b"\x1a\x02\x18\x00"


class TokenizerParts(NamedTuple):
    """The parts of one tokenizer, in the same form for all file formats.

    content: the tokenizer in the format of tokenizer.json, as the `tokenizers` library reads it,
        or a SentencePiece model with its added tokens (sentencepiece_content).
    template: the chat template, or None.
    special: special tokens by name (`bos_token`, ...), as chat templates use them.
    eos_ids: ids that end a sample, in ascending order; empty if the files name none.
    literal: whether special tokens inside a text are encoded as ordinary text.
    tool_template: the chat template for conversations with tools, if it is another one.
    """

    content: bytes
    template: str | None
    special: dict[str, str]
    eos_ids: tuple[int, ...]
    literal: bool
    tool_template: str | None = None


class Ids(NamedTuple):
    """A replacement for tokenizers.Encoding with the one field that is used."""

    ids: list[int]


def load_backend(content: bytes) -> Any:
    """Return the tokenizer of TokenizerParts.content; padding and truncation are off."""
    if content.startswith(_MARK):
        return SentencePieceBackend(json.loads(content))
    import tokenizers

    backend = tokenizers.Tokenizer.from_buffer(content)
    backend.no_truncation()
    backend.no_padding()
    return backend


def sentencepiece_content(
    model: bytes,
    *,
    added: Sequence[dict[str, Any]],
    before: Sequence[int],
    after: Sequence[int],
    prefix_once: bool,
) -> bytes:
    """Return TokenizerParts.content for a SentencePiece model.

    Args:
        model: the content of tokenizer.model.
        added: tokens that are matched in a text before the model encodes the rest, with the fields
            of tokenizer.json's `added_tokens`. They may rename ids of the model.
        before, after: ids that are put around a prompt.
        prefix_once: whether only the beginning of a text gets the model's dummy prefix; else
            every part between added tokens gets it.
    """
    facts = {"sentencepiece": base64.b64encode(model).decode(), "added_tokens": list(added)}
    more = {"before": list(before), "after": list(after), "prefix_once": prefix_once}
    return json.dumps(facts | more).encode()


class Saved(NamedTuple):
    """The files of a tokenizer in a folder: one file, and keys of tokenizer_config.json."""

    name: str
    content: bytes
    settings: dict[str, Any]


def saved(content: bytes) -> Saved:
    """Return the file and keys from which hub_tokenizer.py reads this TokenizerParts.content."""
    if not content.startswith(_MARK):
        return Saved("tokenizer.json", content, {"tokenizer_class": "PreTrainedTokenizerFast"})
    facts = json.loads(content)
    tokens = {
        str(one["id"]): {k: v for k, v in one.items() if k != "id"} for one in facts["added_tokens"]
    }
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": bool(facts["before"]),
        "add_eos_token": bool(facts["after"]),
        "legacy": not facts["prefix_once"],
        "added_tokens_decoder": tokens,
    }
    return Saved("tokenizer.model", base64.b64decode(facts["sentencepiece"]), settings)


class SentencePieceBackend:
    """A SentencePiece model with added tokens; the methods are those of tokenizers.Tokenizer."""

    encode_special_tokens = False

    def __init__(self, facts: dict[str, Any]):
        import sentencepiece

        proto = base64.b64decode(facts["sentencepiece"])
        self._model = sentencepiece.SentencePieceProcessor(model_proto=proto)
        self._bare = self._model
        if facts["prefix_once"]:
            self._bare = sentencepiece.SentencePieceProcessor(model_proto=proto + _WITHOUT_PREFIX)
        self._added = {token["id"]: token for token in facts["added_tokens"]}
        self._before, self._after = facts["before"], facts["after"]

    @functools.cached_property
    def _splitters(self) -> tuple[Any, Any]:
        """Two splitters of texts: at all added tokens, and at those that are not special."""
        tokens = list(self._added.values())
        return _splitter(tokens), _splitter([one for one in tokens if not one["special"]])

    def encode(self, text: str, add_special_tokens: bool = True) -> Ids:
        """Return the ids of a text. Added tokens are matched first."""
        found = self._splitters[bool(self.encode_special_tokens)].encode(text)
        ids = list(self._before) if add_special_tokens else []
        for id_, (start, end) in zip(found.ids, found.offsets, strict=True):
            if id_ == _TEXT:
                ids += (self._bare if start else self._model).encode(text[start:end])
            else:
                ids.append(id_)
        return Ids(ids + self._after if add_special_tokens else ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of the ids; ids that are not tokens are left out."""
        text, run = "", list[int]()
        for id_ in ids:
            token = self._added.get(id_)
            if token is None:
                run += [id_] if id_ < self._model.get_piece_size() else []
            elif not (token["special"] and skip_special_tokens):
                text, run = text + self._text(run, first=not text) + token["content"], []
        return text + self._text(run, first=not text)

    def _text(self, run: list[int], *, first: bool) -> str:
        decoded: str = (self._model if first else self._bare).decode(run) if run else ""
        return decoded

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens, including added ones, by text."""
        size = self._model.get_piece_size()
        pieces = {self._model.id_to_piece(i): i for i in range(size) if i not in self._added}
        return pieces | {token["content"]: id_ for id_, token in self._added.items()}

    def token_to_id(self, text: str) -> int | None:
        """Return the id of a token by its text; None if there is none."""
        for id_, token in self._added.items():
            if token["content"] == text:
                return int(id_)
        id_ = int(self._model.piece_to_id(text))
        return id_ if self.id_to_token(id_) == text else None

    def id_to_token(self, id_: int) -> str | None:
        """Return the vocabulary's spelling of an id; None if it is not a token."""
        if id_ in self._added:
            return str(self._added[id_]["content"])
        return str(self._model.id_to_piece(id_)) if id_ < self._model.get_piece_size() else None


def _splitter(tokens: Sequence[dict[str, Any]]) -> Any:
    """Return a tokenizer of the added tokens only; the rest of a text gets the id _TEXT."""
    import tokenizers

    vocabulary = {one["content"]: one["id"] for one in tokens} | {"": _TEXT}
    splitter = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=""))
    splitter.add_tokens(
        [
            tokenizers.AddedToken(**{name: one[name] for name in one if name != "id"})
            for one in tokens
        ]
    )
    return splitter


def post_processor(
    before: Sequence[tuple[int, str]], after: Sequence[tuple[int, str]]
) -> dict[str, Any]:
    """Return a post-processor for tokenizer.json that puts these tokens, (id, text), around a
    text."""

    def special(text: str) -> dict[str, Any]:
        return {"SpecialToken": {"id": text, "type_id": 0}}

    def around(name: str) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": name, "type_id": 0}}
        return [*(special(one) for _, one in before), text, *(special(one) for _, one in after)]

    return {
        "type": "TemplateProcessing",
        "single": around("A"),
        "pair": around("A") + around("B"),
        "special_tokens": {
            text: {"id": text, "ids": [id_], "tokens": [text]} for id_, text in (*before, *after)
        },
    }


# The end of a sample. The texts are those of llama.cpp (src/llama-vocab.cpp at commit 0c1e570,
# `special_eog_ids`).

# A token with one of these texts ends a sample, even if the file says that it is not special.
_END_TEXTS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> "
    "<|endoftext|> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> "
    "<turn|> <|tool_response> <｜end▁of▁sentence｜> [e~["
)
END_TEXTS = tuple(_END_TEXTS.split())
# These end a sample too, unless the file names a token for the role.
ROLE_TEXTS: dict[str, tuple[str, ...]] = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# The roles by which a GGUF file names tokens that end a sample: `tokenizer.ggml.eos_token_id`, ...
END_ROLES = ("eos", "eot", "eom", *ROLE_TEXTS)
# This text ends a sample only if the token is special: in Gemma's vocabulary it is an HTML tag.
_TAG = "</s>"
# With one of these tokens in the vocabulary, "</s>" is ordinary text.
_TAG_IS_TEXT = ("<|tool_response>", "<|plamo:eos|>")
# In formats with one of each of the following, "<|end|>" closes a part of an answer only.
_PARTS = "<|end|>"
_CALLS, _FINALS = ("<|call|>", "<|calls|>"), ("<|return|>", "<|flush|>")


def end_ids(
    ids: Mapping[str, int], *, special: Container[str], named: Mapping[str, int]
) -> tuple[int, ...]:
    """Return the ids that end a sample.

    Args:
        ids: the vocabulary, id by text.
        special: texts of the special (control) tokens.
        named: ids that the files name, by role (END_ROLES). All of them end a sample.

    Returns:
        The ids in ascending order; empty if there are none.
    """
    texts = {*END_TEXTS, *([_TAG] if _TAG in special else [])}
    for role, choices in ROLE_TEXTS.items():
        if role not in named:
            texts.update(choices)
    texts.intersection_update(ids)
    if any(text in ids for text in _TAG_IS_TEXT):
        texts.discard(_TAG)
    if not texts.isdisjoint(_CALLS) and not texts.isdisjoint(_FINALS):
        texts.discard(_PARTS)
    return tuple(sorted({*(ids[text] for text in texts), *named.values()}))
