"""The sampling fields that change logits, through a job, a prompt's line, a pair file and the
command line: transformers' tokens, errors that name the field, and resumed files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint, write_tokenizer
from command_line import cli, rows_in
from tokenizers import Tokenizer as Reference

from bass_cli import Job, Pair, Sampling, Speculation, UserError, generate
from bass_cli.run.sampling import row_sampling

VOCAB = 301
PROMPTS = ["the cat sat on", "a dog"]
ALLOWED = [*range(100, 160), 2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    write_checkpoint("llama", folder, shards=False, vocab_size=VOCAB)
    return folder


def drawn(model: Path, prompts: Any = PROMPTS, draft: str = "lookup", **sampling: Any) -> Any:
    pair = Pair(name="tiny", target=str(model), draft=draft)
    sampling = {"seed": 5, "max_new_tokens": 20, "temperature": 0.9} | sampling
    job = Job(pair=pair, n=2, device="cpu", token_ids=True, sampling=Sampling(**sampling))
    return {(one.id, one.sample): one for one in generate(prompts, job)}


FIELDS: dict[str, Any] = {
    "min_p": 0.3,
    "repetition_penalty": 2.0,
    "presence_penalty": 1.5,
    "frequency_penalty": 1.5,
    "logit_bias": {"120": 6.0, "121": -9},
    "bad_words": ["a", "the"],
    "allowed_token_ids": ALLOWED,
}


def test_fields_of_a_line_equal_those_of_a_job(model: Path) -> None:
    """And drafts of the target itself change nothing."""
    lines = [{"id": name, "prompt": PROMPTS[0], name: value} for name, value in FIELDS.items()]
    together = drawn(model, lines)
    for name, value in FIELDS.items():
        line = [{"id": name, "prompt": PROMPTS[0]}]
        alone = drawn(model, line, draft=str(model), **{name: value})
        for key, one in alone.items():
            assert together[key].token_ids == one.token_ids, name
            assert together[key].mean_logprob == pytest.approx(one.mean_logprob, abs=1e-5)
        if name in ("min_p", "presence_penalty", "logit_bias"):
            plain = drawn(model, line)
            assert any(plain[key].token_ids != one.token_ids for key, one in alone.items())
    assert all(set(together["allowed_token_ids", s].token_ids) <= {*ALLOWED} for s in range(2))


def test_bad_words_have_all_spellings(model: Path) -> None:
    """After a space too, as the tokenizers library spells them."""
    from bass_cli.formats.tokenizer import Tokenizer

    theirs, tokenizer = Reference.from_file(str(model / "tokenizer.json")), Tokenizer.load(model)
    found = row_sampling(Sampling(bad_words=["dog", " cat"]), tokenizer).bad_words
    for text in ("dog", " dog", " cat"):
        assert tuple(theirs.encode(text, add_special_tokens=False).ids) in found


@pytest.mark.parametrize("length", [0, 3])
def test_sample_ends_with_an_error_where_all_tokens_are_forbidden(model: Path, length: int) -> None:
    bad = {"allowed_token_ids": [65, 66], "bad_words": ["b"], "temperature": 1.0}
    theirs = Reference.from_file(str(model / "tokenizer.json"))
    ids = [theirs.token_to_id(one) for one in ("a", "b")]
    bad |= {"allowed_token_ids": ids, "bad_words": ["a", "b"]}
    pair = Pair(name="tiny", target=str(model), draft="lookup")
    job = Job(
        pair=pair,
        n=1,
        device="cpu",
        sampling=Sampling(**bad),
        speculation=Speculation(length=length),
    )
    both = list(generate([{"id": "x", "prompt": "the"}, {"id": "y", "prompt": "a"}], job))
    for one in both:
        assert (one.finish_reason, one.tokens) == ("error", 0)
        assert one.error is not None
        assert "no token is left for token 1: `sampling.allowed_token_ids`" in one.error


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "`sampling.logit_bias`: there is no token 301"),
        ({"allowed_token_ids": [3, 999]}, "`sampling.allowed_token_ids`: there is no token 999"),
    ],
)
def test_ids_beyond_the_vocabulary_are_refused(model: Path, given: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        drawn(model, **given)
    (name, value) = next(iter(given.items()))
    value = {str(key): one for key, one in value.items()} if isinstance(value, dict) else value
    failed = drawn(model, [{"id": "p", "prompt": "a", name: value}, {"id": "q", "prompt": "a"}])
    assert failed["q", 0].error is None
    (error,) = [one.error for (key, _), one in failed.items() if key == "p"]
    assert f'field "{name}": there is no token' in error


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("min_p", 1.5),
        ("min_p", "a"),
        ("repetition_penalty", 0),
        ("presence_penalty", True),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"5": "x"}),
        ("logit_bias", {"5": 1e39}),
        ("frequency_penalty", 1e39),
        ("logit_bias", [5]),
        ("bad_words", [""]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
    ],
)
def test_wrong_values_name_field_file_and_line(tmp_path: Path, name: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=name):
        Sampling(**{name: bad})
    file, pair = tmp_path / "p.jsonl", tmp_path / "y.yaml"
    file.write_text(f'{{"prompt": "a"}}\n{json.dumps({"prompt": "b", name: bad})}\n')
    pair.write_text(f"target: x\nsampling:\n  {name}: {json.dumps(bad)}\n")
    found = cli("generate", str(file), "--model", str(tmp_path), code=2)
    assert f'p.jsonl:2: field "{name}": ' in found.output.replace("\n", " ")
    found = cli("generate", str(file), "--pair", str(pair), code=2)
    assert f'y.yaml:3: key "sampling.{name}": ' in found.output.replace("\n", " ")


def test_command_line_variables_and_pair_files_agree(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, pair = tmp_path / "p.jsonl", tmp_path / "y.yaml"
    file.write_text('{"id": "a", "prompt": "the cat"}\n')
    pair.write_text(
        f"target: {model}\ndraft: lookup\nsampling:\n  min_p: 0.05\n  repetition_penalty: 1.5\n"
        "  presence_penalty: 0.5\n  frequency_penalty: 0.25\n  logit_bias: {120: 2.5, 121: -3}\n"
        "  bad_words: [dog, 'a cat']\n  allowed_token_ids: [2, 97, 98, 99, 120, 121, 130]\n"
    )
    common = ["generate", str(file), "--device", "cpu", "--n", "2", "--max-new-tokens", "9"]
    flags = ["--min-p", "0.05", "--repetition-penalty", "1.5", "--presence-penalty", "0.5"]
    flags += ["--frequency-penalty", "0.25", "--logit-bias", "120=2.5", "--logit-bias", "121=-3"]
    flags += ["--bad-words", "dog", "--bad-words", "a cat"]
    flags += ["--allowed-token-ids", "2,97,98,99,120,121,130"]
    variables = {
        "BASS_MIN_P": "0.05",
        "BASS_REPETITION_PENALTY": "1.5",
        "BASS_PRESENCE_PENALTY": "0.5",
        "BASS_FREQUENCY_PENALTY": "0.25",
        "BASS_LOGIT_BIAS": "120=2.5 121=-3",
        "BASS_BAD_WORDS": '["dog", "a cat"]',
        "BASS_ALLOWED_TOKEN_IDS": "2,97,98,99,120,121,130",
    }
    outs = []
    for number, (more, env) in enumerate(
        [(["--pair", str(pair)], {}), (["--model", str(model), *flags], {}),
         (["--model", str(model)], variables)]
    ):  # fmt: skip
        out = tmp_path / f"{number}.jsonl"
        cli(*common, *more, "--token-ids", "-o", str(out), code=0, env=env)
        lines = rows_in(out)
        outs.append(sorted((line["sample"], line["token_ids"]) for line in lines))
        # goes on, with nothing left to do; refused with another penalty
        again = [*common, *more, "--token-ids", "-o", str(out), "--resume"]
        cli(*again, code=0, env=env)
        other = cli(*again, "--frequency-penalty", "0.5", code=2, env=env)
        assert "frequency_penalty: 0.25 before, 0.5 now" in other.output
    assert outs[0] == outs[1] == outs[2]
    assert {id_ for _, ids in outs[0] for id_ in ids} <= {2, 97, 98, 99, 120, 121, 130}


def test_greedy_job_equals_transformers(model: Path) -> None:
    """Penalties, bias and allowed ids together, with drafts from the target itself."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    due = theirs.generate(
        ids,
        max_new_tokens=20,
        do_sample=False,
        repetition_penalty=1.7,
        sequence_bias=[[[120], 2.0], [[121], -1.0]],
        suppress_tokens=[token for token in range(VOCAB) if token not in ALLOWED],
        pad_token_id=0,
    )[0, ids.shape[1] :].tolist()
    found = drawn(
        model,
        [PROMPTS[0]],
        draft=str(model),
        temperature=0,
        repetition_penalty=1.7,
        logit_bias={120: 2.0, 121: -1.0},
        allowed_token_ids=ALLOWED,
    )
    assert {tuple(one.token_ids) for one in found.values()} == {tuple(due)}


def test_plan_counts_the_tables(model: Path) -> None:
    """Also those of a line: counts of 4 bytes a token, and a copy of the logits."""
    from bass_cli.io.prompts import Wanted
    from bass_cli.run.plan import make_plan

    pair = Pair(name="tiny", target=str(model), draft="none")
    base = Job(pair=pair, device="cpu", batch_size=4)
    penalised = base.model_copy(update={"sampling": Sampling(presence_penalty=1.0)})
    due = 4 * VOCAB * (4 + 20)
    plain = make_plan(base).memory_parts["buffers"]
    assert make_plan(penalised).memory_parts["buffers"] - plain >= due
    of_lines = make_plan(base, wanted=Wanted().with_prompt(penalised))
    assert of_lines.memory_parts["buffers"] - plain >= due
