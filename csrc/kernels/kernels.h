// What each instruction set provides: plain functions over ranges, no threads, no allocation.
//
// Invariants: all sets give the same bits for the same input (offload/kernels/reference/ says which);
// how a range is cut never changes a number. Callers run them with the default floating-point
// environment (float_environment.h). Every function may run on many threads over disjoint ranges.
// Not done here: choosing a set (dispatch.h), splitting work and checking arguments (jobs.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "segment.h"

namespace offload {

// Elements whose squares one fixed tree adds; NORM_BLOCK_NUMEL of offload/protocols.py.
constexpr std::size_t kNormBlockNumel = 4096;

// Ways to stream over an update's bytes; combined by `|`. For measuring bandwidth only.
enum : std::uint32_t {
  kStreamWeightNontemporal = 1,
  kStreamStateNontemporal = 2,
  kStreamTensorByTensor = 4,  // 4096 elements of one tensor, then of the next, instead of all side by side
  kStreamPrefetch = 8,        // side by side only: ask for what is kStreamAhead bytes ahead
};

constexpr std::size_t kStreamAhead = 512;

// How a segment's state is stored: kStateBytes, kMasterBytes and kBlockNumel of its format (formats.h). All are 0 if
// there is no such format.
struct FormatFacts {
  std::size_t state_bytes, master_bytes;
  std::uint64_t block_numel;
};
FormatFacts format_facts(const Segment& segment);

// How one state tensor is stored in a form: an element type of segment.h, or a form of formats.h, which has a second
// address, `beside` the first. item_bytes is 0 if there is no such form.
struct FormFacts {
  std::uint32_t item_bytes;   // of an element at the first address
  std::uint64_t block_numel;  // elements that share what lies beside
};
FormFacts form_facts(std::int32_t form);

// Where a run of a state tensor is stored. Addresses at any alignment.
struct Stored {
  std::int32_t form;
  unsigned char* first;   // of two planes: the upper one
  unsigned char* beside;  // of two planes: the lower one; of codes: the scale of the first element's block
  std::uint64_t stride;   // bytes from a block's scale to the next one's
  std::uint64_t first_index;  // of the first element in the unsharded parameter
  std::uint64_t numel;
};

struct KernelSet {
  const char* name;

  // Update elements [begin, end) of a segment, as its flags say.
  void (*update)(const Segment& segment, std::uint64_t begin, std::uint64_t end);

  // Write the sums of squares of `numel` elements, one double for each started block of 4096. Unless
  // `destination` is null, also copy the elements there (same dtype, or 16-bit widened to fp32).
  // Source anywhere; destination anywhere that does not overlap it, or the source itself.
  // Return the part that these elements have in the fingerprint of the destination, or of the source where there is
  // none; `first` is the position of the first of them in their gradient, a multiple of kNormBlockNumel.
  std::uint64_t (*gradient_blocks)(const void* source, std::int32_t source_dtype, std::uint64_t numel, double* blocks,
                                   void* destination, std::int32_t destination_dtype, std::uint64_t first);

  // Return the part that `nbytes` bytes have in the fingerprint of a gradient, `first_byte` (a multiple of 8) being
  // the position of the first of them. A gradient's fingerprint is the sum of its parts modulo 2^64.
  std::uint64_t (*fingerprint)(const void* source, std::uint64_t nbytes, std::uint64_t first_byte);

  // Add elements to others that do not overlap them: in fp32, rounded to their dtype.
  void (*add)(void* target, const void* source, std::int32_t dtype, std::uint64_t numel);

  // Write what is stored to `values`, rounded to a dtype.
  void (*decode)(const Stored& stored, void* values, std::int32_t dtype);

  // Store fp32 values, rounded to nearest, or to odd in planes. `roots` is null, or the codes of the roots that these
  // values are divided by: where such a code is 0, so is the code that is stored. Other forms do not look at them.
  void (*encode)(const Stored& stored, const void* values, const unsigned char* roots);

  // Touch the bytes that an update of [begin, end) touches (negated state, gradient copied to the
  // weight) with next to no arithmetic. Gradient and weight must have the same element size.
  void (*stream)(const Segment& segment, std::uint64_t begin, std::uint64_t end, std::uint32_t variant);
};

extern const KernelSet kScalarKernels;
#if defined(OFFLOAD_X86_KERNELS)
extern const KernelSet kAvx2Kernels;
extern const KernelSet kAvx512Kernels;
#endif

}  // namespace offload
