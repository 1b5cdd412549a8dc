"""A process that holds one part of a split model: it does what the leader's runners do, with its
own part, and ends when the leader does, whatever the leader dies of.

It knows no batch, no sampling and no clock: it is told calls (leader.py), and takes part in their
passes. Messages come by standard input, pickled; what it has to say goes to standard output.
"""

from __future__ import annotations

import os
import pickle
import select
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol

from bass_cli.errors import MachineError, UserError
from bass_cli.io import terminal
from bass_cli.models.ranks import Share
from bass_cli.system.host import free_memory, gigabytes, is_refused_memory

if TYPE_CHECKING:
    import torch

    from bass_cli.models.block_allocator import Pieces
    from bass_cli.models.decoder import Decoder
    from bass_cli.models.ranks import Ranks
    from bass_cli.models.runner import Runner
    from bass_cli.models.spec import Spec


class Source(Protocol):
    """Where the parts of a model come from; it is pickled, so it is made of functions that have a
    name."""

    def __call__(
        self,
        share: Share,
        *,
        dtype: torch.dtype,
        device: torch.device,
        on_read: Callable[[int], None],
    ) -> tuple[Spec, dict[str, torch.Tensor]]:
        """A part's spec (partition.part_of) and weights; `on_read` is told how many bytes are
        read."""


class JobSpec(NamedTuple):
    """Which part of which model a process holds. `vocab`: as a Decoder's; `needed`: bytes
    that its device must have free; `port`: see Ranks.join."""

    source: Source
    share: Share
    dtype: torch.dtype
    device: torch.device
    vocab: int
    threads: int
    needed: int
    port: int


class Ready(NamedTuple):
    """The part is loaded, of which so many bytes were read."""

    read: int


class Fault(NamedTuple):
    """Why a process cannot go on: the sentence of a UserError ("user") or MachineError
    ("machine"), or a traceback ("bug")."""

    kind: str
    text: str


def main() -> None:
    """Take an order and then calls from standard input, until it is closed."""
    threading.Thread(target=_end_with_leader, daemon=True).start()
    terminal.guard()  # it shares the leader's standard error
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not come between
    calls = sys.stdin.buffer
    try:
        _follow(pickle.load(calls), calls, lambda message: _say(channel, message))
        os._exit(0)
    except EOFError:
        os._exit(0)
    except MachineError as error:
        _say(channel, Fault("machine", str(error)))
    except UserError as error:
        _say(channel, Fault("user", str(error)))
    except Exception as error:
        kind = "machine" if is_refused_memory(error) else "bug"
        text = f"memory ran out: {error}" if kind == "machine" else traceback.format_exc()
        _say(channel, Fault(kind, text))
    os._exit(1)  # others may never come to what waits for them


def _end_with_leader() -> None:
    """The leader's end of the pipe closes with it, also while this process waits for others."""
    ends = select.poll()
    ends.register(0, 0)  # of the hanging up alone it is told unasked
    ends.poll()
    os._exit(0)


def _say(channel: BinaryIO, message: Ready | Fault) -> None:
    pickle.dump(message, channel)
    channel.flush()


def _follow(order: JobSpec, calls: BinaryIO, say: Callable[[Ready | Fault], None]) -> None:
    import torch

    from bass_cli.models.decoder import Decoder
    from bass_cli.models.ranks import Ranks

    torch.set_num_threads(order.threads)
    if order.device.type == "cuda" and (free := free_memory(order.device)) < order.needed:
        raise MachineError(
            f"{gigabytes(order.needed)} of memory are needed and {gigabytes(free)} can be had there"
        )
    read, ranks = list[int](), Ranks(order.share)
    spec, weights = order.source(
        order.share, dtype=order.dtype, device=order.device, on_read=read.append
    )
    decoder = Decoder(spec, weights, vocab=order.vocab, ranks=ranks)
    say(Ready(sum(read)))
    pickle.load(calls)  # all are there
    ranks.join(order.port, order.device)
    ranks.can_capture(order.device)
    with torch.inference_mode():
        _take_part(decoder, ranks, calls)


def read_part(
    path: Path,
    share: Share,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_read: Callable[[int], None],
) -> tuple[Spec, dict[str, torch.Tensor]]:
    """The Source of a checkpoint on this machine."""
    from bass_cli.formats.checkpoint import open_checkpoint
    from bass_cli.formats.partition import part_of
    from bass_cli.formats.weights import load

    checkpoint = open_checkpoint(path)
    weights = load(checkpoint, dtype=dtype, device=device, share=share, on_read=on_read)
    return part_of(checkpoint.spec, share.ranks), weights


def _take_part(decoder: Decoder, ranks: Ranks, calls: BinaryIO) -> None:
    """Do what is told: (number of a runner, what it does, the arguments), or what concerns the
    graphs of all runners, or the end."""
    from bass_cli.tensor_parallel.led_graphs import FollowedGraphs

    member = _Member(decoder, ranks, calls)
    graphs = FollowedGraphs(
        decoder.device, listen=member.listen, perform=member.perform, version=member.version
    )
    while True:
        call = member.listen()
        name, given = call[1], call[2:]
        if name == "capture":
            graphs.capture(*given)
        elif name == "replay":
            graphs.replay(*given)
        elif name == "leave":
            graphs.close()
            ranks.leave()
            return
        else:
            member.perform(call)


class _Member:
    """A follower's runners, by their numbers."""

    def __init__(self, decoder: Decoder, ranks: Ranks, calls: BinaryIO):
        self._decoder, self._ranks, self._calls = decoder, ranks, calls
        self._runners: dict[int, Runner] = {}

    def listen(self) -> tuple[Any, ...]:
        """The next call."""
        call: tuple[Any, ...] = pickle.load(self._calls)
        return call

    def version(self, numbers: frozenset[int]) -> frozenset[tuple[int, int]]:
        """Changes when what a captured pass of these runners reads has moved."""
        return frozenset((number, self._runners[number].version) for number in numbers)

    def perform(self, call: tuple[Any, ...]) -> None:
        """Do what one of the leader's runners does."""
        number, name, *given = call
        if name == "begin":
            self._begin(number, *given)
        elif name == "forward":
            shape, ends, last = given
            tokens, positions = self._ranks.receive(shape, self._decoder.device)
            self._runners[number].forward(tokens, positions, ends, last=last)
        elif name == "feed":
            shape, ends = given
            tokens, positions = self._ranks.receive(shape, self._decoder.device)
            self._runners[number].feed(tokens, positions, ends)
        elif name == "open":
            key, prompt, timed = given
            self._runners[number].open(key, prompt, self._in_time if timed else None)
        elif name == "close":
            self._runners[number].close(*given)
        else:
            assert name == "follow"
            self._runners[number].follow(*given)

    def _begin(
        self,
        number: int,
        rows: int,
        span: int,
        lag: int,
        pieces: Pieces | None,
        ahead: int,
        layers: tuple[int, ...],
    ) -> None:
        from bass_cli.models.runner import Runner

        self._runners.pop(number, None)  # its memory is free before the next one takes any
        self._runners[number] = Runner(
            self._decoder.keep_layers(layers),
            rows=rows,
            span=span,
            lag=lag,
            pieces=pieces,
            ahead=ahead,
        )

    def _in_time(self, count: int) -> bool:
        """The leader's clock says what there is time for."""
        (answer,) = pickle.load(self._calls)
        return bool(answer)
