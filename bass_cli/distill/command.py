"""Run `bass distill`: draw samples, train, and write the draft, a pair file and a report.

Each step saves its results in the folder and is skipped if they exist, so an interrupted run
resumes. The steps themselves are in the other modules of this package.
"""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from bass_cli.cluster.rays import read_request
from bass_cli.config.args import DistillArgs
from bass_cli.config.job import Job, Pair
from bass_cli.distill.corpus import FEWEST
from bass_cli.distill.folder import config_of
from bass_cli.distill.makers import SampleBackend, makers_of
from bass_cli.distill.prompts import Supply, own_beginnings
from bass_cli.distill.report import table
from bass_cli.distill.sampling import is_complete, usable
from bass_cli.distill.settings import (
    Training,
    check_disk,
    find_source,
    once,
    requested_tokens,
    sampling_job,
    training_of,
    wanted_tokens,
)
from bass_cli.distill.student import Source
from bass_cli.distill.work import Places
from bass_cli.engine.clock import expected
from bass_cli.errors import UserError
from bass_cli.formats.weights import locate
from bass_cli.generation import files_read
from bass_cli.io.console import Screen
from bass_cli.io.prompts import Prompt, open_prompts, read_prompts
from bass_cli.io.reading import parse_object, read_bytes
from bass_cli.io.saving import refuse_shared_files, remove_drafts, write_file, write_json
from bass_cli.run.manifest import describe
from bass_cli.run.plan import Plan

_MOST_BYTES = 1 << 24  # largest settings file that is read


def run(args: DistillArgs, screen: Screen) -> str:
    """Do all steps that are not done yet; print the table and return the report as JSON."""
    assert args.out is not None
    training, places = training_of(args), Places(Path(args.out))
    pair, job = sampling_job(args, requested_tokens(args, training))
    request = read_request(args, job, str(places.samples))
    with makers_of(args, pair, job, request, screen) as makers:
        document = _make(args, pair, training, places, makers, screen)
    columns, lines = table(document)
    screen.table(columns, lines)
    return json.dumps(document)


def _make(
    args: DistillArgs,
    pair: Pair,
    training: Training,
    places: Places,
    makers: SampleBackend,
    screen: Screen,
) -> dict[str, Any]:
    """Fill the folder; return the report."""
    plan = makers.plan
    source = find_source(args, pair, plan)
    checkpoint = source.checkpoint
    # fails early if the draft's config.json cannot be written
    config_of(source.spec, eos_ids=checkpoint.eos_ids, place=str(checkpoint.path))
    prompts, results = _samples_of(args, training, plan, screen)
    whole = plan.job.model_copy(update={"pair": pair})
    _keep_apart(args, whole, places, checkpoint.path)
    begun = _begin(places, training, source, results, overwrite=args.overwrite)
    if begun and places.report.exists():
        places.checkpoint.unlink(missing_ok=True)
        screen.note(f"{places.folder}: this distillation is complete")
        found: dict[str, Any] = json.loads(places.report.read_text())
        return found
    check_disk(source, places.folder, results["tokens"])
    makers.check(source, training)
    for note in plan.notes:
        screen.note(note)
    if not is_complete(places.samples, results):
        limit = plan.job.sampling.max_new_tokens
        supply = Supply(prompts, n=plan.job.n, wanted=results["tokens"], likely=expected(limit),
                        passes=results.get("passes"))  # fmt: skip
        makers.draw(supply, results, places)
    document = makers.train(source, training, places)
    _write_pair(places, pair, training)
    write_json(places.report, document, f"{places.report}: cannot write the report")
    places.checkpoint.unlink(missing_ok=True)
    screen.note(f"the draft is in {places.draft}; try: bass generate PROMPTS --pair {places.pair}")
    return document


def _samples_of(
    args: DistillArgs, training: Training, plan: Plan, screen: Screen
) -> tuple[Any, dict[str, Any]]:
    """Return the prompts for the target, and the settings that its samples depend on."""
    prompts: list[Prompt] = []
    if args.prompts is None and args.prompt_column is not None:
        raise UserError("--prompt-column (or BASS_PROMPT_COLUMN): this option needs --prompts FILE")
    if args.prompts is None:
        source: Any = own_beginnings(plan.files.tokenizer, args.chat)
        digest: dict[str, Any] = {"prompts": list(source)}
    else:
        file = open_prompts(args.prompts, args.prompt_column)
        column = plan.job.prompt_column
        prompts = usable(read_prompts(file, column=column, limit=plan.job.limit), plan, screen)
        if len({prompt.id for prompt in prompts}) < FEWEST:
            raise UserError(
                f"--prompts {args.prompts}: at least {FEWEST} usable prompts are needed, because "
                f"one is held out to measure the draft (got {len(prompts)}); add prompts"
            )
        source = functools.partial(iter, prompts)
        digest = {"prompts": file.digest() or file.name, "prompt_column": column}
    manifest = describe(plan, digest)
    wanted = wanted_tokens(args, plan, requested_tokens(args, training), len(prompts))
    found = {**manifest["results"], "tokens": wanted, **({"passes": 1} if once(args) else {})}
    return source, json.loads(json.dumps(found, default=str))


def _keep_apart(args: DistillArgs, job: Job, places: Places, source: Path) -> None:
    """Refuse a folder in which a file that is read would be replaced.

    source: path of the model that the draft starts from.
    """
    read = [*files_read(args.pair, job), ("the model that the draft starts from", source)]
    if args.prompts is not None:
        read.append(("--prompts", args.prompts))
    written = (places.pair, places.report, places.settings, places.checkpoint)
    refuse_shared_files([("--out", one) for one in (*written, places.samples)], read)
    draft = places.draft.resolve()  # a folder, which is emptied
    for what, path in read:
        place = Path(path).expanduser().resolve()
        if draft in (place, *place.parents):
            raise UserError(
                f"--out {places.folder}: {path} is {what} and would be lost; give another folder"
            )


def _begin(
    places: Places, training: Training, source: Source, results: dict[str, Any], *, overwrite: bool
) -> bool:
    """Prepare the folder and save the settings there.

    Returns: whether the folder was begun by the same command. UserError if by another one.
    """
    settings = {
        "samples": results,
        "source": source.checkpoint.fingerprint(),
        "layers": source.layers,
        "mask": source.mask,
        **asdict(training),
    }
    settings = json.loads(json.dumps(settings))
    folder = places.folder
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder}: this is a file; give a folder")
    before: dict[str, Any] | None = None
    if places.settings.exists():
        try:
            before = parse_object(read_bytes(places.settings, _MOST_BYTES))
        except (OSError, ValueError) as error:
            if not overwrite:
                raise UserError(f"{places.settings}: {error}; use --overwrite") from None
    elif folder.exists():  # a folder of somebody else is never emptied
        remove_drafts(places.settings)  # left by a kill while the settings were written
        others = [one.name for one in folder.iterdir() if not one.name.startswith("samples.jsonl")]
        if others:
            raise UserError(
                f"--out {folder}: the folder holds other files ({others[0]}); give a new or empty "
                "folder"
            )
    if before == settings and not overwrite:
        return True
    if before is not None and not overwrite:
        changed = [key for key in {**before, **settings} if before.get(key) != settings.get(key)]
        raise UserError(
            f"--out {folder}: this run was begun with other settings ({', '.join(changed)}); use "
            "--overwrite to start again, or give another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for path in (places.checkpoint, places.report, places.pair):
        path.unlink(missing_ok=True)
    shutil.rmtree(places.draft, ignore_errors=True)
    if overwrite:
        for path in folder.glob("samples.jsonl*"):
            path.unlink()
    write_json(places.settings, settings, f"{places.settings}: cannot write the settings")
    return False


def _write_pair(places: Places, pair: Pair, training: Training) -> None:
    """Write the pair file of the target and its new draft.

    The draft length is limited to the one of the training. Relative paths of the old pair file
    become absolute.
    """

    def absolute(source: str) -> str:
        places = [Path(source).expanduser()]
        if pair.folder is not None:
            places.append(pair.folder / source)
        here = any(place.exists() for place in places)
        return str(locate(source, folder=pair.folder)) if here else source

    words: dict[str, Any] = {"target": absolute(pair.target), "draft": "parallel:./draft"}
    if pair.tokenizer is not None:
        words["tokenizer"] = absolute(pair.tokenizer)
    words["speculation"] = {"max": training.draft_length}
    sampling = pair.sampling.model_dump(mode="json", exclude_unset=True)
    if sampling:
        words["sampling"] = sampling
    if pair.dtype != "auto":
        words["dtype"] = pair.dtype
    write_file(places.pair, yaml.safe_dump(words, sort_keys=False).encode())
