"""Test whole jobs with --max-thinking-tokens: the closing tag is forced at its place, for any draft,
draft length and coupling, and the tokens are those of transformers with the same rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import write_checkpoint, write_tokenizer
from command_line import cli, rows_in
from templates import OPENED

from bass_cli import Engine, generate
from bass_cli.config.job import Job
from bass_cli.errors import UserError
from bass_cli.io.results import Completion

TAGS = ("<think>", "</think>")
LIMIT, NEW = 6, 14
USER = {"role": "user", "content": "the cat sat"}
CLOSE = 300  # the id of </think> in the tokenizer below


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose template opens the thinking part, and a draft beside it."""
    folder = tmp_path_factory.mktemp("thinking")
    for name, seed in (("target", 0), ("draft", 1)):
        sizes = {"num_hidden_layers": 2, "vocab_size": 301, "eos_token_id": 2}
        write_checkpoint("llama", folder / name, seed=seed, shards=False, **sizes)
        write_tokenizer(folder / name, extra=TAGS, template=False)
        (folder / name / "chat_template.jinja").write_text(OPENED)
    loaded = transformers.AutoTokenizer.from_pretrained(folder / "target")
    assert loaded.convert_tokens_to_ids("</think>") == CLOSE
    return folder


def drawn(model: Path, **fields: Any) -> dict[int, Completion]:
    draft = fields.pop("draft", "none")
    pair = {"name": "t", "target": str(model / "target"),
            "draft": str(model / "draft") if draft == "model" else draft}  # fmt: skip
    sampling = {"max_new_tokens": NEW, "max_thinking_tokens": LIMIT} | fields.pop("sampling", {})
    job = Job(pair=pair, n=3, device="cpu", token_ids=True, sampling=sampling, **fields)  # type: ignore[arg-type]
    return {one.sample: one for one in generate([{"messages": [USER]}], job)}


def of_transformers(model: Path, *, limit: int) -> list[int]:
    """Return the greedy tokens of transformers, with the closing tag as the only token at the
    limit."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model / "target")
    target = transformers.AutoModelForCausalLM.from_pretrained(model / "target").eval()
    text = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        done = ids[0, len(prompt) :].tolist()
        if len(done) >= limit and CLOSE not in done:
            forced = torch.full_like(scores, -torch.inf)
            forced[:, CLOSE] = 0
            return forced
        return scores

    found = target.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW, logits_processor=[process]
    )
    return list(found[0, len(prompt) :].tolist())


@pytest.mark.parametrize("coupling", ["shared", "maximal"])
@pytest.mark.parametrize(("draft", "length"), [("none", "auto"), ("lookup", 3), ("model", 4)])
def test_greedy_tokens_are_those_of_transformers(
    model: Path, draft: str, length: Any, coupling: str
) -> None:
    found = drawn(
        model, draft=draft, sampling={"temperature": 0.0},
        speculation={"length": length, "coupling": coupling},
    )[0]  # fmt: skip
    assert found.token_ids == of_transformers(model, limit=LIMIT)
    assert found.reasoning_tokens is not None
    assert found.token_ids is not None
    assert found.token_ids[found.reasoning_tokens - 1] == CLOSE
    assert found.reasoning_tokens <= LIMIT + 1


@pytest.mark.parametrize(
    ("draft", "length"), [("lookup", 4), ("model", 1), ("model", 5), ("skip:1", 3)]
)
def test_sampled_tokens_do_not_depend_on_drafts(model: Path, draft: str, length: int) -> None:
    plain = drawn(model)
    drafted = drawn(model, draft=draft, speculation={"length": length})
    assert {k: v.token_ids for k, v in plain.items()} == {
        k: v.token_ids for k, v in drafted.items()
    }
    assert all(CLOSE in (one.token_ids or ())[: LIMIT + 1] for one in plain.values())
    assert all(one.text == drafted[k].text for k, one in plain.items())


def test_without_a_limit_the_part_stays_open_and_the_samples_begin_alike(model: Path) -> None:
    limited, free = drawn(model), drawn(model, sampling={"max_thinking_tokens": None})
    for sample, one in free.items():
        ids, other = one.token_ids or [], limited[sample].token_ids or []
        assert ids[:LIMIT] == other[:LIMIT]
        if CLOSE not in ids:
            assert (one.text, one.reasoning_tokens) == ("", len(ids))


def test_a_line_has_its_own_limit_and_resuming_changes_nothing(model: Path, tmp_path: Path) -> None:
    lines = [{"id": str(n), "messages": [USER], "max_thinking_tokens": n} for n in (0, 2, 40)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = ["generate", str(tmp_path / "p.jsonl"), "--model", str(model / "target"), "-n", "2"]
    given += ["--max-new-tokens", "14", "--token-ids", "--device", "cpu", "--out"]

    def rows(path: Path) -> dict[Any, Any]:
        found = rows_in(path)
        return {
            (row["id"], row["sample"]): (row["token_ids"], row.get("reasoning")) for row in found
        }

    whole, part = tmp_path / "o.jsonl", tmp_path / "part.jsonl"
    cli(*given, str(whole), code=0)
    cli(*given, str(part), code=0)
    kept = part.read_text().splitlines(keepends=True)[:2]
    part.write_text("".join(kept))
    cli(*given, str(part), "--draft-length", "0", code=0)
    assert rows(part) == rows(whole)
    assert all(ids[0] == CLOSE for (id_, _), (ids, _) in rows(whole).items() if id_ == "0")
    assert "thinking" in cli(*given, str(whole), "--thinking", "keep", code=2).stderr


def test_a_model_without_tags_refuses_the_limit(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path, shards=False, num_hidden_layers=2)
    write_tokenizer(tmp_path)
    job = Job(pair={"name": "x", "target": str(tmp_path)}, sampling={"max_thinking_tokens": 3})  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"`sampling.max_thinking_tokens`: .* has no thinking part"):
        list(generate(["a"], job))


def test_a_stream_shows_the_answer_only(model: Path) -> None:
    sampling = {"max_new_tokens": 24, "max_thinking_tokens": LIMIT}
    pair = {"name": "t", "target": str(model / "target"), "draft": "lookup"}
    with Engine(Job(pair=pair, n=3, device="cpu", sampling=sampling)) as engine:  # type: ignore[arg-type]
        shown, whole = dict[int, str](), dict[int, Completion]()
        for piece in engine.stream([{"messages": [USER]}]):
            shown[piece.sample] = shown.get(piece.sample, "") + piece.text
            if piece.completion is not None:
                whole[piece.sample] = piece.completion
    assert {sample: one.text for sample, one in whole.items()} == shown
    assert all(one.reasoning is not None for one in whole.values())
    assert any(shown.values())
