"""Compute the floor of a run: its least memory traffic and arithmetic, at the device's peak rates.

Counted: weights, keys and values, each read once in every pass; operations of matrix products and
attention. Not counted: activations, norms, sampling and the few embedding rows. A few devices have
known peak rates, which were measured once. All others are measured here, in a second or two.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from bass_cli.bench.figures import Run
from bass_cli.models.decoder import Decoder
from bass_cli.models.spec import (
    EVERY_MAP,
    AnySpec,
    HeadSpec,
    Recurrent,
    head_parameters,
    parameters,
)
from bass_kernels import Quantised
from bass_kernels.segments import SCALE

_MAPS = tuple(f"{name}.weight" for name in (*EVERY_MAP, "router", "delta_gates", "shared_gate"))
_EXPERTS = ("experts_up.weight", "experts_down.weight")
_STATE_BYTES = 8  # of an element of a recurrent state: it is read and written in float32
_DELTA = 7  # operations of the gated delta rule on an element: decay, S^T k, the update, S^T q
# Operations of e4m3 for one of bfloat16, by NVIDIA's data sheets from Ada and Hopper on
_FP8 = 2
# (device name, dtype): measured bytes per second of a pass over the weights, and measured
# floating-point operations per second of a large matrix product
_KNOWN = {("H200", torch.bfloat16): (4.3e12, 790e12)}


class Ceilings(NamedTuple):
    """Peak rates of a device.

    bandwidth: bytes per second. operations: floating-point operations per second. source: "known"
    or "measured".
    """

    bandwidth: float
    operations: float
    source: str


class Sizes(NamedTuple):
    """Sizes of a decoder.

    body, head: elements of the layers' matrices and of the output head. item: bytes of an element
    of K and V, and of a matrix that is not quantised. saved: bytes that quantising saves. keys:
    elements of K and V for one position and layer. attention: operations for one query, key and
    layer. windows: attention window of each layer, 0 if it has none. key_item: bytes of an element
    of K and V with its part of a scale; None for `item`. experts: elements of all experts'
    matrices. chosen: share of the experts that a token chooses. expert_item: bytes of an element of
    experts with its part of a scale; None for `item`. state: elements, of 4 bytes, of a
    row's recurrent states, which a pass reads and writes once.
    """

    body: int
    head: int
    item: int
    keys: int
    attention: int
    windows: tuple[int, ...]
    saved: int = 0
    key_item: float | None = None
    experts: int = 0
    chosen: float = 0.0
    state: int = 0
    expert_item: float | None = None

    def read(self, tokens: int) -> float:
        """Return how many elements of experts a pass over so many tokens reads, if every expert is
        equally likely and tokens choose independently."""
        return self.experts * (1.0 - (1.0 - self.chosen) ** tokens)


class FloorInputs(NamedTuple):
    """Inputs of a method's floor.

    draft: None for lookup and plain decoding. samples: samples of each prompt. at_once: whether
    one pass drafts all tokens.
    """

    target: Sizes
    draft: Sizes | None
    samples: int
    ceilings: Ceilings
    at_once: bool = False


class Work(NamedTuple):
    """Bytes to read and floating-point operations."""

    bytes: float
    operations: float

    def seconds(self, ceilings: Ceilings) -> float:
        """Return the time of a device at its ceilings."""
        return max(self.bytes / ceilings.bandwidth, self.operations / ceilings.operations)


class Floor(NamedTuple):
    """Total work of a run, and when each round would end at the ceilings, in seconds."""

    work: Work
    ends: tuple[float, ...]


def sizes_of(decoder: Decoder, head: HeadSpec | None = None, *, eight_bits: bool = False) -> Sizes:
    """Return the sizes of a decoder, counting only the layers that it runs.

    For a drafter that reads hidden states of the target (`head`), the projection of these states
    and the drafter's own vocabulary are counted. The Markov bias of a DSpark is not counted, so
    its floor is slightly too low.

    Args:
        eight_bits: whether keys and values are stored in eight bits.
    """
    spec = decoder.spec
    if isinstance(spec, AnySpec):
        return _sizes_of_any(decoder, spec)
    of_layer = parameters(spec) if head is None else head_parameters(head)
    body, experts = (
        sum(
            math.prod(of_layer.get(f"layers.{i}.{name}", (0,)))
            for i in decoder.layers
            for name in names
        )
        for names in (_MAPS, _EXPERTS)
    )
    projected = 0 if head is None else head.fc_inputs
    known = min(decoder.vocab, spec.vocab)  # with tensor parallelism, a part of it
    if head is not None and head.ids is not None:
        known = len(head.ids)
    return Sizes(
        body + projected * spec.width,
        known * spec.width,
        decoder.dtype.itemsize,
        2 * spec.kv_heads * spec.head_size,
        4 * spec.heads * spec.head_size,
        tuple(spec.windows[i] for i in decoder.layers if i in spec.attention_layers),
        _saved(decoder),
        1 + SCALE / spec.head_size if eight_bits else None,
        experts,
        0.0 if spec.experts is None else spec.experts.chosen / spec.experts.total,
        _state(decoder.recurrent),
        _expert_item(decoder, experts),
    )


def _expert_item(decoder: Decoder, elements: int) -> float | None:
    """Return the bytes of an element of its experts, if they are quantised."""
    names = [f"layers.{i}.{name}" for i in decoder.layers for name in _EXPERTS]
    found = [decoder.weights[name] for name in names if name in decoder.weights]
    if not any(isinstance(one, Quantised) for one in found):
        return None
    return sum(one.nbytes for one in found) / elements


def _state(recurrent: Recurrent | None) -> int:
    """Return the elements of a row's recurrent states."""
    if recurrent is None:
        return 0
    return len(recurrent.layers) * recurrent.values * recurrent.key_size


def _saved(decoder: Decoder) -> int:
    """Return how many bytes less its quantised matrices have than plain ones."""
    names = [f"layers.{i}.{name}" for i in decoder.layers for name in _MAPS]
    found = [decoder.weights[name] for name in names if name in decoder.weights] + [decoder.head]
    return sum(
        math.prod(one.shape) * decoder.dtype.itemsize - one.nbytes
        for one in found
        if isinstance(one, Quantised)
    )


def _sizes_of_any(decoder: Decoder, spec: AnySpec) -> Sizes:
    """Return the sizes of a decoder whose layers transformers runs. All experts of a mixture count,
    so its floor is too high for few tokens."""
    whole = sum(map(math.prod, parameters(spec).values()))
    keys = sum(2 * call.kv_heads * call.size for call in spec.stored)
    return Sizes(
        whole - spec.vocab * spec.width * (1 if spec.tied else 2),
        min(decoder.vocab, spec.vocab) * spec.width,
        decoder.dtype.itemsize,
        keys // spec.layers,
        4 * spec.heads * spec.head_size,
        spec.windows,
    )


def pass_work(sizes: Sizes, *, contexts: Sequence[int], shared: int, fed: int, logits: int) -> Work:
    """Return the work of one pass.

    Args:
        contexts: tokens before the pass, for each row.
        shared: positions whose K and V another row of the same prompt reads already.
        fed: tokens of each row in this pass.
        logits: how many of them get logits.
    """
    rows = len(contexts)
    seen = [
        [min(length, window) if window else length for length in contexts]
        for window in sizes.windows
    ]
    keys = sum(
        sum(layer) - (0 if window else shared)
        for layer, window in zip(seen, sizes.windows, strict=True)
    )
    each = sizes.keys * (sizes.item if sizes.key_item is None else sizes.key_item)
    active = sizes.body + sizes.experts * sizes.chosen
    products = 2 * rows * (active * fed + sizes.head * logits)
    weights = float((sizes.body + sizes.head) * sizes.item - sizes.saved)
    weights += sizes.read(rows * fed) * (sizes.expert_item or sizes.item)
    return Work(
        weights + keys * each + _STATE_BYTES * rows * sizes.state,
        products + sizes.attention * fed * sum(map(sum, seen)) + _DELTA * rows * fed * sizes.state,
    )


def floor_of(run: Run, inputs: FloorInputs) -> Floor:
    """Return the floor of a run, over all its rounds.

    Rows i with the same i // `samples` share a prompt. The first draft step takes two tokens of
    each row, later steps take one. If one pass drafts all tokens, it takes 2 * width of each row.
    """
    target, draft, samples, ceilings, at_once = inputs
    lengths = list(run.contexts)
    total, ends = Work(0, 0), [0.0]
    for step in run.steps:
        contexts = [lengths[row] for row in step.rows]
        shared = _shared(step.rows, run.contexts, samples)
        passes = [(target, step.width + 1, step.width + 1)]
        if draft is not None:
            passes += [(draft, *tokens) for tokens in _passes(step.width, at_once)]
        works = [
            pass_work(sizes, contexts=contexts, shared=shared, fed=fed, logits=logits)
            for sizes, fed, logits in passes
        ]
        ends.append(ends[-1] + sum(work.seconds(ceilings) for work in works))
        total = Work(*map(sum, zip(total, *works, strict=True)))
        for row, accepted in zip(step.rows, step.accepted, strict=True):
            lengths[row] += accepted + 1
    return Floor(total, tuple(ends[1:]))


def _passes(width: int, at_once: bool) -> Iterator[tuple[int, int]]:
    """Yield, for each draft pass of a round, its tokens and its logits for one row."""
    if at_once and width:
        yield 2 * width, width
        return
    for step in range(width):
        yield (1 if step else 2), 1


def _shared(rows: Sequence[int], prompts: Sequence[int], samples: int) -> int:
    """Count prompt positions that are read for another row of the same prompt."""
    groups = itertools.groupby(sorted(rows), key=lambda row: row // samples)
    return sum(prompts[next(members)] * sum(1 for _ in members) for _, members in groups)


def ceilings_for(decoder: Decoder) -> Ceilings:
    """Return the ceilings of a decoder's device for its number formats."""
    found = ceilings_of(decoder.device, decoder.dtype)
    quantised = (one for one in decoder.weights.values() if isinstance(one, Quantised))
    fp8 = any(one.layout == "fp8" for one in quantised)
    if not fp8 or decoder.device.type != "cuda":
        return found
    return found._replace(operations=_FP8 * found.operations)


@functools.cache
def ceilings_of(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Return the ceilings of a device for models of this dtype. Measures at most once a process."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for (known, its_dtype), (bandwidth, operations) in _KNOWN.items():
            if known in name and its_dtype == dtype:
                return Ceilings(bandwidth, operations, "known")
    return Ceilings(_bandwidth(device), _operations(device, dtype), "measured")


def _bandwidth(device: torch.device) -> float:
    """Measure bytes per second, read and written, of a copy."""
    size = 2**30 if device.type == "cuda" else 2**27
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best(lambda: target.copy_(source), device)


def _operations(device: torch.device, dtype: torch.dtype) -> float:
    size = 8192 if device.type == "cuda" else 1024
    left = torch.ones(size, size, dtype=dtype, device=device)
    return 2 * size**3 / _best(lambda: left @ left, device)


def _best(function: Callable[[], object], device: torch.device, times: int = 5) -> float:
    """Return the seconds of the fastest call."""
    found = []
    for _ in range(times + 1):  # the first call initialises libraries and is never the fastest
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return min(found)
