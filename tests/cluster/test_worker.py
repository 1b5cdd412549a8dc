"""A worker in this process, without Ray: parts in, the library's own samples out, faults as data."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from bass_cli import Completion, Job, Pair, Sampling, generate
from bass_cli.cluster.worker import JobSpec, Part, Ready, Report, Worker
from bass_cli.io.prompts import Prompt
from bass_cli.system.children import Fault

PROMPTS = [Prompt(f"p{i}", f"the cat {i}", None, {"k": i}, None, f"x:{i}") for i in range(4)]
LONG = Prompt("long", "cat " * 5000, None, {}, None, "x:9")


def job(model: Path, temperature: float = 1.0) -> Job:
    sampling = Sampling(seed=3, max_new_tokens=8, temperature=temperature)
    pair = Pair(name="tiny", target=str(model), draft="lookup")
    return Job(pair=pair, n=4, device="cpu", sampling=sampling, token_ids=True, batch_size=3)


def fixed(found: Iterable[Completion]) -> dict[tuple[str, int], Any]:
    """Return the fields that a seed determines, by sample."""
    return {
        (one.id, one.sample): (one.text, one.token_ids, one.finish_reason, one.meta, one.seed)
        for one in found
    }


def fetch(worker: Worker, parts: list[Part]) -> list[Completion]:
    """Return all samples of these parts."""
    found, expected = list[Completion](), sum(len(part.samples) for part in parts)
    for _ in range(600):
        report = worker.exchange(parts, 0.1)
        assert isinstance(report, Report)
        assert report.fault is None
        assert 0 <= report.busy <= report.rows == 3
        found += report.completions
        parts = []
        if len(found) >= expected:
            return found
    raise AssertionError("it draws nothing any more")


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_parts_in_any_order_equal_one_process(model: Path, temperature: float) -> None:
    """A prompt may come again for its other samples after the worker was idle."""
    settings = job(model, temperature)
    expected = fixed(generate(PROMPTS, settings))
    worker = Worker(JobSpec(settings, {"prompts": "x"}, 4, PROMPTS[0].text or ""))
    ready = worker.prepare()
    assert isinstance(ready, Ready)
    assert ready.facts.manifest["results"]["prompts"] == "x"
    parts = [[(3, (0, 1, 2, 3)), (1, (2,))], [(1, (0, 3)), (0, (1, 2, 3, 0))], [(1, (1,))]]
    found = [
        one
        for chunk in parts
        for one in fetch(worker, [Part(PROMPTS[i], samples) for i, samples in chunk])
    ]
    keys = {(f"p{i}", number) for i, number in itertools.product((0, 1, 3), range(4))}
    assert len(found) == len(keys)
    assert fixed(found) == {key: expected[key] for key in keys}


def test_a_failed_prompt_is_one_line_and_others_continue(model: Path) -> None:
    worker = Worker(JobSpec(job(model), {}, None, ""))
    assert isinstance(worker.prepare(), Ready)
    (failed,) = fetch(worker, [Part(LONG, (1,))])
    assert failed.is_of_prompt
    assert "context" in (failed.error or "")
    assert len(fetch(worker, [Part(PROMPTS[0], (1, 2))])) == 2


def test_a_driver_reads_events_without_importing_torch(model: Path) -> None:
    """The import takes seconds, during which its workers have nothing to do."""
    worker = Worker(JobSpec(job(model), {}, None, ""))
    ready = worker.prepare()
    events = [ready, worker.exchange([Part(PROMPTS[0], (0,))], 60.0)]
    assert isinstance(events[1].completions[0], Completion)
    code = (
        "import pickle, sys; ready, report = pickle.load(sys.stdin.buffer); "
        "print('torch' in sys.modules, ready.facts.manifest['versions']['torch'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(events), capture_output=True, check=True
    )
    assert done.stdout.decode().split() == ["False", str(torch.__version__)]


def test_faults_are_data(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = Worker(JobSpec(job(tmp_path / "nowhere"), {}, None, "")).prepare()
    assert isinstance(nowhere, Fault)
    assert (nowhere.kind, "nowhere" in nowhere.text) == ("user", True)
    worker = Worker(JobSpec(job(model), {}, None, ""))
    worker.prepare()
    monkeypatch.setattr("bass_cli.run.engine.load_models", lambda *_: {}["weights"])
    report = worker.exchange([Part(PROMPTS[0], (0,))], 60.0)
    assert report.fault is not None
    assert report.fault.kind == "bug"
    assert "KeyError: 'weights'" in report.fault.text
