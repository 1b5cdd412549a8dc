"""Read a file of OpenAI's batch format: each line is a request, which becomes prompts of bass.

A line that is not a request at all is a UserError that names file and line, before a model is
loaded. A request that bass cannot honour has a Fault; the other requests are not affected. The
fields of a body are those of OpenAI's endpoints and of vLLM's `run-batch`. Values are checked where
those of a prompt file are (io/prompts.py).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from bass_cli.config.job import Job
from bass_cli.config.options import LINE
from bass_cli.errors import UserError, near_word
from bass_cli.io.fields import OWN
from bass_cli.io.prompts import Prompt, prompts_of
from bass_cli.io.readers import Source
from bass_cli.reading import shown, unquoted

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
_KEYS = ("custom_id", "method", "url", "body")
_MOST_LISTED = 20  # top_logprobs; OpenAI's own limit
_FIELD = re.compile(r'field "([^"]+)": ')
_KNOWN = frozenset((*LINE, *OWN))  # the fields of a prompt
# Fields of a prompt that are not made of a field of the same name
_NAMES = {"id": "custom_id", "token_ids": "prompt", "max_new_tokens": "max_tokens"}
# Fields that a prompt needs: a fault of one of them ends the search for faults
_PROMPT = ("id", "messages", "prompt", "token_ids")
# Fields that do not change a sample
_RECORDED = (
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "priority"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "request_id"),
    "stream_options",
)
# The values with which a field changes nothing
_NEUTRAL_IF_FALSE = (
    *("stream", "echo", "ignore_eos", "use_beam_search", "continue_final_message"),
    *("return_token_ids", "return_tokens_as_token_ids"),
)
_NEUTRAL_IF_TRUE = (
    *("skip_special_tokens", "spaces_between_special_tokens", "add_generation_prompt"),
    *("include_reasoning", "parallel_tool_calls"),
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_NEUTRAL_IF_FALSE, (False,)),
    **dict.fromkeys(_NEUTRAL_IF_TRUE, (True,)),
    "suffix": ("",),
    "best_of": (1,),
    "min_tokens": (0,),
    "length_penalty": (1,),
    "tool_choice": ("auto", "none"),
    "modalities": (["text"],),
}


class Fault(NamedTuple):
    """Why a request is not answered.

    Args:
        message: The reason, which names the fields at fault.
        param: The first field at fault; None if there is none.
        code: A word for programs, as in OpenAI's API.
        status: The HTTP status code.
    """

    message: str
    param: str | None = None
    code: str = "invalid_value"
    status: int = 400


class _RefusedError(Exception):
    """A field of a request cannot be honoured."""

    def __init__(self, param: str, reason: str, code: str = "invalid_value"):
        super().__init__(reason)
        self.fault = Fault(f'"{unquoted(param)}": {reason}', param, code)


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a batch file.

    Args:
        custom_id: Its name, which is unique in the file.
        url: The endpoint.
        model: The model that it names; None if it names none.
        prompts: Its prompts; a completion may have several. Empty if there is a fault.
        logprobs: The number of likeliest tokens to report at each place, 0 for the token alone;
            None for no log-probabilities.
        echo: Whether the texts of a completion begin with their prompt.
        names: The fields of its body, by the fields of a prompt that they set.
        fault: Why it is not answered; None if it can be.
    """

    custom_id: str
    url: str
    model: str | None = None
    prompts: tuple[Prompt, ...] = ()
    logprobs: int | None = None
    echo: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    fault: Fault | None = None

    def fault_of(self, error: str, *, code: str, status: int) -> Fault:
        """Return why samples of its prompts could not be drawn."""
        place = self.prompts[0].place if self.prompts else ""
        return explained(error.removeprefix(f"{place}: "), self.names, code, status)[1]


def read_requests(
    source: Source, job: Job, *, completion_tokens: int | None = None
) -> Iterator[Request]:
    """Yield the requests of a file, in order.

    Args:
        job: The job that answers them; a request's own settings must not contradict it.
        completion_tokens: The most new tokens of a completion request that sets no limit; None for
            the job's.

    Raises:
        UserError: A line is not a JSON object, or has no `custom_id` of its own; or there is none.
    """
    defaults = {} if completion_tokens is None else {"max_new_tokens": completion_tokens}
    seen: dict[str, int] = {}
    ids: dict[str, int] = {}  # of prompts
    for line, record in source.records():
        if len(seen) == job.limit:
            return
        place = f"{source.label}:{line}"
        if not isinstance(record, Mapping):
            keys = ", ".join(_KEYS)
            raise UserError(f"{place}: a request is an object with {keys}, not {shown(record)}")
        name = record.get("custom_id")
        if not isinstance(name, str) or not name:
            near = near_word("custom_id", map(str, record)) if name is None else None
            hint = "" if near is None else f'; did you mean it by "{unquoted(near)}"?'
            reason = "it is missing" if name is None else f"a text is needed, not {shown(name)}"
            raise UserError(f'{place}: field "custom_id": {reason}{hint}')
        if name in seen:
            raise UserError(
                f'{place}: field "custom_id": {shown(name)} is also that of line {seen[name]}'
            )
        seen[name] = line
        request = _request(record, name, place, job, defaults)
        for prompt in request.prompts:
            if ids.setdefault(prompt.id, line) != line:
                raise UserError(
                    f'{place}: field "custom_id": {shown(prompt.id)} is also the name of a prompt '
                    f"of line {ids[prompt.id]}"
                )
        yield request
    if not seen:
        raise UserError(f"{source.label}: it contains no requests")


def _request(
    record: Mapping[str, Any], name: str, place: str, job: Job, defaults: dict[str, Any]
) -> Request:
    """Make a request of a line. `defaults`: fields of the prompts of a completion."""
    url = record.get("url")
    known = url if isinstance(url, str) else ""
    try:
        body = _body_of(record)
        model = body.get("model")
        if model is not None and not isinstance(model, str):
            raise _RefusedError("model", f"a text is needed, not {shown(model)}")
        logprobs = _logprobs(body, is_chat=url == CHAT)
        if url == CHAT and "messages" not in body:
            raise _RefusedError("messages", "it is missing", "missing_required_parameter")
        items = [{}] if url == CHAT else _items(body)
        echo = url == COMPLETION and body.get("echo") is True and body.pop("echo")
    except _RefusedError as error:
        return Request(name, known, fault=error.fault)
    fields, names, faults = _fields(body)
    prompts = list[Prompt]()
    for number, item in enumerate(items):
        # an id of its own, because it fixes the prompt's random numbers
        own: dict[str, Any] = {"id": name if len(items) == 1 else f"{name}[{number}]"}
        own |= {} if logprobs is None else {"logprobs": logprobs}
        own |= {} if logprobs is None or not echo else {"prompt_logprobs": logprobs}
        record = (defaults if item else {}) | fields | item | own
        prompt, refused = _prompt(record, names, place, job)
        prompts += [] if prompt is None else [prompt]
        faults += refused
    if faults:
        message = "; ".join(dict.fromkeys(fault.message for fault in faults))
        return Request(name, known, model, fault=faults[0]._replace(message=message))
    return Request(name, known, model, tuple(prompts), logprobs, echo, names)


def _body_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body without fields that are null; _RefusedError if the line is not a request."""
    for key in record:
        if key not in _KEYS:
            raise _RefusedError(str(key), "a request has no such field", "unknown_parameter")
    if record.get("method") != "POST":
        raise _RefusedError("method", f"it must be POST, not {shown(record.get('method'))}")
    if record.get("url") not in (CHAT, COMPLETION):
        reason = f"{shown(record.get('url'))} is not served; use {CHAT} or {COMPLETION}"
        raise _RefusedError("url", reason, "invalid_url")
    body = record.get("body")
    if not isinstance(body, Mapping):
        raise _RefusedError("body", f"an object is needed, not {shown(body)}")
    return {key: value for key, value in body.items() if value is not None}


def _logprobs(body: dict[str, Any], *, is_chat: bool) -> int | None:
    """Take the number of tokens to report at each place from the body."""
    given = body.pop("logprobs", None)
    if not is_chat:
        return None if given is None else _count(given, "logprobs")
    most = body.pop("top_logprobs", None)
    if given not in (None, True, False):
        raise _RefusedError("logprobs", f"true or false is needed, not {shown(given)}")
    if most is not None and not given:
        raise _RefusedError("top_logprobs", 'it needs "logprobs": true')
    return _count(most or 0, "top_logprobs") if given else None


def _count(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value <= _MOST_LISTED:
        reason = f"a whole number from 0 to {_MOST_LISTED} is needed, not {shown(value)}"
        raise _RefusedError(name, reason)
    return value


def _items(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Take the prompts of a completion: a text, token ids, or a list of either."""
    given = body.pop("prompt", None)
    if given is None:
        raise _RefusedError("prompt", "it is missing", "missing_required_parameter")
    if isinstance(given, list) and given and not all(type(one) is int for one in given):
        return [_text(one) for one in given]
    return [_text(given)]


def _text(given: Any) -> dict[str, Any]:
    if isinstance(given, str):
        return {"prompt": given}
    if isinstance(given, list) and given and all(type(one) is int for one in given):
        return {"token_ids": given}
    reason = f"a text, a list of token ids, or a list of either is needed, not {shown(given)}"
    raise _RefusedError("prompt", reason)


def _fields(body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str], list[Fault]]:
    """Return the fields of a prompt that a body sets, their names there, and faults of others."""
    found: dict[str, Any] = {}
    names: dict[str, str] = {}
    faults = []
    for name, value in body.items():
        if name in _RECORDED or _is_neutral(name, value):
            continue
        try:
            given = _CONVERTED[name](value) if name in _CONVERTED else {name: value}
            if name not in (*_CONVERTED, *_SAME) or not _KNOWN.issuperset(given):
                raise _RefusedError(name, "bass has no such setting", "unsupported_parameter")
            names |= dict.fromkeys(given, name)
            for key, one in given.items():
                if found.setdefault(key, one) != one:
                    raise _RefusedError(name, "another field of the body contradicts it")
        except _RefusedError as error:
            faults.append(error.fault)
    if body.get("tool_choice") == "none":
        found.pop("tools", None)
    if body.get("best_of") == body.get("n", 1):
        faults = [fault for fault in faults if fault.param != "best_of"]
    return found, names, faults


def _is_neutral(name: str, value: Any) -> bool:
    """Whether the field changes nothing. True and 1 are different values here."""
    return any(type(one) is type(value) and one == value for one in _NEUTRAL.get(name, ())) or (
        type(value) is float and value in _NEUTRAL.get(name, ())
    )


def _prompt(
    record: dict[str, Any], names: Mapping[str, str], place: str, job: Job
) -> tuple[Prompt | None, list[Fault]]:
    """Make a prompt of its fields; if any is refused, return a fault for each of them instead."""
    faults = list[Fault]()
    while True:
        try:
            (prompt,) = prompts_of([record])
            prompt.own_job(job)
            if prompt.fault is not None:
                raise UserError(prompt.fault)
        except UserError as error:
            name, fault = explained(str(error).removeprefix("prompts[0]: "), names)
            faults.append(fault)
            if name in _PROMPT or name not in record:  # no more to find
                return None, faults
            record = {key: value for key, value in record.items() if key != name}
            continue
        return (None if faults else replace(prompt, place=place)), faults


def explained(
    reason: str, names: Mapping[str, str], code: str = "invalid_value", status: int = 400
) -> tuple[str, Fault]:
    """Return the field of a prompt that a reason is about, "" if there is none, and the fault.

    `names`: see Request. The fault names the field of the body.
    """
    found = _FIELD.match(reason)
    if found is None:
        return "", Fault(reason, None, code, status)
    theirs = names.get(found[1], _NAMES.get(found[1], found[1]))
    return found[1], Fault(f'"{theirs}": {reason[found.end() :]}', theirs, code, status)


def _constraint(kind: str, value: Any, name: str) -> dict[str, Any]:
    """Return the field of a prompt for a constraint, as vLLM names its kinds.

    `name`: The field of the body.
    """
    if kind == "json" and isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise _RefusedError(name, f"this is not JSON: {shown(value)}") from None
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
            raise _RefusedError(name, f"a list of texts is needed, not {shown(value)}")
        return {"regex": "|".join(re.sub(r"([^\w\s])", r"\\\1", one) for one in value)}
    return {{"json": "json_schema"}.get(kind, kind): value}


def _structured(value: Any) -> dict[str, Any]:
    """Return the field of a prompt for vLLM's `structured_outputs`."""
    kinds = {"json", "regex", "choice", "grammar", "json_object"}
    given = value if isinstance(value, Mapping) else {}
    used = [(kind, one) for kind, one in given.items() if one is not None and one is not False]
    if len(used) != 1 or used[0][0] not in kinds:
        raise _RefusedError(
            "structured_outputs", f"an object with one of {', '.join(sorted(kinds))} is needed"
        )
    return _constraint(*used[0], "structured_outputs")


def _response_format(value: Any) -> dict[str, Any]:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    schema = value.get("json_schema") if kind == "json_schema" else None
    if not isinstance(schema, Mapping) or not isinstance(schema.get("schema"), Mapping):
        reason = 'give {"type": "json_schema", "json_schema": {"name", "schema"}}, or the type '
        raise _RefusedError("response_format", f"{reason}json_object or text, not {shown(value)}")
    return {"json_schema": schema["schema"]}


def _renamed(ours: str) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {ours: value}


# Fields that mean what the field of a prompt with this name means
_SAME = (
    *("messages", "tools", "n", "seed", "stop", "stop_token_ids", "temperature", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words"),
    "allowed_token_ids",
)
_CONVERTED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "max_tokens": _renamed("max_new_tokens"),
    "max_completion_tokens": _renamed("max_new_tokens"),
    "include_stop_str_in_output": _renamed("include_stop"),
    "thinking_token_budget": _renamed("max_thinking_tokens"),
    "chat_template_kwargs": _renamed("template_args"),
    "top_k": lambda value: {"top_k": 0 if value == -1 else value},  # vLLM's word for all
    "response_format": _response_format,
    "structured_outputs": _structured,
    **{
        f"guided_{kind}": functools.partial(_constraint, kind, name=f"guided_{kind}")
        for kind in ("json", "regex", "choice", "grammar")
    },
}
