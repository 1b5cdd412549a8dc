"""`bass rank`: write rank and scores into the lines of a file, and keep the best samples.

ranked_file.py reads and writes the lines; rank/ has the rankers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bass_cli.config.commands import RankArgs
from bass_cli.errors import UserError
from bass_cli.eval.ranked_file import RankedFile
from bass_cli.eval.tasks import load_task
from bass_cli.eval.tasks.task import Task
from bass_cli.io.console import Screen
from bass_cli.io.linefile import OUTPUTS, live_path
from bass_cli.io.lines import write_lines
from bass_cli.io.prompts import open_prompts, read_prompts
from bass_cli.io.resume import (
    check_output_place,
    known_seconds,
    manifest_path,
    read_manifest,
    write_manifest,
)
from bass_cli.io.saving import check_format, is_stream, refuse_shared_files
from bass_cli.rank.ranking import (
    LOGPROB,
    Group,
    Ranker,
    Standing,
    parse_rankers,
    prompt_text,
    ranker_without_model,
    standings_of,
)

Standings = dict[tuple[str, int], Standing]


def rank_samples(args: RankArgs, screen: Screen) -> dict[str, Any]:
    """Run `bass rank`; return the counts of prompts and samples.

    Raises:
        UserError: An option or a line is wrong. The file is as it was.
    """
    names = parse_rankers(args.by or LOGPROB, "`by`")
    out = _check_files(args)
    if args.best is not None and args.best < 1:
        raise UserError(f"`best`: a whole number from 1 on is needed, not {args.best}")
    answer = _pattern(args.answer)
    manifest = _manifest_of(args.file)
    task = _task_of(args, manifest, names)
    screen.phase("reading the samples")
    file = RankedFile(
        args.file,
        task=task,
        prompts=None if task is not None else _prompts_of(args),
        answer=answer,
        exclusive=out == args.file,
    )
    rankers = [ranker_without_model(name) for name in names]
    standings = _standings(file, rankers, screen)
    if out != args.file:
        manifest_path(out).unlink(missing_ok=True)  # an old one must not describe the new lines
    write_lines(out, file.lines(standings, args.best))
    if manifest is not None:
        own = _own_manifest(manifest, file, names, args)
        write_manifest(out, own)
    for note in file.notes:
        screen.note(f"{args.file}: {note}")
    counts = {"prompts": len(file), "samples": file.kept + file.dropped, "kept": file.kept,
              "dropped": file.dropped, "by": names}  # fmt: skip
    screen.note(
        f"{out}: ranked {counts['samples']} samples of {len(file)} prompts by {names[0]}; "
        f"{file.kept} kept, {file.dropped} dropped"
    )
    return counts


def _check_files(args: RankArgs) -> str:
    """Return the name of the output. UserError if it cannot be written or would replace a file."""
    out = args.file if args.out is None else args.out
    for what, path in (("FILE", args.file), ("`out`", out)):
        if is_stream(path):
            raise UserError(f"{what} {path}: name a file; a stream cannot be read twice")
    check_format("`out`", out, suffixes=OUTPUTS, written="lines are JSON or parquet")
    if live_path(args.file) != args.file:
        raise UserError(
            f"{args.file}: the run has not ended; its samples so far are in "
            f"{live_path(args.file)}; run its command again first"
        )
    inputs: list[tuple[str, str | Path | None]] = [
        ("`data`", args.data),
        ("`prompts`", args.prompts),
    ]
    if out == args.file:
        refuse_shared_files([("FILE", out)], inputs)
        return out
    inputs += [("FILE", args.file), ("the manifest of FILE", manifest_path(args.file))]
    refuse_shared_files([("`out`", out), ("its manifest", manifest_path(out))], inputs)
    if not args.overwrite and os.path.isfile(out) and os.path.getsize(out):
        raise UserError(f"{out}: it exists; use `overwrite` to replace it, or give another name")
    check_output_place(out, overwrite=args.overwrite)
    return out


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise UserError(f"`answer`: this is not a regular expression: {error}") from None


def _manifest_of(path: str) -> dict[str, Any] | None:
    """Return the manifest of a file. None if it has none, as files of other tools."""
    try:
        found = read_manifest(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        raise UserError(f"{manifest_path(path)}: the manifest cannot be read") from None
    return found if isinstance(found.get("results"), dict) else None


def _task_of(
    args: RankArgs, manifest: Mapping[str, Any] | None, names: Sequence[str]
) -> Task | None:
    """Return the task of the samples. None if there is none, or if no ranker needs it."""
    known = None if manifest is None else manifest["results"].get("task")
    name = args.task or (known if isinstance(known, str) else None)
    if name is None and args.data is not None:
        raise UserError("`data` needs `task`, because the file has none")
    if name is None or names == [LOGPROB]:
        return None
    if args.prompts is not None:
        raise UserError(f"`prompts`: the task {name} has its own prompts; leave it out")
    return load_task(name, args.data)


def _prompts_of(args: RankArgs) -> dict[str, str] | None:
    """Return the prompts of --prompts by id. None if they are not given."""
    if args.prompts is None:
        return None
    column = args.prompt_column or "prompt"
    source = open_prompts(args.prompts, args.prompt_column)
    found = {one.id: prompt_text(one) for one in read_prompts(source, column=column)}
    return {id_: text for id_, text in found.items() if text is not None}


class _Groups:
    """The groups of a file, which can be iterated over again."""

    def __init__(self, file: RankedFile):
        self._file = file

    def __iter__(self) -> Iterator[Group]:
        return (one.group for one in self._file.members())


def _standings(file: RankedFile, rankers: Sequence[Ranker], screen: Screen) -> Standings:
    """Return the standing of each sample by prompt id and number."""
    found: Standings = {}
    every = [ranker.scores(_Groups(file)) for ranker in rankers]
    with screen.counting("prompts ranked", len(file)) as progress:
        for done, members in enumerate(file.members(), 1):
            scores = {
                ranker.name: next(of_ranker)
                for ranker, of_ranker in zip(rankers, every, strict=True)
            }
            for sample, standing in standings_of(members, rankers[0].name, scores):
                found[members.group.id, sample] = standing
            progress(done, len(file))
    return found


def _own_manifest(
    manifest: Mapping[str, Any], file: RankedFile, names: Sequence[str], args: RankArgs
) -> dict[str, Any]:
    """Return the manifest of the ranked lines.

    With `best` its results are those of `bass generate --best-of K --rank-by NAME`.
    """
    totals = file.totals | {"seconds": known_seconds(args.file, file.kept + file.dropped)}
    own = {"ranked": {"by": list(names), "answer": args.answer}}
    if args.best is None:
        return {**manifest, "totals": totals, **own}
    results = {**manifest["results"], "best_of": args.best, "rank_by": names[0]}
    totals["dropped"] = file.dropped
    return {**manifest, "results": results, "totals": totals, **own}
