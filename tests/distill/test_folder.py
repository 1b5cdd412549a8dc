"""Written folders are read back by bass and by transformers: every family, from safetensors and
from GGUF files."""

import json

import pytest
import torch
import transformers
from checkpoints import (
    FAMILIES,
    GGUF_FAMILIES,
    TRAINED,
    tokenizer_metadata,
    write_checkpoint,
    write_gguf,
    write_tokenizer,
)

from bass_cli.distill.folder import config_of, write_folder
from bass_cli.errors import UserError
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.tokenizer import Tokenizer, check_same_vocabulary
from bass_cli.formats.weights import load

CPU = torch.device("cpu")


def written_again(path, folder, tokenizer):
    """Write a checkpoint as a folder; return it with its weights, beside the original."""
    first = open_checkpoint(path)
    weights = load(first, dtype=torch.float32, device=CPU)
    config = config_of(first.spec, eos_ids=first.eos_ids, place=str(path))
    write_folder(folder, first.spec, weights, config={**config, "pard_token": 300},
                 tokenizer=tokenizer.cached, dtype=torch.float32)  # fmt: skip
    second = open_checkpoint(folder)
    assert second.mask() == 300
    assert second.eos_ids == first.eos_ids
    again = load(second, dtype=torch.float32, device=CPU)
    assert again.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(again[name], weight, msg=name, atol=1e-6, rtol=1e-6)
    return first.spec, second.spec


def same_logits(folder, theirs):
    ours = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 250, 3]])
    with torch.no_grad():
        expected = theirs(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(
            ours.eval()(input_ids=ids, use_cache=False).logits, expected, atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("family", TRAINED)
def test_a_written_folder_is_read_back(tmp_path, family):
    theirs = write_checkpoint(family, tmp_path / "one", shards=False)
    write_tokenizer(tmp_path / "one")
    tokenizer = Tokenizer.load(tmp_path / "one")
    if family == "llama3":  # factors that are not Llama 3's published ones have no other words here
        with pytest.raises(UserError, match=r"cannot be described by a config\.json"):
            written_again(tmp_path / "one", tmp_path / "two", tokenizer)
        return
    first, second = written_again(tmp_path / "one", tmp_path / "two", tokenizer)
    assert first == second
    check_same_vocabulary(tokenizer, Tokenizer.load(tmp_path / "two"))
    same_logits(tmp_path / "two", theirs)


@pytest.mark.parametrize("family", sorted(set(GGUF_FAMILIES) - {"llama3"}))
def test_a_gguf_file_becomes_a_folder(tmp_path, family):
    write_tokenizer(tmp_path)
    # transformers cuts texts as Qwen does wherever a configuration says Qwen
    pre = "qwen2" if family.startswith("qwen") else "gpt-2"
    metadata = tokenizer_metadata(tmp_path, pad_to=301, pre=pre)
    theirs = write_gguf(family, tmp_path / "one.gguf", metadata=metadata)
    tokenizer = Tokenizer.load(tmp_path / "one.gguf")
    first, second = written_again(tmp_path / "one.gguf", tmp_path / "two", tokenizer)
    assert (first.windows, first.biases, first.tied) == (second.windows, second.biases, second.tied)
    other = Tokenizer.load(tmp_path / "two")
    check_same_vocabulary(tokenizer, other)
    messages = [{"role": "user", "content": "the cat 12 sat"}]
    assert other.encode_chat(messages) == tokenizer.encode_chat(messages)
    assert other.encode("the cat </s> 12") == tokenizer.encode("the cat </s> 12")
    # the folder's config.json names the other one, 7: see written_again
    assert tokenizer.eos_ids == (2, 7)
    assert [id_ for id_ in other.eos_ids if id_ < 301] == [2]  # others have no rows; see below
    assert other.size >= tokenizer.size  # transformers' class has tokens of its own, without rows
    same_logits(tmp_path / "two", theirs)


def test_published_llama_factors_are_recognised(tmp_path):
    theirs = write_checkpoint("llama3", tmp_path / "one", shards=False)
    config = json.loads((tmp_path / "one/config.json").read_text())
    config["rope_parameters"] |= {
        "rope_theta": 500000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 8192,
    }
    (tmp_path / "one/config.json").write_text(json.dumps(config))
    write_tokenizer(tmp_path / "one")
    first, second = written_again(
        tmp_path / "one", tmp_path / "two", Tokenizer.load(tmp_path / "one")
    )
    assert first.rope == second.rope
    del theirs


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {*TRAINED}))
def test_families_that_cannot_be_trained_are_refused(tmp_path, family):
    write_checkpoint(family, tmp_path, shards=False)
    message = f"m: bass cannot train models of the family {family}; known: llama, "
    with pytest.raises(UserError, match=message):
        config_of(open_checkpoint(tmp_path).spec, eos_ids=(), place="m")
