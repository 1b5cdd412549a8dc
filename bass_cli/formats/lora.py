"""LoRA adapters (arXiv 2106.09685) in PEFT's layout: merged into the target's stored tensors.

adapter_config.json says how; adapter_model.safetensors has two factors of each changed matrix, and
whole tensors that replace the target's. DoRA (arXiv 2402.09353) also has a magnitude of each row.
Nothing is merged here: compound.py adds the changes while the weights are read.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bass_cli.errors import UserError
from bass_cli.formats.compound import Adapted, Compound, Delta, Factor, Stored
from bass_cli.formats.config_keys import Values, refuse_others
from bass_cli.formats.sources import locate, read_json
from bass_cli.formats.tensor_content import DTYPES
from bass_cli.formats.tensor_files import Entry, read_safetensors, read_torch
from bass_cli.models.families import Slot
from bass_cli.reading import finite, shown

_CONFIG = "adapter_config.json"
_FILES = (("adapter_model.safetensors", read_safetensors), ("adapter_model.bin", read_torch))
_PREFIX = "base_model.model."
# The factors of a module's matrix: A [rank, inputs] and B [outputs, rank].
_FACTORS = re.compile(
    r"^(?P<module>.*)\.lora_(?P<kind>embedding_)?(?P<side>[AB])(\.default)?(\.weight)?$"
)
_MAGNITUDE = re.compile(r"^(?P<module>.*)\.lora_magnitude_vector(\.default)?(\.weight)?$")
# PEFT's wrappers in the names of whole tensors.
_WRAPPERS = re.compile(r"\.(modules_to_save(\.default)?|base_layer)(?=\.)")
# Keys that change what an adapter means, with the values that are supported besides null and false.
_ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "lora_bias": (),
    "bias": ("none", "all", "lora_only"),
    "target_parameters": ([],),
    "trainable_token_indices": ([], {}),
    "layer_replication": ([],),
    "alora_invocation_tokens": ([],),
    **dict.fromkeys(("use_qalora", "use_bdlora", "arrow_config", "kasa_config"), ()),
    **dict.fromkeys(("monteclora_config", "velora_config"), ()),
    # The others begin with other base weights, which the adapter belongs to.
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "lora_ga"),
}


class Adapter(NamedTuple):
    """An adapter's folder, and the factor of its changes."""

    folder: Path
    weight: float = 1.0


def parse_adapter(text: str) -> tuple[str, float]:
    """Return source and weight of a setting such as "folder" or "folder:0.5"."""
    source, _, number = text.rpartition(":")
    if source and re.fullmatch(r"[+-]?[0-9.]+(e[+-]?\d+)?", number, re.ASCII | re.IGNORECASE):
        try:
            return source, finite(float(number))
        except ValueError:
            raise UserError(f'`lora` {text}: a finite number is needed after ":"') from None
    if source and not os.path.exists(text) and os.path.isdir(source):
        raise UserError(f'`lora` {text}: a number is needed after ":"')
    return text, 1.0


def locate_adapters(texts: Iterable[str], folder: Path | None) -> tuple[Adapter, ...]:
    """Return the adapters of a setting. Those of the hub are downloaded if needed.

    Args:
        folder: of the pair file, for relative paths.

    Raises:
        UserError: an adapter is not there.
    """
    found = []
    for text in texts:
        source, weight = parse_adapter(text)
        path = locate(source, folder=folder)
        if not path.is_dir():
            raise UserError(f"`lora` {text}: {path} is not a folder with {_CONFIG}")
        found.append(Adapter(path, weight))
    return tuple(found)


@dataclass
class _Module:
    """What an adapter has for one module: factors by "A" and "B", and DoRA's magnitudes."""

    factors: dict[str, Entry]
    embedding: bool = False
    magnitude: Entry | None = None


class Merged(NamedTuple):
    """Stored tensors by name after adapters are merged, and notes for the user."""

    entries: dict[str, Stored]
    notes: tuple[str, ...] = ()


def merge(
    entries: Mapping[str, Stored],
    adapters: Sequence[Adapter],
    *,
    slots: Mapping[str, Slot],
    bare: Callable[[str], str],
    tied: bool,
) -> Merged:
    """Merge adapters into the tensors of a folder.

    Args:
        entries, slots: by the tensors' names without a prefix.
        bare: removes the prefix of a name.
        tied: whether the head is the embedding.

    Raises:
        UserError: a setting is not supported, or a tensor does not fit the target. Names the file
            and the tensor or key.
    """
    found, notes, saved = dict(entries), list[str](), dict[str, Path]()
    heads = {name: slot for name, slot in slots.items() if slot.name == "head.weight"}
    for adapter in adapters:
        opened = _Opened(adapter, bare)
        for name, entry in opened.saved.items():
            opened.check_saved(name, slots, saved)
            if isinstance(found.get(name), Adapted):
                raise opened.error(name, "replaces a tensor that another adapter changes")
            if tied and slots[name].name == "embed.weight":
                for head in heads:  # the head keeps the old embedding
                    found.setdefault(head, entries[name])
            found[name] = entry
        for module, one in opened.modules.items():
            name = f"{module}.weight"
            stored, slot = found.get(name), slots.get(name)
            if stored is None or slot is None:
                raise opened.error(module, "has no place in the target")
            if tied and slot.name in ("embed.weight", "head.weight"):
                raise opened.error(
                    module, "changes an embedding that is the head too; untie them and save both"
                )
            transposed = slot.how == "transpose" or _is_transposed(stored)
            found[name] = opened.changed(module, one, stored, transposed=transposed)
        notes.append(opened.note)
    return Merged(found, tuple(notes))


def _is_transposed(stored: Stored) -> bool:
    base = stored.base if isinstance(stored, Adapted) else stored
    return isinstance(base, Compound) and base.layout.transposed


class _Opened:
    """An adapter whose configuration and headers have been read.

    Attributes:
        modules: the changed modules, by their names without a prefix.
        saved: tensors that replace the target's.
    """

    def __init__(self, adapter: Adapter, bare: Callable[[str], str]):
        self._adapter = adapter
        self._place = str(adapter.folder / _CONFIG)
        self._config = read_json(adapter.folder / _CONFIG)
        _check_config(self._config, self._place)
        self.modules: dict[str, _Module] = {}
        self.saved: dict[str, Entry] = {}
        self._file, entries = _tensors(adapter.folder)
        for name, entry in entries.items():
            if entry.dtype not in DTYPES:
                raise UserError(
                    f'{self._file}: tensor "{name}" has type {entry.dtype}; floats are needed'
                )
            if not self._take(name, bare(name.removeprefix(_PREFIX)), entry):
                raise UserError(
                    f'{self._file}: tensor "{name}" is there under another name too; save the '
                    "adapter again with PEFT's save_pretrained"
                )

    def _take(self, name: str, short: str, entry: Entry) -> bool:
        """Sort a tensor into `modules` or `saved`. Return whether it is the first of its place."""
        if (part := _FACTORS.match(short)) is not None:
            module = self.modules.setdefault(part["module"], _Module({}))
            module.embedding = part["kind"] is not None
            return module.factors.setdefault(part["side"], entry) is entry
        if (part := _MAGNITUDE.match(short)) is not None:
            module = self.modules.setdefault(part["module"], _Module({}))
            first = module.magnitude is None
            module.magnitude = entry
            return first
        if ".lora_" in short:
            raise UserError(f'{self._file}: tensor "{name}" is not supported')
        return self.saved.setdefault(_WRAPPERS.sub("", short), entry) is entry

    @property
    def note(self) -> str:
        matrices = f"merged into {len(self.modules)} matrices of the target"
        more = f", {len(self.saved)} tensors replaced" if self.saved else ""
        weight = f", weight {self._adapter.weight:g}" if self._adapter.weight != 1 else ""
        return f"{self._adapter.folder}: LoRA {matrices}{weight}{more}"

    def error(self, module: str, fault: str) -> UserError:
        return UserError(f'{self._file}: the adapter of "{module}" {fault}')

    def check_saved(self, name: str, slots: Mapping[str, Slot], saved: dict[str, Path]) -> None:
        """Check a tensor that replaces the target's. `saved`: the files of those before it."""
        if name not in slots:
            raise UserError(f'{self._file}: tensor "{name}" has no place in the target')
        if self._adapter.weight != 1:
            raise UserError(
                f"{self._file}: tensor \"{name}\" replaces the target's, so the adapter's weight "
                f"must be 1, not {self._adapter.weight:g}"
            )
        if name in saved:
            raise UserError(f'{self._file}: tensor "{name}" is in {saved[name]} too')
        saved[name] = self._file

    def changed(self, module: str, one: _Module, stored: Stored, *, transposed: bool) -> Adapted:
        """Return a stored matrix with this adapter's change.

        Args:
            transposed: whether the matrix is stored as [inputs, outputs].
        """
        for side in ("A", "B"):
            if side not in one.factors:
                raise self.error(module, f"has no lora_{side}")
        a, b = one.factors["A"], one.factors["B"]
        # An embedding [vocabulary, width] has the factors of its transpose.
        turned = transposed or one.embedding
        wanted = stored.shape[::-1] if turned else stored.shape
        rank = a.shape[0] if a.shape else 0
        if (b.shape, a.shape) != ((wanted[0], rank), (rank, wanted[-1])):
            raise self.error(
                module,
                f"has factors {list(b.shape)} and {list(a.shape)}, which do not fit a matrix "
                f"{list(wanted)}",
            )
        base = stored if isinstance(stored, Adapted) else Adapted(stored, ())
        if one.magnitude is not None or base.by_norm:
            self._check_dora(module, one, base, turned=turned)
        left, right = (Factor(a, True), Factor(b, True)) if turned else (Factor(b), Factor(a))
        scale = self._scale(module, rank) * self._adapter.weight
        return base._replace(deltas=(*base.deltas, Delta(left, right, scale, one.magnitude)))

    def _check_dora(self, module: str, one: _Module, base: Adapted, *, turned: bool) -> None:
        if base.deltas or self._adapter.weight != 1 or one.magnitude is None:
            raise self.error(module, "is a DoRA, which is merged alone and with weight 1 only")
        if turned:
            raise self.error(module, "is a DoRA of a transposed matrix, which is not supported")
        if math.prod(one.magnitude.shape) != base.shape[0]:
            raise self.error(
                module, f"has magnitudes {list(one.magnitude.shape)}, not [{base.shape[0]}]"
            )

    def _scale(self, module: str, rank: int) -> float:
        """Return alpha over rank, or over its root if the adapter is rank-stabilised (arXiv
        2312.03732)."""
        config = self._config
        wanted = _of_module(config.get("rank_pattern"), module, config.get("r"), self._place)
        if wanted != rank:
            raise self.error(module, f"has rank {rank}, but {self._place} says {shown(wanted)}")
        alpha = _of_module(
            config.get("alpha_pattern"), module, config.get("lora_alpha"), self._place
        )
        number = Values({"lora_alpha": alpha}, self._place).checked("lora_alpha", None, finite)
        return number / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of_module(pattern: Any, module: str, default: Any, place: str) -> Any:
    """Return a module's value of `rank_pattern` or `alpha_pattern`: names, or regular expressions
    that match the name's end."""
    for key, value in (pattern or {}).items():
        try:
            if re.match(rf"(.*\.)?({key})$", module):
                return value
        except re.error:
            raise UserError(
                f'{place}: keys "rank_pattern" and "alpha_pattern": {shown(key)} is not a regular '
                "expression"
            ) from None
    return default


def _check_config(config: Mapping[str, Any], place: str) -> None:
    """Raise a UserError for settings that are not supported."""
    values = Values(config, place)
    refuse_others(
        {key: value for key, value in config.items() if value is not False}, _ONLY, place=place
    )
    values.count("r")
    for key in ("rank_pattern", "alpha_pattern"):
        values.mapping(key)


def _tensors(folder: Path) -> tuple[Path, dict[str, Entry]]:
    """Return the file of an adapter's tensors, and these by name."""
    for name, read in _FILES:
        if (path := folder / name).exists():
            return path, read(path)
    raise UserError(f"{folder}: {' or '.join(name for name, _ in _FILES)} is needed")
