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
from bass_cli.io.prompts import Prompt
from bass_cli.io.results import Completion, Pairs

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
