"""EAGLE-3 drafters: the drafts equal those of a full forward by the paper, whatever came before;
the target's distribution; what is refused."""

import functools
import re

import pytest
import torch
from chains import chain_config, write_chain
from checkpoints import write_checkpoint
from decoders import load_decoder, load_head
from fakes import FakeGraphs
from reading import Compared, check_on_a_gpu, goes_on_and_is_plain, has_the_targets_law, write_pair
from safetensors.torch import load_file, save_file
from test_ahead import Settled, ready
from test_captured import Tour, rows
from thinned import thinned_on_cpu
from toys import Reactive, begin, drive, loop_for, plain

import bass_kernels as ops
from bass_cli.engine.batch import Row
from bass_cli.engine.sampling import RowSampling
from bass_cli.errors import UserError
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.draft_heads import head_of_config, open_head
from bass_cli.formats.weights import load
from bass_cli.lengths.controllers import Fixed
from bass_cli.lengths.goodput import Goodput
from bass_cli.models.block_allocator import Change
from bass_cli.models.decoder import Decoder
from bass_cli.models.heads import make_head
from bass_cli.models.runner import Runner
from bass_cli.run.memory import footprint

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # of Triton's kernels


def opened(folder, place, form=None):
    """Return the target and the drafter of a folder, float32."""
    ops.use(form)  # kernels read no packed weights
    target = load_decoder(folder / "target", device=place)
    head = load_head(open_head(folder / "head", target.spec), target)
    ops.use(None)
    return target, head


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A function from a target's family and a layout to both models: as transformers and the
    paper define them, and as we read them."""

    @functools.cache
    def made(family, kind, form=None, **keys):
        folder = tmp_path_factory.mktemp(family)
        layers = "n_layer" if family == "codegen" else "num_hidden_layers"
        # transformers' state behind the last layer is the final norm's
        theirs = write_checkpoint(family, folder / "target", **{layers: 4})
        reading = write_chain(folder / "head", kind, width=theirs.config.hidden_size, **keys)
        return theirs, reading, *opened(folder, DEVICE if form == "triton" else CPU, form)

    return made


@pytest.mark.parametrize(
    ("family", "kind"),
    thinned_on_cpu(
        [
            ("llama3", "authors"),
            ("qwen3", "speculators"),
            ("codegen", "deepspec"),
            ("opt", "authors"),
        ],
        [("qwen3", "speculators"), ("opt", "authors")],
    ),
)
def test_drafts_equal_a_full_forward(models, family, kind):
    """Also of rows that have just begun, rows of a single token, samples of one prompt and moved
    rows; after full, partial and no acceptance and after plain rounds. The tokens equal those of
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
    assert {1, 2, 3} < {length for length, *_ in seen}
    assert any(generated == 0 for _, generated, _ in seen)
    assert any(end == 1 for *_, end in seen)


@pytest.mark.parametrize("keys", [{"model_type": "qwen3"}, {"norm_before_residual": False}])
def test_speculators_config_variants(models, keys):
    theirs, reading, target, head = models("qwen3", "speculators", **keys)
    loop = loop_for(target, head, rows=5, lengths=Tour())
    compared = Compared(loop, theirs, reading)
    assert drive(loop, rows(12)) == plain(target, rows(12))
    assert compared.seen


def test_default_layers_are_those_of_the_paper(tmp_path):
    """If the config names none: the states before the third, the middle and the third last
    layer."""
    theirs = write_checkpoint("qwen3", tmp_path / "target", num_hidden_layers=8)
    reading = write_chain(tmp_path / "head", "authors", eagle_config={})
    target, head = opened(tmp_path, CPU)
    assert head.aux_layers == (1, 3, 4)
    loop = loop_for(target, head, rows=5, lengths=Tour())
    compared = Compared(loop, theirs, reading)
    drive(loop, rows(12))
    assert compared.seen


@pytest.mark.parametrize("logprobs", [None, 2])
def test_prompts_are_read_by_target_and_drafter(models, logprobs):
    """Also shared prefixes that are copied (the token after them differs), a prompt that is a
    prefix of another, prompts of several passes, one with a deadline, and prompts whose
    log-probabilities are found."""
    theirs, reading, target, head = models("qwen3", "speculators")
    text = torch.randint(3, 290, (140,), generator=torch.Generator().manual_seed(3)).tolist()
    texts = (text, [*text[:131], 5, 6, 7], text[:40], [9], [*text[:139], 4], [*text, 8, 9])
    live = [
        Row(str(p), s, 1, tokens, 4 + s, sampling=RowSampling(temperature=0.7))
        for p, tokens in enumerate(texts)
        for s in range(2)
    ]
    loop = loop_for(target, head, rows=12, lengths=Fixed(3))
    compared = Compared(loop, theirs, reading)
    for p in range(len(texts)):
        timed = loop.clock.now() + 1e6 if p in (2, 4) else None
        given = logprobs if p % 2 else None
        assert loop.open(str(p), live[2 * p].tokens, deadline=timed, logprobs=given)
    loop.swap_rows((), live)
    for p, tokens in enumerate(texts) if logprobs else ():
        found = loop.target.prompt_logprobs(str(p))
        if p % 2 == 0:
            assert found is None
            continue
        with torch.inference_mode():
            due = theirs(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        own = due.gather(1, torch.tensor(tokens)[1:, None])[:, 0].numpy()
        assert found[0] == pytest.approx(own, abs=1e-4)
    loop.round()
    loop.round()
    assert len(compared.seen) == 24


@pytest.mark.parametrize("batch", thinned_on_cpu([2, 5], [5]))
def test_captured_rounds_and_those_launched_ahead(models, batch):
    """For any captured length and any launch time the tokens equal those of plain decoding, and
    the drafts those of the paper; catching up is never needed."""
    theirs, reading, target, head = models("qwen3", "authors")
    due = plain(target, rows())
    for lengths in (Settled(), Goodput(limit=8)):
        loop = loop_for(target, head, rows=batch, lengths=lengths, graphs=FakeGraphs())
        compared, flights = Compared(loop, theirs, reading), ready(loop)
        assert drive(loop, rows(), ahead=True) == due
        assert {shape.kind for _, shape in loop.graphs.done} <= {"round", "plain"}
        if isinstance(lengths, Settled):
            assert flights.behind > 5
            assert len({length for length, *_ in compared.seen}) > 4


def test_captures_change_no_sample_under_maximal_coupling(models):
    _, _, target, head = models("qwen3", "authors")
    due = drive(loop_for(target, head, rows=3, lengths=Tour(), coupling="maximal"), rows())
    loop = loop_for(target, head, rows=3, lengths=Tour(), coupling="maximal", graphs=FakeGraphs())
    assert drive(loop, rows()) == due
    assert loop.graphs.count("replay", "round") > 3


def test_chain_drafter_declares_one_pass_a_token(models):
    """For `auto`, graphs and profiles: a longer draft costs more, and it can be stopped early."""
    _, _, target, head = models("qwen3", "authors")
    loop = loop_for(target, head, rows=6, lengths=Fixed(4))
    assert not loop.drafter.at_once
    assert loop.drafter.stops_short
    live = rows()
    begin(loop, *live)
    with torch.inference_mode():
        whole = loop.drafter.propose(loop.batch, 4).tokens
        told = []
        short = loop.drafter.propose_while(loop.batch, 4, lambda p: told.append(p) or len(told) < 3)
    assert torch.equal(short.tokens, whole[:, :3])
    assert all(bool(((p > 0) & (p <= 1)).all()) for p in told)
    assert drive(loop_for(target, head, rows=4, lengths=Goodput(limit=8)), rows()) == plain(
        target, rows()
    )


def test_maximal_coupling_has_the_targets_distribution(tmp_path):
    """Over a vocabulary of twelve."""
    theirs = write_checkpoint("qwen3", tmp_path / "target", vocab_size=12, num_hidden_layers=2)
    write_chain(tmp_path / "head", "deepspec", vocab=12, target_layer_ids=[0, 1])
    target, head = opened(tmp_path, CPU)
    has_the_targets_law(theirs, target, head)


def test_tokens_outside_the_drafters_vocabulary_are_never_drafted(models):
    """Under maximal coupling; `Compared` checks the drafts of shared coupling."""
    _, _, target, head = models("qwen3", "authors")
    loop = loop_for(target, head, rows=5, lengths=Tour(), coupling="maximal")
    proposed, propose = [], loop.drafter.propose
    loop.drafter.propose = lambda *given: proposed.append(propose(*given)) or proposed[-1]
    drive(loop, rows(18))
    drafts = torch.cat([one.tokens.flatten() for one in proposed])
    assert bool((drafts % 2 == 1).all())
    assert len(drafts.unique()) > 20


def test_gpu_kernels_give_the_same_drafts(models):
    """Rows that share a prompt and have no tokens of their own yet, and later ones; the target's
    few tokens take the fused layers."""
    pytest.importorskip("triton")
    _, _, target, head = models("qwen2", "speculators", "triton")
    found = []
    for form in ("reference", "triton"):
        ops.use(form)
        runner = Runner(target.read_by(head), rows=3, span=30, pending=1)
        runner.open("0", [5, 6, 7, 8, 9])
        runner.open("1", [4])
        runner.follow(Change((), (), (((0, 1), "0"), ((2,), "1"))))
        with torch.inference_mode(), DEVICE:
            ends = torch.tensor([[5], [5], [1]])
            for width in (1, 3):
                tokens = torch.tensor([[9], [9], [4]])
                features = None
                for step in range(2):
                    at = ends - 2 + step
                    seen = runner.cache.decode_pass(at.clamp(min=0), None)
                    features = head.found(seen, at) if features is None else features
                    logits, features = head.draft(tokens, features, seen)
                    found.append(logits.clone())
                    tokens = torch.tensor([[20 + step], [30], [40]])
                fed = 20 + torch.arange(3 * width).view(3, width)
                runner.forward(fed, ends - 1 + torch.arange(width), None)
                ends = ends + width
    half = len(found) // 2
    for one, other in zip(found[half:], found[:half], strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


def test_new_row_writes_to_no_other_row(models):
    """Its first pair lies in the prompt: the places before its own belong to another row."""
    _, _, target, head = models("qwen3", "authors")
    runner = Runner(target.read_by(head), rows=3, span=30, pending=1)
    runner.open("0", [5, 6, 7, 8, 9])
    runner.follow(Change((), (), (((0, 1, 2), "0"),)))
    store = (*runner.cache.own_keys, *runner.cache.own_values)
    before = [layer.clone() for layer in store]
    prompts = [layer.clone() for layer in runner.cache.prompt_keys]
    positions = torch.full((3, 1), 3)
    with torch.inference_mode():
        step = runner.cache.decode_pass(positions, [5] * 3)
        head.draft(torch.full((3, 1), 9), head.found(step, positions), step)
        runner.forward(torch.full((3, 1), 9), positions + 1, [5] * 3)
    places = runner.cache.decode_pass(positions + 1, [5] * 3).slots().flatten().tolist()
    for old, new in zip(before, store, strict=True):
        changed = (old != new).any(-1).any(0).nonzero().flatten().tolist()
        assert set(changed) <= {0, *places}
    assert all(torch.equal(*both) for both in zip(prompts, runner.cache.prompt_keys, strict=True))


@pytest.fixture
def here(here):
    """A pair with a drafter in each layout."""
    write_pair(here)
    write_chain(here / "head", "authors")
    write_chain(here / "other", "speculators", seed=1)
    return here


def test_resumed_run_equals_plain_decoding(here):
    goes_on_and_is_plain(here, ("--draft", "heads:other", "--draft-length", "auto"))


@pytest.mark.parametrize(
    ("kind", "keys", "reason"),
    [
        ("authors", {"architectures": ["LlamaForCausalLMEagle"]}, 'the drafter "LlamaForCausalLMEagle" is not supported'),
        ("speculators", {"speculators_model_type": "eagle"}, 'the drafter "eagle" is not supported'),
        ("authors", {"num_hidden_layers": 2}, 'key "num_hidden_layers": 2 is not supported, only 1 is'),
        ("authors", {"hidden_size": 64},
         'key "hidden_size": the drafter was trained for a target of 64, and this one has 48'),
        ("authors", {"vocab_size": 302}, 'key "vocab_size": the drafter was trained for a target of 302'),
        ("speculators", {"target_hidden_size": 64}, 'key "target_hidden_size": the drafter was trained for a target of 64'),
        ("authors", {"eagle_config": {}}, 'the key "eagle_aux_hidden_state_layer_ids" is missing, and a target of 4'),
        ("authors", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}}, "from 0 to 3, are needed"),
        ("authors", {"eagle_config": {"use_aux_hidden_state": False}}, 'key "use_aux_hidden_state": False is not'),
        ("speculators", {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "from 1 to 4, are needed, not [0, 1, 2]"),
        ("deepspec", {"target_layer_ids": [2, 1]}, 'key "target_layer_ids": rising numbers'),
        ("speculators", {"norm_before_fc": True}, 'key "norm_before_fc": True is not supported, only False is'),
        ("speculators", {"norm_output": True}, 'key "norm_output": True is not supported'),
        ("speculators", {"norm_before_residual": "yes"}, 'key "norm_before_residual": true or false is needed'),
        ("speculators", {"model_type": "gemma3_text"}, 'layers like those of "gemma3_text" are not supported'),
    ],
)  # fmt: skip
def test_unknown_or_mismatched_configs_are_refused(models, kind, keys, reason):
    _, _, target, _ = models("qwen3", "authors")
    with pytest.raises(UserError) as refused:
        head_of_config(chain_config(kind, **keys), target.spec, place="head/config.json")
    assert reason in str(refused.value)
    assert str(refused.value).startswith("head/config.json: ")


def test_tensors_are_checked_against_the_config(here):
    target = open_checkpoint(here / "target").spec
    for change, reason in (
        (lambda tensors: tensors.pop("midlayer.hidden_norm.weight"), 'tensor "midlayer.hidden_norm.weight" is missing'),
        (lambda tensors: tensors.update({"input_norm.weight": torch.ones(144)}), 'tensor "input_norm.weight" is unknown'),
        (lambda tensors: tensors.update({"midlayer.self_attn.q_proj.weight": torch.ones(48, 48)}),
         'tensor "midlayer.self_attn.q_proj.weight" has shape [48, 48], not [48, 96]'),
        (lambda tensors: tensors.update({"fc.weight": torch.ones(48, 96)}), "has shape [48, 96], not [48, 144]"),
        (lambda tensors: tensors.pop("d2t"), 'tensor "d2t" is missing; it maps the 150 tokens'),
    ):  # fmt: skip
        write_chain(here / "head", "authors")
        tensors = load_file(here / "head" / "model.safetensors")
        change(tensors)
        save_file(tensors, here / "head" / "model.safetensors")
        with pytest.raises(UserError, match=re.escape(reason)):
            open_head(here / "head", target)


def test_torch_checkpoint_is_read(here):
    """As some are published, the ids of the shorter vocabulary included."""
    target, place = open_checkpoint(here / "target").spec, here / "head" / "model.safetensors"
    words = {"dtype": torch.float32, "device": CPU}
    due = open_head(here / "head", target)
    weights = load(due, **words)
    torch.save(load_file(place), place.with_name("pytorch_model.bin"))
    place.unlink()
    found = open_head(here / "head", target)
    assert found.head == due.head
    assert {piece.entry.file.suffix for piece in found.pieces} == {".bin"}
    for name, weight in load(found, **words).items():
        assert torch.equal(weight, weights[name])


def test_memory_of_the_drafter_is_counted(here):
    """Weights as they are loaded, its keys and values in the target's cache, and the features."""
    target = open_checkpoint(here / "target")
    for name, size in (("head", 12), ("other", 8)):
        head = open_head(here / name, target.spec)
        words = {"dtype": torch.bfloat16, "device": CPU, "longest": 6}
        with_it = footprint(target.spec, head.spec, head=head.head, **words)
        without = footprint(target.spec, None, **words)
        weights = load(head, dtype=torch.bfloat16, device=CPU)
        assert with_it.weights - without.weights == 2 * sum(one.numel() for one in weights.values())
        assert with_it.token.cache - without.token.cache == 2 * (2 * 2 * size + 48)
        loaded = make_head(
            head.head, weights, Decoder(target.spec, load(target, dtype=torch.bfloat16, device=CPU))
        )
        assert sum(2 * n * heads * size for n, heads, size, _ in loaded.cached) == 2 * 2 * size + 48
        assert head.mask() is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("kind", ["authors", "speculators"])
def test_on_a_cuda_device(tmp_path, kind):
    theirs = write_checkpoint("qwen3", tmp_path / "target", num_hidden_layers=4)
    reading = write_chain(tmp_path / "head", kind)
    check_on_a_gpu(theirs, reading, *opened(tmp_path, torch.device("cuda")), rows)
