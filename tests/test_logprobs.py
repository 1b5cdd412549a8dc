"""Log-probabilities in result lines, against log_softmax of transformers over prompt and sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import cli
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, PreTrainedModel

from bass_cli import Completion, Job, Pair, Sampling, Speculation, generate
from bass_cli.engine.loop import Loop
from bass_cli.formats.tokenizer import Tokenizer

PROMPTS = [{"id": "a", "prompt": "the cat"}, {"id": "b", "prompt": "a dog sat on the"}]


@pytest.fixture(scope="module")
def theirs(model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.load(model)


def job(model: Path, *, draft: str = "lookup", **sampling: Any) -> Job:
    given = {"seed": 3, "max_new_tokens": 10, "temperature": 1.0, "top_p": 1.0} | sampling
    return Job(
        pair=Pair(name="tiny", target=str(model), draft=draft),
        n=2,
        device="cpu",
        sampling=Sampling(**given),
        speculation=Speculation(length=0 if draft == "none" else 4),
    )


@torch.inference_mode()
def due(theirs: PreTrainedModel, prompt: list[int], tokens: list[int], size: int) -> torch.Tensor:
    """Return the log-probabilities of all tokens in each place of `tokens`."""
    logits = theirs(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1, :size]
    return logits.double().log_softmax(-1)


def check(one: Completion, theirs: PreTrainedModel, tokenizer: Tokenizer, top: int) -> None:
    text = next(line["prompt"] for line in PROMPTS if line["id"] == one.id)
    assert one.token_ids is not None
    assert one.token_logprobs is not None
    assert one.sum_logprob is not None
    wanted = due(theirs, tokenizer.encode(text, 1000), one.token_ids, tokenizer.size)
    own = [float(line[id_]) for line, id_ in zip(wanted, one.token_ids, strict=True)]
    assert one.token_logprobs == pytest.approx(own, abs=1e-4)
    assert sum(one.token_logprobs) == pytest.approx(one.sum_logprob, abs=1e-5)
    if not top:
        assert one.top_logprobs is None
        return
    assert one.top_logprobs is not None
    assert len(one.top_logprobs) == len(own)
    for place, line, id_, number in zip(
        one.top_logprobs, wanted, one.token_ids, one.token_logprobs, strict=True
    ):
        assert [score for _, score in place] == pytest.approx(
            line.topk(top).values.tolist(), abs=1e-4
        )
        assert all(abs(float(line[other]) - score) < 1e-4 for other, score in place)
        assert [id_, number] in place or number <= place[-1][1]


@pytest.mark.parametrize("top", [0, 6])
def test_numbers_of_a_job_are_those_of_transformers(
    model: Path, theirs: PreTrainedModel, tokenizer: Tokenizer, top: int
) -> None:
    found = {}
    for draft in ("none", "lookup"):
        for one in generate(PROMPTS, job(model, draft=draft, logprobs=top)):
            check(one, theirs, tokenizer, top)
            found[draft, one.id, one.sample] = one.token_ids, one.token_logprobs
    for (_, id_, sample), (ids, numbers) in found.items():
        plain = found["none", id_, sample]
        assert ids == plain[0]
        assert numbers == pytest.approx(plain[1], abs=1e-5)


def test_copies_and_stops_carry_their_numbers(
    model: Path, theirs: PreTrainedModel, tokenizer: Tokenizer
) -> None:
    greedy = list(generate(PROMPTS, job(model, temperature=0, logprobs=2)))
    for one in greedy:
        check(one, theirs, tokenizer, 2)
    assert [one.copy_of for one in greedy if one.sample] == [0, 0]
    stop = next(one.text for one in greedy if len(one.text) > 4)[2:4]
    stopped = list(generate(PROMPTS, job(model, temperature=0, logprobs=2, stop=(stop,))))
    assert any(one.finish_reason == "stop" for one in stopped)
    for one in stopped:
        check(one, theirs, tokenizer, 2)


@pytest.mark.parametrize("top", [0, 4])
def test_processed_numbers_are_those_of_the_sampled_distribution(
    model: Path, theirs: PreTrainedModel, tokenizer: Tokenizer, top: int
) -> None:
    given = {"temperature": 0.7, "top_k": 3, "logprobs": top, "logprobs_of": "processed"}
    for one in generate(PROMPTS, job(model, **given)):
        text = next(line["prompt"] for line in PROMPTS if line["id"] == one.id)
        assert one.token_ids is not None
        own = due(theirs, tokenizer.encode(text, 1000), one.token_ids, tokenizer.size)
        best = (own / 0.7).topk(3)
        wanted = best.values.log_softmax(-1)
        numbers = [
            float(line[ids.tolist().index(id_)])
            for line, ids, id_ in zip(wanted, best.indices, one.token_ids, strict=True)
        ]
        assert one.token_logprobs == pytest.approx(numbers, abs=1e-4)
        for place, line in zip(one.top_logprobs or (), wanted, strict=bool(top)):
            assert [number for _, number in place] == pytest.approx(line.tolist(), abs=1e-4)
        assert one.sum_logprob == pytest.approx(
            sum(float(line[id_]) for line, id_ in zip(own, one.token_ids, strict=True)), abs=1e-3
        )


@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sample_0_has_the_numbers_of_the_prompt(
    model: Path, theirs: PreTrainedModel, tokenizer: Tokenizer, top: int, temperature: float
) -> None:
    given = {"prompt_logprobs": top, "temperature": temperature}
    for one in generate(PROMPTS, job(model, **given)):
        if one.sample:
            assert one.prompt_logprobs is None
            continue
        text = next(line["prompt"] for line in PROMPTS if line["id"] == one.id)
        ids = tokenizer.encode(text, 1000)
        assert one.prompt_token_ids == ids
        assert one.prompt_logprobs is not None
        assert one.token_logprobs is None
        wanted = due(theirs, ids[:1], ids[1:], tokenizer.size)
        own = [float(line[id_]) for line, id_ in zip(wanted, ids[1:], strict=True)]
        assert one.prompt_logprobs[0] is None
        assert one.prompt_logprobs[1:] == pytest.approx(own, abs=1e-4)
        if not top:
            assert one.prompt_top_logprobs is None
            continue
        assert one.prompt_top_logprobs is not None
        assert one.prompt_top_logprobs[0] is None
        for place, line in zip(one.prompt_top_logprobs[1:], wanted, strict=True):
            assert place is not None
            assert [score for _, score in place] == pytest.approx(
                line.topk(top).values.tolist(), abs=1e-4
            )


def test_each_prompt_has_its_own_numbers(model: Path) -> None:
    """Lines ask for different reports; all are in one batch."""
    lines = [
        {"id": "a", "prompt": "the cat", "logprobs": 2, "prompt_logprobs": 0},
        {"id": "b", "prompt": "a dog"},
        {"id": "c", "prompt": "the dog", "logprobs": 7},
    ]
    found = {one.id: one for one in generate(lines, job(model)) if not one.sample}
    assert found["a"].prompt_logprobs is not None
    assert (found["b"].token_ids, found["b"].prompt_logprobs) == (None, None)
    for id_, top in (("a", 2), ("c", 7)):
        assert {len(place) for place in found[id_].top_logprobs or ()} == {top}


def test_numbers_are_found_again_with_fewer_rows(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out in a round; the samples in progress are drawn again."""
    asked = job(model, logprobs=3, prompt_logprobs=1)
    wanted = {(one.id, one.sample): one for one in generate(PROMPTS, asked)}
    rounds, whole = [], Loop.round

    def failing(loop: Loop, *args: Any, **words: Any) -> Any:
        rounds.append(loop.batch.capacity)
        if len(rounds) == 3:
            raise MemoryError
        return whole(loop, *args, **words)

    monkeypatch.setattr(Loop, "round", failing)
    found = {(one.id, one.sample): one for one in generate(PROMPTS, asked)}
    assert min(rounds) < max(rounds)
    for key, one in wanted.items():
        assert found[key].token_ids == one.token_ids
        assert found[key].token_logprobs == pytest.approx(one.token_logprobs, abs=1e-5)
        assert [[id_ for id_, _ in place] for place in found[key].top_logprobs or ()] == [
            [id_ for id_, _ in place] for place in one.top_logprobs or ()
        ]
        assert (found[key].prompt_logprobs is None) == (one.prompt_logprobs is None)


def run(*args: str, **settings: Any) -> Any:
    return cli("generate", *args, **settings)


def test_command_resumes_and_refuses_other_numbers(model: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / "s.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in PROMPTS))
    flags = ["--model", str(model), "--device", "cpu", "--n", "3", "--max-new-tokens", "6"]
    args = [str(prompts), *flags, "--quiet", "--out", str(out)]
    run(*args, "--logprobs", "2", code=0)
    whole = out.read_text().splitlines()
    lines = [json.loads(line) for line in whole]
    assert {len(line["token_ids"]) - len(line["token_logprobs"]) for line in lines} == {0}
    keys = ["prompt_tokens", "meta", "token_ids", "token_logprobs", "top_logprobs"]
    assert list(lines[0])[-5:] == keys
    out.write_text("".join(f"{line}\n" for line in whole[:2]) + whole[2][:40])
    run(*args, "--logprobs", "2", code=0)

    def found(texts: list[str]) -> dict[Any, Any]:
        every = (json.loads(text) for text in texts)
        return {(line["id"], line["sample"]): line["top_logprobs"] for line in every}

    after, before = found(out.read_text().splitlines()), found(whole)
    assert after.keys() == before.keys()
    for key, places in before.items():
        for place, other in zip(places, after[key], strict=True):
            assert place == [[id_, pytest.approx(number, abs=1e-5)] for id_, number in other]
    for other in ([], ["--logprobs"]):
        assert "logprobs: 2 before" in run(*args, *other, code=2).output


def test_flag_stands_alone_and_its_bounds_hold(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text("the cat\n")
    flags = ["--model", str(model), "--device", "cpu", "--n", "1", "--max-new-tokens", "3"]
    for args in (["--logprobs", str(prompts), *flags], [str(prompts), *flags, "--logprobs"]):
        done = run(*args, "--quiet")
        line = json.loads(done.stdout)
        assert len(line["token_logprobs"]) == len(line["token_ids"]) == line["tokens"]
        assert "top_logprobs" not in line
    noted = run(str(prompts), *flags, "--logprobs-of", "processed")
    assert "only prompts with --logprobs of their own" in " ".join(noted.stderr.split())
    refused = run(str(prompts), *flags, "--logprobs", "65", code=2)
    assert "--logprobs (or BASS_LOGPROBS): " in refused.output
    assert "64" in refused.output
    with pytest.raises(ValidationError, match="logprobs"):
        Sampling(logprobs=-1)
