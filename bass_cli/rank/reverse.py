"""Score a sample by the target's log-probability of the prompt, given the sample.

This is the idea of the reviewer of Zhang et al. 2022 (arXiv 2211.16490): a good answer lets the
model recover the request. A general text such as `pass` is likely after any prompt, and explains
none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from bass_cli.config.job import Job
from bass_cli.io.prompts import prompts_of
from bass_cli.rank.code import bare_program, is_whole
from bass_cli.rank.ranking import Candidate, Group, Scores, needed_prompt
from bass_cli.run.logprobs import COLUMN, longest_of, score, scoring_job

# Between the sample and the prompt. A program's prompt is mostly a docstring.
_AFTER_CODE = "\n\n# Write a docstring for the above function\n"
_AFTER_TEXT = "\n\nThe text above is the answer to this request:\n"


class ReverseRanker:
    """The ranker "reverse".

    Args:
        job: Its target scores; the draft and the sampling are not used.
        on_phase, on_bytes: See run/logprobs.py's `score`.
    """

    name = "reverse"

    def __init__(
        self,
        job: Job,
        *,
        on_phase: Callable[[str], None] = lambda name: None,
        on_bytes: Callable[[int, int], None] = lambda done, whole: None,
    ):
        job = job.model_copy(update={"chat": False, "prompt_column": "prompt", "id_column": None})
        self._job, self._on_phase, self._on_bytes = scoring_job(job), on_phase, on_bytes

    @property
    def identity(self) -> Any:
        """What the scores depend on, besides the group."""
        return model_identity(self._job)

    def scores(self, groups: Iterable[Group]) -> Iterator[Scores]:
        """Yield the mean log-probability of the prompt's tokens after each sample.

        None for a sample that does not fit into the model's context with the prompt, and for a
        program that does not compile or has no body: it answers nothing, whatever its score.
        """
        from bass_cli.run.plan import make_plan

        count = sum(1 for _ in _texts(groups))
        if not count:  # no sample answers anything
            return _by_group(groups, {}, iter(()))
        longest = longest_of(prompts_of(_texts(groups)), self._job, COLUMN)
        plan = make_plan(self._job, longest_prompt=longest, prompts=count)
        results = score(_texts(groups), plan, on_phase=self._on_phase, on_bytes=self._on_bytes)
        return _by_group(groups, {}, results)


def _by_group(
    groups: Iterable[Group], found: dict[str, float | None], results: Iterator[Any]
) -> Iterator[Scores]:
    """Yield the scores of each group. Results of texts that cannot be scored come early."""
    first = 0
    for group in groups:
        every = [_text_of(one, group) for one in group.candidates]
        texts = list(dict.fromkeys(text for text in every if text is not None))
        ids = [str(first + at) for at in range(len(texts))]
        first += len(texts)
        while not found.keys() >= set(ids):
            one = next(results)
            found[one.id] = one.mean_logprob
        by_text = {text: found.pop(id_) for text, id_ in zip(texts, ids, strict=True)}
        yield [None if text is None else by_text[text] for text in every]


def _texts(groups: Iterable[Group]) -> Iterator[dict[str, str]]:
    """Yield the distinct texts of each group."""
    for group in groups:
        prompt = needed_prompt(group, "reverse")
        for text in dict.fromkeys(_text_of(one, group) for one in group.candidates):
            if text is not None:
                yield {"prompt": text, COLUMN: prompt}


def _text_of(candidate: Candidate, group: Group) -> str | None:
    """Return the text before the prompt; None if the sample is a program that answers nothing."""
    program = candidate.program
    whole = program is None or is_whole(program, group.entry_point)
    return context_of(candidate) if whole else None


def context_of(candidate: Candidate) -> str:
    """Return the text before the prompt: the sample, without the prompt's own words.

    A program has the prompt's head, but no docstrings and comments, which would give the prompt
    away.
    """
    if candidate.program is not None:
        return (bare_program(candidate.program) or candidate.text) + _AFTER_CODE
    return candidate.text.strip() + _AFTER_TEXT


def model_identity(job: Job) -> dict[str, Any]:
    """Return what identifies a job's target in a file of scores."""
    pair = job.pair
    named = {"target": pair.target, "lora": [*map(str, job.lora)], "folder": str(pair.folder)}
    return named | {"dtype": job.dtype, "kv_dtype": job.kv_dtype, "seed": job.sampling.seed}
