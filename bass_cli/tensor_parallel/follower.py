"""The process of ranks 1 to K - 1 of a split model. It holds one part of the weights and repeats
the calls of the leader's runners on that part.

The leader (leader.py) sends calls as pickles on standard input. Replies go to standard output. A
follower has no batch, no sampling and no clock. It ends when the leader ends, for any reason.
"""

from __future__ import annotations

import os
import pickle
import select
import sys
import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import torch

from bass_cli.errors import MachineError
from bass_cli.formats import weights as formats
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.lora import Adapter
from bass_cli.io import terminal
from bass_cli.models.capture import Graphs
from bass_cli.models.decoder import Decoder
from bass_cli.models.families import Slot
from bass_cli.models.partition import Share, part_of
from bass_cli.models.ranks import Ranks
from bass_cli.models.runner import Runner, RunnerSizes
from bass_cli.models.spec import PLAIN, Layouts, Spec
from bass_cli.models.weights import Named
from bass_cli.system.children import Fault
from bass_cli.system.host import free_memory, gigabytes, is_refused_memory

# a call as sent: number of a runner, method, arguments; "capture", "replay", "update", "write" and
# "leave" concern all
Call = tuple[Any, ...]
CAPTURED = (0, "captured")  # sent after the last call of a graph


class Source(Protocol):
    """Loads one part of a model. It is sent to another process, so it must be picklable: a function
    of a module, not a lambda."""

    def __call__(
        self,
        share: Share,
        *,
        dtype: torch.dtype,
        layouts: Layouts,
        device: torch.device,
        on_read: Callable[[int], None],
    ) -> tuple[Spec, Named]:
        """Return the part's spec (ranks.part_of) and its weights.

        Args:
            on_read: called with the number of bytes after each tensor.
        """


class Part(NamedTuple):
    """What all processes of a split model load.

    ranks: number of processes.
    vocab: see Decoder.
    needed: bytes that each device must have free.
    layouts: which matrices are quantised.
    """

    source: Source
    ranks: int
    dtype: torch.dtype
    device: torch.device
    vocab: int
    needed: int
    layouts: Layouts = PLAIN


class JobSpec(NamedTuple):
    """The first message to a follower: the part of the model and the rank that it loads, its number
    of CPU threads, and the port of the group (see Ranks.join)."""

    part: Part
    rank: int
    threads: int
    port: int


class Ready(NamedTuple):
    """Reply: the part is loaded. `read`: bytes read from the checkpoint."""

    read: int


def main(replies: int) -> None:
    """Read a JobSpec and then calls from standard input, until it is closed. Reply on the file
    descriptor `replies`."""
    threading.Thread(target=_end_with_leader, daemon=True).start()
    terminal.guard()  # it shares the leader's standard error
    channel = os.fdopen(os.dup(replies), "wb")
    os.dup2(2, 1)  # a stray print must not corrupt the replies
    calls = sys.stdin.buffer
    try:
        _follow(pickle.load(calls), calls, lambda message: _say(channel, message))
        os._exit(0)
    except EOFError:
        os._exit(0)
    except Exception as error:
        refused = is_refused_memory(error)
        _say(channel, Fault.of(MachineError(f"memory ran out: {error}") if refused else error))
    os._exit(1)  # a normal exit could wait for ever for an exchange with other processes


def _end_with_leader() -> None:
    """End this process when the leader's end of the pipe closes, even in the middle of a pass."""
    poll = select.poll()
    poll.register(0, 0)  # no events: poll always reports a closed pipe
    poll.poll()
    os._exit(0)


def _say(channel: BinaryIO, message: Ready | Fault) -> None:
    pickle.dump(message, channel)
    channel.flush()


def _follow(job: JobSpec, calls: BinaryIO, say: Callable[[Ready | Fault], None]) -> None:
    """Load the part, join the group and repeat the leader's calls until it says `leave`."""
    torch.set_num_threads(job.threads)
    part, device = job.part, job.part.device
    if device.type == "cuda" and (free := free_memory(device)) < part.needed:
        raise MachineError(
            f"this part needs {gigabytes(part.needed)} of memory on its device, and "
            f"{gigabytes(free)} are free"
        )
    share, read = Share(job.rank, part.ranks), list[int]()
    ranks = Ranks(share)
    spec, weights = part.source(
        share, dtype=part.dtype, layouts=part.layouts, device=device, on_read=read.append
    )
    decoder = Decoder(spec, weights, vocab=part.vocab, ranks=ranks)
    say(Ready(sum(read)))
    pickle.load(calls)  # "join": all parts are loaded
    ranks.join(job.port, device)
    ranks.reach_peers(device)
    ranks.can_capture(device)
    with torch.inference_mode():
        Follower(decoder, ranks, calls, Graphs(device)).run()


def read_part(
    path: Path,
    adapters: tuple[Adapter, ...],
    share: Share,
    *,
    dtype: torch.dtype,
    layouts: Layouts,
    device: torch.device,
    on_read: Callable[[int], None],
) -> tuple[Spec, Named]:
    """Load a part of a checkpoint on this machine. See `Source`."""
    checkpoint = open_checkpoint(path, adapters)
    weights = formats.load(
        checkpoint, dtype=dtype, layouts=layouts, device=device, share=share, on_read=on_read
    )
    return part_of(checkpoint.spec, share.ranks), weights


class Follower:
    """The runners of a follower, by number, and its graphs: of the calls that it received while the
    leader captured a round. Where `graphs` captures nothing (on a CPU), the calls are run one by
    one instead."""

    def __init__(self, decoder: Decoder, ranks: Ranks, calls: BinaryIO, graphs: Graphs):
        self._decoder, self._ranks, self._calls, self._graphs = decoder, ranks, calls, graphs
        self._runners: dict[int, Runner] = {}
        # By graph: its calls, their runners, and the version of these at the capture.
        self._captured: dict[int, tuple[list[Call], frozenset[int], Hashable]] = {}

    def run(self) -> None:
        """Run the leader's calls until `leave`."""
        while True:
            call = self.listen()
            name, given = call[1], call[2:]
            if name == "leave":
                self._graphs.close()
                self._ranks.leave()
                return
            if name in ("capture", "replay", "update", "write"):
                getattr(self, name)(*given)
            else:
                self.perform(call)

    def listen(self) -> Call:
        """Wait for the next call and return it."""
        call: Call = pickle.load(self._calls)
        return call

    def version(self, runners: frozenset[int]) -> Hashable:
        """Return a value that changes when memory that these runners' graphs read has moved."""
        return frozenset((number, self._runners[number].version) for number in runners)

    def capture(self, number: int, live: Collection[int]) -> None:
        """Capture the next calls, up to CAPTURED, as a graph.

        Args:
            number: of the new graph.
            live: numbers of the older graphs that may be replayed again. The rest are freed.
        """
        calls, call = list[Call](), self.listen()

        def run_calls() -> None:
            nonlocal call
            while call != CAPTURED:
                calls.append(call)
                if self._graphs.enabled:
                    self.perform(call)
                call = self.listen()

        if self._graphs.enabled and call != CAPTURED:  # the latter: the graph would be empty
            self._graphs.capture(number, run_calls)
        else:
            run_calls()
        self._captured = {one: held for one, held in self._captured.items() if one in live}
        runners = frozenset(call[0] for call in calls)
        self._captured[number] = calls, runners, self.version(runners)
        # After the capture: CUDA cannot capture into a pool without a graph (capture.py).
        self._graphs.keep(self._captured)

    def replay(self, number: int) -> None:
        """Replay a graph. If memory that it reads has moved, run its calls instead: their
        exchanges come in the same order. Memory may move in one process only, because devices
        differ in what is free."""
        calls, runners, version = self._captured[number]
        if self._graphs.holds(number) and version == self.version(runners):
            self._graphs.replay(number)
            return
        for call in calls:
            self.perform(call)

    def update(self, path: Path) -> None:
        """Write this part of a checkpoint on this machine into the model."""
        device, share = self._decoder.device, self._ranks.share
        formats.update(self._decoder.weights, open_checkpoint(path), device=device, share=share)

    def write(
        self,
        slot: Slot,
        shape: tuple[int, ...],
        runs: Sequence[range],
        dtype: torch.dtype,
        spec: Spec,
    ) -> None:
        """Write this part of a tensor that the leader sends, one run of rows after the other.

        Args:
            shape, dtype: of the whole tensor.
            spec: of the whole model.
        """

        def receive(rows: range) -> tuple[int, torch.Tensor]:
            part = torch.empty(len(rows), *shape[1:], dtype=dtype, device=self._decoder.device)
            return rows.start, self._ranks.broadcast(part)

        share = self._ranks.share
        formats.write(
            self._decoder.weights, slot, shape, map(receive, runs), spec=spec, share=share
        )

    def perform(self, call: Call) -> None:
        """Run one call of the leader's runners on this part."""
        number, name, *given = call
        if name == "begin":
            self._begin(number, *given)
            return
        runner = self._runners[number]
        if name in ("forward", "feed"):
            shape, ends, *last = given
            tokens, positions = self._ranks.receive(shape, self._decoder.device)
            if last:
                runner.forward(tokens, positions, ends, last=last[0])
            else:
                runner.feed(tokens, positions, ends)
        elif name == "open":
            key, prompt, timed, logprobs = given
            runner.open(key, prompt, self._in_time if timed else None, logprobs=logprobs)
        else:
            assert name in ("prefill_all", "close", "step_back", "follow")
            getattr(runner, name)(*given)

    def _begin(self, number: int, sizes: RunnerSizes, ahead: int, layers: tuple[int, ...]) -> None:
        self._runners.pop(number, None)  # free its memory before the new one allocates
        decoder = self._decoder.keep_layers(layers)
        self._runners[number] = Runner(decoder, ahead=ahead, **sizes._asdict())

    def _in_time(self, count: int) -> bool:
        """Return the leader's answer: only the leader has a clock."""
        (answer,) = pickle.load(self._calls)
        return bool(answer)
