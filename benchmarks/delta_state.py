"""Measure what a recurrent state of 16 bits would cost in accuracy: outputs of Gated DeltaNet after
4,000 tokens, with the state rounded each time that a round writes it, against float32.

Heads of 128 x 128 with decays from 0.9 to 1 - 1e-5 and random inputs; plain torch on the CPU.
Run: python benchmarks/delta_state.py
"""

import torch

from bass_kernels import DeltaState, DeltaWeights
from bass_kernels.delta_rule import delta_round, places

SIZE, KERNEL, TOKENS, LAST = 128, 4, 4000, 200
DECAYS = (0.9, 0.99, 0.999, 0.9999, 0.99999)


def outputs(dtype: torch.dtype, width: int) -> torch.Tensor:
    """Return the last outputs of each head, [LAST, heads, SIZE]. The state has this dtype."""
    generator = torch.Generator().manual_seed(0)
    heads = len(DECAYS)
    rates = -torch.tensor(DECAYS, dtype=torch.float64).log()
    weights = DeltaWeights(
        torch.randn(3 * heads * SIZE, KERNEL, generator=generator),
        torch.zeros(heads),
        rates.expm1().log().float(),  # the inverse of softplus
        torch.ones(SIZE),
    )
    channels = 3 * heads * SIZE
    state = DeltaState(
        torch.zeros(1, heads, SIZE, SIZE),
        torch.zeros(1, places(KERNEL, width), channels + 2 * heads),
    )
    found, none = [], torch.full((1, width, heads * SIZE), 10.0)  # silu(10) is the same for all
    for first in range(0, TOKENS, width):
        qkv = torch.randn(1, width, channels, generator=generator)
        gates = torch.randn(1, width, 2 * heads, generator=generator)
        gates[..., heads:] *= 0.5
        found.append(
            delta_round(
                qkv,
                gates,
                none,
                weights,
                state,
                slots=torch.tensor([0]),
                positions=first + torch.arange(width)[None],
                advance=torch.tensor([width if first else 0]),
                eps=1e-6,
            )[0]
        )
        state.state.copy_(state.state.to(dtype).float())
    return torch.cat(found)[-LAST:].view(LAST, heads, SIZE)


def main() -> None:
    print("relative RMS error of the last outputs, by the head's decay", *DECAYS)
    for width in (1, 4):
        due = outputs(torch.float32, width).double()
        for dtype in (torch.bfloat16, torch.float16):
            found = outputs(dtype, width).double()
            errors = (found - due).norm(dim=(0, 2)) / due.norm(dim=(0, 2))
            print(f"{dtype}, {width} tokens a round:", *(f"{one:.1e}" for one in errors.tolist()))


if __name__ == "__main__":
    main()
