"""`bass rank`: write rank and scores into the lines of a file, and keep the best samples.

ranking.py reads and writes the lines; rank/ has the rankers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import regex

from bass_cli.config.evaluation_commands import RankArgs
from bass_cli.config.job import Job
from bass_cli.errors import UserError
from bass_cli.eval.ranking import RankedFile
from bass_cli.eval.samples import known_task
from bass_cli.eval.stores import ScoreStore, digest_of
from bass_cli.eval.tasks import load_task
from bass_cli.eval.tasks.task import Task
from bass_cli.generation import read_job
from bass_cli.io.console import Screen
from bass_cli.io.linefile import OUTPUTS, live_path, write_lines
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
from bass_cli.system.host import expect
from bass_cli.system.threads import begin, configure_threads

Standings = dict[tuple[str, int], Standing]


class Ranking(NamedTuple):
    """How a file is ranked.

    Attributes:
        rankers: Ranks are those of the first; scores are written for all.
        best: Only the best samples of each prompt are kept; None: all.
        answer: See RankedFile.
        prompts: See RankedFile.
    """

    rankers: Sequence[Ranker]
    best: int | None = None
    answer: Any = None
    prompts: Mapping[str, str] | None = None


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
    ranking = Ranking(
        [_ranker_of(name, args, screen) for name in names],
        best=args.best,
        answer=answer,
        prompts=None if task is not None else _prompts_of(args),
    )
    return rank_lines(args.file, out, ranking, task, manifest, screen)


def rank_lines(
    path: str,
    out: str,
    ranking: Ranking,
    task: Task | None,
    manifest: Mapping[str, Any] | None,
    screen: Screen,
) -> dict[str, Any]:
    """Write the lines of a file with rank and scores; return the counts.

    Args:
        path, out: The file and the output, which may be the same.
        manifest: That of the file; None if it has none.
    """
    rankers = ranking.rankers
    screen.phase("reading the samples")
    with contextlib.ExitStack() as opened:
        held = RankedFile(
            path, task=task, prompts=ranking.prompts, answer=ranking.answer, exclusive=out == path
        )
        file, store = opened.enter_context(held), None
        if any(needs_model(ranker.name) for ranker in rankers):
            store = opened.enter_context(ScoreStore(f"{out}.scores.jsonl"))
            if len(store):
                screen.note(f"{store.path}: continuing, {len(store)} prompts have scores already")
        scores = {ranker.name: _scores(ranker, file, store, screen) for ranker in rankers}
        if out != path:
            manifest_path(out).unlink(missing_ok=True)  # an old one must not describe the new lines
        write_lines(out, file.lines(_standings(file, list(scores), scores), ranking.best))
        if manifest is not None:
            write_manifest(out, _own_manifest(manifest, file, ranking))
    for note in (*file.notes, *_without_scores(scores)):
        screen.note(f"{path}: {note}")
    counts = {"prompts": len(file), "samples": file.kept + file.dropped, "kept": file.kept,
              "dropped": file.dropped, "by": list(scores)}  # fmt: skip
    screen.note(
        f"{out}: ranked {counts['samples']} samples of {len(file)} prompts by {rankers[0].name}; "
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


def _ranker_of(name: str, args: RankArgs, screen: Screen) -> Ranker:
    """Return the ranker of a name with the command's options."""
    own = needs_model(name) and not name.startswith(REWARD)
    if own and args.pair is None and args.model is None:
        raise UserError(f"`by` {name}: it runs the target; name it with `pair` or `model`")
    if needs_model(name):
        configure_threads(args.threads, screen.note)
    return make_ranker(
        name,
        screen,
        job=read_job(args) if own else None,
        device=args.device or "auto",
        dtype=args.dtype or "auto",
        batch=args.reward_batch,
        consent=args.allow_code_execution,
        workers=args.workers,
    )


def make_ranker(
    name: str,
    screen: Screen,
    *,
    job: Job | None,
    device: str,
    dtype: str,
    batch: int | None = None,
    consent: bool = False,
    workers: int | None = None,
) -> Ranker:
    """Return the ranker of a name.

    Args:
        job: Its target is that of reverse and tests.
        device, dtype, batch: Those of a reward model.
        consent, workers: Of the sandbox, for tests.
    """
    if not needs_model(name):
        return ranker_without_model(name)
    from bass_cli.rank.model_rankers import BATCH, AgreementRanker, ReverseRanker, RewardRanker

    if name.startswith(REWARD):
        batch = BATCH if batch is None else batch
        if batch < 1:
            raise UserError(f"`reward_batch`: a whole number from 1 on is needed, not {batch}")
        return RewardRanker(name, device=device, dtype=dtype, batch=batch, on_phase=screen.phase)
    assert job is not None
    if name == "reverse":
        return ReverseRanker(job, on_phase=screen.phase, on_bytes=screen.bytes_read)
    return AgreementRanker(
        job, consent=consent, workers=workers, on_phase=screen.phase, on_bytes=screen.bytes_read
    )


def _pattern(text: str | None) -> Any:
    try:
        return None if text is None else regex.compile(text)
    except regex.error as error:
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


def _without_scores(scores: Mapping[str, Mapping[str, Scores]]) -> Iterator[str]:
    """Yield a note for each ranker that could not score some of the finished samples."""
    for name, by_prompt in scores.items():
        every = [score for found in by_prompt.values() for score in found]
        if missing := every.count(None):
            yield (
                f"{missing} of {len(every)} finished samples have no score by {name}; they come "
                "after those with one"
            )


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


def _own_manifest(
    manifest: Mapping[str, Any], file: RankedFile, ranking: Ranking
) -> dict[str, Any]:
    """Return the manifest of the ranked lines.

    With `best` its results are those of `bass generate --best-of K --rank-by NAME`.
    """
    totals = file.totals | {"seconds": known_seconds(file.path, file.kept + file.dropped)}
    by = {ranker.name: ranker.identity for ranker in ranking.rankers}
    pattern = None if ranking.answer is None else ranking.answer.pattern
    own: dict[str, Any] = {"ranked": {"by": by, "answer": pattern}}
    if ranking.best is None:
        return {**manifest, "totals": totals, **own}
    best = {"best_of": ranking.best, "rank_by": next(iter(by))}
    own |= {"results": {**manifest["results"], **best}, "expected": None}
    return {**manifest, "totals": totals | {"dropped": file.dropped, "seconds": None}, **own}
