"""gpt-oss: experts that are stored in MXFP4, as published, and faults of such files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import build_model, edit_json, write_checkpoint
from safetensors.torch import load_file, save_file
from test_parity import assert_same, decoder_of
from torch import Tensor

from bass_cli.errors import UserError
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.hf_config import spec_of_config
from bass_cli.models.spec import Experts, Rope

EXPERTS, WIDTH, INNER = 3, 64, 96
SIZES = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_local_experts": EXPERTS}
# e2m1: a sign, two bits of exponent, one of mantissa
NUMBERS = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
# as on the hub, with the older names of keys
PUBLISHED = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-5, "rope_theta": 150000,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "rope_type": "yarn", "truncate": False},
    "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "vocab_size": 201088,
}  # fmt: skip


def write_mxfp4(folder: Path) -> Any:
    """Write a model whose experts are in MXFP4; return the one of transformers with the numbers
    that the file holds."""
    model = build_model("gpt_oss", **SIZES)
    generator = torch.Generator().manual_seed(5)
    stored: dict[str, Tensor] = {}
    for i, layer in enumerate(model.model.layers):
        for name, rows, columns in (
            ("gate_up_proj", 2 * INNER, WIDTH),
            ("down_proj", WIDTH, INNER),
        ):
            shape = EXPERTS, rows, columns // 32
            blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(121, 125, shape, generator=generator, dtype=torch.uint8)
            halves = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # the lower first
            values = NUMBERS[halves.int()] * torch.exp2(scales.float() - 127)[..., None]
            with torch.no_grad():
                getattr(layer.mlp.experts, name).copy_(values.flatten(2).transpose(1, 2))
            at = f"model.layers.{i}.mlp.experts.{name}"
            stored |= {f"{at}_blocks": blocks, f"{at}_scales": scales}
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    plain = {
        name: tensor
        for name, tensor in load_file(file).items()
        if not name.endswith((".gate_up_proj", ".down_proj"))
    }
    save_file({**plain, **stored}, file)
    words = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    edit_json(folder / "config.json", quantization_config=words)
    return model


def test_experts_in_mxfp4_give_the_logits_of_transformers(tmp_path: Path) -> None:
    model = write_mxfp4(tmp_path)
    assert_same(decoder_of(tmp_path), model)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.quantised_as == ("4 bits (MXFP4)",)
    assert checkpoint.notes == ()


def test_published_configuration_is_read() -> None:
    spec = spec_of_config(PUBLISHED, place="")
    assert spec.experts == Experts(32, 4, normalised=True, clamp=(1.702, 7.0))
    assert (spec.sinks, spec.windows[:3]) == (True, (128, 0, 128))
    assert spec.biases == {"qkv", "o", "router", "experts_up", "experts_down"}
    assert isinstance(spec.rope, Rope)
    assert (spec.rope.theta, spec.rope.size) == (150000.0, 64)
    missing = {key: value for key, value in PUBLISHED.items() if key != "rope_scaling"}
    assert spec_of_config(missing, place="").rope == spec.rope


@pytest.mark.parametrize(("name", "change", "message"), [
    (None, lambda t: t[:2], r"has shape \[.*; the first size must be the number of experts, 3"),
    ("down_proj_blocks", lambda t: t[..., :8], r"down_proj_blocks.* has shape \[3, 64, 3, 8\], not"),
    ("down_proj_scales", lambda t: t.float(), "down_proj_scales"),
    ("down_proj_scales", None, "down_proj_scales. is missing"),
])  # fmt: skip
def test_faults_of_mxfp4_name_the_tensor(
    name: str, change: Any, message: str, tmp_path: Path
) -> None:
    write_mxfp4(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    names = [name] if name else ["gate_up_proj_blocks", "gate_up_proj_scales"]
    for full in (f"model.layers.1.mlp.experts.{one}" for one in names):
        if change is None:
            del tensors[full]
        else:
            tensors[full] = change(tensors[full]).contiguous()
    save_file(tensors, file)
    with pytest.raises(UserError, match=message) as error:
        open_checkpoint(tmp_path)
    assert "model.layers.1.mlp.experts" in str(error.value)


def test_plain_experts_need_their_tensors(tmp_path: Path) -> None:
    write_checkpoint("gpt_oss", tmp_path, shards=False)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.experts.down_proj"]
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.experts\.0\.down_proj\.weight.*missing"):
        open_checkpoint(tmp_path)
