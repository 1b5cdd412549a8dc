"""List all commands with the classes of their options, for help pages and docs/reference.

Each group of commands has a file of its own, see the imports. Options of several commands are in
config/command_options.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from bass_cli.config.data_commands import FilterArgs, MergeArgs, PublishArgs, WatchArgs
from bass_cli.config.drawing_commands import BatchArgs, GenerateArgs, LogprobsArgs
from bass_cli.config.evaluation_commands import (
    CompareArgs,
    EvaluateArgs,
    RankArgs,
    ReportArgs,
    ScoreArgs,
)
from bass_cli.config.machine_commands import DoctorArgs, PairsArgs
from bass_cli.config.speed_commands import BenchArgs, DistillArgs, ProfileArgs

COMMANDS: Mapping[str, type] = {
    "generate": GenerateArgs,
    "batch": BatchArgs,
    "profile": ProfileArgs,
    "distill": DistillArgs,
    "bench": BenchArgs,
    "logprobs": LogprobsArgs,
    "merge": MergeArgs,
    "watch": WatchArgs,
    "filter": FilterArgs,
    "publish": PublishArgs,
    "eval": EvaluateArgs,
    "rank": RankArgs,
    "score": ScoreArgs,
    "compare": CompareArgs,
    "report": ReportArgs,
    "pairs": PairsArgs,
    "doctor": DoctorArgs,
}
