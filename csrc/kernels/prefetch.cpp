#include "prefetch.h"

#include <atomic>
#include <cstring>
#if defined(OFFLOAD_X86_KERNELS)
#include <cpuid.h>
#endif

namespace offload {
namespace {

// Distances for some families of processors; the first row that matches counts. `python bench/kernel.py --tune`
// measures a row. Two processors have been measured: one of Zen 4 (family 25), whose row all Ryzens and EPYCs have,
// and an Intel Xeon with AMX, whose row all others have.
struct Row {
  const char* vendor;  // nullptr: any
  std::uint32_t least_family, most_family;
  PrefetchBytes bytes;
};

constexpr Row kRows[] = {
    {"AuthenticAMD", 23, ~0u, {512, 512}},  // fp32 state, of 2048: 4% faster in AVX2, 14% in AVX-512 (four runs)
    {nullptr, 0, ~0u, {2048, 512}},         // fp32 state, of 512: 5% faster in AVX-512; bf16 moments: 8%
};

std::uint64_t packed(PrefetchBytes bytes) { return std::uint64_t{bytes.together} << 32 | bytes.blocks; }

std::uint64_t of_this_processor() {
  const Processor processor = this_processor();
  return packed(prefetch_of(processor.vendor, processor.family));
}

// Both distances in one word, so that nobody reads two of different settings.
std::atomic<std::uint64_t> current{of_this_processor()};

}  // namespace

Processor this_processor() {
  Processor found{};
#if defined(OFFLOAD_X86_KERNELS)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid(0, &eax, &ebx, &ecx, &edx)) return found;
  // CPUID gives the vendor's twelve letters in this order of registers.
  std::memcpy(found.vendor, &ebx, 4);
  std::memcpy(found.vendor + 4, &edx, 4);
  std::memcpy(found.vendor + 8, &ecx, 4);
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return found;
  // A family above 15 is given as 15 and, in other bits, the rest.
  const unsigned base = eax >> 8 & 15u;
  found.family = base == 15 ? base + (eax >> 20 & 255u) : base;
#endif
  return found;
}

PrefetchBytes prefetch_of(const char* vendor, std::uint32_t family) {
  for (const Row& row : kRows)
    if ((row.vendor == nullptr || std::strcmp(row.vendor, vendor) == 0) && row.least_family <= family &&
        family <= row.most_family)
      return row.bytes;
  return {0, 0};
}

PrefetchBytes prefetch_bytes() {
  const std::uint64_t word = current.load(std::memory_order_relaxed);
  return {static_cast<std::uint32_t>(word >> 32), static_cast<std::uint32_t>(word)};
}

void set_prefetch_bytes(PrefetchBytes bytes) { current.store(packed(bytes), std::memory_order_relaxed); }

}  // namespace offload
