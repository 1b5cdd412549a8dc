"""Models with recurrent layers: tokens with drafts equal plain decoding's, for ragged acceptance, every
width, many prompts, and rows that are put back; the state after many rounds; the distribution."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from chains import write_chain
from checkpoints import HYBRID, shallow, write_checkpoint
from decoders import load_decoder
from heads import write_head
from test_captured import Tour
from test_cutting import watched
from test_laws import distance
from test_pieces import finish, loop_of
from thinned import thinned
from toys import AtOnce, again, drive, loop_for, plain, rows_for

import bass_kernels as ops
from bass_cli.engine.batch import Row, beyond
from bass_cli.engine.contracts import Drafter, DraftLength, Proposal
from bass_cli.engine.sampling import RowSampling
from bass_cli.engine.verify import Cut
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.draft_heads import open_head
from bass_cli.formats.weights import load
from bass_cli.lengths.controllers import Fixed
from bass_cli.models.block_allocator import Change
from bass_cli.models.decoder import Decoder
from bass_cli.models.heads import make_head
from bass_cli.models.recurrent import PROMPTS
from bass_cli.models.runner import Runner
from bass_cli.run.memory import SLACK, footprint, state_bytes, widest

VOCAB = 301
# More prompts than slots for their states, of unequal lengths; the first has one token.
TEXTS = [[3 + (7 * p + 3 * t) % 290 for t in range(1 + 5 * p)] for p in range(PROMPTS + 2)]


class Oracle(Drafter):
    """Propose what plain decoding gives, with one wrong token at a place that depends on round and
    row, so that rows accept different numbers of drafts."""

    def __init__(self, due, vocab=VOCAB):
        self._due, self._vocab, self._rounds = due, vocab, 0

    def propose(self, batch, length):
        self._rounds += 1
        lines = torch.zeros(len(batch), length, dtype=torch.int64)
        for place, row in enumerate(batch.live_rows):
            text = self._due[row.key, row.sample][row.generated :][:length]
            lines[place, : len(text)] = torch.tensor(text, dtype=torch.int64)
            wrong = (5 * self._rounds + 3 * place) % (length + 2)
            if wrong < length:
                lines[place, wrong] = (lines[place, wrong] + 1) % self._vocab
        return Proposal(lines, None)


class InTurn(DraftLength):
    """Return these draft lengths in turn."""

    def __init__(self, *lengths):
        self._lengths, self._at = lengths, 0

    def next(self, rows, inputs=None):
        return self._lengths[self._at % len(self._lengths)]

    def observe(self, done):
        self._at += 1


def rows(texts=TEXTS, n=2, limit=14):
    """Return n samples of each prompt with unequal limits: sample 0 greedy, the others sampled."""
    return rows_for(
        texts, n, seed=5, limit=limit, temperature=lambda p, s: 0.9 * min(s, 1), top_p=0.98
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A function from a family to its model in transformers, and its decoder."""

    @functools.cache
    @torch.inference_mode(False)
    def both(family, **overrides):
        folder = tmp_path_factory.mktemp(family)
        model = write_checkpoint(family, folder, **shallow(family), **overrides)
        return model, load_decoder(folder)

    return both


def noisy(target):
    """Return a model with noise on the target's matrices, so that some of its drafts are
    accepted."""
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: one + 0.1 * one.std() * torch.randn(one.shape, generator=generator)
        if one.dim() == 2
        else one.clone()
        for name, one in ((name, target.weights.whole(name)) for name in target.weights)
    }
    return Decoder(target.spec, weights)


@pytest.fixture(scope="module")
def due(models):
    """A function from a family to the tokens of plain decoding for rows()."""
    return functools.cache(lambda family: plain(models(family)[1], rows()))


@pytest.mark.parametrize("family", thinned(HYBRID, HYBRID[:1]))
def test_greedy_tokens_equal_those_of_transformers(models, due, family):
    model, _ = models(family)
    for p in (0, PROMPTS + 1):
        tokens = due(family)[str(p), 0]
        ids = torch.tensor([TEXTS[p]])
        with torch.inference_mode():
            found = model.generate(
                ids, max_new_tokens=len(tokens), do_sample=False, eos_token_id=None
            )
        assert found[0, len(TEXTS[p]) :].tolist() == tokens


def test_joined_maps_give_the_tokens_of_separate_ones(models, due):
    """As on a GPU, where both maps of a recurrent layer's input are one product."""
    _, target = models(HYBRID[0])
    other = Decoder(target.spec, {name: one.clone() for name, one in target.weights.items()})
    other._inputs = other._join_inputs()
    assert [*other._inputs] == [*target.spec.recurrent.layers]
    for name, one in target.weights.items():
        assert torch.equal(other.weights.plain(name), one)
    assert plain(other, rows()) == due(HYBRID[0])
    first = f"layers.{target.spec.recurrent.layers[0]}.delta_gates.weight"
    with other.weights.writing(first) as gates:
        gates.fill_(7.0)
    assert (other._inputs[target.spec.recurrent.layers[0]][-len(gates) :] == 7.0).all()


@pytest.mark.parametrize("lengths", [(1, 2, 3, 4, 5, 6, 7, 8, 9, 0), (9,)])
@pytest.mark.parametrize(("family", "batch"), [*zip(HYBRID, (5, 20, 1), strict=True)])
def test_tokens_with_drafts_equal_plain_decoding(models, due, family, batch, lengths):
    _, target = models(family)
    accepted = set()
    loop = loop_for(target, Oracle(due(family)), rows=batch, lengths=InTurn(*lengths))
    found = drive(loop, rows(), on_round=lambda done, _: accepted.add(done.accepted))
    assert found == due(family)
    ragged = [len({*one}) for one in accepted]
    assert batch == 1 or max(ragged) > 2, "rows accepted equally many: this run showed nothing"


@pytest.mark.parametrize("coupling", ["shared", "maximal"])
def test_other_drafts_equal_plain_decoding(models, due, coupling, tmp_path):
    """Lookup, and a draft model with attention only, as point masses or sampled."""
    _, target = models(HYBRID[0])
    write_checkpoint("llama", tmp_path, **shallow("llama"))
    weights = load(open_checkpoint(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    draft = Decoder(open_checkpoint(tmp_path).spec, weights)
    sure = {key: tokens for key, tokens in due(HYBRID[0]).items() if key[1] == 0}
    for drafter in (draft, "lookup"):
        loop = loop_for(target, drafter, rows=4, lengths=Fixed(3), coupling=coupling)
        found = drive(loop, rows())
        if coupling == "shared":
            assert found == due(HYBRID[0])
        assert {key: found[key] for key in sure} == sure


def test_rows_that_are_put_back_are_drawn_again(models):
    _, target = models(HYBRID[1])
    given = rows(TEXTS[2:5], n=2, limit=50)
    wanted = plain(target, [again(row) for row in given])
    loop = loop_of(target, Oracle(wanted), lengths=InTurn(4, 2, 6), total=7, graphs=False)
    found, back, _, _ = finish(loop, given)
    assert back > 0
    assert found == wanted


def test_draft_that_is_the_target_is_accepted_after_plain_rounds(models):
    """Token by token. Plain rounds leave the draft's state behind by several tokens, of which
    rows lack different numbers."""
    _, target = models(HYBRID[0])
    seen, live = [], rows(TEXTS[:4], n=1, limit=70)
    lengths = InTurn(3, 0, 0, 0, 0, 3, 0, 3, 3, 0, 0, 8, 1)
    wanted = plain(target, [again(row) for row in live])
    loop = loop_for(target, target, rows=3, lengths=lengths)
    assert drive(loop, live, on_round=lambda done, _: seen.append(done)) == wanted
    assert sum(done.width for done in seen) > 60
    assert all(kept == done.width for done in seen for kept in done.accepted)


def test_captured_rounds_launched_ahead_equal_plain_decoding(models):
    """With every kind of draft of a hybrid model, padding rows, and rows that are put back."""
    _, target = models(HYBRID[2])
    draft = noisy(target)
    given = rows(TEXTS[1:4], n=2, limit=26)
    wanted, accepted = plain(target, [again(row) for row in given]), 0
    for drafter in (draft, AtOnce(draft, 300), "lookup"):
        loop = loop_of(target, drafter, lengths=Tour(), total=9)
        live = [again(row) for row in given]
        found, _, _, _ = finish(loop, live)
        assert found == wanted
        accepted += sum(row.accepted for row in live) if drafter != "lookup" else 0
    assert accepted > 20


def test_cut_rounds_equal_plain_decoding(models, due):
    """The target verifies different numbers of drafts of the rows, one row after the other."""
    _, target = models(HYBRID[0])
    loop = loop_for(target, AtOnce(noisy(target), 300), rows=5, lengths=Fixed(2), cut=Cut(16, 0, 3))
    seen = watched(loop)
    assert drive(loop, rows()) == due(HYBRID[0])
    assert any(len(set(counts)) > 1 for _, _, counts, _ in seen)


@pytest.mark.slow
@pytest.mark.parametrize("family", HYBRID)
def test_gpu_kernels_give_the_same_tokens(models, family):
    """In Triton's interpreter, with ragged acceptance and with drafts of a hybrid model."""
    _, target = models(family)
    given = rows(TEXTS[1:3], n=2, limit=6)
    wanted = plain(target, [again(row) for row in given])
    ops.use("triton")
    for draft in (Oracle(wanted), noisy(target)):
        loop = loop_for(target, draft, rows=3, lengths=InTurn(2, 3))
        assert drive(loop, [again(row) for row in given]) == wanted


@pytest.mark.parametrize("kind", thinned(["dflash", "dspark", "authors"], ["dflash"]))
def test_drafts_that_read_hidden_states_equal_plain_decoding(models, kind, tmp_path):
    """Their own layers come after the target's attention layers in the store. The definition of
    such a drafter makes the same drafts with an attention-only target (test_feature_heads.py)."""
    _, target = models(HYBRID[0])
    (write_chain if kind == "authors" else write_head)(tmp_path, kind)
    checkpoint = open_head(tmp_path, target.spec)
    weights = load(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    head = make_head(checkpoint.head, weights, target)
    given = rows(TEXTS[1:4], n=2, limit=30)
    wanted = plain(target, [again(row) for row in given])
    loop = loop_of(target, head, lengths=InTurn(3, 5, 0, 1), total=9)
    live = [again(row) for row in given]
    found, _, _, _ = finish(loop, live)
    assert found == wanted
    assert sum(row.drafted for row in live) > 60
    stored = loop.target.cache.own_keys
    assert len(stored) == 1 + sum(layers.number for layers in head.cached)


def test_plan_counts_the_bytes_of_the_states(models):
    for family in HYBRID:
        spec = models(family)[1].spec
        runner = Runner(models(family)[1], rows=3, span=20, pending=1, width=widest(5))
        held = runner.cache.states.bytes()
        words = {"dtype": torch.float32, "device": torch.device("cpu"), "longest": 5}
        found = footprint(spec, None, **words)
        without = footprint(replace(spec, recurrent=None), None, **words)
        assert (3 + PROMPTS) * state_bytes(spec, widest(5), torch.float32) == held
        extra = beyond(5) + SLACK
        assert found.row.cache == extra * found.token.cache + held // (3 + PROMPTS)
        assert found.token.cache < without.token.cache  # keys of attention layers only
        doubled = footprint(spec, spec, **words)
        assert doubled.row.cache == 2 * found.row.cache


def test_prompt_is_read_once_for_its_samples_and_again_if_its_state_has_gone(models):
    _, target = models(HYBRID[0])
    runner, read = Runner(target, rows=2, span=20, pending=1), []
    passes = runner._passes.run
    runner._passes.run = lambda parts, capture: (
        read.extend(len(part.tokens) for part in parts),
        passes(parts, capture=capture),
    )
    for p, text in enumerate(TEXTS):
        runner.open(str(p), text)
    runner.follow(Change((), (), (((0, 1), "3"),)))
    assert read.count(len(TEXTS[3]) - 1) == 1
    for p in (4, 5):  # their states take no other's
        runner.follow(Change((0,), (), (((0,), str(p)),)))
    runner.follow(Change((0,), (), (((0,), "3"),)))
    assert read.count(len(TEXTS[3]) - 1) == 1
    for p in range(4, PROMPTS + 2):
        runner.follow(Change((0,), (), (((0,), str(p)),)))
    runner.follow(Change((0,), (), (((0,), "1"),)))
    runner.follow(Change((0,), (), (((0,), "2"),)))
    runner.follow(Change((0,), (), (((0,), "3"),)))
    assert read.count(len(TEXTS[3]) - 1) == 2


def test_prompt_that_is_read_again_is_scored_once(models):
    model, target = models(HYBRID[0])
    runner = Runner(target, rows=2, span=20, pending=1)
    for p, text in enumerate(TEXTS):
        runner.open(str(p), text, logprobs=0)
    for p in (*range(PROMPTS + 2), 3):
        runner.follow(Change((0,) if p else (), (), (((0,), str(p)),)))
    runner.follow(Change((0,), (), (((0,), "3"),)))
    for p in (3, PROMPTS + 1):
        found, _ = runner.prompt_logprobs(str(p))
        with torch.inference_mode():
            logits = model(torch.tensor([TEXTS[p]]), use_cache=False).logits[0, :-1]
        wanted = logits.log_softmax(-1)[range(len(TEXTS[p]) - 1), TEXTS[p][1:]]
        torch.testing.assert_close(torch.from_numpy(found), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("count", [300, pytest.param(2000, marks=pytest.mark.slow)])
@torch.inference_mode()
def test_state_after_many_rounds_is_that_of_a_fresh_pass(models, count):
    """Rounds of 1 to 9 tokens, of which a part is accepted; the rejected ones are other tokens."""
    _, target = models(HYBRID[0])
    batch = 2
    generator = torch.Generator().manual_seed(3)
    widths = torch.randint(1, 10, (count,), generator=generator).tolist()
    luck = torch.rand(batch, count, generator=generator).tolist()
    kept = [
        [1 + (chance < 0.2) * (width // 2) for chance, width in zip(one, widths, strict=True)]
        for one in luck
    ]
    most = max(map(sum, kept)) + 20
    texts = torch.randint(VOCAB, (batch, most), generator=generator)
    runner = Runner(target, rows=batch, span=most, pending=1, width=9)
    lengths = [5, 11]
    for row, length in enumerate(lengths):
        runner.open(str(row), texts[row, :length].tolist())
        runner.follow(Change((), (), (((row,), str(row)),)))
    ends = torch.tensor(lengths)
    for number, width in enumerate(widths):
        positions = ends[:, None] - 1 + torch.arange(width)
        tokens = texts.gather(1, positions)
        accepted = torch.tensor([one[number] for one in kept])
        drafts = torch.arange(width) >= accepted[:, None]
        tokens = torch.where(drafts, (tokens + 1 + number) % VOCAB, tokens)
        runner.feed(tokens, positions, (positions[:, -1] + 1).tolist())
        ends = ends + accepted
    last = ends[:, None] - 1
    runner.feed(texts.gather(1, last), last, ends.tolist())
    fresh = Runner(target, rows=batch, span=20, pending=1)
    for row, end in enumerate(ends.tolist()):
        fresh.open(str(row), texts[row, :end].tolist())
        fresh.follow(Change((), (), (((row,), str(row)),)))
    for found, wanted in zip(runner.cache.states._layers, fresh.cache.states._layers, strict=True):
        assert wanted.state[:batch].std() > 1e-3
        torch.testing.assert_close(found.state[:batch], wanted.state[:batch], atol=1e-4, rtol=0)


def test_distribution_under_maximal_coupling_is_the_targets(models):
    """Against the products of transformers' own probabilities of all texts of three tokens. The
    drafts are point masses, half of them rejected."""
    vocab, draws, prompt = 5, 1500, [3, 1, 4]
    model, target = models(HYBRID[2], vocab_size=vocab)
    law = {}
    for tokens in itertools.product(range(vocab), repeat=3):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
        chances = logits[len(prompt) - 1 : -1].double().softmax(-1)
        law[tokens] = float(chances[range(3), list(tokens)].prod())
    given = [
        Row("0", s, 2, list(prompt), 3, sampling=RowSampling(temperature=1.0)) for s in range(draws)
    ]
    guess = {("0", s): [s % vocab] * 12 for s in range(draws)}
    loop = loop_for(target, Oracle(guess, vocab), rows=draws, lengths=Fixed(2), coupling="maximal")
    found = drive(loop, given)
    away, bound = distance(law, list(found.values()))
    assert away < bound
    assert sum(row.accepted for row in given) > 100
