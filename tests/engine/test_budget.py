"""The wall-clock budget of a prompt, with a clock that only the work itself advances. The budget
includes prefill; late rounds are shortened or not started; finished samples are kept."""

from __future__ import annotations

import random

import pytest
from drawing import Scheduler
from test_scheduler import EOS, Letters, job, prompts, table
from toys import Guess, Markov, loop_for

from bass_cli.config.job import Speculation
from bass_cli.drafts.factory import DraftParts, make_drafter
from bass_cli.engine import loop as loop_module
from bass_cli.engine.clock import Passes, Prefill
from bass_cli.lengths.controllers import Bass, Fixed, LengthParts, make_lengths
from bass_cli.lengths.surface import make_surface


class Work:
    """A clock that only `pass_` advances. It records the time of each piece of work. `stalls`:
    by number, pieces that take another time."""

    def __init__(self, seed=0, stalls=None):
        self.now, self.pieces, self._random, self._stalls = (
            50.0,
            [],
            random.Random(seed),
            stalls or {},
        )

    def __call__(self):
        return self.now

    def pass_(self, seconds, jitter=0.0):
        seconds = self._stalls.get(
            len(self.pieces), seconds * (1 + self._random.uniform(0, jitter))
        )
        self.pieces.append(seconds)
        self.now += seconds


class Timed(Markov):
    """A toy model whose passes take `each` seconds and `token` seconds for each token of a row.
    It reads prompts in chunks. `keys`: the open prompts."""

    def __init__(
        self, work, *, each=0.02, token=0.004, prefill=0.001, jitter=0.0, chunk=4, pending=1
    ):
        super().__init__(table(), pending)
        self._work, self._each, self._token, self._prefill, self._jitter = (
            work,
            each,
            token,
            prefill,
            jitter,
        )
        self._chunk, self.keys = chunk, set()

    def open(self, key, tokens, in_time=None):
        for first in range(0, len(tokens), self._chunk):
            count = min(self._chunk, len(tokens) - first)
            if in_time is not None and not in_time(count):
                return False
            self._work.pass_(self._prefill * count, self._jitter)
        self.keys.add(key)
        return super().open(key, tokens)

    def close(self, key):
        self.keys.remove(key)

    def forward(self, tokens, positions, ends, *, last=None):
        self._work.pass_(self._each + self._token * tokens.shape[1], self._jitter)
        return super().forward(tokens, positions, ends, last=last)


class Launching(Timed):
    """The same on a device (see Launched), waiting after each round."""

    def forward(self, tokens, positions, ends, *, last=None):
        found = super().forward(tokens, positions, ends, last=last)
        self._work.wait()
        return found


def run(
    work,
    given,
    *,
    budget,
    draft_length=4,
    n=3,
    seen=None,
    draft=None,
    lengths=None,
    coupling="shared",
    rows=None,
    **costs,
):
    loop = loop_for(
        Timed(work, **costs),
        draft or Guess(EOS),
        rows=rows or n,
        lengths=lengths or Fixed(draft_length),
        coupling=coupling,
    )
    loop.clock.now = work
    settings = job(
        n=n,
        max_new_tokens=40,
        budget=budget,
        speculation=Speculation(coupling=coupling),
        batch_size=rows or "auto",
    )
    note = None if seen is None else seen.append
    scheduler = Scheduler(settings, Letters(), loop, context=1000, eos_ids={EOS}, on_round=note)
    return list(scheduler.run(iter(prompts(*given)), ()))


@pytest.mark.parametrize("jitter", [0.0, 0.3])
@pytest.mark.parametrize("budget", [0.003, 0.05, 0.11, 0.4, 2.0])
def test_no_prompt_is_late_by_more_than_a_round(budget, jitter):
    """Exactly in time if rounds take as long as before; otherwise late by at most the slow
    round."""
    for seed in range(5 if jitter else 1):
        work = Work(seed)
        found = run(work, ["abc", "a", "bcd" * 9, "fgh"] * 3, budget=budget, jitter=jitter)
        longest = max(work.pieces)
        assert max(c.seconds for c in found) <= budget + longest
        # Nothing is known yet at the first prompt, and the first round of any prompt runs in any
        # case.
        later = [c.seconds for c in found if c.id != "p0" and c.rounds != 1]
        assert max(later, default=0.0) <= budget + (longest if jitter else 1e-9)
        assert len(found) == 12 * 3


def test_samples_finished_in_time_are_kept_and_the_rest_is_marked():
    work = Work()
    unlimited = {(c.id, c.sample): c for c in run(Work(), ["abc", "fgh"], budget=1e6)}
    found = run(work, ["abc", "fgh"], budget=0.25)
    reasons = {c.finish_reason for c in found}
    assert "budget" in reasons
    assert len(reasons) > 1
    for c in found:
        whole = unlimited[c.id, c.sample]
        if c.finish_reason == "budget":
            assert whole.token_ids[: c.tokens] == c.token_ids
            assert c.tokens < whole.tokens
        else:
            assert (c.text, c.finish_reason, c.token_ids) == (
                whole.text,
                whole.finish_reason,
                whole.token_ids,
            )
            assert c.seconds <= 0.25


def test_late_round_is_shortened():
    """A round takes 0.01 s and 0.01 s for each token of a row. After two rounds of 4 drafts
    0.034 s are left, enough for 1 draft."""
    work, seen = Work(), []
    loop = loop_for(Timed(work, each=0.01, token=0.01), Guess(EOS), rows=1, lengths=Fixed(4))
    loop.clock.now = work
    loop.clock.observe(0, 0.02)
    loop.clock.observe(4, 0.06)
    scheduler = Scheduler(
        job(n=1, max_new_tokens=400, budget=0.155),
        Letters(),
        loop,
        context=1000,
        eos_ids=(),
        on_round=seen.append,
    )
    (found,) = scheduler.run(iter(prompts("a")), ())
    assert [done.width for done in seen] == [4, 4, 1]
    assert (found.finish_reason, found.seconds) == (
        "budget",
        pytest.approx(0.151),
    )  # 0.001 for the prompt


def test_prefill_counts_and_is_given_up_midway():
    """40 tokens at 0.01 s: after 0.1 s the rest does not fit, and the next prompt begins."""
    work = Work()
    found = run(work, ["a" * 40, "b"], budget=0.1, prefill=0.01)
    late = [c for c in found if c.id == "p0"]
    assert [(c.finish_reason, c.tokens, c.text) for c in late] == [("budget", 0, "")] * 3
    assert all(c.seconds <= 0.1 + 1e-9 for c in late)
    assert {c.tokens > 0 for c in found if c.id == "p1"} == {True}


def test_wrong_prediction_does_not_exclude_prompts_for_ever():
    """One pass over a prompt was slow. Some of the next prompts are given up because of it, but
    not all."""
    work = Work()
    passes = Passes()
    passes.observe(64, 5.0)
    answers = [Prefill(passes, work.now + 1.0, now=work, wait=lambda: None)(64) for _ in range(12)]
    assert answers[0] is False
    assert answers[-1] is True


def test_prefill_is_predicted_from_passes_of_equal_length():
    passes = Passes()
    assert passes.predict(100) == 0.0
    for tokens, seconds in ((10, 0.5), (64, 1.0), (64, 3.0)):
        passes.observe(tokens, seconds)
    assert passes.predict(5) == 0.5
    assert passes.predict(64) == 1.0
    assert passes.predict(128) == pytest.approx(2.0), (
        "one that stumbled says nothing of longer ones"
    )


def test_each_prompt_has_a_budget_of_its_own():
    found = run(Work(), ["abc", "fgh", "bb"], budget=0.3)
    assert {c.id for c in found if c.tokens > 3} == {"p0", "p1", "p2"}


@pytest.mark.parametrize(
    ("draft_length", "stalls"),
    [
        (0, [20]),
        (1, [20, 21, 22]),
        (4, list(range(20, 30))),
        pytest.param(0, list(range(20, 30)), marks=pytest.mark.slow),
        pytest.param(4, [20], marks=pytest.mark.slow),
    ],
)
def test_stall_costs_only_the_prompts_in_progress(stalls, draft_length):
    """50 ms a prompt, rounds of 5 ms, and some of 0.17 s: later prompts have as many rounds as
    before, and as long ones."""
    seen = []
    work = Work(stalls=dict.fromkeys(stalls, 0.17))
    found = run(
        work,
        ["a"] * 84,
        budget=0.05,
        n=1,
        draft_length=draft_length,
        seen=seen,
        each=0.005,
        token=0.0,
    )
    unfinished = [c.rounds for c in found if c.finish_reason == "budget"]
    assert len(unfinished) > 20
    assert set(unfinished[-20:]) == {9}, "9 rounds fit beside the prompt's own pass"
    assert sum(rounds < 9 for rounds in unfinished) <= len(stalls)
    assert {done.width for done in seen[-100:]} == {draft_length}


def test_prompt_before_its_deadline_gets_a_first_round():
    """Even if that round will be late; but not after the deadline, and no second one."""
    found = run(Work(), ["a"] * 3, budget=0.01, n=1, draft_length=0, each=0.02, token=0.0)
    assert [(c.rounds, c.finish_reason) for c in found] == [(1, "budget")] * 3
    found = run(Work(), ["a"] * 3, budget=0.001, n=1, draft_length=0, each=0.02, token=0.0)
    assert [c.rounds for c in found] == [0] * 3, "the prompt's own pass took all of the time"


def test_prefill_of_the_draft_model_is_given_up_too():
    """The draft takes 0.01 s a token, so 30 tokens are too many, and the next prompt begins.
    Nothing of the first prompt is left: it may come again."""
    work = Work()
    runner = Timed(work, prefill=0.01, pending=2)
    draft = make_drafter("model", DraftParts(runner=runner, coupling="shared", temperature=None))
    found = run(work, ["a" * 30, "b", "c" * 30, "d"], budget=0.1, draft=draft)
    assert [c.tokens for c in found if c.id in ("p0", "p2")] == [0] * 6
    assert {c.tokens > 0 for c in found if c.id in ("p1", "p3")} == {True}
    assert max(c.seconds for c in found if c.id == "p0") <= 0.1 + 1e-9
    assert runner.keys == set()


class Launched(Work):
    """A device beside the host. Launching takes the host 10 us; work is done in order; `wait`
    returns when all is done."""

    def __init__(self):
        super().__init__()
        self.busy = 0.0

    def pass_(self, seconds, jitter=0.0):
        self.now += 1e-5
        self.pieces.append(seconds)
        self.busy = max(self.busy, self.now) + seconds

    def wait(self, device=None):
        self.now = max(self.now, self.busy)


@pytest.mark.parametrize("slow", ["target", "draft"])
def test_deadline_stops_an_asynchronous_prefill(slow, monkeypatch):
    """200 tokens in passes of 4, 40 ms each, in 0.5 s: two prompts that are too long, and one
    that fits."""
    work = Launched()
    monkeypatch.setattr(loop_module, "synchronise", work.wait)
    target, runner = (
        Launching(work, prefill=0.01 if slow == model else 1e-4, pending=pending)
        for model, pending in (("target", 1), ("draft", 2))
    )
    loop = loop_for(target, runner, rows=3, lengths=Fixed(4))
    loop.clock.now = work
    scheduler = Scheduler(
        job(n=3, max_new_tokens=40, budget=0.5), Letters(), loop, context=1000, eos_ids={EOS}
    )
    found = list(scheduler.run(iter(prompts("a" * 200, "b" * 200, "c")), ()))
    late = [c for c in found if c.id != "p2"]
    assert [c.tokens for c in late] == [0] * 6
    assert max(c.seconds for c in late) <= 0.5 + 1e-3
    assert {c.tokens > 0 for c in found if c.id == "p2"} == {True}


def test_prefill_without_a_deadline_is_not_waited_for(monkeypatch):
    work = Launched()
    monkeypatch.setattr(loop_module, "synchronise", lambda device: pytest.fail("the host waited"))
    loop = loop_for(Launching(work), "none", rows=3)
    assert loop.open("p", [1] * 100)
    assert work.busy > work.now + 0.09


MAXIMAL = {  # draft and controller
    "bass": (lambda: Markov(table(1), 2), lambda: Bass(limit=12)),
    "table": (
        lambda: Markov(table(1), 2),
        lambda: make_lengths("table", LengthParts(limit=6, coupling="maximal", surface=SURFACE)),
    ),
    "auto": (
        lambda: Markov(table(1), 2),
        lambda: make_lengths("auto", LengthParts(limit=6, coupling="maximal", surface=SURFACE)),
    ),
    "lookup": (lambda: "lookup", lambda: Bass(limit=12)),
    "lookup, auto": (
        lambda: "lookup",
        lambda: make_lengths("auto", LengthParts(limit=6, coupling="maximal", surface=SURFACE)),
    ),
}
SURFACE = make_surface(
    (1, 4), (0, 6), verify=[[1.0, 1.1], [1.0, 1.6]], draft=[[0.0, 0.6], [0.0, 0.6]]
)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("bass", 2),
        ("table", None),
        ("auto", 7),
        ("lookup", None),
        ("lookup, auto", 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("table", 2), ("table", 7), ("auto", None), ("lookup", 7))
        ),
    ],
)
def test_budget_under_maximal_coupling_only_truncates_samples(name, rows):
    """Whatever the machine's speed, the output is a prefix of what a run without a clock gives.
    Draft lengths are part of the samples there, so the clock does not shorten them, and the time
    of one prompt does not affect the next. Batch sizes decide which rows run together: in
    `make test-slow` each controller and each drafter meets all three of them."""

    def drawn(budget, seed, **costs):
        draft, lengths = (make() for make in MAXIMAL[name])
        work = Work(seed, stalls=costs.pop("stalls", None))
        found = run(
            work,
            ["abcabcab", "a", "bcdbcdb", "fgh"] * 2,
            budget=budget,
            n=4,
            rows=rows,
            draft=draft,
            lengths=lengths,
            coupling="maximal",
            jitter=0.5,
            **costs,
        )
        return {(c.id, c.sample): c for c in found}, max(work.pieces)

    whole, _ = drawn(1e6, 0)
    ended = set()
    for seed, (budget, more) in enumerate(
        [(0.2, {}), (0.35, {"token": 0.02}), (0.5, {"stalls": {9: 0.4, 30: 0.7}})]
    ):
        found, longest = drawn(budget, seed, **more)
        for key, sample in found.items():
            assert sample.token_ids == whole[key].token_ids[: sample.tokens]
            ended.add((sample.finish_reason, sample.tokens > 0))
        assert max(sample.seconds for sample in found.values()) <= budget + longest
    assert {("budget", True), ("eos", True)} <= ended, "this showed little"


def test_late_round_under_maximal_coupling_is_not_started():
    """It cannot be shortened. It takes 0.01 s and 0.01 s for each token of a row, so two rounds
    of 4 drafts fit into 0.155 s."""
    seen = []
    found = run(
        Work(),
        ["a", "b", "c", "d"],
        budget=0.155,
        n=1,
        coupling="maximal",
        each=0.01,
        token=0.01,
        seen=seen,
    )
    ended = [c for c in found if c.finish_reason == "budget"]
    assert [c.rounds for c in ended] == [2] * len(ended) != []
    assert max(c.seconds for c in ended) <= 0.155
    assert {done.width for done in seen} == {4}
