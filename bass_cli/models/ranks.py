"""What the processes of one split model exchange inside its passes: sums, logits, what is fed; over
NCCL between GPUs, over gloo between CPUs.

Every pass takes the same exchanges in the same order in all of them, whatever it is fed. Not
here: who has which part (partition.py), who says which pass is next (leader.py).
"""

from __future__ import annotations

import datetime
import os
import socket
import sys
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

import bass_kernels as ops
from bass_cli.errors import MachineError, UserError
from bass_cli.io import terminal
from bass_cli.models.capture import capture


class Share(NamedTuple):
    """The part of process `rank` out of `ranks`."""

    rank: int
    ranks: int


# They wait for each other inside passes only; what takes longer than a pass hangs.
_PATIENCE = datetime.timedelta(minutes=10)
_STEP = datetime.timedelta(seconds=0.5)  # of a wait that Ctrl-C must be able to end
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class Ranks:
    """The view of one of them, `share`. Its process can be in one such group at a time."""

    def __init__(self, share: Share):
        self.share = share
        self._store: distributed.TCPStore | None = None

    def meet(self) -> int:
        """A port of this host where all can join the first process's group. UserError where that
        is in a group already."""
        if distributed.is_initialized():
            raise UserError(
                "--tensor-parallel: this process is in a group of torch.distributed already; end "
                "the other job, or leave that group, first"
            )
        self._store = _store(0, first=True)  # which chooses the port
        return self._store.port

    def join(self, port: int, device: torch.device) -> None:
        """Be one of the group that meets at a port; all must come."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)  # nothing leaves this host
        store = self._store or _store(port, first=False)
        distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=self.share.rank,
            world_size=self.share.ranks,
            timeout=_PATIENCE,
        )

    def can_capture(self, device: torch.device) -> bool:
        """Whether exchanges may stand in CUDA graphs: in all of them, or in none. All must ask
        together; it is tried with small ones."""
        if device.type != "cuda":
            return False
        part = torch.arange(8.0, device=device) + self.share.rank
        total, first = torch.zeros_like(part), torch.zeros_like(part)
        every = part.new_zeros(self.share.ranks * len(part))

        def exchange() -> None:
            self._broadcast(first.copy_(part))
            self.sum(total.copy_(part))
            self._gather(every, part)

        exchange()  # what a group sets up with its first exchanges cannot be captured
        graph, stream = None, torch.cuda.current_stream()
        try:
            graph = capture(exchange, torch.cuda.graph_pool_handle())
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # a capture that fails may leave its own
            terminal.line(f"bass: exchanges between GPUs cannot be captured: {error}")
        if not self._all(graph is not None, device):
            return False
        assert graph is not None
        part += 1
        graph.replay()
        ranks = self.share.ranks
        own = torch.arange(8.0, device=device) + 1
        due = [own + rank for rank in range(ranks)]
        right = torch.equal(total, torch.stack(due).sum(0)) and torch.equal(first, due[0])
        right = self._all(right and torch.equal(every, torch.cat(due)), device)
        graph.reset()
        return right

    @staticmethod
    def _gather(every: Tensor, part: Tensor) -> None:
        """All parts [N], one after the other [K N], by the name that it has from torch 2.13 on, or
        the older one, of which that warns."""
        newer = getattr(distributed, "all_gather_single", None)
        gather = newer or distributed.all_gather_into_tensor
        _finish(gather(every, part, async_op=not part.is_cuda))

    @staticmethod
    def _broadcast(fed: Tensor) -> None:
        """What the first process has, to all others, in place."""
        _finish(distributed.broadcast(fed, 0, async_op=not fed.is_cuda))

    def _all(self, answer: bool, device: torch.device) -> bool:
        """Whether it is yes everywhere."""
        found = torch.tensor([int(answer)], device=device)
        return int(self.sum(found)) == self.share.ranks

    def leave(self, *, lost: bool = False) -> None:
        """Give the group up; `lost`: others may not be there any more."""
        if distributed.is_initialized():
            world = distributed.group.WORLD
            if lost and world is not None and distributed.get_backend() == "nccl":
                world.abort()  # what waits on the device for them ends
            distributed.destroy_process_group()
        self._store = None

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all parts, in place; the same bits everywhere."""
        _finish(distributed.all_reduce(part, async_op=not part.is_cuda))
        return part

    def embed(self, tokens: Tensor, weight: Tensor, *, scale: float) -> Tensor:
        """ops.embed of tokens [B, W], of whose embeddings this is one part [V / K, width]."""
        own = tokens - self.share.rank * len(weight)
        missing = (own < 0) | (own >= len(weight))
        found = ops.embed(own.masked_fill(missing, 0), weight, scale=scale)
        return self.sum(found.masked_fill_(missing[..., None], 0))

    def join_logits(self, part: Tensor, vocab: int) -> Tensor:
        """Logits [..., vocab] of all parts [..., V / K], in the order of their tokens."""
        every = part.new_empty(self.share.ranks, *part.shape)
        self._gather(every.view(-1), part.contiguous().view(-1))
        return every.movedim(0, -2).flatten(-2)[..., :vocab].contiguous()

    def send(self, tokens: Tensor, positions: Tensor) -> None:
        """What a pass is fed, both [B, W] int64, from the first process to all others."""
        self._broadcast(torch.stack((tokens, positions)))

    def receive(self, shape: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
        """What the first process has sent, [B, W] each."""
        fed = torch.empty(2, *shape, dtype=torch.int64, device=device)
        self._broadcast(fed)
        return fed[0], fed[1]


def _finish(work: Any) -> None:
    """Wait for an exchange between CPUs in short steps: Python calls a signal's handler between
    them, and a stopped process would be waited for otherwise. Exchanges between GPUs (None) are
    in their stream's order.

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
                "--tensor-parallel: a process of this model has not answered for "
                f"{_PATIENCE.total_seconds() / 60:.0f} minutes; it is stopped, or hangs"
            )


def _store(port: int, *, first: bool) -> distributed.TCPStore:
    """The first process's store, at a port that is free, or a connection to it. By itself, torch
    would listen on all network interfaces."""
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
