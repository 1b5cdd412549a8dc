"""The likeliest tokens against a stable sort of the whole vocabulary, in torch and in Triton: on a
CUDA device if there is one, otherwise in Triton's interpreter."""

import pytest
import torch

import bass_kernels as ops
from bass_kernels import sampling

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])


@pytest.fixture(autouse=True, params=["reference", "triton"])
def kind(request):
    ops.use(request.param)


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


@pytest.mark.parametrize(("vocab", "count"), [(3, 5), (5000, 5)])
def test_entries_hold_ids_and_log_probabilities(vocab, count):
    logits = 3 * torch.randn(4, vocab, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    due = logits.double().log_softmax(-1)
    tokens = torch.tensor([2, 0, 1, 1], device=DEVICE)
    scores = due.gather(1, tokens[:, None])[:, 0].float()
    entries = ops.report_entries(logits, tokens, scores, count)
    numbers = entries.to(torch.int32).view(torch.float32)
    best = due.topk(min(count, vocab))
    assert torch.equal(entries[:, :vocab] >> 32, best.indices)
    torch.testing.assert_close(numbers[:, :vocab], best.values.float(), atol=1e-5, rtol=0)
    assert (numbers[:, vocab:] == -torch.inf).all()


@pytest.mark.parametrize("min_p", [False, True])
def test_processed_entries_are_the_logarithms_of_processed_probabilities(min_p):
    """Each of four sets of parameters serves two rows. A row has a tied maximum at T = 0."""
    logits = 2 * torch.randn(8, 1100, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    logits[6, [70, 900]] = 20.0
    params = (
        torch.tensor([1.0, 0.3, 2.0, 0.0], device=DEVICE),
        torch.tensor([0, 3, 0, 0], device=DEVICE),
        torch.tensor([1.0, 1.0, 0.6, 1.0], device=DEVICE),
    )
    least = torch.tensor([0.2, 0.0, 0.01, 0.0], device=DEVICE) if min_p else None
    whole = [part.repeat_interleave(2, 0) for part in (*params, *([least] if min_p else []))]
    due = sampling.process(logits.double().cpu(), *(part.cpu() for part in whole)).double()
    tokens = due.argmax(-1).to(DEVICE)
    entries = ops.processed_entries(logits, *params, tokens, 6, min_p=least).cpu()
    ids, numbers = entries >> 32, entries.to(torch.int32).view(torch.float32)
    assert torch.equal(ids[:, 0], tokens.cpu())
    found, wanted = numbers.double().exp(), due.gather(1, ids)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(found[:, 1:], due.topk(6).values, atol=1e-6, rtol=1e-4)
    assert ids[6, 0] == 70
    assert [int((line > -torch.inf).sum()) for line in numbers[2:4, 1:]] == [3, 3]
    alone = ops.processed_entries(logits, *params, tokens, 0, min_p=least).cpu()
    assert torch.equal(alone, entries[:, :1])
