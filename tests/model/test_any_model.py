"""Models that run through transformers' own layers: with any draft, the tokens are those of plain
decoding, and greedy ones those of `generate`; what our attention cannot run is refused."""

from __future__ import annotations

import copy
import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from any_families import FAMILIES, REFUSED, build_any, config_of, is_installed, write_any
from checkpoints import edit_json
from torch import Tensor
from toys import AtOnce, Reactive, drive, loop_for, plain
from transformers import AutoConfig, AutoModelForCausalLM

from bass_cli.engine.batch import Row
from bass_cli.engine.sampling import RowSampling
from bass_cli.errors import UserError
from bass_cli.formats.checkpoint import Checkpoint, open_checkpoint
from bass_cli.lengths.controllers import Fixed
from bass_cli.models import support
from bass_cli.models.any_model import AnyModel, load_any, prepare
from bass_cli.models.any_probe import probe
from bass_cli.models.block_allocator import Change
from bass_cli.models.kv_cache import Layers
from bass_cli.models.runner import Runner
from bass_cli.models.spec import AnySpec

CPU = torch.device("cpu")
PROMPTS = ([7], [3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0, 4, 5, 2])
LIMIT = 8
HERE = [family for family in FAMILIES if is_installed(family)]


def load(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> AnyModel:
    assert isinstance(checkpoint.spec, AnySpec)
    config = json.loads((checkpoint.path / "config.json").read_text())
    return load_any(checkpoint.path, config, checkpoint.spec, dtype=dtype, device=CPU)


def rows(temperature: float) -> list[Row]:
    return [
        Row(str(p), 0, 3, list(tokens), LIMIT, sampling=RowSampling(temperature=temperature))
        for p, tokens in enumerate(PROMPTS)
    ]


def generated(model: Any, tokens: list[int], **options: Any) -> list[int]:
    """Greedy tokens of transformers' own `generate`."""
    given = torch.tensor([tokens])
    found = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=LIMIT,
        do_sample=False,
        **options,
    )
    return found[0, len(tokens) :].tolist()


def noisy(decoder: AnyModel) -> AnyModel:
    """A draft: the same model with noise on its weights, so that some drafts are accepted."""
    model = copy.deepcopy(decoder.model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.05 * parameter.std() * noise if parameter.dim() > 1 else 0.0)
    return AnyModel(decoder.spec, model)


def test_table_of_architectures_is_the_tested_one() -> None:
    assert len(HERE) >= 30
    assert set(support.TESTED) == set(FAMILIES)
    assert support.REFUSED.keys() == REFUSED.keys()
    table = {one.name: one.how for one in support.architectures()}
    assert (table["llama"], table["falcon"]) == ("native", "refused")
    assert "transformers" in table.values()
    page = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
    rows = [f"| `{one.name}` | {one.how} | {one.reason} |" for one in support.architectures()]
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("| `")][1:] == rows, rows  # below the heading


# The drafters of a family: in `make test` one of three, which alternate, for every second family;
# elsewhere all of them.
@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        case
        for at, family in enumerate(HERE)
        for case in (
            pytest.param(family, (at % 3,), marks=pytest.mark.slow if at % 2 else ()),
            pytest.param(family, (0, 1, 2), marks=pytest.mark.slow),
        )
    ],
)
def test_tokens_equal_plain_decoding_and_generate(
    family: str, kinds: tuple[int, ...], tmp_path: Path
) -> None:
    model = write_any(family, tmp_path)
    checkpoint = open_checkpoint(tmp_path, decoder="transformers")
    target = load(checkpoint)
    draft, accepted = noisy(target), list[int]()
    greedy, sampled = (plain(target, rows(temperature)) for temperature in (0.0, 0.8))
    for p, tokens in enumerate(PROMPTS):
        found = generated(model, tokens)
        assert greedy[str(p), 0] == found
    assert sampled != greedy
    drafters = (draft, AtOnce(draft, 5), "lookup")
    for drafter in (drafters[kind] for kind in kinds):
        loop = loop_for(target, drafter, rows=3, lengths=Reactive())
        assert (
            drive(loop, rows(0.8), on_round=lambda done, _: accepted.extend(done.accepted))
            == sampled
        )
    assert sum(accepted) > 0 or kinds == (2,), "a lookup may find nothing"
    loop = loop_for(target, draft, rows=2, lengths=Fixed(3), coupling="maximal")
    assert drive(loop, rows(0.0)) == greedy


@pytest.mark.parametrize("family", ["gpt_oss", "gemma4_text", "deepseek_v3", "mimo_v2_flash"])
def test_logits_of_all_places_equal_eager_attention(family: str, tmp_path: Path) -> None:
    if not is_installed(family):
        pytest.skip("this version of transformers lacks it")
    model = write_any(family, tmp_path, seed=2)
    target = load(open_checkpoint(tmp_path, decoder="transformers"))
    text = torch.randint(97, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        wanted = model(torch.tensor([text]), use_cache=False).logits[0]
        runner = Runner(target, rows=1, span=40, pending=1)
        runner.open("0", text[:21])
        runner.follow(Change((), (), (((0,), "0"),)))
        positions = torch.arange(20, 40)[None]
        runner.forward(torch.tensor([text[:20]]), positions, [40])  # rejected drafts
        got = runner.forward(torch.tensor([text[20:]]), positions, [40])[0]
    assert wanted.std() > 0.1
    torch.testing.assert_close(got, wanted[20:], atol=2e-4, rtol=0)


def test_store_has_the_shape_of_each_layer() -> None:
    shared = probe(config_of("gemma4_text"))
    assert [call.store for call in shared.calls] == [0, 1, 2, 3, 1, 2] or len(shared.stored) < 6
    assert {call.window for call in shared.calls} == {0, 5}
    latent = probe(config_of("deepseek_v3"))
    assert {(call.key_size, call.value_size, call.size) for call in latent.calls} == {(16, 12, 16)}
    capped = AnyModel(latent, prepare(build_any("deepseek_v3")))
    assert capped.cached == (Layers(3, 4, 16),)


@pytest.mark.parametrize("family", [name for name in REFUSED if is_installed(name)])
def test_families_are_refused_from_config_json_alone(family: str, tmp_path: Path) -> None:
    try:
        config_of(family).save_pretrained(tmp_path)
    except ValueError as error:  # another version checks its values in another way
        pytest.skip(str(error))
    with pytest.raises(UserError) as found:  # there are no weights
        open_checkpoint(tmp_path, decoder="transformers")
    message = str(found.value)
    assert support.REFUSED[family].removeprefix("its layers ") in message
    assert REFUSED[family][1] in message
    assert f'"{family}" cannot run through transformers: ' in message


def test_state_outside_of_attention_is_found_before_the_first_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    write_any("llama", tmp_path)
    forward = LlamaMLP.forward

    def shifted(self: Any, x: Tensor) -> Tensor:  # reads the token before, as RWKV does
        before = torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        return forward(self, 0.5 * (x + before))

    checkpoint = open_checkpoint(tmp_path, decoder="transformers")
    load(checkpoint)
    monkeypatch.setattr(LlamaMLP, "forward", shifted)
    with pytest.raises(UserError, match=r"logits differ from those of its own attention.*layer 0"):
        load(checkpoint)
    with pytest.raises(UserError, match="state outside of attention"):
        load(checkpoint, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "qwen3_moe"])
def test_rounding_of_16_bits_passes_the_check(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    write_any(family, tmp_path)
    assert load(open_checkpoint(tmp_path, decoder="transformers"), dtype).dtype == dtype


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    build_any("olmo2").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r'"model\.layers.1.mlp.up_proj.weight" is missing'):
        load(open_checkpoint(tmp_path, decoder="transformers"))


CODE = """
from pathlib import Path
Path("{mark}").write_text("ran")
from transformers import LlamaConfig, LlamaForCausalLM
class C(LlamaConfig):
    model_type = "unheard"
class M(LlamaForCausalLM):
    config_class = C
"""


@pytest.mark.parametrize("kind", ["unheard", "gemma2"])
def test_remote_code_never_runs(kind: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    write_any("gemma2", tmp_path)
    (tmp_path / "code.py").write_text(CODE.format(mark=mark))
    maps = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
    edit_json(tmp_path / "config.json", model_type=kind, auto_map=maps)
    if kind == "unheard":
        with pytest.raises(UserError, match=r"\(auto_map\), which bass never runs"):
            open_checkpoint(tmp_path)
    else:
        assert load(open_checkpoint(tmp_path)).spec.family == "gemma2"
    assert not mark.exists()


def test_native_decoder_is_the_default_where_there_is_one(tmp_path: Path) -> None:
    write_any("llama", tmp_path)
    assert not isinstance(open_checkpoint(tmp_path).spec, AnySpec)
    assert isinstance(open_checkpoint(tmp_path, decoder="transformers").spec, AnySpec)
    other = tmp_path / "other"
    write_any("gemma2", other)
    found = open_checkpoint(other)
    assert isinstance(found.spec, AnySpec)
    assert found.notes == ("gemma2 runs through transformers' own layers",)
    with pytest.raises(UserError, match='the family "gemma2" is not supported'):
        open_checkpoint(other, decoder="native")


def test_context_of_long_ropes_is_where_results_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    write_any("phi3", tmp_path, original_max_position_embeddings=64, rope_parameters=rope | factors)
    found = open_checkpoint(tmp_path, decoder="transformers")
    assert found.spec.context == 64
    assert "the context is 64 tokens, not 128" in found.notes[1]
    load(found)


def _write_long_rope(folder: Path) -> None:
    """LongRoPE with factors that change all positions beyond 32."""
    original = "original_max_position_embeddings"
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, original: 32}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    write_any("phi3", folder, original_max_position_embeddings=32, rope_parameters=rope)


def _write_table(folder: Path) -> None:
    """Learned positions, a table of 32."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    config = AutoConfig.for_model("gpt2", **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.mark.parametrize("write", [_write_long_rope, _write_table])
def test_drafts_beyond_the_context_change_no_token(write: Any, tmp_path: Path) -> None:
    write(tmp_path)
    target = load(open_checkpoint(tmp_path, decoder="transformers"))
    assert target.context == 32

    def full() -> list[Row]:
        """Rows that end at the context's last position, after 29, 23 and 8 tokens."""
        return [
            Row(str(size), 0, 3, list(range(size)), 32 - size, sampling=RowSampling())
            for size in (3, 9, 24)
        ]

    wanted = plain(target, full())
    for drafter in (noisy(target), "lookup"):
        assert drive(loop_for(target, drafter, rows=3, lengths=Fixed(5)), full()) == wanted


def test_dynamic_rotary_embedding_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config_of("olmo", rope_parameters=rope).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="depends on the longest sequence of a batch"):
        open_checkpoint(tmp_path)


def test_skipped_layers_equal_a_model_without_them(tmp_path: Path) -> None:
    model = write_any("olmo2", tmp_path)
    decoder = load(open_checkpoint(tmp_path, decoder="transformers")).keep_layers([0, 2])
    assert decoder.cached == (Layers(2, 2, 8),)
    model.model.layers = torch.nn.ModuleList([model.model.layers[0], model.model.layers[2]])
    model.config.num_hidden_layers = 2
    tokens = list(PROMPTS[2])
    found = generated(model, tokens, use_cache=False)
    assert plain(decoder, rows(0.0))["2", 0] == found


class Reader:
    """A drafter that keeps what it reads."""

    aux_layers, ahead, cached = (2, 0), 0, ()

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def read(self, tokens: Tensor, hidden: Tensor, step: Any) -> None:
        self.found.append(hidden.clone())


def test_drafters_read_the_outputs_of_layers(tmp_path: Path) -> None:
    model = write_any("gpt_oss", tmp_path)
    outputs: dict[int, Tensor] = {}
    for i in (0, 2):
        model.model.layers[i].register_forward_hook(
            functools.partial(lambda i, _, __, out: outputs.update({i: out}), i)
        )
    tokens = torch.tensor([[5, 9, 2, 44]])
    reader = Reader()
    decoder = load(open_checkpoint(tmp_path, decoder="transformers")).read_by(reader)
    with torch.inference_mode():
        model(tokens)
        cache = Runner(decoder, rows=1, span=8, pending=1).cache
        span = cache.reserve(8)
        places = torch.arange(4)
        step = cache.prefill_pass(
            places,
            places + span.start,
            torch.zeros(4, dtype=torch.int64),
            torch.full((4,), 4),
            places,
            None,
        )
        decoder.final_hidden(tokens, step)
    torch.testing.assert_close(
        reader.found[0], torch.cat([outputs[2], outputs[0]], -1), atol=1e-4, rtol=0
    )


def test_widths_and_rows_do_not_change_tokens(tmp_path: Path) -> None:
    write_any("gemma2", tmp_path)
    target = load(open_checkpoint(tmp_path, decoder="transformers"))
    draft, wanted = noisy(target), plain(target, rows(0.8))
    for count, width in itertools.product((1, 3), (1, 6)):
        loop = loop_for(target, draft, rows=count, lengths=Fixed(width))
        assert drive(loop, rows(0.8)) == wanted


@pytest.mark.parametrize("family", ["gemma2", "olmo2"])
def test_fused_norms_equal_the_modules_own(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from bass_cli.models import any_model

    model = build_any(family)
    norms = {name: one for name, one in model.named_modules() if "norm" in name}
    inputs = {name: torch.randn(2, 5, len(one.weight)) for name, one in norms.items()}
    wanted = {name: one(inputs[name]) for name, one in norms.items()}
    monkeypatch.setattr(any_model.ops, "kind_for", lambda _: "triton")
    any_model._fuse_norms(model)
    for name, one in norms.items():
        assert "forward" in vars(one)
        torch.testing.assert_close(one(inputs[name]), wanted[name], rtol=1e-5, atol=1e-6)


def test_tensors_that_the_model_does_not_use_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from safetensors.torch import load_file, save_file

    build_any("gemma2").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(
        {**load_file(file), "model.other.weight": torch.ones(3)}, file, metadata={"format": "pt"}
    )
    with caplog.at_level("WARNING", "bass"):
        load(open_checkpoint(tmp_path))
    assert "does not use 1 of its tensors, such as model.other.weight" in caplog.text


def test_a_mixture_with_dense_layers_runs_by_the_remedy_of_its_error(tmp_path: Path) -> None:
    write_any("qwen3_moe", tmp_path, mlp_only_layers=[0])
    with pytest.raises(UserError, match=r"`pair\.decoder` transformers may run the model"):
        open_checkpoint(tmp_path)
    assert load(open_checkpoint(tmp_path, decoder="transformers")).spec.layers == 3


def test_windows_of_a_native_mixture_are_those_that_transformers_uses(tmp_path: Path) -> None:
    """Qwen3-MoE has a window in all layers or in none; its config.json has max_window_layers."""
    windows = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}
    write_any("qwen3_moe", tmp_path, **windows)
    native, theirs = (
        open_checkpoint(tmp_path, decoder=way).spec for way in ("auto", "transformers")
    )
    assert not isinstance(native, AnySpec)
    assert native.windows == theirs.windows == (6, 6, 6)
