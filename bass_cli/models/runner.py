"""A decoder with its key/value store: prompts are prefilled once, then rows take ragged passes.

Not here: which tokens are fed (drafts/, engine/), passes over prompts (prefill.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from bass_cli.config.options import MOST_DRAFTS
from bass_cli.models.block_allocator import BlockLayout, Change
from bass_cli.models.capture import Graphs
from bass_cli.models.decoder import Decoder
from bass_cli.models.kv_cache import KVCache, Span
from bass_cli.models.prefill import (
    PASS,
    PrefillPasses,
    PromptPart,
    PromptScores,
    own_pass_tokens,
    tiled,
)
from bass_cli.models.recurrent import RecurrentStates
from bass_kernels import Packed

# tokens of a prefill pass if a deadline may stop it between passes: about as long as a round
_TIMED_PASS = {"cpu": 64}
# The most tokens of a row in a pass: the longest draft length of a job, and the pending token
_WIDEST = MOST_DRAFTS + 1
# Minimum length of a common prefix to copy instead of computing it. A copy takes two launches a
# layer, in which an H200 reads about 60 tokens of a small model.
_COPIED = 128


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt and its span in the store.

    prefix_source: an earlier prompt with the same first tokens, whose keys and values are copied.
    stored: positions that are stored already.
    scores: the log-probabilities of its tokens, if they are wanted.
    """

    tokens: Sequence[int]
    span: Span
    prefix_source: Prompt | None = None
    stored: int = 0
    scores: PromptScores | None = None

    @property
    def remaining(self) -> int:
        return self.span.length - self.stored


class RunnerSizes(NamedTuple):
    """What a Runner has room for: its arguments of these names."""

    rows: int
    span: int
    pending: int
    blocks: BlockLayout | None
    eight_bits: bool
    width: int


class Runner:
    """Runs `decoder` over up to `rows` rows that each generate up to `span` positions.

    Prompts that are opened one after the other are prefilled together, when a row of one of them
    begins.

    Args:
        pending: pending tokens, at a prompt's end, that the rows are fed instead of the prefill: 1
            for a target, 2 for a draft model, whose first step feeds a row's last two tokens.
        graphs: for captured prefill passes. Default: new ones, unless the model is split.
        blocks: see KVCache.
        ahead: see ReadsHidden; needed if the reader is in another process.
        eight_bits: see KVCache.
        width: the most tokens of a row in a pass. Only recurrent layers need it.

    packs: whether `forward_packed` is possible: not if the model is split.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        rows: int,
        span: int,
        pending: int,
        graphs: Graphs | None = None,
        blocks: BlockLayout | None = None,
        ahead: int | None = None,
        eight_bits: bool = False,
        width: int = _WIDEST,
    ):
        self.decoder, self.pending, self.rows, self.device = decoder, pending, rows, decoder.device
        states = None
        if decoder.recurrent is not None:
            states = RecurrentStates(
                decoder.recurrent,
                rows=rows,
                width=width,
                dtype=decoder.dtype,
                device=decoder.device,
            )
        self.cache = KVCache(
            decoder.cached,
            rows=rows,
            span=span + pending,
            dtype=decoder.dtype,
            device=decoder.device,
            blocks=blocks,
            eight_bits=eight_bits,
            states=states,
        )
        self._prompts: dict[str, Prompt] = {}
        self._unprefilled: dict[str, Prompt] = {}  # prompts not fully stored, oldest first
        self._newest_by_prefix: dict[tuple[int, ...], Prompt] = {}  # by their first tokens
        # Parts of prompts are known to the host only, so passes over states are not captured.
        wanted = decoder.ranks is None and states is None
        graphs = graphs or Graphs(decoder.device, wanted=wanted)
        self.packs = decoder.ranks is None
        self._passes = PrefillPasses(decoder, self.cache, graphs if graphs.enabled else None)
        reader = decoder.reader
        self._ahead = ahead or (0 if reader is None else reader.ahead)

    @torch.inference_mode()
    def open(
        self,
        key: str,
        tokens: Sequence[int],
        in_time: Callable[[int], bool] | None = None,
        *,
        logprobs: int | None = None,
    ) -> bool:
        """Reserve space for a prompt under `key`. Rows can begin with that key.

        Args:
            tokens: the prompt's ids.
            in_time: if given, prefill now. It is called before each pass with a number of tokens,
                and returns whether there is time for them.
            logprobs: if given, find the log-probability of each token, and so many likeliest ones
                in its place, for `prompt_logprobs`. It needs 1 pending token.

        Returns:
            False if there was no time; then nothing is stored.
        """
        assert key not in self._prompts
        assert tokens
        span = self.cache.reserve(max(len(tokens) - self.pending, 0))
        prompt = self._prompts[key] = Prompt(tokens, span, self._find_same_prefix(tokens, span))
        if logprobs is not None:
            assert self.pending == 1
            prompt.scores = PromptScores(logprobs)
            prompt.prefix_source = None  # a copied prefix has no logits
        self._remember_prefix(prompt)
        if in_time is None and prompt.remaining:
            self._unprefilled[key] = prompt
        most = _TIMED_PASS.get(self.device.type, PASS)
        if in_time is not None:
            self._copy_prefix(prompt)
        while in_time is not None and prompt.remaining:
            if not in_time(min(prompt.remaining, most)):
                self._close(key)
                return False
            self._with_slots([prompt], [])
            self._run_pass([prompt], [self._part(prompt, most)], capture=False)
        return True

    def prefill_all(self) -> None:
        """Prefill all open prompts now, not when a row of theirs begins."""
        while self.prefill():
            pass

    def prompt_logprobs(
        self, key: str
    ) -> tuple[NDArray[numpy.float32], NDArray[numpy.int64]] | None:
        """Return the log-probabilities of a prompt's tokens (PromptScores.found), if `open` had
        `logprobs`. The prompt must have been prefilled."""
        prompt = self._prompts[key]
        assert not prompt.remaining
        return None if prompt.scores is None else prompt.scores.found()

    @torch.inference_mode()
    def prefill(self, first: Sequence[Prompt] = ()) -> bool:
        """Run one prefill pass over the open prompts, oldest first. Return whether tokens are
        left.

        Args:
            first: prompts with rows that wait for their recurrent states. They are read first.
        """
        # A prompt waits until the prefix that it copies is stored.
        waiting = [
            one for one in self._unprefilled.values() if self._copy_prefix(one) and one.remaining
        ]
        waiting = self._with_slots(waiting, first)
        if waiting and (most := own_pass_tokens(waiting[0].remaining, self.device.type)):
            self._run_pass(waiting[:1], [self._part(waiting[0], most)], capture=False)
        elif waiting:
            self._run_pass(waiting, list(self._parts(waiting)), capture=True)
        self._unprefilled = {
            key: prompt for key, prompt in self._unprefilled.items() if prompt.remaining
        }
        return bool(self._unprefilled)

    def _with_slots(self, waiting: list[Prompt], first: Sequence[Prompt]) -> list[Prompt]:
        """Return the prompts that the next pass may read, in order. With recurrent layers, these
        are the ones with a slot for their state. A prompt that has been read loses its slot to
        one of `first`; if there are none, to any."""
        states = self.cache.states
        if states is None:
            return waiting
        finished = {
            one.span for one in self._prompts.values() if not one.remaining and one not in first
        }

        def order(prompt: Prompt) -> int:
            return 0 if prompt in first else 1 if states.has(prompt.span) else 2

        return [
            one
            for one in sorted(waiting, key=order)
            if states.take(one.span, finished if one in first or not first else ())
        ]

    def _run_pass(
        self, prompts: Sequence[Prompt], parts: Sequence[PromptPart], *, capture: bool
    ) -> None:
        """Run a pass over parts of the first prompts, and score those that want it."""
        both = list(zip(prompts, parts, strict=False))
        if all(prompt.scores is None for prompt, _ in both):
            self._passes.run(parts, capture=capture)
            return
        for (prompt, part), hidden in zip(both, self._passes.run_with_hidden(parts), strict=True):
            # a prompt that is read again, for its recurrent state, has its scores already
            if prompt.scores is not None and part.first == prompt.scores.count:
                prompt.scores.add(self.decoder, hidden, [*part.tokens[1:], part.behind])

    def _parts(self, waiting: Iterable[Prompt]) -> Iterator[PromptPart]:
        """Yield the parts of these prompts that fit into one pass."""
        room = PASS
        for prompt in waiting:
            part = self._part(prompt, room)
            yield part
            room -= tiled(len(part.tokens), self._passes.tile)
            if room <= 0:
                return

    def without_reader(self) -> Runner:
        """Return a runner over the same store and prompts whose passes skip the reader's layers:
        for plain decoding. The two must not have rows at the same time."""
        other = copy.copy(self)
        other.decoder = copy.copy(self.decoder)
        other.decoder.reader = None
        return other

    @torch.inference_mode()
    def prepare_prompts(self) -> None:
        """Capture the prefill passes now. See PrefillPasses.prepare."""
        self._passes.prepare()

    def capture_early(self) -> None:
        """Capture each prefill pass when its size first comes."""
        self._passes.patience = 1

    def close(self, key: str) -> None:
        """Accept no further rows for this prompt."""
        self._close(key)

    def _close(self, key: str) -> None:
        self.cache.close(self._prompts.pop(key).span)
        self._unprefilled.pop(key, None)

    @torch.inference_mode()
    def follow(self, change: Change) -> None:
        """Apply a Change to the rows. Prefill the prompts of rows that begin."""
        if self.cache.states is not None:
            self._begin_states(self.cache.states, change)
        while any(key in self._unprefilled for _, key in change.begun):
            self.prefill()
        self.cache.swap_rows(
            ended=change.ended,
            moved=change.moved,
            begun=[(places, self._prompts[key].span) for places, key in change.begun],
            runs=change.runs,
            copied=change.copied,
        )

    def _begin_states(self, states: RecurrentStates, change: Change) -> None:
        """Apply a Change to the recurrent states. A prompt whose state has gone is read again."""
        states.swap_rows(
            change.ended, change.moved, [row for rows, _ in change.begun for row in rows]
        )
        waiting = [(rows, self._prompts[key]) for rows, key in change.begun]
        for _, key in change.begun:
            prompt = self._prompts[key]
            if not prompt.remaining and prompt.span.length and not states.has(prompt.span):
                prompt.stored, self._unprefilled[key] = 0, prompt
        while waiting:
            for rows, prompt in waiting:
                if not prompt.remaining:
                    states.begin(rows, prompt.span, prompt.span.length)
            waiting = [one for one in waiting if one[1].remaining]
            if waiting:
                self.prefill([prompt for _, prompt in waiting])

    def step_back(self, rows: int, tokens: int) -> None:
        """Let the next pass roll recurrent states forward by `tokens` tokens, for timing. See
        RecurrentStates.step_back. Without recurrent layers nothing happens."""
        if self.cache.states is not None:
            self.cache.states.step_back(rows, tokens)

    @property
    def version(self) -> int:
        """Changes when memory that captured graphs read has moved. See KVCache."""
        return self.cache.version

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        ends: Sequence[int] | None,
        *,
        last: int | None = None,
    ) -> Tensor:
        """Return logits [B, min(last, W), V] of tokens [B, W] int64 at positions [B, W].

        Args:
            ends: each row's last position + 1. None in a captured graph (see KVCache.decode_pass),
                where the last rows may be padding.
        """
        logits = self.decoder.forward(tokens, self.cache.decode_pass(positions, ends), last=last)
        assert logits is not None
        return logits

    def forward_packed(
        self, tokens: Tensor, positions: Tensor, packed: Packed, ends: Sequence[int] | None
    ) -> Tensor:
        """Return logits [M, V] of tokens [M] int64 at positions [M]. `packed` gives the number of
        tokens of each row; `ends` may be larger than in `forward`."""
        step = self.cache.decode_pass(positions[None], ends, packed)
        logits = self.decoder.forward(tokens[None], step)
        assert logits is not None
        return logits[0]

    def forward_at(
        self, tokens: Tensor, positions: Tensor, ends: Sequence[int] | None, places: Tensor
    ) -> Tensor:
        """Do `forward`, but return logits [B, N, V] of these places [B, N] of each row."""
        hidden = self.decoder.final_hidden(tokens, self.cache.decode_pass(positions, ends))
        assert hidden is not None
        index = places[..., None].expand(*places.shape, hidden.shape[-1])
        return self.decoder.logits(hidden.gather(1, index))

    def feed(self, tokens: Tensor, positions: Tensor, ends: Sequence[int] | None) -> None:
        """Write the keys and values of tokens [B, W] at positions [B, W], without logits."""
        self.decoder.forward(tokens, self.cache.decode_pass(positions, ends), last=0)

    def _find_same_prefix(self, tokens: Sequence[int], span: Span) -> Prompt | None:
        """Return the newest stored prompt with the same first tokens, if there is one."""
        if span.length < _COPIED or self.cache.states is not None:
            return None  # a recurrent state is known after a whole prompt only
        found = self._newest_by_prefix.get(tuple(tokens[:_COPIED]))
        return found if found is not None and found.span.in_use else None

    def _remember_prefix(self, prompt: Prompt) -> None:
        if prompt.span.length < _COPIED:
            return
        if len(self._newest_by_prefix) > 2 * self.rows:  # drop those that are no longer stored
            self._newest_by_prefix = {
                begin: one for begin, one in self._newest_by_prefix.items() if one.span.in_use
            }
        self._newest_by_prefix[tuple(prompt.tokens[:_COPIED])] = prompt

    def _copy_prefix(self, prompt: Prompt) -> bool:
        """Copy the prefix that a prompt shares with its `prefix_source`. Return False if that
        prefix is not stored yet."""
        source = prompt.prefix_source
        if source is None:
            return True
        if source.span.in_use:
            most = min(source.span.length, prompt.span.length) + self._ahead
            pairs = zip(source.tokens[:most], prompt.tokens[:most], strict=True)
            same = next((i for i, (one, other) in enumerate(pairs) if one != other), most)
            same = max(same - self._ahead, 0)
            if source.stored < same:
                return False
            self.cache.copy(source.span, prompt.span, same)
            prompt.stored = same
        prompt.prefix_source = None
        return True

    def _part(self, prompt: Prompt, most: int) -> PromptPart:
        """Take the next tokens of a prompt, up to `most`, and count them as read."""
        first, prompt.stored = prompt.stored, min(prompt.stored + most, prompt.span.length)
        # without pending tokens no token follows the last one
        behind = prompt.tokens[prompt.stored] if prompt.stored < len(prompt.tokens) else 0
        return PromptPart(prompt.tokens[first : prompt.stored], prompt.span, first, behind)
