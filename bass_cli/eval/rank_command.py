"""`bass rank`: write rank and scores into the lines of a file, and keep the best samples.

ranked_file.py reads and writes the lines; rank/ has the rankers.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from bass_cli.config.commands import RankArgs
from bass_cli.errors import UserError
from bass_cli.eval.ranked_file import RankedFile
from bass_cli.eval.samples import known_task
from bass_cli.eval.tasks import load_task
from bass_cli.eval.tasks.task import Task
from bass_cli.generation import read_job
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
    REWARD,
    Group,
    Ranker,
    Scores,
    Standing,
    needs_model,
    parse_rankers,
    prompt_text,
    ranker_without_model,
    standings_of,
)
from bass_cli.rank.store import ScoreStore, digest_of
from bass_cli.system.host import expect
from bass_cli.system.threads import begin, configure_threads

Standings = dict[tuple[str, int], Standing]


def rank_samples(args: RankArgs, screen: Screen) -> dict[str, Any]:
    """Run `bass rank`; return the counts of prompts and samples.

    Raises:
        UserError: An option or a line is wrong. The file is as it was.
    """
    names = parse_rankers(args.by or LOGPROB, "`by`")
    if any(map(needs_model, names)):
        begin(args.threads)
        expect(args.device)
    out = _check_files(args)
    if args.best is not None and args.best < 1:
        raise UserError(f"`best`: a whole number from 1 on is needed, not {args.best}")
    answer = _pattern(args.answer)
    manifest = _manifest_of(args.file)
    task = _task_of(args, manifest, names)
    rankers = [_ranker(name, args, screen) for name in names]
    screen.phase("reading the samples")
    with contextlib.ExitStack() as opened:
        prompts = None if task is not None else _prompts_of(args)
        held = RankedFile(
            args.file, task=task, prompts=prompts, answer=answer, exclusive=out == args.file
        )
        file = opened.enter_context(held)
        store = None
        if any(map(needs_model, names)):
            store = opened.enter_context(ScoreStore(f"{out}.scores.jsonl"))
            if len(store):
                screen.note(f"{store.path}: continuing, {len(store)} prompts have scores already")
        scores = {ranker.name: _scores(ranker, file, store, screen) for ranker in rankers}
        _write(args, out, file, _standings(file, names, scores), manifest)
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


def _ranker(name: str, args: RankArgs, screen: Screen) -> Ranker:
    """Return a ranker of this name."""
    if not needs_model(name):
        return ranker_without_model(name)
    configure_threads(args.threads, screen.note)
    if name.startswith(REWARD):
        from bass_cli.rank.reward import BATCH, RewardRanker

        batch = BATCH if args.reward_batch is None else args.reward_batch
        if batch < 1:
            raise UserError(f"`reward_batch`: a whole number from 1 on is needed, not {batch}")
        device, dtype = args.device or "auto", args.dtype or "auto"
        return RewardRanker(name, device=device, dtype=dtype, batch=batch, on_phase=screen.phase)
    if args.pair is None and args.model is None:
        raise UserError(f"`by` {name}: it runs the target; name it with `pair` or `model`")
    job = read_job(args)
    if name == "reverse":
        from bass_cli.rank.reverse import ReverseRanker

        return ReverseRanker(job, on_phase=screen.phase, on_bytes=screen.bytes_read)
    from bass_cli.rank.agreement import AgreementRanker

    return AgreementRanker(
        job,
        consent=args.allow_code_execution,
        workers=args.workers,
        on_phase=screen.phase,
        on_bytes=screen.bytes_read,
    )


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
    return load_task(args.task or known_task(name, args.file), args.data)


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

    def __init__(self, file: RankedFile, without: Set[str] = frozenset()):
        self._file, self._without = file, without

    def __iter__(self) -> Iterator[Group]:
        every = (one.group for one in self._file.members())
        return (group for group in every if group.id not in self._without)


def _scores(
    ranker: Ranker, file: RankedFile, store: ScoreStore | None, screen: Screen
) -> dict[str, Scores]:
    """Return the scores of each prompt by id. Those of the store are not computed again."""
    kept = store if needs_model(ranker.name) else None
    found: dict[str, Scores] = {}
    for group in _Groups(file) if kept is not None else ():
        if (known := kept.get(digest_of(ranker, group))) is not None:  # type: ignore[union-attr]
            found[group.id] = known
    left = _Groups(file, without=frozenset(found))
    if len(found) == len(file):
        return found
    with screen.counting(f"prompts ranked by {ranker.name}", len(file)) as progress:
        for group, scores in zip(left, ranker.scores(left), strict=True):
            found[group.id] = scores
            if kept is not None:
                kept.add(ranker.name, digest_of(ranker, group), scores)
            progress(len(found), len(file))
    return found


def _standings(
    file: RankedFile, names: Sequence[str], scores: Mapping[str, Mapping[str, Scores]]
) -> Standings:
    """Return the standing of each sample by prompt id and number."""
    found: Standings = {}
    for members in file.members():
        id_ = members.group.id
        of_group = {name: scores[name][id_] for name in names}
        for sample, standing in standings_of(members, names[0], of_group):
            found[id_, sample] = standing
    return found


def _write(
    args: RankArgs,
    out: str,
    file: RankedFile,
    standings: Standings,
    manifest: dict[str, Any] | None,
) -> None:
    """Write the ranked lines, then their manifest if the file has one."""
    if out != args.file:
        manifest_path(out).unlink(missing_ok=True)  # an old one must not describe the new lines
    write_lines(out, file.lines(standings, args.best))
    if manifest is not None:
        write_manifest(out, _own_manifest(manifest, file, args))


def _own_manifest(manifest: Mapping[str, Any], file: RankedFile, args: RankArgs) -> dict[str, Any]:
    """Return the manifest of the ranked lines.

    With `best` its results are those of `bass generate --best-of K --rank-by NAME`.
    """
    totals = file.totals | {"seconds": known_seconds(args.file, file.kept + file.dropped)}
    names = parse_rankers(args.by or LOGPROB, "`by`")
    model = {"pair": args.pair, "model": args.model} if any(map(needs_model, names)) else {}
    own = {"ranked": {"by": names, "answer": args.answer, **model}}
    if args.best is None:
        return {**manifest, "totals": totals, **own}
    results = {**manifest["results"], "best_of": args.best, "rank_by": names[0]}
    totals["dropped"] = file.dropped
    return {**manifest, "results": results, "totals": totals, **own}
