"""Draw a document as a PNG: ms per token and speed-up against batch size, one line per method."""

from __future__ import annotations

from typing import Any

from bass_cli.io.saving import save_chart


def draw(document: dict[str, Any], file: str) -> None:
    """Draw both charts and save them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.5))
    for method, cells in by_method(document).items():
        batches = [cell["batch"] for cell in cells]
        lows, highs = zip(*(cell["ms_per_token_spread"]["mean"] for cell in cells), strict=True)
        drawn = axes[0].plot(
            batches, [cell["ms_per_token"]["mean"] for cell in cells], marker="o", label=method
        )
        axes[0].fill_between(batches, lows, highs, alpha=0.15, color=drawn[0].get_color())
        axes[1].plot(batches, [cell["speedup"] for cell in cells], marker="o", label=method)
    _label(axes, document)
    figure.tight_layout()
    save_chart(figure, file)
    pyplot.close(figure)


def by_method(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Group the cells by method, in the order of batch sizes."""
    found: dict[str, list[dict[str, Any]]] = {}
    for cell in sorted(document["cells"], key=lambda cell: cell["batch"]):
        found.setdefault(cell["method"], []).append(cell)
    return found


def _label(axes: Any, document: dict[str, Any]) -> None:
    batches = document["settings"]["batch_sizes"]
    for axis, title in zip(
        axes, ("ms per token of a sequence, mean row", "speed-up over plain decoding"), strict=True
    ):
        axis.set_xscale("log", base=2)
        axis.set_xticks(batches, [str(batch) for batch in batches])
        axis.set_xlabel("batch size")
        axis.set_title(title)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[1].axhline(1.0, color="black", linewidth=0.8)
    axes[0].legend(fontsize="small")
    axes[0].figure.suptitle(
        f"{document['pair']['label']}; {document['machine']['name']}", fontsize="medium"
    )
