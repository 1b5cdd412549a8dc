"""The tensors of a model by name, as its passes read them, and writing to them in place.

Some matrices are quantised (bass_kernels.Quantised), and some are packed on a CPU
(bass_kernels.pack). A packed tensor cannot be written in part, so `writing` gives its plain form
and packs it again. Not here: names of a checkpoint (families.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

import bass_kernels as ops
from bass_kernels import Grouped, Quantised, Weight, Writable

Named = dict[str, Tensor] | dict[str, Weight]  # tensors by name


class Weights(dict[str, Weight]):
    """Tensors by the names of `parameters(spec)`. Their memory never moves, so captured graphs
    stay valid after a write.

    Args:
        tensors: plain or quantised tensors. They are taken out of this dict, so that the plain
            form of a packed matrix can be freed.
        tied: whether the head is the embedding, or a quantised copy of it.
    """

    def __init__(self, tensors: Named, *, tied: bool = False):
        super().__init__(tensors)
        tensors.clear()
        head = self.get("head.weight")
        self._copied = head if tied and isinstance(head, Quantised) else None
        plainly = head is not None and head is self.get("embed.weight")
        self._tied = plainly or self._copied is not None
        # By packed matrix: its shape, and copies of its rows from a first one on.
        self._packed: dict[str, tuple[torch.Size, list[tuple[int, Tensor]]]] = {}

    def plain(self, name: str) -> Tensor:
        """Return a tensor that is not quantised."""
        found = self[name]
        assert isinstance(found, Tensor), name
        return found

    def plain_or_none(self, name: str) -> Tensor | None:
        """Return a tensor that is not quantised; None if there is none of this name."""
        return self.plain(name) if name in self else None

    def qk_norms(self, at: str) -> tuple[Tensor, Tensor]:
        """Return the weights of the norms of q and k in the layer whose names begin with `at`."""
        return self.plain(at + "q_norm.weight"), self.plain(at + "k_norm.weight")

    def whole(self, name: str) -> Tensor:
        """Return the plain form of a tensor that is not quantised by row; 0 in rows that are not
        read."""
        held = self[name]
        if isinstance(held, Grouped):
            return held.dequantise()
        found = self.plain(name)
        return self._unpacked(name) if ops.is_packed(found) else found

    def dtype_written(self, name: str) -> torch.dtype:
        """Return the dtype in which new numbers are to be given: quantised tensors are made from
        float32. A tied head is written as the embedding."""
        found = self.writable("embed.weight" if self._is_tied_head(name) else name)
        return torch.float32 if isinstance(found, Quantised) else found.dtype

    @property
    def fixed(self) -> bool:
        """Whether matrices have the numbers of a file, which cannot be replaced."""
        return any(isinstance(one, Grouped) for one in self.values())

    def writable(self, name: str) -> Writable:
        """Return a tensor whose numbers can be replaced."""
        found = self[name]
        assert not isinstance(found, Grouped), name
        return found

    def pack(self, name: str, rows: int | None = None) -> Weight:
        """Keep a matrix in its fastest layout only, and return it.

        Args:
            rows: the number of rows that are read, the first ones. Default: all.
        """
        whole = self[name]
        if isinstance(whole, Quantised):
            return whole.rows(0, rows)
        if isinstance(whole, Grouped):
            return whole.first_rows(rows)
        found = ops.pack(whole[:rows])
        if ops.is_packed(found):
            self._packed[name] = (whole.shape, [(0, found)])
            if name != "head.weight" or not self._tied:
                self[name] = found
        return found

    def rows_from(self, name: str, first: int) -> Weight:
        """Return the rows of a matrix from `first` on in their fastest layout."""
        held = self[name]
        if isinstance(held, Quantised):
            return held.rows(first)
        assert isinstance(held, Tensor), name
        whole = ops.unpack(held)
        found = ops.pack(whole[first:])
        if ops.is_packed(held):  # else it is a view
            self._packed[name][1].append((first, found))
        return found

    def join(self, *names: str) -> Tensor | None:
        """Move plain matrices [., width] of one dtype into one tensor, of which they become views.

        Returns:
            That tensor, the rows of the first matrix first, or None if a matrix is not plain.
        """
        parts = [self[name] for name in names]
        if not all(isinstance(one, Tensor) and not ops.is_packed(one) for one in parts):
            return None
        plain = [self.plain(name) for name in names]
        if len({one.dtype for one in plain}) > 1:
            return None
        whole = torch.cat(plain)
        self.update(zip(names, whole.split([len(one) for one in plain]), strict=True))
        return whole

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[Writable]:
        """Yield the whole tensor to write to, plain or quantised. Afterwards its packed copies are
        renewed.

        A tied head is the embedding. After an error in the block, a packed matrix is unchanged, and
        a plain one is as the block left it.
        """
        if self._is_tied_head(name):
            name = "embed.weight"
        names = (name, "head.weight") if self._tied and name == "embed.weight" else (name,)
        with torch.inference_mode():
            whole = self.writable(name)
            if isinstance(whole, Quantised):
                yield whole
                return
            if ops.is_packed(whole):
                whole = self._unpacked(name)
            yield whole
            for one in names:
                _, copies = self._packed.get(one, (None, []))
                for first, copy in copies:
                    copy.copy_(ops.pack(whole[first : first + len(copy)]))
            if name == "embed.weight" and self._copied is not None:
                self._copied.write_rows(0, whole)

    def _is_tied_head(self, name: str) -> bool:
        return self._tied and name == "head.weight"

    def _unpacked(self, name: str) -> Tensor:
        """Return the plain form of a packed matrix; 0 in rows that are not read."""
        shape, copies = self._packed[name]
        first, copy = copies[0]
        if copy.shape == shape:
            return ops.unpack(copy)
        found = torch.zeros(shape, dtype=copy.dtype)
        found[first : first + len(copy)] = ops.unpack(copy)
        return found
