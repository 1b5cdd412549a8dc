"""The chart of the README: milliseconds per token against sequences decoded at once.

    python benchmarks/speed_chart.py docs/data/speed-h100.json docs/speed.png

The data file holds the measured figures. docs/PERFORMANCE.md has the commands behind them.
"""

import json
import sys

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

STYLES = {
    "vLLM 0.33, plain": {"color": "#c0392b", "marker": "s"},
    "bass, plain": {"color": "#1f5fa8", "marker": "o"},
    "memory floor of plain decoding": {"color": "#777777", "linestyle": "--"},
    "bass, parallel 0.5B draft, auto": {"color": "#1e8449", "marker": "o"},
}


def main(source: str, target: str) -> None:
    with open(source, encoding="utf-8") as file:
        data = json.load(file)
    pyplot.rcParams.update({"font.size": 12})
    figure, axes = pyplot.subplots(figsize=(8, 4.6), facecolor="white")
    for name, points in data["series"].items():
        rows, values = zip(*((int(row), value) for row, value in points.items()), strict=True)
        axes.plot(rows, values, linewidth=2.2, markersize=5, label=name, **STYLES[name])
    axes.set_xscale("log", base=2)
    ticks = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_ylim(0, None)
    axes.set_xlabel("sequences decoded at once")
    axes.set_ylabel("ms per token and sequence")
    axes.set_title("In bf16 bass is ahead of vLLM at every batch size, with a draft 2 to 5 times")
    axes.title.set_fontsize(12)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize=10, framealpha=0.95)
    figure.text(0.99, 0.005, data["machine"], ha="right", fontsize=9, color="#555555")
    figure.tight_layout()
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
