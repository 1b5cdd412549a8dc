"""Shapes of `bass bench`: their parameters, random weights and the work of a pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benches import settings
from transformers import AutoConfig, AutoModelForCausalLM

from bass_cli.bench.floor import pass_work, sizes_of
from bass_cli.bench.preparation import build_loops
from bass_cli.bench.runs import fill, measure_parts
from bass_cli.bench.shapes import LOGIT_SPREAD, SHAPES, random_weights, scale_layers, spec_of
from bass_cli.bench.texts import rows_for
from bass_cli.errors import UserError
from bass_cli.models.decoder import Decoder
from bass_cli.models.families import FAMILIES
from bass_cli.models.recurrent import RecurrentStates
from bass_cli.models.spec import count_parameters
from bass_cli.run.build import Models

PUBLISHED = {
    "qwen2.5-7b": 7.616e9, "qwen2.5-1.5b": 1.544e9, "qwen2.5-0.5b": 0.494e9, "llama-3.1-8b": 8.030e9,
    "llama-3.2-1b": 1.236e9, "opt-13b": 12.85e9, "opt-125m": 125.2e6, "codegen-16b": 16.03e9, "wide-310m": 0.5546e9,
    "pard-0.5b": 0.494e9, "qwen3-8b": 8.19e9, "llama-3.1-70b": 70.55e9, "qwen3-30b-a3b": 30.53e9,
    "gpt-oss-20b": 20.91e9,
}  # fmt: skip
HYBRID = ("qwen3.5-27b", "qwen3.5-35b-a3b")


@pytest.mark.parametrize("name", HYBRID)
def test_shapes_of_hybrids_have_the_parameters_of_transformers(name: str) -> None:
    """Of a model without memory (the meta device), made of the same sizes."""
    shape = SHAPES[name]
    keys = FAMILIES[shape.family].keys
    sizes = {keys[word]: size for word, size in shape._asdict().items() if keys.get(word)}
    with torch.device("meta"):
        config = AutoConfig.for_model(shape.family, **sizes, **shape.more)
        model = AutoModelForCausalLM.from_config(config)
    assert count_parameters(spec_of(name, option="--shape")) == model.num_parameters()


def test_floor_of_a_hybrid_counts_its_states_and_the_keys_of_attention_only() -> None:
    spec = spec_of("tiny-hybrid", option="--shape")
    weights = random_weights(spec, dtype=torch.float32, device=torch.device("cpu"), seed=0)
    others = sum(
        one.numel()
        for name, one in weights.items()
        if name.split(".")[-2] in ("conv", "decay", "step_bias") or "norm" in name
    )
    cost = sizes_of(Decoder(spec, weights))
    assert cost.body + 2 * cost.head + others == count_parameters(spec)
    assert (len(cost.windows), cost.state) == (1, 3 * 6 * 8 * 8)
    found = pass_work(cost, contexts=(5, 7), shared=0, fed=2, logits=2)
    weights_read = 4 * (cost.body + cost.head)
    assert found.bytes == weights_read + 4 * 12 * cost.keys + 2 * 2 * 4 * cost.state


def test_timed_passes_of_a_hybrid_roll_its_states_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a round. Without that a pass would not write its states."""
    given = settings(shape="tiny-hybrid", methods="plain")
    spec = spec_of("tiny-hybrid", option="--shape")
    words = {"dtype": torch.float32, "device": torch.device("cpu"), "seed": 0}
    loop = build_loops(
        Models(Decoder(spec, random_weights(spec, **words))), given, context=40
    ).plain
    fill(loop, rows_for([[1, 2, 3], [9, 8, 7, 6]], 2, given))
    loop.round()
    advanced, decode = list[list[int]](), RecurrentStates.decode_pass

    def noted(self: RecurrentStates, *given: Any) -> Any:
        found = decode(self, *given)
        advanced.append(found.advance.tolist())
        return found

    monkeypatch.setattr(RecurrentStates, "decode_pass", noted)
    measure_parts(loop, 0)
    assert len(advanced) > 3
    assert all(one == [1, 1] for one in advanced)


@pytest.mark.parametrize(("name", "expected"), PUBLISHED.items())
def test_shapes_have_their_models_parameters(name: str, expected: float) -> None:
    assert count_parameters(spec_of(name, option="--shape")) == pytest.approx(expected, rel=0.005)


def test_every_shape_is_checked_and_takes_another_vocabulary() -> None:
    assert set(SHAPES) == {*PUBLISHED, *HYBRID, "tiny", "tiny-moe", "tiny-hybrid"}
    for name in SHAPES:
        assert spec_of(name, option="--shape", vocab=77).vocab == 77
    with pytest.raises(UserError, match=r'--draft-shape: .*"opt-12b"; did you mean "opt-1'):
        spec_of("opt-12b", option="--draft-shape")
    with pytest.raises(UserError, match=r'`draft_shape`: .*"dspark-7b"; did you mean "dspark-8b"'):
        settings(shape="qwen3-8b", draft_shape="dspark-7b", acceptance=["0.5"])


def test_random_logits_have_the_documented_standard_deviation() -> None:
    spec = spec_of("tiny", option="--shape", vocab=3000)
    first, second = (
        random_weights(spec, dtype=torch.float32, device=torch.device("cpu"), seed=seed)
        for seed in (3, 3)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(first["layers.0.norm1.weight"], torch.ones(spec.width))
    assert first["layers.3.down.weight"].std().item() == pytest.approx(80**-0.5, rel=0.1)
    target = Decoder(spec, first)
    models = Models(target)
    loop = build_loops(models, settings(shape="tiny", methods="plain"), context=40).plain
    fill(loop, rows_for([[1, 2, 3], [9, 8, 7, 6], [5]], 3, settings(shape="tiny", methods="plain")))
    tokens, positions = loop.batch.last(1)
    with torch.inference_mode():
        logits = loop.target.forward(tokens, positions, loop.batch.ends(0))
    assert logits.std().item() == pytest.approx(LOGIT_SPREAD, rel=0.15)


def test_tied_heads_and_scaled_layers() -> None:
    spec = spec_of("qwen2.5-0.5b", option="--shape", vocab=50)
    assert spec.tied
    opt = SHAPES["opt-125m"].spec(60)
    weights = random_weights(opt, dtype=torch.bfloat16, device=torch.device("cpu"), seed=0)
    assert weights["head.weight"] is weights["embed.weight"]
    weights["layers.9.down.bias"].fill_(2.0)
    before = {name: weight.clone() for name, weight in weights.items()}
    scale_layers(weights, opt, first=9, scale=0.5)
    changed = {name for name in weights if not torch.equal(weights[name], before[name])}
    assert changed == {
        f"layers.{i}.{name}.weight" for i in (9, 10, 11) for name in ("o", "down")
    } | {"layers.9.down.bias"}
    assert torch.equal(weights["layers.10.o.weight"], before["layers.10.o.weight"] * 0.5)


def test_the_cost_of_a_decoder_counts_the_layers_it_runs() -> None:
    spec = spec_of("tiny", option="--shape")
    whole = Decoder(
        spec, random_weights(spec, dtype=torch.float32, device=torch.device("cpu"), seed=0)
    )
    cost, half = sizes_of(whole), sizes_of(whole.keep_layers([0, 1]))
    norms = (2 * spec.layers + 1) * spec.width
    assert cost.body + 2 * cost.head + norms == count_parameters(spec)
    assert (half.body, half.head, len(half.windows)) == (cost.body / 2, cost.head, 2)
    assert (cost.item, cost.keys, cost.attention) == (4, 2 * 2 * 8, 4 * 6 * 8)


def test_the_cost_of_a_mixture_grows_with_the_experts_that_are_read() -> None:
    spec = spec_of("tiny-moe", option="--shape")  # 2 of 6 experts
    cost = sizes_of(
        Decoder(spec, random_weights(spec, dtype=torch.float32, device=torch.device("cpu"), seed=0))
    )
    norms = (2 * spec.layers + 1) * spec.width + 2 * spec.layers * spec.head_size
    assert cost.body + cost.experts + 2 * cost.head + norms == count_parameters(spec)
    assert cost.experts == 4 * 6 * 3 * 48 * 40
    one, two = cost.read(1), cost.read(2)
    assert one == pytest.approx(cost.experts / 3)
    assert two == pytest.approx(cost.experts * (1 - 4 / 9))
    found = pass_work(cost, contexts=(5,), shared=0, fed=1, logits=1)
    assert found.bytes == pytest.approx((cost.body + one + cost.head + 5 * cost.keys * 4) * 4)
    products = 2 * (cost.body + cost.experts / 3 + cost.head)
    assert found.operations == pytest.approx(products + cost.attention * 5 * 4)
