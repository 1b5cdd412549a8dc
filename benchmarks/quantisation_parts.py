"""Measure which part of 8-bit weights and activations costs how much, and print a line for each.

    python benchmarks/quantisation_parts.py MODEL PROMPTS.jsonl [--rows 8] [--tokens 64]
        [--layers "fp8,int8,..."]

A Qwen2 or Llama is computed in float32 with plain torch, once for each way to round its layers
(LAYERS) and its head (HEADS). Compared with the model without rounding: the mean and the 99th
percentile of the KL divergence (nats a token), the share of places with the same likeliest token,
and that share where this token leads by more than 0.2 nats. PROMPTS has "prompt" and perhaps
"canonical_solution" in each line, as HumanEval's file.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from bass_cli.config.job import Job
from bass_cli.formats.weights import load
from bass_cli.models.spec import MAPS, Spec
from bass_cli.run.pair import Files, open_files

Rounding = Callable[[Tensor], Tensor]
BLOCK = 256  # places whose logits are in memory at once


def plain(x: Tensor) -> Tensor:
    """Return x as it is."""
    return x


def e4m3(x: Tensor) -> Tensor:
    """Round x [..., K] to e4m3 with one scale a line."""
    scales = _scales(x, 448)
    return (x / scales).to(torch.float8_e4m3fn).float() * scales


def int8(x: Tensor) -> Tensor:
    """Round x [..., K] to whole numbers of 8 bits with one scale a line."""
    scales = _scales(x, 127)
    return (x / scales).round() * scales


def e4m3_best(x: Tensor) -> Tensor:
    """Round x as `e4m3`, with the one of 12 scales of a line that has the least squared error."""
    best, least = x, torch.full_like(x[..., :1], torch.inf)
    for step in range(12):
        scales = _scales(x, 448) * 2 ** (-step / 8)
        rounded = (x / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales
        error = (rounded - x).square().sum(-1, keepdim=True)
        best = torch.where(error < least, rounded, best)
        least = torch.minimum(error, least)
    return best


def int8_groups(x: Tensor) -> Tensor:
    """Round x to whole numbers of 8 bits with one scale for (usually) 128 entries of a line."""
    return int8(x.unflatten(-1, (-1, math.gcd(128, x.shape[-1])))).flatten(-2)


def _scales(x: Tensor, most: int) -> Tensor:
    scales = x.abs().amax(-1, keepdim=True) / most
    return torch.where(scales == 0, 1.0, scales)


class Way(NamedTuple):
    """How weights and activations of each map are rounded; `but`: layers that are not."""

    weights: dict[str, Rounding]
    activations: dict[str, Rounding]
    but: tuple[int, ...] = ()


def every(rounding: Rounding, **others: Rounding) -> dict[str, Rounding]:
    """Return a rounding for each map of a layer."""
    return dict.fromkeys(MAPS, rounding) | others


LAYERS = {
    "plain": Way(every(plain), every(plain)),
    "fp8": Way(every(e4m3), every(e4m3)),
    "int8": Way(every(int8), every(plain)),
    "weights e4m3": Way(every(e4m3), every(plain)),
    "activations e4m3": Way(every(plain), every(e4m3)),
    "weights e4m3, best scales": Way(every(e4m3_best), every(plain)),
    "int8, activations too": Way(every(int8), every(int8)),
    "int8, activations too, in groups": Way(every(int8), every(int8_groups)),
    "fp8, 16-bit activations before down": Way(every(e4m3), every(e4m3, down=plain)),
    "fp8, three layers plain": Way(every(e4m3), every(e4m3), (0, 1, -1)),
}
LAYERS |= {
    f"activations before {name} e4m3": Way(every(plain), every(plain, **{name: e4m3}))
    for name in MAPS
}
HEADS = {
    "plain": (plain, plain),
    "int8 weights": (int8, plain),
    "e4m3 weights": (e4m3, plain),
    "e4m3": (e4m3, e4m3),
    "int8": (int8, int8),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--layers", default=",".join(LAYERS).replace(", ", "; "))
    args = parser.parse_args()
    names = [name.replace("; ", ", ") for name in args.layers.split(",")]
    names = ["plain", *(name for name in names if name != "plain")]
    files = open_files(Job(model=args.model, draft="lookup"))
    tokens = tokens_of(files, args.prompts, args.rows, args.tokens)
    loaded = load(files.target, dtype=torch.bfloat16, device=torch.device("cpu"))
    weights = {name: one for name, one in loaded.items() if isinstance(one, Tensor)}
    with torch.inference_mode():
        found = outputs(files.target.spec, weights, tokens, {name: LAYERS[name] for name in names})
        head = weights["head.weight"].float()[: files.tokenizer.size]
        for name, figures in compare(found, head).items():
            print(name, *figures, flush=True)


def tokens_of(files: Files, path: Path, rows: int, count: int) -> Tensor:
    """Return the first `count` tokens of texts that are spread over the file, [rows, count]."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines()[::5]:
        one = json.loads(line)
        ids = files.tokenizer.encode(one["prompt"] + one.get("canonical_solution", ""), 10**6)
        if len(ids) >= count:
            found.append(ids[:count])
    return torch.tensor(found[:rows])


def outputs(
    spec: Spec, weights: dict[str, Tensor], tokens: Tensor, ways: dict[str, Way]
) -> dict[str, Tensor]:
    """Return the final norm's output [places, width] by name of the rounding, without the first
    and the last place of each row. Layers are computed one after the other, each in all ways."""
    embedded = weights["embed.weight"][tokens].float()
    states = dict.fromkeys(ways, embedded)
    for i in range(spec.layers):
        at = f"layers.{i}."
        maps = {name: weights[f"{at}{name}.weight"].float() for name in MAPS}
        rounded: dict[tuple[str, Rounding], Tensor] = {}
        for name, way in ways.items():
            used = LAYERS["plain"] if i in [one % spec.layers for one in way.but] else way
            for part, rounding in used.weights.items():
                if (part, rounding) not in rounded:
                    rounded[part, rounding] = rounding(maps[part])
            matrices = {part: rounded[part, used.weights[part]] for part in MAPS}
            states[name] = layer(spec, weights, at, matrices, used.activations, states[name])
    return {
        name: norm(spec, one, weights["norm.weight"])[:, 1:-1].flatten(0, 1).bfloat16()
        for name, one in states.items()
    }


def layer(
    spec: Spec,
    weights: dict[str, Tensor],
    at: str,
    matrices: dict[str, Tensor],
    roundings: dict[str, Rounding],
    x: Tensor,
) -> Tensor:
    """Return the residual stream [B, W, width] after a layer."""

    def mapped(name: str, x: Tensor) -> Tensor:
        return functional.linear(roundings[name](x), matrices[name])

    qkv = mapped("qkv", norm(spec, x, weights[at + "norm1.weight"]))
    if at + "qkv.bias" in weights:
        qkv = qkv + weights[at + "qkv.bias"].float()
    heads = (spec.heads, spec.kv_heads, spec.kv_heads)
    q, k, v = (
        one.transpose(1, 2) for one in qkv.unflatten(-1, (-1, spec.head_size)).split(heads, 2)
    )
    q, k = rotated(spec, q), rotated(spec, k)
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + mapped("o", mixed.transpose(1, 2).flatten(2))
    gate, up = mapped("up", norm(spec, x, weights[at + "norm2.weight"])).chunk(2, -1)
    return x + mapped("down", functional.silu(gate) * up)


def norm(spec: Spec, x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight.float(), spec.norm.eps)


def rotated(spec: Spec, x: Tensor) -> Tensor:
    """Rotate x [B, H, W, D] by its positions."""
    assert spec.rope is not None
    inverse = 1 / spec.rope.theta ** (torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    angles = torch.arange(x.shape[2])[:, None] * inverse
    one, two = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)


def compare(found: dict[str, Tensor], head: Tensor) -> dict[str, tuple[float, ...]]:
    """Return the figures of each rounding of the layers, and of the heads behind some of them."""
    pairs = [(name, "plain") for name in found]
    pairs += [(name, one) for name in ("plain", "fp8", "int8") if name in found for one in HEADS]
    matrices = {rounding: rounding(head) for rounding, _ in HEADS.values()}
    figures: dict[str, list[Tensor]] = {}
    for first in range(0, len(found["plain"]), BLOCK):
        part = {name: one[first : first + BLOCK].float() for name, one in found.items()}
        due = functional.linear(part["plain"], head).log_softmax(-1)
        best = due.topk(2, -1).values
        for name, how in dict.fromkeys(pairs[1:]):
            weights, tokens = HEADS[how]
            other = functional.linear(tokens(part[name]), matrices[weights]).log_softmax(-1)
            kl = (due.exp() * (due - other)).sum(-1)
            same = (due.argmax(-1) == other.argmax(-1)).float()
            leads = (best[:, 0] - best[:, 1] > 0.2).float()
            key = f"layers {name}; head {how}:"
            figures.setdefault(key, []).append(torch.stack((kl, same, leads)))
    return {name: summary(torch.cat(one, 1)) for name, one in figures.items()}


def summary(figures: Tensor) -> tuple[float, ...]:
    kl, same, leads = figures
    return (
        round(kl.mean().item(), 5),
        round(kl.quantile(0.99).item(), 4),
        round(100 * same.mean().item(), 1),
        round(100 * (same * leads).sum().item() / leads.sum().item(), 1),
    )


if __name__ == "__main__":
    main()
