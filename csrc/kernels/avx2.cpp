// AVX2 and F16C: 8 fp32 elements at a time. No FMA: a fused multiply-add rounds once where the reference
// rounds twice. vsqrtps and vdivps are correctly rounded; vcvtps2ph rounds to nearest even whatever MXCSR
// says and keeps subnormals; bf16 is rounded by integer arithmetic.
#include <immintrin.h>

#include "kernels.h"

namespace offload {
namespace {

using Byte = unsigned char;

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

  static H load_half(const Byte* address) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(address)); }
  static void store_half(Byte* address, H value) { _mm_storeu_si128(reinterpret_cast<__m128i*>(address), value); }
  static void stream_pair(Byte* address, H low, H high) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(address), _mm256_set_m128i(high, low));
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
const KernelSet kAvx2Kernels = {"avx2", update, gradient_blocks, fingerprint, add, stream};
}  // namespace offload
