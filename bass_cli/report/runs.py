"""Read a file of samples for the report: lines, verdicts, the task's prompts, and the figures.

The readers and the figures are those of eval/. Nothing is run and no model is loaded. Result lines
have the ids of tokens, not their texts, so log-probabilities of tokens are shown only if the
tokenizer is on this machine.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bass_cli.errors import UserError
from bass_cli.eval import report
from bass_cli.eval.judging import isolation_of
from bass_cli.eval.report import Outcome
from bass_cli.eval.samples import (
    Generation,
    GenerationFile,
    by_problem,
    find_problem,
    guess_task,
    known_problem,
    manifest_of,
    read_generations,
)
from bass_cli.eval.scoring import find_verdict, verdict_digests
from bass_cli.eval.stores import Verdict, read_verdicts
from bass_cli.eval.tasks import load_task
from bass_cli.eval.tasks.task import Task
from bass_cli.io.resume import part_of
from bass_cli.reading import without_nan
from bass_cli.report.sources import Source, quality_of

if TYPE_CHECKING:
    from bass_cli.formats.tokenizer import Tokenizer

LOGPROB_DIGITS = 3  # decimals of a token's log-probability on the page: 0.1 % of a probability
UNJUDGED = "not judged"
_ERROR = re.compile(r"(?:line \d+: )?([A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning))\b")
_WRONG = re.compile(r"input \d+: returned ")  # see eval/tasks/plus_check.py
_SYNTAX = ("SyntaxError", "IndentationError", "TabError")
# Keys of a line that the page shows beside the columns
_SHOWN = ("error", "reasoning", "copy_of", "rank", "score", "scores")
_BEFORE = 4  # tokens decoded before one whose text depends on them: a character has 4 bytes


class Outlines(NamedTuple):
    """The verdicts on the samples of a run, in the order of its lines.

    Attributes:
        statuses: the status of each sample; see Outcome.
        kinds: what failed: "" if it passed or is unknown; see `failure_kind`.
        details: the message of the tests.
    """

    statuses: list[str]
    kinds: list[str]
    details: list[str]


@dataclass
class Run:
    """The samples of one file, and what is known about them.

    Attributes:
        source: where the samples come from.
        file: the lines, in their order.
        extras: JSON objects, one for each line: what only the view of a sample shows.
        prompts: by prompt in the order of the lines: its text, the tests, other fields.
        outlines: the verdicts.
        figures: the report's document (docs/EVAL.md). Without verdicts it has no quality.
        judged: the outcomes of the problems whose finished samples all have a verdict.
        notes: sentences about what is missing.
    """

    source: Source
    file: GenerationFile
    extras: list[str]
    prompts: dict[str, dict[str, Any]]
    outlines: Outlines
    figures: dict[str, Any]
    judged: dict[str, list[Outcome]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Reader:
    """Reads the samples of a source, again and again while a job runs.

    Args:
        source: the file.
        task: the name of its task. Default: from the file.
        data: the task's data.
        timeout: the time limit of programs, which verdicts depend on. Default: the task's.
        model: where the target's tokenizer is. Default: from the manifest.
    """

    def __init__(
        self,
        source: Source,
        *,
        task: str | None = None,
        data: str | None = None,
        timeout: float | None = None,
        model: str | None = None,
    ) -> None:
        self.source, self._named, self._data, self._timeout = source, task, data, timeout
        self._task: Task | None = None
        self._model = model
        self._why = ""  # why there is no task
        self._tests: dict[str, str] = {}
        self._digests: dict[tuple[str, str, bool], tuple[str, ...]] = {}
        self._pieces: Pieces | None = None

    def read(self) -> Run:
        """Read the file and what is beside it. UserError if a line is invalid."""
        extras: list[str] = []
        prompts: dict[str, dict[str, Any]] = {}

        def see(row: dict[str, Any]) -> None:
            extras.append(self._extra(row))
            _see_prompt(row, prompts)

        if self._pieces is None:
            self._pieces = Pieces(manifest_of(self.source.path), self._model)
        file = read_generations(self.source.path, by_id=True, on_sample=see)
        if self._task is None and file.rows:
            self._load_task(file)
        named = dict.fromkeys(row.task_id for row in file.rows)
        shown = {name: self._prompt(name, prompts.get(name, {})) for name in named}
        known: dict[str, Verdict] = {}
        for path in self.source.verdict_paths():
            known = read_verdicts(path) | known
        return self._run(file, extras, shown, known)

    def _run(
        self,
        file: GenerationFile,
        extras: list[str],
        prompts: dict[str, dict[str, Any]],
        known: Mapping[str, Verdict],
    ) -> Run:
        notes = list(self._pieces.notes) if self._pieces else []
        if self._why:
            notes.append(self._why)
        verdicts = [self._verdict(row, known) for row in file.rows]
        found = [verdict for verdict, _ in verdicts]
        statuses = [
            verdict.status if verdict else UNJUDGED if row.finished else report.unjudged(row).status
            for row, verdict in zip(file.rows, found, strict=True)
        ]
        details = [verdict.detail if verdict else "" for verdict in found]
        runs_programs = self._task is None or self._task.executes
        kinds = [
            failure_kind(*one) if runs_programs else "wrong answer" if one[0] == "failed" else ""
            for one in zip(statuses, details, strict=True)
        ]
        judged = self._judged(file, statuses, [base for _, base in verdicts], notes)
        figures = _figures(file, statuses)
        if judged and self._task is not None:
            isolation = isolation_of(verdict for verdict in found if verdict)
            quality = report.build(file, judged, self._task, ks=ks_of(judged), isolation=isolation)
            figures |= {key: quality[key] for key in quality.keys() - figures.keys()}
            figures |= {key: quality[key] for key in ("task", "isolation", "estimates")}
            notes += [note for note in quality["notes"] if note not in notes]
        if fits(self.source.report, file):  # it has ROUGE, or Pass@First by several rankers
            beside = quality_of(self.source.report)
            estimates = {**beside.get("estimates", {}), **figures["estimates"]}
            figures = {**beside, **figures, "estimates": estimates}
        notes += [note for note in file.notes if note not in notes]
        outlines = Outlines(statuses, kinds, details)
        return Run(self.source, file, extras, prompts, outlines, figures, judged, notes)

    def _judged(
        self,
        file: GenerationFile,
        statuses: Sequence[str],
        bases: Sequence[str | None],
        notes: list[str],
    ) -> dict[str, list[Outcome]]:
        """Return the outcomes of the problems whose finished samples all have a verdict."""
        if self._task is None or self._task.rates:
            return {}
        lines = zip(file.rows, statuses, bases, strict=True)
        outcome = {id(row): Outcome(row, status, base=base) for row, status, base in lines}
        groups = by_problem(file, self._task.problems)
        outcomes = {name: [outcome[id(row)] for row in rows] for name, rows in groups.items()}
        judged = {
            name: rows
            for name, rows in outcomes.items()
            if all(one.status != UNJUDGED for one in rows)
        }
        if missing := sum(one == UNJUDGED for one in statuses):
            notes.append(
                f"{missing} finished samples have no verdict; run bass score {file.path}"
                + (f". The quality is that of {len(judged)} problems" if judged else "")
            )
        return judged

    def _load_task(self, file: GenerationFile) -> None:
        """Load the task, if the file answers one. Its data may be missing here."""
        try:
            name = self._named or guess_task(file)
        except UserError:
            return
        try:
            task = load_task(name, self._data)
            by_problem(file, task.problems)
        except UserError as error:
            if self._named or self._data:
                raise
            self._why = f"prompts and verdicts are not shown, because the task is unknown: {error}"
            return
        self._task = task

    def _prompt(self, name: str, seen: dict[str, Any]) -> dict[str, Any]:
        """Return what the page shows of a prompt: its own fields, and those of the task."""
        if self._task is None:
            return seen
        problems = self._task.problems
        found = find_problem(name, problems)
        if found is None:
            return seen
        problem = problems[found]
        if self._task.executes and found not in self._tests:
            self._tests[found] = self._task.program(problem, "", whole=False).tests
        more: dict[str, Any] = {"tests": self._tests[found]} if self._tests.get(found) else {}
        if not self._task.executes:
            more = {"problem": dict(problem.fields)}
        return {"prompt": problem.prompt, **seen, **more}

    def _verdict(
        self, row: Generation, known: Mapping[str, Verdict]
    ) -> tuple[Verdict | None, str | None]:
        """Return the verdict on a sample, and the status by base tests, as `find_verdict` does."""
        if not known or self._task is None or self._task.rates or not row.finished:
            return None, None
        key = row.task_id, row.text, row.whole
        if key not in self._digests:
            problems = self._task.problems
            problem = problems[known_problem(row, self.source.path, problems)]
            self._digests[key] = verdict_digests(self._task, problem, row, self._timeout)
        return find_verdict(self._digests[key], known)

    def _extra(self, row: Mapping[str, Any]) -> str:
        """Return the JSON object of what only the view of a sample shows."""
        found = {key: row[key] for key in _SHOWN if row.get(key) is not None}
        text, judged = row.get("text"), row.get("solution") or row.get("completion")
        if isinstance(text, str) and isinstance(judged, str) and text != judged:
            found["raw"] = text
        numbers, drafted = row.get("token_logprobs"), row.get("token_drafted")
        if isinstance(numbers, list) and numbers:
            found["token_logprobs"] = [_rounded(one) for one in numbers]
        if isinstance(drafted, list) and drafted:
            found["token_drafted"] = [int(one == 1) for one in drafted]
        if "token_logprobs" in found or "token_drafted" in found:
            whole = text if isinstance(text, str) else judged
            if self._pieces is not None and isinstance(whole, str):
                found |= self._pieces.of(row.get("token_ids"), whole)
        return packed(found) if found else "{}"


def packed(value: Any) -> str:
    """Return a value as JSON. NaN and infinity, which JSON cannot hold, become null."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return packed(without_nan(value))


def _rounded(number: Any) -> float | None:
    known = isinstance(number, (int, float)) and math.isfinite(number)
    return round(float(number), LOGPROB_DIGITS) if known else None


def _see_prompt(row: Mapping[str, Any], prompts: dict[str, dict[str, Any]]) -> None:
    """Keep what a line says about its prompt, from the first line that says it."""
    meta = row.get("meta")
    name = row.get("task_id")
    if name is None and isinstance(meta, dict):
        name = meta.get("task_id")
    known = prompts.setdefault(str(row.get("id") if name is None else name), {})
    for key in ("prompt", "messages", "meta"):
        if row.get(key):
            known.setdefault(key, row[key])


def _figures(file: GenerationFile, statuses: Sequence[str]) -> dict[str, Any]:
    """Return the figures that need no task: counts, times, speed and acceptance."""
    groups: dict[str, list[Outcome]] = {}
    for row, status in zip(file.rows, statuses, strict=True):
        groups.setdefault(row.task_id, []).append(Outcome(row, status))
    return report.build(file, groups, None, ks=None, isolation=None)


def ks_of(problems: Mapping[str, Sequence[Outcome]]) -> list[int]:
    """Return the values of k of the curve of pass@k: at most 12, up to the samples of a problem."""
    # a prompt that could not be run has one line, whatever n is
    drawn = (rows for rows in problems.values() if rows[0].generation.finish_reason != "error")
    most = min(map(len, drawn), default=1)
    steps = (1, 2, 3, 4, 5, 6, 8, 10, 16, 20, 32, 50, 64, 100, 128, 200, 256, 512, 1000)
    return sorted({*(one for one in steps if one <= most), most})


def fits(document: Mapping[str, Any], file: GenerationFile) -> bool:
    """Whether a report was made from the samples of this file as they are now."""
    finished = sum(row.finished for row in file.rows)
    return (document.get("samples"), document.get("finished")) == (len(file.rows), finished)


def failure_kind(status: str, detail: str) -> str:
    """Return what failed: syntax, assertion, time, memory, or the name of the exception.

    Empty for a sample that passed, that was not judged, or that did not finish.
    """
    if status in ("timed out", "out of memory"):
        return "time" if status == "timed out" else "memory"
    if status != "failed":
        return ""
    found = _ERROR.match(detail)
    if found is None:
        return "wrong answer" if _WRONG.match(detail) else "other"
    if found[1] in _SYNTAX:
        return "syntax"
    known = {"AssertionError": "assertion", "MemoryError": "memory"}
    return known.get(found[1], found[1])


class Pieces:
    """Finds where the tokens of a text begin.

    Attributes:
        notes: why tokens have no texts, if the tokenizer is not here.

    Args:
        manifest: of the file of samples; it names the target.
        model: the target here, if it is at another place than the manifest says.
    """

    def __init__(self, manifest: Mapping[str, Any], model: str | None = None) -> None:
        self.notes: list[str] = []
        self._tokenizer: Tokenizer | None = None
        self._texts: dict[int, str] = {}
        self._manifest, self._model, self._tried = manifest, model, False

    def of(self, ids: Any, text: str) -> dict[str, Any]:
        """Return {"pieces": the length of each token's text, in UTF-16 units}.

        Empty if it is unknown: the tokens do not spell the text, or there is no tokenizer. Tokens
        after the text, such as the end of the sample, have lengths too.
        """
        tokenizer = self._load()
        if tokenizer is None or not isinstance(ids, list) or not ids:
            return {}
        try:
            pieces = [self._alone(tokenizer, id_) for id_ in ids]
            if not "".join(pieces).startswith(text):
                pieces = _in_context(tokenizer, ids)
        except (TypeError, ValueError, OverflowError, UserError):
            return {}
        if not "".join(pieces).startswith(text):
            return {}
        return {"pieces": [len(one.encode("utf-16-le")) // 2 for one in pieces]}

    def _alone(self, tokenizer: Tokenizer, id_: int) -> str:
        if id_ not in self._texts:
            self._texts[id_] = tokenizer.decode([id_])
        return self._texts[id_]

    def _load(self) -> Tokenizer | None:
        """Return the tokenizer of the target. None if it is not on this machine."""
        if self._tried:
            return self._tokenizer
        self._tried = True
        from bass_cli.formats.sources import locate
        from bass_cli.formats.tokenizer import Tokenizer

        results, pair = part_of(self._manifest, "results"), part_of(self._manifest, "job", "pair")
        target = self._model or pair.get("tokenizer") or results.get("target")
        folder = pair.get("folder") if self._model is None else None
        if not isinstance(target, str):
            self.notes.append("tokens are not shown: the manifest names no target")
            return None
        try:
            path = locate(
                target, folder=Path(folder) if isinstance(folder, str) else None, fetch=False
            )
            found = Tokenizer.load(path)
        except UserError as error:
            self.notes.append(
                f"tokens are not shown: {error}; the option `model` says where the target is now"
            )
            return None
        if found.fingerprint() != results.get("vocabulary"):
            self.notes.append(f"tokens are not shown: {target} has another tokenizer")
            return None
        self._tokenizer = found
        return self._tokenizer


def _in_context(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds after the ones before it.

    A token that ends within a character adds nothing; the one that completes it adds all of it.
    """
    pieces = []
    start, shown = 0, ""  # where decoding begins, and the text from there that is known
    for place in range(len(ids)):
        text = tokenizer.decode(ids[start : place + 1])
        if text.endswith("\ufffd") and place + 1 - start <= 2 * _BEFORE:
            pieces.append("")
            continue
        pieces.append(text[len(shown) :])
        if place + 1 - start > _BEFORE:
            start = place
            shown = tokenizer.decode(ids[start : place + 1])
        else:
            shown = text
    return pieces
