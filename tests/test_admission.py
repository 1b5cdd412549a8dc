"""Test the work between rounds: lines of finished samples, and new prompts."""

import itertools

import pytest
import torch
from drawing import Scheduler
from fakes import FakeGraphs
from test_scheduler import EOS, TEXTS, Letters, by_key, job, prompts, run, table
from toys import Markov, loop_for

from bass_cli.engine.batch import Row
from bass_cli.lengths.controllers import Fixed
from bass_cli.models.block_allocator import Sender
from bass_cli.models.kv_cache import KVCache, Layers


def captured(*, rows):
    """A loop with captured rounds, and the device's clock."""
    graphs = FakeGraphs()
    loop = loop_for(Markov(table(), 1), "none", rows=rows, lengths=Fixed(0), graphs=graphs)
    return loop, graphs


@pytest.mark.parametrize("ahead", [False, True])
def test_lines_are_written_while_the_device_runs_the_next_round(ahead):
    """A caller that takes 2 ms a line adds no time to rounds of 2.1 ms, whether or not the next round
    is launched before the last one ends."""
    settings, given = job(n=3, max_new_tokens=15, seed=4), prompts(*TEXTS)
    expected, seconds = by_key(run(settings, given, rows=1, draft="none", lengths=Fixed(0))), []
    for takes in (0.0, 0.002):
        loop, graphs = captured(rows=4)
        loop.prepare(range(5), [0])
        loop._ahead_policy.pays = lambda waiting: ahead
        began, found, busy = graphs.ticks.seconds, [], []
        one = Scheduler(settings, Letters(), loop, context=1000, eos_ids={EOS})
        for completion in one.run(iter(given), ()):
            found.append(completion)
            busy.append(graphs._free > graphs.ticks.seconds)
            graphs.ticks.seconds += takes
            if len(found) == 8:  # all rows are live, and samples wait
                assert len(loop.batch) == 4
        seconds.append(graphs.ticks.seconds - began)
        assert by_key(found) == expected
    assert sum(busy) > 9  # the others are of rows that end together, and the last ones
    assert seconds[1] - seconds[0] < 0.5 * 0.002 * len(found)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_interruption_is_raised_after_finished_samples(kind):
    """No finished sample is lost if the next round cannot begin."""
    settings, given = job(n=3, max_new_tokens=15, seed=4), prompts(*TEXTS)
    expected = run(settings, given, rows=4, draft="none", lengths=Fixed(0))
    for after in range(1, 6):
        loop = loop_for(Markov(table(), 1), "none", rows=4, lengths=Fixed(0))
        one = Scheduler(settings, Letters(), loop, context=1000, eos_ids={EOS})
        found, swap_rows, ended = [], loop.swap_rows, []

        def exchanged(places, rows, swap_rows=swap_rows, ended=ended, after=after):
            ended.extend(places)
            if len(ended) >= after:
                raise kind
            swap_rows(places, rows)

        loop.swap_rows = exchanged
        with pytest.raises(kind):
            found.extend(one.run(iter(given), ()))
        assert len(found) == len(ended) >= after
        assert [(c.id, c.sample, c.text) for c in found] == [
            (c.id, c.sample, c.text) for c in expected[: len(found)]
        ]


def test_next_prompts_share_the_prefill_pass():
    """Prompts are opened early, up to a prefill pass and one batch of rows; with a budget they are
    not."""
    each = [2, 4, 6, 8, 10, 12]
    for budget, length, expected in ((None, 3, [4, 8, 12]), (None, 200, each), (1e9, 3, each)):
        opened, seen = [], []
        loop = loop_for(Markov(table(eos=-50.0), 1), "none", rows=4, lengths=Fixed(0))
        open_ = loop.open
        loop.open = lambda key, *a, o=open_, to=opened, **b: to.append(key) or o(key, *a, **b)
        settings = job(n=2, max_new_tokens=5, budget=budget, batch_size=4)
        one = Scheduler(settings, Letters(), loop, context=1000, eos_ids={EOS})
        one._on_round = lambda done, to=opened, at=seen: at.append(len(to))
        assert len(list(one.run(iter(prompts(*["a" * length] * 12)), ()))) == 24
        assert sorted(set(seen)) == expected


@pytest.mark.parametrize("ends", [True, False])
def test_rounds_tell_whether_samples_wait_for_a_row(ends):
    """Six samples of five tokens in four rows: the last two get their rows after five rounds. The
    prompts of an actor have no end: none is ready then."""
    loop = loop_for(Markov(table(eos=-50.0), 1), "none", rows=4, lengths=Fixed(0))
    settings = job(n=2, max_new_tokens=5, batch_size=4)
    seen = []
    one = Scheduler(
        settings,
        Letters(),
        loop,
        context=1000,
        eos_ids={EOS},
        on_round=lambda done: seen.append(done),
    )
    source = itertools.chain(prompts("a", "ab", "abc"), () if ends else itertools.repeat(None))
    assert len(list(itertools.islice(one.run(source, ()), 6))) == 6
    assert [(len(done.accepted), done.refills) for done in seen] == [(4, True)] * 5 + [
        (2, False)
    ] * 5


def test_changes_between_rounds_are_sent_in_one_copy(monkeypatch):
    """There is one copy for the batch and one for a cache, however many rows change."""
    sent = []
    send = Sender.send
    monkeypatch.setattr(
        Sender, "send", lambda self, array: (sent.append(self), send(self, array))[1]
    )
    loop, _ = captured(rows=8)
    rows = [Row("p", sample, 0, [1, 2, 3], 9) for sample in range(8)]
    loop.open("p", rows[0].tokens)
    loop.admit(*rows[:6])
    cache = KVCache(
        [Layers(2, 1, 8)], rows=8, span=12, dtype=torch.float32, device=torch.device("cpu")
    )
    cache.swap_rows(begun=[((0, 1, 2), cache.reserve(3))])
    sent.clear()
    loop.swap_rows([1, 4], rows[6:7])  # one takes a place, one moves
    cache.swap_rows(ended=[0], moved=[(2, 0)])
    assert sent == [loop.batch._sender, cache._sender]
    assert [row.sample for row in loop.batch.live_rows] == [0, 6, 2, 3, 5]
    assert loop.batch.tokens[:5, :3].tolist() == [[1, 2, 3]] * 5
    loop.batch.live_rows[1].limit = 3
    assert (loop.batch.rooms(), loop.batch.most_room()) == ([9, 3, 9, 9, 9], 9)
