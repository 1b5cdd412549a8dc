"""Test stop texts that are special tokens, and the refusal of stop texts that no sample can contain.

The reference is the same job without stops, truncated by the test at the first such token, and
the tokenizers library on the same file.
"""

from __future__ import annotations

import collections
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import edit_json, tokenizer_metadata, write_checkpoint, write_gguf, write_tokenizer
from command_line import cli, rows_in
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from bass_cli import Job, Pair, Sampling, Speculation, UserError, generate
from bass_cli.formats.completion_text import special_stops
from bass_cli.formats.tokenizer import Tokenizer as BassTokenizer

END, CALL, VOCAB = "<|halt|>", "<call>", 301  # a special token, an added one that is ordinary


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama that often draws END and CALL."""
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    inner.add_tokens([AddedToken(CALL, special=False, normalized=False)])
    inner.save(str(folder / "tokenizer.json"))
    write_checkpoint("llama", folder, shards=False, vocab_size=VOCAB)
    weights = load_file(str(folder / "model.safetensors"))
    for text in (END, CALL):
        weights["lm_head.weight"][inner.token_to_id(text)] *= 10.0
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def reference(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def drawn(model: Path, stop: tuple[str, ...], **changes: Any) -> dict[Any, Any]:
    given = {
        "pair": Pair(name="tiny", target=str(model), draft=changes.pop("draft", "none")),
        "n": 6,
        "device": "cpu",
        "sampling": Sampling(seed=5, temperature=1.0, top_p=1.0, max_new_tokens=40, stop=stop),
        "token_ids": True,
    }
    prompts = ["the cat sat on", "a dog"]
    found = generate(prompts, Job(**given | changes), done=changes.pop("done", ()))
    return {(one.id, one.sample): one for one in found}


@pytest.mark.parametrize("length", [0, 5])
def test_special_token_stop_ends_the_sample(model: Path, length: int) -> None:
    """The target drafts for itself, so that stops are in the middle of accepted blocks."""
    inner = reference(model)
    end = inner.token_to_id(END)
    settings = {"speculation": Speculation(length=length)} if length else {}
    draft = str(model) if length else "none"
    whole = drawn(model, (), draft=draft, **settings)
    cut = drawn(model, (END,), draft=draft, **settings)
    assert set(cut) == set(whole)
    stopped = 0
    for key, one in cut.items():
        ids = whole[key].token_ids
        at = ids.index(end) + 1 if end in ids else len(ids)
        stopped += end in ids
        assert one.token_ids == ids[:at]
        assert one.tokens == at
        assert one.finish_reason == ("stop" if end in ids else whole[key].finish_reason)
        assert one.text == inner.decode(ids[:at], skip_special_tokens=True)
        assert one.sum_logprob == pytest.approx(one.mean_logprob * at)
    assert stopped >= 4
    if length:
        assert any(one.accepted > one.rounds for one in cut.values())
        alone = drawn(model, (END,))
        assert {key: one.token_ids for key, one in alone.items()} == {
            key: one.token_ids for key, one in cut.items()
        }


def test_an_added_token_that_is_not_special_stops_as_text(model: Path) -> None:
    inner = reference(model)
    call, whole = inner.token_to_id(CALL), drawn(model, ())
    stopped = 0
    for key, one in drawn(model, (CALL,)).items():
        ids = whole[key].token_ids
        if call in ids:
            stopped += 1
            assert (one.finish_reason, one.token_ids) == ("stop", ids[: ids.index(call) + 1])
            assert one.text == inner.decode(one.token_ids).partition(CALL)[0]
    assert stopped >= 4


@pytest.mark.parametrize("length", [0, 5])
def test_stop_token_ids_end_samples_and_include_stop_keeps_their_text(
    model: Path, length: int
) -> None:
    """An ordinary token, an added one and a special one, against the truncated samples."""
    inner, draft = reference(model), str(model) if length else "none"
    settings = {"speculation": Speculation(length=length)} if length else {}
    plain = drawn(model, ())
    ordinary = collections.Counter(id_ for one in plain.values() for id_ in one.token_ids[1:])
    special = {inner.token_to_id(text): text for text in (END, "</s>", "<s>", "<unk>")}
    common = next(id_ for id_, _ in ordinary.most_common() if id_ not in special)
    stops = (common, inner.token_to_id(CALL), inner.token_to_id(END))
    for include in (False, True):
        sampling = Sampling(seed=5, temperature=1.0, top_p=1.0, max_new_tokens=40,
                            stop_token_ids=stops, include_stop=include)  # fmt: skip
        found, seen = drawn(model, (), draft=draft, sampling=sampling, **settings), set()
        for key, one in found.items():
            whole = plain[key].token_ids
            at = next((i for i, id_ in enumerate(whole) if id_ in stops), None)
            if at is None:
                assert one.token_ids == whole
                continue
            seen.add(whole[at])
            assert one.token_ids == whole[: at + 1]
            assert one.finish_reason == "stop"
            text = inner.decode(whole[: at + 1] if include else whole[:at])
            assert one.text == text + (special.get(whole[at], "") if include else "")
        assert len(seen) >= 2


def test_include_stop_keeps_a_stop_text_and_nothing_after_it(model: Path) -> None:
    plain, ended = drawn(model, ()), 0
    sampling = Sampling(seed=5, temperature=1.0, top_p=1.0, max_new_tokens=40, stop=("a", "the"),
                        include_stop=True)  # fmt: skip
    without = drawn(model, ("a", "the"))
    for key, one in drawn(model, (), sampling=sampling).items():
        before, text = without[key].text, plain[key].text
        assert one.token_ids == without[key].token_ids
        if one.finish_reason == "stop":
            ended += 1
            stop = next(stop for stop in ("a", "the") if text.startswith(before + stop))
            assert one.text == before + stop
    assert ended >= 4


def test_stop_token_id_beyond_the_model_is_refused(model: Path) -> None:
    with pytest.raises(UserError, match=r"`sampling.stop_token_ids`: 301 could never be drawn"):
        drawn(model, (), sampling=Sampling(stop_token_ids=(VOCAB,)))


def test_a_resumed_file_ends_at_the_same_special_tokens(model: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("the cat sat on\na dog\n")
    out = tmp_path / "out.jsonl"
    flags = ["--model", str(model), "--draft", "none", "--device", "cpu", "--n", "4", "--stop"]
    flags += [END, "--temperature", "1", "--max-new-tokens", "30", "--token-ids", "--quiet"]
    command = ["generate", str(tmp_path / "p.txt"), *flags, "--out", str(out)]
    wanted = ("id", "sample", "text", "finish_reason", "tokens", "sum_logprob", "token_ids")

    def lines() -> list[Any]:
        rows = rows_in(out)
        return sorted([row[key] for key in wanted] for row in rows)

    cli(*command, code=0)
    first = lines()
    assert any(row[3] == "stop" for row in first)
    out.write_text("".join(itertools.islice(out.open(), 3)))
    cli(*command, code=0)
    assert lines() == first


def test_end_of_sequence_given_as_stop_is_still_eos(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for name in ("config.json", "generation_config.json"):
        edit_json(tmp_path / name, eos_token_id=299)
    plain, stopped = drawn(tmp_path, ()), drawn(tmp_path, (END,))
    reasons = [one.finish_reason for one in stopped.values()]
    assert reasons.count("eos") >= 4
    assert "stop" not in reasons
    assert {key: one.token_ids for key, one in stopped.items()} == {
        key: one.token_ids for key, one in plain.items()
    }


@pytest.mark.parametrize("stop", [END + "\n", "\n" + END, f"a{END}b", END + END, END + "</s>"])
def test_a_special_token_with_other_text_is_refused(model: Path, stop: str) -> None:
    with pytest.raises(UserError, match=r"it contains the special token '(<\|halt\|>|</s>)'"):
        drawn(model, ("x", stop))


@pytest.mark.parametrize("place", ["flag", "environment", "pair"])
def test_invalid_stop_is_refused_early_from_every_source(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    bad = END + "\n"
    (tmp_path / "p.txt").write_text("the cat\n")
    (tmp_path / "pair.yaml").write_text(
        f"target: {model}\n" + (f"sampling: {{stop: {json.dumps([bad])}}}\n" * (place == "pair"))
    )
    command = ["generate", str(tmp_path / "p.txt"), "--pair", str(tmp_path / "pair.yaml")]
    command += ["--stop", bad] * (place == "flag")
    if place == "environment":
        monkeypatch.setenv("BASS_STOP", json.dumps([bad]))
    monkeypatch.setattr("bass_cli.run.engine.load_models", None)  # its call would fail
    assert "<|halt|>" in cli(*command, code=2).output


def test_ordinary_tokens_that_spell_a_special_one_stop_too(model: Path) -> None:
    """Models that were not trained on a template write such text."""
    from bass_cli.formats.completion_text import Continuation
    from bass_cli.run.tasks import EndRule

    tokenizer = BassTokenizer.load(model)
    spelled = [tokenizer.encode_part(letter)[0] for letter in f"hi{END}"]
    detector = EndRule(set(), [END], {299}).detector(Continuation(tokenizer, [5]))
    assert detector is not None
    found = detector.feed(spelled)
    assert found is not None
    assert (found.text, found.tokens) == ("hi", len(spelled))


def test_control_tokens_of_gguf_files_are_special(model: Path, tmp_path: Path) -> None:
    metadata = tokenizer_metadata(model)
    size = len(metadata["tokenizer.ggml.tokens"])
    write_gguf("llama", tmp_path / "m.gguf", vocab_size=size, metadata=metadata)
    tokenizer = BassTokenizer.load(tmp_path / "m.gguf")
    inner = reference(model)
    assert special_stops(tokenizer, ["x", END]) == {inner.token_to_id(END)}
    assert special_stops(tokenizer, ["x", "</s>", "\ufffd"]) == {inner.token_to_id("</s>")}


def test_a_character_that_no_token_has_is_refused(tmp_path: Path) -> None:
    vocabulary = {"the": 0, "cat": 1, "sat": 2, "<unk>": 3}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.decoder = decoders.WordPiece()
    inner.add_special_tokens([AddedToken("<unk>", special=True)])
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}'
    )
    tokenizer = BassTokenizer.load(tmp_path)
    assert "Z" not in "".join(inner.decode([id_]) for id_ in vocabulary.values())
    with pytest.raises(UserError, match="no token of this model has the character 'Z'"):
        special_stops(tokenizer, ["cat", "Zebra"])
    assert special_stops(tokenizer, ["at s", "<unk>"]) == {3}


def test_a_special_token_beyond_the_models_vocabulary_is_refused(
    model: Path, tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    write_checkpoint("llama", tmp_path, vocab_size=VOCAB - 2)
    with pytest.raises(UserError, match="token 299 of the tokenizer, and the model has tokens 0"):
        drawn(tmp_path, (END,))


def test_rivals_get_the_same_end_tokens(model: Path) -> None:
    """Rivals get token ids, so a stop that is a special token is one of their end ids."""
    from bass_cli.bench.rivals import describe
    from bass_cli.run.plan import make_plan

    sampling = Sampling(stop=[END, "x"], max_new_tokens=4)
    pair = Pair(name="tiny", target=str(model), draft="none")
    plan = make_plan(Job(pair=pair, device="cpu", sampling=sampling))
    order = describe(plan, longest=5, rows=1)
    assert order["eos"] == [2, 299]
    assert list(order["stop"]) == [END, "x"]


@pytest.mark.parametrize(
    "stop", [["\ud800"], ["x", "a\udcff"], "\udfff", [""], [3], {"a": 1}, b"a"]
)
def test_stop_that_is_no_text_is_refused(stop: Any) -> None:
    with pytest.raises(ValueError, match="stop"):
        Sampling(stop=stop)
