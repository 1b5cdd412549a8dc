"""Run other engines, transformers and vLLM, on the files and prompts of a job.

grid.py times batches in its own process. jobs.py starts this module as a program for a whole job:
`python -m bass_cli.bench.rivals JOB.json`. The last line of its standard output is JSON with
"tokens", "samples" and "generating_seconds". An engine is imported only when it is loaded.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bass_cli.io import terminal

if TYPE_CHECKING:
    from bass_cli.run.plan import Plan

# What a rival is loaded with, as `describe` makes it.
Description = Mapping[str, Any]
# Returns the token ids of every sample. Arguments: the prompts' token ids, and the most tokens of a
# sample. n: samples of each prompt. exact: ignore ends, so that every sample has that many tokens.
Generate = Callable[..., list[list[int]]]


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    generate = LOADERS[job["engine"]](job)
    began = time.perf_counter()
    samples = generate(job["prompts"], job["max_new_tokens"], n=job["n"])
    done = {"samples": len(samples), "tokens": sum(map(len, samples))}
    terminal.document(done | {"generating_seconds": round(time.perf_counter() - began, 3)})


def installed(rivals: Sequence[str], *, cuda: bool, note: Callable[[str], None]) -> tuple[str, ...]:
    """Return the rivals that can run here, with a note on each of the others."""
    found = []
    for rival in rivals:
        if importlib.util.find_spec(rival) is None:
            note(f"{rival} is left out: it is not installed here")
        elif rival == "vllm" and not cuda:
            note("vllm is left out: it is only measured on a CUDA device")
        else:
            found.append(rival)
    return tuple(found)


def describe(plan: Plan, *, longest: int, rows: int) -> dict[str, Any]:
    """Describe a plan's target and sampling to a loader, as JSON. Of a target in fp8, vLLM
    quantises its weights too, if the files do not say another way; other rivals and formats compute
    in 16 bits.

    Args:
        longest: tokens of the longest prompt.
        rows: samples that are generated at once.
    """
    sampling, eos = plan.job.sampling, sorted(plan.eos_ids | plan.stop_ids)
    quantises = plan.layouts.layers == "fp8" and not plan.files.target.quantised_as
    keys = ("temperature", "top_p", "top_k", "seed", "max_new_tokens", "stop")
    return {
        "model": str(plan.files.target.path),
        "tokenizer": str(plan.files.tokenizer.path),
        "device": plan.device.type,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "context": longest + sampling.max_new_tokens + 1,
        "rows": rows,
        "eos": eos,
        "pad": eos[0] if eos else 0,
        **({"vllm": {"quantization": "fp8"}} if quantises else {}),
        **{key: getattr(sampling, key) for key in keys},
    }


def _transformers(job: Description) -> Generate:
    """Load the model for left-padded `generate`, with `rows` samples at once."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    path, files = Path(job["model"]), {}
    if path.is_file():
        path, files = path.parent, {"gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path), dtype=getattr(torch, job["dtype"]), trust_remote_code=False, **files
    )
    model = model.to(job["device"]).eval()
    options: dict[str, Any] = {"do_sample": False}
    if job["temperature"]:
        sampled = {key: job[key] for key in ("temperature", "top_p", "top_k")}
        options = {"do_sample": True, **sampled}
    ends: dict[str, Any] = {"eos_token_id": job["eos"] or None, "pad_token_id": job["pad"]}
    if job["stop"]:
        ends["tokenizer"] = stop_tokenizer(Path(job["tokenizer"]))
        ends["stop_strings"] = job["stop"]

    def generate(
        prompts: Sequence[list[int]], tokens: int, *, n: int = 1, exact: bool = False
    ) -> list[list[int]]:
        fixed = {"min_new_tokens": tokens, "eos_token_id": None, "pad_token_id": 0}
        more = options | (fixed if exact else ends)
        queue = [prompt for prompt in prompts for _ in range(n)]
        torch.manual_seed(job["seed"])
        samples: list[list[int]] = []
        for first in range(0, len(queue), job["rows"]):
            batch = queue[first : first + job["rows"]]
            longest = max(map(len, batch))
            ids = [[0] * (longest - len(one)) + one for one in batch]
            mask = [[0] * (longest - len(one)) + [1] * len(one) for one in batch]
            with torch.inference_mode():
                found = model.generate(
                    torch.tensor(ids, device=job["device"]),
                    attention_mask=torch.tensor(mask, device=job["device"]),
                    max_new_tokens=tokens,
                    **more,
                )
            samples += found[:, longest:].tolist()
        return samples if exact else [_to_end(one, set(job["eos"]), job["pad"]) for one in samples]

    return generate


def stop_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a folder or .gguf file in the form that transformers' stop strings
    need. Its ids are those of bass."""
    import tokenizers
    import transformers

    from bass_cli.formats.backends import load_backend
    from bass_cli.formats.tokenizer import Tokenizer

    backend = load_backend(Tokenizer.load(path).cached.content)
    if isinstance(backend, tokenizers.Tokenizer):
        return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    return transformers.AutoTokenizer.from_pretrained(str(path))  # a SentencePiece model


def _to_end(ids: list[int], ends: set[int], pad: int) -> list[int]:
    """Return a sample without the padding after its end."""
    for place, token in enumerate(ids):
        if token in ends:
            return ids[: place + 1]
        if token == pad:
            return ids[:place]
    return ids


def _vllm(job: Description) -> Generate:
    """Load vLLM with its defaults, unless the job has other options for it ("vllm").

    Only the engine gets a seed. With a seed for each request vLLM would sample them one by one.
    """
    import vllm

    engine = vllm.LLM(
        model=job["model"],
        tokenizer=job["tokenizer"],
        trust_remote_code=False,
        seed=job["seed"],
        dtype=job["dtype"],
        max_model_len=job["context"],
        **job.get("vllm", {}),
    )

    def generate(
        prompts: Sequence[list[int]], tokens: int, *, n: int = 1, exact: bool = False
    ) -> list[list[int]]:
        parameters = vllm.SamplingParams(
            n=n,
            temperature=job["temperature"],
            top_p=job["top_p"],
            top_k=job["top_k"] or -1,
            max_tokens=tokens,
            stop=None if exact else job["stop"] or None,
            ignore_eos=exact,
            detokenize=not exact,
        )
        ids = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = engine.generate(ids, parameters, use_tqdm=False)
        return [list(sample.token_ids) for one in found for sample in one.outputs]

    return generate


LOADERS: dict[str, Callable[[Description], Generate]] = {
    "transformers": _transformers,
    "vllm": _vllm,
}


if __name__ == "__main__":
    main()
