"""A decoder with its cache: prompts are filled in once, then rows take ragged passes.

Not here: what is fed and why (drafting/, engine/loop.py), passes over prompts (prefill.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bass_cli.models.block_allocator import Change, Pieces
from bass_cli.models.capture import Recorder, recorder
from bass_cli.models.decoder import Decoder
from bass_cli.models.kv_cache import KVCache, Span
from bass_cli.models.prefill import PASS, Part, Passes, alone, tiled
from bass_kernels import Packed

# prompt tokens a pass where a deadline may stop it in between: about what a round takes
_TIMED_PASS = {"cpu": 64}
# Tokens from which a common beginning is copied: it takes two launches a layer, in which an H200
# reads some 60 tokens of a small model.
_COPIED = 128


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt's tokens, its place, how many of them are stored there (`read`), and one opened
    before that begins with the same tokens (`like`), so that some need not be computed."""

    tokens: Sequence[int]
    span: Span
    like: Prompt | None = None
    read: int = 0

    @property
    def left(self) -> int:
        return self.span.length - self.read


class Runner:
    """`decoder` over up to `rows` rows that each generate up to `span` positions.

    `lag` tokens at a prompt's end are left to the rows: 1 for a target (the pending token), 2
    for a draft model, whose first step always feeds a row's last two tokens. Prompts that are
    opened one after the other are read together, when a row of one of them begins; by graphs
    where `record` (by default that of the device) captures them. `pieces`: see KVCache. `ahead`:
    as the decoder's reader's, if another process has that.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        rows: int,
        span: int,
        lag: int,
        record: Recorder | None = None,
        pieces: Pieces | None = None,
        ahead: int | None = None,
    ):
        self.decoder, self.lag, self.rows, self.device = decoder, lag, rows, decoder.device
        self.cache = KVCache(
            decoder.cached,
            rows=rows,
            span=span + lag,
            dtype=decoder.dtype,
            device=decoder.device,
            pieces=pieces,
        )
        self._prompts: dict[str, Prompt] = {}
        self._unread: dict[str, Prompt] = {}  # those of them that are not all there, oldest first
        self._newest: dict[tuple[int, ...], Prompt] = {}  # by how they begin
        if record is None and decoder.ranks is None:  # what several take part in is not captured
            record = recorder(decoder.device)
        self._passes = Passes(decoder, self.cache, record)
        reader = decoder.reader
        self._ahead = ahead or (0 if reader is None else reader.ahead)

    @torch.inference_mode()
    def open(
        self, key: str, tokens: Sequence[int], in_time: Callable[[int], bool] | None = None
    ) -> bool:
        """Make place for a prompt (its token ids) under `key`, for rows to attach to. With
        `in_time` it is read now: that is asked before each pass whether so many tokens can still
        be taken in; if not, nothing is stored, and this is False."""
        assert key not in self._prompts
        assert tokens
        span = self.cache.reserve(max(len(tokens) - self.lag, 0))
        prompt = self._prompts[key] = Prompt(tokens, span, self._like(tokens, span))
        self._remember(prompt)
        if in_time is None and prompt.left:
            self._unread[key] = prompt
        most = _TIMED_PASS.get(self.device.type, PASS)
        if in_time is not None:
            self._copy(prompt)
        while in_time is not None and prompt.left:
            if not in_time(min(prompt.left, most)):
                self.close(key)
                return False
            self._passes.run([self._part(prompt, most)], capture=False)
        return True

    @torch.inference_mode()
    def read(self) -> bool:
        """One pass over what is open and not read, as much as goes into one, oldest first;
        whether something is left."""
        # What others are to copy is there after a pass, not before.
        waiting = [one for one in self._unread.values() if self._copy(one) and one.left]
        if waiting and (most := alone(waiting[0].left, self.device.type)):
            self._passes.run([self._part(waiting[0], most)], capture=False)
        elif waiting:
            self._passes.run(list(self._parts(waiting)), capture=True)
        self._unread = {key: prompt for key, prompt in self._unread.items() if prompt.left}
        return bool(self._unread)

    def _parts(self, waiting: Iterable[Prompt]) -> Iterator[Part]:
        """As much of these prompts as goes into a pass."""
        room = PASS
        for prompt in waiting:
            part = self._part(prompt, room)
            yield part
            room -= tiled(len(part.tokens), self._passes.tile)
            if room <= 0:
                return

    def read_by_nobody(self) -> Runner:
        """The same store and prompts, with rounds that leave their reader's layers out: for plain
        decoding beside it, never with rows of the other."""
        other = copy.copy(self)
        other.decoder = copy.copy(self.decoder)
        other.decoder.reader = None
        return other

    @torch.inference_mode()
    def prepare_prompts(self) -> None:
        """Capture now what reads prompts, rather than when it has come often enough."""
        self._passes.prepare()

    def close(self, key: str) -> None:
        """No further row will attach to this prompt."""
        self.cache.close(self._prompts.pop(key).span)
        self._unread.pop(key, None)

    @torch.inference_mode()
    def follow(self, change: Change) -> None:
        """Rows have ended, moved and begun."""
        while any(key in self._unread for _, key in change.begun):
            self.read()
        self.cache.swap_rows(
            ended=change.ended,
            moved=change.moved,
            begun=[(places, self._prompts[key].span) for places, key in change.begun],
            runs=change.runs,
            copied=change.copied,
        )

    @property
    def version(self) -> int:
        """Changes when what a captured graph reads has moved."""
        return self.cache.version

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        ends: Sequence[int] | None,
        *,
        last: int | None = None,
    ) -> Tensor:
        """Logits [B, min(last, W), V] of tokens [B, W] int64 at positions [B, W]. ends: each
        row's last position + 1; None: rows up to B may be dummies, and only what is on the
        device counts (KVCache.decode)."""
        logits = self.decoder.forward(tokens, self.cache.decode(positions, ends), last=last)
        assert logits is not None
        return logits

    def forward_packed(
        self, tokens: Tensor, positions: Tensor, packed: Packed, ends: Sequence[int] | None
    ) -> Tensor:
        """Logits [M, V] of tokens [M] int64 at positions [M], of which each row has a number of
        its own; ends: as `forward`'s, or more."""
        step = self.cache.decode(positions[None], ends, packed)
        logits = self.decoder.forward(tokens[None], step)
        assert logits is not None
        return logits[0]

    def feed(self, tokens: Tensor, positions: Tensor, ends: Sequence[int] | None) -> None:
        """Only write the keys and values of tokens [B, W] at positions [B, W]."""
        self.decoder.forward(tokens, self.cache.decode(positions, ends), last=0)

    def _like(self, tokens: Sequence[int], span: Span) -> Prompt | None:
        """The newest prompt that begins as these do, if there is one and its place is its own."""
        if span.length < _COPIED:
            return None
        found = self._newest.get(tuple(tokens[:_COPIED]))
        return found if found is not None and found.span.taken else None

    def _remember(self, prompt: Prompt) -> None:
        if prompt.span.length < _COPIED:
            return
        if len(self._newest) > 2 * self.rows:  # no more than that are of use
            self._newest = {begin: one for begin, one in self._newest.items() if one.span.taken}
        self._newest[tuple(prompt.tokens[:_COPIED])] = prompt

    def _copy(self, prompt: Prompt) -> bool:
        """Take over what a prompt has in common with the one it is like; False while that is
        still to be read."""
        like = prompt.like
        if like is None:
            return True
        if like.span.taken:
            most = min(like.span.length, prompt.span.length) + self._ahead
            pairs = zip(like.tokens[:most], prompt.tokens[:most], strict=True)
            same = next((i for i, (one, other) in enumerate(pairs) if one != other), most)
            same = max(same - self._ahead, 0)
            if like.read < same:
                return False
            self.cache.copy(like.span, prompt.span, same)
            prompt.read = same
        prompt.like = None
        return True

    def _part(self, prompt: Prompt, most: int) -> Part:
        """The next tokens of a prompt, which are read now."""
        first, prompt.read = prompt.read, min(prompt.read + most, prompt.span.length)
        # none follows the last one where there is no lag
        behind = prompt.tokens[prompt.read] if prompt.read < len(prompt.tokens) else 0
        return Part(prompt.tokens[first : prompt.read], prompt.span, first, behind)
