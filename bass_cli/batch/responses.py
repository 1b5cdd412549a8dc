"""The two files of `bass batch`: responses in one, requests that failed in the other.

A line is appended when its request is complete. A request with a line in either file is done, so a
run that was killed is continued. Both files have a manifest, as every output of bass
(io/results.py). Bodies have the layout of OpenAI's chat completions and completions, which the
types of the `openai` package parse. Ids are random and `created` is the time of writing.
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bass_cli.batch.requests import CHAT, Fault, Request
from bass_cli.errors import UserError
from bass_cli.io.prompts import Prompt
from bass_cli.io.results import Completion, Pairs, Writer
from bass_cli.io.resume import COUNTED, OutputState, PromptDigest, result_rows

# By the finish reason of a sample. A sample that a budget truncated has not reached its end.
_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "budget": "length"}
_LEAST = -9999.0  # OpenAI's log-probability of a token that cannot occur; JSON has no infinity
Spell = Callable[[int], bytes]  # the bytes of a token
# A token id, its log-probability (None for the first token of a prompt), and the likeliest tokens
Place = tuple[int, float | None, Pairs]


def answered(
    request: Request, samples: Sequence[Sequence[Completion]], model: str, spell: Spell
) -> dict[str, Any]:
    """Return the line of a request that was answered.

    Args:
        samples: The samples of each prompt, by number.
        model: The name of the model that they come from.
        spell: Returns the bytes of a token.
    """
    is_chat, choices = request.url == CHAT, list[dict[str, Any]]()
    for prompt, group in zip(request.prompts, samples, strict=True):
        for sample in group:
            choice = (
                _chat_choice(request, sample, spell)
                if is_chat
                else _completion_choice(request, prompt, group[0], sample, spell)
            )
            choices.append({"index": len(choices)} | choice)
    body = {
        "id": _id("chatcmpl" if is_chat else "cmpl"),
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": _usage(samples),
    }
    return _line(request, {"status_code": 200, "request_id": _id("req"), "body": body}, None)


def refused(request: Request, fault: Fault) -> dict[str, Any]:
    """Return the line of a request that was not answered."""
    kind = "invalid_request_error" if fault.status < 500 else "server_error"
    body = {
        "error": {"message": fault.message, "type": kind, "param": fault.param, "code": fault.code}
    }
    response = {"status_code": fault.status, "request_id": _id("req"), "body": body}
    return _line(request, response, {"code": fault.code, "message": fault.message})


def _line(
    request: Request, response: dict[str, Any], error: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        "id": _id("batch_req"),
        "custom_id": request.custom_id,
        "response": response,
        "error": error,
    }


def _id(kind: str) -> str:
    separator = "-" if kind in ("chatcmpl", "cmpl") else "_"
    return f"{kind}{separator}{uuid.uuid4().hex}"


def _chat_choice(request: Request, sample: Completion, spell: Spell) -> dict[str, Any]:
    content = [
        _token(place, spell)
        | {"top_logprobs": [_token((int(id_), score), spell) for id_, score in likeliest]}
        for *place, likeliest in _places(sample)
    ]
    message = {"role": "assistant", "content": sample.text, "refusal": None}
    if sample.reasoning is not None:  # the key of vLLM and DeepSeek
        message["reasoning_content"] = sample.reasoning
    return {
        "message": message,
        "logprobs": None if request.logprobs is None else {"content": content, "refusal": None},
        "finish_reason": _REASONS[sample.finish_reason],
    }


def _completion_choice(
    request: Request, prompt: Prompt, first: Completion, sample: Completion, spell: Spell
) -> dict[str, Any]:
    """Return a choice of a completion. `first`: the prompt's first sample."""
    places = _places(sample)
    text = sample.text
    if request.echo:
        places = _prompt_places(first) + places
        text = _prompt_text(prompt, spell) + text
    return {
        "text": text,
        "logprobs": None if request.logprobs is None else _lists(places, request.logprobs, spell),
        "finish_reason": _REASONS[sample.finish_reason],
    }


def _places(sample: Completion) -> list[Place]:
    """Return the places of the tokens of the text.

    The end-of-sequence token and the thinking part are not among them, because they are not part
    of the text.
    """
    ids, scores = sample.token_ids or [], [*(sample.token_logprobs or ())]
    likeliest = sample.top_logprobs or [[] for _ in scores]
    places: list[Place] = list(zip(ids[: len(scores)], scores, likeliest, strict=True))
    end = -1 if sample.finish_reason == "eos" else None
    return places[sample.reasoning_tokens or 0 : end]


def _prompt_places(first: Completion) -> list[Place]:
    ids, scores = first.prompt_token_ids or [], first.prompt_logprobs or []
    likeliest = [one or [] for one in first.prompt_top_logprobs or [[] for _ in scores]]
    return list(zip(ids, scores, likeliest, strict=True))


def _prompt_text(prompt: Prompt, spell: Spell) -> str:
    if prompt.token_ids is None:
        return prompt.text or ""
    return b"".join(map(spell, prompt.token_ids)).decode("utf-8", "replace")


def _token(place: Sequence[Any], spell: Spell) -> dict[str, Any]:
    word = spell(place[0])
    return {"token": _text(word), "logprob": _finite(place[1]), "bytes": [*word]}


def _lists(places: Sequence[Place], most: int, spell: Spell) -> dict[str, Any]:
    """Return the log-probabilities of a completion. The likeliest tokens include the drawn one."""
    words = [_text(spell(id_)) for id_, _, _ in places]
    likeliest = [
        {_text(spell(int(one))): _finite(number) for one, number in top} | {word: _finite(score)}
        if score is not None
        else None
        for word, (_, score, top) in zip(words, places, strict=True)
    ]
    return {
        "tokens": words,
        "token_logprobs": [None if score is None else _finite(score) for _, score, _ in places],
        "top_logprobs": likeliest if most else None,
        "text_offset": [0, *itertools.accumulate(map(len, words))][: len(words)],
    }


def _text(word: bytes) -> str:
    return word.decode("utf-8", "replace")


def _finite(score: float) -> float:
    return max(score, _LEAST)


def _usage(samples: Sequence[Sequence[Completion]]) -> dict[str, Any]:
    """Count tokens. The prompt of several samples counts once."""
    prompts = sum(group[0].prompt_tokens for group in samples)
    new = sum(sample.tokens for group in samples for sample in group)
    usage: dict[str, Any] = {
        "prompt_tokens": prompts,
        "completion_tokens": new,
        "total_tokens": prompts + new,
    }
    thoughts = [sample.reasoning_tokens for group in samples for sample in group]
    if any(thoughts):
        details = {"reasoning_tokens": sum(number or 0 for number in thoughts)}
        usage["completion_tokens_details"] = details
    return usage


# The files

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


@dataclass(slots=True)
class _Pending:
    """A request in progress, with the samples of each of its prompts by their numbers."""

    request: Request
    samples: list[dict[int, Completion]]
    missing: int


class Answers:
    """Appends the lines of requests. `generation.write_samples` uses it as a Writer.

    Attributes:
        done: The samples of the requests that are done, as (prompt id, sample).
        failed: The number of requests that were not answered.
        notes: Notes for the user.
    """

    def __init__(
        self, out: Writer, errors: Writer, *, stale: bool, model: str, n: int, spell: Spell
    ):
        """Take the opened files.

        Args:
            stale: Whether the file of errors has old lines, which are to be removed.
            model: The name of the model in responses.
            n: Samples of a prompt that sets no number.
            spell: Returns the bytes of a token.
        """
        self._out, self._errors = out, errors
        self._model, self._n, self._spell = model, n, spell
        self._pending: dict[str, tuple[_Pending, int]] = {}  # by prompt id
        self._done = {name for name, _ in (*out.done, *errors.done)}  # custom ids
        self.failed = len(errors.done)
        self._changed = stale  # whether this run must write the file of errors
        self.name, self.totals = out.name, out.totals
        self.notes = [*out.notes, *errors.notes]
        self.done: set[tuple[str, int]] = set()

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        finished = kind is None
        try:  # without errors there is no file of errors
            self._errors.close(finished=finished and self._changed)
        finally:
            self._out.close(finished=finished)

    def skip(self, requests: Iterable[Request]) -> None:
        """Fill `done` with the samples of the requests that have a line."""
        if self._done:
            self.done = {
                (prompt.id, sample)
                for request in requests
                if request.custom_id in self._done
                for prompt in request.prompts
                for sample in range(prompt.samples(self._n))
            }

    def prompts(self, requests: Iterable[Request]) -> Iterator[Prompt]:
        """Yield the prompts of requests, and write the error of each new request with a fault."""
        for request in requests:
            if request.custom_id not in self._done:
                if request.fault is not None:
                    self._fail(request, request.fault)
                    continue
                counts = [prompt.samples(self._n) for prompt in request.prompts]
                pending = _Pending(request, [{} for _ in counts], sum(counts))
                for number, prompt in enumerate(request.prompts):
                    self._pending[prompt.id] = pending, number
            yield from request.prompts

    def write(self, completion: Completion) -> None:
        """Take a sample; append the line of its request if it is complete or has failed."""
        if completion.id not in self._pending:
            return  # its request has failed
        pending, number = self._pending[completion.id]
        request = pending.request
        if completion.finish_reason == "error":
            status, code = (400, "invalid_prompt") if completion.is_of_prompt else (500, "error")
            self._forget(request)
            fault = request.fault_of(str(completion.error), code=code, status=status)
            self._fail(request, fault)
            return
        pending.samples[number][completion.sample] = completion
        pending.missing -= 1
        if pending.missing:
            return
        self._forget(request)
        groups = [[group[place] for place in sorted(group)] for group in pending.samples]
        samples = [one for group in groups for one in group]
        counts = {key: sum(getattr(one, key) for one in samples) for key in COUNTED}
        line = answered(request, groups, self._model, self._spell)
        self._append(self._out, line, counts | {"finish_reason": "answered"})

    def _forget(self, request: Request) -> None:
        for prompt in request.prompts:
            self._pending.pop(prompt.id, None)

    def _fail(self, request: Request, fault: Fault) -> None:
        self.failed += 1
        self._changed = True
        counts = dict.fromkeys(COUNTED, 0)
        self._append(self._errors, refused(request, fault), counts | {"finish_reason": "error"})

    def _append(self, writer: Writer, line: dict[str, Any], counts: dict[str, Any]) -> None:
        writer.append(_encode(line).encode("utf-8", "backslashreplace") + b"\n", counts)

    def confirm(self) -> None:
        """Raise MachineError if a file was renamed, replaced or truncated by another program."""
        self._out.confirm()
        self._errors.confirm()

    def add_run(self, seconds: float, usage: dict[str, Any]) -> None:
        """Add this run's seconds to the totals of the manifest."""
        self._out.add_run(seconds, usage)


def read_answers(lines: Iterable[bytes], name: str) -> OutputState:
    """Read the lines of a file of responses or errors; `done` has (custom id, 0).

    UserError at a broken line other than the last, and at a request that occurs twice.
    """
    past = OutputState()
    for number, _, row in result_rows(lines, name, past, _check_answer):
        key = (row["custom_id"], 0)
        if key in past.done:
            raise UserError(f'{name}:{number}: request "{key[0]}" occurs twice')
        past.done.add(key)
        body = row["response"].get("body")
        usage = body.get("usage") if isinstance(body, dict) else None
        tokens = usage.get("completion_tokens") if isinstance(usage, dict) else 0
        failed = row.get("error") is not None
        counts = {"finish_reason": "error" if failed else "answered", "tokens": tokens}
        past.count(dict.fromkeys(COUNTED, 0) | counts)
    if past.holes:
        raise UserError(f"{name}: a power cut damaged lines of it; remove those with NUL bytes")
    return past


def _check_answer(row: dict[str, Any], place: str) -> None:
    """Raise UserError if the line is not one of a batch's output."""
    for key, kind in (("custom_id", str), ("response", dict)):
        if not isinstance(row.get(key), kind):
            raise UserError(f'{place}: this is not a line of a batch\'s output: field "{key}"')


@dataclass(slots=True)
class BatchFacts:
    """What is known of the requests of a file after it was read once.

    Args:
        models: The models that requests name.
        needs_bytes: Whether the bytes of tokens are needed.
    """

    models: set[str] = field(default_factory=set)
    needs_bytes: bool = False

    def add(self, request: Request) -> None:
        """Add a request."""
        if request.model is not None:
            self.models.add(request.model)
        self.needs_bytes |= request.echo or request.logprobs is not None


class RequestDigest(PromptDigest):
    """A digest of a batch file's prompts, and of its requests with a fault."""

    def add_request(self, request: Request) -> None:
        """Add the next request."""
        for prompt in request.prompts:
            self.add(prompt)
        if not request.prompts:
            self.add(Prompt(request.custom_id, None, None, {}, None, "", str(request.fault)))

    def _named(self, number: int) -> str:
        return f"prompt number {number}"
