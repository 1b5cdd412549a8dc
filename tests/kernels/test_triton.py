"""The Triton kernels against their definitions, on a CUDA device if there is one, otherwise in
Triton's interpreter.

The cases have unequal rows, odd sizes and grouped heads. Keys that no query sees, and outputs
before the launch, are NaN. Integers and choices must be equal, floats close by relative RMS error.
"""

import gc
import weakref

import pytest
import torch

import bass_kernels as ops
from bass_kernels import reference, sampling
from bass_kernels.noise import bits_all, gumbel

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter computes bfloat16 wrongly.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])
BOUND = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@pytest.fixture(autouse=True)
def triton():
    ops.use("triton")


def close(found, due, dtype, factor=1.0):
    found, due = found.double().cpu(), due.double().cpu()
    error = (found - due).norm() / due.norm()
    assert error < factor * BOUND[dtype], f"relative error {error:.2e}"


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 6.92])
def test_embed(dtype, scale):
    tokens, weight = torch.tensor([[0, 3], [8, 99]], device=DEVICE), randn(9, 1100, dtype=dtype)
    assert torch.equal(
        ops.embed(tokens, weight, scale=scale), reference.embed(tokens, weight, scale=scale)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "bias"), [("rms", False), ("layer", True)])
@pytest.mark.parametrize("size", [48, 1000])
def test_norm(dtype, kind, bias, size):
    x, residual = randn(3, 2, size, dtype=dtype), randn(3, 2, size, dtype=dtype, seed=1) + 0.3
    weight, shift = (
        randn(size, dtype=dtype, seed=2),
        randn(size, dtype=dtype, seed=3) if bias else None,
    )
    for added in (x, None):
        normed, total = ops.norm(added, residual, weight, shift, eps=1e-5, kind=kind)
        due = reference.norm(
            None if added is None else added.double(),
            residual.double(),
            weight.double(),
            None if shift is None else shift.double(),
            eps=1e-5,
            kind=kind,
        )
        close(normed, due[0], dtype)
        close(total, due[1], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
def test_activation(dtype, kind, gated):
    x = 2 * randn(3, 2, 2 * 1100, dtype=dtype)
    close(
        ops.activation(x, kind, gated=gated),
        reference.activation(x.double(), kind, gated=gated),
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "rotated", "norms"), [(16, 16, False), (16, 8, False), (24, 24, True), (16, 0, False)]
)
def test_rope_and_cache_write(dtype, size, rotated, norms):
    heads, kv_heads, rows, width, span = 6, 2, 3, 4, 11
    # a part of each line, as with a gate before it
    qkv = randn(rows, width, 7 + (heads + 2 * kv_heads) * size, dtype=dtype)[..., 7:]
    positions = torch.tensor([[3, 4, 5, 6], [0, 1, 2, 3], [7, 8, 9, 10]], device=DEVICE)
    turns = positions[..., None] * (0.3 + torch.arange(rotated // 2, device=DEVICE))
    angles = (turns.cos(), turns.sin()) if rotated else None
    weights = (
        (randn(size, dtype=dtype, seed=5), randn(size, dtype=dtype, seed=6)) if norms else None
    )
    slots = positions + span * torch.tensor([[3], [0], [1]], device=DEVICE)
    own = [
        torch.full((kv_heads, 5 * span, size), torch.nan, dtype=dtype, device=DEVICE)
        for _ in range(2)
    ]
    due_own = [torch.full_like(t, torch.nan, dtype=torch.float32) for t in own]
    q = ops.rope_write(qkv, angles, slots, tuple(own), heads=heads, norms=weights, eps=1e-6)
    due = reference.rope_write(
        qkv.float(),
        angles,
        slots,
        tuple(due_own),
        heads=heads,
        eps=1e-6,
        norms=None if weights is None else tuple(w.float() for w in weights),
    )
    close(q, due, dtype)
    for found, wanted in zip(own, due_own, strict=True):
        assert torch.equal(found.isnan(), wanted.isnan())
        close(found.nan_to_num(), wanted.nan_to_num(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_of_the_outputs_of_attention(dtype):
    x, line = randn(2, 3, 1100, dtype=dtype), randn(2, 3, 1500, dtype=dtype, seed=1)
    found = ops.gate_outputs(x, line[..., :1100])
    close(found, x.double() * line[..., :1100].double().sigmoid(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [(3, 200, 70), (16, 2048, 32), (1, 1100, 48), (3, 16, 34000), (17, 40, 70)],
)
@pytest.mark.parametrize("bias", [True, False])
def test_product_added_to_the_residual_stream(dtype, rows, depth, columns, bias):
    x, weight = randn(rows, 1, depth, dtype=dtype), randn(columns, depth, dtype=dtype, seed=1) / 16
    shift, residual = (
        randn(columns, dtype=dtype, seed=2) if bias else None,
        randn(rows, 1, columns, dtype=dtype, seed=3),
    )
    due = (
        residual.double()
        + x.double() @ weight.double().T
        + (0 if shift is None else shift.double())
    )
    for _ in range(2):  # the second launch needs the counters that the first has reset
        close(ops.linear_add(x, weight, shift, residual.clone()), due, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("rows", "depth"), [(3, 200), (16, 256), (40, 200)])
def test_normed_product_with_activation(dtype, gated, rows, depth):
    x, scale = randn(rows, 1, depth, dtype=dtype), randn(depth, dtype=dtype, seed=1)
    weight, bias = (
        randn(2 * 70, depth, dtype=dtype, seed=2) / 16,
        randn(2 * 70, dtype=dtype, seed=3),
    )
    found = ops.norm_up(
        x, (scale, None), (weight, bias), eps=1e-5, kind="rms", activation="silu", gated=gated
    )
    normed = (
        reference.norm(None, x.double(), scale.double(), None, eps=1e-5, kind="rms")[0]
        .to(dtype)
        .double()
    )
    close(
        found,
        reference.activation(normed @ weight.double().T + bias.double(), "silu", gated=gated),
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "rows", "width"), [(16, 3, 4), (64, 8, 2), (48, 1, 1), (16, 5, 5)]
)
def test_projection_to_queries_and_cache(dtype, size, rows, width):
    heads, kv_heads, span, depth = 4, 2, 30, 100
    x, scale = randn(rows, width, depth, dtype=dtype), randn(depth, dtype=dtype, seed=1)
    weight = randn((heads + 2 * kv_heads) * size, depth, dtype=dtype, seed=2) / 10
    bias = randn(len(weight), dtype=dtype, seed=3)
    slots = (torch.arange(rows) * 13)[:, None].to(DEVICE) + torch.arange(width, device=DEVICE)
    turns = slots[..., None] * (0.3 + torch.arange(size // 2, device=DEVICE))
    angles = turns.cos(), turns.sin()
    own = [
        torch.full((kv_heads, 9 * span, size), torch.nan, dtype=dtype, device=DEVICE)
        for _ in range(2)
    ]
    due_own = [torch.full_like(t, torch.nan, dtype=torch.float32) for t in own]
    q, _ = ops.project(
        x,
        (scale, None),
        (weight, bias),
        angles,
        slots,
        tuple(own),
        heads=heads,
        norms=None,
        eps=1e-6,
        kind="rms",
    )
    normed = (
        reference.norm(None, x.double(), scale.double(), None, eps=1e-6, kind="rms")[0]
        .to(dtype)
        .float()
    )
    due = reference.rope_write(
        normed @ weight.float().T + bias.float(),
        angles,
        slots,
        tuple(due_own),
        heads=heads,
        norms=None,
        eps=1e-6,
    )
    close(q, due, dtype, factor=1.5)
    for found, wanted in zip(own, due_own, strict=True):
        assert torch.equal(found.isnan(), wanted.isnan())
        close(found.nan_to_num(), wanted.nan_to_num(), dtype, factor=1.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_projection_with_norms_over_all_heads(dtype):
    """No norm before, and queries and keys normed as one vector each (OLMo 2)."""
    size, rows, width, heads, kv_heads, depth = 16, 3, 2, 6, 2, 40
    x, weight = randn(rows, width, depth, dtype=dtype), randn(160, depth, dtype=dtype, seed=2) / 6
    norms = tuple(1 + randn(count * size, seed=count) / 3 for count in (heads, kv_heads))
    slots = torch.arange(rows * width, device=DEVICE).view(rows, width)
    own = tuple(torch.zeros(kv_heads, 9, size, dtype=dtype, device=DEVICE) for _ in range(2))
    options = {"heads": heads, "norms": norms, "eps": 1e-6, "kind": "rms"}
    q, _ = ops.project(x, None, (weight, None), None, slots, own, **options)
    parts = (x.float() @ weight.float().T).split((96, 32, 32), -1)
    due = [
        part * (part.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm
        for part, norm in zip(parts, norms, strict=False)
    ]
    close(q, due[0].view(rows, width, heads, size), dtype, factor=2)
    keys = due[1].view(rows * width, kv_heads, size).transpose(0, 1)
    close(own[0][:, : rows * width], keys, dtype, factor=2)
    close(own[1][:, : rows * width], parts[2].reshape(-1, kv_heads, size).transpose(0, 1), dtype, factor=2)  # fmt: skip


LAWS = [(0.0, 0, 1.0), (0.5, 0, 0.95), (0.8, 0, 0.95), (1.0, 0, 1.0), (1.0, 5, 1.0), (0.2, 0, 0.5), (1.5, 0, 0.9),
        (0.8, 3, 0.9), (1.0, 50, 0.8), (0.7, 0, 0.1), (1.0, 1, 1.0), (0.0, 4, 0.3), (1.0, 0, 0.01)]  # fmt: skip


@pytest.mark.parametrize(("vocab", "spread"), [(70, 0.1), (70, 3.0), (8300, 2.0)])
def test_samples_equal_the_definition(vocab, spread):
    """The token equals the definition's, for every kind of distribution in one batch."""
    temperature, top_k, top_p = (
        torch.tensor(column, device=DEVICE) for column in zip(*LAWS, strict=True)
    )
    rows = len(LAWS)
    logits = spread * randn(rows, vocab, seed=vocab)
    logits[:, 7] = logits[:, 3]  # a tie
    keys = torch.randint(0, 2**32, (rows, 2), generator=torch.Generator().manual_seed(4)).to(DEVICE)
    positions = torch.arange(rows, device=DEVICE) * 1000
    params = (temperature, top_k, top_p, keys, positions)
    tokens, scores = ops.sample_scored(logits, *params)
    due, due_scores = sampling.sample_scored(logits, *params)
    assert tokens.tolist() == due.tolist()
    torch.testing.assert_close(scores, due_scores, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_the_best_of_all_noisy_tokens_is_found(temperature):
    """For flat and peaked distributions, most tokens forbidden, ties by rounding, and no token."""
    vocab, rows = 4500, 12
    logits = torch.zeros(rows, vocab, device=DEVICE)
    logits[2:] = randn(rows - 2, vocab, seed=3)
    logits[3:5, 4321] = 30.0
    logits[5:7] += 10000.0
    logits[7, 10:] = -torch.inf
    logits[8, 2100:] = -torch.inf
    logits[9:, ::2] *= 8.0
    params = (
        torch.full((rows,), temperature, device=DEVICE),
        torch.zeros(rows, dtype=torch.int64, device=DEVICE),
        torch.ones(rows, device=DEVICE),
        torch.arange(2 * rows, device=DEVICE).view(rows, 2) + 5,
        torch.arange(rows, device=DEVICE) * 77,
    )
    noise = gumbel(bits_all(params[3], params[4], vocab, stream=0))
    due = (logits / temperature + noise).argmax(-1)
    assert ops.sample(logits, *params).tolist() == due.tolist()
    nothing = torch.full_like(logits, -torch.inf)
    assert (ops.sample(nothing, *params) < vocab).all()


def test_extreme_temperatures_equal_the_definition():
    temperature = torch.tensor([1e-45, 3e-39, 1e-37, 9e-31, 1e-29, 1e-29, 3e38], device=DEVICE)
    rows = len(temperature)
    top_k = torch.tensor([0, 0, 3, 0, 0, 4, 0], device=DEVICE)
    top_p = torch.tensor([1.0, 0.9, 0.8, 1.0, 0.9, 1.0, 1.0], device=DEVICE)
    logits = 60 * randn(rows, 300) - 200
    keys, positions = (
        torch.ones(rows, 2, dtype=torch.int64, device=DEVICE),
        torch.arange(rows, device=DEVICE),
    )
    tokens, scores = ops.sample_scored(logits, temperature, top_k, top_p, keys, positions)
    assert tokens[:-1].tolist() == logits[:-1].argmax(-1).tolist()
    due, due_scores = sampling.sample_scored(logits, temperature, top_k, top_p, keys, positions)
    assert tokens.tolist() == due.tolist()
    torch.testing.assert_close(scores, due_scores, atol=1e-4, rtol=1e-5)


def test_many_samples_agree_and_are_in_the_nucleus():
    rows, vocab = 24 if DEVICE.type == "cpu" else 4096, 300
    logits = randn(1, vocab).expand(rows, vocab).contiguous()
    column = torch.ones(rows, device=DEVICE)
    keys = torch.stack((torch.arange(rows), torch.arange(rows) * 7919), 1).to(DEVICE)
    laws = (0.9 * column, 0 * column.long(), 0.6 * column, keys, torch.full_like(column, 5).long())
    tokens = ops.sample(logits, *laws)
    assert torch.equal(tokens, sampling.sample(logits, *laws))
    assert len(set(tokens.tolist())) > 5


def test_greedy_takes_the_first_of_equal_logits():
    logits = torch.zeros(2, 9000, device=DEVICE)
    logits[0, [4097, 8200]], logits[1, [5, 6000]] = 3.0, 3.0
    zero = torch.zeros(2, device=DEVICE)
    laws = (
        zero,
        zero.long(),
        zero + 1,
        torch.zeros(2, 2, dtype=torch.int64, device=DEVICE),
        zero.long(),
    )
    assert ops.sample(logits, *laws).tolist() == [4097, 5]


def test_counters_survive_a_request_for_more():
    """A captured graph keeps using the counters that it was given."""
    from bass_kernels.launch import counters

    some = torch.device("meta")
    first = weakref.ref(counters(some, 3))
    size = len(first())
    assert counters(some, size).data_ptr() == first().data_ptr()
    assert len(counters(some, size + 1)) > size
    assert len(counters(some, 5 * size)) >= 5 * size
    gc.collect()
    assert first() is not None
