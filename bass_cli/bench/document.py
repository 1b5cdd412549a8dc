"""Describe the machine, the models and the settings of a bench for its document (docs/BENCH.md)."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import Any

import torch

from bass_cli import __version__
from bass_cli.bench import pairs
from bass_cli.bench.ceilings import Ceilings
from bass_cli.bench.gate import Gate
from bass_cli.bench.settings import Settings
from bass_cli.engine.verify import Rate


def document(
    models: pairs.Models,
    settings: Settings,
    ceilings: Ceilings,
    passed: Gate,
    acceptance: Sequence[Rate],
) -> dict[str, Any]:
    """Make a document without cells. `acceptance` is empty if acceptance was not set."""
    return {
        "machine": _machine(models.target.device, ceilings),
        "pair": pairs.describe(models, settings, acceptance),
        "settings": _describe(settings),
        "gate": passed.report(),
        "captures": [],
        "cells": [],
        "controllers": [],
        "repeats": None,
        "failures": [],
    }


def _machine(device: torch.device, ceilings: Ceilings) -> dict[str, Any]:
    cuda = device.type == "cuda"
    return {
        "device": device.type,
        "name": torch.cuda.get_device_name(device)
        if cuda
        else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "bass": __version__,
        "bandwidth_bytes_per_second": ceilings.bandwidth,
        "operations_per_second": ceilings.operations,
        "ceilings": ceilings.source,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if cuda else None,
    }


def _describe(settings: Settings) -> dict[str, Any]:
    sampling = settings.job.sampling
    return {
        "batch_sizes": list(settings.batch_sizes),
        "methods": list(settings.methods),
        "prompt_tokens": settings.prompt_tokens,
        "new_tokens": settings.new_tokens,
        "repeats": settings.repeats,
        "samples_per_prompt": settings.samples_per_prompt,
        "attention": settings.attention,
        "tensor_parallel": settings.job.tensor_parallel,
        "prompts": settings.prompts,
        "texts": list(settings.texts),
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
    }
