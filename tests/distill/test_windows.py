"""Training windows give the logits of drafts/model.py's own pass, with the intended number of
masks, and only the right guesses count."""

import functools

import numpy
import pytest
import torch
from checkpoints import TRAINED, write_checkpoint
from toys import AtOnce, drive, loop_for, rows_for

from bass_cli.distill.network import Model, run
from bass_cli.distill.windows import FLOOR, RATE, Layout, lay_out, thinned, whole
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.weights import load
from bass_cli.lengths.controllers import Fixed
from bass_cli.models.decoder import Decoder

MASK = 300


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a function from a family's name to its spec, weights, and a Decoder with a copy of
    them."""

    @functools.cache
    def made(family):
        folder = tmp_path_factory.mktemp(family)
        write_checkpoint(family, folder)
        checkpoint = open_checkpoint(folder)
        weights = load(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
        return checkpoint.spec, weights, Decoder(checkpoint.spec, dict(weights))

    return made


def windows_of(texts, layout, *, length, seed=0, begins=0):
    """Make one window that contains these texts one after the other."""
    tokens, positions, numbers = (numpy.zeros((1, length), dtype=numpy.int64) for _ in range(3))
    expected = numpy.zeros((1, length), dtype=bool)
    numbers -= 1
    at = 0
    for number, text in enumerate(texts):
        to = slice(at, at + len(text))
        tokens[0, to], positions[0, to], numbers[0, to] = text, range(len(text)), number
        expected[0, at + begins : at + len(text) - 1] = True
        at += len(text)
    noise = numpy.random.default_rng(seed)
    return lay_out(layout, tokens, positions, numbers, expected, [noise])


def seen_by_drafting(decoder, widest):
    """Return the inputs and outputs of a loop's draft passes: (tokens of a row, logits [length,
    V])."""
    found = []
    loop = loop_for(decoder, AtOnce(decoder, MASK), rows=3, lengths=Fixed(widest))
    runner, propose, logits = loop.drafter.runner, loop.drafter.propose, []

    def noted(forward):
        return lambda *given, **words: logits.append(forward(*given, **words)) or logits[-1]

    runner.forward, runner.forward_at = noted(runner.forward), noted(runner.forward_at)

    def watched(batch, length):
        proposal = propose(batch, length)
        for row in range(len(batch.live_rows) if length == widest else 0):
            end = int(batch.lengths[row])
            found.append((batch.tokens[row, :end].tolist(), logits[-1][row]))
        return proposal

    loop.drafter.propose = watched
    drive(loop, rows_for([[5, 6, 7], [9, 10, 11, 12, 13]], 2, limit=11, temperature=0.8))
    return found


@pytest.mark.parametrize("family", TRAINED)
def test_training_logits_equal_drafting_logits(models, family):
    """The logits are equal up to the order of sums. Texts in one window do not affect each other,
    nor do masks of different anchors in a group."""
    spec, weights, decoder = models(family)
    passes = seen_by_drafting(decoder, widest := 7)[:6]
    assert len({len(tokens) for tokens, _ in passes}) > 2
    layout = Layout(sum(len(tokens) for tokens, _ in passes) + 3, 3, (3,) * (widest - 1))
    windows = windows_of([tokens for tokens, _ in passes], layout, length=layout.window)
    ends = numpy.cumsum([len(tokens) for tokens, _ in passes]) - 1
    slots = torch.full((3 * 3,), -1)
    slots[torch.tensor([8, 0, 4, 1, 3, 6])] = torch.from_numpy(ends)
    windows.anchors.copy_(slots.view(1, 3, 3))
    hidden = run(Model(spec, weights, 300, torch.float32, MASK), windows)[0]
    logits = torch.nn.functional.linear(hidden, weights["head.weight"], weights.get("head.bias"))
    anchors, numbers = (torch.from_numpy(part) for part in layout.slots())
    for end, (_, expected) in zip(ends, passes, strict=True):
        slot = int((slots == end).nonzero())
        group, number = divmod(slot, 3)
        places = [layout.window + group * layout.masks + int(m)
                  for m in (anchors == number).nonzero()]  # fmt: skip
        assert numbers[anchors == number].tolist() == list(range(1, widest))
        torch.testing.assert_close(logits[[int(end), *places]], expected, atol=2e-4, rtol=1e-4)


def test_masks_do_not_change_the_text(models):
    """Masks do not change the outputs of the text, so the target runs without them."""
    spec, weights, _ = models("qwen3")
    windows = windows_of([[5, 6, 7, 8], [9, 10, 11]], thinned(16, 4), length=16)
    model = Model(spec, weights, 300, torch.float32, MASK)
    both = run(model, windows)
    assert both.shape[1] == windows.layout.tokens > 16
    torch.testing.assert_close(run(model._replace(mask=None), windows), both[:, :16])


@pytest.mark.parametrize(("window", "drafts"), [(512, 8), (1024, 12), (64, 4)])
def test_masks_are_thinned_by_position(window, drafts):
    layout = thinned(window, drafts)
    assert len(layout.counts) == drafts - 1
    for j, count in enumerate(layout.counts, 1):
        assert layout.groups * count / window == pytest.approx(max(RATE**j, FLOOR), rel=0.25)
    assert list(layout.counts) == sorted(layout.counts, reverse=True)
    # the whole costs a few plain passes, not one for each draft
    assert layout.tokens < 0.62 * drafts * window


def test_masks_of_the_default_window_fill_whole_tiles():
    layout = thinned(512, 8)
    assert layout.masks % 8 == 0
    assert 2.8 < layout.tokens / 512 < 3.8


def test_guesses_count_where_the_target_chose_the_next_token():
    """Not in a prompt, not beyond the end of a text, not without an anchor."""
    texts, layout = [list(range(10, 22)), list(range(30, 35))], whole(20, 5, 8)
    windows = windows_of(texts, layout, length=20, begins=3)
    flat, text = windows.tokens.flatten(), windows.texts[0]
    expected = [i for i in range(17) if i not in (0, 1, 2, 11, 12, 13, 14, 16)]
    anchors, numbers = layout.slots()
    for student, target, place in zip(windows.student, windows.target, windows.place, strict=True):
        assert int(target) in expected
        if student < 20:
            assert (int(place), int(student)) == (0, int(target))
            continue
        group, mask = divmod(int(student) - 20, layout.masks)
        anchor = int(windows.anchors[0, group, anchors[mask]])
        assert int(place) == numbers[mask]
        assert int(target) == anchor + int(place)
        assert anchor in expected
        assert text[anchor] == text[int(target)]
    assert (windows.student < 20).sum() == len(expected)
    assert sorted(windows.anchors[windows.anchors >= 0].tolist()) == expected
    assert (windows.anchors < 0).sum() == 16 - len(expected)
    # of the first text 8 are expected, of the second 1: so many guesses lie 1, 2, 3, 4 places on
    assert [int((windows.place == j).sum()) for j in range(5)] == [9, 7, 6, 5, 4]
    assert flat[windows.target].min() >= 13
    check_order(windows)


def check_order(windows):
    """Check that guesses are ordered by their target distribution, and that `before` is the same
    anchor's guess one position earlier."""
    assert windows.known[windows.of].tolist() == windows.target.tolist()
    assert windows.begins.tolist() == [
        int((windows.of < number).sum()) for number in range(len(windows.known) + 1)
    ]
    for guess, (place, before) in enumerate(zip(windows.place, windows.before, strict=True)):
        if not place:
            assert int(before) == guess
            continue
        assert int(windows.place[before]) == int(place) - 1
        assert int(windows.target[before]) == int(windows.target[guess]) - 1
        assert windows.target[before] - windows.place[before] == windows.target[guess] - place
        assert before < guess


def test_anchors_depend_on_the_seed_only():
    texts, layout = [list(range(60))], thinned(64, 4)
    one, same, other = (windows_of(texts, layout, length=64, seed=s) for s in (1, 1, 2))
    assert torch.equal(one.anchors, same.anchors)
    assert torch.equal(one.student, same.student)
    assert not torch.equal(one.anchors, other.anchors)
    check_order(one)
