"""The decoder for all families. A Spec (spec.py) describes how their blocks differ. Its layers run
op by op, or in five launches each for few tokens on a GPU and families that allow it.

Rotary embedding is always of the half-split kind; interleaved checkpoints are reordered at load.
Not here: the names of a checkpoint's tensors (families.py), loading (weights.py), the key/value
store (kv_cache.py).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

import bass_kernels as ops
from bass_cli.models.fused_decode import (
    run_fused,
    run_host,
    supports_fused,
    supports_host,
    supports_peers,
)
from bass_cli.models.hidden import AuxHiddenLayers, ReadsHidden
from bass_cli.models.kv_cache import Layers, Pass
from bass_cli.models.ranks import Ranks
from bass_cli.models.recurrent import StatePass
from bass_cli.models.spec import EVERY_MAP, Experts, Format, Layouts, Recurrent, Rope, Spec
from bass_cli.models.weights import Named, Weights
from bass_kernels import Weight

# A device's logits have a multiple of this many columns. With an odd number, cuBLAS takes a product
# that reads single elements: an H100 took 1.00 ms for 8 tokens of a 7B with 151,665 ids, and needs
# 0.33 ms to read that matrix. Triton reads blocks of rows whose size is a multiple of 16.
_COLUMNS = {"cuda": 16}
_MATRICES = tuple(f".{name}.weight" for name in EVERY_MAP)


class Decoder:
    """A decoder-only transformer over fused weights. It has no state of any sequence.

    Args:
        weights: tensors of their `stored_dtype`, or quantised, on one device, by the names of
            `parameters(spec)`. The decoder takes them out of the dict (see Weights).
        vocab: number of ids that the head keeps, the first ones. It is the tokenizer's size: the
            padding rows of a checkpoint must never be sampled. Default: all.
        shared: provides embedding and head if `weights` has none.
        ranks: the group of a split model. Then spec and weights are one process's part
            (ranks.part_of), `vocab` is the whole model's, and all processes make every pass
            together.

    Attributes:
        columns: number of logits of a token: `vocab`, and on a GPU up to 15 more ids of the matrix,
            which are -inf.
        weights: its tensors, which may be written between passes.
        layers: the layers that are run.
        reader: see `read_by`.
        compiles_ahead: whether a pass may run with its kernels only compiled, on tokens that no
            kernel has written: only kernels read tables by them.
    """

    compiles_ahead = True

    def __init__(
        self,
        spec: Spec,
        weights: Named,
        *,
        vocab: int | None = None,
        shared: Decoder | None = None,
        ranks: Ranks | None = None,
    ):
        self.spec, self.ranks = spec, ranks
        self.layers = tuple(range(spec.layers))
        every = spec.vocab * (1 if ranks is None else ranks.share.ranks)
        self.vocab = min(vocab or every, every)
        self.reader: ReadsHidden | None = None
        self.weights = self._weights = Weights(weights, tied=spec.tied)
        if "embed.weight" not in self._weights:
            assert shared is not None
            self._weights["embed.weight"] = shared._weights["embed.weight"]
        embed = self._weights.plain("embed.weight")
        self.device, self.dtype = embed.device, embed.dtype
        self._head: tuple[Weight, Tensor | None]
        if "head.weight" in self._weights:
            bias = self._weights.plain_or_none("head.bias")
            each = _COLUMNS.get(self.device.type, 1)
            self.columns = -(-self.vocab // each) * each
            if ranks is not None or self.columns > spec.vocab:
                self.columns = self.vocab
            most = self.columns if ranks is None else spec.vocab  # all parts have the same size
            self._head = (
                self._weights.pack("head.weight", most),
                None if bias is None else bias[:most],
            )
        else:
            assert shared is not None
            self._head, self.columns = shared._head, shared.columns
        for name in self._weights:
            if name.endswith(_MATRICES):
                self._weights.pack(name)
        self._inputs = self._join_inputs() if self.device.type == "cuda" else {}
        self._layouts = frozenset(
            None if isinstance(one, Tensor) else one.layout
            for name, one in self._weights.items()
            if name.endswith(_MATRICES)
        )
        self._frequencies = tuple(
            inverse_frequencies(rope, self.device) for rope in (spec.rope, spec.local_rope)
        )

    def _join_inputs(self) -> dict[int, Tensor]:
        """Join the two maps of the input of each recurrent layer, which are then one product.

        With 8 or 64 tokens on an H100 the second map, of 96 rows, takes 9 us of a layer's 320 if it
        is alone.
        """
        layers = () if self.spec.recurrent is None else self.spec.recurrent.layers
        names = ("delta_in.weight", "delta_gates.weight")
        joined = {i: self._weights.join(*(f"layers.{i}.{name}" for name in names)) for i in layers}
        if layers:
            torch.cuda.empty_cache()  # the memory of the separate matrices fits no joined one
        return {i: one for i, one in joined.items() if one is not None}

    @property
    def head(self) -> Weight:
        """The matrix of the logits, [columns, width]."""
        return self._head[0]

    @property
    def format(self) -> Format:
        """The number formats of its weights."""
        name = "qkv" if self.layers[0] in self.spec.attention_layers else "delta_in"
        matrix = self._weights[f"layers.{self.layers[0]}.{name}.weight"]
        layers, head = (
            None if isinstance(one, Tensor) else one.layout for one in (matrix, self.head)
        )
        return Format(self.dtype, Layouts(layers, head))

    @property
    def context(self) -> int:
        """Maximum number of positions of a sequence."""
        return self.spec.context

    @property
    def recurrent(self) -> Recurrent | None:
        """The recurrent layers that are run; None if there is none."""
        recurrent = self.spec.recurrent
        if recurrent is None:
            return None
        kept = tuple(i for i in recurrent.layers if i in self.layers)
        return recurrent._replace(layers=kept) if kept else None

    @property
    def cached(self) -> tuple[Layers, ...]:
        """The layers of its key/value store, its reader's last."""
        stored = sum(i in self.spec.attention_layers for i in self.layers)
        own = Layers(stored, self.spec.kv_heads, self.spec.head_size)
        return (own,) if self.reader is None else (own, *self.reader.cached)

    def keep_layers(self, layers: Sequence[int]) -> Decoder:
        """Return a decoder with the same weights that runs these layers only (self-speculation)."""
        other = copy.copy(self)
        other.layers = tuple(layers)
        return other

    def read_by(self, reader: ReadsHidden) -> Decoder:
        """Return a decoder with the same weights whose passes give `reader` the outputs of its
        `aux_layers`."""
        other = copy.copy(self)
        other.reader = reader
        return other

    def forward(self, tokens: Tensor, step: Pass, *, last: int | None = None) -> Tensor | None:
        """Run tokens [B, W] int64 at `step.positions` [B, W], and write their keys and values to
        the store of `step`.

        Args:
            last: positions of each row to return logits of, from its end. Default: all. 0 for a
                prefill.

        Returns:
            Logits [B, min(last, W), columns] in the weights' dtype; None if `last` is 0.
        """
        hidden = self.final_hidden(tokens, step, last=last)
        return None if hidden is None else self.logits(hidden)

    def final_hidden(self, tokens: Tensor, step: Pass, *, last: int | None = None) -> Tensor | None:
        """Do `forward`, but return the final norm's output [B, min(last, W), width] instead of
        logits."""
        aux_layers, reader = None, self.reader
        if reader is not None:
            aux_layers = AuxHiddenLayers(
                reader.aux_layers, tokens, self._weights.plain("embed.weight")
            )
        hidden = self._final_hidden(tokens, step, last, aux_layers)
        if reader is not None and aux_layers is not None:
            reader.read(tokens, aux_layers.hidden, step)
        return hidden

    def final_norm(self, residual: Tensor) -> Tensor:
        """Apply the final norm to the residual stream [..., width]."""
        return self._norm("norm", residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., columns] from the final norm's output [..., width]."""
        found = ops.logits(hidden, *self._head)
        if self.ranks is None and self.columns > self.vocab:
            found[..., self.vocab :] = -torch.inf
        if self.spec.logit_scale != 1.0:
            found = found / self.spec.logit_scale
        return found if self.ranks is None else self.ranks.join_logits(found, self.vocab)

    def _final_hidden(
        self, tokens: Tensor, step: Pass, last: int | None, aux_layers: AuxHiddenLayers | None
    ) -> Tensor | None:
        """Return the final norm's output [B, min(last, W), width], or None for last = 0.

        The layers run in one of three ways: in a few fused launches on a GPU, by the host's own
        kernels on a CPU, or op by op. Arguments as in `final_hidden`.
        """
        width = tokens.shape[1]
        hidden = self._run_fused(tokens, step, aux_layers)
        if hidden is not None:
            return None if last == 0 else hidden[:, -(last or width) :].contiguous()
        ropes = (self.spec.rope, self.spec.local_rope)
        angles = tuple(
            angles_of(step.positions, frequencies, 1.0 if rope is None else rope.scale)
            for frequencies, rope in zip(self._frequencies, ropes, strict=True)
        )
        hidden = self._run_host(tokens, step, aux_layers, angles[0])
        if hidden is not None:
            return None if last == 0 else hidden[:, -(last or width) :]
        residual = self._run_layers(tokens, step, aux_layers, angles)
        if last == 0:
            return None
        return self.final_norm(residual if last is None else residual[:, -last:])

    def _run_fused(
        self, tokens: Tensor, step: Pass, aux_layers: AuxHiddenLayers | None
    ) -> Tensor | None:
        """Run all layers in a few launches each; None if this pass or family does not allow it."""
        embed, frequencies = self._weights.plain("embed.weight"), self._frequencies[0]
        if (
            frequencies is None
            or not supports_fused(self.spec, tokens, embed, step, self._layouts)
            or not self._sums_fused(embed)
        ):
            return None
        parts = None
        if self.ranks is not None:
            assert self.ranks.peers is not None
            parts = (self.ranks.peers, self.ranks.embed(tokens, embed, scale=self.spec.embed_scale))
        return run_fused(
            self.spec, self._weights, self.layers, frequencies, tokens, step, aux_layers, parts
        )

    def _run_host(
        self,
        tokens: Tensor,
        step: Pass,
        aux_layers: AuxHiddenLayers | None,
        angles: tuple[Tensor, Tensor] | None,
    ) -> Tensor | None:
        """Run all layers by the CPU's own kernels; None if they do not support this pass."""
        embed = self._weights.plain("embed.weight")
        if self.ranks is not None or angles is None:
            return None
        if not supports_host(self.spec, embed, step, self._layouts):
            return None
        return run_host(self.spec, self._weights, self.layers, angles, tokens, step, aux_layers)

    def _run_layers(
        self, tokens: Tensor, step: Pass, aux_layers: AuxHiddenLayers | None, angles: tuple
    ) -> Tensor:
        """Run all layers op by op; return the residual stream [B, W, width]."""
        embed = self._weights.plain("embed.weight")
        embedded = ops.embed if self.ranks is None else self.ranks.embed
        residual: Tensor = embedded(tokens, embed, scale=self.spec.embed_scale)
        if self.spec.rope is None:
            positions = step.positions.clamp(0, self.spec.context - 1)
            residual = residual + functional.embedding(
                positions, self._weights.plain("positions.weight")
            )
        slots, attending, recurrent = step.slots(), itertools.count(), itertools.count()
        states = None if self.recurrent is None else step.begin_states()
        attention = self.spec.attention_layers
        for i in self.layers:
            if states is None or i in attention:
                residual = self.block(i, next(attending), residual, step, slots, angles)
            else:
                residual = self._delta_block(i, next(recurrent), residual, states)
            if aux_layers is not None:
                aux_layers.take(i, residual)
        return residual

    def _sums_fused(self, embed: Tensor) -> bool:
        """Return whether the fused launches can add the parts of a split model."""
        if self.ranks is None:
            return True
        if self.spec.experts is not None:
            return False
        names = (f"layers.{self.layers[0]}.{name}.weight" for name in ("o", "down"))
        return self.ranks.peers is not None and supports_peers(
            [self._weights.writable(name) for name in names], embed, self.ranks.peers
        )

    def block(
        self, i: int, slot: int, residual: Tensor, step: Pass, slots: Tensor, angles: tuple
    ) -> Tensor:
        """Return the residual stream [B, W, width] after layer i.

        Args:
            slot: the layer's index in the key/value store.
            slots: [B, W], where the tokens' keys and values go.
        """
        spec, at = self.spec, f"layers.{i}."
        local = bool(spec.windows[i] and spec.local_rope)
        q, gate = ops.project(
            residual,
            self._affine(at + "norm1") if spec.norm.before else None,
            self._map(at + "qkv"),
            None if i in spec.unrotated else angles[local],
            slots,
            step.own(slot),
            heads=spec.heads,
            eps=spec.norm.eps,
            kind=spec.norm.kind,
            norms=self._weights.qk_norms(at) if spec.norm.qk else None,
            gated=spec.output_gate,
        )
        return self.rest_of_layer(i, slot, q, residual, step, gate)

    def _delta_block(self, i: int, number: int, residual: Tensor, states: StatePass) -> Tensor:
        """Return the residual stream [B, W, width] after layer i, which is recurrent.

        Args:
            number: of the layer among the recurrent ones.
        """
        at, plain, eps = f"layers.{i}.", self._weights.plain, self.spec.norm.eps
        x = self._norm(at + "norm1", residual)
        if i in self._inputs:
            rows = len(self._inputs[i]), len(plain(at + "delta_gates.weight"))
            whole = ops.linear(x, self._inputs[i], None)
            inner, gates = whole.split((rows[0] - rows[1], rows[1]), -1)
        else:
            inner = ops.linear(x, *self._map(at + "delta_in"))
            gates = ops.linear(x, *self._affine(at + "delta_gates"))
        mixed = states.run(
            number,
            inner,
            gates,
            ops.DeltaWeights(
                plain(at + "conv.weight").flatten(1),
                *(plain(f"{at}{name}.weight") for name in ("decay", "step_bias", "delta_norm")),
            ),
            eps=eps,
        )
        return self._feed_forward(at, at + "delta_out", mixed, residual)

    def rest_of_layer(
        self, i: int, slot: int, q: Tensor, residual: Tensor, step: Pass, gate: Tensor | None = None
    ) -> Tensor:
        """Run layer i from attention on. Its keys are written already. The residual stream may be
        changed in place.

        Args:
            q: queries [B, W, H, D].
            gate: [B, W, H D], of the outputs of attention; None for no gate.
        """
        spec, at, segments = self.spec, f"layers.{i}.", step.segments
        following = self._weights[at + "o.weight"]
        mixed = ops.attention(
            # a prefill's one row in tiles
            self._queries(q).view(*segments.positions.shape, *q.shape[2:]),
            step.own(slot),
            step.prompt(slot),
            segments,
            scale=spec.query_scale,
            window=spec.windows[i],
            sinks=self._weights.plain(at + "sinks.weight") if spec.sinks else None,
            next_weight=following if isinstance(following, Tensor) else None,
        )
        mixed = mixed.view(*q.shape[:2], -1).to(q.dtype)
        if gate is not None:
            mixed = ops.gate_outputs(mixed, gate)
        return self._feed_forward(at, at + "o", mixed, residual)

    def _feed_forward(self, at: str, name: str, mixed: Tensor, residual: Tensor) -> Tensor:
        """Add the output of attention, or of a recurrent layer, and the feed-forward to the
        residual stream, which may be changed in place.

        Args:
            at: the begin of the layer's names.
            name: the map of `mixed` [B, W, ...] to the residual stream.
        """
        spec = self.spec
        if spec.norm.sandwich:
            residual = residual + self._norm(at + "post1", self._mapped(name, mixed))
            mapped = self._mapped(at + "down", self._up(at, residual))
            return residual + self._norm(at + "post2", mapped)
        if spec.experts is not None:
            return self._mixed(at, spec.experts, self._added(name, mixed, residual))
        inner = self._up(at, residual) if spec.parallel else None
        residual = self._added(name, mixed, residual)
        if inner is not None or self.ranks is not None or spec.residual_scale != 1.0:
            inner = self._up(at, residual) if inner is None else inner
            return self._added(at + "down", inner, residual)
        return ops.feed_forward(
            residual,
            self._affine(at + "norm2") if spec.norm.before else None,
            self._map(at + "up"),
            self._map(at + "down"),
            eps=spec.norm.eps,
            kind=spec.norm.kind,
            activation=spec.activation,
            gated=spec.gated,
        )

    def _queries(self, q: Tensor) -> Tensor:
        """Return queries in the dtype that attention computes in.

        On a CPU it is float64 if the next product rounds its input to e4m3. Sums in float32 differ
        in their last bits by the width of a pass, which would move some numbers across a border
        between two values (docs/decisions/10-eight-bit-weights.md).
        """
        plain_cpu = q.device.type == "cpu" and ops.kind_for(q) == "reference"
        return q.double() if plain_cpu and "fp8" in self._layouts else q

    def _added(self, name: str, x: Tensor, residual: Tensor) -> Tensor:
        """Add the map `o` or `down` of x to the residual stream, which may be changed in place."""
        if self.spec.residual_scale != 1.0:
            return residual + self._mapped(name, x) * self.spec.residual_scale
        if self.ranks is None:
            return ops.linear_add(x, *self._map(name), residual)
        weight, bias = self._map(name)
        if bias is not None:
            return residual + self._mapped(name, x)
        return self.ranks.add(ops.linear(x, weight, None), residual)

    def _mapped(self, name: str, x: Tensor) -> Tensor:
        """Return the map `o` or `down` of x. In a split model each process has some of its
        columns, and the bias is added once, after the sum."""
        weight, bias = self._map(name)
        if self.ranks is None:
            return ops.linear(x, weight, bias)
        found = self.ranks.sum(ops.linear(x, weight, None))
        return found if bias is None else found.add_(bias)

    def _mixed(self, at: str, experts: Experts, residual: Tensor) -> Tensor:
        """Add the experts' feed-forward to the residual stream [B, W, width]. In a split model
        each process has some of the inner dimensions of every expert."""
        spec = self.spec
        x = self._norm(at + "norm2", residual).flatten(0, 1)
        ids, weights = ops.route(
            x, *self._affine(at + "router"), chosen=experts.chosen, normalised=experts.normalised
        )
        down, bias = self._map(at + "experts_down")
        if self.ranks is not None and self.ranks.share.rank:
            bias = None  # the first process adds it
        found = ops.mix_experts(
            x,
            ids,
            weights,
            ops.Maps(*self._map(at + "experts_up"), down, bias),
            residual.flatten(0, 1) if self.ranks is None else None,
            self._shared_expert(at, x) if experts.shared else None,
            experts=experts.total,
            activation=spec.activation,
            clamp=None if experts.clamp is None else ops.Clamp(*experts.clamp),
        )
        if self.ranks is None:
            return found.view(residual.shape)
        return self.ranks.add(found, residual.flatten(0, 1)).view(residual.shape)

    def _shared_expert(self, at: str, x: Tensor) -> ops.Shared:
        """Return the output of the expert of all tokens x [T, width], and its gate."""
        inner = ops.norm_up(
            x,
            None,
            self._map(at + "shared_up"),
            eps=0.0,
            kind="rms",
            activation=self.spec.activation,
            gated=True,
        )
        found = ops.linear(inner, *self._map(at + "shared_down"))
        return ops.Shared(found, self._weights.plain(at + "shared_gate.weight"))

    def _up(self, at: str, residual: Tensor) -> Tensor:
        """Return the feed-forward's inner values [B, W, inner]."""
        spec = self.spec
        name = at + ("norm1" if spec.parallel else "norm2")
        norm = self._affine(name) if spec.norm.before else None
        return ops.norm_up(
            residual,
            norm,
            self._map(at + "up"),
            eps=spec.norm.eps,
            kind=spec.norm.kind,
            activation=spec.activation,
            gated=spec.gated,
        )

    def _affine(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Return the weight and bias of a norm, or of another map that is not quantised."""
        return self._weights.plain(name + ".weight"), self._weights.plain_or_none(name + ".bias")

    def _map(self, name: str) -> tuple[Weight, Tensor | None]:
        """Return the weight and bias of a linear map."""
        return self._weights[name + ".weight"], self._weights.plain_or_none(name + ".bias")

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return ops.norm(
            None, x, *self._affine(name), eps=self.spec.norm.eps, kind=self.spec.norm.kind
        )[0]


def inverse_frequencies(rope: Rope | None, device: torch.device) -> Tensor | None:
    """Return the scaled inverse frequencies, [size / 2] float32. None without rotary embedding."""
    if rope is None:
        return None
    exponents = torch.arange(0, rope.size, 2, dtype=torch.int64).float() / rope.size
    inverse = 1.0 / (rope.theta**exponents)
    if rope.factors is not None:
        inverse = inverse / torch.tensor(rope.factors)
    return inverse.to(device)


def angles_of(
    positions: Tensor, inverse: Tensor | None, scale: float = 1.0
) -> tuple[Tensor, Tensor] | None:
    """Return cos and sin times `scale`, each [B, W, size / 2] float32. None without rotary
    embedding."""
    if inverse is None:
        return None
    found: tuple[Tensor, Tensor] = ops.angles(positions, inverse)
    return found if scale == 1.0 else (found[0] * scale, found[1] * scale)
