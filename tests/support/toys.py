"""Toy models whose distribution can be enumerated, and a driver that runs a Loop without files
or tokenizers. No tests."""

from typing import NamedTuple

import torch
from fakes import FakeGraphs

from bass_cli.drafts.factory import DraftParts, make_drafter
from bass_cli.engine.batch import Batch, Row
from bass_cli.engine.clock import Clock
from bass_cli.engine.contracts import Drafter, DraftLength, Proposal
from bass_cli.engine.host_state import NO_REPORT
from bass_cli.engine.loop import Loop
from bass_cli.engine.sampling import RowSampling
from bass_cli.lengths.controllers import Fixed
from bass_cli.models import runner as runner_module
from bass_cli.models.decoder import Decoder
from bass_cli.models.heads import Head
from bass_cli.models.kv_cache import KVCache
from bass_cli.models.runner import Runner

SPAN = 80


class Markov:
    """A model whose logits depend on the token fed and its position: table [P, V, V], position
    modulo P. It has the interface of a Runner, as target (1 pending token) and draft (2)."""

    version, rows, device, packs = 0, 1 << 18, torch.device("cpu"), False

    def __init__(self, table, pending):
        self.table, self.pending, self.cache = table, pending, self
        self.states = None  # no recurrent ones
        self._bases, self._prompts = {}, {}

    def open(self, key, tokens, in_time=None):
        self._prompts[key] = max(len(tokens) - self.pending, 0)
        return in_time is None or in_time(len(tokens))

    def close(self, key):
        pass

    def follow(self, change):
        for row in change.ended:
            del self._bases[row]
        for source, target in change.moved:
            self._bases[target] = self._bases.pop(source)
        for places, key in change.begun:
            self._bases |= dict.fromkeys(places, self._prompts[key])

    def base(self, row):
        return self._bases[row]

    def bases(self, rows):
        return torch.tensor([self._bases.get(row, 0) for row in range(rows)])  # 0 for padding rows

    def forward(self, tokens, positions, ends, *, last=None):
        logits = self.table[positions % len(self.table), tokens.clamp(max=self.table.shape[1] - 1)]
        return logits if last is None else logits[:, -last:]

    def feed(self, tokens, positions, ends):
        pass

    def prepare_prompts(self):
        pass


class Guess(Drafter):
    """A point-mass drafter without memory: always proposes (last token + 1) modulo `vocab`, and
    so on from there."""

    def __init__(self, vocab):
        self._vocab = vocab

    def propose(self, batch, length):
        last, _ = batch.last(1)
        return Proposal((last + 1 + torch.arange(length)) % self._vocab, None)


class AtOnce(NamedTuple):
    """A model that drafts in one pass: a Decoder or a toy runner, and the id of its mask token."""

    model: object
    mask: int


class Reactive(DraftLength):
    """A controller that reacts strongly to acceptance and returns plain rounds too: the
    distribution must not depend on it."""

    def __init__(self):
        self._length, self._rounds = 2, 0

    def next(self, rows, inputs=None):
        self._rounds += 1
        return 0 if self._rounds % 4 == 0 else self._length

    def observe(self, done):
        self._length = 1 + (sum(done.accepted) + done.width) % 4


def drive(loop, rows, *, on_round=None, ahead=False):
    """Run Rows (of prompts identified by their key) to their limits; returns {(key, sample):
    generated tokens}."""
    waiting, opened, out, ended = list(rows), set(), {}, []
    while waiting or len(loop.batch) > len(ended):
        room = loop.batch.capacity - len(loop.batch) + len(ended)
        new, waiting = waiting[:room], waiting[room:]
        for row in new:
            if row.key not in opened:
                opened.add(row.key)
                loop.open(row.key, row.tokens)
        loop.swap_rows(ended, new)
        for key in {row.key for row in new} - {row.key for row in waiting}:
            loop.close(key)
        done = loop.round(ahead=ahead)
        live_rows = loop.batch.live_rows
        if on_round:
            on_round(done, live_rows)
        ended = [place for place, row in enumerate(live_rows) if row.room <= 0]
        for row in (live_rows[place] for place in ended):
            out[row.key, row.sample] = row.tokens[row.prompt_length :][: row.limit]
    loop.swap_rows(ended, [])
    return out


def begin(loop, *rows):
    """Open the prompts of rows, and admit the rows."""
    for row in rows:
        if row is next(one for one in rows if one.key == row.key):
            loop.open(row.key, row.tokens)
    loop.admit(*rows)


def rows_for(prompts, n=2, *, limit=12, seed=0, report=NO_REPORT, **sampling):
    """Return n Rows for each prompt with unequal limits, so that they end one by one.

    limit, report and values of sampling may be functions of a prompt's and a sample's number.
    """

    def row(p, s):
        def own(value):
            return value(p, s) if callable(value) else value

        room = own(limit) if callable(limit) else limit - (s + p) % 3
        params = RowSampling(**{name: own(value) for name, value in sampling.items()})
        return Row(str(p), s, seed, list(prompts[p]), room, params, own(report))

    return [row(p, s) for p in range(len(prompts)) for s in range(n)]


def again(row):
    """Return a Row of the same sample that has not begun."""
    return Row(row.key, row.sample, row.seed, row.prompt, row.limit, row.sampling)


def loop_for(
    target,
    draft,
    *,
    rows,
    lengths=None,
    coupling="shared",
    acceptance=None,
    cut=None,
    graphs=None,
    span=SPAN,
    context=128,
    blocks=None,
):
    """Return a Loop on the target's device. target: a Decoder or a toy; draft: a Decoder, a toy
    runner, either AtOnce, a head, a drafter, or the name of one: "none", "lookup:SOURCES"."""
    if isinstance(target, Decoder):
        read = target.read_by(draft) if isinstance(draft, Head) else target
        target = Runner(read, rows=rows, span=span, pending=1, blocks=blocks)
    if isinstance(draft, Head):
        parts = DraftParts(runner=target, head=draft, coupling=coupling, temperature=None)
        draft = make_drafter("heads:x", parts)
    vocab = target.decoder.vocab if isinstance(target, Runner) else target.table.shape[-1]
    return Loop(
        batch=Batch(rows=rows, context=context, device=target.device, vocab=vocab, blocks=blocks),
        target=target,
        drafter=drafter_for(draft, rows=rows, span=span, coupling=coupling, blocks=blocks),
        controller=lengths or Fixed(3),
        coupling=coupling,
        clock=Clock(graphs.ticks) if isinstance(graphs, FakeGraphs) else Clock(),
        graphs=graphs,
        acceptance=acceptance,
        cut=cut,
    )


def drafter_for(draft, *, rows, span=SPAN, coupling="shared", blocks=None):
    """Return the drafter that `loop_for` makes of its draft."""
    words = {"runner": None}
    if isinstance(draft, (AtOnce, Decoder, Markov, Runner)):
        at_once = isinstance(draft, AtOnce)
        model = draft.model if at_once else draft
        if isinstance(model, Decoder):
            model = Runner(model, rows=rows, span=span, pending=2, blocks=blocks)
        words = {"runner": model, "mask": draft.mask if at_once else None}
        draft = "parallel:model" if at_once else "model"
    if isinstance(draft, str):
        return make_drafter(draft, DraftParts(**words, coupling=coupling, temperature=None))
    return draft


def store_in_eight_bits(patch):
    """Give every runner that is made from now on a cache in eight bits. patch: a MonkeyPatch."""
    patch.setattr(
        runner_module,
        "KVCache",
        lambda *given, **words: KVCache(*given, **words | {"eight_bits": True}),
    )


def plain(target, rows):
    """Return the tokens of plain decoding for the same Rows, one row at a time."""
    return drive(loop_for(target, "none", rows=1, lengths=Fixed(0)), rows)
