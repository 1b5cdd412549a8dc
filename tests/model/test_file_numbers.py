"""Matrices in the numbers of a GGUF file: equal to the gguf package's, the logits of transformers,
the samples with and without drafts, and what cannot be done with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import tokenizer_metadata, write_checkpoint, write_gguf, write_tokenizer
from test_updates import IDS, logits_of
from torch import Tensor
from toys import drive, loop_for, plain

from bass_cli.config.job import load_pair, make_job
from bass_cli.engine.batch import Row
from bass_cli.engine.sampling import RowSampling
from bass_cli.errors import UserError
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.gguf_blocks import QUANTISED
from bass_cli.formats.grouped_weights import file_layouts, numbers_of
from bass_cli.formats.weights import layouts_of, load
from bass_cli.lengths.controllers import Fixed
from bass_cli.models.decoder import Decoder
from bass_cli.models.spec import FILE, MAPS, Format, Layouts
from bass_cli.run import pair as pairs
from bass_cli.run import plan as plans
from bass_cli.run.build import Models, load_models
from bass_cli.run.pair import Files
from bass_cli.run.plan import make_plan
from bass_cli.run.updates import Updates
from bass_kernels import GROUP, Grouped, grouped_works

CPU = torch.device("cpu")
AS_STORED = Layouts(FILE, FILE)
needs_product = pytest.mark.skipif(not grouped_works(), reason="torch has no such product here")
FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")
ROUNDED = ("Q2_K", "Q3_K", "Q6_K")  # groups of 16


@pytest.mark.parametrize("kind", QUANTISED)
def test_values_scales_and_minima_give_the_numbers_of_the_gguf_package(kind: str) -> None:
    """Types with groups of 16 are rounded to 8 bits in groups of 32."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    raw = torch.randint(
        0, 256, (300, 3 * size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    with np.errstate(all="ignore"):
        whole = gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind])
    wanted = torch.from_numpy(whole).unflatten(1, (-1, GROUP)).double()
    values, scales, minima = numbers_of(raw, kind)
    assert values.dtype == torch.int8
    most = 8 if kind in FOUR_BITS else 128
    assert -most <= int(values.min()) <= int(values.max()) < most
    found = values.unflatten(1, (-1, GROUP)).double() * scales[..., None] + minima[..., None]
    largest = wanted.abs().amax(-1, keepdim=True)
    error = (found - wanted).abs() / largest.clamp(min=1e-30)
    usual = (largest < 1e30).expand_as(error)  # random bytes give infinite scales too
    assert usual.double().mean() > (0.85 if kind == "MXFP4" else 0.9)  # its scales are exponents
    assert error[usual].max() <= (0.51 / 127 if kind in ROUNDED else 1e-6)


def stored(path: Path) -> dict[str, Any]:
    return load(open_checkpoint(path), dtype=torch.float32, device=CPU, layouts=AS_STORED)


@torch.inference_mode()
def check_logits(decoder: Decoder, model: Any) -> None:
    """Compare with those of transformers' model, up to rounding to bfloat16."""
    expected = model(torch.tensor([IDS])).logits[0, 1:]
    found = logits_of(decoder)[:, : expected.shape[1]]
    assert (found - expected).norm() < 0.02 * expected.norm()


@needs_product
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_logits_are_those_of_transformers_up_to_bfloat16(
    family: str, kind: str, tmp_path: Path
) -> None:
    """Fused and reordered rows are in their places: a wrong one would change logits wholly."""
    model = write_gguf(family, tmp_path / "tiny.gguf", kind=kind, seed=1)
    weights = stored(tmp_path / "tiny.gguf")
    matrices = {name for name, one in weights.items() if isinstance(one, Grouped)}
    spec = open_checkpoint(tmp_path / "tiny.gguf").spec
    maps = [name for name in MAPS if name != "o"]  # the writer stores rows of 48 as floats
    assert matrices >= {"head.weight"} | {
        f"layers.{i}.{name}.weight" for i in range(spec.layers) for name in maps
    }
    check_logits(Decoder(spec, weights), model)


@needs_product
@pytest.mark.parametrize(("family", "sizes", "plainly"), [
    ("qwen2", {"intermediate_size": 104}, "down"), ("granite", {"intermediate_size": 104}, "down"),
    ("qwen3_next", {}, "shared_down"),
])  # fmt: skip
def test_matrix_stored_as_floats_may_follow_one_in_groups(
    family: str, sizes: dict[str, int], plainly: str, tmp_path: Path
) -> None:
    """Rows that are no multiple of 32 are stored as floats."""
    model = write_gguf(family, tmp_path / "tiny.gguf", kind="Q8_0", seed=1, **sizes)
    weights, spec = stored(tmp_path / "tiny.gguf"), open_checkpoint(tmp_path / "tiny.gguf").spec
    assert isinstance(weights[f"layers.0.{plainly.replace('down', 'up')}.weight"], Grouped)
    assert isinstance(weights[f"layers.0.{plainly}.weight"], Tensor)
    check_logits(Decoder(spec, weights), model)


@needs_product
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("qwen3_5_moe_text", "Q8_0"),
        ("qwen3_next", "Q5_1"),
        ("mixtral", "Q4_1"),
        ("gpt_oss", "MXFP4"),
    ],
)
def test_matrices_of_mixtures_and_hybrids_have_their_rows_and_columns_in_place(
    family: str, kind: str, tmp_path: Path
) -> None:
    """Against the same file in float32, whose logits are those of transformers."""
    hybrid = family.startswith("qwen")
    sizes = {"linear_key_head_dim": 32, "linear_value_head_dim": 32} if hybrid else {}
    write_gguf(family, tmp_path / "tiny.gguf", kind=kind, seed=1, **sizes)
    plain = load(open_checkpoint(tmp_path / "tiny.gguf"), dtype=torch.float32, device=CPU)
    found = {
        name: one
        for name, one in stored(tmp_path / "tiny.gguf").items()
        if isinstance(one, Grouped)
    }
    kept = {"qkv", "o", "experts_up", "experts_down", "head"}
    kept |= {"delta_in", "delta_out", "shared_up"} if hybrid else set()
    assert {name.split(".")[-2] for name in found} >= kept
    for name, one in found.items():
        error = (one.dequantise() - plain[name]).abs().amax()
        assert error < 0.01 * plain[name].abs().amax(), name


@needs_product
def test_reading_counts_every_stored_byte_once(tmp_path: Path) -> None:
    write_gguf("llama", tmp_path / "tiny.gguf", kind="Q4_1", tie_word_embeddings=True)
    checkpoint, read = open_checkpoint(tmp_path / "tiny.gguf"), list[int]()
    load(checkpoint, dtype=torch.float32, device=CPU, layouts=AS_STORED, on_read=read.append)
    assert sum(read) == checkpoint.size


@needs_product
def test_scale_that_is_not_finite_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf("llama", path, kind="Q4_1")
    entry = next(
        piece.entry
        for piece in open_checkpoint(path).pieces
        if piece.slot.name == "layers.1.down.weight"
    )
    with path.open("r+b") as file:
        file.seek(entry.start)
        file.write(np.array([np.inf], np.float16).tobytes())
    with pytest.raises(UserError, match=r"layers\.1\.down\.weight has scales that are not finite"):
        stored(path)


def rows() -> list[Row]:
    """Two samples of each prompt, greedy and at temperature 0.9."""
    prompts = [7, 3, 7, 3, 7, 3, 9], [3, 1, 4, 1, 5, 9, 2, 6]
    return [
        Row(str(p), s, 5, list(tokens), 40 - p, sampling=RowSampling(temperature=0.9 * s))
        for p, tokens in enumerate(prompts)
        for s in range(2)
    ]


@needs_product
@pytest.mark.parametrize(("family", "coupling", "batch"), [
    ("llama", "shared", 1), ("llama", "shared", 3), ("llama", "maximal", 1), ("llama", "maximal", 3),
    ("qwen3_moe", "shared", 3),
])  # fmt: skip
def test_drafts_change_no_sample(family: str, coupling: str, batch: int, tmp_path: Path) -> None:
    """Shared coupling: all samples. Maximal coupling: greedy ones."""
    layers = {"num_hidden_layers": 2} if family == "qwen3_moe" else {}
    write_gguf(family, tmp_path / "tiny.gguf", kind="Q4_1", seed=3, **layers)
    spec = open_checkpoint(tmp_path / "tiny.gguf").spec
    target = Decoder(spec, stored(tmp_path / "tiny.gguf"))
    expected, live = plain(target, rows()), rows()
    draft = target.keep_layers(range(spec.layers - 1))
    loop = loop_for(target, draft, rows=batch, lengths=Fixed(5), coupling=coupling)
    found = drive(loop, live)
    assert 0 < sum(row.accepted for row in live) < sum(row.drafted for row in live)
    same = {key for key in expected if coupling == "shared" or key[1] == 0}
    assert {key: found[key] for key in same} == {key: expected[key] for key in same}


def write_model(path: Path, kind: str) -> Path:
    """A file with a tokenizer."""
    write_tokenizer(path.parent)
    metadata = tokenizer_metadata(path.parent, pad_to=305)
    write_gguf("llama", path, kind=kind, vocab_size=305, metadata=metadata)
    return path


def job_of(path: Path, **words: Any) -> Any:
    pair = load_pair("smollm2").model_copy(update={"target": str(path), "draft": "none"})
    return make_job(pair, dtype="file", device="cpu", n=1, max_new_tokens=4, **words)


@needs_product
def test_new_weights_are_refused_before_any_is_written(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf("llama", path, kind="Q4_0")
    checkpoint, unused = open_checkpoint(path), None
    decoder = Decoder(checkpoint.spec, stored(path))
    files: Any = Files(checkpoint, unused, None, 0, None, frozenset())  # type: ignore[arg-type]
    embed = decoder.weights.plain("embed.weight").clone()
    for given in (path, {"model.embed_tokens.weight": torch.zeros_like(embed)}):
        with pytest.raises(UserError, match="which cannot be replaced; make the engine with"):
            Updates(Models(decoder), files).update(given)
    assert torch.equal(decoder.weights.plain("embed.weight"), embed)


def test_checkpoint_without_quantised_matrices_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", "F16")
    with pytest.raises(UserError, match=r"tiny\.gguf has no quantised GGUF matrices; use fp32"):
        make_plan(job_of(path))
    write_checkpoint("llama", tmp_path / "folder")
    write_tokenizer(tmp_path / "folder")
    with pytest.raises(UserError, match="folder has no quantised GGUF matrices"):
        make_plan(job_of(tmp_path / "folder"))


def test_a_gpu_is_refused_with_what_to_use_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "tiny.gguf", "Q4_0")
    monkeypatch.setattr(plans, "device_of", lambda wanted: torch.device("cuda"))
    monkeypatch.setattr(plans, "wake", lambda device: None)
    with pytest.raises(UserError, match="used on a CPU only; on a GPU use fp8, int8 or bf16"):
        make_plan(job_of(path))


def test_processor_without_the_product_uses_float32_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "tiny.gguf", "Q4_0")
    monkeypatch.setattr(plans, "grouped_works", lambda: False)
    plan = make_plan(job_of(path))
    assert any("torch has no fast product for it on this processor" in note for note in plan.notes)
    assert plan.identity()["dtype"] == "fp32"
    weights = load_models(plan).target.weights
    assert all(isinstance(one, Tensor) for one in weights.values())


@needs_product
@pytest.mark.parametrize(
    ("kind", "wanted", "format_"),
    [("Q4_0", "auto", "file"), ("Q4_0", "fp32", "fp32"), ("F16", "auto", "fp32")],
)
def test_auto_keeps_the_numbers_of_a_quantised_file(
    kind: str, wanted: str, format_: str, tmp_path: Path
) -> None:
    job = job_of(write_model(tmp_path / "tiny.gguf", kind)).model_copy(update={"dtype": wanted})
    assert make_plan(job).identity()["dtype"] == format_


def test_auto_is_float32_on_a_processor_without_the_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "grouped_works", lambda: False)
    job = job_of(write_model(tmp_path / "tiny.gguf", "Q4_0")).model_copy(update={"dtype": "auto"})
    assert make_plan(job).identity()["dtype"] == "fp32"


@needs_product
def test_plan_names_the_format_so_that_resume_finds_another_one(tmp_path: Path) -> None:
    plan = make_plan(job_of(write_model(tmp_path / "tiny.gguf", "Q4_0")))
    assert plan.identity()["dtype"] == "file"
    assert plan.layouts[:2] == AS_STORED[:2]


@needs_product
@pytest.mark.parametrize("draft_dtype", ["auto", "target"])
def test_plan_counts_a_draft_of_other_files_in_the_format_that_it_gets(
    draft_dtype: str, tmp_path: Path
) -> None:
    target = write_model(tmp_path / "tiny.gguf", "Q4_0")
    draft = write_model(tmp_path / "draft.gguf", "F16")
    pair = load_pair("smollm2").model_copy(update={"target": str(target), "draft": str(draft)})
    words = {"dtype": "file", "draft_dtype": draft_dtype, "device": "cpu", "n": 1}
    plan = make_plan(make_job(pair, max_new_tokens=4, **words))
    drafting, files = load_models(plan).drafting, plan.files.draft
    assert drafting is not None
    assert files is not None
    assert not any(isinstance(one, Grouped) for one in drafting.weights.values())
    assert plan.draft_format.layouts == Layouts()
    assert plan.draft_format.bytes_of(files.shapes) >= files.size


@needs_product
@pytest.mark.parametrize(("family", "kind"), [("qwen3_moe", "Q4_1"), ("gpt_oss", "MXFP4")])
def test_plan_counts_the_bytes_of_the_matrices_as_they_are_kept(
    family: str, kind: str, tmp_path: Path
) -> None:
    """Experts in 4 or 8 bits. Only rows up to the next multiple of 16 are not counted."""
    write_gguf(family, tmp_path / "tiny.gguf", kind=kind)
    checkpoint = open_checkpoint(tmp_path / "tiny.gguf")
    planned = Format(torch.float32, file_layouts(checkpoint)).bytes_of(checkpoint.shapes)
    held = sum(one.nbytes for one in stored(tmp_path / "tiny.gguf").values())
    assert 0.97 * held < planned <= held


@needs_product
def test_head_that_a_file_stores_as_floats_is_planned_as_floats(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path / "tiny.gguf", "Q4_0"))
    kept = tuple(one for one in checkpoint.pieces if one.slot.name != "head.weight")
    floats = replace(checkpoint, pieces=kept, spec=replace(checkpoint.spec, tied=False))
    assert file_layouts(checkpoint)[:2] == AS_STORED[:2]
    assert file_layouts(floats)[:2] == (FILE, None)
    assert layouts_of("file", floats).of("head.weight") is None
