// AMX: keys and values of bfloat16 are multiplied in tiles of 16 x 16 sums over 32 elements.
//
// S^T = K Q^T takes rows of K as they lie in the cache, and Q packed in pairs along D. O = P V
// takes V in pairs of keys, and P row by row: the softmax turns it over on its way. All other types
// are multiplied as in AVX-512.
#pragma once

#include "amx_tiles.h"
#include "isa_avx512.h"
#include "prefetch.h"
#include "state.h"

namespace specattn {

struct Amx : Avx512Bf16 {
  static constexpr int kEdge = amx::kEdge, kDepth = amx::kDepth;
  using Tiles = amx::Session;

  template <class Elem>
  struct Dot : Avx512Bf16::Dot<Elem> {};

  // Columns of O are in the order of `pair_rows`; back to that of D.
  static void straighten(float* row, int D) {
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    for (int d = 0; d + kDepth <= D; d += kDepth) {
      const __m512i a = _mm512_loadu_si512(row + d), b = _mm512_loadu_si512(row + d + kEdge);
      _mm512_storeu_si512(row + d, _mm512_permutex2var_epi64(a, low, b));
      _mm512_storeu_si512(row + d + kEdge, _mm512_permutex2var_epi64(a, high, b));
    }
  }

  // What a block takes: a tick is a pair of values, half a product or two keys of a softmax.
  static int ticks(int64_t rows, int64_t keys, int64_t D) {
    const int64_t tiles = ceil_div(rows, kEdge), products = ceil_div(keys, kDepth);
    const int64_t scores = 2 * products * ceil_div(D, kDepth);
    const int64_t values = products * ceil_div(D, kEdge);
    return static_cast<int>(keys / 2 + tiles * (2 * scores + kEdge * products + 2 * values));
  }

  // Rows of K side by side and in whole tiles: strides of a cache would share few sets of L1.
  static void copy_keys(const char* const* k, int keys, int D, float* copy) {
    const int stride = static_cast<int>(round_up(D, kDepth)) * 2;
    char* to = reinterpret_cast<char*>(copy);
    for (int n = 0; n < keys; ++n, to += stride) {
      int d = 0;
      for (; d + kDepth <= D; d += kDepth) {
        _mm512_store_si512(to + 2 * d, _mm512_loadu_si512(k[n] + 2 * d));
      }
      if (d == D) continue;
      const __mmask32 in = (uint32_t{1} << (D - d)) - 1;
      _mm512_store_si512(to + 2 * d, _mm512_maskz_loadu_epi16(in, k[n] + 2 * d));
    }
    std::memset(to, 0, static_cast<size_t>(round_up(keys, kEdge) - keys) * stride);
  }

  // s[key][row] = k[key] . q[row] for whole tiles of keys; q is packed [pair][rows].
  static void score_tile(const float* q, int rows, StridedRows k, int keys, int depth, float* s,
                         Prefetch& next) {
    const int tiles = keys / kEdge;
    if (rows == kEdge) {
      if (tiles == 1) scores<1, 1>(q, rows, k, depth, s, next);
      if (tiles == 2) scores<2, 1>(q, rows, k, depth, s, next);
      if (tiles == 3) scores<3, 1>(q, rows, k, depth, s, next);
      if (tiles == 4) scores<4, 1>(q, rows, k, depth, s, next);
      return;
    }
    const int step = rows == 2 * kEdge ? 2 : 1;
    for (int n = 0; n < tiles; n += step) {
      const StridedRows from = {k.first + n * kEdge * k.stride, k.stride};
      float* to = s + n * kEdge * kTile;
      if (rows == 2 * kEdge && n + 1 < tiles) scores<2, 2>(q, rows, from, depth, to, next);
      if (rows == 2 * kEdge && n + 1 == tiles) scores<1, 2>(q, rows, from, depth, to, next);
      if (rows == 3 * kEdge) scores<1, 3>(q, rows, from, depth, to, next);
      if (rows == 4 * kEdge) scores<1, 4>(q, rows, from, depth, to, next);
    }
  }

  // o[row] += sum over keys of p[row][key] * v[key]; p is packed [row][pair], v [pair][stride].
  static void value_tile(const float* p, int rows, const float* v, int pairs, float* o, int stride,
                         Prefetch& next) {
    for (int row = 0; row < rows; row += 2 * kEdge) {
      const bool both = rows - row >= 2 * kEdge;
      const int most = (both ? 2 : 4) * kEdge;
      for (int column = 0; column < stride;) {
        const float* weights = p + row * (kBlock / 2);
        float* to = o + row * stride + column;
        const bool wide = stride - column >= most;
        if (both && wide) values<2, 2>(weights, v + column, pairs, to, stride, next);
        if (both && !wide) values<2, 1>(weights, v + column, pairs, to, stride, next);
        if (!both && wide) values<1, 4>(weights, v + column, pairs, to, stride, next);
        if (!both && !wide) values<1, 1>(weights, v + column, pairs, to, stride, next);
        column += wide ? most : kEdge;
      }
    }
  }

  // Turns logits s[key][row] / scale of one vector of rows into weights p[row][pair], for a whole
  // number of products; false when no row's base moved, so that nothing decays.
  static bool softmax_columns(const float* s, int keys, float scale, float* base, float* sum,
                              float* decay, float* p, Prefetch& next) {
    V top[4] = {set1(-kInf), set1(-kInf), set1(-kInf), set1(-kInf)};
    for (int n = 0; n < keys; n += 4) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) top[i] = max(load(s + (n + i) * kTile), top[i]);
    }
    const Base<Amx> step(load(base), max(max(top[0], top[1]), max(top[2], top[3])), scale);
    V total = zero();
    for (int first = 0; first < keys; first += kDepth) {
      const float* from = s + first * kTile;
      __m512i both[kEdge];  // key i of sixteen rows, then key 16 + i
#pragma GCC unroll 16
      for (int i = 0; i < kEdge; ++i) {
        if (i % 4 == 0) next.tick<Amx>(4);
        const V a = weight_of(from + i * kTile, scale, step.shift);
        const V b = weight_of(from + (kEdge + i) * kTile, scale, step.shift);
        total = add(total, add(a, b));
        both[i] = (__m512i)_mm512_cvtne2ps_pbh(b, a);
      }
      turn(both, p + first / 2);
    }
    store(base, step.now);
    store(sum, fma(load(sum), step.keep, total));
    store(decay, step.keep);
    return _mm512_cmp_ps_mask(step.keep, set1(1.0f), _CMP_NEQ_UQ) != 0;
  }

 private:
  // A tiles of keys against B tiles of rows.
  template <int A, int B>
  static void scores(const float* q, int rows, StridedRows k, int depth, float* s, Prefetch& next) {
    const int64_t row_bytes = 4 * rows;
    amx::Operand left = {k.first, k.stride, kEdge * k.stride};
    amx::Operand right = {reinterpret_cast<const char*>(q), row_bytes, 64};
    amx::zero_all<A * B>();
    for (int d = 0; d < depth; d += kDepth) {
      next.tick<Amx>(2 * A * B);
      amx::multiply_all<A, B>(left, right);
      left.at += 2 * kDepth;
      right.at += kEdge * row_bytes;
    }
    amx::store_all<A, B>(s, kTile);
  }

  // A tiles of rows against B tiles of D.
  template <int A, int B>
  static void values(const float* p, const float* v, int pairs, float* o, int stride,
                     Prefetch& next) {
    amx::Operand left = {reinterpret_cast<const char*>(p), 2 * kBlock, 2 * kBlock * kEdge};
    amx::Operand right = {reinterpret_cast<const char*>(v), 4 * stride, 64};
    amx::load_all<A, B>(o, stride);
    for (int u = 0; u < pairs; u += kEdge) {
      next.tick<Amx>(2 * A * B);
      amx::multiply_all<A, B>(left, right);
      left.at += 4 * kEdge;
      right.at += 4 * kEdge * stride;
    }
    amx::store_all<A, B>(o, stride);
  }

  static V weight_of(const float* s, float scale, V shift) {
    return exp_rough<Amx>(sub(mul(load(s), set1(scale)), shift));
  }

  // Sixteen vectors of (key i, key 16 + i) x sixteen rows become sixteen rows of 32 keys.
  static void turn(const __m512i* both, float* p) {
    __m512i pairs[16], fours[16], eights[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      pairs[i] = _mm512_unpacklo_epi16(both[2 * i], both[2 * i + 1]);
      pairs[8 + i] = _mm512_unpackhi_epi16(both[2 * i], both[2 * i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {  // 4 * half of the rows + half of the keys, low and high rows
      fours[2 * i] = _mm512_unpacklo_epi32(pairs[2 * i], pairs[2 * i + 1]);
      fours[2 * i + 1] = _mm512_unpackhi_epi32(pairs[2 * i], pairs[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        const __m512i a = fours[4 * i + j], b = fours[4 * i + 2 + j];
        eights[4 * i + 2 * j] = _mm512_unpacklo_epi64(a, b);
        eights[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(a, b);
      }
    }
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
    const __m512i high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {  // row i and row 8 + i
      const __m512i a = eights[i / 4 * 8 + i % 4], b = eights[i / 4 * 8 + 4 + i % 4];
      _mm512_storeu_si512(p + i * (kBlock / 2), _mm512_permutex2var_epi64(a, low, b));
      _mm512_storeu_si512(p + (8 + i) * (kBlock / 2), _mm512_permutex2var_epi64(a, high, b));
    }
  }
};

template <>
struct Amx::Dot<bf16> : Avx512Bf16::Dot<bf16> {
  // Units of two value rows, D rounded up to 16, the rest zero. Of each 32 columns the units of
  // 0-3, 8-11, 16-19, 24-27 come first: one instruction a vector, where their order takes three.
  static void pair_rows(const bf16* a, const bf16* b, float* units, int D) {
    int d = 0;
    for (; d + kDepth <= D; d += kDepth) {
      const __m512i x = _mm512_loadu_si512(a + d), y = _mm512_loadu_si512(b + d);
      _mm512_storeu_si512(units + d, _mm512_unpacklo_epi16(x, y));
      _mm512_storeu_si512(units + d + kEdge, _mm512_unpackhi_epi16(x, y));
    }
    if (d < D) Avx512Bf16::Dot<bf16>::pair_rows(a + d, b + d, units + d, D - d);
  }
};

template <>
inline constexpr bool kTiles<Amx, bf16> = true;

}  // namespace specattn
