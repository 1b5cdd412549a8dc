"""What it is worth to cut each row's drafts by the draft's own confidence (engine/cutting.py):
whole jobs of n samples a prompt with a pair whose draft makes all tokens in one pass, beside the
same jobs with as many drafts of each row, and plain decoding, in one process.

    python benchmarks/cutting.py --pair PAIR [--draft parallel:MODEL | heads:PATH]
                                 [--batch-sizes 8,32,64] [--lengths auto,2,4,6,8] [--more 2,4]
                                 [--n 8] [--limit 8] [--tokens 256] [--temperature 0.8]
                                 [--repeats 3] [--sets code chat] [--prompts FILE] [--device auto]
                                 [--dtype auto] [--json]

A real pair only: where acceptance is set, confidence says nothing. With a batch of B rows at most
B / n prompts are drawn at once, so --limit should be a multiple of that. `cut+2` verifies as many
drafts as `whole` does, a row on average, of two more that are drafted; so the best length of each
is to be compared, and the time of a round at one. Pairs whose draft is too large for the plan to
cut are cut here too. Within a repeat the ways take turns; a job before the first is not counted.
In float32 on a CPU all samples must equal plain decoding's.
"""

import statistics

from lookup import STOPS, options, prompts_for, run, show
from stopping import chat

from bass_cli.config.args import JobArgs
from bass_cli.config.job import load_pair, make_job
from bass_cli.engine.cutting import CHEAP, Cut
from bass_cli.lengths.controllers import make_lengths
from bass_cli.run.build import Models, build, load_models
from bass_cli.run.plan import make_plan


def plan_for(args, draft, rows, stop):
    """Of the longest drafts that any way asks for."""
    flags = {"n": args.n, "batch_size": rows, "max_new_tokens": args.tokens, "stop": stop}
    flags |= {"device": args.device, "dtype": args.dtype, "temperature": args.temperature}
    flags |= {"draft": draft, "coupling": "shared", "token_ids": True, "draft_length": "auto"}
    return make_plan(make_job(load_pair(args.pair), JobArgs(**flags)))


def controller(plan, length):
    limit = plan.longest or 1
    length = length if length == "auto" else int(length)
    words = {"coupling": "shared", "surface": plan.surface, "at_once": True}
    return make_lengths(length, limit=limit, **words)


def watched(inner, rows):
    """A controller, and of the rounds in which all rows were live milliseconds, tokens and verified
    drafts of a row, as they come."""
    taken, observe = [], inner.observe

    def noted(done):
        if done.steady and len(done.accepted) == rows:
            tokens = 1 + sum(done.accepted) / rows
            taken.append((1000 * done.seconds, tokens, sum(done.num_drafts) / rows))
        observe(done)

    inner.observe = noted
    return inner, taken


def measure(args, models, name, rows):
    """One line for each way, at one batch size."""
    stop = STOPS if name == "code" and args.prompts is None else ()
    plans = {draft: plan_for(args, draft, rows, stop) for draft in (args.draft, "none")}
    if not models:
        models.append(load_models(plans[args.draft]))
    loops = {
        "plain": build(plans["none"], models[0]),
        "whole": build(plans[args.draft], models[0], cut=False),
    }
    device = models[0].target.device
    for more in map(int, args.more.split(",")):
        cut = Cut(plans[args.draft].longest, CHEAP[device.type], more)
        loops[f"cut+{more}"] = build(plans[args.draft], models[0], cut=cut)
    prompts = chat(args.limit) if name == "chat" else prompts_for(args, None)
    drafting = [(way, one) for one in args.lengths.split(",") for way in loops if way != "plain"]
    ways = [("plain", "0"), *drafting]
    seconds: dict[tuple, list[float]] = {way: [] for way in ways}
    rounds: dict[tuple, list[tuple]] = {way: [] for way in ways}
    samples = {}
    for repeat in range(-1, args.repeats):
        for way in ways:
            loop, plan = loops[way[0]], plans["none" if way[0] == "plain" else args.draft]
            inner, told = watched(controller(plan, way[1]), rows)
            loop.use(inner)
            samples[way], taken = run(plan, loop, prompts)
            if repeat >= 0:
                seconds[way].append(taken)
                rounds[way] += told
    return [line(name, rows, way, samples, seconds, rounds) for way in ways]


def line(name, rows, way, samples, seconds, rounds):
    done, base = samples[way].values(), ("plain", "0")
    tokens = sum(c.tokens for c in done)
    equal = sum(c.token_ids == samples[base][key].token_ids for key, c in samples[way].items())
    ratios = [plain / own for plain, own in zip(seconds[base], seconds[way], strict=True)]
    found = {"set": name, "rows": rows, "way": way[0], "length": way[1]}
    found |= {"samples": len(done), "equal": equal}
    found |= {
        "tokens_per_second": round(tokens / statistics.median(seconds[way]), 1),
        "speed_up": round(statistics.median(ratios), 3),
    }
    if rounds[way]:
        spent, gained, verified = (sum(part) for part in zip(*rounds[way], strict=True))
        count = len(rounds[way])
        found |= {
            "full_rounds": count,
            "round_ms": round(statistics.median(one[0] for one in rounds[way]), 3),
            "verified": round(verified / count, 2),
            "tokens_a_round": round(gained / count, 3),
            "ms_per_token": round(spent / gained, 4),
        }
    return found | {"seconds": [round(s, 2) for s in seconds[way]]}


def main():
    rounds = {"batch_sizes": "8,32,64", "lengths": "auto,2,4,6,8", "more": "2,4"}
    words = {"draft": None, "device": "auto", "dtype": "auto", "prompts": None}
    numbers = {"limit": 8, "n": 8, "tokens": 256, "repeats": 3}
    parser = options(__doc__, **rounds, **words, **numbers, sets=("code", "chat"))
    parser.add_argument("--pair", required=True)
    args = parser.parse_args()
    args.copy_heavy, models = False, list[Models]()
    batches = [int(rows) for rows in args.batch_sizes.split(",")]
    show(
        args,
        (
            found
            for name in args.sets
            for rows in batches
            for found in measure(args, models, name, rows)
        ),
    )


if __name__ == "__main__":
    main()
