"""Triton's ragged attention against its definition: rows with and without shared-prefix groups,
windows, schedules, and any order of programs. Keys that no query sees are NaN.

They run on a CUDA device if there is one, otherwise in Triton's interpreter.
"""

import contextlib
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from bounds import bounded
from test_triton import DEVICE, DTYPES, close, randn

import bass_kernels as ops
from bass_cli.models.kv_cache import TILES, GroupTables, KVCache, Layers, most_tiles
from bass_kernels import reference

pytest.importorskip("triton")
# prompt of each row: start, length
SPANS = [(3, 70), (3, 70), (80, 111), None, (3, 70), (80, 111), (200, 40), None]
# private keys of each row before the pass; the last row is padding
USED = [4, 90, 1, 77, 6, 30, 12, 0]
SPAN, STORE = 150, 250


@pytest.fixture(autouse=True)
def triton():
    ops.use("triton")


def case(
    width, dtype=torch.float32, *, heads=6, kv_heads=2, size=16, spans=SPANS, used=USED, shift=None
):
    """Queries, private and prompt keys and values, segments, and the expected result. shift:
    subtracted from a row's positions."""
    rows = len(spans)
    base = torch.tensor([s[1] if s else 0 for s in spans], device=DEVICE)
    start = torch.tensor([s[0] if s else 0 for s in spans], device=DEVICE)
    positions = (base + torch.tensor(used, device=DEVICE))[:, None] + torch.arange(
        width, device=DEVICE
    )
    for row, back in (shift or {}).items():
        positions[row] -= back
    prompt = tuple(randn(kv_heads, STORE, size, dtype=dtype, seed=i) for i in range(2))
    own = tuple(randn(kv_heads, rows * SPAN, size, dtype=dtype, seed=2 + i) for i in range(2))
    q = randn(rows, width, heads, size, dtype=dtype, seed=9)
    sharing = [
        [row for row in range(rows) if spans[row] == span] for span in dict.fromkeys(spans) if span
    ]
    groups = tuple(ops.Group(*spans[of[0]], torch.tensor(of, device=DEVICE)) for of in sharing)
    table = GroupTables(rows, DEVICE)
    table.update(sharing)
    slots = torch.tensor([SPAN * ((3 * row + 1) % rows) for row in range(rows)], device=DEVICE)
    if rows % 3 == 0:
        slots = SPAN * torch.arange(rows, device=DEVICE)
    segments = ops.Segments(
        positions, base, start, slots, groups, max(used) + width, table.of(rows)
    )
    return q, own, prompt, segments


def projected(given, *, norms, rotated=2):
    """What fused attention takes in place of queries: queries, keys and values before rope, angles
    [2, rows, width, places] (`rotated` pairs of a head have none), the weights of two norms or
    None, and the slots [rows, width] of the new keys."""
    q, own, _prompt, segments = given
    (rows, width, heads, size), kv_heads, dtype = q.shape, own[0].shape[0], q.dtype
    qkv = randn(rows * width, (heads + 2 * kv_heads) * size, dtype=dtype, seed=8)
    places = torch.arange(size // 2 - rotated, device=DEVICE)
    turns = segments.positions[..., None] * (0.3 + places)
    angles = torch.stack((turns.cos(), turns.sin()))
    weights = tuple(randn(size, dtype=dtype, seed=seed) for seed in (5, 6)) if norms else None
    return qkv, angles, weights, segments.positions + (segments.own - segments.base)[:, None]


def due(given, window, scale=0.25):
    """Compute the expected result. A window that excludes nothing makes the definition mask the
    prompt by position too."""
    q, own, prompt, segments = given
    return reference.attention(
        q.float(),
        tuple(t.float() for t in own),
        tuple(t.float() for t in prompt),
        segments,
        scale=scale,
        window=window or 10**6,
    )


def poisoned(given):
    """The same with NaN where no query sees: private slots beyond a row's last position, and the
    store outside all spans."""
    q, own, prompt, segments = given
    last = (segments.positions.amax(1) - segments.base)[:, None]
    hidden = torch.arange(SPAN, device=DEVICE) > last
    hidden = hidden[segments.own.argsort()].flatten()
    outside = torch.ones(STORE, dtype=torch.bool, device=DEVICE)
    for group in segments.groups:
        outside[group.start : group.start + group.length] = False
    own = tuple(t.masked_fill(hidden[:, None], torch.nan) for t in own)
    return q, own, tuple(t.masked_fill(outside[:, None], torch.nan) for t in prompt), segments


def run(given, **options):
    from bass_kernels.ragged import attention

    return attention(*poisoned(given), scale=options.pop("scale", 0.25), **options)


# float32 is covered by the cases below and by whole decoders
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(
    ("splits", "width", "window"),
    [(3, 1, 0), (1, 9, 0), (3, 9, 75), (1, 33, 0), (3, 1, 20), (1, 4, 1)],
)
def test_rows_without_groups(dtype, splits, width, window):
    given = case(width, dtype, spans=SPANS[:5], used=USED[:5])
    close(run(given, window=window, splits=splits, members=1), due(given, window), dtype)


@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 64, 128, 256] if DEVICE.type == "cuda" else [16])
def test_windows_with_fewer_lines_than_a_tile(size, dtype, sunk):
    """24 lines of 32. The compiled kernel once saw no keys here, with heads of 256."""
    given = case(8, dtype, size=size, spans=SPANS[:5], used=USED[:5])
    sinks = randn(6, dtype=dtype, seed=5) if sunk else None
    words = {"scale": 0.25, "window": 40, "sinks": sinks}
    close(run(given, members=1, **words), naive(given, **words).float(), dtype)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(4, 4, 64), (8, 1, 80), (7, 1, 128), (2, 1, 256)]
)
def test_shapes(heads, kv_heads, size):
    given = case(5, heads=heads, kv_heads=kv_heads, size=size, spans=SPANS[:5], used=USED[:5])
    close(
        ops.attention(*poisoned(given), scale=size**-0.5), due(given, 0, size**-0.5), torch.float32
    )


@pytest.mark.parametrize(
    ("members", "splits", "group_splits", "width", "window"),
    [(2, 1, 1, 1, 0), (4, 2, 3, 3, 75), (8, 1, 2, 3, 0), (4, 1, 2, 1, 20), (4, 1, 1, 3, 2)],
)
def test_shared_prefix_groups(members, splits, group_splits, width, window):
    given = case(width)
    close(
        run(given, window=window, splits=splits, group_splits=group_splits, members=members),
        due(given, window),
        torch.float32,
    )


def test_a_launch_resets_its_counters():
    given = case(1, kv_heads=1)
    for members in (4, 1, 4):
        close(run(given, splits=2, group_splits=2, members=members), due(given, 0), torch.float32)


@pytest.mark.parametrize(("members", "window"), [(1, 0), (4, 0), (4, 30)])
def test_queries_inside_the_prompt_see_earlier_keys(members, window):
    """Row 1 begins two positions before its private keys, row 5 ends before them, row 6 is alone on
    its prompt."""
    given = case(3, kv_heads=1, used=[4, 0, 1, 77, 6, 0, 0, 0], shift={1: 2, 5: 40, 6: 4})
    close(
        run(given, window=window, splits=2, group_splits=2, members=members),
        due(given, window),
        torch.float32,
    )


@pytest.mark.parametrize("window", [0, 30])
@pytest.mark.parametrize("schedule", ["ragged", "pad", "split"])
def test_prefill_tiles_have_no_private_keys(schedule, window, monkeypatch):
    """Three tiles of one prompt and two of another. Under every schedule a tile has no private keys
    to read or to be padded to."""
    spans, tiles = [(3, 37), (60, 90)], [(0, 5), (0, 21), (0, 36), (1, 60), (1, 89)]
    end, start = (torch.tensor([spans[s][i] for s, _ in tiles], device=DEVICE) for i in (1, 0))
    last = torch.tensor([position for _, position in tiles], device=DEVICE)
    positions = (last[:, None] - 3 + torch.arange(4, device=DEVICE)).clamp(min=0)
    groups = tuple(
        ops.Group(
            *span, torch.tensor([i for i, tile in enumerate(tiles) if tile[0] == s]).to(DEVICE)
        )
        for s, span in enumerate(spans)
    )
    prompt = tuple(randn(2, STORE, 16, seed=i) for i in range(2))
    given = (
        randn(5, 4, 6, 16, seed=9),
        prompt,
        prompt,
        ops.Segments(positions, end, start, start, groups, 0),
    )
    wanted = due(given, window)
    ops.attention_schedule(schedule)
    from bass_kernels.ragged import attention

    with bounded(monkeypatch) if DEVICE.type == "cpu" else contextlib.nullcontext():
        found = attention(*given, scale=0.25, window=window)
    close(found, wanted, torch.float32)


@pytest.mark.parametrize("window", [0, 30])
def test_a_long_prefill_of_one_prompt_uses_causal_attention(window, monkeypatch):
    """37 tokens, the last of 61, in tiles of 16, one of them partial. With a window the ragged
    kernel runs. Values before and behind the prompt have no effect."""
    from bass_kernels import ragged

    monkeypatch.setattr(ragged, "_MANY", 37)
    tokens, end, start = 37, 61, 20
    positions = torch.full((48,), end - 1, device=DEVICE)
    positions[:tokens] = torch.arange(end - tokens, end, device=DEVICE)
    tiles = torch.full((3,), end, device=DEVICE)
    group = ops.Group(start, end, slice(0, 3), tokens)
    segments = ops.Segments(
        positions.view(3, 16),
        tiles,
        torch.full_like(tiles, start),
        torch.zeros_like(tiles),
        (group,),
        0,
    )
    prompt = tuple(randn(2, STORE, 16, dtype=torch.float16, seed=i) for i in range(2))
    q = randn(3, 16, 6, 16, dtype=torch.float16, seed=9)
    own = prompt
    launched, launch = [], ragged._launch
    monkeypatch.setattr(ragged, "_launch", lambda *given: launched.append(given) or launch(*given))
    wanted = due((q, own, prompt, segments), window)
    for store in prompt:
        store[:, :start] = store[:, start + end :] = torch.nan
    found = ragged.attention(q, own, prompt, segments, scale=0.25, window=window)
    close(*(out.reshape(48, -1)[:tokens] for out in (found, wanted)), torch.float16)
    assert bool(launched) == bool(window)
    assert found.isfinite().all()


def test_groups_of_rows_that_are_not_adjacent():
    """Many rows of one prompt, not adjacent, in partial tiles; sizes chosen by shape."""
    spans = [(3, 70) if row % 3 else (80, 40) for row in range(11)]
    given = case(4, kv_heads=1, spans=spans, used=[(7 * row) % 40 for row in range(11)])
    close(run(given), due(given, 0), torch.float32)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a device has an order of its own")
def test_results_do_not_depend_on_the_order_of_programs(monkeypatch):
    from triton.runtime.interpreter import interpreter_builder as builder

    given = case(1, kv_heads=1)
    options = {"splits": 2, "group_splits": 3, "members": 4, "tile": (16, 4, 2)}
    found = [run(given, **options)]
    place = builder.set_grid_idx
    for step in (-1, 37):  # last to first, and with a stride

        def other(x, y, z, step=step):
            assert builder.grid_dim[0] % 37
            return place(step * (x + 1) % builder.grid_dim[0], y, z)

        monkeypatch.setattr(builder, "set_grid_idx", other)
        found.append(run(given, **options))
    close(found[0], due(given, 0), torch.float32)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    ("schedule", "width", "window"), [("pad", 1, 0), ("pad", 3, 20), ("split", 3, 0)]
)
def test_schedules_give_the_same(schedule, width, window):
    ops.attention_schedule(schedule)
    given = case(width, kv_heads=1)
    close(run(given, window=window), due(given, window), torch.float32)


def test_pad_and_split_do_the_work_of_the_paper(monkeypatch):
    """PAD: every row reads as many blocks of keys as the longest. SPLIT: every row has its own
    launch."""
    from bass_kernels import ragged

    launches = []

    class Launch:
        def __getitem__(self, grid):
            return lambda *arguments, **constants: launches.append((grid, constants))

    monkeypatch.setattr(ragged, "attend", Launch())
    monkeypatch.setattr(ragged, "merge_rows", defaultdict(lambda: lambda *_, **constants: None))
    given = case(3, spans=SPANS * 2, used=USED * 2)
    for schedule, count, padded, members in (
        ("ragged", 1, False, 4),
        ("pad", 1, True, 1),
        ("split", 16, False, 1),
    ):
        ops.attention_schedule(schedule)
        launches.clear()
        run(given)
        assert len(launches) == count
        assert all(
            (constants["PAD"] > 0) == padded and constants["SIZE"] == members
            for _, constants in launches
        )
    assert [ragged._members(lines, 64) for lines in (1, 7, 16, 17, 56, 500)] == [8, 8, 4, 1, 1, 1]
    assert ragged._members(7, 15) == 1


def test_a_long_row_may_have_more_splits_than_a_short_one():
    from bass_kernels.ragged import Cut

    given = case(1, kv_heads=1, spans=SPANS[:5], used=USED[:5])
    close(run(given, splits=Cut(1, 8), tile=(16, 4, 2), members=1), due(given, 0), torch.float32)


def test_captured_segments_after_rows_joined_left_and_moved(monkeypatch):
    """Compare the store's segments for a captured pass with those for a pass with host data."""
    monkeypatch.setattr("bass_cli.models.kv_cache._SHARED_FROM", 30)
    cache = KVCache([Layers(1, 1, 16)], rows=6, span=20, dtype=torch.float32, device=DEVICE)
    for i, store in enumerate(
        (cache.own_keys, cache.own_values, cache.prompt_keys, cache.prompt_values)
    ):
        store[0].copy_(randn(*store[0].shape, seed=i))
    spans = [cache.reserve(length) for length in (40, 70, 10)]
    for row, which in enumerate((0, 1, 0, 0, 1, 2)):
        cache.swap_rows(begun=[([row], spans[which])])
    q, places = (
        randn(6, 1, 3, 16, seed=9),
        torch.tensor([[9], [0], [5], [3], [11], [7]], device=DEVICE),
    )
    for rows in (6, 5):
        positions = places[:rows] + cache.bases(rows)[:, None]
        ends = (positions[:, 0] + 1).tolist()
        captured, on_host = cache.decode_pass(positions, None), cache.decode_pass(positions, ends)
        wanted = reference.attention(
            q[:rows], on_host.own(0), on_host.prompt(0), on_host.segments, scale=0.25
        )
        close(
            ops.attention(
                q[:rows], captured.own(0), captured.prompt(0), captured.segments, scale=0.25
            ),
            wanted,
            torch.float32,
        )
        cache.swap_rows(ended=[0])
        cache.swap_rows(moved=[(rows - 1, 0)])


def test_tables_of_shared_prefix_groups():
    """Single rows are in no tile. Every other row is in one tile of each table, with rows of its
    own prompt only."""
    table = GroupTables(12, torch.device("cpu"))
    threes = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    for groups in ([[0, 5, 7], [1, 2], [3]], [[1, 2, 3, 4, 6, 8, 9, 10, 11]], threes, []):
        table.update(groups)
        found = table.of(12)
        together = [rows for rows in groups if len(rows) > 1]
        assert found.member.tolist() == [
            int(any(row in rows for rows in together)) for row in range(12)
        ]
        for size in TILES:
            tiles = found.tiles[size].tolist()
            assert len(tiles) == most_tiles(12, size)
            used = [[row for row in tile if row >= 0] for tile in tiles]
            used = used[: used.index([])] if [] in used else used
            assert [row for tile in used for row in tile] == [
                row for rows in together for row in rows
            ]
            assert all(any(set(tile) <= set(rows) for rows in together) for tile in used)
            assert all(row < 0 for tile in tiles[len(used) :] for row in tile)


def test_splits_give_two_programs_a_processor_and_one_for_short_rows_of_large_tiles(monkeypatch):
    """On an H200 (132 processors) these splits were the fastest."""
    from bass_kernels import ragged

    monkeypatch.setattr(ragged, "processors", lambda device: 132)
    due = {8: ((8, 8), (8, 8)), 32: ((4, 4), (4, 4)), 64: ((4, 4), (2, 4)), 128: ((2, 2), (1, 2)),
           256: ((1, 1), (1, 1))}  # fmt: skip
    for units, cuts in due.items():
        assert tuple(ragged._cut(units, lines, DEVICE) for lines in (16, 32)) == cuts


def naive(given, *, scale, window=0, cap=0.0, sinks=None):
    """Attention of each row's queries one by one, as the papers of Gemma 2 and gpt-oss define it:
    the keys of its prompt and its own side by side, in float64."""
    q, own, prompt, segments = given
    rows, width, heads, size = q.shape
    group = heads // own[0].shape[0]
    out = torch.zeros(rows, width, heads, size, dtype=torch.float64, device=q.device)
    for row in range(rows):
        base, start, slot = (int(one[row]) for one in (segments.base, segments.start, segments.own))
        for place in range(width):
            position = int(segments.positions[row, place])
            first = max(position - window + 1, 0) if window else 0
            for head in range(heads):
                keys, values = (
                    torch.cat(
                        [
                            stored[head // group, start : start + base],
                            mine[head // group, slot : slot + position - base + 1],
                        ]
                    )[first : position + 1].double()
                    for stored, mine in zip(prompt, own, strict=True)
                )
                scores = keys @ q[row, place, head].double() * scale
                if cap:
                    scores = cap * torch.tanh(scores / cap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].double()])
                weights = scores.softmax(0)[: len(keys)]
                out[row, place, head] = weights @ values
    return out.flatten(2)


CAPS_AND_SINKS = [
    (1.5, False, 0, 1, None),
    (0.0, True, 0, 3, None),
    (2.0, True, 20, 1, 2),
    (0.0, True, 0, 1, 2),
    (1.5, True, 0, 2, 4),
]


@pytest.mark.parametrize(("cap", "sunk", "window", "splits", "members"), CAPS_AND_SINKS)
def test_soft_caps_and_sinks_equal_their_formula(cap, sunk, window, splits, members):
    given = case(2)
    sinks = randn(6, seed=5) if sunk else None
    wanted = naive(given, scale=0.25, window=window, cap=cap, sinks=sinks)
    options = {"window": window, "cap": cap, "sinks": sinks, "scale": 0.25}
    close(run(given, splits=splits, members=members, **options), wanted.float(), torch.float32)
    found = reference.attention(*given, **options)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=0)
    plain = naive(given, scale=0.25, window=window)
    assert not torch.allclose(plain, wanted, atol=1e-2)


def test_sinks_and_caps_of_prompt_passes_equal_their_formula():
    q, own, prompt, segments = case(1, spans=SPANS[:3], used=[0, 0, 0])
    # tiles of prompts: queries inside of the spans, without private keys
    inside = replace(
        segments,
        positions=torch.tensor([[5, 6], [40, 41], [109, 110]], device=DEVICE),
        groups=(ops.Group(3, 70, slice(0, 2)), ops.Group(80, 111, slice(2, 3))),
        extent=0,
        device_groups=None,
    )
    q, sinks = randn(3, 2, 6, 16, seed=4), randn(6, seed=5)
    given = (q, own, prompt, inside)
    wanted = naive(given, scale=0.25, cap=1.5, sinks=sinks)
    options = {"scale": 0.25, "cap": 1.5, "sinks": sinks}
    found = reference.attention(*given, **options)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=0)
    unknown = reference.attention(*given[:3], replace(inside, groups=None), **options)
    torch.testing.assert_close(unknown.double(), wanted, atol=1e-5, rtol=0)
    close(run(given, **options), wanted.float(), torch.float32)
