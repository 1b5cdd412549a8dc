"""Gluon (Triton's explicit form): the kernel of wide_products.py, for Hopper.

One warp loads tiles of tokens and weights into a ring of shared buffers. Two groups of four warps
multiply 64 tokens each, and add the products of every 128 numbers in float32 while the other group
multiplies. A program computes several tiles, one after the other, so that the first buffers of a
tile are loaded while the tile before is stored.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .pointwise import activate

TOKENS = 128  # of a tile
LINES = 64  # gates of a tile, and as many ups
DEEP = 128  # numbers of a token or row in a buffer; tensor cores sum them with some 13 bits
BUFFER = (TOKENS + 2 * LINES) * DEEP  # bytes
_T, _L, _D = gl.constexpr(TOKENS), gl.constexpr(LINES), gl.constexpr(DEEP)
_BUFFER = gl.constexpr(BUFFER)
_HALF = gl.constexpr(TOKENS // 2)  # tokens of a group
_LAYOUT = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, LINES, 32])
)
_MULTIPLY, _LOAD = gl.constexpr(232), gl.constexpr(40)  # registers of a thread

_load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # Triton 3.6


@gluon.jit(do_not_specialize=["count"])
def gate_up_kernel(
    x,
    weight,
    scale_ptr,
    weight_scale_ptr,
    out_ptr,
    count,
    SIZE: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    PROGRAMS: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """Multiply `count` tokens by SIZE gates and the SIZE ups below them."""
    tokens = gl.allocate_shared_memory(x.dtype, [STAGES, _T, _D], x.layout)
    gates = gl.allocate_shared_memory(x.dtype, [STAGES, _L, _D], weight.layout)
    ups = gl.allocate_shared_memory(x.dtype, [STAGES, _L, _D], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    ring = (tokens, gates, ups, full, free)
    factors = (scale_ptr, weight_scale_ptr)
    gl.warp_specialize(
        [
            (_multiply, (ring, factors, out_ptr, count, SIZE, DEPTH, STAGES, PROGRAMS,
                         ACTIVATION, 0)),
            (_multiply, (ring, factors, out_ptr, count, SIZE, DEPTH, STAGES, PROGRAMS,
                         ACTIVATION, 1)),
            (_load, (x, weight, ring, count, SIZE, DEPTH, STAGES, PROGRAMS)),
        ],
        [4, 4],
        [_MULTIPLY, _LOAD],
    )  # fmt: skip


@gluon.jit
def _tiles(count, SIZE: gl.constexpr):
    """Return the number of tiles, and of tiles of tokens. Neighbours share a tile of the weight."""
    parts = (count + _T - 1) // _T
    return parts * ((SIZE + _L - 1) // _L), parts


@gluon.jit
def _load(
    x,
    weight,
    ring,
    count,
    SIZE: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """Load the tiles of this program, stage after stage, into the ring."""
    tokens, gates, ups, full, free = ring
    tiles, parts = _tiles(count, SIZE)
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), tiles, PROGRAMS):
        token, line = tile % parts * _T, tile // parts * _L
        for start in range(0, DEPTH, _D):
            mbarrier.wait(free.index(stage), phase)
            loaded = full.index(stage)
            mbarrier.expect(loaded, _BUFFER)
            _load_tile(x, [token, start], loaded, tokens.index(stage))
            # the last tile's gates may reach into the ups; those are masked out at the store
            _load_tile(weight, [line, start], loaded, gates.index(stage))
            _load_tile(weight, [line + SIZE, start], loaded, ups.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _multiply(
    ring,
    factors,
    out_ptr,
    count,
    SIZE: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    PROGRAMS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Multiply the tokens of a group in all tiles of this program, and store the results."""
    tokens, gates, ups, full, free = ring
    scale_ptr, weight_scale_ptr = factors
    zero = gl.zeros([_HALF, _L], gl.float32, _LAYOUT)
    tiles, parts = _tiles(count, SIZE)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, PROGRAMS):
        gate = gl.zeros([_HALF, _L], gl.float32, _LAYOUT)
        up = gl.zeros([_HALF, _L], gl.float32, _LAYOUT)
        for _start in range(0, DEPTH, _D):
            mbarrier.wait(full.index(stage), phase)
            left = tokens.index(stage).slice(GROUP * _HALF, _HALF, dim=0)
            right, other = gates.index(stage).permute((1, 0)), ups.index(stage).permute((1, 0))
            one = warpgroup_mma(left, right, zero, use_acc=False, is_async=True)
            two = warpgroup_mma(left, other, zero, use_acc=False, is_async=True)
            one = warpgroup_mma_wait(1, deps=[one])
            gate += one
            two = warpgroup_mma_wait(0, deps=[two])
            mbarrier.arrive(free.index(stage), count=1)
            up += two
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        token = tile % parts * _T + GROUP * _HALF
        token += gl.arange(0, _HALF, layout=gl.SliceLayout(1, _LAYOUT))
        line = tile // parts * _L + gl.arange(0, _L, layout=gl.SliceLayout(0, _LAYOUT))
        here, there = token < count, line < SIZE
        scale = gl.load(scale_ptr + token, mask=here, other=0.0)[:, None]
        gate *= scale * gl.load(weight_scale_ptr + line, mask=there, other=0.0)[None, :]
        up *= scale * gl.load(weight_scale_ptr + SIZE + line, mask=there, other=0.0)[None, :]
        value = (activate(gate, ACTIVATION) * up).to(out_ptr.dtype.element_ty)
        place = token.to(gl.int64)[:, None] * SIZE + line[None, :]
        gl.store(out_ptr + place, value, mask=here[:, None] & there[None, :])
