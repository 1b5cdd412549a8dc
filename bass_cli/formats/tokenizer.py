"""Text to ids and back: encoding, chat templates, the check that draft and target share a
vocabulary.

A tokenizer comes from the cache (tokenizer_files.py). Texts are encoded in a child process with
limits of time and memory. transformers is imported only to render a chat template.
"""

from __future__ import annotations

import array
import functools
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bass_cli.config.job import Pair
from bass_cli.errors import UserError
from bass_cli.formats.backends import load_backend
from bass_cli.formats.limited import Limited, RefusalError
from bass_cli.formats.sources import locate
from bass_cli.formats.template import Template
from bass_cli.formats.text_length import Spelling, most_characters, spelling_of
from bass_cli.formats.tokenizer_files import Settled, kept, refusals, renderer, settle, trimmed
from bass_cli.io.reading import shown

_PLACEHOLDER = re.compile(r"\[PAD\d+\]|<unused\d+>|\[unused\d+\]")
SECONDS = 10.0  # of CPU time for one text; 1 MB takes one
_MEMORY = 2 << 30  # bytes beyond what the process has when it begins; 1 MB takes one tenth


class Tokenizer:
    """A model's tokenizer as its files have it. `size`: one more than the largest id that is a
    token (padding rows, which GGUF writers call [PAD123], are none). `rows`: of the embedding of
    the model that reads the ids, None if unknown; an id beyond them is a UserError."""

    rows: int | None = None

    def __init__(self, settled: Settled, path: Path):
        self.settled, self.path, self.size = settled, path, settled.size

    @functools.cached_property
    def _backend(self) -> Any:
        backend = load_backend(self.settled.content)
        backend.encode_special_tokens = self.settled.literal
        return backend

    @functools.cached_property
    def _encoded(self) -> Limited:
        return Limited(functools.partial(_encode, self._backend), seconds=SECONDS, memory=_MEMORY)

    @functools.cached_property
    def texts(self) -> dict[int, str]:
        """How the vocabulary spells each id."""
        return {id_: text for text, id_ in self._backend.get_vocab().items()}

    @functools.cached_property
    def special_tokens(self) -> dict[str, int]:
        """The ids that `decode` leaves out, by their texts."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: id_ for id_, token in added.items() if token.special}

    @functools.cached_property
    def _template(self) -> Template:
        assert self.settled.template is not None
        return Template(renderer(self.settled.template, self.settled.special))

    @functools.cached_property
    def _spelling(self) -> Spelling | None:
        return spelling_of(self._backend, self._backend.get_vocab())

    @classmethod
    def load(cls, path: Path, *, vocabulary: str | None = None) -> Tokenizer:
        """From a model's folder or .gguf file; UserError if there is none that transformers can
        read, or if it is code of the folder's own, which is never run. `vocabulary`: the digest
        that the file's header has, if that was read (gguf_file.py)."""
        return cls(settle(path, vocabulary), path)

    @property
    def has_chat_template(self) -> bool:
        return self.settled.template is not None

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a sample, in ascending order (ends.py)."""
        return self.settled.eos_ids

    def spelled(self, id_: int) -> str:
        """How the vocabulary spells an id; nothing where it is no token."""
        return self._backend.id_to_token(id_) or ""

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Return the ids of a prompt, with the special tokens that the tokenizer puts around it.

        Args:
            most: how many tokens fit the model's context. A result may still have more.

        Raises:
            UserError: the text is not Unicode, is certainly longer than `most` tokens, has more
                characters than are read for such a context, or takes too much time or memory.
        """
        return self._ids(text, most, special=True)

    def encode_part(
        self, text: str, most: int | None = None, *, embedded: bool = True
    ) -> list[int]:
        """Return the ids of a text inside another one, without special tokens. See `encode`.

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
        return self._embedded(ids) if embedded else ids

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], most: int | None = None
    ) -> list[int]:
        """Ids of a conversation that is the assistant's to go on; UserError if there is no
        template or it refuses."""
        return self.encode_part(
            self.render(messages), most
        )  # the template has written its own special tokens

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of such a conversation."""
        if not self.has_chat_template:
            raise UserError(
                f"{self.path}: the tokenizer has no chat template, so messages cannot be used"
            )
        return self._template(messages)

    def _embedded(self, ids: list[int]) -> list[int]:
        """Return the ids; UserError if one has no row in the model's embedding."""
        if self.rows is not None and ids and (largest := max(ids)) >= self.rows:
            raise UserError(
                f"token {shown(self.spelled(largest))} has id {largest}, but the model's embedding "
                f"has {self.rows} rows, and its tokenizer {max(self.size, largest + 1)} ids"
            )
        return ids

    def _check(self, text: str, most: int | None) -> None:
        """UserError if the text is not Unicode (JSON can spell half of a surrogate pair, which
        has no bytes), or too long."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"character {error.start + 1} of the text is half of a surrogate pair, which is "
                "not text"
            ) from None
        if most is None or len(text) <= most:
            return
        has = f"the text has {len(text)} characters"
        if self._spelling is not None:
            fewest = self._spelling.fewest_tokens(text)
            if fewest > most:
                raise UserError(
                    f"{has}, so at least {fewest} tokens, and the model's context {most}"
                )
        if len(text) > most_characters(most):
            raise UserError(
                f"{has}, and {most_characters(most)} are the most for the model's context of "
                f"{most} tokens"
            )

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out, spaces as they are."""
        return self._backend.decode(ids, skip_special_tokens=True)

    def fingerprint(self) -> str:
        """A digest of the vocabulary, the chat template and how a piece of text is cut."""
        return self.settled.fingerprint


def _encode(backend: Any, asked: tuple[str, bool, int | None, str]) -> bytes:
    """The ids of a text, as unsigned 32-bit integers. A text that is longer than the context
    is not tokenised as a whole: a part of it is enough to see that."""
    text, special, most, fault = asked
    with refusals(fault):
        end = len(text) if most is None else 6 * most + (1 << 16)
        while end < len(text):
            tokens = len(backend.encode(text[:end], add_special_tokens=False).ids)
            if most is not None and tokens > most + most // 8 + 64:  # a margin for the cut
                raise UserError(
                    f"the text has {len(text)} characters, the first {end} of them {tokens} "
                    f"tokens, and the model's context {most}"
                )
            end *= 2
        return array.array("I", backend.encode(text, add_special_tokens=special).ids).tobytes()


def begin(pair: Pair) -> Callable[[], Tokenizer | None]:
    """Begin to build a pair's tokenizer, some tenths of a second in which Python is free for other
    work, like importing torch. What this returns waits for it; None where it was not kept, or
    something is wrong, which whoever loads it then is told."""
    found = list[Tokenizer]()

    def build() -> None:
        try:
            path = locate(pair.tokenizer or pair.target, folder=pair.folder, fetch=False)
            if settled := kept(path):
                tokenizer = Tokenizer(settled, path)
                assert tokenizer._backend
                found.append(tokenizer)
        except BaseException:  # what tokenizers raises where its own code fails is no Exception
            return

    thread = threading.Thread(target=build, name="tokenizer", daemon=True)
    thread.start()

    def wait() -> Tokenizer | None:
        thread.join()
        return found[0] if found else None

    return wait


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """UserError naming the first id whose token differs, up to the smaller vocabulary (but
    placeholders at its end)."""
    if target.settled.vocabulary == draft.settled.vocabulary:
        return
    size = min(trimmed(one.texts, _PLACEHOLDER) for one in (target, draft))
    for id_ in sorted(id_ for id_ in target.texts.keys() | draft.texts.keys() if id_ < size):
        ours, theirs = target.texts.get(id_), draft.texts.get(id_)
        if ours != theirs:
            raise UserError(
                f"the vocabularies of target and draft differ: id {id_} is {ours!r} in "
                f"{target.path} and {theirs!r} in {draft.path}"
            )
