// The two products of attention on one tile of packed query rows and one block of keys.
//
// Scores are made transposed, S^T = K Q^T: lanes are query rows, so K is read as it lies in the
// cache (one unit broadcast at a time), and the softmax runs down the lanes without a shuffle.
// Values are O = P V: lanes are the dimensions of a head.
#pragma once

#include <algorithm>
#include <type_traits>

#include "prefetch.h"
#include "types.h"

namespace specattn {

constexpr int kScoreTick = 4;  // units of a row of K between two looks ahead; D is a multiple
constexpr int kValueTick = 4;  // units of values
constexpr int kTileCols = 2;   // vectors of a row of V: as many as two rows of bfloat16 make

template <int N>
using Width = std::integral_constant<int, N>;

// What goes on beside the products of some keys: prefetches, and with others than this, copies of
// the keys that follow; sums become logits of the r-th key.
struct Alone {
  Prefetch::Lines lines;

  static Alone beside(int, int, Prefetch::Lines lines) { return {lines}; }
  void touch(int tick) const { lines.touch(tick); }
  template <class Isa>
  static typename Isa::V meant(typename Isa::V sum, int) {
    return sum;
  }
};

// Logits of NR keys and MB vectors of rows.
template <class Isa, class Dot, int MB, int NR, class Beside>
__attribute__((noinline)) void score_step(const float* q, int rows, const char* const* k, int units,
                                          float* s, Beside beside) {
  using V = typename Isa::V;
  constexpr int NU = Isa::kScoreUnits;
  V acc[NR][MB];
#pragma GCC unroll 16
  for (int r = 0; r < NR; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < MB; ++j) acc[r][j] = Isa::zero();
  for (int first = 0; first < units; first += kScoreTick) {
    beside.touch(first / kScoreTick);
#pragma GCC unroll 4
    for (int u = first; u < first + kScoreTick; u += NU) {
      V x[NU][MB];
#pragma GCC unroll 4
      for (int i = 0; i < NU; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < MB; ++j) x[i][j] = Isa::load(q + (u + i) * rows + j * Isa::W);
#pragma GCC unroll 16
      for (int r = 0; r < NR; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < NU; ++i)
#pragma GCC unroll 4
          for (int j = 0; j < MB; ++j)
            acc[r][j] = Dot::dot_at(acc[r][j], x[i][j], k[r] + 4 * (u + i));
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < NR; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < MB; ++j) {
      Isa::store(s + r * kTile + j * Isa::W, beside.template meant<Isa>(acc[r][j], r));
    }
}

template <class Isa, class Dot, int MB, class Copy>
inline void score_columns(const float* q, int rows, const char* const* k, int keys, int units,
                          float* s, Prefetch& prefetch, const Copy& copy) {
  constexpr int NR = std::min(Isa::kScoreAccumulators / MB, kKeyStep), kFew = kKeyStep / 2;
  int n = 0;
  for (; keys - n > kFew; n += NR) {
    score_step<Isa, Dot, MB, NR>(q, rows, k + n, units, s + n * kTile,
                                 copy.beside(n, NR, prefetch.take(units / kScoreTick)));
  }
  if (n >= keys) return;
  score_step<Isa, Dot, MB, kFew>(q, rows, k + n, units, s + n * kTile,
                                 copy.beside(n, kFew, prefetch.take(units / kScoreTick)));
}

// s[key][row] = k[key] . q[row]; q is packed [unit][rows], rows a multiple of W.
template <class Isa, class Dot, class Copy = Alone>
inline void score_tile(const float* q, int rows, const char* const* k, int keys, int units,
                       float* s, Prefetch& prefetch, const Copy& copy = {}) {
  int row = 0;
  const auto columns = [&](auto width) {
    constexpr int MB = decltype(width)::value;
    score_columns<Isa, Dot, MB>(q + row, rows, k, keys, units, s + row, prefetch, copy);
    row += MB * Isa::W;
  };
  while (rows - row >= Isa::kScoreRows * Isa::W) columns(Width<Isa::kScoreRows>{});
  if constexpr (Isa::kScoreRows > 2) {
    if (rows - row == 3 * Isa::W) columns(Width<3>{});
    if (rows - row == 2 * Isa::W) columns(Width<2>{});
  }
  if (rows - row == Isa::W) columns(Width<1>{});
}

// acc[row] = acc[row] * alpha[row] + `times` the sum over units of p[unit][row] * v[unit], for R
// rows.
template <class Isa, class Values, int R, int DB>
__attribute__((noinline)) void value_step(const float* p, Values v, int units, const float* alpha,
                                          float times, float* acc, int column, int stride,
                                          Prefetch::Lines lines) {
  using V = typename Isa::V;
  V pv[R][DB];
  acc += column;
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int j = 0; j < DB; ++j) pv[r][j] = Isa::zero();
  for (int u = 0; u < units; ++u) {
    if (u % kValueTick == 0) lines.touch(u / kValueTick);
    V y[DB];
    v.load(u, column, y);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int j = 0; j < DB; ++j)
        pv[r][j] = Values::Dot::dot_at(pv[r][j], y[j], p + u * kTile + r);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    Values::in_order(pv[r]);
    const V factor = Isa::set1(alpha[r]);
#pragma GCC unroll 2
    for (int j = 0; j < DB; ++j) {
      float* at = acc + r * stride + j * Isa::W;
      if (times != 1.0f) pv[r][j] = Isa::mul(pv[r][j], Isa::set1(times));
      Isa::store(at, Isa::fma(Isa::load(at), factor, pv[r][j]));
    }
  }
}

// Rows of units side by side, as a copy or a cache of floats has them.
template <class Isa, class Dot_>
struct UnitRows {
  using Dot = Dot_;
  static constexpr bool kSingle = true;  // loads one vector, too
  const char* const* rows;

  static void in_order(typename Isa::V*) {}

  template <int DB>
  void load(int u, int column, typename Isa::V (&y)[DB]) const {
    const float* at = reinterpret_cast<const float*>(rows[u]) + column;
#pragma GCC unroll 2
    for (int j = 0; j < DB; ++j) y[j] = Isa::load(at + j * Isa::W);
  }
};

// Rows of elements as they lie in the cache, two to a unit.
template <class Isa, class Dot_>
struct PairedRows {
  using Dot = Dot_;
  static constexpr bool kSingle = false;
  const char* const* rows;

  static void in_order(typename Isa::V* two) { Dot::in_order(two); }

  void load(int u, int column, typename Isa::V (&y)[2]) const {
    Dot::load_pair(rows[2 * u], rows[2 * u + 1], column, y);
  }
};

// O += P V of `columns` of D, a multiple of W, and with PairedRows of 2 W. The first rows take
// `first` for v.
template <class Isa, class First, class Values>
inline void value_tile(const float* p, int rows, First first, Values v, int units,
                       const float* alpha, float times, float* acc, int columns, int stride,
                       Prefetch& prefetch) {
  const auto step = [&](int row, int column, auto count, auto width) {
    const auto multiply = [&](auto values) {
      value_step<Isa, decltype(values), decltype(count)::value, decltype(width)::value>(
          p + row, values, units, alpha + row, times, acc + row * stride, column, stride,
          prefetch.take(static_cast<int>(ceil_div(units, kValueTick))));
    };
    row == 0 ? multiply(first) : multiply(v);
  };
  const auto all_rows = [&](int column, auto width) {
    constexpr int R = Isa::kValueRows, kWhole = R % 4 == 0 ? R : 2 * R;
    int row = 0;  // a multiple of four, so that none beyond the padding is touched
    for (; rows - row > kWhole - 4; row += kWhole) {
      for (int r = 0; r < kWhole; r += R) step(row + r, column, Width<R>{}, width);
    }
    for (; row < rows; row += 4) step(row, column, Width<4>{}, width);
  };
  int column = 0;
  for (; columns - column >= kTileCols * Isa::W; column += kTileCols * Isa::W) {
    all_rows(column, Width<kTileCols>{});
  }
  if constexpr (Values::kSingle) {
    if (column < columns) all_rows(column, Width<1>{});
  }
}

// Steps of the products of a block and all its rows.
template <class Isa>
inline int tile_steps(int64_t rows, int64_t keys, int64_t columns) {
  const int64_t scores = ceil_div(rows, Isa::kScoreRows * Isa::W) * ceil_div(keys, kKeyStep);
  const int64_t values = ceil_div(rows, Isa::kValueRows) * ceil_div(columns, kTileCols * Isa::W);
  return static_cast<int>(scores + values);
}

}  // namespace specattn
