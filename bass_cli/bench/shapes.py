"""Shapes of published models by name, and random weights for them, made on the device without a
copy on the host.

`wide-310m` is not a published model: its few wide layers make a draft with few kernels for its
bytes. `pard-0.5b` is qwen2.5-0.5b used as a draft that proposes all tokens in one pass.
`dspark-8b`, `dflash-8b` and `eagle3-8b` are published drafters that read the hidden states of
qwen3-8b; `mtp-27b` and `mtp-35b-a3b` the layers that predict further tokens of qwen3.5-27b and
qwen3.5-35b-a3b. Names with `tiny` are for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bass_cli.errors import UserError, nearest
from bass_cli.formats.hf_config import spec_of_config
from bass_cli.models.families import FAMILIES
from bass_cli.models.partition import Share, part_of
from bass_cli.models.spec import (
    PLAIN,
    HeadSpec,
    Layouts,
    Spec,
    parameters,
    prediction_layer,
    stored_dtype,
)
from bass_cli.models.weights import Named
from bass_kernels import Quantised, Weight


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
    return SHAPES[name].spec(vocab)


def head_of(name: str, target: Spec, *, option: str) -> HeadSpec:
    """Return the drafter of this name in HEADS; UserError if it is made for another target."""
    shape, head = HEADS[name]
    expected = SHAPES[shape].spec()
    sizes = (expected.width, expected.layers, expected.vocab)
    if (target.width, target.layers, target.vocab) != sizes:
        raise UserError(f"{option}: {name} works with {shape} only, whose hidden states it reads")
    return head(expected)


class Shape(NamedTuple):
    """A model's family, its sizes, and further keys of its config.json."""

    family: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    context: int
    more: Mapping[str, Any] = {}

    def spec(self, vocab: int | None = None) -> Spec:
        """Return the Spec, with `vocab` ids if given."""
        keys = FAMILIES[self.family].keys
        words = self._asdict() | {"vocab": vocab or self.vocab}
        sizes = {keys[word]: size for word, size in words.items() if keys.get(word)}
        config = {"model_type": self.family, **sizes, **self.more}
        return spec_of_config(config, place=self.family)


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

_THETA = {"rope_theta": 1e6}
_TIED = _THETA | {"tie_word_embeddings": True}


def _llama(factor: float, *, tied: bool = False) -> dict[str, Any]:
    """Return the further keys of Llama 3."""
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {
        "rope_theta": 5e5,
        "rope_scaling": scaling,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
    }


_EXPERTS = _THETA | {"head_dim": 128, "norm_topk_prob": True}
_FEW_EXPERTS = _THETA | {"num_local_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True}
_HYBRID = {"rope_theta": 1e7, "head_dim": 256}
_MANY_HEADS = _HYBRID | {"linear_num_value_heads": 48}
_FEW_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 6}
_FEW_HEADS |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 16}
SHAPES = {
    "qwen2.5-7b": Shape("qwen2", 28, 3584, 28, 4, 18944, 152064, 32768, _THETA),
    "qwen2.5-1.5b": Shape("qwen2", 28, 1536, 12, 2, 8960, 151936, 32768, _TIED),
    "qwen2.5-0.5b": Shape("qwen2", 24, 896, 14, 2, 4864, 151936, 32768, _TIED),
    "pard-0.5b": Shape("qwen2", 24, 896, 14, 2, 4864, 151936, 32768, _TIED),
    "qwen3-8b": Shape("qwen3", 36, 4096, 32, 8, 12288, 151936, 40960, _THETA),
    "llama-3.1-8b": Shape("llama", 32, 4096, 32, 8, 14336, 128256, 131072, _llama(8.0)),
    "llama-3.1-70b": Shape("llama", 80, 8192, 64, 8, 28672, 128256, 131072, _llama(8.0)),
    "llama-3.2-1b": Shape("llama", 16, 2048, 32, 8, 8192, 128256, 131072, _llama(32.0, tied=True)),
    "opt-13b": Shape("opt", 40, 5120, 40, 40, 20480, 50272, 2048),
    "opt-125m": Shape("opt", 12, 768, 12, 12, 3072, 50272, 2048),
    "codegen-16b": Shape("codegen", 34, 6144, 24, 24, 24576, 51200, 2048),
    "qwen3-30b-a3b": Shape("qwen3_moe", 48, 2048, 32, 4, 768, 151936, 40960, _EXPERTS),
    "gpt-oss-20b": Shape(
        "gpt_oss", 24, 2880, 64, 8, 2880, 201088, 131072, {"num_local_experts": 32}
    ),
    "qwen3.5-27b": Shape("qwen3_5_text", 64, 5120, 24, 4, 17408, 248320, 262144, _MANY_HEADS),
    "qwen3.5-35b-a3b": Shape("qwen3_5_moe_text", 40, 2048, 16, 2, 512, 248320, 262144, _HYBRID),
    "tiny-hybrid": Shape("qwen3_5_text", 4, 48, 6, 2, 80, 301, 512, _THETA | _FEW_HEADS),
    "tiny-moe": Shape("qwen3_moe", 4, 48, 6, 2, 40, 301, 512, _FEW_EXPERTS),
    "wide-310m": Shape("llama", 4, 2048, 16, 4, 8192, 152064, 32768, _TIED),
    "tiny": Shape("llama", 4, 48, 6, 2, 80, 301, 512, _THETA),
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
    "mtp-27b": ("qwen3.5-27b", prediction_layer),
    "mtp-35b-a3b": ("qwen3.5-35b-a3b", prediction_layer),
    "mtp-tiny": ("tiny-hybrid", prediction_layer),
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
    layouts: Layouts = PLAIN,
) -> dict[str, Weight]:
    """Make normal matrices, norms of 1 and biases of 0. A tied head that is not quantised is the
    embedding itself.

    Args:
        layouts: which matrices are quantised.
        shapes: shape by name; default: `parameters(spec)`.
        whole: with tensor parallelism, the shapes of the whole model. Matrices are scaled by its
            input sizes, so that the sum over all parts has the usual size.
    """
    generator = torch.Generator(device).manual_seed(seed)
    plain: dict[str, Tensor] = {}
    weights: dict[str, Weight] = {}
    for name, shape in (shapes or parameters(spec)).items():
        if name == "head.weight" and spec.tied:
            weight = plain["embed.weight"]
        else:
            weight = torch.empty(shape, dtype=stored_dtype(name, dtype), device=device)
            _fill(weight, name, spec, generator, inputs=(whole or {}).get(name, shape)[-1])
        if name == "embed.weight":
            plain[name] = weight
        layout = layouts.of(name)
        weights[name] = weight if layout is None else Quantised.of(weight, layout)
    return weights


def random_part(
    spec: Spec,
    seed: int,
    scaled: tuple[int, float] | None,
    share: Share,
    *,
    dtype: torch.dtype,
    layouts: Layouts = PLAIN,
    device: torch.device,
    on_read: Callable[[int], None] = lambda size: None,
) -> tuple[Spec, Named]:
    """Make one part of a random model for tensor parallelism, as a `Source` of follower.py.

    Each part has its own seed, so the parts form one random model. `scaled`: arguments `first` and
    `scale` of `scale_layers`, or None.
    """
    part = part_of(spec, share.ranks)
    weights = random_weights(
        part,
        dtype=dtype,
        device=device,
        seed=seed + share.rank,
        whole=parameters(spec),
        layouts=layouts,
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


def scale_layers(weights: Named, spec: Spec, *, first: int, scale: float) -> None:
    """Scale, in place, what layers `first` and later add to the residual stream.

    With a scale of 0 these layers have no effect.
    """
    assert not spec.norm.sandwich  # a norm after the projection would undo the scaling
    for i in range(first, spec.layers):
        for name in ("o", "delta_out", "down", "experts_down", "shared_down"):
            for kind in (".weight", ".bias"):
                weight = weights.get(f"layers.{i}.{name}{kind}")
                if isinstance(weight, (Tensor, Quantised)):
                    (weight.scales if isinstance(weight, Quantised) else weight).mul_(scale)
