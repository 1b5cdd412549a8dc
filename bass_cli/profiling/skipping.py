"""Which layers a target could leave out to draft for itself: greedily the one whose absence hurts least, on built-in text.

After Draft & Verify (arXiv 2309.08168), with a search that stops when its time is up. Not here: drafting with them
(draft/model.py, `draft: skip:LAYERS`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bass_cli.bench.texts import joined
from bass_cli.model.decoder import Decoder, Spec
from bass_cli.model.runner import Runner
from bass_cli.model.weights import load
from bass_cli.plan import Plan

_TOKENS = {"cuda": 512, "cpu": 96}
_CLOSEST = 3  # layers that are tried again after each that was taken out: those that hurt least before
_LEAST = 0.35  # agreement below which no draft pays
_VERIFY = 0.03  # what one more draft costs the target's pass
_LONGEST = 16


class Skip(NamedTuple):
    """`draft` as a pair file has it; `agreement`: share of the `tokens` positions at which the smaller model's most likely
    token is the target's; `gain`: expected speed with the best draft length, in plain decoding's."""

    draft: str
    agreement: float
    gain: float
    tokens: int


class _Found(NamedTuple):
    agreement: float
    likely: float  # mean log-probability of the target's most likely tokens


def propose(plan: Plan, *, limit: float, note: Callable[[str], None] = lambda text: None,
            now: Callable[[], float] = time.perf_counter) -> Skip:
    """The layers to skip for which most is expected. `limit`: seconds of searching, the weights' loading left out."""
    weights = load(plan.target, dtype=plan.dtype, device=plan.device)
    target = Decoder(plan.target.spec, weights, vocab=plan.tokenizer.size)
    length = min(_TOKENS[plan.device.type], plan.target.spec.context - 2)
    tokens = torch.tensor(joined(plan.tokenizer, 0, length), device=plan.device)
    return search(target, tokens, deadline=now() + limit, note=note, now=now)


@torch.inference_mode()
def search(target: Decoder, tokens: Tensor, *, deadline: float, note: Callable[[str], None] = lambda text: None,
           now: Callable[[], float] = time.perf_counter) -> Skip:
    """The same for a decoder and token ids [W]."""
    layers = list(target.layers)
    due = _logits(target, tokens).argmax(-1)
    harm: dict[int, float] = {}
    for layer in layers:  # each alone, and so which ones are worth a second look
        if harm and now() > deadline:
            break
        harm[layer] = -_compare(target, [i for i in layers if i != layer], tokens, due).likely
    best: Skip | None = None
    kept = layers
    while harm and len(kept) > 1:
        tried: dict[int, _Found] = {}
        for layer in sorted(harm, key=harm.__getitem__)[:_CLOSEST]:
            if tried and now() > deadline:
                break
            tried[layer] = _compare(target, [i for i in kept if i != layer], tokens, due)
            harm[layer] = -tried[layer].likely
        gone = max(tried, key=lambda layer: tried[layer].likely)
        del harm[gone]
        kept = [i for i in kept if i != gone]
        found = tried[gone]
        skip = Skip(_written([i for i in layers if i not in kept]), found.agreement,
                    expected_gain(found.agreement, step=_share(target.spec, len(kept))), len(tokens))
        note(f"{skip.draft}: agreement {skip.agreement:.2f}, expected {skip.gain:.2f} of plain decoding")
        best = skip if best is None or skip.gain > best.gain else best
        if found.agreement < _LEAST or now() > deadline:
            break
    assert best is not None, "a target of one layer has none to skip"
    return best


def expected_gain(agreement: float, *, step: float) -> float:
    """Speed with the best draft length, in plain decoding's: each draft costs `step` of the target's pass, and a little
    more of the pass that checks it."""
    tokens = [sum(agreement**i for i in range(k + 1)) for k in range(_LONGEST + 1)]
    return max(count / (1 + k * (step + _VERIFY)) for k, count in enumerate(tokens))


def _compare(target: Decoder, layers: Sequence[int], tokens: Tensor, due: Tensor) -> _Found:
    logits = _logits(target.keep_layers(layers), tokens)
    agreement = (logits.argmax(-1) == due).float().mean()
    likely = torch.log_softmax(logits, -1).gather(1, due[:, None]).mean()
    return _Found(float(agreement), float(likely))


def _logits(decoder: Decoder, tokens: Tensor) -> Tensor:
    """Logits [W, V] of a text's tokens [W], float32."""
    runner = Runner(decoder, rows=1, span=len(tokens) + 1, lag=1)
    runner.open("text", tokens[:1].tolist())
    runner.attach(0, "text")
    places = torch.arange(len(tokens), device=tokens.device)
    return runner.forward(tokens[None], places[None], [len(tokens)])[0].float()


def _share(spec: Spec, layers: int) -> float:
    """What a pass through so many layers reads, of the whole model's weights: the head is always read."""
    head = spec.vocab * spec.width
    gates = 3 if spec.gated else 2
    layer = spec.width * (2 * spec.heads + 2 * spec.kv_heads) * spec.head_size + gates * spec.width * spec.inner
    return (head + layers * layer) / (head + spec.layers * layer)


def _written(layers: Sequence[int]) -> str:
    """Layers as a pair file has them: skip:4-9,12."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return "skip:" + ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
