"""Rounds launched ahead before a deadline: prompts get as many rounds as the device can do, no
round is lost or late, and a stall costs no more than elsewhere."""

import pytest
from drawing import Scheduler
from fakes import FakeGraphs, Ticks
from simulated import Simulated
from test_ahead import Flights, Settled, ready
from test_captured import captured, pair  # noqa: F401 (a fixture)
from test_scheduler import Letters, job, prompts
from thinned import thinned
from toys import plain

from bass_cli.drafts.factory import NoDrafter
from bass_cli.engine.batch import Row
from bass_cli.engine.sampling import RowSampling
from bass_cli.lengths.controllers import Fixed

ROUND = 0.0021  # of plain decoding, on these graphs


class Host(Fixed):
    """A host that works 1 ms for every round, or by round number what `stalls` says."""

    def __init__(self, ticks, stalls=None):
        super().__init__(0)
        self._ticks, self._stalls, self.rounds = ticks, stalls or {}, 0

    def observe(self, done):
        self._ticks.seconds += self._stalls.get(self.rounds, 0.001)
        self.rounds += 1


def drawn(count, *, budget, stalls=None, rows=2, batch_size="auto", n=2):
    """Return the completions of some prompts, and the rounds of the device."""
    ticks = Ticks()
    graphs = FakeGraphs(ticks)
    loop = Simulated(Host(ticks, stalls), 0.0, rows=rows, drafter=NoDrafter(), graphs=graphs)
    loop.prepare([1, 2, rows], [0])
    flights = Flights(loop)
    for _ in range(5):
        loop.clock.observe(0, ROUND)
    settings = job(n=n, max_new_tokens=400, budget=budget, batch_size=batch_size)
    scheduler = Scheduler(settings, Letters(), loop, context=1000, eos_ids=(), count=count)
    found = list(scheduler.run(iter(prompts(*["a"] * count)), ()))
    return found, graphs.count("replay"), flights


def test_prompt_gets_all_rounds_that_the_device_can_do():
    """47 rounds of 2.1 ms in 100 ms. When the device waited for the host there were 32."""
    found, replays, flights = drawn(12, budget=0.1)
    rounds = [one.rounds for one in found if one.sample == 0]
    assert rounds[-8:] == [47] * 8
    assert flights.behind > 8 * 45
    assert replays == sum(rounds), "the result of every launched round was used"
    assert max(one.seconds for one in found) <= 0.1 + 0.001, "the host's millisecond at most"
    assert {one.finish_reason for one in found} == {"budget"}


@pytest.mark.parametrize("stalled", [0.03, 0.3])
def test_stall_of_the_host_delays_a_prompt_by_at_most_a_round(stalled):
    """The round in flight during the stall is used, and no other one begins."""
    found, replays, _ = drawn(12, budget=0.1, stalls={100: stalled, 290: stalled})
    rounds = [one.rounds for one in found if one.sample == 0]
    assert replays == sum(rounds)
    assert rounds[-3:] == [47] * 3, "later prompts pay nothing"
    late = sorted(one.seconds - 0.1 for one in found)
    assert late[-5] <= ROUND, "two samples a stall"
    assert late[-1] <= max(stalled - 0.03, 0.0) + 2 * ROUND


def test_every_prompt_of_a_batch_gets_its_first_round():
    """Prompts begin while rounds of other prompts are in flight."""
    found, _, _ = drawn(9, budget=0.05, rows=4, batch_size=4)
    assert min(one.rounds for one in found) > 0
    assert max(one.seconds for one in found) <= 0.05 + 2 * ROUND


@pytest.mark.parametrize("budget", thinned([0.02, 0.06, 0.4, 0.11], 2))
def test_samples_are_prefixes_of_plain_decoding(pair, budget):
    """A draft model, changing lengths and rows that end in the middle do not affect the tokens,
    and no launched round is dropped."""
    target, draft = pair
    texts = ["h", "dbebfj", "chbicibicieaf"]
    whole = plain(
        target,
        [
            Row(f"p{p}", s, 0, Letters().encode(text), 30, sampling=RowSampling(temperature=0.8))
            for p, text in enumerate(texts)
            for s in range(3)
        ],
    )
    loop = captured(target, draft, batch=3, lengths=Settled())
    flights = ready(loop)
    settings = job(n=3, max_new_tokens=30, budget=budget, temperature=0.8, top_p=1.0, seed=0)
    scheduler = Scheduler(settings, Letters(), loop, context=100, eos_ids=())
    found = list(scheduler.run(iter(prompts(*texts)), ()))
    assert len(found) == 9
    for one in found:
        assert one.token_ids == whole[one.id, one.sample][: one.tokens]
        assert one.finish_reason == ("length" if one.tokens == 30 else "budget")
    assert flights.behind > (2 if budget < 0.05 else 10)
    assert max(one.seconds for one in found) <= budget + 0.0021 + 7 * 0.00045
