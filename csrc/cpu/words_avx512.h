// Words of tiles of codes (codes.h) as pairs of bfloat16, which holds every code less its zero
// point exactly.
#pragma once

#include "isa_avx512.h"

namespace specattn {

template <bool zeros>
struct Bf16NibbleWords : Avx512::Words {
  struct Zero {
    __m512i numbers, add;  // of codes, from the place that is added to each on
  };
  static Zero zero(const char* p) {
    if constexpr (zeros) {
      const __m512i zero = _mm512_cvtepu8_epi32(Avx512::load_bytes(p));
      const __m512i place = _mm512_sub_epi32(_mm512_set1_epi32(kMostNibble), zero);
      return {_mm512_loadu_si512(kNibbleHalves),
              _mm512_or_si512(place, _mm512_slli_epi32(place, 16))};
    } else {
      const uint16_t* const from = kNibbleHalves + kMostNibble - kMiddle;
      const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      return {_mm512_broadcast_i64x4(all), _mm512_setzero_si512()};
    }
  }
  __m512 unit(int u, const Zero& zero) const {
    __m512i code = _mm512_srli_epi16(words, static_cast<unsigned>(kNibbleBits * u));
    if constexpr (zeros) {
      code = _mm512_add_epi16(_mm512_and_si512(code, _mm512_set1_epi16(kMostNibble)), zero.add);
    }
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(code, zero.numbers));
  }
};

// Both bytes of magnitudes of int8 as bfloat16.
struct Bf16Magnitudes {
  uint8_t low[128] = {}, high[128] = {};

  constexpr Bf16Magnitudes() {
    for (int x = 1; x < 128; ++x) {
      int top = 0;
      while (x >> (top + 1)) ++top;
      const int bits = (top + 127) << 7 | ((x << (7 - top)) & 0x7f);
      low[x] = static_cast<uint8_t>(bits & 0xff), high[x] = static_cast<uint8_t>(bits >> 8);
    }
  }
};
alignas(64) inline constexpr Bf16Magnitudes kBf16Magnitudes{};

// Without zero points bytes are looked up by their magnitudes: half as many steps as by way of
// floats.
template <bool zeros>
struct Bf16ByteWords {
  using Zero = __m512i;
  static Zero zero(const char* p) { return Avx512::ByteWords<zeros>::zero(p); }

  void load(const void* p, Zero zero) {
    if constexpr (zeros) {
      Avx512::ByteWords<zeros> words;
      words.load(p, zero);
      for (int i = 0; i < 2; ++i) {
        const __m512i low = _mm512_castps_si512(words.unit(2 * i, zero));
        const __m512i high = _mm512_castps_si512(words.unit(2 * i + 1, zero));
        const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
        units[i] = _mm512_ternarylogic_epi32(_mm512_srli_epi32(low, 16), high, upper, 0xf8);
      }
    } else {
      look_up(_mm512_loadu_si512(p));
    }
  }
  __m512 unit(int u, Zero) const { return _mm512_castsi512_ps(units[u]); }

 private:
  void look_up(__m512i x) {
    const auto& bytes = kBf16Magnitudes;
    const __m512i magnitude = _mm512_abs_epi8(x);  // of -128 its own, which looks up 0
    const auto byte = [&](const uint8_t* table) {
      return _mm512_permutex2var_epi8(_mm512_load_si512(table), magnitude,
                                      _mm512_load_si512(table + 64));
    };
    const __m512i least = _mm512_set1_epi8(-128), top = _mm512_set1_epi8(static_cast<char>(0xc3));
    const __m512i low = byte(bytes.low);
    __m512i high = _mm512_ternarylogic_epi32(byte(bytes.high), x, least, 0xf8);
    high = _mm512_mask_mov_epi8(high, _mm512_cmpeq_epi8_mask(x, least), top);
    // Bytes 0 and 1 of every word, each below its upper byte; then bytes 2 and 3.
    const __m512i first =
        _mm512_set_epi32(0x7d3d7c3c, 0x79397838, 0x75357434, 0x71317030, 0x6d2d6c2c, 0x69296828,
                         0x65256424, 0x61216020, 0x5d1d5c1c, 0x59195818, 0x55155414, 0x51115010,
                         0x4d0d4c0c, 0x49094808, 0x45054404, 0x41014000);
    const __m512i second = _mm512_add_epi8(first, _mm512_set1_epi8(2));
    units[0] = _mm512_permutex2var_epi8(low, first, high);
    units[1] = _mm512_permutex2var_epi8(low, second, high);
  }

  __m512i units[2];
};

}  // namespace specattn
