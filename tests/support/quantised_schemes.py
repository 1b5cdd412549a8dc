"""Schemes of quantised checkpoints by name, and changes of such checkpoints; no tests here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quantised
import torch
from quantised import Scheme, blocks_of_fp8, save
from safetensors.torch import load_file
from torch import Tensor

from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.weights import load

CPU = torch.device("cpu")
INT = {"type": "int", "symmetric": True}
FLOAT = {"type": "float", "symmetric": True}
# Schemes by name, and the largest relative error of the expected numbers: that of bfloat16 where
# the owning library computes in it.
OWN: dict[str, Callable[[], Scheme]] = {
    "block fp8": blocks_of_fp8,
    "block fp8, odd blocks": lambda: blocks_of_fp8(48),
    "fp8 by tensor": lambda: quantised.rows_of_fp8("fp8", rows=False),
    "fbgemm": lambda: quantised.rows_of_fp8("fbgemm_fp8", rows=True),
    "modelopt fp8": lambda: quantised.rows_of_fp8("modelopt", rows=False),
    "modelopt nvfp4": quantised.nvfp4_of_modelopt,
    "gptq": quantised.gptq,
    "gptq sym": lambda: quantised.gptq(asymmetric=False),
    "gptq act-order": lambda: quantised.gptq(ordered=True),
    "gptq v2": lambda: quantised.gptq(new=True),
    "gptq 8 bits": lambda: quantised.gptq(8, 64),
    "gptq 2 bits": lambda: quantised.gptq(2, 16),
    "gptq one group": lambda: quantised.gptq(4, -1),
    "awq": quantised.awq,
}  # fmt: skip
COMPRESSED: dict[str, tuple[dict[str, Any], float]] = {
    "float-quantized channel": ({"num_bits": 8, **FLOAT, "strategy": "channel"}, 1e-6),
    "float-quantized tensor": ({"num_bits": 8, **FLOAT, "strategy": "tensor"}, 1e-6),
    "float-quantized block": (
        {"num_bits": 8, **FLOAT, "strategy": "block", "block_structure": [32, 16]}, 1e-6),
    "int-quantized channel": ({"num_bits": 8, **INT, "strategy": "channel"}, 1e-6),
    "int-quantized asymmetric": (
        {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "channel"}, 1e-6),
    "pack-quantized group": ({"num_bits": 4, **INT, "strategy": "group", "group_size": 32}, 1e-6),
    "pack-quantized asymmetric": (
        {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 16}, 1e-6),
    "pack-quantized channel": ({"num_bits": 8, **INT, "strategy": "channel"}, 1e-6),
    "nvfp4-pack-quantized": (
        {"num_bits": 4, **FLOAT, "strategy": "tensor_group", "group_size": 16}, 2.0**-7),
    "mxfp4-pack-quantized": (
        {"num_bits": 4, **FLOAT, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        1e-6),
    "mxfp8-quantized": (
        {"num_bits": 8, **FLOAT, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        1e-6),
}  # fmt: skip


BITS_AND_BYTES = {
    "int8": ("int8", False),
    "nf4": ("nf4", False),
    "nf4 nested": ("nf4", True),
    "fp4": ("fp4", True),
}


def scheme_of(name: str) -> tuple[Scheme, float]:
    """Return a scheme and the bound of its error."""
    if name in OWN:
        return OWN[name](), 1e-6
    if name in COMPRESSED:
        pytest.importorskip("compressed_tensors")
        weights, bound = COMPRESSED[name]
        return quantised.compressed(name.split()[0], **weights), bound
    pytest.importorskip("bitsandbytes")
    kind, nested = BITS_AND_BYTES[name]
    return quantised.bitsandbytes(kind, nested=nested), 1e-6


def expected(model: Any, folder: Path) -> dict[str, Tensor]:
    """Load the model's weights by way of an ordinary checkpoint."""
    model.config.quantization_config = None
    del model.config.quantization_config
    model.save_pretrained(folder)
    return load(open_checkpoint(folder), dtype=torch.float32, device=CPU)


def change(folder: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save(folder, tensors)


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))


UP = "model.layers.1.mlp.up_proj"
