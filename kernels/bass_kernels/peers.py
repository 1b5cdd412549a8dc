"""Triton: sums of a few tokens over the processes of a split model, through memory of the peers'
GPUs. Definition: all parts added in float32, in the order of ranks, so bitwise equal in all.

A process writes its part into the buffer of each peer, as packets of 8 bytes: 4 bytes of the part,
and the number of the exchange. Packets arrive whole, so that number is the only signal. A process
begins exchange n + 2 when it has all parts of n + 1, so every peer has read what it got in n. So
the buffer needs two halves. (NCCL's low-latency protocol, without its launches and rings.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import processors

# How packets hold numbers: one float32, or two of 16 bits
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_BLOCK = 256  # the least words of a program
_LOOKS = tl.constexpr(256)  # a waiting program reads `flags` once in so many looks at packets
# Programs of `add` a processor. They are all resident at once, because they wait for programs of
# the peers that wait for them.
_RESIDENT = 4


class Peers(NamedTuple):
    """What the kernels of a process need to exchange parts with its peers.

    addresses: [ranks + 1] int64, of the buffers of all processes, as this process reaches them, and
        of `flags`. Each buffer is [2, ranks, capacity] int64, at first zeros.
    state: [2] int32: the number of the next exchange, at first 1, and how many programs have ended
        it, 0 between launches.
    capacity: words of 4 bytes of a part.
    flags: [2] int32 of the host, which the device reaches: whether waits are to end, and 1 + the
        rank of a peer for whose packets a program waits no longer. At first zeros.
    limit: times that a program looks for packets of a peer. If it finds none, or `end_waits` was
        called, the sum is NaN.
    held: what owns the memory behind `addresses`.
    """

    rank: int
    ranks: int
    addresses: Tensor
    state: Tensor
    flags: Tensor
    capacity: int
    limit: int
    held: object = None

    def takes(self, part: Tensor) -> bool:
        """Return whether `add` can add parts like this one. Processes with parts of equal shapes
        get equal answers."""
        words = part.numel() * part.element_size() // 4
        return (
            part.is_cuda
            and part.dtype in _KINDS
            and part.is_contiguous()
            and part.numel() * part.element_size() % 4 == 0
            and part.data_ptr() % 4 == 0
            and 0 < words <= self.capacity // (self.ranks - 1)
        )

    def end_waits(self) -> None:
        """Let programs that wait for packets give up, now and in later launches. Any thread may
        call this while kernels run, because it calls nothing of CUDA."""
        self.flags[0] = 1

    @property
    def missed(self) -> int | None:
        """The rank of a peer for whose packets a program waits no longer: sums are NaN since."""
        rank: int = self.flags.tolist()[1]
        return rank - 1 if rank else None

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments of a kernel with exchanges, except RANK and RANKS."""
        return self.addresses, self.state, self.capacity, self.limit


def add(part: Tensor, residual: Tensor | None, peers: Peers) -> Tensor:
    """Return the sum of the parts [..., N] of all processes, and of the residual [..., N], which
    all processes have. The sum is in float32, and rounded once.

    All processes must call this with equal shapes, in the same order as other exchanges.
    """
    out = torch.empty_like(part)
    words = part.view(-1).view(torch.int32)
    count = len(words)
    block = _BLOCK
    while triton.cdiv(count, block) > _RESIDENT * processors(part.device) and part.is_cuda:
        block *= 2
    _add[(triton.cdiv(count, block),)](
        words,
        words if residual is None else residual.contiguous().view(-1).view(torch.int32),
        out.view(-1).view(torch.int32),
        *peers.arguments(),
        count,
        ADD=residual is not None,
        KIND=_KINDS[part.dtype],
        RANK=peers.rank,
        RANKS=peers.ranks,
        BLOCK=block,
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize=["count"])
def _add(
    part_ptr,
    residual_ptr,
    out_ptr,
    address_ptr,
    state_ptr,
    capacity,
    limit,
    count,
    ADD: tl.constexpr,
    KIND: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs: blocks of words. Each sends its block to all peers, waits for the same block of
    each, and adds them in the order of ranks."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    number = tl.load(state_ptr, volatile=True)
    word = tl.load(part_ptr + at, mask=inside, other=0)
    send(word, at, inside, address_ptr, number, capacity, RANK, RANKS)
    low, high = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(RANKS):
        found = word
        if rank != RANK:
            found = receive(at, inside, address_ptr, number, capacity, limit, rank, RANK, RANKS)
        one, two = _unpack(found, KIND)
        low += one
        high += two
    end_exchange(state_ptr, number, tl.num_programs(0))
    if ADD:
        one, two = _unpack(tl.load(residual_ptr + at, mask=inside, other=0), KIND)
        low += one
        high += two
    tl.store(out_ptr + at, _pack(low, high, KIND), mask=inside)


@triton.jit
def add_tile(
    part,
    at,
    inside,
    address_ptr,
    state_ptr,
    capacity,
    limit,
    programs,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Return the sum of the float32 parts of all processes at the places `at`, where `inside`.

    Args:
        programs: how many programs of the launch call this, each for other places.
    """
    number = tl.load(state_ptr, volatile=True)
    word = part.to(tl.int32, bitcast=True)
    send(word, at, inside, address_ptr, number, capacity, RANK, RANKS)
    total = part * 0.0
    for rank in tl.static_range(RANKS):
        found = word
        if rank != RANK:
            found = receive(at, inside, address_ptr, number, capacity, limit, rank, RANK, RANKS)
        total += found.to(tl.float32, bitcast=True)
    end_exchange(state_ptr, number, programs)
    return total


@triton.jit
def send(word, at, inside, address_ptr, number, capacity, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Write words of 4 bytes to the places `at` of this process in the buffers of all peers."""
    packet = (number.to(tl.int64) << 32) | (word.to(tl.int64) & 0xFFFFFFFF)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            buffer = tl.load(address_ptr + peer).to(tl.pointer_type(tl.int64))
            buffer += ((number & 1) * RANKS + RANK) * capacity
            tl.store(buffer + at, packet, mask=inside)


@triton.jit
def receive(
    at,
    inside,
    address_ptr,
    number,
    capacity,
    limit,
    PEER: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Wait for the words of a peer at the places `at`, and return them; NaN if the host ends the
    wait, or at its limit."""
    buffer = tl.load(address_ptr + RANK).to(tl.pointer_type(tl.int64))
    place = buffer + ((number & 1) * RANKS + PEER) * capacity + at
    packet = tl.load(place, mask=inside, other=0, volatile=True)
    missing = tl.sum((inside & ((packet >> 32).to(tl.int32) != number)).to(tl.int32))
    polls = 0
    while (missing > 0) & (polls < limit):
        packet = tl.load(place, mask=inside, other=0, volatile=True)
        missing = tl.sum((inside & ((packet >> 32).to(tl.int32) != number)).to(tl.int32))
        polls += 1
        if polls % _LOOKS == 0:
            flag_ptr = tl.load(address_ptr + RANKS).to(tl.pointer_type(tl.int32))
            polls = tl.where(tl.load(flag_ptr, volatile=True) != 0, limit, polls)
    if missing > 0:
        tl.store(tl.load(address_ptr + RANKS).to(tl.pointer_type(tl.int32)) + 1, PEER + 1)
    # these bits are NaN in float32, and twice in bfloat16 and float16
    return tl.where(missing > 0, 0x7FFF7FFF, packet.to(tl.int32))


@triton.jit
def end_exchange(state_ptr, number, programs):
    """Raise the number of the exchange when all programs have their sums."""
    tl.debug_barrier()
    if tl.atomic_add(state_ptr + 1, 1) == programs - 1:
        tl.store(state_ptr + 1, 0)
        tl.store(state_ptr, number + 1)


@triton.jit
def _unpack(word, KIND: tl.constexpr):
    """Return the numbers in words, as float32; the second is 0 if a word has one."""
    if KIND == 0:
        low = word.to(tl.float32, bitcast=True)
        high = low * 0.0
    elif KIND == 1:
        low = (word << 16).to(tl.float32, bitcast=True)
        high = (word & -65536).to(tl.float32, bitcast=True)
    else:
        low = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _pack(low, high, KIND: tl.constexpr):
    """Return words with numbers rounded from float32."""
    if KIND == 0:
        word = low.to(tl.int32, bitcast=True)
    elif KIND == 1:
        word = _pair(
            low.to(tl.bfloat16).to(tl.int16, bitcast=True),
            high.to(tl.bfloat16).to(tl.int16, bitcast=True),
        )
    else:
        word = _pair(
            low.to(tl.float16).to(tl.int16, bitcast=True),
            high.to(tl.float16).to(tl.int16, bitcast=True),
        )
    return word


@triton.jit
def _pair(low, high):
    return (high.to(tl.int32) << 16) | (low.to(tl.int32) & 0xFFFF)
