"""How a model is split over processes: which sizes can be, the spec of each part, and which rows or
columns of each tensor a part holds.

Not here: reading the parts (formats/weights.py), the exchanges between processes (ranks.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from bass_cli.errors import UserError
from bass_cli.models.spec import AnySpec, Recurrent, Spec

_BY_TOKENS = ("embed", "head")  # split by tokens


class Share(NamedTuple):
    """The part of process `rank` out of `ranks`."""

    rank: int
    ranks: int


def check_divisible(spec: Spec, ranks: int, *, model: str) -> None:
    """Raise a UserError unless this model can be split over so many devices."""
    if spec.norm.qk_wide and ranks > 1:
        raise UserError(
            f"`tensor_parallel` {ranks}: {model} norms all its attention heads as one vector, "
            "which cannot be split; leave out the option"
        )
    if isinstance(spec, AnySpec):
        raise UserError(
            f"`tensor_parallel` {ranks}: {model} runs through transformers' own layers, which are "
            "not split; use 1"
        )
    if spec.sinks and ranks > 1:
        raise UserError(
            f"`tensor_parallel` {ranks}: {model} has attention sinks, which bass does not split; "
            "leave out the option"
        )
    counts = {"attention heads": spec.heads, "feed-forward size": spec.inner}
    if spec.recurrent is not None:  # a multiple of them are its value heads
        counts["key heads of recurrent layers"] = spec.recurrent.key_heads
    if spec.experts is not None:
        counts["size of the shared expert"] = spec.experts.shared
    for what, count in counts.items():
        if count % ranks:
            raise UserError(
                f"`tensor_parallel` {ranks}: {model} has {what} {count}, which {ranks} does not "
                "divide; use another number"
            )
    if spec.kv_heads % ranks and ranks % spec.kv_heads:
        raise UserError(
            f"`tensor_parallel` {ranks}: {model} has key/value heads {spec.kv_heads}, which "
            f"neither divides {ranks} nor is divided by it; use another number"
        )


def part_of(spec: Spec, ranks: int) -> Spec:
    """Return the spec of one process's part. With fewer key/value heads than processes, several
    processes hold the same head. The vocabulary is rounded up, and the last parts are padded. A
    recurrent layer's value heads go with their key head."""
    recurrent, experts = spec.recurrent, spec.experts
    if recurrent is not None:
        recurrent = recurrent._replace(
            key_heads=recurrent.key_heads // ranks, value_heads=recurrent.value_heads // ranks
        )
    return replace(
        spec,
        heads=spec.heads // ranks,
        kv_heads=max(spec.kv_heads // ranks, 1),
        inner=spec.inner // ranks,
        vocab=-(-spec.vocab // ranks),
        recurrent=recurrent,
        experts=None if experts is None else experts._replace(shared=experts.shared // ranks),
    )


class HeldPart(NamedTuple):
    """The part of a tensor that a process holds: these runs of indexes of dimension `dim`, in its
    order.

    Heads, feed-forward and vocabulary are split: maps into them by rows, maps out of them by
    columns, embedding and head by tokens. Norms, learned positions and biases of summed outputs are
    not split.
    """

    dim: int
    runs: tuple[range, ...]

    @property
    def size(self) -> int:
        return sum(map(len, self.runs))


def held_part(spec: Spec, name: str, share: Share) -> HeldPart | None:
    """Return what process `share` holds of a tensor of `parameters(spec)`; None if all of it."""
    part, (rank, ranks) = part_of(spec, share.ranks), share
    layer, kind = name.split(".")[-2:]
    if layer in _BY_TOKENS:
        first = min(rank * part.vocab, spec.vocab)
        return HeldPart(0, (range(first, min(first + part.vocab, spec.vocab)),))
    size, query, key = spec.head_size, spec.heads * spec.head_size, spec.kv_heads * spec.head_size
    queries = _nth(rank, part.heads * size)
    first = rank * spec.kv_heads // ranks * size
    keys = range(first, first + part.kv_heads * size)
    inner = _nth(rank, part.inner)
    if layer == "qkv":
        gates = query if spec.output_gate else 0
        each = (queries, gates), (keys, gates + query), (keys, gates + query + key)
        runs = tuple(shifted(run, by) for run, by in each)
        return HeldPart(0, (queries, *runs) if gates else runs)
    if layer == "up":
        return HeldPart(0, (inner, shifted(inner, spec.inner)) if spec.gated else (inner,))
    if spec.recurrent is not None and part.recurrent is not None and layer in _RECURRENT:
        return _recurrent_part(spec.recurrent, part.recurrent, layer, rank)
    if layer in ("shared_up", "shared_down") and spec.experts is not None:
        assert part.experts is not None
        shared = _nth(rank, part.experts.shared)
        if layer == "shared_down":
            return HeldPart(1, (shared,))
        return HeldPart(0, (shared, shifted(shared, spec.experts.shared)))
    if layer == "experts_up" and spec.experts is not None:
        # gates and ups in turn
        starts = range(0, 2 * spec.experts.total * spec.inner, spec.inner)
        return HeldPart(0, tuple(shifted(inner, start) for start in starts))
    if layer in ("o", "down", "experts_down") and kind == "weight":
        return HeldPart(1, (queries if layer == "o" else inner,))
    return None


# The tensors of a recurrent layer that are split
_RECURRENT = {"delta_in", "delta_gates", "conv", "decay", "step_bias", "delta_out"}


def _recurrent_part(whole: Recurrent, part: Recurrent, layer: str, rank: int) -> HeldPart:
    """Return what process `rank` holds of a tensor of a recurrent layer: some key heads, and their
    value heads."""
    heads, keys, values = (_nth(rank, size) for size in (part.value_heads, part.keys, part.values))
    if layer == "delta_out":
        return HeldPart(1, (values,))
    if layer in ("decay", "step_bias"):
        return HeldPart(0, (heads,))
    if layer == "delta_gates":
        return HeldPart(0, (heads, shifted(heads, whole.value_heads)))
    channels = keys, shifted(keys, whole.keys), shifted(values, 2 * whole.keys)
    if layer == "conv":
        return HeldPart(0, channels)
    return HeldPart(0, (*channels, shifted(values, whole.channels)))


def _nth(number: int, size: int) -> range:
    """Return the indexes of a part of this size, the first part being number 0."""
    return range(number * size, (number + 1) * size)


def shifted(run: range, by: int) -> range:
    """Return a run of indexes moved by `by`."""
    return range(run.start + by, run.stop + by)
