"""Who draws what: the samples of a job, pulled in small parts by workers as they have room, and
given out again where a worker is lost.

Pure bookkeeping on one thread: it knows no process, no clock and no file. Not here: what a worker
is (worker.py), who asks it (worker_pool.py).
"""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from bass_cli.io.completion import Completion
from bass_cli.io.prompts import Prompt

_RESERVE = 8  # a worker holds an eighth more than its rows, so that none is empty while it asks
_PIECES = 8  # a prompt is cut into so many parts at most: each part reads the prompt anew


class Part(NamedTuple):
    """Some samples of a prompt, by number."""

    prompt: Prompt
    samples: tuple[int, ...]


@dataclass(slots=True)
class _Hand:
    """What a worker has: samples by prompt, how many rows they take, and how many ended since it
    was last given some."""

    parts: dict[str, tuple[Prompt, set[int]]] = field(default_factory=dict)
    held: int = 0
    ended: int = 0


class Pool:
    """Samples 0 to n - 1 of every prompt but those in `done`, which is asked when a prompt is
    taken. `count`: how many prompts there are, None where nobody knows. `alike`: the samples of a
    prompt are copies of one, which takes one row, so they stay together.

    A sample is in one hand at a time: what comes from another hand is not taken, so nothing is
    there twice, and what a lost worker had goes back, so nothing is lost.
    """

    def __init__(
        self,
        prompts: Iterator[Prompt],
        done: Container[tuple[str, int]],
        *,
        n: int,
        count: int | None,
        alike: bool = False,
    ):
        self._prompts, self._done, self._n, self._alike = prompts, done, n, alike
        self._unread = math.inf if count is None else count
        self._waiting: dict[str, tuple[Prompt, list[int]]] = {}  # by id: samples in no hand
        self._hands: dict[Hashable, _Hand] = {}
        self._failed: set[str] = set()  # prompts that cannot be run

    def __len__(self) -> int:
        """Workers that may take part."""
        return len(self._hands)

    def hire(self, worker: Hashable) -> None:
        """It may be given parts from now on."""
        self._hands[worker] = _Hand()

    def lose(self, worker: Hashable) -> int:
        """It is gone, if it was there; how many samples go back."""
        hand = self._hands.pop(worker, _Hand())
        for id_, (prompt, samples) in hand.parts.items():
            if id_ not in self._failed:
                waiting = self._waiting.setdefault(id_, (prompt, []))[1]
                waiting += samples
                waiting.sort()
        return sum(len(samples) for _, samples in hand.parts.values())

    def held(self, worker: Hashable) -> int:
        """Rows that the worker's samples take or wait for."""
        return self._hands[worker].held

    def chunk(self, worker: Hashable, rows: int) -> list[Part]:
        """What it is to have now, so that its `rows` stay busy until it asks again: as many
        samples more as twice those that ended since it last asked, and a reserve."""
        hand, parts = self._hands[worker], list[Part]()
        wanted = rows + max(rows // _RESERVE, 2 * hand.ended, 1)
        hand.ended = 0
        while hand.held < wanted and (part := self._part(hand)) is not None:
            hand.parts[part.prompt.id] = part.prompt, set(part.samples)
            hand.held += 1 if self._alike else len(part.samples)
            parts.append(part)
        return parts

    def deliver(self, worker: Hashable, completion: Completion) -> bool:
        """It has drawn this: whether it is wanted, which it is once."""
        hand = self._hands.get(worker, _Hand())
        _, missing = hand.parts.get(completion.id, (None, set[int]()))
        before = len(missing)
        if completion.is_of_prompt and missing:
            new = completion.id not in self._failed
            self._failed.add(completion.id)
            self._waiting.pop(completion.id, None)
            missing.clear()
        else:
            new = completion.sample in missing
            missing.discard(completion.sample)
        gone = before - len(missing)
        if before and not missing:
            del hand.parts[completion.id]
        ended = int(before > 0 and not missing) if self._alike else gone
        hand.held -= ended
        hand.ended += ended
        return new

    def over(self) -> bool:
        """Whether nothing is left to draw and nothing is in any hand."""
        return not any(hand.parts for hand in self._hands.values()) and not (
            self._waiting or self._read()
        )

    def _part(self, hand: _Hand) -> Part | None:
        """Of the first prompt of which it has none: whole, but towards the end, where a
        worker's share of all that is left is less than that."""
        found = next((one for id_, one in self._waiting.items() if id_ not in hand.parts), None)
        found = found or self._read()
        if found is None:
            return None
        prompt, missing = found
        size = len(missing) if self._alike else self._size(len(missing))
        part = Part(prompt, tuple(missing[:size]))
        del missing[:size]
        if not missing:
            del self._waiting[prompt.id]
        return part

    def _size(self, most: int) -> int:
        left = self._unread * self._n + sum(len(samples) for _, samples in self._waiting.values())
        share = max(left / len(self._hands), self._n / _PIECES)
        return most if share >= most else math.ceil(share)

    def _read(self) -> tuple[Prompt, list[int]] | None:
        """The next prompt that lacks samples, which waits from now on; None after the last."""
        for prompt in self._prompts:
            self._unread = max(self._unread - 1, 0)
            missing = [i for i in range(self._n) if (prompt.id, i) not in self._done]
            if missing:
                self._waiting[prompt.id] = prompt, missing
                return self._waiting[prompt.id]
        self._unread = 0
        return None
