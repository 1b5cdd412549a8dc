"""The resident engine: it loads a job's models once and draws samples for any number of calls.

Commands, Ray's workers and the library's `generate` draw through it too. If memory runs out, a new
loop with half the rows draws the unfinished samples. scheduler.py assigns rows; build.py builds
loops; plan.py and memory.py plan the memory.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import functools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NoReturn, TypeVar

from pydantic import ValidationError

from bass_cli.config.file_options import merged
from bass_cli.config.job import Job
from bass_cli.config.line import SettingError, checked_settings
from bass_cli.config.sampling import Sampling
from bass_cli.config.validation import first_fault
from bass_cli.engine.contracts import RoundResult
from bass_cli.engine.loop import Loop
from bass_cli.errors import UserError
from bass_cli.io.prompts import Prompt, check, prompts_for, prompts_of
from bass_cli.io.results import Completion
from bass_cli.lengths.surface import keep_learnt
from bass_cli.reading import shown
from bass_cli.run.build import READING, Models, halved, load_models, ready_loop
from bass_cli.run.logprobs import COLUMN, score_text
from bass_cli.run.plan import Plan
from bass_cli.run.requests import (
    EngineCall,
    Piece,
    PromptFeed,
    Request,
    check_prompts_kind,
    checked_list,
    first_prompts,
    plan_of,
)
from bass_cli.run.scheduler import Scheduler
from bass_cli.run.tasks import EndRule, TaskBuilder
from bass_cli.run.updates import NewWeights, Updated, Updates
from bass_cli.system.host import is_refused_memory

T = TypeVar("T")
Prompts = Iterable[str | Mapping[str, Any] | Prompt]
_LOG = logging.getLogger("bass")
_ELSEWHERE = "cannot go to another process; make an Engine of the same Job there"
_NOT_YET = object()  # of Engine._advance: no result yet


class Engine:
    """The loaded models of a job, which draws samples for any number of requests.

        with Engine(Job(pair="smollm2")) as engine:
            for sample in engine.generate(["The capital of France is"], n=8):
                print(sample.text)

    A thread of its own runs the rounds, so a call returns at once and several calls share the
    batch. Calls may come from any thread. A sample depends on its seed, its prompt's id and tokens
    and its number, so it is the same alone and beside others. Under maximal coupling, where samples
    depend on the rows beside them, requests run one after the other.

    Args:
        job: The models, the machine and the defaults of the samples. Its `n`, `limit` and
            `sampling` hold for calls without their own; its `max_new_tokens` is the most that a
            call may ask for. Or the plan of a job.
        lazy: Load the models when they are first needed, not now.
        loop: An empty loop to use instead of loading models.
        on_round: Called after every round.
        on_phase: Called with the name of each phase before the rounds.
        on_bytes: Called with the bytes of weights that are read, and the bytes in all.
        on_note: Called with notes to the user, such as that memory ran out and fewer rows are used.

    Raises:
        UserError: The job has a mistake.
        MachineError: The machine lacks memory, a device or a package.
    """

    def __init__(
        self,
        job: Job | Plan,
        *,
        lazy: bool = False,
        loop: Loop | None = None,
        on_round: Callable[[RoundResult], None] | None = None,
        on_phase: Callable[[str], None] = lambda name: None,
        on_bytes: Callable[[int, int], None] = lambda done, whole: None,
        on_note: Callable[[str], None] = _LOG.warning,
    ):
        self.plan = plan = plan_of(job)
        self._on_phase, self._on_bytes, self._on_note = on_phase, on_bytes, on_note
        self._scheduler = Scheduler(
            TaskBuilder.of(
                plan, max_new_tokens=plan.max_new_tokens, tags=plan.tags, on_note=on_note
            ),
            EndRule(plan.eos_ids, plan.job.sampling.stop, plan.stop_ids),
            on_round=on_round,
            on_results=self._wake_callers,
        )
        self._given_loop = loop
        self._models: Models | None = None
        self._resident = not lazy  # many requests follow; a job draws with a lazy engine
        self._has_loop = False  # whether the scheduler has a loop
        self._thread: threading.Thread | None = None
        self._process: int | None = None  # id of the one that has the models and the thread
        self._start_lock = threading.Lock()  # two first calls may come at once
        self._stopping = self._closed = False
        self._error: BaseException | None = None
        # Notified after every change that a caller or the engine's thread may wait for. It also
        # guards the fields below.
        self._changed = threading.Condition()
        self._thread_calls = deque[Callable[[], None]]()  # for the thread, before its next round
        self._async_wakers = list[Callable[[], None]]()  # of async callers that wait for a change
        if not lazy:
            try:
                self._load()
                self._step_or_halve(lambda: None)
            except BaseException:
                self.close()
                raise

    def generate(
        self, prompts: Prompts, *, n: int | None = None, sampling: Sampling | None = None
    ) -> Results[Completion]:
        """Draw samples of prompts; iterate over the results with `for` or `async for`.

        A list is checked at the call, and its samples are drawn without waiting for the iteration.
        Prompts of another iterable are read by the iteration, as rows become free, so it may be
        endless.
        Closing the results, or dropping them, cancels the samples that are left.

        Args:
            prompts: Texts, or mappings like the lines of a prompt file. Those without an id are
                numbered, from 0 at each call.
            n: Samples of each prompt. Default: the job's.
            sampling: Its fields that are set replace the job's.

        Raises:
            UserError: A prompt or setting has a mistake, or the engine is closed.
        """
        return self._submit(prompts, n, sampling, streams=False)

    def stream(
        self, prompts: Prompts, *, n: int | None = None, sampling: Sampling | None = None
    ) -> Results[Piece]:
        """Draw samples of prompts, and get their text piece by piece, as it comes.

        The arguments are those of `generate`; see Piece for what is held back.
        """
        return self._submit(prompts, n, sampling, streams=True)

    def draw(
        self,
        prompts: Iterator[Prompt | None],
        done: Container[tuple[str, int]] = (),
        count: int | None = None,
    ) -> Iterator[Completion]:
        """Yield samples 0 to n - 1 of every prompt, except those in `done`, then close the engine.

        The rounds run in the caller's thread, between two results, and the callbacks are called
        there. Under maximal coupling the samples in `done` are drawn again but not yielded.

        Args:
            prompts, done, count: See Request.
        """
        assert self._thread is None
        together = self.plan.draws_together
        request = Request(self.plan.job, prompts, done, redraws=together, count=count)
        try:
            self._load()
            self._scheduler.add(request)
            step = functools.partial(self._step_or_halve, self._scheduler.step)
            with self.plan.memory_need.explained():  # also errors of the caller's prompts
                for one in self._scheduler.results(request, step):
                    if not together or (one.id, one.sample) not in done:
                        yield one
        finally:
            self.close()

    def update_weights(self, weights: NewWeights, model: Updated = "target") -> None:
        """Write new weights into the target or the draft, in place.

        It waits for the requests before it. Those after it wait for it and get samples of the new
        weights. An iterable is read in the engine's thread. `fingerprint` changes.

        Args:
            weights, model: See Updates.update.

        Raises:
            UserError: See Updates.update.
        """
        if self._given_loop is not None:
            raise UserError("an engine that was given a loop has no models to update")

        def write(models: Models, loop: Loop) -> None:
            updates = Updates(models, self.plan.files)
            try:
                updates.update(weights, model)
            finally:
                self.plan = dataclasses.replace(self.plan, files=updates.files)

        self.run_alone(write)

    @property
    def fingerprint(self) -> str:
        """Identifies the target's weights. A result file is only continued with the same ones: see
        `target_files` in its manifest."""
        return self.plan.files.target.fingerprint()

    def score(
        self, prompt: str | Mapping[str, Any], completion: str | Sequence[int], *, logprobs: int = 0
    ) -> Completion:
        """Return the target's log-probabilities of a given completion, as bass_cli.score does.

        It runs between two rounds of the requests in progress, and does not change their samples.

        Args:
            prompt: A text, or a mapping like a line of a prompt file.
            completion: A text, or token ids.
            logprobs: How many likeliest tokens are listed for each place.

        Raises:
            UserError: The text has a mistake or is too long, or the engine is closed.
        """
        text = _text_to_score(prompt, completion, self.plan.job.prompt_column)
        try:
            checked_settings({"logprobs": logprobs})
        except SettingError as error:
            raise UserError(f"`logprobs`: {error}") from None

        def run() -> None:
            self._step_or_halve(lambda: None)  # the loop may have to be made
            call.run()
            self._wake_callers()

        call = EngineCall(
            lambda: score_text(text, self.plan, self._scheduler.loop.target, top=logprobs)
        )
        self._start()
        self._call_in_thread(run)
        scored: Completion = self._wait_for(call)
        return scored

    def run_alone(self, work: Callable[[Models, Loop], T]) -> T:
        """Call a function with the models and the loop while no request is in progress.

        It waits for the requests before it; those after it wait for it. It runs in the engine's
        thread. Its exception is raised here.
        """

        def run() -> T:
            assert self._models is not None
            return work(self._models, self._scheduler.loop)

        call = EngineCall(run)
        self._add(call)
        value: T = self._wait_for(call)
        return value

    def close(self) -> None:
        """End the requests in progress, and free the models. Their results raise UserError.

        The round that is running ends first. Calling it again does nothing. An ordinary end of
        Python closes an engine too.
        """
        if self._is_copy():
            return
        if threading.main_thread().is_alive():  # otherwise Python is ending, and may call this
            atexit.unregister(self.close)
        with self._changed:
            self._stopping = True
        self._wake_callers()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if self._closed:
            return
        self._closed = True
        if self._has_loop:
            keep_learnt(self.plan.profile, self._scheduler.loop.controller)
        if self._models is not None:
            self._models.close()
            self._models = None
        self._scheduler.stop()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"an Engine {_ELSEWHERE}")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Methods before `_run_rounds` run in the callers' threads. `_run_rounds` and those after it run
    # in the engine's thread; in the caller's for `draw`, which has no such thread.

    def _submit(
        self, prompts: Prompts, n: int | None, sampling: Sampling | None, *, streams: bool
    ) -> Results[Any]:
        check_prompts_kind(prompts)
        job = _job_of_call(self.plan, n, sampling)
        prompts, feed = first_prompts(prompts, job.limit), None
        if isinstance(prompts, Sequence):
            every, known = checked_list(prompts, job)
            request = Request(job, iter(every), count=known.count, streams=streams)
        else:
            named = prompts_for(job, prompts)
            feed = PromptFeed(named, -(-self.plan.rows // job.n), self._wake_callers)
            request = Request(job, feed, streams=streams)
        self._add(request)
        return Results(self, request, feed)

    def _add(self, request: Request | EngineCall) -> None:
        """Add a request, for the thread."""
        self._start()
        self._call_in_thread(lambda: self._scheduler.add(request))

    def _start(self) -> None:
        """Start the thread at the first call."""
        self._refuse_copy()
        with self._start_lock:
            if self._thread is None and not self._stopping:
                self._load()
                self._thread = threading.Thread(
                    target=self._run_rounds, daemon=True, name="bass engine"
                )
                self._thread.start()
                # Python would end the thread inside torch, which aborts the process
                atexit.register(self.close)

    def _is_copy(self) -> bool:
        """Whether this is a copy in a forked process, which shares the pipes of a split model."""
        return self._process not in (None, os.getpid())

    def _refuse_copy(self) -> None:
        if self._is_copy():
            raise UserError(f"this engine {_ELSEWHERE}")

    def _load(self) -> None:
        """Load the models, unless a loop was given."""
        if self._models is None and self._given_loop is None:
            self._on_phase("loading the weights")
            with self.plan.memory_need.explained():
                self._models = load_models(self.plan, self._on_bytes)
        self._process = os.getpid()

    def _call_in_thread(self, work: Callable[[], None]) -> None:
        """Let the engine's thread call a function before its next round."""
        with self._changed:
            if self._stopping:
                raise self._closed_error()
            self._thread_calls.append(work)
            self._changed.notify_all()

    def _wait_for(self, call: EngineCall) -> Any:
        """Wait for a call, and return its value or raise its exception."""
        with self._changed:
            self._changed.wait_for(lambda: call.done or self._stopping)
        if call.error is not None:
            raise call.error
        if not call.done:
            raise self._closed_error()
        return call.value

    def _next_result(self, request: Request, feed: PromptFeed | None) -> Any | None:
        """Return the next result of a request; None after the last one."""
        self._start()  # refuses a copy
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._can_advance(request, feed))
            if (result := self._advance(request, feed)) is not _NOT_YET:
                return result

    async def _next_result_async(self, request: Request, feed: PromptFeed | None) -> Any | None:
        """Do `_next_result` without blocking the event loop."""
        self._start()  # refuses a copy
        loop = asyncio.get_running_loop()
        while True:
            woken = loop.create_future()

            def wake(woken: asyncio.Future[None] = woken) -> None:
                loop.call_soon_threadsafe(_set_result, woken)

            with self._changed:
                if not self._can_advance(request, feed):
                    self._async_wakers.append(wake)
                else:
                    _set_result(woken)
            await woken
            if (result := self._advance(request, feed)) is not _NOT_YET:
                return result

    def _can_advance(self, request: Request, feed: PromptFeed | None) -> bool:
        """Return whether `_advance` need not wait."""
        wanted = feed is not None and feed.wanted
        return bool(request.results) or request.finished or self._stopping or wanted

    def _advance(self, request: Request, feed: PromptFeed | None) -> Any:
        """Read a prompt if the engine needs one, then return the next result.

        Returns:
            None after the last result; _NOT_YET if there is no result yet.
        """
        if feed is not None and feed.wanted and not request.finished:
            feed.read()
            self._call_in_thread(lambda: None)
        if request.results and not request.cancelled:
            with contextlib.suppress(IndexError):  # another thread took or cancelled it
                return request.results.popleft()
        if request.error is not None:
            raise request.error
        if request.finished:
            return None
        if self._stopping:
            raise self._closed_error()
        return _NOT_YET

    def _cancel(self, request: Request) -> None:
        """End a request."""
        if request.finished or self._is_copy():
            return
        request.cancelled = True
        request.results.clear()
        with self._changed:
            if not self._stopping:
                self._thread_calls.append(lambda: self._scheduler.cancel(request))
                self._changed.notify_all()

    def _closed_error(self) -> Exception:
        if self._error is None:
            return UserError("the engine is closed; make a new one")
        kind = type(self._error) if isinstance(self._error, UserError) else RuntimeError
        return kind(f"the engine failed: {self._error}")

    def _wake_callers(self) -> None:
        """Wake all callers that wait for results."""
        with self._changed:
            wakers, self._async_wakers = self._async_wakers, []
            self._changed.notify_all()
        for wake in wakers:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                wake()

    def _run_rounds(self) -> None:
        """Run rounds until the engine is closed."""
        scheduler = self._scheduler
        try:
            while True:
                with self._changed:
                    if scheduler.idle or scheduler.waits_for_prompt:
                        self._changed.wait_for(lambda: self._thread_calls or self._stopping)
                    if self._stopping:
                        return
                    calls, self._thread_calls = self._thread_calls, deque()
                for work in calls:
                    work()
                if not scheduler.idle:
                    self._step_or_halve(scheduler.step)
        except BaseException as error:  # raised for every caller
            self._error = error
            try:
                scheduler.deliver()
            finally:
                with self._changed:
                    self._stopping = True
                self._wake_callers()

    def _step_or_halve(self, step: Callable[[], None]) -> None:
        """Call `step` when the scheduler has a loop. If memory runs out, halve the rows and call it
        again, as long as that is possible."""
        self._refuse_copy()
        while True:
            with self.plan.memory_need.explained():
                try:
                    self._ensure_loop()
                    step()
                    return
                except Exception as error:
                    if not is_refused_memory(error) or not self._can_halve():
                        raise
            self._scheduler.stop()
            self._has_loop = False
            self.plan = halved(self.plan, self._on_note)

    def _ensure_loop(self) -> None:
        """Give the scheduler a loop over the models."""
        if not self._has_loop:
            loop = self._given_loop
            if loop is None:
                assert self._models is not None
                loop = ready_loop(self.plan, self._models, self._on_phase, self._on_note)
            if self._resident:
                loop.capture_early()
            self._on_phase(READING[self.plan.device.type])  # the first round ends this phase
            self._scheduler.resume(loop)
            self._has_loop = True

    def _can_halve(self) -> bool:
        """Whether the work can go on with fewer rows and the same samples."""
        shared = self.plan.job.speculation.coupling == "shared"
        whole = self._models is not None and self._models.followers is None
        return shared and self.plan.rows > 1 and whole and not self._scheduler.reading


class Results(Generic[T]):
    """The results of one request, in the order in which they come.

    Iterate with `for`, in any thread, or with `async for`. After the last result an error is
    raised if the request could not go on.
    """

    def __init__(self, engine: Engine, request: Request, feed: PromptFeed | None):
        self._engine, self._request, self._feed = engine, request, feed

    def __iter__(self) -> Results[T]:
        return self

    def __next__(self) -> T:
        try:
            result: T | None = self._engine._next_result(self._request, self._feed)
        except KeyboardInterrupt:  # a notebook would hold the results, and go on in the background
            self.close()
            raise
        if result is None:
            raise StopIteration
        return result

    def __aiter__(self) -> Results[T]:
        return self

    async def __anext__(self) -> T:
        result: T | None = await self._engine._next_result_async(self._request, self._feed)
        if result is None:
            raise StopAsyncIteration
        return result

    def close(self) -> None:
        """Cancel the samples that are left."""
        self._engine._cancel(self._request)

    async def aclose(self) -> None:
        """Cancel the samples that are left."""
        self.close()

    def __del__(self) -> None:
        self.close()


def _set_result(woken: asyncio.Future[None]) -> None:
    if not woken.done():  # it may be cancelled
        woken.set_result(None)


def _text_to_score(
    prompt: str | Mapping[str, Any], completion: str | Sequence[int], column: str
) -> Prompt:
    """Return the prompt with the completion that is scored. For the arguments see Engine.score."""
    fields = {column: prompt} if isinstance(prompt, str) else prompt
    if not isinstance(fields, Mapping):
        raise UserError(f"prompt: a text or a mapping is needed, not {shown(prompt)}")
    is_list = isinstance(completion, Iterable) and not isinstance(completion, str)
    listed = list(completion) if is_list else completion
    (text,) = prompts_of([{**fields, COLUMN: listed}], column=column)
    check([text])
    return text


def _job_of_call(plan: Plan, n: int | None, sampling: Sampling | None) -> Job:
    """Return the job with the settings of one call."""
    own = dict[str, Any](plan.job)
    if n is not None:
        own["n"] = n
    if sampling is not None:
        if not isinstance(sampling, Sampling):
            raise UserError(f"sampling: a Sampling is needed, not {shown(sampling)}")
        given = {name: getattr(sampling, name) for name in sampling.model_fields_set}
        own["sampling"] = merged(dict(plan.job.sampling), given)
    try:
        job = Job.model_validate(own)
    except ValidationError as error:
        path, reason = first_fault(error)
        raise UserError(f"`{'.'.join(path)}`: {reason}") from None
    if (tokens := job.sampling.max_new_tokens) > plan.max_new_tokens:
        raise UserError(
            f"`sampling.max_new_tokens`: {tokens} is more than the engine's batch has room for, "
            f"which is the {plan.max_new_tokens} of its job"
        )
    return job
