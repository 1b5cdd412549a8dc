"""Whole jobs with models that run through transformers' own layers: drafts, resuming, memory,
log-probabilities, processors, and the settings that are refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from any_families import write_any
from chains import write_chain
from checkpoints import write_mask, write_tokenizer
from command_line import cli, rows_in
from heads import write_head

from bass_cli import Completion, Engine, Job, Pair, Sampling, Speculation, UserError, generate
from bass_cli.distill.settings import find_source
from bass_cli.engine.loop import Loop
from bass_cli.formats.tokenizer import Tokenizer
from bass_cli.models.spec import Format
from bass_cli.run.build import build
from bass_cli.run.plan import make_plan

VOCAB = 301  # at least the tokenizer's ids
WORDS = ("the cat", "a dog sat on the mat and then", "it ran")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Targets of two families and a draft."""
    folder = tmp_path_factory.mktemp("any")
    for name, family, seed in (
        ("target", "gpt_oss", 0),
        ("draft", "gemma2", 1),
        ("shared", "gemma4_text", 2),
    ):
        sizes = {"vocab_size_per_layer_input": VOCAB} if family == "gemma4_text" else {}
        write_any(family, folder / name, seed=seed, vocab_size=VOCAB, **sizes)
        write_tokenizer(folder / name)
    write_mask(folder / "draft", 5)
    return folder


def job(place: Path, *, draft: str = "none", target: str = "target", **changes: Any) -> Job:
    sampling = Sampling(seed=3, max_new_tokens=12, temperature=0.9, top_p=0.9)
    given = {"n": 2, "device": "cpu", "threads": 1, "sampling": sampling, "token_ids": True}
    words = draft.replace("draft", str(place / "draft"))
    pair = Pair(name="tiny", target=str(place / target), draft=words, decoder="transformers")
    return Job(**{"pair": pair} | given | changes)


def tokens_of(job: Job) -> dict[Any, Any]:
    found = list(generate(list(WORDS), job))
    return {(one.id, one.sample): (one.token_ids, one.finish_reason) for one in found}


@pytest.fixture(scope="module")
def plainly(place: Path) -> dict[Any, Any]:
    return tokens_of(job(place))


@pytest.mark.parametrize("draft", ["lookup", "draft", "parallel:draft", "skip:1"])
def test_samples_with_any_draft_equal_plain_decoding(
    place: Path, plainly: dict[Any, Any], draft: str
) -> None:
    given = job(place, draft=draft, speculation=Speculation(length=3), batch_size=4)
    assert tokens_of(given) == plainly


def test_auto_lengths_and_batch_sizes_equal_plain_decoding(
    place: Path, plainly: dict[Any, Any]
) -> None:
    assert tokens_of(job(place, draft="draft")) == plainly


def test_llama_through_transformers_equals_the_native_decoder(place: Path, tmp_path: Path) -> None:
    write_any("llama", tmp_path, vocab_size=VOCAB)
    write_tokenizer(tmp_path)
    found = [
        tokens_of(job(place).model_copy(update={"pair": pair}))
        for pair in (
            Pair(name="tiny", target=str(tmp_path), decoder=decoder)
            for decoder in ("native", "transformers")
        )
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
def test_drafters_of_hidden_states_draft_as_with_the_native_decoder(
    tmp_path: Path, kind: str
) -> None:
    write_any("llama", tmp_path / "target", vocab_size=VOCAB)
    write_tokenizer(tmp_path / "target")
    if kind == "dflash":
        write_head(tmp_path / "head", kind, width=32, vocab=VOCAB)
    else:
        write_chain(tmp_path / "head", "authors", width=32, vocab=VOCAB, target_layer_ids=[0, 1, 2])
    found = []
    for decoder in ("native", "transformers"):
        target, heads = str(tmp_path / "target"), f"heads:{tmp_path / 'head'}"
        pair = Pair(name="tiny", target=target, draft=heads, decoder=decoder)
        given = job(tmp_path, speculation=Speculation(length=3), sampling=Sampling(temperature=0.0))
        given = given.model_copy(update={"pair": pair})
        lines = list(generate(list(WORDS), given))
        found.append([(one.token_ids, one.drafted, one.accepted) for one in lines])
    assert found[0] == found[1]
    assert sum(drafted for _, drafted, _ in found[0]) > 0


def test_log_probabilities_are_those_of_transformers(place: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(place / "target", attn_implementation="eager")
    tokenizer = Tokenizer.load(place / "target")
    sampling = Sampling(max_new_tokens=9, logprobs=2, prompt_logprobs=0)
    for one in generate(list(WORDS), job(place, draft="lookup", n=1, sampling=sampling)):
        prompt = tokenizer.encode(WORDS[int(one.id)], 1000)
        assert one.token_ids is not None
        with torch.inference_mode():
            logits = theirs(torch.tensor([prompt + one.token_ids])).logits[0, :, : tokenizer.size]
        scores = logits.log_softmax(-1)
        whole = [float(scores[at, id_]) for at, id_ in enumerate([*prompt, *one.token_ids][1:])]
        assert one.token_logprobs == pytest.approx(whole[len(prompt) - 1 :], abs=1e-4)


def test_processors_change_samples_alike_with_and_without_drafts(place: Path) -> None:
    sampling = Sampling(
        seed=3, max_new_tokens=12, temperature=0.9, repetition_penalty=1.3, bad_words=["the"]
    )
    drafted, plain = (
        tokens_of(job(place, draft=draft, sampling=sampling)) for draft in ("draft", "none")
    )
    assert drafted == plain


def test_keys_in_eight_bits_draw_the_same_with_any_draft(place: Path) -> None:
    drafted, plain = (
        tokens_of(job(place, draft=draft, kv_dtype="fp8")) for draft in ("draft", "none")
    )
    assert drafted == plain


def test_run_resumes_where_it_stopped(place: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("".join(f"the cat number {n} sat\n" for n in range(4)))
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("whole", "parts")}

    def bass(out: str, *flags: str) -> Any:
        given = ("--model", str(place / "target"), "--draft", str(place / "draft"), "--n", "2")
        given += ("--decoder", "transformers")
        fixed = ("--max-new-tokens", "9", "--device", "cpu", "--token-ids", "--out", out)
        return cli("generate", str(tmp_path / "p.txt"), *given, *fixed, *flags, code=0)

    first = bass(files["whole"])
    assert first.stderr.count("gpt_oss runs through transformers' own layers") == 1
    bass(files["parts"], "--limit", "2")
    Path(files["parts"]).write_text(Path(files["parts"]).read_text()[:-30])  # killed in a line
    bass(files["parts"], "--batch-size", "3")
    lines = [
        {(line["id"], line["sample"]): line["token_ids"] for line in rows_in(file)}
        for file in files.values()
    ]
    assert len(lines[0]) == 8
    assert lines[0] == lines[1]


def _held(loop: Loop) -> int:
    runners = [loop.target, *([loop.drafter.runner] if hasattr(loop.drafter, "runner") else [])]
    tokens = loop.batch.tokens
    return sum(runner.cache.bytes() for runner in runners) + tokens.numel() * tokens.element_size()


@pytest.mark.parametrize("target", ["target", "shared"])
@pytest.mark.parametrize("draft", ["draft", "none"])
def test_caches_and_weights_are_planned_to_the_byte(place: Path, target: str, draft: str) -> None:
    def both(rows: int, tokens: int) -> tuple[int, int, int]:
        sampling = Sampling(max_new_tokens=tokens)
        length = Speculation(length=4 if draft != "none" else 0)
        given = job(
            place,
            target=target,
            draft=draft,
            batch_size=rows,
            sampling=sampling,
            speculation=length,
        )
        plan = make_plan(given)
        loop = build(plan)
        found = sum(one.numel() for one in loop.target.decoder.model.parameters())
        if draft != "none":
            found += sum(one.numel() for one in loop.drafter.runner.decoder.model.parameters())
        assert plan.footprint.weights == 4 * found
        return plan.footprint.bytes(rows, tokens), _held(loop), plan.rows

    sizes = {(rows, tokens): both(rows, tokens) for rows in (2, 5) for tokens in (10, 60)}
    assert all(held < planned for planned, held, _ in sizes.values())
    planned, held = (
        sizes[5, 60][i] - sizes[5, 10][i] - sizes[2, 60][i] + sizes[2, 10][i] for i in (0, 1)
    )
    places = 1 if draft == "none" else 5
    assert planned - held == 3 * 50 * (16 + 8 * 4 * places)


def test_score_of_an_engine_equals_its_samples(place: Path) -> None:
    with Engine(job(place, draft="lookup")) as engine:
        found: list[Completion] = list(engine.generate(["the cat"]))
        assert {one.finish_reason for one in found} <= {"length", "eos"}
        with pytest.raises(UserError, match="whose weights cannot be replaced; make a new engine"):
            engine.update_weights({"model.norm.weight": torch.ones(32)})
        again = list(engine.generate(["the cat"]))
    assert [one.token_ids for one in found] == [one.token_ids for one in again]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel": 2}, "`tensor_parallel` 2: .* own layers, which are not split; use 1"),
        ({"dtype": "int8"}, "`dtype` int8: .* own layers"),
        ({"target": "shared", "draft": "skip:1"}, "`pair.draft` skip:1: .* layer 4 reads the keys"),
        ({"draft": "draft", "draft_dtype": "fp8"}, "`draft_dtype` fp8: the draft .* own layers"),
    ],
)
def test_settings_without_support_are_refused_before_weights_are_read(
    place: Path, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bass_cli.run.build.load_any", None)
    with pytest.raises(UserError, match=message):
        make_plan(job(place, **changes))


def test_distilling_needs_a_native_target(place: Path) -> None:
    from bass_cli.config.machine_commands import DistillArgs

    given = job(place)
    with pytest.raises(UserError, match=r"`model`: .* own layers, and bass distill trains native"):
        find_source(DistillArgs(), given.pair, make_plan(given))


def test_floor_of_bench_counts_the_weights_of_layers(place: Path) -> None:
    from bass_cli.bench.floor import sizes_of

    decoder = build(make_plan(job(place))).target.decoder
    whole = sum(one.numel() for one in decoder.model.parameters())
    assert decoder.format == Format(torch.float32), "the document of bench has its name"
    sizes = sizes_of(decoder)
    assert sizes.body + 2 * VOCAB * 32 == whole
    assert sizes.keys == 2 * 2 * 8
    assert list(itertools.chain(sizes.windows)) == [5, 0, 5]
