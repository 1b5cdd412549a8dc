"""The tokenizer in a folder of the Hugging Face hub's layout.

It is read from tokenizer.json if that exists, else from tokenizer.model (SentencePiece), else from
vocab.json with merges.txt. The other files add names of special tokens, BOS and EOS rules, tokens
that tokenizer.json lacks, and the chat template. Python code in a folder is never run. Not here:
GGUF files (gguf_tokenizer.py), the cache (tokenizer.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bass_cli.errors import UserError
from bass_cli.formats.backends import (
    TokenizerParts,
    end_ids,
    load_backend,
    post_processor,
    sentencepiece_content,
)
from bass_cli.formats.config_keys import Values
from bass_cli.formats.limits import check_growth
from bass_cli.formats.sources import TOKENIZER, read_json
from bass_cli.reading import parse_object, read_bytes

_NAMING = ("tokenizer_config.json", "config.json")  # the files that may name a tokenizer class
FILES = (*TOKENIZER, *_NAMING, "generation_config.json", "tekken.json", "*.tiktoken")
LARGEST_FILE = 1 << 27  # bytes; the largest known, of 262,144 tokens, has a quarter of that
_REMEDY = 'name a folder whose tokenizer is data (tokenizer.json) as "tokenizer" in a pair file'
# Classes whose `add_bos_token` and `add_eos_token` override the post-processor of tokenizer.json.
# Published models need it: DeepSeek's tokenizer.json adds no BOS. Other classes of transformers
# ignore the flags, and some of their models have flags that contradict tokenizer.json.
_FLAGGED = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer")
# Classes that use the ids of tokenizer.model as they are.
_PIECES = (*_FLAGGED, "PreTrainedTokenizer", "TokenizersBackend")
_FIELDS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def needs_transformers(folder: Path) -> bool:
    """Whether a folder's tokenizer can only be read by transformers."""
    return not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model"))


def read_folder_tokenizer(folder: Path) -> TokenizerParts:
    """Return the parts of the tokenizer in a model's folder.

    Raises:
        UserError: a file is broken, or the tokenizer is in none of the formats above.
        Exception: of many kinds, from the libraries that read the files.
    """
    settings = Settings(folder)
    if (folder / "tokenizer.json").exists():
        content = _fast(settings, read_bytes(folder / "tokenizer.json", LARGEST_FILE))
    elif (folder / "tokenizer.model").exists():
        content = _sentencepiece(settings, read_bytes(folder / "tokenizer.model", LARGEST_FILE))
    else:
        content = _fast(settings, _built(settings))
    ids = load_backend(content).get_vocab()
    eos = ids.get(settings.special.get("eos_token", ""))
    added = json.loads(content).get("added_tokens") or ()
    special = {token["content"] for token in added if token.get("special")}
    return TokenizerParts(
        content,
        settings.template(),
        settings.special,
        end_ids(
            ids,
            special=special.union(settings.special.values()),
            named={} if eos is None else {"eos": eos},
        ),
        bool(settings.config.get("split_special_tokens")),
        settings.template("tool_use"),
    )


class Settings:
    """The settings in the files beside a vocabulary.

    Attributes:
        config: tokenizer_config.json; empty if there is none. `values` has checks of its keys.
        model: config.json; empty if there is none.
        special: special tokens by name (`bos_token`, ...).
        extra: special tokens without a name.
    """

    def __init__(self, folder: Path):
        """Read the files; UserError if one is broken."""
        self.folder = folder
        self.config = self.read("tokenizer_config.json")
        self.values = Values(self.config, str(folder / "tokenizer_config.json"))
        self.model = self.read("config.json")
        older = self.read("special_tokens_map.json")
        both = older | self.config if "added_tokens_decoder" in self.config else self.config | older
        named = {name: _text(value) for name, value in both.items() if name.endswith("_token")}
        extra = [both.get(f"{kind}_special_tokens") for kind in ("additional", "extra")]
        named |= {k: _text(v) for one in extra if isinstance(one, dict) for k, v in one.items()}
        self.special = {name: text for name, text in named.items() if text}
        self.extra = [_text(one) for more in extra if isinstance(more, list) for one in more]
        self._unnamed = {"bos_token", "eos_token"} - both.keys()

    def read(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file, {} if there is no file; UserError if it is broken."""
        path = self.folder / name
        return read_json(path, most=LARGEST_FILE) if path.exists() else {}

    @property
    def kind(self) -> str | None:
        """The tokenizer class without "Fast", if a file names one."""
        for source in (self.config, self.model):
            if source.get("tokenizer_class") is not None:
                return str(source["tokenizer_class"]).removesuffix("Fast")
        return None

    def flag(self, name: str) -> bool | None:
        """Return a flag of tokenizer_config.json; None if it is not set."""
        return None if self.values.get(name) is None else self.values.flag(name)

    @property
    def special_texts(self) -> list[str]:
        """The texts of all special tokens that the files name, in order."""
        return sorted({text for text in (*self.special.values(), *self.extra) if text})

    def name_ends(self, texts: Mapping[int, str]) -> None:
        """Take BOS and EOS from the model's configuration if the tokenizer's files omit them.

        Args:
            texts: the vocabulary, text by id.
        """
        both = self.model | self.read("generation_config.json")
        for name in self._unnamed:
            id_ = both.get(f"{name}_id")
            id_ = id_[0] if isinstance(id_, list) and id_ else id_
            if type(id_) is int and id_ in texts:
                self.special[name] = texts[id_]

    def added_tokens(self) -> list[dict[str, Any]]:
        """Return the tokens that other files add, as in tokenizer.json's `added_tokens`, by id."""
        names = set(self.special_texts)
        found = []
        table = self.config.get("added_tokens_decoder")
        if isinstance(table, dict):
            for key, token in table.items():
                if not key.isdecimal() or not (text := _text(token)):
                    raise self.values.error(
                        "added_tokens_decoder", f"{key!r} is not the id of a token"
                    )
                flags = token if isinstance(token, dict) else {}
                found.append(_added(int(key), text, special=text in names, flags=flags))
        else:
            for text, id_ in self.read("added_tokens.json").items():
                if type(id_) is not int or id_ < 0:
                    raise UserError(
                        f"{self.folder / 'added_tokens.json'}: token {text!r}: {id_!r} is not an id"
                    )
                found.append(_added(id_, text, special=text in names))
        return sorted(found, key=lambda token: int(token["id"]))

    def template(self, name: str = "default") -> str | None:
        """Return the chat template of this name, or None.

        A template without a name is the default. "tool_use" is for conversations with tools.
        """
        template = self.config.get("chat_template")
        if isinstance(template, list):  # several, as objects with a name
            template = {
                one.get("name"): one.get("template") for one in template if isinstance(one, dict)
            }
        if isinstance(template, dict):
            template = template.get(name)
        elif name != "default":
            template = None
        if template is None and name == "default":
            template = self.read("chat_template.json").get("chat_template")
        files = [f"additional_chat_templates/{name}.jinja"]
        for file in [*files, "chat_template.jinja"] if name == "default" else files:
            if (self.folder / file).exists():
                template = read_bytes(self.folder / file, LARGEST_FILE).decode()
        if template is not None and not isinstance(template, str):
            raise self.values.error("chat_template", "a text is needed")
        return template or None


def _text(token: Any) -> str | None:
    """Return the text of a token, which is a string or an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _added(
    id_: int, text: str, *, special: bool, flags: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return an added token; `flags`: those that a file gives it."""
    given = {name: bool(flag) for name, flag in (flags or {}).items() if name in _FIELDS}
    return (
        {"id": id_, "content": text} | dict.fromkeys(_FIELDS, False) | {"special": special} | given
    )


# tokenizer.json


def _fast(settings: Settings, raw: bytes) -> bytes:
    """Return tokenizer.json with missing tokens and the BOS and EOS rules of the other files.

    The result is `raw` itself if they change nothing.
    """
    original, content = parse_object(raw), parse_object(raw)
    check_growth(raw)
    backend = load_backend(raw)
    texts = {id_: text for text, id_ in backend.get_vocab().items()}
    settings.name_ends(texts)
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [
        token
        for token in settings.added_tokens()
        if token["content"] not in known and texts.get(token["id"]) in (None, token["content"])
    ]
    if missing:
        _add(settings, content, backend, missing)
    _mark_special(settings, content, backend)
    if content != original:
        backend = load_backend(json.dumps(content).encode())
    _surround(settings, content, backend)
    for name in ("truncation", "padding"):  # a prompt is never cut or filled
        if content.get(name) is not None:
            content[name] = None
    return raw if content == original else json.dumps(content).encode()


def _add(
    settings: Settings, content: dict[str, Any], backend: Any, missing: list[dict[str, Any]]
) -> None:
    """Add tokens with the ids that the configuration gives them."""
    vocabulary = content["model"].get("vocab")
    # The library gives added tokens consecutive ids after the model's vocabulary. Tokens in that
    # vocabulary keep their ids, so the new tokens are added there too if it is a table of ids.
    if not isinstance(vocabulary, dict):
        size = backend.get_vocab_size()
        fresh = [token for token in missing if backend.token_to_id(token["content"]) is None]
        if [token["id"] for token in fresh] != list(range(size, size + len(fresh))):
            raise settings.values.error(
                "added_tokens_decoder",
                f"token {fresh[0]['content']!r} has id {fresh[0]['id']}, and tokenizer.json has "
                f"{size} tokens; add it to tokenizer.json",
            )
    else:
        held = {token.content: id_ for id_, token in backend.get_added_tokens_decoder().items()}
        content["model"]["vocab"] = (
            {token["content"]: token["id"] for token in missing} | held | vocabulary
        )
    content["added_tokens"] = [*(content.get("added_tokens") or []), *missing]


def _mark_special(settings: Settings, content: dict[str, Any], backend: Any) -> None:
    """Make the tokens special that the configuration names.

    Special tokens are matched whole in texts, as a chat template needs, and are left out of
    decoded text.
    """
    tokens = content.get("added_tokens") or []
    held = {token["content"]: token for token in tokens}
    for text in settings.special_texts:
        if text in held:
            held[text]["special"] = True
        elif (id_ := backend.token_to_id(text)) is not None:
            tokens.append(_added(id_, text, special=True))
    if tokens:
        content["added_tokens"] = tokens


def _surround(settings: Settings, content: dict[str, Any], backend: Any) -> None:
    """Make the post-processor follow the BOS and EOS flags."""
    before, after = _surroundings(backend)
    wanted = list(before), list(after)
    flagged = settings.kind in _FLAGGED
    for side, name, place in ((wanted[0], "bos", 0), (wanted[1], "eos", -1)):
        flag = settings.flag(f"add_{name}_token")
        id_ = backend.token_to_id(settings.special.get(f"{name}_token", ""))
        if id_ is None or flag is None or not (flagged or (name == "bos" and flag)):
            continue
        there = bool(side) and side[place] == id_
        if flag and not there:
            side.insert(0 if name == "bos" else len(side), id_)
        elif there and not flag:
            del side[place]
    if wanted != (before, after):
        named = [[(id_, backend.id_to_token(id_)) for id_ in side] for side in wanted]
        content["post_processor"] = post_processor(*named)


def _surroundings(backend: Any) -> tuple[list[int], list[int]]:
    """Return the ids that the post-processor adds before and after a text."""
    bare = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a").ids
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []


# tokenizer.model


def _sentencepiece(settings: Settings, model: bytes) -> bytes:
    """Return TokenizerParts.content for a SentencePiece model."""
    import sentencepiece

    _refuse_code(settings)
    place = settings.folder / "tokenizer.model"
    if settings.kind is not None and settings.kind not in _PIECES:
        raise UserError(
            f'{settings.folder}: key "tokenizer_class": {settings.kind} may number the pieces of '
            f"tokenizer.model in another way; {_REMEDY}"
        )
    try:
        inner = sentencepiece.SentencePieceProcessor(model_proto=model)
        size = inner.get_piece_size()
        assert size  # an empty file is an empty model
    except Exception:  # of many kinds
        raise UserError(
            f"{place}: not a SentencePiece model (some models have a vocabulary of tiktoken's "
            f"under this name); {_REMEDY}"
        ) from None
    texts = {id_: inner.id_to_piece(id_) for id_ in range(size)}
    for name in ("unk", "bos", "eos", "pad"):  # the model's own, unless a file names others
        id_ = getattr(inner, f"{name}_id")()
        if id_ >= 0 and f"{name}_token" not in (settings.config | settings.special):
            settings.special[f"{name}_token"] = texts[id_]
    added = {token["id"]: token for token in settings.added_tokens()}
    texts |= {id_: token["content"] for id_, token in added.items()}
    ids = {text: id_ for id_, text in texts.items()}
    for text in settings.special_texts:
        if text in ids:
            token = added.setdefault(ids[text], _added(ids[text], text, special=True))
            token["special"] = True

    def around(name: str, usual: bool) -> list[int]:
        id_ = ids.get(settings.special.get(f"{name}_token", ""))
        flag = settings.flag(f"add_{name}_token")
        return [id_] if id_ is not None and (usual if flag is None else flag) else []

    return sentencepiece_content(
        model,
        added=sorted(added.values(), key=lambda token: int(token["id"])),
        before=around("bos", usual=True),
        after=around("eos", usual=False),
        prefix_once=settings.flag("legacy") is False,
    )


# vocab.json and merges.txt


def _built(settings: Settings) -> bytes:
    """Return tokenizer.json as transformers builds it from vocab.json and merges.txt."""
    import transformers

    _refuse_code(settings)
    folder = settings.folder
    if not all((folder / name).exists() for name in ("vocab.json", "merges.txt")):
        raise UserError(
            f"{folder}: no tokenizer can be read there: there is no tokenizer.json, no "
            f"tokenizer.model, and no vocab.json with merges.txt{_others(folder)}; {_REMEDY}"
        )
    _refuse_class(settings)
    transformers.logging.set_verbosity_error()
    inner = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    backend = getattr(inner, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"{folder}: transformers has no fast form of this tokenizer; {_REMEDY}")
    for name, text in inner.special_tokens_map.items():  # those of the class
        if isinstance(text, str):
            settings.special.setdefault(name, text)
    return str(backend.to_str()).encode()


def _others(folder: Path) -> str:
    found = sorted(path.name for one in ("tekken.json", "*.tiktoken") for path in folder.glob(one))
    return f" ({', '.join(found)}: this format is not supported)" if found else ""


def _refuse_code(settings: Settings) -> None:
    """Raise a UserError if the tokenizer is Python code of the model's own."""
    for name, content in zip(_NAMING, (settings.config, settings.model), strict=True):
        code = content.get("auto_map")
        code = code.get("AutoTokenizer") if isinstance(code, dict) else code
        names = [one for one in (code if isinstance(code, list) else [code]) if one is not None]
        if names:
            code = f"code of the model's own ({', '.join(map(repr, names))})"
            fault = f"the tokenizer is {code}, which is never run; {_REMEDY}"
            raise Values(content, str(settings.folder / name)).error("auto_map", fault)


def _refuse_class(settings: Settings) -> None:
    """Raise a UserError if a file names a class that is not a tokenizer of transformers.

    Other classes of transformers are dangerous: AutoModel would run the code that `auto_map`
    names.
    """
    import transformers
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    for name, content in zip(_NAMING, (settings.config, settings.model), strict=True):
        kind = content.get("tokenizer_class")
        found = tokenizer_class_from_name(kind) if isinstance(kind, str) else None
        if kind is not None and not (
            isinstance(found, type) and issubclass(found, transformers.PreTrainedTokenizerBase)
        ):
            library = f"transformers {transformers.__version__}"
            fault = f"{library} has no tokenizer class {kind!r}; {_REMEDY}"
            raise Values(content, str(settings.folder / name)).error("tokenizer_class", fault)
