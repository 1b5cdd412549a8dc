"""Draw roll-outs and train on them: a tiny model learns to prefer one letter, by REINFORCE.

python examples/rollouts.py [--steps 20] [--folder FOLDER]

Two CPU cores need about 30 seconds; nothing is downloaded. Each step draws samples with a resident
engine, makes one optimizer step of a transformers model, and gives the engine the new weights. At
the end `bass generate` loads the saved model and draws the same samples as the engine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from bass_cli import Completion, Engine, Job, Sampling

TEXTS = ["The sea", "A cat", "My house", "In spring"]
LETTER = "e"  # the reward of a sample is the share of this letter in its tokens
SAMPLES, TOKENS = 16, 16  # of a prompt; of a sample at the most
Prompt = dict[str, Any]  # a line of a prompt file


def make_model(folder: Path) -> transformers.LlamaForCausalLM:
    """Save a small random model, whose tokens are single bytes, and return it."""
    torch.manual_seed(0)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    ids = {text: id_ for id_, text in enumerate(["</s>", *alphabet])}
    bytes_ = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
    bytes_.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=bytes_, eos_token="</s>").save_pretrained(
        folder
    )
    config = transformers.LlamaConfig(
        vocab_size=len(ids),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model


def draw(engine: Engine, prompts: Sequence[Prompt], seed: int) -> list[Completion]:
    """Draw SAMPLES samples of every prompt, ordered by prompt and number."""
    sampling = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=TOKENS, seed=seed, logprobs=0)
    samples = engine.generate(prompts, n=SAMPLES, sampling=sampling)
    return sorted(samples, key=lambda sample: (int(sample.id), sample.sample))


def log_probabilities(
    model: transformers.LlamaForCausalLM, prompts: list[list[int]], samples: list[list[int]]
) -> list[torch.Tensor]:
    """Return the log-probability of every token of the samples under the model, with gradients.

    Args:
        prompts, samples: The token ids of each sample's prompt, and of the sample.
    """
    rows = [torch.tensor(prompt + sample) for prompt, sample in zip(prompts, samples, strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    every = model(ids[:, :-1]).logits.log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0]
    return [
        row[len(prompt) - 1 :][: len(sample)]
        for row, prompt, sample in zip(every, prompts, samples, strict=True)
    ]


def train(folder: Path, steps: int) -> list[float]:
    """Train the model in `folder` and save it there. Return the mean reward of each step."""
    model = make_model(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXTS).input_ids
    prompts: list[Prompt] = [{"id": str(i), "token_ids": one} for i, one in enumerate(ids)]
    letter = tokenizer.convert_tokens_to_ids(LETTER)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    means = []
    job = Job(model=folder, device="cpu", dtype="fp32", token_ids=True)
    with Engine(job) as engine:
        for step in range(steps):
            drawn = draw(engine, prompts, seed=step)
            samples = [one.token_ids or [] for one in drawn]
            rewards = torch.tensor([ids.count(letter) / len(ids) for ids in samples])
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            found = log_probabilities(model, [ids[int(one.id)] for one in drawn], samples)
            sums = torch.stack([one.sum() for one in found])
            optimizer.zero_grad()
            (-advantages * sums).mean().backward()
            optimizer.step()
            engine.update_weights(model.state_dict())
            means.append(rewards.mean().item())
            known = torch.tensor([number for one in drawn for number in one.token_logprobs or ()])
            apart = (torch.cat(found) - known).abs().max().item()
            print(
                f"step {step}: mean reward {means[-1]:.3f}; log-probabilities of engine and "
                f"trainer differ by {apart:.0e} at most"
            )
        here = {(one.id, one.sample): one.token_ids for one in draw(engine, prompts, seed=steps)}
    model.save_pretrained(folder)
    there = draw_in_fresh_process(folder, prompts, seed=steps)
    print(f"`bass generate` draws the same samples from the saved model: {here == there}")
    return means


def draw_in_fresh_process(
    folder: Path, prompts: Sequence[Prompt], seed: int
) -> dict[tuple[str, int], list[int]]:
    """Return the token ids of the samples of `draw` from the model in a folder, by prompt and
    number."""
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    command = [sys.executable, "-m", "bass_cli", "generate", str(file), "--model", str(folder)]
    command += f"--n {SAMPLES} --temperature 1 --top-p 1 --max-new-tokens {TOKENS}".split()
    command += f"--seed {seed} --device cpu --dtype fp32 --token-ids --quiet --out -".split()
    ended = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    lines = map(json.loads, ended.stdout.splitlines())
    return {(line["id"], line["sample"]): line["token_ids"] for line in lines}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="for the model; default: a temporary one")
    given = parser.parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        train(given.folder or Path(temporary), given.steps)


if __name__ == "__main__":
    main()
