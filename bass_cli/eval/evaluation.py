"""`bass eval`: draw samples for a task's prompts into a file that can be resumed, then score it.

generation.py draws the samples, scoring.py scores them, and sweep.py runs several budgets. An
instruct model gets the task's question through its chat template, because it was trained on chats.
A base model gets the raw prompt. A file is always continued in its own format of prompts.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast, get_args

from bass_cli.cluster.rays import read_request
from bass_cli.cluster.worker import JobSpec
from bass_cli.config.evaluation_commands import EvaluateArgs
from bass_cli.config.job import Job
from bass_cli.errors import UserError, nearest
from bass_cli.eval import scoring
from bass_cli.eval.ranking import lacks_scores
from bass_cli.eval.stores import check_verdicts, verdicts_path
from bass_cli.eval.tasks import load_task
from bass_cli.eval.tasks.task import Problem, PromptFormat, Task, shape_prompt
from bass_cli.formats.sources import check_sources
from bass_cli.generation import (
    Backend,
    LocalBackend,
    check_name,
    files_read,
    files_written,
    open_backend,
    read_job,
    read_shard,
    show_notes,
    with_batch_size_of,
    write_samples,
)
from bass_cli.io.console import Screen
from bass_cli.io.linefile import name_beside, stem_of
from bass_cli.io.prompts import Prompt, length
from bass_cli.io.results import Completion, open_output
from bass_cli.io.resume import manifest_path, read_manifest
from bass_cli.io.saving import is_stream, refuse_shared_files
from bass_cli.rank.ranking import needs_model
from bass_cli.run.manifest import Facts, facts_of

if TYPE_CHECKING:
    from bass_cli.engine.loop import Loop
    from bass_cli.run.plan import Plan
AUTO = "auto"
_FORMATS: tuple[str, ...] = get_args(PromptFormat)
# Words of a conversation by which the text between two of its turns is found
_QUESTION, _ANSWER, _NEXT = "What is one and one?", "It is two.", "And one more?"


class Evaluation:
    """One evaluation. Its options are checked when it is made, the models later.

    Raises:
        UserError: an option or the task's data is invalid.
    """

    def __init__(self, args: EvaluateArgs, screen: Screen):
        if args.plot is not None and args.budgets is None:
            raise UserError("`plot`: a chart shows a sweep; add `budgets`, like 0.5s,1s,2s")
        self._args, self._screen, self.report = args, screen, args.report
        self.failed = False  # whether a prompt could not be run
        self.scoring_options = scoring.read_options(args)
        screen.phase("reading the task's data", live=False)
        self.task: Task = load_task(args.task, args.data)
        scoring.refuse_without_programs(self.task, args)
        self.job = self._job_for("raw")
        self.shard = read_shard(args, self.job)
        self._format_choice = self._format_without_model()
        self._apply_format()
        if is_stream(self.out):
            raise UserError(
                f"`out` {self.out}: give a file name, because the file is scored afterwards"
            )
        self.request = read_request(args, self.job, self.out)
        if args.budgets is not None and any(map(needs_model, self.scoring_options.rankers)):
            raise UserError(
                "`rank_by` and `budgets`: rankers that run a model cannot be used with several "
                "budgets; run bass rank for each file, then bass score"
            )
        if self.request is not None and args.budgets is not None:
            raise UserError("`ray` and `budgets` cannot be used together; leave one of the two out")
        if self.job.tensor_parallel > 1 and args.budgets is not None:
            raise UserError(
                "`tensor_parallel` and `budgets` cannot be used together; leave one of the two out"
            )
        problems = list(self.task.problems.values())[: self.job.limit]
        self.problems = [
            one for one in problems if self.shard is None or self.shard.holds(one.task_id)
        ]
        if not self.problems:
            raise UserError(
                f"`shard` {self.shard}: it contains none of the {len(problems)} prompts"
            )
        for k in self.scoring_options.ks or ():
            if k > self.job.n:
                screen.note(
                    f"pass@{k} will be unknown: it needs {k} samples of every problem, and `n` is "
                    f"{self.job.n}"
                )

    def run(self) -> tuple[dict[str, Any], bool]:
        """Draw the samples that the file lacks and score it.

        Returns:
            The report, and whether all prompts could be run.
        """
        self.check_outputs([self.out])
        self._check_sandbox()
        if self.choose_format():
            self.check_outputs([self.out])
        self.job = with_batch_size_of(self.job, self.out, overwrite=self._args.overwrite)
        longest, count = self.longest_prompt(), len(self.problems)
        spec = JobSpec(self.job, self._source(), count, longest, self.shard)
        with open_backend(spec, self._screen, self.request) as backend:
            self._show_facts(backend.facts)
            self.generate(backend, self.out)
        return self.score(self.out), not self.failed

    def check_outputs(self, samples: Iterable[str], *more: tuple[str, str | Path | None]) -> None:
        """Check that all outputs can be written, and that none of them is another or an input.

        Args:
            samples: the files of samples, each with its manifest and its report.
            more: further outputs, which are only compared.

        Raises:
            UserError: an output cannot be written, or would replace another kind of file.
        """
        outputs = [*more, ("the verdicts", verdicts_path(self.out))]
        for out in samples:
            outputs += [*files_written(out), ("`report`", self.report_path(out))]
        inputs = [
            ("the data", self._args.data),
            ("the task file", self._args.task),
            *(("a file of the task", file) for file in self.task.files),
            *files_read(self._args.pair, self.job),
        ]
        refuse_shared_files(outputs, inputs)
        overwrite = self._args.overwrite
        for out in samples:
            check_name(out, overwrite=overwrite)
            scoring.check_report(self.report_path(out), out, overwrite=overwrite)
        if not self.task.rates:
            check_verdicts(verdicts_path(self.out))

    def plan(self) -> Plan:
        """Plan the job, for all files of a sweep, and show the notes on it.

        MachineError if the programs could not be run afterwards.
        """
        from bass_cli.run.plan import make_plan

        self._check_sandbox()
        # Not a live line, because the hub's client shows its downloads.
        self._screen.phase("checking the models", live=False)
        plan = make_plan(
            self.job,
            longest_prompt=self.longest_prompt(),
            prompts=len(self.problems),
            # Each method of a sweep sets the batch size, so it is not an option.
            options=("`n`", "`max_new_tokens`"),
        )
        self._show_facts(self._facts(plan))
        for note in plan.notes:  # once, not before every file
            self._screen.note(note)
        return dataclasses.replace(plan, notes=())

    def local_backend(self, plan: Plan, loop: Callable[[], Loop]) -> Backend:
        """Return a backend for the plan's job in this process, with the loop that `loop` makes."""
        return LocalBackend(plan, self._facts(plan), self._screen, loop)

    def generate(self, backend: Backend, out: str) -> None:
        """Write the missing samples of all prompts to `out`."""
        with open_output(
            out,
            backend.facts.manifest
            | {
                "prompt_format_reason": self._format_choice and self._format_choice.recorded,
                "expected": len(self.problems) * self.job.n,
            },
            resume=self._args.resume,
            overwrite=self._args.overwrite,
            prompt_ids=lambda: {problem.task_id: {} for problem in self.problems},
        ) as writer:
            write_samples(
                writer,
                backend,
                self.job,
                self.prompts(),
                len(self.problems),
                self._screen,
                transform=self._with_completion,
            )
        self.failed |= "error" in writer.totals["finish_reasons"]

    def score(self, out: str) -> dict[str, Any]:
        """Score the samples in `out`. Returns the report."""
        self._rank(out)
        found = scoring.score(
            scoring.read_checked(out),
            self.task,
            self.scoring_options,
            report_path=self.report_path(out),
            screen=self._screen,
            verdicts=verdicts_path(self.out),
            sandbox_announced=True,
        )
        # The other files of a sweep share these verdicts.
        self.scoring_options = self.scoring_options._replace(rejudge=False)
        return found

    def _rank(self, out: str) -> None:
        """Write ranks and scores into the samples if a ranker runs a model, and they lack some."""
        names = [name for name in self.scoring_options.rankers if needs_model(name)]
        if not names or not lacks_scores(names, scoring.read_checked(out)):
            return
        from bass_cli.eval.rank_command import Ranking, make_ranker, rank_lines

        rankers = [
            make_ranker(
                name,
                self._screen,
                job=self.job,
                device=self.job.device,
                dtype=self.job.dtype,
                consent=self.scoring_options.consent,
                workers=self.scoring_options.workers,
            )
            for name in self.scoring_options.rankers
        ]
        rank_lines(out, out, Ranking(rankers), self.task, read_manifest(out), self._screen)

    def report_path(self, out: str) -> str:
        """Return the path of the report on `out`."""
        return self.report or name_beside(out, ".report.json")

    def prompts(self) -> Iterator[Prompt]:
        """Yield the task's prompts in the chosen format."""
        for one in self.problems:
            yield Prompt(
                one.task_id, *self._content(one), {}, None, f"{self.task.name}:{one.task_id}"
            )

    def longest_prompt(self) -> str | list[int]:
        """Return the text of the longest prompt."""
        return max((prompt.whole() for prompt in self.prompts()), key=length, default="")

    def _content(self, problem: Problem) -> tuple[str | None, list[dict[str, Any]] | None]:
        """Return the prompt's text or its messages."""
        if self.prompt_format == "chat":
            return None, list(self.task.messages(problem))
        return shape_prompt(problem.prompt, self.prompt_format), None

    def _with_completion(self, completion: Completion) -> Completion:
        problem = self.task.problems[completion.id]
        text = self.task.completion(problem, completion.text, chat=self.prompt_format == "chat")
        return dataclasses.replace(completion, task_id=completion.id, completion=text)

    def _format_without_model(self) -> FormatChoice | None:
        """Return the format that the user, the task or a file of an earlier run has.

        None if the model decides.
        """
        args, task = self._args, self.task
        name = read_format(args.prompt_format, task)
        if name != AUTO:
            return FormatChoice(cast(PromptFormat, name), None, None)
        outs = [args.out] if args.out else [self._default_out("raw"), self._default_out("chat")]
        return None if args.overwrite else format_of_earlier_file(outs)

    def _apply_format(self) -> None:
        """Set what depends on the format. It counts as raw until it is known."""
        self.prompt_format: PromptFormat = (
            "raw" if self._format_choice is None else self._format_choice.prompt_format
        )
        self.job = self._job_for(self.prompt_format)
        self.out = self._args.out or self._default_out(self.prompt_format)

    def choose_format(self) -> bool:
        """Choose the format of prompts by the model, if nothing else has done so, and say why.

        This reads files of the model, so it comes after the checks of options and outputs.

        Returns:
            Whether the format was chosen now, so that the default name of the file may be another.
        """
        args, known = self._args, self._format_choice is not None
        if args.ray is None:
            check_sources(self.job.pair)  # importing torch takes seconds
        if self._format_choice is None:
            self._screen.phase("checking the models", live=False)
            try:
                self._format_choice = choose_by_model(self.task, self.job)
            except UserError as error:
                if args.ray is None:
                    raise
                raise UserError(
                    f"`prompt_format` auto: the model cannot be read on this machine: {error}",
                    "name the format: chat for an instruct model, raw for a base model",
                ) from None
            self._apply_format()
        if self._format_choice.reason is not None:
            self._screen.note(f"prompt format {self.prompt_format}: {self._format_choice.reason}")
        return not known

    def _job_for(self, prompt_format: PromptFormat) -> Job:
        defaults: dict[str, Any] = self.task.defaults._asdict()
        chat = prompt_format == "chat"
        if not chat:
            defaults["stop"] = list(self.task.stops)
        return read_job(self._args, defaults, chat=True if chat else None)

    def _default_out(self, prompt_format: PromptFormat) -> str:
        """Return a file name with the options that determine the samples.

        So different evaluations have different files. Options with the task's own value are left
        out.
        """
        job, own = self.job, self.task.defaults
        sampling = job.sampling
        parts = [self.task.name, job.pair.name, prompt_format]
        if self._args.data:
            parts.append(Path(self._args.data.removeprefix("hf:").split(":")[0]).stem)
        parts += [f"t{sampling.temperature:g}", f"n{job.n}", f"s{sampling.seed}"]
        more = {
            "p": (sampling.top_p, own.top_p),
            "k": (sampling.top_k, 0),
            "min": (sampling.min_p, 0),
            "rep": (sampling.repetition_penalty, 1),
            "pres": (sampling.presence_penalty, 0),
            "freq": (sampling.frequency_penalty, 0),
            "max": (sampling.max_new_tokens, own.max_new_tokens),
            "first": (job.limit, None),
        }
        parts += [f"{name}{value}" for name, (value, usual) in more.items() if value != usual]
        tokens = sampling.logit_bias, sampling.bad_words, sampling.allowed_token_ids
        if any(tokens):
            parts.append(hashlib.sha256(repr(tokens).encode()).hexdigest()[:8])
        if job.speculation.coupling == "maximal":
            parts.append("maximal")
        if job.budget is not None:
            parts.append(f"within{job.budget:g}s")
        if self.shard is not None:
            parts.append(f"{self.shard.number}of{self.shard.of}")
        return "-".join(parts) + ".jsonl"

    def _check_sandbox(self) -> None:
        if self.task.executes:
            scoring.check_sandbox(self.task, self._screen, consent=self.scoring_options.consent)

    def _show_facts(self, facts: Facts) -> None:
        plain, for_chat = self.prompt_format != "chat", "`prompt_format` chat"
        show_notes(self.job, facts, self._screen, plain=plain, for_chat=for_chat)

    def _facts(self, plan: Plan) -> Facts:
        """Return the manifest of the samples, and other facts about them."""
        return facts_of(plan, self._source(), shard=self.shard)

    def _source(self) -> dict[str, Any]:
        """Return what identifies the prompts, whatever the limit is."""
        prompts = [
            (problem.task_id, self._content(problem)) for problem in self.task.problems.values()
        ]
        digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
        return {"task": self.task.name, "prompt_format": self.prompt_format, "prompts": digest}


class FormatChoice(NamedTuple):
    """A format, the reason for the user, and the reason for the manifest.

    Both reasons are None if the user or the task names the format.
    """

    prompt_format: PromptFormat
    reason: str | None
    recorded: str | None


def read_format(given: str | None, task: Task) -> str:
    """Return the format that the user or the task names: "auto" or a PromptFormat.

    UserError if there is none of that name, or the task has no text for it.
    """
    name = task.prompt_format if given is None else given
    known = (AUTO, *_FORMATS)
    if name not in known:
        raise UserError(f'`prompt_format`: there is no "{name}"; {nearest(name, known)}')
    if name == "chat" and not task.has_question:
        raise UserError(f"`prompt_format` chat: {task.name} has no question for chats; use raw")
    if name not in (AUTO, "chat") and not task.has_prompt:
        raise UserError(f"`prompt_format` {name}: {task.name} has no raw prompt; use chat")
    return name


def format_of_earlier_file(outs: Iterable[str]) -> FormatChoice | None:
    """Return the format in which one of these files, or of the files of its sweep, was begun.

    None if there is no such file, or its manifest does not say.
    """
    for out in outs:
        stem = stem_of(out)
        swept = glob.glob(f"{glob.escape(stem)}.*-*s{out[len(stem) :]}.manifest.json")
        for manifest in (str(manifest_path(out)), *sorted(swept)):
            file = manifest.removesuffix(".manifest.json")
            try:
                found = read_manifest(file)
                form = found["results"]["prompt_format"]
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if form in _FORMATS and Path(file).exists():
                earlier = found.get("prompt_format_reason")
                return FormatChoice(cast(PromptFormat, form), f"{file} was begun in it", earlier)
    return None


def choose_by_model(task: Task, job: Job) -> FormatChoice:
    """Choose between chat and raw by the task and the job's target.

    UserError if the target's files cannot be read.
    """
    if not task.has_question:
        is_chat, reason = False, f"{task.name} has no question for chats"
    elif not task.has_prompt:
        is_chat, reason = True, f"{task.name} has a question for chats only"
    else:
        is_chat, reason = _answers_chats(job)
    return FormatChoice("chat" if is_chat else "raw", reason, reason)


def _answers_chats(job: Job) -> tuple[bool, str]:
    """Return whether the target is an instruct model, and why.

    It is one if its chat template ends an answer with a token that also ends its samples. Some
    base models have a chat template too, but their samples end with another token.
    """
    from bass_cli.formats.checkpoint import open_checkpoint
    from bass_cli.formats.sources import locate
    from bass_cli.formats.tokenizer import Tokenizer

    pair = job.pair
    path = locate(pair.target, folder=pair.folder, weights=True)
    checkpoint = open_checkpoint(path, decoder=pair.decoder)
    if pair.tokenizer:
        tokenizer = Tokenizer.load(locate(pair.tokenizer, folder=pair.folder))
    else:
        tokenizer = Tokenizer.load(path, vocabulary=checkpoint.vocabulary)
    if job.template is not None:
        tokenizer = tokenizer.with_template(job.template)
    if not tokenizer.has_chat_template:
        return False, f"{pair.target} has no chat template"
    words = (("user", _QUESTION), ("assistant", _ANSWER), ("user", _NEXT))
    messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in words]
    try:
        text = tokenizer.render(messages, tools=job.tools, args=job.template_args)
    except UserError as error:
        return False, f"{pair.target}: {error}"
    between = text.partition(_ANSWER)[2].partition(_NEXT)[0]
    ids = checkpoint.eos_ids or tokenizer.eos_ids
    ends = [one for one in map(tokenizer.spelled, ids) if one and one in between]
    if not ends:
        return False, (
            f"{pair.target} is no instruct model: its chat template ends answers with a token that "
            "does not end its samples"
        )
    return True, f"{pair.target} is an instruct model: its chat template ends answers by {ends[0]}"
