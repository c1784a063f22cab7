// CRC32C (Castagnoli, reflected polynomial 0x82f63b78), as in RFC 3720 appendix B.4.
//
// Every function takes and returns finished checksums (both inversions applied), so
// crc32c(crc32c(0, a), b) is the checksum of a followed by b. All are pure and may be
// called from any thread; data needs no alignment.
#pragma once

#include <cstddef>
#include <cstdint>

namespace offload {

// Checksum of nbytes at data, continuing from seed (0 at the start). Chooses the fastest
// implementation that this processor has, once.
std::uint32_t crc32c(std::uint32_t seed, const void* data, std::size_t nbytes) noexcept;

// Checksum of a followed by b, from theirs and the length of b alone.
std::uint32_t crc32c_combine(std::uint32_t crc_a, std::uint32_t crc_b, std::uint64_t nbytes_b) noexcept;

// The oracle: tables only, any processor.
std::uint32_t crc32c_portable(std::uint32_t seed, const void* data, std::size_t nbytes) noexcept;

// "avx512", "sse4.2" or "portable": what crc32c uses here.
const char* crc32c_implementation() noexcept;

#if defined(__x86_64__)
// Needs SSE4.2 and PCLMULQDQ; the caller has made sure of both.
std::uint32_t crc32c_sse42(std::uint32_t seed, const void* data, std::size_t nbytes) noexcept;
#endif

namespace crc32c_detail {

constexpr std::uint32_t kPolynomial = 0x82f63b78u;

// Product of two polynomials modulo the CRC's, reflected: bit 31 is the coefficient of x^0.
constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (int bit = 31; bit >= 0; --bit) {
    if ((a >> bit) & 1u) product ^= b;
    b = (b >> 1) ^ ((b & 1u) ? kPolynomial : 0u);
  }
  return product;
}

// x to the power of exponent, modulo the CRC's polynomial.
constexpr std::uint32_t power_of_x(std::uint64_t exponent) {
  std::uint32_t result = 0x80000000u;
  std::uint32_t square = 0x40000000u;
  for (; exponent != 0; exponent >>= 1) {
    if (exponent & 1u) result = multiply(result, square);
    square = multiply(square, square);
  }
  return result;
}

}  // namespace crc32c_detail
}  // namespace offload
