"""If the length of a round matters (Algorithm 1, maximal coupling), captured rounds equal those
of an uncaptured loop one by one, however few graphs serve them."""

from types import SimpleNamespace

import pytest
import torch
from checkpoints import FAMILIES, shallow, write_checkpoint
from decoders import load_decoder
from fakes import FakeGraphs
from toys import Markov, again, drive, loop_for, rows_for

from bass_cli.config.job import Job, Pair, Speculation
from bass_cli.engine.batch import Row
from bass_cli.engine.sampling import RowSampling
from bass_cli.engine.sizes import WIDTHS, cover
from bass_cli.lengths.controllers import Bass, LengthParts, make_lengths
from bass_cli.lengths.surface import make_surface
from bass_cli.run.build import warm_up

VOCAB = 16
# while some row accepts everything
PAPERS = [7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 32, 32]
LINES = make_surface(
    (1, 4), (0, 32), verify=[[1.0, 1.0], [1.0, 1.0]], draft=[[0.0, 0.001], [0.0, 0.001]]
)


def tables(distance):
    """Return the logits of a target and of a draft at this distance."""
    both = torch.randn(2, 3, VOCAB, VOCAB, generator=torch.Generator().manual_seed(3))
    return 2 * both[0], 2 * both[0] + distance * both[1]


def rows(limit=45, n=3, temperature=1.0):
    """Return samples of two prompts with unequal limits."""
    return rows_for(
        ([1, 2, 3, 4, 1, 2, 3], [1, 2, 3, 4, 1]),
        n,
        seed=5,
        limit=lambda p, s: limit - 9 * s,
        temperature=lambda p, s: temperature * (0.3 + 0.3 * s),
    )


def loop_of(distance, lengths, *, coupling, draft="model", batch=4, graphs=True):
    """Return a loop over toy models, captured on fake graphs or uncaptured."""
    target, drafting = tables(distance)
    return loop_for(
        Markov(target, 1),
        Markov(drafting, 2) if draft == "model" else draft,
        rows=batch,
        lengths=lengths,
        coupling=coupling,
        graphs=FakeGraphs() if graphs else None,
        context=256,
    )


def rounds_of(loop, given):
    """Return (generated tokens, each round's draft length and accepted drafts)."""
    seen = []
    found = drive(
        loop,
        given,
        on_round=lambda done, live_rows: seen.append((done.width, done.accepted, done.num_drafts)),
    )
    return found, seen


CONTROLLERS = {
    "bass": lambda coupling: make_lengths("bass", LengthParts(limit=32, coupling=coupling)),
    "bass to 20": lambda coupling: make_lengths("bass", LengthParts(limit=20, coupling=coupling)),
    "bass+table": lambda coupling: make_lengths(
        "bass+table", LengthParts(limit=32, coupling=coupling, surface=LINES)
    ),
    "auto": lambda coupling: make_lengths("auto", LengthParts(limit=32, coupling=coupling)),
    "auto with a profile": lambda coupling: make_lengths(
        "auto", LengthParts(limit=32, coupling=coupling, surface=LINES)
    ),
    "9": lambda coupling: make_lengths(9, LengthParts(limit=32, coupling=coupling)),
    "33": lambda coupling: make_lengths(33, LengthParts(limit=64, coupling=coupling)),
}


# If almost no draft is accepted, the lengths of Algorithm 1 and of `auto` react to it.
@pytest.mark.parametrize(
    ("distance", "coupling", "name"),
    [(0.3, "shared", name) for name in ("bass", "bass to 20", "bass+table")]
    + [(0.3, "maximal", name) for name in CONTROLLERS]
    + [(3.0, "shared", "bass"), (3.0, "maximal", "bass"), (3.0, "maximal", "auto with a profile")],
)
def test_captured_rounds_equal_uncaptured_rounds(coupling, name, distance):
    (found, seen), (due, rounds) = (
        rounds_of(
            loop_of(distance, CONTROLLERS[name](coupling), coupling=coupling, graphs=graphs), rows()
        )
        for graphs in (True, False)
    )
    assert seen == rounds
    assert found == due


@pytest.mark.parametrize("name", ["bass", "auto with a profile", "33"])
def test_lookup_under_maximal_coupling_verifies_only_what_it_found(name):
    """A wider graph must not verify what earlier rounds left in it. The samples repeat
    themselves, so drafts are long."""
    (found, seen), (due, rounds) = (
        rounds_of(
            loop_of(
                0, CONTROLLERS[name]("maximal"), coupling="maximal", draft="lookup", graphs=graphs
            ),
            rows(100, temperature=0.4),
        )
        for graphs in (True, False)
    )
    assert len({width for width, _, _ in rounds} - set(WIDTHS)) > 2, "this showed little"
    assert seen == rounds
    assert found == due


@pytest.mark.parametrize(
    ("coupling", "name"),
    [("shared", "bass"), ("maximal", "bass"), ("maximal", "auto"), ("shared", "bass+table")],
)
def test_algorithm_1_grows_beyond_captured_lengths(coupling, name):
    """The draft is the target, so all drafts are accepted; few graphs serve all lengths."""
    loop = loop_of(0.0, CONTROLLERS[name](coupling), coupling=coupling, batch=1)
    _, seen = rounds_of(loop, [Row("0", 0, 5, [1, 2], 330, sampling=RowSampling(temperature=1.0))])
    assert [width for width, _, _ in seen][: len(PAPERS)] == PAPERS
    assert loop.graphs.captures <= len(WIDTHS)


def test_rounds_fit_into_the_cache_of_a_row(tmp_path):
    """Real caches with room for the longest draft: a wider graph still fits at the end of a row."""
    write_checkpoint(FAMILIES[0], tmp_path, **shallow(FAMILIES[0]))
    model, limit, longest = load_decoder(tmp_path), 23, 17
    given = [
        Row(str(p), 0, 1, [3, 1, 4], limit, sampling=RowSampling(temperature=0.9)) for p in range(4)
    ]
    loops = [
        loop_for(model, model, rows=2, lengths=Bass(start=17, limit=longest), **words)
        for words in ({}, {"span": limit + cover(longest) + 1, "graphs": FakeGraphs()})
    ]
    due, _ = rounds_of(loops[0], [again(row) for row in given])
    found, seen = rounds_of(loops[1], given)
    assert found == due
    assert max(width for width, _, _ in seen) == 17
    assert max(key.width for _, key in loops[1].graphs.done) == 24


@pytest.mark.parametrize(
    ("coupling", "length", "widest"),
    [("shared", "bass", 32), ("maximal", "bass", 32), ("maximal", 23, 23), ("shared", 23, 16)],
)
def test_warm_up_captures_all_graphs_for_rounds_with_a_deadline(coupling, length, widest):
    """Nothing else may be captured then, and an uncaptured round takes too long."""
    lengths = make_lengths(length, LengthParts(limit=32, coupling=coupling))
    loop = loop_of(0.0, lengths, coupling=coupling)
    loop.drafter.prepare_prompts = lambda: None
    pair, speculation = (
        Pair(name="toy", target="toy", draft="toy"),
        Speculation(length=length, coupling=coupling),
    )
    job = Job(pair=pair, n=3, speculation=speculation)
    spec = SimpleNamespace(context=999)
    plan = SimpleNamespace(
        job=job,
        device=torch.device("cpu"),
        files=SimpleNamespace(target=SimpleNamespace(spec=spec), tokenizer=None),
        new_tokens=256,
        samples_per_prompt=3,
    )
    warm_up(loop, plan)
    assert loop.controller is lengths
    loop.graphs.done.clear()
    for row in [
        Row("0", s, 5, [1, 2], 330, sampling=RowSampling(temperature=1.0)) for s in range(3)
    ]:
        if not row.sample:
            loop.open("0", row.tokens, deadline=1e9)
        loop.admit(row)
    while max(loop.batch.rooms()) > 0:
        loop.round(1e9)
    assert {how for how, _ in loop.graphs.done} == {"replay"}
    assert max(key.width for _, key in loop.graphs.done) == widest
