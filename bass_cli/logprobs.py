"""Run `bass logprobs`: write the target's log-probabilities of given completions.

The result lines, their file and how it is continued are those of `bass generate`; the numbers are
found in run/logprobs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from bass_cli.config.sample_commands import LogprobsArgs
from bass_cli.errors import UserError
from bass_cli.generation import (
    check_name,
    files_read,
    files_written,
    output_of,
    read_job,
    source_of,
    write_samples,
)
from bass_cli.io.console import Screen
from bass_cli.io.prompts import Prompt, read_prompts
from bass_cli.io.results import Completion, open_output
from bass_cli.io.resume import PromptDigest
from bass_cli.io.saving import refuse_shared_files
from bass_cli.run.logprobs import COLUMN, longest_of, score, scoring_job
from bass_cli.run.manifest import Facts, facts_of
from bass_cli.run.requests import import_for

if TYPE_CHECKING:
    from bass_cli.run.plan import Plan


class _Scoring:
    """A source of scored completions, in place of one of samples (generation.Drawing)."""

    line: Callable[[], str] | None = None

    def __init__(self, plan: Plan, facts: Facts, screen: Screen, column: str):
        self.facts, self._plan, self._screen, self._column = facts, plan, screen, column

    def draw(
        self, prompts: Iterator[Prompt], done: Collection[tuple[str, int]], count: int | None
    ) -> Iterator[Completion]:
        return score(
            prompts,
            self._plan,
            column=self._column,
            done=set(done),
            on_phase=self._screen.phase,
            on_bytes=self._screen.bytes_read,
        )

    def usage(self) -> None:
        return None


def _text_of(prompt_column: str, column: str, row: Any) -> Any:
    """Return the text to score of a sample that `bass generate --echo` wrote, else the row.

    Its id is "ID/SAMPLE". Settings and figures of the sample are left out.
    """
    if not isinstance(row, Mapping) or not row.keys() >= {"id", "sample", "finish_reason"}:
        return row
    text = {"id": f"{row['id']}/{row['sample']}"}
    text |= {key: row[key] for key in (prompt_column, "messages", column, "meta") if key in row}
    ids = row.get("prompt_token_ids")
    return text if text.keys() & {prompt_column, "messages"} else text | {"token_ids": ids}


def score_file(args: LogprobsArgs, screen: Screen) -> bool:
    """Run `bass logprobs`; return whether every text was scored."""
    out, column = output_of(args), args.completion_column or COLUMN
    job = scoring_job(read_job(args, logprobs=args.logprobs or 0))
    if column in (job.prompt_column, "messages", "id"):
        raise UserError(f"`completion_column`: {column} is another field of a prompt")
    refuse_shared_files(
        files_written(out), [("the file of texts", args.prompts), *files_read(args.pair, job)]
    )
    check_name(out, overwrite=args.overwrite)
    source = source_of(args.prompts, args.prompt_column, screen)
    source = replace(source, change=partial(_text_of, job.prompt_column, column))
    digest = PromptDigest(source, job.prompt_column)

    def texts() -> Iterator[Prompt]:
        return read_prompts(source, column=job.prompt_column, limit=job.limit)

    def added() -> Iterator[Prompt]:
        for text in texts():
            digest.add(text)
            yield text

    longest = longest_of(added(), job, column)
    screen.phase("importing torch")
    tokenizer = import_for(job, screen.detail)
    from bass_cli.run.plan import make_plan

    screen.phase("checking the models", live=False)
    plan = make_plan(job, longest_prompt=longest, prompts=digest.count, tokenizer=tokenizer)
    identity = {"prompts": digest.record(), "prompt_column": job.prompt_column}
    facts = facts_of(plan, identity | {"completion_column": column})
    with open_output(
        out,
        facts.manifest | {"source": source.name, "expected": digest.count},
        resume=args.resume,
        overwrite=args.overwrite,
        prompts=digest,
    ) as writer:
        scoring = _Scoring(plan, facts, screen, column)
        write_samples(writer, scoring, plan.job, texts(), digest.count, screen)
    return writer.finished
