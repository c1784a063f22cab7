// State as fp32, from what it is stored in and back, rounded to nearest, masters of 24 bits to odd: for everybody who
// looks at it between updates.
// offload/kernels/reference/ defines the numbers. Included by body.h, in its unnamed namespace, after compact8.h.

// Return the elements of a run from the `begin`-th on, which is the first of its block unless it is the run's.
inline Stored part_of(const Stored& s, std::uint64_t begin, std::uint64_t numel) {
  Stored part = s;
  const std::uint64_t item = s.form == kFloat32 ? 4 : s.form == kSigned || s.form == kRoot ? 1 : 2;
  part.first += item * begin;
  part.beside += s.form == kPlanes ? begin : s.stride * ((s.first_index % kBlockNumel + begin) / kBlockNumel);
  part.first_index += begin;
  part.numel = numel;
  return part;
}

// Call `work(i, numel)` for each block of a run, or what the run has of it.
template <class Work>
inline void for_each_block(const Stored& s, Work work) {
  for (std::uint64_t i = 0; i < s.numel;) {
    const std::uint64_t left = kBlockNumel - (s.first_index + i) % kBlockNumel;
    const std::uint64_t now = s.numel - i < left ? s.numel - i : left;
    work(i, now);
    i += now;
  }
}

// Decode and encode a whole block. Templates of the vector type, so that the scalar one needs nothing of what they use.

template <class Code, class V>
inline void decode_block(const Byte* codes, float unit, Byte* values) {
  for (std::uint64_t i = 0; i < kBlockNumel; i += 4 * V::kWidth) {
    typename V::F group[4];
    decode_group<Code, V>(codes + i, unit, group);
    V::store_pair(values + 4 * i, group);
    V::store_pair(values + 4 * (i + 2 * V::kWidth), group + 2);
  }
}

// The random bits with which `encode_one` and `encode_group` round to nearest.
template <class Code>
constexpr std::uint32_t kHalf = Code::kMantissaBits == Root::kMantissaBits ? 1u << (kCut<Root> - 1) : 1u << 31;

// Return whether it could be done, else nothing has been stored.
template <class Code, class V>
inline bool encode_block(const Byte* values, Byte* codes, Byte* scale, const Byte* roots) {
  using F = typename V::F;
  using I = typename V::I;
  constexpr std::uint64_t group = 4 * V::kWidth, half = 2 * V::kWidth;
  constexpr int groups = kBlockNumel / group;
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

template <class Code>
void decode_codes(const Stored& s, Byte* values) {
  const Byte* scale = s.beside;
  for_each_block(s, [&](std::uint64_t begin, std::uint64_t numel) {
    const Byte* codes = s.first + begin;
    Byte* out = values + 4 * begin;
    const float unit = unit_of<Code>(*scale);
    scale += s.stride;
    if constexpr (Simd::kWidth > 1) {
      if (numel == kBlockNumel) return decode_block<Code, Simd>(codes, unit, out);
    }
    for (std::uint64_t i = 0; i < numel; ++i) Single::store(out + 4 * i, decode_one<Code>(codes[i], unit));
  });
}

template <class Code>
void encode_codes(const Stored& s, const Byte* values, const Byte* roots) {
  constexpr bool is_root = Code::kMantissaBits == Root::kMantissaBits;
  Byte* scale = s.beside;
  for_each_block(s, [&](std::uint64_t begin, std::uint64_t numel) {
    Byte* codes = s.first + begin;
    const Byte* from = values + 4 * begin;
    const Byte* beside = roots ? roots + begin : nullptr;
    Byte* block_scale = scale;
    scale += s.stride;
    if constexpr (Simd::kWidth > 1) {
      if (numel == kBlockNumel && encode_block<Code, Simd>(from, codes, block_scale, beside)) return;
    }
    float found[kBlockNumel];
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

void encode_planes(Byte* __restrict__ upper, Byte* __restrict__ lower, std::uint64_t numel,
                   const Byte* __restrict__ values) {
  for (std::uint64_t i = 0; i < numel; ++i) {
    const std::uint32_t bits = float_to_bits(widen_one<kFloat32>(values + 4 * i));
    const std::uint32_t odd = (bits & ~0xffu) | (bits & 0xffu ? 0x100u : 0u);
    store_planes(upper + 2 * i, lower + i, bits_to_float(odd), 0);
  }
}

template <int dtype>
void round_elements(const Byte* values, std::uint64_t numel, Byte* out) {
  std::uint64_t i = 0;
  for (; i + Simd::kWidth <= numel; i += Simd::kWidth)
    Simd::store_half(out + 2 * i, Simd::template narrow<dtype>(Simd::load(values + 4 * i)));
  for (; i < numel; ++i) Single::store_half(out + 2 * i, Single::narrow<dtype>(Single::load(values + 4 * i)));
}

void encode(const Stored& s, const void* values, const unsigned char* roots) {
  const Byte* from = static_cast<const Byte*>(values);
  switch (s.form) {
    case kBfloat16:
      return round_elements<kBfloat16>(from, s.numel, s.first);
    case kFloat16:
      return round_elements<kFloat16>(from, s.numel, s.first);
    case kFloat32:
      __builtin_memcpy(s.first, from, 4 * s.numel);
      return;
    case kPlanes:
      return encode_planes(s.first, s.beside, s.numel, from);
    case kSigned:
      return encode_codes<Signed>(s, from, roots);
    default:
      return encode_codes<Root>(s, from, roots);
  }
}

void decode_to_float(const Stored& s, Byte* values) {
  switch (s.form) {
    case kBfloat16:
      return copy_block<kBfloat16>(s.first, s.numel, values, kFloat32);
    case kFloat16:
      return copy_block<kFloat16>(s.first, s.numel, values, kFloat32);
    case kFloat32:
      return copy_block<kFloat32>(s.first, s.numel, values, kFloat32);
    case kPlanes:
      return decode_planes(s.first, s.beside, s.numel, values);
    case kSigned:
      return decode_codes<Signed>(s, values);
    default:
      return decode_codes<Root>(s, values);
  }
}

void decode(const Stored& s, void* values, std::int32_t dtype) {
  Byte* out = static_cast<Byte*>(values);
  if (dtype == kFloat32) return decode_to_float(s, out);
  alignas(64) Byte piece[4 * kNormBlockNumel];
  for (std::uint64_t i = 0; i < s.numel;) {
    const std::uint64_t room = kNormBlockNumel - (s.first_index + i) % kBlockNumel;
    const std::uint64_t now = s.numel - i < room ? s.numel - i : room;
    decode_to_float(part_of(s, i, now), piece);
    encode(Stored{dtype, out + 2 * i, nullptr, 0, 0, now}, piece, nullptr);
    i += now;
  }
}
