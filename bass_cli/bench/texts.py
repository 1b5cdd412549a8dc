"""What the rows of a bench begin with: prompts of unequal length, as token ids. Random ids for random weights, a file's
prompts as they are, or the passages below, joined and cut.
"""

from __future__ import annotations

from bass_cli.bench.settings import Settings
from bass_cli.bench.shapes import spec_of
from bass_cli.engine.batch import Row
from bass_cli.job import UserError
from bass_cli.model.tokenizer import Tokenizer
from bass_cli.plan import Plan
from bass_cli.prompts import Prompt, open_source, read_prompts

_GOLDEN = 0.6180339887498949  # its multiples, modulo 1, spread evenly however many are taken

PASSAGES = (
    "The committee met on Tuesday to discuss the new budget for the library. Three members were absent, and the chair "
    "opened the meeting at nine o'clock. After a short report on last year's costs, the members turned to the question "
    "of whether the reading room should stay open on Sundays.\n\n",
    "def merge(left, right):\n    \"\"\"Merge two sorted lists into one sorted list.\"\"\"\n    out, i, j = [], 0, 0\n"
    "    while i < len(left) and j < len(right):\n        if left[i] <= right[j]:\n            out.append(left[i])\n"
    "            i += 1\n        else:\n            out.append(right[j])\n            j += 1\n"
    "    return out + left[i:] + right[j:]\n\n",
    "A bicycle stays upright for several reasons at once. When it begins to lean, the front wheel turns a little towards "
    "the lean, and the wheels come back under the rider. The rider helps with small movements of the handlebar, mostly "
    "without noticing them, and the faster the bicycle goes the smaller they need to be.\n\n",
    "name,age,city,joined\nAlice,31,Paris,2019-04-02\nBob,27,London,2021-11-15\nCarol,45,Madrid,2015-07-30\n"
    "Daniel,38,Vienna,2018-01-09\nEva,29,Prague,2022-05-21\nFrank,52,Oslo,2011-09-17\n\n",
    "The old lighthouse stood at the end of a narrow path, and nobody had climbed its stairs for years. On the first "
    "evening of autumn a light appeared in the highest window. The fishermen saw it from their boats and said nothing; "
    "the children of the village talked of nothing else.\n\n",
    "To make the soup, chop two onions and fry them slowly in butter until they are soft. Add four carrots, two potatoes "
    "and a litre of water, and let it simmer for half an hour. Season with salt, pepper and a little nutmeg, then serve "
    "it with fresh bread and grated cheese.\n\n",
    "class Account:\n    def __init__(self, owner, balance=0):\n        self.owner = owner\n        self.balance = balance"
    "\n\n    def withdraw(self, amount):\n        if amount > self.balance:\n            raise ValueError(\"not enough "
    "money\")\n        self.balance -= amount\n        return self.balance\n\n",
    "Water rises from the seas and lakes as vapour when the sun warms them. High in the cold air it turns into the small "
    "drops that clouds are made of. When the drops grow too heavy they fall as rain or snow, and the rivers carry the "
    "water back to where it came from.\n\n",
)


def lengths_of(count: int, tokens: int) -> list[int]:
    """Lengths of `count` prompts, from `tokens` to twice as many, spread evenly and always the same."""
    return [tokens + round(tokens * ((0.5 + i * _GOLDEN) % 1.0)) for i in range(count)]


def prompts_for(settings: Settings, plan: Plan | None) -> list[list[int]]:
    """Token ids of as many prompts as the largest batch needs; `plan` is a real pair's. UserError where one does not fit
    the model."""
    count = -(-max(settings.batch_sizes) // settings.samples_per_prompt)
    lengths = lengths_of(count, settings.prompt_tokens)
    if plan is None:
        spec = spec_of(settings.shape or "", option="--shape")
        found = [_random_ids(i, length, spec.vocab) for i, length in enumerate(lengths)]
    else:
        spec = plan.target.spec
        found = _real_prompts(plan.tokenizer, settings.prompts, lengths, spec.context)
    longest = max(map(len, found)) + settings.new_tokens + settings.longest + 1
    if longest > spec.context:
        raise UserError(f"prompts, new tokens and drafts need {longest} positions and the model has {spec.context}; "
                        "use fewer --prompt-tokens or --new-tokens")
    return found


def _real_prompts(tokenizer: Tokenizer, file: str | None, lengths: list[int], context: int) -> list[list[int]]:
    if file is None:
        return [joined(tokenizer, i, length) for i, length in enumerate(lengths)]
    given = [_encode(tokenizer, prompt, context) for prompt in read_prompts(open_source(file), limit=len(lengths))]
    return [given[i % len(given)] for i in range(len(lengths))]


def rows_for(prompts: list[list[int]], count: int, settings: Settings, *, limit: int | None = None,
             temperature: float | None = None, repeat: int = 0) -> list[Row]:
    """The first `count` rows: each prompt's samples side by side. `limit`, `temperature`: other than the settings'. Every
    repeat draws with a seed of its own."""
    sampling, samples = settings.job.sampling, settings.samples_per_prompt
    warmth = sampling.temperature if temperature is None else temperature
    return [Row(str(i // samples), i % samples, sampling.seed + repeat, list(prompts[i // samples]),
                limit or settings.new_tokens, temperature=warmth, top_k=sampling.top_k, top_p=sampling.top_p)
            for i in range(count)]


def _random_ids(prompt: int, length: int, vocab: int) -> list[int]:
    """Ids without a pattern that is worth drafting from; the same everywhere."""
    state, out = prompt + 1, []
    for _ in range(length):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        out.append((state >> 33) % vocab)
    return out


def _encode(tokenizer: Tokenizer, prompt: Prompt, context: int) -> list[int]:
    try:
        tokens = (tokenizer.encode(prompt.text or "", context) if prompt.messages is None else
                  tokenizer.encode_chat(prompt.messages, context))
    except UserError as error:
        raise UserError(f"{prompt.place}: {error}") from None
    if not tokens:
        raise UserError(f"{prompt.place}: the prompt has no tokens")
    return tokens


def joined(tokenizer: Tokenizer, prompt: int, length: int) -> list[int]:
    """Passages in rotation, beginning with another one for each prompt, cut to `length` tokens."""
    tokens: list[int] = []
    turn = 0
    while len(tokens) < length:
        turn += len(PASSAGES)
        text = "".join(PASSAGES[(prompt + i) % len(PASSAGES)] for i in range(turn))
        tokens = tokenizer.encode(text)
    return tokens[:length]
