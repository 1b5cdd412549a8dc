"""A decoder with its cache: prompts are filled in once, then rows take ragged passes.

Not here: what is fed and why (draft/, engine/step.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bass_cli.model.capture import Recorder, recorder
from bass_cli.model.decoder import Decoder
from bass_cli.model.kv_cache import Change, KVCache, Span
from bass_cli.model.prefill import SIZES, PromptGraphs, padded

_CHUNK = SIZES[-1]  # prompt tokens a pass
# the same where a deadline may stop it in between: about what a round takes
_TIMED_CHUNK = {"cpu": 64, "cuda": 512}


class Runner:
    """`decoder` over up to `rows` rows that each generate up to `span` positions.

    `lag` tokens at a prompt's end are left to the rows: 1 for a target (the pending token), 2
    for a draft model, whose first step always feeds a row's last two tokens. Prompts are read by
    graphs where `record` (by default that of the device) captures them.
    """

    def __init__(
        self, decoder: Decoder, *, rows: int, span: int, lag: int, record: Recorder | None = None
    ):
        spec = decoder.spec
        self.decoder, self.lag, self.rows, self.device = decoder, lag, rows, decoder.device
        self.cache = KVCache(
            layers=len(decoder.layers),
            kv_heads=spec.kv_heads,
            head_size=spec.head_size,
            rows=rows,
            span=span + lag,
            dtype=decoder.dtype,
            device=decoder.device,
        )
        self._prompts: dict[str, Span] = {}
        record = record or recorder(decoder.device)
        self._graphs = (
            None if record is None else PromptGraphs(self._fill_anywhere, record, decoder.device)
        )

    @torch.inference_mode()
    def open(
        self, key: str, tokens: Sequence[int], in_time: Callable[[int], bool] | None = None
    ) -> bool:
        """Store a prompt (its token ids) under `key`, for rows to attach to. `in_time` is asked
        before each pass whether so many tokens can still be taken in; if not, nothing is stored,
        and this is False."""
        assert key not in self._prompts
        assert tokens
        length = max(len(tokens) - self.lag, 0)
        span = self._prompts[key] = self.cache.reserve(length, self._padded(length))
        size = _CHUNK if in_time is None else _TIMED_CHUNK.get(self.decoder.device.type, _CHUNK)
        for first in range(0, span.length, size):
            end = min(first + size, span.length)
            if in_time is not None and not in_time(end - first):
                self.close(key)
                return False
            self._fill(span, first, tokens[first:end], capture=in_time is None)
        return True

    @torch.inference_mode()
    def prepare_prompts(self) -> None:
        """Capture now what reads prompts, rather than when it has come often enough."""
        if self._graphs is not None:
            span = self.cache.reserve(0, SIZES[-1])
            self._graphs.prepare(start=span.start, store=self.cache.positions)
            self.cache.close(span)

    def close(self, key: str) -> None:
        """No further row will attach to this prompt."""
        self.cache.close(self._prompts.pop(key))

    @torch.inference_mode()
    def follow(self, change: Change) -> None:
        """Rows have ended, moved and begun."""
        base = self.cache.base
        self.cache.exchange(
            ended=change.ended,
            moved=[(old, new, max(length - base(old), 0)) for old, new, length in change.moved],
            begun=[(places, self._prompts[key]) for places, key in change.begun],
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

    def feed(self, tokens: Tensor, positions: Tensor, ends: Sequence[int] | None) -> None:
        """Only write the keys and values of tokens [B, W] at positions [B, W]."""
        self.decoder.forward(tokens, self.cache.decode(positions, ends), last=0)

    def _padded(self, length: int) -> int:
        """The positions that passes over a prompt of `length` write."""
        if self._graphs is None or not length:
            return length
        last = (length - 1) % _CHUNK + 1
        return length - last + padded(last)

    def _fill(self, span: Span, first: int, tokens: Sequence[int], *, capture: bool) -> None:
        """Store a part of a prompt, for positions from `first` on."""
        if self._graphs is not None and self._graphs.feed(
            tokens, start=span.start, first=first, store=self.cache.positions, capture=capture
        ):
            return
        given = torch.tensor([tokens], device=self.decoder.device)
        self.decoder.forward(given, self.cache.fill(span, first, len(tokens)), last=0)

    def _fill_anywhere(self, tokens: Tensor, place: Tensor) -> None:
        self.decoder.forward(tokens, self.cache.fill_anywhere(place, tokens.shape[1]), last=0)
