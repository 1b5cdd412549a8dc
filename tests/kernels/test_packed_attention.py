"""Attention of packed rows with unequal numbers of queries: Triton against the definition, and the
definition against single rows. Keys that no query sees, and unwritten memory, are NaN.

They run on a CUDA device if there is one, otherwise in Triton's interpreter.
"""

from dataclasses import replace

import pytest
import torch
from test_ragged import SPANS, USED, case, due, poisoned
from test_triton import DEVICE, DTYPES, close

import bass_kernels as ops
from bass_kernels import reference
from bass_kernels.segments import pack_queries

QUERIES = [1, 5, 3, 9, 1, 2, 9, 1]  # queries of each row of SPANS; the last row is padding


def packed(given, queries, widest):
    """Pack the first `queries` of each row of a case."""
    q, own, prompt, segments = given
    counts = torch.tensor(queries, device=DEVICE)
    found = pack_queries(counts, sum(queries), widest)
    q, positions = (t[found.row, found.place][None] for t in (q, segments.positions))
    return q, own, prompt, replace(segments, positions=positions, packed=found)


def row_by_row(given, queries, window):
    """Compute the expected result, one row a pass."""
    whole = due(given, window)
    return torch.cat([line[:count] for line, count in zip(whole, queries, strict=True)])[None]


def seen_only(given, queries):
    """The same case with NaN after each row's last query."""
    q, own, prompt, segments = given
    last = torch.tensor(queries, device=DEVICE)[:, None] - 1
    ends = segments.positions.gather(1, last)
    _, own, prompt, _ = poisoned((q, own, prompt, replace(segments, positions=ends)))
    return q, own, prompt, segments


def test_packed_rows_do_not_mix():
    found = pack_queries(torch.tensor([2, 1, 4]), 7, 5)
    assert found.begin.tolist() == [0, 2, 3, 7]
    assert found.row.tolist() == [0, 0, 1, 2, 2, 2, 2]
    assert found.place.tolist() == [0, 1, 0, 0, 1, 2, 3]
    assert found.by_row.tolist() == [[0, 1, 1, 1, 1], [2] * 5, [3, 4, 5, 6, 6]]


@pytest.mark.parametrize("window", [0, 20])
def test_the_packed_definition_equals_single_rows(window):
    """Each row has exactly its own queries."""
    given = case(9)
    own = tuple(t.cpu() for t in packed(seen_only(given, QUERIES), QUERIES, 9)[1])
    q, _, prompt, segments = packed(given, QUERIES, 9)
    q, own = q.float(), tuple(t.to(DEVICE).nan_to_num(0.0) for t in own)
    found = reference.attention(q, own, prompt, segments, scale=0.25, window=window)
    torch.testing.assert_close(found, row_by_row(given, QUERIES, window), atol=1e-5, rtol=1e-5)


@pytest.fixture
def kernels(monkeypatch):
    pytest.importorskip("triton")
    made = torch.Tensor.new_empty

    def unwritten(self, *shape, **options):
        found = made(self, *shape, **options)
        return found.fill_(torch.nan) if found.is_floating_point() else found

    ops.use("triton")
    monkeypatch.setattr(torch.Tensor, "new_empty", unwritten)


@pytest.mark.parametrize(
    ("dtype", "splits", "window", "widest"),
    [
        (DTYPES[0], None, 0, 9),
        (DTYPES[0], 1, 0, 9),
        (DTYPES[0], 3, 75, 11),
        (DTYPES[1], 3, 0, 9),
        (DTYPES[-1], 2, 20, 9),
    ],
)
def test_kernels(kernels, dtype, splits, window, widest):
    """Also with space for more queries than any row has, with splits that are merged, and with a
    window."""
    from bass_kernels.ragged import attention

    given = case(9, dtype)
    found = attention(
        *packed(seen_only(given, QUERIES), QUERIES, widest),
        scale=0.25,
        window=window,
        splits=splits,
    )
    close(found, row_by_row(given, QUERIES, window), dtype)


def test_rows_of_more_lines_than_a_tile(kernels):
    """40 queries of 3 heads each, so that a short row leaves tiles empty."""
    queries = [40, 1, 23, 22, 2]
    given = case(40, spans=SPANS[:5], used=USED[:5])
    found = ops.attention(*packed(seen_only(given, queries), queries, 40), scale=0.25)
    close(found, row_by_row(given, queries, 0), torch.float32)


@pytest.mark.parametrize("schedule", ["pad", "split"])
def test_the_papers_schedules_support_packed_queries(kernels, schedule):
    queries = [3, 1, 2, 4, 1]
    given = case(4, spans=SPANS[:5], used=USED[:5])
    ops.attention_schedule(schedule)
    found = ops.attention(*packed(given, queries, 4), scale=0.25)
    close(found, row_by_row(given, queries, 0), torch.float32)
