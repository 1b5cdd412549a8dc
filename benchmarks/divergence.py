"""Check whether speculation gives plain decoding's tokens; where it does not, report how close the
choice was. Prints one JSON document.

    python benchmarks/divergence.py PROMPTS [--pair smollm2] [--n 4] [--tokens 128] [--temperature
    0] [--draft-length 4]
                               [--device auto] [--dtype auto] [--limit 8]

In half precision the shape of a batch changes rounding, so plain and speculative decoding may
differ at a near-tie. For every sample that differs, this reports how close the choice between the
two tokens was. It also times both.
"""

import argparse
import json
import statistics
import time

import torch

import bass_kernels as ops
from bass_cli.config.args import JobArgs
from bass_cli.config.job import load_pair, make_job
from bass_cli.engine.batch import Change, Row, noise_key
from bass_cli.io.prompts import check_prompts, open_source, read_prompts
from bass_cli.models.runner import Runner
from bass_cli.run.build import build
from bass_cli.run.plan import make_plan
from bass_kernels.noise import bits_all


def samples(loop, prompts, args, eos):
    """Generate all samples, up to `tokens` tokens each. Returns: tokens by (prompt, sample),
    seconds, rounds, mean accepted drafts in a round."""
    waiting = [
        Row(key, s, 0, list(tokens), args.tokens, temperature=args.temperature, top_p=args.top_p)
        for key, tokens in prompts.items()
        for s in range(args.n)
    ]
    opened, out, rounds, kept, rows = set(), {}, 0, 0, 0
    began = time.perf_counter()
    while waiting or len(loop.batch):
        while waiting and len(loop.batch) < loop.batch.capacity:
            row = waiting.pop(0)
            if row.key not in opened:
                opened.add(row.key)
                loop.open(row.key, row.tokens)
            loop.admit(row)
        done = loop.round()
        rounds, kept, rows = rounds + 1, kept + sum(done.accepted), rows + len(done.accepted)
        for index in reversed(range(len(loop.batch))):
            row = loop.batch.hosts[index]
            new = row.tokens[row.prompt_length :][: row.limit]
            if row.room <= 0 or eos & set(new):
                ends = [i + 1 for i, token in enumerate(new) if token in eos]
                out[row.key, row.sample] = new[: min(ends, default=len(new))]
                loop.retire(index)
    for key in opened:
        loop.close(key)
    return out, time.perf_counter() - began, rounds, kept / rows


def contest(decoder, tokens, pair, sample, key, args):
    """Compute how close the choice between the two tokens of `pair` after `tokens` was, for this
    row alone. Returns: the difference of their scores (logits / T plus the shared noise) in
    units of the dtype's spacing at the largest logit; and the distance of the better one from
    the edge of the nucleus, as a probability."""
    runner = Runner(decoder, rows=1, span=4, lag=1)
    runner.open("x", tokens)
    runner.follow(Change((), (), (((0,), "x"),)))
    with torch.inference_mode():
        place = torch.tensor([[len(tokens) - 1]], device=decoder.device)
        logits = runner.forward(
            torch.tensor([tokens[-1:]], device=decoder.device), place, [len(tokens)]
        )[0, 0]
        spacing = torch.finfo(decoder.dtype).eps * logits.float().abs().max().item()
        scores, edge = logits.float(), None
        if args.temperature:
            scores = scores / args.temperature
            spacing /= args.temperature
            probs = scores.softmax(-1)
            keys = torch.tensor([noise_key(0, key, sample)], device=decoder.device)
            position = torch.tensor([len(tokens)], device=decoder.device)
            scores = (
                scores + ops.gumbel(bits_all(keys, position, len(scores), stream=ops.SHARED))[0]
            )
            better = max(pair, key=lambda token: scores[token].item())
            edge = abs(probs[probs > probs[better]].sum().item() - args.top_p)
    found = {
        "spacings": round(abs(scores[pair[0]] - scores[pair[1]]).item() / spacing, 2),
        "spacing": round(spacing, 4),
    }
    return found if edge is None else found | {"nucleus_edge": round(edge, 4)}


def partings_of(plain, speculative, decoder, prompts, args):
    """Find where the samples of two methods differ. Returns: how close each choice was, and how
    many tokens came before it in total."""
    partings, same = [], 0
    for key, due in plain.items():
        found = speculative[key]
        at = next((i for i, (a, b) in enumerate(zip(due, found, strict=False)) if a != b), len(due))
        same += at
        if due != found:
            partings.append(
                {"id": key[0], "sample": key[1], "token": at}
                | contest(
                    decoder, prompts[key[0]] + due[:at], (due[at], found[at]), key[1], key[0], args
                )
            )
    return partings, same


def compare(args):
    pair = load_pair(args.pair)
    common = {
        "device": args.device,
        "dtype": args.dtype,
        "max_new_tokens": args.tokens,
        "batch_size": args.batch_size,
    }
    source = open_source(args.prompts)
    check_prompts(source, column="prompt", limit=args.limit)
    results = {}
    methods = {
        "plain": {"draft": "none", "draft_length": 0},
        "speculative": {"draft_length": args.draft_length},
    }
    for name, flags in methods.items():
        plan = make_plan(make_job(pair, JobArgs(**common | flags)))
        loop = build(plan)
        tokenizer = plan.files.tokenizer
        prompts = {
            p.id: tokenizer.encode_chat(p.messages) if p.messages else tokenizer.encode(p.whole())
            for p in read_prompts(source, column="prompt", limit=args.limit)
        }
        samples(loop, dict(list(prompts.items())[:1]), args, plan.eos_ids)  # warm up
        results[name] = samples(loop, prompts, args, plan.eos_ids)
    plain, speculative = results["plain"][0], results["speculative"][0]
    assert isinstance(loop.target, Runner)
    partings, same = partings_of(plain, speculative, loop.target.decoder, prompts, args)
    total = sum(map(len, plain.values()))
    rates = {name: round(sum(map(len, r[0].values())) / r[1], 1) for name, r in results.items()}
    return {
        "pair": pair.name,
        "dtype": plan.identity()["dtype"],
        "versions": plan.identity()["versions"],
        "temperature": args.temperature,
        "draft_length": args.draft_length,
        "samples": len(plain),
        "samples_equal": len(plain) - len(partings),
        "tokens": total,
        "tokens_before_parting": same,
        "mean_accepted": round(results["speculative"][3], 3),
        "rounds": {name: r[2] for name, r in results.items()},
        "tokens_per_second": rates,
        "median_spacings": statistics.median([p["spacings"] for p in partings] or [0.0]),
        "largest_spacings": max((p["spacings"] for p in partings), default=0.0),
        "partings": partings,
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts")
    for name, default in (("pair", "smollm2"), ("device", "auto"), ("dtype", "auto")):
        parser.add_argument(f"--{name}", default=default)
    for name, number in (
        ("n", 4),
        ("tokens", 128),
        ("draft-length", 4),
        ("limit", 8),
        ("batch-size", 8),
    ):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    print(json.dumps(compare(parser.parse_args()), indent=1))


if __name__ == "__main__":
    main()
