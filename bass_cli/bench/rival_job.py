"""Run a whole job with another engine: `python -m bass_cli.bench.rival_job ORDER.json`.

bench/jobs.py writes the order file, starts this process and times it. The last line of standard
output is JSON with "tokens", "samples" and "generating_seconds".
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bass_cli.io import terminal

Order = dict[str, Any]  # as bench/jobs.py writes it
Run = Callable[[], list[list[int]]]  # the token ids of every sample


def transformers(order: Order) -> Run:
    """Load the model for left-padded `generate`, with as many samples at once as bass has rows."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    path, files = Path(order["model"]), {}
    if path.is_file():
        path, files = path.parent, {"gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path), dtype=getattr(torch, order["dtype"]), trust_remote_code=False, **files
    )
    model = model.to(order["device"]).eval()
    options: dict[str, Any] = {"do_sample": False}
    if order["temperature"]:
        options = {
            "do_sample": True,
            **{key: order[key] for key in ("temperature", "top_p", "top_k")},
        }
    if order["stop"]:
        options["tokenizer"] = transformers.AutoTokenizer.from_pretrained(order["tokenizer"])
        options["stop_strings"] = order["stop"]
    ends = set(order["eos"])
    queue = [prompt for prompt in order["prompts"] for _ in range(order["n"])]

    def generate(prompts: Sequence[list[int]]) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = [[0] * (longest - len(one)) + one for one in prompts]
        mask = [[0] * (longest - len(one)) + [1] * len(one) for one in prompts]
        found = model.generate(
            torch.tensor(ids, device=order["device"]),
            attention_mask=torch.tensor(mask, device=order["device"]),
            max_new_tokens=order["max_new_tokens"],
            eos_token_id=order["eos"] or None,
            pad_token_id=order["pad"],
            **options,
        )
        return [_to_end(row, ends, order["pad"]) for row in found[:, longest:].tolist()]

    def run() -> list[list[int]]:
        torch.manual_seed(order["seed"])
        rows, samples = order["rows"], []
        with torch.inference_mode():
            for first in range(0, len(queue), rows):
                samples += generate(queue[first : first + rows])
        return samples

    return run


def _to_end(ids: list[int], ends: set[int], pad: int) -> list[int]:
    """Return a sample without the padding after its end."""
    for place, token in enumerate(ids):
        if token in ends:
            return ids[: place + 1]
        if token == pad:
            return ids[:place]
    return ids


def vllm(order: Order) -> Run:
    """Load vLLM with its defaults and give it all prompts at once.

    Only the engine gets a seed. With a seed for each request vLLM would sample them one by one.
    """
    import vllm

    engine = vllm.LLM(
        model=order["model"],
        tokenizer=order["tokenizer"],
        trust_remote_code=False,
        seed=order["seed"],
        dtype=order["dtype"],
        max_model_len=max(map(len, order["prompts"])) + order["max_new_tokens"] + 1,
    )
    parameters = vllm.SamplingParams(
        n=order["n"],
        temperature=order["temperature"],
        top_p=order["top_p"],
        top_k=order["top_k"] or -1,
        max_tokens=order["max_new_tokens"],
        stop=order["stop"] or None,
    )

    def run() -> list[list[int]]:
        prompts = [{"prompt_token_ids": prompt} for prompt in order["prompts"]]
        found = engine.generate(prompts, parameters, use_tqdm=False)
        return [list(sample.token_ids) for one in found for sample in one.outputs]

    return run


_MAKERS: dict[str, Callable[[Order], Run]] = {"transformers": transformers, "vllm": vllm}


def main() -> None:
    order = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    run = _MAKERS[order["engine"]](order)
    began = time.perf_counter()
    samples = run()
    done = {"samples": len(samples), "tokens": sum(map(len, samples))}
    terminal.document(done | {"generating_seconds": round(time.perf_counter() - began, 3)})


if __name__ == "__main__":
    main()
