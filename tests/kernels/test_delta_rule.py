"""Gated DeltaNet's rounds and prompts in plain torch, against transformers' layer."""

import pytest
import torch

from bass_kernels import delta_rule
from bass_kernels.delta_rule import DeltaState, DeltaWeights

transformers = pytest.importorskip("transformers")
TAPS = 4
EPS = 1e-6


def layer_of(key_heads, value_heads, key_size, value_size, *, seed=0):
    """A layer of transformers with random weights, and the same weights as ours."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    torch.manual_seed(seed)
    config = Qwen3_5TextConfig(
        hidden_size=24,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=key_size,
        linear_value_head_dim=value_size,
        linear_conv_kernel_dim=TAPS,
        rms_norm_eps=EPS,
    )
    layer = Qwen3_5GatedDeltaNet(config, 0).eval().requires_grad_(False)
    for parameter in layer.parameters():
        parameter.normal_(0, 0.5)
    weights = DeltaWeights(layer.conv1d.weight[:, 0], layer.A_log, layer.dt_bias, layer.norm.weight)
    return layer, weights


def projected(layer, hidden):
    gates = torch.cat((layer.in_proj_b(hidden), layer.in_proj_a(hidden)), -1)
    return layer.in_proj_qkv(hidden), gates, layer.in_proj_z(hidden)


def empty_state(layer, slots, width):
    """A state whose every number is NaN until it is written."""
    heads, keys, values = layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    size = delta_rule.places(TAPS, width)
    return DeltaState(
        torch.full((slots, heads, keys, values), torch.nan),
        torch.full((slots, size, layer.conv_dim + 2 * heads), torch.nan),
    )


def close(found, due):
    error = (found - due).norm() / due.norm()
    assert error < 2e-6, f"relative error {error:.2e}"


def prompts(layer, weights, state, hidden, slots, lengths, firsts=None):
    """Run parts of prompts one after the other in one pass, and return their outputs."""
    firsts = firsts or [0] * len(slots)
    pairs = list(zip(firsts, lengths, strict=True))
    inputs = torch.cat([one[a : a + n] for one, (a, n) in zip(hidden, pairs, strict=True)])
    begins = torch.tensor([0, *lengths]).cumsum(0)[:-1].tolist()
    parts = torch.tensor(list(zip(slots, begins, lengths, firsts, strict=True)))
    given = projected(layer, inputs)
    return delta_rule.delta_prompt(*given, weights, state, parts=parts, eps=EPS).split(lengths)


@pytest.mark.parametrize("shape", [(2, 4, 8, 6), (1, 3, 5, 7), (2, 2, 8, 8)])
def test_prompts_equal_the_layer_of_transformers(shape):
    layer, weights = layer_of(*shape)
    hidden = [torch.randn(150, 24), torch.randn(150, 24), torch.randn(150, 24)]
    lengths = [1, 70, 129]
    state = empty_state(layer, 5, 3)
    found = prompts(layer, weights, state, hidden, [4, 0, 2], lengths)
    for one, text, length in zip(found, hidden, lengths, strict=True):
        close(layer.out_proj(one), layer(text[None, :length])[0])


def test_parts_of_a_prompt_continue_its_state():
    layer, weights = layer_of(2, 4, 8, 6)
    text = torch.randn(140, 24)
    state = empty_state(layer, 2, 3)
    found = []
    for first, behind in ((0, 2), (2, 3), (3, 90), (90, 140)):
        found += prompts(layer, weights, state, [text], [1], [behind - first], [first])
    close(layer.out_proj(torch.cat(found)), layer(text[None])[0])
    whole = empty_state(layer, 2, 3)
    prompts(layer, weights, whole, [text], [0], [140])
    close(state.state[1], whole.state[0])


@pytest.mark.parametrize("width", [1, 2, 5, 9])
@pytest.mark.parametrize("shape", [(2, 4, 8, 6), (1, 3, 5, 7)])
def test_rounds_of_accepted_and_rejected_drafts_equal_the_layer_of_transformers(shape, width):
    """Each row accepts its own number of tokens; rejected ones are then replaced."""
    layer, weights = layer_of(*shape)
    rows, rounds, begin = 3, 6, [2, 0, 5]
    texts = torch.randn(rows, 100, 24)
    state = empty_state(layer, 6, width)
    slots = torch.tensor([5, 1, 2])
    prompts(layer, weights, state, list(texts), slots.tolist(), begin)
    state.state[1] = 0  # the row without a prompt
    due, outputs = layer(texts), [[] for _ in range(rows)]
    lengths, advance = torch.tensor(begin), torch.zeros(rows, dtype=torch.long)
    for _ in range(rounds):
        positions = lengths[:, None] + torch.arange(width)
        accepted = torch.randint(1, width + 1, (rows,))
        hidden = texts.gather(1, positions[..., None].expand(-1, -1, 24)).clone()
        rejected = torch.arange(width) >= accepted[:, None]
        hidden[rejected] = torch.randn(int(rejected.sum()), 24)
        found = delta_rule.delta_round(
            *projected(layer, hidden),
            weights,
            state,
            slots=slots,
            positions=positions,
            advance=advance,
            eps=EPS,
        )
        for row in range(rows):
            outputs[row].append(layer.out_proj(found[row, : accepted[row]]))
        lengths, advance = lengths + accepted, accepted
    for row in range(rows):
        close(torch.cat(outputs[row]), due[row, begin[row] : lengths[row]])
    assert state.state[[0, 3, 4]].isnan().all(), "slots of no row are not written"


def test_many_rounds_leave_the_state_of_one_pass():
    """Errors of rounding do not grow."""
    layer, weights = layer_of(1, 2, 8, 6)
    text, width, length, advance = torch.randn(1, 700, 24), 3, 0, 0
    given = projected(layer, text)
    state, whole = empty_state(layer, 1, width), empty_state(layer, 1, width)
    state.state[:] = 0
    for step in range(300):
        delta_rule.delta_round(
            *(one[:, length : length + width] for one in given),
            weights,
            state,
            slots=torch.tensor([0]),
            positions=length + torch.arange(width)[None],
            advance=torch.tensor([advance]),
            eps=EPS,
        )
        advance = step % width + 1
        length += advance
    assert length == 600
    prompts(layer, weights, whole, list(text), [0], [length - advance])
    close(state.state, whole.state)


@pytest.mark.parametrize("shape", [(2, 4, 16, 32), (1, 3, 32, 32)])
def test_the_width_of_rounds_changes_no_bit(shape):
    """With sizes of heads that are multiples of 32, as in the published models."""
    layer, weights = layer_of(*shape)
    given = projected(layer, torch.randn(1, 18, 24))
    outputs = []
    for widths in ([1] * 18, [4, 4, 4, 4, 2], [9, 9], [7, 7, 4]):
        state, length, advance, found = empty_state(layer, 1, 9), 0, 0, []
        state.state[:] = 0
        for width in widths:
            found.append(
                delta_rule.delta_round(
                    *(one[:, length : length + width] for one in given),
                    weights,
                    state,
                    slots=torch.tensor([0]),
                    positions=length + torch.arange(width)[None],
                    advance=torch.tensor([advance]),
                    eps=EPS,
                )
            )
            length, advance = length + width, width
        outputs.append(torch.cat(found, 1))
    assert all(torch.equal(outputs[0], one) for one in outputs)


def test_padding_rows_read_and_write_nothing():
    layer, weights = layer_of(2, 4, 8, 6)
    state = empty_state(layer, 2, 3)
    state.state[1], state.inputs[1] = 0, 0
    before = state.state[0].clone(), state.inputs[0].clone()
    hidden = torch.randn(3, 2, 24)
    found = delta_rule.delta_round(
        *projected(layer, hidden),
        weights,
        state,
        slots=torch.tensor([-1, 1, -1]),
        positions=torch.tensor([[0, 1], [0, 1], [7, 8]]),
        advance=torch.tensor([1000, 0, -5]),
        eps=EPS,
    )
    assert (found[[0, 2]] == 0).all()
    close(layer.out_proj(found[1]), layer(hidden[1:2])[0])
    assert torch.equal(state.state[0].isnan(), before[0].isnan())
    assert state.inputs[0].isnan().all()
