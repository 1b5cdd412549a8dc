"""Training improves a student for every family; a resumed training equals an undisturbed one;
measured acceptance equals that of pass-by-pass decoding."""

import itertools

import numpy
import pytest
import torch
from checkpoints import write_checkpoint
from test_windows import windows_of

from bass_cli.distill.agreement import measure_acceptance, shared_agreement
from bass_cli.distill.network import Model, run, source_of, student_weights
from bass_cli.distill.training import Goal, Trainer
from bass_cli.distill.windows import Batches, Corpus, Layout, Text, thinned, whole
from bass_cli.errors import MachineError
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.weights import load

CPU, WINDOW, VOCAB = torch.device("cpu"), 48, 299


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_checkpoint("qwen3", folder / "target", seed=0, shards=False)
    write_checkpoint("qwen2", folder / "small", seed=1, shards=False, num_hidden_layers=1)
    return {name: open_checkpoint(folder / name) for name in ("target", "small")}


@pytest.fixture(scope="module")
def target(checkpoints):
    found = checkpoints["target"]
    return Model(found.spec, load(found, dtype=torch.float32, device=CPU), VOCAB, torch.float32)


@pytest.fixture(scope="module")
def corpus():
    noise = numpy.random.default_rng(0)
    return Corpus(
        [Text(str(i), noise.integers(3, VOCAB, 30).tolist(), 5) for i in range(12)], WINDOW
    )


def student_of(checkpoint, layers=None, mask=None, device=CPU, dtype=torch.float32):
    source = source_of(checkpoint, layers=layers, mask=mask, vocab=VOCAB, size=VOCAB)
    return source, Model(source.spec, student_weights(source, device), VOCAB, dtype, source.mask)


def trainer_of(target, checkpoint, corpus, goal, *, most=4, layers=None):
    _, student = student_of(checkpoint, layers)
    batches = Batches(corpus, thinned(WINDOW, 4), size=4, most=most, seed=0)
    return Trainer(target, student, batches, goal)


def test_a_resumed_training_equals_an_undisturbed_one(target, checkpoints, corpus, tmp_path):
    goal = Goal(8, None, 0.01)
    undisturbed, losses = trainer_of(target, checkpoints["small"], corpus, goal), []
    undisturbed.run(lambda done: losses.append(done.loss))
    assert losses[-1] < losses[0]
    ticks = itertools.count()
    killed = trainer_of(target, checkpoints["small"], corpus, goal)

    def kill(done):
        if done.step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # after step 6; step 4 is the last that was kept
        killed.run(kill, checkpoint=tmp_path / "c.pt", every=2.5, now=lambda: float(next(ticks)))
    again = trainer_of(target, checkpoints["small"], corpus, goal)
    again.restore(tmp_path / "c.pt")
    assert 0 < again.progress.step < 6
    again.run(lambda done: None, checkpoint=tmp_path / "c.pt")
    assert again.progress.step == 8
    assert (again.progress.tokens, again.progress.guesses) == (
        undisturbed.progress.tokens, undisturbed.progress.guesses)  # fmt: skip
    for name, weight in undisturbed.weights.items():
        assert torch.equal(again.weights[name], weight), name
    (tmp_path / "c.pt").write_bytes(b"torn")
    with pytest.raises(MachineError, match=r"c\.pt: the checkpoint cannot be read"):
        again.restore(tmp_path / "c.pt")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "gpt2"])
def test_bfloat16_training_on_a_gpu_equals_a_cpu_up_to_rounding(tmp_path, family, corpus):
    """Losses and acceptance are equal up to bfloat16 rounding, and a checkpoint can move between
    devices."""
    write_checkpoint(family, tmp_path / "t", seed=0, shards=False)
    write_checkpoint(family, tmp_path / "s", seed=1, shards=False)
    target, small = open_checkpoint(tmp_path / "t"), open_checkpoint(tmp_path / "s")
    found = {}
    for kind, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        device = torch.device(kind)
        model = Model(target.spec, load(target, dtype=dtype, device=device), VOCAB, dtype)
        _, student = student_of(small, device=device, dtype=dtype)
        batches = Batches(corpus, thinned(WINDOW, 4), size=4, most=4, seed=0)
        trainer, losses = Trainer(model, student, batches, Goal(8, None, 0.003)), []
        trainer.run(lambda done, to=losses: to.append(done.loss), checkpoint=tmp_path / kind)
        windows = [corpus.windows([0], whole(WINDOW, 4, 6), [(0,)])]
        kept = measure_acceptance(model, student, windows, temperature=1.0).kept
        found[kind] = torch.tensor([*losses, kept])
        Trainer(model, student, batches, Goal(8, None, 0.003)).restore(tmp_path / kind)
    torch.testing.assert_close(found["cuda"], found["cpu"], atol=0.02, rtol=0.03)


def test_the_parts_of_a_step_sum_to_the_whole(target, checkpoints, corpus):
    """The result equals that of one part with the same masks."""
    one, parts = (
        trainer_of(target, checkpoints["small"], corpus, Goal(2, None, 0.01), most=most)
        for most in (4, 3)
    )
    for trainer in (one, parts):
        trainer.run(lambda _: None)
    for name, weight in one.weights.items():
        torch.testing.assert_close(parts.weights[name], weight, atol=1e-4, rtol=1e-3)
    assert parts.progress.loss == pytest.approx(one.progress.loss, rel=1e-5)
    assert parts.progress.guesses == one.progress.guesses


def test_a_time_limit_ends_training_and_lowers_the_rate(target, checkpoints, corpus):
    ticks, rates = itertools.count(), []
    trainer = trainer_of(target, checkpoints["small"], corpus, Goal(None, 10.0, 0.01))
    trainer.run(
        lambda _: rates.append(trainer._optimiser.param_groups[0]["lr"]),
        now=lambda: float(next(ticks)),
    )
    assert trainer.progress.step == len(rates) == 9
    assert rates[0] < rates[1] > rates[-1] > 0
    assert max(rates) <= 0.01


def test_a_loss_that_is_not_finite_ends_training(target, checkpoints, corpus):
    trainer = trainer_of(target, checkpoints["small"], corpus, Goal(3, None, 0.01))
    with torch.no_grad():
        trainer.weights["norm.weight"].fill_(float("nan"))
    with pytest.raises(MachineError, match="the loss of step 1 is not finite"):
        trainer.run(lambda _: None)


def test_a_student_of_the_first_layers(target, checkpoints, corpus):
    source, student = student_of(checkpoints["target"], layers=2)
    assert (source.spec.layers, len(source.spec.windows), source.mask) == (2, 2, VOCAB)
    assert not any(name.startswith("layers.2.") for name in student.weights)
    trainer = trainer_of(target, checkpoints["target"], corpus, Goal(4, None, 0.01), layers=2)
    losses = []
    trainer.run(lambda done: losses.append(done.loss))
    assert losses[-1] < losses[0]


def test_the_embedding_of_the_mask_token(checkpoints):
    """A new mask is the mean of all tokens, in a padding row of the vocabulary or a new one. A
    trained mask keeps its embedding."""
    small = checkpoints["small"]
    plain = load(small, dtype=torch.float32, device=CPU)
    for size, rows in ((299, 301), (301, 302)):
        source = source_of(small, layers=None, mask=None, vocab=size, size=size)
        weights = student_weights(source, CPU)
        assert (source.mask, source.spec.vocab) == (size, rows)
        assert weights["embed.weight"].shape[0] == weights["head.weight"].shape[0] == rows
        torch.testing.assert_close(
            weights["embed.weight"][size], plain["embed.weight"][:size].mean(0)
        )
        torch.testing.assert_close(weights["embed.weight"][:size], plain["embed.weight"][:size])
        assert (weights["head.weight"] is weights["embed.weight"]) == small.spec.tied
    kept = student_weights(source_of(small, layers=None, mask=7, vocab=299, size=299), CPU)
    assert torch.equal(kept["embed.weight"], plain["embed.weight"])


def guesses_one_by_one(target, student, mask, tokens, anchor, places, temperature):
    """Return log-probs [K, V] of both models for the drafts behind an anchor, by causal passes."""

    def log_probs(model, ids, count):
        windows = windows_of([ids], Layout(len(ids), 0, ()), length=len(ids))
        hidden = run(model._replace(mask=None), windows)[0, -count:]
        logits = hidden @ model.weights["head.weight"][:VOCAB].T
        return (logits / temperature).log_softmax(-1)

    expected = log_probs(target, tokens[: anchor + places], places)
    begin = tokens[: anchor + 1]
    if mask is None:
        return expected, log_probs(student, tokens[: anchor + places], places)
    return expected, log_probs(student, [*begin, *[mask] * (places - 1)], places)


@pytest.mark.parametrize("masks", [True, False])
def test_acceptance_is_measured_by_position(target, checkpoints, masks):
    source, student = student_of(checkpoints["small"])
    noise = numpy.random.default_rng(1)
    texts = [noise.integers(3, VOCAB, size).tolist() for size in (13, 9)]
    windows = windows_of(texts, whole(24, 4, 12), length=24, begins=2)
    mask, temperature = source.mask if masks else None, 0.7
    student = student._replace(mask=mask)
    found = measure_acceptance(target, student, [windows], temperature=temperature)
    weights, accepted = torch.zeros(4), torch.zeros(4)
    drafts = 0
    for tokens in texts:
        for anchor in range(2, len(tokens) - 4):
            expected, own = guesses_one_by_one(
                target, student, mask, tokens, anchor, 4, temperature
            )
            agreement = shared_agreement(
                expected, own, torch.tensor(tokens[anchor + 1 : anchor + 5])
            )
            alive = 1.0
            for place in range(4):
                weights[place] += alive
                accepted[place] += alive * agreement.accepted[place]
                alive *= float(agreement.given[place])
            drafts += 1
    assert found.drafts == drafts > 8
    torch.testing.assert_close(torch.tensor(found.shared), accepted / weights, atol=1e-4, rtol=1e-4)
    assert found.kept == pytest.approx(float(accepted.sum()) / drafts, rel=1e-4)
    assert all(
        one >= other - 1e-6 for one, other in zip(found.maximal[:1], found.shared[:1], strict=True)
    )


def test_drafts_of_the_target_itself_are_always_accepted(target):
    windows = windows_of([list(range(20, 44))], whole(24, 4, 8), length=24)
    for both in (True, False):
        found = measure_acceptance(target, target, [windows], temperature=1.0, both=both)
        assert found.shared == pytest.approx((1.0,) * 4, abs=1e-4)
        assert found.kept == pytest.approx(4.0, abs=1e-3)
