"""Ops for training: Triton against the definition, and the definition against autograd."""

import pytest
import torch

import bass_kernels as ops
from bass_kernels import reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def angles(half):
    angle = 5.0 * randn(2, 5, 1, half, seed=3)
    return angle.cos(), angle.sin()


def both(function):
    found = []
    for kind in ("triton", "reference"):
        ops.use(kind)
        found.append(function())
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(("size", "half"), [(64, 32), (24, 12), (20, 6)])
def test_rotate(dtype, back, size, half):
    """A part of a longer tensor, three heads, and dimensions that are not rotated."""
    pytest.importorskip("triton")
    x, (cos, sin) = randn(2, 5, 7, size, dtype=dtype)[:, :, 2:5], angles(half)
    one, other = both(lambda: ops.rotate(x, cos, sin, back=back))
    torch.testing.assert_close(
        one, other, **({} if dtype != torch.float32 else {"atol": 1e-5, "rtol": 1e-5})
    )
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)  # with another memory layout
    one, other = both(lambda: ops.rotate(turned, cos, sin, back=back))
    torch.testing.assert_close(
        one, other, **({} if dtype != torch.float32 else {"atol": 1e-5, "rtol": 1e-5})
    )


def test_rotating_back_is_the_gradient():
    x, (cos, sin) = randn(2, 5, 3, 20).requires_grad_(), angles(6)
    outer = randn(2, 5, 3, 20, seed=1)
    (reference.rotate(x, cos, sin) * outer).sum().backward()
    torch.testing.assert_close(reference.rotate(outer, cos, sin, back=True), x.grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [48, 1500])
def test_gate_gradient(dtype, size):
    pytest.importorskip("triton")
    x, outer = randn(2, 3, 2 * size, dtype=dtype), randn(2, 3, size, dtype=dtype, seed=1)
    one, other = both(lambda: ops.gate_gradient(x, outer))
    wide = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-3, "rtol": 1e-2}
    torch.testing.assert_close(one, other, **wide)


def test_the_gate_gradient_agrees_with_autograd():
    x, outer = randn(4, 30).requires_grad_(), randn(4, 15, seed=1)
    gate, up = x.chunk(2, -1)
    (torch.nn.functional.silu(gate) * up * outer).sum().backward()
    torch.testing.assert_close(reference.gate_gradient(x.detach(), outer), x.grad)


def case(dtype, vocab, width, scale=3.0):
    """Rows wider than the vocabulary, and target rows that several student rows share."""
    generator = torch.Generator().manual_seed(0)
    student = (torch.randn(7, width, generator=generator) * scale).to(dtype).to(DEVICE)
    target = (torch.randn(3, width, generator=generator) * scale).to(dtype).to(DEVICE)
    student[2, :vocab] = target[1, :vocab]  # the same distribution
    student[:, vocab:], target[:, vocab:] = 90.0, 80.0  # beyond the vocabulary
    rows = torch.tensor([0, 0, 1, 1, 1, 2, 2], device=DEVICE)
    tokens = torch.randint(vocab, (7,), generator=generator).to(DEVICE)
    return student, target, rows, tokens


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "width"), [(37, 64), (5000, 5056), (4096, 4096)])
def test_distances_and_their_gradient_equal_the_definition(dtype, vocab, width):
    pytest.importorskip("triton")
    student, target, rows, tokens = case(dtype, vocab, width)
    slopes = torch.tensor([[0.5] * 7, [1.0, 0.0, 2.0, 0.3, 1.0, 1.0, 0.1]], device=DEVICE)
    found, grads = {}, {}
    for kind in ("triton", "reference"):
        ops.use(kind)
        grads[kind] = student.clone()
        found[kind] = ops.distances(student, target, rows, tokens, vocab)
        ops.distance_gradient(grads[kind], target, rows, found[kind], slopes, vocab)
    for one, other in zip(found["triton"], found["reference"], strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)
    close = {} if dtype == torch.float32 else {"atol": 2e-5, "rtol": 8e-3}
    torch.testing.assert_close(grads["triton"], grads["reference"], **close)
    assert (grads["triton"][:, vocab:] == 0.0).all()


def test_the_definition_agrees_with_autograd():
    vocab = 37
    student, target, rows, tokens = case(torch.float32, vocab, 40)
    slopes = torch.rand(2, 7, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    logits = student.double()[:, :vocab].requires_grad_()
    q, p = logits.log_softmax(-1), target.double()[:, :vocab].log_softmax(-1)[rows]
    kl = (p.exp() * (p - q)).sum(-1)
    overlap = torch.minimum(q.exp(), p.exp()).sum(-1)
    # the overlap has no gradient where distributions are equal
    unequal = torch.arange(7, device=DEVICE) != 2
    (slopes[0] * kl - slopes[1] * overlap)[unequal].sum().backward()
    found = reference.distances(student, target, rows, tokens, vocab)
    torch.testing.assert_close(found.divergence.double(), kl.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.overlap.double(), overlap.detach(), atol=1e-5, rtol=1e-5)
    ratio = (q - p).detach().gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(found.ratio.double(), ratio, atol=1e-5, rtol=1e-5)
    reference.distance_gradient(student, target, rows, found, slopes, vocab)
    torch.testing.assert_close(
        student[unequal, :vocab].double(), logits.grad[unequal], atol=1e-5, rtol=1e-4
    )
