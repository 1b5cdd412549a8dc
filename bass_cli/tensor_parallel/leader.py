"""The leader (rank 0) of a split model. It starts the other processes, sends them each call of its
runners before it makes the call itself, and detects processes that have died.

Only the leader reads prompts, drafts, samples tokens, reads clocks and writes results. Not here:
the other processes (follower.py), the exchanges inside a pass (ranks.py).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bass_cli.errors import MachineError, UserError
from bass_cli.formats import weights as formats
from bass_cli.formats.checkpoint import Checkpoint
from bass_cli.io import terminal
from bass_cli.models.block_allocator import Change
from bass_cli.models.capture import Graph, capture
from bass_cli.models.decoder import Decoder
from bass_cli.models.families import Slot
from bass_cli.models.partition import Share
from bass_cli.models.ranks import Ranks
from bass_cli.models.runner import Runner, RunnerSizes
from bass_cli.models.spec import Spec
from bass_cli.system.children import Child, Fault, end_of, start_child
from bass_cli.system.host import visible_gpus
from bass_cli.tensor_parallel.follower import CAPTURED, JobSpec, Part, Ready

_NOTICE = 2.0  # seconds within which the death of a process is detected
# Seconds for a pass to fail after one of its processes has died. Between CPUs it fails at once;
# between GPUs it would wait for ever.
_GRACE = 15.0
# Seconds for all processes to leave the group together. A stopped process never leaves, and a
# command must end within five seconds of a signal.
_LEAVE = 1.5


class Followers:
    """The processes of ranks 1 to K - 1. The constructor starts them, and they load their parts
    in the background.

    ranks: the leader's member of the group.
    graphs: the CUDA graphs that all processes take part in.
    read: bytes that each process has read, by rank, once its part is loaded.
    """

    def __init__(self, part: Part):
        self.ranks, self._part = Ranks(Share(0, part.ranks)), part
        self.graphs = LedGraphs(self)
        self.read: dict[int, int] = {}
        self._port = self.ranks.meet()
        self._fault: UserError | None = None  # of the first process that failed
        self._news, self._over = threading.Condition(), threading.Event()
        self._broken = False
        self._processes: dict[int, Child] = {}
        try:
            for rank in range(1, part.ranks):
                self._begin(rank)
        except BaseException:
            self.close()
            raise

    def _begin(self, rank: int) -> None:
        part, environment = self._part, dict(os.environ)
        if part.device.type == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = visible_gpus()[rank]
        listen = functools.partial(self._listen, rank)
        process = self._processes[rank] = start_child(
            "bass_cli.tensor_parallel.entry", 1, listen, environment=environment
        )
        # Each process sees its own device only, as the first one.
        part = part._replace(device=torch.device(part.device.type))
        job = JobSpec(part, rank, torch.get_num_threads(), self._port)
        with contextlib.suppress(BrokenPipeError):  # `_listen` reports why
            self._send(process, job)

    def join(self) -> None:
        """Wait until all parts are loaded, then form the group.

        Raises:
            UserError, MachineError: a process could not load its part, or has died.
        """
        with self._news:
            self._news.wait_for(lambda: self._fault or len(self.read) == len(self._processes))
        with self.taking_part():
            if self._fault:
                raise self._fault
            self.tell("join")
            self.ranks.join(self._port, self._part.device)
            reason = self.ranks.reach_peers(self._part.device)
            self.graphs.wanted = self.ranks.can_capture(self._part.device)
        if reason is not None:
            terminal.line(
                f"bass: tensor parallel over {self._part.ranks} devices: sums of a few tokens go "
                f"through NCCL, because {reason}; rounds are slower"
            )
        if self._part.device.type == "cuda" and not self.graphs.wanted:
            terminal.line(
                f"bass: tensor parallel over {self._part.ranks} devices: no CUDA graphs, because "
                "exchanges between these GPUs cannot be captured; rounds are slower"
            )

    def tell(self, *message: Any) -> None:
        """Send a call to all processes. They run calls in the order of sending."""
        raw = pickle.dumps(message)
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.write(raw)
            process.stdin.flush()

    def update(self, decoder: Decoder, checkpoint: Checkpoint) -> None:
        """Write a checkpoint into the parts of all processes, in place. `decoder`: the leader's."""
        with self.taking_part():
            self.tell(0, "update", checkpoint.path)
            device, share = decoder.device, self.ranks.share
            formats.update(decoder.weights, checkpoint, device=device, share=share)

    def write(
        self,
        decoder: Decoder,
        slot: Slot,
        shape: tuple[int, ...],
        runs: Sequence[range],
        parts: Iterable[tuple[int, Tensor]],
        *,
        spec: Spec,
    ) -> None:
        """Write a stored tensor into the parts of all processes, in place.

        Args:
            decoder: the leader's.
            runs: which rows each of `parts` has.
            parts: contiguous, in the dtype that the model stores and on its device.
            slot, shape, spec: see formats.weights.write.
        """
        dtype = decoder.weights.dtype_written(slot.name)
        with self.taking_part():
            self.tell(0, "write", slot, shape, runs, dtype, spec)
            sent = ((first, self.ranks.broadcast(part)) for first, part in parts)
            formats.write(decoder.weights, slot, shape, sent, spec=spec, share=self.ranks.share)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Wrap the loading of the leader's part: on exit the group is formed (see `join`), after
        an error all processes have ended."""
        try:
            yield
            self.join()
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def taking_part(self) -> Iterator[None]:
        """Wrap a step that all processes take together. After any error in it the processes are
        out of step, and every later use fails.

        Raises:
            MachineError: a process has died.
        """
        if self._broken:
            raise MachineError(
                "`tensor_parallel`: the processes of this model were ended after an earlier error"
            )
        try:
            yield
            self.check()
        except BaseException as error:
            self._broken = True
            if not isinstance(error, Exception) or isinstance(error, UserError):
                raise
            with self._news:
                self._news.wait_for(lambda: self._fault, _NOTICE)
            if self._fault:
                raise self._fault from None
            raise

    def check(self) -> None:
        """Raise an error if sums may lack a process's part, so that results may not be used.

        Raises:
            MachineError: a process has died, or has not answered for long.
        """
        if self._fault:
            self._broken = True
            raise self._fault
        if (rank := self.ranks.missed()) is not None:
            self._broken = True
            ranks = self._part.ranks
            raise MachineError(
                f"tensor parallel over {ranks} devices: process {rank} of 0 to {ranks - 1}: it has "
                "not answered for some minutes; it is stopped, or hangs"
            )

    def close(self) -> None:
        """End all processes, stopped ones too, and free what they hold."""
        if not self._fault:
            self._over.set()
        if not self._broken:  # NCCL wants all members to leave together
            self._leave(_LEAVE, lost=False)
        self._broken = True
        for process in list(self._processes.values()):
            process.kill()
        self.ranks.end_waits()
        if self._leave(_GRACE + _NOTICE, lost=True):  # `_listen` gives up first
            self._over.set()  # if not, `_listen` ends this process, which waits for its device
        for process in self._processes.values():
            process.wait()
            with contextlib.suppress(BrokenPipeError):
                process.__exit__(None, None, None)  # its pipes

    def _leave(self, limit: float, *, lost: bool) -> bool:
        """Leave the group. Return whether that took at most `limit` seconds; it may hang if other
        processes have died in the middle of a pass.

        Args:
            lost: the other processes do not take part.
        """

        def leave() -> None:
            if not lost:
                with contextlib.suppress(OSError):
                    self.tell(0, "leave")
            self.graphs.close()
            self.ranks.leave(lost=lost)

        leaving = threading.Thread(target=leave, daemon=True)
        leaving.start()
        leaving.join(limit)
        return not leaving.is_alive()

    def _listen(self, rank: int, process: Child) -> None:
        """Read the replies of a process until it ends, and record why if it failed."""
        assert process.stdout is not None
        found: Fault | None = None
        with contextlib.suppress(EOFError, OSError, ValueError, pickle.UnpicklingError):
            while True:
                message: Ready | Fault = pickle.load(process.stdout)
                if isinstance(message, Fault):
                    found = message
                    break
                with self._news:
                    self.read[rank] = message.read
                    self._news.notify_all()
        if self._over.is_set():
            return
        text, ranks = end_of(process.wait()) if found is None else found.text, self._part.ranks
        kind = UserError if found is not None and found.kind == "user" else MachineError
        text = f"tensor parallel over {ranks} devices: process {rank} of 0 to {ranks - 1}: {text}"
        with self._news:
            self._fault = self._fault or kind(*text.split("\n"))  # one line an argument
            self._news.notify_all()
        self.ranks.end_waits()
        if not self._over.wait(_GRACE) and rank in self.read:
            # The main thread may wait for its device, which no exception can interrupt. Results
            # are written line by line, so the output file is valid.
            terminal.error(*self._fault.lines)
            os._exit(3)

    @staticmethod
    def _send(process: Child, message: Any) -> None:
        assert process.stdin is not None
        pickle.dump(message, process.stdin)
        process.stdin.flush()


class LedGraph:
    """The leader's part of a graph."""

    def __init__(self, followers: Followers, number: int, graph: Graph):
        self._followers, self._number, self._graph = followers, number, graph

    def replay(self) -> None:
        """Replay the graph in all processes."""
        with self._followers.taking_part():
            self._followers.tell(0, "replay", self._number)
            self._graph.replay()

    def reset(self) -> None:
        """Free the graph. It cannot be replayed afterwards."""
        self._graph.reset()


class LedGraphs:
    """All graphs of a split model, in the leader, which captures a round while each follower
    captures the passes of the calls that it receives meanwhile. Afterwards one message, the graph's
    number, replays it.

    The exchanges between processes are inside the graphs, so processes wait for each other on
    their devices and no host waits for another. All processes capture at the same time, because
    NCCL may synchronise its members during a capture.

    wanted: whether rounds may be captured.
    """

    def __init__(self, followers: Followers):
        self.wanted = False
        self._followers, self._numbers = followers, itertools.count(1)
        # followers free the graphs that are no longer referenced here
        self._live: weakref.WeakValueDictionary[int, LedGraph] = weakref.WeakValueDictionary()

    def capture(self, function: Callable[[], None], pool: Any) -> LedGraph:
        """Capture `function` in all processes (capture.capture)."""
        number = next(self._numbers)
        with self._followers.taking_part():
            self._followers.tell(0, "capture", number, frozenset(self._live))
            graph = capture(function, pool)
            self._followers.tell(*CAPTURED)
        made = self._live[number] = LedGraph(self._followers, number, graph)
        return made

    def close(self) -> None:
        """Free all graphs: NCCL cannot leave a group whose exchanges are in live graphs."""
        for graph in list(self._live.values()):
            graph.reset()


class LedRunner(Runner):
    """A Runner over one part of a model. It sends each call to the other processes before it runs
    the call itself. A drafter that reads hidden states is not split: its layers are in the
    leader's cache only, and the other processes have no reader.

    In calls it has the number of its pending tokens. A new runner replaces an older one of its
    number.
    """

    def __init__(self, decoder: Decoder, sizes: RunnerSizes, followers: Followers):
        self._followers, self._number = followers, sizes.pending
        ahead = 0 if decoder.reader is None else decoder.reader.ahead
        with self._led("begin", sizes, ahead, decoder.layers):
            super().__init__(decoder, **sizes._asdict())

    @contextlib.contextmanager
    def _led(self, name: str, *given: Any) -> Iterator[None]:
        """Send a call to the other processes before the leader makes it in this block."""
        with self._followers.taking_part():
            self._followers.tell(self._number, name, *given)
            yield

    def open(
        self,
        key: str,
        tokens: Sequence[int],
        in_time: Callable[[int], bool] | None = None,
        *,
        logprobs: int | None = None,
    ) -> bool:
        def decide(count: int) -> bool:
            """Decide for all processes, because only the leader has a clock."""
            assert in_time is not None
            answer = in_time(count)
            self._followers.tell(answer)
            return answer

        with self._led("open", key, list(tokens), in_time is not None, logprobs):
            return super().open(key, tokens, None if in_time is None else decide, logprobs=logprobs)

    def prefill_all(self) -> None:
        with self._led("prefill_all"):
            super().prefill_all()

    def close(self, key: str) -> None:
        with self._led("close", key):
            super().close(key)

    def step_back(self, rows: int, tokens: int) -> None:
        with self._led("step_back", rows, tokens):
            super().step_back(rows, tokens)

    def follow(self, change: Change) -> None:
        with self._led("follow", change):
            super().follow(change)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        ends: Sequence[int] | None,
        *,
        last: int | None = None,
    ) -> Tensor:
        with self._led("forward", tuple(tokens.shape), ends, last):
            self._followers.ranks.send(tokens, positions)
            return super().forward(tokens, positions, ends, last=last)

    def feed(self, tokens: Tensor, positions: Tensor, ends: Sequence[int] | None) -> None:
        with self._led("feed", tuple(tokens.shape), ends):
            self._followers.ranks.send(tokens, positions)
            super().feed(tokens, positions, ends)
