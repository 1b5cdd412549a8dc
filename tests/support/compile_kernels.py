"""Compile every Triton kernel for a Hopper GPU, without one: what the interpreter runs may still
not compile.

Run as a script, without the interpreter: quick|whole; prints one line for each form. `quick`
compiles the first form of every tenth kernel, and stops at PTX, without machine code.
"""

import multiprocessing
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler
from triton.compiler import ASTSource

from bass_kernels import (
    acceptance_kernels,
    delta_kernels,
    delta_prompt_kernels,
    expert_kernels,
    fused_attention,
    head_kernels,
    linear_kernels,
    peers,
    pointwise,
    processing_kernels,
    products,
    quantised_kernels,
    ragged_kernel,
    residual,
    round_kernels,
    router_kernels,
    sampling_kernels,
    training_kernels,
    truncation,
)

FLOATS = {"found_ptr", "score_ptr", "part_ptr", "peak_ptr", "mass_ptr", "cos_ptr", "sin_ptr", "temperature_ptr",
          "top_p_ptr", "min_p_ptr", "edges_ptr", "q_edges_ptr", "stream_ptr", "sum_ptr", "square_ptr", "angle_ptr",
          "inverse_ptr", "below_ptr", "penalty_ptr", "maxima_ptr", "p_norm_ptr", "slope_ptr",
          "norm_ptr", "q_norm_ptr", "k_norm_ptr", "weight_scale_ptr", "share_ptr"}  # fmt: skip
INTEGERS = {
    "bound_ptr",
    "order_ptr",
    "first_ptr",
    "end_ptr",
    "arrived_ptr",
    "count_ptr",
    "grouped_ptr",
    "table_ptr",
    "allowed_ptr",
    "mask_ptr",
    "state_ptr",
}
LONGS = {"ids_ptr",
         "target_row_ptr", "position_ptr", "base_ptr", "start_ptr", "own_ptr", "token_ptr", "tokens_ptr", "slots_ptr",
         "top_k_ptr", "search_ptr", "draft_ptr", "length_ptr", "most_ptr", "origin_ptr", "accepted_ptr", "next_ptr",
         "block_ptr", "begin_ptr", "best_ptr", "place_ptr", "row_ptr", "text_ptr", "alive_ptr", "target_ptr",
         "address_ptr"}  # fmt: skip
NOISY = {"_pass", "_finish_row", "_draw", "_verify"}  # there, keys are those of the noise


def kind(name, kernel):
    if name in INTEGERS:
        return "*i32"
    if name in LONGS or (name == "key_ptr" and kernel.__name__ in NOISY):
        return "*i64"
    if name.endswith("_ptr"):
        return "*fp32" if name in FLOATS else "*bf16"
    return "fp32" if name in ("eps", "scale", "cap") else "i32"


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


FORMS = []  # what is to be compiled: (kernel, types, constants)


def compile_one(kernel, types=None, **constants):
    """Compile a form. `types`: of parameters whose types are not those of `kind`."""
    FORMS.append((kernel, types or {}, constants))


def compile_attention(kernel, bits, **constants):
    """Compile a form that reads or writes keys and values of 16 bits, or of 8 bits with scales."""
    names = [parameter.name for parameter in kernel.params]
    scales = [name for name in names if name.endswith(("_scale_ptr", "scale_head"))]
    if "NATIVE" in names:
        constants["NATIVE"] = bits == 8
    if bits == 16:
        compile_one(kernel, **constants, **dict.fromkeys(scales))
        return
    stored = {name: "*u8" for name in names if re.fullmatch(r"(prompt_)?(key|value)s?_ptr", name)}
    assert len(stored) in (2, 4)
    types = {name: "*fp16" if name.endswith("_ptr") else "i32" for name in scales}
    compile_one(kernel, stored | types, **constants)


def compiled(place):
    """Compile the form at this index in FORMS and return it."""
    kernel, types, constants = FORMS[place]
    names = [parameter.name for parameter in kernel.params]
    signature = {
        name: "constexpr" if name in constants else types.get(name) or kind(name, kernel)
        for name in names
    }
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(n),): v for n, v in constants.items()},
    )
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert ("cp.async.bulk.prefetch.L2" in code) == constants.get("PREFETCH", False)
    lets = constants.get("EARLY", False) or constants.get("LEADS", False)
    assert ("griddepcontrol.launch_dependents" in code) == lets
    if constants.get("EARLY"):
        check_chain(code, begins=kernel is residual._begin)
    return f"{kernel.__name__} {constants}"


def compile_8_bits():
    """A stream's products and others, with e4m3 of the device, e4m3 as float16, and int8."""
    for how, stored in (("E4M3", "*fp8e4nv"), ("ROUNDED", "*u8"), ("INT8", "*i8")):
        weight = {"weight_ptr": stored, "largest_ptr": "*i32"}
        factor = {"E4M3": "*fp8e4nv", "ROUNDED": "*fp16", "INT8": "*bf16"}[how]
        ready = {"weight_ptr": stored, "largest_ptr": "*fp32", "x_ptr": factor}
        form = {"DEPTH": 896, "L": 64, "DEEP": 128, "STAGES": 4, "WIDE": "tf32"}
        form["HOW"] = getattr(quantised_kernels, how).value
        few = form | {"EACH": 35, "T": 16, "ONCE": True, "EARLY": True, "PREFETCH": True}
        many = form | {"EACH": 64, "T": 128, "ONCE": False, "EARLY": False, "PREFETCH": False}
        shape = {"LINES": 1152, "BIAS": True}
        stream = {"TILES": 14, "LARGEST": 1, "READY": False}
        alone = {"TILES": 0, "LARGEST": 1, "READY": True}
        linear, gate_up = quantised_kernels.linear_kernel, quantised_kernels.gate_up_kernel
        compile_one(linear, weight, ADD=False, SPLITS=4, **shape, **stream, **few)
        compile_one(linear, ready, ADD=True, SPLITS=1, **shape, **alone, **many)
        shape = {"LINES": 4864, "ACTIVATION": 0}
        compile_one(gate_up, weight, PEAKS=how != "INT8", **shape, **stream, **few)
        compile_one(gate_up, ready, PEAKS=False, **shape, **alone, **many)
        add = {"PEAKS": True, "READY": False, "LINES": 896, "SPLITS": 4}
        for ranks in (2, 1):
            group = {"RANK": ranks - 1, "RANKS": ranks}
            compile_one(quantised_kernels.add_kernel, weight, **group, **add, **few)
    compile_one(
        quantised_kernels.gated_factor_kernel,
        {"out_ptr": "*fp8e4nv", "scale_ptr": "*fp32"},
        ACTIVATION=0,
        NATIVE=True,
        BLOCK=4096,
    )
    head = {"x_ptr": "*i8", "weight_ptr": "*i8", "scale_ptr": "*fp32"}
    tile = {"LINES": 1152, "DEPTH": 1000, "DEEP": 128, "STAGES": 3, "EARLY": True}
    for tokens, biased in ((64, True), (16, False)):
        compile_one(
            head_kernels.head_kernel, head, BIAS=biased, L=64, T=tokens, PREFETCH=biased, **tile
        )
    compile_one(
        head_kernels.split_kernel, {"out_ptr": "*i8", "scale_ptr": "*fp32"}, BLOCK=1024, EARLY=True
    )
    for norm in (True, False):
        compile_one(
            quantised_kernels.factor_kernel,
            {"out_ptr": "*fp8e4nv", "scale_ptr": "*fp32"},
            NORM=norm,
            LAYER=norm,
            BIAS=norm,
            ROUND=True,
            NATIVE=True,
            BLOCK=1024,
            EARLY=True,
        )


def compile_experts():
    """Mixtures of experts in 16 bits, e4m3 of the device, e4m3 as float16, and int8."""
    wide = {"WIDE": "tf32"}
    for splits, normalised in ((8, False), (1, True)):
        tile = {"SPLITS": splits, "TOKENS": 16, "LINES": 16, "BLOCK_K": 64}
        compile_one(router_kernels._logits, **tile, LEADS=True, **wide)
        chosen = {"BIAS": normalised, "CHOSEN": 8, "NORMALISED": normalised}
        compile_one(
            router_kernels._choose, SPLITS=splits, **chosen, BLOCK_E=128, BLOCK_C=8, EARLY=True
        )
    peaks = {"peak_ptr": "*i32"}
    compile_one(expert_kernels._sort, peaks, BLOCK=512, EARLY=True)
    stored = {"PLAIN": "*bf16", "E4M3": "*fp8e4nv", "ROUNDED": "*u8", "INT8": "*i8"}
    factors = {"E4M3": "*fp8e4nv", "ROUNDED": "*fp16"}
    for how, kind, places in (
        ("PLAIN", "16 bits", (0, 1, 2)),
        ("E4M3", "e4m3", (0, 1, 2, 3)),
        ("ROUNDED", "converted", (0,)),
        ("INT8", "converted", (0, 3)),
    ):
        compile_products_of_experts(how, factors.get(how, "*bf16"), stored[how], kind, places)
    types = {"token_ptr": "*bf16"}
    for shared in (False, True):
        form = {"ADD": True, "SHARED": shared, "CHOSEN": 8, "BLOCK": 1024, "EARLY": True}
        compile_one(expert_kernels._sum, types, **form)
    types = {"bound_ptr": "*i32", "next_ptr": "*bf16"}
    form = {"M": 16, "PEAKS": True, "CHOSEN": 8, "BLOCK": 1024, "EARLY": True}
    compile_one(expert_kernels._add_sum, types, **form)


def compile_products_of_experts(how, tokens, weights, kind, places):
    """Compile the tilings at these places, for tokens and weights of these types."""
    rounds = how in ("E4M3", "ROUNDED")
    for place in places:
        tiling, clamped = expert_kernels._TILINGS[kind][place], place % 2 == 1
        form = {"HOW": getattr(quantised_kernels, how).value, "ROUND": rounds, "BIAS": clamped}
        form |= {"TOKENS": tiling.tokens, "EARLY": True, "WIDE": "tf32"}
        types = {"peak_ptr": "*i32", "weight_ptr": weights, "scale_ptr": "*fp32"}
        gated = {"KIND": 0, "CLAMPED": clamped, "ALPHA": 1.702, "LIMIT": 7.0, "CHOSEN": 8}
        tile = {"LINES": tiling.up.lines, "BLOCK_K": tiling.up.deep, "PEAKS": rounds}
        compile_one(expert_kernels._up, types | {"x_ptr": tokens}, **form, **gated, **tile)
        tile = {"LINES": tiling.down.lines, "BLOCK_K": tiling.down.deep}
        compile_one(expert_kernels._down, types, **form, **tile)


def compile_delta_rule():
    """Gated DeltaNet. Heads of the published models have 128 dimensions, which compile slowly."""
    types = {"decay_ptr": "*fp32", "state_ptr": "*fp32", "advance_ptr": "*i64", "parts_ptr": "*i64"}
    types |= {"factor_ptr": "*fp32", "inverse_ptr": "*fp32"}
    heads = {"H": 48, "K": 16, "DK": 64, "DV": 64, "SIZE": 4, "BLOCK_K": 64}
    small = {"H": 3, "K": 1, "DK": 5, "DV": 7, "SIZE": 2, "BLOCK_K": 8}
    split = {"BLOCK_V": 32, "BLOCKS": 2, "BLOCK_N": 64}
    compile_one(delta_kernels._round, types, **heads, **split)
    compile_one(delta_kernels._round, types, **small, BLOCK_V=8, BLOCKS=1, BLOCK_N=8)
    compile_one(delta_kernels._gated_norm, {"found_ptr": "*bf16"}, DV=64, BLOCK_N=64)
    heads["BLOCK_P"] = 8
    compile_one(delta_prompt_kernels._convolve, types, **heads, BLOCK=64)
    compile_one(delta_prompt_kernels._solve, types, **heads, WIDE="tf32")
    compile_one(delta_prompt_kernels._scan, types, **heads, WIDE="tf32", BLOCK_V=64)


if __name__ == "__main__":
    if sys.argv[1] == "quick":
        compiler.CUDABackend.make_cubin = lambda self, source, *rest: b""
    for number in (0, 1, 2):
        early = {"EARLY": number > 0, "LEADS": True}
        compile_one(sampling_kernels._pass, PASS=number, CHUNKS=128, **early)
        compile_one(sampling_kernels._pass, min_p_ptr=None, PASS=number, CHUNKS=128, **early)
    compile_one(sampling_kernels._finish_row, EARLY=True)
    compile_one(round_kernels._pending, WIDE=16)
    compile_one(round_kernels._accept, MOST=True, WIDE=16)
    compile_one(round_kernels._commit, TABLE=True, WIDE=16)
    compile_one(pointwise._angles, HALF=64, BLOCK=64)
    for some in (False, True):
        compile_one(processing_kernels._group_maxima, SOME=some)
        compile_one(processing_kernels._select, SOME=some, GROUPS=4096, WIDE=2048)
    compile_one(processing_kernels._log_probability, BLOCK=8192)
    compile_one(processing_kernels._process, BLOCK=4096)
    nothing = {"count_ptr": None, "allowed_ptr": None}
    compile_one(processing_kernels._process, **nothing, BLOCK=4096)
    compile_one(processing_kernels._process, mask_ptr=None, BLOCK=4096)
    search = {"SHIFT": 16, "CHUNK": 4096, "CHUNKS": 64}
    compile_one(truncation._survey, **search)
    for last in (False, True):
        compile_one(truncation._narrow, **search, LAST=last)
    spread = {"CHUNK": 4096, "CHUNKS": 64}
    compile_one(acceptance_kernels._draw, **spread)
    compile_one(acceptance_kernels._residual_masses, PLACES=8, **spread)
    for point in (False, True):
        compile_one(acceptance_kernels._verify, POINT=point, BOUNDED=True, PLACES=8, **spread)
    # of heads of 128 the smallest: tiles of many lines take seconds each, and are compiled as
    # they are launched by compile_launches.py
    for size, splits, pad, block, head, bits in (
        (1, 1, 0, 16, 128, 16),
        (1, 16, 64, 64, 64, 16),
        (2, 16, 0, 128, 64, 16),
        (8, 32, 0, 64, 64, 16),
        (1, 1, 0, 16, 128, 8),
        (1, 16, 64, 64, 64, 8),
        (8, 32, 0, 64, 64, 8),
    ):
        compile_attention(
            ragged_kernel.attend,
            bits,
            H=28,
            K=4,
            D=head,
            SIZE=size,
            SPLITS=splits,
            PACKED=size == 1 and not pad,
            PAD=pad,
            BLOCK_M=block,
            BLOCK_N=32,
            BLOCK_D=head,
            WIDE="tf32",
            CAPPED=size == 1,
            SINKS=not pad,
            PREFETCH=size == 1,
            EARLY=True,
        )
    compile_experts()
    compile_one(ragged_kernel.merge_rows, H=28, K=4, D=128, SPLITS=32, BLOCK_M=16, BLOCK_D=128)
    for splits in (1, 2):
        compile_one(linear_kernels._stream, BIAS=True, SPLITS=splits, EVEN=splits == 1, WIDE="tf32")
    compile_one(pointwise._embed, SCALED=True, BLOCK=1024)
    compile_one(pointwise._write_hidden, BLOCK=1024)
    compile_one(pointwise._read_hidden, BLOCK=1024)
    compile_one(pointwise._norm, ADD=True, LAYER=True, BIAS=True, BLOCK=1024)
    for activation in (2, 4):
        compile_one(pointwise._activation, KIND=activation, GATED=activation == 2, BLOCK=1024)
    compile_one(pointwise._gate_outputs, BLOCK=1024)
    rope = {"H": 8, "K": 2, "D": 64, "HALF": 32, "NORM": True, "BLOCK": 64, "LEADS": True}
    for bits in (16, 8):
        compile_attention(pointwise._rope_write, bits, **rope)
    tiled = {"EACH": 20, "N": 32, "DEEP": 128, "STAGES": 5, "WIDE": "tf32", "EARLY": True}
    compile_one(residual._begin, M=16, PEAKS=48, VOCAB=999, WIDTH=896, HALF=32, EARLY=True)
    compile_one(products._project, TILES=28, LINES=1152, DEPTH=896, BIAS=True, SPLITS=1, **tiled)
    for ranks in (2, 1):
        group = {"RANK": ranks - 1, "RANKS": ranks}
        compile_one(products._add, LINES=896, DEPTH=4864, SPLITS=4, **group, **tiled)
    word = dict.fromkeys(("part_ptr", "residual_ptr", "out_ptr"), "*i32")
    for how in range(3):
        group = {"RANK": 1, "RANKS": 2 + how}
        compile_one(peers._add, word, ADD=how > 0, KIND=how, BLOCK=256, **group)
    compile_one(products._gate_up, TILES=28, LINES=4864, DEPTH=896, KIND=0, **tiled)
    compile_one(residual._finish, WIDTH=896, TILES=28, M=16, EARLY=True)
    for bits in (16, 8):
        compile_attention(
            fused_attention._attend,
            bits,
            H=14,
            K=2,
            D=64,
            HALF=32,
            NORMS=True,
            LARGEST=True,
            BLOCK_Q=16,
            BLOCK_D=64,
            KEYS=64,
            SPLITS=8,
            WIDE="tf32",
            EARLY=True,
        )
    compile_8_bits()
    compile_delta_rule()
    compile_one(training_kernels._distances, BLOCK=4096)
    compile_one(training_kernels._distance_gradient, BLOCK=4096)
    compile_one(training_kernels._rotate, H=14, D=64, HALF=32, BACK=True, BLOCK_H=16, BLOCK_D=64)
    compile_one(training_kernels._gate_gradient, BLOCK=1024)
    places = range(len(FORMS))
    if sys.argv[1] == "quick":
        firsts = {FORMS[place][0]: place for place in reversed(places)}
        places = sorted(firsts.values())[::10]
    with multiprocessing.get_context("fork").Pool() as pool:
        print(*pool.imap(compiled, places), sep="\n")
