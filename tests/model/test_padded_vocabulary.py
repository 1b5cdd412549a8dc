"""Models with more logits than the tokenizer has ids, like most published models. The reference is
log_softmax over the logits of transformers."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from checkpoints import write_checkpoint, write_tokenizer
from thinned import thinned

from bass_cli import Completion, Job, Pair, Sampling, Speculation, generate
from bass_cli.models import decoder

TOKENS, LOGITS = 299, 384
PROMPT = "the cat sat"


@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize("coupling", ["shared", "maximal"])
@pytest.mark.parametrize("draft", ["none", "lookup", "same"])
def test_log_probabilities_are_normalised_over_the_ids_of_the_tokenizer(
    tmp_path: Path, draft: str, coupling: Any, multiple: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding rows get no probability and are never drawn, whatever their logits."""
    monkeypatch.setitem(decoder._COLUMNS, "cpu", multiple)  # a GPU has 16
    model: Any = write_checkpoint("llama", tmp_path, vocab_size=LOGITS, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[TOKENS:] *= 4  # the most likely ids would be padding
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    job = Job(
        pair=Pair(
            name="p", target=str(tmp_path), draft=str(tmp_path) if draft == "same" else draft
        ),
        speculation=Speculation(coupling=coupling, **({} if draft == "none" else {"length": 3})),
        n=4,
        device="cpu",
        dtype="fp32",
        token_ids=True,
        sampling=Sampling(seed=1, temperature=1.0, top_p=1.0, max_new_tokens=12),
    )
    compared, padded = 0, 0.0
    for completion in generate([PROMPT], job):
        ids = completion.token_ids
        assert ids is not None
        assert max(ids) < TOKENS
        whole = torch.tensor([prompt_ids(tmp_path) + ids])
        with torch.inference_mode():
            logits = model(whole).logits[0, -len(ids) - 1 : -1].float()
        real = torch.log_softmax(logits[:, :TOKENS], -1)
        wanted = real.gather(1, torch.tensor(ids)[:, None]).sum().item()
        assert completion.sum_logprob == pytest.approx(wanted, abs=1e-3)
        assert completion.mean_logprob == pytest.approx(wanted / len(ids), abs=1e-3)
        padded += float(torch.softmax(logits, -1)[:, TOKENS:].sum())
        compared += len(ids)
    assert padded > 0.2 * compared  # so that the other normalisation would differ clearly


def _without_scores(one: Completion) -> Completion:
    def ids(places: Any) -> Any:
        return places and [place and [id_ for id_, _ in place] for place in places]

    return dataclasses.replace(
        one,
        seconds=0.0,
        sum_logprob=0.0,
        mean_logprob=0.0,
        token_logprobs=None,
        prompt_logprobs=None,
        top_logprobs=ids(one.top_logprobs),
        prompt_top_logprobs=ids(one.prompt_top_logprobs),
    )


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "truncated": {"top_k": 7, "top_p": 0.8, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "tokens": {"logit_bias": {TOKENS - 1: 9.0}, "bad_words": ["the"]},
    "allowed": {"allowed_token_ids": [5, 80, TOKENS - 1]},
    "grammar": {"regex": "[a-z ]{3,40}"},
    "likeliest": {"logprobs": 4, "prompt_logprobs": 3},
}


# Each setting has one coupling in `make test`; they alternate.
TURNS = list(zip(SETTINGS, itertools.cycle(("shared", "maximal")), strict=False))


@pytest.mark.parametrize(
    ("name", "coupling"), thinned(itertools.product(SETTINGS, ("shared", "maximal")), TURNS)
)
def test_columns_beyond_the_ids_change_no_sample(
    tmp_path: Path, name: str, coupling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = write_checkpoint("llama", tmp_path, vocab_size=LOGITS, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[TOKENS:] *= 4
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    settings = {"seed": 1, "temperature": 1.0, "max_new_tokens": 12} | SETTINGS[name]
    job = Job(
        pair=Pair(name="p", target=str(tmp_path), draft="skip:0"),
        speculation=Speculation(coupling=coupling, length=3),
        n=3,
        device="cpu",
        dtype="fp32",
        token_ids=True,
        sampling=Sampling(**settings),
    )

    def drawn(multiple: int) -> list[Completion]:
        monkeypatch.setitem(decoder._COLUMNS, "cpu", multiple)
        found = sorted(generate([PROMPT], job), key=lambda one: one.sample)
        assert [one.error for one in found] == [None] * 3
        return [dataclasses.replace(one, seconds=0.0) for one in found]

    padded, plain = drawn(16), drawn(1)
    scores = ("sum_logprob", "mean_logprob", "token_logprobs", "prompt_logprobs")
    for one, other in zip(padded, plain, strict=True):
        for score in scores:  # sums over more columns differ in their last digits
            found, due = (
                [number for number in numpy.atleast_1d(getattr(each, score)) if number is not None]
                for each in (one, other)
            )
            assert found == pytest.approx(due, rel=1e-5)
    assert list(map(_without_scores, padded)) == list(map(_without_scores, plain))


def prompt_ids(folder: Path) -> list[int]:
    import tokenizers

    ids: list[int] = (
        tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(PROMPT).ids
    )
    return ids
