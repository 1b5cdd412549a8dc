"""A chart of documents that `bass bench --json` wrote: ms per token of a sequence by method, with
the floor.

python benchmarks/chart.py CHART.png FILE.json...
"""

import json
import sys

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def main(target: str, files: list[str]) -> None:
    figure, axes = pyplot.subplots(
        1, len(files), figsize=(4.2 * len(files), 3.6), sharey=True, squeeze=False
    )
    for axis, file in zip(axes[0], files, strict=True):
        with open(file, encoding="utf-8") as source:
            document = json.load(source)
        cells = document["cells"]
        names = [
            f"length {cell['method']}" if cell["method"].isdigit() else cell["method"]
            for cell in cells
        ]
        means = [cell["ms_per_token"]["mean"] for cell in cells]
        bars = axis.bar(names, means, color="tab:blue")
        axis.bar_label(bars, fmt="%.2f")
        axis.plot(
            names,
            [cell["floor_ms_per_token"]["mean"] for cell in cells],
            "k_",
            markersize=26,
            label="floor",
        )
        batches = ", ".join(str(b) for b in document["settings"]["batch_sizes"])
        axis.set_title(
            f"{document['pair'].get('label', document['pair'])}\nbatch {batches}", fontsize=9
        )
        axis.tick_params(axis="x", rotation=30)
        axis.grid(axis="y", alpha=0.3)
    axes[0][0].set_ylabel("ms per token of a sequence, mean row")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
