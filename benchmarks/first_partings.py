"""Count the samples in which two result files part, with the margins where they do, as JSON.

    bass eval humaneval --pair PAIR --draft none --dtype fp8 --n 16 --logprobs 8 --out plain.jsonl
    bass eval humaneval --pair PAIR --dtype fp8 --n 16 --token-ids --out drafts.jsonl
    python benchmarks/first_partings.py plain.jsonl drafts.jsonl

Under shared coupling the token of a place is the largest of its log-probabilities plus the noise
of that place. The margin at a first parting is what the chosen token of the first file leads by,
in nats: over the token that the second file has there, and (`next best`) over the next best one.
`next best of all` is the median over all places, for comparison. Noise is drawn anew, and
truncation is applied to the K likeliest tokens of the file; `chosen again` is the share of places
where that gives the token of the file.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bass_cli.engine.sampling import noise_key
from bass_kernels.noise import SHARED, bits, gumbel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("first", type=Path, help="has top_logprobs (--logprobs K)")
    parser.add_argument("second", type=Path, help="has token_ids (--token-ids)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # all tensors are small
    sampling = json.loads(Path(f"{args.first}.manifest.json").read_text())["results"]
    for path, key, option in (
        (args.first, "top_logprobs", "--logprobs 8"),
        (args.second, "token_ids", "--token-ids"),
    ):
        if not all(key in line for line in lines_of(path) if line.get("tokens")):
            parser.error(f"{path}: a line has no {key}; draw the samples with {option}")
    other = {key_of(line): line["token_ids"] for line in lines_of(args.second)}
    firsts, leads, everywhere, again, samples, tokens = [], [], [], 0, 0, 0
    for line in lines_of(args.first):
        ids, theirs = line["token_ids"], other.get(key_of(line))
        if theirs is None:
            continue
        samples, tokens = samples + 1, tokens + len(ids)
        likely, scores = scores_of(line, sampling["temperature"], sampling["top_p"])
        best = scores.topk(min(2, scores.shape[1]), -1).values
        again += int((likely.gather(1, scores.argmax(-1, True))[:, 0] == torch.tensor(ids)).sum())
        everywhere.append(best[:, 0] - best[:, -1])
        common = min(len(ids), len(theirs))
        place = next((i for i in range(common) if ids[i] != theirs[i]), None)
        if place is not None:
            found = scores[place][likely[place] == theirs[place]]
            firsts.append(float(best[place, 0] - found[0]) if len(found) else math.inf)
            leads.append(float(best[place, 0] - best[place, -1]))
    print(
        json.dumps(
            {
                "samples": samples,
                "parted": len(firsts),
                "share": round(len(firsts) / max(samples, 1), 4),
                "tokens": tokens,
                "chosen again": round(again / max(tokens, 1), 4),
                "margin": summary(torch.tensor(firsts)),
                "next best": summary(torch.tensor(leads)),
                "next best of all": summary(torch.cat(everywhere)),
            }
        )
    )


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def key_of(line: dict[str, Any]) -> tuple[str, int]:
    return line["id"], line["sample"]


def scores_of(line: dict[str, Any], temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """Return the likeliest tokens of each place of a sample and what the sampler compares, both
    [T, K]: the log-probabilities at the temperature plus noise; -inf beyond top-p."""
    tops = line["top_logprobs"]
    likely = torch.tensor([[token for token, _ in top] for top in tops])
    scaled = torch.tensor([[score for _, score in top] for top in tops]) / temperature
    mass = scaled.softmax(-1).cumsum(-1) - scaled.softmax(-1)  # of the tokens before
    keys = torch.tensor([noise_key(line["seed"], line["id"], line["sample"])])
    places = line["prompt_tokens"] + torch.arange(len(likely)).repeat_interleave(likely.shape[1])
    random = bits(keys.expand(len(places), 2), places, likely.flatten(), stream=SHARED)
    return likely, (scaled + gumbel(random).view(scaled.shape)).masked_fill(
        mass >= top_p, -math.inf
    )


def summary(margins: Tensor) -> dict[str, float]:
    """Return the quantiles of margins in nats (999: no other token was possible), and the shares
    below two bounds."""
    if not len(margins):
        return {}
    ordered = margins.clamp(max=999.0).sort().values
    return {
        "median": round(float(ordered[len(ordered) // 2]), 4),
        "90 %": round(float(ordered[int(0.9 * (len(ordered) - 1))]), 4),
        "below 0.1": round(float((margins < 0.1).float().mean()), 4),
        "below 0.5": round(float((margins < 0.5).float().mean()), 4),
    }


if __name__ == "__main__":
    main()
