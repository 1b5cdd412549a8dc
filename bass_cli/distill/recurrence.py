"""The layers with the gated delta rule over training windows, with gradients.

A mask continues from the state after its anchor, and from the masks between the two. No state
contains a mask that another anchor or the text reads, as in drafting, where a round's masks are
dropped. So every token has a path: the tokens of its text up to it, or up to its anchor, then its
anchor's masks up to it. The recurrence is solved for a whole window at once, without states. Not
here: the layer's projections (network.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bass_cli.distill.windows import Windows
from bass_cli.models.spec import Recurrent
from bass_kernels import DeltaWeights
from bass_kernels.delta_rule import delta_tokens, gated_norm


class Paths(NamedTuple):
    """The paths of the tokens of B windows of N tokens: L of the text, and M masks in each of C
    groups.

    before: [B, N] int64, the token before each on its path; N if there is none.
    text: [B, 1, L, L] bool, whether a token of the text has another, or itself, on its path.
    anchors: [B, C M] int64, the anchor of each mask; None without masks.
    read: [B, C, 1, M, L] bool, whether a mask has a token of the text on its path.
    chain: [B, C, 1, M, M] bool, the same for masks of its group, itself included.
    """

    before: Tensor
    text: Tensor
    anchors: Tensor | None = None
    read: Tensor | None = None
    chain: Tensor | None = None

    @classmethod
    def of(cls, windows: Windows, *, masks: bool) -> Paths:
        """Return the paths of some windows, with their masks or of the text alone."""
        layout, text, both = windows.layout, *windows.seen()
        length = layout.window
        order = torch.arange(length, device=text.device)
        first = ~text.diagonal(-1, 1, 2)  # of all but the first token of a window
        first = torch.nn.functional.pad(first, (1, 0), value=True)
        if not masks or both is None:
            before = torch.where(first, length, (order - 1).expand_as(first))
            return cls(before, text[:, None])
        total, groups = layout.tokens, layout.groups
        slots, numbers = windows.slots
        anchors = windows.anchors.clamp(min=0)[:, :, slots].flatten(1)
        # The mask before is that of the same anchor among the masks of the number before.
        sizes = torch.tensor((0, *layout.counts), device=text.device)[numbers - 1].repeat(groups)
        own = torch.arange(length, total, device=text.device)
        earlier = torch.where(numbers.repeat(groups) == 1, anchors, own - sizes)
        text_before = torch.where(first, total, (order - 1).expand_as(first))
        seen = both.unflatten(0, (-1, groups))[:, :, None]
        return cls(
            torch.cat((text_before, earlier), 1),
            text[:, None],
            anchors,
            seen[..., :length],
            seen[..., length:],
        )


def delta_layer(
    qkv: Tensor,
    gates: Tensor,
    z: Tensor,
    weights: DeltaWeights,
    recurrent: Recurrent,
    paths: Paths,
    *,
    eps: float,
) -> Tensor:
    """Return the outputs of a layer before its last projection, [B, N, H Dv], in the dtype of qkv.

    The definition is that of `bass_kernels.delta_round`, with each token's path as its past.
    Its inner values are computed again for the gradient, because they are large.

    Args:
        qkv: [B, N, C]. gates: [B, N, 2H]. z: [B, N, H Dv].
        eps: of the gated norm.
    """
    parts = qkv, gates, z, weights, recurrent, paths, eps
    if not torch.is_grad_enabled():
        return _layer(*parts)
    found: Tensor = checkpoint(_layer, *parts, use_reentrant=False)
    return found


def _layer(
    qkv: Tensor,
    gates: Tensor,
    z: Tensor,
    weights: DeltaWeights,
    recurrent: Recurrent,
    paths: Paths,
    eps: float,
) -> Tensor:
    convolved = _convolved(qkv.float(), weights.convolution.float(), paths.before)
    sizes = recurrent.key_size, recurrent.value_size
    tokens = delta_tokens(convolved, gates.float(), weights, *sizes)
    found = _recurrence([one.transpose(1, 2) for one in tokens], paths)
    return gated_norm(found.transpose(1, 2), z, weights.norm, eps).to(qkv.dtype)


def _convolved(x: Tensor, filters: Tensor, before: Tensor) -> Tensor:
    """Return the causal convolution of x [B, N, C] along paths. filters: [C, kernel size], the
    weight of the newest token last."""
    padded = torch.cat((x, torch.zeros_like(x[:, :1])), 1)
    following = torch.nn.functional.pad(before, (0, 1), value=x.shape[1])
    at = torch.arange(x.shape[1], device=x.device).expand_as(before)
    total = x * filters[:, -1]
    for age in range(2, filters.shape[1] + 1):
        at = following.gather(1, at)
        total = total + padded.gather(1, at[..., None].expand_as(x)) * filters[:, -age]
    return total


def _recurrence(tokens: list[Tensor], paths: Paths) -> Tensor:
    """Return the outputs [B, H, N, Dv] of the gated delta rule.

    The state at the end of a path is the sum of a_ij k_j u_j^T over its tokens j, with a_ij the
    decay from j to the end i (arXiv 2412.06464, section 3.3, with one chunk). The changes u solve a
    triangular system, because a token's path has only tokens before it.

    Args:
        tokens: query and key [B, H, N, Dk], value [B, H, N, Dv], log of the decay, and beta
            [B, H, N].
    """
    length = paths.text.shape[-1]
    q, k, v, logs, beta = (one[:, :, :length] for one in tokens)
    total = logs.double().cumsum(-1)
    decay = _decay(total, total, paths.text)
    change = _changes(beta[..., None] * v, beta, (k @ k.mT) * decay)
    outputs = ((q @ k.mT) * decay) @ change
    if paths.anchors is None or paths.read is None or paths.chain is None:
        return outputs
    groups = paths.read.shape[1]

    def grouped(x: Tensor) -> Tensor:  # [B, C, H, M, ...]
        return x.unflatten(2, (groups, -1)).transpose(1, 2)

    mask_q, mask_k, mask_v, logs, beta = (grouped(one[:, :, length:]) for one in tokens)
    anchors = paths.anchors[:, None].expand(-1, total.shape[1], -1)
    ends = grouped(total.gather(2, anchors))
    ends = ends + (paths.chain.double() @ logs.double()[..., None])[..., 0]
    k, change, total = k[:, None], change[:, None], total[:, None]
    of_text, own = _decay(ends, total, paths.read), _decay(ends, ends, paths.chain)
    past = ((mask_k @ k.mT) * of_text) @ change
    changes = _changes(beta[..., None] * (mask_v - past), beta, (mask_k @ mask_k.mT) * own)
    found = ((mask_q @ k.mT) * of_text) @ change + ((mask_q @ mask_k.mT) * own) @ changes
    return torch.cat((outputs, found.transpose(1, 2).flatten(2, 3)), 2)


def _decay(ends: Tensor, begins: Tensor, allowed: Tensor) -> Tensor:
    """Return the decay [..., T, S] float32 from each begin [..., S] to each end [..., T], both sums
    of logarithms in float64; 0 where it is not `allowed`."""
    apart = (ends[..., :, None] - begins[..., None, :]).float()
    return apart.masked_fill(~allowed, -torch.inf).exp()


def _changes(right: Tensor, beta: Tensor, similar: Tensor) -> Tensor:
    """Solve (1 + the strict lower part of beta * similar) U = right for U [..., T, Dv]."""
    system = (beta[..., None] * similar).tril(-1)
    found: Tensor = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    return found
