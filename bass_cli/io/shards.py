"""A job in parts: which prompts `--shard 2/8` takes.

A prompt belongs to one part by its id alone, so that parts need not know of each other, and a
file to which prompts were added keeps the others where they were. Not here: making one file of
the parts (io/merging.py).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol, TypeVar

from bass_cli.errors import UserError
from bass_cli.io.reading import shown


class Shard(NamedTuple):
    """Part `number`, from 1, of `of` parts."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def holds(self, id_: str) -> bool:
        """Whether the prompt with this id belongs to it."""
        return shard_of(id_, self.of) == self


class _HasId(Protocol):
    """A Prompt, which io/prompts.py makes."""

    @property
    def id(self) -> str: ...


Named = TypeVar("Named", bound=_HasId)


def shard_of(id_: str, of: int) -> Shard:
    """The one of so many parts that the prompt with this id belongs to."""
    spelled = id_.encode("utf-8", "surrogatepass")  # of an id that is no text, too
    digest = hashlib.blake2b(spelled, digest_size=8).digest()
    return Shard(int.from_bytes(digest, "big") % of + 1, of)


def held_by(shard: Shard | None, prompts: Iterable[Named]) -> Iterator[Named]:
    """Those of the prompts that belong to the shard, of all where there is none."""
    return (prompt for prompt in prompts if shard is None or shard.holds(prompt.id))


def parse_shard(text: str, key: str = "--shard (or BASS_SHARD)") -> Shard:
    """What "2/8" stands for; UserError, beginning with `key`, where it is no part of a job."""
    found = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", text, re.ASCII)
    shard = Shard(int(found[1]), int(found[2])) if found else Shard(0, 0)
    if not 1 <= shard.number <= shard.of:
        raise UserError(
            f'{key}: "{shown(text)[1:-1]}" is no part of a job; write it like 2/8, the second of '
            "eight, from 1/8 to 8/8"
        )
    return shard
