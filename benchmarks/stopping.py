"""What it is worth to end the drafting inside a round where the draft is unsure of itself, beside
`auto` that sees past rounds only: whole jobs of n samples a prompt with a draft model, on a CPU, on
code (HumanEval) and on chat.

    python benchmarks/stopping.py [--pair qwen2.5-coder-1.5b] [--limit 8] [--n 4] [--batch-size 8]
    [--tokens 96]
                             [--temperature 0.8] [--repeats 2] [--dtype auto] [--sets code chat]
                             [--json]

Within a repeat the ways take turns; what they draft differs, the samples do not: all must equal
plain decoding's. A job before the first repeat is not counted; every job begins with a
controller that knows nothing.
"""

import statistics

from lookup import STOPS, human_eval, options, run, show

from bass_cli.config.args import JobArgs
from bass_cli.config.job import load_pair, make_job
from bass_cli.engine.contracts import DEFAULT_INPUT, DraftLength
from bass_cli.io.prompts import Prompt
from bass_cli.lengths.controllers import make_lengths
from bass_cli.run.build import build
from bass_cli.run.plan import make_plan

QUESTIONS = (
    "Why is the sky blue, and why is it red in the evening?",
    "Write a short letter to a landlord about a broken heater.",
    "What should I see in Lisbon in two days?",
    "Explain how a bill becomes a law, for a ten-year-old.",
    "Give me five ideas for a birthday party that costs little.",
    "What is the difference between a virus and a bacterium?",
    "Tell a short story about a clock that runs backwards.",
    "How do I keep basil alive in a dark kitchen?",
    "Summarise the causes of the First World War in one paragraph.",
    "Is it better to rent or to buy a flat? Weigh both.",
    "Write a poem of eight lines about rain on a tent.",
    "How does a refrigerator work?",
)
WAYS = ("plain", "past rounds", "stopping")


class PastRounds(DraftLength):
    """`auto` without its stopping inside a round."""

    def __init__(self, inner):
        self._inner = inner

    def next(self, rows, inputs=DEFAULT_INPUT):
        return self._inner.next(rows, inputs._replace(stops=False))

    def observe(self, done):
        self._inner.observe(done)


def controller(way, plan):
    speculation = plan.job.speculation
    fresh = make_lengths("auto", limit=speculation.max, coupling="shared", surface=plan.surface)
    return PastRounds(fresh) if way == "past rounds" else fresh


def chat(limit):
    return [
        Prompt(f"chat/{i}", None, [{"role": "user", "content": text}], {}, None, text)
        for i, text in enumerate(QUESTIONS)
    ][:limit]


def measure(args, name):
    def plan_for(draft):
        flags = {
            "n": args.n,
            "batch_size": args.batch_size,
            "max_new_tokens": args.tokens,
            "device": "cpu",
            "dtype": args.dtype,
            "temperature": args.temperature,
            "coupling": "shared",
            "token_ids": True,
            "stop": STOPS if name == "code" else (),
            "draft_length": "auto",
        }
        return make_plan(make_job(load_pair(args.pair), JobArgs(draft=draft, **flags)))

    plans = {way: plan_for("none" if way == "plain" else None) for way in WAYS}
    loops = {"plain": build(plans["plain"]), "past rounds": build(plans["past rounds"])}
    loops["stopping"] = loops["past rounds"]
    prompts = human_eval(args.limit) if name == "code" else chat(args.limit)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    samples = {}
    for repeat in range(-1, args.repeats):
        for way, loop in loops.items():
            if way != "plain":
                loop.use(controller(way, plans[way]))
            samples[way], taken = run(plans[way], loop, prompts if repeat >= 0 else prompts[:1])
            if repeat >= 0:
                seconds[way].append(taken)
    return [line(name, way, samples, seconds) for way in WAYS]


def line(name, way, samples, seconds):
    done = samples[way].values()
    tokens, rounds, drafted, accepted = (
        sum(getattr(c, key) for c in done) for key in ("tokens", "rounds", "drafted", "accepted")
    )
    ratios = [plain / own for plain, own in zip(seconds["plain"], seconds[way], strict=True)]
    equal = sum(c.token_ids == samples["plain"][key].token_ids for key, c in samples[way].items())
    return {
        "set": name,
        "way": way,
        "samples": len(done),
        "samples_equal": equal,
        "tokens_per_second": round(tokens / statistics.median(seconds[way]), 2),
        "speed_up": round(statistics.median(ratios), 3),
        "drafted_per_round": round(drafted / rounds, 2),
        "accepted_per_round": round(accepted / rounds, 2),
        "seconds": [round(s, 2) for s in seconds[way]],
    }


def main():
    parser = options(
        __doc__,
        pair="qwen2.5-coder-1.5b",
        dtype="auto",
        limit=8,
        n=4,
        batch_size=8,
        tokens=96,
        repeats=2,
        sets=("code", "chat"),
    )
    args = parser.parse_args()
    show(args, (found for name in args.sets for found in measure(args, name)))


if __name__ == "__main__":
    main()
