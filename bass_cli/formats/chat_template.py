"""Render chat templates: messages, tools and a template's own variables to the text of a prompt.

A template is a program that comes with a model, so `renderer` returns a function for a child
process with limits (limits.py). What a template would drop in silence is refused. Not here: where
templates are found (hub_tokenizer.py, gguf_tokenizer.py), text to ids (tokenizer.py).
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2.ext
import jinja2.meta

from bass_cli.errors import nearest
from bass_cli.formats.limits import RefusalError

_PROBE = "Probe"  # a content that shows whether a template renders it
LARGEST = 1 << 26  # most characters of a rendered text; more do not fit any model's context
# Variables that this module sets
_OWN = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
# Arguments of apply_chat_template that are not variables of the template
_REFUSED = {*_OWN, "conversation", "chat_template", "tokenize", "padding", "truncation"} | {
    *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    *("tokenizer_kwargs", "sanitize_control_tokens"),
}
# The variables with which templates turn thinking on and off
_SWITCHES = ("enable_thinking", "thinking")
# Keys of a message that a template may leave out
_FREE = ("role", "content", "tool_call_id", "reasoning_content", "reasoning", "thinking")


class ChatRequest(NamedTuple):
    """One conversation to render.

    messages: if the last one is the assistant's, it is continued. None to check the rest only.
    tools: JSON schemas of tools, or None.
    args: values of the template's own variables.
    without_thinking: the texts that open and close the thinking part, if the answer must begin
        without one; else None.
    """

    messages: Sequence[Mapping[str, Any]] | None
    tools: Sequence[Mapping[str, Any]] | None = None
    args: Mapping[str, Any] = {}
    without_thinking: tuple[str, str] | None = None

    @property
    def is_continued(self) -> bool:
        """Whether the last message is the assistant's, so that it is continued."""
        last = (self.messages or ({},))[-1]
        return last.get("role") == "assistant"


def renderer(
    default: str, special: Mapping[str, str], for_tools: str | None = None
) -> Callable[[ChatRequest], bytes]:
    """Return the function that renders a request in the child process, as UTF-8.

    Without messages it returns the name of the variable that turns thinking on and off, if any.

    Args:
        special: special tokens by name (`bos_token`, ...), which templates may use.
        for_tools: the template for requests with tools, if it is another one.
    """
    import tokenizers
    import transformers

    usual = transformers.PreTrainedTokenizerFast.SPECIAL_TOKENS_ATTRIBUTES
    names = {name: text for name, text in special.items() if name in usual}
    own = {name: text for name, text in special.items() if name not in usual}
    inner = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()),
        model_specific_special_tokens=own,
        **names,
    )

    def apply(messages: Sequence[Mapping[str, Any]], template: str, **words: Any) -> str:
        text: str = inner.apply_chat_template(
            list(messages), chat_template=template, tokenize=False, **words
        )
        return text

    roles_in_parts = functools.lru_cache(functools.partial(_roles_in_parts, apply))

    def render(request: ChatRequest) -> bytes:
        template = for_tools if for_tools and request.tools is not None else default
        if fault := next(_faults(template, request), None):
            raise RefusalError(fault)
        switch = next((one for one in _SWITCHES if one in _variables(template)), None)
        if request.messages is None:
            return (switch or "").encode()
        args, closing = dict(request.args), ""
        if request.without_thinking is not None:
            args = args if switch is None else {switch: False} | args
        messages = request.messages
        roles = tuple(str(message.get("role")) for message in messages)
        text = apply(
            _in_parts(messages, roles_in_parts(template, roles)),
            template,
            tools=None if request.tools is None else list(request.tools),
            add_generation_prompt=not request.is_continued,
            continue_final_message=request.is_continued,
            **args,
        )
        if request.without_thinking is not None and not request.is_continued:
            closing = _closing(text, *request.without_thinking)
        if len(text) > LARGEST:
            raise RefusalError(f"its text has {len(text)} characters; the limit is {LARGEST}")
        return (text + closing).encode("utf-8", "surrogatepass")

    return render


def _roles_in_parts(
    apply: Callable[..., str], template: str, roles: Sequence[str]
) -> frozenset[str]:
    """Return the roles whose content a template drops as a text and takes as a list of parts.

    Templates of models that also read images may do so.

    Args:
        roles: Those of a conversation, in its order, which the template may check.
    """
    probes = [{"role": role, "content": f"{_PROBE}{n}."} for n, role in enumerate(roles)]
    with contextlib.suppress(Exception):  # it may need variables, or further keys of messages
        text = apply(probes, template)
        dropped = {one["role"] for one in probes if one["content"] not in text}
        if dropped:
            text = apply(_in_parts(probes, dropped), template)
        return frozenset(dropped - {one["role"] for one in probes if one["content"] not in text})
    return frozenset()


def _in_parts(messages: Sequence[Mapping[str, Any]], roles: Container[str]) -> list[dict[str, Any]]:
    """Return the messages with each text of these roles in a list of parts."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if message.get("role") in roles and isinstance(message.get("content"), str)
        else dict(message)
        for message in messages
    ]


def _closing(text: str, begin: str, end: str) -> str:
    """Return the text that makes a prompt end with a closed thinking part.

    It is empty if the template has written one already.
    """
    bare = text.rstrip()
    if not end or bare.endswith(end):
        return ""
    opened = begin + "\n" if not bare.endswith(begin) else "" if text != bare else "\n"
    return f"{opened}\n{end}\n\n"


def _faults(template: str, request: ChatRequest) -> Iterator[str]:
    """Yield what the template would drop."""
    for name in request.args:
        if name in _REFUSED:
            yield f"{name} is set by bass, not by `template_args`"
    given = {name for name in request.args if name not in _SWITCHES}
    given |= {"tools"} if request.tools is not None else set()
    if unknown := sorted(given - _variables(template)):
        known = sorted(_variables(template) - set(_OWN))
        hint = nearest(unknown[0], known) if known else "it has no variables of its own"
        yield f"it has no variable {unknown[0]}; {hint}"
    for number, message in enumerate(request.messages or ()):
        for key in message:
            named = key in _FREE or (key == "name" and message.get("role") == "tool")
            if not named and not re.search(rf"\b{re.escape(str(key))}\b", template):
                yield f"messages[{number}].{key}: it does not use this key"


@functools.lru_cache(maxsize=2)
def _variables(template: str) -> set[str]:
    """Return the names that a template reads and does not set itself."""
    environment = jinja2.Environment(extensions=[_Generation, jinja2.ext.loopcontrols])
    return jinja2.meta.find_undeclared_variables(environment.parse(template))


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %} of transformers, which marks the assistant's text."""

    tags = {"generation"}  # noqa: RUF012 - as in the base class

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
