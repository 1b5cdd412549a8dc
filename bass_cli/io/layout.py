"""Result lines of another layout: chosen keys, or one line for each prompt.

A line of a prompt is written when the last of its samples has ended. Its keys are those that all
samples share, and `samples`, a list with the other keys of each. io/resume.py reads both layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from bass_cli.config.job import Job
from bass_cli.errors import UserError, nearest
from bass_cli.io.prompts import Prompt
from bass_cli.io.results import NAMES, Completion, Writer

# Keys whose values all samples of a prompt share, in the order of a line
_OF_PROMPT = ("id", "seed", "prompt_tokens", "meta", "prompt", "messages", "prompt_token_ids",
              "prompt_logprobs", "prompt_top_logprobs")  # fmt: skip
_SAMPLES = "samples"
_OF_OTHERS = ("task_id", "completion", "perplexity")  # keys that other commands set
_OF_RANKS = ("rank", "scores")
# What a job needs for a key: the option, and whether it is set
_NEEDS: dict[str, tuple[str, Callable[[Job], object]]] = {
    "token_ids": ("token_ids", lambda job: job.token_ids or job.sampling.logprobs is not None),
    "token_logprobs": ("sampling.logprobs", lambda job: job.sampling.logprobs is not None),
    "top_logprobs": ("sampling.logprobs", lambda job: job.sampling.logprobs),
    "token_drafted": ("token_drafted", lambda job: job.token_drafted),
    "prompt": ("echo", lambda job: job.echo),
    "messages": ("echo", lambda job: job.echo),
    "prompt_token_ids": ("echo", lambda job: job.echo or _scores_prompts(job)),
    "prompt_logprobs": ("sampling.prompt_logprobs", lambda job: _scores_prompts(job)),
    "prompt_top_logprobs": ("sampling.prompt_logprobs", lambda job: job.sampling.prompt_logprobs),
}


def _scores_prompts(job: Job) -> bool:
    return job.sampling.prompt_logprobs is not None


def read_columns(text: str | None, job: Job, *, ranked: bool) -> tuple[str, ...] | None:
    """Parse "id,text"; None if it is None. UserError at a key that no line of the job would have.

    Lines may set log-probabilities of their own, but a key needs the option of the job.

    `ranked`: Whether samples are ranked.
    """
    if text is None:
        return None
    names = [one.strip() for one in text.split(",")]
    known = [name for name in NAMES if name not in _OF_OTHERS]
    for name in names:
        if name not in known:
            raise UserError(f'`columns`: "{name}" is not a key of a line; {nearest(name, known)}')
        if name in _OF_RANKS and not ranked:
            raise UserError(f'`columns`: no line has "{name}" without `best_of`')
        option, is_set = _NEEDS.get(name, ("", lambda job: True))
        if not is_set(job):
            raise UserError(f'`columns`: no line has "{name}" without `{option}`')
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f'`columns`: "{twice[0]}" is given twice')
    return tuple(names)


class LayoutWriter:
    """A writer of lines with some keys only, or of a line for each prompt.

    The keys that a resumed run needs are kept: the id, and in lines of samples their number. An
    error is always shown.

    Args:
        writer: The output.
        columns: The keys, in their order; None for all.
        group: Whether a line has all samples of a prompt.
        n: Samples of a prompt without a number of its own.
    """

    def __init__(
        self, writer: Writer, *, columns: Collection[str] | None, group: bool, n: int
    ) -> None:
        self._writer, self._columns, self._group, self._n = writer, columns, group, n
        self._own: dict[str, int] = {}  # samples of a prompt, by id, if it has its own number
        self._waiting: dict[str, list[Completion]] = {}
        self.name, self.notes, self.done = writer.name, writer.notes, writer.done

    def expect(self, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
        """Yield the prompts, and note how many samples each has."""
        for prompt in prompts:
            if (count := prompt.samples(self._n)) != self._n:
                self._own[prompt.id] = count
            yield prompt

    def write(self, completion: Completion) -> None:
        """Take a sample; append its line, or that of its prompt if this was the last sample."""
        if not self._group:
            row = completion.row()
            self._writer.append_row(self._chosen(row, ("id", "sample")), row)
            return
        samples = [completion]
        if not completion.is_of_prompt:
            samples = self._waiting.setdefault(completion.id, [])
            samples.append(completion)
            if len(samples) < self._own.get(completion.id, self._n):
                return
        self._waiting.pop(completion.id, None)
        self._write_prompt(samples)

    def write_samples(self, samples: Sequence[Completion]) -> None:
        """Append the lines of samples of one prompt, or its line if a line has all of them."""
        if self._group and samples:
            self._write_prompt(samples)
            return
        for one in samples:
            self.write(one)

    def _write_prompt(self, samples: Sequence[Completion]) -> None:
        rows = [one.row() for one in sorted(samples, key=lambda one: one.sample)]
        self._writer.append_row(self._grouped(rows, samples[-1]), {_SAMPLES: rows})

    def _grouped(self, rows: list[dict[str, Any]], last: Completion) -> dict[str, Any]:
        """Return the line of a prompt."""
        shared = {key: value for row in rows for key, value in row.items() if key in _OF_PROMPT}
        samples = [{key: row[key] for key in row if key not in _OF_PROMPT} for row in rows]
        kept = [] if last.is_of_prompt else [self._chosen(sample, ()) for sample in samples]
        line: dict[str, Any] = {}
        for key in self._columns or (*_OF_PROMPT, _SAMPLES):
            if key not in _OF_PROMPT:
                line[_SAMPLES] = kept
            elif key in shared:
                line[key] = shared[key]
        line = {**line, "id": last.id, _SAMPLES: kept}
        return {**line, "error": last.error} if last.is_of_prompt else line

    def _chosen(self, row: dict[str, Any], needed: tuple[str, ...]) -> dict[str, Any]:
        """Return the chosen keys of a row; those that are needed follow them."""
        if self._columns is None:
            return row
        keys = dict.fromkeys((*self._columns, *needed, "error"))
        return {key: row[key] for key in keys if key in row}

    def add_run(self, seconds: float, usage: dict[str, Any]) -> None:
        """Add this run's seconds to the totals of the manifest."""
        self._writer.add_run(seconds, usage)

    def confirm(self) -> None:
        """Raise MachineError if the file was renamed, replaced or truncated."""
        self._writer.confirm()
