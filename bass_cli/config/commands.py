"""List all commands with the classes of their options, for help pages and docs/reference.

Each group of commands has a file of its own. Options of several commands are in
config/command_options.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from bass_cli.config import evaluation_commands as evaluation
from bass_cli.config import machine_commands as machine
from bass_cli.config import sample_commands as samples

# In the order of `bass --help`: by what a user does.
GROUPS: Mapping[str, Mapping[str, type]] = {
    "Draw samples": {
        "generate": samples.GenerateArgs,
        "batch": samples.BatchArgs,
        "watch": samples.WatchArgs,
        "merge": samples.MergeArgs,
        "logprobs": samples.LogprobsArgs,
    },
    "Judge and choose": {
        "eval": evaluation.EvaluateArgs,
        "score": evaluation.ScoreArgs,
        "compare": evaluation.CompareArgs,
        "report": evaluation.ReportArgs,
        "rank": evaluation.RankArgs,
        "filter": samples.FilterArgs,
        "publish": samples.PublishArgs,
    },
    "Models, speed and machine": {
        "pairs": machine.PairsArgs,
        "doctor": machine.DoctorArgs,
        "bench": machine.BenchArgs,
        "profile": machine.ProfileArgs,
        "distill": machine.DistillArgs,
    },
}
COMMANDS: Mapping[str, type] = {
    name: kind for group in GROUPS.values() for name, kind in group.items()
}
