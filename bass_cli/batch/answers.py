"""The two files of `bass batch`: responses in one, requests that failed in the other.

A line is appended when its request is complete. A request with a line in either file is done, so a
run that was killed is continued. Both files have a manifest, as every output of bass
(io/results.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from bass_cli.batch.requests import Fault, Request
from bass_cli.batch.responses import Spell, answered, refused
from bass_cli.errors import UserError
from bass_cli.io.prompts import Prompt
from bass_cli.io.results import Completion, Writer
from bass_cli.io.resume import COUNTED, Past, PromptDigest, result_rows

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


@dataclass(slots=True)
class _Pending:
    """A request in progress, with the samples of each of its prompts by their numbers."""

    request: Request
    samples: list[dict[int, Completion]]
    missing: int


class Answers:
    """Appends the lines of requests. `generation.write_samples` uses it as a Writer.

    Attributes:
        done: The samples of the requests that are done, as (prompt id, sample).
        failed: The number of requests that were not answered.
        notes: Notes for the user.
    """

    def __init__(
        self, out: Writer, errors: Writer, *, stale: bool, model: str, n: int, spell: Spell
    ):
        """Take the opened files.

        Args:
            stale: Whether the file of errors has old lines, which are to be removed.
            model: The name of the model in responses.
            n: Samples of a prompt that sets no number.
            spell: Returns the bytes of a token.
        """
        self._out, self._errors = out, errors
        self._model, self._n, self._spell = model, n, spell
        self._pending: dict[str, tuple[_Pending, int]] = {}  # by prompt id
        self._done = {name for name, _ in (*out.done, *errors.done)}  # custom ids
        self.failed = len(errors.done)
        self._changed = stale  # whether this run must write the file of errors
        self.name, self.totals = out.name, out.totals
        self.notes = [*out.notes, *errors.notes]
        self.done: set[tuple[str, int]] = set()

    def __enter__(self) -> Answers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        finished = kind is None
        try:  # without errors there is no file of errors
            self._errors.close(finished=finished and self._changed)
        finally:
            self._out.close(finished=finished)

    def skip(self, requests: Iterable[Request]) -> None:
        """Fill `done` with the samples of the requests that have a line."""
        if self._done:
            self.done = {
                (prompt.id, sample)
                for request in requests
                if request.custom_id in self._done
                for prompt in request.prompts
                for sample in range(prompt.samples(self._n))
            }

    def prompts(self, requests: Iterable[Request]) -> Iterator[Prompt]:
        """Yield the prompts of requests, and write the error of each new request with a fault."""
        for request in requests:
            if request.custom_id not in self._done:
                if request.fault is not None:
                    self._fail(request, request.fault)
                    continue
                counts = [prompt.samples(self._n) for prompt in request.prompts]
                pending = _Pending(request, [{} for _ in counts], sum(counts))
                for number, prompt in enumerate(request.prompts):
                    self._pending[prompt.id] = pending, number
            yield from request.prompts

    def write(self, completion: Completion) -> None:
        """Take a sample; append the line of its request if it is complete or has failed."""
        if completion.id not in self._pending:
            return  # its request has failed
        pending, number = self._pending[completion.id]
        request = pending.request
        if completion.finish_reason == "error":
            status, code = (400, "invalid_prompt") if completion.is_of_prompt else (500, "error")
            self._forget(request)
            fault = request.fault_of(str(completion.error), code=code, status=status)
            self._fail(request, fault)
            return
        pending.samples[number][completion.sample] = completion
        pending.missing -= 1
        if pending.missing:
            return
        self._forget(request)
        groups = [[group[place] for place in sorted(group)] for group in pending.samples]
        samples = [one for group in groups for one in group]
        counts = {key: sum(getattr(one, key) for one in samples) for key in COUNTED}
        line = answered(request, groups, self._model, self._spell)
        self._append(self._out, line, counts | {"finish_reason": "answered"})

    def _forget(self, request: Request) -> None:
        for prompt in request.prompts:
            self._pending.pop(prompt.id, None)

    def _fail(self, request: Request, fault: Fault) -> None:
        self.failed += 1
        self._changed = True
        counts = dict.fromkeys(COUNTED, 0)
        self._append(self._errors, refused(request, fault), counts | {"finish_reason": "error"})

    def _append(self, writer: Writer, line: dict[str, Any], counts: dict[str, Any]) -> None:
        writer.append(_encode(line).encode("utf-8", "backslashreplace") + b"\n", counts)

    def confirm(self) -> None:
        """Raise MachineError if a file was renamed, replaced or truncated by another program."""
        self._out.confirm()
        self._errors.confirm()

    def add_run(self, seconds: float, usage: dict[str, Any]) -> None:
        """Add this run's seconds to the totals of the manifest."""
        self._out.add_run(seconds, usage)


def read_answers(lines: Iterable[bytes], name: str) -> Past:
    """Read the lines of a file of responses or errors; `done` has (custom id, 0).

    UserError at a broken line other than the last, and at a request that occurs twice.
    """
    past = Past()
    for number, _, row in result_rows(lines, name, past, _check_answer):
        key = (row["custom_id"], 0)
        if key in past.done:
            raise UserError(f'{name}:{number}: request "{key[0]}" occurs twice')
        past.done.add(key)
        body = row["response"].get("body")
        usage = body.get("usage") if isinstance(body, dict) else None
        tokens = usage.get("completion_tokens") if isinstance(usage, dict) else 0
        failed = row.get("error") is not None
        counts = {"finish_reason": "error" if failed else "answered", "tokens": tokens}
        past.count(dict.fromkeys(COUNTED, 0) | counts)
    if past.holes:
        raise UserError(f"{name}: a power cut damaged lines of it; remove those with NUL bytes")
    return past


def _check_answer(row: dict[str, Any], place: str) -> None:
    """Raise UserError if the line is not one of a batch's output."""
    for key, kind in (("custom_id", str), ("response", dict)):
        if not isinstance(row.get(key), kind):
            raise UserError(f'{place}: this is not a line of a batch\'s output: field "{key}"')


@dataclass(slots=True)
class BatchFacts:
    """What is known of the requests of a file after it was read once.

    Args:
        models: The models that requests name.
        needs_bytes: Whether the bytes of tokens are needed.
    """

    models: set[str] = field(default_factory=set)
    needs_bytes: bool = False

    def add(self, request: Request) -> None:
        """Add a request."""
        if request.model is not None:
            self.models.add(request.model)
        self.needs_bytes |= request.echo or request.logprobs is not None


class RequestDigest(PromptDigest):
    """A digest of a batch file's prompts, and of its requests with a fault."""

    def add_request(self, request: Request) -> None:
        """Add the next request."""
        for prompt in request.prompts:
            self.add(prompt)
        if not request.prompts:
            self.add(Prompt(request.custom_id, None, None, {}, None, "", str(request.fault)))

    def _named(self, number: int) -> str:
        return f"prompt number {number}"
