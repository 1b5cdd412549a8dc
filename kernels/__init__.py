"""The ops by name. Each is defined in plain torch (noise.py, reference.py); faster forms must give the same results.

Tensors only: no op knows of jobs, tokenizers or controllers. Shapes: B rows, W positions a row, V vocabulary, H query
heads, K key/value heads, D head size, S slots of a row's own span, T positions of the prompt store.
"""

from .acceptance import accept_maximal, accept_shared
from .linear import linear, pack
from .noise import BONUS, DRAFT, RESIDUAL, SHARED, TEST, gumbel, uniform
from .reference import Group, Segments, activation, attention, norm, rope_write
from .sampling import draw, log_probability, process, sample

__all__ = [
    "BONUS", "DRAFT", "RESIDUAL", "SHARED", "TEST", "Group", "Segments", "accept_maximal", "accept_shared",
    "activation", "attention", "draw", "gumbel", "linear", "log_probability", "norm", "pack", "process", "rope_write",
    "sample", "uniform",
]
