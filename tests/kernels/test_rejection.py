"""Maximal coupling in Triton against its definition, and the distribution of its results.

They run on a CUDA device if there is one, otherwise in Triton's interpreter. Tokens must be equal.
Rounding can swap two nearly equal candidates, so tests against the definition also check that no
decision is that close (`apart`).
"""

import math
from collections import Counter

import pytest
import torch

import bass_kernels as ops
from bass_kernels import acceptance, noise, sampling

pytest.importorskip("triton")
from bass_kernels import acceptance_kernels, truncation

# a warning filter for the interpreter
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*encountered in (log|divide|cast):RuntimeWarning", "ignore:All-NaN:RuntimeWarning"
)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter computes bfloat16 wrongly.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])
# temperature, top_k, top_p
# keys whose first test number at position 0 is 0, and the largest below 1
ZERO, LARGEST = (1067759, 6), (323239, 0)
LAYOUTS = [
    (0.0, 0, 1.0),
    (0.5, 0, 0.95),
    (1.0, 0, 1.0),
    (1.0, 5, 1.0),
    (0.8, 3, 0.9),
    (1.5, 40, 0.8),
]


@pytest.fixture(autouse=True)
def triton():
    ops.use("triton")


@pytest.fixture
def small_chunks(monkeypatch):
    """Use several chunks a row with few tokens."""
    for module in (truncation, acceptance_kernels):
        monkeypatch.setattr(module, "CHUNK", 1024)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def columns(mixed):
    return tuple(torch.tensor(column, device=DEVICE) for column in zip(*mixed, strict=True))


def keys_for(rows, seed=4):
    return torch.randint(0, 2**32, (rows, 2), generator=torch.Generator().manual_seed(seed)).to(
        DEVICE
    )


def distributions_of(logits, mixed):
    """Return the processed distributions [B, W, V] of logits [B, W, V] by the definition."""
    each = [column.repeat_interleave(logits.shape[1]) for column in columns(mixed)]
    return sampling.process(logits.flatten(0, 1), *each).view(logits.shape)


def apart(dist, keys, positions, stream, origins):
    """Check that no other token comes within 1e-4 of the best noisy one, for distributions [N, V]."""
    bits = noise.bits_all(keys, positions, dist.shape[1], stream=0) * 0
    for row in range(len(dist)):
        one = slice(row, row + 1)
        bits[row] = noise.bits_all(
            keys[one], positions[one], dist.shape[1], stream=int(stream[row]), origin=origins[one]
        )[0]
    first, second = (dist.log() + noise.gumbel(bits)).topk(2).values.T
    assert ((first - second) > 1e-4).all(), "two tokens as good: another seed"


def drafted(logits, mixed, keys, lengths):
    """Return (tokens, distributions) of k draft steps over logits [B, k, U], by Triton and by the
    definition."""
    found = []
    for form in (ops.draft_sample, acceptance.draft_sample):
        steps = [
            form(logits[:, i], *columns(mixed), keys, lengths + i, lengths)
            for i in range(logits.shape[1])
        ]
        values, edges = zip(*(dist for _, dist in steps), strict=True)
        dist = ops.Distribution(
            torch.stack(values, 1), None if edges[0] is None else torch.stack(edges, 1)
        )
        found.append((torch.stack([tokens for tokens, _ in steps], 1), dist))
    return found


def compare(drafts, given, logits, mixed, keys, lengths, most=None):
    """Compare both forms' verdicts on the same drafts, with distributions `given` (Triton's, the
    definition's)."""
    found = ops.rejection_sample(drafts, given[0], logits, *columns(mixed), keys, lengths, most)
    due = acceptance.rejection_sample(
        drafts, given[1], logits, *columns(mixed), keys, lengths, most
    )
    for one, other in zip(found[:3], due[:3], strict=True):
        assert one.tolist() == other.tolist()
    torch.testing.assert_close(found[3], due[3], atol=1e-5, rtol=1e-5)
    return due


@pytest.mark.parametrize(
    ("dtype", "vocab", "smaller", "width", "seed"),
    [(DTYPES[0], 70, 9, 2, 1), (DTYPES[-1], 1100, 300, 1, 3)],
)
def test_drafts_and_verdicts_equal_the_definition(small_chunks, dtype, vocab, smaller, width, seed):
    mixed = LAYOUTS[width - 1 : width + 3]
    rows = len(mixed)
    logits = (2 * randn(rows, width + 1, vocab, seed=seed)).to(dtype)
    guess = (
        logits[:, :width, : vocab - smaller] + 0.7 * randn(rows, width, vocab - smaller, seed=2)
    ).to(dtype)
    keys, lengths = keys_for(rows), torch.arange(rows, device=DEVICE) * 37 + 5
    (tokens, dist), (due_tokens, due_dist) = drafted(guess, mixed, keys, lengths)
    for step in range(width):
        apart(
            due_dist.values[:, step],
            keys,
            lengths + step,
            torch.full_like(lengths, noise.DRAFT),
            lengths,
        )
    assert tokens.tolist() == due_tokens.tolist()
    p, q = distributions_of(logits, mixed), torch.nn.functional.pad(due_dist.values, (0, smaller))
    accepted = compare(tokens, (dist, due_dist), logits, mixed, keys, lengths)[0]
    complete = accepted == width
    assert 0 < int(complete.sum()) < rows, "no residual draw or no bonus draw: this showed little"
    index = torch.arange(rows, device=DEVICE)
    rest = (p[:, :-1] - q)[index, accepted.clamp(max=width - 1)].clamp(min=0)
    last = torch.where(complete[:, None], p[index, accepted], rest)
    apart(
        last, keys, lengths + accepted, torch.where(complete, noise.BONUS, noise.RESIDUAL), lengths
    )


@pytest.mark.parametrize("width", [0, 2])
def test_point_masses_and_plain_rounds(width):
    mixed = LAYOUTS[:4]
    logits = 2 * randn(4, width + 1, 70, seed=5)
    drafts = logits[:, :width].topk(2).indices[..., 0]
    drafts[2:, width // 2 :] = 11  # unlikely
    lengths = torch.arange(4, device=DEVICE) * 5
    accepted = compare(drafts, (None, None), logits, mixed, keys_for(4), lengths)[0]
    assert width == 0 or 0 < int(accepted.sum()) < 4 * width


@pytest.mark.parametrize(("point", "most"), [(True, 0), (False, 1)])
def test_drafts_beyond_the_limit_have_no_effect(point, most):
    """The result equals the round with fewer drafts: a row that accepts them all samples its next
    token from the target's distribution."""
    mixed, width = LAYOUTS[1:4], 2
    guess = 2 * randn(3, width, 70, seed=5)
    logits = torch.cat((guess + 0.3 * randn(3, width, 70, seed=6), randn(3, 1, 70, seed=7)), 1)
    keys, lengths = keys_for(3, 8), torch.arange(3, device=DEVICE) * 5 + 2
    (drafts, dist), (_, due_dist) = drafted(guess, mixed, keys, lengths)
    given = (None, None) if point else (dist, due_dist)
    found = compare(drafts, given, logits, mixed, keys, lengths, torch.tensor(most, device=DEVICE))
    few = min(most, width)
    cut = None if point else sampling.Distribution(due_dist.values[:, :few])
    due = acceptance.rejection_sample(
        drafts[:, :few], cut, logits[:, : few + 1], *columns(mixed), keys, lengths
    )
    assert [t.tolist() for t in found[:2]] == [t.tolist() for t in due[:2]]
    kept = torch.arange(few + 1, device=DEVICE) <= due[0][:, None]
    assert found[2][:, : few + 1][kept].tolist() == due[2][kept].tolist()
    assert few == 0 or few in found[0].tolist(), "no row kept all that counted: this showed little"


def for_all(rows, logits, mixed):
    """One block of distributions for many rows: logits [W, V] and their edges, computed once."""
    edges = truncation.edges(logits, *columns([mixed]))
    return ops.Distribution(*(t.expand(rows, -1, -1).contiguous() for t in (logits, edges)))


def drawn(q, keys, lengths):
    """Sample drafts [B, k] from distributions q [k, V] by the definition."""
    steps = [sampling.draw(dist.expand(len(keys), -1), keys, lengths + i, stream=noise.DRAFT, origin=lengths)
             for i, dist in enumerate(q)]  # fmt: skip
    return torch.stack(steps, 1)


@pytest.mark.skipif(
    DEVICE.type == "cuda", reason="toy models live on the CPU; test_gpu.py has whole loops"
)
def test_a_whole_loop():
    """Rows of unequal lengths and distributions through drafter, coupling and commit give the
    tokens of plain torch."""
    from toys import Markov, drive, loop_for

    from bass_cli.engine.batch import Row
    from bass_cli.engine.sampling import RowSampling
    from bass_cli.lengths.controllers import Fixed

    tables, found, kept = 2 * randn(2, 3, 7, 7, seed=3).cpu(), [], []
    for kind in ("reference", "triton"):
        ops.use(kind)
        rows = [
            Row(
                str(i),
                i,
                1,
                [1, 2, 3][: i + 1],
                3 + i,
                sampling=RowSampling(temperature=1.0 - 0.2 * i, top_p=0.95),
            )
            for i in range(2)
        ]
        loop = loop_for(Markov(tables[0], 1), Markov(tables[0] + 0.6 * tables[1], 2), rows=2, lengths=Fixed(2),
                        coupling="maximal")  # fmt: skip
        found.append(drive(loop, rows))
        kept.append([(row.drafted, row.accepted) for row in rows])
    assert found[0] == found[1]
    assert kept[0] == kept[1]
    assert 0 < sum(accepted for _, accepted in kept[0]) < sum(drafted for drafted, _ in kept[0])


def test_equal_distributions_always_accept_and_an_empty_residual_uses_the_target():
    """If p is q, any u below 1 accepts. A draft with q(x) = 0 is rejected; if max(p - q, 0) is
    empty, the token is sampled from p."""
    logits, mixed = (
        randn(1, 1, 70).expand(4, 2, 70).contiguous(),
        [LAYOUTS[row] for row in (1, 2, 3, 4)],
    )
    keys, lengths = keys_for(4, 9), torch.full((4,), 6, device=DEVICE)
    (tokens, dist), (_, due_dist) = drafted(logits[:, :1], mixed, keys, lengths)
    tokens[[0, 3]] = logits[0, 0].argmin()
    accepted, following, _, _ = compare(tokens, (dist, due_dist), logits, mixed, keys, lengths)
    assert accepted.tolist() == [0, 1, 1, 0]
    assert (distributions_of(logits, mixed)[:, 0].gather(1, following[:, None]) > 0).all()


def test_a_test_number_of_zero_accepts_only_possible_tokens():
    """u is 0 for two rows, and the largest number below 1 for two rows, where p is 1 and 0.993."""
    keys = torch.tensor([ZERO, ZERO, LARGEST, LARGEST], device=DEVICE)
    lengths = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    u = noise.uniform(noise.bits(keys, lengths, lengths, stream=noise.TEST, origin=lengths))
    assert u.tolist() == [0.0, 0.0, 1 - 2.0**-24, 1 - 2.0**-24]
    logits = torch.full((4, 2, 9), -torch.inf, device=DEVICE)
    logits[:, :, 2], logits[1, 0, 2], logits[1, 0, 3], logits[3, 0, 4] = 0.0, -torch.inf, 0.0, -5.0
    drafts = torch.full((4, 1), 2, device=DEVICE)
    accepted = compare(drafts, (None, None), logits, [(1.0, 0, 1.0)] * 4, keys, lengths)[0]
    assert accepted.tolist() == [1, 0, 1, 0]


def surprise(counts, due):
    """Return the G statistic of counts against the distribution `due` (both by outcome), and its
    limit, which one in a million samples of that distribution exceeds (Wilson-Hilferty
    approximation of the chi-square quantile)."""
    total = sum(counts.values())
    assert all(due[outcome] > 0 for outcome in counts), "an outcome of probability 0 came out"
    statistic = 2 * sum(n * math.log(n / (total * due[outcome])) for outcome, n in counts.items())
    freedom = sum(p > 0 for p in due.values()) - 1
    return statistic, freedom * (1 - 2 / (9 * freedom) + 4.753 * math.sqrt(2 / (9 * freedom))) ** 3


# Logits and distribution of target and draft, and the number of rows that shows a fault. The
# interpreter takes 0.1 s a row.
SHARP = (
    [[0.0, 0.7, 0.0, -9.0, -9.0], [-9.0, -9.0, -9.0, 0.5, 0.0]],
    (1.0, 3, 1.0),
    [[0.9, 1.0, 0.9, 0.9, 0.9]],
    (1.0, 1, 1.0),
)
SMOOTH = (
    [[1.6, 1.0, 0.6, -0.5, 0.3], [0.0, 0.9, -1.0, 1.2, 0.2], [2.0, -1.0, 0.5, 0.8, 1.1]],
    (0.9, 0, 0.93),
    [[0.0, 1.1, 0.9, 1.0, 0.8], [0.1, 0.8, -0.8, 1.3, 0.1]],
    (0.8, 4, 1.0),
)
ON_CUDA = pytest.mark.skipif(DEVICE.type == "cpu", reason="takes minutes without a CUDA device")


@pytest.mark.parametrize(
    ("distributions", "rows"),
    [
        (SHARP, 30),
        pytest.param(SHARP, 50_000, marks=ON_CUDA),
        pytest.param(SMOOTH, 50_000, marks=ON_CUDA),
    ],
)
def test_blocks_follow_the_targets_distribution(distributions, rows):
    """Over many noise keys: an accepted first draft x has probability min(p, q)(x), a recovered
    token in its place max(p - q, 0)(x). The token after one accepted draft has the second p, and
    the bonus token the last p, for any accepted drafts."""
    target, given, guess, chosen = distributions
    target, guess = torch.tensor([target], device=DEVICE), torch.tensor([guess], device=DEVICE)
    p, q, width = (
        distributions_of(target, [given])[0],
        distributions_of(guess, [chosen])[0],
        guess.shape[1],
    )
    keys = torch.stack((torch.arange(rows), torch.arange(rows) * 7919 % 2**32), 1).to(DEVICE)
    lengths = torch.full((rows,), 12, device=DEVICE)
    drafts = drawn(q, keys, lengths)
    both = for_all(rows, guess[0], chosen), for_all(rows, target[0], given)
    accepted, following, block, _ = (
        t.tolist() for t in acceptance_kernels.verify(drafts, *both, keys, lengths)
    )
    parts = torch.minimum(p[0], q[0]), (p[0] - q[0]).clamp(min=0)
    due = {
        (kept, x): mass
        for kept, part in zip((True, False), parts, strict=True)
        for x, mass in enumerate(part.tolist())
    }
    found = [
        surprise(Counter((n > 0, line[0]) for n, line in zip(accepted, block, strict=True)), due)
    ]
    second = Counter(line[1] for n, line in zip(accepted, block, strict=True) if n >= 1)
    found.append(surprise(second, dict(enumerate(p[1].tolist()))))
    last = Counter(token for n, token in zip(accepted, following, strict=True) if n == width)
    found.append(surprise(last, dict(enumerate(p[width].tolist()))))
    assert all(statistic < bound for statistic, bound in found), found


def test_the_statistic_detects_a_wrong_distribution():
    due = {0: 0.5, 1: 0.3, 2: 0.2}
    statistic, bound = surprise(Counter({0: 580, 1: 300, 2: 120}), due)
    assert statistic > bound
    statistic, bound = surprise(Counter({0: 500, 1: 310, 2: 190}), due)
    assert statistic < bound
