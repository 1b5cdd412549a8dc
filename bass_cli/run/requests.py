"""Requests: the prompts of one caller, and the results that wait for the caller.

scheduler.py fills the results; engine.py hands them out.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import (
    AsyncIterable,
    Callable,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import TYPE_CHECKING, Any, NamedTuple

from bass_cli.config.job import Job
from bass_cli.errors import UserError
from bass_cli.formats.sources import check_sources, files_of
from bass_cli.formats.tokenizer import Tokenizer, begin
from bass_cli.io.prompts import Checked, Prompt, check, prompts_for
from bass_cli.io.results import Completion
from bass_cli.reading import shown
from bass_cli.system.host import read_ahead
from bass_cli.system.threads import Note, configure_threads

if TYPE_CHECKING:
    from bass_cli.run.plan import Plan

_LOG = logging.getLogger("bass")


class Piece(NamedTuple):
    """New text of a sample.

    The texts of a sample's pieces, joined, are the text of its Completion. Text that may be the
    beginning of a stop text, or is an incomplete character, is held back until later tokens decide.
    (Only if a model writes bytes that are no text may the Completion have another text.)

    Args:
        id: The prompt's id.
        sample: The sample's number.
        text: The new text; it may be empty in the last piece.
        completion: The whole sample in its last piece, else None.
    """

    id: str
    sample: int
    text: str
    completion: Completion | None = None


class Request:
    """Prompts of one caller, with the settings of their samples.

    Args:
        job: The settings.
        prompts: Taken as rows become free. A None means that no prompt is ready yet.
        done: Samples (prompt id, number) that are not drawn.
        redraws: Samples depend on each other, so those in `done` are drawn again and yielded. With
            a budget, where prompts are independent, those of complete prompts are not.
        count: The number of prompts; None if unknown.
        streams: Whether results are Pieces.

    Attributes:
        results: The results that the caller has not taken yet.
        error: Why no further results come, although there are samples left.
        exhausted: Whether all prompts were taken.
        num_in_progress: Prompts in progress.
        delivered: Whether the last result was handed over.
        cancelled: Whether the caller wants no further results.
    """

    def __init__(
        self,
        job: Job,
        prompts: Iterator[Prompt | None],
        done: Container[tuple[str, int]] = (),
        *,
        redraws: bool = False,
        count: int | None = None,
        streams: bool = False,
    ):
        self.job, self.prompts, self.done, self.redraws = job, prompts, done, redraws
        self.count, self.streams = count, streams
        self.results: deque[Any] = deque()
        self.error: BaseException | None = None
        self.num_in_progress = 0
        self.exhausted = self.delivered = self.cancelled = False

    @property
    def finished(self) -> bool:
        """Whether no further results come."""
        return self.delivered or self.cancelled or self.error is not None


class EngineCall:
    """A function that the engine's thread runs, with its outcome.

    The scheduler runs the ones that it gets while no request is in progress.
    """

    def __init__(self, work: Callable[[], Any]):
        self.work = work
        self.value: Any = None
        self.error: BaseException | None = None
        self.done = False

    def run(self) -> None:
        """Call the function. An interruption is raised; other exceptions are stored."""
        try:
            self.value = self.work()
        except Exception as error:
            self.error = error
        self.done = True


class PromptFeed:
    """Passes prompts from the caller of a request, who reads them, to the engine's thread.

    For the engine it is an iterator that yields None while there is no prompt. So an iterable that
    blocks, or that belongs to the caller's thread, does not stop the rounds of other requests.

    Args:
        prompts: Read by `read`, in the caller's thread.
        most_ahead: How many prompts are read ahead at most.
        on_wanted: Called in the engine's thread when a prompt is wanted.
    """

    def __init__(self, prompts: Iterator[Prompt], most_ahead: int, on_wanted: Callable[[], None]):
        self._prompts, self._most_ahead, self._on_wanted = prompts, most_ahead, on_wanted
        self._read = deque[Prompt]()
        self._ended = False
        self._error: Exception | None = None
        self._ahead = 0  # doubled whenever the engine finds none

    @property
    def wanted(self) -> bool:
        """Whether the caller should read a prompt."""
        return not self._ended and len(self._read) < self._ahead

    def read(self) -> None:
        """Read the next prompt of the iterator. An exception of it is raised for the engine."""
        try:
            for prompt in self._prompts:
                self._read.append(prompt)
                return
        except Exception as error:
            self._error = error
        self._ended = True

    def __iter__(self) -> PromptFeed:
        return self

    def __next__(self) -> Prompt | None:
        ended = self._ended  # before the prompts that were read until then are taken
        if self._read:
            return self._read.popleft()
        if ended and self._error is not None:
            raise self._error
        if ended:
            raise StopIteration
        self._ahead = min(max(2 * self._ahead, 1), self._most_ahead)
        self._on_wanted()
        return None


class VisibleText:
    """The text of a live sample that may be shown, before later tokens can change it.

    Args:
        stops: The stop texts, whose beginnings at the end of the text are held back.
    """

    def __init__(self, stops: tuple[str, ...]):
        self._starts = {stop[:end] for stop in stops for end in range(1, len(stop))}
        self._longest = max(map(len, self._starts), default=0)
        self.shown = self.tokens = 0  # characters that were handed out, and tokens then

    def new(self, text: str) -> str:
        """Return the new part of the text of a sample that has not ended."""
        end = len(text.rstrip("\ufffd"))
        lengths = range(min(self._longest, end), 0, -1)
        held = (size for size in lengths if text[end - size : end] in self._starts)
        end -= next(held, 0)
        found = text[self.shown : end]
        self.shown = max(self.shown, end)
        return found


def import_for(job: Job, note: Note) -> Callable[[], Tokenizer | None]:
    """Import torch with the job's threads. Meanwhile, load the tokenizer and read the models' files
    into the page cache, in threads.

    Args:
        note: See configure_threads.

    Returns:
        The argument `tokenizer` of make_plan.

    Raises:
        UserError: A local file or folder of a model is missing. The import would take seconds.
    """
    check_sources(job.pair)
    tokenizer = begin(job.pair)
    read_ahead(lambda: files_of(job.pair))
    configure_threads(job.threads, note)
    return tokenizer


def plan_of(job: Job | Plan, known: Checked | None = None) -> Plan:
    """Plan a job, and log the notes on it; a plan is returned as it is.

    `known`: facts about its prompts. UserError if `job` is neither.
    """
    if not isinstance(getattr(job, "job", job), Job):
        raise UserError(f"job: a Job or its plan is needed, not {shown(job)}")
    if not isinstance(job, Job):
        return job
    tokenizer = import_for(job, _LOG.info)
    from bass_cli.run.plan import make_plan

    known = known or Checked(None, "", plain=False)
    plan = make_plan(
        job,
        longest_prompt=known.longest,
        prompts=known.count,
        wanted=known.wanted,
        tokenizer=tokenizer,
    )
    for note in plan.notes:
        _LOG.info(note)
    return plan


def check_prompts_kind(prompts: Any) -> None:
    """Raise UserError for a single prompt in place of a list."""
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        remedy = (
            "make a call for each of its prompts, or collect them first"
            if isinstance(prompts, AsyncIterable)
            else "put a single prompt into a list"
        )
        raise UserError(
            f"prompts: a list of texts or mappings is needed, not {shown(prompts)}; {remedy}"
        )


def first_prompts(prompts: Iterable[Any], limit: int | None) -> Iterable[Any]:
    """Take at most `limit` prompts; a list stays a list."""
    if limit is None:
        return prompts
    return prompts[:limit] if isinstance(prompts, Sequence) else itertools.islice(prompts, limit)


def checked_list(prompts: Sequence[Any], job: Job) -> tuple[list[Prompt], Checked]:
    """Return the prompts of a list, and facts about them. UserError if one has a mistake."""
    named = list(prompts_for(job, prompts))
    return named, check(named, job=job)
