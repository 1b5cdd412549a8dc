"""The loss and its gradients against a naive version over the whole vocabulary; acceptance
probabilities against their formula and against random draws."""

import numpy
import pytest
import torch
from torch.nn import functional

from bass_cli.distill import agreement as loss
from bass_cli.distill.agreement import divergence, maximal_agreement, shared_agreement
from bass_cli.distill.network import Head
from bass_cli.distill.windows import Layout, Windows


def chained(count, longest, vocab):
    """Make guesses for consecutive distributions; a draft begins at every second one."""
    rows = {(start, 0, start) for start in range(count)}  # distribution, position, first one
    for start in range(0, count, 2):
        rows |= {(at, at - start, start) for at in range(start, min(start + longest, count))}
    rows = sorted(rows, key=lambda row: (row[0], row[1]))
    before = [
        rows.index((at - 1, n - 1, start)) if n else i for i, (at, n, start) in enumerate(rows)
    ]
    of, place, _ = torch.tensor(rows).T
    begins = numpy.searchsorted(of.numpy(), numpy.arange(count + 1))
    layout = Layout(12, 1, (6, 4, 3)[: longest - 1])  # scarcity 1, 2, 3 and 4
    tokens, unused = torch.randint(vocab + 3, (1, count + 1)), torch.empty(0)
    return Windows(
        layout, begins, tokens, *[unused] * 4, place, torch.tensor(before), of,
        torch.arange(count), unused,
    )  # fmt: skip


def plain_loss(student, head, target, target_head, guesses, least, share):
    """Compute the loss guess by guess, with weights that pass no gradient."""
    q_all = functional.log_softmax(functional.linear(student, *head), -1)
    p_all = functional.log_softmax(target.detach() @ target_head.weight.detach().T, -1)
    total, accepted = student.new_zeros(()), []
    tokens = guesses.tokens[0, guesses.of + 1].clamp(max=len(target_head.weight) - 1)
    worths = loss.worths(len(guesses.layout.scarcity))
    for i, (of, token) in enumerate(zip(guesses.of, tokens, strict=True)):
        q, p = q_all[i], p_all[of]
        before = int(guesses.before[i])
        ahead = 1.0 if before == i else accepted[before]
        accepted.append(ahead * min(1.0, float((q - p)[token].detach().exp())))
        weight = 1.0 if before == i else least + (1 - least) * ahead * float(1 + guesses.place[i])
        weight *= worths[guesses.place[i]]
        apart = (q.exp() - p.exp()).abs().sum()
        kl = functional.kl_div(q, p, log_target=True, reduction="sum")
        total = total + weight * ((1 - share) * kl + share * apart)
    return total


@pytest.mark.parametrize("elements", [1, 50 * 7, 1 << 28])
@pytest.mark.parametrize("biased", [False, True])
def test_loss_equals_the_naive_loss_over_whole_distributions(monkeypatch, elements, biased):
    """For any division into parts; only the student and its head get gradients."""
    monkeypatch.setattr(loss, "ELEMENTS", elements)
    torch.manual_seed(0)
    count, vocab, width, wide = 13, 50, 8, 12
    guesses = chained(count, 4, vocab)
    student = torch.randn(len(guesses.of), width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocab, width, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(vocab, dtype=torch.float64, requires_grad=True) if biased else None
    target = torch.randn(count, wide, dtype=torch.float64, requires_grad=True)
    target_head = Head(torch.randn(vocab, wide, dtype=torch.float64, requires_grad=True), None)
    of = [student, weight] + ([bias] if biased else [])
    naive = plain_loss(
        student, (weight, bias), target, target_head, guesses, loss.LEAST, loss.APART
    )
    expected = torch.autograd.grad(3.0 * naive, of)
    found = divergence(student, Head(weight, bias), target, target_head, guesses)
    (3.0 * found).backward()
    torch.testing.assert_close(found.double(), naive, atol=1e-4, rtol=1e-5)
    for one, gradient in zip(of, expected, strict=True):
        torch.testing.assert_close(one.grad, gradient, atol=5e-5, rtol=1e-4)
    assert target.grad is None
    assert target_head.weight.grad is None


def test_worths_are_derivatives_of_the_accepted_drafts():
    """`worths` is the derivative of the mean accepted drafts by the acceptance at each position."""
    chances = torch.full((8,), loss.FOLLOWING, dtype=torch.float64, requires_grad=True)
    chances.cumprod(0).sum().backward()
    reached = loss.FOLLOWING ** torch.arange(8, dtype=torch.float64)
    expected = torch.tensor(loss.worths(8), dtype=torch.float64) * reached
    torch.testing.assert_close(chances.grad, expected)


def test_the_loss_of_equal_distributions_is_zero():
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 8), torch.randn(40, 8)
    head, guesses = Head(weight, None), chained(5, 1, 40)
    assert float(divergence(hidden, head, hidden, head, guesses)) == pytest.approx(0.0, abs=1e-5)


def log_probs_of(n, vocab, scale):
    torch.manual_seed(1)
    target, student = torch.randn(2, n, vocab) * scale
    student[0] = target[0]
    student[1, 3] = target[1, 5] = -200.0  # no chance at all
    return target.log_softmax(-1), student.log_softmax(-1)


@pytest.mark.parametrize("scale", [0.5, 3.0, 30.0])
def test_shared_acceptance_equals_the_formula(scale):
    target, student = log_probs_of(12, 31, scale)
    p, q = target.double().exp(), student.double().exp()
    tokens = torch.distributions.Categorical(p).sample()
    both = torch.zeros_like(p)
    for i in range(31):
        ratio = torch.maximum(p / p[:, i : i + 1], q / q[:, i : i + 1]).sum(-1)
        both[:, i] = (1 / ratio).nan_to_num(0.0)
    found = shared_agreement(target, student, tokens)
    torch.testing.assert_close(found.accepted, both.sum(-1).float(), atol=1e-6, rtol=1e-5)
    at = tokens[:, None]
    given = (both.gather(1, at) / p.gather(1, at))[:, 0].float()
    torch.testing.assert_close(found.given, given, atol=1e-6, rtol=1e-4)
    assert float(found.accepted[0]) == pytest.approx(1.0)
    overlap = maximal_agreement(target, student, tokens)
    assert (found.accepted <= overlap.accepted + 1e-6).all()


def test_shared_acceptance_equals_the_rate_of_random_draws():
    """With shared noise both models take the argmax of log-probs plus Gumbel noise."""
    target, student = log_probs_of(4, 9, 1.0)
    noise = -torch.empty(40000, 4, 9).exponential_().log()
    p_tokens, q_tokens = ((one + noise).argmax(-1) for one in (target, student))
    token = torch.tensor([1, 2, 0, 4])
    found = shared_agreement(target, student, token)
    same = (p_tokens == q_tokens).float()
    torch.testing.assert_close(found.accepted, same.mean(0), atol=0.012, rtol=0)
    here = (p_tokens == token).float()
    torch.testing.assert_close(found.given, (same * here).sum(0) / here.sum(0), atol=0.04, rtol=0)


def test_maximal_acceptance_equals_the_formula():
    target, student = log_probs_of(6, 9, 1.0)
    token = torch.tensor([1, 2, 0, 4, 5, 6])
    found = maximal_agreement(target, student, token)
    p, q = target.exp(), student.exp()
    torch.testing.assert_close(found.accepted, torch.minimum(p, q).sum(-1))
    at = (torch.arange(6), token)
    torch.testing.assert_close(found.given, (q[at] / p[at]).clamp(max=1.0))
