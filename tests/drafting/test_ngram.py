"""N-gram lookup: results against a brute-force search; which tokens are indexed, and until when;
how many drafts are worth verifying."""

import gc
import random

import pytest
import torch
from toys import Markov, Reactive, drive, loop_for, plain, rows_for

from bass_cli.config.speculation import SOURCES
from bass_cli.drafts.ngram import SIZES, EstimatedAcceptance, Index, LookupDrafter, follow
from bass_cli.engine.batch import Batch, Row
from bass_cli.lengths.controllers import Bass, Fixed
from bass_cli.lengths.goodput import Goodput

VOCAB = 6
PROMPTS = ([1], [0, 1, 2, 3], [5, 4, 5, 4, 3, 5, 4])


def table(seed=0, sharpness=4.0):
    return torch.randn(2, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * sharpness


def searched(log, tail):
    """Return the newest place after the longest n-gram that ends `tail`, by brute force. log:
    (tokens, place), in the order of indexing."""
    for size in SIZES:
        for tokens, place in reversed(log) if size <= len(tail) else ():
            if place >= size and tokens[place - size : place] == tail[-size:]:
                return size, tokens, place
    return None


@pytest.mark.parametrize(("alphabet", "met"), [(1, {8}), (2, {4, 6}), (3, {3, 4}), (20, {1, 2})])
def test_index_equals_brute_force_search(alphabet, met):
    rate = random.Random(alphabet)
    index, log, sizes = Index(), [], set()
    sequences = [[rate.randrange(alphabet) for _ in range(5)] for _ in range(3)]
    known = [0, 3, 5]
    numbers = [
        index.begin(tokens, known=count) for tokens, count in zip(sequences, known, strict=True)
    ]
    for _ in range(60):
        which = rate.randrange(3)
        sequences[which] += [rate.randrange(alphabet) for _ in range(rate.randrange(4))]
        index.extend(numbers[which])
        log += [
            (sequences[which], place)
            for place in range(max(known[which], 1), len(sequences[which]))
        ]
        known[which] = len(sequences[which])
        for tokens in sequences:
            draft, matched = follow((index,), tokens[-SIZES[0] :], 1)
            found = searched(log, tokens)
            assert (draft, matched) == (
                ([], []) if found is None else ([found[1][found[2]]], [found[0]])
            )
            sizes |= set(matched)
    assert sizes >= met, "the search was hardly put to work"


def test_draft_continues_from_copied_tokens_and_counts_matches():
    index = Index()
    index.extend(index.begin([1, 2, 3, 4, 5, 6]))
    assert follow((index,), [9, 2, 3], 3) == ([4, 5, 6], [2, 3, 4])
    assert follow((index,), [9, 3, 4, 5, 6], 2) == ([], []), "nothing ever came after 6"
    index.extend(index.begin([7, 8, 7, 8]))
    assert follow((index,), [7, 8, 7, 8], 5)[0] == [7, 8, 7, 8, 7], "a repetition repeats"
    other = Index()
    other.extend(other.begin([3, 4, 11]))
    assert follow((other, index), [2, 3, 4], 1) == ([5], [3]), "the longer match wins"
    assert follow((other, index), [0, 3, 4], 1) == ([11], [2]), "of equal ones the first index does"


def test_newest_of_equal_matches_wins():
    index = Index()
    for ending in (5, 6, 7):
        index.extend(index.begin([1, 2, ending]))
    assert follow((index,), [1, 2], 1)[0] == [7]


class Desk:
    """A LookupDrafter with a batch of Rows, without a loop."""

    def __init__(self, sources=SOURCES, *, prompt=(1, 2), reference=(), rows=1):
        self.drafter = LookupDrafter(sources)
        self.batch = Batch(rows=8, context=64, device=torch.device("cpu"))
        self.drafter.open("p", prompt, reference)
        self.live = []
        for sample in range(rows):
            self.admit(Row("p", sample, 0, list(prompt), 40))

    def admit(self, row):
        self.drafter.follow(self.batch.swap_rows([], [row]))
        self.live.append(row)

    def retire(self, index):
        self.drafter.follow(self.batch.swap_rows([index], []))

    def found(self, length=3):
        """Return the tokens found for each live row, without filler."""
        self.drafter.learn(self.batch)
        return [guess.tokens for guess in self.drafter.look_up(self.batch, length)]


@pytest.mark.parametrize(
    ("sources", "due"),
    [
        ("own", [[20], []]),
        ("siblings", [[20], [20]]),
        ("prompt", [[3, 4], [3, 4]]),
        ("reference", [[30, 31], [30, 31]]),
    ],
)
def test_only_the_configured_sources_are_searched(sources, due):
    desk = Desk([sources], prompt=(2, 9, 3, 4), reference=(9, 30, 31), rows=2)
    desk.live[0].tokens.extend([9, 20])
    desk.found()
    for row in desk.live:
        row.tokens.extend([9])
    assert [found[:2] for found in desk.found(length=len(due[1]) or 1)] == due


def test_prompt_is_context_of_each_samples_own_tokens():
    desk = Desk(["siblings"], prompt=(1, 2), rows=2)
    desk.live[0].tokens.extend([7])
    assert desk.found() == [[], [7]]


def test_ended_samples_and_moved_rows_are_still_searched():
    desk = Desk(rows=3)
    desk.live[0].tokens.extend([5, 6])
    desk.found()
    desk.live[0].tokens.extend([7, 8])  # its last round
    desk.live[2].tokens.extend([3, 4, 3])
    desk.retire(0)
    assert desk.batch.live_rows == [desk.live[2], desk.live[1]]
    desk.live[1].tokens.extend([6])
    assert desk.found() == [[4, 3], [7, 8]]
    desk.admit(Row("p", 3, 0, [1, 2], 40))
    assert desk.found()[2] == [6, 7, 8], "the newest that came after the prompt"


def test_index_is_freed_with_its_prompt_and_last_row():
    def alive():
        gc.collect()
        return sum(type(it) is Index for it in gc.get_objects())

    before = alive()
    desk = Desk(rows=2)
    desk.found()
    desk.drafter.close("p")
    desk.retire(0)
    assert alive() == before + 1
    desk.retire(0)
    assert alive() == before


def test_each_token_is_indexed_once():
    desk = Desk(prompt=tuple(range(50)), rows=4)
    for _ in range(5):
        for row in desk.live:
            row.tokens.extend([1, 2])
        desk.found()
    index = desk.drafter._prompts["p"]
    assert index._known == [50] + [60] * 4
    index.after = ()  # a write would fail
    desk.drafter._samples[0].catch_up(desk.live[0])
    desk.live[0].tokens.extend([1])
    with pytest.raises(ValueError, match="zip"):
        desk.drafter._samples[0].catch_up(desk.live[0])


def test_num_drafts_ends_where_acceptance_is_unlikely():
    estimate = EstimatedAcceptance()
    assert estimate.num_drafts([8] * 64) > 2 * estimate.num_drafts([3] * 64) > 0
    assert estimate.num_drafts([1, 1, 1]) == 1
    for _ in range(200):
        estimate.learn([8] * 10, 10)
        estimate.learn([1, 2], 0)
    assert estimate.num_drafts([8] * 64) == 64
    assert estimate.num_drafts([1, 2, 3]) == 0
    assert estimate.rate(2) == EstimatedAcceptance().rate(2), (
        "a token after a wrong one teaches nothing"
    )
    for _ in range(1500):
        estimate.learn([8], 0)
    assert estimate.num_drafts([8] * 64) == 0, "old observations are forgotten"


def test_learning_uses_the_rows_own_tokens_even_if_nothing_was_verified():
    desk = Desk(prompt=(1, 2, 3, 4, 1), rows=1)
    before = desk.drafter._acceptance.rate(2)
    assert desk.found() == [[2, 3, 4]]
    desk.live[0].tokens.extend([2, 3, 9])
    desk.found()
    assert desk.drafter._acceptance.rate(2) > before
    assert desk.drafter._acceptance.rate(3) < EstimatedAcceptance().rate(3)


def test_skipped_drafts_are_reported_once_when_known():
    """Three rows copy the prompt: one for two tokens, one for all, and one ends after its first."""
    desk = Desk(prompt=(1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2), rows=3)
    desk.drafter.learn(desk.batch)
    assert desk.drafter.propose(desk.batch, 4).num_drafts == (3, 3, 3)
    desk.drafter.skip_last()
    reported = []
    for token in range(3, 11):
        for row in desk.live[: 2 if token > 3 else 3]:
            row.tokens.append(99 if row is desk.live[0] and token > 4 else token)
        if token == 3:
            desk.retire(2)
        desk.drafter.learn(desk.batch)
        desk.drafter.propose(desk.batch, 4)
        desk.drafter.skip_last()  # while the first is waited for
        reported.append(desk.drafter.recall())
    assert reported[7] == ((2, 3, 1), (3, 3, 1))
    assert reported[:7] == [None] * 7, (
        "drafts that fail would be reported before those that are accepted"
    )
    desk.drafter.propose(desk.batch, 4)
    desk.drafter.skip_last()
    desk.drafter.forget()
    assert [desk.drafter.recall() for _ in range(10)] == [None] * 10


def test_rows_have_different_numbers_of_drafts_in_a_round():
    """Row 0 has a long match, row 1 a short one, row 2 none; a row with no room drafts nothing."""
    desk = Desk(["own"], prompt=(1, 2), rows=4)
    desk.live[0].tokens.extend([3, 4, 5, 6, 7, 8, 9, 3, 4, 5, 6, 7, 8, 9])
    desk.live[1].tokens.extend([5, 6, 6])
    desk.live[3].tokens.extend([3, 3, 3, 3])
    desk.live[3].limit = 1
    desk.drafter.learn(desk.batch)
    offered = desk.drafter.propose(desk.batch, 6)
    assert offered.tokens.tolist()[:3] == [[3, 4, 5, 6, 7, 8], [6, 6, 6, 6, 6, 6], [2] * 6]
    assert (
        offered.num_drafts[0]
        > offered.num_drafts[1]
        > offered.num_drafts[2]
        == offered.num_drafts[3]
        == 0
    )


def test_nothing_is_proposed_if_no_draft_is_worth_verifying():
    desk = Desk(prompt=(1, 2, 3), rows=2)
    offered = desk.drafter.propose(desk.batch, 4)
    assert (offered.tokens.shape, offered.num_drafts) == ((2, 0), (0, 0))


def test_filler_tokens_do_not_count_as_drafted():
    target = Markov(table(), 1)
    live, seen = rows_for(PROMPTS, 3, limit=30, temperature=0.8), []
    loop = loop_for(target, "lookup", rows=9, lengths=Fixed(5))
    drive(loop, live, on_round=lambda done, live_rows: seen.append(done))
    drafting = [done for done in seen if done.width]
    assert any(min(done.drafted) < done.width for done in drafting)
    assert all(max(done.drafted) == done.width for done in drafting), (
        "no round is wider than its longest draft"
    )
    drafted = sum(
        max(pair) for done in seen for pair in zip(done.drafted, done.accepted, strict=True)
    )
    assert (
        sum(row.drafted for row in live)
        == drafted
        < sum(done.width * len(done.accepted) for done in seen)
    )
    assert all(0 <= row.accepted <= row.drafted for row in live)


@pytest.mark.parametrize(
    "draft",
    [
        "lookup",
        "lookup:own",
        "lookup:siblings",
        "lookup:prompt",
        "lookup:reference",
        "lookup:own,prompt",
    ],
)
def test_lookup_gives_the_tokens_of_plain_decoding(draft):
    """With references that are right, and ones that are wrong at every place compared here."""
    target = Markov(table(), 1)
    due = plain(target, rows_for(PROMPTS, 4, limit=30, temperature=0.8, seed=3))
    right = {key: tokens for (key, sample), tokens in due.items() if sample == 1}
    worst = table().amax(0).argmin(-1).tolist()
    unlikely = [token for old in range(VOCAB) for token in (old, worst[old], worst[worst[old]])]
    wrong = dict.fromkeys(right, unlikely)
    drafted, accepted = {}, {}
    looked_at = draft in ("lookup", "lookup:reference")
    for name, references in (("right", right), ("wrong", wrong))[: 1 + looked_at]:
        for rows, lengths in ((1, Fixed(4)), (5, Reactive()), (12, Bass()), (3, Goodput(limit=6))):
            live = rows_for(PROMPTS, 4, limit=30, temperature=0.8, seed=3)
            loop = loop_for(target, draft, rows=rows, lengths=lengths)
            opened = loop.open
            loop.open = lambda key, tokens, opened=opened, texts=references: opened(
                key, tokens, texts[key]
            )
            assert drive(loop, live) == due, f"{rows} rows, {name}"
            drafted[name] = drafted.get(name, 0) + sum(row.drafted for row in live)
            accepted[name] = accepted.get(name, 0) + sum(row.accepted for row in live)
    assert 0 < accepted["right"] < drafted["right"]
    if draft == "lookup:reference":
        assert accepted["wrong"] < accepted["right"] / 3


def test_earlier_samples_help_a_later_row():
    target = Markov(table(sharpness=8.0), 1)
    kept = {}
    for draft in ("lookup", "lookup:own,prompt"):
        live = rows_for([[1, 2]], 8, limit=24, temperature=0.3)
        drive(loop_for(target, draft, rows=2, lengths=Fixed(6)), live)
        kept[draft] = sum(row.accepted for row in live) / sum(row.rounds for row in live)
    assert kept["lookup"] > 1.3 * kept["lookup:own,prompt"]


@pytest.mark.parametrize("coupling", ["shared", "maximal"])
def test_same_job_runs_the_same_twice(coupling):
    """Under maximal coupling the samples depend on the tokens of the prompt's other samples at
    that time, but on no measured time."""
    runs = []
    for _ in range(2):
        live, seen = rows_for(PROMPTS, 4, limit=20, temperature=0.9), []
        out = drive(
            loop_for(Markov(table(), 1), "lookup", rows=5, lengths=Bass(), coupling=coupling),
            live,
            on_round=lambda done, live_rows, seen=seen: seen.append(
                (done.width, done.accepted, done.drafted)
            ),
        )
        runs.append((out, seen))
    assert runs[0] == runs[1]
    assert any(width for width, _, _ in runs[0][1])
