"""Which shapes are captured, and when: reuse before capture, decided by counting, never by the
clock."""

import functools
import weakref

import pytest
from fakes import FakeGraphs, recorded

from bass_cli.engine.graphs import GraphPolicy, Shape, Step


class Bench:
    """A GraphPolicy on fake graphs; `ask` runs one round of a shape as the policy says."""

    def __init__(self, *, longest=32, drafts="round"):
        self.graphs = FakeGraphs()
        self.policy = GraphPolicy(self.graphs, longest=longest, drafts=drafts)

    def ask(self, rows, width, *, left=10_000, kind="round", fit="near"):
        wanted = Shape(kind, rows, width)
        step = self.policy.choose(wanted, left=left, fit=fit)
        self.policy.served(wanted, step)
        if step.how != "replay":
            getattr(self.graphs, step.how)(step.shape, lambda: None)
            self.policy.took(step, 0.06)
        return step

    def hold(self, *shapes):
        for shape in shapes:
            self.graphs.run(Shape(*shape), lambda: None)
            self.graphs.capture(Shape(*shape), lambda: None)

    def rounds_until_captured(self, rows, width, most=5000, **options):
        for number in range(most):
            if self.ask(rows, width, **options).how == "capture":
                return number
        return most


def test_shape_runs_uncaptured_once_and_is_then_captured_if_nothing_serves():
    bench = Bench()
    assert [bench.ask(8, 4).how for _ in range(4)] == ["run", "capture", "replay", "replay"]


def test_nothing_is_captured_for_the_last_rounds():
    bench = Bench()
    assert [bench.ask(8, 4, left=left).how for left in (2, 1, 2, 3)] == [
        "run",
        "run",
        "run",
        "capture",
    ]


def test_wider_graph_serves_until_padding_has_cost_a_capture():
    bench = Bench()
    bench.hold(("round", 8, 0), ("round", 64, 4), ("round", 32, 4))
    assert bench.ask(4, 0) == Step(Shape("round", 8, 0), "replay")
    assert bench.rounds_until_captured(1, 0) > 500, "seven padding rows cost almost nothing"
    assert bench.ask(16, 4).shape.rows == 32, "the nearest one serves"
    assert 100 < bench.rounds_until_captured(16, 4) < 300
    assert bench.ask(16, 4) == Step(Shape("round", 16, 4), "replay")
    assert bench.ask(65, 4).how == "run", "fewer rows never serve"


def test_near_draft_length_serves_until_the_wanted_one_persists():
    bench = Bench()
    bench.hold(("round", 8, 4), ("round", 8, 8))
    assert bench.ask(8, 5).shape.width == 4
    assert bench.ask(8, 7).shape.width == 8
    assert bench.ask(8, 0).shape.width == 4, (
        "also when nothing should be drafted: a few rounds are cheaper than a capture"
    )
    assert 100 < bench.rounds_until_captured(8, 5) < 300
    assert bench.rounds_until_captured(8, 0) < bench.rounds_until_captured(8, 3), (
        "a larger loss is captured sooner"
    )


def test_shape_with_few_rounds_left_is_not_captured():
    bench = Bench()
    bench.hold(("round", 8, 4))
    assert bench.rounds_until_captured(8, 6, most=500, left=20) == 500
    assert bench.ask(8, 6, left=1000).how == "run"
    assert bench.ask(8, 6, left=1000).how == "capture"


def test_lookup_drafts_prefer_a_wider_round_to_dropping_tokens():
    bench = Bench(drafts="given")
    bench.hold(("given", 1, 2), ("given", 1, 12))
    assert bench.ask(1, 6, kind="given").shape.width == 12
    bench = Bench(drafts="given")
    bench.hold(("given", 1, 2))
    assert bench.rounds_until_captured(1, 12, kind="given") < 50, (
        "ten drafts of each round are lost"
    )
    bench = Bench(drafts="given")
    bench.hold(("given", 1, 12))
    assert bench.rounds_until_captured(1, 2, kind="given") > 400, (
        "ten places more cost one row next to nothing, against a capture of one pass"
    )


def test_cost_of_a_capture_grows_with_its_launches():
    """A shrinking batch loses equally in both kinds; plain rounds are captured long before
    rounds with drafts."""
    plain, drafting = Bench(), Bench()
    plain.hold(("round", 768, 0))
    drafting.hold(("round", 96, 7))  # as many places
    patience = plain.rounds_until_captured(256, 0), drafting.rounds_until_captured(32, 7)
    assert 5 < patience[0] < 15
    assert 4 * patience[0] < patience[1] < 8 * patience[0]


def test_plain_round_never_serves_a_round_with_drafts():
    bench = Bench()
    bench.hold(("round", 8, 0))
    assert bench.ask(8, 1) == Step(Shape("round", 8, 1), "run")


def test_exact_length_is_served_by_longer_graphs_only():
    bench = Bench()
    bench.hold(("round", 8, 4), ("round", 8, 6))
    assert [bench.ask(4, width, fit="wider").shape.width for width in (0, 1, 3, 5, 6)] == [
        4,
        4,
        4,
        6,
        6,
    ]
    assert [bench.ask(8, 9, fit="wider") for _ in range(3)] == [
        Step(Shape("round", 8, 10), how) for how in ("run", "capture", "replay")
    ]
    assert bench.ask(8, 33, fit="wider") == Step(Shape("round", 8, 33), "run"), (
        "beyond the usual lengths"
    )


def test_exact_length_is_captured_when_longer_graphs_have_wasted_as_much():
    bench = Bench()
    bench.hold(("round", 8, 10))
    rounds = bench.rounds_until_captured(8, 9, fit="wider")
    assert 300 < rounds < 500, "a capture of nine draft steps takes as long as some hundred passes"
    assert bench.ask(8, 9, fit="wider") == Step(Shape("round", 8, 9), "replay")


def test_fit_same_is_served_by_the_same_width_only():
    bench = Bench()
    bench.hold(("round", 8, 4))
    wanted = Shape("round", 8, 0)
    assert bench.policy.choose(wanted, left=100).shape.width == 4
    assert bench.policy.choose(wanted, left=100, fit="same") == Step(wanted, "run")


def test_catching_up_is_served_by_longer_catch_up_graphs_only():
    bench = Bench()
    bench.hold(("catch up", 8, 8), ("round", 8, 32))
    assert bench.ask(4, 2, kind="catch up") == Step(Shape("catch up", 8, 8), "replay")
    assert bench.ask(8, 32, kind="catch up") == Step(Shape("catch up", 8, 32), "run")


def test_one_time_costs_of_lengths():
    bench = Bench(longest=16)
    unknown = bench.policy.one_time_costs(8)
    assert 0 < unknown[0] < unknown[4] < unknown[16] == unknown[32]
    bench.ask(8, 0)
    warm = bench.policy.one_time_costs(8)
    assert 0 < warm[0] < unknown[0]
    bench.ask(8, 0)
    known = bench.policy.one_time_costs(8)
    assert known[0] == 0
    assert 0 < known[4] < unknown[4]
    bench.ask(8, 4)
    bench.ask(8, 4)
    assert bench.policy.one_time_costs(8) == (0,) * 33, "a near length is captured"
    assert bench.policy.one_time_costs(16)[4] > 0
    bench.graphs.renew("moved")
    bench.policy.forget()
    assert bench.policy.one_time_costs(8)[0] > 0


def test_host_drafts_cost_no_launches():
    """The steps of a draft model are launched one by one. If the host drafts, any length takes
    the same few launches, and the time of a plain round predicts it."""
    policies = [
        GraphPolicy(FakeGraphs(), longest=8, drafts=drafts) for drafts in ("round", "given")
    ]
    for policy in policies:
        policy.took(Step(Shape("round", 8, 0), "run"), 0.02)
        policy.took(Step(Shape("round", 8, 0), "capture"), 0.03)
    model, host = (policy.one_time_costs(8) for policy in policies)
    assert host == pytest.approx((0.05,) * len(host))
    assert model[0] == pytest.approx(0.05)
    assert model[4] > 3 * host[4]
    assert [policy.shape(8, 3) for policy in policies] == [
        Shape("round", 8, 3),
        Shape("given", 8, 3),
    ]
    assert policies[1].shape(8, 0) == Shape("round", 8, 0)


def test_one_pass_drafts_cost_one_step_for_any_length():
    """A longer draft costs few more launches. A shorter one that serves instead loses drafts
    that would have cost nothing."""
    policies = [
        GraphPolicy(FakeGraphs(), longest=16, drafts=drafts) for drafts in ("round", "block")
    ]
    for policy in policies:
        policy.took(Step(Shape("round", 8, 0), "run"), 0.02)
        policy.took(Step(Shape("round", 8, 0), "capture"), 0.03)
    chain, block = (policy.one_time_costs(8) for policy in policies)
    assert block[1] == block[16] == pytest.approx(chain[1])
    assert chain[16] > 6 * block[16]
    waited = {}
    for kind in ("round", "block"):
        bench = Bench(drafts=kind)
        bench.hold((kind, 8, 4))
        waited[kind] = bench.rounds_until_captured(8, 12, kind=kind)
        other = Bench(drafts=kind)
        other.hold((kind, 8, 12))
        waited[kind, "shorter"] = other.rounds_until_captured(8, 4, kind=kind)
    assert waited["block"] < 1.1 * waited["round"]
    assert waited["block", "shorter"] > 3 * waited["round", "shorter"]


def test_compile_time_does_not_count_as_capture_time():
    bench = Bench()
    bench.policy.took(Step(Shape("round", 8, 0), "run"), 9.0)
    slow = bench.policy.delay(Step(Shape("round", 8, 0), "run"))
    assert slow <= 0.1
    bench.policy.took(Step(Shape("round", 8, 0), "run"), 0.02)
    bench.policy.took(Step(Shape("round", 8, 0), "run"), 0.05)
    assert bench.policy.delay(Step(Shape("round", 8, 0), "run")) == 0.02
    assert bench.policy.delay(Step(Shape("round", 8, 0), "replay")) == 0


class Pool:
    """Records as CUDA does into one memory pool: refused while graphs were there and none is any
    more."""

    def __init__(self):
        self.alive, self.begun = weakref.WeakSet(), False

    def __call__(self, function, pool):
        assert self.alive or not self.begun, "the pool has been given up"
        function()
        graph = functools.partial(function)
        self.alive.add(graph)
        self.begun = True
        return graph


def test_memory_that_moves_keeps_the_graph_pool_in_use():
    pool = Pool()
    graphs = recorded(pool)
    for place in (1000, 2000, 3000, 4000):  # the second time nothing is captured in between
        assert graphs.renew(place)
        assert not graphs.is_warm("key")
        if place != 2000:
            graphs.run("key", lambda: None)
            graphs.capture("key", lambda: None)
        assert graphs.holds("key") is (place != 2000)
    assert not graphs.renew(4000)
    assert graphs.captures == 3
    assert len(pool.alive) == 1, "what was dropped is let go once something new is there"


def test_first_run_of_a_draft_that_compiles_does_not_set_the_cost_of_later_ones():
    """Until one runs without compiling, a first round with drafts is expected to take as long as a
    plain one of as many launches."""
    bench = Bench(drafts="block")
    drafting = Step(Shape("block", 8, 4), "run")
    bench.policy.took(Step(Shape("round", 8, 0), "run"), 0.01)
    before = bench.policy.delay(drafting)
    bench.policy.took(drafting, 0.9)
    assert bench.policy.delay(drafting) == before < 0.02
    bench.policy.took(drafting, 0.03)
    assert bench.policy.delay(drafting) == pytest.approx(0.03)
