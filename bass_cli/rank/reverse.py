"""Score a sample by the target's log-probability of the prompt, given the sample.

This is the reviewer of Zhang et al. 2022 (arXiv 2211.16490): a good answer lets the model recover
the request. A general text such as `pass` is likely after any prompt, and explains none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from bass_cli.config.job import Job
from bass_cli.io.prompts import Prompt, prompts_of
from bass_cli.rank.ranking import Candidate, Group, Scores, needed_prompt
from bass_cli.rank.static import bare_program
from bass_cli.run.logprobs import COLUMN, longest_of, score, scoring_job

# Between the sample and the prompt: for programs the words of arXiv 2211.16490, section 3
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

        None for a sample that does not fit into the model's context with the prompt.
        """
        from bass_cli.run.plan import make_plan

        longest, count = longest_of(_texts(groups), self._job, COLUMN), len(list(_texts(groups)))
        plan = make_plan(self._job, longest_prompt=longest, prompts=count)
        results = score(_texts(groups), plan, on_phase=self._on_phase, on_bytes=self._on_bytes)
        return _by_group(groups, {}, results)


def _by_group(
    groups: Iterable[Group], found: dict[str, float | None], results: Iterator[Any]
) -> Iterator[Scores]:
    """Yield the scores of each group. Results of texts that cannot be scored come early."""
    first = 0
    for group in groups:
        texts = list(dict.fromkeys(map(context_of, group.candidates)))
        ids = [str(first + at) for at in range(len(texts))]
        first += len(texts)
        while not found.keys() >= set(ids):
            one = next(results)
            found[one.id] = one.mean_logprob
        by_text = {text: found.pop(id_) for text, id_ in zip(texts, ids, strict=True)}
        yield [by_text[context_of(one)] for one in group.candidates]


def _texts(groups: Iterable[Group]) -> Iterator[Prompt]:
    """Yield the distinct texts of each group, numbered through."""

    def every() -> Iterator[dict[str, str]]:
        for group in groups:
            prompt = needed_prompt(group, "reverse")
            for text in dict.fromkeys(map(context_of, group.candidates)):
                yield {"prompt": text, COLUMN: prompt}

    return prompts_of(every())


def context_of(candidate: Candidate) -> str:
    """Return the text before the prompt: the sample, without the prompt's own words.

    A program has the prompt's head, but no docstrings and comments, which would give the prompt
    away.
    """
    bare = None if candidate.program is None else bare_program(candidate.program)
    if bare is not None:
        return bare + _AFTER_CODE
    return candidate.text.strip() + (_AFTER_TEXT if candidate.program is None else _AFTER_CODE)


def model_identity(job: Job) -> dict[str, Any]:
    """Return what identifies a job's target in a file of scores."""
    pair = job.pair
    named = {"target": pair.target, "lora": [*map(str, job.lora)], "folder": str(pair.folder)}
    return named | {"dtype": job.dtype, "kv_dtype": job.kv_dtype, "seed": job.sampling.seed}
