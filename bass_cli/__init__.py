"""bass: many exact samples per prompt, by batched speculative sampling.

    from bass_cli import Job, generate

    for completion in generate(["def add(a, b):"], Job(pair="smollm2", n=4)):
        print(completion.text)

Names are imported when they are used, so that `import bass_cli` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bass_cli.config.job import Job, Pair, Speculation, load_pair
    from bass_cli.config.sampling import Sampling
    from bass_cli.errors import MachineError, UserError
    from bass_cli.io.results import Completion
    from bass_cli.run.engine import Engine
    from bass_cli.run.generate import generate
    from bass_cli.run.logprobs import score
    from bass_cli.run.requests import Piece

__version__ = "0.1.0"
__all__ = [
    "Completion",
    "Engine",
    "Job",
    "MachineError",
    "Pair",
    "Piece",
    "Sampling",
    "Speculation",
    "UserError",
    "generate",
    "load_pair",
    "score",
]
_PLACES = {
    "generate": "bass_cli.run.generate",
    "score": "bass_cli.run.logprobs",
    "Engine": "bass_cli.run.engine",
    "Piece": "bass_cli.run.requests",
    "Completion": "bass_cli.io.results",
    "MachineError": "bass_cli.errors",
    "UserError": "bass_cli.errors",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES.get(name, "bass_cli.config.job")), name)
