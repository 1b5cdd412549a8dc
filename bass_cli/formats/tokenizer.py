"""Text to ids and back: encoding, decoding, chat templates, and the cache of tokenizers on disk.

Also the check that draft and target have the same vocabulary. Files are read, and texts encoded, in
child processes with limits of time and memory (limits.py). A cache entry holds a tokenizer in a
form that loads without transformers; a damaged entry is written again. Not here: the formats
(hub_tokenizer.py, gguf_tokenizer.py), rendering of chat templates (chat_template.py).
"""

from __future__ import annotations

import array
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from bass_cli.config.job import Pair
from bass_cli.errors import UserError
from bass_cli.formats.backends import TokenizerParts, load_backend
from bass_cli.formats.gguf_tokenizer import read_gguf_tokenizer
from bass_cli.formats.hub_tokenizer import (
    FILES,
    LARGEST_FILE,
    needs_transformers,
    read_folder_tokenizer,
)
from bass_cli.formats.limits import Limited, RefusalError, check_growth, most_characters, refusals
from bass_cli.formats.sources import locate
from bass_cli.formats.tensor_files import read_gguf
from bass_cli.io.cache import cache_folder, read_cached, write_cached
from bass_cli.reading import is_unicode, os_errors_as, read_bytes, refuse_pointer, shown
from bass_cli.system.host import start_awaited

_CONVERSION = 6  # increase it when the readers return other parts for the same files
_PADDING = re.compile(r"\[PAD\d+\]")  # GGUF writers' text for embedding rows without a token
# A sample text; different pre-tokenizers give different ids for it.
_PROBE = "Hello  12345 wörld's \n\n\tif x==1: // 你好 🙂 \u0301"
# The tokenizers library serialises a vocabulary by counting up to its largest id. It takes 0.1 s
# for this limit, and 33 s for 2^32. The largest known vocabulary has 262,144 ids.
_MOST_IDS = 1 << 24
# CPU seconds and bytes for reading the files; the largest known take 10 s and 1 GiB
_READING_SECONDS, _READING_MEMORY = 60.0, 4 << 30
Messages = Sequence[Mapping[str, Any]]
_PLACEHOLDER = re.compile(r"\[PAD\d+\]|<unused\d+>|\[unused\d+\]")
SECONDS = 10.0  # CPU seconds for one text; 1 MB of text takes 1 s
_MEMORY = 2 << 30  # bytes that the child process may add; 1 MB of text takes a tenth of this
# The same for one rendering of a chat template; a long conversation takes some milliseconds
_TEMPLATE_SECONDS, _TEMPLATE_MEMORY = 10.0, 1 << 30


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


class Tokenizer:
    """The tokenizer of a model.

    Attributes:
        size: one more than the largest id that is a token. Padding rows do not count; GGUF
            writers call them [PAD123].
        rows: rows of the model's embedding, None if unknown. Encoding a text to an id beyond them
            is a UserError.
    """

    rows: int | None = None

    def __init__(self, cached: CachedTokenizer, path: Path):
        """Wrap what was read from `path`, which error messages name."""
        self.cached, self.path, self.size = cached, path, cached.size

    @functools.cached_property
    def _backend(self) -> Any:
        backend = load_backend(self.cached.content)
        backend.encode_special_tokens = self.cached.literal
        return backend

    @functools.cached_property
    def _encoded(self) -> Limited:
        return Limited(functools.partial(_encode, self._backend), seconds=SECONDS, memory=_MEMORY)

    @functools.cached_property
    def texts(self) -> dict[int, str]:
        """The vocabulary's spelling of each id."""
        return {id_: text for text, id_ in self._backend.get_vocab().items()}

    @functools.cached_property
    def special_tokens(self) -> dict[str, int]:
        """The ids that `decode` leaves out, by text."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: id_ for id_, token in added.items() if token.special}

    @functools.cached_property
    def _rendered(self) -> Limited:
        from bass_cli.formats.chat_template import renderer  # before limits.py forks the process

        assert self.cached.template is not None
        render = renderer(self.cached.template, self.cached.special, self.cached.tool_template)
        return Limited(render, seconds=_TEMPLATE_SECONDS, memory=_TEMPLATE_MEMORY)

    @classmethod
    def load(cls, path: Path, *, vocabulary: str | None = None) -> Tokenizer:
        """Load the tokenizer of a model's folder or .gguf file.

        Args:
            vocabulary: the digest in the header of a .gguf file, if it was read (tensor_files.py).

        Raises:
            UserError: no tokenizer can be read there, or it is Python code in the folder, which
                is never run.
        """
        return cls(read_tokenizer(path, vocabulary), path)

    @property
    def has_chat_template(self) -> bool:
        return self.cached.template is not None

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a sample, in ascending order; see backends.end_ids."""
        return self.cached.eos_ids

    def spelled(self, id_: int) -> str:
        """Return the vocabulary's spelling of an id, or "" if the id is not a token."""
        return self._backend.id_to_token(id_) or ""

    def id_of(self, spelled: str) -> int | None:
        """Return the id of the token with this spelling; None if there is none."""
        found: int | None = self._backend.token_to_id(spelled)
        return found

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Return the ids of a prompt, with the special tokens that the tokenizer adds around it.

        Args:
            most: tokens of the model's context. Clearly longer texts are refused early, but the
                result may still be longer.

        Raises:
            UserError: the text is not valid Unicode, is clearly longer than `most` tokens, has
                too many characters for this context, or takes too much time or memory.
        """
        return self._ids(text, most, special=True)

    def special_start(self, text: str) -> str | None:
        """Return the special token that a text begins with, if there is one."""
        return next((one for one in self.cached.special.values() if text.startswith(one)), None)

    def encode_part(
        self, text: str, most: int | None = None, *, embedded: bool = True
    ) -> list[int]:
        """Return the ids of a text without special tokens around it; else like `encode`.

        Args:
            embedded: fail if the model's embedding has no row for one of the ids.
        """
        return self._ids(text, most, special=False, embedded=embedded)

    def _ids(
        self, text: str, most: int | None, *, special: bool, embedded: bool = True
    ) -> list[int]:
        fault = f"{self.path}: the tokenizer cannot read the text"
        self._check(text, most)
        try:
            answer = self._encoded((text, special, most, fault))
        except RefusalError as error:
            raise UserError(f"{fault}: {error}") from None
        ids: list[int] = array.array("I", answer).tolist()
        return self.embedded(ids) if embedded else ids

    def encode_chat(self, messages: Messages, most: int | None = None, **how: Any) -> list[int]:
        """Return the ids of a conversation, up to where the assistant's text begins.

        `how`: see `render`.

        Raises:
            UserError: there is no chat template, it refuses the messages, or see `encode`.
        """
        text = self.render(messages, **how)
        return self.encode_part(text, most)  # the template writes special tokens

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        args: Mapping[str, Any] | None = None,
        without_thinking: tuple[str, str] | None = None,
    ) -> str:
        """Return the text of a conversation, up to where the assistant's text begins.

        If the last message is the assistant's, its text is continued.

        Args:
            tools: JSON schemas of tools.
            args: values of the template's own variables.
            without_thinking: see ChatRequest.

        Raises:
            UserError: there is no chat template, or it refuses the messages.
        """
        from bass_cli.formats.chat_template import ChatRequest

        if not self.has_chat_template:
            raise UserError(
                f"{self.path}: the tokenizer has no chat template, so messages cannot be used"
            )
        request = ChatRequest(messages, tools, args or {}, without_thinking)
        try:
            return self._rendered(request).decode("utf-8", "surrogatepass")
        except RefusalError as error:
            raise UserError(f"the chat template refuses the messages: {error}") from None

    def check_chats(
        self,
        tools: Sequence[Mapping[str, Any]] | None = None,
        args: Mapping[str, Any] | None = None,
    ) -> str | None:
        """Return the template's variable that turns thinking on and off; None if it has none.

        Raises:
            UserError: the chat template is broken, or does not use tools or these variables.
        """
        from bass_cli.formats.chat_template import ChatRequest

        if not self.has_chat_template:
            return None
        try:
            return self._rendered(ChatRequest(None, tools, args or {})).decode() or None
        except RefusalError as error:
            raise UserError(f"{self.path}: the chat template: {error}") from None

    def with_template(self, template: str) -> Tokenizer:
        """Return the same tokenizer with another chat template."""
        digest = hashlib.sha256(f"{self.cached.fingerprint} {template}".encode()).hexdigest()
        changed = self.cached._replace(
            template=template, tool_template=None, fingerprint=digest[:32]
        )
        other = Tokenizer(changed, self.path)
        other.rows = self.rows
        return other

    def embedded(self, ids: list[int]) -> list[int]:
        """Return the ids unchanged; UserError if one has no row in the model's embedding."""
        if self.rows is not None and ids and (largest := max(ids)) >= self.rows:
            if largest >= self.size:  # given as an id
                raise UserError(f"there is no token {largest}; the model has 0 to {self.rows - 1}")
            raise UserError(
                f"token {shown(self.spelled(largest))} has id {largest}, but the model's embedding "
                f"has {self.rows} rows, and its tokenizer {self.size} ids"
            )
        return ids

    def _check(self, text: str, most: int | None) -> None:
        """Raise a UserError if the text is not valid Unicode or too long.

        JSON can contain half of a surrogate pair, which has no bytes in UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"character {error.start + 1} of the text is half of a surrogate pair, which is "
                "not text"
            ) from None
        if most is not None and len(text) > most_characters(most):
            raise UserError(
                f"the text has {len(text)} characters; the limit for the model's context of {most} "
                f"tokens is {most_characters(most)}"
            )

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids, without special tokens; spaces stay as they are."""
        return self._backend.decode(ids, skip_special_tokens=True)

    def fingerprint(self) -> str:
        """Return a digest of the vocabulary, the chat template and the ids of a sample text."""
        return self.cached.fingerprint


def _encode(backend: Any, request: tuple[str, bool, int | None, str]) -> bytes:
    """Return the ids of a text as unsigned 32-bit integers; runs in the child process.

    Longer and longer parts of the text are tokenised first, so that a text which exceeds the
    context is refused without tokenising all of it.
    """
    text, special, most, fault = request
    with refusals(fault):
        end = len(text) if most is None else 6 * most + (1 << 16)
        while end < len(text):
            tokens = len(backend.encode(text[:end], add_special_tokens=False).ids)
            if most is not None and tokens > most + most // 8 + 64:  # a margin for the cut
                raise UserError(
                    f"the text has {len(text)} characters; the first {end} are {tokens} tokens, "
                    f"and the model's context is {most} tokens"
                )
            end *= 2
        return array.array("I", backend.encode(text, add_special_tokens=special).ids).tobytes()


def begin(pair: Pair) -> Callable[[], Tokenizer | None]:
    """Start to load a pair's tokenizer from the cache in a thread.

    Loading takes some tenths of a second, during which Python can import torch.

    Returns:
        A function that waits for the thread and returns the tokenizer. It returns None if the
        cache has no entry or loading failed; a later Tokenizer.load reports the error.
    """
    found = list[Tokenizer]()

    def build() -> None:
        try:
            path = locate(pair.tokenizer or pair.target, folder=pair.folder, fetch=False)
            if cached := cached_tokenizer(path):
                tokenizer = Tokenizer(cached, path)
                assert tokenizer._backend
                found.append(tokenizer)
        except BaseException:  # panics of the tokenizers library are not Exceptions
            return

    thread = start_awaited(build, "tokenizer")

    def wait() -> Tokenizer | None:
        thread.join()
        return found[0] if found else None

    return wait


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise a UserError that names the first id whose token differs.

    Ids are compared up to the size of the smaller vocabulary, without placeholders at its end.
    """
    if target.cached.vocabulary == draft.cached.vocabulary:
        return
    size = min(trimmed(one.texts, _PLACEHOLDER) for one in (target, draft))
    for id_ in sorted(id_ for id_ in target.texts.keys() | draft.texts.keys() if id_ < size):
        ours, theirs = target.texts.get(id_), draft.texts.get(id_)
        if ours != theirs:
            raise UserError(
                f"the vocabularies of target and draft differ: id {id_} is {ours!r} in "
                f"{target.path} and {theirs!r} in {draft.path}"
            )


# The cache


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
    found = TypeAdapter(CachedTokenizer).validate_json(facts, strict=True)
    return found._replace(content=content)


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
        refuse_pointer(path, content)
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
        return Limited(read, seconds=_READING_SECONDS, memory=_READING_MEMORY)(None)
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
    if not all(map(is_unicode, filter(None, (parts.template, parts.tool_template)))):
        raise UserError(
            f"{path}: the chat template holds half of a surrogate pair, which is not Unicode; "
            "correct the file"
        )
    spelled = repr(sorted(texts.items())).encode()
    digest = hashlib.sha256(spelled)
    more = [] if parts.tool_template is None else [parts.tool_template]
    for part in (parts.template, backend.encode(_PROBE).ids, *more):
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
