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

constexpr int kKeyStep = 8;    // pointer arrays are padded so that a last step may read on
constexpr int kScoreTick = 4;  // units of a row of K between two looks ahead; D is a multiple
constexpr int kValueTick = 4;  // units of values

template <int N>
using Width = std::integral_constant<int, N>;

// Logits of NR keys and MB vectors of rows.
template <class Isa, class Dot, int MB, int NR>
__attribute__((noinline)) void score_step(const float* q, int rows, const char* const* k, int units,
                                          float* s, Prefetch::Lines lines) {
  using V = typename Isa::V;
  V acc[NR][MB];
#pragma GCC unroll 16
  for (int r = 0; r < NR; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < MB; ++j) acc[r][j] = Isa::zero();
  for (int first = 0; first < units; first += kScoreTick) {
    lines.touch(first / kScoreTick);
#pragma GCC unroll 4
    for (int u = first; u < first + kScoreTick; ++u) {
      V x[MB];
#pragma GCC unroll 4
      for (int j = 0; j < MB; ++j) x[j] = Isa::load(q + u * rows + j * Isa::W);
#pragma GCC unroll 16
      for (int r = 0; r < NR; ++r) {
        const V y = Isa::broadcast(k[r] + 4 * u);
#pragma GCC unroll 4
        for (int j = 0; j < MB; ++j) acc[r][j] = Dot::dot(acc[r][j], x[j], y);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < NR; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < MB; ++j) Isa::store(s + r * kTile + j * Isa::W, acc[r][j]);
}

template <class Isa, class Dot, int MB>
inline void score_columns(const float* q, int rows, const char* const* k, int keys, int units,
                          float* s, Prefetch& prefetch) {
  constexpr int NR = std::min(Isa::kScoreAccumulators / MB, kKeyStep), kFew = kKeyStep / 2;
  int n = 0;
  for (; keys - n > kFew; n += NR) {
    score_step<Isa, Dot, MB, NR>(q, rows, k + n, units, s + n * kTile,
                                 prefetch.take(units / kScoreTick));
  }
  if (n >= keys) return;
  score_step<Isa, Dot, MB, kFew>(q, rows, k + n, units, s + n * kTile,
                                 prefetch.take(units / kScoreTick));
}

// s[key][row] = k[key] . q[row]; q is packed [unit][rows], rows a multiple of W.
template <class Isa, class Dot>
inline void score_tile(const float* q, int rows, const char* const* k, int keys, int units,
                       float* s, Prefetch& prefetch) {
  int row = 0;
  const auto columns = [&](auto width) {
    constexpr int MB = decltype(width)::value;
    score_columns<Isa, Dot, MB>(q + row, rows, k, keys, units, s + row, prefetch);
    row += MB * Isa::W;
  };
  while (rows - row >= Isa::kScoreRows * Isa::W) columns(Width<Isa::kScoreRows>{});
  if constexpr (Isa::kScoreRows > 2) {
    if (rows - row == 3 * Isa::W) columns(Width<3>{});
    if (rows - row == 2 * Isa::W) columns(Width<2>{});
  }
  if (rows - row == Isa::W) columns(Width<1>{});
}

// Weights p of a row and unit, wherever a softmax left them.
struct Weights {  // or logits
  const float* p;
  int row_step, unit_step;
};

// acc[row] = acc[row] * alpha[row] + sum over units of p[unit][row] * v[unit], for four rows.
template <class Isa, class Dot, int DB>
__attribute__((noinline)) void value_step(Weights p, const char* const* v, int units,
                                          const float* alpha, float* acc, int column, int stride,
                                          Prefetch::Lines lines) {
  using V = typename Isa::V;
  V pv[4][DB];
  acc += column;
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < DB; ++j) pv[r][j] = Isa::zero();
  for (int u = 0; u < units; ++u) {
    if (u % kValueTick == 0) lines.touch(u / kValueTick);
    V y[DB];
#pragma GCC unroll 4
    for (int j = 0; j < DB; ++j)
      y[j] = Isa::load(reinterpret_cast<const float*>(v[u]) + column + j * Isa::W);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const V x = Isa::broadcast(p.p + u * p.unit_step + r * p.row_step);
#pragma GCC unroll 4
      for (int j = 0; j < DB; ++j) pv[r][j] = Dot::dot(pv[r][j], x, y[j]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
    const V factor = Isa::set1(alpha[r]);
#pragma GCC unroll 4
    for (int j = 0; j < DB; ++j) {
      float* at = acc + r * stride + j * Isa::W;
      Isa::store(at, Isa::fma(Isa::load(at), factor, pv[r][j]));
    }
  }
}

template <class Isa, class Dot>
inline void value_tile(Weights p, int rows, const char* const* v, int units, const float* alpha,
                       float* acc, int stride, Prefetch& prefetch) {
  int column = 0;
  const auto columns = [&](auto width) {
    constexpr int DB = decltype(width)::value;
    for (int r = 0; r < rows; r += 4) {
      const Weights four = {p.p + r * p.row_step, p.row_step, p.unit_step};
      value_step<Isa, Dot, DB>(four, v, units, alpha + r, acc + r * stride, column, stride,
                               prefetch.take(static_cast<int>(ceil_div(units, kValueTick))));
    }
    column += DB * Isa::W;
  };
  while (stride - column >= Isa::kValueCols * Isa::W) columns(Width<Isa::kValueCols>{});
  while (stride - column >= Isa::W) columns(Width<1>{});
}

// How often the products of a block and all its rows look ahead.
template <class Isa>
inline int tile_ticks(int64_t rows, int64_t keys, int64_t units, int64_t value_units,
                      int64_t stride) {
  const int64_t steps = ceil_div(rows, Isa::kScoreRows * Isa::W) * ceil_div(keys, kKeyStep);
  const int64_t values = rows / 4 * (stride / (Isa::kValueCols * Isa::W));
  return static_cast<int>(std::max<int64_t>(
      steps * (units / kScoreTick) + values * ceil_div(value_units, kValueTick), 1));
}

}  // namespace specattn
