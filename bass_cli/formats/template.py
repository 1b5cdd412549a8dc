"""Chat templates: messages to text.

A template is a program that comes with a model. It runs in a child process with limits of time and
memory (limited.py). Not here: tokenising the text (tokenizer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bass_cli.errors import UserError
from bass_cli.formats.limited import Limited, RefusalError

Messages = Sequence[Mapping[str, Any]]
SECONDS = 10.0  # CPU seconds of one rendering; a long conversation takes some milliseconds
_MEMORY = 2**30  # bytes that the child process may add
_LARGEST = 2**26  # most characters of the text; more do not fit any model's context


class Template:
    """A chat template that is rendered with limits."""

    def __init__(self, render: Callable[[Messages], str]):
        """Wrap the function that renders messages; its modules must be imported already."""

        def encoded(messages: Messages) -> bytes:
            text = render(messages)
            if len(text) > _LARGEST:
                raise RefusalError(f"its text has {len(text)} characters; the limit is {_LARGEST}")
            return text.encode("utf-8", "surrogatepass")

        self._render = Limited(encoded, seconds=SECONDS, memory=_MEMORY)

    def __call__(self, messages: Messages) -> str:
        """Return the text of the messages.

        Raises:
            UserError: the template refuses the messages, or exceeds a limit.
        """
        try:
            return self._render(messages).decode("utf-8", "surrogatepass")
        except RefusalError as error:
            raise UserError(f"the chat template refuses the messages: {error}") from None
