"""Text to ids and back: encoding, chat templates, the check that draft and target share a
vocabulary.

A tokenizer is loaded from what its files came to when they were first read (tokenizer_files.py);
transformers is imported only where a chat template is to be rendered.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bass_cli.config.job import Pair
from bass_cli.errors import UserError
from bass_cli.model.sources import locate
from bass_cli.model.template import Template
from bass_cli.model.text_length import Spelling, spelling_of
from bass_cli.model.tokenizer_files import Settled, kept, refusals, renderer, settle, trimmed

_PLACEHOLDER = re.compile(r"\[PAD\d+\]|<unused\d+>|\[unused\d+\]")


class Tokenizer:
    """A model's tokenizer as its files have it. `size`: one more than the largest id that is a
    token (padding rows, which GGUF writers call [PAD123], are none)."""

    def __init__(self, settled: Settled, path: Path):
        self.settled, self.path, self.size = settled, path, settled.size

    @functools.cached_property
    def _backend(self) -> Any:
        import tokenizers

        backend = tokenizers.Tokenizer.from_buffer(self.settled.content)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = self.settled.literal
        return backend

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
        """The end-of-sequence id, if there is one."""
        return () if self.settled.eos_id is None else (self.settled.eos_id,)

    def spelled(self, id_: int) -> str:
        """How the vocabulary spells an id; nothing where it is no token."""
        return self._backend.id_to_token(id_) or ""

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Ids of a prompt, with the special tokens that the tokenizer puts around a text. This
        and the next two: UserError where there is half of a surrogate pair in the text, and
        where its length alone tells that it has more than `most` tokens; a text of which that is
        not certain may have more too."""
        with refusals(f"{self.path}: the tokenizer cannot read the text"):
            text = self._checked(text, most)
            return self._backend.encode(text).ids

    def encode_part(self, text: str, most: int | None = None) -> list[int]:
        """Ids of a text as it may stand inside another, without special tokens."""
        with refusals(f"{self.path}: the tokenizer cannot read the text"):
            text = self._checked(text, most)
            return self._backend.encode(text, add_special_tokens=False).ids

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

    def _checked(self, text: str, most: int | None) -> str:
        """The text, if it is Unicode (half of a surrogate pair, which JSON can spell, has no
        bytes) and not too long."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"character {error.start + 1} of the text is half of a surrogate pair, which is "
                "not text"
            ) from None
        if most is not None and len(text) > most and self._spelling is not None:
            fewest = self._spelling.fewest_tokens(text)
            if fewest > most:
                raise UserError(
                    f"the text has {len(text)} characters, so at least {fewest} tokens, and the "
                    f"model's context {most}"
                )
        return text

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out, spaces as they are."""
        return self._backend.decode(ids, skip_special_tokens=True)

    def fingerprint(self) -> str:
        """A digest of the vocabulary, the chat template and how a piece of text is cut."""
        return self.settled.fingerprint


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
