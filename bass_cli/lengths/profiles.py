"""Where cost surfaces are stored: one JSON file for each device, pair, dtype and version, in the
user's cache folder.

Not here: what they contain (costs.py), how they are measured (run/profile.py). A file that cannot
be read or written is never an error: without a profile everything works, only a little slower at
first.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from bass_cli import __version__
from bass_cli.engine.contracts import DraftLength
from bass_cli.io.cache import cache_folder, read_cached, write_cached
from bass_cli.lengths.costs import Surface, read_surface
from bass_cli.system.threads import most_threads

Note = Callable[[str], None]
_MOST_BYTES = 1 << 20  # a profile has a few thousand


@runtime_checkable
class Remembers(Protocol):
    """A controller that learns the cost of rounds."""

    def learned(self) -> Surface | None:
        """Return what later jobs may begin from; None if that is not worth storing."""


def folder() -> Path:
    """Return the folder `profiles` in the cache folder."""
    return cache_folder() / "profiles"


def path_of(
    *,
    target: str,
    draft: str,
    device: torch.device,
    dtype: torch.dtype,
    threads: int | None = None,
    ranks: int = 1,
) -> Path:
    """Return the file for two models (their fingerprints), a device or `ranks` of them, a dtype and
    the present versions.

    Coupling and sampling are not part of it: their cost is nearly the same. Nor is other load on
    the machine.

    Args:
        threads: CPU threads as requested; None: the default.
    """
    identity = [
        _device_name(device, threads),
        target,
        draft,
        str(dtype),
        __version__,
        torch.__version__,
    ]
    if ranks > 1:
        identity.append(f"{ranks} ranks")
    return folder() / f"{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]}.json"


def load_surface(path: Path, note: Note) -> Surface | None:
    """Return the stored surface. None if there is none, or, after a note, if the file is not a
    valid one."""
    try:
        return read_surface(read_cached(path, _MOST_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        note(f"{path}: this profile is ignored: {getattr(error, 'strerror', None) or error}")
        return None


def save_surface(path: Path, surface: Surface, note: Note) -> bool:
    """Store a surface, whole or not at all. Return False, after a note, if that fails."""
    try:
        write_cached(path, f"{surface.to_json()}\n".encode())
    except OSError as error:
        note(f"{path}: the profile could not be saved: {error.strerror}")
        return False
    return True


def keep_learnt(path: Path | None, lengths: DraftLength) -> None:
    """Store what a controller has learnt in a job, for the next job to begin from. A measured
    profile stays unchanged."""
    learnt = lengths.learned() if isinstance(lengths, Remembers) else None
    if learnt is not None and path is not None:
        save_surface(path, learnt, lambda note: None)


def _device_name(device: torch.device, threads: int | None) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {most_threads(threads)} threads"
