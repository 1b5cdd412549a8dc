"""What rounds report of each token: log-probabilities of the token and of the likeliest ones in its
place, against log_softmax of a pass over the whole sequence by transformers."""

import numpy
import pytest
import torch
from checkpoints import shallow, write_checkpoint
from decoders import load_noisy_pair
from toys import AtOnce, drive, loop_for, rows_for
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from bass_cli.engine.batch import Row
from bass_cli.engine.host_state import Report
from bass_cli.engine.verify import Cut
from bass_cli.lengths.controllers import Bass, Fixed

PROMPTS = ([7], [3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0, 4, 5, 2])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """transformers' model, the target, and a draft: the target with noise on its weights."""
    folder = tmp_path_factory.mktemp("llama")
    write_checkpoint("llama", folder, **shallow("llama"))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return theirs, *load_noisy_pair(folder)


def rows(top=7):
    """Two samples of each prompt, with reports of different sizes, one without."""
    return rows_for(
        PROMPTS,
        seed=11,
        temperature=lambda p, s: 0.9 * s,
        report=lambda p, s: Report((top, 0, 3)[p] if s else top),
    )


def reported(row):
    """Return the token ids and log-probabilities of a finished row, [tokens, columns] each."""
    entries = row.entries()
    return entries >> 32, entries.astype(numpy.int32).view(numpy.float32)


@torch.inference_mode()
def check(theirs, row, tokens, atol=1e-4):
    logits = theirs(torch.tensor([[*row.prompt, *tokens]])).logits[0, len(row.prompt) - 1 : -1]
    due = logits.double().log_softmax(-1)
    own = due.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(
        torch.tensor(row.log_probabilities[: len(tokens)]), own.float(), atol=atol, rtol=0
    )
    if not row.report.top:
        return
    ids, numbers = (torch.from_numpy(part[: len(tokens)].copy()) for part in reported(row))
    assert ids.shape == (len(tokens), row.report.top)
    best = due.topk(row.report.top).values
    torch.testing.assert_close(numbers, best.float(), atol=atol, rtol=0)
    torch.testing.assert_close(due.gather(1, ids).float(), best.float(), atol=atol, rtol=0)


DRAFTS = {
    "none": lambda target, draft: "none",
    "lookup": lambda target, draft: "lookup",
    "model": lambda target, draft: draft,
    "parallel": lambda target, draft: AtOnce(draft, 300),
    "skip": lambda target, draft: target.keep_layers(range(target.spec.layers - 1)),
}


@pytest.mark.parametrize("coupling", ["shared", "maximal"])
@pytest.mark.parametrize("drafts", DRAFTS)
def test_reports_equal_log_softmax_of_transformers(models, drafts, coupling):
    theirs, target, draft = models
    live = rows()
    lengths = Bass() if coupling == "shared" else Fixed(3)
    draft = DRAFTS[drafts](target, draft)
    found = drive(loop_for(target, draft, rows=4, lengths=lengths, coupling=coupling), live)
    for row in live:
        check(theirs, row, found[row.key, row.sample])


def test_reports_of_cut_rounds(models):
    theirs, target, draft = models
    live = rows(top=20)
    loop = loop_for(
        target, AtOnce(draft, 300), rows=6, lengths=Fixed(2), cut=Cut(most=6, above=1, more=4)
    )
    cut = []
    found = drive(loop, live, on_round=lambda done, live_rows: cut.append(done.drafted is not None))
    assert any(cut)
    for row in live:
        check(theirs, row, found[row.key, row.sample])


@pytest.mark.parametrize("coupling", ["shared", "maximal"])
@pytest.mark.parametrize("drafts", ["lookup", "parallel"])
def test_processed_reports_equal_the_processed_distribution(models, drafts, coupling):
    """The law of transformers' warpers, with a bias before them. A row with the model's own report
    is in the same batch."""
    theirs, target, draft = models
    bias = ((5, 3.0), (9, -100.0))
    live = rows_for(
        PROMPTS,
        seed=11,
        limit=lambda p, s: 9 - p,
        report=Report(processed=4),
        temperature=lambda p, s: 0.7 * s,
        top_k=6,
        top_p=0.9,
        logit_bias=bias,
    )
    own = Row("own", 0, 1, [4, 5], 8, report=Report(3))
    lengths = Fixed(2) if drafts == "parallel" else Fixed(4)
    loop = loop_for(
        target,
        DRAFTS[drafts](target, draft),
        rows=7,
        lengths=lengths,
        coupling=coupling,
        cut=Cut(most=6, above=1, more=4) if drafts == "parallel" else None,
    )
    found = drive(loop, [*live, own])
    check(theirs, own, found["own", 0])
    warpers = LogitsProcessorList(
        [TemperatureLogitsWarper(0.7), TopKLogitsWarper(6), TopPLogitsWarper(0.9)]
    )
    for row in live:
        tokens = found[row.key, row.sample]
        with torch.inference_mode():
            logits = theirs(torch.tensor([[*row.prompt, *tokens]])).logits[0]
        logits = logits[len(row.prompt) - 1 : -1].clone()
        for id_, number in bias:
            logits[:, id_] += number
        due = warpers(None, logits).double().log_softmax(-1)
        if row.sampling.temperature == 0:
            due = torch.full_like(due, -torch.inf)
            due[torch.arange(len(due)), logits.argmax(-1)] = 0.0
        ids, numbers = (torch.from_numpy(part[: len(tokens)].copy()) for part in reported(row))
        assert ids[:, 0].tolist() == tokens
        torch.testing.assert_close(due.gather(1, ids).float(), numbers, atol=1e-4, rtol=0)
        best = due.topk(4).values.float()
        torch.testing.assert_close(numbers[:, 1:], best, atol=1e-4, rtol=0)


def test_rows_without_a_report_have_the_same_rounds_as_before(models):
    """The result of a round has no further columns, and nothing is stored."""
    _, target, draft = models
    live = [Row("0", s, 1, [1, 2, 3], 9) for s in range(3)]
    loop = loop_for(target, draft, rows=3)
    drive(loop, live)
    assert all(not entries.size for entries in loop.batch.host_state.entries)
    assert {row.entries().shape[1] for row in live} == {0}


def test_samples_do_not_depend_on_reports(models):
    _, target, draft = models
    found = [drive(loop_for(target, draft, rows=4), rows(top)) for top in (0, 20)]
    assert found[0] == found[1]
