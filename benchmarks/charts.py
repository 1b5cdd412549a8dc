"""Draw the charts of the README from the figures in docs/data.

    python benchmarks/charts.py speed docs/data/speed-h100.json docs/speed.png
    python benchmarks/charts.py deadlines docs/data/deadlines-h100.json docs/deadlines.png

`speed` is milliseconds per token against sequences decoded at once, `deadlines` the share of
solved problems against the time limit. The data files hold measured figures; docs/PERFORMANCE.md
and docs/RESULTS.md have the commands behind them.
"""

import argparse
import json

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

STYLES = {
    "vLLM 0.33, plain": {"color": "#c0392b", "marker": "s"},
    "bass, plain": {"color": "#1f5fa8", "marker": "o"},
    "memory floor of plain decoding": {"color": "#777777", "linestyle": "--"},
    "bass, parallel 0.5B draft, auto": {"color": "#1e8449", "marker": "o"},
    "plain decoding, 16 sequences": {"color": "#1f5fa8", "marker": "o"},
    "speculation, one sequence": {"color": "#b9770e", "marker": "^"},
    "speculation, 16 sequences": {"color": "#1e8449", "marker": "o"},
}


def speed(data):
    figure, axes = pyplot.subplots(figsize=(8, 4.6))
    for name, points in data["series"].items():
        rows, values = zip(*((int(row), value) for row, value in points.items()), strict=True)
        axes.plot(rows, values, linewidth=2.2, markersize=5, label=name, **STYLES[name])
    axes.set_xscale("log", base=2)
    ticks = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_ylim(0, None)
    axes.set_xlabel("sequences decoded at once")
    axes.set_ylabel("ms per token and sequence")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize=10, framealpha=0.95)
    return figure


def deadlines(data):
    figure, panels = pyplot.subplots(1, 2, figsize=(8, 4.4), sharey=True)
    for axes, (which, title) in zip(
        panels,
        enumerate(("Pass@First: the likeliest sample", "Pass@All: any of 16 samples")),
        strict=True,
    ):
        for name, points in data["series"].items():
            budgets = list(map(float, points))
            shares = [both[which] for both in points.values()]
            axes.plot(budgets, shares, linewidth=2.2, markersize=5, label=name, **STYLES[name])
        axes.set_xscale("log", base=2)
        axes.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
        axes.minorticks_off()
        axes.set_ylim(0, 100)
        axes.set_xlabel("ms for each problem")
        axes.set_title(title, fontsize=11)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("problems solved, %")
    panels[0].legend(loc="lower right", fontsize=9, framealpha=0.95)
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("speed", "deadlines"))
    parser.add_argument("source", help="the .json file of figures")
    parser.add_argument("target", help="the .png file to write")
    args = parser.parse_args()
    with open(args.source, encoding="utf-8") as file:
        data = json.load(file)
    pyplot.rcParams.update({"font.size": 12, "figure.facecolor": "white"})
    figure = {"speed": speed, "deadlines": deadlines}[args.kind](data)
    figure.suptitle(data["title"], fontsize=12)
    figure.text(0.99, 0.005, data["machine"], ha="right", fontsize=8, color="#555555")
    figure.tight_layout()
    figure.savefig(args.target, dpi=120)


if __name__ == "__main__":
    main()
