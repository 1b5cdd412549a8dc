"""Compute the memory of a job from its models' sizes, its rows and its new tokens.

Weights and caches are exact; work space is estimated from measurements (docs/DESIGN.md). If a job
does not fit, the error names settings that do. system/host.py reads the free memory.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from bass_cli.engine.batch import beyond
from bass_cli.engine.sizes import cover
from bass_cli.errors import MachineError
from bass_cli.models.kv_cache import ARENA
from bass_cli.models.partition import part_of
from bass_cli.models.prefill import LONG, PASS, SCORED_LOGITS
from bass_cli.models.recurrent import PROMPTS, state_shapes
from bass_cli.models.spec import (
    PLAIN,
    AnySpec,
    Format,
    HeadSpec,
    Layouts,
    Spec,
    head_parameters,
    parameters,
)
from bass_cli.system.host import free_memory, gigabytes, held_memory, is_refused_memory
from bass_kernels import SPARE_KEYS
from bass_kernels.processing import GROUP
from bass_kernels.segments import SCALE

# the usable share of the free memory; the rest is for other programs and for fragmentation
_USABLE = 0.95
SLACK = 3  # positions of a row: the target's pending token, and a draft's two
_INTEGER = 8  # bytes of a token id
# Bytes a logit, without the logit itself. Measured on a CPU: 36 for the noise of the whole
# vocabulary, 16 for truncation, 38 for maximal coupling with a draft model. GPU kernels write only
# a few numbers a row.
_CHOOSING = {"cpu": 36, "cuda": 4}
# Bytes of finding the likeliest tokens (bass_kernels/processing.py), for each group and candidate
_MAXIMUM, _CANDIDATE = 32, 48
# Bytes a logit of a row whose logits change (bass_kernels/processing.py), and of a token's count.
_CHANGING, _COUNTED = {"cpu": 20, "cuda": 8}, 4
# bytes a head, query and key, for scores and their exponentials
_SCORES = {"cpu": 8, "cuda": 0}
_SPARE = {"cpu": SPARE_KEYS, "cuda": 0}  # positions behind the rows of the store
_LIBRARIES = {"cpu": 100 << 20, "cuda": 700 << 20}  # kernels, graphs, work space of libraries


class Extras(NamedTuple):
    """What samples need besides sampling.

    Args:
        changes_logits: Whether rows have penalties, a bias, or forbidden tokens.
        top: How many likeliest tokens are reported at each position.
        scores: Whether prompts are scored.
    """

    changes_logits: bool = False
    top: int = 0
    scores: bool = False


NO_EXTRAS = Extras()


class UnitBytes(NamedTuple):
    """Bytes of one more row, or of one more new token of a row: in the KV cache, and in buffers."""

    cache: int
    buffers: int


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory of a job, in bytes.

    Args:
        weights: The weights of all models.
        graphs: CUDA graphs, kernels and libraries.
        buffers: Work space of a prefill pass.
        prompts: The prompt cache with one prompt.
        prompt: Each further prompt in the batch.
        row: Each row.
        token: Each new token of a row.
        context: The target's context, in tokens, which limits the new tokens.
    """

    weights: int
    graphs: int
    buffers: int
    prompts: int
    prompt: int
    row: UnitBytes
    token: UnitBytes
    context: int

    def parts(
        self, rows: int, new_tokens: int, *, prompts: float = 1, cached_tokens: int | None = None
    ) -> dict[str, int]:
        """Return the bytes by purpose.

        Args:
            rows: The rows of the batch.
            new_tokens: The most new tokens of a row.
            prompts: The number of prompts in the batch.
            cached_tokens: The new tokens of a row that the cache holds on average; None for all.
                The cache holds at least all new tokens of one row.
        """
        tokens = min(new_tokens, self.context - 1)
        stored = rows * min(tokens if cached_tokens is None else cached_tokens, tokens)
        buffers = rows * (self.row.buffers + self.token.buffers * tokens)
        # one more row, which padding rows write to
        cache = (rows + 1) * self.row.cache + self.token.cache * max(stored, min(rows, 1) * tokens)
        return {
            "weights": self.weights,
            "prompts": self.prompts + math.ceil((prompts - 1) * self.prompt),
            "cache": cache,
            "buffers": self.buffers + buffers,
            "graphs": self.graphs,
        }

    def bytes(
        self, rows: int, new_tokens: int, *, prompts: float = 1, cached_tokens: int | None = None
    ) -> int:
        """Return the sum of the parts."""
        return sum(
            self.parts(rows, new_tokens, prompts=prompts, cached_tokens=cached_tokens).values()
        )

    def most_rows(
        self,
        new_tokens: int,
        free: int,
        *,
        samples: float = math.inf,
        cached_tokens: int | None = None,
    ) -> int:
        """Return the most rows that fit into `free` bytes, with `samples` rows to a prompt."""
        tokens, left = min(new_tokens, self.context - 1), free - self.bytes(0, new_tokens)
        stored = min(tokens if cached_tokens is None else cached_tokens, tokens)
        each = sum(self.row) + self.token.buffers * tokens + math.ceil(self.prompt / samples)
        longest = (left - self.token.cache * tokens) // each
        return max(min(left // (each + self.token.cache * stored), longest), 0)

    def most_cached_tokens(
        self, rows: int, new_tokens: int, free: int, *, samples: float = math.inf
    ) -> int:
        """Return how many new tokens of each row the cache can hold on average in `free` bytes."""
        prompts = max(rows / samples, 1)
        fixed = self.bytes(rows, new_tokens, prompts=prompts) - rows * self.token.cache * min(
            new_tokens, self.context - 1
        )
        return max((free - fixed) // (rows * self.token.cache), 0)

    def most_tokens(self, rows: int, free: int) -> int:
        """Return the most new tokens that fit into `free` bytes, up to the context."""
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
    eight_bits: bool = False,
    at_once: bool = False,
    head: HeadSpec | None = None,
    kept_layers: int = 0,
    prompt_tokens: int = 0,
    ranks: int = 1,
    extras: Extras = NO_EXTRAS,
    layouts: Layouts = PLAIN,
    draft_format: Format | None = None,
) -> Footprint:
    """Compute the footprint of a pair, on the first device, which also has draft and logits.

    Args:
        eight_bits: Whether keys and values are stored in eight bits.
        at_once: Whether the draft model proposes all tokens in one pass.
        head: The draft head; None for other drafts.
        kept_layers: The number of the target's own layers that draft (layer skipping), else 0.
        prompt_tokens: The tokens of the longest prompt; 0 if unknown.
        ranks: The number of devices that the target is split over.
        layouts, draft_format: Of target and draft. Default: plain numbers of `dtype`.
    """
    kind, positions, drafts = device.type, longest + 1, draft_format or Format(dtype)
    vocab = target.vocab * (1 if ranks == 1 else 2)  # parts and joined logits
    target, prompt_tokens = part_of(target, ranks), min(prompt_tokens, target.context)
    models = [target] if draft is None else [target, draft]
    # tokens of a row in one pass; a parallel draft takes missed tokens and as many masks
    fed = (positions, 2 * longest if at_once and head is None else positions)
    caches = [(target, target.layers + kept_layers, dtype)]
    caches += [(spec, spec.layers, drafts.dtype) for spec in models[1:]]
    position, copied = _position_bytes(caches, head, eight_bits=eight_bits)
    scores = [_SCORES[kind] * spec.heads for spec in models]
    wide = [4 * _working_values(spec) for spec in models]  # a layer in float32
    wide[0] += _hidden_bytes(head, target.width, dtype)
    scored = max(map(operator.mul, fed, scores))
    token = UnitBytes(position, 2 * _INTEGER + scored + (copied if kind == "cpu" else 0))
    state = _state_bytes_of_row(caches, longest, at_once=at_once)
    extra = beyond(longest) + SLACK  # positions of a row besides its new tokens
    work = _logit_bytes(vocab, positions, dtype, kind, extras) + max(map(operator.mul, fed, wide))
    work += scored * prompt_tokens + _INTEGER * ARENA[kind]
    pass_tokens = min(LONG.get(kind, (PASS, PASS))[1], max(prompt_tokens, 1))
    return Footprint(
        weights=_weight_bytes(target, Format(dtype, layouts), kind)
        + _draft_weight_bytes(draft, head, drafts, kind, target=layouts, split=ranks > 1),
        graphs=_LIBRARIES[kind],
        buffers=pass_tokens * (max(wide) + max(scores) * prompt_tokens)
        + extras.scores * SCORED_LOGITS * (dtype.itemsize + 8)
        + copied * prompt_tokens,
        prompts=position * (max(ARENA[kind], prompt_tokens) + _SPARE[kind]) + PROMPTS * state,
        prompt=position * prompt_tokens,
        row=UnitBytes(extra * token.cache + state, work + extra * token.buffers),
        token=token,
        context=target.context,
    )


def _hidden_bytes(head: HeadSpec | None, width: int, dtype: torch.dtype) -> int:
    """Return the bytes of a token's hidden states that a draft head reads; 0 without a head."""
    return 0 if head is None else len(head.aux_layers) * width * dtype.itemsize


def widest(longest: int) -> int:
    """Return the most tokens of a row in a pass with drafts of up to `longest` tokens."""
    return cover(longest) + 1


def _state_bytes_of_row(
    caches: Sequence[tuple[Spec, int, torch.dtype]], longest: int, *, at_once: bool
) -> int:
    """Return the bytes of a row's recurrent states in all models. See _position_bytes."""
    widths = widest(longest), widest(longest) * (2 if at_once else 1)
    return sum(
        state_bytes(spec, width, dtype) * layers // spec.layers
        for (spec, layers, dtype), width in zip(caches, widths, strict=False)
    )


def state_bytes(spec: Spec, width: int, dtype: torch.dtype) -> int:
    """Return the bytes of a row's recurrent states: of each layer the state in float32, and the
    inputs of passes of up to `width` tokens. 0 without recurrent layers."""
    if spec.recurrent is None:
        return 0
    state, inputs = map(math.prod, state_shapes(spec.recurrent, width))
    return len(spec.recurrent.layers) * (4 * state + inputs * dtype.itemsize)


def _working_values(spec: Spec) -> int:
    """Return the numbers of a token that a layer has in work at once."""
    recurrent = spec.recurrent
    # queries and keys by value head, values, and copies of all
    delta = 0 if recurrent is None else 4 * (2 * recurrent.key_size * recurrent.value_heads)
    delta += 0 if recurrent is None else 4 * (recurrent.channels + 2 * recurrent.values)
    if spec.experts is None:
        return max(4 * spec.inner, delta) + 8 * spec.width
    # each of its experts' inner values and output, and the router's logits
    chosen, total = spec.experts.chosen, spec.experts.total
    inner = chosen * (4 * spec.inner + 3 * spec.width) + 3 * total + 3 * spec.experts.shared
    return max(inner, delta) + 8 * spec.width


def _logit_bytes(vocab: int, positions: int, dtype: torch.dtype, kind: str, extras: Extras) -> int:
    """Return the bytes of a row's logits at `positions` positions and of sampling from them."""
    changes = extras.changes_logits
    each = dtype.itemsize + _CHOOSING[kind] + (_CHANGING[kind] if changes else 0)
    groups, candidates = vocab // GROUP, GROUP * extras.top
    likeliest = _MAXIMUM * groups + _CANDIDATE * candidates if extras.top else 0
    return vocab * (positions * each + (_COUNTED if changes else 0)) + positions * likeliest


def _position_bytes(
    caches: Sequence[tuple[Spec, int, torch.dtype]], head: HeadSpec | None, *, eight_bits: bool
) -> tuple[int, int]:
    """Return the bytes of a position in the caches, and of a copy of its largest layer that is made
    to read eight bits.

    Args:
        caches: For each model, the layers in its cache and its dtype; the target first.
        head: The draft head; None for other drafts.
    """
    found = largest = 0
    for spec, layers, dtype in caches:
        of_layers = _kv_shapes(spec)
        plain = [2 * heads * size * dtype.itemsize for heads, size in of_layers]
        small = [2 * heads * (size + SCALE) for heads, size in of_layers]
        found += sum(small if eight_bits else plain) * layers // spec.layers
        largest = max(largest, *plain)
    if head is not None and not head.block:  # the prompt cache also has hidden states
        found += head.body.width * caches[0][2].itemsize
    return found, largest * eight_bits


def _kv_shapes(spec: Spec) -> list[tuple[int, int]]:
    """Return the key/value heads of each layer of the store, and their size."""
    if isinstance(spec, AnySpec):
        return [(call.kv_heads, call.size) for call in spec.stored]
    return [(spec.kv_heads, spec.head_size)] * len(spec.attention_layers)


def _weight_bytes(spec: Spec, own: Format, kind: str) -> int:
    """Return the bytes of all weights. Packing and quantising copy a tied head."""
    shapes = parameters(spec)
    if spec.tied and not _packs(own, kind) and own.layouts.head is None:
        shapes.pop("head.weight", None)
    return own.bytes_of(shapes)


def _draft_weight_bytes(
    draft: Spec | None,
    head: HeadSpec | None,
    own: Format,
    kind: str,
    *,
    target: Layouts,
    split: bool,
) -> int:
    """Return the bytes of the weights of a draft model or a draft head; 0 without either."""
    if head is not None:
        return _head_weight_bytes(head, own, kind, target=target, split=split)
    return 0 if draft is None else _weight_bytes(draft, own, kind)


def _packs(own: Format, kind: str) -> bool:
    """Return whether plain matrices are packed (bass_kernels.pack)."""
    return kind == "cpu" and own.dtype == torch.float32


def _head_weight_bytes(
    head: HeadSpec, own: Format, kind: str, *, target: Layouts, split: bool
) -> int:
    """Return the bytes of a draft head's weights.

    Packed weights have a copy of the key and value projections. If the target is split, the head
    cannot share its embedding and output layer. A quantised head is a copy of the target's, unless
    that is stored so.
    """
    body, shapes = head.body, head_parameters(head)
    lent = {"embed.weight": split and not head.embeds}
    copied = own.layouts.head not in (None, target.head)
    lent["head.weight"] = not head.heads and (split or copied)
    shapes |= {name: (body.vocab, body.width) for name, is_own in lent.items() if is_own}
    keys = 2 * body.layers * body.kv_heads * body.head_size * head.inputs * own.dtype.itemsize
    packed = _packs(own, kind) and own.layouts.layers is None
    return own.bytes_of(shapes) + keys * packed


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The memory that a job needs on a device.

    Args:
        rows: The rows of the batch.
        new_tokens: The most new tokens of a row.
        options: The flags that set the two; None if new tokens cannot be set.
        cached_tokens: See Footprint.parts.
    """

    footprint: Footprint
    rows: int
    new_tokens: int
    device: torch.device
    options: tuple[str, str | None] = ("`batch_size`", "`sampling.max_new_tokens`")
    cached_tokens: int | None = None

    def check(self) -> None:
        """Raise MachineError, with settings that fit, if there is not enough free memory."""
        free, needed = (
            usable(free_memory(self.device)),
            self.footprint.bytes(self.rows, self.new_tokens, cached_tokens=self.cached_tokens),
        )
        if needed > free:
            remedy = self._remedy(free, self.rows, self.new_tokens)
            raise MachineError(
                f"{self._batch()}: {gigabytes(needed)} of memory are needed and {gigabytes(free)} "
                f"are free; {remedy}"
            )

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turn an out-of-memory error into a MachineError with settings that should fit."""
        try:
            yield
        except Exception as error:
            if not is_refused_memory(error):
                raise
            try:
                free = usable(free_memory(self.device) + held_memory(self.device))
            except RuntimeError:  # the device may refuse even this; then take the plan's figure
                free = self.footprint.bytes(
                    self.rows, self.new_tokens, cached_tokens=self.cached_tokens
                )
            # The plan expected it to fit, so propose half of it, or less if memory was taken.
            remedy = self._remedy(free, self.rows // 2, self.new_tokens // 2)
            raise MachineError(f"memory ran out with {self._batch()}; {remedy}") from None

    def _batch(self) -> str:
        tokens = min(self.new_tokens, self.footprint.context - 1)
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        return f"{rows} of up to {tokens} new tokens{'' if self.rows == 1 else ' each'}"

    def _remedy(self, free: int, most_rows: int, most_tokens: int) -> str:
        """Suggest one changed setting, up to these values."""
        rows_option, tokens_option = self.options
        found = []
        fitting = self.footprint.most_rows(self.new_tokens, free, cached_tokens=self.cached_tokens)
        if rows := min(fitting, most_rows):
            found.append(f"{rows_option} {rows}")
        tokens = min(self.footprint.most_tokens(self.rows, free), most_tokens)
        if tokens_option is not None and tokens:
            found.append(f"{tokens_option} {tokens}")
        if found:
            return f"the largest that can be expected to fit: {', or '.join(found)}"
        return (
            f"the weights take {gigabytes(self.footprint.weights)}; use a smaller model, a "
            "`dtype` of fewer bits (fp8, int8) or a machine with more memory"
        )


def usable(free: int) -> int:
    """Return how many of `free` bytes a plan may use."""
    return int(_USABLE * free)
