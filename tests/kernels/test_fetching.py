"""The prefetch of weights by attention: how many bytes of which weights, and that results do not
change."""

from typing import NamedTuple

import pytest
import torch

import bass_kernels as ops
from bass_kernels.segments import Segments

pytest.importorskip("triton")
from bass_kernels import launch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Weight(NamedTuple):
    """A stand-in for a tensor with the attributes that `prefetch_blocks` reads."""

    bytes: int
    at: int = 4096
    device: torch.device = torch.device("cuda")

    def data_ptr(self):
        return self.at

    def numel(self):
        return self.bytes // 2

    def element_size(self):
        return 2


@pytest.fixture
def on(monkeypatch):
    """A function that sets the compute capability of the weights' device."""

    def card(*capability):
        monkeypatch.setattr(launch, "card", lambda device: launch.Card(capability, 227 * 1024))

    return card


@pytest.mark.parametrize("size", [2, 2046, 2048, 5000, 33 << 20, 100 << 20])
def test_prefetch_stays_within_the_weight_and_the_limit(on, size):
    on(9, 0)
    found = launch.prefetch_blocks(Weight(size), 64) * 2048
    assert found <= min(size, 32 << 20)
    assert found > min(size, 32 << 20) - 2048


def test_no_prefetch_where_it_does_not_pay_or_is_not_possible(on):
    on(9, 0)
    assert launch.prefetch_blocks(Weight(1 << 20), 64) > 0
    assert launch.prefetch_blocks(Weight(1 << 20), 65) == 0  # compute-bound
    # the instruction needs 16-byte alignment
    assert launch.prefetch_blocks(Weight(1 << 20, at=4104), 64) == 0
    assert launch.prefetch_blocks(Weight(1 << 20, device=torch.device("cpu")), 64) == 0
    assert launch.prefetch_blocks(None, 64) == 0
    on(8, 0)
    assert launch.prefetch_blocks(Weight(1 << 20), 64) == 0


@pytest.mark.skipif(DEVICE.type == "cpu", reason="only a GPU fetches")
@pytest.mark.parametrize("width", [1, 8])
def test_attention_does_not_depend_on_the_prefetch(width):
    def noise(*shape):
        return torch.randn(*shape, generator=generator).half().to(DEVICE)

    generator, rows = torch.Generator().manual_seed(0), 3
    lengths = torch.tensor([5, 70, 200], device=DEVICE)
    segments = Segments(
        positions=lengths[:, None] + torch.arange(width, device=DEVICE),
        base=torch.zeros(rows, dtype=torch.int64, device=DEVICE),
        start=torch.zeros(rows, dtype=torch.int64, device=DEVICE),
        own=torch.arange(rows, device=DEVICE) * 256,
        groups=None,
        extent=256,
    )
    q, own = noise(rows, width, 8, 64), (noise(2, rows * 256, 64), noise(2, rows * 256, 64))
    prompt = (noise(2, 16, 64), noise(2, 16, 64))
    ops.use("triton")
    alone, prefetched = (
        ops.attention(q, own, prompt, segments, scale=0.1, next_weight=weight)
        for weight in (None, noise(1030, 515))
    )
    assert torch.equal(alone, prefetched)
