"""Sums through peers' memory: what a process sends and what it adds, by the definition of packets."""

import time

import pytest
import torch
from test_triton import DEVICE

from bass_kernels import Quantised, has_triton

if not has_triton():
    pytest.skip("Triton is missing", allow_module_level=True)

from bass_kernels import products, quantised_products
from bass_kernels.peers import Peers, add
from bass_kernels.residual import Stream

CAPACITY = 700
NUMBERS = (1, 2, 2**31 - 1)  # after the last one comes the least one


def wrapped(number: int) -> int:
    """Return a number in 32 bits."""
    return (number + 2**31) % 2**32 - 2**31


def packets(part: torch.Tensor, number: int) -> torch.Tensor:
    """Return the packets of a part: the number of the exchange above 4 bytes of the part."""
    words = part.flatten().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return words | (number << 32)


def group(ranks: int, rank: int, number: int, limit: int = 10) -> tuple[Peers, list[torch.Tensor]]:
    """Return what process `rank` has, and the buffers of all processes, with old packets."""
    buffers = [
        torch.full((2, ranks, CAPACITY), (number - 2) << 32, dtype=torch.int64, device=DEVICE)
        for _ in range(ranks)
    ]
    flags = torch.zeros(2, dtype=torch.int32)
    flags = flags.pin_memory() if DEVICE.type == "cuda" else flags
    addresses = torch.tensor([one.data_ptr() for one in (*buffers, flags)], device=DEVICE)
    state = torch.tensor([number, 0], dtype=torch.int32, device=DEVICE)
    return Peers(rank, ranks, addresses, state, flags, CAPACITY, limit), buffers


def rounded_sum(parts: list[torch.Tensor], residual: torch.Tensor | None) -> torch.Tensor:
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return (total if residual is None else total + residual.float()).to(parts[0].dtype)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("ranks", "rank"), [(2, 0), (2, 1), (4, 2)])
def test_sum_has_all_parts_in_the_order_of_ranks(ranks, rank, dtype, number):
    """More words than a program has. The next exchange uses the other half of the buffers."""
    generator = torch.Generator().manual_seed(3)
    shape = (3, 190 if dtype == torch.float32 else 380)
    for residual in (None, torch.randn(shape, generator=generator).to(DEVICE, dtype)):
        peers, buffers = group(ranks, rank, number)
        for later in (0, 1):
            now = wrapped(number + later)
            half = now % 2
            parts = [
                torch.randn(shape, generator=generator).to(DEVICE, dtype) for _ in range(ranks)
            ]
            sent, count = packets(parts[rank], now), parts[0].numel() * dtype.itemsize // 4
            for other in range(ranks):
                if other != rank:
                    buffers[rank][half, other, :count] = packets(parts[other], now)
            found = add(parts[rank], residual, peers)
            assert torch.equal(found, rounded_sum(parts, residual))
            for other, buffer in enumerate(buffers):
                if other != rank:
                    assert torch.equal(buffer[half, rank, :count], sent)
                    assert (buffer[half, rank, count:] == (number - 2) << 32).all()
            assert peers.state.tolist() == [wrapped(now + 1), 0]


def test_part_that_never_comes_is_not_a_number():
    peers, buffers = group(2, 0, 5)
    part = torch.ones(1, 600, device=DEVICE)
    buffers[0][1, 1, :500] = packets(part[:, :500], 5)
    found = add(part, None, peers)
    assert (found[:, :256] == 2).all()  # of the first program
    assert found[:, 512:].isnan().all()
    assert peers.missed == 1


def test_host_ends_the_wait_for_a_part_and_hears_whose_it_was():
    """The wait would otherwise take ten minutes."""
    peers, buffers = group(4, 2, 5, limit=600_000_000)
    part = torch.ones(1, 200, device=DEVICE)
    for other in (0, 1):
        buffers[2][1, other, :200] = packets(part, 5)
    assert peers.missed is None
    peers.end_waits()
    began = time.monotonic()
    assert add(part, None, peers).isnan().all()
    assert peers.missed == 3
    assert time.monotonic() - began < 60
    assert peers.state.tolist() == [6, 0]
    # parts that are there are still added
    buffers[2][0, :, :200] = packets(part, 6)
    assert (add(part, None, peers) == 4).all()


@pytest.mark.skipif(DEVICE.type != "cuda", reason="only parts on a GPU are taken")
def test_parts_that_are_taken():
    peers, _ = group(4, 0, 1)
    assert peers.takes(torch.zeros(2, 200, dtype=torch.bfloat16, device=DEVICE))
    for part in (
        torch.zeros(700),
        torch.zeros(3, 3).half(),
        torch.zeros(4, 4).mT,
        torch.zeros(4).long(),
    ):
        assert not peers.takes(part.to(DEVICE))


@pytest.mark.parametrize(("rank", "layout"), [(0, None), (1, None), (1, "int8")])
def test_products_of_all_processes_are_added_to_the_stream(rank, layout, monkeypatch):
    """The depth is split between the processes, and then between programs."""
    generator = torch.Generator().manual_seed(4)
    count, lines, depth = 3, 48, 300
    x = torch.randn(count, 2 * depth, generator=generator).to(DEVICE)
    weight = torch.randn(lines, 2 * depth, generator=generator).to(DEVICE)
    before, norm = (
        torch.randn(*size, generator=generator).to(DEVICE) for size in ((count, lines), (lines,))
    )
    parts = [x[:, own] @ weight[:, own].T for own in (slice(depth), slice(depth, None))]
    peers, buffers = group(2, rank, 7)
    other = 1 - rank
    buffers[rank][1, other, : count * lines] = packets(parts[other], 7)
    own = slice(rank * depth, (rank + 1) * depth)
    stream = Stream(before, torch.empty_like(before), torch.empty(2, 16, device=DEVICE))
    assert products.adds_at_once(weight[:32, own], x, peers)
    for module in (products, quantised_products):  # two tiles, and one program more
        monkeypatch.setattr(module, "processors", lambda device: 2)
    assert products.adds_at_once(weight[:, own], x, peers._replace(capacity=16 * lines))
    assert not products.adds_at_once(weight[:, own], x, peers._replace(capacity=15 * lines))
    matrix = weight[:, own].contiguous()
    if layout is not None:
        matrix = Quantised.of(matrix, layout)
        parts[rank] = x[:, own] @ matrix.dequantise().T
    assert products.adds_at_once(matrix, x, peers._replace(capacity=16 * lines))
    found = products.add(x[:, own].contiguous(), matrix, stream, norm, peers=peers)
    expected = before + parts[0] + parts[1]
    torch.testing.assert_close(found.residual, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found.x, expected * norm, rtol=1e-5, atol=1e-4)
    squares = found.squares[:, :count].sum(0)
    torch.testing.assert_close(squares, expected.square().sum(1), rtol=1e-5, atol=1e-4)
    sent = buffers[other][1, rank, : count * lines]
    assert (sent >> 32 == 7).all()
    words = (sent & 0xFFFFFFFF).to(torch.int32).view(torch.float32).view(count, lines)
    torch.testing.assert_close(words, parts[rank], rtol=1e-5, atol=1e-4)
    own_first = (words, parts[other]) if rank == 0 else (parts[other], words)
    assert torch.equal(own_first[0] + own_first[1] + before, found.residual)
    assert peers.state.tolist() == [8, 0]
