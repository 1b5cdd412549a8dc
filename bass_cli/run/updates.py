"""Give loaded models new weights in place, without loading them again.

Tensors have the names of the model's published checkpoints. Their memory does not move, so captured
graphs stay valid. Keys and values that were computed before are those of the old weights, so no
prompt may be open. Not here: the place of a tensor in the decoder (formats/weights.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bass_cli.errors import UserError
from bass_cli.formats import weights as formats
from bass_cli.formats.arrangement import is_stacked, split_tensor
from bass_cli.formats.checkpoint import Checkpoint, open_checkpoint
from bass_cli.formats.compound import parts
from bass_cli.formats.draft_heads import NoLayerError, open_head, open_mtp
from bass_cli.models.any_model import AnyModel
from bass_cli.models.capture import synchronise
from bass_cli.models.decoder import Decoder
from bass_cli.models.families import Slot
from bass_cli.models.heads import whole_head
from bass_cli.models.weights import Weights
from bass_cli.reading import shown
from bass_cli.run.build import Models
from bass_cli.run.pair import Files
from bass_kernels import Quantised

# Rows are converted, checked and sent some at a time: the most elements, by the kind of device.
_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 22}
_MIX = -7046029254386353131  # 2^64 over the golden ratio, odd
Updated = Literal["target", "draft"]
NewWeights = str | os.PathLike[str] | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


class Updates:
    """The weights of loaded models, and the checkpoints that identify them.

    Attributes:
        models: The models.
        files: The pair's files. An update changes the fingerprint of the model's checkpoint: to
            that of the new folder, or to one over the tensors that were written.
    """

    def __init__(self, models: Models, files: Files):
        self.files, self.models = files, models

    def update(self, weights: NewWeights, model: Updated = "target") -> None:
        """Write new weights into the target or the draft. A draft of the target's own checkpoint
        (mtp) is written with the target, where the new weights have it.

        Args:
            weights: A folder or a .gguf file with the same model. All of its headers are checked
                before anything is written. Or tensors by their published names, all or some of
                them, of any float dtype on any device. Each is checked before it is written. The
                experts of a layer may be one tensor, as in a module of transformers.

        Raises:
            UserError: There is no such model, or a name, shape, type or number is wrong.
        """
        decoder = self._decoder(model)
        if decoder.weights.fixed:
            raise UserError(
                f"the {model} has the numbers of its file (`dtype` file), which cannot be "
                "replaced; make the engine with `dtype` fp32"
            )
        if isinstance(decoder, AnyModel):
            raise UserError(
                f"weights: {decoder.spec.family} runs through transformers' own layers, whose "
                "weights cannot be replaced; make a new engine"
            )
        synchronise(decoder.device)  # tensors may come from another stream
        try:
            if isinstance(weights, (str, os.PathLike)):
                for one, new in self._opened(Path(weights).expanduser(), model).items():
                    self._write_files(new, one, self._decoder(one))
            else:
                self._write_tensors(weights, model, decoder)
        finally:
            synchronise(decoder.device)

    def _write_tensors(
        self,
        weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        model: Updated,
        decoder: Decoder,
    ) -> None:
        if not isinstance(weights, Iterable):
            raise UserError(
                f"weights: a folder or named tensors are needed, not {shown(weights)}; of a module "
                "take state_dict()"
            )
        written: dict[tuple[str, str, int], str] = {}
        try:
            for pair in weights.items() if isinstance(weights, Mapping) else weights:
                for one in self._by_expert(pair, model):
                    self._write_tensor(one, model, decoder, written)
        except UserError as error:
            before = [f"tensors written before it: {len(written)}"] if written else []
            raise UserError(*error.args, *before) from None
        if not written:
            raise UserError("weights: there are no tensors; an iterator can be used only once")

    def _decoder(self, model: Updated) -> Decoder:
        models = self.models
        if model == "target":
            return models.target
        if model != "draft":
            raise UserError(f'model: "target" or "draft" is needed, not {shown(model)}')
        if self.files.draft is None or models.drafter is None:
            raise UserError(
                'model="draft": no model drafts that has weights of its own; layers of the target '
                "follow the target"
            )
        return models.drafter

    def _checkpoint(self, model: Updated) -> Checkpoint:
        found = self.files.target if model == "target" else self.files.draft
        assert found is not None
        return found

    def _keep(self, model: Updated, checkpoint: Checkpoint) -> None:
        if model == "target":
            self.files = self.files._replace(target=checkpoint)
        else:
            self.files = self.files._replace(draft=checkpoint)

    @property
    def _has_layer(self) -> bool:
        """Whether the draft is the layer of the target's checkpoint (mtp)."""
        draft = self.files.draft
        return draft is not None and draft.head is not None and draft.head.joins

    def _opened(self, path: Path, model: Updated) -> dict[Updated, Checkpoint]:
        """Open a folder or file with new weights. Return the checkpoint of each model that it
        replaces, after all headers were checked."""
        old = self._checkpoint(model)
        if old.head is None:
            new = open_checkpoint(path)
        elif old.head.joins:
            new = open_mtp(open_checkpoint(path))
        else:
            new = open_head(path, self.files.target.spec)
        found = {model: new}
        if model == "target" and self._has_layer:
            with contextlib.suppress(NoLayerError):
                found["draft"] = open_mtp(new)
        for one, checkpoint in found.items():
            checkpoint.check_replaces(self._checkpoint(one))
        return found

    def _write_files(self, new: Checkpoint, model: Updated, decoder: Decoder) -> None:
        """Write all tensors of a checkpoint. The ids that end a sample stay those of the old
        one."""
        old, followers = self._checkpoint(model), self.models.followers
        self._keep(model, replace(old, written={("", 0): uuid.uuid4().hex}))  # until all is written
        if model == "target" and followers is not None:
            followers.update(decoder, new)
        else:
            formats.update(decoder.weights, new, device=decoder.device)
        for entry, slot in new.pieces:
            for weights, lent in self._lent(model, slot):
                formats.write(weights, lent, entry.shape, parts(entry), spec=new.spec)
        self._renew_copy(model, {slot.name for _, slot in new.pieces})
        self._keep(model, replace(new, eos_ids=old.eos_ids))

    def _write_tensor(
        self, pair: Any, model: Updated, decoder: Decoder, written: dict[tuple[str, str, int], str]
    ) -> None:
        """Check a pair of a name and a tensor and write it, unless loading ignores the name.

        `written`: checksums of this update, by model, decoder tensor and first row. It is changed.
        """
        checkpoint, followers = self._checkpoint(model), self.models.followers
        name, tensor = _named(pair)
        if (slot := checkpoint.slot_of(name)) is None:
            if model == "target" and self._has_layer:  # which may be a tensor of the layer
                self._write_tensor(pair, "draft", self._decoder("draft"), written)
            return
        spec, shape = checkpoint.spec, checkpoint.stored_shape(slot)
        _check_kind(name, tensor, shape)
        rows = _Rows(tensor.detach(), decoder.weights.dtype_written(slot.name), decoder.device)
        checksum = rows.checksum()
        if checksum is None:
            raise UserError(f"tensor {shown(name)} has numbers that are not finite in {rows.dtype}")
        tied = spec.tied and slot.name == "head.weight"
        key = ("embed.weight" if tied else slot.name, slot.first)
        if written.setdefault((model, *key), checksum) != checksum:
            raise UserError(
                f"tensor {shown(name)}: a tensor before it has other numbers for the same weights; "
                "the head may be tied to the embedding"
            )
        unfinished = {key: uuid.uuid4().hex}
        self._keep(model, replace(checkpoint, written={**checkpoint.written, **unfinished}))
        if model == "target" and followers is not None:
            followers.write(decoder, slot, shape, rows.runs, rows.parts(), spec=spec)
        else:
            formats.write(decoder.weights, slot, shape, rows.parts(), spec=spec)
        for weights, lent in self._lent(model, slot):
            formats.write(weights, lent, shape, rows.parts(), spec=spec)
        self._renew_copy(model, {slot.name})
        self._keep(model, replace(checkpoint, written={**checkpoint.written, key: checksum}))

    def _by_expert(self, pair: Any, model: Updated) -> Iterator[tuple[str, Tensor]]:
        """Yield a pair of a name and a tensor, or those of each expert if it is a tensor of all
        experts of a layer, as a module of transformers has it."""
        checkpoint, (name, tensor) = self._checkpoint(model), _named(pair)
        experts = checkpoint.spec.experts
        if experts is None or not is_stacked(name) or not isinstance(tensor, Tensor):
            yield name, tensor
            return
        halves = not any(".gate_up_proj." in one for one in checkpoint.names)
        for own, part in split_tensor(name, tensor, experts.total, halves=halves):
            slot = checkpoint.slot_of(own)
            shape = part.shape if slot is None else checkpoint.stored_shape(slot)
            yield own, part.T if part.shape != shape and part.shape[::-1] == shape else part

    def _lent(self, model: Updated, slot: Slot) -> Iterator[tuple[Weights, Slot]]:
        """Yield copies of a split target's embedding and head that are to be written too.

        Its draft head has a whole copy of what it has not of its own (load_draft).
        """
        head = self.models.head
        if model != "target" or head is None or self.models.followers is None:
            return
        tied = self.files.target.spec.tied and slot.name in ("embed.weight", "head.weight")
        for name in ("embed.weight", "head.weight") if tied else (slot.name,):
            own = head.spec.embeds if name == "embed.weight" else head.spec.heads
            if name in ("embed.weight", "head.weight", "head.bias") and not own:
                yield head.body.weights, slot._replace(name=name)

    def _renew_copy(self, model: Updated, written: Set[str]) -> None:
        """Renew a draft head's quantised copy of the head of a whole target (make_head), if
        tensors of these names of the target were written."""
        head, read = self.models.head, {"head.weight"}
        if model != "target" or head is None or self.models.followers is not None:
            return
        if self.files.target.spec.tied:
            read.add("embed.weight")
        copied = head.body.weights.get("head.weight")
        if isinstance(copied, Quantised) and not head.spec.heads and written & read:
            copied.write_from(whole_head(self.models.target))


class _Rows:
    """A given tensor as rows in the dtype and on the device of a model, some at a time.

    Attributes:
        runs: Which rows come together.
    """

    def __init__(self, tensor: Tensor, dtype: torch.dtype, device: torch.device):
        self._tensor, self.dtype, self._device = tensor, dtype, device
        step = max(_ELEMENTS[device.type] * len(tensor) // tensor.numel(), 1)
        every = range(len(tensor))
        self.runs = [every[first : first + step] for first in every[::step]]

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the number of rows before these, and these rows, contiguous."""
        for rows in self.runs:
            part = self._tensor[rows.start : rows.stop]
            yield rows.start, part.to(self._device, self.dtype).contiguous()

    @torch.inference_mode()
    def checksum(self) -> str | None:
        """Return a checksum over the bits of all numbers and their order; None if a number is not
        finite. On a GPU it is computed there, so it is another one than on a CPU."""
        digest, totals, mixed = hashlib.sha256(), [], []
        for _, part in self.parts():
            totals.append(part.sum(dtype=torch.float64))  # finite if all numbers are
            if part.device.type == "cpu":
                digest.update(_bytes_of(part))
                continue
            bits = part.view(-1).view(torch.int16 if part.itemsize == 2 else torch.int32)
            places = torch.arange(len(bits), device=bits.device)
            mixed.append(torch.stack((bits.sum(), (places * _MIX).bitwise_or_(1).mul_(bits).sum())))
        if not torch.stack(totals).isfinite().all():
            return None
        if mixed:
            digest.update(_bytes_of(torch.stack(mixed).cpu()))
        return digest.hexdigest()[:32]


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _named(pair: Any) -> tuple[str, Tensor]:
    """Return the name and the tensor of an item that was given."""
    if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
        raise UserError(f"weights: pairs of a name and a tensor are needed, not {shown(pair)}")
    return pair


def _check_kind(name: str, tensor: Any, shape: tuple[int, ...]) -> None:
    """Raise a UserError unless this is a plain tensor of floats of this shape."""
    place = f"tensor {shown(name)}"
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise UserError(
            f"{place}: a torch.Tensor is needed, not {type(tensor).__name__}; of a distributed "
            "tensor take full_tensor()"
        )
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.is_floating_point():
        raise UserError(f"{place}: floats in a plain layout are needed, not {tensor.dtype}")
    if tensor.shape != shape:
        raise UserError(f"{place} has shape {list(tensor.shape)}, not {list(shape)}")
