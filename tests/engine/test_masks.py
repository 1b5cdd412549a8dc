"""Rows with a grammar: the law of free places against enumeration, the same tokens with and
without drafts, for every drafter, draft length and batch, captured or not."""

import collections
import itertools
import re

import numpy
import pytest
import torch
from fakes import FakeGraphs
from test_ahead import Flights, Settled
from test_captured import Tour
from test_laws import distance, truncated
from toys import AtOnce, Guess, Markov, drive, loop_for
from words import EOS, SPECIAL, WORDS, allowed, matcher

from bass_cli.engine.batch import Batch, Row
from bass_cli.engine.round import TokenMasks
from bass_cli.engine.sampling import RowSampling
from bass_cli.engine.sizes import LONGEST
from bass_cli.formats.grammars import DraftMasks, fill
from bass_cli.lengths.controllers import Bass, Fixed
from bass_cli.run.tasks import EndRule, Sample

pytest.importorskip("llguidance")
V, LENGTH = len(WORDS), 5
# (prompt, regex, temperature, top_k, top_p): a ragged batch with sampling mixed by row
KINDS = (
    ([0], "(a|b){1,2}(ab)?c", 1.0, 0, 1.0),
    ([1, 2, 3], "é?(a|b){2,3}", 0.6, 0, 0.8),
    ([4, 0], "(ab|ba|c){1,2}", 1.5, 3, 1.0),
)


def table(seed):
    return torch.randn(3, V, V, generator=torch.Generator().manual_seed(seed)) * 1.3


TARGET = Markov(table(0), 1).table
DRAFTERS = {
    "model": lambda: Markov(0.7 * TARGET + 0.3 * table(1), 2),
    "parallel": lambda: AtOnce(Markov(TARGET + 0.5 * table(4), 2), SPECIAL),
    "point": lambda: Guess(V),
    "lookup": lambda: "lookup",
}


def rows_of(samples, *, free=False, limit=LENGTH, seed=7):
    """Return samples of each kind; with `free`, also as many without a grammar."""
    found = []
    for sample, (kind, (prompt, pattern, temperature, top_k, top_p)) in itertools.product(
        range(samples), enumerate(KINDS)
    ):
        sampling = RowSampling(temperature=temperature, top_k=top_k, top_p=top_p)
        for grammar in (True, False) if free else (True,):
            name = f"{kind}" if grammar else f"free {kind}"
            row = Row(name, sample, seed, list(prompt), limit, sampling)
            row.matcher = matcher(pattern) if grammar else None
            found.append(row)
    return found


def end_at_eos(done, live_rows):
    for row in live_rows:
        generated = row.generated_tokens
        if row.matcher is not None and EOS in generated:
            row.limit = min(row.limit, generated.index(EOS) + 1)


def run(loop, rows, **words):
    return drive(loop, rows, on_round=end_at_eos, **words)


def captured(draft, **words):
    """Return a loop with fake graphs."""
    return loop_for(Markov(TARGET, 1), draft, graphs=FakeGraphs(), **words)


def exact(prompt, pattern, *sampling):
    """Return the law of a row's tokens, up to EOS or LENGTH."""
    law, open_ = {}, {(): 1.0}
    while open_:
        tokens, p = open_.popitem()
        sequence = [*prompt, *tokens]
        place = len(sequence) - 1
        logits = TARGET[place % 3, sequence[-1]].tolist()
        may = allowed(pattern, tokens)
        masked = [x if i in may else -torch.inf for i, x in enumerate(logits)]
        for token, q in enumerate(truncated(masked, *sampling)):
            if q > 0:
                ended = token == EOS or len(tokens) + 1 == LENGTH
                (law if ended else open_)[(*tokens, token)] = p * q
    assert abs(sum(law.values()) - 1) < 1e-9
    return law


@pytest.mark.parametrize(
    ("coupling", "draft", "length"),
    [
        ("shared", "model", 2),
        ("maximal", "model", 3),
        ("maximal", "lookup", 2),
        pytest.param("maximal", "point", 3, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_free_places_have_the_exact_law(coupling, draft, length):
    samples = 500
    loop = loop_for(
        Markov(TARGET, 1),
        DRAFTERS[draft](),
        rows=len(KINDS) * samples,
        lengths=Fixed(length),
        coupling=coupling,
    )
    drawn = collections.defaultdict(list)
    for (key, _), tokens in run(loop, rows_of(samples)).items():
        drawn[int(key)].append(tokens)
    for kind, (prompt, pattern, *sampling) in enumerate(KINDS):
        found, bound = distance(exact(prompt, pattern, *sampling), drawn[kind])
        assert found < bound, f"row {kind}: total variation {found:.4f}, bound {bound:.4f}"


@pytest.fixture(scope="module")
def plainly():
    """The tokens of plain decoding, one row at a time."""
    loop = loop_for(Markov(TARGET, 1), "none", rows=1, lengths=Fixed(0))
    return run(loop, rows_of(2, free=True, limit=9))


def test_plain_samples_match_their_regex(plainly):
    for (key, _), tokens in plainly.items():
        if not key.startswith("free"):
            text = b"".join(WORDS[id_] or b"" for id_ in tokens).decode()
            assert tokens[-1] == EOS
            assert re.fullmatch(KINDS[int(key)][1], text)


@pytest.mark.parametrize("draft", DRAFTERS)
def test_drafts_change_no_token(draft, plainly):
    """Beside rows of free text, at several lengths and batch sizes."""
    for rows, lengths in ((1, Fixed(4)), (4, Tour()), (18, Fixed(2)), (5, Bass())):
        loop = loop_for(Markov(TARGET, 1), DRAFTERS[draft](), rows=rows, lengths=lengths)
        rounds = []
        found = drive(
            loop,
            rows_of(2, free=True, limit=9),
            on_round=lambda done, live_rows, rounds=rounds: (end_at_eos(done, live_rows), rounds.append(done)),
        )  # fmt: skip
        assert found == plainly
        if draft != "point" and rows == 18:
            assert sum(sum(done.accepted) for done in rounds) > 10


def test_rows_of_free_text_do_not_change():
    """Their tokens and log-probabilities are those of a batch without grammars."""
    found = []
    for grammars in (False, True):
        rows = [row for row in rows_of(3, free=True) if grammars or row.matcher is None]
        loop = loop_for(Markov(TARGET, 1), DRAFTERS["model"](), rows=len(rows), lengths=Fixed(3))
        run(loop, rows)
        free = [row for row in rows if row.matcher is None]
        found.append(
            [
                (row.generated_tokens[:LENGTH], pytest.approx(row.log_probabilities[:LENGTH]))
                for row in free
            ]
        )
    assert found[0] == [(tokens, scores.expected) for tokens, scores in found[1]]


def test_log_probabilities_are_the_targets_own():
    rows = rows_of(2)
    loop = loop_for(Markov(TARGET, 1), DRAFTERS["model"](), rows=len(rows), lengths=Fixed(3))
    run(loop, rows)
    for row in rows:
        tokens, start = row.tokens, row.prompt_length
        due = [
            TARGET[(place - 1) % 3, tokens[place - 1]].log_softmax(-1)[tokens[place]].item()
            for place in range(start, len(tokens))
        ]
        assert row.log_probabilities == pytest.approx(due, abs=1e-5)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("draft", ["model", "lookup", "none"])
def test_captured_rounds_give_the_same_tokens(draft, early, plainly):
    """The host makes masks between the graphs of a round, or with `early` while drafts come, as on
    a GPU. Rounds without such rows stay whole, and may be launched ahead."""
    drafter = DRAFTERS[draft]() if draft in DRAFTERS else draft
    loop = captured(drafter, rows=4, lengths=Tour())
    if early:
        loop.batch.early = torch.full((LONGEST, 4), -1)
    rows = rows_of(2, free=True, limit=9)
    free = [row for row in rows if row.matcher is None]
    bound = [row for row in rows if row.matcher is not None]
    assert run(loop, [*free[:5], *bound, *free[5:]], ahead=True) == plainly
    shapes = [key for how, key in loop.graphs.done if how == "replay" and hasattr(key, "kind")]
    assert {shape.masked for shape in shapes if shape.kind != "catch up"} == {True, False}


def test_rows_may_change_while_the_masks_of_a_round_are_due(plainly):
    """A round that was launched is finished with the rows that it began with."""
    loop = captured(DRAFTERS["model"](), rows=3, lengths=Fixed(2))
    rows = [row for row in rows_of(2, limit=9) if row.key != "2"]
    for row in rows[:2]:
        loop.open(row.key, row.tokens)
    loop.admit(*rows[:2])
    for _ in range(3):  # the graphs are captured
        loop.round()
        end_at_eos(None, loop.batch.live_rows)
        loop.retire(*(place for place, row in enumerate(loop.batch.live_rows) if row.room <= 0))
        if not len(loop.batch):
            break
        loop.launch()
        loop.swap_rows([], [rows[2]] if rows[2].index < 0 and not rows[2].generated else [])
    while len(loop.batch):
        loop.round()
        end_at_eos(None, loop.batch.live_rows)
        loop.retire(*(place for place, row in enumerate(loop.batch.live_rows) if row.room <= 0))
    for row in rows[:3]:
        assert row.generated_tokens[: row.limit] == plainly[row.key, row.sample]


def test_prepared_rounds_with_grammars_capture_nothing_later():
    loop = captured(DRAFTERS["model"](), rows=2, lengths=Fixed(2))
    first, second = rows_of(2)[:1], rows_of(2)[3:4]
    run(loop, first)
    loop.prepare((1, 2), (0, 2))
    captures = loop.graphs.captures
    run(loop, second)
    assert loop.graphs.captures == captures


@pytest.mark.parametrize(
    ("draft", "lengths"),
    [
        ("model", Settled),
        ("none", lambda: Fixed(0)),
        pytest.param("parallel", lambda: Fixed(3), marks=pytest.mark.slow),
    ],
)
def test_rounds_with_grammars_are_launched_ahead(draft, lengths, plainly):
    """Drafts and target of the next round run before the tokens of the last one are known; rows
    end and others come meanwhile."""
    behind = 0
    for batch in (2, 5):
        drafter = DRAFTERS[draft]() if draft in DRAFTERS else draft
        loop = captured(drafter, rows=batch, lengths=lengths())
        loop._ahead_policy.pays = lambda waiting: True
        flights = Flights(loop)
        assert run(loop, rows_of(2, free=True, limit=9), ahead=True) == plainly
        assert run(loop, rows_of(2, free=True, limit=9), ahead=True) == plainly
        behind += flights.behind
    shapes = [key for how, key in loop.graphs.done if how == "replay" and hasattr(key, "kind")]
    assert any(shape.masked for shape in shapes)
    assert behind > 20


@pytest.mark.parametrize("seed", range(4))
def test_masks_made_while_drafts_come_are_those_made_at_once(seed):
    """Also after a forbidden draft, an end, and an id that the vocabulary lacks. The matchers do
    not move."""
    random = numpy.random.default_rng(seed)
    patterns = [pattern for _, pattern, *_ in KINDS for _ in range(12)]
    drafts = random.choice([*range(V), *range(5), *range(5), V + 3], (len(patterns), 5)).tolist()
    found = []
    for early in (True, False):
        masks = numpy.full((len(patterns), 6, 2), -1, dtype=numpy.int32)
        rows = {line: matcher(pattern) for line, pattern in enumerate(patterns)}
        if early:
            made = DraftMasks(rows, masks)
            for step in range(5):
                made.take([line[step] for line in drafts])
            made.close()
            fill([(rows[line], drafts[line]) for line in rows], masks, rows)
        else:
            fill([(rows[line], drafts[line]) for line in rows], masks)
        again = numpy.full((len(patterns), 6, 2), -1, dtype=numpy.int32)
        fill([(rows[line], drafts[line]) for line in rows], again)
        found += [masks, again]
    assert len(numpy.unique(found[0], axis=0)) > 5
    for other in found[1:]:
        assert (found[0] == other).all()


def test_early_masks_wait_for_drafts_and_do_without_those_that_never_come():
    batch = Batch(rows=2, context=64, device=torch.device("cpu"), vocab=V)
    rows = [Row(name, 0, 0, [0], LENGTH) for name in "ab"]
    for row in rows:
        row.matcher = matcher("(a|b|c)*")
    batch.swap_rows((), rows)
    batch.early, drafts, found = torch.full((LONGEST, 2), -1), [[0, 1], [1, EOS]], []
    for coming in (True, False):
        masks, looks = TokenMasks(batch, defined=True), 0

        def is_over(coming=coming):
            nonlocal looks
            looks += 1
            if coming and looks % 3 == 0:  # each step comes at the third look
                step = looks // 3 - 1
                batch.early[step] = torch.tensor([line[step] for line in drafts])
            return not coming

        masks.follow(2, is_over)
        assert looks == (6 if coming else 1)
        masks.fill(drafts)
        assert (batch.early == -1).all()
        found.append(batch.processors.masks.clone())
    assert torch.equal(*found)


def test_masks_under_maximal_coupling_do_not_depend_on_earlier_rounds():
    """Block verification looks at the place after an accepted end, whose mask decides nothing else.
    A resident engine must draw what a fresh process draws."""
    batch = Batch(rows=1, context=64, device=torch.device("cpu"), vocab=V)
    row = Row("0", 0, 0, [0], LENGTH)
    row.matcher = matcher("(a|b|c)*")
    batch.swap_rows((), [row])
    masks, found = TokenMasks(batch, defined=True), []
    for earlier in ([0, 1, 2, 3], [4, 4, EOS, 4], [EOS, 5, 5, 5]):
        masks.fill([earlier])
        masks.fill([[0, EOS, 1, 2]])
        found.append(batch.processors.masks.clone())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    ("tokens", "due", "reason"),
    [([0, EOS, 4], [0, EOS], "eos"), ([0, 5, 4], [0, 5, 4], "error"), ([4, 4, EOS], [4, 4], "length")],
)  # fmt: skip
def test_an_ended_sample_has_no_fault_of_its_grammar(tokens, due, reason):
    """A round that was launched early follows the grammar before the host looks for the end."""
    batch = Batch(rows=1, context=64, device=torch.device("cpu"), vocab=V)
    row = Row("0", 0, 0, [0], 2 if reason == "length" else 8)
    row.matcher = matcher("(a|b|c)*")
    batch.swap_rows((), [row])
    table = numpy.array([[2, *tokens, 0, 0, 0]])
    batch.host_state.take(table, numpy.array([0]), width=2, num_drafts=2)
    row.matcher.advance([*row.generated_since(0), 5])
    row.matcher.seen = 3
    assert row.matcher.fault is not None
    ending = Sample(None, row, EndRule([EOS], ()), None).check_end()
    assert (ending.reason, row.generated_tokens) == (reason, due)
    assert (ending.error is not None) == (reason == "error")
