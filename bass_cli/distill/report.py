"""Make the report of a distillation, and a short table of it."""

from __future__ import annotations

from typing import Any

from bass_cli.distill.trainer import Progress


def report_of(
    progress: Progress,
    after: dict[str, Any],
    samples: dict[str, int],
    seconds: dict[str, float | None],
    training: dict[str, Any],
    made_with: dict[str, Any],
) -> dict[str, Any]:
    """Make the report, ready for JSON.

    Args:
        after: acceptance on held-out texts (held_out.py) by kind of draft; "chain" is the model
            before the training, drafting token by token.
        seconds: of all runs together, by step; None if unknown.
        made_with: target, device and versions.
    """
    return {
        "kind": "bass distill",
        "before": progress.facts["before"],
        "after": after,
        "looks": progress.facts.get("looks", []),
        "samples": samples,
        "training": {
            **training,
            "steps": progress.step,
            "tokens": progress.tokens,
            "guesses": progress.guesses,
            "loss": progress.loss,
        },
        "seconds": {k: None if s is None else round(s, 1) for k, s in seconds.items()},
        "made_with": made_with,
    }


def table(document: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Make the table: accepted drafts of a block, and acceptance by position (shared coupling).

    The acceptance of a position counts drafts whose predecessors were all accepted.
    """
    found = {
        f"{moment} {name}": rates
        for moment in ("before", "after")
        for name, rates in document[moment].items()
    }
    longest = max(len(rates["shared"]) for rates in found.values())
    columns = ["accepted drafts", "in all", *(str(place) for place in range(1, longest + 1))]
    lines = [
        [
            name,
            "-" if rates["kept"] is None else f"{rates['kept']:.2f}",
            *(f"{share:.3f}" for share in rates["shared"]),
        ]
        for name, rates in found.items()
    ]
    return columns, lines
