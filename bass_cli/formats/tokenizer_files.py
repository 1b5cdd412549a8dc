"""The cache of tokenizers on disk.

An entry holds a tokenizer in a form that loads without transformers. Its name is a digest of the
files and of the versions of the libraries that read them. A damaged entry is written again. Files
are read in a child process with limits (limits.py). Not here: the formats (hub_tokenizer.py,
gguf_tokenizer.py), text to ids (tokenizer.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from bass_cli.errors import UserError
from bass_cli.formats.backends import TokenizerParts, load_backend
from bass_cli.formats.gguf_tokenizer import read_gguf_tokenizer
from bass_cli.formats.hub_tokenizer import (
    FILES,
    LARGEST_FILE,
    needs_transformers,
    read_folder_tokenizer,
)
from bass_cli.formats.limits import Limited, RefusalError, check_growth, refusals
from bass_cli.formats.tensor_files import read_gguf
from bass_cli.io.cache import cache_folder, read_cached, write_cached
from bass_cli.reading import os_errors_as, parse_json, read_bytes

_CONVERSION = 6  # increase it when the readers return other parts for the same files
_PADDING = re.compile(r"\[PAD\d+\]")  # GGUF writers' text for embedding rows without a token
# A sample text; different pre-tokenizers give different ids for it.
_PROBE = "Hello  12345 wörld's \n\n\tif x==1: // 你好 🙂 \u0301"
# The tokenizers library serialises a vocabulary by counting up to its largest id. It takes 0.1 s
# for this limit, and 33 s for 2^32. The largest known vocabulary has 262,144 ids.
_MOST_IDS = 1 << 24
_SECONDS = 60.0  # CPU seconds for reading the files; the largest known take 10 s
_MEMORY = 4 << 30  # bytes that reading the files may add; the largest known take 1 GiB


class CachedTokenizer(NamedTuple):
    """A cached tokenizer: TokenizerParts and values derived from them.

    size: one more than the largest id that is a token.
    vocabulary: digest of the vocabulary, ids with their texts.
    fingerprint: digest of the vocabulary, the chat template and the ids of a sample text.
    """

    content: bytes
    template: str | None
    special: dict[str, str]
    eos_ids: tuple[int, ...]
    literal: bool
    tool_template: str | None
    size: int
    vocabulary: str
    fingerprint: str


# The types of its fields as JSON
_TYPES = {
    "content": (str,),
    "template": (str, type(None)),
    "special": (dict,),
    "eos_ids": (list,),
    "literal": (bool,),
    "tool_template": (str, type(None)),
    "size": (int,),
    "vocabulary": (str,),
    "fingerprint": (str,),
}


def read_tokenizer(path: Path, vocabulary: str | None = None) -> CachedTokenizer:
    """Return the tokenizer of a model's folder or .gguf file, from the cache if it has an entry.

    Args:
        vocabulary: the digest in the header of a .gguf file, if it was read (tensor_files.py).

    Raises:
        UserError: no tokenizer can be read from the files.
    """
    key = _key(path, vocabulary)
    found = _cached(key)
    if found is None:
        entry, place = read_files(path, key), _place(key)
        found = _parse(entry, key)
        with contextlib.suppress(OSError):  # the cache cannot be written
            write_cached(place, entry)
    return found


def cached_tokenizer(path: Path) -> CachedTokenizer | None:
    """Return the cached tokenizer, or None; this imports neither transformers nor torch."""
    return _cached(_key(path, None))


def _key(path: Path, vocabulary: str | None) -> str:
    """Return the name of the cache entry for a folder or file."""
    if path.suffix == ".gguf":
        made_of = vocabulary or read_gguf(path).vocabulary
    else:
        made_of = _digest_of(path)
    libraries = ("transformers", "tokenizers", "sentencepiece")
    versions = [importlib.metadata.version(name) for name in libraries]
    return hashlib.sha256(json.dumps([made_of, *versions, _CONVERSION]).encode()).hexdigest()[:32]


def _place(key: str) -> Path:
    return cache_folder() / "tokenizers" / f"{key}.json"


def _cached(key: str) -> CachedTokenizer | None:
    with contextlib.suppress(OSError, ValueError):
        return _parse(read_cached(_place(key), 3 * LARGEST_FILE), key)
    return None


def _entry(tokenizer: CachedTokenizer, key: str) -> bytes:
    """Return an entry of three lines.

    They are a digest of the key and of the other lines, all fields except `content` as JSON, and
    the content.
    """
    facts = json.dumps(tokenizer._asdict() | {"content": ""})
    rest = facts.encode() + b"\n" + tokenizer.content
    return _sum(key, rest) + b"\n" + rest


def _parse(entry: bytes, key: str) -> CachedTokenizer:
    """Read an entry; ValueError if it is damaged or was written for another key."""
    digest, _, rest = entry.partition(b"\n")
    if digest != _sum(key, rest):
        raise ValueError("the entry is damaged or belongs to another tokenizer")
    facts, _, content = rest.partition(b"\n")
    found = parse_json(facts)
    if (
        not isinstance(found, dict)
        or found.keys() != _TYPES.keys()
        or any(type(value) not in _TYPES[name] for name, value in found.items())
        or not {type(one) for one in found["special"].values()} <= {str}
        or not {type(one) for one in found["eos_ids"]} <= {int}
    ):
        raise ValueError("the entry has an unknown shape")
    return CachedTokenizer(**found | {"content": content, "eos_ids": tuple(found["eos_ids"])})


def _sum(key: str, rest: bytes) -> bytes:
    return hashlib.blake2b(rest, digest_size=16, key=key.encode()).hexdigest().encode()


def _digest_of(folder: Path) -> str:
    """Return a digest of all files in a folder that a tokenizer may be read from.

    Raises:
        UserError: one of them is not a regular file, or is too large.
    """
    digest = hashlib.sha256()
    for path in sorted({path for one in FILES for path in folder.glob(one) if not path.is_dir()}):
        with os_errors_as(UserError, f"{path}: cannot read the file"):
            content = read_bytes(path, LARGEST_FILE)
        digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def read_files(path: Path, key: str) -> bytes:
    """Read the files of a tokenizer in a child process and return the cache entry for them."""
    fault, gguf = f"{path}: no tokenizer can be read there", path.suffix == ".gguf"
    if not gguf and needs_transformers(path):  # the child has too little memory for this import
        import transformers

        assert transformers.PreTrainedTokenizerFast

    def read(_: object) -> bytes:
        with refusals(fault):
            parts = read_gguf_tokenizer(path) if gguf else read_folder_tokenizer(path)
            return _entry(_complete(parts, path), key)

    try:
        return Limited(read, seconds=_SECONDS, memory=_MEMORY)(None)
    except RefusalError as error:
        raise UserError(f"{fault}: {error}") from None


def _complete(parts: TokenizerParts, path: Path) -> CachedTokenizer:
    """Check the parts and add the values derived from them."""
    check_growth(parts.content)
    backend = load_backend(parts.content)
    texts = {id_: text for text, id_ in backend.get_vocab().items()}
    if (largest := max(texts, default=0)) >= _MOST_IDS:
        raise UserError(
            f"{path}: token {texts[largest]!r} of the tokenizer has id {largest}; the largest "
            f"allowed id is {_MOST_IDS - 1}"
        )
    spelled = repr(sorted(texts.items())).encode()
    digest = hashlib.sha256(spelled)
    told = (part for part in (parts.tool_template,) if part is not None)
    for part in (parts.template, backend.encode(_PROBE).ids, *told):
        digest.update(repr(part).encode())
    return CachedTokenizer(
        *parts,
        size=trimmed(texts, _PADDING),
        vocabulary=hashlib.sha256(spelled).hexdigest()[:32],
        fingerprint=digest.hexdigest()[:32],
    )


def trimmed(texts: Mapping[int, str], placeholder: re.Pattern[str]) -> int:
    """Return one more than the largest id that is not a placeholder."""
    return 1 + max(
        (id_ for id_, text in texts.items() if not placeholder.fullmatch(text)), default=-1
    )
