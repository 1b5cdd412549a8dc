"""The parts of a tokenizer, as every file format's reader returns them.

Readers: hub_tokenizer.py for folders, gguf_tokenizer.py for GGUF files. Not here: the cache of
converted tokenizers (tokenizer_files.py) and encoding text (tokenizer.py).
"""

from __future__ import annotations

from typing import NamedTuple


class TokenizerParts(NamedTuple):
    """The parts of one tokenizer, in the same form for all file formats.

    content: the tokenizer in the format of tokenizer.json, as the `tokenizers` library reads it,
        or a SentencePiece model with its added tokens (backends.pieces_content).
    template: the chat template, or None.
    special: special tokens by name (`bos_token`, ...), as chat templates use them.
    eos_ids: ids that end a sample, in ascending order; empty if the files name none.
    literal: whether special tokens inside a text are encoded as ordinary text.
    """

    content: bytes
    template: str | None
    special: dict[str, str]
    eos_ids: tuple[int, ...]
    literal: bool
