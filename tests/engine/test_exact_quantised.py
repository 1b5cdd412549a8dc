"""Targets and drafts in 8 bits: speculation gives the tokens of the same 8-bit target without
drafts, and samples have its distribution."""

import functools
import json

import pytest
import torch
from checkpoints import shallow, write_checkpoint, write_tokenizer
from decoders import load_decoder, load_noisy_pair
from heads import write_head
from reading import FLAGS, goes_on_and_is_plain, has_the_targets_law, write_pair
from test_exactness import drafter_of, rows
from test_parallel import bass, lines
from test_quantised_weights import with_rounding
from thinned import thinned
from toys import Reactive, drive, loop_for, plain

from bass_cli.config.job import Pair, load_pair, make_job
from bass_cli.errors import UserError
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.weights import load
from bass_cli.lengths.controllers import Bass, Fixed
from bass_cli.models.decoder import Decoder
from bass_cli.models.spec import Layouts
from bass_cli.run.build import load_models
from bass_cli.run.memory import footprint
from bass_cli.run.plan import make_plan
from bass_cli.run.updates import Updates
from bass_kernels import LAYOUTS, Quantised

CPU = torch.device("cpu")
FAMILIES = ("llama", "gemma3_text", "gpt2")
DRAFTERS = ("model", "skip", "parallel", "lookup")
MIXTURES = ("qwen3_moe", "model"), ("gpt_oss", "lookup")
BATCHES = (1, lambda: Fixed(7)), (2, lambda: Fixed(3)), (5, Reactive), (5, Bass)


def quantise_all(weights, layouts):
    """Quantise loaded plain tensors, as loading does."""
    return {
        name: one if layouts.of(name) is None else Quantised.of(one, layouts.of(name))
        for name, one in weights.items()
    }


@pytest.fixture(scope="module")
def decoders(tmp_path_factory):
    """A function from a family and a layout to (target, draft), with heads in 8 bits. The draft is
    the target with noise on its weights."""

    @functools.cache
    def pair(family, layout):
        folder = tmp_path_factory.mktemp(family)
        write_checkpoint(family, folder, **shallow(family))
        layouts = Layouts(layout, layout)
        return load_noisy_pair(folder, change=lambda weights: quantise_all(weights, layouts))

    return pair


@pytest.fixture(scope="module")
def plainly(decoders):
    return functools.cache(lambda *words: plain(decoders(*words)[0], rows()))


CASES = [(family, drafter) for family in FAMILIES for drafter in DRAFTERS]


# In `make test` each family and each drafter has both layouts, by turns.
@pytest.mark.parametrize(
    ("family", "drafter", "layout"),
    [
        pytest.param(
            *case, layout, marks=pytest.mark.slow if (at // len(DRAFTERS) + at + other) % 2 else ()
        )
        for at, case in enumerate([*CASES, *MIXTURES])
        for other, layout in enumerate(LAYOUTS)
    ],
)
def test_shared_coupling_equals_plain_decoding(decoders, plainly, family, layout, drafter):
    """Greedy and sampled rows of unequal lengths, alone and together, at several widths."""
    target, draft = decoders(family, layout)
    accepted = drafted = 0
    for batch, lengths in BATCHES:
        live = rows()
        loop = loop_for(target, drafter_of(drafter, target, draft), rows=batch, lengths=lengths())
        assert drive(loop, live) == plainly(family, layout), (batch, lengths())
        accepted += sum(row.accepted for row in live)
        drafted += sum(row.drafted for row in live)
    if drafter != "lookup":
        assert 0 < accepted < drafted


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_maximal_coupling_equals_plain_decoding_if_greedy(decoders, plainly, layout, drafter):
    target, draft = decoders("llama", layout)
    due = {key: tokens for key, tokens in plainly("llama", layout).items() if key[1] == 0}
    for batch, lengths in ((2, Fixed(7)), (5, Bass())):
        model = drafter_of(drafter, target, draft)
        loop = loop_for(target, model, rows=batch, lengths=lengths, coupling="maximal")
        found = drive(loop, rows())
        assert {key: found[key] for key in due} == due


def test_fp8_target_differs_from_the_plain_one(decoders, plainly, tmp_path):
    """Else the equalities above would show nothing about 8 bits."""
    write_checkpoint("llama", tmp_path, **shallow("llama"))
    assert plain(load_decoder(tmp_path), rows()) != plainly("llama", "fp8")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_have_the_distribution_of_the_rounded_model(layout, tmp_path):
    """With an 8-bit draft, against transformers' model with the same rounding."""
    theirs = with_rounding(write_checkpoint("llama", tmp_path / "a", vocab_size=12), layout)
    write_checkpoint("llama", tmp_path / "b", seed=1, vocab_size=12)
    both = []
    for name, layouts in (("a", Layouts(layout)), ("b", Layouts(layout, layout))):
        checkpoint = open_checkpoint(tmp_path / name)
        weights = load(checkpoint, dtype=torch.float32, device=CPU, layouts=layouts)
        both.append(Decoder(checkpoint.spec, weights))
    has_the_targets_law(theirs, *both)


@pytest.fixture
def here(here):
    write_pair(here)
    write_head(here / "head", "dspark")
    return here


@pytest.mark.parametrize(
    ("dtype", "drafts"),
    thinned([("int8", "int8"), ("fp8", "auto"), ("fp32", "fp8")], [("fp8", "auto")]),
)
def test_resumed_run_with_a_draft_head_equals_plain_decoding(here, dtype, drafts):
    """A drafter that reads hidden states, lookup, and a run that was killed within a line."""
    text = f"target: target\ndraft: 'heads:head'\ndtype: {dtype}\ndraft_dtype: {drafts}\n"
    (here / "pair.yaml").write_text(text)
    goes_on_and_is_plain(here, ("--draft", "lookup", "--draft-length", "4"))
    manifest = json.loads((here / "whole.jsonl.manifest.json").read_text())
    assert manifest["results"]["dtype"] == dtype


def test_result_file_is_not_continued_with_another_dtype(here):
    flags = ("--pair", "pair.yaml", "--n", "2", "--max-new-tokens", "4", "--out", "o.jsonl")
    bass(*flags, "--dtype", "int8", "--limit", "1", code=0)
    begun = lines(here / "o.jsonl")
    assert "dtype" in bass(*flags, "--dtype", "fp8", code=2).stderr
    assert lines(here / "o.jsonl") == begun
    bass(*flags, "--dtype", "int8", code=0)
    whole = lines(here / "o.jsonl")
    assert {key: whole[key] for key in begun} == begun
    assert len(whole) > len(begun)


def plan_of(**words):
    return make_plan(make_job(load_pair("pair.yaml"), device="cpu", **words))


@pytest.mark.parametrize(
    ("wanted", "layouts"),
    [
        ("auto", Layouts()),
        ("target", Layouts("fp8", "fp8")),
        ("int8", Layouts("int8", "int8")),
        ("fp8", Layouts("fp8", "fp8")),
    ],
)
def test_draft_head_is_stored_as_draft_dtype_says(here, wanted, layouts):
    """The memory plan counts its bytes. The drafter has a head of its own."""
    plan = plan_of(dtype="fp8", draft_dtype=wanted)
    models = load_models(plan)
    for one in models.target.weights.values():
        if isinstance(one, Quantised):
            assert one.layout == "fp8"
    assert models.target.format.layouts == Layouts("fp8", "fp8")
    assert models.head.body.format.layouts == layouts
    own = models.head.body.weights
    names = {name for name, one in own.items() if isinstance(one, Quantised)}
    assert ("fc.weight" in names) == (layouts.layers is not None)
    assert isinstance(own["embed.weight"], torch.Tensor)
    words = {"dtype": torch.float32, "device": torch.device("cuda"), "longest": 6}
    words |= {"layouts": plan.layouts}
    spec, head = plan.files.target.spec, plan.files.draft
    alone = footprint(spec, None, **words).weights
    both = footprint(spec, head.spec, head=head.head, draft_format=plan.draft_format, **words)
    loaded = load(head, dtype=torch.float32, device=CPU, layouts=layouts)
    expected = sum(one.nbytes for one in loaded.values())
    if layouts.head is not None and "head.weight" not in loaded:
        expected += own["head.weight"].nbytes
    assert both.weights - alone == expected


def test_copy_of_the_targets_head_follows_new_weights(here):
    """A drafter without a head of its own reads an 8-bit copy of the target's. Updates by files and
    by tensors renew it, where it is."""
    write_head(here / "flash", "dflash", seed=1)
    new = write_checkpoint("qwen3", here / "new", seed=5, use_sliding_window=False)
    plan = plan_of(draft="heads:flash", draft_dtype="int8")
    assert not plan.files.draft.head.heads
    models = load_models(plan)
    own, target = models.head.body.weights["head.weight"], models.target.weights
    assert torch.equal(own.values, Quantised.of(target.whole("head.weight"), "int8").values)
    expected = Quantised.of(new.lm_head.weight.detach(), "int8")
    for given in (here / "new", {"lm_head.weight": new.lm_head.weight.detach()}):
        own.write_rows(0, torch.zeros(own.shape))
        Updates(models, plan.files).update(given)
        assert models.head.body.weights["head.weight"] is own
        assert torch.equal(own.values, expected.values)
        assert torch.equal(own.scales, expected.scales)


def test_copy_of_an_8_bit_head_after_an_update_is_that_of_a_new_engine(here):
    """Else samples under maximal coupling, which depend on the draft, would differ."""
    write_head(here / "flash", "dflash", seed=1)
    new = write_checkpoint("qwen3", here / "new", seed=5, use_sliding_window=False)
    write_tokenizer(here / "new")

    def plan_for(target):
        pair = Pair(name="x", target=target, draft="heads:flash")
        return make_plan(make_job(pair, device="cpu", dtype="fp8", draft_dtype="int8"))

    fresh = load_models(plan_for("new")).head.body.weights["head.weight"]
    for given in (here / "new", {"lm_head.weight": new.lm_head.weight.detach()}):
        plan = plan_for("target")
        models = load_models(plan)
        Updates(models, plan.files).update(given)
        own = models.head.body.weights["head.weight"]
        assert torch.equal(own.dequantise(), fresh.dequantise())


@pytest.mark.parametrize("wanted", ["auto", "target", "int8", "fp8"])
def test_drafter_without_a_head_shares_the_8_bit_head_of_its_target(here, wanted):
    """Unless it is to have another layout: then it has a copy. The memory plan counts each once."""
    write_head(here / "flash", "dflash", seed=1)
    plan = plan_of(dtype="fp8", draft="heads:flash", draft_dtype=wanted)
    assert not plan.files.draft.head.heads
    models = load_models(plan)
    copy, expected = models.head.body.weights.get("head.weight"), 0
    if wanted == "int8":
        whole = models.target.weights["head.weight"].dequantise()
        assert copy.layout == "int8"
        assert torch.equal(copy.dequantise(), Quantised.of(whole, "int8").dequantise())
        expected = copy.nbytes
    else:
        assert copy is None
        assert models.head.body.head is models.target.head
    words = {"dtype": torch.float32, "device": torch.device("cuda"), "longest": 6}
    words |= {"layouts": plan.layouts}
    spec, head = plan.files.target.spec, plan.files.draft
    alone = footprint(spec, None, **words).weights
    both = footprint(spec, head.spec, head=head.head, draft_format=plan.draft_format, **words)
    loaded = load(head, dtype=torch.float32, device=CPU, layouts=plan.draft_format.layouts)
    expected += sum(one.nbytes for one in loaded.values())
    assert both.weights - alone == expected


def _e4m3(x):
    scales = x.abs().amax(-1, keepdim=True) / 448
    return (x / scales).to(torch.float8_e4m3fn).float() * scales


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True])
def test_logits_of_an_8_bit_target_are_those_of_its_rounded_head(here, layout, tied):
    """Against a product with the head rounded here. Ids of embeddings keep their numbers."""
    theirs = write_checkpoint(
        "qwen3", here / "other", seed=3, use_sliding_window=False, tie_word_embeddings=tied
    )
    write_tokenizer(here / "other")
    words = {"target": "other", "draft": "none", "name": "x"}
    plan = make_plan(make_job(Pair(**words), device="cpu", dtype=layout))
    target = load_models(plan).target
    hidden = torch.randn(3, target.spec.width, generator=torch.Generator().manual_seed(4))
    head = theirs.get_output_embeddings().weight.detach()
    if layout == "fp8":
        expected = _e4m3(hidden) @ _e4m3(head).T
    else:
        scales = head.abs().amax(1, keepdim=True) / 127
        expected = hidden @ ((head / scales).round() * scales).T
    torch.testing.assert_close(target.logits(hidden), expected[:, : target.vocab])
    embed = theirs.get_input_embeddings().weight.detach()
    assert torch.equal(target.weights.plain("embed.weight"), embed)


def test_samples_of_a_16_bit_head_are_not_continued_with_an_8_bit_head(here):
    """Files of versions before heads had 8 bits have no such key."""
    flags = (*FLAGS, "--dtype", "int8", "--draft", "none", "--out", "o.jsonl")
    bass(*flags, "--limit", "1", code=0)
    path = here / "o.jsonl.manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest["results"].pop("head_dtype") == "int8"
    bass(*flags, code=0)
    kept = (here / "o.jsonl").read_bytes()
    path.write_text(json.dumps(manifest))
    assert 'head_dtype: not given before, "int8" now' in bass(*flags, code=2).stderr
    assert (here / "o.jsonl").read_bytes() == kept


def test_split_target_has_the_samples_of_the_whole_one(here):
    flags = ("--pair", "pair.yaml", "--n", "2", "--max-new-tokens", "8", "--dtype", "int8")
    bass(*flags, "--draft", "none", "--out", "whole.jsonl", code=0)
    bass(*flags, "--draft", "lookup", "--tensor-parallel", "2", "--out", "split.jsonl", code=0)
    assert lines(here / "split.jsonl") == lines(here / "whole.jsonl")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plan_counts_the_bytes_of_a_quantised_target(here, layout):
    plan = plan_of(dtype=layout, draft="none")
    words = {"dtype": torch.float32, "device": torch.device("cuda"), "longest": 0}
    found = footprint(plan.files.target.spec, None, layouts=plan.layouts, **words)
    target = plan.files.target
    loaded = load(target, dtype=torch.float32, device=CPU, layouts=plan.layouts)
    tied = target.spec.tied
    assert found.weights == sum(
        one.nbytes for name, one in loaded.items() if not (tied and name == "head.weight")
    )
    assert found.weights < footprint(target.spec, None, **words).weights


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"draft": "lookup", "draft_dtype": "int8"}, "the draft lookup loads no weights"),
        ({"draft": "skip:0", "draft_dtype": "fp8"}, "the draft skip:0 loads no weights"),
        ({"draft_dtype": "bf16"}, "computes in the target's format; use one of auto, target"),
    ],
)
def test_draft_dtype_without_meaning_is_refused(here, words, reason):
    with pytest.raises(UserError, match=reason):
        plan_of(**words)


def test_another_draft_of_the_command_line_does_not_have_the_pairs_draft_dtype(here):
    (here / "pair.yaml").write_text("target: target\ndraft: 'heads:head'\ndraft_dtype: int8\n")
    assert plan_of().draft_format.layouts == Layouts("int8", "int8")
    assert plan_of(draft="lookup").draft_format.layouts == Layouts()
    given = plan_of(draft="heads:head", draft_dtype="fp8")
    assert given.draft_format.layouts == Layouts("fp8", "fp8")
