"""What a ranker sees, what it returns, and the order that follows from its scores.

A Group has the finished samples of one prompt. It holds no tests of a task, so no ranker can use
them. The rankers that need no model are made here by name; the others are in files of their own.
Majority voting is self-consistency (Wang et al. 2022, arXiv 2203.11171). Its answers are compared
after normalisation: numbers by value, programs by syntax tree, other texts without case and
spacing.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, Protocol

from bass_cli.errors import UserError, nearest
from bass_cli.io.prompts import Prompt
from bass_cli.rank.code import bare_program, checks_passed, is_whole, source_in

Scores = Sequence[float | None]

LOGPROB = "logprob"
UNFINISHED = ("budget", "error")  # finish reasons of samples that are not scored
REWARD = "reward:"
# What each ranker scores, for messages and help
WORDS: Mapping[str, str] = {
    LOGPROB: "mean log-probability",
    "static": "checks of the program",
    "majority": "share of samples with the same answer",
    "reverse": "log-probability of the prompt given the answer",
    "tests": "agreement on generated tests",
    f"{REWARD}MODEL": "a reward model",
}
_BOXED = "\\boxed{"
_HASHES = re.compile(r"####[ \t]*([^\n]+)")  # the mark of GSM8K's solutions
# A number with an optional currency, thousands separators and percent sign. At most 100 digits,
# because longer ones are no answers and Python refuses thousands of digits.
_NUMBER = re.compile(
    r"([-+]?)[$€£]?\s*(\d{1,3}(?:,\d{3}){1,33}|\d{1,100})(?:\.(\d{0,100}))?\s*(%?)", re.ASCII
)
_FRACTION = re.compile(r"([-+]?\d{1,100})\s*/\s*(\d{1,100})", re.ASCII)
Answer = tuple[str | None, str | None, str]  # the answer, the program and the whole text


class Candidate(NamedTuple):
    """A finished sample as rankers see it.

    Attributes:
        text: What the model wrote.
        finish_reason: None if unknown.
        mean_logprob: None if unknown.
        program: Python source with the sample's code; None if the sample is not code.
        answer: The answer that was extracted from the text; None if nothing was extracted.
    """

    sample: int
    text: str
    finish_reason: str | None = None
    mean_logprob: float | None = None
    program: str | None = None
    answer: str | None = None


class Group(NamedTuple):
    """The finished samples of one prompt.

    Attributes:
        prompt: The text of the prompt, without tests of a task; None if unknown.
        entry_point: The name of the function that the prompt describes; None if unknown.
    """

    id: str
    prompt: str | None
    candidates: Sequence[Candidate]
    entry_point: str | None = None

    def answers(self, candidate: Candidate) -> bool:
        """Whether a sample is no program, or one that compiles and has the function's body."""
        return candidate.program is None or is_whole(candidate.program, self.entry_point)


class Standing(NamedTuple):
    """The rank of a sample among those of its prompt, from 1, and its scores by ranker."""

    rank: int
    scores: Mapping[str, float | None]


class Members(NamedTuple):
    """The samples of one prompt. `unfinished` are not scored, and come after the others."""

    group: Group
    unfinished: Sequence[Candidate]

    @classmethod
    def of(
        cls,
        id_: str,
        prompt: str | None,
        candidates: Sequence[Candidate],
        entry_point: str | None = None,
    ) -> Members:
        """Return the samples of a prompt. For the arguments see Group."""
        finished = [one for one in candidates if one.finish_reason not in UNFINISHED]
        unfinished = [one for one in candidates if one.finish_reason in UNFINISHED]
        return cls(Group(id_, prompt, finished, entry_point), unfinished)


def needed_prompt(group: Group, name: str) -> str:
    """Return the prompt of a group. UserError if it is unknown."""
    if not group.prompt:
        raise UserError(
            f'{name}: the text of the prompt "{group.id}" is unknown; name the file with '
            "`prompts`, or draw with `echo`"
        )
    return group.prompt


def candidate_of(
    prompt: str | None,
    sample: int,
    text: str,
    finish_reason: str | None,
    mean_logprob: float | None,
    *,
    answer: str | None = None,
) -> Candidate:
    """Return a sample of no known task. Its code, if it has some, may continue the prompt."""
    program = source_in(prompt, text)
    return Candidate(sample, text, finish_reason, mean_logprob, program, answer)


def prompt_text(prompt: Prompt) -> str | None:
    """Return a prompt as one text; None if it has only token ids."""
    if prompt.text is not None:
        return prompt.text
    return None if prompt.messages is None else text_of(prompt.messages)


def text_of(messages: Sequence[Any]) -> str:
    """Return the user's messages of a chat as one text."""
    questions = (one for one in messages if isinstance(one, dict) and one.get("role") == "user")
    return "\n\n".join(str(one.get("content") or "") for one in questions)


class Ranker(Protocol):
    """Scores samples.

    Attributes:
        name: Its key in `scores` of a result line.
    """

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> Any:
        """What the scores depend on besides the group, such as a model; JSON can hold it."""

    def scores(self, groups: Iterable[Group]) -> Iterator[Scores]:
        """Yield for each group a score of each candidate, in their order.

        Higher is better. None: the sample has no score, and is ranked last. `groups` may be
        iterated over more than once.
        """


class GroupRanker:
    """A ranker that needs nothing but a function of one group."""

    def __init__(self, name: str, rate: Callable[[Group], Scores]):
        self.name, self._rate, self.identity = name, rate, None

    def scores(self, groups: Iterable[Group]) -> Iterator[Scores]:
        """Yield the scores of each group."""
        return map(self._rate, groups)


def _logprobs(group: Group) -> Scores:
    """Return mean log-probabilities, the ranking of the BASS paper (arXiv 2404.15778)."""
    return [one.mean_logprob for one in group.candidates]


def _static(group: Group) -> Scores:
    return [
        checks_passed(one.program, one.finish_reason, group.entry_point) for one in group.candidates
    ]


def _majority(group: Group) -> Scores:
    """Return shares of votes. A program that is invalid or has no body is no answer."""
    return votes(
        (one.answer, one.program if group.answers(one) else "", one.text)
        for one in group.candidates
    )


_WITHOUT_MODEL: Mapping[str, Callable[[Group], Scores]] = {
    LOGPROB: _logprobs,
    "static": _static,
    "majority": _majority,
}


def parse_rankers(text: str, key: str) -> list[str]:
    """Parse "logprob,static" to distinct names.

    Args:
        key: The option, for messages.

    Raises:
        UserError: A name is unknown or given twice.
    """
    names = [one.strip() for one in text.split(",")]
    for name in names:
        if name not in WORDS and not (name.startswith(REWARD) and name != REWARD):
            raise UserError(f'{key}: there is no ranker "{name}"; {nearest(name, WORDS)}')
        if name == f"{REWARD}MODEL":
            raise UserError(f"{key}: {name}: give a model in place of MODEL")
        if names.count(name) > 1:
            raise UserError(f'{key}: "{name}" is given twice')
    return names


def needs_model(name: str) -> bool:
    """Whether a ranker runs a model."""
    return name not in _WITHOUT_MODEL


def ranker_without_model(name: str) -> Ranker:
    """Return a ranker that runs no model: logprob, static or majority."""
    return GroupRanker(name, _WITHOUT_MODEL[name])


def best_first(candidates: Sequence[Candidate], scores: Scores) -> list[int]:
    """Return the indices of the candidates, the best one first.

    Ties are broken by the mean log-probability, then by the lower sample number. Missing and NaN
    values come last.
    """

    def key(at: int) -> tuple[float, float, int]:
        one = candidates[at]
        return low(scores[at]), low(one.mean_logprob), one.sample

    return sorted(range(len(candidates)), key=key)


def low(value: float | None) -> float:
    """Return a value whose ascending order is best first."""
    return math.inf if value is None or math.isnan(value) else -value


def standings_of(
    members: Members, first: str, scores: Mapping[str, Scores]
) -> Iterator[tuple[int, Standing]]:
    """Yield the samples of a prompt with their standings, the best one first.

    Unfinished samples follow the finished ones, by their mean log-probability, without scores.

    Args:
        first: The ranker whose scores decide.
        scores: By ranker, in the order of the group's candidates.
    """
    candidates, rank = members.group.candidates, 0
    for rank, at in enumerate(best_first(candidates, scores[first]), 1):
        own = {name: of_ranker[at] for name, of_ranker in scores.items()}
        yield candidates[at].sample, Standing(rank, own)
    rest = members.unfinished
    for at in best_first(rest, [one.mean_logprob for one in rest]):
        rank += 1
        yield rest[at].sample, Standing(rank, dict.fromkeys(scores))


def votes(answers: Iterable[Answer]) -> list[float]:
    """Return for each sample the share of samples with an equal answer.

    A sample without an answer gets 0, and its vote counts for no other sample.

    Args:
        answers: The extracted answer if there is one, else the program (empty if the sample has
            none that is whole), else the whole text.
    """
    keys = [_key(*one) for one in answers]
    counts = Counter(key for key in keys if key is not None)
    return [0.0 if key is None else counts[key] / len(keys) for key in keys]


def _key(answer: str | None, program: str | None, text: str) -> Hashable:
    """Return what equal answers have in common; None without an answer."""
    if answer is None and program is not None:
        return bare_program(program) or None
    return normalised(found_in(text) if answer is None else answer)


def found_in(text: str) -> str:
    r"""Return the answer that a text marks: after the last `####` (GSM8K), or in the last `\boxed`.

    Without a mark it is the whole text.
    """
    boxed = text.rfind(_BOXED)
    marked = list(_HASHES.finditer(text))
    if marked and marked[-1].start() > boxed:
        return marked[-1][1]
    if boxed < 0:
        return text
    start, depth = boxed + len(_BOXED), 1
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return text[start:at]
    return text[start:]


def normalised(answer: str) -> Hashable:
    """Return a key that equal answers share; None if the answer is empty.

    Numbers are compared by value: "1,200", "$1200.00" and "1200." are equal, and so are "1/2" and
    "0.5". A percent sign is kept, because 50 % is not 50. Other texts are compared without case,
    surrounding punctuation and repeated spaces.
    """
    bare = answer.strip().strip("*`").removesuffix(".").strip()
    if found := _NUMBER.fullmatch(bare):
        sign, digits, decimals, percent = found.groups()
        value = Fraction(f"{sign}{digits.replace(',', '')}.{decimals or 0}")
        return value, percent
    if (found := _FRACTION.fullmatch(bare)) and int(found[2]):
        return Fraction(int(found[1]), int(found[2])), ""
    return " ".join(bare.casefold().split()).strip(".,;:!?\"'()[] ") or None
