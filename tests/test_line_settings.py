"""Test the settings that a prompt has of its own: its samples equal those of a job with these
settings, beside any other prompts, with drafts, after a resume and in parts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from command_line import rows_in
from drawing import Scheduler
from test_scheduler import EOS, VOCAB, Letters, by_key, job, prompts, run, table
from toys import Markov, loop_for

from bass_cli.config.job import Job, Pair
from bass_cli.config.options import LINE
from bass_cli.config.sampling import Sampling
from bass_cli.errors import UserError
from bass_cli.io.prompts import check, check_prompts, prompts_of, read_prompts
from bass_cli.io.readers import open_source
from bass_cli.lengths.controllers import Bass, Fixed

LINES: list[dict[str, Any]] = [
    {"id": "p0", "prompt": "abc", "n": 5, "temperature": 1.4, "seed": 9},
    {"id": "p1", "prompt": "a", "top_k": 3, "max_new_tokens": 4},
    {"id": "p2", "prompt": "dddddd", "temperature": 0, "n": 3},
    {"id": "p3", "prompt": "fgh", "stop": ["a", "bc"], "top_p": 0.6},
    {"id": "p4", "prompt": "bb", "k": 1},
    {"id": "p5", "prompt": "cab", "min_p": 0.2, "repetition_penalty": 1.5},
    {"id": "p6", "prompt": "cab", "frequency_penalty": 1.0, "logit_bias": {"3": 2.0, "4": -9.0}},
    {"id": "p7", "prompt": "cab", "allowed_token_ids": [1, 2, 3, EOS], "stop_token_ids": [3]},
]
BASE = {"n": 2, "max_new_tokens": 15, "seed": 4}


class Special(Letters):
    rows = size = VOCAB
    special_tokens: dict[str, int] = {}  # noqa: RUF012

    def encode_part(self, text: str, most: int | None = None, **rest: Any) -> list[int]:
        return self.encode(text)

    @property
    def texts(self) -> dict[int, str]:
        return {id_: self.decode([id_]) for id_ in range(EOS)}


def drawn(given: Any, *, coupling: str = "shared", rows: int = 4, **more: Any) -> dict[Any, Any]:
    loop = loop_for(
        Markov(table(), 1), Markov(table(1), 2), rows=rows, lengths=Bass(), coupling=coupling
    )
    scheduler = Scheduler(job(**BASE), Special(), loop, context=1000, eos_ids={EOS})
    return by_key(list(scheduler.run(iter(given), **{"done": (), **more})))


def expected() -> dict[Any, Any]:
    """Return the samples of one job for each prompt, drawn by plain decoding."""
    found: dict[Any, Any] = {}
    for line in LINES:
        own = {key: line[key] for key in LINE if key in line}
        (plain,) = prompts(str(line["prompt"]))
        settings = job(**BASE | own)
        loop = loop_for(Markov(table(), 1), "none", rows=1, lengths=Fixed(0))
        stops = settings.sampling.stop_token_ids
        scheduler = Scheduler(
            settings, Special(), loop, context=1000, eos_ids={EOS}, stop_ids=stops
        )
        named = next(prompts_of([{"id": line["id"], "prompt": plain.text}]))
        found |= by_key(list(scheduler.run(iter([named]), ())))
    return found


def test_samples_equal_those_of_a_job_with_the_prompts_settings() -> None:
    given, wanted = list(prompts_of(LINES)), expected()
    counts = {line["id"]: line.get("n", 2) for line in LINES}
    assert set(wanted) == {(id_, i) for id_, n in counts.items() for i in range(n)}
    assert [one.meta for one in given] == [{}] * 4 + [{"k": 1}] + [{}] * 3
    for rows in (1, 4, 30):
        assert drawn(given, rows=rows) == wanted
    done = {("p0", 1), ("p0", 4), ("p2", 0), ("p3", 0), ("p3", 1)}
    left = {key: value for key, value in wanted.items() if key not in done}
    assert drawn(given, done=done) == left
    assert {value[1] for key, value in wanted.items() if key[0] == "p3"} == {"stop"}
    assert len({value for key, value in wanted.items() if key[0] == "p2"}) == 1


def test_greedy_prompts_have_the_same_tokens_under_maximal_coupling() -> None:
    greedy = [{**line, "temperature": 0} for line in LINES]
    found = [drawn(prompts_of(greedy), coupling=kind) for kind in ("shared", "maximal")]
    assert found[0] == found[1]


def test_seeds_and_copies_are_those_of_the_prompt() -> None:
    found = run(job(**BASE), list(prompts_of([*LINES[:1], LINES[2]])))
    assert {one.seed for one in found if one.id == "p0"} == {9}
    assert {one.sample: one.copy_of for one in found if one.id == "p2"} == {0: None, 1: 0, 2: 0}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"temperature": -1}, 'field "temperature": it should be greater than or equal to 0'),
        ({"temperature": "warm"}, 'field "temperature": a number is needed'),
        ({"n": 0}, 'field "n": it should be greater than or equal to 1'),
        ({"n": True}, 'field "n": a number is needed, not true or false'),
        ({"top_p": 0}, 'field "top_p"'),
        ({"max_new_tokens": 1.5}, 'field "max_new_tokens": a whole number is needed'),
        ({"stop": [""]}, 'field "stop": an empty stop string'),
        ({"seed": [1]}, 'field "seed"'),
    ],
)
def test_a_wrong_value_is_named_with_line_and_field(
    tmp_path: Path, line: dict[str, Any], said: str
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "first", "n": 2}\n' + json.dumps({"prompt": "a", **line}) + "\n")
    with pytest.raises(UserError) as caught:
        check_prompts(open_source(str(path)), column="prompt", limit=None, job=job(**BASE))
    assert f"{path}:2: {said}" in str(caught.value)


def test_null_means_not_given() -> None:
    (found,) = prompts_of([{"prompt": "a", "n": None, "stop": None, "seed": 3}])
    assert found.settings == {"seed": 3}


def test_more_tokens_than_the_batch_has_room_for_is_an_error_of_the_prompt() -> None:
    """A list of prompts is checked before the batch is planned; a stream is not."""
    given = [{"prompt": "a", "max_new_tokens": 99}, {"prompt": "b", "max_new_tokens": 3}]
    known = check(prompts_of(given), job=job(**BASE)).wanted
    assert known is not None
    assert (known.samples, known.drawn, known.most, known.new_tokens) == (4, 4, 2, 99)
    found = run(job(**BASE), list(prompts_of(given)))
    assert [one.error for one in found if one.id == "0"] == [
        'prompts[0]: field "max_new_tokens": 99 is more than the 15 that the batch has room for; '
        "raise `sampling.max_new_tokens` of the job"
    ]
    assert all(one.tokens <= 3 for one in found if one.id == "1")


def test_unknown_fields_are_refused_on_request(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "n": 2, "meta": {"x": 1}}\n{"prompt": "b", "temprature": 1}\n')
    strict, loose = job(strict_fields=True), job()
    source = open_source(str(path))
    assert check_prompts(source, column="prompt", limit=None, job=loose).count == 2
    with pytest.raises(UserError) as caught:
        check_prompts(source, column="prompt", limit=None, job=strict)
    assert f'{path}:2: field "temprature": unknown field' in str(caught.value)
    assert 'did you mean "temperature"?' in str(caught.value)
    with pytest.raises(UserError, match=r'prompts\[0\]: field "level": unknown field'):
        list(prompts_of([{"prompt": "a", "level": 1}], strict=True))
    (first, _) = read_prompts(str(path))
    assert (first.meta, first.settings) == ({"x": 1}, {"n": 2})


def test_every_option_of_sampling_may_be_a_field() -> None:
    assert LINE.keys() >= {"n", *Sampling.model_fields}
    assert all(path in ("n", f"sampling.{name}") or "." not in path for name, path in LINE.items())


def test_the_plan_has_room_for_what_prompts_ask_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget and the number of rows follow from the prompts' own numbers."""
    from checkpoints import write_checkpoint, write_tokenizer

    from bass_cli.run.plan import make_plan

    write_checkpoint("llama", tmp_path)
    write_tokenizer(tmp_path)
    given = Job(pair=Pair(name="t", target=str(tmp_path)), n=2, device="cpu")
    lines = [{"prompt": "a", "n": 9, "max_new_tokens": 40}, {"prompt": "b", "temperature": 0}]
    wanted = check(prompts_of(lines), job=given).wanted
    plan = make_plan(given, prompts=2, wanted=wanted)
    assert (plan.rows, plan.new_tokens, plan.samples) == (10, 255, 10)
    assert make_plan(given.model_copy(update={"budget": 9.0}), wanted=wanted).rows == 9
    assert plan.draws_together is False


def test_command_continues_a_file_with_prompts_of_own_settings(pair_folder: Any) -> None:
    """Parts, merging, a resume in the middle and a changed setting."""
    from test_shards import bass

    place = pair_folder(prompts=1)
    words = ("the cat", "a dog sat", "on the mat", "it ran")
    own: list[dict[str, Any]] = [{"n": 3}, {"max_new_tokens": 20}, {"temperature": 0}, {"seed": 5}]
    rows = [
        {"id": f"p{i}", "prompt": w, **s} for i, (w, s) in enumerate(zip(words, own, strict=True))
    ]

    def write(lines: Any) -> None:
        (place / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def read(name: str) -> dict[Any, Any]:
        found = rows_in(place / name)
        return {(one["id"], one["sample"]): one["token_ids"] for one in found}

    write(rows)
    flags = ("generate", "p.jsonl", "--pair", "pair.yaml", "--n", "2", "--max-new-tokens", "8")
    flags = (*flags, "--token-ids")
    bass(*flags, "--out", "whole.jsonl")
    whole = read("whole.jsonl")
    counts = {"p0": 3, "p1": 2, "p2": 2, "p3": 2}
    assert set(whole) == {(id_, i) for id_, n in counts.items() for i in range(n)}
    assert max(len(ids) for (id_, _), ids in whole.items() if id_ == "p1") > 8
    parts = [f"{number}.jsonl" for number in (1, 2)]
    for number, part in enumerate(parts, 1):
        bass(*flags, "--shard", f"{number}/2", "--out", part)
    bass("merge", "all.jsonl", *parts)
    assert read("all.jsonl") == whole
    lines = (place / "whole.jsonl").read_text().splitlines(keepends=True)
    (place / "whole.jsonl").write_text("".join(lines[:4]))
    (place / "whole.jsonl.manifest.json").write_text("{")  # its lines are compared instead
    bass(*flags, "--out", "whole.jsonl")
    assert read("whole.jsonl") == whole
    write([{**rows[0], "n": 4}, *rows[1:]])
    said = bass(*flags, "--out", "whole.jsonl", code=2)
    assert 'number 1 (id "p0", p.jsonl:1) has changed' in said
    write([*rows, {"prompt": "x", "colour": 1}])
    said = bass(*flags, "--strict-fields", "--out", "new.jsonl", code=2)
    assert 'p.jsonl:5: field "colour": unknown field, and --strict-fields' in said
    assert not (place / "new.jsonl").exists()


def test_pool_hands_out_each_prompts_own_number_of_samples() -> None:
    from bass_cli.cluster.worker_pool import Pool

    pool = Pool(prompts_of(LINES), (), n=2, count=5)
    pool.hire("one")
    parts = list(itertools.chain.from_iterable(pool.chunk("one", 100) for _ in range(3)))
    assert {part.prompt.id: len(part.samples) for part in parts}["p0"] == 5
