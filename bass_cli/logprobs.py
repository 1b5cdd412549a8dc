"""Run `bass logprobs`: write the target's log-probabilities of given completions.

The result lines, their file and how it is continued are those of `bass generate`; the numbers are
found in run/logprobs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
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
from bass_cli.io.fields import refuse
from bass_cli.io.prompts import Prompt, read_prompts
from bass_cli.io.results import Completion, open_output
from bass_cli.io.resume import PromptDigest, samples_of
from bass_cli.io.saving import refuse_shared_files
from bass_cli.reading import unquoted
from bass_cli.run.logprobs import COLUMN, longest_of, score, scoring_job
from bass_cli.run.manifest import Facts, facts_of
from bass_cli.run.requests import import_for

if TYPE_CHECKING:
    from bass_cli.run.plan import Plan


class _Scoring:
    """A source of scored completions, in place of one of samples (generation.Backend)."""

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


class _Texts:
    """Makes texts to score of samples that `bass generate --echo` wrote. Other records stay.

    The id of a text is "ID/SAMPLE". Settings and figures of a sample are left out.
    """

    def __init__(self, prompt_column: str, column: str):
        self._prompt_column, self._column = prompt_column, column
        self._left_out: dict[str, str] = {}  # places of samples with nothing to score, by id

    def of(self, record: Any, place: str) -> Iterator[Any]:
        """Yield the texts of a stored record: of a sample, or of all samples of a prompt."""
        if not isinstance(record, Mapping) or not self._is_of_samples(record):
            yield record
            return
        for sample in samples_of(record):
            id_ = f"{sample['id']}/{sample['sample']}"
            if sample["finish_reason"] == "error" or sample.get(self._column) in ("", []):
                self._left_out[id_] = place
            else:
                yield {"id": id_} | self._content(sample, place)

    def _is_of_samples(self, record: Mapping[str, Any]) -> bool:
        """Whether it is a sample, or has the samples of a prompt (`bass generate --group`)."""
        listed = record.get("samples")
        if isinstance(listed, list) and self._column not in record:
            return "id" in record and all(isinstance(one, dict) for one in listed)
        return record.keys() >= {"id", "sample", "finish_reason"}

    def _content(self, sample: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Return the prompt of a sample, and its completion as a part of `meta`."""
        given = sample.get("meta") or {}
        meta = given if isinstance(given, Mapping) else {"meta": given}
        if self._column in meta:
            refuse(place, "meta", f'"{self._column}" is also a field of the sample; rename it')
        found = {"meta": {**meta, self._column: sample.get(self._column)}}
        if sample.get("messages") is not None:  # beside "prompt" they are the whole prompt
            return found | {"messages": sample["messages"]}
        if sample.get("prompt") is not None:
            return found | {self._prompt_column: sample["prompt"]}
        if sample.get("prompt_token_ids") is None:
            raise UserError(f"{place}: the sample has no prompt; draw samples with `echo`")
        return found | {"token_ids": sample["prompt_token_ids"]}

    def notes(self) -> Iterator[str]:
        """Yield a note on samples that are left out, once the texts were read."""
        if self._left_out:
            id_, place = next(iter(self._left_out.items()))
            yield (
                f"samples that failed or are empty are not scored: {len(self._left_out)}, the "
                f'first "{unquoted(id_)}" ({place})'
            )


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
    samples = _Texts(job.prompt_column, column)
    source = replace(source, change=samples.of)
    digest = PromptDigest(source, job.prompt_column)

    def texts() -> Iterator[Prompt]:
        return read_prompts(source, column=job.prompt_column, limit=job.limit)

    def added() -> Iterator[Prompt]:
        for text in texts():
            digest.add(text)
            yield text

    longest = longest_of(added(), job, column)
    for note in samples.notes():
        screen.note(note)
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
