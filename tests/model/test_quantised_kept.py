"""Quantised checkpoints whose 8-bit numbers and scales are kept, and those that are dequantised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_json, write_checkpoint, write_tokenizer
from quantised import save, write_quantised
from quantised_schemes import CPU, INT, OWN, UP, change, configure, expected, scheme_of
from safetensors.torch import load_file
from test_updates import logits_of
from torch import Tensor

from bass_cli.config.job import Job
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.weights import layouts_of, load, update
from bass_cli.models.decoder import Decoder
from bass_cli.models.partition import Share
from bass_cli.models.spec import PLAIN, Layouts
from bass_cli.models.weights import Weights
from bass_cli.run.pair import with_stored_dtype
from bass_cli.run.plan import make_plan
from bass_kernels import Quantised


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
    edit_json(tmp_path / "config.json", quantization_config=scheme.config)
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
    loaded = load(checkpoint, dtype=torch.float32, device=CPU, layouts=Layouts("int8", "int8"))
    assert planned == sum(one.nbytes for one in loaded.values())
    assert isinstance(loaded["layers.0.experts_down.weight"], Quantised)


@pytest.mark.parametrize(("name", "head"), [("fbgemm", None), ("gptq", "fp8")])
def test_head_is_rounded_unless_the_layers_are_kept(
    name: str, head: str | None, tmp_path: Path
) -> None:
    """`dtype` fp8 of a file with fp8 rows keeps all numbers of the file."""
    write_quantised(tmp_path, scheme_of(name)[0])
    checkpoint = open_checkpoint(tmp_path)
    assert layouts_of("fp8", checkpoint) == Layouts("fp8", head)
    assert layouts_of("int8", checkpoint) == Layouts("int8", "int8")
    assert layouts_of("fp8", None) == Layouts("fp8", "fp8")


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
            "num_bits": 8, **INT, "strategy": "channel"}}}}),
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
