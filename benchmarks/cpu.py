"""Compare bass with transformers' generate on this CPU, and lookup with plain decoding.

    python benchmarks/cpu.py [--rows 8] [--tokens 128] [--repeats 3] [--pair smollm2] [--threads 2]
    [--dtype fp32]

With another --dtype than fp32, such as file, transformers is left out: it has other numbers.
Prints one JSON document. Greedy, the same weights; the end of sequence is ignored so that
every row generates the same number of tokens; prefill is included. Figures are medians of the
repeats. Within a repeat the methods take turns, so that a change of the machine's speed affects all
alike. Every speculative run starts with a new draft-length controller.
"""

import argparse
import json
import platform
import statistics
import time
from importlib.metadata import version

import torch

from bass_cli.bench.figures import counts
from bass_cli.bench.rivals import LOADERS, describe
from bass_cli.bench.runs import decode, fill
from bass_cli.config.job import load_pair, make_job
from bass_cli.engine.batch import Row
from bass_cli.engine.sampling import RowSampling
from bass_cli.run.build import build
from bass_cli.run.plan import make_plan

ORDINARY = [
    "Explain how a bicycle stays upright when it is moving.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What are the main causes of the French Revolution?",
    "Give me a recipe for a simple vegetable soup.",
    "Describe the water cycle to a ten year old child.",
    "List five tips for learning a new language.",
    "Why is the sky blue during the day and red at sunset?",
    "Write a polite letter asking a landlord to repair a window.",
]
SNIPPETS = [
    "def area(width, height):\n    result = width * height\n    return result\n\ndef "
    "perimeter(width, height):\n"
    "    result = 2 * (width + height)\n    return result\n",
    "The committee met on Tuesday to discuss the new budget. Three members were absent. The chair "
    "opened the meeting at nine o'clock and closed it at noon. The next meeting will be held on "
    "the first Monday of May.\n",
    "name,age,city\nAlice,31,Paris\nBob,27,London\nCarol,45,Madrid\nDaniel,38,Vienna\n"
    "Eva,29,Prague\nFrank,52,Oslo\n",
    '{"id": 1, "colour": "red", "size": 4}\n{"id": 2, "colour": "green", "size": 7}\n'
    '{"id": 3, "colour": "blue", "size": 9}\n',
    "10:01 INFO server started on port 8080\n10:02 INFO user alice logged in\n10:03 WARN disk is "
    "almost full\n"
    "10:04 INFO user bob logged in\n",
    "Preheat the oven to 180 degrees. Mix the flour, sugar and butter in a bowl. Add two eggs and "
    "stir well. Bake for thirty minutes.\n",
    "SELECT name, city FROM users WHERE age > 30 ORDER BY name;\nSELECT title, year FROM films "
    "WHERE rating > 8 ORDER BY year;\n",
    "<ul>\n  <li>Monday: swimming</li>\n  <li>Tuesday: reading</li>\n  <li>Wednesday: "
    "cooking</li>\n</ul>\n",
]
# Texts whose continuation is a copy: each text twice, then its beginning.
COPYING = [2 * text + text[:12] for text in SNIPPETS]


def encode(tokenizer, texts):
    return [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]


def run_bass(loop, prompts, tokens):
    """Continue every prompt greedily by `tokens` tokens. Returns: seconds, sequences, accepted
    drafts of a row in a round."""
    greedy = RowSampling(temperature=0.0)
    rows = [Row(str(i), 0, 0, list(p), tokens, sampling=greedy) for i, p in enumerate(prompts)]
    began = time.perf_counter()
    fill(loop, rows)
    run = decode(loop, rows)
    seconds = time.perf_counter() - began
    texts = [row.tokens[row.prompt_length :][:tokens] for row in rows]
    return seconds, texts, counts(run).mean


def run_transformers(generate, prompts, tokens):
    began = time.perf_counter()
    texts = generate(prompts, tokens, exact=True)
    return time.perf_counter() - began, texts


def loop_for(args, draft, length):
    job = make_job(
        load_pair(args.pair),
        draft=draft,
        draft_length=length,
        batch_size=args.rows,
        device="cpu",
        dtype=args.dtype,
        max_new_tokens=args.tokens,
        temperature=0.0,
    )
    plan = make_plan(job)
    return plan, build(plan)


def measure(args):
    """Run every method in turn, `args.repeats` times. Returns: seconds by method; tokens of the
    last repeat by method; accepted drafts of a row in a round for the two methods with lookup."""
    plan, plain = loop_for(args, "none", 0)
    tokenizer = plan.files.tokenizer
    ordinary = encode(tokenizer, (ORDINARY * args.rows)[: args.rows])
    copying = [tokenizer.encode(text) for text in (COPYING * args.rows)[: args.rows]]
    run_bass(plain, ordinary, 4)
    rival = args.dtype == "fp32"
    if rival:
        generate = LOADERS["transformers"](describe(plan, longest=0, rows=args.rows))
        run_transformers(generate, ordinary, 4)
    times: dict[str, list[float]] = {}
    texts, kept = {}, {}
    for _ in range(args.repeats):
        for name, prompts in (("ordinary", ordinary), ("copying", copying)):
            if rival and prompts is ordinary:
                seconds, texts["transformers"] = run_transformers(generate, prompts, args.tokens)
                times.setdefault("transformers", []).append(seconds)
            loops = {"plain": plain, "lookup": loop_for(args, "lookup", "auto")[1]}
            for method, loop in loops.items():
                key = f"{method}, {name}"
                seconds, texts[key], kept[key] = run_bass(loop, prompts, args.tokens)
                times.setdefault(key, []).append(seconds)
    return times, texts, kept


def report(args, times, texts, kept):
    """Make the JSON document."""

    def ratio(slow, fast):
        return round(
            statistics.median(a / b for a, b in zip(times[slow], times[fast], strict=True)), 2
        )

    def equal(one, other):
        return sum(a == b for a, b in zip(texts[one], texts[other], strict=True))

    with_rival = {}
    if "transformers" in times:
        with_rival = {
            "plain_over_transformers": ratio("transformers", "plain, ordinary"),
            "rows_equal_to_transformers": equal("plain, ordinary", "transformers"),
        }
    return {
        "machine": {
            "processor": platform.machine(),
            "threads": args.threads,
            "torch": torch.__version__,
            "transformers": version("transformers"),
        },
        "rows": args.rows,
        "tokens": args.tokens,
        "repeats": args.repeats,
        "tokens_per_second": {
            k: round(args.rows * args.tokens / statistics.median(v), 1) for k, v in times.items()
        },
        "seconds": {k: [round(x, 2) for x in v] for k, v in times.items()},
        "dtype": args.dtype,
        **with_rival,
        "lookup_over_plain_copying": ratio("plain, copying", "lookup, copying"),
        "lookup_over_plain_ordinary": ratio("plain, ordinary", "lookup, ordinary"),
        "accepted_per_round": {
            name: round(kept[f"lookup, {name}"], 2) for name in ("copying", "ordinary")
        },
        "rows_equal_to_plain": sum(
            equal(f"plain, {name}", f"lookup, {name}") for name in ("ordinary", "copying")
        ),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pair", default="smollm2")
    parser.add_argument("--dtype", default="fp32")
    for name, default in (
        ("rows", 8),
        ("tokens", 128),
        ("repeats", 3),
        ("threads", torch.get_num_threads()),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(json.dumps(report(args, *measure(args)), indent=2))


if __name__ == "__main__":
    main()
