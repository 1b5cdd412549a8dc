"""Log-probabilities of a prompt's tokens, found in prefill, against one pass of transformers; on a
CUDA device if there is one."""

import numpy
import pytest
import torch
from checkpoints import shallow, write_checkpoint
from decoders import load_decoder
from transformers import AutoModelForCausalLM

from bass_cli.models import prefill
from bass_cli.models.runner import Runner

LENGTHS = (1, 2, 5, 150, 33, 600)
TOP = 4
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "gpt2"])
def models(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    long = {"n_positions": 640} if request.param == "gpt2" else {"max_position_embeddings": 640}
    write_checkpoint(request.param, folder, **shallow(request.param), **long)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return theirs, load_decoder(folder, device=DEVICE)


def prompts(vocab):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(vocab, (n,), generator=generator).tolist() for n in LENGTHS]


@torch.inference_mode()
def check(theirs, tokens, found):
    scores, entries = found
    assert scores.shape == (len(tokens) - 1,)
    assert entries.shape == (len(tokens) - 1, TOP)
    if len(tokens) == 1:
        return
    due = theirs(torch.tensor([tokens])).logits[0, :-1].double().log_softmax(-1)
    own = due.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].float()
    torch.testing.assert_close(torch.from_numpy(scores), own, atol=1e-4, rtol=0)
    numbers = torch.from_numpy(entries.astype(numpy.int32).view(numpy.float32))
    torch.testing.assert_close(numbers, due.topk(TOP).values.float(), atol=1e-4, rtol=0)
    ids = torch.from_numpy(entries >> 32)
    torch.testing.assert_close(due.gather(1, ids).float(), numbers, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("timed", "tile"), [(False, 1), (True, 1), (False, 4)])
def test_scores_equal_log_softmax_of_transformers(models, monkeypatch, timed, tile):
    """Prompts share passes or not, some are longer than a pass, and logits come in chunks."""
    theirs, decoder = models
    if DEVICE.type == "cpu":
        monkeypatch.setattr(prefill, "TILE", {"cpu": tile})
    monkeypatch.setattr(prefill, "SCORED_LOGITS", 7 * decoder.vocab)
    runner = Runner(decoder, rows=2, span=8, pending=1)
    every = prompts(decoder.vocab)
    runner.open("plain", every[-1])  # the same first tokens as a prompt that is scored
    for number, tokens in enumerate(every):
        in_time = (lambda count: True) if timed else None
        assert runner.open(str(number), tokens, in_time, logprobs=TOP)
    runner.prefill_all()
    assert runner.prompt_logprobs("plain") is None
    for number, tokens in enumerate(every):
        check(theirs, tokens, runner.prompt_logprobs(str(number)))
        runner.close(str(number))


def test_without_likeliest_tokens_there_are_no_entries(models):
    runner = Runner(models[1], rows=1, span=8, pending=1)
    runner.open("a", [5, 6, 7], logprobs=0)
    runner.prefill_all()
    scores, entries = runner.prompt_logprobs("a")
    assert scores.shape == (2,)
    assert entries.shape == (2, 0)
