// State beside the master in bf16, rounded stochastically. Included by formats.h.
struct Compact16 {
  static constexpr std::size_t kStateBytes = 2, kMasterBytes = 4;
  static constexpr std::uint64_t kBlockNumel = 1;
  static constexpr bool kRounds = true;

  template <class V>
  struct Rounding : RandomBits<V> {
    using RandomBits<V>::RandomBits;

    // Write 16 bits for each state tensor, of elements `i` and following.
    void draw(std::uint64_t i, typename V::I* random) const {
      const typename V::I x = this->mixed(this->counters(i));
      const typename V::I upper = V::template shift_ints<16>(x);
      random[0] = V::and_ints(V::xor_ints(x, upper), V::set1_int(0xffffu));
      random[1] = upper;
    }
  };

  template <class V>
  static typename V::F load(const Byte* address) {
    return V::template widen<kBfloat16>(address);
  }
  template <class V>
  static void store(Byte* address, typename V::F value, typename V::I random) {
    V::store_half(address, V::narrow_adding(value, random));
  }
};
