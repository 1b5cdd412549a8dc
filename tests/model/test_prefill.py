"""Prompts prefilled together, in tiles and by padded graphs, without a GPU: rows give the same tokens
as after reading each prompt alone, whatever else is in the store."""

import pytest
import torch
from checkpoints import write_checkpoint
from fakes import count_operations, recorded
from toys import SPAN, drive, loop_for

from bass_cli.engine.batch import Row
from bass_cli.engine.sampling import RowSampling
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.weights import load
from bass_cli.lengths.controllers import Fixed
from bass_cli.models import kv_cache as cache
from bass_cli.models import prefill as prompts
from bass_cli.models import runner as runner_module
from bass_cli.models.block_allocator import Change
from bass_cli.models.decoder import Decoder
from bass_cli.models.runner import Runner

LENGTHS = (1, 2, 3, 15, 16, 17, 18, 35)


@pytest.fixture(scope="module")
def decoders(tmp_path_factory):
    made = {}

    def decoder(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            write_checkpoint(
                family, folder, **({} if family == "gptj" else {"max_position_embeddings": 2048})
            )
            checkpoint = open_checkpoint(folder)
            made[family] = Decoder(
                checkpoint.spec, load(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
            )
        return made[family]

    return decoder


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Sizes are captured when they are first met, so that from the second time on they are
    replayed."""
    monkeypatch.setattr(prompts, "PATIENCE", 0)


@pytest.fixture
def small(monkeypatch):
    """Few sizes, short passes and a store that has to grow early, to save time."""
    monkeypatch.setattr(prompts, "SIZES", (16, 32))
    monkeypatch.setattr(runner_module, "PASS", 32)
    monkeypatch.setattr(runner_module, "_TIMED_PASS", {})
    monkeypatch.setattr(cache, "ARENA", {"cpu": 64})


@pytest.fixture(autouse=True)
def tiles(monkeypatch):
    """Tiles as on a GPU. Without one `PrefillPasses.tile` is 1."""
    monkeypatch.setattr(prompts, "TILE", {"cpu": 16})


def text(length, seed=0):
    return torch.randint(
        3, 300, (length,), generator=torch.Generator().manual_seed(1000 * seed + length)
    ).tolist()


def logits_of(runner, row, tokens, rows):
    """Logits after a prompt's last `pending` tokens, which rows compute themselves; other rows feed
    token 0 after theirs."""
    width = min(runner.pending, len(tokens))
    places = [runner.cache.base(other) for other in range(rows)]
    places[row] = len(tokens) - width
    fed = torch.zeros(rows, width, dtype=torch.int64)
    fed[row] = torch.tensor(tokens[-width:])
    positions = torch.tensor(places)[:, None] + torch.arange(width)
    return runner.forward(fed, positions, [place + width for place in places])[row]


def runners(decoder, pending, rows=2):
    """One decoder that prefills in plain torch, and one that uses graphs."""
    both = [
        Runner(decoder, rows=rows, span=60, pending=pending, graphs=graphs)
        for graphs in (None, recorded())
    ]
    both[0]._passes.tile = 1
    return both


def captures(runner):
    return runner._passes.graphs.captures


def keys(runner):
    """The stored keys and values of each open prompt, by key: [2, L, K, T, D]."""
    layers = range(len(runner.cache.prompt_keys))
    return {
        key: torch.stack(
            [
                torch.stack([store[i][:, place] for i in layers])
                for store in (runner.cache.prompt_keys, runner.cache.prompt_values)
            ]
        )
        for key, prompt in runner._prompts.items()
        for place in [slice(prompt.span.start, prompt.span.start + prompt.span.length)]
    }


@pytest.mark.parametrize(
    ("family", "pending"),
    [("qwen2", 1), ("mistral", 2), ("gemma3_text", 1), ("gptj", 2), ("opt", 1)],
)
@pytest.mark.parametrize("tile", [1, 16])
def test_waiting_prompts_are_prefilled_together(decoders, family, pending, tile, monkeypatch):
    """Many short ones and long ones (some longer than a pass, and than a window), in passes that
    split them at any place: what is stored is what each alone would have stored."""
    monkeypatch.setattr(runner_module, "PASS", 48)
    lengths = (1, 2, 3, 5, 17, 31, 100, 4, 4, 49, 16, 33)
    given = {f"p{i}": text(length, seed=i) for i, length in enumerate(lengths)}
    alone, together = (Runner(decoders(family), rows=2, span=60, pending=pending) for _ in range(2))
    alone._passes.tile, together._passes.tile = 1, tile
    for key, tokens in given.items():
        alone.open(key, tokens)
        assert not alone.prefill() or len(tokens) > 48
        while alone.prefill():
            pass
        together.open(key, tokens)
    passes = 1
    while together.prefill():
        passes += 1
    padded = [-(-max(n - pending, 0) // tile) * tile for n in lengths]
    assert passes == -(-sum(padded) // 48)
    due, found = keys(alone), keys(together)
    assert [value.shape[3] for value in found.values()] == [max(n - pending, 0) for n in lengths]
    for key, value in due.items():
        torch.testing.assert_close(found[key], value, atol=1e-5, rtol=1e-4)


def test_common_prefix_of_prompts_is_computed_once(decoders, monkeypatch):
    """Also where the first of them is still to be read, is split by passes, or has gone; what is
    stored is what each alone would have stored, whatever becomes of the others."""
    monkeypatch.setattr(runner_module, "_COPIED", 16)
    monkeypatch.setattr(runner_module, "PASS", 48)
    header = text(70, seed=9)
    given = {
        "a": header + text(5),
        "b": header + text(40),
        "short": text(9),
        "other": header[:10] + text(50),
        "same": header + text(5),
        "inside": header[:40],
    }
    alone, together = (
        Runner(decoders("gemma3_text"), rows=2, span=60, pending=1) for _ in range(2)
    )
    monkeypatch.setattr(alone, "_find_same_prefix", lambda *_: None)
    for key, tokens in given.items():
        for runner in (alone, together):
            runner.open(key, tokens)
    counts, run_pass = [], together._passes.run
    monkeypatch.setattr(
        together._passes,
        "run",
        lambda parts, capture: (
            counts.append(sum(len(part.tokens) for part in parts)),
            run_pass(parts, capture=capture),
        ),
    )
    for runner in (alone, together):
        while runner.prefill():
            pass
    due, found = keys(alone), keys(together)
    for key, value in due.items():
        torch.testing.assert_close(found[key], value, atol=1e-5, rtol=1e-4)
    # the header and 4 more, of b 39, all of short and other, 4 of same, nothing of what is inside
    assert sum(counts) == 74 + 39 + 8 + 59 + 4
    counts.clear()
    together.open("late", header + text(5), lambda tokens: True)
    assert counts == [35], "of the newest it has 39 tokens, also where a clock runs"
    counts.clear()
    for key in ("a", "b", "same", "inside", "late"):
        together.close(key)
    together.open("again", header + text(5), lambda tokens: True)
    assert sum(counts) == 74, "those that it was like have gone, and others may have their place"
    torch.testing.assert_close(keys(together)["again"], due["a"], atol=1e-5, rtol=1e-4)


def test_waiting_prompts_take_fewer_passes(decoders):
    """Products run once over all of them: the launches too are those of one prompt, but for
    attention in plain torch."""
    alone, together = (Runner(decoders("qwen2"), rows=2, span=60, pending=1) for _ in range(2))
    alone.open("p0", text(30))
    one = count_operations(alone.prefill)
    for i in range(8):
        together.open(f"p{i}", text(30, seed=i))
    assert count_operations(together.prefill) < 4 * one
    assert not together._unprefilled


def test_row_begins_after_its_prompt_is_stored(decoders):
    """Prompts that wait are read at the latest when a row of one of them begins, as far as
    needed (tiles of 39 tokens have 48); one that is closed before is not read at all."""
    runner = Runner(decoders("qwen2"), rows=2, span=60, pending=1)
    for key, length in (("a", 40), ("gone", 2000), ("b", 40), ("c", 1000)):
        runner.open(key, text(length))
    runner.close("gone")
    runner.follow(Change((), (), (((0,), "b"),)))
    assert [(key, prompt.stored) for key, prompt in runner._unprefilled.items()] == [
        ("c", 512 - 96)
    ]
    eager = Runner(decoders("qwen2"), rows=1, span=60, pending=1)
    eager.open("b", text(40))
    eager.follow(Change((), (), (((0,), "b"),)))
    torch.testing.assert_close(
        *(logits_of(one, 0, text(40), 1) for one in (runner, eager)), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize(
    ("family", "pending"), [("qwen2", 1), ("mistral", 2), ("gemma3_text", 1), ("gptj", 2)]
)
def test_rows_read_the_keys_of_an_ordinary_prefill(decoders, family, pending, monkeypatch):
    """Twice each length: captured, then replayed at another place and with other tokens, a
    neighbour on either side."""
    monkeypatch.setattr(cache, "ARENA", {"cpu": 128})
    eager, graphed = runners(decoders(family), pending, rows=3)
    for turn in range(2):
        for length in LENGTHS if turn else (3, 35):
            given = [text(7), text(length, seed=turn + 1), text(20)]
            found = []
            for runner in (eager, graphed):
                for row, tokens in enumerate(given):
                    runner.open(str(row), tokens)
                for row in range(3):
                    runner.follow(Change((), (), (((row,), str(row)),)))
                    runner.close(str(row))
                found.append(
                    torch.stack(
                        [logits_of(runner, row, tokens, 3)[-1] for row, tokens in enumerate(given)]
                    )
                )
                for row in reversed(range(3)):
                    runner.cache.swap_rows(ended=[row])
            torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)
    assert 2 <= captures(graphed) <= 4


@pytest.mark.usefixtures("small")
def test_store_may_move_between_passes_over_a_long_prompt(decoders, monkeypatch):
    """One pass and one more token; then prompts that make the store grow, here by no more than
    they need: what was captured before must not be used."""
    monkeypatch.setattr(cache, "_SMALL_PART", 1 << 40)
    eager, graphed = runners(decoders("qwen2"), 1)
    for length in (33, 34, 40, 100, 10, 40, 150, 10, 33):
        found = []
        for runner in (eager, graphed):
            runner.open("x", text(length))
            runner.follow(Change((), (), (((0,), "x"),)))
            runner.close("x") if length == 10 else None
            found.append(logits_of(runner, 0, text(length), 1))
            runner.cache.swap_rows(ended=[0])
            if length != 10:  # some stay, so that there is less and less place
                runner._prompts[str(len(runner._prompts))] = runner._prompts.pop("x")
        torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)
    assert graphed.cache.positions > 256
    assert captures(graphed) > 4


@pytest.mark.parametrize(
    ("length", "passes"),
    [(95, [[48], [47], [7]]), (96, [[90], [6, 7]]), (200, [[90], [90], [20, 7]])],
)
def test_long_prompt_has_its_own_passes(decoders, length, passes, monkeypatch):
    """Up to 90 tokens where 96 or more are left, never captured, and beside no other prompt; what
    is stored is what passes that are shared store."""
    monkeypatch.setattr(runner_module, "PASS", 48)
    plain, long = runners(decoders("gemma3_text"), 0)
    taken, run_pass = [], long._passes.run

    def counted(parts, capture):
        taken.append(([len(part.tokens) for part in parts], capture))
        run_pass(parts, capture=capture)

    monkeypatch.setattr(long._passes, "run", counted)
    for runner, given in ((plain, {}), (long, {"cpu": (96, 90)})):
        monkeypatch.setattr(prompts, "LONG", given)
        runner.open("x", text(length))
        runner.open("y", text(7, seed=1))
        while runner.prefill():
            pass
    assert taken == [(counts, sum(counts) <= 48) for counts in passes]
    for key, value in keys(plain).items():
        torch.testing.assert_close(keys(long)[key], value, atol=1e-5, rtol=1e-4)


def test_prompt_one_token_longer_than_the_largest_pass(decoders):
    eager, graphed = runners(decoders("qwen2"), 1)
    for runner in (eager, graphed):
        runner.open("x", text(514))
        runner.follow(Change((), (), (((0,), "x"),)))
    torch.testing.assert_close(
        *(logits_of(runner, 0, text(514), 1) for runner in (graphed, eager)), atol=1e-4, rtol=1e-4
    )
    assert captures(graphed) == 2


def test_padding_leaves_neighbouring_slots_unchanged(decoders):
    """The keys of padding tokens go to a slot that no prompt uses."""
    runner = Runner(decoders("qwen2"), rows=2, span=60, pending=1, graphs=recorded())
    store, touched = runner.cache.prompt_keys[2], torch.zeros(1024, dtype=torch.bool)
    for length in (17, 33, 18, 20, 2, 19, 34):  # captured, then replayed, in tiles not full
        store.fill_(7.0)
        runner.open("x", text(length, seed=1))
        runner.prefill()
        span = runner._prompts["x"].span
        touched[:] = (store != 7.0).any(0).any(-1)
        touched[runner._passes._scrap] = False
        due = list(range(span.start, span.start + length - 1))
        assert touched.nonzero().flatten().tolist() == due
        runner.close("x")
    assert captures(runner) == 3


def test_size_is_captured_after_enough_passes_but_never_under_a_deadline(decoders, monkeypatch):
    monkeypatch.setattr(prompts, "PATIENCE", 2)
    _, runner = runners(decoders("qwen2"), 1)
    seen = []

    def open_(length, in_time=None):
        runner.open("x", text(length), in_time)
        runner.prefill()
        runner.close("x")
        seen.append(captures(runner))

    for _ in range(5):
        open_(12, lambda tokens: True)
    open_(12)
    for length in (30, 31, 32, 33):
        open_(length)
    assert seen == [0, 0, 0, 0, 0, 1, 1, 2, 2, 2]


def test_sizes_are_captured_at_once_if_more_requests_follow(decoders, monkeypatch):
    monkeypatch.setattr(prompts, "PATIENCE", 2)
    _, runner = runners(decoders("qwen2"), 1)
    runner.capture_early()
    seen = []
    for length in (12, 60, 61, 11):
        runner.open("x", text(length))
        runner.prefill()
        runner.close("x")
        seen.append(captures(runner))
    assert seen == [1, 2, 2, 2]


def test_larger_graph_is_used_until_padding_costs_a_capture(decoders, monkeypatch):
    """It stores what an uncaptured pass stores."""
    monkeypatch.setattr(prompts, "PATIENCE", 2)
    monkeypatch.setattr(prompts, "_PADDING", 8.0)  # half a pass for 32 tokens of padding
    eager, runner = runners(decoders("qwen2"), 1)
    seen, taken = [], []
    run, feed, sizes = runner._passes._run, runner._passes._run_captured, []
    monkeypatch.setattr(runner._passes, "_run", lambda *a: taken.append(a) or run(*a))
    monkeypatch.setattr(
        runner._passes,
        "_run_captured",
        lambda graphs, size, parts: sizes.append(size) or feed(graphs, size, parts),
    )
    for length in (60, 61, 20, 21, 22, 23, 24, 33, 10):
        found = []
        for one in (eager, runner):
            one.open("x", text(length))
            one.follow(Change((), (), (((0,), "x"),)))
            one.close("x")
            found.append(logits_of(one, 0, text(length), 1))
            one.cache.swap_rows(ended=[0])
        torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)
        seen.append((captures(runner), len(taken)))
    # 64 after two passes; then it serves 32 three times, until four halves make two. Each capture
    # takes two runs: one before it, and its own
    assert seen == [(0, 1), (1, 3), (1, 3), (1, 3), (1, 3), *[(2, 5)] * 4]
    assert sizes == [64, 64, 64, 64, 32, 32, 32, 32]  # of two that are larger the smaller one


def test_size_is_captured_again_after_a_move_only_if_no_larger_graph_serves(decoders, monkeypatch):
    monkeypatch.setattr(prompts, "PATIENCE", 2)
    _, runner = runners(decoders("qwen2"), 1)

    def captured(*lengths):
        seen = []
        for length in lengths:
            runner.open("x", text(length))
            runner.prefill()
            runner.close("x")
            seen.append(captures(runner))
        return seen

    assert captured(20, 21, 60, 61) == [0, 1, 1, 2]
    runner.cache._grow(5000)
    assert captured(60, 20, 21, 22, 61) == [3, 3, 3, 3, 3]
    runner.cache._grow(10_000)
    assert captured(20, 60, 21, 61) == [4, 5, 5, 5]
    prepared = runners(decoders("qwen2"), 1)[1]
    prepared.prepare_prompts()
    runner, before = prepared, captures(prepared)
    runner.cache._grow(5000)
    assert captured(20) == [before + 1]


@pytest.mark.usefixtures("small")
def test_prepared_graphs_serve_every_length_and_are_captured_once(decoders, monkeypatch):
    monkeypatch.setattr(prompts, "PATIENCE", 8)
    _, runner = runners(decoders("qwen2"), 1)
    runner.prepare_prompts()
    assert captures(runner) == len(prompts.SIZES)
    monkeypatch.setattr(runner._passes, "_run", lambda *_: pytest.fail("not captured"))
    for length in (2, 17, 33, 34, 60):
        runner.open("x", text(length), lambda tokens: True)
        runner.close("x")
    runner.prepare_prompts()
    assert captures(runner) == len(prompts.SIZES)


def test_whole_jobs_give_the_same_tokens(decoders):
    """Target and draft, several prompts in the store at once, rows that begin and end."""
    target, draft = decoders("mistral"), decoders("mistral").keep_layers([0, 2])
    given = [text(n, seed=5) for n in (1, 2, 15, 16, 17, 18, 40, 70)]
    rows = [
        Row(str(p), s, 3, list(tokens), 9 + (p + s) % 4, sampling=RowSampling(temperature=0.7 * s))
        for p, tokens in enumerate(given)
        for s in range(2)
    ]

    def copies():
        return [
            Row(r.key, r.sample, r.seed, list(r.tokens), r.limit, sampling=r.sampling) for r in rows
        ]

    due = drive(loop_for(target, "none", rows=1, lengths=Fixed(0)), copies())
    for batch in (3, 7):
        both = [
            Runner(d, rows=batch, span=SPAN, pending=pending, graphs=recorded())
            for d, pending in ((target, 1), (draft, 2))
        ]
        loop = loop_for(both[0], both[1], rows=batch, lengths=Fixed(3))
        assert drive(loop, copies()) == due
        assert all(captures(runner) >= 3 for runner in both)
