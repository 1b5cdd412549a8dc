"""Shapes of published models, for pairs made of random weights: a Spec by name. No weights and no
tokenizer here.

`wide-310m` is nobody's model: few wide layers, a draft with the fewest kernels for its bytes.
`pard-0.5b` is qwen2.5-0.5b that drafts in one pass, as a draft. `dspark-8b`, `dflash-8b` and
`eagle3-8b` read the hidden states of qwen3-8b, as published for it. `tiny`, `dspark-tiny` and
`eagle3-tiny` are for tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from bass_cli.errors import UserError, nearest
from bass_cli.formats.hf_config import llama3_factors
from bass_cli.models.spec import HeadSpec, Norm, Rope, Spec, parameters

_EVERY_MAP = frozenset({"qkv", "o", "up", "down"})


def spec_of(
    name: str, *, option: str, vocab: int | None = None, others: Iterable[str] = ()
) -> Spec:
    """The Spec of that name, with `vocab` ids if given (a draft's is its target's); UserError,
    naming `option` and the nearest shape, or of `others`, for an unknown one."""
    if name not in SHAPES:
        close = nearest(name, (*SHAPES, *others))
        raise UserError(f'{option}: there is no shape "{name}"; {close}')
    return SHAPES[name](vocab)


def head_of(name: str, target: Spec, *, option: str) -> HeadSpec:
    """The drafter of that name in HEADS; UserError if it reads another target."""
    shape, head = HEADS[name]
    due = SHAPES[shape](None)
    if (target.width, target.layers, target.vocab) != (due.width, due.layers, due.vocab):
        raise UserError(f"{option}: {name} reads the hidden states of {shape}, and nothing else's")
    return head(due)


def count_parameters(spec: Spec) -> int:
    """Numbers in the weights, a tied head counted once."""
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
    """RMS norm, rotary positions, gated SiLU, grouped heads. `rope`: theta, and the factor of
    Llama 3's scaling; `qk`: queries and keys have norms."""
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
    """Layers like the target's, with norms of queries and keys; its last id is the mask."""
    norm = target.norm._replace(qk=True)
    body = replace(target, layers=layers, windows=(0,) * layers, norm=norm, tied=False)
    kind = "dspark" if rank else "dflash"
    return HeadSpec(kind, body, aux_layers, block, first, target.vocab - 1, rank)


def _chain(target: Spec, *, aux_layers: tuple[int, ...], vocab: int) -> HeadSpec:
    """A layer like the target's without norms of queries and keys, over every other token of it
    as far as `vocab` goes."""
    norm = target.norm._replace(qk=False)
    body = replace(target, layers=1, windows=(0,), norm=norm, tied=False)
    return HeadSpec("eagle3", body, aux_layers, heads=True, ids=tuple(range(0, 2 * vocab, 2)))


# those that draft all in one pass; the last id stands for their mask token
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

_TAPS = (1, 9, 17, 25, 33)
# drafters that read hidden states: of which shape, and how they are made for it
HEADS: dict[str, tuple[str, Callable[[Spec], HeadSpec]]] = {
    "dspark-8b": (
        "qwen3-8b",
        partial(_head, layers=5, aux_layers=_TAPS, block=7, first=0, rank=256),
    ),
    "dflash-8b": ("qwen3-8b", partial(_head, layers=5, aux_layers=_TAPS, block=16, first=1)),
    "eagle3-8b": ("qwen3-8b", partial(_chain, aux_layers=(1, 17, 32), vocab=32000)),
    "eagle3-tiny": ("tiny", partial(_chain, aux_layers=(0, 1, 2), vocab=150)),
    "dspark-tiny": ("tiny", partial(_head, layers=2, aux_layers=(0, 2), block=7, first=0, rank=8)),
}
