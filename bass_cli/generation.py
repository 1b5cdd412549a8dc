"""Run `bass generate`: read prompts, generate samples in this process or on Ray, and write them.

`bass eval` and `bass bench` share these functions. Samples are generated in run/; result lines are
written in io/.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bass_cli.cluster.rays import Request, cluster_of, read_request, workers_of
from bass_cli.cluster.worker import JobSpec
from bass_cli.config.command_options import PairArgs, job_options
from bass_cli.config.job import Job, chosen_pair, make_job
from bass_cli.config.sample_commands import GenerateArgs, LogprobsArgs, SampleArgs
from bass_cli.errors import UserError
from bass_cli.formats.sources import files_of
from bass_cli.io import terminal
from bass_cli.io.console import Screen
from bass_cli.io.layout import LayoutWriter, read_columns
from bass_cli.io.linefile import LINES, OUTPUTS, journal_of
from bass_cli.io.prompts import (
    Prompt,
    Shard,
    Wanted,
    check_prompts,
    held_by,
    open_prompts,
    parse_shard,
    read_prompts,
)
from bass_cli.io.readers import Source
from bass_cli.io.results import STANDARD_OUTPUT, Completion, open_output
from bass_cli.io.resume import PromptDigest, check_output_place, manifest_path, read_manifest
from bass_cli.io.saving import check_format, descriptor_of, is_stream, refuse_shared_files
from bass_cli.rank.best_of import BestWriter, read_best_of
from bass_cli.reading import whole
from bass_cli.run.generate import generate
from bass_cli.run.manifest import Facts, facts_of
from bass_cli.run.requests import import_for
from bass_cli.system.threads import CoreMonitor

if TYPE_CHECKING:
    from bass_cli.engine.contracts import RoundResult
    from bass_cli.engine.loop import Loop
    from bass_cli.run.plan import Plan


class Backend(Protocol):
    """A source of samples whose models have been checked: this process, or a WorkerPool."""

    @property
    def facts(self) -> Facts: ...

    @property
    def line(self) -> Callable[[], str] | None:
        """Returns a second line of progress; None if there is none."""

    def draw(
        self, prompts: Iterator[Prompt], done: Collection[tuple[str, int]], count: int | None
    ) -> Iterator[Completion]:
        """Yield samples 0 to n - 1 of every prompt, except those in `done`, as they end.

        `count`: the number of prompts; None if unknown. The screen shows the progress.
        """

    def usage(self) -> dict[str, Any] | None:
        """Return where the seconds went; None if the screen has counted them."""


class SampleWriter(Protocol):
    """An output of samples: io/results.py's Writer, or one with lines of another layout."""

    name: str
    notes: list[str]

    @property
    def done(self) -> Collection[tuple[str, int]]:
        """The samples that the output has already, as (prompt id, sample)."""

    def write(self, completion: Completion) -> None: ...
    def add_run(self, seconds: float, usage: dict[str, Any]) -> None: ...
    def confirm(self) -> None: ...


class LocalBackend:
    """Generates samples in this process. `loop`: returns an empty loop to use, when needed."""

    line = None

    def __init__(
        self, plan: Plan, facts: Facts, screen: Screen, loop: Callable[[], Loop] | None = None
    ):
        self.facts, self._plan, self._screen, self._loop = facts, plan, screen, loop

    def draw(
        self, prompts: Iterator[Prompt], done: Collection[tuple[str, int]], count: int | None
    ) -> Iterator[Completion]:
        cores, screen = CoreMonitor(self._plan.job.threads), self._screen

        def on_round(done: RoundResult) -> None:
            cores.update()
            accepted, rows = sum(done.accepted), len(done.accepted)
            drafted = sum(done.num_drafts)
            capacity = done.capacity or self.facts.rows
            screen.round(
                accepted,
                rows,
                done.seconds,
                done.capturing,
                capacity,
                drafted=drafted,
                waiting=done.waiting,
                plain=done.plain,
                refills=done.refills,
            )
            if drafted:
                screen.drafts(done.num_drafts, done.accepted)

        return generate(
            prompts,
            self._plan,
            done=set(done),
            count=count,
            on_round=on_round,
            on_phase=screen.phase,
            on_bytes=screen.bytes_read,
            on_note=screen.note,
            loop=None if self._loop is None else self._loop(),
        )

    def usage(self) -> None:
        return None


@contextlib.contextmanager
def open_backend(spec: JobSpec, screen: Screen, request: Request | None) -> Iterator[Backend]:
    """Check the job's models and open a source of samples.

    `request`: The Ray cluster to use; None for this process.
    """
    job = spec.job
    if request is not None:
        with (
            cluster_of(request, job, screen) as cluster,
            workers_of(cluster, screen, spec) as workers,
        ):
            yield workers
        return
    screen.phase("importing torch")
    tokenizer = import_for(job, screen.detail)
    from bass_cli.run.plan import make_plan

    screen.phase("checking the models", live=False)  # the hub's client shows downloads
    plan = make_plan(
        job,
        longest_prompt=spec.longest,
        prompts=spec.prompts,
        wanted=spec.wanted,
        tokenizer=tokenizer,
    )
    yield LocalBackend(plan, facts_of(plan, spec.source, shard=spec.shard), screen)


def generate_samples(args: GenerateArgs, screen: Screen) -> bool:
    """Run `bass generate`; return whether no prompt and no sample failed."""
    out = output_of(args)
    job = read_job(args)
    read = [("the prompt file", args.prompts), *files_read(args.pair, job)]
    refuse_shared_files(files_written(out), read)
    check_name(out, overwrite=args.overwrite)
    best = read_best_of(args.best_of, args.rank_by, job.n)
    columns = read_columns(args.columns, job, ranked=bool(best))
    job = with_batch_size_of(job, out, overwrite=args.overwrite)
    shard, request = read_shard(args, job), read_request(args, job, out)
    source = source_of(args.prompts, args.prompt_column, screen, args.separator, args.id_column)
    digest = PromptDigest(source, job.prompt_column)
    checked = check_prompts(
        source,
        column=job.prompt_column,
        limit=job.limit,
        shard=shard,
        job=job,
        on_prompt=digest.add,
    )
    columns_of = {} if columns is None else {"columns": list(columns)}
    layout = columns_of | ({"group": True} if args.group else {}) | best
    identity = _identity(source, digest, job.prompt_column) | layout

    def prompts() -> Iterator[Prompt]:
        return held_by(shard, read_prompts(source, column=job.prompt_column, limit=job.limit))

    spec = JobSpec(job, identity, checked.count, checked.longest, shard, checked.wanted)
    expected = None if best else samples_of_job(checked.count, job, checked.wanted)
    with (
        open_backend(spec, screen, request) as backend,
        open_output(
            out,
            backend.facts.manifest | {"source": source.name, "expected": expected},
            resume=args.resume,
            overwrite=args.overwrite,
            prompt_ids=lambda: {prompt.id: prompt.settings for prompt in prompts()},
            prompts=digest if digest.count else None,
        ) as writer,
    ):
        job = backend.facts.job
        show_notes(job, backend.facts, screen, plain=checked.plain, notes=checked.notes)
        found = prompts()
        output: SampleWriter = writer
        laid: LayoutWriter | BestWriter
        if columns is not None or args.group or best:
            output = laid = LayoutWriter(writer, columns=columns, group=args.group, n=job.n)
            if best:
                output = laid = BestWriter(laid, **best, n=job.n, prompts=prompts)
            found = laid.expect(found)
        summary = write_samples(
            output, backend, job, found, checked.count, screen, wanted=checked.wanted
        )
        if isinstance(output, BestWriter):
            writer.totals["dropped"] = output.dropped
            screen.note(output.describe())
    if args.json_summary:
        terminal.document(summary | {"file": writer.totals})
    return writer.finished


def _identity(source: Source, digest: PromptDigest, column: str) -> dict[str, Any]:
    """Return what identifies the prompts, for the manifest."""
    known = digest.record() if digest.count else source.name  # the hub's are not read before
    reading = {"separator": source.separator, "id_column": source.id_column}
    given = {key: value for key, value in reading.items() if value is not None}
    return {"prompts": known, "prompt_column": column, **given}


def source_of(
    name: str,
    column: str | None,
    screen: Screen,
    separator: str | None = None,
    id_column: str | None = None,
) -> Source:
    """Open the source of the prompts. For the arguments see `open_prompts`."""
    if name == "-" and sys.stdin is not None and sys.stdin.isatty():
        screen.note(
            "reading prompts from the terminal, one a line; end with Ctrl-D at the beginning of a "
            "line"
        )
    else:  # standard input may be slow
        screen.phase("reading the prompts")
    if separator == "":
        raise UserError("`separator`: it is empty; leave it out for one prompt per line")
    apart = None if separator is None else unescape(separator)
    return open_prompts(name, column, apart, id_column)


def output_of(args: GenerateArgs | LogprobsArgs) -> str:
    """Return the name of the output; "-" for standard output under any name."""
    out = "-" if args.out is None else args.out
    if not out:
        raise UserError("`out`: it is empty; name a file, or - for standard output")
    if descriptor_of(out) == 1:
        out = "-"
    if getattr(args, "json_summary", False) and out == "-":
        raise UserError(
            "`json_summary` needs `out` FILE, because standard output carries the results"
        )
    return out


def files_written(out: str) -> list[tuple[str, str | Path]]:
    """Return the output files, as arguments of `refuse_shared_files`."""
    if is_stream(out):
        return [("`out`", out)]
    journal = journal_of(out)
    return [
        ("`out`", out),
        ("the manifest of `out`", manifest_path(out)),
        *([] if journal is None else [("the journal of `out`", journal)]),
    ]


def check_name(out: str, *, overwrite: bool, suffixes: tuple[str, ...] = OUTPUTS) -> None:
    """Raise UserError if lines cannot be written to `out`, or would replace another file.

    `suffixes`: The formats that the command can write.
    """
    parquet = "" if suffixes is LINES else " or parquet"
    check_format("`out`", out, suffixes=suffixes, written=f"lines are JSON{parquet}")
    if not is_stream(out):
        check_output_place(out, overwrite=overwrite)


def files_read(pair: str | None, job: Job) -> list[tuple[str, str | Path]]:
    """Return the files of a job's pair, as arguments of `refuse_shared_files`.

    `pair`: the value of --pair.
    """
    own: list[tuple[str, str | Path]] = (
        [("the pair file", pair)] if pair and job.pair.folder is not None else []
    )
    return own + [("a file of the models", file) for file in files_of(job.pair)]


def show_notes(
    job: Job,
    facts: Facts,
    screen: Screen,
    *,
    plain: bool,
    for_chat: str = "`chat=True`",
    notes: Iterable[str] = (),
) -> None:
    """Show notes on how the job treats its prompts.

    Args:
        plain: Whether some prompts are plain text. If the model has a chat template, a note says
            whether they use it, and names the flag for the other way.
        for_chat: The option that uses the chat template.
        notes: Further notes.
    """
    for note in notes:
        screen.note(note)
    if job.draws_one:
        screen.note(
            f"temperature 0: the {job.n} samples of a prompt are equal, so one is drawn and copied"
        )
    if facts.chats and plain:
        screen.note(
            "plain prompts use the model's chat template; with `chat=False` they are continued as "
            "raw text"
            if job.chats
            else f"plain prompts are continued as raw text; with {for_chat} they use the model's "
            "chat template"
        )


def write_samples(
    writer: SampleWriter,
    backend: Backend,
    job: Job,
    prompts: Iterator[Prompt],
    count: int | None,
    screen: Screen,
    *,
    wanted: Wanted | None = None,
    transform: Callable[[Completion], Completion] = lambda completion: completion,
) -> dict[str, Any]:
    """Generate and write the samples that are missing from the output; return the summary.

    If nothing is missing, no model is loaded.

    Args:
        prompts: All prompts of the job.
        count: The number of prompts; None if unknown.
        wanted: See Checked.
        transform: Changes a Completion before it is written.
    """
    together = job.draws_together
    samples = samples_of_job(count, job, wanted)
    if wanted is not None:
        together = job.speculation.coupling == "maximal" and wanted.random
    complete, rest = _from_first_missing(prompts, writer.done, job.n, together=together)
    if together and writer.done and rest is not None:
        screen.note(
            "maximal coupling: samples depend on each other, so all are drawn again, and only the "
            "missing ones are written"
        )
    for note in (*backend.facts.notes, *writer.notes, *_progress(writer, complete=rest is None)):
        screen.note(note)
    failed: dict[str, str | None] = {}  # by prompt id

    screen.start(
        None if samples is None else samples - len(writer.done),
        rows=backend.facts.rows,
        live=writer.name != STANDARD_OUTPUT or not sys.stdout.isatty(),
        beside=backend.line,
    )
    try:
        if rest is not None:
            left = None if count is None else count - complete
            for completion in backend.draw(rest, writer.done, left):
                if completion.error is not None:
                    completion = replace(completion, error=screen.render(completion.error))
                writer.write(transform(completion))
                screen.advance(completion)
                if completion.finish_reason == "error":
                    failed.setdefault(completion.id, completion.error)
    finally:
        kept = {"kept": writer.kept} if isinstance(writer, BestWriter) else {}
        summary = screen.summary(writer.name) | kept
        summary["usage"] = backend.usage() or summary["usage"]
        writer.add_run(summary["decoding_seconds"], summary["usage"])
    writer.confirm()  # before the summary says that the samples are in the file
    screen.close(None if rest is None else summary)
    _show_failed(failed, screen)
    return summary


def samples_of_job(count: int | None, job: Job, wanted: Wanted | None) -> int | None:
    """Return the number of samples that a job draws in all; None if unknown.

    For `count` and `wanted` see `write_samples`.
    """
    if wanted is not None:
        return wanted.samples
    return None if count is None else count * job.n


def _show_failed(failed: Mapping[str, str | None], screen: Screen) -> None:
    for first, error in list(failed.items())[:1]:
        many = "1 prompt" if len(failed) == 1 else f"{len(failed)} prompts"
        screen.error(f'{many} could not be run; the first, "{first}": {error}')


def _progress(writer: SampleWriter, *, complete: bool) -> list[str]:
    """Describe the samples that the file already has."""
    if not writer.done:
        return []
    state = "complete" if complete else "continuing"
    where = "done" if isinstance(writer, BestWriter) else "there"  # dropped ones are not there
    return [f"{writer.name}: {state}, {len(writer.done)} samples are {where} already"]


def _from_first_missing(
    prompts: Iterator[Prompt], done: Collection[tuple[str, int]], n: int, *, together: bool
) -> tuple[int, Iterator[Prompt] | None]:
    """Skip the complete prompts at the beginning.

    Returns:
        The number of skipped prompts, and the prompts that follow; None if all are complete. With
        `together` no prompt is skipped unless all are complete.
    """
    before = list[Prompt]()
    for number, prompt in enumerate(prompts):
        if any((prompt.id, sample) not in done for sample in range(prompt.samples(n))):
            return number - len(before), itertools.chain(before, [prompt], prompts)
        if together:
            before.append(prompt)
    return 0, None


def read_job(args: PairArgs, defaults: Mapping[str, Any] | None = None, **changes: Any) -> Job:
    """Make a Job of the options and their pair.

    Args:
        defaults: Sampling settings for fields that neither the pair nor the options set.
        changes: Values that replace options.
    """
    pair, given = chosen_pair(args), job_options(args, **changes)
    for field in ("stop", "bad_words"):
        texts = given.pop(field, None)
        texts = [unescape(text) for text in texts] if texts else texts_of_environment(field)
        if texts is not None:
            given[field] = texts
    unsaid = {
        key: value
        for key, value in (defaults or {}).items()
        if key not in given and key not in pair.sampling.model_fields_set
    }
    return make_job(pair, **given, **unsaid)


def with_batch_size_of(job: Job, out: str, *, overwrite: bool) -> Job:
    """Take the batch size from the manifest of `out`, if it is "auto" and samples depend on it.

    Otherwise the memory that is free now would decide.
    """
    if not job.draws_together or job.batch_size != "auto" or overwrite or is_stream(out):
        return job
    try:
        rows = whole(read_manifest(out)["results"]["batch_size"], least=1)
    except (OSError, ValueError, KeyError, TypeError):  # no file, or a fault reported later
        return job
    return job.model_copy(update={"batch_size": rows})


def read_shard(args: SampleArgs, job: Job) -> Shard | None:
    """Return the part of the job that --shard selects; None for all.

    UserError under maximal coupling without a batch size: samples depend on the number of rows, so
    the parts could not be merged.
    """
    if args.shard is None:
        return None
    shard = parse_shard(args.shard)
    if job.speculation.coupling == "maximal" and job.batch_size == "auto":
        raise UserError(
            f"`shard` {shard}: with maximal coupling samples depend on the batch size; give all "
            "shards the same `batch_size`"
        )
    return shard


def texts_of_environment(field: str) -> list[str] | None:
    """Read BASS_STOP or BASS_BAD_WORDS: one text, or a JSON list of texts, which may contain
    blanks."""
    value = os.environ.get(f"BASS_{field.upper()}") or None  # an empty variable means no value
    with contextlib.suppress(ValueError):
        listed = json.loads(value or "")
        if isinstance(listed, list):
            return listed
    return None if value is None else [unescape(value)]


def escape(text: str) -> str:
    """Return the text that `unescape` turns into this stop string."""
    return text.replace("\\", "\\\\")


def unescape(text: str) -> str:
    r"""Replace \n, \t, \r and \\ in a stop string, which shells pass unchanged. Other backslashes
    stay."""
    values = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
    return re.sub(r"\\([ntr\\])", lambda found: values[found[1]], text)
