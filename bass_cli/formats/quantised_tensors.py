"""The tensors of quantised matrices by module, the settings of config.json, and checks of both.

Not here: the methods of quantisation (quantised_config.py), the meaning of numbers (compound.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NamedTuple

from bass_cli.errors import UserError
from bass_cli.formats import compound
from bass_cli.formats.compound import TYPES, Compound, Stored, content
from bass_cli.formats.config_keys import Values
from bass_cli.formats.tensor_files import Entry, listed
from bass_cli.reading import shown, texts, whole

FLOATS = ("F64", "F32", "F16", "BF16")
SCALES = ("F32", "F16", "BF16")
E4M3, INT8, INT32, BYTE = "F8_E4M3", "I8", "I32", "U8"
_IN_LAYER = re.compile(r"\.\d+\.")  # names of tensors in layers have the layer's number
OTHERWISE = "use the original checkpoint or a GGUF file"


class Joined(NamedTuple):
    """The tensors of a folder after `join`: by name, and notes for the user."""

    entries: dict[str, Stored]
    notes: tuple[str, ...] = ()


class Settings(Values):
    """Checked access to the keys of `quantization_config`, or of a mapping inside it."""

    def one_of(self, key: str, choices: Iterable[Any], default: Any = None) -> Any:
        """Return a value that must be one of these."""
        value = self.get(key, default)
        if not any(type(value) is type(one) and value == one for one in choices):
            listed = " or ".join(shown(one) for one in choices)
            raise self.error(key, f"{shown(value)} is not supported, only {listed} is")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """Return the number of rows or columns that share a scale."""
        return self.checked(key, default, lambda value: whole(value, least=1))

    def group(self, key: str) -> int:
        """Return the number of inputs that share a scale, -1 for all. Default: 128."""
        return -1 if self.get(key) == -1 else self.size(key, 128)

    def block(self, key: str) -> tuple[int, int]:
        """Return the rows and the columns of a block. Older files have them as "128x128"."""

        def check(value: Any) -> tuple[int, int]:
            sizes = list(map(int, re.findall(r"\d+", value))) if isinstance(value, str) else value
            if not isinstance(sizes, list) or len(sizes) != 2:
                raise ValueError(f"two sizes are needed, not {shown(value)}")
            return whole(sizes[0], least=1), whole(sizes[1], least=1)

        return self.checked(key, None, check)

    def names(self, key: str) -> tuple[str, ...]:
        value = self.get(key) or []
        found = self.checked(key, [], lambda _: texts([value] if isinstance(value, str) else value))
        for name in found:
            if name.startswith("re:"):
                self.check_pattern(key, name[3:])
        return tuple(found)

    def check_pattern(self, key: str, pattern: str) -> None:
        """Raise a UserError if a pattern for modules is not a regular expression."""
        try:
            re.compile(pattern)
        except re.error as error:
            fault = f"{shown(pattern)} is not a regular expression: {error}"
            raise self.error(key, fault) from None

    def refuse(self, key: str) -> None:
        """Raise a UserError if the key is set."""
        if value := self.values.get(key):
            raise self.error(key, f"{shown(value)} is not supported; {OTHERWISE}")


class Parts:
    """The tensors of one module by their suffixes, and checks of them."""

    def __init__(self, module: str, entries: dict[str, Entry], name_of: Callable[[str, str], str]):
        self.module, self.entries, self._name_of = module, entries, name_of

    def name(self, suffix: str) -> str:
        return self._name_of(self.module, suffix)

    def error(self, suffix: str, fault: str) -> UserError:
        file = self.entries.get(suffix, next(iter(self.entries.values()))).file
        return UserError(f'{file}: tensor "{self.name(suffix)}" {fault}')

    def __contains__(self, suffix: str) -> bool:
        return suffix in self.entries

    def get(self, suffix: str, types: Iterable[str], *shapes: tuple[int, ...]) -> Entry:
        """Return a tensor of one of these types and shapes. No shape: any."""
        entry = self.entries.get(suffix)
        if entry is None:
            raise self.error(suffix, "is missing; it belongs to a quantised weight")
        allowed = [TYPES[one] for one in types]
        if TYPES.get(entry.dtype) not in allowed:
            raise self.error(suffix, f"has type {entry.dtype}, not {' or '.join(types)}")
        if shapes and entry.shape not in shapes:
            wanted = " or ".join(dict.fromkeys(str(list(shape)) for shape in shapes))
            raise self.error(suffix, f"has shape {list(entry.shape)}, not {wanted}")
        return entry

    def matrix(self, suffix: str, types: Iterable[str]) -> Entry:
        """Return a tensor of one of these types and of two dimensions, none of them 0."""
        entry = self.get(suffix, types)
        if len(entry.shape) != 2 or not entry.size:
            raise self.error(suffix, f"has shape {list(entry.shape)}; a matrix is needed")
        return entry

    def refuse(self, *suffixes: str) -> None:
        """Raise a UserError if the format of the module does not have one of these tensors."""
        for suffix in suffixes:
            if suffix in self:
                raise self.error(suffix, "does not belong to the format that config.json names")


class Method:
    """A way of storing matrices in few bits.

    Attributes:
        values: the suffixes of tensors of numbers, each with the types that mark a quantised one.
        params: other suffixes that belong to a matrix.
        unused: suffixes of tensors about activations and the cache, which bass does not use.
        skips: the keys of the configuration with names of modules that are not quantised.
    """

    values: ClassVar[dict[str, tuple[str, ...]]] = {"weight": (E4M3, INT8, BYTE)}
    params: ClassVar[tuple[str, ...]] = ()
    unused: ClassVar[tuple[str, ...]] = (
        "input_scale",
        "output_scale",
        "q_scale",
        "k_scale",
        "v_scale",
        "kv_scale",
    )
    skips: ClassVar[tuple[str, ...]] = ("modules_to_not_convert", "ignored_layers")

    def __init__(self, settings: Settings):
        self.settings = settings
        self.skipped = {name for key in self.skips for name in settings.names(key)}

    def compound(self, parts: Parts) -> Compound:
        """Return the matrix of a module."""
        raise NotImplementedError

    def join(self, entries: Mapping[str, Entry], has_slot: Callable[[str], bool]) -> Joined:
        """See the function of this name."""
        found: dict[str, Stored] = {}
        modules: dict[str, dict[str, Entry]] = {}
        unused: list[str] = []
        for name, entry in entries.items():
            module, suffix = self._split(name, entry)
            if suffix is None:
                found[name] = entry
            elif suffix in self.unused:
                unused.append(suffix)
            else:
                modules.setdefault(module, {})[suffix] = entry
        for module, tensors in modules.items():
            parts = Parts(module, tensors, self.name_of)
            if module in self.skipped:
                raise parts.error(
                    next(iter(tensors)), "belongs to a module that config.json lists as unquantised"
                )
            found[self.weight_of(module)] = self._joined(parts, found)
        found, biases = self._without_empty_biases(found, modules, has_slot)
        plain = self._plain_matrices(found) if modules else []
        return Joined(found, tuple(self._notes(unused, biases, plain, bool(modules))))

    def leaves_out(self, module: str) -> bool:
        """Return whether the settings except a module from quantisation. Their names may be parts
        of a module's name, have wildcards, or be regular expressions after "re:"."""
        return any(
            matches(name, module) if name.startswith("re:") else fnmatchcase(module, f"*{name}*")
            for name in self.skipped
        )

    def _plain_matrices(self, found: Mapping[str, Stored]) -> list[str]:
        """Return the matrices of layers that are not quantised, though the settings say so."""
        return [
            name
            for name, one in found.items()
            if name.endswith(".weight")
            and _IN_LAYER.search(name)
            and isinstance(one, Entry)
            and len(one.shape) == 2
            and not self.leaves_out(name.removesuffix(".weight"))
        ]

    def _joined(self, parts: Parts, found: Mapping[str, Stored]) -> Compound:
        if not any(suffix in parts for suffix in self.values):
            param = next(iter(parts.entries))
            plain = found.get(parts.name("weight"))
            if isinstance(plain, Entry):
                raise parts.error(
                    param,
                    f"has scales of a weight that is not quantised: it has type {plain.dtype}",
                )
            raise parts.error(next(iter(self.values)), f"is missing, but there is {shown(param)}")
        return self.compound(parts)

    def _split(self, name: str, entry: Entry) -> tuple[str, str | None]:
        """Return the module and the suffix of a tensor; None for one that is stored as it is."""
        module, suffix = self.split(name)
        if suffix in self.values:
            marks = [TYPES[one] for one in self.values[suffix]]
            return module, suffix if TYPES.get(entry.dtype) in marks else None
        return module, suffix if suffix in (*self.params, *self.unused) else None

    def weight_of(self, module: str) -> str:
        """Return the name of the matrix of a module."""
        return f"{module}.weight"

    def name_of(self, module: str, suffix: str) -> str:
        """Return the name of a tensor of a module."""
        return f"{module}.{suffix}"

    def split(self, name: str) -> tuple[str, str]:
        """Return the module and the suffix of a tensor's name."""
        module, _, suffix = name.rpartition(".")
        return module, suffix

    def _without_empty_biases(
        self, found: dict[str, Stored], modules: Iterable[str], has_slot: Callable[[str], bool]
    ) -> tuple[dict[str, Stored], int]:
        """Leave out biases that are 0 and that the model does not have: some tools write one for
        every quantised matrix."""
        extra = [f"{module}.bias" for module in modules if not has_slot(f"{module}.bias")]
        empty = set()
        for name in extra:
            entry = found.get(name)
            if isinstance(entry, Entry) and entry.dtype in FLOATS and not content(entry).any():
                empty.add(name)
        return {name: one for name, one in found.items() if name not in empty}, len(empty)

    def _notes(
        self, unused: list[str], biases: int, plain: list[str], quantised: bool
    ) -> Iterable[str]:
        """Yield notes on what is not used, and on matrices that are not quantised."""
        if not quantised:
            yield "there is a quantization_config, but no weight is quantised"
        if plain:
            yield (
                f"{listed(plain)} stored without quantisation, though quantization_config does not "
                "say so; bass reads what is stored"
            )
        if unused:
            names = ", ".join(sorted(set(unused)))
            yield (
                f"{len(unused)} tensors with scales of activations or of the cache are not used "
                f"({names}): bass does not quantise them by the file's scales"
            )
        if biases:
            yield f"{biases} biases that are 0 are not used: the model has none there"
        for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
            if self.settings.get(key):
                yield (
                    f"{key} of quantization_config is not used: the file's scales do not "
                    "quantise the cache"
                )


def grid_shape(shape: tuple[int, ...], group: tuple[int, int]) -> tuple[int, int]:
    """Return the shape of the scales of groups of rows and columns."""
    return math.ceil(shape[0] / group[0]), math.ceil(shape[1] / group[1])


def scale_shapes(shape: tuple[int, ...], group: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes that scales may be stored in."""
    rows, columns = grid_shape(shape, group)
    if (rows, columns) == (1, 1):
        return ((1,), (), (1, 1))
    return ((rows, columns), (rows,)) if columns == 1 else ((rows, columns),)


def kind_of(values: Entry) -> tuple[str, Callable[..., Any]]:
    """Return the name of the type of 8-bit numbers, and what unpacks them."""
    if TYPES[values.dtype] is TYPES[INT8]:
        return "int8", compound.int8
    return "fp8", compound.e4m3


def groups_of(parts: Parts, suffix: str, inputs: int, size: int) -> Entry:
    """Return the tensor with the group of each input. All groups must exist."""
    entry = parts.get(suffix, (INT32, "I64"), (inputs,))
    found, most = content(entry), math.ceil(inputs / size)
    if found.min() < 0 or found.max() >= most:
        raise parts.error(suffix, f"names a group that does not exist; there are {most}")
    return entry


def matches(target: str, module: str) -> bool:
    """Return whether a name of the settings matches a module: the whole name, or a regular
    expression after "re:"."""
    return re.match(target[3:], module) is not None if target[:3] == "re:" else target == module
