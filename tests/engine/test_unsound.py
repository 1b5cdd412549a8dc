"""Logits that are not finite: nothing is read or written outside the vocabulary, and the sample
with such logits ends with an error. All other samples are unchanged. If only the draft's logits
are not finite, nothing changes. Triton by its interpreter too."""

import math
from collections import Counter

import pytest
import torch
from checkpoints import shallow, write_checkpoint
from drawing import Scheduler
from test_scheduler import EOS, Letters, by_key, job, prompts, table
from toys import Markov, begin, loop_for

import bass_kernels as ops
from bass_cli.engine.batch import Row
from bass_cli.engine.sampling import RowSampling
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.weights import load
from bass_cli.lengths.controllers import Bass, Fixed
from bass_cli.lengths.goodput import Goodput
from bass_cli.models.decoder import Decoder
from bass_kernels import noise, sampling

# NaN in numpy: the interpreter's arithmetic
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INF, NAN = math.inf, math.nan
# temperature, top_k, top_p
LAWS = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.8, 0, 0.9), (1.0, 5, 1.0), (0.9, 4, 0.8)]
KINDS = ["reference"] + (["triton"] if ops.has_triton() else [])


@pytest.fixture(params=KINDS)
def kind(request):
    ops.use(request.param)
    return request.param


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def spoiled(vocab, last):
    """Rows of non-finite logits; `last`: a place in the last chunk of a kernel."""
    rows = randn(7, vocab, seed=5)
    rows[0, 3], rows[1, last], rows[2, :], rows[3, 2], rows[4, :] = NAN, NAN, NAN, INF, -INF
    rows[5, 1], rows[5, last], rows[6, :], rows[6, 4] = INF, NAN, -INF, NAN
    return rows


def cases(kind, vocab):
    """Return (non-finite rows [N, V], parameters [N] each, keys, positions): every such row with
    all parameters; through the interpreter, which takes 0.1 s a row, each one or two times."""
    pairs = [(row, law) for row in range(7) for law in LAWS]
    if kind == "triton" and DEVICE.type == "cpu":
        pairs = [(i % 7, LAWS[i % 5]) for i in range(7)]
    rows, params = zip(*pairs, strict=True)
    keys = torch.randint(0, 2**32, (len(pairs), 2), generator=torch.Generator().manual_seed(4)).to(
        DEVICE
    )
    columns = [torch.tensor(column, device=DEVICE) for column in zip(*params, strict=True)]
    return (
        spoiled(vocab, vocab - 2)[list(rows)],
        columns,
        keys,
        torch.arange(len(pairs), device=DEVICE) * 9 + 4,
    )


def test_non_finite_rows_give_valid_tokens_without_log_probability(kind):
    vocab = 4200  # two chunks of a kernel
    bad, *params = cases(kind, vocab)
    good = 2 * randn(len(bad), vocab, seed=6)
    good[:, 5:40] = -INF  # masked tokens are lawful
    good[0, :-1] = -INF
    good[1] = torch.where(
        torch.arange(vocab, device=DEVICE) == 41, -3.0, torch.finfo(torch.float32).min
    )
    mixed = torch.stack((good, bad), 1).flatten(0, 1)
    columns, keys, positions = params
    both = [t.repeat_interleave(2, 0) for t in (*columns, keys, positions)]
    tokens, scores = ops.sample_scored(mixed, *both)
    assert ((tokens >= 0) & (tokens < vocab)).all()
    assert scores.isfinite().tolist() == [True, False] * len(bad)
    alone = ops.sample_scored(good, *columns, keys, positions)
    assert tokens[::2].tolist() == alone[0].tolist()
    assert scores[::2].tolist() == alone[1].tolist()
    assert not ((tokens[::2] >= 5) & (tokens[::2] < 40)).any()


def test_chunk_of_impossible_tokens_only(kind):
    """Its maximum is -inf, which times a temperature above 1 exceeds float32."""
    vocab = 4200
    temperature = torch.tensor([0.7, 1.5, 30.0], device=DEVICE)
    rows, logits = len(temperature), 2 * randn(3, vocab, seed=8)
    logits[:, :2060] = -INF
    logits[1, 2060:4100] = -INF
    keys = torch.arange(2 * rows, device=DEVICE).view(rows, 2)
    params = (temperature, torch.zeros_like(keys[:, 0]), torch.full_like(temperature, 0.9), keys)
    tokens, scores = ops.sample_scored(logits, *params, keys[:, 0])
    due = logits.log_softmax(-1)
    torch.testing.assert_close(scores, due.gather(1, tokens[:, None])[:, 0], atol=1e-5, rtol=1e-5)
    drafts, both = tokens[:, None], torch.stack((logits, logits), 1)
    accepted, _, block, scores = ops.rejection_sample(drafts, None, both, *params, keys[:, 0])
    for row, kept in enumerate(accepted.tolist()):
        found, chosen = scores[row, : kept + 1], block[row, : kept + 1]
        torch.testing.assert_close(found, due[row, chosen], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("points", [True, False])
def test_verdicts_with_non_finite_logits_give_valid_tokens(kind, points):
    vocab, width = 70, 2
    bad, columns, keys, lengths = cases(kind, vocab)
    rows = len(bad)
    logits = (2 * randn(1, 1, vocab, seed=7)).repeat(rows, width + 1, 1)
    index, place = torch.arange(rows, device=DEVICE), torch.arange(rows, device=DEVICE) % 3
    logits[index, place] = bad
    guess = logits.nan_to_num(0.0, 0.0, 0.0)[:, :width].contiguous()
    drafts, given = guess.argmax(-1), None
    if not points:
        each = [t.repeat_interleave(width, 0) for t in (*columns, keys, lengths)]
        steps = torch.arange(width, device=DEVICE).repeat(rows)
        drafts, given = ops.draft_sample(
            guess.flatten(0, 1), *each[:-1], each[-1] + steps, each[-1]
        )
        drafts = drafts.view(rows, width)
        given = ops.Distribution(*(None if t is None else t.view(rows, width, -1) for t in given))
    accepted, following, block, scores = ops.rejection_sample(
        drafts, given, logits, *columns, keys, lengths
    )
    assert ((following >= 0) & (following < vocab)).all()
    for row, kept in enumerate(accepted.tolist()):
        found = scores[row, : kept + 1].isfinite().tolist()
        assert found == [at != int(place[row]) for at in range(kept + 1)]
        assert ((block[row, : kept + 1] >= 0) & (block[row, : kept + 1] < vocab)).all()
    assert (accepted >= place).any(), "no row came as far as to the place that is not sound"


def test_non_finite_draft_distribution_is_rejected(kind):
    """The recovered token is then drawn from p itself."""
    vocab = 70
    bad, columns, keys, lengths = cases(kind, vocab)
    target = randn(1, 1, vocab, seed=3).repeat(len(bad), 2, 1)
    tokens, given = ops.draft_sample(bad, *columns, keys, lengths, lengths)
    assert ((tokens >= 0) & (tokens < vocab)).all()
    given = ops.Distribution(*(None if t is None else t[:, None] for t in given))
    accepted, following, _, scores = ops.rejection_sample(
        tokens[:, None], given, target, *columns, keys, lengths
    )
    assert scores[torch.arange(len(bad), device=DEVICE), accepted].isfinite().all()
    lawless = sampling.process(bad, *columns).sum(-1).isnan()
    assert lawless.sum() >= len(bad) / 2
    assert not accepted[lawless].any()
    due = sampling.draw(
        sampling.process(target[:, 0], *columns),
        keys,
        lengths,
        stream=noise.RESIDUAL,
        origin=lengths,
    )
    assert following[lawless].tolist() == due[lawless].tolist()


SPOILER = 9  # a letter that comes now and then


def sound():
    logits = table(eos=-6.0)
    logits[:, :, SPOILER] -= 1
    return logits


def broken_after(token):
    """A toy distribution that is not finite after `token`."""
    spoilt = sound()
    spoilt[:, token] = NAN
    spoilt[1, token], spoilt[2, token] = INF, -INF
    return spoilt


def conduct(target, draft, settings, given, *, rows, lengths, coupling):
    loop = loop_for(
        Markov(target, 1),
        draft if isinstance(draft, str) else Markov(draft, 2),
        rows=rows,
        lengths=lengths,
        coupling=coupling,
    )
    return list(
        Scheduler(settings, Letters(), loop, context=1000, eos_ids={EOS}).run(iter(given), ())
    )


UNSOUND = {"n": 6, "max_new_tokens": 14, "top_p": 0.95}, ("abc", "dd", "f")


@pytest.fixture(scope="module")
def whole():
    """The tokens of plain decoding with finite logits for UNSOUND's job, one row at a time."""
    settings, given = UNSOUND
    clean = conduct(
        sound(),
        "none",
        job(**settings),
        prompts(*given),
        rows=1,
        lengths=Fixed(0),
        coupling="shared",
    )
    return {(c.id, c.sample): c for c in clean}


@pytest.mark.parametrize("coupling", ["shared", "maximal"])
@pytest.mark.parametrize("draft", ["model", "lookup", "none"])
def test_only_samples_with_non_finite_logits_end_with_an_error(coupling, draft, whole):
    settings, given, token = job(**UNSOUND[0]), prompts(*UNSOUND[1]), SPOILER
    drafts = table(1) if draft == "model" else draft
    for rows, lengths in ((1, Fixed(3)), (4, Bass()), (30, Fixed(0))):
        found = conduct(
            broken_after(token),
            drafts,
            settings,
            given,
            rows=rows,
            lengths=lengths,
            coupling=coupling,
        )
        assert len(by_key(found)) == len(whole)
        for c in found:
            met = token in c.token_ids[:-1] or (
                token in c.token_ids and c.tokens < 14 and c.finish_reason != "eos"
            )
            assert (c.finish_reason == "error") == met == (c.error is not None)
            assert not met or (
                c.token_ids.index(token) == c.tokens - 1 and f"token {c.tokens + 1}" in c.error
            )
            assert c.text == Letters().decode(c.token_ids)
            assert c.sum_logprob is not None
            assert math.isfinite(c.sum_logprob)
            due = whole[c.id, c.sample]
            if coupling == "shared":
                assert c.token_ids == due.token_ids[: c.tokens]
                assert met or (c.finish_reason, c.sum_logprob) == (
                    due.finish_reason,
                    pytest.approx(due.sum_logprob),
                )
        reasons = [c.finish_reason for c in found]
        assert 3 <= reasons.count("error") < len(reasons)


@pytest.mark.parametrize("lengths", [lambda: Fixed(2), lambda: Goodput(limit=8)])
def test_a_prompt_whose_first_logits_are_not_finite_gives_empty_samples(lengths):
    """Then only empty samples have ended, and the mean length must not divide by zero."""
    found = conduct(
        broken_after(SPOILER),
        table(1),
        job(n=3, max_new_tokens=5),
        prompts("j", "a"),
        rows=2,
        lengths=lengths(),
        coupling="shared",
    )
    failed = [c for c in found if c.id == "p0"]
    assert [(c.finish_reason, c.tokens, c.text, c.sum_logprob) for c in failed] == [
        ("error", 0, "", None)
    ] * 3
    assert all(c.finish_reason == "length" for c in found if c.id == "p1" and 9 not in c.token_ids)


def test_non_finite_draft_changes_nothing_under_shared_coupling(kind):
    if kind == "triton" and DEVICE.type == "cuda":
        pytest.skip("the toys live on the CPU: only the interpreter can run kernels there")
    n, tokens = (3, 8) if kind == "reference" else (1, 4)  # the interpreter takes its time
    settings, given = job(n=n, max_new_tokens=tokens, top_p=0.9), prompts("abc", "dd")
    ops.use("reference")
    due = by_key(
        conduct(table(), "none", settings, given, rows=1, lengths=Fixed(0), coupling="shared")
    )
    ops.use(kind)
    for draft in (broken_after(4), torch.full_like(table(), NAN)):
        assert (
            by_key(
                conduct(
                    table(), draft, settings, given, rows=3, lengths=Fixed(2), coupling="shared"
                )
            )
            == due
        )


def test_non_finite_draft_keeps_the_distribution_under_maximal_coupling():
    """Pairs of first tokens of many samples occur as often as the target's distribution says."""
    n, draft = 12_000, table(1)
    draft[:, ::2] = NAN
    settings = job(n=n, max_new_tokens=2, temperature=1.0, top_p=1.0)
    target = table(eos=-50.0)
    found = conduct(
        target, draft, settings, prompts("abc"), rows=n, lengths=Fixed(2), coupling="maximal"
    )
    assert {c.finish_reason for c in found} == {"length"}
    law = target.softmax(-1)
    due = law[2, 2][:, None] * law[0]
    counts = torch.zeros_like(due)
    for c in found:
        counts[tuple(c.token_ids)] += 1
    # Total variation: its mean is below half the sum of sqrt(p / n), and it deviates by less
    # than 4 / (2 sqrt(n)).
    assert (counts / n - due).abs().sum() / 2 < (due / n).sqrt().sum() / 2 + 2 / n**0.5


def decoder(folder, *, noise=0.0, spoiler=None):
    """A small model with some noise on its weights; NaN for the token `spoiler`."""
    checkpoint = open_checkpoint(folder)
    weights = load(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    weights["head.weight"] = torch.randn(weights["embed.weight"].shape, generator=generator)
    for w in weights.values():
        if noise and w.dim() > 1:
            w += noise * w.std() * torch.randn(w.shape, generator=generator)
    if spoiler is not None:
        weights["embed.weight"][spoiler] = NAN
    return Decoder(checkpoint.spec, weights)


def samples(count):
    return [
        Row(f"p{i}", 0, 3, [7 + i, 1, 5][: 1 + i % 3], 14, sampling=RowSampling(temperature=0.6))
        for i in range(count)
    ]


def finish(loop, rows):
    """Run rows to their limits or to non-finite logits; return their tokens up to there."""
    waiting, out = list(rows), {}
    while waiting or len(loop.batch):
        while waiting and len(loop.batch) < loop.batch.capacity:
            row = waiting.pop(0)
            begin(loop, row)
            loop.close(row.key)
        loop.round()
        for index in reversed(range(len(loop.batch))):
            row = loop.batch.live_rows[index]
            if row.broken is not None or row.room <= 0:
                kept = row.tokens[row.prompt_length :][
                    : row.limit if row.broken is None else row.broken
                ]
                out[row.key] = kept, row.broken is not None and row.broken < row.limit
                loop.retire(index)
    return out


def test_nan_left_in_the_cache_harms_no_row(tmp_path):
    """NaN for one token: in rejected drafts, and in places that later rows of the same span do
    not read."""
    write_checkpoint("llama", tmp_path, **shallow("llama"))
    whole = finish(loop_for(decoder(tmp_path), "none", rows=1, lengths=Fixed(0)), samples(16))
    often = Counter(token for tokens, _ in whole.values() for token in set(tokens[:-1]))
    token = next(token for token, count in often.most_common() if count < 8)
    due = {
        key: (tokens[: tokens.index(token) + 1], True) if token in tokens[:-1] else (tokens, False)
        for key, (tokens, _) in whole.items()
    }
    failed = sum(failed for _, failed in due.values())
    assert failed > 3
    for rows, width in ((1, 0), (3, 6)):
        proposed = []
        loop = loop_for(
            decoder(tmp_path, spoiler=token),
            decoder(tmp_path, noise=0.1),
            rows=rows,
            lengths=Fixed(width),
        )
        propose = loop.drafter.propose
        loop.drafter.propose = lambda batch, length, p=propose, seen=proposed: (
            seen.append(p(batch, length)) or seen[-1]
        )
        assert finish(loop, samples(16)) == due
        drafted = sum(int((one.tokens == token).sum()) for one in proposed)
        assert width == 0 or drafted > failed, "none was rejected: this showed little"


def test_non_finite_place_does_not_affect_earlier_queries(kind):
    """Keys and values as they are written, read by queries before and after the place that is
    NaN or infinite."""
    rows, width, heads, size = 2, 4, 2, 16
    positions = torch.arange(width, device=DEVICE).expand(rows, -1)
    segments = ops.Segments(
        positions.contiguous(),
        *torch.zeros(2, rows, dtype=torch.int64, device=DEVICE),
        8 * torch.arange(rows, device=DEVICE),
        (),
        width,
    )
    slots = positions + segments.own[:, None]
    prompt = tuple(torch.zeros(heads, 8, size, device=DEVICE) for _ in range(2))
    angles = (
        torch.ones(rows, width, size // 2, device=DEVICE),
        torch.zeros(rows, width, size // 2, device=DEVICE),
    )
    plain = randn(rows, width, 3 * heads * size)
    for part, value in ((1, INF), (2, NAN)):
        qkv = plain.clone()
        qkv[0, 2, part * heads * size + 3] = value  # of one head's key or value
        for narrow in (False, True):
            if narrow and ops.kind_for(qkv) == "reference":
                continue
            found = []
            for given in (plain, qkv):
                own = tuple(
                    torch.full((heads, rows * 8, size), NAN, device=DEVICE) for _ in range(2)
                )
                if narrow:
                    from bass_kernels import fused_attention

                    flat = torch.stack([a.flatten(0, 1) for a in angles])
                    mixed = fused_attention.attend(
                        given.flatten(0, 1),
                        flat,
                        None,
                        segments,
                        own,
                        prompt,
                        heads=heads,
                        eps=1e-6,
                        scale=0.25,
                        keys=16,
                    ).view(rows, width, heads, size)
                else:
                    q = ops.rope_write(given, angles, slots, own, heads=heads, norms=None, eps=1e-6)
                    mixed = ops.attention(q, own, prompt, segments, scale=0.25).view(
                        rows, width, heads, size
                    )
                assert own[1][:, slots].isfinite().all()
                found.append(mixed)
            nan = found[1].isnan().any(-1)
            assert nan[0, :, 0].tolist() == [False, False, True, True], (part, value, narrow)
            assert not nan[1].any()
            assert not nan[0, :, 1].any()
            assert torch.equal(found[0][~nan], found[1][~nan])
