// The formats of state; offload/formats/ says what is stored in each. Included by body.h, in its unnamed namespace, after
// all that does not depend on one. Each is a struct in formats/, which has
//   kStateBytes     bytes of an element of a state tensor beside the master
//   kMasterBytes    bytes of a master's element at `master` where the weight has 16 bits. If they are 2, that is the
//                   upper plane, and the lower one lies at `master_low`
//   kBlockNumel     elements that share scales, counted from the start of the unsharded parameter; 1: none do
//   kRounds         whether updates need random bits
//   Rounding<V>     the random bits of a range of elements whose indices in the unsharded parameter agree in their
//                   upper 32 bits; made of the segment and the first element. draw(i, random) writes those of a
//                   vector from element i on, for each state tensor (not needed with scales)
// Where kBlockNumel is 1:
//   load<V>, store<V>   load or store a vector of state as fp32
// Elsewhere:
//   update<Rule, gradient_dtype, weight_dtype>, zero_scales<Rule>   update a range, or zero the scales of its blocks
//
// A form is how one state tensor is stored. Those that are no element types of segment.h are structs with kFacts,
// decode and encode (see KernelSet).

#include "formats/compact16.h"
#include "formats/compact8.h"
#include "formats/exact.h"

// Return `work(Format())` for the format of this number (`code` of offload/formats/), or `none` if there is none.
template <class Work, class Result>
inline Result with_format(std::uint32_t code, Result none, Work work) {
  switch (code) {
    case 0:
      return work(Exact());
    case 1:
      return work(Compact16());
    case 2:
      return work(Compact8());
    default:
      return none;
  }
}

// The same for a form.
template <class Work, class Result>
inline Result with_form(std::int32_t code, Result none, Work work) {
  switch (code) {
    case 4:
      return work(Planes());
    case 5:
      return work(Codes<Signed>());
    case 6:
      return work(Codes<Root>());
    default:
      return none;
  }
}
