"""The bookkeeping of the key/value store: spans are shared, freed and grown, rows move, and the
batch's rows stay in step."""

import numpy
import pytest
import torch
from fakes import count_operations
from torch.utils._python_dispatch import TorchDispatchMode

from bass_cli.drafts.factory import DraftParts, make_drafter
from bass_cli.engine.batch import Batch, Row
from bass_cli.engine.clock import Clock
from bass_cli.engine.loop import Loop
from bass_cli.engine.sampling import RowSampling, noise_key
from bass_cli.lengths.controllers import Fixed
from bass_cli.models import kv_cache
from bass_cli.models.block_allocator import BlockAllocator, BlockLayout
from bass_cli.models.kv_cache import KVCache, Layers
from bass_cli.models.runner import Runner
from bass_kernels import SPARE_KEYS


class _NoLayers:
    """A minimal decoder, as a Runner uses it."""

    cached, dtype, device = (Layers(1, 1, 2),), torch.float32, torch.device("cpu")
    reader = ranks = recurrent = None

    def forward(self, tokens, step, *, last=None):
        return None


def store(rows=4, span=8):
    return KVCache(
        [Layers(2, 2, 4)], rows=rows, span=span, dtype=torch.float32, device=torch.device("cpu")
    )


def test_prompt_spans_never_overlap_and_are_reused():
    cache = store()
    a, b, c = cache.reserve(300), cache.reserve(0), cache.reserve(500)
    assert {(a.start, a.length), (c.start, c.length)} == {(0, 300), (300, 500)}
    cache.close(a)
    small, large = cache.reserve(200), cache.reserve(900)
    assert small.start == 0
    assert large.start >= 800
    assert cache.prompt_keys[1].shape[1] >= large.start + 900
    assert b.length == 0


def test_store_that_grows_keeps_its_content():
    cache = store()
    span = cache.reserve(900)
    cache.prompt_values[1][:, :900] = 7
    cache.reserve(5000)
    assert cache.prompt_values[1].shape[1] >= 5900
    assert (cache.prompt_values[1][:, span.start : span.start + 900] == 7).all()


@pytest.mark.parametrize(
    ("free", "positions"), [(16 * 3.25, 4096), (16 * 3.25 - 0.1, 2048), (1.25, 2048), (1.2, 1040)]
)
def test_store_grows_more_if_much_memory_is_free(monkeypatch, free, positions):
    """In stores of 1,024 positions, which one is there at first, of four tensors: growing takes
    what is new, and for a moment one of the four once more. 10 positions more are needed, and come by 16."""
    cache = store()
    assert cache.positions == 1024
    monkeypatch.setattr(kv_cache, "free_memory", lambda device: int(free * (128 << 10)))
    span = cache.reserve(1034)
    assert (span.start, cache.positions) == (0, positions)


def test_store_that_cannot_grow_raises_memory_error(monkeypatch):
    cache = store()
    monkeypatch.setattr(kv_cache, "free_memory", lambda device: 0)
    with pytest.raises(MemoryError, match="1034 positions"):
        cache.reserve(1034)
    assert cache.positions == 1024


def test_span_is_freed_when_closed_and_without_rows():
    cache = store()
    span = cache.reserve(10)
    cache.swap_rows(begun=[([0], span)])
    cache.swap_rows(begun=[([1], span)])
    cache.close(span)
    cache.swap_rows(ended=[1])
    assert cache.reserve(10).start == 10
    cache.swap_rows(ended=[0])
    assert cache.reserve(10).start == 0


def test_rows_of_a_prompt_are_grouped_and_moved_rows_keep_their_keys():
    cache = store()
    spans = [cache.reserve(5), cache.reserve(3)]
    for row, which in enumerate((0, 1, 0, 0)):
        cache.swap_rows(begun=[([row], spans[which])])
    cache.own_keys[1][:, 32:34] = 9  # row 3's, behind what is aside
    cache.swap_rows(ended=[1])
    cache.swap_rows(moved=[(3, 1)])
    step = cache.decode_pass(torch.tensor([[6], [7], [6]]), [7, 8, 7])
    assert [(g.start, g.length, g.rows) for g in step.segments.groups] == [(0, 5, slice(0, 3))]
    assert step.segments.base.tolist() == [5, 5, 5]
    assert step.slots().tolist() == [[9], [34], [25]]
    assert step.segments.extent == 3
    assert (cache.own_keys[1][:, step.slots()[1] - 2] == 9).all()


class Copies(TorchDispatchMode):
    """Count the copies between tensors of more than two numbers."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += function is torch.ops.aten.copy_.default and arguments[0].numel() > 2
        return function(*arguments, **(options or {}))


def test_row_moves_without_a_copy_and_layers_are_plain_tensors():
    cache = store(rows=3, span=6)
    for row in (0, 2):
        cache.swap_rows(begun=[([row], cache.reserve(4 + row))])
    for layer in (*cache.own_keys, *cache.own_values):
        assert layer.is_contiguous()
        assert layer.shape == (2, 6 + 3 * 6 + SPARE_KEYS, 4)
    with Copies() as copies:
        cache.swap_rows(moved=[(2, 1)])
    assert copies.count == 1  # of the numbers that say where rows are
    positions = torch.tensor([[4], [6]])
    assert cache.decode_pass(positions, [5, 7]).slots().tolist() == [[6], [18]]
    assert cache.bytes() == 4 * (4 * 2 * (24 + SPARE_KEYS) * 4 + 4 * 2 * 1024 * 4)


@pytest.mark.parametrize("moved", [2**26, 1500, 1])
def test_rows_that_grow_keep_their_keys(moved, monkeypatch):
    """One row's new blocks are those that the one before it has left; and however little is
    copied at once, each is read before it is written."""
    monkeypatch.setattr("bass_cli.models.kv_cache._COPY_BYTES", moved)
    allocator, whole = BlockAllocator(4, BlockLayout(6, 4, 6, 5)), torch.Generator().manual_seed(0)
    cache = KVCache(
        [Layers(2, 2, 4), Layers(1, 1, 3)],
        rows=4,
        span=22,
        dtype=torch.float32,
        device=torch.device("cpu"),
        blocks=allocator.blocks,
    )
    layers = (*cache.own_keys, *cache.own_values)
    assert {layer.shape[1] for layer in layers} == {5 + 6 * 6 + SPARE_KEYS}
    for layer in layers:
        layer.copy_(torch.randn(layer.shape, generator=whole))
    allocator.swap_rows((), (), range(4))
    span = cache.reserve(3)
    cache.swap_rows(begun=[(range(4), span)], runs=allocator.runs.copy())

    def held():
        slots = 5 + 6 * allocator.runs[0]
        return [[layer[:, at : at + 6].clone() for at in slots] for layer in layers]

    before, untouched = held(), [layer[:, :5].clone() for layer in layers]
    places = allocator.runs.copy()
    allocator.swap_rows([3], (), ())
    copied = [allocator.grow(row, 2) for row in (2, 0, 1)]
    assert None not in copied
    assert any(
        later.target <= one.source < later.target + later.blocks
        for i, one in enumerate(copied)
        for later in copied[i + 1 :]
    ), "no row is copied to where another had been"
    cache.swap_rows(ended=[3], runs=allocator.runs.copy(), copied=copied)
    for layer, old, now, aside in zip(layers, before, held(), untouched, strict=True):
        assert all(was.equal(is_) for was, is_ in zip(old[:3], now[:3], strict=True))
        assert layer[:, :5].equal(aside)
    positions = torch.tensor([[3 + 11]] * 3)
    slots = cache.decode_pass(positions, [15] * 3).slots()[:, 0]
    assert slots.tolist() == (5 + 6 * allocator.runs[0, :3] + 11).tolist()
    assert not (places[0, :3] == allocator.runs[0, :3]).all()
    with pytest.raises(AssertionError, match="lacks 1 private slots"):
        cache.decode_pass(positions + 1, [16] * 3)


def groups_of(cache, rows, size=4):
    """The tables as a captured pass reads them: members, and tiles without empty places."""
    segments = cache.decode_pass(torch.zeros(rows, 1, dtype=torch.int64), None).segments
    tiles = [
        [row for row in tile if row >= 0] for tile in segments.device_groups.tiles[size].tolist()
    ]
    return segments.device_groups.member.tolist(), [tile for tile in tiles if tile]


def test_prefix_groups_follow_rows_that_begin_end_and_move(monkeypatch):
    monkeypatch.setattr("bass_cli.models.kv_cache._SHARED_FROM", 128)
    cache = store(rows=8)
    long, other, short = cache.reserve(200), cache.reserve(300), cache.reserve(3)
    cache.swap_rows(begun=[([0], long)])
    assert (
        cache.decode_pass(torch.zeros(1, 1, dtype=torch.int64), None).segments.device_groups is None
    )
    version = cache.version
    cache.swap_rows(begun=[([1], other)])
    cache.swap_rows(begun=[([2], long)])
    assert cache.version == version + 1  # from now on passes are launched with groups
    tables = cache.decode_pass(torch.zeros(8, 1, dtype=torch.int64), None).segments.device_groups
    for row, span in enumerate((short, short, other, long, long), 3):
        cache.swap_rows(begun=[([row], span)])
    assert groups_of(cache, 8) == ([1, 1, 1, 0, 0, 1, 1, 1], [[0, 2, 6, 7], [1, 5]])
    cache.swap_rows(ended=[0])
    cache.swap_rows(moved=[(7, 0)])
    assert groups_of(cache, 8) == ([1, 1, 1, 0, 0, 1, 1, 0], [[0, 2, 6], [1, 5]])
    cache.swap_rows(ended=[5])
    cache.swap_rows(moved=[(6, 5)])
    assert groups_of(cache, 6) == ([1, 0, 1, 0, 0, 1], [[0, 2, 5]])
    with pytest.raises(AssertionError, match="all rows"):
        groups_of(cache, 5)
    for row in range(6):
        cache.swap_rows(ended=[row])
    assert cache.version == version + 1
    assert (
        tables.member.tolist() == [0] * 8
    )  # the addresses that a captured pass reads are always the same
    assert all((table == -1).all() for table in tables.tiles.values())


def test_row_that_outgrows_its_slots_fails_an_assertion():
    cache = store(span=4)
    cache.swap_rows(begun=[([0], cache.reserve(2))])
    cache.decode_pass(torch.tensor([[5]]), [6])
    with pytest.raises(AssertionError, match="private slots"):
        cache.decode_pass(torch.tensor([[6]]), [7])


def test_batch_stays_dense_and_columns_follow_their_rows():
    batch = Batch(rows=3, context=8, device=torch.device("cpu"))
    rows = [
        Row(
            str(i),
            i,
            5,
            [i] * (i + 1),
            20,
            sampling=RowSampling(temperature=i / 2, top_k=i, top_p=1 - i / 10),
        )
        for i in range(3)
    ]
    for row in rows:
        batch.swap_rows([], [row])
    assert batch.swap_rows([0], []).moved == ((2, 0),)
    assert batch.live_rows == [rows[2], rows[1]]
    assert batch.lengths[:2].tolist() == [3, 2]
    assert batch.params.temperature.tolist() == [1.0, 0.5]
    assert batch.params.top_k.tolist() == [2, 1]
    assert batch.params.keys[0].tolist() == list(noise_key(5, "2", 2))
    assert batch.tokens[0, :3].tolist() == [2, 2, 2]
    assert batch.swap_rows([1], []).moved == ()


def admitted_together_and_one_by_one(groups):
    """Two loops with toy-sized stores and the same rows: each group admitted together, or its
    rows one by one."""
    loops = []
    for together in (True, False):
        runners = [Runner(_NoLayers(), rows=6, span=30, pending=pending) for pending in (1, 2)]
        drafter = make_drafter(
            "model", DraftParts(runner=runners[1], coupling="shared", temperature=None)
        )
        loop = Loop(
            batch=Batch(rows=6, context=8, device=torch.device("cpu")),
            target=runners[0],
            drafter=drafter,
            controller=Fixed(2),
            coupling="shared",
            clock=Clock(),
        )
        for group in groups():
            for key in {row.key: row for row in group}.values():
                loop.open(key.key, key.tokens)
            for rows in [group] if together else [[row] for row in group]:
                loop.admit(*rows)
        loops.append((loop, runners))
    return loops


def test_rows_admitted_together_equal_rows_admitted_one_by_one():
    """Prompts of unequal length in one call and in several, rows that hold other numbers before,
    tokens that outgrow the batch."""

    def groups():
        def row(key, sample, length, **more):
            return Row(
                key,
                sample,
                9,
                [int(key) + 10 + i for i in range(length)],
                5 + sample,
                RowSampling(**more),
            )

        return (
            [row("1", 0, 4, temperature=0.5, top_k=3, top_p=0.9), row("1", 1, 4, temperature=0.0)],
            [row("2", 0, 1), row("3", 4, 12, top_k=7), row("3", 2, 12, top_p=0.25)],
        )

    (one, ours), (other, theirs) = admitted_together_and_one_by_one(groups)
    for name in ("lengths", "_fixed"):
        assert getattr(one.batch, name).equal(getattr(other.batch, name)), name
    for index, row in enumerate(one.batch.live_rows):
        assert one.batch.tokens[index, : len(row.tokens)].tolist() == row.tokens
        assert one.batch.params.keys[index].tolist() == list(noise_key(9, row.key, row.sample))
    assert one.batch._params.top_k.tolist() == [3, 0, 0, 7, 0, 0]
    assert one.batch._params.top_p.tolist() == pytest.approx([0.9, 1, 1, 1, 0.25, 1])
    assert one.batch._alive.tolist() == [1, 1, 1, 1, 1, 0]
    for mine, due in zip(ours, theirs, strict=True):
        assert mine.cache._places.equal(due.cache._places)
        assert [mine.cache.base(row) for row in range(5)] == [
            due.cache.base(row) for row in range(5)
        ]
    assert ours[1].cache._base.tolist() == [2, 2, 0, 10, 10, 0]
    assert one.drafter._fed.tolist() == other.drafter._fed.tolist() == [2, 2, 0, 10, 10, 0]


def test_row_changes_take_few_operations():
    """Each operation is a launch on a GPU: eight rows take as many as one row."""

    def operations(ended, begun):
        batch, cache = Batch(rows=16, context=64, device=torch.device("cpu")), store(rows=16)
        rows = [Row("p", i, 0, [1, 2, 3], 9) for i in range(16)]
        span = cache.reserve(2)

        def change(ended, rows):
            found = batch.swap_rows(ended, rows)
            cache.swap_rows(
                ended=found.ended,
                moved=found.moved,
                runs=found.runs,
                begun=[(places, span) for places, _ in found.begun],
            )
            return found

        change([], rows[:8])
        return count_operations(lambda: change(ended, rows[8 : 8 + begun]))

    assert operations([], 8) == operations([], 1) < 20
    assert operations([5, 6, 7], 0) == operations([7], 0) <= 4
    assert operations([0, 1, 2, 4], 0) == operations([0], 0) <= 16
    assert operations([0, 3, 5, 7], 4) == operations([3], 1) < 20
    assert operations([0, 3, 5], 1) <= 30


def test_new_rows_fill_freed_places_before_rows_are_moved():
    batch = Batch(rows=6, context=32, device=torch.device("cpu"))
    rows = [
        Row(str(i), i, 5, [i] * (i + 1), 20, sampling=RowSampling(temperature=1 + i / 2))
        for i in range(12)
    ]
    for ended, begun, moved, due in (
        ((), range(6), (), [0, 1, 2, 3, 4, 5]),
        ((3, 1), (6, 7), (), [0, 6, 2, 7, 4, 5]),
        ((0, 5), (8,), (), [8, 6, 2, 7, 4]),
        ((0, 1, 4), (9,), ((3, 1),), [9, 7, 2]),
        ((0, 1), (), ((2, 0),), [2]),
        ((0,), (10, 11), (), [10, 11]),
    ):
        change = batch.swap_rows(ended, [rows[i] for i in begun])
        assert change.moved == moved
        assert batch.live_rows == [rows[i] for i in due]
        assert [row.index for row in batch.live_rows] == list(range(len(due)))
        assert batch.lengths.tolist() == [i + 1 for i in due] + [1] * (6 - len(due))
        assert batch.params.temperature.tolist() == [1 + i / 2 for i in due]
        assert batch._alive.tolist() == [1] * len(due) + [0] * (6 - len(due))
        for place, row in enumerate(batch.live_rows):
            assert batch.tokens[place, : row.length].tolist() == row.tokens
            assert batch.params.keys[place].tolist() == list(noise_key(5, row.key, row.sample))
        assert all(rows[i].index == -1 for i in range(12) if i not in due)


def test_moved_row_keeps_its_tokens():
    """Some rows end and others move between rounds; a row that has left is complete, and one that
    took its place begins with nothing."""
    batch = Batch(rows=3, context=32, device=torch.device("cpu"))
    rows = [Row(str(i), 0, 0, [i], 9) for i in range(5)]

    def take(*gained):
        block = numpy.array([[*tokens, *[99] * (3 - len(tokens))] for tokens in gained])
        counts = numpy.array([[len(tokens) - 1] for tokens in gained])
        scores = (-block).astype(numpy.float32).view(numpy.int32)
        table = numpy.concatenate((counts, block, scores), axis=1)
        batch.host_state.take(table, numpy.arange(len(gained)), width=2, num_drafts=2)

    batch.swap_rows([], rows[:3])
    take([10], [11, 12, 13], [14, 15])
    batch.swap_rows([0], [])
    take([16, 17], [18])
    batch.swap_rows([0], [rows[3], rows[4]])
    take([20], [21], [22, 23, 24])
    assert [row.tokens for row in rows] == [
        [0, 10],
        [1, 11, 12, 13, 18, 21],
        [2, 14, 15, 16, 17],
        [3, 20],
        [4, 22, 23, 24],
    ]
    for row in rows:
        assert row.log_probabilities == [-token for token in row.tokens[1:]]
    assert [(row.rounds, row.drafted, row.accepted) for row in rows] == [
        (1, 2, 0),
        (3, 6, 2),
        (2, 4, 2),
        (1, 2, 0),
        (1, 2, 2),
    ]
    rows[4].truncate(1)
    assert rows[4].tokens == [4, 22]
    assert (rows[4].accepted, rows[4].room, rows[4].log_probabilities) == (1, 8, [-22.0])


def test_commit_appends_each_rows_tokens_and_last_reads_them():
    batch = Batch(rows=2, context=16, device=torch.device("cpu"))
    for i, tokens in enumerate(([1, 2, 3], [4])):
        batch.swap_rows([], [Row(str(i), 0, 0, tokens, 10)])
    batch.commit(torch.tensor([[10, 11, 12], [20, 21, 22]]), torch.tensor([0, 2]))
    assert batch.lengths.tolist() == [4, 4]
    tokens, positions = batch.last(2)
    assert tokens.tolist() == [[3, 10], [21, 22]]
    assert positions.tolist() == [[2, 3], [2, 3]]
    tokens, positions = batch.last(6, torch.tensor([1, 0]))
    assert positions.tolist() == [[1, 1, 1, 1, 2, 3], [0, 0, 0, 1, 2, 3]]
    assert tokens[0].tolist() == [2, 2, 2, 2, 3, 10]
    version = batch.version
    batch.swap_rows([1], [Row("long", 0, 0, list(range(1, 41)), 200)])
    assert batch.version > version  # it has moved, and counts as far as it is long now
    assert batch.positions(-2, 3).tolist() == [[2, 3, 4], [38, 39, 40]]
    assert batch.steps(0, 170).tolist() == list(range(170))
    tokens, positions = batch.pending(torch.tensor([[7, 8], [9, 9]]))
    assert tokens.tolist() == [[10, 7, 8], [40, 9, 9]]
    assert positions.tolist() == [[3, 4, 5], [39, 40, 41]]


def test_noise_keys_differ_in_seed_prompt_and_sample():
    keys = {noise_key(s, p, i) for s in (0, 1, 12) for p in ("a", "b", "1") for i in (0, 1, 2, 11)}
    assert len(keys) == 3 * 3 * 4
    assert all(0 <= word < 2**32 for key in keys for word in key)
