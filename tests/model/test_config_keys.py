"""Every key of a configuration is read, harmless, refused or named in a note. The lists are compared
with the classes and the modelling code of transformers, and with the keys of the gguf package."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from checkpoints import FAMILIES as WRITTEN
from checkpoints import edit_json, write_checkpoint, write_gguf, write_tokenizer
from heads import config_of as block_config
from transformers import AutoConfig

from bass_cli.config.job import Job
from bass_cli.errors import UserError
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.config_keys import HARMLESS, NEUTRAL, ROPE_TYPES
from bass_cli.formats.draft_heads import head_of_config, notes_of_head
from bass_cli.formats.gguf_config import HARMLESS as GGUF_HARMLESS
from bass_cli.formats.gguf_config import NEUTRAL as GGUF_NEUTRAL
from bass_cli.formats.gguf_config import reads as gguf_reads
from bass_cli.formats.gguf_tensors import ARCHITECTURES
from bass_cli.formats.hf_config import notes_of_config, spec_of_config
from bass_cli.models.families import FAMILIES
from bass_cli.run.plan import make_plan

# Families of transformers; others are classes of checkpoints.py
PLAIN = [
    name
    for name in WRITTEN
    if name != "llama3" and type(AutoConfig.for_model(name)).__module__.startswith("transformers.")
]
# attributes of a config object that are no keys, and those of other models in the same module
INTERNAL = {"_attn_implementation", "get_text_config", "image_token_id", "mm_tokens_per_image"}


def defaults_of(family: str) -> dict[str, Any]:
    """The fields of the configuration class of transformers, with their defaults."""
    found = {}
    for field in dataclasses.fields(type(AutoConfig.for_model(family))):
        made = field.default_factory is not dataclasses.MISSING
        found[field.name] = field.default_factory() if made else field.default
    return found


def covered(family: str) -> set[str]:
    kind = FAMILIES[family]
    return {*kind.reads, *kind.aliases, *HARMLESS, *NEUTRAL}


@pytest.mark.parametrize("family", PLAIN)
def test_every_config_field_is_read_or_harmless_or_refused(family: str) -> None:
    assert set(defaults_of(family)) - covered(family) == set()
    assert FAMILIES[family].aliases == type(AutoConfig.for_model(family)).attribute_map


@pytest.mark.parametrize("family", PLAIN)
def test_defaults_equal_those_of_transformers(family: str) -> None:
    theirs, kind = defaults_of(family), FAMILIES[family]
    different = {
        key: (value, theirs[key])
        for key, value in kind.defaults.items()
        if key in theirs and value != theirs[key]
    }
    assert different == {}
    for key in theirs.keys() & NEUTRAL.keys() - kind.reads - kind.aliases.keys():
        assert theirs[key] is None or theirs[key] in NEUTRAL[key]


@pytest.mark.parametrize("family", [*PLAIN, "ministral"])
def test_every_key_that_the_modelling_code_reads_is_listed(family: str) -> None:
    name = family.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    if name == family:
        code = [module]
    else:  # the module has classes of images too
        own = (
            one
            for one in vars(module).values()
            if getattr(one, "__module__", "") == module.__name__
        )
        code = [one for one in own if not re.search("Vision|ForConditional|Model$", one.__name__)]
    shared = (transformers.masking_utils, transformers.cache_utils)
    text = "".join(inspect.getsource(one) for one in (*code, *shared))
    read = set(re.findall(r"\bconfig\.(\w+)", text))
    read |= set(re.findall(r"getattr\((?:self\.|decoder_|text_)?config, \"(\w+)\"", text))
    assert len(read) > 15
    assert read - covered({"ministral": "mistral"}.get(family, family)) - INTERNAL == set()


def test_every_generation_default_is_harmless() -> None:
    assert set(transformers.GenerationConfig._get_default_generation_params()) <= HARMLESS


def test_rope_types_use_the_keys_that_transformers_uses() -> None:
    functions = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS
    assert set(ROPE_TYPES) - {"default"} <= set(functions)
    for kind in set(ROPE_TYPES) - {"default"}:
        used = set(re.findall(r"rope_parameters(?:_dict)?(?:\[|\.get\()\"(\w+)\"",
                              inspect.getsource(functions[kind])))  # fmt: skip
        assert used - {"rope_theta", "partial_rotary_factor"} == set(ROPE_TYPES[kind])


def edited(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    edit_json(path, **changes)
    return path


@torch.inference_mode()
def logits(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(torch.arange(3, 40)[None], use_cache=False).logits


@pytest.mark.parametrize("family", PLAIN)
def test_harmless_keys_do_not_change_the_logits_of_transformers(
    family: str, tmp_path: Path
) -> None:
    write_checkpoint(family, tmp_path, shards=False)
    before, config = logits(tmp_path), json.loads((tmp_path / "config.json").read_text())
    theirs = {**config, **defaults_of(family)}
    changes = {
        key: not value if isinstance(value, bool)
        else 5 if key.endswith("_token_id")  # an id of this vocabulary
        else value + 7 if type(value) is int else 0.37
        for key, value in theirs.items()
        if key in HARMLESS and isinstance(value, (bool, int, float)) and "return" not in key
        and "output" not in key
    }  # fmt: skip
    assert len(changes) > 3
    edited(tmp_path, **changes)
    assert torch.equal(logits(tmp_path), before)
    assert open_checkpoint(tmp_path).notes == ()


@pytest.mark.parametrize("family", PLAIN)
def test_configs_that_transformers_writes_need_no_note(family: str, tmp_path: Path) -> None:
    write_checkpoint(family, tmp_path, shards=False)
    assert open_checkpoint(tmp_path).notes == ()


def test_unread_key_is_named_with_its_value(tmp_path: Path) -> None:
    write_checkpoint("qwen2", tmp_path, shards=False)
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0, "mrope_section": [2, 3]}
    place = edited(tmp_path, mlp_bias=True, unheard_of=None, new_scale=2.5, rope_parameters=rope)
    (note,) = open_checkpoint(tmp_path).notes
    assert note.startswith(f"{place}: bass does not read these keys: ")
    assert "mlp_bias (True), new_scale (2.5), rope_parameters.mrope_section ([2, 3]); if" in note
    assert "unheard_of" not in note


def test_note_shortens_hostile_keys() -> None:
    config = json.loads(AutoConfig.for_model("llama").to_json_string(use_diff=False))
    hostile = {"\x1b]0;x\x07" + "a" * 10**5: "\x1b[31m" * 10**4, **{f"k{i}": 1 for i in range(999)}}
    (note,) = notes_of_config({**config, **hostile}, place="x")
    assert len(note) < 600
    assert note.isprintable()
    assert " and 988 more" in note


def test_note_says_that_own_code_is_not_run(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path, shards=False)
    edited(tmp_path, auto_map={"AutoModelForCausalLM": "modeling.Own"})
    assert "the model's own code; it reads the model as llama" in open_checkpoint(tmp_path).notes[0]


def test_model_used_twice_has_one_note(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    write_checkpoint("llama", tmp_path, shards=False)
    edited(tmp_path, new_scale=2.5)
    pair = {"name": "same", "target": str(tmp_path), "draft": str(tmp_path)}
    plan = make_plan(Job(pair=pair, n=1, device="cpu", batch_size=1))
    assert len([note for note in plan.notes if "new_scale" in note]) == 1


REFUSED: dict[str, Any] = {
    "is_encoder_decoder": True, "add_cross_attention": True, "pruned_heads": {"0": [1]},
    "per_layer_config": {"0": {"num_attention_heads": 3}}, "text_config": {"hidden_size": 4}, "num_experts": 8,
    "is_causal": False, "use_bidirectional_attention": True, "attention_chunk_size": 64,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "clip_qkv": 8.0, "rope_interleaved": True,
    "no_rope_layer_interval": 4, "no_rope_layers": [1, 0, 1], "embedding_multiplier": 12.0, "logits_scaling": 8.0,
    "residual_multiplier": 0.22, "attention_multiplier": 0.01, "partial_rotary_factor": 0.5,
    "use_mrope": True, "rotary_pct": 0.25, "alibi": True, "use_qk_norm": True,
    "sliding_window": 5, "layer_types": ["sliding_attention"] * 3,
}  # fmt: skip
NEUTRAL_VALUES: dict[str, Any] = {
    "is_encoder_decoder": False, "pruned_heads": {}, "is_causal": True, "num_experts": 0, "rope_interleaved": False,
    "no_rope_layers": [1, 1, 1], "embedding_multiplier": 1.0, "logits_scaling": 1, "partial_rotary_factor": 1.0,
    "quantization_config": None, "use_mrope": False, "sliding_window": 4096, "layer_types": ["full_attention"] * 3,
    "attn_logit_softcapping": None,
}  # fmt: skip


@pytest.mark.parametrize("key", REFUSED)
def test_key_that_changes_the_computation_is_refused(key: str) -> None:
    config = json.loads(AutoConfig.for_model("llama", num_hidden_layers=3).to_json_string())
    with pytest.raises(UserError, match=f'^folder/config.json: key "{key}": ') as error:
        spec_of_config({**config, key: REFUSED[key]}, place="folder/config.json")
    assert len(str(error.value)) < 300


def test_neutral_values_are_accepted_without_a_note() -> None:
    config = json.loads(
        AutoConfig.for_model("llama", num_hidden_layers=3).to_json_string(use_diff=False)
    )
    assert spec_of_config({**config, **NEUTRAL_VALUES}, place="") == spec_of_config(
        config, place=""
    )
    assert notes_of_config({**config, **NEUTRAL_VALUES}, place="") == ()


def test_two_names_of_one_key_must_agree() -> None:
    config = json.loads(AutoConfig.for_model("gpt2").to_json_string(use_diff=False))
    with pytest.raises(UserError, match='"hidden_size" and "n_embd" mean the same, but differ'):
        spec_of_config({**config, "hidden_size": 48}, place="")
    renamed = {key: value for key, value in config.items() if key != "n_embd"}
    again = spec_of_config({**renamed, "hidden_size": 768}, place="")
    assert again == spec_of_config(config, place="")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_gguf_key_is_read_harmless_or_refused(name: str) -> None:
    keys = {
        value.removeprefix("{arch}.")
        for group in vars(gguf.constants.Keys).values()
        if isinstance(group, type)
        for value in vars(group).values()
        if isinstance(value, str) and value.startswith("{arch}.") and "{dense}" not in value
    }
    assert len(keys) > 100
    rotary = {key for key in keys if key.startswith("rope.")}  # of no use without one
    named = {"attention.sliding_window", "attention.sliding_window_pattern"}  # see below
    rest = keys - gguf_reads(name) - GGUF_HARMLESS - GGUF_NEUTRAL.keys() - named
    assert rest - rotary == set()
    assert rest <= {"rope.freq_base_swa"} or not FAMILIES[ARCHITECTURES[name].family].rotary


@pytest.mark.parametrize(("key", "value", "accepted"), [
    ("attention.causal", False, True), ("logit_scale", 0.06, 1.0), ("residual_scale", 0.2, 1.0),
    ("embedding_scale", 12.0, 0.0), ("use_parallel_residual", True, False), ("attention.clamp_kqv", 8.0, 0.0),
    ("attention.scale", 0.01, 0.0), ("attention.max_alibi_bias", 8.0, 0.0), ("expert_shared_count", 1, 0),
    ("rope.dimension_sections", [16, 24, 24, 0], [0, 0, 0, 0]), ("rope.scaling.alpha", 1000.0, 0.0),
    ("rope.scaling.yarn_beta_fast", 8.0, 32.0), ("rope.scaling.yarn_log_multiplier", 0.1, 0.0),
    ("nextn_predict_layers", 1, 0), ("attn_logit_softcapping", 50.0, 0.0), ("rope.dimension_count_swa", 4, 8),
])  # fmt: skip
def test_gguf_key_that_changes_the_computation_is_refused(
    key: str, value: Any, accepted: Any, tmp_path: Path
) -> None:
    plain = {"attention_bias": False, "mlp_bias": False, "head_dim": 8}
    path = tmp_path / "model.gguf"
    write_gguf("llama", path, kind="F32", metadata={f"llama.{key}": value}, **plain)
    with pytest.raises(UserError, match=f'model.gguf: key "llama.{key}": .*is not supported'):
        open_checkpoint(path)
    path.unlink()
    write_gguf("llama", path, kind="F32", metadata={f"llama.{key}": accepted}, **plain)
    assert open_checkpoint(path).notes == ()


def test_unread_gguf_keys_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf("qwen2", path, kind="F32",
               metadata={"qwen2.attention.sliding_window": 64, "qwen2.new_scale": 2.5})  # fmt: skip
    keys, window = open_checkpoint(path).notes
    assert "bass does not read these keys: qwen2.new_scale (2.5)" in keys
    assert '"qwen2.attention.sliding_window": 64 is not used' in window


HEAD_TARGET = {"hidden_size": 48, "vocab_size": 301, "num_hidden_layers": 9}


def head_of(config: dict[str, Any]) -> tuple[str, ...]:
    """The notes of a drafter's config.json that fits a small target."""
    target = spec_of_config(
        json.loads(
            AutoConfig.for_model(
                "qwen3", **HEAD_TARGET, num_attention_heads=4, num_key_value_heads=2
            ).to_json_string(use_diff=False)
        ),
        place="target",
    )
    head_of_config(config, target, place="head/config.json")
    return notes_of_head(config, place="head/config.json")


KINDS = ("dflash", "dspark", "dflash-speculators", "dspark-speculators")


@pytest.mark.parametrize("kind", KINDS)
def test_unread_keys_of_drafters_are_named(kind: str) -> None:
    plain = block_config(
        kind, width=48, vocab=301, aux_layers=(0, 1), auto_map={"AutoModel": "x.Y"}
    )
    assert head_of({**plain, "is_causal": False, "use_swa": False, "num_target_layers": 9}) == ()
    (note,) = head_of({**plain, "new_gate": 2})
    assert "bass does not read these keys: new_gate (2)" in note
    (note,) = head_of({**plain, "dflash_config": {**plain.get("dflash_config", {}), "new": 3}})
    assert "dflash_config.new (3)" in note


@pytest.mark.parametrize(
    "key", sorted(REFUSED.keys() - {"is_causal", "sliding_window", "layer_types"})
)
@pytest.mark.parametrize("kind", KINDS)
def test_drafter_layer_key_that_changes_the_computation_is_refused(key: str, kind: str) -> None:
    config = block_config(kind, width=48, vocab=301, aux_layers=(0, 1))
    layers = config.get("transformer_layer_config", config)
    layers[key] = REFUSED[key]
    with pytest.raises(UserError, match=f'^head/config.json: .*"{key}"'):
        head_of(config)
