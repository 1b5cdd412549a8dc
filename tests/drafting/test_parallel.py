"""Drafting in one pass: the drafts equal those of a full forward over tokens and masks, whatever
came before; where a model names its mask token, and the message if it does not."""

import dataclasses
import functools
import json
import re

import pytest
import torch
from checkpoints import FAMILIES, shallow, write_checkpoint, write_gguf, write_pair
from command_line import cli, rows_in
from decoders import load_decoder
from test_ahead import Settled, ready
from test_captured import Tour, captured, rows
from thinned import thinned
from toys import AtOnce, Reactive, begin, drive, loop_for, plain

import bass_kernels as ops
from bass_cli.config.job import load_pair, make_job
from bass_cli.engine.batch import Row, beyond
from bass_cli.engine.sampling import RowSampling
from bass_cli.engine.verify import CHEAP, Cut
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.lengths.controllers import Fixed
from bass_cli.models import decoder
from bass_cli.run.plan import make_plan

MASK = 300  # no token of the tokenizer's


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A function from a family's name to a model with a mask token: as transformers has it, and
    as we read it."""

    @functools.cache
    def made(family, seed=0, kind=None):
        folder = tmp_path_factory.mktemp(family)
        theirs = write_checkpoint(family, folder, seed=seed, pard_token=MASK, **shallow(family))
        ops.use(kind)  # kernels read no packed weights
        decoder = load_decoder(folder)
        ops.use(None)
        return theirs, decoder, open_checkpoint(folder).mask()

    return made


@pytest.fixture(scope="module")
def pair(models):
    """Return a target, and the same model as a draft."""
    _, target, mask = models("qwen2")
    return target, AtOnce(target, mask)


@torch.inference_mode()
def in_full(model, mask, rows, length):
    """Return logits [B, length, V] of the rows' drafts, by one pass over everything without a
    cache. Padding after a shorter row affects nothing before it."""
    ends, widest = [len(tokens) + length - 1 for tokens in rows], max(map(len, rows)) + length - 1
    ids = torch.tensor([tokens + [mask] * (widest - len(tokens)) for tokens in rows])
    logits = model(input_ids=ids, use_cache=False).logits
    return torch.stack([line[end - length : end] for line, end in zip(logits, ends, strict=True)])


class Falling(Settled):
    """Shorter drafts after longer ones, and longer after shorter, with plain rounds between."""

    def __init__(self):
        super().__init__()
        self._lengths = iter([*([5, 3, 3, 1, 1, 7, 7, 2, 6, 0, 0, 4, 4] * 20)])


class Compared:
    """Compare every proposal of a loop's drafter with `in_full`, logits and tokens."""

    def __init__(self, loop, model, mask):
        self._loop, self._model, self._mask, self.seen = loop, model, mask, []
        self._runner, self._propose = loop.drafter.runner, loop.drafter.propose
        self._forward, self._logits = self._runner.forward, None
        self._forward_at = self._runner.forward_at
        self._runner.forward, loop.drafter.propose = self.forward, self.propose
        self._runner.forward_at = self.forward_at

    def forward(self, tokens, positions, ends, *, last=None):
        assert tokens.shape[1] == 2 * last
        bases = self._runner.cache.bases(len(tokens))
        assert bool((positions >= bases[:, None]).all()), (
            "those before are the prompt's, and shared"
        )
        self._logits = self._forward(tokens, positions, ends, last=last)
        return self._logits

    def forward_at(self, tokens, positions, ends, places):
        """With recurrent layers, a pass begins after the tokens that were read."""
        assert tokens.shape[1] == 2 * places.shape[1]
        self._logits = self._forward_at(tokens, positions, ends, places)
        return self._logits

    def propose(self, batch, length):
        proposal, live_rows = self._propose(batch, length), list(batch.live_rows)
        if not length or not live_rows:
            return proposal
        live = slice(len(live_rows))
        ends = batch.lengths[live].tolist()
        texts = [batch.tokens[row, :end].tolist() for row, end in enumerate(ends)]
        due = in_full(self._model, self._mask, texts, length)
        found = self._logits[live]
        torch.testing.assert_close(found, due[..., : found.shape[-1]], atol=1e-4, rtol=1e-4)
        params, places = batch.params, torch.tensor(ends)[:, None] + torch.arange(length)
        own = tuple(params[:4])
        own = (part[live].repeat_interleave(length, 0) for part in own)
        drafts = ops.sample(due.flatten(0, 1), *own, places.flatten())
        assert proposal.tokens[live].tolist() == drafts.view(-1, length).tolist()
        self.seen += [
            (length, end - host.prompt_length) for end, host in zip(ends, live_rows, strict=True)
        ]
        return proposal


# In `make test` one family of each kind: plain, with windows, with learned positions, with experts,
# recurrent.
@pytest.mark.parametrize(
    "family", thinned(FAMILIES, ("llama", "gemma3_text", "gpt2", "gpt_oss", "qwen3_next"))
)
def test_drafts_equal_a_full_forward(models, family):
    """Also of rows that have generated less than a pass feeds, samples of one prompt and moved
    rows; after full, partial and no acceptance, after plain rounds and longer drafts."""
    theirs, draft, mask = models(family)
    _, other, _ = models(family, seed=1)  # few of its drafts are accepted
    for batch, lengths, target, acceptance in (
        (3, Falling(), draft, (0.8, 1.0)),
        (5, Tour(), draft, None),
        (2, Reactive(), other, None),
    ):
        loop = loop_for(
            target, AtOnce(draft, mask), rows=batch, lengths=lengths, acceptance=acceptance
        )
        compared = Compared(loop, theirs, mask)
        drive(loop, rows(16))
        assert any(generated == 0 for _, generated in compared.seen)
        assert any(length > generated > 0 for length, generated in compared.seen)


# Logits depend on the family (see above), acceptance on the coupling: each family has one of the
# two, every fourth pair of families in `make test`.
@pytest.mark.parametrize(
    ("family", "coupling"),
    [
        pytest.param(
            family, ("shared", "maximal")[at % 2], marks=pytest.mark.slow if at % 8 > 1 else ()
        )
        for at, family in enumerate(FAMILIES)
    ],
)
def test_first_draft_of_the_target_itself_is_always_accepted(models, family, coupling):
    _, target, mask = models(family)
    seen = []
    for batch, lengths in ((1, Fixed(8)), (4, Tour()), (5, Reactive())):
        loop = loop_for(
            target, AtOnce(target, mask), rows=batch, lengths=lengths, coupling=coupling
        )
        drive(loop, rows(), on_round=lambda done, _: seen.append(done))
    assert all(kept >= 1 for done in seen if done.width for kept in done.accepted)
    assert any(kept < done.width for done in seen for kept in done.accepted)
    assert {1, 2, 3, 8} <= {done.width for done in seen}


@pytest.mark.parametrize("coupling", ["shared", "maximal"])
def test_captured_rounds_accept_the_first_draft_too(pair, coupling):
    target, draft = pair
    due, seen = plain(target, rows()), []
    for batch in (2, 5):
        loop = captured(target, draft, batch=batch, lengths=Tour(), coupling=coupling)
        found = drive(loop, rows(), on_round=lambda done, _: seen.append(done))
        if coupling == "maximal":  # a longer graph that serves changes no sample
            uncaptured = loop_for(target, draft, rows=batch, lengths=Tour(), coupling=coupling)
            due = drive(uncaptured, rows())
        assert found == due
        assert loop.graphs.count("replay", "block") > 3
        assert any(shape.kind == "catch up" for _, shape in loop.graphs.done)
    assert all(kept >= 1 for done in seen if done.width for kept in done.accepted)


def test_rounds_launched_ahead_miss_no_token(models, pair):
    """A draft that is shorter than the last round's does not read all tokens that this may
    bring, so it waits for the result. Most drafts are accepted here, whatever the target's
    logits are."""
    target, draft = pair
    theirs, _, mask = models("qwen2")
    due = plain(target, rows())
    for batch, acceptance in ((2, None), (5, None), (2, (0.9, 1.0)), (5, (0.9, 1.0))):
        loop = captured(target, draft, batch=batch, lengths=Falling(), acceptance=acceptance)
        flights, compared = ready(loop), Compared(loop, theirs, mask)
        found = drive(loop, rows(40 if acceptance else 30), ahead=True)
        assert acceptance or found == due
        assert 0.2 * flights.all < flights.behind < flights.all
        assert len({length for length, _ in compared.seen}) > 5


def test_pass_is_as_wide_as_its_drafts_need(pair):
    """Twice as many tokens as drafts for any rows; and 16 tokens are few enough for the fused
    layers."""
    target, draft = pair
    fed = []
    loop = loop_for(target, draft, rows=3, lengths=Tour())
    runner, forward = loop.drafter.runner, loop.drafter.runner.forward
    runner.forward = lambda tokens, *more, **words: (
        fed.append(tuple(tokens.shape)),
        forward(tokens, *more, **words),
    )[1]
    drive(loop, rows(), on_round=lambda done, _: fed.append(done.width) if not done.width else None)
    shapes = [one for one in fed if one]
    assert {width for _, width in shapes} == {2, 4, 6, 8, 10, 12, 14}


@pytest.mark.parametrize(
    ("batch", "length"), [pytest.param(1, 8, marks=pytest.mark.slow), (2, 4), (3, 3)]
)
def test_gpu_kernels_give_the_same_drafts(models, monkeypatch, batch, length):
    """Rows that begin, whose first tokens are fed again and again, and rows longer than a pass.
    16 tokens in all take the fused layers, more of them the ordinary ones."""
    pytest.importorskip("triton")
    _, model, mask = models("qwen2", kind="triton")
    found, fused, run = [], [], decoder.run_fused
    monkeypatch.setattr(decoder, "run_fused", lambda *given: fused.append(1) or run(*given))
    for kind in ("reference", "triton"):
        loop = loop_for(model, AtOnce(model, mask), rows=batch, lengths=Fixed(length))
        live = [
            Row("0", s, 0, [5, 6, 7, 8, 9], 40, sampling=RowSampling(temperature=0.8 * s))
            for s in range(batch)
        ]
        begin(loop, *live)
        logits, forward = [], loop.drafter.runner.forward
        loop.drafter.runner.forward = lambda *given, seen=logits, run=forward, **words: (
            seen.append(run(*given, **words)),
            seen[-1],
        )[1]
        for rounds in (0, 6):
            loop.use(Fixed(1))
            for _ in range(rounds):
                loop.round()
            logits.clear()
            loop.catch_up(length)
            ops.use(kind)
            with torch.inference_mode():
                loop.drafter.propose(loop.batch, length)
            ops.use(None)
            found.append((kind, torch.cat(logits)))
    assert bool(fused) == (2 * batch * length <= 16)
    for plain_torch, kernels in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(kernels[1], plain_torch[1], atol=1e-3, rtol=1e-3)


def test_draft_cache_holds_tokens_only(pair):
    """After shrinking drafts, plain rounds and longer drafts the cache equals a fresh prefill."""
    target, draft = pair
    loop = loop_for(target, draft, rows=3, lengths=Tour())
    live = [
        Row("0", s, 1, [5, 6, 7, 8], 60, sampling=RowSampling(temperature=1.5)) for s in range(3)
    ]
    begin(loop, *live)
    for _ in range(11):
        loop.round()
    loop.catch_up(1)
    loop.drafter.propose(loop.batch, 1)
    fresh = loop_for(target, target, rows=3, lengths=Fixed(1))
    for row in live:
        fresh.open(str(row.sample), row.tokens)
        fresh.admit(Row(str(row.sample), row.sample, 1, list(row.tokens), 9))
    ours, due = loop.drafter.runner.cache, fresh.drafter.runner.cache
    for row, line in enumerate(live):
        span, base = due._of_row[row], ours.base(row)
        assert span.length == len(line.tokens) - 2 > base
        for found, keys in zip(ours.own_keys, due.prompt_keys, strict=True):
            stored = keys[:, span.start + base : span.start + span.length]
            slot = int(ours._slot[row])
            own = found[:, slot : slot + span.length - base]
            torch.testing.assert_close(own, stored, rtol=1e-4, atol=1e-4)


CONFIG = "config.json"


def place_with(folder, **keys):
    """Return a pair of a target and a parallel draft whose config has these keys."""
    words = "draft: 'parallel:draft'\nspeculation: {length: 4}\n"
    sizes = {"use_sliding_window": False}
    write_pair(folder, prompts=6, family="qwen3", pair=words, draft=keys, **sizes)


def bass(*arguments, **settings):
    return cli("generate", "p.txt", "--device", "cpu", "--token-ids", *arguments, **settings)


def lines(path):
    rows = rows_in(path)
    assert len({(row["id"], row["sample"]) for row in rows}) == len(rows)
    return {(row["id"], row["sample"]): (row["token_ids"], row["finish_reason"]) for row in rows}


FLAGS = ("--pair", "pair.yaml", "--n", "3", "--max-new-tokens", "30")


NAMES = ("mask_token_id", "pard_token", "ptd_token_id")


@pytest.mark.parametrize("key", NAMES)
def test_mask_is_read_by_any_published_name(here, key):
    place_with(here, **{key: MASK})
    assert open_checkpoint(here / "draft").mask() == MASK


# Jobs of the others differ in nothing but the name.
@pytest.mark.parametrize(
    "key", [NAMES[0], *(pytest.param(key, marks=pytest.mark.slow) for key in NAMES[1:])]
)
def test_job_with_a_parallel_draft_equals_plain_decoding(here, key):
    place_with(here, **{key: MASK})
    bass(*FLAGS, "--out", "o.jsonl", code=0)
    rows = rows_in(here / "o.jsonl")
    assert sum(row["drafted"] for row in rows) > 0
    bass(*FLAGS, "--draft", "none", "--out", "plain.jsonl", code=0)
    assert lines(here / "o.jsonl") == lines(here / "plain.jsonl")


def test_run_resumes_where_it_stopped(here):
    place_with(here, pard_token=MASK, mask_token_id=7)
    assert open_checkpoint(here / "draft").mask() == MASK, "the first name counts"
    for out, *runs in (
        ("whole.jsonl", ()),
        ("parts.jsonl", ("--limit", "2"), ("--batch-size", "4")),
    ):
        for flags in runs:
            bass(*FLAGS, *flags, "--out", out, code=0)
            if flags[:1] == ("--limit",):  # killed within a line
                (here / out).write_text((here / out).read_text()[:-30])
    assert lines(here / "parts.jsonl") == lines(here / "whole.jsonl")


def test_another_mask_is_a_different_run_under_maximal_coupling(here):
    place_with(here, pard_token=MASK)
    flags = (*FLAGS, "--limit", "1", "--coupling", "maximal", "--out", "o.jsonl")
    bass(*flags, code=0)
    config = json.loads((here / "draft" / CONFIG).read_text())
    (here / "draft" / CONFIG).write_text(json.dumps(config | {"pard_token": 299}))
    assert "draft_files" in bass(*flags, "--n", "4", code=2).stderr


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({}, 'the key "pard_token" (or ptd_token_id, mask_token_id) is missing'),
        ({"pard_token": 301}, 'key "pard_token": the id of a mask token, from 0 to 300, is needed, not 301'),
        ({"ptd_token_id": -1}, 'key "ptd_token_id": the id of a mask token, from 0 to 300, is needed, not -1'),
        ({"mask_token_id": "<mask>"}, 'key "mask_token_id": the id of a mask token'),
        ({"pard_token": True}, "is needed, not True"),
    ],
)  # fmt: skip
def test_model_without_a_mask_is_refused_before_weights_are_read(here, monkeypatch, keys, reason):
    monkeypatch.setattr("bass_cli.run.build.load", lambda *a, **k: pytest.fail("weights were read"))
    place_with(here)
    config = json.loads((here / "draft" / CONFIG).read_text())
    (here / "draft" / CONFIG).write_text(json.dumps(config | keys))
    refused = bass(*FLAGS, "--out", "o.jsonl", code=2)
    said = re.sub(r"\s+", " ", refused.stderr)
    assert reason in said
    assert f"{here / 'draft' / CONFIG}: " in said


def test_gguf_file_has_its_mask_in_its_metadata(tmp_path):
    key = "tokenizer.ggml.mask_token_id"
    write_gguf("qwen2", tmp_path / "with.gguf", metadata={key: 17})
    write_gguf("qwen2", tmp_path / "without.gguf")
    assert open_checkpoint(tmp_path / "with.gguf").mask() == 17
    with pytest.raises(Exception, match=f'without.gguf: the key "{key}" is missing'):
        open_checkpoint(tmp_path / "without.gguf").mask()


def test_draft_with_expensive_tokens_is_not_cut(here):
    """Two more drafts take four tokens of its pass, which pays only if it is much smaller than
    its target. The cache has room for all drafts of rows."""
    place_with(here, pard_token=MASK)
    flags = {"device": "cpu", "draft_length": 3}
    plan = make_plan(make_job(load_pair("pair.yaml"), **flags))
    assert plan.cut is None
    large = dataclasses.replace(plan.files.target.spec, layers=400)
    target = dataclasses.replace(plan.files.target, spec=large)
    plan = dataclasses.replace(plan, files=plan.files._replace(target=target))
    assert plan.cut == Cut(plan.job.speculation.max, CHEAP["cpu"], 2)
    assert plan.span - plan.new_tokens == beyond(5)


def test_plan_without_masks_uses_the_draft_model(here):
    """The same model drafts token by token if drafting in one pass is not requested."""
    place_with(here, pard_token=MASK)
    for draft in ("draft", "parallel:draft"):
        bass(*FLAGS, "--draft", draft, "--out", f"{draft[:5]}.jsonl", code=0)
    assert lines(here / "draft.jsonl") == lines(here / "paral.jsonl")
    drafted, at_once = (
        [json.loads(line)["accepted"] for line in (here / name).read_text().splitlines()]
        for name in ("draft.jsonl", "paral.jsonl")
    )
    assert drafted != at_once


def test_drafts_of_padding_rows_do_no_harm(pair):
    """Padding rows are one token long."""
    target, draft = pair
    loop = loop_for(target, draft, rows=4, lengths=Fixed(3))
    row = Row("0", 0, 0, [1, 2, 3], 20)
    begin(loop, row)
    alone = loop.drafter.propose(loop.batch, 3).tokens
    loop.batch.pad(4)
    padded = loop.drafter.propose(loop.batch, 3).tokens
    loop.batch.pad(None)
    assert padded.shape == (4, 3)
    assert torch.equal(padded[:1], alone)
