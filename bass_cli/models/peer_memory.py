"""The memory through which the GPUs of a split model exchange parts of a few tokens: buffers that
all processes of the group can write, and a trial of them.

It is torch's symmetric memory, without multicast. Not here: what kernels do with it
(bass_kernels/peers.py), the exchanges of many tokens (ranks.py).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from bass_cli.models.partition import Share

if TYPE_CHECKING:
    from bass_kernels.peers import Peers

# Words of 4 bytes of a part: 1 MB. Packets double the bytes, so NCCL sends larger parts faster.
_CAPACITY = 1 << 18
# Times that a program looks for packets, a microsecond each or somewhat less: some seconds for the
# trial, in which a process may load kernels, and some 10 minutes for passes (ranks._PATIENCE).
_TRIAL, _PATIENT = 20_000_000, 600_000_000


def open_peers(share: Share, device: torch.device, name: Any, store: distributed.Store) -> Peers:
    """Allocate this process's buffer and map those of the others.

    Args:
        name: a str, of the group, unique among groups of this process.
        store: of the group.

    Raises:
        RuntimeError: GPUs cannot reach each other's memory.
    """
    from torch._C._distributed_c10d import (
        _register_process_group,
        _SymmetricMemory,
        _unregister_process_group,
    )

    from bass_kernels.peers import Peers

    # Multicast is not used, and programs that end in the middle of it can block a host's GPUs.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    # Each process sees its own device only, so all have the index 0.
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    rank, ranks = share
    index = torch.device(device.type, torch.cuda.current_device())
    size = 2 * ranks * _CAPACITY
    buffer = _SymmetricMemory.empty_strided_p2p([size], [1], torch.int64, index)
    buffer.zero_()
    torch.cuda.synchronize()
    # Versions of torch find a group by one of these two. The group's own name is "0" each time, and
    # torch keeps the store of the first group of a name.
    _SymmetricMemory.set_group_info(name, rank, ranks, distributed.PrefixStore(name, store))
    world: Any = distributed.group.WORLD
    _register_process_group(name, world)
    try:
        handle = _SymmetricMemory.rendezvous(buffer, name)
    finally:
        _unregister_process_group(name)
    mapped = [handle.get_buffer(one, [size], torch.int64) for one in range(ranks)]
    flags = torch.zeros(2, dtype=torch.int32).pin_memory()
    addresses = torch.tensor([one.data_ptr() for one in (*mapped, flags)], device=device)
    state = torch.tensor([1, 0], dtype=torch.int32, device=device)
    held = buffer, handle, mapped
    return Peers(rank, ranks, addresses, state, flags, _CAPACITY, _TRIAL, held)


def try_peers(peers: Peers) -> bool:
    """Return whether sums are right in this process, alone and inside a product. All processes
    must call this together."""
    from bass_kernels import products
    from bass_kernels.residual import Stream

    right, device = True, peers.addresses.device
    for number in range(4):  # each half of the buffers twice
        parts = [_example(rank, number, device) for rank in range(peers.ranks)]
        found = add_parts(parts[peers.rank], parts[0], peers)
        expected = parts[0].float() + torch.stack(parts).float().sum(0)
        right = right and torch.equal(found.float(), expected)
    matrices = [part.view(25, 200) for part in parts]
    before = torch.ones(16, 24, device=device)
    stream = Stream(before, matrices[0], torch.ones(1, 16, device=device))  # `add` reads the first
    own = matrices[peers.rank]
    norm = torch.ones(24, device=device)
    for _ in range(2):
        found = products.add(own[:16].contiguous(), own[:24], stream, norm, peers=peers).residual
        due = before + sum(one[:16].float() @ one[:24].float().T for one in matrices)
        right = right and torch.equal(found, due)
    return right


def add_parts(part: Tensor, residual: Tensor | None, peers: Peers) -> Tensor:
    """Return the sum of the parts of all processes, and of the residual. See peers.add."""
    from bass_kernels import peers as kernels

    return kernels.add(part, residual, peers)


def patient(peers: Peers) -> Peers:
    """Return the same peers for passes, in which a process may be late by minutes."""
    return peers._replace(limit=_PATIENT)


def _example(rank: int, number: int, device: torch.device) -> Tensor:
    """Return a part [5, 1000] whose sums with others are exact in bfloat16."""
    values = torch.arange(5000, device=device) * (2 * rank + 3) + number
    return (values % 16 - 7).to(torch.bfloat16).view(5, 1000)
