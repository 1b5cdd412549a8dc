"""The layer of a checkpoint in other number formats: a draft of 8 bits, files whose matrices are
quantised; and new weights for target and layer together."""

from __future__ import annotations

import json
import math

import pytest
import quantised
import torch
from checkpoints import HYBRID
from safetensors.torch import load_file
from test_mtp import write

from bass_cli.config.job import Job, Speculation
from bass_cli.config.sampling import Sampling
from bass_cli.errors import UserError
from bass_cli.models.spec import Format, Layouts, head_parameters
from bass_cli.run.build import load_models
from bass_cli.run.engine import Engine
from bass_cli.run.generate import generate
from bass_cli.run.memory import footprint
from bass_cli.run.pair import with_draft_format
from bass_cli.run.plan import make_plan
from bass_cli.run.updates import Updates

PROMPTS = ["the cat sat", "a", "the cat number 2 sat on the mat, then the other cat sat there"]
UP = "layers.0.up.weight"
MAPS = tuple(f"{name}.weight" for name in ("qkv", "o", "up", "down", "fc"))
# Matrices of the layer, in checkpoints that have some of them quantised
WHOLE = ("lm_head", "embed_tokens", "conv1d", "mtp.fc", "in_proj_a", "in_proj_b")


def job_of(folder, draft="mtp", **given):
    return Job(
        model=str(folder),
        draft=draft,
        n=3,
        batch_size=4,
        device="cpu",
        token_ids=True,
        sampling=Sampling(max_new_tokens=12, temperature=1.2, seed=5),
        speculation=Speculation(length="auto" if draft == "none" else 3),
        **given,
    )


def drawn(job):
    """Return the tokens of a job, and how many drafts were accepted."""
    found = list(generate(PROMPTS, job))
    assert len(found) == len(PROMPTS) * job.n
    tokens = {(one.id, one.sample): one.token_ids for one in found}
    return tokens, sum(one.accepted for one in found)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layer")
    write(folder, HYBRID[0], near=0.5, tokenizer=True)
    return folder


@pytest.mark.parametrize("layout", ["int8", "fp8"])
def test_draft_in_8_bits_draws_the_tokens_of_plain_decoding(place, layout):
    tokens, accepted = drawn(job_of(place, draft_dtype=layout))
    assert tokens == drawn(job_of(place, "none"))[0]
    assert accepted > 0
    models = load_models(make_plan(job_of(place, draft_dtype=layout)))
    held = models.head.body.weights
    assert [held[name].layout for name in (UP, "head.weight")] == [layout, layout]


def test_keys_in_8_bits_give_the_tokens_of_plain_decoding(place):
    """Those of the layer too. Hidden states stay whole."""
    tokens, accepted = drawn(job_of(place, kv_dtype="fp8"))
    assert tokens == drawn(job_of(place, "none", kv_dtype="fp8"))[0]
    assert accepted > 0


def test_format_of_the_layer_on_a_gpu_is_fp8_where_it_has_that(place, monkeypatch):
    """The plan counts a copy of the head. Other formats are those that are asked for."""
    cuda, head = torch.device("cuda"), make_plan(job_of(place)).files.draft.head

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert with_draft_format(job_of(place), head, cuda).draft_dtype == "auto"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def found(capability, **given):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        job = job_of(place, **given)
        return with_draft_format(job, head, cuda).draft_dtype

    assert [found((9, 0)), found((8, 9), dtype="bf16"), found((9, 0), dtype="int8")] == ["fp8"] * 3
    assert [found((8, 0)), found((9, 0), dtype="fp32"), found((9, 0), dtype="fp16")] == ["auto"] * 3
    assert found((9, 0), draft_dtype="target") == "target"
    assert with_draft_format(job_of(place), head, torch.device("cpu")).draft_dtype == "auto"
    assert with_draft_format(job_of(place), None, cuda).draft_dtype == "auto"
    words = {"dtype": torch.bfloat16, "device": cuda, "longest": 3, "head": head}
    target = make_plan(job_of(place)).files.target.spec
    plain, small = (
        footprint(target, head.body, **words, draft_format=Format(torch.bfloat16, layouts)).weights
        for layouts in (Layouts(), Layouts("fp8", "fp8"))
    )
    shapes = {name: math.prod(shape) for name, shape in head_parameters(head).items()}
    saved = sum(count for name, count in shapes.items() if name.endswith(MAPS))
    rows, copy = target.vocab, target.vocab * target.width
    assert small - plain == pytest.approx(copy + 4 * rows - saved, abs=4 * 1000)


def test_layer_of_files_in_8_bits_is_read(tmp_path):
    """Blocks of e4m3 numbers, as Qwen publishes them; `fc` and others are not quantised."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    write(tmp_path, HYBRID[0], near=0.5, tokenizer=True, **sizes)
    scheme, stored, due = quantised.blocks_of_fp8(), {}, {}
    for name, one in load_file(tmp_path / "model.safetensors").items():
        stored[name], module = one, name.removesuffix(".weight")
        if one.dim() == 2 and not module.endswith(WHOLE):
            found = scheme.quantise(one)
            stored |= {f"{module}.{part}": tensor for part, tensor in found.tensors.items()}
            due[module] = found.numbers
    quantised.save(tmp_path, stored)
    config = json.loads((tmp_path / "config.json").read_text())
    left_out = {"modules_to_not_convert": ["lm_head", "mtp.fc"]}
    config["quantization_config"] = scheme.config | left_out
    (tmp_path / "config.json").write_text(json.dumps(config))
    held = load_models(make_plan(job_of(tmp_path))).head.body.weights
    parts = [due[f"mtp.layers.0.mlp.{part}_proj"] for part in ("gate", "up")]
    assert torch.equal(held.whole(UP), torch.cat(parts))
    assert torch.equal(held.whole("layers.0.o.weight"), due["mtp.layers.0.self_attn.o_proj"])
    assert torch.equal(held.whole("fc.weight"), stored["mtp.fc.weight"])
    tokens, accepted = drawn(job_of(tmp_path))
    assert tokens == drawn(job_of(tmp_path, "none"))[0]
    assert accepted > 0


def test_new_weights_of_a_target_have_its_layer_too(place, tmp_path):
    """From a folder, and by tensors. Weights without the layer leave it as it is."""
    write(tmp_path, HYBRID[0], near=0.5, tokenizer=True, layer_seed=7)
    new = load_file(tmp_path / "model.safetensors")
    gate, name = "mtp.layers.0.mlp.gate_proj.weight", "mtp.layers.0.mlp.up_proj.weight"
    plan = make_plan(job_of(place))
    models = load_models(plan)
    updates, held = Updates(models, plan.files), models.head.body.weights
    before = held.whole(UP).clone()
    updates.update({one: tensor for one, tensor in new.items() if not one.startswith("mtp.")})
    assert torch.equal(held.whole(UP), before)
    unchanged = updates.files.draft.fingerprint()
    assert unchanged == plan.files.draft.fingerprint()
    updates.update({name: new[name], "model.norm.weight": new["model.norm.weight"]})
    assert torch.equal(held.whole(UP), torch.cat((before[:80], new[name])))
    assert updates.files.draft.fingerprint() != unchanged
    updates.update(str(tmp_path))
    assert torch.equal(held.whole(UP), torch.cat((new[gate], new[name])))
    with pytest.raises(UserError, match=r"mlp\.cate_proj\.weight' is unknown"):
        updates.update({"mtp.layers.0.mlp.cate_proj.weight": new[gate]})


def test_engine_draws_the_samples_of_the_new_weights(place, tmp_path):
    write(tmp_path, HYBRID[0], near=0.4, tokenizer=True, layer_seed=7)
    due = drawn(job_of(tmp_path, "none"))[0]
    with Engine(job_of(place, None)) as engine:
        assert engine.plan.job.pair.draft == "mtp"
        first = [one.token_ids for one in engine.generate(PROMPTS)]
        layer = engine.plan.files.draft.fingerprint()
        engine.update_weights(str(tmp_path))
        found = list(engine.generate(PROMPTS))
    assert {(one.id, one.sample): one.token_ids for one in found} == due
    assert [one.token_ids for one in found] != first
    assert sum(one.accepted for one in found) > 0
    assert engine.plan.files.draft.fingerprint() != layer
