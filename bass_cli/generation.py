"""What `bass generate` and `bass eval` share: flags to a Job, the manifest, samples to the file as
they come.

Not here: how samples are drawn (scheduler.py), files (io/results.py), what an evaluation asks
(eval/).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bass_cli import __version__
from bass_cli.config.args import GenerateArgs, JobArgs, SampleArgs
from bass_cli.config.job import Job, chosen_pair, make_job
from bass_cli.errors import UserError
from bass_cli.io.completion import Completion
from bass_cli.io.console import Screen
from bass_cli.io.places import check_format, descriptor_of, is_stream, refuse_shared_files
from bass_cli.io.prompts import Prompt, check_prompts, open_source, read_prompts
from bass_cli.io.results import STANDARD_OUTPUT, Writer, open_output
from bass_cli.io.resume import check_output_place, manifest_path
from bass_cli.io.shards import Shard, held_by, parse_shard
from bass_cli.library import generate
from bass_cli.model.sources import files_of
from bass_cli.system.threads import Company, settle

if TYPE_CHECKING:
    from bass_cli.engine.contracts import Round
    from bass_cli.engine.step import Loop
    from bass_cli.plan import Plan

_PROFILED = ("auto", "table", "bass+table")  # draft lengths that a profile decides


def generate_samples(args: GenerateArgs, screen: Screen) -> bool:
    """`bass generate`. Says whether every sample was finished."""
    out = args.out or "-"
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
    shard = read_shard(args, job)
    source = open_source(args.prompts)
    if source.kind == "txt" and args.prompt_column is not None:
        raise UserError(
            "--prompt-column (or BASS_PROMPT_COLUMN): lines of text have no fields; leave it out"
        )
    checked = check_prompts(source, column=job.prompt_column, limit=job.limit, shard=shard)
    settle(job.threads, screen.note)

    from bass_cli.plan import make_plan

    screen.phase("checking the models", live=False)  # the hub's client shows what it fetches
    plan = make_plan(job, longest_prompt=checked.longest, prompts=checked.count)
    manifest = describe(
        plan,
        {"prompts": source.digest() or source.name, "prompt_column": job.prompt_column},
        shard=shard,
    )

    def prompts() -> Iterator[Prompt]:
        every = read_prompts(source, column=job.prompt_column, limit=job.limit)
        return held_by(shard, every)

    with open_output(
        out,
        manifest | {"source": source.name},
        resume=args.resume,
        overwrite=args.overwrite,
        prompt_ids=lambda: {prompt.id for prompt in prompts()},
    ) as writer:
        tell(plan, screen, plain=checked.plain)
        summary = write_samples(writer, plan, prompts(), count=checked.count, screen=screen)
    if args.json_summary:
        print(json.dumps(summary | {"file": writer.totals}))
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


def tell(plan: Plan, screen: Screen, *, plain: bool, ask: str = "--chat") -> None:
    """Say what may surprise: that equal samples are copies, and, where the model has a chat
    template and some prompts are `plain` text, which of the two forms such a prompt is given,
    with the flag for the other (`ask`: for the template)."""
    if plan.job.draws_one:
        screen.note(
            f"temperature 0: the {plan.job.n} samples of a prompt are equal, so one is drawn and "
            "copied"
        )
    if plan.tokenizer.has_chat_template and plain:
        screen.note(
            "plain prompts go through the model's chat template; --no-chat continues them as raw "
            "text"
            if plan.job.chat
            else f"plain prompts are continued as raw text; {ask} asks them through the model's "
            "chat template"
        )


def write_samples(
    writer: Writer,
    plan: Plan,
    prompts: Iterator[Prompt],
    *,
    count: int | None,
    screen: Screen,
    loop: Callable[[], Loop] | None = None,
    shape: Callable[[Completion], Completion] = lambda completion: completion,
) -> dict[str, Any]:
    """Draw what is missing in the file and write it, each sample as `shape` has it; returns the
    summary. Where nothing is missing no model is loaded and no `loop` made."""
    whole, rest = _from_first_missing(prompts, writer.done, plan.job.n)
    for note in (*plan.notes, *writer.notes, *_progress(writer, complete=rest is None)):
        screen.note(note)
    company = Company(plan.job.threads)
    failed: dict[str, str | None] = {}  # by prompt id

    def on_round(done: Round) -> None:
        company.look()
        kept, rows = sum(done.accepted), len(done.accepted)
        capacity = done.capacity or plan.rows
        screen.round(done.width, kept, rows, done.seconds, done.capturing, capacity)

    screen.start(
        None if count is None else count * plan.job.n - len(writer.done),
        rows=plan.rows,
        live=writer.name != STANDARD_OUTPUT or not sys.stdout.isatty(),
    )
    try:
        if rest is not None:
            for completion in generate(
                rest,
                plan,
                done=set(writer.done),
                count=None if count is None else count - whole,
                on_round=on_round,
                on_phase=screen.phase,
                on_bytes=screen.bytes_read,
                on_note=screen.note,
                loop=None if loop is None else loop(),
            ):
                writer.write(shape(completion))
                screen.advance(completion)
                if completion.finish_reason == "error":
                    failed.setdefault(completion.id, completion.error)
    finally:
        summary = screen.summary(writer.name)
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
    prompts: Iterator[Prompt], done: Collection[tuple[str, int]], n: int
) -> tuple[int, Iterator[Prompt] | None]:
    """How many prompts come before the first with a sample that is not `done`, and that one with
    all after it; None if there is none."""
    for number, prompt in enumerate(prompts):
        if any((prompt.id, sample) not in done for sample in range(n)):
            return number, itertools.chain([prompt], prompts)
    return 0, None


def read_job(args: JobArgs, defaults: Mapping[str, Any] | None = None) -> Job:
    """The Job that the flags make of their pair. `defaults`: sampling that holds where neither
    pair nor flags say."""
    pair = chosen_pair(args)
    args = replace(
        args, stop=[unescape(text) for text in args.stop] if args.stop else _stops_of_environment()
    )
    unsaid = {
        key: value
        for key, value in (defaults or {}).items()
        if getattr(args, key) is None and key not in pair.sampling.model_fields_set
    }
    return make_job(pair, replace(args, **unsaid))


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


def _stops_of_environment() -> list[str] | None:
    """BASS_STOP is one text, or a JSON list of texts; an ordinary list variable could hold no
    blank."""
    value = os.environ.get("BASS_STOP")
    with contextlib.suppress(ValueError):
        listed = json.loads(value or "")
        if isinstance(listed, list):
            return listed
    return None if value is None else [unescape(value)]


def unescape(text: str) -> str:
    r"""A stop string as it was meant: a shell passes \n, \t, \r and \\ on as they are. Every
    other backslash stays."""
    meant = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
    return re.sub(r"\\([ntr\\])", lambda found: meant[found[1]], text)


def describe(
    plan: Plan, source: Mapping[str, Any], *, shard: Shard | None = None
) -> dict[str, Any]:
    """The manifest: what the run is; "results" holds all that changes its lines, which a resumed
    run is held against. `source`: what identifies the prompts, `shard`: which of them are drawn."""
    job, identity = plan.job, plan.identity()
    versions = identity.pop("versions")
    results: dict[str, Any] = {
        **identity,
        **source,
        "n": job.n,
        "limit": job.limit,
        "chat": job.chat,
    }
    results |= {
        **job.sampling.model_dump(mode="json"),
        "coupling": job.speculation.coupling,
        "budget": job.budget,
    }
    results |= {"token_ids": job.token_ids, "bass": __version__.split(".")[0]}
    if shard is not None:
        results |= {"shard": str(shard)}
    if job.speculation.coupling == "maximal":
        speculation = job.speculation.model_dump(mode="json")
        draft_files = plan.draft and plan.draft.fingerprint(plan.mask)
        results |= {"draft": job.pair.draft, "draft_files": draft_files}
        results |= {"batch_size": plan.rows, "draft_length": speculation["length"]}
        results |= {
            "max": speculation["max"],
            "draft_temperature": speculation["draft_temperature"],
        }
        if (
            plan.surface is not None
            and plan.surface.measured
            and speculation["length"] in _PROFILED
        ):
            # the draft lengths come from it, and reach the samples
            results |= {"profile": plan.surface.digest()}
    return {"results": results, "job": job.model_dump(mode="json"), "versions": versions}
