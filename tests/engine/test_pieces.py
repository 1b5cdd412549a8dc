"""Rounds of rows whose caches grow: captured, launched ahead, with draft models that lag behind,
in the kernels of a GPU; which rows are put back, and that a row always comes to its end."""

import collections
import itertools

import pytest
from bounds import bounded
from chains import write_chain
from checkpoints import FAMILIES, shallow, write_checkpoint
from decoders import load_decoder, load_head
from fakes import FakeGraphs
from heads import write_head
from test_captured import Tour, pair  # noqa: F401 (a fixture)
from toys import AtOnce, again, loop_for, plain, rows_for

import bass_kernels as ops
from bass_cli.engine.batch import Row, beyond
from bass_cli.engine.sampling import RowSampling
from bass_cli.formats.draft_heads import open_head
from bass_cli.lengths.controllers import Bass, Fixed
from bass_cli.models.block_allocator import BlockLayout
from bass_kernels import ragged

LIMIT, LONGEST = 60, 7
BESIDE = beyond(LONGEST) + 3
PROMPTS = [[5, 6, 7, 8, 9], [4], list(range(3, 40))]
MOST = 4


def rows(n=3):
    """Return rows of very unequal limits."""
    limits = itertools.cycle([LIMIT, 7, 25, 3, 44, 12, LIMIT - 1])
    return rows_for(
        PROMPTS,
        n,
        seed=3,
        limit=lambda p, s: next(limits),
        temperature=lambda p, s: 0.7 * s,
        top_p=0.95,
    )


def loop_of(target, draft, *, lengths, total, batch=5, graphs=True, limit=LIMIT, beside=BESIDE):
    """Return a loop whose rows share this many blocks; None: each row has all its blocks from
    the beginning. draft: a model, a draft head, a word, or a drafter."""
    loop = loop_for(
        target,
        draft,
        rows=batch,
        lengths=lengths,
        graphs=FakeGraphs() if graphs else None,
        span=limit + beside - 3,
        blocks=total and BlockLayout(total, MOST, -(-(limit + beside) // MOST), beside),
    )
    loop._ahead_policy.pays = lambda waiting: True  # every round that may is launched ahead
    return loop


def finish(loop, rows):
    """Draw all rows, as many at once as there are places. Return {(key, sample): tokens}, rows
    put back, rows that grew in a round, and rows that ended in a round in which they had grown."""
    for row in {row.key: row for row in rows}.values():
        loop.open(row.key, row.tokens)
    waiting, out, ended, back, grown, last = collections.deque(rows), {}, [], 0, [], 0
    while waiting or len(loop.batch) > len(ended):
        room = loop.batch.room(0, ended=ended)
        loop.swap_rows(ended, [waiting.popleft() for _ in range(min(room, len(waiting)))])
        sizes = {id(row): loop.batch.allocator.runs[1, row.index] for row in loop.batch.live_rows}
        for row in loop.grow():
            waiting.append(again(row))
            back += 1
        larger = [
            row
            for row in loop.batch.live_rows
            if loop.batch.allocator.runs[1, row.index] > sizes[id(row)]
        ]
        grown.append(len(larger))
        loop.launch()
        loop.round(ahead=True)
        live_rows = loop.batch.live_rows
        ended = [place for place, row in enumerate(live_rows) if row.room <= 0]
        last += sum(row in larger for row in (live_rows[place] for place in ended))
        for row in (live_rows[place] for place in ended):
            out[row.key, row.sample] = row.tokens[row.prompt_length :][: row.limit]
    loop.swap_rows(ended, [])
    assert loop.batch.allocator.free == loop.batch.allocator.blocks.total
    return out, back, sum(grown), last


@pytest.mark.parametrize(
    ("graphs", "total"), [(True, 2 * MOST + 1), pytest.param(False, MOST, marks=pytest.mark.slow)]
)
def test_growing_rows_give_the_tokens_of_plain_decoding(pair, graphs, total):
    """With every drafter, and whether or not rounds are launched ahead."""
    target, draft = pair
    due, counts = plain(target, rows()), [0, 0, 0]
    for drafter in (draft, AtOnce(draft, 300), "lookup", "none"):
        lengths = Bass(limit=LONGEST) if drafter == "lookup" else Tour()
        loop = loop_of(target, drafter, lengths=lengths, total=total, graphs=graphs)
        found, *seen = finish(loop, rows())
        assert found == due, drafter
        counts = [one + other for one, other in zip(counts, seen, strict=True)]
    assert all(counts), counts


def test_some_row_always_finishes(pair):
    """With blocks for one row, however many are admitted: the longest one continues."""
    target, _ = pair
    many = [Row("0", s, 1, PROMPTS[0], LIMIT) for s in range(5)]
    loop = loop_of(target, "none", lengths=Fixed(0), total=MOST)
    found, back, _, _ = finish(loop, many)
    assert {len(tokens) for tokens in found.values()} == {LIMIT}
    assert 4 <= back < 20
    assert found == plain(target, [again(row) for row in many])


class Proposed:
    """The drafts of every round of a loop."""

    def __init__(self, loop):
        self.all = []
        self._batch, self._propose = loop.batch, loop.drafter.propose
        loop.drafter.propose = self

    def __call__(self, batch, length):
        proposal = self._propose(batch, length)
        self.all.append(proposal.tokens[: len(batch)].tolist())
        return proposal


@pytest.mark.parametrize("kind", ["model", "dflash", "dspark", "authors"])
def test_drafts_of_growing_rows_equal_those_of_fixed_rows(pair, kind, tmp_path):
    """Under shared coupling a draft that reads another row's keys changes no token, so drafts
    are compared, in the same rounds."""
    target, draft = pair
    if kind != "model":
        write = write_chain if kind == "authors" else write_head
        write(tmp_path, kind, width=target.spec.width, vocab=target.vocab)
        draft = load_head(open_head(tmp_path, target.spec), target)
    found, grown = [], 0
    for total in (None, 5 * MOST):
        loop = loop_of(target, draft, lengths=Tour(), total=total)
        proposed = Proposed(loop)
        found.append((finish(loop, rows(2)), proposed.all))
    (due, back, none, _), drafts = found[0]
    (tokens, back, grown, _), others = found[1]
    assert tokens == due == plain(target, rows(2))
    assert others == drafts
    assert (none, back) == (0, 0)
    assert grown > 6


@pytest.mark.parametrize("width", [0, 3])
def test_rows_grow_while_others_end_begin_and_move(pair, width):
    """Of four rows two end at once. A new row takes one place, the last row the other, and both
    that continue grow, one into blocks that have just been freed, with a round of the old rows
    in flight. The target drafts for itself: if the draft's cache did not follow, drafts would be
    rejected."""
    target, _ = pair
    loop = loop_of(target, target if width else "none", lengths=Fixed(width), total=12, batch=4)
    loop.prepare(range(1, 5), [width])
    blocks, each = loop.batch.allocator.blocks, width + 1
    soon = -(-(2 * blocks.size - blocks.extra + 1) // each) * each
    limits = (soon, soon, LIMIT, LIMIT, LIMIT)
    many = [
        Row("02"[s % 2], s, 3, PROMPTS[s % 2 * 2], limit, sampling=RowSampling(temperature=0.9))
        for s, limit in enumerate(limits)
    ]
    changes, follow = [], loop._follow

    def watched(change):
        under_way = loop._in_flight is not None and len(loop._in_flight.rows) == 4
        changes.append((change, loop.target.cache._runs.T.tolist(), under_way))
        follow(change)

    loop._follow = watched
    assert finish(loop, many)[0] == plain(target, [again(row) for row in many])
    assert [row.accepted for row in many] == [row.drafted for row in many]
    assert any(row.drafted for row in many) == (width > 0)
    at = next(i for i, (change, _, _) in enumerate(changes) if change.ended)
    (exchanged, old, flown), (grown, _, _) = changes[at : at + 2]
    assert (exchanged.ended, exchanged.moved) == ((0, 1), ((3, 1),))
    assert exchanged.begun == (((0,), "0"),)
    assert flown
    assert len(grown.copied) == 2
    left = {block for row in exchanged.ended for block in range(old[row][0], sum(old[row]))}
    assert any(
        left.intersection(range(one.target, one.target + one.blocks))
        for one in grown.copied
        if one.source != one.target
    ), "keys were copied to where a row that has just ended had its own"


@pytest.mark.parametrize("schedule", [pytest.param("ragged", marks=pytest.mark.slow), "pad"])
def test_kernels_access_only_the_cache(schedule, tmp_path, monkeypatch):
    """In Triton's interpreter, with addresses checked against tensors, with growing rows and
    padding rows."""
    few = [Row(str(p), 0, 3, PROMPTS[p], 9 - 5 * p) for p in (0, 1)]
    write_checkpoint(FAMILIES[0], tmp_path, **shallow(FAMILIES[0]))
    due = plain(load_decoder(tmp_path), [again(row) for row in few])
    ops.use("triton")
    ops.attention_schedule(schedule)
    with bounded(monkeypatch):
        target = load_decoder(tmp_path)
        draft = target.keep_layers([0])
        words = {"total": MOST, "batch": 3, "limit": 9, "beside": beyond(1) + 3}
        loop = loop_of(target, draft, lengths=Fixed(1), **words)
        found, _, grown, _ = finish(loop, few)
    assert grown > 0
    assert found == due


def test_rows_in_a_shared_prefix_group_grow(pair, monkeypatch):
    """With the kernel's groups at width 1, in the interpreter; one row ends, and the last one
    takes its place. A short row and a padding row are in no group."""
    target, _ = pair
    few = [
        Row(
            "02"[s < 3],
            s,
            3,
            PROMPTS[2 * (s < 3)],
            2 if s == 1 else 5,
            sampling=RowSampling(temperature=0.9),
        )
        for s in range(4)
    ]
    due = plain(target, [again(row) for row in few])
    monkeypatch.setattr("bass_cli.models.kv_cache._SHARED_FROM", 30)
    monkeypatch.setattr(ragged, "_members", lambda lines, rows: 4)
    plainly = ops.attention
    monkeypatch.setattr(
        ops,
        "attention",
        lambda *given, **words: (ragged.attention if given[3].extent else plainly)(*given, **words),
    )
    launch, groups = ragged._launch, []

    def watched(q, own, prompt, segments, tiling, *given):
        if segments.extent and tiling.members > 1:
            groups.append(segments.device_groups.member.tolist())
        return launch(q, own, prompt, segments, tiling, *given)

    monkeypatch.setattr(ragged, "_launch", watched)
    words = {"total": 16, "batch": 5, "limit": 5, "beside": beyond(0) + 3}
    found, _, grown, _ = finish(loop_of(target, "none", lengths=Fixed(0), **words), few)
    assert found == due
    assert grown > 2
    assert [1, 1, 1, 0] in [group[:4] for group in groups]
    assert any(group[:4] == [1, 0, 1, 0] for group in groups)
