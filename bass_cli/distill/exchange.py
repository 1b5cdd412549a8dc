"""Data parallelism: sum the gradients and a few numbers of all processes in every step.

Gradients are all-reduced in buckets during the backward pass, over NCCL between GPUs and gloo
between CPUs; numbers always over gloo. Every process has all weights and AdamW's means, with the
same bits after each step. group.py starts the processes.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

# The first exchange waits until the other processes have read the samples and measured the model.
# If a process dies, group.py ends the others, so this limit is not reached.
_PATIENCE = datetime.timedelta(hours=1)
_BUCKET = 32 * 2**20  # bytes of gradients that are exchanged at once
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


class PeerLostError(Exception):
    """An exchange failed, usually because another process has died."""


class Gradients:
    """The gradients of all weights in a training by one process."""

    def __init__(self, weights: Iterable[Tensor]):
        self._weights = list(weights)

    def last(self) -> None:
        """Announce the last backward pass of the step."""

    def finish(self) -> None:
        """Wait until the gradients are those of the whole batch."""

    def clear(self) -> None:
        """Set the gradients to zero."""
        for weight in self._weights:
            weight.grad = None


class Peers:
    """The processes of one training: number `rank` of `ranks`. With one, nothing is exchanged."""

    def __init__(self, rank: int = 0, ranks: int = 1):
        self.rank, self.ranks = rank, ranks

    def add(self, numbers: Sequence[float]) -> list[float]:
        """Sum numbers over all processes; the result has the same bits everywhere."""
        if self.ranks == 1:
            return list(numbers)
        found = torch.tensor(numbers, dtype=torch.float64)
        with _peer_errors():
            distributed.all_reduce(found)
        return found.tolist()

    def gradients(self, weights: Iterable[Tensor]) -> Gradients:
        """Return the object that sums the gradients of these weights."""
        return Gradients(weights) if self.ranks == 1 else Buckets(weights)


class RankInfo(NamedTuple):
    """Place of a process in a group.

    rank: its number, of `ranks`. host, port: address of rank 0. beside: processes on its node,
    itself included.
    """

    rank: int
    ranks: int
    host: str
    port: int
    beside: int


class Store:
    """A TCP port at which a group can meet if this process becomes rank 0."""

    def __init__(self) -> None:
        self._store = distributed.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_PATIENCE
        )
        self.port: int = self._store.port

    def join(self, info: RankInfo, device: torch.device) -> Peers:
        """Join a group; returns when all have joined. On one node, only the loopback is used."""
        host = "127.0.0.1" if info.ranks == info.beside else info.host
        store = self._store
        with _peer_errors():
            if info.rank:
                store = distributed.TCPStore(host, info.port, is_master=False, timeout=_PATIENCE)
            name = interface_towards(host, info.port)
            if name is not None:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=store,
                rank=info.rank,
                world_size=info.ranks,
                timeout=_PATIENCE,
            )
        return Peers(info.rank, info.ranks)


class Buckets(Gradients):
    """Gradients in flat buckets, all-reduced during the backward pass.

    The last weights come first, as the backward pass makes them. A bucket is sent as soon as it is
    complete, in the same order in every process. The results are sums, not means, because each
    loss is already divided by the guesses of the whole batch.
    """

    def __init__(self, weights: Iterable[Tensor], size: int = _BUCKET):
        super().__init__(weights)
        self._flat: list[Tensor] = []
        self._missing: list[int] = []  # weights without a gradient yet, by bucket
        self._works: list[Any] = []  # pending all-reduces, of the first buckets
        self._armed = False
        bucket: list[Tensor] = []
        for weight in reversed(self._weights):
            room = size // weight.element_size() - sum(one.numel() for one in bucket)
            if bucket and (weight.dtype != bucket[0].dtype or weight.numel() > room):
                self._add(bucket)
                bucket = []
            bucket.append(weight)
        self._add(bucket)
        self._members = list(self._missing)

    def _add(self, bucket: list[Tensor]) -> None:
        flat = bucket[0].new_zeros(sum(weight.numel() for weight in bucket))
        begin, number = 0, len(self._flat)
        for weight in bucket:
            weight.grad = flat[begin : begin + weight.numel()].view_as(weight)
            weight.register_post_accumulate_grad_hook(self._on_grad(number))
            begin += weight.numel()
        self._flat.append(flat)
        self._missing.append(len(bucket))

    def _on_grad(self, number: int) -> Callable[[Tensor], None]:
        def on_grad(weight: Tensor) -> None:
            if self._armed:
                self._missing[number] -= 1
                self._send(lambda: self._missing[len(self._works)] == 0)

        return on_grad

    def _send(self, complete: Callable[[], bool]) -> None:
        """Send the next buckets while the next one is complete."""
        with _peer_errors():
            while len(self._works) < len(self._flat) and complete():
                flat = self._flat[len(self._works)]
                self._works.append(distributed.all_reduce(flat, async_op=True))

    def last(self) -> None:
        self._armed = True

    def finish(self) -> None:
        self._send(lambda: True)  # buckets without gradients in this process
        with _peer_errors():
            for work in self._works:
                work.wait()
        self._works, self._armed, self._missing = [], False, list(self._members)

    def clear(self) -> None:
        for flat in self._flat:
            flat.zero_()


@contextlib.contextmanager
def _peer_errors() -> Iterator[None]:
    """Raise PeerLostError for errors of an exchange."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(str(error)) from error


def interface_towards(host: str, port: int) -> str | None:
    """Return the network interface of this host that leads to another host; None if unknown.

    Looking up the host's own name would not do: it often belongs to the loopback.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect((host, port))  # nothing is sent
        own = socket.inet_aton(one.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                if fcntl.ioctl(one.fileno(), _SIOCGIFADDR, request)[20:24] == own:
                    return name
    return None
