"""Measure what log-probabilities cost: plain and drafted rounds with random weights of a shape.

    python benchmarks/logprobs.py [--shape qwen2.5-7b] [--draft-shape qwen2.5-0.5b] [--rows 32]
        [--tokens 128] [--draft-length 4] [--acceptance 0.85] [--repeats 5] [--device auto]

For each method and for no log-probabilities, --logprobs 0 and --logprobs 20, in turn: median and
range of milliseconds per token of a row, its ratio to none, and the milliseconds of the host that
make and write one sample's line, which the device does not wait for unless all rows end at once.
"""

import argparse
import json
import statistics
import time

from bass_cli.bench.figures import latency
from bass_cli.bench.floor import ceilings_of
from bass_cli.bench.preparation import Bench, build_loops, build_models
from bass_cli.bench.runs import Key
from bass_cli.bench.settings import make_settings
from bass_cli.bench.texts import texts_for
from bass_cli.config.machine_commands import BenchArgs
from bass_cli.engine.batch import Row
from bass_cli.engine.host_state import Report
from bass_cli.io.console import Screen
from bass_cli.io.results import reported

TOPS = (None, 0, 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen2.5-7b")
    parser.add_argument("--draft-shape", default="qwen2.5-0.5b")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--acceptance", default="0.85")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    settings = make_settings(
        BenchArgs(
            shape=args.shape,
            draft_shape=args.draft_shape,
            acceptance=[args.acceptance],
            batch_sizes=str(args.rows),
            new_tokens=args.tokens,
            methods=f"plain,{args.draft_length}",
            device=args.device,
        )
    )
    texts, models = texts_for(settings, None), build_models(settings, None)
    longest = max(len(text.tokens) for kind in texts.values() for text in kind)
    loops = build_loops(models, settings, context=longest + settings.new_tokens)
    ceilings = ceilings_of(models.target.device, models.target.dtype)
    bench = Bench(settings, None, models, loops, texts, ceilings, Screen(quiet=True))
    print("method      logprobs   ms per token      range   ratio   ms per line", flush=True)
    for method in settings.methods:
        times: dict[int | None, list[float]] = {top: [] for top in TOPS}
        lines: dict[int | None, float] = {}
        for repeat in range(args.repeats + 1):  # the first one compiles and captures
            for top in TOPS:
                key = Key(args.rows, method)
                rows = bench.rows(key, repeat)
                for row in rows:
                    row.report = Report(top or 0)
                run = bench.run(key, rows)
                if repeat:
                    times[top].append(latency(run).last)
                    lines[top] = line_of(rows[0], top)
        for top in TOPS:
            found = times[top]
            median = statistics.median(found)
            print(
                f"{method:<11} {top!s:<10} {median:>12.3f}   {min(found):.3f}-{max(found):.3f} "
                f"{median / statistics.median(times[None]):>7.3f} {1000 * lines[top]:>13.2f}",
                flush=True,
            )
    models.close()


def line_of(row: Row, top: int | None) -> float:
    """Return the seconds that a sample's log-probabilities take as JSON."""
    began = time.perf_counter()
    json.dumps(reported(top, row.log_probabilities, row.entries(), processed=False))
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
