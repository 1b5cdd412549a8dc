"""Train a draft from the sample file: measure, train, measure again, and write the draft.

`TrainingRun` is the whole; `Trainer` takes the steps, with checkpoints from which an interrupted
run resumes. Weights, gradients and AdamW's means are float32; on a GPU the computation is in
bfloat16. command.py and group.py are the callers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from bass_cli.distill.agreement import Acceptance, divergence, measure_acceptance
from bass_cli.distill.exchange import PeerLostError, Peers
from bass_cli.distill.folder import config_of, write_folder
from bass_cli.distill.network import Model, Source, run, student_weights
from bass_cli.distill.sampling import seconds_of, texts_of
from bass_cli.distill.settings import PASSES, Training, windows_at_once
from bass_cli.distill.windows import Batches, Corpus, Windows, split, whole
from bass_cli.errors import MachineError, UserError
from bass_cli.formats.tokenizer import Tokenizer
from bass_cli.formats.weights import load_plain
from bass_cli.io.console import Estimate, clock
from bass_cli.io.saving import replace_file
from bass_cli.run.plan import Plan
from bass_cli.system.host import free_memory

_INTERVAL = 60.0  # seconds of training between two measurements on held-out texts
_ANCHORS = 16  # anchors in each of the two groups of a held-out window
_WINDOWS, _FEW = 48, 8  # held-out windows before and after the training, and during it
TEMPERATURES = (1.0, 0.8)  # temperatures at which acceptance is measured
WARM_UP = 0.04  # share of the training in which the learning rate rises
_LEAST = 0.05  # final learning rate, as a share of the peak
# AdamW's betas; the second is smaller than usual because there are only some hundred steps
_BETAS = (0.9, 0.95)
_NORM = 1.0  # largest gradient norm; longer gradients are clipped
SECONDS = 300.0  # between checkpoints; a kill loses at most this much training


class Places(NamedTuple):
    """The files of a distillation."""

    folder: Path
    settings: Path
    samples: Path
    checkpoint: Path
    draft: Path
    pair: Path
    report: Path

    @classmethod
    def of(cls, folder: Path) -> Places:
        return cls(
            folder,
            folder / "distill.json",
            folder / "samples.jsonl",
            folder / "checkpoint.pt",
            folder / "draft",
            folder / "pair.yaml",
            folder / "report.json",
        )


class Shown(Protocol):
    """Receives progress: a Screen, or a Rank."""

    def phase(self, name: str) -> None: ...
    def note(self, message: str) -> None: ...
    def watching(
        self, line: Callable[[], str], share: Callable[[], float | None]
    ) -> AbstractContextManager[Callable[[], None]]: ...


class TrainingRun:
    """The models and texts of a training.

    Args:
        peers: processes that train together. Only rank 0 measures and writes.
        beside: processes that share this one's memory, itself included.
        every: seconds between checkpoints.
    """

    def __init__(
        self,
        plan: Plan,
        source: Source,
        training: Training,
        places: Places,
        screen: Shown,
        *,
        peers: Peers | None = None,
        beside: int = 1,
        every: float = SECONDS,
    ):
        self._plan, self._source, self._training = plan, source, training
        self._places, self._screen = places, screen
        self._peers, self._beside, self._every = peers or Peers(), beside, every
        screen.phase("reading the samples")
        texts = texts_of(places.samples, plan)
        try:
            training_texts, held = split(texts)
        except ValueError as error:
            raise UserError(f"{places.samples}: {error}; draw more `tokens`") from None
        self._corpus = Corpus(training_texts, training.window_tokens)
        drawn = sum(len(one.tokens) - one.begins for one in texts)
        self._facts = {"samples": len(texts), "tokens": drawn, "windows": len(self._corpus)}
        self._held = self._windows(Corpus(held, training.window_tokens))
        if not len(self._corpus) or not self._held:
            raise UserError(
                f"{places.samples}: the samples are too few or too short to train on; draw more "
                "`tokens`"
            )
        device = plan.device
        if device.type == "cuda":  # without it, one attention kernel serves all shapes with a mask
            torch.backends.cuda.enable_cudnn_sdp(False)
        screen.phase("loading the weights")
        files, dtype = plan.files.target, plan.dtype
        weights = load_plain(files, dtype=dtype, device=device)
        self._target = Model(files.spec, weights, source.vocab, dtype)
        self.weights = student_weights(source, device)
        self._student = Model(source.spec, self.weights, source.vocab, dtype, source.mask)

    def _windows(self, corpus: Corpus) -> list[Windows]:
        """Make held-out windows with all masks, chosen at even distances."""
        layout = whole(self._training.window_tokens, self._training.draft_length, _ANCHORS)
        count = min(len(corpus), _WINDOWS)
        numbers = [number * len(corpus) // count for number in range(count)]
        return [corpus.windows([number], layout, [(0, number)]) for number in numbers]

    def run(self) -> dict[str, Any]:
        """Train, and return the report, ready for JSON; empty for all ranks but 0.

        "before" and "after" are acceptance on held-out texts by kind of draft; "chain" is the model
        before the training, drafting token by token. Seconds are of all runs together, None if
        unknown.
        """
        trainer = self._trainer()
        self._begin(trainer)
        self._train(trainer)
        if self._peers.rank:
            return {}
        self._screen.phase("measuring the draft")
        began, progress = time.monotonic(), trainer.progress
        after = self._measure(chain=False)
        measuring = progress.facts["seconds"] + time.monotonic() - began
        sampling = seconds_of(self._places.samples)
        return {
            "kind": "bass distill",
            "before": progress.facts["before"],
            "after": after,
            "looks": progress.facts.get("looks", []),
            "samples": self._facts,
            "training": {
                **asdict(self._training),
                "steps": progress.step,
                "tokens": progress.tokens,
                "guesses": progress.guesses,
                "loss": progress.loss,
            },
            "seconds": {
                "sampling": None if sampling is None else round(sampling, 1),
                "training": round(progress.seconds, 1),
                "measuring": round(measuring, 1),
            },
            "made_with": self._plan.identity(),
        }

    def write(self) -> None:
        """Write the draft's folder with the current weights."""
        source, checkpoint, files = self._source, self._source.checkpoint, self._plan.files
        own = checkpoint.path == files.target.path
        tokenizer = files.tokenizer if own else Tokenizer.load(checkpoint.path)
        ends = sorted({*checkpoint.eos_ids, *tokenizer.eos_ids})
        config = config_of(source.spec, eos_ids=ends, place=str(checkpoint.path))
        write_folder(
            self._places.draft,
            source.spec,
            self.weights,
            config={**config, "pard_token": source.mask},
            tokenizer=tokenizer.cached,
            dtype=self._plan.dtype,
        )

    def _trainer(self) -> Trainer:
        plan, training, peers = self._plan, self._training, self._peers
        free = free_memory(plan.device) // self._beside
        most = max(windows_at_once(plan, self._source, training, free, loaded=True), 1)
        # A step uses a window only once, so with few samples it is smaller.
        size = min(training.windows, max(len(self._corpus), peers.ranks))
        own = -(-size // peers.ranks)
        batches = Batches(
            self._corpus,
            training.layout,
            size=size,
            most=most,
            seed=training.seed,
            rank=peers.rank,
            ranks=peers.ranks,
        )
        steps = training.steps
        if steps is None and training.minutes is None:
            steps = max(-(-PASSES * len(self._corpus) // size), 1)
        limit = None if training.minutes is None else 60.0 * training.minutes
        self._screen.note(
            f"training on {len(self._corpus)} windows, {size} in a step"
            + (f", {most} at once" if most < own else "")
        )
        goal = Goal(steps, limit, training.learning_rate)
        return Trainer(self._target, self._student, batches, goal, peers)

    def _begin(self, trainer: Trainer) -> None:
        """Restore the checkpoint, or measure the untrained model if there is none."""
        began, progress = time.monotonic(), trainer.progress
        if self._places.checkpoint.exists():
            trainer.restore(self._places.checkpoint)
            progress = trainer.progress
            self._screen.note(f"resuming from step {progress.step}")
        elif not self._peers.rank:
            self._screen.phase("measuring the model before")
            progress.facts["before"] = self._measure(chain=True)
            progress.facts["seconds"] = time.monotonic() - began
        if self._peers.add([progress.step]) != [progress.step * self._peers.ranks]:
            raise PeerLostError("the checkpoint was replaced while it was read")

    def _train(self, trainer: Trainer) -> None:
        view = _View(trainer, None if self._peers.rank else self._measure_quickly)
        with self._screen.watching(view.line, lambda: trainer.share) as tick:

            def on_step(progress: Progress) -> None:
                view.step(progress)
                tick()

            path = None if self._peers.rank else self._places.checkpoint
            trainer.run(on_step, checkpoint=path, every=self._every)

    def _measure_quickly(self) -> Acceptance:
        few = self._held[:_FEW]
        return measure_acceptance(self._target, self._student, few, temperature=1.0, both=False)

    def _measure(self, *, chain: bool) -> dict[str, Any]:
        """Measure acceptance for each kind of draft and temperature."""
        kinds = {"parallel": self._student}
        if chain:
            kinds["chain"] = self._student._replace(mask=None)
        return {
            f"{kind} T={heat:g}": measure_acceptance(
                self._target, student, self._held, temperature=heat
            )._asdict()
            for kind, student in kinds.items()
            for heat in TEMPERATURES
        }


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


class _View:
    """The progress line of the training. `measure`: measures on held-out texts; None for none."""

    def __init__(self, trainer: Trainer, measure: Callable[[], Acceptance] | None):
        self._trainer, self._measure = trainer, measure
        self._first, self._began = trainer.progress.tokens, time.monotonic()
        self._measured, self._rates = trainer.progress.seconds, ""
        self._estimate = Estimate(10_000)
        self._estimate.update(round(trainer.share * 10_000), self._began)

    def step(self, progress: Progress) -> None:
        if self._measure is not None and progress.seconds - self._measured >= _INTERVAL:
            self._rates = "/".join(f"{share:.2f}" for share in self._measure().shared)
            progress.facts.setdefault("looks", []).append([progress.step, self._rates])
            self._measured = progress.seconds
        self._estimate.update(round(self._trainer.share * 10_000), time.monotonic())

    def line(self) -> str:
        done, now = self._trainer.progress, time.monotonic()
        speed = (done.tokens - self._first) / max(now - self._began, 1e-9)
        loss = "" if done.loss is None else f", loss {done.loss:.3f}"
        held = f", held-out acceptance {self._rates}" if self._rates else ""
        left = self._estimate.left(now)
        rest = "" if left is None else f", about {clock(left)} left"
        steps = self._trainer.steps
        of = "" if steps is None else f"/{steps}"
        return f"step {done.step}{of}{loss}, {speed:.0f} tokens/s{held}{rest}"
