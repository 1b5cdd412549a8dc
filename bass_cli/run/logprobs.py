"""The library's `score`: the target's log-probabilities of given texts.

A text is a prompt and a completion. Its tokens are read like a prompt's (models/prefill.py), so
many texts share a pass, and nothing is drafted or sampled. bass_cli/logprobs.py is the command.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from bass_cli.config.job import Job
from bass_cli.config.sampling import Sampling
from bass_cli.errors import UserError
from bass_cli.io.prompts import Prompt, check, length, prompts_of
from bass_cli.io.results import Completion, paired, rounded
from bass_cli.reading import is_unicode, shown, whole
from bass_cli.system.threads import configure_threads

if TYPE_CHECKING:
    from bass_cli.engine.contracts import PromptLogprobs, Target
    from bass_cli.formats.tokenizer import Tokenizer
    from bass_cli.run.plan import Plan
    from bass_cli.run.tasks import TaskBuilder

COLUMN = "completion"  # the field with the completion
GIVEN = "given"  # finish_reason of a text that was not generated
_WINDOW = 2048  # tokens of the texts that are read together, or one longer text


def score(
    texts: Iterable[Mapping[str, Any] | Prompt],
    job: Job | Plan,
    *,
    column: str = COLUMN,
    done: Container[tuple[str, int]] = (),
    on_phase: Callable[[str], None] = lambda name: None,
    on_bytes: Callable[[int, int], None] = lambda done, whole: None,
) -> Iterator[Completion]:
    """Yield the target's log-probabilities of given completions, in the order of the texts.

    The tokens of a text are the prompt's, as `generate` makes them, then those of the completion
    alone, without special tokens around it. The numbers are the model's own at temperature 1. The
    call checks the job; the models are loaded at the first step of the iterator. A text that cannot
    be scored yields one Completion with finish_reason "error".

    Args:
        texts: Mappings with a prompt, as for `generate`, and a completion: a text, or a list of
            token ids.
        job: A Job, or the Plan of one. Its `logprobs` is the number of likeliest tokens that are
            found for each place; its draft, `n` and limits are not used.
        column: The field with the completion.
        done: Pairs (id, 0) that are not scored.
        on_phase: Called with the name of each phase.
        on_bytes: Called with the bytes of weights that are read, and the bytes in all.

    Raises:
        UserError: The job or a text has a mistake.
        MachineError: The machine lacks memory, a device or a package.
    """
    from bass_cli.run.plan import make_plan

    if not isinstance(job, Job):
        return _scored(job, prompts_of(texts), column, done, on_phase, on_bytes)
    configure_threads(job.threads, on_phase)
    job = scoring_job(job)
    checked = list(prompts_of(texts, column=job.prompt_column))
    longest = longest_of(checked, job, column)
    plan = make_plan(job, longest_prompt=longest, prompts=len(checked))
    return _scored(plan, iter(checked), column, done, on_phase, on_bytes)


def scoring_job(job: Job) -> Job:
    """Return a job for the same target that needs no memory for samples and no draft."""
    return job.model_copy(
        update={
            "pair": job.pair.model_copy(update={"draft": "none"}),
            "n": 1,
            "batch_size": 1,
            "budget": None,
            "sampling": Sampling(max_new_tokens=1, logprobs=job.sampling.logprobs),
            "generation_config": "none",
            "speculation": job.speculation.model_copy(
                update={"length": "auto", "coupling": "shared"}
            ),
        }
    )


def longest_of(texts: Iterable[Prompt], job: Job, column: str) -> str | list[int]:
    """Check texts, and return the longest one, as a text or as ids. UserError at a fault."""
    longest: str | list[int] = ""

    def take(text: Prompt) -> None:
        nonlocal longest
        given = _completion_of(text, column)
        before = text.whole()
        if isinstance(before, str):
            whole = before + (given if isinstance(given, str) else " " * len(given))
            longest = max(longest, whole, key=length)
        else:
            more = [0] * len(given) if isinstance(given, str) else given
            longest = max(longest, before + more, key=length)

    check(texts, on_prompt=take)
    return longest


def _completion_of(text: Prompt, column: str) -> str | list[int]:
    """Return the completion of a text: a text, or ids."""
    given = text.meta.get(column)
    if isinstance(given, str) and given and is_unicode(given):
        return given
    if isinstance(given, list) and given:
        try:
            return [whole(id_) for id_ in given]
        except ValueError:
            pass
    wanted = "a text that is not empty, or a list of token ids, is needed"
    missing = "it is missing; `completion_column` names the field"
    reason = missing if given is None else f"{wanted}, not {shown(given)}"
    raise UserError(f'{text.place}: field "{column}": {reason}')


class _Tokens(NamedTuple):
    """A text as tokens. `first`: the number of the prompt's tokens."""

    text: Prompt
    tokens: list[int]
    first: int


def _scored(
    plan: Plan,
    texts: Iterator[Prompt],
    column: str,
    done: Container[tuple[str, int]],
    on_phase: Callable[[str], None],
    on_bytes: Callable[[int, int], None],
) -> Iterator[Completion]:
    from bass_cli.run.build import build, load_models

    on_phase("loading the weights")
    with plan.memory_need.explained():
        models = load_models(plan, on_bytes)
        try:
            target, builder = build(plan, models).target, _builder_of(plan)
            on_phase("scoring")
            waiting, top = list[_Tokens](), plan.job.sampling.logprobs or 0
            for text in texts:
                if (text.id, 0) in done:
                    continue
                try:
                    one = _tokens_of(text, builder, plan, column)
                except UserError as error:
                    yield Completion.failed(text.id, str(error), seed=0, meta=text.meta)
                    continue
                if waiting and sum(len(one.tokens) for one in (*waiting, one)) > _WINDOW:
                    yield from _read(waiting, target, plan, column, top)
                    waiting = []
                waiting.append(one)
            yield from _read(waiting, target, plan, column, top)
        finally:
            models.close()


def _tokens_of(text: Prompt, builder: TaskBuilder, plan: Plan, column: str) -> _Tokens:
    """Tokenise a text. UserError if it is too long, or has ids that the model lacks."""
    tokenizer, spec = plan.files.tokenizer, plan.files.target.spec
    prompt, given = builder.build(text, (0,), now=0.0).tokens, _completion_of(text, column)
    vocab = min(tokenizer.size, spec.vocab)
    ids = tokenizer.encode_part(given, spec.context) if isinstance(given, str) else given
    if not ids:
        raise UserError(f'{text.place}: field "{column}": it has no tokens')
    if max(ids) >= vocab:
        raise UserError(
            f'{text.place}: field "{column}": id {max(ids)}: the model has the ids 0 to {vocab - 1}'
        )
    if len(prompt) + len(ids) > spec.context:
        raise UserError(
            f"{text.place}: prompt and completion have {len(prompt) + len(ids)} tokens, and the "
            f"model's context is {spec.context}"
        )
    return _Tokens(text, [*prompt, *ids], len(prompt))


def score_text(text: Prompt, plan: Plan, target: Target, *, top: int) -> Completion:
    """Score one text on a loaded target. UserError if it is wrong or too long.

    Args:
        text: Its `meta` has the completion.
        top: How many likeliest tokens are listed for each place.
    """
    tokens = _tokens_of(text, _builder_of(plan), plan, COLUMN)
    (found,) = _read([tokens], target, plan, COLUMN, top)
    return found


def _builder_of(plan: Plan) -> TaskBuilder:
    from bass_cli.run.tasks import TaskBuilder

    return TaskBuilder.of(plan, tags=plan.tags)


def _read_together(
    target: Target, texts: Iterable[list[int]], top: int
) -> Iterator[PromptLogprobs]:
    """Yield the log-probabilities of the tokens of texts, read in passes together."""
    keys = list[str]()
    try:
        for number, tokens in enumerate(texts):
            key = f"\0scored {number}"  # not the key of a prompt
            target.open(key, tokens, logprobs=top)
            keys.append(key)
        target.prefill_all()
        for key in keys:
            found = target.prompt_logprobs(key)
            assert found is not None
            yield found
    finally:
        for key in keys:
            target.close(key)


def _read(
    texts: list[_Tokens], target: Target, plan: Plan, column: str, top: int
) -> Iterator[Completion]:
    """Yield the results of texts."""
    began = time.monotonic()
    found = list(_read_together(target, (one.tokens for one in texts), top))
    seconds = time.monotonic() - began
    for one, (scores, entries) in zip(texts, found, strict=True):
        numbers = scores[one.first - 1 :].tolist()
        likeliest = paired(entries[one.first - 1 :]) if top else None
        yield _completion(one, numbers, likeliest, plan.files.tokenizer, column, seconds)


def _completion(
    one: _Tokens,
    numbers: list[float],
    likeliest: list[Any] | None,
    tokenizer: Tokenizer,
    column: str,
    seconds: float,
) -> Completion:
    """Make the result of one text."""
    ids, total = one.tokens[one.first :], math.fsum(numbers)
    given, mean = _completion_of(one.text, column), total / len(numbers)
    finite = math.isfinite(total)
    completion = Completion(
        id=one.text.id,
        sample=0,
        text=given if isinstance(given, str) else tokenizer.decode(ids),
        finish_reason=GIVEN if finite else "error",
        tokens=len(ids),
        mean_logprob=mean,
        sum_logprob=total,
        seconds=seconds,
        rounds=0,
        drafted=0,
        accepted=0,
        seed=0,
        prompt_tokens=one.first,
        meta={key: value for key, value in one.text.meta.items() if key != column},
        token_ids=ids,
        token_logprobs=rounded(numbers),
        top_logprobs=likeliest,
        perplexity=math.exp(min(-mean, 700.0)) if finite else None,
    )
    fault = "a log-probability is not finite: the model gives a token probability 0, or is broken"
    return completion if finite else replace(completion, error=fault)
