"""Gated DeltaNet's Triton kernels against their definition, on a CUDA device if there is one,
otherwise in Triton's interpreter. test_delta_rule.py holds the definition against transformers."""

import itertools

import pytest
import torch

import bass_kernels as ops
from bass_kernels import delta_rule
from bass_kernels.delta_rule import DeltaState, DeltaWeights

pytest.importorskip("triton")
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# The interpreter computes bfloat16 wrongly.
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3} | ({torch.bfloat16: 1.5e-2} if CUDA else {})
EPS = 1e-6


@pytest.fixture(autouse=True)
def triton():
    ops.use("triton")


def layer_of(shape, tokens, dtype, *, slots, width, kernel_size=4):
    """Weights, a state, and inputs [*tokens, ...] as views of one projection."""
    key_heads, heads, key_size, value_size = shape
    channels, values = 2 * key_heads * key_size + heads * value_size, heads * value_size
    generator = torch.Generator().manual_seed(len(tokens) + heads)

    def randn(*sizes):
        return torch.randn(*sizes, generator=generator)

    filters, norm = randn(channels, kernel_size).to(dtype), randn(value_size).to(dtype)
    weights = DeltaWeights(filters, randn(heads), randn(heads), norm)
    places = delta_rule.places(kernel_size, width)
    inputs = randn(slots, places, channels + 2 * heads).to(dtype)
    state = DeltaState(0.3 * randn(slots, heads, key_size, value_size), inputs)
    projection = randn(*tokens, channels + 2 * heads + values).to(dtype).to(DEVICE)
    weights = DeltaWeights(*(one.to(DEVICE) for one in weights))
    return weights, state, projection.split((channels, 2 * heads, values), -1)


def compare(op, weights, state, given, dtype, unread, **options):
    """Both forms give the same outputs and states, whatever the unread slots hold."""
    state.state[unread], state.inputs[unread] = torch.nan, torch.nan
    own, due = (DeltaState(*(one.clone().to(DEVICE) for one in state)) for _ in range(2))
    found = getattr(ops, op)(*given, weights, own, **options, eps=EPS)
    wanted = getattr(delta_rule, op)(*given, weights, due, **options, eps=EPS)
    assert found.dtype == dtype
    assert torch.equal(own.inputs.nan_to_num(7.0), due.inputs.nan_to_num(7.0))
    assert torch.equal(own.state.isnan(), due.state.isnan())
    for one, other in ((found, wanted), (own.state, due.state)):
        one, other = one.double().nan_to_num(7.0), other.double().nan_to_num(7.0)
        error = (one - other).norm() / other.norm()
        assert error < BOUNDS[dtype], f"relative error {error:.2e}"


SHAPES = [(1, 3, 5, 7), (2, 2, 8, 40)] + [(16, 48, 128, 128)] * CUDA
ROUNDS = [
    *((SHAPES[0], 9, torch.float32), (SHAPES[0], 1, torch.float16)),
    *((SHAPES[1], 1, torch.float32), (SHAPES[1], 4, torch.float16)),
]
if CUDA:
    ROUNDS = list(itertools.product(SHAPES, (1, 2, 4, 9), BOUNDS))


@pytest.mark.parametrize(("shape", "width", "dtype"), ROUNDS)
def test_a_round(shape, width, dtype):
    """Uneven numbers of accepted tokens, a new row, a row near its begin, and padding."""
    weights, state, given = layer_of(shape, (5, width), dtype, slots=7, width=width)
    advance = torch.tensor([0, width, 1, 1000, width])
    first = torch.tensor([0, 100, 1, width + 1, width])
    compare(
        "delta_round",
        weights,
        state,
        given,
        dtype,
        [0, 1],
        slots=torch.tensor([3, 6, 2, -1, 5]).to(DEVICE),
        positions=(first[:, None] + torch.arange(width)).to(DEVICE),
        advance=advance.to(DEVICE),
    )


@pytest.mark.parametrize(("width", "most"), [(2, 9), (18, 18)])
def test_rounds_of_more_tokens_than_a_chunk(width, most):
    """A narrow round after a wide one, and one that is wider than a chunk."""
    weights, state, given = layer_of(
        SHAPES[0], (2, width), torch.float32, slots=2, width=max(width, most)
    )
    first = torch.tensor([30, 7])
    compare(
        "delta_round",
        weights,
        state,
        given,
        torch.float32,
        [],
        slots=torch.tensor([1, 0]).to(DEVICE),
        positions=(first[:, None] + torch.arange(width)).to(DEVICE),
        advance=torch.tensor([most, 7]).to(DEVICE),
    )


def fresh_pass(tokens, weights, shape):
    """The state after tokens [T, C + 2H], token by token in float64: [H, Dk, Dv]."""
    key_heads, heads, key_size, value_size = shape
    filters, decay, bias, _ = (one.double().cpu() for one in weights)
    channels, size = filters.shape
    tokens = tokens.double().cpu()
    padded = torch.cat((tokens.new_zeros(size - 1, tokens.shape[1]), tokens))[:, :channels]
    state = torch.zeros(heads, key_size, value_size, dtype=torch.float64)
    for place, token in enumerate(tokens):
        mixed = (padded[place : place + size].T * filters).sum(1)
        mixed = mixed * mixed.sigmoid()
        key = mixed[key_heads * key_size : 2 * key_heads * key_size].view(key_heads, key_size)
        key = key / (key.square().sum(1, keepdim=True) + 1e-6).sqrt()
        key = key.repeat_interleave(heads // key_heads, 0)
        value = mixed[2 * key_heads * key_size :].view(heads, value_size)
        beta, gate = token[channels:].chunk(2)
        state *= (-decay.exp() * torch.log1p((gate + bias).exp())).exp()[:, None, None]
        change = value - torch.einsum("hk,hkv->hv", key, state)
        state += torch.einsum("hk,hv->hkv", key, beta.sigmoid()[:, None] * change)
    return state


def test_the_state_after_many_rounds_is_that_of_a_fresh_pass():
    """Rounds of 1 to 5 tokens, of which some are accepted. Slow decays: the state
    remembers hundreds of tokens."""
    shape, rounds, width, rows = (1, 2, 8, 16), 2000 if CUDA else 5, 5, 2 if CUDA else 1
    weights, state, _ = layer_of(shape, (1, 1), torch.float32, slots=rows, width=width)
    weights = weights._replace(decay=torch.full_like(weights.decay, -5.0))
    state = DeltaState(*(torch.zeros_like(one).to(DEVICE) for one in state))
    lines, values = weights.convolution.shape[0] + 4, 2 * 16
    generator = torch.Generator().manual_seed(0)
    slots, eps = torch.arange(rows, device=DEVICE), EPS
    first, advance = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    kept = [[] for _ in range(rows)]
    for _ in range(rounds):
        now = int(torch.randint(1, width + 1, (1,), generator=generator))
        given = torch.randn(rows, now, lines + values, generator=generator)
        ops.delta_round(
            *given.to(DEVICE).split((lines - 4, 4, values), -1),
            weights,
            state,
            slots=slots,
            positions=(first[:, None] + torch.arange(now)).to(DEVICE),
            advance=advance.to(DEVICE),
            eps=eps,
        )
        advance = torch.randint(1, now + 1, (rows,), generator=generator)
        for row, count in enumerate(advance.tolist()):
            kept[row].append(given[row, :count, :lines])
        first = first + advance
    given = torch.randn(rows, 1, lines + values, generator=generator).to(DEVICE)
    ops.delta_round(
        *given.split((lines - 4, 4, values), -1),
        weights,
        state,
        slots=slots,
        positions=first[:, None].to(DEVICE),
        advance=advance.to(DEVICE),
        eps=eps,
    )
    for row in range(rows):
        due = fresh_pass(torch.cat(kept[row]), weights, shape)
        error = (state.state[row].double().cpu() - due).norm() / due.norm()
        assert error < (1e-4 if CUDA else 1e-5), f"relative error {error:.2e}"


def test_a_round_with_a_shorter_filter():
    weights, state, given = layer_of(
        (1, 2, 8, 8), (1, 2), torch.float32, slots=1, width=2, kernel_size=2
    )
    options = {
        "slots": torch.tensor([0]),
        "positions": torch.tensor([[5, 6]]),
        "advance": torch.tensor([2]),
    }
    options = {name: one.to(DEVICE) for name, one in options.items()}
    compare("delta_round", weights, state, given, torch.float32, [], **options)


def test_a_longer_filter_is_refused():
    weights, state, given = layer_of(
        (1, 2, 8, 8), (1, 1), torch.float32, slots=1, width=1, kernel_size=5
    )
    one = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="kernel size of the convolution is 5; the most is 4"):
        ops.delta_round(
            *given, weights, state, slots=one, positions=one[None], advance=one, eps=EPS
        )


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES[1:])
def test_parts_of_prompts(shape, dtype):
    """A pass over parts that begin and parts that continue, with gaps of padding and a part without
    tokens."""
    weights, state, given = layer_of(shape, (150,), dtype, slots=6, width=3)
    parts = [[3, 1, 1, 0], [5, 7, 2, 2], [0, 0, 0, 0], [2, 10, 64, 9], [1, 76, 70, 0]]
    compare(
        "delta_prompt",
        weights,
        state,
        given,
        dtype,
        [0, 1, 3, 4],
        parts=torch.tensor(parts).to(DEVICE),
    )
