"""Run `bass batch`: answer the requests of a file in OpenAI's batch format.

The prompts of all requests share the batch of one engine, each with its own settings, as the lines
of `bass generate` do (generation.py).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Set
from pathlib import Path

from bass_cli.batch.requests import Request, read_requests
from bass_cli.batch.responses import Answers, BatchFacts, RequestDigest, Spell, read_answers
from bass_cli.cluster.rays import read_request
from bass_cli.cluster.worker import JobSpec
from bass_cli.config.job import Job, Pair
from bass_cli.config.sample_commands import BatchArgs
from bass_cli.config.sampling import Sampling
from bass_cli.errors import UserError
from bass_cli.formats.grammars import bytes_of
from bass_cli.formats.sources import locate
from bass_cli.formats.tokenizer import Tokenizer
from bass_cli.generation import (
    check_name,
    files_read,
    open_backend,
    read_job,
    with_batch_size_of,
    write_samples,
)
from bass_cli.io import terminal
from bass_cli.io.console import Screen
from bass_cli.io.linefile import LINES
from bass_cli.io.prompts import Checked, Prompt, check
from bass_cli.io.readers import Source, open_source
from bass_cli.io.results import open_output
from bass_cli.io.resume import manifest_path
from bass_cli.io.saving import is_stream, refuse_shared_files
from bass_cli.reading import shown

COMPLETION_TOKENS = 16  # of a completion without max_tokens, as in OpenAI's API
_WHOLE_CONTEXT = 2**20  # tokens of a chat without a limit; the model's context is the real one
# OpenAI's defaults, for what neither a request, the job, the pair nor the model sets
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": _WHOLE_CONTEXT}


def run(args: BatchArgs, screen: Screen) -> bool:
    """Answer the requests; return whether all were answered."""
    out, errors = args.out, f"{args.out}.errors" if args.errors is None else args.errors
    job = with_defaults(read_job(args, n=1))
    _check_files(args, job, out, errors)
    served = args.model or job.pair.name
    stale = args.overwrite and os.path.exists(errors)
    job = with_batch_size_of(job, out, overwrite=args.overwrite)
    cluster = read_request(args, job, out)
    screen.phase("reading the requests")
    batch = _Batch(open_source(args.prompts), job)
    checked = batch.check()
    identity = {"prompts": batch.digest.record(), "prompt_column": job.prompt_column}
    spec = JobSpec(job, identity, checked.count, checked.longest, None, checked.wanted)
    with open_backend(spec, screen, cluster) as backend:
        manifest = backend.facts.manifest | {"source": batch.source.name}
        opened = functools.partial(
            open_output,
            manifest=manifest,
            overwrite=args.overwrite,
            prompts=batch.digest,
            read=read_answers,
        )
        with Answers(
            opened(out, resume=args.resume),
            opened(errors),
            stale=stale,
            model=served,
            n=job.n,
            spell=spelling(job.pair, wanted=batch.facts.needs_bytes),
        ) as answers:
            for note in batch.notes({served, job.pair.name, job.pair.target}, served):
                screen.note(note)
            answers.skip(batch.requests())
            summary = write_samples(
                answers,
                backend,
                backend.facts.job,
                answers.prompts(batch.requests()),
                checked.count,
                screen,
                wanted=checked.wanted,
            )
            failed = answers.failed
    if failed:
        many = "1 request" if failed == 1 else f"{failed} requests"
        screen.error(f"{many} could not be answered; the reasons are in {errors}")
    if args.json_summary:
        terminal.document(summary | {"file": answers.totals, "failed": failed})
    return not failed


def _check_files(args: BatchArgs, job: Job, out: str, errors: str) -> None:
    """Raise UserError if a file cannot be written, or would replace another one."""
    for what, path in (("the responses", out), ("`errors`", errors)):
        if not path or is_stream(path):
            raise UserError(f"{what}: a file is needed, so that a killed run can be continued")
    written: list[tuple[str, str | Path]] = [
        ("the file of responses", out),
        ("its manifest", manifest_path(out)),
        ("`errors`", errors),
        ("the manifest of `errors`", manifest_path(errors)),
    ]
    read = [("the file of requests", args.prompts), *files_read(args.pair, job)]
    refuse_shared_files(written, read)
    for name in (out, errors):
        check_name(name, overwrite=args.overwrite, suffixes=LINES)


class _Batch:
    """The requests of a file, which is read again for each pass over them.

    Attributes:
        unlimited: The number of prompts whose samples end only with the context.
    """

    def __init__(self, source: Source, job: Job):
        self.source, self._job, self.unlimited = source, job, 0
        self._has_no_limit = job.sampling.max_new_tokens == _WHOLE_CONTEXT
        self.digest, self.facts = RequestDigest(source, job.prompt_column), BatchFacts()

    def requests(self) -> Iterator[Request]:
        most = COMPLETION_TOKENS if self._has_no_limit else None
        return read_requests(self.source, self._job, completion_tokens=most)

    def check(self) -> Checked:
        """Read all requests; return the facts about their prompts."""

        def prompts() -> Iterator[Prompt]:
            for request in self.requests():
                self.digest.add_request(request)
                self.facts.add(request)
                for prompt in request.prompts:
                    self.unlimited += self._has_no_limit and "max_new_tokens" not in prompt.settings
                    yield prompt

        return check(prompts(), job=self._job)

    def notes(self, known: Set[str], served: str) -> Iterator[str]:
        """Yield notes for the user.

        Args:
            known: The names of the model that answers.
            served: Its name in responses.
        """
        if others := sorted(self.facts.models - known):
            more = f" and {len(others) - 1} other models" if others[1:] else ""
            first = shown(others[0])
            yield f"requests name the model {first}{more}; all are answered by {served}"
        if self.unlimited:
            yield (
                f"chats without max_tokens: {self.unlimited}; a sample may fill the model's "
                "context (`sampling.max_new_tokens` sets a limit)"
            )


def with_defaults(job: Job) -> Job:
    """Return the job with OpenAI's defaults for settings that are not set.

    They still count as not set, so that those of the model's generation_config.json come first.
    """
    own = job.sampling
    values = dict(own) | {k: v for k, v in _DEFAULTS.items() if k not in own.model_fields_set}
    sampling = Sampling.model_construct(_fields_set=own.model_fields_set, **values)
    return job.model_copy(update={"sampling": sampling})


def spelling(pair: Pair, *, wanted: bool) -> Spell:
    """Return a function of the bytes of a token; the tokenizer is loaded only if it is wanted."""
    if not wanted:
        return lambda _: b""
    tokenizer = Tokenizer.load(locate(pair.tokenizer or pair.target, folder=pair.folder))
    of, spelled = bytes_of(tokenizer), tokenizer.spelled
    return lambda id_: of(id_) or spelled(id_).encode()
