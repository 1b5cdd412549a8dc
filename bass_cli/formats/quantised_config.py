"""Read `quantization_config` of config.json, and join the tensors of each quantised matrix.

A matrix is quantised if the file has its numbers in few bits; config.json says what they mean. A
matrix whose weight is stored in 16 or 32 bits is read as it is. Not here: the meaning of numbers
and scales (compound.py), the decoder's tensors (checkpoint.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from bass_cli.formats import compound
from bass_cli.formats.compound import TYPES, Compound, Layout, content
from bass_cli.formats.config_keys import QUANTISED, Values
from bass_cli.formats.quantised_tensors import (
    BYTE,
    E4M3,
    INT8,
    INT32,
    OTHERWISE,
    SCALES,
    Joined,
    Method,
    Parts,
    Settings,
    grid_shape,
    groups_of,
    kind_of,
    matches,
    scale_shapes,
)
from bass_cli.formats.sources import read_json
from bass_cli.formats.tensor_files import Entry, read_folder
from bass_cli.reading import parse_object, shown, whole

_BITS = (2, 4, 8)  # whose fields do not cross bytes
_GROUP_OF_SCALES = 256  # bitsandbytes
_HALF_OF_GROUP = 16  # bytes of a group of 32 numbers in MXFP4
_QUANT_STATE = "weight.quant_state.bitsandbytes__"
# Methods that are refused, and why.
REFUSED = {
    "torchao": "torchao stores tensors of its own classes",
    "auto-round": "its formats differ by backend; export it as GPTQ or AWQ",
    "quark": "its formats are not read",
    "hqq": "its formats are not read",
    "quanto": "its formats are not read",
    "eetq": "its layout depends on the GPU that wrote it",
    "aqlm": "its codebooks are not read",
    "vptq": "its codebooks are not read",
    "higgs": "its codebooks are not read",
    "spqr": "its sparse format is not read",
    "bitnet": "activations would have to be quantised too",
}


class _CompressedTensors(Method):
    """The formats of the compressed-tensors library (llm-compressor, vLLM)."""

    values: ClassVar = {"weight": (E4M3, INT8), "weight_packed": (INT32, BYTE)}
    params: ClassVar = (
        "weight_scale",
        "weight_zero_point",
        "weight_g_idx",
        "weight_shape",
        "weight_global_scale",
    )
    unused: ClassVar = (
        *Method.unused,
        "input_zero_point",
        "input_global_scale",
        "output_zero_point",
        *(f"{one}_zero_point" for one in "qkv"),
        *(f"{one}_global_scale" for one in "qkv"),
    )
    skips: ClassVar = ("ignore",)
    _PLAIN = ("float-quantized", "int-quantized", "naive-quantized", "mxfp8-quantized")
    _FORMATS = (*_PLAIN, "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")

    def __init__(self, settings: Settings):
        super().__init__(settings)
        groups = settings.inside("config_groups")
        given = [groups.inside(name) for name in groups.values]
        self.groups = [one for one in given if one.get("weights") is not None]
        # Without such groups only the cache or activations are quantised, and weights are plain.
        plain = () if self.groups else ("dense",)
        settings.one_of("format", (*self._FORMATS, "mixed-precision", *plain))
        settings.refuse("transform_config")
        sparse = settings.inside("sparsity_config")
        if sparse.values:
            sparse.one_of("format", ("dense",), "dense")
        for group in self.groups:
            self._format(group)

    def _format(self, group: Settings) -> str:
        """Return the format of a group: its own, else the one of all groups."""
        owner = self.settings if group.get("format") is None else group
        return str(owner.one_of("format", self._FORMATS))

    def _group(self, module: str) -> Settings | None:
        """Return the settings of a module: a group that names it, else one that names a class."""
        by_class = None
        for group in self.groups:
            for target in group.names("targets"):
                if matches(target, module):
                    return group
                if target in ("Linear", "Embedding"):
                    by_class = by_class or group
        return by_class

    def leaves_out(self, module: str) -> bool:
        return super().leaves_out(module) or self._group(module) is None

    def compound(self, parts: Parts) -> Compound:
        group = self._group(parts.module)
        if group is None:
            raise parts.error(
                next(iter(parts.entries)), 'belongs to no group of "config_groups" in config.json'
            )
        weights, kind = group.inside("weights"), self._format(group)
        if kind in self._PLAIN:
            return self._eight_bits(parts, weights, kind)
        if kind == "pack-quantized":
            return self._packed(parts, weights)
        return self._fp4(parts, weights, kind)

    def _shares(self, weights: Settings, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the rows and columns that share a scale."""
        known = ("tensor", "channel", "group", "tensor_group", "block")
        size = weights.get("group_size")
        default = "tensor" if size is None else "channel" if size == -1 else "group"
        strategy = weights.one_of("strategy", known, default)
        if strategy == "tensor":
            return shape[0], shape[1]
        if strategy == "channel":
            return 1, shape[1]
        if strategy != "block":
            return 1, weights.size("group_size")
        return weights.block("block_structure")

    def _zeros(self, parts: Parts, weights: Settings) -> bool:
        """Return whether the matrix has zero points."""
        if not weights.get("symmetric", True) and "weight_zero_point" not in parts:
            raise parts.error("weight_zero_point", "is missing; the weight is not symmetric")
        return "weight_zero_point" in parts

    def _eight_bits(self, parts: Parts, weights: Settings, kind: str) -> Compound:
        weights.one_of("num_bits", (8,), 8)
        values = parts.matrix("weight", (E4M3, INT8))
        group = self._shares(weights, values.shape)
        shapes = scale_shapes(values.shape, group)
        exponents = kind == "mxfp8-quantized"
        tensors = {"scales": parts.get("weight_scale", (BYTE,) if exponents else SCALES, *shapes)}
        if self._zeros(parts, weights):
            tensors["zeros"] = parts.get("weight_zero_point", (INT8, E4M3), *shapes)
        parts.refuse("weight_packed", "weight_global_scale", "weight_g_idx")
        name, unpack = kind_of(values)
        grid = compound.powers if exponents else compound.plain
        return Compound(
            Layout(f"compressed-tensors {name}", 8, unpack, grid, group),
            values.shape,
            {"values": values, **tensors},
        )

    def _packed(self, parts: Parts, weights: Settings) -> Compound:
        bits = weights.one_of("num_bits", _BITS)
        weights.one_of("type", ("int",), "int")
        values = parts.matrix("weight_packed", (INT32,))
        stored = content(parts.get("weight_shape", ("I64", "I32"), (2,))).tolist()
        rows, columns = stored
        if values.shape != (rows, math.ceil(columns * bits / 32)):
            raise parts.error(
                "weight_packed",
                f"has shape {list(values.shape)}, which does not hold {stored} numbers of {bits} "
                "bits",
            )
        group = self._shares(weights, (rows, columns))
        shapes = scale_shapes((rows, columns), group)
        tensors = {"scales": parts.get("weight_scale", SCALES, *shapes)}
        if self._zeros(parts, weights):
            packed = (math.ceil(rows * bits / 32), grid_shape((rows, columns), group)[1])
            tensors["zeros"] = parts.get("weight_zero_point", (INT32,), packed)
        if "weight_g_idx" in parts:
            tensors["groups"] = groups_of(parts, "weight_g_idx", columns, group[1])
        parts.refuse("weight_global_scale")
        layout = Layout(
            "compressed-tensors int",
            bits,
            functools.partial(compound.centred, bits=bits),
            functools.partial(compound.packed_zeros, bits=bits),
            group,
        )
        return Compound(layout, (rows, columns), {"values": values, **tensors})

    def _fp4(self, parts: Parts, weights: Settings, kind: str) -> Compound:
        values = parts.matrix("weight_packed", (BYTE,))
        shape = (values.shape[0], 2 * values.shape[1])
        nvidia = kind.startswith("nv")
        group = (1, weights.size("group_size", 16 if nvidia else 32))
        types = (E4M3,) if nvidia else (BYTE, "F8_E8M0")
        tensors = {"scales": parts.get("weight_scale", types, grid_shape(shape, group))}
        if nvidia:
            tensors["whole"] = parts.get("weight_global_scale", ("F32",), (1,), ())
        parts.refuse("weight_zero_point", "weight_g_idx")
        grid, name = (compound.divided, "NVFP4") if nvidia else (compound.powers, "MXFP4")
        layout = Layout(name, 4, compound.e2m1, grid, group)
        return Compound(layout, shape, {"values": values, **tensors})


class _Fp8(Method):
    """Floats of 8 bits with a scale a block (DeepSeek, Qwen3), a row (fbgemm) or a matrix."""

    values: ClassVar = {"weight": (E4M3,)}
    params: ClassVar = ("weight_scale_inv", "weight_scale")
    unused: ClassVar = (*Method.unused, "activation_scale", "input_scale_ub")

    def compound(self, parts: Parts) -> Compound:
        values = parts.matrix("weight", (E4M3,))
        suffix = "weight_scale" if "weight_scale" in parts else "weight_scale_inv"
        if suffix == "weight_scale":
            parts.refuse("weight_scale_inv")
        block = self.settings.get("weight_block_size")
        if block is None:
            return _by_row(parts, values, suffix)
        group = self.settings.block("weight_block_size")
        scales = parts.get(suffix, (*SCALES, "F8_E8M0"), grid_shape(values.shape, group))
        layout = Layout("block fp8", 8, compound.e4m3, compound.plain, group)
        return Compound(layout, values.shape, {"values": values, "scales": scales})


class _Modelopt(Method):
    """NVIDIA's modelopt: FP8 with a scale a matrix, and NVFP4."""

    values: ClassVar = {"weight": (E4M3, BYTE)}
    params: ClassVar = ("weight_scale", "weight_scale_2")
    skips: ClassVar = ("ignore", "exclude_modules")

    def compound(self, parts: Parts) -> Compound:
        values = parts.matrix("weight", (E4M3, BYTE))
        if TYPES[values.dtype] is TYPES[E4M3]:
            parts.refuse("weight_scale_2")
            return _by_row(parts, values, "weight_scale")
        shape, group = (values.shape[0], 2 * values.shape[1]), (1, 16)
        scales = parts.get("weight_scale", (E4M3,), grid_shape(shape, group))
        overall = parts.get("weight_scale_2", ("F32",), (), (1,))
        layout = Layout("NVFP4", 4, compound.e2m1, compound.multiplied, group)
        return Compound(layout, shape, {"values": values, "scales": scales, "whole": overall})


class _Gptq(Method):
    """GPTQ (arXiv 2210.17323): integers with scales and zeros a group of inputs, which may be in
    the order of activations."""

    values: ClassVar = {"qweight": (INT32,)}
    params: ClassVar = ("qzeros", "scales", "g_idx")
    unused: ClassVar = ()

    def __init__(self, settings: Settings):
        super().__init__(settings)
        settings.one_of("bits", _BITS)
        for key in ("is_marlin_format", "planar", "rotation", "adapter"):
            settings.refuse(key)
        settings.one_of("pack_dtype", ("int32",), "int32")
        self._dynamic = settings.inside("dynamic")
        self._patterns = {
            str(key): str(key)[2:] if str(key)[:2] in ("-:", "+:") else str(key)
            for key in self._dynamic.values
        }
        for pattern in self._patterns.values():
            settings.check_pattern("dynamic", pattern)
        older = settings.text("format", "gptq")
        kind = settings.one_of("checkpoint_format", ("gptq", "gptq_v2"), older)
        self._offset = 0 if kind == "gptq_v2" else 1

    def compound(self, parts: Parts) -> Compound:
        values = parts.matrix("qweight", (INT32,))
        bits, group = self._numbers(parts.module)
        shape = (values.shape[0] * 32 // bits, values.shape[1])
        count = shape[0] if group == -1 else group
        rows, columns = grid_shape(shape, (count, 1))
        tensors = {
            "scales": parts.get("scales", SCALES, (rows, columns)),
            "zeros": parts.get("qzeros", (INT32,), (rows, math.ceil(columns * bits / 32))),
        }
        if "g_idx" in parts:
            tensors["groups"] = groups_of(parts, "g_idx", shape[0], count)
        if self._is_excepted(parts.module):
            raise parts.error("qweight", "belongs to a module that config.json leaves out")
        layout = Layout(
            "GPTQ",
            bits,
            functools.partial(compound.down_columns, bits=bits),
            functools.partial(compound.gptq, bits=bits, offset=self._offset),
            (count, 1),
            unit=32 // bits,
            transposed=True,
            offset=self._offset,
        )
        return Compound(layout, shape, {"values": values, **tensors})

    def _pattern(self, module: str) -> str | None:
        """Return the first pattern of `dynamic` that matches a module: one after "-:" leaves the
        module out, others give it numbers of its own."""
        found = (key for key, one in self._patterns.items() if matches(f"re:{one}", module))
        return next(found, None)

    def leaves_out(self, module: str) -> bool:
        # a list of quantised modules leaves out the others
        by_list = bool(self.settings.get("modules_in_block_to_quantize"))
        return by_list or super().leaves_out(module) or self._is_excepted(module)

    def _is_excepted(self, module: str) -> bool:
        return (self._pattern(module) or "").startswith("-:")

    def _numbers(self, module: str) -> tuple[int, int]:
        """Return the bits and the group size of a module. `dynamic` has exceptions by patterns."""
        own = self.settings
        pattern = self._pattern(module)
        if pattern is not None:
            given = self._dynamic.inside(pattern).values
            within = f"{self._dynamic.within}{pattern}."
            own = Settings({**own.values, **given}, own.place, within=within)
        return own.one_of("bits", _BITS), own.group("group_size")


class _Awq(Method):
    """AWQ (arXiv 2306.00978), version "gemm": integers of 4 bits, scales and zeros a group."""

    values: ClassVar = {"qweight": (INT32,)}
    params: ClassVar = ("qzeros", "scales")
    unused: ClassVar = ()

    def __init__(self, settings: Settings):
        super().__init__(settings)
        keys = settings.values
        settings.one_of("w_bit" if "w_bit" in keys else "bits", (4,))
        for key in ("version", "format", "checkpoint_format"):
            settings.one_of(key, ("gemm", "GEMM"), "gemm")
        self._group = settings.group("q_group_size" if "q_group_size" in keys else "group_size")

    def compound(self, parts: Parts) -> Compound:
        values = parts.matrix("qweight", (INT32,))
        shape = (values.shape[0], 8 * values.shape[1])
        count = shape[0] if self._group == -1 else self._group
        rows, columns = grid_shape(shape, (count, 1))
        tensors = {
            "scales": parts.get("scales", SCALES, (rows, columns)),
            "zeros": parts.get("qzeros", (INT32,), (rows, columns // 8)),
        }
        layout = Layout("AWQ", 4, compound.awq, compound.awq_scales, (count, 1), transposed=True)
        return Compound(layout, shape, {"values": values, **tensors})


class _BitsAndBytes(Method):
    """bitsandbytes: rows of 8 bits (arXiv 2208.07339), blocks of 4 bits (arXiv 2305.14314)."""

    values: ClassVar = {"weight": (INT8, BYTE)}
    params: ClassVar = (
        "SCB",
        "weight_format",
        *(f"weight.{one}" for one in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")),
        *(f"{_QUANT_STATE}{one}" for one in ("nf4", "fp4")),
    )
    unused: ClassVar = ()
    skips: ClassVar = ("llm_int8_skip_modules",)

    def split(self, name: str) -> tuple[str, str]:
        if ".weight." in name:
            module, _, suffix = name.partition(".weight.")
            return module, f"weight.{suffix}"
        return super().split(name)

    def compound(self, parts: Parts) -> Compound:
        if "SCB" in parts:
            values = parts.matrix("weight", (INT8,))
            kind = (
                content(parts.get("weight_format", (BYTE,))) if "weight_format" in parts else None
            )
            if kind is not None and kind.any():
                raise parts.error(
                    "weight_format", "names an order of rows of some GPUs; only 0 is read"
                )
            scales = parts.get("SCB", ("F32",), values.shape[:1], (values.shape[0], 1))
            group = (1, values.shape[1])
            layout = Layout("bitsandbytes int8", 8, compound.int8, compound.rows_of_int8, group)
            return Compound(layout, values.shape, {"values": values, "scales": scales})
        return self._four_bits(parts)

    def _four_bits(self, parts: Parts) -> Compound:
        suffix = next((one for one in parts.entries if one.startswith(_QUANT_STATE)), None)
        if suffix is None:
            raise parts.error(f"{_QUANT_STATE}nf4", "is missing; it describes a quantised weight")
        try:
            state = parse_object(bytes(content(parts.get(suffix, (BYTE,))).tolist()))
            shape = tuple(whole(one, least=1) for one in state["shape"])
            size = whole(state["blocksize"], least=1)
            offset = float(state.get("nested_offset", 0.0))
            nested = whole(state.get("nested_blocksize", _GROUP_OF_SCALES))
        except (ValueError, KeyError, TypeError) as error:
            raise parts.error(suffix, f"does not describe a weight: {error}") from None
        if len(shape) != 2 or shape[1] % size or nested != _GROUP_OF_SCALES:
            raise parts.error(
                suffix, f"describes a shape {list(shape)} in blocks of {size}, which is not read"
            )
        values = parts.get("weight", (BYTE,), (math.prod(shape) // 2, 1))
        values = values._replace(shape=(shape[0], shape[1] // 2))
        grid = (shape[0], shape[1] // size)
        count = math.prod(grid)
        tensors = {"values": values, "table": parts.get("weight.quant_map", ("F32",), (16,))}
        if "weight.nested_absmax" in parts:
            outer = (math.ceil(count / nested),)
            tensors["scales"] = parts.get("weight.absmax", (BYTE,), (count,))
            tensors["scale_scales"] = parts.get("weight.nested_absmax", ("F32",), outer)
            tensors["scale_table"] = parts.get("weight.nested_quant_map", ("F32",), (256,))
        else:
            tensors["scales"] = parts.get("weight.absmax", ("F32",), (count,))
        layout = Layout(
            f"bitsandbytes {suffix.removeprefix(_QUANT_STATE)}",
            4,
            compound.table,
            functools.partial(compound.blocks, shape=grid, offset=offset),
            (1, size),
        )
        return Compound(layout, shape, tensors)


class _Mxfp4(Method):
    """MXFP4 of gpt-oss: the matrices of all experts of a layer in one tensor, in groups of 32."""

    values: ClassVar = {"blocks": (BYTE,)}
    params: ClassVar = ("scales",)
    unused: ClassVar = ()

    def leaves_out(self, module: str) -> bool:
        return True  # this method is for experts only

    def split(self, name: str) -> tuple[str, str]:
        module, _, suffix = name.rpartition("_")
        return module, suffix

    def weight_of(self, module: str) -> str:
        return module

    def name_of(self, module: str, suffix: str) -> str:
        return f"{module}_{suffix}"

    def compound(self, parts: Parts) -> Compound:
        values = parts.get("blocks", (BYTE,))
        if len(values.shape) != 4 or not values.size or values.shape[-1] != _HALF_OF_GROUP:
            raise parts.error(
                "blocks", f"has shape {list(values.shape)}, not [experts, outputs, groups, 16]"
            )
        experts, outputs, count, half = values.shape
        scales = parts.get("scales", (BYTE,), (experts, outputs, count))
        rows = experts * outputs
        layout = Layout("MXFP4", 4, compound.e2m1, compound.powers, (1, 2 * half), stacked=experts)
        tensors = {
            "values": values._replace(shape=(rows, count * half)),
            "scales": scales._replace(shape=(rows, count)),
        }
        return Compound(layout, (rows, 2 * count * half), tensors)


def _by_row(parts: Parts, values: Entry, suffix: str) -> Compound:
    """Return a matrix of 8-bit floats with a scale a row, or one for all rows."""
    rows, columns = values.shape
    shapes = (
        *scale_shapes(values.shape, (rows, columns)),
        *scale_shapes(values.shape, (1, columns)),
    )
    scales = parts.get(suffix, SCALES, *shapes)
    group = (rows if math.prod(scales.shape) == 1 else 1, columns)
    layout = Layout("fp8", 8, compound.e4m3, compound.plain, group)
    return Compound(layout, values.shape, {"values": values, "scales": scales})


# By file: the method, and the key of its settings if they are not the whole file.
OLDER_FILES = {
    "quantize_config.json": ("gptq", ""),
    "quant_config.json": ("awq", ""),
    "hf_quant_config.json": ("modelopt", "quantization"),
}
METHODS: dict[str, type[Method]] = {
    "compressed-tensors": _CompressedTensors,
    "fp8": _Fp8,
    "fbgemm_fp8": _Fp8,
    "modelopt": _Modelopt,
    "gptq": _Gptq,
    "awq": _Awq,
    "bitsandbytes": _BitsAndBytes,
    "mxfp4": _Mxfp4,
}


def read_joined(
    folder: Path, config: Mapping[str, Any], has_slot: Callable[[str], bool] = lambda name: True
) -> Joined:
    """Return all tensors of a folder. Those of each quantised matrix are joined; see `join`."""
    settings, place = _with_older_files(config, folder)
    return join(settings, read_folder(folder), place=place, has_slot=has_slot)


def _with_older_files(config: Mapping[str, Any], folder: Path) -> tuple[Mapping[str, Any], str]:
    """Return a config with the `quantization_config` that older tools wrote to a file beside it,
    and the name of the file that has it."""
    if any(config.get(key) for key in QUANTISED):
        return config, str(folder / "config.json")
    for name, (method, inner) in OLDER_FILES.items():
        if (path := folder / name).exists():
            whole_file = Values(read_json(path), str(path))
            if inner and not whole_file.get(inner):
                raise whole_file.error(inner, "it is missing or empty")
            found = whole_file.mapping(inner) if inner else whole_file.values
            return {**config, QUANTISED[0]: {"quant_method": method, **found}}, str(path)
    return config, str(folder / "config.json")


def join(
    config: Mapping[str, Any],
    entries: Mapping[str, Entry],
    *,
    place: str,
    has_slot: Callable[[str], bool] = lambda name: True,
) -> Joined:
    """Join the tensors of each quantised matrix to a Compound under the name of its weight.

    Args:
        config: a parsed config.json.
        entries: stored tensors by full name.
        place: the name of config.json or of an older file, for errors.
        has_slot: whether the model has a tensor of this name.

    Raises:
        UserError: the method or a setting is not supported, or a tensor is missing or does not
            fit. Names the file and the tensor or key.
    """
    key = next((key for key in QUANTISED if config.get(key)), None)
    if key is None:
        return Joined(dict(entries))
    settings = Settings(config, place).inside(key)
    name = settings.text("quant_method", "compressed-tensors" if key == QUANTISED[1] else None)
    if name in REFUSED:
        raise settings.error("quant_method", f'"{name}" is not supported: {REFUSED[name]}')
    if name not in METHODS:
        raise settings.error(
            "quant_method",
            f"{shown(name)} is not supported; known: {', '.join(METHODS)}; {OTHERWISE}",
        )
    joined = METHODS[name](settings).join(entries, has_slot)
    return joined._replace(notes=tuple(f"{place}: {note}" for note in joined.notes))
