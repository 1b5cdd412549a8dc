"""What the host does for a job: microseconds a round, a token and a sample (its end and the next
one's admission), with a device that takes no time.

    python benchmarks/host.py [--rows 32 512] [--draft-length 0] [--tokens 64] [--n 8] [--stop TEXT]
        [--ahead] [--json] [--split 15]

The real Conductor, loop, batch and cache books on a CPU. Rounds are "replayed": their tables are
drawn before any clock starts, and no model runs. Rounds without ends are timed in a job whose
samples never end; what is left of a job of short samples (--tokens on average) after so many such
rounds is its ends and admissions. --split N prints where the time goes, from a profile: the N
functions with most of it. Seconds are those of the processor, so company does not count. Lines
are not written (bass_cli/io/results.py does that).
"""

import argparse
import cProfile
import json
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import cast

import numpy
import torch
from torch import Tensor

from bass_cli.config.job import Job, Pair, Sampling, Speculation, load_pair
from bass_cli.drafts.factory import NoDrafter
from bass_cli.engine.batch import Batch
from bass_cli.engine.clock import Clock
from bass_cli.engine.graphs import Graphs, Running
from bass_cli.engine.loop import AheadPolicy, Loop
from bass_cli.formats.sources import locate
from bass_cli.formats.tokenizer import Tokenizer
from bass_cli.io.prompts import Prompt
from bass_cli.lengths.controllers import make_lengths
from bass_cli.models.decoder import Decoder
from bass_cli.models.kv_cache import Layers
from bass_cli.models.runner import Runner
from bass_cli.run.scheduler import Conductor

PROMPT = "def add(a, b):\n    " + '"""Adds two numbers, a and b, and gives their sum."""\n' * 8
TABLES = 64  # that are drawn before; they are used in turn


class Nothing:
    """A decoder that computes nothing: two layers of one small head."""

    class spec:  # noqa: N801
        kv_heads, head_size = 1, 8

    cached = (Layers(2, 1, 8),)
    layers, dtype, device = (0, 1), torch.float32, torch.device("cpu")
    reader = ranks = None

    def forward(self, tokens, step, *, last=None):
        return None


class Free(Graphs):
    """Replays take no time, and every shape is captured at once."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.enabled = True
        self.function: Callable[[Hashable], Callable[[], Tensor]]

    def holds(self, key):
        return True

    def launch(self, key):
        found = self.function(key)()
        return Running(lambda: True, lambda: found)


class Always(AheadPolicy):
    """Rounds are launched ahead whatever it brings."""

    def pays(self, waiting):
        return True


class Drafter(NoDrafter):
    """On the device, as a draft model is; it keeps no books."""

    longest = 64


class HostLoop(Loop):
    """Its rounds' tables are drawn before."""

    def draw(self, width, *, mean, text, eos):
        """Tables of rounds of `width` drafts; a token is one of `text`, and the last of its
        sample once in `mean`."""
        chance = numpy.random.default_rng(0)
        rows, self._tables, self._at = self.batch.capacity, [], 0
        for _ in range(TABLES):
            tokens = chance.choice(text, (rows, width + 1))
            if mean:
                tokens[chance.random(tokens.shape) < 1 / mean] = eos
            scores = chance.standard_normal((rows, width + 1)).astype(numpy.float32)
            kept = chance.integers(0, width + 1, (rows, 1))
            table = numpy.concatenate((kept, tokens, scores.view(numpy.int32)), axis=1)
            self._tables.append(torch.from_numpy(table.astype(numpy.int64)))

    def function(self, shape):
        def replay():
            self._at = (self._at + 1) % TABLES
            return self._tables[self._at][: shape.rows]

        return replay


def conductor(args, rows, *, mean, limit, count, tokenizer):
    """A job of so many prompts on an empty loop."""
    graphs, nothing = Free(), cast(Decoder, Nothing())
    loop = HostLoop(
        batch=Batch(rows=rows, context=1024, device=torch.device("cpu")),
        target=Runner(nothing, rows=rows, span=limit + 80, lag=1),
        drafter=Drafter(),
        lengths=make_lengths(args.draft_length, limit=8, coupling="shared"),
        coupling="shared",
        clock=Clock(),
        graphs=graphs,
    )
    graphs.function = loop.function
    if args.ahead:
        loop._ahead_policy = Always()
    eos = tokenizer.eos_ids[0]
    text = tokenizer.encode(Path(__file__).read_text(), 100_000)  # newlines as often as in code
    loop.draw(args.draft_length, mean=mean, text=text, eos=eos)
    job = Job(
        pair=Pair(name="nothing", target="nothing"),
        sampling=Sampling(max_new_tokens=limit, stop=tuple(args.stop)),
        speculation=Speculation(length=args.draft_length),
        n=args.n,
    )
    return Conductor(job, tokenizer, loop, context=100_000, eos_ids={eos}, count=count)


def prompts(count):
    """No two begin alike: what they have in common would only be copied."""
    for number in range(count):
        yield Prompt(
            id=f"p{number}",
            text=f"# {number}\n{PROMPT}",
            messages=None,
            meta={},
            reference=None,
            place="host.py",
        )


def timed(one, count, profile):
    """(seconds, rounds, samples, tokens) of the job."""
    seen = [0]
    one._on_round = lambda done: seen.__setitem__(0, seen[0] + 1)
    if profile is not None:
        profile.enable()
    began = time.process_time()
    found = list(one.run(prompts(count), ()))
    seconds = time.process_time() - began
    if profile is not None:
        profile.disable()
    return seconds, seen[0], len(found), sum(c.tokens for c in found)


def measure(args, rows, tokenizer, profile=None):
    """Microseconds: a round without ends, a token of it, and a sample's end and admission."""
    limit = 300 * (args.draft_length + 1)
    count = max(rows // args.n, 1)
    one = conductor(args, rows, mean=0, limit=limit, count=count, tokenizer=tokenizer)
    steady = list(one.run(prompts(count), ())) and None
    parts = []
    for mean, jobs in ((0, 1), (args.tokens, args.jobs)):
        whole = conductor(
            args, rows, mean=mean, limit=limit, count=count * jobs, tokenizer=tokenizer
        )
        parts.append(timed(whole, count * jobs, profile if mean else None))
    (steady, rounds, samples, tokens), (seconds, more, ended, _) = parts
    # What the ends of the steady job took is small beside its rounds, but not nothing.
    a_sample = (seconds - steady * more / rounds) / (ended - samples * more / rounds)
    a_round = (steady - samples * a_sample) / rounds
    return {
        "rows": rows,
        "draft_length": args.draft_length,
        "us_a_round": 1e6 * a_round,
        "us_a_token": 1e6 * a_round * rounds / tokens,
        "us_a_sample": 1e6 * a_sample,
        "us_with_all": 1e6 * seconds / more,
        "samples": ended,
        "rounds": more,
    }


def split(profile, found, most):
    """The functions with most time of their own, by round and by sample of the short samples."""
    profile.create_stats()
    rows = sorted(profile.stats.items(), key=lambda item: -item[1][2])[:most]
    for (file, line, name), (_, calls, own, whole, _) in rows:
        where = f"{Path(file).name}:{line} {name}" if line else name
        print(
            f"    {1e6 * own / found['rounds']:8.1f} us a round  "
            f"{1e6 * own / found['samples']:7.2f}"
            f" us a sample  {calls / found['rounds']:7.1f} calls a round"
            f"  {1e6 * whole / found['rounds']:8.1f} us with callees  {where}"
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 512])
    parser.add_argument("--draft-length", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=8, help="times as many samples as rows")
    parser.add_argument("--stop", action="append", default=[])
    parser.add_argument("--ahead", action="store_true", help="launch every round ahead")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--split", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    target = load_pair("smollm2").target
    tokenizer = Tokenizer.load(locate(target, folder=None))
    for rows in args.rows:
        found = measure(args, rows, tokenizer)
        if args.json:
            print(json.dumps(found))
        else:
            print(
                f"{rows} rows, {args.draft_length} drafts: {found['us_a_round']:.0f} us a round "
                f"without ends, {found['us_a_token']:.2f} us a token, "
                f"{found['us_a_sample']:.0f} us "
                f"for a sample's end and admission, {found['us_with_all']:.0f} us a round with "
                f"all ({found['samples']} samples, "
                f"{found['rounds']} rounds)",
                flush=True,
            )
        if args.split:
            profile = cProfile.Profile(time.process_time)
            split(profile, measure(args, rows, tokenizer, profile), args.split)


if __name__ == "__main__":
    main()
