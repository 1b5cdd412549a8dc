"""Common tests of drafters that read the target's hidden states: their drafts, the target's
distribution, and resumed runs. No tests here."""

import torch
from checkpoints import write_checkpoint, write_tokenizer
from command_line import rows_in
from test_ahead import Settled, ready
from test_captured import Tour
from test_parallel import bass, lines
from toys import drive, loop_for

import bass_kernels as ops
from bass_cli.engine.batch import Row
from bass_cli.engine.sampling import RowSampling
from bass_cli.engine.verify import Cut
from bass_cli.lengths.controllers import Fixed
from bass_cli.models.capture import Graphs

FLAGS = ("--pair", "pair.yaml", "--n", "3", "--max-new-tokens", "20")
_IDS = 12  # the vocabulary whose distribution is enumerated


class Compared:
    """Compare every proposal of a loop's drafter under shared coupling with its definition: logits
    and tokens."""

    def __init__(self, loop, theirs, reading):
        self._theirs, self._reading, self.seen = theirs, reading, []
        self._propose, loop.drafter.propose = loop.drafter.propose, self.propose
        self._head, loop.drafter.head = loop.drafter.head, self

    def __getattr__(self, name):
        return getattr(self._head, name)

    def draft(self, *given):
        found = self._head.draft(*given)
        logits = found[0] if isinstance(found, tuple) else found
        self._logits.append(logits.clone())  # the drafter may add to them
        return found

    @torch.inference_mode()
    def propose(self, batch, length):
        self._logits = []
        proposal = self._propose(batch, length)
        assert proposal.tokens.shape[1] == length
        for row, host in enumerate(batch.live_rows if length else ()):
            end, chosen = int(batch.lengths[row]), proposal.tokens[row].tolist()
            tokens = batch.tokens[row, :end].tolist()
            due = self._reading.drafts(self._theirs, tokens, chosen)
            found = torch.cat([one[row].view(-1, due.shape[1]) for one in self._logits]).cpu()
            torch.testing.assert_close(found, due, atol=1e-4, rtol=1e-4)
            own = [part[row : row + 1].cpu() for part in tuple(batch.params)[:4]]
            for place, draft in enumerate(chosen):
                before = chosen[place - 1] if place else tokens[-1]
                line = self._reading.whole(due[place] + self._reading.bias(before))[None]
                assert draft == ops.sample(line, *own, torch.tensor([end + place])).item()
            self.seen.append((length, end - host.prompt_length, end))
        return proposal


def check_on_a_gpu(theirs, reading, target, head, rows):
    """Check that drafts equal the paper's. Captured, launched ahead and uncaptured, in fused and
    ordinary layers, the tokens equal those of plain decoding; under maximal coupling captures
    change none."""
    due = drive(loop_for(target, head, rows=1, lengths=Fixed(0)), rows())
    for batch in (1, 5):
        loop = loop_for(target, head, rows=batch, lengths=Tour())
        compared = Compared(loop, theirs, reading)
        assert drive(loop, rows()) == due
        assert len(compared.seen) > 10
        runs = [(Settled(), None), (Fixed(4), None)]
        if loop.drafter.at_once:
            runs.append((Settled(), Cut(head.spec.drafts, 0, 2)))
        for lengths, cut in runs:
            graphs = Graphs(target.device)
            loop = loop_for(target, head, rows=batch, lengths=lengths, graphs=graphs, cut=cut)
            ready(loop)
            assert drive(loop, rows(), ahead=True) == due
            assert loop.graphs.captures > 0
            assert any(shape.kind == "cut" for shape in loop.graphs.held()) == (cut is not None)
        words = {"rows": batch, "coupling": "maximal"}
        once, again = (
            drive(loop_for(target, head, lengths=Tour(), graphs=graphs, **words), rows())
            for graphs in (None, Graphs(target.device))
        )
        assert once == again


def write_pair(folder):
    """Write a target, a pair of it and the drafter in `folder`/head, and prompts."""
    write_checkpoint("qwen3", folder / "target", shards=False, use_sliding_window=False)
    write_tokenizer(folder / "target")
    (folder / "pair.yaml").write_text("target: target\ndraft: 'heads:head'\n")
    (folder / "p.txt").write_text("".join(f"the cat number {n} sat\n" for n in range(5)))


def goes_on_and_is_plain(here, other):
    """Check that samples with the pair's drafter, with another one by these flags, and of a
    resumed run killed within a line equal those of plain decoding."""
    fixed = ("--draft-length", "4")  # `auto` may draft nothing on a busy machine
    for out, *runs in (
        ("plain.jsonl", ("--draft", "none")),
        ("whole.jsonl", fixed),
        ("other.jsonl", other),
        ("parts.jsonl", ("--limit", "2", *fixed), ("--batch-size", "4", *fixed)),
    ):
        for flags in runs:
            found = bass(*FLAGS, *flags, "--out", out, code=0)
            if flags[:1] == ("--limit",):  # killed within a line
                (here / out).write_text((here / out).read_text()[:-30])
    due = lines(here / "plain.jsonl")
    assert len(due) == 15
    for out in ("whole.jsonl", "other.jsonl", "parts.jsonl"):
        assert lines(here / out) == due
        found = rows_in(here / out)
        assert sum(row["drafted"] for row in found) > 0


def has_the_targets_law(theirs, target, draft):
    """Compare the first two tokens of many samples under maximal coupling with the distribution
    of transformers' model, by a chi-square test. Some drafts are accepted, and some are not."""
    count, prompt, warm = 3000, [3, 1, 4], 2.0
    loop = loop_for(target, draft, rows=count, lengths=Fixed(3), coupling="maximal", span=14)
    done = []
    found = drive(
        loop,
        [Row("0", s, 5, prompt, 2, sampling=RowSampling(temperature=warm)) for s in range(count)],
        on_round=lambda one, _: done.append(one),
    )
    with torch.inference_mode():
        texts = torch.tensor([[*prompt, token] for token in range(_IDS)])
        logits = theirs(texts).logits.double() / warm
        first, second = logits[0, 2].softmax(-1), logits[:, 3].softmax(-1)
    law, pairs = (first[:, None] * second).flatten(), _IDS * _IDS
    places = torch.tensor([_IDS * one + other for one, other in found.values()])
    seen = places.bincount(minlength=pairs)
    square = ((seen - count * law) ** 2 / (count * law)).sum().item()
    assert square < pairs - 1 + 4 * (2 * (pairs - 1)) ** 0.5
    kept = sum(done[0].accepted) / count
    assert 0.3 < kept < 2.7
