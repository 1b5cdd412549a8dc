"""Checkpoints whose weights are quantised: their numbers are those of the owning library or of the
layout's definition."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import quantised
import torch
from any_families import build_any
from checkpoints import build_model, edit_json
from quantised import save, write_quantised
from quantised_schemes import (
    BITS_AND_BYTES,
    COMPRESSED,
    CPU,
    OWN,
    UP,
    change,
    configure,
    expected,
    scheme_of,
)
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from bass_cli.errors import UserError
from bass_cli.formats import tensor_content
from bass_cli.formats.checkpoint import Checkpoint, open_checkpoint
from bass_cli.formats.weights import load, size_of, state_of
from bass_cli.models.any_model import AnyModel, load_any
from bass_cli.models.partition import Share
from bass_cli.models.spec import AnySpec, Layouts
from bass_kernels import Quantised


@pytest.mark.parametrize("name", [*OWN, *COMPRESSED, *BITS_AND_BYTES])
def test_quantised_matrices_have_their_owners_numbers(name: str, tmp_path: Path) -> None:
    scheme, bound = scheme_of(name)
    model = write_quantised(tmp_path / "few", scheme)
    checkpoint = open_checkpoint(tmp_path / "few")
    read: list[int] = []
    found = load(checkpoint, dtype=torch.float32, device=CPU, on_read=read.append)
    wanted = expected(model, tmp_path / "plain")
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, rtol=bound, atol=0, msg=key)
    assert sum(read) == checkpoint.size == size_of(checkpoint)


@pytest.mark.parametrize("name", ["block fp8, odd blocks", "gptq act-order", "awq"])
def test_matrices_of_hybrid_models_have_their_owners_numbers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of query and output gate are sorted, also where inputs are stored first; with the
    numbers themselves, and rounded to 8 bits."""
    scheme, _ = scheme_of(name)
    kinds = ["linear_attention", "full_attention"]
    sizes = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "layer_types": kinds}
    model = write_quantised(tmp_path / "few", scheme, family="qwen3_5_text", **sizes)
    wanted = expected(model, tmp_path / "plain")
    monkeypatch.setattr(tensor_content, "ELEMENTS", {"cpu": 300})
    checkpoint = open_checkpoint(tmp_path / "few")
    found = load(checkpoint, dtype=torch.float32, device=CPU)
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-6, atol=0, msg=key)
    small = load(checkpoint, dtype=torch.float32, device=CPU, layouts=Layouts("int8"))
    for key in ("layers.1.qkv.weight", "layers.0.delta_in.weight"):
        error = small[key].dequantise() - wanted[key]
        assert (error.abs() <= 0.51 / 127 * wanted[key].abs().amax(1, keepdim=True)).all()


@pytest.mark.parametrize(
    "name", ["block fp8, odd blocks", "gptq act-order", "awq", "modelopt nvfp4"]
)
def test_shards_small_parts_and_a_tied_head_change_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and scales lie in different files, and a part has a few rows."""
    scheme, _ = scheme_of(name)
    model = write_quantised(tmp_path / "few", scheme, family="qwen2", shards=3, head_dim=16)
    wanted = expected(model, tmp_path / "plain")
    monkeypatch.setattr(tensor_content, "ELEMENTS", {"cpu": 300})
    checkpoint = open_checkpoint(tmp_path / "few")
    assert checkpoint.spec.tied
    found = load(checkpoint, dtype=torch.float32, device=CPU)
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-6, atol=0, msg=key)


@pytest.mark.parametrize(
    "name", ["block fp8, odd blocks", "gptq act-order", "awq", "fbgemm", "modelopt nvfp4"]
)
def test_parts_of_a_split_model_are_those_of_the_whole(name: str, tmp_path: Path) -> None:
    scheme, _ = scheme_of(name)
    write_quantised(tmp_path, scheme, family="qwen3")
    checkpoint = open_checkpoint(tmp_path)
    whole = load(checkpoint, dtype=torch.float32, device=CPU)
    halves = [
        load(checkpoint, dtype=torch.float32, device=CPU, share=Share(rank, 2)) for rank in (0, 1)
    ]
    for key in ("layers.1.o.weight", "layers.0.down.weight"):
        assert torch.equal(torch.cat([half[key] for half in halves], 1), whole[key])
    queries = torch.cat([half["layers.1.qkv.weight"][:32] for half in halves])
    assert torch.equal(queries, whole["layers.1.qkv.weight"][:64])


@pytest.mark.parametrize(
    "name",
    ["block fp8", "float-quantized channel", "int-quantized channel", "pack-quantized group"],
)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """transformers dequantises on a CPU, to bfloat16 in some formats."""
    scheme, _ = scheme_of(name)
    pytest.importorskip("accelerate")
    pytest.importorskip("compressed_tensors")
    write_quantised(tmp_path / "few", scheme, vocab_size=304)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "few", dtype=torch.float32).eval()
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        wanted = theirs(ids).logits[0]
    found = load(open_checkpoint(tmp_path / "few"), dtype=torch.float32, device=CPU)
    plain = build_model("llama", **{**quantised.SIZES, "vocab_size": 304})
    with torch.no_grad():
        for i in range(2):
            q, k, v = found[f"layers.{i}.qkv.weight"].split([64, 32, 32])
            gate, up = found[f"layers.{i}.up.weight"].chunk(2)
            layer = plain.model.layers[i]
            parts = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": found[f"layers.{i}.o.weight"]}
            for key, tensor in parts.items():
                getattr(layer.self_attn, key).weight.copy_(tensor)
            parts = {
                "gate_proj": gate,
                "up_proj": up,
                "down_proj": found[f"layers.{i}.down.weight"],
            }
            for key, tensor in parts.items():
                getattr(layer.mlp, key).weight.copy_(tensor)
        got = plain(ids).logits[0]
    assert (got - wanted).abs().max() < 0.02 * wanted.std()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("name", [*OWN, *COMPRESSED, *BITS_AND_BYTES])
def test_gpu_unpacks_the_numbers_of_a_cpu(name: str, tmp_path: Path) -> None:
    """Products of scales are rounded alike; kept values and scales are the same bits."""
    write_quantised(tmp_path, scheme_of(name)[0], shards=2)
    checkpoint, device = open_checkpoint(tmp_path), torch.device("cuda")
    wanted = load(checkpoint, dtype=torch.float32, device=CPU)
    found = load(checkpoint, dtype=torch.float32, device=device)
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key].cpu(), tensor, rtol=1e-6, atol=0, msg=key)
    if (kind := checkpoint.by_row) is None:
        return
    options: dict[str, Any] = {"dtype": torch.float32, "layouts": Layouts(kind)}
    kept, there = (load(checkpoint, device=one, **options) for one in (CPU, device))
    for key, matrix in kept.items():
        if isinstance(matrix, Quantised):
            values, scales = there[key].values.cpu(), there[key].scales.cpu()
            assert torch.equal(values.view(torch.uint8), matrix.values.view(torch.uint8))
            assert torch.equal(scales, matrix.scales)


def test_biases_of_zeros_are_left_out(tmp_path: Path) -> None:
    """GPTQ tools write a bias for every matrix, also for models without biases."""
    model = write_quantised(tmp_path, scheme_of("gptq")[0], attention_bias=False, mlp_bias=False)
    wanted = expected(model, tmp_path / "plain")
    change(tmp_path, lambda t: t.update({f"{UP}.bias": torch.zeros(128, dtype=torch.float16)}))
    checkpoint = open_checkpoint(tmp_path)
    found = load(checkpoint, dtype=torch.float32, device=CPU)
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())
    assert any("1 biases that are 0" in note for note in checkpoint.notes)
    change(tmp_path, lambda t: t[f"{UP}.bias"].add_(1))
    with pytest.raises(UserError, match=r"up_proj\.bias.* unknown for the family"):
        open_checkpoint(tmp_path)


def test_weights_that_are_not_quantised_are_read_as_stored(tmp_path: Path) -> None:
    """A merged model may have kept the `quantization_config` of its base."""
    model = build_model("llama")
    wanted = expected(model, tmp_path)
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    edit_json(tmp_path / "config.json", quantization_config=settings)
    checkpoint = open_checkpoint(tmp_path)
    found = load(checkpoint, dtype=torch.float32, device=CPU)
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())
    assert any("no weight is quantised" in note for note in checkpoint.notes)


@pytest.mark.parametrize("groups", [{}, {"group_0": {"targets": ["Linear"], "weights": None}}])
def test_only_the_cache_may_be_quantised(tmp_path: Path, groups: dict[str, Any]) -> None:
    wanted = expected(build_model("llama"), tmp_path)
    settings = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": groups,
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    }
    edit_json(tmp_path / "config.json", quantization_config=settings)
    scales = {f"model.layers.0.self_attn.{one}_scale": torch.ones(1) for one in "kv"}
    change(tmp_path, lambda tensors: tensors.update(scales))
    checkpoint = open_checkpoint(tmp_path)
    found = load(checkpoint, dtype=torch.float32, device=CPU)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())
    assert any("2 tensors" in note and "k_scale, v_scale" in note for note in checkpoint.notes)
    settings["config_groups"] = {"group_0": {"weights": {"num_bits": 8}}}
    edit_json(tmp_path / "config.json", quantization_config=settings)
    with pytest.raises(UserError, match=r"config\.json: key .*'dense' is not supported"):
        open_checkpoint(tmp_path)


# Layers of transformers


def load_transformers(folder: Path) -> tuple[AnyModel, Checkpoint]:
    checkpoint = open_checkpoint(folder, decoder="transformers")
    assert isinstance(checkpoint.spec, AnySpec)
    config = json.loads((folder / "config.json").read_text())
    state = state_of(checkpoint, dtype=torch.float32, device=CPU)
    options: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "state": state}
    return load_any(folder, config, checkpoint.spec, **options), checkpoint


@pytest.mark.parametrize("name", ["gptq act-order", "awq", "block fp8", "modelopt nvfp4", "fbgemm"])
def test_layers_of_transformers_get_dequantised_weights(name: str, tmp_path: Path) -> None:
    model = write_quantised(tmp_path, scheme_of(name)[0], shards=2)
    found, _ = load_transformers(tmp_path)
    wanted = dict(model.named_parameters())
    for key, parameter in found.model.named_parameters():
        torch.testing.assert_close(parameter, wanted[key], rtol=1e-6, atol=0, msg=key)


def test_experts_of_gpt_oss_are_read_from_mxfp4(tmp_path: Path) -> None:
    """The numbers are those of transformers' own conversion too."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = build_any("gpt_oss", hidden_size=64, intermediate_size=96)
    stored: dict[str, Tensor] = {}
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if not key.endswith(("gate_up_proj", "down_proj")):
                stored[key] = parameter.detach()
                continue
            blocks, scales, numbers = quantised.mxfp4_of_experts(parameter)
            theirs = convert_moe_packed_tensors(blocks.clone(), scales, dtype=torch.float32)
            torch.testing.assert_close(theirs, numbers, rtol=0, atol=0)
            stored |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
            parameter.copy_(numbers)
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config = model.config.to_dict() | {"quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save(tmp_path, stored, shards=2)
    found, checkpoint = load_transformers(tmp_path)
    assert checkpoint.quantised_as == ("4 bits (MXFP4)",)
    wanted = dict(model.named_parameters())
    for key, parameter in found.model.named_parameters():
        assert torch.equal(parameter, wanted[key]), key
    tensors = [load_file(file) for file in sorted(tmp_path.glob("*.safetensors"))]
    without = {
        k: v for one in tensors for k, v in one.items() if "0.mlp.experts.down_proj_scales" not in k
    }
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    save(tmp_path, without)
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.experts\.down_proj_scales. is missing"):
        open_checkpoint(tmp_path)


def test_fingerprint_depends_on_values_scales_and_their_meaning(tmp_path: Path) -> None:
    write_quantised(tmp_path, scheme_of("gptq")[0])
    prints = [open_checkpoint(tmp_path).fingerprint()]
    assert open_checkpoint(tmp_path).fingerprint() == prints[0]
    configure(tmp_path, checkpoint_format="gptq_v2")
    prints.append(open_checkpoint(tmp_path).fingerprint())
    change(tmp_path, lambda t: t[f"{UP}.scales"].mul_(2))
    prints.append(open_checkpoint(tmp_path).fingerprint())
    change(tmp_path, lambda t: t[f"{UP}.qweight"].add_(1))
    prints.append(open_checkpoint(tmp_path).fingerprint())
    assert len(set(prints)) == 4
