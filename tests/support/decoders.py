"""Float32 decoders of tiny checkpoints, drafts of which some are accepted, and drafters that read
hidden states. No tests."""

import torch

from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.weights import load
from bass_cli.models.decoder import Decoder
from bass_cli.models.heads import make_head

CPU = torch.device("cpu")


def load_decoder(folder, *, device=CPU, **words):
    """Return the decoder of a checkpoint. words: those of Decoder."""
    checkpoint = open_checkpoint(folder)
    weights = load(checkpoint, dtype=torch.float32, device=device)
    return Decoder(checkpoint.spec, weights, **words)


def load_noisy_pair(folder, *, noise=0.2, device=CPU, change=dict, **words):
    """Return (target, draft) of one checkpoint: the draft has noise on its matrices, so that some
    drafts are accepted and some are not. change: a function of all weights; words: of Decoder.

    noise: in standard deviations of a matrix.
    """
    checkpoint, both = open_checkpoint(folder), []
    for scale in (0.0, noise):
        weights = load(checkpoint, dtype=torch.float32, device=device)
        generator = torch.Generator(device).manual_seed(1)
        if checkpoint.spec.tied:  # a random model with a tied head just repeats itself
            weights["head.weight"] = torch.randn(
                weights["embed.weight"].shape, generator=generator, device=device
            )
        for name, one in weights.items():
            if one.dim() > 1:
                random = torch.randn(one.shape, generator=generator, device=device)
                weights[name] = one + scale * one.std() * random
        both.append(Decoder(checkpoint.spec, change(weights), **words))
    return tuple(both)


def load_head(opened, target):
    """Return the drafter of an opened head or mtp layer, on its target's device."""
    weights = load(opened, dtype=torch.float32, device=target.device)
    return make_head(opened.head, weights, target)
