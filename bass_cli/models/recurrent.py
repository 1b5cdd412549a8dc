"""The recurrent states of rows and prompts, in slots of one store, and what a pass needs of them.

A row's slot holds its state before the last round, and the inputs since then. The next round rolls
the state forward by the tokens that became text, which follows from its first position alone. So
nothing is undone when drafts are rejected. Not here: the arithmetic (bass_kernels/delta_rule.py),
which prompts are read (runner.py), keys and values (kv_cache.py).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

import bass_kernels as ops
from bass_cli.models.block_allocator import Integers, Sender
from bass_cli.models.spec import Recurrent
from bass_kernels import DeltaState, DeltaWeights, Packed
from bass_kernels.delta_rule import places

# Prompts whose states are kept until their rows begin. A prompt that had to go is read again. A
# pass over prompts takes as many of them; at least three make progress (see Runner).
PROMPTS = 8


class StatePass(NamedTuple):
    """What the recurrent layers of one pass need: of rows, or of parts of prompts.

    layers: the states by recurrent layer.
    slots, advance: [B] int64. positions: [B, W] int64. See bass_kernels.delta_round.
    packed: the rows' queries if rows have different numbers of them.
    parts: [P, 4] int64, see bass_kernels.delta_prompt; None for a pass of rows.
    """

    layers: Sequence[DeltaState]
    slots: Tensor
    positions: Tensor
    advance: Tensor
    packed: Packed | None = None
    parts: Tensor | None = None

    def run(
        self, layer: int, mixed: Tensor, gates: Tensor, weights: DeltaWeights, *, eps: float
    ) -> Tensor:
        """Return the outputs of a recurrent layer before its last projection, [B, W, H Dv].

        Args:
            layer: its number among the recurrent ones.
            mixed: [B, W, C + H Dv], the input of the convolution, then the gate of the norm.
            gates: [B, W, 2H].
        """
        state, channels = self.layers[layer], len(weights.convolution)
        given = *mixed.split((channels, mixed.shape[-1] - channels), -1), gates
        if self.parts is not None:
            qkv, z, gates = (one[0] for one in given)
            found = ops.delta_prompt(qkv, gates, z, weights, state, parts=self.parts, eps=eps)
            return found[None]
        if self.packed is not None:
            # clamped, because the counts are arbitrary where rounds run only to compile kernels
            index = self.packed.by_row.clamp(0, mixed.shape[1] - 1)
            given = (*(one[0][index] for one in given),)
        qkv, z, gates = given
        found = ops.delta_round(
            qkv,
            gates,
            z,
            weights,
            state,
            slots=self.slots,
            positions=self.positions,
            advance=self.advance,
            eps=eps,
        )
        if self.packed is None:
            return found
        return found[self.packed.row, self.packed.place.clamp(0, found.shape[1] - 1)][None]


class RecurrentStates:
    """The states of up to `rows` rows and of PROMPTS prompts. A row that moves keeps its slot.

    Args:
        width: the most tokens of a row in a pass.
        dtype: of the inputs that are kept. The states are float32.
    """

    def __init__(
        self,
        recurrent: Recurrent,
        *,
        rows: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.width = width
        state, inputs = (
            torch.zeros(len(recurrent.layers), rows + PROMPTS, *shape, dtype=kind, device=device)
            for shape, kind in zip(
                state_shapes(recurrent, width), (torch.float32, dtype), strict=True
            )
        )
        self._whole = state, inputs
        self._layers = [DeltaState(*both) for both in zip(state, inputs, strict=True)]
        # By slot: the number of tokens that its state has. The last place is that of slot -1, of
        # rows that are not live.
        self._counts = torch.zeros(rows + PROMPTS + 1, dtype=torch.int64, device=device)
        self._read = self._counts.clone()  # see `read`
        self._slots = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self._host: Integers = numpy.arange(rows)
        self._live = numpy.zeros(rows, dtype=bool)
        self._sender = Sender(device)
        self._free = list(range(rows, rows + PROMPTS))
        self._of_prompt: dict[Hashable, int] = {}  # slots, oldest first

    def bytes(self) -> int:
        """Return the memory of the states in bytes."""
        return sum(part.numel() * part.element_size() for part in self._whole)

    def swap_rows(
        self, ended: Sequence[int], moved: Sequence[tuple[int, int]], begun: Sequence[int]
    ) -> None:
        """Apply a Change to the rows. Rows that begin have no valid state until `begin`."""
        self._live[list(ended)] = False
        for source, target in moved:
            self._host[[source, target]] = self._host[[target, source]]
            self._live[[source, target]] = False, True
        self._live[list(begun)] = True
        self._slots.copy_(self._sender.send(numpy.where(self._live, self._host, -1)))

    def begin(self, rows: Sequence[int], prompt: Hashable, length: int) -> None:
        """Give these rows the state after the `length` tokens of a prompt."""
        for slot in self._host[list(rows)].tolist():
            for part in self._whole if length else ():
                part[:, slot] = part[:, self._of_prompt[prompt]]
            if not length:
                self._whole[0][:, slot] = 0
            self._counts[slot] = self._read[slot] = length

    def has(self, prompt: Hashable) -> bool:
        """Return whether a prompt has a slot."""
        return prompt in self._of_prompt

    def take(self, prompt: Hashable, spare: Collection[Hashable] = ()) -> bool:
        """Give a prompt a slot unless it has one.

        Args:
            spare: prompts that can lose theirs. The oldest one does if no slot is free.

        Returns:
            False if there is none.
        """
        if prompt in self._of_prompt:
            return True
        if not self._free:
            oldest = next((one for one in self._of_prompt if one in spare), None)
            if oldest is None:
                return False
            self.drop(oldest)
        self._of_prompt[prompt] = self._free.pop()
        return True

    def drop(self, prompt: Hashable) -> None:
        """Free the slot of a prompt, if it has one."""
        if (slot := self._of_prompt.pop(prompt, None)) is not None:
            self._free.append(slot)

    def decode_pass(self, positions: Tensor, packed: Packed | None) -> StatePass:
        """Return a pass of rows 0 to B - 1. Afterwards their states are those before its tokens.

        Args:
            positions: [B, W], or [1, M] if `packed`.
        """
        if packed is not None:
            first = positions[0][packed.begin[:-1, None].clamp(0, positions.shape[1] - 1)]
            positions = first + torch.arange(packed.widest, device=positions.device)
        assert positions.shape[1] <= self.width
        slots = self._slots[: len(positions)]
        advance = positions[:, 0] - self._counts[slots]
        self._counts[slots] = positions[:, 0]
        return StatePass(self._layers, slots, positions, advance, packed)

    def read(self, rows: int) -> Tensor:
        """Return how many tokens of each row's text were read, [rows] int64, as a drafter noted
        them. A pass may begin at any token up to that one, but not before the last pass."""
        return self._read[self._slots[:rows]]

    def note_read(self, read: Tensor) -> None:
        """Set what `read` returns, [rows] int64."""
        self._read[self._slots[: len(read)]] = read

    def send_read(self, read: Integers) -> None:
        """Set what `read` returns from the host's record."""
        self.note_read(self._sender.send(read.copy()))

    def step_back(self, rows: int, tokens: int) -> None:
        """Let the next pass roll the rows' states forward by `tokens` tokens, as after a round that
        accepted them. This is for timing: the states are not valid afterwards."""
        slots = self._slots[:rows]
        self._counts[slots] = self._counts[slots] - tokens

    def prefill_pass(self, parts: Sequence[tuple[Hashable, int, int, int]]) -> StatePass:
        """Return a pass over parts of prompts.

        Args:
            parts: of each the prompt, which has a slot, its first token in the pass, its number of
                tokens, and their first position.
        """
        table = [(self._of_prompt[prompt], *rest) for prompt, *rest in parts]
        numbers = self._sender.send(numpy.array(table, dtype=numpy.int64).reshape(-1, 4))
        return StatePass(self._layers, self._slots, numbers, self._slots, parts=numbers)


def state_shapes(recurrent: Recurrent, width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of a slot in one layer: of the state, float32, and of the kept inputs of
    passes of up to `width` tokens, in the model's dtype."""
    return (
        (recurrent.value_heads, recurrent.key_size, recurrent.value_size),
        (places(recurrent.kernel, width), recurrent.channels + 2 * recurrent.value_heads),
    )
