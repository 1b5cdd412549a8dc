"""The store of hidden states: the kernels and their references against a table of what each position
holds. On a CUDA device, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from test_triton import DEVICE, DTYPES

import bass_kernels as ops
from bass_kernels import Segments

pytest.importorskip("triton")

WIDTH, SLOTS, SPANS = 2 * 37, 50, (0, 7, 3, 0)
STARTS, OWN = (0, 9, 2, 0), (5, 17, 31, 0)  # the last row is not live


@pytest.fixture(params=["triton", "reference"])
def form(request):
    ops.use(request.param)
    return request.param


def states(*shape, seed):
    """Return distinct numbers that every dtype here can hold."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-99, 99, shape, generator=generator)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3])
def test_states_are_written_to_slots_and_read_by_positions(form, dtype, width):
    def on_device(numbers):
        return numbers.to(DEVICE, dtype)

    # By layer, keys and values, as in a KVCache
    own, prompt = (on_device(states(2, 2, 1, n, WIDTH // 2, seed=n)) for n in (SLOTS, 20))
    mine, theirs = (tuple(one[1, half] for half in (0, 1)) for one in (own, prompt))
    before, hidden = own.clone(), states(3, width, WIDTH, seed=1)
    slots = torch.tensor([[8], [20], [40]]) + torch.arange(width)
    ops.write_hidden(on_device(hidden), slots.to(DEVICE), mine)
    for row in range(3):
        for place in range(width):
            found = torch.cat([half[0, slots[row, place]] for half in mine])
            assert torch.equal(found.cpu(), hidden[row, place].to(dtype))
    changed = (own != before).any(-1).nonzero()[:, [0, 3]].unique(dim=0).tolist()
    assert all(layer == 1 and slot in slots.flatten().tolist() for layer, slot in changed)

    positions = torch.tensor([[-1], [5], [5], [1]]) + torch.arange(width)
    base, start, first = (
        torch.tensor(one, device=DEVICE) for one in (SPANS, STARTS, OWN)
    )  # fmt: skip
    given = positions.to(DEVICE).t().contiguous().t()  # columns are contiguous
    segments = Segments(given, base, start, first, None, 0)
    found = ops.read_hidden(given, segments, mine, theirs)
    assert (found.shape, found.dtype) == ((4, width, WIDTH), dtype)
    for row in range(4):
        for place, position in enumerate(positions[row].tolist()):
            if position < 0:
                due = torch.zeros(WIDTH, dtype=dtype)
            elif position < SPANS[row]:
                due = torch.cat([half[0, STARTS[row] + position] for half in theirs])
            else:
                due = torch.cat([half[0, OWN[row] + position - SPANS[row]] for half in mine])
            assert torch.equal(found[row, place].cpu(), due.cpu())
