"""The body of `bass bench`: turn options into Settings or a whole job, and print the document.

Options and files are checked before torch and the models are loaded.
"""

from __future__ import annotations

from collections.abc import Iterable

from bass_cli.bench import report
from bass_cli.cli.options import flag_of
from bass_cli.cluster.rays import read_request
from bass_cli.config.command_options import DISTRIBUTION, MACHINE_AND_MODELS
from bass_cli.config.machine_commands import BenchArgs
from bass_cli.config.options import WHOLE_JOB, declared
from bass_cli.errors import UserError
from bass_cli.formats.sources import check_sources
from bass_cli.generation import escape, files_read, read_job, texts_of_environment
from bass_cli.io import terminal
from bass_cli.io.console import Screen
from bass_cli.io.prompts import check_prompts, open_prompts, read_prompts
from bass_cli.io.readers import open_source
from bass_cli.io.saving import check_chart, refuse_shared_files
from bass_cli.system.threads import configure_threads

_OPTIONS = declared(BenchArgs)
_ON_RAY = ("ray", "actors")  # run the job once more, with actors
_OF_A_JOB = [
    name for name, option in _OPTIONS.items() if option.group == WHOLE_JOB and name != "job"
]
_OF_GENERATE = ["pair", *MACHINE_AND_MODELS, *DISTRIBUTION, *_OF_A_JOB]  # of bass generate too
_OF_BOTH = {"job", *_OF_GENERATE, "rivals", "repeats", "json_document", "quiet"}


def run(args: BenchArgs, screen: Screen) -> bool:
    """Run the bench and print each document when it is complete.

    Returns: False if a gate failed, or if a graph was captured inside a measured run.
    """
    if args.job is not None:
        _run_job(args, args.job, screen)
        return True
    for name in _OF_A_JOB:
        if getattr(args, name) not in (None, []):
            raise UserError(f"{_flag(name)}: this option needs --job FILE")
    if args.shape is None:
        check_sources(read_job(args).pair)  # importing torch takes seconds
    configure_threads(args.threads, screen.note)  # before the shapes of models load torch

    from bass_cli.bench.settings import make_settings

    settings = make_settings(args)
    if args.plot is not None:
        if len(settings.acceptances) > 1:
            raise UserError(
                "--plot FILE draws one bench only; leave it out, or give one --acceptance"
            )
    elif args.overwrite:
        raise UserError(
            "--overwrite (or BASS_OVERWRITE): this option needs --plot FILE; give one, or leave "
            "--overwrite out"
        )
    if settings.specs is None:
        refuse_shared_files(
            [("--plot", args.plot)],
            [("the prompt file", settings.prompts), *files_read(args.pair, settings.job)],
        )
    if args.plot is not None:
        check_chart(args.plot, overwrite=args.overwrite)
    if settings.prompts is not None:
        if settings.prompts == "-":
            raise UserError(
                "--prompts (or BASS_PROMPTS): standard input can be read only once; give a file"
            )
        check_prompts(open_source(settings.prompts), column="prompt", limit=None)

    from bass_cli.bench.grid import measure

    failures: list[str] = []
    for document in measure(settings, screen):
        screen.close()
        if args.json_document:
            terminal.document(document)
        else:
            report.show(document)
        if args.plot is not None and document["cells"]:
            report.draw(document, args.plot)
        failures += document["failures"]
    for failure in failures:
        screen.error(failure)
    return not failures


def _run_job(args: BenchArgs, file: str, screen: Screen) -> None:
    """Time a whole job, and rivals on the same job. Check everything possible beforehand."""
    for name in _OPTIONS:
        if name not in _OF_BOTH and getattr(args, name) not in (None, [], False):
            raise UserError(
                f"{_flag(name)}: a --job runs as bass generate does, which has no such option; "
                "leave one of the two out"
            )
    if file == "-":
        raise UserError("--job (or BASS_JOB): standard input can be read only once; give a file")
    job = read_job(args)
    words = _command_line(args, [name for name in _OF_GENERATE if name not in _ON_RAY])
    if not args.stop:  # the job runs in a process without BASS_ variables
        words += [f"--stop={escape(text)}" for text in texts_of_environment("stop") or []]
    read_request(args, job, out="a file beside")  # refuses what Ray cannot run
    source = open_prompts(file, args.prompt_column)
    checked = check_prompts(source, column=job.prompt_column, limit=job.limit, job=job)

    from bass_cli.bench import jobs, rivals
    from bass_cli.bench.settings import chosen_rivals, count

    engines, repeats = chosen_rivals(args.rivals, job), count(args.repeats, "repeats", 3)

    from bass_cli.run.plan import make_plan

    screen.phase("checking the models", live=False)
    plan = make_plan(
        job, longest_prompt=checked.longest, prompts=checked.count, wanted=checked.wanted
    )
    for note in plan.files.notes:
        screen.note(note)
    document = jobs.measure(
        plan,
        list(read_prompts(source, column=job.prompt_column, limit=job.limit)),
        ["generate", file, *words],
        on_ray=_command_line(args, _ON_RAY),
        engines=rivals.installed(engines, cuda=plan.device.type == "cuda", note=screen.note),
        repeats=repeats,
        note=screen.note,
    )
    screen.close()
    if args.json_document:
        terminal.document(document)
    else:
        screen.table(*jobs.table(document))


def _command_line(args: BenchArgs, names: Iterable[str]) -> list[str]:
    """Return these options, if given, as words of a command."""
    words = []
    for name in names:
        value, flag = getattr(args, name), _flag(name)
        if isinstance(value, bool):  # --chat/--no-chat
            words.append(flag.split("/")[not value])
        elif value is not None:
            words += [f"{flag}={one}" for one in (value if isinstance(value, list) else [value])]
    return words


def _flag(name: str) -> str:
    return flag_of(name, _OPTIONS[name])
