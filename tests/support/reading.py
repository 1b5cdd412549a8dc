"""Common tests of drafters that read the target's hidden states: the target's distribution, and
resumed runs. No tests here."""

import json

import torch
from checkpoints import write_checkpoint, write_tokenizer
from test_parallel import bass, lines
from toys import drive, loop_for

from bass_cli.engine.batch import Row
from bass_cli.engine.sampling import RowSampling
from bass_cli.lengths.controllers import Fixed

FLAGS = ("--pair", "pair.yaml", "--n", "3", "--max-new-tokens", "20")
_IDS = 12  # the vocabulary whose distribution is enumerated


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
            found = bass(*FLAGS, *flags, "--out", out)
            assert found.exit_code == 0, found.stderr
            if flags[:1] == ("--limit",):  # killed within a line
                (here / out).write_text((here / out).read_text()[:-30])
    due = lines(here / "plain.jsonl")
    assert len(due) == 15
    for out in ("whole.jsonl", "other.jsonl", "parts.jsonl"):
        assert lines(here / out) == due
        found = [json.loads(line) for line in (here / out).read_bytes().splitlines()]
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
