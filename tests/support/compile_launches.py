"""Compile every Triton kernel as it is launched, by GPU, without one: what the interpreter runs may
still not compile, or need more shared memory than a GPU has. These are real launches on tensors
without memory, in the shapes of models, compiled for a GPU that is not present.

Run as a script, without the interpreter: quick|whole CAPABILITY,DTYPE[,LAUNCH] ...; one line for
each kernel: GPU, dtype, launch, name, bytes used, bytes available. `quick` skips turning the result
into machine code.
"""

import functools
import multiprocessing
import re
import sys

import torch
import triton
from compile_ahead import Absent, skip_machine_code
from triton.backends.compiler import GPUTarget

from bass_kernels import (
    acceptance_kernels,
    delta_kernels,
    delta_prompt_kernels,
    expert_kernels,
    fused_attention,
    head_kernels,
    launch,
    linear_kernels,
    peers,
    pointwise,
    processing_kernels,
    products,
    quantised_products,
    ragged,
    residual,
    round_kernels,
    router_kernels,
    sampling_kernels,
    training_kernels,
    wide_products,
)
from bass_kernels.delta_rule import DeltaState, DeltaWeights, places
from bass_kernels.experts import Clamp, Maps, Shared
from bass_kernels.quantised import Quantised
from bass_kernels.rounds import BINS, ConfidenceStats
from bass_kernels.segments import DeviceGroups, Packed, Segments

# Kilobytes of shared memory that a program may take (CUDA C++ Programming Guide, technical
# specifications by capability).
LIMITS = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
PROCESSORS = 128
MODULES = (
    delta_prompt_kernels,
    expert_kernels,
    launch,
    linear_kernels,
    fused_attention,
    head_kernels,
    peers,
    products,
    quantised_products,
    ragged,
    wide_products,
)


def empty(*shape, dtype):
    return torch.empty(*shape, dtype=dtype, device="meta")


def segments(rows, width, *, members=0):
    """Rows on prompts. `members`: rows in a tile of those that share a prompt."""
    base, start, own = empty(3, rows, dtype=torch.int64)
    tiles = {members: empty(rows // members, members, dtype=torch.int32)} if members else {}
    groups = DeviceGroups(empty(rows, dtype=torch.int32), tiles) if members else None
    return Segments(empty(rows, width, dtype=torch.int64), base, start, own, None, 64, groups)


def caches(rows, kv_heads, size, dtype, *, bits=16):
    """Private and prompt store; of 8 bits with scales."""

    def store(slots):
        if bits == 16:
            return tuple(empty(kv_heads, slots, size, dtype=dtype) for _ in range(2))
        numbers = (empty(kv_heads, slots, size, dtype=torch.uint8) for _ in range(2))
        return *numbers, *(empty(kv_heads, slots, dtype=torch.float16) for _ in range(2))

    return store(512 * rows), store(8192)


def pair_of_processes():
    """The first of two processes that add their parts in kernels."""
    addresses, numbers = empty(3, dtype=torch.int64), empty(2, dtype=torch.int32)
    return peers.Peers(0, 2, addresses, numbers, numbers, 1 << 20, 1000)


def few_tokens(dtype, *, width=3584, inner=18944, heads=28, kv_heads=4, size=128, early=True):
    """The matrix products of a layer of a 7B model for 4 tokens."""
    norm, frequencies = empty(width, dtype=torch.float32), empty(size // 2, dtype=torch.float32)
    ids = empty(4, dtype=torch.int64)
    stream, _ = residual.begin(
        ids, ids, empty(1000, width, dtype=dtype), norm, frequencies, early=early
    )
    lines = (heads + 2 * kv_heads) * size
    products.project(
        stream, empty(lines, width, dtype=dtype), empty(lines, dtype=dtype), eps=1e-6, early=early
    )
    mixed, output = empty(4, heads * size, dtype=dtype), empty(width, heads * size, dtype=dtype)
    products.add(mixed, output, stream, norm, peers=pair_of_processes(), early=early)
    stream = products.add(mixed, output, stream, norm, early=early)
    products.gate_up(
        stream, empty(2 * inner, width, dtype=dtype), eps=1e-6, activation="silu", early=early
    )
    residual.finish(stream, norm, eps=1e-6, early=early)


def products_of_8_bits(dtype, *, layout, count, width=3584, inner=18944, heads=28, kv_heads=4):
    """The products of a layer of a 7B model with 8-bit weights, of a stream and not."""
    norm, size = empty(width, dtype=torch.float32), 128
    ids, room = empty(count, dtype=torch.int64), quantised_products.room(count)
    peaks = empty(2, room, dtype=torch.int32)
    stream, _ = residual.begin(
        ids, ids, empty(1000, width, dtype=dtype), norm, empty(64, dtype=torch.float32),
        peaks=peaks, most=room, early=True,
    )  # fmt: skip
    qkv, o, up, down = (
        Quantised.empty(shape, layout, torch.device("meta"))
        for shape in (
            ((heads + 2 * kv_heads) * size, width),
            (width, heads * size),
            (2 * inner, width),
            (width, inner),
        )
    )
    bias = empty(len(qkv), dtype=dtype)
    products.project(stream, qkv, bias, eps=1e-6, early=True)
    mixed = empty(count, heads * size, dtype=dtype)
    words = {"peaks": peaks[0], "early": True}
    products.add(mixed, o, stream, norm, largest=peaks[1], peers=pair_of_processes(), **words)
    stream = products.add(mixed, o, stream, norm, **words)
    products.gate_up(stream, up, eps=1e-6, activation="silu", peaks=peaks[1], early=True)
    x, words = empty(300, width, dtype=dtype), {"eps": 1e-6, "kind": "rms"}
    quantised_products.norm_linear(x, (norm, None), qkv, bias, **words)
    quantised_products.norm_up(x, (norm, None), up, activation="silu", **words)
    quantised_products.linear(empty(300, inner, dtype=dtype), down, None, x)


def wide_products_of_8_bits(dtype, *, count=300, width=3584, inner=18944):
    """Products of many tokens, which are measured on Hopper in bfloat16 only."""
    device = torch.device("meta")
    if dtype != torch.bfloat16 or wide_products.card(device).capability[0] != 9:
        return
    shapes = (2 * inner, width), (width, inner)
    up, down = (Quantised.empty(shape, "fp8", device) for shape in shapes)
    scales = empty(count, dtype=torch.float32)
    x = empty(count, width, dtype=torch.float8_e4m3fn)
    if wide_products.gates():
        wide_products.gate_up(x, scales, up, count=count, activation="silu")
    x, residual = empty(count, inner, dtype=torch.float8_e4m3fn), empty(count, width, dtype=dtype)
    wide_products.linear_add(x, scales, down, None, residual)


def mix(dtype, *, heads, kv_heads, size, width, bits=16):
    own, prompt = caches(2, kv_heads, size, dtype, bits=bits)
    norms = empty(2, size, dtype=torch.float32)
    fused_attention.attend(
        empty(2 * width, (heads + 2 * kv_heads) * size, dtype=dtype),
        empty(2, 2 * width, size // 2, dtype=torch.float32),
        tuple(norms),
        segments(2, width),
        own,
        prompt,
        heads=heads,
        eps=1e-6,
        scale=0.1,
    )


def head_of_8_bits(dtype, *, count):
    """The logits of a 7B model with an 8-bit head."""
    head = Quantised.empty((152064, 3584), "int8", torch.device("meta"))
    head_kernels.logits(empty(count, 3584, dtype=dtype), head, None)


def stream(dtype):
    """As after attention in a family without products for few tokens."""
    linear_kernels.stream(
        empty(8, 1, 4096, dtype=dtype),
        empty(2560, 4096, dtype=dtype),
        empty(2560, dtype=dtype),
        empty(8, 1, 2560, dtype=dtype),
    )


def mixture(dtype, *, layout=None):
    """Experts of a decoding pass and of a prompt, in the shapes of Qwen3-30B-A3B and gpt-oss.
    layout: of weights in 8 bits."""

    def matrix(*shape):
        if layout is None:
            return empty(*shape, dtype=dtype)
        return Quantised.empty(shape, layout, torch.device("meta"))

    for tokens, experts, chosen, width, inner in (
        (8, 128, 8, 2048, 768),
        (2048, 32, 4, 2880, 2880),
    ):
        x, router = empty(tokens, width, dtype=dtype), empty(experts, width, dtype=dtype)
        ids, shares = router_kernels.route(x, router, None, chosen=chosen, normalised=True)
        up, down = matrix(2 * experts * inner, width), matrix(experts * width, inner)
        maps = Maps(up, None, down, empty(experts * width, dtype=dtype))
        expert_kernels.mix_experts(x, ids, shares, maps, x, experts=experts, activation="silu")
        routed = router_kernels.route(x, router, router[:, 0], chosen=chosen, normalised=False)
        biased = maps._replace(up_bias=empty(2 * experts * inner, dtype=dtype))
        shared = Shared(x, empty(1, width, dtype=dtype))
        clamp = {"activation": "silu", "clamp": Clamp(1.702, 7.0), "experts": experts}
        expert_kernels.mix_experts(x, *routed, biased, x, shared, **clamp)


def gate_up(dtype):
    """As between the products for few tokens and the library's."""
    for inner, width in ((18944, 3584), (12288, 4096)):  # three and two programs a processor
        weight = empty(2 * inner, width, dtype=dtype)
        if linear_kernels.gates(64, weight):
            linear_kernels.gate_up(empty(8, 8, width, dtype=dtype), weight, activation="silu")


def attend_long(dtype):
    """As in a pass over a long part of one prompt."""
    for size in (64, 128):
        q = empty(8192, 12, size, dtype=dtype)
        if ragged.suits_causal(dtype, size, q.device):
            keys, values = caches(1, 2, size, dtype)[1]
            ragged.causal_attention(q, keys, values, torch.empty_like(q), scale=0.1)


def attend(dtype, *, size, rows, width, members=0, bits=16, sinks=False, **words):
    own, prompt = caches(rows, 4, size, dtype, bits=bits)
    ragged.attention(
        empty(rows, width, 28, size, dtype=dtype),
        own,
        prompt,
        segments(rows, width, members=members),
        scale=0.1,
        sinks=empty(28, dtype=dtype) if sinks else None,
        **words,
    )


def attend_packed(dtype, *, rows, tokens, widest, bits=16):
    """As in a pass with unequal numbers of tokens."""
    own, prompt = caches(rows, 4, 128, dtype, bits=bits)
    begin, row, place = (empty(count, dtype=torch.int64) for count in (rows + 1, tokens, tokens))
    base, start, slots = empty(3, rows, dtype=torch.int64)
    positions, packed = empty(1, tokens, dtype=torch.int64), Packed(begin, row, place, widest)
    ragged.attention(
        empty(1, tokens, 28, 128, dtype=dtype),
        own,
        prompt,
        Segments(positions, base, start, slots, None, 64, None, packed),
        scale=0.1,
    )


def choose(dtype):
    """Choose the verified drafts of 32 rows; the library selects the largest."""
    scores, first = empty(32, 7, dtype=torch.float32), empty(2, BINS, dtype=torch.float32)
    stats = ConfidenceStats(*first, first)
    alive, tokens = empty(32, dtype=torch.int64), empty(32, 8, dtype=torch.int64)
    standing = round_kernels.prefix_chances(scores, stats, alive)
    chosen = round_kernels.choose_drafts(standing, 160, tokens, alive)
    told = empty(192, dtype=torch.float32)
    round_kernels.accept_chosen(tokens[:, 1:], scores, chosen, chosen.tokens, told, stats, alive)


def delta(dtype, *, heads=48, key_heads=16, size=128):
    """Gated DeltaNet in rounds of 4 tokens and in a prompt, in the shape of Qwen3.8-27B."""
    channels, floats = (2 * key_heads + heads) * size, empty(heads, dtype=torch.float32)
    weights = DeltaWeights(
        empty(channels, 4, dtype=dtype), floats, floats, empty(size, dtype=dtype)
    )
    state = DeltaState(
        empty(8, heads, size, size, dtype=torch.float32),
        empty(8, places(4, 4), channels + 2 * heads, dtype=dtype),
    )
    row, eight = empty(8, 4, dtype=torch.int64), empty(8, dtype=torch.int64)

    def inputs(*tokens):
        sizes = channels, 2 * heads, heads * size
        return empty(*tokens, sum(sizes), dtype=dtype).split(sizes, -1)

    options = {"slots": eight, "positions": row, "advance": eight, "eps": 1e-6}
    delta_kernels.delta_round(*inputs(8, 4), weights, state, **options)
    parts = empty(8, 4, dtype=torch.int64)
    delta_prompt_kernels.delta_prompt(*inputs(512), weights, state, parts=parts, eps=1e-6)


def elementwise(dtype, *, bits=16):
    x, norm = empty(8, 3, 5376, dtype=dtype), empty(5376, dtype=torch.float32)
    pointwise.embed(empty(8, 3, dtype=torch.int64), empty(1000, 5376, dtype=dtype), scale=73.3)
    pointwise.norm(x, x, norm, norm, eps=1e-6, kind="layer")
    pointwise.activation(x, "gelu_tanh", gated=True)
    angles = tuple(empty(2, 8, 3, 128, dtype=torch.float32))
    pointwise.rope_write(
        empty(8, 3, 16 * 256, dtype=dtype),
        angles,
        empty(8, 3, dtype=torch.int64),
        caches(8, 4, 256, dtype, bits=bits)[0],
        heads=8,
        norms=tuple(empty(2, 256, dtype=torch.float32)),
        eps=1e-6,
    )


def mixture_in_stream(dtype):
    """The residual stream after experts, in a pass of few tokens."""
    ids, norm = empty(8, dtype=torch.int64), empty(2048, dtype=torch.float32)
    embed, half = empty(1000, 2048, dtype=dtype), empty(64, dtype=torch.float32)
    stream, _ = residual.begin(ids, ids, embed, norm, half)
    x, chosen = empty(8, 2048, dtype=dtype), empty(8, 8, dtype=torch.int64)
    maps = Maps(
        empty(2 * 16 * 768, 2048, dtype=dtype), None, empty(16 * 2048, 768, dtype=dtype), None
    )
    unit = expert_kernels.Mixture(16, "silu", None)
    shares = empty(8, 8, dtype=torch.float32)
    for rounds in (False, True):
        expert_kernels.add_experts(x, chosen, shares, maps, stream, norm, unit, rounds=rounds)


def around(dtype):
    """What surrounds the layers in a round: pending tokens, logits and their processors, accepted
    tokens and reports, and the layers of heads."""
    rows, width, vocab = 8, 4, 152064
    whole, block = empty(rows, dtype=torch.int64), empty(rows, width + 1, dtype=torch.int64)
    texts, drafts = empty(rows, 64, dtype=torch.int64), block[:, 1:]
    round_kernels.pending(texts, whole, drafts)
    round_kernels.accept_shared(drafts, block, whole)
    round_kernels.accept_shared(drafts, block)
    round_kernels.commit(texts, whole, whole, whole, block)
    scores = empty(rows, width + 1, dtype=torch.float32)
    round_kernels.report(texts, whole, whole, whole, block, scores)
    logits, words = empty(rows, vocab, dtype=dtype), -(-vocab // 32)
    penalties = empty(3, rows, dtype=torch.float32)
    counts, allowed, masks = (
        empty(rows, *sizes, dtype=torch.int32) for sizes in ((vocab,), (words,), (2, words))
    )
    for counted, *bits in (counts, allowed, masks), (None, None, masks), (counts, allowed, None):
        processing_kernels.process_logits(logits, whole, whole, drafts, counted, penalties, *bits)
    processing_kernels.log_probability(logits, whole)
    for wanted in (None, empty(rows, dtype=torch.bool)):
        processing_kernels.likeliest_tokens(logits, 20, wanted)
    pointwise.angles(block, empty(64, dtype=torch.float32))
    x = empty(rows, width, 4096, dtype=dtype)
    pointwise.gate_outputs(x, x)
    own, prompt = caches(rows, 1, 2048, dtype)
    pointwise.write_hidden(x, drafts, own)
    pointwise.read_hidden(drafts, segments(rows, width), own, prompt)
    quantised_products.gated_factor(empty(300, 2 * 18944, dtype=dtype), "silu")
    for one in (x, x.half()):
        for other in (None, one):
            peers.add(one, other, pair_of_processes())


def training(dtype):
    """Distances of logits, rotations and gates with their gradients."""
    logits, rows = empty(64, 152064, dtype=dtype), empty(64, dtype=torch.int64)
    found = training_kernels.distances(logits, logits, rows, rows, 151936)
    slopes = empty(2, 64, dtype=torch.float32)
    training_kernels.distance_gradient(logits, logits, rows, found, slopes, 151936)
    turns = empty(2, 32, 32, dtype=torch.float32)
    for back in (False, True):
        training_kernels.rotate(empty(2, 32, 14, 64, dtype=dtype), turns, turns, back=back)
    training_kernels.gate_gradient(empty(64, 2 * 4864, dtype=dtype), empty(64, 4864, dtype=dtype))


def params(dtype):
    """Choose tokens of 152 thousand under both couplings."""
    logits, floats = empty(8, 152064, dtype=dtype), empty(8, dtype=torch.float32)
    whole, keys = empty(8, dtype=torch.int64), empty(8, 2, dtype=torch.int64)
    for least in (None, floats):
        sampling_kernels.sample_scored(logits, floats, whole, floats, keys, whole, least)
    _, law = acceptance_kernels.draft_sample(logits, floats, whole, floats, keys, whole, whole)
    drawn = type(law)(*(t[:, None].expand(-1, 2, -1) for t in law))
    for law, most, least in (drawn, None, None), (None, whole, floats):
        acceptance_kernels.rejection_sample(
            empty(8, 2, dtype=torch.int64),
            law,
            empty(8, 3, 152064, dtype=dtype),
            floats,
            whole,
            floats,
            keys,
            whole,
            most,
            least,
        )


LAUNCHES = {
    "few-tokens": few_tokens,
    "fp8": functools.partial(products_of_8_bits, layout="fp8", count=8),
    "fp8-64": functools.partial(products_of_8_bits, layout="fp8", count=64),
    "fp8-wide": wide_products_of_8_bits,
    "int8": functools.partial(products_of_8_bits, layout="int8", count=8),
    "int8-64": functools.partial(products_of_8_bits, layout="int8", count=64),
    "head": functools.partial(head_of_8_bits, count=8),
    "head-300": functools.partial(head_of_8_bits, count=300),
    "mix-128": functools.partial(mix, heads=28, kv_heads=4, size=128, width=1),
    "mix-256": functools.partial(mix, heads=8, kv_heads=4, size=256, width=8),
    "mix-64-wide": functools.partial(mix, heads=8, kv_heads=2, size=64, width=8),
    "stream": stream,
    "gate-up": gate_up,
    "mixture": mixture,
    "mixture-fp8": functools.partial(mixture, layout="fp8"),
    "mixture-int8": functools.partial(mixture, layout="int8"),
    "mixture-in-stream": mixture_in_stream,
    "around": around,
    "training": training,
    "attend-long": attend_long,
    "attend-128": functools.partial(attend, size=128, rows=8, width=9),
    "attend-128-in-groups": functools.partial(attend, size=128, rows=16, width=1, members=8),
    "attend-128-packed": functools.partial(attend_packed, rows=32, tokens=160, widest=9),
    "attend-256": functools.partial(attend, size=256, rows=4, width=1),
    "attend-256-wide": functools.partial(attend, size=256, rows=4, width=9),
    "attend-256-in-groups": functools.partial(attend, size=256, rows=16, width=1, members=8),
    "attend-capped": functools.partial(attend, size=128, rows=8, width=1, window=99, cap=30.0),
    "attend-256-windowed": functools.partial(attend, size=256, rows=4, width=3, window=128),
    "attend-64-sinks": functools.partial(attend, size=64, rows=4, width=3, window=128, sinks=True),
    "choose": choose,
    "delta": delta,
    "elementwise": elementwise,
    "laws": params,
    "mix-128-in-8-bits": functools.partial(mix, heads=28, kv_heads=4, size=128, width=1, bits=8),
    "mix-256-in-8-bits": functools.partial(mix, heads=8, kv_heads=4, size=256, width=8, bits=8),
    "mix-64-wide-in-8-bits": functools.partial(mix, heads=8, kv_heads=2, size=64, width=8, bits=8),
    "mix-16-in-8-bits": functools.partial(mix, heads=8, kv_heads=2, size=16, width=8, bits=8),
    "attend-16-in-8-bits": functools.partial(attend, size=16, rows=8, width=9, bits=8),
    "attend-128-in-8-bits": functools.partial(attend, size=128, rows=8, width=9, bits=8),
    "attend-128-in-groups-in-8-bits": functools.partial(
        attend, size=128, rows=16, width=1, members=8, bits=8
    ),
    "attend-128-packed-in-8-bits": functools.partial(
        attend_packed, rows=32, tokens=160, widest=9, bits=8
    ),
    "attend-256-in-8-bits": functools.partial(attend, size=256, rows=4, width=1, bits=8),
    "attend-256-wide-in-8-bits": functools.partial(attend, size=256, rows=4, width=9, bits=8),
    "elementwise-in-8-bits": functools.partial(elementwise, bits=8),
}


def card_of(capability):
    return launch.Card(divmod(capability, 10), LIMITS[capability] * 1024)


def pretend(capability):
    """Pretend that the machine has this GPU."""
    absent = Absent()
    absent.get_current_target = lambda: GPUTarget("cuda", capability, 32)
    triton.runtime.driver.set_active(absent)
    for module in MODULES:
        module.card = lambda device: card_of(capability)
        if hasattr(module, "processors"):
            module.processors = lambda device: PROCESSORS
        if hasattr(module, "converts"):
            module.converts = lambda device: capability >= 89
        if hasattr(module, "can_prefetch"):
            module.can_prefetch = lambda device: capability >= 90
    has = hasattr(triton, "AsyncCompileMode")  # see launch._can_overlap
    launch._can_overlap = lambda device: has and capability >= 90


def check_chain(code, *, begins):
    """Check the rules of launch.overlap: before a kernel waits it writes nothing and reads past
    its processor's own cache, or prefetches to L2; the kernel that begins a chain waits before it
    lets the next one begin."""
    wait, lets = code.index("griddepcontrol.wait"), code.index("griddepcontrol.launch_dependents")
    assert (wait < lets) == begins
    early = re.findall(
        r"\b((?:ld|st|atom|red|cp)\.(?:volatile\.)?(?:global|async)\S*)", code[:wait]
    )
    allowed = re.compile(r"ld\.global\.(L\w+::\w+\.)*cg\b|cp\.async\.bulk\.prefetch\.L2\b")
    assert all(allowed.match(one) for one in early), early


def check_overlap(kernel, code, options):
    """Check the instructions of Hopper GPUs that a launch asks for by these options."""
    assert ("cp.async.bulk.prefetch.L2" in code) == options.get("PREFETCH", False)
    lets = options.get("EARLY", False) or options.get("LEADS", False)
    assert ("griddepcontrol.launch_dependents" in code) == lets
    if options.get("EARLY"):
        check_chain(code, begins=kernel is residual._begin)


def check_reductions(machine_code):
    """Check that all threads take part in each exchange between threads. For a reduction under an
    `if`, ptxas 12.8 and 12.9 may use another condition."""
    found = re.findall(r"@!?U?P\d+ +(?:REDUX|SHFL|VOTE|MATCH|BAR)\S*", machine_code)
    assert not found, found


def compiled(task):
    """Return lines about what one entry of LAUNCHES launches."""
    quick, capability, dtype, name = task
    found, run = {}, triton.JITFunction.run
    pretend(capability)
    if quick:
        skip_machine_code()

    def compile_only(kernel, *arguments, warmup, **options):
        code = run(kernel, *arguments, warmup=True, **options)
        found[kernel.__name__] = max(code.metadata.shared, found.get(kernel.__name__, 0))
        if not quick:
            check_reductions(code.asm["sass"])
            if capability == 90:
                check_overlap(kernel, code.asm["ptx"], options)

    triton.JITFunction.run = compile_only
    LAUNCHES[name](getattr(torch, dtype))
    return [
        f"{capability} {dtype} {name} {kernel} {taken} {LIMITS[capability] * 1024}"
        for kernel, taken in found.items()
    ]


def main(how, *wanted):
    tasks = []
    for one in wanted:
        capability, dtype, *names = one.split(",")
        tasks += [(how == "quick", int(capability), dtype, name) for name in names or LAUNCHES]
    with multiprocessing.get_context("fork").Pool(maxtasksperchild=1) as pool:
        for lines in pool.imap(compiled, tasks, chunksize=1):
            print(*lines, sep="\n", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
