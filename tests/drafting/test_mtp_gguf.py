"""The multi-token-prediction layer of a GGUF file: its tensors are those of the folder that the file
was made from, it is the default draft, and it changes no sample."""

from __future__ import annotations

import gguf
import gguf_layouts
import pytest
import torch
from checkpoints import tokenizer_metadata, write_gguf
from safetensors.torch import load_file
from test_mtp import write
from test_mtp_weights import drawn, job_of
from transformers import AutoConfig

from bass_cli.errors import UserError
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.draft_heads import NoLayerError, open_mtp
from bass_cli.formats.weights import load
from bass_cli.run.build import load_models
from bass_cli.run.plan import make_plan

# As llama.cpp's converter names them
NAMES = {
    "mtp.fc": "nextn.eh_proj",
    "mtp.pre_fc_norm_embedding": "nextn.enorm",
    "mtp.pre_fc_norm_hidden": "nextn.hnorm",
    "mtp.norm": "nextn.shared_head_norm",
}


def write_file(folder, path, *, kind="F32", further=1):
    """Write the checkpoint of a folder as one file, with the layer as its last one."""
    config = AutoConfig.from_pretrained(folder)
    layers, arch = config.num_hidden_layers, "qwen35"
    values = gguf_layouts.metadata(arch, config)
    values |= {"block_count": layers + 1, "nextn_predict_layers": further}
    values["attention.recurrent_layers"] = [*values["attention.recurrent_layers"], False]
    named = {f"{arch}.{key}": value for key, value in values.items()}
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**named, **tokenizer_metadata(folder, pad_to=config.vocab_size)}.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, tensor in load_file(folder / "model.safetensors").items():
        bare = name.removesuffix(".weight")
        if bare in NAMES:
            found = {f"blk.{layers}.{NAMES[bare]}.weight": tensor}
        else:
            name = name.replace("mtp.layers.0.", f"model.layers.{layers}.")
            found = gguf_layouts.stored_as(arch, name, tensor, config)
        for stored, part in found.items():
            values = gguf_layouts.changed(arch, stored, part).contiguous().float().numpy()
            whole = values.ndim == 1 or values.shape[-1] % 32 or "conv1d" in stored
            number = gguf.GGMLQuantizationType["F32" if whole else kind]
            writer.add_tensor(stored, gguf.quants.quantize(values, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("layer")
    write(place, "qwen3_5_text", near=0.5, tokenizer=True, hidden_size=64, intermediate_size=96)
    return place


def test_layer_has_the_tensors_of_the_folder(folder, tmp_path):
    path = write_file(folder, tmp_path / "model.gguf")
    words = {"dtype": torch.float32, "device": torch.device("cpu")}
    found, due = (load(open_mtp(open_checkpoint(place)), **words) for place in (path, folder))
    assert found.keys() == due.keys()
    for name, one in due.items():
        assert torch.equal(found[name], one), name


@pytest.mark.parametrize("dtype", ["fp32", "auto"])  # auto: the numbers of the file
def test_layer_is_the_default_draft_and_changes_no_sample(folder, tmp_path, dtype):
    path = write_file(folder, tmp_path / "model.gguf", kind="Q8_0")
    job = job_of(path, None, dtype=dtype)
    plan = make_plan(job)
    assert plan.job.pair.draft == "mtp"
    assert load_models(plan).head is not None
    tokens, accepted = drawn(job)
    assert tokens == drawn(job_of(path, "none", dtype=dtype))[0]
    assert accepted > 0


def test_file_without_a_layer_keeps_its_other_default(tmp_path):
    write_gguf("qwen3_5_text", tmp_path / "model.gguf")
    with pytest.raises(NoLayerError, match=r'key "qwen35\.nextn_predict_layers"'):
        open_mtp(open_checkpoint(tmp_path / "model.gguf"))


def test_file_with_two_such_layers_is_refused_by_its_key(folder, tmp_path):
    path = write_file(folder, tmp_path / "model.gguf", further=2)
    with pytest.raises(
        UserError, match=r'"qwen35\.nextn_predict_layers": `pair\.draft` mtp supports 1'
    ):
        open_mtp(open_checkpoint(path))


def test_layer_that_the_key_does_not_count_is_refused(folder, tmp_path):
    path = write_file(folder, tmp_path / "model.gguf", further=0)
    with pytest.raises(UserError, match=r"blk\.3\.nextn\.eh_proj.* are unknown"):
        open_checkpoint(path)
