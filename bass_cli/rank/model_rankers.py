"""The rankers that run a model: generated tests, the log-probability of the prompt, a reward model.

Generated tests are drawn in a second drawing, after the prompt and the words `assert NAME(`. Those
in the samples are not enough: completions of code end before they have any. Programs run with them
in the sandbox. Tests of a task are not used.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

from bass_cli.config.job import Job
from bass_cli.config.sampling import Sampling
from bass_cli.errors import MachineError, UserError
from bass_cli.io.prompts import prompts_of
from bass_cli.rank.code import bare_program, modules_of, parse
from bass_cli.rank.ranking import REWARD, Candidate, Group, Scores, needed_prompt
from bass_cli.reading import is_unicode
from bass_cli.run.logprobs import COLUMN, longest_of, score, scoring_job
from bass_cli.sandbox.programs import DEFAULT_LIMITS, Program, Sandbox

if TYPE_CHECKING:
    import torch

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
# Between the sample and the prompt. A program's prompt is mostly a docstring.
_AFTER_CODE = "\n\n# Write a docstring for the above function\n"
_AFTER_TEXT = "\n\nThe text above is the answer to this request:\n"
BATCH = 8  # texts at once, by default; the n samples of a prompt are often a multiple of it


class AgreementRanker:
    """The ranker "tests": CodeT (arXiv 2207.10397).

    A sample's score is the number of tests that it passes, times the number of samples that pass
    exactly the same tests.

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
    given = dict.fromkeys(one for one in programs if one is not None)
    distinct = [one for one in given if parse(one, compiles=True)]
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


class ReverseRanker:
    """The ranker "reverse": the target's log-probability of the prompt, given the sample.

    This is the reviewer of Zhang et al. 2022 (arXiv 2211.16490): a good answer lets the model
    recover the request. A general text such as `pass` is likely after any prompt, but explains
    none.

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
    return context_of(candidate) if group.answers(candidate) else None


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


class RewardRanker:
    """The ranker "reward:MODEL": a sequence classifier of transformers reads prompt and sample.

    It reads them through its tokenizer's chat template if it has one, else as a pair of texts. A
    model with one output gives that number, one with two the log-odds of the second.

    Args:
        name: "reward:" and a folder or a hub id.
        device, dtype: As of a job: auto, cuda or cpu; auto, bf16, fp16 or fp32.
        batch: Texts that the model reads at once.
        on_phase: Called with the name of each phase.

    Raises:
        UserError: The number format is not one of transformers' floats.
    """

    def __init__(
        self,
        name: str,
        *,
        device: str = "auto",
        dtype: str = "auto",
        batch: int = BATCH,
        on_phase: Callable[[str], None] = lambda name: None,
    ):
        if dtype not in ("auto", "bf16", "fp16", "fp32"):
            raise UserError(f"`dtype` {dtype}: a reward model runs in auto, bf16, fp16 or fp32")
        self.name, self._batch, self._on_phase = name, batch, on_phase
        self._device, self._dtype = device, dtype

    @property
    def identity(self) -> Any:
        """What the scores depend on, besides the group."""
        return {"model": self.name, "dtype": self._dtype}

    def scores(self, groups: Iterable[Group]) -> Iterator[Scores]:
        """Yield the scores of each group.

        None for a text that is longer than the model can read, or that is no valid Unicode.

        Raises:
            UserError: A prompt is unknown, or the model is no classifier with one or two outputs.
        """
        model = _Classifier(
            self.name.removeprefix(REWARD), self._device, self._dtype, self._on_phase
        )
        for group in groups:
            prompt = needed_prompt(group, self.name)
            texts = list(dict.fromkeys(one.text for one in group.candidates))
            found = dict(zip(texts, model.rate(prompt, texts, self._batch), strict=True))
            yield [found[one.text] for one in group.candidates]


class _Classifier:
    """A loaded classifier and its tokenizer."""

    def __init__(self, source: str, device: str, dtype: str, on_phase: Callable[[str], None]):
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        from bass_cli.models.any_probe import quiet
        from bass_cli.run.plan import device_of, dtype_of

        self._device = device_of(device)
        on_phase("loading the reward model")
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(source)
            self._model: Any
            with quiet():
                self._model, loaded = AutoModelForSequenceClassification.from_pretrained(
                    source,
                    dtype=dtype_of(dtype, self._device),
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # which are refused below
                )
        except (OSError, ValueError, ImportError) as error:
            reason = (
                str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            )
            kind = MachineError if isinstance(error, ImportError) else UserError
            raise kind(f"reward:{source}: the model cannot be loaded: {reason}") from None
        self._refuse_random(source, loaded)
        labels = self._model.config.num_labels
        if labels not in (1, 2):
            raise UserError(
                f"reward:{source}: the model has {labels} outputs; a reward model has one, or two "
                "of which the second is the better"
            )
        self._model = self._model.to(self._device).eval()
        lengths = (
            getattr(self._model.config, "max_position_embeddings", None),
            self._tokenizer.model_max_length,
        )
        self._longest = min(one for one in (*lengths, 2**30) if one)
        on_phase("scoring with the reward model")

    @staticmethod
    def _refuse_random(source: str, loaded: Mapping[str, Any]) -> None:
        """Raise UserError if a tensor was not read; transformers gives it random numbers."""
        if missing := sorted(loaded["missing_keys"]):
            raise UserError(
                f'reward:{source}: its weights have no tensor "{missing[0]}"; name a checkpoint '
                "that was trained as a sequence classifier"
            )
        for name, stored, needed in sorted(loaded["mismatched_keys"]):
            raise UserError(
                f'reward:{source}: tensor "{name}" has shape {list(stored)}, and by config.json '
                f"it is {list(needed)}; correct config.json, or name another checkpoint"
            )

    def rate(self, prompt: str, texts: Sequence[str], batch: int) -> list[float | None]:
        """Return a score for each text; None for one that is too long or no valid Unicode."""
        found: list[float | None] = [None] * len(texts)
        valid = [at for at, text in enumerate(texts) if is_unicode(prompt + text)]
        inputs = {at: self._inputs(prompt, texts[at]) for at in valid}
        short = [at for at in valid if len(inputs[at]["input_ids"]) <= self._longest]

        def size(at: int) -> int:
            return len(inputs[at]["input_ids"])

        # Texts of one length share a pass, so that no padding can change a score.
        for _, same in groupby(sorted(short, key=size), key=size):
            places = list(same)
            for start in range(0, len(places), batch):
                part = places[start : start + batch]
                for at, number in zip(part, self._run([inputs[at] for at in part]), strict=True):
                    found[at] = number
        return found

    def _inputs(self, prompt: str, text: str) -> dict[str, list[int]]:
        tokenizer = self._tokenizer
        if tokenizer.chat_template is None:
            return dict(tokenizer(prompt, text, padding=False, truncation=False))
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
        try:
            rendered = tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception as error:  # of the template's own language
            raise UserError(f"reward: the model's chat template fails: {error}") from None
        # the template has written the special tokens
        return dict(tokenizer(rendered, add_special_tokens=False, truncation=False))

    def _run(self, inputs: Sequence[dict[str, list[int]]]) -> list[float]:
        import torch

        tensors: dict[str, torch.Tensor] = {
            key: torch.tensor([one[key] for one in inputs], device=self._device)
            for key in inputs[0]
        }
        # Without padding the last token of each text decides. transformers looks for padding by
        # this id, which no text has.
        self._model.config.pad_token_id = -1
        with torch.inference_mode():
            logits = self._model(**tensors).logits.float()
        scores: list[float] = (
            logits[:, -1] - (logits[:, 0] if logits.shape[1] == 2 else 0)
        ).tolist()
        return scores
