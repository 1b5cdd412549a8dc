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
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from bass_cli.errors import MachineError, UserError
from bass_cli.model.partition import Share
from bass_cli.system.host import free_memory, gigabytes, is_refused_memory

if TYPE_CHECKING:
    import torch

    from bass_cli.model.decoder import Decoder
    from bass_cli.model.ranks import Ranks
    from bass_cli.model.runner import Runner


class Order(NamedTuple):
    """Which part of which checkpoint a process holds. `vocab`: as a Decoder's; `needed`: bytes
    that its device must have free; `port`: see Ranks.join."""

    path: Path
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


def _follow(order: Order, calls: BinaryIO, say: Callable[[Ready | Fault], None]) -> None:
    import torch

    from bass_cli.model.checkpoint import open_checkpoint
    from bass_cli.model.decoder import Decoder
    from bass_cli.model.partition import part_of
    from bass_cli.model.ranks import Ranks
    from bass_cli.model.weights import load

    torch.set_num_threads(order.threads)
    if order.device.type == "cuda" and (free := free_memory(order.device)) < order.needed:
        raise MachineError(
            f"{gigabytes(order.needed)} of memory are needed and {gigabytes(free)} can be had there"
        )
    checkpoint, read = open_checkpoint(order.path), list[int]()
    weights = load(
        checkpoint, dtype=order.dtype, device=order.device, share=order.share, on_read=read.append
    )
    ranks = Ranks(order.share)
    spec = part_of(checkpoint.spec, order.share.ranks)
    decoder = Decoder(spec, weights, vocab=order.vocab, ranks=ranks)
    say(Ready(sum(read)))
    pickle.load(calls)  # all are there
    ranks.join(order.port, order.device)
    with torch.inference_mode():
        _take_part(decoder, ranks, calls)


def _take_part(decoder: Decoder, ranks: Ranks, calls: BinaryIO) -> None:
    """Do what is told: (number of a runner, what it does, the arguments)."""
    from bass_cli.model.runner import Runner

    runners: dict[int, Runner] = {}

    def in_time(count: int) -> bool:  # the leader's clock says what there is time for
        (answer,) = pickle.load(calls)
        return bool(answer)

    while True:
        number, name, *given = pickle.load(calls)
        if name == "begin":
            rows, span, lag, pieces, ahead, layers = given
            runners.pop(number, None)  # its memory is free before the next one takes any
            runners[number] = Runner(
                decoder.keep_layers(layers),
                rows=rows,
                span=span,
                lag=lag,
                pieces=pieces,
                ahead=ahead,
            )
        elif name == "leave":
            ranks.leave()
            return
        elif name == "forward":
            shape, ends, last = given
            tokens, positions = ranks.receive(shape, decoder.device)
            runners[number].forward(tokens, positions, ends, last=last)
        elif name == "feed":
            shape, ends = given
            tokens, positions = ranks.receive(shape, decoder.device)
            runners[number].feed(tokens, positions, ends)
        elif name == "open":
            key, prompt, timed = given
            runners[number].open(key, prompt, in_time if timed else None)
        elif name == "close":
            runners[number].close(*given)
        else:
            assert name == "follow"
            runners[number].follow(*given)
