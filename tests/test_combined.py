"""Lookup beside a model: plain decoding's tokens, the better of the two in every row, and a cache that misses nothing."""

import pytest
import torch
from checkpoints import FAMILIES, write_checkpoint
from fakes import FakeGraphs, Ticks
from toys import SPAN, Markov, Reactive, drive, loop_for, plain, rows_for

from bass_cli.draft import make_drafter
from bass_cli.engine.batch import Batch, Row
from bass_cli.engine.clock import Clock
from bass_cli.engine.goodput import Goodput
from bass_cli.engine.lengths import Bass, Fixed
from bass_cli.engine.loop import Loop
from bass_cli.model.decoder import Decoder
from bass_cli.model.runner import Runner
from bass_cli.model.weights import load, open_checkpoint

VOCAB = 6
PROMPTS = ([1], [0, 1, 2, 3], [5, 4, 5, 4, 3, 5, 4])


def table(seed=0, sharpness=4.0):
    return torch.randn(2, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * sharpness


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target, and a draft that has not much in common with it."""
    both = []
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp("model")
        write_checkpoint(FAMILIES[0], folder)
        checkpoint = open_checkpoint(folder)
        weights = load(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
        generator = torch.Generator().manual_seed(seed)
        both.append(Decoder(checkpoint.spec, {name: w + seed * w.std() * torch.randn(w.shape, generator=generator)
                                              if w.dim() > 1 else w for name, w in weights.items()}))
    return tuple(both)


@pytest.fixture(scope="module")
def target(pair):
    return pair[0]


def captured(target, *, rows, lengths):
    """A loop with fake graphs in which the target drafts for itself, beside lookup."""
    ticks = Ticks()
    runner = Runner(target, rows=rows, span=SPAN, lag=2)
    return Loop(batch=Batch(rows=rows, context=128, device=torch.device("cpu")), coupling="shared",
                drafter=make_drafter("lookup+model", runner=runner, coupling="shared", temperature=None),
                target=Runner(target, rows=rows, span=SPAN, lag=1), lengths=lengths, clock=Clock(ticks),
                graphs=FakeGraphs(ticks))


def admit(loop, live):
    loop.open("0", live[0].tokens)
    for row in live:
        loop.admit(row)


class Moody:
    """Makes lookup look worse than any model, or better, in turns of three rounds; the first turn has no lookup."""

    def __init__(self, drafter):
        self._offer, self._rounds, self._drafter = drafter.offer, 0, drafter
        drafter.offer = self

    def __call__(self, batch, length):
        self._drafter._chance = 2.0 if self._rounds // 3 % 2 == 0 else 0.0
        self._rounds += 1
        offered = self._offer(batch, length)
        self.forced = self._drafter._given.counts.tolist()
        self.given = offered is not None
        return offered


@pytest.mark.parametrize("draft", ["lookup", "lookup:own", "lookup:prompt,siblings"])
@pytest.mark.parametrize("better", [-0.1, 0.5, 2.0])
def test_tokens_are_plain_decodings(draft, better):
    """Whatever the model is thought to be worth: every row takes lookup's drafts, some do, none does."""
    due, taken = plain(Markov(table(), 1), rows_for(PROMPTS, 4, limit=30, temperature=0.8)), set()
    for rows, lengths in ((1, Fixed(4)), (5, Reactive()), (12, Bass()), (3, Goodput(limit=6))):
        loop = loop_for(Markov(table(), 1), draft, beside=Markov(table(1), 2), rows=rows, lengths=lengths)
        offer = loop.drafter.offer

        def offering(batch, length, loop=loop, offer=offer):
            loop.drafter._chance = better
            found = offer(batch, length)
            counts = found.counts if found else loop.drafter._given.counts[: len(batch)].tolist()
            taken.update(count > 0 for count in counts)
            return found

        loop.drafter.offer = offering
        assert drive(loop, rows_for(PROMPTS, 4, limit=30, temperature=0.8)) == due, f"{rows} rows, {lengths}"
    assert taken == ({False} if better > 1 else {False, True})


@pytest.mark.parametrize("graphs", [False, True])
def test_the_models_cache_is_in_step_after_rounds_of_lookup(target, graphs):
    """The target drafts for itself, so in rows without lookup's tokens every draft stands if the cache is right: after
    rounds in which the model ran on lookup's tokens, on wrong ones too, and after rounds in which it did not run."""
    live = [Row("0", s, 1, [5, 6, 5, 6, 5, 6], 76, temperature=0.7) for s in range(3)]
    loop = (captured(target, rows=3, lengths=Fixed(3)) if graphs
            else loop_for(target, "lookup", beside=target, rows=3, lengths=Fixed(3)))
    admit(loop, live)
    moody, seen = Moody(loop.drafter), {"given": 0, "mixed": 0, "after": 0}
    for number in range(18):
        if number % 6 == 5:  # what comes next is looked up, wrongly
            for sample in loop.drafter._lookup._samples:
                sample.indexes[0].extend(sample.indexes[0].begin([*sample.row.tokens[-4:], 0, 0, 0, 0]))
        done = loop.round()
        seen["given"] += moody.given
        seen["mixed"] += not moody.given and any(moody.forced)
        for kept, forced in zip(done.accepted, moody.forced, strict=True):
            if not moody.given and forced == 0:
                assert kept == done.width == 3
                seen["after"] += number > 3
    assert min(seen.values()) > 0, seen


def test_the_model_is_fed_with_what_was_looked_up(pair):
    """Row 0 looks up what it will be, and the model would have drafted something else: its cache must hold the former."""
    live = [Row("0", s, 1, [5, 6, 7, 8], 40, temperature=1.2) for s in range(2)]
    due = plain(pair[0], [Row("0", 0, 1, [5, 6, 7, 8], 40, temperature=1.2)])["0", 0]
    loop = loop_for(pair[0], "lookup:reference", beside=pair[1], rows=2, lengths=Fixed(3))
    loop.drafter._chance = 0.0
    loop.open("0", live[0].tokens, [8, *due])
    for row in live:
        loop.admit(row)
    done = [loop.round() for _ in range(5)]
    assert sum(it.accepted[0] for it in done if it.drafted is None) > 6
    loop.drafter._model.propose(loop.batch, 1)  # repairs the last two
    fresh = loop_for(pair[0], pair[1], rows=1, lengths=Fixed(1))
    fresh.open("0", live[0].tokens)
    found, full = loop.drafter._model._runner.cache, fresh.drafter._runner.cache
    base, end = found.base(0), len(live[0].tokens) - 2
    for own, prompt in zip(found.own_keys, full.prompt_keys, strict=True):
        torch.testing.assert_close(own[0, :, : end - base], prompt[:, base:end], rtol=1e-4, atol=1e-4)


def test_the_model_goes_on_where_lookup_ends():
    """Lookup gives one right token of four; the target as its own draft adds the other three."""
    law = Markov(table(), 1)
    loop = loop_for(law, "lookup", beside=Markov(table(), 2), rows=1, lengths=Fixed(4))
    dues = ((seed, plain(law, [Row("0", 0, seed, [1, 2], 20, temperature=3.0)])["0", 0]) for seed in range(20))
    seed, due = next(found for found in dues if found[1][0] not in (1, 2))
    row = Row("0", 0, seed, [1, 2], 20, temperature=3.0)
    loop.drafter._chance = 0.0
    loop.open("0", row.tokens, [2, due[0]])
    loop.admit(row)
    done = loop.round()
    assert loop.drafter._given.counts.tolist()[0] == 1
    assert (done.width, done.accepted, row.tokens[2:]) == (4, (4,), due[:5])


def test_the_model_does_not_run_where_every_row_has_a_full_draft():
    law, fed = Markov(table(), 1), []
    draft = Markov(table(1), 2)
    loop = loop_for(law, "lookup", beside=draft, rows=2, lengths=Fixed(3))
    forward, feed = draft.forward, draft.feed
    draft.forward = lambda *a, **k: fed.append("forward") or forward(*a, **k)
    draft.feed = lambda *a: fed.append("feed") or feed(*a)
    admit(loop, [Row("0", s, 0, [1, 2, 3, 4, 1, 2], 30) for s in range(2)])
    loop.drafter._chance = 0.0
    done = loop.round()
    assert (done.width, fed, done.steady, done.drafted) == (3, [], False, (3, 3))
    loop.drafter._chance = 2.0
    assert loop.round().width == 3
    assert fed == ["feed"] + ["forward"] * 3, "the model took in what it had missed, and drafted"


def test_what_the_models_drafts_are_worth_is_learnt_from_rows_of_its_own():
    loop = loop_for(Markov(table(), 1), "lookup", beside=Markov(table(), 2), rows=2, lengths=Fixed(4))
    live = [Row("0", s, 0, [1, 2], 60) for s in range(2)]
    admit(loop, live)
    moody = Moody(loop.drafter)
    moody._offer = lambda batch, length: loop.drafter.__class__.offer(loop.drafter, batch, length)
    for _ in range(3):
        loop.round()
    loop.drafter._chance = 0.5
    loop.drafter._learn()
    assert loop.drafter._chance == pytest.approx(1 - 0.5 * 0.98**8), "two rows kept all four"
    loop.drafter._learn()
    assert loop.drafter._chance == pytest.approx(1 - 0.5 * 0.98**8), "once only"


def test_graphs_of_both_kinds_are_prepared(target):
    loop = captured(target, rows=3, lengths=Fixed(3))
    loop.prepare(range(1, 4), range(4))
    before = loop.graphs.captures
    Moody(loop.drafter)
    drive(loop, [Row("0", s, 1, [5, 6, 5, 6, 5, 6], 50, temperature=0.7) for s in range(3)])
    assert loop.graphs.captures == before
    held = {(shape.kind, shape.width) for shape in loop.graphs.held() if shape.rows == 2}
    assert held >= {("given", 1), ("given", 2), ("given", 3), ("round", 0), ("round", 3)}
    assert ("given", 0) not in held, "a plain round is a plain round"
