"""Hybrid models in training: outputs and gradients equal those of transformers, and from a hybrid
pair to a draft in use."""

import json

import pytest
import torch
from checkpoints import write_checkpoint, write_tokenizer
from command_line import cli, rows_in
from test_command import ids_of
from test_windows import windows_of

from bass_cli.distill.folder import stored
from bass_cli.distill.network import Model, run
from bass_cli.distill.windows import thinned
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.weights import load

TEXTS = [[5, 6, 7, 250, 9, 3, 12], [9, 10, 11], [40, 41, 42, 43, 44]]
STEPS = (
    "--device", "cpu", "--threads", "1", "--tokens", "240", "--max-new-tokens", "16", "--steps", "5",
    "--window-tokens", "48", "--train-batch", "6", "--draft-length", "4", "--learning-rate", "0.02",
)  # fmt: skip


def of_both(family, folder):
    """Return a checkpoint's model in transformers, and here with weights that have gradients."""
    theirs = write_checkpoint(family, folder, shards=False)
    checkpoint = open_checkpoint(folder)
    weights = load(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    return theirs, Model(checkpoint.spec, weights, 299, torch.float32)


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "qwen3_moe"])
def test_outputs_of_a_target_equal_those_of_transformers(tmp_path, family):
    """Three texts in one window do not affect each other."""
    theirs, model = of_both(family, tmp_path)
    with torch.no_grad():
        found = run(model, windows_of(TEXTS, thinned(16, 4), length=16))[0]
        for text, own in zip(TEXTS, found[:15].split([len(text) for text in TEXTS]), strict=True):
            expected = theirs.model(input_ids=torch.tensor([text]), use_cache=False)
            torch.testing.assert_close(own, expected[0][0], atol=2e-5, rtol=1e-4)


def test_gradients_of_a_hybrid_equal_those_of_transformers(tmp_path):
    theirs, model = of_both("qwen3_5_text", tmp_path)
    for weight in model.weights.values():
        weight.requires_grad_()
    text = torch.arange(3, 3 + 70)[None]  # more than a chunk of transformers' function
    outer = torch.randn(1, 70, model.spec.width, generator=torch.Generator().manual_seed(0))
    (run(model, windows_of(text.tolist(), thinned(70, 4), length=70)) * outer).sum().backward()
    (theirs.model(input_ids=text, use_cache=False)[0] * outer).sum().backward()
    expected = {name: one.grad for name, one in theirs.named_parameters()}
    slopes = {name: one.grad for name, one in model.weights.items() if one.grad is not None}
    slopes["head.weight"] = torch.zeros_like(model.weights["head.weight"])  # not in the output
    compared = 0
    for name, grad in stored(model.spec, slopes, torch.float32):
        skipped = "linear_attn" not in name and ("norm" in name or "lm_head" in name)
        if skipped:  # such norms are stored as the weight minus 1; the head has no gradient
            continue
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(
            grad / scale, expected[name] / scale, atol=2e-4, rtol=0, msg=name
        )
        compared += "linear_attn" in name
    assert compared == 3 * 9, "three recurrent layers have nine tensors each"


@pytest.mark.parametrize(
    ("target", "draft"),
    [("qwen3_5_text", "qwen3_5_text"), pytest.param("qwen3_next", "qwen3", marks=pytest.mark.slow)],
)
def test_from_a_hybrid_target_to_a_draft_that_changes_no_sample(here, target, draft):
    """The draft of the first pair is a hybrid itself."""
    for seed, (name, family) in enumerate({"target": target, "draft": draft}.items()):
        write_checkpoint(family, here / name, seed=seed, shards=False)
        write_tokenizer(here / name)
    (here / "pair.yaml").write_text("target: target\ndraft: draft\nsampling: {temperature: 0.7}\n")
    (here / "p.txt").write_text("".join(f"the cat number {n} sat\n" for n in range(4)))
    given = ("--pair", "pair.yaml", "--prompts", "p.txt", "--out", "out", "--json")
    done = cli("distill", *STEPS, *given, code=0)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["after"]["parallel T=1"]["kept"] > report["before"]["parallel T=1"]["kept"]
    flags = ("--pair", "out/pair.yaml", "--device", "cpu", "--dtype", "fp32", "--n", "2", "--seed", "3",
             "--max-new-tokens", "16", "--token-ids")  # fmt: skip
    cli("generate", "p.txt", *flags, "--draft-length", "3", "--out", "drafted.jsonl", code=0)
    cli("generate", "p.txt", *flags, "--draft", "none", "--out", "plain.jsonl", code=0)
    rows = rows_in(here / "drafted.jsonl")
    assert sum(row["accepted"] for row in rows) > 8
    assert ids_of(here / "drafted.jsonl") == ids_of(here / "plain.jsonl")


@pytest.mark.parametrize(
    ("family", "flags", "message"),
    [
        (
            "qwen3_5_text",
            ("--layers", "1"),
            "are all of one kind, and a draft needs attention and recurrent layers; give",
        ),
        ("granite", (), "has a scaled residual stream"),
        ("qwen3_5_moe_text", (), "codegen; give a model of one of them as --from"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_sampling(here, family, flags, message):
    write_checkpoint(family, here / "target", shards=False)
    write_tokenizer(here / "target")
    found = cli("distill", *STEPS, "--model", "target", "--out", "out", *flags, code=2)
    assert message in " ".join(found.stderr.split())
    assert not (here / "out/samples.jsonl").exists()
