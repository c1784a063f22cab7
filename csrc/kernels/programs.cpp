#include "programs.h"

#include <algorithm>
#include <tuple>

#include "kernels.h"

namespace offload {
namespace {

// What a segment's programs are compiled for: variant_of, dtypes of gradient and weight, whether all is aligned.
using Key = std::tuple<std::uint64_t, std::int32_t, std::int32_t, bool>;

// A segment that has something to do.
struct Touched {
  Key key;
  std::uint32_t row;
  std::uint64_t blocks;
};

std::uint64_t item_bytes(std::int32_t dtype) { return dtype == kBfloat16 || dtype == kFloat16 ? 2 : 4; }

// Whether the address `before` elements before this one is a multiple of four elements of `item` bytes. Where there
// is no tensor, the address is 0, which counts as aligned.
bool aligned(std::uint64_t address, std::uint64_t before, std::uint64_t item) {
  return address == 0 || (address - before * item) % (4 * item) == 0;
}

// Whether all tensors of a segment but its scales are aligned where its first program begins: `before` elements
// before the segment.
bool all_aligned(const Segment& s, const FormatFacts& facts, std::int32_t gradient, std::int32_t weight,
                 std::uint64_t before) {
  const std::uint64_t master_item = s.weight != 0 ? facts.master_bytes : 4;
  const std::uint64_t weight_item = item_bytes(weight);
  bool all = gradient == kNone || aligned(s.gradient, before, item_bytes(gradient));
  for (const std::uint64_t address : {s.weight, s.new_weight}) all = all && aligned(address, before, weight_item);
  for (const std::uint64_t address : {s.master, s.new_master}) all = all && aligned(address, before, master_item);
  for (const std::uint64_t address : {s.master_low, s.new_master_low}) all = all && aligned(address, before, 1);
  for (const std::uint64_t address : s.state) all = all && aligned(address, before, facts.state_bytes);
  return all;
}

// Write a program for each block of a row; return where the next row's begin.
Program* write(Program* programs, std::uint32_t row, std::uint64_t blocks) {
  for (std::uint64_t block = 0; block < blocks; ++block)
    *programs++ = {static_cast<std::int32_t>(row), static_cast<std::int32_t>(block)};
  return programs;
}

}  // namespace

UpdatePrograms update_programs(const Segment* table, std::size_t rows, std::uint64_t block_numel, Program* programs,
                               std::size_t room) {
  std::vector<Touched> touched;
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < rows; ++i) {
    const Segment& s = table[i];
    if (s.numel == 0 || (s.flags & (kActive | kTakesMaster | kZeroState)) == 0) continue;
    const FormatFacts facts = format_facts(s);
    const std::int32_t gradient = (s.flags & kActive) != 0 ? s.gradient_dtype : std::int32_t{kNone};
    const std::int32_t weight = s.weight != 0 ? s.weight_dtype : std::int32_t{kNone};
    if (gradient != kNone && s.gradient % item_bytes(gradient) != 0)
      return {"segment " + std::to_string(i) + ": gradient is not aligned to its elements", {}};
    const std::uint64_t before = s.first_index % facts.block_numel;
    const std::uint64_t blocks = (before + s.numel + block_numel - 1) / block_numel;
    touched.push_back({{variant_of(s), gradient, weight, all_aligned(s, facts, gradient, weight, before)},
                       static_cast<std::uint32_t>(i), blocks});
    total += blocks;
  }
  if (total > room) return {"its programs have no room", {}};
  std::stable_sort(touched.begin(), touched.end(), [](const Touched& a, const Touched& b) { return a.key < b.key; });
  UpdatePrograms found;
  const Key* last = nullptr;
  for (const Touched& one : touched) {
    if (last == nullptr || *last != one.key) {
      const auto& [variant, gradient, weight, is_aligned] = one.key;
      found.launches.push_back({&table[one.row], gradient, weight, is_aligned, 0});
    }
    last = &one.key;
    found.launches.back().count += one.blocks;
    programs = write(programs, one.row, one.blocks);
  }
  return found;
}

std::uint64_t row_programs(const std::uint64_t* sizes, std::size_t rows, std::size_t stride, std::uint64_t block,
                           Program* programs, std::size_t room) {
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < rows; ++i) total += (sizes[i * stride] + block - 1) / block;
  if (total > room) return total;
  for (std::size_t i = 0; i < rows; ++i)
    programs = write(programs, static_cast<std::uint32_t>(i), (sizes[i * stride] + block - 1) / block);
  return total;
}

}  // namespace offload
