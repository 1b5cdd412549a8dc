"""Two processes whose sums go through memory that both can write: the trial of it, and the logits of
a split model in few launches. On a CPU, by kernels in Triton's interpreter."""

from pathlib import Path

import pytest
import torch
from checkpoints import shallow, write_checkpoint
from decoders import load_decoder
from halves import VOCAB, begin, logits_of

from bass_kernels import has_triton

if not has_triton():
    pytest.skip("Triton is missing", allow_module_level=True)


def test_trial_finds_that_sums_are_right(tmp_path: Path) -> None:
    assert begin(tmp_path, "trial") == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_split_model_in_few_launches_gives_the_logits_of_the_whole(
    family: str, tmp_path: Path
) -> None:
    fewer = {"num_attention_heads": 4, "num_key_value_heads": 1} if family == "qwen2" else {}
    write_checkpoint(family, tmp_path / "model", **shallow(family), **fewer)
    first, second = begin(tmp_path, "logits")
    whole = load_decoder(tmp_path / "model", vocab=VOCAB)
    expected = logits_of(whole)
    assert torch.equal(first, second)
    assert (first - expected).abs().max() < 1e-5 * expected.std()
