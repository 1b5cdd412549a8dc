"""The training loop: steps over batches, with checkpoints from which an interrupted run resumes.

Weights, gradients and AdamW's means are float32; on a GPU the computation is in bfloat16.
windows.py makes the batches; agreement.py has the loss.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bass_cli.distill.agreement import divergence
from bass_cli.distill.exchange import Peers
from bass_cli.distill.network import Model, run
from bass_cli.distill.windows import Batches, Windows
from bass_cli.errors import MachineError
from bass_cli.io.saving import replace_file

WARM_UP = 0.04  # share of the training in which the learning rate rises
_LEAST = 0.05  # final learning rate, as a share of the peak
# AdamW's betas; the second is smaller than usual because there are only some hundred steps
_BETAS = (0.9, 0.95)
_NORM = 1.0  # largest gradient norm; longer gradients are clipped
SECONDS = 300.0  # between checkpoints; a kill loses at most this much training


@dataclass(frozen=True, slots=True)
class Goal:
    """End of the training: after `steps` or `seconds`, whichever comes first. `rate`: peak rate."""

    steps: int | None
    seconds: float | None
    rate: float

    def share(self, step: int, seconds: float) -> float:
        """Return the share of the training that is done, at most 1."""
        done = 0.0 if self.steps is None else step / self.steps
        return min(max(done, 0.0 if self.seconds is None else seconds / self.seconds), 1.0)

    def learning_rate(self, share: float) -> float:
        """Return the learning rate: linear warm-up, then cosine decay."""
        if share < WARM_UP:
            return self.rate * max(share / WARM_UP, 0.01)
        fallen = (share - WARM_UP) / (1.0 - WARM_UP)
        return self.rate * (_LEAST + (1.0 - _LEAST) * (1.0 + math.cos(math.pi * fallen)) / 2)


@dataclass(slots=True)
class Progress:
    """Progress of a training.

    seconds: training time. tokens: tokens of texts. guesses: guesses compared. loss: moving
    average, in nats per guess. facts: measurements during the run, ready for JSON.
    """

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    guesses: int = 0
    loss: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)


class Trainer:
    """Trains `student` (weights in float32) to match the distributions of `target`.

    `peers`: processes that learn from the other parts of the same batches.
    """

    def __init__(
        self,
        target: Model,
        student: Model,
        batches: Batches,
        goal: Goal,
        peers: Peers | None = None,
    ):
        self._target, self._student, self._batches, self._goal = target, student, batches, goal
        self._peers = peers or Peers()
        tied = student.spec.tied  # a tied head is the embedding
        self.weights = {
            name: weight.requires_grad_()
            for name, weight in student.weights.items()
            if not (tied and name == "head.weight")
        }
        self._device = next(iter(self.weights.values())).device
        self._optimiser = torch.optim.AdamW(
            self.weights.values(),
            lr=goal.rate,
            betas=_BETAS,
            weight_decay=0.0,
            fused=self._device.type == "cuda",
        )
        self._gradients = self._peers.gradients(self.weights.values())
        self.progress = Progress()

    @property
    def steps(self) -> int | None:
        """Number of steps; None if only time ends the training."""
        return self._goal.steps

    @property
    def share(self) -> float:
        return self._goal.share(self.progress.step, self.progress.seconds)

    def run(
        self,
        on_step: Callable[[Progress], None],
        *,
        checkpoint: Path | None = None,
        every: float = SECONDS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Train to the end.

        With several processes, rank 0 keeps the time.

        Args:
            on_step: called after each step.
            checkpoint: file that is replaced every `every` seconds and at the end; None for none.
        """
        began, before = now() - self.progress.seconds, self.progress.step
        saved = now()
        with ThreadPoolExecutor(1) as pool:  # makes the next batch during a step
            following = pool.submit(self._batches.at, self.progress.step)
            while self.share < 1.0:
                batch = following.result()
                following = pool.submit(self._batches.at, self.progress.step + 1)
                self._step(batch, lambda: now() - began)
                on_step(self.progress)
                if checkpoint is not None and now() - saved >= every:
                    self.save(checkpoint)
                    saved = now()
        if checkpoint is not None and self.progress.step > before:
            self.save(checkpoint)

    def _step(self, batch: list[Windows], elapsed: Callable[[], float]) -> None:
        """Take one step. Learning rate, divisor and statistics count all processes."""
        done, parts = self.progress, [part for part in batch if len(part.student)]
        tokens = sum(int((part.texts >= 0).sum()) for part in batch)
        sums = self._peers.add([sum(len(part.student) for part in parts), tokens])
        guesses = int(sums[0])
        for group in self._optimiser.param_groups:
            group["lr"] = self._goal.learning_rate(self.share)
        losses = []
        for number, part in enumerate(parts, 1):
            if number == len(parts):
                self._gradients.last()
            losses.append(self._learn(part.to(self._device), guesses))
        self._gradients.finish()
        torch.nn.utils.clip_grad_norm_(self.weights.values(), _NORM)
        self._optimiser.step()
        self._gradients.clear()
        # waits for the device, so that the clock does not run ahead of it
        own = float(sum(losses)) if losses else 0.0
        loss, seconds = self._peers.add([own, 0.0 if self._peers.rank else elapsed()])
        if not math.isfinite(loss):
            raise MachineError(
                f"training: the loss of step {done.step + 1} is not finite; start again with "
                "another `out` and a smaller `learning_rate`"
            )
        done.step += 1
        done.seconds = seconds
        done.guesses += guesses
        done.tokens += int(sums[1])
        done.loss = loss if done.loss is None else 0.95 * done.loss + 0.05 * loss

    def _learn(self, part: Windows, guesses: int) -> Tensor:
        """Add the gradient of some windows' loss, and return that loss.

        Both are divided by `guesses`, the guesses of the whole batch.
        """
        target, student = self._target, self._student
        with torch.no_grad():
            expected = run(target, part).flatten(0, 1)[part.known]
        found = run(student.cast(), part).flatten(0, 1).index_select(0, part.student)
        loss = divergence(found, student.head, expected, target.head, part) / guesses
        loss.backward()
        return loss.detach()

    def save(self, path: Path) -> None:
        """Write weights, AdamW's state and progress atomically. MachineError if this fails."""
        state = {
            "weights": {name: weight.detach() for name, weight in self.weights.items()},
            "optimiser": self._optimiser.state_dict(),
            "progress": asdict(self.progress),
        }
        try:
            replace_file(path, lambda stream: torch.save(state, stream)).close()
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a full disk
            raise MachineError(f"{path}: cannot write the checkpoint: {error}") from None

    def restore(self, path: Path) -> None:
        """Load a checkpoint of the same training, made by any number of processes.

        MachineError if it cannot be read.
        """
        try:
            state = torch.load(path, map_location=self._device, weights_only=True)
        except Exception as error:  # torch raises many kinds of errors for a damaged file
            reason = (str(error).splitlines() or [""])[0]
            raise MachineError(
                f"{path}: the checkpoint cannot be read ({reason}); remove it to train again"
            ) from None
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(state["weights"][name])
        self._optimiser.load_state_dict(state["optimiser"])
        self.progress = Progress(**state["progress"])
