"""Score programs by their agreement on tests that the model wrote: CodeT (arXiv 2207.10397).

The tests are drawn in a second drawing, after the prompt and the words `assert NAME(`. Those in
the samples are not enough: completions of code end before they have any. The samples and the
generated tests run in the sandbox. Tests of a task are not used.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from bass_cli.config.job import Job
from bass_cli.config.sampling import Sampling
from bass_cli.errors import UserError
from bass_cli.rank.code import compiled, modules_of, parse
from bass_cli.rank.ranking import Group, Scores, needed_prompt
from bass_cli.rank.reverse import model_identity
from bass_cli.sandbox.programs import DEFAULT_LIMITS, Program, Sandbox

if TYPE_CHECKING:
    from bass_cli.run.engine import Engine

DRAWINGS = 16  # texts with tests for each prompt: as many as samples in the usual job
PER_DRAWING = 5  # tests of a text that are used; a text with many tests repeats itself
MOST = 40  # tests of a prompt, the most frequent ones; each costs time for each sample
# A high temperature gives diverse tests; a test has about 20 tokens
_SAMPLING = Sampling(
    temperature=0.8,
    top_p=0.95,
    max_new_tokens=200,
    stop=["\ndef ", "\nclass ", "\nif ", "\nprint", "\n#", "\n\n\n"],
)
_TOGETHER = 64  # prompts whose tests are drawn together, to fill the batch
_LINES = 8  # lines of one test
# Limits of all tests of a program together, which take milliseconds if each of them ends, and of
# one test alone
_TOGETHER_LIMITS = DEFAULT_LIMITS._replace(seconds=6.0, cpu_seconds=3)
_ALONE_LIMITS = DEFAULT_LIMITS._replace(seconds=2.0, cpu_seconds=1)
_BITS = re.compile(r"AssertionError: tests ([01]+)$")

Vector = tuple[bool, ...]


class AgreementRanker:
    """The ranker "tests".

    A sample's score is the number of tests that it passes, times the number of samples that pass
    exactly the same tests, as in CodeT.

    Args:
        job: Its target draws the tests.
        consent: Whether programs run in a weak sandbox too.
        workers: Programs that run at the same time. Default: the number of cores.
        on_phase, on_bytes: See run/generate.py's `generate`.
    """

    name = "tests"

    def __init__(
        self,
        job: Job,
        *,
        consent: bool = False,
        workers: int | None = None,
        on_phase: Callable[[str], None] = lambda name: None,
        on_bytes: Callable[[int, int], None] = lambda done, whole: None,
    ):
        sampling = _SAMPLING.model_copy(update={"seed": job.sampling.seed})
        changes = {"n": DRAWINGS, "sampling": sampling, "chat": False, "budget": None,
                   "limit": None, "prompt_column": "prompt", "id_column": None}  # fmt: skip
        self._job = job.model_copy(update=changes)
        self._consent, self._workers = consent, workers
        self._on_phase, self._on_bytes = on_phase, on_bytes

    @property
    def identity(self) -> Any:
        """What the scores depend on, besides the group."""
        return [model_identity(self._job), DRAWINGS, PER_DRAWING, MOST]

    def scores(self, groups: Iterable[Group]) -> Iterator[Scores]:
        """Yield the scores of each group.

        Raises:
            UserError: A prompt or the name of its function is unknown.
            MachineError: The sandbox is weak and there is no consent.
        """
        from bass_cli.run.engine import Engine

        for group in groups:  # a fault is found before a model is loaded
            test_prompt(group)
        waiting = iter(groups)
        with (
            Sandbox(workers=self._workers, limits=_TOGETHER_LIMITS) as sandbox,
            Sandbox(workers=self._workers, limits=_ALONE_LIMITS) as alone,
        ):
            if not self._consent:
                sandbox.isolation.refuse_weakness()
            with Engine(
                self._job, on_phase=self._on_phase, on_bytes=self._on_bytes, on_note=self._on_phase
            ) as engine:
                while some := list(islice(waiting, _TOGETHER)):
                    for group, texts in zip(some, _drawn(engine, some), strict=True):
                        tests = tests_in(texts, group.entry_point or "")
                        yield agreement(passed_tests(group, tests, sandbox, alone))


def _drawn(engine: Engine, groups: Sequence[Group]) -> list[list[str]]:
    """Return the drawn texts of each group, in the order of their samples."""
    texts = dict[str, list[str]]()
    prompts = [{"id": one.id, "prompt": test_prompt(one)} for one in groups]
    for sample in sorted(engine.generate(prompts), key=lambda one: one.sample):
        texts.setdefault(sample.id, []).append(sample.text)
    return [texts.get(one.id, []) for one in groups]


def test_prompt(group: Group) -> str:
    """Return the text after which the model writes tests. UserError if it cannot be made."""
    prompt = needed_prompt(group, "tests")
    if group.entry_point is None:
        raise UserError(
            f'`by` tests: the prompt "{group.id}" has no known function to test; the ranker '
            "needs a task that names it, such as humaneval"
        )
    head = prompt.rstrip()
    body = "\n    pass" if parse(f"{head}\n    pass") is not None else ""
    name = group.entry_point
    return f"{head}{body}\n\n# check the correctness of {name}\nassert {name}("


def tests_in(texts: Iterable[str], name: str) -> list[str]:
    """Return the distinct assertions on a function in texts that continue `assert NAME(`.

    Of each text the first PER_DRAWING valid ones count, of all the MOST most frequent ones.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        found = (
            _assertion(part, name) for part in re.split(r"\n(?=assert\b)", f"assert {name}({text}")
        )
        distinct = dict.fromkeys(islice((one for one in found if one), PER_DRAWING))
        counts.update(distinct.keys())
    return [test for test, _ in counts.most_common(MOST)]


def _assertion(text: str, name: str) -> str | None:
    """Return the assertion that a text begins with, in Python's own layout; None if it has none."""
    lines = text.split("\n")
    for end in range(1, min(len(lines), _LINES) + 1):
        tree = parse("\n".join(lines[:end]))
        if tree is not None and len(tree.body) == 1 and isinstance(tree.body[0], ast.Assert):
            used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            return ast.unparse(tree.body[0].test) if name in used else None
    return None


def passed_tests(
    group: Group, tests: Sequence[str], sandbox: Sandbox, alone: Sandbox
) -> list[Vector]:
    """Run all programs of a group; return for each which tests it passes.

    Args:
        tests: Expressions that are true if the test passes.
        sandbox: Runs a program with all tests together.
        alone: Runs each test alone, for programs of which a test did not end.
    """
    nothing = (False,) * len(tests)
    programs = [one.program for one in group.candidates]
    if not tests:
        return [nothing] * len(programs)
    distinct = [one for one in dict.fromkeys(programs) if one is not None and compiled(one)]
    name = (group.entry_point or "",)
    modules = modules_of("\n".join(tests), name)
    found: dict[str, Vector] = {}
    runs = ((text, Program(text, _together(tests), name, modules)) for text in distinct)
    for text, ending in sandbox.run(runs):
        reported = _BITS.search(ending.detail)
        if reported and len(reported[1]) == len(tests):
            found[text] = tuple(one == "1" for one in reported[1])
    slow = [text for text in distinct if text not in found]
    each = (
        ((text, at), Program(text, f"assert {test}", name, modules))
        for text in slow
        for at, test in enumerate(tests)
    )
    passed = {key: ending.passed for key, ending in alone.run(each)}
    found |= {text: tuple(passed[text, at] for at in range(len(tests))) for text in slow}
    return [nothing if one is None else found.get(one, nothing) for one in programs]


def _together(tests: Sequence[str]) -> str:
    """Return a text that runs all tests and reports by its exception which have passed."""
    return (
        "passed = ''\n"
        f"for test in {list(tests)!r}:\n"
        "    try:\n"
        "        passed += '1' if eval(test) else '0'\n"
        "    except BaseException:\n"
        "        passed += '0'\n"
        "raise AssertionError('tests ' + passed)\n"
    )


def agreement(vectors: Sequence[Vector]) -> list[float]:
    """Return for each sample its passed tests times the samples that pass exactly the same."""
    counts = Counter(vectors)
    return [float(sum(one) * counts[one]) for one in vectors]
