"""A decoder that drafts token by token: a small model, or the target with layers skipped. Its cache
repairs itself.

The first step of a round feeds each row's last two tokens: after full acceptance the cache lacks
the last draft, and otherwise feeding it again only writes the same key. Rounds without drafts leave
the cache behind; `catch_up` feeds what else it lacks. Not here: a model that makes all drafts in
one pass (parallel.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy
from torch import Tensor

from bass_cli.drafts.sampling import propose_chain
from bass_cli.engine.batch import Batch, Change
from bass_cli.engine.contracts import Drafter, InTime, Proposal
from bass_cli.tensor_parallel.leader import AnyRunner


class ModelRows(Drafter):
    """The prompts and rows of a drafter with a model, and how far its cache reaches.

    Args:
        runner: the model, with 2 pending tokens.
        coupling: "shared" or "maximal".
        temperature: replaces the rows' own temperatures, unless theirs is 0.
    """

    catches_up = True

    def __init__(self, runner: AnyRunner, *, coupling: str, temperature: float | None = None):
        assert runner.lag == 2
        self._runner, self._coupling, self._temperature = runner, coupling, temperature
        # By row: positions in the cache, those of rejected drafts included.
        self._fed = numpy.zeros(runner.rows, dtype=numpy.int64)

    def prepare_prompts(self) -> None:
        self._runner.prepare_prompts()

    @property
    def version(self) -> int:
        return self._runner.version

    def open(
        self,
        key: str,
        tokens: Sequence[int],
        reference: Sequence[int] = (),
        in_time: InTime | None = None,
    ) -> bool:
        return self._runner.open(key, tokens, in_time)

    def close(self, key: str) -> None:
        self._runner.close(key)

    def follow(self, change: Change) -> None:
        self._runner.follow(change)
        for source, target in change.moved:
            self._fed[target] = self._fed[source]
        for places, _ in change.begun:
            self._fed[list(places)] = self._runner.cache.base(places[0])

    def catch_up(self, batch: Batch, behind: Tensor, count: int) -> None:
        tokens, positions = batch.last(count, self._runner.cache.bases(batch.rows), behind=behind)
        self._runner.feed(tokens, positions, batch.ends(-2))


class ModelDrafter(ModelRows):
    """Draft token by token: k drafts take k passes.

    Args:
        factor: of the rows' temperatures, unless `temperature` replaces them.
    """

    stops_short = True

    def __init__(
        self,
        runner: AnyRunner,
        *,
        coupling: str,
        temperature: float | None = None,
        factor: float = 1.0,
    ):
        super().__init__(runner, coupling=coupling, temperature=temperature)
        self._factor = factor

    def expect(self, batch: Batch, length: int) -> int:
        ends = batch.known()
        fed = self._fed[: len(ends)]
        # Positions beyond a row's end held rejected drafts. From now on they hold tokens that the
        # cache lacks, whether this round drafts or not.
        fed[:] = numpy.minimum(fed, ends - 1)
        if length == 0:
            return 0
        missing = int((ends - fed).max()) - 2
        fed[:] = ends + length - 1
        return max(missing, 0)

    def reaches(self, before: int, length: int) -> bool:
        return not length or before > 0

    def propose(self, batch: Batch, length: int) -> Proposal:
        return self._propose(batch, length, None)

    def propose_while(
        self, batch: Batch, length: int, goes_on: Callable[[Tensor], bool]
    ) -> Proposal:
        """See Drafter.propose_while. Shared coupling only."""
        assert self._coupling == "shared"
        return self._propose(batch, length, goes_on)

    def _propose(
        self, batch: Batch, length: int, goes_on: Callable[[Tensor], bool] | None
    ) -> Proposal:
        if length == 0:
            return Proposal(batch.tokens.new_zeros(batch.rows, 0), None)
        params = batch.params.at(self._temperature, self._factor)
        lengths = batch.lengths[: batch.rows]
        # Step by step, so that each line is contiguous.
        places = lengths + batch.steps(0, length)[:, None]
        first = batch.last(2, self._runner.cache.bases(batch.rows))

        def logits_of(step: int, last: Tensor | None) -> Tensor:
            fed = first if last is None else (last[:, None], places[step - 1][:, None])
            return self._runner.forward(*fed, batch.ends(step), last=1)[:, 0]

        found = propose_chain(
            logits_of, places, params, lengths, coupling=self._coupling, goes_on=goes_on
        )
        self._fed -= length - found.tokens.shape[1]  # `expect` has counted all of them
        return found
