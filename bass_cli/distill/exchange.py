"""What the processes of one training add up in every step: gradients, in buckets while backward
goes on, over NCCL between GPUs and gloo between CPUs; and a few numbers, always over gloo.

All of them keep all weights and AdamW's means, and end each step with the same bits. Not here: what
each learns from (corpus.py), who begins them and looks after them (group.py).
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, distributed

# A first exchange waits for whoever measures the model or reads samples; who died is not waited
# for, since whoever begins the processes ends them then.
_PATIENCE = datetime.timedelta(hours=1)
_BUCKET = 32 * 2**20  # bytes of gradients that are exchanged at once
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


class PeerLostError(Exception):
    """An exchange has failed: one that takes part in it has died."""


class Gradients(Protocol):
    """Of all weights, from one step to the next."""

    def last(self) -> None:
        """The backward pass that comes is the step's last one."""

    def finish(self) -> None:
        """They are those of the whole batch when this returns."""

    def clear(self) -> None:
        """They are zero again."""


class Peers(Protocol):
    """The processes of one training, seen from one of them. `rank`: its number, of `ranks`."""

    rank: int
    ranks: int

    def add(self, numbers: Sequence[float]) -> list[float]:
        """Sums over all of them; the same bits everywhere."""

    def gradients(self, weights: Iterable[Tensor]) -> Gradients:
        """What adds up theirs."""


class Alone:
    """One process, which has nobody to exchange anything with."""

    rank, ranks = 0, 1

    def add(self, numbers: Sequence[float]) -> list[float]:
        return list(numbers)

    def gradients(self, weights: Iterable[Tensor]) -> Gradients:
        return _Own(list(weights))


class _Own:
    def __init__(self, weights: list[Tensor]):
        self._weights = weights

    def last(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def clear(self) -> None:
        for weight in self._weights:
            weight.grad = None


class RankInfo(NamedTuple):
    """Of a process in a group: its number, of how many, and where the first one waits for all.
    `beside`: how many of them its node has, itself included."""

    rank: int
    ranks: int
    host: str
    port: int
    beside: int


class Store:
    """A port at which a group can meet, if its process becomes the first."""

    def __init__(self) -> None:
        self._store = distributed.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_PATIENCE
        )
        self.port: int = self._store.port

    def join(self, seat: RankInfo, device: torch.device) -> Joined:
        """Be one of a group; all must come. Nothing leaves the host where all are on one."""
        host = "127.0.0.1" if seat.ranks == seat.beside else seat.host
        store = self._store
        with _company():
            if seat.rank:
                store = distributed.TCPStore(host, seat.port, is_master=False, timeout=_PATIENCE)
            name = _interface(host, seat.port)
            if name is not None:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=store,
                rank=seat.rank,
                world_size=seat.ranks,
                timeout=_PATIENCE,
            )
        return Joined(seat.rank, seat.ranks)


class Joined:
    """One of several processes that have met."""

    def __init__(self, rank: int, ranks: int):
        self.rank, self.ranks = rank, ranks

    def add(self, numbers: Sequence[float]) -> list[float]:
        found = torch.tensor(numbers, dtype=torch.float64)
        with _company():
            distributed.all_reduce(found)
        return found.tolist()

    def gradients(self, weights: Iterable[Tensor]) -> Gradients:
        return Buckets(list(weights))


class Buckets:
    """Gradients that lie one behind the other, the last weights' first, as backward makes them; a
    bucket is added up as soon as all of it is there, in the same order everywhere. Sums, not means:
    whoever makes a gradient knows its share of the whole."""

    def __init__(self, weights: list[Tensor], size: int = _BUCKET):
        self._flat: list[Tensor] = []
        self._missing: list[int] = []  # weights whose gradients are not whole yet, by bucket
        self._works: list[Any] = []  # of the buckets on their way, which are the first ones
        self._armed = False
        bucket: list[Tensor] = []
        for weight in reversed(weights):
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

    def _send(self, due: Callable[[], bool]) -> None:
        """The next buckets, while the next is `due`."""
        with _company():
            while len(self._works) < len(self._flat) and due():
                flat = self._flat[len(self._works)]
                self._works.append(distributed.all_reduce(flat, async_op=True))

    def last(self) -> None:
        self._armed = True

    def finish(self) -> None:
        self._send(lambda: True)  # what no guess of this process reached
        with _company():
            for work in self._works:
                work.wait()
        self._works, self._armed, self._missing = [], False, list(self._members)

    def clear(self) -> None:
        for flat in self._flat:
            flat.zero_()


@contextlib.contextmanager
def _company() -> Iterator[None]:
    """Around what needs the others."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(str(error)) from error


def _interface(host: str, port: int) -> str | None:
    """The name of this host's interface towards another one; None where the system does not say.
    Hosts' own names are often those of their loopback."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect((host, port))  # nothing is sent
        own = socket.inet_aton(one.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                asked = struct.pack("256s", name.encode()[:15])
                if fcntl.ioctl(one.fileno(), _SIOCGIFADDR, asked)[20:24] == own:
                    return name
    return None
