"""Known texts in a job on a simulated GPU, with the real loop, lookup and `auto`: a draft is
accepted if the text continues with it. No tests."""

import random

import torch
from fakes import FakeGraphs, Ticks
from simulated import Simulated

from bass_cli.drafts.factory import NoDrafter
from bass_cli.drafts.ngram import LookupDrafter
from bass_cli.engine.batch import Row
from bass_cli.engine.clock import Forecast
from bass_cli.engine.contracts import PendingWork
from bass_cli.lengths.controllers import Fixed

LIMIT, PROMPT, WORDS = 256, 150, 3000
COLLECTING, WRITING = 0.0004, 0.0002  # seconds of the host before a round is launched, and after


class Texts:
    """The texts of `n` samples of each prompt. Each follows one of its prompt's three stories,
    of which the share `copied` repeats earlier text, and leaves it with probability `off` at
    every token. Texts of prompts from number `until` on are random. Samples have `mean` tokens
    on average."""

    def __init__(self, *, prompts, n, off, copied, until=1000, mean=49, seed=1):
        self._chance = chance = random.Random(seed)
        self.n, self.texts, self.ends, self.prompts = n, {}, {}, {}
        for number in range(prompts):
            key = str(number)
            self.prompts[key] = [chance.randrange(WORDS) for _ in range(PROMPT)]
            stories = [self._story(self.prompts[key], copied) for _ in range(3)]
            for sample in range(n):
                left = off if number < until else 1.0
                self.texts[key, sample] = self._told(stories, left)
                self.ends[key, sample] = max(8, min(LIMIT, int(chance.expovariate(1 / mean))))

    def _story(self, prompt, copied):
        found, chance = list(prompt), self._chance
        while len(found) < PROMPT + 2 * LIMIT:
            if chance.random() < copied:
                at = chance.randrange(len(found) - 12)
                found += found[at : at + chance.randrange(4, 12)]
            else:
                found += [chance.randrange(WORDS) for _ in range(3)]
        return found[PROMPT:]

    def _told(self, stories, off):
        chance, found, at = self._chance, [], 0
        story = chance.choice(stories)
        while len(found) < LIMIT + 80:
            if chance.random() < off:
                found.append(chance.randrange(WORDS))
                at += chance.choice((0, 1, 1, 2))
                story = chance.choice(stories) if chance.random() < 0.3 else story
            else:
                found.append(story[at])
                at += 1
        return found


class OneGpu(FakeGraphs):
    """The 1.5B on an H200: 18 ms for a pass that runs uncaptured or is captured, except the
    first of a process, which compiles; 2.35 ms for a replay, and 4 us for each token in it."""

    def run(self, key, function):
        compiling, self.ticks.seconds = not self._warm, self.ticks.seconds - 0.05 + 0.018
        self.ticks.seconds += 0.3 if compiling else 0.0
        return super().run(key, function)

    def capture(self, key, function):
        self.ticks.seconds += 0.018 - 0.13
        super().capture(key, function)

    def pass_seconds(self, key):
        return 0.00235 + 4e-6 * key.rows * (key.width + 1)


class Reader(LookupDrafter):
    """A lookup takes 50 us and 12 us a row; learning takes 6 us a row."""

    def __init__(self, ticks):
        super().__init__()
        self.looks, self._ticks = 0, ticks

    def propose(self, batch, length):
        self._ticks.seconds += 50e-6 + 12e-6 * len(batch)
        self.looks += 1
        return super().propose(batch, length)

    def learn(self, batch):
        self._ticks.seconds += 6e-6 * len(batch)
        super().learn(batch)


class Retold(Simulated):
    """Rows become what `texts` says."""

    def __init__(self, texts, lengths, *, rows, drafter=None):
        super().__init__(
            lengths,
            0.0,
            rows=rows,
            drafter=drafter or NoDrafter(),
            graphs=OneGpu(drafter._ticks if drafter is not None else Ticks()),
        )
        self._texts, self._told = texts.texts, {}

    def _result(self, width):
        drafts = self._planner.host_drafts.placed(self.batch.rows, width).tokens.tolist()
        table = torch.zeros(self.batch.rows, 2 * width + 3, dtype=torch.int64)
        for place, row in enumerate(self.batch.live_rows):
            at, text = self._told.get(row, 0), self._texts[row.key, row.sample]
            pairs = enumerate(zip(drafts[place], text[at:], strict=False))
            kept = next((i for i, (token, due) in pairs if token != due), width)
            self._told[row] = at + kept + 1
            table[place, : width + 2] = torch.tensor([kept, *text[at : at + width + 1]])
        return table


def seconds_of_texts(loop, texts):
    """Run the job as a scheduler does and return its seconds."""
    began, over, waiting = loop.clock.now(), [], list(texts.texts)
    forecast = Forecast(len(waiting))
    forecast.begin(len(waiting))
    while waiting or len(loop.batch) > len(over):
        rows = []
        while waiting and len(loop.batch) - len(over) + len(rows) < loop.batch.capacity:
            key, sample = waiting.pop(0)
            if sample == 0:
                loop.open(key, texts.prompts[key])
            rows.append(Row(key, sample, 0, texts.prompts[key], LIMIT))
        if rows or over:
            loop.swap_rows(over, rows)
        typical = forecast.length(float(loop.batch.generated().mean()))
        pending_work = PendingWork(len(waiting) * min(typical, LIMIT), typical)
        loop.launch(pending_work=pending_work)
        loop.clock.now.seconds += WRITING
        loop.round(pending_work=pending_work, ahead=True)
        loop.clock.now.seconds += COLLECTING
        over = [
            place
            for place, row in enumerate(loop.batch.live_rows)
            if row.generated >= texts.ends[row.key, row.sample]
        ]
        for place in over:
            row = loop.batch.live_rows[place]
            row.truncate(texts.ends[row.key, row.sample])
            forecast.end(row.generated)
    loop.swap_rows(over, [])
    for key in texts.prompts:
        loop.close(key)
    return loop.clock.now() - began


def speeds(lengths, texts, *, rows, jobs=2):
    """Return the speed of consecutive jobs in one process relative to plain decoding."""
    found, drafter = [], Reader(Ticks())
    plain = Retold(texts, Fixed(0), rows=rows)
    loop = Retold(texts, lengths, rows=rows, drafter=drafter)
    for _ in range(jobs):
        found.append(seconds_of_texts(plain, texts) / seconds_of_texts(loop, texts))
    return found
