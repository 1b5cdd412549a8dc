"""Read the headers of tensor files: names, types, shapes and places of their tensors.

Formats: safetensors and torch's zip format; gguf_file.py has GGUF. Each header is checked against
the file's size, so a truncated or corrupt file is a UserError before anything large is read. torch
is imported for its own format only. Not here: a tensor's content (tensor_content.py), the meaning
of names (families.py).
"""

from __future__ import annotations

import itertools
import math
import os
import pickle
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from bass_cli.errors import UserError
from bass_cli.io.reading import open_regular, parse_object, text, whole

if TYPE_CHECKING:
    from torch import Tensor

# Our names of unquantised types, by torch's names.
FLOATS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# Maximum bytes of a header: the limit of the safetensors format. GGUF headers are far smaller.
HEADER_LIMIT = 100 * 2**20
DIMENSIONS = 8  # maximum of a tensor; a decoder's have two
_SAFETENSORS_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2,
    "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip


class Entry(NamedTuple):
    """One stored tensor, in bytes [start, start + size) of `file`.

    dtype: one of FLOATS or quantised.QUANTISED, or another name that cannot be loaded.
    shape: rows first.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def read_safetensors(path: Path) -> dict[str, Entry]:
    """Return the tensors of a .safetensors file.

    Raises:
        UserError: the file is unreadable, truncated or corrupt.
    """
    with opened(path) as file:
        total = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if total < 8 or length > min(total - 8, HEADER_LIMIT):
            raise UserError(
                f"{path}: truncated or not safetensors: the header does not fit into {total} bytes"
            )
        raw = file.read(length)
    try:
        header = parse_object(raw)
        entries = {
            name: _safetensors_entry(path, name, item, 8 + length)
            for name, item in header.items()
            if name != "__metadata__"
        }
    except ValueError as error:
        raise UserError(f"{path}: the header is corrupt: {error}") from None
    check_places(path, total, entries)
    return entries


def _safetensors_entry(path: Path, name: str, item: Any, begin: int) -> Entry:
    """Return the tensor that an item of a header describes. `begin`: the file's first byte of data.

    Raises:
        ValueError: names the tensor and the fault.
    """
    try:
        first, last = (whole(place) for place in item["data_offsets"])
        dtype, shape = text(item["dtype"]), tuple(whole(size) for size in item["shape"])
        size = last - first
        width = _SAFETENSORS_BYTES.get(dtype)
        if (
            len(shape) > DIMENSIONS
            or size < 0
            or (width is not None and math.prod(shape) * width != size)
        ):
            raise ValueError("its size does not fit its shape")
    except KeyError as error:
        raise ValueError(f'tensor "{name}" has no {error}') from None
    except TypeError:
        raise ValueError(f'tensor "{name}" is not described as in safetensors') from None
    except ValueError as error:
        raise ValueError(f'tensor "{name}": {error}') from None
    return Entry(path, dtype, shape, begin + first, size)


def read_torch(path: Path) -> dict[str, Entry]:
    """Return the tensors of a .bin file that torch.save wrote in its zip format. No code in it is
    run."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    entries: dict[str, Entry] = {}
    try:
        with opened(path) as file:
            total = os.fstat(file.fileno()).st_size
            with zipfile.ZipFile(file) as archive:
                if any(record.file_size != record.compress_size for record in archive.infolist()):
                    raise ValueError("its records are compressed")
            file.seek(0)
            with FakeTensorMode():
                state = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise ValueError("it holds no mapping of names to tensors")
        for name, tensor in state.items():
            if isinstance(tensor, torch.Tensor):
                entries[name] = _torch_entry(path, name, tensor)
    except UserError:
        raise
    except pickle.UnpicklingError:  # torch's own text advises to run code of the file
        raise UserError(
            f"{path}: the file is damaged or holds more than tensors, and no code in it is run; "
            "convert the checkpoint to safetensors"
        ) from None
    # a broken pickle, or one from before the zip format, may raise anything
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{path}: torch cannot read the file (truncated, or in the format of torch before "
            f"1.6): {reason}"
        ) from None
    check_places(path, total, entries, shared=True)
    return entries


def _torch_entry(path: Path, name: str, tensor: Tensor) -> Entry:
    if not tensor.is_contiguous():
        raise UserError(
            f'{path}: the tensor "{name}" is not stored contiguously; convert the checkpoint'
        )
    begin = tensor.untyped_storage()._checkpoint_offset
    if begin is None:
        raise ValueError(f'the tensor "{name}" has no place in the file')
    start = begin + int(tensor.storage_offset()) * tensor.element_size()
    dtype = str(tensor.dtype)
    return Entry(
        path,
        FLOATS.get(dtype.removeprefix("torch."), dtype),
        tuple(tensor.shape),
        start,
        int(tensor.numel()) * tensor.element_size(),
    )


def opened(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        UserError: it cannot be opened.
    """
    try:
        return open_regular(path)
    except OSError as error:
        raise UserError(f"{path}: cannot read the file: {error.strerror}") from None


def check_places(
    path: Path, total: int, entries: dict[str, Entry], *, shared: bool = False
) -> None:
    """Raise a UserError unless all tensors lie within the file and none overlap.

    Args:
        total: bytes of the file.
        shared: whether tensors may overlap.
    """
    if not entries:
        raise UserError(f"{path}: the file holds no tensors")
    end = max(entry.start + entry.size for entry in entries.values())
    if end > total:
        raise UserError(
            f"{path}: the file is truncated: it has {total} bytes, its tensors need {end}"
        )
    placed = sorted(
        (entry.start, entry.size, name) for name, entry in entries.items() if entry.size
    )
    for (start, size, name), (after, _, other) in itertools.pairwise([] if shared else placed):
        if start + size > after:
            raise UserError(
                f'{path}: the header is corrupt: tensors "{name}" and "{other}" overlap'
            )
