"""What a job still owes: the prompts that were taken up and have not all their samples, and those
after them; so that a run that broke off can begin again in the same process.

Not here: why it broke off and with how many rows it goes on (scheduler.py), what a file has
already (io/resume.py).
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from bass_cli.io.completion import Completion
from bass_cli.io.prompts import Prompt


class Unfinished:
    """Samples 0 to n - 1 of `prompts` but those in `done`, which is asked when a prompt is taken.
    `count`: how many prompts there are, if that is known. It holds those prompts only that are
    under way; `in` says of (id, sample) whether it is there."""

    def __init__(
        self,
        prompts: Iterator[Prompt | None],
        done: Container[tuple[str, int]],
        *,
        n: int,
        count: int | None,
    ):
        self._prompts, self._done, self._n, self._count = prompts, done, n, count
        self._taken: dict[str, tuple[Prompt, set[int]]] = {}  # with the samples it lacks
        self.reading = False  # whether the source of the prompts was at work; see `prompts`

    @property
    def count(self) -> int | None:
        """How many prompts `prompts` will give, if that is known."""
        return self._count

    def __contains__(self, key: Any) -> bool:
        id_, sample = key
        if id_ in self._taken:
            return sample not in self._taken[id_][1]
        return key in self._done

    def prompts(self) -> Iterator[Prompt | None]:
        """Those under way again, then those that nobody took yet. `reading` is true from when the
        source is asked until it answers: one that failed has no further prompts, and nothing can
        begin again."""
        yield from [prompt for prompt, _ in self._taken.values()]
        self.reading = True
        for prompt in self._prompts:
            self.reading = False
            if prompt is not None:
                self._take(prompt)
            yield prompt
            self.reading = True
        self.reading = False

    def end(self, completion: Completion) -> None:
        """One is over: a sample, or a prompt that cannot be run at all."""
        _, missing = self._taken[completion.id]
        missing.discard(completion.sample)
        if completion.is_of_prompt:
            missing.clear()
        if not missing:
            self._drop(completion.id)

    def _take(self, prompt: Prompt) -> None:
        missing = {i for i in range(self._n) if (prompt.id, i) not in self._done}
        self._taken[prompt.id] = prompt, missing
        if not missing:
            self._drop(prompt.id)

    def _drop(self, id_: str) -> None:
        del self._taken[id_]
        if self._count is not None:
            self._count -= 1
