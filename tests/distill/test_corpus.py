"""Training windows, batches that depend on seed and step only, own prompts, and samples that a
resumed run completes."""

import contextlib
import dataclasses
import itertools
import json

import numpy
import pytest
import torch
from checkpoints import write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from bass_cli.distill.sampling import Own, Supply, draw, own_beginnings
from bass_cli.distill.windows import Batches, Corpus, Text, split, thinned
from bass_cli.errors import MachineError, UserError
from bass_cli.formats.tokenizer import Tokenizer
from bass_cli.io.console import Screen
from bass_cli.io.prompts import Prompt
from bass_cli.io.results import Completion

LENGTH = 32


def texts(count, seed=0):
    noise = numpy.random.default_rng(seed)
    sizes = noise.integers(2, 50, count)
    return [Text(f"p{i % (count // 2)}", noise.integers(0, 300, size).tolist(), int(noise.integers(0, size)))
            for i, size in enumerate(sizes)]  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 90), st.integers(0, 90)), min_size=1, max_size=30))
def test_every_token_of_a_sample_is_in_exactly_one_window(shapes):
    """Except tokens that no guess predicts: the first of a text or of a piece."""
    numbered = itertools.count()
    given_ = [Text("p", list(itertools.islice(numbered, size)), begins) for size, begins in shapes]
    corpus = Corpus(given_, LENGTH)
    if not len(corpus):
        assert all(len(one.tokens) <= max(one.begins, 1) for one in given_)
        return
    windows = corpus.windows(range(len(corpus)), thinned(LENGTH, 2), [(0,)] * len(corpus))
    following = windows.tokens.flatten()[windows.target[windows.place == 0] + 1].tolist()
    assert len(following) == len(set(following))
    expected = {token for one in given_ for token in one.tokens[one.begins :]}
    assert set(following) <= expected
    assert len(expected) - len(set(following)) <= sum(
        1 + len(one.tokens) // LENGTH for one in given_
    )
    for row in range(len(corpus)):
        of = windows.texts[row]
        for number in range(int(of.max()) + 1):
            part = windows.tokens[row][of == number]
            assert (part.diff() == 1).all(), "a text's tokens follow each other"
            assert windows.positions[row][of == number].tolist() == list(range(len(part)))


def test_windows_are_nearly_full():
    corpus = Corpus(texts(400), LENGTH)
    windows = corpus.windows(range(len(corpus)), thinned(LENGTH, 2), [(0,)] * len(corpus))
    assert (windows.texts >= 0).float().mean() > 0.93


def test_a_long_prompt_is_cut_from_the_left():
    text = Text("p", list(range(100)), 90)
    windows = Corpus([text], LENGTH).windows([0], thinned(LENGTH, 2), [(0,)])
    assert windows.tokens[0, windows.texts[0] == 0].tolist() == list(range(74, 100))
    assert windows.target[windows.place == 0].tolist() == list(range(15, 25))


def test_batches_depend_on_the_step_only():
    """Also when divided into parts. Each pass has every window once."""
    corpus, layout = Corpus(texts(60), LENGTH), thinned(LENGTH, 4)
    one, other = (Batches(corpus, layout, size=6, most=6, seed=3) for _ in range(2))
    steps = [one.at(step)[0] for step in range(16)]
    assert torch.equal(other.at(7)[0].tokens, steps[7].tokens)
    assert torch.equal(other.at(7)[0].student, steps[7].student)
    seen = [tuple(row.tolist()) for step in steps for row in step.tokens]
    count = len(corpus)
    assert len(set(seen[:count])) == count == len(set(seen[count : 2 * count])), (count, len(seen))
    assert seen[:count] != seen[count : 2 * count]
    parts = Batches(corpus, layout, size=6, most=4, seed=3).at(7)
    assert [len(part.tokens) for part in parts] == [4, 2]
    assert torch.equal(torch.cat([part.tokens for part in parts]), steps[7].tokens)
    assert torch.equal(torch.cat([part.anchors for part in parts]), steps[7].anchors)


def test_whole_prompts_are_held_out():
    given_ = texts(200)
    learnt, held = split(given_)
    assert {one.key for one in learnt} & {one.key for one in held} == set()
    assert len(learnt) + len(held) == 200
    assert len({one.key for one in held}) == 2
    assert split(given_[::-1])[1][0].key in {one.key for one in held}, "whatever their order"
    with pytest.raises(ValueError, match="only 1 prompts have samples"):
        split(given_[:1])


def sample(prompt, number, text="says", reason="eos", tokens=10):
    return Completion(
        prompt.id, number, text, reason, tokens, None, None, 0, 0, 0, 0, 0, 3, prompt.meta
    )


def drain(supply, most=1000, **words):
    """Take prompts from the supply, at most four at a time, and return their samples to it."""
    found, live = [], []
    while len(found) < most:
        new = list(itertools.islice(supply, 4 - len(live)))
        live += new
        found += new
        if not live:
            break
        prompt = live.pop(0)
        for number in range(2):
            if (prompt.id, number) not in supply.done:
                supply.take(sample(prompt, number, f"{prompt.id} {number}", **words))
    return found


def test_a_chat_model_writes_turns_answers_and_texts():
    supply = Supply(Own("<user>", ""), n=2, wanted=1000)
    found = drain(supply)
    kinds = [prompt.id.split("/")[0] for prompt in found]
    assert sorted(kinds[:4]) == ["text", "text", "turn", "turn"], "before any is over too"
    assert set(kinds) == {"turn", "answer", "text"}
    assert kinds.count("text") / len(kinds) == pytest.approx(0.5, abs=0.1)
    assert len({prompt.id for prompt in found}) == len(found)
    answer = next(prompt for prompt in found if prompt.id.startswith("answer"))
    turn = answer.id.removeprefix("answer/").split(".")
    assert answer.messages == [{"role": "user", "content": f"turn/{turn[0]} {turn[1]}"}]
    assert answer.meta == {"messages": answer.messages}
    assert 1000 <= supply.tokens <= 1100


def test_unfinished_and_repeated_turns_get_no_answer():
    assert {
        p.id.split("/")[0]
        for p in drain(Supply(Own("<user>", None), n=2, wanted=400), reason="length")
    } == {"turn"}
    supply = Supply(Own("<user>", None), n=2, wanted=400)
    first = next(supply)
    supply.take(sample(first, 0, "same"))
    supply.take(sample(first, 1, " same "))
    ids = [prompt.id for prompt in itertools.islice(supply, 3)]
    assert [id_ for id_ in ids if id_.startswith("answer")] == ["answer/0.0"]


def test_a_resumed_run_draws_only_missing_samples():
    own = Own("<user>", "")
    first = Supply(own, n=2, wanted=1000)
    seen = []
    take = first.take
    first.take = lambda one: (seen.append(one), take(one))[1]
    drain(first, most=20)
    again = Supply(own, n=2, wanted=1000)
    for one in seen[:-1]:  # the last line was torn
        again.take(one)
    rest = drain(again)
    whole = {(one.id, one.sample) for one in seen}
    assert not {(p.id, n) for p in rest for n in (0, 1)} & (
        whole - {(seen[-1].id, 0), (seen[-1].id, 1)}
    )
    assert seen[-1].id in {prompt.id for prompt in rest}


def test_prompts_of_a_file_are_repeated():
    prompts = [Prompt(name, f"text {name}", None, {"x": 1}, None, name) for name in "ab"]
    found = drain(Supply(lambda: iter(prompts), n=2, wanted=100))
    assert [prompt.id for prompt in found][:5] == [
        "file/0/a",
        "file/0/b",
        "file/1/a",
        "file/1/b",
        "file/2/a",
    ]
    assert found[0].meta == {"text": "text a"}


def test_drawing_ends_with_empty_samples():
    prompts = [Prompt("a", "text", None, {}, None, "a")]
    assert len(drain(Supply(lambda: iter(prompts), n=2, wanted=40), tokens=0)) == 20


def test_a_target_whose_samples_all_fail_ends_the_run(tmp_path):
    def broken(supply, on_tokens):
        for prompt in supply:
            for number in range(2):
                yield dataclasses.replace(
                    sample(prompt, number, "", "error", 0), error="logits are not finite"
                )

    supply = Supply(Own("<user>", ""), n=2, wanted=1000)
    where = {"path": tmp_path / "samples.jsonl", "results": {}, "screen": Screen(True)}
    with pytest.raises(MachineError, match="last 64 samples all failed: logits are not finite"):
        draw(broken, supply, **where)
    assert len(where["path"].read_text().splitlines()) == 64


def test_beginnings_of_turns_and_texts(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    own = own_beginnings(tokenizer, None)
    assert own == Own("<s>[user] ", "<s>")
    assert own_beginnings(tokenizer, True) == Own("<s>[user] ", None)
    assert own_beginnings(tokenizer, False) == Own(None, "<s>")
    # a tokenizer that puts <s> before every text puts it there once
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "pair": [],
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.load(tmp_path)
    own = own_beginnings(tokenizer, None)
    assert own == Own("[user] ", "")
    assert tokenizer.encode(own.turn)[0] == 1 != tokenizer.encode(own.turn)[1]
    write_tokenizer(tmp_path, template=False)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    bare = Tokenizer.load(tmp_path)
    assert own_beginnings(bare, None).turn is None
    with pytest.raises(UserError, match="no chat template"):
        own_beginnings(bare, True)


def test_few_tokens_do_not_fill_all_rows_with_long_samples():
    """A sample that has not ended counts with its expected length, not as one token."""
    prompts = [Prompt(name, f"text {name}", None, {}, None, name) for name in "abcdef"]
    supply = Supply(lambda: iter(prompts), n=2, wanted=300, likely=96.0)
    assert len(list(itertools.islice(supply, 100))) == 2, "four samples of 96 tokens"


def test_one_pass_over_a_file_ends_with_fewer_tokens(tmp_path):
    prompts = [Prompt(name, f"text {name}", None, {}, None, name) for name in "ab"]
    supply = Supply(lambda: iter(prompts), n=2, wanted=10_000, passes=1)

    def drawing(supply, on_tokens):
        for prompt in supply:
            for number in range(2):
                on_tokens(3)
                yield sample(prompt, number, "text", "eos", 3)

    path = tmp_path / "samples.jsonl"
    assert supply.total == 10_000
    draw(drawing, supply, path=path, results={}, screen=Screen(True))
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == [
        *["file/0/a"] * 2,
        *["file/0/b"] * 2,
    ]
    assert supply.total == 4 * 3, "progress counts the tokens that are left"


def test_progress_counts_tokens_of_unfinished_samples(tmp_path):
    prompts = [Prompt(name, f"text {name}", None, {}, None, name) for name in "ab"]
    supply, shown = Supply(lambda: iter(prompts), n=1, wanted=8, passes=1), []

    class Watched(Screen):
        @contextlib.contextmanager
        def counting(self, what, total, *, beside=None):
            yield lambda done, whole: shown.append((what, done, whole))

    def drawing(supply, on_tokens):
        both = list(supply)
        for _ in range(4):
            on_tokens(2)  # a round of both rows
        yield from (sample(prompt, 0, "text", "eos", 4) for prompt in both)

    where = {"path": tmp_path / "samples.jsonl", "results": {}, "screen": Watched(True)}
    draw(drawing, supply, **where)
    assert shown[:4] == [("tokens", done, 8) for done in (2, 4, 6, 8)]
    assert shown[-1] == ("tokens", 8, 8)
