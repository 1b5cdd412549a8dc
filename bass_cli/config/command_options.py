"""Options that several commands have. None (or False) means that an option is not given.

Options of a Job are taken from config/options.py, where a command may change their help text. The
commands check the values.
"""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from typing import Any

from bass_cli.config.options import (
    JOB,
    MACHINE,
    MODELS,
    OUTPUT,
    Option,
    flag,
    packaged_pairs,
    switch,
)


def of_job(name: str, **changes: Any) -> Any:
    """Declare a field as this option of a Job, with changes."""
    return flag(JOB[name], **changes)


def args_of(*names: str, **changes: Any) -> Any:
    """Return a base class with these options of a Job as fields, with changes."""
    return make_dataclass(
        "Options",
        [(name, JOB[name].kind | None, of_job(name, **changes)) for name in names],
        namespace={"__doc__": "Some options of a Job."},
        eq=False,
        kw_only=True,
    )


def job_options(args: Any, **changes: Any) -> dict[str, Any]:
    """Return the options of a Job that a command was given, with changes.

    A command without the option `generation_config` uses bass's own settings, not a model's.
    """
    given = {"generation_config": "none"} if not hasattr(args, "generation_config") else {}
    given |= {name: value for name in JOB if (value := getattr(args, name, None)) is not None}
    given |= changes
    return {name: value for name, value in given.items() if value is not None}


PAIR = Option(
    "A packaged pair or a pair file (.yaml); flags and variables override its settings",
    MODELS,
    "NAME|FILE",
    "smollm2",
    choices=packaged_pairs,
)
RAY = Option(
    "Draw with one process per GPU: on this machine (local), or as Ray actors on the cluster that "
    "this machine is a node of (auto, or HOST:PORT; needs bass-cli[ray])",
    MACHINE,
    "local|ADDRESS",
)
ACTORS = Option(
    "Number of actors, the processes of --ray; all means one per GPU, or one per node if there are "
    "no GPUs, and includes nodes that join later",
    MACHINE,
    "N|all",
    "all",
    rare=True,
)
PUBLIC = Option("Let everybody read the published data set", OUTPUT, shown="private", rare=True)
PLOT = Option("Draw a chart to this file; needs matplotlib", OUTPUT, "FILE.png")
# The options of a Job that bass bench takes with and without --job
MACHINE_AND_MODELS = ("model", "draft", "device", "dtype", "draft_dtype", "kv_dtype", "threads")
DISTRIBUTION = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "allowed_token_ids", "seed", "coupling"),
)
_Pair: Any = args_of(*MACHINE_AND_MODELS)
DistributionArgs: Any = args_of(*DISTRIBUTION)
DecoderArgs: Any = args_of("decoder")
TargetArgs: Any = args_of(
    *("model", "lora", "decoder", "device", "dtype", "kv_dtype", "threads", "tensor_parallel")
)


@dataclass(kw_only=True, eq=False)
class QuietArgs:
    quiet: bool = switch("Write only errors to standard error", OUTPUT)


@dataclass(kw_only=True, eq=False)
class DocumentArgs:
    json_document: bool = switch(
        "Print one JSON document instead of the table", OUTPUT, flag="--json"
    )


@dataclass(kw_only=True, eq=False)
class PairArgs(_Pair):
    """The options of the models and the machine. None means not given, as in all such classes."""

    pair: str | None = flag(PAIR)
