"""A demo: a small model edits code, with plain decoding and with drafts looked up in the code.

    python examples/demo.py [--prompts examples/edits.jsonl] [--pair smollm2] [--n 2] [--tokens 128]
    [--temperature 0.2]
                            [--threads N]

It prints the most likely sample of each prompt, then the time of both methods. Both must give the
same tokens; otherwise the exit code is 1. `bass generate examples/edits.jsonl` draws the same
samples to a file.
"""

import argparse
import sys
import textwrap
import time
from pathlib import Path

from bass_cli.config.job import load_pair, make_job
from bass_cli.io.prompts import read_prompts
from bass_cli.io.readers import open_source
from bass_cli.system.threads import begin, configure_threads

METHODS = {"plain decoding": {"draft": "none"}, "with lookup": {}}


def say(text):
    print(text, file=sys.stderr, flush=True)


def draw(plan, loop, prompt):
    """Return a prompt's samples by (prompt, number), and the seconds that they took.

    The seconds include the prefill.
    """
    from bass_cli.run.engine import Engine

    engine = Engine(plan, lazy=True, loop=loop)
    began = time.perf_counter()
    done = list(engine.draw(iter([prompt]), count=1))
    return {(sample.id, sample.sample): sample for sample in done}, time.perf_counter() - began


def show(prompts, samples):
    """Print the most likely sample of every prompt."""
    for prompt in prompts:
        asked = prompt.text if prompt.messages is None else prompt.messages[-1]["content"]
        print(f"\n{prompt.id}: {asked.splitlines()[0]}")
        best = max(
            (one for one in samples.values() if one.id == prompt.id),
            key=lambda one: one.mean_logprob,
        )
        print(textwrap.indent(best.text, "  > ", lambda line: True))


def compare(found):
    """Print a table of both methods; return whether their samples are equal."""
    plain, lookup = (samples for samples, _ in found.values())
    seconds = {way: taken for way, (_, taken) in found.items()}
    print(
        f"\n{'':14}{'tokens':>8}{'seconds':>9}{'tokens/s':>10}{'rounds/sample':>15}"
        f"{'accepted drafts/round':>23}"
    )
    for way, (samples, taken) in found.items():
        tokens, rounds, accepted = (
            sum(getattr(one, key) for one in samples.values())
            for key in ("tokens", "rounds", "accepted")
        )
        print(
            f"{way:14}{tokens:>8}{taken:>9.1f}{tokens / taken:>10.1f}{rounds / len(samples):>15.1f}"
            f"{accepted / rounds:>23.2f}"
        )
    equal = sum(one.token_ids == lookup[key].token_ids for key, one in plain.items())
    print(
        f"\n{equal} of {len(plain)} samples are equal, token for token; lookup is "
        f"{seconds['plain decoding'] / seconds['with lookup']:.2f}x as fast as plain decoding"
    )
    return equal == len(plain)


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", default=str(Path(__file__).parent / "edits.jsonl"))
    parser.add_argument("--pair", default="smollm2")
    parser.add_argument("--n", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.2)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args(arguments)
    begin(args.threads)  # loads torch's libraries in a thread
    configure_threads(args.threads, say)

    from bass_cli.run.build import build, load_models
    from bass_cli.run.plan import make_plan

    prompts = list(read_prompts(open_source(args.prompts)))
    flags = {
        "n": args.n,
        "max_new_tokens": args.tokens,
        "temperature": args.temperature,
        "token_ids": True,
        "device": "cpu",
        "threads": args.threads,
        "batch_size": args.n,
    }
    plans = {
        way: make_plan(make_job(load_pair(args.pair), **flags | draft))
        for way, draft in METHODS.items()
    }
    say("loading the model")
    models = load_models(next(iter(plans.values())))
    loops = {way: build(plan, models) for way, plan in plans.items()}
    found: dict[str, tuple[dict, float]] = {way: ({}, 0.0) for way in METHODS}
    for prompt in prompts:
        for way, plan in plans.items():  # in turn, so that other load affects both methods alike
            say(f"{args.n} samples of {prompt.id}, {way}")
            samples, taken = draw(plan, loops[way], prompt)
            found[way] = found[way][0] | samples, found[way][1] + taken
    show(prompts, found["with lookup"][0])
    sys.exit(0 if compare(found) else 1)


if __name__ == "__main__":
    main()
