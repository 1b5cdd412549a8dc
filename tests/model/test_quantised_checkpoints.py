"""Checkpoints whose weights are quantised: their numbers are those of the owning library or of the
layout's definition, and faults are found before weights are read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import quantised
import torch
from any_families import build_any
from checkpoints import build_model, write_checkpoint, write_tokenizer
from quantised import Scheme, blocks_of_fp8, save, write_quantised
from safetensors.torch import load_file
from test_updates import logits_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from bass_cli.config.job import Job
from bass_cli.errors import UserError
from bass_cli.formats import tensor_content
from bass_cli.formats.checkpoint import Checkpoint, open_checkpoint
from bass_cli.formats.quantised_config import METHODS, REFUSED, join
from bass_cli.formats.tensor_files import read_safetensors
from bass_cli.formats.weights import load, size_of, state_of, update
from bass_cli.models.any_model import AnyModel, load_any
from bass_cli.models.decoder import Decoder
from bass_cli.models.partition import Share
from bass_cli.models.spec import PLAIN, AnySpec, Layouts
from bass_cli.models.weights import Weights
from bass_cli.run.pair import with_stored_dtype
from bass_cli.run.plan import make_plan
from bass_kernels import Quantised

CPU = torch.device("cpu")
DOCS = Path(__file__).parents[2] / "docs"
_INT = {"type": "int", "symmetric": True}
_FLOAT = {"type": "float", "symmetric": True}
# Schemes by name, and the largest relative error of the expected numbers: that of bfloat16 where
# the owning library computes in it.
OWN: dict[str, Callable[[], Scheme]] = {
    "block fp8": blocks_of_fp8,
    "block fp8, odd blocks": lambda: blocks_of_fp8(48),
    "fp8 by tensor": lambda: quantised.rows_of_fp8("fp8", rows=False),
    "fbgemm": lambda: quantised.rows_of_fp8("fbgemm_fp8", rows=True),
    "modelopt fp8": lambda: quantised.rows_of_fp8("modelopt", rows=False),
    "modelopt nvfp4": quantised.nvfp4_of_modelopt,
    "gptq": quantised.gptq,
    "gptq sym": lambda: quantised.gptq(asymmetric=False),
    "gptq act-order": lambda: quantised.gptq(ordered=True),
    "gptq v2": lambda: quantised.gptq(new=True),
    "gptq 8 bits": lambda: quantised.gptq(8, 64),
    "gptq 2 bits": lambda: quantised.gptq(2, 16),
    "gptq one group": lambda: quantised.gptq(4, -1),
    "awq": quantised.awq,
}  # fmt: skip
COMPRESSED: dict[str, tuple[dict[str, Any], float]] = {
    "float-quantized channel": ({"num_bits": 8, **_FLOAT, "strategy": "channel"}, 1e-6),
    "float-quantized tensor": ({"num_bits": 8, **_FLOAT, "strategy": "tensor"}, 1e-6),
    "float-quantized block": (
        {"num_bits": 8, **_FLOAT, "strategy": "block", "block_structure": [32, 16]}, 1e-6),
    "int-quantized channel": ({"num_bits": 8, **_INT, "strategy": "channel"}, 1e-6),
    "int-quantized asymmetric": (
        {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "channel"}, 1e-6),
    "pack-quantized group": ({"num_bits": 4, **_INT, "strategy": "group", "group_size": 32}, 1e-6),
    "pack-quantized asymmetric": (
        {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 16}, 1e-6),
    "pack-quantized channel": ({"num_bits": 8, **_INT, "strategy": "channel"}, 1e-6),
    "nvfp4-pack-quantized": (
        {"num_bits": 4, **_FLOAT, "strategy": "tensor_group", "group_size": 16}, 2.0**-7),
    "mxfp4-pack-quantized": (
        {"num_bits": 4, **_FLOAT, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        1e-6),
    "mxfp8-quantized": (
        {"num_bits": 8, **_FLOAT, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        1e-6),
}  # fmt: skip
BITS_AND_BYTES = {
    "int8": ("int8", False),
    "nf4": ("nf4", False),
    "nf4 nested": ("nf4", True),
    "fp4": ("fp4", True),
}


def scheme_of(name: str) -> tuple[Scheme, float]:
    """Return a scheme and the bound of its error."""
    if name in OWN:
        return OWN[name](), 1e-6
    if name in COMPRESSED:
        pytest.importorskip("compressed_tensors")
        weights, bound = COMPRESSED[name]
        return quantised.compressed(name.split()[0], **weights), bound
    pytest.importorskip("bitsandbytes")
    kind, nested = BITS_AND_BYTES[name]
    return quantised.bitsandbytes(kind, nested=nested), 1e-6


def expected(model: Any, folder: Path) -> dict[str, Tensor]:
    """Load the model's weights by way of an ordinary checkpoint."""
    model.config.quantization_config = None
    del model.config.quantization_config
    model.save_pretrained(folder)
    return load(open_checkpoint(folder), dtype=torch.float32, device=CPU)


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


# Faults


def change(folder: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save(folder, tensors)


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))


UP = "model.layers.1.mlp.up_proj"
FAULTS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "no scales": (
        "block fp8", lambda folder: change(folder, lambda t: t.pop(f"{UP}.weight_scale_inv")),
        rf'model\.safetensors: tensor "{UP}\.weight_scale_inv" is missing'),
    "no values": (
        "block fp8", lambda folder: change(folder, lambda t: t.pop(f"{UP}.weight")),
        rf'model\.safetensors: tensor "{UP}\.weight" is missing, but there is .weight_scale_inv'),
    "plain values": (
        "block fp8", lambda folder: change(folder, lambda t: t.update({f"{UP}.weight": torch.zeros(128, 64)})),
        rf'tensor "{UP}\.weight_scale_inv" has scales of a weight that is not quantised: it has type F32'),
    "shape of scales": (
        "block fp8", lambda folder: configure(folder, weight_block_size=[16, 32]),
        r'down_proj.weight_scale_inv" has shape \[2, 4\], not \[4, 4\]'),
    "blocks": (
        "block fp8", lambda folder: configure(folder, weight_block_size=[128]),
        r'config\.json: key "quantization_config\.weight_block_size": two sizes are needed, not \[128\]'),
    "shape": (
        "gptq", lambda folder: change(folder, lambda t: t.update(
            {f"{UP}.qweight": t[f"{UP}.qweight"][:4].clone(), f"{UP}.g_idx": t[f"{UP}.g_idx"][:32].clone(),
             f"{UP}.scales": t[f"{UP}.scales"][:1].clone(), f"{UP}.qzeros": t[f"{UP}.qzeros"][:1].clone()})),
        r'tensor "layers\.1\.mlp\.up_proj\.weight" has shape \[32, 128\], not \[64, 128\]'),
    "groups": (
        "gptq", lambda folder: change(folder, lambda t: t[f"{UP}.g_idx"].fill_(2)),
        rf'tensor "{UP}\.g_idx" names a group that does not exist; there are 2'),
    "type of scales": (
        "gptq", lambda folder: change(folder, lambda t: t.update({f"{UP}.scales": t[f"{UP}.scales"].int()})),
        rf'tensor "{UP}\.scales" has type I32, not F32 or F16 or BF16'),
    "bits": ("gptq", lambda folder: configure(folder, bits=3), r'"quantization_config\.bits": 3 is not supported'),
    "marlin": (
        "gptq", lambda folder: configure(folder, checkpoint_format="marlin"),
        r'"quantization_config\.checkpoint_format": .marlin. is not supported'),
    "gemv": ("awq", lambda folder: configure(folder, version="gemv"), r'"quantization_config\.version": .gemv.'),
    "ignored": (
        "fbgemm", lambda folder: configure(folder, modules_to_not_convert=[UP]),
        rf'tensor "{UP}\.weight.*" belongs to a module that config\.json lists as unquantised'),
    "expression": (
        "fbgemm", lambda folder: configure(folder, modules_to_not_convert=["re:("]),
        r'"quantization_config\.modules_to_not_convert": .\(. is not a regular expression'),
    "pattern": (
        "gptq", lambda folder: configure(folder, dynamic={"-:(": {}}),
        r'"quantization_config\.dynamic": .\(. is not a regular expression'),
    "left out": (
        "gptq", lambda folder: configure(folder, dynamic={"-:.*up_proj": {}}),
        r'up_proj\.qweight" belongs to a module that config\.json leaves out'),
    "two scales": (
        "block fp8",
        lambda folder: change(folder, lambda t: t.update({f"{UP}.weight_scale": torch.ones(1)})),
        r'weight_scale_inv" does not belong to the format'),
    "scale of activations' channels": (
        "modelopt nvfp4", lambda folder: change(folder, lambda t: t.update({f"{UP}.pre_quant_scale": torch.ones(64)})),
        "pre_quant_scale.* unknown for the family llama"),
    "method": (
        "awq", lambda folder: configure(folder, quant_method="squeeze"),
        r'"quantization_config\.quant_method": .squeeze. is not supported; known: compressed-tensors, fp8'),
    "no method": (
        "awq", lambda folder: configure(folder, quant_method=None),
        r'"quantization_config\.quant_method" is missing'),
    "torchao": (
        "awq", lambda folder: configure(folder, quant_method="torchao"),
        r'"quantization_config\.quant_method": "torchao" is not supported: torchao stores tensors of its own'),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_name_file_and_tensor_or_key(fault: str, tmp_path: Path) -> None:
    name, spoil, message = FAULTS[fault]
    write_quantised(tmp_path, scheme_of(name)[0])
    open_checkpoint(tmp_path)
    spoil(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "marlin-24"}, r'"quantization_config\.format": .marlin-24. is not supported'),
        ({"transform_config": {"config_groups": {"R1": {}}}}, r'"quantization_config\.transform_config"'),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, r"sparsity_config\.format"),
        ({"config_groups": {"a": {"targets": ["re:.*none.*"], "weights": {"num_bits": 4}}}},
         'belongs to no group of "config_groups"'),
    ],
)  # fmt: skip
def test_unsupported_settings_of_compressed_tensors(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_quantised(tmp_path, scheme_of("pack-quantized group")[0])
    configure(tmp_path, **changes)
    with pytest.raises(UserError, match=message):
        open_checkpoint(tmp_path)


JUNK = (
    None,
    True,
    False,
    -1,
    0,
    3,
    1e9,
    "x",
    "re:(",
    [],
    {},
    [1],
    [0, 0],
    ["re:("],
    {"a": 1},
    {"weights": 2},
)


def edits(settings: Any) -> Iterator[Any]:
    """Yield copies of nested settings in which one value is junk."""
    if isinstance(settings, dict):
        for key, value in settings.items():
            for one in (*JUNK, *edits(value)):
                yield {**settings, key: one}
            yield {name: one for name, one in settings.items() if name != key}


@pytest.mark.parametrize("name", [*OWN, *COMPRESSED, "nf4 nested"])
def test_junk_in_settings_is_an_error_of_the_user(name: str, tmp_path: Path) -> None:
    scheme, _ = scheme_of(name)
    write_quantised(tmp_path, scheme, num_hidden_layers=1)
    config = json.loads((tmp_path / "config.json").read_text())
    entries = read_safetensors(tmp_path / "model.safetensors")
    refused: list[str] = []
    for settings in edits(config["quantization_config"]):
        try:
            join({"quantization_config": settings}, entries, place="config.json")
        except UserError as error:
            refused.append(str(error))
    assert len(refused) > 10
    assert all(len(text) < 500 for text in refused)


def test_what_is_not_used_is_noted(tmp_path: Path) -> None:
    write_quantised(tmp_path, scheme_of("fbgemm")[0])
    configure(tmp_path, kv_cache_scheme={"num_bits": 8})
    change(
        tmp_path,
        lambda t: (
            t.update(
                {"model.layers.0.self_attn.k_scale": torch.ones(1), f"{UP}.bias_of": torch.ones(1)}
            )
            or t.pop(f"{UP}.bias_of")
        ),
    )
    notes = open_checkpoint(tmp_path).notes
    assert any("15 tensors" in note and "input_scale, k_scale" in note for note in notes)
    assert any("kv_cache_scheme" in note and "config.json" in note for note in notes)


@pytest.mark.parametrize(
    ("name", "file", "inner"),
    [
        ("gptq", "quantize_config.json", ""),
        ("awq", "quant_config.json", ""),
        ("modelopt nvfp4", "hf_quant_config.json", "quantization"),
    ],
)
def test_settings_in_a_file_of_older_tools_are_read(
    name: str, file: str, inner: str, tmp_path: Path
) -> None:
    write_quantised(tmp_path, scheme_of(name)[0])
    wanted = load(open_checkpoint(tmp_path), dtype=torch.float32, device=CPU)
    config = json.loads((tmp_path / "config.json").read_text())
    settings = config.pop("quantization_config")
    del settings["quant_method"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError):
        open_checkpoint(tmp_path)
    if name == "awq":
        settings = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    (tmp_path / file).write_text(json.dumps({inner: settings} if inner else settings))
    found = load(open_checkpoint(tmp_path), dtype=torch.float32, device=CPU)
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())
    wrong = {"modules_to_not_convert": 3, "ignore": 3}
    (tmp_path / file).write_text(json.dumps({inner: wrong} if inner else wrong))
    with pytest.raises(UserError, match=file):
        open_checkpoint(tmp_path)


def test_fp8_without_settings_says_what_is_missing(tmp_path: Path) -> None:
    write_quantised(tmp_path, scheme_of("block fp8")[0])
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    change(tmp_path, lambda t: [t.pop(name) for name in list(t) if "scale" in name])
    with pytest.raises(UserError, match=r"unsupported type F8_E4M3.* quantization_config"):
        open_checkpoint(tmp_path)


def test_update_writes_kept_numbers_in_place(tmp_path: Path) -> None:
    """New weights of the same format are not rounded again; memory does not move."""
    for seed, name in enumerate(("old", "new")):
        write_quantised(tmp_path / name, scheme_of("fbgemm")[0], seed=seed)
    old, new = (open_checkpoint(tmp_path / name) for name in ("old", "new"))
    options: dict[str, Any] = {"dtype": torch.float32, "layouts": Layouts("fp8"), "device": CPU}
    weights, wanted = Weights(load(old, **options)), load(new, **options)
    before = {
        key: one.values.data_ptr() for key, one in weights.items() if isinstance(one, Quantised)
    }
    update(weights, new, device=CPU)
    for key, pointer in before.items():
        found, right = weights[key], wanted[key]
        assert isinstance(found, Quantised)
        assert isinstance(right, Quantised)
        assert found.values.data_ptr() == pointer
        assert torch.equal(found.values.view(torch.uint8), right.values.view(torch.uint8))
        assert torch.equal(found.scales, right.scales)


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
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(tmp_path)
    found = load(checkpoint, dtype=torch.float32, device=CPU)
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())
    assert any("no weight is quantised" in note for note in checkpoint.notes)


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


# Kept in 8 bits

KEPT = {
    "fbgemm": "fp8",
    "fp8 by tensor": "fp8",
    "modelopt fp8": "fp8",
    "float-quantized channel": "fp8",
    "int-quantized channel": "int8",
    "int8": "int8",
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_numbers_and_scales_by_row_are_kept(name: str, family: str, tmp_path: Path) -> None:
    """Stored values are not rounded again: fused matrices join rows of several tensors."""
    scheme, bound = scheme_of(name)
    model = write_quantised(tmp_path / "few", scheme, family=family, shards=2)
    checkpoint = open_checkpoint(tmp_path / "few")
    assert checkpoint.by_row == KEPT[name]
    layouts = Layouts(KEPT[name])
    read: list[int] = []
    found = load(checkpoint, dtype=torch.float32, layouts=layouts, device=CPU, on_read=read.append)
    wanted = expected(model, tmp_path / "plain")
    for key, tensor in wanted.items():
        kept = found[key]
        if layouts.of(key) is None:
            assert isinstance(kept, Tensor)
            assert torch.equal(kept, tensor)
            continue
        assert isinstance(kept, Quantised)
        assert kept.layout == KEPT[name]
        torch.testing.assert_close(kept.dequantise(), tensor, rtol=bound, atol=0, msg=key)
    stored = [load_file(file) for file in sorted((tmp_path / "few").glob("*.safetensors"))]
    (up,) = [one[f"{UP}.weight"] for one in stored if f"{UP}.weight" in one]
    kept = found["layers.1.up.weight"]
    assert isinstance(kept, Quantised)
    assert torch.equal(kept.values.view(torch.uint8)[128:], up.view(torch.uint8))
    assert sum(read) == checkpoint.size


@pytest.mark.parametrize("name", ["fbgemm", "fp8 by tensor"])
def test_parts_of_a_split_model_keep_the_scales_of_whole_rows(name: str, tmp_path: Path) -> None:
    write_quantised(tmp_path, scheme_of(name)[0], family="qwen3")
    checkpoint, layouts = open_checkpoint(tmp_path), Layouts("fp8")
    options: dict[str, Any] = {"dtype": torch.float32, "layouts": layouts, "device": CPU}
    whole = load(checkpoint, **options)
    halves = [load(checkpoint, share=Share(rank, 2), **options) for rank in (0, 1)]
    for key, dim in (("layers.1.o.weight", 1), ("layers.0.down.weight", 1)):
        joined = torch.cat([half[key].dequantise() for half in halves], dim)
        assert torch.equal(joined, whole[key].dequantise())


@pytest.mark.parametrize(
    "name", ["block fp8", "int-quantized asymmetric", "gptq 8 bits", "mxfp8-quantized"]
)
def test_other_checkpoints_in_8_bits_are_not_kept(name: str, tmp_path: Path) -> None:
    write_quantised(tmp_path, scheme_of(name)[0])
    assert open_checkpoint(tmp_path).by_row is None


@pytest.mark.parametrize("name", ["block fp8, odd blocks", "gptq", "fbgemm"])
def test_matrices_of_experts_are_dequantised_kept_or_rounded_by_row(
    name: str, tmp_path: Path
) -> None:
    """Published mixtures have tensors of their own for each expert."""
    scheme = OWN[name]()
    write_checkpoint("qwen3_moe", tmp_path, shards=False, hidden_size=64, moe_intermediate_size=32)
    wanted: dict[str, Tensor] = {}
    stored: dict[str, Tensor] = {}
    for key, tensor in load_file(tmp_path / "model.safetensors").items():
        if not key.endswith("_proj.weight"):
            wanted[key] = stored[key] = tensor
            continue
        found = scheme.quantise(tensor)
        wanted[key] = found.numbers
        stored |= {key.removesuffix("weight") + one: part for one, part in found.tensors.items()}
    save(tmp_path, wanted)
    plain = load(open_checkpoint(tmp_path), dtype=torch.float32, device=CPU)
    save(tmp_path, stored)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = scheme.config
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(tmp_path)
    for key, tensor in load(checkpoint, dtype=torch.float32, device=CPU).items():
        torch.testing.assert_close(tensor, plain[key], rtol=1e-6, atol=0, msg=key)
    assert checkpoint.by_row == ("fp8" if name == "fbgemm" else None)
    if checkpoint.by_row is not None:  # its numbers are kept
        words = {"dtype": torch.float32, "device": CPU, "layouts": Layouts("fp8")}
        for key, one in load(checkpoint, **words).items():
            if isinstance(one, Quantised):
                torch.testing.assert_close(one.dequantise(), plain[key], rtol=1e-6, atol=0)
    write_tokenizer(tmp_path)
    pair = {"name": "few", "target": str(tmp_path), "draft": "none"}
    plan = make_plan(Job(pair=pair, n=1, device="cpu", batch_size=1, dtype="int8"))
    (note,) = [note for note in plan.notes if "weights are stored in" in note]
    assert "bass rounds them to int8: " in note
    planned = plan.footprint.weights
    loaded = load(checkpoint, dtype=torch.float32, device=CPU, layouts=Layouts("int8"))
    assert planned == sum(one.nbytes for one in loaded.values())
    assert isinstance(loaded["layers.0.experts_down.weight"], Quantised)


def test_checkpoint_with_a_plain_matrix_is_not_kept(tmp_path: Path) -> None:
    """Then `dtype` auto would quantise that matrix."""
    write_quantised(tmp_path, scheme_of("fbgemm")[0])

    def leave(tensors: dict[str, Tensor]) -> None:
        values, scale = tensors[f"{UP}.weight"], tensors.pop(f"{UP}.weight_scale")
        tensors[f"{UP}.weight"] = (values.float() * scale).bfloat16()
        del tensors[f"{UP}.input_scale"]

    assert not [note for note in open_checkpoint(tmp_path).notes if "without quantisation" in note]
    change(tmp_path, leave)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.by_row is None
    (note,) = [note for note in checkpoint.notes if "without quantisation" in note]
    assert f'tensor "{UP}.weight" is stored without quantisation, though' in note


EXCEPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "name": ("fbgemm", {"modules_to_not_convert": [UP]}),
    "part of a name": ("fbgemm", {"modules_to_not_convert": ["up_proj"]}),
    "wildcard": ("modelopt fp8", {"ignore": ["model.layers.1*"]}),
    "pattern of GPTQ": ("gptq", {"dynamic": {r"-:.*\.1\.mlp\.up.*": {}}}),
    "expression": ("int-quantized channel", {"ignore": [r"re:.*layers\.1\..*up_proj"]}),
    "no group": (
        "int-quantized channel",
        {"config_groups": {"a": {"targets": [r"re:(?!.*layers\.1\.mlp\.up)"], "weights": {
            "num_bits": 8, **_INT, "strategy": "channel"}}}}),
}  # fmt: skip


@pytest.mark.parametrize("kind", EXCEPTIONS)
def test_matrix_that_settings_leave_out_has_no_note(kind: str, tmp_path: Path) -> None:
    name, settings = EXCEPTIONS[kind]
    write_quantised(tmp_path, scheme_of(name)[0])

    def leave(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if key.startswith(f"{UP}.") and "bias" not in key]:
            del tensors[key]
        tensors[f"{UP}.weight"] = torch.zeros(128, 64)

    change(tmp_path, leave)
    assert any("without quantisation" in note for note in open_checkpoint(tmp_path).notes)
    configure(tmp_path, **settings)
    assert not [note for note in open_checkpoint(tmp_path).notes if "without quantisation" in note]


@pytest.mark.parametrize(
    ("name", "dtype", "device", "wanted"),
    [
        ("fbgemm", "auto", "cuda", "fp8"),
        ("int8", "auto", "cuda", "int8"),
        ("fbgemm", "auto", "cpu", "auto"),
        ("fbgemm", "bf16", "cuda", "bf16"),
        ("block fp8", "auto", "cuda", "auto"),
    ],
)
def test_auto_keeps_8_bits_on_a_gpu(
    name: str, dtype: str, device: str, wanted: str, tmp_path: Path
) -> None:
    write_quantised(tmp_path, scheme_of(name)[0])
    job = Job(pair={"name": "few", "target": str(tmp_path)}, n=1, dtype=dtype)
    found = with_stored_dtype(job, open_checkpoint(tmp_path), torch.device(device))
    assert found.dtype == wanted


@pytest.mark.parametrize("name", ["fbgemm", "int8"])
def test_kept_weights_give_the_dequantised_models_answers(name: str, tmp_path: Path) -> None:
    """int8 up to rounding; fp8 rounds activations too."""
    write_quantised(tmp_path, scheme_of(name)[0])
    checkpoint = open_checkpoint(tmp_path)
    plain, kept = (
        logits_of(
            Decoder(
                checkpoint.spec,
                load(checkpoint, dtype=torch.float32, device=CPU, layouts=layouts),
                vocab=checkpoint.spec.vocab,
            )
        )
        for layouts in (PLAIN, Layouts(KEPT[name]))
    )
    # e4m3 has a relative error of 1/16 at most, about 2.6 % on average; 8 maps add up to 7.4 %.
    assert 0 < (plain - kept).std() < (0.08 if name == "fbgemm" else 1e-5) * plain.std()


def test_plan_says_what_dequantised_weights_take(tmp_path: Path) -> None:
    write_quantised(tmp_path, scheme_of("gptq")[0])
    write_tokenizer(tmp_path)
    pair = {"name": "few", "target": str(tmp_path), "draft": "none"}
    plan = make_plan(Job(pair=pair, n=1, device="cpu", batch_size=1, dtype="bf16"))
    (note,) = [note for note in plan.notes if "dequantises" in note]
    assert "weights are stored in 4 bits (GPTQ); bass dequantises them to bf16: 0.0 GB" in note


ROW = re.compile(r"^\| (`.*?) \| (.*?) \|.*\| (dequantised|kept|as|refused)[^|]* \|$", re.M)


def test_table_of_quantised_checkpoints_is_true() -> None:
    """Each method that is read or refused has its row, and each row that is read has a scheme
    here."""
    rows = ROW.findall((DOCS / "reference" / "quantised-checkpoints.md").read_text())
    names = {read: {name for names, _, how in rows if (how == "refused") != read
                    for name in re.findall("`(.*?)`", names)} for read in (True, False)}  # fmt: skip
    assert names[True] == METHODS.keys()
    assert names[False] - METHODS.keys() == REFUSED.keys()
    formats = {one for names, text, how in rows if "compressed" in names and how != "refused"
               for one in re.findall("`(.*?)`", text)}  # fmt: skip
    assert formats == {name.split()[0] for name in COMPRESSED} | {"naive-quantized"}
    kept = {one for names, _, how in rows if how == "kept" for one in re.findall("`(.*?)`", names)}
    assert kept == {"compressed-tensors", "fp8", "fbgemm_fp8", "modelopt", "bitsandbytes"}
    refused = {one for names, text, how in rows if "compressed" in names and how == "refused"
               for one in re.findall("`(.*?)`", text)}  # fmt: skip
    for kind in refused:
        settings = {"quant_method": "compressed-tensors", "format": kind}
        with pytest.raises(UserError, match="is not supported"):
            join({"quantization_config": settings}, {}, place="config.json")


@pytest.mark.parametrize("name", REFUSED)
def test_refused_methods_say_why(name: str) -> None:
    config = {"quantization_config": {"quant_method": name}}
    with pytest.raises(UserError, match=f'"{name}" is not supported: [a-z].*') as error:
        join(config, {}, place="folder/config.json")
    assert str(error.value).startswith('folder/config.json: key "quantization_config.quant_method"')


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
