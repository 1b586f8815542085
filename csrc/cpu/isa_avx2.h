// AVX2, FMA and F16C: vectors of eight floats; 16-bit types are widened to float.
#pragma once

#include <immintrin.h>

#include "codes.h"
#include "convert.h"
#include "types.h"

namespace specattn {

struct Avx2 {
  static constexpr int W = 8;
  static constexpr bool kPrefetchesInOrder = false;
  struct Tiles {};  // what a thread sets up for a task
  // Register blocks: vectors of rows and of D, accumulators and units of a step of scores, rows of
  // a step of values.
  static constexpr int kScoreRows = 2, kValueCols = 2, kScoreAccumulators = 12;
  static constexpr int kScoreUnits = 1, kValueRows = 6;
  using V = __m256;
  using M = __m256;

  static V zero() { return _mm256_setzero_ps(); }
  static V set1(float x) { return _mm256_set1_ps(x); }
  static V load(const float* p) { return _mm256_loadu_ps(p); }
  // Lane i is p[i * stride].
  static V load_strided(const float* p, int stride) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_i32gather_ps(p, _mm256_mullo_epi32(lane, _mm256_set1_epi32(stride)), 4);
  }
  // Lane i of rows[r] is p[i * stride + r].
  static void load_four_rows(const float* p, int stride, V* rows) {
    V q[4];  // of every fourth key
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const float* at = p + i * stride;
      q[i] = _mm256_castps128_ps256(_mm_loadu_ps(at));
      q[i] = _mm256_insertf128_ps(q[i], _mm_loadu_ps(at + 4 * stride), 1);
    }
    const V a = _mm256_unpacklo_ps(q[0], q[1]), b = _mm256_unpacklo_ps(q[2], q[3]);
    const V c = _mm256_unpackhi_ps(q[0], q[1]), d = _mm256_unpackhi_ps(q[2], q[3]);
    rows[0] = _mm256_shuffle_ps(a, b, 0x44), rows[1] = _mm256_shuffle_ps(a, b, 0xee);
    rows[2] = _mm256_shuffle_ps(c, d, 0x44), rows[3] = _mm256_shuffle_ps(c, d, 0xee);
  }
  static V broadcast(const void* p) {
    float x;
    std::memcpy(&x, p, sizeof x);
    return set1(x);
  }
  static void store(float* p, V v) { _mm256_storeu_ps(p, v); }
  static V add(V a, V b) { return _mm256_add_ps(a, b); }
  static V sub(V a, V b) { return _mm256_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm256_mul_ps(a, b); }
  static V div(V a, V b) { return _mm256_div_ps(a, b); }
  static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static V max(V a, V b) { return _mm256_max_ps(a, b); }
  static M less(V a, V b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
  static M bit(const uint32_t* words, int n) {
    const __m256i one = _mm256_set1_epi32(static_cast<int>(1u << n));
    const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(w, one), one));
  }
  static V select(M m, V a, V b) { return _mm256_blendv_ps(b, a, m); }
  static V round(V a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static constexpr bool kScalesFar = false;
  static V scale2(V a, V n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
  }
  static float sum(V a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
  }
  // Lane i is the sum of a[i].
  static V sum_each(const V* a) {
    const V x = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
    const V y = _mm256_hadd_ps(_mm256_hadd_ps(a[4], a[5]), _mm256_hadd_ps(a[6], a[7]));
    return add(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
  }
  static float greatest(V a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
  }
  static M mask(uint32_t bits) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i in = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(in, lane));
  }

  static V load_as_float(const float* p) { return load(p); }
  static V load_as_float(const bf16* p) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
  }
  static V load_as_float(const fp16* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static V load_as_float(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_bytes(p)));
  }
  static V load_as_float(const e5m2* p) {
    return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(load_bytes(p)), 8));
  }
  // Over kUnit. NaN, all bits set, would be a number as fp16.
  static V load_units(const e4m3_number* p) { return _mm256_cvtph_ps(as_halves(p)); }
  static V load_units(const e4m3* p) {
    const __m128i x = as_halves(p), most = _mm_set1_epi16(0x3f80);
    const __m128i nan = _mm_cmpeq_epi16(_mm_and_si128(x, most), most);
    return _mm256_cvtph_ps(_mm_or_si128(x, nan));
  }
  template <class Elem>
  static V load_units(const Elem* p) {
    return load_as_float(p);
  }
  // Two vectors, which need fewer steps than one and one.
  static void load_two_units(const e4m3_number* p, V* two) {
    const __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_16_bytes(p)), 7);
    const __m256i x = _mm256_and_si256(moved, _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
    two[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(x));
    two[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1));
  }
  static void load_two_units(const e5m2* p, V* two) {
    const __m128i x = load_16_bytes(p), zero = _mm_setzero_si128();
    two[0] = _mm256_cvtph_ps(_mm_unpacklo_epi8(zero, x));
    two[1] = _mm256_cvtph_ps(_mm_unpackhi_epi8(zero, x));
  }
  template <class Elem>
  static void load_two_units(const Elem* p, V* two) {
    two[0] = load_units(p), two[1] = load_units(p + W);
  }
  // As words_hold_nan.
  static bool holds_nan(const char* const* rows, int count, int D) {
    if (D % 32 != 0) return words_hold_nan(rows, count, D);
    const __m256i sign = _mm256_set1_epi8(static_cast<char>(0x80));
    __m256i most = sign;  // of magnitudes, below a sign that is always set
    for (int n = 0; n < count; ++n) {
      for (int d = 0; d < D; d += 32) {
        const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[n] + d));
        most = _mm256_max_epu8(most, _mm256_or_si256(x, sign));
      }
    }
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(most, _mm256_set1_epi8(-1))) != 0;
  }
  static V load_as_float(const e4m3* p) { return mul(load_units(p), set1(kUnit<e4m3>)); }
  static void store_as(float* p, V v) { store(p, v); }
  static void store_as(bf16* p, V v) {
    float x[W];
    store(x, v);
    for (int i = 0; i < W; ++i) p[i] = from_float<bf16>(x[i]);
  }
  static void store_as(fp16* p, V v) {
    const __m128i x = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), x);
  }

  // 128 codes of weights, of which 32 at a time become numbers, less a zero point: of 4 bits those
  // in even places of 16, then the others.
  struct Nibbles {
    using Zero = __m256i;
    static Zero zero(const void* p) { return _mm256_set1_epi32(nibble(p)); }

    explicit Nibbles(const void* p) {
      const __m256i* const from = static_cast<const __m256i*>(p);
      words[0] = _mm256_loadu_si256(from), words[1] = _mm256_loadu_si256(from + 1);
    }
    void numbers(int chunk, Zero zero, V* to) const {
      const __m256i one = _mm256_set1_epi32(15);
      for (int i = 0; i < 4; ++i) {
        const __m256i moved = _mm256_srli_epi32(words[i / 2], kNibbleBits * chunk + 16 * (i % 2));
        to[i] = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_and_si256(moved, one), zero));
      }
    }
    __m256i words[2];
  };
  struct Bytes {
    using Zero = __m256i;
    static Zero zero(const void* p) { return _mm256_set1_epi32(*static_cast<const int8_t*>(p)); }

    explicit Bytes(const void* p) : codes(static_cast<const int8_t*>(p)) {}
    void numbers(int chunk, Zero zero, V* to) const {
      for (int i = 0; i < 4; ++i) {
        const __m256i wide = _mm256_cvtepi8_epi32(load_bytes(codes + kChunkCodes * chunk + W * i));
        to[i] = _mm256_cvtepi32_ps(_mm256_sub_epi32(wide, zero));
      }
    }
    const int8_t* codes;
  };

  // Words of a tile of codes (codes.h), of which unit u is multiplied with unit u of x: the numbers
  // of codes less zero points, or less the middle.
  struct Words {
    using Zero = __m256i;
    void load(const void* p, Zero) { words = _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
    __m256i words;
  };
  template <bool zeros>
  struct NibbleWords : Words {
    static Zero zero(const char* p) {
      return zeros ? _mm256_cvtepu8_epi32(load_bytes(p)) : _mm256_set1_epi32(kMiddle);
    }
    V unit(int u, Zero zero) const {
      const __m256i code =
          _mm256_and_si256(_mm256_srli_epi32(words, nibble_shift(u)), _mm256_set1_epi32(15));
      return _mm256_cvtepi32_ps(_mm256_sub_epi32(code, zero));
    }
  };
  template <bool zeros>
  struct ByteWords : Words {
    static Zero zero(const char* p) {
      return zeros ? _mm256_cvtepi8_epi32(load_bytes(p)) : _mm256_setzero_si256();
    }
    V unit(int u, Zero zero) const {
      const __m256i code = _mm256_srai_epi32(_mm256_slli_epi32(words, byte_shift(u)), 24);
      return _mm256_cvtepi32_ps(zeros ? _mm256_sub_epi32(code, zero) : code);
    }
  };

  template <class Elem>
  struct Dot {
    static constexpr int kPair = 1;
    static V dot(V acc, V a, V b) { return fma(a, b, acc); }
    static V dot_at(V acc, V a, const void* unit) { return fma(a, broadcast(unit), acc); }
    using Nibbles = Avx2::Nibbles;
    using Bytes = Avx2::Bytes;
    template <bool zeros>
    using NibbleWords = Avx2::NibbleWords<zeros>;
    template <bool zeros>
    using ByteWords = Avx2::ByteWords<zeros>;
  };

 private:
  static __m128i as_halves(const void* p) {
    const __m128i moved = _mm_slli_epi16(_mm_cvtepi8_epi16(load_bytes(p)), 7);
    return _mm_and_si128(moved, _mm_set1_epi16(static_cast<int16_t>(0xbfff)));
  }
  static __m128i load_bytes(const void* p) {
    return _mm_loadl_epi64(static_cast<const __m128i*>(p));
  }
  static __m128i load_16_bytes(const void* p) {
    return _mm_loadu_si128(static_cast<const __m128i*>(p));
  }
};

}  // namespace specattn
