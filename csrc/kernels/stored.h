// State as fp32, from what it is stored in and back, rounded to nearest: for everybody who looks at it between updates.
// offload/kernels/reference/ defines the numbers. Included by body.h, in its unnamed namespace.

// Return `numel` elements of a run, from number `begin` on: 0, or the first element of a block.
inline Stored part_of(const Stored& s, std::uint64_t begin, std::uint64_t numel) {
  Stored part = s;
  const FormFacts facts = facts_of_form(s.form);
  part.first += facts.item_bytes * begin;
  part.beside += s.stride * ((s.first_index % facts.block_numel + begin) / facts.block_numel);
  part.first_index += begin;
  part.numel = numel;
  return part;
}

// Round fp32 values to a 16-bit dtype, to nearest even.
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
    default:
      with_form(s.form, 0, [&](auto form) { return form.encode(s, from, roots), 0; });
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
    default:
      with_form(s.form, 0, [&](auto form) { return form.decode(s, values), 0; });
  }
}

// KernelSet::decode. To a 16-bit dtype, it goes by way of fp32 in pieces that stay in the first-level cache.
void decode(const Stored& s, void* values, std::int32_t dtype) {
  Byte* out = static_cast<Byte*>(values);
  if (dtype == kFloat32) return decode_to_float(s, out);
  alignas(64) Byte piece[4 * kNormBlockNumel];
  for (std::uint64_t i = 0; i < s.numel;) {
    const std::uint64_t room = kNormBlockNumel - (s.first_index + i) % kNormBlockNumel;  // whole blocks of any form
    const std::uint64_t now = s.numel - i < room ? s.numel - i : room;
    decode_to_float(part_of(s, i, now), piece);
    encode(Stored{dtype, out + 2 * i, nullptr, 0, 0, now}, piece, nullptr);
    i += now;
  }
}
