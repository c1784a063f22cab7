// SGD with momentum; offload/rules/sgd.py says what the scalars are, offload/kernels/reference/sgd.py what is computed.
#pragma once

struct Sgd {
  static constexpr int kStates = 1;  // momentum_buffer
  static constexpr bool is_root(int) { return false; }

  template <class V>
  struct Scalars {
    typename V::F momentum, one_minus_dampening, of_gradient, of_momentum, lr;
  };

  template <class V>
  static typename V::F change(const Scalars<V>& s, typename V::F g, typename V::F* state) {
    state[0] = V::add(V::mul(state[0], s.momentum), V::mul(g, s.one_minus_dampening));
    return V::mul(V::add(V::mul(g, s.of_gradient), V::mul(state[0], s.of_momentum)), s.lr);
  }
};
