// How far ahead of its use an update asks for memory: a distance in bytes for each family of processor.
//
// Invariant: numbers do not depend on it. Not done here: asking (`prefetch` in body.h).
#pragma once

#include <cstdint>

namespace offload {

// In bytes; 0 asks for what is being read, which gains nothing and costs next to nothing.
struct PrefetchBytes {
  std::uint32_t together;  // all tensors side by side
  std::uint32_t blocks;    // block by block, where elements share scales
};

constexpr std::uint32_t kMostPrefetchBytes = 65536;

struct Processor {
  char vendor[13];  // as CPUID says it, "GenuineIntel"; empty where there is no CPUID
  std::uint32_t family;
};

Processor this_processor();

// What the table has for a processor.
PrefetchBytes prefetch_of(const char* vendor, std::uint32_t family);

// What updates use: the table's for this processor, unless it was set. From any thread; `set` is for measuring, and
// for the user's own choice, and acts on pieces of work that begin later.
PrefetchBytes prefetch_bytes();
void set_prefetch_bytes(PrefetchBytes bytes);

}  // namespace offload
