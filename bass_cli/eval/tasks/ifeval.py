"""The task ifeval: does a response follow the instructions of its prompt?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from bass_cli.errors import nearest
from bass_cli.eval.tasks.instructions import INSTRUCTIONS, check_packages, follows, follows_loosely
from bass_cli.eval.tasks.task import Check, Defaults, Fields, Problem, Task, identity
from bass_cli.rank.code import without_thoughts
from bass_cli.reading import text, texts


class IfEval(Task):
    """IFEval (Zhou et al., arXiv 2311.07911): prompts with instructions that programs can check.

    A sample passes if it follows all instructions of its prompt (strict, prompt level). `figures`
    has the other accuracies of the paper.
    """

    name, executes = "ifeval", False
    defaults = Defaults(max_new_tokens=1280)  # the longest prompts ask for 1,000 words and more
    stops = ()
    source = "hf:google/IFEval:train"
    needed: ClassVar[Fields] = {
        "key": identity,
        "prompt": text,
        "instruction_id_list": texts,
        "kwargs": lambda value: _argument_lists(value),
    }

    def problem(self, record: dict[str, Any]) -> Problem:
        names, given = record["instruction_id_list"], record["kwargs"]
        if len(names) != len(given):
            raise ValueError(
                f'field "kwargs": it has {len(given)} entries for {len(names)} instructions'
            )
        arguments = []
        for name, values in zip(names, given, strict=True):
            if name not in INSTRUCTIONS:
                near = nearest(name, INSTRUCTIONS)
                raise ValueError(f'field "instruction_id_list": there is no "{name}"; {near}')
            check_packages(name)
            arguments.append(_checked(name, values or {}))
        fields = {**record, "kwargs": arguments}
        return Problem(str(record["key"]), record["prompt"], fields)

    def question(self, problem: Problem) -> str:
        return problem.prompt

    def completion(self, problem: Problem, text: str, *, chat: bool) -> str:
        return text

    def check(self, problem: Problem, text: str) -> Check:
        followed = _followed(problem, text)["strict"]
        names = problem.fields["instruction_id_list"]
        missed = [name for name, one in zip(names, followed, strict=True) if not one]
        if not missed:
            return Check("passed")
        return Check("failed", f"{len(missed)} of {len(names)} not followed: {', '.join(missed)}")

    def figures(self, responses: Mapping[str, Sequence[str | None]]) -> dict[str, Any]:
        """Return the accuracies of the paper, strict and loose, over all samples.

        "prompt": the share of samples that follow all instructions. "instruction": the share of
        instructions that are followed. "by_kind": that share for each kind. A sample that is not
        finished follows none.
        """
        found: dict[str, Any] = {}
        kinds: dict[str, list[str]] = {"all": []}
        for name, problem in self.problems.items():
            kinds[name] = list(problem.fields["instruction_id_list"])
        rows = [
            (kinds[name], None if one is None else _followed(self.problems[name], one))
            for name, texts_of in responses.items()
            for one in texts_of
        ]
        for way in ("strict", "loose"):
            marks = [(names, row[way] if row else [False] * len(names)) for names, row in rows]
            pairs = [pair for names, row in marks for pair in zip(names, row, strict=True)]
            by_kind: dict[str, list[bool]] = {}
            for name, one in pairs:
                by_kind.setdefault(name, []).append(one)
            found[way] = {
                "prompt": sum(all(row) for _, row in marks) / max(len(marks), 1),
                "instruction": sum(one for _, one in pairs) / max(len(pairs), 1),
                "by_kind": {
                    name: sum(by_kind[name]) / len(by_kind[name]) for name in sorted(by_kind)
                },
            }
        return {"instructions": found}


def _argument_lists(value: Any) -> list[Any]:
    if not isinstance(value, list) or not all(
        one is None or isinstance(one, dict) for one in value
    ):
        raise ValueError("a list of objects is needed, one for each instruction")
    return value


def _checked(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an instruction's arguments. The hub's files have all others too, as null.

    ValueError if one is missing, unknown or invalid.
    """
    given = {key: value for key, value in values.items() if value is not None}
    checks = INSTRUCTIONS[name].arguments
    for key in given.keys() - checks.keys():
        raise ValueError(f'field "kwargs": {name} has no argument "{key}"; {nearest(key, checks)}')
    for key, check in checks.items():
        if key not in given:
            raise ValueError(f'field "kwargs": {name} needs the argument "{key}"')
        try:
            check(given[key])
        except ValueError as error:
            raise ValueError(f'field "kwargs": {name}, argument "{key}": {error}') from None
    return given


def _followed(problem: Problem, response: str) -> dict[str, list[bool]]:
    """Return which instructions a response follows, strictly and loosely.

    What a reasoning model writes up to `</think>` is no part of the response.
    """
    response = without_thoughts(response)
    pairs = list(zip(problem.fields["instruction_id_list"], problem.fields["kwargs"], strict=True))
    return {
        "strict": [follows(name, response, given) for name, given in pairs],
        "loose": [follows_loosely(name, response, given) for name, given in pairs],
    }
