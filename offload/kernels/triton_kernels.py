"""The GPU's update, gathering of gradients and copies of pieces, in Triton.

Import it only to run on a GPU (or interpreted).

What fixes each rounding, on NVIDIA (the tests read the PTX for it; the interpreter runs numpy, which rounds each
operation on its own):

    `*`, `+`, `-`       `enable_fp_fusion=False` at the launch. LLVM then writes `mul.rn`, `add.rn` and `sub.rn`
                        (`.f32`, or `.f32x2` on Blackwell), whose explicit rounding forbids contraction, and ptxas
                        gets `--fmad=false` besides. Without it, it writes `fma.rn` and bare `mul` and `add`.
    division            `tl.div_rn`: `div.rn.f32`. A plain `/` is `div.full.f32`, which is 2 ulp off.
    square root         `tl.sqrt_rn`: `sqrt.rn.f32`. `tl.sqrt` is `sqrt.approx`.
    subnormals          No instruction here has `.ftz`. Triton sets it for functions of libdevice only; none is used.
    16 bits to fp32     Exact. bf16 is shifted as an integer, fp16 is `cvt.f32.f16`.
    fp32 to bf16        Integer arithmetic, as in the reference, whether to nearest or stochastically. So it is for
                        masters of 24 bits, and for codes but for the scaling.
    codes               A code in the place of an fp32's exponent and mantissa is an fp32, of which two powers of two
                        make the value: `mul.rn`, exact, as a subnormal is a number like others. The way back is a
                        `mul.rn` by a power of two and an `add.rn`, as in the reference.
    magnitudes          `abs.f32` is exact, and part of the operation that takes it (`FMUL |x|`).
    greatest of blocks  Integers, so that infinity and NaN come out on top: `max.u32`.
    fp32 to fp16        `cvt.rn.f16.f32` (or its pair form `cvt.rn.f16x2.f32`): to nearest even, subnormals kept,
                        overflow to infinity.
    fp16 additions      A sum of two in fp32, rounded to fp16, is what `add.rn.f16` gives at once (24 bits are at
                        least twice 11 and 2 more), and LLVM may write that.
    sums of squares     float64. Squares are exact. Every addition of the tree is a reduction over an axis of two
                        elements, of which there is only one order up to commutation, whatever layout is chosen.

Invariants: addresses come as integers and are cast to pointers, so that one launch serves tensors that know nothing
of each other. Nothing is read or written outside a segment. Every element is read and written once.
Not done here: checking anything; see `offload.kernels.gpu`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from offload import formats, rules
from offload.dtypes import DtypeCode
from offload.formats.compact8 import BLOCK_NUMEL
from offload.kernels.reference import FINGERPRINT_KEYS, minifloat
from offload.kernels.reference.rounding import COUNTER_STEP, INDEX_STEP
from offload.protocols import MAX_STATES, NORM_BLOCK_NUMEL, SEGMENT_DTYPE, SegmentFlag

SEGMENT_OFFSETS = {name: field[1] for name, field in (SEGMENT_DTYPE.fields or {}).items()}


def _word(field: str, bytes_each: int) -> tl.constexpr:
    """Return where a field of the segment table begins, counted in words of its size."""
    return tl.constexpr(SEGMENT_OFFSETS[field] // bytes_each)


NONE = tl.constexpr(int(DtypeCode.NONE))
BFLOAT16 = tl.constexpr(int(DtypeCode.BFLOAT16))
FLOAT16 = tl.constexpr(int(DtypeCode.FLOAT16))
FLOAT32 = tl.constexpr(int(DtypeCode.FLOAT32))
DECOUPLED_DECAY = tl.constexpr(int(SegmentFlag.DECOUPLED_DECAY))
LOAD_MASTER = tl.constexpr(int(SegmentFlag.LOAD_MASTER))
MATCH_MASTER = tl.constexpr(int(SegmentFlag.MATCH_MASTER))
TAKES_MASTER = tl.constexpr(int(LOAD_MASTER.value | MATCH_MASTER.value))
ZERO_STATE = tl.constexpr(int(SegmentFlag.ZERO_STATE))
NORM_BLOCK, NORM_LEVELS = tl.constexpr(NORM_BLOCK_NUMEL), tl.constexpr(NORM_BLOCK_NUMEL.bit_length() - 1)
EXACT, COMPACT8 = tl.constexpr(formats.EXACT.code), tl.constexpr(formats.COMPACT8.code)
BYTE = tl.constexpr(4)  # beside the codes of dtypes: uint8, as it is
SHARED = tl.constexpr(BLOCK_NUMEL)
CODE_UNIT, ONE = tl.constexpr(2.0**126), tl.constexpr(1)
INFINITY = tl.constexpr(0x7F800000)  # its bits
(START_A, STEP_A), (START_B, STEP_B) = (map(tl.constexpr, keys) for keys in FINGERPRINT_KEYS)
SIGNED_BITS, ROOT_BITS = tl.constexpr(minifloat.SIGNED_MANTISSA_BITS), tl.constexpr(minifloat.ROOT_MANTISSA_BITS)
NAN_SCALE, MASTER_RANDOM = tl.constexpr(minifloat.NAN_SCALE), tl.constexpr(minifloat.MASTER_RANDOM)
SIGNED_LEAST, SIGNED_GREATEST, ROOT_LEAST, ROOT_GREATEST = (
    tl.constexpr(scales[bits])
    for bits in (minifloat.SIGNED_MANTISSA_BITS, minifloat.ROOT_MANTISSA_BITS)
    for scales in (minifloat.LEAST_SCALES, minifloat.GREATEST_SCALES)
)
INDEX_STEP_, COUNTER_STEP_ = tl.constexpr(INDEX_STEP), tl.constexpr(COUNTER_STEP)
ROW_WORDS = tl.constexpr(SEGMENT_DTYPE.itemsize // 8)
MASTER, NEW_MASTER, STATE = _word("master", 8), _word("new_master", 8), _word("state", 8)
MASTER_LOW, NEW_MASTER_LOW, SCALES = _word("master_low", 8), _word("new_master_low", 8), _word("scales", 8)
WEIGHT_ADDRESS, NEW_WEIGHT = _word("weight", 8), _word("new_weight", 8)
GRADIENT_ADDRESS, NUMEL = _word("gradient", 8), _word("numel", 8)
FIRST_INDEX, ROUNDING_KEY = _word("first_index", 8), _word("rounding_key", 8)
FLAGS, GRAD_SCALE, DECAY, SCALARS = _word("flags", 4), _word("grad_scale", 4), _word("decay", 4), _word("scalars", 4)
ADAM, LION = tl.constexpr(rules.ADAMW.code), tl.constexpr(rules.LION.code)
ADAGRAD, SGD = tl.constexpr(rules.ADAGRAD.code), tl.constexpr(rules.SGD_MOMENTUM.code)


def _roots() -> int:
    """Return, for each rule, a bit for each state tensor of which the root is what `COMPACT8` stores."""
    states = [(rule, number, name) for rule in rules.RULES.values() for number, name in enumerate(rule.state)]
    return sum(1 << MAX_STATES * rule.code + number for rule, number, name in states if name in rule.roots)


ROOTS, STATES_EACH = tl.constexpr(_roots()), tl.constexpr(MAX_STATES)


@triton.jit
def pointers(address, start, BLOCK: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return pointers to elements `start` to `start + BLOCK` of the tensor at `address`; bf16 as its bits.

    `ALIGNED`: the first lies at a multiple of four elements.
    """
    if DTYPE == BYTE:
        first = (address + start).to(tl.pointer_type(tl.uint8))
        if ALIGNED:
            first = tl.multiple_of(first, 4)
    elif DTYPE == BFLOAT16:
        first = (address + start * 2).to(tl.pointer_type(tl.uint16))
        if ALIGNED:
            first = tl.multiple_of(first, 8)
    elif DTYPE == FLOAT16:
        first = (address + start * 2).to(tl.pointer_type(tl.float16))
        if ALIGNED:
            first = tl.multiple_of(first, 8)
    else:
        first = (address + start * 4).to(tl.pointer_type(tl.float32))
        if ALIGNED:
            first = tl.multiple_of(first, 16)
    return first + tl.arange(0, BLOCK)


@triton.jit
def old_and_new(old, new, start, BLOCK: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return `pointers` to what is read and to what is written; a field `new` of 0 means: where it is read."""
    read_at, written_at = tl.load(old), tl.load(new)
    written_at = tl.where(written_at == 0, read_at, written_at)
    return pointers(read_at, start, BLOCK, DTYPE, ALIGNED), pointers(written_at, start, BLOCK, DTYPE, ALIGNED)


@triton.jit
def read(at, inside, FULL: tl.constexpr):
    """Load what is `inside`, else zeros. Where all is inside (FULL) no mask keeps loads from being wide."""
    if FULL:
        return tl.load(at)
    else:
        return tl.load(at, mask=inside, other=0)


@triton.jit
def write(at, values, inside, FULL: tl.constexpr):
    """Store what is `inside`."""
    if FULL:
        tl.store(at, values)
    else:
        tl.store(at, values, mask=inside)


@triton.jit
def widen(values, DTYPE: tl.constexpr):
    """Return loaded values as fp32, exactly."""
    if DTYPE == BFLOAT16:
        return (values.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return values.to(tl.float32)


@triton.jit
def narrow(values, DTYPE: tl.constexpr):
    """Round fp32 to nearest even, as it is stored."""
    if DTYPE == BFLOAT16:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(values != values, 0x7FC0, rounded).to(tl.uint16)
    elif DTYPE == FLOAT16:
        return values.to(tl.float16)
    else:
        return values


@triton.jit
def mix64(z):
    """Mix 64 bits (uint64), as `offload.kernels.reference.rounding.mix64` does."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def random_bits(row, start, BLOCK: tl.constexpr):
    """Return 32 random bits for each element of a block, as `offload.kernels.reference.rounding.random_bits` does."""
    first = (tl.load(row + FIRST_INDEX) + start).to(tl.uint64)
    # A block may lie on both sides of a multiple of 2^32.
    seed = tl.load(row + ROUNDING_KEY).to(tl.uint64) + (first >> 32) * INDEX_STEP_
    before, after = mix64(seed), mix64(seed + INDEX_STEP_)
    lower = first.to(tl.uint32) + tl.arange(0, BLOCK).to(tl.uint32)
    crossed = lower < first.to(tl.uint32)
    x = lower * COUNTER_STEP_ + tl.where(crossed, after.to(tl.uint32), before.to(tl.uint32))
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15) ^ tl.where(crossed, (after >> 32).to(tl.uint32), (before >> 32).to(tl.uint32))
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def as_stored(values, random, STATE_FORMAT: tl.constexpr):
    """Return new state as it is stored, rounded with the lower 16 of the random bits where it is compact."""
    if STATE_FORMAT == EXACT:
        return values
    else:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + (random & 0xFFFF)) >> 16
        # What carried into the exponent of infinity was finite: infinity has no bits below that could carry. (A look
        # at the magnitude before would be made `abs.f32`, and that a floating-point addition.)
        carried = ((rounded & 0x7FFF) == 0x7F80) & ((bits & 0xFFFF) != 0)
        rounded = tl.where(carried, bits >> 16, rounded)
        return tl.where(values != values, 0x7FC0, rounded).to(tl.uint16)


@triton.jit
def in_planes(values, added):
    """Return an fp32 master in two planes, `added` (below 256) to the bits that are cut off, and as it was stored.

    Nothing is added to the greatest finite values, which would become infinite, nor to infinity.
    """
    bits = values.to(tl.uint32, bitcast=True)
    # (The magnitude twice: by itself it would be made `abs.f32`, and that an instruction of its own.)
    rounded = (bits + tl.where(bits << 1 < 0xFEFFFE00, added, 0)) >> 8
    rounded = tl.where(values != values, 0x7FC000, rounded)
    stored = (rounded << 8).to(tl.float32, bitcast=True)
    return (rounded >> 8).to(tl.uint16), (rounded & 0xFF).to(tl.uint8), stored


@triton.jit
def spread(of_blocks, BLOCK: tl.constexpr):
    """Return, for each element, what its block has of the blocks that share scales."""
    rows = tl.broadcast_to(tl.expand_dims(of_blocks, 1), [BLOCK // SHARED, SHARED])
    return tl.reshape(rows, [BLOCK])


@triton.jit
def decoded(codes, scales, ROOT: tl.constexpr, BLOCK: tl.constexpr):
    """Return fp32 values of codes and their blocks' scales, as `offload.kernels.reference.minifloat` does.

    An fp32 has subnormals as codes have them. So a code's bits, as the lowest of an exponent and the highest of a
    mantissa, are its integer times 2^(-126 - mantissa bits); times 2^126 and a power of its block, it is the value.
    """
    MANTISSA: tl.constexpr = ROOT_BITS if ROOT else SIGNED_BITS
    code, scale = codes.to(tl.uint32), spread(scales.to(tl.uint32), BLOCK)
    # The block's power of two in an fp32's bits: 2^(scale - 133), or 2^MANTISSA where the block is zeros.
    exponent = tl.where(scale > 0, scale - 6, 127 + MANTISSA)
    power = tl.where(scale == NAN_SCALE, 0x7FC00000, exponent << 23).to(tl.float32, bitcast=True)
    if ROOT:
        root = (code << (23 - MANTISSA)).to(tl.float32, bitcast=True) * CODE_UNIT * power
        return root * root
    else:
        bits = (code & 0x80) << 24 | (code & 0x7F) << (23 - MANTISSA)
        return bits.to(tl.float32, bitcast=True) * CODE_UNIT * power


@triton.jit
def encoded(values, random, inside, ROOT: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr):
    """Return codes, as uint32, and scales of fp32 values, as `offload.kernels.reference.minifloat` does.

    Elements that are not `inside` have no say in the scales, and any code.
    """
    MANTISSA: tl.constexpr = ROOT_BITS if ROOT else SIGNED_BITS
    LEAST: tl.constexpr = ONE << MANTISSA
    CUT: tl.constexpr = 23 - MANTISSA
    BELOW: tl.constexpr = (ONE << CUT) - 1
    LEAST_SCALE: tl.constexpr = ROOT_LEAST if ROOT else SIGNED_LEAST
    GREATEST_SCALE: tl.constexpr = ROOT_GREATEST if ROOT else SIGNED_GREATEST
    GREATEST_STORED: tl.constexpr = INFINITY if ROOT else INFINITY - 1
    if ROOT:
        values = tl.sqrt_rn(values)
        added = random & BELOW
    else:
        added = random >> (32 - CUT)
    bits = values.to(tl.uint32, bitcast=True)
    twice = bits << 1  # see `in_planes`
    if not FULL:
        twice = tl.where(inside, twice, 0)
    greatest = tl.max(tl.reshape(twice, [BLOCK // SHARED, SHARED]), axis=1) >> 1
    # The exponent of the greatest value; one more if the value is above the greatest code of its binade.
    scales = tl.minimum((greatest + BELOW) >> 23, GREATEST_SCALE)
    scales = tl.where(scales < LEAST_SCALE, 0, scales)
    scales = tl.where(greatest > GREATEST_STORED, NAN_SCALE, scales)
    scale = spread(scales, BLOCK)
    coded = (scale > 0) & (scale < NAN_SCALE)
    # Where nothing is coded, the greatest code is 0, whatever the number that is compared with it.
    most = tl.where(coded, 8 * LEAST - 1, 0)
    # In units of the block. Below `LEAST`, the least normal number, codes are as far from each other as in its
    # binade, which the addition of `LEAST` brings y to.
    y = tl.abs(values) * (tl.where(coded, 260 + MANTISSA - scale, 0) << 23).to(tl.float32, bitcast=True)
    normal = y >= LEAST
    z = tl.where(normal, y, y + LEAST).to(tl.uint32, bitcast=True)
    # The least normal number has exponent 127 + MANTISSA in an fp32, and 1 in a code.
    codes = ((z + added) >> CUT) - (127 + MANTISSA) * LEAST + tl.where(normal, LEAST, 0)
    codes = tl.minimum(codes, most)
    if not ROOT:
        codes = tl.where(codes > 0, codes | (bits >> 24 & 0x80), 0)
    return codes, scales.to(tl.uint8)


@triton.jit
def adam(s, g, m, v):
    """Return what the master moves by, and the new exp_avg and exp_avg_sq."""
    m = m * tl.load(s) + g * tl.load(s + 1)
    v = v * tl.load(s + 2) + (g * g) * tl.load(s + 3)
    denominator = tl.sqrt_rn(v) * tl.load(s + 4) + tl.load(s + 5)
    return tl.div_rn(m, denominator) * tl.load(s + 6), m, v


@triton.jit
def lion(s, g, m):
    """Return what the master moves by, and the new exp_avg."""
    mixed = m * tl.load(s) + g * tl.load(s + 1)
    m = m * tl.load(s + 2) + g * tl.load(s + 3)
    return tl.where(mixed > 0, 1.0, tl.where(mixed < 0, -1.0, mixed)) * tl.load(s + 4), m


@triton.jit
def adagrad(s, g, total):
    """Return what the master moves by, and the new sum."""
    total = total + g * g
    return tl.div_rn(g, tl.sqrt_rn(total) + tl.load(s)) * tl.load(s + 1), total


@triton.jit
def sgd(s, g, buffer):
    """Return what the master moves by, and the new momentum_buffer."""
    buffer = buffer * tl.load(s) + g * tl.load(s + 1)
    return (g * tl.load(s + 2) + buffer * tl.load(s + 3)) * tl.load(s + 4), buffer


@triton.jit
def change_of(s, g, first, second, RULE: tl.constexpr):
    """Return what the master moves by, and the new state; `s` are the rule's scalars."""
    if RULE == ADAM:
        change, first, second = adam(s, g, first, second)
    elif RULE == LION:
        change, first = lion(s, g, first)
    elif RULE == ADAGRAD:
        change, first = adagrad(s, g, first)
    else:
        tl.static_assert(RULE == SGD)
        change, first = sgd(s, g, first)
    return change, first, second


@triton.jit
def scales_of(row, start, room, STATES: tl.constexpr, STATE_FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    """Return pointers to the first scale of each block that shares scales, and which of them have elements."""
    blocks = tl.arange(0, BLOCK // SHARED)
    scales = tl.load(row + SCALES).to(tl.pointer_type(tl.uint8)) + blocks * STATES
    if STATE_FORMAT == COMPACT8:
        scales += tl.cdiv(start, SHARED) * STATES  # 0 where `start` is negative, by less than a block
    return scales, blocks * SHARED < room


@triton.jit
def stepped(scalars, decoupled, g, p, m, v, RULE: tl.constexpr):
    """Return the new master and state, in fp32, whatever they are stored in.

    The L2 term is left out where `decay` is 0: 0 times an infinite master would be NaN.
    """
    decay = tl.load(scalars + DECAY)
    decayed = p * decay
    if decoupled:
        p = decayed
    else:
        g = tl.where(decay != 0.0, g + decayed, g)
    change, m, v = change_of(scalars + SCALARS, g, m, v, RULE)
    return p - change, m, v


@triton.jit
def read_master(master, lower, inside, PLANES: tl.constexpr, UPPER: tl.constexpr, FULL: tl.constexpr):
    """Return a master in fp32; see `in_planes`."""
    p = widen(read(master, inside, FULL), UPPER)
    if PLANES:
        low = read(lower, inside, FULL).to(tl.uint32) << 8
        p = (p.to(tl.uint32, bitcast=True) | low).to(tl.float32, bitcast=True)
    return p


@triton.jit
def taken(p, weight, matches, WEIGHT: tl.constexpr):
    """Return the master taken from a weight: the weight, but, if `matches`, `p` where that rounds to the weight."""
    kept = narrow(p, WEIGHT).to(tl.uint16, bitcast=True) == weight.to(tl.uint16, bitcast=True)
    return tl.where(matches & kept, p, widen(weight, WEIGHT))


@triton.jit
def read_state(
    items,
    scales,
    inside,
    there,
    ROOT: tl.constexpr,
    STATE_FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):
    """Return a state tensor's values in fp32; `there` are the scales that exist (`scales_of`)."""
    if STATE_FORMAT == COMPACT8:
        return decoded(read(items, inside, FULL), read(scales, there, FULL), ROOT, BLOCK)
    else:
        return widen(read(items, inside, FULL), NONE if STATE_FORMAT == EXACT else BFLOAT16)


@triton.jit
def write_master(master, lower, p, added, inside, PLANES: tl.constexpr, FULL: tl.constexpr):
    """Write a master, and return it as it is stored; see `in_planes`."""
    if PLANES:
        upper, low, p = in_planes(p, added)
        write(master, upper, inside, FULL)
        write(lower, low, inside, FULL)
    else:
        write(master, p, inside, FULL)
    return p


@triton.jit
def write_zeros(
    first,
    second,
    scales,
    inside,
    there,
    STATES: tl.constexpr,
    STATE_FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):
    """Make state zeros, and the scales that are `there`."""
    zeros = tl.full([BLOCK], 0, first.dtype.element_ty)
    write(first, zeros, inside, FULL)
    if STATES == 2:
        write(second, zeros, inside, FULL)
    if STATE_FORMAT == COMPACT8:
        none = tl.full([BLOCK // SHARED], 0, tl.uint8)
        for number in tl.static_range(STATES):
            write(scales + number, none, there, FULL)


@triton.jit
def write_codes(
    first,
    second,
    scales,
    m,
    v,
    random,
    inside,
    there,
    ROOT: tl.constexpr,
    SECOND_ROOT: tl.constexpr,
    STATES: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):
    """Write state as codes and scales, of which those exist that are `there`."""
    codes, scale = encoded(m, random, inside, ROOT, BLOCK, FULL)
    write(scales, scale, there, FULL)
    if STATES == 2:
        others, scale = encoded(v, random, inside, SECOND_ROOT, BLOCK, FULL)
        write(scales + 1, scale, there, FULL)
        # What is divided by a root that is 0 now would be divided by almost nothing; by an infinite one it gave 0.
        if SECOND_ROOT:
            codes = tl.where((others == 0) | (v.to(tl.uint32, bitcast=True) == INFINITY), 0, codes)
        if ROOT:
            others = tl.where((codes == 0) | (m.to(tl.uint32, bitcast=True) == INFINITY), 0, others)
        write(second, others.to(tl.uint8), inside, FULL)
    write(first, codes.to(tl.uint8), inside, FULL)


@triton.jit
def update_block(
    row,
    start,
    room,
    RULE: tl.constexpr,
    STATES: tl.constexpr,
    GRADIENT: tl.constexpr,
    WEIGHT: tl.constexpr,
    ALIGNED: tl.constexpr,
    STATE_FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):
    """Do to one block of a segment what `offload.kernels.reference.update` does, in the same order.

    The block begins at element `start` of the segment (before it if that is negative, as with `COMPACT8` it may be),
    which has `room` elements from there on; FULL: the segment has all of the block's elements.
    """
    words = row.to(tl.pointer_type(tl.int32))
    scalars = row.to(tl.pointer_type(tl.float32))
    flags = tl.load(words + FLAGS)
    PLANES: tl.constexpr = STATE_FORMAT == COMPACT8 and WEIGHT != NONE  # else the master is fp32
    UPPER: tl.constexpr = BFLOAT16 if PLANES else NONE
    inside = tl.arange(0, BLOCK) < room
    if STATE_FORMAT == COMPACT8:
        inside &= tl.arange(0, BLOCK) >= -start
    master, new_master = old_and_new(row + MASTER, row + NEW_MASTER, start, BLOCK, UPPER, ALIGNED)
    lower, new_lower = master, new_master  # not used unless there are planes
    if PLANES:
        lower, new_lower = old_and_new(row + MASTER_LOW, row + NEW_MASTER_LOW, start, BLOCK, BYTE, ALIGNED)
    weight, new_weight = old_and_new(row + WEIGHT_ADDRESS, row + NEW_WEIGHT, start, BLOCK, WEIGHT, ALIGNED)
    COMPACT: tl.constexpr = BYTE if STATE_FORMAT == COMPACT8 else BFLOAT16
    ITEM: tl.constexpr = NONE if STATE_FORMAT == EXACT else COMPACT
    first = pointers(tl.load(row + STATE), start, BLOCK, ITEM, ALIGNED)
    # Not used with one state tensor, nor is `v` below.
    second = pointers(tl.load(row + STATE + 1), start, BLOCK, ITEM, ALIGNED)
    scales, there = scales_of(row, start, room, STATES, STATE_FORMAT, BLOCK)
    ROOT: tl.constexpr = (ROOTS >> STATES_EACH * RULE) & 1
    SECOND_ROOT: tl.constexpr = (ROOTS >> STATES_EACH * RULE + 1) & 1

    if GRADIENT == NONE:
        if WEIGHT != NONE and (flags & TAKES_MASTER) != 0:
            p = read_master(master, lower, inside, PLANES, UPPER, FULL)
            p = taken(p, read(weight, inside, FULL), (flags & LOAD_MASTER) == 0, WEIGHT)
            nothing_added = tl.zeros([BLOCK], tl.uint32)  # a stored master, or a weight: no bits are cut off
            write_master(new_master, new_lower, p, nothing_added, inside, PLANES, FULL)
        if (flags & ZERO_STATE) != 0:
            write_zeros(first, second, scales, inside, there, STATES, STATE_FORMAT, BLOCK, FULL)
    else:
        gradient = pointers(tl.load(row + GRADIENT_ADDRESS), start, BLOCK, GRADIENT, ALIGNED)
        g = widen(read(gradient, inside, FULL), GRADIENT) * tl.load(scalars + GRAD_SCALE)
        p = read_master(master, lower, inside, PLANES, UPPER, FULL)
        if WEIGHT != NONE and (flags & TAKES_MASTER) != 0:
            p = taken(p, read(weight, inside, FULL), (flags & LOAD_MASTER) == 0, WEIGHT)
        if (flags & ZERO_STATE) != 0:
            m = tl.full([BLOCK], 0.0, tl.float32)
            v = tl.full([BLOCK], 0.0, tl.float32)
        else:
            m = read_state(first, scales, inside, there, ROOT, STATE_FORMAT, BLOCK, FULL)
            v = m
            if STATES == 2:
                v = read_state(second, scales + 1, inside, there, SECOND_ROOT, STATE_FORMAT, BLOCK, FULL)
        p, m, v = stepped(scalars, (flags & DECOUPLED_DECAY) != 0, g, p, m, v, RULE)
        random = tl.zeros([BLOCK], tl.uint32)
        if STATE_FORMAT != EXACT:
            random = random_bits(row, start, BLOCK)
        if STATE_FORMAT == COMPACT8:
            write_codes(first, second, scales, m, v, random, inside, there, ROOT, SECOND_ROOT, STATES, BLOCK, FULL)
        else:
            write(first, as_stored(m, random, STATE_FORMAT), inside, FULL)
            if STATES == 2:
                write(second, as_stored(v, random >> 16, STATE_FORMAT), inside, FULL)
        p = write_master(new_master, new_lower, p, (random * MASTER_RANDOM) >> 24, inside, PLANES, FULL)
        if WEIGHT != NONE:
            write(new_weight, narrow(p, WEIGHT), inside, FULL)


@triton.jit(do_not_specialize=["first"])
def update(
    table,
    pieces,
    first,
    RULE: tl.constexpr,
    STATES: tl.constexpr,
    GRADIENT: tl.constexpr,
    WEIGHT: tl.constexpr,
    ALIGNED: tl.constexpr,
    STATE_FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update one block of one segment.

    Args:
        table: int64: the segment table, its addresses being of this device.
        pieces: int32, shape [programs, 2]: the row of the segment, and which of its blocks. Of `COMPACT8` the first
            begins where the blocks that share scales do: up to 63 elements before the segment.
        first: Row of `pieces` that the first program takes.
        RULE: Code of the update rule.
        STATES: How many state tensors it has beside the master.
        GRADIENT: Dtype code of the gradients; NONE for segments that are not active.
        WEIGHT: Dtype code of the weights; NONE where they are the masters.
        ALIGNED: Whether every program begins at multiples of four elements.
        STATE_FORMAT: How the state is stored.
        BLOCK: Elements of a block.
    """
    piece = pieces + 2 * (first + tl.program_id(0))
    row = table + tl.load(piece).to(tl.int64) * ROW_WORDS
    start = tl.load(piece + 1).to(tl.int64) * BLOCK
    if STATE_FORMAT == COMPACT8:
        start -= tl.load(row + FIRST_INDEX) & (SHARED - 1)
    room = tl.load(row + NUMEL) - start
    if (room >= BLOCK) & (start >= 0):
        update_block(row, start, room, RULE, STATES, GRADIENT, WEIGHT, ALIGNED, STATE_FORMAT, BLOCK, True)
    else:
        update_block(row, start, room, RULE, STATES, GRADIENT, WEIGHT, ALIGNED, STATE_FORMAT, BLOCK, False)


@triton.jit
def gather_block(
    source,
    room,
    start,
    blocks,
    destination,
    SOURCE: tl.constexpr,
    DESTINATION: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ALIGNED: tl.constexpr,
    FULL: tl.constexpr,
):
    """Copy or add one block of the norm, and write its sum of squares to `blocks`.

    The gradient has `room` elements from the block's first one, `start`, on.
    """
    inside = tl.arange(0, NORM_BLOCK) < room
    found = read(pointers(source, start, NORM_BLOCK, SOURCE, ALIGNED), inside, FULL)
    values = widen(found, SOURCE)
    if DESTINATION != NONE:
        kept = pointers(destination, start, NORM_BLOCK, DESTINATION, ALIGNED)
        if ACCUMULATE:
            total = widen(read(kept, inside, FULL), DESTINATION) + values
            rounded = narrow(total, DESTINATION)
            write(kept, rounded, inside, FULL)
            values = widen(rounded, DESTINATION)
        elif DESTINATION == SOURCE:
            write(kept, found, inside, FULL)
        else:
            write(kept, values, inside, FULL)
    x = values.to(tl.float64)
    x = x * x
    for level in tl.static_range(NORM_LEVELS):
        x = tl.sum(tl.reshape(x, [2, NORM_BLOCK >> (level + 1)]), axis=0)
    tl.store(blocks + tl.arange(0, 1), x)


@triton.jit(do_not_specialize=["source", "numel", "blocks", "destination"])
def gather(
    source,
    numel,
    blocks,
    destination,
    SOURCE: tl.constexpr,
    DESTINATION: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Copy or add a gradient and write its blocks' sums of squares, one block a program.

    Args:
        source: Address of the gradient.
        numel: Its elements.
        blocks: Address of float64, one for each block.
        destination: Address of the slot.
        SOURCE: Dtype code of the gradient.
        DESTINATION: Dtype code of the slot: the gradient's, or FLOAT32; NONE for no slot.
        ACCUMULATE: Whether the slot's values are added to; the sums are then those of the rounded result.
        ALIGNED: Whether both addresses are multiples of 16.
    """
    start = tl.program_id(0).to(tl.int64) * NORM_BLOCK
    room = numel - start
    sums = (blocks + tl.program_id(0).to(tl.int64) * 8).to(tl.pointer_type(tl.float64))
    if room >= NORM_BLOCK:
        gather_block(source, room, start, sums, destination, SOURCE, DESTINATION, ACCUMULATE, ALIGNED, True)
    else:
        gather_block(source, room, start, sums, destination, SOURCE, DESTINATION, ACCUMULATE, ALIGNED, False)


@triton.jit
def sum_block(source, room, start, blocks, SOURCE: tl.constexpr, ALIGNED: tl.constexpr, FULL: tl.constexpr):
    """Write the sum of squares of one block of the norm to `blocks`: `gather_block` without a slot."""
    no_slot = source  # no address of it is written to
    gather_block(source, room, start, blocks, no_slot, SOURCE, NONE, False, ALIGNED, FULL)


@triton.jit
def sum_rows(table, pieces, SOURCE: tl.constexpr):
    """Write the sum of squares of one block of one of many gradients, which are not copied.

    Args:
        table: int64, shape [rows, 4]: address of a gradient, its elements, address of its sums; the rest is unused.
        pieces: int32, shape [programs, 2]: the row, and which of its blocks.
        SOURCE: Dtype code of the gradients.
    """
    piece = pieces + 2 * tl.program_id(0)
    row = table + tl.load(piece).to(tl.int64) * 4
    block = tl.load(piece + 1).to(tl.int64)
    source, start = tl.load(row), block * NORM_BLOCK
    room = tl.load(row + 1) - start
    sums = (tl.load(row + 2) + block * 8).to(tl.pointer_type(tl.float64))
    if source % 16 == 0:
        if room >= NORM_BLOCK:
            sum_block(source, room, start, sums, SOURCE, ALIGNED=True, FULL=True)
        else:
            sum_block(source, room, start, sums, SOURCE, ALIGNED=True, FULL=False)
    else:  # loads are not wide here, so full blocks need no variant of their own
        sum_block(source, room, start, sums, SOURCE, ALIGNED=False, FULL=False)


@triton.jit
def product_of_halves(words):
    """Return the product of the two halves of each 64-bit word."""
    return (words & 0xFFFFFFFF) * (words >> 32)


@triton.jit
def fingerprint_block(source, room, start, part, SOURCE: tl.constexpr, ALIGNED: tl.constexpr, FULL: tl.constexpr):
    """Write the part of one block of the norm in a gradient's fingerprint (`reference.fingerprint_parts`)."""
    found = read(pointers(source, start, NORM_BLOCK, SOURCE, ALIGNED), tl.arange(0, NORM_BLOCK) < room, FULL)
    EACH: tl.constexpr = 2 if SOURCE == FLOAT32 else 4  # elements of a word
    if SOURCE == FLOAT32:
        bits = found.to(tl.uint32, bitcast=True).to(tl.uint64)
    else:
        bits = found.to(tl.uint16, bitcast=True).to(tl.uint64)
    shifts = (tl.arange(0, EACH) * (64 // EACH)).to(tl.uint64)
    words = tl.sum(tl.reshape(bits, [NORM_BLOCK // EACH, EACH]) << shifts[None, :], axis=1)
    word = tl.arange(0, NORM_BLOCK // EACH)
    position = start // EACH + word
    first = product_of_halves(words ^ (position * STEP_A + START_A).to(tl.uint64, bitcast=True))
    second = product_of_halves(words ^ (position * STEP_B + START_B).to(tl.uint64, bitcast=True))
    terms = first + ((second << 32) | (second >> 32))
    inside = word * EACH < room
    tl.store(part, tl.sum(tl.where(inside, terms, tl.zeros_like(terms)), axis=0))


@triton.jit
def fingerprint_rows(table, pieces, SOURCE: tl.constexpr):
    """Write the part of one block of one of many gradients in its fingerprint.

    Args:
        table: int64, shape [rows, 4]: address of a gradient, its elements, address of its parts; the rest is unused.
        pieces: int32, shape [programs, 2]: the row, and which of its blocks.
        SOURCE: Dtype code of the gradients.
    """
    piece = pieces + 2 * tl.program_id(0)
    row = table + tl.load(piece).to(tl.int64) * 4
    block = tl.load(piece + 1).to(tl.int64)
    source, start = tl.load(row), block * NORM_BLOCK
    room = tl.load(row + 1) - start
    part = (tl.load(row + 2) + block * 8).to(tl.pointer_type(tl.uint64))
    if source % 16 == 0:
        if room >= NORM_BLOCK:
            fingerprint_block(source, room, start, part, SOURCE, True, True)
        else:
            fingerprint_block(source, room, start, part, SOURCE, True, False)
    else:  # as in `sum_rows`
        fingerprint_block(source, room, start, part, SOURCE, False, False)


@triton.jit
def copy_block(target, source, room, BLOCK: tl.constexpr, WIDE: tl.constexpr, FULL: tl.constexpr):
    """Copy up to `BLOCK` bytes in words: of 32 bits at addresses that are multiples of 16, else of 16 bits."""
    if WIDE:
        word = tl.pointer_type(tl.uint32)
        words = tl.arange(0, BLOCK // 4)
        at, to = tl.multiple_of(source.to(word), 16) + words, tl.multiple_of(target.to(word), 16) + words
        write(to, read(at, words < room // 4, FULL), words < room // 4, FULL)
    else:
        half = tl.pointer_type(tl.uint16)
        words = tl.arange(0, BLOCK // 2)
        at, to = source.to(half) + words, target.to(half) + words
        write(to, read(at, words < room // 2, FULL), words < room // 2, FULL)


@triton.jit
def copy_pieces(table, pieces, BLOCK: tl.constexpr):
    """Copy one block of one piece of memory, bit for bit.

    Args:
        table: int64, shape [rows, 4]: target, source and bytes, all multiples of 2; the rest is unused.
        pieces: int32, shape [programs, 2]: the row, and which of its blocks.
        BLOCK: Bytes of a block.
    """
    piece = pieces + 2 * tl.program_id(0)
    row = table + tl.load(piece).to(tl.int64) * 4
    start = tl.load(piece + 1).to(tl.int64) * BLOCK
    target, source, nbytes = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    room = nbytes - start
    wide = (target | source | nbytes) % 16 == 0
    if wide:
        if room >= BLOCK:
            copy_block(target + start, source + start, room, BLOCK, True, True)
        else:
            copy_block(target + start, source + start, room, BLOCK, True, False)
    else:
        copy_block(target + start, source + start, room, BLOCK, False, False)
