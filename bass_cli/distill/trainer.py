"""Training: steps over batches until there were enough or time is over, with a checkpoint now and
then that a killed run goes on from as if nothing had been.

Weights, gradients and AdamW's means are float32, what is computed with them bfloat16 on a GPU. Not
here: what is learnt from (corpus.py), how good it is (held_out.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bass_cli.distill.corpus import Batches
from bass_cli.distill.exchange import Alone, Peers
from bass_cli.distill.layout import Windows
from bass_cli.distill.loss import Guesses, divergence, worths
from bass_cli.distill.network import cast, run
from bass_cli.distill.student import head_of, trainable
from bass_cli.errors import MachineError
from bass_cli.io.saving import replace_file
from bass_cli.models.spec import Spec

WARM_UP = 0.04  # of the training, in which the rate rises
_LEAST = 0.05  # of the rate, at the end
# AdamW's: of the second moment less is kept than usual, since there are some hundred steps only
_BETAS = (0.9, 0.95)
_NORM = 1.0  # gradients longer than this are cut
SECONDS = 300.0  # between checkpoints: what a kill costs at most


class Model(NamedTuple):
    """A decoder to train with: ids from `vocab` on are not compared."""

    spec: Spec
    weights: Mapping[str, Tensor]
    vocab: int


@dataclass(frozen=True, slots=True)
class Goal:
    """When training is over: after so many steps, or seconds, whichever comes first."""

    steps: int | None
    seconds: float | None
    rate: float

    def share(self, step: int, seconds: float) -> float:
        """How much of it is done, up to 1."""
        done = 0.0 if self.steps is None else step / self.steps
        return min(max(done, 0.0 if self.seconds is None else seconds / self.seconds), 1.0)

    def learning_rate(self, share: float) -> float:
        """It rises in a line and falls in half a cosine."""
        if share < WARM_UP:
            return self.rate * max(share / WARM_UP, 0.01)
        fallen = (share - WARM_UP) / (1.0 - WARM_UP)
        return self.rate * (_LEAST + (1.0 - _LEAST) * (1.0 + math.cos(math.pi * fallen)) / 2)


@dataclass(slots=True)
class Progress:
    """What was done: `seconds` of training, tokens of texts, guesses that were compared, the
    loss of late in nats a guess; and what the run measured on the way, JSON."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    guesses: int = 0
    loss: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)


class Trainer:
    """`student` (float32) learns `target`'s laws on batches; `dtype`: of what is computed.
    `mask`: the student's mask token; `peers`: those whose batches are other parts of the same ones,
    with whom it takes each step together."""

    def __init__(
        self, target: Model, student: Model, batches: Batches, goal: Goal, *, mask: int,
        dtype: torch.dtype, peers: Peers | None = None,
    ):  # fmt: skip
        self._target, self._student, self._batches, self._goal = target, student, batches, goal
        self._mask, self._dtype, self._peers = mask, dtype, peers or Alone()
        self.weights = trainable(student.spec, student.weights)
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
        """The number of the last step; None if only time ends the training."""
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
        """Train to the end; `on_step` is called after each step. With a `checkpoint` that file is
        replaced at least every so many seconds, and at the end. Of several peers the first has the
        clock."""
        began, before = now() - self.progress.seconds, self.progress.step
        saved = now()
        with ThreadPoolExecutor(1) as pool:  # the next batch is made while this one is learnt from
            coming = pool.submit(self._batches.at, self.progress.step)
            while self.share < 1.0:
                batch = coming.result()
                coming = pool.submit(self._batches.at, self.progress.step + 1)
                self._step(batch, lambda: now() - began)
                on_step(self.progress)
                if checkpoint is not None and now() - saved >= every:
                    self.save(checkpoint)
                    saved = now()
        if checkpoint is not None and self.progress.step > before:
            self.save(checkpoint)

    def _step(self, batch: list[Windows], elapsed: Callable[[], float]) -> None:
        """The rate, what is divided by, and what is kept of it are those of all peers together."""
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
        # waits for the device, which would else fall behind what the clock says was done
        own = float(sum(losses)) if losses else 0.0
        loss, seconds = self._peers.add([own, 0.0 if self._peers.rank else elapsed()])
        if not math.isfinite(loss):
            raise MachineError(
                f"training: the loss of step {done.step + 1} is not finite; begin anew in another "
                "--out, with a smaller --learning-rate"
            )
        done.step += 1
        done.seconds = seconds
        done.guesses += guesses
        done.tokens += int(sums[1])
        done.loss = loss if done.loss is None else 0.95 * done.loss + 0.05 * loss

    def _learn(self, part: Windows, guesses: int) -> Tensor:
        """Add the gradient of some windows' part of the loss; returns that part. `guesses`: of the
        whole batch."""
        target, student = self._target, self._student
        with torch.no_grad():
            due = run(target.spec, target.weights, part, None).flatten(0, 1)[part.known]
        weights = cast(student.weights, self._dtype)
        found = run(student.spec, weights, part, self._mask).flatten(0, 1)
        loss = divergence(
            found.index_select(0, part.student),
            head_of(student.weights, student.vocab),
            due,
            head_of(target.weights, student.vocab),
            guesses_of(part, student.vocab),
        )
        loss = loss / guesses
        loss.backward()
        return loss.detach()

    def save(self, path: Path) -> None:
        """Weights, AdamW's state and what was done, in one step. MachineError if there is no
        room."""
        state = {
            "weights": {name: weight.detach() for name, weight in self.weights.items()},
            "optimiser": self._optimiser.state_dict(),
            "progress": asdict(self.progress),
        }
        try:
            replace_file(path, lambda stream: torch.save(state, stream)).close()
        except (OSError, RuntimeError) as error:  # torch says the latter of a full disk
            raise MachineError(f"{path}: cannot write the checkpoint: {error}") from None

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint of the same training, with however many peers. MachineError if
        it cannot be read."""
        try:
            state = torch.load(path, map_location=self._device, weights_only=True)
        except Exception as error:  # torch raises many kinds at a file that is none of its own
            reason = (str(error).splitlines() or [""])[0]
            raise MachineError(
                f"{path}: the checkpoint cannot be read ({reason}); remove it to train anew"
            ) from None
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(state["weights"][name])
        self._optimiser.load_state_dict(state["optimiser"])
        self.progress = Progress(**state["progress"])


def guesses_of(part: Windows, vocab: int) -> Guesses:
    """What the loss is to know of them. A token from `vocab` on is none that a student could
    guess; the last one stands for it."""
    layout = part.layout
    shares = [1.0, *(layout.groups * count / layout.window for count in layout.counts)]
    scarcity = part.tokens.new_tensor([1.0 / share for share in shares], dtype=torch.float32)
    worth = part.tokens.new_tensor(worths(len(shares)), dtype=torch.float32)
    return Guesses(
        part.begins,
        part.of,
        part.before,
        part.tokens.flatten()[part.target + 1].clamp(max=vocab - 1),
        scarcity[part.place],
        worth[part.place],
        len(shares),
    )
