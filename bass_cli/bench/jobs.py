"""Time a whole `bass generate` job, the same with actors, and other engines on the same prompts.

Each run is a new process, timed from start to exit; the engines take turns. grid.py times rounds
alone; rivals.py runs another engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bass_cli.bench import rivals
from bass_cli.bench.figures import spread
from bass_cli.bench.texts import task_of
from bass_cli.errors import MachineError, UserError
from bass_cli.io.prompts import Prompt
from bass_cli.models.spec import Format
from bass_cli.run.plan import Plan
from bass_cli.run.tasks import Task, TaskBuilder

_POLL = 0.2  # seconds between two readings of a GPU's memory
_OURS, _ON_RAY = "bass", "bass --ray"
_COLUMNS = ("engine", "wall s", "least-most", "start", "decode", "tokens/s", "busy", "host GB",
            "GPU GB")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ran:
    """Measurements of a process that succeeded. Fields are None if unknown.

    seconds: wall clock from start to exit. generating: seconds of decoding, as the engine reports.
    starting: seconds outside of the job: Python, imports, checking the models, starting actors,
    exit; for a rival, loading too. busy: mean share of rows in use. host, gpu: peak bytes.
    """

    seconds: float
    generating: float
    starting: float
    tokens: int
    samples: int
    busy: float | None
    host: int | None
    gpu: int | None


def measure(
    plan: Plan,
    prompts: Sequence[Prompt],
    command: Sequence[str],
    *,
    on_ray: Sequence[str] = (),
    engines: Sequence[str],
    repeats: int,
    note: Callable[[str], None],
) -> dict[str, Any]:
    """Run every engine once in each repeat and return the document.

    Args:
        command: arguments of `bass` for the job, without --out.
        on_ray: further arguments for a run with actors; empty for none.
        engines: rivals that are installed.

    Raises:
        UserError: a prompt cannot be run.
        MachineError: a process failed; the message ends with its last line of output.
    """
    builder = TaskBuilder.of(plan)
    try:
        tasks = [task_of(builder, prompt) for prompt in prompts]
    except UserError as error:
        raise UserError(f"--job: {error}") from None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours = [sys.executable, "-m", "bass_cli", *command, "--json", "--quiet"]
        commands = {_OURS: ours} | ({_ON_RAY: [*ours, *on_ray]} if on_ray else {})
        for rival in engines:
            file = folder / f"{rival}.json"
            file.write_text(json.dumps(_job_of(plan, tasks, rival)), encoding="utf-8")
            commands[rival] = [sys.executable, "-m", rivals.__name__, str(file)]
        runs: dict[str, list[Ran]] = {engine: [] for engine in commands}
        for repeat in range(repeats):
            for engine, words in commands.items():
                note(f"run {repeat + 1} of {repeats}: {engine}")
                file = folder / f"{repeat}{'-ray' * (engine == _ON_RAY)}.jsonl"
                out = ["--out", str(file)] if engine in (_OURS, _ON_RAY) else []
                runs[engine].append(_run(engine, [*words, *out], plan.device.type == "cuda"))
    return {
        "job": {
            "prompts": len(prompts),
            "n": plan.job.n,
            "rows": plan.rows,
            "target": plan.job.pair.target,
            "draft": plan.job.pair.draft,
            "device": plan.device.type,
            "dtype": Format(plan.dtype, plan.layouts).name,
            "command": list(command),
            "on_ray": list(on_ray),
        },
        "engines": {engine: _figures(found) for engine, found in runs.items()},
    }


def table(document: dict[str, Any]) -> tuple[Sequence[str], list[list[str]]]:
    """Return the columns and rows of the table."""

    def size(value: int | None) -> str:
        return "-" if value is None else f"{value / 1e9:.2f}"

    return _COLUMNS, [
        [
            engine,
            f"{one['seconds']['median']:.1f}",
            f"{one['seconds']['least']:.1f}-{one['seconds']['most']:.1f}",
            f"{one['starting_seconds']:.1f}",
            f"{one['generating_seconds']:.1f}",
            f"{one['tokens_per_second']:.1f}",
            "-" if one["rows_busy"] is None else f"{one['rows_busy']:.0%}",
            size(one["host_bytes"]),
            size(one["gpu_bytes"]),
        ]
        for engine, one in document["engines"].items()
    ]


def _figures(runs: Sequence[Ran]) -> dict[str, Any]:
    seconds = [run.seconds for run in runs]
    busy, host, gpu = (
        [value for run in runs if (value := getattr(run, name)) is not None]
        for name in ("busy", "host", "gpu")
    )
    middle, least, most = spread(seconds)
    return {
        "seconds": {"median": middle, "least": least, "most": most},
        "starting_seconds": statistics.median(run.starting for run in runs),
        "generating_seconds": statistics.median(run.generating for run in runs),
        "tokens_per_second": statistics.median(run.tokens / run.seconds for run in runs),
        "tokens": statistics.median(run.tokens for run in runs),
        "samples": runs[0].samples,
        "rows_busy": statistics.median(busy) if busy else None,
        "host_bytes": max(host, default=None),
        "gpu_bytes": max(gpu, default=None),
        "runs": seconds,
    }


def _job_of(plan: Plan, tasks: Sequence[Task], engine: str) -> dict[str, Any]:
    """Make the job file of a rival. Prompts are token ids, so that all engines get the same.

    UserError if the model's context cuts the output of any.
    """
    if own := [task.prompt for task in tasks if task.prompt.settings]:
        raise UserError(
            f"--job: {own[0].place}: rivals run all prompts with the same settings; leave out "
            f'"{next(iter(own[0].settings))}", or --rivals'
        )
    short = [task for task in tasks if task.limit < plan.job.sampling.max_new_tokens]
    if short:
        raise UserError(
            f"--job: {short[0].prompt.place}: {len(short)} prompts, this one first, leave no "
            "room for --max-new-tokens in the model's context, which engines handle in different "
            "ways; remove them, or give fewer --max-new-tokens"
        )
    prompts = [task.tokens for task in tasks]
    description = rivals.describe(plan, longest=max(map(len, prompts)), rows=plan.rows)
    return description | {"engine": engine, "n": plan.job.n, "prompts": prompts}


def _run(engine: str, command: Sequence[str], cuda: bool) -> Ran:
    """Run a command to its end, without BASS_ variables: the command has all options."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("BASS_")}
    began = time.perf_counter()
    with (
        tempfile.TemporaryFile("w+") as written,
        tempfile.TemporaryFile("w+") as errors,
        _gpu_memory(cuda) as peak,
    ):
        process = subprocess.Popen(command, stdout=written, stderr=errors, env=environment)
        try:
            _, status, used = os.wait4(process.pid, 0)
        except BaseException:
            process.terminate()
            process.wait()
            raise
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        written.seek(0)
        errors.seek(0)
        lines, words = written.read().splitlines(), errors.read().strip().splitlines()
    ours = engine in (_OURS, _ON_RAY)
    if process.returncode or not lines:
        last = words[-1] if words else f"exit code {process.returncode}"
        raise MachineError(f"{engine}: the job failed: {last}")
    done = json.loads(lines[-1])
    generating = done["decoding_seconds" if ours else "generating_seconds"]
    most = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Ran(
        seconds,
        generating,
        seconds - (done["seconds"] if ours else generating),
        done["tokens"],
        done["samples"],
        done["usage"]["rows_busy"] if ours else None,
        most if engine != _ON_RAY else None,  # the actors hold the models, not this process
        peak[0],
    )


@contextlib.contextmanager
def _gpu_memory(cuda: bool) -> Iterator[list[int | None]]:
    """Yield a list with the peak bytes of the first GPU so far, above those in use at the start.

    Its entry is None without a GPU or without nvidia-smi.
    """
    before = _gpu_bytes() if cuda else None
    peak: list[int | None] = [None]
    if before is None:
        yield peak
        return
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_POLL):
            peak[0] = max(peak[0] or 0, (_gpu_bytes() or before) - before)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def _gpu_bytes() -> int | None:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10)
        return int(found.stdout.split()[0]) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
