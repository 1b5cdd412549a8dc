"""Measure what a grammar costs: milliseconds a round of the same job with and without a schema.

python benchmarks/grammars.py TARGET DRAFT [ROWS [DRAFT_LENGTH [NEW_TOKENS]]]

The schema has no end within the tokens of the job, so that all rows stay live. Rounds that captured
or compiled something do not count.
"""

import argparse
import statistics
import sys
import time
from typing import Any

from bass_cli import Job, Pair, Sampling, Speculation, generate
from bass_cli.engine.contracts import RoundResult

PROMPT = "List twenty invented people as JSON, each with name, age and three hobbies."
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "hobbies": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 5},
    },
    "required": ["name", "age", "hobbies"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 1000}


def main() -> None:
    """Run the job without, with, and again without the schema, to see the noise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("draft")
    for name, default in (("rows", 32), ("draft_length", 4), ("new_tokens", 200)):
        parser.add_argument(name, type=int, nargs="?", default=default)
    args = parser.parse_args()
    rows, length, tokens = args.rows, args.draft_length, args.new_tokens
    pair = Pair(name="measured", target=args.target, draft=args.draft)
    for name, schema in (("without", None), ("with", SCHEMA), ("without", None)):
        rounds = list[RoundResult]()
        job = Job(
            pair=pair,
            n=rows,
            batch_size=rows,
            sampling=Sampling(max_new_tokens=tokens, json_schema=schema, seed=1),
            speculation=Speculation(length=length if args.draft != "none" else 0),
        )
        prompt: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}]}
        began = time.perf_counter()
        samples = list(generate([prompt], job, on_round=rounds.append))
        drawn = sum(one.tokens for one in samples)
        for fault in {one.error for one in samples if one.error}:
            sys.exit(f"{name} schema: {fault}")
        steady = [one for one in rounds if one.steady and len(one.accepted) == rows]
        each = statistics.median(one.seconds for one in steady) if steady else float("nan")
        kept = statistics.mean(
            1 + sum(one.accepted) / len(one.accepted) for one in steady or rounds
        )
        print(
            f"{name} schema: {1e3 * each:.2f} ms a round of {rows} rows (median of {len(steady)}), "
            f"{kept:.2f} tokens a row and round; {drawn} tokens in "
            f"{time.perf_counter() - began:.1f} s with loading"
        )


if __name__ == "__main__":
    main()
