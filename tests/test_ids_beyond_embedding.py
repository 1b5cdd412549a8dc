"""A tokenizer may have more ids than the model's embedding has rows. Each prompt with such an id gets
one error line, and a draft with fewer rows changes no sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from checkpoints import write_checkpoint, write_tokenizer

from bass_cli import Completion, Job, Pair, Sampling, Speculation, UserError, generate
from bass_cli.formats.tokenizer import Tokenizer
from bass_cli.run import profile as texts
from bass_cli.run.plan import make_plan

LATE = (
    "token '<late>' has id 300, but the model's embedding has 300 rows, and its tokenizer 301 ids"
)


def model(folder: Path, rows: int = 300, **changes: Any) -> Path:
    write_tokenizer(folder, extra=("<|im_end|>", "<late>"))
    write_checkpoint("llama", folder, shards=False, vocab_size=rows, **changes)
    assert len(transformers.AutoTokenizer.from_pretrained(folder)) == 301
    return folder


def job(target: Path, draft: str = "none", **changes: Any) -> Job:
    return Job(
        pair=Pair(name="tiny", target=str(target), draft=draft),
        n=2,
        device="cpu",
        token_ids=True,
        **{"sampling": Sampling(seed=3, max_new_tokens=8, temperature=1.0), **changes},
    )


def drawn(prompts: list[Any], made: Job) -> dict[str, list[Completion]]:
    found: dict[str, list[Completion]] = {}
    for one in generate(prompts, made):
        found.setdefault(one.id, []).append(one)
    return {key: sorted(found[key], key=lambda one: one.sample) for key in sorted(found)}


def test_prompt_with_an_id_beyond_the_embedding_is_one_error_line(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    found = drawn([
        {"id": "late", "prompt": "the cat <late> sat"},
        {"id": "last", "prompt": "the cat <|im_end|> sat"},
        {"id": "chat", "messages": [{"role": "user", "content": "the <late> cat"}]},
        {"id": "ids", "token_ids": [5, 999]},
        {"id": "reference", "prompt": "the cat", "reference": "the <late> cat"},
    ], job(folder, "lookup"))  # fmt: skip
    assert {key: [one.finish_reason for one in value] for key, value in found.items()} == {
        "late": ["error"], "last": ["length"] * 2, "chat": ["error"], "ids": ["error"], "reference": ["error"]}  # fmt: skip
    assert found["late"][0].error == LATE
    assert found["chat"][0].error == f"prompts[2]: {LATE}"
    assert found["ids"][0].error == "there is no token 999; the model has 0 to 299"
    assert found["reference"][0].error == f'field "reference": {LATE}'
    alone = drawn([{"id": "last", "prompt": "the cat <|im_end|> sat"}], job(folder, "lookup"))
    assert [one.token_ids for one in found["last"]] == [one.token_ids for one in alone["last"]]


def test_every_text_of_a_pair_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(job(model(tmp_path / "m")), longest_prompt="the <late> cat")
    tokenizer = plan.files.tokenizer
    for encode in (tokenizer.encode, tokenizer.encode_part):
        with pytest.raises(UserError, match="token '<late>' has id 300"):
            encode("the <late> cat")
    monkeypatch.setattr(texts, "PASSAGES", ("the <late> cat",))
    with pytest.raises(UserError, match="token '<late>' has id 300"):
        texts.joined(tokenizer, 0, 5)


def test_tokenizer_without_a_model_accepts_every_id(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, extra=("<|im_end|>", "<late>"))
    assert Tokenizer.load(tmp_path).encode("<late>") == [300]


@pytest.mark.parametrize("coupling", ["shared", "maximal"])
@pytest.mark.parametrize("rows", [230, 40])
def test_draft_with_a_smaller_embedding_changes_no_sample(
    rows: int, coupling: Any, tmp_path: Path
) -> None:
    """The target's ids in the prompt and in its samples lie beyond the draft's embedding."""
    target = model(tmp_path / "target", rows=301)
    draft = model(tmp_path / "draft", rows=rows, num_hidden_layers=1)
    prompts = [{"id": "a", "prompt": "the <late> cat"}, {"id": "b", "prompt": "sat <|im_end|>"}]
    exact = Speculation(coupling=coupling, length=3)
    sampling = Sampling(seed=3, max_new_tokens=8, temperature=1.0 if coupling == "shared" else 0)
    plain = drawn(prompts, job(target, sampling=sampling))
    drafted = drawn(prompts, job(target, str(draft), sampling=sampling, speculation=exact))
    ids = [one.token_ids for value in plain.values() for one in value]
    assert ids == [one.token_ids for value in drafted.values() for one in value]
    assert max(max(one) for one in ids) >= rows
    assert sum(one.drafted for value in drafted.values() for one in value) > 0


def test_stop_text_that_is_an_id_beyond_the_embedding_is_found_as_text(tmp_path: Path) -> None:
    """The tokenizer reads it as one id that the model lacks, but other tokens spell it too."""
    found = drawn(["the cat"], job(
        model(tmp_path / "m"), sampling=Sampling(seed=3, max_new_tokens=8, stop=("<late>",))
    ))  # fmt: skip
    assert [one.finish_reason for one in found["0"]] == ["length"] * 2


def test_end_id_beyond_the_embedding_has_a_note(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", eos_token_id=[2, 300])
    (note,) = [note for note in make_plan(job(folder)).notes if "eos_token_id" in note]
    assert note == f"{folder}: eos_token_id 300: the model has 300 ids, so no sample ends there"
