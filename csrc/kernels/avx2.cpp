// AVX2 and F16C: 8 fp32 elements at a time. No FMA: a fused multiply-add rounds once where the reference
// rounds twice. vsqrtps and vdivps are correctly rounded; vcvtps2ph rounds to nearest even whatever MXCSR
// says and keeps subnormals; bf16 is rounded by integer arithmetic.
#include <immintrin.h>

#include "kernels.h"

namespace offload {
namespace {

using Byte = unsigned char;

template <std::uint32_t value>
constexpr std::uint32_t kStored = value;

struct Simd {
  using F = __m256;
  using H = __m128i;
  using I = __m256i;
  using D = __m256d;
  using U = __m256i;
  static constexpr std::size_t kWidth = 8;
  static constexpr std::size_t kDoubleWidth = 4;
  static constexpr std::size_t kWords = 4;
  static constexpr std::size_t kPairBytes = 32;

  static F set1(float value) { return _mm256_set1_ps(value); }
  static F zero() { return _mm256_setzero_ps(); }
  static F load(const Byte* address) { return _mm256_loadu_ps(reinterpret_cast<const float*>(address)); }
  static void store(Byte* address, F value) { _mm256_storeu_ps(reinterpret_cast<float*>(address), value); }
  static void stream(Byte* address, F value) { _mm256_stream_ps(reinterpret_cast<float*>(address), value); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F sqrt(F a) { return _mm256_sqrt_ps(a); }
  static F negate(F a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }
  static F sign(F a) {
    const F one = _mm256_or_ps(_mm256_and_ps(a, _mm256_set1_ps(-0.0f)), _mm256_set1_ps(1.0f));
    return _mm256_blendv_ps(a, one, _mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_NEQ_OQ));
  }

  template <int dtype>
  static F widen(const Byte* address) {
    if constexpr (dtype == kFloat32) {
      return load(address);
    } else if constexpr (dtype == kBfloat16) {
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(address)), 16));
    } else {
      return _mm256_cvtph_ps(load_half(address));
    }
  }

  template <int dtype>
  static H narrow(F value) {
    if constexpr (dtype == kFloat16) return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i rounded = _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(0x7fc0), is_nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
  }

  static H narrow_adding(F value, I random) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    const __m256i rounds = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x7f7f0000), magnitude);
    const __m256i sum = _mm256_add_epi32(bits, _mm256_and_si256(random, rounds));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i rounded = _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(0x7fc0), is_nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
  }
  static I set1_int(std::uint32_t value) { return _mm256_set1_epi32(static_cast<int>(value)); }
  static I load_ints(const std::uint32_t* address) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(address));
  }
  static I add_ints(I a, I b) { return _mm256_add_epi32(a, b); }
  static I mul_ints(I a, I b) { return _mm256_mullo_epi32(a, b); }
  static I xor_ints(I a, I b) { return _mm256_xor_si256(a, b); }
  static I and_ints(I a, I b) { return _mm256_and_si256(a, b); }
  template <int bits>
  static I shift_ints(I a) {
    return _mm256_srli_epi32(a, bits);
  }

  static F where_equal(H x, H y, F a, F b) {
    return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(_mm256_cvtepi16_epi32(_mm_cmpeq_epi16(x, y))));
  }
  static H load_half(const Byte* address) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(address)); }
  static void store_half(Byte* address, H value) { _mm_storeu_si128(reinterpret_cast<__m128i*>(address), value); }
  static void stream_pair(Byte* address, H low, H high) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(address), _mm256_set_m128i(high, low));
  }

  // Groups of four vectors; the format that computes them says what is where.
  // From memory: compilers take integers through a register each time, on the port of shuffles.
  template <std::uint32_t value>
  static I constant() {
    I everywhere;
    __asm__("vpbroadcastd %1, %0" : "=v"(everywhere) : "m"(kStored<value>));
    return everywhere;
  }
  static I load_int(const Byte* address) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(address)); }
  static void store_int(Byte* address, I value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(address), value); }
  static void stream_int(Byte* address, I value) { _mm256_stream_si256(reinterpret_cast<__m256i*>(address), value); }
  static I int_of(F a) { return _mm256_castps_si256(a); }
  static F float_of(I a) { return _mm256_castsi256_ps(a); }
  static F to_float(I a) { return _mm256_cvtepi32_ps(a); }
  static F mul_add(F a, F b, F c) { return add(mul(a, b), c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static I max_ints(I a, I b) { return _mm256_max_epu32(a, b); }
  static std::uint32_t greatest(I a) {
    __m128i x = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0x4e));
    x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0xb1));
    return static_cast<std::uint32_t>(_mm_cvtsi128_si32(x));
  }
  template <int bits>
  static I shift_left(I a) {
    return _mm256_slli_epi32(a, bits);
  }
  static I select(I mask, I a, I b) { return _mm256_blendv_epi8(b, a, mask); }
  static I or_and(I a, I b, I c) { return _mm256_or_si256(a, _mm256_and_si256(b, c)); }
  static I bytes_in_lanes(I a, __m128i order) { return _mm256_shuffle_epi8(a, _mm256_broadcastsi128_si256(order)); }
  static I to_lanes(I bytes) {
    const __m128i order = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    return bytes_in_lanes(_mm256_permute4x64_epi64(bytes, 0xd8), order);
  }
  static I from_lanes(I bytes) {
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    return _mm256_permute4x64_epi64(bytes_in_lanes(bytes, order), 0xd8);
  }
  static I swap_middle(I a) {
    return bytes_in_lanes(a, _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
  }
  static I signs(F a, F b, F c, F d) {
    const I words_ab = _mm256_packs_epi32(int_of(a), int_of(b)), words_cd = _mm256_packs_epi32(int_of(c), int_of(d));
    return bytes_in_lanes(_mm256_packs_epi16(words_ab, words_cd),
                          _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  }
  static I load_table(const Byte* address) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(address)));
  }
  static I lookup(I table, I indices) { return _mm256_shuffle_epi8(table, indices); }
  static I mul_bytes(I a, I b) { return _mm256_maddubs_epi16(a, b); }
  static I lower_words(I a) { return _mm256_madd_epi16(a, _mm256_set1_epi32(1)); }
  static I upper_words(I a) { return _mm256_srai_epi32(a, 16); }
  static I keep_where(I a, I b) { return _mm256_andnot_si256(_mm256_cmpeq_epi8(b, _mm256_setzero_si256()), a); }
  static I round_words(I upper, I lower) {
    // Round up where the rest is above 0x8000, the tie. The rest is the upper 8 bits of `lower`, and the lowest bit
    // of `upper` as its own lowest: so a tie is above 0x8000 only if `upper` is odd. With the highest bits flipped,
    // signed words compare as words without signs do.
    const I odd = _mm256_and_si256(upper, _mm256_set1_epi16(1));
    const I rest = or_and(odd, lower, _mm256_set1_epi32(static_cast<int>(0xff00ff00u)));
    const I flipped = _mm256_xor_si256(rest, _mm256_set1_epi16(static_cast<short>(0x8000)));
    return _mm256_sub_epi16(upper, _mm256_cmpgt_epi16(flipped, _mm256_setzero_si256()));
  }
  static bool any_not_finite(I a, I b) {
    const I sign = constant<0x7fff7fffu>();
    const I greatest = _mm256_max_epu16(_mm256_and_si256(a, sign), _mm256_and_si256(b, sign));
    return _mm256_movemask_epi8(_mm256_cmpgt_epi16(greatest, constant<0x7f7f7f7fu>())) != 0;
  }
  template <int dtype>
  static void widen_pair(const Byte* address, F* values) {
    if constexpr (dtype == kBfloat16) {
      const I words = load_int(address);
      values[0] = float_of(shift_left<16>(words));
      values[1] = float_of(_mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
    } else {
      const F first = widen<dtype>(address), second = widen<dtype>(address + (dtype == kFloat32 ? 4 : 2) * kWidth);
      values[0] = in_order(_mm256_shuffle_ps(first, second, 0x88));
      values[1] = in_order(_mm256_shuffle_ps(first, second, 0xdd));
    }
  }
  static F in_order(F quarters) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(quarters), 0xd8)); }
  static void load_pair(const Byte* address, F* values) { widen_pair<kFloat32>(address, values); }
  static void store_pair(Byte* address, const F* values) {
    const F lower = _mm256_unpacklo_ps(values[0], values[1]), upper = _mm256_unpackhi_ps(values[0], values[1]);
    store(address, _mm256_permute2f128_ps(lower, upper, 0x20));
    store(address + 4 * kWidth, _mm256_permute2f128_ps(lower, upper, 0x31));
  }
  static I narrow_pair(F even, F odd) {
    const I lower = _mm256_cvtepu16_epi32(narrow<kFloat16>(even)), upper = _mm256_cvtepu16_epi32(narrow<kFloat16>(odd));
    return _mm256_or_si256(lower, shift_left<16>(upper));
  }

  template <int dtype>
  static D load_double(const Byte* address) {
    if constexpr (dtype == kFloat32) {
      return _mm256_cvtps_pd(_mm_loadu_ps(reinterpret_cast<const float*>(address)));
    } else {
      const __m128i half = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(address));
      if constexpr (dtype == kBfloat16)
        return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(half), 16)));
      return _mm256_cvtps_pd(_mm_cvtph_ps(half));
    }
  }
  static D load_d(const double* address) { return _mm256_load_pd(address); }
  static void store_d(double* address, D value) { _mm256_store_pd(address, value); }
  static D add_double(D a, D b) { return _mm256_add_pd(a, b); }
  static D square_double(D a) { return _mm256_mul_pd(a, a); }

  static U load_words(const Byte* address) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(address)); }
  static void store_words(std::uint64_t* address, U value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(address), value);
  }
  static U set1_word(std::uint64_t value) { return _mm256_set1_epi64x(static_cast<long long>(value)); }
  static U add_words(U a, U b) { return _mm256_add_epi64(a, b); }
  static U xor_words(U a, U b) { return _mm256_xor_si256(a, b); }
  static U upper_halves(U a) { return _mm256_srli_epi64(a, 32); }
  static U swap_halves(U a) { return _mm256_shuffle_epi32(a, 0xb1); }
  static U mul_lower_halves(U a, U b) { return _mm256_mul_epu32(a, b); }
};

}  // namespace
}  // namespace offload

#include "body.h"

namespace offload {
const KernelSet kAvx2Kernels = {"avx2", update, gradient_blocks, fingerprint, add, decode, encode, stream};
}  // namespace offload
