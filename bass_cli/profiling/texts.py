"""Prompts to measure a real pair with: passages of several kinds, joined and cut."""

from __future__ import annotations

from bass_cli.model.tokenizer import Tokenizer

PASSAGES = (
    "The committee met on Tuesday to discuss the new budget for the library. Three members were "
    "absent, and the chair opened the meeting at nine o'clock. After a short report on last year's "
    "costs, the members turned to the question of whether the reading room should stay open on "
    "Sundays.\n\n",
    'def merge(left, right):\n    """Merge two sorted lists into one sorted list."""\n'
    "    out, i, j = [], 0, 0\n    while i < len(left) and j < len(right):\n"
    "        if left[i] <= right[j]:\n            out.append(left[i])\n            i += 1\n"
    "        else:\n            out.append(right[j])\n            j += 1\n"
    "    return out + left[i:] + right[j:]\n\n",
    "A bicycle stays upright for several reasons at once. When it begins to lean, the front wheel "
    "turns a little towards the lean, and the wheels come back under the rider. The rider helps "
    "with small movements of the handlebar, mostly without noticing them, and the faster the "
    "bicycle goes the smaller they need to be.\n\n",
    "name,age,city,joined\nAlice,31,Paris,2019-04-02\nBob,27,London,2021-11-15\n"
    "Carol,45,Madrid,2015-07-30\n"
    "Daniel,38,Vienna,2018-01-09\nEva,29,Prague,2022-05-21\nFrank,52,Oslo,2011-09-17\n\n",
    "The old lighthouse stood at the end of a narrow path, and nobody had climbed its stairs for "
    "years. On the first evening of autumn a light appeared in the highest window. The fishermen "
    "saw it from their boats and said nothing; the children of the village talked of nothing "
    "else.\n\n",
    "To make the soup, chop two onions and fry them slowly in butter until they are soft. Add four "
    "carrots, two potatoes and a litre of water, and let it simmer for half an hour. Season with "
    "salt, pepper and a little nutmeg, then serve it with fresh bread and grated cheese.\n\n",
    "class Account:\n    def __init__(self, owner, balance=0):\n        self.owner = owner\n"
    "        self.balance = balance\n\n    def withdraw(self, amount):\n"
    "        if amount > self.balance:\n"
    '            raise ValueError("not enough money")\n        self.balance -= amount\n'
    "        return self.balance\n\n",
    "Water rises from the seas and lakes as vapour when the sun warms them. High in the cold air "
    "it turns into the small drops that clouds are made of. When the drops grow too heavy they "
    "fall as rain or snow, and the rivers carry the water back to where it came from.\n\n",
)


def joined(tokenizer: Tokenizer, prompt: int, length: int) -> list[int]:
    """Passages in rotation, beginning with another one for each prompt, cut to `length` tokens."""
    tokens: list[int] = []
    turn = 0
    while len(tokens) < length:
        turn += max(turn, len(PASSAGES))
        text = "".join(PASSAGES[(prompt + i) % len(PASSAGES)] for i in range(turn))
        tokens = tokenizer.encode(text)
    return tokens[:length]
