"""Rows with a grammar on a CUDA device: a round is three graphs, between which the host makes the
masks. Float32."""

import re

import pytest
import torch
import toys
from checkpoints import write_checkpoint, write_tokenizer
from decoders import load_noisy_pair
from toys import AtOnce, drive

from bass_cli.config.file_options import Structure
from bass_cli.engine.batch import Row
from bass_cli.engine.sampling import RowSampling
from bass_cli.formats.grammars import Grammars
from bass_cli.formats.tokenizer import Tokenizer
from bass_cli.lengths.controllers import Bass, Fixed
from bass_cli.models.capture import Graphs

pytest.importorskip("llguidance")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
CUDA = torch.device("cuda")
PATTERNS = (r"(yes|no), [a-z]{2,6}\.", None, r'\{"[a-c]{1,3}": [0-9]{1,4}\}')


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Return (target, draft, tokenizer) of one family; the draft is the target with some noise."""
    folder = tmp_path_factory.mktemp("llama")
    write_checkpoint("llama", folder)
    write_tokenizer(folder)
    tokenizer = Tokenizer.load(folder)
    return *load_noisy_pair(folder, noise=0.1, device=CUDA, vocab=tokenizer.size), tokenizer


def loop_for(target, draft, *, batch, graphs, **words):
    return toys.loop_for(
        target, draft, rows=batch, graphs=Graphs(CUDA) if graphs else None, **words
    )


def rows_of(tokenizer, samples=3):
    grammars = Grammars(tokenizer, vocab=tokenizer.size, eos_ids=tokenizer.eos_ids)
    found = []
    for sample in range(samples):
        for kind, pattern in enumerate(PATTERNS):
            row = Row(
                str(kind), sample, 3, [7 + kind] * (1 + 4 * kind), 30, RowSampling(0.9, 0, 0.95)
            )
            row.matcher = None if pattern is None else grammars.matcher(Structure("regex", pattern))
            found.append(row)
    return found


def run(loop, rows, tokenizer, **words):
    def end_at_eos(done, live_rows):
        for row in live_rows:
            ends = [at for at, id_ in enumerate(row.generated_tokens) if id_ in tokenizer.eos_ids]
            if row.matcher is not None and ends:
                row.limit = min(row.limit, ends[0] + 1)

    return drive(loop, rows, on_round=end_at_eos, **words)


@pytest.fixture(scope="module")
def plainly(world):
    target, _, tokenizer = world
    loop = loop_for(target, "none", batch=1, lengths=Fixed(0), graphs=False)
    return run(loop, rows_of(tokenizer), tokenizer)


@pytest.mark.parametrize("draft", ["model", "parallel", "lookup", "none"])
def test_captured_rounds_with_grammars_equal_plain_decoding(draft, world, plainly):
    target, model, tokenizer = world
    drafter = {"model": model, "parallel": AtOnce(model, 298)}.get(draft, draft)
    for batch, lengths in ((9, Fixed(4)), (4, Bass())):
        loop = loop_for(target, drafter, batch=batch, lengths=lengths, graphs=True)
        assert run(loop, rows_of(tokenizer), tokenizer, ahead=True) == plainly
        masked = [key for key in loop.graphs.held() if getattr(key, "masked", False)]
        assert masked
        held, captures = set(loop.graphs.held()), loop.graphs.captures
        again = run(loop, rows_of(tokenizer), tokenizer, ahead=True)
        assert again == plainly
        new = set(loop.graphs.held()) - held  # shapes that were too rare before
        assert loop.graphs.captures == captures + len(new)  # no graph was captured twice


def test_samples_match_their_regex_under_maximal_coupling(world):
    target, model, tokenizer = world
    loop = loop_for(target, model, batch=9, lengths=Fixed(3), graphs=True, coupling="maximal")
    for (key, _), tokens in run(loop, rows_of(tokenizer, 6), tokenizer).items():
        if PATTERNS[int(key)] is not None:
            assert re.fullmatch(PATTERNS[int(key)], tokenizer.decode(tokens))


def test_masks_are_made_while_the_target_runs(world):
    """`launch` returns before the masks exist, and other rows may come before `round`."""
    target, model, tokenizer = world
    loop = loop_for(target, model, batch=3, lengths=Fixed(2), graphs=True)
    rows = rows_of(tokenizer, 1)
    for row in rows:
        loop.open(row.key, row.tokens)
    loop.admit(rows[0])
    for _ in range(3):
        loop.round()
    loop.launch()
    loop.admit(*rows[1:])  # finishes the round that was launched
    before = [row.generated for row in rows]
    loop.round()
    assert rows[0].generated > before[0]
    assert before[1:] == [0, 0]
