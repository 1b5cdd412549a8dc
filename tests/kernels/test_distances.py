"""Divergence and overlap of distributions and their gradients: Triton against the definition, and
the definition against autograd. Rows wider than the vocabulary, partial blocks, and target rows
shared by several student rows."""

import pytest
import torch

import bass_kernels as ops
from bass_kernels import reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])


def case(dtype, vocab, width, scale=3.0):
    generator = torch.Generator().manual_seed(0)
    own = (torch.randn(7, width, generator=generator) * scale).to(dtype).to(DEVICE)
    due = (torch.randn(3, width, generator=generator) * scale).to(dtype).to(DEVICE)
    own[2, :vocab] = due[1, :vocab]  # the same distribution
    own[:, vocab:], due[:, vocab:] = 90.0, 80.0  # beyond the vocabulary
    of = torch.tensor([0, 0, 1, 1, 1, 2, 2], device=DEVICE)
    tokens = torch.randint(vocab, (7,), generator=generator).to(DEVICE)
    return own, due, of, tokens


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "width"), [(37, 64), (5000, 5056), (4096, 4096)])
def test_triton_gives_the_definition(dtype, vocab, width):
    pytest.importorskip("triton")
    own, due, of, tokens = case(dtype, vocab, width)
    slopes = torch.tensor([[0.5] * 7, [1.0, 0.0, 2.0, 0.3, 1.0, 1.0, 0.1]], device=DEVICE)
    found, grads = {}, {}
    for kind in ("triton", "reference"):
        try:
            ops.use(kind)
            grads[kind] = own.clone()
            found[kind] = ops.distances(own, due, of, tokens, vocab)
            ops.distance_gradient(grads[kind], due, of, found[kind], slopes, vocab)
        finally:
            ops.use(None)
    for one, other in zip(found["triton"], found["reference"], strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)
    close = {} if dtype == torch.float32 else {"atol": 2e-5, "rtol": 8e-3}
    torch.testing.assert_close(grads["triton"], grads["reference"], **close)
    assert (grads["triton"][:, vocab:] == 0.0).all()


def test_the_definition_agrees_with_autograd():
    vocab = 37
    own, due, of, tokens = case(torch.float32, vocab, 40)
    slopes = torch.rand(2, 7, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    logits = own.double()[:, :vocab].requires_grad_()
    q, p = logits.log_softmax(-1), due.double()[:, :vocab].log_softmax(-1)[of]
    kl = (p.exp() * (p - q)).sum(-1)
    overlap = torch.minimum(q.exp(), p.exp()).sum(-1)
    # the overlap has no gradient where distributions are equal
    rows = torch.arange(7, device=DEVICE) != 2
    (slopes[0] * kl - slopes[1] * overlap)[rows].sum().backward()
    found = reference.distances(own, due, of, tokens, vocab)
    torch.testing.assert_close(found.divergence.double(), kl.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.overlap.double(), overlap.detach(), atol=1e-5, rtol=1e-5)
    ratio = (q - p).detach().gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(found.ratio.double(), ratio, atol=1e-5, rtol=1e-5)
    reference.distance_gradient(own, due, of, found, slopes, vocab)
    torch.testing.assert_close(own[rows, :vocab].double(), logits.grad[rows], atol=1e-5, rtol=1e-4)
