// Lion; offload/rules/lion.py says what the scalars are, offload/kernels/reference/lion.py what is computed.
#pragma once

struct Lion {
  static constexpr int kStates = 1;  // exp_avg
  static constexpr bool is_root(int) { return false; }

  template <class V>
  struct Scalars {
    typename V::F beta1, one_minus_beta1, beta2, one_minus_beta2, lr;
  };

  template <class V>
  static typename V::F change(const Scalars<V>& s, typename V::F g, typename V::F* state) {
    const typename V::F mixed = V::add(V::mul(state[0], s.beta1), V::mul(g, s.one_minus_beta1));
    state[0] = V::add(V::mul(state[0], s.beta2), V::mul(g, s.one_minus_beta2));
    return V::mul(V::sign(mixed), s.lr);
  }
};
