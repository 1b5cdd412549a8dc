"""The counter-based noise: published answers, independence of the batch, and distributions."""

import math

import pytest
import torch

import bass_kernels as ops
from bass_kernels import noise
from bass_kernels.noise import bits, bits_all, philox

# Published answers of the Random123 library (counter, key, words).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_gives_the_published_answers(counter, key, words):
    out = philox(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
    assert tuple(int(w) for w in out) == words


def test_a_number_does_not_depend_on_the_others_in_the_call():
    keys = torch.tensor([[1, 2], [0xFFFFFFFF, 7], [3, 0x80000000]])
    positions, origin = torch.tensor([5, 0, 100_000]), torch.tensor([4, 0, 99_998])
    for vocab in (1, 7, 131):
        whole = bits_all(keys, positions, vocab, stream=noise.BONUS, origin=origin)
        assert whole.shape == (3, vocab)
        for row in (0, 1, 2):
            for token in {0, vocab // 2, vocab - 1}:
                one = bits(
                    keys[row : row + 1],
                    positions[row : row + 1],
                    torch.tensor([token]),
                    stream=noise.BONUS,
                    origin=origin[row : row + 1],
                )
                assert int(one) == int(whole[row, token])


def test_every_part_of_the_address_changes_the_number():
    def number(key=(1, 2), position=3, token=4, stream=0, origin=0):
        return int(
            bits(
                torch.tensor([key]),
                torch.tensor([position]),
                torch.tensor([token]),
                stream=stream,
                origin=origin,
            )
        )

    variants = [
        number(),
        number(key=(2, 2)),
        number(key=(1, 3)),
        number(position=4),
        number(token=5),
        number(token=8),
        number(origin=1),
        *(number(stream=s) for s in (1, 2, 3, 4)),
    ]
    assert len(set(variants)) == len(variants)


def test_uniform_is_in_zero_to_one_without_one():
    ends = noise.uniform(torch.tensor([0, 0xFFFFFFFF]))
    assert ends[0] == 0
    assert ends[1] < 1


def test_gumbel_is_finite_at_both_ends_and_has_its_distribution():
    ends = ops.gumbel(torch.tensor([0, 1, 0xFFFFFFFE, 0xFFFFFFFF]))
    assert torch.isfinite(ends).all()
    assert ends[0] > 22
    assert ends[3] < -2.8
    sample = ops.gumbel(
        bits_all(torch.tensor([[11, 12]]), torch.tensor([0]), 400_000, stream=0)[0]
    ).double()
    assert abs(sample.mean() - 0.5772157) < 5 * math.pi / math.sqrt(6 * len(sample))
    for x in (-1.0, 0.0, 1.0, 3.0):
        due = math.exp(-math.exp(-x))
        assert abs((sample < x).double().mean() - due) < 5 * math.sqrt(
            due * (1 - due) / len(sample)
        )


def test_neighbouring_rows_positions_and_tokens_are_uncorrelated():
    keys = torch.tensor([[i, 0] for i in range(64)])
    grid = (
        torch.stack(
            [noise.uniform(bits_all(keys, torch.full((64,), p), 256, stream=0)) for p in range(8)]
        )
        - 0.5
    )
    limit = 5 / math.sqrt(grid.numel() / 2) / 12
    for a, b in (
        (grid[1:], grid[:-1]),
        (grid[:, 1:], grid[:, :-1]),
        (grid[..., 1:], grid[..., :-1]),
    ):
        assert abs((a * b).mean()) < limit
