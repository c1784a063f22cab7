// Adam; offload/rules/adam.py says what the scalars are, offload/kernels/reference/adam.py what is computed.
#pragma once

struct Adam {
  static constexpr int kStates = 2;  // exp_avg, exp_avg_sq
  static constexpr bool is_root(int k) { return k == 1; }

  template <class V>
  struct Scalars {
    typename V::F beta1, one_minus_beta1, beta2, one_minus_beta2, inv_bias2_sqrt, eps, step_size;
  };

  template <class V>
  static typename V::F change(const Scalars<V>& s, typename V::F g, typename V::F* state) {
    state[0] = V::add(V::mul(state[0], s.beta1), V::mul(g, s.one_minus_beta1));
    state[1] = V::add(V::mul(state[1], s.beta2), V::mul(V::mul(g, g), s.one_minus_beta2));
    const typename V::F denominator = V::add(V::mul(V::sqrt(state[1]), s.inv_bias2_sqrt), s.eps);
    return V::mul(V::div(state[0], denominator), s.step_size);
  }
};
