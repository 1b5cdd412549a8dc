"""How many rows a cache serves whose rows grow, against one that keeps place for the longest:
simulated samples in the allocator, the admission and the rows put back of a job; no model.

    python benchmarks/pieces.py [--longest 4096] [--lengths 20 2000] [--samples 8192] [--rows 100]

One line each: rows on average until the last sample begins, rounds in all, and of all tokens the
share that was drawn again.
"""

from __future__ import annotations

import argparse
import math

import numpy
import torch

from bass_cli.engine.batch import Batch, Row, beyond
from bass_cli.engine.forecast import Forecast, expected
from bass_cli.engine.host_state import LENGTH
from bass_cli.models.block_allocator import Pieces


def simulate(lengths: numpy.ndarray, *, limit: int, pieces: Pieces, rows: int) -> tuple:
    """Samples of these lengths in a store of such pieces, with up to so many rows: rows on
    average while samples wait, rounds, the share of tokens drawn in vain."""
    batch = Batch(rows=rows, context=8, device=torch.device("cpu"), pieces=pieces)
    batch._send = lambda *_: None  # type: ignore[method-assign]  # nothing reads the device
    forecast, waiting = Forecast(len(lengths)), list(range(len(lengths)))[::-1]
    live, vain, rounds, crowded, ended = [], 0, 0, False, list[int]()
    while waiting or len(batch):
        typical = forecast.becomes(limit, int(batch.generated().sum()))
        room = 0 if crowded and len(ended) < len(batch) else batch.room(typical, ended=ended)
        new = [waiting.pop() for _ in range(min(room, len(waiting)))]
        batch.swap_rows(ended, [Row("p", sample, 0, [1], limit) for sample in new])
        while (fails := batch.grow()[1]) is not None:
            back = batch.surplus(fails)
            crowded = True
            for place in back:
                vain += batch.hosts[place].generated
                waiting.append(batch.hosts[place].sample)
            batch.swap_rows(back, [])
        if waiting:
            live.append(len(batch))
        rounds += 1
        batch.host_state.numbers[: len(batch), LENGTH] += 1
        ended = [i for i, row in enumerate(batch.hosts) if row.generated >= lengths[row.sample]]
        for place in ended:
            forecast.end(batch.hosts[place].generated)
            crowded = False
        if not waiting and len(ended) == len(batch):
            break
    return float(numpy.mean(live)), rounds, vain / (vain + int(lengths.sum()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--longest", type=int, default=4096, help="as --max-new-tokens")
    parser.add_argument("--lengths", type=int, nargs=2, default=(20, 2000))
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=100, help="that fit at their longest")
    args = parser.parse_args()
    low, high = (math.log(one) for one in args.lengths)
    lengths = numpy.exp(numpy.random.default_rng(0).uniform(low, high, args.samples)).astype(int)
    beside = beyond(8) + 3
    whole = args.longest + beside
    most = 2 ** int(math.log2(whole // 256))
    size = -(-whole // most)
    rows = int(args.rows * whole // (expected(args.longest) + beside))
    grown = Pieces(args.rows * whole // size, most, size, beside)
    for name, pieces, places in (
        ("at their longest", Pieces(args.rows, 1, whole, beside), args.rows),
        ("as they grow", grown, rows),
    ):
        mean, rounds, vain = simulate(lengths, limit=args.longest, pieces=pieces, rows=places)
        print(
            f"{name}: {mean:.0f} of {places} rows on average, {rounds} rounds, "
            f"{vain:.1%} of the tokens drawn in vain"
        )


if __name__ == "__main__":
    main()
