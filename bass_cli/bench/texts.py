"""What the rows of a bench begin with: prompts of unequal length, as token ids. Random ids for
random weights, a file's prompts as they are, or the passages of run/profile.py: joined, or as
questions (chat) and as texts to give back with small changes (editing).
"""

from __future__ import annotations

from typing import NamedTuple

from bass_cli.bench.settings import Settings
from bass_cli.bench.shapes import spec_of
from bass_cli.engine.batch import Row
from bass_cli.errors import UserError
from bass_cli.formats.tokenizer import Tokenizer
from bass_cli.io.prompts import Prompt, open_source, read_prompts
from bass_cli.run.plan import Plan
from bass_cli.run.profile import PASSAGES, joined

CHAT, EDITING = "chat", "editing"  # kinds of text
QUESTIONS = (
    "Why does a bicycle stay upright? Explain it in a few sentences.",
    "Write a Python function that merges two sorted lists, and say how it works.",
    "Tell me a short story about an old lighthouse.",
    "How do I make a vegetable soup? List the steps.",
    "What should a town think about before it opens its library on Sundays?",
    "Where does rain come from?",
    "Suggest a plan for learning a language in one year.",
    "What is a bank account class in Python good for? Give an example.",
)
_EDIT = "Give this text back word for word, with spelling mistakes corrected:\n\n"
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
    _check_room(max(map(len, found)), settings, spec.context)
    return found


class Text(NamedTuple):
    """Token ids of a prompt, and of a text that its answer may repeat."""

    tokens: list[int]
    reference: list[int]


def kinds_for(settings: Settings, plan: Plan | None) -> dict[str, list[Text]]:
    """Return as many texts of each kind as the largest batch needs; no kinds if the settings
    name none, or if the model's context is too short for them."""
    count = -(-max(settings.batch_sizes) // settings.samples_per_prompt)
    found: dict[str, list[Text]] = {}
    for kind in settings.texts:
        assert plan is not None
        context = plan.files.target.spec.context
        try:
            found[kind] = [_text(plan.files.tokenizer, kind, i, context) for i in range(count)]
            _check_room(max(len(text.tokens) for text in found[kind]), settings, context)
        except UserError:
            return {}
    return found


def _text(tokenizer: Tokenizer, kind: str, number: int, context: int) -> Text:
    asked, reference = QUESTIONS[number % len(QUESTIONS)], list[int]()
    if kind == EDITING:
        passage = PASSAGES[number % len(PASSAGES)].strip()
        asked, reference = _EDIT + passage, tokenizer.encode_part(passage, context)
    if tokenizer.has_chat_template:
        message = [{"role": "user", "content": asked}]
        return Text(tokenizer.encode_chat(message, context), reference)
    return Text(tokenizer.encode(f"{asked}\n\n", context), reference)


def _check_room(longest: int, settings: Settings, context: int) -> None:
    needed = longest + settings.new_tokens + settings.longest + 1
    if needed > context:
        raise UserError(
            f"prompts, new tokens and drafts need {needed} positions and the model has "
            f"{context}; use fewer --prompt-tokens or --new-tokens"
        )


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
    kind: str = "",
) -> list[Row]:
    """Return the first `count` rows: each prompt's samples side by side. `limit`, `temperature`:
    other than the settings'; `kind`: of text, if there are several. Every repeat draws with a
    seed of its own."""
    sampling, samples = settings.job.sampling, settings.samples_per_prompt
    warmth = sampling.temperature if temperature is None else temperature
    return [
        Row(
            f"{kind}{i // samples}",
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
