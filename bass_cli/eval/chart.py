"""Draw a sweep as two charts in one PNG: quality against budget.

One chart is for the sample ranked first, one for the best sample.
"""

from __future__ import annotations

from typing import Any

from bass_cli.io.saving import save_chart

_NAMES = {
    "plain": "plain decoding",
    "single": "single-sequence speculation",
    "batched": "batched speculation",
}


def draw(document: dict[str, Any], file: str) -> None:
    """Write the charts of a sweep's document (sweep.py) to `file`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    code = "pass_first" in document["reports"][0]
    titles = ("Pass@First", "Pass@All") if code else ("ROUGE-L of the first", "ROUGE-L of the best")
    for axis, title, which in zip(axes, titles, (0, 1), strict=True):
        for method, name in _NAMES.items():
            points = sorted(
                (one["budget"], quality(one)[which])
                for one in document["reports"]
                if one["method"] == method
            )
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=name)
        axis.set_xscale("log")
        axis.set_xticks(document["budgets"], [f"{budget:g}" for budget in document["budgets"]])
        axis.minorticks_off()
        axis.set_xlabel("budget per prompt, seconds")
        axis.set_title(title)
        axis.grid(alpha=0.3)
    axes[0].set_ylim(0, 1.05 * max(max(quality(one)) for one in document["reports"]) or 1)
    axes[0].legend(fontsize="small")
    figure.suptitle(
        f"{document['task']}, {document['pair']}, n = {document['n']}", fontsize="medium"
    )
    figure.tight_layout()
    save_chart(figure, file)
    pyplot.close(figure)


def quality(report: dict[str, Any]) -> tuple[float, float]:
    """Return the quality of the sample ranked first and of the best, as fractions of 1."""
    if "rouge" in report:
        return report["rouge"]["first"]["rougeL"], report["rouge"]["best"]["rougeL"]
    return report["pass_first"], report["pass_all"]
