// Adagrad; offload/rules/adagrad.py says what the scalars are, offload/kernels/reference/adagrad.py what is computed.
#pragma once

struct Adagrad {
  static constexpr int kStates = 1;  // sum
  static constexpr bool is_root(int k) { return k == 0; }

  template <class V>
  struct Scalars {
    typename V::F eps, step_size;
  };

  template <class V>
  static typename V::F change(const Scalars<V>& s, typename V::F g, typename V::F* state) {
    state[0] = V::add(state[0], V::mul(g, g));
    return V::mul(V::div(g, V::add(V::sqrt(state[0]), s.eps)), s.step_size);
  }
};
