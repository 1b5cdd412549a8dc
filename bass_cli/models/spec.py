"""Spec: the shape of a decoder and the differences between families, as data. The names, shapes and
dtypes of its tensors follow from it.

Not here: the decoder (decoder.py), the names of a checkpoint's tensors (families.py).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

# The layout of matrices in the numbers of their file (bass_kernels.Grouped)
FILE = "file"
# The linear maps of a layer
MAPS = ("qkv", "o", "up", "down")
# Those of recurrent layers and of shared experts too
EVERY_MAP = (*MAPS, "delta_in", "delta_out", "shared_up", "shared_down")
# Those of a mixture's experts, which are stacked
EXPERT_MAPS = ("experts_up", "experts_down")
_NORMS = {"norm", "norm1", "norm2", "post1", "post2", "q_norm", "k_norm"}
_NORMS |= {"context_norm", "token_norm"}
# Tensors of recurrent layers that stay float32: exp(A_log) multiplies the logarithm of a decay.
_DECAYS = {"delta_norm", "decay", "step_bias"}


class Rope(NamedTuple):
    """Rotary position embedding of the first `size` dimensions of a head (arXiv 2104.09864).

    `factors` ([size / 2], or None) divide the inverse frequencies. Every published scaling that
    does not depend on the length (linear, Llama 3, YaRN) can be written so. `scale` multiplies
    cosines and sines.
    """

    theta: float
    size: int
    factors: tuple[float, ...] | None = None
    scale: float = 1.0


class Norm(NamedTuple):
    """Normalisation.

    kind: "rms" or "layer" (with bias).
    qk: whether each head's q and k are normed too.
    sandwich: whether the outputs of attention and feed-forward are normed too, before they are
        added to the residual stream (Gemma 3).
    before: whether the inputs of attention and feed-forward are normed.
    qk_wide: with `qk`, all heads of q (and all of k) are normed as one vector (OLMo 2).
    """

    kind: str
    eps: float
    qk: bool = False
    sandwich: bool = False
    before: bool = True
    qk_wide: bool = False


class Experts(NamedTuple):
    """A mixture of experts in place of each layer's feed-forward.

    total: number of experts; `Spec.inner` is the inner size of one.
    chosen: experts of each token, those with the highest router logits.
    normalised: the weights of the chosen experts are divided by their sum.
    clamp: alpha and limit of gpt-oss's gated unit (bass_kernels.Clamp); None for the activation.
    shared: inner size of the expert that every token has besides the chosen ones, with a gate of
        its own; 0 for none.
    """

    total: int
    chosen: int
    normalised: bool
    clamp: tuple[float, float] | None = None
    shared: int = 0

    def __repr__(self) -> str:
        return _described("Experts", self._asdict(), {"shared": 0})


class Recurrent(NamedTuple):
    """Layers with the gated delta rule (arXiv 2412.06464) in place of attention.

    layers: their indexes.
    key_heads, value_heads: heads of queries and keys, and of values. Each key head serves as many
        consecutive value heads.
    key_size, value_size: of a head.
    kernel: inputs of the causal convolution of queries, keys and values.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel: int

    @property
    def keys(self) -> int:
        """Numbers of all keys of a token."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """Numbers of all values of a token."""
        return self.value_heads * self.value_size

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values


@dataclass(frozen=True, slots=True)
class Spec:
    """The shape of a decoder-only transformer and everything in which the known families differ.

    inner: size of the feed-forward.
    windows: for each layer, how many positions a query attends to, its own included; 0 for all.
    rope: None for learned absolute positions.
    local_rope: the rotary embedding of layers with a window, if they have their own.
    parallel: attention and feed-forward read the same norm and are added together (GPT-J).
    biases: the linear maps with a bias, of "qkv", "o", "up", "down", "head",
        "router", "experts_up", "experts_down".
    tied: the head is the embedding.
    unrotated: the layers without rotary embedding.
    residual_scale: factor of what attention and feed-forward add to the residual stream.
    logit_scale: divisor of the logits.
    experts: None for one feed-forward.
    sinks: each head has a score that takes weight in the softmax and adds no value (gpt-oss).
    output_gate: the outputs of attention are multiplied by the sigmoid of a gate, a linear map of
        the layer's input.
    recurrent: the layers without attention; None if all have it.
    """

    family: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocab: int
    context: int
    norm: Norm
    activation: str  # silu | gelu | gelu_tanh | relu
    gated: bool
    rope: Rope | None
    windows: tuple[int, ...]
    query_scale: float
    local_rope: Rope | None = None
    parallel: bool = False
    embed_scale: float = 1.0
    biases: frozenset[str] = frozenset()
    tied: bool = False
    unrotated: tuple[int, ...] = ()
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    experts: Experts | None = None
    sinks: bool = False
    output_gate: bool = False
    recurrent: Recurrent | None = None

    def __repr__(self) -> str:
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        later = {"output_gate": False, "recurrent": None}
        return _described(type(self).__name__, values, later)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with attention, in order: those that have keys and values."""
        others = () if self.recurrent is None else self.recurrent.layers
        return tuple(i for i in range(self.layers) if i not in others)

    @property
    def unusual(self) -> str | None:
        """The first difference that drafters of hidden states, distillation and the fused layers
        do not support, as a noun; None if there is none."""
        return self.unusual_besides()

    def unusual_besides(self, *supported: str) -> str | None:
        """Return the first of these differences that is not among the `supported` ones."""
        differences = {
            "norms after attention and feed-forward only": not self.norm.before,
            "norms over all heads": self.norm.qk_wide,
            "layers without rotary embedding": bool(self.unrotated),
            "scaled cosines": any(r and r.scale != 1.0 for r in (self.rope, self.local_rope)),
            "a scaled residual stream": self.residual_scale != 1.0,
            "scaled logits": self.logit_scale != 1.0,
            "experts": self.experts is not None,
            "attention sinks": self.sinks,
            "recurrent layers": self.recurrent is not None,
            "gated attention": self.output_gate,
        }
        found = (name for name, there in differences.items() if there and name not in supported)
        return next(found, None)


class AttentionCall(NamedTuple):
    """One call of attention in a pass of a model whose layers transformers runs.

    layer: the decoder layer that makes it.
    store: the layer of the key/value store that it reads.
    writes: whether it writes that layer first; else an earlier call wrote it (Gemma 4).
    key_size, value_size: of a head.
    window: as in Spec.windows.
    """

    layer: int
    store: int
    writes: bool
    kv_heads: int
    key_size: int
    value_size: int
    window: int

    @property
    def size(self) -> int:
        """The size of a head in the store. The smaller of the two is padded with zeros."""
        return max(self.key_size, self.value_size)


@dataclass(frozen=True, slots=True, repr=False)
class AnySpec(Spec):
    """The shape of a model whose layers transformers runs (any_model.py).

    weights: names and shapes of its parameters, a tied one once.
    calls: its calls of attention, in the order of a pass.
    tuples: whether its layers return tuples.
    """

    weights: tuple[tuple[str, tuple[int, ...]], ...] = ()
    calls: tuple[AttentionCall, ...] = ()
    tuples: bool = False

    @property
    def stored(self) -> tuple[AttentionCall, ...]:
        """The calls that write, one for each layer of the key/value store."""
        return tuple(call for call in self.calls if call.writes)


def _described(name: str, values: Mapping[str, Any], later: Mapping[str, Any]) -> str:
    """Return fields as text like a dataclass's repr, on which fingerprints of models depend.

    Files of samples and profiles have fingerprints of earlier versions of bass. So a field that was
    added since is left out at its default.

    Args:
        name: of the class.
        values: all fields.
        later: the fields that were added, with their defaults.
    """
    shown = {key: value for key, value in values.items() if later.get(key, ...) != value}
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in shown.items())})"


def count_parameters(spec: Spec) -> int:
    """Return the number of parameters. A tied head counts once."""
    shapes = parameters(spec)
    if spec.tied:
        shapes.pop("head.weight", None)
    return sum(map(math.prod, shapes.values()))


def parameters(spec: Spec) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of all tensors of a decoder, `head.weight` also if it is tied.

    `qkv` stacks q, k, v by rows, after the output gate if there is one. A gated `up` stacks gate,
    then up. `experts_up` and `experts_down` stack the `up` and `down` of all experts by rows.
    `delta_in` stacks q, k, v and the gate of the outputs, `delta_gates` beta, then the decay.
    """
    if isinstance(spec, AnySpec):
        return dict(spec.weights)
    query, key = spec.heads * spec.head_size, spec.kv_heads * spec.head_size
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (spec.vocab, spec.width),
        "head.weight": (spec.vocab, spec.width),
    }
    if spec.rope is None:
        shapes["positions.weight"] = (spec.context, spec.width)
    if "head" in spec.biases:
        shapes["head.bias"] = (spec.vocab,)
    norms = {"norm": spec.width}
    for i in range(spec.layers):
        recurrent = None if i in spec.attention_layers else spec.recurrent
        if recurrent is None:
            gates = query if spec.output_gate else 0
            maps: dict[str, tuple[int, ...]]
            maps = {"qkv": (gates + query + 2 * key, spec.width), "o": (spec.width, query)}
        else:
            maps = _delta_maps(recurrent, spec.width)
            own = {"decay": recurrent.value_heads, "step_bias": recurrent.value_heads}
            own |= {"delta_norm": recurrent.value_size}
            shapes |= {f"layers.{i}.{name}.weight": (size,) for name, size in own.items()}
        maps |= _feed_forward_maps(spec)
        if spec.sinks:
            shapes[f"layers.{i}.sinks.weight"] = (spec.heads,)
        for name, shape in maps.items():
            shapes[f"layers.{i}.{name}.weight"] = shape
            if name in spec.biases:
                shapes[f"layers.{i}.{name}.bias"] = shape[:1]
        if spec.norm.before:
            norms[f"layers.{i}.norm1"] = spec.width
        if spec.norm.before and not spec.parallel:
            norms[f"layers.{i}.norm2"] = spec.width
        if spec.norm.sandwich:
            norms |= {f"layers.{i}.post1": spec.width, f"layers.{i}.post2": spec.width}
        if spec.norm.qk and recurrent is None:
            wide = spec.norm.qk_wide
            shapes |= {
                f"layers.{i}.q_norm.weight": (query if wide else spec.head_size,),
                f"layers.{i}.k_norm.weight": (key if wide else spec.head_size,),
            }
    for name, size in norms.items():
        shapes[f"{name}.weight"] = (size,)
        if spec.norm.kind == "layer":
            shapes[f"{name}.bias"] = (size,)
    return shapes


def _feed_forward_maps(spec: Spec) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the maps of a layer's feed-forward."""
    up = (2 if spec.gated else 1) * spec.inner
    if spec.experts is None:
        return {"up": (up, spec.width), "down": (spec.width, spec.inner)}
    count, shared = spec.experts.total, spec.experts.shared
    found = {
        "router": (count, spec.width),
        "experts_up": (count * up, spec.width),
        "experts_down": (count * spec.width, spec.inner),
    }
    if shared:
        found |= {
            "shared_gate": (1, spec.width),
            "shared_up": (2 * shared, spec.width),
            "shared_down": (spec.width, shared),
        }
    return dict(found)


def _delta_maps(recurrent: Recurrent, width: int) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the maps of a recurrent layer, and of its convolution."""
    return {
        "delta_in": (recurrent.channels + recurrent.values, width),
        "delta_gates": (2 * recurrent.value_heads, width),
        "conv": (recurrent.channels, 1, recurrent.kernel),
        "delta_out": (width, recurrent.values),
    }


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor of `parameters` in a decoder of `dtype`.

    Norms stay float32, in which they are computed: in bfloat16 the factor 1 + w of Gemma's norms
    would have 8 significant bits. So do the decays of recurrent layers.
    """
    import torch

    return torch.float32 if name.split(".")[-2] in _NORMS | _DECAYS else dtype


class Layouts(NamedTuple):
    """In which layouts a decoder stores its matrices: those of `bass_kernels.Quantised`, or FILE;
    None for plain numbers.

    layers: the linear maps of its layers, and of a draft head's features.
    head: its head. A tied head is stored apart from the embedding then.
    bits: of a file, the matrices whose numbers are kept, with their bits. Others are plain
        numbers. Empty: not known.
    """

    layers: str | None = None
    head: str | None = None
    bits: tuple[tuple[str, int], ...] = ()

    def of(self, name: str) -> str | None:
        """Return the layout of a tensor of `parameters`."""
        if name == "head.weight":
            return self.head
        layer = name.removesuffix(".weight").split(".")[-1]
        quantised = name.endswith(".weight") and layer in (*EVERY_MAP, *EXPERT_MAPS, "fc")
        return self.layers if quantised else None


PLAIN = Layouts()


class Format(NamedTuple):
    """The number formats of a model: the dtype of its activations, its cache and its plain weights,
    and the layouts of the others."""

    dtype: torch.dtype
    layouts: Layouts = PLAIN

    @property
    def name(self) -> str:
        """Its layout, or its dtype without the word torch, such as "bfloat16"."""
        return self.layouts.layers or str(self.dtype).removeprefix("torch.")

    def bytes_of(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Return the bytes of tensors of these names and shapes. The few norms count as others."""
        from bass_kernels import Grouped, quantised

        found, bits = 0, dict(self.layouts.bits)
        for name, shape in shapes.items():
            layout = self.layouts.of(name)
            if layout is None or (bits and name not in bits):
                found += math.prod(shape) * self.dtype.itemsize
            elif bits:
                found += Grouped.bytes_of(shape, bits[name])
            else:
                found += quantised.bytes_of(shape, layout)
        return found


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """A drafter that reads the outputs of some layers of a target.

    kind: "dflash", "dspark", "eagle3" or "mtp".
    body: its own layers.
    aux_layers: the target's layers that it reads, from 0.
    block: places of a block, the anchor and masks; 0 if it drafts token by token.
    first: the place that gives the first draft, 0 for the anchor.
    mask: id of the mask token.
    rank: of the bias by the token before; 0 for none.
    norms_residual: whether its residual stream begins at the normed feature (token by token).
    embeds, heads: whether it has its own embedding and head, not the target's.
    ids: the target's ids of its head's tokens, in its order; None for all.
    """

    kind: str
    body: Spec
    aux_layers: tuple[int, ...]
    block: int = 0
    first: int = 0
    mask: int | None = None
    rank: int = 0
    norms_residual: bool = False
    embeds: bool = False
    heads: bool = False
    ids: tuple[int, ...] | None = None

    @property
    def drafts(self) -> int:
        """Maximum number of drafts of a round."""
        return self.block - self.first if self.block else sys.maxsize

    @property
    def inputs(self) -> int:
        """Columns of its qkv projection. An EAGLE-3 reads an embedding beside each feature."""
        return self.body.width * (1 if self.block or self.joins else 2)

    @property
    def joins(self) -> bool:
        """Whether `fc` maps an embedding beside a hidden state to the input of its layer."""
        return self.kind == "mtp"

    @property
    def fc_inputs(self) -> int:
        """Columns of `fc`."""
        return self.body.width * (2 if self.joins else len(self.aux_layers))


def prediction_layer(target: Spec) -> HeadSpec:
    """Return the multi-token-prediction layer of a target: a layer like the target's layers with
    attention, which reads the output of the last layer."""
    window = target.windows[target.attention_layers[0]]
    body = replace(target, layers=1, windows=(window,), recurrent=None, tied=False)
    return HeadSpec("mtp", body, (target.layers - 1,))


def head_parameters(head: HeadSpec) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of all tensors of a drafter: its layers, the map and norm from
    auxiliary hidden states to a feature, and the bias by the token before."""
    width, vocab = head.body.width, head.body.vocab
    known = vocab if head.ids is None else len(head.ids)
    shapes = parameters(head.body) | {"head.weight": (known, width)}
    for name, own in (("embed.weight", head.embeds), ("head.weight", head.heads)):
        if not own:
            del shapes[name]
    for name, shape in shapes.items():
        if name.endswith(".qkv.weight"):
            shapes[name] = shape[0], head.inputs
    shapes["fc.weight"] = width, head.fc_inputs
    shapes["context_norm.weight"] = (width,)
    if head.joins:
        shapes["token_norm.weight"] = (width,)
    if head.rank:
        shapes["markov.before.weight"] = vocab, head.rank
        shapes["markov.after.weight"] = known, head.rank
    return shapes
