"""What lookup costs the host a round: 64 samples of one prompt, each with thousands of tokens, most
of them alike.

    python benchmarks/index.py [--rows 64] [--tokens 1000,8000] [--alike 0.9] [--drafts 32]
    [--rounds 200] [--json]

Every round each row gets two tokens, which go into the index, and is looked up for up to so many
drafts. No model: the texts are random ids, of which rows share a part. Times are of one core, in
microseconds.
"""

import argparse
import random
import statistics
import time
import tracemalloc

import torch
from lookup import show

from bass_cli.drafts.ngram import LookupDrafter
from bass_cli.engine.batch import Batch, Row

_VOCABULARY, _PROMPT, _NEW = 50_000, 1000, 2


def texts(rows, length, alike):
    """What rows will come to: a text of which each row has changed some tokens."""
    chance = random.Random(0)
    base = [chance.randrange(_VOCABULARY) for _ in range(length)]
    return [
        [token if chance.random() < alike else chance.randrange(_VOCABULARY) for token in base]
        for _ in range(rows)
    ]


def measure(args, tokens):
    """The rounds after every row has `tokens` tokens of its own."""
    wanted = texts(args.rows, tokens + _NEW * args.rounds, args.alike)
    batch = Batch(
        rows=args.rows,
        context=_PROMPT + tokens + _NEW * args.rounds + args.drafts,
        device=torch.device("cpu"),
    )
    drafter, prompt = LookupDrafter(), texts(1, _PROMPT, 1.0)[0]
    rows = [Row("0", i, 0, list(prompt), tokens + _NEW * args.rounds + 1) for i in range(args.rows)]
    tracemalloc.start()
    drafter.open("0", prompt)
    change = batch.swap_rows([], rows)
    drafter.follow(change)
    for row, text in zip(rows, wanted, strict=True):
        row.tokens.extend(text[:tokens])
    drafter.learn(batch)
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    learning, looking = [], []
    for number in range(args.rounds):
        first = tokens + _NEW * number
        for row, text in zip(rows, wanted, strict=True):
            row.tokens.extend(text[first : first + _NEW])
        began = time.perf_counter()
        drafter.learn(batch)
        learnt = time.perf_counter()
        drafter.propose(batch, args.drafts)
        learning.append(learnt - began)
        looking.append(time.perf_counter() - learnt)
    whole = [a + b for a, b in zip(learning, looking, strict=True)]
    return {
        "rows": args.rows,
        "tokens": tokens,
        "learning": _micro(statistics.median(learning)),
        "looking_up": _micro(statistics.median(looking)),
        "round": _micro(statistics.median(whole)),
        "least_round": _micro(min(whole)),
        "a_row": _micro(statistics.median(whole) / args.rows),
        "index_megabytes": round(memory / 1e6, 1),
    }


def _micro(seconds):
    return round(seconds * 1e6, 1)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", default="1000,8000")
    parser.add_argument("--alike", type=float, default=0.9)
    parser.add_argument("--drafts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    show(args, (measure(args, tokens) for tokens in map(int, args.tokens.split(","))))


if __name__ == "__main__":
    main()
