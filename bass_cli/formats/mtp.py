"""Open the multi-token-prediction layer of a target's own checkpoint, the tensors `mtp.*`, as a
drafter that reads its hidden states.

Not here: drafters in folders of their own (checkpoint.py), the computation (models/heads.py).
"""

from __future__ import annotations

from bass_cli.errors import UserError
from bass_cli.formats.checkpoint import Checkpoint, assign, without_prefix
from bass_cli.formats.config_values import Values
from bass_cli.formats.gguf_config import architecture_of
from bass_cli.formats.gguf_tensors import fitted, prediction_slots, split_entries
from bass_cli.formats.quantised_config import join, with_older_files
from bass_cli.formats.sources import read_json
from bass_cli.formats.stacked import is_stacked, unstack
from bass_cli.formats.tensor_files import read_gguf
from bass_cli.formats.text_part import bare_name, text_config
from bass_cli.formats.weight_files import read_folder
from bass_cli.models import families
from bass_cli.models.families import FAMILIES, Slot
from bass_cli.models.spec import AnySpec, HeadSpec, head_parameters, prediction_layer
from bass_cli.reading import shown

_PREFIX = "mtp."
_IGNORED = (r"^(?!mtp\.)",)  # the target's own tensors
# Its tensors besides those of its layer. Norms store their weight minus one, as the target's.
_TENSORS = {
    "mtp.fc.weight": ("fc.weight", ""),
    "mtp.pre_fc_norm_embedding.weight": ("token_norm.weight", "plus_one"),
    "mtp.pre_fc_norm_hidden.weight": ("context_norm.weight", "plus_one"),
}
_INSTEAD = "use another draft, such as lookup"
_FIELD = "`pair.draft` mtp"


class NoLayerError(UserError):
    """The target's checkpoint has no multi-token-prediction layer that could be read."""


def open_mtp(target: Checkpoint) -> Checkpoint:
    """Read and check the headers of the multi-token-prediction layer of an opened target.

    It has one layer like the target's layers with attention, and uses the target's embedding and
    head. Its input is the output of the target's final norm.

    Raises:
        NoLayerError: the checkpoint has no such layer, or files or a family for which it is not
            read.
        UserError: the layer is damaged or not supported.
    """
    path, spec = target.path, target.spec
    known = tuple(name for name, family in FAMILIES.items() if family.recurrent)
    if isinstance(spec, AnySpec) or spec.family not in known:
        raise NoLayerError(
            f"{path}: {_FIELD}: the layer is read for native models of the families "
            f"{', '.join(known)}, not for {spec.family}; {_INSTEAD}"
        )
    if not path.is_dir():
        return _open_in_file(target)
    place = path / "config.json"
    text, inner = text_config(read_json(place), place=str(place))
    head = prediction_layer(spec)
    shapes, slots = head_parameters(head), _slots(head)
    settings, source = with_older_files(text, path)
    joined = join(
        settings,
        read_folder(path),
        place=source,
        has_slot=lambda name: bare_name(name, target.prefixes) in slots or is_stacked(name),
    )
    entries = {
        name: entry
        for name, entry in without_prefix(joined.entries, target.prefixes, path).items()
        if name.startswith(_PREFIX)
    }
    if not entries:
        raise NoLayerError(
            f"{path}: {_FIELD}: the checkpoint has no multi-token-prediction layer (tensors "
            f'"{_PREFIX}*"); {_INSTEAD}'
        )
    _check_keys(Values(text, {}, inner))
    if spec.experts is not None:
        entries = unstack(entries, spec.experts.total, halves=True)
    return Checkpoint(
        path,
        head.body,
        (),
        {},
        assign(head.body, slots, entries, path, (), shapes),
        head=head,
        notes=joined.notes,
        names=slots,
        prefixes=target.prefixes,
        ignored=_IGNORED,
    )


def _open_in_file(target: Checkpoint) -> Checkpoint:
    """Open the layer in a GGUF file, which is its last one."""
    path, head, layer = target.path, prediction_layer(target.spec), target.spec.layers
    metadata, entries, _ = read_gguf(path)
    key = f"{metadata['general.architecture']}.nextn_predict_layers"
    if not metadata.get(key):
        raise NoLayerError(
            f'{path}: {_FIELD}: the file has no multi-token-prediction layer (key "{key}"); '
            f"{_INSTEAD}"
        )
    if metadata[key] != 1:
        raise UserError(
            f'{path}: key "{key}": {_FIELD} supports 1 only, not {shown(metadata[key])}; {_INSTEAD}'
        )
    kind = fitted(architecture_of(metadata, entries, place=str(path)), entries)
    experts = 0 if target.spec.experts is None else target.spec.experts.total
    own = {
        name: entry
        for name, entry in split_entries(entries, experts).items()
        if name.startswith(f"blk.{layer}.")
    }
    slots = prediction_slots(kind, head, layer)
    pieces = assign(head.body, slots, own, path, (), head_parameters(head))
    names = _slots(head)
    return Checkpoint(
        path, head.body, (), {}, pieces, head=head, names=names, prefixes=target.prefixes,
        ignored=_IGNORED,
    )  # fmt: skip


def _check_keys(values: Values) -> None:
    """Check the keys of config.json that describe the layer."""
    for key, supported in (
        ("mtp_num_hidden_layers", (None, 0, 1)),
        ("mtp_use_dedicated_embeddings", (None, False)),
    ):
        if (found := values.values.get(key)) not in supported:
            raise UserError(
                f'{values.place}: key "{key}": {_FIELD} supports {supported[-1]} only, not '
                f"{shown(found)}; {_INSTEAD}"
            )


def _slots(head: HeadSpec) -> dict[str, Slot]:
    """Return the published names of its tensors, without the checkpoint's prefix."""
    shapes = head_parameters(head)
    layers = families.slots(head.body, FAMILIES[head.body.family].tensors)
    found = {f"{_PREFIX}{name}": slot for name, slot in layers.items() if slot.name in shapes}
    return found | {
        theirs: Slot(ours, 0, shapes[ours][0], how) for theirs, (ours, how) in _TENSORS.items()
    }
