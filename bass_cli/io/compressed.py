"""Read and write gzip and zstd data line by line, also data that a killed process left.

`Expanded` reads all members (frames) of a stream. `Compressor` writes one, and makes every chunk
readable at once, so that a truncated file has all chunks that were written. Files are opened and
locked elsewhere.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, Literal

Kind = Literal["gz", "zst"]
_MAGIC: dict[bytes, Kind] = {b"\x1f\x8b": "gz", b"\x28\xb5\x2f\xfd": "zst"}
_NAMES = {"gz": "gzip", "zst": "zstd"}
_GZIP = 31  # zlib's window bits for a gzip header
# Compressed bytes that are expanded at a time. A zstd block of 4 bytes may hold 128 KB.
_CHUNK = 4096
_LEVELS: dict[Kind, int] = {"gz": 6, "zst": 3}


class BrokenDataError(ValueError):
    """Compressed data that cannot be expanded, or that ends too early."""


def compression_by_name(path: str | Path) -> Kind | None:
    """Return the compression that the suffix of a name means; None if it means none."""
    suffix = Path(path).suffix.lower()
    return "gz" if suffix == ".gz" else "zst" if suffix == ".zst" else None


def compression_in(stream: IO[bytes]) -> Kind | None:
    """Return the compression of a stream by its first bytes, and go back to its start."""
    start = stream.read(4)
    stream.seek(0)
    return compression_by_start(start)


def compression_by_start(start: bytes) -> Kind | None:
    """Return the compression of data that begins like this; None if it is not compressed."""
    return next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), None)


class Chunks(io.RawIOBase):
    """Chunks of bytes as a stream; an empty chunk is its end."""

    def __init__(self, chunks: Iterable[bytes] = ()):
        self._chunks, self._rest = iter(chunks), b""  # rest: bytes that did not fit

    def readable(self) -> bool:
        return True

    def next_chunk(self) -> bytes:
        return next(self._chunks, b"")

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer; return the number of bytes, 0 at the end."""
        self._rest = self._rest or self.next_chunk()
        size = min(len(self._rest), len(buffer))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


class Expanded(Chunks):
    """The content of a compressed stream, which is read from its present position.

    Args:
        stream: The compressed data. It is not closed.
        kind: Its compression.
        torn: Whether data that ends within a member is read as far as it goes. Otherwise it is a
            BrokenDataError, because lines may be missing.

    Attributes:
        is_whole: Whether the data ended with a member, once its end has been reached.
        members: The number of members that have begun.
    """

    def __init__(self, stream: IO[bytes], kind: Kind, *, torn: bool = False):
        super().__init__()
        self._stream, self._kind, self._torn = stream, kind, torn
        self._member: Any = None
        self._behind = b""  # compressed bytes after the end of a member
        self.is_whole, self.members = True, 0

    def next_chunk(self) -> bytes:
        """Return expanded bytes; none at the end."""
        while chunk := self._behind or self._stream.read(_CHUNK):
            self._behind = b""
            if found := self._expand(chunk):
                return found
        if not self.is_whole and not self._torn:
            raise BrokenDataError(f"the {_NAMES[self._kind]} data is cut short")
        return b""

    def _expand(self, chunk: bytes) -> bytes:
        if self._member is None:
            self._member, self.is_whole = _member(self._kind), False
            self.members += 1
        try:
            found: bytes = self._member.decompress(chunk)
        except Exception as error:  # zlib.error, or zstandard's, whose module may not be needed
            reason = f"the {_NAMES[self._kind]} data is broken: {error}"
            raise BrokenDataError(reason) from None
        if self._member.eof:
            self._behind, self._member, self.is_whole = self._member.unused_data, None, True
        return found


def _member(kind: Kind) -> Any:
    if kind == "gz":
        return zlib.decompressobj(_GZIP)
    import zstandard

    return zstandard.ZstdDecompressor().decompressobj()


class Compressor:
    """Makes one member of the chunks that it is given."""

    def __init__(self, kind: Kind):
        if kind == "gz":
            gzip = zlib.compressobj(_LEVELS[kind], zlib.DEFLATED, _GZIP)
            self._stream: Any = gzip
            self._flush: Any = zlib.Z_SYNC_FLUSH
        else:
            import zstandard

            made = zstandard.ZstdCompressor(_LEVELS[kind], write_checksum=True)
            self._stream, self._flush = made.compressobj(), zstandard.COMPRESSOBJ_FLUSH_BLOCK

    def add(self, chunk: bytes, *, flush: bool = True) -> bytes:
        """Return compressed bytes; with `flush` all chunks so far can be read from them."""
        found: bytes = self._stream.compress(chunk)
        return found + self._stream.flush(self._flush) if flush else found

    def end(self) -> bytes:
        """Return the end of the member."""
        found: bytes = self._stream.flush()
        return found
