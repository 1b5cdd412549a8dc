"""The tensors of a model by name, as its passes read them, and writing to them in place.

Some matrices are packed on a CPU (bass_kernels.pack). A packed tensor cannot be written in part, so
`writing` gives its plain form and packs it again. Not here: names of a checkpoint (families.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

import bass_kernels as ops


class Weights(dict[str, Tensor]):
    """Tensors by the names of `parameters(spec)`. Their memory never moves, so captured graphs
    stay valid after a write.

    Args:
        tensors: plain tensors. They are taken out of this dict, so that the plain form of a packed
            matrix can be freed.
    """

    def __init__(self, tensors: dict[str, Tensor]):
        super().__init__(tensors)
        tensors.clear()
        self._tied = "head.weight" in self and self["head.weight"] is self.get("embed.weight")
        # By packed matrix: its shape, and copies of its rows from a first one on.
        self._packed: dict[str, tuple[torch.Size, list[tuple[int, Tensor]]]] = {}

    def pack(self, name: str, rows: int | None = None) -> Tensor:
        """Keep a matrix in its fastest layout only, and return it.

        Args:
            rows: the number of rows that are read, the first ones. Default: all.
        """
        whole = self[name]
        found = ops.pack(whole[:rows])
        if ops.is_packed(found):
            self._packed[name] = (whole.shape, [(0, found)])
            if name != "head.weight" or not self._tied:
                self[name] = found
        return found

    def rows_from(self, name: str, first: int) -> Tensor:
        """Return the rows of a matrix from `first` on in their fastest layout."""
        whole = ops.unpack(self[name])
        found = ops.pack(whole[first:])
        if ops.is_packed(self[name]):  # else it is a view
            self._packed[name][1].append((first, found))
        return found

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[Tensor]:
        """Yield the whole plain tensor to write to. Afterwards its packed copies are renewed.

        A tied head is the embedding. After an error in the block, a packed matrix is unchanged, and
        a plain one is as the block left it.
        """
        if self._tied and name == "head.weight":
            name = "embed.weight"
        names = (name, "head.weight") if self._tied and name == "embed.weight" else (name,)
        with torch.inference_mode():
            whole = self[name]
            if ops.is_packed(whole):
                whole = self._plain(name)
            yield whole
            for one in names:
                _, copies = self._packed.get(one, (None, []))
                for first, copy in copies:
                    copy.copy_(ops.pack(whole[first : first + len(copy)]))

    def _plain(self, name: str) -> Tensor:
        """Return the plain form of a packed matrix; 0 in rows that are not read."""
        shape, copies = self._packed[name]
        first, copy = copies[0]
        if copy.shape == shape:
            return ops.unpack(copy)
        found = torch.zeros(shape, dtype=copy.dtype)
        found[first : first + len(copy)] = ops.unpack(copy)
        return found
