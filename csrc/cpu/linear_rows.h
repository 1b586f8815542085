// Products of a few packed rows of x with rows of weights, as they lie in memory.
//
// A sum is one vector of partial sums along K, whatever rows are multiplied beside it. Vectors of
// partial sums are kept until the lanes of a whole vector of outputs can be added together.
#pragma once

#include <algorithm>

#include "convert.h"
#include "kernels.h"
#include "linear.h"

namespace specattn {

constexpr int64_t kRowBytes = 16384;  // of packed x in one go: half of an L1 cache

// Rows of x that are multiplied at once, of so many that are left: 1, 2, 4 or 8.
template <class Isa>
constexpr int rows_at_once(int64_t left) {
  constexpr int kMost = Isa::kScoreAccumulators >= 16 ? kMostRowsAtOnce : kMostRowsAtOnce / 2;
  int rows = 1;
  while (rows < left && rows < kMost) rows *= 2;
  return rows;
}

template <class Isa, class Elem>
struct FewRows {
  using V = typename Isa::V;
  using Dot = typename Isa::template Dot<Elem>;
  static constexpr int W = Isa::W, kStep = W * Dot::kPair;  // elements of a vector
  // What a block of rows is multiplied with: elements, or pairs of them as they lie in memory.
  using Unit = std::conditional_t<Dot::kPair == 1, Elem, float>;

  static V load(const Elem* p) {
    if constexpr (Dot::kPair == 1) {
      return Isa::load_as_float(p);
    } else {
      return Isa::load(reinterpret_cast<const float*>(p));
    }
  }

  // The last elements of a row, and zeros.
  static V load_some(const Elem* p, int64_t count) {
    Elem some[kStep] = {};
    std::copy(p, p + count, some);
    return load(some);
  }

  // Per block of rows [vector along K][row][lane].
  static void pack(const Linear& p, float* to) {
    for (int64_t first = 0; first < p.M;) {
      const int rows = rows_at_once<Isa>(p.M - first);
      for (int r = 0; r < rows; ++r) {
        const Elem* from = static_cast<const Elem*>(p.x) + (first + r) * p.x_row;
        float* at = to + r * W;
        for (int64_t k = 0; k < p.K; k += kStep, at += rows * W) {
          const int64_t count = first + r < p.M ? std::min<int64_t>(kStep, p.K - k) : 0;
          Isa::store(at, count == kStep ? load(from + k) : load_some(from + k, count));
        }
      }
      first += rows;
      to += rows * W * ceil_div(p.K, kStep);
    }
  }

  // sums[row][column] of `count` rows of weights; columns are padded to a whole vector.
  template <int rows>
  static void multiply(const Linear& p, const float* x, const Linear::Weights& weights,
                       int64_t first, int count, float (*sums)[kMostColumns]) {
    constexpr int kColumns = rows * 4 <= Isa::kScoreAccumulators ? 4 : 2;
    alignas(64) float partial[rows][kMostColumns][W];
    const Elem* w = static_cast<const Elem*>(weights.data) + first * weights.stride;
    const int each = static_cast<int>(ceil_div(count, kColumns));
    const int64_t step = std::max<int64_t>(kRowBytes / (4 * rows * W), 1) * kStep;
    for (int64_t k = 0; k < p.K; k += step) {
      const int64_t depth = std::min(step, p.K - k);
      for (int i = 0; i < each; ++i) {
        const Elem* at[kColumns];
        float* to[kColumns];
        for (int c = 0; c < kColumns; ++c) {
          const int column = c * each + i;
          at[c] = w + std::min(column, count - 1) * weights.stride + k;
          to[c] = partial[0][column];
        }
        add<rows, kColumns>(x + k / kStep * rows * W, at, depth, k > 0, to);
      }
    }
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < count; c += W) {
        V lanes[W];
        for (int i = 0; i < W; ++i) lanes[i] = Isa::load(partial[r][c + i]);
        Isa::store(sums[r] + c, Isa::sum_each(lanes));
      }
    }
  }

 private:
  // Adds products over `depth` elements to partial sums, kMostColumns * W floats from row to row.
  template <int rows, int columns>
  static void add(const float* x, const Elem* const* w, int64_t depth, bool more,
                  float* const* partial) {
    constexpr int kRow = kMostColumns * W;
    V acc[rows][columns];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < columns; ++c) {
        acc[r][c] = more ? Isa::load(partial[c] + r * kRow) : Isa::zero();
      }
    }
    const auto step = [&](auto&& weight) {
      V v[columns];
#pragma GCC unroll 4
      for (int c = 0; c < columns; ++c) v[c] = weight(w[c]);
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) {
        const V row = Isa::load(x + r * W);
#pragma GCC unroll 4
        for (int c = 0; c < columns; ++c) acc[r][c] = Dot::dot(acc[r][c], v[c], row);
      }
      x += rows * W;
    };
    int64_t k = 0;
    for (; k + kStep <= depth; k += kStep) step([k](const Elem* row) { return load(row + k); });
    if (k < depth) step([k, depth](const Elem* row) { return load_some(row + k, depth - k); });
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < columns; ++c) Isa::store(partial[c] + r * kRow, acc[r][c]);
    }
  }
};

}  // namespace specattn
