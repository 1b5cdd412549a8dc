"""Measure transformers' `generate` and vLLM on a real pair's target, where they are installed.

They run after our own methods, not in turn with them. Neither reports its prefill time, so the
time of a run of one token is subtracted.
"""

from __future__ import annotations

import gc
import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bass_cli.bench.cells import EMPTY, timing
from bass_cli.bench.figures import Latency
from bass_cli.bench.settings import Settings
from bass_cli.engine.batch import Row
from bass_cli.engine.graphs import synchronise
from bass_cli.run.plan import Plan

Generate = Callable[[Sequence[Row], int], None]  # generate this many tokens for each of these rows


def measure(
    plan: Plan,
    settings: Settings,
    batches: Sequence[tuple[list[Row], list[float]]],
    note: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Make a cell for each batch size and each installed rival of the settings.

    Args:
        batches: for each batch size, new rows, and plain decoding's ms per token in each repeat.
    """
    cells = []
    for name in settings.rivals:
        if importlib.util.find_spec(name) is None:
            note(f"{name} is left out: it is not installed here")
        elif name == "vllm" and plan.device.type != "cuda":
            note("vllm is left out: it is only measured on a CUDA device")
        else:
            generate = _MAKERS[name](plan, settings, [row for rows, _ in batches for row in rows])
            for rows, plain in batches:
                note(f"batch {len(rows)}: {name}")
                cells.append(_cell(name, generate, settings, rows, plan.device, plain))
            del generate
            _release(plan.device)
    return cells


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _cell(
    name: str,
    generate: Generate,
    settings: Settings,
    rows: list[Row],
    device: torch.device,
    plain: Sequence[float],
) -> dict[str, Any]:
    def seconds(tokens: int) -> float:
        synchronise(device)
        began = time.perf_counter()
        generate(rows, tokens)
        synchronise(device)
        return time.perf_counter() - began

    tokens = max(settings.new_tokens, 2)
    seconds(2)
    each, prefills = [], []
    for _ in plain:  # as many repeats as our own methods had
        prefills.append(seconds(1))
        each.append((seconds(tokens) - prefills[-1]) / (tokens - 1))
    latencies = [Latency(second * 1000.0, second * 1000.0, second * 1000.0) for second in each]
    return (
        EMPTY
        | timing(len(rows), name, latencies, [len(rows) / second for second in each], plain)
        | {"prefill_seconds": statistics.median(prefills)}
    )


def _transformers(plan: Plan, settings: Settings, every: Sequence[Row]) -> Generate:
    """Make a function that calls left-padded `generate` on the same files."""
    import transformers

    transformers.logging.set_verbosity_error()
    path, sampling = plan.files.target.path, settings.job.sampling
    where, options = (
        (str(path.parent), {"gguf_file": path.name}) if path.is_file() else (str(path), {})
    )
    model = (
        transformers.AutoModelForCausalLM.from_pretrained(
            where, dtype=plan.dtype, trust_remote_code=False, **options
        )
        .to(plan.device)
        .eval()
    )
    sampled = {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
    }

    def generate(rows: Sequence[Row], tokens: int) -> None:
        longest = max(len(row.tokens) for row in rows)
        ids = torch.tensor(
            [[0] * (longest - len(row.tokens)) + row.tokens for row in rows], device=plan.device
        )
        mask = torch.tensor(
            [[0] * (longest - len(row.tokens)) + [1] * len(row.tokens) for row in rows],
            device=plan.device,
        )
        torch.manual_seed(sampling.seed)
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                eos_token_id=None,
                pad_token_id=0,
                **(sampled if sampling.temperature else {"do_sample": False}),
            )

    return generate


def _vllm(plan: Plan, settings: Settings, every: Sequence[Row]) -> Generate:
    """Make a function that calls vLLM, with 80 % of the free memory."""
    import vllm

    free, total = torch.cuda.mem_get_info(plan.device)
    sampling = settings.job.sampling
    engine = vllm.LLM(
        model=str(plan.files.target.path),
        tokenizer=str(plan.files.tokenizer.path),
        trust_remote_code=False,
        seed=sampling.seed,
        dtype=str(plan.dtype).removeprefix("torch."),
        max_num_seqs=max(settings.batch_sizes),
        max_model_len=max(len(row.tokens) for row in every) + settings.new_tokens + 1,
        gpu_memory_utilization=round(0.8 * free / total, 2),
        enable_prefix_caching=False,
    )

    def generate(rows: Sequence[Row], tokens: int) -> None:
        parameters = vllm.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
        )
        engine.generate(
            [{"prompt_token_ids": row.tokens} for row in rows], parameters, use_tqdm=False
        )

    return generate


_MAKERS: dict[str, Callable[[Plan, Settings, Sequence[Row]], Generate]] = {
    "transformers": _transformers,
    "vllm": _vllm,
}
