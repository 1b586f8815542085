// Elements of caches as bfloat16, which holds every number of 8 bits exactly, for products of
// pairs: int8 by way of floats, floats of 8 bits byte by byte from tables.
#pragma once

#include "isa_avx512.h"

namespace specattn {

// Both bytes of a float of 8 bits as bfloat16, by its magnitude.
template <int kMantissa>
struct Bf16Bytes {
  uint8_t low[128] = {}, high[128] = {};

  constexpr Bf16Bytes() {
    for (int x = 0; x < 128; ++x) {
      const int bits = of(x);
      low[x] = static_cast<uint8_t>(bits & 0xff), high[x] = static_cast<uint8_t>(bits >> 8);
    }
  }

 private:
  static constexpr int of(int x) {
    constexpr int kExponents = 1 << (7 - kMantissa), kBias = kExponents / 2 - 1;
    constexpr int kNan = 0x7fc0, kInfinity = 0x7f80;
    if (kMantissa == 3 && x == 0x7f) return kNan;
    int exponent = x >> kMantissa, mantissa = x & ((1 << kMantissa) - 1);
    if (kMantissa == 2 && exponent == kExponents - 1) return mantissa ? kNan : kInfinity;
    if (x == 0) return 0;
    if (exponent == 0) {  // bfloat16 has smaller exponents
      for (exponent = 1; mantissa >> kMantissa == 0; --exponent) mantissa <<= 1;
      mantissa &= (1 << kMantissa) - 1;
    }
    return (exponent - kBias + 127) << 7 | mantissa << (7 - kMantissa);
  }
};

template <int kMantissa>
alignas(64) inline constexpr Bf16Bytes<kMantissa> kBf16Bytes{};

// `load`: 64 neighbours of a row, in order. `load_pair`: 32 columns of two rows, a unit of both at
// each.
template <int kMantissa>
struct FloatBytes {
  static void load(const char* row, __m512* two) {
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    convert(_mm512_permutexvar_epi64(order, _mm512_loadu_si512(row)), two);
  }
  static void load_pair(const char* a, const char* b, int column, __m512* two) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a + column));
    const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + column));
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(x), y, 1);
    convert(_mm512_permutexvar_epi8(pairs(), both), two);
  }

 private:
  // Of each quarter the first eight bytes go to the first vector.
  static void convert(__m512i x, __m512* two) {
    const auto& bytes = kBf16Bytes<kMantissa>;
    const auto look_up = [&](const uint8_t* table) {
      return _mm512_permutex2var_epi8(_mm512_load_si512(table), x, _mm512_load_si512(table + 64));
    };
    const __m512i low = look_up(bytes.low), sign = _mm512_set1_epi8(static_cast<char>(0x80));
    const __m512i high = _mm512_ternarylogic_epi32(look_up(bytes.high), x, sign, 0xf8);
    two[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi8(low, high));
    two[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi8(low, high));
  }
  // 0, 32, 1, 33, .. 3, 35, 16, 48, .. 19, 51, and so on in every quarter.
  static __m512i pairs() {
    return _mm512_setr_epi64(0x2303220221012000, 0x3313321231113010, 0x2707260625052404,
                             0x3717361635153414, 0x2b0b2a0a29092808, 0x3b1b3a1a39193818,
                             0x2f0f2e0e2d0d2c0c, 0x3f1f3e1e3d1d3c1c);
  }
};

template <class Stored>
struct Bf16Of;
template <>
struct Bf16Of<e4m3> : FloatBytes<3> {};
template <>
struct Bf16Of<e5m2> : FloatBytes<2> {};

template <>
struct Bf16Of<int8_t> {
  static void load(const char* row, __m512* two) {
    for (int i = 0; i < 2; ++i) {
      const auto both = _mm512_cvtne2ps_pbh(floats(row + 32 * i + 16), floats(row + 32 * i));
      two[i] = (__m512)both;
    }
  }
  static void load_pair(const char* a, const char* b, int column, __m512* two) {
    for (int i = 0; i < 2; ++i) {
      const __m512i x = _mm512_castps_si512(floats(a + column + 16 * i));
      const __m512i y = _mm512_castps_si512(floats(b + column + 16 * i));
      const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
      const __m512i unit = _mm512_ternarylogic_epi32(_mm512_srli_epi32(x, 16), y, upper, 0xf8);
      two[i] = _mm512_castsi512_ps(unit);
    }
  }

 private:
  static __m512 floats(const char* p) {
    return Avx512::load_as_float(reinterpret_cast<const int8_t*>(p));
  }
};

// As they are: keys of a tree beside such a cache.
template <>
struct Bf16Of<bf16> {
  static void load(const char* row, __m512* two) {
    two[0] = _mm512_loadu_ps(row), two[1] = _mm512_loadu_ps(row + 64);
  }
  static void load_pair(const char* a, const char* b, int column, __m512* two) {
    Avx512Bf16::Dot<bf16>::load_pair(a, b, column, two);
    Avx512Bf16::Dot<bf16>::in_order(two);
  }
};

// The same of a last few elements; the others are zero.
template <class Stored>
struct Bf16Units : Bf16Of<Stored> {
  using Bf16Of<Stored>::load;
  using Bf16Of<Stored>::load_pair;

  static void load(const char* row, int count, __m512* two) { load(Some(row, count).bytes, two); }
  static void load_pair(const char* a, const char* b, int column, int count, __m512* two) {
    const int64_t at = column * static_cast<int64_t>(sizeof(Stored));
    load_pair(Some(a + at, count).bytes, Some(b + at, count).bytes, 0, two);
  }

 private:
  struct Some {
    alignas(64) char bytes[64 * sizeof(Stored)];

    Some(const char* from, int count) {
      for (int i = 0; i < static_cast<int>(sizeof(Stored)); ++i) {
        const int left = count * static_cast<int>(sizeof(Stored)) - 64 * i;
        const __mmask64 in = left <= 0 ? 0 : ~uint64_t{0} >> (64 - (left < 64 ? left : 64));
        _mm512_store_si512(bytes + 64 * i, _mm512_maskz_loadu_epi8(in, from + 64 * i));
      }
    }
  };
};

}  // namespace specattn
