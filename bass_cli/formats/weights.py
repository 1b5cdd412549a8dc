"""Load a checkpoint's tensors into the decoder's fused tensors on the device, a few megabytes at a
time, and write new ones in place (update, write).

The host holds at most one part of a tensor for each thread (besides the model on a CPU). A process
of a split model reads the rows and columns of its own part (tensor parallelism of Megatron-LM,
arXiv 1909.08053). Not here: reading a part (tensor_content.py), pairing stored tensors with the
decoder's (checkpoint.py). Matrices may be quantised while they are loaded (models/spec.py,
Layouts).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor

from bass_cli.errors import UserError
from bass_cli.formats.arrangement import columns_of, order_of
from bass_cli.formats.checkpoint import Checkpoint, Piece
from bass_cli.formats.compound import (
    Adapted,
    Compound,
    Stored,
    bytes_of,
    content,
    parts,
    stored_rows,
)
from bass_cli.formats.grouped_weights import file_layouts, grouped_pieces, read_grouped
from bass_cli.formats.tensor_content import DTYPES, Bytes, Stage, read_into, stage_for
from bass_cli.formats.tensor_files import Entry
from bass_cli.models.families import Slot
from bass_cli.models.partition import HeldPart, Share, held_part, part_of, shifted
from bass_cli.models.spec import FILE, PLAIN, Layouts, Spec, parameters, stored_dtype
from bass_cli.models.weights import Weights
from bass_cli.system.host import digest_triton
from bass_kernels import LAYOUTS, Grouped, Quantised, Weight, Writable, import_kernels

_WORKERS = 4  # reading threads: they copy from the page cache as fast as a GPU can receive
_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


def layouts_of(wanted: str, checkpoint: Checkpoint | None) -> Layouts:
    """Return the layouts of a model's weights for a setting of `dtype`: one for layers and head. A
    checkpoint whose layers are stored in the wanted layout keeps its head as it is too.

    Args:
        checkpoint: None for random weights, which are in no file.
    """
    if wanted == FILE:
        return PLAIN if checkpoint is None else file_layouts(checkpoint)
    if wanted not in LAYOUTS:
        return PLAIN
    kept = checkpoint is not None and checkpoint.by_row == wanted
    return Layouts(wanted, None if kept else wanted)


def load(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    layouts: Layouts = PLAIN,
    share: Share | None = None,
    names: Collection[str] | None = None,
    on_read: Callable[[int], None] = lambda size: None,
) -> dict[str, Weight]:
    """Load a checkpoint's tensors to the device in their `stored_dtype`, or quantised. A tied head
    that is not quantised is the embedding itself.

    Args:
        layouts: which matrices are quantised. Default: none. With FILE, those that a GGUF file
            stores in groups are `Grouped`, and the others are plain.
        share: load this process's part of a split model. Default: the whole model.
        names: load these tensors only. Default: all.
        on_read: called with the number of stored bytes after each tensor.

    Raises:
        UserError: a matrix to be quantised has numbers that are not finite.
    """
    spec = checkpoint.spec
    shapes = checkpoint.shapes if share is None else parameters(part_of(spec, share.ranks))
    wanted = [name for name in shapes if names is None or name in names]
    grouped = _load_grouped(checkpoint, layouts, wanted, on_read)
    weights = {
        name: _empty(name, shapes[name], dtype, layouts, device)
        for name in wanted
        if not (spec.tied and name == "head.weight") and name not in grouped
    }
    pieces = [piece for piece in checkpoint.pieces if piece.slot.name in weights]
    missing = {name: _rows_to_fill(spec, name, weight, share) for name, weight in weights.items()}

    def fill(piece: Piece, stage: Stage) -> tuple[int, int]:
        return _fill(weights[piece.slot.name], piece, spec, stage, share)

    with _in_threads(device, fill, pieces) as filled:
        digest_triton(device)  # while the threads read
        import_kernels(device)
        for piece, (rows, size) in zip(pieces, filled, strict=True):
            missing[piece.slot.name] -= rows
            on_read(size)
    assert not any(missing.values()), missing
    if spec.tied and "head.weight" not in grouped:
        embed = weights["embed.weight"]
        assert isinstance(embed, Tensor)
        layout = layouts.head
        if layout is None or layout == FILE:
            weights["head.weight"] = embed
        else:
            weights["head.weight"] = Quantised.of(embed, layout)
    for name, weight in weights.items():
        _check_finite(name, weight, checkpoint)
    return weights | grouped


def load_plain(
    checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Load all tensors of a checkpoint without quantisation; see `load`."""
    loaded = load(checkpoint, dtype=dtype, device=device)
    return {name: weight for name, weight in loaded.items() if isinstance(weight, Tensor)}


def state_of(
    checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Load a checkpoint's tensors by their stored names, for layers of transformers. Quantised and
    adapted matrices get this dtype; the others keep theirs."""

    def read(piece: Piece, stage: Stage) -> Tensor:
        with stage.stream():
            return _whole(piece.entry, stage, dtype)

    with _in_threads(device, read, checkpoint.pieces) as found:
        names = [piece.slot.name for piece in checkpoint.pieces]
        return dict(zip(names, found, strict=True))


def _whole(stored: Stored, stage: Stage, dtype: torch.dtype) -> Tensor:
    """Return a stored tensor in the order of transformers' parameters."""
    if isinstance(stored, Entry):
        return content(stored, stage)
    base = stored.base if isinstance(stored, Adapted) else stored
    layout = base.layout if isinstance(base, Compound) else None
    found = torch.empty(stored.shape, dtype=dtype, device=stage.device)
    for first, part in parts(stored, stage):
        found[first : first + len(part)] = part
    if layout is not None and layout.stacked:
        found = found.view(layout.stacked, -1, found.shape[-1])
        return found.transpose(1, 2).contiguous()
    return found.T.contiguous() if layout is not None and layout.transposed else found


def _load_grouped(
    checkpoint: Checkpoint, layouts: Layouts, names: Collection[str], on_read: Callable[[int], None]
) -> dict[str, Weight]:
    """Load the matrices among `names` that keep the numbers of a file."""
    found = {
        name: pieces
        for name, pieces in grouped_pieces(checkpoint, layouts).items()
        if name in names
    }

    def read(pieces: Sequence[Piece], stage: Stage) -> Grouped:
        return read_grouped(pieces, checkpoint.spec, stage)

    weights: dict[str, Weight] = {}
    with _in_threads(torch.device("cpu"), read, list(found.values())) as matrices:
        for (name, pieces), matrix in zip(found.items(), matrices, strict=True):
            weights[name] = matrix
            if pieces[0].slot.name == name:  # a tied head is read again with the embedding
                on_read(sum(piece.entry.size for piece in pieces))
    return weights


def _empty(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, layouts: Layouts, device: torch.device
) -> Writable:
    layout = layouts.of(name)
    if layout is not None and layout != FILE:
        return Quantised.empty(shape, layout, device)
    return torch.empty(shape, dtype=stored_dtype(name, dtype), device=device)


def update(
    weights: Weights, checkpoint: Checkpoint, *, device: torch.device, share: Share | None = None
) -> None:
    """Write a checkpoint's tensors into a model of the same spec on the device, in place.

    Args:
        share: see `load`.
    """
    groups: dict[str, list[Piece]] = {}
    for piece in checkpoint.pieces:
        groups.setdefault(piece.slot.name, []).append(piece)

    def fill(group: list[Piece], stage: Stage) -> None:
        name = group[0].slot.name
        with weights.writing(name) as whole:
            for piece in group:
                _fill(whole, piece, checkpoint.spec, stage, share)
            _check_finite(name, whole, checkpoint)
        if checkpoint.spec.tied and name == "embed.weight":
            _check_finite("head.weight", weights["head.weight"], checkpoint)

    with _in_threads(device, fill, list(groups.values())) as filled:
        for _ in filled:
            pass


def write(
    weights: Weights,
    slot: Slot,
    shape: tuple[int, ...],
    parts: Iterable[tuple[int, Tensor]],
    *,
    spec: Spec,
    share: Share | None = None,
) -> None:
    """Write one stored tensor of this shape into its rows of a model's tensor, in place.

    Args:
        parts: all of its rows in order, some at a time: the number of rows before these, and the
            rows, of any float dtype on any device.
        spec: of the whole model.
        share: see `load`.
    """
    with weights.writing(slot.name) as whole:
        quantised = isinstance(whole, Quantised)
        cuts = list(_cuts(spec, slot, shape, share, whole_rows=quantised))
        orders = [None if cut.order is None else cut.order.to(whole.device) for cut in cuts]
        for begin, part in _whole_rows(parts, slot) if quantised else parts:
            for cut, order in zip(cuts, orders, strict=True):
                first = max(cut.rows.start, begin)
                rows = part[first - begin : max(cut.rows.stop - begin, 0)]
                if cut.columns is not None:
                    rows = rows[:, cut.columns.start : cut.columns.stop]
                if len(rows):
                    _place(whole, cut, rows, first - cut.rows.start, slot, order)


@contextlib.contextmanager
def _in_threads(
    device: torch.device, function: Callable[[_Item, Stage], _Found], items: Sequence[_Item]
) -> Iterator[Iterator[_Found]]:
    """Yield the results of calls with each item and a thread's stage. On exit, the device has
    finished, also after an error."""
    own = threading.local()

    def begin() -> None:
        own.stage = stage_for(device)

    pool = ThreadPoolExecutor(min(_WORKERS, os.cpu_count() or 1), initializer=begin)
    try:
        yield pool.map(lambda item: function(item, own.stage), items)
    finally:
        pool.shutdown(cancel_futures=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # memory of the threads' streams is of no use to others


def _whole_rows(parts: Iterable[tuple[int, Tensor]], slot: Slot) -> Iterable[tuple[int, Tensor]]:
    """Return parts of which each has whole rows of the target: rows of a transposed tensor are
    put together first, because the scale of a target's row depends on all of them."""
    if slot.how not in ("transpose", "pairs") and not slot.turned:
        return parts
    return [(0, torch.cat([part.clone() for _, part in parts]))]


def size_of(checkpoint: Checkpoint, share: Share | None = None, layouts: Layouts = PLAIN) -> int:
    """Return the bytes of the stored tensors that `load` reads."""
    if share is None:
        return checkpoint.size
    return sum(
        bytes_of(piece.entry, cut.rows, cut.columns)
        for piece in checkpoint.pieces
        for cut in _cuts(
            checkpoint.spec,
            piece.slot,
            piece.entry.shape,
            share,
            whole_rows=layouts.of(piece.slot.name) is not None,
        )
    )


def _rows_to_fill(spec: Spec, name: str, weight: Writable, share: Share | None) -> int:
    """Return how many rows of a process's tensor the checkpoint fills. The last part of a
    vocabulary may have more rows; they are set to 0."""
    found = None if share is None else held_part(spec, name, share)
    if found is None or found.dim == 1:
        return len(weight)
    missing = len(weight) - found.size
    if missing and isinstance(weight, Quantised):
        weight.write_rows(found.size, weight.scales.new_zeros(missing, weight.shape[1]))
    elif missing and isinstance(weight, Tensor):
        weight[found.size :] = 0
    return found.size


def _fill(
    whole: Writable, piece: Piece, spec: Spec, stage: Stage, share: Share | None
) -> tuple[int, int]:
    """Write a stored tensor, or this process's share of it, into its rows of the decoder's tensor.
    Return the numbers of rows written and bytes read."""
    entry, slot = piece
    quantised = isinstance(whole, Quantised)
    rows = size = 0
    with stage.stream():
        for cut in _cuts(spec, slot, entry.shape, share, whole_rows=quantised):
            read = bytes_of(entry, cut.rows, cut.columns)
            if not slot.how and cut.columns is None and _is_stored_so(whole, entry):
                _read_into(whole[cut.first : cut.first + cut.taken], entry, cut, read)
            elif isinstance(whole, Quantised) and _is_kept(entry, whole):
                _write_kept(whole, entry, cut, stage)
            else:
                order = None if cut.order is None else cut.order.to(whole.device)
                found = parts(entry, stage, cut.rows, cut.columns)
                for first, part in _whole_rows(found, slot) if quantised else found:
                    _place(whole, cut, part, first, slot, order)
            rows += cut.taken if cut.order is None or slot.turned else len(cut.rows)
            size += read
    return rows, size


def _is_stored_so(weight: Writable, entry: Stored) -> TypeGuard[Tensor]:
    """Return whether a tensor on a CPU has the numbers of a file as they are stored."""
    if isinstance(weight, Quantised) or weight.device.type != "cpu":
        return False
    return isinstance(entry, Entry) and DTYPES.get(entry.dtype) is weight.dtype


def _read_into(target: Tensor, entry: Stored, cut: Cut, size: int) -> None:
    """Read the rows of a cut as they are stored, `size` bytes."""
    assert isinstance(entry, Entry)
    with entry.file.open("rb", buffering=0) as file:
        read_into(
            file, entry, Bytes(cut.rows.start * (size // max(len(cut.rows), 1)), size), target
        )


def _is_kept(entry: Stored, whole: Quantised) -> TypeGuard[Compound]:
    """Return whether a file has a matrix in the layout of its target."""
    return isinstance(entry, Compound) and entry.by_row == whole.layout


def _write_kept(whole: Quantised, stored: Compound, cut: Cut, stage: Stage) -> None:
    """Write stored values and scales of a cut as they are."""
    target = whole.rows(cut.first, cut.first + cut.taken)
    for first, values, scales in stored_rows(stored, stage, cut.rows):
        places = first if cut.order is None else cut.order[first : first + len(values)]
        target.write_values(places, values, scales, cut.kept)


def _check_finite(name: str, weight: Weight, checkpoint: Checkpoint) -> None:
    if isinstance(weight, Quantised) and not weight.scales.isfinite().all():
        raise UserError(
            f"{checkpoint.path}: {name} has numbers that are not finite, which {weight.layout} "
            "cannot store; use a 16-bit `dtype` or another checkpoint"
        )


def _place(
    whole: Writable, cut: Cut, part: Tensor, first: int, slot: Slot, order: Tensor | None
) -> None:
    """Transform stored rows of a cut, from its row `first` on, and write them into a decoder's
    tensor. `order`: the row of each in the cut's rows of that tensor."""
    last, how = first + len(part), "transpose" if slot.turned else slot.how
    if order is not None and not slot.turned:
        order = order[first:last]
    if cut.source is not None:
        part = part[:, cut.source.to(part.device)]
    if how.endswith("decay"):
        part = part.float().neg().log()
    if isinstance(whole, Quantised):
        places = first if order is None else order
        rows = part.T if how in ("transpose", "pairs") else part
        if how == "pairs":
            rows = torch.cat((rows[0::2], rows[1::2]))
        whole.rows(cut.first, cut.first + cut.taken).write_rows(places, rows, cut.kept)
        return
    target = whole[cut.first : cut.first + cut.taken]
    if order is not None:
        part = part.to(target.device, target.dtype)
        if slot.turned:
            target, part = target[:, first:last], part.T
        target.index_copy_(0, order, part)
    elif how == "transpose" and part.dim() == 2:
        target[:, first:last] = part.T
    elif how == "pairs" and part.dim() == 2:
        target[:, first:last] = torch.cat((part[:, 0::2], part[:, 1::2]), 1).T
    elif how == "skip_two":
        kept = part[max(2 - first, 0) :]
        target[last - 2 - len(kept) : last - 2] = kept
    else:
        target[first:last] = part.float() + 1 if how == "plus_one" else part


# The parts of a split model


class Cut(NamedTuple):
    """A part of a stored tensor that a process reads.

    rows, columns: of the stored tensor; None for all columns.
    first, taken: the part fills rows [first, first + taken) of the process's decoder tensor.
    order: the target row of each stored row, if rows are reordered.
    kept: the columns of the target's whole rows that the process holds; None for all that are read.
    source: the stored column of each target column, if columns are reordered.
    """

    rows: range
    columns: range | None
    first: int
    taken: int
    order: Tensor | None = None
    kept: range | None = None
    source: Tensor | None = None


def _cuts(
    spec: Spec, slot: Slot, shape: tuple[int, ...], share: Share | None, *, whole_rows: bool = False
) -> Iterator[Cut]:
    """Yield the parts of a stored tensor of this shape that process `share` reads. None: the model
    is not split.

    Args:
        whole_rows: read whole rows of the target, also where the process holds some of its columns
            only. A quantised row has the scale of the whole row in all processes.
    """
    found = None if share is None else held_part(spec, slot.name, share)
    order, source = order_of(spec, slot), columns_of(spec, slot)
    every = range(shape[0])
    transposed = slot.how == "transpose" and len(shape) == 2
    if found is None:
        yield Cut(every, None, slot.first, slot.rows, order, source=source)
    elif found.dim == 1:
        (run,) = found.runs
        assert order is None
        if whole_rows:
            yield Cut(every, None, slot.first, slot.rows, kept=run, source=source)
            return
        if source is not None:
            yield Cut(every, None, slot.first, slot.rows, source=source[run.start : run.stop])
            return
        yield Cut(run if transposed else every, None if transposed else run, slot.first, slot.rows)
    elif order is not None:
        yield from _sorted_cuts(order + slot.first, found)
    else:
        for rows, first in _within(found, range(slot.first, slot.first + slot.rows)):
            stored = shifted(rows, -slot.first)
            yield Cut(
                every if transposed else stored, stored if transposed else None, first, len(stored)
            )


def _within(found: HeldPart, slot: range) -> Iterator[tuple[range, int]]:
    """Yield the held rows inside a slot, each run with its first index among all held rows."""
    at = 0
    for run in found.runs:
        rows = range(max(run.start, slot.start), min(run.stop, slot.stop))
        if rows:
            yield rows, at + rows.start - run.start
        at += len(run)


def _sorted_cuts(order: Tensor, found: HeldPart) -> Iterator[Cut]:
    """Yield runs of stored rows that are held. Stored row i is row `order[i]` of the tensor."""
    places = torch.full_like(order, -1)
    at = 0
    for run in found.runs:
        inside = (order >= run.start) & (order < run.stop)
        places[inside] = order[inside] - run.start + at
        at += len(run)
    begin = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or (places[end] >= 0) != (places[begin] >= 0):
            if places[begin] >= 0:
                yield Cut(range(begin, end), None, 0, found.size, places[begin:end])
            begin = end
