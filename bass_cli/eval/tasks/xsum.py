"""The task xsum: summaries, scored by ROUGE."""

from __future__ import annotations

import importlib.util
from typing import Any, ClassVar

from bass_cli.errors import MachineError
from bass_cli.eval.tasks.task import Defaults, Fields, Problem, Task, identity
from bass_cli.reading import text


class Xsum(Task):
    """XSum (Narayan et al., arXiv 1808.08745): summarise an article in one sentence.

    Scored by ROUGE (Lin, 2004) as computed by the rouge-score package: F-measures of words, pairs
    of words and the longest common subsequence, with stemming.
    """

    name, executes, rates = "xsum", False, True
    defaults = Defaults(max_new_tokens=128)
    stops = ("\n\n", "\nArticle:")
    source = "hf:EdinburghNLP/xsum:test"
    needed: ClassVar[Fields] = {"document": text, "summary": text, "id": identity}

    def __init__(self, data: str | None = None) -> None:
        if importlib.util.find_spec("rouge_score") is None:
            raise MachineError(
                "xsum needs the package rouge-score, which is not installed: "
                "pip install 'bass-cli[xsum]'"
            )
        super().__init__(data)
        self._scorer: Any = None

    def problem(self, record: dict[str, Any]) -> Problem:
        prompt = f"Article: {record['document'].strip()}\n\nSummary of the article in one sentence:"
        return Problem(str(record["id"]), prompt, record)

    def question(self, problem: Problem) -> str:
        return (
            "Summarise the following article in one "
            f"sentence.\n\n{problem.fields['document'].strip()}"
        )

    def completion(self, problem: Problem, text: str, *, chat: bool) -> str:
        return text.strip()

    def rate(self, problem: Problem, text: str) -> dict[str, float]:
        if self._scorer is None:
            from rouge_score.rouge_scorer import RougeScorer

            self._scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
        scores = self._scorer.score(problem.fields["summary"], text)
        return {measure: float(score.fmeasure) for measure, score in scores.items()}
