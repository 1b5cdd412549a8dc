"""Jobs whose rows have logits processors and min-p: the tokens of plain decoding with any drafts,
those of transformers if greedy, and the exact distribution on a tiny vocabulary."""

import itertools
import math
from collections import Counter

import pytest
import torch
from checkpoints import shallow, write_checkpoint
from decoders import load_head, load_noisy_pair
from heads import write_head
from test_captured import Tour, captured
from test_cutting import ALWAYS
from test_laws import distance, tables
from toys import AtOnce, Guess, Markov, drive, loop_for, plain

from bass_cli.engine.batch import Row
from bass_cli.engine.host_state import LIMIT
from bass_cli.engine.sampling import RowSampling
from bass_cli.formats.draft_heads import open_head
from bass_cli.lengths.controllers import Fixed

VOCAB, LENGTH = 5, 3
PROMPTS = ([7], [3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8])
ALLOWED = (*range(0, 301, 3), 7, 8, 250)
SETTINGS = (
    RowSampling(temperature=0.8, repetition_penalty=1.5, min_p=0.02),
    RowSampling(temperature=0.7, presence_penalty=0.8, frequency_penalty=0.5, top_p=0.95),
    RowSampling(temperature=0.9, allowed_token_ids=ALLOWED, logit_bias=((9, 2.0), (12, -3.0))),
    RowSampling(),
    RowSampling(
        temperature=0.5,
        min_p=0.1,
        repetition_penalty=0.7,  # the model repeats itself
        frequency_penalty=0.2,
        bad_words=((3,), (8, 8), (1, 8, 2)),
        allowed_token_ids=ALLOWED,
    ),
    RowSampling(
        temperature=0.0, repetition_penalty=1.3, logit_bias=((9, 2.0),), bad_words=((9, 9), (7,))
    ),
)


def rows():
    """Return a row of each prompt for each of the settings, with unequal limits."""
    return [
        Row(str(p), s, 11, list(tokens), 14 - (s + p) % 3, sampling)
        for p, tokens in enumerate(PROMPTS)
        for s, sampling in enumerate(SETTINGS)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def theirs(folder):
    return write_checkpoint("llama", folder, **shallow("llama"))


@pytest.fixture(scope="module")
def pair(theirs, folder):
    """Return (target, draft); the draft is the target with noise on its weights."""
    return load_noisy_pair(folder, noise=0.05)


@pytest.fixture(scope="module")
def plainly(pair):
    return plain(pair[0], rows())


def test_processors_change_the_samples(pair, plainly):
    """Otherwise the tests below would show nothing."""
    without = plain(pair[0], [Row(r.key, r.sample, r.seed, r.tokens, r.limit) for r in rows()])
    changed = {key[1] for key, tokens in plainly.items() if tokens != without[key]}
    assert changed == {0, 1, 2, 4, 5}


@pytest.mark.parametrize(
    "drafter",
    ["model", "parallel", "lookup"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("skip", "guess")],
)
def test_drafted_tokens_equal_plain_decoding(pair, plainly, drafter):
    target, draft = pair
    given = {
        "model": draft,
        "skip": target.keep_layers(range(target.spec.layers - 1)),
        "parallel": AtOnce(draft, 300),
        "guess": Guess(301),
    }.get(drafter, drafter)
    accepted = drafted = 0
    for width, batch in ((1, 4), (3, 7), (8, 18), (5, 1)):
        live = rows() if batch > 1 else rows()[4:6]
        loop = loop_for(target, given, rows=batch, lengths=Fixed(width))
        found = drive(loop, live)
        assert found == {key: plainly[key] for key in found}
        accepted += sum(row.accepted for row in live)
        drafted += sum(row.drafted for row in live)
    if drafter in ("model", "skip"):
        assert 0.05 * drafted < accepted < drafted


def test_cut_rounds_equal_plain_decoding(pair, plainly):
    target, _ = pair
    loop = loop_for(target, AtOnce(target, 1), rows=5, lengths=Tour(), cut=ALWAYS)
    assert drive(loop, rows()) == plainly


def test_drafts_that_read_hidden_states_equal_plain_decoding(pair, plainly, folder):
    target, _ = pair
    write_head(folder / "head", "dspark", width=target.spec.width)
    head = load_head(open_head(folder / "head", target.spec), target)
    loop = loop_for(target, head, rows=5, lengths=Fixed(3))
    assert drive(loop, rows()) == plainly


def test_graphs_are_captured_anew_once_for_the_first_rows_that_need_it(pair, plainly):
    """Rows without processors come first, with the graphs of a loop without any. Then all graphs
    serve all values."""
    target, draft = pair
    loop = captured(target, draft, batch=5, lengths=Fixed(3))
    bare = [Row("bare", s, 1, [5, 6], 40) for s in range(5)]
    drive(loop, bare)
    before, version = loop.graphs.captures, loop.batch.version
    assert drive(loop, rows(), ahead=True) == plainly
    assert loop.batch.version != version
    anew, version = loop.graphs.captures - before, loop.batch.version
    assert drive(loop, rows(), ahead=True) == plainly
    assert (loop.graphs.captures, loop.batch.version) == (before + anew, version)
    assert anew <= 2 * before


def test_greedy_tokens_and_log_probabilities_equal_those_of_transformers(theirs, pair):
    """Scores are the target's own, before any processor."""
    sampling = SETTINGS[-1]
    allowed = tuple(range(150))
    sampling = RowSampling(
        temperature=0.0,
        repetition_penalty=1.3,
        logit_bias=((9, 2.0), (17, -2.0)),
        bad_words=((8, 8), (7,)),
        allowed_token_ids=allowed,
    )
    live = [Row(str(p), 0, 0, list(tokens), 12, sampling) for p, tokens in enumerate(PROMPTS)]
    found = drive(loop_for(pair[0], pair[1], rows=2, lengths=Fixed(4)), live)
    for p, (prompt, row) in enumerate(zip(PROMPTS, live, strict=True)):
        due = theirs.generate(
            torch.tensor([prompt]),
            max_new_tokens=12,
            do_sample=False,
            repetition_penalty=1.3,
            sequence_bias=[[[9], 2.0], [[17], -2.0]],
            bad_words_ids=[[8, 8], [7]],
            suppress_tokens=[token for token in range(301) if token not in allowed],
            eos_token_id=None,
            pad_token_id=0,
        )[0]
        assert found[str(p), 0] == due[len(prompt) :].tolist()
        law = theirs(due[None]).logits[0].log_softmax(-1)
        scores = law[len(prompt) - 1 : -1].gather(1, due[len(prompt) :, None])[:, 0]
        torch.testing.assert_close(
            torch.tensor(row.log_probabilities[:12]), scores, atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("coupling", ["shared", "maximal"])
@pytest.mark.parametrize("width", [0, 2])
def test_row_with_no_allowed_token_is_reported(coupling, width):
    """At the place where nothing is left, also if drafts lead there. Other rows go on."""
    table = tables(0)
    nothing = RowSampling(allowed_token_ids=(1, 2), bad_words=((1,), (2, 2)))
    live = [Row("0", 0, 1, [0], 6, nothing), Row("0", 1, 1, [0], 6)]
    loop = loop_for(
        Markov(table, 1), Markov(table, 2), rows=2, lengths=Fixed(width), coupling=coupling
    )
    drive(loop, live)
    assert live[0].broken == 1
    assert live[0].tokens[1] == 2
    assert live[0].log_probabilities[1] == -math.inf
    assert live[1].broken is None


# (prompt, sampling): a ragged batch with processors mixed by row.
KINDS = (
    ([0, 3], RowSampling(temperature=1.2, repetition_penalty=2.0, min_p=0.1)),
    (
        [1],
        RowSampling(
            presence_penalty=1.0,
            frequency_penalty=0.8,
            logit_bias=((2, 1.5),),
            bad_words=((3, 1), (4, 4)),
            top_p=0.95,
        ),
    ),
    ([2, 4, 4], RowSampling(frequency_penalty=-1.0, allowed_token_ids=(0, 1, 4))),
)
DRAWS = 4_000


def law(logits, tokens, prompt, one):
    """Return the distribution of the next token after `tokens`, computed naively."""
    bias, scores = dict(one.logit_bias), []
    for token, x in enumerate(logits):
        x += bias.get(token, 0.0)
        if token in tokens:
            x = x / one.repetition_penalty if x > 0 else x * one.repetition_penalty
        count = tokens[prompt:].count(token)
        x -= one.frequency_penalty * count + one.presence_penalty * (count > 0)
        ends = any(
            token == word[-1] and tokens[len(tokens) - len(word) + 1 :] == list(word[:-1])
            for word in one.bad_words
        )
        if ends or (one.allowed_token_ids is not None and token not in one.allowed_token_ids):
            x = -math.inf
        scores.append(x)
    weights = [math.exp(x / one.temperature) for x in scores]
    kept, mass = set(), 0.0
    for token in sorted(range(len(weights)), key=lambda i: -weights[i]):
        if mass < one.top_p * sum(weights):
            kept.add(token)
        mass += weights[token]
    kept = {token for token in kept if weights[token] >= one.min_p * max(weights)}
    total = sum(weights[token] for token in kept)
    return [w / total if token in kept else 0.0 for token, w in enumerate(weights)]


def exact(table, prompt, one):
    """Return the distribution of the next LENGTH tokens."""
    found = {}
    for tokens in itertools.product(range(VOCAB), repeat=LENGTH):
        p, sequence = 1.0, list(prompt)
        for token in tokens:
            if p:
                logits = table[(len(sequence) - 1) % len(table), sequence[-1]].tolist()
                p *= law(logits, sequence, len(prompt), one)[token]
            sequence.append(token)
        if p:
            found[tokens] = p
    assert abs(sum(found.values()) - 1) < 1e-9
    return found


@pytest.mark.parametrize(
    "draft",
    [
        "model",
        "point",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("smaller", "parallel")),
    ],
)
def test_samples_have_the_exact_distribution_under_maximal_coupling(draft):
    drafter = {
        "model": lambda: Markov(tables(1), 2),
        "smaller": lambda: Markov(tables(2, VOCAB - 1), 2),
        "parallel": lambda: AtOnce(Markov(tables(4), 2), VOCAB - 1),
        "point": lambda: Guess(VOCAB),
    }[draft]()
    check(drafter, "maximal")


def test_samples_have_the_exact_distribution_under_shared_coupling():
    check(Markov(tables(1), 2), "shared")


def check(drafter, coupling):
    table = tables(0)
    live = [
        Row(str(kind), sample, 7, prompt, LENGTH, sampling)
        for kind, (prompt, sampling) in enumerate(KINDS)
        for sample in range(DRAWS)
    ]
    loop = loop_for(Markov(table, 1), drafter, rows=len(live), lengths=Fixed(2), coupling=coupling)
    for kind, (prompt, _) in enumerate(KINDS):
        loop.open(str(kind), prompt)
    loop.batch.allocator.swap_rows = lambda *_: None  # slow for so many rows, and not needed
    loop.admit(*live)
    drawn = {kind: [] for kind in range(len(KINDS))}
    numbers = loop.batch.host_state.numbers
    while (loop.batch.generated() < LENGTH).any():  # a finished row goes on and is not read
        numbers[:, LIMIT] = loop.batch.generated() + LENGTH + 9
        loop.round()
    for row in live:
        drawn[int(row.key)].append(tuple(row.generated_since(0)[:LENGTH]))
    for kind, (prompt, sampling) in enumerate(KINDS):
        due = exact(table, prompt, sampling)
        found, bound = distance(due, drawn[kind])
        assert found < bound, f"row {kind}: total variation {found:.4f}, bound {bound:.4f}"
        frozen = Counter(exact(table, prompt, RowSampling(temperature=sampling.temperature)))
        assert sum(abs(p - due.get(t, 0)) for t, p in frozen.items()) / 2 > 2 * bound
