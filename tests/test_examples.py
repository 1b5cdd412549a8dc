"""What `make demo` runs, on a tiny model: both ways side by side, equal samples, and what it
does if they are not."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoint, write_tokenizer

from bass_cli.io.prompts import check_prompts, read_prompts
from bass_cli.io.readers import open_source

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> Any:
    """Return an example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The demo as a module, and the arguments for a tiny pair whose greedy samples soon repeat
    themselves."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_checkpoint("llama", tmp_path / "target", seed=0)
    write_tokenizer(tmp_path / "target")
    (tmp_path / "pair.yaml").write_text(
        f"target: {tmp_path}/target\ndraft: lookup\nspeculation: {{length: 4}}\n"
    )
    text = "the cat sat on the mat and the cat sat on the mat"
    (tmp_path / "p.jsonl").write_text(
        json.dumps({"id": "cat", "prompt": text, "reference": text}) + "\n"
    )
    module = load("demo")
    module.arguments = ["--pair", str(tmp_path / "pair.yaml"), "--prompts", str(tmp_path / "p.jsonl"), "--n", "2",
                        "--tokens", "40", "--temperature", "0.01"]  # fmt: skip
    return module


def test_the_demo_shows_both_ways_and_equal_samples(
    demo: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        demo.main(demo.arguments)
    out = capsys.readouterr().out
    assert end.value.code == 0, out
    assert "cat: the cat sat" in out
    assert "2 of 2 samples are equal, token for token" in out
    rows = {
        match[1]: match[0].split()
        for match in re.finditer(r"^(plain decoding|with lookup) .*$", out, re.MULTILINE)
    }
    assert set(rows) == set(demo.METHODS)
    assert (float(rows["plain decoding"][-1]), float(rows["with lookup"][-1]) > 0) == (0.0, True)
    assert rows["plain decoding"][2] == rows["with lookup"][2]  # tokens
    assert max(len(line) for line in out.splitlines() if "rounds" in line) <= 80


def test_the_demo_says_if_samples_differ(
    demo: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = demo.draw

    def wrong(plan: Any, loop: Any, prompt: Any) -> Any:
        samples, seconds = draw(plan, loop, prompt)
        if plan.job.pair.draft != "none":
            samples["cat", 1] = dataclasses.replace(samples["cat", 1], token_ids=[1, 2, 3])
        return samples, seconds

    monkeypatch.setattr(demo, "draw", wrong)
    with pytest.raises(SystemExit) as end:
        demo.main(demo.arguments)
    assert end.value.code == 1
    assert "1 of 2 samples are equal" in capsys.readouterr().out


def test_examples_are_prompts_and_edits_carry_what_they_edit() -> None:
    for file in EXAMPLES.glob("*.jsonl"):
        check_prompts(open_source(str(file)), column="prompt", limit=None)
    for prompt in read_prompts(open_source(str(EXAMPLES / "edits.jsonl"))):
        assert prompt.reference
        assert prompt.messages is not None
        assert prompt.reference in prompt.messages[-1]["content"]


def test_roll_outs_learn_and_equal_those_of_a_fresh_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rewards = load("rollouts").train(tmp_path, steps=6)
    out = capsys.readouterr().out
    assert out.splitlines()[-1].endswith("the same samples from the saved model: True")
    assert rewards[-1] > 3 * rewards[0]
    apart = [float(number) for number in re.findall(r"differ by (\S+) at most", out)]
    assert len(apart) == 6
    assert max(apart) < 1e-4
