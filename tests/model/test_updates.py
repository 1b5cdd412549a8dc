"""New weights are written into loaded models in place. Afterwards a model gives the logits of
transformers, and the samples of models that are loaded from the new files."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import write_chain
from checkpoints import (
    FAMILIES,
    build_model,
    shallow,
    write_checkpoint,
    write_gguf,
    write_pair,
    write_tokenizer,
)
from heads import write_head
from safetensors.torch import load_file
from torch import Tensor

from bass_cli.config.job import Job, Speculation, load_pair
from bass_cli.config.sampling import Sampling
from bass_cli.engine.batch import Change
from bass_cli.errors import UserError
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.weights import load
from bass_cli.models.decoder import Decoder
from bass_cli.models.runner import Runner
from bass_cli.run.build import Models, build, load_models
from bass_cli.run.engine import Engine
from bass_cli.run.generate import generate
from bass_cli.run.manifest import describe
from bass_cli.run.pair import Files
from bass_cli.run.plan import Plan, make_plan
from bass_cli.run.updates import Updates

CPU = torch.device("cpu")
VOCAB = 1400  # of 1501 ids: the head has fewer rows than the tensor
IDS = [5, 9, 7, 8, 3, 250, 6, 4, 11]


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack every matrix on a CPU, also the small ones of these models."""
    monkeypatch.setattr(sys.modules["bass_kernels.linear"], "_PACKED", 1)


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> Updates:
    checkpoint: Any = open_checkpoint(path)
    weights = load(checkpoint, dtype=dtype, device=CPU)
    models = Models(Decoder(checkpoint.spec, weights, vocab=min(VOCAB, checkpoint.spec.vocab)))
    unused: Any = None
    return Updates(models, Files(checkpoint, unused, None, 0, None, frozenset()))


@torch.inference_mode()
def logits_of(decoder: Decoder) -> Tensor:
    """Logits of all places after the first of IDS."""
    runner = Runner(decoder, rows=1, span=16, pending=1)
    runner.open("a", IDS[:2])
    runner.follow(Change((), (), (((0,), "a"),)))
    tokens, positions = torch.tensor([IDS[1:]]), torch.arange(1, len(IDS))[None]
    return runner.forward(tokens, positions, [len(IDS)])[0]


@torch.inference_mode()
def near(found: Tensor, model: Any) -> bool:
    expected = model(torch.tensor([IDS])).logits[0, 1:, : found.shape[1]]
    return bool((found - expected).abs().max() < 1e-4 * expected.std())


def published(model: Any, folder: Path) -> dict[str, Tensor]:
    """Tensors by their published names: transformers holds experts stacked, and saves each."""
    if not any(".experts." in name for name, _ in model.named_parameters()):
        return dict(model.state_dict())
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_updated_model_gives_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    """By all tensors, by some of them, and by files. Nothing moves in memory."""
    words = {"vocab_size": 1501, **shallow(family)}
    write_checkpoint(family, tmp_path / "old", seed=1, **words)
    new = build_model(family, seed=2, **words)
    updates = loaded(tmp_path / "old")
    decoder = updates.models.target
    before = {name: id(tensor) for name, tensor in decoder.weights.items()}
    updates.update(published(new, tmp_path / "published"))
    assert near(logits_of(decoder), new)
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            if ".1." in name or "emb" in name:
                parameter.mul_(-1.1)
    found = published(new, tmp_path / "published")
    some = {name: tensor for name, tensor in found.items() if ".1." in name or "emb" in name}
    updates.update((name, tensor) for name, tensor in some.items())
    assert near(logits_of(decoder), new)
    write_checkpoint(family, tmp_path / "new", seed=3, **words)
    updates.update(tmp_path / "new")
    fresh = loaded(tmp_path / "new").models.target
    assert torch.equal(logits_of(decoder), logits_of(fresh))
    assert {name: id(tensor) for name, tensor in decoder.weights.items()} == before


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "gpt_oss", "qwen3_5_moe_text"])
def test_tensors_of_all_experts_are_written_for_each(family: str, tmp_path: Path) -> None:
    """The state_dict of transformers' module has one tensor for all experts of a layer."""
    words = {"vocab_size": 1501, **shallow(family)}
    write_checkpoint(family, tmp_path, seed=1, **words)
    new = build_model(family, seed=2, **words)
    tensors = dict(new.state_dict())
    name = next(name for name in tensors if name.endswith("experts.gate_up_proj"))
    updates = loaded(tmp_path)
    updates.update(tensors)
    assert near(logits_of(updates.models.target), new)
    with pytest.raises(UserError, match=r"the first size must be the number of experts, \d+"):
        updates.update({name: tensors[name][1:]})


@pytest.mark.parametrize(
    ("given", "dtype"),
    [(torch.float64, torch.bfloat16), (torch.float32, torch.float16), (torch.bfloat16,) * 2],
)
def test_tensors_of_any_dtype_become_those_of_loading(
    given: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Norms, which stay float32, too."""
    for name, seed in (("old", 1), ("new", 2)):
        build_model("gemma3_text", seed=seed).to(given).save_pretrained(tmp_path / name)
    new = build_model("gemma3_text", seed=2).to(given)
    updates, expected = loaded(tmp_path / "old", dtype), loaded(tmp_path / "new", dtype)
    updates.update(new.named_parameters())
    found, due = updates.models.target.weights, expected.models.target.weights
    assert all(torch.equal(tensor, due[name]) for name, tensor in found.items())


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_gguf_model_takes_tensors_by_their_published_names(kind: str, tmp_path: Path) -> None:
    write_gguf("llama3", tmp_path / "old.gguf", kind=kind, seed=1, vocab_size=1501)
    new = write_gguf("llama3", tmp_path / "new.gguf", kind="F32", seed=2, vocab_size=1501)
    updates = loaded(tmp_path / "old.gguf")
    updates.update(new.state_dict())
    assert near(logits_of(updates.models.target), new)
    updates.update(tmp_path / "new.gguf")
    assert near(logits_of(updates.models.target), new)


# Samples of a pair


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A pair with other weights beside each model, in folders with the letter 2."""
    folder = tmp_path_factory.mktemp("pair")
    write_pair(folder, prompts=1, num_hidden_layers=3)
    write_checkpoint("llama", folder / "target2", seed=7, shards=False)
    write_checkpoint("llama", folder / "draft2", seed=8, shards=False)
    for name in ("target2", "draft2"):
        write_tokenizer(folder / name)
    for number in ("", "2"):
        seed = len(number)
        write_head(folder / f"dspark{number}", "dspark", seed=seed)
        write_chain(folder / f"chain{number}", "authors", seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def plan_of(target: str, draft: str) -> Plan:
    pair = load_pair("pair.yaml").model_copy(update={"target": target, "draft": draft})
    job = Job(
        pair=pair,
        sampling=Sampling(max_new_tokens=16, temperature=1.2, seed=5),
        speculation=Speculation(length=0 if draft == "none" else 3),
        n=2,
        batch_size=3,
        device="cpu",
        token_ids=True,
    )
    return make_plan(job, prompts=2)


def drawn(plan: Plan, loop: Any = None) -> dict[Any, Any]:
    samples = generate(["the cat sat", "then the other"], plan, loop=loop)
    return {(one.id, one.sample): (one.token_ids, one.drafted, one.accepted) for one in samples}


@pytest.mark.parametrize(
    ("draft", "after", "by"),
    [
        ("draft", "draft2", "tensors"),
        ("lookup", "lookup", "tensors"),
        ("skip:1", "skip:1", "files"),
        ("heads:dspark", "heads:dspark2", "tensors"),
        ("heads:chain", "heads:chain2", "files"),
        ("heads:chain", "heads:chain2", "tensors"),
    ],
)
def test_samples_equal_those_of_models_that_are_loaded_from_the_new_files(
    draft: str, after: str, by: str, place: Path
) -> None:
    """The same loop draws before and after. The drafts are equal too."""
    plan, new = plan_of("target", draft), plan_of("target2", after)
    models = load_models(plan)
    loop, updates = build(plan, models), Updates(models, plan.files)
    before = drawn(plan, loop)

    def weights(name: str) -> Any:
        return name if by == "files" else load_file(f"{name}/model.safetensors")

    updates.update(weights("target2"))
    if after != draft:
        updates.update(weights(after.removeprefix("heads:")), "draft")
    found, expected = drawn(plan, loop), drawn(new)
    assert found == expected
    assert found != before
    same = by == "files"
    files = updates.files
    assert (files.target.fingerprint() == new.files.target.fingerprint()) == same
    if files.draft is not None and new.files.draft is not None:
        assert (files.draft.fingerprint() == new.files.draft.fingerprint()) == same


def test_fingerprint_depends_on_all_tensors_that_were_written(place: Path) -> None:
    plan = plan_of("target", "none")
    models = load_models(plan)
    tensors = load_file("target2/model.safetensors")
    norm = {"model.norm.weight": tensors["model.norm.weight"]}
    flipped = {name: tensor.flip(0) for name, tensor in norm.items()}

    def after(*given: Any) -> str:
        updates = Updates(models, plan.files)
        for weights in given:
            updates.update(weights)
        return updates.files.target.fingerprint()

    whole, part = after(tensors), after(norm)
    assert len({plan.files.target.fingerprint(), whole, part, after(flipped)}) == 4
    assert after(norm, tensors) == after(dict(reversed(tensors.items()))) == whole
    assert after(tensors, flipped) != whole
    assert after(flipped, "target") == plan.files.target.fingerprint()


@pytest.fixture
def updates(tmp_path: Path) -> Updates:
    """Those of a small model."""
    write_checkpoint("llama", tmp_path / "small", shards=False, num_hidden_layers=1)
    return loaded(tmp_path / "small")


NORM, Q = torch.ones(48), "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model.layers.0.self_attn.q_proj.wheight": NORM}, '"layers.0.self_attn.q_proj.weight"'),
        ({Q: NORM}, f"tensor '{Q}' has shape [48], not [48, 48]"),
        ({"model.norm.weight": NORM.int()}, "floats in a plain layout are needed, not torch.int32"),
        ({"model.norm.weight": NORM.numpy()}, "a torch.Tensor is needed, not ndarray"),
        ({"model.norm.weight": NORM.to_sparse()}, "floats in a plain layout are needed"),
        ({"model.norm.weight": NORM.to("meta")}, "floats in a plain layout are needed"),
        ({"model.norm.weight": NORM * math.inf}, "not finite"),
        ({"model.norm.weight": NORM.double() * 1e300}, "not finite in torch.float32"),
        ([("model.norm.weight", NORM, 1)], "pairs of a name and a tensor are needed"),
        ([("norm.weight", NORM), ("model.norm.weight", -NORM)], "other numbers for the same"),
        ([], "there are no tensors"),
        ([("rotary_emb.inv_freq", NORM)], "there are no tensors"),
        (torch.nn.Linear(1, 1), "a folder or named tensors are needed, not Linear("),
        ("nowhere", "nowhere"),
        ("target", "layers 3, not 1"),
    ],
)
def test_wrong_weights_are_refused(given: Any, message: str, updates: Updates, place: Path) -> None:
    """Before anything is written, but for tensors that came before."""
    known, before = updates.files.target.fingerprint(), logits_of(updates.models.target)
    with pytest.raises(UserError) as error:
        updates.update(given)
    assert message in str(error.value)
    if not isinstance(given, list):
        assert updates.files.target.fingerprint() == known
        assert torch.equal(logits_of(updates.models.target), before)


def test_error_says_how_many_tensors_before_it_are_written(updates: Updates) -> None:
    known = updates.files.target.fingerprint()
    with pytest.raises(UserError, match=r"unknown.*; tensors written before it: 1$"):
        updates.update({"model.norm.weight": NORM, "another": NORM})
    assert updates.files.target.fingerprint() != known


@pytest.mark.parametrize("draft", ["none", "lookup", "skip:1"])
def test_update_of_a_draft_without_weights_is_refused(draft: str, place: Path) -> None:
    plan = plan_of("target", draft)
    with pytest.raises(UserError, match="no model drafts that has weights of its own"):
        Updates(load_models(plan), plan.files).update("draft2", "draft")
    with pytest.raises(UserError, match='"target" or "draft" is needed'):
        Updates(load_models(plan), plan.files).update("draft2", "both")  # type: ignore[arg-type]


# The resident engine


def test_engine_draws_with_new_weights_after_the_requests_before_the_update(place: Path) -> None:
    plan, new = plan_of("target", "draft"), plan_of("target2", "draft")
    prompts = ["the cat sat", "0123456789" * 15]  # the second is long enough to be copied from

    def tokens(samples: Any) -> dict[Any, Any]:
        return {(one.id, one.sample): one.token_ids for one in samples}

    old, expected = tokens(generate(prompts, plan)), tokens(generate(prompts, new))
    with Engine(plan.job) as engine:
        known = engine.fingerprint
        before = engine.generate(prompts)
        first = next(before)
        engine.update_weights("target2")  # while samples are in progress
        after = engine.generate(prompts)
        assert tokens([first, *before]) == old
        assert tokens(after) == expected
        assert engine.fingerprint == new.files.target.fingerprint() != known
        engine.update_weights("draft2", model="draft")
        with pytest.raises(UserError, match="unknown for the family llama"):
            engine.update_weights({"another": NORM})
        assert tokens(engine.generate(prompts)) == expected
        engine.update_weights(load_file("target/model.safetensors").items())
        assert tokens(engine.generate(prompts)) == old
        assert engine.fingerprint != known
    with pytest.raises(UserError):
        engine.update_weights("target")


def test_manifest_after_an_update_is_that_of_the_new_weights(place: Path) -> None:
    """So a file that was begun with other weights is not continued."""
    with Engine(plan_of("target", "draft").job) as engine:
        engine.update_weights("target2")
        results = describe(engine.plan, {})["results"]
    new = describe(plan_of("target2", "draft"), {})["results"]
    assert [name for name in new if new[name] != results[name]] == ["target"]
