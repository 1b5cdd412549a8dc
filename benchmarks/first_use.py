"""Measure the cost of having no profile: plain decoding against `auto` without a profile, with what
an earlier job has learnt, and with a measured profile.

    python benchmarks/first_use.py [--pair qwen2.5-coder-1.5b] [--limit 8] [--n 8] [--batch-sizes
    1,8] [--tokens 256]
                              [--temperature 0.8] [--repeats 3] [--device auto] [--dtype auto]
                              [--sets code chat] [--json]

Every job starts as a new process does after loading: with a new controller, and on CUDA without
captured graphs. Kernels are compiled before. Within a repeat the ways take turns. Seconds are of
whole jobs, prefill included.
"""

import statistics
import time

from lookup import STOPS, human_eval, options, run, show

from bass_cli.bench.texts import QUESTIONS
from bass_cli.config.args import JobArgs
from bass_cli.config.job import load_pair, make_job
from bass_cli.io.prompts import Prompt
from bass_cli.lengths.controllers import make_lengths
from bass_cli.lengths.costs import Surface
from bass_cli.run.build import build, load_models
from bass_cli.run.plan import make_plan
from bass_cli.run.profile import joined
from bass_cli.run.profile import measure as profile

WAYS = ("plain", "nothing known", "learnt before", "profile")
# tokens of a profile's prompts, seconds of its measurement
_CONTEXT, _LIMIT = ({"cuda": 400, "cpu": 128}, 60.0)


def chat(limit):
    """Make chat prompts of questions."""
    return [
        Prompt(f"chat/{i}", None, [{"role": "user", "content": text}], {}, None, text)
        for i, text in enumerate(QUESTIONS)
    ][:limit]


def plan_for(args, rows, draft=None):
    flags = {
        "n": args.n,
        "batch_size": rows,
        "max_new_tokens": args.tokens,
        "device": args.device,
        "dtype": args.dtype,
        "temperature": args.temperature,
        "coupling": "shared",
        "token_ids": True,
        "stop": STOPS,
        "draft_length": "auto",
    }
    return make_plan(make_job(load_pair(args.pair), JobArgs(draft=draft, **flags)))


def surface_of(plan, models, rows):
    """Measure a profile for this number of rows."""
    loop, kind = build(plan, models), plan.device.type
    prompts = [joined(plan.files.tokenizer, i, _CONTEXT[kind]) for i in range(-(-rows // 8))]
    counts = [count for count in (1, 2, 4, 8, 16, 32, 64) if count < rows] + [rows]
    return profile(
        loop,
        prompts,
        rows=counts,
        coupling="shared",
        limit=_LIMIT,
        context=plan.files.target.spec.context,
    )


def measure(args, models, rows):
    """Yield a line for each set of prompts and way."""
    plain, drafting = plan_for(args, rows, "none"), plan_for(args, rows)
    began = time.perf_counter()
    known = {
        "nothing known": None,
        "learnt before": None,
        "profile": surface_of(drafting, models, rows),
    }
    profiled = time.perf_counter() - began
    for name in args.sets:
        prompts = human_eval(args.limit) if name == "code" else chat(args.limit)
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        samples = {}
        for repeat in range(-1, args.repeats):
            for way in WAYS:
                plan = plain if way == "plain" else drafting
                loop = build(plan, models)
                if way != "plain":
                    loop.use(
                        make_lengths(
                            "auto",
                            limit=plan.job.speculation.max,
                            coupling="shared",
                            surface=known[way],
                        )
                    )
                samples[way], taken = run(plan, loop, prompts)
                if way == "nothing known":
                    learnt = loop.lengths.learned()
                    if isinstance(learnt, Surface):
                        known["learnt before"] = learnt
                if repeat >= 0:
                    seconds[way].append(taken)
        for way in WAYS:
            yield line(name, way, rows, samples, seconds) | {"profile_seconds": round(profiled, 1)}


def line(name, way, rows, samples, seconds):
    done = samples[way].values()
    tokens, rounds, accepted = (
        sum(getattr(c, key) for c in done) for key in ("tokens", "rounds", "accepted")
    )

    def ratio(base):
        return round(
            statistics.median(b / own for b, own in zip(seconds[base], seconds[way], strict=True)),
            3,
        )

    return {
        "set": name,
        "way": way,
        "batch": rows,
        "samples": len(done),
        "tokens": tokens,
        "tokens_per_second": round(tokens / statistics.median(seconds[way]), 1),
        "over_plain": ratio("plain"),
        "over_profile": ratio("profile"),
        "accepted_per_round": round(accepted / rounds, 2),
        "seconds": [round(s, 3) for s in seconds[way]],
    }


def main():
    words = {"pair": "qwen2.5-coder-1.5b", "device": "auto", "dtype": "auto", "batch_sizes": "1,8"}
    numbers = {"limit": 8, "n": 8, "tokens": 256, "repeats": 3}
    args = options(__doc__, **words, **numbers, sets=("code", "chat")).parse_args()
    sizes = [int(rows) for rows in args.batch_sizes.split(",")]
    models = load_models(plan_for(args, sizes[0]))
    show(args, (found for rows in sizes for found in measure(args, models, rows)))


if __name__ == "__main__":
    main()
