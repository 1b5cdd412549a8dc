"""LoRA adapters merged while weights are loaded: the numbers and logits are those of PEFT's own
merge, and faults are found before weights are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quantised
import torch
from checkpoints import build_model, edit_json, write_checkpoint, write_gguf, write_tokenizer
from safetensors.torch import load_file, save_file
from test_updates import logits_of, near
from torch import Tensor

from bass_cli.config.job import Job
from bass_cli.errors import UserError
from bass_cli.formats import tensor_content
from bass_cli.formats.checkpoint import Checkpoint, open_checkpoint
from bass_cli.formats.lora import Adapter, parse_adapter
from bass_cli.formats.weights import load, size_of, state_of
from bass_cli.models.decoder import Decoder
from bass_cli.models.partition import Share
from bass_cli.models.spec import Layouts
from bass_cli.run.plan import make_plan

CPU = torch.device("cpu")
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Configurations by name: the family, and arguments of LoraConfig.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"target_modules": ["q_proj", "v_proj"]}),
    "every map": ("qwen3", {"target_modules": EVERY, "lora_alpha": 3}),
    "rank-stabilised": ("llama", {"target_modules": EVERY, "use_rslora": True}),
    "patterns": ("llama", {"target_modules": EVERY, "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 5},
                           "alpha_pattern": {"down_proj": 31}}),
    "some layers": ("gemma3_text", {"target_modules": EVERY, "layers_to_transform": [1]}),
    "regular expression": ("llama", {"target_modules": r".*layers\.0.*\.(q|up)_proj"}),
    "head and embedding": ("llama", {"target_modules": ["q_proj", "lm_head", "embed_tokens"]}),
    "saved head": ("llama", {"target_modules": ["o_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    "saved norm": ("llama", {"target_modules": ["o_proj"], "modules_to_save": ["norm"]}),
    "saved head of a tied model": ("qwen2", {"target_modules": ["o_proj"], "modules_to_save": ["lm_head"]}),
    "saved embedding of a tied model": ("qwen2", {"target_modules": ["o_proj"], "modules_to_save": ["embed_tokens"]}),
    "biases": ("qwen2", {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "all biases": ("qwen2", {"target_modules": ["q_proj"], "bias": "all"}),
    "transposed maps": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "reordered rows": ("gptj", {"target_modules": ["q_proj", "k_proj", "fc_in"]}),
    "fused rows": ("codegen", {"target_modules": ["qkv_proj"]}),
    "recurrent layers": ("qwen3_5_text", {"target_modules": [
        "q_proj", "in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "up_proj"]}),
    "rows by key head": ("qwen3_next", {"target_modules": ["q_proj", "in_proj_qkvz", "in_proj_ba"]}),
    "dora": ("llama", {"target_modules": EVERY, "use_dora": True}),
}  # fmt: skip


def write_adapter(folder: Path, model: Any, *, seed: int = 0, **config: Any) -> Any:
    """Save a random adapter of a model as PEFT does. Return PEFT's own merged model."""
    peft = pytest.importorskip("peft")
    made = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, **config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, one in made.named_parameters():
            trained = "lora_" in name or "modules_to_save" in name
            if "magnitude" in name:
                one.mul_(1 + 0.2 * torch.rand(one.shape, generator=generator))
            elif trained or (one.requires_grad and name.endswith("bias")):
                one.add_(0.1 * torch.randn(one.shape, generator=generator))
    made.save_pretrained(folder)
    return made.merge_and_unload().eval()


def decoder_of(checkpoint: Checkpoint) -> Decoder:
    weights = load(checkpoint, dtype=torch.float32, device=CPU)
    return Decoder(checkpoint.spec, weights, vocab=checkpoint.spec.vocab)


@pytest.mark.parametrize("case", CASES)
def test_merged_logits_are_pefts(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, config = CASES[case]
    model = write_checkpoint(family, tmp_path / "base")
    merged = write_adapter(tmp_path / "lora", model, **config)
    checkpoint = open_checkpoint(tmp_path / "base", (Adapter(tmp_path / "lora"),))
    read: list[int] = []
    whole = load(checkpoint, dtype=torch.float32, device=CPU, on_read=read.append)
    assert sum(read) == checkpoint.size == size_of(checkpoint)
    assert near(logits_of(decoder_of(checkpoint)), merged)
    assert not near(logits_of(decoder_of(open_checkpoint(tmp_path / "base"))), merged)
    monkeypatch.setattr(tensor_content, "ELEMENTS", {"cpu": 200})  # a few rows at a time
    for name, weight in load(checkpoint, dtype=torch.float32, device=CPU).items():
        torch.testing.assert_close(weight, whole[name], rtol=1e-6, atol=1e-7)


def test_several_adapters_add_up_with_their_weights(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path / "base")
    adapters = []
    for i, modules in enumerate((["q_proj", "up_proj"], ["up_proj", "down_proj"])):
        write_adapter(tmp_path / str(i), build_model("llama"), seed=i, target_modules=modules)
        adapters.append(Adapter(tmp_path / str(i), (1.0, -0.5)[i]))
    peft = pytest.importorskip("peft")
    made = peft.PeftModel.from_pretrained(build_model("llama"), tmp_path / "0", adapter_name="a")
    made.load_adapter(tmp_path / "1", adapter_name="b")
    for name, module in made.named_modules():
        if "lora" not in name and hasattr(module, "set_scale") and "b" in module.scaling:
            module.set_scale("b", -0.5)
    made.base_model.set_adapter(["a", "b"])
    merged = made.merge_and_unload()
    checkpoint = open_checkpoint(tmp_path / "base", tuple(adapters))
    assert near(logits_of(decoder_of(checkpoint)), merged)
    assert [note for note in checkpoint.notes if "weight -0.5" in note]


@pytest.mark.parametrize("case", ["every map", "dora", "transposed maps"])
def test_parts_of_a_split_model_are_those_of_the_whole(case: str, tmp_path: Path) -> None:
    family, config = CASES[case]
    write_adapter(tmp_path / "lora", write_checkpoint(family, tmp_path / "base"), **config)
    checkpoint = open_checkpoint(tmp_path / "base", (Adapter(tmp_path / "lora"),))
    options: dict[str, Any] = {"dtype": torch.float32, "device": CPU}
    whole = load(checkpoint, **options)
    halves = [load(checkpoint, share=Share(rank, 2), **options) for rank in (0, 1)]
    for name in ("layers.1.o.weight", "layers.0.down.weight"):
        joined = torch.cat([half[name] for half in halves], 1)
        torch.testing.assert_close(joined, whole[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("scheme", ["awq", "block"])
def test_adapters_of_quantised_targets_are_added_to_the_dequantised_numbers(
    scheme: str, tmp_path: Path
) -> None:
    """PEFT adds them to the model with the same numbers."""
    made = quantised.awq() if scheme == "awq" else quantised.blocks_of_fp8()
    model = quantised.write_quantised(tmp_path / "base", made)
    merged = write_adapter(tmp_path / "lora", model, target_modules=EVERY)
    checkpoint = open_checkpoint(tmp_path / "base", (Adapter(tmp_path / "lora"),))
    assert near(logits_of(decoder_of(checkpoint)), merged)


def test_layers_of_transformers_get_merged_weights(tmp_path: Path) -> None:
    model = write_checkpoint("qwen3", tmp_path / "base")
    merged = write_adapter(tmp_path / "lora", model, target_modules=EVERY, use_dora=True)
    adapters = (Adapter(tmp_path / "lora"),)
    checkpoint = open_checkpoint(tmp_path / "base", adapters, decoder="transformers")
    state = state_of(checkpoint, dtype=torch.float32, device=CPU)
    wanted = merged.state_dict()
    assert state.keys() == wanted.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-5, atol=1e-6, msg=name)
    for family in ("gpt2", "qwen2"):
        write_checkpoint(family, tmp_path / family)
        with pytest.raises(UserError, match=r"own layers and (ties its head|stores its maps)"):
            open_checkpoint(tmp_path / family, adapters, decoder="transformers")


def test_merged_matrices_are_quantised_after_merging(tmp_path: Path) -> None:
    write_adapter(
        tmp_path / "lora", write_checkpoint("llama", tmp_path / "base"), target_modules=EVERY
    )
    checkpoint = open_checkpoint(tmp_path / "base", (Adapter(tmp_path / "lora"),))
    whole = load(checkpoint, dtype=torch.float32, device=CPU)["layers.0.o.weight"]
    found = load(checkpoint, dtype=torch.float32, device=CPU, layouts=Layouts("int8"))
    error = (found["layers.0.o.weight"].dequantise() - whole).abs()  # type: ignore[union-attr]
    assert (error <= 0.501 * whole.abs().amax(1, keepdim=True) / 127).all()


def test_fingerprint_and_manifest_depend_on_the_adapter(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "base")
    model = write_checkpoint("llama", tmp_path / "base", vocab_size=304)
    write_adapter(tmp_path / "lora", model, target_modules=["q_proj"])

    def fingerprint(*lora: str) -> str:
        pair = {"name": "base", "target": str(tmp_path / "base")}
        plan = make_plan(Job(pair=pair, n=1, device="cpu", batch_size=1, lora=lora))
        return str(plan.identity()["target_files"])

    one = str(tmp_path / "lora")
    prints = {fingerprint(), fingerprint(one), fingerprint(f"{one}:0.5"), fingerprint(one, one)}
    assert len(prints) == 4
    assert fingerprint(one) in prints
    tensors = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    save_file(
        {name: 2 * tensor for name, tensor in tensors.items()},
        tmp_path / "lora" / "adapter_model.safetensors",
    )
    assert fingerprint(one) not in prints


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("folder", ("folder", 1.0)),
        ("a/b:0.5", ("a/b", 0.5)),
        ("a/b:-1", ("a/b", -1.0)),
        ("a:b", ("a:b", 1.0)),
        (":1", (":1", 1.0)),
    ],
)
def test_weight_follows_the_last_colon(text: str, wanted: tuple[str, float]) -> None:
    assert parse_adapter(text) == wanted


# Faults


def edit(folder: Path, **changes: Any) -> None:
    edit_json(folder / "adapter_config.json", **changes)


def change(folder: Path, alter: Callable[[dict[str, Tensor]], None]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    alter(tensors)
    save_file(tensors, path)


Q = "base_model.model.model.layers.0.self_attn.q_proj"
FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "kind": (lambda f: edit(f, peft_type="LOHA"), r'adapter_config\.json: key "peft_type": .LOHA. is not supported'),
    "start": (lambda f: edit(f, init_lora_weights="pissa"), '"init_lora_weights": .pissa. is not supported, only True'),
    "bias": (lambda f: edit(f, lora_bias=True), '"lora_bias": True is not supported'),
    "experts": (lambda f: edit(f, target_parameters=["experts"]), '"target_parameters".* is not supported'),
    "rank": (lambda f: edit(f, r=8), r"self_attn\.q_proj. has rank 4, but .*adapter_config\.json says 8"),
    "no rank": (lambda f: edit(f, r=None), 'the key "r" is missing'),
    "alpha": (lambda f: edit(f, lora_alpha="much"), '"lora_alpha": a finite number is needed'),
    "half": (lambda f: change(f, lambda t: t.pop(f"{Q}.lora_B.weight")), r"layers\.0\.self_attn\.q_proj. has no lora_B"),
    "shape": (lambda f: change(f, lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(4, 7)})),
              r"q_proj. has factors \[48, 4\] and \[4, 7\], which do not fit a matrix \[48, 48\]"),
    "twice": (lambda f: change(f, lambda t: t.update({f"{Q}.lora_A.default.weight": torch.zeros(4, 48)})),
              r"q_proj\.lora_A\.(default\.)?weight. is there under another name too"),
    "nothing": (lambda f: change(f, lambda t: t.clear()), "holds no tensors"),
    "name": (lambda f: change(f, lambda t: t.update({f"{Q}s.lora_A.weight": torch.zeros(4, 48)})),
             r"q_projs. has no place in the target"),
    "other": (lambda f: change(f, lambda t: t.update({f"{Q}.lora_C.weight": torch.zeros(4)})),
              r"lora_C\.weight. is not supported"),
    "saved": (lambda f: change(f, lambda t: t.update({"base_model.model.score.weight": torch.zeros(4)})),
              r"score\.weight. has no place in the target"),
    "type": (lambda f: change(f, lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(4, 48, dtype=torch.int8)})),
             r"lora_A\.weight. has type I8; floats are needed"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(),
                   r"adapter_model\.safetensors or adapter_model\.bin"),
    "no config": (lambda f: (f / "adapter_config.json").unlink(), r"adapter_config\.json"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_name_file_and_tensor_or_key(fault: str, tmp_path: Path) -> None:
    model = write_checkpoint("llama", tmp_path / "base")
    write_adapter(tmp_path / "lora", model, target_modules=["q_proj"])
    spoil, message = FAULTS[fault]
    spoil(tmp_path / "lora")
    with pytest.raises(UserError, match=message) as error:
        open_checkpoint(tmp_path / "base", (Adapter(tmp_path / "lora"),))
    assert str(tmp_path) in str(error.value)


def test_a_weight_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'`lora` .*:half: a number is needed after ":"'):
        parse_adapter(f"{tmp_path}:half")
    (tmp_path / "a:b").mkdir()
    assert parse_adapter(f"{tmp_path}/a:b") == (f"{tmp_path}/a:b", 1.0)


def test_an_adapter_beside_the_weights_is_noted_unless_it_is_merged(tmp_path: Path) -> None:
    model = write_checkpoint("llama", tmp_path, shards=False)
    assert not open_checkpoint(tmp_path).notes
    write_adapter(tmp_path, model, target_modules=["q_proj"])
    (note,) = open_checkpoint(tmp_path).notes
    reason = f"this adapter is not used; `lora` {tmp_path} merges it"
    assert note == f"{tmp_path}/adapter_config.json: {reason}"
    assert note not in open_checkpoint(tmp_path, (Adapter(tmp_path),)).notes


JUNK = (None, True, -1, 0, 3, 1e9, "x", "(", [], {}, [1], {"(": 1}, {"q_proj": "x"}, {1: 2})


def test_junk_in_settings_is_an_error_of_the_user(tmp_path: Path) -> None:
    model = write_checkpoint("llama", tmp_path / "base")
    write_adapter(tmp_path / "lora", model, target_modules=["q_proj"])
    path = tmp_path / "lora" / "adapter_config.json"
    config, refused = json.loads(path.read_text()), list[str]()
    for key in config:
        for junk in JUNK:
            path.write_text(json.dumps({**config, key: junk}))
            try:
                open_checkpoint(tmp_path / "base", (Adapter(tmp_path / "lora"),))
            except UserError as error:
                refused.append(str(error))
    assert len(refused) > 50
    assert all(str(tmp_path / "lora") in text for text in refused)


def test_adapters_that_cannot_be_combined_are_refused(tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_checkpoint("qwen2", base)

    def refused(message: str, *adapters: Adapter) -> None:
        with pytest.raises(UserError, match=message):
            open_checkpoint(base, adapters)

    made = {
        "saved": {"target_modules": ["o_proj"], "modules_to_save": ["lm_head"]},
        "dora": {"target_modules": ["o_proj"], "use_dora": True},
        "plain": {"target_modules": ["o_proj"]},
        "embedding": {"target_modules": ["embed_tokens"]},
    }
    one = {name: Adapter(tmp_path / name) for name in made}
    for name, config in made.items():
        write_adapter(tmp_path / name, build_model("qwen2"), **config)
    refused("must be 1, not 0.5", one["saved"]._replace(weight=0.5))
    refused("is in .* too", one["saved"], one["saved"])
    for pair in (("dora", "plain"), ("plain", "dora")):
        refused("is a DoRA, which is merged alone", *(one[name] for name in pair))
    refused("is a DoRA, which is merged alone", one["dora"]._replace(weight=2.0))
    write_checkpoint("llama", base)
    saves = (
        {"target_modules": ["o_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["o_proj"]},
    )
    for name, config in zip("ab", saves, strict=True):
        write_adapter(tmp_path / name, build_model("llama"), **config)
    refused(
        "replaces a tensor that another adapter changes", *(Adapter(tmp_path / one) for one in "ab")
    )
    write_checkpoint("qwen2", base)
    refused("changes an embedding that is the head too", one["embedding"])
    write_gguf("llama", tmp_path / "model.gguf")
    with pytest.raises(UserError, match="cannot be merged into a GGUF file"):
        open_checkpoint(tmp_path / "model.gguf", (one["plain"],))
