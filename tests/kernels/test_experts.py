"""Mixtures of experts: the definition against plain products token by token, and the Triton form
against the definition."""

import itertools
import math

import pytest
import torch
from test_triton import BOUND, DEVICE, DTYPES, close, randn, triton  # noqa: F401 (a fixture)
from thinned import thinned_on_cpu

import bass_kernels as ops
from bass_kernels import Quantised
from bass_kernels import experts as definition

SIZES = [(1, 5, 2, 40, 24), (7, 6, 3, 33, 70), (40, 9, 2, 64, 48), (3, 130, 8, 48, 16)]
# Experts have 26, 40 and 65 pairs on average, so tiles have more tokens.
MANY = [(52, 2, 1, 33, 70), (80, 4, 2, 24, 40), (130, 2, 1, 40, 24)]
GATES = [("silu", None), ("gelu_tanh", None), ("silu", ops.Clamp(1.702, 0.4))]


def maps_of(experts, width, inner, dtype, *, biased):
    def made(rows, columns, seed):
        return randn(rows, columns, dtype=dtype, seed=seed) / math.sqrt(columns)

    biases = [randn(rows, dtype=dtype, seed=rows) / 3 for rows in (2 * experts * inner, experts * width)]  # fmt: skip
    up, down = made(2 * experts * inner, width, 3), made(experts * width, inner, 4)
    return ops.Maps(up, biases[0] if biased else None, down, biases[1] if biased else None)


def by_hand(x, ids, weights, maps, activation, clamp):
    """Each token alone, in float64."""
    found = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    width, inner = x.shape[1], maps.down.shape[1]
    for token, row in enumerate(x.double()):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            first, middle = 2 * inner * expert, 2 * inner * expert + inner
            gates = maps.up[first:middle].double() @ row
            ups = maps.up[middle : middle + inner].double() @ row
            if maps.up_bias is not None:
                gates = gates + maps.up_bias[first:middle]
                ups = ups + maps.up_bias[middle : middle + inner]
            if clamp is None:
                mixed = getattr(torch.nn.functional, activation.removesuffix("_tanh"))
                mixed = mixed(gates, approximate="tanh") if "tanh" in activation else mixed(gates)
                mixed = mixed * ups
            else:
                gates, ups = gates.clamp(max=clamp.limit), ups.clamp(-clamp.limit, clamp.limit)
                mixed = (ups + 1) * gates * torch.sigmoid(clamp.alpha * gates)
            rows = slice(width * expert, width * (expert + 1))
            out = maps.down[rows].double() @ mixed
            found[token] += weight * (out if maps.down_bias is None else out + maps.down_bias[rows])
    return found


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_definition_of_the_router(size, normalised):
    tokens, experts, chosen, width, _ = size
    x, router = randn(tokens, width), randn(experts, width, seed=1)
    bias = randn(experts, seed=2)
    ids, weights = definition.route(x, router, bias, chosen=chosen, normalised=normalised)
    logits = x @ router.T + bias
    for token, row in enumerate(logits):
        best = sorted(range(experts), key=lambda expert: -row[expert])[:chosen]
        assert ids[token].tolist() == best
        among = row[best] if normalised else row
        due = row[best].exp() / among.exp().sum()
        torch.testing.assert_close(weights[token], due, atol=1e-6, rtol=1e-5)


def test_equal_logits_choose_the_first_experts():
    x, router = torch.ones(2, 8, device=DEVICE), torch.ones(6, 8, device=DEVICE)
    for route in (definition.route, ops.route):
        ids, weights = route(x, router, None, chosen=3, normalised=True)
        assert ids.tolist() == [[0, 1, 2]] * 2
        torch.testing.assert_close(weights, torch.full_like(weights, 1 / 3))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("activation", "clamp"), GATES)
@pytest.mark.parametrize("size", SIZES[:3])
def test_definition_of_the_experts(size, activation, clamp, biased):
    tokens, experts, chosen, width, inner = size
    x, maps = randn(tokens, width), maps_of(experts, width, inner, torch.float32, biased=biased)
    ids, weights = definition.route(
        x, randn(experts, width, seed=1), None, chosen=chosen, normalised=True
    )
    words = {"experts": experts, "activation": activation, "clamp": clamp}
    found = definition.mix_experts(x, ids, weights, maps, **words)
    due = by_hand(x, ids, weights, maps, activation, clamp)
    torch.testing.assert_close(found.double(), due, atol=1e-5, rtol=1e-4)
    added = definition.mix_experts(x, ids, weights, maps, 2 * x, **words)
    torch.testing.assert_close(added, found + 2 * x, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("op", [
    "definition",
    pytest.param("op", marks=pytest.mark.skipif(
        DEVICE.type == "cpu", reason="the interpreter's products depend on the row of a tile")),
])  # fmt: skip
def test_a_token_has_the_same_bits_whatever_tokens_are_beside_it(op):
    """Plain and speculative decoding run a token with other numbers of tokens in the pass."""
    experts, chosen, width, inner = 5, 2, 96, 56
    mix, route = (
        (definition.mix_experts, definition.route)
        if op == "definition"
        else (ops.mix_experts, ops.route)
    )
    x, maps = randn(23, width), maps_of(experts, width, inner, torch.float32, biased=True)
    router = randn(experts, width, seed=1)

    def run(rows):
        ids, weights = route(rows, router, None, chosen=chosen, normalised=True)
        return mix(rows, ids, weights, maps, rows, experts=experts, activation="silu")

    alone = torch.cat([run(row[None]) for row in x])
    for count in (2, 3, 9, 16, 23):
        assert torch.equal(run(x[:count]), alone[:count])
    assert torch.equal(run(x.flip(0)), alone.flip(0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_router_equals_the_definition(size, normalised, dtype):
    tokens, experts, chosen, width, _ = size
    x, router = randn(tokens, width, dtype=dtype), randn(experts, width, dtype=dtype, seed=1)
    bias = randn(experts, dtype=dtype, seed=2)
    words = {"chosen": chosen, "normalised": normalised}
    ids, weights = ops.route(x, router, bias, **words)
    due_ids, due = definition.route(x, router, bias, **words)
    assert (ids == due_ids).float().mean() > (0.98 if dtype is torch.float32 else 0.9)
    assert sorted(ids[0].tolist()) == sorted(set(ids[0].tolist()))
    close(weights, due, torch.float32 if dtype is torch.float32 else dtype)


@pytest.mark.parametrize(
    ("size", "gate", "biased", "dtype"),
    thinned_on_cpu(itertools.product([*SIZES, MANY[2]], GATES, [False, True], DTYPES), 5),
)
def test_experts_equal_the_definition(size, gate, biased, dtype):
    (activation, clamp), (tokens, experts, chosen, width, inner) = gate, size
    x, maps = (
        randn(tokens, width, dtype=dtype),
        maps_of(experts, width, inner, dtype, biased=biased),
    )
    router = randn(experts, width, dtype=dtype, seed=1)
    ids, weights = definition.route(x, router, None, chosen=chosen, normalised=True)
    words = {"experts": experts, "activation": activation, "clamp": clamp}
    found = ops.mix_experts(x, ids, weights, maps, x, **words)
    wide = ops.Maps(*(None if one is None else one.float() for one in maps))
    due = definition.mix_experts(x.float(), ids, weights, wide, x.float(), **words)
    close(found, due, dtype, factor=2)


def test_all_tokens_may_choose_the_same_experts():
    """One expert has every token, in several tiles, and the others have none."""
    x, maps = randn(200, 32), maps_of(4, 32, 16, torch.float32, biased=False)
    ids = torch.tensor([[2, 0]], device=DEVICE).expand(200, -1)
    weights = torch.tensor([[0.75, 0.25]], device=DEVICE).expand(200, -1).contiguous()
    words = {"experts": 4, "activation": "silu"}
    found = ops.mix_experts(x, ids, weights, maps, **words)
    close(found, definition.mix_experts(x, ids, weights, maps, **words), torch.float32)


@pytest.mark.parametrize("rounds", [False, True])
def test_experts_are_added_to_the_stream(rounds, monkeypatch):
    """Sums of squares and magnitudes of places after the last token are 0, because later launches
    read all places."""
    kernels = pytest.importorskip("bass_kernels.expert_kernels")
    residual = pytest.importorskip("bass_kernels.residual")
    tokens, experts, chosen, width, inner = 5, 6, 2, 1100, 24
    x, maps = randn(tokens, width), maps_of(experts, width, inner, torch.float32, biased=False)
    router, norm = randn(experts, width, seed=1), randn(width, seed=5)
    ids, weights = definition.route(x, router, None, chosen=chosen, normalised=True)
    before, empty = randn(tokens, width, seed=6), torch.empty
    stream = residual.Stream(before, x, torch.zeros(2, 16, device=DEVICE))
    monkeypatch.setattr(torch, "empty", lambda *sizes, **words: empty(*sizes, **words).fill_(-1))
    unit = kernels.Mixture(experts, "silu", None)
    found = kernels.add_experts(x, ids, weights, maps, stream, norm, unit, rounds=rounds)
    words = {"experts": experts, "activation": "silu"}
    expected = before + definition.mix_experts(x, ids, weights, maps, **words)
    close(found.residual, expected, torch.float32)
    close(found.x, expected * norm, torch.float32)
    close(found.squares.sum(0)[:tokens], expected.square().sum(1), torch.float32)
    assert not found.squares[:, tokens:].any()
    if not rounds:
        assert found.largest is None
        return
    largest = found.largest.amax(0)[:tokens].view(torch.float32)
    assert torch.equal(largest, found.x.abs().amax(1))
    assert not found.largest[:, tokens:].any()


def in_8_bits(maps, layout):
    up, down = (Quantised.of(one, layout) for one in (maps.up, maps.down))
    return maps._replace(up=up, down=down)


def rounded(x, layout):
    """Tokens x as they are multiplied with weights of a layout: with fp8 the nearest e4m3 numbers,
    over the scale of each token, times that scale."""
    if layout == "int8":
        return x
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("layout", ops.LAYOUTS)
def test_experts_in_8_bits_multiply_rounded_tokens_by_rounded_weights(layout, biased):
    """Each expert's maps alone, in float64, with the rounding that this test does itself."""
    tokens, experts, chosen, width, inner = 9, 5, 2, 40, 24
    plain = maps_of(experts, width, inner, torch.float32, biased=biased)
    maps, x = in_8_bits(plain, layout), randn(tokens, width)
    ids, weights = definition.route(
        x, randn(experts, width, seed=1), None, chosen=chosen, normalised=True
    )
    found = definition.mix_experts(x, ids, weights, maps, experts=experts, activation="silu")

    def product(row, weight, bias, expert, every):
        part = slice(expert * every, (expert + 1) * every)
        lines = weight[part].double()
        scales = lines.abs().amax(1, keepdim=True) / {"int8": 127, "fp8": 448}[layout]
        lines = lines / scales
        if layout == "fp8":
            lines = lines.float().to(torch.float8_e4m3fn).double()
        out = (lines.round() if layout == "int8" else lines) * scales @ rounded(row, layout)
        return out if bias is None else out + bias[part]

    for token, row in enumerate(x.double()):
        total = torch.zeros(width, dtype=torch.float64, device=x.device)
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            gates, ups = product(row, plain.up, plain.up_bias, expert, 2 * inner).chunk(2)
            mixed = torch.nn.functional.silu(gates) * ups
            total += weight * product(mixed, plain.down, plain.down_bias, expert, width)
        close(found[token], total, torch.float32, factor=2000 if layout == "fp8" else 2)


@pytest.mark.parametrize("layout", ops.LAYOUTS)
def test_a_token_has_the_same_bits_in_8_bits_whatever_tokens_are_beside_it(layout):
    experts, chosen, width, inner = 5, 2, 96, 56
    maps = in_8_bits(maps_of(experts, width, inner, torch.float32, biased=True), layout)
    x, router = randn(23, width).cpu(), randn(experts, width, seed=1).cpu()
    maps = in_8_bits(
        ops.Maps(
            *(one.cpu() for one in maps_of(experts, width, inner, torch.float32, biased=True))
        ),
        layout,
    )

    def run(rows):
        ids, weights = definition.route(rows, router, None, chosen=chosen, normalised=True)
        return definition.mix_experts(rows, ids, weights, maps, experts=experts, activation="silu")

    alone = torch.cat([run(row[None]) for row in x])
    for count in (2, 3, 9, 16, 23):
        assert torch.equal(run(x[:count]), alone[:count])


def test_gate_of_the_expert_of_all_tokens_has_the_same_bits_whatever_tokens_are_beside_it():
    tokens, experts, width, inner = 41, 4, 32, 16
    x, output = (randn(tokens, width, dtype=torch.float32, seed=seed).cpu() for seed in (1, 2))
    router, gate = randn(experts, width).cpu(), randn(1, width).cpu()
    maps = ops.Maps(
        *(
            None if one is None else one.cpu()
            for one in maps_of(experts, width, inner, torch.float32, biased=False)
        )
    )

    def run(first, last):
        rows, shared = x[first:last], ops.Shared(output[first:last], gate)
        ids, weights = definition.route(rows, router, None, chosen=2, normalised=True)
        words = {"experts": experts, "activation": "silu"}
        return definition.mix_experts(rows, ids, weights, maps, None, shared, **words)

    alone = torch.cat([run(at, at + 1) for at in range(tokens)])
    for first, last in ((0, 2), (0, 17), (5, 37), (0, 41)):
        assert torch.equal(run(first, last), alone[first:last])


@pytest.mark.parametrize("op", [definition.mix_experts, ops.mix_experts])
@pytest.mark.parametrize("dtype", DTYPES)
def test_expert_of_all_tokens_is_added_times_its_gate(op, dtype):
    tokens, experts, chosen, width, inner = 5, 4, 2, 1060, 24
    x, maps = (
        randn(tokens, width, dtype=dtype),
        maps_of(experts, width, inner, dtype, biased=False),
    )
    ids = torch.tensor([[1, 3]], device=DEVICE).expand(tokens, -1).contiguous()
    weights = randn(tokens, chosen).abs()
    shared = ops.Shared(
        randn(tokens, width, dtype=dtype, seed=5), randn(1, width, dtype=dtype) / 30
    )
    words = {"experts": experts, "activation": "silu"}
    found = op(x, ids, weights, maps, x, shared, **words)
    gates = torch.sigmoid(x.double() @ shared.gate.double().T)
    due = op(x, ids, weights, maps, x, **words).double() + gates * shared.output.double()
    close(found, due, dtype, factor=2)


@pytest.mark.parametrize(
    ("size", "gate", "layout", "dtype"),
    thinned_on_cpu(itertools.product([*SIZES, *MANY], GATES[::2], ops.LAYOUTS, DTYPES), 5),
)
def test_experts_in_8_bits_equal_the_definition(size, gate, layout, dtype):
    """The inner values have an error e before they are rounded to e4m3: on a GPU 4e-4, because its
    tensor cores sum e4m3 with some 13 bits. At the border of two numbers a value is then rounded to
    the other one, which is at most 1/8 of it away. This has a probability of 8 e, so the mean of
    the squares of these errors is e / 8."""
    activation, clamp = gate
    tokens, experts, chosen, width, inner = size
    x = randn(tokens, width, dtype=dtype)
    maps = in_8_bits(maps_of(experts, width, inner, dtype, biased=clamp is not None), layout)
    router = randn(experts, width, dtype=dtype, seed=1)
    ids, weights = definition.route(x, router, None, chosen=chosen, normalised=True)
    words = {"experts": experts, "activation": activation, "clamp": clamp}
    found = ops.mix_experts(x, ids, weights, maps, x, **words)
    due = definition.mix_experts(x, ids, weights, maps, x, **words)
    factor = 2.0
    if layout == "fp8" and dtype == torch.float32:
        error = 4e-4 if DEVICE.type == "cuda" else BOUND[dtype]
        factor = math.sqrt(error / 8) / BOUND[dtype]
    close(found, due, dtype, factor=factor)


@pytest.mark.parametrize("layout", ops.LAYOUTS)
def test_experts_fit_a_gpu_with_little_shared_memory(layout, monkeypatch):
    """Experts with 65 tokens have tiles of 128 on a Hopper GPU, which a consumer GPU cannot hold."""
    kernels = pytest.importorskip("bass_kernels.expert_kernels")
    launch = pytest.importorskip("bass_kernels.launch")
    tokens, experts, chosen, width, inner = MANY[2]
    if DEVICE.type == "cuda":
        pytest.skip("the limits of the GPU itself count")
    small = launch.Card((8, 6), 99 * 1024)
    monkeypatch.setattr(launch, "card", lambda device: small)
    monkeypatch.setattr(kernels, "card", lambda device: small)
    x = randn(tokens, width, dtype=torch.float16)
    maps = in_8_bits(maps_of(experts, width, inner, torch.float16, biased=False), layout)
    ids, weights = definition.route(
        x, randn(experts, width, dtype=torch.float16), None, chosen=chosen, normalised=True
    )
    words = {"experts": experts, "activation": "silu"}
    found = ops.mix_experts(x, ids, weights, maps, x, **words)
    close(found, definition.mix_experts(x, ids, weights, maps, x, **words), torch.float16, factor=2)
