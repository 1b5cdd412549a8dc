"""A command's samples to its file: drawn by this process, or by Ray actors.

Not here: how samples are drawn (run/), what a result line holds (io/).
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

from bass_cli.cluster.rays import Request, cluster_of, crew_on_ray, read_request
from bass_cli.config.args import GenerateArgs, JobArgs, SampleArgs
from bass_cli.config.job import Job, chosen_pair, make_job
from bass_cli.errors import UserError
from bass_cli.formats.sources import files_of
from bass_cli.formats.tokenizer import begin
from bass_cli.io import terminal
from bass_cli.io.completion import Completion
from bass_cli.io.console import Screen
from bass_cli.io.places import check_format, descriptor_of, is_stream, refuse_shared_files
from bass_cli.io.prompts import Prompt, check_prompts, open_prompts, read_prompts
from bass_cli.io.reading import whole
from bass_cli.io.results import STANDARD_OUTPUT, Writer, open_output
from bass_cli.io.resume import check_output_place, manifest_path, read_manifest
from bass_cli.io.shards import Shard, held_by, parse_shard
from bass_cli.run.generate import generate
from bass_cli.run.manifest import Facts, facts_of
from bass_cli.system.threads import CoreMonitor, configure_threads

if TYPE_CHECKING:
    from bass_cli.cluster.worker_pool import WorkerPool
    from bass_cli.engine.contracts import RoundResult
    from bass_cli.engine.loop import Loop
    from bass_cli.run.plan import Plan


class Drawing(Protocol):
    """Models that were checked, and samples when they are wanted."""

    @property
    def facts(self) -> Facts: ...

    @property
    def line(self) -> Callable[[], str] | None:
        """A line of progress of its own."""

    def draw(
        self, prompts: Iterator[Prompt], done: Collection[tuple[str, int]], count: int | None
    ) -> Iterator[Completion]:
        """Samples 0 to n - 1 of every prompt (`count` of them, if that is known), but those in
        `done`, as they end; the screen is told what is going on."""

    def usage(self) -> dict[str, Any] | None:
        """Where seconds went, if that is not what the screen was told."""


class LocalBackend:
    """This process draws. `loop`: what to draw with instead of a new one, made when it is
    needed."""

    line = None

    def __init__(
        self, plan: Plan, facts: Facts, screen: Screen, loop: Callable[[], Loop] | None = None
    ):
        self.facts, self._plan, self._screen, self._loop = facts, plan, screen, loop

    def draw(
        self, prompts: Iterator[Prompt], done: Collection[tuple[str, int]], count: int | None
    ) -> Iterator[Completion]:
        company, screen = CoreMonitor(self._plan.job.threads), self._screen

        def on_round(done: RoundResult) -> None:
            company.look()
            kept, rows = sum(done.accepted), len(done.accepted)
            capacity = done.capacity or self.facts.rows
            screen.round(done.width, kept, rows, done.seconds, done.capturing, capacity)

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


class RemoteBackend:
    """A crew draws."""

    def __init__(self, crew: WorkerPool):
        self._crew, self.facts = crew, crew.gather()
        self.line, self.usage = crew.line, crew.usage

    def draw(
        self, prompts: Iterator[Prompt], done: Collection[tuple[str, int]], count: int | None
    ) -> Iterator[Completion]:
        return self._crew.draw(prompts, done, count)


@contextlib.contextmanager
def drawing_of(
    job: Job,
    screen: Screen,
    request: Request | None,
    *,
    source: Mapping[str, Any],
    longest: str,
    prompts: int | None,
    shard: Shard | None = None,
) -> Iterator[Drawing]:
    """Whoever the request asks to draw, this process where there is none, with the job's models
    checked. `source`: what identifies the prompts; `longest`: the text of the longest;
    `prompts`: how many there are, None where nobody knows."""
    if request is not None:
        with (
            cluster_of(request, job, screen) as cluster,
            crew_on_ray(
                cluster, screen, source=source, prompts=prompts, longest=longest, shard=shard
            ) as crew,
        ):
            yield RemoteBackend(crew)
        return
    tokenizer = begin(job.pair)  # while torch is loaded
    configure_threads(job.threads, screen.note)
    from bass_cli.run.plan import make_plan

    screen.phase("checking the models", live=False)  # the hub's client shows what it fetches
    plan = make_plan(job, longest_prompt=longest, prompts=prompts, tokenizer=tokenizer)
    yield LocalBackend(plan, facts_of(plan, source, shard=shard), screen)


def generate_samples(args: GenerateArgs, screen: Screen) -> bool:
    """Run `bass generate`; returns whether no prompt and no sample failed."""
    out = "-" if args.out is None else args.out
    if not out:
        raise UserError("--out (or BASS_OUT): it is empty; give a file, or - for standard output")
    if descriptor_of(out) == 1:
        out = "-"
    if args.json_summary and out == "-":
        raise UserError("--json needs --out FILE, because standard output carries the results")
    job = read_job(args)
    refuse_shared_files(
        files_written(out), [("the prompt file", args.prompts), *files_read(args.pair, job)]
    )
    check_name(out, overwrite=args.overwrite)
    if args.prompts == "-" and sys.stdin is not None and sys.stdin.isatty():
        screen.note(
            "prompts are read from the terminal, one a line; Ctrl-D at the beginning of a line "
            "ends them"
        )
    else:  # whatever feeds standard input may take its time
        screen.phase("reading the prompts")
    job = with_rows_of(job, out, overwrite=args.overwrite)
    shard, request = read_shard(args, job), read_request(args, job, out)
    source = open_prompts(args.prompts, args.prompt_column)
    checked = check_prompts(
        source, column=job.prompt_column, limit=job.limit, shard=shard, chat=job.chat
    )
    known = source.name if checked.digest is None else checked.digest.record()
    identity = {"prompts": known, "prompt_column": job.prompt_column}

    def prompts() -> Iterator[Prompt]:
        every = read_prompts(source, column=job.prompt_column, limit=job.limit)
        return held_by(shard, every)

    with (
        drawing_of(
            job,
            screen,
            request,
            source=identity,
            longest=checked.longest,
            prompts=checked.count,
            shard=shard,
        ) as drawing,
        open_output(
            out,
            drawing.facts.manifest | {"source": source.name},
            resume=args.resume,
            overwrite=args.overwrite,
            prompt_ids=lambda: {prompt.id for prompt in prompts()},
            prompts=checked.digest,
        ) as writer,
    ):
        tell(job, drawing.facts, screen, plain=checked.plain, notes=checked.notes)
        summary = write_samples(
            writer, drawing, job.n, prompts(), checked.count, screen, together=job.draws_together
        )
    if args.json_summary:
        terminal.document(summary | {"file": writer.totals})
    return writer.finished


def files_written(out: str) -> list[tuple[str, str | Path]]:
    """What samples go to, as `refuse_shared_files` takes it."""
    return [
        ("--out", out),
        *([] if is_stream(out) else [("the manifest of --out", manifest_path(out))]),
    ]


def check_name(out: str, *, overwrite: bool) -> None:
    """UserError where samples cannot be written, something else would be lost, or the name
    promises another format."""
    written = (
        "samples are plain JSON lines, one write each, so that a run that was killed can go on"
    )
    check_format("--out", out, suffix=".jsonl", written=written)
    if not is_stream(out):
        check_output_place(out, overwrite=overwrite)


def files_read(pair: str | None, job: Job) -> list[tuple[str, str | Path]]:
    """What a job's pair is read from, as `refuse_shared_files` takes it. `pair`: as it was
    given."""
    own: list[tuple[str, str | Path]] = (
        [("the pair file", pair)] if pair and job.pair.folder is not None else []
    )
    return own + [("a file of the models", file) for file in files_of(job.pair)]


def tell(
    job: Job,
    facts: Facts,
    screen: Screen,
    *,
    plain: bool,
    ask: str = "--chat",
    notes: Iterable[str] = (),
) -> None:
    """Say what may surprise: `notes`, that equal samples are copies, and, where the model has a
    chat template and some prompts are `plain` text, which of the two forms such a prompt is
    given, with the flag for the other (`ask`: for the template)."""
    for note in notes:
        screen.note(note)
    if job.draws_one:
        screen.note(
            f"temperature 0: the {job.n} samples of a prompt are equal, so one is drawn and copied"
        )
    if facts.chats and plain:
        screen.note(
            "plain prompts go through the model's chat template; --no-chat continues them as raw "
            "text"
            if job.chat
            else f"plain prompts are continued as raw text; {ask} asks them through the model's "
            "chat template"
        )


def write_samples(
    writer: Writer,
    drawing: Drawing,
    n: int,
    prompts: Iterator[Prompt],
    count: int | None,
    screen: Screen,
    *,
    together: bool,
    shape: Callable[[Completion], Completion] = lambda completion: completion,
) -> dict[str, Any]:
    """Draw what is missing in the file of n samples of each prompt and write it, each sample as
    `shape` has it; returns the summary. Where nothing is missing nothing is drawn, and no model
    is loaded. `together`: see Job.draws_together."""
    complete, rest = _from_first_missing(prompts, writer.done, n, together=together)
    if together and writer.done and rest is not None:
        screen.note(
            "maximal coupling: samples depend on each other, so those that are there are drawn "
            "again with those that are missing, which alone are written"
        )
    for note in (*drawing.facts.notes, *writer.notes, *_progress(writer, complete=rest is None)):
        screen.note(note)
    failed: dict[str, str | None] = {}  # by prompt id

    screen.start(
        None if count is None else count * n - len(writer.done),
        rows=drawing.facts.rows,
        live=writer.name != STANDARD_OUTPUT or not sys.stdout.isatty(),
        beside=drawing.line,
    )
    try:
        if rest is not None:
            left = None if count is None else count - complete
            for completion in drawing.draw(rest, writer.done, left):
                writer.write(shape(completion))
                screen.advance(completion)
                if completion.finish_reason == "error":
                    failed.setdefault(completion.id, completion.error)
    finally:
        summary = screen.summary(writer.name)
        summary["usage"] = drawing.usage() or summary["usage"]
        writer.add_run(summary["decoding_seconds"], summary["usage"])
    writer.confirm()  # before anybody is told that the samples are there
    screen.close(None if rest is None else summary)
    for first, error in list(failed.items())[:1]:
        many = "1 prompt" if len(failed) == 1 else f"{len(failed)} prompts"
        screen.error(f'{many} could not be run; the first, "{first}": {error}')
    return summary


def _progress(writer: Writer, *, complete: bool) -> list[str]:
    """What is in the file already, in words."""
    if not writer.done:
        return []
    state = "complete" if complete else "going on"
    return [f"{writer.name}: {state}, {len(writer.done)} samples are there already"]


def _from_first_missing(
    prompts: Iterator[Prompt], done: Collection[tuple[str, int]], n: int, *, together: bool
) -> tuple[int, Iterator[Prompt] | None]:
    """How many prompts come before the first with a sample that is not `done`, and that one with
    all after it, and `together` with all before it; None if there is none."""
    before = list[Prompt]()
    for number, prompt in enumerate(prompts):
        if any((prompt.id, sample) not in done for sample in range(n)):
            return number - len(before), itertools.chain(before, [prompt], prompts)
        if together:
            before.append(prompt)
    return 0, None


def read_job(args: JobArgs, defaults: Mapping[str, Any] | None = None) -> Job:
    """The Job that the flags make of their pair. `defaults`: sampling that holds where neither
    pair nor flags say."""
    pair = chosen_pair(args)
    args = replace(
        args, stop=[unescape(text) for text in args.stop] if args.stop else stops_of_environment()
    )
    unsaid = {
        key: value
        for key, value in (defaults or {}).items()
        if getattr(args, key) is None and key not in pair.sampling.model_fields_set
    }
    return make_job(pair, replace(args, **unsaid))


def with_rows_of(job: Job, out: str, *, overwrite: bool) -> Job:
    """The job with as many rows as `out` was begun with, where its samples depend on them and
    nobody says how many: what memory is free now would decide otherwise."""
    if not job.draws_together or job.batch_size != "auto" or overwrite or is_stream(out):
        return job
    try:
        rows = whole(read_manifest(out)["results"]["batch_size"], least=1)
    except (OSError, ValueError, KeyError, TypeError):  # none was begun; others say what is wrong
        return job
    return job.model_copy(update={"batch_size": rows})


def read_shard(args: SampleArgs, job: Job) -> Shard | None:
    """The part of the job that the flags ask for. UserError where its rows would be its own: under
    maximal coupling samples depend on how many there are, and the parts could not be merged."""
    if args.shard is None:
        return None
    shard = parse_shard(args.shard)
    if job.speculation.coupling == "maximal" and job.batch_size == "auto":
        raise UserError(
            f"--shard {shard}: under maximal coupling the samples depend on the rows, of "
            "which each shard would choose its own number; give them all one --batch-size"
        )
    return shard


def stops_of_environment() -> list[str] | None:
    """BASS_STOP is one text, or a JSON list of texts; an ordinary list variable could hold no
    blank."""
    value = os.environ.get("BASS_STOP") or None  # an empty variable is none, as of all options
    with contextlib.suppress(ValueError):
        listed = json.loads(value or "")
        if isinstance(listed, list):
            return listed
    return None if value is None else [unescape(value)]


def escape(text: str) -> str:
    """What `unescape` makes this stop string of."""
    return text.replace("\\", "\\\\")


def unescape(text: str) -> str:
    r"""A stop string as it was meant: a shell passes \n, \t, \r and \\ on as they are. Every
    other backslash stays."""
    meant = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
    return re.sub(r"\\([ntr\\])", lambda found: meant[found[1]], text)
