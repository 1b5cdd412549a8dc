"""Settings of quantised checkpoints: faults are found before weights are read, and the table of
methods is true."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised import write_quantised
from quantised_schemes import COMPRESSED, CPU, OWN, UP, change, configure, scheme_of

from bass_cli.errors import UserError
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.quantised_config import METHODS, REFUSED, join
from bass_cli.formats.tensor_files import read_safetensors
from bass_cli.formats.weights import load

DOCS = Path(__file__).parents[2] / "docs"
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
    if inner:
        (tmp_path / file).write_text(json.dumps({"producer": settings}))
        with pytest.raises(UserError, match=f'{file}: key "{inner}": it is missing'):
            open_checkpoint(tmp_path)


def test_fp8_without_settings_says_what_is_missing(tmp_path: Path) -> None:
    write_quantised(tmp_path, scheme_of("block fp8")[0])
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    change(tmp_path, lambda t: [t.pop(name) for name in list(t) if "scale" in name])
    with pytest.raises(UserError, match=r"unsupported type F8_E4M3.* quantization_config"):
        open_checkpoint(tmp_path)


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
