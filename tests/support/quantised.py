"""Write tiny checkpoints whose layers are quantised, in the layouts that are published; no tests
here.

A scheme quantises one matrix. Its tensors come from the library that owns the format where that
runs on a CPU, else from loops over the layout's definition. The expected numbers never come from
bass.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from checkpoints import build_model
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SIZES |= {"intermediate_size": 128, "num_hidden_layers": 2}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each nibble of a word, the lowest first
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Matrix(NamedTuple):
    """A quantised matrix: its tensors by suffix, and its numbers [outputs, inputs] float32."""

    tensors: dict[str, Tensor]
    numbers: Tensor


class Scheme(NamedTuple):
    """How the layers of a checkpoint are quantised, and its `quantization_config`."""

    quantise: Callable[[Tensor], Matrix]
    config: dict[str, Any]


def write_quantised(
    folder: Path, scheme: Scheme, *, family: str = "llama", shards: int = 1, **overrides: Any
) -> PreTrainedModel:
    """Save a checkpoint whose linear maps of layers are quantised by a scheme. Return the model
    with the quantised numbers as its weights."""
    model = build_model(family, **{**SIZES, **overrides})
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    stored: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, tensor in state.items():
            module, _, kind = name.rpartition(".")
            if kind == "weight" and tensor.dim() == 2 and ".layers." in name:
                found = scheme.quantise(tensor)
                stored |= {f"{module}.{one}": part for one, part in found.tensors.items()}
                model.get_parameter(name).copy_(found.numbers)
            else:
                stored[name] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config.to_dict() | {"quantization_config": scheme.config}
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config, default=str))
    save(folder, stored, shards=shards)
    return model


def save(folder: Path, tensors: Mapping[str, Tensor], *, shards: int = 1) -> None:
    """Write tensors to safetensors. Neighbours of a name go into different shards."""
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names, places = sorted(tensors), dict[str, str]()
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


# compressed-tensors: quantised and dequantised by the library itself


def compressed(kind: str, **weights: Any) -> Scheme:
    """A scheme of the compressed-tensors library."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=kind)
    library = BaseCompressor.get_value_from_registry(kind)

    def quantise(weight: Tensor) -> Matrix:
        state = {"weight": weight, **_scales(weight, weights, kind)}
        stored = library.compress(state, scheme)
        return Matrix(stored, library.decompress(stored, scheme)["weight"].float())

    group = {"targets": ["Linear"], "weights": scheme.weights.model_dump(mode="json")}
    group["format"] = kind
    config = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }
    return Scheme(quantise, config)


def _scales(weight: Tensor, weights: Mapping[str, Any], kind: str) -> dict[str, Tensor]:
    """Return scales, and zero points, by the largest and smallest numbers of each group."""
    rows, columns = weight.shape
    strategy, bits = weights["strategy"], weights["num_bits"]
    if strategy == "tensor":
        grouped = weight.reshape(1, 1, -1)
    elif strategy == "channel":
        grouped = weight.reshape(rows, 1, columns)
    elif strategy == "block":
        tall, wide = weights["block_structure"]
        blocks = weight.view(rows // tall, tall, columns // wide, wide)
        grouped = blocks.transpose(1, 2).flatten(2)
    else:
        grouped = weight.view(rows, -1, weights["group_size"])
    if weights.get("symmetric", True):
        most = {"int": 2 ** (bits - 1) - 1, "float": 448.0 if bits == 8 else 6.0}[weights["type"]]
        scale = grouped.abs().amax(-1) / most
        if kind.startswith("nvfp4"):
            whole = 448.0 / scale.max().reshape(1)
            return {"weight_scale": (scale * whole).to(torch.float8_e4m3fn).float(),
                    "weight_global_scale": whole}  # fmt: skip
        if kind.startswith("mx"):
            scale = torch.exp2(scale.log2().ceil())
        return {"weight_scale": scale.flatten() if strategy == "tensor" else scale}
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scale = (high - low) / (2**bits - 1)
    zero = (-(2 ** (bits - 1)) - low / scale).round().to(torch.int8)
    return {"weight_scale": scale, "weight_zero_point": zero}


# Floats of 8 bits of other owners


def blocks_of_fp8(size: int = 32) -> Scheme:
    """DeepSeek's and Qwen3's: one scale for each block of rows and columns."""

    def quantise(weight: Tensor) -> Matrix:
        rows, columns = weight.shape
        numbers, values = torch.empty_like(weight), torch.empty_like(weight)
        scales = torch.empty(-(-rows // size), -(-columns // size))
        for i in range(len(scales)):
            for j in range(scales.shape[1]):
                at = slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size)
                scales[i, j] = weight[at].abs().max() / 448
                values[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn).float()
                numbers[at] = values[at] * scales[i, j]
        return Matrix(
            {"weight": values.to(torch.float8_e4m3fn), "weight_scale_inv": scales}, numbers
        )

    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    config |= {"fmt": "e4m3", "weight_block_size": [size, size]}
    return Scheme(quantise, config)


def rows_of_fp8(method: str, *, rows: bool) -> Scheme:
    """A scale for each row (fbgemm), or for each matrix (fp8, modelopt)."""

    def quantise(weight: Tensor) -> Matrix:
        scale = (weight.abs().amax(1, keepdim=True) if rows else weight.abs().max()) / 448
        values = (weight / scale).to(torch.float8_e4m3fn)
        tensors = {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.5)}
        return Matrix(tensors, values.float() * scale)

    return Scheme(quantise, {"quant_method": method, "modules_to_not_convert": ["lm_head"]})


def nvfp4_of_modelopt() -> Scheme:
    def quantise(weight: Tensor) -> Matrix:
        grouped = weight.view(len(weight), -1, 16)
        whole = grouped.abs().max() / 6 / 448
        scales = (grouped.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
        each = scales.float() * whole
        table = torch.tensor(E2M1)
        nearest = ((grouped / each[..., None]).abs()[..., None] - table).abs().argmin(-1)
        codes = nearest + 8 * (grouped < 0)
        numbers = table[nearest] * torch.where(grouped < 0, -1.0, 1.0) * each[..., None]
        codes = codes.flatten(1)
        packed = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)
        tensors = {"weight": packed, "weight_scale": scales, "weight_scale_2": whole}
        return Matrix({**tensors, "input_scale": torch.tensor(0.5)}, numbers.flatten(1))

    return Scheme(quantise, {"quant_method": "modelopt", "quant_algo": "NVFP4"})


# GPTQ and AWQ: integers with scales and zeros, packed number by number


def gptq(
    bits: int = 4,
    size: int = 32,
    *,
    asymmetric: bool = True,
    ordered: bool = False,
    new: bool = False,
) -> Scheme:
    """`ordered`: the groups of inputs are in the order of activations. `new`: gptq_v2."""

    def quantise(weight: Tensor) -> Matrix:
        inputs = weight.shape[1]
        count = inputs if size == -1 else size
        groups = torch.arange(inputs) // count
        if ordered:
            groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(3))]
        codes, scales, zeros = _integers(weight, groups, bits, asymmetric)
        numbers = (codes - zeros[groups].T) * scales[groups].T
        stored = zeros if new else zeros - 1
        tensors = {
            "qweight": _words(codes.T.int(), bits, down=True),
            "qzeros": _words(stored.int(), bits, down=False),
            "scales": scales.half(),
            "g_idx": groups.int(),
        }
        return Matrix(tensors, numbers)

    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": ordered}
    config |= {"sym": not asymmetric, "checkpoint_format": "gptq_v2" if new else "gptq"}
    return Scheme(quantise, config)


def awq(size: int = 32) -> Scheme:
    def quantise(weight: Tensor) -> Matrix:
        groups = torch.arange(weight.shape[1]) // size
        codes, scales, zeros = _integers(weight, groups, 4, True)
        numbers = (codes - zeros[groups].T) * scales[groups].T
        tensors = {
            "qweight": _words(codes.T.int(), 4, down=False, order=AWQ_ORDER),
            "qzeros": _words(zeros.int(), 4, down=False, order=AWQ_ORDER),
            "scales": scales.half(),
        }
        return Matrix(tensors, numbers)

    config = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm"}
    return Scheme(quantise, config | {"zero_point": True, "modules_to_not_convert": None})


def _integers(
    weight: Tensor, groups: Tensor, bits: int, asymmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [outputs, inputs], and scales and zeros [groups, outputs]; scales as in
    float16."""
    scales, zeros = [], []
    for group in range(int(groups.max()) + 1):
        part = weight[:, groups == group]
        low, high = part.amin(1).clamp(max=-0.01), part.amax(1).clamp(min=0.01)
        if not asymmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale = ((high - low) / (2**bits - 1)).half().float()
        middle = torch.full_like(scale, 2.0 ** (bits - 1))
        zeros.append((-low / scale).round().clamp(1, 2**bits - 1) if asymmetric else middle)
        scales.append(scale)
    scale, zero = torch.stack(scales), torch.stack(zeros)
    codes = (weight / scale[groups].T + zero[groups].T).round().clamp(0, 2**bits - 1)
    return codes, scale, zero


def _words(codes: Tensor, bits: int, *, down: bool, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack codes into int32, the first into the lowest bits, down columns or along rows."""
    codes = codes.T if down else codes
    count = 32 // bits
    words = []
    for row in codes.tolist():
        line = []
        for first in range(0, len(row), count):
            places = order or range(count)
            word = sum(row[first + place] << (bits * i) for i, place in enumerate(places))
            line.append(word - (1 << 32) if word >= 1 << 31 else word)
        words.append(line)
    found = torch.tensor(words, dtype=torch.int32)
    return found.T.contiguous() if down else found


# MXFP4 of gpt-oss


def mxfp4_of_experts(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise the matrices of experts [E, inputs, outputs]. Return blocks, scales and numbers."""
    turned = weight.transpose(1, 2)
    grouped = turned.reshape(*turned.shape[:2], -1, 32)
    exponents = (grouped.abs().amax(-1) / 6).log2().ceil()
    scaled = grouped / torch.exp2(exponents)[..., None]
    table = torch.tensor(E2M1)
    nearest = (scaled.abs()[..., None] - table).abs().argmin(-1)
    numbers = table[nearest] * torch.where(scaled < 0, -1.0, 1.0) * torch.exp2(exponents)[..., None]
    codes = nearest + 8 * (scaled < 0)
    blocks = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    plain = numbers.flatten(2).transpose(1, 2)
    return blocks, (exponents + 127).to(torch.uint8), plain


# bitsandbytes: quantised and dequantised by the library itself


def bitsandbytes(kind: str, *, nested: bool = False) -> Scheme:
    """`kind`: int8, nf4 or fp4. `nested`: whether scales are quantised too."""
    import bitsandbytes.functional as library

    def quantise(weight: Tensor) -> Matrix:
        if kind == "int8":
            values, scales, _ = library.int8_vectorwise_quant(weight.half())
            tensors = {
                "weight": values,
                "SCB": scales,
                "weight_format": torch.tensor(0, dtype=torch.uint8),
            }
            return Matrix(tensors, library.int8_vectorwise_dequant(values, scales).float())
        packed, state = library.quantize_4bit(
            weight, blocksize=64, quant_type=kind, compress_statistics=nested
        )
        more = {f"weight.{name}": one for name, one in state.as_dict(packed=True).items()}
        return Matrix({"weight": packed, **more}, library.dequantize_4bit(packed, state).float())

    eight = kind == "int8"
    config = {"quant_method": "bitsandbytes", "load_in_8bit": eight, "load_in_4bit": not eight}
    return Scheme(
        quantise, config | {"bnb_4bit_quant_type": kind, "llm_int8_skip_modules": ["lm_head"]}
    )
