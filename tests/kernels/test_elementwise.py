"""Functions of single elements on a CPU: an element has the same bits at every place of a tensor,
for any number of threads. So the width of a pass changes no token."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from bass_kernels import experts, reference

DEFINITIONS = {
    reference.silu: functional.silu,
    reference.sigmoid: torch.sigmoid,
    reference.gelu: functional.gelu,
    reference.gelu_tanh: lambda x: functional.gelu(x, approximate="tanh"),
}


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """With three threads torch divides tensors at places that are not whole vectors."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def randn(*size: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("function", DEFINITIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_equal_those_of_torch(function, dtype):
    x = randn(5, 77).to(dtype)
    x[0, :4] = torch.tensor([-200.0, 200.0, 0.0, float("nan")])
    found, due = function(x), DEFINITIONS[function](x.double())
    assert found.dtype == dtype
    step = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(found.double(), due, rtol=step, atol=step, equal_nan=True)
    assert function(x[:0]).shape == (0, 77)


@pytest.mark.parametrize("function", DEFINITIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "size"), [(41, 1), (23, 50), (7, 18944)])
def test_an_element_has_the_same_bits_at_every_place(threads, function, dtype, tokens, size):
    x = randn(tokens, size).to(dtype)
    alone = torch.cat([function(row[None]) for row in x])
    for first, last in ((0, tokens), (0, 2), (1, 4), (2, 7)):
        assert torch.equal(function(x[first:last]), alone[first:last])


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("gated", [True, False])
def test_an_activation_of_a_token_has_the_same_bits_beside_others(threads, kind, gated):
    x = randn(9, 2 * 8960 if gated else 18944)
    alone = torch.cat([reference.activation(row[None], kind, gated=gated) for row in x])
    for tokens in (2, 4, 5, 9):
        found = reference.activation(x[:tokens], kind, gated=gated)
        assert torch.equal(found, alone[:tokens])


def test_a_gate_of_a_token_has_the_same_bits_beside_others(threads):
    """The gates of attention, of the expert of all tokens, and of gpt-oss."""
    x, line = randn(9, 50), randn(9, 80, seed=1)
    clamp = experts.Clamp(1.7, 7.0)

    def gates(part: slice) -> tuple[torch.Tensor, ...]:
        return (
            reference.gate_outputs(x[part], line[part, 30:]),
            experts.gate(line[part], "silu", clamp),
        )

    alone = [gates(slice(at, at + 1)) for at in range(9)]
    for tokens in (2, 5, 9):
        for found, each in zip(gates(slice(tokens)), zip(*alone, strict=True), strict=True):
            assert torch.equal(found, torch.cat(each[:tokens]))
