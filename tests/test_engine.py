"""Test the resident engine: its samples equal those of `generate`, whatever else runs; requests
share the batch, are cancelled, fail and stream on their own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoint, write_sentencepiece, write_tokenizer
from forked import run_forked

from bass_cli import Completion, Engine, Job, Pair, Sampling, Speculation, UserError, generate
from bass_cli.engine.loop import Loop

WORDS = ("the cat", "a dog sat", "it ran")
SECONDS = 60  # the most that a test waits


def job(model: Path, **changes: Any) -> Job:
    sampling = Sampling(seed=3, max_new_tokens=12, temperature=1.0)
    given = {"n": 3, "device": "cpu", "threads": 1, "sampling": sampling, "token_ids": True}
    pair = Pair(name="tiny", target=str(model), draft="lookup")
    return Job(**{"pair": pair} | given | changes)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine(job(model, batch_size=4)) as found:
        yield found


def by_key(found: Any) -> dict[Any, Any]:
    listed = list(found)
    keyed = {(one.id, one.sample): (one.token_ids, one.text, one.finish_reason) for one in listed}
    assert len(keyed) == len(listed)
    return keyed


def test_calls_equal_generate_again_and_again(engine: Engine, model: Path) -> None:
    wanted = by_key(generate(list(WORDS), job(model)))
    for _ in range(2):
        assert by_key(engine.generate(list(WORDS))) == wanted
    assert by_key(engine.generate(iter(WORDS))) == wanted
    own = Sampling(temperature=0.5, stop=["a"])
    cold = job(
        model, sampling=Sampling(**dict(job(model).sampling) | {"temperature": 0.5, "stop": ["a"]})
    )
    assert by_key(engine.generate(WORDS[:2], n=2, sampling=own)) == by_key(
        generate(WORDS[:2], cold.model_copy(update={"n": 2}))
    )
    lines = [{"id": "a", "prompt": "the cat", "n": 2}, {"prompt": "a dog", "temperature": 0}]
    assert by_key(engine.generate(lines)) == by_key(generate(lines, job(model)))


def test_second_call_starts_at_once(engine: Engine) -> None:
    def seconds() -> float:
        began = time.perf_counter()
        next(engine.stream(["the cat"], n=1, sampling=Sampling(max_new_tokens=12)))
        return time.perf_counter() - began

    seconds()
    assert min(seconds() for _ in range(3)) < 0.5


def test_only_a_resident_engine_captures_prompts_early(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[Loop] = []
    monkeypatch.setattr(Loop, "capture_early", lambda loop: called.append(loop))
    assert len(list(generate(WORDS, job(model)))) > 0
    assert not called
    with Engine(job(model)) as engine:
        for _ in range(2):
            assert len(list(engine.generate(["a"], n=1))) == 1
    assert len(called) == 1


def test_requests_with_the_same_ids_share_the_batch(engine: Engine, model: Path) -> None:
    """One of them is added while the others run; the order of results is mixed."""
    seeds = (1, 2, 3)
    alone = [by_key(engine.generate(WORDS, sampling=Sampling(seed=seed))) for seed in seeds]
    calls = [engine.generate(WORDS, sampling=Sampling(seed=seed)) for seed in seeds[:2]]
    found: list[list[Completion]] = [[next(call)] for call in calls]
    calls.append(engine.generate(WORDS, sampling=Sampling(seed=seeds[2])))
    found.append([])
    for results in itertools.zip_longest(*calls):
        for one, result in zip(found, results, strict=True):
            one += [] if result is None else [result]
    assert [by_key(one) for one in found] == alone


def test_callers_in_several_threads_get_their_own_samples(engine: Engine) -> None:
    alone = by_key(engine.generate(WORDS))
    found: list[Any] = []

    def call() -> None:
        found.append(by_key(engine.generate(iter(WORDS))))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert found == [alone] * 3


def settle(engine: Engine) -> None:
    """Wait until no request is in progress; then all rows must be free."""
    assert engine.run_alone(lambda models, loop: len(loop.batch)) == 0


@pytest.mark.parametrize("how", ["close", "drop", "break"])
def test_closed_results_free_their_rows_and_leave_others_unchanged(
    engine: Engine, how: str
) -> None:
    alone = by_key(engine.generate(WORDS))
    endless = engine.generate((f"the cat {number}" for number in itertools.count()), n=4)
    other = engine.generate(WORDS)
    assert next(endless).id in "0123456789"
    found = [next(other)]
    if how == "close":
        endless.close()
        assert next(endless, None) is None
    elif how == "drop":
        del endless
    else:
        for _ in endless:
            break
        del endless
    assert by_key([*found, *other]) == alone
    settle(engine)


def test_an_error_in_one_request_leaves_the_others_alone(engine: Engine) -> None:
    def broken() -> Iterator[str]:
        yield "the cat"
        raise OSError("no more prompts")

    alone = by_key(engine.generate(WORDS))
    bad, good = engine.generate(broken()), engine.generate(WORDS)
    with pytest.raises(OSError, match="no more prompts"):
        list(bad)
    assert by_key(good) == alone
    failed = list(engine.generate(["cat " * 5000, "the cat"]))
    assert [one.id for one in failed if one.error] == ["0"]
    assert len(failed) == 4
    with pytest.raises(UserError, match=r"prompts\[1\]: field .prompt.: it is empty"):
        engine.generate(["a", ""])
    settle(engine)


def test_an_error_in_the_only_request_wakes_its_caller(engine: Engine) -> None:
    for _ in range(3):
        outcome: list[BaseException] = []

        def draw(outcome: list[BaseException] = outcome) -> None:
            try:
                list(engine.generate(iter([{"prompt": "a", "n": 0}])))
            except UserError as error:
                outcome.append(error)

        caller = threading.Thread(target=draw, daemon=True)
        caller.start()
        caller.join(SECONDS)
        assert "greater than or equal to 1" in str(outcome[0])


def test_requests_with_a_budget_are_all_drawn(model: Path) -> None:
    with Engine(job(model, budget=0.001)) as engine:
        found = [engine.generate(WORDS), engine.generate(iter(WORDS))]
        drawn: list[int] = []
        caller = threading.Thread(target=lambda: drawn.extend(len(list(one)) for one in found))
        caller.daemon = True
        caller.start()
        caller.join(SECONDS)
        assert drawn == [9, 9]


def test_two_first_calls_start_one_thread(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load, loads = Engine._load, itertools.count()

    def slow(self: Engine) -> None:
        time.sleep(0.1)
        next(loads)
        load(self)

    with Engine(job(model), lazy=True) as engine:
        monkeypatch.setattr(Engine, "_load", slow)
        callers = [threading.Thread(target=lambda: list(engine.generate(["a"]))) for _ in range(3)]
        for one in callers:
            one.start()
        for one in callers:
            one.join(SECONDS)
    assert next(loads) == 1


def test_the_structure_of_a_call_replaces_that_of_the_job(model: Path) -> None:
    sampling = Sampling(max_new_tokens=12, json_object=True)
    with Engine(job(model, sampling=sampling)) as engine:
        (found,) = engine.generate(["a"], n=1, sampling=Sampling(regex="[ab]{3}"))
    assert re.fullmatch("[ab]{3}", found.text)


def test_results_are_also_asynchronous(engine: Engine) -> None:
    alone = by_key(engine.generate(WORDS))

    async def drawn(given: Any) -> list[Completion]:
        return [one async for one in engine.generate(given)]

    async def cancelled() -> int:
        async for one in engine.generate(f"cat {number}" for number in itertools.count()):
            return one.tokens
        raise AssertionError

    async def together() -> Any:
        return await asyncio.gather(drawn(WORDS), drawn(iter(WORDS)), cancelled())

    first, second, tokens = asyncio.run(together())
    assert by_key(first) == by_key(second) == alone
    assert tokens > 0
    settle(engine)


@pytest.mark.parametrize("stop", [(), ("t", "he "), ("é",)])
def test_streamed_pieces_join_to_the_text(engine: Engine, stop: tuple[str, ...]) -> None:
    sampling = Sampling(temperature=1.5, stop=list(stop))
    wanted = by_key(engine.generate(WORDS, sampling=sampling))
    texts: dict[Any, str] = {}
    ended: dict[Any, Completion] = {}
    count = 0
    for piece in engine.stream(WORDS, sampling=sampling):
        key, count = (piece.id, piece.sample), count + 1
        assert key not in ended
        texts[key] = texts.get(key, "") + piece.text
        if piece.completion is not None:
            ended[key] = piece.completion
    assert by_key(ended.values()) == wanted
    assert texts == {key: text for key, (_, text, _) in wanted.items()}
    assert count > (2 if stop else 4) * len(wanted)
    assert not any(stop_ in text for text in texts.values() for stop_ in stop)


def test_greedy_samples_stream_as_one_and_copies(engine: Engine) -> None:
    found = list(engine.stream(["the cat"], n=3, sampling=Sampling(temperature=0)))
    joined = {n: "".join(one.text for one in found if one.sample == n) for n in range(3)}
    assert len(set(joined.values())) == 1
    assert [one.completion.copy_of for one in found if one.completion] == [None, 0, 0]


def test_settings_beyond_the_engine_are_refused_at_the_call(engine: Engine) -> None:
    with pytest.raises(UserError, match=r"`sampling\.max_new_tokens`: 13 is more than"):
        engine.generate(["a"], sampling=Sampling(max_new_tokens=13))
    with pytest.raises(UserError, match="`n`"):
        engine.generate(["a"], n=0)
    with pytest.raises(UserError, match="put a single prompt into a list"):
        engine.generate("a")

    async def prompts() -> AsyncIterator[str]:
        yield "a"

    with pytest.raises(UserError, match="make a call for each of its prompts, or collect them"):
        engine.generate(prompts())  # type: ignore[arg-type]
    with pytest.raises(UserError, match="a Sampling is needed"):
        engine.generate(["a"], sampling={"seed": 1})  # type: ignore[arg-type]


def test_a_closed_engine_says_so(model: Path) -> None:
    engine = Engine(job(model))
    endless = engine.generate(f"cat {number}" for number in itertools.count())
    next(endless)
    engine.close()
    engine.close()
    with pytest.raises(UserError, match="the engine is closed"):
        list(endless)
    with pytest.raises(UserError, match="the engine is closed"):
        engine.generate(["a"])
    with pytest.raises(UserError, match="the engine is closed"):
        engine.run_alone(lambda models, loop: None)


def test_a_beginning_of_sequence_that_a_prompt_has_twice_is_noted_once(tmp_path: Path) -> None:
    write_sentencepiece(tmp_path)  # the tokenizer adds <s>
    write_checkpoint("llama", tmp_path, shards=False, num_hidden_layers=1, vocab_size=400)
    notes: list[str] = []
    with Engine(job(tmp_path, n=1), on_note=notes.append) as engine:
        list(engine.generate(["the cat", "cat cat", {"id": "c", "token_ids": [1, 1, 5]}]))
        assert not notes
        for prompt in ("<s>the cat", "<s> a dog"):
            list(engine.generate([prompt]))
    assert len(notes) == 1
    assert 'prompts that begin with "<s>" have it twice' in notes[0]


def test_special_tokens_that_only_the_text_repeats_are_not_noted(engine: Engine) -> None:
    """The tokenizer of this model adds none."""
    notes: list[str] = []
    with Engine(engine.plan.job, on_note=notes.append) as other:
        assert len(list(other.generate(["<s><s> a dog"]))) == 3
    assert not notes


def test_another_process_cannot_use_the_engine(engine: Engine) -> None:
    """A forked process has no copy of the engine's thread, and would wait for it forever."""
    results = engine.generate(WORDS[:1])
    with pytest.raises(TypeError, match="make an Engine of the same Job there"):
        pickle.dumps(engine)
    if (child := os.fork()) == 0:
        refused = 0
        for use in (
            lambda: next(results),
            lambda: engine.generate(["a"]),
            lambda: engine.score("a", "b"),
        ):
            with contextlib.suppress(UserError):
                use()
                continue
            refused += 1
        results.close()
        engine.close()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert len(list(results)) == 3


@pytest.mark.parametrize("begun", [False, True])
def test_another_process_cannot_use_the_models(model: Path, begun: bool) -> None:
    """A forked process shares the pipes to the other processes of a split model, and would send
    its own calls there. So not even an engine without a thread is used: one before its first
    request, or the one of `generate`."""
    engine = None if begun else Engine(job(model))
    samples = generate(list(WORDS), job(model, batch_size=1))
    first = [next(samples)] if begun else []
    if (child := os.fork()) == 0:
        try:
            list(samples if engine is None else engine.generate(["a"]))
        except UserError as error:
            os._exit("make an Engine of the same Job there" in str(error))
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert len([*first, *samples]) == 9
    if engine is not None:
        with engine:
            assert len(list(engine.generate(["a"]))) == 3


def test_ctrl_c_while_waiting_cancels_the_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = engine.generate(WORDS)

    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_next_result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(results)
    assert list(results) == []


def test_functions_run_between_requests(engine: Engine) -> None:
    """A request behind a call begins after it."""
    order: list[str] = []
    first = engine.generate(WORDS)
    threading.Thread(target=lambda: engine.run_alone(lambda *_: order.append("call"))).start()
    assert len(by_key(first)) == 9
    settle(engine)
    assert order == ["call"]

    def fail(models: Any, loop: Any) -> None:
        raise ValueError("in the call")

    with pytest.raises(ValueError, match="in the call"):
        engine.run_alone(fail)
    assert len(list(engine.generate(["a"]))) == 3


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_requests_run_one_at_a_time_under_maximal_coupling(
    model: Path, tmp_path: Path, temperature: float
) -> None:
    """Then each request's samples are those of a job of its own, whatever was drawn before."""
    write_checkpoint("llama", tmp_path, seed=1, shards=False, num_hidden_layers=1)
    write_tokenizer(tmp_path)
    given = job(
        model,
        pair=Pair(name="tiny", target=str(model), draft=str(tmp_path)),
        batch_size=4,
        sampling=Sampling(seed=3, max_new_tokens=12, temperature=temperature),
        speculation=Speculation(length="bass", coupling="maximal"),
    )
    wanted = by_key(generate(WORDS, given))
    with Engine(given) as engine:
        calls = [engine.generate(given) for given in (WORDS, iter(WORDS), WORDS)]
        assert [by_key(call) for call in calls] == [wanted] * 3
        assert next(engine.generate(itertools.repeat("the cat"))).tokens  # and cancelled
        assert by_key(engine.generate(iter(WORDS))) == wanted


def test_memory_running_out_halves_the_rows_for_all_requests(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bass_cli.engine.loop import Loop

    notes: list[str] = []
    with Engine(job(model, batch_size=6), on_note=notes.append) as engine:
        alone = by_key(engine.generate(WORDS))
        calls, round_ = itertools.count(), Loop.round

        def fail(self: Loop, *given: Any, **named: Any) -> Any:
            if next(calls) == 5:
                raise MemoryError
            return round_(self, *given, **named)

        monkeypatch.setattr(Loop, "round", fail)
        found = [engine.generate(WORDS), engine.generate(iter(WORDS))]
        pieces = list(engine.stream(WORDS))
        assert [by_key(one) for one in found] == [alone] * 2
    for one in (piece.completion for piece in pieces if piece.completion):
        shown = (piece.text for piece in pieces if piece[:2] == (one.id, one.sample))
        assert "".join(shown) == one.text
    assert ["going on with 3;" in note for note in notes] == [True]


def test_a_fault_of_the_machine_is_raised_for_every_request(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bass_cli.engine.loop import Loop

    engine = Engine(job(model))

    def fail(self: Loop, *given: Any, **named: Any) -> Any:
        raise RuntimeError("a broken device")

    monkeypatch.setattr(Loop, "round", fail)
    found = [engine.generate(WORDS), engine.generate(iter(WORDS))]
    for one in found:
        with pytest.raises(RuntimeError, match="a broken device"):
            list(one)
    with pytest.raises(RuntimeError, match="a broken device"):
        engine.generate(["a"])
    engine.close()


def test_examples_of_the_guide_run_here(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that tests/test_guides.py does not run in a process of their own."""
    page = (Path(__file__).parent.parent / "docs/guide/library.md").read_text(encoding="utf-8")
    blocks = re.findall(r"(?<!tested -->)\n```python\n(.*?)```", page, re.DOTALL)
    for block in blocks[:-1]:  # the last one is examples/library.py's
        name = "HuggingFaceTB/SmolLM2-135M-Instruct"
        assert name in block
        exec(compile(block.replace(name, str(model)), "library.md", "exec"), {"__name__": "guide"})
    assert len(blocks) == 3
    assert "(length)" in capsys.readouterr().out


def test_a_program_may_end_while_its_engine_works(model: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from bass_cli import Engine, Job, Pair, Sampling\n"
        "pair = Pair(name='tiny', target=sys.argv[1], draft='lookup')\n"
        "sampling = Sampling(max_new_tokens=200, temperature=1.0)\n"
        "engine = Engine(Job(pair=pair, n=4, device='cpu', threads=1, sampling=sampling))\n"
        "next(engine.stream(['the cat'] * 50))\nprint('the end')\n"
    )
    done = run_forked(code, str(model), cwd=tmp_path, env=os.environ | {"PYTHONPATH": ""})
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")
