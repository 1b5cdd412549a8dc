"""Shapes of published models by name, and random weights for them, made on the device without a
copy on the host.

`wide-310m` is not a published model: its few wide layers make a draft with few kernels for its
bytes. `pard-0.5b` is qwen2.5-0.5b used as a draft that proposes all tokens in one pass.
`dspark-8b`, `dflash-8b` and `eagle3-8b` are published drafters that read the hidden states of
qwen3-8b. `tiny`, `dspark-tiny` and `eagle3-tiny` are for tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from bass_cli.errors import UserError, nearest
from bass_cli.formats.hf_config import llama3_factors
from bass_cli.models.ranks import Share, part_of
from bass_cli.models.spec import HeadSpec, Norm, Rope, Spec, parameters, stored_dtype

_EVERY_MAP = frozenset({"qkv", "o", "up", "down"})


def spec_of(
    name: str, *, option: str, vocab: int | None = None, others: Iterable[str] = ()
) -> Spec:
    """Return the Spec of this name, with `vocab` ids if given (a draft gets its target's).

    UserError for an unknown name: it names `option` and the most similar of all shapes and
    `others`.
    """
    if name not in SHAPES:
        close = nearest(name, (*SHAPES, *others))
        raise UserError(f'{option}: there is no shape "{name}"; {close}')
    return SHAPES[name](vocab)


def head_of(name: str, target: Spec, *, option: str) -> HeadSpec:
    """Return the drafter of this name in HEADS; UserError if it is made for another target."""
    shape, head = HEADS[name]
    expected = SHAPES[shape](None)
    sizes = (expected.width, expected.layers, expected.vocab)
    if (target.width, target.layers, target.vocab) != sizes:
        raise UserError(f"{option}: {name} works with {shape} only, whose hidden states it reads")
    return head(expected)


def count_parameters(spec: Spec) -> int:
    """Count the parameters; a tied head counts once."""
    shapes = parameters(spec)
    return sum(
        math.prod(shape)
        for name, shape in shapes.items()
        if not (spec.tied and name == "head.weight")
    )


def _modern(
    vocab: int | None = None,
    *,
    family: str,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    inner: int,
    own_vocab: int,
    context: int,
    rope: tuple[float, float | None] = (1e6, None),
    eps: float = 1e-6,
    biased: bool = False,
    tied: bool = False,
    qk: bool = False,
) -> Spec:
    """Make a Spec with RMS norm, rotary positions, gated SiLU and grouped heads.

    rope: theta, and the factor of Llama 3's scaling or None. qk: queries and keys have norms.
    """
    size = width // heads
    theta, factor = rope
    factors = (
        None
        if factor is None
        else llama3_factors(theta, size, factor=factor, low=1.0, high=4.0, original=8192.0)
    )
    return Spec(
        family=family,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        inner=inner,
        vocab=vocab or own_vocab,
        context=context,
        norm=Norm("rms", eps, qk),
        activation="silu",
        gated=True,
        rope=Rope(theta, size, factors),
        windows=(0,) * layers,
        query_scale=size**-0.5,
        biases=frozenset({"qkv"}) if biased else frozenset(),
        tied=tied,
    )


def _opt(vocab: int | None = None, *, layers: int, width: int, heads: int) -> Spec:
    size = width // heads
    return Spec(
        family="opt",
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        head_size=size,
        inner=4 * width,
        vocab=vocab or 50272,
        context=2048,
        norm=Norm("layer", 1e-5),
        activation="relu",
        gated=False,
        rope=None,
        windows=(0,) * layers,
        query_scale=size**-0.5,
        biases=_EVERY_MAP,
        tied=True,
    )


def _codegen(vocab: int | None = None, *, layers: int, width: int, heads: int) -> Spec:
    size = width // heads
    return Spec(
        family="codegen",
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        head_size=size,
        inner=4 * width,
        vocab=vocab or 51200,
        context=2048,
        norm=Norm("layer", 1e-5),
        activation="gelu_tanh",
        gated=False,
        rope=Rope(10000.0, 64),
        windows=(0,) * layers,
        query_scale=size**-0.5,
        parallel=True,
        biases=frozenset({"up", "down", "head"}),
    )


def _head(
    target: Spec, *, layers: int, aux_layers: tuple[int, ...], block: int, first: int, rank: int = 0
) -> HeadSpec:
    """Make a drafter of layers like the target's, with norms of queries and keys.

    The last id is the mask token.
    """
    norm = target.norm._replace(qk=True)
    body = replace(target, layers=layers, windows=(0,) * layers, norm=norm, tied=False)
    kind = "dspark" if rank else "dflash"
    return HeadSpec(kind, body, aux_layers, block, first, target.vocab - 1, rank)


def _chain(target: Spec, *, aux_layers: tuple[int, ...], vocab: int) -> HeadSpec:
    """Make an EAGLE-3 drafter of one layer, without norms of queries and keys.

    Its vocabulary is every second token of the target's, up to `vocab` tokens.
    """
    norm = target.norm._replace(qk=False)
    body = replace(target, layers=1, windows=(0,), norm=norm, tied=False)
    return HeadSpec("eagle3", body, aux_layers, heads=True, ids=tuple(range(0, 2 * vocab, 2)))


# drafts that propose all tokens in one pass; their mask token is the last id
AT_ONCE = frozenset({"pard-0.5b"})

_qwen = partial(_modern, family="qwen2", context=32768, biased=True)
_llama = partial(_modern, family="llama", context=131072, own_vocab=128256, eps=1e-5)

SHAPES: dict[str, Callable[[int | None], Spec]] = {
    "qwen2.5-7b": partial(
        _qwen, layers=28, width=3584, heads=28, kv_heads=4, inner=18944, own_vocab=152064
    ),
    "qwen2.5-1.5b": partial(
        _qwen, layers=28, width=1536, heads=12, kv_heads=2, inner=8960, own_vocab=151936, tied=True
    ),
    "qwen2.5-0.5b": partial(
        _qwen, layers=24, width=896, heads=14, kv_heads=2, inner=4864, own_vocab=151936, tied=True
    ),
    "pard-0.5b": partial(
        _qwen, layers=24, width=896, heads=14, kv_heads=2, inner=4864, own_vocab=151936, tied=True
    ),
    "qwen3-8b": partial(
        _modern,
        family="qwen3",
        layers=36,
        width=4096,
        heads=32,
        kv_heads=8,
        inner=12288,
        own_vocab=151936,
        context=40960,
        qk=True,
    ),
    "llama-3.1-8b": partial(
        _llama, layers=32, width=4096, heads=32, kv_heads=8, inner=14336, rope=(5e5, 8.0)
    ),
    "llama-3.1-70b": partial(
        _llama, layers=80, width=8192, heads=64, kv_heads=8, inner=28672, rope=(5e5, 8.0)
    ),
    "llama-3.2-1b": partial(
        _llama, layers=16, width=2048, heads=32, kv_heads=8, inner=8192, rope=(5e5, 32.0), tied=True
    ),
    "opt-13b": partial(_opt, layers=40, width=5120, heads=40),
    "opt-125m": partial(_opt, layers=12, width=768, heads=12),
    "codegen-16b": partial(_codegen, layers=34, width=6144, heads=24),
    "wide-310m": partial(
        _modern,
        family="llama",
        layers=4,
        width=2048,
        heads=16,
        kv_heads=4,
        inner=8192,
        own_vocab=152064,
        context=32768,
        tied=True,
    ),
    "tiny": partial(
        _modern,
        family="llama",
        layers=4,
        width=48,
        heads=6,
        kv_heads=2,
        inner=80,
        own_vocab=301,
        context=512,
    ),
}

_AUX_LAYERS = (1, 9, 17, 25, 33)
# drafters that read hidden states: the shape of their target, and the function that makes them
HEADS: dict[str, tuple[str, Callable[[Spec], HeadSpec]]] = {
    "dspark-8b": (
        "qwen3-8b",
        partial(_head, layers=5, aux_layers=_AUX_LAYERS, block=7, first=0, rank=256),
    ),
    "dflash-8b": ("qwen3-8b", partial(_head, layers=5, aux_layers=_AUX_LAYERS, block=16, first=1)),
    "eagle3-8b": ("qwen3-8b", partial(_chain, aux_layers=(1, 17, 32), vocab=32000)),
    "eagle3-tiny": ("tiny", partial(_chain, aux_layers=(0, 1, 2), vocab=150)),
    "dspark-tiny": ("tiny", partial(_head, layers=2, aux_layers=(0, 2), block=7, first=0, rank=8)),
}


# Random weights: the scales keep every layer's output near 1. The standard deviation of the logits
# is such that a nucleus (top-p) holds some hundreds of ids, as in text, and not nearly the whole
# vocabulary.
LOGIT_SPREAD = 4.0


def random_weights(
    spec: Spec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    whole: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, Tensor]:
    """Make normal matrices, norms of 1 and biases of 0. A tied head is the embedding itself.

    Args:
        shapes: shape by name; default: `parameters(spec)`.
        whole: with tensor parallelism, the shapes of the whole model. Matrices are scaled by its
            input sizes, so that the sum over all parts has the usual size.
    """
    generator = torch.Generator(device).manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in (shapes or parameters(spec)).items():
        if name == "head.weight" and spec.tied:
            weights[name] = weights["embed.weight"]
        else:
            weights[name] = torch.empty(shape, dtype=stored_dtype(name, dtype), device=device)
            _fill(weights[name], name, spec, generator, inputs=(whole or {}).get(name, shape)[-1])
    return weights


def random_part(
    spec: Spec,
    seed: int,
    scaled: tuple[int, float] | None,
    share: Share,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_read: Callable[[int], None] = lambda size: None,
) -> tuple[Spec, dict[str, Tensor]]:
    """Make one part of a random model for tensor parallelism, as a `Source` of follower.py.

    Each part has its own seed, so the parts form one random model. `scaled`: arguments `first` and
    `scale` of `scale_layers`, or None.
    """
    part = part_of(spec, share.ranks)
    weights = random_weights(
        part, dtype=dtype, device=device, seed=seed + share.rank, whole=parameters(spec)
    )
    if scaled is not None:
        scale_layers(weights, part, first=scaled[0], scale=scaled[1])
    return part, weights


def _fill(
    weight: Tensor, name: str, spec: Spec, generator: torch.Generator, *, inputs: int
) -> None:
    head = name == "head.weight" or (name == "embed.weight" and spec.tied)
    if name.endswith(".bias"):
        weight.zero_()
    elif weight.dim() == 1:
        weight.fill_(1.0)
    elif name in ("embed.weight", "positions.weight") and not head:
        weight.normal_(0.0, 0.02, generator=generator)
    else:
        weight.normal_(0.0, (LOGIT_SPREAD if head else 1.0) / inputs**0.5, generator=generator)


def scale_layers(weights: dict[str, Tensor], spec: Spec, *, first: int, scale: float) -> None:
    """Scale, in place, what layers `first` and later add to the residual stream.

    With a scale of 0 these layers have no effect.
    """
    assert not spec.norm.sandwich  # a norm after the projection would undo the scaling
    for i in range(first, spec.layers):
        for name in ("o", "down"):
            for kind in (".weight", ".bias"):
                if f"layers.{i}.{name}{kind}" in weights:
                    weights[f"layers.{i}.{name}{kind}"].mul_(scale)
