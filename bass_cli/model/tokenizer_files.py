"""What a tokenizer's files come to: read once, by transformers, and kept in the user's cache folder
as the tokenizer.json that the tokenizers library loads by itself.

The only importer of transformers, which takes seconds; converting a GGUF file's tokenizer takes
some more. An entry is named by a digest of what it was made of and by the versions that made it,
and one that is damaged, or another one's, is made anew. Not here: text to ids (tokenizer.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bass_cli.errors import UserError
from bass_cli.io.cached import read_cached, write_cached
from bass_cli.io.reading import parse_json, read_bytes
from bass_cli.model.gguf_config import ARCHITECTURES
from bass_cli.model.gguf_file import read_gguf
from bass_cli.model.sources import TOKENIZER
from bass_cli.model.template import Messages
from bass_cli.system.host import cache_folder

_CONVERSION = 3  # raise it when what we make of a tokenizer's files changes
_PADDING = re.compile(r"\[PAD\d+\]")  # what GGUF writers call rows without a token
_PROBE = (
    "Hello  12345 wörld's \n\n\tif x==1: // 你好 🙂 \u0301"  # its ids tell pre-tokenizers apart
)
_CONTROL = 3  # the kind of a GGUF token that has no text
_NAMING = ("tokenizer_config.json", "config.json")  # the files that may name a tokenizer class
_FILES = (*TOKENIZER, *_NAMING)  # that transformers reads
_MOST_BYTES = 1 << 27  # of one of them; the largest known, of 262,144 tokens, has a quarter of that
# tokenizers writes a vocabulary by counting up to its largest id: 0.1 s for this, 33 s for its end
# at 2^32. The largest vocabulary known has 262,144 ids.
_MOST_IDS = 1 << 24
_OTHER_TOKENIZER = (
    'name a folder whose tokenizer is data (tokenizer.json) as "tokenizer" in a pair file'
)
# transformers' name to GGUF's
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}


class Settled(NamedTuple):
    """A tokenizer without its files. `content`: tokenizer.json; `template`: the chat template;
    `special`: the special tokens by name, as templates use them; `literal`: whether they are
    ordinary text within a text; `size`: see Tokenizer; `vocabulary`, `fingerprint`: digests of how
    ids are spelled, and of all that ids depend on."""

    content: bytes
    template: str | None
    special: dict[str, str]
    eos_id: int | None
    literal: bool
    size: int
    vocabulary: str
    fingerprint: str


def settle(path: Path, vocabulary: str | None = None) -> Settled:
    """Of a model's folder or .gguf file, from the cache if it is there and whole; see
    Tokenizer.load for errors and `vocabulary`."""
    key = _key(path, vocabulary)
    found = _kept(key)
    if found is None:
        found = _made(path)
        with contextlib.suppress(OSError):  # a cache that cannot be written
            write_cached(_place(key), _entry(found, key))
    return found


def kept(path: Path) -> Settled | None:
    """The same, if it is there and whole; it needs neither transformers nor torch."""
    return _kept(_key(path, None))


def _key(path: Path, vocabulary: str | None) -> str:
    """What names an entry."""
    if path.suffix == ".gguf":
        made_of = vocabulary or read_gguf(path).vocabulary
    else:
        made_of = _digest_of(path)
    versions = [importlib.metadata.version(name) for name in ("transformers", "tokenizers")]
    return hashlib.sha256(json.dumps([made_of, *versions, _CONVERSION]).encode()).hexdigest()[:32]


def _place(key: str) -> Path:
    return cache_folder() / "tokenizers" / f"{key}.json"


def _kept(key: str) -> Settled | None:
    with contextlib.suppress(OSError, ValueError):
        return _parse(read_cached(_place(key), 2 * _MOST_BYTES), key)
    return None


def _entry(settled: Settled, key: str) -> bytes:
    """Three lines: a digest of the key and of what follows; all but the content; the content."""
    facts = json.dumps(settled._replace(content=b"")._asdict() | {"content": None})
    rest = facts.encode() + b"\n" + settled.content
    return _sum(key, rest) + b"\n" + rest


def _parse(entry: bytes, key: str) -> Settled:
    """ValueError where it is not what was written for this key."""
    digest, _, rest = entry.partition(b"\n")
    if digest != _sum(key, rest):
        raise ValueError("damaged, or of another tokenizer")
    facts, _, content = rest.partition(b"\n")
    found = parse_json(facts)
    if not isinstance(found, dict) or found.keys() != set(Settled._fields):
        raise ValueError("of another shape")
    settled = Settled(**found | {"content": content})
    texts = (settled.vocabulary, settled.fingerprint, settled.template or "")
    if not (
        all(isinstance(one, str) for one in (*texts, *_texts_of(settled.special)))
        and isinstance(settled.literal, bool)
        and type(settled.size) is int
        and (settled.eos_id is None or type(settled.eos_id) is int)
    ):
        raise ValueError("of another shape")
    return settled


def _texts_of(special: object) -> Iterable[object]:
    return special.values() if isinstance(special, dict) else (None,)


def _sum(key: str, rest: bytes) -> bytes:
    return hashlib.blake2b(rest, digest_size=16, key=key.encode()).hexdigest().encode()


def _digest_of(folder: Path) -> str:
    """Of all files in a folder that transformers may make a tokenizer of; UserError where one is
    no file, or too large for what it is."""
    digest = hashlib.sha256()
    for path in sorted({path for one in _FILES for path in folder.glob(one) if not path.is_dir()}):
        try:
            content = read_bytes(path, _MOST_BYTES)
        except OSError as error:
            raise UserError(f"{path}: cannot read the file: {error.strerror}") from None
        digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _made(path: Path) -> Settled:
    """What transformers makes of the files."""
    import transformers

    if path.suffix != ".gguf":
        _refuse_code(path)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with refusals(f"{path}: no tokenizer can be read there"):
        return _settled(_convert(path) if path.suffix == ".gguf" else _read(path), path)


def _settled(inner: Any, path: Path) -> Settled:
    """What transformers has made of them, without transformers."""
    backend = getattr(inner, "backend_tokenizer", None)
    if backend is None:
        raise UserError(
            f"{path}: transformers has no fast form of this tokenizer; {_OTHER_TOKENIZER}"
        )
    template = inner.chat_template
    if isinstance(template, dict):  # several by name
        template = template.get("default")
    texts = {id_: text for text, id_ in inner.get_vocab().items()}
    if (largest := max(texts, default=0)) >= _MOST_IDS:
        raise UserError(
            f"{path}: the tokenizer has {texts[largest]!r} as id {largest}, and ids go to "
            f"{_MOST_IDS - 1} here"
        )
    spelled = repr(sorted(texts.items())).encode()
    digest = hashlib.sha256(spelled)
    for part in (inner.chat_template, inner(_PROBE)["input_ids"]):
        digest.update(repr(part).encode())
    return Settled(
        backend.to_str().encode(),
        template or None,
        dict(inner.special_tokens_map),
        inner.eos_token_id,
        bool(inner.split_special_tokens),
        trimmed(texts, _PADDING),
        hashlib.sha256(spelled).hexdigest()[:32],
        digest.hexdigest()[:32],
    )


def renderer(template: str, special: Mapping[str, str]) -> Callable[[Messages], str]:
    """What makes a text of messages. It imports transformers, before the process may be forked
    for it (template.py)."""
    import tokenizers
    import transformers

    usual = transformers.PreTrainedTokenizerFast.SPECIAL_TOKENS_ATTRIBUTES
    names = {name: text for name, text in special.items() if name in usual}
    own = {name: text for name, text in special.items() if name not in usual}
    inner = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()),
        chat_template=template,
        model_specific_special_tokens=own,
        **names,
    )

    def render(messages: Messages) -> str:
        return inner.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)

    return render


@contextlib.contextmanager
def refusals(fault: str) -> Iterator[None]:
    """UserError, beginning with `fault`, for whatever transformers raises at a file that is
    missing, broken or unknown: many kinds, and what tokenizers raises where its own code fails
    is no Exception."""
    try:
        yield
    except (UserError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        lines = [line.strip() for line in str(error).strip().splitlines()] or [repr(error)]
        reason = " ".join(lines) if lines[0].endswith(":") else lines[0]  # a list follows
        raise UserError(f"{fault}: {reason[:400]}") from None


def _refuse_code(folder: Path) -> None:
    """UserError where a folder's files name a tokenizer class that is none of transformers'.
    Other classes there count too: it would take AutoModel for a tokenizer, whose `auto_map` then
    says which code to run."""
    import transformers
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    for name in _NAMING:
        try:
            content = parse_json(read_bytes(folder / name, _MOST_BYTES))
        except (OSError, ValueError):
            continue  # not there, or broken: reading it will say so
        if not isinstance(content, dict):
            continue
        code = content.get("auto_map")
        if names := _named(code.get("AutoTokenizer") if isinstance(code, dict) else code):
            raise UserError(
                f'{folder / name}: key "auto_map": the tokenizer is code of the model\'s own '
                f"({names}), which is never run; {_OTHER_TOKENIZER}"
            )
        kind = content.get("tokenizer_class")
        found = tokenizer_class_from_name(kind) if isinstance(kind, str) else None
        if kind is not None and not (
            isinstance(found, type) and issubclass(found, transformers.PreTrainedTokenizerBase)
        ):
            raise UserError(
                f'{folder / name}: key "tokenizer_class": transformers {transformers.__version__} '
                f"has no tokenizer class {_named(kind)} here; {_OTHER_TOKENIZER}"
            )


def _named(value: Any) -> str:
    """The names in an entry of a configuration: a text, or a list with some."""
    return ", ".join(
        repr(one) for one in (value if isinstance(value, list) else [value]) if one is not None
    )


def _read(folder: Path) -> Any:
    """What transformers makes of a folder's files. Code among them is never run, and nobody is
    asked whether it may be."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _convert(path: Path) -> Any:
    """What transformers makes of the tokenizer in a GGUF file."""
    from tokenizers import normalizers, pre_tokenizers

    metadata, entries, _ = read_gguf(path)
    inner = _read_gguf(path, str(metadata.get("general.architecture")))
    # What transformers does not know of these, or forgets.
    match metadata.get("tokenizer.ggml.pre"):
        case "smollm" | "starcoder":
            # They cut off every digit first, so that spaces before a number stay together.
            digits, rest = (
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            )
            inner.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
        case "qwen2":
            inner.backend_tokenizer.normalizer = normalizers.NFC()
    _mark_control_tokens(inner, metadata.get("tokenizer.ggml.token_type") or ())
    for kind, name in _SPECIAL.items():  # some versions of transformers get them wrong
        if (id_ := metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            setattr(inner, kind, inner.convert_ids_to_tokens(id_))
    return _without_extras(inner, entries["token_embd.weight"].shape[0])


def _read_gguf(path: Path, architecture: str) -> Any:
    """By the class that transformers has for the family: to find out which that is, it would read
    the header at a hundred microseconds a token. From a folder where nothing else lies that it
    might read too."""
    import transformers

    kind, reader = ARCHITECTURES.get(architecture), transformers.PreTrainedTokenizerFast
    if kind is not None:
        config = transformers.CONFIG_MAPPING[kind.family]
        reader = transformers.TOKENIZER_MAPPING.get(config, reader)
    with tempfile.TemporaryDirectory(prefix="bass-tokenizer-") as folder:
        Path(folder, path.name).symlink_to(path.resolve())
        return reader.from_pretrained(folder, gguf_file=path.name)


def _mark_control_tokens(inner: Any, kinds: Sequence[int]) -> None:
    """What the file calls control tokens has no text; some versions of transformers take them
    for ordinary tokens."""
    import tokenizers

    texts = (inner.convert_ids_to_tokens(id_) for id_, kind in enumerate(kinds) if kind == _CONTROL)
    inner.backend_tokenizer.add_special_tokens(
        [
            tokenizers.AddedToken(text, special=True, normalized=False)
            for text in texts
            if text is not None
        ]
    )


def _without_extras(inner: Any, rows: int) -> Any:
    """Less the tokens that transformers' class has by default, like <|endoftext|>, and the model
    has no row for."""
    import tokenizers
    import transformers

    content = json.loads(inner.backend_tokenizer.to_str())
    extras = {token["content"] for token in content["added_tokens"] if token["id"] >= rows}
    if not extras:
        return inner
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < rows]
    special = {kind: getattr(inner, kind) for kind in _SPECIAL}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(content)),
        chat_template=inner.chat_template,
        **{kind: text for kind, text in special.items() if text not in extras},
    )


def trimmed(texts: Mapping[int, str], placeholder: re.Pattern[str]) -> int:
    """One more than the largest id that is no placeholder."""
    return 1 + max(
        (id_ for id_, text in texts.items() if not placeholder.fullmatch(text)), default=-1
    )
