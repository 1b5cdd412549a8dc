"""Multimodal checkpoints: the text part equals transformers' own model on text, in old and new
spellings of names; other parts are not read."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from any_families import write_any
from checkpoints import edit_json, write_tokenizer
from safetensors.torch import load_file, save_file
from test_parity import assert_same, decoder_of, expected, greedy
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bass_cli.config.job import Job
from bass_cli.errors import UserError
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.hf_config import spec_of_config
from bass_cli.formats.text_part import DEFAULTS, RENAMED, WRAPPERS
from bass_cli.models.any_model import load_any
from bass_cli.models.families import FAMILIES
from bass_cli.models.spec import AnySpec, parameters
from bass_cli.run.plan import make_plan

_TEXT = {"vocab_size": 301, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
         "num_hidden_layers": 2, "intermediate_size": 80, "max_position_embeddings": 256,
         "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
           "image_size": 28, "patch_size": 14}  # fmt: skip
_CLIP = {**_VISION, "model_type": "clip_vision_model"}
_SIGLIP = {**_VISION, "model_type": "siglip_vision_model"}
_QWEN = {
    "depth": 1,
    "embed_dim": 32,
    "hidden_size": 48,
    "num_heads": 2,
    "out_hidden_size": 48,
    "intermediate_size": 48,
}
_MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 700.0}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
           "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12, "rope_parameters": {
               **_MROPE, "mrope_section": [1, 1, 0], "mrope_interleaved": True, "partial_rotary_factor": 0.25}}  # fmt: skip
# wrapper: what its text_config says besides the sizes, its vision_config
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": ({"query_pre_attn_scalar": 24, "sliding_window": 4,
                "layer_types": ["sliding_attention", "full_attention"]}, _SIGLIP),
    "idefics3": ({"model_type": "llama"}, _VISION),
    "internvl": ({"model_type": "qwen2"}, {**_VISION, "image_size": [28, 28], "patch_size": [14, 14]}),
    "llava": ({"model_type": "llama"}, _CLIP),
    "llava_next": ({"model_type": "mistral", "sliding_window": 5}, _CLIP),
    "llava_onevision": ({"model_type": "qwen2"}, _SIGLIP),
    "mistral3": ({"model_type": "mistral", "sliding_window": None}, {**_VISION, "model_type": "pixtral", "head_dim": 16}),
    "qwen2_vl": ({"head_dim": 8, "rope_parameters": _MROPE}, _QWEN),
    "qwen2_5_vl": ({"head_dim": 8, "rope_parameters": _MROPE}, _QWEN),
    "qwen3_vl": ({"rope_parameters": {**_MROPE, "mrope_section": [2, 3, 3], "mrope_interleaved": True}},
                 {**_QWEN, "hidden_size": 32, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}),
    "qwen3_vl_moe": ({"rope_parameters": {**_MROPE, "mrope_section": [2, 3, 3], "mrope_interleaved": True},
                      "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
                     {**_QWEN, "hidden_size": 32, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}),
    "qwen3_5": (_HYBRID, {**_QWEN, "num_position_embeddings": 16}),
    "qwen3_5_moe": ({**_HYBRID, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                     "shared_expert_intermediate_size": 20}, {**_QWEN, "num_position_embeddings": 16}),
    "smolvlm": ({"model_type": "llama"}, _VISION),
}  # fmt: skip


_ZERO_CENTRED = ("gemma3", "qwen3_5", "qwen3_5_moe")  # their norms store the weight minus one


def build(wrapper: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A tiny model with random weights, in float32."""
    text, vision = KINDS[wrapper]
    config = AutoConfig.for_model(
        wrapper, text_config={**_TEXT, **text, **overrides}, vision_config=dict(vision)
    )
    model = AutoModelForImageTextToText.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            wide = 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            one = parameter.dim() == 1 and name.endswith("weight") and wrapper not in _ZERO_CENTRED
            parameter.copy_(noise * (0.5 if "embed_tokens" in name else wide) + one)
    return model.eval().float()


def write(wrapper: str, folder: Path, *, spelling: str = "saved") -> PreTrainedModel:
    """Write the model as transformers saves it ("saved") or with the names that it has in
    memory ("memory"): for most wrappers the old and the new spelling."""
    model = build(wrapper)
    model.save_pretrained(folder)
    if spelling == "memory":
        tied = model.config.tie_word_embeddings
        save_file(
            {
                name: tensor.contiguous().clone()
                for name, tensor in model.state_dict().items()
                if not (tied and name == "lm_head.weight")
            },
            folder / "model.safetensors",
            {"format": "pt"},
        )
    return model


@pytest.mark.parametrize("spelling", ["saved", "memory"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_text_logits_equal_transformers(wrapper: str, spelling: str, tmp_path: Path) -> None:
    model = write(wrapper, tmp_path, spelling=spelling)
    assert_same(decoder_of(tmp_path), model)


def test_both_spellings_of_names_are_tested(tmp_path: Path) -> None:
    names = {}
    for spelling in ("saved", "memory"):
        write("gemma3", tmp_path / spelling, spelling=spelling)
        names[spelling] = load_file(tmp_path / spelling / "model.safetensors").keys()
    assert "language_model.model.norm.weight" in names["saved"]
    assert "model.language_model.norm.weight" in names["memory"]


@pytest.mark.parametrize("wrapper", ["gemma3", "mistral3", "qwen2_5_vl", "qwen3_vl"])
def test_greedy_tokens_equal_those_of_generate(wrapper: str, tmp_path: Path) -> None:
    model = write(wrapper, tmp_path)
    prompts = [[5, 9, 31, 7], [44, 8, 120]]
    for prompt, ids in zip(prompts, greedy(decoder_of(tmp_path), prompts, 12), strict=True):
        theirs = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False,
            eos_token_id=None,
        )  # fmt: skip
        assert ids == theirs[0, len(prompt) :].tolist()


def test_flat_configuration_of_qwen2_vl_is_read(tmp_path: Path) -> None:
    """The files on the hub: the text model's keys at the top, and rotary embedding of type mrope."""
    model = write("qwen2_vl", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    text |= {"rope_theta": 700.0, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    del text["rope_parameters"], text["layer_types"]
    path.write_text(json.dumps({**text, **config}))
    assert_same(decoder_of(tmp_path), model)
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    text_ids = [3, 8, 200, 17]
    torch.testing.assert_close(expected(theirs, text_ids), expected(model, text_ids))


@pytest.mark.parametrize("kind", DEFAULTS)
def test_sparse_text_configs_have_the_defaults_of_transformers(kind: str) -> None:
    family, ours = FAMILIES[RENAMED.get(kind, kind)], DEFAULTS[kind]
    theirs = CONFIG_MAPPING[kind]()
    named = {**family.defaults, **ours}
    for field in dataclasses.fields(type(theirs)):
        if field.name in named and field.name != "layer_types":
            made = field.default_factory
            value = field.default if made is dataclasses.MISSING else made()
            assert named[field.name] == value, field.name
    wrapper = next(key for key, value in WRAPPERS.items() if value == kind)
    sparse = spec_of_config({"model_type": wrapper, "text_config": {}}, place="")
    full = json.loads(theirs.to_json_string(use_diff=False))
    wide = spec_of_config({"model_type": wrapper, "text_config": full}, place="")
    # a missing key of tied embeddings is settled by the tensors
    assert sparse == dataclasses.replace(wide, tied=True)


def test_language_model_may_keep_the_names_of_the_multimodal_one(tmp_path: Path) -> None:
    """As transformers accepts it for Qwen3.5, beside tensors of images, which are not read."""
    model = write("qwen3_5", tmp_path, spelling="memory")
    config = json.loads((tmp_path / "config.json").read_text())["text_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = load_file(tmp_path / "model.safetensors").keys()
    assert any(name.startswith("model.visual.") for name in names)
    assert "model.language_model.norm.weight" in names
    assert_same(decoder_of(tmp_path), model)
    assert open_checkpoint(tmp_path).notes == ()


def test_other_parts_are_neither_loaded_nor_counted(tmp_path: Path) -> None:
    write("gemma3", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.spec.family == "gemma3_text"
    count = sum(
        torch.Size(shape).numel()
        for name, shape in parameters(checkpoint.spec).items()
        if name != "head.weight"
    )
    assert checkpoint.size == 4 * count
    (note,) = checkpoint.notes
    assert "only the text part of this gemma3 model is loaded" in note
    assert checkpoint.eos_ids == (2,)


def test_tensor_of_no_known_part_is_an_error_that_names_it(tmp_path: Path) -> None:
    write("mistral3", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "language_model.model.gate.weight": torch.zeros(3)}, file)
    with pytest.raises(UserError, match=r'tensor "gate\.weight" is unknown for the family mistral'):
        open_checkpoint(tmp_path)
    twice = {**tensors, "model.language_model.norm.weight": torch.zeros(48)}
    save_file(twice, file)
    with pytest.raises(UserError, match=r'two tensors are the same one, "norm\.weight"'):
        open_checkpoint(tmp_path)


def test_published_names_have_slots_and_those_of_images_none(tmp_path: Path) -> None:
    write("qwen3_vl", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    for name in (
        "model.language_model.layers.1.self_attn.q_norm.weight",
        "layers.1.self_attn.q_norm.weight",
    ):
        slot = checkpoint.slot_of(name)
        assert slot is not None
        assert slot.name == "layers.1.q_norm.weight"
    assert checkpoint.slot_of("model.visual.merger.norm.weight") is None
    with pytest.raises(UserError, match="is unknown for the family qwen3"):
        checkpoint.slot_of("model.hearing.weight")


@pytest.mark.parametrize(("changes", "message"), [
    ({"text_config": None}, 'config.json: key "text_config": a mapping is needed, not None'),
    ({"text_config": {"model_type": "unheard"}}, 'key "model_type": the family "unheard"'),
    ({"text_config": {"model_type": "mamba"}}, "this model keeps state outside of attention: layers 0, 1, 2"),
    ({"text_config": {**_TEXT, "model_type": "llama", "hidden_size": 0}},
     'config.json: text_config: key "hidden_size": a number above 0'),
    ({"quantization_config": {"quant_method": "unheard"}}, 'key "quantization_config.quant_method"'),
])  # fmt: skip
def test_faults_of_the_text_part_name_the_key(changes: dict, message: str, tmp_path: Path) -> None:
    write("llava", tmp_path)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(UserError, match=message):
        open_checkpoint(tmp_path)


def test_target_and_draft_may_both_be_multimodal(tmp_path: Path) -> None:
    for name in ("target", "draft"):
        write("gemma3", tmp_path / name)
        write_tokenizer(tmp_path / name)
    shutil.copy(tmp_path / "target/config.json", tmp_path / "draft/config.json")
    pair = {"name": "p", "target": str(tmp_path / "target"), "draft": str(tmp_path / "draft")}
    plan = make_plan(Job(pair=pair, n=1, device="cpu", batch_size=1))
    assert sum("only the text part" in note for note in plan.notes) == 2


def test_page_of_architectures_lists_the_wrappers() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "models.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith("Of a multimodal")]
    assert re.findall("`(.*?)`", line) == [*WRAPPERS]


def test_wrappers_exist_in_transformers() -> None:
    assert {type(AutoConfig.for_model(name)).__module__.split(".")[0] for name in WRAPPERS} == {
        transformers.__name__
    }


@pytest.mark.parametrize("outer", [{}, {"eos_token_id": None}])
@pytest.mark.parametrize(("wrapper", "family"), [("llava", "llama"), ("aya_vision", "cohere2")])
def test_end_of_sequence_may_be_named_for_the_text_part_only(
    wrapper: str, family: str, outer: dict[str, Any], tmp_path: Path
) -> None:
    """Natively (llama) and through transformers (cohere2)."""
    write_any(family, tmp_path)
    place = tmp_path / "config.json"
    text = json.loads(place.read_text()) | {"eos_token_id": 5}
    (tmp_path / "generation_config.json").unlink()
    place.write_text(
        json.dumps({"model_type": wrapper, "text_config": text, "vision_config": {}} | outer)
    )
    found = open_checkpoint(tmp_path)
    assert found.eos_ids == (5,)
    note = f"only the text part of this {wrapper} model is loaded; prompts cannot have images"
    assert any(note in one for one in found.notes)


def _wrapped(folder: Path, **outer: Any) -> None:
    """Put the config.json of a text model into that of a multimodal one, without tied heads."""
    place = folder / "config.json"
    text = json.loads(place.read_text()) | {"tie_word_embeddings": False}
    wrapper = {"model_type": "aya_vision", "text_config": text, "vision_config": {}}
    place.write_text(json.dumps(wrapper | outer))


def test_a_head_that_only_the_outer_config_ties_is_the_embedding(tmp_path: Path) -> None:
    model = write_any("cohere2", tmp_path, tie_word_embeddings=True)
    _wrapped(tmp_path, tie_word_embeddings=True)
    found = open_checkpoint(tmp_path)
    assert isinstance(found.spec, AnySpec)
    config = json.loads((tmp_path / "config.json").read_text())
    decoder = load_any(
        tmp_path, config, found.spec, dtype=torch.float32, device=torch.device("cpu")
    )
    embedding = model.get_input_embeddings().weight
    torch.testing.assert_close(decoder.weights["head.weight"], embedding, atol=0, rtol=0)


def test_a_prefix_that_attends_to_later_tokens_is_refused(tmp_path: Path) -> None:
    """transformers sets the key for PaliGemma if the file lacks it."""
    write_any("gemma2", tmp_path)
    _wrapped(tmp_path, model_type="paligemma")
    with pytest.raises(UserError, match="tokens of a prompt attend to later ones"):
        open_checkpoint(tmp_path)
