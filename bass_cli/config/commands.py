"""List all commands with the classes of their options, for help pages and docs/reference.

Each group of commands has a file of its own. Options of several commands are in
config/command_options.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from bass_cli.config import evaluation_commands as evaluation
from bass_cli.config import machine_commands as machine
from bass_cli.config import sample_commands as samples

COMMANDS: Mapping[str, type] = {
    "generate": samples.GenerateArgs,
    "batch": samples.BatchArgs,
    "profile": machine.ProfileArgs,
    "distill": machine.DistillArgs,
    "bench": machine.BenchArgs,
    "logprobs": samples.LogprobsArgs,
    "merge": samples.MergeArgs,
    "watch": samples.WatchArgs,
    "filter": samples.FilterArgs,
    "publish": samples.PublishArgs,
    "eval": evaluation.EvaluateArgs,
    "rank": evaluation.RankArgs,
    "score": evaluation.ScoreArgs,
    "compare": evaluation.CompareArgs,
    "report": evaluation.ReportArgs,
    "pairs": machine.PairsArgs,
    "doctor": machine.DoctorArgs,
}
