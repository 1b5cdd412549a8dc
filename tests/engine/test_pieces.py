"""Rounds of rows that grow: captured, launched ahead, with drafts of models that lag behind, in the
kernels of a GPU; what is put back, and that a row always comes to its end."""

import collections
import itertools

import pytest
import torch
from bounds import bounded
from checkpoints import FAMILIES, write_checkpoint
from fakes import FakeGraphs, Ticks
from test_captured import Tour, pair  # noqa: F401 (a fixture)
from toys import AtOnce, drafter_for, plain

import bass_kernels as ops
from bass_cli.drafting.factory import make_drafter
from bass_cli.engine.batch import Batch, Row, beyond
from bass_cli.engine.deadline import Clock
from bass_cli.engine.step import Loop
from bass_cli.lengths.controllers import Bass, Fixed
from bass_cli.model.decoder import Decoder
from bass_cli.model.runner import Runner
from bass_cli.model.slabs import Pieces
from bass_cli.model.weights import load, open_checkpoint

LIMIT, LONGEST = 60, 7
BESIDE = beyond(LONGEST) + 3
PROMPTS = [[5, 6, 7, 8, 9], [4], list(range(3, 40))]
MOST = 4


def rows(n=3):
    """Of very unequal limits."""
    limits = itertools.cycle([LIMIT, 7, 25, 3, 44, 12, LIMIT - 1])
    return [
        Row(str(p), s, 3, list(tokens), next(limits), temperature=0.7 * s, top_p=0.95)
        for p, tokens in enumerate(PROMPTS)
        for s in range(n)
    ]


def loop_of(target, draft, *, lengths, total, batch=5, graphs=True, limit=LIMIT, beside=BESIDE):
    """A loop whose rows share so many pieces."""
    pieces, ticks = Pieces(total, MOST, -(-(limit + beside) // MOST), beside), Ticks()
    words = {"rows": batch, "span": limit + beside - 3, "pieces": pieces}
    if isinstance(draft, str):
        drafter = drafter_for(draft, rows=batch)
    else:
        at_once = isinstance(draft, AtOnce)
        drafter = make_drafter(
            "parallel:model" if at_once else "model",
            runner=Runner(draft.model if at_once else draft, lag=2, **words),
            mask=draft.mask if at_once else None,
            coupling="shared",
            temperature=None,
        )
    loop = Loop(
        batch=Batch(rows=batch, context=128, device=torch.device("cpu"), pieces=pieces),
        target=Runner(target, lag=1, **words),
        drafter=drafter,
        lengths=lengths,
        coupling="shared",
        clock=Clock(ticks),
        graphs=FakeGraphs(ticks) if graphs else None,
    )
    loop._worth.pays = lambda waiting: True  # every round that may is launched ahead
    return loop


def again(row):
    return Row(
        row.key, row.sample, row.seed, row.prompt, row.limit,
        temperature=row.temperature, top_k=row.top_k, top_p=row.top_p,
    )  # fmt: skip


def finish(loop, rows):
    """Draw all rows, as many at once as there are places; {(key, sample): tokens}, rows put back,
    rows that grew in a round, and rows that ended in one in which they had grown."""
    for row in {row.key: row for row in rows}.values():
        loop.open(row.key, row.tokens)
    waiting, out, ended, back, grown, last = collections.deque(rows), {}, [], 0, [], 0
    while waiting or len(loop.batch) > len(ended):
        room = loop.batch.room(0, ended=ended)
        loop.exchange(ended, [waiting.popleft() for _ in range(min(room, len(waiting)))])
        sizes = {id(row): loop.batch.slabs.runs[1, row.place] for row in loop.batch.hosts}
        for row in loop.grow():
            waiting.append(again(row))
            back += 1
        larger = [
            row for row in loop.batch.hosts if loop.batch.slabs.runs[1, row.place] > sizes[id(row)]
        ]
        grown.append(len(larger))
        loop.launch()
        loop.round(ahead=True)
        hosts = loop.batch.hosts
        ended = [place for place, row in enumerate(hosts) if row.room <= 0]
        last += sum(row in larger for row in (hosts[place] for place in ended))
        for row in (hosts[place] for place in ended):
            out[row.key, row.sample] = row.tokens[row.prompt_length :][: row.limit]
    loop.exchange(ended, [])
    assert loop.batch.slabs.free == loop.batch.slabs.pieces.total
    return out, back, sum(grown), last


@pytest.mark.parametrize(("graphs", "total"), [(True, 2 * MOST + 1), (False, MOST)])
def test_rows_that_grow_are_plain_decodings(pair, graphs, total):
    """Whatever drafts, and whether rounds are launched before the last one's tokens are known."""
    target, draft = pair
    due, counts = plain(target, rows()), [0, 0, 0]
    for drafter in (draft, AtOnce(draft, 300), "lookup", "none"):
        lengths = Bass(limit=LONGEST) if drafter == "lookup" else Tour()
        loop = loop_of(target, drafter, lengths=lengths, total=total, graphs=graphs)
        found, *seen = finish(loop, rows())
        assert found == due, drafter
        counts = [one + other for one, other in zip(counts, seen, strict=True)]
    assert all(counts), counts


def test_a_row_always_comes_to_its_end(pair):
    """With place for one, however many are admitted: of those that grow the longest goes on."""
    target, _ = pair
    many = [Row("0", s, 1, PROMPTS[0], LIMIT) for s in range(5)]
    loop = loop_of(target, "none", lengths=Fixed(0), total=MOST)
    found, back, _, _ = finish(loop, many)
    assert {len(tokens) for tokens in found.values()} == {LIMIT}
    assert 4 <= back < 20
    assert found == plain(target, [again(row) for row in many])


@pytest.mark.parametrize("schedule", ["ragged", "pad"])
def test_the_kernels_touch_nothing_but_the_store(pair, schedule, tmp_path, monkeypatch):
    """In the interpreter, with addresses held against tensors, rows that grow and dummies among
    them."""
    few = [Row(str(p), 0, 3, PROMPTS[p], 9 - 5 * p) for p in (0, 1)]
    due = plain(pair[0], [again(row) for row in few])
    write_checkpoint(FAMILIES[0], tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    ops.use("triton")
    ops.attention_schedule(schedule)
    try:
        with bounded(monkeypatch):
            weights = load(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
            target = Decoder(checkpoint.spec, weights)
            draft = target.keep_layers([0])
            words = {"total": MOST, "batch": 3, "limit": 9, "beside": beyond(1) + 3}
            loop = loop_of(target, draft, lengths=Fixed(1), **words)
            found, _, grown, _ = finish(loop, few)
    finally:
        ops.use(None)
        ops.attention_schedule("ragged")
    assert grown > 0
    assert found == due
