"""`bass bench` with 8-bit weights: random matrices are quantised, and the floor counts their
bytes."""

import json
import math

import pytest
import torch
from checkpoints import write_pair
from command_line import cli

from bass_cli.bench.floor import pass_work, sizes_of
from bass_cli.bench.rivals import describe
from bass_cli.bench.shapes import SHAPES, random_weights, scale_layers
from bass_cli.config.job import load_pair, make_job
from bass_cli.formats.checkpoint import Checkpoint
from bass_cli.models.decoder import Decoder
from bass_cli.models.spec import MAPS, Layouts
from bass_cli.run.plan import make_plan
from bass_kernels import LAYOUTS, Quantised

CPU = torch.device("cpu")


def tiny(layouts):
    spec = SHAPES["tiny"].spec()
    words = {"dtype": torch.float32, "device": CPU, "seed": 3, "layouts": layouts}
    return spec, random_weights(spec, **words)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_floor_reads_the_bytes_of_quantised_matrices(layout):
    """One byte a number and four a row, instead of four bytes a number."""
    spec, weights = tiny(Layouts(layout, layout))
    maps = [weights[f"layers.{i}.{name}.weight"] for i in range(spec.layers) for name in MAPS]
    assert all(isinstance(one, Quantised) for one in (*maps, weights["head.weight"]))
    expected = sum(math.prod(one.shape) + 4 * len(one) for one in (*maps, weights["head.weight"]))
    words = {"contexts": [0], "shared": 0, "fed": 1, "logits": 1}
    assert pass_work(sizes_of(Decoder(spec, weights)), **words).bytes == expected
    _, plain = tiny(Layouts())
    assert pass_work(sizes_of(Decoder(spec, plain)), **words).bytes > 3 * expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_floor_of_a_mixture_reads_the_bytes_of_its_quantised_experts(layout):
    """A token reads two of six experts."""
    spec = SHAPES["tiny-moe"].spec()
    words = {"dtype": torch.float32, "device": CPU, "seed": 3, "layouts": Layouts(layout)}
    weights = random_weights(spec, **words)
    expected = 4 * len(weights["head.weight"]) * spec.width
    for i in range(spec.layers):
        for name, share in {"qkv": 1, "o": 1, "experts_up": 3, "experts_down": 3}.items():
            one = weights[f"layers.{i}.{name}.weight"]
            assert isinstance(one, Quantised)
            expected += (math.prod(one.shape) + 4 * len(one)) / share
        expected += 4 * spec.experts.total * spec.width  # the router
    words = {"contexts": [0], "shared": 0, "fed": 1, "logits": 1}
    found = pass_work(sizes_of(Decoder(spec, weights)), **words).bytes
    assert found == pytest.approx(expected, rel=1e-9)


def test_random_matrices_are_the_rounded_ones_without_quantisation():
    _, plain = tiny(Layouts())
    spec, weights = tiny(Layouts("int8"))
    for name, one in weights.items():
        if isinstance(one, Quantised):
            assert torch.equal(one.dequantise(), Quantised.of(plain[name], "int8").dequantise())
        else:
            assert torch.equal(one, plain[name])
    before = weights["layers.3.down.weight"].dequantise()
    scale_layers(weights, spec, first=3, scale=0.5)
    assert torch.equal(weights["layers.3.down.weight"].dequantise(), before / 2)


@pytest.mark.parametrize(("dtype", "given"), [("fp8", {"quantization": "fp8"}), ("int8", None)])
def test_vllm_quantises_too_where_it_can(dtype, given, here, monkeypatch):
    """Its activations have the dtype of ours."""
    write_pair(here, prompts=1)
    plan = make_plan(make_job(load_pair("pair.yaml"), device="cpu", dtype=dtype))
    job = describe(plan, longest=9, rows=2)
    assert (job.get("vllm"), job["dtype"]) == (given, "float32")
    # vLLM refuses another method than that of the files
    monkeypatch.setattr(Checkpoint, "quantised_as", ("8 bits (compressed-tensors)",))
    assert "vllm" not in describe(plan, longest=9, rows=2)


def test_bench_of_a_shape_says_its_format():
    flags = ["--shape", "tiny", "--dtype", "int8", "--batch-sizes", "1", "--new-tokens", "4"]
    flags += ["--methods", "plain", "--repeats", "1", "--device", "cpu", "--json"]
    assert json.loads(cli("bench", *flags, code=0).stdout)["pair"]["target"]["dtype"] == "int8"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--dtype", "file"), "random weights have no file"),
        (("--draft-dtype", "int8"), "the draft none loads no weights"),
        (
            ("--draft-shape", "dspark-8b", "--acceptance", "0.5", "--draft-dtype", "bf16"),
            "a draft that reads hidden states computes in the target's format",
        ),
    ],
)
def test_formats_that_random_weights_cannot_have_are_refused(flags, message):
    assert message in cli("bench", "--shape", "qwen3-8b", "--device", "cpu", *flags, code=2).stderr
