"""Count the samples that differ between plain decoding and lookup drafts, on this CPU.

    python benchmarks/partings.py [--dtype file] [--samples 200] [--tokens 64] [--rows 8]
    [--pair smollm2] [--temperature 0.8] [--threads 2]

Plain decoding with `--rows` rows is compared with lookup drafts of 4 tokens, with as many rows and
with one row. Prompts are those of cpu.py, half of them made for copying. Prints one JSON document:
of each comparison the samples that differ, and the drafts accepted in a round.
"""

import argparse
import json
import platform

import torch
from cpu import COPYING, ORDINARY, encode

from bass_cli.bench.figures import counts
from bass_cli.bench.runs import decode, fill
from bass_cli.config.job import load_pair, make_job
from bass_cli.engine.batch import Row
from bass_cli.engine.sampling import RowSampling
from bass_cli.run.build import build, load_models
from bass_cli.run.plan import make_plan
from bass_cli.system.threads import configure_threads


def sample(loop, prompts, args, rows):
    """Draw the samples of all prompts, `rows` at a time. Returns: tokens by prompt and sample, and
    the accepted drafts of a row in a round, by batch."""
    each = -(-args.samples // len(prompts))
    keys = [(which, number) for which in range(len(prompts)) for number in range(each)]
    sampling = RowSampling(temperature=args.temperature, top_p=0.95)
    found, accepted = {}, []
    for first in range(0, args.samples, rows):
        some = keys[first : min(first + rows, args.samples)]
        live = [
            Row(str(which), number, 0, list(prompts[which]), args.tokens, sampling=sampling)
            for which, number in some
        ]
        fill(loop, live)
        accepted.append(counts(decode(loop, live)).mean)
        for key, row in zip(some, live, strict=True):
            found[key] = row.tokens[row.prompt_length :][: args.tokens]
    return found, accepted


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="file")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--pair", default="smollm2")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    configure_threads(args.threads, lambda note: None)
    models, tokens = None, None
    document = {"machine": platform.machine(), "torch": torch.__version__, **vars(args)}
    for name, draft, length, rows in (
        ("plain", "none", 0, args.rows),
        (f"lookup, {args.rows} rows", "lookup", 4, args.rows),
        ("lookup, 1 row", "lookup", 4, 1),
    ):
        job = make_job(
            load_pair(args.pair),
            draft=draft,
            draft_length=length,
            batch_size=rows,
            device="cpu",
            dtype=args.dtype,
            max_new_tokens=args.tokens,
        )
        plan = make_plan(job)
        models = models or load_models(plan)
        tokenizer = plan.files.tokenizer
        prompts = [tokenizer.encode(text) for text in COPYING[:4]] + encode(tokenizer, ORDINARY[:4])
        found, accepted = sample(build(plan, models), prompts, args, rows)
        if tokens is None:
            tokens = found
            continue
        document[name] = {
            "differ": sum(found[key] != one for key, one in tokens.items()),
            "accepted drafts of a round": round(sum(accepted) / len(accepted), 2),
        }
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
