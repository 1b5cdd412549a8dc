"""`auto` begins a repeat with what its last run of the same cell has learnt, as later jobs do."""

from types import SimpleNamespace

from devices import at_once, run_batch

from bass_cli.bench.preparation import Bench
from bass_cli.bench.runs import Key
from bass_cli.engine.contracts import ControllerInput


def bench_of(drafter):
    speculation = SimpleNamespace(max=8, coupling="shared")
    settings = SimpleNamespace(job=SimpleNamespace(speculation=speculation))
    loops = SimpleNamespace(of=lambda method: loop)
    batch = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    loop = SimpleNamespace(drafter=drafter, batch=batch)
    return Bench(settings, None, None, loops, {}, None, None)


def test_later_repeats_of_auto_begin_with_learnt_costs():
    bench = bench_of(SimpleNamespace(longest=8, at_once=True))
    first, other = Key(8, "auto"), Key(4, "auto")
    auto = bench.lengths(first)
    inputs = ControllerInput(100.0, samples=tuple(range(8)), rooms=(100,) * 8)
    assert auto.next(8, inputs) == 0, "a job without costs begins with a plain round"
    run_batch(auto, at_once, [0.8] * 8, tokens=200)
    bench.learnt[first] = auto.learned()
    assert bench.lengths(first).next(8, inputs) > 2, "it drafts at once"
    assert bench.lengths(other).next(4, inputs) == 0, "another cell begins anew"
