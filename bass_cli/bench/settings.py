"""The checked settings of `bass bench`, made before any weights are loaded.

Sampling, device and coupling are in a Job. preparation.py builds the models.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from bass_cli.bench.shapes import AT_ONCE, HEADS, head_of, spec_of
from bass_cli.config.command_options import job_options
from bass_cli.config.job import Job, Pair, chosen_pair, make_job
from bass_cli.config.machine_commands import BenchArgs
from bass_cli.config.options import MOST_DRAFTS
from bass_cli.config.speculation import CONTROLLERS, needs_profile
from bass_cli.engine.verify import Rate
from bass_cli.errors import UserError, nearest
from bass_cli.models.spec import FILE, HeadSpec, Spec
from bass_cli.reading import parse_duration
from bass_cli.run.pair import check_format_of_draft, choose_draft, with_draft_format
from bass_cli.run.plan import device_of

PLAIN = "plain"
# kinds of pairs
REAL, SET, SCALED, NO_DRAFT = (
    "a real pair",
    "acceptance set",
    "scaled layers",
    "random weights, no draft",
)
_AUTO, *_OTHERS = CONTROLLERS
_CONTROLLED = ",".join(("plain,1,2,3,4,5,6,8,12", *_OTHERS, _AUTO))  # --controllers
RIVALS = ("transformers", "vllm")
ATTENTION = ("ragged", "pad", "split")  # the schedules of bass_kernels
_GPU = {"batch_sizes": "1,2,4,8,16", "methods": "plain,2,4,6,8,bass,auto", "prompt_tokens": 300}
# On two cores the prefill of 300 tokens takes as long as 30 rounds. The default must end in two
# minutes, so it has few cells: each needs repeats for a confidence interval, and enough tokens for
# `auto` to learn from.
_CPU = {"batch_sizes": "4", "methods": "plain,auto", "prompt_tokens": 64}
_TEXTS = ("chat", "editing")  # default on a CPU: without and with a text to copy from
_TIME_LIMIT = 80.0  # seconds, on a CPU
_NUMBER = re.compile("[0-9]{1,9}")


RandomSpecs = tuple[Spec, Spec | HeadSpec | None]


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure.

    job: pair, sampling, coupling, device and dtype.
    specs: shapes of a random target and its draft; None for a real pair.
    acceptances: simulated acceptance of a random draft, one document for each. An entry holds
        rates for the rows in turn; a rate may be a tuple by position in the draft.
    depth, scale: the draft is the first `depth` layers, the other layers are scaled by `scale`.
    methods: "plain" first, then draft lengths as text or controllers.
    controllers: whether to compare controllers with the best fixed length.
    texts: kinds of text that are measured apart; empty for one kind without a name.
    time_limit: seconds until no further run begins; None for no limit.
    tokens_given: whether --new-tokens was given; if not, a time limit may reduce new_tokens.
    """

    job: Job
    specs: RandomSpecs | None
    acceptances: tuple[tuple[Rate, ...], ...]
    depth: int | None
    scale: float | None
    batch_sizes: tuple[int, ...]
    methods: tuple[str, ...]
    prompt_tokens: int
    new_tokens: int
    repeats: int
    samples_per_prompt: int
    rivals: tuple[str, ...]
    prompts: str | None
    attention: str
    controllers: bool = False
    texts: tuple[str, ...] = ()
    time_limit: float | None = None
    tokens_given: bool = True

    @property
    def kind(self) -> str:
        """What the pair is made of: files, or random weights whose acceptance is set or follows
        from scaled layers."""
        if self.specs is None:
            return REAL
        if self.depth is not None:
            return SCALED
        return SET if self.acceptances else NO_DRAFT

    @property
    def longest(self) -> int:
        """The longest draft length of any method."""
        lengths = [
            self.job.speculation.max if method in CONTROLLERS else int(method)
            for method in self.methods
            if method != PLAIN
        ]
        return max(lengths, default=0)


def make_settings(args: BenchArgs) -> Settings:
    """Make settings from the options, which are None if not given; UserError for a mistake."""
    acceptances = tuple(map(_acceptance, args.acceptance or ()))
    _check_combination(args)
    time_limit = (
        None if args.time_limit is None else parse_duration(args.time_limit, "`time_limit`")
    )
    on_cpu = args.device == "cpu" or not torch.cuda.is_available()
    default: dict[str, Any] = _CPU if on_cpu else _GPU
    if on_cpu and args.time_limit is None and args.repeats is None and not args.controllers:
        time_limit = _TIME_LIMIT
    pair, specs = (
        (chosen_pair(args), None) if args.shape is None else _random_pair(args, args.shape)
    )
    words = _split(args.batch_sizes or default["batch_sizes"])
    batch_sizes = tuple(sorted({count(word, "batch_sizes", 1, most=1024) for word in words}))
    if not batch_sizes:
        raise UserError("`batch_sizes`: give at least one batch size")
    tokens = count(args.new_tokens, "new_tokens", 128)
    given = job_options(args, max_new_tokens=tokens, batch_size=max(batch_sizes))
    job = make_job(pair, **given)
    job = choose_draft(job) if specs is None else job  # whether there is one decides the methods
    job = _with_formats(job, specs)
    rivals = chosen_rivals(args.rivals, job)
    if rivals and args.shape is not None:
        raise UserError("`rivals`: rivals load files; give a pair instead of `shape`")
    _check_split(args, job)
    if acceptances and job.speculation.coupling != "shared":
        raise UserError("`coupling`: `acceptance` needs `coupling` shared")
    return Settings(
        job=job,
        specs=specs,
        acceptances=acceptances,
        depth=args.depth,
        scale=args.scale,
        controllers=args.controllers,
        batch_sizes=batch_sizes,
        rivals=rivals,
        methods=_methods(args, default["methods"], has_draft=job.pair.draft != "none"),
        prompts=args.prompts,
        attention=_attention(args.attention),
        new_tokens=job.sampling.max_new_tokens,
        prompt_tokens=count(args.prompt_tokens, "prompt_tokens", default["prompt_tokens"]),
        samples_per_prompt=count(args.samples_per_prompt, "samples_per_prompt", 1),
        repeats=count(args.repeats, "repeats", 5),
        texts=_TEXTS if on_cpu and _takes_default_texts(args, job) else (),
        time_limit=time_limit,
        tokens_given=args.new_tokens is not None,
    )


def _takes_default_texts(args: BenchArgs, job: Job) -> bool:
    """Return whether to measure chat and editing prompts apart.

    True for a real pair with a draft, if no option chooses prompts, methods or rivals.
    """
    given = (args.shape, args.prompts, args.prompt_tokens, args.methods, args.rivals)
    return job.pair.draft != "none" and not args.controllers and given == (None,) * len(given)


def _check_split(args: BenchArgs, job: Job) -> None:
    """Refuse options that work on one device only, if --tensor-parallel is given."""
    if job.tensor_parallel == 1:
        return
    for key, given in (
        ("rivals", args.rivals),
        ("controllers", args.controllers),
        ("methods", needs_profile(_split(args.methods or ""))),
    ):
        if given:
            raise UserError(
                f"`{key}`: rivals, and round costs for table, are measured on one device "
                "only; leave this option or `tensor_parallel` out"
            )


def _with_formats(job: Job, specs: RandomSpecs | None) -> Job:
    """Return the job with the number formats of random weights. UserError for those that they
    cannot have. Those of a real pair are chosen with its files."""
    if specs is None:
        return job
    if job.dtype == FILE:
        raise UserError("`dtype` file: random weights have no file; use fp32, bf16, int8 or fp8")
    draft = specs[1]
    head = draft if isinstance(draft, HeadSpec) else None
    check_format_of_draft(job, loads=draft is not None, reads_hidden=head is not None)
    return with_draft_format(job, head, device_of(job.device))


def _check_combination(args: BenchArgs) -> None:
    """Refuse options that do not describe one pair: a real one, or a shape with at most one kind
    of draft."""
    if args.prompts is not None and args.prompt_tokens is not None:
        raise UserError(
            "`prompt_tokens`: the prompts of `prompts` are not cut; leave one of the "
            "two options out"
        )
    acceptance, depth, scale = args.acceptance or None, args.depth, args.scale
    if args.shape is None:
        for key in ("draft_shape", "acceptance", "depth", "scale"):
            if getattr(args, key) not in (None, []):
                raise UserError(f"`{key}`: this option needs `shape` NAME")
        return
    for key in ("pair", "model", "prompts"):
        if getattr(args, key) is not None:
            raise UserError(
                f"`{key}`: a `shape` has random weights and no tokenizer; leave one of the "
                "two options out"
            )
    if args.draft is not None:
        raise UserError("`draft`: choose the draft of a `shape` with `draft_shape` or `depth`")
    if (args.draft_shape is None) != (acceptance is None):
        raise UserError(
            "`draft_shape` and `acceptance` must be given together: drafts of random weights are "
            "never accepted by themselves"
        )
    if (depth is None) != (scale is None):
        raise UserError(
            "`depth` and `scale` must be given together: the number of layers of the draft, and "
            "the factor of the other layers"
        )
    if acceptance is not None and depth is not None:
        raise UserError("`acceptance` and `depth` choose different drafts; leave one of them out")
    if scale is not None and not 0 <= scale < float("inf"):
        raise UserError(f"`scale`: give a number of at least 0 (got {scale})")


def _acceptance(given: str) -> tuple[Rate, ...]:
    """Parse an --acceptance: 0.85, or 0.95,0.3 for rows in turn; UserError for anything else.

    Each rate may be by position in the draft, as in 0.93/0.9/0.87.
    """
    try:
        rates = tuple(_rate(word) for word in _split(given))
    except ValueError:
        rates = ()
    if not rates:
        raise UserError(
            "`acceptance`: give a rate from 0 to 1, or several like 0.95,0.3 for rows "
            f"in turn, or like 0.93/0.9/0.87 by position in a draft (got {given})"
        )
    return rates


def _rate(word: str) -> Rate:
    """Parse one rate; ValueError unless all numbers are from 0 to 1."""
    chances = tuple(float(chance) for chance in word.split("/"))
    if not all(0 <= chance <= 1 for chance in chances):
        raise ValueError(word)
    return chances if len(chances) > 1 else chances[0]


def _random_pair(args: BenchArgs, shape: str) -> tuple[Pair, RandomSpecs]:
    """Make a Pair that names a random pair, so that a Job can be made, and its shapes. It has no
    files. The draft gets the target's vocabulary."""
    target, name, depth = spec_of(shape, option="`shape`"), args.draft_shape, args.depth
    draft: str = "none"
    spec: Spec | HeadSpec | None = None
    if name in HEADS:
        draft, spec = f"heads:{name}", head_of(name, target, option="`draft_shape`")
    elif name is not None:
        draft = f"parallel:{name}" if name in AT_ONCE else name
        spec = spec_of(name, option="`draft_shape`", vocab=target.vocab, others=HEADS)
    elif depth is not None:
        least = target.attention_layers[0] + 1  # a draft needs a layer with attention
        first = "" if least == 1 else f", number {least} the first with attention"
        if not least <= depth < target.layers:
            raise UserError(
                f"`depth`: give a number from {least} to {target.layers - 1}, because {shape} has "
                f"{target.layers} layers{first} (got {depth})"
            )
        draft = f"the first {depth} of {target.layers} layers"
    whole = shape if draft == "none" else f"{shape} + {draft}"
    return Pair(name=whole, target=shape, draft=draft), (target, spec)


def _methods(args: BenchArgs, default: str, *, has_draft: bool) -> tuple[str, ...]:
    """Return plain, then the other methods in the order given, each once.

    Without a draft only plain is possible.
    """
    if args.controllers and not has_draft:
        raise UserError(
            "`controllers`: this pair has no draft, so there is nothing to control; give a draft"
        )
    default = PLAIN if not has_draft else _CONTROLLED if args.controllers else default
    words = _split(default if args.methods is None else args.methods)
    for word in words:
        number = int(word) if _NUMBER.fullmatch(word) else None
        if number is None and word not in (PLAIN, *CONTROLLERS):
            raise UserError(
                f'`methods`: there is no method "{word}"; '
                f"{nearest(word, (PLAIN, *CONTROLLERS, 'a draft length'))}"
            )
        if number is not None and not 1 <= number <= MOST_DRAFTS:
            raise UserError(
                f"`methods`: a draft length is from 1 to {MOST_DRAFTS} (got {word}); for 0 write "
                "plain"
            )
        if word != PLAIN and not has_draft:
            raise UserError(f'`methods`: "{word}" needs a draft, but this pair has none')
    methods = [str(int(word)) if word.isdecimal() else word for word in words]
    return tuple(dict.fromkeys([PLAIN, *methods]))


def _attention(given: str | None) -> str:
    found = _words(given or ATTENTION[0], ATTENTION, "attention")
    if len(found) != 1:
        raise UserError(f"`attention`: name one of {', '.join(ATTENTION)}")
    return found[0]


def chosen_rivals(given: str | None, job: Job) -> tuple[str, ...]:
    """Return the engines of --rivals, each once. UserError if they would sample differently."""
    rivals = _words(given or "", RIVALS, "rivals")
    if rivals and (job.sampling.changes_logits or job.sampling.min_p):
        raise UserError(
            "`rivals`: bass passes only temperature, top_p and top_k to other engines; leave out "
            "the rivals, or penalties, min_p, bias and forbidden tokens"
        )
    return rivals


def _words(text: str, known: tuple[str, ...], key: str) -> tuple[str, ...]:
    for word in _split(text):
        if word not in known:
            raise UserError(f'`{key}`: there is no "{word}"; {nearest(word, known)}')
    return tuple(dict.fromkeys(_split(text)))


def _split(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def count(value: Any, key: str, default: int, *, most: int = 1_000_000) -> int:
    """Return a whole number from 1 to `most`, the default for None; UserError otherwise."""
    value = default if value is None else value
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = int(value)
    if not isinstance(value, int) or not 1 <= value <= most:
        raise UserError(f"`{key}`: give a whole number from 1 to {most} (got {value!r})")
    return value
