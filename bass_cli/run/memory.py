"""How much memory a job takes, by rows and new tokens, from its models' sizes alone; what to say
where that is too much.

Weights and caches are exact, the work space is what was measured (docs/DESIGN.md). Not here: how
much there is (system/host.py), who asks (plan.py, bench/pairs.py).
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from bass_cli.engine.batch import beyond
from bass_cli.errors import MachineError
from bass_cli.formats.partition import part_of
from bass_cli.models.kv_cache import ARENA
from bass_cli.models.prefill import LONG, PASS
from bass_cli.models.spec import HeadSpec, Spec, head_parameters, parameters
from bass_cli.system.host import free_memory, gigabytes, held_memory, is_refused_memory

# of the free memory: the rest is for what other programs take meanwhile, and for fragments
_USABLE = 0.95
SLACK = 3  # positions of a row's span for its pending token, and a draft's lag of two
_INTEGER = 8  # bytes of a token id
# Bytes a logit, the logit itself left out. On a CPU the noise of the whole vocabulary takes 36,
# a truncated law 16, and maximal coupling with a draft model 38 (measured); the kernels of a GPU
# write a few numbers a row instead.
_CHOOSING = {"cpu": 36, "cuda": 4}
# bytes a head, query and key: scores and their exponentials, where they are written down
_SCORES = {"cpu": 8, "cuda": 0}
_LIBRARIES = {"cpu": 100 << 20, "cuda": 700 << 20}  # kernels, graphs, work space of libraries


class Each(NamedTuple):
    """Bytes of one more row, or of one more new token of a row: in the `cache` of its keys and
    values, and of `buffers` beside it."""

    cache: int
    buffers: int


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a job takes: `weights`; `graphs`, with kernels and libraries; `buffers` of a pass
    over a prompt; `prompts`, the store with one prompt in it, and `prompt` for every other that
    has rows at once; what every `row` takes, and every new `token` of a row (as many as `context`
    leaves room for)."""

    weights: int
    graphs: int
    buffers: int
    prompts: int
    prompt: int
    row: Each
    token: Each
    context: int

    def parts(
        self, rows: int, new_tokens: int, *, prompts: float = 1, kept: int | None = None
    ) -> dict[str, int]:
        """What `rows` rows of `prompts` prompts take, each of which may generate `new_tokens`, by
        what it is for; with place in the cache for `kept` of these on average (None: for all),
        and for all of one row."""
        tokens = min(new_tokens, self.context - 1)
        stored = rows * min(tokens if kept is None else kept, tokens)
        buffers = rows * (self.row.buffers + self.token.buffers * tokens)
        # rows that are not live write to places of one more
        cache = (rows + 1) * self.row.cache + self.token.cache * max(stored, min(rows, 1) * tokens)
        return {
            "weights": self.weights,
            "prompts": self.prompts + math.ceil((prompts - 1) * self.prompt),
            "cache": cache,
            "buffers": self.buffers + buffers,
            "graphs": self.graphs,
        }

    def bytes(
        self, rows: int, new_tokens: int, *, prompts: float = 1, kept: int | None = None
    ) -> int:
        """The sum of the parts."""
        return sum(self.parts(rows, new_tokens, prompts=prompts, kept=kept).values())

    def most_rows(
        self, new_tokens: int, free: int, *, samples: float = math.inf, kept: int | None = None
    ) -> int:
        """The most rows for which `free` bytes suffice, with `samples` rows to a prompt; 0 if
        there are none."""
        tokens, left = min(new_tokens, self.context - 1), free - self.bytes(0, new_tokens)
        stored = min(tokens if kept is None else kept, tokens)
        each = sum(self.row) + self.token.buffers * tokens + math.ceil(self.prompt / samples)
        longest = (left - self.token.cache * tokens) // each
        return max(min(left // (each + self.token.cache * stored), longest), 0)

    def most_kept(self, rows: int, new_tokens: int, free: int, *, samples: float = math.inf) -> int:
        """For how many of its new tokens each of `rows` rows can have place in the cache on
        average, where `free` bytes do not suffice for all; 0 if for none."""
        prompts = max(rows / samples, 1)
        beside = self.bytes(rows, new_tokens, prompts=prompts) - rows * self.token.cache * min(
            new_tokens, self.context - 1
        )
        return max((free - beside) // (rows * self.token.cache), 0)

    def most_tokens(self, rows: int, free: int) -> int:
        """The most new tokens, up to the context, for which `free` bytes suffice; 0 if there are
        none."""
        return max(
            min((free - self.bytes(rows, 0)) // (rows * sum(self.token)), self.context - 1), 0
        )


def footprint(
    target: Spec,
    draft: Spec | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    longest: int,
    at_once: bool = False,
    head: HeadSpec | None = None,
    kept_layers: int = 0,
    prompt_tokens: int = 0,
    ranks: int = 1,
) -> Footprint:
    """The footprint of a pair with drafts of up to `longest` tokens, which the draft makes one by
    one or `at_once`. `head`: what the draft is beside its layers, if it reads the target's hidden
    states. `kept_layers`: how many of the target's own layers draft, where they do.
    `prompt_tokens`: of the longest prompt, if that is known. With the target split over `ranks`
    devices it is that of the first one, which has the draft and the logits besides its part."""
    kind, places = device.type, longest + 1
    vocab = target.vocab * (1 if ranks == 1 else 2)  # logits are there twice while parts are joined
    target = part_of(target, ranks)
    models = [spec for spec in (target, draft) if spec is not None]
    # tokens of a row in a pass of each: one that drafts at once takes as many masks, almost, as
    # tokens that it may have missed
    fed = (places, 2 * longest if at_once and head is None else places)
    position = sum(_position(spec, spec.layers, dtype) for spec in models) + _position(
        target, kept_layers, dtype
    )
    if head is not None and not head.block:  # features stand in the store
        position += head.body.width * dtype.itemsize
    prompt_tokens = min(prompt_tokens, target.context)
    scores = [_SCORES[kind] * spec.heads for spec in models]
    # float32 values between a layer's products
    wide = [4 * (4 * spec.inner + 8 * spec.width) for spec in models]
    if head is not None:  # the outputs that it reads, while the target runs
        wide[0] += len(head.aux_layers) * target.width * dtype.itemsize
    scored = max(map(operator.mul, fed, scores))
    logits = places * vocab * (dtype.itemsize + _CHOOSING[kind])
    packed = kind == "cpu" and dtype == torch.float32
    token = Each(position, 2 * _INTEGER + scored)
    beside = beyond(longest) + SLACK  # positions of a row beside those of its new tokens
    work = logits + max(map(operator.mul, fed, wide)) + scored * prompt_tokens
    work += _INTEGER * ARENA[kind]
    return Footprint(
        weights=sum(
            _weights(spec, dtype, packed=packed) for spec in (models if head is None else [target])
        )
        + (0 if head is None else _head_weights(head, dtype, copied=packed, split=ranks > 1)),
        graphs=_LIBRARIES[kind],
        buffers=min(LONG.get(kind, (PASS, PASS))[1], max(prompt_tokens, 1))
        * (max(wide) + max(scores) * prompt_tokens),
        prompts=position * max(ARENA[kind], prompt_tokens),
        prompt=position * prompt_tokens,
        row=Each(beside * token.cache, work + beside * token.buffers),
        token=token,
        context=target.context,
    )


def _position(spec: Spec, layers: int, dtype: torch.dtype) -> int:
    """Bytes of a position's keys and values."""
    return 2 * layers * spec.kv_heads * spec.head_size * dtype.itemsize


def _weights(spec: Spec, dtype: torch.dtype, *, packed: bool) -> int:
    """Bytes of all weights. Packing a tied head makes a copy of it."""
    shapes = parameters(spec)
    if spec.tied and not packed:
        del shapes["head.weight"]
    return sum(map(math.prod, shapes.values())) * dtype.itemsize


def _head_weights(head: HeadSpec, dtype: torch.dtype, *, copied: bool, split: bool) -> int:
    """Bytes of what is loaded of a head; where weights are packed, its projections to keys and
    values are there twice, and where the target is split, the embedding and head that others
    share with it are its own."""
    body = head.body
    own = (2 - head.embeds - head.heads) * body.vocab * body.width * split
    keys = 2 * body.layers * body.kv_heads * body.head_size * head.inputs
    loaded = sum(map(math.prod, head_parameters(head).values()))
    return (loaded + keys * copied + own) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Need:
    """What a job is to take of a device: `rows` that may each generate `new_tokens`. `options`:
    what sets the two (the second may be None). `kept`: see Footprint.parts."""

    footprint: Footprint
    rows: int
    new_tokens: int
    device: torch.device
    options: tuple[str, str | None] = ("--batch-size", "--max-new-tokens")
    kept: int | None = None

    def check(self) -> None:
        """MachineError, with the largest settings that fit, where there is not enough memory for
        it now."""
        free, needed = (
            usable(free_memory(self.device)),
            self.footprint.bytes(self.rows, self.new_tokens, kept=self.kept),
        )
        if needed > free:
            remedy = self._remedy(free, self.rows, self.new_tokens)
            raise MachineError(
                f"{self._batch()}: {gigabytes(needed)} of memory are needed and {gigabytes(free)} "
                "can be "
                f"had here; {remedy}"
            )

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Memory that is refused while it lasts is a MachineError with the largest settings that
        can be expected to fit."""
        try:
            yield
        except Exception as error:
            if not is_refused_memory(error):
                raise
            try:
                free = usable(free_memory(self.device) + held_memory(self.device))
            except (
                RuntimeError
            ):  # a device that refuses memory may refuse that too; then the plan has to do
                free = self.footprint.bytes(self.rows, self.new_tokens, kept=self.kept)
            # By the plan it should have fitted: half of it is proposed, or less where others
            # have taken memory meanwhile.
            remedy = self._remedy(free, self.rows // 2, self.new_tokens // 2)
            raise MachineError(f"memory ran out with {self._batch()}; {remedy}") from None

    def _batch(self) -> str:
        tokens = min(self.new_tokens, self.footprint.context - 1)
        rows = "a row" if self.rows == 1 else f"{self.rows} rows"
        return f"{rows} of up to {tokens} new tokens{'' if self.rows == 1 else ' each'}"

    def _remedy(self, free: int, most_rows: int, most_tokens: int) -> str:
        """What to give instead: one setting changed, up to these."""
        rows_option, tokens_option = self.options
        found = []
        fitting = self.footprint.most_rows(self.new_tokens, free, kept=self.kept)
        if rows := min(fitting, most_rows):
            found.append(f"{rows_option} {rows}")
        tokens = min(self.footprint.most_tokens(self.rows, free), most_tokens)
        if tokens_option is not None and tokens:
            found.append(f"{tokens_option} {tokens}")
        if found:
            return f"the largest that can be expected to fit: {', or '.join(found)}"
        return (
            f"the weights take {gigabytes(self.footprint.weights)}: use a smaller model, a "
            "shorter --dtype or a "
            "machine with more memory"
        )


def usable(free: int) -> int:
    """How many of `free` bytes a plan may count on."""
    return int(_USABLE * free)
