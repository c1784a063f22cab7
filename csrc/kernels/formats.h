// The formats of state; offload/formats/ says what is stored in each. Included by body.h, in its unnamed namespace, after
// all that does not depend on one. Each is a struct in formats/, which has
//   kStateBytes     bytes of an element of state beside the master
//   kMasterBytes    of one at `master` where that is not the weight; 2: the lower plane lies at `master_low`
//   kBlockNumel     elements that share scales, counted from the start of the unsharded parameter; 1: none do
//   kRounds         whether updates need random bits
//   Rounding<V>     made of a segment and the first element of a range whose indices in the unsharded parameter agree in
//                   their upper 32 bits; draw(i, random)
//   load<V>, store<V>   a vector of state as fp32, where kBlockNumel is 1
//   update<Rule, gradient_dtype, weight_dtype>, zero_scales<Rule>   of a range, elsewhere
//
// A form is how one tensor is stored that is no element type of segment.h: a struct that has kFacts, and decode and encode
// (see KernelSet).

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
