"""Assign the samples of a job to workers, in small parts, and again after a worker is lost.

Pure bookkeeping on one thread, without processes, clock or files. The worker: worker.py. The
driver: worker_pool.py.
"""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from bass_cli.io.completion import Completion
from bass_cli.io.prompts import Prompt

_RESERVE = 8  # a worker holds 1/8 more samples than it has slots, so that no slot becomes empty
_PIECES = 8  # parts of a prompt at most, because each part runs the prefill again


class Part(NamedTuple):
    """Some samples of a prompt, by their numbers."""

    prompt: Prompt
    samples: tuple[int, ...]


@dataclass(slots=True)
class _Assigned:
    """The samples that a worker holds, by prompt id.

    Attributes:
        parts: The prompts with the samples that are not finished.
        held: The number of slots that the samples need.
        ended: The number of samples that ended since the last `chunk`.
    """

    parts: dict[str, tuple[Prompt, set[int]]] = field(default_factory=dict)
    held: int = 0
    ended: int = 0


class Pool:
    """The samples 0 to n - 1 of every prompt, except those in `done`.

    Each sample is assigned to one worker at a time. A sample from any other worker is ignored, so
    there are no duplicates. The samples of a lost worker become available again.

    Args:
        prompts: The prompts, read as workers need them.
        done: (id, sample) pairs that exist already.
        n: Samples per prompt.
        count: The number of prompts, None if unknown.
        alike: Whether the samples of a prompt are copies of one, which needs one slot.
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
        self._waiting: dict[str, tuple[Prompt, list[int]]] = {}  # by id: unassigned samples
        self._workers: dict[Hashable, _Assigned] = {}
        self._failed: set[str] = set()  # prompts that cannot be run

    def __len__(self) -> int:
        """Return the number of workers."""
        return len(self._workers)

    def hire(self, worker: Hashable) -> None:
        """Add a worker."""
        self._workers[worker] = _Assigned()

    def lose(self, worker: Hashable) -> int:
        """Remove a worker, and return how many samples it had not finished."""
        mine = self._workers.pop(worker, _Assigned())
        for id_, (prompt, samples) in mine.parts.items():
            if id_ not in self._failed:
                waiting = self._waiting.setdefault(id_, (prompt, []))[1]
                waiting += samples
                waiting.sort()
        return sum(len(samples) for _, samples in mine.parts.values())

    def held(self, worker: Hashable) -> int:
        """Return the number of slots that the worker's samples need."""
        return self._workers[worker].held

    def chunk(self, worker: Hashable, rows: int) -> list[Part]:
        """Assign samples to a worker and return them.

        They keep its `rows` slots busy until the next call: twice as many samples as ended since
        the last call, or an eighth of the slots if that is more.
        """
        mine, parts = self._workers[worker], list[Part]()
        wanted = rows + max(rows // _RESERVE, 2 * mine.ended, 1)
        mine.ended = 0
        while mine.held < wanted and (part := self._part(mine)) is not None:
            mine.parts[part.prompt.id] = part.prompt, set(part.samples)
            mine.held += 1 if self._alike else len(part.samples)
            parts.append(part)
        return parts

    def deliver(self, worker: Hashable, completion: Completion) -> bool:
        """Take a finished sample from a worker; return whether it is wanted and new."""
        mine = self._workers.get(worker, _Assigned())
        _, missing = mine.parts.get(completion.id, (None, set[int]()))
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
            del mine.parts[completion.id]
        ended = int(before > 0 and not missing) if self._alike else gone
        mine.held -= ended
        mine.ended += ended
        return new

    def over(self) -> bool:
        """Return whether all samples are finished."""
        return not any(mine.parts for mine in self._workers.values()) and not (
            self._waiting or self._read()
        )

    def _part(self, mine: _Assigned) -> Part | None:
        """Return samples of the first prompt of which the worker has none; None if there is none.

        Near the end of a job, a worker's share of the remaining samples may be less than a whole
        prompt. Then return only that many.
        """
        found = next((one for id_, one in self._waiting.items() if id_ not in mine.parts), None)
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
        share = max(left / len(self._workers), self._n / _PIECES)
        return most if share >= most else math.ceil(share)

    def _read(self) -> tuple[Prompt, list[int]] | None:
        """Read the next prompt that lacks samples; None after the last."""
        for prompt in self._prompts:
            self._unread = max(self._unread - 1, 0)
            missing = [i for i in range(self._n) if (prompt.id, i) not in self._done]
            if missing:
                self._waiting[prompt.id] = prompt, missing
                return self._waiting[prompt.id]
        self._unread = 0
        return None
