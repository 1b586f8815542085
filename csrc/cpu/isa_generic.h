// Any machine: vectors of four floats in the compiler's own notation.
//
// An Isa is the whole of what a processor may say about a kernel: load, convert, dot, exp's parts
// and masks. `Dot<Elem>` says how keys and values of a type are multiplied: `kPair` elements that
// lie together make one 32-bit unit, and `dot_at` takes one unit for all lanes.
#pragma once

#include "codes.h"
#include "convert.h"
#include "types.h"

namespace specattn {

struct Generic {
  static constexpr int W = 4;
  static constexpr bool kPrefetchesInOrder = false;
  struct Tiles {};  // what a thread sets up for a task
  // Register blocks: vectors of rows and of D, accumulators and units of a step of scores, rows of
  // a step of values.
  static constexpr int kScoreRows = 2, kValueCols = 2, kScoreAccumulators = 12;
  static constexpr int kScoreUnits = 1, kValueRows = 4;
  typedef float V __attribute__((vector_size(16)));
  typedef int32_t I __attribute__((vector_size(16)));
  using M = I;

  static V zero() { return V{}; }
  static V set1(float x) { return V{x, x, x, x}; }
  static V load(const float* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  // Lane i is p[i * stride].
  static V load_strided(const float* p, int stride) {
    return V{p[0], p[stride], p[2 * stride], p[3 * stride]};
  }
  // Lane i of rows[r] is p[i * stride + r].
  static void load_four_rows(const float* p, int stride, V* rows) {
    for (int r = 0; r < 4; ++r) rows[r] = load_strided(p + r, stride);
  }
  static V broadcast(const void* p) {
    float x;
    std::memcpy(&x, p, sizeof x);
    return set1(x);
  }
  static void store(float* p, V v) { std::memcpy(p, &v, sizeof v); }
  static V add(V a, V b) { return a + b; }
  static V sub(V a, V b) { return a - b; }
  static V mul(V a, V b) { return a * b; }
  static V div(V a, V b) { return a / b; }
  static V fma(V a, V b, V c) { return a * b + c; }
  static V max(V a, V b) { return a > b ? a : b; }
  static M less(V a, V b) { return a < b; }
  static M bit(const uint32_t* words, int n) {
    I w;
    std::memcpy(&w, words, sizeof w);
    return (w & static_cast<int32_t>(1u << n)) != 0;
  }
  static V select(M m, V a, V b) { return m ? a : b; }
  static V round(V a) {
    const V magic = set1(12582912.0f);  // 1.5 * 2^23: adding it drops the fraction
    return (a + magic) - magic;
  }
  static constexpr bool kScalesFar = false;
  // a * 2^n for integral n in [-126, 127].
  static V scale2(V a, V n) {
    const I exponent = (__builtin_convertvector(n, I) + 127) << 23;
    V power;
    std::memcpy(&power, &exponent, sizeof power);
    return a * power;
  }
  static float sum(V a) { return (a[0] + a[1]) + (a[2] + a[3]); }
  static V sum_each(const V* a) { return V{sum(a[0]), sum(a[1]), sum(a[2]), sum(a[3])}; }
  static float greatest(V a) {
    const float low = a[0] > a[1] ? a[0] : a[1], high = a[2] > a[3] ? a[2] : a[3];
    return low > high ? low : high;
  }
  static M mask(uint32_t bits) { return (I{1, 2, 4, 8} & static_cast<int32_t>(bits)) != 0; }

  template <class Elem>
  static V load_as_float(const Elem* p) {
    return V{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
  }
  template <class Elem>
  static V load_units(const Elem* p) {
    return mul(load_as_float(p), set1(1.0f / kUnit<Elem>));
  }
  static bool holds_nan(const char* const* rows, int count, int D) {
    return words_hold_nan(rows, count, D);
  }
  template <class Elem>
  static void load_two_units(const Elem* p, V* two) {
    two[0] = load_units(p), two[1] = load_units(p + W);
  }
  template <class Elem>
  static void store_as(Elem* p, V v) {
    for (int i = 0; i < W; ++i) p[i] = from_float<Elem>(v[i]);
  }

  // 128 codes of weights, of which 32 at a time become numbers, less a zero point: of 4 bits those
  // in even places of 8, then the others.
  struct Nibbles {
    using Zero = int;
    static Zero zero(const void* p) { return nibble(p); }

    explicit Nibbles(const void* p) { std::memcpy(words, p, sizeof words); }
    void numbers(int chunk, Zero zero, V* to) const {
      for (int i = 0; i < kChunkCodes; ++i) {
        const int word = i / (2 * W) * (2 * W) + i % W * 2 + i / W % 2;
        to[i / W][i % W] = static_cast<float>((words[word] >> kNibbleBits * chunk & 15) - zero);
      }
    }
    uint16_t words[kChunkCodes];
  };
  struct Bytes {
    using Zero = int;
    static Zero zero(const void* p) { return *static_cast<const int8_t*>(p); }

    explicit Bytes(const void* p) : codes(static_cast<const int8_t*>(p)) {}
    void numbers(int chunk, Zero zero, V* to) const {
      for (int i = 0; i < kChunkCodes; ++i) {
        to[i / W][i % W] = static_cast<float>(codes[kChunkCodes * chunk + i] - zero);
      }
    }
    const int8_t* codes;
  };

  // Words of a tile of codes (codes.h), of which unit u is multiplied with unit u of x: the numbers
  // of codes less zero points, or less the middle.
  struct Words {
    typedef uint32_t U __attribute__((vector_size(16)));
    using Zero = I;
    void load(const void* p, Zero) { std::memcpy(&words, p, sizeof words); }
    U words;
  };
  template <bool zeros>
  struct NibbleWords : Words {
    static Zero zero(const char* p) {
      return zeros ? I{nibble(p), nibble(p + 1), nibble(p + 2), nibble(p + 3)} : I{} + kMiddle;
    }
    V unit(int u, Zero zero) const {
      const U code = words >> nibble_shift(u) & 15;
      return __builtin_convertvector((I)code - zero, V);
    }
  };
  template <bool zeros>
  struct ByteWords : Words {
    static Zero zero(const char* p) {
      const signed char* const z = reinterpret_cast<const signed char*>(p);
      return zeros ? I{z[0], z[1], z[2], z[3]} : I{};
    }
    V unit(int u, Zero zero) const {
      return __builtin_convertvector(((I)(words << byte_shift(u)) >> 24) - zero, V);
    }
  };

  template <class Elem>
  struct Dot {
    static constexpr int kPair = 1;
    static V dot(V acc, V a, V b) { return fma(a, b, acc); }
    static V dot_at(V acc, V a, const void* unit) { return fma(a, broadcast(unit), acc); }
    using Nibbles = Generic::Nibbles;
    using Bytes = Generic::Bytes;
    template <bool zeros>
    using NibbleWords = Generic::NibbleWords<zeros>;
    template <bool zeros>
    using ByteWords = Generic::ByteWords<zeros>;
  };
};

}  // namespace specattn
