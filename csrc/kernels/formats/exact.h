// All state in fp32. Included by formats.h.
struct Exact {
  static constexpr std::size_t kStateBytes = 4, kMasterBytes = 4;
  static constexpr std::uint64_t kBlockNumel = 1;
  static constexpr bool kRounds = false;

  template <class V>
  struct Rounding {
    Rounding(const Segment&, std::uint64_t) {}
    void draw(std::uint64_t, typename V::I*) const {}
  };

  template <class V>
  static typename V::F load(const Byte* address) {
    return V::load(address);
  }
  template <class V>
  static void store(Byte* address, typename V::F value, typename V::I) {
    V::store(address, value);
  }
};
