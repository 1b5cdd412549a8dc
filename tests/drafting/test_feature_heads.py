"""Drafters that read the target's hidden states: the drafts equal those of a full forward by the
papers, whatever came before; hidden states are recorded only if a drafter reads them; what is
refused."""

import functools
import json
import re

import pytest
import torch
from checkpoints import write_checkpoint
from decoders import load_decoder, load_head
from fakes import FakeGraphs
from heads import MASK, config_of, write_head
from reading import (
    FLAGS,
    Compared,
    check_on_a_gpu,
    goes_on_and_is_plain,
    has_the_targets_law,
    write_pair,
)
from safetensors.torch import load_file, save_file
from test_ahead import Settled, ready
from test_captured import Tour, rows
from test_cutting import watched
from test_parallel import bass
from thinned import thinned_on_cpu
from toys import Reactive, drive, loop_for, plain

import bass_kernels as ops
from bass_cli.config.job import load_pair, make_job
from bass_cli.engine.batch import Row, beyond
from bass_cli.engine.sampling import RowSampling
from bass_cli.engine.verify import CHEAP, Cut
from bass_cli.errors import UserError
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.draft_heads import head_of_config, open_head
from bass_cli.formats.weights import load
from bass_cli.lengths.controllers import Fixed
from bass_cli.lengths.goodput import Goodput
from bass_cli.models import decoder
from bass_cli.models.block_allocator import Change
from bass_cli.models.runner import Runner
from bass_cli.run.memory import footprint
from bass_cli.run.pair import cut_of
from bass_cli.run.plan import make_plan
from bass_cli.run.profile import measure

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # of Triton's kernels
KINDS = ("dflash", "dspark", "dflash-speculators", "dspark-speculators")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A function from a target's family and a drafter's kind to both: as transformers and the
    papers define them, and as we read them."""

    @functools.cache
    def made(family, kind, form=None):
        folder = tmp_path_factory.mktemp(family)
        theirs = write_checkpoint(family, folder / "target")
        width = theirs.config.hidden_size
        reading = write_head(folder / "head", kind, width=width)
        ops.use(form)  # kernels read no packed weights
        place = DEVICE if form == "triton" else CPU
        target = load_decoder(folder / "target", device=place)
        head = load_head(open_head(folder / "head", target.spec), target)
        ops.use(None)
        return theirs, reading, target, head

    return made


@pytest.mark.parametrize(
    ("family", "kind"),
    thinned_on_cpu([("qwen3", "dflash"), ("llama3", "dspark"), ("codegen", "dflash-speculators"),
             ("opt", "dspark-speculators")], [("llama3", "dspark"), ("codegen", "dflash-speculators")]),
)  # fmt: skip
def test_drafts_equal_a_full_forward(models, family, kind):
    """Also of rows that have just begun, samples of one prompt and moved rows; after full,
    partial and no acceptance, after plain rounds and longer drafts. The tokens equal those of
    plain decoding."""
    theirs, reading, target, head = models(family, kind)
    due, seen = plain(target, rows()), set()
    for batch, lengths, acceptance in (
        (3, Tour(), (0.8, 1.0)),
        (5, Tour(), None),
        (2, Reactive(), None),
    ):
        loop = loop_for(target, head, rows=batch, lengths=lengths, acceptance=acceptance)
        compared = Compared(loop, theirs, reading)
        found = drive(loop, rows(18) if acceptance else rows())
        assert acceptance or found == due
        seen |= set(compared.seen)
    lengths = {length for length, *_ in seen}
    assert {1, 2, 3, head.spec.drafts} <= lengths
    assert max(lengths) == head.spec.drafts == reading.block - kind.startswith("dflash")
    assert any(generated == 0 for _, generated, _ in seen)


def test_prompts_are_read_by_target_and_drafter(models):
    """Also shared prefixes that are copied, prompts of several passes, and one with a deadline."""
    theirs, reading, target, head = models("qwen3", "dspark")
    text = torch.randint(3, 290, (140,), generator=torch.Generator().manual_seed(3)).tolist()
    live = [
        Row(str(p), s, 1, tokens, 4 + s, sampling=RowSampling(temperature=0.7))
        for p, tokens in enumerate((text, [*text[:131], 5, 6, 7], text[:40], [9]))
        for s in range(2)
    ]
    loop = loop_for(target, head, rows=8, lengths=Fixed(3))
    compared = Compared(loop, theirs, reading)
    for p in range(4):
        assert loop.open(
            str(p), live[2 * p].tokens, deadline=loop.clock.now() + 1e6 if p == 2 else None
        )
    loop.swap_rows((), live)
    loop.round()
    loop.round()
    assert len(compared.seen) == 16


@pytest.mark.parametrize("batch", thinned_on_cpu([2, 5], [5]))
def test_captured_rounds_and_those_launched_ahead(models, batch):
    """For any captured length and any launch time the tokens equal those of plain decoding, and
    the drafts those of the papers."""
    theirs, reading, target, head = models("qwen3", "dflash")
    due = plain(target, rows())
    for lengths in (Settled(), Goodput(limit=head.spec.drafts, at_once=True)):
        loop = loop_for(target, head, rows=batch, lengths=lengths, graphs=FakeGraphs())
        compared, flights = Compared(loop, theirs, reading), ready(loop)
        assert drive(loop, rows(), ahead=True) == due
        assert not any(shape.kind == "catch up" for _, shape in loop.graphs.done)
        assert {shape.width for _, shape in loop.graphs.done} <= {0, 1, 2, 3, 4, 5}
        if isinstance(lengths, Settled):
            assert flights.behind > 5
            assert len({length for length, *_ in compared.seen}) > 4


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_cut_drafts_equal_the_papers(models, kind):
    """The drafter finds the target's outputs after a pass with unequal numbers of tokens: later
    drafts are the same, and the tokens equal those of plain decoding, captured, launched ahead
    and uncaptured."""
    theirs, reading, target, head = models("qwen3", kind)
    due, cut = plain(target, rows(20)), Cut(head.spec.drafts, 0, 2)
    for batch, graphs in ((1, None), (3, None), (5, FakeGraphs())):
        loop = loop_for(target, head, rows=batch, lengths=Settled(), graphs=graphs, cut=cut)
        compared, seen = Compared(loop, theirs, reading), watched(loop)
        if graphs is not None:
            ready(loop)
        assert drive(loop, rows(20), ahead=True) == due
        assert any(counts != accepted for _, _, counts, accepted in seen)
        assert {length for length, *_ in compared.seen} >= {3, 4}


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_captures_change_no_sample_under_maximal_coupling(models, kind):
    """A longer graph that serves drafts the same tokens: a block always has all its places."""
    _, _, target, head = models("qwen3", kind)
    due = drive(loop_for(target, head, rows=3, lengths=Tour(), coupling="maximal"), rows())
    loop = loop_for(target, head, rows=3, lengths=Tour(), coupling="maximal", graphs=FakeGraphs())
    assert drive(loop, rows()) == due
    longer = [shape.width for how, shape in loop.graphs.done if shape.kind == "block"]
    assert longer
    assert max(longer) <= head.spec.drafts
    assert loop.graphs.count("replay", "block") > 3


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_maximal_coupling_has_the_targets_distribution(tmp_path, kind):
    """Over a vocabulary of twelve."""
    theirs = write_checkpoint("qwen3", tmp_path / "target", vocab_size=12, num_hidden_layers=2)
    mask = {"mask_token_id": 11, "dflash_config": {"mask_token_id": 11, "target_layer_ids": [0]}}
    write_head(tmp_path / "head", kind, vocab=12, aux_layers=(0,), **mask)
    target = load_decoder(tmp_path / "target")
    head = load_head(open_head(tmp_path / "head", target.spec), target)
    has_the_targets_law(theirs, target, head)


def test_target_without_a_reader_records_no_hidden_states(models, monkeypatch):
    """No tensor, no layer in its cache, no operation; also beside another drafter."""
    _, _, target, head = models("qwen3", "dflash")
    due, tapped = plain(target, rows()), []
    aux_layers = decoder.AuxHiddenLayers
    monkeypatch.setattr(
        decoder, "AuxHiddenLayers", lambda *given: tapped.append(1) or aux_layers(*given)
    )
    for lengths in (Fixed(0), Tour()):
        loop = loop_for(target, target, rows=3, lengths=lengths)
        assert drive(loop, rows()) == due
        assert len(loop.target.cache.own_keys) == len(target.layers)
    assert tapped == []
    loop = loop_for(target, head, rows=3, lengths=Fixed(0))
    assert drive(loop, rows()) == due
    assert tapped
    assert len(loop.target.cache.own_keys) == len(target.layers) + head.spec.body.layers
    tapped.clear()
    loop.target = loop.target.without_reader()
    loop._executor._target = loop.target
    live = [Row("x", s, 0, [4, 5], 9) for s in range(3)]
    loop.open("x", [4, 5])
    loop.swap_rows((), live)
    tapped.clear()  # of the prompt
    loop.round()
    assert tapped == []


@pytest.mark.parametrize("width", [3, 17])
def test_gpu_kernels_give_the_same_drafts(models, monkeypatch, width):
    """Up to 16 tokens of the target take the fused layers, whose residual stream is recorded
    too; blocks always take the ordinary ones."""
    pytest.importorskip("triton")
    _, _, target, head = models("qwen2", "dspark", "triton")
    found, fused, run = [], [], decoder.run_fused
    monkeypatch.setattr(decoder, "run_fused", lambda *given: fused.append(1) or run(*given))
    for form in ("reference", "triton"):
        ops.use(form)
        runner = Runner(target.read_by(head), rows=1, span=30, pending=1)
        runner.open("0", [5, 6, 7, 8, 9])
        runner.follow(Change((), (), (((0,), "0"),)))
        with torch.inference_mode(), DEVICE:
            tokens = torch.arange(20, 20 + width)[None]
            runner.forward(tokens, torch.arange(4, 4 + width)[None], None)
            block = torch.tensor([[11] + [MASK] * 4])
            step = runner.cache.decode_pass(torch.arange(4 + width, 9 + width)[None], None)
            found.append(head.draft(block, step, 4))
    assert bool(fused) == (width <= 16)
    torch.testing.assert_close(found[1], found[0], atol=1e-3, rtol=1e-3)


@pytest.fixture
def here(here):
    """A pair with a drafter in each layout: `head` is a DSpark, `flash` a DFlash."""
    write_pair(here)
    write_head(here / "head", "dspark")
    write_head(here / "flash", "dflash-speculators", seed=1)
    return here


def test_resumed_run_equals_plain_decoding(here):
    goes_on_and_is_plain(here, ("--draft", "heads:flash", "--draft-length", "30"))


def test_job_cuts_drafts_only_with_a_block_drafter(here):
    """If the drafter makes a block, it drafts more than are verified on average, within the
    places of rows; not under maximal coupling, for a split target, or without such a drafter."""

    def plan(**flags):
        return make_plan(make_job(load_pair("pair.yaml"), device="cpu", **flags))

    most = plan().files.draft.head.drafts
    assert plan().cut == Cut(most, CHEAP["cpu"], 4)
    fixed = plan(draft_length=2)
    assert fixed.cut is not None
    assert fixed.span - fixed.new_tokens >= beyond(fixed.cut.drafted(2))
    assert plan(coupling="maximal").cut is None
    assert plan(draft="none").cut is None
    assert plan(draft="lookup").cut is None
    job = fixed.job.model_copy(update={"tensor_parallel": 2})
    assert cut_of(job, fixed.files, CPU) is None


def test_another_drafter_is_a_different_run_under_maximal_coupling(here):
    flags = (*FLAGS, "--limit", "1", "--coupling", "maximal", "--out", "o.jsonl")
    bass(*flags, code=0)
    config = json.loads((here / "head" / "config.json").read_text())
    (here / "head" / "config.json").write_text(json.dumps(config | {"target_layer_ids": [0, 2]}))
    assert "draft_files" in bass(*flags, "--n", "4", code=2).stderr


@pytest.mark.parametrize(
    ("kind", "keys", "reason"),
    [
        ("dspark", {"architectures": ["Qwen3DSparkModle"]}, 'the drafter "Qwen3DSparkModle" is not supported; did'),
        ("dspark", {"architectures": None}, 'the key "architectures" (or speculators_model_type) is missing'),
        ("dspark-speculators", {"speculators_model_type": "mlp"}, 'the drafter "mlp" is not supported'),
        ("dspark", {"hidden_size": 64},
         'key "hidden_size": the drafter was trained for a target of 64, and this one has 48'),
        ("dspark", {"vocab_size": 302},
         'key "vocab_size": the drafter was trained for a target of 302, and this one has 301'),
        ("dspark", {"target_layer_ids": [0, 3]}, "the target's layers, from 0 to 2, are needed, not [0, 3]"),
        ("dspark", {"target_layer_ids": None}, 'the key "target_layer_ids" is missing'),
        ("dspark-speculators", {"aux_hidden_state_layer_ids": [0, 2]}, "from 1 to 3, are needed, not [0, 2]"),
        ("dspark", {"target_layer_ids": [1, 1]}, 'key "target_layer_ids": rising numbers'),
        ("dspark", {"mask_token_id": 301}, 'key "mask_token_id": the id of a mask token, from 0 to 300'),
        ("dflash", {"dflash_config": {"target_layer_ids": [0, 1]}}, 'the key "mask_token_id" is missing'),
        ("dflash", {"block_size": 1}, 'key "block_size": from 2 to 64 places are supported, not 1'),
        ("dflash", {"block_size": "6"}, 'key "block_size": a number above 0'),
        ("dspark", {"markov_head_type": "gated"}, "'gated' is not supported, only 'vanilla' is"),
        ("dflash", {"dflash_config": {"causal": True}}, 'key "causal": True is not supported, only False is'),
        ("dspark", {"markov_rank": None}, 'the key "markov_rank" is missing'),
        ("dspark", {"sample_from_anchor": "yes"}, 'key "sample_from_anchor": true or false is needed'),
        ("dspark", {"sample_from_anchor": True, "dspark_bonus_anchor": True}, "contradict each other"),
        ("dspark", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}, "layers with a window"),
        ("dspark", {"model_type": "gemma3_text"}, 'layers like those of "gemma3_text" are not supported'),
    ],
)  # fmt: skip
def test_unknown_or_mismatched_configs_are_refused(models, kind, keys, reason):
    _, _, target, _ = models("qwen3", "dflash")
    config = config_of(kind, width=48, vocab=301, aux_layers=(0, 1), **keys)
    with pytest.raises(UserError) as refused:
        head_of_config(config, target.spec, place="head/config.json")
    assert reason in str(refused.value)
    assert str(refused.value).startswith("head/config.json: ")


def test_refusal_comes_before_weights_are_read(here, monkeypatch):
    monkeypatch.setattr("bass_cli.run.build.load", lambda *a, **k: pytest.fail("weights were read"))
    config = config_of("dspark", width=48, vocab=301, aux_layers=(0, 3))
    (here / "head" / "config.json").write_text(json.dumps(config))
    refused = bass(*FLAGS, "--out", "o.jsonl", code=2)
    said = re.sub(r"\s+", " ", refused.stderr)
    assert f'{here / "head" / "config.json"}: key "target_layer_ids": rising' in said


def test_tensors_are_checked_against_the_config(here):
    for keys, reason in (
        ({"markov_rank": 5}, 'tensor "markov_head.markov_w1.weight" has shape [301, 6], not [301, 5]'),
        ({"markov_rank": 0}, 'tensors "markov_head.markov_w1.weight", "markov_head.markov_w2.weight" are unknown'),
        ({"num_hidden_layers": 3}, '"layers.2.self_attn.q_proj.weight"'),
        ({"target_layer_ids": [0, 1, 2]}, 'tensor "fc.weight" has shape [48, 96], not [48, 144]'),
    ):  # fmt: skip
        config = config_of("dspark", width=48, vocab=301, aux_layers=(0, 1), **keys)
        (here / "head" / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=re.escape(reason)):
            open_head(here / "head", open_checkpoint(here / "target").spec)
    for words in ("heads:", "heads:lookup", "heads:parallel:x"):
        refused = bass(*FLAGS, "--draft", words, code=2)
        assert "write it like heads:PATH" in re.sub(r"\s+", " ", refused.stderr)


def test_memory_of_the_drafter_is_counted(here):
    """Weights as they are loaded, and its layers in the target's cache."""
    target = open_checkpoint(here / "target")
    for name in ("head", "flash"):
        head = open_head(here / name, target.spec)
        words = {"dtype": torch.bfloat16, "device": CPU, "longest": 6}
        with_it = footprint(target.spec, head.spec, at_once=True, head=head.head, **words)
        without = footprint(target.spec, None, **words)
        weights = load(head, dtype=torch.bfloat16, device=CPU)
        assert with_it.weights - without.weights == 2 * sum(one.numel() for one in weights.values())
        assert head.size >= 4 * sum(one.numel() for one in weights.values())
        assert with_it.token.cache - without.token.cache == 2 * 2 * 2 * 2 * 8
        assert with_it.buffers > without.buffers


def test_deepspec_dflash_drafter_has_no_bias(models, tmp_path):
    """A DSpark of rank 0 drafts at every place, the anchor's too."""
    theirs, _, target, _ = models("qwen3", "dspark")
    reading = write_head(tmp_path, "dspark", markov_rank=0)
    head = load_head(open_head(tmp_path, target.spec), target)
    assert (head.spec.drafts, head.spec.rank) == (5, 0)
    reading.bias = lambda token: 0.0
    loop = loop_for(target, head, rows=5, lengths=Tour())
    compared = Compared(loop, theirs, reading)
    assert drive(loop, rows()) == plain(target, rows())
    assert compared.seen


@pytest.mark.parametrize(
    ("kind", "coupling"), [("dflash-speculators", "maximal"), ("dspark-speculators", "shared")]
)
def test_shorter_vocabulary_uses_the_targets_ids(models, tmp_path, kind, coupling):
    """Tokens that the drafter does not know are never drafted, under either coupling."""
    theirs, _, target, _ = models("qwen3", "dspark")
    reading = write_head(tmp_path, kind, draft_vocab_size=150)
    head = load_head(open_head(tmp_path, target.spec), target)
    loop = loop_for(target, head, rows=5, lengths=Tour(), coupling=coupling)
    proposed, propose = [], loop.drafter.propose
    loop.drafter.propose = lambda *given: proposed.append(propose(*given)) or proposed[-1]
    compared = Compared(loop, theirs, reading) if coupling == "shared" else None
    found = drive(loop, rows(18))
    drafts = torch.cat([one.tokens.flatten() for one in proposed])
    assert bool((drafts % 2 == 1).all())
    assert len(drafts.unique()) > 20
    if compared is not None:
        assert compared.seen
        assert found == plain(target, rows(18))


def test_profile_has_no_drafts_longer_than_a_block(models):
    _, _, target, head = models("qwen3", "dspark")
    loop = loop_for(target, head, rows=2, lengths=Fixed(0))
    surface = measure(loop, [[3, 1, 4]], rows=[1, 2], limit=2.0, tokens=20)
    assert surface.widths == (0, 1, 2, 3, 4, 5)


def test_ids_of_a_shorter_vocabulary_are_checked(here):
    target = open_checkpoint(here / "target").spec
    for change, reason in (
        (lambda tensors: tensors.pop("d2t"), 'tensor "d2t" is missing; it maps the 150 tokens'),
        (lambda tensors: tensors.update(d2t=tensors["d2t"] + 2), '"d2t" does not give 150 different ids below 301'),
        (lambda tensors: tensors.update(d2t=-torch.arange(150)), '"d2t" does not give 150 different ids below 301'),
        (lambda tensors: tensors.update(d2t=torch.arange(9)), '[150] of type I64 is needed, not [9] of type I64'),
        (lambda tensors: tensors.pop("lm_head.weight"), 'tensor "lm_head.weight" is missing'),
    ):  # fmt: skip
        write_head(here / "head", "dflash-speculators", draft_vocab_size=150)
        tensors = load_file(here / "head" / "model.safetensors")
        change(tensors)
        save_file(tensors, here / "head" / "model.safetensors")
        with pytest.raises(UserError, match=re.escape(reason)):
            open_head(here / "head", target)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_on_a_cuda_device(tmp_path, kind):
    theirs = write_checkpoint("qwen3", tmp_path / "target")
    reading = write_head(tmp_path / "head", kind)
    target = load_decoder(tmp_path / "target", device=DEVICE)
    head = load_head(open_head(tmp_path / "head", target.spec), target)
    check_on_a_gpu(theirs, reading, target, head, rows)
