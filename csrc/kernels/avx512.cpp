// AVX-512 F, BW, DQ and VL: 16 fp32 elements at a time. FMA is used only for exact products: it rounds once where
// the reference rounds twice. vsqrtps and vdivps are correctly rounded; with sequences from vrsqrt14ps and vrcp14ps, which
// can be, too, updates are slower (docs/architecture.md). vcvtps2ph rounds to nearest even whatever MXCSR says and keeps
// subnormals; bf16 is rounded by integer arithmetic because vcvtneps2bf16 flushes subnormals.
#include <immintrin.h>

#include "kernels.h"

namespace offload {
namespace {

using Byte = unsigned char;

// Tables of permutations: for each element of the result, where it comes from. kToLanes and kFromLanes: pairs of
// bytes, from the order in memory to the lanes of a group of coded elements, and back. kEven and kOdd: the elements
// with even and with odd numbers of two vectors; kFirst and kSecond: back to two vectors in order.
alignas(64) constexpr std::uint16_t kToLanes[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
alignas(64) constexpr std::uint16_t kFromLanes[32] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
alignas(64) constexpr std::uint32_t kEven[16] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
alignas(64) constexpr std::uint32_t kOdd[16] = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
alignas(64) constexpr std::uint32_t kFirst[16] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
alignas(64) constexpr std::uint32_t kSecond[16] = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

template <std::uint32_t value>
constexpr std::uint32_t kStored = value;

struct Simd {
  using F = __m512;
  using H = __m256i;
  using I = __m512i;
  using D = __m512d;
  using U = __m512i;
  static constexpr std::size_t kWidth = 16;
  static constexpr std::size_t kDoubleWidth = 8;
  static constexpr std::size_t kWords = 8;
  static constexpr std::size_t kPairBytes = 64;

  static F set1(float value) { return _mm512_set1_ps(value); }
  static F zero() { return _mm512_setzero_ps(); }
  static F load(const Byte* address) { return _mm512_loadu_ps(address); }
  static void store(Byte* address, F value) { _mm512_storeu_ps(address, value); }
  static void stream(Byte* address, F value) { _mm512_stream_ps(reinterpret_cast<float*>(address), value); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F sqrt(F a) { return _mm512_sqrt_ps(a); }
  static F negate(F a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
  static F sign(F a) {
    const F one = _mm512_or_ps(_mm512_and_ps(a, _mm512_set1_ps(-0.0f)), _mm512_set1_ps(1.0f));
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_NEQ_OQ), a, one);
  }

  template <int dtype>
  static F widen(const Byte* address) {
    if constexpr (dtype == kFloat32) {
      return load(address);
    } else if constexpr (dtype == kBfloat16) {
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_half(address)), 16));
    } else {
      return _mm512_cvtph_ps(load_half(address));
    }
  }

  template <int dtype>
  static H narrow(F value) {
    if constexpr (dtype == kFloat16) return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(
        _mm512_mask_blend_epi32(is_nan, _mm512_srli_epi32(sum, 16), _mm512_set1_epi32(0x7fc0)));
  }

  static H narrow_adding(F value, I random) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    const __mmask16 rounds = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(0x7f7f0000));
    const __m512i sum = _mm512_mask_add_epi32(bits, rounds, bits, random);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(
        _mm512_mask_blend_epi32(is_nan, _mm512_srli_epi32(sum, 16), _mm512_set1_epi32(0x7fc0)));
  }
  static I set1_int(std::uint32_t value) { return _mm512_set1_epi32(static_cast<int>(value)); }
  static I load_ints(const std::uint32_t* address) { return _mm512_loadu_si512(address); }
  static I add_ints(I a, I b) { return _mm512_add_epi32(a, b); }
  static I mul_ints(I a, I b) { return _mm512_mullo_epi32(a, b); }
  static I xor_ints(I a, I b) { return _mm512_xor_si512(a, b); }
  static I and_ints(I a, I b) { return _mm512_and_si512(a, b); }
  template <int bits>
  static I shift_ints(I a) {
    return _mm512_srli_epi32(a, bits);
  }

  static F where_equal(H x, H y, F a, F b) { return _mm512_mask_blend_ps(_mm256_cmpeq_epi16_mask(x, y), b, a); }
  static H load_half(const Byte* address) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(address)); }
  static void store_half(Byte* address, H value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(address), value); }
  static void stream_pair(Byte* address, H low, H high) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(address), _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
  }

  // Groups of four vectors; the format that computes them says what is where.
  // From memory: compilers take integers through a register each time, on the port of shuffles.
  template <std::uint32_t value>
  static I constant() {
    I everywhere;
    __asm__("vpbroadcastd %1, %0" : "=v"(everywhere) : "m"(kStored<value>));
    return everywhere;
  }
  static I load_int(const Byte* address) { return _mm512_loadu_si512(address); }
  static void store_int(Byte* address, I value) { _mm512_storeu_si512(address, value); }
  static void stream_int(Byte* address, I value) { _mm512_stream_si512(reinterpret_cast<__m512i*>(address), value); }
  static I int_of(F a) { return _mm512_castps_si512(a); }
  static F float_of(I a) { return _mm512_castsi512_ps(a); }
  static F to_float(I a) { return _mm512_cvtepi32_ps(a); }
  static F mul_add(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static I max_ints(I a, I b) { return _mm512_max_epu32(a, b); }
  static std::uint32_t greatest(I a) { return _mm512_reduce_max_epu32(a); }
  template <int bits>
  static I shift_left(I a) {
    return _mm512_slli_epi32(a, bits);
  }
  static I select(I mask, I a, I b) { return _mm512_ternarylogic_epi32(mask, a, b, 0xca); }
  static I or_and(I a, I b, I c) { return _mm512_ternarylogic_epi32(a, b, c, 0xf8); }
  static I to_lanes(I bytes) { return _mm512_permutexvar_epi16(_mm512_load_si512(kToLanes), bytes); }
  static I from_lanes(I bytes) { return _mm512_permutexvar_epi16(_mm512_load_si512(kFromLanes), bytes); }
  static I swap_middle(I a) {
    return _mm512_shuffle_epi8(a, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15)));
  }
  static I signs(F a, F b, F c, F d) {
    const I words_ab = _mm512_packs_epi32(int_of(a), int_of(b)), words_cd = _mm512_packs_epi32(int_of(c), int_of(d));
    return _mm512_shuffle_epi8(_mm512_packs_epi16(words_ab, words_cd),
                               _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)));
  }
  static I load_table(const Byte* address) {
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(address)));
  }
  static I lookup(I table, I indices) { return _mm512_shuffle_epi8(table, indices); }
  static I mul_bytes(I a, I b) { return _mm512_maddubs_epi16(a, b); }
  static I lower_words(I a) { return _mm512_madd_epi16(a, constant<1>()); }
  static I upper_words(I a) { return _mm512_srai_epi32(a, 16); }
  static I keep_where(I a, I b) { return _mm512_maskz_mov_epi8(_mm512_test_epi8_mask(b, b), a); }
  static I round_words(I upper, I lower) {
    // Round up where the rest is above 0x8000, the tie. The rest is the upper 8 bits of `lower`, and the lowest bit
    // of `upper` as its own lowest: so a tie is above 0x8000 only if `upper` is odd.
    const I rest = or_and(_mm512_and_si512(upper, constant<0x00010001u>()), lower, constant<0xff00ff00u>());
    const __mmask32 up = _mm512_cmpgt_epu16_mask(rest, constant<0x80008000u>());
    return _mm512_mask_add_epi16(upper, up, upper, constant<0x00010001u>());
  }
  static bool any_not_finite(I a, I b) {
    const I sign = constant<0x7fff7fffu>();
    const I greatest = _mm512_max_epu16(_mm512_and_si512(a, sign), _mm512_and_si512(b, sign));
    return _mm512_cmpgt_epu16_mask(greatest, constant<0x7f7f7f7fu>()) != 0;
  }
  template <int dtype>
  static void widen_pair(const Byte* address, F* values) {
    if constexpr (dtype == kBfloat16) {
      const I words = load_int(address);
      values[0] = float_of(shift_left<16>(words));
      values[1] = float_of(_mm512_and_si512(words, constant<0xffff0000u>()));
    } else {
      const F first = widen<dtype>(address), second = widen<dtype>(address + (dtype == kFloat32 ? 4 : 2) * kWidth);
      values[0] = _mm512_permutex2var_ps(first, _mm512_load_si512(kEven), second);
      values[1] = _mm512_permutex2var_ps(first, _mm512_load_si512(kOdd), second);
    }
  }
  static void load_pair(const Byte* address, F* values) { widen_pair<kFloat32>(address, values); }
  static void store_pair(Byte* address, const F* values) {
    store(address, _mm512_permutex2var_ps(values[0], _mm512_load_si512(kFirst), values[1]));
    store(address + 4 * kWidth, _mm512_permutex2var_ps(values[0], _mm512_load_si512(kSecond), values[1]));
  }
  static I narrow_pair(F even, F odd) {
    const I lower = _mm512_cvtepu16_epi32(narrow<kFloat16>(even)), upper = _mm512_cvtepu16_epi32(narrow<kFloat16>(odd));
    return _mm512_or_si512(lower, shift_left<16>(upper));
  }

  template <int dtype>
  static D load_double(const Byte* address) {
    if constexpr (dtype == kFloat32) {
      return _mm512_cvtps_pd(_mm256_loadu_ps(reinterpret_cast<const float*>(address)));
    } else {
      const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(address));
      if constexpr (dtype == kBfloat16)
        return _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16)));
      return _mm512_cvtps_pd(_mm256_cvtph_ps(half));
    }
  }
  static D load_d(const double* address) { return _mm512_load_pd(address); }
  static void store_d(double* address, D value) { _mm512_store_pd(address, value); }
  static D add_double(D a, D b) { return _mm512_add_pd(a, b); }
  static D square_double(D a) { return _mm512_mul_pd(a, a); }

  static U load_words(const Byte* address) { return _mm512_loadu_si512(address); }
  static void store_words(std::uint64_t* address, U value) { _mm512_storeu_si512(address, value); }
  static U set1_word(std::uint64_t value) { return _mm512_set1_epi64(static_cast<long long>(value)); }
  static U add_words(U a, U b) { return _mm512_add_epi64(a, b); }
  static U xor_words(U a, U b) { return _mm512_xor_si512(a, b); }
  static U upper_halves(U a) { return _mm512_srli_epi64(a, 32); }
  static U swap_halves(U a) { return _mm512_shuffle_epi32(a, _MM_PERM_CDAB); }
  static U mul_lower_halves(U a, U b) { return _mm512_mul_epu32(a, b); }
};

}  // namespace
}  // namespace offload

#include "body.h"

namespace offload {
const KernelSet kAvx512Kernels = {"avx512", update, gradient_blocks, fingerprint, add, decode, encode, stream};
}  // namespace offload
