"""`bass logprobs` and the library's `score`, against log_softmax of transformers."""

from __future__ import annotations

import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint, write_tokenizer
from command_line import cli, rows_in
from templates import CHATML
from transformers import AutoModelForCausalLM, AutoTokenizer

from bass_cli import Engine, Job, Pair, Sampling, UserError, generate, score
from bass_cli.io.results import Completion
from bass_cli.run import logprobs

TEXTS: list[dict[str, Any]] = [
    {"id": "a", "prompt": "the cat", "completion": " sat on the mat"},
    {
        "id": "b",
        "messages": [{"role": "user", "content": "the cat"}],
        "completion": " sat",
        "kind": 3,
    },
    {"id": "c", "prompt": "a dog sat", "completion": [5, 6, 7]},
    {"id": "d", "prompt": "the mat " * 20, "completion": "x"},
]


@functools.cache
def theirs(folder: Path) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


@torch.inference_mode()
def due(folder: Path, text: dict[str, Any]) -> tuple[list[int], torch.Tensor]:
    """Return the completion's ids, and log-probabilities of all tokens in their places."""
    model, tokenizer = theirs(folder)
    if "messages" in text:
        given = {"add_generation_prompt": True, "tokenize": False}
        shown = tokenizer.apply_chat_template(text["messages"], **given)
        prompt = tokenizer(shown, add_special_tokens=False).input_ids
    else:
        prompt = text.get("prompt_token_ids") or tokenizer(text["prompt"]).input_ids
    ids = text["completion"]
    if isinstance(ids, str):
        ids = tokenizer(ids, add_special_tokens=False).input_ids
    logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1, : len(tokenizer)]
    return ids, logits.double().log_softmax(-1)


def job(model: Path, **sampling: Any) -> Job:
    pair = Pair(name="tiny", target=str(model), draft="lookup")
    return Job(pair=pair, device="cpu", sampling=Sampling(**sampling))


@pytest.mark.parametrize(("top", "window"), [(0, 2048), (3, 4)])
def test_scores_are_those_of_transformers(
    model: Path, monkeypatch: pytest.MonkeyPatch, top: int, window: int
) -> None:
    monkeypatch.setattr(logprobs, "_WINDOW", window)
    found = list(score(TEXTS, job(model, logprobs=top)))
    assert [one.id for one in found] == ["a", "b", "c", "d"]
    for one, text in zip(found, TEXTS, strict=True):
        ids, wanted = due(model, text)
        own = [float(line[id_]) for line, id_ in zip(wanted, ids, strict=True)]
        assert one.token_ids == ids
        assert one.token_logprobs == pytest.approx(own, abs=1e-4)
        assert one.sum_logprob == pytest.approx(sum(own), abs=1e-3)
        assert one.mean_logprob == pytest.approx(sum(own) / len(own), abs=1e-4)
        assert one.perplexity == pytest.approx(math.exp(-sum(own) / len(own)), rel=1e-3)
        assert one.finish_reason == "given"
        assert one.meta == ({"kind": 3} if one.id == "b" else {})
        if not top:
            assert one.top_logprobs is None
            continue
        for place, line in zip(one.top_logprobs or (), wanted, strict=True):
            values = line.topk(top).values.tolist()
            assert [number for _, number in place] == pytest.approx(values, abs=1e-4)


def run(*args: str, **settings: Any) -> Any:
    return cli("logprobs", *args, **settings)


def test_command_writes_what_the_library_finds_and_goes_on(model: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "t.jsonl", tmp_path / "o.jsonl"
    file.write_text("".join(json.dumps(text) + "\n" for text in TEXTS))
    args = [str(file), "--model", str(model), "--device", "cpu", "--quiet", "--out", str(out)]
    run(*args, code=0)
    whole = out.read_text().splitlines()
    found = {one.id: one for one in score(TEXTS, job(model))}
    for line in map(json.loads, whole):
        one = found[line["id"]]
        assert line["token_ids"] == one.token_ids
        assert line["token_logprobs"] == pytest.approx(one.token_logprobs, abs=1e-5)
        assert line["perplexity"] == pytest.approx(one.perplexity, rel=1e-4)
    out.write_text("".join(f"{line}\n" for line in whole[:1]) + whole[1][:30])
    run(*args, code=0)
    after = sorted(line["id"] for line in rows_in(out))
    assert after == ["a", "b", "c", "d"]
    file.write_text("".join(json.dumps(text | {"completion": "y"}) + "\n" for text in TEXTS))
    assert "has changed" in run(*args, code=2).output


def test_samples_of_generate_are_texts_to_score(model: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "s.jsonl", tmp_path / "o.jsonl"
    prompts: list[Any] = [{"prompt": "the cat"}, {"messages": [{"role": "user", "content": "sat"}]}]
    prompts.append({"prompt_token_ids": [5, 9]})
    figures = {"finish_reason": "eos", "seed": 3, "token_ids": [7], "top_logprobs": [[[7, -1.0]]]}
    rows = [
        {"id": f"p{at}", "sample": number, "text": text, **figures, "meta": {"k": at}, **prompt}
        for at, prompt in enumerate(prompts)
        for number, text in enumerate(("the mat", " on the mat"))
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = [str(file), "--model", str(model), "--device", "cpu", "--quiet", "--out", str(out)]
    run(*args, "--completion-column", "text", code=0)
    found = {line["id"]: line for line in rows_in(out)}
    assert found.keys() == {f"p{at}/{number}" for at in range(3) for number in range(2)}
    for row in rows:
        line = found[f"{row['id']}/{row['sample']}"]
        ids, wanted = due(model, {**row, "completion": row["text"]})
        own = [float(place[id_]) for place, id_ in zip(wanted, ids, strict=True)]
        assert line["token_ids"] == ids
        assert line["token_logprobs"] == pytest.approx(own, abs=1e-4)
        assert line["meta"] == row["meta"]


def test_samples_of_every_layout_are_scored_by_text_or_by_ids(model: Path, tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "the"}, {"role": "user", "content": "cat"}]
    prompts = {"a": {"prompt": "cat", "messages": chat}, "b": {"prompt": "the cat"}}
    texts: list[Any] = [("sat", [4, 9]), ("", [2])]
    ended = [{"text": text, "finish_reason": "eos", "token_ids": ids} for text, ids in texts]
    flat = [
        {"id": id_, "sample": number, "meta": {"k": id_}, **prompt, **one}
        for id_, prompt in prompts.items()
        for number, one in enumerate(ended)
    ]
    flat.append(Completion.failed("c", "too long", seed=0, meta={}).row() | {"prompt": "x"})
    grouped: list[dict[str, Any]] = [
        {"id": id_, "meta": {"k": id_}, **prompt, "samples": ended}
        for id_, prompt in prompts.items()
    ]
    grouped.append({"id": "c", "meta": {}, "prompt": "x", "samples": [], "error": "too long"})
    file, out = tmp_path / "s.jsonl", tmp_path / "o.jsonl"
    args = [str(file), "--model", str(model), "--device", "cpu", "--out", str(out), "--overwrite"]
    for rows, column in itertools.product((flat, grouped), ("text", "token_ids")):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        done = run(*args, "--completion-column", column, "--prompt-column", "question", code=0)
        found = {line["id"]: line for line in rows_in(out)}
        scored = [row for row in flat[:-1] if row[column]]
        assert found.keys() == {f"{row['id']}/{row['sample']}" for row in scored}
        first = '"a/1" (' if column == "text" else '"c/0" ('
        assert f"are not scored: {5 - len(scored)}, the first {first}" in done.stderr
        for row in scored:
            line = found[f"{row['id']}/{row['sample']}"]
            ids, wanted = due(model, {**row, "completion": row[column]})
            own = [float(place[id_]) for place, id_ in zip(wanted, ids, strict=True)]
            assert (line["token_ids"], line["meta"]) == (ids, row["meta"])
            assert line["token_logprobs"] == pytest.approx(own, abs=1e-4)


@pytest.mark.parametrize(("change", "fault"), [
    ({"prompt": None}, "s.jsonl:1: the sample has no prompt; draw samples with --echo"),
    ({"text": None}, 'field "text": it is missing; --completion-column names the field'),
    ({"meta": {"text": "x"}}, 'field "meta": "text" is also a field of the sample; rename it'),
])  # fmt: skip
def test_samples_without_their_parts_are_refused(
    model: Path, tmp_path: Path, change: dict[str, Any], fault: str
) -> None:
    row = {"id": "a", "sample": 0, "text": "sat", "finish_reason": "eos", "prompt": "cat"}
    (tmp_path / "s.jsonl").write_text(json.dumps(row | change))
    refused = run(
        str(tmp_path / "s.jsonl"), "--model", str(model), "--completion-column", "text", code=2
    )
    assert fault in refused.stderr


@pytest.mark.parametrize(("change", "fault"), [
    ({"completion": None}, 'field "completion": it is missing'),
    ({"completion": ""}, "a text that is not empty, or a list of token ids, is needed"),
    ({"completion": [1, -2]}, "a list of token ids, is needed"),
    ({"completion": 3}, "a list of token ids, is needed"),
    ({"temperature": 0.5}, 'field "temperature": here all prompts have the same settings'),
])  # fmt: skip
def test_wrong_texts_are_refused_by_line(
    model: Path, tmp_path: Path, change: dict[str, Any], fault: str
) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps(text) + "\n" for text in (TEXTS[0], TEXTS[2] | change)))
    refused = run(str(file), "--model", str(model), "--device", "cpu", code=2)
    assert f"{file}:2: " in refused.output
    assert fault in refused.output
    with pytest.raises(UserError, match=r"prompts\[1\]"):
        score([TEXTS[0], TEXTS[2] | change], job(model))


def test_texts_that_do_not_fit_the_model_get_an_error_each(model: Path) -> None:
    texts = [
        TEXTS[0],
        {"id": "ids", "prompt": "a", "completion": [5, 299]},
        {"id": "long", "prompt": "a", "completion": [5] * 200_000},
    ]
    found = {one.id: one for one in score(texts, job(model))}
    assert found["a"].error is None
    assert "id 299: the model has the ids 0 to 298" in (found["ids"].error or "")
    assert "the model's context is" in (found["long"].error or "")


def test_engine_scores_between_rounds_of_other_requests(model: Path) -> None:
    """Samples in progress do not change. Their own log-probabilities are found again."""
    sampling = Sampling(seed=3, max_new_tokens=40, temperature=1.0, logprobs=2)
    pair = Pair(name="tiny", target=str(model), draft="lookup")
    both = Job(pair=pair, device="cpu", n=3, sampling=sampling, batch_size=4)
    wanted = {one.sample: one for one in generate(["the cat"], both)}
    with Engine(both) as engine:
        results = engine.generate(["the cat"])
        first = next(results)
        scored = engine.score("a dog", " sat", logprobs=3)
        assert scored.token_ids == due(model, {"prompt": "a dog", "completion": " sat"})[0]
        found = {one.sample: one for one in (first, *results)}
        for sample, one in wanted.items():
            assert found[sample].token_ids == one.token_ids
            again = engine.score("the cat", one.token_ids or [], logprobs=2)
            assert again.token_logprobs == pytest.approx(one.token_logprobs, abs=1e-4)
            assert [[id_ for id_, _ in place] for place in again.top_logprobs or ()] == [
                [id_ for id_, _ in place] for place in one.top_logprobs or ()
            ]
        (alone,) = score([{"prompt": "a dog", "completion": " sat"}], job(model, logprobs=3))
        assert scored.token_logprobs == pytest.approx(alone.token_logprobs, abs=1e-5)
        for wrong in ("", [5, 299]):
            with pytest.raises(UserError, match="completion"):
                engine.score("a dog", wrong)
        assert engine.score({"prompt": "a dog"}, [5]).tokens == 1
    with pytest.raises(UserError, match="closed"):
        engine.score("a dog", " sat")


def test_thinking_off_scores_after_the_prompt_that_generate_makes(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path, shards=False, num_hidden_layers=1, vocab_size=320)
    write_tokenizer(tmp_path, extra=("<|im_start|>", "<|im_end|>", "<think>", "</think>"))
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    job = Job(model=tmp_path, device="cpu", chat=True, thinking="off", n=1,
              sampling=Sampling(max_new_tokens=4, logprobs=0))  # fmt: skip
    with Engine(job) as engine:
        (drawn,) = engine.generate([{"id": "a", "prompt": "the cat"}])
        assert drawn.token_ids is not None
        scored = engine.score("the cat", drawn.token_ids)
    (alone,) = score([{"prompt": "the cat", "completion": drawn.token_ids}], job)
    for one in (scored, alone):
        assert one.prompt_tokens == drawn.prompt_tokens
        assert one.token_logprobs == pytest.approx(drawn.token_logprobs, abs=1e-4)


def test_wrong_arguments_of_engine_score_are_named(model: Path) -> None:
    with Engine(Job(model=model, device="cpu")) as engine:
        for given, fault in (
            ((None, "b"), "prompt: a text or a mapping is needed, not None"),
            (("a", 5), 'field "completion": a text that is not empty'),
            (({"prompt": "a", "temperature": 0.5}, "b"), 'field "temperature"'),
        ):
            with pytest.raises(UserError, match=fault):
                engine.score(*given)
        with pytest.raises(UserError, match="`logprobs`: it should be greater"):
            engine.score("a", "b", logprobs=-1)
