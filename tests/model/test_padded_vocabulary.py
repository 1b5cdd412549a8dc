"""Models with more logits than the tokenizer has ids, like most published models. The reference is
log_softmax over the logits of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint, write_tokenizer

from bass_cli import Job, Pair, Sampling, Speculation, generate

TOKENS, LOGITS = 299, 384
PROMPT = "the cat sat"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize("coupling", ["shared", "maximal"])
@pytest.mark.parametrize("draft", ["none", "lookup", "same"])
def test_log_probabilities_are_normalised_over_the_ids_of_the_tokenizer(
    tmp_path: Path, draft: str, coupling: Any
) -> None:
    """Padding rows get no probability and are never drawn, whatever their logits."""
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


def prompt_ids(folder: Path) -> list[int]:
    import tokenizers

    ids: list[int] = (
        tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(PROMPT).ids
    )
    return ids
