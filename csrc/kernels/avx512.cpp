// AVX-512 F, BW, DQ and VL: 16 fp32 elements at a time. No FMA is used: it rounds once where the reference
// rounds twice. vsqrtps and vdivps are correctly rounded; vcvtps2ph rounds to nearest even whatever MXCSR
// says and keeps subnormals; bf16 is rounded by integer arithmetic because vcvtneps2bf16 flushes subnormals.
#include <immintrin.h>

#include "kernels.h"

namespace offload {
namespace {

using Byte = unsigned char;

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

  static H load_half(const Byte* address) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(address)); }
  static void store_half(Byte* address, H value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(address), value); }
  static void stream_pair(Byte* address, H low, H high) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(address), _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
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
const KernelSet kAvx512Kernels = {"avx512", update, gradient_blocks, fingerprint, add, stream};
}  // namespace offload
