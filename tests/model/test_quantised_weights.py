"""Matrices that are quantised while they are loaded: their values, the parts of split models, new
weights in place, and the logits of transformers with the same rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, build_model, shallow, write_checkpoint, write_gguf
from safetensors.torch import load_file, save_file
from test_updates import IDS, logits_of, published
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from bass_cli.errors import UserError
from bass_cli.formats import tensor_content
from bass_cli.formats.checkpoint import Checkpoint, open_checkpoint
from bass_cli.formats.weights import load, size_of
from bass_cli.models.decoder import Decoder
from bass_cli.models.partition import Share, held_part
from bass_cli.models.spec import EVERY_MAP, EXPERT_MAPS, MAPS, Layouts
from bass_cli.models.weights import Weights
from bass_cli.run.build import Models
from bass_cli.run.pair import Files
from bass_cli.run.updates import Updates
from bass_kernels import LAYOUTS, Quantised

CPU = torch.device("cpu")
MOST = {"int8": 127, "fp8": 448}


def rounded(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """The values of a layout nearest to x [..., K] over its scales, in float32, and the scales."""
    scales = x.abs().amax(-1, keepdim=True) / MOST[layout]
    if layout == "int8":
        return (x / scales).round(), scales
    return (x / scales).to(torch.float8_e4m3fn).float(), scales


def quantised(checkpoint: Checkpoint, layout: str, **options: Any) -> dict[str, Any]:
    return load(checkpoint, dtype=torch.float32, device=CPU, layouts=Layouts(layout), **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_of_layers_are_the_rounded_ones_of_loading(
    family: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that are stored transposed or in another order of rows, read a few rows at a
    time. All else is stored as without quantisation."""
    write_checkpoint(family, tmp_path, **shallow(family))
    checkpoint = open_checkpoint(tmp_path)
    whole = load(checkpoint, dtype=torch.float32, device=CPU)
    monkeypatch.setattr(tensor_content, "ELEMENTS", {"cpu": 200})
    read: list[int] = []
    found = quantised(checkpoint, layout, on_read=read.append)
    assert sum(read) == checkpoint.size == size_of(checkpoint, None, Layouts(layout))
    matrices = {name for name, one in found.items() if isinstance(one, Quantised)}
    layers = range(checkpoint.spec.layers)
    maps = {f"layers.{i}.{name}.weight" for i in layers for name in (*EVERY_MAP, *EXPERT_MAPS)}
    assert matrices == maps & found.keys()  # a mixture of experts has no "up" and "down"
    assert {name.split(".")[2] for name in matrices} >= {"qkv", "o"}
    for name, one in found.items():
        if name not in matrices:
            assert torch.equal(one, whole[name]), name
            continue
        values, scales = rounded(whole[name], layout)
        assert torch.equal(one.values.float(), values), name
        assert torch.equal(one.scales, scales[:, 0]), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gptj", "codegen", "qwen3_moe"])
def test_parts_of_a_split_model_have_the_values_of_the_whole(
    family: str, layout: str, tmp_path: Path
) -> None:
    """Also where a process has some columns of each row: the scale is that of the whole row."""
    write_checkpoint(family, tmp_path, shards=False)
    checkpoint = open_checkpoint(tmp_path)
    whole = quantised(checkpoint, layout)
    for rank in range(2):
        share, read = Share(rank, 2), list[int]()
        part = quantised(checkpoint, layout, share=share, on_read=read.append)
        assert sum(read) == size_of(checkpoint, share, Layouts(layout))
        for name, one in part.items():
            if not isinstance(one, Quantised):
                continue
            found = held_part(checkpoint.spec, name, share)
            assert found is not None
            index = torch.cat([torch.arange(run.start, run.stop) for run in found.runs])
            expected = whole[name].dequantise().index_select(found.dim, index)
            assert torch.equal(one.dequantise(), expected), name


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_parts_of_a_split_8_bit_head_are_those_of_the_whole_one(
    family: str, tmp_path: Path
) -> None:
    """Untied and tied. The vocabulary is no multiple of the processes; the last part has zeros."""
    write_checkpoint(family, tmp_path, shards=False, vocab_size=101)
    checkpoint = open_checkpoint(tmp_path)
    words: dict[str, Any] = {"dtype": torch.float32, "device": CPU}
    words["layouts"] = Layouts("int8", "int8")
    whole = load(checkpoint, **words)["head.weight"].dequantise()
    parts = [load(checkpoint, share=Share(rank, 2), **words) for rank in range(2)]
    joined = torch.cat([part["head.weight"].dequantise() for part in parts])
    assert torch.equal(joined[:101], whole)
    assert not joined[101:].any()
    assert len(joined) == 102


def test_new_numbers_of_a_tied_8_bit_head_have_the_dtype_of_the_embedding() -> None:
    """A tensor of either name is then rounded alike, and both may come in one update."""
    embed = torch.randn(5, 4).bfloat16()
    weights = Weights(
        {"embed.weight": embed, "head.weight": Quantised.of(embed, "int8")}, tied=True
    )
    assert weights.dtype_written("head.weight") == torch.bfloat16
    alone = Weights({"head.weight": Quantised.of(embed, "int8")})
    assert alone.dtype_written("head.weight") == torch.float32


def test_gguf_blocks_are_dequantised_and_quantised_by_row(tmp_path: Path) -> None:
    write_gguf("llama", tmp_path / "tiny.gguf", kind="Q4_1", seed=1)
    checkpoint = open_checkpoint(tmp_path / "tiny.gguf")
    whole = load(checkpoint, dtype=torch.float32, device=CPU)
    found = quantised(checkpoint, "int8")
    for name in MAPS:
        values, _ = rounded(whole[f"layers.1.{name}.weight"], "int8")
        assert torch.equal(found[f"layers.1.{name}.weight"].values.float(), values)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, layout: str) -> Tensor:
    """Multiply x [..., K] by a rounded weight [N, K]. With fp8, x is rounded too."""
    values, scales = rounded(weight, layout)
    tokens: Tensor | float = 1.0
    if layout == "fp8":
        x, tokens = rounded(x, layout)
    out = (x.double() @ values.double().T * tokens * scales[:, 0]).float()
    return out if bias is None else out + bias


def round_experts(module: Any, layout: str) -> None:
    """Let a module of all experts multiply rounded weights, token by token."""
    clamped = hasattr(module, "gate_up_proj_bias")  # gpt-oss, which has [inputs, outputs]
    maps = []
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(module, name).data
        bias = getattr(module, f"{name}_bias", [None] * len(weight))
        maps.append((weight.transpose(1, 2) if clamped else weight, bias))
    (ups, up_bias), (downs, down_bias) = maps

    def one(x: Tensor, expert: int) -> Tensor:
        both = product(x, ups[expert], up_bias[expert], layout)
        if clamped:
            inner = module._apply_gate(both)
        else:
            gate, up = both.chunk(2)
            inner = module.act_fn(gate) * up
        return product(inner, downs[expert], down_bias[expert], layout)

    def forward(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        rows = [
            sum(weight * one(token, expert) for expert, weight in zip(chosen, shares, strict=True))
            for token, chosen, shares in zip(x, ids.tolist(), weights, strict=True)
        ]
        return torch.stack(rows)  # type: ignore[arg-type]

    module.forward = forward


def with_rounding(model: Any, layout: str) -> Any:
    """A model of transformers whose layers multiply rounded weights, and with fp8 also rounded
    activations. Maps that are fused in our decoder have the same rows, so the same scales."""

    def replace(module: Any) -> None:
        conv = isinstance(module, Conv1D)
        weight = module.weight.data.T if conv else module.weight.data
        module.forward = lambda x: product(x, weight, module.bias, layout)

    for name, module in model.named_modules():
        plain = name.endswith(("lm_head", "in_proj_a", "in_proj_b", "in_proj_ba", "expert_gate"))
        if isinstance(module, (torch.nn.Linear, Conv1D)) and not plain:
            replace(module)
        if type(module).__name__.endswith("Experts"):
            round_experts(module, layout)
    return model


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_with_the_same_rounding(
    family: str, layout: str, tmp_path: Path
) -> None:
    """An activation at the border of two values of e4m3 may be rounded to the other one, which
    moves logits by some thousandths; without any rounding they differ by some hundredths."""
    words = shallow(family)
    model = write_checkpoint(family, tmp_path, **words)
    checkpoint = open_checkpoint(tmp_path)
    decoder = Decoder(checkpoint.spec, quantised(checkpoint, layout))
    with torch.inference_mode():
        plain = model(torch.tensor([IDS])).logits[0, 1:]
        expected = with_rounding(model, layout)(torch.tensor([IDS])).logits[0, 1:]
        found = logits_of(decoder)
    error = ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median()
    moved = ((plain - expected).norm(dim=-1) / expected.norm(dim=-1)).median()
    assert error < (1e-5 if layout == "int8" else 2e-3)
    assert error < moved / 5


def loaded(path: Path, layout: str) -> Updates:
    checkpoint = open_checkpoint(path)
    unused: Any = None
    models = Models(Decoder(checkpoint.spec, quantised(checkpoint, layout)))
    return Updates(models, Files(checkpoint, unused, None, 0, None, frozenset()))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["qwen2", "gpt2", "codegen", "gemma3_text", "qwen3_moe"])
def test_updated_model_has_the_weights_of_a_loaded_one(
    family: str, layout: str, tmp_path: Path
) -> None:
    """By tensors and by files. Nothing moves in memory."""
    words = shallow(family)
    write_checkpoint(family, tmp_path / "old", seed=1, **words)
    write_checkpoint(family, tmp_path / "new", seed=2, **words)
    expected = loaded(tmp_path / "new", layout).models.target.weights
    tensors = published(build_model(family, seed=2, **words), tmp_path / "published")
    for given in (tensors, tmp_path / "new"):
        updates = loaded(tmp_path / "old", layout)
        weights = updates.models.target.weights
        places = {
            n: one.values.data_ptr() for n, one in weights.items() if isinstance(one, Quantised)
        }
        updates.update(given)
        for name, place in places.items():
            one, due = weights[name], expected[name]
            assert isinstance(one, Quantised)
            assert isinstance(due, Quantised)
            assert one.values.data_ptr() == place
            assert torch.equal(one.dequantise(), due.dequantise()), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weight_that_is_not_finite_is_refused_by_name(layout: str, tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path, shards=False)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=rf"layers\.1\.down\.weight has numbers .* {layout}"):
        quantised(open_checkpoint(tmp_path), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tied_head_that_is_not_finite_is_refused_by_loading_and_by_updates(
    layout: str, tmp_path: Path
) -> None:
    words: Any = {"tie_word_embeddings": True, "shards": False}
    layouts = Layouts(layout, layout)
    for name in ("old", "new"):
        write_checkpoint("qwen2", tmp_path / name, **words)
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    tensors["model.embed_tokens.weight"][3, 4] = torch.nan
    save_file(tensors, tmp_path / "new" / "model.safetensors")
    message = rf"head\.weight has numbers .* {layout}"
    with pytest.raises(UserError, match=message):
        load(open_checkpoint(tmp_path / "new"), dtype=torch.float32, device=CPU, layouts=layouts)
    checkpoint = open_checkpoint(tmp_path / "old")
    weights = load(checkpoint, dtype=torch.float32, device=CPU, layouts=layouts)
    unused: Any = None
    files = Files(checkpoint, unused, None, 0, None, frozenset())
    with pytest.raises(UserError, match=message):
        Updates(Models(Decoder(checkpoint.spec, weights)), files).update(tmp_path / "new")


@pytest.mark.parametrize("tied", [True, False])
def test_head_in_eight_bits_follows_its_embedding(tied: bool, tmp_path: Path) -> None:
    """A tied head is a copy in 8 bits, which new weights of the embedding renew."""
    words = {"tie_word_embeddings": tied}
    write_checkpoint("qwen2", tmp_path / "old", seed=1, **words)
    write_checkpoint("qwen2", tmp_path / "new", seed=2, **words)
    new = load(open_checkpoint(tmp_path / "new"), dtype=torch.float32, device=CPU)
    checkpoint = open_checkpoint(tmp_path / "old")
    weights = load(checkpoint, dtype=torch.float32, device=CPU, layouts=Layouts("int8", "int8"))
    assert isinstance(weights["embed.weight"], Tensor)
    decoder = Decoder(checkpoint.spec, weights)
    unused: Any = None
    files = Files(checkpoint, unused, None, 0, None, frozenset())
    for given in (build_model("qwen2", seed=2, **words).state_dict(), tmp_path / "new"):
        head = decoder.weights["head.weight"]
        assert isinstance(head, Quantised)
        head.write_rows(0, torch.zeros(head.shape))
        Updates(Models(decoder), files).update(given)
        values, scales = rounded(new["head.weight"], "int8")
        assert torch.equal(head.values.float(), values)
        assert torch.equal(head.scales, scales[:, 0])
