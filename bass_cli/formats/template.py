"""A chat template: messages to text.

A template is a program of the model's. It is rendered in a child process with limits of time and
memory (limited.py). Not here: the tokens of the text (tokenizer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bass_cli.errors import UserError
from bass_cli.formats.limited import Limited, RefusalError

Messages = Sequence[Mapping[str, Any]]
SECONDS = 10.0  # of CPU time; a long conversation takes some milliseconds
_MEMORY = 2**30  # bytes beyond what the process has when it begins
_LARGEST = 2**26  # characters of a text; more fit no model's context


class Template:
    """Render messages by `render`, which must have imported what it needs."""

    def __init__(self, render: Callable[[Messages], str]):
        def encoded(messages: Messages) -> bytes:
            text = render(messages)
            if len(text) > _LARGEST:
                raise RefusalError(f"it makes {len(text)} characters of them")
            return text.encode("utf-8", "surrogatepass")

        self._render = Limited(encoded, seconds=SECONDS, memory=_MEMORY)

    def __call__(self, messages: Messages) -> str:
        """Return the text.

        Raises:
            UserError: the template refuses the messages, or exceeds a limit.
        """
        try:
            return self._render(messages).decode("utf-8", "surrogatepass")
        except RefusalError as error:
            raise UserError(f"the chat template refuses the messages: {error}") from None
