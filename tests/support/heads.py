"""Tiny random drafters that read hidden states, in the published layouts, and the definitions of
DFlash and DSpark by their papers in plain torch without a cache. No tests here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import embedding, linear, silu
from transformers import PreTrainedModel

MASK = 299  # a token of no tokenizer's
_LAYERS = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 56,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
}


def config_of(
    kind: str, *, width: int, vocab: int, aux_layers: tuple[int, ...], **keys: Any
) -> dict:
    """Return a config.json: "dflash" and "dspark" as their authors have it, "dflash-speculators"
    and "dspark-speculators" as speculators does. `keys` override it."""
    layers = _LAYERS | {"hidden_size": width, "vocab_size": vocab}
    name, _, other = kind.partition("-")
    block = {"dflash": 6, "dspark": 5}[name]
    if other:
        config = {
            "speculators_model_type": name,
            "architectures": [f"{name.title()}DraftModel"],
            "transformer_layer_config": layers,
            "aux_hidden_state_layer_ids": [tap + 1 for tap in aux_layers],
            "draft_vocab_size": vocab,
            "block_size": block,
            "mask_token_id": MASK,
        }
        return (
            config
            | ({"sample_from_anchor": True, "markov_rank": 6} if name == "dspark" else {})
            | keys
        )
    if name == "dflash":
        own = {"architectures": ["DFlashDraftModel"], "num_target_layers": 3, "block_size": block,
               "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(aux_layers)}}  # fmt: skip
    else:
        own = {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": list(aux_layers), "block_size": block,
               "mask_token_id": MASK, "markov_rank": 6, "markov_head_type": "vanilla",
               "enable_confidence_head": True, "confidence_head_with_markov": True}  # fmt: skip
    return layers | own | keys


def write_head(
    folder: Path,
    kind: str,
    *,
    width: int = 48,
    vocab: int = 301,
    aux_layers: tuple[int, ...] = (0, 1),
    stored: bool | None = None,
    seed: int = 0,
    **keys: Any,
) -> Reading:
    """Save a drafter and return it in the form that `Reading` reads. `stored`: with its own
    embedding and head (a DSpark has them)."""
    config = config_of(kind, width=width, vocab=vocab, aux_layers=aux_layers, **keys)
    layers = config.get("transformer_layer_config", config)
    inner, size = layers["intermediate_size"], layers["head_dim"]
    query, key = (layers[f"num_{one}_heads"] * size for one in ("attention", "key_value"))
    shapes = {
        "fc.weight": (width, len(aux_layers) * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    known = config.get("draft_vocab_size", vocab)
    if known < vocab:
        shapes["lm_head.weight"] = known, width
    elif kind.startswith("dspark") if stored is None else stored:
        shapes |= {"embed_tokens.weight": (vocab, width), "lm_head.weight": (vocab, width)}
    for i in range(layers["num_hidden_layers"]):
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in {
            "input_layernorm": (width,), "post_attention_layernorm": (width,),
            "self_attn.q_proj": (query, width), "self_attn.k_proj": (key, width), "self_attn.v_proj": (key, width),
            "self_attn.o_proj": (width, query), "self_attn.q_norm": (size,), "self_attn.k_norm": (size,),
            "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner),
        }.items()}  # fmt: skip
    if rank := config.get("markov_rank", 0):
        shapes |= {
            "markov_head.markov_w1.weight": (vocab, rank),
            "markov_head.markov_w2.weight": (known, rank),
        }
        shapes |= {
            "confidence_head.proj.weight": (1, width + rank),
            "confidence_head.proj.bias": (1,),
        }
    save(folder, config, shapes, vocab=vocab, seed=seed)
    return Reading(folder)


def save(
    folder: Path, config: dict, shapes: dict[str, tuple[int, ...]], *, vocab: int, seed: int
) -> None:
    """Save a config and random tensors of these shapes, with the ids of a shorter vocabulary."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        scale = 0.5 if "embed" in name or "w1" in name else shape[-1] ** -0.5
        tensors[name] = 1 + 0.3 * noise if name.endswith("norm.weight") else scale * noise
    known = config.get("draft_vocab_size") or vocab
    if known < vocab:
        tensors["d2t"] = torch.arange(known) + 1  # 1, 3, 5, ...
        tensors["t2d"] = torch.arange(vocab) % 2 == 1
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


class Drafter:
    """The drafter of a folder, read independently: sequences in full, no cache, nothing shared
    with the code under test."""

    def __init__(self, folder: Path):
        self.config = json.loads((folder / "config.json").read_text())
        self.layers = self.config.get("transformer_layer_config", self.config)
        self.tensors = load_file(folder / "model.safetensors")

    def bias(self, token: int) -> Tensor | float:
        """Return what a token adds to the logits [V] of the next place."""
        return 0.0

    def whole(self, line: Tensor) -> Tensor:
        """Return logits over the target's tokens from those over the drafter's own."""
        if "d2t" not in self.tensors:
            return line
        found = torch.full((self.layers["vocab_size"],), -torch.inf)
        found[torch.arange(len(line)) + self.tensors["d2t"]] = line
        return found

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.layers["rms_norm_eps"])
        return x * scale * self.tensors[f"{name}.weight"]

    def feed_forward(self, x: Tensor, at: str) -> Tensor:
        """Return x plus its gated feed-forward in the layer with this prefix."""
        normed = self.norm(x, at + "post_attention_layernorm")
        gate, up = (
            linear(normed, self.tensors[f"{at}mlp.{name}_proj.weight"]) for name in ("gate", "up")
        )
        return x + linear(silu(gate) * up, self.tensors[at + "mlp.down_proj.weight"])

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """Apply rotary embedding to x [N, heads, D], pairing the halves of a head."""
        size = x.shape[-1]
        speeds = self.layers["rope_theta"] ** (-torch.arange(0, size, 2).float() / size)
        turns = positions[:, None, None] * speeds
        one, other = x.chunk(2, -1)
        return torch.cat(
            (one * turns.cos() - other * turns.sin(), other * turns.cos() + one * turns.sin()), -1
        )


class Reading(Drafter):
    """A DFlash or a DSpark."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        aux = self.config.get("aux_hidden_state_layer_ids")
        ids = self.config.get("dflash_config", self.config).get("target_layer_ids")
        # transformers counts the embedding as the first hidden state
        self.states = aux if ids is None else [one + 1 for one in ids]
        self.dspark = "markov_rank" in self.config
        self.block = self.config["block_size"]

    def base(self, target: PreTrainedModel, tokens: list[int]) -> Tensor:
        """Return logits [drafts, V] of the block after `tokens`, whose last one is the anchor,
        before any bias from chosen tokens."""
        seen, anchor = tokens[:-1], tokens[-1]
        context = torch.zeros(0, self.layers["hidden_size"])
        if seen:
            states = target(torch.tensor([seen]), output_hidden_states=True).hidden_states
            taken = torch.cat([states[i][0] for i in self.states], -1)
            context = self.norm(taken @ self.tensors["fc.weight"].T, "hidden_norm")
        ids = torch.tensor([anchor] + [MASK] * (self.block - 1))
        own = self.tensors.get("embed_tokens.weight")
        x = target.get_input_embeddings()(ids) if own is None else embedding(ids, own)
        for i in range(self.layers["num_hidden_layers"]):
            x = self._layer(f"layers.{i}.", x, context)
        x = self.norm(x, "norm")
        own = self.tensors.get("lm_head.weight")
        logits = target.get_output_embeddings()(x) if own is None else linear(x, own)
        return logits if self.dspark else logits[1:]

    def drafts(self, target: PreTrainedModel, tokens: list[int], chosen: list[int]) -> Tensor:
        """Return logits [k, V] at the places of `chosen` [k], before any bias from it."""
        return self.base(target, tokens)[: len(chosen)]

    def bias(self, token: int) -> Tensor | float:
        """See Drafter."""
        if not self.dspark:
            return 0.0
        return (
            self.tensors["markov_head.markov_w2.weight"]
            @ self.tensors["markov_head.markov_w1.weight"][token]
        )

    def _layer(self, at: str, x: Tensor, context: Tensor) -> Tensor:
        """Apply a layer to the block x [N, H] with the context [C, H] before it, without a
        causal mask."""
        count, size = len(context) + len(x), self.layers["head_dim"]
        normed = self.norm(x, at + "input_layernorm")
        q, k, v = (
            linear(source, self.tensors[f"{at}self_attn.{name}_proj.weight"]).view(
                len(source), -1, size
            )
            for name, source in (
                ("q", normed),
                ("k", torch.cat((context, normed))),
                ("v", torch.cat((context, normed))),
            )
        )
        q = self.turn(self.norm(q, at + "self_attn.q_norm"), torch.arange(count)[-len(x) :])
        k = self.turn(self.norm(k, at + "self_attn.k_norm"), torch.arange(count))
        each = q.shape[1] // k.shape[1]
        k, v = (part.repeat_interleave(each, 1) for part in (k, v))
        weights = torch.einsum("nhd,mhd->hnm", q, k).div(size**0.5).softmax(-1)
        mixed = torch.einsum("hnm,mhd->nhd", weights, v).flatten(1)
        x = x + linear(mixed, self.tensors[at + "self_attn.o_proj.weight"])
        return self.feed_forward(x, at)
