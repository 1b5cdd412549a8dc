"""Logits processors and min-p, in plain torch and in Triton, against those of transformers. The
tests run on a CUDA device if there is one, otherwise in Triton's interpreter."""

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import bass_kernels as ops
from bass_cli.engine.batch import Batch, Row
from bass_cli.engine.sampling import RowSampling
from bass_kernels import sampling

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB, WIDTH = 75, 3
WORDS = ((7,), (3, 9), (1, 3, 9), (60, 61, 62, 5), (9, 12))
EVERYTHING = RowSampling(
    repetition_penalty=1.4,
    presence_penalty=0.7,
    frequency_penalty=0.3,
    logit_bias=((3, 2.5), (70, -4.0), (9, -1.5)),
    bad_words=WORDS,
    allowed_token_ids=(*range(1, 75, 2), 12, 30, 64),
)
SETTINGS = (
    RowSampling(),
    RowSampling(repetition_penalty=1.7),
    RowSampling(repetition_penalty=0.8, frequency_penalty=-0.4),
    RowSampling(presence_penalty=1.1, frequency_penalty=0.6),
    RowSampling(logit_bias=((3, -3.0), (74, 5.0))),
    RowSampling(bad_words=WORDS),
    RowSampling(allowed_token_ids=(0, 31, 32, 63, 64, 74)),
    EVERYTHING,
)
PROMPTS = ([5], [1, 3], [3, 3, 9, 4, 1], [60, 61, 62], [1], [4, 1, 3], [8, 2], [70, 60, 61, 62])


@pytest.fixture(params=["reference", "triton"])
def form(request):
    if request.param == "triton":
        pytest.importorskip("triton")
    ops.use(request.param)
    return request.param


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def batch_of(settings=SETTINGS, prompts=PROMPTS, vocab=VOCAB):
    """Return a batch with a row for each of the settings, and one ended row before them, so that
    one of them has moved."""
    batch = Batch(rows=len(settings) + 1, context=32, device=DEVICE, vocab=vocab)
    first = Row("first", 0, 0, [1, 2], 9, EVERYTHING)
    both = zip(prompts, settings, strict=True)
    rows = [Row(str(i), 0, 0, list(p), 9, s) for i, (p, s) in enumerate(both)]
    batch.swap_rows([], [first, *rows])
    batch.swap_rows([0], [])
    return batch


def generate(batch, tokens):
    """Commit a round of `tokens` [B, W] of which row i accepts i modulo W drafts."""
    rows, width = tokens.shape
    accepted = torch.arange(rows, device=DEVICE) % width
    batch.report(tokens, accepted, torch.zeros(rows, width, device=DEVICE))


def history(batch, row):
    return batch.tokens[row, : int(batch.lengths[row])].tolist()


def due(logits, tokens, prompt, one):
    """Return the logits [V] as transformers changes them after `tokens`, of which the first
    `prompt` are the prompt's. Presence and frequency penalty are those of OpenAI's documents."""
    ids, scores = torch.tensor([tokens]), logits[None].float().cpu()
    if one.logit_bias:
        scores = SequenceBiasLogitsProcessor([[[i], x] for i, x in one.logit_bias])(ids, scores)
    if one.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(one.repetition_penalty)(ids, scores)
    for token in set(tokens[prompt:]):
        count = tokens[prompt:].count(token)
        scores[0, token] -= count * one.frequency_penalty + one.presence_penalty
    if one.bad_words:
        scores = NoBadWordsLogitsProcessor([list(word) for word in one.bad_words])(ids, scores)
    if one.allowed_token_ids is not None:
        others = set(range(len(logits))) - set(one.allowed_token_ids)
        scores = SuppressTokensLogitsProcessor(sorted(others))(ids, scores)
    return scores[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_processors_equal_those_of_transformers(form, dtype):
    """At every drafted place, in ragged rows, also packed and for a smaller vocabulary."""
    batch = batch_of()
    tokens = torch.randint(0, 12, (len(batch), 4), generator=torch.Generator().manual_seed(1))
    generate(batch, tokens.to(DEVICE))
    drafts = torch.randint(0, 12, (len(batch), WIDTH), generator=torch.Generator().manual_seed(2))
    drafts[:, 0], drafts = 3, drafts.to(DEVICE)
    logits = (3 * randn(len(batch), WIDTH + 1, VOCAB, seed=3)).to(dtype)
    found = batch.process(logits, drafts).cpu()
    changed = 0
    for row, host in enumerate(batch.live_rows):
        for place in range(WIDTH + 1):
            known = history(batch, row) + drafts[row, :place].tolist()
            expected = due(logits[row, place], known, len(host.prompt), host.sampling)
            torch.testing.assert_close(found[row, place], expected, atol=1e-5, rtol=1e-5)
            changed += bool((expected != logits[row, place].float().cpu()).any())
    assert changed > 20
    rows, places = torch.tensor([[7, 2, 2, 5], [3, 0, 2, 1]], device=DEVICE)
    packed = batch.process_packed(logits[rows, places], rows, places, drafts)
    torch.testing.assert_close(packed.cpu(), found[rows.cpu(), places.cpu()])
    fewer = batch.process_packed(logits[rows, places, :70], rows, places, drafts)
    torch.testing.assert_close(fewer.cpu(), found[rows.cpu(), places.cpu(), :70])


def test_masks_forbid_tokens_of_one_place(form):
    batch = batch_of((EVERYTHING, RowSampling()), ([1], [2]))  # the last row moves to the front
    batch.processors.use_masks(2)
    batch.masked = True  # as if a row had a grammar
    batch.processors.masks[0, 1] = 0
    batch.processors.masks[0, 1, 2] = 1 << 3  # token 67
    logits, drafts = randn(2, 3, VOCAB, seed=1), torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)
    found = batch.process(logits, drafts)
    torch.testing.assert_close(found[0, 0], logits[0, 0])
    for place in (1, 2):  # the last mask holds for all places after it
        assert found[0, place].isfinite().nonzero().flatten().tolist() == [67]
    unmasked = batch.process_packed(
        logits[:, 1],
        torch.arange(2, device=DEVICE),
        torch.ones(2, dtype=torch.int64, device=DEVICE),
        drafts,
        masked=False,
    )
    torch.testing.assert_close(unmasked[0], logits[0, 1])


def test_prompt_of_a_new_row_replaces_the_counts_of_the_old_one(form):
    penalised = RowSampling(repetition_penalty=2.0)
    batch = batch_of((penalised,) * 3, ([1], [2], [3]))
    batch.swap_rows([1], [Row("new", 0, 0, [9, 9, 11], 9, penalised)])
    logits = torch.ones(3, 1, VOCAB, device=DEVICE)
    found = batch.process(logits, torch.zeros(3, 0, dtype=torch.int64, device=DEVICE))
    prompts = [sorted(set(row.prompt)) for row in batch.live_rows]
    assert prompts.count([9, 11]) == 1
    assert [(line[0] == 0.5).nonzero().flatten().tolist() for line in found] == prompts


def test_rows_without_processors_leave_the_logits_alone():
    batch = batch_of((RowSampling(min_p=0.1), RowSampling()), ([1], [2]))
    assert batch.processors.active(masked=False)  # the first row, which has ended, had processors
    fresh = Batch(rows=1, context=9, device=DEVICE)
    fresh.swap_rows([], [Row("0", 0, 0, [1], 3)])
    logits = randn(1, 2, VOCAB, seed=1)
    assert fresh.process(logits, torch.zeros(1, 1, dtype=torch.int64)) is logits
    assert fresh.params.min_p is None


# (temperature, top_k, top_p, min_p)
FLOORS = [
    (1.0, 0, 1.0, 0.1),
    (0.6, 0, 0.9, 0.2),
    (1.3, 9, 1.0, 0.05),
    (1.0, 20, 0.8, 0.02),
    (0.0, 0, 1.0, 0.5),
    (0.9, 0, 1.0, 0.0),
    (2.0, 3, 0.5, 1.0),
    (1.0, 0, 0.95, 0.001),
]


def floors():
    temperature, top_k, top_p, min_p = (
        torch.tensor(column, device=DEVICE) for column in zip(*FLOORS, strict=True)
    )
    return temperature, top_k, top_p, min_p


def warped(logits, temperature, top_k, top_p, min_p):
    """Return the probabilities [V] by transformers' warpers in their order."""
    scores = logits[None].float().cpu()
    if temperature == 0:
        return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[1])[0].float()
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)]
    for warper in warpers:
        scores = warper(None, scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("vocab", [60, 1500])
def test_min_p_keeps_the_tokens_of_transformers(form, dtype, vocab, monkeypatch):
    logits = (2 * randn(len(FLOORS), vocab, seed=vocab)).to(dtype)
    expected = torch.stack([warped(x, *one) for x, one in zip(logits, FLOORS, strict=True)])
    temperature, top_k, top_p, min_p = floors()
    if form == "reference":
        found = sampling.process(logits, temperature, top_k, top_p, min_p)
    else:
        from test_truncation import processed

        from bass_kernels import truncation

        monkeypatch.setattr(truncation, "CHUNK", 1024)
        found = processed(logits, temperature, top_k, top_p, min_p)
    assert ((found.cpu() > 0) == (expected > 0)).all()
    torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("vocab", "each"), [(60, 2), (2100, 1)])
def test_samples_with_min_p_equal_the_definition(form, vocab, each):
    """The argmax of log p + noise, p by transformers' warpers, in some places of each row."""
    logits = 2 * randn(each * len(FLOORS), vocab, seed=vocab)
    temperature, top_k, top_p, min_p = floors()
    keys = torch.arange(2 * len(FLOORS), device=DEVICE).view(-1, 2)
    positions = torch.arange(len(logits), device=DEVICE)
    from bass_kernels.noise import bits_all

    noise = ops.gumbel(
        bits_all(keys.repeat_interleave(each, 0), positions, vocab, stream=ops.SHARED)
    ).cpu()
    expected = []
    for line, x in enumerate(logits):
        probs = warped(x, *FLOORS[line // each])
        expected.append(int((probs.log() + noise[line]).argmax()))
    found = ops.sample(logits, temperature, top_k, top_p, keys, positions, min_p=min_p)
    assert found.tolist() == expected


def test_log_probability_of_given_tokens(form):
    logits = 5 * randn(2, 3, 300, seed=1)
    logits[0, 0, 7:] = -torch.inf
    tokens = torch.tensor([[3, 250, 9], [0, 1, 299]], device=DEVICE)
    expected = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(ops.log_probability(logits, tokens), expected)
