"""What the rows of a bench begin with: prompts of unequal length, as token ids. Random ids for
random weights, a file's prompts as they are, or the passages of profiling/texts.py.
"""

from __future__ import annotations

from bass_cli.bench.settings import Settings
from bass_cli.bench.shapes import spec_of
from bass_cli.engine.batch import Row
from bass_cli.errors import UserError
from bass_cli.io.prompts import Prompt, open_source, read_prompts
from bass_cli.model.tokenizer import Tokenizer
from bass_cli.plan import Plan
from bass_cli.profiling.texts import joined

_GOLDEN = 0.6180339887498949  # its multiples, modulo 1, spread evenly however many are taken


def lengths_of(count: int, tokens: int) -> list[int]:
    """Lengths of `count` prompts, from `tokens` to twice as many, spread evenly and always the
    same."""
    return [tokens + round(tokens * ((0.5 + i * _GOLDEN) % 1.0)) for i in range(count)]


def prompts_for(settings: Settings, plan: Plan | None) -> list[list[int]]:
    """Token ids of as many prompts as the largest batch needs; `plan` is a real pair's.
    UserError where one does not fit the model."""
    count = -(-max(settings.batch_sizes) // settings.samples_per_prompt)
    lengths = lengths_of(count, settings.prompt_tokens)
    if plan is None:
        spec = spec_of(settings.shape or "", option="--shape")
        found = [_random_ids(i, length, spec.vocab) for i, length in enumerate(lengths)]
    else:
        spec = plan.files.target.spec
        found = _real_prompts(plan.files.tokenizer, settings.prompts, lengths, spec.context)
    longest = max(map(len, found)) + settings.new_tokens + settings.longest + 1
    if longest > spec.context:
        raise UserError(
            f"prompts, new tokens and drafts need {longest} positions and the model has "
            f"{spec.context}; use fewer --prompt-tokens or --new-tokens"
        )
    return found


def _real_prompts(
    tokenizer: Tokenizer, file: str | None, lengths: list[int], context: int
) -> list[list[int]]:
    if file is None:
        return [joined(tokenizer, i, length) for i, length in enumerate(lengths)]
    given = [
        _encode(tokenizer, prompt, context)
        for prompt in read_prompts(open_source(file), limit=len(lengths))
    ]
    return [given[i % len(given)] for i in range(len(lengths))]


def rows_for(
    prompts: list[list[int]],
    count: int,
    settings: Settings,
    *,
    limit: int | None = None,
    temperature: float | None = None,
    repeat: int = 0,
) -> list[Row]:
    """The first `count` rows: each prompt's samples side by side. `limit`, `temperature`: other
    than the settings'. Every repeat draws with a seed of its own."""
    sampling, samples = settings.job.sampling, settings.samples_per_prompt
    warmth = sampling.temperature if temperature is None else temperature
    return [
        Row(
            str(i // samples),
            i % samples,
            sampling.seed + repeat,
            list(prompts[i // samples]),
            limit or settings.new_tokens,
            temperature=warmth,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )
        for i in range(count)
    ]


def _random_ids(prompt: int, length: int, vocab: int) -> list[int]:
    """Ids without a pattern that is worth drafting from; the same everywhere."""
    state, out = prompt + 1, []
    for _ in range(length):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        out.append((state >> 33) % vocab)
    return out


def _encode(tokenizer: Tokenizer, prompt: Prompt, context: int) -> list[int]:
    try:
        tokens = (
            tokenizer.encode(prompt.text or "", context)
            if prompt.messages is None
            else tokenizer.encode_chat(prompt.messages, context)
        )
    except UserError as error:
        raise UserError(f"{prompt.place}: {error}") from None
    if not tokens:
        raise UserError(f"{prompt.place}: the prompt has no tokens")
    return tokens
