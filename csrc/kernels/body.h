// The update, the norm and the stream, written once over a vector type that each instruction set supplies.
//
// Included by one translation unit per instruction set, after it has defined `Simd` in an unnamed
// namespace. Everything here is in an unnamed namespace too, and nothing of the standard library is
// called: an inline function emitted by the AVX-512 unit might otherwise be the copy that the linker
// keeps for everybody, and run on a CPU that has no AVX-512.
//
// Rounding: every operation is rounded on its own (`-ffp-contract=off`, no fused multiply-add), in the
// order that offload/kernels/reference/ writes down. Loads and stores take any alignment.
//
// What a vector type supplies (F: fp32 vector; H: as many 16-bit elements; D: float64 vector):
//   kWidth, kDoubleWidth, kPairBytes (alignment that `stream_pair` needs; 0: not available)
//   set1, zero, load, store, stream, add, sub, mul, div, sqrt, negate, sign    on F; a zero or NaN is its own sign
//   widen<dtype>(address) -> F, narrow<dtype>(F) -> H, store_half(address, H), stream_pair(address, H, H)
//   where_equal(H, H, F a, F b) -> F: a where the bits of both halves are the same, else b
//   I: as many 32-bit integers as F has elements; set1_int, load_ints, add_ints, mul_ints (both modulo 2^32),
//   xor_ints, and_ints, shift_ints<bits> (right, zeros come in), narrow_adding(F, I) -> H: see `to_bfloat16_adding`
//   load_double<dtype>(address) -> D, add_double, square_double, load_d, store_d
//   U: vector of 64-bit words; kWords, load_words, store_words, set1_word, add_words (modulo 2^64), xor_words,
//   upper_halves (as words), swap_halves, mul_lower_halves (32 by 32 bits, the whole product)
#pragma once

#include "kernels.h"
#include "prefetch.h"
#include "rules.h"

namespace offload {
namespace {

using Byte = unsigned char;

inline float bits_to_float(std::uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

inline std::uint32_t float_to_bits(float value) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Round to nearest even by integer arithmetic: the hardware's own conversion flushes subnormals.
inline std::uint16_t to_bfloat16(float value) {
  const std::uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Add `random` (below 2^16) to the bits that bf16 has no room for, and cut them off: away from zero with a probability
// of what is cut off, in 65536ths. NaN becomes the one NaN of `to_bfloat16`; a finite value beyond the greatest bf16
// becomes that one, never infinity.
inline std::uint16_t to_bfloat16_adding(float value, std::uint32_t random) {
  const std::uint32_t bits = float_to_bits(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fc0;
  return static_cast<std::uint16_t>((magnitude < 0x7f7f0000u ? bits + random : bits) >> 16);
}

// Round to nearest even; below 2^-14 to subnormals, from 65520 on to infinity. An fp16 has 10 bits of mantissa and an
// exponent with bias 15, an fp32 has 23 and 127: so 13 bits are cut off, and 112 is taken from the exponent.
inline std::uint16_t to_float16(float value) {
  const std::uint32_t bits = float_to_bits(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7e00;
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);
  if (magnitude >= 0x38800000u) {
    const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
  }
  if (magnitude <= 0x33000000u) return static_cast<std::uint16_t>(sign);  // 2^-25 is a tie: to even, zero
  // A subnormal counts units of 2^-24: the mantissa, its leading 1 written out, is shifted to that unit and rounded.
  const std::uint32_t shift = 126u - (magnitude >> 23);
  const std::uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  std::uint32_t half = mantissa >> shift;
  const std::uint32_t rest = mantissa & ((1u << shift) - 1u);
  const std::uint32_t tie = 1u << (shift - 1u);
  if (rest > tie || (rest == tie && (half & 1u))) ++half;
  return static_cast<std::uint16_t>(sign | half);
}

// Widen an fp16, exactly; a NaN becomes a quiet one. See `to_float16` for 112 and 13.
inline float from_float16(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
  const std::uint32_t exponent = (half >> 10) & 31u;
  const std::uint32_t mantissa = half & 0x3ffu;
  if (exponent == 31u) return bits_to_float(sign | 0x7f800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u));
  if (exponent == 0u) {
    const float value = static_cast<float>(static_cast<std::int32_t>(mantissa)) * 0x1p-24f;  // exact
    return bits_to_float(sign | float_to_bits(value));
  }
  return bits_to_float(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

template <int dtype>
constexpr std::size_t size_of() {
  return dtype == kFloat32 ? 4 : 2;
}

template <int dtype>
inline float widen_one(const Byte* address) {
  if constexpr (dtype == kFloat32) {
    float value;
    __builtin_memcpy(&value, address, sizeof value);
    return value;
  } else {
    std::uint16_t half;
    __builtin_memcpy(&half, address, sizeof half);
    if constexpr (dtype == kBfloat16) return bits_to_float(static_cast<std::uint32_t>(half) << 16);
    return from_float16(half);
  }
}

// One element at a time: the scalar instruction set, and the ends of ranges in all others.
struct Single {
  using F = float;
  using H = std::uint16_t;
  using I = std::uint32_t;
  using D = double;
  using U = std::uint64_t;
  static constexpr std::size_t kWidth = 1;
  static constexpr std::size_t kDoubleWidth = 1;
  static constexpr std::size_t kWords = 1;
  static constexpr std::size_t kPairBytes = 0;

  static F set1(float value) { return value; }
  static F zero() { return 0.0f; }
  static F load(const Byte* address) { return widen_one<kFloat32>(address); }
  static void store(Byte* address, F value) { __builtin_memcpy(address, &value, sizeof value); }
  static void stream(Byte* address, F value) { store(address, value); }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F sqrt(F a) { return __builtin_sqrtf(a); }
  static F negate(F a) { return -a; }
  static F sign(F a) { return a > 0.0f ? 1.0f : a < 0.0f ? -1.0f : a; }
  template <int dtype>
  static F widen(const Byte* address) {
    return widen_one<dtype>(address);
  }
  template <int dtype>
  static H narrow(F value) {
    if constexpr (dtype == kBfloat16) return to_bfloat16(value);
    return to_float16(value);
  }
  static H narrow_adding(F value, I random) { return to_bfloat16_adding(value, random); }
  static I set1_int(std::uint32_t value) { return value; }
  static I load_ints(const std::uint32_t* address) { return *address; }
  static I add_ints(I a, I b) { return a + b; }
  static I mul_ints(I a, I b) { return a * b; }
  static I xor_ints(I a, I b) { return a ^ b; }
  static I and_ints(I a, I b) { return a & b; }
  template <int bits>
  static I shift_ints(I a) {
    return a >> bits;
  }
  static F where_equal(H x, H y, F a, F b) { return x == y ? a : b; }
  static H load_half(const Byte* address) {
    H value;
    __builtin_memcpy(&value, address, sizeof value);
    return value;
  }
  static void store_half(Byte* address, H value) { __builtin_memcpy(address, &value, sizeof value); }
  static void stream_pair(Byte*, H, H) {}

  template <int dtype>
  static D load_double(const Byte* address) {
    return static_cast<double>(widen_one<dtype>(address));
  }
  static D load_d(const double* address) { return *address; }
  static void store_d(double* address, D value) { *address = value; }
  static D add_double(D a, D b) { return a + b; }
  static D square_double(D a) { return a * a; }

  static U load_words(const Byte* address) {
    U value;
    __builtin_memcpy(&value, address, sizeof value);
    return value;
  }
  static void store_words(std::uint64_t* address, U value) { *address = value; }
  static U set1_word(std::uint64_t value) { return value; }
  static U add_words(U a, U b) { return a + b; }
  static U xor_words(U a, U b) { return a ^ b; }
  static U upper_halves(U a) { return a >> 32; }
  static U swap_halves(U a) { return a << 32 | a >> 32; }
  static U mul_lower_halves(U a, U b) { return (a & 0xffffffffu) * (b & 0xffffffffu); }
};

inline Byte* pointer(std::uint64_t address) { return reinterpret_cast<Byte*>(static_cast<std::uintptr_t>(address)); }

enum class Decay { kNone, kL2, kDecoupled };

// Return a rule's scalars in registers, each in all lanes. A rule's `Scalars` is nothing but members of type F in the
// order of the segment's scalars, so an array of F has the same bytes.
template <class V, class Rule>
inline typename Rule::template Scalars<V> in_registers(const Segment& segment) {
  using Scalars = typename Rule::template Scalars<V>;
  constexpr std::size_t count = sizeof(Scalars) / sizeof(typename V::F);
  static_assert(count <= kMaxScalars && Rule::kStates <= kMaxStates);
  Scalars scalars;
  typename V::F values[count];
  for (std::size_t k = 0; k < count; ++k) values[k] = V::set1(segment.scalars[k]);
  __builtin_memcpy(&scalars, values, sizeof scalars);
  return scalars;
}

// Mix 64 bits: every bit of the result depends on every bit of the value, and no two values have one result. (The last
// stage of splitmix64 with the constants of D. Stafford's variant 13; G. Steele et al., "Fast Splittable Pseudorandom
// Number Generators", OOPSLA 2014, section 4.)
inline std::uint64_t mix64(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// An element's counter is what its random bits are mixed from; it grows by kCounterStep from element to element.
// kCounterSteps: what the lanes of a vector add to the counter of its first element, 0 to 15 times the step.
constexpr std::uint32_t kCounterStep = 0x9e3779b9u;
alignas(64) constexpr std::uint32_t kCounterSteps[16] = {
    0,
    kCounterStep,
    2 * kCounterStep,
    3 * kCounterStep,
    4 * kCounterStep,
    5 * kCounterStep,
    6 * kCounterStep,
    7 * kCounterStep,
    8 * kCounterStep,
    9 * kCounterStep,
    10 * kCounterStep,
    11 * kCounterStep,
    12 * kCounterStep,
    13 * kCounterStep,
    14 * kCounterStep,
    15 * kCounterStep,
};

// The random bits of a segment's elements; offload/kernels/reference/rounding.py defines them. Made for a range of
// elements whose indices in the unsharded parameter agree in their upper 32 bits, so that one key is right for all of
// them (`update_rounding` cuts ranges so); `begin` is the first one.
template <class V>
struct RandomBits {
  using I = typename V::I;

  RandomBits(const Segment& s, std::uint64_t begin) {
    const std::uint64_t upper = (s.first_index + begin) >> 32;
    const std::uint64_t key = mix64(s.rounding_key + upper * 0x9e3779b97f4a7c15u);
    offset = static_cast<std::uint32_t>(s.first_index) * kCounterStep + static_cast<std::uint32_t>(key);
    inner = V::set1_int(static_cast<std::uint32_t>(key >> 32));
  }

  // Return the counters of element `i` and, in the other lanes, of those that follow at a distance of `stride`.
  template <int stride = 1>
  I counters(std::uint64_t i) const {
    const std::uint32_t first = offset + static_cast<std::uint32_t>(i) * kCounterStep;
    I steps = V::load_ints(kCounterSteps);
    if constexpr (stride == 2) steps = V::add_ints(steps, steps);
    return V::add_ints(V::set1_int(first), steps);
  }

  // Return 32 bits for each counter, the lower 16 of which are still to be combined with the upper ones.
  I mixed(I x) const {
    x = V::xor_ints(x, V::template shift_ints<16>(x));
    x = V::mul_ints(x, V::set1_int(0x7feb352du));
    x = V::xor_ints(V::xor_ints(x, V::template shift_ints<15>(x)), inner);
    return V::mul_ints(x, V::set1_int(0x846ca68bu));
  }

  // Return the 32 random bits of each counter's element.
  I of(I counters) const {
    const I x = mixed(counters);
    return V::xor_ints(x, V::template shift_ints<16>(x));
  }

  std::uint32_t offset;  // counter of the segment's element 0: its index times kCounterStep + the key's lower half
  I inner;               // the upper half of the key, which comes in between the mixer's multiplications
};

// What a segment says, in registers. Flags stay run-time values: their branches are the same all the way
// through a range, so they cost nothing beside memory, and they would multiply the code by twelve.
template <class V, class Rule, class Format>
struct Constants {
  Constants(const Segment& s, std::uint64_t begin)
      : scalars(in_registers<V, Rule>(s)),
        rounding(s, begin),
        grad_scale(V::set1(s.grad_scale)),
        decay(V::set1(s.decay)),
        mode((s.flags & kDecoupledDecay) ? Decay::kDecoupled
             : s.decay != 0.0f           ? Decay::kL2
                                         : Decay::kNone),
        zero_state(s.flags & kZeroState),
        master(pointer(s.master)),
        new_master(pointer(s.new_master ? s.new_master : s.master)),
        gradient(pointer(s.gradient)),
        new_weight(pointer(s.new_weight ? s.new_weight : s.weight)) {
    for (int k = 0; k < Rule::kStates; ++k) state[k] = pointer(s.state[k]);
  }

  typename Rule::template Scalars<V> scalars;
  typename Format::template Rounding<V> rounding;
  typename V::F grad_scale, decay;
  Decay mode;
  bool zero_state;
  const Byte* master;
  Byte* new_master;
  const Byte* gradient;
  Byte* new_weight;
  Byte* state[Rule::kStates];
};

// The update, in the parts that depend on one tensor each.

template <class V, class Rule, class Format>
inline typename V::F old_master(const Constants<V, Rule, Format>& c, std::uint64_t i) {
  return V::load(c.master + 4 * i);
}

template <int gradient_dtype, class V, class Rule, class Format>
inline typename V::F scaled_gradient(const Constants<V, Rule, Format>& c, std::uint64_t i) {
  return V::mul(V::template widen<gradient_dtype>(c.gradient + size_of<gradient_dtype>() * i), c.grad_scale);
}

template <class V, class Rule, class Format>
inline typename V::F with_l2_term(const Constants<V, Rule, Format>& c, typename V::F g, typename V::F p) {
  return V::add(g, V::mul(p, c.decay));
}

template <class V, class Rule, class Format>
inline typename V::F old_state(const Constants<V, Rule, Format>& c, int k, std::uint64_t i) {
  return c.zero_state ? V::zero() : Format::template load<V>(c.state[k] + Format::kStateBytes * i);
}

// Store V::kWidth elements of each state tensor from `i` on, `new_state(k)` being those of tensor `k`.
template <class V, class Rule, class Format, class NewState>
inline void store_state(const Constants<V, Rule, Format>& c, std::uint64_t i, NewState new_state) {
  typename V::I random[kMaxStates] = {};
  c.rounding.draw(i, random);
  for (int k = 0; k < Rule::kStates; ++k)
    Format::template store<V>(c.state[k] + Format::kStateBytes * i, new_state(k), random[k]);
}

template <class V, class Rule, class Format>
inline typename V::F update_master(const Constants<V, Rule, Format>& c, std::uint64_t i, typename V::F p,
                                   typename V::F change) {
  if (c.mode == Decay::kDecoupled) p = V::mul(p, c.decay);
  p = V::sub(p, change);
  V::store(c.new_master + 4 * i, p);
  return p;
}

// Update V::kWidth elements from `i` on; return the new master.
template <int gradient_dtype, int weight_dtype, class V, class Rule, class Format>
inline typename V::F update_vector(const Constants<V, Rule, Format>& c, std::uint64_t i) {
  using F = typename V::F;
  const F p = old_master(c, i);
  F g = scaled_gradient<gradient_dtype>(c, i);
  if (c.mode == Decay::kL2) g = with_l2_term(c, g, p);
  F state[Rule::kStates];
  for (int k = 0; k < Rule::kStates; ++k) state[k] = old_state(c, k, i);
  const F change = Rule::template change<V>(c.scalars, g, state);
  store_state(c, i, [&](int k) { return state[k]; });
  return update_master(c, i, p, change);
}

template <int gradient_dtype, int weight_dtype, class V, class Rule, class Format>
inline void update_and_store(const Constants<V, Rule, Format>& c, std::uint64_t i) {
  const typename V::F p = update_vector<gradient_dtype, weight_dtype>(c, i);
  if constexpr (weight_dtype != kNone) V::store_half(c.new_weight + 2 * i, V::template narrow<weight_dtype>(p));
  (void)p;
}

// What follows takes constants by value: were they to have an address, every store might change them, and they
// would be loaded again for every vector.

// Call `next_master(i)` for every vector in [begin, end), a whole number of vectors, and write the weights.
template <int weight_dtype, class V, class Rule, class Format, class NextMaster>
inline void for_each_vector(Constants<V, Rule, Format> c, std::uint64_t begin, std::uint64_t end, NextMaster next_master) {
  constexpr std::uint64_t width = V::kWidth;
  std::uint64_t i = begin;
  if constexpr (weight_dtype == kNone) {
    for (; i < end; i += width) next_master(i);
  } else {
    if constexpr (V::kPairBytes > 0) {
      // Past the caches: nobody reads the weight before the next forward pass, and a line that is
      // written whole need not be read first. The same for state, which *is* read first, costs time.
      if (reinterpret_cast<std::uintptr_t>(c.new_weight + 2 * i) % V::kPairBytes == 0) {
        for (; i + 2 * width <= end; i += 2 * width) {
          const auto low = V::template narrow<weight_dtype>(next_master(i));
          const auto high = V::template narrow<weight_dtype>(next_master(i + width));
          V::stream_pair(c.new_weight + 2 * i, low, high);
        }
      }
    }
    for (; i < end; i += width) V::store_half(c.new_weight + 2 * i, V::template narrow<weight_dtype>(next_master(i)));
  }
}

constexpr std::uint64_t kPageNumel = 1024;  // fp32 elements of a 4 KiB page

// A buffer for a page of a tensor in fp32. It is longer than a page, so that buffers side by side do not begin at the
// same place in a page: else loads from one would wait for stores to another.
struct Page {
  alignas(64) Byte bytes[4 * kPageNumel + 256];
};

// The update of at most a page, one tensor after the other, where tensors side by side would push each other out of
// the cache (`must_be_apart`). Gradients, with the L2 term, and state are read into buffers, which stay in the
// first-level cache. There the rule's change takes the gradient's place. Then state, master and weight are written.
// A few instructions more for the same numbers.
template <int gradient_dtype, int weight_dtype, class V, class Rule, class Format>
void update_apart(const Segment& segment, std::uint64_t begin, std::uint64_t end) {
  const Constants<V, Rule, Format> c(segment, begin);
  constexpr std::uint64_t width = V::kWidth;
  Page changes, states[Rule::kStates];
  for (std::uint64_t i = begin; i < end; i += width) {
    typename V::F g = scaled_gradient<gradient_dtype>(c, i);
    if (c.mode == Decay::kL2) g = with_l2_term(c, g, old_master(c, i));
    V::store(changes.bytes + 4 * (i - begin), g);
  }
  for (int k = 0; k < Rule::kStates; ++k)
    for (std::uint64_t i = begin; i < end; i += width) V::store(states[k].bytes + 4 * (i - begin), old_state(c, k, i));
  for (std::uint64_t at = 0; at < 4 * (end - begin); at += 4 * width) {
    typename V::F state[Rule::kStates];
    for (int k = 0; k < Rule::kStates; ++k) state[k] = V::load(states[k].bytes + at);
    V::store(changes.bytes + at, Rule::template change<V>(c.scalars, V::load(changes.bytes + at), state));
    for (int k = 0; k < Rule::kStates; ++k) V::store(states[k].bytes + at, state[k]);
  }
  for (std::uint64_t i = begin; i < end; i += width)
    store_state(c, i, [&](int k) { return V::load(states[k].bytes + 4 * (i - begin)); });
  for_each_vector<weight_dtype>(c, begin, end, [&](std::uint64_t i) {
    return update_master(c, i, old_master(c, i), V::load(changes.bytes + 4 * (i - begin)));
  });
}

// Ask for what will be needed in a while. Division and square root keep the window of instructions in flight short,
// and the processor's own prefetcher stops at pages. Past the end of a tensor it does nothing.
inline void prefetch(const Byte* address, std::size_t ahead) { __builtin_prefetch(address + ahead); }

// The update side by side: every tensor is at the same element at the same time. Where state is sealed block by block
// (kInBlocks), and maybe verified, the next block's master and state are read as soon as this one is done. So they
// are asked for a block ahead: 4 * kBlockNumel bytes, a block of fp32. Gradients are not verified.
template <int gradient_dtype, int weight_dtype, class V, class Rule, class Format>
void update_together(const Segment& segment, std::uint64_t begin, std::uint64_t end) {
  const Constants<V, Rule, Format> c(segment, begin);
  const std::size_t gradient_ahead = prefetch_bytes().together;
  const std::size_t ahead = segment.flags & kInBlocks ? 4 * kBlockNumel : gradient_ahead;
  for_each_vector<weight_dtype>(c, begin, end, [c, ahead, gradient_ahead](std::uint64_t i) {
    prefetch(c.master + 4 * i, ahead);
    for (int k = 0; k < Rule::kStates; ++k) prefetch(c.state[k] + Format::kStateBytes * i, ahead);
    prefetch(c.gradient + size_of<gradient_dtype>() * i, gradient_ahead);
    return update_vector<gradient_dtype, weight_dtype>(c, i);
  });
}

// Whether lines at these addresses push each other out of a first-level cache that predicts its ways. AMD's
// since Bulldozer know a line by its set and an 8-bit hash of its linear address; two lines that agree in both
// cannot be hit in turn. Tensors at a distance of a multiple of 256 MiB agree everywhere (the update is then
// four to twelve times slower), others on one page in 256. The hash is from M. Lipp et al., "Take A Way:
// Exploring the Security Implications of AMD's Cache Way Predictors", AsiaCCS 2020, section 3. Elsewhere a
// false alarm costs little.
inline bool compete(const Byte* a, const Byte* b) {
  const auto x = reinterpret_cast<std::uintptr_t>(a);
  const auto y = reinterpret_cast<std::uintptr_t>(b);
  if (((x - y + 512) & 4095) >= 1024) return false;  // they are in one set at different times
  const auto d = (x ^ y) >> 12;                       // bits 12 to 27: zero if the hashes agree
  // Bit 12 goes with 27, 13 with 26, 14 with 25, and 15 to 19 with 20 to 24.
  return ((d ^ (d >> 15)) & 1) == 0 && (((d >> 1) ^ (d >> 14)) & 1) == 0 && (((d >> 2) ^ (d >> 13)) & 1) == 0 &&
         (((d >> 3) ^ (d >> 8)) & 31) == 0;
}

// Whether two of the tensors that an update reads at element `i` compete for lines of the cache.
template <int gradient_dtype, class V, class Rule, class Format>
inline bool must_be_apart(const Constants<V, Rule, Format>& c, std::uint64_t i) {
  // Only tensors whose elements are as long as those of state are compared. Others pass through the sets of the cache
  // at another pace, so they meet those for a moment only.
  const Byte* streams[Rule::kStates + 2];
  int count = 0;
  for (int k = 0; k < Rule::kStates; ++k) streams[count++] = c.state[k] + Format::kStateBytes * i;
  if constexpr (Format::kStateBytes == 4) streams[count++] = c.master + 4 * i;
  if constexpr (Format::kStateBytes == size_of<gradient_dtype>())
    streams[count++] = c.gradient + Format::kStateBytes * i;
  for (int a = 0; a < count; ++a)
    for (int b = a + 1; b < count; ++b)
      if (compete(streams[a], streams[b])) return true;
  return false;
}

// Elements to go one by one until `address` (fp32) is at the begin of a cache line: at most 15. None in a range that
// is too short to gain by it.
inline std::uint64_t head_numel(const Byte* address, std::uint64_t numel) {
  const std::uint64_t past = (reinterpret_cast<std::uintptr_t>(address) & 63u) / 4;
  const std::uint64_t head = past == 0 ? 0 : 16 - past;
  return numel >= 64 ? head : 0;
}

// Update a range of an active segment, in a format without scales: one by one up to the first whole cache line of the
// master, then vectors, then what is left one by one. Vectors go page by page of the master, as from one page to the
// next it may change whether tensors compete.
template <class Rule, class Format, int gradient_dtype, int weight_dtype>
void update_active(const Segment& segment, std::uint64_t begin, std::uint64_t end) {
  constexpr std::uint64_t width = Simd::kWidth;
  const Constants<Single, Rule, Format> single(segment, begin);
  const Constants<Simd, Rule, Format> c(segment, begin);
  std::uint64_t i = begin;
  const std::uint64_t body = begin + head_numel(c.master + 4 * begin, end - begin);
  for (; i < body; ++i) update_and_store<gradient_dtype, weight_dtype>(single, i);
  const std::uint64_t vectors_end = i + (end - i) / width * width;
  // The end of the page of the master that element `k` is in, or of the vector that straddles it.
  const auto page_end = [&](std::uint64_t k) {
    const std::uint64_t left = kPageNumel - (reinterpret_cast<std::uintptr_t>(c.master + 4 * k) / 4) % kPageNumel;
    const std::uint64_t stop = k + (left < width ? width : left / width * width);
    return stop < vectors_end ? stop : vectors_end;
  };
  while (i < vectors_end) {
    std::uint64_t stop = page_end(i);
    if (must_be_apart<gradient_dtype>(c, i)) {
      update_apart<gradient_dtype, weight_dtype, Simd, Rule, Format>(segment, i, stop);
    } else {
      // As far as it goes: a loop that ends at every page would empty the pipeline there.
      while (stop < vectors_end && !must_be_apart<gradient_dtype>(c, stop)) stop = page_end(stop);
      update_together<gradient_dtype, weight_dtype, Simd, Rule, Format>(segment, i, stop);
    }
    i = stop;
  }
  for (; i < end; ++i) update_and_store<gradient_dtype, weight_dtype>(single, i);
}

#include "formats.h"

inline FormatFacts facts_of_format(const Segment& segment) {
  return with_format(segment.state_format, FormatFacts{0, 0, 0}, [](auto format) {
    using Format = decltype(format);
    return FormatFacts{Format::kStateBytes, Format::kMasterBytes, Format::kBlockNumel};
  });
}

inline FormFacts facts_of_form(std::int32_t code) {
  const std::uint32_t item_bytes = code == kFloat32 ? 4 : code == kBfloat16 || code == kFloat16 ? 2 : 0;
  return with_form(code, FormFacts{item_bytes, 1}, [](auto form) { return decltype(form)::kFacts; });
}

// Elements whose masters are taken from the weight before they are updated: still in the first-level cache then, so
// that memory is passed over once.
constexpr std::uint64_t kTakenNumel = 1024;

// Take a vector of fp32 masters from weights, as `take_masters` does.
template <int weight_dtype, class V>
inline void take_vector(const Byte* old, Byte* taken, const Byte* weight, bool matches) {
  typename V::F p = V::template widen<weight_dtype>(weight);
  if (matches) {  // bits are compared; where old master and weight are NaN, the result is NaN either way
    const typename V::F kept = V::load(old);
    p = V::where_equal(V::template narrow<weight_dtype>(kept), V::load_half(weight), kept, p);
  }
  V::store(taken, p);
}

// Write to `taken` the fp32 masters that are taken from `weight`: all weights, widened. With `matches`, the `old`
// master stays wherever it rounds to its weight.
template <int weight_dtype>
void take_masters(const Byte* old, Byte* taken, const Byte* weight, std::uint64_t numel, bool matches) {
  std::uint64_t i = 0;
  for (; i + Simd::kWidth <= numel; i += Simd::kWidth)
    take_vector<weight_dtype, Simd>(old + 4 * i, taken + 4 * i, weight + 2 * i, matches);
  for (; i < numel; ++i) take_vector<weight_dtype, Single>(old + 4 * i, taken + 4 * i, weight + 2 * i, matches);
}

// Take the master of at most kTakenNumel elements from the weight, as the segment's flags say, to where the new one goes.
template <class Format, int weight_dtype>
void take_master(const Segment& s, std::uint64_t begin, std::uint64_t numel) {
  const bool matches = !(s.flags & kLoadMaster);
  const Byte* old = pointer(s.master) + Format::kMasterBytes * begin;
  const Byte* weight = pointer(s.weight) + 2 * begin;
  Byte* taken = pointer(s.new_master ? s.new_master : s.master) + Format::kMasterBytes * begin;
  if constexpr (Format::kMasterBytes == 4) {
    take_masters<weight_dtype>(old, taken, weight, numel, matches);
  } else {
    alignas(64) Byte values[4 * kTakenNumel];
    if (matches) decode_planes(old, pointer(s.master_low) + begin, numel, values);
    take_masters<weight_dtype>(values, values, weight, numel, matches);
    encode_planes(taken, pointer(s.new_master_low ? s.new_master_low : s.master_low) + begin, numel, values);
  }
}

// The functions down to `update` choose what to run; read them from the last one up. `update` chooses by rule and
// format; `update_taking` takes masters first, where a flag says so; `update_rounding` cuts ranges for random bits;
// `update_with` deals with segments that are not active, and chooses, with the two before it, by dtypes and by
// whether the format has scales.

template <class Rule, class Format, int gradient_dtype, int weight_dtype>
void update_as_stored(const Segment& segment, std::uint64_t begin, std::uint64_t end) {
  if constexpr (Format::kBlockNumel > 1) {
    Format::template update<Rule, gradient_dtype, weight_dtype>(segment, begin, end);
  } else {
    update_active<Rule, Format, gradient_dtype, weight_dtype>(segment, begin, end);
  }
}

template <class Rule, class Format, int gradient_dtype>
void update_for_gradient(const Segment& segment, std::uint64_t begin, std::uint64_t end) {
  switch (segment.weight ? segment.weight_dtype : kNone) {
    case kBfloat16:
      return update_as_stored<Rule, Format, gradient_dtype, kBfloat16>(segment, begin, end);
    case kFloat16:
      return update_as_stored<Rule, Format, gradient_dtype, kFloat16>(segment, begin, end);
    default:
      return update_as_stored<Rule, Format, gradient_dtype, kNone>(segment, begin, end);
  }
}

// Update a range if the segment is active, else zero its state if a flag says so.
template <class Rule, class Format>
void update_with(const Segment& segment, std::uint64_t begin, std::uint64_t end) {
  if (segment.flags & kActive) {
    switch (segment.gradient_dtype) {
      case kBfloat16:
        return update_for_gradient<Rule, Format, kBfloat16>(segment, begin, end);
      case kFloat16:
        return update_for_gradient<Rule, Format, kFloat16>(segment, begin, end);
      default:
        return update_for_gradient<Rule, Format, kFloat32>(segment, begin, end);
    }
  }
  if (!(segment.flags & kZeroState)) return;
  for (int k = 0; k < Rule::kStates; ++k)
    __builtin_memset(pointer(segment.state[k]) + Format::kStateBytes * begin, 0, Format::kStateBytes * (end - begin));
  if constexpr (Format::kBlockNumel > 1) Format::template zero_scales<Rule>(segment, begin, end);
}

// Update a range in pieces, one for each value of the upper half of an element's index in the unsharded parameter:
// within a piece `RandomBits` has one key. Formats that do not round need no pieces.
template <class Rule, class Format>
void update_rounding(const Segment& segment, std::uint64_t begin, std::uint64_t end) {
  if constexpr (!Format::kRounds) return update_with<Rule, Format>(segment, begin, end);
  for (std::uint64_t from = begin; from < end;) {
    const std::uint64_t left = 0x100000000u - ((segment.first_index + from) & 0xffffffffu);
    const std::uint64_t to = end - from < left ? end : from + left;
    update_with<Rule, Format>(segment, from, to);
    from = to;
  }
}

// Return where to cut a segment instead of at element `i`, so that no block of elements that share scales is cut: at
// the begin of the block of `i`, or at 0 if that block begins before the segment. Both ends of a range are moved
// alike, so each block is updated once, and as a whole. The end of the segment stays.
template <class Format>
inline std::uint64_t block_begin(const Segment& segment, std::uint64_t i) {
  const std::uint64_t past = (segment.first_index + i) % Format::kBlockNumel;
  return i == segment.numel ? i : i < past ? 0 : i - past;
}

// Update a range piece by piece: take the masters of a piece from the weight, to where the new masters go, and update
// them there.
template <class Rule, class Format>
void update_taking(const Segment& segment, std::uint64_t begin, std::uint64_t end) {
  Segment taken = segment;
  if (segment.new_master) taken.master = segment.new_master;
  if (segment.new_master_low) taken.master_low = segment.new_master_low;
  for (std::uint64_t from = begin; from < end;) {
    const std::uint64_t to = end - from < kTakenNumel ? end : block_begin<Format>(segment, from + kTakenNumel);
    if (segment.weight_dtype == kBfloat16) take_master<Format, kBfloat16>(segment, from, to - from);
    if (segment.weight_dtype == kFloat16) take_master<Format, kFloat16>(segment, from, to - from);
    update_rounding<Rule, Format>(taken, from, to);
    from = to;
  }
}

// KernelSet::update. (The zeros are there because `with_rule` and `with_format` need results; nobody looks at them.)
void update(const Segment& segment, std::uint64_t begin, std::uint64_t end) {
  with_rule(segment.rule, 0, [&](auto rule) {
    return with_format(segment.state_format, 0, [&](auto format) {
      using Rule = decltype(rule);
      using Format = decltype(format);
      const std::uint64_t first = block_begin<Format>(segment, begin), last = block_begin<Format>(segment, end);
      if ((segment.flags & kTakesMaster) && segment.weight) {
        update_taking<Rule, Format>(segment, first, last);
      } else {
        update_rounding<Rule, Format>(segment, first, last);
      }
      return 0;
    });
  });
}

// Return a vector of values, from position `i` on, of a block whose squares have been folded down to `n` positions.
// Folding adds the upper half to the lower one, so every addition is vertical.
template <class V, int dtype, std::size_t n>
inline typename V::D folded(const Byte* block, std::size_t i) {
  if constexpr (n == kNormBlockNumel) {
    return V::square_double(V::template load_double<dtype>(block + size_of<dtype>() * i));
  } else {
    return V::add_double(folded<V, dtype, 2 * n>(block, i), folded<V, dtype, 2 * n>(block, i + n));
  }
}

// The sum of squares of a whole block. Four folds are done in registers, the rest in a buffer that stays in the
// first-level cache.
template <int dtype>
double block_sum(const Byte* block) {
  constexpr std::size_t kBuffered = kNormBlockNumel / 16;
  alignas(64) double sums[kBuffered];
  for (std::size_t i = 0; i < kBuffered; i += Simd::kDoubleWidth)
    Simd::store_d(sums + i, folded<Simd, dtype, kBuffered>(block, i));
  std::size_t n = kBuffered / 2;
  for (; n >= Simd::kDoubleWidth; n /= 2)
    for (std::size_t i = 0; i < n; i += Simd::kDoubleWidth)
      Simd::store_d(sums + i, Simd::add_double(Simd::load_d(sums + i), Simd::load_d(sums + i + n)));
  for (; n >= 1; n /= 2)
    for (std::size_t i = 0; i < n; ++i) sums[i] = sums[i] + sums[i + n];
  return sums[0];
}

// Copy a block; the source is then in the first-level cache, where the sum finds it.
template <int source_dtype>
void copy_block(const Byte* source, std::size_t numel, Byte* destination, std::int32_t destination_dtype) {
  if (destination == source) return;
  if (destination_dtype == source_dtype) {
    __builtin_memcpy(destination, source, numel * size_of<source_dtype>());
    return;
  }
  std::size_t i = 0;
  for (; i + Simd::kWidth <= numel; i += Simd::kWidth)
    Simd::store(destination + 4 * i, Simd::template widen<source_dtype>(source + size_of<source_dtype>() * i));
  for (; i < numel; ++i)
    Single::store(destination + 4 * i, widen_one<source_dtype>(source + size_of<source_dtype>() * i));
}

// The fingerprint of a gradient: 64 bits that tell whether any bit of it has changed since.
//
// It is the sum, modulo 2^64, of a term for each 64-bit word (little endian, the last one padded with zeros), so that
// words may be visited in any order, by any number of threads. The term of word x at position i is
//   product(x ^ a) + swap(product(x ^ b)),   a = kStartA + i * kStepA,   b = kStartB + i * kStepB
// where `product` multiplies a word's two halves and `swap` exchanges them. This is NH (J. Black et al., "UMAC: Fast
// and Secure Message Authentication", CRYPTO 1999, section 4), made twice with keys of their own, each good for 32
// bits. What that gives:
// * One changed element. It changes one half of x ^ a and of x ^ b, by d and e, and the term by d * h + swap(e * k),
//   h and k being the other halves. They are never both 0, as a and b differ. So the sum changes for certain where
//   either is 0, and else but for one in about 2^64 of the values that h and k may have.
// * Swapped elements, a range shifted, zeroed or copied over another, flipped signs, a scaling by a power of two: many
//   terms change, each by an amount that depends on the word and on its keys. A flipped sign changes the upper bits of
//   a product, a last bit its lower ones; as the second product is swapped, either moves the whole sum. It then is the
//   same by chance, once in about 2^64.
// Keys are no secret: somebody who wants two gradients with one fingerprint can make them.
constexpr std::uint64_t kStartA = 0x243f6a8885a308d3u, kStepA = 0x9e3779b97f4a7c15u;  // fractions of pi, golden ratio
constexpr std::uint64_t kStartB = 0xb7e151628aed2a6bu, kStepB = 0x6a09e667f3bcc909u;  // of e, root of 2

template <class V>
inline typename V::U product_of_halves(typename V::U words) {
  return V::mul_lower_halves(words, V::upper_halves(words));
}

template <class V>
inline typename V::U fingerprint_terms(typename V::U words, typename V::U a, typename V::U b) {
  return V::add_words(product_of_halves<V>(V::xor_words(words, a)),
                      V::swap_halves(product_of_halves<V>(V::xor_words(words, b))));
}

// Return start + k * step for k in [0, V::kWords).
template <class V>
inline typename V::U first_keys(std::uint64_t start, std::uint64_t step) {
  std::uint64_t keys[V::kWords];
  for (std::size_t k = 0; k < V::kWords; ++k) keys[k] = start + k * step;
  return V::load_words(reinterpret_cast<const Byte*>(keys));
}

std::uint64_t fingerprint(const void* source, std::uint64_t nbytes, std::uint64_t first_byte) {
  constexpr std::uint64_t width = 8 * Simd::kWords;
  const Byte* from = static_cast<const Byte*>(source);
  const std::uint64_t start_a = kStartA + first_byte / 8 * kStepA, start_b = kStartB + first_byte / 8 * kStepB;
  std::uint64_t i = 0, total = 0;
  if (nbytes >= width) {
    Simd::U a = first_keys<Simd>(start_a, kStepA), b = first_keys<Simd>(start_b, kStepB);
    const Simd::U step_a = Simd::set1_word(Simd::kWords * kStepA), step_b = Simd::set1_word(Simd::kWords * kStepB);
    Simd::U sums = Simd::set1_word(0);
    for (; i + width <= nbytes; i += width) {
      sums = Simd::add_words(sums, fingerprint_terms<Simd>(Simd::load_words(from + i), a, b));
      a = Simd::add_words(a, step_a);
      b = Simd::add_words(b, step_b);
    }
    std::uint64_t words[Simd::kWords];
    Simd::store_words(words, sums);
    for (std::size_t k = 0; k < Simd::kWords; ++k) total += words[k];
  }
  for (; i < nbytes; i += 8) {
    Byte last[8] = {};
    __builtin_memcpy(last, from + i, nbytes - i < 8 ? nbytes - i : 8);
    total += fingerprint_terms<Single>(Single::load_words(last), start_a + i / 8 * kStepA, start_b + i / 8 * kStepB);
  }
  return total;
}

// KernelSet::gradient_blocks, of one dtype. Block by block, so that fingerprint and sum find in the cache what has
// been copied. The fingerprint is that of the copy where it is widened, and so has other bits than the source.
template <int source_dtype>
std::uint64_t blocks_of(const Byte* source, std::uint64_t numel, double* blocks, Byte* destination,
                        std::int32_t destination_dtype, std::uint64_t first) {
  constexpr std::size_t item = size_of<source_dtype>();
  const bool widens = destination && destination_dtype != source_dtype;
  const std::size_t kept_item = widens ? 4 : item;
  std::uint64_t total = 0;
  for (std::uint64_t i = 0; i < numel; i += kNormBlockNumel, ++blocks) {
    const std::size_t now = numel - i < kNormBlockNumel ? numel - i : kNormBlockNumel;
    const Byte* block = source + item * i;
    Byte* copy = destination ? destination + kept_item * i : nullptr;
    if (copy) copy_block<source_dtype>(block, now, copy, destination_dtype);
    total += fingerprint(widens ? copy : block, kept_item * now, kept_item * (first + i));
    if (now == kNormBlockNumel) {
      *blocks = block_sum<source_dtype>(block);
    } else {
      alignas(64) Byte padded[item * kNormBlockNumel];
      __builtin_memcpy(padded, block, item * now);
      __builtin_memset(padded + item * now, 0, item * (kNormBlockNumel - now));
      *blocks = block_sum<source_dtype>(padded);
    }
  }
  return total;
}

std::uint64_t gradient_blocks(const void* source, std::int32_t source_dtype, std::uint64_t numel, double* blocks,
                              void* destination, std::int32_t destination_dtype, std::uint64_t first) {
  const Byte* from = static_cast<const Byte*>(source);
  Byte* to = static_cast<Byte*>(destination);
  switch (source_dtype) {
    case kBfloat16:
      return blocks_of<kBfloat16>(from, numel, blocks, to, destination_dtype, first);
    case kFloat16:
      return blocks_of<kFloat16>(from, numel, blocks, to, destination_dtype, first);
    default:
      return blocks_of<kFloat32>(from, numel, blocks, to, destination_dtype, first);
  }
}

template <class V, int dtype>
inline void add_vector(Byte* target, const Byte* source) {
  const typename V::F sum = V::add(V::template widen<dtype>(target), V::template widen<dtype>(source));
  if constexpr (dtype == kFloat32) {
    V::store(target, sum);
  } else {
    V::store_half(target, V::template narrow<dtype>(sum));
  }
}

template <int dtype>
void add_elements(Byte* target, const Byte* source, std::uint64_t numel) {
  constexpr std::size_t item = size_of<dtype>();
  std::uint64_t i = 0;
  for (; i + Simd::kWidth <= numel; i += Simd::kWidth) add_vector<Simd, dtype>(target + item * i, source + item * i);
  for (; i < numel; ++i) add_vector<Single, dtype>(target + item * i, source + item * i);
}

void add(void* target, const void* source, std::int32_t dtype, std::uint64_t numel) {
  Byte* to = static_cast<Byte*>(target);
  const Byte* from = static_cast<const Byte*>(source);
  switch (dtype) {
    case kBfloat16:
      return add_elements<kBfloat16>(to, from, numel);
    case kFloat16:
      return add_elements<kFloat16>(to, from, numel);
    default:
      return add_elements<kFloat32>(to, from, numel);
  }
}

#include "stored.h"

template <bool nontemporal>
inline void stream_state(Byte* address) {
  const Simd::F value = Simd::negate(Simd::load(address));
  if constexpr (nontemporal) {
    Simd::stream(address, value);
  } else {
    Simd::store(address, value);
  }
}

template <bool nontemporal>
inline void stream_weight(Byte* weight, const Byte* gradient) {
  const Simd::H low = Simd::load_half(gradient);
  const Simd::H high = Simd::load_half(gradient + 2 * Simd::kWidth);
  if constexpr (nontemporal && Simd::kPairBytes > 0) {
    Simd::stream_pair(weight, low, high);
  } else {
    Simd::store_half(weight, low);
    Simd::store_half(weight + 2 * Simd::kWidth, high);
  }
}

// KernelSet::stream. `ahead`: whether to prefetch. Side by side, a step moves the same elements of all tensors: as
// many as fill a whole vector of the tensor with the smallest elements.
template <bool state_nontemporal, bool weight_nontemporal>
void stream_range(const Segment& segment, std::uint64_t begin, std::uint64_t end, bool tensor_by_tensor, bool ahead) {
  constexpr std::uint64_t pair = 2 * Simd::kWidth, vector = 4 * Simd::kWidth;
  const FormatFacts facts = facts_of_format(segment);
  const std::uint64_t item = facts.state_bytes;
  const std::uint64_t step = item == 1 ? 2 * pair : pair;  // a vector of the smallest elements
  struct {
    Byte* first;
    std::uint64_t item;
  } const tensors[] = {{pointer(segment.master), facts.master_bytes},
                       {pointer(segment.state[0]), item},
                       {pointer(segment.state[1]), item},
                       {pointer(segment.master_low), 1}};
  const int count = facts.master_bytes == 4 ? 3 : 4;
  const Byte* gradient = pointer(segment.gradient);
  Byte* weight = pointer(segment.weight);
  if (tensor_by_tensor) {
    for (std::uint64_t from = begin; from < end; from += kNormBlockNumel) {
      const std::uint64_t to = from + kNormBlockNumel < end ? from + kNormBlockNumel : end;
      for (int k = 0; k < count; ++k)
        for (std::uint64_t at = tensors[k].item * from; at + vector <= tensors[k].item * to; at += vector)
          stream_state<state_nontemporal>(tensors[k].first + at);
      for (std::uint64_t i = from; i + pair <= to; i += pair)
        stream_weight<weight_nontemporal>(weight + 2 * i, gradient + 2 * i);
    }
    return;
  }
  for (std::uint64_t i = begin; i + step <= end; i += step) {
    if (ahead) {
      for (int k = 0; k < count; ++k)
        for (std::uint64_t at = tensors[k].item * i; at < tensors[k].item * (i + step); at += vector)
          prefetch(tensors[k].first + at, kStreamAhead);
      for (std::uint64_t at = i; at < i + step; at += pair) prefetch(gradient + 2 * at, kStreamAhead);
    }
    for (int k = 0; k < count; ++k)
      for (std::uint64_t at = tensors[k].item * i; at < tensors[k].item * (i + step); at += vector)
        stream_state<state_nontemporal>(tensors[k].first + at);
    for (std::uint64_t at = i; at < i + step; at += pair)
      stream_weight<weight_nontemporal>(weight + 2 * at, gradient + 2 * at);
  }
}

void stream(const Segment& segment, std::uint64_t begin, std::uint64_t end, std::uint32_t variant) {
  const bool by_tensor = variant & kStreamTensorByTensor;
  const bool ahead = variant & kStreamPrefetch;
  switch (variant & 3u) {
    case 0:
      return stream_range<false, false>(segment, begin, end, by_tensor, ahead);
    case 1:
      return stream_range<false, true>(segment, begin, end, by_tensor, ahead);
    case 2:
      return stream_range<true, false>(segment, begin, end, by_tensor, ahead);
    default:
      return stream_range<true, true>(segment, begin, end, by_tensor, ahead);
  }
}

}  // namespace
}  // namespace offload
