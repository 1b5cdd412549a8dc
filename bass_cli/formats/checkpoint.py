"""Checkpoint: a model on disk. It is opened and fully checked by its headers alone, before anything
large is read.

Not here: finding it (sources.py), its weight files (tensor_files.py), loading (weights.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bass_cli.errors import UserError, near_word
from bass_cli.formats import gguf_config, text_part
from bass_cli.formats.arrangement import is_stacked, unstack, upright
from bass_cli.formats.backends import END_ROLES
from bass_cli.formats.compound import Adapted, Compound, Stored, content, entries_of, parts
from bass_cli.formats.gguf_blocks import QUANTISED
from bass_cli.formats.gguf_config import ROPE_FACTORS, architecture_of, ignored_in, spec_of_gguf
from bass_cli.formats.gguf_tensors import fitted, split_entries
from bass_cli.formats.hf_config import is_native, mask_of, notes_of_config, spec_of_config
from bass_cli.formats.lora import Adapter, merge
from bass_cli.formats.quantised_config import read_joined
from bass_cli.formats.sources import read_json
from bass_cli.formats.tensor_content import DTYPES
from bass_cli.formats.tensor_files import Entry, listed, read_gguf
from bass_cli.formats.text_part import bare_name, has_names_of_text_part, text_config
from bass_cli.models import any_probe, families
from bass_cli.models.families import FAMILIES, Family, Slot
from bass_cli.models.spec import AnySpec, HeadSpec, Layouts, Spec, head_parameters, parameters
from bass_cli.reading import open_regular, shown

_FACTORS = 1 << 16  # maximum rotary factors, more than any head has dimensions
_SAMPLE = 4096  # bytes of a tensor that identify it, from its middle
_GGUF_MASKS = ("tokenizer.ggml.mask_token_id",)
# Modules of models that transformers runs, which adapters may replace.
_ROLES = {"embed_tokens": "embed.weight", "lm_head": "head.weight"}
_TRANSPOSED = ("gpt2", "openai-gpt", "gpt_bigcode")  # models with maps [inputs, outputs]


class Piece(NamedTuple):
    """A stored tensor, or several that make one matrix, and the place in the decoder."""

    entry: Stored
    slot: Slot


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk whose headers have been checked.

    eos_ids: end-of-sequence ids that its files name. The tokenizer adds those that are known by
        their text (backends.py).
    metadata: of a GGUF file, else empty.
    vocabulary: a digest of the tokenizer's data in a GGUF file.
    head: set if it is a drafter that reads a target's hidden states. Then `spec` is that of its
        layers.
    notes: for the user, about its configuration.
    names: the published names of its family's tensors, without their prefix, and their slots. In a
        GGUF file the tensors have other names.
    prefixes: optional prefixes of published names, in the order in which they are tried.
    ignored: patterns of names that have no slot.
    adapters: LoRA adapters that are merged into its weights.
    written: checksums of tensors that were written after loading, by decoder tensor and first row.
    """

    path: Path
    spec: Spec
    pieces: tuple[Piece, ...]
    eos_ids: tuple[int, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    vocabulary: str | None = None
    head: HeadSpec | None = None
    notes: tuple[str, ...] = ()
    names: Mapping[str, Slot] = field(default_factory=dict)
    prefixes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = families.IGNORED
    written: Mapping[tuple[str, int], str] = field(default_factory=dict)
    adapters: tuple[Adapter, ...] = ()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of its tensors after loading."""
        return parameters(self.spec) if self.head is None else head_parameters(self.head)

    @property
    def size(self) -> int:
        """Bytes of the stored tensors that loading reads."""
        return sum(piece.entry.size for piece in self.pieces)

    @property
    def quantised_as(self) -> tuple[str, ...]:
        """How its quantised matrices are stored, as "4 bits (GPTQ)"; empty if none is."""
        bases = [_base(piece.entry) for piece in self.pieces]
        layouts = [one.layout for one in bases if isinstance(one, Compound)]
        return tuple(dict.fromkeys(f"{one.bits} bits ({one.name})" for one in layouts))

    @property
    def is_changed(self) -> bool:
        """Whether tensors are dequantised or adapted while they are read."""
        return bool(self.adapters) or any(not isinstance(one.entry, Entry) for one in self.pieces)

    @property
    def by_row(self) -> str | None:
        """The layout of bass_kernels.Quantised in which all linear maps of its layers are stored;
        None if there is none."""
        if isinstance(self.spec, AnySpec):
            return None
        maps = [one for one in self.pieces if Layouts("").of(one.slot.name) is not None]
        kinds = {one.entry.by_row if isinstance(one.entry, Compound) else None for one in maps}
        return kinds.pop() if len(kinds) == 1 else None

    def fingerprint(self, mask: int | None = None) -> str:
        """Return a digest of the spec, the layout of the files and a sample of each tensor. It
        does not depend on their path.

        Args:
            mask: the mask token, if the model drafts by one; it changes the digest.
        """
        plain = replace(self.spec, biases=frozenset())  # the order of a set is not fixed
        digest = hashlib.sha256(repr((plain, sorted(self.spec.biases), self.eos_ids)).encode())
        if mask is not None:
            digest.update(f"mask {mask}".encode())
        if self.head is not None:
            digest.update(repr(replace(self.head, body=plain)).encode())
        by_file: dict[Path, list[tuple[Entry, Slot]]] = {}
        for piece in self.pieces:
            if not isinstance(piece.entry, Entry):
                digest.update(repr(piece.entry.identity).encode())
            for entry in entries_of(piece.entry):
                by_file.setdefault(entry.file, []).append((entry, piece.slot))
        for path, pieces in sorted(by_file.items()):
            with path.open("rb") as file:
                digest.update(f"{path.name} {file.seek(0, 2)}".encode())
                for entry, slot in sorted(pieces, key=lambda piece: piece[0].start):
                    size = min(entry.size, _SAMPLE)
                    file.seek(entry.start + (entry.size - size) // 2)
                    digest.update(f"{slot.name} {slot.first} {entry.dtype}".encode())
                    digest.update(file.read(size))
        if self.written:
            digest.update(repr(sorted(self.written.items())).encode())
        return digest.hexdigest()[:32]

    def slot_of(self, name: str) -> Slot | None:
        """Return the slot of a published tensor name; None for a name that loading ignores.

        Raises:
            UserError: the family has no such tensor.
        """
        bare = bare_name(name, self.prefixes)
        if (found := self.names.get(bare)) is not None:
            return found
        if any(re.search(pattern, bare) for pattern in self.ignored):
            return None
        near = near_word(bare, self.names) or next(iter(self.names))
        raise UserError(
            f"tensor {shown(name)} is unknown for the family {self.spec.family}; a known name is "
            f'"{near}"'
        )

    def stored_shape(self, slot: Slot) -> tuple[int, ...]:
        """Return the shape in a checkpoint of the tensor with this slot."""
        return _stored_shape(slot, self.shapes[slot.name])

    def check_replaces(self, old: Checkpoint) -> None:
        """Check that these weights may replace those of `old` in a loaded model.

        Raises:
            UserError: the models differ; names how.
        """
        pairs = [(self.spec, old.spec)]
        if self.head is not None and old.head is not None:
            plain = replace(old.head, body=self.head.body)
            pairs.append((self.head, plain))  # type: ignore[arg-type]
        differing = [
            f"{one.name} {shown(getattr(new, one.name))}, not {shown(getattr(known, one.name))}"
            for new, known in pairs
            for one in fields(new)
            if getattr(new, one.name) != getattr(known, one.name)
        ]
        if (self.head is None) != (old.head is None):
            differing.append("another kind of drafter")
        if differing:
            raise UserError(
                f"{self.path}: these weights cannot replace those of {old.path}, because the "
                "models differ:",
                *differing,
            )

    def mask(self) -> int | None:
        """Return the id of its mask token; None for a drafter that drafts token by token.

        Raises:
            UserError: it has no mask token, so it cannot draft in one pass.
        """
        if self.head is not None:
            return self.head.mask
        vocab = self.spec.vocab
        if not self.path.is_dir():
            return mask_of(self.metadata, vocab=vocab, place=str(self.path), keys=_GGUF_MASKS)
        config = self.path / "config.json"
        return mask_of(read_json(config), vocab=vocab, place=str(config))


def open_checkpoint(
    path: Path, adapters: tuple[Adapter, ...] = (), *, decoder: str = "auto"
) -> Checkpoint:
    """Read and check the headers of a folder (config.json and weights) or a .gguf file.

    Args:
        adapters: LoRA adapters that are merged into the weights while they are read.
        decoder: whose layers run it: "native", "transformers", or "auto" for native ones where the
            architecture has them.

    Raises:
        UserError: names the fault.
    """
    if path.is_dir():
        config, place = read_json(path / "config.json"), str(path / "config.json")
        open_ = _open_any if _is_any(config, decoder, place) else _open_folder
        return _with_note_on_adapter(open_(path, config, adapters))
    if not path.exists():
        raise UserError(f"{path}: there is no such file or folder")
    if decoder == "transformers":
        raise UserError(
            f"{path}: `pair.decoder` transformers: a .gguf file has a native decoder only; use a "
            "folder with config.json and safetensors"
        )
    if path.suffix != ".gguf":
        with contextlib.suppress(OSError), open_regular(path) as file:
            if file.read(4) == b"GGUF":  # as a cache or another program names it
                raise UserError(f"{path}: give this GGUF file a name or a link that ends in .gguf")
        raise UserError(f"{path}: a model is a folder with config.json, or a .gguf file")
    if adapters:
        raise UserError(
            f"{path}: LoRA adapters cannot be merged into a GGUF file; name the folder of the "
            "original checkpoint"
        )
    return _open_gguf(path)


def _with_note_on_adapter(opened: Checkpoint) -> Checkpoint:
    """Add a note if an adapter is beside the weights and not merged. transformers would merge it
    into its base, whose weights are elsewhere."""
    config = opened.path / "adapter_config.json"
    if not config.exists() or opened.path in [adapter.folder for adapter in opened.adapters]:
        return opened
    note = f"{config}: this adapter is not used; `lora` {opened.path} merges it"
    return replace(opened, notes=(*opened.notes, note))


def _open_gguf(path: Path) -> Checkpoint:
    metadata, entries, vocabulary = read_gguf(path)
    factors = None
    if (stored := entries.get(ROPE_FACTORS)) is not None:
        if stored.dtype != "F32" or len(stored.shape) != 1 or stored.shape[0] > _FACTORS:
            raise UserError(
                f'{path}: tensor "{ROPE_FACTORS}": one dimension of type F32 is needed, not '
                f"{list(stored.shape)} of type {stored.dtype}"
            )
        factors = tuple(content(stored).tolist())
    shapes = {name: entry.shape for name, entry in entries.items()}
    spec = spec_of_gguf(metadata, shapes, place=str(path), rope_factors=factors)
    kind = fitted(architecture_of(metadata, shapes, place=str(path)), shapes)
    entries = split_entries(entries, 0 if spec.experts is None else spec.experts.total)
    slots, ignored = families.slots(spec, kind.tensors), ignored_in(metadata, spec.layers)
    pieces = assign(spec, slots, entries, path, ignored, parameters(spec))
    ends = (_ids(metadata, f"tokenizer.ggml.{role}_token_id", path) for role in END_ROLES)
    return Checkpoint(
        path,
        spec,
        pieces,
        eos_ids=tuple(dict.fromkeys(itertools.chain(*ends))),
        metadata=metadata,
        vocabulary=vocabulary,
        notes=gguf_config.notes_of_gguf(metadata, place=str(path)),
        names=families.slots(spec, FAMILIES[spec.family].tensors),
        prefixes=(FAMILIES[spec.family].prefix,),
    )


def _is_any(config: Mapping[str, Any], decoder: str, place: str) -> bool:
    """Return whether transformers' layers run the model of a config.json. An unknown architecture
    gets the error of native decoders."""
    if decoder != "auto":
        return decoder == "transformers"
    if is_native(config, place=place):
        return False
    kinds = config.get("model_type"), text_config(config, place=place)[0].get("model_type")
    return bool(config.get("auto_map")) or all(map(any_probe.is_known, kinds))


def _open_any(path: Path, config: Mapping[str, Any], adapters: tuple[Adapter, ...]) -> Checkpoint:
    """Open a folder whose model transformers' layers run. Its tensors keep their names."""
    spec = any_probe.spec_of_model(path, config)
    joined = read_joined(path, config)
    slots = {
        name: _plain_slot(_ROLES.get(name.split(".")[-2], name), one)
        for name, one in joined.entries.items()
        if "." in name
    }
    if adapters and (spec.tied or config.get("model_type") in _TRANSPOSED):
        why = "ties its head" if spec.tied else "stores its maps transposed"
        raise UserError(
            f"{path}: LoRA adapters cannot be merged into a model that runs through transformers' "
            f"own layers and {why}; merge them into a checkpoint first"
        )
    merged = merge(joined.entries, adapters, slots=slots, bare=lambda name: name, tied=spec.tied)
    pieces = tuple(Piece(one, _plain_slot(name, one)) for name, one in merged.entries.items())
    notes = [
        f"{spec.family} runs through transformers' own layers",
        any_probe.context_note(spec, config),
        *text_part.notes_of_text(config, place=str(path / "config.json")),
        *joined.notes,
        *merged.notes,
    ]
    return Checkpoint(
        path,
        spec,
        pieces,
        eos_ids=_eos_ids(path, config),
        notes=tuple(note for note in notes if note is not None),
        adapters=adapters,
    )


def _plain_slot(name: str, stored: Stored) -> Slot:
    return Slot(name, 0, stored.shape[0] if stored.shape else 1)


def _eos_ids(path: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the end-of-sequence ids that a folder's files name. Of a multimodal model, config.json
    may name them for the text part only."""
    generation, place = path / "generation_config.json", path / "config.json"
    eos = _ids(read_json(generation), "eos_token_id", generation) if generation.exists() else ()
    text = config.get("text_config")
    inner = _ids(text, "eos_token_id", place) if isinstance(text, Mapping) else ()
    return eos or _ids(config, "eos_token_id", place) or inner


def _open_folder(
    path: Path, config: Mapping[str, Any], adapters: tuple[Adapter, ...]
) -> Checkpoint:
    place = str(path / "config.json")
    spec = spec_of_config(config, place=place)
    family = FAMILIES[spec.family]
    prefixes: tuple[str, ...] = (family.prefix,)
    ignored: tuple[str, ...] = families.IGNORED
    if has_names_of_text_part(config):
        prefixes, ignored = text_part.PREFIXES, ignored + text_part.IGNORED
    slots = families.slots(spec, family.tensors)
    text = text_config(config, place=place)[0]
    joined = read_joined(
        path, text, has_slot=lambda name: bare_name(name, prefixes) in slots or is_stacked(name)
    )
    stored = joined.entries
    if spec.experts is not None:
        stored = unstack(
            stored, spec.experts.total, halves=not any(".gate_up_proj" in one for one in slots)
        )
    bare = without_prefix(stored, prefixes, path)
    slots = upright(slots, bare)
    merged = merge(
        bare, adapters, slots=slots, bare=lambda name: bare_name(name, prefixes), tied=spec.tied
    )
    entries = merged.entries
    if spec.tied and _differs(entries, family):
        spec = replace(spec, tied=False)
    pieces = assign(spec, slots, entries, path, ignored, parameters(spec))
    return Checkpoint(
        path,
        spec,
        pieces,
        eos_ids=_eos_ids(path, config),
        notes=(*notes_of_config(config, place=place), *joined.notes, *merged.notes),
        names=slots,
        prefixes=prefixes,
        ignored=ignored,
        adapters=adapters,
    )


def without_prefix(
    entries: Mapping[str, Stored], prefixes: tuple[str, ...], path: Path
) -> dict[str, Stored]:
    """Return the tensors by their names without a prefix."""
    found: dict[str, Stored] = {}
    for name, entry in entries.items():
        if (bare := bare_name(name, prefixes)) in found:
            raise UserError(f'{path}: two tensors are the same one, "{bare}" and "{name}"')
        found[bare] = entry
    return found


def _ids(values: Mapping[str, Any], key: str, place: Path) -> tuple[int, ...]:
    """Return the ids of a key that may be an integer, a list or missing; in order, each once."""
    value = values.get(key)
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(item) is int for item in listed):
        raise UserError(
            f'{place}: key "{key}": a token id or a list of them is needed, not {shown(value)}'
        )
    return tuple(dict.fromkeys(listed))


def _differs(entries: Mapping[str, Stored], family: Family) -> bool:
    """Return whether the files have a head with other content than the embedding. Then it is not
    tied, even if the config says so."""
    names = {ours: f"{theirs}.weight" for theirs, ours, _ in family.tensors}
    head, embed = entries.get(names["head"]), entries.get(names["embed"])
    if head is None or embed is None or head[0::3] == embed[0::3]:
        return False
    if not isinstance(head, Entry) or not isinstance(embed, Entry) or head[1:3] != embed[1:3]:
        return True
    if head.dtype not in DTYPES or not head.size:
        return True
    pairs = zip(parts(head), parts(embed), strict=True)
    return not all(torch.equal(a, b) for (_, a), (_, b) in pairs)


def assign(
    spec: Spec,
    slots: Mapping[str, Slot],
    entries: Mapping[str, Stored],
    path: Path,
    ignored: tuple[str, ...],
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[Piece, ...]:
    """Pair every stored tensor with its slot. Check shapes and types, and that none is missing or
    left over.

    Args:
        ignored: patterns of stored names without a slot.
        shapes: of the decoder's tensors.
    """
    wanted = {
        name: slot for name, slot in slots.items() if not (spec.tied and slot.name == "head.weight")
    }
    if missing := [name for name in wanted if name not in entries]:
        ends = tuple(f".{name}" for name in missing)
        extra = [name for name in entries if name not in slots and name.endswith(ends)]
        wrapped = [f'; there is "{name}"; save the model without its wrapper' for name in extra[:1]]
        raise UserError(f"{path}: {listed(missing)} missing{''.join(wrapped)}")
    known = {
        name: entry
        for name, entry in entries.items()
        if not any(re.search(p, name) for p in ignored)
    }
    if extra := [name for name in known if name not in slots]:
        raise UserError(f"{path}: {listed(extra)} unknown for the family {spec.family}")
    placed = {name: _turned(name, slot, entries[name]) for name, slot in wanted.items()}
    for name, slot in placed.items():
        entry, shape = entries[name], _stored_shape(slot, shapes[slot.name])
        if entry.shape != shape:
            raise UserError(
                f'{entry.file}: tensor "{name}" has shape {list(entry.shape)}, not {list(shape)}'
            )
        base = _base(entry)
        if isinstance(base, Entry) and base.dtype not in (*DTYPES, *QUANTISED):
            others = (
                "take another file of this model, or convert it: llama-quantize "
                "--allow-requantize IN.gguf OUT.gguf Q4_K_M"
                if entry.file.suffix == ".gguf"
                else "others need a quantization_config in config.json that describes them"
            )
            raise UserError(
                f'{entry.file}: tensor "{name}" has the unsupported type {base.dtype}; '
                f"known: {', '.join((*DTYPES, *QUANTISED))}; {others}"
            )
    return tuple(Piece(entries[name], slot) for name, slot in placed.items())


def _base(stored: Stored) -> Entry | Compound:
    """Return a stored tensor without the changes of adapters."""
    return stored.base if isinstance(stored, Adapted) else stored


def _turned(name: str, slot: Slot, stored: Stored) -> Slot:
    """Return the slot of a matrix that may be stored with inputs first."""
    base = _base(stored)
    if isinstance(base, Entry) or not base.layout.transposed or slot.how == "transpose":
        return slot
    if slot.how in ("gated", "delta", "delta_gates"):  # of models that are never split
        return slot._replace(turned=True)
    if slot.how:
        raise UserError(
            f'{base.file}: tensor "{name}" is stored as {base.layout.name}, which is not '
            "supported for this family"
        )
    return slot._replace(how="transpose")


def _stored_shape(slot: Slot, shape: tuple[int, ...]) -> tuple[int, ...]:
    rows, columns = slot.rows + 2 * (slot.how == "skip_two"), shape[1:]
    turned = slot.turned or slot.how in ("transpose", "pairs")
    return (*columns, rows) if turned else (rows, *columns)
