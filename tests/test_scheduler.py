"""Test the scheduler: ends of samples, refilling, budgets, and tokens that do not depend on other
rows."""

import dataclasses
import itertools
from collections import Counter

import pytest
import torch
from drawing import Scheduler
from toys import Markov, loop_for

from bass_cli.config.job import Job, Pair
from bass_cli.config.sampling import Sampling
from bass_cli.io.prompts import Prompt
from bass_cli.lengths.controllers import Bass, Fixed

VOCAB, EOS = 12, 11


class Letters:
    """A tokenizer with one letter a token: a = 0, b = 1, ...; the last id is the end of sequence."""

    has_chat_template = False

    def spelled(self, id_):
        return ""

    def special_start(self, text: str) -> None:
        return None

    def encode(self, text, most=None):
        return [ord(c) - ord("a") for c in text]

    encode_part = encode

    def decode(self, ids):
        return "".join(chr(ord("a") + i) for i in ids if i != EOS)


def table(seed=0, eos=-1.0):
    logits = torch.randn(3, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5
    logits[:, :, EOS] += eos
    return logits


def job(**fields):
    names = [name for name in Sampling.model_fields if name in fields]
    sampling = Sampling(**{name: fields.pop(name) for name in names})
    return Job(pair=Pair(name="toy", target="toy"), sampling=sampling, token_ids=True, **fields)


def prompts(*texts):
    return [
        Prompt(id=f"p{i}", text=t, messages=None, meta={"k": i}, reference=None, place=f"x:{i}")
        for i, t in enumerate(texts)
    ]


def run(
    settings,
    given,
    *,
    rows=4,
    done=(),
    draft="model",
    lengths=None,
    target=None,
    coupling="shared",
    context=1000,
    now=None,
):
    loop = loop_for(
        Markov(table() if target is None else target, 1),
        Markov(table(1), 2) if draft == "model" else draft,
        rows=rows,
        lengths=lengths or Bass(),
        coupling=coupling,
    )
    if now is not None:
        loop.clock.now = now
    scheduler = Scheduler(settings, Letters(), loop, context=context, eos_ids={EOS})
    return list(scheduler.run(iter(given), done))


def by_key(completions):
    out = {
        (c.id, c.sample): (c.text, c.finish_reason, tuple(c.token_ids), c.tokens)
        for c in completions
    }
    assert len(out) == len(completions)
    return out


TEXTS = ("abc", "a", "dddddd", "fgh", "bb")


def test_tokens_do_not_change_with_batch_size_order_neighbours_draft_or_resume():
    settings = job(n=3, max_new_tokens=15, seed=4, top_p=0.9)
    given = prompts(*TEXTS)
    expected = by_key(run(settings, given, rows=1, draft="none", lengths=Fixed(0)))
    assert set(expected) == set(itertools.product([p.id for p in given], range(3)))
    assert len({value[0] for value in expected.values()}) > 10
    for rows in (1, 2, 5, 30):
        assert by_key(run(settings, given, rows=rows)) == expected
    assert by_key(run(settings, given[::-1], rows=4)) == expected
    assert by_key(run(settings, given[2:3], rows=4)) == {
        k: v for k, v in expected.items() if k[0] == "p2"
    }
    done = {("p0", 1), ("p3", 0), ("p3", 1), ("p3", 2)}
    assert by_key(run(settings, given, rows=4, done=done)) == {
        k: v for k, v in expected.items() if k not in done
    }


def test_prompts_may_come_while_rows_are_busy():
    """A source yields None if no prompt is ready, and is read again after the next round. A prompt
    may come a second time, for other samples."""
    settings, given = job(n=3, max_new_tokens=15, seed=4), prompts(*TEXTS)
    expected = by_key(run(settings, given, rows=1, draft="none", lengths=Fixed(0)))
    wanted = {}

    class Done:
        def __contains__(self, key):
            return key[1] not in wanted[key[0]]

    def source():
        for samples in ({0, 2}, {1}):
            for prompt in given:
                wanted[prompt.id] = samples
                yield prompt
                yield from [None] * 40  # until its samples are there
                yield None

    loop = loop_for(Markov(table(), 1), Markov(table(1), 2), rows=4, lengths=Bass())
    scheduler = Scheduler(settings, Letters(), loop, context=1000, eos_ids={EOS})
    assert by_key(list(scheduler.run(source(), Done()))) == expected


@pytest.mark.parametrize("fault", ["open", "swap_rows", "grow", "round"])
@pytest.mark.parametrize("at", [1, 3, 7])
def test_a_job_continues_on_another_loop_with_the_missing_samples(monkeypatch, fault, at):
    settings, given, done = job(n=3, max_new_tokens=15, seed=4), prompts(*TEXTS), {("p1", 0)}
    expected = by_key(run(settings, given, done=done))
    loops = [
        loop_for(Markov(table(), 1), Markov(table(1), 2), rows=rows, lengths=Bass())
        for rows in (4, 2)
    ]
    calls, work = itertools.count(1), getattr(loops[0], fault)

    def fail(*args, **named):
        if next(calls) == at:
            raise MemoryError
        return work(*args, **named)

    monkeypatch.setattr(loops[0], fault, fail, raising=False)
    scheduler = Scheduler(settings, Letters(), loops[0], context=1000, eos_ids={EOS})
    source, found = iter(given), []
    if at <= (5 if fault == "open" else 7):
        with pytest.raises(MemoryError):
            found.extend(scheduler.run(source, done))
        assert not scheduler.reading
        scheduler.stop()
        scheduler.resume(loops[1])
    found += scheduler.run(source, done)
    assert by_key(found) == expected


def test_the_seed_changes_the_samples_and_so_does_the_sample_number():
    given = prompts("abc")
    one, two = (by_key(run(job(n=2, max_new_tokens=12, seed=s), given)) for s in (0, 1))
    assert one["p0", 0] != one["p0", 1]
    assert one["p0", 0] != two["p0", 0]


@pytest.mark.parametrize("coupling", ["shared", "maximal"])
def test_end_of_sequence_truncates_an_accepted_block(coupling):
    target = table(eos=2.0)
    loose = run(
        job(n=40, max_new_tokens=30),
        prompts("abc"),
        target=target,
        draft=Markov(target, 2),
        lengths=Fixed(7),
        rows=40,
        coupling=coupling,
    )
    ended = [c for c in loose if c.finish_reason == "eos"]
    assert len(ended) > 30
    for c in ended:
        assert c.token_ids.index(EOS) == len(c.token_ids) - 1 == c.tokens - 1
        assert c.text == Letters().decode(c.token_ids[:-1])
        assert 0 <= c.accepted <= c.tokens
    assert any(c.tokens % 8 for c in ended)


def test_log_probabilities_are_of_accepted_tokens():
    target = table()
    for c in run(job(n=5, max_new_tokens=9, temperature=0.5), prompts("abcd"), target=target):
        sequence, total = [0, 1, 2, 3, *c.token_ids], 0.0
        for place in range(4, len(sequence)):
            total += float(
                target[(place - 1) % 3, sequence[place - 1]].log_softmax(-1)[sequence[place]]
            )
        assert abs(total - c.sum_logprob) < 1e-4
        assert abs(c.mean_logprob - total / c.tokens) < 1e-4


def test_a_stop_string_that_spans_two_blocks_is_found_and_cut():
    target = table(eos=-4.0)
    free = job(n=60, max_new_tokens=40, temperature=1.0)
    whole = by_key(run(free, prompts("e"), rows=60, draft="none", lengths=Fixed(0), target=target))
    pairs = Counter(text[i : i + 2] for text, *_ in whole.values() for i in range(len(text) - 1))
    stops = tuple(pair for pair, _ in pairs.most_common(2))
    settings = job(n=60, max_new_tokens=40, temperature=1.0, stop=stops)
    for lengths in (Fixed(0), Fixed(1), Fixed(5)):
        found = run(
            settings, prompts("e"), rows=60, lengths=lengths, draft=Markov(target, 2), target=target
        )
        stopped = [c for c in found if c.finish_reason == "stop"]
        assert len(stopped) > 10
        for c in found:
            text = whole[c.id, c.sample][0]
            places = [i for i in map(text.find, stops) if i >= 0]
            assert c.text == (text[: min(places)] if places else text)
            assert c.finish_reason == ("stop" if places else whole[c.id, c.sample][1])
            if places:
                assert c.tokens == len(c.text) + 2


def test_a_row_ends_at_its_limit_and_others_take_its_place():
    done = run(
        job(n=7, max_new_tokens=5),
        prompts("abc", "b"),
        rows=3,
        lengths=Fixed(3),
        target=table(eos=-50.0),
    )
    assert len(done) == 14
    assert all(c.finish_reason == "length" and c.tokens == 5 for c in done)


def test_a_prompt_longer_than_the_context_fails_and_the_others_run():
    done = run(
        job(n=2, max_new_tokens=50),
        prompts("abc", "a" * 30, "b"),
        context=20,
        target=table(eos=-50.0),
    )
    failed = [c for c in done if c.finish_reason == "error"]
    assert [c.id for c in failed] == ["p1"]
    assert "30 tokens" in failed[0].error
    assert "20" in failed[0].error
    assert {c.id for c in done if c.finish_reason == "length"} == {"p0", "p2"}
    assert {c.tokens for c in done if c.id == "p0"} == {17}  # what the context leaves


def test_a_budget_ends_every_sample_of_its_prompt_and_the_next_prompt_gets_its_own():
    now = [0.0]

    def tick():
        now[0] += 0.01
        return now[0]

    settings = job(n=3, max_new_tokens=400, budget=0.5)
    done = run(settings, prompts("abc", "b"), rows=2, now=tick, target=table(eos=-50.0))
    assert len(done) == 6
    assert {c.finish_reason for c in done} == {"budget"}
    assert all(c.seconds <= 0.7 for c in done)
    assert any(c.tokens > 3 for c in done if c.id == "p1")
    unlimited = by_key(
        run(job(n=3, max_new_tokens=400), prompts("abc", "b"), target=table(eos=-50.0))
    )
    for c in done:
        assert tuple(c.token_ids) == unlimited[c.id, c.sample][2][: c.tokens]


def test_a_budget_keeps_what_finished_in_time():
    done = run(
        job(n=8, max_new_tokens=40, budget=1000.0), prompts("abc"), target=table(eos=1.0), rows=8
    )
    assert {c.finish_reason for c in done} <= {"eos", "length"}


def test_prompts_are_taken_as_rows_become_free_not_all_at_once():
    taken = []

    def stream():
        for prompt in prompts(*["abc"] * 50):
            taken.append(prompt.id)
            yield prompt

    settings = job(n=2, max_new_tokens=4)
    loop = loop_for(Markov(table(), 1), "none", rows=4, lengths=Fixed(0))
    first = next(Scheduler(settings, Letters(), loop, context=100, eos_ids={EOS}).run(stream(), ()))
    assert first.id in ("p0", "p1")
    assert len(taken) <= 4


def test_controller_gets_the_pending_work():
    seen = []

    class Listener(Fixed):
        def next(self, rows, inputs):
            seen.append((rows, inputs.left))
            return super().next(rows, inputs)

    loop = loop_for(Markov(table(eos=-50.0), 1), "none", rows=4, lengths=Listener(0))
    settings = job(n=2, max_new_tokens=10)
    scheduler = Scheduler(settings, Letters(), loop, context=100, eos_ids={EOS}, count=6)
    assert len(list(scheduler.run(iter(prompts(*TEXTS, "q")), ()))) == 12
    assert seen[0] == (4, (4 * 1 + 8 * 1) / 4), "nothing is known yet: as much again as there is"
    assert seen[5] == (4, (4 * 5 + 8 * 10) / 4), (
        "samples are taken to become twice as long as they are"
    )
    assert seen[10] == (4, (4 * 10 + 4 * 10) / 4), "ten tokens, as those that have ended"
    assert seen[-1] == (4, 1)


def test_a_prompts_reference_is_drafted_from():
    """A reference with the sample's text is nearly all accepted; a wrong one changes no tokens."""
    settings, given = job(n=1, max_new_tokens=14), prompts("abc")
    expected = run(settings, given, draft="none", lengths=Fixed(0), target=table(eos=-50.0))[0]
    references, found = (
        {
            "right": "c" + expected.text,
            "wrong": "".join(f"c{letter}" for letter in "abdefghijk"),
            "no": None,
        },
        {},
    )
    for name, text in references.items():
        texts = [dataclasses.replace(given[0], reference=text)]
        found[name] = run(
            settings, texts, draft="lookup:reference", lengths=Fixed(13), target=table(eos=-50.0)
        )[0]
        assert found[name].token_ids == expected.token_ids
    assert found["right"].rounds < found["wrong"].rounds <= found["no"].rounds == 14
    assert found["wrong"].drafted > found["no"].drafted == 0
