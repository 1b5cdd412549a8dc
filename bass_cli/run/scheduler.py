"""Which samples get rows, and when they end.

Prompts become requests, requests get rows, rows become finished samples.

`RequestReader` tokenises prompts, `Conductor` gives rows to samples, `Watch` finds their ends, and
`Unfinished` knows what a restarted job still has to draw. Not here: rounds (engine/loop.py), files
(io/).
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy

from bass_cli.config.job import Job, Sampling
from bass_cli.engine.batch import Row
from bass_cli.engine.contracts import PendingWork, RoundResult
from bass_cli.engine.forecast import Forecast
from bass_cli.engine.host_state import BROKEN, LENGTH, LIMIT, PROMPT, HostState
from bass_cli.engine.loop import Loop
from bass_cli.errors import UserError
from bass_cli.formats.continuation import Continuation, StopDetector, StopTokens
from bass_cli.formats.tokenizer import Tokenizer
from bass_cli.io.completion import Completion
from bass_cli.io.prompts import Prompt
from bass_cli.models.prefill import PASS


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


@dataclass(slots=True, eq=False)
class Task:
    """A prompt under way: when it began, when it must end, the samples that still wait for a
    row, how many have one (`live`), and whether any has had a round. `reference`: tokens that
    drafts may be looked up in. `text`: decodes what follows the prompt. `limit`: tokens of a
    sample."""

    prompt: Prompt
    tokens: list[int]
    reference: list[int]
    text: Continuation
    limit: int
    waiting: deque[int]
    began: float
    deadline: float | None
    live: int = 0
    started: bool = False

    def row(self, sample: int, sampling: Sampling) -> Row:
        """A new row for one of its samples."""
        return Row(
            self.prompt.id,
            sample,
            sampling.seed,
            self.tokens,
            self.limit,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )


class RequestReader:
    """Makes Tasks of a job's prompts. `context`: the most positions the target knows."""

    def __init__(self, job: Job, tokenizer: Tokenizer, *, context: int):
        self._job, self._tokenizer, self._context = job, tokenizer, context

    def take(self, prompt: Prompt, samples: Iterable[int], *, now: float) -> Task:
        """The prompt's clock starts now; UserError if it cannot be run."""
        if prompt.fault is not None:
            raise UserError(prompt.fault)
        tokens, reference = self._encode(prompt), self._reference(prompt)
        if len(tokens) >= self._context:
            raise UserError(
                f"the prompt has {len(tokens)} tokens, the model's context {self._context}"
            )
        return Task(
            prompt,
            tokens,
            reference,
            Continuation(self._tokenizer, tokens),
            min(self._job.sampling.max_new_tokens, self._context - len(tokens)),
            deque(samples),
            now,
            None if self._job.budget is None else now + self._job.budget,
        )

    def _reference(self, prompt: Prompt) -> list[int]:
        """More than the context would take minutes to tokenise, and to index."""
        if not prompt.reference:
            return []
        try:
            return self._tokenizer.encode_part(prompt.reference, self._context)
        except UserError as error:
            raise UserError(f'field "reference": {error}') from None

    def _encode(self, prompt: Prompt) -> list[int]:
        messages = prompt.messages
        if messages is None and self._job.chat:
            messages = [{"role": "user", "content": prompt.text}]
        if messages is not None and self._job.chat is False:
            raise UserError(f"{prompt.place}: the prompt has messages, but --no-chat was given")
        tokens = (
            self._tokenizer.encode(prompt.text or "", self._context)
            if messages is None
            else self._tokenizer.encode_chat(messages, self._context)
        )
        if not tokens:
            raise UserError(f"{prompt.place}: the prompt has no tokens")
        return tokens


_UNSOUND = (
    "the target's logits for token {} are not finite: its weights are broken, or its values too "
    "large for the dtype (bf16 and fp32 hold more than fp16)"
)


class Watch:
    """Finds the rows that a round may have ended, with a few operations on the round's tokens.

    eos: ids that end a sample because the model ends there.
    stop_ids: ids that end it because a stop text is that token (`special_stops`).
    """

    def __init__(self, eos: Collection[int], stops: Sequence[str], stop_ids: Collection[int] = ()):
        self.eos, self._stops = frozenset(eos), stops
        self.stop_ids = frozenset(stop_ids) - self.eos
        self._tokens: StopTokens | None = None  # from the first prompt on

    def detector(self, text: Continuation) -> StopDetector | None:
        """For one sample of a prompt."""
        if not self._stops:
            return None
        if self._tokens is None:
            self._tokens = StopTokens(text, self._stops)
        return StopDetector(text, self._stops, self._tokens)

    def suspects(self, host_state: HostState) -> list[int]:
        """The places of live rows that may be over, after a round."""
        places, block, counts = host_state.news
        ends = numpy.zeros(block.shape, dtype=bool)
        for id_ in self.eos | self.stop_ids:
            ends |= block == id_
        if self._tokens is not None:
            ends |= self._tokens.among(block)
        ends &= numpy.arange(block.shape[1]) < counts[:, None]
        of_row = host_state.numbers[places]
        full = of_row[:, LENGTH] - of_row[:, PROMPT] >= of_row[:, LIMIT]
        found: list[int] = places[ends.any(1) | full | (of_row[:, BROKEN] >= 0)].tolist()
        return found


class Ending(NamedTuple):
    """Why a sample is over, and its text where that is known: a stop string's, which is cut."""

    reason: str
    text: str | None = None


@dataclass(slots=True, eq=False)
class Sample:
    """A live row's sample. `stops`: looks for stop strings, if there are any; `seen`: generated
    tokens already looked at."""

    task: Task
    row: Row
    stops: StopDetector | None
    seen: int = 0

    def look(self, eos: Collection[int], stop_ids: Collection[int] = ()) -> Ending | None:
        """Cut a finished row to the tokens that count and return its end; None while it goes on.

        The token that ends a row counts: the end-of-sequence token, a special token that is a
        stop text, the token that completes a stop text. `eos`, `stop_ids`: see Watch.
        """
        row = self.row
        numbers, new = row.numbers(), row.since(self.seen)
        limit, broken = numbers[LIMIT], numbers[BROKEN]
        sound = len(new) if broken < 0 else broken - self.seen
        keep, reason = min(sound, limit - self.seen), None if broken < 0 else "error"
        if self.seen + keep == limit:
            reason = "length"
        ends = (i for i, token in enumerate(new[:keep]) if token in eos or token in stop_ids)
        end = next(ends, None)
        if end is not None:
            keep, reason = end + 1, "eos" if new[end] in eos else "stop"
        if self.stops is not None:
            found = self.stops.feed(new[:keep])
            if found is not None:
                row.cut(found.tokens)
                return Ending("stop", found.text)
        if keep < len(new):
            row.cut(self.seen + keep)
        self.seen += keep
        return None if reason is None else Ending(reason)


class FinishedSample(NamedTuple):
    """A sample that is over and whose line is due: of which prompt, the row it had (None: it has
    no tokens), why it ended and when, in the clock's seconds."""

    task: Task
    sample: int
    row: Row | None
    ending: Ending
    now: float

    def completion(self, *, seed: int, ids: bool) -> Completion:
        """Its line; `ids`: with token ids."""
        task, row, ending = self.task, self.row, self.ending
        tokens, scores = ([], []) if row is None else (row.generated_tokens, row.log_probabilities)
        total = math.fsum(scores)
        return Completion(
            id=task.prompt.id,
            sample=self.sample,
            text=task.text.decode(tokens) if ending.text is None else ending.text,
            finish_reason=ending.reason,
            tokens=len(scores),
            mean_logprob=total / len(scores) if scores else None,
            sum_logprob=total if scores else None,
            seconds=self.now - task.began,
            rounds=row.rounds if row else 0,
            drafted=row.drafted if row else 0,
            accepted=row.accepted if row else 0,
            seed=seed,
            prompt_tokens=len(task.tokens),
            meta=task.prompt.meta,
            token_ids=list(tokens) if ids else None,
            error=_UNSOUND.format(len(scores) + 1) if ending.reason == "error" else None,
        )


class WholePrompts:
    """What is done where one sample stands for all n of a prompt: sample 0 if all of them are in
    `done`."""

    def __init__(self, done: Container[tuple[str, int]], n: int):
        self._done, self._n = done, n

    def __contains__(self, key: Any) -> bool:
        return all((key[0], sample) in self._done for sample in range(self._n))


def with_copies(
    drawn: Iterator[Completion], n: int, done: Container[tuple[str, int]]
) -> Iterator[Completion]:
    """Samples 0 to n - 1 of every prompt, but those in `done`, where sample 0 was drawn. A
    failure stays one line."""
    for completion in drawn:
        if completion.is_of_prompt:
            yield completion
            continue
        for sample in range(n):
            if (completion.id, sample) not in done:
                yield completion if sample == 0 else completion.copied(sample)


class Conductor:
    """Feeds prompts to a loop and takes finished rows from it: for one job, on one loop.

    `context`: the most positions the target knows; `eos_ids`, `stop_ids`: the tokens that end a
    sample, as the model's end and as a stop;
    `count`: prompts, if that is known, by which the end of the job is foreseen; `on_round` is
    told of every round, with the rows that there are places for as its `capacity`.
    """

    def __init__(
        self,
        job: Job,
        tokenizer: Tokenizer,
        loop: Loop,
        *,
        context: int,
        eos_ids: Collection[int],
        stop_ids: Collection[int] = (),
        count: int | None = None,
        on_round: Callable[[RoundResult], None] | None = None,
    ):
        self._job, self._loop, self._on_round = job, loop, on_round
        self._intake = RequestReader(job, tokenizer, context=context)
        self._watch = Watch(eos_ids, job.sampling.stop, stop_ids)
        # With a budget, prompts run one at a time unless a batch size was asked for. Under
        # maximal coupling they always do, and each begins anew, or how far the clock let one
        # prompt come would reach the draft lengths of others, and so their samples.
        maximal = job.speculation.coupling == "maximal"
        self._alone = job.budget is not None and (job.batch_size == "auto" or maximal)
        self._fresh = copy.deepcopy(loop.lengths) if job.budget is not None and maximal else None
        self._tasks: dict[Task, None] = {}  # under way, in the order in which they came
        self._queue: deque[Task] = deque()  # those with samples that wait for a row
        self._waiting = 0  # so many samples
        self._crowded = False  # a row was put back, and none has ended since
        self._live: dict[Row, Sample] = {}
        self._over: list[int] = []  # the places of rows that have ended, and are not given up yet
        self._due = deque[FinishedSample | Completion]()  # what is over and was not yielded
        self._forecast, self._ended = Forecast(None if count is None else count * job.n), False

    def run(
        self, prompts: Iterator[Prompt | None], done: Container[tuple[str, int]]
    ) -> Iterator[Completion]:
        """Every sample of every prompt that is not in `done`, in the order in which they end.

        Prompts are taken as rows become free; a None among them says that there is none now, and
        they are asked again after the next round. One that cannot be used yields a Completion with
        finish_reason "error". Lines of samples that are over are made, and the caller writes them,
        while the device runs the next round. What breaks a job off, an interruption too, is
        raised after them.
        """
        try:
            while not self._ended or self._queue or self._live:
                self._exchange()  # before others come, so that prompts without rows make place
                self._take(prompts, done)
                self._exchange()
                self._expire()
                self._grow()
                if self._live:
                    self._loop.launch(self._soonest(), pending_work=self._pending_work())
                yield from self._finished()
                if self._live:
                    self._round()
                    self._collect()
            self._exchange()
        except GeneratorExit:
            raise
        except BaseException:
            yield from self._finished()
            raise
        yield from self._finished()

    def _take(self, prompts: Iterator[Prompt | None], done: Container[tuple[str, int]]) -> None:
        """Open prompts for free rows; and where nobody's clock runs, those that go into a pass
        that has to be made anyway, if they are as long as the last one, for as many rows more as
        there are."""
        tokens, last, most = 0, 0, PASS if self._job.budget is None else 0
        while not self._ended and self._wants_prompt(more=0 < tokens <= most - last):
            prompt, self._ended = next(((one, False) for one in prompts), (None, True))
            if prompt is None:
                return
            last = self._begin(prompt, done)
            tokens += last

    def _wants_prompt(self, *, more: bool) -> bool:
        room = self._room() + (self._loop.batch.capacity if more else 0)
        return self._waiting < room and not (self._alone and self._tasks)

    def _begin(self, prompt: Prompt, done: Container[tuple[str, int]]) -> int:
        """Tokenise a prompt and open it; its tokens. An unusable one ends here, with an error."""
        waiting = [i for i in range(self._job.n) if (prompt.id, i) not in done]
        self._forecast.begin(self._job.n)
        if not waiting:
            return 0
        try:
            task = self._intake.take(prompt, waiting, now=self._loop.clock.now())
        except UserError as error:
            seed = self._job.sampling.seed
            self._due.append(Completion.failed(prompt.id, str(error), seed=seed, meta=prompt.meta))
            return 0
        if self._fresh is not None:
            self._loop.restart(copy.deepcopy(self._fresh))
        if self._loop.open(prompt.id, task.tokens, task.reference, deadline=task.deadline):
            self._tasks[task] = None
            self._queue.append(task)
            self._waiting += len(task.waiting)
        else:
            self._leave_out(task)
        return len(task.tokens)

    def _exchange(self) -> None:
        """Give free rows, and those of samples that are over, to waiting samples, oldest prompt
        first."""
        rows, room = list[Row](), self._room() if self._queue else 0
        while self._queue and len(rows) < room:
            task = self._queue[0]
            count = min(len(task.waiting), room - len(rows))
            rows += (self._row(task, task.waiting.popleft()) for _ in range(count))
            if not task.waiting:
                self._queue.popleft()
        if rows or self._over:
            self._loop.swap_rows(self._over, rows)
        self._waiting -= len(rows)
        self._over = []

    def _room(self) -> int:
        """How many rows more there is place for: none after a row was put back, until another
        one has ended."""
        batch, limit = self._loop.batch, self._job.sampling.max_new_tokens
        if self._crowded and self._live:
            return 0
        generated = int(batch.generated().sum())
        return batch.room(self._forecast.becomes(limit, generated), ended=self._over)

    def _grow(self) -> None:
        """Rows that are put back wait again, before all others, and are drawn from the
        beginning."""
        for row in self._loop.grow():
            sample = self._live.pop(row)
            task = sample.task
            if not task.waiting:
                self._queue.appendleft(task)
            task.waiting.appendleft(row.sample)
            task.live -= 1
            self._waiting += 1
            self._crowded = True

    def _row(self, task: Task, sample: int) -> Row:
        row = task.row(sample, self._job.sampling)
        self._live[row] = Sample(task, row, self._watch.detector(task.text))
        task.live += 1
        return row

    def _pending_work(self) -> PendingWork:
        waiting, typical = self._waiting, math.inf
        if self._fresh is None:
            typical = self._forecast.length(float(self._loop.batch.generated().mean()))
            waiting = self._forecast.waiting(waiting, ended=self._ended)
        return PendingWork(waiting * min(typical, self._job.sampling.max_new_tokens), typical)

    def _round(self) -> None:
        done = self._loop.round(self._soonest(), pending_work=self._pending_work(), ahead=True)
        if self._job.budget is not None and not all(task.started for task in self._tasks):
            for row, sample in self._live.items():
                sample.task.started |= row.rounds > 0
        if self._on_round is not None:
            self._on_round(done._replace(capacity=self._loop.batch.capacity))

    def _soonest(self) -> float | None:
        """The deadline that comes first, by which the next round is to end."""
        deadlines = (task.deadline for task in self._tasks if task.deadline is not None)
        return min(deadlines, default=None)

    def _expire(self) -> None:
        """End all samples of prompts whose deadline has come, or would pass within even the
        shortest round; but the first round is not left out because of a prediction, for no other
        one might ever correct it. A round that is under way is taken in before: it was launched
        to be over in time."""
        deadlines = [task.deadline for task in self._tasks if task.deadline is not None]
        if not deadlines or self._loop.under_way:
            return
        now, hosts = self._loop.clock.now(), self._loop.batch.hosts
        soonest = now + (self._loop.shortest(min(deadlines)) if self._live else 0.0)
        for task in [
            t
            for t in self._tasks
            if t.deadline is not None
            and (now >= t.deadline or (t.started and soonest > t.deadline))
        ]:
            live = [sample for sample in map(self._live.get, hosts) if sample]
            for one in live:
                if one.task is task:
                    self._end(one, Ending("budget"))
            if task.waiting:
                self._leave_out(task)
                self._waiting -= len(task.waiting)
                task.waiting.clear()
                self._queue.remove(task)
                self._forget(task)
        if self._over:
            self._loop.retire(*self._over)
            self._over = []

    def _collect(self) -> None:
        """Look at the rows that the round may have ended; cut and end those that are done."""
        hosts = self._loop.batch.hosts
        for place in self._watch.suspects(self._loop.batch.host_state):
            sample = self._live[hosts[place]]
            ending = sample.look(self._watch.eos, self._watch.stop_ids)
            if ending is not None:
                self._end(sample, ending)

    def _end(self, sample: Sample, ending: Ending) -> None:
        """The row is given up with all others that end now."""
        row, task = sample.row, sample.task
        self._over.append(row.place)
        self._crowded = False
        self._forecast.end(row.generated)
        del self._live[row]
        task.live -= 1
        self._forget(task)
        self._due.append(FinishedSample(task, row.sample, row, ending, self._loop.clock.now()))

    def _leave_out(self, task: Task) -> None:
        """Its waiting samples had no time for a token."""
        now = self._loop.clock.now()
        self._due += (
            FinishedSample(task, sample, None, Ending("budget"), now) for sample in task.waiting
        )

    def _forget(self, task: Task) -> None:
        """Until all its samples are over a prompt may need another row."""
        if not task.waiting and not task.live and task in self._tasks:
            del self._tasks[task]
            self._loop.close(task.prompt.id)

    def _finished(self) -> Iterator[Completion]:
        """What is over, in the order in which it ended."""
        seed, ids = self._job.sampling.seed, self._job.token_ids
        while self._due:
            one = self._due[0]  # until it is there: an interruption may come in between
            done = one if isinstance(one, Completion) else one.completion(seed=seed, ids=ids)
            self._due.popleft()
            yield done
