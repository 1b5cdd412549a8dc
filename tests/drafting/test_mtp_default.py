"""The layer of a checkpoint is the draft where a pair names none: which draft is taken, what the
commands show, files that were begun with another draft, and all of a run with it."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from checkpoints import HYBRID, shallow, write_checkpoint, write_tokenizer
from command_line import cli
from reading import FLAGS, goes_on_and_is_plain
from test_mtp import write
from test_parallel import bass, lines

from bass_cli.bench.settings import make_settings
from bass_cli.config.job import Job, Pair, load_pair
from bass_cli.config.machine_commands import BenchArgs
from bass_cli.models.runner import Runner
from bass_cli.run.plan import make_plan

SMALL = {"device": "cpu", "batch_size": 2}


@pytest.fixture
def here(here):
    """A target with its layer, a pair file that names no draft, and prompts."""
    write(here / "target", HYBRID[0], near=0.5, tokenizer=True)
    (here / "pair.yaml").write_text("target: target\n")
    (here / "p.txt").write_text("".join(f"the cat number {n} sat\n" for n in range(5)))
    return here


def taken(**given):
    """Return the draft of a plan, and the notes that name it."""
    plan = make_plan(Job(**SMALL, **given), prompts=1)
    assert (plan.files.draft is not None) == (plan.job.pair.draft == "mtp")
    return plan.job.pair.draft, [note for note in plan.notes if "the draft is" in note]


def test_layer_is_the_draft_where_none_is_named(here):
    layer = "the draft is mtp, the layer of the target's checkpoint that predicts further tokens; "
    assert taken(model="target") == ("mtp", [f"{layer}`pair.draft` lookup leaves it out"])
    in_file = [f"{layer}`pair.draft` none leaves it out"]
    assert taken(pair="pair.yaml") == ("mtp", in_file)
    assert taken(pair=Pair(name="x", target="target")) == ("mtp", in_file)
    assert taken(model="target", draft="mtp") == ("mtp", [])
    assert taken(model="target", draft="lookup") == ("lookup", [])
    assert taken(model="target", draft="none") == ("none", [])
    assert taken(model="target", speculation={"length": 0}) == ("lookup", [])


def test_longest_draft_is_shorter_if_it_is_not_set(here):
    """A further token of a draft takes memory of every row with recurrent layers."""

    def longest(draft, **speculation):
        pair = Pair(name="x", target="target", draft=draft, speculation=speculation)
        return make_plan(Job(**SMALL, pair=pair), prompts=1).longest

    assert [longest(draft) for draft in ("mtp-or-none", "mtp", "lookup")] == [8, 8, 32]
    assert [longest("mtp", max=16), longest("mtp", length=12), longest("mtp", length=3)] == [
        16,
        12,
        3,
    ]


def test_other_checkpoints_keep_their_default(tmp_path):
    """A hybrid without the layer, though its config.json counts one, and another family."""
    for family in (HYBRID[0], "llama"):
        folder = tmp_path / family
        write_checkpoint(family, folder, mtp_num_hidden_layers=1, **shallow(family))
        write_tokenizer(folder)
        assert taken(model=str(folder)) == ("lookup", [])
        assert taken(pair=Pair(name="x", target=str(folder))) == ("none", [])


def test_layer_that_is_not_supported_is_left_out_with_a_note(here):
    config = here / "target" / "config.json"
    keys = json.loads(config.read_text())
    config.write_text(json.dumps(keys | {"mtp_num_hidden_layers": 2}))
    draft, (note,) = taken(model="target")
    assert draft == "lookup"
    assert note.startswith("the draft is lookup, not mtp: ")
    assert 'config.json: key "mtp_num_hidden_layers": `pair.draft` mtp supports 1 only' in note


def test_commands_show_which_draft_is_taken(here):
    def shown(*words):
        return json.loads(cli(*words, "--json", code=0).stdout)

    found = shown("doctor", "--model", "target")
    assert found["pair_draft"] == "mtp"
    assert "--draft lookup leaves it out" in found["pair_notes"]
    assert shown("pairs", "pair.yaml")[0]["draft"] == "mtp"


def test_bench_measures_the_layer(here):
    words = {"device": "cpu", "batch_sizes": "1"}
    settings = make_settings(BenchArgs(pair="pair.yaml", **words))
    assert (settings.job.pair.draft, len(settings.methods) > 1) == ("mtp", True)
    write_checkpoint(HYBRID[0], here / "plain", **shallow(HYBRID[0]))
    (here / "plain.yaml").write_text("target: plain\n")
    settings = make_settings(BenchArgs(pair="plain.yaml", **words))
    assert (settings.job.pair.draft, settings.methods) == ("none", ("plain",))


def test_resumed_run_equals_plain_decoding(here):
    """With the default draft: killed within a line, and with lengths that `auto` chooses."""
    assert load_pair("pair.yaml").draft == "mtp-or-none"
    goes_on_and_is_plain(here, ("--draft-length", "auto"))
    manifest = json.loads((here / "whole.jsonl.manifest.json").read_text())
    assert manifest["job"]["pair"]["draft"] == "mtp"
    revisions = [manifest["origin"][name] for name in ("revision", "draft_revision")]
    assert all(one.startswith("files:") for one in revisions)
    assert revisions[0] != revisions[1]


def test_file_begun_with_another_draft_is_continued(here):
    """Under shared coupling no draft changes a sample. Under maximal coupling it does."""
    due = bass(*FLAGS, "--out", "due.jsonl", code=0)
    assert "the draft is mtp" in due.stderr
    assert "--draft none leaves it out" in due.stderr
    for coupling, code in (("shared", 0), ("maximal", 2)):
        words = (*FLAGS, "--coupling", coupling, "--out", f"{coupling}.jsonl")
        bass(*words, "--draft", "lookup", "--limit", "2", code=0)
        found = bass(*words, "--limit", "2" if code else "5", code=code)
    assert lines(here / "shared.jsonl") == lines(here / "due.jsonl")
    assert 'draft: "lookup" before, "mtp" now' in found.stderr


def test_file_of_maximal_coupling_with_a_fixed_length_keeps_its_longest_draft(here):
    """Files from before mtp had a limit of its own name 32, which a fixed length does not use."""
    words = (*FLAGS, "--coupling", "maximal", "--draft", "mtp", "--draft-length", "4")
    bass(*words, "--limit", "2", "--out", "fixed.jsonl", code=0)
    manifest = json.loads((here / "fixed.jsonl.manifest.json").read_text())
    assert manifest["results"]["max"] == 32


def test_run_that_runs_out_of_memory_ends_with_the_same_lines(here, monkeypatch):
    """Half the rows go on, with the layer's keys and hidden states in a smaller store."""
    words = (*FLAGS, "--draft-length", "3", "--batch-size", "8")
    bass(*words, "--draft", "none", "--draft-length", "0", "--out", "due", code=0)
    forward, count = Runner.forward, itertools.count(1)

    def short(self, *given, **named):
        if next(count) in (4, 9):
            torch.empty(1 << 60, dtype=torch.uint8)
        return forward(self, *given, **named)

    monkeypatch.setattr(Runner, "forward", short)
    found = bass(*words, "--out", "halved")
    assert (found.exit_code, found.stderr.count("memory ran out with")) == (0, 2), found.stderr
    assert lines(here / "halved") == lines(here / "due")
    accepted = (json.loads(line)["accepted"] for line in (here / "halved").read_text().splitlines())
    assert sum(accepted) > 0
