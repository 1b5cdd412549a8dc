"""Tensors of gpt-oss that hold all experts of a layer, as one entry for each expert.

Published files have the experts' matrices in MXFP4, [outputs, inputs] (quantised_config.py joins
their numbers and scales). Files of transformers have them in plain numbers, [inputs, outputs].
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from bass_cli.errors import UserError
from bass_cli.formats.compound import Adapted, Compound, Stored
from bass_cli.formats.tensor_files import Entry
from bass_cli.models.families import Slot
from bass_cli.reading import shown

_EXPERTS = re.compile(
    r"(?P<layer>.*layers\.\d+\.mlp\.experts)\.(?P<map>gate_up_proj|down_proj)(?P<kind>|_bias)"
)
_SINKS = re.compile(r".*layers\.\d+\.self_attn\.sinks")
# Transforms of matrices that are stored as [outputs, inputs]
_UPRIGHT = {"pairs": "alternate", "transpose": ""}


def is_stacked(name: str) -> bool:
    """Return whether this is the name of a tensor of all experts of a layer."""
    return _EXPERTS.fullmatch(name) is not None


def unstack(entries: Mapping[str, Stored], experts: int) -> dict[str, Stored]:
    """Return the entries with those of experts split, `experts.3.down_proj.weight` for the fourth
    part of `experts.down_proj`.

    Raises:
        UserError: a tensor does not have this number of experts.
    """
    found: dict[str, Stored] = {}
    for name, entry in entries.items():
        match = _EXPERTS.fullmatch(name)
        if match is None:
            found[f"{name}.weight" if _SINKS.fullmatch(name) else name] = entry
            continue
        assert not isinstance(entry, Adapted)
        total = entry.layout.stacked if isinstance(entry, Compound) else (*entry.shape, 0)[0]
        if total != experts:
            raise UserError(
                f'{entry.file}: tensor "{name}" has shape {shown(list(entry.shape))}; the first '
                f"size must be the number of experts, {experts}"
            )
        kind = match["kind"].removeprefix("_") or "weight"
        for expert in range(experts):
            found[f"{match['layer']}.{expert}.{match['map']}.{kind}"] = _part(
                entry, expert, experts
            )
    return found


def upright(slots: Mapping[str, Slot], entries: Mapping[str, Stored]) -> dict[str, Slot]:
    """Return the slots, changed for experts that are stored as [outputs, inputs]."""
    return {
        name: slot._replace(how=_UPRIGHT.get(slot.how, slot.how))
        if isinstance(entries.get(name), Compound)
        else slot
        for name, slot in slots.items()
    }


def _part(entry: Entry | Compound, expert: int, experts: int) -> Entry | Compound:
    """Return the part of one expert, of which the rows follow each other."""
    if isinstance(entry, Compound):
        parts = {role: _rows(one, expert, experts) for role, one in entry.tensors.items()}
        layout = entry.layout._replace(stacked=0)
        return Compound(layout, (entry.shape[0] // experts, entry.shape[1]), parts)
    part = _rows(entry, expert, experts)
    return part._replace(shape=entry.shape[1:])


def _rows(entry: Entry, expert: int, experts: int) -> Entry:
    size, rows = entry.size // experts, entry.shape[0] // experts
    return entry._replace(
        shape=(rows, *entry.shape[1:]), start=entry.start + expert * size, size=size
    )
