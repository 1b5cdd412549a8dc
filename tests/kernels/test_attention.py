"""Ragged attention over prompt and private keys, compared with one softmax a query written out;
invisible slots hold NaN; dtypes."""

from dataclasses import replace

import pytest
import torch

import bass_kernels as ops

H, K, D, S, T = 6, 2, 8, 24, 64
OWN = torch.tensor([3, 0, 1, 4, 2]) * S  # where each row's private slots begin


def case(width, window, *, dtype=torch.float32, seed=0):
    """Five rows on two prompts and no prompt, all of unequal length. Keys that no query sees are
    NaN."""
    g = torch.Generator().manual_seed(seed)
    spans = [(3, 11), (3, 11), (20, 40), None, (3, 11)]  # (start, length) in the prompt store
    base = torch.tensor([s[1] if s else 0 for s in spans])
    start = torch.tensor([s[0] if s else 0 for s in spans])
    own_used = torch.tensor([4, 9, 1, 14, 6])
    positions = (base + own_used)[:, None] + torch.arange(width)
    prompt = tuple(torch.randn(K, T, D, generator=g) for _ in range(2))
    own = tuple(torch.randn(K, 5 * S, D, generator=g) for _ in range(2))
    q = torch.randn(5, width, H, D, generator=g)
    groups = (ops.Group(3, 11, torch.tensor([0, 1, 4])), ops.Group(20, 40, slice(2, 3)))
    extent = int((positions[:, -1] - base).max()) + 1
    segments = ops.Segments(positions, base, start, OWN, groups, extent)
    for tensor in (*prompt, *own):
        tensor.copy_(tensor.to(dtype).float())
    return (
        q.to(dtype),
        tuple(t.to(dtype) for t in own),
        tuple(t.to(dtype) for t in prompt),
        segments,
        window,
    )


def naive(q, own, prompt, segments, window):
    out = torch.zeros(*q.shape[:2], H, D, dtype=torch.float64)
    for b in range(q.shape[0]):
        base, start = int(segments.base[b]), int(segments.start[b])
        for w in range(q.shape[1]):
            position = int(segments.positions[b, w])
            for h in range(H):
                kv = h // (H // K)
                slots = slice(int(segments.own[b]), int(segments.own[b]) + S)
                keys = torch.cat((prompt[0][kv, start : start + base], own[0][kv, slots]))[
                    : position + 1
                ].double()
                values = torch.cat((prompt[1][kv, start : start + base], own[1][kv, slots]))[
                    : position + 1
                ].double()
                first = max(0, position + 1 - window) if window else 0
                weights = ((keys[first:] @ q[b, w, h].double()) * D**-0.5).softmax(0)
                out[b, w, h] = weights @ values[first:]
    return out.flatten(2)


@pytest.mark.parametrize("window", [0, 1, 5, 30])
@pytest.mark.parametrize("width", [1, 4, 9])
def test_attention_is_one_softmax_over_both_segments(width, window):
    q, own, prompt, segments, window = case(width, window)
    found = ops.attention(q, own, prompt, segments, scale=D**-0.5, window=window)
    torch.testing.assert_close(
        found.double(), naive(q, own, prompt, segments, window), atol=2e-6, rtol=1e-5
    )


@pytest.mark.parametrize("window", [0, 6, 30])
def test_many_short_prompts_copied_together_give_the_same(window, monkeypatch):
    q, own, prompt, segments, _ = case(4, 0)
    groups = (
        ops.Group(3, 11, slice(0, 2)),
        ops.Group(20, 40, slice(2, 3)),
        ops.Group(3, 11, slice(4, 5)),
    )
    segments = replace(segments, groups=groups)
    due = naive(q, own, prompt, segments, window)
    for limit in (10_000, 0):
        monkeypatch.setattr("bass_kernels.reference._GATHERED", limit)
        found = ops.attention(q, own, prompt, segments, scale=D**-0.5, window=window)
        torch.testing.assert_close(found.double(), due, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_in_half_precision(dtype):
    q, own, prompt, segments, window = case(4, 0, dtype=dtype)
    found = ops.attention(q, own, prompt, segments, scale=D**-0.5, window=window)
    due = naive(q, own, prompt, segments, window)
    assert found.dtype == dtype
    assert (found.double() - due).norm() / due.norm() < (4e-3 if dtype == torch.bfloat16 else 1e-3)


def test_masks_cached_for_a_pass_serve_layers_with_any_window_and_store():
    """A drafter's layers run in the same pass with other heads and another store."""
    q, own, prompt, segments, _ = case(4, 0)
    halved = [tuple(t[:1, : 4 * S + 20].clone() for t in own), tuple(t[:1] for t in prompt)]
    for stores in ((own, prompt), halved):
        for window in (0, 6, 0, 9):
            given = (*stores, segments)
            found = ops.attention(q, *given, scale=D**-0.5, window=window)
            anew = ops.attention(q, *stores, replace(segments), scale=D**-0.5, window=window)
            assert torch.equal(found, anew)
    later = replace(segments, positions=segments.positions + 1)
    due = ops.attention(q, own, prompt, later, scale=D**-0.5)
    assert not torch.equal(due, ops.attention(q, own, prompt, segments, scale=D**-0.5))


def test_large_weights_are_packed_and_give_the_same_product():
    for lines, depth, packed in ((80, 48, False), (512, 256, True)):
        g = torch.Generator().manual_seed(lines)
        weight, x = torch.randn(lines, depth, generator=g), torch.randn(3, 2, depth, generator=g)
        held = ops.pack(weight)
        assert (held.layout is not torch.strided) == packed
        bias = torch.randn(lines, generator=g)
        due = x.double() @ weight.double().T + bias
        torch.testing.assert_close(ops.linear(x, held, bias).double(), due, atol=1e-4, rtol=1e-5)


def test_keys_beyond_a_query_have_no_effect():
    """Rejected keys in the cache, zeroed or not, must have weight 0, not e^0."""
    q, own, prompt, segments, _ = case(4, 0)
    before = ops.attention(q, own, prompt, segments, scale=D**-0.5)
    for b in range(5):
        beyond = int(segments.positions[b, -1] - segments.base[b]) + 1
        beyond = slice(int(segments.own[b]) + beyond, int(segments.own[b]) + S)
        for poison in (0.0, 1e4):
            own[0][:, beyond], own[1][:, beyond] = poison, -poison
            torch.testing.assert_close(
                ops.attention(q, own, prompt, segments, scale=D**-0.5), before
            )


def test_a_row_does_not_depend_on_its_neighbours():
    q, own, prompt, segments, _ = case(4, 0)
    together = ops.attention(q, own, prompt, segments, scale=D**-0.5)
    for b, group in ((1, segments.groups[0]), (2, segments.groups[1]), (3, None)):
        one = slice(b, b + 1)
        groups = () if group is None else (ops.Group(group.start, group.length, slice(0, 1)),)
        alone = ops.Segments(
            segments.positions[one],
            segments.base[one],
            segments.start[one],
            segments.own[one],
            groups,
            segments.extent,
        )
        found = ops.attention(q[one], own, prompt, alone, scale=D**-0.5)
        torch.testing.assert_close(found[0], together[b], atol=2e-6, rtol=1e-5)


def test_rope_write_uses_each_rows_slots_and_explicit_positions():
    g = torch.Generator().manual_seed(1)
    width, rows = 3, 4
    qkv = torch.randn(rows, width, (H + 2 * K) * D, generator=g)
    positions = torch.tensor([[5, 6, 7], [0, 1, 2], [9, 10, 11], [4, 4, 5]])
    slots = positions + (OWN[:rows] - torch.tensor([3, 0, 9, 4]))[:, None]
    qkv[3, 1] = qkv[3, 0]  # one token fed twice at one position
    own = tuple(torch.full((K, 5 * S, D), torch.nan) for _ in range(2))
    inverse = torch.tensor([1.0, 0.1, 0.01])  # 6 of 8 dimensions are rotated
    angles = positions[..., None] * inverse
    q = ops.rope_write(qkv, (angles.cos(), angles.sin()), slots, own, heads=H, norms=None, eps=1e-6)
    split = qkv.view(rows, width, H + 2 * K, D)

    def rotated(x, position):
        a, b, rest = x[:3], x[3:6], x[6:]
        c, s = (position * inverse).cos(), (position * inverse).sin()
        return torch.cat((a * c - b * s, b * c + a * s, rest))

    for b in range(rows):
        for w in range(width):
            place, slot = int(positions[b, w]), int(slots[b, w])
            for h in range(H):
                torch.testing.assert_close(q[b, w, h], rotated(split[b, w, h], place))
            for h in range(K):
                torch.testing.assert_close(own[0][h, slot], rotated(split[b, w, H + h], place))
                torch.testing.assert_close(own[1][h, slot], split[b, w, H + K + h])
    written = set(slots.flatten().tolist())
    assert all(bool(own[0][:, s].isnan().all()) for s in range(5 * S) if s not in written)
