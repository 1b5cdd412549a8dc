"""The likeliest tokens against a stable sort of the whole vocabulary, in torch and in Triton: on a
CUDA device if there is one, otherwise in Triton's interpreter."""

import pytest
import torch

import bass_kernels as ops

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])


@pytest.fixture(autouse=True, params=["reference", "triton"])
def kind(request):
    ops.use(request.param)
    yield
    ops.use(None)


def due(logits, count):
    values, tokens = logits.float().cpu().sort(dim=-1, descending=True, stable=True)
    return tokens[:, :count], values[:, :count]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("vocab", "count"), [(7, 5), (7, 64), (64, 1), (65, 64), (4096, 20), (9001, 20), (9001, 64)]
)
def test_likeliest_equals_a_stable_sort(vocab, count, dtype):
    generator = torch.Generator().manual_seed(vocab + count)
    logits = torch.randn(5, vocab, generator=generator)
    logits[1] = (3 * logits[1]).round()  # ties, 0.0 and -0.0
    logits[2, torch.randperm(vocab, generator=generator)[: vocab - 2]] = -torch.inf
    logits[3] = 1.5
    logits[4, -1] = 40.0
    logits = logits.to(dtype).to(DEVICE)
    tokens, values = ops.likeliest_tokens(logits, count)
    due_tokens, due_values = due(logits, count)
    assert torch.equal(values.cpu(), due_values)
    assert torch.equal(tokens.cpu(), due_tokens)


def test_unwanted_rows_do_not_change_wanted_ones():
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    wanted = torch.tensor([True, False, True, True, False, False], device=DEVICE)
    logits[~wanted] = torch.nan
    tokens, values = ops.likeliest_tokens(logits, 20, wanted)
    due_tokens, due_values = due(logits[wanted], 20)
    assert torch.equal(tokens[wanted].cpu(), due_tokens)
    assert torch.equal(values[wanted].cpu(), due_values)
    assert tokens.min() >= 0
    assert tokens.max() < 5000


def test_entries_hold_ids_and_scores():
    tokens = torch.tensor([[0, 151_935], [2**31 - 1, 7]])
    scores = torch.tensor([[-1.5, 0.0], [-0.0, -torch.inf]])
    packed = ops.report_entries(tokens, scores)
    assert torch.equal(packed >> 32, tokens)
    assert torch.equal(packed.to(torch.int32).view(torch.float32), scores)
