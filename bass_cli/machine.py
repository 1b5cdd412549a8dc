"""What this machine offers and which packaged pairs can run on it, by file look-ups and rough byte counts.

Nothing is downloaded and no weights are opened; whether a checkpoint is sound is found out by plan.py.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
from pathlib import Path
from typing import Any

from bass_cli import __version__
from bass_cli.drafts import parse_draft
from bass_cli.job import Pair, load_pair, packaged_pairs
from bass_cli.threads import settle

PACKAGES = ("torch", "triton", "transformers", "safetensors", "gguf", "datasets")
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
OVERHEAD = 1.2  # keys, values and work space beside the weights


def describe_pairs() -> list[dict[str, Any]]:
    """Every packaged pair: its models, the bytes of its weights (None: unknown), whether it runs here, and why not."""
    memory = available_memory()
    return [_describe_pair(load_pair(name), memory) for name in packaged_pairs()]


def _describe_pair(pair: Pair, memory: dict[str, Any]) -> dict[str, Any]:
    draft = _draft_files(pair)
    models = {"target": pair.target} | ({"draft": draft} if draft else {})
    missing: dict[str, str] = {}
    for role, name in models.items():
        if (place := place_of(name)) != "here":
            missing[place] = f"{missing[place]} and {role}" if place in missing else role
    size = weight_bytes(pair, memory["device"])
    fits = None if size is None else size * OVERHEAD <= memory["bytes"]
    reasons = [] if fits is not False else [f"needs more memory than the {_gigabytes(memory['bytes'])} here"]
    reasons += [f"{roles}: {place}" for place, roles in missing.items()]
    return {
        "name": pair.name,
        "target": pair.target,
        "draft": pair.draft,
        "weight_bytes": size,
        "weights": "unknown" if size is None else f"about {_gigabytes(size)}",
        "fits": fits,
        "ready": not reasons,
        "here": "; ".join(reasons) or "ready",
    }


def _draft_files(pair: Pair) -> str | None:
    """The model that the draft needs beside the target, if any."""
    model = parse_draft(pair.draft).model
    return None if model is None or model.startswith("skip:") else model


def place_of(model: str) -> str:
    """Whether the files of a model are "here", or in a few words what is to be done about them."""
    if model.startswith("package:"):
        module, _, file = model.removeprefix("package:").partition("/")
        found = importlib.util.find_spec(module)
        if found is None:
            return f"package {module} is not installed"
        here = any((Path(folder) / file).is_file() for folder in found.submodule_search_locations or [])
        return "here" if here else f"package {module} has no {file}"
    if Path(model).exists():
        return "here"
    if model.endswith(".gguf") or model.count("/") != 1 or model.startswith((".", "/")):
        return "no such file or folder"
    return "here" if _is_cached(model) else "to be downloaded"


def _is_cached(model: str) -> bool:
    import huggingface_hub

    names = ("model.safetensors", "model.safetensors.index.json")
    return any(isinstance(huggingface_hub.try_to_load_from_cache(model, name), str) for name in names)


def weight_bytes(pair: Pair, device: str) -> int | None:
    """Roughly what the weights of a pair take in memory, from the number of parameters in the names of its models."""
    width = BYTES.get(pair.dtype, 2 if device == "cuda" else 4)
    counts = [parameters_in(name) for name in (pair.target, _draft_files(pair)) if name is not None]
    known = [count for count in counts if count is not None]
    return sum(known) * width if len(known) == len(counts) else None


def parameters_in(name: str) -> int | None:
    """The number of parameters that a model's name tells: 7B, 0.5b, 350M; None if it tells none."""
    found = re.findall(r"(?<![\w.])(\d+(?:\.\d+)?)([bBmM])(?![a-zA-Z0-9])", name)
    return int(float(found[-1][0]) * (1e9 if found[-1][1] in "bB" else 1e6)) if found else None


def available_memory() -> dict[str, Any]:
    """The device that --device auto takes and the bytes of memory it has in all."""
    import torch

    if torch.cuda.is_available():
        return {"device": "cuda", "bytes": torch.cuda.get_device_properties(0).total_memory}
    return {"device": "cpu", "bytes": _host_memory()}


def _host_memory() -> int:
    """The machine's memory, or less where a control group allows less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    allowed = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(allowed)) if allowed.isdigit() else total


def describe_machine(threads: int | None = None) -> dict[str, Any]:
    """What `bass doctor` shows, ready for JSON; `threads` as asked for."""
    settled = settle(threads, lambda note: None)
    import torch

    memory, pairs = available_memory(), describe_pairs()
    cuda = memory["device"] == "cuda"
    return {
        "bass": __version__,
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "device": memory["device"],
        "device_name": torch.cuda.get_device_name(0) if cuda else platform.processor() or platform.machine(),
        "memory": _gigabytes(memory["bytes"]),
        "memory_bytes": memory["bytes"],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": settled.number,
        "threads_why": settled.why,
        "kernels": "triton" if cuda and importlib.util.find_spec("triton") else "plain torch",
        "fits": [pair["name"] for pair in pairs if pair["fits"]],
        "ready": [pair["name"] for pair in pairs if pair["ready"]],
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
