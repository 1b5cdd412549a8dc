"""Speculation gives token for token what plain decoding gives, for every family, drafter, width,
batch and controller.

Rows of unequal prompts and limits, greedy and sampled in one batch, so rows also join and leave at
different rounds.
"""

import functools
import itertools

import pytest
import torch
from checkpoints import FAMILIES, shallow, write_checkpoint
from decoders import load_noisy_pair
from devices import device, surface_of
from toys import AtOnce, Reactive, begin, drive, loop_for, plain, rows_for

from bass_cli.engine.batch import Row
from bass_cli.engine.sampling import RowSampling
from bass_cli.lengths.controllers import Bass, Fixed, LengthParts, make_lengths

SURFACE = surface_of(device("wide-310m"), acceptance=0.7)


def auto(coupling):
    """Return a Goodput with a profile. Under maximal coupling it only sees accepted drafts."""
    return make_lengths("auto", LengthParts(limit=9, coupling=coupling, surface=SURFACE))


CONTROLLERS = (
    lambda: auto("shared"),
    lambda: make_lengths("auto", LengthParts(limit=9, coupling="shared")),
    lambda: make_lengths("table", LengthParts(limit=9, coupling="shared", surface=SURFACE)),
    lambda: make_lengths("bass+table", LengthParts(limit=9, coupling="shared", surface=SURFACE)),
)
# All controllers go with the families that differ most: Llama's biases, Gemma's windows and two
# ropes, GPT-2's learned positions. What a family may break, caches and positions, shows at any
# lengths, so the others have those that differ most: one row that is refilled, rows that move,
# all at once after full, partial and no drafts. Of family, drafter and controller each two meet,
# and each controller has both batches: the batch moves rows with any drafter. `make test` leaves out
# half of the drafters of the other families. These, and all with all, are in `make test-slow`.
WIDELY = ("llama", "gemma3_text", "gpt2")
LENGTHS = (lambda: Fixed(1), lambda: Fixed(3), lambda: Fixed(7), Bass, Reactive, *CONTROLLERS)
FEW = (1, lambda: Fixed(3)), (5, Reactive), (2, lambda: Fixed(7)), (5, Bass)
ALONE = (1, lambda: Fixed(7)), (1, Reactive)


def met_by(family, drafter):
    """Return batches and controllers: a third of the controllers, and in turn a row alone with
    one of two, or one of FEW."""
    at = DRAFTERS.index(drafter)
    if family not in WIDELY:
        return (FEW[(FAMILIES.index(family) + at) % 4],)
    turn = WIDELY.index(family) + at
    alone = ALONE[turn // 2 % 2 :][:1] if turn % 2 else ()
    return *alone, *(
        ((2, 5)[(turn + place) % 2], LENGTHS[place]) for place in range(turn % 3, len(LENGTHS), 3)
    )


def is_in_make_test(family, drafter):
    """Whether `make test` has both: a family has half of the drafters, unless it is one of WIDELY.
    They are neighbours: with one the draft length is fixed, with the other it changes."""
    half = DRAFTERS.index(drafter) // 2 % 2
    return family in WIDELY or half == FAMILIES.index(family) // 4 % 2


def all_met_by(family, drafter):
    """Return the pairs that family and drafter do not meet in `met_by`."""
    every = (*itertools.product((2, 5), LENGTHS), *ALONE) if family in WIDELY else FEW
    return [one for one in every if one not in met_by(family, drafter)]


PROMPTS = ([7], [3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0, 4, 5, 2])


@pytest.fixture(scope="module")
def decoders(tmp_path_factory):
    """A function from a family's name to (target, draft). The draft is the target with noise on
    its weights, so that some drafts are accepted and some are not."""

    @functools.cache
    def pair(family):
        folder = tmp_path_factory.mktemp(family)
        write_checkpoint(family, folder, **shallow(family))
        return load_noisy_pair(folder)

    return pair


@pytest.fixture(scope="module")
def plainly(decoders):
    """A function from a family's name to the tokens of plain decoding for rows()."""
    return functools.cache(lambda family: plain(decoders(family)[0], rows()))


def rows():
    """Return two samples of each prompt: sample 0 greedy, sample 1 at temperature 0.8."""
    return rows_for(
        PROMPTS, seed=11, temperature=lambda p, s: 0.8 * s, top_p=lambda p, s: 1 - 0.05 * s
    )


# Those with a model, which reads what the target reads, and the values of a pair's `draft` that
# need none.
WITH_MODELS = ("model", "skip", "parallel")  # some of their drafts are accepted
DRAFTERS = (*WITH_MODELS, "lookup")


def drafter_of(name, target, draft):
    skipping = target.keep_layers(range(target.spec.layers - 1))
    return {"model": draft, "skip": skipping, "parallel": AtOnce(draft, 300)}.get(name, name)


def test_every_pair_of_family_drafter_and_controller_is_tested():
    cells = {both: met_by(*both) for both in itertools.product(FAMILIES, DRAFTERS)}
    for family in WIDELY:
        met = {lengths for drafter in DRAFTERS for _, lengths in cells[family, drafter]}
        assert met >= {*LENGTHS}
    for drafter in DRAFTERS:
        met = {lengths for family in WIDELY for _, lengths in cells[family, drafter]}
        assert met >= {*LENGTHS}
    for lengths in LENGTHS:
        batches = {batch for cell in cells.values() for batch, other in cell if other is lengths}
        assert batches >= {2, 5}
    for family in {*FAMILIES} - {*WIDELY}:
        assert {pair for drafter in DRAFTERS for pair in cells[family, drafter]} == {*FEW}
    for one in (*WIDELY, *DRAFTERS):
        assert {*ALONE} & {pair for both, cell in cells.items() if one in both for pair in cell}


def test_make_test_has_fixed_and_changing_lengths_with_every_family():
    """And every drafter with all of FEW, of which every second one has a fixed length."""
    families = [family for family in FAMILIES if family not in WIDELY]
    tested = [both for both in itertools.product(families, DRAFTERS) if is_in_make_test(*both)]
    for family in families:
        met = {FEW.index(pair) % 2 for both in tested if family in both for pair in met_by(*both)}
        assert met == {0, 1}, family
    for drafter in DRAFTERS:
        assert {pair for both in tested if drafter in both for pair in met_by(*both)} == {*FEW}


@pytest.mark.parametrize("met", [met_by, pytest.param(all_met_by, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("family", "drafter"),
    [
        pytest.param(*both, marks=() if is_in_make_test(*both) else pytest.mark.slow)
        for both in itertools.product(FAMILIES, DRAFTERS)
    ],
)
def test_shared_coupling_equals_plain_decoding(decoders, plainly, family, drafter, met):
    target, draft = decoders(family)
    accepted = drafted = 0
    for batch, lengths in met(family, drafter):
        live = rows()
        loop = loop_for(target, drafter_of(drafter, target, draft), rows=batch, lengths=lengths())
        assert drive(loop, live) == plainly(family), f"batch {batch}, {lengths()}"
        accepted, drafted = (
            accepted + sum(r.accepted for r in live),
            drafted + sum(r.drafted for r in live),
        )
    if drafter in WITH_MODELS:
        assert 0 < accepted < drafted, "the drafts were all alike: this run showed nothing"


# What a family and a drafter do to each other's caches shows under shared coupling above; here
# batches, controllers and, in `make test`, drafters go by turns.
@pytest.mark.parametrize(
    ("family", "drafter"),
    [
        pytest.param(
            family, drafter, marks=() if family in WIDELY or at == turn % 4 else pytest.mark.slow
        )
        for turn, family in enumerate(FAMILIES)
        for at, drafter in enumerate(DRAFTERS)
        if family in WIDELY or at % 2 == turn % 2
    ],
)
def test_maximal_coupling_equals_plain_decoding_if_greedy(decoders, plainly, family, drafter):
    target, draft = decoders(family)
    due = {key: tokens for key, tokens in plainly(family).items() if key[1] == 0}
    turn = FAMILIES.index(family) + DRAFTERS.index(drafter)
    both = (2, Fixed(7)), (5, Bass())
    every = (*both, (1, Fixed(3)), (5, Fixed(1)), (5, auto("maximal")))
    for batch, lengths in every[turn % 2 :: 2] if family in WIDELY else both[turn // 2 % 2 :][:1]:
        loop = loop_for(
            target,
            drafter_of(drafter, target, draft),
            rows=batch,
            lengths=lengths,
            coupling="maximal",
        )
        found = drive(loop, rows())
        assert {key: found[key] for key in due} == due


# Each family has both couplings and both controllers; which of these meet alternates.
@pytest.mark.parametrize(
    ("family", "coupling", "lengths"),
    [
        pytest.param(
            family, coupling, lengths, marks=pytest.mark.slow if (turn + at + other) % 2 else ()
        )
        for turn, family in enumerate(FAMILIES)
        for at, coupling in enumerate(("shared", "maximal"))
        for other, lengths in enumerate((lambda: Fixed(4), Reactive))
    ],
)
def test_target_accepts_all_of_its_own_drafts(decoders, family, coupling, lengths):
    """Also right after a fully accepted round, after rounds without drafts, and in rows that
    moved."""
    target, _ = decoders(family)
    seen = []
    loop = loop_for(target, target, rows=4, lengths=lengths(), coupling=coupling)
    drive(loop, rows(), on_round=lambda done, live_rows: seen.append(done))
    assert sum(done.width for done in seen) >= 4
    assert all(kept == done.width for done in seen for kept in done.accepted)


def test_full_acceptance_commits_one_more_token_than_drafts(decoders):
    target, _ = decoders(FAMILIES[0])
    loop = loop_for(target, target, rows=1, lengths=Fixed(4))
    row = Row("0", 0, 0, [1, 2, 3], 20)
    begin(loop, row)
    loop.round()
    assert row.generated == 5


def test_drafter_catches_up_after_plain_rounds(decoders):
    """Plain rounds leave the draft's cache behind by one token each; afterwards it accepts as
    before."""
    target, _ = decoders(FAMILIES[0])

    class Pause(Fixed):
        def __init__(self):
            super().__init__(3)
            self.plan = iter([3, 0, 0, 0, 0, 3, 0, 3, 3])

        def next(self, rows, inputs=None):
            return next(self.plan)

    seen, live = [], [Row("0", s, 1, [5, 6, 7, 8], 60) for s in range(2)]
    loop = loop_for(target, target, rows=2, lengths=Pause())
    begin(loop, *live)
    for _ in range(9):
        seen.append(loop.round())
    assert [done.width for done in seen] == [3, 0, 0, 0, 0, 3, 0, 3, 3]
    assert all(kept == done.width for done in seen for kept in done.accepted)


def test_row_near_its_limit_does_not_shorten_drafts_of_others(decoders):
    target, _ = decoders(FAMILIES[0])
    loop = loop_for(target, target, rows=2, lengths=Fixed(6))
    short, long = Row("0", 0, 0, [1, 2, 3], 1), Row("0", 1, 0, [1, 2, 3], 30)
    begin(loop, short, long)
    assert loop.round().width == 6
    assert long.generated == 7


def test_rounding_between_batch_shapes_is_far_below_decision_margins(decoders):
    """The equalities above depend on it: the same position computed in another batch shape
    differs by rounding only."""
    target, _ = decoders("llama")
    found = []
    for batch in (1, 5):
        loop = loop_for(target, "none", rows=batch, lengths=Fixed(0))
        live = [
            Row("0", s, 0, [1, 2, 3, 4], 4, sampling=RowSampling(temperature=0.0))
            for s in range(batch)
        ]
        begin(loop, *live)
        loop.round()
        found.append(live[0].log_probabilities[0])
    assert abs(found[0] - found[1]) < 1e-5


def test_no_drafter_gives_plain_rounds_only(decoders):
    """Whatever the controller wants, a round without a drafter is plain, counts no drafts and
    scores every token."""
    target, _ = decoders("llama")
    live, asked = rows(), []
    loop = loop_for(target, "none", rows=3, lengths=Fixed(5))
    propose = loop.drafter.propose
    loop.drafter.propose = lambda batch, length: asked.append(length) or propose(batch, length)
    drive(loop, live)
    assert set(asked) == {0}
    assert sum(row.drafted for row in live) == 0
    assert all(len(row.log_probabilities) == row.generated for row in live)


def test_drafts_after_plain_rounds_do_not_read_rejected_drafts(decoders):
    """Plain rounds put other tokens where keys of rejected drafts lie: the draft's cache must
    hold these in the end."""
    target, draft = decoders(FAMILIES[0])
    plan = iter([6, 0, 0, 0, 6, 0, 5])
    lengths = Fixed(0)
    lengths.next = lambda *_: next(plan)
    live = [
        Row("0", s, 1, [5, 6, 7, 8], 60, sampling=RowSampling(temperature=1.5)) for s in range(3)
    ]
    loop = loop_for(target, draft, rows=3, lengths=lengths)
    begin(loop, *live)
    wrong = sum(
        done.width - kept for done in (loop.round() for _ in range(7)) for kept in done.accepted
    )
    assert wrong > 10, "hardly a wrong draft: this run showed nothing"
    loop.drafter.propose(loop.batch, 1)
    fresh = loop_for(target, draft, rows=3, lengths=Fixed(1))
    for row in live:  # the same sequences as prompts
        fresh.open(str(row.sample), row.tokens)
        fresh.admit(Row(str(row.sample), row.sample, 1, list(row.tokens), 9))
    for row, line in enumerate(live):
        span = fresh.drafter.runner.cache._of_row[row]
        fed, base = span.length, loop.drafter.runner.cache.base(row)
        for found, due in zip(
            loop.drafter.runner.cache.own_keys, fresh.drafter.runner.cache.prompt_keys, strict=True
        ):
            due = due[:, span.start + base : span.start + fed]
            slot = int(loop.drafter.runner.cache._slot[row])
            found = found[:, slot : slot + fed - base]
            torch.testing.assert_close(found, due, rtol=1e-4, atol=1e-4)
        assert fed == len(line.tokens) - 2
