"""The processes that hold the other parts of a split model, from the leader's side: it begins them,
tells them what its runners do before they do it, and finds out what became of them.

The leader alone reads prompts, drafts, chooses tokens, looks at clocks and writes. Not here: what
the others do (follower.py), what is exchanged inside a pass (ranks.py).
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bass_cli.errors import MachineError, UserError
from bass_cli.io import terminal
from bass_cli.models.block_allocator import Change, Pieces
from bass_cli.models.decoder import Decoder
from bass_cli.models.kv_cache import KVCache
from bass_cli.models.ranks import Ranks, Share
from bass_cli.models.runner import Runner
from bass_cli.tensor_parallel.follower import Fault, JobSpec, Ready, Source
from bass_cli.tensor_parallel.led_graphs import LedGraphs

_NOTICE = 2.0  # seconds until a process that has died is known to have
# Seconds that a pass has to fail in when one that takes part in it has died: between CPUs it does
# at once, between GPUs it would wait for ever.
_GRACE = 15.0
# Seconds for all processes to leave the group together. One that is stopped never does, and the
# command is to end within five seconds of a signal.
_POLITE = 1.5
_CODE = (
    "import sys; sys.path[:] = sys.argv[1:]; "
    # before torch is imported, which takes seconds
    "from bass_cli.system.signals import end_with_parent; end_with_parent(); "
    "from bass_cli.tensor_parallel.follower import main; main()"
)


class Part(NamedTuple):
    """What of a model all of its processes are told: see follower.JobSpec."""

    source: Source
    ranks: int
    dtype: torch.dtype
    device: torch.device
    vocab: int
    needed: int


class Followers:
    """The processes 1 to K - 1 of a model, which load their parts from now on. `ranks`: the
    leader's own view of all; `graphs`: those that they take part in."""

    def __init__(self, part: Part):
        self.ranks, self._part = Ranks(Share(0, part.ranks)), part
        self.graphs = LedGraphs(self)
        self.read: dict[int, int] = {}  # bytes, by process
        self._port = self.ranks.meet()
        self._faults: dict[int, str] = {}
        self._kinds: dict[int, type[UserError]] = {}
        self._news, self._over = threading.Condition(), threading.Event()
        self._broken = False
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for rank in range(1, part.ranks):
                self._begin(rank)
        except BaseException:
            self.close()
            raise

    def _begin(self, rank: int) -> None:
        part, environment = self._part, dict(os.environ)
        if part.device.type == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = _devices()[rank]
        started: Future[subprocess.Popen[bytes]] = Future()
        threading.Thread(
            target=self._begin_and_listen, args=(rank, environment, started), daemon=True
        ).start()
        process = started.result()
        order = JobSpec(
            part.source,
            Share(rank, part.ranks),
            part.dtype,
            torch.device(part.device.type),
            part.vocab,
            torch.get_num_threads(),
            part.needed,
            self._port,
        )
        with contextlib.suppress(BrokenPipeError):  # `_listen` says why
            self._send(process, order)

    def _begin_and_listen(
        self, rank: int, environment: dict[str, str], started: Future[subprocess.Popen[bytes]]
    ) -> None:
        """Start a process from the thread that listens to it: the process is killed when that
        thread ends (signals.end_with_parent)."""
        try:
            process = self._processes[rank] = subprocess.Popen(
                [sys.executable, "-c", _CODE, *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                start_new_session=True,  # Ctrl-C is the leader's
            )
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(process)
        self._listen(rank, process)

    def join(self) -> None:
        """Wait until all parts are loaded, and meet."""
        with self._news:
            self._news.wait_for(lambda: self._faults or len(self.read) == len(self._processes))
        with self.taking_part():
            if self._faults:
                raise self._fault()
            self.tell("join")
            self.ranks.join(self._port, self._part.device)
            self.graphs.wanted = self.ranks.can_capture(self._part.device)
        if self._part.device.type == "cuda" and not self.graphs.wanted:
            terminal.line(
                f"bass: --tensor-parallel {self._part.ranks}: rounds are launched op by op here"
            )

    def tell(self, *message: Any) -> None:
        """To all of them, which do as they are told in the order in which they are."""
        raw = pickle.dumps(message)
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.write(raw)
            process.stdin.flush()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Around loading the leader's part: behind it the others have theirs; after an error here
        they have ended. Errors: see join."""
        try:
            yield
            self.join()
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def taking_part(self) -> Iterator[None]:
        """Around what all do together. After an error here, of whatever kind, they no longer stand
        at the same place, and can do nothing together any more. MachineError where one has
        died."""
        if self._broken:
            raise MachineError("--tensor-parallel: the processes of this model have been given up")
        try:
            yield
        except BaseException as error:
            self._broken = True
            if not isinstance(error, Exception) or isinstance(error, UserError):
                raise
            with self._news:
                self._news.wait_for(lambda: self._faults, _NOTICE)
            if self._faults:
                raise self._fault() from None
            raise

    def close(self) -> None:
        """End all processes; what they hold is lost. One that is stopped is killed, too."""
        if not self._faults:
            self._over.set()
        if not self._broken:  # a group between GPUs is given up together
            self._leave(_POLITE, lost=False)
        self._broken = True
        for process in list(self._processes.values()):
            process.kill()
        if self._leave(_GRACE + _NOTICE, lost=True):  # `_listen` comes before
            self._over.set()  # else what waits for a device ends this process too: see _listen
        for process in self._processes.values():
            process.wait()
            with contextlib.suppress(BrokenPipeError):
                process.__exit__(None, None, None)  # its pipes

    def _leave(self, limit: float, *, lost: bool) -> bool:
        """Leave the group; whether that is done within so many seconds. `lost`: the others do not
        take part. It may never end where others have died in the middle of a pass."""

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

    def _fault(self) -> UserError:
        """Of the first that has one."""
        rank = next(iter(self._faults))
        ranks = self._part.ranks
        text = f"--tensor-parallel {ranks}: process {rank} of 0 to {ranks - 1}: "
        return self._kinds[rank](*(text + self._faults[rank]).split("\n"))  # a traceback has lines

    def _listen(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Take in what a process says, until it is gone."""
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
        text = _end_of(process.wait()) if found is None else found.text
        with self._news:
            user = found is not None and found.kind == "user"
            self._kinds[rank] = UserError if user else MachineError
            self._faults.setdefault(rank, text)
            self._news.notify_all()
        if not self._over.wait(_GRACE) and rank in self.read:
            # What waits for a device cannot be interrupted. Lines that are written are whole.
            terminal.error(self._fault())
            os._exit(3)

    @staticmethod
    def _send(process: subprocess.Popen[bytes], message: Any) -> None:
        assert process.stdin is not None
        pickle.dump(message, process.stdin)
        process.stdin.flush()


def _devices() -> list[str]:
    """What CUDA_VISIBLE_DEVICES has to be for a process that sees one of the GPUs that this one
    does, by its number here."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return [str(number) for number in range(torch.cuda.device_count())]
    return [one.strip() for one in given.split(",")]


def _end_of(code: int) -> str:
    if code >= 0:
        return f"it has ended, with exit code {code}"
    return f"it was killed by {signal.Signals(-code).name}"


class LedRunner:
    """A Runner (see there) over one part of a model: whatever it is asked, the others are told
    first. What reads its decoder, and is not split, has layers in the leader's cache only.
    `number`: a new one takes the place of an older one of the same number."""

    def __init__(
        self,
        decoder: Decoder,
        followers: Followers,
        number: int,
        *,
        rows: int,
        span: int,
        lag: int,
        pieces: Pieces | None,
    ):
        self._followers, self._number, self.rows, self.lag = followers, number, rows, lag
        ahead = 0 if decoder.reader is None else decoder.reader.ahead
        with followers.taking_part():
            self._tell("begin", rows, span, lag, pieces, ahead, decoder.layers)
            self._runner = Runner(decoder, rows=rows, span=span, lag=lag, pieces=pieces)

    @property
    def cache(self) -> KVCache:
        return self._runner.cache

    @property
    def decoder(self) -> Decoder:
        return self._runner.decoder

    @property
    def version(self) -> int:
        return self._runner.version

    def read_by_nobody(self) -> LedRunner:
        """Runner.read_by_nobody: for the others it is the same one, for they have no reader."""
        other = copy.copy(self)
        other._runner = self._runner.read_by_nobody()
        return other

    def prepare_prompts(self) -> None:
        """Nothing is captured that several processes take part in."""

    def open(
        self, key: str, tokens: Sequence[int], in_time: Callable[[int], bool] | None = None
    ) -> bool:
        def told(count: int) -> bool:
            assert in_time is not None
            answer = in_time(count)
            self._followers.tell(answer)
            return answer

        with self._followers.taking_part():
            self._tell("open", key, list(tokens), in_time is not None)
            return self._runner.open(key, tokens, None if in_time is None else told)

    def close(self, key: str) -> None:
        with self._followers.taking_part():
            self._tell("close", key)
            self._runner.close(key)

    def follow(self, change: Change) -> None:
        with self._followers.taking_part():
            self._tell("follow", change)
            self._runner.follow(change)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        ends: Sequence[int] | None,
        *,
        last: int | None = None,
    ) -> Tensor:
        with self._followers.taking_part():
            self._tell("forward", tuple(tokens.shape), ends, last)
            self._followers.ranks.send(tokens, positions)
            return self._runner.forward(tokens, positions, ends, last=last)

    def feed(self, tokens: Tensor, positions: Tensor, ends: Sequence[int] | None) -> None:
        with self._followers.taking_part():
            self._tell("feed", tuple(tokens.shape), ends)
            self._followers.ranks.send(tokens, positions)
            self._runner.feed(tokens, positions, ends)

    def _tell(self, name: str, *given: Any) -> None:
        self._followers.tell(self._number, name, *given)


AnyRunner = Runner | LedRunner
