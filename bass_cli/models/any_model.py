"""A decoder whose layers are those of transformers, for architectures without a native decoder.

Its attention is the same as that of native decoders: keys and values go to the ragged store, and a
query sees what its row and position allow. Before its first use, its logits are compared with
those of the model's own attention. Not here: what the model is made of (any_probe.py).
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bass_kernels as ops
from bass_cli.errors import MachineError, UserError
from bass_cli.models.any_probe import (
    ATTENTION,
    Opened,
    attend,
    base_of,
    layers_of,
    open_config,
    quiet,
)
from bass_cli.models.block_allocator import Change
from bass_cli.models.capture import Graphs
from bass_cli.models.decoder import Decoder
from bass_cli.models.hidden import AuxHiddenLayers
from bass_cli.models.kv_cache import Layers, Pass
from bass_cli.models.runner import Runner
from bass_cli.models.spec import AnySpec, AttentionCall, Format
from bass_cli.models.weights import Weights

# The check after loading: tokens of each prompt, and of the passes behind them.
_CHECKED, _WIDTHS = (9, 2, 14), (1, 3, 2)
# Maximum error of a place's logits, relative to their spread. In float32, of the worst place, it is
# 1e-5 or less. In 16 bits it is that of the median place: a router of experts may choose another
# one after rounding, so some places of a mixture differ more.
_BOUNDS = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.15}


class AnyModel(Decoder):
    """A model of transformers with the interface of a Decoder.

    Args:
        model: the language model, on one device, with our attention (`prepare`).
        vocab: see Decoder.
    """

    spec: AnySpec
    compiles_ahead = False  # its embedding is torch's

    def __init__(self, spec: AnySpec, model: Any, *, vocab: int | None = None):
        self.spec, self.ranks, self.reader = spec, None, None
        self.layers = tuple(range(spec.layers))
        self.vocab = self.columns = min(vocab or spec.vocab, spec.vocab)
        embed, head = model.get_input_embeddings().weight, model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        lent = {"embed.weight": embed.detach(), "head.weight": head.weight.detach()}
        self.weights = self._weights = Weights(lent)
        self._head = head.weight[: self.vocab], None if bias is None else bias[: self.vocab]
        self.device, self.dtype, self._rows = embed.device, embed.dtype, len(embed)
        self.model, self._base = model, base_of(model)
        self._logits = _with_module(model, model.base_model_prefix, _Given())
        self._calls = spec.calls
        for i, layer in enumerate(layers_of(self._base, model.config)):
            layer.register_forward_hook(functools.partial(_take, i), with_kwargs=True)

    @property
    def format(self) -> Format:
        """The number formats of its weights."""
        return Format(self.dtype)

    @property
    def cached(self) -> tuple[Layers, ...]:
        """The layers of its key/value store, its reader's last."""
        stored = [(call.kv_heads, call.size) for call in self._calls if call.writes]
        own = [Layers(len(list(same)), *shape) for shape, same in itertools.groupby(stored)]
        return (*own, *(() if self.reader is None else self.reader.cached))

    def keep_layers(self, layers: Sequence[int]) -> AnyModel:
        """Return a decoder with the same weights that runs these layers only (self-speculation).
        No layer that is left may read the keys of another one."""
        other = copy.copy(self)
        other.layers, stored = tuple(layers), itertools.count()
        other._calls = tuple(
            call._replace(store=next(stored)) for call in self._calls if call.layer in layers
        )
        assert all(call.writes for call in other._calls)
        name = next(
            name
            for name, module in self._base.named_children()
            if module is layers_of(self._base, self.model.config)
        )
        kept = nn.ModuleList(
            layer if i in other.layers else _skipped(layer, tuples=self.spec.tuples)
            for i, layer in enumerate(layers_of(self._base, self.model.config))
        )
        other._base = _with_module(self._base, name, kept)
        return other

    def final_norm(self, residual: Tensor) -> Tensor:
        raise NotImplementedError("the final norm of a model of transformers is a part of a pass")

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., vocab] from the final norm's output [..., width], with the scale and
        soft cap that the model's own code applies."""
        lines = hidden.reshape(1, -1, hidden.shape[-1])
        with torch.no_grad():
            found: Tensor = self._logits(lines, use_cache=False).logits
        found = found[0, :, : self.vocab].to(self.dtype).contiguous()
        return found.view(*hidden.shape[:-1], self.vocab)

    def _final_hidden(
        self, tokens: Tensor, step: Pass, last: int | None, aux_layers: AuxHiddenLayers | None
    ) -> Tensor | None:
        """The final norm's output [B, min(last, W), width], or None for last = 0."""
        state = _Attention(self._calls, step, aux_layers)
        # Drafts may lie beyond the context. A table of positions has no row for them, and some
        # rotary embeddings would change for all rows.
        positions = step.positions.clamp(0, self.spec.context - 1)
        with torch.no_grad():
            found = self._base(
                input_ids=tokens.clamp(max=self._rows - 1),
                position_ids=positions,
                use_cache=False,
                bass=state,
            )
        if last == 0:
            return None
        hidden: Tensor = found.last_hidden_state
        return hidden if last is None else hidden[:, -last:].contiguous()


class _Attention:
    """The attention of one pass. transformers' layers call it by any_probe.attend.

    Args:
        calls: what each call is, in the order of the pass.
    """

    def __init__(
        self, calls: Sequence[AttentionCall], step: Pass, aux_layers: AuxHiddenLayers | None
    ):
        self._calls, self._step, self.aux_layers = iter(calls), step, aux_layers

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: Any
    ) -> Tensor:
        """Write keys and values [B, K, W, D], and return the attention [B, W, H, D] of queries
        [B, H, W, D]. See any_probe.attend."""
        call, step = next(self._calls), self._step
        if call.writes:
            parts = (_widened(part, call.size).transpose(1, 2) for part in (key, value))
            ops.rope_write(
                torch.cat(tuple(parts), 2).flatten(2),
                None,
                step.slots(),
                step.own(call.store),
                heads=0,
                norms=None,
                eps=0.0,
            )
        scale = options.get("scaling")
        rows, heads, width, size = query.shape
        q = _widened(query, call.size).transpose(1, 2)
        found: Tensor = ops.attention(
            q.reshape(*step.segments.positions.shape, heads, call.size),
            step.own(call.store),
            step.prompt(call.store),
            step.segments,
            scale=size**-0.5 if scale is None else float(scale),
            window=call.window,
            cap=options.get("softcap") or 0.0,
            sinks=options.get("s_aux"),
        )
        return found.view(rows, width, heads, call.size)[..., : call.value_size].contiguous()


def _widened(x: Tensor, size: int) -> Tensor:
    """Pad the heads of x [..., D] to `size` with zeros."""
    return x if x.shape[-1] == size else nn.functional.pad(x, (0, size - x.shape[-1]))


def _take(i: int, module: nn.Module, given: Any, options: Any, result: Any) -> None:
    """Copy the output of layer i for a drafter that reads it."""
    state = options.get("bass")
    if isinstance(state, _Attention) and state.aux_layers is not None:
        state.aux_layers.take(i, result[0] if isinstance(result, tuple) else result)


class _Given(nn.Module):
    """Takes the place of the layers in a language model: its output is its input."""

    def forward(self, input_ids: Tensor | None = None, **_: Any) -> _Output:
        assert input_ids is not None
        return _Output(input_ids)


class _Output:
    """What the layers of any model return: the last hidden state, and None for all else."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, place: int) -> Tensor | None:
        return None if place else self.last_hidden_state


def _with_module(module: Any, name: str, other: nn.Module) -> Any:
    """Return a module with the same parameters and one other child."""
    found = copy.copy(module)
    found._modules = {**module._modules, name: other}
    return found


def _skipped(layer: nn.Module, *, tuples: bool) -> nn.Module:
    """Return a layer with the same attributes whose output is its input."""

    def forward(hidden: Tensor, *_: Any, **__: Any) -> Any:
        return (hidden,) if tuples else hidden

    found = copy.copy(layer)
    found.forward = forward
    return found


def _fuse_norms(model: Any) -> None:
    """Compute RMS norms in one launch each on a GPU, not in eight. A module is changed only if its
    own results are the same but for rounding; Gemma's weights are one less than the factor."""
    for module in model.modules():
        weight, name = getattr(module, "weight", None), type(module).__name__
        if not name.endswith("RMSNorm") or not isinstance(weight, Tensor) or weight.dim() != 1:
            continue
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if ops.kind_for(weight) != "triton" or not isinstance(eps, float):
            continue
        sample = torch.randn(3, len(weight), device=weight.device).to(weight.dtype)
        try:
            wanted = module(sample)
        except TypeError:  # it takes more than its input, such as a gate
            continue
        factors = weight.detach().float(), weight.detach().float() + 1
        forwards = [functools.partial(_norm, factor, eps) for factor in factors]
        errors = [float((one(sample) - wanted).float().norm()) for one in forwards]
        # theirs may round twice, the normed values and their product
        rounding = 4 * torch.finfo(weight.dtype).eps * float(wanted.float().norm())
        if min(errors) <= rounding:
            module.forward = forwards[errors.index(min(errors))]


def _norm(factor: Tensor, eps: float, x: Tensor) -> Tensor:
    normed: Tensor = ops.norm(None, x.contiguous(), factor, None, eps=eps, kind="rms")[0]
    return normed


def prepare(model: Any) -> Any:
    """Give a model of transformers our attention, and on a GPU our norms, and return it."""
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)
    model.set_attn_implementation(ATTENTION)
    for name in ("output_router_logits", "output_attentions", "output_hidden_states"):
        if getattr(model.config, name, False):
            setattr(model.config, name, False)
    model.eval().requires_grad_(False)
    _fuse_norms(model)
    return model


def load_any(
    path: Path,
    config: Mapping[str, Any],
    spec: AnySpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    vocab: int | None = None,
    state: Mapping[str, Tensor] | None = None,
) -> AnyModel:
    """Load a model by transformers' own code, and compare its logits with its own attention's.

    Args:
        config: the content of its config.json.
        state: its tensors by their stored names. Default: transformers reads the folder.

    Raises:
        UserError: tensors are missing, or the logits differ.
    """
    opened = open_config(path, config)
    with quiet():
        model = _read(path, opened, dtype, device, state)
        decoder = AnyModel(spec, prepare(model), vocab=vocab)
        check(decoder, place=str(path))
    return decoder


def _read(
    path: Path,
    opened: Opened,
    dtype: torch.dtype,
    device: torch.device,
    state: Mapping[str, Tensor] | None,
) -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(opened.config)]
        model, found = kind.from_pretrained(
            path if state is None else None,
            config=opened.config,
            state_dict=state,
            dtype=dtype,
            attn_implementation="eager",
            key_mapping=opened.names,
            local_files_only=True,
            output_loading_info=True,
            **_placed(device),
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the errors of many readers
        raise UserError(f"{path}: transformers cannot load it: {error}") from None
    missing = sorted({*found["missing_keys"], *(one[0] for one in found["mismatched_keys"])})
    if missing:
        raise UserError(
            f'{path}: tensor "{missing[0]}" is missing or has another shape'
            + (f", and {len(missing) - 1} more" if missing[1:] else "")
        )
    if unused := sorted(found["unexpected_keys"]):
        logging.getLogger("bass").warning(
            "%s: the model does not use %d of its tensors, such as %s", path, len(unused), unused[0]
        )
    return model.to(device)


def _placed(device: torch.device) -> dict[str, Any]:
    """Return the arguments by which weights are read to a GPU at once, if accelerate is there."""
    from transformers.utils import is_accelerate_available

    there = device.type == "cuda" and is_accelerate_available()
    return {"device_map": {"": device}} if there else {}


def check(decoder: AnyModel, *, place: str) -> None:
    """Compare the logits of ragged passes with those of the model's own attention over whole
    texts.

    Raises:
        UserError: they differ by more than rounding; it names the first layer that does.
    """
    generator = torch.Generator().manual_seed(0)
    count = sum(_WIDTHS)
    texts = [
        torch.randint(decoder.vocab, (size + count,), generator=generator).tolist()
        for size in _CHECKED
    ]
    if decoder.context < max(map(len, texts)):
        raise MachineError(f"{place}: a context of {decoder.context} tokens is too short")
    with torch.inference_mode():
        ours, layers = _ragged(decoder, texts)
        theirs, their_layers = _eager(decoder, texts)
    exact = decoder.dtype == torch.float32
    bound, worst = _BOUNDS[decoder.dtype], _error(ours, theirs, worst=exact)
    if worst <= bound:
        return
    first = next(
        (
            i
            for i, (one, other) in enumerate(zip(layers, their_layers, strict=True))
            if _error(one, other, worst=exact) > bound
        ),
        None,
    )
    where = "its head" if first is None else f"layer {first}"
    raise UserError(
        f"{place}: {decoder.spec.family} cannot run through transformers: its logits differ from "
        f"those of its own attention by {worst:.2g} of their spread (at most {bound:g} is "
        f"rounding), from {where} on; it may keep state outside of attention"
    )


def _error(ours: Tensor, theirs: Tensor, *, worst: bool) -> float:
    """Return the error relative to the spread [N, ...] of the median place, or of the worst one;
    inf if a number is not finite."""
    spread = (theirs - theirs.mean(-1, keepdim=True)).norm(dim=-1)
    errors = (ours - theirs).norm(dim=-1) / spread.clamp(min=1e-12)
    found = errors.max() if worst else errors.median()
    return float(found) if torch.isfinite(ours).all() else float("inf")


class _Outputs:
    """The outputs of a model's layers in the passes of a block, by layer, [places, width]."""

    def __init__(self, decoder: AnyModel):
        self._layers = layers_of(base_of(decoder.model), decoder.model.config)
        self.found: list[list[Tensor]] = [[] for _ in self._layers]

    def __enter__(self) -> _Outputs:
        self._hooks = [
            layer.register_forward_hook(functools.partial(self._keep, i))
            for i, layer in enumerate(self._layers)
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep(self, i: int, module: nn.Module, given: Any, result: Any) -> None:
        hidden = result[0] if isinstance(result, tuple) else result
        self.found[i].append(hidden.float().flatten(0, -2))


def _ragged(decoder: AnyModel, texts: list[list[int]]) -> tuple[Tensor, list[Tensor]]:
    """Return logits [N, V] of the places behind the prompts, row by row, and the layers' outputs
    there: prompts first, then passes of each of _WIDTHS."""
    count, device = sum(_WIDTHS), decoder.device
    runner = Runner(
        decoder, rows=len(texts), span=count, pending=1, graphs=Graphs(device, wanted=False)
    )
    for row, (text, size) in enumerate(zip(texts, _CHECKED, strict=True)):
        runner.open(str(row), text[:size])
        runner.follow(Change((), (), (((row,), str(row)),)))
    parts, layers = list[Tensor](), list[list[Tensor]]()
    starts = torch.tensor(_CHECKED, device=device) - 1
    for width in _WIDTHS:
        positions = starts[:, None] + torch.arange(width, device=device)
        ends = (positions[:, -1] + 1).tolist()
        fed = [text[end - width : end] for text, end in zip(texts, ends, strict=True)]
        tokens = torch.tensor(fed, device=device)
        with _Outputs(decoder) as outputs:
            parts.append(runner.forward(tokens, positions, ends).float())
        layers.append([one[0].unflatten(0, (len(texts), width)) for one in outputs.found])
        starts = starts + width
    whole = [torch.cat(of_layer, 1).flatten(0, 1) for of_layer in zip(*layers, strict=True)]
    return torch.cat(parts, 1).flatten(0, 1), whole


def _eager(decoder: AnyModel, texts: list[list[int]]) -> tuple[Tensor, list[Tensor]]:
    """Return what `_ragged` does, from the model's own attention over each text alone."""
    model, count = decoder.model, sum(_WIDTHS)
    parts = list[Tensor]()
    model.set_attn_implementation("eager")
    try:
        with _Outputs(decoder) as outputs:
            for text, size in zip(texts, _CHECKED, strict=True):
                places = slice(size - 1, size - 1 + count)
                tokens = torch.tensor([text], device=decoder.device)
                logits = model(input_ids=tokens, use_cache=False).logits
                parts.append(logits[0, places, : decoder.vocab].float())
    finally:
        model.set_attn_implementation(ATTENTION)
    layers = [
        torch.cat(
            [one[size - 1 : size - 1 + count] for one, size in zip(each, _CHECKED, strict=True)]
        )
        for each in outputs.found
    ]
    return torch.cat(parts), layers
