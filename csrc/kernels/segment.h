// The rows that an update works on, shared with Python byte for byte.
//
// Invariants: Segment is SEGMENT_DTYPE of offload/protocols.py; nothing here owns memory.
// Not done here: checking what the addresses point at (validate.h checks what can be seen).
#pragma once

#include <cstddef>
#include <cstdint>

namespace offload {

// Element types; DtypeCode of offload/protocols.py.
enum : std::int32_t { kNone = 0, kBfloat16 = 1, kFloat16 = 2, kFloat32 = 3 };

// What an update does to a segment; SegmentFlag of offload/protocols.py.
enum : std::uint32_t {
  kActive = 1,
  kDecoupledDecay = 2,
  kLoadMaster = 4,
  kZeroMoments = 8,
  kAllFlags = 15,
};

// One parameter's run of elements with its own scalars. Addresses are of the first element: state is
// fp32 at any multiple of 4 (fastest at 64), the weight at any multiple of its element size, the
// gradient anywhere. The five ranges must not overlap each other or another segment's.
struct Segment {
  std::uint64_t master;
  std::uint64_t exp_avg;
  std::uint64_t exp_avg_sq;
  std::uint64_t gradient;
  std::uint64_t weight;  // 0: the weight is fp32 and `master` points at it
  std::uint64_t numel;
  std::int32_t gradient_dtype;
  std::int32_t weight_dtype;
  std::uint32_t flags;
  float grad_scale;
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float inv_bias2_sqrt;
  float eps;
  float step_size;
  float decay;
};

static_assert(offsetof(Segment, master) == 0 && offsetof(Segment, exp_avg) == 8 &&
              offsetof(Segment, exp_avg_sq) == 16 && offsetof(Segment, gradient) == 24 &&
              offsetof(Segment, weight) == 32 && offsetof(Segment, numel) == 40);
static_assert(offsetof(Segment, gradient_dtype) == 48 && offsetof(Segment, weight_dtype) == 52 &&
              offsetof(Segment, flags) == 56 && offsetof(Segment, grad_scale) == 60 &&
              offsetof(Segment, beta1) == 64 && offsetof(Segment, one_minus_beta1) == 68 &&
              offsetof(Segment, beta2) == 72 && offsetof(Segment, one_minus_beta2) == 76 &&
              offsetof(Segment, inv_bias2_sqrt) == 80 && offsetof(Segment, eps) == 84 &&
              offsetof(Segment, step_size) == 88 && offsetof(Segment, decay) == 92);
static_assert(sizeof(Segment) == 96, "must match SEGMENT_DTYPE in offload/protocols.py");

}  // namespace offload
