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
    """Return where a field begins in a row of the segment table, counted in words of `bytes_each`."""
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
SHARED = tl.constexpr(BLOCK_NUMEL)  # elements that share scales
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
    """Return a number with a bit for each state tensor whose square root is what `COMPACT8` stores.

    The bit of tensor `k` of a rule is `MAX_STATES * rule.code + k`.
    """
    states = [(rule, number, name) for rule in rules.RULES.values() for number, name in enumerate(rule.state)]
    return sum(1 << MAX_STATES * rule.code + number for rule, number, name in states if name in rule.roots)


ROOTS, STATES_EACH = tl.constexpr(_roots()), tl.constexpr(MAX_STATES)


@triton.jit
def pointers(address, start, BLOCK: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return pointers to elements `start` to `start + BLOCK` of the tensor at `address`.

    `DTYPE` is a dtype code; bf16 is pointed at as uint16, to be widened as an integer. NONE is fp32, as FLOAT32 is.
    `ALIGNED` says that the first element lies at a multiple of four elements: `multiple_of` tells the compiler, which
    then loads and stores four at once.
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
    """Return `pointers` to a tensor's old elements and to where the new ones are written.

    `old` and `new` point at the two addresses in the row. A new address of 0 means: where the old elements lie.
    """
    read_at, written_at = tl.load(old), tl.load(new)
    written_at = tl.where(written_at == 0, read_at, written_at)
    return pointers(read_at, start, BLOCK, DTYPE, ALIGNED), pointers(written_at, start, BLOCK, DTYPE, ALIGNED)


@triton.jit
def read(at, inside, FULL: tl.constexpr):
    """Load the elements that are `inside`, a mask, and zeros for the others.

    `FULL`: all are inside, so nothing is masked. A mask would keep loads from being wide.
    """
    if FULL:
        return tl.load(at)
    else:
        return tl.load(at, mask=inside, other=0)


@triton.jit
def write(at, values, inside, FULL: tl.constexpr):
    """Store the elements that are `inside`; see `read`."""
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
    """Round fp32 values to a 16-bit dtype, to nearest even, bf16 as its bits; other codes leave them as they are."""
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
    # A block may lie on both sides of a multiple of 2^32, where the upper half of indices, and so the key, changes.
    seed = tl.load(row + ROUNDING_KEY).to(tl.uint64) + (first >> 32) * INDEX_STEP_
    before, after = mix64(seed), mix64(seed + INDEX_STEP_)
    lower = first.to(tl.uint32) + tl.arange(0, BLOCK).to(tl.uint32)
    crossed = lower < first.to(tl.uint32)  # the sum has wrapped: elements behind the multiple
    x = lower * COUNTER_STEP_ + tl.where(crossed, after.to(tl.uint32), before.to(tl.uint32))
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15) ^ tl.where(crossed, (after >> 32).to(tl.uint32), (before >> 32).to(tl.uint32))
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def as_stored(values, random, STATE_FORMAT: tl.constexpr):
    """Return new state as it is stored: in fp32, or for `COMPACT16` in bf16, rounded with the lower 16 random bits.

    See `offload.kernels.reference.rounding.round_stochastically`; `write_codes` is for `COMPACT8`.
    """
    if STATE_FORMAT == EXACT:
        return values
    else:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + (random & 0xFFFF)) >> 16
        # A finite value must not become infinite, so where it did, its bits are cut off instead. Infinity itself has
        # no lower bits. (The reference compares the magnitude first. Here that would be made `abs.f32`, and that a
        # floating-point addition.)
        carried = ((rounded & 0x7FFF) == 0x7F80) & ((bits & 0xFFFF) != 0)
        rounded = tl.where(carried, bits >> 16, rounded)
        return tl.where(values != values, 0x7FC0, rounded).to(tl.uint16)


@triton.jit
def in_planes(values, added):
    """Return an fp32 master rounded to 24 bits: upper plane (uint16), lower plane (uint8), and both joined in fp32.

    `added`, below 256, is added to the 8 bits that are cut off; not for the greatest finite values, which could
    become infinite, nor for infinity. See `split_master` in `offload.kernels.reference.minifloat`.
    """
    bits = values.to(tl.uint32, bitcast=True)
    # (`bits << 1` is the magnitude times two. The magnitude itself would be made `abs.f32`, one more instruction.)
    rounded = (bits + tl.where(bits << 1 < 0xFEFFFE00, added, 0)) >> 8
    rounded = tl.where(values != values, 0x7FC000, rounded)
    stored = (rounded << 8).to(tl.float32, bitcast=True)
    return (rounded >> 8).to(tl.uint16), (rounded & 0xFF).to(tl.uint8), stored


@triton.jit
def spread(of_blocks, BLOCK: tl.constexpr):
    """Return a number for each of `BLOCK` elements: that of its run of `SHARED` elements, which share a scale."""
    rows = tl.broadcast_to(tl.expand_dims(of_blocks, 1), [BLOCK // SHARED, SHARED])
    return tl.reshape(rows, [BLOCK])


@triton.jit
def decoded(codes, scales, ROOT: tl.constexpr, BLOCK: tl.constexpr):
    """Return fp32 values of codes and their blocks' scales, as `offload.kernels.reference.minifloat` defines them.

    An fp32 has subnormals as codes have them. So a code's exponent and mantissa, put where an fp32 has the lowest
    bits of its exponent and the highest of its mantissa, are an fp32: the code's integer times 2^(-126 - MANTISSA).
    Times `CODE_UNIT`, 2^126, and a power of two of its block, it is the value. `ROOT`: that is a root, and its square
    is returned.
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
    """Return codes (uint32) and scales (uint8) of fp32 values, as `offload.kernels.reference.minifloat` defines them.

    The steps are those of `minifloat.encode`. Elements that are not `inside` have no say in the scales, and their
    codes are not to be used. `ROOT`: codes are made of the values' square roots, and have no sign.
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
    twice = bits << 1  # the magnitude times two, without the sign; see `in_planes`
    if not FULL:
        twice = tl.where(inside, twice, 0)
    greatest = tl.max(tl.reshape(twice, [BLOCK // SHARED, SHARED]), axis=1) >> 1
    # The exponent of the greatest value; one more if the value is above the greatest code of its binade.
    scales = tl.minimum((greatest + BELOW) >> 23, GREATEST_SCALE)
    scales = tl.where(scales < LEAST_SCALE, 0, scales)
    scales = tl.where(greatest > GREATEST_STORED, NAN_SCALE, scales)
    scale = spread(scales, BLOCK)
    coded = (scale > 0) & (scale < NAN_SCALE)
    # The greatest code. Where nothing is coded it is 0, so that `codes` become 0 whatever has been computed.
    most = tl.where(coded, 8 * LEAST - 1, 0)
    # y is the magnitude in units of the block: times 2^(133 + MANTISSA - scale), to whose exponent an fp32 adds 127.
    # Below `LEAST`, the least normal number, codes are as far from each other as in its binade, which the addition of
    # `LEAST` brings y to.
    y = tl.abs(values) * (tl.where(coded, 260 + MANTISSA - scale, 0) << 23).to(tl.float32, bitcast=True)
    normal = y >= LEAST
    z = tl.where(normal, y, y + LEAST).to(tl.uint32, bitcast=True)
    # The least normal number has exponent 127 + MANTISSA in an fp32, and 1 in a code.
    codes = ((z + added) >> CUT) - (127 + MANTISSA) * LEAST + tl.where(normal, LEAST, 0)
    codes = tl.minimum(codes, most)
    if not ROOT:  # the highest bit of a code is its sign; a code of 0 has none
        codes = tl.where(codes > 0, codes | (bits >> 24 & 0x80), 0)
    return codes, scales.to(tl.uint8)


@triton.jit
def adam(s, g, m, v):
    """Return what is subtracted from the master, and the new exp_avg and exp_avg_sq.

    `s` points at the scalars after `decay` in `offload.rules.adam.Scalars`, in their order; so it does in the other
    rules' functions.
    """
    m = m * tl.load(s) + g * tl.load(s + 1)
    v = v * tl.load(s + 2) + (g * g) * tl.load(s + 3)
    denominator = tl.sqrt_rn(v) * tl.load(s + 4) + tl.load(s + 5)
    return tl.div_rn(m, denominator) * tl.load(s + 6), m, v


@triton.jit
def lion(s, g, m):
    """Return what is subtracted from the master, and the new exp_avg; `s` points at beta1 of the rule's scalars."""
    mixed = m * tl.load(s) + g * tl.load(s + 1)
    m = m * tl.load(s + 2) + g * tl.load(s + 3)
    return tl.where(mixed > 0, 1.0, tl.where(mixed < 0, -1.0, mixed)) * tl.load(s + 4), m


@triton.jit
def adagrad(s, g, total):
    """Return what is subtracted from the master, and the new sum; `s` points at eps of the rule's scalars."""
    total = total + g * g
    return tl.div_rn(g, tl.sqrt_rn(total) + tl.load(s)) * tl.load(s + 1), total


@triton.jit
def sgd(s, g, buffer):
    """Return what is subtracted from the master, and the new momentum_buffer; `s` points at the scalar momentum."""
    buffer = buffer * tl.load(s) + g * tl.load(s + 1)
    return (g * tl.load(s + 2) + buffer * tl.load(s + 3)) * tl.load(s + 4), buffer


@triton.jit
def change_of(s, g, first, second, RULE: tl.constexpr):
    """Return what is subtracted from the master, and both new state tensors.

    `s` points at the rule's own scalars. Of a rule with one state tensor, `second` is returned as it came.
    """
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
    """Return pointers to the scales of each run of `SHARED` elements, and a mask of the runs that have elements.

    A run has a scale for each state tensor, one after the other; a pointer is to the first of them. `start` and
    `room` are as in `update_block`. In other formats than `COMPACT8` the pointers are not to be used.
    """
    blocks = tl.arange(0, BLOCK // SHARED)
    scales = tl.load(row + SCALES).to(tl.pointer_type(tl.uint8)) + blocks * STATES
    if STATE_FORMAT == COMPACT8:
        scales += tl.cdiv(start, SHARED) * STATES  # 0 where `start` is negative, by less than a block
    return scales, blocks * SHARED < room


@triton.jit
def stepped(scalars, decoupled, g, p, m, v, RULE: tl.constexpr):
    """Return the new master and state, from the old ones (p; m and v) and the scaled gradient g, all in fp32.

    Weight decay is decoupled, or an L2 term of the gradient, as in `offload.kernels.reference.update`. The L2 term is
    left out where `decay` is 0: 0 times an infinite master would be NaN.
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
    """Return a master in fp32.

    With `PLANES` it is stored in two: `UPPER` is bf16's code, so the upper plane is widened as bf16 is, and 8 bits
    below come from `lower`. Else it is fp32, `UPPER` is NONE, and `lower` is not used.
    """
    p = widen(read(master, inside, FULL), UPPER)
    if PLANES:
        low = read(lower, inside, FULL).to(tl.uint32) << 8
        p = (p.to(tl.uint32, bitcast=True) | low).to(tl.float32, bitcast=True)
    return p


@triton.jit
def taken(p, weight, matches, WEIGHT: tl.constexpr):
    """Return the master that is taken from a weight: the weight in fp32.

    If `matches`, the old master `p` stays wherever it rounds to the weight, bit for bit.
    """
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
    """Return a state tensor's values in fp32.

    `items` are pointers to its elements; only `COMPACT8` uses `scales` and the mask `there` of those that exist
    (`scales_of`).
    """
    if STATE_FORMAT == COMPACT8:
        return decoded(read(items, inside, FULL), read(scales, there, FULL), ROOT, BLOCK)
    else:
        return widen(read(items, inside, FULL), NONE if STATE_FORMAT == EXACT else BFLOAT16)


@triton.jit
def write_master(master, lower, p, added, inside, PLANES: tl.constexpr, FULL: tl.constexpr):
    """Write the new master `p`, and return it as it is stored, in fp32.

    With `PLANES` it is rounded, for which `added` is added to the bits that are cut off (`in_planes`).
    """
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
    """Write zeros to the state tensors at `first` and `second`, and to the scales that are `there` (`scales_of`)."""
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
    """Write the new state, m and v, as codes at `first` and `second`, and their scales where they are `there`.

    See `offload.kernels.reference.minifloat.encode_state`. With one state tensor, `second` and `v` are not used.
    """
    codes, scale = encoded(m, random, inside, ROOT, BLOCK, FULL)
    write(scales, scale, there, FULL)
    if STATES == 2:
        others, scale = encoded(v, random, inside, SECOND_ROOT, BLOCK, FULL)
        write(scales + 1, scale, there, FULL)
        # Where a root is stored as 0, so is what is divided by it, as it would be divided by almost nothing. Likewise
        # where the root is infinite, which is stored as a finite number: the quotient was 0.
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

    Args:
        row: Pointer to the segment's row, in words of 64 bits.
        start: Number of the block's first element in the segment. With `COMPACT8` it may be negative: the first block
            begins where elements begin that share scales, before the segment.
        room: Elements of the segment from `start` on.
        RULE: See `update`, also for the constants that follow.
        FULL: Whether the segment has all of the block's elements.
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
    # The type of stored state: codes of a byte, bf16, or fp32 (NONE).
    COMPACT: tl.constexpr = BYTE if STATE_FORMAT == COMPACT8 else BFLOAT16
    ITEM: tl.constexpr = NONE if STATE_FORMAT == EXACT else COMPACT
    first = pointers(tl.load(row + STATE), start, BLOCK, ITEM, ALIGNED)
    # Not used with one state tensor, nor is `v` below.
    second = pointers(tl.load(row + STATE + 1), start, BLOCK, ITEM, ALIGNED)
    scales, there = scales_of(row, start, room, STATES, STATE_FORMAT, BLOCK)
    # Whether the first and the second state tensor are stored as roots; see `_roots`.
    ROOT: tl.constexpr = (ROOTS >> STATES_EACH * RULE) & 1
    SECOND_ROOT: tl.constexpr = (ROOTS >> STATES_EACH * RULE + 1) & 1

    if GRADIENT == NONE:  # the segment is not active
        if WEIGHT != NONE and (flags & TAKES_MASTER) != 0:
            p = read_master(master, lower, inside, PLANES, UPPER, FULL)
            # Beside `LOAD_MASTER` the flag `MATCH_MASTER` has no effect.
            p = taken(p, read(weight, inside, FULL), (flags & LOAD_MASTER) == 0, WEIGHT)
            nothing_added = tl.zeros([BLOCK], tl.uint32)  # a stored master, or a weight: no bits are cut off
            write_master(new_master, new_lower, p, nothing_added, inside, PLANES, FULL)
        if (flags & ZERO_STATE) != 0:
            write_zeros(first, second, scales, inside, there, STATES, STATE_FORMAT, BLOCK, FULL)
    else:  # the flags say the same as above; but master and state are written once, after the update
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
        pieces: int32, shape [programs, 2]: for each program the row of its segment, and which of the segment's blocks
            it updates. With `COMPACT8` a segment's first block begins where elements begin that share scales: up to
            63 elements before the segment.
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
        start -= tl.load(row + FIRST_INDEX) & (SHARED - 1)  # modulo `SHARED`, a power of two
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
    """Copy or add one block of the norm to the slot, if there is one, and write its sum of squares to `blocks`.

    Args:
        source: Address of the gradient.
        room: Elements of the gradient from the block's first one on.
        start: Number of the block's first element in the gradient.
        blocks: Pointer to this block's sum.
        destination: Address of the slot; not used if `DESTINATION` is NONE.
        SOURCE: See `gather`, also for the constants that follow.
        FULL: Whether the gradient has all of the block's elements.
    """
    inside = tl.arange(0, NORM_BLOCK) < room
    found = read(pointers(source, start, NORM_BLOCK, SOURCE, ALIGNED), inside, FULL)
    values = widen(found, SOURCE)
    if DESTINATION != NONE:
        in_slot = pointers(destination, start, NORM_BLOCK, DESTINATION, ALIGNED)
        if ACCUMULATE:
            total = widen(read(in_slot, inside, FULL), DESTINATION) + values
            rounded = narrow(total, DESTINATION)
            write(in_slot, rounded, inside, FULL)
            values = widen(rounded, DESTINATION)
        elif DESTINATION == SOURCE:
            write(in_slot, found, inside, FULL)
        else:  # FLOAT32
            write(in_slot, values, inside, FULL)
    # Elements outside are zeros. Each round adds the upper half to the lower one, as `reference.block_sums` does.
    x = values.to(tl.float64)
    x = x * x
    for level in tl.static_range(NORM_LEVELS):
        x = tl.sum(tl.reshape(x, [2, NORM_BLOCK >> (level + 1)]), axis=0)
    tl.store(blocks + tl.arange(0, 1), x)  # `x` has one element left


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
        ALIGNED: Whether both addresses are multiples of four of their elements.
    """
    start = tl.program_id(0).to(tl.int64) * NORM_BLOCK
    room = numel - start  # elements from this block on
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
    """Write the sum of squares of one block of the norm, of one of many gradients, which are not copied.

    Args:
        table: int64, shape [rows, 4]: address of a gradient, its elements, address of its sums; the rest is unused.
        pieces: int32, shape [programs, 2]: for each program the row, and which of the gradient's blocks.
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
    """Write the part that one block of the norm has in a gradient's fingerprint (`reference.fingerprint_parts`).

    `part` points at it; the other arguments are as in `gather_block`.
    """
    elements = read(pointers(source, start, NORM_BLOCK, SOURCE, ALIGNED), tl.arange(0, NORM_BLOCK) < room, FULL)
    EACH: tl.constexpr = 2 if SOURCE == FLOAT32 else 4  # elements of a word
    if SOURCE == FLOAT32:
        bits = elements.to(tl.uint32, bitcast=True).to(tl.uint64)
    else:
        bits = elements.to(tl.uint16, bitcast=True).to(tl.uint64)
    # The first element of a word takes its lowest bits: little endian. As no bits overlap, the sum joins them.
    shifts = (tl.arange(0, EACH) * (64 // EACH)).to(tl.uint64)
    words = tl.sum(tl.reshape(bits, [NORM_BLOCK // EACH, EACH]) << shifts[None, :], axis=1)
    word = tl.arange(0, NORM_BLOCK // EACH)
    position = start // EACH + word
    first = product_of_halves(words ^ (position * STEP_A + START_A).to(tl.uint64, bitcast=True))
    second = product_of_halves(words ^ (position * STEP_B + START_B).to(tl.uint64, bitcast=True))
    terms = first + ((second << 32) | (second >> 32))
    inside = word * EACH < room  # a word of zeros beyond the gradient's end would have a term, too
    tl.store(part, tl.sum(tl.where(inside, terms, tl.zeros_like(terms)), axis=0))


@triton.jit
def fingerprint_rows(table, pieces, SOURCE: tl.constexpr):
    """Write the part that one block of the norm has in the fingerprint of its gradient, one of many.

    Args:
        table: int64, shape [rows, 4]: address of a gradient, its elements, address of its parts; the rest is unused.
        pieces: int32, shape [programs, 2]: for each program the row, and which of the gradient's blocks.
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
    else:  # loads are not wide here, so full blocks need no variant of their own
        fingerprint_block(source, room, start, part, SOURCE, False, False)


@triton.jit
def copy_block(target, source, room, BLOCK: tl.constexpr, WIDE: tl.constexpr, FULL: tl.constexpr):
    """Copy `room` bytes, or `BLOCK` if there are more, in words of 32 bits (`WIDE`) or of 16.

    With `WIDE` both addresses and `room` are multiples of 16, so that four words are moved at once. `FULL`: there are
    at least `BLOCK` bytes.
    """
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
        pieces: int32, shape [programs, 2]: for each program the row, and which of the piece's blocks.
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
