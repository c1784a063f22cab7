// CRC32C by folding with carry-less multiplications of 512 bits (VPCLMULQDQ, AVX-512).
//
// The message, a polynomial, is cut into blocks of 16 bytes, and what has been read so far is kept as 16 of them. Moving
// a block D bits further from the end multiplies it by x^D: its two halves are multiplied by x^(D+32) and x^(D-32)
// modulo P, both shifted by one for the reflection, and what comes out is 16 bytes again (V. Gopal et al., "Fast CRC
// Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009). Four registers are folded 2048 bits at
// a time, so the multiplier's latency is hidden and the rate is that of memory.
#include "crc32c.h"

#if defined(__x86_64__)

#include <immintrin.h>

namespace offload {
namespace {

constexpr std::uint64_t shifted(std::uint64_t exponent) {
  return std::uint64_t{crc32c_detail::power_of_x(exponent)} << 1;
}

// Factors that move a block by kBits: for its first eight bytes, and for its last.
template <std::uint64_t kBits>
constexpr std::uint64_t kFirst = shifted(kBits + 32);
template <std::uint64_t kBits>
constexpr std::uint64_t kLast = shifted(kBits - 32);

template <std::uint64_t kBits>
inline __m512i folded(__m512i block, __m512i data) {
  const __m512i factors = _mm512_set4_epi64(kLast<kBits>, kFirst<kBits>, kLast<kBits>, kFirst<kBits>);
  const __m512i first = _mm512_clmulepi64_epi128(block, factors, 0x00);
  const __m512i last = _mm512_clmulepi64_epi128(block, factors, 0x11);
  return _mm512_ternarylogic_epi64(first, last, data, 0x96);
}

inline __m128i folded(__m128i block, __m128i data) {
  const __m128i factors = _mm_set_epi64x(kLast<128>, kFirst<128>);
  const __m128i first = _mm_clmulepi64_si128(block, factors, 0x00);
  const __m128i last = _mm_clmulepi64_si128(block, factors, 0x11);
  return _mm_xor_si128(_mm_xor_si128(first, last), data);
}

}  // namespace

std::uint32_t crc32c_vpclmul(std::uint32_t seed, const void* data, std::size_t nbytes) noexcept {
  constexpr std::size_t kStride = 256;
  if (nbytes < 2 * kStride) return crc32c_sse42(seed, data, nbytes);
  const auto* bytes = static_cast<const std::uint8_t*>(data);
  __m512i a = _mm512_loadu_si512(bytes);
  __m512i b = _mm512_loadu_si512(bytes + 64);
  __m512i c = _mm512_loadu_si512(bytes + 128);
  __m512i d = _mm512_loadu_si512(bytes + 192);
  a = _mm512_xor_si512(a, _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(~seed))));
  for (bytes += kStride, nbytes -= kStride; nbytes >= kStride; bytes += kStride, nbytes -= kStride) {
    a = folded<2048>(a, _mm512_loadu_si512(bytes));
    b = folded<2048>(b, _mm512_loadu_si512(bytes + 64));
    c = folded<2048>(c, _mm512_loadu_si512(bytes + 128));
    d = folded<2048>(d, _mm512_loadu_si512(bytes + 192));
  }
  const __m512i whole = folded<512>(folded<512>(folded<512>(a, b), c), d);
  __m128i block = _mm512_extracti32x4_epi32(whole, 0);
  block = folded(block, _mm512_extracti32x4_epi32(whole, 1));
  block = folded(block, _mm512_extracti32x4_epi32(whole, 2));
  block = folded(block, _mm512_extracti32x4_epi32(whole, 3));
  // What is left is a message of 16 bytes with the same remainder.
  std::uint64_t state = _mm_crc32_u64(0, static_cast<std::uint64_t>(_mm_extract_epi64(block, 0)));
  state = _mm_crc32_u64(state, static_cast<std::uint64_t>(_mm_extract_epi64(block, 1)));
  return crc32c_sse42(~static_cast<std::uint32_t>(state), bytes, nbytes);
}

}  // namespace offload

#endif
