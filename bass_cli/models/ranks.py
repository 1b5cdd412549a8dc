"""The exchanges between the processes of a split model inside a pass: inputs, sums and logits, over
NCCL between GPUs and gloo between CPUs. GPUs exchange parts of a few tokens through buffers that
all of them can write: torch's symmetric memory, without multicast.

A pass makes the same exchanges in the same order in all processes, for any input. Not here: which
tensors of each part (weights.py), which pass is next (leader.py), what kernels do with the buffers
(bass_kernels/peers.py).
"""

from __future__ import annotations

import datetime
import os
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

import bass_kernels as ops
from bass_cli.errors import MachineError, UserError
from bass_cli.io import terminal
from bass_cli.models.capture import capture
from bass_cli.models.partition import Share
from bass_kernels import has_triton

if TYPE_CHECKING:
    from bass_kernels.peers import Peers

# Processes wait for each other inside passes only. A longer wait means that one hangs.
_PATIENCE = datetime.timedelta(minutes=10)
_STEP = datetime.timedelta(seconds=0.5)  # Ctrl-C is handled between steps of a wait
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class Ranks:
    """The member of a group in process `share`. A process can be in one group at a time.

    peers: for sums of a few tokens inside kernels; None if they go through NCCL or gloo.
    """

    def __init__(self, share: Share):
        self.share = share
        self.peers: Peers | None = None
        self._store: distributed.TCPStore | None = None
        self._name = ""

    def meet(self) -> int:
        """Open the group in the first process. Return the port of this host where the others
        join it.

        Raises:
            UserError: this process is in a group already.
        """
        if distributed.is_initialized():
            raise UserError(
                "`tensor_parallel`: this process is in a group of torch.distributed already; end "
                "the other job, or leave that group, first"
            )
        self._store = _store(0, first=True)  # the system chooses the port
        return self._store.port

    def join(self, port: int, device: torch.device) -> None:
        """Join the group at a port. Returns when all members have joined."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)  # nothing leaves this host
        store = self._store = self._store or _store(port, first=False)
        self._name = f"bass-{port}"
        distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=self.share.rank,
            world_size=self.share.ranks,
            timeout=_PATIENCE,
        )

    def reach_peers(self, device: torch.device) -> str | None:
        """Set up `peers` if all processes can reach each other's memory. All must call this
        together, after `join`. Return why not; None if they can, or have no GPUs."""
        if device.type != "cuda" or not has_triton():
            return None
        assert self._store is not None
        if not self._all(self._is_common(device), device):
            return "the GPUs differ"  # kernels are chosen by the device, in each process alone
        peers, reason = None, "in another process"
        try:
            peers = open_peers(self.share, device, self._name, self._store)
        except (RuntimeError, ImportError, AttributeError, TypeError) as error:
            reason = str(error).split("\n")[0]
        if not self._all(peers is not None, device):
            return f"GPUs cannot reach each other's memory ({reason})"
        assert peers is not None
        if not self._all(try_peers(peers), device):
            return "sums through it were wrong in a trial"
        self.peers = patient(peers)
        return None

    def _is_common(self, device: torch.device) -> bool:
        """Return whether this GPU has the processors that all GPUs have on average."""
        found = torch.cuda.get_device_properties(device)
        own = torch.tensor([found.major, found.minor, found.multi_processor_count], device=device)
        return torch.equal(self.sum(own.clone()), own * self.share.ranks)

    def can_capture(self, device: torch.device) -> bool:
        """Return whether CUDA graphs can hold exchanges: the same answer in all processes, which
        must all call this together. It tries with small exchanges."""
        if device.type != "cuda":
            return False
        part = torch.arange(8.0, device=device) + self.share.rank
        total, first = torch.zeros_like(part), torch.zeros_like(part)
        every = part.new_zeros(self.share.ranks * len(part))

        def exchange() -> None:
            self.broadcast(first.copy_(part))
            total.copy_(self.sum(part.clone()))
            self._gather(every, part)

        exchange()  # the first exchange sets up connections, which cannot be captured
        graph, stream = None, torch.cuda.current_stream()
        try:
            graph = capture(exchange, torch.cuda.graph_pool_handle())
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # a failed capture may leave its stream current
            terminal.line(f"bass: exchanges between GPUs cannot be captured: {error}")
        if not self._all(graph is not None, device):
            return False
        assert graph is not None
        part += 1
        graph.replay()
        ranks = self.share.ranks
        own = torch.arange(8.0, device=device) + 1
        expected = [own + rank for rank in range(ranks)]
        correct = torch.equal(total, torch.stack(expected).sum(0)) and torch.equal(
            first, expected[0]
        )
        correct = self._all(correct and torch.equal(every, torch.cat(expected)), device)
        graph.reset()
        return correct

    @staticmethod
    def _gather(every: Tensor, part: Tensor) -> None:
        """Gather the parts [N] of all processes, in order, into every [K N]. torch 2.13 renamed
        the function and warns about the old name."""
        newer = getattr(distributed, "all_gather_single", None)
        gather = newer or distributed.all_gather_into_tensor
        _finish(gather(every, part, async_op=not part.is_cuda))

    @staticmethod
    def broadcast(given: Tensor) -> Tensor:
        """Copy the first process's contiguous tensor to all others, in place, and return it."""
        bytes_ = given.view(-1).view(torch.uint8)  # gloo and NCCL lack some dtypes
        _finish(distributed.broadcast(bytes_, 0, async_op=not given.is_cuda))
        return given

    def _all(self, answer: bool, device: torch.device) -> bool:
        """Return whether the answer is True in all processes."""
        found = torch.tensor([int(answer)], device=device)
        return int(self.sum(found)) == self.share.ranks

    def end_waits(self) -> None:
        """End the waits of kernels for processes that are lost. Sums are not numbers from then on.
        Any thread may call this."""
        if (peers := self.peers) is not None:  # another thread may leave the group meanwhile
            peers.end_waits()

    def missed(self) -> int | None:
        """Return the rank of a process for which kernels wait no longer: results since then must
        not be used. None: there is none."""
        return None if self.peers is None else self.peers.missed

    def leave(self, *, lost: bool = False) -> None:
        """Leave the group. `lost`: other processes may have ended already."""
        if distributed.is_initialized():
            world = distributed.group.WORLD
            if lost and world is not None and distributed.get_backend() == "nccl":
                world.abort()  # ends kernels that wait for the lost processes
            distributed.destroy_process_group()
        self._store = self.peers = None

    def sum(self, part: Tensor) -> Tensor:
        """Add the parts of all processes, possibly in place. The result is bitwise equal in all."""
        if self.peers is not None and self.peers.takes(part):
            return add_parts(part, None, self.peers)
        _finish(distributed.all_reduce(part, async_op=not part.is_cuda))
        return part

    def add(self, part: Tensor, residual: Tensor) -> Tensor:
        """Return the residual, which all processes have, plus `sum`."""
        if self.peers is not None and self.peers.takes(part):
            return add_parts(part, residual, self.peers)
        return residual + self.sum(part)

    def embed(self, tokens: Tensor, weight: Tensor, *, scale: float) -> Tensor:
        """Compute ops.embed of tokens [B, W] from this process's part [V / K, width] of the
        embedding."""
        own = tokens - self.share.rank * len(weight)
        missing = (own < 0) | (own >= len(weight))
        found = ops.embed(own.masked_fill(missing, 0), weight, scale=scale)
        return self.sum(found.masked_fill_(missing[..., None], 0))

    def join_logits(self, part: Tensor, vocab: int) -> Tensor:
        """Gather logits [..., vocab] from the parts [..., V / K], in the order of token ids."""
        every = part.new_empty(self.share.ranks, *part.shape)
        self._gather(every.view(-1), part.contiguous().view(-1))
        return every.movedim(0, -2).flatten(-2)[..., :vocab].contiguous()

    def send(self, tokens: Tensor, positions: Tensor) -> None:
        """Send the inputs of a pass, both [B, W] int64, from the first process to the others."""
        self.broadcast(torch.stack((tokens, positions)))

    def receive(self, shape: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the tokens and positions that the first process sent, [B, W] each."""
        inputs = self.broadcast(torch.empty(2, *shape, dtype=torch.int64, device=device))
        return inputs[0], inputs[1]


def _finish(work: Any) -> None:
    """Wait for an exchange between CPUs in short steps. Python handles signals between steps, so
    Ctrl-C works while another process is stopped. Exchanges between GPUs (None) are ordered by
    their stream.

    Raises:
        MachineError: the exchange has not ended within `_PATIENCE`.
        RuntimeError: a process that takes part has died.
    """
    if work is None:
        return
    until = time.monotonic() + _PATIENCE.total_seconds()
    while True:
        try:
            work.wait(_STEP)
            return
        except RuntimeError:
            if work.is_completed():  # it has failed, or succeeded just now
                work.wait()
                return
        if time.monotonic() > until:
            raise MachineError(
                "`tensor_parallel`: a process of this model has not answered for "
                f"{_PATIENCE.total_seconds() / 60:.0f} minutes; it is stopped, or hangs"
            )


def _store(port: int, *, first: bool) -> distributed.TCPStore:
    """Open the first process's store at a free port of the loopback interface, or connect to it.
    Without a socket of ours torch would listen on all network interfaces."""
    if not first:
        return distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=_PATIENCE)
    server = socket.create_server(("127.0.0.1", 0))
    return distributed.TCPStore(
        "127.0.0.1",
        server.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=_PATIENCE,
        master_listen_fd=server.detach(),  # the store closes it
    )


# Words of 4 bytes of a part: 1 MB. Packets double the bytes, so NCCL sends larger parts faster.
_CAPACITY = 1 << 18
# Times that a program looks for packets, a microsecond each or somewhat less: some seconds for the
# trial, in which a process may load kernels, and some 10 minutes for passes (_PATIENCE).
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
