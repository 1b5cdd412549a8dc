"""Rankers that run a model or programs, against transformers and against Python itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import edit_json, write_checkpoint, write_tokenizer
from command_line import cli, rows_in
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from bass_cli import Job, Pair, Sampling
from bass_cli.errors import UserError
from bass_cli.eval.stores import ScoreStore, digest_of
from bass_cli.rank import model_rankers
from bass_cli.rank.code import parse
from bass_cli.rank.model_rankers import (
    AgreementRanker,
    ReverseRanker,
    RewardRanker,
    context_of,
    passed_tests,
    test_prompt,
    tests_in,
)
from bass_cli.rank.ranking import Candidate, Group, Scores, candidate_of
from bass_cli.sandbox.programs import Sandbox

test_prompt.__test__ = tests_in.__test__ = False  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint("llama", folder, seed=0, max_position_embeddings=128)
    write_tokenizer(folder)
    return folder


def job(folder: Path) -> Job:
    return Job(pair=Pair(name="tiny", target=str(folder), draft="none"), device="cpu", n=2)


def group(id_: str, prompt: str | None, *texts: str) -> Group:
    candidates = [candidate_of(prompt, at, text, "eos", -0.1) for at, text in enumerate(texts)]
    return Group(id_, prompt, candidates)


@torch.inference_mode()
def due(folder: Path, context: str, prompt: str) -> float:
    """Return the mean log-probability of the prompt's tokens after the context."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before = tokenizer(context).input_ids
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    logits = model(torch.tensor([before + ids])).logits[0, len(before) - 1 : -1, : len(tokenizer)]
    scores = logits.double().log_softmax(-1)
    return float(scores[torch.arange(len(ids)), torch.tensor(ids)].mean())


def test_reverse_is_the_probability_of_the_prompt_after_the_sample(folder: Path) -> None:
    groups = [
        group("a", "the cat sat", "a mat", "the other cat", "a mat"),
        group("b", "x", "too long " * 60, "y"),
    ]
    first, second = ReverseRanker(job(folder)).scores(groups)
    after = "\n\nThe text above is the answer to this request:\n"
    wanted = [due(folder, text + after, "the cat sat") for text in ("a mat", "the other cat")]
    assert first == pytest.approx([*wanted, wanted[0]], abs=1e-4)
    assert second[0] is None
    assert second[1] == pytest.approx(due(folder, "y" + after, "x"), abs=1e-4)


def test_reverse_shows_no_words_of_the_prompt_in_code() -> None:
    prompt = 'def f(x):\n    """Add one."""\n'
    one = candidate_of(prompt, 0, "    return x + 1  # Add one.\n", "eos", None)
    after = "\n\n# Write a docstring for the above function\n"
    assert context_of(one) == "def f(x):\n    return x + 1" + after


def test_programs_that_answer_nothing_have_no_reverse_score(folder: Path) -> None:
    prompt = "def f(x):\n"
    bodies = ["    pass\n", "    return x +\n", "    return x\n"]
    candidates = [Candidate(at, body, "eos", None, prompt + body) for at, body in enumerate(bodies)]
    ranker = ReverseRanker(job(folder))
    (found,) = ranker.scores([Group("a", prompt, candidates, "f")])
    context = "def f(x):\n    return x" + "\n\n# Write a docstring for the above function\n"
    assert list(found) == [None, None, pytest.approx(due(folder, context, prompt), abs=1e-4)]
    assert list(ranker.scores([Group("a", prompt, candidates[:2], "f")])) == [[None, None]]


def classifier(folder: Path, labels: int, *, template: bool, pad: int | None = None) -> Any:
    torch.manual_seed(labels)
    config = LlamaConfig(
        vocab_size=304, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_labels=labels, max_position_embeddings=96, pad_token_id=pad,
    )  # fmt: skip
    model = LlamaForSequenceClassification(config).eval()
    with torch.no_grad():
        model.score.weight.normal_()
    model.save_pretrained(folder)
    write_tokenizer(folder, template=template)
    return model


@pytest.mark.parametrize(
    ("labels", "template", "pad"), [(1, True, 0), (1, False, None), (2, True, 2), (2, False, 0)]
)
def test_reward_is_the_logit_of_transformers(
    tmp_path: Path, labels: int, template: bool, pad: int | None
) -> None:
    model = classifier(tmp_path, labels, template=template, pad=pad)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    texts = ["the mat", "a cat", "the mat", "written down", "the", "way too long " * 40, "\ud800"]
    ranker = RewardRanker(f"reward:{tmp_path}", device="cpu", dtype="fp32", batch=2)
    (found,) = ranker.scores([group("a", "the cat", *texts)])
    wanted: list[float] = []
    for text in texts[:-2]:
        shown = (f"<s>[user] the cat</s>[assistant] {text}</s>",) if template else ("the cat", text)
        ids = tokenizer(*shown, add_special_tokens=not template, return_tensors="pt").input_ids
        model.config.pad_token_id = None
        with torch.inference_mode():
            logits = model(ids).logits[0]
        wanted.append(float(logits[0] if labels == 1 else logits[1] - logits[0]))
    assert list(found)[:-2] == pytest.approx(wanted, abs=1e-5)
    assert list(found)[-2:] == [None, None]
    assert len(set(wanted)) > 3


def test_wrong_reward_models_are_refused(tmp_path: Path) -> None:
    classifier(tmp_path, 3, template=True)
    with pytest.raises(UserError, match="3 outputs"):
        list(RewardRanker(f"reward:{tmp_path}", device="cpu").scores([group("a", "x", "y")]))
    words = {"id2label": {"0": "worse", "1": "better"}, "label2id": {"worse": 0, "better": 1}}
    edit_json(tmp_path / "config.json", **words)
    with pytest.raises(UserError, match=r'"score\.weight" has shape \[3, 16\], and .* \[2, 16\]'):
        list(RewardRanker(f"reward:{tmp_path}", device="cpu").scores([group("a", "x", "y")]))
    with pytest.raises(UserError, match="cannot be loaded"):
        list(RewardRanker("reward:/no/model", device="cpu").scores([group("a", "x", "y")]))
    with pytest.raises(UserError, match="runs in auto, bf16"):
        RewardRanker("reward:x", dtype="fp8")


def test_language_models_are_no_reward_models(folder: Path) -> None:
    ranker = RewardRanker(f"reward:{folder}", device="cpu")  # its classifier would be random
    with pytest.raises(UserError, match=r'no tensor "score\.weight"; name a checkpoint'):
        list(ranker.scores([group("a", "x", "y")]))


def test_loading_a_reward_model_prints_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    classifier(tmp_path, 1, template=True)
    transformers.logging.enable_progress_bar()
    try:
        list(RewardRanker(f"reward:{tmp_path}", device="cpu").scores([group("a", "x", "y")]))
    finally:
        transformers.logging.disable_progress_bar()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", ["reverse", "reward"])
def test_unknown_prompts_are_refused(folder: Path, tmp_path: Path, kind: str) -> None:
    classifier(tmp_path, 1, template=True)
    reward = RewardRanker(f"reward:{tmp_path}", device="cpu", dtype="fp32")
    made: Any = ReverseRanker(job(folder)) if kind == "reverse" else reward
    with pytest.raises(UserError, match="unknown"):
        list(made.scores([group("a", None, "y")]))


HEAD = 'def double(x):\n    """Return twice x."""\n'
BODIES = ["    return 2 * x\n", "    return x + x\n", "    return x * x\n", "    return 2 *\n",
          "    raise SystemExit\n"]  # fmt: skip
DRAWN = [
    "2) == 4\nassert double(0) == 0\nassert double('a') == 'aa'\nassert other(1)",
    "2) == 4\nassert double(\n    3\n) == 6, 'six'\n\nprint(1)",
    "1) == 3\nassert True\nassert double(0) ==\nassert math.isclose(double(0.5), 1)",
]
TESTS = ["double(2) == 4", "double(0) == 0", "double('a') == 'aa'", "double(3) == 6",
         "double(1) == 3", "math.isclose(double(0.5), 1)"]  # fmt: skip


def programs() -> Group:
    candidates = [Candidate(at, body, "eos", None, HEAD + body) for at, body in enumerate(BODIES)]
    return Group("d", HEAD, [*candidates, Candidate(9, "no code")], "double")


def test_tests_are_the_valid_assertions_on_the_function() -> None:
    assert tests_in(DRAWN, "double") == TESTS
    many = "0) == 0\n" + "".join(f"assert double({at}) == 0\n" for at in range(1, 9))
    assert tests_in([many], "double") == [f"double({at}) == 0" for at in range(5)]
    assert tests_in([], "double") == []


@pytest.mark.parametrize(
    ("prompt", "head"),
    [
        (HEAD, f"{HEAD}    pass"),
        ("def f(x):\n", "def f(x):\n    pass"),
        ("import os\n", "import os"),
    ],
)
def test_model_is_asked_for_tests_after_a_whole_function(prompt: str, head: str) -> None:
    asked = test_prompt(Group("a", prompt, [], "f"))
    assert asked == f"{head}\n\n# check the correctness of f\nassert f("
    with pytest.raises(UserError, match="no known function"):
        test_prompt(Group("a", prompt, []))


def reference(program: str | None, test: str) -> bool:
    """Run a test of a program that ends, in this process."""
    scope: dict[str, Any] = {}
    try:
        exec(f"import math\n{program}", scope)
        return bool(eval(test, scope))
    except BaseException:
        return False


def test_score_is_passed_tests_times_samples_that_agree(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's drawing is replaced; the programs run in the real sandbox."""
    monkeypatch.setattr(model_rankers, "_drawn", lambda engine, groups: [DRAWN for _ in groups])
    vectors = [
        tuple(one.program is not None and reference(one.program, test) for test in TESTS)
        for one in programs().candidates
    ]
    assert sum(vectors[0]) == 5
    ranker = AgreementRanker(job(folder), consent=True, workers=2)
    (found,) = ranker.scores([programs()])
    assert found == [float(sum(one) * vectors.count(one)) for one in vectors]
    assert found[:3] == [10, 10, sum(vectors[2])]


def test_a_loop_in_one_test_leaves_the_results_of_the_others() -> None:
    body = "    while x == 3: pass\n    return 2 * x\n"
    one = Group("d", HEAD, [Candidate(0, body, "eos", None, HEAD + body)], "double")
    limits = model_rankers.DEFAULT_LIMITS._replace(seconds=0.7, cpu_seconds=1)
    with Sandbox(workers=2, limits=limits) as sandbox:
        (found,) = passed_tests(one, TESTS[:4], sandbox, sandbox)
    assert found == (True, True, True, False)


class Counting:
    """A ranker that stops after some groups."""

    name, identity = "reverse", {"target": "t"}

    def __init__(self, most: int):
        self.scored, self._most = list[str](), most

    def scores(self, groups: Iterable[Group]) -> Iterator[Scores]:
        for one in groups:
            if len(self.scored) == self._most:
                raise KeyboardInterrupt
            self.scored.append(one.id)
            yield [float(len(candidate.text)) for candidate in one.candidates]


def test_interrupted_ranking_goes_on(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"id": id_, "sample": at, "text": "x" * (at + 1), "finish_reason": "eos", "prompt": "p"}
        for id_ in "abc"
        for at in range(2)
    ]
    content = "".join(json.dumps(row) + "\n" for row in rows)
    Path("f.jsonl").write_text(content)
    made: list[Counting] = []

    def rank(most: int) -> Any:
        made.append(Counting(most))
        monkeypatch.setattr("bass_cli.eval.rank_command._ranker_of", lambda *args: made[-1])
        return cli("rank", "f.jsonl", "--by", "reverse", "--model", "m")

    assert rank(2).exit_code == 130
    assert Path("f.jsonl").read_text() == content
    with open("f.jsonl.scores.jsonl", "ab") as stream:
        stream.write(b'{"ranker": "reve')  # a line that a kill cut
    assert rank(9).exit_code == 0
    assert [one.scored for one in made] == [["a", "b"], ["c"]]
    found = rows_in("f.jsonl")
    assert [row["rank"] for row in found] == [2, 1] * 3
    assert not Path("f.jsonl.scores.jsonl").exists()


def test_scores_depend_on_model_prompt_and_samples(tmp_path: Path) -> None:
    base = group("a", "p", "x", "y")
    ranker = Counting(9)
    others = [group("a", "q", "x", "y"), group("a", "p", "x", "z"), group("b", "p", "x", "y")]
    digests = {digest_of(ranker, one) for one in [base, *others]}
    ranker.identity = {"target": "u"}
    assert len(digests | {digest_of(ranker, base)}) == 5
    path = tmp_path / "s.jsonl"
    path.write_text("somebody's file\n")
    with pytest.raises(UserError, match="is not a file of scores"):
        ScoreStore(str(path))


def test_command_ranks_by_reverse_with_a_model(folder: Path, here: Path) -> None:
    texts = ["a mat", "the other cat"]
    rows = [
        {"id": "a", "sample": at, "text": text, "finish_reason": "eos", "prompt": "the cat sat"}
        for at, text in enumerate(texts)
    ]
    Path("f.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["rank", "f.jsonl", "--by", "reverse", "--device", "cpu"]
    assert "name it with --pair or --model" in " ".join(cli(*words, code=2).stderr.split())
    cli(*words, "--model", str(folder), "--dtype", "fp32", code=0)
    found = rows_in("f.jsonl")
    after = "\n\nThe text above is the answer to this request:\n"
    wanted = [due(folder, text + after, "the cat sat") for text in texts]
    assert [row["scores"]["reverse"] for row in found] == pytest.approx(wanted, abs=1e-4)
    assert [row["rank"] for row in found] == ([1, 2] if wanted[0] > wanted[1] else [2, 1])


def test_tests_are_drawn_by_the_model(folder: Path) -> None:
    """The tiny model writes no valid assertion, so no sample has a better score."""
    tiny = job(folder).model_copy(update={"sampling": Sampling(seed=5)})
    short = Group("d", "def f(x):\n", [Candidate(0, "", "eos", None, "def f(x): return 1")], "f")
    (found,) = AgreementRanker(tiny, consent=True, workers=1).scores([short])
    assert found == [0.0]


def test_eval_scores_its_samples_with_the_model(
    folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = ["def f(x):\n", "def g(y):\n"]
    problems = [
        {"task_id": f"Tiny/{head[4]}", "prompt": head, "entry_point": head[4],
         "test": "def check(f):\n    pass\n"}
        for head in heads
    ]  # fmt: skip
    Path("t.jsonl").write_text("".join(json.dumps(one) + "\n" for one in problems))
    words = ["eval", "humaneval", "--model", str(folder), "--draft", "none", "--device", "cpu",
             "--data", "t.jsonl", "--n", "2", "--max-new-tokens", "8", "--prompt-format", "raw",
             "--dtype", "fp32", "--out", "o.jsonl", "--allow-code-execution", "--json",
             "--rank-by", "static,reverse"]  # fmt: skip
    assert list(json.loads(cli(*words, code=0).stdout)["pass_first_by"]) == ["static", "reverse"]
    rows = rows_in("o.jsonl")
    for row in rows:
        prompt = heads[row["id"] == "Tiny/g"]
        one = Candidate(0, row["completion"], "eos", None, prompt + row["completion"])
        wanted = due(folder, context_of(one), prompt) if parse(one.program or "") else None
        assert row["scores"]["reverse"] == (wanted and pytest.approx(wanted, abs=1e-4))
        assert row["rank"] in (1, 2)
    monkeypatch.setattr("bass_cli.eval.rank_command.rank_lines", None)  # it is not called again
    cli(*words, code=0)
    several = cli(*words, "--budgets", "1s,2s", code=2)
    assert "rankers that run a model cannot be used with several budgets" in " ".join(
        several.stderr.split()
    )
