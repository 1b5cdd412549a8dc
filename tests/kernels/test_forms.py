"""Every compiled form of the kernels once, against its definition in plain torch.

A kernel is compiled for each dtype, head size, tiling and option. The compiler may be wrong for one
of them alone: heads of 256 in bfloat16 with a window and 24 lines of 32 once saw no keys on Hopper.
The cases have every combination of three settings, or of two. Without a CUDA device a few of them
run in Triton's interpreter, which compiles nothing.
"""

import pytest
import test_eight_bits as eight
import test_ragged as plain
import torch
from covering import covering
from test_packed_attention import packed
from test_triton import DEVICE, DTYPES, close, randn, triton  # noqa: F401 (a fixture)
from thinned import thinned_on_cpu

import bass_kernels as ops
from bass_kernels import reference

fused_attention = pytest.importorskip("bass_kernels.fused_attention")
ragged = pytest.importorskip("bass_kernels.ragged")

SIZES = [64, 80, 128, 256] if DEVICE.type == "cuda" else [16, 24]
# Schedule, members of a shared-prefix group, queries of a row, query heads of a key head. One tile
# has members * queries * heads lines, of 16, 32 or 64.
LINES = [
    ("ragged", 1, 1, 1),
    ("ragged", 1, 2, 8),
    ("ragged", 1, 3, 8),
    ("ragged", 1, 4, 8),
    ("ragged", 1, 9, 5),
    ("ragged", 1, 33, 3),
    ("ragged", 8, 1, 7),
    ("ragged", 4, 2, 8),
    ("packed", 1, 9, 3),
    ("packed", 1, 9, 7),
    ("pad", 1, 3, 8),
]
ATTENTION = {
    "lines": LINES,
    "size": SIZES,
    "dtype": DTYPES,
    "window": [0, 40],
    "sunk": [False, True],
    "cap": [0.0, 1.5],
    "bits": [16, 8],
    "splits": [1, 3],
    "crowded": [False, True],
}
QUERIES = [1, 5, 3, 9, 1, 2, 9, 1]  # of each packed row


def expected(given, **options):
    """Do reference.attention in float32. A window that hides nothing makes it mask the prompt by
    position too."""
    q, own, prompt, segments = given
    if len(own) > 2:
        own, prompt = eight.floats(own), eight.floats(prompt)
    own, prompt = (tuple(part.float() for part in store) for store in (own, prompt))
    options["window"] = options["window"] or 10**6
    return reference.attention(q.float(), own, prompt, segments, **options)


def poisoned(given):
    """Make the keys NaN that no query sees."""
    return (eight if len(given[1]) > 2 else plain).poisoned(given)


@pytest.mark.parametrize(tuple(ATTENTION), thinned_on_cpu(covering(ATTENTION, 3), 40))
def test_attention(lines, size, dtype, window, sunk, cap, bits, splits, crowded, monkeypatch):
    schedule, members, width, group = lines
    given = plain.case(width, dtype, heads=2 * group, size=size)
    given = eight.in_eight_bits(given) if bits == 8 else given
    sinks = randn(2 * group, dtype=dtype, seed=5) if sunk else None
    options = {"scale": size**-0.5, "window": window, "cap": cap, "sinks": sinks}
    queries, hidden = [min(width, one) for one in QUERIES], poisoned(given)
    if schedule == "packed":
        given, hidden = packed(given, queries, width), packed(hidden, queries, width)
    wanted = expected(given, **options)
    ops.attention_schedule("pad" if schedule == "pad" else "ragged")
    monkeypatch.setattr(ragged, "processors", lambda device: 1 if crowded else 1000)
    found = ragged.attention(
        *hidden, **options, splits=splits, group_splits=splits, members=members
    )
    close(found, wanted, dtype)


FUSED = {
    # queries of a row, query heads of a key head
    "lines": [(1, 1), (1, 7), (4, 4), (3, 8), (4, 8), (9, 7), (16, 4)],
    "size": SIZES,
    "dtype": DTYPES,
    "window": [0, 40],
    "norms": [False, True],
    "rotated": [0, 2],  # pairs of a head that are not rotated
    "bits": [16, 8],
    "splits": [1, 3],
    "peaks": [False, True],
    "early": [False, True],
}


@pytest.mark.parametrize(tuple(FUSED), thinned_on_cpu(covering(FUSED), 12))
def test_fused_attention(lines, size, dtype, window, norms, rotated, bits, splits, peaks, early):
    width, group = lines
    heads, kv_heads = 2 * group, 2
    given = plain.case(width, dtype, heads=heads, size=size)
    given = eight.in_eight_bits(given) if bits == 8 else given
    (q, own, clean, segments), (_, mine, prompt, _) = given, poisoned(given)
    rows, scale = len(q), size**-0.5
    slots = segments.positions + (segments.own - segments.base)[:, None]
    qkv = randn(rows * width, (heads + 2 * kv_heads) * size, dtype=dtype, seed=8)
    turns = segments.positions[..., None] * (0.3 + torch.arange(size // 2 - rotated, device=DEVICE))
    angles = torch.stack((turns.cos(), turns.sin()))
    weights = tuple(randn(size, dtype=dtype, seed=seed) for seed in (5, 6)) if norms else None
    largest = torch.zeros(rows * width, dtype=torch.int32, device=DEVICE) if peaks else None
    found = fused_attention.attend(
        qkv,
        angles.flatten(1, 2),
        weights,
        segments,
        mine,
        prompt,
        heads=heads,
        eps=1e-6,
        scale=scale,
        window=window,
        splits=splits,
        peaks=largest,
        early=early,
    )
    due_own = tuple(part.clone() for part in own)
    line = qkv.view(rows, width, -1)
    if bits == 16:
        line, due_own = line.float(), tuple(part.float() for part in due_own)
        weights = None if weights is None else tuple(weight.float() for weight in weights)
    q = reference.rope_write(
        line, tuple(angles), slots, due_own, heads=heads, norms=weights, eps=1e-6
    )
    wanted = expected((q, due_own, clean, segments), scale=scale, window=window)
    close(found.view(rows, width, -1), wanted, dtype, factor=2)
    written = (eight.floats(mine), eight.floats(due_own)) if bits == 8 else (mine, due_own)
    for one, other in zip(*written, strict=True):
        one, other = one[:, slots].float(), other[:, slots]
        if bits == 16:
            close(one, other, dtype)
        else:  # kernel and definition may round a value to two neighbours
            assert ((one - other).abs() <= 0.13 * other.abs() + 1e-3).all()
            assert (one != other).float().mean() < 0.02
    if peaks:
        assert torch.equal(largest.view(torch.float32), found.float().abs().amax(1))
