"""Split a job into parts: select the prompts of `--shard 2/8`.

The part of a prompt depends on its id alone. So parts run independently, and prompts stay in their
parts when others are added to the file. io/merging.py makes one file of the parts.
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
        """Whether the prompt with this id belongs to this part."""
        return shard_of(id_, self.of) == self


class _HasId(Protocol):
    """A Prompt of io/prompts.py."""

    @property
    def id(self) -> str: ...


Named = TypeVar("Named", bound=_HasId)


def shard_of(id_: str, of: int) -> Shard:
    """Return the part, of `of` parts, that the prompt with this id belongs to."""
    spelled = id_.encode("utf-8", "surrogatepass")  # an id may hold lone surrogates
    digest = hashlib.blake2b(spelled, digest_size=8).digest()
    return Shard(int.from_bytes(digest, "big") % of + 1, of)


def held_by(shard: Shard | None, prompts: Iterable[Named]) -> Iterator[Named]:
    """Yield the prompts that belong to the shard; all prompts if there is none."""
    return (prompt for prompt in prompts if shard is None or shard.holds(prompt.id))


def parse_shard(text: str, key: str = "--shard (or BASS_SHARD)") -> Shard:
    """Parse "2/8"; a UserError begins with `key`."""
    found = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", text, re.ASCII)
    shard = Shard(int(found[1]), int(found[2])) if found else Shard(0, 0)
    if not 1 <= shard.number <= shard.of:
        raise UserError(
            f'{key}: "{shown(text)[1:-1]}" is not a part of a job; write NUMBER/PARTS, from 1/8 to '
            "8/8 for eight parts"
        )
    return shard
