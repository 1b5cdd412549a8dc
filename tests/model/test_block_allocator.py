"""The buddy allocator of private blocks: no block is given twice, none is lost, and free buddies are
merged."""

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bass_cli.models import block_allocator as module
from bass_cli.models.block_allocator import BlockAllocator, BlockLayout, Sender

ROWS = 9


def check(allocator):
    """Every block is either some row's or free, once, and runs begin at multiples of their
    size."""
    taken = [
        block
        for start, size in allocator.runs.T.tolist()
        for block in range(start, start + size)
        if size
    ]
    free = [
        block
        for size, starts in allocator._free.items()
        for start in starts
        for block in range(start, start + size)
    ]
    assert sorted(taken + free) == list(range(allocator.blocks.total))
    assert allocator.free == len(free)
    for size, starts in allocator._free.items():
        assert all(start % size == 0 for start in starts)
        assert size == allocator.blocks.most or not any(start ^ size in starts for start in starts)
    assert all(start % size == 0 for start, size in allocator.runs.T.tolist() if size)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 4), st.integers(0, 40), st.data())
def test_blocks_stay_consistent_as_rows_begin_grow_move_and_end(power, more, data):
    most = 2**power
    allocator = BlockAllocator(ROWS, BlockLayout(most + more, most))
    twin, live = BlockAllocator(ROWS, allocator.blocks), 0
    for _ in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(["begin", "begin", "grow", "grow", "end"]))
        calls = []
        if what == "begin" and live < ROWS and allocator.free:
            calls, live = [("swap_rows", (), (), [live])], live + 1
        elif what == "end" and live:
            row, live = data.draw(st.integers(0, live - 1)), live - 1
            calls = [("swap_rows", [row], [] if row == live else [(live, row)], ())]
        elif what == "grow" and live:
            row = data.draw(st.integers(0, live - 1))
            size = 2 * int(allocator.runs[1, row])
            calls = [("grow", row, size)] if size <= most else []
        for name, *arguments in calls:
            before = allocator.runs.copy()
            found = getattr(allocator, name)(*arguments)
            assert found == getattr(twin, name)(*arguments)
            if name == "grow":
                row, size = arguments
                assert found is None or found == (
                    *(before[0, row], allocator.runs[0, row]),
                    size // 2,
                )
                same = numpy.arange(ROWS) != (-1 if found is None else row)
                assert (allocator.runs[:, same] == before[:, same]).all()
        assert (allocator.runs == twin.runs).all()
        check(allocator)
    allocator.swap_rows(range(live), (), ())
    check(allocator)
    assert len(allocator._free[most]) == allocator.blocks.total // most


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 4), st.integers(0, 20), st.data())
def test_row_can_grow_after_the_least_worthy_rows_are_evicted(power, more, data):
    """Whatever lies where, and the rows to go are those of one run, worth no more than any
    other's."""
    most = 2**power
    allocator = BlockAllocator(ROWS, BlockLayout(most + more, most))
    for row in range(data.draw(st.integers(1, ROWS))):
        if not allocator.free:
            break
        allocator.swap_rows((), (), [row])
        for _ in range(data.draw(st.integers(0, power))):
            size = 2 * int(allocator.runs[1, row])
            if size <= most:
                allocator.grow(row, size)
    worth = data.draw(st.lists(st.integers(1, 50), min_size=ROWS, max_size=ROWS))
    worth = numpy.array(worth, dtype=float)
    can = [row for row in range(ROWS) if 0 < allocator.runs[1, row] < most]
    if not can:
        return
    row = data.draw(st.sampled_from(can))
    size = 2 * int(allocator.runs[1, row])
    gone = allocator.rows_to_evict(size, worth, grows=row)
    assert row not in gone
    starts, sizes = allocator.runs
    runs = {
        at: [
            r
            for r in range(ROWS)
            if sizes[r] and starts[r] < at + size and at < starts[r] + sizes[r]
        ]
        for at in range(0, allocator.blocks.total - size + 1, size)
    }
    every = [worth[[r for r in inside if r != row]].sum() for inside in runs.values()]
    assert worth[gone].sum() == min(every)
    allocator.swap_rows(gone, (), ())
    assert allocator.grow(row, size) is not None
    check(allocator)


@pytest.mark.parametrize("most", [1, 4])
def test_lowest_blocks_come_first_and_a_single_row_can_have_the_maximum(most):
    allocator = BlockAllocator(3, BlockLayout(most + 2, most))
    allocator.swap_rows((), (), [0, 1])
    allocator.swap_rows([0], [(1, 0)], ())
    size = 1
    while size < most:
        size *= 2
        assert allocator.grow(0, size) is not None
    assert allocator.runs[1, 0] == most
    check(allocator)


class Late:
    """A device that copies late, when an event is waited for. `events` are recorded after copies."""

    def __init__(self):
        self.due, self.arrived, self.waits = [], [], 0

    def event(self):
        return Event(self)

    def come_to(self, copies):
        while len(self.arrived) < copies:
            self.arrived.append(self.due[len(self.arrived)].tolist())


class Event:
    def __init__(self, device):
        self.device, self.copies = device, 0

    def record(self):
        self.copies = len(self.device.due)

    def synchronize(self):
        self.device.waits += self.copies > len(self.device.arrived)
        self.device.come_to(self.copies)


def test_pinned_buffer_is_not_reused_before_its_copy_is_done(monkeypatch):
    """The device may copy late. Memory is pinned once, not for each copy."""
    late, pinned = Late(), []

    def empty(count, *, dtype, pin_memory):
        assert pin_memory
        pinned.append(count)
        return torch.zeros(count, dtype=dtype)

    def to(tensor, device, *, non_blocking):
        assert non_blocking
        late.due.append(tensor)
        return tensor

    monkeypatch.setattr(torch.cuda, "Event", late.event)
    sender = Sender(torch.device("cuda"))
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.Tensor, "to", to)
    sizes = [1, 5, 3, 200, 7, 2, 9, 4, 6, 8] * 5
    arrays = [numpy.arange(size * 2).reshape(2, size) + 1000 * i for i, size in enumerate(sizes)]
    for array in arrays:
        there = sender.send(array)
        assert there.shape == array.shape
    late.come_to(len(arrays))
    assert late.arrived == [array.tolist() for array in arrays]
    assert late.waits == len(arrays) - module._PARTS
    assert len(pinned) < 3 * module._PARTS


def test_sender_shares_memory_on_a_cpu():
    array = numpy.arange(6).reshape(2, 3)
    there = Sender(torch.device("cpu")).send(array)
    assert (there.tolist(), there.data_ptr()) == (array.tolist(), array.ctypes.data)
