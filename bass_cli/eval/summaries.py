"""XSum (Narayan et al., arXiv 1808.08745): summarise an article in one sentence.

Scored by ROUGE (Lin, 2004) as computed by the rouge-score package: F-measures of words, pairs of
words and the longest common subsequence, with stemming.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from bass_cli.errors import MachineError, UserError
from bass_cli.eval.data import Fields, identity, read_problems
from bass_cli.eval.tasks import Answer, Defaults, Problem
from bass_cli.io.reading import text
from bass_cli.sandbox.jail.job_spec import Program

_DATA = "hf:EdinburghNLP/xsum:test"
_FIELDS: Fields = {"document": text, "summary": text, "id": identity}
_KINDS = ("rouge1", "rouge2", "rougeL")


class Summaries:
    """The task "xsum"."""

    name, executes = "xsum", False
    defaults = Defaults(temperature=0.2, top_p=0.95, max_new_tokens=128)
    stops: Sequence[str] = ("\n\n", "\nArticle:")

    def __init__(self, data: str | None = None):
        if importlib.util.find_spec("rouge_score") is None:
            raise MachineError(
                "xsum needs the package rouge-score, which is not installed: "
                "pip install 'bass-cli[xsum]'"
            )
        self.problems = read_problems(data or _DATA, _FIELDS, _problem)
        self._scorer: Any = None

    def question(self, problem: Problem) -> str:
        return (
            "Summarise the following article in one "
            f"sentence.\n\n{problem.fields['document'].strip()}"
        )

    def completion(self, problem: Problem, text: str, *, chat: bool) -> str:
        return text.strip()

    def program(self, problem: Problem, answer: Answer) -> Program:
        raise UserError("xsum has no programs to run")

    def rate(self, problem: Problem, text: str) -> dict[str, float]:
        if self._scorer is None:
            from rouge_score.rouge_scorer import RougeScorer

            self._scorer = RougeScorer(list(_KINDS), use_stemmer=True)
        scores = self._scorer.score(problem.fields["summary"], text)
        return {kind: float(scores[kind].fmeasure) for kind in _KINDS}


def _problem(record: dict[str, Any]) -> Problem:
    prompt = f"Article: {record['document'].strip()}\n\nSummary of the article in one sentence:"
    return Problem(str(record["id"]), prompt, record)
