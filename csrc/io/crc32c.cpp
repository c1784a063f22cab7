// Table version, combination and choice; the fast versions have files of their own.
#include "crc32c.h"

#include <array>
#include <cstring>

namespace offload {
namespace {

using crc32c_detail::kPolynomial;

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

// tables[k][b]: what byte b contributes when k more bytes follow it.
constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) ? kPolynomial : 0u);
    tables[0][byte] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k)
    for (std::size_t byte = 0; byte < 256; ++byte)
      tables[k][byte] = (tables[k - 1][byte] >> 8) ^ tables[0][tables[k - 1][byte] & 0xff];
  return tables;
}

constexpr Tables kTables = make_tables();

using Implementation = std::uint32_t (*)(std::uint32_t, const void*, std::size_t) noexcept;

Implementation choose() noexcept {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul")) {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq")) return crc32c_vpclmul;
    return crc32c_sse42;
  }
#endif
  return crc32c_portable;
}

Implementation chosen() noexcept {
  static const Implementation implementation = choose();
  return implementation;
}

}  // namespace

std::uint32_t crc32c_portable(std::uint32_t seed, const void* data, std::size_t nbytes) noexcept {
  const auto* bytes = static_cast<const std::uint8_t*>(data);
  std::uint32_t crc = ~seed;
  for (; nbytes >= 8; nbytes -= 8, bytes += 8) {
    const std::uint32_t low = crc ^ (std::uint32_t{bytes[0]} | std::uint32_t{bytes[1]} << 8 |
                                     std::uint32_t{bytes[2]} << 16 | std::uint32_t{bytes[3]} << 24);
    crc = kTables[7][low & 0xff] ^ kTables[6][(low >> 8) & 0xff] ^ kTables[5][(low >> 16) & 0xff] ^
          kTables[4][low >> 24] ^ kTables[3][bytes[4]] ^ kTables[2][bytes[5]] ^ kTables[1][bytes[6]] ^
          kTables[0][bytes[7]];
  }
  for (; nbytes != 0; --nbytes, ++bytes) crc = (crc >> 8) ^ kTables[0][(crc ^ *bytes) & 0xff];
  return ~crc;
}

std::uint32_t crc32c(std::uint32_t seed, const void* data, std::size_t nbytes) noexcept {
  return chosen()(seed, data, nbytes);
}

std::uint32_t crc32c_combine(std::uint32_t crc_a, std::uint32_t crc_b, std::uint64_t nbytes_b) noexcept {
  // Appending n bytes multiplies the first part by x^(8n); the inversions cancel.
  return crc32c_detail::multiply(crc32c_detail::power_of_x(8 * nbytes_b), crc_a) ^ crc_b;
}

const char* crc32c_implementation() noexcept {
  if (chosen() == crc32c_portable) return "portable";
#if defined(__x86_64__)
  if (chosen() == crc32c_vpclmul) return "avx512";
#endif
  return "sse4.2";
}

}  // namespace offload
