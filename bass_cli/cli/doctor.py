"""What `bass doctor` and `bass pairs` show: the machine, and which pairs can run on it.

Nothing is downloaded and no weights are read. Sizes are estimates from the models' names, unless
all files of a pair are here: then run/plan.py checks their headers.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import textwrap
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bass_cli import __version__
from bass_cli.cli.options import in_flags
from bass_cli.config.job import Job, Pair, chosen_pair, load_pair, make_job
from bass_cli.config.machine_commands import DoctorArgs
from bass_cli.config.options import packaged_pairs
from bass_cli.config.speculation import parse_draft
from bass_cli.errors import MachineError, UserError, first_line, spelled
from bass_cli.io.cache import cache_folder, is_writable, prepare_kernel_cache, temporary_folder
from bass_cli.sandbox.programs import available_cores
from bass_cli.system.host import free_memory, gigabytes, gpu_fault, host_memory, processor_name
from bass_cli.system.threads import configure_threads

if TYPE_CHECKING:
    import torch

    from bass_cli.run.plan import Plan

PACKAGES = ("torch", "triton", "transformers", "safetensors", "gguf", "datasets")
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1, "int8": 1, "file": 1}  # of a weight
_PATIENCE = 3.0  # seconds to wait for the hub
OVERHEAD = 1.2  # memory of a job over that of its weights: KV cache and workspace


def describe_pairs(names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Describe these pairs (names or files), or all packaged ones, ready for JSON.

    `weight_bytes` is None if unknown. `here` is "ready", or the reasons why the pair cannot run.
    """
    memory = available_memory()
    return [_describe_pair(load_pair(name), memory)[0] for name in names or packaged_pairs()]


def pair_lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Format pairs as lines of at most 80 columns: name, weights, state; below them the models."""
    heads = [("pair", "weights", "here")]
    heads += [(spelled(row["name"]), row["weights"], row["here"]) for row in rows]
    widths = [max(len(head[column]) for head in heads) for column in range(2)]
    models = ["target, draft", *(f"{row['target']}, {row['draft']}" for row in rows)]
    for (name, weights, here), text in zip(heads, models, strict=True):
        start = f"{name:{widths[0]}}  {weights:{widths[1]}}  "
        yield from _wrapped(start + here, " " * len(start))
        yield from _wrapped(f"    {text}", "      ")


def _wrapped(text: str, indent: str) -> list[str]:
    """Wrap text at 80 columns; a longer word gets a line of its own."""
    return textwrap.wrap(
        spelled(text),
        80,
        subsequent_indent=indent if len(indent) < 60 else "    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _describe_pair(
    pair: Pair, memory: dict[str, Any], job: Job | None = None
) -> tuple[dict[str, Any], Plan | None]:
    """Describe a pair; also return the plan of a job with it, None if the pair cannot run here.
    Default job: the pair's own."""
    draft = parse_draft(pair.draft).files
    models = {"target": pair.target} | ({"draft": draft} if draft else {})
    missing: dict[str, str] = {}
    for role, name in models.items():
        if (place := place_of(name, pair.folder)) != "here":
            missing[place] = f"{missing[place]} and {role}" if place in missing else role
    size = weight_bytes(pair, memory["device"])
    fits = None if size is None else size * OVERHEAD <= memory["bytes"]
    reasons = [f"{roles}: {place}" for place, roles in missing.items()]
    if fits is False and missing:  # else the plan below has the sizes of the files
        reasons.insert(0, f"needs more memory than the {gigabytes(memory['bytes'])} here")
    plan = None
    if not reasons:
        from bass_cli.run.plan import make_plan

        try:
            plan = make_plan(make_job(pair) if job is None else job)
        except UserError as error:
            reasons.append(str(error))
    return {
        "name": pair.name,
        "target": pair.target,
        "draft": pair.draft if plan is None else plan.job.pair.draft,
        "weight_bytes": size,
        "weights": "unknown" if size is None else f"about {gigabytes(size)}",
        "fits": fits,
        "ready": not reasons,
        "here": in_flags("; ".join(reasons)) or "ready",
    }, plan


def place_of(model: str, folder: Path | None = None) -> str:
    """Return "here" if a model's files are on this machine, else a few words on what is missing.

    Args:
        model: A hub id, folder, .gguf file or package:MODULE/FILE.
        folder: The folder of the pair file, for relative paths.
    """
    if model.startswith("package:"):
        module, _, file = model.removeprefix("package:").partition("/")
        found = importlib.util.find_spec(module) if module.isidentifier() else None
        if found is None:
            return f"package {module} is not installed"
        here = any(
            os.path.isfile(Path(folder) / file) for folder in found.submodule_search_locations or []
        )
        return "here" if here else f"package {module} has no {file}"
    path = Path(os.path.expanduser(model))
    if os.path.exists(path) or (folder is not None and os.path.exists(folder / path)):
        return "here"
    if model.endswith(".gguf") or model.count("/") != 1 or model.startswith((".", "/")):
        return "no such file or folder"
    try:
        return "here" if _is_cached(model) else "to be downloaded"
    except ValueError:  # not a valid hub id
        return "no such file or folder"


def _is_cached(model: str) -> bool:
    import huggingface_hub

    names = ("model.safetensors", "model.safetensors.index.json")
    return any(
        isinstance(huggingface_hub.try_to_load_from_cache(model, name), str) for name in names
    )


def weight_bytes(pair: Pair, device: str) -> int | None:
    """Estimate the memory of a pair's weights from the parameter counts in its models' names."""
    plain = 2 if device == "cuda" else 4
    own: str = pair.draft_dtype
    if own == "target" or (own == "auto" and pair.dtype not in ("fp8", "int8")):
        own = pair.dtype
    found = 0
    for name, dtype in ((pair.target, pair.dtype), (parse_draft(pair.draft).files, own)):
        if name is None:
            continue
        count = parameters_in(name)
        if count is None:
            return None
        found += count * BYTES.get(dtype, plain)
    return found


def parameters_in(name: str) -> int | None:
    """Return the parameter count in a model's name, such as 7B, 0.5b or 350M; None without one."""
    found = re.findall(r"(?<![\w.])(\d{1,9}(?:\.\d{1,9})?)([bBmM])(?![a-zA-Z0-9])", name)
    return int(float(found[-1][0]) * (1e9 if found[-1][1] in "bB" else 1e6)) if found else None


def available_memory() -> dict[str, Any]:
    """Return the device that --device auto chooses, and its total memory in bytes."""
    import torch

    if gpu_fault() is None:
        return {"device": "cuda", "bytes": torch.cuda.get_device_properties(0).total_memory}
    return {"device": "cpu", "bytes": host_memory().total}


def describe_machine(args: DoctorArgs) -> dict[str, Any]:
    """Return what `bass doctor` shows, ready for JSON."""
    chosen = _chosen(args)
    threads = configure_threads(args.threads, lambda note: None)
    import torch

    memory, pairs = available_memory(), describe_pairs()
    cuda = memory["device"] == "cuda"
    processor = processor_name() or platform.machine()
    return {
        "bass": __version__,
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "device": memory["device"],
        "device_name": torch.cuda.get_device_name(0) if cuda else processor,
        "memory": gigabytes(memory["bytes"]),
        "memory_bytes": memory["bytes"],
        **_free(torch.device(memory["device"])),
        "cpu": processor,
        "cores": available_cores(),
        "threads": threads.number,
        "threads_why": in_flags(threads.why),
        "kernels": "triton" if cuda and importlib.util.find_spec("triton") else "plain torch",
        **_caches(cuda),
        "sandbox": _sandbox(),
        "hub": _hub(),
        "fits": [one["name"] for one in pairs if one["fits"]],
        "ready": [one["name"] for one in pairs if one["ready"]],
        **({} if chosen is None else _one_pair(chosen, memory)),
    }


def _free(device: torch.device) -> dict[str, Any]:
    """Return the free memory of the device, and for a GPU that of the host too."""
    count = free_memory(device)
    found: dict[str, Any] = {"free_memory": gigabytes(count), "free_memory_bytes": count}
    if device.type == "cuda":
        host = host_memory()
        found["host_memory"] = f"{gigabytes(host.total)}, {gigabytes(host.free)} free"
    return found


def _caches(cuda: bool) -> dict[str, str]:
    """Return the cache folders with their free space."""
    from huggingface_hub import constants

    places = {
        "cache": cache_folder(),
        "models_cache": Path(constants.HF_HUB_CACHE),
        "temporary": temporary_folder(),
    }
    if cuda:
        places["kernels_cache"] = prepare_kernel_cache()
    return {name: f"{place}, {_room(place)}" for name, place in places.items()}


def _room(folder: Path) -> str:
    """Return the free space of a folder, or that it is not writable."""
    if not is_writable(folder):
        return "not writable"
    there = next(place for place in (folder, *folder.parents) if place.exists())
    return f"{gigabytes(shutil.disk_usage(there).free)} free"


def _sandbox() -> str:
    """Return the layers of the sandbox for generated programs, and what is missing."""
    from bass_cli.sandbox.isolation import ACCEPT
    from bass_cli.sandbox.programs import Sandbox

    try:
        with Sandbox(workers=1) as sandbox:
            layers = ", ".join(sandbox.layers) or "only limits, in a process of its own"
            weak = (
                [f"weak, so running programs needs {ACCEPT}"]
                if sandbox.isolation.weaknesses()
                else []
            )
            return in_flags("; ".join((layers, *weak, *sandbox.isolation.warnings())))
    except MachineError as error:
        return in_flags(str(error))


def _hub() -> str:
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return f"{constants.ENDPOINT} is not used: HF_HUB_OFFLINE is set"
    found = [f"cannot be reached (no answer within {_PATIENCE:g} s)"]

    def connect() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=_PATIENCE)
            found.append("can be reached")
        except Exception as error:  # the type depends on the hub package's HTTP client
            found.append(f"cannot be reached ({first_line(error)})")

    # In a thread, because the name lookup has no time limit.
    connecting = threading.Thread(target=connect, daemon=True)
    connecting.start()
    connecting.join(_PATIENCE)
    return f"{constants.ENDPOINT} {found[-1]}"


# Options that belong to a pair, and what they are about
_OF_PAIR = {
    "draft": "the target that it drafts for",
    "tensor_parallel": "the target that is split",
    "draft_dtype": "whose draft it is for",
    "kv_dtype": "whose keys and values it is for",
    "dtype": "whose weights it is for",
    "decoder": "whose layers it is for",
}


def _chosen(args: DoctorArgs) -> Job | None:
    values: dict[str, Any] = {name: getattr(args, name) for name in _OF_PAIR}
    given = {name: value for name, value in values.items() if value is not None}
    if args.pair is None and args.model is None:
        for name in given:
            raise UserError(f"`{name}` needs `pair` or `model`, {_OF_PAIR[name]}")
        return None
    return make_job(chosen_pair(args), **given)


def _one_pair(job: Job, memory: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of one pair, with the memory plan of a job if it can run here."""
    ranks = job.tensor_parallel
    pair = job.pair.model_copy(update={"dtype": job.dtype, "draft_dtype": job.draft_dtype})
    found, plan = _describe_pair(pair, memory, job)
    planned: dict[str, Any] = {}
    if plan is not None:
        split = f" on each of {ranks} devices" if ranks > 1 else ""
        found["weights"] = gigabytes(plan.footprint.weights) + split
        planned = {"pair_decoder": _decoder(plan), **_memory_plan(plan)}
    return {
        "pair": pair.name,
        "pair_target": pair.target,
        "pair_draft": found["draft"],
        "pair_weights": found["weights"],
        **planned,
        "pair_here": found["here"],
        "pair_ready": found["ready"],
    }


def _decoder(plan: Plan) -> str:
    """Return whose layers run the target."""
    from bass_cli.models.spec import AnySpec

    spec = plan.files.target.spec
    how = "transformers' own layers" if isinstance(spec, AnySpec) else "native"
    return f"{spec.family}: {how}"


def _memory_plan(plan: Plan) -> dict[str, Any]:
    """Return the batch size of a large job, the reason for it, and the memory that it takes."""
    parts, tokens = plan.memory_parts, plan.job.sampling.max_new_tokens
    needed = sum(parts.values())
    listed = ", ".join(f"{part} {gigabytes(count)}" for part, count in parts.items())
    return {
        **({"pair_notes": in_flags("; ".join(plan.notes))} if plan.notes else {}),
        "pair_rows": "; ".join(
            filter(
                None,
                (
                    f"{plan.rows} sequences of up to {tokens} new tokens: "
                    f"{in_flags(plan.rows_reason)}",
                    plan.cache_note,
                ),
            )
        ),
        "pair_most_rows": f"{plan.most_rows}, by memory alone",
        "pair_memory": f"{listed}; {gigabytes(needed)} of {gigabytes(plan.free)} usable",
        "pair_memory_bytes": {**parts, "needed": needed, "free": plan.free},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
