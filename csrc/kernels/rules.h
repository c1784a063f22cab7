// The update rules. Each is a struct in rules/, which has
//   kStates                          how many state tensors it keeps beside the master
//   is_root(k)                       whether the k-th is never negative, and its square root is what a format may store
//   Scalars<V>                       its scalars in registers: members of type V::F, in the order of a segment's
//   change<V>(scalars, g, state)     updates a vector of each state tensor in place, from the scaled gradient and its
//                                    L2 term, if any; returns what is to be subtracted from the master
//
// All of it is in an unnamed namespace, for the reason that body.h gives.
#pragma once

#include "segment.h"

namespace offload {
namespace {

#include "rules/adagrad.h"
#include "rules/adam.h"
#include "rules/lion.h"
#include "rules/sgd.h"

// Return `work(Rule())` for the rule of this number (`code` of offload/rules/), or `none` if there is none.
template <class Work, class Result>
inline Result with_rule(std::uint32_t code, Result none, Work work) {
  switch (code) {
    case 0:
      return work(Adam());
    case 1:
      return work(Lion());
    case 2:
      return work(Adagrad());
    case 3:
      return work(Sgd());
    default:
      return none;
  }
}

}  // namespace
}  // namespace offload
