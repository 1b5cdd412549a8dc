"""Tiny random EAGLE-3 drafters in the published layouts, and their definition by the paper in
plain torch without a cache. No tests here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from heads import Drafter, save
from torch import Tensor
from torch.nn.functional import embedding, linear
from transformers import PreTrainedModel

KNOWN = 150  # tokens of the shorter vocabularies: 1, 3, 5, ...
_LAYER = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 56,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
}


def chain_config(kind: str, *, width: int = 48, vocab: int = 301, **keys: Any) -> dict:
    """Return a config.json: "authors", "speculators", or "deepspec" (with norms of queries and
    keys, and the whole vocabulary). `keys` override it."""
    layer = _LAYER | {"hidden_size": width, "vocab_size": vocab}
    if kind == "speculators":
        layer |= {"head_dim": 8, "model_type": keys.pop("model_type", "llama")}
        config = {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer,
            "draft_vocab_size": KNOWN,
            "norm_before_residual": True,
            "norm_before_fc": False,
            "target_hidden_size": None,
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        }
        return config | keys
    if kind == "deepspec":
        own = {"architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "head_dim": 8,
               "target_layer_ids": [0, 2], "use_sliding_window": False, "ttt_length": 7}  # fmt: skip
        return layer | own | keys
    own = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": KNOWN,
           "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}}  # fmt: skip
    return layer | own | keys


def write_chain(
    folder: Path, kind: str, *, width: int = 48, vocab: int = 301, seed: int = 0, **keys: Any
) -> ChainReading:
    """Save a drafter and return it in the form that `ChainReading` reads. Only the authors'
    layout has no embedding."""
    config = chain_config(kind, width=width, vocab=vocab, **keys)
    layer = config.get("transformer_layer_config", config)
    at, inner = "midlayer." if kind == "authors" else "layers.0.", layer["intermediate_size"]
    size = layer.get("head_dim", width // layer["num_attention_heads"])
    query, key = (layer[f"num_{one}_heads"] * size for one in ("attention", "key_value"))
    known = config.get("draft_vocab_size") or vocab
    shapes = {
        "fc.weight": (width, width * len(taps_of(config, 7))),
        "norm.weight": (width,),
        "lm_head.weight": (known, width),
    } | {f"{at}{name}.weight": shape for name, shape in {
        "input_layernorm": (width,), "hidden_norm": (width,), "post_attention_layernorm": (width,),
        "self_attn.q_proj": (query, 2 * width), "self_attn.k_proj": (key, 2 * width),
        "self_attn.v_proj": (key, 2 * width), "self_attn.o_proj": (width, query),
        "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner),
    }.items()}  # fmt: skip
    if layer["model_type"] == "qwen3":
        shapes |= {f"{at}self_attn.{one}_norm.weight": (size,) for one in "qk"}
    if kind != "authors":
        shapes["embed_tokens.weight"] = vocab, width
    save(folder, config, shapes, vocab=vocab, seed=seed)
    return ChainReading(folder)


def taps_of(config: dict, layers: int) -> list[int]:
    """Return the indexes of the hidden states that it reads, as transformers counts them: 0 is
    the embedding."""
    key = "eagle_aux_hidden_state_layer_ids"
    ids = config.get("target_layer_ids") or config.get("eagle_config", {}).get(key)
    if ids is not None:
        return [one + 1 for one in ids]
    return config.get(key) or [2, layers // 2, layers - 3]


class ChainReading(Drafter):
    """An EAGLE-3 drafter."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._at = "midlayer." if "midlayer.hidden_norm.weight" in self.tensors else "layers.0."

    def drafts(self, target: PreTrainedModel, tokens: list[int], chosen: list[int]) -> Tensor:
        """Return logits [k, U] at the places of `chosen` [k] after `tokens`, each given those
        before it."""
        width, ids = self.layers["hidden_size"], tokens[1:]
        features = torch.zeros(0, width)
        if len(tokens) > 1:
            states = target(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
            taken = [states[i][0] for i in taps_of(self.config, len(states) - 1)]
            features = torch.cat(taken, -1) @ self.tensors["fc.weight"].T
        alone = len(tokens) == 1  # nothing is known of the text: zeros, and that pair is forgotten
        if alone:
            ids, features = tokens, torch.zeros(1, width)
        found = []
        for following in chosen:
            output = self._layer(target, torch.tensor(ids), features)
            found.append(self.norm(output, "norm") @ self.tensors["lm_head.weight"].T)
            if alone:
                ids, features, alone = [], features[:0], False
            ids, features = [*ids, following], torch.cat((features, output[None]))
        return torch.stack(found)

    def _layer(self, target: PreTrainedModel, ids: Tensor, features: Tensor) -> Tensor:
        """Return the output [H] at the last of the pairs of ids [N] and features [N, H]."""
        own, at = self.tensors.get("embed_tokens.weight"), self._at
        embedded = target.get_input_embeddings()(ids) if own is None else embedding(ids, own)
        normed = self.norm(features, at + "hidden_norm")
        joined = torch.cat((self.norm(embedded, at + "input_layernorm"), normed), -1)
        heads = self.layers["num_attention_heads"]
        q, k, v = (
            linear(joined, self.tensors[f"{at}self_attn.{one}_proj.weight"]) for one in "qkv"
        )
        size = q.shape[-1] // heads
        q, k, v = (part.view(len(ids), -1, size) for part in (q, k, v))
        if self.layers["model_type"] == "qwen3":
            q, k = self.norm(q, at + "self_attn.q_norm"), self.norm(k, at + "self_attn.k_norm")
        places = torch.arange(len(ids))
        q, k = self.turn(q, places)[-1], self.turn(k, places)
        k, v = (part.repeat_interleave(heads // part.shape[1], 1) for part in (k, v))
        weights = torch.einsum("hd,nhd->hn", q, k).div(size**0.5).softmax(-1)
        mixed = torch.einsum("hn,nhd->hd", weights, v).flatten()
        x = (normed if self.config.get("norm_before_residual") else features)[-1]
        x = x + linear(mixed, self.tensors[at + "self_attn.o_proj.weight"])
        return self.feed_forward(x, at)
