"""Keep the best samples of each prompt while they are drawn: `bass generate --best-of K`.

All n samples are drawn. When the last one of a prompt has ended they are ranked, and the K best are
written with rank and scores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from bass_cli.errors import UserError
from bass_cli.io.layout import LayoutWriter
from bass_cli.io.prompts import Prompt
from bass_cli.io.results import Completion
from bass_cli.rank.ranking import (
    LOGPROB,
    Members,
    candidate_of,
    needs_model,
    parse_rankers,
    prompt_text,
    ranker_without_model,
    standings_of,
)


def read_best_of(best: int | None, rank_by: str | None, n: int) -> dict[str, Any]:
    """Return the settings `best_of` and `rank_by` of a job. Empty if all samples are kept.

    Raises:
        UserError: A value is wrong, or the ranker runs a model.
    """
    if best is None:
        if rank_by is not None:
            raise UserError("`rank_by` needs `best_of` K; bass rank ranks the samples of a file")
        return {}
    if not 1 <= best <= n:
        raise UserError(f"`best_of` {best}: a number from 1 to `n` {n} is needed")
    names = parse_rankers(rank_by or LOGPROB, "`rank_by`")
    if len(names) > 1:
        raise UserError("`rank_by`: name one ranker; bass rank writes the scores of several")
    if needs_model(names[0]):
        raise UserError(
            f"`rank_by` {names[0]}: it runs a model, and the memory holds those of the job; leave "
            f"`best_of` out, then run `bass rank FILE --by {names[0]} --best {best}`"
        )
    return {"best_of": best, "rank_by": names[0]}


class BestWriter:
    """A writer of the best samples of each prompt.

    A prompt is done if the file has its best samples: then none of its samples is drawn again.
    Otherwise all are drawn, and those that the file has already are not written twice.

    Args:
        writer: Takes the samples that are kept.
        best_of: The number of samples that are kept.
        rank_by: A ranker that runs no model.
        n: Samples of a prompt without a number of its own.
        prompts: Returns all prompts. Called only if the file has samples already.

    Attributes:
        dropped: The number of samples that were not kept, in all runs of the file.
        kept: The number of samples that this run has written.
    """

    def __init__(
        self,
        writer: LayoutWriter,
        *,
        best_of: int,
        rank_by: str,
        n: int,
        prompts: Callable[[], Iterable[Prompt]],
    ) -> None:
        self._writer, self._best, self._n = writer, best_of, n
        self._name, self._ranker = rank_by, ranker_without_model(rank_by)
        self._own: dict[str, int] = {}
        self._prompts: dict[str, str | None] = {}
        self._waiting: dict[str, list[Completion]] = {}
        self.name, self.notes = writer.name, writer.notes
        there = Counter(id_ for id_, _ in writer.done)
        known = {one.id: one.samples(n) for one in (prompts() if there else ()) if one.id in there}
        complete = {id_ for id_, count in known.items() if there[id_] >= min(best_of, count)}
        self.done = frozenset((id_, sample) for id_ in complete for sample in range(known[id_]))
        self._there: dict[str, set[int]] = {}
        for id_, sample in writer.done:
            if id_ not in complete:
                self._there.setdefault(id_, set()).add(sample)
        self.dropped = len(self.done) - sum(there[id_] for id_ in complete)
        self.kept = 0

    def expect(self, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
        """Yield the prompts, and note the text and the number of samples of each."""
        for prompt in prompts:
            if (prompt.id, 0) not in self.done:
                self._own[prompt.id] = prompt.samples(self._n)
                self._prompts[prompt.id] = prompt_text(prompt)
            yield prompt

    def write(self, completion: Completion) -> None:
        """Take a sample; write the best ones of its prompt if this was the last one."""
        id_ = completion.id
        if completion.is_of_prompt:
            del self._own[id_], self._prompts[id_]
            self._writer.write(completion)
            self.kept += 1
            return
        waiting = self._waiting.setdefault(id_, [])
        waiting.append(completion)
        if len(waiting) < self._own[id_]:
            return
        del self._waiting[id_], self._own[id_]
        kept = self._best_of(id_, sorted(waiting, key=lambda one: one.sample))
        self.dropped += len(waiting) - len(kept)
        there = self._there.get(id_, set())
        new = [one for one in kept if one.sample not in there]
        # In number formats with rounding, the samples that are drawn again may differ a little, and
        # so may their ranks. No more than the wanted number is written all the same.
        new = sorted(new, key=lambda one: one.rank or 0)[: max(len(kept) - len(there), 0)]
        self._writer.write_samples(sorted(new, key=lambda one: one.sample))
        self.kept += len(new)

    def _best_of(self, id_: str, samples: list[Completion]) -> list[Completion]:
        """Return the samples that are kept, in the order of their numbers."""
        prompt = self._prompts.pop(id_)
        every = [
            candidate_of(prompt, one.sample, one.text, one.finish_reason, one.mean_logprob)
            for one in samples
        ]
        members = Members.of(id_, prompt, every)
        (scores,) = self._ranker.scores([members.group])
        standings = dict(standings_of(members, self._name, {self._name: scores}))
        return [
            replace(one, rank=standings[one.sample].rank, scores=dict(standings[one.sample].scores))
            for one in samples
            if standings[one.sample].rank <= self._best
        ]

    def describe(self) -> str:
        """Return how many samples were dropped, in a sentence."""
        kept = "the best sample" if self._best == 1 else f"the {self._best} best samples"
        verb = "is" if self._best == 1 else "are"
        return (
            f"{self.dropped} samples were dropped; {kept} of each prompt by {self._name} {verb} "
            "kept"
        )

    def add_run(self, seconds: float, usage: dict[str, Any]) -> None:
        """Add this run's seconds to the totals of the manifest."""
        self._writer.add_run(seconds, usage)

    def confirm(self) -> None:
        """Raise MachineError if the file was renamed, replaced or truncated."""
        self._writer.confirm()
