"""The architectures of GGUF files and the names of their tensors, as data.

Each row has a name in the file, the decoder's name with ":" and a part if it is fused, and a
transform (families.Slot explains them). A tensor of all experts is split when the file is opened:
its part for expert 3 is `ffn_up_exps[3]`. Not here: metadata (gguf_config.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from bass_cli.formats.arrangement import parts_of_experts
from bass_cli.formats.tensor_files import Entry
from bass_cli.models import families
from bass_cli.models.families import FAMILIES, Slot
from bass_cli.models.spec import HeadSpec, head_parameters

Rows = tuple[tuple[str, str, str], ...]

_BLOCK = "blk.{}."
_LAYER = "layers.{}."


def _in_layers(*rows: tuple[str, str, str] | tuple[str, str]) -> Rows:
    """Return rows of tensors in layers, given without the layer and perhaps without transform."""
    return tuple((_BLOCK + row[0], _LAYER + row[1], *(*row[2:], "")[:1]) for row in rows)


_HEADS = (("token_embd", "embed", ""), ("output_norm", "norm", ""), ("output", "head", ""))
_ATTENTION = _in_layers(
    ("attn_q", "qkv:q"),
    ("attn_k", "qkv:k"),
    ("attn_v", "qkv:v"),
    ("attn_output", "o"),
    ("attn_norm", "norm1"),
)
_FEED_FORWARD = _in_layers(("ffn_gate", "up:gate"), ("ffn_up", "up:up"), ("ffn_down", "down"))
_SECOND_NORM = _in_layers(("ffn_norm", "norm2"))
_TENSORS = (*_HEADS, *_ATTENTION, *_FEED_FORWARD, *_SECOND_NORM)
_QK_NORMS = _in_layers(("attn_q_norm", "q_norm"), ("attn_k_norm", "k_norm"))
_NORMS_AFTER = _in_layers(("post_attention_norm", "post1"), ("post_ffw_norm", "post2"))
_EXPERTS = _in_layers(
    ("ffn_gate_inp", "router"),
    ("ffn_gate_exps[{}]", "experts_up:gate"),
    ("ffn_up_exps[{}]", "experts_up:up"),
    ("ffn_down_exps[{}]", "experts_down"),
)
_SHARED_EXPERT = _in_layers(
    ("ffn_gate_inp_shexp", "shared_gate"),
    ("ffn_gate_shexp", "shared_up:shared_gate"),
    ("ffn_up_shexp", "shared_up:shared_up"),
    ("ffn_down_shexp", "shared_down"),
)
_MIXTURE = (*_HEADS, *_ATTENTION, *_SECOND_NORM, *_EXPERTS)
_GPT2 = (
    *(row for row in _TENSORS if ":" not in row[1]),
    ("position_embd", "positions", ""),
    *_in_layers(("attn_qkv", "qkv"), ("ffn_up", "up")),
)
# Files of hybrids have 1 added to norms, and -exp(A_log) in place of A_log.
_GATED_ATTENTION = (
    *_HEADS,
    *((theirs, ours, "gated" if ours.endswith(":q") else how) for theirs, ours, how in _ATTENTION),
    *_QK_NORMS,
    *_in_layers(("post_attention_norm", "norm2")),
)
_DELTA = _in_layers(
    ("attn_qkv", "delta_in:mixed"),
    ("attn_gate", "delta_in:z"),
    ("ssm_conv1d", "conv"),
    ("ssm_a", "decay", "decay"),
    ("ssm_dt.bias", "step_bias"),
    ("ssm_norm", "delta_norm"),
    ("ssm_out", "delta_out"),
)
_TILED = {
    "layers.{}.decay": "tiled_decay",
    "layers.{}.delta_norm": "",
    "layers.{}.delta_out": "tiled_columns",
}
# Qwen3.5: value head j of key head i is head j * key heads + i in the file.
_TILED_DELTA = tuple(
    (theirs, ours, _TILED.get(ours, "tiled"))
    for theirs, ours, _ in (
        *_DELTA,
        *_in_layers(("ssm_beta", "delta_gates:beta"), ("ssm_alpha", "delta_gates:decay")),
    )
)
# Names that other versions of the converter use: rows in place of those of these tensors
_OTHERWISE = {
    "ffn_gate_up_exps": (
        _in_layers(("ffn_gate_up_exps[{}]", "experts_up")),
        ("ffn_gate_exps[{}]", "ffn_up_exps[{}]"),
    ),
    "attn_qkv": (_in_layers(("attn_qkv", "qkv")), ("attn_q", "attn_k", "attn_v")),
    "ssm_in": (_in_layers(("ssm_in", "delta_in", "delta")), ("attn_qkv", "attn_gate")),
}


# Of a layer that predicts further tokens, besides those of its attention and feed-forward
_PREDICTION = {
    "nextn.eh_proj": "fc",
    "nextn.enorm": "token_norm",
    "nextn.hnorm": "context_norm",
    "nextn.shared_head_norm": "norm",
}


class Architecture(NamedTuple):
    """A value of general.architecture.

    family: whose other properties are in FAMILIES.
    tensors: its rows.
    inner: the key, after the architecture's name, of the size of the feed-forward or an expert.
    pattern: every so many layers one has no window. 0: llama.cpp reads no windows.
    constants: values by the words of config.json that metadata has no key for.
    """

    family: str
    tensors: Rows
    inner: str = "feed_forward_length"
    pattern: int = 0
    constants: Mapping[str, Any] = {}


def _deinterleaved(rows: Rows) -> Rows:
    """Return the rows with q and k of interleaved rotary dimensions."""
    return tuple(
        (theirs, ours, "deinterleave" if theirs.endswith(("attn_q", "attn_k")) else how)
        for theirs, ours, how in rows
    )


_OF_EXPERT = "expert_feed_forward_length"
_NORMALISED = {"norm_topk_prob": True}  # llama.cpp always does so for these architectures
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", _deinterleaved(_TENSORS)),
    "qwen2": Architecture("qwen2", _TENSORS),
    "qwen3": Architecture("qwen3", (*_TENSORS, *_QK_NORMS)),
    "gemma3": Architecture("gemma3_text", (*_TENSORS, *_QK_NORMS, *_NORMS_AFTER), pattern=6),
    "starcoder2": Architecture(
        "starcoder2", tuple(row for row in _TENSORS if row[1] != _LAYER + "up:gate")
    ),
    "gpt2": Architecture("gpt2", _GPT2),
    # of Phi-3 those without factors for long texts, such as Phi-4
    "phi3": Architecture(
        "phi3",
        (
            *(row for row in (*_HEADS, *_ATTENTION, *_SECOND_NORM) if ":" not in row[1]),
            *_in_layers(("attn_qkv", "qkv"), ("ffn_up", "up"), ("ffn_down", "down")),
        ),
    ),
    "smollm3": Architecture(
        "smollm3", _deinterleaved(_TENSORS), constants={"no_rope_layer_interval": 4}
    ),
    "seed_oss": Architecture(
        "seed_oss",
        (*_HEADS, *_ATTENTION, *_FEED_FORWARD, *_in_layers(("post_attention_norm", "norm2"))),
    ),
    "granite": Architecture("granite", _deinterleaved(_TENSORS)),
    "ernie4_5": Architecture("ernie4_5", _deinterleaved(_TENSORS)),
    "glm4": Architecture(
        "glm4",
        (
            *_deinterleaved((*_HEADS, *_ATTENTION, *_SECOND_NORM)),
            *_in_layers(("ffn_up", "up"), ("ffn_down", "down")),
            *_NORMS_AFTER,
        ),
    ),
    "qwen3moe": Architecture(
        "qwen3_moe", (*_MIXTURE, *_QK_NORMS), _OF_EXPERT, constants=_NORMALISED
    ),
    "olmoe": Architecture("olmoe", (*_MIXTURE, *_QK_NORMS), constants={"norm_topk_prob": False}),
    "gpt-oss": Architecture(
        "gpt_oss",
        (
            *_HEADS,
            *_ATTENTION,
            *_in_layers(("post_attention_norm", "norm2"), ("attn_sinks.weight", "sinks")),
            *_EXPERTS,
        ),
        _OF_EXPERT,
        pattern=2,
        constants={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},  # of both published models
    ),
    "qwen35": Architecture("qwen3_5_text", (*_GATED_ATTENTION, *_TILED_DELTA, *_FEED_FORWARD)),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        (*_GATED_ATTENTION, *_TILED_DELTA, *_EXPERTS, *_SHARED_EXPERT),
        _OF_EXPERT,
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        (
            *_GATED_ATTENTION,
            *_DELTA,
            *_in_layers(("ssm_ba", "delta_gates", "delta_gates")),
            *_EXPERTS,
            *_SHARED_EXPERT,
        ),
        _OF_EXPERT,
        constants=_NORMALISED,
    ),
}
# "llama" with experts
MIXTRAL = Architecture("mixtral", _deinterleaved(_MIXTURE))


def fitted(kind: Architecture, names: Collection[str]) -> Architecture:
    """Return an architecture with the rows that fit the names of a file's tensors."""
    rows = kind.tensors
    for other, (instead, replaced) in _OTHERWISE.items():
        if any(f".{other}." in name for name in names):
            left_out = tuple(_BLOCK + one for one in replaced)
            gone = [row for row in rows if row[0] in left_out]
            if gone and not any(how for _, _, how in gone):  # parts in the decoder's order
                rows = (*(row for row in rows if row not in gone), *instead)
    return kind._replace(tensors=rows)


def prediction_slots(kind: Architecture, head: HeadSpec, layer: int) -> dict[str, Slot]:
    """Map the names of a multi-token-prediction layer's tensors in a file to Slots.

    Args:
        layer: its number in the file.
    """
    shapes = head_parameters(head)
    found = {
        name.replace("blk.0.", f"blk.{layer}.", 1): slot
        for name, slot in families.slots(head.body, kind.tensors).items()
        if name.startswith("blk.") and slot.name in shapes
    }
    return found | {
        f"blk.{layer}.{theirs}.weight": Slot(f"{ours}.weight", 0, shapes[f"{ours}.weight"][0])
        for theirs, ours in _PREDICTION.items()
    }


def name_in_file(theirs: str, layer: int) -> str:
    """Return a row's name in the file, without its suffix. Experts share a tensor."""
    return theirs.replace("[{}]", "").format(layer)


_STACKED = re.compile(r"(?P<name>blk\.\d+\.ffn_\w+_exps)\.(?P<kind>weight|bias)")


def split_entries(entries: Mapping[str, Entry], experts: int) -> dict[str, Entry]:
    """Return the entries in the shapes of `parameters`, those of experts split into one for each.

    Args:
        experts: their number, 0 for a model without.

    Raises:
        UserError: a tensor of experts does not have this number of them.
    """
    found: dict[str, Entry] = {}
    for name, entry in entries.items():
        match = _STACKED.fullmatch(name)
        if match is None or not experts:
            found[name] = entry._replace(shape=_shape(name, entry.shape))
            continue
        for expert, part in enumerate(parts_of_experts(name, entry, experts)):
            assert isinstance(part, Entry)
            found[f"{match['name']}[{expert}].{match['kind']}"] = part
    return found


def _shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in a decoder of a tensor that files may store without dimensions of 1."""
    if name.endswith("ssm_conv1d.weight") and len(shape) == 2:
        return (shape[0], 1, shape[1])
    if name.endswith("ffn_gate_inp_shexp.weight") and len(shape) == 1:
        return (1, *shape)
    return shape


def is_mixture(kind: Architecture) -> bool:
    """Return whether an architecture has experts."""
    return bool(FAMILIES[kind.family].mixture)
