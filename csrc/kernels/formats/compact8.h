// The upper 24 bits of the master, in two planes; state beside it in codes of one byte, in blocks that share a power of
// two. offload/kernels/reference/minifloat.py defines the numbers. Included by formats.h.
//
// A whole block is computed in registers, looked at, and only then stored. What is rare (NaN, infinity, values close to
// it), and what a segment has of the blocks at its ends, goes element by element from the same memory.
//
// A group is 4 * kWidth consecutive elements, in four vectors. Element 2j of the group's first half is in lane j of
// the first vector, element 2j + 1 in lane j of the second; the other half is in the third and fourth likewise. So a
// vector of 16-bit elements as they lie in memory is a pair of vectors, one in the lower and one in the upper halves
// of its lanes. And a vector of bytes is, after one permutation, all four. What a vector type supplies for that, I
// being as in body.h:
//   load_int, store_int(address, I), stream_int(address, I), int_of(F) and float_of(I) (the same bits), to_float(I),
//   constant<value>(), mul_add(F, F, F) (for exact products)
//   max(F, F), max_ints (unsigned), greatest(I) (unsigned, of all lanes), shift_left<bits>, select(mask, a, b) (b where
//   the mask's bits are 0), or_and(a, b, c) = a | (b & c)
//   to_lanes(I), from_lanes(I): bytes from the order in memory to 4 of a group's in each lane, and back
//   swap_middle(I): the second and the third byte of each lane, exchanged
//   signs(F, F, F, F): bytes, as to_lanes has them, whose highest bits are the signs
//   lookup(table, I): for each byte, below 16, the one in a table; load_table(address)
//   mul_bytes(I, I): sums of products of two neighbours, the first factors without signs, as 16-bit words
//   lower_words(I), upper_words(I): halves of lanes, sign-extended; keep_where(I, I): bytes where others are not 0
//   round_words(upper, lower): 16-bit words, and one more where those below say so, to nearest even
//   any_not_finite(I, I): whether any 16-bit word, without its sign, is 0x7f80 or more
//   widen_pair<dtype>(address, F*), narrow_pair<kFloat16>(F, F) -> I, load_pair and store_pair (fp32)

constexpr std::uint64_t kSharedNumel = 64;  // BLOCK_NUMEL of offload/formats/compact8.py
constexpr std::uint32_t kNanScale = 255;
constexpr std::uint32_t kMasterRandom = 0x9e3779b1u;

// Blocks below the least scale are zeros, whose scale is 0; values above the greatest one become its greatest code.
struct Signed {
  static constexpr int kMantissaBits = 4;
  static constexpr std::uint32_t kLeastScale = 24, kGreatestScale = 254;
  static constexpr std::uint32_t kGreatestStored = 0x7f7fffffu;  // of a magnitude's bits; beyond is the scale of NaN
};
struct Root {
  static constexpr int kMantissaBits = 5;
  // No code but 0 has a square of 0, and none an infinite one.
  static constexpr std::uint32_t kLeastScale = 64, kGreatestScale = 190;
  static constexpr std::uint32_t kGreatestStored = 0x7f800000u;
};

template <class Code>
constexpr int kCut = 23 - Code::kMantissaBits;  // bits of an fp32 mantissa that a code has no room for

// Powers of two by a block's scale, as the bits of an fp32.
// of_codes[is_root][scale]: the block's unit, which a code's integer is multiplied by; NaN where all of the block is.
// of_magnitudes[scale + 1]: what `encode_group` multiplies magnitudes by, 2^(134 - scale), or 0 where nothing is
// coded; of_magnitudes[scale] is twice that.
// They are in memory because a load goes to all lanes without the port that shuffles need.
struct Units {
  std::uint32_t of_codes[2][256], of_magnitudes[257];
};
constexpr Units make_units() {
  Units units{};
  for (std::uint32_t scale = 0; scale < 256; ++scale) {
    for (std::uint32_t is_root = 0; is_root < 2; ++is_root) {
      const std::uint32_t unit = scale == 0 ? 127 : scale - 6 - Signed::kMantissaBits - is_root;
      units.of_codes[is_root][scale] = scale == kNanScale ? 0x7fc00000u : unit << 23;
    }
    units.of_magnitudes[scale + 1] = scale < Signed::kLeastScale - 1 || scale == kNanScale ? 0 : (261 - scale) << 23;
  }
  return units;
}
constexpr Units kUnits = make_units();

template <class Code>
inline float unit_of(std::uint32_t scale) {
  return bits_to_float(kUnits.of_codes[Code::kMantissaBits - Signed::kMantissaBits][scale]);
}

// Return the scale of a block, given the bits of its greatest magnitude: their exponent, or one more if the magnitude
// is above the greatest code of its binade; within the range of scales of `Code`, which see. NaN has kNanScale.
template <class Code>
inline std::uint32_t scale_of(std::uint32_t greatest) {
  if (greatest > Code::kGreatestStored) return kNanScale;
  const std::uint32_t scale = (greatest + (1u << kCut<Code>)-1) >> 23;
  return scale < Code::kLeastScale ? 0 : scale > Code::kGreatestScale ? Code::kGreatestScale : scale;
}

// Call `work(k, Code())` for each of a rule's state tensors from the k-th on.
template <class Rule, int k = 0, class Work>
inline void for_each_state(Work work) {
  if constexpr (k < Rule::kStates) {
    if constexpr (Rule::is_root(k)) {
      work(k, Root());
    } else {
      work(k, Signed());
    }
    for_each_state<Rule, k + 1>(work);
  }
}

struct Compact8 {
  static constexpr std::size_t kStateBytes = 1, kMasterBytes = 2;
  static constexpr std::uint64_t kBlockNumel = kSharedNumel;
  static constexpr bool kRounds = true;

  template <class V>
  using Rounding = RandomBits<V>;

  template <class Rule, int gradient_dtype, int weight_dtype>
  static void update(const Segment& segment, std::uint64_t begin, std::uint64_t end);
  template <class Rule>
  static void zero_scales(const Segment& segment, std::uint64_t begin, std::uint64_t end);
};

// What a segment says, in registers, with what blocks need beside.
template <class V, class Rule>
struct BlockConstants : Constants<V, Rule, Compact8> {
  BlockConstants(const Segment& s, std::uint64_t begin)
      : Constants<V, Rule, Compact8>(s, begin),
        master_low(pointer(s.master_low)),
        new_master_low(pointer(s.new_master_low ? s.new_master_low : s.master_low)),
        scales(pointer(s.scales)),
        before(s.first_index % kSharedNumel) {
    for (int v = 0; v < 4; ++v) steps[v] = this->rounding.template counters<2>(v % 2 + v / 2 * 2 * V::kWidth);
  }

  // Return the random bits of one of the four vectors of the group from element `i` on.
  typename V::I random_of_group(std::uint64_t i, int v) const {
    const auto distance = static_cast<std::uint32_t>(i) * kCounterStep;
    return this->rounding.of(V::add_ints(V::set1_int(distance), steps[v]));
  }

  // The scales of the block that element `i` is in.
  Byte* scales_of(std::uint64_t i) const { return scales + (before + i) / kSharedNumel * Rule::kStates; }

  const Byte* master_low;
  Byte* new_master_low;
  Byte* scales;
  typename V::I steps[4];  // counters of the elements in the four vectors of the segment's first group
  std::uint64_t before;  // elements of the first block that come before the segment's
};

// Element by element. decode, encode and split_master in minifloat.py explain the steps.

template <class Code>
inline float decode_one(std::uint32_t code, float unit) {
  constexpr int bits = Code::kMantissaBits;
  const std::uint32_t magnitude = Code::kMantissaBits == Signed::kMantissaBits ? code & 0x7fu : code;
  const std::uint32_t above = magnitude >> bits ? (magnitude >> bits) - 1 : 0;
  const float value = static_cast<float>(static_cast<std::int32_t>((magnitude - (above << bits)) << above)) * unit;
  if (bits == Root::kMantissaBits) return value * value;
  return magnitude == code ? value : -value;
}

template <class Code>
inline Byte encode_one(float value, std::uint32_t random, std::uint32_t scale) {
  constexpr int bits = Code::kMantissaBits, cut = kCut<Code>;
  if (scale == 0 || scale == kNanScale) return 0;
  const float least_normal = 1 << bits, magnitude = bits_to_float(float_to_bits(value) & 0x7fffffffu);
  const float y = magnitude * bits_to_float((260 + bits - scale) << 23);
  const bool is_normal = y >= least_normal;
  const std::uint32_t added = bits == Root::kMantissaBits ? random & ((1u << cut) - 1) : random >> (32 - cut);
  std::uint32_t code = (float_to_bits(is_normal ? y : y + least_normal) + added) >> cut;
  code -= (127u + bits - is_normal) << bits;
  if (code > (8u << bits) - 1) code = (8u << bits) - 1;
  if (bits == Root::kMantissaBits || code == 0) return static_cast<Byte>(code);
  return static_cast<Byte>(code | (float_to_bits(value) >> 31 << 7));
}

inline float load_planes(const Byte* upper, const Byte* lower) {
  std::uint16_t half;
  __builtin_memcpy(&half, upper, sizeof half);
  return bits_to_float(static_cast<std::uint32_t>(half) << 16 | static_cast<std::uint32_t>(*lower) << 8);
}

// Store a master in two planes, after `added` has been added to the 8 bits that are cut off, unless that could make
// infinity. Every NaN is stored as the same one. Return the master as it is stored.
inline float store_planes(Byte* upper, Byte* lower, float value, std::uint32_t added) {
  std::uint32_t bits = float_to_bits(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude < 0x7f7fff00u) bits += added;
  if (magnitude > 0x7f800000u) bits = 0x7fc00000u;
  const auto half = static_cast<std::uint16_t>(bits >> 16);
  __builtin_memcpy(upper, &half, sizeof half);
  *lower = static_cast<Byte>(bits >> 8);
  return bits_to_float(bits & 0xffffff00u);
}

// Update a block, or what a segment has of it. New state is kept in fp32 until all of the block is known, as its
// greatest magnitude makes the scale.
template <class Rule, int gradient_dtype, int weight_dtype>
void update_one_by_one(const Segment& segment, std::uint64_t begin, std::uint64_t end) {
  const BlockConstants<Single, Rule> c(segment, begin);
  Byte* scales = c.scales_of(begin);
  float states[kMaxStates][kSharedNumel];
  std::uint32_t random[kSharedNumel], greatest[kMaxStates] = {};
  float units[kMaxStates];
  for_each_state<Rule>([&](int k, auto code) { units[k] = unit_of<decltype(code)>(scales[k]); });
  for (std::uint64_t i = begin; i < end; ++i) {
    const std::uint64_t at = i - begin;
    float p;
    if constexpr (weight_dtype == kNone) {
      p = old_master(c, i);
    } else {
      p = load_planes(c.master + 2 * i, c.master_low + i);
    }
    float g = scaled_gradient<gradient_dtype>(c, i), state[Rule::kStates];
    if (c.mode == Decay::kL2) g = with_l2_term(c, g, p);
    for_each_state<Rule>([&](int k, auto code) {
      state[k] = c.zero_state ? 0.0f : decode_one<decltype(code)>(c.state[k][i], units[k]);
    });
    const float change = Rule::template change<Single>(c.scalars, g, state);
    for (int k = 0; k < Rule::kStates; ++k) {
      states[k][at] = Rule::is_root(k) ? Single::sqrt(state[k]) : state[k];
      const std::uint32_t magnitude = float_to_bits(states[k][at]) & 0x7fffffffu;
      if (magnitude > greatest[k]) greatest[k] = magnitude;
    }
    random[at] = c.rounding.of(c.rounding.counters(i));
    if constexpr (weight_dtype == kNone) {
      update_master(c, i, p, change);
    } else {
      if (c.mode == Decay::kDecoupled) p = p * c.decay;
      p = store_planes(c.new_master + 2 * i, c.new_master_low + i, p - change, random[at] * kMasterRandom >> 24);
      Single::store_half(c.new_weight + 2 * i, Single::narrow<weight_dtype>(p));
    }
  }
  for_each_state<Rule>([&](int k, auto code) {
    using Code = decltype(code);
    const std::uint32_t scale = scale_of<Code>(greatest[k]);
    scales[k] = static_cast<Byte>(scale);
    for (std::uint64_t i = begin; i < end; ++i)
      c.state[k][i] = encode_one<Code>(states[k][i - begin], random[i - begin], scale);
  });
  // Where a root is stored as 0, or is infinite, the state that is divided by it is stored as 0.
  for (int k = 0; k < Rule::kStates; ++k)
    for (std::uint64_t i = begin; Rule::is_root(k) && i < end; ++i)
      if (c.state[k][i] == 0 || float_to_bits(states[k][i - begin]) == Root::kGreatestStored)
        for (int other = 0; other < Rule::kStates; ++other)
          if (!Rule::is_root(other)) c.state[other][i] = 0;
}

// A block at once.

// The tables of `decode_group`, for signed codes and for roots. The index is a code without its mantissa: exponent e,
// and above it the sign where there is one. kTops: the bit above the mantissa, which numbers with e = 0 have not.
// kFactors: what that and the mantissa are multiplied by, 2^(e - 1), or 1 for e = 0; a signed byte, negative where
// the code is.
alignas(16) constexpr Byte kTops[2][16] = {{0, 16, 16, 16, 16, 16, 16, 16, 0, 16, 16, 16, 16, 16, 16, 16},
                                           {0, 32, 32, 32, 32, 32, 32, 32}};
alignas(16) constexpr Byte kFactors[2][16] = {{1, 1, 2, 4, 8, 16, 32, 64, 255, 255, 254, 252, 248, 240, 224, 192},
                                              {1, 1, 2, 4, 8, 16, 32, 64}};

// Decode a group of codes into four vectors. All are worked on as bytes, four in a lane, up to the multiplication,
// whose products are 16-bit words; byte k of a lane belongs to vector k.
template <class Code, class V>
inline void decode_group(const Byte* address, float unit, typename V::F* values) {
  using I = typename V::I;
  constexpr bool is_root = Code::kMantissaBits == Root::kMantissaBits;
  constexpr std::uint32_t exponents = is_root ? 0x07070707u : 0x0f0f0f0fu;
  constexpr std::uint32_t mantissas = is_root ? 0x1f1f1f1fu : 0x0f0f0f0fu;
  const I codes = V::to_lanes(V::load_int(address));
  const I exponent = V::and_ints(V::template shift_ints<Code::kMantissaBits>(codes), V::template constant<exponents>());
  const I significand =
      V::or_and(V::lookup(V::load_table(kTops[is_root]), exponent), codes, V::template constant<mantissas>());
  const I factor = V::lookup(V::load_table(kFactors[is_root]), exponent);
  const I even = V::mul_bytes(V::and_ints(significand, V::template constant<0x00ff00ffu>()), factor);
  const I odd = V::mul_bytes(V::and_ints(significand, V::template constant<0xff00ff00u>()), factor);
  const I integers[4] = {V::lower_words(even), V::lower_words(odd), V::upper_words(even), V::upper_words(odd)};
  for (int v = 0; v < 4; ++v) {
    const typename V::F value = V::mul(V::to_float(integers[v]), V::set1(unit));
    values[v] = is_root ? V::mul(value, value) : value;
  }
}

// Encode four vectors of magnitudes; return their codes, without signs, as four bytes in each lane.
//
// It is the rounding of `encode_one`, but in other units, in which the least normal number is 2: of a magnitude y, if
// it is a normal number, 2y is rounded, else y + 2. The greater of the two is the right one. It is from 2 to 512, and
// there the lower three bits of an fp32's exponent are a code's. Products are exact, but for those so small that the
// sum is 2 anyway.
template <class Code, class V>
inline typename V::I encode_group(const typename V::I* magnitudes, const typename V::I* random, std::uint32_t scale) {
  using I = typename V::I;
  using F = typename V::F;
  constexpr bool is_root = Code::kMantissaBits == Root::kMantissaBits;
  const F unit = V::set1(bits_to_float(kUnits.of_magnitudes[scale + 1]));
  const F twice = V::set1(bits_to_float(kUnits.of_magnitudes[scale]));
  I bits[4];
  for (int v = 0; v < 4; ++v) {
    const F y = V::float_of(magnitudes[v]);
    const I z = V::int_of(V::max(V::mul(y, twice), V::mul_add(y, unit, V::set1(2.0f))));
    const I added = is_root ? V::and_ints(random[v], V::template constant<(1u << kCut<Root>)-1>())
                            : V::template shift_ints<32 - kCut<Signed>>(random[v]);
    bits[v] = V::add_ints(z, added);
  }
  constexpr int cut = kCut<Code>;
  // Vector k's code is shifted to byte k of the lane.
  const I lower = V::select(V::template constant<0x000000ffu>(), V::template shift_ints<cut>(bits[0]),
                            V::template shift_ints<cut - 8>(bits[1]));
  const I upper = V::select(V::template constant<0x00ff0000u>(), V::template shift_ints<cut - 16>(bits[2]),
                            V::template shift_left<24 - cut>(bits[3]));
  return V::select(V::template constant<0x0000ffffu>(), lower, upper);
}

// Update the whole block from element `i` on, in registers. Return true once it is stored. Return false, with nothing
// stored, if a value of it is rare: then `update_one_by_one` has to update the block.
//
// First masters and state are updated, group by group; then scales and planes are made, and rare values looked for;
// then all is stored.
template <class Rule, int gradient_dtype, int weight_dtype, class V>
inline bool update_block(const BlockConstants<V, Rule>& c, std::uint64_t i) {
  using F = typename V::F;
  using I = typename V::I;
  constexpr std::uint64_t group = 4 * V::kWidth, half = 2 * V::kWidth;
  constexpr int groups = kSharedNumel / group;
  Byte* scales = c.scales_of(i);
  float units[kMaxStates];
  for_each_state<Rule>([&](int k, auto code) { units[k] = unit_of<decltype(code)>(scales[k]); });
  F masters[groups][4], states[groups][kMaxStates][4];
  I random[groups][4], magnitudes[groups][kMaxStates][4], upper[groups][2], lower[groups][2];
  for (int n = 0; n < groups; ++n) {
    const std::uint64_t at = i + group * n;
    F(&p)[4] = masters[n];
    if constexpr (weight_dtype == kNone) {
      V::load_pair(c.master + 4 * at, p);
      V::load_pair(c.master + 4 * (at + half), p + 2);
    } else {
      const I low = V::to_lanes(V::load_int(c.master_low + at)), byte = V::template constant<0xff00u>();
      const I first = V::load_int(c.master + 2 * at), second = V::load_int(c.master + 2 * (at + half));
      const I upper_half = V::template constant<0xffff0000u>();
      p[0] = V::float_of(V::or_and(V::template shift_left<16>(first), V::template shift_left<8>(low), byte));
      p[1] = V::float_of(V::or_and(V::and_ints(first, upper_half), low, byte));
      p[2] = V::float_of(V::or_and(V::template shift_left<16>(second), V::template shift_ints<8>(low), byte));
      p[3] = V::float_of(V::or_and(V::and_ints(second, upper_half), V::template shift_ints<16>(low), byte));
    }
    F g[4];
    V::template widen_pair<gradient_dtype>(c.gradient + size_of<gradient_dtype>() * at, g);
    V::template widen_pair<gradient_dtype>(c.gradient + size_of<gradient_dtype>() * (at + half), g + 2);
    for_each_state<Rule>([&](int k, auto code) {
      if (c.zero_state) {
        for (int v = 0; v < 4; ++v) states[n][k][v] = V::zero();
      } else {
        decode_group<decltype(code), V>(c.state[k] + at, units[k], states[n][k]);
      }
    });
    for (int v = 0; v < 4; ++v) g[v] = V::mul(g[v], c.grad_scale);
    if (c.mode == Decay::kL2)
      for (int v = 0; v < 4; ++v) g[v] = with_l2_term(c, g[v], p[v]);
    if (c.mode == Decay::kDecoupled)
      for (int v = 0; v < 4; ++v) p[v] = V::mul(p[v], c.decay);
    for (int v = 0; v < 4; ++v) {
      F state[Rule::kStates];
      for (int k = 0; k < Rule::kStates; ++k) state[k] = states[n][k][v];
      p[v] = V::sub(p[v], Rule::template change<V>(c.scalars, g[v], state));
      for (int k = 0; k < Rule::kStates; ++k) {
        // A root has no sign to take away, unless it is -0 or NaN: bits with a sign are above all others, which makes
        // the block rare.
        states[n][k][v] = Rule::is_root(k) ? V::sqrt(state[k]) : state[k];
        const I bits = V::int_of(states[n][k][v]);
        magnitudes[n][k][v] = Rule::is_root(k) ? bits : V::and_ints(bits, V::template constant<0x7fffffffu>());
      }
      random[n][v] = c.random_of_group(at, v);
    }
  }

  std::uint32_t new_scales[kMaxStates];
  bool is_rare = false;
  for_each_state<Rule>([&](int k, auto code) {
    using Code = decltype(code);
    I greatest = magnitudes[0][k][0];
    for (int n = 0; n < groups; ++n)
      for (int v = 0; v < 4; ++v) greatest = V::max_ints(greatest, magnitudes[n][k][v]);
    const std::uint32_t bits = V::greatest(greatest);
    // Rare: what would need the greatest scale, or is beyond it; infinity and NaN included.
    is_rare |= bits > (Code::kGreatestScale << 23) - (1u << kCut<Code>);
    const std::uint32_t scale = (bits + (1u << kCut<Code>)-1) >> 23;
    new_scales[k] = scale < Code::kLeastScale ? 0 : scale;
  });
  if constexpr (weight_dtype != kNone) {
    for (int n = 0; n < groups; ++n) {
      I bits[4];
      for (int v = 0; v < 4; ++v) {
        const I added = V::template shift_ints<24>(V::mul_ints(random[n][v], V::template constant<kMasterRandom>()));
        bits[v] = V::add_ints(V::int_of(masters[n][v]), added);
      }
      const I upper_half = V::template constant<0xffff0000u>();
      // Words of 16 bits in the order of memory: `upper` is the upper plane, `lower` has the 16 bits below.
      for (int pair = 0; pair < 2; ++pair) {
        const I even = bits[2 * pair], odd = bits[2 * pair + 1];
        upper[n][pair] = V::select(upper_half, odd, V::template shift_ints<16>(even));
        lower[n][pair] = V::select(upper_half, V::template shift_left<16>(odd), even);
        if constexpr (weight_dtype == kFloat16) {
          const I stored = V::template constant<0xffffff00u>();
          masters[n][2 * pair] = V::float_of(V::and_ints(even, stored));
          masters[n][2 * pair + 1] = V::float_of(V::and_ints(odd, stored));
        }
      }
      is_rare |= V::any_not_finite(upper[n][0], upper[n][1]);
    }
  }
  if (__builtin_expect(is_rare, false)) return false;

  for (int n = 0; n < groups; ++n) {
    const std::uint64_t at = i + group * n;
    if constexpr (weight_dtype == kNone) {
      V::store_pair(c.new_master + 4 * at, masters[n]);
      V::store_pair(c.new_master + 4 * (at + half), masters[n] + 2);
    } else {
      const bool past_caches = reinterpret_cast<std::uintptr_t>(c.new_weight + 2 * at) % V::kPairBytes == 0;
      for (int pair = 0; pair < 2; ++pair) {
        V::store_int(c.new_master + 2 * (at + half * pair), upper[n][pair]);
        I rounded;
        if constexpr (weight_dtype == kBfloat16) {
          rounded = V::round_words(upper[n][pair], lower[n][pair]);
        } else {
          rounded = V::narrow_pair(masters[n][2 * pair], masters[n][2 * pair + 1]);
        }
        Byte* weight = c.new_weight + 2 * (at + half * pair);
        if (past_caches) {
          V::stream_int(weight, rounded);
        } else {
          V::store_int(weight, rounded);
        }
      }
      const I first = V::template shift_ints<8>(lower[n][0]);
      const I bytes = V::select(V::template constant<0x00ff00ffu>(), first, lower[n][1]);
      V::store_int(c.new_master_low + at, V::from_lanes(V::swap_middle(bytes)));
    }
    I codes[kMaxStates];
    for_each_state<Rule>([&](int k, auto code) {
      codes[k] = encode_group<decltype(code), V>(magnitudes[n][k], random[n], new_scales[k]);
    });
    // Set the signs of codes that are not 0; then store 0 where the code of a root is 0.
    for_each_state<Rule>([&](int k, auto) {
      if (Rule::is_root(k)) return;
      const F* values = states[n][k];
      const I signs = V::signs(values[0], values[1], values[2], values[3]);
      I kept = V::or_and(codes[k], signs, V::template constant<0x80808080u>());
      kept = V::keep_where(kept, codes[k]);
      for (int root = 0; root < Rule::kStates; ++root)
        if (Rule::is_root(root)) kept = V::keep_where(kept, codes[root]);
      codes[k] = kept;
    });
    for (int k = 0; k < Rule::kStates; ++k) V::store_int(c.state[k] + at, V::from_lanes(codes[k]));
  }
  for (int k = 0; k < Rule::kStates; ++k) scales[k] = static_cast<Byte>(new_scales[k]);
  return true;
}

// Update whole blocks. Tensors are never updated one after the other, as `update_apart` does: all of a line is loaded
// at once, or in two loads that follow each other, and stored likewise, so lines that push each other out do so once
// a block.
template <class Rule, int gradient_dtype, int weight_dtype, class V>
void update_blocks(const Segment& segment, std::uint64_t begin, std::uint64_t end) {
  const BlockConstants<V, Rule> c(segment, begin);
  const std::size_t ahead = prefetch_bytes().blocks;
  for (std::uint64_t i = begin; i < end; i += kSharedNumel) {
    constexpr std::uint64_t master_bytes = weight_dtype == kNone ? 4 : 2;
    for (std::uint64_t at = 0; at < master_bytes * kSharedNumel; at += 64)
      prefetch(c.master + master_bytes * i + at, ahead);
    if constexpr (weight_dtype != kNone) prefetch(c.master_low + i, ahead);
    for (int k = 0; k < Rule::kStates; ++k) prefetch(c.state[k] + i, ahead);
    for (std::uint64_t at = 0; at < size_of<gradient_dtype>() * kSharedNumel; at += 64)
      prefetch(c.gradient + size_of<gradient_dtype>() * i + at, ahead);
    if (!update_block<Rule, gradient_dtype, weight_dtype>(c, i))
      update_one_by_one<Rule, gradient_dtype, weight_dtype>(segment, i, i + kSharedNumel);
  }
}

// Update elements [begin, end) of a segment. No other call updates elements of the same blocks. Whole blocks go in
// vectors, if the instruction set has any; what there is of a block at either end goes one by one.
template <class Rule, int gradient_dtype, int weight_dtype>
void Compact8::update(const Segment& segment, std::uint64_t begin, std::uint64_t end) {
  std::uint64_t i = begin;
  while (i < end) {
    const std::uint64_t left = kSharedNumel - (segment.first_index + i) % kSharedNumel;
    if constexpr (Simd::kWidth > 1) {
      if (left == kSharedNumel && end - i >= kSharedNumel) {
        const std::uint64_t stop = i + (end - i) / kSharedNumel * kSharedNumel;
        update_blocks<Rule, gradient_dtype, weight_dtype, Simd>(segment, i, stop);
        i = stop;
        continue;
      }
    }
    const std::uint64_t stop = end - i < left ? end : i + left;
    update_one_by_one<Rule, gradient_dtype, weight_dtype>(segment, i, stop);
    i = stop;
  }
}

template <class Rule>
void Compact8::zero_scales(const Segment& segment, std::uint64_t begin, std::uint64_t end) {
  const std::uint64_t before = segment.first_index % kSharedNumel;
  const std::uint64_t first = (before + begin) / kSharedNumel, last = (before + end + kSharedNumel - 1) / kSharedNumel;
  __builtin_memset(pointer(segment.scales) + Rule::kStates * first, 0, Rule::kStates * (last - first));
}

// Between updates: from stored state to fp32 and back.

// Call `work(i, numel)` for each block of a run, or what the run has of it: `numel` elements from number `i` on.
template <class Work>
inline void for_each_block(const Stored& s, Work work) {
  for (std::uint64_t i = 0; i < s.numel;) {
    const std::uint64_t left = kSharedNumel - (s.first_index + i) % kSharedNumel;
    const std::uint64_t now = s.numel - i < left ? s.numel - i : left;
    work(i, now);
    i += now;
  }
}

// Decode and encode a whole block. They are templates of the vector type, so that they are compiled only for types
// that have what they use: the scalar one has not.

template <class Code, class V>
inline void decode_block(const Byte* codes, float unit, Byte* values) {
  for (std::uint64_t i = 0; i < kSharedNumel; i += 4 * V::kWidth) {
    typename V::F group[4];
    decode_group<Code, V>(codes + i, unit, group);
    V::store_pair(values + 4 * i, group);
    V::store_pair(values + 4 * (i + 2 * V::kWidth), group + 2);
  }
}

// The "random" bits with which `encode_one` and `encode_group` round to nearest: half of a code's last bit, at the
// end from which they take random bits. That is the lower end for roots, the upper one for signed codes.
template <class Code>
constexpr std::uint32_t kHalf = Code::kMantissaBits == Root::kMantissaBits ? 1u << (kCut<Root> - 1) : 1u << 31;

// Encode a whole block of fp32 values. Return false, with nothing stored, if one is rare; see `update_block`. Where a
// code at `roots` is 0, unless that is null, the new code is 0.
template <class Code, class V>
inline bool encode_block(const Byte* values, Byte* codes, Byte* scale, const Byte* roots) {
  using F = typename V::F;
  using I = typename V::I;
  constexpr std::uint64_t group = 4 * V::kWidth, half = 2 * V::kWidth;
  constexpr int groups = kSharedNumel / group;
  constexpr bool is_root = Code::kMantissaBits == Root::kMantissaBits;
  F found[groups][4];
  I magnitudes[groups][4], greatest = V::set1_int(0);
  for (int n = 0; n < groups; ++n) {
    V::load_pair(values + 4 * group * n, found[n]);
    V::load_pair(values + 4 * (group * n + half), found[n] + 2);
    for (int v = 0; v < 4; ++v) {
      if (is_root) found[n][v] = V::sqrt(found[n][v]);
      const I bits = V::int_of(found[n][v]);
      // As in `update_block`.
      magnitudes[n][v] = is_root ? bits : V::and_ints(bits, V::template constant<0x7fffffffu>());
      greatest = V::max_ints(greatest, magnitudes[n][v]);
    }
  }
  const std::uint32_t bits = V::greatest(greatest);
  if (__builtin_expect(bits > (Code::kGreatestScale << 23) - (1u << kCut<Code>), false)) return false;
  std::uint32_t new_scale = (bits + (1u << kCut<Code>)-1) >> 23;
  if (new_scale < Code::kLeastScale) new_scale = 0;
  *scale = static_cast<Byte>(new_scale);
  const I to_nearest = V::template constant<kHalf<Code>>();
  const I random[4] = {to_nearest, to_nearest, to_nearest, to_nearest};
  for (int n = 0; n < groups; ++n) {
    I found_codes = encode_group<Code, V>(magnitudes[n], random, new_scale);
    if (!is_root) {
      const I signs = V::signs(found[n][0], found[n][1], found[n][2], found[n][3]);
      found_codes = V::keep_where(V::or_and(found_codes, signs, V::template constant<0x80808080u>()), found_codes);
    }
    found_codes = V::from_lanes(found_codes);
    if (roots) found_codes = V::keep_where(found_codes, V::load_int(roots + group * n));
    V::store_int(codes + group * n, found_codes);
  }
  return true;
}

// Codes, one for each element, and beside them a scale for each block.
template <class Code>
struct Codes {
  static constexpr FormFacts kFacts = {1, kSharedNumel};
  static void decode(const Stored& s, Byte* values);
  static void encode(const Stored& s, const Byte* values, const Byte* roots);
};

template <class Code>
void Codes<Code>::decode(const Stored& s, Byte* values) {
  const Byte* scale = s.beside;
  for_each_block(s, [&](std::uint64_t begin, std::uint64_t numel) {
    const Byte* codes = s.first + begin;
    Byte* out = values + 4 * begin;
    const float unit = unit_of<Code>(*scale);
    scale += s.stride;
    if constexpr (Simd::kWidth > 1) {
      if (numel == kSharedNumel) return decode_block<Code, Simd>(codes, unit, out);
    }
    for (std::uint64_t i = 0; i < numel; ++i) Single::store(out + 4 * i, decode_one<Code>(codes[i], unit));
  });
}

template <class Code>
void Codes<Code>::encode(const Stored& s, const Byte* values, const Byte* roots) {
  constexpr bool is_root = Code::kMantissaBits == Root::kMantissaBits;
  Byte* scale = s.beside;
  for_each_block(s, [&](std::uint64_t begin, std::uint64_t numel) {
    Byte* codes = s.first + begin;
    const Byte* from = values + 4 * begin;
    const Byte* beside = roots ? roots + begin : nullptr;
    Byte* block_scale = scale;
    scale += s.stride;
    if constexpr (Simd::kWidth > 1) {
      if (numel == kSharedNumel && encode_block<Code, Simd>(from, codes, block_scale, beside)) return;
    }
    float found[kSharedNumel];
    std::uint32_t greatest = 0;
    for (std::uint64_t i = 0; i < numel; ++i) {
      const float value = widen_one<kFloat32>(from + 4 * i);
      found[i] = is_root ? Single::sqrt(value) : value;
      const std::uint32_t magnitude = float_to_bits(found[i]) & 0x7fffffffu;
      if (magnitude > greatest) greatest = magnitude;
    }
    const std::uint32_t new_scale = scale_of<Code>(greatest);
    *block_scale = static_cast<Byte>(new_scale);
    for (std::uint64_t i = 0; i < numel; ++i)
      codes[i] = beside && beside[i] == 0 ? 0 : encode_one<Code>(found[i], kHalf<Code>, new_scale);
  });
}

void decode_planes(const Byte* __restrict__ upper, const Byte* __restrict__ lower, std::uint64_t numel,
                   Byte* __restrict__ values) {
  for (std::uint64_t i = 0; i < numel; ++i) Single::store(values + 4 * i, load_planes(upper + 2 * i, lower + i));
}

// Store fp32 masters, rounded to odd: the last bit that stays is 1 if any of those cut off is.
void encode_planes(Byte* __restrict__ upper, Byte* __restrict__ lower, std::uint64_t numel,
                   const Byte* __restrict__ values) {
  for (std::uint64_t i = 0; i < numel; ++i) {
    const std::uint32_t bits = float_to_bits(widen_one<kFloat32>(values + 4 * i));
    const std::uint32_t odd = (bits & ~0xffu) | (bits & 0xffu ? 0x100u : 0u);
    store_planes(upper + 2 * i, lower + i, bits_to_float(odd), 0);
  }
}

// The upper 16 bits of each element, and beside them the 8 below.
struct Planes {
  static constexpr FormFacts kFacts = {2, 1};
  static void decode(const Stored& s, Byte* values) { decode_planes(s.first, s.beside, s.numel, values); }
  static void encode(const Stored& s, const Byte* values, const Byte*) {
    encode_planes(s.first, s.beside, s.numel, values);
  }
};
