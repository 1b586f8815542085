// AVX-512: vectors of sixteen floats. With BF16, keys and values of that type are multiplied in
// pairs straight from the cache; without it, and for fp16, they are widened to float.
#pragma once

#include <immintrin.h>

#include "codes.h"
#include "convert.h"
#include "types.h"

namespace specattn {

struct Avx512 {
  static constexpr int W = 16;
  static constexpr bool kPrefetchesInOrder = false;
  struct Tiles {};  // what a thread sets up for a task
  // Register blocks: vectors of rows and of D, accumulators and units of a step of scores, rows of
  // a step of values.
  static constexpr int kScoreRows = 2, kValueCols = 4, kScoreAccumulators = 24;
  static constexpr int kScoreUnits = 2, kValueRows = 8;
  using V = __m512;
  using M = __mmask16;

  static V zero() { return _mm512_setzero_ps(); }
  static V set1(float x) { return _mm512_set1_ps(x); }
  static V load(const float* p) { return _mm512_loadu_ps(p); }
  // Lane i is p[i * stride].
  static V load_strided(const float* p, int stride) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_i32gather_ps(_mm512_mullo_epi32(lane, _mm512_set1_epi32(stride)), p, 4);
  }
  // Lane i of rows[r] is p[i * stride + r].
  static void load_four_rows(const float* p, int stride, V* rows) {
    V q[4];  // of every fourth key
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const float* at = p + i * stride;
      q[i] = _mm512_castps128_ps512(_mm_loadu_ps(at));
      q[i] = _mm512_insertf32x4(q[i], _mm_loadu_ps(at + 4 * stride), 1);
      q[i] = _mm512_insertf32x4(q[i], _mm_loadu_ps(at + 8 * stride), 2);
      q[i] = _mm512_insertf32x4(q[i], _mm_loadu_ps(at + 12 * stride), 3);
    }
    const V a = _mm512_unpacklo_ps(q[0], q[1]), b = _mm512_unpacklo_ps(q[2], q[3]);
    const V c = _mm512_unpackhi_ps(q[0], q[1]), d = _mm512_unpackhi_ps(q[2], q[3]);
    rows[0] = _mm512_shuffle_ps(a, b, 0x44), rows[1] = _mm512_shuffle_ps(a, b, 0xee);
    rows[2] = _mm512_shuffle_ps(c, d, 0x44), rows[3] = _mm512_shuffle_ps(c, d, 0xee);
  }
  static V broadcast(const void* p) {
    float x;
    std::memcpy(&x, p, sizeof x);
    return set1(x);
  }
  static V broadcast_quarter(const char* p) {
    return _mm512_broadcast_f32x4(_mm_loadu_ps(reinterpret_cast<const float*>(p)));
  }
  static void store(float* p, V v) { _mm512_storeu_ps(p, v); }
  static V add(V a, V b) { return _mm512_add_ps(a, b); }
  static V sub(V a, V b) { return _mm512_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static V div(V a, V b) { return _mm512_div_ps(a, b); }
  static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static V max(V a, V b) { return _mm512_max_ps(a, b); }
  static M less(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  static M bit(const uint32_t* words, int n) {
    return _mm512_test_epi32_mask(_mm512_loadu_si512(words),
                                  _mm512_set1_epi32(static_cast<int>(1u << n)));
  }
  static V select(M m, V a, V b) { return _mm512_mask_mov_ps(b, m, a); }
  static V round(V a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT); }
  // a * 2^floor(n) for any n, and n - floor(n); of -inf both are zero.
  static constexpr bool kScalesFar = true;
  static V scale2(V a, V n) { return _mm512_scalef_ps(a, n); }
  static V fraction(V n) { return _mm512_reduce_ps(n, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
  static float sum(V a) { return _mm512_reduce_add_ps(a); }
  // Lane i is the sum of a[i]: a transposition that adds on its way.
  static V sum_each(const V* a) {
    V pairs[8], quads[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      pairs[i] = add(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]),
                     _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // per quarter of a vector: sums of a[4i] .. a[4i + 3]
      quads[i] = add(_mm512_shuffle_ps(pairs[2 * i], pairs[2 * i + 1], 0x44),
                     _mm512_shuffle_ps(pairs[2 * i], pairs[2 * i + 1], 0xee));
    }
    const V x = add(_mm512_shuffle_f32x4(quads[0], quads[1], 0x88),
                    _mm512_shuffle_f32x4(quads[0], quads[1], 0xdd));
    const V y = add(_mm512_shuffle_f32x4(quads[2], quads[3], 0x88),
                    _mm512_shuffle_f32x4(quads[2], quads[3], 0xdd));
    return add(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
  }
  // The sums of the four lanes of each quarter of a[0] .. a[3]: quarter r goes to `to + r *
  // stride`.
  static void store_quarter_sums(const V* a, float* to, int stride) {
    const V x = add(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
    const V y = add(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
    const V sums = add(_mm512_shuffle_ps(x, y, 0x44), _mm512_shuffle_ps(x, y, 0xee));
    _mm_storeu_ps(to, _mm512_castps512_ps128(sums));
    _mm_storeu_ps(to + stride, _mm512_extractf32x4_ps(sums, 1));
    _mm_storeu_ps(to + 2 * stride, _mm512_extractf32x4_ps(sums, 2));
    _mm_storeu_ps(to + 3 * stride, _mm512_extractf32x4_ps(sums, 3));
  }
  static float greatest(V a) { return _mm512_reduce_max_ps(a); }
  static M mask(uint32_t bits) { return static_cast<M>(bits); }

  static __m128i load_bytes(const void* p) {
    return _mm_loadu_si128(static_cast<const __m128i*>(p));
  }
  static V load_as_float(const float* p) { return load(p); }
  static V load_as_float(const bf16* p) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  }
  static V load_as_float(const fp16* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static V load_as_float(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_bytes(p)));
  }
  static V load_as_float(const e5m2* p) {
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(load_bytes(p)), 8));
  }
  // Over kUnit. NaN, all bits set, would be a number as fp16.
  static V load_units(const e4m3_number* p) { return _mm512_cvtph_ps(as_halves(p)); }
  static V load_units(const e4m3* p) {
    const __m256i x = as_halves(p), most = _mm256_set1_epi16(0x3f80);
    const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(x, most), most);
    return _mm512_cvtph_ps(_mm256_or_si256(x, nan));
  }
  template <class Elem>
  static V load_units(const Elem* p) {
    return load_as_float(p);
  }
  static bool holds_nan(const char* const* rows, int count, int D) {
    return words_hold_nan(rows, count, D);
  }
  template <class Elem>
  static void load_two_units(const Elem* p, V* two) {
    two[0] = load_units(p), two[1] = load_units(p + W);
  }
  static V load_as_float(const e4m3* p) { return mul(load_units(p), set1(kUnit<e4m3>)); }
  static void store_as(float* p, V v) { store(p, v); }
  static void store_as(bf16* p, V v) {
    const __m512i u = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
    const M nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i top = _mm512_srli_epi32(_mm512_mask_mov_epi32(up, nan, u), 16);
    const __m512i x = _mm512_mask_or_epi32(top, nan, top, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
  }
  static void store_as(fp16* p, V v) {
    const __m256i x = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x);
  }

  // 128 codes of weights, of which 32 at a time become numbers, less a zero point: of 4 bits those
  // that lie in even places, then the others.
  struct Nibbles {
    using Zero = V;  // the numbers of all codes
    static Zero zero(const void* p) { return load(kNibbleFloats + kMostNibble - nibble(p)); }

    explicit Nibbles(const void* p) : words(_mm512_loadu_si512(p)) {}
    void numbers(int chunk, Zero zero, V* to) const {
      const auto shift = static_cast<unsigned>(kNibbleBits * chunk);
      to[0] = _mm512_permutexvar_ps(_mm512_srli_epi32(words, shift), zero);
      to[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(words, 16 + shift), zero);
    }
    __m512i words;
  };
  struct Bytes {
    using Zero = __m512i;
    static Zero zero(const void* p) { return _mm512_set1_epi32(*static_cast<const int8_t*>(p)); }

    explicit Bytes(const void* p) : codes(static_cast<const int8_t*>(p)) {}
    void numbers(int chunk, Zero zero, V* to) const {
      for (int i = 0; i < 2; ++i) {
        const __m512i wide = _mm512_cvtepi8_epi32(load_bytes(codes + kChunkCodes * chunk + W * i));
        to[i] = _mm512_cvtepi32_ps(_mm512_sub_epi32(wide, zero));
      }
    }
    const int8_t* codes;
  };

  // Words of a tile of codes (codes.h), of which unit u is multiplied with unit u of x: the numbers
  // of codes less zero points, or less the middle.
  struct Words {
    template <class Zero>
    void load(const void* p, Zero) {
      words = _mm512_loadu_si512(p);
    }
    __m512i words;
  };
  template <bool zeros>
  struct NibbleWords : Words {
    using Zero = V;  // the bits of zero points, or the numbers of all codes
    static Zero zero(const char* p) {
      if constexpr (zeros) {
        return _mm512_castsi512_ps(_mm512_cvtepu8_epi32(load_bytes(p)));
      } else {
        return Avx512::load(kNibbleFloats + kMostNibble - kMiddle);
      }
    }
    V unit(int u, Zero zero) const {
      const __m512i moved = _mm512_srli_epi32(words, static_cast<unsigned>(nibble_shift(u)));
      if constexpr (zeros) {
        const __m512i code = _mm512_and_si512(moved, _mm512_set1_epi32(15));
        return _mm512_cvtepi32_ps(_mm512_sub_epi32(code, _mm512_castps_si512(zero)));
      } else {
        return _mm512_permutexvar_ps(moved, zero);
      }
    }
  };
  template <bool zeros>
  struct ByteWords : Words {
    using Zero = __m512i;
    static Zero zero(const char* p) {
      return zeros ? _mm512_cvtepi8_epi32(load_bytes(p)) : _mm512_setzero_si512();
    }
    V unit(int u, Zero zero) const {
      const auto shift = static_cast<unsigned>(byte_shift(u));
      const __m512i code = _mm512_srai_epi32(_mm512_slli_epi32(words, shift), 24);
      return _mm512_cvtepi32_ps(zeros ? _mm512_sub_epi32(code, zero) : code);
    }
  };

  template <class Elem>
  struct Dot {
    static constexpr int kPair = 1;
    static V dot(V acc, V a, V b) { return fma(a, b, acc); }
    static V dot_at(V acc, V a, const void* unit) { return fma(a, broadcast(unit), acc); }
    using Nibbles = Avx512::Nibbles;
    using Bytes = Avx512::Bytes;
    template <bool zeros>
    using NibbleWords = Avx512::NibbleWords<zeros>;
    template <bool zeros>
    using ByteWords = Avx512::ByteWords<zeros>;
  };

 private:
  static __m256i as_halves(const void* p) {
    const __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_bytes(p)), 7);
    return _mm256_and_si256(moved, _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
  }
};

#ifdef SPECATTN_BF16
template <class Stored>
struct Bf16Units;  // bytes_avx512.h
template <bool zeros>
struct Bf16NibbleWords;  // words_avx512.h
template <bool zeros>
struct Bf16ByteWords;  // the same

struct Avx512Bf16 : Avx512 {
  // Elements of a cache of 8 bits, in pairs.
  template <class Stored>
  using Units = Bf16Units<Stored>;
  using Avx512::store_as;
  static void store_as(bf16* p, V v) {
    const __m256i x = (__m256i)_mm512_cvtneps_pbh(v);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x);
  }
  template <class Elem>
  struct Dot : Avx512::Dot<Elem> {};
};

// A unit holds two neighbours: along D for the scores, along the keys for the values.
template <>
struct Avx512Bf16::Dot<bf16> {
  static constexpr int kPair = 2;
  static __m512 dot(__m512 acc, __m512 a, __m512 b) {
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
  }
  // A compiler broadcasts to a register first, which takes half as long as the product again.
  static __m512 dot_at(__m512 acc, __m512 a, const void* unit) {
    using Unit __attribute__((may_alias)) = uint32_t;
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(a), "m"(*static_cast<const Unit*>(unit)));
    return acc;
  }
  // As Avx512's, in order: numbers of at most eight bits, exactly.
  struct Nibbles {
    using Zero = __m512i;
    static Zero zero(const void* p) {
      return _mm512_broadcast_i64x4(_mm256_loadu_si256(
          reinterpret_cast<const __m256i*>(kNibbleHalves + kMostNibble - nibble(p))));
    }
    explicit Nibbles(const void* p) : words(_mm512_loadu_si512(p)) {}
    void numbers(int chunk, Zero zero, __m512* to) const {
      const auto shift = static_cast<unsigned>(kNibbleBits * chunk);
      const __m512i codes = _mm512_srli_epi16(words, shift);
      to[0] = _mm512_castsi512_ps(_mm512_permutexvar_epi16(codes, zero));
    }
    __m512i words;
  };
  struct Bytes : Avx512::Bytes {
    using Avx512::Bytes::Bytes;
    void numbers(int chunk, Zero zero, __m512* to) const {
      __m512 two[2];
      Avx512::Bytes::numbers(chunk, zero, two);
      to[0] = (__m512)_mm512_cvtne2ps_pbh(two[1], two[0]);
    }
  };
  template <bool zeros>
  using NibbleWords = Bf16NibbleWords<zeros>;
  template <bool zeros>
  using ByteWords = Bf16ByteWords<zeros>;
  static __m512 pair(__m512 low, __m512 high) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(interleave_order(), both));
  }
  // Two vectors of units of two value rows, each made of quarters of four columns: the first,
  // third, fifth and seventh four, and the others. It takes one instruction a vector, the right
  // order two.
  static void load_pair(const char* a, const char* b, int column, __m512* units) {
    const __m512i x = _mm512_loadu_si512(a + 2 * column), y = _mm512_loadu_si512(b + 2 * column);
    units[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(x, y));
    units[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(x, y));
  }
  // The same of `count` columns; the others are zero.
  static void load_pair(const char* a, const char* b, int column, int count, __m512* units) {
    const __mmask32 in = static_cast<__mmask32>((uint64_t{1} << count) - 1);
    const __m512i x = _mm512_maskz_loadu_epi16(in, a + 2 * column);
    const __m512i y = _mm512_maskz_loadu_epi16(in, b + 2 * column);
    units[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(x, y));
    units[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(x, y));
  }
  // Puts the quarters of two vectors in the order of their columns.
  static void in_order(__m512* two) {
    const __m512 odd = two[0], even = two[1];
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    two[0] = _mm512_permutex2var_ps(odd, low, even);
    two[1] = _mm512_permutex2var_ps(odd, high, even);
  }
  // Units of two value rows, D rounded up to 32, the rest zero.
  static void pair_rows(const bf16* a, const bf16* b, float* units, int D) {
    const char *const x = reinterpret_cast<const char*>(a), *const y =
                                                                reinterpret_cast<const char*>(b);
    for (int d = 0; d < D; d += 32) {
      __m512 pair[2];
      if (D - d >= 32) {
        load_pair(x, y, d, pair);
      } else {
        load_pair(x, y, d, D - d, pair);
      }
      in_order(pair);
      Avx512::store(units + d, pair[0]), Avx512::store(units + d + 16, pair[1]);
    }
  }

 private:
  // 0, 16, 1, 17, ...
  static __m512i interleave_order() {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i high = _mm512_add_epi32(lane, _mm512_set1_epi32(16));
    return _mm512_or_si512(lane, _mm512_slli_epi32(high, 16));
  }
};

// For processors that multiply two whole vectors in a cycle, and load two: there products that load
// their own unit wait for loads. One load serves all products that take it; the bits are the same.
struct Avx512Bf16Wide : Avx512Bf16 {
  static constexpr bool kPrefetchesInOrder = true;
  template <class Elem>
  struct Dot : Avx512Bf16::Dot<Elem> {
    static V dot_at(V acc, V a, const void* unit) {
      V loaded = broadcast(unit);
      asm("" : "+v"(loaded));  // a compiler would give it back to the products
      return Avx512Bf16::Dot<Elem>::dot(acc, a, loaded);
    }
  };
};
#endif

}  // namespace specattn

#ifdef SPECATTN_BF16
#include "bytes_avx512.h"
#include "words_avx512.h"
#endif
