"""Test how samples are split into thinking part and answer, with scripted models: where the part
begins and ends, what stops and log-probabilities cover, and what the line has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_tokenizer
from drawing import Scheduler
from templates import CHATML, OPENED, THINKING
from test_scheduler import job
from toys import Guess, Markov, loop_for

from bass_cli.formats.completion_text import Tags, Thinking, is_opened, tags_of
from bass_cli.formats.tokenizer import Tokenizer
from bass_cli.io.prompts import prompts_of
from bass_cli.io.results import Completion
from bass_cli.lengths.controllers import Fixed
from bass_cli.run.requests import Request
from bass_cli.run.tasks import TaskBuilder

USER = {"role": "user", "content": "2 + 2?"}
# How a vocabulary has the tags: as tokens of text, as special tokens, or not at all
KINDS = {"tokens": ("<think>", "</think>"), "special": ("[THINK]", "[/THINK]"), "text": ()}


@pytest.fixture(scope="module", params=list(KINDS))
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    kind, name = request.param, KINDS[request.param]
    write_tokenizer(
        folder, extra=("<|im_start|>", "<|im_end|>", "\n\nBut", *(name if kind == "tokens" else ()))
    )
    if kind == "special":
        import transformers

        made = transformers.AutoTokenizer.from_pretrained(folder)
        made.add_special_tokens({"additional_special_tokens": list(name)})
        made.save_pretrained(folder)
    template = THINKING if kind != "special" else OPENED.replace("<think>", "[THINK]")
    return Tokenizer.load(folder).with_template(template)


def tags(tokenizer: Tokenizer) -> Tags:
    found = tags_of(tokenizer)
    assert found is not None
    return found


def spelled(tokenizer: Tokenizer, text: str) -> str:
    """Return a text with this vocabulary's tags."""
    begin, end = tags(tokenizer)[:2]
    return text.replace("</think>", end).replace("<think>", begin)


def generated(tokenizer: Tokenizer, prompt: Any, text: str, **settings: Any) -> Completion:
    """Return the sample of a model that generates this text after the prompt, and then ends."""
    template, eos = settings.pop("template", None), settings.pop("eos", None)
    settings = {"max_new_tokens": 200} | settings
    if template is not None:
        tokenizer = tokenizer.with_template(spelled(tokenizer, template))
    made = job(n=1, temperature=0.0, **settings)
    prompt = {"messages": [USER]} if prompt is None else prompt
    eos = 2 if eos is None else tokenizer.id_of(eos)
    scheduler_of = {"context": 1000, "eos_ids": {eos}, "tags": tags_of(tokenizer),
                    "stop_ids": made.sampling.stop_token_ids}  # fmt: skip
    builder = TaskBuilder(made, tokenizer, context=1000, tags=tags_of(tokenizer))
    (item,) = prompts_of([prompt])
    first = builder.build(item, [0], now=0.0).tokens
    whole = [*first, *tokenizer.encode_part(spelled(tokenizer, text)), eos]
    table = torch.zeros(len(whole), 1, tokenizer.size)
    for at, following in enumerate(whole[1:]):
        table[at, 0, following] = 50.0
    target = Markov(table.expand(-1, tokenizer.size, -1), 1)
    loop = loop_for(target, Guess(tokenizer.size), rows=2, lengths=Fixed(2))
    scheduler = Scheduler(made, tokenizer, loop, **scheduler_of)
    (found,) = scheduler.run(iter([item]), ())
    streamed = Request(made, iter([item]), streams=True)
    scheduler.add(streamed)
    assert "".join(one.text for one in scheduler.results(streamed, scheduler.step)) == found.text
    return found


def parts(found: Completion) -> tuple[str, str | None, str]:
    return found.text, found.reasoning, found.finish_reason


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        (None, "<think>\na cat\n</think>\n\nIt is 4.", ("It is 4.", "a cat", "eos")),
        (None, "It is 4.", ("It is 4.", None, "eos")),
        (None, "It is <think>4</think>.", None),  # not at the beginning: all is the answer
        (None, "<think>a cat", ("", "a cat", "eos")),  # it ended without an answer
        (None, "<think></think>4", ("4", "", "eos")),
        ("the", "<think>\na cat</think>\n4", ("4", "a cat", "eos")),  # without a chat
        (
            {"messages": [USER, {"role": "assistant", "content": "<think>\na"}]},
            " cat</think>4",
            ("4", " cat", "eos"),
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": "<think>a</think>It"}]},
            " is 4.",
            (" is 4.", None, "eos"),
        ),
    ],
)
def test_the_thinking_part_is_split_from_the_answer(
    tokenizer: Tokenizer, prompt: Any, text: str, expected: Any
) -> None:
    if isinstance(prompt, dict):
        told = [one | {"content": spelled(tokenizer, one["content"])} for one in prompt["messages"]]
        prompt = {"messages": told}
    found = generated(tokenizer, prompt, text, template=CHATML + "{#</think>#}")
    if expected is None:
        assert found.reasoning is None
        return
    assert parts(found) == expected
    if found.reasoning is None:
        assert found.reasoning_tokens is None
        assert found.sum_logprob is not None


def test_a_template_may_open_the_part(tokenizer: Tokenizer) -> None:
    found = generated(tokenizer, None, "a cat\n</think>\n\n4", template=OPENED + "{#</think>#}")
    assert parts(found) == ("4", "a cat", "eos")


def test_keep_leaves_all_in_the_text(tokenizer: Tokenizer) -> None:
    found = generated(tokenizer, None, "<think>a\n</think>\n\n4", thinking="keep", stop="zz")
    assert (found.reasoning, found.reasoning_tokens) == (None, None)
    assert found.text.replace("<think>", "").replace("</think>", "") == "a\n\n\n4"


@pytest.mark.parametrize("template", [THINKING, OPENED, CHATML])
def test_off_begins_with_the_answer(tokenizer: Tokenizer, template: str) -> None:
    found = generated(
        tokenizer, None, "It is 4.", thinking="off", template=template + "{#</think>#}"
    )
    assert parts(found) == ("It is 4.", None, "eos")


def test_stops_count_after_the_thinking_part(tokenizer: Tokenizer) -> None:
    text = "<think>a\n\nthe cat</think>\n\nIt sat.\n\nthe cat"
    found = generated(tokenizer, None, text, stop=("\n\n",))
    assert parts(found) == ("It sat.", "a\n\nthe cat", "stop")
    kept = generated(tokenizer, None, text, stop=("\n\n",), include_stop=True)
    assert kept.text == "It sat.\n\n"
    assert generated(tokenizer, None, text, stop="the").text == "It sat.\n\n"
    joined = "<think>a</think>\n\nBut it sat.\n\nBut"  # one token has newlines and text
    found = generated(tokenizer, None, joined, stop=("\n\n", "\nBut"))
    assert parts(found) == ("But it sat.", "a", "stop")
    (id_,) = tokenizer.encode_part("t")
    found = generated(tokenizer, None, "<think>t</think>a t", stop_token_ids=(id_,))
    assert parts(found) == ("a ", "t", "stop")


@pytest.mark.parametrize("text", ["It sat.", "<think>a</think>It sat.", "<think>It sat."])
def test_no_text_has_the_end_of_sequence_token(tokenizer: Tokenizer, text: str) -> None:
    """Although this tokenizer does not call it special."""
    found = generated(tokenizer, None, text, eos="<|im_end|>")
    assert (found.text or found.reasoning, found.finish_reason) == ("It sat.", "eos")


def test_a_limit_inside_of_the_part_leaves_no_answer(tokenizer: Tokenizer) -> None:
    found = generated(
        tokenizer, None, "<think>\nand 12 mice and 34 cows</think>4", max_new_tokens=15
    )
    assert (found.text, found.finish_reason) == ("", "length")
    assert found.reasoning is not None
    assert found.reasoning.startswith("and 1")
    assert (found.reasoning_tokens, found.tokens) == (15, 15)
    assert (found.mean_logprob, found.sum_logprob) == (None, None)


def test_log_probabilities_are_those_of_the_answer(tokenizer: Tokenizer) -> None:
    found = generated(
        tokenizer, None, "<think>a cat</think>\n\nIt is 4.", logprobs=0, token_drafted=True
    )
    assert found.token_logprobs is not None
    assert found.token_ids is not None
    assert found.token_drafted is not None
    assert len(found.token_drafted) == len(found.token_ids) == found.tokens
    assert sum(found.token_drafted) == found.accepted
    assert found.reasoning_tokens is not None
    answer = found.token_logprobs[found.reasoning_tokens :]
    assert tokenizer.decode(found.token_ids[found.reasoning_tokens :]) == "\n\nIt is 4."
    assert found.sum_logprob == pytest.approx(sum(answer), abs=1e-5)
    assert found.mean_logprob == pytest.approx(sum(answer) / len(answer), abs=1e-5)


def test_the_parts_do_not_depend_on_the_blocks(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_part(spelled(tokenizer, "<think>\na cat</think>\n\nIt is <think>4."))
    known = tags(tokenizer)
    states = []
    for size in (1, 2, 3, len(ids)):
        one = Thinking(known, tokenizer, opened=False)
        for at in range(0, len(ids), size):
            one.copy().feed(ids)  # a copy changes nothing
            one.feed(ids[at : at + size])
        states.append((one.end, one.answer, one.count, one.answers))
    assert set(states) == {states[0]}
    assert tokenizer.decode(ids[states[0][1] :]).startswith("It is ")


def test_a_limit_forces_the_closing_tag(tokenizer: Tokenizer) -> None:
    known = tags(tokenizer)
    ids = tokenizer.encode_part(spelled(tokenizer, "<think>the cat sat on"))
    for limit in (0, 5, len(ids)):
        one, taken = Thinking(known, tokenizer, opened=False, limit=limit), list[int]()
        for id_ in ids:
            if one.forced is not None:
                break
            one.feed([id_])
            taken.append(id_)
        while (id_ := one.forced) is not None:
            one.feed([id_])
            taken.append(id_)
        begun = len(tokenizer.encode_part(known.begin))
        assert len(taken) == max(limit, begun) + len(known.closing)
        assert taken[-len(known.closing) :] == list(known.closing)
        assert one.is_over
        assert one.end == len(taken)


def test_a_question_about_a_tag_opens_nothing(tokenizer: Tokenizer) -> None:
    known, ask = tags(tokenizer), tokenizer.encode_part
    assert not is_opened(known, tokenizer, ask(f"what is {known.begin}, the tag?"), ())
    assert is_opened(known, tokenizer, ask(f"so: {known.begin}\n"), ())
    assert not is_opened(known, tokenizer, ask(f"{known.begin}\n{known.end}\n\n"), ())


def test_a_model_without_tags_has_no_thinking_part(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    assert tags_of(Tokenizer.load(tmp_path)) is None
