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

// Write the programs of an update to `programs`, which has room for `room` of them, and return its launches; too
// little room is a problem. The programs are in the order of the launches.
//
// A program updates `block_numel` elements, or fewer at a segment's ends. The first one of a segment begins where the
// elements begin that share scales with the segment's first element. Segments that do not change have no programs.
UpdatePrograms update_programs(const Segment* table, std::size_t rows, std::uint64_t block_numel, Program* programs,
                               std::size_t room);

// Write the programs of rows with these sizes, of which the first lies at `sizes` and each other one `stride` numbers
// after the one before: a program for each started block. Return how many there are. If there is no room for all,
// none is written.
std::uint64_t row_programs(const std::uint64_t* sizes, std::size_t rows, std::size_t stride, std::uint64_t block,
                           Program* programs, std::size_t room);

}  // namespace offload
