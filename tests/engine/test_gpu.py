"""The engine on a CUDA device: Triton kernels and captured rounds give the tokens of plain,
uncaptured decoding. Float32."""

import collections
import copy
import functools
import gc

import pytest
import test_processors
import torch
import toys
import triton
from checkpoints import FAMILIES, write_checkpoint
from decoders import load_decoder, load_noisy_pair
from safetensors.torch import load_file
from test_exactness import rows
from toys import AtOnce, Reactive, begin, drive, store_in_eight_bits

import bass_kernels as ops
from bass_cli.drafts.factory import NoDrafter
from bass_cli.engine.batch import Batch, Row
from bass_cli.engine.contracts import Proposal
from bass_cli.engine.round import HostDrafts
from bass_cli.engine.verify import Cut
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.lengths.controllers import Bass, Fixed
from bass_cli.models.capture import Graphs
from bass_cli.run.build import Models
from bass_cli.run.pair import Files
from bass_cli.run.updates import Updates
from bass_kernels import (
    acceptance_kernels,
    fused_attention,
    launch,
    linear_kernels,
    pointwise,
    products,
    ragged,
    ragged_kernel,
    residual,
    round_kernels,
    sampling_kernels,
    truncation,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def decoders(tmp_path_factory):
    """A function from a family's name to (target, draft) on the device; the draft is the target
    with some noise."""

    @functools.cache
    def pair(family):
        folder = tmp_path_factory.mktemp(family)
        write_checkpoint(family, folder)
        return load_noisy_pair(folder, device=CUDA)

    return pair


def loop_for(target, draft, *, batch, graphs, **words):
    return toys.loop_for(
        target, draft, rows=batch, graphs=Graphs(CUDA) if graphs else None, **words
    )


@pytest.mark.parametrize("family", ["llama3", "gpt2"])
def test_captured_rounds_after_new_weights_equal_plain_decoding(family, tmp_path):
    """The same graphs are replayed: nothing has moved in memory."""
    for name, seed in (("old", 1), ("new", 2), ("draft", 3)):
        write_checkpoint(family, tmp_path / name, seed=seed)
    made = {
        name: load_decoder(tmp_path / name, device=CUDA, vocab=300)
        for name in ("old", "new", "draft")
    }
    loops = {
        name: loop_for(made[name], made["draft"], batch=2, lengths=Fixed(3), graphs=name == "old")
        for name in ("old", "new")
    }
    loop = loops["old"]
    loop.prepare(range(1, 3), (0, 3))
    before, captures = drive(loop, rows()), loop.graphs.captures
    old, drafts = (open_checkpoint(tmp_path / name) for name in ("old", "draft"))
    files = Files(old, None, drafts, 300, None, frozenset())
    updates = Updates(Models(made["old"], made["draft"]), files)
    due = drive(loops["new"], rows())
    assert due != before
    tensors = {
        n: t for f in (tmp_path / "new").glob("*.safetensors") for n, t in load_file(f).items()
    }
    for weights in ({name: tensor.cuda() for name, tensor in tensors.items()}, tensors):
        updates.update(tmp_path / "old")
        assert drive(loop, rows()) == before
        updates.update(weights)
        assert drive(loop, rows()) == due
    assert loop.graphs.captures == captures > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_rounds_equal_plain_decoding(decoders, family):
    target, draft = decoders(family)
    due = drive(loop_for(target, "none", batch=1, lengths=Fixed(0), graphs=False), rows())
    kept = 0
    for drafter in (draft, AtOnce(draft, 300), "lookup", "none"):
        for batch, lengths in ((1, Fixed(3)), (2, Fixed(7)), (5, Bass())):
            loop, live = (
                loop_for(target, drafter, batch=batch, lengths=lengths, graphs=True),
                rows(),
            )
            loop.prepare(range(1, batch + 1), range(0, 9, 2))
            assert drive(loop, live) == due, f"batch {batch}, {drafter}"
            assert loop.graphs.captures > 0
            kept += sum(row.accepted for row in live)
            assert drafter != "none" or sum(row.drafted for row in live) == 0
            assert all(len(row.log_probabilities) >= row.limit for row in live)
    assert kept > 0


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_captured_rounds_with_keys_in_eight_bits_equal_plain_decoding(
    decoders, family, monkeypatch
):
    target, draft = decoders(family)
    store_in_eight_bits(monkeypatch)
    due = drive(loop_for(target, "none", batch=1, lengths=Fixed(0), graphs=False), rows())
    for drafter in (draft, AtOnce(draft, 300), "lookup"):
        loop = loop_for(target, drafter, batch=5, lengths=Fixed(3), graphs=True)
        loop.prepare(range(1, 6), (0, 2, 3))
        assert drive(loop, rows()) == due, drafter
        assert loop.graphs.captures > 0
        assert {keys.dtype for keys in loop.target.cache.own_keys} == {torch.uint8}


@pytest.mark.parametrize("family", ["llama"])
def test_captured_rounds_with_logits_processors_equal_plain_decoding(decoders, family):
    """Graphs of a loop without processors are captured anew once."""
    target, draft = decoders(family)
    plain = loop_for(target, "none", batch=1, lengths=Fixed(0), graphs=False)
    due = drive(plain, test_processors.rows())
    for drafter in (draft, AtOnce(draft, 300), "lookup"):
        loop = loop_for(target, drafter, batch=5, lengths=Fixed(3), graphs=True)
        drive(loop, rows())
        before = loop.graphs.captures
        for _ in range(2):
            assert drive(loop, test_processors.rows(), ahead=True) == due
        assert before < loop.graphs.captures <= 4 * before


@pytest.mark.parametrize("family", ["llama", "qwen2", "gptj"])
def test_rounds_launched_ahead_equal_plain_decoding(decoders, family):
    """Rows end and others take their places while a round is in flight."""
    target, draft = decoders(family)
    due = drive(loop_for(target, "none", batch=1, lengths=Fixed(0), graphs=False), rows())
    at_once = AtOnce(target, 300)
    for drafter, length in ((draft, 3), (draft, 0), (target, 4), (at_once, 4), ("none", 0)):
        for batch in (2, 5):
            loop, live, behind = (
                loop_for(target, drafter, batch=batch, lengths=Fixed(length), graphs=True),
                rows(),
                [],
            )
            loop.prepare(range(1, batch + 1), [length])
            loop._ahead_policy.pays = lambda waiting: True
            found = drive(
                loop,
                live,
                ahead=True,
                on_round=lambda *_, loop=loop, seen=behind: seen.append(loop._in_flight),
            )
            assert found == due, f"batch {batch}, {length} drafts"
            assert sum(one is not None for one in behind) > 5
            if drafter is target:
                assert all(row.accepted == row.drafted for row in live)


@pytest.mark.parametrize("family", FAMILIES)
def test_cut_rounds_equal_plain_decoding(decoders, family):
    """Captured, launched ahead and with padding rows. The draft is sometimes surer of one row,
    sometimes of another."""
    target, draft = decoders(family)
    due = drive(loop_for(target, "none", batch=1, lengths=Fixed(0), graphs=False), rows())
    kept = 0
    for drafter in (target, draft):
        for batch, length, graphs in ((1, 3, True), (5, 2, True), (5, 4, False), (12, 5, True)):
            words = {"batch": batch, "lengths": Fixed(length), "cut": Cut(16, 0, 3)}
            loop = loop_for(target, AtOnce(drafter, 300), graphs=graphs, **words)
            live, uneven = rows(), set()
            if graphs:
                loop.prepare(range(1, batch + 1), [length])
                loop._ahead_policy.pays = lambda waiting: True
                assert any(shape.kind == "cut" for shape in loop.graphs.held())
            found = drive(
                loop,
                live,
                ahead=graphs,
                on_round=lambda done, _, seen=uneven: seen.update(
                    map(len, map(set, [done.num_drafts]))
                ),
            )
            assert found == due, f"batch {batch}, {length} drafts"
            kept += sum(row.accepted for row in live)
    assert kept > 0


def test_two_results_may_be_in_flight():
    """The second replay of a graph does not overwrite the result of the first."""
    graphs, number = Graphs(CUDA), torch.zeros(1, dtype=torch.int64, device=CUDA)

    def function():
        torch.cuda._sleep(1_000_000)
        number.add_(1)
        return number * 10

    graphs.run("key", function)
    graphs.capture("key", function)
    before = number.item()
    first, second = graphs.launch("key"), graphs.launch("key")
    assert not second.over()
    kept = first.wait()
    assert kept.item() == 10 * (before + 1)
    assert second.wait().item() == 10 * (before + 2)
    assert kept.item() == 10 * (before + 1)
    assert second.over()


@pytest.mark.parametrize("family", ["llama", "qwen2", "gptj"])
def test_captured_maximal_rounds_equal_the_definition(decoders, family):
    """With draft lengths that do not depend on time, some of them without a graph at first:
    compared with the same rows uncaptured, and with plain torch."""
    target, draft = decoders(family)
    kept = drafted = 0
    for drafter in (draft, target, AtOnce(draft, 300), "lookup", "none"):
        for batch, lengths in ((1, lambda: Fixed(3)), (2, lambda: Fixed(9)), (5, Bass)):
            ops.use("reference")
            due = drive(
                loop_for(
                    target,
                    drafter,
                    batch=batch,
                    lengths=lengths(),
                    graphs=False,
                    coupling="maximal",
                ),
                rows(),
            )
            ops.use(None)
            loop = loop_for(
                target, drafter, batch=batch, lengths=lengths(), graphs=True, coupling="maximal"
            )
            live = rows()
            loop.prepare(
                range(1, batch + 1), range(0, 9, 2)
            )  # 9 drafts run in a graph for 10, 3 in one for 4
            assert drive(loop, live) == due, f"batch {batch}, {drafter}"
            assert loop.graphs.captures > 0
            assert all(len(row.log_probabilities) >= row.limit for row in live)
            if drafter is draft:
                kept, drafted = (
                    kept + sum(row.accepted for row in live),
                    drafted + sum(row.drafted for row in live),
                )
    assert 0 < kept < drafted, "some but not all drafts must be accepted for this test"


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_captured_rounds_of_shared_prefix_groups_equal_plain_decoding(
    decoders, family, monkeypatch
):
    """Rows of a prompt read it together while they begin, end and move; then the paper's
    schedules, on the same rows."""
    target, draft = decoders(family)
    due = drive(loop_for(target, "none", batch=1, lengths=Fixed(0), graphs=False), rows())
    monkeypatch.setattr("bass_cli.models.kv_cache._SHARED_FROM", 1)
    for schedule, batch in (("ragged", 3), ("ragged", 5), ("pad", 5), ("split", 5)):
        ops.attention_schedule(schedule)
        loop = loop_for(target, draft, batch=batch, lengths=Fixed(3), graphs=True)
        assert drive(loop, rows()) == due, f"{schedule}, batch {batch}"
        assert (
            loop.target.cache.decode_pass(
                torch.zeros(batch, 1).long().cuda(), None
            ).segments.device_groups
            is not None
        )


def test_target_accepts_all_of_its_own_drafts(decoders):
    target, _ = decoders("llama")
    live = rows()
    drive(loop_for(target, target, batch=5, lengths=Fixed(4), graphs=True), live)
    # What is drafted beyond a row's limit is not counted against it: full acceptance is k + 1
    # tokens a round.
    assert sum(row.accepted for row in live) == sum(row.drafted for row in live) > 0


def test_run_needs_only_the_prepared_graphs(decoders):
    target, draft = decoders("qwen2")
    loop = loop_for(target, draft, batch=4, lengths=Fixed(3), graphs=True)
    loop.prepare(range(1, 5), range(8))
    before = loop.graphs.captures
    drive(loop, rows())
    assert loop.graphs.captures == before > 0


@pytest.mark.parametrize(
    ("draft", "coupling"),
    [
        ("model", "shared"),
        ("model", "maximal"),
        ("at once", "shared"),
        ("cut", "shared"),
        ("lookup", "shared"),
    ],
)
def test_rounds_compile_nothing_after_compiling_ahead(decoders, monkeypatch, draft, coupling):
    """Compiling ahead runs nothing: the rows get the tokens that they would have got."""
    target, model = decoders("qwen2")
    due = drive(
        loop_for(target, "none", batch=1, lengths=Fixed(0), graphs=False, coupling=coupling), rows()
    )
    forget_kernels()
    at_once = AtOnce(model, 300)
    loop = loop_for(
        target,
        {"model": model, "at once": at_once, "cut": at_once}.get(draft, draft),
        batch=5,
        lengths=Fixed(3),
        graphs=True,
        coupling=coupling,
        cut=Cut(16, 0, 2) if draft == "cut" else None,
    )
    row = Row("alone", 0, 0, [5, 6, 7], 8)
    begin(loop, row)
    loop.prepare(range(1, 6), range(5), only_compile=True)
    assert loop.graphs.captures == 0
    assert loop.batch.lengths.tolist() == [3, 1, 1, 1, 1]
    assert loop.batch.tokens[0, :3].tolist() == row.tokens
    with monkeypatch.context() as patch:
        patch.setattr(triton.JITFunction, "_do_compile", refuse)
        loop.prepare(range(1, 6), range(5))
    assert loop.graphs.captures > 0
    loop.retire(0)
    loop.close(row.key)
    found = drive(loop, rows())
    assert coupling == "maximal" or found == due


def forget_kernels():
    for module in (
        acceptance_kernels,
        linear_kernels,
        fused_attention,
        pointwise,
        products,
        ragged_kernel,
        residual,
        round_kernels,
        sampling_kernels,
        truncation,
    ):
        for kernel in vars(module).values():
            if isinstance(kernel, triton.JITFunction):
                kernel.device_caches.clear()


def refuse(kernel, *arguments, **options):
    raise AssertionError(f"{kernel.__name__} was not compiled ahead")


def test_catching_up_by_graphs_is_complete(decoders):
    """With plain rounds between: the target, drafting for itself, accepts all drafts only if it
    has caught up."""
    target, _ = decoders("llama")
    loop, live = loop_for(target, target, batch=5, lengths=Reactive(), graphs=True), rows()
    loop.prepare(range(1, 6), range(8))
    before = loop.graphs.captures
    due = drive(loop_for(target, "none", batch=1, lengths=Fixed(0), graphs=False), rows())
    assert drive(loop, live) == due
    assert sum(row.accepted for row in live) == sum(row.drafted for row in live) > 0
    assert loop.graphs.captures == before > 0


def test_sampling_parameters_are_not_baked_into_graphs(decoders):
    """One graph serves rows of any temperature: greedy rows first, then sampled ones in the same
    places."""
    target, draft = decoders("llama")
    due = drive(loop_for(target, "none", batch=1, lengths=Fixed(0), graphs=False), rows())
    loop = loop_for(target, draft, batch=3, lengths=Fixed(3), graphs=True)
    loop.prepare(range(1, 4), range(4))
    greedy = [row for row in rows() if row.sample == 0]
    sampled = [row for row in rows() if row.sample == 1]
    first = drive(loop, greedy)
    captures = loop.graphs.captures
    assert first | drive(loop, sampled) == due
    assert loop.graphs.captures == captures


def test_moved_memory_is_captured_again(decoders):
    target, draft = decoders("llama")
    due = drive(loop_for(target, "none", batch=1, lengths=Fixed(0), graphs=False), rows())
    loop = loop_for(target, draft, batch=3, lengths=Fixed(3), graphs=True)
    drive(loop, rows())
    loop.target.cache._grow(10_000)
    loop.drafter.runner.cache._grow(10_000)
    assert drive(loop, rows()) == due


@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
def test_simulated_acceptance_has_the_given_rate(decoders, rate):
    target, draft = decoders("llama")
    loop, live = (
        loop_for(target, draft, batch=5, lengths=Fixed(4), graphs=True, acceptance=(rate,)),
        rows(),
    )
    drive(loop, live)
    drafted, kept, rounds = (
        sum(getattr(row, name) for row in live) for name in ("drafted", "accepted", "rounds")
    )
    if rate in (0.0, 1.0):
        assert kept == rate * drafted
    else:
        assert 0.5 < kept / rounds < 2.2  # 1.3 expected


def test_nothing_is_freed_while_a_graph_is_captured():
    """Freeing a dead loop's graph during a capture would end the process."""
    graphs, seen = Graphs(CUDA), []

    def function():
        seen.append(gc.isenabled())
        return torch.zeros(1, device=CUDA)

    graphs.run("key", function)
    graphs.capture("key", function)
    assert seen == [True, False]
    assert gc.isenabled()


@pytest.mark.parametrize("coupling", ["shared", "maximal"])
def test_captured_rounds_end_only_rows_with_non_finite_logits(decoders, coupling):
    """NaN for one token: a row that gets it has no log-probability after it; rejected drafts
    that contain it do no harm."""
    target, draft = decoders("llama")
    due = drive(loop_for(target, "none", batch=1, lengths=Fixed(0), graphs=False), rows())
    token = collections.Counter(
        t for tokens in due.values() for t in set(tokens[:-1])
    ).most_common()[-1][0]
    broken = copy.copy(target)
    broken._weights = copy.copy(target._weights)
    broken._weights["embed.weight"] = target._weights["embed.weight"].clone()
    broken._weights["embed.weight"][token] = torch.nan
    for drafter, batch in ((draft, 5), (broken, 3), ("lookup", 2), ("none", 1)):
        live = rows()
        found = drive(
            loop_for(
                broken, drafter, batch=batch, lengths=Fixed(3), graphs=True, coupling=coupling
            ),
            live,
        )
        for row in live:
            tokens = found[row.key, row.sample]
            met = tokens.index(token) + 1 if token in tokens[:-1] else None
            assert (row.broken if row.broken is None or row.broken < row.limit else None) == met
            assert all(0 <= t < target.vocab for t in tokens)
            if coupling == "shared":
                assert tokens[:met] == due[row.key, row.sample][:met]
        assert (
            0 < sum(token in tokens[:-1] for tokens in found.values()) < len(found)
            or coupling == "maximal"
        )


def test_overlapping_launches_equal_plain_decoding(decoders, monkeypatch):
    """As in large models: each round's positions are written right before the chain of launches
    that reads them early."""
    target, draft = decoders("qwen2")
    due = drive(loop_for(target, "none", batch=1, lengths=Fixed(0), graphs=False), rows())
    monkeypatch.setattr("bass_cli.models.fused_decode._large", lambda spec, layers: True)
    for _ in range(3):
        for drafter, batch, length in (
            (draft, 3, 3),
            ("none", 1, 0),
            ("lookup", 2, 5),
            (draft, 5, 1),
        ):
            for graphs in (True, False):
                loop = loop_for(target, drafter, batch=batch, lengths=Fixed(length), graphs=graphs)
                assert drive(loop, rows()) == due, f"batch {batch}, {drafter}"


def test_graph_keeps_the_counters_it_was_captured_with(decoders):
    target, draft = decoders("llama")
    due = drive(loop_for(target, "none", batch=1, lengths=Fixed(0), graphs=False), rows())
    loop = loop_for(target, draft, batch=3, lengths=Fixed(3), graphs=True)
    loop.prepare(range(1, 4), range(4))
    old = launch.counters(CUDA, 1)
    launch.counters(CUDA, len(old) + 1)
    size, place = len(old), old.data_ptr()
    del old
    others = [torch.full((size,), 7, dtype=torch.int32, device=CUDA) for _ in range(8)]
    assert all(other.data_ptr() != place for other in others), (
        "the memory of the counters was given away"
    )
    assert drive(loop, rows()) == due


def test_kernel_that_does_not_fit_falls_back_to_plain_torch(decoders, monkeypatch):
    target, draft = decoders("llama")
    due = drive(loop_for(target, "none", batch=1, lengths=Fixed(0), graphs=False), rows())
    small = launch.card(CUDA)._replace(shared=1024)
    for module in (fused_attention, ragged):
        monkeypatch.setattr(module, "card", lambda device: small)
    loop = loop_for(target, draft, batch=3, lengths=Fixed(3), graphs=True)
    assert drive(loop, rows()) == due
    assert loop.graphs.captures > 0


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_host_drafts_reach_the_device(place):
    """From a drafter in the host's memory (lookup), or on the device (bass profile's)."""

    class Found(NoDrafter):
        on_device = False

        def propose(self, batch, length):
            tokens = torch.arange(2 * length, device=place).view(2, length)
            return Proposal(tokens, None, (3, 2))

    batch = Batch(rows=2, context=64, device=torch.device("cuda"))
    found = HostDrafts(batch, Found(), learns_before=False).propose(5, Fixed(5))
    assert found.tokens.is_cuda
    assert found.tokens.tolist() == [[0, 1, 2], [5, 6, 7]]
