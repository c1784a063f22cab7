// The rows that an update works on, shared with Python byte for byte.
//
// Invariants: Segment is SEGMENT_DTYPE of offload/protocols.py; nothing here owns memory.
// Not done here: checking what the addresses point at (jobs.h checks what can be seen); which state and scalars a
// rule has (rules.h); how a format stores it (formats.h).
#pragma once

#include <cstddef>
#include <cstdint>

namespace offload {

// Element types; DtypeCode of offload/dtypes.py.
enum : std::int32_t { kNone = 0, kBfloat16 = 1, kFloat16 = 2, kFloat32 = 3 };

// What an update does to a segment; SegmentFlag of offload/protocols.py.
enum : std::uint32_t {
  kActive = 1,
  kDecoupledDecay = 2,
  kLoadMaster = 4,
  kZeroState = 8,
  kMatchMaster = 16,
  kAllFlags = 31,
  kTakesMaster = kLoadMaster | kMatchMaster,
};

// One more flag, which only native code sets: the segment is updated block by block, as its state is sealed (seal.h).
constexpr std::uint32_t kInBlocks = std::uint32_t{1} << 31;

// Elements of a block with a checksum: its state stays in the first-level cache, and a checksum, 4 bytes a tensor, is
// small beside it.
constexpr std::uint64_t kBlockNumel = 1024;

constexpr int kMaxStates = 2;
constexpr int kMaxScalars = 11;

// One parameter's run of elements with its own scalars. Addresses are of the first element: the master, state and the
// weight at any multiple of their element's size (fastest at 64), the gradient anywhere. The ranges must not overlap each
// other or another segment's; no two segments share a block whose elements share scales.
struct Segment {
  std::uint64_t master;
  std::uint64_t new_master;  // 0: where the old one is
  std::uint64_t master_low;  // of a master in two planes: 8 bits below the 16 at `master`
  std::uint64_t new_master_low;
  std::uint64_t weight;      // 0: the weight is fp32 and `master` points at it
  std::uint64_t new_weight;  // 0: where the old one is
  std::uint64_t gradient;
  std::uint64_t state[kMaxStates];
  std::uint64_t scales;  // of the first element's block, if there are any: a byte for each state tensor
  std::uint64_t numel;
  std::uint64_t first_index;   // of the first element in the unsharded parameter; used, as the key, by formats that round
  std::uint64_t rounding_key;  // of this update of the parameter
  // 0, or the address of two sums. To them are added the fingerprints of the gradient and of an fp32 weight that has
  // a `new_master`, in this order: of the very bytes that the update of an active segment reads.
  std::uint64_t read;
  std::int32_t gradient_dtype;
  std::int32_t weight_dtype;
  std::uint32_t flags;
  std::uint32_t rule;
  std::uint32_t state_format;  // formats.h
  float grad_scale;
  float decay;
  float scalars[kMaxScalars];
};

static_assert(offsetof(Segment, master) == 0 && offsetof(Segment, new_master) == 8 &&
              offsetof(Segment, master_low) == 16 && offsetof(Segment, new_master_low) == 24 &&
              offsetof(Segment, weight) == 32 && offsetof(Segment, new_weight) == 40 &&
              offsetof(Segment, gradient) == 48 && offsetof(Segment, state) == 56 &&
              offsetof(Segment, scales) == 72 && offsetof(Segment, numel) == 80 &&
              offsetof(Segment, first_index) == 88 && offsetof(Segment, rounding_key) == 96 &&
              offsetof(Segment, read) == 104 && offsetof(Segment, gradient_dtype) == 112 &&
              offsetof(Segment, weight_dtype) == 116 && offsetof(Segment, flags) == 120 &&
              offsetof(Segment, rule) == 124 && offsetof(Segment, state_format) == 128 &&
              offsetof(Segment, grad_scale) == 132 && offsetof(Segment, decay) == 136 &&
              offsetof(Segment, scalars) == 140);
static_assert(sizeof(Segment) == 184, "must match SEGMENT_DTYPE in offload/protocols.py");

// What an update is compiled for beside the element types: the rule, and how state is stored.
inline std::uint64_t variant_of(const Segment& s) { return std::uint64_t{s.rule} << 32 | s.state_format; }

}  // namespace offload
