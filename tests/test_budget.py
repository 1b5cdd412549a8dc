"""The wall-clock budget of a prompt, with a clock that only the work itself turns: prefill included, late rounds
shortened or not started, what is finished kept."""

from __future__ import annotations

import random

import pytest
from test_run import EOS, Letters, job, prompts, table
from toys import Guess, Markov, loop_for

from bass_cli.engine.clock import Clock, Prefill
from bass_cli.engine.lengths import Fixed
from bass_cli.run import Conductor


class Work:
    """Time that passes only by `pass_`; notes how long each piece of work took. `stalls`: what pieces of these numbers take
    instead."""

    def __init__(self, seed=0, stalls=None):
        self.now, self.pieces, self._random, self._stalls = 50.0, [], random.Random(seed), stalls or {}

    def __call__(self):
        return self.now

    def pass_(self, seconds, jitter=0.0):
        seconds = self._stalls.get(len(self.pieces), seconds * (1 + self._random.uniform(0, jitter)))
        self.pieces.append(seconds)
        self.now += seconds


class Timed(Markov):
    """A toy target whose passes take time: `each` seconds a pass and `token` a token of a row; prompts by the chunk."""

    def __init__(self, work, *, each=0.02, token=0.004, prefill=0.001, jitter=0.0, chunk=4):
        super().__init__(table(), 1)
        self._work, self._each, self._token, self._prefill, self._jitter = work, each, token, prefill, jitter
        self._chunk = chunk

    def open(self, key, tokens, in_time=None):
        for first in range(0, len(tokens), self._chunk):
            count = min(self._chunk, len(tokens) - first)
            if in_time is not None and not in_time(count):
                return False
            self._work.pass_(self._prefill * count, self._jitter)
        return super().open(key, tokens)

    def forward(self, tokens, positions, ends, *, last=None):
        self._work.pass_(self._each + self._token * tokens.shape[1], self._jitter)
        return super().forward(tokens, positions, ends, last=last)


def run(work, given, *, budget, draft_length=4, n=3, seen=None, **costs):
    loop = loop_for(Timed(work, **costs), Guess(EOS), rows=n, lengths=Fixed(draft_length))
    loop.clock.now = work
    settings = job(n=n, max_new_tokens=40, budget=budget)
    note = None if seen is None else seen.append
    conductor = Conductor(settings, Letters(), loop, context=1000, eos_ids={EOS}, on_round=note)
    return list(conductor.run(iter(prompts(*given)), ()))


@pytest.mark.parametrize("jitter", [0.0, 0.3])
@pytest.mark.parametrize("budget", [0.003, 0.05, 0.11, 0.4, 2.0])
def test_no_prompt_is_late_by_more_than_a_round(budget, jitter):
    """Exactly in time where rounds take what they took before; otherwise by no more than the one that took longer."""
    for seed in range(5):
        work = Work(seed)
        found = run(work, ["abc", "a", "bcd" * 9, "fgh"] * 3, budget=budget, jitter=jitter)
        longest = max(work.pieces)
        assert max(c.seconds for c in found) <= budget + longest
        # Nothing is known yet at the first prompt, and the first round of any prompt runs in any case.
        later = [c.seconds for c in found if c.id != "p0" and c.rounds != 1]
        assert max(later, default=0.0) <= budget + (longest if jitter else 1e-9)
        assert len(found) == 12 * 3


def test_what_is_finished_in_time_is_kept_and_the_rest_says_so():
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
            assert (c.text, c.finish_reason, c.token_ids) == (whole.text, whole.finish_reason, whole.token_ids)
            assert c.seconds <= 0.25


def test_a_round_that_would_be_late_is_shortened():
    """Rounds take 0.01 s and 0.01 more for each token of a row: after two of 4 drafts 0.034 s are left, room for 1."""
    work, seen = Work(), []
    loop = loop_for(Timed(work, each=0.01, token=0.01), Guess(EOS), rows=1, lengths=Fixed(4))
    loop.clock.now = work
    loop.clock.observe(0, 0.02)
    loop.clock.observe(4, 0.06)
    conductor = Conductor(job(n=1, max_new_tokens=400, budget=0.155), Letters(), loop, context=1000, eos_ids=(),
                          on_round=seen.append)
    (found,) = conductor.run(iter(prompts("a")), ())
    assert [done.width for done in seen] == [4, 4, 1]
    assert (found.finish_reason, found.seconds) == ("budget", pytest.approx(0.151))  # 0.001 for the prompt


def test_prefill_counts_and_is_given_up_in_the_middle():
    """40 tokens at 0.01 s: after 0.1 s it is clear that it will not do, and the next prompt begins."""
    work = Work()
    found = run(work, ["a" * 40, "b"], budget=0.1, prefill=0.01)
    late = [c for c in found if c.id == "p0"]
    assert [(c.finish_reason, c.tokens, c.text) for c in late] == [("budget", 0, "")] * 3
    assert all(c.seconds <= 0.1 + 1e-9 for c in late)
    assert {c.tokens > 0 for c in found if c.id == "p1"} == {True}


def test_a_wrong_prediction_does_not_keep_prompts_out_for_ever():
    """One pass over a prompt was slow. The next ones are given up because of it, but not all of them."""
    work = Work()
    clock = Clock(work)
    clock.observe_prefill(64, 5.0)
    answers = [Prefill(clock, work.now + 1.0)(64) for _ in range(12)]
    assert answers[0] is False
    assert answers[-1] is True


def test_a_prefill_is_predicted_from_passes_that_were_as_long():
    clock = Clock(Work())
    assert clock.predict_prefill(100) == 0.0
    for tokens, seconds in ((10, 0.5), (64, 1.0), (64, 3.0)):
        clock.observe_prefill(tokens, seconds)
    assert clock.predict_prefill(5) == 0.5
    assert clock.predict_prefill(64) == 1.0
    assert clock.predict_prefill(128) == pytest.approx(6.0)


def test_each_prompt_has_a_budget_of_its_own():
    found = run(Work(), ["abc", "fgh", "bb"], budget=0.3)
    assert {c.id for c in found if c.tokens > 3} == {"p0", "p1", "p2"}


@pytest.mark.parametrize("stalls", [[20], [20, 21, 22], list(range(20, 30))])
@pytest.mark.parametrize("draft_length", [0, 1, 4])
def test_a_stall_costs_the_prompts_that_it_met_and_no_others(stalls, draft_length):
    """50 ms a prompt, rounds of 5 ms, and some that take 0.17 s: whoever comes later has as many rounds as before, and as
    long ones."""
    seen = []
    work = Work(stalls=dict.fromkeys(stalls, 0.17))
    found = run(work, ["a"] * 164, budget=0.05, n=1, draft_length=draft_length, seen=seen, each=0.005, token=0.0)
    unfinished = [c.rounds for c in found if c.finish_reason == "budget"]
    assert len(unfinished) > 20
    assert set(unfinished[-20:]) == {9}, "9 rounds fit beside the prompt's own pass"
    assert sum(rounds < 9 for rounds in unfinished) <= len(stalls)
    assert {done.width for done in seen[-100:]} == {draft_length}


def test_a_prompt_whose_deadline_is_ahead_has_its_first_round():
    """Also where it is clear that it will be late; but not after the deadline, nor a second one."""
    found = run(Work(), ["a"] * 3, budget=0.01, n=1, draft_length=0, each=0.02, token=0.0)
    assert [(c.rounds, c.finish_reason) for c in found] == [(1, "budget")] * 3
    found = run(Work(), ["a"] * 3, budget=0.001, n=1, draft_length=0, each=0.02, token=0.0)
    assert [c.rounds for c in found] == [0] * 3, "the prompt's own pass took all of the time"
