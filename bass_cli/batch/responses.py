"""Write the line of a request in OpenAI's batch format: its response, or why there is none.

Bodies have the layout of OpenAI's chat completions and completions, which the types of the `openai`
package parse. Ids are random and `created` is the time of writing.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from bass_cli.batch.requests import CHAT, Fault, Request
from bass_cli.io.results import Completion

# By the finish reason of a sample. A sample that a budget truncated has not reached its end.
_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "budget": "length"}
_LEAST = -9999.0  # OpenAI's log-probability of a token that cannot occur; JSON has no infinity
Spell = Callable[[int], bytes]  # the bytes of a token


def answered(
    request: Request, samples: Sequence[Sequence[Completion]], model: str, spell: Spell
) -> dict[str, Any]:
    """Return the line of a request that was answered.

    Args:
        samples: The samples of each prompt, by number.
        model: The name of the model that they come from.
        spell: Returns the bytes of a token.
    """
    is_chat, choices = request.url == CHAT, [one for group in samples for one in group]
    body = {
        "id": _id("chatcmpl" if is_chat else "cmpl"),
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(request, index, sample, spell) for index, sample in enumerate(choices)],
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


def _choice(request: Request, index: int, sample: Completion, spell: Spell) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "logprobs": None}
    wanted = request.logprobs is not None
    if request.url == CHAT:
        choice["message"] = {"role": "assistant", "content": sample.text, "refusal": None}
        if sample.reasoning is not None:  # the key of vLLM and DeepSeek
            choice["message"]["reasoning_content"] = sample.reasoning
        if wanted:
            choice["logprobs"] = {"content": _chat_logprobs(sample, spell), "refusal": None}
    else:
        choice["text"] = sample.text
        if wanted:
            choice["logprobs"] = _completion_logprobs(sample, spell)
    choice["finish_reason"] = _REASONS[sample.finish_reason]
    return choice


def _places(sample: Completion) -> list[tuple[int, float, list[list[int | float]]]]:
    """Return (token id, log-probability, likeliest tokens) of each token of the text.

    The end-of-sequence token and the thinking part are not among them, because they are not part
    of the text.
    """
    ids, scores = sample.token_ids or [], sample.token_logprobs or []
    likeliest = sample.top_logprobs or [[] for _ in ids]
    places = list(zip(ids, scores, likeliest, strict=True))
    places = places[:-1] if sample.finish_reason == "eos" else places
    return places[sample.reasoning_tokens or 0 :]


def _chat_logprobs(sample: Completion, spell: Spell) -> list[dict[str, Any]]:
    return [
        _token(id_, score, spell)
        | {"top_logprobs": [_token(int(one), number, spell) for one, number in likeliest]}
        for id_, score, likeliest in _places(sample)
    ]


def _token(id_: int, score: float, spell: Spell) -> dict[str, Any]:
    word = spell(id_)
    return {"token": word.decode("utf-8", "replace"), "logprob": _finite(score), "bytes": [*word]}


def _completion_logprobs(sample: Completion, spell: Spell) -> dict[str, Any]:
    """Return the lists of a completion. The likeliest tokens include the drawn one."""
    places = _places(sample)
    words = [spell(id_).decode("utf-8", "replace") for id_, _, _ in places]
    likeliest = [
        {spell(int(one)).decode("utf-8", "replace"): _finite(number) for one, number in top}
        | {word: _finite(score)}
        for word, (_, score, top) in zip(words, places, strict=True)
    ]
    return {
        "tokens": words,
        "token_logprobs": [_finite(score) for _, score, _ in places],
        "top_logprobs": likeliest if sample.top_logprobs else None,
        "text_offset": [0, *itertools.accumulate(map(len, words))][: len(words)],
    }


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
