"""Draft-length controllers: they see what past rounds drafted, kept and took, and say how many to draft next."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from .surface import Surface


class Round(NamedTuple):
    """What a round did: `width` drafts in each row, `accepted` of them by live row, in `seconds` of wall clock, without
    what capturing took. `steady`: the time is what later rounds of that width will take too. `drafted`: how many of a
    row's drafts were meant, where they came from the host; the others only filled its place up. None: all. `asking`: the
    part of the seconds in which the host looked for drafts, whether it found any or not. `rows`: those that `accepted` is
    of; none if they are the last outlook's samples."""

    width: int
    accepted: tuple[int, ...]
    seconds: float
    steady: bool = True
    drafted: tuple[int, ...] | None = None
    asking: float = 0.0
    rows: tuple[Hashable, ...] = ()

    @property
    def meant(self) -> tuple[int, ...]:
        """Of each row, how many of its drafts were meant."""
        return (self.width,) * len(self.accepted) if self.drafted is None else self.drafted

    @property
    def went_well(self) -> bool:
        """Whether most of those that were meant were kept."""
        return sum(map(min, self.accepted, self.meant)) > sum(self.meant) / 2


class Outlook(NamedTuple):
    """What lies before a controller. `left`: tokens that each row of the batch may still generate, its share of those of
    waiting samples included; `entries`: seconds that a draft length costs once, on top of its rounds (what is beyond the
    end costs nothing); `catch_up`: seconds that drafting costs once after plain rounds; `context`: tokens of the mean
    row, None if nobody knows; `samples`: which ones the rows are; `rooms`: tokens that each of them may still get;
    `colds`: the part of the entries that comes before anything is learnt of a length; `stops`: the drafting will be ended
    where it is no longer worth it, so a length is only the most there can be; `free`: no draft is made in the round,
    the host only looks for some, and `trim` has the last word on the length; `hurried`: the device waits for an answer, and
    `reflect` will be called while it works."""

    left: float = math.inf
    entries: tuple[float, ...] = ()
    catch_up: float = 0.0
    context: float | None = None
    samples: tuple[Hashable, ...] = ()
    rooms: tuple[int, ...] = ()
    colds: tuple[float, ...] = ()
    stops: bool = False
    free: bool = False
    hurried: bool = False

    def entry(self, length: int) -> float:
        """Seconds that a draft length costs once."""
        return (self.entries[length] if length < len(self.entries) else 0.0) + (self.catch_up if length else 0.0)


NOTHING_KNOWN = Outlook()


class Lengths(Protocol):
    """A draft-length controller. It sees past rounds only, never a token, so it may gate either coupling. What is not said
    otherwise: all that the host has is drafted, and rounds teach nothing. `exact`: a round has the very length that
    was given, not a near one that happens to be captured; else the controller would see another algorithm's rounds."""

    exact: bool = False

    def next(self, rows: int, outlook: Outlook = NOTHING_KNOWN) -> int:
        """Draft length for the next round of `rows` live rows; 0 means plain decoding. The outlook's seconds depend on
        timings: a controller that is used under maximal coupling must not look at them."""

    def trim(self, counts: Sequence[int], outlook: Outlook = NOTHING_KNOWN) -> int:
        """Draft length for this round, now that it is known how many drafts (not all 0) the host has for each live row."""
        return max(counts)

    def needs(self, width: int) -> bool:
        """Whether the next length depends on what the round of `width` drafts brings that is under way."""
        return True

    def observe(self, done: Round) -> None:
        """A round has ended."""
        return

    def reflect(self) -> None:
        """Work that can be done while the device runs the round that was decided last."""
        return


@runtime_checkable
class Stopper(Protocol):
    """A controller that can also say inside a round, under shared coupling, when to stop drafting."""

    def least(self, drafted: int) -> float:
        """The share of the live rows that must be expected to keep all of so many drafts for one more to be worth it."""


class Fixed(Lengths):
    """Always the same draft length."""

    def __init__(self, length: int):
        self._length = length

    def needs(self, width: int) -> bool:
        return False

    def next(self, rows: int, outlook: Outlook = NOTHING_KNOWN) -> int:
        return self._length


class Bass(Lengths):
    """Algorithm 1 of BASS (arXiv 2404.15778): one length for the batch. It grows by `step` when a row keeps all of
    the drafts, and otherwise shrinks, faster the second time in a row, but never below what some row kept."""

    exact = True

    def __init__(self, *, start: int = 7, step: int = 2, divisor: int = 10, limit: int = 32):
        self._step, self._divisor, self._limit = step, divisor, limit
        self._length = min(start, limit)
        self._shrank = 0

    def next(self, rows: int, outlook: Outlook = NOTHING_KNOWN) -> int:
        return self._length

    def observe(self, done: Round) -> None:
        if done.width == 0:  # nothing was drafted, nothing was learnt
            return
        most = max(done.accepted)
        if most == self._length:
            self._length = min(self._length + self._step, self._limit)
            self._shrank = 0
        else:
            shorter = self._length - math.ceil(self._length / self._divisor) - self._shrank
            self._length = max(1, most, shorter)
            self._shrank = 1


def make_lengths(length: str | int, *, limit: int, coupling: str, surface: Surface | None = None) -> Lengths:
    """The controller named by `--draft-length`: an integer, "bass", "table", "bass+table" or "auto". `surface`: what is
    known of this pair on this device; a table needs one.

    "auto" chooses by goodput, which depends on timing. Under maximal coupling the samples depend on the draft lengths, so
    there it takes costs from a profile as they are, and a seed still gives the same samples twice; without a profile it
    is Algorithm 1.
    """
    from .goodput import Goodput
    from .table import Capped, Table

    if isinstance(length, int):
        return Fixed(min(length, limit))
    if length == "auto" and coupling == "shared":
        return Goodput(limit=limit, surface=surface)
    if length == "auto" and surface is not None and surface.measured:
        return Goodput(limit=limit, surface=surface, frozen=True)
    if length in ("auto", "bass"):
        return Bass(limit=limit)
    assert surface is not None, "a table is made from a profile"
    table = Table(surface, limit=limit)
    return table if length == "table" else Capped(Bass(limit=limit), table)
