// Which programs a kernel on a GPU is launched with: for each one the row of a table, and which of the row's blocks.
//
// Invariants: rows of one launch follow each other in the table's order, and the blocks of a row do.
// Not done here: launching; copying a table to the GPU; checking rows (jobs.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "segment.h"

namespace offload {

// What a program takes: int32, as the kernels read them.
struct Program {
  std::int32_t row;
  std::int32_t block;
};

// Programs of an update that are compiled alike, which follow each other.
struct Launch {
  const Segment* first;   // in the table: all have its rule, and store state as it does
  std::int32_t gradient;  // dtype code; kNone where the segments are not active
  std::int32_t weight;    // kNone where it is the master
  bool aligned;           // every address, at the begin of its block, is a multiple of four elements
  std::uint64_t count;
};

struct UpdatePrograms {
  std::string problem;  // what is wrong with the table; nothing has been written then
  std::vector<Launch> launches;
};

// Return the programs of an update, `block_numel` elements each, or fewer at a segment's ends. The first one of a
// segment begins where the elements that share scales with the segment's first one do. Segments that have nothing to
// do have none. At most `room` programs are written.
UpdatePrograms update_programs(const Segment* table, std::size_t rows, std::uint64_t block_numel, Program* programs,
                               std::size_t room);

// Write the programs of `rows` sizes, which are `stride` numbers apart: one for each started block. Return how many
// there are, or would be if there were room.
std::uint64_t row_programs(const std::uint64_t* sizes, std::size_t rows, std::size_t stride, std::uint64_t block,
                           Program* programs, std::size_t room);

}  // namespace offload
