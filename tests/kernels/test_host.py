"""Ops on a CPU: equal to their definition. Attention has the same bits for a token with other
tokens, rows and more slots beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from bass_kernels import SPARE_KEYS, Group, Segments, host, linear, pack, reference
from bass_kernels.noise import SHARED, bits_all, gumbel
from bass_kernels.sampling import logsumexp, sample

HEADS, KV_HEADS, SIZE = 6, 2, 16
# Of six rows: no top-k and no top-p
PLAIN_LIMITS = torch.zeros(6).long(), torch.ones(6)
PLACES = torch.arange(6)


class Case(NamedTuple):
    q: Tensor
    own: tuple[Tensor, Tensor]
    prompt: tuple[Tensor, Tensor]
    segments: Segments


def case_of(
    prompts: list[int], rows: list[tuple[int, int, int]], width: int, *, slots: list[int]
) -> Case:
    """A pass over `width` tokens of each row.

    Args:
        prompts: lengths of the prompts in the store; equal ones are the same.
        rows: of each its prompt, -1 for none, its private tokens before the pass, and the seed of
            its numbers.
        slots: where the private keys of each row begin.
    """
    starts = [sum(prompts[:i]) + 3 * i for i in range(len(prompts))]
    generator = torch.Generator().manual_seed(9)
    prompt = torch.randn(2, KV_HEADS, max(2000, sum(prompts)), SIZE, generator=generator)
    for start, length in zip(starts, prompts, strict=True):
        numbers = torch.Generator().manual_seed(length)
        prompt[:, :, start : start + length] = torch.randn(
            2, KV_HEADS, length, SIZE, generator=numbers
        )
    own = torch.randn(2, KV_HEADS, 3000 + SPARE_KEYS, SIZE, generator=generator)
    q = torch.empty(len(rows), width, HEADS, SIZE)
    for row, (_, before, seed) in enumerate(rows):
        numbers = torch.Generator().manual_seed(seed)
        own[:, :, slots[row] : slots[row] + 700] = torch.randn(
            2, KV_HEADS, 700, SIZE, generator=numbers
        )
        q[row] = torch.randn(800, HEADS, SIZE, generator=numbers)[before : before + width]
    base = torch.tensor([0 if which < 0 else prompts[which] for which, _, _ in rows])
    before = torch.tensor([before for _, before, _ in rows])
    groups = []
    for which, length in enumerate(prompts):
        members = [row for row, one in enumerate(rows) if one[0] == which]
        if not members:
            continue
        side_by_side = members[-1] - members[0] + 1 == len(members)
        index = slice(members[0], members[-1] + 1) if side_by_side else torch.tensor(members)
        groups.append(Group(starts[which], length, index))
    segments = Segments(
        positions=(base + before)[:, None] + torch.arange(width),
        base=base,
        start=torch.tensor([0 if which < 0 else starts[which] for which, _, _ in rows]),
        own=torch.tensor(slots),
        groups=tuple(groups),
        extent=int(before.max()) + width,
    )
    return Case(q, (own[0], own[1]), (prompt[0], prompt[1]), segments)


CASES = {
    "one row": ([40], [(0, 3, 1)], 1, [5]),
    "one row, drafts": ([40], [(0, 3, 1)], 7, [5]),
    "equal distances": ([40], [(0, 3, 1), (0, 200, 2), (0, 0, 3)], 2, [5, 605, 1205]),
    "other order": ([40], [(0, 3, 1), (0, 130, 2), (0, 0, 3)], 2, [1205, 605, 5]),
    "unequal distances": ([40], [(0, 3, 1), (0, 9, 2), (0, 0, 3)], 1, [1205, 5, 605]),
    "prompts": ([40, 7, 300], [(2, 3, 1), (0, 9, 2), (1, 0, 3), (0, 5, 4)], 3, [5, 605, 9, 1205]),
    "no prompt": ([40], [(-1, 3, 1), (0, 9, 2), (-1, 0, 3)], 2, [5, 605, 1205]),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_equals_its_definition(name: str) -> None:
    prompts, rows, width, slots = CASES[name]
    q, own, prompt, segments = case_of(prompts, rows, width, slots=slots)
    assert host.supports(q, own, segments)
    expected = reference.attention(q, own, prompt, segments, scale=0.3)
    found = host.attention(q, own, prompt, segments, scale=0.3)
    assert found.shape == expected.shape
    assert (found - expected).norm() < 1e-6 * expected.norm()


def test_attention_of_a_token_has_the_same_bits_in_every_pass() -> None:
    """Alone, as one of several drafts, with other rows and prompts, and with more slots."""
    alone = [
        host.attention(*case_of([60], [(0, before, 7)], 1, slots=[5]), scale=0.3)[0, 0]
        for before in (120, 121, 122, 123)
    ]
    passes = {
        "drafts": (case_of([60], [(0, 120, 7)], 4, slots=[5]), 0),
        "rows": (case_of([60], [(0, 40, 2), (0, 120, 7)], 4, slots=[5, 805]), 1),
        "order": (case_of([60], [(0, 120, 7), (0, 40, 2)], 4, slots=[805, 5]), 0),
        "prompts": (
            case_of([300, 60], [(0, 40, 2), (1, 120, 7), (0, 9, 3)], 4, slots=[5, 805, 1605]),
            1,
        ),
        "slots": (case_of([60], [(0, 120, 7), (0, 500, 2)], 4, slots=[5, 805]), 0),
    }
    for name, (case, row) in passes.items():
        found = host.attention(*case, scale=0.3)[row]
        for place, expected in enumerate(alone):
            assert torch.equal(found[place], expected), (name, place)


def test_passes_in_and_outside_of_inference_mode_may_follow_each_other() -> None:
    q, own, prompt, segments = case_of([40], [(0, 3, 1)], 1, slots=[5])
    with torch.inference_mode():
        first = host.attention(q, own, prompt, segments, scale=0.3)
    again = replace(segments, positions=segments.positions.clone())  # a later pass of the row
    assert torch.equal(host.attention(q, own, prompt, again, scale=0.3), first)


def test_tensors_kept_for_later_passes_take_bounded_memory() -> None:
    """Rounds of several widths, of 5 MB each with a short prompt and 36 MB with a long one."""
    for length, widths in ((2000, range(1, 9)), (14_000, range(3, 5))):
        kept: dict[Any, Any] = {}
        for width in widths:
            rows = [(0, 8, place) for place in range(4)]
            q, own, prompt, segments = case_of([length], rows, width, slots=[0, 40, 80, 120])
            segments = replace(segments, kept=kept)
            expected = reference.attention(q, own, prompt, segments, scale=0.3)
            found = host.attention(q, own, prompt, segments, scale=0.3)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
            assert sum(one.nbytes for one in kept.values()) <= 32 << 20
            assert bool(kept) == (length == 2000)


def test_row_that_sees_a_key_of_nan_is_nan_and_others_are_not() -> None:
    q, own, prompt, segments = case_of([40], [(0, 3, 1), (0, 9, 2)], 1, slots=[5, 25])
    own[0][:, 26] = torch.nan  # a key of row 1, within the padding of row 0
    found = host.attention(q, own, prompt, segments, scale=0.3)
    assert found[0].isfinite().all()
    assert found[1].isnan().all()


@pytest.mark.parametrize("rotary", [16, 8])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_and_written_keys_equal_their_definition(rotary: int, normed: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(3, 2, (HEADS + 2 * KV_HEADS) * SIZE, generator=generator)
    angles = torch.randn(2, 3, 2, rotary // 2, generator=generator)
    slots = torch.tensor([[5, 6], [40, 41], [0, 1]])
    norms = (torch.rand(SIZE), torch.rand(SIZE)) if normed else None
    found, due = ([torch.zeros(KV_HEADS, 60, SIZE) for _ in range(2)] for _ in range(2))
    given = {"heads": HEADS, "norms": norms, "eps": 1e-6}
    q = host.rope_write(qkv, (angles[0], angles[1]), slots, (found[0], found[1]), **given)
    expected = reference.rope_write(qkv, (angles[0], angles[1]), slots, (due[0], due[1]), **given)
    torch.testing.assert_close(q, expected, rtol=1e-5, atol=1e-6)
    for one, other in zip(found, due, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_value_that_is_not_finite_is_written_as_its_definition_says() -> None:
    qkv = torch.ones(1, 2, (HEADS + 2 * KV_HEADS) * SIZE)
    qkv[0, 1, -1] = torch.inf
    keys, values = torch.zeros(KV_HEADS, 9, SIZE), torch.zeros(KV_HEADS, 9, SIZE)
    slots = torch.tensor([[3, 4]])
    host.rope_write(qkv, None, slots, (keys, values), heads=HEADS, norms=None, eps=1e-6)
    assert keys[-1, 4].isnan().any()
    assert keys[:, 3].isfinite().all()
    assert values.isfinite().all()


@pytest.mark.parametrize("temperature", [1.0, 0.2, 0.01])
def test_log_of_summed_exponentials_equals_that_of_float64(temperature: float) -> None:
    """Also where most terms underflow."""
    x = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1)) * 4 / temperature
    x[1, ::2] = -torch.inf
    expected = x.double().logsumexp(-1)
    assert ((logsumexp(x) - expected).abs() <= 1e-6 * expected.abs()).all()


def test_log_of_summed_exponentials_keeps_what_is_not_finite() -> None:
    inf, nan = torch.inf, torch.nan
    found = logsumexp(torch.tensor([[-inf, -inf], [inf, 1.0], [nan, 1.0]]))
    assert found[:2].tolist() == [-inf, inf]
    assert found[2].isnan()


def test_first_largest_logit_is_that_of_argmax() -> None:
    """Ties within a block and across blocks, a largest one behind the last block, and no number."""
    x = torch.randn(6, 128 * 130 + 5, generator=torch.Generator().manual_seed(1))
    x[1, [700, 900, 7000]], x[2, [70, 71]], x[3, -2], x[4, [300, -1]] = 9.0, 9.0, 9.0, 9.0
    finite = x.clone()
    x[5, 4000] = torch.nan
    for one in (finite, x):
        found = sample(one, torch.zeros(6), *PLAIN_LIMITS, torch.zeros(6, 2).long(), PLACES)
        assert torch.equal(found, one.argmax(-1))


@pytest.mark.parametrize("top_p", [0.9, 0.999])
def test_sample_among_sorted_logits_is_that_of_the_whole_vocabulary(top_p: float) -> None:
    """By the definition in float64, with a tie of the last kept tokens in row 2."""
    logits = torch.randn(6, 2000, generator=torch.Generator().manual_seed(1)) * 4
    logits[2, :300] = 15.0
    temperature, keys = torch.tensor([1.0, 0.6, 1.0, 0.0, 0.9, 0.3]), torch.arange(12).view(6, 2)
    found = sample(logits, temperature, PLAIN_LIMITS[0], torch.full((6,), top_p), keys, PLACES)
    for row in range(6):
        if temperature[row] == 0:
            assert found[row] == logits[row].argmax()
            continue
        probs = (logits[row].double() / temperature[row].double()).softmax(-1)
        falling = probs.sort(descending=True).values
        last = falling[int((falling.cumsum(0) < top_p).sum())]
        noise = gumbel(bits_all(keys[row : row + 1], PLACES[row : row + 1], 2000, stream=SHARED))[0]
        scores = (probs.log() + noise).masked_fill(probs < last - 1e-12, -torch.inf)
        assert found[row] == scores.argmax()


@pytest.mark.parametrize(("inputs", "outputs"), [(1536, 576), (576, 1536), (896, 896)])
def test_product_of_one_line_has_the_same_bits_beside_others(inputs: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(40, inputs, generator=generator)
    weight = pack(torch.randn(outputs, inputs, generator=generator))
    beside = linear(x, weight, None)
    for count in (1, 2, 5, 8, 24):
        assert torch.equal(linear(x[:count], weight, None), beside[:count])
